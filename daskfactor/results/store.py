"""The store of a run: a zarr group that grows while the run goes on and survives its end.

Any zarr reader sees the tree of the results at every moment, at its full planned
size; draws that do not exist yet read as NaN. A draw exists once a checkpoint says
so, and a checkpoint is there wholly or not at all.

The metadata of all that a reader should see is also kept in the root's own file
("consolidated", as zarr and xarray read it). That one file therefore decides what
the store looks like: replacing it extends a run in one instant, and what it leaves
out (the folder ``checkpoint``) no reader meets.
"""

import shutil
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import xarray as xr
import zarr
from filelock import BaseFileLock
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec

from daskfactor.data.store import take_place
from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.results.files import (
    CHECKPOINT,
    NODE,
    PARTIAL,
    STATE,
    Arrays,
    Checkpoints,
    Counts,
    DurableStore,
    counts_of,
    disk_errors,
    plain,
    read_json,
    read_marker,
    replace_json,
    scratch_folder,
    seal,
    writer_lock,
)
from daskfactor.results.schema import (
    CELL_INDICES,
    COARSE,
    MONITOR,
    WARMUP,
    RunSpec,
    group_coords,
    layouts,
    planned_draws,
)
from daskfactor.results.sink import Sink
from daskfactor.results.trace import INDEX, checked_store, committed_tree, nodes_of, read_root

# Draws are noise in all but their exponents: measured on 8 MB of float32 draws, zstd
# saves 8 % and lz4 with bit shuffling 11 %, zstd at four times the reading time.
# Plain bytes read and write fastest, and every zarr reader knows them.
_PLAIN: Final = (Crc32cCodec(),)
_PACKED: Final = (ZstdCodec(), Crc32cCodec())
# A chunk of nothing but fill values is written all the same: one that is not there is damage.
_WHOLE: Final = {"array.write_empty_chunks": True}


class RunStore(Sink):
    """A run on disk, to be written. Made by `create` or `open`; one writer at a time.

    Any number of readers may `open_run` it meanwhile. Not for several threads at once. Use as
    a context manager, or call `close`.
    """

    keeps_checkpoints: ClassVar[bool] = True

    def __init__(self, path: Path, lock: BaseFileLock) -> None:
        # Not as a sink in memory begins: what is planned is what the store says of itself.
        self.path = path
        self.name = str(path)
        self._lock = lock
        document = read_root(path)
        self._read_plan(document)
        self._checkpoints = Checkpoints(path, self.chains, self.warmup_draws)
        # Consecutive draws by path and chain, the first one's number before them. Nothing counts
        # before the next checkpoint anyway, and a chunk that is written once instead of once per
        # draw makes a draw cheap; at most one chunk of each is held.
        self._pending: dict[tuple[str, int], tuple[int, list[Any]]] = {}
        self._empty = False  # true from its creation to its second checkpoint
        # What writers that were killed left behind.
        for leftover in path.rglob(f"*{PARTIAL}"):
            leftover.unlink(missing_ok=True)
        # An extension that was cut short: every node as the root's file says it is.
        for name, node in nodes_of(document).items():
            if not _holds(path / name / NODE, node):
                replace_json(path / name / NODE, node, scratch_folder(path))
        self._store: DurableStore | None = DurableStore(path)

    @classmethod
    def create(
        cls,
        path: str | PathLike[str],
        spec: RunSpec,
        *,
        overwrite: bool = False,
        state: tuple[Arrays, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Make an empty run store and open it for writing.

        It appears at ``path`` complete or not at all.

        Parameters
        ----------
        path
            Local path.
        spec
            What the run will hold.
        overwrite
            Replace an earlier run store at ``path``. Nothing else is ever removed.
        state
            Arrays that the run needs all along, and the meta of a first checkpoint, both of
            which the store has when it appears.

        Raises
        ------
        StoreError
            If something is there already, another process writes it, or the disk refuses.
        """
        target = local_path(path)
        old = claim(target, overwrite)
        making = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with disk_errors("a new run store", target, "nothing was changed", "begin again"):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_skeleton(making, spec)
                if state is not None:
                    checkpoints = Checkpoints(making, spec.chains, spec.warmup_draws)
                    checkpoints.keep(state[0])
                    checkpoints.commit({}, state[1])
                take_place(making, target, old.release if old is not None else None)
        finally:
            shutil.rmtree(making, ignore_errors=True)
            if old is not None:
                old.release()
        made = cls.open(target)
        made._empty = True
        return made

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Open a run store to go on writing it.

        Raises
        ------
        StoreError
            If there is nothing at ``path``, or another process is writing it.
        StoreFormatError
            If what is there is not a run store, is damaged or of a newer version.
        """
        target = local_path(path)
        if read_root(target)["attributes"]["format_version"] == 1:
            raise StoreFormatError(
                f"{target} was begun by daskfactor 0.1.0, whose checkpoints this version cannot go "
                "on from: its draws can be read; to have more, resume it with 0.1.0 or run anew"
            )
        lock = writer_lock(target)
        try:
            return cls(target, lock)
        except BaseException:
            lock.release()
            raise

    def _read_plan(self, document: dict[str, Any]) -> None:
        nodes = nodes_of(document)
        arrays = {name: one for name, one in nodes.items() if one["node_type"] == "array"}
        self._lay_out(arrays, *map(int, nodes["sample_stats/lp"]["shape"]))
        self.warmup_draws = int(nodes.get(f"{WARMUP}/lp", {"shape": (0, 0)})["shape"][1])

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the run, as they are on disk."""
        return dict(read_root(self.path)["attributes"])

    @property
    def committed(self) -> Counts:  # type: ignore[override]
        """Draws and warm-up draws that exist, per chain."""
        return self._checkpoints.counts

    @property
    def cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Positions of the monitored cells, rows and columns; None if there are none."""
        if f"{MONITOR}/{CELL_INDICES[0]}" not in self._plan:
            return None
        store = checked_store(self.path, read_root(self.path))
        rows, columns = (
            zarr.open_array(store, path=f"{MONITOR}/{name}", mode="r")[...] for name in CELL_INDICES
        )
        return np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)

    def checkpoint(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """As `Sink.checkpoint`, on disk."""
        if max(self._checkpoints.counts_in(meta).draws) > self.draws:
            raise OptionError(
                f"meta['draws'] is {meta['draws']}, but {self.path} has room for {self.draws} "
                "draws; call extend first"
            )
        with self._writing("a checkpoint"):
            self._flush()
            self._writable().flush()
            first = self._checkpoints.commit(arrays, meta)
        self._empty = self._empty and first

    def load_checkpoint(self) -> tuple[Arrays, dict[str, Any]]:
        """Read the newest whole checkpoint, with the arrays that the run needs all along.

        The draws that it vouches for exist.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        return self._checkpoints.load()

    def extend(self, cycles: NDArray[np.int64]) -> None:
        """Make room for more draws, of which all have these cycle numbers, (draws,).

        Raises
        ------
        OptionError
            If that would shorten the run.
        StoreError
            If the disk refuses; the store is as it was.
        """
        draws = len(cycles)
        if draws < self.draws:
            raise OptionError(f"cannot shorten {self.path} from {self.draws} to {draws} draws")
        with self._writing("room for more draws"):
            self._flush()
            self._make_room(draws, cycles)
        self._read_plan(read_root(self.path))

    def _make_room(self, draws: int, cycles: NDArray[np.int64]) -> None:
        """Lengthen every array of draws; nothing has happened until the root is replaced."""
        store, document = self._writable(), read_root(self.path)
        for name, node in document[INDEX]["metadata"].items():
            axes = node.get("dimension_names") or ()
            if "draw" in axes:
                group = name.split("/")[0]
                node["shape"][list(axes).index("draw")] = planned_draws(group, draws)
                replace_json(self.path / name / NODE, node, scratch_folder(self.path))
                if name == f"{group}/draw":
                    _to_write(store, name)[...] = cycles[1::2] if group == COARSE else cycles
        store.flush()
        _replace_root(self.path, document)

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        """As `Sink.update_attrs`, on disk."""
        with self._writing("attributes"):
            for name in attrs:
                if f"constant_data/{name}" in self._plan:
                    self._array(f"constant_data/{name}")[...] = attrs[name]
            self._writable().flush()
            describe(self.path, attrs)

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the last attributes, flush everything to disk and close."""
        with self._writing("the end of the run"):
            self._flush()
        self.update_attrs(attrs)
        self.close()

    def tree(self) -> xr.DataTree:
        """Give the draws that exist, lazily; see `daskfactor.results.trace.open_run`."""
        return committed_tree(self.path, self.committed)

    def close(self) -> None:
        """Let go of the store. What no checkpoint has committed is lost."""
        self._store = None
        self._arrays = {}
        self._lock.release()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let go of the store, and remove it if its run failed before it began."""
        self.close()
        if self._empty and kind is not None and issubclass(kind, Exception):
            shutil.rmtree(self.path, ignore_errors=True)

    def _writable(self) -> DurableStore:
        if self._store is None:
            raise StoreError(f"{self.path} is closed; resume the run to write more")
        return self._store

    def _opened(self, path: str) -> Any:
        return _to_write(self._writable(), path)

    def _put(self, path: str, chain: int, start: int, block: NDArray[Any]) -> None:
        first, blocks = self._pending.get((path, chain), (start, []))
        if first + sum(map(len, blocks)) != start:
            self._flush(path, chain)
            first, blocks = start, []
        blocks.append(np.array(block, order="C"))
        self._pending[path, chain] = first, blocks
        length = self._array(path).chunks[1]
        if start + len(block) >= (first // length + 1) * length:
            self._flush(path, chain)

    def _flush(self, *places: Any) -> None:
        """Write the draws of a path and chain that wait for more, or those of all."""
        for path, chain in [places] if places else list(self._pending):
            first, blocks = self._pending[path, chain]
            block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
            super()._put(path, chain, first, block)
            del self._pending[path, chain]

    def _describe_group(self, group: str, attrs: Mapping[str, Any]) -> None:
        self._writable().flush()
        describe(self.path, attrs, group)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        draws = ", ".join(str(n) for n in self.committed.draws)
        safe = f"the last checkpoint is safe (draws per chain: {draws})"
        return disk_errors(what, self.path, safe)


def _holds(path: Path, node: Any) -> bool:
    """Whether a file is there, whole, and says this."""
    try:
        return bool(read_json(path) == node)
    except (OSError, ValueError):
        return False


def local_path(path: str | PathLike[str]) -> Path:
    """Make a path absolute.

    Raises
    ------
    StoreError
        If it is a URL.
    """
    if "://" in str(path):
        raise StoreError(
            f"a run is written to a local path, got the URL {path}; "
            "write it locally and copy it there when it is done"
        )
    return Path(path).expanduser().absolute()


def claim(path: Path, overwrite: bool) -> BaseFileLock | None:
    """Refuse what is in the way of a new run store, or lock the one that is to be replaced.

    Raises
    ------
    StoreError
        If there is anything but a run store, or a run store and not ``overwrite``.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    try:
        chains, draws = nodes_of(read_root(path))["sample_stats/lp"]["shape"]
        done = ", ".join(str(count) for count in counts_of(read_marker(path), chains).draws)
    except StoreError as error:
        names = sorted(entry.name for entry in path.iterdir())[:3] if path.is_dir() else []
        what = f"a folder with {', '.join(names)}" if names else "a file"
        raise StoreError(
            f"{path} exists and is {what}, no run store that could be replaced; pass another path"
        ) from error
    if not overwrite:
        raise StoreError(
            f"{path} exists and holds a run (draws per chain: {done} of {draws}); pass another "
            "path, overwrite=True to replace it, or use daskfactor.resume to go on with it"
        )
    return writer_lock(path)


def write_skeleton(root: Path, spec: RunSpec) -> None:
    """Write an empty run store at ``root``, flushed to disk; attributes and coordinates included.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    scratch_folder(root).mkdir(parents=True)
    store = DurableStore(root)
    top = zarr.create_group(store=store, zarr_format=3)
    plan = layouts(spec)
    for group in dict.fromkeys(layout.variable.group for layout in plan.values()):
        top.create_group(group)
        _write_coords(store, group, group_coords(group, spec))
    for path, (variable, dims, shape, dtype, chunks, fill, value) in plan.items():
        top.create_array(
            path,
            shape=shape,
            chunks=chunks,
            dtype=dtype,
            fill_value=fill,
            dimension_names=dims,
            compressors=_PACKED if variable.kind == "data" else _PLAIN,
            attributes={"description": variable.doc},
        )
        if variable.name == "count":  # says that there are no moments yet
            value = 0
        elif variable in spec.constants and value is None:
            value = np.nan
        if value is not None:
            _to_write(store, path)[...] = value
    note = "private: what a stopped run needs to go on"
    state = top.create_group(CHECKPOINT, attributes={"description": note})
    dims = ("checkpoint_slot", "checkpoint_byte")
    state.create_array(STATE, shape=(2, 0), chunks=(1, 1), dtype="uint8", dimension_names=dims)
    store.flush()
    nodes = {
        path.parent.relative_to(root).as_posix(): read_json(path)
        for path in sorted(root.rglob(NODE))
    }
    for hidden in (".", CHECKPOINT, f"{CHECKPOINT}/{STATE}"):
        del nodes[hidden]
    index = {"kind": "inline", "must_understand": False, "metadata": nodes}
    document = {"zarr_format": 3, "node_type": "group", "attributes": plain(spec.root_attrs)}
    _replace_root(root, document | {INDEX: index})


def _to_write(store: DurableStore, path: str) -> Any:
    """Open an array to write it, all of its chunks."""
    with zarr.config.set(_WHOLE):
        return zarr.open_array(store, path=path, mode="r+")


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


def _replace_root(root: Path, document: dict[str, Any]) -> None:
    replace_json(root / NODE, seal(document, INDEX), scratch_folder(root))


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
        node = document[INDEX]["metadata"][group]
        if node.get("attributes", {}) == plain(attrs):
            return
        node["attributes"] = plain(attrs)
        replace_json(root / group / NODE, node, scratch_folder(root))
    _replace_root(root, document)
