"""Files of a run store: replaced atomically, flushed to disk, checked when read, one writer.

zarr's own LocalStore writes a temporary file beside its target and renames it (since zarr
3.1.3, which is why no older one will do). It does not flush to disk, and a temporary file
beside a node's metadata would be taken for a broken member; so metadata of a store that has
readers are replaced by `replace_json`.

Checkpoints are two alternating files, and a marker that says which of them counts. The file
that does not count is replaced and flushed first; then the marker, one small file, is
replaced in an instant. Killed at any moment, the store still holds the last checkpoint whole.
Each file is a NumPy archive, with a CRC-32 of every array and with its own description, so
that either may take the other's place. Arrays that a run needs all along and never changes are
in a third one.
"""

import contextlib
import json
import os
import re
import socket
import sys
import uuid
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from errno import EDQUOT, ENOLCK, ENOSPC, ENOSYS, ENOTSUP
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import fsspec
import google_crc32c
import numpy as np
from filelock import BaseFileLock, FileLock, Timeout
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, WrapperStore

from daskfactor.errors import OptionError, StoreError, StoreFormatError

Arrays = dict[str, NDArray[Any]]

NODE: Final = "zarr.json"
CHECKPOINT: Final = "checkpoint"
STATE: Final = "state"
PARTIAL: Final = ".partial"
_DISK_FULL: Final = frozenset({ENOSPC, EDQUOT})
_NO_LOCKS: Final = frozenset({ENOLCK, ENOSYS, ENOTSUP})
_CHUNK: Final = re.compile(r"(?P<array>.+)/c(/\d+)*")
SEAL: Final = "crc32"
"""Key under which a document keeps the checksum of all else that it says."""


def replace_file(path: Path, write: Callable[[Any], object], scratch: Path) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    File and name are forced to the disk, so that a power cut keeps the promise.

    Parameters
    ----------
    path
        The target; its folder is made if need be.
    write
        Called with the open file.
    scratch
        Folder on the same file system for the file in the making.

    Raises
    ------
    OSError
        If the disk is full or the folder cannot be written; the target is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    making = scratch / f"{uuid.uuid4().hex}{PARTIAL}"
    try:
        with making.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    _flush_path(path.parent)


def replace_json(path: Path, document: Any, scratch: Path) -> None:
    """Replace a JSON file atomically and force it to the disk."""
    text = json.dumps(document).encode()
    replace_file(path, lambda file: file.write(text), scratch)


def read_json(path: Path | str) -> Any:
    """Read a JSON file, local or at a URL; ValueError if it is none, OSError if it is not there."""
    if "://" not in str(path):
        return json.loads(Path(path).read_bytes())
    with fsspec.open(str(path), "rb") as file:
        return json.load(file)


def seal(document: dict[str, Any], part: str) -> dict[str, Any]:
    """Put a checksum of the whole document into one of its parts."""
    bare = {name: entry for name, entry in document[part].items() if name != SEAL}
    text = json.dumps(document | {part: bare}, sort_keys=True)
    return document | {part: bare | {SEAL: zlib.crc32(text.encode())}}


def check_seal(document: dict[str, Any], part: str) -> None:
    """Compare a document with its checksum, if it has one: others may have rewritten it.

    Raises
    ------
    ValueError
        If they do not agree.
    """
    found = document[part].get(SEAL)
    if found is not None and found != seal(document, part)[part][SEAL]:
        raise ValueError("its checksum does not agree")


def damaged(where: object, why: str) -> StoreFormatError:
    """The one sentence about a run store that is not as it was written."""
    return StoreFormatError(f"{where} is a damaged run store: {why}; restore it from a copy")


def _flush_path(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and orders renames itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class DurableStore(LocalStore):
    """A local zarr store that remembers what it wrote and can flush all of it to disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._unflushed: set[Path] = set()

    def with_read_only(self, read_only: bool = False) -> Self:
        """Give the store itself: it is only ever opened for writing."""
        return self

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        await super().set(key, value)
        self._unflushed.add(self.root / key)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        super().set_sync(key, value)
        self._unflushed.add(self.root / key)

    def flush(self) -> None:
        """Force every file written since the last flush, and its name, to the disk."""
        folders: set[Path] = set()
        for path in self._unflushed:
            with contextlib.suppress(FileNotFoundError):
                _flush_path(path)
                folders.update((path.parent, path.parent.parent))
        for folder in folders:
            _flush_path(folder)
        self._unflushed.clear()


class CheckedStore(WrapperStore[Any]):
    """A zarr store to read from, in which a chunk is whole or a sentence about damage is raised.

    Parameters
    ----------
    store
        Where the chunks are.
    where
        The run store, for the message.
    checked
        Paths of the arrays whose chunks end in a CRC-32C and all exist, as far as they are read.
    """

    def __init__(self, store: Any, where: str = "", checked: Collection[str] = ()) -> None:
        super().__init__(store)
        self.where = where
        self.checked = set(checked)
        self.partial: set[str] = set()
        """Groups that may lack chunks: their values are being written for the first time."""
        self._token = uuid.uuid4().hex

    def _with_store(self, store: Any) -> Self:
        other = type(self)(store, self.where, self.checked)
        other.partial = self.partial
        return other

    def __dask_tokenize__(self) -> tuple[str, str]:
        # The same path may hold other draws the next time it is opened.
        return (self.where, self._token)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Read one value.

        Raises
        ------
        StoreFormatError
            If it is a chunk that is damaged or gone.
        """
        found: Buffer | None = await self._store.get(key, prototype, byte_range)
        chunk = _CHUNK.fullmatch(key)
        if chunk is None or chunk["array"] not in self.checked or byte_range is not None:
            return found
        if found is None:
            if key.split("/", maxsplit=1)[0] in self.partial:
                return None
            raise damaged(self.where, f"{key} is missing")
        raw = found.as_numpy_array().tobytes()
        if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
            raise damaged(self.where, f"{key} is not what was written")
        return found


def writer_lock(run: Path) -> BaseFileLock:
    """Take the exclusive right to write a run store, given up when the process ends in any way.

    Raises
    ------
    StoreError
        If another writer, here or in another process, holds it, or if the store is damaged or
        write-protected.
    """
    folder = scratch_folder(run)
    lock, name = FileLock(folder / "lock", thread_local=False), folder / "writer"
    me = f"{os.getpid()} on {socket.gethostname()}"
    try:
        with contextlib.suppress(NotImplementedError):
            lock.acquire(timeout=0)
        name.write_text(f"{me}\n")
    except Timeout as error:
        owner = name.read_text().strip() if name.exists() else "unknown"
        owner = f"this process ({os.getpid()})" if owner == me else f"process {owner}"
        raise StoreError(
            f"{run} is being written by {owner}; wait for it to end or stop it, or give this "
            "run another path"
        ) from error
    except FileNotFoundError as error:
        raise damaged(run, "its checkpoint folder is gone") from error
    except PermissionError as error:
        raise StoreError(f"{run} cannot be written: {error.strerror}; open it to read") from error
    except OSError as error:
        # A file system without locks: the caller has to see to it alone.
        if error.errno not in _NO_LOCKS:
            raise
    return lock


@contextlib.contextmanager
def disk_errors(what: str, path: Path, safe: str, again: str = "resume the run") -> Iterator[None]:
    """Turn an OSError of a write into one sentence that says what is safe.

    Parameters
    ----------
    what
        What was being written.
    path
        The store.
    safe
        What survives, as a sentence.
    again
        What to do once the disk is mended.

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
        remedy = f"{'free some space' if full else 'mend this'} and {again}"
        failure = StoreError(f"could not write {what} to {path}, {cause}; {safe}; {remedy}")
        failure.errno = error.errno
        raise failure from error


_META: Final = ".meta"
_LASTING: Final = "lasting"
_DAMAGE: Final = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError),
)
"""What NumPy and zipfile raise on archives whose bytes have changed."""


class Counts(NamedTuple):
    """Draws that a checkpoint vouches for, per chain."""

    draws: tuple[int, ...]
    warmup_draws: tuple[int, ...]


def scratch_folder(root: Path) -> Path:
    """Where checkpoints, lock and files in the making are: an array's folder, not listed."""
    return root / CHECKPOINT / STATE


def read_marker(root: str | PathLike[str]) -> dict[str, Any]:
    """Read the document of the group ``checkpoint``.

    Raises
    ------
    StoreFormatError
        If it is damaged or gone.
    """
    try:
        document = dict(read_json(f"{root}/{CHECKPOINT}/{NODE}"))
        check_seal(document, "attributes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(root, f"{CHECKPOINT}/{NODE} cannot be read ({error})") from error
    return document


def counts_of(marker: Mapping[str, Any], chains: int) -> Counts:
    """Draws that the newest checkpoint of a marker vouches for; none, if there is none."""
    slots, newest = marker["attributes"].get("slots"), marker["attributes"].get("newest")
    if not slots or newest is None or slots[newest] is None:
        return Counts((0,) * chains, (0,) * chains)
    return Counts(tuple(slots[newest]["draws"]), tuple(slots[newest]["warmup_draws"]))


class Checkpoints:
    """The checkpoints of one run store.

    Parameters
    ----------
    root
        The run store.
    chains, warmup_draws
        Of the run, to read the counts in a checkpoint's meta.
    """

    def __init__(self, root: Path, chains: int, warmup_draws: int) -> None:
        self._root = root
        self._chains = chains
        self._warmup = warmup_draws
        self._document = read_marker(root)
        self._newest: int | None = self._document["attributes"].get("newest")
        self.counts = counts_of(self._document, chains)
        """Draws that exist."""

    def commit(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> bool:
        """Write a checkpoint and make it the one that counts; True if it is the first.

        Raises
        ------
        OptionError
            If ``meta`` does not say how many draws there are, or an array is not of numbers.
        OSError
            If it cannot be written; the previous checkpoint still counts.
        """
        counts = self.counts_in(meta)
        first = self._newest is None
        target = 1 - (1 if self._newest is None else self._newest)
        self._write(f"{target}", arrays, meta)
        slots = list(self._document["attributes"].get("slots") or [None, None])
        slots[target] = {name: list(number) for name, number in counts._asdict().items()}
        self._mark(slots=slots, newest=target)
        self._newest, self.counts = target, counts
        return first

    def keep(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write arrays that `load` adds to every checkpoint's.

        Raises
        ------
        OptionError
            If an array is not of numbers.
        OSError
            If they cannot be written.
        """
        if arrays:
            self._write(_LASTING, arrays, {})
            self._mark(**{_LASTING: True})

    def _write(
        self, name: str, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
    ) -> None:
        """Replace an archive of arrays and JSON values."""
        found = {name: np.asarray(array) for name, array in arrays.items()}
        for own, array in found.items():
            if array.dtype.kind not in "biufc":
                raise OptionError(
                    f"checkpoint array {own!r} must hold numbers, got dtype {array.dtype}"
                )
        text = json.dumps({"names": list(found), "meta": plain(meta)}).encode()
        found[_META] = np.frombuffer(text, dtype=np.uint8)
        scratch = scratch_folder(self._root)
        save: Any = np.savez  # names of arrays may be those of its own arguments
        replace_file(scratch / f"{name}.npz", lambda file: save(file, **found), scratch)

    def _mark(self, **attributes: Any) -> None:
        """Change what the marker says, in an instant."""
        document = self._document | {"attributes": self._document["attributes"] | attributes}
        self._document = seal(document, "attributes")
        replace_json(self._root / CHECKPOINT / NODE, self._document, scratch_folder(self._root))

    def load(self) -> tuple[Arrays, dict[str, Any]]:
        """Read the newest checkpoint that is whole; from now on it is the one that counts.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        if self._newest is None:
            raise StoreFormatError(
                f"{self._root} holds no checkpoint: the run was stopped before its first one; "
                "start it again with overwrite=True"
            )
        faults, marked = [], self._document["attributes"].get(_LASTING)
        try:
            lasting = self._read(_LASTING)[0] if marked else {}
        except _DAMAGE as error:
            raise damaged(self._root, f"{_LASTING}.npz cannot be read ({error})") from error
        for slot in (self._newest, 1 - self._newest):
            try:
                arrays, meta = self._read(f"{slot}")
                self.counts, self._newest = self.counts_in(meta), slot
            except _DAMAGE as error:
                faults.append(f"{slot}.npz: {error}")
            else:
                return arrays | lasting, meta
        raise StoreFormatError(
            f"no checkpoint of {self._root} is whole ({'; '.join(faults)}); "
            "its draws can still be read, but the run cannot be resumed"
        )

    def _read(self, name: str) -> tuple[Arrays, dict[str, Any]]:
        path = scratch_folder(self._root) / f"{name}.npz"
        with path.open("rb") as file, np.load(file) as archive:
            told = json.loads(archive[_META].tobytes())
            return {own: archive[own] for own in told["names"]}, told["meta"]

    def counts_in(self, meta: Mapping[str, Any]) -> Counts:
        """Counts that a checkpoint's meta says, of every chain.

        Raises
        ------
        OptionError
            If they are no numbers of draws.
        """
        told = {"draws": meta.get("draws"), "warmup_draws": meta.get("warmup_draws", self._warmup)}
        found = []
        for name, value in told.items():
            counts = np.asarray(value)
            of_chains = counts.shape in ((), (self._chains,))
            if not of_chains or counts.dtype.kind not in "iu" or counts.min() < 0:
                raise OptionError(
                    f"meta[{name!r}] of a checkpoint must be a number of draws, or one per chain "
                    f"({self._chains}), got {value!r}"
                )
            found.append(tuple(np.broadcast_to(counts, self._chains).tolist()))
        return Counts(*found)


def plain(value: Any) -> Any:
    """Turn NumPy numbers and arrays into Python's, tuples into lists, keys into text, as in JSON.

    Raises
    ------
    OptionError
        If it holds anything that JSON does not have.
    """

    def known(other: Any) -> Any:
        if isinstance(other, Mapping):
            return dict(other)
        if isinstance(other, np.ndarray | np.generic):
            return other.tolist()
        raise TypeError(f"it holds a {type(other).__name__}")

    try:
        return json.loads(json.dumps(value, default=known))
    except (TypeError, ValueError) as error:
        raise OptionError(
            "what is written down about a run must be text, numbers, flags or None, lists of these "
            f"or dicts of them by text; got {str(value)[:200]}: {error}"
        ) from error
