"""Gradients of one side with fits of its rows, of all blocks of a part, against processors'."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daskfactor.kernels import blockwise, factorwise
from daskfactor.kernels.cuda import blocks as cuda
from daskfactor.kernels.views import BlockView, SparseBlock, Workspace
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.cuda.fake import standing_in
from tests.pairwise import pairwise

Array = NDArray[Any]
FLOOR, K = 1e-6, 5
ROWS, COLS = (13, 9, 17), (8, 11, 6)
"""Bands of three blocks, in the order of a round."""


@pytest.fixture(autouse=True, scope="module")
def device():
    with standing_in() as found:
        yield found


def side(counts, order):
    """Bands in the order in which a round's blocks meet them."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    start = offsets[list(order)]
    return cuda.Side(start, np.array([counts[own] for own in order]), int(offsets[-1]))


def dense_block(rng, m, n, dtype, weighed):
    array = rng.poisson(2.0, (m + 2, n + 1)).astype(dtype)
    array[rng.random(array.shape) < 0.2] = np.nan
    weights = rng.gamma(2.0, 1.0, (m, n)).astype(dtype) if weighed else None
    return BlockView(array, 1, 1, m, n, weights)


def sparse_block(rng, m, n, dtype, weighed, zeros):
    stored = rng.random((m, n)) < 0.4
    values = (1 + rng.poisson(2.0, int(stored.sum()))).astype(dtype)
    if zeros:
        values[rng.random(values.size) < 0.2] = np.nan
    indptr = np.concatenate([[0], np.cumsum(stored.sum(axis=1))]).astype(np.int32)
    indices = np.nonzero(stored)[1].astype(np.uint16)
    weights = rng.gamma(2.0, 1.0, values.size).astype(dtype) if weighed else None
    return SparseBlock(indptr, indices, values, m, n, zeros, weights)


def part_of(rng, order, zeros, weighed, dtype):
    """Blocks of a part, here and on the device; ``order`` has their bands of rows and columns."""
    rows, cols = side(ROWS, order[0]), side(COLS, order[1])
    sizes = list(zip(rows.count, cols.count, strict=True))
    if zeros is None:
        views = [dense_block(rng, m, n, dtype, weighed) for m, n in sizes]
    else:
        views = [sparse_block(rng, m, n, dtype, weighed, zeros) for m, n in sizes]
    made, put = cuda.packed(views, rows, cols, np.dtype(dtype), np.empty), cuda.current().put
    return views, cuda.Part(rows, cols, {name: put(own) for name, own in made.items()}, zeros)


def worst(device, law, factor, zeros, weighed, dtype):
    """Largest differences of gradients and of fits, beside the largest of each."""
    rng, order = np.random.default_rng(3), ((0, 1, 2), (2, 0, 1))
    views, part = part_of(rng, order, zeros, weighed, dtype)
    rows, cols = part.rows, part.cols
    factors = [rng.gamma(2.0, 0.5, (own.size, K)).astype(dtype) for own in (rows, cols)]
    gradient, fits = np.full_like(factors[factor], 7.0), np.full(len(factors[factor]), 3.0)
    mine = device.put(gradient), device.put(fits)
    alone = device.put(gradient)
    placed, taken = tuple(map(device.put, factors)), law
    if np.ndim(law.numbers[0] if law.numbers else 0):
        taken = law.at(device.put(law.numbers[0]))[0]
    work = Workspace(np.dtype(dtype))
    factorwise.slope(part, taken, factor, placed, FLOOR, mine, work)
    factorwise.slope(part, taken, factor, placed, FLOOR, (alone, None), work)
    for b, view in enumerate(views):
        spans = [slice(own.start[b], own.start[b] + own.count[b]) for own in (rows, cols)]
        pair = [np.ascontiguousarray(own[span]) for own, span in zip(factors, spans, strict=True)]
        own = law.at(law.numbers[0][spans[1]])[0] if taken is not law else law
        out = gradient[spans[factor]], fits[spans[factor]]
        blockwise.slope(view, own, factor == 0, *pair, FLOOR, out, work)
    got = [device.take(own) for own in mine]
    assert np.array_equal(got[0], device.take(alone))
    first, second = (
        float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        for ours, theirs in zip(got, (gradient, fits), strict=True)
    )
    return first, second


TOLERANCE = {np.float32: 2e-6, np.float64: 1e-13}


@pairwise(beta=[1.0, 0.5, 2.0], weighed=[False, True], tile=[2**30, 600])
def test_dense(device, monkeypatch, beta, weighed, tile):
    """In one tile, and in tiles of a few lines: fits of columns are added up over these."""
    monkeypatch.setattr(cuda, "TILE_BYTES", tile)
    for dtype, tolerance in TOLERANCE.items():
        for factor in (0, 1):
            assert max(worst(device, Tweedie(beta), factor, None, weighed, dtype)) < tolerance


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("beta", "zeros"), [(1.0, True), (2.0, True), (1.0, False), (0.5, False)])
def test_sparse(device, beta, zeros, weighed):
    for dtype, tolerance in TOLERANCE.items():
        for factor in (0, 1):
            found = worst(device, Tweedie(beta), factor, zeros, weighed, dtype)
            assert max(found) < tolerance


@pytest.mark.parametrize("zeros", [None, False])
def test_every_column_has_its_own_dispersion(device, zeros):
    law = NegativeBinomial(np.linspace(0.1, 3.0, sum(COLS)))
    for dtype, tolerance in TOLERANCE.items():
        for factor in (0, 1):
            assert max(worst(device, law, factor, zeros, False, dtype)) < tolerance


@pytest.mark.parametrize("factor", [0, 1])
def test_a_share_counts_for_gradient_and_fits(device, factor):
    for zeros in (None, True):
        law = Tweedie(1.0).shared(0.25)
        assert max(worst(device, law, factor, zeros, False, np.float64)) < 1e-13
