"""P-SGRRLD against P-SGLD at the same step, on a posterior that is known exactly.

P-SGLD with step ε is P-SGRRLD's coarse track. Its bias is a₁ε + a₂ε² + …; that of
2 fine - coarse is -a₂ε²/2 + …, so that halving ε halves the one (nearly) and quarters
the other. `python -m benchmarks --only romberg` prints the same.
"""

import numpy as np
import pytest

from daskfactor.inference.langevin import PSGRRLD
from tests.statistical.exact import CASES
from tests.statistical.pairs import bias, noise_ratio, romberg, run_pair, together

pytestmark = [
    pytest.mark.statistical,
    pytest.mark.full,  # test_posteriors.py has one case
]

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


def test_bias_of_the_variance(biases):
    """At the same ε a third of P-SGLD's at most is left, and less than the fine track's own."""
    for step in (LARGE, SMALL):
        found = biases["romberg"][step]
        for other, share in (("coarse", 1 / 3), ("fine", 1.0)):
            alone = biases[other][step]
            assert np.all(alone.variance > 5 * alone.variance_error)
            assert np.abs(found.variance).mean() < share * alone.variance.mean()


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


def test_coupled_noise_costs_next_to_nothing(runs):
    """Var(2 fine - coarse) is about one chain's; on noises of their own it would be five times."""
    first, second = runs[SMALL]
    assert noise_ratio(*first) < 1.3
    assert noise_ratio(*runs[LARGE][0]) < 1.3
    assert 4.0 < noise_ratio(first.fine, second.coarse) < 6.0
