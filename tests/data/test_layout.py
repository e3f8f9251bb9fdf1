"""The grid that a matrix gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.data.grid import choose_grid, default_blocks, expand_chunks
from daskfactor.errors import OptionError


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((1, 1), 1),
        ((1, 500), 1),
        ((2, 500), 2),
        ((63, 63), 2),
        ((200, 200), 2),
        ((256, 256), 2),
        ((511, 512), 2),
        ((512, 512), 4),
        ((1024, 1023), 4),
        ((1024, 1024), 8),
        ((10304, 400), 8),
        ((10**6, 10), 2),
        ((10**6, 64), 4),
        ((32_768, 32_768), 8),
        ((32_776, 32_776), 16),
        ((10**6, 10**6), 64),
    ],
)
def test_default_number_of_blocks(shape, count):
    assert default_blocks(shape) == count
    assert default_blocks(shape[::-1]) == count
    assert choose_grid(shape).blocks == count


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_default_grids_are_always_possible(rows, cols):
    grid = choose_grid((rows, cols))
    assert grid.shape == (rows, cols)
    assert 1 <= grid.blocks <= 64
    if grid.blocks > 2:
        assert min(grid.rows.sizes) * min(grid.cols.sizes) >= 16_384
        assert min(*grid.rows.sizes, *grid.cols.sizes) >= 16


def test_workers_count_only_when_named_and_within_the_limits():
    assert default_blocks((10304, 400), workers=2) == 8
    assert default_blocks((10304, 400), workers=6) == 12
    assert default_blocks((10304, 400), workers=50) == 15
    assert default_blocks((63, 63), workers=50) == 2
    assert default_blocks((100_000, 100_000), workers=200) == 64


def sizes(rows, cols, edge=50):
    return (edge,) * rows, (edge,) * cols


@pytest.mark.parametrize(
    ("chunks", "count"),
    [
        (sizes(2, 2), 2),
        (sizes(5, 5), 5),
        (sizes(5, 10), 5),
        (sizes(64, 64), 64),
        (sizes(5, 11), 2),
        (sizes(1, 1), 2),
        (sizes(1, 9), 2),
        (sizes(65, 65), 8),
        (sizes(40, 65), 8),
        (((50, 3, 50), (20, 27)), 2),
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
    grid = choose_grid((500, 250), sizes(10, 5), blocks=3)
    assert grid.blocks == 3
    assert all(offset % 50 == 0 for offset in grid.rows.offsets + grid.cols.offsets)
    assert choose_grid((500, 250), sizes(10, 5), blocks=7).blocks == 7
    with pytest.raises(OptionError, match="from 1 to 250, the shorter side of a 500 x 250 matrix"):
        choose_grid((500, 250), sizes(10, 5), blocks=251)


def test_chunks_at_the_edge_are_cut():
    assert expand_chunks((10, 4), (4, 9)) == ((4, 4, 2), (4,))
