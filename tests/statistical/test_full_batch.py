"""Samplers on whole gradients and on drawn entries against exact posteriors.

The tolerances are those of a correct sampler (see `Distance.passes`); a broken copy of
each sampler must miss them.
"""

import numpy as np
import pytest

from daskfactor.inference.hmc import HMC
from daskfactor.inference.langevin import SGLD, LangevinDynamics
from tests.statistical.distance import BY_NAME, Biased
from tests.statistical.exact import reference_posterior
from tests.statistical.replicas import run_copies
from tests.statistical.test_posteriors import NumpyPSGLD
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

OWN_CASES = {"poisson-gamma-prior": BY_NAME["poisson"]._replace(shape_w=2.0, shape_h=0.7)}


def run(name, sampler, **settings):
    settings = {"copies": 1024, "tune": 500, "draws": 125, **settings}
    case = OWN_CASES.get(name) or BY_NAME[name]
    return Biased(run_copies(case, sampler, **settings)[0], reference_posterior(case))


def distance(name, sampler, **settings):
    found = run(name, sampler, **settings)
    assert found.error < 0.03, "too few draws for the tolerances to mean anything"
    return found


@pytest.mark.parametrize(
    ("name", "blocks"),
    tiered(
        [("poisson", 2), ("gaussian", 1), ("poisson-two", 2), ("compound", 1)],
        lambda own: own[0] in ("gaussian", "poisson-two"),
    ),
)
def test_langevin_dynamics(name, blocks):
    found = distance(name, LangevinDynamics(), blocks=blocks, tune=1000)
    assert found.passes, str(found)


def test_langevin_dynamics_with_the_papers_plain_step():
    sampler = LangevinDynamics(step=0.02, preconditioner="identity")
    found = distance("poisson", sampler, blocks=1)
    assert found.passes, str(found)


def test_sgld():
    found = distance("poisson", SGLD())
    assert found.passes, str(found)


HMC_CASES = {
    "poisson": {"copies": 32, "tune": 150, "draws": 300, "dense": True},
    "gaussian": {"copies": 32, "tune": 150, "draws": 500, "blocks": 1},
    "poisson-gamma-prior": {"copies": 32, "tune": 150, "draws": 300, "blocks": 1},
    "gaussian-skewed": {"copies": 48, "tune": 150, "draws": 1000, "blocks": 1, "dense": True},
}
"""Copies are taken or rejected together: the more there are, the shorter the steps."""


@pytest.mark.parametrize("name", tiered(HMC_CASES, lambda name: name in ("poisson", "gaussian")))
def test_hmc_is_exact(name):
    found = distance(name, HMC(), **HMC_CASES[name])
    assert found.rms < 0.05, str(found)
    assert found.passes, str(found)


@pytest.mark.parametrize("learnt", tiered([True, False], bool))
def test_hmc_comes_to_means_whose_mode_is_zero(learnt, monkeypatch):
    """With masses as they are at the mode an entry near zero takes hardly a step."""
    if not learnt:
        monkeypatch.setattr("daskfactor.inference.hmc.LEARN_EVERY", 10**9)
    settings = {"copies": 32, "tune": 200, "draws": 1500, "blocks": 1, "dense": True}
    found = run("compound-two", HMC(), **settings)
    assert (found.rms < 0.1 and min(found.ratios.ravel()) > 0.7) == learnt, str(found)


def test_hmc_stays_exact_at_a_step_at_which_it_rejects_two_thirds():
    """Whatever leapfrog steps do wrong; with half of ΔE the variance is 1.15 times too large."""
    sampler = HMC(step=0.7, steps=6)
    found = distance("gaussian", sampler, copies=16, tune=50, draws=1500, blocks=1)
    assert found.rms < 0.05, str(found)
    assert found.passes, str(found)


class HalfTheNoise(LangevinDynamics):
    """Langevin dynamics with a noise variance of ε."""

    noise_factor, prior_factor, divergence_term = 0.5, 1.0, 1.0
    _mirror, _move = NumpyPSGLD._mirror, NumpyPSGLD._move


class NotScaledUp(SGLD):
    """Entries drawn stand for themselves only."""

    def weight(self, data):
        del data
        return 1.0


def drift_without_turning(theta, momentum, spread, size):
    """The momentum stays as it is where an entry is mirrored."""
    theta[:] = np.abs(theta + size * spread * momentum)


def test_half_the_noise_is_seen():
    found = run("gaussian", HalfTheNoise(), draws=30)
    assert not found.passes, str(found)


def test_a_gradient_that_is_not_scaled_up_is_seen():
    found = run("poisson", NotScaledUp(), draws=20)
    assert not found.passes, str(found)


def test_a_mirror_that_does_not_turn_the_momentum_is_seen(monkeypatch):
    monkeypatch.setattr("daskfactor.inference.hmc.leapfrog_drift", drift_without_turning)
    found = run("gaussian-skewed", HMC(), **HMC_CASES["gaussian-skewed"])
    assert not found.passes, str(found)
