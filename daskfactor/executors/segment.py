"""One worker's part of a segment in a ring: operations on its row bands, messages with bands.

The bands of all other factors move between workers. A band that has been through n rounds may take
part in the operation of round n; then it moves to the worker that owns the row band of its
operation in round n + 1. Only the arrays that an operation touches move with it: arrays that a
plan does not change are copied to every worker once, and arrays that only later rounds need are
sent directly to the workers of those rounds.

Bands are sent over the cluster's own connections (see `wire`), for which a plugin registers
handlers on every worker. Messages are not acknowledged. Messages of a finished attempt are dropped.
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
from daskfactor.executors.base import (
    ProgressReporter,
    SegmentLost,
    StateLost,
    Work,
    local_workspace,
    run_operation,
)
from daskfactor.executors.plan import Op, Round, ops_by_row, row_band_by_round
from daskfactor.executors.state import (
    CELLS,
    Array,
    Band,
    BlockCells,
    Evaluation,
    FactorBand,
    Portion,
    moving_bands,
    without_records,
)
from daskfactor.executors.store import PLUGIN, ArrayRequest, BandStore, Key, WorkerReport, unpack
from daskfactor.executors.threads import BandScheduler
from daskfactor.executors.wire import Wire
from daskfactor.kernels.steps import to_host
from daskfactor.machine import single_threaded_blas

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 64
"""Attempts remembered on a worker whose task has not started, or is finished."""
MAX_THREADS = 256
"""Threads of one worker; an abandoned attempt may occupy some of them for a while."""
INLINE_BYTES = 2**16
"""Bytes below which a band is pickled inside a message, which is cheaper than its own frame."""

REPORT_INTERVAL = 0.25
"""Seconds between progress reports of a worker."""

AttemptKey = tuple[str, int]


class BandMessage(NamedTuple):
    """Message with arrays of a band for a round, or with the reason to abort an attempt.

    ``at`` is the key of the band, ``due`` the round, and ``names`` are the names of the arrays, ""
    for the values. ``band`` is a `FactorBand` or its pickled bytes, which the thread that uses them
    unpickles, not the event loop.
    """

    attempt: AttemptKey
    at: Band
    due: int
    names: tuple[str, ...]
    band: Any
    reason: str = ""

    @classmethod
    def from_band(cls, attempt: AttemptKey, at: Band, due: int, part: FactorBand) -> "BandMessage":
        """Return the message with a part of a band."""
        names = (*(("",) if len(part.values) else ()), *part.arrays)
        return cls(attempt, at, due, names, part)

    def open(self) -> Any:
        """Return the band, unpickled."""
        is_bytes = isinstance(self.band, bytes | bytearray | memoryview)
        return pickle.loads(self.band) if is_bytes else self.band


class RingWorkerPlugin(WorkerPlugin):
    """Worker plugin that routes messages with bands to and from the attempts of one worker.

    ``bands`` is the store of the bands between segments, ``pool`` has the threads of all attempts.
    """

    name = PLUGIN
    idempotent = True
    local_plugins: ClassVar[WeakValueDictionary[str, "RingWorkerPlugin"]] = WeakValueDictionary()
    """Plugins of this process by address, which need no messages between them."""

    def setup(self, worker: Any) -> None:
        """Start the plugin on a worker."""
        self.worker = worker
        self.local_plugins[worker.address] = self
        self.pool = ThreadPoolExecutor(MAX_THREADS, "daskfactor-ring")
        self.bands = BandStore(worker, self.pool)
        self._lock = threading.Lock()
        self._segments: dict[AttemptKey, SegmentRun] = {}
        self._early_messages: OrderedDict[AttemptKey, list[BandMessage]] = OrderedDict()
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._cancelled: OrderedDict[Any, None] = OrderedDict()
        self._queues: dict[str, list[BandMessage]] = {}
        self._wire = Wire(worker, self.deliver, self._on_lost_worker)
        worker.handlers["daskfactor_bands"] = self.receive

    def teardown(self, worker: Any) -> None:
        """Stop the plugin when the worker closes, and abort its attempts."""
        worker.handlers.pop("daskfactor_bands", None)
        self.local_plugins.pop(worker.address, None)
        for segment in list(self._segments.values()):
            segment.abort("the worker is closing")
        self.bands.close()
        self._wire.close()
        self.pool.shutdown(wait=False)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Abort the attempt of a task that the scheduler cancels; forward anchors to the store."""
        self.bands.transition(key, start, finish)
        if finish in ("cancelled", "released", "forgotten") and start in ("executing", "cancelled"):
            with self._lock:
                _remember(self._cancelled, key, None)  # the task may not have started
                cancelled = [run for run in self._segments.values() if run.dask_key == key]
            for segment in cancelled:
                segment.abort("the client has given this attempt up")

    # -- attempts ------------------------------------------------------------

    def open(self, segment: "SegmentRun") -> None:
        """Register an attempt, and deliver the messages that arrived before it."""
        attempt = segment.task.attempt
        with self._lock:
            early = self._early_messages.pop(attempt, [])
            self._segments[attempt] = segment
            is_cancelled = segment.dask_key in self._cancelled or self._is_finished(attempt)
        if is_cancelled:
            segment.abort("this attempt is over")
        for message in early:
            segment.receive(message)

    def close(self, attempt: AttemptKey) -> None:
        """Unregister an attempt, whose later messages are dropped."""
        token, number = attempt
        with self._lock:
            self._segments.pop(attempt, None)
            _remember(self._finished, token, max(number, self._finished.get(token, number)))
            for late in [a for a in self._early_messages if a[0] == token and a[1] <= number]:
                del self._early_messages[late]

    def _is_finished(self, attempt: AttemptKey) -> bool:
        return attempt[1] <= self._finished.get(attempt[0], -1)

    # -- messages ------------------------------------------------------------

    def send(self, address: str, message: BandMessage) -> None:
        """Send a message without waiting, from any thread.

        Messages on connections that are not plain sockets, such as encrypted ones, go through the
        cluster's own layer; queued ones are sent together.
        """
        peer = self.local_plugins.get(address)
        if peer is not None:
            peer.deliver(message)
            return
        if self._wire.carries(address):
            self._wire.send(address, message)
            return
        with self._lock:
            idle = address not in self._queues
            self._queues.setdefault(address, []).append(message)
        if idle:
            self.worker.loop.add_callback(self._send_queue, address)

    async def _send_queue(self, address: str) -> None:
        """Send the queued messages of another worker until the queue is empty."""
        try:
            while messages := self._next_messages(address):
                bands = [_frame(message.band) for message in messages]
                heads = [tuple(message._replace(band=None)) for message in messages]
                remote = self.worker.rpc(address)
                await remote.daskfactor_bands(reply=False, heads=heads, bands=bands)
        except (OSError, RuntimeError, TimeoutError) as error:
            with self._lock:
                self._queues.pop(address, None)
            self._on_lost_worker(address, f"{address} cannot be reached: {error}")

    def _next_messages(self, address: str) -> list[BandMessage]:
        with self._lock:
            messages = self._queues.pop(address)
            if messages:
                self._queues[address] = []
            return messages

    def receive(self, heads: list[Any], bands: list[Any]) -> None:
        """Deliver messages to their attempts (a handler of the worker, in its event loop)."""
        for (attempt, at, due, names, _, reason), band in zip(heads, bands, strict=True):
            self.deliver(BandMessage(tuple(attempt), tuple(at), due, tuple(names), band, reason))

    def deliver(self, message: BandMessage) -> None:
        """Deliver a message to its attempt, or keep it until the attempt starts here."""
        with self._lock:
            segment = self._segments.get(message.attempt)
            if segment is None:
                if not self._is_finished(message.attempt):
                    early = self._early_messages.get(message.attempt, [])
                    _remember(self._early_messages, message.attempt, [*early, message])
                return
        segment.receive(message)

    def abort_peers(self, task: "SegmentTask", reason: str) -> None:
        """Abort an attempt on the other workers."""
        for address in task.addresses:
            if address != self.worker.address:
                self.send(address, BandMessage(task.attempt, (-1, -1), -1, (), None, reason))

    def _on_lost_worker(self, address: str, reason: str) -> None:
        """Abort the attempts that a lost worker takes part in."""
        logger.info("bands: %s", reason)
        with self._lock:
            affected = [s for s in self._segments.values() if address in s.task.addresses]
        for segment in affected:
            segment.abort(reason)  # all of them, before a report to the client may fail
        for segment in affected:
            try:
                segment.report_loss(reason)
            except Exception:
                logger.exception("the client was not told that %s has gone", address)


def _remember(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    entries[key] = value
    while len(entries) > MAX_ATTEMPTS:
        entries.popitem(last=False)


def _frame(band: Any) -> Any:
    """Return the pickled band, wrapped as a frame of its own if it is large."""
    raw = pickle.dumps(band, protocol=5)
    return raw if len(raw) < INLINE_BYTES else Serialize(raw)  # type: ignore[no-untyped-call]


class Transfers(NamedTuple):
    """Moves of the bands of a factor, and of their arrays, during a plan.

    Attributes
    ----------
    row_of
        Row band of each band's operation in each round, shape (rounds, B).
    next_use
        For each changed array and round, the next round that touches it; the number of rounds if
        none does.
    constant
        Names of arrays that are read but never changed.
    """

    row_of: NDArray[np.int32]
    next_use: dict[str, NDArray[np.int32]]
    constant: frozenset[str]

    def first(self, name: str) -> int:
        """Return the first round that needs an array."""
        ahead = self.next_use.get(name)
        return 0 if ahead is None or ahead[0] == len(self.row_of) else int(ahead[0])

    def needed(self, number: int) -> set[str]:
        """Return the names of the arrays that the operation of a round needs."""
        changed = {name for name, ahead in self.next_use.items() if ahead[number] == number}
        return changed | {""}

    def split(self, band: FactorBand, after: int) -> Iterator[tuple[int, FactorBand]]:
        """Yield the parts of a band after a round (-1: the start), with the round that needs them.

        An array that an operation has created counts as needed in every round.
        """
        rounds = len(self.row_of)
        parts = {after + 1: without_records(band, ())}
        for name, array in band.arrays.items():
            if name in self.constant:
                continue
            ahead = self.next_use.get(name)
            due = after + 1 if ahead is None or after + 1 == rounds else int(ahead[after + 1])
            part = parts.setdefault(due, FactorBand(band.offset, band.values[:0]))
            part.arrays[name] = array
        yield from parts.items()


def plan_transfers(
    plan: Sequence[Round], program: Any, names_of: Sequence[frozenset[str]]
) -> tuple[tuple[Transfers, ...], frozenset[str]]:
    """Return the transfers of each factor's bands in a plan, and the names of all touched arrays.

    ``names_of`` holds the names of the arrays of each factor's bands.
    """
    names = frozenset().union(*names_of)
    touched, changed = [names] * len(plan), names
    if hasattr(program, "touches"):
        touched = [frozenset(program.touches(part.ops[0])) for part in plan]
        changed = frozenset().union(*(program.changes(part.ops[0]) for part in plan))
    every = frozenset().union(*touched)

    def next_use(name: str) -> NDArray[np.int32]:
        """Return for each round the next round that touches an array."""
        rounds = np.array([name in round_names for round_names in touched], bool)
        ahead = np.where(rounds, np.arange(len(plan)), len(plan))
        return np.minimum.accumulate(ahead[::-1])[::-1].astype(np.int32)

    return tuple(
        Transfers(
            row_band_by_round(plan, factor),
            {name: next_use(name) for name in sorted(changed & factor_names)},
            every - changed,
        )
        for factor, factor_names in enumerate(names_of[1:], 1)
    ), every


class BandLocations(Protocol):
    """Metadata of a state's bands, as a `RemoteState` has it."""

    @property
    def blocks(self) -> int: ...

    @property
    def monitored(self) -> Iterable[BlockAddress]: ...

    def names(self, factor: int) -> frozenset[str]: ...

    def request(self, key: Key, changes: bool) -> ArrayRequest: ...


@dataclass
class SegmentTask:
    """Input of one worker's task in one attempt at a segment.

    ``owner`` is the rank of every row band's worker, ``addresses`` holds the addresses of the
    ranks, and ``transfers`` the moves of each moving factor. ``requests`` are the arrays that the
    worker starts with: its row bands and their monitored cells; those arrays of other bands that
    its operations are the first to need; and all constant arrays. Results are stored as a
    ``version`` under the client's ``token``. ``ops`` are plain tuples, which are sent faster than
    named ones.
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
    requests: list[ArrayRequest] = field(default_factory=list)


class SegmentRun:
    """Execution of one worker's part of a segment."""

    def __init__(
        self, task: SegmentTask, plugin: RingWorkerPlugin | Any, dask_key: str = ""
    ) -> None:
        self.task, self.portion, self.dask_key = task, Portion(), dask_key
        self._constants: dict[Band, dict[str, Array]] = {}
        self.plugin = plugin
        ops = {row: [_op(row, op) for op in row_ops] for row, row_ops in task.ops.items()}
        self.scheduler = BandScheduler(ops, task.threads, self._leaves, task.patience)
        self._waiting: dict[tuple[Band, int], dict[tuple[str, ...], BandMessage]] = {}
        self._started_round: dict[Band, int] = {}
        self._lock = threading.Lock()
        self._reported = 0
        self._last_report = 0.0

    def begin(self, inputs: Mapping[Key, Any]) -> None:
        """Add the arrays that the worker starts with."""
        portion = self.portion
        parts: dict[tuple[Band, int], FactorBand] = {}
        for (factor, number, name), value in sorted(inputs.items()):
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
            self.receive(BandMessage.from_band(self.task.attempt, at, due, part))

    def _transfers(self, at: Band) -> Transfers:
        return self.task.transfers[at[0] - 1]

    def _holder(self, at: Band, number: int) -> int:
        """Return the rank of the worker that needs a band in a round."""
        row_of = self._transfers(at).row_of
        if number == len(row_of):  # the band stays here after its last round
            return self.task.rank
        return self.task.owner[int(row_of[number, at[1]])]

    def _leaves(self, at: Band, number: int) -> bool:
        return self._holder(at, number) != self.task.rank

    def receive(self, message: BandMessage) -> None:
        """Add a part of a band, or abort; a second copy of a part is dropped."""
        _, at, due, names, _, reason = message
        if reason:
            self.abort(reason)
            return
        transfers = self._transfers(at)
        with self._lock:
            if due <= self._started_round.get(at, -1):
                return
            parts = self._waiting.setdefault((at, due), {})
            parts.setdefault(names, message)
            available = set(itertools.chain.from_iterable(parts))
        if due < len(transfers.row_of) and transfers.needed(due) <= available:
            self.scheduler.arrive(at, due)

    def abort(self, reason: str) -> None:
        """Abort the segment."""
        self.scheduler.fail(SegmentLost(reason))

    def report_loss(self, reason: str) -> None:
        """Abort the segment after the loss of a worker, and report it to the client."""
        self.abort(reason)
        self.task.work.report_progress("lost", self.task.rank, worker=self.plugin.worker)

    def _collect(self, at: Band, due: int) -> FactorBand:
        """Return a band joined from the parts that arrived for a round."""
        with self._lock:
            self._started_round[at] = due
            messages = self._waiting.pop((at, due)).values()
        parts = [message.open() for message in messages]
        band: FactorBand = max(parts, key=lambda part: len(part.values))
        for part in parts:
            band.arrays.update(part.arrays)
        return band

    def operate(self, op: Op) -> tuple[Evaluation | None, float]:
        """Run one operation, and send its moving bands to the workers that need them next."""
        number, bands = self.scheduler.position[op.block[0]], self.portion.bands
        for at in moving_bands(op.block):
            bands[at] = self._collect(at, number)
            bands[at].arrays.update(self._constants.get(at, {}))
        evaluation, seconds = run_operation(op, self.task.work, self.portion, local_workspace())
        if self.task.work.placement is not None:
            for at in moving_bands(op.block):
                constants = self._constants.get(at, {})  # these stay on the device
                constants.update({name: bands[at].arrays[name] for name in constants})
        with self._lock:
            self.portion.strip(op.block, number)
            done = {at: bands.pop(at) for at in moving_bands(op.block)}
        for at, band in done.items():
            for due, part in self._transfers(at).split(band, number):
                holder, attempt = self._holder(at, due), self.task.attempt
                if holder == self.task.rank:
                    self.receive(BandMessage.from_band(attempt, at, due, part))
                else:
                    self._to_host([part])
                    message = BandMessage.from_band(attempt, at, due, part)
                    self.plugin.send(self.task.addresses[holder], message)
        return evaluation, seconds

    def run(self) -> Portion:
        """Run all operations; raise the first error, or SegmentLost if another worker failed."""
        with single_threaded_blas():
            pool, threads = self.plugin.pool, self.task.threads
            self.scheduler.run(pool, threads, self.operate, self._report_progress)
        return self.result()

    def result(self) -> Portion:
        """Return the portion of the state that the segment leaves on this worker."""
        portion, transfers = self.portion, self.task.transfers[0]
        constant = transfers.constant
        for band in portion.bands.values():
            band.arrays = {n: array for n, array in band.arrays.items() if n not in constant}
        for at, due in list(self._waiting):
            assert due == len(transfers.row_of), "a part of a band was not used"
            portion.bands[at] = self._collect(at, due)
        self._to_host(portion.bands.values(), portion.cells.values())
        if self.task.work.placement is not None:
            for _, draws, _ in itertools.chain(*portion.records.values()):
                draws[:] = map(to_host, draws)
        portion.evaluations, portion.busy = self.scheduler.evaluations, self.scheduler.busy
        return portion

    def _to_host(self, bands: Iterable[FactorBand], cells: Iterable[BlockCells] = ()) -> None:
        """Move bands to host memory, from where they can be sent."""
        if self.task.work.placement is not None:
            self.task.work.placement.to_host(bands, cells)

    def _report_progress(self, done: int) -> None:
        """Report progress to the client, which takes silence for a stalled segment."""
        elapsed = time.monotonic() - self._last_report
        is_due = elapsed > REPORT_INTERVAL or done == self.scheduler.total
        if is_due and done > self._reported:
            self._reported, self._last_report = done, time.monotonic()
            self.task.work.report_progress("progress", self.task.rank, done)


def _op(row: int, values: Sequence[Any]) -> Op:
    action, *others = values
    rest = len(Op._fields) - 2  # the fields after action and block
    return Op(action, block_at(row, *others[:-rest]), *others[-rest:])


def _no_rows(array: Array) -> FactorBand:
    """Return a band without values, for arrays that arrive before them."""
    return FactorBand(0, array[:0])


def make_segment_tasks(
    work: Work,
    state: BandLocations,
    shares: Mapping[str, int],
    threads: Sequence[int],
    attempt: AttemptKey,
    report_progress: ProgressReporter,
    patience: float,
) -> list[SegmentTask]:
    """Return every worker's part of an attempt; ``shares`` holds the row bands of each address."""
    names = [state.names(factor) for factor in range(len(work.plan[0].ops[0].block))]
    transfers, touched = plan_transfers(work.plan, work.program, names)
    owner = tuple(rank for rank, count in enumerate(shares.values()) for _ in range(count))
    ops, task_work = ops_by_row(work.plan), work.for_tasks(report_progress)
    shared = owner, tuple(shares), patience, task_work, transfers
    tasks = [SegmentTask(attempt, rank, lanes, *shared) for rank, lanes in enumerate(threads)]
    for band in range(state.blocks):
        row_task = tasks[owner[band]]
        row_task.ops[band] = [(op.action, *op.block[1:], *op[2:]) for op in ops[band]]
        for name in ("", *sorted(touched & names[0])):
            changes = name not in transfers[0].constant
            row_task.requests.append(state.request(Key(0, band, name), changes))
        for factor, moves in enumerate(transfers, 1):
            for name in ("", *sorted(touched & names[factor])):
                key, constant = Key(factor, band, name), name in moves.constant
                first = owner[int(moves.row_of[moves.first(name), band])]
                for task in tasks if constant else tasks[first : first + 1]:
                    task.requests.append(state.request(key, not constant))
    for block in state.monitored:
        tasks[owner[block[0]]].requests.append(state.request(Key(CELLS, block), True))
    return tasks


def run_segment(packed: NDArray[np.uint8]) -> WorkerReport:
    """Run one worker's part of one attempt, and store its bands on the worker (a task).

    The input is packed because an unpacked one could share its data with the caller.
    """
    task: SegmentTask = unpack(packed)
    worker = get_worker()
    plugin = cast("RingWorkerPlugin", worker.plugins[PLUGIN])
    task.work.report_progress("started", task.rank)
    segment = SegmentRun(task, plugin, str(worker.get_current_task()))
    plugin.open(segment)
    try:
        inputs, replicas = plugin.bands.fetch(
            task.token, task.requests, task.patience, lambda: segment.scheduler.failure is not None
        )
        segment.begin(inputs)
        report = plugin.bands.store_portion(task.token, task.version, segment.run())
        report.replicas = replicas
        return report
    except BaseException as error:
        if not isinstance(error, SegmentLost) or isinstance(error, StateLost):
            reason = f"worker {task.addresses[task.rank]} failed: {type(error).__name__}"
            plugin.abort_peers(task, reason)
        raise
    finally:
        plugin.close(task.attempt)
        task.work.report_progress("ended", task.rank)
