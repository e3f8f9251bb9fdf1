"""Means, variances and their standard errors from correlated series of log-likelihoods."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Series(NamedTuple):
    """Log-likelihoods at the draws of one temperature.

    ``coarse`` is that of a Richardson-Romberg pair's coarse chain, whose draws are as far
    apart in time as ``fine``'s are after pairs of those have been averaged.
    """

    fine: Vector
    coarse: Vector | None = None
    acceptance: float = np.nan


class Summary(NamedTuple):
    """Of one temperature: E_t and Var_t of the log-likelihood, with standard errors."""

    mean: float
    variance: float
    mean_error: float
    variance_error: float
    total_error: float
    ess: float


def correlation_time(series: Vector) -> float:
    """1 + 2 Σ ρ_k by Geyer's initial monotone sequence (Geyer 1992, section 3.3), at least 1."""
    n = series.size
    centred = series - series.mean()
    power = float(centred @ centred)
    if n < 4 or power <= 0:
        return 1.0
    spectrum = np.fft.rfft(centred, 2 * n)
    correlation = np.fft.irfft(spectrum * spectrum.conj())[:n] / power
    pairs = correlation[: n // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    pairs = np.minimum.accumulate(pairs[: ends[0] if ends.size else pairs.size])
    return float(max(1.0, 2.0 * pairs.sum() - 1.0))


def standard_error(series: Vector) -> float:
    """Of the mean of a correlated series."""
    if series.size < 2:
        return float("inf")
    return float(np.sqrt(series.var(ddof=1) * correlation_time(series) / series.size))


def summarize(series: Series, mean_weight: float, variance_weight: float) -> Summary:
    """Moments of a temperature, and the error of ``mean_weight E + variance_weight Var``.

    The error is that of the mean of a L + b (L - mean)², whose terms are the linearised
    estimate's; of a Richardson-Romberg pair 2 fine - coarse is taken of everything.
    """
    parts = [(1.0, series.fine)]
    if series.coarse is not None:
        parts = [(2.0, series.fine), (-1.0, series.coarse)]
    squares = [(factor, own, (own - own.mean()) ** 2) for factor, own in parts]
    mean = sum(factor * own.mean() for factor, own, _ in squares)
    variance = sum(factor * square.mean() for factor, _, square in squares)
    first = _combined([(factor, own) for factor, own, _ in squares])
    second = _combined([(factor, square) for factor, _, square in squares])
    return Summary(
        float(mean),
        max(float(variance), 0.0),
        standard_error(first),
        standard_error(second),
        standard_error(mean_weight * first + variance_weight * second),
        first.size / correlation_time(first),
    )


def _combined(parts: list[tuple[float, Vector]]) -> Vector:
    """Σ factor · series, a series of twice the length averaged over pairs first."""
    length = min(own.size for _, own in parts)
    total = np.zeros(length)
    for factor, own in parts:
        step = own.size // length
        total += factor * own[: length * step].reshape(length, step).mean(axis=1)
    return total
