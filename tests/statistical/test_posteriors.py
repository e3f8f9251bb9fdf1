"""The samplers against exact posteriors, and planted bugs that must not pass."""

from itertools import product
from typing import ClassVar

import numpy as np
import pytest

from daskfactor.data.grid import SCHEDULES, Cyclic, Proportional
from daskfactor.executors import LanesExecutor
from daskfactor.inference.langevin import PSGLD, PSGRRLD
from daskfactor.kernels.philox import fill_normals
from tests.statistical.distance import BY_NAME, Biased
from tests.statistical.exact import CASES, reference_posterior
from tests.statistical.replicas import run_copies
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

SMALLER_STEP = {
    "gaussian-gaps": 0.02,
    "gamma": 0.03,
    "gamma-gaps": 0.03,
    "gamma-tall": 0.02,
    "gamma-two-gaps": 0.03,
}
"""Cases whose variance is at the edge of the tolerance at the automatic step of 0.05."""


def is_quick(case):
    """One case of each law but the gamma law, which has a dense one below."""
    return case.name in ("poisson-gaps", "poisson-two", "gaussian", "compound")


def distance(case, sampler, **settings):
    settings = {"copies": 1024, "tune": 500, "draws": 200, **settings}
    found = Biased(run_copies(case, sampler, **settings)[0], reference_posterior(case))
    assert found.error < 0.03, "too few draws for the tolerances to mean anything"
    return found


@pytest.mark.parametrize(
    "name", ["poisson-gaps", "gaussian-gaps", "compound", "gamma-tall", "poisson-two-gaps"]
)
def test_copies_in_a_dense_matrix_do_what_they_do_in_a_sparse_one(name):
    """And on two threads: what holds of one way to run them holds of the others."""
    ways = ({}, {"dense": True}, {"executor": LanesExecutor(2)})
    settings = {"copies": 16, "tune": 20, "draws": 20}
    one, *others = (run_copies(BY_NAME[name], PSGLD(), **settings, **way)[0] for way in ways)
    for other in others:
        for value, wanted in zip(other, one, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-9)


@pytest.mark.parametrize("case", tiered(CASES, is_quick), ids=lambda case: case.name)
def test_psgld_in_the_majorizers_metric(case):
    settings = {"draws": 300}
    if case.name in SMALLER_STEP:
        settings = {"copies": 2048, "tune": 1000, "draws": 500}
    sampler = PSGLD(step=SMALLER_STEP.get(case.name, "auto"))
    found = distance(case, sampler, **settings)
    assert found.passes, str(found)


@pytest.mark.parametrize(
    "name", tiered(["poisson-tall", "gaussian", "compound", "gamma"], lambda own: own == "gamma")
)
def test_psgld_on_dense_blocks(name):
    sampler = PSGLD(step=SMALLER_STEP.get(name, "auto"))
    found = distance(BY_NAME[name], sampler, dense=True, copies=128, draws=1500)
    assert found.passes, str(found)


PLAIN = {"poisson": 0.02, "gaussian": 0.01, "gaussian-skewed": 0.01}


@pytest.mark.parametrize(("name", "step"), tiered(PLAIN.items(), lambda own: own[0] == "gaussian"))
def test_psgld_with_the_papers_plain_step(name, step):
    sampler = PSGLD(step=step, preconditioner="identity")
    found = distance(BY_NAME[name], sampler, tune=1000, draws=500)
    assert found.passes, str(found)


@pytest.mark.parametrize("schedule", [Cyclic(), Proportional()], ids=["cyclic", "proportional"])
@pytest.mark.parametrize(
    "name", tiered(["poisson", "poisson-gaps"], lambda own: own == "poisson-gaps")
)
def test_the_other_orders_with_the_scales_that_belong_to_them(name, schedule):
    """Parts of unequal size (gaps): drawn in proportion to size they need s = N / |part|.

    Independent draws have the larger discretisation error, so the step is smaller.
    """
    sampler = PSGLD(schedule=schedule, step=0.02)
    found = distance(BY_NAME[name], sampler, tune=1000, draws=500)
    assert found.passes, str(found)


class WrongScale(Proportional):
    """Parts drawn by size, but scaled as if every part came up once a cycle."""

    def cycle(self, blocks, sizes, rng):
        return tuple(
            part._replace(scale=float(blocks)) for part in super().cycle(blocks, sizes, rng)
        )


def test_the_wrong_scale_for_the_order_is_seen(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "WrongScale", WrongScale)
    right, wrong = (
        distance(BY_NAME["poisson-gaps"], PSGLD(schedule=schedule, step=0.02), draws=500)
        for schedule in (Proportional(), WrongScale())
    )
    assert wrong.rms > 2 * right.rms
    assert wrong.rms > 0.05


class NumpyPSGLD(PSGLD):
    """The updates of ``transition="euler"`` in NumPy, open to planted bugs."""

    noise_factor: ClassVar = 1.0
    prior_factor: ClassVar = 1.0
    divergence_term: ClassVar = 1.0

    def _mirror(self, theta):
        return np.abs(theta)

    def _move(self, program, band, gradient, iteration, factor, matched):
        rate = program.hyper.prior(factor)[0]
        z = np.empty_like(band.values)
        fill_normals(z, *program.address(band, iteration, factor))
        theta, size = band.values, program.step_size(iteration)
        gradient = gradient - self.prior_factor * rate
        if self.majorizer:
            y = size / band.arrays["metric"]
            drift, spread, extra = y * theta * gradient, y * theta, self.divergence_term * y
            clip = 2 * np.sqrt(2 * y * (theta + y))
        else:
            drift, spread, extra, clip = size * gradient, size, 0.0, 2 * np.sqrt(2 * size)
        noise = np.sqrt(2 * self.noise_factor * spread) * z
        band.values[:] = self._mirror(theta + np.clip(drift, -clip, clip) + extra + noise)


class HalfTheNoise(NumpyPSGLD):
    noise_factor = 0.5


class PriorScaled(NumpyPSGLD):
    prior_factor = 2.0  # s = B = 2


class NoPrior(NumpyPSGLD):
    prior_factor = 0.0


class NoDivergenceTerm(NumpyPSGLD):
    divergence_term = 0.0


class Projection(NumpyPSGLD):
    def _mirror(self, theta):
        return np.maximum(theta, 1e-12)


class NoScale(NumpyPSGLD):
    def block_step(self, program, op, *rest):
        super().block_step(program, op._replace(scale=1.0), *rest)


METRIC = {}
PLAIN_STEP = {"step": 0.01, "preconditioner": "identity"}


@pytest.mark.parametrize("options", [METRIC, PLAIN_STEP], ids=["metric", "plain"])
def test_the_numpy_sampler_passes_unbroken(options):
    found = distance(BY_NAME["gaussian-skewed"], NumpyPSGLD(**options))
    assert found.passes, str(found)


@pytest.mark.parametrize(
    ("bug", "options"),
    [
        (HalfTheNoise, METRIC),
        (PriorScaled, METRIC),
        (NoPrior, METRIC),
        (NoDivergenceTerm, METRIC),
        (NoScale, METRIC),
        (Projection, PLAIN_STEP),
        *tiered(
            product((HalfTheNoise, PriorScaled, NoPrior, NoScale), [PLAIN_STEP]), lambda own: False
        ),
    ],
)
def test_every_planted_bug_is_seen(bug, options):
    """Each fails where the right sampler passes, on the case of the test above."""
    found = distance(BY_NAME["gaussian-skewed"], bug(**options))
    assert not found.passes, str(found)


def test_richardson_romberg_takes_most_of_the_bias_away():
    """At a step with a visible bias, 2 fine - coarse is nearer than either chain."""
    case = BY_NAME["gamma"]
    fine, coarse = run_copies(case, PSGRRLD(step=0.4), copies=3000, tune=200, draws=300)
    exact = reference_posterior(case)
    second = {
        "fine": fine.variance + fine.mean**2,
        "coarse": coarse.variance + coarse.mean**2,
        "exact": exact["var_mu"] + exact["mean_mu"] ** 2,
    }
    sd = np.sqrt(exact["var_mu"])
    for of_fine, of_coarse, truth, size in (
        (fine.mean, coarse.mean, exact["mean_mu"], sd),
        (second["fine"], second["coarse"], second["exact"], second["exact"]),
    ):
        extrapolated = np.sqrt(np.mean(((2 * of_fine - of_coarse - truth) / size) ** 2))
        alone = np.sqrt(np.mean(((of_fine - truth) / size) ** 2))
        assert alone > 0.02
        assert extrapolated < 0.6 * alone
