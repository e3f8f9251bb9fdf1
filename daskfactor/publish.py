"""Publish files and folders whole: each is made beside its name, which is reserved meanwhile.

``.NAME.partial`` beside NAME is the folder of the one process that makes NAME: it holds ``lock``,
``new`` has what it makes, ``old`` what it replaces. Nothing that exists is touched before its
replacement is whole. The next process that writes NAME puts back or removes what a killed one
left there.
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
"""Constants of Linux for `renameat2`."""


class Lock:
    """An exclusive lock, released when the process ends in any way.

    Parameters
    ----------
    folder
        The folder of the file ``lock``, and of ``writer``, which names the process; to be set
        anew when the folder is renamed.
    what
        The path that the process writes, for the message.

    Raises
    ------
    StoreError
        If another process holds the lock, or this one already.
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
                    # A file system without locks: the caller has to see to it alone.
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
        """Check that the file in the folder is the one that is locked, not a later one."""
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
    """A name that is reserved for a file or folder in the making. Use as a context manager.

    Parameters
    ----------
    path
        The name; what a symbolic link points at is replaced, not the link.

    Attributes
    ----------
    draft
        The path to make the file or folder at.

    Raises
    ------
    StoreError
        If another process is making it.
    OSError
        If the folder that the name is in cannot be written.
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
        """Give the draft its name, in place of what has it if that is to be replaced.

        Raises
        ------
        StoreError
            If something has the name that is not replaced.
        OSError
            If it cannot be done; what was there is as it was.
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
        """Give a name that nothing has; an empty folder counts as nothing where one is made."""
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
        """Remove a draft that was not published and what was replaced; release the name."""
        try:
            _remove(self._new)
            if self._target.exists():  # else it is the only one, which the next writer puts back
                _remove(self._old)
            for name in ("writer", "lock"):  # which is free from now on
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
    """Yield a path to make a file or folder at; it is published when the block ends, or never.

    Parameters
    ----------
    path, overwrite, replaceable
        As for `check_free`.

    Raises
    ------
    StoreError
        As `check_free` says, or if another process is making it.
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
    """Refuse a name that something has, unless it may be replaced.

    Parameters
    ----------
    path
        The name.
    overwrite
        Whether a file there may be replaced.
    replaceable
        Predicate of folders that may be replaced, too; default: none.

    Raises
    ------
    StoreError
        If it may not.
    """
    target = Path(path).expanduser()
    if not target.exists():
        return
    if not overwrite:
        raise _exists(target)
    if target.is_dir() and not (replaceable is not None and replaceable(str(target))):
        raise _not_replaced(target)


def recover(path: str | PathLike[str]) -> None:
    """Put back or remove what a killed process left beside a name."""
    if _folder(_resolved(path)).exists():
        with suppress(OSError, StoreError):
            Publication(path).close()


def restore(path: str | PathLike[str]) -> None:
    """Put back what a killed process had set aside, where nothing has the name."""
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
    """Return what a symbolic link points at, or the path itself."""
    target = Path(path).expanduser()
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _remove(path: Path) -> None:
    """Remove a file or folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _link(new: Path, target: Path) -> None:
    """Give a file a name that nothing has."""
    try:
        os.link(new, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):  # this file system has no links
            raise FileExistsError from error
        new.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return bool(rename(*paths, _RENAME_EXCHANGE) == 0)
