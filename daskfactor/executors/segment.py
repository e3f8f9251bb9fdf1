"""One worker's part of a segment in a ring: operations on its row bands, messages with bands.

The bands of all other factors move between workers. A band that has been through n rounds may take
part in the operation of round n; then it moves to the worker that owns the row band of its
operation in round n + 1. Only the arrays that an operation touches move with it: arrays that a
plan does not change are copied to every worker once, and arrays that only later rounds need are
sent directly to the workers of those rounds.

Bands are sent over the cluster's own connections, for which a plugin registers handlers on every
worker. The first message to a worker is a request that waits until this has started its part. Later
ones go over a plain socket where there is one (see `wire`), which takes less processor time: 1.6 s
for 60 cycles of 10304 × 400 counts, where requests take 2.6 s.
"""

import asyncio
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

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
from daskfactor.executors.store import (
    MAX_MESSAGE_BYTES,
    ArrayRequest,
    Carried,
    Key,
    StatePart,
    fetch_arrays,
    make_part,
    part_of,
    rows_of,
    size_of,
    unpack,
    writable,
)
from daskfactor.executors.threads import POLL, BandScheduler
from daskfactor.executors.wire import Wire
from daskfactor.kernels.steps import to_host
from daskfactor.machine import single_threaded_blas

PLUGIN = "daskfactor-bands"
MAX_THREADS = 256
"""Threads of one worker; an abandoned attempt may occupy some of them for a while."""
INLINE_BYTES = 2**18
"""Bytes below which the bands of a message are pickled together; larger ones are frames."""
RETRY_SECONDS = 0.01
"""Seconds until a message is sent again to a worker that has not started the attempt."""
REPORT_INTERVAL = 0.25
"""Seconds between progress reports of a worker."""


class BandMessage(NamedTuple):
    """Arrays of a band that are sent for a round.

    ``at`` is the key of the band, ``due`` the round, and ``names`` are the names of the arrays, ""
    for the values.
    """

    at: Band
    due: int
    names: tuple[str, ...]
    band: FactorBand

    @classmethod
    def from_band(cls, at: Band, due: int, part: FactorBand) -> "BandMessage":
        """Return the message with a part of a band."""
        names = (*(("",) if len(part.values) else ()), *part.arrays)
        return cls(at, due, names, part)


class RingWorkerPlugin(WorkerPlugin):
    """Worker plugin that sends and receives the bands of the attempts of one worker.

    ``pool`` has the threads of all attempts.
    """

    name = PLUGIN
    idempotent = True

    def setup(self, worker: Any) -> None:
        """Start the plugin on a worker."""
        self.worker = worker
        self.pool = ThreadPoolExecutor(MAX_THREADS, "daskfactor-ring")
        self._segments: dict[str, SegmentRun] = {}
        self._wire = Wire(worker, self._deliver, self._on_lost_worker)
        worker.handlers["daskfactor_ring"] = self.receive
        worker.handlers["daskfactor_get"] = self.send_arrays

    def teardown(self, worker: Any) -> None:
        """Stop the plugin when the worker closes, and abort its attempts."""
        for name in ("ring", "get"):
            worker.handlers.pop(f"daskfactor_{name}", None)
        for segment in list(self._segments.values()):
            segment.abort("the worker is closing")
        self._wire.close()
        self.pool.shutdown(wait=False)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Abort the attempt of a task that the scheduler cancels."""
        if finish in ("cancelled", "released", "forgotten") and start in ("executing", "cancelled"):
            for segment in list(self._segments.values()):
                if segment.dask_key == key:
                    segment.abort(GIVEN_UP)

    def open(self, segment: "SegmentRun") -> None:
        """Register an attempt, to which messages are delivered from now on."""
        self._segments[segment.task.run_id] = segment
        if not self._is_running(segment):
            segment.abort(GIVEN_UP)

    def close(self, segment: "SegmentRun") -> None:
        """Unregister an attempt, whose later messages are refused."""
        self._segments.pop(segment.task.run_id, None)

    def _is_running(self, segment: "SegmentRun") -> bool:
        """Return True if the client waits for the task of an attempt."""
        task = self.worker.state.tasks.get(segment.dask_key)
        return task is not None and task.state == "executing"

    # -- messages ------------------------------------------------------------

    def receive(self, run_id: str, messages: Any) -> bool:
        """Deliver messages; return False if their attempt is not open (a handler of the worker)."""
        segment = self._segments.get(run_id)
        if segment is None:
            return False
        for message in pickle.loads(messages) if isinstance(messages, bytes) else messages.bands:
            segment.receive(message)
        return True

    async def send_arrays(self, requests: bytes) -> dict[str, Any]:
        """Answer a request with as many arrays as fit a message (a handler of the worker)."""
        values, size = list[Any](), 0
        for key, part, rows in pickle.loads(requests):
            try:
                values.append(rows_of(part_of(self.worker, part).arrays[key], rows))
            except StateLost as error:
                return {"lost": str(error)}
            size += size_of(values[-1])
            if size > MAX_MESSAGE_BYTES:
                break
        loop = asyncio.get_running_loop()
        frames = await loop.run_in_executor(self.pool, _pickled, values)
        return {"bands": [Serialize(frame) for frame in frames]}  # type: ignore[no-untyped-call]

    def send(self, segment: "SegmentRun", address: str, message: BandMessage) -> None:
        """Send a message to another worker of an attempt without waiting, from any thread.

        The messages that wait while a request is on its way are sent together after it.
        """
        if address in segment.open_at and self._wire.carries(address):
            self._wire.send(address, (segment.task.run_id, message))
            return
        with segment.lock:
            is_idle = address not in segment.unsent
            segment.unsent.setdefault(address, []).append(message)
        if is_idle:
            self.worker.loop.add_callback(self._send_unsent, segment, address)

    def _deliver(self, message: tuple[str, BandMessage]) -> None:
        """Deliver a message that has come over a socket; drop it once its attempt is over."""
        segment = self._segments.get(message[0])
        if segment is not None:
            segment.receive(message[1])

    def _on_lost_worker(self, address: str, reason: str) -> None:
        """Abort the attempts that a lost worker takes part in."""
        for segment in list(self._segments.values()):
            if address in segment.task.addresses:
                segment.abort(reason)

    async def _send_unsent(self, segment: "SegmentRun", address: str) -> None:
        """Send the messages to a worker until there are no more, or nobody wants them.

        The first answer says that the attempt is open there. Later messages need none, which would
        double their cost.
        """
        send = partial(self.worker.rpc(address).daskfactor_ring, run_id=segment.task.run_id)
        try:
            while messages := segment.next_messages(address):
                frame = _frame(messages)
                if address in segment.open_at:
                    await send(messages=frame, reply=False)
                    continue
                while not await send(messages=frame):
                    if segment.scheduler.failure is not None or not self._is_running(segment):
                        return
                    await asyncio.sleep(RETRY_SECONDS)
                segment.open_at.add(address)
        except Exception as error:  # noqa: BLE001  # the client decides whether to repeat
            segment.abort(f"{address} cannot be reached: {type(error).__name__}: {error}")


def _pickled(values: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(value, protocol=5) for value in values]


GIVEN_UP = "the client has given this attempt up"


@dataclass
class Bands:
    """Messages whose arrays are frames of their own."""

    bands: list[BandMessage]


def _frame(messages: list[BandMessage]) -> Any:
    """Return messages as bytes, or with frames if they are large: each is cheaper for its size."""
    if sum(message.band.__sizeof__() for message in messages) < INLINE_BYTES:
        return pickle.dumps(messages, protocol=5)
    return Serialize(Bands(messages))  # type: ignore[no-untyped-call]


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

    def carried(self, address: str, replaced: Callable[[Key], bool]) -> Carried: ...


@dataclass
class SegmentTask:
    """Input of one worker's task in one attempt at a segment.

    ``owner`` is the rank of every row band's worker, ``addresses`` holds the addresses of the
    ranks, and ``transfers`` the moves of each moving factor. ``requests`` are the arrays that the
    worker starts with: its row bands and their monitored cells; those arrays of other bands that
    its operations are the first to need; and all constant arrays. ``carried`` are arrays
    that no operation changes, and ``version`` numbers the plan. ``ops`` are plain tuples, which are
    sent faster than named ones.
    """

    run_id: str
    rank: int
    threads: int
    owner: tuple[int, ...]
    addresses: tuple[str, ...]
    patience: float
    work: Work
    transfers: tuple[Transfers, ...]
    version: int = 0
    carried: Carried = field(default_factory=Carried)
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
        self._waiting: dict[tuple[Band, int], dict[tuple[str, ...], FactorBand]] = {}
        self._started_round: dict[Band, int] = {}
        self.unsent: dict[str, list[BandMessage]] = {}
        self.open_at: set[str] = set()
        self.lock = threading.Condition(threading.Lock())
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
            self.receive(BandMessage.from_band(at, due, part))

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
        """Add a part of a band; a second copy of a part is dropped."""
        at, due, names, band = message
        transfers = self._transfers(at)
        with self.lock:
            if due <= self._started_round.get(at, -1):
                return
            parts = self._waiting.setdefault((at, due), {})
            parts.setdefault(names, band)
            available = set(itertools.chain.from_iterable(parts))
        if due < len(transfers.row_of) and transfers.needed(due) <= available:
            self.scheduler.arrive(at, due)

    def next_messages(self, address: str) -> list[BandMessage]:
        """Return the messages to send to a worker next; without any the worker is idle again."""
        with self.lock:
            messages = self.unsent.pop(address)
            if messages:
                self.unsent[address] = []
            self.lock.notify_all()
            return messages

    def abort(self, reason: str) -> None:
        """Abort the segment."""
        self.scheduler.fail(SegmentLost(reason))

    def _collect(self, at: Band, due: int) -> FactorBand:
        """Return a band joined from the parts that arrived for a round."""
        with self.lock:
            self._started_round[at] = due
            parts = self._waiting.pop((at, due)).values()
        band = max(parts, key=lambda part: len(part.values))
        for part in parts:
            band.arrays.update(part.arrays)
        band.values = writable(band.values)
        band.arrays = {name: writable(array) for name, array in band.arrays.items()}
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
        with self.lock:
            self.portion.strip(op.block, number)
            done = {at: bands.pop(at) for at in moving_bands(op.block)}
        for at, band in done.items():
            for due, part in self._transfers(at).split(band, number):
                holder, message = self._holder(at, due), BandMessage.from_band(at, due, part)
                if holder == self.task.rank:
                    self.receive(message)
                else:
                    self._to_host([part])
                    self.plugin.send(self, self.task.addresses[holder], message)
        return evaluation, seconds

    def run(self) -> Portion:
        """Run all operations and send all bands; raise the first error, or SegmentLost."""
        with single_threaded_blas():
            pool, threads = self.plugin.pool, self.task.threads
            self.scheduler.run(pool, threads, self.operate, self._report_progress)
        with self.lock:
            while self.unsent and self.scheduler.failure is None:
                self.lock.wait(POLL)
        if self.scheduler.failure is not None:
            raise self.scheduler.failure
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
            self.task.work.report_progress(self.task.rank, done)


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
    run_id: str,
    report_progress: ProgressReporter,
    patience: float,
) -> list[SegmentTask]:
    """Return every worker's part of an attempt; ``shares`` holds the row bands of each address."""
    names = [state.names(factor) for factor in range(len(work.plan[0].ops[0].block))]
    transfers, touched = plan_transfers(work.plan, work.program, names)
    owner = tuple(rank for rank, count in enumerate(shares.values()) for _ in range(count))
    ops, task_work = ops_by_row(work.plan), work.for_tasks(report_progress)
    shared = owner, tuple(shares), patience, task_work, transfers
    tasks = [SegmentTask(run_id, rank, lanes, *shared) for rank, lanes in enumerate(threads)]
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
    changed = touched - transfers[0].constant
    for task, address in zip(tasks, shares, strict=True):
        task.carried = state.carried(address, partial(_is_replaced, changed))
    return tasks


def _is_replaced(changed: frozenset[str], key: Key) -> bool:
    """Return True if a segment that changes some arrays leaves another one in place of this."""
    return key.factor == CELLS or key.name == "" or key.name in changed


def run_segment(packed: NDArray[np.uint8]) -> StatePart:
    """Run one worker's part of one attempt; return the part of the state there (a task).

    The input is packed because an unpacked one could share its data with the caller.
    """
    task: SegmentTask = unpack(packed)
    worker = get_worker()
    plugin = cast("RingWorkerPlugin", worker.plugins[PLUGIN])
    task.work.report_progress(task.rank, 0)
    segment = SegmentRun(task, plugin, str(worker.get_current_task()))
    plugin.open(segment)
    try:
        has_failed = lambda: segment.scheduler.failure is not None  # noqa: E731
        segment.begin(fetch_arrays(task.requests, task.patience, has_failed))
        return make_part(task.version, segment.run(), task.carried)
    finally:
        plugin.close(segment)
