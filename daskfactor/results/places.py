"""Where a run is: a folder, a plain zarr store at a URL, or an Icechunk repository.

What a run consists of has the same names everywhere: JSON documents (``zarr.json`` of the root and
of each node), zarr's chunks, and archives of what a stopped run needs. A place says how these are
kept, who may write them, and when what was written is there for others.
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
from daskfactor.urls import CLOUD, is_url, located, scheme_of


class View(Protocol):
    """One version of a run, to be read."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    def exists(self) -> bool:
        """Whether there is anything at all."""

    def kind(self) -> str | None:
        """What is there, as `daskfactor.data.store.zarr_kind` tells."""

    def contents(self) -> str | None:
        """Say what is there that is no run; None where a run could be made."""

    def document(self, key: str) -> Any:
        """Read a JSON document; OSError if it is not there, ValueError if it is none."""

    def chunks(self) -> Any:
        """Give a zarr store to read from."""


class Place(View, Protocol):
    """A run to be written, by one process at a time.

    Attributes
    ----------
    every
        Seconds between checkpoints at least; 0 where one costs next to nothing.
    store
        The zarr store to write to.
    """

    every: ClassVar[float]
    store: Any

    @property
    def shared(self) -> Path | bool:
        """A folder whose owners can write here, or whether all processes can."""

    def replace(self, key: str, document: Any) -> None:
        """Replace a JSON document."""

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        """Replace an archive by what ``write`` writes into a file."""

    def saved(self, name: str) -> IO[bytes]:
        """Open an archive to read it."""

    def tidy(self, parts: Collection[str]) -> None:
        """Remove archives that writers left, but for those that a checkpoint lists."""

    def flush(self) -> None:
        """Have everything that was written outlive the process."""

    def commit(self, what: str) -> None:
        """Show readers everything that was written, at once."""

    def fork(self) -> Any:
        """Give a zarr store that can be sent to another process, to write chunks there."""

    def recall(self) -> None:
        """Have nothing more come of what is written to stores that `fork` gave."""

    def merge(self, stores: Sequence[Any]) -> None:
        """Take over what was written to stores that `fork` gave."""

    def writing(self, what: str, safe: str, again: str) -> AbstractContextManager[None]:
        """Turn a failure to write into a sentence that says what is safe, and what to do then."""

    def discard(self) -> None:
        """Remove the run, unless others have written it meanwhile, and let go of its place."""

    def close(self) -> None:
        """Let others write; what was not committed is lost."""


class Folder:
    """A run in a folder, to be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        restore(self.path)
        return self.path.exists()

    def kind(self) -> str | None:
        from daskfactor.data.store import zarr_kind  # what takes long to import is not needed here

        if (found := zarr_kind(self.name)) is not None:
            return found
        return "run" if scratch_folder(self.path).is_dir() else None

    def contents(self) -> str | None:
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return None
        if not self.path.is_dir():
            return "a file"
        return f"a folder with {', '.join(sorted(one.name for one in self.path.iterdir())[:3])}"

    def document(self, key: str) -> Any:
        return read_json(self.path / key)

    def chunks(self) -> Any:
        from zarr.storage import LocalStore

        return LocalStore(self.path, read_only=True)


class LocalPlace(Folder):
    """A run in a folder, to be written: each file is replaced atomically and flushed to disk."""

    every: ClassVar[float] = 0.0

    def __init__(
        self, path: Path, lock: Lock | None = None, reservation: "Reservation | None" = None
    ) -> None:
        from daskfactor.results.zarr_stores import DurableStore

        super().__init__(path)
        self._lock, self._reservation = lock, reservation
        self._making: Path | None = None
        self.store = DurableStore(path)

    @property
    def name(self) -> str:
        return str(self.path) if self._reservation is None else self._reservation.path

    @classmethod
    def opened(cls, path: Path) -> "LocalPlace":
        """Take the right to write a run, and remove what writers that were killed left behind."""
        recover(path)
        lock = writer_lock(path)
        for leftover in [*path.rglob(f"*{PARTIAL}")]:
            remove_scratch(leftover)
        return cls(path, lock)

    @classmethod
    def for_new_run(cls, reservation: "Reservation", path: Path) -> "LocalPlace":
        """Make a place for a run that nobody sees before its first commit."""
        scratch_folder(path).mkdir(parents=True)
        return cls(path, writer_lock(path), reservation)

    @classmethod
    def for_checkpoints(cls, path: Path) -> "LocalPlace":
        """Make a place in an empty folder that holds checkpoints and nothing else."""
        scratch_folder(path).mkdir(parents=True)
        place = cls(path)
        place.replace(MARKER, {"attributes": {}})
        return place

    @property
    def shared(self) -> Path | bool:
        return scratch_folder(self.path)

    def replace(self, key: str, document: Any) -> None:
        replace_json(self.path / key, document, scratch_folder(self.path))

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        self.store.save(name, write)

    def saved(self, name: str) -> IO[bytes]:
        return self.store.saved(name)

    def tidy(self, parts: Collection[str]) -> None:
        for file in scratch_folder(self.path).glob("*-*.npz"):
            if file.stem not in parts:
                file.unlink(missing_ok=True)

    def flush(self) -> None:
        self.store.flush()

    def commit(self, what: str) -> None:
        """Give a new run its name; of one that has it root and marker are replaced in an instant.

        Raises
        ------
        StoreError
            If something else has the name meanwhile.
        """
        if self._reservation is None:
            return
        self.flush()
        self.path = self._reservation.publish()
        self._reservation = None
        self.store.follow(self.path)
        if self._lock is not None:
            self._lock.folder = scratch_folder(self.path)
        if self._making is not None:
            self._making = scratch_folder(self.path) / self._making.name

    def fork(self) -> Any:
        if self._making is None:
            self._making = scratch_folder(self.path) / f"{uuid.uuid4().hex}{PARTIAL}"
            self._making.mkdir()
        return type(self.store)(self.path, self._making)

    def recall(self) -> None:
        if self._making is not None:
            remove_scratch(self._making)
            self._making = None

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
        ours = self._reservation is None and self._lock is not None and self._lock.is_current()
        with suppress(OSError, StoreError):
            if ours:  # removed before anybody else may write there
                with Publication(self.path) as aside:
                    self.path.rename(aside.draft)
        self.close()

    def close(self) -> None:
        try:
            self.recall()
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._reservation is not None:
                self._reservation.close()


def view_of(path: str | PathLike[str], snapshot: str | None = None) -> View:
    """Find a run to read it: the newest version, or an earlier one of a repository.

    Raises
    ------
    StoreError
        If the place cannot be reached, or Icechunk is not installed and nothing else is there.
    OptionError
        If a snapshot is asked for where there are none.
    """
    text = located(path)
    found: View = Folder(Path(text))
    if is_url(text):
        from daskfactor.data.safe_zarr import plain_store
        from daskfactor.results.repository import UrlView, repository_view

        cloud = scheme_of(text) in CLOUD
        in_repository = repository_view(text, snapshot) if cloud and is_installed() else None
        if in_repository is not None:
            return in_repository
        found = UrlView(text, plain_store(text))
        if cloud and not is_installed() and not found.exists():
            raise icechunk_missing(text)
    if snapshot is not None:
        raise OptionError(
            f"snapshots are kept of runs in object stores, not of {text}; leave snapshot= out"
        )
    return found


def open_place(path: str) -> Place:
    """Take the right to write the run at a path or URL.

    Raises
    ------
    StoreError
        If another process has it, or if nothing can be written there.
    """
    if not is_url(path):
        return LocalPlace.opened(Path(path))
    refuse_url(path)
    from daskfactor.results.repository import RepositoryPlace

    return RepositoryPlace.opened(path)


def refuse_url(path: str) -> None:
    """Refuse a URL that a run cannot be written to."""
    if is_url(path) and scheme_of(path) not in CLOUD:
        raise StoreError(
            f"a run is written to a local path or to s3://, gs://, az:// or memory://, got {path}"
        )


class Reservation:
    """The name of a run that is about to begin; nobody else begins one there.

    Parameters
    ----------
    path
        Local path or URL, of which nothing is reserved at a URL.
    check
        Refuses what is in the way; true if there is a run that is to be replaced.

    Raises
    ------
    StoreError
        If another process begins a run there, or writes the one to be replaced.
    """

    def __init__(self, path: str, check: Callable[[], bool]) -> None:
        self.path, self.replaces = path, check()
        self._publication: Publication | None = None
        self._replaced: Lock | None = None
        self._place: LocalPlace | None = None
        if is_url(path):
            return
        with self._disk_errors():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._publication = Publication(path)
        try:
            self.replaces = check()  # again: from now on it stays as it is
            self._replaced = writer_lock(Path(path)) if self.replaces else None
        except BaseException:
            self.close()
            raise

    @contextmanager
    def new_place(self) -> Iterator[Place]:
        """Give the place of the run, which is complete when the block ends, or is not there.

        One that replaces another is seen from its first checkpoint on.
        """
        if self._publication is None:
            from daskfactor.results.repository import RepositoryPlace

            with RepositoryPlace.created(self.path, self.replaces) as elsewhere:
                yield elsewhere
            return
        with self._disk_errors():
            self._place = place = LocalPlace.for_new_run(self, self._publication.draft)
            try:
                yield place
                if not self.replaces:
                    place.commit("begun")
            except BaseException:
                place.close()
                raise

    def hand_over(self) -> Place | None:
        """Return the place, which the caller closes from now on; None at a URL."""
        place, self._place = self._place, None
        return place

    def publish(self) -> Path:
        """Give the run its name in place of what it replaces; return its path."""
        assert self._publication is not None
        self._publication.publish(self.replaces)
        self._release()
        return Path(self.path)

    def close(self) -> None:
        """Let others have the name; a run that has not appeared goes. Can be called again."""
        if (place := self.hand_over()) is not None:
            place.close()
        self._release()

    def _release(self) -> None:
        if self._replaced is not None:
            self._replaced.release()  # NFS keeps the folder of an open file
        if self._publication is not None:
            self._publication.close()
        self._replaced = self._publication = None

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors("a new run store", Path(self.path), "nothing was changed", "begin again")
