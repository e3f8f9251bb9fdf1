"""Arrays of many dimensions go in as matrices, whatever their order, chunks and gaps."""

import collections
import tracemalloc

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import daskfactor as dfac
from daskfactor.data.folding import Side
from daskfactor.errors import DataError, DataWarning, OptionError
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:.*have no observed entry and are left out")
DIMS = ("time", "lat", "lon")
SIZES = {"time": 7, "lat": 4, "lon": 5}
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


@settings(max_examples=40, deadline=None)
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
    with pytest.raises(DataError, match="along 'lat' are not those of V"):
        dfac.as_blocks(V, rows="time", weights=by_lat[::-1])
    with pytest.raises(DataError, match="dimensions of V"):
        dfac.as_blocks(V, rows="time", weights=by_lat.rename(lat="y"))


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
    with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
        dfac.sample(V, dfac.TweedieNMF(2), row="time")


def test_two_dimensions_are_turned():
    V = cube().isel(lon=2)
    assert dfac.as_blocks(V, rows="lat", allow_empty=True).labels.row_dim == "lat"


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


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.sampled_from(DIMS), min_size=1, max_size=2, unique=True),
    chunks=st.fixed_dictionaries({dim: st.integers(1, 7) for dim in DIMS}),
    budget=st.integers(8, 400),
    limit=st.sampled_from([0, "1 GiB"]),
)
def test_a_copy_in_slabs_is_the_array(rows, chunks, budget, limit):
    V = cube(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskfactor.data.folding.read_budget", lambda limit: budget)
        options = {"rows": tuple(rows), "allow_empty": True, "memory_limit": limit}
        found = dfac.as_blocks(V.chunk(chunks), **options)
        same = dfac.as_blocks(V, **options | {"blocks": found.grid})
    assert found.fingerprint == same.fingerprint
