"""Balanced orders: permutations, deterministic, and really balanced."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.data.grid import Bands, balanced_order, inverse


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.data())
def test_an_order_is_a_permutation_that_ascends_inside_bands(counts, data):
    cuts = data.draw(st.sets(st.integers(1, len(counts) - 1)) if len(counts) > 1 else st.just(()))
    bands = Bands((0, *sorted(cuts), len(counts)))
    order = balanced_order(np.array(counts), bands)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(len(counts)))
    for band in range(len(bands)):
        assert (np.diff(order[bands.slice(band)]) > 0).all()
    np.testing.assert_array_equal(order[inverse(order)], np.arange(len(counts)))
    np.testing.assert_array_equal(balanced_order(np.array(counts), bands), order)


@pytest.mark.parametrize("blocks", [2, 5, 8])
def test_heavy_rows_are_spread(blocks):
    counts = (10_000 / np.arange(1, 1004)).astype(np.int64)
    bands = Bands.even(counts.size, blocks)
    before = np.add.reduceat(counts, bands.offsets[:-1])
    after = np.add.reduceat(counts[balanced_order(counts, bands)], bands.offsets[:-1])
    assert before.max() / before.mean() > 1.6
    assert after.max() <= 1.03 * max(after.mean(), counts[0] + 1000)
    smooth = 1000 + np.arange(1003)
    after = np.add.reduceat(smooth[balanced_order(smooth, bands)], bands.offsets[:-1])
    assert after.max() / after.mean() < 1.01


def test_rows_of_equal_length_part_from_their_neighbours():
    bands = Bands.even(12, 3)
    for turning in (False, True):
        order = balanced_order(np.ones(12, np.int64), bands, turning)
        band = np.searchsorted(bands.offsets, inverse(order), side="right") - 1
        for start in range(0, 12, 3):
            assert set(band[start : start + 3]) == {0, 1, 2}


@pytest.mark.parametrize("heavy", [False, True])
def test_the_diagonal_is_spread_over_all_blocks(heavy):
    counts = (3000 / np.arange(1, 901)).astype(np.int64) if heavy else np.ones(900, np.int64)
    bands = Bands.even(900, 6)
    sides = [
        np.searchsorted(
            bands.offsets, inverse(balanced_order(counts, bands, turning)), side="right"
        )
        - 1
        for turning in (False, True)
    ]
    blocks = np.bincount(sides[0] * 6 + sides[1], minlength=36)
    assert blocks.max() < 3 * 25, "dealt out alike, 6 blocks would hold 150 each"


def test_a_long_side_is_quick():
    counts = np.random.default_rng(0).zipf(1.6, 300_000)
    after = np.add.reduceat(
        counts[balanced_order(counts, Bands.even(counts.size, 64))],
        Bands.even(counts.size, 64).offsets[:-1],
    )
    assert after.max() <= 1.01 * max(counts.max(), after.mean())
