"""`discretization_bias` against long runs with and without the bias, and a pair that is none."""

import warnings

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from daskfactor.inference import langevin
from daskfactor.results.diagnose import all_series, effective_size

pytestmark = pytest.mark.statistical

QUIET = {"progressbar": False, "executor": "serial"}
MODEL = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=1.0)
COARSE = dfac.PSGLD(step=0.5, transition="euler", warm_start=20)


def counts():
    rng = np.random.default_rng(5)
    return rng.poisson(rng.gamma(1, 1, (20, 2)) @ rng.gamma(1, 1, (2, 15))).astype(float)


def sample(sampler, draws, seed=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dfac.sample(
            counts(), MODEL, sampler, draws, 200, random_seed=seed, blocks=2, **QUIET
        )


def series(tree):
    return {one.name: one.values for one in all_series(tree, 4, 0, None)[0] if one.kind != "scale"}


@pytest.fixture(scope="module")
def runs():
    """A biased run, its long continuation, and exact draws."""
    return (
        sample(COARSE, 300),
        series(sample(COARSE, 2000, 1)),
        series(sample(dfac.BlockHMC(), 3000)),
    )


def distance(found, runs):
    """The bias of lp and of the mean of WH, in errors from what it is; the smallest |bias|."""
    away, sizes = [], []
    for name in ("lp", "mu_mean"):
        biased, exact = runs[1][name], runs[2][name]
        true = (biased.mean() - exact.mean()) / exact.std()
        error = np.sqrt(sum(own.var() / effective_size(own) for own in (biased, exact)))
        one = found.sel(functional=name)
        # The second order of the bias, of which half as much again is seen.
        slack = 0.5 * abs(true)
        rest = max(0.0, abs(float(one["bias"]) - true) - slack)
        away.append(rest / np.hypot(error / exact.std(), float(one["error"])))
        sizes.append(abs(true))
    return max(away), max(sizes)


def test_coupled_chains_find_the_bias(runs):
    with pytest.warns(SamplingWarning, match=r"the finite step moves the mean of"):
        found = dfac.discretization_bias(runs[0], draws=1000, cells=4, **QUIET)
    assert found.attrs["method"] == "coupled"
    away, size = distance(found, runs)
    assert size > 0.3, "no bias to be found"
    assert away < 5, str(found)
    assert found["error"].sel(functional="lp") < 0.1


@pytest.mark.full
def test_exact_draws_find_it_too(runs, monkeypatch):
    monkeypatch.setattr(dfac.PSGLD, "pair", lambda self: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dfac.discretization_bias(runs[0], draws=400, cells=4, **QUIET)
    assert found.attrs["method"] == "exact"
    assert distance(found, runs)[0] < 5, str(found)


def test_a_pair_with_one_step_is_seen(runs, monkeypatch):
    monkeypatch.setattr(langevin, "half_step", lambda base, iteration: base(iteration // 2))
    found = dfac.discretization_bias(runs[0], draws=1000, cells=4, **QUIET)
    assert distance(found, runs)[0] > 5, str(found)


def test_no_bias_is_told_where_the_step_is_small():
    tree = sample(dfac.PSGLD(step=0.03), 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dfac.discretization_bias(tree, draws=200, **QUIET)
    assert found.verdict.startswith("No bias above 0.2")


@pytest.mark.full
def test_the_fine_chain_of_a_pair_has_the_bias_of_half_a_step(runs):
    """Which it says it has; what is taken off means is tested in `test_richardson`."""
    pair = dfac.PSGRRLD(step=0.5, warm_start=20)
    fine, exact = series(sample(pair, 5000, 1))["lp"], runs[2]["lp"]
    true = (fine.mean() - exact.mean()) / exact.std()
    error = np.sqrt(sum(1 / effective_size(own) for own in (fine, exact)))
    assert abs(true) > 5 * error, "no bias to be found"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dfac.discretization_bias(sample(pair, 300), draws=1000, cells=4, **QUIET)
    one = found.sel(functional="lp")
    away = abs(float(one["bias"]) - true) - 0.5 * abs(true)
    assert away < 5 * np.hypot(error, float(one["error"])), str(found)
    assert np.sign(float(one["bias"])) == np.sign(true)
