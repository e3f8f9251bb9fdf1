"""Geweke's joint test and `calibrate`, of pairs of a model and an exact sampler; planted bugs."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.sources import as_blocks
from daskfactor.inference import calibration
from daskfactor.inference.gibbs import RATES, gathered
from daskfactor.kernels.multinomial import add_rates
from daskfactor.models.rates import draw_positive
from tests.models.test_log_linear import NoJacobian
from tests.planted import planted
from tests.statistical.joint import Joint, scores
from tests.statistical.test_gaussian import OldNormalW
from tests.statistical.test_posteriors import MovingMass, NoTest, drift_without_turning
from tests.tiers import FULL, tiered

pytestmark = pytest.mark.statistical

LIMIT = 4.5
COPIES, CHAINS = (12000, 600) if FULL else (3000, 40)
"""Problems in one matrix, and chains of one problem each where it has numbers that all share."""

ROWS_X = np.random.default_rng(0).normal(size=(5, 2))
COLUMNS_X = np.eye(6)[:, :2]
WARM = {"warm_start": 5}
GIBBS, BLOCK_HMC = dfac.Gibbs(**WARM), dfac.BlockHMC(**WARM)
BOLD = dfac.BlockHMC(step=1.1, **WARM)

RATES_OF = {"rate_w": 1.0, "rate_h": 0.8}
POISSON = dfac.TweedieNMF(2, dispersion=1.0, **RATES_OF)
BY_ROW = dfac.TweedieNMF(2, dispersion=1.0, rate_w="row", rate_h="column")
SHARED = dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", rate_h="component")
SHAPED = dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", shape_w="auto", shape_h="auto")
COUNTS = dfac.NegativeBinomialNMF(1, **RATES_OF)
OF_COLUMNS = dfac.NegativeBinomialNMF(1, dispersion="column", **RATES_OF)
LINKS = {"covariates_w": ROWS_X, "link_precision_w": 2.0}
LOG_LINEAR = replace(POISSON, n_components=1, shape_w=1.4, **LINKS)
FIXED_W = np.random.default_rng(2).gamma(2.0, 0.5, (2 * COPIES, 1))
FROZEN = replace(POISSON, rate_w="row", shape_h=0.6, fixed_w=FIXED_W)
LINKED = dfac.GaussianMF(1, covariates_w=ROWS_X, covariates_h=COLUMNS_X)
NORMAL = dfac.GaussianMF(2, noise=0.4, precision_w=1.2, precision_h=0.8, biases=False)


def local(model, sampler, **settings):
    return Joint(model, sampler, **{"copies": COPIES, "blocks": 2, "gaps": ((0, 2),)} | settings)


def shared(model, sampler, **settings):
    return Joint(model, sampler, **{"chains": CHAINS, "rounds": 8} | settings)


def power(beta, phi, **shapes):
    return dfac.TweedieNMF(1, beta=beta, dispersion=phi, **RATES_OF, **shapes)


NO_LAST_ROW = tuple((4, column) for column in range(6))
WITH_COVARIATES = {"shape": (5, 6), "gaps": NO_LAST_ROW}
COVARIATES = shared(LINKED, dfac.Gibbs(), **WITH_COVARIATES)
OF_RATES = shared(LOG_LINEAR, GIBBS, **WITH_COVARIATES)
OF_DRAWN_RATES = shared(replace(LOG_LINEAR, rate_w="auto"), BLOCK_HMC, **WITH_COVARIATES)
"""Without a given precision of the link, counts may be too large for any sampler."""

CASES = {
    "Gibbs": local(replace(POISSON, shape_w=0.6), GIBBS),
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
    "BlockHMC, negative binomial": local(replace(COUNTS, dispersion=0.5), BLOCK_HMC),
    "BlockHMC, its dispersion": shared(COUNTS, BLOCK_HMC),
    "BlockHMC, dispersions of columns": shared(OF_COLUMNS, BLOCK_HMC),
    "Gibbs, normal": local(NORMAL, dfac.Gibbs()),
    "Gibbs, real-valued": shared(dfac.GaussianMF(2), dfac.Gibbs(), shape=(5, 6)),
    "Gibbs, covariates": COVARIATES,
    "Gibbs, covariates of rates": OF_RATES,
    "BlockHMC, covariates of rates": OF_DRAWN_RATES,
}


@pytest.mark.quick(
    "Gibbs, rates of rows and columns",
    "Gibbs, shapes",
    "Gibbs, normal",
    "Gibbs, real-valued",
    "Gibbs, frozen",
    "BlockHMC",
    "BlockHMC, frozen",
    "BlockHMC, bold",
    "BlockHMC, negative binomial",
    "BlockHMC, rates of components",
)
@pytest.mark.parametrize("name", CASES)
def test_the_prior_stays_as_it_is(name):
    z = scores(CASES[name])
    assert max(map(abs, z.values())) < LIMIT, z


def no_count(shapes, totals):
    """The power of λ in the density of the factors left out."""
    return [0.5 * shape * own.entries for shape, own in zip(shapes, totals, strict=True)]


def of_log(density, shape, rng):
    """The density of log a taken for that of a."""
    return draw_positive(lambda a: density(a) - 2.0 * np.log(a), shape, rng)


class OldW:
    """The rates of H from the W that S was drawn with."""

    def step(self, program, visit):
        op, data, (rows, cols), _ = visit
        share = np.zeros(cols.values.shape)
        add_rates(data.view(*op.block), False, rows.values, share)
        first = op.iteration % (2 * data.grid.blocks) < data.grid.blocks
        gathered(cols, RATES)[:] += share if first else -share
        super().step(program, visit)


class SameNumbers:
    """W and H from the same random numbers."""

    def _move(self, program, band, factor, cycle):
        prior = program.hyper.prior(factor)
        hyper = program.hyper._replace(rate_w=prior[0], shape_w=prior[1])
        super()._move(replace(program, hyper=hyper, frozen=(None, None)), band, 0, cycle)


PATH, TURN = "inference.block_hmc.Path", "inference.block_hmc.leapfrog_drift"
WEIGHTS, SHAPES = "models.gamma_factors._weights", "models.gamma_factors.draw_positive"
DRAW_ROWS = "inference.normal_parameters.NormalRows.update"
RATES_OF_ROWS = "inference.gamma_parameters.GammaRows.update"
NORMALIZER = "inference.dispersion.MatrixDispersion.normalizer"
BUGS = {
    "no Metropolis test": (PATH, NoTest, local(POISSON, BOLD)),
    "a metric that moves": (PATH, MovingMass, local(POISSON, BLOCK_HMC)),
    "reflection without turning": (TURN, drift_without_turning, local(POISSON, BLOCK_HMC)),
    "no Jacobian of the rates of rows": (WEIGHTS, no_count, local(BY_ROW, BLOCK_HMC)),
    "no Jacobian of the rates of components": (WEIGHTS, no_count, shared(SHARED, BLOCK_HMC)),
    "the density of the logarithm of a shape": (SHAPES, of_log, shared(SHAPED, BLOCK_HMC)),
    "no normaliser of the dispersion": (NORMALIZER, lambda *_: 0.0, shared(COUNTS, BLOCK_HMC)),
    "links without a Jacobian": ("inference.gamma_parameters.LinkLaw", NoJacobian, OF_RATES),
    "rates of a former link": (RATES_OF_ROWS, lambda *_: {}, OF_RATES),
    "rows without data stay": (DRAW_ROWS, lambda *_: {}, COVARIATES),
    "H given the W before": (None, None, local(POISSON, planted(dfac.Gibbs(**WARM), OldW))),
    "W and H of the same numbers": (
        None,
        None,
        local(POISSON, planted(dfac.Gibbs(**WARM), SameNumbers)),
    ),
    "H given the normal W before": (None, None, local(NORMAL, planted(dfac.Gibbs(), OldNormalW))),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BUGS)
def test_every_planted_bug_is_seen(name, monkeypatch):
    """Each fails where the right sampler passes, in the test above."""
    place, bug, case = BUGS[name]
    if place is not None:
        monkeypatch.setattr(f"daskfactor.{place}", bug)
    assert max(map(abs, scores(case).values())) > LIMIT


@pytest.fixture
def calibrated(monkeypatch):
    """`calibrate` in double precision, for which kernels are compiled anyway."""
    monkeypatch.setattr(calibration, "as_blocks", partial(as_blocks, dtype="float64"))
    settings = {"replications": 300, "draws": 250, "tune": 150, "random_seed": 3}
    quiet = settings | {"progressbar": False, "executor": "serial"}
    return lambda model, sampler, **own: dfac.calibrate(model, (4, 3), sampler, **quiet | own)


RANKED = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
NOISY = dfac.TweedieNMF(1, beta=2.0, dispersion=4.0, rate_w=1.0, rate_h=0.5)
"""Data that say little, so that many entries come near zero."""
EACH = {"replications": 200, "blocks": 1}
"""Where a model has numbers that all rows and columns share every replication is a run: dear."""
OF_MEAN_4 = {"moments": (4.0, 1.0)}
REAL = dfac.GaussianMF(1, noise=0.5, precision_w=1.0, precision_h=2.0, biases=False)
PAIRS = {
    "Gibbs": (RANKED, GIBBS, {"missing": 0.3}),
    "Gibbs, rates of rows": (BY_ROW, GIBBS, OF_MEAN_4),
    "BlockHMC": (RANKED, BLOCK_HMC, {"blocks": 2}),
    "BlockHMC, normal": (replace(NOISY, dispersion=1.0), BLOCK_HMC, {"missing": 0.3}),
    "Gibbs, real-valued": (REAL, dfac.Gibbs(), {"missing": 0.2}),
    "BlockHMC, noisy": (NOISY, BLOCK_HMC, {"replications": 800}),
    "BlockHMC, dispersions of columns": (OF_COLUMNS, BLOCK_HMC, EACH),
}


@pytest.mark.timeout(1500)  # the longest of the full tier take minutes where nothing else runs
@pytest.mark.parametrize("name", tiered(PAIRS, {"Gibbs, rates of rows", "BlockHMC"}.__contains__))
def test_exact_samplers_are_calibrated(name, calibrated):
    model, sampler, options = PAIRS[name]
    found = calibrated(model, sampler, **options)
    assert found.attrs["calibrated"], str(found)
    assert found.sizes["replication"] == options.get("replications", 300)
    # Sizes of W and H mix slowly where replications share one matrix, and with it its scale.
    sizes = ("w_", "h_", "w[", "h[")
    names = [own for own in found["quantity"].values if not own.startswith(sizes)]
    assert np.isfinite(found["p"].sel(quantity=names)).all(), "too few draws to say anything"


class Hot:
    """The likelihood to the power 1 / 1.3."""

    def step(self, program, visit):
        hyper = program.hyper._replace(dispersion=1.3 * program.hyper.dispersion)
        super().step(replace(program, hyper=hyper), visit)


@pytest.mark.full
def test_a_temperature_is_seen(calibrated):
    found = calibrated(RANKED, planted(dfac.BlockHMC(**WARM), Hot), replications=400)
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


@pytest.mark.full
def test_a_rate_that_is_off_by_a_tenth_is_seen(calibrated):
    """By the sums of W and of H, which nothing else holds in place."""
    wrong = OtherRate(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
    for model, right in ((RANKED, True), (wrong, False)):
        found = calibrated(model, GIBBS, replications=2000, draws=150)
        assert found.attrs["calibrated"] == right, str(found)


@pytest.mark.full
def test_a_step_that_is_too_large_and_too_short_a_run_are_seen(calibrated):
    found = calibrated(RANKED, dfac.PSGLD(step=0.5, **WARM), replications=400)
    assert not found.attrs["calibrated"], str(found)
    assert "half the step" in found.verdict
    # Draws from the start, which is a mode.
    found = calibrated(RANKED, dfac.Gibbs(warm_start=100), tune=0, draws=12)
    assert not found.attrs["calibrated"], str(found)
