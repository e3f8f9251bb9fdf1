"""One sparse block, one step: one pass over its entries, the gradients of all factors at once.

The mean of an entry is mu = sum over k of F_0[i_0, k] ... F_{N-1}[i_{N-1}, k]; of a matrix
N = 2. The pass goes forward through an entry's rows, keeping the products of the first ones, to
mu; from it comes a coefficient a, and back, with a times the product of the last rows: each
factor's gradient gains a times the product of the other rows. That is (4 N - 2) K operations,
and 2 (N - 1) rows that are read and N - 1 that are written; row i_0 and its gradient stay
in registers, and rows of the others are prefetched a few entries ahead. One thread owns a block,
so nothing races. The coefficients of an entry are the rules of :mod:`daskfactor.kernels.entries`.

Where unstored entries are observed zeros, their part is that of all cells: products
of the other factors' column sums, or of their Gram matrices entry by entry.

A block is (indptr, indices, values, weights): row i of factor 0 has the entries
``indptr[i]:indptr[i + 1]``, ``indices`` has an array of places for each further factor, and
``weights`` are those of the entries or `NO_WEIGHTS`. Scratch is part (I_n, K) and gram (K, K) of
the factors' dtype, and sums (N, K, K) and wide (any, K), both float64.

Source: Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.entries import entry_rules
from daskfactor.kernels.jit import inline, jit, jit_exact_inner, jit_inner, stack_array
from daskfactor.kernels.linalg import add_matmul_nn, add_matmul_tn
from daskfactor.kernels.rows import (
    add_products,
    add_scaled,
    copy_row,
    dot_rows,
    multiply_rows,
    prefetch_row,
    scale_row,
)
from daskfactor.kernels.views import Kernel, Kind, Law, law_at
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Arrays = tuple[Array, ...]
Scalar = Any
Step = Callable[[Any], Any]
Entries = tuple[Array, Arrays, Array, Array]
Scratch = tuple[Array, Array, Array, Array]
Pair = tuple[Array, Array]

CHUNK = 256
"""Entries whose fit is computed together."""
AHEAD = 8
"""Number of entries by which a prefetch is ahead."""


@inline
def _nothing(arguments: Any) -> None:
    pass


def in_turn(steps: list[Step]) -> Step:
    """Make one inlined function of several, so that the factors they name are constants."""
    if not steps:
        return _nothing
    first, last = in_turn(steps[:-1]), steps[-1]

    @inline
    def both(arguments: Any) -> None:
        first(arguments)
        last(arguments)

    return both


# -- steps of one entry ------------------------------------------------------------------


def _prefetch(K: int, n: int) -> Step:
    place = n - 1

    @inline
    def prefetch(arguments: Any) -> None:
        indices, rows, later = arguments
        prefetch_row(K, rows[n], np.intp(indices[place][later]))

    return prefetch


def prefetch_rows(K: int, factors: Iterable[int]) -> Step:
    """Prefetch rows of these factors, or of their sums, of an entry whose turn comes later."""
    return in_turn([_prefetch(K, n) for n in factors])


def _forward(K: int, n: int, source: int, target: int) -> Step:
    place = n - 1

    @inline
    def forward(arguments: Any) -> None:
        indices, factors, p, ahead = arguments
        multiply_rows(K, ahead, source, factors[n], np.intp(indices[place][p]), ahead, target)

    return forward


def _back(K: int, n: int) -> Step:
    before = n - 1

    @inline
    def back(arguments: Any) -> None:
        indices, factors, p, ahead, behind, gradients, row = arguments
        j = np.intp(indices[before][p])
        add_products(K, ahead, before, behind, 0, gradients[n], j)
        if n > 1:
            multiply_rows(K, behind, 0, factors[n], j, behind, 0)
        else:
            add_products(K, behind, 0, factors[n], j, row, 0)

    return back


def _mean(N: int, K: int) -> Kernel:
    """Make the mean of an entry; ``ahead`` begins with its row of factor 0 and gets products."""
    products = in_turn([_forward(K, n, n - 1, n) for n in range(1, N - 1)])
    last, place = N - 1, N - 2

    @inline
    def mean(indices: Arrays, factors: Arrays, p: int, ahead: Array) -> Scalar:
        products((indices, factors, p, ahead))
        return dot_rows(K, ahead, place, factors[last], np.intp(indices[place][p]))

    return mean


def _spread(N: int, K: int) -> Kernel:
    """Add ``a`` times the product of the others to all sums; ``row`` is factor 0's."""
    back = in_turn([_back(K, n) for n in range(N - 2, 0, -1)])
    last, place = N - 1, N - 2

    @inline
    def spread(
        a: Scalar, indices: Arrays, factors: Arrays, p: int, scratch: Pair, sums: Arrays, row: Array
    ) -> None:
        ahead, behind = scratch
        j = np.intp(indices[place][p])
        add_scaled(K, a, ahead, place, sums[last], j)
        if N == 2:
            add_scaled(K, a, factors[1], j, row, 0)
        else:
            scale_row(K, a, factors[last], j, behind, 0)
            back((indices, factors, p, ahead, behind, sums, row))

    return spread


def _others(N: int, K: int, factor: int) -> tuple[Kernel, Kernel]:
    """Make an entry's mean, and the addition of a multiple of its rows but one factor's.

    The product of several rows is made for the mean, in ``ahead[1]``; of a matrix the other row
    is itself what is added. It goes to ``row``, which is factor 0's, or to ``sums``.
    """
    rest = [n for n in range(1, N) if n != factor]
    start = rest[0] if rest else 1
    steps = [n for n in rest if factor > 0 or n != start]
    products = in_turn([_forward(K, n, int(factor == 0 or n != start), 1) for n in steps])
    before, place, source = start - 1, max(factor - 1, 0), int(N > 2)

    @inline
    def mean(indices: Arrays, factors: Arrays, p: int, ahead: Array) -> Scalar:
        if N == 2:
            return dot_rows(K, ahead, 0, factors[1], np.intp(indices[0][p]))
        elif factor == 0:
            copy_row(K, factors[start], np.intp(indices[before][p]), ahead, 1)
            products((indices, factors, p, ahead))
            return dot_rows(K, ahead, 1, ahead, 0)
        else:
            products((indices, factors, p, ahead))
            return dot_rows(K, ahead, 1, factors[factor], np.intp(indices[place][p]))

    @inline
    def spread(
        a: Scalar, indices: Arrays, factors: Arrays, p: int, scratch: Pair, sums: Arrays, row: Array
    ) -> None:
        ahead, j = scratch[0], np.intp(indices[place][p])
        if factor > 0:
            add_scaled(K, a, ahead, source, sums[factor], j)
        elif N > 2:
            add_scaled(K, a, ahead, 1, row, 0)
        else:
            add_scaled(K, a, factors[1], j, row, 0)

    return mean, spread


# -- zeros that are not stored -----------------------------------------------------------


@jit_exact_inner
def column_sums(rows: Array, out: Array) -> None:
    """Add up the rows, in float64."""
    out[:] = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        for k in range(out.size):
            out[k] += np.float64(row[k])


@jit_exact_inner
def wide_gram(rows: Array, out: Array, wide: Array) -> None:
    """Set ``out = rows.T rows`` in float64, rows widened a few at a time."""
    out[:, :] = 0
    for begin in range(0, rows.shape[0], wide.shape[0]):
        end = min(begin + wide.shape[0], rows.shape[0])
        part = wide[: end - begin]
        for i in range(end - begin):
            source, target = rows[begin + i], part[i]
            for k in range(target.size):
                target[k] = source[k]
        add_matmul_tn(part, part, out)


@jit_exact_inner
def subtract_part(
    scale: float, share: float, theta: Array, part: Array, term: Array, fits: Array
) -> None:
    """Set ``term -= scale part`` and, if not empty, ``fits -= share`` sums of theta part."""
    size = part.dtype.type(scale)
    for i in range(part.shape[0]):
        total = 0.0
        for k in range(part.shape[1]):
            term[i, k] -= size * part[i, k]
            total += np.float64(theta[i, k]) * np.float64(part[i, k])
        if fits.size:
            fits[i] -= share * total


def _sum_up(n: int, linear: bool) -> Step:
    @inline
    def sum_up(arguments: Any) -> None:
        leave, factors, sums, wide = arguments
        if n != leave:
            if linear:
                wide_gram(factors[n], sums[n], wide)
            else:
                column_sums(factors[n], sums[n, 0])

    return sum_up


class ZeroParts(NamedTuple):
    """Kernels of the sums of a block all of whose cells were observed zeros.

    prepare(leave, factors, sums, wide)
        Column sums, or Gram matrices, of every factor but the one to ``leave``, float64.
    add(n, factor, own, out, gram, sums)
        out += factor C0 times the product of the others, C0 the curvature of a zero.
    fit(sums) -> (sum of deviances, sum of Pearson terms)
    """

    prepare: Kernel
    add: Kernel
    fit: Kernel


@lru_cache(maxsize=64)
def zero_parts(kind: str | None, N: int) -> ZeroParts:
    """Make the parts of unstored zeros, by `Likelihood.zeros`; None: there are none."""
    linear, share = kind == "linear", 0.5 if kind == "linear" else 1.0
    summed = in_turn([_sum_up(n, linear) for n in range(N)] if kind else [])

    @jit_exact_inner
    def prepare(leave: int, factors: Arrays, sums: Array, wide: Array) -> None:
        summed((leave, factors, sums, wide))

    @jit_exact_inner
    def product(leave: int, row: int, k: int, sums: Array) -> float:
        value = 1.0
        for n in range(N):
            if n != leave:
                value *= sums[n, row, k]
        return value

    @jit_exact_inner
    def add(n: int, factor: Scalar, theta: Array, out: Array, gram: Array, sums: Array) -> None:
        if kind is not None:
            K, real = out.shape[1], type(out[0, 0])
            for row in range(K if linear else 1):
                for k in range(K):
                    gram[row, k] = real(factor * product(n, row, k, sums))
            if linear:
                add_matmul_nn(theta, gram, out)
            else:
                for i in range(out.shape[0]):
                    for k in range(K):
                        out[i, k] += gram[0, k]

    @jit_exact_inner
    def fit(sums: Array) -> tuple[float, float]:
        total = 0.0
        if kind is not None:
            for row in range(sums.shape[1] if linear else 1):
                for k in range(sums.shape[2]):
                    total += product(-1, row, k, sums)
        return share * total, total

    return ZeroParts(prepare, add, fit)


# -- kernels -----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def accumulation(
    likelihood: Likelihood,
    zeros: bool,
    N: int,
    K: int,
    weights: bool,
    kind: Kind,
    factor: int | None,
    curved: bool,
) -> Kernel:
    """Make the kernel that adds a block's `Sums` of one of N factors, or of all, if None.

    kernel(block, factors, scale, law, out, work), compiled when first called, in about half a
    second for each K and dtype. ``zeros``: unstored entries are observed zeros, which
    `Likelihood.zeros` must say how to add up, or else missing; ``weights``: whether cells have
    any. ``out`` is as for dense blocks.
    """
    step, ratio, fit = (
        _with_weights(rule, weights) for rule in entry_rules(likelihood, zeros, weights)
    )
    ratios, fittable, by_rows = kind == "ratio", factor is not None and not curved, not factor
    place = max((factor or 0) - 1, 0)
    every, one, zero_kind = factor is None, factor or 0, likelihood.zeros if zeros else None
    zero, share = zero_parts(zero_kind, N), 0.5 if zero_kind == "linear" else 1.0
    start = in_turn([_start(n, zero) for n in range(N)])
    if factor is None:
        assert not ratios  # the multiplicative update moves one factor at a time
        mean, spread = _mean(N, K), _spread(N, K)
    else:
        mean, spread = _others(N, K, factor)
    prefetch = prefetch_rows(K, range(1, N))
    prefetch_sums = prefetch_rows(K, range(1, N) if factor is None else [factor][by_rows:])
    room = N * K

    @jit
    def accumulate(
        block: Entries, factors: Arrays, scale: float, law: Law, out: Any, work: Scratch
    ) -> None:
        (indptr, indices, values, weights), (part, gram, sums, wide) = block, work
        G, C, fits = out
        if every:
            zero.prepare(-1, factors, sums, wide)
            start((factors, G, -scale, gram, sums))
            if curved:
                start((factors, C, 1.0, gram, sums))
        elif zero_kind is not None:
            zero.prepare(one, factors, sums, wide)
            if curved:
                zero.add(one, 1.0, factors[one], C[one], gram, sums)
            else:
                part[:, :] = 0
                zero.add(one, 1.0, factors[one], part, gram, sums)
                subtract_part(scale, share, factors[one], part, G[one], fits)
        first, fitted = factors[0], fits.size > 0
        real, last = first.dtype.type, values.size - 1
        scratch = stack_array(room, first.dtype), stack_array(K, first.dtype)
        g, c = stack_array(K, first.dtype), stack_array(K, first.dtype)
        for i in range(first.shape[0]):
            copy_row(K, first, i, scratch[0], 0)
            if by_rows:
                copy_row(K, G[0], i, g, 0)
                if curved:
                    copy_row(K, C[0], i, c, 0)
            total = 0.0
            for p in range(indptr[i], indptr[i + 1]):
                later = min(p + AHEAD, last)
                prefetch((indices, factors, later))
                prefetch_sums((indices, G, later))
                if curved:
                    prefetch_sums((indices, C, later))
                v, mu = real(values[p]), mean(indices, factors, p, scratch[0])
                column_law = law_at(law, np.intp(indices[0][p]))
                if ratios:
                    a, b = ratio(weights, p, v, mu, column_law)
                else:
                    a, b = step(weights, p, v, mu, column_law, real(scale))
                spread(a, indices, factors, p, scratch, G, g)
                if curved and b != 0:
                    spread(b, indices, factors, p, scratch, C, c)
                if fittable and fitted:
                    deviance, _ = fit(weights, p, v, mu, column_law)
                    if by_rows:
                        total += deviance
                    else:
                        fits[np.intp(indices[place][p])] -= deviance
            if by_rows:
                copy_row(K, g, 0, G[0], i)
                if curved:
                    copy_row(K, c, 0, C[0], i)
                if fittable and fitted:
                    fits[i] -= total

    return accumulate


def _with_weights(rule: Kernel, weighted: bool) -> Kernel:
    """Make a rule that takes weights of entries and the number of the entry first."""

    @inline
    def apply(weights: Array, p: int, *arguments: Any) -> tuple[Scalar, Scalar]:
        if weighted:
            return rule(*arguments, weights[p])
        else:
            return rule(*arguments)

    return apply


def _start(n: int, zero: ZeroParts) -> Step:
    @inline
    def start(arguments: Any) -> None:
        factors, out, factor, gram, sums = arguments
        zero.add(n, factor, factors[n], out[n], gram, sums)

    return start


@lru_cache(maxsize=256)
def evaluation(likelihood: Likelihood, zeros: bool, N: int, K: int, weights: bool) -> Kernel:
    """Make the kernel that adds to a block's ``total``, and moves its monitored cells."""
    fit = _with_weights(entry_rules(likelihood, zeros, weights).fit, weights)
    zero = zero_parts(likelihood.zeros if zeros else None, N)
    mean, prefetch, room = _mean(N, K), prefetch_rows(K, range(1, N)), N * K

    @jit_inner
    def watch(factors: Arrays, cells: Any) -> None:
        (places, means, m2, count), first = cells, factors[0]
        ahead = stack_array(room, first.dtype)
        for cell in range(means.size):
            copy_row(K, first, np.intp(places[0][cell]), ahead, 0)
            value = mean(places[1:], factors, cell, ahead)
            delta = value - means[cell]
            means[cell] += delta / count
            m2[cell] += delta * (value - means[cell])

    @jit_inner
    def fits(
        values: Array, weights: Array, columns: Array, means: Array, law: Law
    ) -> tuple[float, float]:
        """Return sums over a chunk: logarithms and powers vectorise in a separate loop only."""
        real, total, pearson = means.dtype.type, 0.0, 0.0
        for p in range(values.size):
            deviance, square = fit(weights, p, real(values[p]), means[p], law_at(law, columns[p]))
            total += deviance
            pearson += square
        return total, pearson

    @jit
    def evaluate(
        block: Entries, factors: Arrays, law: Law, out: Array, cells: Any, work: Scratch
    ) -> None:
        (indptr, indices, values, weights), (_, _, sums, wide) = block, work
        watch(factors, cells)
        zero.prepare(-1, factors, sums, wide)
        total, pearson = zero.fit(sums)
        first, columns = factors[0], indices[0]
        last, begin = values.size - 1, 0
        ahead, means = stack_array(room, first.dtype), stack_array(CHUNK, first.dtype)
        for i in range(first.shape[0]):
            copy_row(K, first, i, ahead, 0)
            for p in range(indptr[i], indptr[i + 1]):
                if p - begin == CHUNK:
                    chunk = values[begin:p], weights[begin:p], columns[begin:p], means
                    deviances, squares = fits(*chunk, law)
                    total, pearson, begin = total + deviances, pearson + squares, p
                prefetch((indices, factors, min(p + AHEAD, last)))
                means[p - begin] = mean(indices, factors, p, ahead)
        chunk = values[begin:], weights[begin:], columns[begin:], means
        deviances, squares = fits(*chunk, law)
        out[0] -= total + deviances
        out[1] += pearson + squares

    return evaluate
