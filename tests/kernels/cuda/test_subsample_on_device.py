"""Entries that a device draws from all blocks of a part, against those of processors."""

import numpy as np
import pytest

from daskfactor.kernels import factorwise, subsample
from daskfactor.kernels.cuda import blocks as cuda
from daskfactor.kernels.subsample import block_address, drawn_entries
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.cuda.fake import standing_in
from tests.kernels.cuda.test_slope_on_device import part_of
from tests.pairwise import pairwise

KEY, ITERATION, NUMBERS = np.array([3, 5], np.uint32), 11, np.array([2, 3, 7])
COUNTS = np.array([200, 0, 91])
"""Draws of three blocks, more than one of them has cells."""


@pytest.fixture(autouse=True, scope="module")
def device():
    with standing_in() as found:
        yield found


def views_of(zeros, weighed, dtype):
    return part_of(np.random.default_rng(4), ((0, 1, 2), (2, 0, 1)), zeros, weighed, dtype)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("zeros", [None, False, True])
def test_the_same_entries(device, zeros, weighed):
    views, part = views_of(zeros, weighed, np.float32)
    address = block_address(KEY, ITERATION, NUMBERS)
    drawn = cuda._drawn(part, np.dtype(np.float32), COUNTS, address)
    got = {name: device.take(own) for name, own in drawn.arrays.items()}
    found = []
    for b, view in enumerate(views):
        if not COUNTS[b]:
            continue
        own = block_address(KEY, ITERATION, int(NUMBERS[b]))
        for rows, cols, values, weights in drawn_entries(view, int(COUNTS[b]), own):
            first = rows + part.rows.start[b], cols + part.cols.start[b], values.copy()
            found.append((*first, weights.copy() if weighed else np.ones(len(values))))
    rows, cols, values, weights = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(rows, kind="stable")
    assert np.array_equal(np.repeat(np.arange(part.rows.size), np.diff(got["indptr"])), rows[order])
    assert np.array_equal(got["cols"], cols[order])
    assert np.array_equal(got["values"], values[order].astype(np.float32))
    if weighed:
        assert np.array_equal(got["weights"], weights[order].astype(np.float32))
    turned = np.argsort(got["cols"], kind="stable")
    assert np.array_equal(got["places"], turned)
    assert np.array_equal(got["rows"], rows[order][turned])
    by_column = np.repeat(np.arange(part.cols.size), np.diff(got["starts"]))
    assert np.array_equal(by_column, got["cols"][turned])


@pairwise(zeros=[None, False, True], weighed=[False, True], curved=[False, True])
def test_what_they_add(device, zeros, weighed, curved):
    views, part = views_of(zeros, weighed, np.float64)
    rng, law = np.random.default_rng(5), Tweedie(1.0)
    factors = tuple(rng.gamma(2.0, 0.5, (own.size, 5)) for own in (part.rows, part.cols))
    sums = [np.full_like(own, 7.0) for own in (*factors, *factors)]
    put = [device.put(own) for own in sums]
    draws = COUNTS, block_address(KEY, ITERATION, NUMBERS)
    more = ((put[2], put[3]), 0.3) if curved else None
    given = 1.5, 1e-6, tuple(put[:2])
    factorwise.add_subsample(part, law, tuple(map(device.put, factors)), draws, *given, more)
    for b, view in enumerate(views):
        if not COUNTS[b]:
            continue
        spans = [slice(s.start[b], s.start[b] + s.count[b]) for s in (part.rows, part.cols)] * 2
        own = [array[span] for array, span in zip(sums, spans, strict=True)]
        pair = tuple(array[span] for array, span in zip(factors, spans, strict=False))
        draw = int(COUNTS[b]), block_address(KEY, ITERATION, int(NUMBERS[b]))
        gathered = ((own[2], own[3]), 0.3) if curved else None
        subsample.add_subsample(view, law, pair, draw, 1.5, 1e-6, (own[0], own[1]), gathered)
    for ours, theirs in zip(put, sums, strict=True):
        np.testing.assert_allclose(device.take(ours), theirs, rtol=0, atol=1e-12)
