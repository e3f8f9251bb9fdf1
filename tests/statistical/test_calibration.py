"""`calibrate` on every pair of a model and an exact sampler, and planted bugs that it sees."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.sources import as_blocks
from daskfactor.inference import block_hmc, calibration
from daskfactor.models import gamma_factors
from tests.statistical.test_block_hmc import MovingMass, NoTest
from tests.statistical.test_full_batch import drift_without_turning
from tests.statistical.test_learnt import no_count
from tests.tiers import tiered

pytestmark = pytest.mark.statistical


@pytest.fixture(autouse=True)
def in_double_precision(monkeypatch):
    """As the other tests against exact posteriors: kernels of every law are compiled once."""
    monkeypatch.setattr(calibration, "as_blocks", partial(as_blocks, dtype="float64"))


WARM = {"warm_start": 5}
GIBBS, BLOCK_HMC, HMC = dfac.Gibbs(**WARM), dfac.BlockHMC(**WARM), dfac.HMC(**WARM)
POISSON = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
ONE = replace(POISSON, n_components=1)
NORMAL = replace(ONE, beta=2.0)
NOISY = replace(NORMAL, dispersion=4.0)
"""Data that say little, so that many entries come near zero."""
FIXED = dfac.GaussianMF(1, noise=0.5, precision_w=1.0, precision_h=2.0, biases=False)
BY_ROW = dfac.TweedieNMF(2, dispersion=1.0, rate_w="row", rate_h="column")
SHARED = dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", rate_h="component")
SHAPED = dfac.TweedieNMF(1, dispersion=1.0, rate_w="component", shape_h="auto")
COUNTS = dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=0.5)
LINKED = dfac.GaussianMF(1, covariates_w=np.eye(4)[:, :2], covariates_h=np.ones((3, 1)))

EACH = {"replications": 200, "blocks": 1}
"""Where a model has numbers that all rows and columns share every replication is a run: dear.

`test_joint.py` has all these pairs, too, and takes a second for each.
"""
OF_MEAN_4 = {"moments": (4.0, 1.0)}
PAIRS = {
    "Gibbs": (POISSON, GIBBS, {"missing": 0.3}),
    "Gibbs, auto rates": (
        dfac.TweedieNMF(2, dispersion=1.0, shape_w=0.6, shape_h=2.0),
        GIBBS,
        OF_MEAN_4,
    ),
    "Gibbs, rates of rows": (BY_ROW, GIBBS, OF_MEAN_4),
    "Gibbs, rates of components": (SHARED, GIBBS, OF_MEAN_4 | EACH),
    "Gibbs, shapes": (SHAPED, GIBBS, OF_MEAN_4 | EACH),
    "BlockHMC": (POISSON, BLOCK_HMC, {"blocks": 2}),
    "BlockHMC, normal": (NORMAL, BLOCK_HMC, {"missing": 0.3}),
    "BlockHMC, noisy": (NOISY, BLOCK_HMC, {"replications": 800}),
    "BlockHMC, gamma": (
        dfac.TweedieNMF(1, beta=0.0, dispersion=0.3, rate_w=2.0, rate_h=2.0, shape_w=2.0),
        BLOCK_HMC,
        {"replications": 200, "tune": 400},
    ),
    "BlockHMC, compound": (replace(ONE, beta=0.5, shape_w=0.5), BLOCK_HMC, {"replications": 200}),
    "BlockHMC, rates of rows": (BY_ROW, BLOCK_HMC, OF_MEAN_4),
    "BlockHMC, rates of components": (SHARED, BLOCK_HMC, OF_MEAN_4 | EACH | {"draws": 500}),
    "BlockHMC, shapes": (SHAPED, BLOCK_HMC, OF_MEAN_4 | EACH | {"draws": 500}),
    "BlockHMC, negative binomial": (
        dfac.NegativeBinomialNMF(1, dispersion=0.5, rate_w=1.0, rate_h=0.5),
        BLOCK_HMC,
        {"replications": 200},
    ),
    "BlockHMC, its dispersion": (COUNTS, BLOCK_HMC, EACH),
    "BlockHMC, dispersions of columns": (replace(COUNTS, dispersion="column"), BLOCK_HMC, EACH),
    "HMC": (POISSON, HMC, {"together": 10, "replications": 200, "draws": 400}),
    "HMC, rates of components": (SHARED, HMC, OF_MEAN_4 | EACH | {"draws": 500}),
    "HMC, its dispersion": (COUNTS, HMC, EACH | {"draws": 400}),
    "Gibbs, real-valued": (FIXED, dfac.Gibbs(), {"missing": 0.2}),
    "Gibbs, all sampled": (dfac.GaussianMF(1), dfac.Gibbs(), EACH),
    "Gibbs, covariates": (LINKED, dfac.Gibbs(), EACH),
}
"""Of every model with a prior and every sampler that is exact for it."""


def calibrated(model, sampler, **options):
    settings = {"replications": 300, "draws": 250, "tune": 150, "random_seed": 3}
    quiet = {"progressbar": False, "executor": "serial"}
    return dfac.calibrate(model, (4, 3), sampler, **quiet, **settings | options)


QUICK = ("Gibbs", "Gibbs, rates of rows", "BlockHMC", "BlockHMC, normal", "Gibbs, real-valued")
"""Pairs of the quick tier, where `test_joint.py` has all; every other one takes long."""


@pytest.mark.parametrize("name", tiered(PAIRS, QUICK.__contains__))
def test_exact_samplers_are_calibrated(name):
    model, sampler, options = PAIRS[name]
    found = calibrated(model, sampler, **options)
    assert found.attrs["calibrated"], str(found)
    assert found.sizes["replication"] == options.get("replications", 300)
    # Sizes of W and H mix slowly where replications share one matrix, and with it its scale.
    names = [
        own for own in found["quantity"].values if not own.startswith(("w_", "h_", "w[", "h["))
    ]
    assert np.isfinite(found["p"].sel(quantity=names)).all(), "too few draws to say anything"


class Hot(dfac.BlockHMC):
    """The likelihood to the power 1 / 1.3."""

    def block_step(self, program, *rest):
        hyper = program.hyper._replace(dispersion=1.3 * program.hyper.dispersion)
        super().block_step(replace(program, hyper=hyper), *rest)


@pytest.mark.parametrize(
    ("place", "name", "bug", "pair", "replications"),
    tiered(
        [
            (block_hmc, "Path", NoTest, (POISSON, dfac.BlockHMC(step=1.1, **WARM)), 200),
            (block_hmc, "leapfrog_drift", drift_without_turning, (NOISY, BLOCK_HMC), 800),
            (block_hmc, "Path", MovingMass, (POISSON, BLOCK_HMC), 400),
            (gamma_factors, "_weights", no_count, (BY_ROW, GIBBS), 400),
        ],
        lambda own: own[2] in (NoTest, no_count),  # test_joint.py has all
    ),
    ids=[
        "no Metropolis test",
        "reflection without turning",
        "a metric that moves",
        "no Jacobian of the rates",
    ],
)
def test_planted_bugs_are_seen(place, name, bug, pair, replications, monkeypatch):
    monkeypatch.setattr(place, name, bug)
    found = calibrated(*pair, replications=replications, blocks=1)
    assert not found.attrs["calibrated"], str(found)


def test_a_temperature_is_seen():
    found = calibrated(POISSON, Hot(**WARM), replications=400)
    assert not found.attrs["calibrated"], str(found)
    assert found["quantity"][0] == "log_likelihood"
    assert found["shift"][0] > 5
    assert "NOT CALIBRATED" in found.verdict
    assert "lie too low" in found.verdict


class OtherRate(dfac.TweedieNMF):
    """Factors whose rate is not the model's."""

    def draw_prior(self, *rest):
        true = super().draw_prior(*rest)
        return true._replace(W=true.W / 1.1)


def test_a_rate_that_is_off_by_a_tenth_is_seen():
    """By the sums of W and of H, which nothing else holds in place."""
    wrong = OtherRate(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
    for model, right in ((POISSON, True), (wrong, False)):
        found = calibrated(model, dfac.Gibbs(**WARM), replications=2000, draws=150)
        assert found.attrs["calibrated"] == right, str(found)


def test_a_step_that_is_too_large_is_seen():
    found = calibrated(POISSON, dfac.PSGLD(step=0.5, **WARM), replications=400)
    assert not found.attrs["calibrated"], str(found)
    assert "half the step" in found.verdict


def test_too_short_a_run_is_seen():
    """Draws from the start, which is a mode."""
    found = calibrated(POISSON, dfac.Gibbs(warm_start=100), tune=0, draws=12)
    assert not found.attrs["calibrated"], str(found)
