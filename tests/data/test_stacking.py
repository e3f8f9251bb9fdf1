"""Arrays of many dimensions go in as matrices and as tensors, whatever their order and gaps."""

import collections
import json
import pickle
import tracemalloc

import dask.array as da
import fsspec
import numpy as np
import pytest
import scipy.sparse
import sparse
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import daskfactor as dfac
from daskfactor.data.stacking import Side
from daskfactor.errors import DataError, DataWarning, OptionError, StoreError
from daskfactor.tensor.source import TensorData, as_tensor
from tests.refusals import refused
from tests.tiers import FULL

pytestmark = pytest.mark.filterwarnings("ignore:.*have no observed entry and are left out")
DIMS = ("time", "lat", "lon")
LAYOUTS = {"times": (1, 160, 400), "places": (128, 2, 200), "longitudes": (128, 160, 2)}


def cube(seed=0, land=0.3, gaps=0.05):
    rng = np.random.default_rng(seed)
    labels = {
        "time": np.datetime64("2001-01-01", "ns") + np.arange(7) * np.timedelta64(1, "D"),
        "lat": [60.0, 40.0, 20.0, 0.0],
        "lon": np.arange(5) * 10.0,
        "area": (("lat", "lon"), rng.random((4, 5))),
        "season": ("time", list("aabbccd")),
    }
    V = xr.DataArray(rng.gamma(2.0, size=(7, 4, 5)), labels, DIMS, name="precip")
    missing = rng.random((4, 5)) < land
    missing[1, 2], missing[0, 0] = False, True
    V = V.where(~xr.DataArray(missing, dims=("lat", "lon")))
    V = V.where(rng.random(V.shape) >= gaps)
    V[:, 1, 2] = 1.0  # so that no time and no place on the axes is without an entry
    return V


def check(V, data):
    """Every cell of the matrix is that of the array under its labels, and none is left out."""
    labels, matrix = data.labels, data.to_numpy()
    for (i, j), value in np.ndenumerate(matrix):
        key = {name: values[i] for name, values in labels.row_coords.items() if name in DIMS}
        key |= {name: values[j] for name, values in labels.col_coords.items() if name in DIMS}
        np.testing.assert_equal(value, np.float32(V.sel(key).item()))
    assert np.isfinite(matrix).sum() == int(V.notnull().sum())


@settings(max_examples=40 if FULL else 20, deadline=None)
@given(
    order=st.permutations(DIMS),
    rows=st.lists(st.sampled_from(DIMS), min_size=1, max_size=2, unique=True),
    chunks=st.none() | st.fixed_dictionaries({dim: st.integers(1, 7) for dim in DIMS}),
    seed=st.integers(0, 20),
)
def test_any_dimensions_are_rows(order, rows, chunks, seed):
    V = cube(seed)
    given_ = V.transpose(*order)
    given_ = given_ if chunks is None else given_.chunk(chunks)
    data = dfac.as_blocks(given_, rows=tuple(rows), allow_empty=True)
    check(V, data)
    assert "_".join(rows) == data.labels.row_dim
    assert "area" in {**data.labels.row_coords, **data.labels.col_coords} or "time" in (
        set(rows) if len(rows) == 2 else set(DIMS) - set(rows)
    )


def test_a_store_is_read_where_it_is(tmp_path):
    V = cube(land=0.5)
    dataset = V.drop_vars("season").to_dataset().chunk(time=3, lat=2, lon=3)
    dataset.to_zarr(tmp_path / "v.zarr", consolidated=False)
    lazy = xr.open_zarr(tmp_path / "v.zarr", chunks=None, consolidated=False)
    check(V, dfac.as_blocks(lazy, rows="time", allow_empty=True))
    check(V, dfac.as_blocks(lazy["precip"], columns=("lon", "lat"), allow_empty=True))
    assert dfac.as_blocks(lazy, rows="time", allow_empty=True).source.lazy


def test_one_warning_tells_what_is_left_out():
    V = cube()
    land = int((~V.notnull().any("time")).sum())
    assert land > 0
    said = rf"{land} of 20 places on the grid of \(lat, lon\)"
    with pytest.warns(DataWarning, match=said) as told:
        data = dfac.as_blocks(V, rows="time")
    assert (len(told), data.shape) == (1, (7, 20 - land))
    assert data.labels.col_coords["area"].shape == (20 - land,)
    whole = dfac.as_blocks(V.fillna(1.0).astype(int), rows="time")  # nothing to look for
    assert whole.shape == (7, 20)


def test_weights_have_some_of_the_dimensions():
    V = cube()
    by_lat = np.cos(np.deg2rad(V["lat"]))
    data = dfac.as_blocks(V, rows="time", weights=by_lat)
    expected = np.cos(np.deg2rad(data.labels.col_coords["lat"]))
    found = data.weights.to_numpy()
    seen = np.isfinite(data.to_numpy())
    np.testing.assert_allclose(found[seen], np.broadcast_to(expected, seen.shape)[seen], rtol=1e-6)
    other = by_lat * xr.DataArray(np.arange(1.0, 8.0), {"time": V["time"]}, ("time",))
    found = dfac.as_blocks(V, rows="time", weights=other.chunk(time=2)).weights.to_numpy()
    expected = np.arange(1.0, 8)[:, None] * expected
    np.testing.assert_allclose(found[seen], expected[seen], rtol=1e-6)
    for weights, match in (
        (by_lat[::-1], "along 'lat' are not those of V"),
        (by_lat.rename(lat="y"), "dimensions of V"),
    ):
        refused(DataError, match, dfac.as_blocks, V, rows="time", weights=weights)


CUBE = cube()
ONCE = OptionError, "must be in rows or in columns, once"
MISREAD = [
    (CUBE, {}, DataError, r"3 dimensions, 'time' and .* sample\(V, model, rows='time'"),
    (CUBE, {"rows": "tim"}, OptionError, "no dimension 'tim'"),
    *((CUBE, x, *ONCE) for x in ({"rows": "time", "columns": "lat"}, {"rows": DIMS}, {"rows": ()})),
    (CUBE.values, {"rows": "time"}, OptionError, r"dimensions of an .*, got ndarray"),
    (xr.Dataset({"a": CUBE, "b": CUBE}), {"rows": "time"}, DataError, r"2 variables \('a', 'b'\)"),
    (CUBE.assign_coords(lon=[0, 0, 1, 2, 3]), {"rows": "time"}, DataError, "'lon' are not unique"),
]


@pytest.mark.parametrize(("V", "options", "error", "message"), MISREAD)
def test_an_array_with_too_many_dimensions_says_what_to_write(V, options, error, message):
    refused(error, message, dfac.as_blocks, V, **options)


def test_two_dimensions_are_turned_and_options_are_spelt_right():
    V, match = cube().isel(lon=2), "unexpected keyword argument 'row'"
    assert dfac.as_blocks(V, rows="lat", allow_empty=True).labels.row_dim == "lat"
    refused(TypeError, match, dfac.sample, V, dfac.TweedieNMF(2), row="time")


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_boxes_hold_their_part(lines, width, seed):
    rng = np.random.default_rng(seed)
    at = np.flatnonzero(rng.random(lines * width) < 0.5)
    for side in (Side(("a", "b"), (lines, width), at), Side(("a", "b"), (lines, width))):
        if not side.size:
            continue
        low = int(rng.integers(side.size))
        part = slice(low, int(rng.integers(low + 1, side.size + 1)))
        box, inside = side.box(part)
        flat = np.arange(lines * width).reshape(lines, width)[box].reshape(-1)
        np.testing.assert_array_equal(flat[inside], side.places[part])
        assert sum(side.bands([1] * lines)) == side.size


def large(chunks):
    """32 MB of values, and the same lazily, with a count of how often each chunk is read."""
    values = np.random.default_rng(0).random((128, 160, 400), dtype=np.float32)
    values[:, ::3, :50] = np.nan
    read = collections.Counter()

    def one(block_info=None):
        place = tuple(slice(*part) for part in block_info[None]["array-location"])
        read[tuple(part.start for part in place)] += 1
        return values[place].copy()

    whole = [
        tuple(min(step, size - at) for at in range(0, size, step))
        for size, step in zip(values.shape, chunks, strict=True)
    ]
    lazy = da.map_blocks(one, chunks=whole, dtype=np.float32, meta=np.empty((0, 0, 0), np.float32))
    return values, xr.DataArray(lazy, dims=DIMS), read


@pytest.mark.quick("times", "places")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_any_layout_are_read_once_and_in_little_memory(layout):
    values, lazy, read = large(LAYOUTS[layout])
    dfac.as_blocks(cube().chunk(lat=1), rows="time")  # imports what that takes
    tracemalloc.start()
    with dfac.as_blocks(lazy, rows="time", memory_limit="4 MiB", blocks=8) as data:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert set(read.values()) == {1}
        flat = values.reshape(128, -1)
        kept = ~np.isnan(flat).all(axis=0)
        np.testing.assert_array_equal(data.to_numpy(), flat[:, kept])
    # Several copies of what is read at a time (1 MiB), and the graph of the chunks.
    assert peak < 16 * 2**20, f"{peak / 2**20:.1f} MiB"


@settings(max_examples=25 if FULL else 12, deadline=None)
@given(
    rows=st.lists(st.sampled_from(DIMS), min_size=1, max_size=2, unique=True),
    chunks=st.fixed_dictionaries({dim: st.integers(1, 7) for dim in DIMS}),
    budget=st.integers(8, 400),
    limit=st.sampled_from([0, "1 GiB"]),
)
def test_a_copy_in_slabs_is_the_array(rows, chunks, budget, limit):
    V = cube(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskfactor.data.stacking.read_budget", lambda limit: budget)
        options = {"rows": tuple(rows), "allow_empty": True, "memory_limit": limit}
        found = dfac.as_blocks(V.chunk(chunks), **options)
        same = dfac.as_blocks(V, **options | {"blocks": found.grid})
    assert found.fingerprint == same.fingerprint


# -- as tensors -----------------------------------------------------------------------------

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
    grid, fill = data.grid, 0.0 if data.unstored == "zero" else np.nan
    out = np.full(grid.sizes, fill)
    for block in grid.all_blocks():
        view = data.view(*block)
        rows = np.repeat(np.arange(view.shape[0]), np.diff(view.indptr))
        spans = zip((rows, *view.indices), grid.slices(block), strict=True)
        first, *others = (own.astype(np.int64) + part.start for own, part in spans)
        if data.row_order is not None:
            first, pairs = data.row_order[first], zip(others, grid.starts, strict=False)
            others = [data.col_order[start + own] - start for own, start in pairs]
        out[(first, *others)] = view.values
    return out


def test_a_tensor_in_a_file_is_read_as_in_memory(tmp_path):
    h5py, values = pytest.importorskip("h5py"), dense()
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["a"], file["b"] = values, values[0]
    with fsspec.open("memory://tensors/t.npy", "wb") as file:
        np.save(file, values)
    for place in (f"{tmp_path}/t.h5:a", "memory://tensors/t.npy"):
        np.testing.assert_array_equal(put_together(as_tensor(place, 2)), values)
        with pytest.raises(DataError, match=r"have 3 dimensions.*CP\(\.\.\.\)"):
            dfac.as_blocks(place)


def test_a_file_of_a_matrix_is_no_tensor(tmp_path):
    h5py = pytest.importorskip("h5py")
    matrix = scipy.sparse.random_array((6, 5), density=0.9, rng=np.random.default_rng(0))
    scipy.sparse.save_npz(tmp_path / "s.npz", matrix.tocsr())
    dfac.convert(matrix, tmp_path / "s.zarr", unstored="zero", progressbar=False)
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["a"] = matrix.toarray()
    for name in ("s.npz", "s.zarr", "s.h5"):
        with pytest.raises(DataError, match=rf"{name} holds a matrix; a CP model takes three"):
            as_tensor(tmp_path / name)


@pytest.fixture(scope="module")
def split():
    """A dense tensor in blocks."""
    return as_tensor(dense(), 2)


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


def test_blocks_survive_a_trip_to_another_process_and_into_a_file(split):
    again = pickle.loads(pickle.dumps(split))
    for block in split.grid.all_blocks():
        for one, other in zip(split.view(*block).stored, again.view(*block).stored, strict=True):
            np.testing.assert_array_equal(one, other)
    assert again.fingerprint == split.fingerprint
    small = as_tensor(dense(), 2, memory_limit="1 kB")
    assert not small.in_memory
    np.testing.assert_array_equal(put_together(small), dense())


REFUSED = {
    "a matrix": (np.ones((3, 4)), "three or more"),
    "nothing": (np.ones((0, 4, 2)), "empty"),
    "all missing": (np.full((3, 3, 3), np.nan), "all 3 x 3 x 3 entries are missing"),
    "infinite": (np.full((2, 2, 2), np.inf), r"\(0, 0, 0\) is inf; entries must be finite"),
    "too large": (
        np.full((2, 2, 2), 1e300),
        r"\(0, 0, 0\) is 1e\+300, outside the range of float32",
    ),
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


@pytest.mark.parametrize(
    ("value", "words"),
    [(2**24 + 1, "integer entries above"), (1e-60, "became zero"), (-999, "8 cells are -999")],
)
def test_a_tensor_warns_as_a_matrix_does(value, words):
    with pytest.warns(DataWarning, match=words):
        as_tensor(np.full((2, 2, 2), value))


def test_an_infinite_entry_of_a_tensor_is_named_in_the_order_of_the_caller():
    values = np.zeros((40, 3, 3), np.float32)
    values[:20] = 1.0
    values[37, 2, 1] = np.inf
    V = sparse.COO.from_numpy(values)
    refused(DataError, r"\(37, 2, 1\) is inf", as_tensor, V, blocks=2, unstored="zero")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_tensor_is_refused_in_a_sentence(case):
    V, words = REFUSED[case]
    refused((DataError, StoreError), words, as_tensor, V, allow_empty=case == "a cell twice")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": 9}, "from 1 to 5"),
        ({"blocks": True}, "from 1 to 5"),
        ({"dtype": "int8"}, "float32"),
        ({"unstored": "zero"}, "the input is dense"),
        ({"names": ("a", "b")}, "3 axes"),
        ({"names": ("a", "a", "b")}, "need different names"),
        ({"names": ("a", "W", "b")}, "need different names"),
        ({"uncertainty": 1.0}, "uncertainty cannot be given"),
    ],
)
def test_options_are_checked(options, words):
    refused((OptionError, DataError), words, as_tensor, dense(), **options)


def test_blocks_of_a_tensor_are_taken_as_they_are(split):
    assert as_tensor(split) is split
    assert isinstance(split, TensorData)
    matrix, match = dfac.as_blocks(np.ones((40, 40))), "blocks of a matrix"
    refused(DataError, match, as_tensor, matrix)
    refused(DataError, match, dfac.sample, matrix, dfac.CP(2), progressbar=False)


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
    refused(OptionError, "are missing in V", dfac.hold_out, V, cells=missing)


def test_a_named_mask_of_a_tensor_holds_out_its_own_cells():
    V = xr.DataArray(np.arange(1.0, 25.0).reshape(2, 3, 4), dims=("a", "b", "c"))
    mask = V.isin([2.0, 17.0])
    held = dfac.hold_out(V, cells=mask.transpose("c", "a", "b"))
    assert held.values.tolist() == [2.0, 17.0]
    assert int(held.train.isnull().sum()) == 2


# -- their units, which go with labels and values ------------------------------------------

WAVE = {"units": "nm", "long_name": "wavelength"}
SITE = {"long_name": "name of the site"}
OWN = {"units": "W m-2", "long_name": "radiance"}
MODEL = dfac.TweedieNMF(2)


@pytest.fixture
def radiance():
    values = np.random.default_rng(0).poisson(3.0, (12, 9)).astype(float)
    wave = xr.Variable("band", np.linspace(400.0, 2500.0, 12), WAVE | {"resolution": 3})
    site = xr.Variable("pixel", [f"s{i}" for i in range(9)], SITE)
    return xr.DataArray(
        values, {"band": wave, "site": site}, ("band", "pixel"), "L", OWN | {"history": "none"}
    )


def told(labelled):
    return dict(labelled["band"].attrs), dict(labelled["site"].attrs)


def test_a_run_has_units_in_memory_and_in_its_store(radiance, tmp_path):
    path = tmp_path / "run.zarr"
    options = {"draws": 3, "tune": 2, "progressbar": False}
    for trace in (
        dfac.sample(radiance, MODEL, **options),
        dfac.sample(radiance, MODEL, store=path, **options),
        dfac.open_run(path),
    ):
        for group in ("posterior", "posterior_moments"):
            assert told(trace[group]) == (WAVE, SITE)
        about = json.loads(trace.attrs["data"])
        assert {name: about[name] for name in (*OWN, "name")} == OWN | {"name": "L"}
    assert told(dfac.align(trace)["posterior"]) == told(dfac.predict(trace)) == (WAVE, SITE)


def test_points_data_with_cells_held_out_and_stores_have_units(radiance, tmp_path):
    point = dfac.optimize(radiance, MODEL, dfac.MultiplicativeUpdates(), progressbar=False)
    assert told(point) == (WAVE, SITE)
    dfac.convert(radiance.copy(data=sparse.COO(radiance.values)), tmp_path / "cube.zarr")
    stored = dfac.as_blocks(tmp_path / "cube.zarr")
    assert told(xr.Dataset(coords=stored.labels.coords)) == (WAVE, SITE)
    with dfac.as_blocks(radiance) as data:
        for labels in (stored.labels, dfac.hold_out(data).train.labels):
            assert (labels.attrs, labels.about) == ({"band": WAVE, "site": SITE}, OWN)
