"""Cells set aside: none lost, none invented, rows and columns left with an entry."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from daskfactor.errors import DataError, OptionError
from daskfactor.io.holdout import hold_out


def ratings(seed: int = 0, shape: tuple[int, int] = (30, 20)) -> sparse.csr_array:
    rng = np.random.default_rng(seed)
    return sparse.random_array(
        shape, density=0.3, rng=rng, data_sampler=lambda size: 1 + rng.random(size)
    ).tocsr()


@given(st.integers(0, 1000), st.floats(0.05, 0.6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_train_and_held_out_make_up_the_matrix(seed: int, share: float, keep_one: bool) -> None:
    V = ratings(seed)
    held = hold_out(V, share, keep_one=keep_one, random_seed=seed)
    back = held.train + sparse.coo_array((held.values, held.cells), shape=V.shape)
    assert held.train.nnz + held.values.size == V.nnz
    np.testing.assert_allclose(back.toarray(), V.toarray())
    if keep_one:
        assert ((np.diff(held.train.indptr) > 0) == (np.diff(V.indptr) > 0)).all()
        assert ((np.diff(held.train.tocsc().indptr) > 0) == (np.diff(V.tocsc().indptr) > 0)).all()


def test_zeros_are_held_out_too_and_marked() -> None:
    V = ratings()
    held = hold_out(V, 0.25, unstored="zero", random_seed=1)
    assert held.values.size == 150
    assert (held.values == 0).any()
    assert (held.values > 0).any()
    np.testing.assert_array_equal(held.values, V.toarray()[held.cells])
    dense = held.train.toarray()
    assert np.isnan(dense).sum() == 150
    assert np.isnan(dense[held.cells]).all()
    rest = ~np.isnan(dense)
    np.testing.assert_array_equal(dense[rest], V.toarray()[rest])


def test_dense_and_labelled_input() -> None:
    V = np.arange(1.0, 31).reshape(5, 6)
    V[0, 0] = np.nan
    held = hold_out(xr.DataArray(V, dims=("a", "b")), 0.2, random_seed=3)
    assert held.train.dims == ("a", "b")
    assert held.values.size == 6
    assert not np.isnan(held.values).any()
    np.testing.assert_array_equal(V[held.cells], held.values)
    assert np.isnan(held.train.values).sum() == 7
    assert np.isnan(V).sum() == 1, "the caller's own array is left alone"


def test_the_same_seed_takes_the_same_cells() -> None:
    first, second = (hold_out(ratings(), random_seed=7) for _ in range(2))
    np.testing.assert_array_equal(first.cells, second.cells)
    other = hold_out(ratings(), random_seed=8)
    assert not np.array_equal(first.cells[0], other.cells[0])


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(OptionError, match="share must lie"):
        hold_out(ratings(), 1.5)
    with pytest.raises(OptionError, match="unstored"):
        hold_out(ratings(), unstored="maybe")
    with pytest.raises(OptionError, match="leaves none"):
        hold_out(sparse.eye_array(4).tocsr(), 0.5)
    with pytest.raises(DataError, match="list"):
        hold_out([[1, 2]])
