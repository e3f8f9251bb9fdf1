"""GPU executor that runs each round as one operation.

The blocks of a round share no band, so together they are one operation on complete factors. W, H
and their arrays are joined, stay on the device while a plan runs, and are split into bands at its
end. Kernels detect that their arrays are on the device.

Data stay on the device as far as memory allows. Otherwise the next part is copied while the
current one is processed.
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from dask.utils import parse_bytes
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Bands
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor, R, Work, raise_gpu_memory_error, run_operation
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.executors.threads import ThreadsExecutor
from daskfactor.kernels.cuda.blocks import Part, Side, packed
from daskfactor.kernels.cuda.device import Device, current, is_on_host
from daskfactor.kernels.steps import to_host
from daskfactor.kernels.views import Workspace
from daskfactor.machine import available_memory

RoundKey = tuple[tuple[int, ...], ...]
"""Blocks of a round: the bands of each factor, sorted by row band."""

RESERVED = 0.25
"""Fraction of free device memory that is reserved for factors, tiles and sums."""


@dataclass(frozen=True)
class CUDA:
    """Options of a GPU for ``device=``; ``"cuda"`` stands for the defaults.

    Parameters
    ----------
    memory_limit
        Memory for data on the device: bytes, or text such as ``"8 GiB"``. By default three
        quarters of the free memory. Data that do not fit are streamed.
    tf32
        Allow tensor cores to multiply, which is faster but rounds factors and residuals to 10
        bits; gradients get noise of a thousandth of their size. By default products are in full
        float32.

    Raises
    ------
    OptionError
        If the limit is not a positive number of bytes, or on use without CuPy or a GPU.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> dfac.CUDA(memory_limit="8 GiB")
    CUDA(memory_limit='8 GiB', tf32=False)
    """

    memory_limit: int | str | None = None
    tf32: bool = False

    def __post_init__(self) -> None:
        try:
            is_valid = self.memory_limit is None or parse_bytes(self.memory_limit) > 0
        except (AttributeError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise OptionError(
                'memory_limit takes a positive number of bytes, or text such as "8 GiB", '
                f"got {self.memory_limit!r}"
            )


def key_of(ops: Sequence[Op]) -> RoundKey:
    """Return the key of the blocks of some operations."""
    return tuple(zip(*sorted(op.block for op in ops), strict=True))


class DeviceData:
    """Data with parts on the device, copied there on demand.

    All other attributes are those of the data.

    Parameters
    ----------
    data
        The data.
    options
        Options with the limit on device memory.
    whole_factors
        True if blocks are used with complete factors, False with their own bands.
    """

    def __init__(self, data: BlockedData, options: CUDA, whole_factors: bool = True) -> None:
        limit = options.memory_limit
        if limit is None:
            limit = int((1.0 - RESERVED) * current().free_memory)
        self.data, self._limit, self._whole_factors = data, int(parse_bytes(limit)), whole_factors
        self._parts: OrderedDict[RoundKey, tuple[Part, int]] = OrderedDict()
        self._incoming: tuple[RoundKey, Part, int, Any] | None = None
        self._copy_source: tuple[Any, Any] | None = None
        self._pinned: dict[RoundKey, dict[str, NDArray[Any]]] = {}
        self._pinned_bytes = 0
        self._max_pinned = available_memory() // 2
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def view(self, *block: Any) -> Part:
        """Return the blocks of a round, or one block, on the device."""
        bands = tuple(axis if isinstance(axis, tuple) else (axis,) for axis in block)
        with self._lock:
            if bands not in self._parts:
                self._start_copy(bands)
                self._finish_copy()
            self._parts.move_to_end(bands)
            return self._parts[bands][0]

    def prefetch(self, key: RoundKey, after: Any = None) -> None:
        """Start to copy the blocks of a round, unless they are on the device.

        The copy starts after the work marked by ``after``, which may read the memory that it
        replaces.
        """
        with self._lock:
            self._start_copy(key, after)

    def _start_copy(self, key: RoundKey, after: Any = None) -> None:
        if key in self._parts or (self._incoming is not None and self._incoming[0] == key):
            return
        self._finish_copy()
        if self._copy_source is not None:
            self._copy_source[1].synchronize()  # its host memory may be reused now
        arrays = self._pinned.get(key) or self._packed(key)
        size = sum(array.nbytes for array in arrays.values())
        used = sum(part_size for _, part_size in self._parts.values())
        over, room = used + size > self._limit, self._max_pinned - self._pinned_bytes
        if over and size <= room and key not in self._pinned:  # it is copied again in every cycle
            self._pinned[key] = arrays
            self._pinned_bytes += size
        # The last part is in use and always stays. Of the others evict the most recently used:
        # access is cyclic, so least-recently-used would always evict the part needed next.
        while used + size > self._limit and len(self._parts) > 1:
            _, evicted_size = self._parts.pop(list(self._parts)[-2])
            used -= evicted_size
        copies, done = current().begin_copies(list(arrays.values()), after)
        self._copy_source = arrays, done
        rows, cols = self._sides(key)
        zeros = self.data.unstored == "zero" if self.data.is_sparse else None
        part = Part(rows, cols, dict(zip(arrays, copies, strict=True)), zeros)
        self._incoming = key, part, size, done

    def _finish_copy(self) -> None:
        """Make subsequent work wait for the copy in progress."""
        if self._incoming is not None:
            key, part, size, done = self._incoming
            current().wait_for_copies(done)
            self._parts[key] = part, size
            self._incoming = None

    def wait(self) -> None:
        """Wait for copies; release their host memory unless it will be copied again."""
        with self._lock:
            self._finish_copy()
            if self._copy_source is not None:
                self._copy_source[1].synchronize()
                self._copy_source = None
            if not self._pinned:
                current().release_pinned()

    def _packed(self, key: RoundKey) -> dict[str, NDArray[Any]]:
        """Return the blocks of a round packed in host memory that the device can read."""
        views: Any = (self.data.view(*block) for block in zip(*key, strict=True))
        return packed(views, *self._sides(key), self.data.dtype, current().pinned)

    def _sides(self, key: RoundKey) -> tuple[Side, Side]:
        rows, cols = (
            _side(side, bands, self._whole_factors)
            for side, bands in zip(self.data.grid.sides, key, strict=True)
        )
        return rows, cols


def _side(side: Bands, bands: Sequence[int], whole_factors: bool) -> Side:
    offsets, which = np.asarray(side.offsets, np.int64), np.asarray(bands)
    start, count = offsets[which], np.diff(offsets)[which]
    if whole_factors:
        return Side(start, count, int(offsets[-1]))
    return Side(np.zeros_like(start), count, int(count[0]))


class DeviceState:
    """State with one joined band per factor, on the device.

    Arrays that a plan does not touch are not copied to the device, and arrays that it only reads
    are not copied back.
    """

    def __init__(self, state: ChainState, names: "PlanNames | None" = None) -> None:
        self._state, self._device, self._names = state, current(), names
        self._copied_names = [
            [name for name in bands[0].arrays if names is None or name in names.touched]
            for bands in state.factors
        ]
        self.bands = tuple(map(self._joined, state.factors, self._copied_names))
        self.cells = DeviceCells(state)

    def block_bands(self, block: RoundKey) -> tuple[FactorBand, ...]:
        """Return the complete factors, which every round uses."""
        del block
        return self.bands

    def _joined(self, bands: Sequence[FactorBand], names: Sequence[str]) -> FactorBand:
        put = self._device.put
        arrays = {name: put(join_arrays([band.arrays[name] for band in bands])) for name in names}
        values = put(join_arrays([band.values for band in bands]))
        return FactorBand(0, values, arrays, dict(bands[0].counts))

    def draws_to_host(self) -> None:
        """Move draws to host memory, of which there is more."""
        for band in self.bands:
            band.draws[:] = map(to_host, band.draws)

    def write_back(self) -> None:
        """Copy factors back to the bands of the state, in host memory."""
        factors = zip(self.bands, self._state.factors, self._copied_names, strict=True)
        for joined, bands, names in factors:
            self._split(joined, bands, names)
        self.cells.write_back()

    def _split(self, joined: FactorBand, bands: Sequence[FactorBand], names: Sequence[str]) -> None:
        ends = list(itertools.accumulate(len(band.values) for band in bands))[:-1]

        def split(array: Any) -> list[NDArray[Any]]:
            return np.split(to_host(array), ends)

        plan_names, draws = self._names, list(map(split, joined.draws))
        unchanged = set() if plan_names is None else set(names) - plan_names.changed
        is_constant = plan_names is not None and plan_names.values_constant
        values = None if is_constant else split(joined.values)
        arrays = joined.arrays.items()
        changed = {name: split(array) for name, array in arrays if name not in unchanged}
        for number, band in enumerate(bands):
            band.values = band.values if values is None else values[number]
            for name in set(names) - unchanged:
                del band.arrays[name]
            band.arrays |= {name: parts[number] for name, parts in changed.items()}
            band.counts = dict(joined.counts)
            band.draws += [draw[number] for draw in draws]
            # Sums are over the complete factor: the first band gets them, the others get zeros.
            band.sums |= {
                key: value if number == 0 else np.zeros_like(value)[()]
                for key, value in joined.sums.items()
            }


class DeviceCells:
    """Monitored cells of a state, joined for all blocks of a round."""

    def __init__(self, state: ChainState) -> None:
        self._state = state
        self._joined_cells: dict[RoundKey, BlockCells | None] = {}

    def _cells_of(self, key: RoundKey) -> Iterator[tuple[tuple[int, ...], BlockCells]]:
        for block in zip(*key, strict=True):
            cells = self._state.cells.get(block)
            if cells is not None:
                yield block, cells

    def get(self, key: RoundKey) -> BlockCells | None:
        """Return the cells of a round, with their indices in the complete factors."""
        if key not in self._joined_cells:
            self._joined_cells[key] = self._joined(key)
        return self._joined_cells[key]

    def _joined(self, key: RoundKey) -> BlockCells | None:
        cells = list(self._cells_of(key))
        if not cells:
            return None
        put, factors = current().put, self._state.factors
        at: Any = tuple(
            put(
                np.concatenate(
                    [part.at[n] + factors[n][block[n]].offset for block, part in cells]
                ).astype(np.int64)
            )
            for n in range(len(factors))
        )
        mean, m2 = (
            put(np.concatenate([getattr(part, name) for _, part in cells]))
            for name in ("mean", "m2")
        )
        where = np.concatenate([part.where for _, part in cells])
        return BlockCells(at, where, mean, m2, cells[0][1].count)

    def write_back(self) -> None:
        """Copy the moments back to the cells of each block."""
        take = current().take
        for key, joined in self._joined_cells.items():
            if joined is None:
                continue
            mean, m2, at = take(joined.mean), take(joined.m2), 0
            for _, cells in self._cells_of(key):
                part = slice(at, at + cells.mean.size)
                cells.mean, cells.m2, cells.count = mean[part], m2[part], joined.count
                at = part.stop


@dataclass(frozen=True)
class WorkerPlacement:
    """Placement of single blocks and their bands on the GPU of their worker.

    A band stays on the device between operations of the same worker, and is sent to other workers
    from host memory.
    """

    options: CUDA

    def __call__(
        self, op: Op, work: Work, bands: Sequence[FactorBand], cells: BlockCells | None
    ) -> DeviceData:
        """Move the arrays of an operation to the device; return the data on the device."""
        del op
        device = current()
        device.tf32 = self.options.tf32
        for band in bands:  # they have only arrays that the plan touches
            if is_on_host(band.values):
                band.values = device.put(band.values)
            for name, array in band.arrays.items():
                if is_on_host(array):
                    band.arrays[name] = device.put(array)
        if cells is not None and is_on_host(cells.mean):
            cells.at = tuple(device.put(indices, np.int64) for indices in cells.at)
            cells.mean, cells.m2 = device.put(cells.mean), device.put(cells.m2)
        return _shared_data(work.data, self.options)

    def to_host(self, bands: Iterable[FactorBand], cells: Iterable[BlockCells] = ()) -> None:
        """Move all arrays to host memory."""
        for band in bands:
            band.values = to_host(band.values)
            band.arrays = {name: to_host(array) for name, array in band.arrays.items()}
            band.draws[:] = map(to_host, band.draws)
        for part in cells:
            part.at = tuple(to_host(indices).astype(np.int32) for indices in part.at)
            part.mean, part.m2 = to_host(part.mean), to_host(part.m2)


def gpu_name() -> str:
    """Return the name of the GPU of this process."""
    return current().name


_process_data: list[tuple[Any, DeviceData]] = []
_lock = threading.Lock()


def _shared_data(data: BlockedData, options: CUDA) -> DeviceData:
    """Return the data on this process's device, from an earlier segment if they are the same."""
    identity = data.fingerprint, data.grid, options
    with _lock:
        if not _process_data or _process_data[0][0] != identity:
            _process_data.clear()  # first release the memory of the other data
            _process_data.append((identity, DeviceData(data, options, whole_factors=False)))
        return _process_data[0][1]


class DeviceExecutor(Executor):
    """Runs a plan on a GPU, round by round.

    Functions are mapped over bands on threads of this process.

    Parameters
    ----------
    options
        Options of the GPU.

    Raises
    ------
    OptionError
        If there is no CuPy or no GPU.
    """

    name = "device"

    def __init__(self, options: CUDA | None = None) -> None:
        super().__init__()
        self.options = options or CUDA()
        self._device: Device = current()
        self.device = f"cuda: {self._device.name}{', TF32' if self.options.tf32 else ''}"
        self._threads = ThreadsExecutor()
        self._workspace = Workspace()
        self._device_data: DeviceData | None = None

    def _run(self, work: Work, state: ChainState) -> ChainState:
        start, evaluations, done = time.perf_counter(), list[Evaluation](), 0
        keys, device = [key_of(part.ops) for part in work.plan], self._device
        device.tf32 = self.options.tf32
        try:
            data, device_state = self._place(work.data), DeviceState(state, names_of(work))
            device_work = replace(work, plan=(), data=data)  # type: ignore[arg-type]
            for number, part in enumerate(work.plan):
                data.view(*keys[number])
                mark = device.mark()
                op = part.ops[0]._replace(block=keys[number])  # type: ignore[arg-type]
                evaluation, _ = run_operation(op, device_work, device_state, self._workspace)  # type: ignore[arg-type]
                if evaluation is not None:
                    evaluations.append(evaluation)
                if number + 1 < len(keys):
                    # The host packs the next round while the device runs this one.
                    data.prefetch(keys[number + 1], mark)
                done += len(part.ops)
                if op.last or op.action == Action.EVALUATE:
                    device.wait()  # report finished operations only, not queued ones
                    device_state.draws_to_host()
                    work.on_done(done)
            device.wait()
            device_state.write_back()
            data.wait()
        except MemoryError as error:
            raise_gpu_memory_error(error)
            raise
        work.on_done(done)
        state.add_evaluations(evaluations)
        self.report.busy_seconds += time.perf_counter() - start
        return state

    def _place(self, data: BlockedData) -> DeviceData:
        """Return the data on the device, from the last plan if they are the same."""
        if self._device_data is None or self._device_data.data is not data:
            self._device_data = None  # first release the memory of the other data
            self._device_data = DeviceData(data, self.options)
        return self._device_data

    def _map(self, function: Any, items: Sequence[Any], name: str) -> list[R]:
        return self._threads.map(function, items, name)

    def close(self) -> None:
        """Release the device's memory, page-locked memory and the threads."""
        self._device_data = None
        self._device.release()
        self._threads.close()


class PlanNames(NamedTuple):
    """Names of the arrays that a plan touches and changes.

    ``values_constant``: the plan does not change the values of bands.
    """

    touched: frozenset[str]
    changed: frozenset[str]
    values_constant: bool


def names_of(work: Work) -> PlanNames | None:
    """Return the names that a plan touches and changes; None if the program declares none."""
    program: Any = work.program
    if not hasattr(program, "touches"):
        return None
    kinds = {(op.action, op.last, op.options): op for (op, *_), *_ in work.plan}.values()
    touched, changed = (
        frozenset(name for op in kinds for name in names(op))
        for names in (program.touches, program.changes)
    )
    return PlanNames(touched, changed, all(op.action != Action.UPDATE for op in kinds))


def join_arrays(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the concatenated arrays; without a copy if they are all the slices of one array."""
    base: Any = parts[0].base
    if not isinstance(base, np.ndarray) or any(part.base is not base for part in parts):
        return np.concatenate(parts)
    starts = itertools.accumulate((part.nbytes for part in parts), initial=base.ctypes.data)
    adjacent = all(part.ctypes.data == start for part, start in zip(parts, starts, strict=False))
    complete = sum(part.nbytes for part in parts) == base.nbytes and base.flags.c_contiguous
    alike = base.shape[1:] == parts[0].shape[1:] and base.dtype == parts[0].dtype
    return base if adjacent and complete and alike else np.concatenate(parts)
