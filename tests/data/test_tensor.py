"""Blocks of tensors: the same entries whatever holds them, counts, orders, and what is refused."""

import pickle

import dask.array as da
import numpy as np
import pytest
import sparse
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor.data.tensor import TensorData, as_tensor
from daskfactor.errors import DataError, OptionError
from tests.refusals import refused

SHAPE = (7, 6, 5)
HOLE = np.where(np.arange(3)[:, None] == 1, np.nan, np.ones((2, 3, 2)))
TWICE = np.array([[0, 0], [1, 1], [1, 1]])


def dense(seed=0):
    rng = np.random.default_rng(seed)
    values = rng.poisson(3.0, SHAPE).astype(np.float32)
    values[rng.random(SHAPE) < 0.3] = np.nan
    return values


def put_together(data):
    """The tensor that blocks hold, in the caller's order."""
    grid, starts, fill = data.grid, data.grid.starts, 0.0 if data.unstored == "zero" else np.nan
    first, others = data.row_order, data.col_order
    out = np.full([own.size for own in grid.axes], fill)
    for block in grid.all_blocks():
        view, at, spans = data.view(*block), [], grid.slices(block)
        rows = np.repeat(np.arange(view.shape[0]), np.diff(view.indptr))
        for n, (own, part) in enumerate(zip((rows, *view.indices), spans, strict=True)):
            place = own.astype(np.int64) + part.start
            if first is not None:
                place = first[place] if n == 0 else others[starts[n - 1] + place] - starts[n - 1]
            at.append(place)
        out[tuple(at)] = view.values
    return out


def forms(tmp_path):
    values = dense()
    np.save(tmp_path / "v.npy", values)
    zarr.save_array(str(tmp_path / "v.zarr"), values)
    return {
        "numpy": values,
        "float64": values.astype(np.float64),
        "masked": np.ma.masked_invalid(values),
        "xarray": xr.DataArray(values, dims=("a", "b", "c")),
        "dask": da.from_array(values, chunks=(3, 4, 2)),
        "npy": tmp_path / "v.npy",
        "zarr": str(tmp_path / "v.zarr"),
        "opened": zarr.open_array(str(tmp_path / "v.zarr")),
        "coo": sparse.COO.from_numpy(values, fill_value=np.nan),
        "gcxs": sparse.GCXS.from_numpy(values, fill_value=np.nan),
        "fortran": np.asfortranarray(values),
    }


def test_all_forms_give_the_same_blocks(tmp_path):
    made = {name: as_tensor(V, blocks=2) for name, V in forms(tmp_path).items()}
    assert len({own.fingerprint for own in made.values()}) == 1
    for name, data in made.items():
        np.testing.assert_array_equal(put_together(data), dense(), err_msg=name)


@pytest.mark.parametrize("blocks", [1, 2, 4, None])
@pytest.mark.parametrize("unstored", ["zero", "missing"])
def test_counts_are_those_of_the_entries(blocks, unstored):
    rng = np.random.default_rng(1)
    shape = (40, 12, 9)
    skewed = rng.poisson(np.exp(rng.normal(size=40) * 2)[:, None, None] * 0.05, shape)
    V = sparse.COO(skewed)
    data = as_tensor(V, blocks, unstored=unstored, allow_empty=True)
    seen = np.ones(shape, bool) if unstored == "zero" else skewed > 0
    np.testing.assert_array_equal(np.nan_to_num(put_together(data), nan=0.0), skewed)
    assert data.total_observed == seen.sum() == data.n_observed.sum()
    assert data.n_missing == (~seen).sum()
    assert data.mean == pytest.approx(skewed[seen].mean())
    assert (data.minimum, data.maximum) == (skewed[seen].min(), skewed.max())
    assert data.is_integer
    first = data.row_order if data.row_order is not None else np.arange(40)
    np.testing.assert_array_equal(data.row_observed, seen.sum((1, 2))[first])
    if blocks and blocks > 1:
        assert data.row_order is not None, "so uneven a tensor is dealt out evenly"


def test_a_stored_nan_is_missing_whatever_others_are():
    values = np.array([1.0, np.nan, 2.0])
    V = sparse.COO(np.array([[0, 1, 2], [0, 1, 1], [0, 0, 1]]), values, (3, 2, 2))
    data = as_tensor(V, 1, unstored="zero")
    assert (data.total_observed, data.n_missing) == (11, 1)
    np.testing.assert_array_equal(data.row_observed, [4, 3, 4])
    places = np.array([[0, 1, 1], [0, 0, 1], [0, 0, 1]])
    data, known = (
        as_tensor(sparse.COO(places[:, ::n], values[::n], (2, 2, 2)), 1, unstored="missing")
        for n in (1, 2)
    )
    assert data.total_observed == 2
    assert data.fingerprint == known.fingerprint


def test_blocks_survive_a_trip_to_another_process():
    data = as_tensor(dense(), 2)
    again = pickle.loads(pickle.dumps(data))
    for block in data.grid.all_blocks():
        for one, other in zip(data.view(*block).stored, again.view(*block).stored, strict=True):
            np.testing.assert_array_equal(one, other)
    assert again.fingerprint == data.fingerprint


def test_blocks_that_do_not_fit_memory_are_read_from_a_file():
    small = as_tensor(dense(), 2, memory_limit="1 kB")
    assert not small.in_memory
    np.testing.assert_array_equal(put_together(small), dense())


REFUSED = {
    "a matrix": (np.ones((3, 4)), "three or more"),
    "nothing": (np.ones((0, 4, 2)), "empty"),
    "all missing": (np.full((3, 3, 3), np.nan), "all 3 x 3 x 3 entries are missing"),
    "infinite": (np.full((2, 2, 2), np.inf), r"\(0, 0, 0\) is infinite"),
    "complex": (np.ones((2, 2, 2), complex), "real numbers"),
    "text": (np.full((2, 2, 2), "a"), "real numbers"),
    "an empty index": (HOLE, "1 of axis_1"),
    "a fill value": (sparse.COO(np.ones((2, 2, 2)), fill_value=1.0), "fill_value"),
    "a path of nothing": ("nowhere.zarr", "no zarr array"),
    "a cell twice": (
        sparse.COO(TWICE, [1.0, 2.0], (2, 2, 2), has_duplicates=False),
        r"\(0, 1, 1\) is stored more than once",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_tensor_is_refused_in_a_sentence(case):
    V, words = REFUSED[case]
    refused(DataError, words, as_tensor, V, allow_empty=case == "a cell twice")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": 9}, "from 1 to 5"),
        ({"blocks": True}, "from 1 to 5"),
        ({"dtype": "int8"}, "float32"),
        ({"unstored": "zero"}, "the input is dense"),
        ({"names": ("a", "b")}, "3 axes"),
        ({"names": ("a", "a", "b")}, "names of their own"),
        ({"names": ("a", "W", "b")}, "names of their own"),
        ({"uncertainty": 1.0}, "uncertainty cannot be given"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises((OptionError, DataError), match=words):
        as_tensor(dense(), **options)


def test_blocks_of_a_tensor_are_taken_as_they_are():
    data = as_tensor(dense(), 2)
    assert as_tensor(data) is data
    assert isinstance(data, TensorData)
    refused(DataError, "blocks of a matrix", as_tensor, dfac.as_blocks(np.ones((4, 4))))
    with pytest.raises(DataError, match="blocks of a matrix"):
        dfac.sample(dfac.as_blocks(np.ones((40, 40))), dfac.CP(2), progressbar=False)


def test_cells_are_held_out_and_every_index_keeps_one():
    V = dense()
    held = dfac.hold_out(V, 0.5, random_seed=1)
    np.testing.assert_array_equal(V[held.cells], held.values)
    assert np.isnan(held.train[held.cells]).all()
    left = ~np.isnan(held.train)
    assert all(left.any(axis=axes).all() for axes in ((1, 2), (0, 2), (0, 1)))
    sparse_held = dfac.hold_out(sparse.COO.from_numpy(V, fill_value=np.nan), 0.2, random_seed=1)
    assert sparse_held.train.nnz + len(sparse_held.values) == (~np.isnan(V)).sum()
    mask = np.zeros(SHAPE, bool)
    mask[0, 0] = ~np.isnan(V[0, 0])
    named = dfac.hold_out(V, cells=mask)
    np.testing.assert_array_equal(np.sort(named.values), np.sort(V[mask]))
    missing = tuple(own[:1] for own in np.nonzero(np.isnan(V)))
    refused(OptionError, "is missing", dfac.hold_out, V, cells=missing)
