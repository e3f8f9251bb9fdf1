"""One sparse block of a tensor, one step: one pass over its entries, gradients of all factors.

The mean of an entry is mu = sum over k of F_0[i_0, k] ... F_{N-1}[i_{N-1}, k]. The pass goes
forward through an entry's rows, keeping the products of the first ones, to mu; from it
comes a coefficient a, and back, with a times the product of the last rows: each factor's
gradient gains a times the product of the other rows. That is (4 N - 2) K operations, and
2 (N - 1) rows that are read and N - 1 that are written; row i_0 and its gradient stay
in registers. What an entry adds is told by the rules of :mod:`daskfactor.kernels.sparse`.

Where unstored entries are observed zeros, their part is that of all cells: products
of the other factors' column sums, or of their Gram matrices entry by entry.

Source: Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.
"""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit, stack_array
from daskfactor.kernels.linalg import add_matmul_nn, prefetch_row
from daskfactor.kernels.rows import (
    add_products,
    add_scaled,
    dot_rows,
    multiply_rows,
    scale_row,
)
from daskfactor.kernels.sparse import AHEAD, column_sums, entry_rules, take_off, wide_gram
from daskfactor.kernels.views import Kernel, Law
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Arrays = tuple[Array, ...]
Scalar = Any
Step = Callable[[Any], Any]
Entries = tuple[Array, Arrays, Array]
Scratch = tuple[Array, Array, Array]


class TensorKernels(NamedTuple):
    """The jitted kernels of one likelihood and one kind of block of a tensor.

    gradient(block, factors, scale, law, (gradients, curvatures), work)
        R = scale M (V - mu) w; each gradient (I_n, K) is set to the sums of R times the
        product of the other factors' rows.
    gradient_curvature
        as gradient, and each curvature (I_n, K) += the sums of C times that product.
    multiplicative[n](block, factors, law, (num, den), work)
        num (I_n, K) += sums of M ratio, den += sums of C, times the product of the others.
    slope[n](block, factors, law, (G, fits), work)
        G (I_n, K) += sums of M (V - mu) w times the product of the others, and fits (I_n,)
        float64 -= sums of M deviance, unless it is empty.
    evaluate(block, factors, law, out, cells, work)
        out (2,) += (-sum M deviance, sum M (V - mu)**2 w); the means of ``cells`` (places,
        mean, m2, count), one array of places per factor, go into running moments.
    """

    gradient: Kernel
    gradient_curvature: Kernel
    multiplicative: tuple[Kernel, ...]
    slope: tuple[Kernel, ...]
    evaluate: Kernel


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


def _others(N: int, K: int, factor: int) -> Kernel:
    """Product of an entry's rows but that of one factor, to ``ahead[1]``; and the mean."""
    rest = [n for n in range(1, N) if n != factor]
    steps = [_forward(K, n, int(n != rest[0]), 1) for n in rest]
    if factor == 0:
        steps = [_forward(K, n, 1, 1) for n in rest[1:]]
    products, start, before = (
        in_turn(steps),
        rest[0] if rest else 0,
        max(rest[0] - 1, 0) if rest else 0,
    )
    place = max(factor - 1, 0)

    @inline
    def others(indices: Arrays, factors: Arrays, p: int, ahead: Array) -> Scalar:
        real = type(ahead[0])
        if factor == 0:
            scale_row(K, real(1), factors[start], np.intp(indices[before][p]), ahead, 1)
        elif N == 2:
            scale_row(K, real(1), ahead, 0, ahead, 1)
        products((indices, factors, p, ahead))
        if factor == 0:
            return dot_rows(K, ahead, 1, ahead, 0)
        else:
            return dot_rows(K, ahead, 1, factors[factor], np.intp(indices[place][p]))

    return others


# -- zeros that are not stored -----------------------------------------------------------


def _sum_up(n: int, linear: bool) -> Step:
    @inline
    def sum_up(given: Any) -> None:
        factors, sums, wide = given
        if linear:
            wide_gram(factors[n], sums[n], wide)
        else:
            column_sums(factors[n], sums[n, 0])

    return sum_up


class ZeroParts(NamedTuple):
    """What a block of a tensor would add were all of its cells observed zeros.

    prepare(factors, sums, wide)
        Column sums, or Gram matrices, of every factor, float64.
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
    def prepare(factors: Arrays, sums: Array, wide: Array) -> None:
        summed((factors, sums, wide))

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
def tensor_kernels(likelihood: Likelihood, zeros: bool, N: int, K: int) -> TensorKernels:
    """Kernels of one likelihood, N factors and K components, compiled when first called.

    ``block`` is (indptr, indices, values), ``work`` (gram, sums, wide) as of
    `Workspace.tensor_sums`. ``zeros``: unstored entries are observed zeros, which
    `Likelihood.zeros` must say how to add up.
    """
    made = (likelihood, zeros, N, K)
    return TensorKernels(
        gradient=_gradient(*made, False),
        gradient_curvature=_gradient(*made, True),
        multiplicative=tuple(_multiplicative(*made, n) for n in range(N)),
        slope=tuple(_slope(*made, n) for n in range(N)),
        evaluate=_evaluate(*made),
    )


def _start(n: int, zero: ZeroParts, which: int) -> Step:
    @inline
    def start(given: Any) -> None:
        factors, out, factor, gram, sums = given
        if which == 0:
            out[n][:, :] = 0
        zero.add(n, factor, factors[n], out[n], gram, sums)

    return start


def _gradient(likelihood: Likelihood, zeros: bool, N: int, K: int, curved: bool) -> Kernel:
    step = entry_rules(likelihood, zeros).step
    zero = zero_parts(likelihood.zeros if zeros else None, N)
    start, more = (in_turn([_start(n, zero, which) for n in range(N)]) for which in (0, 1))
    mean, spread, ask = _mean(N, K), _spread(N, K), asked(K, list(range(N)))
    room = N * K

    @jit
    def gradient(
        block: Entries, factors: Arrays, scale: float, law: Law, out: Any, work: Scratch
    ) -> None:
        (indptr, indices, values), (gram, sums, wide), (G, C) = block, work, out
        zero.prepare(factors, sums, wide)
        start((factors, G, -scale, gram, sums))
        if curved:
            more((factors, C, 1.0, gram, sums))
        first = factors[0]
        real, last = first.dtype.type, values.size - 1
        ahead, behind = stack_array(room, first.dtype), stack_array(K, first.dtype)
        g, c = stack_array(K, first.dtype), stack_array(K, first.dtype)
        for i in range(first.shape[0]):
            scale_row(K, real(1), first, i, ahead, 0)
            scale_row(K, real(1), G[0], i, g, 0)
            if curved:
                scale_row(K, real(1), C[0], i, c, 0)
            for p in range(indptr[i], indptr[i + 1]):
                later = min(p + AHEAD, last)
                ask((indices, factors, later))
                ask((indices, G, later))
                mu = mean(indices, factors, p, ahead)
                a, b = step(real(values[p]), mu, law, real(scale))
                spread(a, (indices, factors, p), ahead, behind, G, g)
                if curved and b != 0:
                    spread(b, (indices, factors, p), ahead, behind, C, c)
            scale_row(K, real(1), g, 0, G[0], i)
            if curved:
                scale_row(K, real(1), c, 0, C[0], i)

    return gradient


def _multiplicative(likelihood: Likelihood, zeros: bool, N: int, K: int, factor: int) -> Kernel:
    ratio = entry_rules(likelihood, zeros).ratio
    zero, others = zero_parts(likelihood.zeros if zeros else None, N), _others(N, K, factor)
    ask, place, room = asked(K, list(range(N))), max(factor - 1, 0), 2 * K

    @jit
    def multiplicative(
        block: Entries, factors: Arrays, law: Law, out: tuple[Array, Array], work: Scratch
    ) -> None:
        (indptr, indices, values), (gram, sums, wide), (num, den) = block, work, out
        zero.prepare(factors, sums, wide)
        zero.add(factor, 1.0, factors[factor], den, gram, sums)
        first = factors[0]
        real, last = first.dtype.type, values.size - 1
        ahead = stack_array(room, first.dtype)
        for i in range(first.shape[0]):
            scale_row(K, real(1), first, i, ahead, 0)
            for p in range(indptr[i], indptr[i + 1]):
                ask((indices, factors, min(p + AHEAD, last)))
                mu = others(indices, factors, p, ahead)
                q, c = ratio(real(values[p]), mu, law)
                j = np.intp(i) if factor == 0 else np.intp(indices[place][p])
                add_scaled(K, q, ahead, 1, num, j)
                if c != 0:
                    add_scaled(K, c, ahead, 1, den, j)

    return multiplicative


def _slope(likelihood: Likelihood, zeros: bool, N: int, K: int, factor: int) -> Kernel:
    step, _, fit = entry_rules(likelihood, zeros)
    zero, others = zero_parts(likelihood.zeros if zeros else None, N), _others(N, K, factor)
    ask, place, room = asked(K, list(range(N))), max(factor - 1, 0), 2 * K
    share = 0.5 if likelihood.zeros == "linear" else 1.0

    @jit
    def slope(
        block: Entries, factors: Arrays, law: Law, out: tuple[Array, Array], work: Any
    ) -> None:
        (indptr, indices, values), (part, gram, sums, wide), (G, fits) = block, work, out
        if zeros:
            zero.prepare(factors, sums, wide)
            part[:, :] = 0
            zero.add(factor, 1.0, factors[factor], part, gram, sums)
            take_off(share, factors[factor], part, G, fits)
        first, fitted = factors[0], fits.size > 0
        real, last = first.dtype.type, values.size - 1
        ahead = stack_array(room, first.dtype)
        for i in range(first.shape[0]):
            scale_row(K, real(1), first, i, ahead, 0)
            for p in range(indptr[i], indptr[i + 1]):
                ask((indices, factors, min(p + AHEAD, last)))
                v, mu = real(values[p]), others(indices, factors, p, ahead)
                a, _ = step(v, mu, law, real(1))
                j = np.intp(i) if factor == 0 else np.intp(indices[place][p])
                add_scaled(K, a, ahead, 1, G, j)
                if fitted:
                    found, _ = fit(v, mu, law)
                    fits[j] -= found

    return slope


def monitor(N: int, K: int) -> Kernel:
    """Make the kernel that moves the running moments of monitored cells."""
    mean_of, room = _mean(N, K), N * K

    @jit
    def watch(factors: Arrays, cells: Any) -> None:
        places, mean, m2, count = cells
        first = factors[0]
        ahead = stack_array(room, first.dtype)
        for cell in range(mean.size):
            scale_row(K, first.dtype.type(1), first, np.intp(places[0][cell]), ahead, 0)
            value = mean_of(places[1:], factors, cell, ahead)
            delta = value - mean[cell]
            mean[cell] += delta / count
            m2[cell] += delta * (value - mean[cell])

    return watch


def _evaluate(likelihood: Likelihood, zeros: bool, N: int, K: int) -> Kernel:
    fit = entry_rules(likelihood, zeros).fit
    zero, watch = zero_parts(likelihood.zeros if zeros else None, N), monitor(N, K)
    mean, ask, room = _mean(N, K), asked(K, list(range(N))), N * K

    @jit
    def evaluate(
        block: Entries, factors: Arrays, law: Law, out: Array, cells: Any, work: Scratch
    ) -> None:
        (indptr, indices, values), (_, sums, wide) = block, work
        watch(factors, cells)
        zero.prepare(factors, sums, wide)
        total, pearson = zero.fit(sums)
        first = factors[0]
        real, last = first.dtype.type, values.size - 1
        ahead = stack_array(room, first.dtype)
        for i in range(first.shape[0]):
            scale_row(K, real(1), first, i, ahead, 0)
            for p in range(indptr[i], indptr[i + 1]):
                ask((indices, factors, min(p + AHEAD, last)))
                deviance, square = fit(real(values[p]), mean(indices, factors, p, ahead), law)
                total += deviance
                pearson += square
        out[0] -= total
        out[1] += pearson

    return evaluate
