"""The audit executor finds nothing in what is right, and every fault that is put there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.grid import NestedReshuffled, Reshuffled
from daskfactor.errors import DaskfactorError
from daskfactor.executors import SerialExecutor, state, threads
from daskfactor.executors.segment import SegmentRun, Transfers
from daskfactor.executors.state import FactorBand
from daskfactor.inference import program
from daskfactor.inference.program import Program
from tests.executors.audit import WAYS, AuditExecutor, pickled
from tests.executors.mixer import HoardingMixer, Mixer, begin, bits, plan_of, run

Plant = Callable[[pytest.MonkeyPatch], None]


def sampled(executor):
    """A run that adapts, records moments, keeps draws and watches cells."""
    V = np.random.default_rng(0).poisson(2.0, (7, 6)).astype(np.float32)
    model, sampler = dfac.TweedieNMF(2, dispersion=1.0), dfac.PSGLD(warm_start=3)
    return dfac.sample(
        V,
        model,
        sampler,
        draws=6,
        tune=6,
        blocks=3,
        random_seed=5,
        executor=executor,
        progressbar=False,
        monitor=([0, 3, 6], [5, 1, 2]),
    )


@cache
def serial_run():
    return sampled("serial")


def audit_sampler(way):
    """Raise unless a run passes the audit with the bits of the serial one."""
    serial, audited = serial_run(), sampled(AuditExecutor(1, (way,)))
    for group in serial.children:
        one, other = (run[group].to_dataset().drop_attrs() for run in (audited, serial))
        assert one.identical(other), group


def audit_mixer(way, mixer=None, **options):
    """Raise unless a mixer passes the audit with the bits of the serial run."""
    audited = run(AuditExecutor(1, (way,)), 3, Reshuffled(), mixer or Mixer(), **options)
    serial = run(SerialExecutor(), 3, Reshuffled(), mixer, **options)
    assert bits(audited) == bits(serial), "other bits"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [Mixer(), HoardingMixer()])
@pytest.mark.parametrize(("factors", "blocks"), [(2, 1), (2, 5), (3, 1), (3, 3), (4, 2)])
def test_what_is_right_passes(factors, blocks, program, way):
    oracle = bits(run(SerialExecutor(), blocks, Reshuffled(), program, factors))
    for seed in range(3):
        found = run(AuditExecutor(seed, (way,)), blocks, Reshuffled(), program, factors)
        assert bits(found) == oracle


@pytest.mark.parametrize(("groups", "blocks"), [(2, 4), (3, 6), (1, 3)])
@pytest.mark.parametrize("way", WAYS)
def test_nested_orders_pass(groups, blocks, way):
    schedule = NestedReshuffled(groups)
    found = run(AuditExecutor(0, (way,)), blocks, schedule, HoardingMixer())
    assert bits(found) == bits(run(SerialExecutor(), blocks, schedule, HoardingMixer()))


@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_passes(way):
    audit_sampler(way)


@dataclass(frozen=True)
class Noted(Mixer):
    """Notes the order of its operations, in a list that all copies share."""

    def move(self, op, bands):
        ORDERS.append((op.cycle, op.iteration, tuple(op.block)))
        super().move(op, bands)


ORDERS = []


def test_orders_segments_and_ways_differ():
    """The audit is more than the serial run: it uses what executors are free to do."""
    plan = plan_of(Reshuffled(), 4, 2, range(4))
    serial = [
        (op.cycle, op.iteration, tuple(op.block))
        for part in plan
        for op in part.ops
        if op.iteration >= 0
    ]
    orders, segments = set(), []
    for seed in range(6):
        ORDERS.clear()
        executor = AuditExecutor(seed)
        executor.run(plan, Noted(), begin(4), None)
        assert sorted(ORDERS) == sorted(serial)
        assert serial != ORDERS
        orders.add(tuple(ORDERS))
        segments.append(executor.segments)
    assert len(orders) == 6
    assert {way for own in segments for way in own} == set(WAYS)
    assert len({len(own) for own in segments}) > 1


def test_map_keeps_the_order_of_its_items():
    seen = []

    def square(item, workspace):
        seen.append(item)
        return item * item

    assert AuditExecutor().map(square, range(20)) == [n * n for n in range(20)]
    assert seen != sorted(seen)


# -- planted faults ------------------------------------------------------------------------


def undeclared_write(patch):
    writes = dfac.PSGLD.writes
    kept = lambda own, op: tuple(name for name in writes(own, op) if name != "metric")  # noqa: E731
    patch.setattr(dfac.PSGLD, "writes", kept)


def undeclared_read(patch):
    patch.setattr(dfac.PSGLD, "reads", lambda own: ())


def write_of_an_evaluation(patch):
    evaluate = Mixer.evaluate

    def moves(own, op, data, bands, *rest):
        bands[0].values += 1
        return evaluate(own, op, data, bands, *rest)

    patch.setattr(Mixer, "evaluate", moves)


def stale_band(patch):
    """Workers of a ring work on the band that came a round before."""
    collect, seen = SegmentRun._collect, dict[Any, FactorBand]()

    def late(own, at, due):
        band = collect(own, at, due)
        before, seen[at] = seen.get(at), pickled(band)
        return band if before is None else replace(band, values=before.values)

    patch.setattr(SegmentRun, "_collect", late)


def out_of_order(patch):
    """Operations do not wait for their bands of columns."""
    patch.setattr(threads, "_at_round", lambda op, number: frozenset())


def copies_that_share(patch):
    patch.setattr(FactorBand, "copy", replace)


def draws_that_share(patch):
    finish = program.finish_band

    def kept(band, *rest):
        before = len(band.draws)
        finish(band, *rest)
        band.draws[before:] = [band.values] * (len(band.draws) - before)

    patch.setattr(program, "finish_band", kept)


def one_stream_for_all_factors(patch):
    patch.setattr(program, "factor_word", lambda factor: 0)


def one_stream_for_two_steps(patch):
    address = Program.address

    def again(own, band, iteration, *rest):
        return address(own, band, iteration // 2, *rest)

    patch.setattr(Program, "address", again)


def moment_lost(patch):
    """One of five additions to moments is left out, the count is not."""
    add, calls = program.accumulate_moments, [0]

    def most(*arguments):
        calls[0] += 1
        if calls[0] % 5:
            add(*arguments)

    patch.setattr(program, "accumulate_moments", most)


def moment_lost_on_the_way(patch):
    """Arrays that no later round needs are left behind."""
    split = Transfers.split

    def some(own, band, after):
        for due, part in split(own, band, after):
            if due < len(own.row_of) or len(part.values):
                yield due, part

    patch.setattr(Transfers, "split", some)


def sum_of_the_cycle_before(patch):
    finish = program.finish_band

    def late(band, own, op, factor):
        finish(band, own, op._replace(cycle=op.cycle - 1), factor)

    patch.setattr(program, "finish_band", late)


def fit_of_the_cycle_before(patch):
    evaluate = Program.evaluate

    def late(own, op, *rest):
        return evaluate(own, op._replace(cycle=op.cycle - 1), *rest)

    patch.setattr(Program, "evaluate", late)


class Fragile(np.ndarray[Any, Any]):
    """An array that is all zeros when it has been pickled."""

    def __reduce__(self):
        return np.zeros, (self.shape, self.dtype.str)


def does_not_survive_pickling(patch):
    """Operations make it: the state that they begin with has none."""
    move = HoardingMixer.move

    def fragile(own, op, bands):
        move(own, op, bands)
        for band in bands:
            band.arrays["always"] = band.arrays["always"].view(Fragile)

    patch.setattr(HoardingMixer, "move", fragile)


def from_the_beginning_of_a_plan(patch):
    """Cycles are counted from the first that a program sees: a segment begins anew."""
    move = Mixer.move

    def counted(own, op, bands):
        own.__dict__.setdefault("first", op.cycle)
        since = op.cycle - own.__dict__["first"]
        move(own, op._replace(iteration=op.iteration + since), bands)

    patch.setattr(Mixer, "move", counted)


def draws_lost_between_segments(patch):
    joined = state._joined

    def bare(before, *rest):
        return joined(replace(before, draws=[]), *rest)

    patch.setattr(state, "_joined", bare)


class Fault(NamedTuple):
    plant: Plant
    audit: Callable[[str], None]
    ways: tuple[str, ...]
    says: str


def hoarding(way):
    audit_mixer(way, HoardingMixer())


PIECES = ("tasks", "ring")
"""Ways that copy bands, or send parts of them."""
SAMPLER = audit_sampler, WAYS
FAULTS = {
    "an undeclared write": Fault(undeclared_write, *SAMPLER, "undeclared write: 'metric'"),
    "a write of an evaluation": Fault(
        write_of_an_evaluation, audit_mixer, WAYS, "evaluation moved"
    ),
    "an undeclared read": Fault(undeclared_read, *SAMPLER, "KeyError: 'metric'"),
    "a stale band": Fault(stale_band, audit_sampler, ("ring",), "stale: columns band"),
    "out of order": Fault(out_of_order, audit_sampler, ("threads",), "out of order: columns band"),
    "a copy that is none": Fault(copies_that_share, audit_sampler, ("tasks",), "shared: the task"),
    "a draw that is no copy": Fault(draws_that_share, *SAMPLER, "shared: draw 0 and values"),
    "two factors, one stream": Fault(one_stream_for_all_factors, *SAMPLER, "for two purposes"),
    "two steps, one stream": Fault(one_stream_for_two_steps, *SAMPLER, "for two purposes"),
    "a lost moment": Fault(moment_lost, *SAMPLER, "lost: a moment in 'm"),
    "a moment left behind": Fault(moment_lost_on_the_way, hoarding, ("ring",), "stale|lost"),
    "a sum of another cycle": Fault(sum_of_the_cycle_before, *SAMPLER, "a record of cycle"),
    "a fit of another cycle": Fault(fit_of_the_cycle_before, *SAMPLER, "a record of "),
    "an array that is not pickled": Fault(does_not_survive_pickling, hoarding, WAYS, "stale|pickl"),
    "a segment's own count": Fault(from_the_beginning_of_a_plan, audit_mixer, WAYS, "other bits"),
    "draws lost by a segment": Fault(
        draws_lost_between_segments, audit_sampler, PIECES, "draws of"
    ),
}


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, fault in FAULTS.items() for way in fault.ways]
)
def test_planted_faults_are_found(name, way, monkeypatch):
    fault = FAULTS[name]
    serial_run()  # before there is a fault
    fault.plant(monkeypatch)
    with pytest.raises((DaskfactorError, AssertionError), match=fault.says):
        fault.audit(way)
