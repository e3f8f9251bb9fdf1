"""`SGHMC` of non-negative models against exact posteriors, and planted bugs that must not pass."""

from dataclasses import replace

import numpy as np
import pytest

from daskfactor.data.grid import Proportional, Reshuffled
from daskfactor.inference import sghmc
from daskfactor.inference.sghmc import SQUARES_LENGTH, SquaresSGHMC
from tests.statistical.distance import BY_NAME, exact_distance
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

SPIKES = BY_NAME["poisson-small"]._replace(name="spikes", shape_w=0.5, shape_h=0.5)
SKEWED = BY_NAME["gaussian-skewed"]
CASES = [
    *(BY_NAME[name] for name in ("poisson", "poisson-gaps", "poisson-tall", "poisson-two-gaps")),
    *(BY_NAME[name] for name in ("poisson-overdispersed", "gaussian-two", "gamma")),
    SPIKES,
    SKEWED._replace(name="gaussian-shapes", shape_w=3.0, shape_h=0.5),
    BY_NAME["poisson"]._replace(name="poisson-shapes", shape_w=0.6, shape_h=1.6),
    BY_NAME["poisson-gaps"]._replace(name="poisson-three-gaps", K=3),
]


def distance(case, sampler, **settings):
    """How far a run is from the posterior; ``passes`` has the tolerances of an exact sampler."""
    settings = {"copies": 2048, "tune": 100, "draws": 250, **settings}
    found = exact_distance(case, sampler, **settings)
    assert found.error < 0.02, "too few draws for the tolerances to mean anything"
    return found


@pytest.mark.parametrize(
    "case",
    tiered(CASES, lambda case: case.name in ("poisson-two-gaps", "gamma", "spikes")),
    ids=lambda case: case.name,
)
def test_exact_posteriors(case):
    """At the automatic step, as near as samplers without a step are held to."""
    found = distance(case, SquaresSGHMC(warm_start=5))
    assert found.passes, str(found)


@pytest.mark.full
def test_the_length_for_large_data_is_too_long_for_tiny_ones():
    """Of steep laws, above all: variances are several times too large."""
    sampler = SquaresSGHMC((SQUARES_LENGTH / 2) ** 2, warm_start=5)
    found = distance(BY_NAME["gamma-two-gaps"], sampler)
    assert min(found.ratios.ravel()) > 3, str(found)


@pytest.mark.parametrize(
    "schedule", tiered([Reshuffled(), Proportional()], lambda own: own == Proportional())
)
def test_random_orders_of_the_parts(schedule):
    """Parts drawn with replacement at the step of others would double the variance."""
    sampler = SquaresSGHMC(schedule=schedule, warm_start=5)
    found = distance(BY_NAME["poisson-two-gaps"], sampler, copies=1024, tune=300, draws=1500)
    assert found.passes, str(found)


@pytest.mark.full
def test_laws_that_are_steep_far_out_at_a_smaller_step():
    found = distance(BY_NAME["gamma-gaps"], SquaresSGHMC((0.3 / 2) ** 2, warm_start=5))
    assert found.passes, str(found)


def test_dense_blocks_in_a_random_order():
    sampler = SquaresSGHMC((0.3 / 2) ** 2, schedule=Reshuffled(), warm_start=5)
    found = distance(BY_NAME["poisson-gaps"], sampler, copies=128, draws=1500, dense=True)
    assert found.passes, str(found)


def not_across(*args):
    """The momentum across is left out: entries are squares of numbers, not of vectors."""
    args[2][:] = 0
    kick_flight(*args)


kick_flight = sghmc.kick_flight


class NoPrior(SquaresSGHMC):
    def _move(self, program, *rest):
        super()._move(replace(program, hyper=program.hyper._replace(rate_w=0.0)), *rest)


class NoScale(SquaresSGHMC):
    def block_step(self, program, op, *rest):
        super().block_step(program, op._replace(scale=1.0), *rest)


def without_turning(theta, along, across, *rest):
    """The momentum of a vector keeps its parts along it and across it as it flies by."""
    kept = along.copy(), across.copy()
    grad, metric, rate, size, share = rest
    kick_flight(theta, along, across, grad, metric, rate, size, share)
    push = size * np.sqrt(theta / metric) * (grad - rate)
    along[:], across[:] = kept[0] + np.clip(push, -1, 1), kept[1]


@pytest.mark.parametrize("bug", [NoPrior, NoScale, not_across, without_turning])
def test_every_planted_bug_is_seen(bug, monkeypatch):
    """Each fails where the right sampler passes, in the first test."""
    kind = bug if isinstance(bug, type) else SquaresSGHMC
    if kind is SquaresSGHMC:
        monkeypatch.setattr(sghmc, "kick_flight", bug)
    found = distance(BY_NAME["poisson"], kind(warm_start=5))
    assert not found.passes, str(found)
