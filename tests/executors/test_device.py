"""What lies on a device while a plan runs, and what comes back from it."""

from types import SimpleNamespace

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.grid import Block, Reshuffled
from daskfactor.errors import EngineError, OptionError
from daskfactor.executors import SerialExecutor, device
from daskfactor.executors.device import CUDA, DeviceData, DeviceExecutor, DeviceState, PlanNames
from daskfactor.executors.plan import Action
from daskfactor.executors.state import Evaluation
from daskfactor.kernels.steps import to_host
from tests.executors.mixer import begin, bits, hoard, plan_of
from tests.refusals import refused

KEYS = [((0, 1, 2), ((np.arange(3) + shift) % 3).tolist()) for shift in range(3)]
KEYS = [tuple(map(tuple, key)) for key in KEYS]
"""The three parts of a grid of three bands a side."""


def data_of(**options):
    V = np.random.default_rng(0).poisson(3.0, (10, 8)).astype(np.float32)
    return dfac.as_blocks(V, 3, **options), V


@pytest.fixture
def copies(stand_in, monkeypatch):
    """Bytes of the parts that were copied to the device, in their order."""
    asked, begin_copies = [], stand_in.begin_copies

    def counted(arrays, *after):
        asked.append(sum(own.nbytes for own in arrays))
        return begin_copies(arrays, *after)

    monkeypatch.setattr(stand_in, "begin_copies", counted)
    return asked


def check(device, placed, data, *keys):
    """Blocks of parts lie on the device as they are in the data."""
    for key in keys:
        part = placed.view(*key)
        for b, block in enumerate(zip(*key, strict=True)):
            own = device.take(part.arrays["values"])[b, : part.rows.count[b], : part.cols.count[b]]
            np.testing.assert_array_equal(own, np.array(data.view(*block).block))


def test_parts_stay_while_they_fit_and_come_once_if_they_were_begun(copies, stand_in):
    data, V = data_of()
    placed = DeviceData(data, CUDA(memory_limit="1 MiB"))
    check(stand_in, placed, data, *(KEYS * 3))
    assert len(copies) == 3
    assert (placed.shape, placed.grid) == (V.shape, data.grid)
    assert DeviceData(data, CUDA())._limit == int(0.75 * 2**33)  # of the free memory
    placed = DeviceData(data, CUDA())
    for key in (KEYS[1], KEYS[1], *KEYS):
        placed.prefetch(key)
    check(stand_in, placed, data, *KEYS)
    placed.prefetch(KEYS[1])
    assert len(copies) == 6


@pytest.mark.parametrize("kept", [True, False])
def test_parts_stream_where_they_do_not_fit(stand_in, copies, kept):
    """One has room: each comes again in every cycle, and is right every time. The stand-in copies
    as late as it may, from memory that must not be given back before."""
    data, _ = data_of()
    placed = DeviceData(data, CUDA(memory_limit=1))
    if not kept:
        placed._max_pinned = 0
    for _ in range(2):
        for key, after in zip(KEYS, KEYS[1:] + KEYS[:1], strict=True):
            check(stand_in, placed, data, key)
            placed.prefetch(after)
            check(stand_in, placed, data, key)  # it is not pushed out by the next one
    assert len(copies) == 7  # and is not copied a second time for that
    assert len(placed._parts) <= 2


def test_some_parts_stay_where_most_fit(stand_in, copies):
    """Had always the one gone that was used longest ago, none would be there in its turn."""
    V = np.random.default_rng(0).poisson(3.0, (12, 12)).astype(np.float32)
    data = dfac.as_blocks(V, 6)
    keys = [(tuple(range(6)), tuple((np.arange(6) + shift) % 6)) for shift in range(6)]
    size = V.nbytes // 6
    placed = DeviceData(data, CUDA(memory_limit=4 * size + size // 2))
    for key in keys * 5:
        check(stand_in, placed, data, key)
        assert sum(own for _, own in placed._parts.values()) <= 4 * size
    assert set(copies) == {size}
    assert len(copies) < 20  # of 30


def test_copies_that_come_again_and_again_are_kept_ready(stand_in, monkeypatch):
    data, _ = data_of()
    made, pinned = [], stand_in.pinned
    monkeypatch.setattr(stand_in, "pinned", lambda *own: made.append(own) or pinned(*own))
    placed = DeviceData(data, CUDA(memory_limit=1))
    check(stand_in, placed, data, *(KEYS * 4))
    few = len(made)
    check(stand_in, placed, data, *KEYS)
    assert len(made) == few < 12


def test_blocks_of_a_scratch_file_do_not_overwrite_each_other(stand_in, tmp_path, monkeypatch):
    import dask.array as da

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    V = np.random.default_rng(0).poisson(3.0, (300, 200)).astype(np.float32)
    lazy = da.from_array(V, chunks=(100, 100))  # which is not used in place
    data = dfac.as_blocks(lazy, 3, memory_limit=1)
    assert not data.in_memory
    check(stand_in, DeviceData(data, CUDA()), data, *KEYS)
    data.close()


def state_of():
    state = begin(3)
    hoard(state)
    return state


def test_bands_are_joined_and_parted_again(stand_in):
    """With arrays that come and go, and draws and sums before those of the plan."""
    state = state_of()
    for band in state.bands():
        band.draws.append(band.values + 10)
        band.sums[0] = 1.0
    wanted = [state.gather(factor) for factor in (0, 1)]
    before = [state.gather(factor, "always") for factor in (0, 1)]
    offsets, first = [band.offset for band in state.bands()], state.gather_draws(0)
    placed = DeviceState(state, None)
    for own, whole in zip(placed.bands, wanted, strict=True):
        np.testing.assert_array_equal(to_host(own.values), whole)
        own.values *= np.float32(2)
        own.arrays["always"] += np.float32(1)
        del own.arrays["constant"]
        own.arrays["fresh"] = own.values + np.float32(1)
        own.counts["draws"] = 7
        own.draws.append(own.values + np.float32(20))
        own.sums |= {1: 5.0, (1, "of components"): np.arange(3.0)}
    placed.write_back()
    for factor, whole in enumerate(wanted):
        np.testing.assert_array_equal(state.gather(factor), 2 * whole)
        np.testing.assert_array_equal(state.gather(factor, "always"), before[factor] + 1)
    for band, offset in zip(state.bands(), offsets, strict=True):
        assert band.offset == offset
        assert set(band.arrays) == {"always", "last", "idle", "fresh"}
        assert all(type(own) is np.ndarray for own in band.arrays.values())
        np.testing.assert_array_equal(band.arrays["fresh"], band.values + 1)
        assert band.counts == {"draws": 7}
    assert state.recorded == 2
    np.testing.assert_array_equal(state.gather_draws(0)[:1], first)
    np.testing.assert_array_equal(state.gather_draws(0)[1], state.gather(0) + 20)
    assert state.sums(0, 0) == [1.0, 1.0, 1.0]
    assert sum(state.sums(1, 0)) == 5.0
    np.testing.assert_array_equal(sum(state.sums((1, "of components"), 1)), np.arange(3.0))


@pytest.mark.parametrize("still", [False, True])
def test_what_a_plan_does_not_touch_or_only_reads_does_not_come_back(stand_in, still):
    state = state_of()
    before = [(band.values, dict(band.arrays)) for band in state.bands()]
    names = frozenset({"always", "last"}), frozenset({"last"})
    placed = DeviceState(state, PlanNames(*names, still))
    assert all(set(own.arrays) == {"always", "last"} for own in placed.bands)
    placed.write_back()
    for band, (values, arrays) in zip(state.bands(), before, strict=True):
        assert (band.values is values) is still
        assert [name for name in arrays if band.arrays[name] is not arrays[name]] == ["last"]


def test_bands_that_were_cut_from_a_factor_are_that_factor_again():
    factor = np.arange(12.0).reshape(6, 2).copy()
    cut = np.split(factor, [1, 4])
    assert device.join_arrays(cut) is factor
    for parts in (cut[:2], cut[::-1], [cut[0], cut[1].copy(), cut[2]], [own[:, :1] for own in cut]):
        np.testing.assert_array_equal(device.join_arrays(parts), np.concatenate(parts))


def test_cells_of_a_round_are_joined_with_their_moments(stand_in):
    state = begin(3)
    for own in state.cells.values():
        own.mean += np.float32(2)
        own.count = 4
    placed = DeviceState(state, None)
    seen = set()
    for key in KEYS:
        cells = placed.cells.get(key)
        assert placed.cells.get(key) is cells
        wanted = [block for block in zip(*key, strict=True) if block in state.cells]
        if not wanted:
            assert cells is None
            continue
        seen.update(wanted)
        W, H = (to_host(own.values) for own in placed.bands)
        rows, cols = map(to_host, cells.at)
        found = (W[rows] * H[cols]).sum(axis=1)
        alone = []
        for block in wanted:
            own, bands = state.cells[block], state.block_bands(block)
            each = [band.values[at] for band, at in zip(bands, own.at, strict=True)]
            alone += (each[0] * each[1]).sum(axis=1).tolist()
        np.testing.assert_array_equal(found, np.array(alone, np.float32))
        assert cells.count == 4
        cells.mean += np.float32(1)
        cells.m2 += np.float32(3)
        cells.count = 5
    assert seen == set(state.cells)
    placed.write_back()
    for own in state.cells.values():
        assert own.count == 5
        np.testing.assert_array_equal(own.mean, np.full_like(own.mean, 3))
        np.testing.assert_array_equal(own.m2, np.full_like(own.m2, 3))


class Doubler:
    """Doubles both factors in every update; says so in evaluations."""

    def __init__(self, error=None):
        self.error = error

    def update(self, op, data, bands, workspace):
        if self.error is not None and op.cycle == 1:
            raise self.error
        data.view(*op.block)
        for band in bands:
            band.values *= np.float32(2)
            if op.last and op.options.keep:
                band.draws.append(band.values + np.float32(0))

    def evaluate(self, op, data, bands, cells, workspace):
        total = [float(to_host(band.values.sum())) for band in bands]
        return Evaluation(op.cycle, op.block, np.array(total))


def run_on(executor, program, cycles=2):
    data, _ = data_of()
    state, told = begin(3), []
    plan = plan_of(Reshuffled(), 3, 2, range(cycles))
    return executor.run(plan, program, state, data, told.append), told, plan


def test_a_plan_is_run_round_by_round(stand_in, copies):
    """Three rounds in each of two cycles, and three that evaluate in the second."""
    executor = DeviceExecutor()
    state, told, plan = run_on(executor, Doubler())
    np.testing.assert_array_equal(state.gather(0), begin(3).gather(0) * 64)
    np.testing.assert_array_equal(state.gather_draws(1)[0], begin(3).gather(1) * 8)
    assert told[-1] == sum(len(part.ops) for part in plan)
    assert told == sorted(told)
    rounds = sum(part.ops[0].action == Action.EVALUATE for part in plan)
    assert len(state.evaluations) == rounds == 3
    assert executor.report.busy_seconds > 0
    # The program says nothing of where it runs: processors do the same.
    wanted = SerialExecutor().run(plan, Doubler(), begin(3), data_of()[0])
    assert bits(state)[:4] == bits(wanted)[:4]
    data, before = data_of()[0], len(copies)
    for _ in range(2):  # data of the last plan stay
        executor.run(plan, Doubler(), begin(3), data)
    assert len(copies) == before + 3
    executor.close()
    assert executor.on_device


def test_errors_name_the_blocks_and_a_full_device_is_one_sentence(stand_in):
    class OutOfMemoryError(MemoryError):
        """As CuPy has one, which other processes may not know."""

        __module__ = "cupy.cuda.memory"

    executor = DeviceExecutor()
    with pytest.raises(MemoryError) as too_large:
        np.empty(2**60, np.uint8)
    for error, words, own in (
        (EngineError, r"memory of the GPU is full \(no more\); pass", OutOfMemoryError("no more")),
        (MemoryError, "of this process", MemoryError("of this process")),
        (MemoryError, "Unable to allocate", too_large.value),
        (EngineError, r"row band .*0, 1, 2.*cycle 1.*Error: odd", ZeroDivisionError("odd")),
    ):
        refused(error, words, run_on, executor, Doubler(own))
    state, *_ = run_on(executor, Doubler())  # and the executor still works
    np.testing.assert_array_equal(state.gather(0), begin(3).gather(0) * 64)
    assert executor.map(lambda item, workspace: item + 1, [1, 2, 3]) == [2, 3, 4]
    executor.close()


def test_rounds_are_known_by_their_blocks_in_the_order_of_rows():
    ops = [SimpleNamespace(block=Block(*own)) for own in ((2, 0), (0, 1), (1, 2))]
    assert device.key_of(ops) == ((0, 1, 2), (1, 2, 0))


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_rounded_where_that_was_asked_for(stand_in, tf32):
    class Multiplier(Doubler):
        def update(self, op, data, bands, workspace):
            a = stand_in.put(np.ones((1, 2, 3), np.float32))
            stand_in.products(a, a, (False, True))

    other = DeviceExecutor(CUDA(tf32=not tf32))  # which has no say
    run_on(DeviceExecutor(CUDA(tf32=tf32)), Multiplier())
    modes = stand_in.cupy.cuda.cublas.modes
    assert set(modes) == ({3, 0} if tf32 else set())
    other.close()


@pytest.mark.parametrize("limit", ["x", 0, -1, "-3 MiB", 1.5j, []])
def test_a_limit_is_a_positive_number_of_bytes(limit):
    refused(OptionError, "memory_limit takes a positive number of bytes", CUDA, memory_limit=limit)
