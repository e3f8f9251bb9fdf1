"""One sparse block, one step: one pass over its stored entries, both gradients at once.

For a stored entry (i, j) the pass computes mu = W[i] . H[j], turns it into a
coefficient a, and adds a H[j] to row i and a W[i] to row j: 6 K operations an
entry, and memory of order (m + n) K. One thread owns a block, so nothing races.

Where entries that are not stored are observed zeros, their part has a closed
form for two divergences: residual -1 for beta = 1 (column sums of the factors)
and -mu for beta = 2 (Gram matrices). It is added over the whole block, and
each stored entry's coefficient is what it has beyond an observed zero's. A
stored NaN is a missing entry: its coefficient takes the zero's part back.

Shapes, all C-contiguous: indptr (m + 1,), indices and values (nnz,), W (m, K),
H (n, K) of one float dtype.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.blas import add_matmul_nn, add_matmul_tn, matmul_nn
from daskfactor.kernels.elementwise import entry_kernels
from daskfactor.kernels.jit import inline, jit

Array = NDArray[Any]
Scalar = Any
EntryRule = Callable[..., tuple[Scalar, Scalar]]
ZERO_BETAS = (1.0, 2.0)
"""Divergences for which observed zeros need not be stored."""


class SparseKernels(NamedTuple):
    """The jitted kernels of one beta, for one meaning of entries that are not stored.

    As :class:`daskfactor.kernels.dense.DenseKernels`, with ``(indptr, indices,
    values)`` for the block and, in place of tiles, ``gram`` (K, K) of the factors'
    dtype or ``sums`` (K, K) float64 as scratch for the part of the zeros.

    gradient(block..., W, H, scale, floor, GW, GH, gram)
    gradient_curvature(block..., W, H, scale, floor, GW, GH, CW, CH, gram)
    multiplicative_rows(block..., W, H, floor, num, den, gram)
    multiplicative_cols(block..., W, H, floor, num, den, gram)
    evaluate(block..., W, H, floor, sums, out, cell_rows, cell_cols, mean, m2, count)

    Source: Şimşekli et al. 2017, eq. 6 and 7; Şimşekli et al. 2015, section 4.
    """

    gradient: Callable[..., None]
    gradient_curvature: Callable[..., None]
    multiplicative_rows: Callable[..., None]
    multiplicative_cols: Callable[..., None]
    evaluate: Callable[..., None]


@jit
def _dot(a: Array, b: Array) -> Scalar:
    total = a.dtype.type(0)
    for k in range(a.size):
        total += a[k] * b[k]
    return total


@jit
def _add(factor: Scalar, x: Array, out: Array) -> None:
    """``out += factor x``."""
    for k in range(out.size):
        out[k] += factor * x[k]


@jit
def _add_column_sums(factor: Scalar, other: Array, out: Array) -> None:
    """Add ``factor`` times the sum of the rows of ``other`` to every row of ``out``."""
    for k in range(out.shape[1]):
        total = 0.0
        for i in range(other.shape[0]):
            total += np.float64(other[i, k])
        value = out.dtype.type(factor * total)
        for i in range(out.shape[0]):
            out[i, k] += value


@jit
def _add_gram(factor: Scalar, own: Array, other: Array, out: Array, gram: Array) -> None:
    """``out += factor own (other.T other)``."""
    gram[:, :] = 0
    add_matmul_tn(other, other, gram)
    real = out.dtype.type
    for k in range(gram.shape[0]):
        for l in range(gram.shape[1]):
            gram[k, l] *= real(factor)
    add_matmul_nn(own, gram, out)


class _Rules(NamedTuple):
    """Coefficients of one stored entry.

    step    (v, mu, floor, scale) -> what it adds to (scale R, C)
    ratio   (v, mu, floor) -> what it adds to (M V mu**(beta - 2), C)
    fit     (v, mu, floor) -> what it adds to the sums of deviance and Pearson terms
    """

    step: EntryRule
    ratio: EntryRule
    fit: EntryRule


def _rules_of_observed(beta: float) -> _Rules:
    """An entry that is not stored adds nothing."""
    floored, weight, deviance = entry_kernels(beta)

    @inline
    def step(v: Scalar, mu: Scalar, floor: Scalar, scale: Scalar) -> tuple[Scalar, Scalar]:
        mean, seen = floored(mu, floor), v == v
        w = weight(mean)
        zero = type(mu)(0)
        return (scale * (v - mean) * w if seen else zero), (mean * w if seen else zero)

    @inline
    def ratio(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        mean, seen = floored(mu, floor), v == v
        w = weight(mean)
        zero = type(mu)(0)
        return (v * w if seen else zero), (mean * w if seen else zero)

    @inline
    def fit(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        mean = floored(mu, floor)
        v = v if v == v else mean  # a missing entry adds d(mu | mu) = 0
        pearson = (v - mean) * (v - mean) * weight(mean)
        return np.float64(deviance(v, mean)), np.float64(pearson)

    return _Rules(step, ratio, fit)


def _rules_beyond_zeros_1() -> _Rules:
    """beta = 1: an observed zero has R = -1 and C = 1, deviance and Pearson term mu."""
    observed = _rules_of_observed(1.0)
    fit_observed, floored = observed.fit, entry_kernels(1.0).floored

    @inline
    def step(v: Scalar, mu: Scalar, floor: Scalar, scale: Scalar) -> tuple[Scalar, Scalar]:
        real, seen = type(mu), v == v
        a = scale * v / floored(mu, floor) if seen else scale
        return a, (real(0) if seen else real(-1))

    @inline
    def ratio(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        real, seen = type(mu), v == v
        a = v / floored(mu, floor) if seen else real(0)
        return a, (real(0) if seen else real(-1))

    @inline
    def fit(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        deviance, pearson = fit_observed(v, mu, floor)
        return deviance - np.float64(mu), pearson - np.float64(mu)

    return _Rules(step, ratio, fit)


def _rules_beyond_zeros_2() -> _Rules:
    """beta = 2: an observed zero has R = -mu and C = mu; mu needs no floor."""
    observed = _rules_of_observed(2.0)
    fit_observed = observed.fit

    @inline
    def step(v: Scalar, mu: Scalar, floor: Scalar, scale: Scalar) -> tuple[Scalar, Scalar]:
        seen = v == v
        return (scale * v if seen else scale * mu), (type(mu)(0) if seen else -mu)

    @inline
    def ratio(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        seen = v == v
        zero = type(mu)(0)
        return (v if seen else zero), (zero if seen else -mu)

    @inline
    def fit(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        deviance, pearson = fit_observed(v, mu, mu)
        square = np.float64(mu) * np.float64(mu)
        return deviance - 0.5 * square, pearson - square

    return _Rules(step, ratio, fit)


def _rules(beta: float, zeros: bool) -> _Rules:
    if not zeros:
        return _rules_of_observed(beta)
    return _rules_beyond_zeros_1() if beta == 1.0 else _rules_beyond_zeros_2()


ZeroPart = Callable[[Scalar, Array, Array, Array, Array], None]
ZeroSums = Callable[[Array, Array, Array], tuple[float, float]]


def _zero_part(beta: float, zeros: bool) -> ZeroPart:
    """``out += factor C0 other``, C0 what mu**(beta - 1) would be were every entry a zero."""

    @jit
    def nothing(factor: Scalar, own: Array, other: Array, out: Array, gram: Array) -> None:
        pass

    @jit
    def ones(factor: Scalar, own: Array, other: Array, out: Array, gram: Array) -> None:
        _add_column_sums(factor, other, out)

    if not zeros:
        return nothing
    return ones if beta == 1.0 else _add_gram


def _zero_sums(beta: float, zeros: bool) -> ZeroSums:
    """Sums of the deviance and of the Pearson term were every entry a zero, in float64."""

    @jit
    def nothing(W: Array, H: Array, sums: Array) -> tuple[float, float]:
        return 0.0, 0.0

    @jit
    def means(W: Array, H: Array, sums: Array) -> tuple[float, float]:
        total = 0.0
        for k in range(W.shape[1]):
            rows = cols = 0.0
            for i in range(W.shape[0]):
                rows += np.float64(W[i, k])
            for j in range(H.shape[0]):
                cols += np.float64(H[j, k])
            total += rows * cols
        return total, total

    @jit
    def squares(W: Array, H: Array, sums: Array) -> tuple[float, float]:
        total = 0.0
        for k in range(W.shape[1]):
            for l in range(W.shape[1]):
                rows = cols = 0.0
                for i in range(W.shape[0]):
                    rows += np.float64(W[i, k]) * np.float64(W[i, l])
                for j in range(H.shape[0]):
                    cols += np.float64(H[j, k]) * np.float64(H[j, l])
                total += rows * cols
        return 0.5 * total, total

    if not zeros:
        return nothing
    return means if beta == 1.0 else squares


def _gradients(beta: float, zeros: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    step, zero_part = _rules(beta, zeros).step, _zero_part(beta, zeros)

    @jit
    def gradient(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        scale: float,
        floor: float,
        GW: Array,
        GH: Array,
        gram: Array,
    ) -> None:
        real = W.dtype.type
        GW[:, :] = 0
        GH[:, :] = 0
        zero_part(-scale, W, H, GW, gram)
        zero_part(-scale, H, W, GH, gram)
        for i in range(W.shape[0]):
            for p in range(indptr[i], indptr[i + 1]):
                j = indices[p]
                a, _ = step(real(values[p]), _dot(W[i], H[j]), real(floor), real(scale))
                _add(a, H[j], GW[i])
                _add(a, W[i], GH[j])

    @jit
    def gradient_curvature(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        scale: float,
        floor: float,
        GW: Array,
        GH: Array,
        CW: Array,
        CH: Array,
        gram: Array,
    ) -> None:
        real = W.dtype.type
        GW[:, :] = 0
        GH[:, :] = 0
        zero_part(-scale, W, H, GW, gram)
        zero_part(-scale, H, W, GH, gram)
        zero_part(1.0, W, H, CW, gram)
        zero_part(1.0, H, W, CH, gram)
        for i in range(W.shape[0]):
            for p in range(indptr[i], indptr[i + 1]):
                j = indices[p]
                a, c = step(real(values[p]), _dot(W[i], H[j]), real(floor), real(scale))
                _add(a, H[j], GW[i])
                _add(a, W[i], GH[j])
                if c != 0:
                    _add(c, H[j], CW[i])
                    _add(c, W[i], CH[j])

    return gradient, gradient_curvature


def _multiplicative(beta: float, zeros: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    ratio, zero_part = _rules(beta, zeros).ratio, _zero_part(beta, zeros)

    @jit
    def multiplicative_rows(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        floor: float,
        num: Array,
        den: Array,
        gram: Array,
    ) -> None:
        real = W.dtype.type
        zero_part(1.0, W, H, den, gram)
        for i in range(W.shape[0]):
            for p in range(indptr[i], indptr[i + 1]):
                j = indices[p]
                q, c = ratio(real(values[p]), _dot(W[i], H[j]), real(floor))
                _add(q, H[j], num[i])
                if c != 0:
                    _add(c, H[j], den[i])

    @jit
    def multiplicative_cols(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        floor: float,
        num: Array,
        den: Array,
        gram: Array,
    ) -> None:
        real = W.dtype.type
        zero_part(1.0, H, W, den, gram)
        for i in range(W.shape[0]):
            for p in range(indptr[i], indptr[i + 1]):
                j = indices[p]
                q, c = ratio(real(values[p]), _dot(W[i], H[j]), real(floor))
                _add(q, W[i], num[j])
                if c != 0:
                    _add(c, W[i], den[j])

    return multiplicative_rows, multiplicative_cols


@jit
def _monitor(
    W: Array,
    H: Array,
    cell_rows: Array,
    cell_cols: Array,
    mean: Array,
    m2: Array,
    count: int,
) -> None:
    """Welford update of the monitored cells."""
    for cell in range(cell_rows.size):
        value = _dot(W[cell_rows[cell]], H[cell_cols[cell]])
        delta = value - mean[cell]
        mean[cell] += delta / count
        m2[cell] += delta * (value - mean[cell])


def _evaluation(beta: float, zeros: bool) -> Callable[..., None]:
    fit, zero_sums = _rules(beta, zeros).fit, _zero_sums(beta, zeros)

    @jit
    def evaluate(
        indptr: Array,
        indices: Array,
        values: Array,
        W: Array,
        H: Array,
        floor: float,
        sums: Array,
        out: Array,
        cell_rows: Array,
        cell_cols: Array,
        mean: Array,
        m2: Array,
        count: int,
    ) -> None:
        real = W.dtype.type
        _monitor(W, H, cell_rows, cell_cols, mean, m2, count)
        total, pearson = zero_sums(W, H, sums)
        for i in range(W.shape[0]):
            row_total = row_pearson = 0.0
            for p in range(indptr[i], indptr[i + 1]):
                mu = _dot(W[i], H[indices[p]])
                deviance, square = fit(real(values[p]), mu, real(floor))
                row_total += deviance
                row_pearson += square
            total += row_total
            pearson += row_pearson
        out[0] -= total
        out[1] += pearson

    return evaluate


def sparse_kernels(beta: float, zeros: bool) -> SparseKernels:
    """Kernels of one beta-divergence, made once and compiled when first called.

    ``zeros`` says what an entry is that is not stored: an observed zero (beta = 1
    and 2 only) or missing.
    """
    return _sparse_kernels(float(beta), bool(zeros))


@lru_cache(maxsize=64)
def _sparse_kernels(beta: float, zeros: bool) -> SparseKernels:
    return SparseKernels(
        *_gradients(beta, zeros), *_multiplicative(beta, zeros), _evaluation(beta, zeros)
    )
