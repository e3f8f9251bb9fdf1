"""Richardson–Romberg pairs on thousands of independent copies of a tiny problem.

What every copy gave is kept apart: the spread over copies is the standard error of
whatever is made of them.
"""

from typing import NamedTuple

import numpy as np

from tests.statistical.exact import reference_posterior
from tests.statistical.replicas import Draws, run_tracks


class Pair(NamedTuple):
    """The two tracks of P-SGRRLD: with ε / 2, and with ε."""

    fine: Draws
    coarse: Draws


class Bias(NamedTuple):
    """Distance from the exact posterior with its standard error, (row, col). Of E μ in posterior
    standard deviations; of Var μ as a share of it."""

    mean: np.ndarray
    mean_error: np.ndarray
    variance: np.ndarray
    variance_error: np.ndarray

    @property
    def mean_size(self):
        """Root mean square over the cells."""
        return float(np.sqrt(np.mean(self.mean**2)))


def run_pair(case, sampler, copies, draws, seed=0):
    """Both tracks of P-SGRRLD on every copy; ``draws`` count the fine track's."""
    return Pair(*run_tracks(case, sampler, copies=copies, tune=200, draws=draws, seed=seed))


def together(first, second):
    """The copies of two runs as one."""
    return Pair(
        *(
            Draws(
                np.concatenate((one.mean, other.mean)),
                np.concatenate((one.square, other.square)),
                (one.sum_w + other.sum_w) / 2,
            )
            for one, other in zip(first, second, strict=True)
        )
    )


def bias(parts, case):
    """Bias of a combination of tracks, such as [(2, fine), (-1, coarse)]. Variances are combined as
    moments are; their error is that of E (μ - m)² about the exact mean m."""
    exact = reference_posterior(case)
    m, v = exact["mean_mu"], exact["var_mu"]
    mean = sum(weight * draws.mean for weight, draws in parts)
    spread = sum(weight * (draws.square - 2 * m * draws.mean) for weight, draws in parts)
    each = [w * (own.square.mean(axis=0) - own.mean.mean(axis=0) ** 2) for w, own in parts]
    variance = sum(each)
    root = np.sqrt(len(np.asarray(mean)))
    return Bias(
        (np.mean(mean, axis=0) - m) / np.sqrt(v),
        np.std(mean, axis=0) / root / np.sqrt(v),
        variance / v - 1.0,
        np.std(spread, axis=0) / root / v,
    )


def romberg(fine, coarse):
    """2 fine - coarse."""
    return [(2.0, fine), (-1.0, coarse)]


def noise_ratio(fine, coarse):
    """Variance of the estimate 2 fine - coarse of E μ over that of the fine track alone."""
    extrapolated = (2 * fine.mean - coarse.mean).var(axis=0)
    return float(np.mean(extrapolated / fine.mean.var(axis=0)))
