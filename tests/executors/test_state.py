"""What a chain's state tells of its bands, and what is done with these where they lie."""

from functools import partial

import numpy as np
import pytest

from daskfactor.data.grid import Bands, Block, Grid
from daskfactor.executors.state import empty_state, make_state, place_cells


@pytest.fixture
def state():
    made = make_state(Grid.even((5, 4), 2), np.arange(10.0).reshape(5, 2), np.ones((4, 2)))
    for band in made.bands():
        band.counts["moments"] = 3
        band.sums[7] = float(band.values.sum())
    return made


def moved(band, by=0.0, times=1.0):
    band.values[:] = times * (band.values + by)
    return float(band.values.sum())


def test_a_function_meets_every_band_in_order(state):
    assert state.each(moved) == [6.0, 39.0, 4.0, 4.0]
    assert state.each(moved, 0) == [6.0, 39.0]
    assert state.each(moved, 1) == [4.0, 4.0]


def test_every_band_has_its_own_item_of_what_is_given(state):
    assert state.each(moved, 1, [1.0, 2.0], [1.0, 10.0]) == [8.0, 120.0]
    with pytest.raises(ValueError, match="shorter"):
        state.each(moved, None, [1.0, 2.0])


def test_a_function_changes_bands_in_place(state):
    state.each(partial(moved, times=2.0), 0)
    np.testing.assert_array_equal(state.gather("rows"), 2.0 * np.arange(10.0).reshape(5, 2))
    np.testing.assert_array_equal(state.gather("columns"), np.ones((4, 2)))


def test_a_state_tells_what_is_small(state):
    assert state.counts == {"moments": 3}
    assert state.sums(7) == [6.0, 39.0, 4.0, 4.0]
    assert state.names(0) == frozenset()
    assert state.recorded == 0
    for band in state.factors[0]:
        band.arrays["mean"] = band.values.copy()
        band.draws.append(band.values.copy())
    assert state.names(0) == {"mean"}
    assert state.names(1) == frozenset()
    assert state.recorded == 1


def test_a_state_has_any_number_of_factors():
    """The first two keep the names that they had when there were no others."""
    sides = [Bands.even(length, 2) for length in (5, 4, 3)]
    factors = [np.full((length, 2), length) for length in (5, 4, 3)]
    state = make_state(sides, *factors)
    assert (state.n_factors, state.blocks) == (3, 2)
    for number, (side, factor) in enumerate(zip(("rows", "columns", 2), factors, strict=True)):
        np.testing.assert_array_equal(state.gather(side), factor)
        assert [len(band.values) for band in state.bands(number)] == list(sides[number].sizes)
    assert len(state.bands()) == 6
    names = {f"0/{own}/{n}/values" for own in ("rows", "columns", "factor-2") for n in (0, 1)}
    assert set(state.save(None, "0")) == names
    empty = empty_state(sides, 2, np.dtype(np.float32))
    assert [band.offset for band in empty.bands()] == [0, 2, 0, 2, 0, 1]
    with pytest.raises(ValueError, match="shorter"):
        make_state(sides, *factors[:2])


@pytest.mark.parametrize("lengths", [(7, 5), (7, 5, 4), (4, 6, 5, 3)])
def test_cells_are_placed_in_the_blocks_they_lie_in(lengths):
    sides, rng = [Bands.even(length, 3) for length in lengths], np.random.default_rng(0)
    at = [rng.integers(0, length, 40) for length in lengths]
    placed = place_cells(sides, at, np.dtype(np.float32))
    assert list(placed) == sorted(placed)
    assert all(isinstance(block, Block) == (len(lengths) == 2) for block in placed)
    for block, cells in placed.items():
        firsts = [side.offsets[band] for side, band in zip(sides, block, strict=True)]
        local = list(zip(*(own.tolist() for own in cells.at), strict=True))
        assert local == sorted(local)
        for own, first, place in zip(cells.at, firsts, at, strict=True):
            np.testing.assert_array_equal(own + first, place[cells.where])
        sizes = [side.sizes[band] for side, band in zip(sides, block, strict=True)]
        assert all(
            (own >= 0).all() and (own < n).all() for own, n in zip(cells.at, sizes, strict=True)
        )
    assert sorted(np.concatenate([own.where for own in placed.values()])) == list(range(40))
    assert place_cells(sides, [own[:0] for own in at], np.dtype(np.float32)) == {}
