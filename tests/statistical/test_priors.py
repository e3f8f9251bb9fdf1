"""Gamma priors, frozen components and exact transitions against exact posteriors."""

from dataclasses import replace

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.kernels import langevin as cir
from tests.statistical.distance import BY_NAME
from tests.statistical.test_posteriors import distance

pytestmark = pytest.mark.statistical

GAMMA = {
    "steep": BY_NAME["poisson"]._replace(shape_w=2.0, shape_h=0.7),
    "spiked": BY_NAME["gaussian-skewed"]._replace(shape_w=0.7, shape_h=1.5),
}
METRIC = dfac.PSGLD()
PLAIN = dfac.PSGLD(step=0.02, preconditioner="identity")
CIR = dfac.PSGLD(transition="cir")


@pytest.mark.parametrize(
    ("name", "sampler"), [("steep", METRIC), ("steep", PLAIN), ("spiked", METRIC)]
)
def test_gamma_priors(name, sampler):
    found = distance(GAMMA[name], sampler)
    assert found.passes, str(found)


class ShapeForgotten(dfac.PSGLD):
    """Gamma priors taken for exponential ones by the step."""

    def _move(self, program, *rest):
        plain = program.hyper._replace(shape_w=1.0, shape_h=1.0)
        super()._move(replace(program, hyper=plain), *rest)


@pytest.mark.parametrize("options", [{}, {"step": 0.02, "preconditioner": "identity"}])
def test_a_forgotten_shape_is_seen(options):
    found = distance(GAMMA["steep"], ShapeForgotten(**options), draws=60)
    assert not found.passes, str(found)


@pytest.mark.parametrize(("name", "draws"), [("poisson", 125), ("gamma", 250)])
def test_exact_transitions(name, draws):
    found = distance(BY_NAME[name], CIR, draws=draws)
    assert found.passes, str(found)


def test_other_transitions_widen_the_posterior_of_counts_less():
    """At four times the automatic step the Euler step is off in the variance, others are not."""
    case = BY_NAME["poisson"]
    euler, exact, matched = (
        distance(case, dfac.PSGLD(step=0.2, transition=transition), tune=200, draws=60)
        for transition in ("euler", "cir", "moments")
    )
    assert (euler.ratios > 1.08).all()
    assert exact.passes, str(exact)
    assert matched.passes, str(matched)
    assert (abs(matched.ratios - 1) < 0.05).all()


def test_a_wrong_transition_is_seen(monkeypatch):
    """A gamma law without the prior's own count of one."""
    right = cir._cir_step

    def wrong(*args):
        scale, step, rate, shape = args[4]
        right(*args[:4], (scale, step, rate, shape - 0.3), *args[5:])

    monkeypatch.setattr(cir, "_cir_step", wrong)
    assert not distance(BY_NAME["poisson"], CIR, draws=60).passes


@pytest.mark.parametrize("sampler", [METRIC, CIR])
def test_a_known_factor_leaves_conjugate_posteriors(sampler):
    """Poisson with W given: h_j ~ Gamma(a + Σ v_ij, λ + Σ w_i), every column a copy."""
    W, v = np.array([[2.0], [0.5], [4.0]]), np.array([[5.0], [np.nan], [8.0]])
    V = np.repeat(v, 200, axis=1)
    model = dfac.TweedieNMF(1, dispersion=1.0, rate_h=1.5, shape_h=2.0, fixed_w=W)
    data = dfac.as_blocks(V, 2, dtype="float64", allow_empty=True)
    run = {"random_seed": 0, "keep": "moments", "progressbar": False}
    tree = dfac.sample(data, model, sampler, draws=1500, tune=300, **run)
    np.testing.assert_array_equal(tree["posterior_moments"]["W_mean"].values[0], W)
    mean, within = (tree["posterior_moments"][f"H_{name}"].values[0] for name in ("mean", "var"))
    shape, rate = 2.0 + 13.0, 1.5 + 6.0
    sd = np.sqrt(shape) / rate
    assert abs(mean.mean() - shape / rate) < 0.05 * sd
    assert 0.95 < (within.mean() + mean.var()) / sd**2 < 1.08
