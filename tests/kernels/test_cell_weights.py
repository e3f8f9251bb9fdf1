"""Kernels on cells with weights: a weight of n is a cell n times over, whatever the kernel."""

import numpy as np
import pytest

from daskfactor.kernels.regression import add_equations, transposed, triangle
from daskfactor.kernels.subsample import add_subsample, block_address
from daskfactor.kernels.views import BlockView
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import problems
from tests.kernels.problems import FLOOR, factor_pair, sparse_block, written_out

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
        block = problems.dense_view(sparse_block(dtype, M, N, True), dtype)
    values = block.block if isinstance(block, BlockView) else block.values
    weights = np.random.default_rng(3).integers(0, MOST + 1, values.shape).astype(dtype)
    return block._replace(weights=np.where(np.isnan(values), np.nan, weights))


def often(block):
    """Weights of all cells, NaN where one is not stored."""
    if isinstance(block, BlockView):
        return block.weights
    return written_out(block._replace(values=block.weights, zeros=False))


def copies(block):
    """Blocks without weights in which, together, a cell is as often as its weight says."""
    values, weights = written_out(block, np.float32), often(block)
    zeros = not isinstance(block, BlockView) and block.zeros
    for level in range(1, MOST + 1):
        kept = weights >= level
        if zeros and level == 1:
            kept |= np.isnan(weights) & (values == 0)
        yield problems.window(np.where(kept, values, np.nan).astype(np.float32))


def everything(block, law):
    """What all kernels of a law give for a block."""
    found = problems.everything(block, law, W, H, start=0.0, slopes=True)
    if law is NORMAL:
        for mine, other in ((block, H), (transposed(block), W)):
            targets = np.zeros((mine.m, K), np.float32)
            grams = add_equations(mine, other, np.zeros((1, triangle(K)), np.float32), targets)
            found[f"grams {mine.m}"] = np.broadcast_to(grams, (mine.m, triangle(K)))
            found[f"targets {mine.m}"] = targets
    return found


@pytest.mark.quick("beta=1-zero", "beta=2-zero", "a negative binomial law-missing")
@CASES
def test_a_weight_says_how_often_a_cell_counts(law, kind):
    block = block_of(kind)
    alone = [everything(copy, law) for copy in copies(block)]
    wanted = {name: sum(own[name] for own in alone) for name in alone[0]}
    problems.assert_close(everything(block, law), wanted, ROUNDING)


@pytest.mark.parametrize("kind", ["dense", "missing", "zero"])
def test_entries_that_are_drawn_count_by_weight(kind):
    block, draws = block_of(kind), (4000, block_address(np.array([1, 2], np.uint32), 5, 0))
    factor = 1 if kind == "zero" else 2  # what is not stored has weight 1 all the same
    sums = []
    for weights in (factor * np.ones_like(block.weights), None):
        view, out = block._replace(weights=weights), [np.zeros_like(own) for own in (W, H, W, H)]
        drawn_from = view, POISSON, (W, H), FLOOR
        add_subsample(drawn_from, draws, 1.0, (*out[:2],), ((*out[2:],), 1.0))
        sums.append(out)
    for ours, theirs in zip(*sums, strict=True):
        np.testing.assert_allclose(ours, factor * theirs, rtol=ROUNDING)
