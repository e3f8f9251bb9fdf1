"""Whatever holds a sparse matrix, as a stream of entries: the door of `convert`."""

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from daskfactor.data.adapters import open_source
from daskfactor.data.blocks import BlockedData
from daskfactor.data.matrix_files import open_h5ad, open_matrix_market, open_npz
from daskfactor.data.sparse_source import SparseSource, from_blocks
from daskfactor.data.store import BlockStore, is_blocked_store, zarr_kind
from daskfactor.data.tables import Wanted, open_csv, open_parquet
from daskfactor.errors import DataError, OptionError

TEXT = (".csv", ".tsv", ".txt", ".dat")
PACKED = (".gz", ".bz2", ".zst")
KNOWN = (
    ".csv, .tsv, .txt, .dat or .mtx (also .gz), .parquet (file or folder), .npz, .h5ad, or a "
    "blocked store"
)


def open_sparse(source: Any, wanted: Wanted, layer: str | None = None) -> SparseSource:
    """The entries of a file or of a sparse matrix in memory.

    Raises
    ------
    DataError
        If it is neither.
    """
    if isinstance(source, str | PathLike):
        return _open_path(fspath(source), wanted, layer)
    if layer is not None:
        source = _layer_of(source, layer)
    if isinstance(source, BlockedData) and source.is_sparse:
        return from_blocks(source, source.view)
    found = None if isinstance(source, BlockedData) else open_source(source)
    if not isinstance(found, SparseSource):
        what = "these blocks are" if found is None else f"the {found.info.kind} input is"
        raise DataError(
            f"{what} dense, and convert is for sparse matrices; pass the data to as_blocks or "
            "sample"
        )
    return found


def _open_path(location: str, wanted: Wanted, layer: str | None) -> SparseSource:
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    if "://" not in location:
        location = str(Path(location).expanduser())
        if not Path(location).exists():
            raise DataError(f"{location} does not exist; convert reads {KNOWN}")
    name = location.lower().rstrip("/")
    for ending in PACKED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if layer is not None and suffix != ".h5ad":
        raise OptionError(f"layer is for AnnData (.h5ad), not for {location}")
    openers: dict[str, Callable[[], SparseSource]] = {
        ".parquet": lambda: open_parquet(location, wanted),
        ".pq": lambda: open_parquet(location, wanted),
        ".mtx": lambda: open_matrix_market(location),
        ".npz": lambda: open_npz(location, wanted),
        ".h5ad": lambda: open_h5ad(location, layer),
    }
    openers |= dict.fromkeys(TEXT, lambda: open_csv(location, wanted))
    if suffix in openers:
        return openers[suffix]()
    if is_blocked_store(location):
        store = BlockStore(location)
        return from_blocks(store, store.read)
    if zarr_kind(location) == "run":
        raise DataError(
            f"{location} is a run of daskfactor, not data; pass the data that it was made from"
        )
    if Path(location).is_dir() and any(Path(location).rglob("*.parquet")):
        return open_parquet(location, wanted)
    raise DataError(
        f"{location} is no kind of file that convert reads: {KNOWN}; arrays with an entry in "
        "every cell need no conversion: pass them to as_blocks, sample or daskfactor fit"
    )


def _layer_of(source: Any, layer: str) -> Any:
    """An AnnData object with a layer in the place of X."""
    if type(source).__name__ != "AnnData":
        raise OptionError(f"layer is for AnnData, not for {type(source).__name__}")
    if layer not in source.layers:
        names = ", ".join(source.layers) or "none"
        raise DataError(f"the AnnData object has no layer {layer!r}; its layers are: {names}")
    import anndata

    return anndata.AnnData(source.layers[layer], obs=source.obs[[]], var=source.var[[]])
