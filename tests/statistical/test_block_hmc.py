"""`BlockHMC` against exact posteriors, and planted bugs that must not pass."""

import math

import numpy as np
import pytest

from daskfactor.data.sources import as_blocks
from daskfactor.evidence.tempered import _sampled_fits
from daskfactor.evidence.thermodynamic import standard_error
from daskfactor.executors import SerialExecutor
from daskfactor.inference import block_hmc
from daskfactor.inference.block_hmc import ENERGY, LOGARITHMS, MASS, BlockHMC, Path
from daskfactor.inference.program import normalizer
from daskfactor.models.tweedie import TweedieNMF
from tests.evidence.exact_evidence import one_component_by_quadrature
from tests.statistical.distance import BY_NAME, exact_distance
from tests.statistical.replicas import replicate_sparse
from tests.statistical.test_full_batch import drift_without_turning
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

SPIKES = BY_NAME["poisson-small"]._replace(name="spikes", shape_w=0.5, shape_h=0.5)
CASES = [
    *(BY_NAME[name] for name in ("poisson-gaps", "poisson-two", "gaussian-skewed", "compound")),
    *(BY_NAME[name] for name in ("gamma-gaps", "poisson-overdispersed")),
    SPIKES,
    BY_NAME["gaussian-skewed"]._replace(name="gaussian-shapes", shape_w=3.0, shape_h=0.5),
    BY_NAME["poisson"]._replace(name="poisson-shapes", shape_w=0.3, shape_h=1.6),
]


def distance(case, sampler, **settings):
    return exact_distance(case, sampler, **{"copies": 512, "tune": 100, "draws": 250, **settings})


@pytest.mark.parametrize(
    "case",
    tiered(CASES, lambda case: case.name in ("poisson-two", "gaussian-skewed", "spikes")),
    ids=lambda case: case.name,
)
def test_exact_posteriors(case):
    # A cell that is not observed has a heavy tail under gamma noise.
    found = distance(case, BlockHMC(warm_start=5), draws=1500 if case.name == "gamma-gaps" else 250)
    assert found.error < 0.02, "too few draws for the tolerances to mean anything"
    assert found.passes, str(found)


BOLD = BlockHMC(step=1.1, warm_start=5)
"""Paths of which a good part is refused, so that the test decides."""


def test_dense_blocks_and_a_step_that_is_often_refused():
    settings = {"copies": 64, "draws": 700, "blocks": 1, "dense": True}
    found = distance(BY_NAME["poisson"], BOLD, **settings)
    assert found.error < 0.02
    assert found.passes, str(found)


class NoTest(Path):
    """Nothing is refused but what runs away."""

    def end(self, op):
        self.band.arrays[ENERGY] += 10
        super().end(op)


class MovingMass(Path):
    """A metric of where the path begins, as its end does not have it."""

    def begin(self, adapt):
        self.band.arrays[MASS] = (0.3 + self.band.values) ** -2
        super().begin(adapt)


class DensityOfTheta(Path):
    """The density of θ^a taken for that of θ."""

    def energy(self):
        logs = np.log(np.maximum(self.band.values, 1e-30)).sum(axis=1)
        return np.asarray(super().energy() - (self.power - 1) * logs)


@pytest.mark.parametrize(
    ("bug", "case", "sampler"),
    [
        (NoTest, BY_NAME["poisson"], BOLD),
        (drift_without_turning, BY_NAME["gaussian-skewed"], BlockHMC(warm_start=5)),
        (MovingMass, BY_NAME["gaussian-skewed"], BlockHMC(warm_start=5)),
        (DensityOfTheta, SPIKES, BlockHMC(warm_start=5)),
    ],
)
def test_every_planted_bug_is_seen(bug, case, sampler, monkeypatch):
    """Each fails where the right sampler passes, in the tests above."""
    name = "leapfrog_drift" if bug is drift_without_turning else "Path"
    monkeypatch.setattr(block_hmc, name, bug)
    found = distance(case, sampler)
    assert not found.passes, str(found)


# -- power posteriors p(V | θ)^t p(θ), as evidences need them ----------------------

TEMPERED = [
    BY_NAME["poisson-small"],
    BY_NAME["poisson-gaps"],
    BY_NAME["poisson-small"]._replace(name="shapes", shape_w=1.5, shape_h=0.5),
    BY_NAME["compound"],
    BY_NAME["gamma-gaps"],
    BY_NAME["gaussian-skewed"],
]
PATHS = 150


def mean_log_likelihood(case, t):
    """E_t[log p(V|θ)], the slope of the power posterior's log normaliser, by quadrature."""
    settings = (case.rate_w, case.rate_h), (case.shape_w, case.shape_h)
    low, high = (
        one_component_by_quadrature(case.V, case.beta, case.dispersion, *settings, power)
        for power in (t * 0.999, t * 1.001)
    )
    return (high - low) / (0.002 * t)


def off_by(case, t, copies=400):
    """How far the mean log-likelihood of paths is off, and its error, in standard deviations."""
    settings = case._asdict()
    beta, V, _ = (settings.pop(name) for name in ("beta", "V", "name"))
    model = TweedieNMF(settings.pop("K"), beta=beta, **settings)
    V, options = replicate_sparse(V, copies), {"unstored": "missing", "dtype": "float64"}
    with as_blocks(V, 2, **options) as data:
        law, phi = model.likelihood.at(case.dispersion)
        level = normalizer(data, phi, law, SerialExecutor())
        found = _sampled_fits(model, data, BlockHMC(), (0, 1), t, (PATHS, 100, 1)).fine
    own = found / case.dispersion + level
    miss = own.mean() / copies - mean_log_likelihood(case, t)
    deviation = own.std() / math.sqrt(copies)
    return miss / deviation, standard_error(own) / copies / deviation


@pytest.mark.parametrize(
    ("case", "t"),
    tiered(
        ((case, t) for at, case in enumerate(TEMPERED) for t in ((0.01, 0.1), (0.03, 1.0))[at % 2]),
        lambda own: (own[0].name, own[1]) in (("poisson-gaps", 0.03), ("gaussian-skewed", 1.0)),
    ),
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


def test_what_hardly_reaches_small_entries_is_seen(monkeypatch):
    """And the right paths pass, of as many copies."""
    case, t = BY_NAME["poisson-gaps"], 0.03
    miss, error = off_by(case, t, 2000)
    assert abs(miss) < 4 * error
    for bug in (PathsOfTheta, DensityOfThetaInLogs):
        monkeypatch.setattr(block_hmc, "Path", bug)
        miss, error = off_by(case, t, 2000)
        assert abs(miss) > 5 * error, bug
