"""A likelihood entry by entry, compiled once and shared by all kernels that are made of it.

`entry_kernels` has its own functions, `entry_rules` what an entry of a sparse block adds to
sums, and `zero_rules` what the entries that are not stored add. A missing entry is NaN.

Where entries that are not stored are observed zeros, their part has a closed
form if a zero's curvature is 1 and its residual -1 (column sums of the factors),
or if they are mu and -mu (Gram matrices): see `Likelihood.zeros`. It is added over
the whole block, without a floor under mu, and a stored entry's coefficient is what
it has beyond an observed zero's. A stored NaN is a missing entry: its coefficient
takes the zero's part back.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels import polynomials
from daskfactor.kernels.blas import add_matmul_nn, add_matmul_tn
from daskfactor.kernels.jit import inline, jit
from daskfactor.models.likelihood import Entry, Likelihood

Array = NDArray[Any]
Scalar = Any
EntryRule = Callable[..., tuple[Scalar, Scalar]]


@inline
def floored(mu: Scalar, floor: Scalar) -> Scalar:
    """The larger of the two; NaN stays NaN, so that a divergence can be seen."""
    return floor if mu < floor else mu


@lru_cache(maxsize=64)
def entry_kernels(likelihood: Likelihood) -> Entry:
    """Compile the scalar functions of a likelihood, merged into the loops that call them."""
    made: list[Any] = [each and inline(each) for each in likelihood.entry(polynomials)]
    return Entry(*made)


class Rules(NamedTuple):
    """Coefficients of one stored entry.

    step    (v, mu, floor, scale) -> what it adds to (scale R, C)
    ratio   (v, mu, floor) -> what it adds to (Q, C) of a multiplicative update
    fit     (v, mu, floor) -> what it adds to the sums of deviance and Pearson terms
    """

    step: EntryRule
    ratio: EntryRule
    fit: EntryRule


def _rules_of_observed(likelihood: Likelihood) -> Rules:
    """An entry that is not stored adds nothing."""
    weight, curvature, numerator, deviance, _ = entry_kernels(likelihood)

    @inline
    def step(v: Scalar, mu: Scalar, floor: Scalar, scale: Scalar) -> tuple[Scalar, Scalar]:
        mean, seen = floored(mu, floor), v == v
        w = weight(v, mean)
        zero = type(mu)(0)
        return (scale * (v - mean) * w if seen else zero), (
            curvature(type(mu)(1), v, mean, w) if seen else zero
        )

    @inline
    def ratio(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        mean, seen = floored(mu, floor), v == v
        w = weight(v, mean)
        # Both before they are chosen from: inside the choices LLVM orders the sums of K
        # products after them otherwise, and bits would not be those of earlier versions.
        q, c = numerator(v, mean, w), curvature(type(mu)(1), v, mean, w)
        zero = type(mu)(0)
        return (q if seen else zero), (c if seen else zero)

    @inline
    def fit(v: Scalar, mu: Scalar, floor: Scalar) -> tuple[Scalar, Scalar]:
        mean = floored(mu, floor)
        v = v if v == v else mean  # a missing entry adds d(mu | mu) = 0
        pearson = (v - mean) * (v - mean) * weight(v, mean)
        return np.float64(deviance(v, mean)), np.float64(pearson)

    return Rules(step, ratio, fit)


def _rules_beyond_constant(fit_observed: EntryRule) -> Rules:
    """A zero of curvature 1 has weight 1 / mu, R = -1, and mu as deviance and Pearson term."""

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

    return Rules(step, ratio, fit)


def _rules_beyond_linear(fit_observed: EntryRule) -> Rules:
    """A zero of curvature mu has weight 1 and R = -mu; mu needs no floor."""

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

    return Rules(step, ratio, fit)


@lru_cache(maxsize=64)
def entry_rules(likelihood: Likelihood, zeros: bool) -> Rules:
    """Rules of one likelihood, shared by its kernels of every K."""
    observed = _rules_of_observed(likelihood)
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
    """

    part: Callable[..., None]
    fit: Callable[..., tuple[float, float]]


@jit
def _column_sums(rows: Array, out: Array) -> None:
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
    _column_sums(other, total)
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
    _column_sums(W, rows)
    _column_sums(H, cols)
    total = 0.0
    for k in range(rows.size):
        total += rows[k] * cols[k]
    return total, total


@jit
def _wide_gram(rows: Array, out: Array, wide: Array) -> None:
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
    _wide_gram(W, sums[0], wide)
    _wide_gram(H, sums[1], wide)
    total = 0.0
    for k in range(W.shape[1]):
        rows, cols = sums[0, k], sums[1, k]
        for c in range(W.shape[1]):
            total += rows[c] * cols[c]
    return 0.5 * total, total


_ZERO_RULES = {
    "constant": ZeroRules(_add_column_sums, _fit_of_means),
    "linear": ZeroRules(_add_gram, _fit_of_squares),
}


def zero_rules(likelihood: Likelihood, zeros: bool) -> ZeroRules:
    """Rules for the entries that are not stored; missing ones add nothing."""
    if not zeros or likelihood.zeros is None:
        return ZeroRules(_no_part, _no_fit)
    return _ZERO_RULES[likelihood.zeros]
