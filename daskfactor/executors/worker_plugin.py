"""Bands from worker to worker, over the cluster's own connections.

A plugin registers one operation on every worker and keeps one connection to
each worker it sends to. Messages go one way: a band needs no answer, since the
receiver's next band is the answer. Whatever belongs to an attempt that is over
is dropped on arrival.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.diagnostics.plugin import WorkerPlugin

from daskfactor.executors.channel import Reader, this_machine
from daskfactor.executors.connection import ATTACH, OPERATION, Link
from daskfactor.executors.messages import Attempt, Parcel, read
from daskfactor.executors.scheduler import Mailbox

if TYPE_CHECKING:
    from daskfactor.kernels.workspace import Workspace

logger = logging.getLogger(__name__)

PLUGIN = "daskfactor-post"
MOST_BOXES = 64
"""Boxes kept for attempts whose task has not started here."""


class _Desk(NamedTuple):
    """An attempt that is running here."""

    box: Mailbox
    key: str
    peers: tuple[str, ...]
    topic: str


class Post(WorkerPlugin):
    """Mailboxes and connections of one worker, and buffers that outlive a segment."""

    name = PLUGIN
    idempotent = True

    def setup(self, worker: Any) -> None:
        """Called on the worker, when the plugin or the worker is new."""
        self.worker = worker
        self.workspaces: list[Workspace] = []
        self._lock = threading.Lock()
        self._desks: dict[Attempt, _Desk] = {}
        self._waiting: OrderedDict[Attempt, Mailbox] = OrderedDict()
        self._over: OrderedDict[str, int] = OrderedDict()
        self._unwanted: OrderedDict[Any, None] = OrderedDict()
        self._links: dict[str, Link] = {}
        self._channels: list[tuple[Any, Reader]] = []
        worker.handlers[OPERATION] = self.receive
        worker.handlers[ATTACH] = self.attach

    def teardown(self, worker: Any) -> None:
        """Called when the worker closes: nobody may go on waiting."""
        worker.handlers.pop(OPERATION, None)
        worker.handlers.pop(ATTACH, None)
        with self._lock:
            desks = list(self._desks.values())
            links = list(self._links.values())
            self._links.clear()
        for desk in desks:
            desk.box.abort("the worker is closing")
        for link in links:
            link.close()

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Stop the work of a task that the scheduler no longer wants."""
        if finish in ("cancelled", "released", "forgotten") and start in ("executing", "cancelled"):
            with self._lock:
                self._unwanted[key] = None  # its task may not have got as far as a desk
                while len(self._unwanted) > MOST_BOXES:
                    self._unwanted.popitem(last=False)
                desks = [desk for desk in self._desks.values() if desk.key == key]
            for desk in desks:
                desk.box.abort("the client has given this attempt up")

    # -- attempts ------------------------------------------------------------

    def open(self, attempt: Attempt, key: str, peers: tuple[str, ...], topic: str) -> Mailbox:
        """The box of an attempt, with what has arrived for it already."""
        with self._lock:
            box = self._waiting.pop(attempt, None) or Mailbox()
            self._desks[attempt] = _Desk(box, key, peers, topic)
            unwanted = key in self._unwanted
        if unwanted or self._is_over(attempt):
            box.abort("this attempt is over")
        return box

    def close(self, attempt: Attempt) -> None:
        """End an attempt; what still arrives for it is dropped."""
        token, number = attempt
        with self._lock:
            self._desks.pop(attempt, None)
            self._over[token] = max(number, self._over.get(token, number))
            for late in [a for a in self._waiting if a[0] == token and a[1] <= number]:
                del self._waiting[late]
            while len(self._over) > MOST_BOXES:
                self._over.popitem(last=False)

    def _is_over(self, attempt: Attempt) -> bool:
        return attempt[1] <= self._over.get(attempt[0], -1)

    def _box(self, attempt: Attempt) -> Mailbox | None:
        with self._lock:
            if attempt in self._desks:
                return self._desks[attempt].box
            if self._is_over(attempt):
                return None
            box = self._waiting.setdefault(attempt, Mailbox())
            while len(self._waiting) > MOST_BOXES:
                self._waiting.popitem(last=False)
            return box

    # -- messages ------------------------------------------------------------

    def send(self, address: str, parcels: Sequence[Parcel]) -> None:
        """Send without waiting, from any thread."""
        with self._lock:
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = Link(self, address)
        link.send(parcels)

    def has_channel(self, address: str) -> bool:
        """Whether sending to a worker costs hardly more than the copying."""
        link = self._links.get(address)
        return link is not None and link.has_channel

    def receive(self, heads: bytes, body: Any) -> None:
        """Handler of the operation, in the event loop's thread."""
        for parcel in read(heads, body) if heads else body:
            box = self._box(parcel.attempt)
            if box is None:
                continue
            if parcel.band is None:
                box.abort(parcel.reason)
            elif parcel.apart:
                box.put_apart(parcel.col, parcel.rounds, parcel.band)
            else:
                box.put(parcel.col, parcel.rounds, parcel.band)

    def attach(self, comm: Any, path: str, capacity: int, machine: str) -> None:
        """Handler: read a channel of another process of this machine, if this is the machine."""
        if machine != this_machine():
            return
        with contextlib.suppress(OSError):
            reader = Reader(path, capacity)
            with self._lock:
                self._drop_ended()
                self._channels = [*self._channels, (comm, reader)]
                desks = list(self._desks.values())
            for desk in desks:
                desk.box.wake()

    @property
    def silent(self) -> bool:
        """Whether there are channels, which nobody is told of when something comes."""
        return bool(self._channels)

    def collect(self) -> None:
        """Take in what has come through channels."""
        for _, reader in self._channels:
            for heads, body in reader.take():
                self.receive(heads, body)

    def _drop_ended(self) -> None:
        self._channels = [
            (comm, reader) for comm, reader in self._channels if not (reader.over or comm.closed())
        ]

    def abort_peers(self, attempt: Attempt, peers: tuple[str, ...], reason: str) -> None:
        """Tell the others that an attempt cannot succeed."""
        for address in peers:
            if address != self.worker.address:
                self.send(address, [Parcel(attempt, -1, -1, None, reason)])

    def lose(self, address: str, reason: str) -> None:
        """A connection broke: nothing that counts on that worker can succeed."""
        with self._lock:
            link = self._links.pop(address, None)
            desks = [
                (attempt, desk) for attempt, desk in self._desks.items() if address in desk.peers
            ]
        if link is not None:
            link.close()
        logger.info("post to %s: %s", address, reason)
        for (token, number), desk in desks:
            desk.box.abort(reason)
            self.tell(desk.topic, {"kind": "lost", "token": token, "attempt": number})

    def tell(self, topic: str, news: dict[str, Any]) -> None:
        """News for the client that listens to a topic."""
        self.worker.log_event(topic, news)
