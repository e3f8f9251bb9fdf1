"""Samplers against exact posteriors, and planted bugs that must not pass."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor.data.grid import SCHEDULES, Cyclic, Proportional, Reshuffled
from daskfactor.executors import LanesExecutor
from daskfactor.inference import block_hmc, sghmc
from daskfactor.inference.block_hmc import ENERGY, MASS, BlockHMC, Path
from daskfactor.inference.gibbs import ALLOCATED, RATES, Gibbs, gathered
from daskfactor.inference.langevin import PSGLD, PSGRRLD, SGLD, LangevinDynamics
from daskfactor.inference.sghmc import SGHMC
from daskfactor.kernels.langevin import fill_normals
from daskfactor.models import negative_binomial
from tests.planted import planted
from tests.statistical.exact import NEGATIVE_BINOMIAL, Case, reference_posterior
from tests.statistical.replicas import BY_NAME, Biased, Distance, distance, run_copies

pytestmark = pytest.mark.statistical

WARM = {"warm_start": 5}
SKEWED, POISSON, SPIKES = (BY_NAME[own] for own in ("gaussian-skewed", "poisson", "spikes"))
OVERDISPERSED = Case("counts", np.array([[4.0], [0.0], [9.0]]), NEGATIVE_BINOMIAL, 0.7)
SHAPED = {
    "steep": POISSON._replace(shape_w=2.0, shape_h=0.7),
    "spiked": SKEWED._replace(shape_w=0.7, shape_h=1.5),
    "gaussian-shapes": SKEWED._replace(shape_w=3.0, shape_h=0.5),
    "poisson-spiked": POISSON._replace(shape_w=0.3, shape_h=1.6),
    "poisson-shapes": POISSON._replace(shape_w=0.6, shape_h=1.6),
    "poisson-three-gaps": BY_NAME["poisson-gaps"]._replace(K=3),
    "poisson-rates": POISSON._replace(rate_h=0.7, shape_w=2.5),
    "small-rates": SPIKES._replace(rate_w=1.2, rate_h=0.8, shape_h=3.0),
    "two-rates": BY_NAME["poisson-two"]._replace(rate_w=2.0, shape_w=2.0, shape_h=0.6),
    "counts": OVERDISPERSED,
}


def rows(sampler, kind, label, settings, names):
    """A case of `test_exact_posteriors` for each name."""
    cases, start = BY_NAME | SHAPED, f"{sampler.name}{label}"
    given = sampler, kind, settings
    return [pytest.param(cases[own], *given, id=f"{start}-{own}") for own in names.split()]


def steps(sampler, names, label="", kind=Biased, **settings):
    """The same of samplers with a step, of a thousand copies."""
    settings = {"copies": 1024, "tune": 500, "draws": 200, **settings}
    return rows(sampler, kind, label, settings, names)


def exact(sampler, names, label="", **settings):
    """The same of samplers without one, or with none that shows."""
    settings = {"copies": 1024, "tune": 100, "draws": 250, **settings}
    return rows(sampler, Distance, label, settings, names)


def plain(step, kind=PSGLD):
    return kind(step=step, preconditioner="identity")


# Cases whose variance is at the edge of the tolerance at the automatic step of 0.05.
SMALLER = {"copies": 2048, "tune": 1000, "draws": 500, "label": " of a smaller step"}
DENSE = {"dense": True, "copies": 128, "draws": 1500, "label": " dense"}
LONG = {"tune": 1000, "draws": 500}
SHORT_FLIGHT = (0.3 / 2) ** 2
DRAWN = {"tune": 300, "draws": 1500}
EXACT = [
    *steps(
        PSGLD(),
        "poisson poisson-gaps poisson-two gaussian compound poisson-small poisson-tall "
        "poisson-overdispersed gaussian-skewed compound-gaps poisson-two-large poisson-two-gaps "
        "gaussian-two compound-two",
        draws=300,
    ),
    *steps(PSGLD(step=0.02), "gaussian-gaps gamma-tall", **SMALLER),
    *steps(PSGLD(step=0.03), "gamma gamma-gaps gamma-two-gaps", **SMALLER),
    *steps(PSGLD(step=0.03), "gamma", **DENSE),
    *steps(plain(0.01), "gaussian gaussian-skewed", " plain", **LONG),
    *steps(plain(0.02), "poisson", " plain", **LONG),
    # Parts of unequal size (gaps): drawn in proportion to size they need s = N / |part|.
    # Independent draws have the larger discretisation error, so the step is smaller.
    *steps(PSGLD(0.02, schedule=Cyclic()), "poisson poisson-gaps", " cyclic", **LONG),
    *steps(PSGLD(0.02, schedule=Proportional()), "poisson poisson-gaps", " drawn", **LONG),
    *steps(PSGLD(), "steep spiked", " of gamma priors"),
    *steps(plain(0.02), "steep", " plain"),
    *steps(PSGLD(step=0.03), "counts", copies=1024, tune=1000, draws=1000, blocks=1),
    *steps(LangevinDynamics(), "poisson poisson-two", blocks=2, tune=1000, draws=125),
    *steps(LangevinDynamics(), "gaussian compound", blocks=1, tune=1000, draws=125),
    *steps(plain(0.02, LangevinDynamics), "poisson", " plain", blocks=1, draws=125),
    *steps(SGLD(), "poisson", draws=125),
    *exact(
        Gibbs(**WARM),
        "poisson poisson-gaps poisson-two two-rates poisson-small poisson-tall poisson-two-large "
        "poisson-two-gaps poisson-rates small-rates",
        draws=100,
    ),
    *exact(
        BlockHMC(**WARM),
        "poisson-two gaussian-skewed spikes poisson-gaps compound poisson-overdispersed "
        "gaussian-shapes poisson-spiked",
        copies=512,
    ),
    # A cell that is not observed has a heavy tail under gamma noise.
    *exact(BlockHMC(**WARM), "gamma-gaps", copies=512, draws=1500),
    *exact(BlockHMC(**WARM), "counts", draws=400, tune=250, blocks=1),
    # A good part of these paths is refused, so that the test decides.
    *exact(BlockHMC(step=1.1, **WARM), "poisson", blocks=1, **DENSE | {"copies": 64, "draws": 700}),
    # At the automatic step as near as samplers without a step are held to.
    *exact(
        SGHMC(**WARM),
        "poisson poisson-two-gaps gamma spikes poisson-gaps poisson-tall poisson-overdispersed "
        "gaussian-two gaussian-shapes poisson-shapes poisson-three-gaps",
        copies=2048,
    ),
    # Parts drawn with replacement at the step of others would double the variance.
    *exact(SGHMC(schedule=Proportional(), **WARM), "poisson-two-gaps", " drawn", **DRAWN),
    *exact(SGHMC(schedule=Reshuffled(), **WARM), "poisson-two-gaps", " reshuffled", **DRAWN),
    *exact(SGHMC(SHORT_FLIGHT, **WARM), "gamma-gaps", copies=2048),
    *exact(SGHMC(SHORT_FLIGHT, schedule=Reshuffled(), **WARM), "poisson-gaps", **DENSE),
]


@pytest.mark.quick(
    "PSGLD-gaussian",
    "PSGLD drawn-poisson-gaps",
    "PSGLD of gamma priors-steep",
    "PSGLD-counts",
    "LangevinDynamics-poisson-two",
    "SGLD-poisson",
    "Gibbs-poisson-two",
    "BlockHMC-spikes",
    "BlockHMC-gaussian-skewed",
    "SGHMC-gamma",
    "SGHMC-spikes",
)
@pytest.mark.parametrize(("case", "sampler", "kind", "settings"), EXACT)
def test_exact_posteriors(case, sampler, kind, settings):
    found = distance(case, sampler, kind, **settings)
    assert found.error < kind.most_error, "too few draws for the tolerances to mean anything"
    assert found.passes, str(found)


@pytest.mark.quick("poisson-gaps")
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


def test_matched_moments_widen_the_posterior_of_counts_less():
    """At four times the automatic step Euler's is off in the variance, matched moments are not."""
    euler, matched = (
        distance(POISSON, PSGLD(0.2, transition=own), Biased, copies=1024, tune=200, draws=60)
        for own in ("euler", "moments")
    )
    assert (euler.ratios > 1.08).all()
    assert matched.passes, str(matched)
    assert (abs(matched.ratios - 1) < 0.05).all()


def test_a_known_factor_leaves_conjugate_posteriors():
    """Poisson with W given: h_j ~ Gamma(a + Σ v_ij, λ + Σ w_i), every column a copy."""
    W, v = np.array([[2.0], [0.5], [4.0]]), np.array([[5.0], [np.nan], [8.0]])
    model = dfac.TweedieNMF(1, dispersion=1.0, rate_h=1.5, shape_h=2.0, fixed_w=W)
    data = dfac.as_blocks(np.repeat(v, 200, axis=1), 2, dtype="float64", allow_empty=True)
    run = {"random_seed": 0, "keep": "moments", "progressbar": False}
    tree = dfac.sample(data, model, PSGLD(), draws=1500, tune=300, **run)
    moments = tree["posterior_moments"]
    np.testing.assert_array_equal(moments["W_mean"].values[0], W)
    mean, within = (moments[f"H_{name}"].values[0] for name in ("mean", "var"))
    law = stats.gamma(2.0 + 13.0, scale=1 / (1.5 + 6.0))
    assert abs(mean.mean() - law.mean()) < 0.05 * law.std()
    assert 0.95 < (within.mean() + mean.var()) / law.var() < 1.08


def test_richardson_romberg_takes_most_of_the_bias_away():
    """At a step with a visible bias, 2 fine - coarse is nearer than either chain."""
    case = BY_NAME["gamma"]
    runs = run_copies(case, PSGRRLD(step=0.4), copies=3000, tune=200, draws=300)
    exact = reference_posterior(case)
    true = exact["mean_mu"], exact["var_mu"] + exact["mean_mu"] ** 2
    of = [(own.mean, own.variance + own.mean**2) for own in runs]
    for fine, coarse, truth, size in zip(*of, true, (exact["var_mu"] ** 0.5, true[1]), strict=True):
        extrapolated = np.sqrt(np.mean(((2 * fine - coarse - truth) / size) ** 2))
        alone = np.sqrt(np.mean(((fine - truth) / size) ** 2))
        assert alone > 0.02
        assert extrapolated < 0.6 * alone


class NumpySteps:
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
        if "metric" in self.arrays:
            y = size / band.arrays["metric"]
            drift, spread, extra = y * theta * gradient, y * theta, self.divergence_term * y
            clip = 2 * np.sqrt(2 * y * (theta + y))
        else:
            drift, spread, extra, clip = size * gradient, size, 0.0, 2 * np.sqrt(2 * size)
        noise = np.sqrt(2 * self.noise_factor * spread) * z
        band.values[:] = self._mirror(theta + np.clip(drift, -clip, clip) + extra + noise)


def bug(name, *kinds, **changed):
    return type(name, (*kinds, NumpySteps), changed)


HalfTheNoise, NoPrior = bug("HalfTheNoise", noise_factor=0.5), bug("NoPrior", prior_factor=0.0)
PriorScaled = bug("PriorScaled", prior_factor=2.0)  # s = B = 2
NoDivergenceTerm = bug("NoDivergenceTerm", divergence_term=0.0)


class Projection(NumpySteps):
    def _mirror(self, theta):
        return np.maximum(theta, 1e-12)


class Unscaled:
    """Parts stand for themselves only."""

    def step(self, program, visit):
        super().step(program, visit._replace(op=visit.op._replace(scale=1.0)))


NoScale = bug("NoScale", Unscaled)


class NotScaledUp:
    """Entries drawn stand for themselves only."""

    def weight(self, data):
        del data
        return 1.0


class ShapeForgotten:
    """Gamma priors taken for exponential ones by the step."""

    def _move(self, program, *rest):
        exponential = program.hyper._replace(shape_w=1.0, shape_h=1.0)
        super()._move(replace(program, hyper=exponential), *rest)


class NoPriorShape:
    """Exponential priors taken for flat ones with half a count."""

    def _move(self, program, band, factor, cycle):
        gathered(band, ALLOCATED)[:] -= 0.5
        super()._move(program, band, factor, cycle)


class NoPriorRate:
    def _move(self, program, band, factor, cycle):
        gathered(band, RATES)[:] -= 0.5 * program.hyper.prior(factor)[0]
        super()._move(program, band, factor, cycle)


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


def drift_without_turning(theta, momentum, spread, size):
    """The momentum stays as it is where an entry is mirrored."""
    theta[:] = np.abs(theta + size * spread * momentum)


kick_flight = sghmc.kick_flight


def flight_without_turning(theta, along, across, *rest):
    """The momentum of a vector keeps its parts along it and across it as it flies by."""
    kept = along.copy(), across.copy()
    grad, metric, rate, size, share = rest
    kick_flight(theta, along, across, grad, metric, rate, size, share)
    push = size * np.sqrt(theta / metric) * (grad - rate)
    along[:], across[:] = kept[0] + np.clip(push, -1, 1), kept[1]


@pytest.mark.full
@pytest.mark.parametrize("step", ["metric", "plain"])
def test_the_numpy_sampler_passes_unbroken(step):
    sampler = planted(plain(0.01) if step == "plain" else PSGLD(), NumpySteps)
    found = distance(SKEWED, sampler, Biased, copies=1024, tune=500, draws=200)
    assert found.passes, str(found)


STEPS = {"kind": Biased, "copies": 1024, "tune": 500, "draws": 200}
PATHS, FLIGHTS = ({"copies": copies, "tune": 100, "draws": 250} for copies in (512, 2048))
SWEEPS = {"copies": 1024, "tune": 100, "draws": 100}
BOLD = BlockHMC(step=1.1, **WARM)
BUGS = [
    *((SKEWED, planted(PSGLD(), own), STEPS, None) for own in (HalfTheNoise, PriorScaled, NoPrior)),
    *((SKEWED, planted(PSGLD(), own), STEPS, None) for own in (NoDivergenceTerm, NoScale)),
    (SKEWED, planted(plain(0.01), Projection), STEPS, None),
    *(
        (SKEWED, planted(plain(0.01), own), STEPS, None)
        for own in (HalfTheNoise, PriorScaled, NoPrior, NoScale)
    ),
    (BY_NAME["gaussian"], planted(LangevinDynamics(), HalfTheNoise), STEPS | {"draws": 30}, None),
    (POISSON, planted(SGLD(), NotScaledUp), STEPS | {"draws": 20}, None),
    (SHAPED["steep"], planted(PSGLD(), ShapeForgotten), STEPS | {"draws": 60}, None),
    (SHAPED["steep"], planted(plain(0.02), ShapeForgotten), STEPS | {"draws": 60}, None),
    *((POISSON, planted(Gibbs(**WARM), own), SWEEPS, None) for own in (NoPriorShape, NoPriorRate)),
    (POISSON, BOLD, PATHS, (block_hmc, "Path", NoTest)),
    (SKEWED, BlockHMC(**WARM), PATHS, (block_hmc, "leapfrog_drift", drift_without_turning)),
    (SKEWED, BlockHMC(**WARM), PATHS, (block_hmc, "Path", MovingMass)),
    (SPIKES, BlockHMC(**WARM), PATHS, (block_hmc, "Path", DensityOfTheta)),
    (POISSON, planted(SGHMC(**WARM), Unscaled), FLIGHTS, None),
    (POISSON, SGHMC(**WARM), FLIGHTS, (sghmc, "kick_flight", flight_without_turning)),
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "sampler", "settings", "patch"), BUGS)
def test_every_planted_bug_is_seen(case, sampler, settings, patch, monkeypatch):
    if patch is not None:
        monkeypatch.setattr(*patch)
    found = distance(case, sampler, **settings)
    assert not found.passes, str(found)


class WrongScale(Proportional):
    """Parts drawn by size, but scaled as if every part came up once a cycle."""

    def cycle(self, blocks, sizes, rng):
        parts = super().cycle(blocks, sizes, rng)
        return tuple(part._replace(scale=float(blocks)) for part in parts)


@pytest.mark.full
def test_the_wrong_scale_for_the_order_is_seen(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "WrongScale", WrongScale)
    right, wrong = (
        distance(BY_NAME["poisson-gaps"], PSGLD(0.02, schedule=own), **STEPS | {"draws": 500})
        for own in (Proportional(), WrongScale())
    )
    assert wrong.rms > max(0.05, 2 * right.rms)


@pytest.mark.full
def test_the_wrong_sign_of_the_curvature_is_seen(monkeypatch):
    """The term of (v + r) / (r + mu) in the slope, kernels made anew from it."""

    class Turned(negative_binomial.NegativeBinomial):
        def __hash__(self):
            return 1

        def entry(self, arithmetic):
            entry = super().entry(arithmetic)

            def weight(v, mu, alpha):
                one, a = type(mu)(1), type(mu)(alpha)
                slope = v / mu + (one + a * v) / (one + a * mu)
                return slope / (v - mu + type(mu)(1e-9))

            return entry._replace(weight=weight)

    monkeypatch.setattr(negative_binomial, "NegativeBinomial", Turned)
    settings = {"copies": 1024, "tune": 100, "draws": 100, "blocks": 1}
    assert distance(OVERDISPERSED, PSGLD(step=0.03), **settings).rms > 0.5
