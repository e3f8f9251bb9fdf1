"""Who does what in a ring, without a cluster: any plan, any workers, any order of arrival."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskfactor.data.grid import Grid
from daskfactor.data.schedules import (
    Cyclic,
    NestedReshuffled,
    Proportional,
    Reshuffled,
    Schedule,
)
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import perform
from daskfactor.executors.messages import opened
from daskfactor.executors.plan import Action, CycleOptions, Op, Round, build_plan
from daskfactor.executors.records import Records, bare, with_records
from daskfactor.executors.scheduler import (
    Ledger,
    Mailbox,
    SegmentLost,
    Shipment,
    share_bands,
    tabulate,
)
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.executors.transfer_plan import travel_of
from daskfactor.kernels.workspace import Workspace
from tests.executors.mixer import HoardingMixer, Mixer, bits, hoard


def make_plan(schedule: Schedule, blocks: int, cycles: int, seed: int = 0) -> tuple[Round, ...]:
    return build_plan(
        schedule,
        np.ones((blocks, blocks), dtype=np.int64),
        range(cycles),
        lambda cycle: np.random.default_rng([seed, cycle]),
        lambda cycle: CycleOptions(keep=True, evaluate=cycle % 2 == 1),
    )


def start(blocks: int) -> ChainState:
    rng = np.random.default_rng(blocks)
    return make_state(
        Grid.even((2 * blocks, 3 * blocks), blocks),
        rng.random((2 * blocks, 2)),
        rng.random((3 * blocks, 2)),
    )


class Network:
    """Workers of a ring in one thread; a seed decides who moves and which message arrives next."""

    def __init__(
        self, plan: tuple[Round, ...], state: ChainState, counts: list[int], program: Mixer
    ) -> None:
        self.state = state
        self.program = program
        self.travel = travel_of(plan, program, state.cols)
        owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
        table = tabulate(plan, len(state.rows))
        self.ledgers = []
        for rank in range(len(counts)):
            rows = [row for row, own in enumerate(owner) if own == rank]
            box = Mailbox()
            for col, band in enumerate(state.cols):
                for due, part in self.travel.first_due(band).items():
                    if owner[table.row_of[due, col]] == rank:
                        (box.put_apart if due else box.put)(col, due, part.copy())
            own = table.rows(rows[0], rows[-1] + 1)
            self.ledgers.append(Ledger(own, self.travel, owner, rank, box, 0.01))
        self.records = [Records() for _ in counts]
        self.mail: list[tuple[int, Shipment]] = []
        self.evaluations: list[Any] = []
        self.work = Workspace()

    def step(self, rank: int) -> None:
        ledger = self.ledgers[rank]
        taken = ledger.take()
        assert taken is not None
        op, number, pieces = taken
        band = opened(pieces)
        band.arrays |= self.travel.constants_of(self.state.cols[op.block.col])
        if op.action == Action.UPDATE and isinstance(self.program, HoardingMixer):
            assert set(band.arrays) == set(self.program.touches(op))
        found = perform(
            op, self.program, None, self.state.rows[op.block.row], band, None, self.work
        )  # type: ignore[arg-type]
        if found is not None:
            self.evaluations.append(found)
        self.records[rank].strip(op.block.col, number, band)
        for shipment in ledger.finish(op, number, band):
            assert shipment.heir != rank
            self.mail.append((op.block.col, shipment))

    def run(self, rng: np.random.Generator) -> None:
        while any(ledger.remaining for ledger in self.ledgers):
            able = [rank for rank, ledger in enumerate(self.ledgers) if ledger._choose()]
            assert able or self.mail, "nobody can go on"
            choice = int(rng.integers(len(able) + len(self.mail)))
            if choice < len(able):
                self.step(able[choice])
            else:
                col, (heir, rounds, band, apart) = self.mail.pop(choice - len(able))
                box = self.ledgers[heir].box
                for _ in range(int(rng.integers(1, 3))):  # now and then twice
                    (box.put_apart if apart else box.put)(col, rounds, band)

    def result(self) -> ChainState:
        cols = {}
        for ledger in self.ledgers:
            for col, (rounds, band) in ledger.box.here.items():
                assert rounds == ledger.rounds
                assert col not in cols
                cols[col] = band
        for ledger in self.ledgers:
            assert not ledger.box.apart
            for col, arrays in ledger.ended.items():
                cols[col].arrays.update(arrays)
        bands = [
            with_records(bare(band), cols[col], col, self.records)
            for col, band in enumerate(self.state.cols)
        ]
        order = sorted(self.evaluations, key=lambda e: (e.cycle, e.block))
        return ChainState(self.state.rows, bands, {}, order)


@settings(max_examples=60)
@given(
    blocks=st.integers(1, 6),
    workers=st.integers(1, 6),
    kind=st.sampled_from(["reshuffled", "cyclic", "nested", "proportional"]),
    program=st.sampled_from([Mixer(), HoardingMixer()]),
    seed=st.integers(0, 1000),
)
def test_any_plan_on_any_workers_leaves_the_oracles_bits(
    blocks: int, workers: int, kind: str, program: Mixer, seed: int
) -> None:
    groups = next(g for g in (3, 2, 1) if blocks % g == 0)
    schedule: Schedule = {
        "reshuffled": Reshuffled(),
        "cyclic": Cyclic(),
        "nested": NestedReshuffled(groups),
        "proportional": Proportional(),
    }[kind]
    plan = make_plan(schedule, blocks, 3, seed)
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, blocks), min(workers, blocks) - 1, replace=False))
    counts = np.diff([0, *cuts, blocks]).tolist()
    states = [start(blocks), start(blocks)]
    if isinstance(program, HoardingMixer):
        for state in states:
            hoard(state)
    network = Network(plan, states[0], counts, program)
    network.run(rng)
    oracle = SerialExecutor().run(plan, program, states[1], None)  # type: ignore[arg-type]
    assert bits(network.result()) == bits(oracle)


def test_a_table_gives_back_every_operation() -> None:
    plan = make_plan(NestedReshuffled(2), 4, 3)
    table = tabulate(plan, 4)
    part = table.rows(1, 3)
    for number, group in enumerate(plan):
        ops = {op.block.row: op for op in group.ops}
        assert [part.op(number, row, 1) for row in (1, 2)] == [ops[1], ops[2]]
        assert all(table.row_of[number, op.block.col] == op.block.row for op in group.ops)
    assert isinstance(part.op(0, 1, 1), Op)


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=10))
def test_bands_are_shared_out_evenly_and_completely(blocks: int, threads: list[int]) -> None:
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
def test_how_bands_are_shared_out(
    blocks: int, threads: list[int], lanes: int | None, counts: list[int]
) -> None:
    assert sorted(share_bands(blocks, threads, lanes)) == sorted(counts)


class Backwards(Cyclic):
    """Diagonals B - 1, …, 0: a column band's next row is the one after its last."""

    def cycle(self, *arguments: Any) -> Any:
        return super().cycle(*arguments)[::-1]


def test_the_earliest_round_goes_first_and_then_the_band_that_must_leave() -> None:
    plan = make_plan(Backwards(), 4, 1)  # round n: row r meets column (r + 3 - n) % 4
    travel = travel_of(plan, Mixer(), start(4).cols)
    ledger = Ledger(tabulate(plan, 4).rows(0, 2), travel, [0, 0, 1, 1], 0, Mailbox(), 0.01)
    band = FactorBand(0, np.zeros((1, 1)))
    order = []
    ledger.box.put(3, 0, band)
    ledger.box.put(0, 0, band)
    for _ in range(3):
        op, number, _ = ledger.take() or pytest.fail("nothing to do")
        heirs = [shipment.heir for shipment in ledger.finish(op, number, band)]
        order.append((number, *op.block, heirs))
    # Column 0 moves on to row 2, another worker's, and column 3 to row 1, our own.
    assert order == [(0, 1, 0, [1]), (0, 0, 3, []), (1, 1, 3, [1])]


def test_a_second_copy_of_a_band_is_dropped() -> None:
    box = Mailbox()
    first, second = (FactorBand(0, np.full((1, 1), value)) for value in (1.0, 2.0))
    box.put(3, 4, first)
    box.put(3, 4, second)
    box.put(3, 2, second)
    assert box.here == {3: (4, first)}


def test_waiting_ends_when_nothing_comes_or_the_attempt_is_over() -> None:
    plan = make_plan(Cyclic(), 1, 1)
    table, travel = tabulate(plan, 1), travel_of(plan, Mixer(), start(1).cols)
    with pytest.raises(SegmentLost, match=r"no band arrived within 0\.01 s"):
        Ledger(table, travel, [0], 0, Mailbox(), 0.01).take()
    ledger = Ledger(table, travel, [0], 0, Mailbox(), 60.0)
    reasons: list[str] = []

    def wait() -> None:
        try:
            ledger.take()
        except SegmentLost as lost:
            reasons.append(str(lost))

    thread = threading.Thread(target=wait)
    thread.start()
    ledger.box.abort("peer has gone")
    ledger.box.abort("a later reason")
    thread.join(10)
    assert reasons == ["peer has gone"]
