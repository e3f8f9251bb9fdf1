"""The bias of a finite step: pairs of chains, orders of the parts, `discretization_bias`."""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.data.grid import Cyclic, NestedReshuffled, Reshuffled
from daskfactor.errors import SamplingWarning
from daskfactor.inference import langevin
from daskfactor.inference.langevin import PSGLD, PSGRRLD
from daskfactor.results.diagnose import all_series, effective_size
from tests.statistical.allocations import Priors, component
from tests.statistical.exact import CASES, Case
from tests.statistical.pairs import bias, noise_ratio, romberg, run_pair, together
from tests.statistical.replicas import run_copies

pytestmark = pytest.mark.statistical

QUIET = {"progressbar": False, "executor": "serial"}
MODEL = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=1.0)
COARSE = dfac.PSGLD(step=0.5, transition="euler", warm_start=20)


def counts():
    rng = np.random.default_rng(5)
    return rng.poisson(rng.gamma(1, 1, (20, 2)) @ rng.gamma(1, 1, (2, 15))).astype(float)


def sample(sampler, draws, seed=0):
    with warnings.catch_warnings(action="ignore"):
        run = {"random_seed": seed, "blocks": 2, **QUIET}
        return dfac.sample(counts(), MODEL, sampler, draws, 200, **run)


def series(tree):
    return {one.name: one.values for one in all_series(tree, 4, 0, None)[0] if one.kind != "scale"}


@pytest.fixture(scope="module")
def measured():
    """A biased run, its long continuation, and exact draws."""
    exact = series(sample(dfac.BlockHMC(), 3000))
    return sample(COARSE, 300), series(sample(COARSE, 2000, 1)), exact


def away_from(found, measured):
    """The bias of lp and of the mean of WH, in errors from what it is; the smallest |bias|."""
    away, sizes = [], []
    for name in ("lp", "mu_mean"):
        biased, exact = measured[1][name], measured[2][name]
        true = (biased.mean() - exact.mean()) / exact.std()
        error = np.sqrt(sum(own.var() / effective_size(own) for own in (biased, exact)))
        one = found.sel(functional=name)
        # The second order of the bias, of which half as much again is seen.
        slack = 0.5 * abs(true)
        rest = max(0.0, abs(float(one["bias"]) - true) - slack)
        away.append(rest / np.hypot(error / exact.std(), float(one["error"])))
        sizes.append(abs(true))
    return max(away), max(sizes)


@pytest.mark.full
def test_coupled_chains_find_the_bias(measured):
    with pytest.warns(SamplingWarning, match=r"the finite step moves the mean of"):
        found = dfac.discretization_bias(measured[0], draws=1000, cells=4, **QUIET)
    assert found.attrs["method"] == "coupled"
    away, size = away_from(found, measured)
    assert size > 0.3, "no bias to be found"
    assert away < 5, str(found)
    assert found["error"].sel(functional="lp") < 0.1


@pytest.mark.full
def test_exact_draws_find_it_too(measured, monkeypatch):
    monkeypatch.setattr(dfac.PSGLD, "pair", lambda self: None)
    with warnings.catch_warnings(action="ignore"):
        found = dfac.discretization_bias(measured[0], draws=400, cells=4, **QUIET)
    assert found.attrs["method"] == "exact"
    assert away_from(found, measured)[0] < 5, str(found)


@pytest.mark.full
def test_a_pair_with_one_step_is_seen(measured, monkeypatch):
    monkeypatch.setattr(langevin, "half_step", lambda base, iteration: base(iteration // 2))
    found = dfac.discretization_bias(measured[0], draws=1000, cells=4, **QUIET)
    assert away_from(found, measured)[0] > 5, str(found)


def test_no_bias_is_told_where_the_step_is_small():
    tree = sample(dfac.PSGLD(step=0.03), 100)
    with warnings.catch_warnings(action="error"):
        found = dfac.discretization_bias(tree, draws=200, **QUIET)
    assert found.verdict.startswith("No bias above 0.2")


@pytest.mark.full
def test_the_fine_chain_of_a_pair_has_the_bias_of_half_a_step(measured):
    """Which it says it has; what is taken off means is tested below."""
    pair = dfac.PSGRRLD(step=0.5, warm_start=20)
    fine = series(sample(pair, 5000, 1))
    with warnings.catch_warnings(action="ignore"):
        found = dfac.discretization_bias(sample(pair, 300), draws=1000, cells=4, **QUIET)
    away, size = away_from(found, (None, fine, measured[2]))
    assert size > 0.2, "no bias to be found"
    assert away < 5, str(found)


CASE = next(case for case in CASES if case.name == "poisson")
LARGE, SMALL = 0.2, 0.1
COPIES = 3000


@pytest.fixture(scope="module")
def runs():
    """One run with the large step, two with the small one, on noise of their own."""
    return {
        LARGE: [run_pair(CASE, PSGRRLD(step=LARGE), COPIES, 2000, seed=2)],
        SMALL: [run_pair(CASE, PSGRRLD(step=SMALL), COPIES, 3000, seed=seed) for seed in (0, 1)],
    }


@pytest.fixture(scope="module")
def biases(runs):
    pairs = {LARGE: runs[LARGE][0], SMALL: together(*runs[SMALL])}
    return {
        "coarse": {step: bias([(1.0, pair.coarse)], CASE) for step, pair in pairs.items()},
        "fine": {step: bias([(1.0, pair.fine)], CASE) for step, pair in pairs.items()},
        "romberg": {step: bias(romberg(*pair), CASE) for step, pair in pairs.items()},
    }


def within(value, expected, error):
    return abs(value - expected) < 5 * error


@pytest.mark.full  # test_posteriors.py has one case
def test_bias_of_the_mean(biases):
    """P-SGLD's is visible and halves with ε; of P-SGRRLD's a fifth at most is left."""
    for step in (LARGE, SMALL):
        alone, found = biases["coarse"][step], biases["romberg"][step]
        assert np.any(np.abs(alone.mean) > 5 * alone.mean_error)
        assert found.mean_size < alone.mean_size / 5
    large, small = (biases["coarse"][step] for step in (LARGE, SMALL))
    worst = np.abs(large.mean).argmax()
    error = np.hypot(small.mean_error, large.mean_error / 2).flat[worst]
    assert within(small.mean.flat[worst], large.mean.flat[worst] / 2, error)


@pytest.mark.full
def test_bias_of_the_variance(biases):
    """At the same ε a third of P-SGLD's at most is left, and less than the fine track's own."""
    for step in (LARGE, SMALL):
        found = biases["romberg"][step]
        for other, share in (("coarse", 1 / 3), ("fine", 1.0)):
            alone = biases[other][step]
            assert np.all(alone.variance > 5 * alone.variance_error)
            assert np.abs(found.variance).mean() < share * alone.variance.mean()


@pytest.mark.full
def test_what_is_left_of_the_variances_bias_falls_with_the_square_of_the_step(biases):
    """To a quarter when ε is halved, within errors; to a half it would be of first order."""
    large, small = (biases["romberg"][step] for step in (LARGE, SMALL))
    before, after = large.variance.mean(), small.variance.mean()
    # Cells are not independent: the mean of their errors is at least the error of their mean.
    error_before, error_after = large.variance_error.mean(), small.variance_error.mean()
    assert abs(before) > 5 * error_before
    assert within(after, before / 4, np.hypot(error_after, error_before / 4))
    assert abs(before) / 2 - abs(after) > 5 * np.hypot(error_after, error_before / 2)
    # P-SGLD's falls by two and a bit, as it has a second order, too.
    coarse_large, coarse_small = (biases["coarse"][step].variance.mean() for step in (LARGE, SMALL))
    assert 2.0 < coarse_large / coarse_small < 3.0


@pytest.mark.full
def test_coupled_noise_costs_next_to_nothing(runs):
    """Var(2 fine - coarse) is about one chain's; on noises of their own it would be five times."""
    first, second = runs[SMALL]
    assert noise_ratio(*first) < 1.3
    assert noise_ratio(*runs[LARGE][0]) < 1.3
    assert 4.0 < noise_ratio(first.fine, second.coarse) < 6.0


# The smallest grid on which two levels differ from one has 4 x 4 blocks.
V = np.array([[4, 7, 1, 3], [2, 5, 0, 2], [6, 9, 2, 5], [1, 3, 1, 0]], dtype=np.float64)


def distance(schedule, step):
    """Rms error of the means in posterior sd, and the largest error of a variance ratio."""
    exact = component(V, Priors())
    variance = exact.square - exact.mean**2
    sampler = PSGLD(schedule=schedule, step=step)
    got = run_copies(Case("poisson-four", V, 1.0), sampler, copies=1200, tune=500, draws=100)[0]
    sd = np.sqrt(variance)
    assert np.max(got.mean_error / sd) < 0.01, "too few draws to tell"
    rms = float(np.sqrt(np.mean(((got.mean - exact.mean) / sd) ** 2)))
    return rms, float(np.max(np.abs(got.variance / variance - 1)))


@pytest.mark.quick("two")
@pytest.mark.parametrize("schedule", [Reshuffled(), NestedReshuffled(2)], ids=["one", "two"])
def test_one_level_or_two_meet_the_exact_posterior(schedule):
    """At the automatic step; longer runs gave .003 to .005 sd and 2 % for both."""
    rms, spread = distance(schedule, 0.05)
    assert rms < 0.02
    assert spread < 0.05


@pytest.mark.full
def test_two_levels_add_no_bias_where_a_fixed_order_does():
    """At a step with a visible bias: .018, .018 and .145 sd in longer runs."""
    one, two, fixed = (distance(s, 0.2) for s in (Reshuffled(), NestedReshuffled(2), Cyclic()))
    assert two[0] == pytest.approx(one[0], abs=0.01)
    assert two[1] == pytest.approx(one[1], abs=0.04)
    assert fixed[0] > 3 * one[0]
