"""Store of versioned band arrays on a worker, and the tasks that read and write it.

The bands of a chain stay in the workers, outside of Dask's own data: they have no lineage, and the
scheduler does not know them. Every array of a band has a version. A version that may still be
needed is never changed: a change creates a new version.

The bands of a client are stored under a token, for as long as the worker holds a Dask key that the
client has scattered to it (the anchor). When the client drops the key, closes or dies, the
scheduler makes the worker release the key, and the bands are dropped.
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
    assemble_rows,
    select_part,
    without_records,
)
from daskfactor.machine import single_threaded_blas
from daskfactor.results.files import DAMAGE, disk_errors

PLUGIN = "daskfactor-bands"
ANCHOR_PREFIX = "daskfactor-hold-"
"""Prefix of the Dask keys that keep the bands of a client."""
MAX_MESSAGE_BYTES = 2**25
"""Bytes of bands at which a message is full."""
MAX_CALLS = 1024
"""Number of calls remembered to detect repeats."""
POLL = 0.5
"""Seconds between checks whether a fetch has been cancelled."""


def pack(value: Any) -> NDArray[np.uint8]:
    """Pickle a value, closures included, to bytes that the scheduler does not inspect.

    Arrays that `unpack` returns are aligned as compiled kernels require; those in the frames of a
    message may not be.
    """
    return np.frombuffer(cloudpickle.dumps(value, protocol=5), np.uint8)


def unpack(packed: NDArray[np.uint8]) -> Any:
    """Return the value that was packed."""
    return pickle.loads(packed.data)


class Key(NamedTuple):
    """Key of a band's array; the name ``""`` is the band itself with its values only.

    With the factor `CELLS` the number is a block.
    """

    factor: int
    number: Any
    name: str = ""


ArrayVersion = tuple[Key, int]
"""Key and version number of an array."""
VersionRows = tuple[ArrayVersion, Any]
"""A version and its rows to read; None for all rows."""
Shape = tuple[int, int, int]
"""The offset of a band, its rows, and the bytes of its values."""


def shape_of(band: FactorBand) -> Shape:
    """Return the shape of a band for the client."""
    return band.offset, len(band.values), band.values.nbytes


class Mode(IntEnum):
    """Access mode of a request: read a version, change a copy, or take it out of the store."""

    READ = 0
    COPY = 1
    TAKE = 2


class ArrayRequest(NamedTuple):
    """Request for a version of an array, with the addresses of the workers that have it.

    ``rows`` is a slice or positions, always copied; None for all rows.
    """

    key: Key
    version: int
    addresses: tuple[str, ...]
    mode: Mode
    rows: Any = None

    @property
    def version_rows(self) -> "VersionRows":
        """Version and rows to request from a worker."""
        return (self.key, self.version), self.rows


@dataclass
class WorkerReport:
    """Report of a worker to the client on the arrays that it has stored; the values stay there.

    Attributes
    ----------
    stored
        Keys of arrays stored as a new version.
    replicas
        Versions copied from other workers.
    shapes
        Offset, rows, and bytes of values of each stored band.
    counts
        Counters of each stored band.
    records
        Band, position in the plan, recorded sums, and number of draws, which are stored under
        their `draw_name`.
    """

    address: str
    stored: list[Key] = field(default_factory=list)
    replicas: list[ArrayVersion] = field(default_factory=list)
    shapes: dict[Band, Shape] = field(default_factory=dict)
    counts: dict[Band, dict[str, int]] = field(default_factory=dict)
    records: list[tuple[Band, int, dict[Any, Any], int]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    busy: float = 0.0


def draw_name(position: int, number: int) -> str:
    """Return the name of a draw recorded at a position in the plan."""
    return f"draw-{position}-{number}"


def _size(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else int(value.__sizeof__())


class BandStore:
    """Versions of band arrays on one worker.

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
        self._versions: dict[str, dict[ArrayVersion, Any]] = {}
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
            self._versions.clear()

    def transition(self, key: Any, start: str, finish: str) -> None:
        """Start or end the storage of a client's bands when its anchor arrives or is released."""
        if not (isinstance(key, str) and key.startswith(ANCHOR_PREFIX)):
            return
        token = key.removeprefix(ANCHOR_PREFIX).partition("-")[0]
        with self._lock:
            keys = self._keys.setdefault(token, set())
            if finish == "memory":
                keys.add(key)
                self._versions.setdefault(token, {})
            elif start == "memory":
                keys.discard(key)
            if not keys:
                self._versions.pop(token, None)
                del self._keys[token]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored bands."""
        with self._lock:
            values = [value for versions in self._versions.values() for value in versions.values()]
        return sum(map(_size, values))

    def names(self, token: str) -> set[ArrayVersion]:
        """Return the versions stored under a token."""
        with self._lock:
            return set(self._versions.get(token, ()))

    def put(self, token: str, values: Mapping[ArrayVersion, Any]) -> None:
        """Store versions of arrays.

        Raises
        ------
        StateLost
            If their client has gone.
        """
        with self._lock:
            if token not in self._versions:
                raise StateLost("the client whose bands these are has gone")
            self._versions[token].update(values)

    def get(self, token: str, name: ArrayVersion, take: bool = False) -> Any:
        """Return a version, None if it is not stored; ``take`` removes it from the store."""
        with self._lock:
            versions = self._versions.get(token, {})
            return versions.pop(name, None) if take else versions.get(name)

    def reject_repeated_call(self, call: str) -> None:
        """Raise StateLost if a call that changes bands has started on this worker before.

        Dask repeats a task if it has lost the result.
        """
        with self._lock:
            if call in self._calls:
                raise StateLost("a change of bands was to be made a second time")
            self._calls[call] = None
            while len(self._calls) > MAX_CALLS:
                self._calls.popitem(last=False)

    # -- messages ----------------------------------------------------------------------

    async def send(self, token: str, names: bytes) -> dict[str, Any]:
        """Answer a request for versions with as many as fit a message (a handler of the worker)."""
        values, size = [], 0
        for name, rows in pickle.loads(names):
            value = self.get(token, name)
            if value is None:
                return {"lost": f"{self.worker.address} has no {name[0]} of version {name[1]}"}
            values.append(_rows_of(value, rows))
            size += _size(values[-1])
            if size > MAX_MESSAGE_BYTES:
                break
        loop = asyncio.get_running_loop()
        raw = await loop.run_in_executor(self._pool, _packed, values)
        return {"bands": [Serialize(frame) for frame in raw]}  # type: ignore[no-untyped-call]

    async def receive(self, token: str, names: bytes, bands: list[Any]) -> str:
        """Store versions from a client; return an error message or "" (a handler of the worker)."""
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(self._pool, _unpacked, bands)
        try:
            self.put(token, dict(zip(pickle.loads(names), values, strict=True)))
        except StateLost as error:
            return str(error)
        return ""

    def drop(self, token: str, names: bytes) -> None:
        """Drop versions (a handler of the worker)."""
        with self._lock:
            versions = self._versions.get(token, {})
            for name in pickle.loads(names):
                versions.pop(name, None)

    def fetch(
        self,
        token: str,
        requests: Iterable[ArrayRequest],
        patience: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[Key, Any], list[ArrayVersion]]:
        """Return versions from this or other workers, and the names of new replicas in this store.

        Arrays that the caller may change are copies.

        Raises
        ------
        StateLost
            If a version cannot be found, or the fetch is cancelled.
        """
        arrays: dict[Key, Any] = {}
        missing: dict[str, list[ArrayRequest]] = {}
        for request in requests:
            value = self.get(token, request[:2], take=request.mode == Mode.TAKE)
            if value is None:
                sources = [
                    address for address in request.addresses if address != self.worker.address
                ]
                missing.setdefault(sources[0] if sources else "", []).append(request)
            elif request.rows is not None:
                arrays[request.key] = _rows_of(value, request.rows)
            else:
                arrays[request.key] = value.copy() if request.mode == Mode.COPY else value
        if unavailable := missing.pop("", None):
            raise StateLost(
                f"{self.worker.address} has lost {unavailable[0].key} and others have none"
            )
        replicas: dict[ArrayVersion, Any] = {}
        for request, raw in self._fetch_remote(token, missing, patience, is_cancelled):
            value = arrays[request.key] = pickle.loads(raw)
            if request.mode == Mode.READ and request.rows is None:
                replicas[request[:2]] = value
        if replicas:
            self.put(token, replicas)
        return arrays, list(replicas)

    def _fetch_remote(
        self,
        token: str,
        missing: Mapping[str, Sequence[ArrayRequest]],
        patience: float,
        is_cancelled: Callable[[], bool],
    ) -> list[tuple[ArrayRequest, Any]]:
        """Return versions from other workers, requested in parallel."""

        async def ask(
            address: str, requests: Sequence[ArrayRequest]
        ) -> list[tuple[ArrayRequest, Any]]:
            remote, received = self.worker.rpc(address), list[Any]()
            while len(received) < len(requests):
                names = [request.version_rows for request in requests[len(received) :]]
                received += await ask_for(remote.daskfactor_get, token, names)
            return list(zip(requests, received, strict=True))

        async def ask_all() -> list[list[tuple[ArrayRequest, Any]]]:
            return await asyncio.gather(*(ask(*item) for item in missing.items()))

        if not missing:
            return []
        loop = self.worker.loop.asyncio_loop
        future = asyncio.run_coroutine_threadsafe(ask_all(), loop)
        deadline = time.monotonic() + patience
        while not concurrent.futures.wait([future], POLL).done:
            if is_cancelled() or time.monotonic() > deadline:
                future.cancel()
                raise StateLost(f"bands of {', '.join(missing)} did not come")
        try:
            parts = future.result()
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            raise StateLost(f"bands of {', '.join(missing)} did not come: {error}") from error
        return [item for part in parts for item in part]

    # -- results of tasks --------------------------------------------------------------

    def store_portion(self, token: str, version: int, portion: Portion) -> WorkerReport:
        """Store the result of a part of a plan as a new version; return the report on it."""
        values: dict[ArrayVersion, Any] = {}
        report = WorkerReport(
            self.worker.address, evaluations=portion.evaluations, busy=portion.busy
        )

        def add(key: Key, value: Any) -> None:
            values[key, version] = writable(value)
            report.stored.append(key)

        def record(band: Band, position: int, draws: Any, sums: Any) -> None:
            for number, draw in enumerate(draws):
                add(Key(*band, draw_name(position, number)), draw)
            report.records.append((band, position, sums, len(draws)))

        for band_key, records in portion.records.items():
            for position, draws, sums in records:
                record(band_key, position, draws, sums)
        for band_key, band in portion.bands.items():
            if band.draws or band.sums:
                record(band_key, 0, band.draws, band.sums)
            if len(band.values):
                add(Key(*band_key), without_records(band, ()))
                report.shapes[band_key] = shape_of(band)
                report.counts[band_key] = dict(band.counts)
            for name, array in band.arrays.items():
                add(Key(*band_key, name), array)
        for block, cells in portion.cells.items():
            add(Key(CELLS, block), cells)
        self.put(token, values)
        return report


def writable(value: Any) -> Any:
    """Return the value with aligned, writable arrays; those from messages may be neither."""
    if isinstance(value, np.ndarray):
        return np.require(value, requirements=["W", "A"])
    if isinstance(value, FactorBand):
        return replace(value, values=writable(value.values))
    if isinstance(value, BlockCells):
        return replace(value, mean=writable(value.mean), m2=writable(value.m2))
    return value


def _rows_of(value: Any, rows: Any) -> Any:
    """Return some rows of an array, or of a band's values; the value itself for None."""
    if rows is None:
        return value
    return (value if isinstance(value, np.ndarray) else value.values)[rows]


def _packed(values: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(value, protocol=5) for value in values]


def _unpacked(raw: Sequence[Any]) -> list[Any]:
    return [pickle.loads(frame) for frame in raw]


async def ask_for(
    ask: Callable[..., Awaitable[Any]], token: str, names: Sequence[VersionRows]
) -> list[Any]:
    """Request versions from a worker; return the pickled ones that fit its answer."""
    reply = await ask(token=token, names=pickle.dumps(list(names)))
    if not reply or "bands" not in reply:
        raise StateLost((reply or {}).get("lost", "a worker has come back without its bands"))
    return list(reply["bands"])


def worker_store() -> BandStore:
    """Return the store of the worker that runs this task."""
    plugin: Any = get_worker().plugins[PLUGIN]
    store: BandStore = plugin.bands
    return store


@dataclass
class PortionRequest:
    """Requests for the bands that a graph of tasks starts from, and the worker to read them on."""

    token: str
    address: str
    patience: float
    requests: list[ArrayRequest]


def read_portion(packed: NDArray[np.uint8]) -> Portion:
    """Return read-only bands from the store (a task)."""
    request: PortionRequest = unpack(packed)
    arrays, _ = worker_store().fetch(request.token, request.requests, request.patience)
    portion = Portion()
    for (factor, number, name), value in sorted(arrays.items()):
        if factor == CELLS:
            portion.cells[number] = value
        elif name:
            portion.bands[factor, number].arrays[name] = value
        else:
            portion.bands[factor, number] = without_records(value)
    return portion


@dataclass
class ReadJob:
    """Numbers of the bands that one worker reads, of every factor; see `WorkerStateClient.read`."""

    token: str
    version: int
    band: Callable[[int, int], FactorBand]
    factors: int
    numbers: list[int] = field(default_factory=list)


def read_bands(packed: NDArray[np.uint8]) -> WorkerReport:
    """Read bands into the store of this worker (a task)."""
    job: ReadJob = unpack(packed)
    store, keys = worker_store(), itertools.product(range(job.factors), job.numbers)
    with read_errors(store.worker.address):
        bands = {key: job.band(*key) for key in keys}
    return store.store_portion(job.token, job.version, Portion(bands))


@contextmanager
def read_errors(address: str) -> Iterator[None]:
    """Name the worker that cannot read a checkpoint, an error that a retry would not fix.

    Raises
    ------
    StoreError
        In place of the original error.
    """
    try:
        yield
    except DAMAGE as error:
        raise StoreError(
            f"the worker {address} cannot read the checkpoint ({type(error).__name__}: {error}); "
            "see that it can, with its disk, network and credentials, and resume the run"
        ) from error


def store_portion(token: str, version: int, part: int, portion: Portion) -> WorkerReport:
    """Store the `select_part` of a portion on this worker (a task)."""
    return worker_store().store_portion(token, version, select_part(portion, part))


@dataclass
class CallJob:
    """Calls that one worker makes for `RemoteState.each`: bands with their arguments.

    ``call`` identifies the job on the worker; ``version`` is that of changed arrays.
    """

    token: str
    call: str
    version: int
    patience: float
    function: Callable[..., Any]
    bands: list[tuple[list[ArrayRequest], tuple[Any, ...]]]


@dataclass
class WriteJob:
    """Results or checkpoint arrays that one worker writes.

    Attributes
    ----------
    token, patience
        See `PortionRequest`.
    writer
        The writer, which is returned to the client.
    pieces
        Pieces of the results, each with the rows of all bands and the requests for their arrays.
    saved
        Requests by their names in the archive ``name``.
    """

    token: str
    patience: float
    writer: Any
    pieces: list[tuple[Piece, list[slice], list[list[ArrayRequest]]]] = field(default_factory=list)
    name: str = ""
    saved: dict[str, ArrayRequest] = field(default_factory=dict)


def write_results(packed: NDArray[np.uint8]) -> Any:
    """Write the results of a job; return its writer (a task)."""
    job: WriteJob = unpack(packed)
    store = worker_store()

    def fetch(requests: Sequence[ArrayRequest]) -> dict[Key, Any]:
        return store.fetch(job.token, requests, job.patience)[0]

    with write_errors(store.worker.address, job.writer.name):
        for piece, spans, requests in job.pieces:
            parts = piece.parts_of(spans, requests)
            arrays = fetch([request._replace(rows=rows) for request, rows, _ in parts])
            by_target = ((arrays[request.key], target) for request, _, target in parts)
            values = piece.to_result_layout(assemble_rows(piece, by_target))
            job.writer.write(piece.path, piece.region, values)
        if job.saved:
            arrays = fetch(list(job.saved.values()))
            saved = {n: _rows_of(arrays[r.key], slice(None)) for n, r in job.saved.items()}
            job.writer.save(job.name, saved)
        job.writer.store.flush()
    return job.writer


@contextmanager
def write_errors(address: str, path: Any) -> Iterator[None]:
    """Name this worker in write errors: workers may have different disks and credentials."""
    safe = "the last checkpoint is safe"
    with disk_errors(f"results from the worker {address}", path, safe):
        try:
            yield
        except StoreError as error:
            failure = StoreError(
                f"the worker {address} cannot write results: {error}; {safe}; resume the run"
            )
            failure.errno = error.errno
            raise failure from error


class CallResult(NamedTuple):
    """Result of a call with a band, and the names of the band's arrays after it."""

    result: Any
    report: WorkerReport
    names: list[str]


def call_with_bands(packed: NDArray[np.uint8]) -> list[CallResult]:
    """Call a function with bands of this worker (a task)."""
    job: CallJob = unpack(packed)
    store = worker_store()
    store.reject_repeated_call(job.call)
    with single_threaded_blas():
        return [_call(store, job, requests, args) for requests, args in job.bands]


def _call(
    store: BandStore, job: CallJob, requests: list[ArrayRequest], args: tuple[Any, ...]
) -> CallResult:
    """Call the function with one band; shared arrays are copied and stored if they change."""
    fetched, replicas = store.fetch(job.token, requests, job.patience)
    versions = {request.key: request.version for request in requests}
    removed = {request.key for request in requests if request.mode == Mode.TAKE}
    band_key = requests[0].key[:2]
    arrays = {key: value if key in removed else value.copy() for key, value in fetched.items()}
    band: FactorBand = arrays.pop(Key(*band_key))
    band.arrays = {key.name: array for key, array in arrays.items()}
    try:
        result = job.function(band, *args)
    except BaseException:
        store.put(job.token, {(key, versions[key]): fetched[key] for key in removed})
        raise
    report = WorkerReport(store.worker.address, replicas=replicas)
    report.shapes[band_key] = shape_of(band)
    report.counts[band_key] = dict(band.counts)
    if band.sums:
        report.records.append((band_key, 0, band.sums, 0))
    after: dict[Key, Any] = {Key(*band_key): without_records(band, ())}
    after |= {Key(*band_key, name): array for name, array in band.arrays.items()}
    values: dict[ArrayVersion, Any] = {}
    for key, value in after.items():
        if key in removed:
            values[key, versions[key]] = value
        elif key not in fetched or not _identical(value, fetched[key]):
            values[key, job.version] = value
            report.stored.append(key)
    store.put(job.token, values)
    return CallResult(result, report, [key.name for key in after])


def _identical(one: Any, other: Any) -> bool:
    """Check whether two bands without arrays, or two arrays, are bitwise equal."""
    if isinstance(one, FactorBand):
        return one.counts == other.counts and _identical(one.values, other.values)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    unsigned = np.dtype(f"u{one.itemsize}")
    return bool(np.array_equal(one.view(unsigned), other.view(unsigned)))
