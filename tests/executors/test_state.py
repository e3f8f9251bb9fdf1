"""What a chain's state tells of its bands, and what is done with these where they lie."""

from functools import partial

import numpy as np
import pytest

from daskfactor.data.grid import Grid
from daskfactor.executors.state import ChainState, FactorBand, make_state


@pytest.fixture
def state() -> ChainState:
    made = make_state(Grid.even((5, 4), 2), np.arange(10.0).reshape(5, 2), np.ones((4, 2)))
    for band in made.bands():
        band.counts["moments"] = 3
        band.sums[7] = float(band.values.sum())
    return made


def moved(band: FactorBand, by: float = 0.0, times: float = 1.0) -> float:
    band.values[:] = times * (band.values + by)
    return float(band.values.sum())


def test_a_function_meets_every_band_in_order(state: ChainState) -> None:
    assert state.each(moved) == [6.0, 39.0, 4.0, 4.0]
    assert state.each(moved, 0) == [6.0, 39.0]
    assert state.each(moved, 1) == [4.0, 4.0]


def test_every_band_has_its_own_item_of_what_is_given(state: ChainState) -> None:
    assert state.each(moved, 1, [1.0, 2.0], [1.0, 10.0]) == [8.0, 120.0]
    with pytest.raises(ValueError, match="shorter"):
        state.each(moved, None, [1.0, 2.0])


def test_a_function_changes_bands_in_place(state: ChainState) -> None:
    state.each(partial(moved, times=2.0), 0)
    np.testing.assert_array_equal(state.gather("rows"), 2.0 * np.arange(10.0).reshape(5, 2))
    np.testing.assert_array_equal(state.gather("columns"), np.ones((4, 2)))


def test_a_state_tells_what_is_small(state: ChainState) -> None:
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
