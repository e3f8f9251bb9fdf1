"""Whatever holds a sparse matrix, as a stream of triples: the door of `convert`."""

from collections.abc import Callable, Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import SourceInfo
from daskfactor.data.matrix_files import open_h5ad, open_matrix_market, open_npz
from daskfactor.data.sparse_data import open_blocked_store
from daskfactor.data.sparse_reading import row_of_entries
from daskfactor.data.sparse_source import SparseSource
from daskfactor.data.store import is_blocked_store, zarr_kind
from daskfactor.data.tables import Wanted, open_csv, open_parquet
from daskfactor.data.triples import Piece, TripleSource
from daskfactor.errors import DataError, OptionError
from daskfactor.kernels.views import SparseBlock

TEXT = (".csv", ".tsv", ".txt", ".dat")
PACKED = (".gz", ".bz2", ".zst")
KNOWN = (
    ".csv, .tsv, .txt, .dat or .mtx (also .gz), .parquet (file or folder), .npz, .h5ad, or a "
    "blocked store"
)


def open_triples(source: Any, wanted: Wanted, layer: str | None = None) -> TripleSource:
    """The triples of a file or of a sparse matrix in memory.

    Raises
    ------
    DataError
        If it is neither.
    """
    if isinstance(source, str | PathLike):
        return _open_path(fspath(source), wanted, layer)
    if isinstance(source, BlockedData):
        return _of_blocks(source)
    if layer is not None:
        source = _layer_of(source, layer)
    return _of_sparse(_adapted(source))


def _open_path(location: str, wanted: Wanted, layer: str | None) -> TripleSource:
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
    openers: dict[str, Callable[[], TripleSource]] = {
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
        return _of_blocks(open_blocked_store(location))
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


def _adapted(source: Any) -> SparseSource:
    from daskfactor.data.adapters import open_source

    found = open_source(source)
    if not isinstance(found, SparseSource):
        raise DataError(
            f"the {found.info.kind} input is dense, and convert is for sparse matrices; pass it to "
            "as_blocks or sample as it is"
        )
    return found


def _of_sparse(source: SparseSource) -> TripleSource:
    def pieces(with_values: bool) -> Iterator[Piece]:
        for part in source.pieces():
            rows, cols = (np.asarray(side, np.int64) for side in (part.rows, part.cols))
            yield Piece(rows, cols, np.asarray(part.values) if with_values else None)

    return TripleSource(source.info, pieces, source.shape, source.labels, unstored=source.unstored)


def _of_blocks(data: BlockedData) -> TripleSource:
    if not data.is_sparse:
        raise DataError(
            "these blocks are dense, and convert is for sparse matrices; pass them to sample as "
            "they are"
        )

    def pieces(with_values: bool) -> Iterator[Piece]:
        for block in data.grid.all_blocks():
            view = data.view(block.row, block.col)
            assert isinstance(view, SparseBlock)
            row_part, col_part = data.grid.slices(block)
            rows = row_of_entries(view) + row_part.start
            cols = view.indices + np.int64(col_part.start)
            if data.row_order is not None:
                rows = data.row_order[rows]
            if data.col_order is not None:
                cols = data.col_order[cols]
            yield Piece(rows, cols, view.values.copy() if with_values else None)

    return TripleSource(
        SourceInfo("blocks", data.source.location, lazy=True),
        pieces,
        data.shape,
        data.labels,
        int(data.n_stored.sum()),
        data.unstored,
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
