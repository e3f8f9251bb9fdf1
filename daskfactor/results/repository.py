"""Runs in object stores: Icechunk repositories, in which a checkpoint is a commit.

A run is the branch ``main``. Its documents are those of a run in a folder, its archives arrays of
bytes in the group ``checkpoint``. A commit is there wholly or not at all, and every earlier one
can be opened by its id. The marker says who writes, and until when nobody else should; whoever
commits besides stops the other at its next commit, so that no two ever write one history. Who
commits nothing for long says on a branch of its own, ``writer``, that it still writes: what its
session holds is for the next checkpoint to show.

Whoever writes expires old commits, since each leaves behind what the next one has replaced. The
newest stay, and while the run goes on those that were the latest within `GRACE`: a reader has
that long before what it opened is gone.
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
from daskfactor.urls import scheme_of, unreachable

logger = logging.getLogger(__name__)

BRANCH: Final = "main"
WRITER: Final = "writer"
LEASE: Final = 60.0
"""Seconds after a sign of life in which another host takes a run for being written, at least."""


KEPT: Final = 6
"""Newest commits that stay, besides the first one and those of tags and branches."""
GRACE: Final = 600.0
"""Seconds for which a commit stays that another one has replaced, while the run goes on."""
EXPIRES_EVERY: Final = 8
"""Commits of a process between those after which it expires old ones."""


class UrlView:
    """A run at a URL, to be read: a snapshot in a repository, or a plain zarr store."""

    what: ClassVar = "a zarr store"

    def __init__(self, url: str, store: Any) -> None:
        self.name, self.store = url, store

    def exists(self) -> bool:
        return self._get(NODE) is not None

    def kind(self) -> str | None:
        """Tell a run from what others keep there."""
        from daskfactor.data.store import FORMAT

        with suppress(OSError, ValueError, AttributeError, KeyError):
            attributes = self.document(NODE)["attributes"]
            if attributes.get("inference_library") == LIBRARY:
                return "run"
            if attributes.get("format") == FORMAT:
                return "blocks"
        return "group" if self.exists() else None

    def contents(self) -> str | None:
        return self.what if self.exists() else None

    def document(self, key: str) -> Any:
        found = self._get(key)
        if found is None:
            raise FileNotFoundError(f"there is no {key}")
        return json.loads(found)

    def chunks(self) -> Any:
        return self.store

    def _get(self, key: str) -> bytes | None:
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        found = sync(self.store.get(key, default_buffer_prototype()))
        return None if found is None else found.to_bytes()


class RepositoryView(UrlView):
    """One snapshot of a run in a repository, to be read."""

    what: ClassVar = "an Icechunk repository"

    def __init__(self, url: str, session: Any) -> None:
        super().__init__(url, PatientStore(session.store, url))

    def replace(self, key: str, document: Any) -> None:
        from zarr.core.buffer import cpu
        from zarr.core.sync import sync

        text = json.dumps(document).encode()
        sync(self.store.set(key, cpu.Buffer.from_bytes(text)))

    def sign(self, process: str, until: float | None) -> None:
        """Put into the marker who goes on writing, if anybody does."""
        marker = self.document(MARKER)
        writer = None if until is None else {"process": process, "until": until}
        marker["attributes"] = marker["attributes"] | {"writer": writer}
        self.replace(MARKER, seal(marker, "attributes"))


def repository_view(url: str, snapshot: str | None = None) -> RepositoryView | None:
    """Open a run in a repository; None if there is no repository at that URL.

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
        known = ask(url, _history, repository)
        if snapshot not in known:
            latest = ", ".join(f"{own} ({told})" for own, told in list(known.items())[:5])
            raise OptionError(f"{url} has no snapshot {snapshot!r}; its latest are {latest}")
        session = ask(url, partial(repository.readonly_session_async, snapshot_id=snapshot))
    return RepositoryView(url, session)


async def _history(repository: Any) -> dict[str, str]:
    """Messages of all commits by their ids, the latest first."""
    return {one.id: one.message async for one in repository.async_ancestry(branch=BRANCH)}


# -- to write -------------------------------------------------------------------------------


_OPEN: set[str] = set()
"""URLs of the runs that this process writes."""


class RepositoryPlace(RepositoryView):
    """A run in a repository, to be written: what no commit has shown is lost with the process."""

    every: ClassVar[float] = 10.0

    def __init__(self, url: str, repository: Any) -> None:
        self._repository = repository
        self._session = ask(url, repository.writable_session_async, BRANCH)
        self._tip: str = self._session.snapshot_id
        self._forks: Any = None
        super().__init__(url, self._session)
        self._signed, self._until = time.time(), 0.0
        self._closed, self._renewed = Event(), False
        self._staying = Thread(target=self._stay, name="daskfactor lease", daemon=True)
        self._me = f"{os.getpid()} on {socket.gethostname()}"
        self._fenced, self._commits = False, 0

    @classmethod
    def opened(cls, url: str) -> "RepositoryPlace":
        """Take the right to write a run.

        Raises
        ------
        StoreError
            If another process has it.
        """
        place = cls(url, repository_at(url, make=True))
        place._refuse_others()
        place.commit("opened")
        _OPEN.add(url)
        if scheme_of(url) != "memory":
            place._staying.start()
        return place

    @classmethod
    @contextmanager
    def created(cls, url: str, replaced: bool) -> Iterator["RepositoryPlace"]:
        """Make a place for a run that one commit shows when the block ends."""
        from zarr.core.sync import sync

        place = cls(url, repository_at(url, make=True))
        if replaced:
            place._refuse_others()
            sync(place.store.clear())
        elif place.exists():
            raise StoreError(f"another process has begun a run at {url}; give another URL")
        with place.writing("a new run store", "nothing was changed", "begin again"):
            yield place
            place.commit("begun", leaving=True)

    def _refuse_others(self) -> None:
        """Refuse a run that another process writes, as far as can be known."""
        writer = self.document(MARKER)["attributes"].get("writer")
        if not writer:
            return
        process, until = str(writer["process"]), float(writer["until"])
        number, _, host = process.partition(" on ")
        here = host == socket.gethostname()
        if process == self._me:
            gone = self.name not in _OPEN  # it could not say so when it was closed
        else:
            gone = here and number.isdigit() and not _lives(int(number))
        if gone:
            return
        left = max(until, self._renewed_until(process)) - time.time()
        if left > 0 or (here and number.isdigit()):
            owner = f"this process ({number})" if process == self._me else f"process {process}"
            if_killed = "" if here else f"; if that was killed, try again in {left:.0f} seconds"
            raise StoreError(
                f"{self.name} is being written by {owner}; wait for it to end or stop it, or give "
                f"this run another URL{if_killed}"
            )

    @property
    def shared(self) -> bool:
        """Whether other processes can write here: not into the memory of this one."""
        return scheme_of(self.name) != "memory"

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        self.store.save(name, write)

    def saved(self, name: str) -> IO[bytes]:
        found: IO[bytes] = self.store.saved(name)
        return found

    def tidy(self, parts: Collection[str]) -> None:
        import zarr

        group = zarr.open_group(self.store, path=CHECKPOINT, mode="r+")
        for name in [own for own in group.array_keys() if "-" in own and own not in parts]:
            del group[name]

    def flush(self) -> None:
        """Do nothing: what is in the object store stays there, and nobody sees it yet."""

    def commit(self, what: str, leaving: bool = False) -> None:
        """Show readers everything that was written, and say who goes on writing.

        Raises
        ------
        StoreError
            If another process has committed meanwhile, or the object store cannot be used.
        """
        now = time.time()
        until = now + LEASE + 3 * (now - self._signed)
        self.sign(self._me, None if leaving else until)
        token = uuid.uuid4().hex
        tip = self._tip = ask(self.name, self._commit, what, token)
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
        """Delete what only commits hold that are old and were replaced ``grace`` seconds ago."""
        try:
            ask(self.name, self._drop_old, grace)
        except Exception as error:  # noqa: BLE001 - the run goes on, and tries again later
            logger.warning("%s: could not expire old commits: %s", self.name, error)

    async def _drop_old(self, grace: float) -> None:
        """Expire commits and delete their objects, as `_expire` says.

        Nothing that is written and not committed yet is older than the commits that stay.
        """
        latest = datetime.now(UTC) - timedelta(seconds=grace)
        history = [one.written_at async for one in self._repository.async_ancestry(branch=BRANCH)]
        oldest = next((one for one in history[KEPT - 1 :] if one <= latest), None)
        if oldest is None:
            return
        await self._repository.expire_snapshots_async(older_than=oldest)
        await self._repository.garbage_collect_async(delete_object_older_than=oldest)

    async def _commit(self, what: str, token: str) -> str:
        """Commit, once: the answer to an earlier attempt may have been lost."""
        from icechunk import ConflictError

        try:
            return str(await self._session.commit_async(what, {"token": token, "by": self._me}))
        except Exception as error:
            async for tip in self._repository.async_ancestry(branch=BRANCH):
                if tip.metadata.get("token") == token:
                    return str(tip.id)
                break
            if isinstance(error, ConflictError):
                self._stop()
            raise

    def _stay(self) -> None:
        """Renew the lease while no commit does, until the run is closed."""
        while not self._closed.wait(LEASE / 6):
            if self._until - time.time() < LEASE / 2:
                try:
                    self._renew()
                except Exception as error:  # noqa: BLE001 - the run goes on without
                    logger.warning("%s: could not renew the lease: %s", self.name, error)

    def _renew(self) -> None:
        """Say beside the run that this process still writes it."""
        until, tip = time.time() + LEASE, self._session.snapshot_id
        if ask(self.name, self._repository.lookup_branch_async, BRANCH) != tip:
            return  # somebody has committed: this process just now, or one that took the run over
        # A branch that is there goes on from what it says: moved to this snapshot it would say
        # for a moment that the lease has ended.
        if WRITER not in ask(self.name, self._repository.list_branches_async):
            ask(self.name, self._repository.create_branch_async, WRITER, tip)
        self._renewed = True
        session = ask(self.name, self._repository.writable_session_async, WRITER)
        RepositoryView(self.name, session).sign(self._me, until)
        ask(self.name, session.commit_async, "still being written")
        self._until = until

    def _renewed_until(self, process: str) -> float:
        """Until when a process has said beside the run that it writes it."""
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
        """Give a store that can be sent to another process.

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
            # Icechunk forks a session that has no changes yet; what is written here meanwhile
            # is in the other, and merged with the rest.
            self._forks = ask(self.name, self._repository.writable_session_async, BRANCH)
            if self._forks.snapshot_id != self._session.snapshot_id:
                self._stop()
        return PatientStore(self._forks.fork().store, self.name)

    def recall(self) -> None:
        """Do nothing: what is not merged nobody sees."""

    def merge(self, stores: Sequence[Any]) -> None:
        for store in stores:
            self._session.merge(store.session)

    @contextmanager
    def writing(self, what: str, safe: str, again: str) -> Iterator[None]:
        """Turn what Icechunk raises into a sentence that says what is safe."""
        from icechunk import IcechunkError

        try:
            yield
        except IcechunkError as error:
            told = str(unreachable(self.name, error))
        except StoreError as error:
            told = str(error)
            if "cannot be used" not in told:
                raise
        else:
            return
        raise StoreError(f"could not write {what}: {told} and {again}; {safe}") from None

    def discard(self) -> None:
        """Leave nothing in the branch; earlier snapshots stay until they expire."""
        from zarr.core.sync import sync

        self.close()
        with suppress(StoreError):
            self._session = ask(self.name, self._repository.writable_session_async, BRANCH)
            if self._session.snapshot_id != self._tip:
                return  # another process has gone on with it
            self.store.follow(self._session.store)
            sync(self.store.clear())
            ask(self.name, self._commit, "removed: it failed before it began", uuid.uuid4().hex)

    def close(self) -> None:
        """Let others write at once; if that cannot be said, other hosts wait for a while."""
        _OPEN.discard(self.name)
        self._closed.set()
        if self._staying.is_alive():
            self._staying.join(LEASE / 6)
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


def _lives(number: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(number))
