"""What one worker does in a ring: its rows of a segment's plan, bands to and from others.

Bands of all other factors come and go: one that has been through n rounds may take
part in the operation of round n, and then belongs to whichever worker owns the row
band of its operation in round n + 1. Only what an operation touches travels with it: arrays
that nobody changes in a plan are copied to every worker once, and those that
later rounds alone need go straight to where they will be needed.

Bands travel over the cluster's own connections (see `wire`), for which a plugin registers
operations on every worker. Messages go one way: a band needs no answer, since the receiver's
next band is the answer. Whatever belongs to an attempt that is over is dropped on arrival.
"""

import itertools
import logging
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, cast
from weakref import WeakValueDictionary

import numpy as np
from distributed import get_worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.serialize import Serialize
from numpy.typing import NDArray

from daskfactor.data.grid import BlockAddress, block_at
from daskfactor.executors.base import SegmentLost, StateLost, Tell, Work, local_workspace, perform
from daskfactor.executors.plan import Op, Round, ops_by_row, rows_met
from daskfactor.executors.state import (
    CELLS,
    Array,
    Band,
    BlockCells,
    Evaluation,
    FactorBand,
    Portion,
    bare,
    travellers,
)
from daskfactor.executors.store import PLUGIN, BandStore, Key, Report, Want, unpack
from daskfactor.executors.threads import BandScheduler
from daskfactor.executors.wire import Wire
from daskfactor.kernels.steps import to_host
from daskfactor.machine import single_threaded_blas

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 64
"""Attempts that are remembered though their task has not started here, or is over."""
MOST_THREADS = 256
"""Threads of one worker; an attempt that was given up may hold some of them for a while."""
SMALL = 2**16
"""Bytes below which a band goes inside a message, which is cheaper than beside it."""

TELL_EVERY = 0.25
"""Seconds between a worker's news."""

AttemptKey = tuple[str, int]


class Parcel(NamedTuple):
    """Arrays of a band for a round, or the reason why an attempt has to stop.

    ``at`` says which band it is, ``names`` which arrays, "" its values. ``band`` is a `FactorBand`
    or its bytes: these are opened by the thread that uses them, not by the event loop.
    """

    attempt: AttemptKey
    at: Band
    due: int
    names: tuple[str, ...]
    band: Any
    reason: str = ""

    @classmethod
    def of(cls, attempt: AttemptKey, at: Band, due: int, part: FactorBand) -> "Parcel":
        """Pack a part of a band."""
        names = (*(("",) if len(part.values) else ()), *part.arrays)
        return cls(attempt, at, due, names, part)

    def open(self) -> Any:
        """Return the band, in arrays of its own."""
        is_bytes = isinstance(self.band, bytes | bytearray | memoryview)
        return pickle.loads(self.band) if is_bytes else self.band


class Exchange(WorkerPlugin):
    """Hands bands to the attempts of one worker, and sends theirs; keeps their threads.

    ``bands`` are those that stay here between segments.
    """

    name = PLUGIN
    idempotent = True
    here: ClassVar[WeakValueDictionary[str, "Exchange"]] = WeakValueDictionary()
    """Those of this process, by address: what is for them takes no message."""

    def setup(self, worker: Any) -> None:
        """Begin; called on the worker, when the plugin or the worker is new."""
        self.worker = worker
        self.here[worker.address] = self
        self.pool = ThreadPoolExecutor(MOST_THREADS, "daskfactor-ring")
        self.bands = BandStore(worker, self.pool)
        self._lock = threading.Lock()
        self._segments: dict[AttemptKey, SegmentRun] = {}
        self._early: OrderedDict[AttemptKey, list[Parcel]] = OrderedDict()
        self._over: OrderedDict[str, int] = OrderedDict()
        self._unwanted: OrderedDict[Any, None] = OrderedDict()
        self._queues: dict[str, list[Parcel]] = {}
        self._wire = Wire(worker, self.take, self._lose)
        worker.handlers["daskfactor_bands"] = self.receive

    def teardown(self, worker: Any) -> None:
        """End; called when the worker closes: nobody may go on waiting."""
        worker.handlers.pop("daskfactor_bands", None)
        self.here.pop(worker.address, None)
        for segment in list(self._segments.values()):
            segment.abort("the worker is closing")
        self.bands.close()
        self._wire.close()
        self.pool.shutdown(wait=False)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Stop the work of a task that the scheduler no longer wants; drop a client's bands."""
        self.bands.transition(key, start, finish)
        if finish in ("cancelled", "released", "forgotten") and start in ("executing", "cancelled"):
            with self._lock:
                _remember(self._unwanted, key, None)  # it may not have begun
                unwanted = [own for own in self._segments.values() if own.task == key]
            for segment in unwanted:
                segment.abort("the client has given this attempt up")

    # -- attempts ------------------------------------------------------------

    def open(self, segment: "SegmentRun") -> None:
        """Begin an attempt, with what has arrived for it already."""
        attempt = segment.order.attempt
        with self._lock:
            early = self._early.pop(attempt, [])
            self._segments[attempt] = segment
            unwanted = segment.task in self._unwanted or self._is_over(attempt)
        if unwanted:
            segment.abort("this attempt is over")
        for parcel in early:
            segment.arrive(parcel)

    def close(self, attempt: AttemptKey) -> None:
        """End an attempt; what still arrives for it is dropped."""
        token, number = attempt
        with self._lock:
            self._segments.pop(attempt, None)
            _remember(self._over, token, max(number, self._over.get(token, number)))
            for late in [a for a in self._early if a[0] == token and a[1] <= number]:
                del self._early[late]

    def _is_over(self, attempt: AttemptKey) -> bool:
        return attempt[1] <= self._over.get(attempt[0], -1)

    # -- messages ------------------------------------------------------------

    def send(self, address: str, parcel: Parcel) -> None:
        """Send without waiting, from any thread.

        Where the cluster's messages are encrypted, or otherwise more than bytes on a socket, its
        own layer takes them, and what queues up goes in one message.
        """
        peer = self.here.get(address)
        if peer is not None:
            peer.take(parcel)
            return
        if self._wire.carries(address):
            self._wire.send(address, parcel)
            return
        with self._lock:
            idle = address not in self._queues
            self._queues.setdefault(address, []).append(parcel)
        if idle:
            self.worker.loop.add_callback(self._pump, address)

    async def _pump(self, address: str) -> None:
        """Write messages to another worker until nothing is queued for it any more."""
        try:
            while parcels := self._next(address):
                bands = [_frame(parcel.band) for parcel in parcels]
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
        for (attempt, at, due, names, _, reason), band in zip(heads, bands, strict=True):
            self.take(Parcel(tuple(attempt), tuple(at), due, tuple(names), band, reason))

    def take(self, parcel: Parcel) -> None:
        """Hand a parcel to its attempt, or keep it for one that has not begun here."""
        with self._lock:
            segment = self._segments.get(parcel.attempt)
            if segment is None:
                if not self._is_over(parcel.attempt):
                    early = self._early.get(parcel.attempt, [])
                    _remember(self._early, parcel.attempt, [*early, parcel])
                return
        segment.arrive(parcel)

    def abort_peers(self, order: "Order", reason: str) -> None:
        """Tell the others that an attempt cannot succeed."""
        for address in order.addresses:
            if address != self.worker.address:
                self.send(address, Parcel(order.attempt, (-1, -1), -1, (), None, reason))

    def _lose(self, address: str, reason: str) -> None:
        """Stop whatever counts on a worker that has gone."""
        logger.info("bands: %s", reason)
        with self._lock:
            concerned = [s for s in self._segments.values() if address in s.order.addresses]
        for segment in concerned:
            segment.abort(reason)  # all, before anything that may fail
        for segment in concerned:
            try:
                segment.lose(reason)
            except Exception:
                logger.exception("the client was not told that %s has gone", address)


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > MOST_ATTEMPTS:
        known.popitem(last=False)


def _frame(band: Any) -> Any:
    """Return a band as bytes, and where in a message these go."""
    raw = pickle.dumps(band, protocol=5)
    return raw if len(raw) < SMALL else Serialize(raw)  # type: ignore[no-untyped-call]


class Transfers(NamedTuple):
    """Where the bands of a factor, and their arrays, have to be during a plan.

    Attributes
    ----------
    row_of
        The row band that each band meets in each round, shape (rounds, B).
    following
        By name of an array that operations change, and by round: the next round
        that touches it, the number of rounds where none does.
    constant
        Arrays that are read but never changed.
    """

    row_of: NDArray[np.int32]
    following: dict[str, NDArray[np.int32]]
    constant: frozenset[str]

    def first(self, name: str) -> int:
        """Return the first round that needs an array: where it has to be at the start."""
        ahead = self.following.get(name)
        return 0 if ahead is None or ahead[0] == len(self.row_of) else int(ahead[0])

    def needed(self, number: int) -> set[str]:
        """Return the names of what an operation of a round cannot do without."""
        found = {name for name, ahead in self.following.items() if ahead[number] == number}
        return found | {""}

    def split(self, band: FactorBand, after: int) -> Iterator[tuple[int, FactorBand]]:
        """Cut what was with a band after a round (-1: the start) into parts by next need.

        An array that the plan does not know is needed always: an operation made it.
        """
        rounds = len(self.row_of)
        parts = {after + 1: bare(band, ())}
        for name, array in band.arrays.items():
            if name in self.constant:
                continue
            ahead = self.following.get(name)
            due = after + 1 if ahead is None or after + 1 == rounds else int(ahead[after + 1])
            part = parts.setdefault(due, FactorBand(band.offset, band.values[:0]))
            part.arrays[name] = array
        yield from parts.items()


def plan_transfers(
    plan: Sequence[Round], program: Any, names_of: Sequence[frozenset[str]]
) -> tuple[tuple[Transfers, ...], frozenset[str]]:
    """Say what a program's operations need of the bands that travel, and all that they touch.

    ``names_of`` are the names of the arrays that the bands of each factor have.
    """
    names = frozenset().union(*names_of)
    touched, changed = [names] * len(plan), names
    if hasattr(program, "touches"):
        touched = [frozenset(program.touches(part.ops[0])) for part in plan]
        changed = frozenset().union(*(program.changes(part.ops[0]) for part in plan))
    every = frozenset().union(*touched)

    def next_use(name: str) -> NDArray[np.int32]:
        """Return for each round the next one that touches an array."""
        rounds = np.array([name in found for found in touched], bool)
        ahead = np.where(rounds, np.arange(len(plan)), len(plan))
        return np.minimum.accumulate(ahead[::-1])[::-1].astype(np.int32)

    return tuple(
        Transfers(
            rows_met(plan, factor),
            {name: next_use(name) for name in sorted(changed & own)},
            every - changed,
        )
        for factor, own in enumerate(names_of[1:], 1)
    ), every


class Holding(Protocol):
    """Says where the bands of a state are; a `HeldState`."""

    @property
    def blocks(self) -> int: ...

    @property
    def monitored(self) -> Iterable[BlockAddress]: ...

    def names(self, factor: int) -> frozenset[str]: ...

    def want(self, key: Key, changes: bool) -> Want: ...


@dataclass
class Order:
    """One worker's part of one attempt at a segment.

    ``owner`` is the rank of every row band's worker; ``addresses`` are those of the ranks.
    ``transfers`` are those of each factor that travels. ``wants`` are what the worker begins
    with: its row bands and their monitored cells, of other bands what its operations are the
    first to need, and of all of them what nobody changes. It leaves a ``version`` of what has
    changed under the client's ``token``. ``ops`` are plain tuples, which are quicker to send
    than named ones.
    """

    attempt: AttemptKey
    rank: int
    threads: int
    owner: tuple[int, ...]
    addresses: tuple[str, ...]
    patience: float
    work: Work
    transfers: tuple[Transfers, ...]
    token: str = ""
    version: int = 0
    ops: dict[int, list[Any]] = field(default_factory=dict)
    wants: list[Want] = field(default_factory=list)


class SegmentRun:
    """The threads of one worker on their way through a segment."""

    def __init__(self, order: Order, exchange: Exchange | Any, task: str = "") -> None:
        self.order, self.portion, self.task = order, Portion(), task
        self._constants: dict[Band, dict[str, Array]] = {}
        self.exchange = exchange
        ops = {row: [_op(row, values) for values in found] for row, found in order.ops.items()}
        self.scheduler = BandScheduler(ops, order.threads, self._leaves, order.patience)
        self._waiting: dict[tuple[Band, int], dict[tuple[str, ...], Parcel]] = {}
        self._begun: dict[Band, int] = {}
        self._lock = threading.Lock()
        self._told = 0
        self._told_at = 0.0

    def begin(self, found: Mapping[Key, Any]) -> None:
        """Take in what the segment begins with here."""
        portion = self.portion
        parts: dict[tuple[Band, int], FactorBand] = {}
        for (factor, number, name), value in sorted(found.items()):
            at = factor, number
            if factor == CELLS:
                portion.cells[number] = value
            elif factor == 0:
                if name:
                    portion.bands[at].arrays[name] = value
                else:
                    portion.bands[at] = value
            elif name in self._transfers(at).constant:
                self._constants.setdefault(at, {})[name] = value
            elif not name:
                parts[at, 0] = value
            else:
                due = self._transfers(at).first(name)
                parts.setdefault((at, due), _no_rows(value)).arrays[name] = value
        for (at, due), part in parts.items():
            self.arrive(Parcel.of(self.order.attempt, at, due, part))

    def _transfers(self, at: Band) -> Transfers:
        return self.order.transfers[at[0] - 1]

    def _holder(self, at: Band, number: int) -> int:
        """Return the rank of the worker that has the operation of a round with a band."""
        row_of = self._transfers(at).row_of
        ended = number == len(row_of)  # what nobody needs any more stays
        return self.order.rank if ended else self.order.owner[int(row_of[number, at[1]])]

    def _leaves(self, at: Band, number: int) -> bool:
        return self._holder(at, number) != self.order.rank

    def arrive(self, parcel: Parcel) -> None:
        """Take in a part of a band, or give up; a second copy of a part is dropped."""
        _, at, due, names, _, reason = parcel
        if reason:
            self.abort(reason)
            return
        transfers = self._transfers(at)
        with self._lock:
            if due <= self._begun.get(at, -1):
                return
            parts = self._waiting.setdefault((at, due), {})
            parts.setdefault(names, parcel)
            here = {name for found in parts for name in found}
        if due < len(transfers.row_of) and transfers.needed(due) <= here:
            self.scheduler.arrive(at, due)

    def abort(self, reason: str) -> None:
        """Give the segment up."""
        self.scheduler.fail(SegmentLost(reason))

    def lose(self, reason: str) -> None:
        """Give the segment up since a worker has gone, and tell the client."""
        self.abort(reason)
        self.order.work.tell("lost", self.order.rank, worker=self.exchange.worker)

    def _collect(self, at: Band, due: int) -> FactorBand:
        """Put a band together from the parts that came for a round."""
        with self._lock:
            self._begun[at] = due
            parcels = self._waiting.pop((at, due)).values()
        parts = [parcel.open() for parcel in parcels]
        band: FactorBand = max(parts, key=lambda part: len(part.values))
        for part in parts:
            band.arrays.update(part.arrays)
        return band

    def operate(self, op: Op) -> tuple[Evaluation | None, float]:
        """Do one operation, and pass those of its bands on that travel."""
        number, bands = self.scheduler.position[op.block[0]], self.portion.bands
        for at in travellers(op.block):
            bands[at] = self._collect(at, number)
            bands[at].arrays.update(self._constants.get(at, {}))
        found, seconds = perform(op, self.order.work, self.portion, local_workspace())
        if self.order.work.place is not None:
            for at in travellers(op.block):
                constants = self._constants.get(at, {})  # they stay where they were put
                constants.update({name: bands[at].arrays[name] for name in constants})
        with self._lock:
            self.portion.strip(op.block, number)
            done = {at: bands.pop(at) for at in travellers(op.block)}
        for at, band in done.items():
            for due, part in self._transfers(at).split(band, number):
                holder, attempt = self._holder(at, due), self.order.attempt
                if holder == self.order.rank:
                    self.arrive(Parcel.of(attempt, at, due, part))
                else:
                    self._home([part])
                    parcel = Parcel.of(attempt, at, due, part)
                    self.exchange.send(self.order.addresses[holder], parcel)
        return found, seconds

    def run(self) -> Portion:
        """Do all operations; raise the first error, or SegmentLost if others failed."""
        with single_threaded_blas():
            self.scheduler.run(self.exchange.pool, self.order.threads, self.operate, self._tell)
        return self.result()

    def result(self) -> Portion:
        """Return what the segment leaves here."""
        portion, transfers = self.portion, self.order.transfers[0]
        constant = transfers.constant
        for band in portion.bands.values():
            band.arrays = {n: array for n, array in band.arrays.items() if n not in constant}
        for at, due in list(self._waiting):
            assert due == len(transfers.row_of), "a part of a band was not used"
            portion.bands[at] = self._collect(at, due)
        self._home(portion.bands.values(), portion.cells.values())
        if self.order.work.place is not None:
            for _, draws, _ in itertools.chain(*portion.records.values()):
                draws[:] = map(to_host, draws)
        portion.evaluations, portion.busy = self.scheduler.evaluations, self.scheduler.busy
        return portion

    def _home(self, bands: Iterable[FactorBand], cells: Iterable[BlockCells] = ()) -> None:
        """Have bands lie in the memory of this process, from where they can be sent."""
        if self.order.work.place is not None:
            self.order.work.place.home(bands, cells)

    def _tell(self, done: int) -> None:
        """Tell the client of progress, and of nothing else: silence means that all hang."""
        due = time.monotonic() - self._told_at > TELL_EVERY or done == self.scheduler.total
        if due and done > self._told:
            self._told, self._told_at = done, time.monotonic()
            self.order.work.tell("progress", self.order.rank, done)


def _op(row: int, values: Sequence[Any]) -> Op:
    action, *others = values
    rest = len(Op._fields) - 2  # what follows action and block
    return Op(action, block_at(row, *others[:-rest]), *others[-rest:])


def _no_rows(array: Array) -> FactorBand:
    """Return a band for arrays alone, to which the values come from elsewhere."""
    return FactorBand(0, array[:0])


def make_orders(
    work: Work,
    state: Holding,
    shares: Mapping[str, int],
    threads: Sequence[int],
    attempt: AttemptKey,
    tell: Tell,
    patience: float,
) -> list[Order]:
    """Write down every worker's part of an attempt; ``shares`` are row bands by address."""
    names = [state.names(factor) for factor in range(len(work.plan[0].ops[0].block))]
    transfers, touched = plan_transfers(work.plan, work.program, names)
    owner = tuple(rank for rank, count in enumerate(shares.values()) for _ in range(count))
    ops, sent = ops_by_row(work.plan), work.sent(tell)
    shared = owner, tuple(shares), patience, sent, transfers
    orders = [Order(attempt, rank, lanes, *shared) for rank, lanes in enumerate(threads)]
    for band in range(state.blocks):
        own = orders[owner[band]]
        own.ops[band] = [(op.action, *op.block[1:], *op[2:]) for op in ops[band]]
        for name in ("", *sorted(touched & names[0])):
            own.wants.append(state.want(Key(0, band, name), name not in transfers[0].constant))
        for factor, each in enumerate(transfers, 1):
            for name in ("", *sorted(touched & names[factor])):
                key, constant = Key(factor, band, name), name in each.constant
                first = owner[int(each.row_of[each.first(name), band])]
                for order in orders if constant else orders[first : first + 1]:
                    order.wants.append(state.want(key, not constant))
    for block in state.monitored:
        orders[owner[block[0]]].wants.append(state.want(Key(CELLS, block), True))
    return orders


def run_segment(packed: NDArray[np.uint8]) -> Report:
    """Do one worker's part of one attempt: the task. Bands stay in the worker's store.

    What is unpacked is the task's own: an order that was not packed would share its data
    with the caller.
    """
    order: Order = unpack(packed)
    worker = get_worker()
    exchange = cast("Exchange", worker.plugins[PLUGIN])
    order.work.tell("started", order.rank)
    segment = SegmentRun(order, exchange, str(worker.get_current_task()))
    exchange.open(segment)
    try:
        found, replicas = exchange.bands.bring(
            order.token, order.wants, order.patience, lambda: segment.scheduler.failure is not None
        )
        segment.begin(found)
        report = exchange.bands.leave(order.token, order.version, segment.run())
        report.replicas = replicas
        return report
    except BaseException as error:
        if not isinstance(error, SegmentLost) or isinstance(error, StateLost):
            reason = f"worker {order.addresses[order.rank]} failed: {type(error).__name__}"
            exchange.abort_peers(order, reason)
        raise
    finally:
        exchange.close(order.attempt)
        order.work.tell("ended", order.rank)
