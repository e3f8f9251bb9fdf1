"""Atomic publication of files and folders, with a lock on their names.

The folder ``.NAME.partial`` next to NAME belongs to the one process that writes NAME. It contains
``lock``, the draft in ``new``, and the replaced file or folder as ``old``. Nothing is replaced
before its replacement is complete. The next process that writes NAME restores or removes what a
killed process has left there.
"""

import ctypes
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOLCK, ENOSYS, ENOTEMPTY, ENOTSUP, EPERM
from os import PathLike
from pathlib import Path
from typing import Final

from daskfactor.errors import StoreError

_NO_LOCKS: Final = frozenset({ENOLCK, ENOSYS, ENOTSUP})
_NO_LINKS: Final = frozenset({ENOSYS, ENOTSUP, EPERM})
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
"""Constants of `renameat2` on Linux."""


class Lock:
    """Exclusive lock, released when the process ends in any way.

    Parameters
    ----------
    folder
        Folder of the file ``lock``, and of ``writer`` with the name of the process. Assign it again
        after the folder is renamed.
    what
        Path that the process writes, for messages.

    Raises
    ------
    StoreError
        If another process, or this one, has the lock already.
    OSError
        If the files cannot be written.
    """

    def __init__(self, folder: Path, what: object) -> None:
        self.folder, self._handle = folder, -1
        me, writer = f"{os.getpid()} on {socket.gethostname()}", folder / "writer"
        try:
            while not self.is_current():
                self.release()
                self._handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    owner = "unknown"
                    with suppress(OSError):
                        owner = writer.read_text().strip()
                    owner = f"this process ({os.getpid()})" if owner == me else f"process {owner}"
                    raise StoreError(
                        f"{what} is being written by {owner}; wait for it to end or stop it, or "
                        "give another path"
                    ) from None
                except OSError as error:
                    # On a file system without locks the caller has to avoid two writers.
                    if error.errno not in _NO_LOCKS:
                        raise
            writer.write_text(f"{me}\n")
        except BaseException:
            self.release()
            raise

    @property
    def is_locked(self) -> bool:
        """True until the lock is released."""
        return self._handle >= 0

    def is_current(self) -> bool:
        """Check that the locked file is still the one in the folder."""
        if not self.is_locked:
            return False
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._handle), (self.folder / "lock").stat())
        return False

    def release(self) -> None:
        """Release the lock. Can be called again."""
        if self.is_locked:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.release()


class Publication:
    """Reserved name of a file or folder that is being written. A context manager.

    Parameters
    ----------
    path
        Path of the file or folder; a symbolic link is followed, not replaced.

    Attributes
    ----------
    draft
        Path to write the new file or folder to.

    Raises
    ------
    StoreError
        If another process is writing it.
    OSError
        If the parent folder cannot be written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._target = _resolved(path)
        self._folder = _folder(self._target)
        self._new, self._old = self._folder / "new", self._folder / "old"
        self.draft = self._new / self._target.name
        try:
            self._reserve()
        except StoreError:
            raise
        except OSError as error:
            error.filename = str(path)
            with suppress(OSError):
                self._folder.rmdir()
            raise

    def _reserve(self) -> None:
        while True:
            self._folder.mkdir(exist_ok=True)
            try:
                self._lock = Lock(self._folder, self._target)
                break
            except FileNotFoundError:
                continue  # its owner has just removed the folder
        try:
            if self._old.exists() and not self._target.exists():
                self._old.rename(self._target)
            _remove(self._old)
            _remove(self._new)
            self._new.mkdir()
        except BaseException:
            self.close()
            raise

    def publish(self, overwrite: bool = False) -> None:
        """Rename the draft to its name; replace an existing file or folder with ``overwrite``.

        Raises
        ------
        StoreError
            If the name exists and is not replaced.
        OSError
            If the draft cannot be renamed; nothing is changed then.
        """
        new, target = self.draft, self._target
        if not (overwrite and target.exists()):
            self._put(new, target)
        elif new.is_dir() != target.is_dir():
            raise _not_replaced(target)
        elif not new.is_dir():
            new.replace(target)
        elif not _exchange(new, target):
            try:
                target.rename(self._old)
                new.rename(target)
            except BaseException:
                if self._old.exists() and not target.exists():
                    self._old.rename(target)
                raise

    def _put(self, new: Path, target: Path) -> None:
        """Rename to a name that does not exist; a folder may replace an empty folder."""
        try:
            if new.is_dir():
                new.rename(target)
            else:
                _link(new, target)
        except OSError as error:
            if isinstance(error, FileExistsError | NotADirectoryError) or error.errno == ENOTEMPTY:
                raise _exists(target) from error
            raise

    def close(self) -> None:
        """Remove an unpublished draft and the replaced file or folder; release the name."""
        try:
            _remove(self._new)
            if (
                self._target.exists()
            ):  # otherwise it is the only copy, and the next writer restores it
                _remove(self._old)
            for name in ("writer", "lock"):  # now the name is free
                _remove(self._folder / name)
        finally:
            self._lock.release()
        with suppress(OSError):
            self._folder.rmdir()

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def publishing(
    path: str | PathLike[str],
    overwrite: bool = False,
    replaceable: Callable[[str], bool] | None = None,
) -> Iterator[Path]:
    """Yield a path for a new file or folder, which is published when the block ends without error.

    Parameters
    ----------
    path, overwrite, replaceable
        See `check_free`.

    Raises
    ------
    StoreError
        See `check_free`; also if another process is writing it.
    OSError
        If it cannot be written.
    """
    check_free(path, overwrite, replaceable)
    with Publication(path) as publication:
        yield publication.draft
        check_free(path, overwrite, replaceable)
        publication.publish(overwrite)


def check_free(
    path: str | PathLike[str],
    overwrite: bool = False,
    replaceable: Callable[[str], bool] | None = None,
) -> None:
    """Raise StoreError if a path exists and must not be replaced.

    Parameters
    ----------
    path
        Path of a file or folder.
    overwrite
        True if an existing file may be replaced.
    replaceable
        Predicate of folders that may be replaced, too; by default none.

    Raises
    ------
    StoreError
        If it must not be replaced.
    """
    target = Path(path).expanduser()
    if not target.exists():
        return
    if not overwrite:
        raise _exists(target)
    if target.is_dir() and not (replaceable is not None and replaceable(str(target))):
        raise _not_replaced(target)


def recover(path: str | PathLike[str]) -> None:
    """Restore or remove the files that a killed process has left next to a name."""
    if _folder(_resolved(path)).exists():
        with suppress(OSError, StoreError):
            Publication(path).close()


def restore(path: str | PathLike[str]) -> None:
    """Restore a missing file or folder that a killed process was replacing."""
    if not Path(path).exists():
        recover(path)


def _exists(target: Path) -> StoreError:
    return StoreError(f"{target} exists already; give another name, or allow overwrite=True")


def _not_replaced(target: Path) -> StoreError:
    kind = "folder" if target.is_dir() else "file"
    return StoreError(
        f"{target} is a {kind} that is not replaced; give another name, or remove it yourself"
    )


def _resolved(path: str | PathLike[str]) -> Path:
    """Return the target of a symbolic link, or the path itself."""
    target = Path(path).expanduser()
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _remove(path: Path) -> None:
    """Remove a file or folder as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _link(new: Path, target: Path) -> None:
    """Rename a file to a name that does not exist."""
    try:
        os.link(new, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):  # a file system without hard links
            raise FileExistsError from error
        new.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if this is not supported."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return bool(rename(*paths, _RENAME_EXCHANGE) == 0)
