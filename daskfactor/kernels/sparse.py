"""One sparse block, one step: one pass over its entries, the gradients of all factors at once.

The mean of an entry is mu = sum over k of F_0[i_0, k] ... F_{N-1}[i_{N-1}, k]; of a matrix
N = 2. The pass goes forward through an entry's rows, keeping the products of the first ones, to
mu; from it comes a coefficient a, and back, with a times the product of the last rows: each
factor's gradient gains a times the product of the other rows. That is (4 N - 2) K operations,
and 2 (N - 1) rows that are read and N - 1 that are written; row i_0 and its gradient stay
in registers, and rows of the others are asked for a few entries ahead. One thread owns a block,
so nothing races. What an entry adds is told by the rules of :mod:`daskfactor.kernels.entries`.

Where unstored entries are observed zeros, their part is that of all cells: products
of the other factors' column sums, or of their Gram matrices entry by entry.

A block is (indptr, indices, values, weights): row i of factor 0 has the entries
``indptr[i]:indptr[i + 1]``, ``indices`` has an array of places for each further factor, and
``weights`` are those of the entries or `NO_WEIGHTS`. Scratch is part (I_n, K) and gram (K, K) of
the factors' dtype, and sums (N, K, K) and wide (any, K), both float64.

Source: Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.
"""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.entries import Rules, entry_rules
from daskfactor.kernels.jit import inline, jit, stack_array
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

CHUNK = 256
"""Entries whose fit is computed together."""
AHEAD = 8
"""How many entries before its turn a row is asked for."""


@inline
def _nothing(given: Any) -> None:
    pass


def _then(first: Step, second: Step) -> Step:
    @inline
    def both(given: Any) -> None:
        first(given)
        second(given)

    return both


def in_turn(steps: list[Step]) -> Step:
    """Make one inlined function of several, so that the factors they name are constants."""
    first: Step = _nothing
    return reduce(_then, steps, first)


# -- steps of one entry ------------------------------------------------------------------


def _ask_for(K: int, n: int) -> Step:
    place = n - 1

    @inline
    def ask(given: Any) -> None:
        indices, rows, later = given
        prefetch_row(K, rows[n], np.intp(indices[place][later]))

    return ask


def asked(K: int, factors: list[int]) -> Step:
    """Ask for rows of the factors, or of their gradients, of an entry whose turn comes later."""
    return in_turn([_ask_for(K, n) for n in factors if n > 0])


def _forward(K: int, n: int, source: int, target: int) -> Step:
    place = n - 1

    @inline
    def forward(given: Any) -> None:
        indices, factors, p, ahead = given
        multiply_rows(K, ahead, source, factors[n], np.intp(indices[place][p]), ahead, target)

    return forward


def _back(K: int, n: int) -> Step:
    before = n - 1

    @inline
    def back(given: Any) -> None:
        indices, factors, p, ahead, behind, gradients, own = given
        j = np.intp(indices[before][p])
        add_products(K, ahead, before, behind, 0, gradients[n], j)
        if n > 1:
            multiply_rows(K, behind, 0, factors[n], j, behind, 0)
        else:
            add_products(K, behind, 0, factors[n], j, own, 0)

    return back


def _mean(N: int, K: int) -> Kernel:
    """Mean of an entry; ``ahead``, which begins with its row of factor 0, gets products."""
    products = in_turn([_forward(K, n, n - 1, n) for n in range(1, N - 1)])
    last, place = N - 1, N - 2

    @inline
    def mean(indices: Arrays, factors: Arrays, p: int, ahead: Array) -> Scalar:
        products((indices, factors, p, ahead))
        return dot_rows(K, ahead, place, factors[last], np.intp(indices[place][p]))

    return mean


def _spread(N: int, K: int) -> Kernel:
    """Add ``a`` times the product of the others to every factor's sums; ``own`` is factor 0's."""
    back = in_turn([_back(K, n) for n in range(N - 2, 0, -1)])
    last, place = N - 1, N - 2

    @inline
    def spread(
        a: Scalar,
        entry: tuple[Arrays, Arrays, int],
        ahead: Array,
        behind: Array,
        sums: Arrays,
        own: Array,
    ) -> None:
        indices, factors, p = entry
        j = np.intp(indices[place][p])
        add_scaled(K, a, ahead, place, sums[last], j)
        if N == 2:
            add_scaled(K, a, factors[1], j, own, 0)
        else:
            scale_row(K, a, factors[last], j, behind, 0)
            back((indices, factors, p, ahead, behind, sums, own))

    return spread


def _others(N: int, K: int, factor: int) -> tuple[Kernel, Kernel]:
    """Make an entry's mean, and the addition of a multiple of its rows but one factor's.

    The product of several rows is made for the mean, in ``ahead[1]``; of a matrix the other row
    is itself what is added.
    """
    if N == 2:
        return _other_of_two(K, factor)
    rest = [n for n in range(1, N) if n != factor]
    steps = [_forward(K, n, int(n != rest[0]), 1) for n in rest]
    if factor == 0:
        steps = [_forward(K, n, 1, 1) for n in rest[1:]]
    products, start, before = in_turn(steps), rest[0], rest[0] - 1
    place = max(factor - 1, 0)

    @inline
    def mean(indices: Arrays, factors: Arrays, p: int, ahead: Array) -> Scalar:
        if factor == 0:
            copy_row(K, factors[start], np.intp(indices[before][p]), ahead, 1)
        products((indices, factors, p, ahead))
        if factor == 0:
            return dot_rows(K, ahead, 1, ahead, 0)
        else:
            return dot_rows(K, ahead, 1, factors[factor], np.intp(indices[place][p]))

    @inline
    def add(a: Scalar, others: Array, j: int, ahead: Array, out: Array, o: int) -> None:
        add_scaled(K, a, ahead, 1, out, o)

    return mean, add


def _other_of_two(K: int, factor: int) -> tuple[Kernel, Kernel]:
    @inline
    def mean(indices: Arrays, factors: Arrays, p: int, ahead: Array) -> Scalar:
        return dot_rows(K, ahead, 0, factors[1], np.intp(indices[0][p]))

    @inline
    def add(a: Scalar, others: Array, j: int, ahead: Array, out: Array, o: int) -> None:
        if factor == 0:
            add_scaled(K, a, others, j, out, o)
        else:
            add_scaled(K, a, ahead, 0, out, o)

    return mean, add


# -- zeros that are not stored -----------------------------------------------------------


@jit
def column_sums(rows: Array, out: Array) -> None:
    """Add up the rows, in float64."""
    out[:] = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        for k in range(out.size):
            out[k] += np.float64(row[k])


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
def take_off(scale: float, share: float, own: Array, part: Array, term: Array, fits: Array) -> None:
    """``term -= scale part`` and, if there are any, ``fits -= share`` of its product with own."""
    size = part.dtype.type(scale)
    for i in range(part.shape[0]):
        total = 0.0
        for k in range(part.shape[1]):
            term[i, k] -= size * part[i, k]
            total += np.float64(own[i, k]) * np.float64(part[i, k])
        if fits.size:
            fits[i] -= share * total


def _sum_up(n: int, linear: bool) -> Step:
    @inline
    def sum_up(given: Any) -> None:
        leave, factors, sums, wide = given
        if n != leave:
            if linear:
                wide_gram(factors[n], sums[n], wide)
            else:
                column_sums(factors[n], sums[n, 0])

    return sum_up


class ZeroParts(NamedTuple):
    """What a block would add were all of its cells observed zeros.

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
    """Parts of unstored zeros, by `Likelihood.zeros`; None: there are none."""
    linear, share = kind == "linear", 0.5 if kind == "linear" else 1.0
    summed = in_turn([_sum_up(n, linear) for n in range(N)] if kind else [])

    @jit
    def prepare(leave: int, factors: Arrays, sums: Array, wide: Array) -> None:
        summed((leave, factors, sums, wide))

    @jit
    def product(leave: int, row: int, k: int, sums: Array) -> float:
        found = 1.0
        for n in range(N):
            if n != leave:
                found *= sums[n, row, k]
        return found

    @jit
    def add(n: int, factor: Scalar, own: Array, out: Array, gram: Array, sums: Array) -> None:
        if kind is not None:
            K, real = out.shape[1], type(out[0, 0])
            for row in range(K if linear else 1):
                for k in range(K):
                    gram[row, k] = real(factor * product(n, row, k, sums))
            if linear:
                add_matmul_nn(own, gram, out)
            else:
                for i in range(out.shape[0]):
                    for k in range(K):
                        out[i, k] += gram[0, k]

    @jit
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
    rules = _weighed(entry_rules(likelihood, zeros, weights), weights)
    if factor is None:
        assert kind == "score"  # the multiplicative update moves one factor at a time
        return _all_sums(rules, _zeros(likelihood, zeros), N, K, curved)
    return _one_sum(rules, _zeros(likelihood, zeros), N, K, kind, factor)


def _zeros(likelihood: Likelihood, zeros: bool) -> str | None:
    return likelihood.zeros if zeros else None


def _weighed(rules: Rules, weights: bool) -> Rules:
    """Rules that take weights of entries and the number of the entry behind their arguments."""
    step, ratio, fit = rules

    @inline
    def weighed_step(
        v: Scalar, mu: Scalar, law: Law, scale: Scalar, own: Array, p: int
    ) -> tuple[Scalar, Scalar]:
        if weights:
            return step(v, mu, law, scale, own[p])
        else:
            return step(v, mu, law, scale)

    @inline
    def weighed_ratio(v: Scalar, mu: Scalar, law: Law, own: Array, p: int) -> tuple[Scalar, Scalar]:
        if weights:
            return ratio(v, mu, law, own[p])
        else:
            return ratio(v, mu, law)

    @inline
    def weighed_fit(v: Scalar, mu: Scalar, law: Law, own: Array, p: int) -> tuple[Scalar, Scalar]:
        if weights:
            return fit(v, mu, law, own[p])
        else:
            return fit(v, mu, law)

    return Rules(weighed_step, weighed_ratio, weighed_fit)


def _start(n: int, zero: ZeroParts) -> Step:
    @inline
    def start(given: Any) -> None:
        factors, out, factor, gram, sums = given
        zero.add(n, factor, factors[n], out[n], gram, sums)

    return start


def _all_sums(rules: Rules, zeros: str | None, N: int, K: int, curved: bool) -> Kernel:
    step, zero = rules.step, zero_parts(zeros, N)
    start = in_turn([_start(n, zero) for n in range(N)])
    mean, spread, ask = _mean(N, K), _spread(N, K), asked(K, list(range(N)))
    room = N * K

    @jit
    def accumulate(
        block: Entries, factors: Arrays, scale: float, law: Law, out: Any, work: Scratch
    ) -> None:
        (indptr, indices, values, own), (_, gram, sums, wide), (G, C, _) = block, work, out
        zero.prepare(-1, factors, sums, wide)
        start((factors, G, -scale, gram, sums))
        if curved:
            start((factors, C, 1.0, gram, sums))
        first = factors[0]
        real, last = first.dtype.type, values.size - 1
        ahead, behind = stack_array(room, first.dtype), stack_array(K, first.dtype)
        g, c = stack_array(K, first.dtype), stack_array(K, first.dtype)
        for i in range(first.shape[0]):
            copy_row(K, first, i, ahead, 0)
            copy_row(K, G[0], i, g, 0)
            if curved:
                copy_row(K, C[0], i, c, 0)
            for p in range(indptr[i], indptr[i + 1]):
                later = min(p + AHEAD, last)
                ask((indices, factors, later))
                ask((indices, G, later))
                if curved:
                    ask((indices, C, later))
                mu = mean(indices, factors, p, ahead)
                here = law_at(law, np.intp(indices[0][p]))
                a, b = step(real(values[p]), mu, here, real(scale), own, p)
                spread(a, (indices, factors, p), ahead, behind, G, g)
                if curved and b != 0:
                    spread(b, (indices, factors, p), ahead, behind, C, c)
            copy_row(K, g, 0, G[0], i)
            if curved:
                copy_row(K, c, 0, C[0], i)

    return accumulate


def _one_sum(rules: Rules, zeros: str | None, N: int, K: int, kind: Kind, factor: int) -> Kernel:
    step, ratio, fit = rules
    zero, (mean, add) = zero_parts(zeros, N), _others(N, K, factor)
    ask, place, room = asked(K, list(range(N))), max(factor - 1, 0), 2 * K
    share, curved = 0.5 if zeros == "linear" else 1.0, kind == "ratio"

    @jit
    def accumulate(
        block: Entries, factors: Arrays, scale: float, law: Law, out: Any, work: Scratch
    ) -> None:
        (indptr, indices, values, own), (part, gram, sums, wide) = block, work
        term, curvature, fits = out[0][factor], out[1][factor], out[2]
        first, fitted = factors[0], fits.size > 0
        if zeros is not None:
            zero.prepare(factor, factors, sums, wide)
            if curved:
                zero.add(factor, 1.0, factors[factor], curvature, gram, sums)
            else:
                part[:, :] = 0
                zero.add(factor, 1.0, factors[factor], part, gram, sums)
                take_off(scale, share, factors[factor], part, term, fits)
        real, last = first.dtype.type, values.size - 1
        ahead = stack_array(room, first.dtype)
        above, below = stack_array(K, first.dtype), stack_array(K, first.dtype)
        for i in range(first.shape[0]):
            copy_row(K, first, i, ahead, 0)
            if factor == 0:
                copy_row(K, term, i, above, 0)
                if curved:
                    copy_row(K, curvature, i, below, 0)
            total = 0.0
            for p in range(indptr[i], indptr[i + 1]):
                later = min(p + AHEAD, last)
                ask((indices, factors, later))
                if factor > 0:
                    prefetch_row(K, term, np.intp(indices[place][later]))
                    if curved:
                        prefetch_row(K, curvature, np.intp(indices[place][later]))
                v, column = real(values[p]), np.intp(indices[0][p])
                mu, here = mean(indices, factors, p, ahead), law_at(law, column)
                if curved:
                    a, c = ratio(v, mu, here, own, p)
                else:
                    a, c = step(v, mu, here, real(scale), own, p)
                if factor == 0:
                    add(a, factors[1], column, ahead, above, 0)
                    if curved and c != 0:
                        add(c, factors[1], column, ahead, below, 0)
                else:
                    j = np.intp(indices[place][p])
                    add(a, factors[1], column, ahead, term, j)
                    if curved and c != 0:
                        add(c, factors[1], column, ahead, curvature, j)
                if not curved and fitted:
                    found, _ = fit(v, mu, here, own, p)
                    if factor == 0:
                        total += found
                    else:
                        fits[np.intp(indices[place][p])] -= found
            if factor == 0:
                copy_row(K, above, 0, term, i)
                if curved:
                    copy_row(K, below, 0, curvature, i)
                elif fitted:
                    fits[i] -= total

    return accumulate


def monitor(N: int, K: int) -> Kernel:
    """Make the kernel that moves the running moments of monitored cells."""
    mean_of, room = _mean(N, K), N * K

    @jit
    def watch(factors: Arrays, cells: Any) -> None:
        places, mean, m2, count = cells
        first = factors[0]
        ahead = stack_array(room, first.dtype)
        for cell in range(mean.size):
            copy_row(K, first, np.intp(places[0][cell]), ahead, 0)
            value = mean_of(places[1:], factors, cell, ahead)
            delta = value - mean[cell]
            mean[cell] += delta / count
            m2[cell] += delta * (value - mean[cell])

    return watch


@lru_cache(maxsize=256)
def evaluation(likelihood: Likelihood, zeros: bool, N: int, K: int, weights: bool) -> Kernel:
    """Make the kernel that adds to a block's ``total``, and moves its monitored cells."""
    fit = _weighed(entry_rules(likelihood, zeros, weights), weights).fit
    zero, watch = zero_parts(_zeros(likelihood, zeros), N), monitor(N, K)
    mean, ask, room = _mean(N, K), asked(K, list(range(N))), N * K

    @jit
    def fits(
        values: Array, own: Array, columns: Array, means: Array, law: Law
    ) -> tuple[float, float]:
        """Sums over a chunk: logarithms and powers need a loop of their own to be vectors."""
        real, total, pearson = means.dtype.type, 0.0, 0.0
        for p in range(values.size):
            deviance, square = fit(real(values[p]), means[p], law_at(law, columns[p]), own, p)
            total += deviance
            pearson += square
        return total, pearson

    @jit
    def evaluate(
        block: Entries, factors: Arrays, law: Law, out: Array, cells: Any, work: Scratch
    ) -> None:
        (indptr, indices, values, own), (_, _, sums, wide) = block, work
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
                    given = values[begin:p], own[begin:p], columns[begin:p], means
                    deviances, squares = fits(*given, law)
                    total, pearson, begin = total + deviances, pearson + squares, p
                ask((indices, factors, min(p + AHEAD, last)))
                means[p - begin] = mean(indices, factors, p, ahead)
        given = values[begin:], own[begin:], columns[begin:], means
        deviances, squares = fits(*given, law)
        out[0] -= total + deviances
        out[1] += pearson + squares

    return evaluate
