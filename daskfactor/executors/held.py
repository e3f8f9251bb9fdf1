"""A chain's state whose bands stay in the workers of a cluster; the client knows where they are."""

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
from daskfactor.executors.base import StateLost, Waited
from daskfactor.executors.state import (
    CELLS,
    Array,
    Band,
    BlockCells,
    ChainState,
    Evaluation,
    FactorBand,
    Piece,
    bare,
)
from daskfactor.executors.store import (
    HOLD,
    MESSAGE,
    Calls,
    Deliveries,
    Key,
    Mode,
    Name,
    Reading,
    Report,
    Shape,
    Start,
    Want,
    ask_for,
    call_each,
    deliver,
    draw_name,
    read_bands,
    shape_of,
)
from daskfactor.executors.tasks import start_of, super_block

if TYPE_CHECKING:
    from daskfactor.executors.cluster import ClusterExecutor
    from daskfactor.results.files import Checkpoints, Late
    from daskfactor.results.run_writer import Sink

NOT_READY = 10.0
"""Seconds for a worker that begins or ends to be there or gone."""


class Ref:
    """A version of an array, and where it is; dropped there when no state has it any more.

    ``shared``: several states have it, so that nobody may change it.
    """

    __slots__ = ("bin", "key", "places", "shared", "version")

    def __init__(self, bin: "Bin", key: Key, version: int, places: tuple[str, ...]) -> None:  # noqa: A002
        self.bin, self.key, self.version, self.places = bin, key, version, places
        self.shared = False

    def __del__(self) -> None:
        self.bin.throw(self.places, (self.key, self.version))

    @property
    def name(self) -> Name:
        return self.key, self.version

    def want(self, mode: Mode) -> Want:
        """Say that a worker needs it."""
        return Want(self.key, self.version, self.places, mode)


class Drawn(NamedTuple):
    """Where a draw is, and when it was recorded: a version, a position along the plan."""

    version: int
    position: int
    number: int
    ref: Ref


class HeldState(ChainState):
    """A `ChainState` whose bands are in the workers' stores.

    Attributes
    ----------
    keeper
        Who talks to the stores.
    arrays
        By band, versions of its arrays; ``""`` is the band with its values.
    monitored
        Versions of monitored cells.
    shapes, counters, recorded_sums, draws
        Small things of bands: shapes, counters, recorded sums, where draws are, in their order.
    """

    __slots__ = (
        "_cells", "arrays", "counters", "draws", "keeper", "monitored", "recorded_sums", "shapes",
    )  # fmt: skip

    def __init__(self, keeper: "Keeper") -> None:
        self.keeper = keeper
        self.arrays: dict[Band, dict[str, Ref]] = {}
        self.monitored: dict[BlockAddress, Ref] = {}
        self.shapes: dict[Band, Shape] = {}
        self.counters: dict[Band, dict[str, int]] = {}
        self.recorded_sums: dict[Band, dict[Any, Any]] = {}
        self.draws: dict[Band, list[Drawn]] = {}
        self.evaluations = []
        self._cells: dict[BlockAddress, BlockCells] | None = None

    # -- what a local state has at hand --------------------------------------------------

    @property
    def factors(self) -> list[list[FactorBand]]:  # type: ignore[override]
        """Refuse: the bands are elsewhere."""
        raise EngineError("bands of this state are in the workers; use each, gather or local")

    @property
    def n_factors(self) -> int:
        """Two for a matrix."""
        return 1 + max(self.arrays)[0]

    @property
    def blocks(self) -> int:
        """Bands of each factor."""
        return 1 + max(self.arrays)[1]

    def numbers(self, factor: int | None = None) -> list[Band]:
        """Return the bands of one factor or of all, rows first."""
        factors = range(self.n_factors) if factor is None else (factor,)
        return list(itertools.product(factors, range(self.blocks)))

    @property
    def counts(self) -> dict[str, int]:
        """Counters that all bands have in common."""
        return dict(self.counters[0, 0])

    @property
    def recorded(self) -> int:
        """Draws of the running segment that have been recorded."""
        return len(self.draws.get((0, 0), ()))

    def sums(self, key: Any, factor: int | None = None) -> list[Any]:
        """Return what the bands of a factor, or all, recorded under a key of their ``sums``."""
        return [self.recorded_sums[band][key] for band in self.numbers(factor)]

    def become(self, after: ChainState) -> None:
        """Take over what a plan has left of this state, whoever else refers to it."""
        assert isinstance(after, HeldState)
        for name in HeldState.__slots__:
            setattr(self, name, getattr(after, name))
        self.evaluations = after.evaluations

    def refs(self) -> Iterator[Ref]:
        """Return the versions of all bands and monitored cells."""
        for own in self.arrays.values():
            yield from own.values()
        yield from self.monitored.values()

    def copy(self) -> "HeldState":
        """Return a state with the same versions; whoever changes one leaves a new version."""
        for ref in self.refs():
            ref.shared = True
        return self._twin()

    def _twin(self) -> "HeldState":
        other = HeldState(self.keeper)
        other.arrays = {band: dict(refs) for band, refs in self.arrays.items()}
        other.monitored, other._cells = dict(self.monitored), self._cells
        other.shapes, other.counters = dict(self.shapes), dict(self.counters)
        other.recorded_sums = {band: dict(own) for band, own in self.recorded_sums.items()}
        other.draws = {band: list(own) for band, own in self.draws.items()}
        other.evaluations = list(self.evaluations)
        return other

    def forget(self) -> None:
        """Drop what the running segment recorded, once it has been read."""
        self.draws.clear()
        self.recorded_sums.clear()
        self.evaluations.clear()

    # -- what goes to bands, or brings them ------------------------------------------------

    def each(
        self, function: Callable[..., Any], factor: int | None = None, *given: Sequence[Any]
    ) -> list[Any]:
        """Call ``function(band, *own)`` for bands where they are; see `ChainState.each`.

        A band comes without what it recorded in the running segment.
        """
        return self.keeper.each(self, function, factor, given)

    def write(self, sink: "Sink", pieces: Iterable[Piece]) -> None:
        """Write pieces of factors into the results, from the workers where these can."""
        kept = sink.checkpoints
        if kept is None or not self.keeper.reaches(kept):
            super().write(sink, pieces)
            return
        work: dict[str, list[Any]] = {}
        told: dict[tuple[Any, ...], tuple[list[slice], list[list[Want]]]] = {}
        for number, piece in enumerate(pieces):
            kind = piece.factor, piece.name, piece.draws
            if kind not in told:
                wants = [[ref.want(Mode.READ) for ref in own] for own in self._sources(piece)]
                told[kind] = self._spans(piece.factor), wants
            spans, wants = told[kind]
            # Which rows a worker finds out where the grid has an order of its own.
            among = wants[0] if piece.places else [own for own, *_ in piece.at(spans, wants)]
            home = among[number % len(among)].places[0]
            work.setdefault(home, []).append((piece, spans, wants))
        self.keeper.deliver(kept, {address: {"pieces": own} for address, own in work.items()})

    def save(self, kept: "Checkpoints", name: str) -> "Late":
        """Save all bands with the next checkpoint, from the workers where these can."""
        if not self.keeper.reaches(kept):
            return super().save(kept, name)
        work: dict[str, dict[str, Want]] = {}
        for own, ref in self._named(name).items():
            work.setdefault(ref.places[0], {})[own] = ref.want(Mode.READ)
        part = name.replace("/", "-")
        jobs = {
            address: {"name": f"{part}-{number}", "saved": own}
            for number, (address, own) in enumerate(sorted(work.items()))
        }
        self.keeper.deliver(kept, jobs)
        return {}

    def _spans(self, factor: int) -> list[slice]:
        shapes = (self.shapes[band] for band in self.numbers(factor))
        return [slice(offset, offset + length) for offset, length, _ in shapes]

    def _arrays(self, factor: int, number: int) -> Mapping[str, Ref]:
        return self.arrays[factor, number]

    def _draw(self, factor: int, number: int, draw: int) -> Ref:
        return self.draws[factor, number][draw].ref

    def _bring(self, sources: Sequence[Ref], rows: Sequence[Any]) -> Iterator[tuple[int, Array]]:
        return self.keeper.bring(sources, rows)

    @property
    def cells(self) -> dict[BlockAddress, BlockCells]:
        """Monitored cells, which come to the caller when they are asked for."""
        if self._cells is None:
            found = dict(self.keeper.bring(list(self.monitored.values())))
            self._cells = {block: found[n] for n, block in enumerate(self.monitored)}
        return self._cells

    @cells.setter
    def cells(self, cells: Mapping[BlockAddress, BlockCells]) -> None:
        places = {block: self.arrays[0, block[0]][""].places[0] for block in cells}
        values = {Key(CELLS, block): own for block, own in cells.items()}
        refs = self.keeper.put((key, value, places[key.number]) for key, value in values.items())
        self.monitored = {ref.key.number: ref for ref in refs}
        self._cells = None

    def local(self) -> ChainState:
        """Bring all of it to the caller's process."""
        draws = {band: [drawn.ref for drawn in own] for band, own in self.draws.items()}
        refs = [ref for own in self.arrays.values() for ref in own.values()]
        refs += itertools.chain.from_iterable(draws.values())
        found = {refs[n]: own for n, own in self._bring(refs, [slice(None)] * len(refs))}

        def here(band: Band) -> FactorBand:
            own = {name: found[ref] for name, ref in self.arrays[band].items()}
            recorded = [found[ref] for ref in draws.get(band, ())]
            told = dict(self.counters[band]), recorded, dict(self.recorded_sums.get(band, {}))
            return FactorBand(self.shapes[band][0], own.pop(""), own, *told)

        factors = [list(map(here, self.numbers(factor))) for factor in range(self.n_factors)]
        return ChainState(factors, dict(self.cells), list(self.evaluations))

    # -- what segments leave ---------------------------------------------------------------

    def after(self, reports: Iterable[Report], version: int) -> "HeldState":
        """Return the state with what workers have left of a segment in place of what it was."""
        found, evaluations = self._twin(), list[Evaluation]()
        for report in reports:
            found.take_in(report, version)
            evaluations += report.evaluations
        found.settle(evaluations)
        return found

    def take_in(self, report: Report, version: int) -> None:
        """Note what a worker has left in its store."""
        for (key, old), place in zip(report.replicas, itertools.repeat(report.address)):
            ref = self._ref(key)
            if ref is not None and ref.version == old and place not in ref.places:
                ref.places += (place,)
        draws = {}
        for key in report.left:
            ref = Ref(self.keeper.bin, key, version, (report.address,))
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
            own = self.draws.setdefault(band, [])
            for number in range(count):
                ref = draws[Key(*band, draw_name(position, number))]
                insort(own, Drawn(version, position, number, ref))

    def _ref(self, key: Key) -> Ref | None:
        if key.factor == CELLS:
            return self.monitored.get(key.number)
        return self.arrays[key[:2]].get(key.name)

    def places(self) -> tuple[str, ...]:
        """Return the addresses of the workers that the state would be lost with."""
        return tuple({ref.places[0] for ref in self.refs()})

    @property
    def widest(self) -> int:
        """Bytes of the largest row band, about: arrays have about the bytes of values."""
        return max(self.shapes[band][2] * len(self.arrays[band]) for band in self.numbers(0))

    def want(self, key: Key, changes: bool) -> Want:
        """Say that a worker needs an array for a segment; what changes must not be shared."""
        ref = self._ref(key)
        assert ref is not None
        if not changes:
            return ref.want(Mode.READ)
        return ref.want(Mode.COPY if ref.shared else Mode.TAKE)


def starting_points(state: HeldState, size: int) -> dict[Any, Start]:
    """Say where a graph takes its bands from, by the keys of `tasks.split_state`."""
    found: dict[Any, list[Ref]] = {}
    for factor, number in state.numbers():
        own = found.setdefault(start_of(factor, number // size), [])
        own += state.arrays[factor, number].values()
    for block, ref in state.monitored.items():
        found.setdefault(start_of(CELLS, *super_block(block, size)), []).append(ref)
    return {key: state.keeper.start(refs) for key, refs in found.items()}


class Bin:
    """Versions that no state has any more, until their stores are told."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[tuple[str, ...], Name]] = deque()
        self.told: Callable[[], None] | None = None

    def throw(self, places: tuple[str, ...], name: Name) -> None:
        """Take a version in, from any thread."""
        if self.told is not None and places:
            self.waiting.append((places, name))
            self.told()


class Keeper:
    """Talks to the stores of the workers for one executor."""

    def __init__(self, executor: "ClusterExecutor") -> None:
        self.executor, self.client = executor, executor.client
        self.token, self.bin = uuid.uuid4().hex, Bin()
        self.versions = itertools.count()
        self._anchors: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._direct: bool | None = None
        self._dropping = threading.Event()

    def next_version(self) -> int:
        """Return a number that no version had before."""
        return next(self.versions)

    # -- workers -------------------------------------------------------------------------------

    def anchor(self, addresses: Iterable[str], anew: bool = False) -> None:
        """Have workers keep bands for as long as the client is there and wants them.

        ``anew``: after a loss the scheduler may have forgotten what the client has.
        """
        self.bin.told = self._tell_bin
        before, self._anchors = self._anchors, {}
        for address in sorted(addresses):
            if address in before and not anew:
                self._anchors[address] = before.pop(address)
                continue
            self._anchors[address] = self._anchored(address)
        _release(before.values())

    def _anchored(self, address: str) -> Any:
        """Put a key of the client's on a worker, which Dask does only once it is not paused."""
        key, waited = f"{HOLD}{self.token}-{next(self._numbers)}", Waited()
        while True:
            try:
                return self.client.scatter({key: b""}, workers=[address], hash=False, timeout=1)[
                    key
                ]
            except KeyError as error:
                raise StateLost(f"lost worker {address}") from error
            except TimeoutError:
                paused = self.executor.paused([address])
                if waited.seconds() > (self.executor.patience.start if paused else NOT_READY):
                    self.executor.check_paused([address])
                    raise

    def close(self) -> None:
        """Have all workers drop all bands."""
        self.bin.told = None
        self.bin.waiting.clear()
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

    def _tell_bin(self) -> None:
        """Have stores told soon of what they may drop."""
        if not self._dropping.is_set() and self.client.status == "running":
            self._dropping.set()
            self.client.loop.add_callback(self._drop)

    async def _drop(self) -> None:
        self._dropping.clear()
        names: dict[str, list[Name]] = {}
        while self.bin.waiting:
            places, name = self.bin.waiting.popleft()
            for place in places:
                names.setdefault(place, []).append(name)
        for address, own in names.items():
            with contextlib.suppress(OSError, StateLost):  # a worker that has gone has none
                await self._ask(address, "daskfactor_drop", names=pickle.dumps(own))

    def put(self, values: Iterable[tuple[Key, Any, str]]) -> list[Ref]:
        """Send arrays to workers, each with the address it goes to; some of them at a time."""
        version, refs = next(self.versions), []
        waiting: dict[str, list[tuple[Key, bytes]]] = {}

        async def send(address: str) -> None:
            own = waiting.pop(address)
            names = pickle.dumps([(key, version) for key, _ in own])
            bands = [Serialize(raw) for _, raw in own]  # type: ignore[no-untyped-call]
            error = await self._ask(address, "daskfactor_put", names=names, bands=bands)
            if error != "":
                raise StateLost(error or f"worker {address} has come back without bands")

        def flush(least: int) -> None:
            full = [a for a, own in waiting.items() if sum(len(raw) for _, raw in own) >= least]
            self.executor.wait_for(send, full)

        for key, value, address in values:
            waiting.setdefault(address, []).append((key, pickle.dumps(value, protocol=5)))
            refs.append(Ref(self.bin, key, version, (address,)))
            flush(MESSAGE)
        flush(0)
        return refs

    def bring(self, refs: Sequence[Ref], rows: Sequence[Any] = ()) -> Iterator[tuple[int, Any]]:
        """Bring arrays here, with their places in the list; some of each worker at a time.

        ``rows`` are those that are wanted of each; all, if none are given.
        """
        left: dict[str, list[int]] = {}
        for number, ref in enumerate(refs):
            left.setdefault(ref.places[0], []).append(number)

        async def ask(address: str) -> list[Any]:
            names = [(refs[n].name, rows[n] if rows else None) for n in left[address]]

            async def get(**message: Any) -> Any:
                message.pop("token")
                return await self._ask(address, "daskfactor_get", **message)

            return await ask_for(get, self.token, names)

        while left:
            addresses = list(left)
            answers = self.executor.wait_for(ask, addresses)
            for address, found in zip(addresses, answers, strict=True):
                for number, raw in zip(left[address], found, strict=False):
                    yield number, pickle.loads(raw)
                del left[address][: len(found)]
                if not left[address]:
                    del left[address]

    def start(self, refs: Sequence[Ref]) -> Start:
        """Say where a task is to read arrays, and from whom it gets those that are elsewhere."""
        home = refs[0].places[0]
        wants = [ref.want(Mode.READ if home in ref.places else Mode.COPY) for ref in refs]
        return Start(self.token, home, self.executor.patience.stall, wants)

    # -- states ------------------------------------------------------------------------------------

    def hold(self, bands: Iterable[FactorBand], owners: Sequence[str]) -> HeldState:
        """Send bands to workers, rows first and every factor's to ``owners`` of their numbers.

        They are asked for one after another, as they are sent.
        """
        held, version = HeldState(self), -1

        def values() -> Iterator[tuple[Key, Any, str]]:
            for place, band in enumerate(bands):
                at = divmod(place, len(owners))
                owner = owners[at[1]]
                held.shapes[at] = shape_of(band)
                held.counters[at] = dict(band.counts)
                held.recorded_sums[at] = dict(band.sums)
                yield Key(*at), bare(band, ()), owner
                for name, array in band.arrays.items():
                    yield Key(*at, name), array, owner
                for n, draw in enumerate(band.draws):
                    yield Key(*at, draw_name(0, n)), draw, owner

        for ref in self.put(values()):
            band = ref.key[:2]
            if ref.key.name.startswith("draw-"):
                own = held.draws.setdefault(band, [])
                own.append(Drawn(version, 0, len(own), ref))
            else:
                held.arrays.setdefault(band, {})[ref.key.name] = ref
        return held

    def read(
        self, band: Callable[[int, int], FactorBand], owners: Sequence[str], factors: int
    ) -> HeldState:
        """Have workers read bands; ``band(factor, number)`` gives each of them to its owner."""
        held, version, jobs = HeldState(self), self.next_version(), dict[str, Reading]()
        for number, owner in enumerate(owners):
            job = jobs.setdefault(owner, Reading(self.token, version, band, factors))
            job.numbers.append(number)
        for report in self.executor.call(read_bands, jobs).values():
            held.take_in(report, version)
        return held

    def reaches(self, kept: "Checkpoints") -> bool:
        """Whether the workers that have bands can write where a run's results are kept."""
        return self.executor.reaches(kept.shared, sorted(self._anchors))

    def deliver(self, kept: "Checkpoints", work: Mapping[str, Mapping[str, Any]]) -> None:
        """Have workers write results or what is saved; the next checkpoint tells of it."""
        patience = self.executor.patience.stall
        jobs = {
            address: Deliveries(self.token, patience, kept.writer(), **own)
            for address, own in work.items()
        }
        kept.take(list(self.executor.call(deliver, jobs).values()))

    def each(
        self,
        state: HeldState,
        function: Callable[..., Any],
        factor: int | None,
        given: Sequence[Sequence[Any]],
    ) -> list[Any]:
        """Call a function with bands on the workers that have them; see `HeldState.each`."""
        bands, version = state.numbers(factor), next(self.versions)
        jobs: dict[str, list[tuple[int, list[Want], tuple[Any, ...]]]] = {}
        for number, (band, *own) in enumerate(zip(bands, *given, strict=True)):
            refs = state.arrays[band]
            home = refs[""].places[0]
            modes = (
                Mode.READ if ref.shared or ref.places != (home,) else Mode.TAKE
                for ref in refs.values()
            )
            wants = [ref.want(mode) for ref, mode in zip(refs.values(), modes, strict=True)]
            wants.sort(key=lambda want: want.key.name)  # the band itself first
            jobs.setdefault(home, []).append((number, wants, tuple(own)))
        met = self.executor.call(
            call_each,
            {
                address: Calls(
                    self.token,
                    uuid.uuid4().hex,
                    version,
                    self.executor.patience.stall,
                    function,
                    [(wants, own) for _, wants, own in found],
                )
                for address, found in jobs.items()
            },
        )
        results = [None] * len(bands)
        for address, found in jobs.items():
            for (number, _, _), one in zip(found, met[address], strict=True):
                state.take_in(one.report, version)
                refs = state.arrays[bands[number]]
                for name in set(refs) - set(one.names):
                    del refs[name]
                results[number] = one.result
        return results


def _release(futures: Iterable[Any]) -> None:
    for future in futures:
        with contextlib.suppress(Exception):  # the client may have been closed already
            future.release()
