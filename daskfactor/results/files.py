"""Files of a run store: atomic replacement, flushing to disk, the lock of the writer.

zarr's own LocalStore writes a temporary file beside its target and renames it
(since zarr 3.1; before that it wrote in place). It neither flushes to disk nor hides
the temporary file, which a reader of the group would take for a broken member.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from errno import EDQUOT, ENOLCK, ENOSPC, ENOSYS, ENOTSUP
from pathlib import Path
from typing import Any, Final, Self

from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from daskfactor.errors import StoreError

DISK_FULL: Final = frozenset({ENOSPC, EDQUOT})
_NO_LOCKS: Final = frozenset({ENOLCK, ENOSYS, ENOTSUP})
_PARTIAL: Final = ".partial"


def replace_file(path: Path, data: Any, scratch: Path, *, flush: bool) -> None:
    """Put ``data`` at ``path`` so that a reader sees the old file or the new one, never a part.

    Parameters
    ----------
    path
        The target; its folder is made if need be.
    data
        Anything with the buffer protocol.
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
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    if flush:
        flush_path(path.parent)


def replace_json(path: Path, document: Any, scratch: Path) -> None:
    """Replace a JSON file atomically and force it to the disk."""
    replace_file(path, json.dumps(document).encode(), scratch, flush=True)


def read_json(path: Path) -> Any:
    """Content of a JSON file; ValueError if it is not JSON, OSError if it is not there."""
    return json.loads(path.read_bytes())


def flush_path(path: Path) -> None:
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
        """The store itself: it is only ever opened for writing."""
        return self

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        path = self.root / key
        replace_file(path, value.as_numpy_array(), self._scratch, flush=False)
        self._unflushed.add(path)

    def flush(self) -> None:
        """Force every file written since the last flush, and its name, to the disk."""
        folders: set[Path] = set()
        for path in self._unflushed:
            with contextlib.suppress(FileNotFoundError):
                flush_path(path)
                folders.update((path.parent, path.parent.parent))
        for folder in folders:
            flush_path(folder)
        self._unflushed.clear()


# POSIX record locks belong to the process: they vanish with it however it dies, are not
# inherited by forked workers, and a reused process id cannot be mistaken for their holder.
# They do not exclude a second writer in the same process, which this set does.
_HELD: Final[set[Path]] = set()


class WriterLock:
    """Exclusive right to write a run store, given up when the process ends in any way.

    Parameters
    ----------
    path
        The lock file; it stays behind, holding the process id of the last writer.
    run
        The store, for the message.
    """

    def __init__(self, path: Path, run: Path) -> None:
        self._path = path.resolve()
        self._run = run
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises
        ------
        StoreError
            If another writer, here or in another process, holds it.
        """
        if self._path in _HELD:
            raise StoreError(self._busy(f"this process ({os.getpid()})"))
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError as error:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            if error.errno not in _NO_LOCKS:
                raise StoreError(self._busy(f"process {owner}")) from error
            return
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._handle = handle
        _HELD.add(self._path)

    def release(self) -> None:
        """Give the lock up; harmless when it is not held."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            _HELD.discard(self._path)

    def _busy(self, owner: str) -> str:
        return (
            f"{self._run} is being written by {owner}; wait for it to end or stop it, "
            "or give this run another path"
        )


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
        full = error.errno in DISK_FULL
        cause = "the disk is full" if full else f"the system says: {error.strerror or error}"
        remedy = "free some space and resume the run" if full else "mend this and resume the run"
        failure = StoreError(f"could not write {what} to {path}, {cause}; {safe}; {remedy}")
        failure.errno = error.errno
        raise failure from error
