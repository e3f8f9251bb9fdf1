"""One block, one visit of every observed entry: stochastic gradient descent entry by entry.

For an observed entry v at (i, j), with mu = max(W[i] . H[j], floor), both from
the same old rows:

    e = clip(step (v - mu) mu**(beta - 2), -1, 1)
    W[i] <- W[i] + e H[j] - step share_w[i] pull_w P(W[i])
    H[j] <- H[j] + e W[i] - step share_h[j] pull_h P(H[j])

This is the update of Gemulla et al. 2011, section 3, but for the clip: a row
never moves further than the row it meets is long, so that an entry whose mean
is near zero cannot throw both to the end of the world. At ordinary entries the
clip does not act. P(x) = 1 for a projected model (exponential priors; what
falls below zero is set to zero), P(x) = x - m for a real-valued one (Gaussian
priors around m). Columns of both may be frozen.

Rows are visited in the given order, entries of a row from left to right. A
thread owns its block, so nothing races.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.entries import entry_kernels, floored
from daskfactor.kernels.jit import inline, jit, stack_array
from daskfactor.kernels.paired_update import meeting
from daskfactor.kernels.vectors import dot_row, load_row, store_row
from daskfactor.models.likelihood import Likelihood

Array = NDArray[Any]
Scalar = Any


class DescentKernels(NamedTuple):
    """Kernels that visit the entries of one block, in place on W (m, K) and H (n, K).

    sparse(indptr, indices, values, order, W, H, share_w, share_h, col_w, col_h, step, floor)
    dense(V, row0, col0, order, W, H, share_w, share_h, col_w, col_h, step, floor)

    ``order`` (m,) are the block's rows in the order of the visit; ``share_w`` (m,)
    and ``share_h`` (n,) divide each row's prior among its entries; ``col_w`` and
    ``col_h`` (3, K) hold, column by column, m, pull, and 1 or, where it is frozen, 0
    (a projected model has no m, and the last only if it is said to be partly frozen).
    In ``dense`` the block is the window of V at (row0, col0); NaN is missing in both.
    All floats but step and floor have one dtype.
    """

    sparse: Callable[..., None]
    dense: Callable[..., None]


def _pull(likelihood: Likelihood) -> Callable[..., Scalar]:
    """What an entry multiplies the other row by."""
    weight = entry_kernels(likelihood).weight

    @inline
    def pull(v: Scalar, mu: Scalar, step: Scalar, floor: Scalar) -> Scalar:
        real = type(mu)
        mean = floored(mu, floor)
        return min(max(step * weight(v, mean) * (v - mean), real(-1)), real(1))

    return pull


def _sparse(likelihood: Likelihood, projected: bool, partly: bool, K: int) -> Callable[..., None]:
    pull, meet = _pull(likelihood), meeting(projected, partly)

    @jit
    def sparse(
        indptr: Array,
        indices: Array,
        values: Array,
        order: Array,
        W: Array,
        H: Array,
        share_w: Array,
        share_h: Array,
        col_w: Array,
        col_h: Array,
        step: float,
        floor: float,
    ) -> None:
        real = W.dtype.type
        w = stack_array(K, W.dtype)
        for r in range(order.size):
            i = order[r]
            load_row(K, W, i, w)
            a = real(step) * share_w[i]
            for p in range(indptr[i], indptr[i + 1]):
                v, j = real(values[p]), np.intp(indices[p])
                if v == v:
                    e = pull(v, dot_row(K, w, H, j), real(step), real(floor))
                    meet(K, e, a, real(step) * share_h[j], w, H, j, col_w, col_h)
            store_row(K, w, W, i)

    return sparse


def _dense(likelihood: Likelihood, projected: bool, partly: bool, K: int) -> Callable[..., None]:
    pull, meet = _pull(likelihood), meeting(projected, partly)

    @jit
    def dense(
        V: Array,
        row0: int,
        col0: int,
        order: Array,
        W: Array,
        H: Array,
        share_w: Array,
        share_h: Array,
        col_w: Array,
        col_h: Array,
        step: float,
        floor: float,
    ) -> None:
        real = W.dtype.type
        w = stack_array(K, W.dtype)
        for r in range(order.size):
            i = order[r]
            load_row(K, W, i, w)
            a = real(step) * share_w[i]
            for j in range(H.shape[0]):
                v = real(V[row0 + i, col0 + j])
                if v == v:
                    e = pull(v, dot_row(K, w, H, j), real(step), real(floor))
                    meet(K, e, a, real(step) * share_h[j], w, H, j, col_w, col_h)
            store_row(K, w, W, i)

    return dense


def descent_kernels(
    likelihood: Likelihood, projected: bool, K: int, partly: bool = False
) -> DescentKernels:
    """Kernels of one beta-divergence and K columns, compiled when first called.

    ``projected`` keeps the factors non-negative, under exponential priors; else
    the priors are Gaussian. ``partly`` tells that columns of a projected model may be
    frozen; those of another always may.
    """
    return _descent_kernels(likelihood, bool(projected), bool(projected and partly), int(K))


@lru_cache(maxsize=64)
def _descent_kernels(
    likelihood: Likelihood, projected: bool, partly: bool, K: int
) -> DescentKernels:
    kind = (likelihood, projected, partly, K)
    return DescentKernels(_sparse(*kind), _dense(*kind))
