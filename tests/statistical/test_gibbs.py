"""Gibbs sampling against exact posteriors, by Geweke's joint test, and planted bugs."""

from dataclasses import replace

import numpy as np
import pytest

from daskfactor.inference.gibbs import ALLOCATED, RATES, Gibbs, gathered
from daskfactor.inference.program import Program
from daskfactor.kernels.multinomial import add_rates
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.tweedie_law import Tweedie
from tests.statistical.allocations import Priors, posterior
from tests.statistical.distance import BY_NAME, Distance
from tests.statistical.exact import CASES, reference_posterior
from tests.statistical.geweke import Problem, scores
from tests.statistical.replicas import run_copies
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

POISSON = [case for case in CASES if case.beta == 1.0 and case.dispersion == 1.0]


def distance(case, exact, **settings):
    settings = {"copies": 1024, "tune": 100, "draws": 100, **settings}
    found = Distance(run_copies(case, Gibbs(warm_start=5), **settings)[0], exact)
    assert found.error < 0.02, "too few draws for the tolerances to mean anything"
    return found


@pytest.mark.parametrize(
    "case",
    tiered(POISSON, lambda case: case.name in ("poisson-gaps", "poisson-two")),
    ids=lambda case: case.name,
)
def test_exact_posteriors(case):
    found = distance(case, reference_posterior(case))
    assert found.passes, str(found)


GAMMA = [
    ("poisson", Priors(1.0, 0.7, 2.5, 1.0)),
    ("poisson-small", Priors(1.2, 0.8, 0.5, 3.0)),
    ("poisson-two", Priors(2.0, 1.0, 2.0, 0.6)),
]


@pytest.mark.parametrize(("name", "priors"), tiered(GAMMA, lambda own: own[0] == "poisson-two"))
def test_exact_posteriors_under_gamma_priors(name, priors):
    case = BY_NAME[name]._replace(**priors._asdict())
    found = distance(case, posterior(case.V, case.K, priors))
    assert found.passes, str(found)


class NoPriorShape(Gibbs):
    """Exponential priors taken for flat ones with half a count."""

    def _move(self, program, band, factor, cycle):
        gathered(band, ALLOCATED)[:] -= 0.5
        super()._move(program, band, factor, cycle)


class OneMore(Gibbs):
    """S off by one in one entry of a row."""

    def _move(self, program, band, factor, cycle):
        if factor == 0:
            gathered(band, ALLOCATED)[:, 0] += 1
        super()._move(program, band, factor, cycle)


class NoPriorRate(Gibbs):
    def _move(self, program, band, factor, cycle):
        gathered(band, RATES)[:] -= 0.5 * program.hyper.prior(factor)[0]
        super()._move(program, band, factor, cycle)


class OldW(Gibbs):
    """The rates of H from the W that S was drawn with."""

    def block_step(self, program, op, data, bands, work):
        rows, cols = bands
        share = np.zeros(cols.values.shape)
        add_rates(data.view(*op.block), False, rows.values, share)
        first = op.iteration % (2 * data.grid.blocks) < data.grid.blocks
        gathered(cols, RATES)[:] += share if first else -share
        super().block_step(program, op, data, bands, work)


class SameNumbers(Gibbs):
    """W and H from the same random numbers."""

    def _move(self, program, band, factor, cycle):
        prior = program.hyper.prior(factor)
        hyper = program.hyper._replace(rate_w=prior[0], shape_w=prior[1])
        super()._move(replace(program, hyper=hyper, frozen=(None, None)), band, 0, cycle)


HYPER = Hyperparameters(1.0, 1.0, 0.8, 1.0, 1.5)
PROBLEM = Problem(copies=2000, rows=2, cols=3, K=2, gaps=((0, 2),))
ROUNDS = 12


def joint(kind, hyper=HYPER):
    program = Program(kind(), Tweedie(1.0), 1e-9, hyper, (3, 5))
    return scores(PROBLEM, Gibbs(), program, hyper, ROUNDS)


@pytest.mark.parametrize("hyper", [HYPER, Hyperparameters(1.0, 2.0, 0.7, 0.6, 3.0)])
def test_gewekes_joint_test(hyper):
    z = joint(Gibbs, hyper)
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("bug", [NoPriorShape, OneMore, NoPriorRate, OldW, SameNumbers])
def test_gewekes_joint_test_sees_every_planted_bug(bug):
    z = joint(bug)
    assert np.abs(z).max() > 4.5
