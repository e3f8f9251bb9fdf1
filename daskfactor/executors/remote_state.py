"""State of a chain whose bands stay on the workers of a cluster, and how the client changes it."""

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from daskfactor.data.grid import BlockAddress
from daskfactor.errors import EngineError
from daskfactor.executors.base import StateLost, WaitTimer, ignore
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
    MAX_MESSAGE_BYTES,
    ArrayRequest,
    CallJob,
    Carried,
    Key,
    PortionRequest,
    ReadJob,
    Shape,
    StatePart,
    WorkerReport,
    WriteJob,
    call_with_bands,
    read_arrays,
    read_bands,
    shape_of,
    writable,
    write_results,
)
from daskfactor.executors.tasks import input_key, super_block

if TYPE_CHECKING:
    from daskfactor.executors.cluster import ClusterExecutor
    from daskfactor.runs.files import Checkpoints, Late
    from daskfactor.runs.run_writer import Sink

START_SECONDS = 10.0
"""Seconds that a worker may take to accept data while it starts or ends."""


class PartRef(NamedTuple):
    """Future of a part on the worker with an address; Dask drops the part with its last future."""

    future: Any
    address: str


class ArrayRef(NamedTuple):
    """Reference to an array of a part."""

    key: Key
    part: PartRef

    @property
    def address(self) -> str:
        """Address of the worker that has the array."""
        return self.part.address

    def request(self, changes: bool = False) -> ArrayRequest:
        """Return a request for the array."""
        return ArrayRequest(self.key, self.part.future.key, self.address, changes)


class RemoteState(ChainState):
    """`ChainState` whose bands are in parts on workers.

    Attributes
    ----------
    state_client
        Client of the workers' parts.
    arrays
        References to the arrays of each band; ``""`` is the band with its values.
    monitored
        References to monitored cells.
    draws
        References to the draws of each band, by plan, position in it, and number there.
    shapes, counters, recorded_sums
        Shapes, counters, and recorded sums of each band.
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
        self.draws: dict[Band, dict[Any, ArrayRef]] = {}
        self.shapes: dict[Band, Shape] = {}
        self.counters: dict[Band, dict[str, int]] = {}
        self.recorded_sums: dict[Band, dict[Any, Any]] = {}
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
        """Yield the references to all arrays, draws and monitored cells."""
        for band_refs in (*self.arrays.values(), *self.draws.values()):
            yield from band_refs.values()
        yield from self.monitored.values()

    def copy(self) -> "RemoteState":
        """Return a state with the same parts, which are never changed."""
        copy = RemoteState(self.state_client)
        copy.arrays = {band: dict(refs) for band, refs in self.arrays.items()}
        copy.monitored, copy._cells = dict(self.monitored), self._cells
        copy.shapes, copy.counters = dict(self.shapes), dict(self.counters)
        copy.recorded_sums = {band: dict(values) for band, values in self.recorded_sums.items()}
        copy.draws = {band: dict(refs) for band, refs in self.draws.items()}
        copy.evaluations = list(self.evaluations)
        return copy

    def clear_records(self) -> None:
        """Drop the draws, sums and evaluations of the segment."""
        if self.draws:
            self.state_client.drop_draws(self)
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
                requests = [[ref.request() for ref in refs] for refs in bands]
                sources[kind] = self._spans(piece.factor), requests
            spans, requests = sources[kind]
            # On a permuted grid only the worker computes which bands have rows of the piece.
            candidates = requests[0]
            if piece.grid_rows is None:
                candidates = [request for request, *_ in piece.parts_of(spans, requests)]
            address = candidates[number % len(candidates)].address
            jobs.setdefault(address, []).append((piece, spans, requests))
        pieces_of = {address: {"pieces": job} for address, job in jobs.items()}
        self.state_client.write_results(checkpoints, pieces_of)

    def save(self, checkpoints: "Checkpoints", name: str) -> "Late":
        """Save all bands with the next checkpoint, from the workers if they can write there."""
        if not self.state_client.can_write(checkpoints):
            return super().save(checkpoints, name)
        requests: dict[str, dict[str, ArrayRequest]] = {}
        for key, ref in self._sources_by_name(name).items():
            requests.setdefault(ref.address, {})[key] = ref.request()
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
        return self._draws_of((factor, number))[draw]

    def _draws_of(self, band: Band) -> list[ArrayRef]:
        """Return the references to a band's draws in their order."""
        return [ref for _, ref in sorted(self.draws.get(band, {}).items())]

    def _fetch(
        self, sources: Sequence[ArrayRef], rows: Sequence[Any]
    ) -> Iterator[tuple[int, Array]]:
        sizes = [self.shapes.get(ref.key[:2], (0, 0, 0))[2] for ref in sources]
        return self.state_client.fetch(sources, rows, sizes)

    @property
    def cells(self) -> dict[BlockAddress, BlockCells]:
        """Monitored cells, fetched at the first access."""
        if self._cells is None:
            refs = list(self.monitored.values())
            values: dict[int, Any] = dict(self._fetch(refs, [None] * len(refs)))
            self._cells = {block: values[n] for n, block in enumerate(self.monitored)}
        return self._cells

    @cells.setter
    def cells(self, cells: Mapping[BlockAddress, BlockCells]) -> None:
        parts: dict[str, dict[Key, Any]] = {}
        for block, block_cells in cells.items():
            address = self.arrays[0, block[0]][""].address
            parts.setdefault(address, {})[Key(CELLS, block)] = block_cells
        self.monitored = {}
        for address, arrays in parts.items():
            part = self.state_client.send_part(address, arrays)
            self.monitored |= {key.number: ArrayRef(key, part) for key in arrays}
        self._cells = None

    def local(self) -> ChainState:
        """Return the state with all bands in this process."""
        refs = [ref for ref in self.refs() if ref.key.factor != CELLS]
        fetched = self._fetch(refs, [None] * len(refs))
        values: dict[Key, Any] = {refs[n].key: value for n, value in fetched}

        def local_band(band: Band) -> FactorBand:
            named: dict[str, Any] = {
                name: values[ref.key] for name, ref in self.arrays[band].items()
            }
            local: FactorBand = named.pop("")
            local.arrays, local.counts = named, dict(self.counters[band])
            local.draws = [values[ref.key] for ref in self._draws_of(band)]
            local.sums = dict(self.recorded_sums.get(band, {}))
            return local

        factors = [list(map(local_band, self.numbers(factor))) for factor in range(self.n_factors)]
        return ChainState(factors, dict(self.cells), list(self.evaluations))

    # -- results of segments ---------------------------------------------------------------

    def with_reports(self, reports: Iterable[tuple[WorkerReport, PartRef]]) -> "RemoteState":
        """Return the state after a segment, from the reports of its workers and their parts."""
        state, evaluations = self.copy(), list[Evaluation]()
        state._cells = None
        for report, part in reports:
            state.add_report(report, part)
            evaluations += report.evaluations
        state.add_evaluations(evaluations)
        return state

    def add_report(self, report: WorkerReport, part: PartRef) -> None:
        """Refer to the arrays of a new part."""
        for key in report.stored:
            ref, band = ArrayRef(key, part), key[:2]
            if key.factor == CELLS:
                self.monitored[key.number] = ref
            elif isinstance(key.name, tuple):
                self.draws.setdefault(band, {})[key.name] = ref
            else:
                self.arrays.setdefault(band, {})[key.name] = ref
        self.shapes.update(report.shapes)
        self.counters.update(report.counts)
        for at, sums in report.sums:
            self.recorded_sums.setdefault(at, {}).update(sums)

    def carried(self, address: str, replaced: Callable[[Key], bool]) -> Carried:
        """Return the arrays on a worker that its next part keeps: all that are not replaced."""
        carried = Carried()
        for ref in self.refs():
            if ref.address == address and not replaced(ref.key):
                carried.keys.setdefault(ref.part.future.key, []).append(ref.key)
        return carried

    @property
    def widest(self) -> int:
        """Approximate bytes of the largest row band, all arrays counted like its values."""
        return max(self.shapes[band][2] * len(self.arrays[band]) for band in self.numbers(0))

    def request(self, key: Key, changes: bool) -> ArrayRequest:
        """Return a worker's request for an array in a segment, which may change it or not."""
        if key.factor == CELLS:
            return self.monitored[key.number].request(changes)
        return self.arrays[key[:2]][key.name].request(changes)


def graph_sources(state: RemoteState, size: int) -> dict[Any, PortionRequest]:
    """Return the requests for the inputs of a graph, by the keys of `tasks.split_state`."""
    inputs: dict[Any, list[ArrayRef]] = {}
    for factor, number in state.numbers():
        refs = inputs.setdefault(input_key(factor, number // size), [])
        refs += state.arrays[factor, number].values()
    for block, ref in state.monitored.items():
        inputs.setdefault(input_key(CELLS, *super_block(block, size)), []).append(ref)
    return {key: state.state_client.portion_request(refs) for key, refs in inputs.items()}


class WorkerStateClient:
    """Client of the parts of states on the workers, for one executor."""

    def __init__(self, executor: "ClusterExecutor") -> None:
        self.executor, self.client = executor, executor.client
        self.versions = itertools.count()
        self._futures: WeakSet[Any] = WeakSet()

    def refer(self, future: Any, address: str) -> PartRef:
        """Return a reference to a part on a worker."""
        self._futures.add(future)
        return PartRef(future, address)

    def close(self) -> None:
        """Release all parts, also those of states that still exist."""
        for future in self._futures:
            with contextlib.suppress(Exception):  # the client may have been closed already
                future.release()

    def send_part(self, address: str, arrays: dict[Key, Any]) -> PartRef:
        """Send a part to a worker, for which Dask waits until the worker is not paused."""
        key, waited = f"state-{uuid.uuid4().hex}", WaitTimer()
        data, options = {key: StatePart(arrays)}, {"workers": [address], "hash": False}
        while True:
            try:
                return self.refer(self.client.scatter(data, timeout=1, **options)[key], address)
            except KeyError as error:
                raise StateLost(f"lost worker {address}") from error
            except TimeoutError:
                paused = self.executor.paused([address])
                if waited.seconds() > (self.executor.patience.start if paused else START_SECONDS):
                    self.executor.check_paused([address])
                    raise

    def fetch(
        self, refs: Sequence[ArrayRef], rows: Sequence[Any], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        """Yield rows of arrays with their positions in the list, a limited size at a time.

        ``sizes`` are the approximate bytes of the arrays.
        """
        jobs: dict[str, list[ArrayRequest]] = {}
        numbers: dict[str, list[int]] = {}
        size = 0
        for n, ref in enumerate(refs):
            jobs.setdefault(ref.address, []).append(ref.request()._replace(rows=rows[n]))
            numbers.setdefault(ref.address, []).append(n)
            size += sizes[n]
            if size > MAX_MESSAGE_BYTES or n == len(refs) - 1:
                for address, values in self.executor.call(read_arrays, jobs).items():
                    yield from zip(numbers[address], map(writable, values), strict=True)
                jobs, numbers, size = {}, {}, 0

    def portion_request(self, refs: Sequence[ArrayRef]) -> PortionRequest:
        """Return the request of a task for arrays, on the worker of the first one."""
        requests = [ref.request() for ref in refs]
        return PortionRequest(refs[0].address, self.executor.patience.stall, requests)

    # -- states ------------------------------------------------------------------------------------

    def distribute(
        self, band: Callable[[int, int], FactorBand], owners: Sequence[str], factors: int
    ) -> RemoteState:
        """Send the bands ``band(factor, number)`` to the workers that own their numbers."""
        state = RemoteState(self)
        for address in dict.fromkeys(owners):
            numbers = [number for number, owner in enumerate(owners) if owner == address]
            bands = {key: band(*key) for key in itertools.product(range(factors), numbers)}
            arrays: dict[Key, Any] = {}
            report = WorkerReport(address)
            for key, part in bands.items():
                report.shapes[key], report.counts[key] = shape_of(part), dict(part.counts)
                report.sums.append((key, dict(part.sums)))
                arrays[Key(*key)] = without_records(part, ())
                arrays |= {Key(*key, name): array for name, array in part.arrays.items()}
                arrays |= {Key(*key, (-1, 0, n)): draw for n, draw in enumerate(part.draws)}
            report.stored = list(arrays)
            state.add_report(report, self.send_part(address, arrays))
        return state

    def read(
        self, band: Callable[[int, int], FactorBand], owners: Sequence[str], factors: int
    ) -> RemoteState:
        """Return the state of bands that their owners read with ``band(factor, number)``."""
        state, jobs = RemoteState(self), dict[str, ReadJob]()
        for number, owner in enumerate(owners):
            jobs.setdefault(owner, ReadJob(band, factors)).numbers.append(number)
        for report, part in self.executor.make_parts("each-band", read_bands, jobs):
            state.add_report(report, part)
        return state

    def can_write(self, checkpoints: "Checkpoints") -> bool:
        """Check whether all workers can write to the store of a run."""
        return self.executor.can_write(checkpoints.shared, sorted(self.executor.members()))

    def write_results(
        self, checkpoints: "Checkpoints", jobs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make workers write results or checkpoint arrays, which the next checkpoint includes."""
        patience = self.executor.patience.stall
        write_jobs = {
            address: WriteJob(patience, checkpoints.writer(), **job)
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
        bands, patience = state.numbers(factor), self.executor.patience.stall
        called = set(bands)
        jobs: dict[str, CallJob] = {}
        numbers: dict[str, list[int]] = {}

        def is_called(key: Key) -> bool:
            return key[:2] in called and not isinstance(key.name, tuple)

        for number, (band, *items) in enumerate(zip(bands, *args, strict=True)):
            refs = sorted(state.arrays[band].items())  # the band itself first
            address = refs[0][1].address
            if address not in jobs:
                jobs[address] = CallJob(patience, function, [], state.carried(address, is_called))
            jobs[address].bands.append(([ref.request() for _, ref in refs], tuple(items)))
            numbers.setdefault(address, []).append(number)
        results: list[Any] = [None] * len(bands)
        parts = self.executor.make_parts("each-band", call_with_bands, jobs)
        for address, (report, part) in zip(jobs, parts, strict=True):
            for number, result in zip(numbers[address], report.results, strict=True):
                results[number] = result
                if report.stored:
                    state.arrays[bands[number]] = {}
            state.add_report(report, part)
        return results

    def drop_draws(self, state: RemoteState) -> None:
        """Drop all draws of a state, in place: parts without them take the place of its parts."""
        addresses = {ref.address for refs in state.draws.values() for ref in refs.values()}
        state.draws, patience = {}, self.executor.patience.stall
        jobs = {
            address: CallJob(patience, ignore, [], state.carried(address, lambda key: False))
            for address in sorted(addresses)
        }
        for outcome in self.executor.make_parts("drop-draws", call_with_bands, jobs):
            state.add_report(*outcome)
