"""Runs in object stores: Icechunk repositories, in which a checkpoint is a commit.

A run is the branch ``main``. Its documents are those of a run in a folder; its archives are arrays
of bytes in the group ``checkpoint``. Commits are atomic, and earlier commits can be opened by their
ids. A process that commits where another one has committed since stops.

The writing process expires old commits, which hold replaced objects. The newest commits stay, and
during the run also those that were the newest within the last `GRACE` seconds: a reader has that
long before the objects of an opened commit are deleted.
"""

import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

from daskfactor.data.icechunks import ask, repository_at
from daskfactor.errors import OptionError, StoreError
from daskfactor.runs.backends import View, ZarrView, view_of
from daskfactor.runs.files import CHECKPOINT, STATE, conflict_error, write_json
from daskfactor.runs.zarr_stores import PatientStore
from daskfactor.urls import unreachable_error

logger = logging.getLogger(__name__)

BRANCH: Final = "main"
KIND: Final = "an Icechunk repository"
KEEP_COMMITS: Final = 2
"""Number of newest commits to keep, besides the first one and those of tags and branches."""
GRACE: Final = 600.0
"""Seconds for which a replaced commit is kept during the run."""
EXPIRES_EVERY: Final = 8
"""Number of commits between two expirations of old ones."""


def repository_view(url: str, snapshot: str | None = None) -> View | None:
    """Return a view of a run in a repository; None if the URL has no repository.

    Raises
    ------
    StoreError
        If the object store cannot be used.
    OptionError
        If there is no such snapshot.
    """
    repository = repository_at(url, make=False)
    if repository is None:
        return None
    if snapshot is None:
        session = ask(url, repository.readonly_session_async, BRANCH)
    else:
        messages = ask(url, _history, repository)
        if snapshot not in messages:
            newest = list(messages.items())[:5]
            latest = ", ".join(f"{commit} ({message})" for commit, message in newest)
            raise OptionError(f"{url} has no snapshot {snapshot!r}; its latest are {latest}")
        session = ask(url, partial(repository.readonly_session_async, snapshot_id=snapshot))
    return ZarrView(url, PatientStore(session.store, url), KIND)


async def _history(repository: Any) -> dict[str, str]:
    """Return the messages of all commits by their ids, the latest first."""
    history = repository.async_ancestry(branch=BRANCH)
    return {commit.id: commit.message async for commit in history}


class RepositoryBackend(ZarrView):
    """A run in a repository, for writing; uncommitted writes are lost with the process."""

    checkpoint_interval: ClassVar[float] = 10.0
    spare_checkpoints: ClassVar[int] = 0  # earlier commits are kept

    def __init__(self, url: str, repository: Any) -> None:
        self._repository = repository
        self._session = ask(url, repository.writable_session_async, BRANCH)
        self._forks: Any = None
        self._commits, self._is_new = 0, False
        super().__init__(url, PatientStore(self._session.store, url), KIND)

    @classmethod
    def created(cls, url: str, replaces: bool) -> "RepositoryBackend":
        """Return the backend of a new run, which is invisible before its first commit."""
        from zarr.core.sync import sync

        backend = cls(url, repository_at(url, make=True))
        if replaces:
            sync(backend.store.clear())
        elif backend.exists():
            raise StoreError(f"another process has begun a run at {url}; give another URL")
        backend._is_new = True
        return backend

    @property
    def shared(self) -> bool:
        """False before the first commit, and in the memory of this process."""
        return not self.name.startswith("memory://") and not self._is_new

    def committed(self) -> View:
        return self if self._is_new else view_of(self.name)

    def commit(self, documents: Mapping[str, Any], archives: Collection[str], message: str) -> None:
        """Commit the session, and expire old commits now and then."""
        import zarr

        for key, document in documents.items():
            write_json(self.store, key, document)
        group = zarr.open_group(self.store, path=CHECKPOINT, mode="r+")
        for name in {*group.array_keys()} - {*archives, STATE}:
            del group[name]
        tip = ask(self.name, self._commit, message, uuid.uuid4().hex)
        session = ask(self.name, self._repository.writable_session_async, BRANCH)
        if session.snapshot_id != tip:
            raise conflict_error(self.name)
        self._session, self._forks, self._is_new = session, None, False
        self.store.follow(session.store)
        self._commits += 1
        if self._commits % EXPIRES_EVERY == 0:
            self._expire(GRACE)

    async def _commit(self, message: str, token: str) -> str:
        """Commit once: the token is in the history if only the answer of an attempt was lost."""
        from icechunk import ConflictError

        try:
            return str(await self._session.commit_async(message, {"token": token}))
        except Exception as error:
            async for tip in self._repository.async_ancestry(branch=BRANCH):
                if tip.metadata.get("token") == token:
                    return str(tip.id)
                break
            if isinstance(error, ConflictError):
                raise conflict_error(self.name) from None
            raise

    def _expire(self, grace: float) -> None:
        """Expire old commits that were replaced more than ``grace`` seconds ago."""
        try:
            ask(self.name, self._drop_old, grace)
        except Exception as error:  # noqa: BLE001 - the run continues and retries later
            logger.warning("%s: could not expire old commits: %s", self.name, error)

    async def _drop_old(self, grace: float) -> None:
        """Expire commits and delete their objects; see `_expire`.

        Uncommitted objects are newer than the commits that stay, so that none are deleted.
        """
        latest = datetime.now(UTC) - timedelta(seconds=grace)
        history = self._repository.async_ancestry(branch=BRANCH)
        times = [commit.written_at async for commit in history]
        oldest = next((time for time in times[KEEP_COMMITS - 1 :] if time <= latest), None)
        if oldest is None:
            return
        await self._repository.expire_snapshots_async(older_than=oldest)
        await self._repository.garbage_collect_async(delete_object_older_than=oldest)

    def fork(self) -> Any:
        """Return a zarr store that can be pickled to write from another process.

        Raises
        ------
        StoreError
            If other processes cannot write to the run.
        """
        if not self.shared:
            raise StoreError(
                f"{self.name} is in the memory of this process, where no other can write; take a "
                "path or an object store"
            )
        if self._forks is None:
            # Icechunk can fork only a session without changes. This process writes to its own
            # session, with which the forks are merged.
            self._forks = ask(self.name, self._repository.writable_session_async, BRANCH)
            if self._forks.snapshot_id != self._session.snapshot_id:
                raise conflict_error(self.name)
        return PatientStore(self._forks.fork().store, self.name)

    def discard_forks(self) -> None:
        """Do nothing: forks that are not merged are never visible."""

    def merge(self, stores: Sequence[Any]) -> None:
        for store in stores:
            self._session.merge(store.session)

    @contextmanager
    def writing(self, what: str, safe: str, again: str) -> Iterator[None]:
        """Turn errors of Icechunk into a StoreError that says what is safe."""
        from icechunk import IcechunkError

        try:
            yield
        except IcechunkError as error:
            reason = str(unreachable_error(self.name, error))
        except StoreError as error:
            reason = str(error)
            if "cannot be used" not in reason:
                raise
        else:
            return
        raise StoreError(f"could not write {what}: {reason} and {again}; {safe}") from None

    def discard(self) -> None:
        """Commit an empty run; earlier snapshots stay until they expire."""
        from zarr.core.sync import sync

        with suppress(StoreError):
            if not self._is_new:
                sync(self.store.clear())
                ask(self.name, self._commit, "removed: it failed before it began", uuid.uuid4().hex)
        self.close()

    def close(self) -> None:
        """Expire old commits without grace."""
        if self._commits:
            self._expire(0.0)
