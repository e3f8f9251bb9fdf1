"""An executor whose rounds are done on a GPU, each as one operation.

Blocks of a round share no band, so all of them together are an operation on whole factors: W, H
and what travels with them are joined, lie on the device for as long as a plan lasts, and are
parted again at its end. What an operation computes is the program's; kernels find out by
themselves that what they are given is on the device.

Data stay there as far as there is room; of the others the next part is copied while the present
one is worked on.
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
from daskfactor.executors.base import Executor, R, Work, perform, raise_of_gpu
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.executors.threads import ThreadsExecutor
from daskfactor.kernels.cuda.blocks import Part, Side, packed
from daskfactor.kernels.cuda.device import Device, current, is_on_host
from daskfactor.kernels.steps import to_host
from daskfactor.kernels.views import Workspace
from daskfactor.machine import available_memory

Key = tuple[tuple[int, ...], ...]
"""Blocks of a round: the bands of each factor, those of rows in ascending order."""

RESERVED = 0.25
"""Share of the free memory of a device that data leave to factors, tiles and sums."""


@dataclass(frozen=True)
class CUDA:
    """A GPU as ``device=``; ``"cuda"`` is one with these defaults.

    Parameters
    ----------
    memory_limit
        What data may take on the device: bytes, or text such as ``"8 GiB"``. By default three
        quarters of what is free. Data beyond it stream through.
    tf32
        Whether tensor cores may multiply, which round factors and residuals to 10 bits on the
        way: faster, and noise in gradients of a thousandth of them. Products are in full float32
        by default.

    Raises
    ------
    OptionError
        If the limit is no positive number of bytes, or when it is used without CuPy or a GPU.

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
            good = self.memory_limit is None or parse_bytes(self.memory_limit) > 0
        except (AttributeError, TypeError, ValueError):
            good = False
        if not good:
            raise OptionError(
                'memory_limit takes a positive number of bytes, or text such as "8 GiB", '
                f"got {self.memory_limit!r}"
            )


def key_of(ops: Sequence[Op]) -> Key:
    """Say which blocks operations have."""
    return tuple(zip(*sorted(op.block for op in ops), strict=True))


class PlacedData:
    """Data whose parts lie on the device, or come there when they are asked for.

    Whatever else is asked of them the data answer.

    Parameters
    ----------
    data
        The data.
    options
        How much of the device's memory they may take.
    whole
        Whether blocks meet factors by whole, or their own bands.
    """

    def __init__(self, data: BlockedData, options: CUDA, whole: bool = True) -> None:
        limit = options.memory_limit
        if limit is None:
            limit = int((1.0 - RESERVED) * current().free_memory)
        self.data, self._limit, self._whole = data, int(parse_bytes(limit)), whole
        self._parts: OrderedDict[Key, tuple[Part, int]] = OrderedDict()
        self._coming: tuple[Key, Part, int, Any] | None = None
        self._sent: tuple[Any, Any] | None = None
        self._pinned: dict[Key, dict[str, NDArray[Any]]] = {}
        self._pinned_bytes = 0
        self._most_pinned = available_memory() // 2
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def view(self, *block: Any) -> Part:
        """Blocks of a round, or one block, on the device."""
        bands = tuple(own if isinstance(own, tuple) else (own,) for own in block)
        with self._lock:
            if bands not in self._parts:
                self._begin(bands)
                self._arrive()
            self._parts.move_to_end(bands)
            return self._parts[bands][0]

    def begin(self, key: Key, after: Any = None) -> None:
        """Begin to copy the blocks of a round, unless they are there.

        ``after`` marks the work before that on the present part, which nothing else reads.
        """
        with self._lock:
            self._begin(key, after)

    def _begin(self, key: Key, after: Any = None) -> None:
        if key in self._parts or (self._coming is not None and self._coming[0] == key):
            return
        self._arrive()
        if self._sent is not None:
            self._sent[1].synchronize()  # what it was copied from may go now
        arrays = self._pinned.get(key) or self._packed(key)
        size = sum(own.nbytes for own in arrays.values())
        held = sum(own for _, own in self._parts.values())
        over, room = held + size > self._limit, self._most_pinned - self._pinned_bytes
        if over and size <= room and key not in self._pinned:  # it comes again and again
            self._pinned[key] = arrays
            self._pinned_bytes += size
        # The part that is worked on, the last one, stays whatever the limit is. Of the others the
        # latest goes, as its turn comes last: the earliest would always go just before its own.
        while held + size > self._limit and len(self._parts) > 1:
            _, own = self._parts.pop(list(self._parts)[-2])
            held -= own
        found, done = current().begin_copies(list(arrays.values()), after)
        self._sent = arrays, done
        rows, cols = self._sides(key)
        zeros = self.data.unstored == "zero" if self.data.is_sparse else None
        part = Part(rows, cols, dict(zip(arrays, found, strict=True)), zeros)
        self._coming = key, part, size, done

    def _arrive(self) -> None:
        """Have work that follows wait for what is being copied."""
        if self._coming is not None:
            key, part, size, done = self._coming
            current().wait_for_copies(done)
            self._parts[key] = part, size
            self._coming = None

    def rest(self) -> None:
        """Wait for copies; give back what they came from, unless it will be copied again."""
        with self._lock:
            self._arrive()
            if self._sent is not None:
                self._sent[1].synchronize()
                self._sent = None
            if not self._pinned:
                current().release_pinned()

    def _packed(self, key: Key) -> dict[str, NDArray[Any]]:
        """Put the blocks of a round together in memory that the device can read."""
        views: Any = (self.data.view(*block) for block in zip(*key, strict=True))
        return packed(views, *self._sides(key), self.data.dtype, current().pinned)

    def _sides(self, key: Key) -> tuple[Side, Side]:
        rows, cols = (
            _side(own, bands, self._whole)
            for own, bands in zip(self.data.grid.sides, key, strict=True)
        )
        return rows, cols


def _side(side: Bands, bands: Sequence[int], whole: bool) -> Side:
    offsets, which = np.asarray(side.offsets, np.int64), np.asarray(bands)
    start, count = offsets[which], np.diff(offsets)[which]
    if whole:
        return Side(start, count, int(offsets[-1]))
    return Side(np.zeros_like(start), count, int(count[0]))


class PlacedState:
    """A state whose bands are joined to one of each factor, on the device.

    Arrays that a plan does not touch stay where they are, and those that it only reads do not
    come back.
    """

    def __init__(self, state: ChainState, names: "PlanNames | None" = None) -> None:
        self._state, self._device, self._names = state, current(), names
        self._taken = [
            [name for name in bands[0].arrays if names is None or name in names.touched]
            for bands in state.factors
        ]
        self.bands = tuple(map(self._joined, state.factors, self._taken))
        self.cells = PlacedCells(state)

    def met(self, block: Key) -> tuple[FactorBand, ...]:
        """Return the factors, which every round meets by whole."""
        del block
        return self.bands

    def _joined(self, bands: Sequence[FactorBand], names: Sequence[str]) -> FactorBand:
        put = self._device.put
        arrays = {name: put(rejoined([band.arrays[name] for band in bands])) for name in names}
        values = put(rejoined([band.values for band in bands]))
        return FactorBand(0, values, arrays, dict(bands[0].counts))

    def take_draws(self) -> None:
        """Have draws lie in the memory of this process: there is more of it."""
        for band in self.bands:
            band.draws[:] = map(to_host, band.draws)

    def settle(self) -> None:
        """Part factors into their bands again, in the memory of this process."""
        for joined, bands, names in zip(self.bands, self._state.factors, self._taken, strict=True):
            self._part(joined, bands, names)
        self.cells.settle()

    def _part(self, joined: FactorBand, bands: Sequence[FactorBand], names: Sequence[str]) -> None:
        ends = list(itertools.accumulate(len(band.values) for band in bands))[:-1]

        def parted(array: Any) -> list[NDArray[Any]]:
            return np.split(to_host(array), ends)

        known, draws = self._names, list(map(parted, joined.draws))
        same = set() if known is None else set(names) - known.changed
        values = None if known is not None and known.still else parted(joined.values)
        arrays = {name: parted(own) for name, own in joined.arrays.items() if name not in same}
        for number, band in enumerate(bands):
            band.values = band.values if values is None else values[number]
            for name in set(names) - same:
                del band.arrays[name]
            band.arrays |= {name: own[number] for name, own in arrays.items()}
            band.counts = dict(joined.counts)
            band.draws += [own[number] for own in draws]
            # Sums are of the whole factor: the first band's, so that all together are that.
            band.sums |= {
                key: own if number == 0 else np.zeros_like(own)[()]
                for key, own in joined.sums.items()
            }


class PlacedCells:
    """Monitored cells of a state, those of all blocks of a round together."""

    def __init__(self, state: ChainState) -> None:
        self._state = state
        self._made: dict[Key, BlockCells | None] = {}

    def _found(self, key: Key) -> Iterator[tuple[tuple[int, ...], BlockCells]]:
        for block in zip(*key, strict=True):
            cells = self._state.cells.get(block)
            if cells is not None:
                yield block, cells

    def get(self, key: Key) -> BlockCells | None:
        """Return the cells of the blocks of a round, where they are in whole factors."""
        if key not in self._made:
            self._made[key] = self._joined(key)
        return self._made[key]

    def _joined(self, key: Key) -> BlockCells | None:
        found = list(self._found(key))
        if not found:
            return None
        put, factors = current().put, self._state.factors
        at: Any = tuple(
            put(
                np.concatenate(
                    [own.at[n] + factors[n][block[n]].offset for block, own in found]
                ).astype(np.int64)
            )
            for n in range(len(factors))
        )
        mean, m2 = (
            put(np.concatenate([getattr(own, name) for _, own in found])) for name in ("mean", "m2")
        )
        where = np.concatenate([own.where for _, own in found])
        return BlockCells(at, where, mean, m2, found[0][1].count)

    def settle(self) -> None:
        """Give the cells of each block their moments."""
        take = current().take
        for key, joined in self._made.items():
            if joined is None:
                continue
            mean, m2, at = take(joined.mean), take(joined.m2), 0
            for _, own in self._found(key):
                part = slice(at, at + own.mean.size)
                own.mean, own.m2, own.count = mean[part], m2[part], joined.count
                at = part.stop


@dataclass(frozen=True)
class OnWorkers:
    """Has single blocks and their bands lie on the GPU of the worker that has them.

    A band stays there from one of its blocks to the next one of the same worker, and goes to
    others through the memory of the process.
    """

    options: CUDA

    def __call__(
        self, op: Op, work: Work, bands: Sequence[FactorBand], cells: BlockCells | None
    ) -> PlacedData:
        """Move what an operation touches to the device; return the data, there."""
        del op
        device = current()
        device.tf32 = self.options.tf32
        for band in bands:  # which have no arrays that the plan does not touch
            if is_on_host(band.values):
                band.values = device.put(band.values)
            for name, own in band.arrays.items():
                if is_on_host(own):
                    band.arrays[name] = device.put(own)
        if cells is not None and is_on_host(cells.mean):
            cells.at = tuple(device.put(own, np.int64) for own in cells.at)
            cells.mean, cells.m2 = device.put(cells.mean), device.put(cells.m2)
        return _data_of_process(work.data, self.options)

    def home(self, bands: Iterable[FactorBand], cells: Iterable[BlockCells] = ()) -> None:
        """Move all arrays into the memory of this process."""
        for band in bands:
            band.values = to_host(band.values)
            band.arrays = {name: to_host(own) for name, own in band.arrays.items()}
            band.draws[:] = map(to_host, band.draws)
        for own in cells:
            own.at = tuple(to_host(place).astype(np.int32) for place in own.at)
            own.mean, own.m2 = to_host(own.mean), to_host(own.m2)


def gpu_name() -> str:
    """Name the GPU of this process."""
    return current().name


_of_process: list[tuple[Any, PlacedData]] = []
_lock = threading.Lock()


def _data_of_process(data: BlockedData, options: CUDA) -> PlacedData:
    """Return data that lie on this process's device, those of earlier segments if they are."""
    known = data.fingerprint, data.grid, options
    with _lock:
        if not _of_process or _of_process[0][0] != known:
            _of_process.clear()  # before there is memory for others
            _of_process.append((known, PlacedData(data, options, whole=False)))
        return _of_process[0][1]


class DeviceExecutor(Executor):
    """Runs a plan on a GPU, round by round.

    Functions of bands go to threads of this process.

    Parameters
    ----------
    options
        How the GPU is used.

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
        self._placed: PlacedData | None = None

    def _run(self, work: Work, state: ChainState) -> ChainState:
        began, evaluations, done = time.perf_counter(), list[Evaluation](), 0
        keys, device = [key_of(part.ops) for part in work.plan], self._device
        device.tf32 = self.options.tf32
        try:
            data, placed = self._place(work.data), PlacedState(state, names_of(work))
            there = replace(work, plan=(), data=data)  # type: ignore[arg-type]
            for number, part in enumerate(work.plan):
                data.view(*keys[number])
                mark = device.mark()
                op = part.ops[0]._replace(block=keys[number])  # type: ignore[arg-type]
                found, _ = perform(op, there, placed, self._workspace)  # type: ignore[arg-type]
                if found is not None:
                    evaluations.append(found)
                if number + 1 < len(keys):
                    # Packed while the device works on what was asked for just now.
                    data.begin(keys[number + 1], mark)
                done += len(part.ops)
                if op.last or op.action == Action.EVALUATE:
                    device.wait()  # progress is what is done, not what is asked for
                    placed.take_draws()
                    work.on_done(done)
            device.wait()
            placed.settle()
            data.rest()
        except MemoryError as error:
            raise_of_gpu(error)
            raise
        work.on_done(done)
        state.settle(evaluations)
        self.report.busy_seconds += time.perf_counter() - began
        return state

    def _place(self, data: BlockedData) -> PlacedData:
        """Return data with parts that lie on the device, those of the last plan if it had them."""
        if self._placed is None or self._placed.data is not data:
            self._placed = None  # before there is memory for others
            self._placed = PlacedData(data, self.options)
        return self._placed

    def _map(self, function: Any, items: Sequence[Any], name: str) -> list[R]:
        return self._threads.map(function, items, name)

    def close(self) -> None:
        """Give the device's memory, page-locked memory and the threads back."""
        self._placed = None
        self._device.release()
        self._threads.close()


class PlanNames(NamedTuple):
    """What a plan reads or writes: arrays of bands that it touches or changes, by name.

    ``still``: values stay what they are.
    """

    touched: frozenset[str]
    changed: frozenset[str]
    still: bool


def names_of(work: Work) -> PlanNames | None:
    """Find what a plan reads or writes; None: it may be anything."""
    program: Any = work.program
    if not hasattr(program, "touches"):
        return None
    kinds = {(op.action, op.last, op.wanted): op for (op, *_), *_ in work.plan}.values()
    touched, changed = (
        frozenset(name for op in kinds for name in ask(op))
        for ask in (program.touches, program.changes)
    )
    return PlanNames(touched, changed, all(op.action != Action.UPDATE for op in kinds))


def rejoined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Put arrays together; those that were cut from one another are that one, uncopied."""
    base: Any = parts[0].base
    if not isinstance(base, np.ndarray) or any(own.base is not base for own in parts):
        return np.concatenate(parts)
    places = itertools.accumulate((own.nbytes for own in parts), initial=base.ctypes.data)
    cut = all(own.ctypes.data == place for own, place in zip(parts, places, strict=False))
    all_of_it = sum(own.nbytes for own in parts) == base.nbytes and base.flags.c_contiguous
    same = base.shape[1:] == parts[0].shape[1:] and base.dtype == parts[0].dtype
    return base if cut and all_of_it and same else np.concatenate(parts)
