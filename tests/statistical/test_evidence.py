"""Evidences against exact ones, by quadrature and enumeration; power posteriors."""

import math
import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.sources import as_blocks
from daskfactor.errors import SamplingWarning
from daskfactor.evidence.tempered import TemperedChains
from daskfactor.evidence.thermodynamic import standard_error
from daskfactor.executors import SerialExecutor
from daskfactor.inference import block_hmc
from daskfactor.inference.block_hmc import LOGARITHMS, BlockHMC, Path
from daskfactor.inference.program import normalizer
from tests.models.laws import log_normalizer
from tests.statistical.allocations import Priors, posterior
from tests.statistical.exact import Case, reference_posterior
from tests.statistical.replicas import BY_NAME, model_of, replicate_sparse
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

QUIET = {"progressbar": False, "executor": "serial"}
TINY = np.array([[2, 1], [0, 3]])
SMALL = np.array([[4.0, 7], [2, 5]])


def stored(V):
    """As the data of the tests against exact posteriors, whose kernels are compiled anyway."""
    return dfac.as_blocks(replicate_sparse(V, 1), 1, unstored="missing", dtype="float64")


def exact_evidence(V, beta=1.0, dispersion=1.0, rate_w=1.0, rate_h=1.0, shape_w=1.0, shape_h=1.0):
    """Log evidence of one component, on a grid over the factor of the few rows."""
    turned = Case("turned", V.T, beta, dispersion, rate_h, rate_w, 1, shape_h, shape_w)
    return reference_posterior(turned)["log_evidence"]


@pytest.mark.parametrize("components", tiered([1, 2, 3], lambda own: own == 2))
def test_tiny_counts_by_enumeration(components):
    X = TINY if components < 3 else np.array([[2, 1], [0, 2]])
    exact = posterior(X, components, Priors())["log_evidence"]
    model = dfac.TweedieNMF(components, rate_w=1.0, rate_h=1.0)
    found = dfac.log_evidence(X, model, random_seed=components, **QUIET)
    assert abs(found.value - exact) < min(0.6, 5 * found.total_error)


@pytest.mark.parametrize(
    ("beta", "dispersion"), tiered([(2.0, 1.0), (0.0, 0.3)], lambda own: own[0] == 2.0)
)
def test_short_runs_claim_what_they_miss_by(beta, dispersion):
    """Of forty, nineteen in twenty are to lie within two errors, and two thirds within one."""
    exact = exact_evidence(SMALL, beta, dispersion)
    model = dfac.TweedieNMF(1, beta=beta, dispersion=dispersion, rate_w=1.0, rate_h=1.0)
    method = dfac.ThermodynamicIntegration(draws=300)
    with warnings.catch_warnings(action="ignore", category=SamplingWarning):
        data = stored(SMALL)
        found = [dfac.log_evidence(data, model, method, random_seed=n, **QUIET) for n in range(40)]
    z = np.array([abs(one.value - exact) / one.total_error for one in found])
    assert (z < 2).sum() >= 36
    assert (z < 1).sum() >= 22


LAWS = [
    {"beta": 2.0, "dispersion": 1.0},
    {"beta": 0.5, "dispersion": 0.5},
    {"beta": 0.0, "dispersion": 0.3},
    {"beta": -1.0, "dispersion": 0.1},
    {"shape_w": 2.5, "shape_h": 0.5, "rate_w": 0.7},
]


@pytest.mark.parametrize(
    ("law", "missing"),
    tiered(
        [*((law, True) for law in LAWS), (LAWS[0], False), (LAWS[-1], False)],
        lambda own: own in ((LAWS[1], True), (LAWS[-1], False)),
    ),
    ids=lambda own: " ".join(f"{k}={v}" for k, v in own.items()) if own in LAWS else str(own),
)
def test_every_law_and_prior_by_quadrature(law, missing):
    """With cells that are missing, of which a sparse matrix has nothing; or none."""
    V = SMALL if not missing else np.array([[4.0, np.nan, 2, 0.5], [2, 5, 1, 3]])
    settings = {"rate_w": 1.0, "rate_h": 1.0, "dispersion": 1.0} | law
    if missing and "beta" not in law:
        V = np.round(V)
    exact = exact_evidence(V, **law)
    method = dfac.ThermodynamicIntegration(draws=20000, tune=500)
    model = dfac.TweedieNMF(1, **settings)
    data = stored(V) if missing else V
    found = dfac.log_evidence(data, model, method, random_seed=3, **QUIET)
    assert abs(found.value - exact) < 5 * found.total_error
    assert found.total_error < 0.2


@pytest.mark.full
def test_short_proposals_leave_the_same_law(monkeypatch):
    from daskfactor.evidence import tempered as chains

    monkeypatch.setattr(chains, "LONGEST", 0.8)
    method = dfac.ThermodynamicIntegration(draws=40000)
    for beta, dispersion in ((1.0, 1.0), (0.5, 0.5)):
        model = dfac.TweedieNMF(1, beta=beta, dispersion=dispersion, rate_w=1.0, rate_h=1.0)
        found = dfac.log_evidence(stored(SMALL), model, method, random_seed=0, **QUIET)
        exact = exact_evidence(SMALL, beta, dispersion)
        assert abs(found.value - exact) < 5 * found.total_error
        assert found.total_error < 0.2


@pytest.mark.parametrize(("rank", "scale"), tiered([(3, 1.0), (2, 2.5)], lambda own: own[0] == 2))
def test_additive_claims_hold(rank, scale):
    """The step and the batches leave nothing behind, of data that vary more than the law, too."""
    law = dfac.GaussianAdditive(rank, mean=5.0, scale=3**0.5, noise=5**0.5)
    x = law.mean * rank + scale * (law.generate(np.random.default_rng(3), 500) - law.mean * rank)
    exact = law.log_evidence(x)
    method = dfac.ThermodynamicIntegration(draws=4000)
    found = [dfac.log_evidence(x, law, method, random_seed=seed, **QUIET) for seed in range(20)]
    miss = np.array([one.value - exact for one in found])
    sizes = np.array([one.total_error for one in found])
    assert (np.abs(miss) < 2 * sizes).sum() >= 18
    assert abs(miss.mean()) < 4 * np.hypot(miss.std() / 20**0.5, 0.01)


TEMPERED = [
    BY_NAME["poisson-small"],
    BY_NAME["poisson-gaps"],
    BY_NAME["poisson-small"]._replace(name="shapes", shape_w=1.5, shape_h=0.5),
    BY_NAME["compound"],
    BY_NAME["gamma-gaps"],
    BY_NAME["gaussian-skewed"],
]
PATHS = 150


def log_mass(case, t):
    """Log of the integral of p(V|θ)^t p(θ): but for constants, of the likelihood at φ / t."""
    seen, hot = case.V[~np.isnan(case.V)], case._replace(dispersion=case.dispersion / t)
    constants = t * log_normalizer(seen, case.dispersion, case.beta)
    constants -= log_normalizer(seen, hot.dispersion, case.beta)
    return reference_posterior(hot)["log_evidence"] + constants.sum()


def mean_log_likelihood(case, t):
    """E_t[log p(V|θ)], the slope of the log mass."""
    return (log_mass(case, 1.001 * t) - log_mass(case, 0.999 * t)) / (0.002 * t)


def off_by(case, t, copies=400):
    """How far the mean log-likelihood of paths is off, and its error, in standard deviations."""
    V, options = replicate_sparse(case.V, copies), {"unstored": "missing", "dtype": "float64"}
    model = model_of(case)
    with as_blocks(V, 2, **options) as data:
        law, phi = model.likelihood.at(case.dispersion)
        level = normalizer(data, phi, law, SerialExecutor())
        chains = TemperedChains(model, data, 0, BlockHMC(), None, PATHS, 100, 1)
        found = chains.advance((1, t, 1.0, 1.0, {}))["fits"][0]
    own = found / case.dispersion + level
    miss = own.mean() / copies - mean_log_likelihood(case, t)
    deviation = own.std() / math.sqrt(copies)
    return miss / deviation, standard_error(own) / copies / deviation


@pytest.mark.quick("poisson-gaps-0.03")
@pytest.mark.parametrize(
    ("case", "t"),
    [(case, t) for at, case in enumerate(TEMPERED) for t in ((0.01, 0.1), (0.03, 1.0))[at % 2]],
    ids=lambda given: getattr(given, "name", str(given)),
)
def test_log_likelihoods_of_power_posteriors(case, t):
    miss, error = off_by(case, t)
    assert error < 0.02
    assert abs(miss) < 4 * error, f"{miss:.4f} sd, error {error:.4f}"


class PathsOfTheta(Path):
    """Those of ordinary runs."""

    def begin(self, adapt):
        self.band.counts[LOGARITHMS] = 0
        super().begin(adapt)


class DensityOfThetaInLogs(Path):
    """The density of θ taken for that of log θ."""

    def energy(self):
        return np.asarray(super().energy() + np.log(self.band.values).sum(axis=1))


@pytest.mark.full
def test_what_hardly_reaches_small_entries_is_seen(monkeypatch):
    """And the right paths pass, of as many copies."""
    case, t = BY_NAME["poisson-gaps"], 0.03
    miss, error = off_by(case, t, 2000)
    assert abs(miss) < 4 * error
    for bug in (PathsOfTheta, DensityOfThetaInLogs):
        monkeypatch.setattr(block_hmc, "Path", bug)
        miss, error = off_by(case, t, 2000)
        assert abs(miss) > 5 * error, bug
