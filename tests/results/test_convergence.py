import warnings

import numpy as np
import pytest

from daskfactor.results.diagnose import convergence, effective_size, split_chains

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


@pytest.mark.parametrize("name", DRAWS)
def test_same_as_arviz(name):
    draws = DRAWS[name]
    found = convergence(draws)
    data = arviz.convert_to_dataset(draws[:, :, None])
    for method in ("bulk", "tail"):
        expected = float(arviz.ess(data, method=method)["x"].values[0])
        assert getattr(found, f"ess_{method}") == pytest.approx(expected, rel=1e-9), method
    # ArviZ wants two chains; halves of one are two.
    if draws.shape[0] > 1:
        assert found.rhat == pytest.approx(float(arviz.rhat(data)["x"].values[0]), rel=1e-9)


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9, -0.4])
def test_effective_size_of_a_known_process(coefficient):
    """An AR(1) process has tau = (1 + a) / (1 - a)."""
    draws = autoregressive(coefficient, 8, 20_000, 11)
    expected = draws.size * (1 - coefficient) / (1 + coefficient)
    assert effective_size(draws) == pytest.approx(expected, rel=0.06)


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


def test_split_leaves_the_middle_out():
    halves = split_chains(np.arange(10.0).reshape(2, 5))
    np.testing.assert_array_equal(halves, [[0, 1], [5, 6], [3, 4], [8, 9]])
