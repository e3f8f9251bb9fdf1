"""Files of a run store: atomic replacement, flushing, checksums, lock, checkpoints.

A checkpoint is an archive that a marker names. It is written under a new name, and then a commit
replaces the marker, a small file, atomically. So the store holds a complete checkpoint if the
process is killed at any time. In a folder the one before is kept, too. An archive is a NumPy file
with a CRC-32 of every array and with its own description. Constant arrays of a run are in another
archive.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.publish import Lock

if TYPE_CHECKING:
    from daskfactor.runs.backends import Backend, View
    from daskfactor.runs.writer import Writer

Arrays = dict[str, NDArray[Any]]
Late = dict[str, NDArray[Any] | Callable[[], NDArray[Any]]]
"""Arrays by name, or functions that return them, so that only one is in memory at a time."""

NODE: Final = "zarr.json"
CHECKPOINT: Final = "checkpoint"
MARKER: Final = f"{CHECKPOINT}/{NODE}"
STATE: Final = "state"
PARTIAL: Final = ".partial"
MAX_COST_SHARE: Final = 0.03
"""Largest fraction of the time of a run for checkpoints, unless they are cheap."""
CHEAP_SECONDS: Final = 0.1
"""Seconds below which a checkpoint is cheap and may be written at any opportunity."""
_DISK_FULL: Final = frozenset({ENOSPC, EDQUOT})
SEAL: Final = "crc32"
"""Key of a document's checksum over its other content."""


@contextlib.contextmanager
def atomic_replace(path: Path, scratch: Path) -> Iterator[Any]:
    """Yield a temporary file that replaces ``path`` at the end of the block.

    A reader sees the old file or the new one, never a part. ``scratch`` is a folder on the same
    file system; the folder of ``path`` is created if necessary. The target is untouched if the
    disk is full.
    """
    temporary = scratch / f"{uuid.uuid4().hex}{PARTIAL}"
    try:
        with temporary.open("wb") as file:
            yield file
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_scratch(leftover: Path) -> None:
    """Remove a temporary file or a folder of them, so that none can replace its target any more.

    The folder is renamed first, so that a process that still writes to it fails.
    """
    if leftover.is_dir():
        leftover = leftover.rename(leftover.with_name(f"{uuid.uuid4().hex}{PARTIAL}"))
        shutil.rmtree(leftover, ignore_errors=True)
    else:
        leftover.unlink(missing_ok=True)


def replace_json(path: Path, document: Any, scratch: Path) -> None:
    """Replace a JSON file atomically, so that a power failure leaves the old one or the new one."""
    with atomic_replace(path, scratch) as file:
        file.write(json.dumps(document).encode())
        file.flush()
        os.fsync(file.fileno())
    flush_path(path.parent)


def write_json(store: Any, key: str, document: Any) -> None:
    """Write a JSON document to a zarr store; the next commit makes it durable."""
    from zarr.core.buffer import cpu
    from zarr.core.sync import sync

    sync(store.set(key, cpu.Buffer.from_bytes(json.dumps(document).encode())))


def seal(document: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a document with its checksum in one of its parts."""
    bare = {name: entry for name, entry in document[part].items() if name != SEAL}
    text = json.dumps(document | {part: bare}, sort_keys=True)
    return document | {part: bare | {SEAL: zlib.crc32(text.encode())}}


def check_seal(document: dict[str, Any], part: str) -> None:
    """Check the checksum of a document, if it has one.

    Raises
    ------
    ValueError
        If it does not match.
    """
    checksum = document[part].get(SEAL)
    if checksum is not None and checksum != seal(document, part)[part][SEAL]:
        raise ValueError("its checksum does not agree")


def damaged(path: object, reason: str) -> StoreFormatError:
    """Return the error for a damaged run store."""
    return StoreFormatError(f"{path} is a damaged run store: {reason}; restore it from a copy")


def conflict_error(name: str) -> StoreError:
    """Return the error for a commit after another process has committed."""
    return StoreError(
        f"{name}: another process has taken this run over, so that this one stops; what was "
        "committed is safe, and the other goes on from there"
    )


def flush_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and orders renames by itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writer_lock(run: Path) -> Lock:
    """Return the lock for writing a run store; the end of the process releases it.

    Raises
    ------
    StoreError
        If another writer in any process has the lock, or the store is damaged or write-protected.
    """
    try:
        return Lock(scratch_folder(run), run)
    except FileNotFoundError as error:
        raise damaged(run, "its checkpoint folder is gone") from error
    except StoreError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            f"{run} cannot be written: {reason}; fix this, or open it to read"
        ) from error


@contextlib.contextmanager
def disk_errors(what: str, path: Path, safe: str, again: str = "resume the run") -> Iterator[None]:
    """Turn an OSError of a write into a StoreError that says what is safe.

    Parameters
    ----------
    what
        Object that was being written.
    path
        Path of the store.
    safe
        Sentence that names the data that are safe.
    again
        Action to take when the disk works again.

    Raises
    ------
    StoreError
        In place of the OSError, with its errno.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        full = error.errno in _DISK_FULL
        cause = "the disk is full" if full else f"the system says: {error.strerror or error}"
        remedy = f"{'free some space' if full else 'fix this'} and {again}"
        failure = StoreError(f"could not write {what} to {path}, {cause}; {safe}; {remedy}")
        failure.errno = error.errno
        raise failure from error


_META: Final = ".meta"
_LASTING: Final = "lasting"
DAMAGE: Final = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError),
)
"""Errors that NumPy and zipfile raise for damaged archives."""


class Counts(NamedTuple):
    """Number of draws per chain that a checkpoint covers."""

    draws: tuple[int, ...]
    warmup_draws: tuple[int, ...]


def scratch_folder(root: Path) -> Path:
    """Return the folder of checkpoints, lock and temporary files: that of an unlisted array."""
    return root / CHECKPOINT / STATE


def read_marker(view: "View") -> dict[str, Any]:
    """Return the document of the group ``checkpoint``, the marker.

    Raises
    ------
    StoreFormatError
        If it is damaged or missing.
    """
    try:
        document = dict(view.document(MARKER))
        check_seal(document, "attributes")
        _check_slots(**document["attributes"])
    except StoreError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(view.name, f"{MARKER} cannot be read ({error})") from error
    return document


def _check_slots(slots: Any = None, newest: Any = None, **others: object) -> None:
    """Raise ValueError or TypeError for impossible checkpoints in a marker."""
    del others
    if newest not in (None, 0, 1) or (newest is not None and slots[newest] is None):
        raise ValueError(f"its newest checkpoint is {newest!r}")
    for slot in filter(None, slots or ()):
        numbers = [*slot["draws"], *slot["warmup_draws"]]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"a checkpoint has draws {numbers!r}")


def counts_of(marker: Mapping[str, Any], chains: int) -> Counts:
    """Return the number of draws that the newest checkpoint of a marker covers; zeros if none."""
    slots, newest = marker["attributes"].get("slots"), marker["attributes"].get("newest")
    if not slots or newest is None or slots[newest] is None:
        return Counts((0,) * chains, (0,) * chains)
    return Counts(tuple(slots[newest]["draws"]), tuple(slots[newest]["warmup_draws"]))


def _archive_of(slot: Mapping[str, Any], number: int) -> str:
    """Return the name of a checkpoint's archive; earlier versions had one for each slot."""
    return str(slot.get("archive", number))


def archive(arrays: Mapping[str, Any], values: Mapping[str, Any]) -> Callable[[Any], None]:
    """Return a function that writes arrays and JSON values to a file as a NumPy archive.

    Arrays may be functions (see `Late`), which are called one after the other.

    Raises
    ------
    OptionError
        If a value cannot be written as JSON; while writing, if an array is not numeric.
    """
    text = json.dumps({"names": list(arrays), **plain(values)}).encode()
    members = {**arrays, _META: np.frombuffer(text, dtype=np.uint8)}

    def save(file: Any) -> None:
        """Write the archive, as `numpy.savez`, which would need all arrays in memory."""
        with zipfile.ZipFile(file, "w") as zip_file:
            for name, value in members.items():
                array = np.asarray(value() if callable(value) else value)
                if array.dtype.kind not in "biufc":
                    raise OptionError(
                        f"checkpoint array {name!r} must hold numbers, got dtype {array.dtype}"
                    )
                with zip_file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return save


class Archives(Mapping[str, NDArray[Any]]):
    """Arrays of archives by name, read on access; can be pickled to other processes.

    Parameters
    ----------
    store
        Store with the archives.
    archive_of
        Name of the archive of each array.
    backend
        Backend of the store; None in another process.
    """

    def __init__(
        self,
        store: Any,
        archive_of: Mapping[str, str] | None = None,
        backend: "Backend | None" = None,
    ) -> None:
        self._store, self._archive_of, self._backend = store, dict(archive_of or {}), backend
        self._files: dict[str, tuple[Any, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._store if self._backend is None else self._backend.fork()
        return Archives, (store, self._archive_of)

    @property
    def shared(self) -> Path | bool:
        """See `Backend.shared`."""
        return self._backend is not None and self._backend.shared

    def add(self, name: str) -> dict[str, Any]:
        """Add the arrays of an archive after checking them; return its JSON values."""
        npz = self._opened(name)
        if (broken := npz.zip.testzip()) is not None:
            raise ValueError(f"{broken} is not what was written")
        values: dict[str, Any] = json.loads(npz[_META].tobytes())
        self._archive_of |= dict.fromkeys(values["names"], name)
        return values

    def _opened(self, name: str) -> Any:
        if name not in self._files:
            file = self._store.open_archive(name)
            try:
                self._files[name] = np.load(file), file
            except BaseException:
                file.close()
                raise
        return self._files[name][0]

    def __getitem__(self, name: str) -> NDArray[Any]:
        array: NDArray[Any] = self._opened(self._archive_of[name])[name]
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._archive_of)

    def __len__(self) -> int:
        return len(self._archive_of)

    def close(self) -> None:
        """Close all files and remove all arrays."""
        self._archive_of.clear()
        while self._files:
            self._files.popitem()[1][1].close()

    def __del__(self) -> None:
        self.close()


class Checkpoints:
    """Checkpoints of one run store.

    A checkpoint is an archive together with the archives of its ``parts``, which writers in other
    processes may have written.

    Parameters
    ----------
    backend
        Backend of the run.
    chains, warmup_draws
        Numbers of the run, to read the counts in the meta of a checkpoint.
    """

    def __init__(self, backend: "Backend", chains: int, warmup_draws: int) -> None:
        self._backend = backend
        self._chains = chains
        self._warmup = warmup_draws
        self._start_parts()
        self._arrays = Archives(backend.store, backend=backend)
        self._last_commit, self._last_check = time.monotonic(), math.inf
        self._costs = 0.0, 0.0
        self._document = read_marker(backend)
        self._newest: int | None = self._document["attributes"].get("newest")
        self.counts = counts_of(self._document, chains)
        """Number of draws per chain that exist."""

    def write(
        self,
        arrays: Mapping[str, Any],
        meta: Mapping[str, Any],
        constants: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, Any]:
        """Write the archive of a checkpoint; return the marker that makes it the current one.

        Arrays may be functions (see `Late`). The parts of `add_parts` are included. Constants are
        arrays that `load` adds to those of every checkpoint from then on.

        Raises
        ------
        OptionError
            If an array is not numeric.
        OSError
            If it cannot be written.
        """
        if constants:
            self._backend.store.write_new(_LASTING, archive(constants, {}))
        counts = self.counts_in(meta)
        target = 0 if self._newest is None else 1 - self._newest
        parts = sorted(name for part in self._parts for name in part.saved)
        self._backend.merge([part.store for part in self._parts])
        self._arrays.close()
        values = {"meta": meta, "stamp": self._stamp, "parts": parts}
        self._backend.store.write_new(self._stamp, archive(arrays, values))
        slot = {name: list(number) for name, number in counts._asdict().items()}
        slots = self._slots() if self._backend.spare_checkpoints else [None, None]
        slots[target] = slot | {"archive": self._stamp, "parts": parts}
        attributes = self._document["attributes"] | {"slots": slots, "newest": target}
        attributes |= {_LASTING: True} if constants else {}
        return seal(self._document | {"attributes": attributes}, "attributes")

    def commit(
        self,
        arrays: Mapping[str, Any],
        meta: Mapping[str, Any],
        documents: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write a checkpoint and commit it with other documents; return True if it is the first.

        Raises
        ------
        OptionError, OSError
            As `write`; the previous checkpoint stays current.
        StoreError
            If another process has committed.
        """
        marker = self.write(arrays, meta)
        counts, first = self.counts_in(meta), self._newest is None
        message = "draws per chain: " + ", ".join(map(str, counts.draws))
        self.publish({**(documents or {}), MARKER: marker}, message)
        self._document, self._newest, self.counts = marker, marker["attributes"]["newest"], counts
        self._start_parts()
        self._last_commit = time.monotonic()
        self._costs = self._costs[1], max(0.0, self._last_commit - self._last_check)
        return first

    def publish(self, documents: Mapping[str, Any], message: str) -> None:
        """Commit everything that was written, with the documents."""
        marker = documents.get(MARKER, self._document)
        archives = {_LASTING, *(name for part in self._parts for name in part.saved)}
        for number, slot in enumerate(marker["attributes"].get("slots") or ()):
            if slot:
                archives |= {_archive_of(slot, number), *slot.get("parts", ())}
        self._backend.commit(documents, archives, message)

    def _slots(self) -> list[Any]:
        return list(self._document["attributes"].get("slots") or [None, None])

    def _start_parts(self) -> None:
        """Start the parts of the next checkpoint, with a new stamp."""
        self._stamp, self._parts = uuid.uuid4().hex, list["Writer"]()

    @property
    def shared(self) -> Path | bool:
        """See `Backend.shared`."""
        return self._backend.shared

    def writer(self) -> "Writer":
        """Return a writer for another process, to be passed to `add_parts` afterwards.

        Raises
        ------
        StoreError
            If the run is in the memory of this process.
        """
        from daskfactor.runs.writer import Writer

        return Writer(self._backend.fork(), self._backend.name, self._stamp)

    def add_parts(self, parts: "Sequence[Writer]") -> None:
        """Include the writes of returned writers in the next checkpoint."""
        self._parts += parts

    def is_due(self) -> bool:
        """Check whether a checkpoint is due, by the time and cost of the last two."""
        self._last_check, interval = time.monotonic(), self._backend.checkpoint_interval
        cost = min(self._costs)  # a single one may be slow by accident, often the first one
        if not interval and cost < CHEAP_SECONDS:
            return True
        return self._last_check - self._last_commit >= max(interval, cost / MAX_COST_SHARE)

    def load(self) -> tuple[Mapping[str, NDArray[Any]], dict[str, Any]]:
        """Open the newest undamaged checkpoint and make it the current one; return arrays and meta.

        Arrays are read on access, until another checkpoint is opened or closed.

        Raises
        ------
        StoreFormatError
            If there is no checkpoint, or all are damaged.
        """
        self._backend.discard_forks()  # a lost worker may still be writing
        self._start_parts()  # parts of a failed checkpoint are of another cycle
        if self._newest is None:
            raise StoreFormatError(
                f"{self._backend.name} holds no checkpoint: the run was stopped before its first "
                "one; start it again with overwrite=True"
            )
        faults = []
        for number in (self._newest, 1 - self._newest):
            if (slot := self._slots()[number]) is None:
                continue
            name = _archive_of(slot, number)
            try:
                meta = self._open(name)
                self.counts, self._newest = self.counts_in(meta), number
            except StoreError:
                raise
            except DAMAGE as error:
                faults.append(f"{name}.npz: {error}")
            else:
                return self._arrays, meta
        raise StoreFormatError(
            f"no checkpoint of {self._backend.name} is whole ({'; '.join(faults)}); its draws can "
            "still be read, but the run cannot be resumed"
        )

    def _open(self, name: str) -> dict[str, Any]:
        """Open a checkpoint with all of its parts; return its meta."""
        self._arrays.close()
        self._arrays = Archives(self._backend.store, backend=self._backend)
        values = self._arrays.add(name)
        for part in values.get("parts", ()):
            if self._arrays.add(part)["stamp"] != values["stamp"]:
                raise ValueError(f"{part}.npz is of another checkpoint")
        if self._document["attributes"].get(_LASTING):
            self._arrays.add(_LASTING)
        meta: dict[str, Any] = values["meta"]
        return meta

    def close(self) -> None:
        """Close the open checkpoint."""
        self._arrays.close()

    def counts_in(self, meta: Mapping[str, Any]) -> Counts:
        """Return the number of draws per chain in the meta of a checkpoint."""
        numbers = meta["draws"], meta.get("warmup_draws", self._warmup)
        return Counts(*(tuple(np.broadcast_to(each, self._chains).tolist()) for each in numbers))


def plain(value: Any) -> Any:
    """Convert a value to JSON types: NumPy numbers and arrays, tuples to lists, keys to text.

    Raises
    ------
    OptionError
        If it contains another type.
    """

    def convert(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        raise TypeError(f"it holds a {type(item).__name__}")

    try:
        return json.loads(json.dumps(value, default=convert))
    except (TypeError, ValueError) as error:
        raise OptionError(
            "what is written down about a run must be text, numbers, flags or None, lists of these "
            f"or dicts of them by text; got {str(value)[:200]}: {error}"
        ) from error
