"""Runs in object stores: Icechunk repositories, in which a checkpoint is a commit.

A run is the branch ``main``. Its documents are those of a run in a folder; its archives are arrays
of bytes in the group ``checkpoint``. Commits are atomic, and earlier commits can be opened by their
ids. The marker names the writing process and the end of its lease. If another process commits in
spite of it, the first one stops at its next commit, so that the history has one writer at a time. A
process that does not commit for long renews its lease on the branch ``writer``, without publishing
the uncommitted data of its session.

The writing process expires old commits, which hold replaced objects. The newest commits stay, and
during the run also those that were the newest within the last `GRACE` seconds: a reader has that
long before the objects of an opened commit are deleted.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Event, Thread
from typing import IO, Any, ClassVar, Final

from daskfactor.data.icechunks import ask, repository_at
from daskfactor.errors import OptionError, StoreError
from daskfactor.results.files import CHECKPOINT, MARKER, NODE, seal
from daskfactor.results.metadata import LIBRARY
from daskfactor.results.zarr_stores import PatientStore
from daskfactor.urls import unreachable_error

logger = logging.getLogger(__name__)

BRANCH: Final = "main"
WRITER: Final = "writer"
LEASE: Final = 60.0
"""Minimum seconds of a lease, in which other hosts may not write the run."""


KEEP_COMMITS: Final = 6
"""Number of newest commits to keep, besides the first one and those of tags and branches."""
GRACE: Final = 600.0
"""Seconds for which a replaced commit is kept during the run."""
EXPIRES_EVERY: Final = 8
"""Number of commits between two expirations of old ones."""


class UrlView:
    """A run at a URL, for reading: a snapshot in a repository, or a plain zarr store."""

    description: ClassVar = "a zarr store"

    def __init__(self, url: str, store: Any) -> None:
        self.name, self.store = url, store

    def exists(self) -> bool:
        return self._get(NODE) is not None

    def kind(self) -> str | None:
        """Return the kind of the content: a run, a blocked store, another group, or None."""
        from daskfactor.data.places import FORMAT

        with suppress(OSError, ValueError, AttributeError, KeyError):
            attributes = self.document(NODE)["attributes"]
            if attributes.get("inference_library") == LIBRARY:
                return "run"
            if attributes.get("format") == FORMAT:
                return "blocks"
        return "group" if self.exists() else None

    def contents(self) -> str | None:
        return self.description if self.exists() else None

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


class RepositoryView(UrlView):
    """One snapshot of a run in a repository, for reading."""

    description: ClassVar = "an Icechunk repository"

    def __init__(self, url: str, session: Any) -> None:
        super().__init__(url, PatientStore(session.store, url))

    def replace(self, key: str, document: Any) -> None:
        from zarr.core.buffer import cpu
        from zarr.core.sync import sync

        text = json.dumps(document).encode()
        sync(self.store.set(key, cpu.Buffer.from_bytes(text)))

    def sign(self, process: str, until: float | None) -> None:
        """Write the process and its lease to the marker; None ends the lease."""
        marker = self.document(MARKER)
        writer = None if until is None else {"process": process, "until": until}
        marker["attributes"] = marker["attributes"] | {"writer": writer}
        self.replace(MARKER, seal(marker, "attributes"))


def repository_view(url: str, snapshot: str | None = None) -> RepositoryView | None:
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
    return RepositoryView(url, session)


async def _history(repository: Any) -> dict[str, str]:
    """Return the messages of all commits by their ids, the latest first."""
    history = repository.async_ancestry(branch=BRANCH)
    return {commit.id: commit.message async for commit in history}


# -- writing --------------------------------------------------------------------------------


_OPEN: set[str] = set()
"""URLs of runs that this process writes."""


class RepositoryBackend(RepositoryView):
    """A run in a repository, for writing; uncommitted writes are lost with the process."""

    checkpoint_interval: ClassVar[float] = 10.0

    def __init__(self, url: str, repository: Any) -> None:
        self._repository = repository
        self._session = ask(url, repository.writable_session_async, BRANCH)
        self._tip: str = self._session.snapshot_id
        self._forks: Any = None
        super().__init__(url, self._session)
        self._signed, self._until = time.time(), 0.0
        self._closed, self._renewed = Event(), False
        self._lease_thread = Thread(target=self._keep_lease, name="daskfactor lease", daemon=True)
        self._me = f"{os.getpid()} on {socket.gethostname()}"
        self._fenced, self._commits = False, 0

    @classmethod
    def opened(cls, url: str) -> "RepositoryBackend":
        """Open a run for writing.

        Raises
        ------
        StoreError
            If another process writes it.
        """
        backend = cls(url, repository_at(url, make=True))
        backend._refuse_if_leased()
        backend.commit("opened")
        _OPEN.add(url)
        if not url.startswith("memory://"):
            backend._lease_thread.start()
        return backend

    @classmethod
    @contextmanager
    def created(cls, url: str, replaced: bool) -> Iterator["RepositoryBackend"]:
        """Yield the backend of a new run, which a commit publishes when the block ends."""
        from zarr.core.sync import sync

        backend = cls(url, repository_at(url, make=True))
        if replaced:
            backend._refuse_if_leased()
            sync(backend.store.clear())
        elif backend.exists():
            raise StoreError(f"another process has begun a run at {url}; give another URL")
        with backend.writing("a new run store", "nothing was changed", "begin again"):
            yield backend
            backend.commit("begun", leaving=True)

    def _refuse_if_leased(self) -> None:
        """Raise StoreError if another process still writes the run."""
        writer = self.document(MARKER)["attributes"].get("writer")
        if not writer:
            return
        process, until = str(writer["process"]), float(writer["until"])
        number, _, host = process.partition(" on ")
        is_local = host == socket.gethostname()
        if process == self._me:
            has_ended = self.name not in _OPEN  # its last commit has failed
        else:
            has_ended = is_local and number.isdigit() and not _is_alive(int(number))
        if has_ended:
            return
        left = max(until, self._renewed_until(process)) - time.time()
        if left > 0 or (is_local and number.isdigit()):
            owner = f"this process ({number})" if process == self._me else f"process {process}"
            if_killed = "" if is_local else f"; if that was killed, try again in {left:.0f} seconds"
            raise StoreError(
                f"{self.name} is being written by {owner}; wait for it to end or stop it, or give "
                f"this run another URL{if_killed}"
            )

    @property
    def shared(self) -> bool:
        """False for the memory of this process, to which others cannot write."""
        return not self.name.startswith("memory://")

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        self.store.save(name, write)

    def open_archive(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self.store.open_archive(name)
        return file

    def remove_archives(self, keep: Collection[str]) -> None:
        import zarr

        group = zarr.open_group(self.store, path=CHECKPOINT, mode="r+")
        for name in [key for key in group.array_keys() if "-" in key and key not in keep]:
            del group[name]

    def flush(self) -> None:
        """Do nothing: objects are durable once they are sent."""

    def commit(self, message: str, leaving: bool = False) -> None:
        """Publish everything that was written, and renew the lease, or end it if ``leaving``.

        Raises
        ------
        StoreError
            If another process has committed, or the object store cannot be used.
        """
        now = time.time()
        until = now + LEASE + 3 * (now - self._signed)
        self.sign(self._me, None if leaving else until)
        token = uuid.uuid4().hex
        tip = self._tip = ask(self.name, self._commit, message, token)
        if leaving:
            return
        session = ask(self.name, self._repository.writable_session_async, BRANCH)
        if session.snapshot_id != tip:
            self._stop()
        self._session, self._signed, self._until, self._forks = session, now, until, None
        self.store.follow(session.store)
        self._commits += 1
        if self._commits % EXPIRES_EVERY == 0:
            self._expire(GRACE)

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

    async def _commit(self, message: str, token: str) -> str:
        """Commit once: the token is in the history if only the answer of an attempt was lost."""
        from icechunk import ConflictError

        try:
            return str(await self._session.commit_async(message, {"token": token, "by": self._me}))
        except Exception as error:
            async for tip in self._repository.async_ancestry(branch=BRANCH):
                if tip.metadata.get("token") == token:
                    return str(tip.id)
                break
            if isinstance(error, ConflictError):
                self._stop()
            raise

    def _keep_lease(self) -> None:
        """Renew the lease between commits, until the run is closed."""
        while not self._closed.wait(LEASE / 6):
            if self._until - time.time() < LEASE / 2:
                try:
                    self._renew()
                except Exception as error:  # noqa: BLE001 - the run continues without a lease
                    logger.warning("%s: could not renew the lease: %s", self.name, error)

    def _renew(self) -> None:
        """Renew the lease on the branch `WRITER`."""
        until, tip = time.time() + LEASE, self._session.snapshot_id
        if ask(self.name, self._repository.lookup_branch_async, BRANCH) != tip:
            return  # this process has just committed, or another one has taken over
        # An existing branch is not moved to this snapshot, whose marker has an older lease.
        if WRITER not in ask(self.name, self._repository.list_branches_async):
            ask(self.name, self._repository.create_branch_async, WRITER, tip)
        self._renewed = True
        session = ask(self.name, self._repository.writable_session_async, WRITER)
        RepositoryView(self.name, session).sign(self._me, until)
        ask(self.name, session.commit_async, "still being written")
        self._until = until

    def _renewed_until(self, process: str) -> float:
        """Return the end of a process's lease on the branch `WRITER`; 0 if it has none."""
        if WRITER not in ask(self.name, self._repository.list_branches_async):
            return 0.0
        session = ask(self.name, self._repository.readonly_session_async, WRITER)
        writer = RepositoryView(self.name, session).document(MARKER)["attributes"]["writer"]
        return float(writer["until"]) if writer and writer["process"] == process else 0.0

    def _stop(self) -> None:
        self._fenced = True
        raise StoreError(
            f"{self.name} is being written by another process, which has taken it over, so that "
            "this one stops; what was committed is safe, and the other goes on from there"
        ) from None

    def fork(self) -> Any:
        """Return a zarr store that can be pickled to write chunks from another process.

        Raises
        ------
        StoreError
            If the repository is in the memory of this process.
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
                self._stop()
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

        self.close()
        with suppress(StoreError):
            self._session = ask(self.name, self._repository.writable_session_async, BRANCH)
            if self._session.snapshot_id != self._tip:
                return  # another process has continued the run
            self.store.follow(self._session.store)
            sync(self.store.clear())
            ask(self.name, self._commit, "removed: it failed before it began", uuid.uuid4().hex)

    def close(self) -> None:
        """End the lease; if that fails, other hosts wait until it expires."""
        _OPEN.discard(self.name)
        self._closed.set()
        if self._lease_thread.is_alive():
            self._lease_thread.join(LEASE / 6)
        if self._fenced:
            return
        with suppress(StoreError):
            tip = self._session.snapshot_id
            self._session = ask(self.name, self._repository.writable_session_async, BRANCH)
            if self._session.snapshot_id == tip:
                self.store.follow(self._session.store)
                self.commit("closed", leaving=True)
                if self._renewed:
                    ask(self.name, self._repository.delete_branch_async, WRITER)
                self._expire(0.0)


def _is_alive(number: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(number))
