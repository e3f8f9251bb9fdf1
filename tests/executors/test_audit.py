"""The audit executor finds nothing in what is right, and every fault that is put there."""

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial

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
from tests.refusals import refused


def sampled(executor):
    """A run that adapts, records moments, keeps draws and watches cells."""
    V = np.random.default_rng(0).poisson(2.0, (7, 6)).astype(np.float32)
    model, sampler = dfac.TweedieNMF(2, dispersion=1.0), dfac.PSGLD(warm_start=3)
    options = {"draws": 6, "tune": 6, "blocks": 3, "random_seed": 5, "progressbar": False}
    watched = [0, 3, 6], [5, 1, 2]
    return dfac.sample(V, model, sampler, executor=executor, monitor=watched, **options)


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
@pytest.mark.parametrize(
    ("factors", "blocks", "schedule"),
    [
        *((factors, blocks, Reshuffled()) for factors, blocks in ((2, 1), (2, 5), (3, 3), (4, 2))),
        *((2, blocks, NestedReshuffled(groups)) for groups, blocks in ((2, 4), (3, 6))),
    ],
)
def test_what_is_right_passes(factors, blocks, schedule, program, way):
    oracle = bits(run(SerialExecutor(), blocks, schedule, program, factors))
    for seed in range(3):
        found = run(AuditExecutor(seed, (way,)), blocks, schedule, program, factors)
        assert bits(found) == oracle


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
    ops = [op for part in plan for op in part.ops if op.iteration >= 0]
    serial = [(op.cycle, op.iteration, tuple(op.block)) for op in ops]
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
    seen = []
    found = AuditExecutor().map(lambda item, workspace: seen.append(item) or -item, range(20))
    assert found == [-n for n in range(20)]
    assert seen != sorted(seen)


def without_metric(names):
    return lambda own, op: tuple(name for name in names(own, op) if name != "metric")


def write_of_an_evaluation(evaluate):
    def moves(own, op, data, bands, *rest):
        bands[0].values += 1
        return evaluate(own, op, data, bands, *rest)

    return moves


def stale_band(collect):
    """Workers of a ring work on the band that came a round before."""
    seen = {}

    def late(own, at, due):
        band = collect(own, at, due)
        before, seen[at] = seen.get(at), pickled(band)
        return band if before is None else replace(band, values=before.values)

    return late


def draws_that_share(finish):
    def kept(band, *rest):
        before = len(band.draws)
        finish(band, *rest)
        band.draws[before:] = [band.values] * (len(band.draws) - before)

    return kept


def moment_lost(add):
    """One of five additions to moments is left out, the count is not."""
    calls = itertools.count(1)

    def most(*arguments):
        if next(calls) % 5:
            add(*arguments)

    return most


def moment_lost_on_the_way(split):
    """Arrays that no later round needs are left behind."""

    def some(own, band, after):
        for due, part in split(own, band, after):
            if due < len(own.row_of) or len(part.values):
                yield due, part

    return some


def sum_of_the_cycle_before(finish):
    return lambda band, own, op, factor: finish(band, own, op._replace(cycle=op.cycle - 1), factor)


def fit_of_the_cycle_before(evaluate):
    return lambda own, op, *rest: evaluate(own, op._replace(cycle=op.cycle - 1), *rest)


class Fragile(np.ndarray):
    """An array that is all zeros when it has been pickled."""

    def __reduce__(self):
        return np.zeros, (self.shape, self.dtype.str)


def does_not_survive_pickling(move):
    """Operations make it: the state that they begin with has none."""

    def fragile(own, op, bands):
        move(own, op, bands)
        for band in bands:
            band.arrays["always"] = band.arrays["always"].view(Fragile)

    return fragile


def from_the_beginning_of_a_plan(move):
    """Cycles are counted from the first that a program sees: a segment begins anew."""

    def counted(own, op, bands):
        since = op.cycle - own.__dict__.setdefault("first", op.cycle)
        move(own, op._replace(iteration=op.iteration + since), bands)

    return counted


def draws_lost_between_segments(joined):
    return lambda before, *rest: joined(replace(before, draws=[]), *rest)


PSGLD, NO_ROUND = dfac.PSGLD, lambda op, number: frozenset()
SAMPLER, MIXER, HOARDING = audit_sampler, audit_mixer, partial(audit_mixer, mixer=HoardingMixer())
PIECES = ("tasks", "ring")
"""Ways that copy bands, or send parts of them."""
FAULTS = [
    # Place, name, fault, what audits it, by which ways, and what that says.
    (Program, "changes", without_metric, SAMPLER, WAYS, "undeclared write: 'metric'"),
    (Mixer, "evaluate", write_of_an_evaluation, MIXER, WAYS, "evaluation moved"),
    (Program, "touches", without_metric, SAMPLER, WAYS, "KeyError: 'metric'"),
    (SegmentRun, "_collect", stale_band, SAMPLER, ("ring",), "stale: columns band"),
    # Operations do not wait for their bands of columns.
    (threads, "_at_round", lambda _: NO_ROUND, SAMPLER, ("threads",), "out of order: columns band"),
    (FactorBand, "copy", lambda right: replace, SAMPLER, ("tasks",), "shared: the task"),
    (program, "finish_band", draws_that_share, SAMPLER, WAYS, "shared: draw 0 and values"),
    (program, "accumulate_moments", moment_lost, SAMPLER, WAYS, "lost: a moment in 'm"),
    (Transfers, "split", moment_lost_on_the_way, HOARDING, ("ring",), "stale|lost"),
    (program, "finish_band", sum_of_the_cycle_before, SAMPLER, WAYS, "a record of cycle"),
    (Program, "evaluate", fit_of_the_cycle_before, SAMPLER, WAYS, "a record of "),
    (HoardingMixer, "move", does_not_survive_pickling, HOARDING, WAYS, "stale|pickl"),
    (Mixer, "move", from_the_beginning_of_a_plan, MIXER, WAYS, "other bits"),
    (state, "_joined", draws_lost_between_segments, SAMPLER, PIECES, "draws of"),
]


@pytest.mark.parametrize(
    ("place", "name", "fault", "audit", "way", "says"),
    [(*first, way, says) for *first, ways, says in FAULTS for way in ways],
)
def test_planted_faults_are_found(place, name, fault, audit, way, says, monkeypatch):
    serial_run()  # before there is a fault
    monkeypatch.setattr(place, name, fault(getattr(place, name)))
    refused((DaskfactorError, AssertionError), says, audit, way)
