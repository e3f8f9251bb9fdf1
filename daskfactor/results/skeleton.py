"""The empty run store: every array at its full planned size, nothing in it yet.

The metadata of all that a reader should see is also kept in the root's own file
("consolidated", as zarr and xarray read it). That one file therefore decides what
the store looks like: replacing it extends a run in one instant, and what it leaves
out (the folder ``checkpoint``) no reader meets.
"""

from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec

from daskfactor.data.store import zarr_kind
from daskfactor.errors import StoreError, StoreFormatError
from daskfactor.results.checkpoint import CHECKPOINT, NODE, STATE, plain, scratch_folder
from daskfactor.results.files import DurableStore, check_seal, read_json, replace_json, seal
from daskfactor.results.schema import COARSE, FORMAT_VERSION, LIBRARY
from daskfactor.results.spec import Layout, RunSpec, group_coords, layouts, planned_draws

_INDEX: Final = "consolidated_metadata"
# Draws are noise in all but their exponents: measured on 8 MB of float32 draws, zstd
# saves 8 % and lz4 with bit shuffling 11 %, zstd at four times the reading time.
# Plain bytes read and write fastest, and every zarr reader knows them.
_PLAIN: Final = (Crc32cCodec(),)
_PACKED: Final = (ZstdCodec(), Crc32cCodec())
# A chunk of nothing but fill values is written all the same: one that is not there is damage.
_WHOLE: Final = {"array.write_empty_chunks": True}


def write_skeleton(root: Path, spec: RunSpec) -> None:
    """Write an empty run store at ``root``, flushed to disk; attributes and coordinates included.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    scratch_folder(root).mkdir(parents=True)
    store = DurableStore(root, scratch=scratch_folder(root))
    top = zarr.create_group(store=store, zarr_format=3)
    plan = layouts(spec)
    for group in dict.fromkeys(layout.variable.group for layout in plan):
        top.create_group(group)
        _write_coords(store, group, group_coords(group, spec))
    for layout in plan:
        _create_array(top[layout.variable.group], layout)
    if spec.observed is not None:
        open_array(store, "observed_data/V")[...] = spec.observed
    for layout in plan:
        if layout.variable in spec.constants:
            open_array(store, layout.path)[...] = spec.attrs.get(layout.variable.name, np.nan)
        elif layout.variable.name == "count":  # says that there are no moments yet
            open_array(store, layout.path)[...] = 0
    note = "private: what a stopped run needs to go on"
    state = top.create_group(CHECKPOINT, attributes={"description": note})
    dims = ("checkpoint_slot", "checkpoint_byte")
    state.create_array(STATE, shape=(2, 0), chunks=(1, 1), dtype="uint8", dimension_names=dims)
    store.flush()
    _replace_root(root, _document(root, spec))


def open_array(store: DurableStore, path: str) -> Any:
    """Open an array to write it, all of its chunks."""
    with zarr.config.set(_WHOLE):
        return zarr.open_array(store, path=path, mode="r+")


def _create_array(node: Any, layout: Layout) -> None:
    node.create_array(
        layout.variable.name,
        shape=layout.shape,
        chunks=layout.chunks,
        dtype=layout.dtype,
        fill_value=layout.fill,
        dimension_names=layout.dims,
        compressors=_PACKED if layout.variable.kind == "data" else _PLAIN,
        attributes={"description": layout.variable.doc},
    )


def _write_coords(store: DurableStore, group: str, coords: xr.Dataset) -> None:
    # As objects, text gets zarr's string type; fixed-width text has no specification yet.
    text = {
        name: (coord.dims, coord.values.astype(object))
        for name, coord in coords.coords.items()
        if coord.dtype.kind == "U"
    }
    encoding = {name: {"compressors": _PACKED} for name in coords.coords}
    written: Any = coords.assign_coords(text)
    written.to_zarr(
        store,
        group=group,
        mode="a",
        zarr_format=3,
        consolidated=False,
        encoding=encoding,
        write_empty_chunks=True,
    )


def _document(root: Path, spec: RunSpec) -> dict[str, Any]:
    nodes = {
        path.parent.relative_to(root).as_posix(): read_json(path)
        for path in sorted(root.rglob(NODE))
    }
    hidden = (".", CHECKPOINT, f"{CHECKPOINT}/{STATE}")
    shown = {name: node for name, node in nodes.items() if name not in hidden}
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": plain(spec.root_attrs),
        _INDEX: {"kind": "inline", "must_understand": False, "metadata": shown},
    }


def _replace_root(root: Path, document: dict[str, Any]) -> None:
    replace_json(root / NODE, seal(document, _INDEX), scratch_folder(root))


def read_root(root: str | PathLike[str]) -> dict[str, Any]:
    """Read the root's own file, checked to be a run store of a version that we know.

    Raises
    ------
    StoreError
        If there is nothing.
    StoreFormatError
        If it is not ours, damaged or of another version.
    """
    if "://" not in str(root) and not Path(root).exists():
        raise StoreError(f"there is no run store at {root}; check the path")
    foreign = f"{root} is not a run store of {LIBRARY}; pass the path given as store="
    try:
        document = dict(read_json(f"{root}/{NODE}"))
        attrs = dict(document["attributes"])
        if attrs.get("inference_library") == LIBRARY:
            _check_version(root, attrs.get("format_version"))
        check_seal(document, _INDEX)
        _ = nodes_of(document)["sample_stats/lp"]["shape"]
    except StoreFormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        kind = zarr_kind(str(root))
        if kind == "blocks":
            raise StoreFormatError(
                f"{root} is a matrix that {LIBRARY}.convert wrote, not a run: pass it as V to "
                f"{LIBRARY}.sample, or to daskfactor fit"
            ) from error
        ours = kind == "run" or ("://" not in str(root) and scratch_folder(Path(root)).is_dir())
        raise StoreFormatError(
            f"{root} is a damaged run store: its {NODE} is incomplete; restore it from a copy"
            if ours
            else foreign
        ) from error
    if attrs.get("inference_library") != LIBRARY:
        raise StoreFormatError(foreign)
    return document


def _check_version(root: object, version: Any) -> None:
    if not isinstance(version, int) or version < 1:
        raise StoreFormatError(
            f"{root} is a damaged run store: it says that its format version is {version!r}, and "
            "the first one is 1; restore it from a copy"
        )
    if version > FORMAT_VERSION:
        raise StoreFormatError(
            f"{root} has format version {version}, this version of {LIBRARY} reads up to "
            f"{FORMAT_VERSION}; upgrade {LIBRARY} to open it"
        )


def nodes_of(document: dict[str, Any]) -> dict[str, Any]:
    """Metadata of all groups and arrays that readers see, by path."""
    return dict(document[_INDEX]["metadata"])


def repair(root: Path, document: dict[str, Any]) -> None:
    """Undo an extension that was cut short: every node as the root's file says it is."""
    for name, node in nodes_of(document).items():
        path = root / name / NODE
        try:
            same = read_json(path) == node
        except (OSError, ValueError):
            same = False
        if not same:
            replace_json(path, node, scratch_folder(root))


def describe(root: Path, attrs: Any, group: str | None = None) -> None:
    """Merge attributes into the root's, or replace those of a group.

    Raises
    ------
    OSError
        If they cannot be written; the old ones still count.
    """
    document = read_root(root)
    if group is None:
        document["attributes"] |= plain(attrs)
    else:
        node = document[_INDEX]["metadata"][group]
        if node.get("attributes", {}) == plain(attrs):
            return
        node["attributes"] = plain(attrs)
        replace_json(root / group / NODE, node, scratch_folder(root))
    _replace_root(root, document)


def extend_skeleton(root: Path, store: DurableStore, draws: int, cycles: NDArray[np.int64]) -> None:
    """Make room for ``draws`` draws in all; nothing has happened until the root is replaced."""
    document = read_root(root)
    for name, node in document[_INDEX]["metadata"].items():
        axes = node.get("dimension_names") or ()
        if "draw" in axes:
            group = name.split("/")[0]
            node["shape"][list(axes).index("draw")] = planned_draws(group, draws)
            replace_json(root / name / NODE, node, scratch_folder(root))
            if name == f"{group}/draw":
                open_array(store, name)[...] = cycles[1::2] if group == COARSE else cycles
    store.flush()
    _replace_root(root, document)
