"""Storage backends of runs: a folder, or an Icechunk repository; and views for reading.

All backends hold the same items under the same names: JSON documents (``zarr.json`` of the root and
of each node), zarr chunks, and archives. Chunks and archives are written at any time, an archive
never twice; a commit makes them count, by replacing the documents that name them. It fails if
another process has committed since, so that a run has one writer.
"""

import json
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Protocol

from daskfactor.data.icechunks import icechunk_missing, is_installed
from daskfactor.errors import OptionError, StoreError
from daskfactor.publish import Lock, Publication, recover, restore
from daskfactor.runs.files import (
    MARKER,
    NODE,
    PARTIAL,
    conflict_error,
    disk_errors,
    remove_scratch,
    replace_json,
    scratch_folder,
    seal,
    write_json,
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

    def contents(self) -> str | None:
        """Describe content that is not a run; return None if a run can be created there."""

    def document(self, key: str) -> Any:
        """Return a JSON document; raise OSError if it is missing, ValueError if it is invalid."""

    def chunks(self) -> Any:
        """Return a zarr store for reading."""


class ZarrView:
    """One version of a run in a zarr store: a snapshot, or a copy of a folder at a URL."""

    def __init__(self, name: str, store: Any, description: str = "a zarr store") -> None:
        self._name, self.store, self._description = name, store, description

    @property
    def name(self) -> str:
        return self._name

    def exists(self) -> bool:
        return self._get(NODE) is not None

    def contents(self) -> str | None:
        return self._description if self.exists() else None

    def document(self, key: str) -> Any:
        text = self._get(key)
        if text is None:
            raise FileNotFoundError(f"there is no {key}")
        return json.loads(text)

    def chunks(self) -> Any:
        return self.store

    def _get(self, key: str) -> bytes | None:
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        buffer = sync(self.store.get(key, default_buffer_prototype()))
        return None if buffer is None else buffer.to_bytes()


class Backend(View, Protocol):
    """A run for writing, by one process at a time, which reads what is not committed yet, too.

    Attributes
    ----------
    checkpoint_interval
        Minimum seconds between checkpoints; 0 if they are cheap.
    spare_checkpoints
        Number of older checkpoints to keep besides the newest, against damage.
    store
        The zarr store to write to. Like those of `fork`, it also has ``write_new(name, write)``,
        which passes an open file to ``write``; ``open_archive(name)``; and ``flush()``.
    """

    checkpoint_interval: ClassVar[float]
    spare_checkpoints: ClassVar[int]
    store: Any

    @property
    def shared(self) -> Path | bool:
        """Folder that other processes must be able to write to; True or False for all or none."""

    def committed(self) -> "View":
        """Return a view of the last version that this process has committed."""

    def commit(self, documents: Mapping[str, Any], archives: Collection[str], message: str) -> None:
        """Make a version of everything that was written, visible to readers at once.

        Parameters
        ----------
        documents
            JSON documents to replace, in this order.
        archives
            Names of the archives of this version; all others are deleted.
        message
            Description of the version.

        Raises
        ------
        StoreError
            If the version that this process has read or made last is not the newest any more.
        """

    def fork(self) -> Any:
        """Return a zarr store that can be pickled to write from another process."""

    def discard_forks(self) -> None:
        """Discard all writes to stores that `fork` returned, and uncommitted moments."""

    def merge(self, stores: Sequence[Any]) -> None:
        """Merge the writes to stores that `fork` returned."""

    def writing(self, what: str, safe: str, again: str) -> AbstractContextManager[None]:
        """Turn write errors into a StoreError that says what is safe and what to do."""

    def discard(self) -> None:
        """Remove the run, unless another process has written it since, and close the backend."""

    def close(self) -> None:
        """End writing; uncommitted writes are lost."""


class FolderView(ZarrView):
    """A run in a folder, for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        restore(self.path)
        return self.path.exists()

    def contents(self) -> str | None:
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return None
        if not self.path.is_dir():
            return "a file"
        return f"a folder with {', '.join(sorted(file.name for file in self.path.iterdir())[:3])}"

    def chunks(self) -> Any:
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=True)

    def _get(self, key: str) -> bytes:
        return (self.path / key).read_bytes()


class LocalBackend(FolderView):
    """A run in a folder, for writing.

    Each file is replaced atomically. A commit flushes archives and chunks to disk before it
    replaces the marker. Moments, which every checkpoint rewrites, are written to a folder that the
    marker then names, and move into their arrays at the next commit: so a kill at any time leaves
    all moments of one checkpoint.
    """

    checkpoint_interval: ClassVar[float] = 0.0
    spare_checkpoints: ClassVar[int] = 1

    def __init__(
        self, path: Path, lock: Lock | None = None, reservation: "Reservation | None" = None
    ) -> None:
        from daskfactor.runs.zarr_stores import DurableStore

        super().__init__(path)
        self._lock, self._reservation = lock, reservation
        self._staging: Path | None = None
        self.store = DurableStore(path)
        self._version, self._found = uuid.uuid4().hex, None
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            attributes = self.document(MARKER)["attributes"]
            self._found = attributes.get("version")
            self._start_layer(attributes.get("moments"))

    @property
    def name(self) -> str:
        return str(self.path) if self._reservation is None else self._reservation.path

    @classmethod
    def opened(cls, path: Path) -> "LocalBackend":
        """Lock a run for writing, and remove files that killed writers have left."""
        recover(path)
        lock = writer_lock(path)
        try:
            for leftover in [*path.rglob(f"*{PARTIAL}")]:
                remove_scratch(leftover)
            return cls(path, lock)
        except BaseException:
            lock.release()
            raise

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
        write_json(backend.store, MARKER, {"attributes": {}})
        return backend

    @property
    def shared(self) -> Path | bool:
        return scratch_folder(self.path)

    def committed(self) -> View:
        return self

    def commit(self, documents: Mapping[str, Any], archives: Collection[str], message: str) -> None:
        """Replace the documents, the marker last, and give a new run its name."""
        del message
        marker = self.document(MARKER)
        if marker["attributes"].get("version") not in (self._found, self._version):
            raise conflict_error(self.name)
        scratch = scratch_folder(self.path)
        layer = next((name for name in self.store.layers[:1] if (scratch / name).is_dir()), None)
        self.store.settle()
        self.store.flush()
        marker = documents.get(MARKER, marker)
        marker["attributes"] |= {"version": self._version, "moments": layer}
        for key, document in {**documents, MARKER: seal(marker, "attributes")}.items():
            replace_json(self.path / key, document, scratch)
        self._start_layer(layer)
        for file in scratch.glob("*.npz"):
            if file.stem not in archives:
                file.unlink(missing_ok=True)
        if self._reservation is not None:
            self._publish(self._reservation)

    def _start_layer(self, committed: str | None) -> None:
        """Start a new layer of moments on top of the committed one; remove all others."""
        self.store.layers = (f"moments-{uuid.uuid4().hex}", *filter(None, [committed]))
        self._remove_layers()

    def _remove_layers(self) -> None:
        """Remove uncommitted and settled moments."""
        for folder in scratch_folder(self.path).glob("moments-*"):
            if folder.name not in self.store.layers[1:]:
                remove_scratch(folder)

    def _publish(self, reservation: "Reservation") -> None:
        self.path = reservation.publish()
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
        return type(self.store)(self.path, self._staging, self.store.layers)

    def discard_forks(self) -> None:
        if self._staging is not None:
            remove_scratch(self._staging)
            self._staging = None
        self._remove_layers()

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
        from daskfactor.runs.repository import repository_view

        cloud = text.scheme in CLOUD
        repository = repository_view(text, snapshot) if cloud and is_installed() else None
        if repository is not None:
            return repository
        view = ZarrView(text, plain_store(text))
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
        If another process writes to the folder, or the location is not writable.
    """
    if not is_url(path):
        return LocalBackend.opened(Path(path))
    refuse_url(path)
    from daskfactor.data.icechunks import repository_at
    from daskfactor.runs.repository import RepositoryBackend

    return RepositoryBackend(path, repository_at(path, make=True))


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

    def new_backend(self) -> Backend:
        """Return the backend of the new run, invisible before its first commit; close it."""
        if self._publication is None:
            from daskfactor.runs.repository import RepositoryBackend

            return RepositoryBackend.created(self.path, self.replaces)
        with self._disk_errors():
            return LocalBackend.for_new_run(self, self._publication.draft)

    def publish(self) -> Path:
        """Give the run its name, replacing an earlier run; return its path."""
        assert self._publication is not None
        self._publication.publish(self.replaces)
        self.close()
        return Path(self.path)

    def close(self) -> None:
        """Release the name; an unpublished run is removed. Can be called again."""
        if self._replaced is not None:
            self._replaced.release()  # NFS keeps the folder of an open file
        if self._publication is not None:
            self._publication.close()
        self._replaced = self._publication = None

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors("a new run store", Path(self.path), "nothing was changed", "begin again")
