"""State of a chain whose bands stay on the workers of a cluster, and the client of their stores."""

import contextlib
import itertools
import pickle
import threading
import uuid
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.protocol.serialize import Serialize

from daskfactor.data.grid import BlockAddress
from daskfactor.errors import EngineError
from daskfactor.executors.base import StateLost, WaitTimer
from daskfactor.executors.state import (
    CELLS,
    Array,
    Band,
    BlockCells,
    ChainState,
    Evaluation,
    FactorBand,
    Piece,
    without_records,
)
from daskfactor.executors.store import (
    ANCHOR_PREFIX,
    MAX_MESSAGE_BYTES,
    ArrayRequest,
    ArrayVersion,
    CallJob,
    Key,
    Mode,
    PortionRequest,
    ReadJob,
    Shape,
    WorkerReport,
    WriteJob,
    ask_for,
    call_with_bands,
    draw_name,
    read_bands,
    shape_of,
    write_results,
)
from daskfactor.executors.tasks import input_key, super_block

if TYPE_CHECKING:
    from daskfactor.executors.cluster import ClusterExecutor
    from daskfactor.results.files import Checkpoints, Late
    from daskfactor.results.run_writer import Sink

START_SECONDS = 10.0
"""Seconds that a worker may take to accept data while it starts or ends."""


class ArrayRef:
    """Reference to a version of an array on workers, which drop it when no state refers to it.

    ``shared`` is True if several states refer to the version, which must not be changed then.
    """

    __slots__ = ("addresses", "key", "queue", "shared", "version")

    def __init__(
        self, queue: "ReleaseQueue", key: Key, version: int, addresses: tuple[str, ...]
    ) -> None:
        self.queue, self.key, self.version, self.addresses = queue, key, version, addresses
        self.shared = False

    def __del__(self) -> None:
        self.queue.release(self.addresses, (self.key, self.version))

    @property
    def name(self) -> ArrayVersion:
        return self.key, self.version

    def request(self, mode: Mode) -> ArrayRequest:
        """Return a request for the version."""
        return ArrayRequest(self.key, self.version, self.addresses, mode)


class RecordedDraw(NamedTuple):
    """Reference to a draw; sorted by the version, position and number of its record."""

    version: int
    position: int
    number: int
    ref: ArrayRef


class RemoteState(ChainState):
    """`ChainState` whose bands are in the stores of workers.

    Attributes
    ----------
    state_client
        Client of the stores.
    arrays
        References to the arrays of each band; ``""`` is the band with its values.
    monitored
        References to monitored cells.
    shapes, counters, recorded_sums, draws
        Shapes, counters, recorded sums, and sorted references to draws of each band.
    """

    __slots__ = (
        "_cells",
        "arrays",
        "counters",
        "draws",
        "monitored",
        "recorded_sums",
        "shapes",
        "state_client",
    )

    def __init__(self, state_client: "WorkerStateClient") -> None:
        self.state_client = state_client
        self.arrays: dict[Band, dict[str, ArrayRef]] = {}
        self.monitored: dict[BlockAddress, ArrayRef] = {}
        self.shapes: dict[Band, Shape] = {}
        self.counters: dict[Band, dict[str, int]] = {}
        self.recorded_sums: dict[Band, dict[Any, Any]] = {}
        self.draws: dict[Band, list[RecordedDraw]] = {}
        self.evaluations = []
        self._cells: dict[BlockAddress, BlockCells] | None = None

    # -- metadata, which stays with the client -------------------------------------------

    @property
    def factors(self) -> list[list[FactorBand]]:  # type: ignore[override]
        """Raise EngineError: the bands are on the workers."""
        raise EngineError("bands of this state are in the workers; use each, gather or local")

    @property
    def n_factors(self) -> int:
        """Number of factors: two for a matrix."""
        return 1 + max(self.arrays)[0]

    @property
    def blocks(self) -> int:
        """Number of bands of each factor."""
        return 1 + max(self.arrays)[1]

    def numbers(self, factor: int | None = None) -> list[Band]:
        """Return the keys of the bands of one factor, or of all, rows first."""
        factors = range(self.n_factors) if factor is None else (factor,)
        return list(itertools.product(factors, range(self.blocks)))

    @property
    def counts(self) -> dict[str, int]:
        """Counters that are the same for all bands."""
        return dict(self.counters[0, 0])

    @property
    def recorded(self) -> int:
        """Number of draws recorded in the segment."""
        return len(self.draws.get((0, 0), ()))

    def sums(self, key: Any, factor: int | None = None) -> list[Any]:
        """Return the ``sums[key]`` of the bands of a factor, or of all."""
        return [self.recorded_sums[band][key] for band in self.numbers(factor)]

    def replace_with(self, after: ChainState) -> None:
        """Replace the content of this state, in place, by the state that a plan returned."""
        assert isinstance(after, RemoteState)
        for name in RemoteState.__slots__:
            setattr(self, name, getattr(after, name))
        self.evaluations = after.evaluations

    def refs(self) -> Iterator[ArrayRef]:
        """Yield the references to all arrays and monitored cells."""
        for refs in self.arrays.values():
            yield from refs.values()
        yield from self.monitored.values()

    def copy(self) -> "RemoteState":
        """Return a state with the same versions; a change of either creates a new version."""
        for ref in self.refs():
            ref.shared = True
        return self._shallow_copy()

    def _shallow_copy(self) -> "RemoteState":
        copy = RemoteState(self.state_client)
        copy.arrays = {band: dict(refs) for band, refs in self.arrays.items()}
        copy.monitored, copy._cells = dict(self.monitored), self._cells
        copy.shapes, copy.counters = dict(self.shapes), dict(self.counters)
        copy.recorded_sums = {band: dict(values) for band, values in self.recorded_sums.items()}
        copy.draws = {band: list(values) for band, values in self.draws.items()}
        copy.evaluations = list(self.evaluations)
        return copy

    def clear_records(self) -> None:
        """Drop the draws, sums and evaluations of the segment."""
        self.draws.clear()
        self.recorded_sums.clear()
        self.evaluations.clear()

    # -- access to bands ------------------------------------------------------------------

    def each(
        self, function: Callable[..., Any], factor: int | None = None, *args: Sequence[Any]
    ) -> list[Any]:
        """Call ``function(band, *items)`` on the worker of each band; see `ChainState.each`.

        Bands are passed without draws and sums of the segment.
        """
        return self.state_client.each(self, function, factor, args)

    def write(self, sink: "Sink", pieces: Iterable[Piece]) -> None:
        """Write pieces of factors to the results, from the workers if they can write there."""
        checkpoints = sink.checkpoints
        if checkpoints is None or not self.state_client.can_write(checkpoints):
            super().write(sink, pieces)
            return
        jobs: dict[str, list[Any]] = {}
        sources: dict[tuple[Any, ...], tuple[list[slice], list[list[ArrayRequest]]]] = {}
        for number, piece in enumerate(pieces):
            kind = piece.factor, piece.name, piece.draws
            if kind not in sources:
                bands = self._sources(piece)
                requests = [[ref.request(Mode.READ) for ref in refs] for refs in bands]
                sources[kind] = self._spans(piece.factor), requests
            spans, requests = sources[kind]
            # On a permuted grid only the worker computes which bands have rows of the piece.
            candidates = requests[0]
            if piece.grid_rows is None:
                candidates = [request for request, *_ in piece.parts_of(spans, requests)]
            address = candidates[number % len(candidates)].addresses[0]
            jobs.setdefault(address, []).append((piece, spans, requests))
        pieces_of = {address: {"pieces": job} for address, job in jobs.items()}
        self.state_client.write_results(checkpoints, pieces_of)

    def save(self, checkpoints: "Checkpoints", name: str) -> "Late":
        """Save all bands with the next checkpoint, from the workers if they can write there."""
        if not self.state_client.can_write(checkpoints):
            return super().save(checkpoints, name)
        requests: dict[str, dict[str, ArrayRequest]] = {}
        for key, ref in self._sources_by_name(name).items():
            requests.setdefault(ref.addresses[0], {})[key] = ref.request(Mode.READ)
        part = name.replace("/", "-")
        jobs = {
            address: {"name": f"{part}-{number}", "saved": saved}
            for number, (address, saved) in enumerate(sorted(requests.items()))
        }
        self.state_client.write_results(checkpoints, jobs)
        return {}

    def _spans(self, factor: int) -> list[slice]:
        shapes = (self.shapes[band] for band in self.numbers(factor))
        return [slice(offset, offset + length) for offset, length, _ in shapes]

    def _arrays(self, factor: int, number: int) -> Mapping[str, ArrayRef]:
        return self.arrays[factor, number]

    def _draw(self, factor: int, number: int, draw: int) -> ArrayRef:
        return self.draws[factor, number][draw].ref

    def _fetch(
        self, sources: Sequence[ArrayRef], rows: Sequence[Any]
    ) -> Iterator[tuple[int, Array]]:
        return self.state_client.fetch(sources, rows)

    @property
    def cells(self) -> dict[BlockAddress, BlockCells]:
        """Monitored cells, fetched at the first access."""
        if self._cells is None:
            values = dict(self.state_client.fetch(list(self.monitored.values())))
            self._cells = {block: values[n] for n, block in enumerate(self.monitored)}
        return self._cells

    @cells.setter
    def cells(self, cells: Mapping[BlockAddress, BlockCells]) -> None:
        values = [
            (Key(CELLS, block), block_cells, self.arrays[0, block[0]][""].addresses[0])
            for block, block_cells in cells.items()
        ]
        refs = self.state_client.put(values)
        self.monitored = {ref.key.number: ref for ref in refs}
        self._cells = None

    def local(self) -> ChainState:
        """Return the state with all bands in this process."""
        draws = {band: [draw.ref for draw in drawn] for band, drawn in self.draws.items()}
        refs = [ref for band_refs in self.arrays.values() for ref in band_refs.values()]
        refs += itertools.chain.from_iterable(draws.values())
        values = {refs[n]: value for n, value in self._fetch(refs, [slice(None)] * len(refs))}

        def local_band(band: Band) -> FactorBand:
            arrays = {name: values[ref] for name, ref in self.arrays[band].items()}
            return FactorBand(
                self.shapes[band][0],
                arrays.pop(""),
                arrays,
                dict(self.counters[band]),
                [values[ref] for ref in draws.get(band, ())],
                dict(self.recorded_sums.get(band, {})),
            )

        factors = [list(map(local_band, self.numbers(factor))) for factor in range(self.n_factors)]
        return ChainState(factors, dict(self.cells), list(self.evaluations))

    # -- results of segments ---------------------------------------------------------------

    def with_reports(self, reports: Iterable[WorkerReport], version: int) -> "RemoteState":
        """Return the state after a segment, from the reports of its workers."""
        state, evaluations = self._shallow_copy(), list[Evaluation]()
        for report in reports:
            state.add_report(report, version)
            evaluations += report.evaluations
        state.add_evaluations(evaluations)
        return state

    def add_report(self, report: WorkerReport, version: int) -> None:
        """Refer to the arrays that a worker has stored."""
        for key, replica_version in report.replicas:
            ref = self._ref(key)
            if ref is None or ref.version != replica_version:
                continue
            if report.address not in ref.addresses:
                ref.addresses += (report.address,)
        draws = {}
        for key in report.stored:
            ref = ArrayRef(self.state_client.release_queue, key, version, (report.address,))
            if key.factor == CELLS:
                self.monitored[key.number], self._cells = ref, None
            elif key.name.startswith("draw-"):
                draws[key] = ref
            else:
                self.arrays.setdefault(key[:2], {})[key.name] = ref
        self.shapes.update(report.shapes)
        self.counters.update(report.counts)
        for band, position, sums, count in report.records:
            self.recorded_sums.setdefault(band, {}).update(sums)
            band_draws = self.draws.setdefault(band, [])
            for number in range(count):
                ref = draws[Key(*band, draw_name(position, number))]
                insort(band_draws, RecordedDraw(version, position, number, ref))

    def _ref(self, key: Key) -> ArrayRef | None:
        if key.factor == CELLS:
            return self.monitored.get(key.number)
        return self.arrays[key[:2]].get(key.name)

    @property
    def widest(self) -> int:
        """Approximate bytes of the largest row band, all arrays counted like its values."""
        return max(self.shapes[band][2] * len(self.arrays[band]) for band in self.numbers(0))

    def request(self, key: Key, changes: bool) -> ArrayRequest:
        """Return a worker's request for an array in a segment, which may change it or not."""
        ref = self._ref(key)
        assert ref is not None
        if not changes:
            return ref.request(Mode.READ)
        return ref.request(Mode.COPY if ref.shared else Mode.TAKE)


def graph_sources(state: RemoteState, size: int) -> dict[Any, PortionRequest]:
    """Return the requests for the inputs of a graph, by the keys of `tasks.split_state`."""
    inputs: dict[Any, list[ArrayRef]] = {}
    for factor, number in state.numbers():
        refs = inputs.setdefault(input_key(factor, number // size), [])
        refs += state.arrays[factor, number].values()
    for block, ref in state.monitored.items():
        inputs.setdefault(input_key(CELLS, *super_block(block, size)), []).append(ref)
    return {key: state.state_client.portion_request(refs) for key, refs in inputs.items()}


class ReleaseQueue:
    """Queue of unreferenced versions that the stores of workers are still to drop."""

    def __init__(self) -> None:
        self.pending: deque[tuple[tuple[str, ...], ArrayVersion]] = deque()
        self.on_release: Callable[[], None] | None = None

    def release(self, addresses: tuple[str, ...], name: ArrayVersion) -> None:
        """Add a version to the queue, from any thread."""
        if self.on_release is not None and addresses:
            self.pending.append((addresses, name))
            self.on_release()


class WorkerStateClient:
    """Client of the stores of band arrays on the workers, for one executor."""

    def __init__(self, executor: "ClusterExecutor") -> None:
        self.executor, self.client = executor, executor.client
        self.token, self.release_queue = uuid.uuid4().hex, ReleaseQueue()
        self.versions = itertools.count()
        self._anchors: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._direct: bool | None = None
        self._dropping = threading.Event()

    def next_version(self) -> int:
        """Return a new version number."""
        return next(self.versions)

    # -- workers -------------------------------------------------------------------------------

    def anchor(self, addresses: Iterable[str], renew: bool = False) -> None:
        """Scatter a key to each worker, which stores bands as long as it has the key.

        ``renew`` scatters all keys again: after a loss the scheduler may have lost them.
        """
        self.release_queue.on_release = self._schedule_drop
        before, self._anchors = self._anchors, {}
        for address in sorted(addresses):
            if address in before and not renew:
                self._anchors[address] = before.pop(address)
                continue
            self._anchors[address] = self._anchored(address)
        _release(before.values())

    def _anchored(self, address: str) -> Any:
        """Scatter a key to a worker, for which Dask waits until the worker is not paused."""
        key, waited = f"{ANCHOR_PREFIX}{self.token}-{next(self._numbers)}", WaitTimer()
        while True:
            try:
                return self.client.scatter({key: b""}, workers=[address], hash=False, timeout=1)[
                    key
                ]
            except KeyError as error:
                raise StateLost(f"lost worker {address}") from error
            except TimeoutError:
                paused = self.executor.paused([address])
                if waited.seconds() > (self.executor.patience.start if paused else START_SECONDS):
                    self.executor.check_paused([address])
                    raise

    def close(self) -> None:
        """Release all bands on all workers."""
        self.release_queue.on_release = None
        self.release_queue.pending.clear()
        _release(self._anchors.values())
        self._anchors.clear()

    # -- messages --------------------------------------------------------------------------------

    async def _ask(self, address: str, op: str, **message: Any) -> Any:
        """Send a message to a worker's store, through the scheduler if it cannot be reached."""
        if address not in self._anchors:
            raise StateLost(f"lost worker {address}")
        if self._direct is not False:
            try:
                answer = await getattr(self.client.rpc(address), op)(token=self.token, **message)
            except OSError:
                if self._direct:
                    raise
                self._direct = False
            else:
                self._direct = True
                return answer
        message = {"op": op, "token": self.token, **message}
        options = {"workers": [address], "on_error": "ignore"}
        answers = await self.client.scheduler.broadcast(msg=message, **options)
        if address not in answers:
            raise StateLost(f"worker {address} does not answer")
        return answers[address]

    def _schedule_drop(self) -> None:
        """Schedule the messages that make stores drop the queued versions."""
        if not self._dropping.is_set() and self.client.status == "running":
            self._dropping.set()
            self.client.loop.add_callback(self._drop)

    async def _drop(self) -> None:
        self._dropping.clear()
        names: dict[str, list[ArrayVersion]] = {}
        while self.release_queue.pending:
            addresses, name = self.release_queue.pending.popleft()
            for address in addresses:
                names.setdefault(address, []).append(name)
        for address, versions in names.items():
            with contextlib.suppress(OSError, StateLost):  # a worker that has gone has none
                await self._ask(address, "daskfactor_drop", names=pickle.dumps(versions))

    def put(self, values: Iterable[tuple[Key, Any, str]]) -> list[ArrayRef]:
        """Send arrays to the workers of their addresses, in messages of limited size."""
        version, refs = next(self.versions), []
        pending: dict[str, list[tuple[Key, bytes]]] = {}

        async def send(address: str) -> None:
            batch = pending.pop(address)
            names = pickle.dumps([(key, version) for key, _ in batch])
            bands = [Serialize(raw) for _, raw in batch]  # type: ignore[no-untyped-call]
            error = await self._ask(address, "daskfactor_put", names=names, bands=bands)
            if error != "":
                raise StateLost(error or f"worker {address} has come back without bands")

        def flush(min_bytes: int) -> None:
            sizes = {a: sum(len(raw) for _, raw in batch) for a, batch in pending.items()}
            full = [address for address, size in sizes.items() if size >= min_bytes]
            self.executor.wait_for(send, full)

        for key, value, address in values:
            pending.setdefault(address, []).append((key, pickle.dumps(value, protocol=5)))
            refs.append(ArrayRef(self.release_queue, key, version, (address,)))
            flush(MAX_MESSAGE_BYTES)
        flush(0)
        return refs

    def fetch(
        self, refs: Sequence[ArrayRef], rows: Sequence[Any] = ()
    ) -> Iterator[tuple[int, Any]]:
        """Yield arrays with their positions in the list, fetched in messages of limited size.

        ``rows`` are the rows of each array; all rows by default.
        """
        remaining: dict[str, list[int]] = {}
        for number, ref in enumerate(refs):
            remaining.setdefault(ref.addresses[0], []).append(number)

        async def ask(address: str) -> list[Any]:
            names = [(refs[n].name, rows[n] if rows else None) for n in remaining[address]]

            async def get(**message: Any) -> Any:
                message.pop("token")
                return await self._ask(address, "daskfactor_get", **message)

            return await ask_for(get, self.token, names)

        while remaining:
            addresses = list(remaining)
            answers = self.executor.wait_for(ask, addresses)
            for address, frames in zip(addresses, answers, strict=True):
                for number, raw in zip(remaining[address], frames, strict=False):
                    yield number, pickle.loads(raw)
                del remaining[address][: len(frames)]
                if not remaining[address]:
                    del remaining[address]

    def portion_request(self, refs: Sequence[ArrayRef]) -> PortionRequest:
        """Return the request of a task for arrays, on the worker of the first one."""
        address = refs[0].addresses[0]
        requests = [
            ref.request(Mode.READ if address in ref.addresses else Mode.COPY) for ref in refs
        ]
        return PortionRequest(self.token, address, self.executor.patience.stall, requests)

    # -- states ------------------------------------------------------------------------------------

    def distribute(self, bands: Iterable[FactorBand], owners: Sequence[str]) -> RemoteState:
        """Send bands, rows first, to the workers that own their numbers.

        ``bands`` is consumed while they are sent.
        """
        state, version = RemoteState(self), -1

        def values() -> Iterator[tuple[Key, Any, str]]:
            for position, band in enumerate(bands):
                key = divmod(position, len(owners))
                owner = owners[key[1]]
                state.shapes[key] = shape_of(band)
                state.counters[key] = dict(band.counts)
                state.recorded_sums[key] = dict(band.sums)
                yield Key(*key), without_records(band, ()), owner
                for name, array in band.arrays.items():
                    yield Key(*key, name), array, owner
                for n, draw in enumerate(band.draws):
                    yield Key(*key, draw_name(0, n)), draw, owner

        for ref in self.put(values()):
            band = ref.key[:2]
            if ref.key.name.startswith("draw-"):
                draws = state.draws.setdefault(band, [])
                draws.append(RecordedDraw(version, 0, len(draws), ref))
            else:
                state.arrays.setdefault(band, {})[ref.key.name] = ref
        return state

    def read(
        self, band: Callable[[int, int], FactorBand], owners: Sequence[str], factors: int
    ) -> RemoteState:
        """Return the state of bands that their owners read with ``band(factor, number)``."""
        state, version, jobs = RemoteState(self), self.next_version(), dict[str, ReadJob]()
        for number, owner in enumerate(owners):
            job = jobs.setdefault(owner, ReadJob(self.token, version, band, factors))
            job.numbers.append(number)
        for report in self.executor.call(read_bands, jobs).values():
            state.add_report(report, version)
        return state

    def can_write(self, checkpoints: "Checkpoints") -> bool:
        """Check whether all workers with bands can write to the store of a run."""
        return self.executor.can_write(checkpoints.shared, sorted(self._anchors))

    def write_results(
        self, checkpoints: "Checkpoints", jobs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make workers write results or checkpoint arrays, which the next checkpoint includes."""
        patience = self.executor.patience.stall
        write_jobs = {
            address: WriteJob(self.token, patience, checkpoints.writer(), **job)
            for address, job in jobs.items()
        }
        checkpoints.add_parts(list(self.executor.call(write_results, write_jobs).values()))

    def each(
        self,
        state: RemoteState,
        function: Callable[..., Any],
        factor: int | None,
        args: Sequence[Sequence[Any]],
    ) -> list[Any]:
        """Call a function with bands on their workers; see `RemoteState.each`."""
        bands, version = state.numbers(factor), next(self.versions)
        numbers: dict[str, list[int]] = {}
        calls: dict[str, list[tuple[list[ArrayRequest], tuple[Any, ...]]]] = {}
        for number, (band, *items) in enumerate(zip(bands, *args, strict=True)):
            refs = state.arrays[band]
            address = refs[""].addresses[0]
            modes = (
                Mode.READ if ref.shared or ref.addresses != (address,) else Mode.TAKE
                for ref in refs.values()
            )
            requests = [ref.request(mode) for ref, mode in zip(refs.values(), modes, strict=True)]
            requests.sort(key=lambda request: request.key.name)  # the band itself first
            numbers.setdefault(address, []).append(number)
            calls.setdefault(address, []).append((requests, tuple(items)))
        patience = self.executor.patience.stall
        jobs = {
            address: CallJob(self.token, uuid.uuid4().hex, version, patience, function, band_calls)
            for address, band_calls in calls.items()
        }
        answers = self.executor.call(call_with_bands, jobs)
        results = [None] * len(bands)
        for address, call_results in answers.items():
            for number, call in zip(numbers[address], call_results, strict=True):
                state.add_report(call.report, version)
                refs = state.arrays[bands[number]]
                for name in set(refs) - set(call.names):
                    del refs[name]
                results[number] = call.result
        return results


def _release(futures: Iterable[Any]) -> None:
    for future in futures:
        with contextlib.suppress(Exception):  # the client may have been closed already
            future.release()
