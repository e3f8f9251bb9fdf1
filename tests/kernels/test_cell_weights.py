"""Kernels on cells with weights: a weight of n is a cell n times over, whatever the kernel."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daskfactor.kernels import blockwise
from daskfactor.kernels.descent import descent_kernel
from daskfactor.kernels.regression import add_equations, triangle, turned
from daskfactor.kernels.subsample import add_subsample, block_address
from daskfactor.kernels.views import BlockView, Workspace
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.sparse_problem import FLOOR, dense_view, factor_pair, sparse_block

Array = NDArray[Any]
# Types and K are those of whole runs with weights, for which most of this is compiled anyway.
M, N, K = 53, 31, 2
MOST = 3
W, H = factor_pair(np.float32, M, N, K)
ROUNDING = 1e-5  # a weight that is left out somewhere is an error of a tenth and more
NORMAL, POISSON, OVERDISPERSED = Tweedie(2.0), Tweedie(1.0), NegativeBinomial(0.6)
CASES = pytest.mark.parametrize(
    ("law", "kind"),
    [
        *((NORMAL, "dense"), (NORMAL, "missing"), (POISSON, "zero"), (NORMAL, "zero")),
        *((OVERDISPERSED, kind) for kind in ("dense", "missing", "zero")),
    ],
    ids=str,
)


def block_of(kind, dtype=np.float32):
    """A block with missing cells, and weights of 0 to 3; NaN where a cell is missing."""
    block = sparse_block(dtype, M, N, kind == "zero")
    if kind == "dense":
        block = dense_view(sparse_block(dtype, M, N, True), dtype)
    values = block.block if isinstance(block, BlockView) else block.values
    weights = np.random.default_rng(3).integers(0, MOST + 1, values.shape).astype(dtype)
    return block._replace(weights=np.where(np.isnan(values), np.nan, weights))


def copies(block):
    """Blocks without weights in which, together, a cell is as often as its weight says."""
    found = []
    for level in range(1, MOST + 1):
        with np.errstate(invalid="ignore"):
            kept = block.weights >= level
        if isinstance(block, BlockView):
            found.append(BlockView(np.where(kept, block.block, np.nan), 0, 0, M, N))
        elif block.zeros and level == 1:
            found.append(block._replace(values=np.where(kept, block.values, np.nan), weights=None))
        else:
            full = np.full((M, N), np.nan, np.float32)
            rows = np.repeat(np.arange(M), np.diff(block.indptr))
            full[rows[kept], block.indices[kept]] = block.values[kept]
            found.append(BlockView(full, 0, 0, M, N))
    return found


def everything(block, law):
    """What all kernels of a law give for a block."""
    work = Workspace(np.float32)
    curvatures = np.zeros_like(W), np.zeros_like(H)
    found = dict(enumerate(blockwise.gradient(block, law, W, H, 2.0, FLOOR, work)))
    found = {f"gradient {side}": own.copy() for side, own in found.items()}
    again = blockwise.gradient(block, law, W, H, 2.0, FLOOR, work, curvatures)
    found |= {f"gradient again {side}": own.copy() for side, own in enumerate(again)}
    found |= {f"curvature {side}": own for side, own in enumerate(curvatures)}
    for by_rows, own in ((True, W), (False, H)):
        num, den = np.zeros_like(own), np.zeros_like(own)
        blockwise.multiplicative(block, law, by_rows, W, H, FLOOR, (num, den), work)
        slope, fits, plain = np.zeros_like(own), np.zeros(len(own)), np.zeros_like(own)
        blockwise.slope(block, law, by_rows, W, H, FLOOR, (slope, fits), work)
        blockwise.slope(block, law, by_rows, W, H, FLOOR, (plain, None), work)
        names = ("numerator", "denominator", "slope", "fits", "slope alone")
        parts = (num, den, slope, fits, plain)
        found |= {f"{name} {by_rows}": part for name, part in zip(names, parts, strict=True)}
    sums = np.zeros(2)
    blockwise.evaluate(block, law, W, H, FLOOR, sums, None, work)
    found["fit"] = sums
    if law is NORMAL:
        for mine, other in ((block, H), (turned(block), W)):
            targets = np.zeros((mine.m, K), np.float32)
            grams = add_equations(mine, other, np.zeros((1, triangle(K)), np.float32), targets)
            found[f"grams {mine.m}"] = np.broadcast_to(grams, (mine.m, triangle(K)))
            found[f"targets {mine.m}"] = targets
    return found


@CASES
def test_a_weight_says_how_often_a_cell_counts(law, kind):
    block = block_of(kind)
    ours = everything(block, law)
    alone = [everything(copy, law) for copy in copies(block)]
    for name, found in ours.items():
        wanted = sum(own[name] for own in alone)
        scale = max(np.abs(own[name]).max() for own in alone)
        np.testing.assert_allclose(
            found / scale, wanted / scale, atol=ROUNDING, rtol=0, err_msg=name
        )


@CASES
def test_weights_of_one_are_none(law, kind):
    block = block_of(kind)._replace(weights=None)
    values = block.block if isinstance(block, BlockView) else block.values
    plain, ones = (
        everything(block, law),
        everything(block._replace(weights=np.ones_like(values)), law),
    )
    for name, found in ones.items():
        scale = np.abs(plain[name]).max()
        np.testing.assert_allclose(
            found / scale, plain[name] / scale, atol=ROUNDING, rtol=0, err_msg=name
        )


@pytest.mark.parametrize("kind", ["dense", "missing", "zero"])
def test_entries_that_are_drawn_count_by_weight(kind):
    block, law = block_of(kind), Tweedie(1.0)
    factors, draws = (W, H), (4000, block_address(np.array([1, 2], np.uint32), 5, 0))
    weighed, plain = [
        [(np.zeros_like(W), np.zeros_like(H)), (np.zeros_like(W), np.zeros_like(H))]
        for _ in range(2)
    ]
    cells = block
    add_subsample(cells, law, factors, draws, 1.0, FLOOR, weighed[0], (weighed[1], 1.0))
    twice = block._replace(weights=2 * np.ones_like(block.weights))
    if kind == "zero":  # what is not stored has weight 1 all the same
        twice = block._replace(weights=np.ones_like(block.weights))
    for view, out in ((twice, weighed), (block._replace(weights=None), plain)):
        for part in (*out[0], *out[1]):
            part[:] = 0
        add_subsample(view, law, factors, draws, 1.0, FLOOR, out[0], (out[1], 1.0))
    factor = 1 if kind == "zero" else 2
    for ours, theirs in zip((*weighed[0], *weighed[1]), (*plain[0], *plain[1]), strict=True):
        np.testing.assert_allclose(ours, factor * theirs, rtol=ROUNDING)


@pytest.mark.parametrize("law", [NORMAL, POISSON, OVERDISPERSED], ids=str)
@pytest.mark.parametrize("kind", ["dense", "missing"])
def test_a_descent_takes_implicit_steps_by_weight(kind, law):
    block, step = block_of(kind, np.float64), 0.7
    W, H = factor_pair(np.float64, M, N, K)
    order, table, no_pull = np.arange(M)[::-1].copy(), np.ones((3, K)), (np.zeros(M), np.zeros(N))
    w, h = W.copy(), H.copy()
    kernel = descent_kernel(law, True, K, True)
    kernel(block.arguments, order, (w, h), no_pull, (table, table), step, (FLOOR, law.numbers))
    values, weights = block.block if kind == "dense" else None, block.weights
    if values is None:
        full, often = np.full((M, N), np.nan), np.full((M, N), np.nan)
        rows = np.repeat(np.arange(M), np.diff(block.indptr))
        full[rows, block.indices], often[rows, block.indices] = block.values, weights
        values, weights = full, often
    wanted, other = W.copy(), H.copy()
    for i in order:
        for j in np.flatnonzero(~np.isnan(values[i])):
            old_w, old_h = wanted[i].copy(), other[j].copy()
            mu = max(old_w @ old_h, FLOOR)
            slope = (
                law.deviance(values[i, j], mu * (1 - 1e-6))
                - law.deviance(values[i, j], mu * (1 + 1e-6))
            ) / (2e-6 * mu)
            size = old_w @ old_w + old_h @ old_h
            push = step * weights[i, j] * slope / (values[i, j] - mu)
            e = push * (values[i, j] - mu) / (1 + push * size)
            wanted[i] = np.maximum(old_w + e * old_h, 0)
            other[j] = np.maximum(old_h + e * old_w, 0)
    np.testing.assert_allclose(w, wanted, rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(h, other, rtol=2e-4, atol=1e-6)
