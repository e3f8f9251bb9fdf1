"""One sparse block, one step: one pass over its stored entries, both gradients at once.

For a stored entry (i, j) the pass computes mu = W[i] . H[j], turns it into a
coefficient a, and adds a H[j] to row i and a W[i] to row j: 6 K operations an
entry, and memory of order (m + n) K. Row i and its gradient stay in registers
while the entries of the row are visited; rows j of H and of its gradient are
asked for a few entries ahead. One thread owns a block, so nothing races.

Where entries that are not stored are observed zeros, their part has a closed
form if a zero's curvature is 1 and its residual -1 (column sums of the factors),
or if they are mu and -mu (Gram matrices): see `Likelihood.zeros`. It is added over
the whole block, without a floor under mu, and a stored entry's coefficient is what
it has beyond an observed zero's. A stored NaN is a missing entry: its coefficient
takes the zero's part back.

Shapes, all C-contiguous: indptr (m + 1,), indices and values (nnz,), W (m, K),
H (n, K) of one float dtype; scratch gram (K, K) of that dtype and sums
(2, K, K) and wide (any, K), both float64.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit, stack_array
from daskfactor.kernels.linalg import (
    add_matmul_nn,
    add_matmul_tn,
    add_row,
    add_to_row,
    dot_row,
    load_row,
    prefetch_row,
    store_row,
)
from daskfactor.kernels.views import (
    BlockKernels,
    Kernel,
    Law,
    Watched,
    entry_kernels,
    floored,
    law_at,
)
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Scalar = Any
EntryRule = Callable[..., tuple[Scalar, Scalar]]
Rows = tuple[Array, Array, Array, Any]
Scratch = tuple[Array, Array, Array]

CHUNK = 256
"""Entries whose fit is computed together."""
AHEAD = 8
"""How many entries before its turn a row is asked for."""


class Rules(NamedTuple):
    """Coefficients of one stored entry.

    step    (v, mu, law, scale) -> what it adds to (scale R, C)
    ratio   (v, mu, law) -> what it adds to (Q, C) of a multiplicative update
    fit     (v, mu, law) -> what it adds to the sums of deviance and Pearson terms

    Those of blocks with weights take the entry's as one more argument.
    """

    step: EntryRule
    ratio: EntryRule
    fit: EntryRule


def _rules_of_observed(likelihood: Likelihood) -> Rules:
    """An entry that is not stored adds nothing."""
    weight, curvature, numerator, deviance, _ = entry_kernels(likelihood)

    @inline
    def step(v: Scalar, mu: Scalar, law: Law, scale: Scalar) -> tuple[Scalar, Scalar]:
        (floor, numbers), seen = law, v == v
        mean = floored(mu, floor)
        w = weight(v, mean, *numbers)
        zero = type(mu)(0)
        return (scale * (v - mean) * w if seen else zero), (
            curvature(type(mu)(1), v, mean, w, *numbers) if seen else zero
        )

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        (floor, numbers), seen = law, v == v
        mean = floored(mu, floor)
        w = weight(v, mean, *numbers)
        # Both before they are chosen from: inside the choices LLVM orders the sums of K
        # products after them otherwise, and bits would not be those of earlier versions.
        q = numerator(v, mean, w, *numbers)
        c = curvature(type(mu)(1), v, mean, w, *numbers)
        zero = type(mu)(0)
        return (q if seen else zero), (c if seen else zero)

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        floor, numbers = law
        mean = floored(mu, floor)
        v = v if v == v else mean  # a missing entry adds d(mu | mu) = 0
        pearson = (v - mean) * (v - mean) * weight(v, mean, *numbers)
        return np.float64(deviance(v, mean, *numbers)), np.float64(pearson)

    return Rules(step, ratio, fit)


def _rules_beyond_constant(fit_observed: EntryRule) -> Rules:
    """A zero of curvature 1 has weight 1 / mu, R = -1, and mu as deviance and Pearson term."""

    @inline
    def step(v: Scalar, mu: Scalar, law: Law, scale: Scalar) -> tuple[Scalar, Scalar]:
        real, seen = type(mu), v == v
        a = scale * v / floored(mu, law[0]) if seen else scale
        return a, (real(0) if seen else real(-1))

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        real, seen = type(mu), v == v
        a = v / floored(mu, law[0]) if seen else real(0)
        return a, (real(0) if seen else real(-1))

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        deviance, pearson = fit_observed(v, mu, law)
        return deviance - np.float64(mu), pearson - np.float64(mu)

    return Rules(step, ratio, fit)


def _rules_beyond_linear(fit_observed: EntryRule) -> Rules:
    """A zero of curvature mu has weight 1 and R = -mu; mu needs no floor."""

    @inline
    def step(v: Scalar, mu: Scalar, law: Law, scale: Scalar) -> tuple[Scalar, Scalar]:
        seen = v == v
        return (scale * v if seen else scale * mu), (type(mu)(0) if seen else -mu)

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        seen = v == v
        zero = type(mu)(0)
        return (v if seen else zero), (zero if seen else -mu)

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        deviance, pearson = fit_observed(v, mu, (mu, law[1]))
        square = np.float64(mu) * np.float64(mu)
        return deviance - 0.5 * square, pearson - square

    return Rules(step, ratio, fit)


@inline
def _none(mu: Scalar) -> Scalar:
    return type(mu)(0)


@inline
def _one(mu: Scalar) -> Scalar:
    return type(mu)(1)


@inline
def _same(mu: Scalar) -> Scalar:
    return mu


def _rules_by_weight(observed: Rules, zeros: str | None) -> Rules:
    """What an observation adds by its weight, beyond the zero of weight 1 that is added already.

    That zero has the curvature C0, which is 1 or mu, R = -C0, C0 mu as Pearson term and its
    share of that as deviance.
    """
    curvature = {None: _none, "constant": _one, "linear": _same}[zeros]
    share, no_floor = 0.5 if zeros == "linear" else 1.0, zeros == "linear"
    step_observed, ratio_observed, fit_observed = observed

    @inline
    def step(v: Scalar, mu: Scalar, law: Law, scale: Scalar, own: Scalar) -> tuple[Scalar, Scalar]:
        zero = curvature(mu)
        a, c = step_observed(v, mu, (mu if no_floor else law[0], law[1]), scale)
        own = own if v == v else type(mu)(0)
        return a * own + scale * zero, c * own - zero

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law, own: Scalar) -> tuple[Scalar, Scalar]:
        q, c = ratio_observed(v, mu, (mu if no_floor else law[0], law[1]))
        own = own if v == v else type(mu)(0)
        return q * own, c * own - curvature(mu)

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law, own: Scalar) -> tuple[Scalar, Scalar]:
        zero = np.float64(curvature(mu)) * np.float64(mu)
        deviance, pearson = fit_observed(v, mu, (mu if no_floor else law[0], law[1]))
        own = own if v == v else type(mu)(0)
        return deviance * own - share * zero, pearson * own - zero

    return Rules(step, ratio, fit)


@lru_cache(maxsize=64)
def entry_rules(likelihood: Likelihood, zeros: bool, weights: bool = False) -> Rules:
    """Rules of one likelihood, shared by its kernels of every K."""
    observed = _rules_of_observed(likelihood)
    if weights:
        return _rules_by_weight(observed, likelihood.zeros if zeros else None)
    if not zeros:
        return observed
    beyond = _rules_beyond_constant if likelihood.zeros == "constant" else _rules_beyond_linear
    return beyond(observed.fit)


class ZeroRules(NamedTuple):
    """What a block would add were all of its entries observed zeros.

    part(factor, own, other, out, gram, sums)
        out += factor C0 other, with C0 their curvature; ``own`` and ``out`` are (m, K)
        and ``other`` (n, K), or the other way round. Their residual is -C0.
    fit(W, H, sums, wide) -> (sum of deviances, sum of Pearson terms), in float64
    share
        A row's sum of deviances is so much of the product of ``own`` and ``part``.
    """

    part: Callable[..., None]
    fit: Callable[..., tuple[float, float]]
    share: float


@jit
def column_sums(rows: Array, out: Array) -> None:
    out[:] = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        for k in range(out.size):
            out[k] += np.float64(row[k])


@jit
def _add_column_sums(
    factor: Scalar, own: Array, other: Array, out: Array, gram: Array, sums: Array
) -> None:
    """``out += factor ones other``: every row gains the same."""
    total, gain = sums[0, 0], gram[0]
    column_sums(other, total)
    for k in range(total.size):
        gain[k] = gram.dtype.type(factor * total[k])
    for i in range(out.shape[0]):
        row = out[i]
        for k in range(gain.size):
            row[k] += gain[k]


@jit
def _add_gram(
    factor: Scalar, own: Array, other: Array, out: Array, gram: Array, sums: Array
) -> None:
    """``out += factor own (other.T other)``."""
    gram[:, :] = 0
    add_matmul_tn(other, other, gram)
    scale = gram.dtype.type(factor)
    for row in gram:
        for k in range(row.size):
            row[k] *= scale
    add_matmul_nn(own, gram, out)


@jit
def _no_part(
    factor: Scalar, own: Array, other: Array, out: Array, gram: Array, sums: Array
) -> None:
    pass


@jit
def _no_fit(W: Array, H: Array, sums: Array, wide: Array) -> tuple[float, float]:
    return 0.0, 0.0


@jit
def _fit_of_means(W: Array, H: Array, sums: Array, wide: Array) -> tuple[float, float]:
    """Both sums are those of mu."""
    rows, cols = sums[0, 0], sums[1, 0]
    column_sums(W, rows)
    column_sums(H, cols)
    total = 0.0
    for k in range(rows.size):
        total += rows[k] * cols[k]
    return total, total


@jit
def wide_gram(rows: Array, out: Array, wide: Array) -> None:
    """``out = rows.T rows`` in float64, rows widened a few at a time."""
    out[:, :] = 0
    for begin in range(0, rows.shape[0], wide.shape[0]):
        end = min(begin + wide.shape[0], rows.shape[0])
        part = wide[: end - begin]
        for i in range(end - begin):
            source, target = rows[begin + i], part[i]
            for k in range(target.size):
                target[k] = source[k]
        add_matmul_tn(part, part, out)


@jit
def _fit_of_squares(W: Array, H: Array, sums: Array, wide: Array) -> tuple[float, float]:
    """Half the sum of mu**2, and the sum."""
    wide_gram(W, sums[0], wide)
    wide_gram(H, sums[1], wide)
    total = 0.0
    for k in range(W.shape[1]):
        rows, cols = sums[0, k], sums[1, k]
        for c in range(W.shape[1]):
            total += rows[c] * cols[c]
    return 0.5 * total, total


_ZERO_RULES = {
    "constant": ZeroRules(_add_column_sums, _fit_of_means, 1.0),
    "linear": ZeroRules(_add_gram, _fit_of_squares, 0.5),
}


def zero_rules(likelihood: Likelihood, zeros: bool) -> ZeroRules:
    """Rules for the entries that are not stored; missing ones add nothing."""
    if not zeros or likelihood.zeros is None:
        return ZeroRules(_no_part, _no_fit, 0.0)
    return _ZERO_RULES[likelihood.zeros]


@lru_cache(maxsize=256)
def sparse_kernels(
    likelihood: Likelihood, zeros: bool, K: int, weights: bool = False
) -> BlockKernels:
    """Kernels of one likelihood and K components, compiled when first called.

    ``block`` is (indptr, indices, values, weights) and ``work`` (gram, sums, wide). ``zeros``
    says what an entry is that is not stored: an observed zero (only where `Likelihood.zeros`
    says how they add up) or missing; ``weights`` whether cells have any. Compilation takes
    about half a second for each kernel, K and dtype.
    """
    return BlockKernels(
        gradient=_gradient(likelihood, zeros, K, weights, False),
        gradient_curvature=_gradient(likelihood, zeros, K, weights, True),
        multiplicative_rows=_multiplicative(likelihood, zeros, K, weights, True),
        multiplicative_cols=_multiplicative(likelihood, zeros, K, weights, False),
        slope_rows=_slope(likelihood, zeros, K, weights, True),
        slope_cols=_slope(likelihood, zeros, K, weights, False),
        evaluate=_evaluate(likelihood, zeros, K, weights),
    )


@jit
def _clear(rows: Array) -> None:
    rows[:, :] = 0


def _gradient(likelihood: Likelihood, zeros: bool, K: int, weights: bool, curved: bool) -> Kernel:
    step = entry_rules(likelihood, zeros, weights).step
    zero_part = zero_rules(likelihood, zeros).part

    @jit
    def gradient(
        block: Rows,
        W: Array,
        H: Array,
        scale: float,
        law: Law,
        out: tuple[Array, ...],
        work: Scratch,
    ) -> None:
        indptr, indices, values, own = block
        gram, sums, _ = work
        GW, GH = out[0], out[1]
        _clear(GW)
        _clear(GH)
        zero_part(-scale, W, H, GW, gram, sums)
        zero_part(-scale, H, W, GH, gram, sums)
        real, last = W.dtype.type, indices.size - 1
        w, gw = stack_array(K, W.dtype), stack_array(K, W.dtype)
        if curved:
            CW, CH = out[2], out[3]
            zero_part(1.0, W, H, CW, gram, sums)
            zero_part(1.0, H, W, CH, gram, sums)
            cw = stack_array(K, W.dtype)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            load_row(K, GW, i, gw)
            if curved:
                load_row(K, CW, i, cw)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                prefetch_row(K, GH, later)
                if curved:
                    prefetch_row(K, CH, later)
                mu = dot_row(K, w, H, j)
                if weights:
                    a, c = step(real(values[p]), mu, law_at(law, j), real(scale), own[p])
                else:
                    a, c = step(real(values[p]), mu, law_at(law, j), real(scale))
                add_row(K, a, H, j, gw)
                add_to_row(K, a, w, GH, j)
                if curved and c != 0:
                    add_row(K, c, H, j, cw)
                    add_to_row(K, c, w, CH, j)
            store_row(K, gw, GW, i)
            if curved:
                store_row(K, cw, CW, i)

    return gradient


def _multiplicative(
    likelihood: Likelihood, zeros: bool, K: int, weights: bool, by_rows: bool
) -> Kernel:
    ratio = entry_rules(likelihood, zeros, weights).ratio
    zero_part = zero_rules(likelihood, zeros).part

    @jit
    def multiplicative(
        block: Rows, W: Array, H: Array, law: Law, out: tuple[Array, Array], work: Scratch
    ) -> None:
        indptr, indices, values, own = block
        gram, sums, _ = work
        num, den = out
        real, last = W.dtype.type, indices.size - 1
        w = stack_array(K, W.dtype)
        if by_rows:
            zero_part(1.0, W, H, den, gram, sums)
            above, below = stack_array(K, W.dtype), stack_array(K, W.dtype)
        else:
            zero_part(1.0, H, W, den, gram, sums)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            if by_rows:
                load_row(K, num, i, above)
                load_row(K, den, i, below)
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                if not by_rows:
                    prefetch_row(K, num, later)
                    prefetch_row(K, den, later)
                mu, at = dot_row(K, w, H, j), law_at(law, j)
                if weights:
                    q, c = ratio(real(values[p]), mu, at, own[p])
                else:
                    q, c = ratio(real(values[p]), mu, at)
                if by_rows:
                    add_row(K, q, H, j, above)
                    if c != 0:
                        add_row(K, c, H, j, below)
                else:
                    add_to_row(K, q, w, num, j)
                    if c != 0:
                        add_to_row(K, c, w, den, j)
            if by_rows:
                store_row(K, above, num, i)
                store_row(K, below, den, i)

    return multiplicative


@jit
def take_off(share: float, own: Array, part: Array, gradient: Array, fits: Array) -> None:
    """``gradient -= part`` and, if there are any, ``fits -= share`` of its product with ``own``."""
    for i in range(part.shape[0]):
        total = 0.0
        for k in range(part.shape[1]):
            gradient[i, k] -= part[i, k]
            total += np.float64(own[i, k]) * np.float64(part[i, k])
        if fits.size:
            fits[i] -= share * total


def _slope(likelihood: Likelihood, zeros: bool, K: int, weights: bool, by_rows: bool) -> Kernel:
    step, _, fit = entry_rules(likelihood, zeros, weights)
    zero_part, _, share = zero_rules(likelihood, zeros)

    @jit
    def slope(
        block: Rows,
        W: Array,
        H: Array,
        law: Law,
        out: tuple[Array, Array],
        work: tuple[Array, Array, Array, Array],
    ) -> None:
        indptr, indices, values, own = block
        gradient, fits = out
        part, gram, sums, _ = work
        fitted = fits.size > 0
        if zeros:
            mine, other = (W, H) if by_rows else (H, W)
            _clear(part)
            zero_part(1.0, mine, other, part, gram, sums)
            take_off(share, mine, part, gradient, fits)
        real, last = W.dtype.type, indices.size - 1
        w, g = stack_array(K, W.dtype), stack_array(K, W.dtype)
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            if by_rows:
                load_row(K, gradient, i, g)
            total = 0.0
            for p in range(indptr[i], indptr[i + 1]):
                j, later = np.intp(indices[p]), np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                if not by_rows:
                    prefetch_row(K, gradient, later)
                v, mu = real(values[p]), dot_row(K, w, H, j)
                if weights:
                    a, _ = step(v, mu, law_at(law, j), real(1), own[p])
                else:
                    a, _ = step(v, mu, law_at(law, j), real(1))
                if by_rows:
                    add_row(K, a, H, j, g)
                else:
                    add_to_row(K, a, w, gradient, j)
                if fitted:
                    if weights:
                        found, _ = fit(v, mu, law_at(law, j), own[p])
                    else:
                        found, _ = fit(v, mu, law_at(law, j))
                    if by_rows:
                        total += found
                    else:
                        fits[j] -= found
            if by_rows:
                store_row(K, g, gradient, i)
                if fitted:
                    fits[i] -= total

    return slope


def _monitor(K: int) -> Kernel:
    @jit
    def monitor(W: Array, H: Array, cells: Watched) -> None:
        """Welford update of the monitored cells."""
        rows, cols, mean, m2, count = cells
        w = stack_array(K, W.dtype)
        for cell in range(rows.size):
            load_row(K, W, np.intp(rows[cell]), w)
            value = dot_row(K, w, H, np.intp(cols[cell]))
            delta = value - mean[cell]
            mean[cell] += delta / count
            m2[cell] += delta * (value - mean[cell])

    return monitor


def _fits(likelihood: Likelihood, zeros: bool, weights: bool) -> Kernel:
    fit = entry_rules(likelihood, zeros, weights).fit

    @jit
    def fits(
        values: Array, own: Array, columns: Array, means: Array, law: Law
    ) -> tuple[float, float]:
        """Sums over a chunk: logarithms and powers need a loop of their own to be vectors."""
        real = means.dtype.type
        total = pearson = 0.0
        for p in range(values.size):
            if weights:
                deviance, square = fit(real(values[p]), means[p], law_at(law, columns[p]), own[p])
            else:
                deviance, square = fit(real(values[p]), means[p], law_at(law, columns[p]))
            total += deviance
            pearson += square
        return total, pearson

    return fits


def _evaluate(likelihood: Likelihood, zeros: bool, K: int, weights: bool) -> Kernel:
    zero_fit, monitor, fits = (
        zero_rules(likelihood, zeros).fit,
        _monitor(K),
        _fits(likelihood, zeros, weights),
    )

    @jit
    def evaluate(
        block: Rows,
        W: Array,
        H: Array,
        law: Law,
        out: Array,
        cells: Watched,
        work: Scratch,
    ) -> None:
        indptr, indices, values, own = block
        _, sums, wide = work
        monitor(W, H, cells)
        last = indices.size - 1
        total, pearson = zero_fit(W, H, sums, wide)
        w, means = stack_array(K, W.dtype), stack_array(CHUNK, W.dtype)
        begin = 0
        for i in range(W.shape[0]):
            load_row(K, W, i, w)
            for p in range(indptr[i], indptr[i + 1]):
                if p - begin == CHUNK:
                    part = own[begin:p] if weights else own
                    deviances, squares = fits(values[begin:p], part, indices[begin:p], means, law)
                    total, pearson, begin = total + deviances, pearson + squares, p
                later = np.intp(indices[min(p + AHEAD, last)])
                prefetch_row(K, H, later)
                means[p - begin] = dot_row(K, w, H, np.intp(indices[p]))
        part = own[begin:] if weights else own
        deviances, squares = fits(values[begin:], part, indices[begin:], means, law)
        total, pearson = total + deviances, pearson + squares
        out[0] -= total
        out[1] += pearson

    return evaluate
