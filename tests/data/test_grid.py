"""Bands, parts, schedules: plain data, checked without any executor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.data.grid import (
    Bands,
    Block,
    Cyclic,
    Grid,
    NestedReshuffled,
    Proportional,
    Reshuffled,
    diagonal,
    diagonal_sizes,
    nested,
)
from daskfactor.errors import GridError, OptionError

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
    ],
)
def test_impossible_bands_are_refused(make, given, message):
    with pytest.raises((GridError, OptionError), match=message):
        make(*given)


@given(st.integers(1, 12))
def test_the_diagonals_visit_every_block_once_without_conflict(blocks):
    seen = []
    for part in range(blocks):
        members = diagonal(part, blocks)
        assert {block.row for block in members} == set(range(blocks))
        assert {block.col for block in members} == set(range(blocks))
        seen += members
    assert len(seen) == len(set(seen)) == blocks**2


@given(st.integers(2, 4), st.integers(1, 4))
def test_diagonals_of_tensors_do_so_too(axes, blocks):
    rng, seen = np.random.default_rng(axes), []
    observed = rng.integers(0, 9, (blocks,) * axes)
    sizes = diagonal_sizes(observed)
    assert sizes.shape == (blocks,) * (axes - 1)
    for part, size in enumerate(sizes.ravel()):
        members = diagonal(part, blocks, axes)
        assert all(set(bands) == set(range(blocks)) for bands in zip(*members, strict=True))
        assert sum(observed[block] for block in members) == size
        seen += members
    assert len(seen) == len(set(seen)) == blocks**axes


def test_the_digits_of_a_diagonal_say_how_far_further_axes_are_ahead():
    assert diagonal(1, 3) == (Block(0, 1), Block(1, 2), Block(2, 0))
    assert diagonal(5, 3, 3) == ((0, 1, 2), (1, 2, 0), (2, 0, 1))


@given(st.integers(1, 4), st.integers(1, 4))
def test_nested_parts_visit_every_block_once_and_stay_in_their_super_block(groups, size):
    blocks = groups * size
    seen = []
    for outer in range(groups):
        for inner in range(size):
            members = nested(outer, inner, groups, blocks)
            assert {block.row for block in members} == set(range(blocks))
            assert {block.col for block in members} == set(range(blocks))
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


@pytest.mark.parametrize("shape", [(4, 4), (3, 3, 3)])
@pytest.mark.parametrize("schedule", [Cyclic(), Reshuffled(), Proportional()])
def test_scaled_block_sums_are_unbiased_for_unequal_parts(schedule, shape):
    """E Σ_parts s Σ_part x / B = Σ x: the scale belongs to the order of the parts."""
    rng = np.random.default_rng(2)
    observed = rng.integers(1, 30, shape)
    values = rng.normal(size=shape) * observed
    sizes = diagonal_sizes(observed)
    assert sizes.sum() == observed.sum()
    means = []
    for _ in range(4000):
        parts = schedule.cycle(shape[0], sizes, rng)
        means.append(np.mean([part.scale * sum(values[b] for b in part.blocks) for part in parts]))
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - values.sum()) < 5 * error + 1e-9


def test_parts_without_an_entry_are_never_drawn():
    sizes = np.array([0, 7, 0], dtype=np.int64)
    parts = Proportional().cycle(3, sizes, np.random.default_rng(0))
    assert {part.outer for part in parts} == {0, 1, 2}
    assert all((part.blocks[0].col - part.blocks[0].row) % 3 == 1 for part in parts)
    with pytest.raises(GridError, match=r"no part holds an observed entry"):
        Proportional().cycle(2, np.zeros(2, dtype=np.int64), np.random.default_rng(0))
