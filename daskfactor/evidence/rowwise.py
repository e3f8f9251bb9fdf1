"""Exact moves of entire rows of a factor: proposals from the multiplicative update.

Given the other factor H, the rows of W are independent under
p(V | W, H)^t p(W, H). With s = t / phi, num and den the two sums of the
multiplicative update at the present row and

    a_k = w_k max(num_k, 0),    r_k = den_k + rate,
    num = s sum_j ratio h,    den = s sum_j curvature h,

a row is proposed at once by the transition of a Cox-Ingersoll-Ross
process with these coefficients fixed (Baker et al. 2018, section 3), of length tau:

    n_k ~ Poisson(w_k r_k / (e^tau - 1)),
    w'_k ~ Gamma(a_k + alpha + n_k, rate r_k / (1 - e^-tau)),

and accepted by Metropolis and Hastings' rule with the same n on the way back, so
the chain has no bias of step size at any t. With one component and beta = 1 every
proposal is accepted; tau = inf (n = 0) then is a Gibbs sampler.

Random numbers come from a NumPy generator that the caller made for this chain.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import polynomials
from daskfactor.kernels.jit import jit, jit_inner
from daskfactor.kernels.views import entry_kernels
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]

SMALLEST = 1e-150
"""Floor of gamma draws that underflow, never moved to; squares stay positive."""
LONGEST = 30.0
"""Lengths tau from which on n = 0: the proposal depends on the present row by ``a`` alone."""

TOTAL, SUMS, NEW, COUNT, OLD, PROPOSED, SCRATCH = 0, 1, 2, 3, 4, 6, 8
"""Rows of the scratch: OLD and PROPOSED hold num, and den in the row after it."""


class Entries(NamedTuple):
    """Observed entries by rows: ``indptr[i]:indptr[i + 1]`` are row i's.

    Where the curvature of a zero is constant (`Likelihood.zeros`), observed zeros are left
    out, and ``missing`` (with its own pointers) lists the columns that are not observed;
    else every observed entry is listed, and ``missing`` is not looked at. ``numbers`` are the
    law's (`Likelihood.numbers`).
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int64]
    values: NDArray[np.float64]
    missing_indptr: NDArray[np.int64]
    missing: NDArray[np.int64]
    numbers: tuple[float, ...] = ()


class Prior(NamedTuple):
    """Gamma(shape, rate) on a factor, and a mask of components that never move, (K,)."""

    rate: float
    shape: float
    frozen: NDArray[np.bool_]


class Target(NamedTuple):
    """Density p(V | W, H)^t p(W, H) with s = t / dispersion, for both factors in turn."""

    by_rows: Entries
    by_cols: Entries
    s: float
    prior_w: Prior
    prior_h: Prior


@jit_inner
def _sum_columns(H: Array, work: Array) -> None:
    """Set work[TOTAL] to the sums of H over its rows."""
    for k in range(H.shape[1]):
        work[TOTAL, k] = 0.0
    for j in range(H.shape[0]):
        for k in range(H.shape[1]):
            work[TOTAL, k] += H[j, k]


@jit_inner
def _sum_observed(H: Array, data: Entries, row: int, work: Array) -> None:
    """Set work[SUMS] to the sums of H over the observed columns of a row, from those over all."""
    for k in range(H.shape[1]):
        work[SUMS, k] = work[TOTAL, k]
    for p in range(data.missing_indptr[row], data.missing_indptr[row + 1]):
        for k in range(H.shape[1]):
            work[SUMS, k] -= H[data.missing[p], k]


@jit_inner
def _propose(W: Array, i: int, work: Array, s: float, prior: Prior, share: float, rng: Any) -> None:
    """Draw work[NEW] = w' and work[COUNT] = n of row i."""
    for k in range(W.shape[1]):
        rate = s * work[OLD + 1, k] + prior.rate
        n = 0.0
        if share < 1.0:
            n = float(rng.poisson(W[i, k] * rate * (1.0 / share - 1.0)))
        shape = s * W[i, k] * max(work[OLD, k], 0.0) + prior.shape + n
        work[COUNT, k] = n
        work[NEW, k] = W[i, k]
        if not prior.frozen[k]:
            work[NEW, k] = max(rng.standard_gamma(shape) * share / rate, SMALLEST)


@jit_inner
def _stirling(y: float) -> float:
    """Return log Gamma(y) but for a constant, to 2e-9 for y >= 6."""
    inverse = 1.0 / y
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square / 1260))
    return (y - 0.5) * math.log(y) - y + series


@jit_inner
def _log_gamma_ratio(x: float, y: float) -> float:
    """Return log Gamma(x) - log Gamma(y) for x, y > 0: Stirling's series after six recurrences."""
    below = x * (x + 1) * (x + 2) * (x + 3) * (x + 4) * (x + 5)
    above = y * (y + 1) * (y + 2) * (y + 3) * (y + 4) * (y + 5)
    return _stirling(x + 6.0) - _stirling(y + 6.0) + math.log(above / below)


@jit_inner
def _log_ratio(W: Array, i: int, work: Array, s: float, prior: Prior, share: float) -> float:
    """Return the log of p(w') q(w', n -> w) / (p(w) q(w, n -> w')), p the prior."""
    total = 0.0
    for k in range(W.shape[1]):
        if prior.frozen[k]:
            continue
        old, new, n = W[i, k], work[NEW, k], work[COUNT, k]
        if new <= SMALLEST:
            return -np.inf
        rate = s * work[OLD + 1, k] + prior.rate
        new_rate = s * work[PROPOSED + 1, k] + prior.rate
        a = s * old * max(work[OLD, k], 0.0)
        new_a = s * new * max(work[PROPOSED, k], 0.0)
        fixed = prior.shape + n
        total += _log_gamma_ratio(a + fixed, new_a + fixed)
        total += new_a * math.log(old * new_rate / share) - a * math.log(new * rate / share)
        if new_rate != rate:
            total += (fixed + n) * math.log(new_rate / rate)
        rest = 1.0 / share - 1.0
        total += old * (rate * rest + prior.rate - new_rate / share)
        total -= new * (new_rate * rest + prior.rate - rate / share)
    return total


class RowKernels(NamedTuple):
    """Jitted kernels of one likelihood.

    look(W, i, H, data, row, work, num) -> log-likelihood of a row at dispersion 1 but for a
        constant; W[i] is the row of the factor, ``row`` that of the data. ``work[SUMS]``
        holds the sums of H over observed columns; ``work[num]`` and ``work[num + 1]`` get
        num and den.
    start_chain(W, H, target, count)
        ``count`` multiplicative updates of W and of H in turn, in place.
    run_sweeps(W, H, target, tau, rng, fits) -> accepted rows of both factors, all together
        ``fits.size`` sweeps, W then H, in place, with proposals of length tau; ``rng`` is
        the numpy.random.Generator of this chain, and ``fits`` gets the log-likelihood after
        each sweep, as log_fit has it.
    log_fit(W, H, by_rows) -> log-likelihood at dispersion 1 but for a constant

    W (m, K) and H (n, K) are float64 and positive.
    """

    look: Callable[..., float]
    start_chain: Callable[..., None]
    run_sweeps: Callable[..., int]
    log_fit: Callable[..., float]


def _fit_of(likelihood: Likelihood) -> Callable[..., Any]:
    """Make ``fit`` from a likelihood's other functions."""
    weight, curvature, ratio, deviance, _ = entry_kernels(likelihood)

    def fit(v: float, mu: float, *numbers: float) -> tuple[float, float, float]:
        w = weight(v, mu, *numbers)
        above, below = ratio(v, mu, w, *numbers), curvature(1.0, v, mu, w, *numbers)
        return -deviance(v, mu, *numbers), above, below

    return fit


@lru_cache(maxsize=32)
def row_kernels(likelihood: Likelihood) -> RowKernels:
    """Make the kernels of one likelihood, which are compiled when first called.

    ``start_chain`` moves w to (s w num + alpha) / (s den + rate), the mean of the proposal for
    tau = inf: unlike an update towards the mode, it leaves nothing at zero, where chains are slow.
    """
    entry = likelihood.entry(polynomials)
    fit, summed = jit_inner(entry.fit or _fit_of(likelihood)), likelihood.zeros == "constant"

    @jit_inner
    def look(W: Array, i: int, H: Array, data: Entries, row: int, work: Array, num: int) -> float:
        total = 0.0
        K = W.shape[1]
        for k in range(K):
            work[num, k] = 0.0
            work[num + 1, k] = work[SUMS, k] if summed else 0.0
            total -= W[i, k] * work[num + 1, k]
        for p in range(data.indptr[row], data.indptr[row + 1]):
            j = data.indices[p]
            mu = 0.0
            for k in range(K):
                mu += W[i, k] * H[j, k]
            value, ratio, curvature = fit(data.values[p], mu, *data.numbers)
            total += value
            for k in range(K):
                work[num, k] += ratio * H[j, k]
            if not summed:
                for k in range(K):
                    work[num + 1, k] += curvature * H[j, k]
        return total

    @jit_inner
    def start_rows(W: Array, H: Array, data: Entries, s: float, prior: Prior, work: Array) -> None:
        _sum_columns(H, work)
        for i in range(W.shape[0]):
            _sum_observed(H, data, i, work)
            look(W, i, H, data, i, work, OLD)
            for k in range(W.shape[1]):
                if not prior.frozen[k]:
                    above = s * W[i, k] * max(work[OLD, k], 0.0) + prior.shape
                    W[i, k] = above / (s * work[OLD + 1, k] + prior.rate)

    @jit
    def start_chain(W: Array, H: Array, target: Target, count: int) -> None:
        work = np.empty((SCRATCH, W.shape[1]))
        for _ in range(count):
            start_rows(W, H, target.by_rows, target.s, target.prior_w, work)
            start_rows(H, W, target.by_cols, target.s, target.prior_h, work)

    @jit_inner
    def move_rows(
        W: Array, H: Array, data: Entries, s: float, prior: Prior, tau: float, rng: Any, work: Array
    ) -> tuple[float, int]:
        total, accepted = 0.0, 0
        share = 1.0 if tau >= LONGEST else 1.0 - math.exp(-tau)
        _sum_columns(H, work)
        for i in range(W.shape[0]):
            _sum_observed(H, data, i, work)
            fit = look(W, i, H, data, i, work, OLD)
            _propose(W, i, work, s, prior, share, rng)
            new_fit = look(work, NEW, H, data, i, work, PROPOSED)
            change = s * (new_fit - fit) + _log_ratio(W, i, work, s, prior, share)
            if change >= 0.0 or rng.random() < math.exp(change):
                for k in range(W.shape[1]):
                    W[i, k] = work[NEW, k]
                fit = new_fit
                accepted += 1
            total += fit
        return total, accepted

    @jit
    def run_sweeps(W: Array, H: Array, target: Target, tau: float, rng: Any, fits: Array) -> int:
        by_rows, by_cols, s, prior_w, prior_h = target
        work = np.empty((SCRATCH, W.shape[1]))
        accepted = 0
        for sweep in range(fits.size):
            _, rows = move_rows(W, H, by_rows, s, prior_w, tau, rng, work)
            fits[sweep], cols = move_rows(H, W, by_cols, s, prior_h, tau, rng, work)
            accepted += rows + cols
        return accepted

    @jit
    def log_fit(W: Array, H: Array, by_rows: Entries) -> float:
        work = np.empty((SCRATCH, W.shape[1]))
        _sum_columns(H, work)
        total = 0.0
        for i in range(W.shape[0]):
            _sum_observed(H, by_rows, i, work)
            total += look(W, i, H, by_rows, i, work, OLD)
        return total

    return RowKernels(look, start_chain, run_sweeps, log_fit)
