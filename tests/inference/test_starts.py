"""Where chains start: warm starts that go on for as long as they lead anywhere."""

import math

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from daskfactor.executors import SerialExecutor
from daskfactor.inference import setting, starts, tweedie_chain
from daskfactor.inference.multiplicative import DispersionRule, initial_state, start_state
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.random import Stream, generator

K = 3


def counts(mean):
    """Poisson counts (40, 30), a fifth hidden; their means, and which are hidden."""
    rng = np.random.default_rng(0)
    mu = rng.exponential(size=(40, K)) @ rng.exponential(size=(K, 30))
    mu *= mean / mu.mean()
    hidden = rng.random(mu.shape) < 0.2
    return np.where(hidden, np.nan, rng.poisson(mu)), mu, hidden


def draw(V, sampler=None, **options):
    settings = {"draws": 200, "tune": 200, "random_seed": 0, "progressbar": False}
    model = dfac.TweedieNMF(K, dispersion=options.pop("dispersion", "auto"))
    return dfac.sample(V, model, sampler, **settings | options)


def climbed(V, passes):
    model = dfac.TweedieNMF(K, dispersion=1.0)
    with dfac.as_blocks(V, 2) as data:
        state, rule = start_state(data, model, 0, 0), DispersionRule(model, data)
        return starts.climb(data, model, state, SerialExecutor(), rule, passes)


def test_large_counts_are_poisson_and_their_intervals_hold_the_truth():
    V, mu, hidden = counts(1e5)
    tree = draw(V)
    assert tree.attrs["dispersion"] == 1.0
    W, H = (tree["posterior"][name].values[0].astype(float) for name in "WH")
    low, high = np.quantile((W @ H)[:, hidden], [0.05, 0.95], axis=0)
    assert np.mean((low < mu[hidden]) & (mu[hidden] < high)) > 0.75  # .4 after 100 passes
    density = tree["sample_stats"]["lp"].values[0]
    assert abs(density[:50].mean() - density[-50:].mean()) < 3 * density.std()


def test_a_number_of_passes_stays_that_number(monkeypatch):
    found = []

    def noted(*given):
        found.append(starts.climb(*given))
        return found[-1]

    monkeypatch.setattr(tweedie_chain, "climb", noted)
    V = counts(1e5)[0]
    for sampler in (dfac.PSGLD(warm_start=120), dfac.PSGLD()):
        draw(V, sampler, draws=1, tune=0, dispersion=1.0)
    fixed, automatic = (one.iterations for one in found[-2:])
    assert fixed == 120
    assert 200 < automatic < setting.LONGEST_WARM_START


def test_extrapolated_updates_come_further_than_plain_ones():
    V = counts(1e5)[0]
    plain, extrapolated = (climbed(V, passes).point for passes in ((300, 300), (100, 300)))
    best = climbed(V, (100, 2000)).point.objective[-1][1]
    behind, ahead = (one.objective[-1][1] - best for one in (plain, extrapolated))
    assert ahead < 0.2 * behind


def test_a_warm_start_that_ends_too_early_is_told(monkeypatch):
    monkeypatch.setattr(setting, "LONGEST_WARM_START", 120)
    with pytest.warns(SamplingWarning, match=r"after 118 passes.*warm_start=1180"):
        draw(counts(1e5)[0], draws=5, tune=5)


def test_extrapolated_updates_never_lose():
    model, hyper = dfac.TweedieNMF(K), Hyperparameters(1.0, 1.0, 1.0)
    with dfac.as_blocks(counts(1e3)[0], 2, dtype="float64") as data:
        state, values = start_state(data, model, 1, 0), [np.inf]
        for _ in range(60):
            given = data, model, state, SerialExecutor(), hyper, values[-1]
            values.append(starts._extrapolate(*given)[1])
    assert (np.diff(values[1:]) < 1e-9 * values[1]).all()


@pytest.mark.parametrize("attempt", [0, 2])
def test_bands_draw_the_rows_that_a_whole_factor_would_have(attempt):
    """Whatever the number of bands, numbers are those of one stream for each factor."""
    V, size = np.full((11, 7), 3.0), math.sqrt(3.0 / 4)
    for blocks in (1, 3):
        with dfac.as_blocks(V, blocks) as data:
            state = initial_state(data, 4, 5, 1, attempt)
            for factor, side in enumerate(("rows", "columns")):
                address = 5, 1, Stream.START, factor, *([attempt] if attempt else [])
                whole = size * (0.5 + generator(*address).random((data.shape[factor], 4)))
                np.testing.assert_array_equal(state.gather(side), whole.astype(data.dtype))
