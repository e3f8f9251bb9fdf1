import warnings

import numpy as np
import pytest
from scipy import stats

from daskfactor.results.diagnose import convergence, trend
from daskfactor.results.ranks import band, uniformity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz


def autoregressive(coefficient, chains, draws, seed):
    noise = np.random.default_rng(seed).standard_normal((chains, draws))
    out = np.empty_like(noise)
    out[:, 0] = noise[:, 0] / np.sqrt(1 - coefficient**2)
    for t in range(1, draws):
        out[:, t] = coefficient * out[:, t - 1] + noise[:, t]
    return out


DRAWS = {
    "independent": autoregressive(0.0, 4, 500, 0),
    "slow": autoregressive(0.95, 4, 501, 1),
    "alternating": autoregressive(-0.8, 3, 200, 2),
    "skewed": np.exp(3 * autoregressive(0.5, 2, 300, 3)),
    "apart": autoregressive(0.3, 4, 100, 4) + np.arange(4)[:, None],
    "ties": np.round(autoregressive(0.6, 2, 50, 5)),
    "wider": autoregressive(0.0, 2, 80, 6) * np.array([[1.0], [4.0]]),
    "shortest": autoregressive(0.0, 2, 4, 7),
    "short": autoregressive(0.7, 2, 9, 8),
    "one chain": autoregressive(0.7, 1, 400, 9),
}


@pytest.mark.libraries
@pytest.mark.parametrize("name", DRAWS)
def test_same_as_arviz(name):
    draws = DRAWS[name]
    found, data = convergence(draws), arviz.convert_to_dataset(draws[:, :, None])
    for method in ("bulk", "tail"):
        # Releases differ in what they take for tails.
        tails = {"prob": (0.05, 0.95)} if method == "tail" else {}
        expected = float(arviz.ess(data, method=method, **tails)["x"].values[0])
        assert getattr(found, f"ess_{method}") == pytest.approx(expected, rel=1e-9), method
    # ArviZ wants two chains; halves of one are two.
    if draws.shape[0] > 1:
        assert found.rhat == pytest.approx(float(arviz.rhat(data)["x"].values[0]), rel=1e-9)


def test_one_chain_that_drifts_is_seen():
    still = autoregressive(0.2, 1, 400, 12)
    assert convergence(still).rhat < 1.02
    assert convergence(still + np.linspace(0, 5, 400)).rhat > 1.5


def test_what_cannot_be_said_is_nan():
    assert np.isnan(convergence(np.ones((2, 3)))).all()
    assert np.isnan(convergence(np.full((2, 50), 3.7))).all()
    holed = autoregressive(0.0, 2, 50, 13)
    holed[1, 4] = np.nan
    assert np.isnan(convergence(holed)).all()


@pytest.mark.parametrize("rho", [0.0, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("length", [120, 500, 3000])
def test_stationary_series_have_no_trend(rho, length):
    series = autoregressive(rho, 100, length, 8) * np.sqrt(1 - rho**2)
    found = [trend(one[None], spread=1.0) for one in series]
    assert sum(one is not None for one in found) <= 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_is_seen_above_noise_or_above_what_is_stationary(sign):
    noise, ramp = autoregressive(0.5, 2, 500, 9) * 0.75**0.5, sign * np.linspace(0, 1, 500)
    found = trend(np.stack([noise[0], noise[1] + 2 * ramp]))
    assert found is not None
    assert found.change == pytest.approx(sign * 1.5, abs=0.5)
    assert found.sd == pytest.approx(1.0, abs=0.2)
    assert trend(noise + 0.2 * ramp) is None
    slow = np.cumsum(noise[:1], axis=1) / 20 + 20 * ramp * np.sqrt(np.abs(ramp))
    assert trend(slow) is None  # slow series look alike, but for their size
    assert trend(slow, spread=1.0) is not None
    assert trend((noise + 9 * ramp)[:, :80]) is None


COUNT, LEVELS = 150, 15


def test_p_values_of_uniform_ranks_are_uniform():
    rng = np.random.default_rng(0)
    found = [uniformity(rng.integers(0, LEVELS + 1, COUNT), LEVELS) for _ in range(1000)]
    for name in ("ecdf_p", "chi_square_p"):
        p = np.array([getattr(one, name) for one in found])
        for level in (0.01, 0.1, 0.5):
            within = np.mean(p <= level)
            assert abs(within - level) < 5 * np.sqrt(level * (1 - level) / p.size) + 0.01
    for level in (0.01, 0.1):
        within = np.mean([one.p <= level for one in found])
        assert within < level + 5 * np.sqrt(level * (1 - level) / len(found))
        assert within > level / 4
    for name in ("shift", "spread"):
        z = np.array([getattr(one, name) for one in found])
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs(z.var() - 1) < 5 * np.sqrt(2 / z.size)


@pytest.mark.parametrize(
    ("name", "a", "b", "sign"),
    [
        ("shift", 1.6, 1.0, 1),
        ("shift", 1.0, 1.6, -1),
        ("spread", 0.6, 0.6, 1),
        ("spread", 1.8, 1.8, -1),
    ],
)
def test_what_is_not_uniform_is_seen_and_named(name, a, b, sign):
    rng = np.random.default_rng(1)
    ranks = rng.binomial(LEVELS, rng.beta(a, b, 2 * COUNT))
    found = uniformity(ranks, LEVELS)
    assert found.p < 0.001
    assert max(found.ecdf_p, found.chi_square_p) < 0.05
    assert sign * getattr(found, name) > 3.5


def test_bins_of_many_levels_expect_what_they_hold():
    ranks = np.random.default_rng(2).integers(0, 64, 100)
    parts = np.array_split(np.arange(64), 20)
    observed = [np.isin(ranks, part).sum() for part in parts]
    wanted = stats.chisquare(observed, [100 * len(part) / 64 for part in parts]).pvalue
    assert uniformity(ranks, 63).chi_square_p == pytest.approx(wanted)


def test_the_band_holds_whole_lines():
    lower, upper = band(COUNT, LEVELS)
    rng = np.random.default_rng(3)
    drawn = rng.multinomial(COUNT, np.full(LEVELS + 1, 1 / (LEVELS + 1)), 4000)
    share = drawn.cumsum(axis=1)[:, :-1] / COUNT
    inside = ((share >= lower) & (share <= upper)).all(axis=1).mean()
    assert 0.93 < inside < 0.98
