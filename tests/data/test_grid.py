"""Bands, parts, schedules, default grids, balanced orders: checked without any executor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor import Cyclic, NestedReshuffled, Proportional, Reshuffled
from daskfactor.data import grid as grids
from daskfactor.data.grid import Bands, Block, Grid, balanced_order, choose_grid, default_blocks
from daskfactor.errors import GridError, OptionError
from tests.refusals import refused

SIZES = np.array([10, 1, 5, 4], dtype=np.int64)


@given(st.integers(1, 200), st.data())
def test_even_bands_tile_and_differ_by_at_most_one(size, data):
    count = data.draw(st.integers(1, size))
    bands = Bands.even(size, count)
    assert bands.size == size
    assert len(bands) == count
    assert max(bands.sizes) - min(bands.sizes) <= 1
    rows = [row for band in range(count) for row in range(size)[bands.slice(band)]]
    assert rows == list(range(size))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 25))
def test_regrouping_keeps_chunk_edges(sizes, count):
    bands = Bands.from_sizes(sizes)
    grouped = bands.regroup(count)
    assert set(grouped.offsets) <= set(bands.offsets)
    assert grouped.size == bands.size
    assert len(grouped) == min(count, len(sizes))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
)
def test_grids_from_chunks_are_square_whatever_the_chunks(rows, cols):
    grid = Grid.from_chunks((rows, cols))
    assert len(grid.rows) == len(grid.cols) == min(len(rows), len(cols))
    assert grid.shape == (sum(rows), sum(cols))


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        *((Bands, (offsets,), "offsets") for offsets in ((0,), (1, 2), (0, 2, 2), (0, 3, 1), ())),
        *((Bands.even, (4, count), "between 1 and 4") for count in (0, -1, 5)),
        (Grid, (Bands.even(9, 3), Bands.even(9, 2)), "got 3 row bands and 2 column bands"),
        (NestedReshuffled(4).cycle, (6, np.ones(6, int), None), "6 bands cannot be grouped into 4"),
        (NestedReshuffled, (0,), "at least 1"),
        (Proportional().cycle, (2, np.zeros(2, int), None), "no part holds an observed entry"),
    ],
)
def test_impossible_bands_and_parts_are_refused(make, given, message):
    refused((GridError, OptionError), message, make, *given)


@given(st.integers(2, 4), st.integers(1, 5))
def test_the_diagonals_visit_every_block_once_without_conflict(axes, blocks):
    rng, seen = np.random.default_rng(axes), []
    observed = rng.integers(0, 9, (blocks,) * axes)
    sizes = grids.diagonal_sizes(observed)
    assert sizes.shape == (blocks,) * (axes - 1)
    for part, size in enumerate(sizes.ravel()):
        members = grids.diagonal(part, blocks, axes)
        assert all(set(bands) == set(range(blocks)) for bands in zip(*members, strict=True))
        assert sum(observed[block] for block in members) == size
        seen += members
    assert len(seen) == len(set(seen)) == blocks**axes


def test_the_digits_of_a_diagonal_say_how_far_further_axes_are_ahead():
    assert grids.diagonal(1, 3) == (Block(0, 1), Block(1, 2), Block(2, 0))
    assert grids.diagonal(5, 3, 3) == ((0, 1, 2), (1, 2, 0), (2, 0, 1))


@given(st.integers(1, 4), st.integers(1, 4))
def test_nested_parts_visit_every_block_once_and_stay_in_their_super_block(groups, size):
    blocks = groups * size
    seen = []
    for outer in range(groups):
        for inner in range(size):
            members = grids.nested(outer, inner, groups, blocks)
            assert all(set(bands) == set(range(blocks)) for bands in zip(*members, strict=True))
            for block in members:
                assert block.col // size == (block.row // size + outer) % groups
            seen += members
    assert len(seen) == len(set(seen)) == blocks**2


@pytest.mark.parametrize("schedule", [Cyclic(), Reshuffled(), NestedReshuffled(2)])
def test_every_part_once_a_cycle_at_scale_b(schedule):
    parts = schedule.cycle(4, SIZES, np.random.default_rng(1))
    blocks = [block for part in parts for block in part.blocks]
    assert sorted(blocks) == [Block(row, col) for row in range(4) for col in range(4)]
    assert [part.scale for part in parts] == [4.0] * 4


def test_reshuffled_order_changes_from_cycle_to_cycle_and_is_uniform():
    rng = np.random.default_rng(0)
    orders = [tuple(p.outer for p in Reshuffled().cycle(4, SIZES, rng)) for _ in range(6000)]
    firsts = np.bincount([order[0] for order in orders], minlength=4)
    assert len(set(orders)) == 24
    assert np.all(np.abs(firsts - 1500) < 5 * np.sqrt(6000 * 0.25 * 0.75))


def test_proportional_parts_are_drawn_by_size_and_scaled_by_its_inverse():
    rng = np.random.default_rng(0)
    counts = np.zeros(4)
    for _ in range(5000):
        for part in Proportional().cycle(4, SIZES, rng):
            diagonal_number = (part.blocks[0].col - part.blocks[0].row) % 4
            counts[diagonal_number] += 1
            assert part.scale == pytest.approx(20 / SIZES[diagonal_number])
    expected = 20_000 * SIZES / 20
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))
    sizes = np.array([0, 7, 0], dtype=np.int64)
    parts = Proportional().cycle(3, sizes, np.random.default_rng(0))
    assert {part.outer for part in parts} == {0, 1, 2}
    assert all((part.blocks[0].col - part.blocks[0].row) % 3 == 1 for part in parts)


@pytest.mark.parametrize("shape", [(4, 4), (3, 3, 3)])
@pytest.mark.parametrize("schedule", [Cyclic(), Reshuffled(), Proportional()])
def test_scaled_block_sums_are_unbiased_for_unequal_parts(schedule, shape):
    """E Σ_parts s Σ_part x / B = Σ x: the scale belongs to the order of the parts."""
    rng = np.random.default_rng(2)
    observed = rng.integers(1, 30, shape)
    values = rng.normal(size=shape) * observed
    sizes = grids.diagonal_sizes(observed)
    assert sizes.sum() == observed.sum()
    means = []
    for _ in range(4000):
        parts = schedule.cycle(shape[0], sizes, rng)
        means.append(np.mean([part.scale * sum(values[b] for b in part.blocks) for part in parts]))
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - values.sum()) < 5 * error + 1e-9


# -- the grid that a matrix gets ------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        *(((1, 1), 1), ((1, 500), 1), ((200, 100), 1), ((1024, 1024), 1), ((2047, 2048), 1)),
        *(((2048, 2048), 2), ((10304, 400), 1), ((4096, 4095), 2), ((4096, 4096), 4)),
        *(((8192, 8192), 8), ((10**6, 10), 2), ((10**6, 3), 1), ((10**6, 64), 4)),
        *(((32_768, 32_768), 8), ((32_776, 32_776), 16), ((10**6, 10**6), 64)),
    ],
)
def test_default_number_of_blocks(shape, count):
    assert default_blocks(shape) == count
    assert default_blocks(shape[::-1]) == count
    assert choose_grid(shape).blocks == count


def test_components_entries_and_workers_change_the_number_of_blocks():
    faces = [default_blocks((10304, 400), components=K) for K in (2, 10, 25, 100, 1000)]
    assert faces == [1, 1, 2, 4, 8]
    stored = [default_blocks((10**5, 10**5), entries=n) for n in (10**6, 2**21, 2**23, 2**25)]
    assert stored == [1, 2, 4, 8]
    shape, long = (10304, 400), (100_000, 100_000)
    asked = [(shape, 2), (shape, 6), (shape, 50), ((63, 63), 50), (long, 200)]
    assert [default_blocks(size, workers=n) for size, n in asked] == [4, 12, 15, 1, 64]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_default_grids_are_always_possible(rows, cols):
    grid = choose_grid((rows, cols))
    assert grid.shape == (rows, cols)
    assert 1 <= grid.blocks <= 64
    if grid.blocks > 2:
        assert min(grid.rows.sizes) * min(grid.cols.sizes) >= 2**20
        assert min(*grid.rows.sizes, *grid.cols.sizes) >= 16


def sizes(rows, cols, edge=2000):
    return (edge,) * rows, (edge,) * cols


@pytest.mark.parametrize(
    ("chunks", "count"),
    [
        *((sizes(2, 2), 2), (sizes(5, 5), 5), (sizes(5, 10), 5), (sizes(64, 64), 64)),
        *((sizes(5, 11), 8), (sizes(2, 5), 4), (sizes(65, 65), 32)),
        *((sizes(5, 5, 50), 1), (sizes(64, 64, 20), 1)),  # too small for more than one
        (((2000, 3, 2000), (2000, 2700)), 2),
    ],
)
def test_square_chunk_grids_are_taken_over(chunks, count):
    shape = (sum(chunks[0]), sum(chunks[1]))
    grid = choose_grid(shape, chunks)
    assert grid.shape == shape
    assert grid.blocks == count
    for bands, side in ((grid.rows, chunks[0]), (grid.cols, chunks[1])):
        edges = {sum(side[:number]) for number in range(len(side) + 1)}
        if len(side) >= count:
            assert set(bands.offsets) <= edges


def test_a_number_of_blocks_wins_over_the_chunks():
    shape, chunks = (500, 250), sizes(10, 5, 50)
    grid = choose_grid(shape, chunks, blocks=3)
    assert grid.blocks == 3
    assert all(offset % 50 == 0 for offset in grid.rows.offsets + grid.cols.offsets)
    assert choose_grid(shape, chunks, blocks=7).blocks == 7
    match = "from 1 to 250, the shortest side of data of 500 x 250"
    refused(OptionError, match, choose_grid, shape, chunks, blocks=251)
    # Chunks at the edge are cut.
    assert grids.expand_chunks((10, 4), (4, 9)) == ((4, 4, 2), (4,))


# -- balanced orders ------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.data())
def test_an_order_is_a_permutation_that_ascends_inside_bands(counts, data):
    cuts = data.draw(st.sets(st.integers(1, len(counts) - 1)) if len(counts) > 1 else st.just(()))
    bands = Bands((0, *sorted(cuts), len(counts)))
    order = balanced_order(np.array(counts), bands)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(len(counts)))
    for band in range(len(bands)):
        assert (np.diff(order[bands.slice(band)]) > 0).all()
    np.testing.assert_array_equal(order[grids.inverse(order)], np.arange(len(counts)))
    np.testing.assert_array_equal(balanced_order(np.array(counts), bands), order)


def heaviest(counts, bands, order=slice(None)):
    """What the heaviest band holds, and the mean of all."""
    held = np.add.reduceat(counts[order], bands.offsets[:-1])
    return held.max(), held.mean()


@pytest.mark.parametrize("blocks", [2, 5, 8])
def test_heavy_rows_are_spread(blocks):
    counts, smooth = (10_000 / np.arange(1, 1004)).astype(np.int64), 1000 + np.arange(1003)
    bands = Bands.even(counts.size, blocks)
    most, mean = heaviest(counts, bands)
    assert most / mean > 1.6
    most, mean = heaviest(counts, bands, balanced_order(counts, bands))
    assert most <= 1.03 * max(mean, counts[0] + 1000)
    most, mean = heaviest(smooth, bands, balanced_order(smooth, bands))
    assert most / mean < 1.01


def test_a_long_side_is_quick():
    counts = np.random.default_rng(0).zipf(1.6, 300_000)
    bands = Bands.even(counts.size, 64)
    most, mean = heaviest(counts, bands, balanced_order(counts, bands))
    assert most <= 1.01 * max(counts.max(), mean)


def bands_of(counts, bands, turning):
    """The band of each row in a balanced order."""
    at = grids.inverse(balanced_order(counts, bands, turning))
    return np.searchsorted(bands.offsets, at, side="right") - 1


def test_rows_of_equal_length_part_from_their_neighbours():
    for turning in (False, True):
        band = bands_of(np.ones(12, np.int64), Bands.even(12, 3), turning)
        assert (np.sort(band.reshape(4, 3)) == [0, 1, 2]).all()


@pytest.mark.parametrize("heavy", [False, True])
def test_the_diagonal_is_spread_over_all_blocks(heavy):
    counts = (3000 / np.arange(1, 901)).astype(np.int64) if heavy else np.ones(900, np.int64)
    rows, cols = (bands_of(counts, Bands.even(900, 6), turning) for turning in (False, True))
    blocks = np.bincount(rows * 6 + cols, minlength=36)
    assert blocks.max() < 3 * 25, "dealt out alike, 6 blocks would hold 150 each"
