"""Storage backends of runs: a folder, a plain zarr store at a URL, or an Icechunk repository.

All backends hold the same items under the same names: JSON documents (``zarr.json`` of the root and
of each node), zarr chunks, and the archives of checkpoints. A backend defines how they are stored,
which process may write them, and when readers see them.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

from daskfactor.data.icechunks import icechunk_missing, is_installed
from daskfactor.errors import OptionError, StoreError
from daskfactor.publish import Lock, Publication, recover, restore
from daskfactor.results.files import (
    MARKER,
    PARTIAL,
    disk_errors,
    read_json,
    remove_scratch,
    replace_json,
    scratch_folder,
    writer_lock,
)
from daskfactor.urls import CLOUD, Location, is_url, public_location


class View(Protocol):
    """One version of a run, for reading."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    def exists(self) -> bool:
        """Check whether anything exists there."""

    def kind(self) -> str | None:
        """Return the kind of the content, as `daskfactor.data.places.kind_of` does."""

    def contents(self) -> str | None:
        """Describe content that is not a run; return None if a run can be created there."""

    def document(self, key: str) -> Any:
        """Return a JSON document; raise OSError if it is missing, ValueError if it is invalid."""

    def chunks(self) -> Any:
        """Return a zarr store for reading."""


class Backend(View, Protocol):
    """A run for writing, by one process at a time.

    Attributes
    ----------
    checkpoint_interval
        Minimum seconds between checkpoints; 0 if they are cheap.
    store
        The zarr store to write to.
    """

    checkpoint_interval: ClassVar[float]
    store: Any

    @property
    def shared(self) -> Path | bool:
        """Folder that other processes must be able to write to; True or False for all or none."""

    def replace(self, key: str, document: Any) -> None:
        """Replace a JSON document."""

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        """Replace an archive; ``write`` receives the open file."""

    def open_archive(self, name: str) -> IO[bytes]:
        """Open an archive for reading."""

    def remove_archives(self, keep: Collection[str]) -> None:
        """Remove the archives of writers, except those to keep."""

    def flush(self) -> None:
        """Make everything that was written durable."""

    def commit(self, message: str) -> None:
        """Make everything that was written visible to readers, atomically."""

    def fork(self) -> Any:
        """Return a zarr store that can be pickled to write chunks from another process."""

    def discard_forks(self) -> None:
        """Discard all writes to stores that `fork` returned."""

    def merge(self, stores: Sequence[Any]) -> None:
        """Merge the writes to stores that `fork` returned."""

    def writing(self, what: str, safe: str, again: str) -> AbstractContextManager[None]:
        """Turn write errors into a StoreError that says what is safe and what to do."""

    def discard(self) -> None:
        """Remove the run, unless another process has written it since, and close the backend."""

    def close(self) -> None:
        """Release the right to write; uncommitted writes are lost."""


class FolderView:
    """A run in a folder, for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        restore(self.path)
        return self.path.exists()

    def kind(self) -> str | None:
        from daskfactor.data.places import kind_of

        kind = kind_of(self.name)
        return "run" if kind == "folder" and scratch_folder(self.path).is_dir() else kind

    def contents(self) -> str | None:
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return None
        if not self.path.is_dir():
            return "a file"
        return f"a folder with {', '.join(sorted(file.name for file in self.path.iterdir())[:3])}"

    def document(self, key: str) -> Any:
        return read_json(self.path / key)

    def chunks(self) -> Any:
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=True)


class LocalBackend(FolderView):
    """A run in a folder, for writing: each file is replaced atomically and flushed to disk."""

    checkpoint_interval: ClassVar[float] = 0.0

    def __init__(
        self, path: Path, lock: Lock | None = None, reservation: "Reservation | None" = None
    ) -> None:
        from daskfactor.results.zarr_stores import DurableStore

        super().__init__(path)
        self._lock, self._reservation = lock, reservation
        self._staging: Path | None = None
        self.store = DurableStore(path)

    @property
    def name(self) -> str:
        return str(self.path) if self._reservation is None else self._reservation.path

    @classmethod
    def opened(cls, path: Path) -> "LocalBackend":
        """Lock a run for writing, and remove files that killed writers have left."""
        recover(path)
        lock = writer_lock(path)
        for leftover in [*path.rglob(f"*{PARTIAL}")]:
            remove_scratch(leftover)
        return cls(path, lock)

    @classmethod
    def for_new_run(cls, reservation: "Reservation", path: Path) -> "LocalBackend":
        """Return the backend of a new run, which is invisible before its first commit."""
        scratch_folder(path).mkdir(parents=True)
        return cls(path, writer_lock(path), reservation)

    @classmethod
    def for_checkpoints(cls, path: Path) -> "LocalBackend":
        """Return a backend in an empty folder for checkpoints only."""
        scratch_folder(path).mkdir(parents=True)
        backend = cls(path)
        backend.replace(MARKER, {"attributes": {}})
        return backend

    @property
    def shared(self) -> Path | bool:
        return scratch_folder(self.path)

    def replace(self, key: str, document: Any) -> None:
        replace_json(self.path / key, document, scratch_folder(self.path))

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        self.store.save(name, write)

    def open_archive(self, name: str) -> IO[bytes]:
        return self.store.open_archive(name)

    def remove_archives(self, keep: Collection[str]) -> None:
        for file in scratch_folder(self.path).glob("*-*.npz"):
            if file.stem not in keep:
                file.unlink(missing_ok=True)

    def flush(self) -> None:
        self.store.flush()

    def commit(self, message: str) -> None:
        """Give a new run its name; an existing run is updated by its root and marker alone.

        Raises
        ------
        StoreError
            If something else has taken the name.
        """
        if self._reservation is None:
            return
        self.flush()
        self.path = self._reservation.publish()
        self._reservation = None
        self.store.follow(self.path)
        if self._lock is not None:
            self._lock.folder = scratch_folder(self.path)
        if self._staging is not None:
            self._staging = scratch_folder(self.path) / self._staging.name

    def fork(self) -> Any:
        if self._staging is None:
            self._staging = scratch_folder(self.path) / f"{uuid.uuid4().hex}{PARTIAL}"
            self._staging.mkdir()
        return type(self.store)(self.path, self._staging)

    def discard_forks(self) -> None:
        if self._staging is not None:
            remove_scratch(self._staging)
            self._staging = None

    def merge(self, stores: Sequence[Any]) -> None:
        for store in stores:
            store.flush()

    @contextmanager
    def writing(self, what: str, safe: str, again: str) -> Iterator[None]:
        try:
            with disk_errors(what, Path(self.name), safe, again):
                yield
        except StoreError as error:
            if scratch_folder(self.path).is_dir():
                raise
            raise StoreError(
                f"{self.name} was removed or moved while the run wrote to it, and nothing more can "
                "be written; begin again"
            ) from error

    def discard(self) -> None:
        has_lock = self._reservation is None and self._lock is not None and self._lock.is_current()
        with suppress(OSError, StoreError):
            if has_lock:  # remove it before another process may write there
                with Publication(self.path) as removed:
                    self.path.rename(removed.draft)
        self.close()

    def close(self) -> None:
        try:
            self.discard_forks()
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._reservation is not None:
                self._reservation.close()


def view_of(path: str | PathLike[str], snapshot: str | None = None) -> View:
    """Return a view of a run: the newest version, or a snapshot of a repository.

    Raises
    ------
    StoreError
        If the location cannot be reached, or Icechunk is not installed and nothing else is there.
    OptionError
        If a snapshot is requested of a run without snapshots.
    """
    text = public_location(path)
    view: View = FolderView(Path(text))
    if text.is_url:
        from daskfactor.data.safe_zarr import plain_store
        from daskfactor.results.repository import UrlView, repository_view

        cloud = text.scheme in CLOUD
        repository = repository_view(text, snapshot) if cloud and is_installed() else None
        if repository is not None:
            return repository
        view = UrlView(text, plain_store(text))
        if cloud and not is_installed() and not view.exists():
            raise icechunk_missing(text)
    if snapshot is not None:
        raise OptionError(
            f"snapshots are kept of runs in object stores, not of {text}; leave snapshot= out"
        )
    return view


def open_backend(path: str) -> Backend:
    """Open the run at a path or URL for writing.

    Raises
    ------
    StoreError
        If another process writes it, or the location is not writable.
    """
    if not is_url(path):
        return LocalBackend.opened(Path(path))
    refuse_url(path)
    from daskfactor.results.repository import RepositoryBackend

    return RepositoryBackend.opened(path)


def refuse_url(path: str) -> None:
    """Raise StoreError for a URL that a run cannot be written to."""
    if is_url(path) and Location(path).scheme not in CLOUD:
        raise StoreError(
            f"a run is written to a local path or to s3://, gs://, az:// or memory://, got {path}"
        )


class Reservation:
    """Reservation of the name of a new run against other processes.

    Parameters
    ----------
    path
        Local path or URL; nothing is reserved at a URL.
    check
        Raises an error for content that must not be replaced; returns True if a run is replaced.

    Raises
    ------
    StoreError
        If another process creates a run there, or writes the run to be replaced.
    """

    def __init__(self, path: str, check: Callable[[], bool]) -> None:
        self.path, self.replaces = path, check()
        self._publication: Publication | None = None
        self._replaced: Lock | None = None
        self._backend: LocalBackend | None = None
        if is_url(path):
            return
        with self._disk_errors():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._publication = Publication(path)
        try:
            self.replaces = check()  # again: now no other process can change it
            self._replaced = writer_lock(Path(path)) if self.replaces else None
        except BaseException:
            self.close()
            raise

    @contextmanager
    def new_backend(self) -> Iterator[Backend]:
        """Yield the backend of the new run, which becomes visible when the block ends.

        A run that replaces another becomes visible at its first checkpoint.
        """
        if self._publication is None:
            from daskfactor.results.repository import RepositoryBackend

            with RepositoryBackend.created(self.path, self.replaces) as repository:
                yield repository
            return
        with self._disk_errors():
            self._backend = backend = LocalBackend.for_new_run(self, self._publication.draft)
            try:
                yield backend
                if not self.replaces:
                    backend.commit("begun")
            except BaseException:
                backend.close()
                raise

    def hand_over(self) -> Backend | None:
        """Return the backend, which the caller then has to close; None at a URL."""
        backend, self._backend = self._backend, None
        return backend

    def publish(self) -> Path:
        """Give the run its name, replacing an earlier run; return its path."""
        assert self._publication is not None
        self._publication.publish(self.replaces)
        self._release()
        return Path(self.path)

    def close(self) -> None:
        """Release the name; an unpublished run is removed. Can be called again."""
        if (backend := self.hand_over()) is not None:
            backend.close()
        self._release()

    def _release(self) -> None:
        if self._replaced is not None:
            self._replaced.release()  # NFS keeps the folder of an open file
        if self._publication is not None:
            self._publication.close()
        self._replaced = self._publication = None

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors("a new run store", Path(self.path), "nothing was changed", "begin again")
