"""Plans, states and who does what in a ring, without a cluster."""

import itertools
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.data import grid
from daskfactor.data.grid import Cyclic, NestedReshuffled, Passes, Proportional, Reshuffled
from daskfactor.errors import GridError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.balance import LoadBalancer, load_balance
from daskfactor.executors.base import SegmentLost, Work
from daskfactor.executors.plan import (
    Action,
    CycleOptions,
    Op,
    build_plan,
    ops_by_row,
    row_band_by_round,
)
from daskfactor.executors.segment import plan_transfers
from daskfactor.executors.state import empty_state, make_state, moving_bands, place_cells
from daskfactor.executors.threads import BandScheduler, share_bands
from tests.executors.audit import Network
from tests.executors.mixer import HoardingMixer, Mixer, begin, bits, hoard, plan_of
from tests.refusals import refused

WORKERS = ["a", "b", "c", "d"]
SPEEDS = st.sampled_from([0.1, 0.5, 0.7, 1.0, 1.3, 2.0])


def check_plan(plan, blocks):
    """Assert that every round touches every band of every factor exactly once."""
    everything = set(range(blocks))
    for number, part in enumerate(plan):
        touched = zip(*(op.block for op in part.ops), strict=True)
        if len(part.ops) != blocks or any(set(bands) != everything for bands in touched):
            raise AssertionError(f"round {number} is not free of conflicts: {part.ops}")


def shuffle(cycle):
    return np.random.default_rng([7, cycle])


def checked_plan_of(schedule, blocks, cycles, factors=2, **options):
    observed = np.ones((blocks,) * factors, dtype=np.int64)
    return build_plan(schedule, observed, cycles, shuffle, lambda cycle: CycleOptions(**options))


@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([Cyclic(), Reshuffled(), Proportional(), Passes()]),
    st.booleans(),
)
def test_rounds_of_any_number_of_factors(factors, blocks, schedule, evaluate):
    """Free of conflicts, every band once a round, every block once a cycle."""
    plan = checked_plan_of(schedule, blocks, range(2), factors, evaluate=evaluate)
    check_plan(plan, blocks)
    every = sorted(itertools.product(range(blocks), repeat=factors))
    visits = {0: list[Op](), 1: list[Op](), -1: list[Op]()}
    for op in itertools.chain.from_iterable(part.ops for part in plan):
        visits[op.cycle if op.action == Action.UPDATE else -1].append(op)
    for cycle in (0, 1):
        assert len(visits[cycle]) == blocks**factors
        if not isinstance(schedule, Proportional):
            assert sorted(op.block for op in visits[cycle]) == every
        scale = 1.0 if isinstance(schedule, Passes) else blocks ** (factors - 1)
        assert {op.scale for op in visits[cycle]} == {scale}
    assert sorted(op.block for op in visits[-1]) == sorted(2 * evaluate * every)
    for factor in range(1, factors):
        met = row_band_by_round(plan, factor)
        for number, part in enumerate(plan):
            assert [met[number, op.block[factor]] for op in part.ops] == list(range(blocks))


@pytest.mark.parametrize(("groups", "blocks"), [(1, 4), (2, 4), (4, 4), (3, 6)])
def test_nested_rounds_are_free_of_conflicts(groups, blocks):
    check_plan(checked_plan_of(NestedReshuffled(groups), blocks, range(2), evaluate=True), blocks)


def test_conflicting_rounds_are_found_and_nested_orders_are_for_matrices():
    ops = checked_plan_of(Cyclic(), 3, range(1))[0].ops
    broken = [ops[0], ops[0], ops[2]]
    tensor = checked_plan_of(Cyclic(), 3, range(1), 3)[0].ops
    further = [op._replace(block=(*op.block[:2], min(op.block[2], 1))) for op in tensor]
    for own in (broken, further):
        plan = [checked_plan_of(Cyclic(), 3, range(1))[0]._replace(ops=tuple(own))]
        refused(AssertionError, r"not free of conflicts", check_plan, plan, 3)
    words = r"the two axes of a matrix, got 3 axes; use Reshuffled"
    refused(GridError, words, checked_plan_of, NestedReshuffled(2), 4, range(1), 3)


def test_iterations_number_the_parts_and_the_last_one_is_marked():
    plan = checked_plan_of(Reshuffled(), 3, range(2, 4), evaluate=True)
    whole = checked_plan_of(Reshuffled(), 3, range(4), evaluate=True)
    assert checked_plan_of(Reshuffled(), 3, range(2), evaluate=True) + plan == whole
    updates = [part.ops[0] for part in plan if part.ops[0].action == Action.UPDATE]
    assert [op.iteration for op in updates] == list(range(6, 12))
    assert [op.last for op in updates] == [False, False, True] * 2
    evaluations = [op for part in plan for op in part.ops if op.action == Action.EVALUATE]
    assert sorted((op.cycle, op.block) for op in evaluations) == sorted(
        (cycle, (row, col)) for cycle in (2, 3) for row in range(3) for col in range(3)
    )


def make_plan(schedule, blocks, cycles, seed=0, factors=2):
    return plan_of(schedule, blocks, factors, range(cycles), seed)


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
    schedules = {"cyclic": Cyclic(), "nested": NestedReshuffled(groups)}
    schedule = (schedules | {"proportional": Proportional()}).get(kind, Reshuffled())
    plan = make_plan(schedule, blocks, 3, seed, factors)
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, blocks), min(workers, blocks) - 1, replace=False))
    counts = np.diff([0, *cuts, blocks]).tolist()
    states = [begin(blocks, factors), begin(blocks, factors)]
    for state in states if isinstance(program, HoardingMixer) else ():
        hoard(state)
    network = network_of(plan, states[0], counts, program)
    network.run(rng)
    plain = HoardingMixer() if isinstance(program, Strict) else program
    oracle = SerialExecutor().run(plan, plain, states[1], None)
    assert bits(network.result()) == bits(oracle)


@pytest.mark.parametrize("factors", [2, 3, 4])
def test_orders_know_where_bands_of_every_factor_go(factors):
    plan = make_plan(Reshuffled(), 3, 1, factors=factors)
    network = network_of(plan, begin(3, factors), [1, 2], Mixer())
    for worker in network.workers:
        own, transfers = worker.scheduler.ops, worker.task.transfers
        assert len(transfers) == factors - 1
        for number, part in enumerate(plan):
            ops = {op.block[0]: op for op in part.ops}
            assert all(own[row][number] == ops[row] for row in own)
            for op, (factor, each) in itertools.product(part.ops, enumerate(transfers, 1)):
                assert each.row_of[number, op.block[factor]] == op.block[0]
                owner = worker.task.owner[op.block[0]]
                assert worker._holder((factor, op.block[factor]), number) == owner
        assert worker._holder((factors - 1, 0), len(plan)) == worker.task.rank


def test_arrays_travel_with_the_factor_that_has_them():
    """Bands of one factor wait for an array that those of another never had."""
    plan, state = make_plan(Cyclic(), 3, 2, factors=3), begin(3, 3)
    hoard(state)
    names = [state.names(factor) for factor in range(3)]
    lean = [names[0], names[1] - {"last"}, names[2] - {"always"}]
    transfers, touched = plan_transfers(plan, HoardingMixer(), lean)
    assert [set(each.next_use) for each in transfers] == [{"always"}, {"last"}]
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
            for band in moving_bands(ops[row][0].block):
                scheduler.arrive(band, 0)
        assert scheduler._choose(0) == 1


@pytest.mark.parametrize(
    ("blocks", "threads", "lanes", "speeds", "counts"),
    [
        (8, [1, 1], None, None, [4, 4]),
        (16, [1] * 16, None, None, [1] * 16),
        (8, [1] * 8, 2, None, [2, 0, 2, 0, 2, 0, 2, 0]),
        (20, [1] * 16, None, None, [2] * 10 + [0] * 6),
        (40, [1] * 10, None, None, [4] * 10),
        (3, [4, 1], None, None, [2, 1]),
        (2, [1, 1, 1], None, None, [1, 1, 0]),
        (8, [1, 1], None, [1, 0.5], [5, 3]),
        (16, [1, 1], None, [0.5, 1], [11, 5]),
        (8, [1, 1], None, [1.02, 0.98], [4, 4]),
        (4, [1, 1], None, [1, 0.1], [4, 0]),
        (6, [1, 1, 1], None, [1, 1, 1], [2, 2, 2]),
    ],
)
def test_how_bands_are_shared_out(blocks, threads, lanes, speeds, counts):
    found = share_bands(blocks, threads, lanes, speeds)
    assert sorted(found) == sorted(counts)
    if speeds:  # slow workers get fewer
        assert np.argmax(found) == np.argmax(speeds)


class Backwards(Cyclic):
    """Diagonals B - 1, …, 0: a column band's next row is the one after its last."""

    def cycle(self, *arguments):
        return super().cycle(*arguments)[::-1]


def test_the_earliest_round_goes_first_and_then_the_band_that_must_leave():
    plan = make_plan(Backwards(), 4, 1)  # round n: row r meets column (r + 3 - n) % 4
    network = network_of(plan, begin(4), [2, 2], Mixer())
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
    network = network_of(make_plan(Backwards(), 4, 1), begin(4), [2, 2], Mixer())
    one, other = network.workers
    while not network.mail:
        network.step(one)
    rank, message = network.mail[0]
    assert rank == 1
    other.receive(message)
    changed = message.band.copy()
    changed.values += 1
    other.receive(message._replace(band=changed))
    assert other._collect(message.at, message.due).values is message.band.values
    other.receive(message)  # once it is being worked on, too
    assert (message.at, message.due) not in other._waiting


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


def time_of_round(counts, threads, speeds):
    return max(-(-n // t) / s for n, t, s in zip(counts, threads, speeds, strict=True))


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 3), SPEEDS), min_size=1, max_size=4),
    st.sampled_from([None, 1]),
)
def test_no_other_shares_are_done_sooner(blocks, workers, lanes):
    threads, speeds = zip(*workers, strict=True)
    counts = share_bands(blocks, threads, lanes, speeds)
    assert sum(counts) == blocks
    every = itertools.product(range(blocks + 1), repeat=len(workers))
    best = min(time_of_round(c, threads, speeds) for c in every if sum(c) == blocks)
    assert time_of_round(counts, threads, speeds) == pytest.approx(best)


def segments(balance, count, blocks, speed, workers=2):
    """Shares of simulated segments, and the time of a round over that of a perfect division."""
    threads, found = dict.fromkeys(WORKERS[:workers], 1), []
    for number in range(count):
        shares = dict(zip(threads, balance.share(blocks, threads, None), strict=True))
        rates = {address: speed(number, address) for address in threads}
        busy = {a: 10 * n / rates[a] for a, n in shares.items() if n}
        balance.record({a: 10 * shares[a] for a in busy}, busy)
        found.append((shares, max(busy.values()) / (10 * blocks / sum(rates.values()))))
    return found


def test_a_straggler_costs_no_more_than_its_share():
    """At half speed of two: a third of the work, once two segments have been measured."""
    found = segments(LoadBalancer(), 6, 32, lambda number, address: 0.5 if address == "b" else 1.0)
    assert [shares["b"] for shares, _ in found] == [16, 16, 11, 11, 11, 11]
    assert found[1][1] == pytest.approx(1.5)
    assert found[-1][1] < 1.04  # of the grain of bands: 22 / 32 of the work takes 22, not 21.3


def test_a_worker_that_recovers_gets_its_bands_back():
    slow = range(2, 6)
    found = segments(LoadBalancer(), 30, 8, lambda n, a: 0.05 if a == "b" and n in slow else 1.0)
    counts = [shares["b"] for shares, _ in found]
    assert counts[:3] == [4, 4, 4]
    assert 0 in counts[3:8]
    assert counts[-1] == 4


def test_first_segments_and_noise_move_nothing():
    rng = np.random.default_rng(0)

    def speed(number, address):
        return 0.1 if number == 0 and address == "a" else float(1 + 0.1 * rng.uniform(-1, 1))

    found = segments(LoadBalancer(), 50, 12, speed, workers=4)
    assert {tuple(shares.values()) for shares, _ in found} == {(3, 3, 3, 3)}


def test_a_worker_that_joins_is_taken_to_be_like_the_others():
    balance = LoadBalancer()
    segments(balance, 4, 16, lambda number, address: 0.5 if address == "b" else 1.0)
    (shares, _), *_ = segments(balance, 1, 16, lambda number, address: 1.0, workers=3)
    assert shares == {"a": 7, "b": 4, "c": 5}
    assert load_balance({"a": 2.0, "b": 4.0}, {"a": 1, "b": 2}) == 1.0
    assert load_balance({"a": 4.0, "b": 1.0, "c": 1.0}, dict.fromkeys("abc", 1)) == 0.5
    assert load_balance({"a": 0.0}, {"a": 1}) == 1.0


@pytest.fixture
def small():
    made = make_state(grid.Grid.even((5, 4), 2), np.arange(10.0).reshape(5, 2), np.ones((4, 2)))
    for band in made.bands():
        band.counts["moments"] = 3
        band.sums[7] = float(band.values.sum())
    return made


def moved(band, by=0.0, times=1.0):
    band.values[:] = times * (band.values + by)
    return float(band.values.sum())


def test_a_function_meets_every_band_in_order_with_its_own_item_and_changes_it(small):
    assert small.each(moved) == [6.0, 39.0, 4.0, 4.0]
    assert small.each(moved, 0) == [6.0, 39.0]
    assert small.each(moved, 1) == [4.0, 4.0]
    assert small.each(moved, 1, [1.0, 2.0], [1.0, 10.0]) == [8.0, 120.0]
    small.each(partial(moved, times=2.0), 0)
    np.testing.assert_array_equal(small.gather("rows"), 2.0 * np.arange(10.0).reshape(5, 2))
    np.testing.assert_array_equal(small.gather("columns"), [[2, 2], [2, 2], [30, 30], [30, 30]])
    refused(ValueError, "shorter", small.each, moved, None, [1.0, 2.0])


def test_a_state_tells_what_is_small(small):
    assert small.counts == {"moments": 3}
    assert small.sums(7) == [6.0, 39.0, 4.0, 4.0]
    assert small.names(0) == frozenset()
    assert small.recorded == 0
    for band in small.factors[0]:
        band.arrays["mean"] = band.values.copy()
        band.draws.append(band.values.copy())
    assert small.names(0) == {"mean"}
    assert small.names(1) == frozenset()
    assert small.recorded == 1


def test_a_state_has_any_number_of_factors():
    """The first two keep the names that they had when there were no others."""
    sides = [grid.Bands.even(length, 2) for length in (5, 4, 3)]
    factors = [np.full((length, 2), length) for length in (5, 4, 3)]
    small = make_state(grid.Grid(*sides), *factors)
    assert (small.n_factors, small.blocks) == (3, 2)
    for number, (side, factor) in enumerate(zip(("rows", "columns", 2), factors, strict=True)):
        np.testing.assert_array_equal(small.gather(side), factor)
        assert [len(band.values) for band in small.bands(number)] == list(sides[number].sizes)
    assert len(small.bands()) == 6
    names = {f"0/{own}/{n}/values" for own in ("rows", "columns", "factor-2") for n in (0, 1)}
    assert set(small.save(None, "0")) == names
    empty = empty_state(grid.Grid(*sides), 2, np.dtype(np.float32))
    assert [band.offset for band in empty.bands()] == [0, 2, 0, 2, 0, 1]
    refused(ValueError, "shorter", make_state, grid.Grid(*sides), *factors[:2])


@pytest.mark.parametrize("lengths", [(7, 5), (7, 5, 4), (4, 6, 5, 3)])
def test_cells_are_placed_in_the_blocks_they_lie_in(lengths):
    sides, rng = [grid.Bands.even(length, 3) for length in lengths], np.random.default_rng(0)
    at = [rng.integers(0, length, 40) for length in lengths]
    tensor = grid.Grid(*sides)
    placed = place_cells(tensor, at, np.dtype(np.float32))
    assert list(placed) == sorted(placed)
    assert all(isinstance(block, grid.Block) == (len(lengths) == 2) for block in placed)
    for block, cells in placed.items():
        firsts = [side.offsets[band] for side, band in zip(sides, block, strict=True)]
        local = list(zip(*(own.tolist() for own in cells.at), strict=True))
        assert local == sorted(local)
        for own, first, place in zip(cells.at, firsts, at, strict=True):
            np.testing.assert_array_equal(own + first, place[cells.where])
        sizes = [side.sizes[band] for side, band in zip(sides, block, strict=True)]
        ends = zip(cells.at, sizes, strict=True)
        assert all((own >= 0).all() and (own < size).all() for own, size in ends)
    assert sorted(np.concatenate([own.where for own in placed.values()])) == list(range(40))
    assert place_cells(tensor, [own[:0] for own in at], np.dtype(np.float32)) == {}
