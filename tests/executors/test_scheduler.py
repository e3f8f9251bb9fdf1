"""Who does what in a ring, without a cluster: any plan, any workers, any order of arrival."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.data.grid import Bands, Cyclic, NestedReshuffled, Proportional, Reshuffled
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import SegmentLost, Work
from daskfactor.executors.plan import Action, CycleOptions, build_plan, ops_by_row
from daskfactor.executors.segment import plan_transfers
from daskfactor.executors.state import make_state, travellers
from daskfactor.executors.threads import BandScheduler, share_bands
from tests.executors.audit import Network
from tests.executors.mixer import HoardingMixer, Mixer, bits, hoard


def make_plan(schedule, blocks, cycles, seed=0, factors=2):
    return build_plan(
        schedule,
        np.ones((blocks,) * factors, dtype=np.int64),
        range(cycles),
        lambda cycle: np.random.default_rng([seed, cycle]),
        lambda cycle: CycleOptions(keep=True, evaluate=cycle % 2 == 1),
    )


def start(blocks, factors=2):
    rng = np.random.default_rng(blocks)
    lengths = [size * blocks for size in (2, 3, 1, 4)[:factors]]
    sides = [Bands.even(length, blocks) for length in lengths]
    return make_state(sides, *(rng.random((length, 2)) for length in lengths))


class Strict(HoardingMixer):
    """Notices arrays that travelled though an update does not touch them, and missing ones."""

    def update(self, op, data, bands, *rest):
        for band in bands[1:]:
            assert set(band.arrays) == set(self.touches(op))
        super().update(op, data, bands, *rest)


def network_of(plan, state, counts, program):
    return Network(Work(plan, program, None), state, counts)


@pytest.mark.parametrize("factors", [2, 3, 4])
@settings(max_examples=60)
@given(
    blocks=st.integers(1, 6),
    workers=st.integers(1, 6),
    kind=st.sampled_from(["reshuffled", "cyclic", "nested", "proportional"]),
    program=st.sampled_from([Mixer(), Strict()]),
    seed=st.integers(0, 1000),
)
def test_any_plan_on_any_workers_leaves_the_oracles_bits(
    factors, blocks, workers, kind, program, seed
):
    if factors > 2:
        blocks, kind = min(blocks, 6 - factors), kind.replace("nested", "reshuffled")
    groups = next(g for g in (3, 2, 1) if blocks % g == 0)
    schedule = {
        "reshuffled": Reshuffled(),
        "cyclic": Cyclic(),
        "nested": NestedReshuffled(groups),
        "proportional": Proportional(),
    }[kind]
    plan = make_plan(schedule, blocks, 3, seed, factors)
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, blocks), min(workers, blocks) - 1, replace=False))
    counts = np.diff([0, *cuts, blocks]).tolist()
    states = [start(blocks, factors), start(blocks, factors)]
    if isinstance(program, HoardingMixer):
        for state in states:
            hoard(state)
    network = network_of(plan, states[0], counts, program)
    network.run(rng)
    plain = HoardingMixer() if isinstance(program, Strict) else program
    oracle = SerialExecutor().run(plan, plain, states[1], None)
    assert bits(network.result()) == bits(oracle)


def test_orders_give_back_every_operation():
    plan = make_plan(NestedReshuffled(2), 4, 3)
    network = network_of(plan, start(4), [1, 2, 1], Mixer())
    own = network.workers[1].scheduler.ops
    assert list(own) == [1, 2]
    for number, part in enumerate(plan):
        ops = {op.block.row: op for op in part.ops}
        assert [own[row][number] for row in (1, 2)] == [ops[1], ops[2]]
        assert isinstance(own[1][number].action, Action)
        (transfers,) = network.workers[1].order.transfers
        assert all(transfers.row_of[number, op.block.col] == op.block.row for op in part.ops)


@pytest.mark.parametrize("factors", [3, 4])
def test_orders_know_where_bands_of_every_factor_go(factors):
    plan = make_plan(Reshuffled(), 3, 1, factors=factors)
    network = network_of(plan, start(3, factors), [1, 2], Mixer())
    for worker in network.workers:
        own, transfers = worker.scheduler.ops, worker.order.transfers
        assert len(transfers) == factors - 1
        for number, part in enumerate(plan):
            ops = {op.block[0]: op for op in part.ops}
            assert all(own[row][number] == ops[row] for row in own)
            for op, (factor, each) in itertools.product(part.ops, enumerate(transfers, 1)):
                assert each.row_of[number, op.block[factor]] == op.block[0]
                owner = worker.order.owner[op.block[0]]
                assert worker._holder((factor, op.block[factor]), number) == owner
        assert worker._holder((factors - 1, 0), len(plan)) == worker.order.rank


def test_arrays_travel_with_the_factor_that_has_them():
    """Bands of one factor wait for an array that those of another never had."""
    plan, state = make_plan(Cyclic(), 3, 2, factors=3), start(3, 3)
    hoard(state)
    names = [state.names(factor) for factor in range(3)]
    lean = [names[0], names[1] - {"last"}, names[2] - {"always"}]
    transfers, touched = plan_transfers(plan, HoardingMixer(), lean)
    assert [set(each.following) for each in transfers] == [{"always"}, {"last"}]
    assert transfers[0].needed(0) == {"", "always"}
    assert transfers[1].needed(0) == {""}
    last = next(n for n, part in enumerate(plan) if part.ops[0].last)
    assert transfers[1].needed(last) == {"", "last"}
    assert transfers[1].first("last") == last
    assert touched == {"constant", "always", "last"}
    assert {each.constant for each in transfers} == {frozenset({"constant"})}


def test_an_operation_waits_for_its_bands_of_all_factors():
    ops = ops_by_row(make_plan(Cyclic(), 2, 1, factors=3))
    scheduler = BandScheduler(ops, 1, lambda band, number: False)
    assert scheduler._choose(0) is None
    (_, col, third), *_ = (op.block for op in ops[0])
    scheduler.arrive((1, col), 0)
    assert scheduler._choose(0) is None
    scheduler.arrive((2, third), 0)
    assert scheduler._choose(0) == 0
    scheduler.finish(scheduler.take(0) or pytest.fail("nothing to do"), None, 0.0)
    assert scheduler._choose(0) is None  # its next round needs bands that have been through this


def test_a_band_of_any_factor_that_must_leave_goes_first():
    ops = ops_by_row(make_plan(Cyclic(), 2, 1, factors=3))
    for leaving in (1, 2):
        wanted = leaving, ops[1][0].block[leaving]
        scheduler = BandScheduler(ops, 1, lambda band, number, own=wanted: band == own)
        for row in (0, 1):
            for band in travellers(ops[row][0].block):
                scheduler.arrive(band, 0)
        assert scheduler._choose(0) == 1


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=10))
def test_bands_are_shared_out_evenly_and_completely(blocks, threads):
    counts = share_bands(blocks, threads, None)
    assert sum(counts) == blocks
    load = -(-blocks // sum(threads))
    assert all(count <= load * most for count, most in zip(counts, threads, strict=True))
    assert all(count > 0 for count in counts) or blocks < len(threads) * load


@pytest.mark.parametrize(
    ("blocks", "threads", "lanes", "counts"),
    [
        (8, [1, 1], None, [4, 4]),
        (16, [1] * 16, None, [1] * 16),
        (8, [1] * 8, 2, [2, 0, 2, 0, 2, 0, 2, 0]),
        (20, [1] * 16, None, [2] * 10 + [0] * 6),
        (3, [4, 1], None, [2, 1]),
        (2, [1, 1, 1], None, [1, 1, 0]),
    ],
)
def test_how_bands_are_shared_out(blocks, threads, lanes, counts):
    assert sorted(share_bands(blocks, threads, lanes)) == sorted(counts)


class Backwards(Cyclic):
    """Diagonals B - 1, …, 0: a column band's next row is the one after its last."""

    def cycle(self, *arguments):
        return super().cycle(*arguments)[::-1]


def test_the_earliest_round_goes_first_and_then_the_band_that_must_leave():
    plan = make_plan(Backwards(), 4, 1)  # round n: row r meets column (r + 3 - n) % 4
    network = network_of(plan, start(4), [2, 2], Mixer())
    worker, order = network.workers[0], []
    for _ in range(3):
        op = worker.scheduler.take(0) or pytest.fail("nothing to do")
        number = worker.scheduler.position[op.block.row]
        network.mail.clear()
        worker.scheduler.finish(op, *worker.operate(op))
        order.append((number, *op.block, [rank for rank, _ in network.mail]))
    # Column 0 moves on to row 2, another worker's, and column 3 to row 1, our own.
    assert order == [(0, 1, 0, [1]), (0, 0, 3, []), (1, 1, 3, [1])]


def test_a_lane_keeps_its_rows_until_another_lags_behind():
    """Both lanes prefer their own rows; a foreign one must be a round behind to be taken."""
    ops = ops_by_row(make_plan(Cyclic(), 4, 2))
    scheduler = BandScheduler(ops, 2)
    taken = [scheduler.take(1) or pytest.fail("nothing to do") for _ in range(4)]
    assert [op.block.row for op in taken] == [2, 3, 0, 1]
    for op in (taken[0], taken[1]):
        scheduler.finish(op, None, 0.0)
    # Rows 2 and 3 wait for columns that rows 0 and 1 still hold, except one.
    again = scheduler.take(1) or pytest.fail("nothing to do")
    assert again.block.row == 2
    assert scheduler.position[2] == 1


def test_a_second_copy_of_a_band_is_dropped():
    network = network_of(make_plan(Backwards(), 4, 1), start(4), [2, 2], Mixer())
    one, other = network.workers
    while not network.mail:
        network.step(one)
    rank, parcel = network.mail[0]
    assert rank == 1
    other.arrive(parcel)
    changed = parcel.band.copy()
    changed.values += 1
    other.arrive(parcel._replace(band=changed))
    assert other._collect(parcel.at, parcel.due).values is parcel.band.values
    other.arrive(parcel)  # once it is being worked on, too
    assert (parcel.at, parcel.due) not in other._waiting


def test_waiting_ends_when_nothing_comes_or_the_attempt_is_over():
    ops = ops_by_row(make_plan(Cyclic(), 1, 1))
    idle = BandScheduler(ops, 1, lambda col, number: False, 0.01)
    assert idle.take(0) is None
    assert isinstance(idle.failure, SegmentLost)
    assert str(idle.failure) == "no band arrived within 0.01 s"
    waiting = BandScheduler(ops, 1, lambda col, number: False, 60.0)
    thread = threading.Thread(target=waiting.take, args=(0,))
    thread.start()
    waiting.fail(SegmentLost("peer has gone"))
    waiting.fail(SegmentLost("a later reason"))
    thread.join(10)
    assert not thread.is_alive()
    assert str(waiting.failure) == "peer has gone"
