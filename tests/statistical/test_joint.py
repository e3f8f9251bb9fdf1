"""Geweke's joint test of every pair of a model and an exact sampler, and planted bugs."""

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.inference import block_hmc
from daskfactor.inference.dispersion import LearntDispersion
from daskfactor.models import gamma_factors
from tests.statistical.joint import Joint, scores
from tests.statistical.test_block_hmc import MovingMass, NoTest
from tests.statistical.test_full_batch import drift_without_turning
from tests.statistical.test_learnt import no_count, of_log
from tests.statistical.test_negative_binomial import without_normalizer
from tests.tiers import FULL

pytestmark = pytest.mark.statistical

LIMIT = 4.5
COPIES, CHAINS = (12000, 600) if FULL else (3000, 40)
"""Problems in one matrix, and chains of one problem each where it has numbers that all share."""

ROWS_X = np.random.default_rng(0).normal(size=(5, 2))
COLUMNS_X = np.eye(6)[:, :2]
WARM = {"warm_start": 5}
GIBBS, BLOCK_HMC, HMC = dfac.Gibbs(**WARM), dfac.BlockHMC(**WARM), dfac.HMC(**WARM)
BOLD = dfac.BlockHMC(step=1.1, **WARM)

RATES = {"rate_w": 1.0, "rate_h": 0.8}
POISSON = dfac.TweedieNMF(2, dispersion=1.0, **RATES)
BY_ROW = dfac.TweedieNMF(2, dispersion=1.0, rate_w="row", rate_h="column")
SHARED = dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", rate_h="component")
SHAPED = dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", shape_w="auto", shape_h="auto")
COUNTS = dfac.NegativeBinomialNMF(1, **RATES)
OF_COLUMNS = dfac.NegativeBinomialNMF(1, dispersion="column", **RATES)
FROZEN = dfac.TweedieNMF(
    2,
    dispersion=1.0,
    rate_w="row",
    rate_h=0.8,
    shape_h=0.6,
    fixed_w=np.random.default_rng(2).gamma(2.0, 0.5, (2 * COPIES, 1)),
)
LINKED = dfac.GaussianMF(1, covariates_w=ROWS_X, covariates_h=COLUMNS_X)


def local(model, sampler, **settings):
    return Joint(model, sampler, **{"copies": COPIES, "blocks": 2, "gaps": ((0, 2),)} | settings)


def shared(model, sampler, **settings):
    return Joint(model, sampler, **{"chains": CHAINS, "rounds": 8} | settings)


def power(beta, phi, **shapes):
    return dfac.TweedieNMF(1, beta=beta, dispersion=phi, **RATES, **shapes)


CASES = {
    "Gibbs": local(dfac.TweedieNMF(2, dispersion=1.0, shape_w=0.6, **RATES), GIBBS),
    "Gibbs, rates of rows and columns": local(BY_ROW, GIBBS),
    "Gibbs, rates of components": shared(SHARED, GIBBS),
    "Gibbs, frozen": local(FROZEN, GIBBS),
    "Gibbs, shapes": shared(SHAPED, GIBBS),
    "BlockHMC": local(POISSON, BLOCK_HMC),
    "BlockHMC, bold": local(POISSON, BOLD),
    "BlockHMC, logarithms": local(POISSON, BLOCK_HMC, temperature=1.0),
    "BlockHMC, normal": local(power(2.0, 1.0), BLOCK_HMC),
    "BlockHMC, gamma": local(power(0.0, 0.5, shape_w=2.0), BLOCK_HMC),
    "BlockHMC, compound": local(power(0.5, 1.0, shape_w=0.5), BLOCK_HMC),
    "BlockHMC, rates of rows and columns": local(BY_ROW, BLOCK_HMC),
    "BlockHMC, rates of components": shared(SHARED, BLOCK_HMC),
    "BlockHMC, frozen": local(FROZEN, BLOCK_HMC),
    "BlockHMC, shapes": shared(SHAPED, BLOCK_HMC),
    "BlockHMC, negative binomial": local(
        dfac.NegativeBinomialNMF(1, dispersion=0.5, **RATES), BLOCK_HMC
    ),
    "BlockHMC, its dispersion": shared(COUNTS, BLOCK_HMC),
    "BlockHMC, dispersions of columns": shared(OF_COLUMNS, BLOCK_HMC),
    "HMC, rates of rows and columns": shared(BY_ROW, HMC),
    "HMC, rates of components": shared(SHARED, HMC),
    "HMC, its dispersion": shared(COUNTS, HMC),
    "Gibbs, real-valued": shared(dfac.GaussianMF(2), dfac.Gibbs(), shape=(5, 6)),
    "Gibbs, covariates": shared(
        LINKED, dfac.Gibbs(), shape=(5, 6), gaps=tuple((4, col) for col in range(6))
    ),
}


def worst(case):
    """The largest z of any function."""
    return max(map(abs, scores(case).values()))


@pytest.mark.parametrize("name", CASES)
def test_the_prior_stays_as_it_is(name):
    z = scores(CASES[name])
    assert max(map(abs, z.values())) < LIMIT, z


@pytest.mark.parametrize(
    ("place", "name", "bug", "case"),
    [
        (block_hmc, "Path", NoTest, local(POISSON, BOLD)),
        (block_hmc, "leapfrog_drift", drift_without_turning, local(POISSON, BLOCK_HMC)),
        (block_hmc, "Path", MovingMass, local(POISSON, BLOCK_HMC)),
        (gamma_factors, "_weights", no_count, local(BY_ROW, BLOCK_HMC)),
        (gamma_factors, "_weights", no_count, shared(SHARED, BLOCK_HMC)),
        (gamma_factors, "draw_positive", of_log, shared(SHAPED, BLOCK_HMC)),
        (LearntDispersion, "normalizer", without_normalizer, shared(COUNTS, BLOCK_HMC)),
    ],
    ids=[
        "no Metropolis test",
        "reflection without turning",
        "a metric that moves",
        "no Jacobian of the rates of rows",
        "no Jacobian of the rates of components",
        "the density of the logarithm of a shape",
        "no normaliser of the dispersion",
    ],
)
def test_every_planted_bug_is_seen(place, name, bug, case, monkeypatch):
    """Each fails where the right sampler passes, in the test above."""
    monkeypatch.setattr(place, name, bug)
    assert worst(case) > LIMIT
