"""Cells set aside: none lost, none invented, rows and columns left with an entry."""

import anndata
import numpy as np
import pandas as pd
import pytest
import sparse as pydata
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

import daskfactor as dfac
from daskfactor.data.holdout import hold_out
from daskfactor.errors import DataError, OptionError
from tests.random_sparse import random_array
from tests.refusals import refused


def ratings(seed=0, shape=(30, 20)):
    rng = np.random.default_rng(seed)
    options = {"density": 0.3, "rng": rng, "data_sampler": lambda size: 1 + rng.random(size)}
    return random_array(shape, **options).tocsr()


def pairs(cells):
    """The places of cells, as pairs of a row and a column."""
    return list(zip(*(at.tolist() for at in cells), strict=True))


@given(st.integers(0, 1000), st.floats(0.05, 0.6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_train_and_held_out_make_up_the_matrix(seed, share, keep_one):
    V = ratings(seed)
    held = hold_out(V, share, unstored="missing", keep_one=keep_one, random_seed=seed)
    back = held.train + sparse.coo_array((held.values, held.cells), shape=V.shape)
    assert held.train.nnz + held.values.size == V.nnz
    np.testing.assert_allclose(back.toarray(), V.toarray())
    if keep_one:
        assert ((np.diff(held.train.indptr) > 0) == (np.diff(V.indptr) > 0)).all()
        assert ((np.diff(held.train.tocsc().indptr) > 0) == (np.diff(V.tocsc().indptr) > 0)).all()


def test_zeros_are_held_out_too_and_marked():
    V = ratings()
    held = hold_out(V, 0.25, unstored="zero", random_seed=1)
    assert held.values.size == 150
    assert 0 < (held.values == 0).sum() < 150
    np.testing.assert_array_equal(held.values, V.toarray()[held.cells])
    dense = held.train.toarray()
    assert np.isnan(dense).sum() == 150
    assert np.isnan(dense[held.cells]).all()
    rest = ~np.isnan(dense)
    np.testing.assert_array_equal(dense[rest], V.toarray()[rest])


def test_dense_and_labelled_input():
    V = np.arange(1.0, 31).reshape(5, 6)
    V[0, 0] = np.nan
    held = hold_out(xr.DataArray(V, dims=("a", "b")), 0.2, random_seed=3)
    assert (held.train.dims, held.values.size) == (("a", "b"), 6)
    assert not np.isnan(held.values).any()
    np.testing.assert_array_equal(V[held.cells], held.values)
    assert np.isnan(held.train.values).sum() == 7
    assert np.isnan(V).sum() == 1, "the caller's own array is left alone"


def test_the_same_seed_takes_the_same_cells():
    first, again, other = (
        pairs(hold_out(ratings(), unstored="missing", random_seed=seed).cells) for seed in (7, 7, 8)
    )
    assert first == again != other


MADE = dfac.as_blocks(ratings(), unstored="missing", allow_empty=True)


FEW, UNREAL = sparse.eye_array(4).tocsr(), (np.ones(3), np.ones((2, 2), complex), np.array([["a"]]))


@pytest.mark.parametrize(
    ("V", "options", "kind", "message"),
    [
        (ratings(), {"share": 1.5}, OptionError, "share must lie"),
        (ratings(), {"unstored": "maybe"}, OptionError, "unstored"),
        (FEW, {"share": 0.5, "unstored": "missing"}, OptionError, "leaves none"),
        ([[1, 2]], {}, DataError, "list"),
        *((V, {}, DataError, "matrix of real numbers") for V in UNREAL),
        (MADE, {"unstored": "zero"}, OptionError, "made with 'missing'"),
    ],
)
def test_what_cannot_be_done_is_refused(V, options, kind, message):
    refused(kind, message, hold_out, V, **options)


def test_what_does_not_fit_in_memory_is_refused(monkeypatch):
    data = dfac.as_blocks(np.ones((20, 20), "float32"), 2)
    monkeypatch.setattr("daskfactor.data.holdout.available_memory", lambda: 3 * 1600 - 1)
    refused(DataError, r"take 1600 bytes up to three times and 4799 are free", hold_out, data)


@pytest.mark.quick("store-missing", "blocks-zero", "balanced-missing", "pydata-zero")
@pytest.mark.parametrize("unstored", ["missing", "zero"])
@pytest.mark.parametrize("kind", ["store", "blocks", "balanced", "pydata"])
def test_what_goes_into_sample_goes_into_hold_out(kind, unstored, tmp_path):
    V, names = ratings(), np.array([f"u{i}" for i in range(30)])
    if kind == "pydata":
        fill = np.nan if unstored == "missing" else 0.0
        parts = (V.data, V.indices, V.indptr)
        array = pydata.GCXS(parts, shape=V.shape, compressed_axes=(0,), fill_value=fill)
        given = xr.DataArray(array, {"user": names}, ("user", "item"))
    elif kind == "store":
        given = str(tmp_path / "s.zarr")
        dfac.convert(V, given, unstored=unstored, dtype="float64", progressbar=False)
    else:
        given = dfac.as_blocks(V, 3, unstored=unstored, dtype="float64", balance=kind == "balanced")
    held = hold_out(given, 0.2, random_seed=5)
    plain = hold_out(V, 0.2, unstored=unstored, random_seed=5)
    np.testing.assert_array_equal(held.cells, plain.cells)
    np.testing.assert_array_equal(held.values, plain.values)
    train = dfac.as_blocks(held.train, dtype="float64")
    assert train.unstored == unstored
    wanted = dfac.as_blocks(plain.train, unstored=unstored, dtype="float64")
    np.testing.assert_array_equal(train.to_numpy(), wanted.to_numpy())
    if kind == "pydata":
        np.testing.assert_array_equal(held.train["user"], names)
    if kind in ("blocks", "balanced"):
        assert train is held.train
        assert train.grid == given.grid
        assert (train.row_order is None) == (given.row_order is None)
    run = {"draws": 2, "tune": 2, "monitor": held.cells, "progressbar": False}
    monitored = dfac.sample(held.train, dfac.GaussianMF(2), **run)
    assert dfac.monitored(monitored)["mean"].size == held.values.size


def test_lazy_dense_data_keep_their_names(tmp_path):
    frame = pd.DataFrame(np.arange(1.0, 31).reshape(5, 6), index=list("abcde"))
    held = hold_out(frame, 0.2, random_seed=3)
    lazy = hold_out(xr.DataArray(frame, dims=("x", "y")).chunk(x=2), 0.2, random_seed=3)
    whole = hold_out(frame.to_numpy(), 0.2, random_seed=3)
    for found, dims in ((held, ("row", "column")), (lazy, ("x", "y"))):
        np.testing.assert_array_equal(found.cells, whole.cells)
        np.testing.assert_array_equal(found.train.values, whole.train)
        assert found.train.dims == dims
        assert found.train[dims[0]].values.tolist() == list("abcde")


def test_the_callers_matrix_is_left_alone_whatever_its_form():
    """Duplicates and unsorted indices would be put in order in place."""
    for unstored, first in (("missing", [2, 0, 1]), ("zero", [2, 0, 0])):
        parts = (np.arange(1, 7, dtype=np.float32), [*first, 1, 2, 0], [0, 3, 6])
        V = sparse.csr_array(parts, shape=(2, 3))
        before = [array.copy() for array in (V.data, V.indices, V.indptr)]
        hold_out(V, 0.4, unstored=unstored, keep_one=False, random_seed=0)
        for array, old in zip((V.data, V.indices, V.indptr), before, strict=True):
            np.testing.assert_array_equal(array, old)


def test_cells_are_all_different_and_none_that_is_missing_already():
    V = ratings(shape=(40, 30))
    V.data[::3] = np.nan
    for unstored, share in (("missing", 0.3), ("zero", 0.1), ("zero", 0.9)):
        held = hold_out(V, share, unstored=unstored, keep_one=False, random_seed=0)
        assert not np.isnan(held.values).any()
        assert len(set(pairs(held.cells))) == held.values.size


@pytest.mark.parametrize("unstored", ["missing", "zero"])
@pytest.mark.parametrize("share", [0.15, 0.7])
def test_every_cell_is_held_out_as_often_as_any_other(share, unstored):
    V = ratings(shape=(24, 18))
    at = np.ones(V.shape, bool) if unstored == "zero" else V.toarray() > 0
    times = np.zeros(V.shape)
    for seed in range(400):
        held = hold_out(V, share, unstored=unstored, keep_one=False, random_seed=seed)
        np.add.at(times, held.cells, 1)
    taken = round(share * at.sum()) / at.sum()
    # Half the rows, or columns, of 400 draws: deviations of a binomial count, four at most.
    for part in (np.s_[:12], np.s_[12:], np.s_[:, :9], np.s_[:, 9:]):
        cells = 400 * int(at[part].sum())
        deviation = np.sqrt(cells * taken * (1 - taken))
        assert abs(times[part].sum() - cells * taken) < 4 * deviation


@pytest.mark.libraries
@pytest.mark.parametrize("unstored", ["missing", "zero"])
def test_annotated_data_keep_their_names(unstored):
    X = sparse.csr_matrix(np.random.default_rng(0).poisson(1.0, (30, 20)).astype(np.float32))
    cells, genes = [f"c{i}" for i in range(30)], [f"g{j}" for j in range(20)]
    annotated = anndata.AnnData(X, pd.DataFrame(index=cells), pd.DataFrame(index=genes))
    held = hold_out(annotated, 0.1, unstored=unstored, random_seed=0)
    plain = hold_out(X, 0.1, unstored=unstored, random_seed=0)
    np.testing.assert_array_equal(held.cells, plain.cells)
    np.testing.assert_array_equal(held.train.X.toarray(), plain.train.toarray())
    options = {"draws": 2, "tune": 2, "unstored": unstored, "progressbar": False}
    model = dfac.TweedieNMF(2, dispersion=1.0)
    trace = dfac.sample(held.train, model, monitor=held.cells, **options)
    assert list(trace["posterior"]["W"]["obs"].values) == cells
    assert list(trace["posterior"]["H"]["var"].values) == genes


@pytest.mark.libraries
def test_of_annotated_data_in_a_file_comes_an_array(tmp_path):
    anndata.AnnData(ratings()).write_h5ad(tmp_path / "a.h5ad")
    adata = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    held = hold_out(adata, unstored="missing", random_seed=0)
    assert isinstance(held.train, xr.DataArray)
    assert held.train.dims == ("obs", "var")
    np.testing.assert_allclose(held.values, ratings().toarray()[held.cells], rtol=1e-6)


@pytest.mark.parametrize("form", ["dense", "labelled", "missing", "zero", "blocks", "annotated"])
def test_named_cells_are_held_out_in_their_order(form):
    dense = np.arange(1.0, 13.0).reshape(3, 4)
    dense[0, 0] = 0 if form == "zero" else np.nan
    entries = sparse.csr_array(np.nan_to_num(dense))
    V = {
        "dense": dense,
        "labelled": xr.DataArray(dense, dims=("r", "c")),
        "blocks": dfac.as_blocks(dense, 2),
        "annotated": anndata.AnnData(entries),
    }.get(form, entries)
    options = {"unstored": form} if V is entries else {}
    options |= {"unstored": "missing"} if form == "annotated" else {}
    rows, cols = [2, 0, 1], [3, 1, 0]
    held = hold_out(V, cells=(rows, cols), **options)
    assert held.values.tolist() == [12.0, 2.0, 5.0]
    assert [at.tolist() for at in held.cells] == [rows, cols]
    left = dfac.as_blocks(held.train, allow_empty=True, **options)
    assert np.isnan(left.values(rows, cols)).all()
    assert left.n_missing == (3 if form == "zero" else 4)
    if form != "zero":
        match, missing = "1 of the cells to hold out are missing in V", ([1, 0], [0, 0])
        refused(OptionError, match, hold_out, V, cells=missing, **options)
    refused(OptionError, "cells to hold out are", hold_out, V, cells=([3], [0]), **options)


@pytest.mark.parametrize("dims", [("a", "b"), ("row", "column")])
@pytest.mark.parametrize("kind", ["array", "named", "sparse", "blocks", "lazy"])
def test_a_mask_with_names_holds_out_its_own_cells(kind, dims):
    V = np.arange(1.0, 26).reshape(5, 5)
    named = xr.DataArray(V, dims=dims)
    made = {"array": V, "named": named, "sparse": sparse.csr_array(V), "lazy": named.chunk(2)}
    made["blocks"] = dfac.as_blocks(named)
    mask = xr.zeros_like(named, dtype=bool)
    mask[3, 0] = mask[1, 4] = True
    nameless = kind in ("array", "sparse")
    for own in (mask, mask.values) if nameless else (mask, mask.T, mask.values):
        held = hold_out(made[kind], cells=own, unstored="zero" if kind == "sparse" else None)
        assert set(pairs(held.cells)) == {(3, 0), (1, 4)}
        np.testing.assert_array_equal(held.values, V[held.cells])
    if not nameless and dims == ("a", "b"):
        match, other = "dimensions a, c, but V has a, b", mask.rename(b="c")
        refused(OptionError, match, hold_out, made[kind], cells=other)
    long = named.rename(dict(zip(dims, "ab", strict=True)))[:, :3]
    for own in (long == 6, (long == 6).T):  # of a matrix that is not square
        assert hold_out(long, cells=own).values.tolist() == [6]


@pytest.mark.parametrize("label", [2**53, np.nan])
def test_a_mask_with_other_labels_is_refused(label):
    """The float nearest to an integer label is not that label, and NaN is not NaN."""
    labels = [1.0, np.nan] if np.isnan(label) else [1, label + 1]
    V = xr.DataArray(np.ones((2, 2)), {"a": labels}, ("a", "b"))
    mask = xr.zeros_like(V, dtype=bool).assign_coords(a=[1.0, float(label)])
    mask[0, 0] = True
    refused(OptionError, "labels of a differ from those of V", hold_out, V, cells=mask)
    assert hold_out(V[:1], cells=mask[:1]).values.tolist() == [1.0]


CUBE = np.arange(1.0, 25.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("V", "unstored"),
    [(CUBE, None), (CUBE[0], None), *((sparse.csr_array(CUBE[0]), u) for u in ("zero", "missing"))],
)
def test_cells_that_are_named_twice_are_held_out_once(V, unstored):
    twice = tuple(np.array([1, 0, 1]) for _ in V.shape)
    held = hold_out(V, cells=twice, unstored=unstored)
    assert [at.tolist() for at in held.cells] == [[1, 0]] * V.ndim
    assert held.values.tolist() == [V[(1,) * V.ndim], V[(0,) * V.ndim]]
    for none in (tuple(at[:0] for at in twice), np.zeros(V.shape, bool)):
        refused(OptionError, "cells names no cell; ", hold_out, V, cells=none, unstored=unstored)


def test_cells_of_a_tensor_are_asked_for_along_each_axis():
    named = xr.DataArray(CUBE, dims=("a", "b", "c"))
    words = r"cells of a tensor of shape \(2, 3, 4\) must be a tuple of 3 .*; got a "
    for V in (CUBE, named):
        refused(OptionError, words + "tuple of 2", hold_out, V, cells=([0], [0]))
    refused(OptionError, words + "mask", hold_out, named, cells=(named == 1).rename(c="d"))
