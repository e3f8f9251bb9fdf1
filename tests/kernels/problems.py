"""Blocks to try kernels on, and all that kernels give for one."""

import numpy as np

from daskfactor.kernels import blockwise
from daskfactor.kernels.views import (
    BlockView,
    SparseBlock,
    Sums,
    Workspace,
    index_type,
    pointer_type,
)
from tests.kernels.reference import watched_cells

FLOOR = 1e-6


def sparse_block(dtype, m, n, zeros, density=0.3, held_out=0.2, seed=0):
    """Random entries; with ``zeros`` some of the stored ones are missing (NaN)."""
    rng = np.random.default_rng(seed)
    stored = rng.random((m, n)) < density
    values = rng.gamma(2.0, size=int(stored.sum())).astype(dtype) + dtype(0.05)
    if zeros:
        values[rng.random(values.size) < held_out] = np.nan
    full = np.full((m, n), 0 if zeros else np.nan, dtype)
    full[stored] = values
    return compressed(full, zeros)


def factor_pair(dtype, m, n, K, seed=1):
    rng = np.random.default_rng(seed)
    W = rng.gamma(2.0, size=(m, K)) + 0.01
    H = rng.gamma(2.0, size=(n, K)) / (2 * K) + 0.01
    return W.astype(dtype), H.astype(dtype)


def compressed(V, zeros):
    """Compressed rows of what is observed; with ``zeros`` of what is missing or not zero."""
    kept = V != 0 if zeros else ~np.isnan(V)
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
    indices = np.nonzero(kept)[1].astype(index_type(V.shape[1]))
    return SparseBlock(indptr.astype(pointer_type(kept.sum())), indices, V[kept], *V.shape, zeros)


def window(V):
    """A dense block within a larger array, away from its corner."""
    m, n = V.shape
    array = np.full((m + 3, n + 2), 99.0, V.dtype)
    array[2 : 2 + m, 1 : 1 + n] = V
    return BlockView(array, 2, 1, m, n)


def written_out(block, dtype=np.float64):
    """The block as an (m, n) array, NaN where missing."""
    if isinstance(block, BlockView):
        return block.block.astype(dtype)
    full = np.full((block.m, block.n), 0 if block.zeros else np.nan, dtype)
    full[np.repeat(np.arange(block.m), np.diff(block.indptr)), block.indices] = block.values
    return full


def dense_view(block, dtype=np.float64):
    return window(written_out(block, dtype))


def multiplicative(view, law, factor, factors, floor, out, work):
    """Numerator and denominator of one factor's update gain the block's."""
    sums = Sums.of(factor, len(factors), *out)
    blockwise.accumulate((view, law, factors, floor), "ratio", sums, work)


def slope(view, law, factor, factors, floor, out, work):
    """One factor's gradient, and the fits of its rows if there are any, gain the block's."""
    term, fits = out
    sums = Sums.of(factor, len(factors), term, fits=fits)
    blockwise.accumulate((view, law, factors, floor), "score", sums, work)


def evaluate(view, law, factors, floor, out, cells, work):
    """The sums of fit gain the block's, and its monitored cells move."""
    blockwise.evaluate((view, law, factors, floor), out, work, cells)


def everything(
    view, law, W, H, *, scale=1.7, floor=FLOOR, start=7.0, slopes=False, cells=False, work=None
):
    """All that kernels give for a block; arrays that they add to hold ``start`` before."""
    work, sides = work or Workspace(), {"W": W, "H": H}
    for own in work.gradients((len(W), len(H)), W.shape[1], W.dtype):
        own[:] = np.nan
    curvatures = np.full_like(W, start), np.full_like(H, start)
    found = {f"curvature {side}": own for side, own in zip(sides, curvatures, strict=True)}
    for name, more in (("gradient", ()), ("gradient again", (curvatures,))):
        made = blockwise.gradient((view, law, (W, H), floor), scale, work, *more)
        found |= {f"{name} {side}": own.copy() for side, own in zip(sides, made, strict=True)}
    for factor, (side, own) in enumerate(sides.items()):
        added = {name: np.full_like(own, start) for name in ("numerator", "denominator")}
        multiplicative(view, law, factor, (W, H), floor, (*added.values(),), work)
        if slopes:
            added |= {name: np.full_like(own, start) for name in ("slope", "slope alone")}
            added["fits"] = np.full(len(own), start)
            told = view, law, factor, (W, H), floor
            slope(*told, (added["slope"], added["fits"]), work)
            slope(*told, (added["slope alone"], None), work)
        found |= {f"{name} {side}": part for name, part in added.items()}
    found["fit"], watched = np.full(2, start), None
    if cells:
        at = watched_cells(view.m, view.n)
        found["mean"], found["m2"] = np.full((2, len(at[0])), [[1.0], [0.5]])
        watched = at, found["mean"], found["m2"], 3
    evaluate(view, law, (W, H), floor, found["fit"], watched, work)
    return found


def assert_close(found, wanted, tolerance, least=1.0):
    """Numbers of two dictionaries are the same, beside the largest of each array."""
    for name, own in found.items():
        scale = max(np.abs(wanted[name]).max(), least)  # sums of cancelling terms may be zero
        close = {"rtol": 0, "atol": tolerance, "err_msg": name}
        np.testing.assert_allclose(own / scale, wanted[name] / scale, **close)
