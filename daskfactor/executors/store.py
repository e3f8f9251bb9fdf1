"""What a worker keeps between segments: arrays of bands by version, and how others get them.

A chain's bands stay in the workers, outside of Dask's own data: there is no lineage, and
the scheduler does not know of them. An array of a band has a version, which is never written
to while somebody may go back to it: who changes the array leaves a new version behind.

A client's bands are under a token, and a worker keeps them as long as it holds a key of Dask's
own that the client has put there. When the client drops the key, closes or dies, the scheduler
has the worker release it, and the bands go.
"""

import asyncio
import concurrent.futures
import itertools
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from distributed import get_worker
from distributed.protocol.serialize import Serialize
from numpy.typing import NDArray

from daskfactor.errors import StoreError
from daskfactor.executors.base import StateLost
from daskfactor.executors.state import (
    CELLS,
    Band,
    BlockCells,
    Evaluation,
    FactorBand,
    Piece,
    Portion,
    bare,
    ending,
    put_together,
)
from daskfactor.machine import single_threaded_blas
from daskfactor.results.files import DAMAGE, disk_errors

PLUGIN = "daskfactor-bands"
HOLD = "daskfactor-hold-"
"""What keys begin with that stand for a client's bands."""
MESSAGE = 2**25
"""Bytes of bands from which on a message takes no more of them."""
MOST_CALLS = 1024
"""Calls that are remembered as done."""
LOOK = 0.5
"""Seconds between looks at whether bands are still wanted."""


def pack(value: Any) -> NDArray[np.uint8]:
    """Pickle anything, closures too, as bytes that the scheduler does not look into.

    `unpack` gives it back, its arrays where compiled kernels expect them:
    frames of a message start anywhere.
    """
    return np.frombuffer(cloudpickle.dumps(value, protocol=5), np.uint8)


def unpack(packed: NDArray[np.uint8]) -> Any:
    """Return what was packed."""
    return pickle.loads(packed.data)


class Key(NamedTuple):
    """An array of a band, or under the name ``""`` the band itself with its values alone.

    With `CELLS` in place of a factor the number is a block.
    """

    factor: int
    number: Any
    name: str = ""


Name = tuple[Key, int]
"""A version of an array."""
Asked = tuple[Name, Any]
"""A version, and which of its rows; None for all of them."""
Shape = tuple[int, int, int]
"""The offset of a band, its rows, and the bytes of its values."""


def shape_of(band: FactorBand) -> Shape:
    """Return what a client has to know of a band."""
    return band.offset, len(band.values), band.values.nbytes


class Mode(IntEnum):
    """Says what somebody does with a version: read it, change a copy, or take it away."""

    READ = 0
    COPY = 1
    TAKE = 2


class Want(NamedTuple):
    """A version that is needed, and the addresses of the workers that have it.

    ``rows``: a slice or positions, for which `Mode` says nothing; None for all of them.
    """

    key: Key
    version: int
    places: tuple[str, ...]
    mode: Mode
    rows: Any = None

    @property
    def asked(self) -> "Asked":
        """Return what a worker that has it is asked for."""
        return (self.key, self.version), self.rows


@dataclass
class Report:
    """What a worker tells the client of what it left in its store; values stay where they are.

    Attributes
    ----------
    left
        Arrays with a new version here.
    replicas
        Versions of others that are here now, too.
    shapes
        Of bands that were left, offset, rows, and bytes of values.
    counts
        Of bands that were left.
    records
        By band: positions along the plan, the sums recorded there, and the shapes of draws,
        which were left under the names that `draw_name` gives.
    """

    address: str
    left: list[Key] = field(default_factory=list)
    replicas: list[Name] = field(default_factory=list)
    shapes: dict[Band, Shape] = field(default_factory=dict)
    counts: dict[Band, dict[str, int]] = field(default_factory=dict)
    records: list[tuple[Band, int, dict[Any, Any], int]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    busy: float = 0.0


def draw_name(position: int, number: int) -> str:
    """Name a draw that a band recorded at a place along the plan."""
    return f"draw-{position}-{number}"


def _size(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else int(value.__sizeof__())


class BandStore:
    """The bands of one worker.

    Parameters
    ----------
    worker
        The `distributed` worker.
    pool
        Threads that pack bands for messages.
    """

    def __init__(self, worker: Any, pool: concurrent.futures.Executor) -> None:
        self.worker, self._pool = worker, pool
        self._lock = threading.Lock()
        self._held: dict[str, dict[Name, Any]] = {}
        self._keys: dict[str, set[str]] = {}
        self._calls: OrderedDict[str, None] = OrderedDict()
        worker.handlers["daskfactor_get"] = self.send
        worker.handlers["daskfactor_put"] = self.receive
        worker.handlers["daskfactor_drop"] = self.drop

    def close(self) -> None:
        """Drop everything; called when the worker closes."""
        for name in ("get", "put", "drop"):
            self.worker.handlers.pop(f"daskfactor_{name}", None)
        with self._lock:
            self._held.clear()

    def transition(self, key: Any, start: str, finish: str) -> None:
        """Keep a client's bands from when its key comes to when it goes."""
        if not (isinstance(key, str) and key.startswith(HOLD)):
            return
        token = key.removeprefix(HOLD).partition("-")[0]
        with self._lock:
            keys = self._keys.setdefault(token, set())
            if finish == "memory":
                keys.add(key)
                self._held.setdefault(token, {})
            elif start == "memory":
                keys.discard(key)
            if not keys:
                self._held.pop(token, None)
                del self._keys[token]

    @property
    def nbytes(self) -> int:
        """Bytes of all bands here."""
        with self._lock:
            held = [value for own in self._held.values() for value in own.values()]
        return sum(map(_size, held))

    def names(self, token: str) -> set[Name]:
        """Return the versions that are here under a token."""
        with self._lock:
            return set(self._held.get(token, ()))

    def put(self, token: str, values: Mapping[Name, Any]) -> None:
        """Keep versions of arrays.

        Raises
        ------
        StateLost
            If their client has gone.
        """
        with self._lock:
            if token not in self._held:
                raise StateLost("the client whose bands these are has gone")
            self._held[token].update(values)

    def get(self, token: str, name: Name, take: bool = False) -> Any:
        """Return a version, or None if it is not here; ``take``: it is the caller's from now on."""
        with self._lock:
            held = self._held.get(token, {})
            return held.pop(name, None) if take else held.get(name)

    def once(self, call: str) -> None:
        """Raise StateLost if a call that changes bands has begun here before.

        Dask runs a task again whose result it has lost.
        """
        with self._lock:
            if call in self._calls:
                raise StateLost("a change of bands was to be made a second time")
            self._calls[call] = None
            while len(self._calls) > MOST_CALLS:
                self._calls.popitem(last=False)

    # -- from worker to worker ---------------------------------------------------------

    async def send(self, token: str, names: bytes) -> dict[str, Any]:
        """Answer who asks for versions with the first ones of them; the operation's handler."""
        found, size = [], 0
        for name, rows in pickle.loads(names):
            value = self.get(token, name)
            if value is None:
                return {"lost": f"{self.worker.address} has no {name[0]} of version {name[1]}"}
            found.append(_rows_of(value, rows))
            size += _size(found[-1])
            if size > MESSAGE:
                break
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(self._pool, _packed, found)
        return {"bands": [Serialize(own) for own in raw]}  # type: ignore[no-untyped-call]

    async def receive(self, token: str, names: bytes, bands: list[Any]) -> str:
        """Keep what a client sends; the operation's handler. The answer is an error, or none."""
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(self._pool, _unpacked, bands)
        try:
            self.put(token, dict(zip(pickle.loads(names), values, strict=True)))
        except StateLost as error:
            return str(error)
        return ""

    def drop(self, token: str, names: bytes) -> None:
        """Forget versions; the operation's handler."""
        with self._lock:
            held = self._held.get(token, {})
            for name in pickle.loads(names):
                held.pop(name, None)

    def bring(
        self,
        token: str,
        wants: Iterable[Want],
        patience: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[Key, Any], list[Name]]:
        """Return versions from here or from other workers, and what is here from now on, too.

        Of what is to be changed the caller gets something of its own.

        Raises
        ------
        StateLost
            If a version is nowhere, or nobody wants it any more.
        """
        found: dict[Key, Any] = {}
        missing: dict[str, list[Want]] = {}
        for want in wants:
            value = self.get(token, want[:2], take=want.mode == Mode.TAKE)
            if value is None:
                others = [place for place in want.places if place != self.worker.address]
                missing.setdefault(others[0] if others else "", []).append(want)
            elif want.rows is not None:
                found[want.key] = _rows_of(value, want.rows)
            else:
                found[want.key] = value.copy() if want.mode == Mode.COPY else value
        if lost := missing.pop("", None):
            raise StateLost(f"{self.worker.address} has lost {lost[0].key} and others have none")
        replicas: dict[Name, Any] = {}
        for want, raw in self._fetch(token, missing, patience, given_up):
            value = found[want.key] = pickle.loads(raw)
            if want.mode == Mode.READ and want.rows is None:
                replicas[want[:2]] = value
        if replicas:
            self.put(token, replicas)
        return found, list(replicas)

    def _fetch(
        self,
        token: str,
        missing: Mapping[str, Sequence[Want]],
        patience: float,
        given_up: Callable[[], bool],
    ) -> list[tuple[Want, Any]]:
        """Get versions from other workers, all workers at once."""

        async def ask(address: str, wants: Sequence[Want]) -> list[tuple[Want, Any]]:
            remote, got = self.worker.rpc(address), list[Any]()
            while len(got) < len(wants):
                names = [want.asked for want in wants[len(got) :]]
                got += await ask_for(remote.daskfactor_get, token, names)
            return list(zip(wants, got, strict=True))

        async def ask_all() -> list[list[tuple[Want, Any]]]:
            return await asyncio.gather(*(ask(*own) for own in missing.items()))

        if not missing:
            return []
        loop = self.worker.loop.asyncio_loop
        future = asyncio.run_coroutine_threadsafe(ask_all(), loop)
        until = time.monotonic() + patience
        while not concurrent.futures.wait([future], LOOK).done:
            if given_up() or time.monotonic() > until:
                future.cancel()
                raise StateLost(f"bands of {', '.join(missing)} did not come")
        try:
            parts = future.result()
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            raise StateLost(f"bands of {', '.join(missing)} did not come: {error}") from error
        return [own for part in parts for own in part]

    # -- what tasks do -----------------------------------------------------------------

    def leave(self, token: str, version: int, portion: Portion) -> Report:
        """Keep what is left of a part of a plan, all of it new; tell where it is."""
        values: dict[Name, Any] = {}
        report = Report(self.worker.address, evaluations=portion.evaluations, busy=portion.busy)

        def keep(key: Key, value: Any) -> None:
            values[key, version] = _own(value)
            report.left.append(key)

        def record(band: Band, position: int, draws: Any, sums: Any) -> None:
            for number, draw in enumerate(draws):
                keep(Key(*band, draw_name(position, number)), draw)
            report.records.append((band, position, sums, len(draws)))

        for at, records in portion.records.items():
            for position, draws, sums in records:
                record(at, position, draws, sums)
        for at, band in portion.bands.items():
            if band.draws or band.sums:
                record(at, 0, band.draws, band.sums)
            if len(band.values):
                keep(Key(*at), bare(band, ()))
                report.shapes[at] = shape_of(band)
                report.counts[at] = dict(band.counts)
            for name, array in band.arrays.items():
                keep(Key(*at, name), array)
        for block, cells in portion.cells.items():
            keep(Key(CELLS, block), cells)
        self.put(token, values)
        return report


def _own(value: Any) -> Any:
    """Return something that may be written to: arrays in messages may not, or lie anywhere."""
    if isinstance(value, np.ndarray):
        return np.require(value, requirements=["W", "A"])
    if isinstance(value, FactorBand):
        return replace(value, values=_own(value.values))
    if isinstance(value, BlockCells):
        return replace(value, mean=_own(value.mean), m2=_own(value.m2))
    return value


def _rows_of(value: Any, rows: Any) -> Any:
    """Return some rows of an array, or of a band's values; with None all there is."""
    if rows is None:
        return value
    return (value if isinstance(value, np.ndarray) else value.values)[rows]


def _packed(values: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(value, protocol=5) for value in values]


def _unpacked(raw: Sequence[Any]) -> list[Any]:
    return [pickle.loads(own) for own in raw]


async def ask_for(
    ask: Callable[..., Awaitable[Any]], token: str, names: Sequence[Asked]
) -> list[Any]:
    """Ask a worker for versions; return as many of them, packed, as it answers with."""
    reply = await ask(token=token, names=pickle.dumps(list(names)))
    if not reply or "bands" not in reply:
        raise StateLost((reply or {}).get("lost", "a worker has come back without its bands"))
    return list(reply["bands"])


def store_here() -> BandStore:
    """Return the store of the worker that the running task is on."""
    plugin: Any = get_worker().plugins[PLUGIN]
    store: BandStore = plugin.bands
    return store


@dataclass
class Start:
    """What a graph of tasks begins with, and the worker that has most of it."""

    token: str
    place: str
    patience: float
    wants: list[Want]


def read_portion(packed: NDArray[np.uint8]) -> Portion:
    """Return bands from the store, which nobody may write to: the task."""
    start: Start = unpack(packed)
    found, _ = store_here().bring(start.token, start.wants, start.patience)
    portion = Portion()
    for (factor, number, name), value in sorted(found.items()):
        if factor == CELLS:
            portion.cells[number] = value
        elif name:
            portion.bands[factor, number].arrays[name] = value
        else:
            portion.bands[factor, number] = bare(value)
    return portion


@dataclass
class Reading:
    """What one worker reads: every factor's bands of some numbers, as `Keeper.read` takes them."""

    token: str
    version: int
    band: Callable[[int, int], FactorBand]
    factors: int
    numbers: list[int] = field(default_factory=list)


def read_bands(packed: NDArray[np.uint8]) -> Report:
    """Read bands and leave them in the store of this worker: the task."""
    work: Reading = unpack(packed)
    store, at = store_here(), itertools.product(range(work.factors), work.numbers)
    with reading(store.worker.address):
        bands = {band: work.band(*band) for band in at}
    return store.leave(work.token, work.version, Portion(bands))


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Name a worker that cannot read a checkpoint, which is no loss that going back would mend.

    Raises
    ------
    StoreError
        In place of what reading raises.
    """
    try:
        yield
    except DAMAGE as error:
        raise StoreError(
            f"the worker {address} cannot read the checkpoint ({type(error).__name__}: {error}); "
            "see that it can, with its disk, network and credentials, and resume the run"
        ) from error


def leave_portion(token: str, version: int, part: int, portion: Portion) -> Report:
    """Leave one part of a portion in the store of this worker, as `ending` returns it: the task."""
    return store_here().leave(token, version, ending(portion, part))


@dataclass
class Calls:
    """What one worker does in `HeldState.each`: the bands, each with arguments of its own.

    ``call`` is what the worker remembers it by, ``version`` that of what changes.
    """

    token: str
    call: str
    version: int
    patience: float
    function: Callable[..., Any]
    bands: list[tuple[list[Want], tuple[Any, ...]]]


@dataclass
class Deliveries:
    """What one worker writes into the results, or saves with the next checkpoint.

    Attributes
    ----------
    token, patience
        As of `Start`.
    writer
        What writes; it goes back to the client.
    pieces
        Regions of the results, each with the rows of all bands and the arrays of these.
    saved
        Versions by the names they are saved under, in an archive ``name``.
    """

    token: str
    patience: float
    writer: Any
    pieces: list[tuple[Piece, list[slice], list[list[Want]]]] = field(default_factory=list)
    name: str = ""
    saved: dict[str, Want] = field(default_factory=dict)


def deliver(packed: NDArray[np.uint8]) -> Any:
    """Write what a worker is to write: the task; the writer is what it gives back."""
    work: Deliveries = unpack(packed)
    store = store_here()

    def bring(wants: Sequence[Want]) -> dict[Key, Any]:
        return store.bring(work.token, wants, work.patience)[0]

    with _told_of(store.worker.address, work.writer.name):
        for piece, spans, wants in work.pieces:
            needed = piece.at(spans, wants)
            found = bring([want._replace(rows=rows) for want, rows, _ in needed])
            values = put_together(piece, ((found[want.key], at) for want, _, at in needed))
            work.writer.write(piece.path, piece.region, piece.settled(values))
        if work.saved:
            found = bring(list(work.saved.values()))
            arrays = {own: _rows_of(found[w.key], slice(None)) for own, w in work.saved.items()}
            work.writer.save(work.name, arrays)
        work.writer.store.flush()
    return work.writer


@contextmanager
def _told_of(address: str, place: Any) -> Iterator[None]:
    """Name this worker in errors of what it writes: others may have other disks and credentials."""
    safe = "the last checkpoint is safe"
    with disk_errors(f"results from the worker {address}", place, safe):
        try:
            yield
        except StoreError as error:
            told = f"the worker {address} cannot write results: {error}; {safe}; resume the run"
            failure = StoreError(told)
            failure.errno = error.errno
            raise failure from error


class Met(NamedTuple):
    """What a call with a band returned, and which arrays the band has now."""

    result: Any
    report: Report
    names: list[str]


def call_each(packed: NDArray[np.uint8]) -> list[Met]:
    """Call a function with bands of a worker: the task."""
    calls: Calls = unpack(packed)
    store = store_here()
    store.once(calls.call)
    with single_threaded_blas():
        return [_call(store, calls, wants, given) for wants, given in calls.bands]


def _call(store: BandStore, calls: Calls, wants: list[Want], given: tuple[Any, ...]) -> Met:
    """Call the function with one band; what is shared is copied, and kept if it has changed."""
    found, replicas = store.bring(calls.token, wants, calls.patience)
    versions = {want.key: want.version for want in wants}
    own = {want.key for want in wants if want.mode == Mode.TAKE}
    at = wants[0].key[:2]
    arrays = {key: value if key in own else value.copy() for key, value in found.items()}
    band: FactorBand = arrays.pop(Key(*at))
    band.arrays = {key.name: array for key, array in arrays.items()}
    try:
        result = calls.function(band, *given)
    except BaseException:
        store.put(calls.token, {(key, versions[key]): found[key] for key in own})
        raise
    report = Report(store.worker.address, replicas=replicas)
    report.shapes[at] = shape_of(band)
    report.counts[at] = dict(band.counts)
    if band.sums:
        report.records.append((at, 0, band.sums, 0))
    after: dict[Key, Any] = {Key(*at): bare(band, ())}
    after |= {Key(*at, name): array for name, array in band.arrays.items()}
    kept: dict[Name, Any] = {}
    for key, value in after.items():
        if key in own:
            kept[key, versions[key]] = value
        elif key not in found or not _same(value, found[key]):
            kept[key, calls.version] = value
            report.left.append(key)
    store.put(calls.token, kept)
    return Met(result, report, [key.name for key in after])


def _same(one: Any, other: Any) -> bool:
    """Whether two bands without arrays, or two arrays, are the same to the bit."""
    if isinstance(one, FactorBand):
        return one.counts == other.counts and _same(one.values, other.values)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    unsigned = np.dtype(f"u{one.itemsize}")
    return bool(np.array_equal(one.view(unsigned), other.view(unsigned)))
