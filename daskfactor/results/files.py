"""Files of a run store: replaced atomically, flushed to disk, checked when read, one writer.

zarr's own LocalStore writes a temporary file beside its target and renames it
(since zarr 3.1; before that it wrote in place). It neither flushes to disk nor hides
the temporary file, which a reader of the group would take for a broken member.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator
from errno import EDQUOT, ENOLCK, ENOSPC, ENOSYS, ENOTSUP
from pathlib import Path
from typing import Any, Final, Self

import fsspec
import google_crc32c
from filelock import FileLock, Timeout
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, WrapperStore

from daskfactor.errors import StoreError, StoreFormatError

_DISK_FULL: Final = frozenset({ENOSPC, EDQUOT})
_NO_LOCKS: Final = frozenset({ENOLCK, ENOSYS, ENOTSUP})
_PARTIAL: Final = ".partial"
_CHUNK: Final = re.compile(r"(?P<array>.+)/c(/\d+)*")
SEAL: Final = "crc32"
"""Key under which a document keeps the checksum of all else that it says."""


def replace_file(path: Path, write: Callable[[Any], object], scratch: Path, *, flush: bool) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Parameters
    ----------
    path
        The target; its folder is made if need be.
    write
        Called with the open file.
    scratch
        Folder on the same file system for the file in the making.
    flush
        Also force file and name to the disk, so that a power cut keeps the promise.

    Raises
    ------
    OSError
        If the disk is full or the folder cannot be written; the target is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    making = scratch / f"{uuid.uuid4().hex}{_PARTIAL}"
    try:
        with making.open("wb") as file:
            write(file)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    if flush:
        _flush_path(path.parent)


def replace_json(path: Path, document: Any, scratch: Path) -> None:
    """Replace a JSON file atomically and force it to the disk."""
    text = json.dumps(document).encode()
    replace_file(path, lambda file: file.write(text), scratch, flush=True)


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


def _flush_path(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and orders renames itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(root: Path) -> None:
    """Remove what writers that were killed left behind. Only for the holder of the lock."""
    for path in root.rglob(f"*{_PARTIAL}"):
        path.unlink(missing_ok=True)


class DurableStore(LocalStore):
    """A local zarr store that writes atomically and can flush all it wrote to disk.

    Parameters
    ----------
    root
        Folder of the store.
    scratch
        Folder for files in the making, on the same file system, out of sight of readers.
    """

    def __init__(self, root: Path, *, scratch: Path) -> None:
        super().__init__(root)
        self._scratch = scratch
        self._unflushed: set[Path] = set()

    def with_read_only(self, read_only: bool = False) -> Self:
        """Give the store itself: it is only ever opened for writing."""
        return self

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        path = self.root / key
        data = value.as_numpy_array()
        replace_file(path, lambda file: file.write(data), self._scratch, flush=False)
        self._unflushed.add(path)

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
            raise self._damage(f"{key} is missing")
        raw = found.as_numpy_array().tobytes()
        if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
            raise self._damage(f"{key} is not what was written")
        return found

    def _damage(self, why: str) -> StoreFormatError:
        return StoreFormatError(
            f"{self.where} is a damaged run store: {why}; restore it from a copy"
        )


class WriterLock:
    """Exclusive right to write a run store, given up when the process ends in any way.

    Parameters
    ----------
    folder
        Where the lock is; beside it the process that wrote last is named.
    run
        The store, for messages.

    Raises
    ------
    StoreError
        If another writer, here or in another process, holds it.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        self._lock = FileLock(folder / "lock", thread_local=False)
        name = folder / "writer"
        me = f"{os.getpid()} on {socket.gethostname()}"
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            owner = name.read_text().strip() if name.exists() else "unknown"
            owner = f"this process ({os.getpid()})" if owner == me else f"process {owner}"
            raise StoreError(
                f"{run} is being written by {owner}; wait for it to end or stop it, or give this "
                "run another path"
            ) from error
        except (NotImplementedError, OSError) as error:
            # A file system without locks: the caller has to see to it alone.
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
        name.write_text(f"{me}\n")

    def release(self) -> None:
        """Give the lock up; harmless when it is not held."""
        self._lock.release()


@contextlib.contextmanager
def disk_errors(what: str, path: Path, safe: str) -> Iterator[None]:
    """Turn an OSError of a write into one sentence that says what is safe.

    Parameters
    ----------
    what
        What was being written.
    path
        The store.
    safe
        What survives, as a sentence.

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
        remedy = "free some space and resume the run" if full else "mend this and resume the run"
        failure = StoreError(f"could not write {what} to {path}, {cause}; {safe}; {remedy}")
        failure.errno = error.errno
        raise failure from error
