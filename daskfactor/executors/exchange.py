"""Column bands from worker to worker, over the cluster's own connections.

A plugin registers one operation on every worker. Messages go one way: a band
needs no answer, since the receiver's next band is the answer. Whatever belongs
to an attempt that is over is dropped on arrival.
"""

import logging
import pickle
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.serialize import Serialize

logger = logging.getLogger(__name__)

PLUGIN = "daskfactor-bands"
MOST_ATTEMPTS = 64
"""Attempts that are remembered though their task has not started here, or is over."""
MOST_THREADS = 256
"""Threads of one worker; an attempt that was given up may hold some of them for a while."""
SMALL = 2**16
"""Bytes below which a band goes inside a message, which is cheaper than beside it."""

AttemptKey = tuple[str, int]


class Parcel(NamedTuple):
    """Arrays of a column band for a round, or the reason why an attempt has to stop.

    ``names`` are those of the arrays, "" the band's values. ``band`` is a `FactorBand`
    or its bytes: these are opened by the thread that uses them, not by the event loop.
    """

    attempt: AttemptKey
    col: int
    due: int
    names: tuple[str, ...]
    band: Any
    reason: str = ""

    def open(self) -> Any:
        """Return the band, in arrays of its own."""
        return pickle.loads(self.band) if _is_bytes(self.band) else self.band


class Receiver(Protocol):
    """A worker's part of an attempt, as far as messages are concerned."""

    def arrive(self, parcel: Parcel) -> None:
        """Take a parcel in; in the event loop's thread."""
        ...

    def abort(self, reason: str) -> None:
        """Stop, since the attempt cannot succeed or is not wanted any more."""
        ...

    def lose(self, reason: str) -> None:
        """Stop, since another worker has gone, and tell the client."""
        ...


class _Desk(NamedTuple):
    """An attempt that is running here."""

    receiver: Receiver
    task: str
    peers: tuple[str, ...]


class Exchange(WorkerPlugin):
    """Hands bands to the attempts of one worker, and sends theirs; keeps their threads."""

    name = PLUGIN
    idempotent = True

    def setup(self, worker: Any) -> None:
        """Begin; called on the worker, when the plugin or the worker is new."""
        self.worker = worker
        self.pool = ThreadPoolExecutor(MOST_THREADS, "daskfactor-ring")
        self._lock = threading.Lock()
        self._desks: dict[AttemptKey, _Desk] = {}
        self._early: OrderedDict[AttemptKey, list[Parcel]] = OrderedDict()
        self._over: OrderedDict[str, int] = OrderedDict()
        self._unwanted: OrderedDict[Any, None] = OrderedDict()
        self._queues: dict[str, list[Parcel]] = {}
        worker.handlers["daskfactor_bands"] = self.receive

    def teardown(self, worker: Any) -> None:
        """End; called when the worker closes: nobody may go on waiting."""
        worker.handlers.pop("daskfactor_bands", None)
        self._abort(list(self._desks.values()), "the worker is closing")
        self.pool.shutdown(wait=False)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Stop the work of a task that the scheduler no longer wants."""
        if finish in ("cancelled", "released", "forgotten") and start in ("executing", "cancelled"):
            with self._lock:
                _remember(self._unwanted, key, None)  # it may not have got as far as a desk
                desks = [desk for desk in self._desks.values() if desk.task == key]
            self._abort(desks, "the client has given this attempt up")

    def _abort(self, desks: list[_Desk], reason: str) -> None:
        for desk in desks:
            desk.receiver.abort(reason)

    # -- attempts ------------------------------------------------------------

    def open(
        self, attempt: AttemptKey, task: str, peers: tuple[str, ...], receiver: Receiver
    ) -> None:
        """Begin an attempt, with what has arrived for it already."""
        with self._lock:
            early = self._early.pop(attempt, [])
            self._desks[attempt] = _Desk(receiver, task, peers)
            unwanted = task in self._unwanted or self._is_over(attempt)
        if unwanted:
            receiver.abort("this attempt is over")
        for parcel in early:
            self._hand_over(receiver, parcel)

    def close(self, attempt: AttemptKey) -> None:
        """End an attempt; what still arrives for it is dropped."""
        token, number = attempt
        with self._lock:
            self._desks.pop(attempt, None)
            _remember(self._over, token, max(number, self._over.get(token, number)))
            for late in [a for a in self._early if a[0] == token and a[1] <= number]:
                del self._early[late]

    def _is_over(self, attempt: AttemptKey) -> bool:
        return attempt[1] <= self._over.get(attempt[0], -1)

    # -- messages ------------------------------------------------------------

    def send(self, address: str, parcel: Parcel) -> None:
        """Send without waiting, from any thread; what queues up goes in one message."""
        with self._lock:
            idle = address not in self._queues
            self._queues.setdefault(address, []).append(parcel)
        if idle:
            self.worker.loop.add_callback(self._pump, address)

    async def _pump(self, address: str) -> None:
        """Write messages to another worker until nothing is queued for it any more."""
        near = address.startswith("inproc:")  # passed on as it is
        try:
            while parcels := self._next(address):
                bands = [Serialize(p.band) if near else _frame(p.band) for p in parcels]  # type: ignore[no-untyped-call]
                heads = [tuple(parcel._replace(band=None)) for parcel in parcels]
                remote = self.worker.rpc(address)
                await remote.daskfactor_bands(reply=False, heads=heads, bands=bands)
        except (OSError, RuntimeError, TimeoutError) as error:
            with self._lock:
                self._queues.pop(address, None)
            self._lose(address, f"{address} cannot be reached: {error}")

    def _next(self, address: str) -> list[Parcel]:
        with self._lock:
            parcels = self._queues.pop(address)
            if parcels:
                self._queues[address] = []
            return parcels

    def receive(self, heads: list[Any], bands: list[Any]) -> None:
        """Hand parcels to their attempts; the operation's handler, in the event loop's thread."""
        for (attempt, col, due, names, _, reason), band in zip(heads, bands, strict=True):
            parcel = Parcel(tuple(attempt), col, due, tuple(names), band, reason)
            with self._lock:
                desk = self._desks.get(parcel.attempt)
                if desk is None:
                    if not self._is_over(parcel.attempt):
                        early = self._early.get(parcel.attempt, [])
                        _remember(self._early, parcel.attempt, [*early, parcel])
                    continue
            self._hand_over(desk.receiver, parcel)

    def _hand_over(self, receiver: Receiver, parcel: Parcel) -> None:
        if parcel.reason:
            receiver.abort(parcel.reason)
        else:
            receiver.arrive(parcel)

    def abort_peers(self, attempt: AttemptKey, reason: str) -> None:
        """Tell the others that an attempt cannot succeed."""
        for address in self._desks[attempt].peers:
            if address != self.worker.address:
                self.send(address, Parcel(attempt, -1, -1, (), None, reason))

    def _lose(self, address: str, reason: str) -> None:
        """Stop whatever counts on a worker that has gone."""
        logger.info("bands: %s", reason)
        with self._lock:
            desks = [desk for desk in self._desks.values() if address in desk.peers]
        for desk in desks:
            desk.receiver.lose(reason)


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > MOST_ATTEMPTS:
        known.popitem(last=False)


def _is_bytes(band: Any) -> bool:
    return isinstance(band, bytes | bytearray | memoryview)


def _frame(band: Any) -> Any:
    """Return a band as bytes, and where in a message these go."""
    raw = pickle.dumps(band, protocol=5)
    return raw if len(raw) < SMALL else Serialize(raw)  # type: ignore[no-untyped-call]
