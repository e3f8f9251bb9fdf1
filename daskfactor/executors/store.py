"""Parts of a state on the workers, and the tasks that make and read them.

The part of a state on one worker is the result of a Dask task, or was scattered by the client. It
is never changed: a change makes another part. Dask keeps a part as long as the client has its
future, spills it, and drops it when the client dies.

Tasks get the keys of parts, not their futures. So the scheduler keeps no lineage, and a part that
is lost with its worker is not computed again.
"""

import asyncio
import concurrent.futures
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from distributed import get_worker
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
from daskfactor.runs.files import DAMAGE, disk_errors

MAX_MESSAGE_BYTES = 2**25
"""Bytes of bands at which a message is full."""
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

    A recorded draw has a tuple as name: the number of its plan, its position in it, and its number
    there. With the factor `CELLS` the number is a block.
    """

    factor: int
    number: Any
    name: Any = ""


Shape = tuple[int, int, int]
"""The offset of a band, its rows, and the bytes of its values."""


def shape_of(band: FactorBand) -> Shape:
    """Return the shape of a band for the client."""
    return band.offset, len(band.values), band.values.nbytes


class ArrayRequest(NamedTuple):
    """Request for an array of a part, by the part's Dask key and its worker.

    ``changes`` is True if the caller changes the array and so needs a copy. ``rows`` is a slice or
    positions; None for all rows.
    """

    key: Key
    part: str
    address: str
    changes: bool = False
    rows: Any = None


@dataclass
class WorkerReport:
    """Report of a worker to the client on the part that it has made.

    Attributes
    ----------
    stored
        Keys of all arrays of the part; none if a call has changed nothing.
    shapes
        Offset, rows, and bytes of values of each new band.
    counts
        Counters of each new band.
    sums
        Recorded sums of bands, in the order of their operations.
    results
        Results of calls with bands.
    """

    address: str
    stored: list[Key] = field(default_factory=list)
    shapes: dict[Band, Shape] = field(default_factory=dict)
    counts: dict[Band, dict[str, int]] = field(default_factory=dict)
    sums: list[tuple[Band, dict[Any, Any]]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    busy: float = 0.0


@dataclass
class StatePart:
    """Arrays of a state on one worker, by key; never changed."""

    arrays: dict[Key, Any]
    report: WorkerReport | None = None

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restore the part; arrays from messages may be neither aligned nor writable."""
        self.arrays = {key: writable(value) for key, value in values["arrays"].items()}
        self.report = values["report"]

    def __sizeof__(self) -> int:
        """Return the size in bytes for Dask, so that workers spill in time."""
        return sum(map(size_of, self.arrays.values()))


def size_of(value: Any) -> int:
    """Return the bytes of an array, a band or monitored cells."""
    return int(value.nbytes) if isinstance(value, np.ndarray) else int(value.__sizeof__())


def report_of(part: StatePart) -> WorkerReport:
    """Return the report of a part, which alone goes to the client (a task)."""
    assert part.report is not None
    return part.report


def part_of(worker: Any, key: str) -> StatePart:
    """Return a part that a worker has.

    Raises
    ------
    StateLost
        If the worker does not have it.
    """
    try:
        part: StatePart = worker.data[key]
    except KeyError:
        raise StateLost(f"{worker.address} has lost a part of the state") from None
    return part


# -- arrays of parts -------------------------------------------------------------------------


def fetch_arrays(
    requests: Iterable[ArrayRequest],
    patience: float,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> dict[Key, Any]:
    """Return arrays of parts of this worker, in whose task this runs, and of others.

    Raises
    ------
    StateLost
        If a part cannot be found, or the fetch is cancelled.
    """
    worker, arrays = get_worker(), dict[Key, Any]()
    remote: dict[str, list[ArrayRequest]] = {}
    for request in requests:
        if request.address != worker.address:
            remote.setdefault(request.address, []).append(request)
            continue
        value = rows_of(part_of(worker, request.part).arrays[request.key], request.rows)
        arrays[request.key] = value.copy() if request.changes else value

    async def ask(address: str, needed: Sequence[ArrayRequest]) -> None:
        received = list[Any]()
        while len(received) < len(needed):
            rest = [(r.key, r.part, r.rows) for r in needed[len(received) :]]
            reply = await worker.rpc(address).daskfactor_get(requests=pickle.dumps(rest))
            if not reply or "bands" not in reply:  # a worker that closes has no handlers
                raise StateLost((reply or {}).get("lost", f"{address} has closed"))
            received += map(pickle.loads, reply["bands"])
        arrays.update({r.key: value for r, value in zip(needed, received, strict=True)})

    async def ask_all() -> None:
        await asyncio.gather(*(ask(*item) for item in remote.items()))

    if not remote:
        return arrays
    loop: Any = worker.loop.asyncio_loop  # type: ignore[attr-defined]
    future = asyncio.run_coroutine_threadsafe(ask_all(), loop)
    deadline = time.monotonic() + patience
    while not concurrent.futures.wait([future], POLL).done:
        if is_cancelled() or time.monotonic() > deadline:
            future.cancel()
            raise StateLost(f"bands of {', '.join(remote)} did not come")
    try:
        future.result()
    except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
        raise StateLost(f"bands of {', '.join(remote)} did not come: {error!r}") from error
    return arrays


def writable(value: Any) -> Any:
    """Return the value with aligned, writable arrays; those from messages may be neither."""
    if isinstance(value, np.ndarray):
        return np.require(value, requirements=["W", "A"])
    if isinstance(value, FactorBand):
        return replace(value, values=writable(value.values))
    if isinstance(value, BlockCells):
        return replace(value, mean=writable(value.mean), m2=writable(value.m2))
    return value


def rows_of(value: Any, rows: Any) -> Any:
    """Return some rows of an array, or of a band's values; the value itself for None."""
    if rows is None:
        return value
    return (value if isinstance(value, np.ndarray) else value.values)[rows]


# -- tasks -----------------------------------------------------------------------------------


@dataclass
class Carried:
    """Arrays that a worker keeps from its parts: keys of arrays, by the key of the part."""

    keys: dict[str, list[Key]] = field(default_factory=dict)

    def arrays(self) -> dict[Key, Any]:
        """Return the arrays, which the next part shares."""
        worker = get_worker()
        parts = {name: part_of(worker, name).arrays for name in self.keys}
        return {key: parts[name][key] for name, keys in self.keys.items() for key in keys}


def make_part(version: int, portion: Portion, carried: Carried | None = None) -> StatePart:
    """Return the part with a portion and carried arrays; ``version`` numbers the plan for draws."""
    arrays: dict[Key, Any] = carried.arrays() if carried else {}
    report = WorkerReport(get_worker().address, evaluations=portion.evaluations, busy=portion.busy)

    def record(band: Band, position: int, draws: Any, sums: Any) -> None:
        arrays.update({Key(*band, (version, position, n)): d for n, d in enumerate(draws)})
        report.sums.append((band, sums))

    for band_key, records in portion.records.items():
        for position, draws, sums in records:
            record(band_key, position, draws, sums)
    for band_key, band in portion.bands.items():
        if band.draws or band.sums:
            record(band_key, 0, band.draws, band.sums)
        if len(band.values):
            arrays[Key(*band_key)] = without_records(band, ())
            report.shapes[band_key] = shape_of(band)
            report.counts[band_key] = dict(band.counts)
        arrays.update({Key(*band_key, name): array for name, array in band.arrays.items()})
    arrays.update({Key(CELLS, block): cells for block, cells in portion.cells.items()})
    report.stored = list(arrays)
    return StatePart({key: writable(value) for key, value in arrays.items()}, report)


@dataclass
class PortionRequest:
    """Requests for the bands that a task of a graph starts from, and the worker to read them on."""

    address: str
    patience: float
    requests: list[ArrayRequest]


def read_portion(packed: NDArray[np.uint8]) -> Portion:
    """Return bands of parts, which must not be changed (a task)."""
    request: PortionRequest = unpack(packed)
    portion = Portion()
    for (factor, number, name), value in sorted(
        fetch_arrays(request.requests, request.patience).items()
    ):
        if factor == CELLS:
            portion.cells[number] = value
        elif name:
            portion.bands[factor, number].arrays[name] = value
        else:
            portion.bands[factor, number] = without_records(value)
    return portion


def read_arrays(packed: NDArray[np.uint8]) -> list[Any]:
    """Return copies of arrays for the client (a task)."""
    requests: list[ArrayRequest] = unpack(packed)
    worker = get_worker()
    sources = ((part_of(worker, r.part).arrays[r.key], r.rows) for r in requests)
    return [rows_of(value, rows).copy() for value, rows in sources]


@dataclass
class ReadJob:
    """Numbers of the bands that one worker reads, of every factor; see `WorkerStateClient.read`."""

    band: Callable[[int, int], FactorBand]
    factors: int
    numbers: list[int] = field(default_factory=list)


def read_bands(packed: NDArray[np.uint8]) -> StatePart:
    """Read bands from a checkpoint (a task)."""
    job: ReadJob = unpack(packed)
    with read_errors(get_worker().address):
        keys = itertools.product(range(job.factors), job.numbers)
        return make_part(-1, Portion({key: job.band(*key) for key in keys}))


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


def store_portion(version: int, part: int, portion: Portion) -> StatePart:
    """Return the `select_part` of a portion, to stay on this worker (a task)."""
    return make_part(version, select_part(portion, part))


@dataclass
class CallJob:
    """Calls that one worker makes for `RemoteState.each`: bands with their arguments."""

    patience: float
    function: Callable[..., Any]
    bands: list[tuple[list[ArrayRequest], tuple[Any, ...]]]
    carried: Carried


@dataclass
class WriteJob:
    """Results or checkpoint arrays that one worker writes.

    Attributes
    ----------
    writer
        The writer, which is returned to the client.
    pieces
        Pieces of the results, each with the rows of all bands and the requests for their arrays.
    saved
        Requests by their names in the archive ``name``.
    """

    patience: float
    writer: Any
    pieces: list[tuple[Piece, list[slice], list[list[ArrayRequest]]]] = field(default_factory=list)
    name: str = ""
    saved: dict[str, ArrayRequest] = field(default_factory=dict)


def write_results(packed: NDArray[np.uint8]) -> Any:
    """Write the results of a job; return its writer (a task)."""
    job: WriteJob = unpack(packed)

    def fetch(requests: Sequence[ArrayRequest]) -> dict[Key, Any]:
        return fetch_arrays(requests, job.patience)

    with write_errors(get_worker().address, job.writer.name):
        for piece, spans, requests in job.pieces:
            parts = piece.parts_of(spans, requests)
            arrays = fetch([request._replace(rows=rows) for request, rows, _ in parts])
            by_target = ((arrays[request.key], target) for request, _, target in parts)
            values = piece.to_result_layout(assemble_rows(piece, by_target))
            job.writer.write(piece.path, piece.region, values)
        if job.saved:
            arrays = fetch(list(job.saved.values()))
            saved = {n: rows_of(arrays[r.key], slice(None)) for n, r in job.saved.items()}
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


def call_with_bands(packed: NDArray[np.uint8]) -> StatePart:
    """Call a function with bands of this worker; return the part with the changes (a task)."""
    job: CallJob = unpack(packed)
    report, portion, has_changed = WorkerReport(get_worker().address), Portion(), False
    with single_threaded_blas():
        for requests, args in job.bands:
            before = fetch_arrays(requests, job.patience)
            arrays = {key.name: value.copy() for key, value in before.items()}
            band: FactorBand = arrays.pop("")
            band.arrays, at = arrays, requests[0].key[:2]
            report.results.append(job.function(band, *args))
            report.sums.append((at, band.sums))
            values: dict[str, Any] = {"": band, **band.arrays}
            same = {k.name for k, old in before.items() if _identical(values.get(k.name), old)}
            has_changed |= len(same) != len(before) or len(values) != len(before)
            # Unchanged arrays share their memory with the part before.
            unchanged = {k.name: old for k, old in before.items() if k.name in same}
            values = {"": band.values, **band.arrays} | unchanged
            if "" in same:
                values[""] = unchanged[""].values
            portion.bands[at] = FactorBand(band.offset, values.pop(""), values, band.counts)
    if job.bands and not has_changed:
        return StatePart({}, report)
    part = make_part(-1, portion, job.carried)
    part.report = replace(report_of(part), results=report.results, sums=report.sums)
    return part


def _identical(one: Any, other: Any) -> bool:
    """Check whether two bands without arrays, or two arrays, are bitwise equal."""
    if one is None:
        return False
    if isinstance(one, FactorBand):
        return one.counts == other.counts and _identical(one.values, other.values)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    unsigned = np.dtype(f"u{one.itemsize}")
    return bool(np.array_equal(one.view(unsigned), other.view(unsigned)))
