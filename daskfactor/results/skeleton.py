"""The empty run store: every array at its full planned size, nothing in it yet.

The metadata of all that a reader should see is also kept in the root's own file
("consolidated", as zarr and xarray read it). That one file therefore decides what
the store looks like: replacing it extends a run in one instant, and what it leaves
out (the folder ``checkpoint``) no reader meets.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import xarray as xr
import zarr

from daskfactor.errors import StoreFormatError
from daskfactor.results.files import DurableStore, read_json, replace_json
from daskfactor.results.layout import Layout, group_coords, layouts, planned_draws
from daskfactor.results.schema import FORMAT_VERSION, LIBRARY
from daskfactor.results.spec import RunSpec

CHECKPOINT: Final = "checkpoint"
STATE: Final = "state"
NODE: Final = "zarr.json"
BLOCKED: Final = "daskfactor-blocked-sparse"
CONSTANTS: Final = ("dispersion", "rate_w", "rate_h", "threshold")


def scratch_folder(root: Path) -> Path:
    """Where the lock and files in the making are: an array's folder, which no reader lists."""
    return root / CHECKPOINT / STATE


def write_skeleton(root: Path, spec: RunSpec) -> None:
    """Write an empty run store at ``root``, flushed to disk; attributes and coordinates included.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    scratch = scratch_folder(root)
    scratch.mkdir(parents=True)
    store = DurableStore(root, scratch=scratch)
    top = zarr.create_group(store=store, zarr_format=3)
    plan = layouts(spec)
    for group in dict.fromkeys(layout.variable.group for layout in plan):
        node = top.create_group(group)
        _write_coords(store, group, group_coords(group, spec))
        for layout in plan:
            if layout.variable.group == group:
                _create_array(node, layout)
    if spec.observed is not None:
        zarr.open_array(store, path="observed_data/V", mode="r+")[...] = spec.observed
    write_constants(top, spec.attrs)
    _create_checkpoint(top, spec)
    store.flush()
    replace_json(root / NODE, _root_document(root, spec), scratch)


def _create_array(node: Any, layout: Layout) -> None:
    # Draws are noise in all but their exponents: measured on 8 MB of float32 draws, zstd
    # saves 8 % and lz4 with bit shuffling 11 %, zstd at four times the reading time.
    # Plain bytes read and write fastest, and every zarr reader knows them.
    codec: Any = "auto" if layout.variable.kind == "data" else None
    node.create_array(
        layout.variable.name,
        shape=layout.shape,
        chunks=layout.chunks,
        dtype=layout.dtype,
        fill_value=layout.fill,
        dimension_names=layout.dims,
        compressors=codec,
        attributes={"description": layout.variable.doc},
    )


def _write_coords(store: DurableStore, group: str, coords: xr.Dataset) -> None:
    # As objects, text gets zarr's string type; fixed-width text has no specification yet.
    text = {
        name: (coord.dims, coord.values.astype(object))
        for name, coord in coords.coords.items()
        if coord.dtype.kind == "U"
    }
    coords.assign_coords(text).to_zarr(
        store, group=group, mode="a", zarr_format=3, consolidated=False
    )


def write_constants(top: Any, attrs: Any) -> None:
    """Copy the resolved hyperparameters from the attributes into ``constant_data``."""
    for name in CONSTANTS:
        if name in attrs and f"constant_data/{name}" in top:
            top[f"constant_data/{name}"][...] = attrs[name]


def _create_checkpoint(top: Any, spec: RunSpec) -> None:
    layout = {
        "shape": list(spec.shape),
        "dims": list(spec.dims),
        "dtype": spec.dtype,
        "keep": spec.keep,
        "has_coarse": spec.has_coarse,
        "has_acceptance": spec.has_acceptance,
        "has_weights": spec.has_weights,
        "has_objective": spec.has_objective,
    }
    note = "private: what a stopped run needs to go on"
    node = top.create_group(CHECKPOINT, attributes={"description": note, "layout": layout})
    node.create_array(
        STATE,
        shape=(2, 0),
        chunks=(1, 1),
        dtype="uint8",
        fill_value=0,
        dimension_names=("checkpoint_slot", "checkpoint_byte"),
        compressors=None,
    )


def _root_document(root: Path, spec: RunSpec) -> dict[str, Any]:
    nodes = {
        path.parent.relative_to(root).as_posix(): read_json(path)
        for path in sorted(root.rglob(NODE))
    }
    attrs = plain(spec.root_attrs)
    shown = {
        name: node
        for name, node in nodes.items()
        if name != "." and name.split("/")[0] != CHECKPOINT
    }
    consolidated = {"kind": "inline", "must_understand": False, "metadata": shown}
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attrs,
        "consolidated_metadata": consolidated,
    }


def plain(value: Any) -> Any:
    """JSON values only: NumPy numbers and arrays become Python's."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist()) if np.ndim(value) else value.item()
    return value


def read_root(root: Path) -> dict[str, Any]:
    """The root's own file, checked to be a run store of a version that we know.

    Raises
    ------
    StoreFormatError
        If it is not ours, damaged or of a newer version.
    """
    try:
        document = read_json(root / NODE)
        attrs = document["attributes"]
        check_attrs(root, attrs)
        _ = document["consolidated_metadata"]["metadata"]["sample_stats/lp"]["shape"]
    except FileNotFoundError as error:
        raise StoreFormatError(f"{root} is not a run store of {LIBRARY}: no {NODE}") from error
    except StoreFormatError:
        raise
    except (ValueError, KeyError, TypeError, NotADirectoryError) as error:
        found = _library_of(root)
        raise StoreFormatError(
            f"{root} is a damaged run store: its {NODE} is incomplete; restore it from a copy"
            if found == LIBRARY
            else f"{root} is not a run store of {LIBRARY}; pass the path given as store="
        ) from error
    return dict(document)


def _library_of(root: Path) -> str | None:
    try:
        text = (root / NODE).read_text(errors="replace")
    except OSError:
        return None
    return LIBRARY if LIBRARY in text or (root / CHECKPOINT / STATE).is_dir() else None


def check_attrs(root: object, attrs: Any) -> None:
    """Refuse a store that is not ours or that a newer version wrote.

    Raises
    ------
    StoreFormatError
        In both cases.
    """
    version = attrs.get("format_version")
    if attrs.get("format") == BLOCKED:
        raise StoreFormatError(
            f"{root} is a matrix that {LIBRARY}.convert wrote, not a run: pass it as V to "
            f"{LIBRARY}.sample, or to daskfactor fit"
        )
    if attrs.get("inference_library") != LIBRARY or not isinstance(version, int):
        raise StoreFormatError(
            f"{root} is a zarr group but not a run store of {LIBRARY}; "
            "pass the path given as store="
        )
    if version < 1:
        raise StoreFormatError(
            f"{root} is a damaged run store: it says that its format version is {version}, and "
            "the first one is 1; restore it from a copy"
        )
    if version > FORMAT_VERSION:
        raise StoreFormatError(
            f"{root} has format version {version}, this version of {LIBRARY} reads up to "
            f"{FORMAT_VERSION}; upgrade {LIBRARY} to open it"
        )


def repair(root: Path, document: dict[str, Any]) -> None:
    """Undo an extension that was cut short: every node as the root's file says it is."""
    for name, node in document["consolidated_metadata"]["metadata"].items():
        path = root / name / NODE
        try:
            same = read_json(path) == node
        except (OSError, ValueError):
            same = False
        if not same:
            replace_json(path, node, scratch_folder(root))


def describe_group(root: Path, group: str, attrs: Any) -> None:
    """Replace the attributes of a group; they count once the root is replaced.

    Raises
    ------
    OSError
        If they cannot be written; the old ones still count.
    """
    document = read_root(root)
    node = document["consolidated_metadata"]["metadata"][group]
    if node.get("attributes", {}) == plain(attrs):
        return
    node["attributes"] = plain(attrs)
    scratch = scratch_folder(root)
    replace_json(root / group / NODE, node, scratch)
    replace_json(root / NODE, document, scratch)


def extend_skeleton(
    root: Path, store: DurableStore, draws: int, cycles: np.ndarray[Any, np.dtype[np.int64]]
) -> None:
    """Make room for ``draws`` draws in all; nothing has happened until the root is replaced."""
    document = read_root(root)
    nodes = document["consolidated_metadata"]["metadata"]
    scratch = scratch_folder(root)
    for name, node in nodes.items():
        axes = node.get("dimension_names") or ()
        if "draw" in axes:
            group = name.split("/")[0]
            node["shape"][list(axes).index("draw")] = planned_draws(group, draws)
            replace_json(root / name / NODE, node, scratch)
            if name == f"{group}/draw":
                values = cycles[1::2] if group == "posterior_coarse" else cycles
                zarr.open_array(store, path=name, mode="r+")[...] = values
    store.flush()
    replace_json(root / NODE, document, scratch)
