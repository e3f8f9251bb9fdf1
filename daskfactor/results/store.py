"""The store of a run: a zarr group that grows while the run goes on and survives its end.

Any zarr reader sees the tree of the results at every moment, at its full planned
size; draws that do not exist yet read as NaN. A draw exists once a checkpoint says
so, and a checkpoint is there wholly or not at all.
"""

import contextlib
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import xarray as xr
import zarr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.results.checkpoint import (
    Arrays,
    Checkpoints,
    Counts,
    counts_of,
    read_marker,
    scratch_folder,
)
from daskfactor.results.files import DurableStore, WriterLock, disk_errors, remove_leftovers
from daskfactor.results.schema import STEIN
from daskfactor.results.sink import Sink
from daskfactor.results.skeleton import (
    describe,
    extend_skeleton,
    nodes_of,
    open_array,
    read_root,
    repair,
    write_skeleton,
)
from daskfactor.results.spec import RunSpec
from daskfactor.results.trace import checked_store, committed_tree

Mode = Literal["r", "r+"]


class RunStore(Sink):
    """A run on disk. Made by `create` or `open`; one writer at a time, any number of readers.

    Not for several threads at once. Use as a context manager, or call `close`.
    """

    keeps_checkpoints: ClassVar[bool] = True

    def __init__(self, path: Path, mode: Mode, lock: WriterLock | None) -> None:
        self.path = path
        self.name = str(path)
        self.mode: Mode = mode
        self._lock = lock
        document = read_root(path)
        self._read_plan(document)
        self._checkpoints = Checkpoints(path, self.chains, self.warmup_draws)
        self._buffer = DrawBuffer(super()._put)
        self._arrays: dict[str, Any] = {}
        self._empty = False  # true from its creation to its second checkpoint
        self._store: DurableStore | None = None
        if mode == "r+":
            remove_leftovers(path)
            repair(path, document)
            self._store = DurableStore(path, scratch=scratch_folder(path))

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
            Arrays and meta of a first checkpoint that the store has when it appears.

        Raises
        ------
        StoreError
            If something is there already, another process writes it, or the disk refuses.
        """
        target = local_path(path)
        old = claim(target, overwrite)
        making = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with disk_errors("a new run store", target, "nothing was changed"):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_skeleton(making, spec)
                if state is not None:
                    Checkpoints(making, spec.chains, spec.warmup_draws).commit(*state)
                _take_place(making, target, making.with_suffix(".old"))
        finally:
            shutil.rmtree(making, ignore_errors=True)
            if old is not None:
                old.release()
        shutil.rmtree(making.with_suffix(".old"), ignore_errors=True)
        made = cls.open(target, mode="r+")
        made._empty = True
        return made

    @classmethod
    def open(cls, path: str | PathLike[str], mode: Mode = "r") -> Self:
        """Open a run store to read it, or (``"r+"``) to go on writing it.

        Raises
        ------
        StoreError
            If there is nothing at ``path``, or another process is writing it.
        StoreFormatError
            If what is there is not a run store, is damaged or of a newer version.
        """
        if mode not in ("r", "r+"):
            raise OptionError(f"mode must be 'r' or 'r+', got {mode!r}")
        target = local_path(path)
        version = read_root(target)["attributes"]["format_version"]
        if mode == "r":
            return cls(target, mode, None)
        if version == 1:
            raise StoreFormatError(
                f"{target} was begun by daskfactor 0.1.0, whose checkpoints this version cannot go "
                "on from: its draws can be read; to have more, resume it with 0.1.0 or run anew"
            )
        lock = _lock_of(target)
        try:
            return cls(target, mode, lock)
        except BaseException:
            lock.release()
            raise

    def _read_plan(self, document: dict[str, Any]) -> None:
        nodes = nodes_of(document)
        self.chains, self.draws = (int(n) for n in nodes["sample_stats/lp"]["shape"])
        warmup = nodes.get("warmup_sample_stats/lp", {"shape": (self.chains, 0)})
        self.warmup_draws = int(warmup["shape"][1])
        self._nodes: dict[str, Any] = {
            name: node for name, node in nodes.items() if node["node_type"] == "array"
        }

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
        if "monitor/row_index" not in self._nodes:
            return None
        store = checked_store(self.path, read_root(self.path))
        paths = ("monitor/row_index", "monitor/column_index")
        rows, columns = (zarr.open_array(store, path=path, mode="r")[...] for path in paths)
        return np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)

    def checkpoint(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """As `Sink.checkpoint`, on disk."""
        if max(self._checkpoints.counts_in(meta).draws) > self.draws:
            raise OptionError(
                f"meta['draws'] is {meta['draws']}, but {self.path} has room for {self.draws} "
                "draws; call extend first"
            )
        with self._writing("a checkpoint"):
            self._buffer.flush()
            self._writable().flush()
            first = self._checkpoints.commit(arrays, meta)
        self._empty = self._empty and first

    def load_checkpoint(self) -> tuple[Arrays, dict[str, Any]]:
        """Read arrays and meta of the newest whole checkpoint; the draws it vouches for exist.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        return self._checkpoints.load()

    def extend(self, draws: int, draw_index: ArrayLike | None = None) -> None:
        """Make room for ``draws`` draws in all.

        Parameters
        ----------
        draws
            At least as many as there is room for now.
        draw_index
            Cycle numbers of all of them (draws,); when not given the present ones
            are continued at their last spacing.

        Raises
        ------
        OptionError
            If that would shorten the run, if the cycle numbers do not fit, or if it is a run
            of particles, whose weights are those of a whole set.
        StoreError
            If the disk refuses; the store is as it was.
        """
        if draws < self.draws:
            raise OptionError(f"cannot shorten {self.path} from {self.draws} to {draws} draws")
        if f"{STEIN}/stein_matrix" in self._nodes and draws > self.draws:
            raise OptionError(
                f"{self.path} is a set of {self.draws} particles, weighted as a whole; to have "
                f"{draws}, start another run"
            )
        store = self._writable()
        index = self._continued(draws) if draw_index is None else np.asarray(draw_index)
        if index.shape != (draws,):
            raise OptionError(f"draw_index must have shape ({draws},), got {index.shape}")
        with self._writing("room for more draws"):
            self._buffer.flush()
            extend_skeleton(self.path, store, draws, index.astype(np.int64))
        self._arrays.clear()
        self._read_plan(read_root(self.path))

    def _continued(self, draws: int) -> NDArray[np.int64]:
        old = np.asarray(self._array("sample_stats/draw")[...], dtype=np.int64)
        step = int(old[-1] - old[-2]) if len(old) > 1 else 1
        first = int(old[-1]) + step if len(old) else 0
        return np.concatenate([old, first + step * np.arange(draws - len(old))])

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        """As `Sink.update_attrs`, on disk."""
        with self._writing("attributes"):
            for name in attrs:
                if f"constant_data/{name}" in self._nodes:
                    self._array(f"constant_data/{name}")[...] = attrs[name]
            self._writable().flush()
            describe(self.path, attrs)

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the last attributes, flush everything to disk and close."""
        with self._writing("the end of the run"):
            self._buffer.flush()
        self.update_attrs(attrs)
        self.close()

    def tree(self) -> xr.DataTree:
        """Give the draws that exist, lazily; see `daskfactor.results.trace.open_run`."""
        return committed_tree(self.path, self.committed)

    def close(self) -> None:
        """Let go of the store. What no checkpoint has committed is lost."""
        self.mode = "r"
        self._store = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let go of the store, and remove it if its run failed before it began."""
        self.close()
        if self._empty and kind is not None and issubclass(kind, Exception):
            shutil.rmtree(self.path, ignore_errors=True)

    def _writable(self) -> DurableStore:
        if self._store is None:
            raise StoreError(f"{self.path} is open for reading only; open it with mode='r+'")
        return self._store

    def _array(self, path: str) -> Any:
        store = self._writable()
        if path not in self._nodes:
            raise self._unplanned(path)
        if path not in self._arrays:
            self._arrays[path] = open_array(store, path)
        return self._arrays[path]

    def _put(self, path: str, chain: int, start: int, block: NDArray[Any]) -> None:
        self._buffer.append(path, chain, start, block, self._array(path).chunks[1])

    def _describe_group(self, group: str, attrs: Mapping[str, Any]) -> None:
        self._writable().flush()
        describe(self.path, attrs, group)

    def _writing(self, what: str) -> contextlib.AbstractContextManager[None]:
        draws = ", ".join(str(n) for n in self.committed.draws)
        safe = f"the last checkpoint is safe (draws per chain: {draws})"
        return disk_errors(what, self.path, safe)


def _take_place(new: Path, target: Path, aside: Path) -> None:
    """Put ``new`` where ``target`` is; what was there comes back if that fails."""
    if not target.exists():
        new.rename(target)
        return
    target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        aside.rename(target)
        raise


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


def _lock_of(path: Path) -> WriterLock:
    """Acquire the right to write the run store at ``path``.

    Raises
    ------
    StoreError
        If another writer has it, or if the store is damaged or write-protected.
    """
    try:
        return WriterLock(scratch_folder(path), path)
    except FileNotFoundError as error:
        raise StoreFormatError(
            f"{path} is a damaged run store: its checkpoint folder is gone; restore it from a copy"
        ) from error
    except PermissionError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; open it to read") from error


def claim(path: Path, overwrite: bool) -> WriterLock | None:
    """Refuse what is in the way of a new run store, or lock the one that is to be replaced.

    Raises
    ------
    StoreError
        If there is anything but a run store, or a run store and not ``overwrite``.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    try:
        here = _describe(path)
    except StoreError as error:
        names = sorted(entry.name for entry in path.iterdir())[:3] if path.is_dir() else []
        what = f"a folder with {', '.join(names)}" if names else "a file"
        raise StoreError(
            f"{path} exists and is {what}, no run store that could be replaced; pass another path"
        ) from error
    if not overwrite:
        raise StoreError(
            f"{path} exists and holds {here}; pass another path, overwrite=True to replace it, "
            "or use daskfactor.resume to go on with it"
        )
    return _lock_of(path)


def _describe(path: Path) -> str:
    chains, draws = nodes_of(read_root(path))["sample_stats/lp"]["shape"]
    done = ", ".join(str(count) for count in counts_of(read_marker(path), chains).draws)
    return f"a run (draws per chain: {done} of {draws})"


Write = Callable[[str, int, int, NDArray[Any]], None]


@dataclass
class _Pending:
    start: int
    blocks: list[NDArray[Any]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + sum(len(block) for block in self.blocks)


class DrawBuffer:
    """Gathers consecutive draws of each variable and chain; writes when a chunk is full.

    Nothing counts before the next checkpoint anyway, and a chunk that is written
    once instead of once per draw makes a draw cheap. At most one chunk per variable
    and chain is held.

    Parameters
    ----------
    write
        Called with path, chain, first draw and draws.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._pending: dict[tuple[str, int], _Pending] = {}

    def append(self, path: str, chain: int, start: int, block: NDArray[Any], chunk: int) -> None:
        """Take a copy of ``block``: draws from ``start`` on; ``chunk`` draws fill a chunk."""
        pending = self._pending.get((path, chain))
        if pending is not None and pending.stop != start:
            self._flush(path, chain)
            pending = None
        if pending is None:
            pending = self._pending[path, chain] = _Pending(start)
        pending.blocks.append(np.array(block, order="C"))
        if pending.stop >= (pending.start // chunk + 1) * chunk:
            self._flush(path, chain)

    def flush(self) -> None:
        """Write everything."""
        for path, chain in list(self._pending):
            self._flush(path, chain)

    def _flush(self, path: str, chain: int) -> None:
        pending = self._pending[path, chain]
        blocks = pending.blocks
        self._write(path, chain, pending.start, blocks[0] if len(blocks) == 1 else _join(blocks))
        del self._pending[path, chain]


def _join(blocks: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(blocks)
