"""One block, one visit of every observed entry: stochastic gradient descent entry by entry.

For an observed entry v at (i, j), with mu = max(W[i] . H[j], floor), both from
the same old rows:

    e = clip(step (v - mu) mu**(beta - 2), -1, 1)
    W[i] <- W[i] + e H[j] - step share_w[i] pull_w P(W[i])
    H[j] <- H[j] + e W[i] - step share_h[j] pull_h P(H[j])

This is the update of Gemulla et al. 2011, section 3, but for the clip: a row
never moves further than the row it meets is long, so that an entry whose mean
is near zero cannot throw both to the end of the world. At ordinary entries the
clip does not act. Where cells have weights q, the step is that of the residual as the step
itself leaves it (implicit descent):

    e = s (v - mu) / (1 + s (|W[i]|**2 + |H[j]|**2)),    s = step q mu**(beta - 2)

so that an entry of any weight moves its mean to its value and not beyond, and the step can be
one that suits the others (Toulis and Airoldi 2017, section 2).

P(x) = 1 for a projected model (exponential priors; what falls below zero is set to zero),
P(x) = x - m for a real-valued one (Gaussian priors around m). Columns of both may be frozen.

Rows are visited in the given order, entries of a row from left to right. A
thread owns its block, so nothing races. Both rows of an entry are read, moved and
written vector by vector, K known when it is compiled, so that nothing has to be kept
of the old rows (see ``linalg.py`` on why not in loops). Fused multiply-adds are
allowed there, reordering is not: sparse and dense give the same bits.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from daskfactor.kernels.jit import JIT_ENABLED, inline, jit, stack_array
from daskfactor.kernels.rows import Row, broadcast, copy_row, dot_rows, multiply_add
from daskfactor.kernels.views import (
    Law,
    cell_at,
    entry_kernels,
    floored,
    own_weights,
    row_cells,
)
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Scalar = Any


def _pull(likelihood: Likelihood) -> Callable[..., Scalar]:
    """What an entry multiplies the other row by."""
    weight = entry_kernels(likelihood).weight

    @inline
    def pull(
        v: Scalar, mu: Scalar, step: Scalar, law: Law, own: Array, at: int, size: Scalar
    ) -> Scalar:
        real = type(mu)
        floor, numbers = law
        mean = floored(mu, floor)
        if own.ndim == 3:
            move = step * weight(v, mean, *numbers) * (v - mean)
            return min(max(move, real(-1)), real(1))
        else:
            push = step * weight(v, mean, *numbers) * own[at]
            return push * (v - mean) / (real(1) + push * size)

    return pull


@inline
def _squares(w: Array, H: Array, j: int, own: Array) -> Scalar:
    """The squared lengths of w and H[j], together; 0 where cells have no weights."""
    total = w.dtype.type(0)
    if own.ndim < 3:
        for k in range(w.size):
            total += w[k] * w[k] + H[j, k] * H[j, k]
    return total


@lru_cache(maxsize=3)
def _paired_update(projected: bool, partly: bool = False) -> Any:
    """Make ``meet(K, e, a, b, w, H, j, col_w, col_h)``, in place on w (K,) and H[j].

    With h = H[j] and both sides from the old values, projected:

        w <- max(w + e h - a pull_w, 0)       h <- max(h + e w - b pull_h, 0)

    or, ``partly``, with ``e free_w h`` and ``e free_h w`` in place of ``e h`` and ``e w``;
    and otherwise, with m, pull and free the rows of ``col_w`` and of ``col_h`` (3, K):

        w <- w + e free_w h - a pull_w (w - m_w)    h <- h + e free_h w - b pull_h (h - m_h)

    K must be a literal, or a constant that a closure holds; w is best a
    :func:`daskfactor.kernels.jit.stack_array`.
    """
    if not JIT_ENABLED:
        return _plain(projected)
    if not projected:
        return _compiled(_real_valued)
    return _compiled(_partly_projected if partly else _projected)


Column = tuple[Any, Any, Any]
Rule = Callable[[Any, Any, Any, Any, Any, Column], Any]


def _projected(builder: Any, e: Any, own: Any, other: Any, share: Any, column: Column) -> Any:
    moved = multiply_add(builder, e, other, own)
    moved = builder.fsub(moved, builder.fmul(share, column[1]))
    zero = ir.Constant(moved.type, None)
    return builder.select(builder.fcmp_ordered(">", moved, zero), moved, zero)


def _partly_projected(
    builder: Any, e: Any, own: Any, other: Any, share: Any, column: Column
) -> Any:
    return _projected(builder, builder.fmul(e, column[2]), own, other, share, column)


def _real_valued(builder: Any, e: Any, own: Any, other: Any, share: Any, column: Column) -> Any:
    mean, pull, free = column
    moved = multiply_add(builder, builder.fmul(e, free), other, own)
    away = builder.fmul(builder.fmul(share, pull), builder.fsub(own, mean))
    return builder.fsub(moved, away)


def _compiled(rule: Rule) -> Any:
    @intrinsic(prefer_literal=True)
    def meet(
        typingctx: Any,
        K: Any,
        e: Any,
        a: Any,
        b: Any,
        w: Any,
        H: Any,
        j: Any,
        col_w: Any,
        col_h: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            call = (context, builder, signature, args)
            left, right = Row(call, 4), Row(call, 5, 6)
            columns = [
                [Row(call, table, ir.Constant(ir.IntType(64), at)) for at in range(3)]
                for table in (7, 8)
            ]
            for piece in left.pieces:
                x, y = left.load(*piece), right.load(*piece)
                move, *shares = (broadcast(builder, args[at], piece[1]) for at in (1, 2, 3))
                first, second = (tuple(row.load(*piece) for row in own) for own in columns)
                left.store(rule(builder, move, x, y, shares[0], first), *piece)
                right.store(rule(builder, move, y, x, shares[1], second), *piece)
            return context.get_dummy_value()

        real = H.dtype
        return types.void(K, real, real, real, w, H, types.intp, col_w, col_h), codegen

    return meet


def _plain(projected: bool) -> Callable[..., None]:
    def meet(
        K: int,
        e: Scalar,
        a: Scalar,
        b: Scalar,
        w: Array,
        H: Array,
        j: int,
        col_w: Array,
        col_h: Array,
    ) -> None:
        x, y = w.copy(), H[j].copy()
        for row, old, other, share, column in ((w, x, y, a, col_w), (H[j], y, x, b, col_h)):
            if projected:
                row[:] = np.maximum(old + e * column[2] * other - share * column[1], 0)
            else:
                row[:] = old + e * column[2] * other - share * column[1] * (old - column[0])

    return meet


@lru_cache(maxsize=64)
def descent_kernel(
    likelihood: Likelihood, projected: bool, K: int, partly: bool = False
) -> Callable[..., None]:
    """Make the kernel of one likelihood and K columns, which is compiled when first called.

    ``projected`` keeps the factors non-negative, under exponential priors; else
    the priors are Gaussian. ``partly`` tells that columns of a projected model may be
    frozen; those of another always may. The kernel visits the entries of one block, in
    place on W (m, K) and H (n, K):

    descent(block, order, (W, H), (share_w, share_h), (col_w, col_h), step, law)

    ``block`` is as kernels take it, NaN missing; ``order`` (m,) are its rows in the order of
    the visit; ``share_w`` (m,) and ``share_h`` (n,) divide each row's prior among its entries;
    ``col_w`` and ``col_h`` (3, K) hold, column by column, m, pull, and 1 or, where it is
    frozen, 0 (a projected model has no m, and the last only if it is said to be partly
    frozen). All floats but step and law have one dtype.
    """
    pull, meet = _pull(likelihood), _paired_update(projected, projected and partly)

    @jit
    def descent(
        block: tuple[Array, Any, Any, Any],
        order: Array,
        factors: tuple[Array, Array],
        shares: tuple[Array, Array],
        columns: tuple[Array, Array],
        step: float,
        law: Law,
    ) -> None:
        first, second, third, weights = block
        W, H = factors
        share_w, share_h = shares
        col_w, col_h = columns
        real = W.dtype.type
        w = stack_array(K, W.dtype)
        for r in range(order.size):
            i = order[r]
            copy_row(K, W, i, w, 0)
            a = real(step) * share_w[i]
            begin, end = row_cells(first, i, H.shape[0])
            for at in range(begin, end):
                j, stored = cell_at(first, second, third, i, at)
                v = real(stored)
                if v == v:
                    own = own_weights(first, weights, i)
                    size = _squares(w, H, j, own)
                    e = pull(v, dot_rows(K, w, 0, H, j), real(step), law, own, at, size)
                    meet(K, e, a, real(step) * share_h[j], w, H, j, col_w, col_h)
            copy_row(K, w, 0, W, i)

    return descent
