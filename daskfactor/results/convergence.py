r"""R-hat and effective sample sizes of one number that was drawn again and again.

The rank-normalised split versions, for any number of chains, also one. ArviZ has
the same, and the tests compare with it; it brings more with it than these few
lines are worth.

Notes
-----
Vehtari, Gelman, Simpson, Carpenter and Bürkner 2021, "Rank-normalization, folding,
and localization: an improved R-hat for assessing convergence of MCMC".
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]

LEAST_DRAWS: Final = 4
"""Draws per chain below which nothing can be said."""
TAILS: Final = (0.05, 0.95)


class Convergence(NamedTuple):
    """R-hat, and how many independent draws the draws are worth, for centre and tails."""

    rhat: float
    ess_bulk: float
    ess_tail: float


UNKNOWN: Final = Convergence(float("nan"), float("nan"), float("nan"))


def convergence(draws: NDArray[np.floating]) -> Convergence:
    r"""Diagnostics of one quantity.

    .. math:: \hat R = \max(\hat R_{\rm bulk}, \hat R_{\rm folded}), \qquad
        {\rm ESS} = \frac{MN}{-1 + 2 \sum_t \hat\rho_t}

    Parameters
    ----------
    draws
        (chain, draw), in any unit.

    Returns
    -------
    Convergence
        Without unit; NaN where there are fewer than four draws a chain, where a draw
        is not finite, and where the quantity never changes.

    Notes
    -----
    Vehtari et al. 2021, sections 3 and 4.
    """
    drawn: Array = np.asarray(draws, dtype=np.float64)
    if drawn.shape[1] < LEAST_DRAWS or not np.isfinite(drawn).all():
        return UNKNOWN
    # What rounding alone has left over is no variation.
    if np.ptp(drawn) <= 1e-12 * np.abs(drawn).max():
        return UNKNOWN
    halves = split_chains(drawn)
    ranked = rank_normalised(halves)
    folded = rank_normalised(np.abs(halves - np.median(halves)))
    ends = np.quantile(drawn, TAILS)
    return Convergence(
        max(_rhat(ranked), _rhat(folded)),
        effective_size(ranked),
        min(effective_size(split_chains((drawn <= end).astype(np.float64))) for end in ends),
    )


def split_chains(draws: Array) -> Array:
    """First and second half of every chain as chains of their own, (2 chains, draws // 2)."""
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def rank_normalised(draws: Array) -> Array:
    """Normal scores of the ranks over all chains (Vehtari et al. 2021, section 4.1)."""
    ranks = stats.rankdata(draws, axis=None).reshape(draws.shape)
    return np.asarray(special.ndtri((ranks - 0.375) / (draws.size + 0.25)))


def _rhat(draws: Array) -> float:
    """Root of the pooled over the mean variance (Vehtari et al. 2021, section 3.1)."""
    length = draws.shape[1]
    within = draws.var(axis=1, ddof=1).mean()
    between = draws.mean(axis=1).var(ddof=1)
    if within == 0:
        return float("inf") if between > 0 else float("nan")
    return float(np.sqrt((length - 1) / length + between / within))


def effective_size(draws: Array) -> float:
    """Number of independent draws with the same error of the mean.

    Autocorrelations are summed in pairs of neighbouring lags while these are
    positive, made monotone (Geyer 1992, section 3.3).

    Parameters
    ----------
    draws
        (chain, draw), two draws a chain or more; as many as there are if they never
        change.
    """
    if np.ptp(draws) == 0:
        return float(draws.size)
    rho = _autocorrelation(draws)
    length = draws.shape[1]
    count = 1 + len(range(1, length - 3, 2))
    pairs = rho[: 2 * count].reshape(count, 2).sum(axis=1)
    ended = np.flatnonzero(pairs <= 0)
    last = int(ended[0]) if ended.size else count - 1
    edge = float(rho[2 * last])
    kept = np.minimum.accumulate(pairs[:last])
    tau = -1.0 + 2.0 * float(kept.sum()) + (edge if pairs[last] >= 0 else max(edge, 0.0))
    # Draws that alternate are worth more than independent ones, but within reason.
    return float(draws.size / max(tau, 1.0 / np.log10(draws.size)))


def _autocorrelation(draws: Array) -> Array:
    """Over lags, from all chains together (Vehtari et al. 2021, section 3.2)."""
    chains, length = draws.shape
    centred = draws - draws.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(centred, 2 * length)) ** 2
    covariance = np.fft.irfft(power, axis=1)[:, :length].mean(axis=0) / length
    within = covariance[0] * length / (length - 1)
    pooled = covariance[0] + (draws.mean(axis=1).var(ddof=1) if chains > 1 else 0.0)
    rho = np.asarray(1.0 - (within - covariance) / pooled)
    rho[0] = 1.0
    return rho
