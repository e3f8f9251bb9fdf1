"""Every kind of input becomes the same blocks; chunks and blocks need not agree."""

import collections
import subprocess
import sys
import tracemalloc
import warnings
from types import ModuleType

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Bands, Grid
from daskfactor.data.holdout import hold_out
from daskfactor.data.loading import load, regions, working_bytes
from daskfactor.data.opening import open_source
from daskfactor.data.sources import as_blocks
from daskfactor.data.statistics import TILE_ENTRIES
from daskfactor.data.storage import ArrayFile, Storage
from daskfactor.errors import DataError, DataWarning, OptionError
from tests.data.written import names_of
from tests.refusals import refused

pytestmark = pytest.mark.libraries


def matrix(rows=103, cols=47, dtype="float32"):
    rng = np.random.default_rng(4)
    values = rng.gamma(2.0, 3.0, (rows, cols)).astype(dtype)
    values[rng.random(values.shape) < 0.1] = np.nan
    return values


def zarr_of(values, path, chunks, **options):
    return zarr.create_array(str(path), data=values, chunks=chunks, **options)


def kinds(values, folder):
    masked = np.ma.MaskedArray(np.nan_to_num(values, nan=1e30), np.isnan(values))
    stored = zarr_of(values, folder / "a.zarr", (40, 11))
    grid = da.from_array(values, chunks=((50, 3, 50), (20, 27)))
    xr.DataArray(values, dims=("a", "b"), name="v").to_dataset().to_netcdf(folder / "a.nc")
    return {
        "numpy": values,
        "numpy wide": values.astype("float64"),
        "numpy by columns": np.asfortranarray(values),
        "numpy strided": np.repeat(values, 2, axis=1)[:, ::2],
        "big-endian": values.astype(values.dtype.newbyteorder(">")),
        "masked": masked,
        "dask": grid,
        "dask of masked": da.from_array(masked, chunks=(30, 30), asarray=False),
        "zarr": stored,
        "path": folder / "a.zarr",
        "text": str(folder / "a.zarr"),
        "sharded": zarr_of(values, folder / "s.zarr", (10, 6), shards=(20, 24)),
        "xarray": xr.DataArray(values),
        "xarray of dask": xr.DataArray(grid),
        "xarray of a file": xr.open_dataset(folder / "a.nc", engine="h5netcdf")["v"],
        "pandas": pd.DataFrame(values),
        "pandas nullable": pd.DataFrame(values).convert_dtypes(),
    }


@pytest.mark.parametrize("memory_limit", [None, 0])
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_every_kind_gives_the_same_blocks(tmp_path, blocks, memory_limit):
    values = matrix()
    wanted = as_blocks(values, blocks)
    for name, data in kinds(values, tmp_path).items():
        with as_blocks(data, blocks, memory_limit=memory_limit) as got:
            np.testing.assert_array_equal(got.to_numpy(), values, err_msg=name)
            if got.grid == wanted.grid:
                assert got.fingerprint == wanted.fingerprint, name
                assert got.total == wanted.total, name
                np.testing.assert_array_equal(got.n_observed, wanted.n_observed)
    assert got.n_missing == np.isnan(values).sum()


def test_source_info_tells_kind_and_place(tmp_path, monkeypatch):
    data = kinds(matrix(), tmp_path)
    found = {name: as_blocks(value).source for name, value in data.items()}
    wanted = {"numpy": "numpy", "masked": "numpy", "dask": "dask", "pandas": "pandas"}
    wanted |= dict.fromkeys(("xarray of dask", "xarray"), "xarray")
    assert {name: found[name].kind for name in wanted} == wanted
    monkeypatch.chdir(tmp_path)
    places = {found[name].location for name in ("zarr", "path", "text")}
    assert places | {as_blocks("a.zarr").source.location} == {str(tmp_path / "a.zarr")}
    lazy = ("numpy", False), ("xarray", False), ("dask", True), ("xarray of a file", True)
    assert [found[name].lazy for name, _ in lazy] == [own for _, own in lazy]


def test_arrays_are_copied_where_kernels_cannot_use_them_in_place(tmp_path):
    values = matrix()
    data = as_blocks(values, 3)
    view = data.view(1, 2)
    assert view.array is values or np.shares_memory(view.array, values)
    assert view.array.shape == values.shape
    assert (view.row0, view.col0, view.m, view.n) == (34, 31, 34, 16)
    np.testing.assert_array_equal(view.block, values[34:68, 31:])
    assert as_blocks(xr.DataArray(values), 3).view(0, 0).array.shape == values.shape
    frozen = values.copy()
    frozen.flags.writeable = False
    np.save(tmp_path / "a.npy", values)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r+")
    for given_array in (frozen, mapped, np.asarray(mapped), values.T.copy().T):
        data = as_blocks(given_array, 2)
        view = data.view(0, 1)
        assert (view.row0, view.col0) == (0, 0)
        assert view.array.flags.c_contiguous
        assert view.array.flags.writeable
        assert not np.shares_memory(view.array, given_array)
        np.testing.assert_array_equal(data.to_numpy(), values)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "longdouble"])
def test_real_types_of_all_sizes_are_read(dtype):
    values = np.random.default_rng(0).integers(0, 2, (9, 8)).astype(dtype)
    for wanted in (np.float32, np.float64):
        data = as_blocks(values, 2, dtype=np.dtype(wanted).name)
        assert data.is_integer
        np.testing.assert_array_equal(data.to_numpy(), values.astype(wanted), strict=True)


def test_statistics_are_those_of_the_observed_entries(tmp_path):
    values = matrix(dtype="float64")
    data = as_blocks(zarr_of(values, tmp_path / "a.zarr", (40, 11)), 4, dtype="float64")
    seen = ~np.isnan(values)
    np.testing.assert_array_equal(data.row_observed, seen.sum(1))
    np.testing.assert_array_equal(data.col_observed, seen.sum(0))
    for block in data.grid.all_blocks():
        assert data.n_observed[block] == seen[data.grid.slices(block)].sum()
    assert data.n_observed.dtype == np.int64
    assert (data.total_observed, data.n_missing) == (seen.sum(), (~seen).sum())
    assert data.total == pytest.approx(np.nansum(values), rel=1e-13)
    assert data.mean == pytest.approx(np.nanmean(values), rel=1e-13)
    assert (data.minimum, data.maximum) == (np.nanmin(values), np.nanmax(values))
    assert not data.is_integer
    whole = np.floor(values)
    assert as_blocks(whole, 4, dtype=np.float64).is_integer
    whole[-1, -1] = 1.5
    assert not as_blocks(whole, 4, dtype=np.float64).is_integer


def test_fingerprints_tell_values_places_and_grids_apart_and_nothing_that_no_kernel_can_see():
    values = np.abs(matrix())
    one, large = values.copy(), np.ones((4, 1000, 300), "float32")
    one[50, 20] = np.nextafter(one[50, 20], np.float32(9))
    large[[1, 2, 3], [0, 500, 999], 7] = 2  # every part of a large block is seen
    data = [as_blocks(values, 3), as_blocks(values, 4), as_blocks(values, 3, dtype="float64")]
    data += [as_blocks(own, 3) for own in (values + 1, values[::-1].copy(), one)]
    data += [as_blocks(values[:, ::-1].copy(), 3), *(as_blocks(own, 1) for own in large)]
    assert len({own.fingerprint for own in data}) == len(data)
    values = np.array([[0.0, np.nan], [1.0, 2.0]], "float32")
    other = np.array([[-0.0, -np.nan], [1.0, 2.0]], "float32")
    assert values.tobytes() != other.tobytes()
    assert as_blocks(values).fingerprint == as_blocks(other).fingerprint


def test_labels_of_xarray_are_kept():
    values, rows = matrix(4, 3), {"gene": list("abcd"), "length": [3, 4, 5, 6]}
    coords = {"gene": rows["gene"], "length": ("gene", rows["length"]), "cell_line": [10, 20, 30]}
    coords |= {"batch": 7, "both": (("gene", "cell_line"), values)}
    array = xr.DataArray(values, coords, ("gene", "cell_line"), name="counts")
    for given_array in (array, array.chunk({"gene": 2})):
        labels = as_blocks(given_array).labels
        assert (labels.row_dim, labels.col_dim, labels.name) == ("gene", "cell_line", "counts")
        assert {key: list(value) for key, value in labels.row_coords.items()} == rows
        found = {key: list(value) for key, value in labels.col_coords.items()}
        assert found == {"cell_line": [10, 20, 30]}


def test_levels_of_a_multi_index_are_kept():
    index = pd.MultiIndex.from_product([["a", "b"], [1, 2]], names=["letter", "digit"])
    frame = pd.DataFrame(matrix(4, 3), index=index)
    array = xr.DataArray(frame.to_numpy(), coords={"row": index}, dims=("row", "column"))
    for data in (frame, array):
        labels = as_blocks(data).labels
        assert list(labels.row_coords) == ["letter", "digit"]
        assert list(labels.row_coords["digit"]) == [1, 2, 1, 2]
        assert list(labels.keys[0]) == ["letter", "digit"]
        assert not labels.col_coords
        missing = index.set_codes([[0, 0, 1, -1], [0, 1, 0, 1]])
        coords = xr.Coordinates.from_pandas_multiindex(missing, "row")
        gone = data.set_axis(missing) if data is frame else data.assign_coords(coords)
        refused(DataError, r"1 of the 4 labels of 'row' .* position 3", as_blocks, gone)


def test_levels_have_names_of_their_own_whatever_others_are_called():
    levels = [["a", "b"], [1, 2]]
    rows = pd.MultiIndex.from_product(levels, names=["row", "year"])
    columns = pd.MultiIndex.from_product(levels, names=["column", "year"])
    with pytest.warns(DataWarning, match="'year' of one is 'year_'"):
        labels = as_blocks(pd.DataFrame(matrix(4, 4), rows, columns), table=False).labels
    assert (labels.row_dim, labels.col_dim) == ("row_", "column_")
    assert [list(keys) for keys in labels.keys] == [["row", "year"], ["column", "year_"]]
    rows = rows.set_names(["gene", "gene_"])
    frame = pd.DataFrame(matrix(4, 4), rows, pd.Index(list("wxyz"), name="gene"))
    with pytest.warns(DataWarning, match="'gene' of one is 'gene__'"):
        keys = as_blocks(frame).labels.keys
    found = {name: own.tolist() for name, own in keys[0].items()}
    assert found == {"gene__": ["a", "a", "b", "b"], "gene_": [1, 2, 1, 2]}


def test_labels_of_pandas_are_kept():
    frame = pd.DataFrame({"x": [1, 2], "y": [1.5, None]}, index=pd.Index(["a", "b"], name="who"))
    data = as_blocks(frame)
    assert (data.labels.row_dim, data.labels.col_dim) == ("who", "column")
    assert names_of(data) == [["a", "b"], ["x", "y"]]
    np.testing.assert_array_equal(data.to_numpy(), [[1, 1.5], [2, np.nan]])
    assert not as_blocks(pd.DataFrame(matrix(3, 4))).labels.row_coords


def test_dimension_names_and_fill_values_of_zarr_are_kept(tmp_path):
    for number, names in enumerate((("time", "sensor"), ("day", "sensor"))):
        array = zarr_of(matrix(), tmp_path / f"{number}", (40, 11), dimension_names=names)
        labels = as_blocks(array).labels
        assert (labels.row_dim, labels.col_dim) == names
    options = {"shape": (6, 6), "chunks": (3, 3), "dtype": "f4", "fill_value": 2.0}
    array = zarr.create_array(str(tmp_path / "a.zarr"), **options)
    array[:3, :] = 1.0
    assert as_blocks(array).mean == 1.5


@pytest.mark.parametrize(
    ("chunks", "blocks"),
    [((7, 13), None), ((7, 13), 5), ((103, 5), 2), ((5, 47), 47), ((103, 47), None), ((30, 20), 1)],
)
def test_every_dask_chunk_is_computed_once(chunks, blocks):
    values, read = matrix(), collections.Counter()

    def chunk(block, block_info=None):
        if block_info:
            read[block_info[0]["chunk-location"]] += 1
        return block

    array = da.from_array(values, chunks=chunks)
    lazy = array.map_blocks(chunk, dtype="f4", meta=np.empty((0, 0), "f4"))
    np.testing.assert_array_equal(as_blocks(lazy, blocks).to_numpy(), values)
    assert (len(read), set(read.values())) == (array.npartitions, {1})


def test_reading_is_bounded_by_the_chunk_or_the_budget():
    source = open_source(da.from_array(np.ones((2000, 1000), "float64"), chunks=(100, 10)))
    grid, budget = Grid.from_chunks(source.chunks, 4), 2**18
    seen, sizes = np.zeros((2000, 1000), int), []
    for part in regions(source, grid, budget):
        sizes.append(8 * seen[part].size)
        seen[part] += 1
    assert (seen == 1).all()
    assert budget / 2 < max(sizes) <= budget


@st.composite
def chunked(draw):
    shape = draw(st.tuples(st.integers(1, 17), st.integers(1, 17)))
    cells = st.integers(0, 50) | st.just(float("nan"))
    values = draw(hnp.arrays(np.float64, shape, elements=cells))
    values[np.isnan(values).all(1), 0] = 1
    values[0, np.isnan(values).all(0)] = 1
    chunks = tuple(
        tuple(np.diff([0, *sorted(draw(st.sets(st.integers(1, side - 1)))), side]))
        if side > 1
        else (1,)
        for side in shape
    )
    return values, chunks, draw(st.integers(1, min(shape)))


@settings(max_examples=60, deadline=None)
@given(case=chunked(), memory_limit=st.sampled_from([None, 0]), own=st.booleans())
def test_blocks_tile_the_matrix_exactly(case, memory_limit, own):
    values, chunks, blocks = case
    array = da.from_array(values, chunks=chunks)
    with as_blocks(array, None if own else blocks, memory_limit=memory_limit) as data:
        covered = np.zeros(values.shape, int)
        for block in data.grid.all_blocks():
            slices = data.grid.slices(block)
            covered[slices] += 1
            view = data.view(*block)
            assert view.block.shape == data.grid.block_shape(block) == (view.m, view.n)
            np.testing.assert_array_equal(view.block, values[slices].astype("f4"))
        assert (covered == 1).all()
        missing = data.missing_cells()
        assert [own.dtype for own in missing] == [np.int64] * 2
        np.testing.assert_array_equal(missing, np.nonzero(np.isnan(values)))
        assert data.total == np.nansum(values)
        if not own:
            assert data.grid.blocks == blocks


@settings(max_examples=150, deadline=None)
@given(case=chunked(), entries=st.sampled_from([1, 5, 20, 400]))
def test_every_cell_is_read_once_within_the_budget(case, entries):
    values, chunks, blocks = case
    source = open_source(da.from_array(values, chunks=chunks))
    seen = np.zeros(values.shape, bool)
    for part in regions(source, Grid.from_chunks(chunks, blocks), 8 * entries):
        assert not seen[part].any()
        assert seen[part].size <= max(entries, max(chunks[0]) * max(chunks[1]))
        seen[part] = True
    assert seen.all()


@pytest.mark.parametrize(
    ("chunks", "blocks"), [((256, 256), 4), ((1024, 64), 2), ((64, 1024), 8), ((1024, 1024), 1)]
)
def test_the_projected_memory_is_an_upper_bound(tmp_path, chunks, blocks):
    zarr.create_array(str(tmp_path / "v"), shape=(1024, 1024), chunks=chunks, dtype="f8")[:] = 3.0
    source = open_source(tmp_path / "v")
    grid, budget = Grid.even((1024, 1024), blocks), 2**20
    projected = working_bytes(source, grid, np.dtype("f4"), budget)
    peaks = []
    for _ in range(2):  # the first time modules and caches are filled
        storage = Storage(grid, file=ArrayFile(str(tmp_path)))
        tracemalloc.start()
        load(source, grid, np.dtype("f4"), storage, budget)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        storage.close()
    fixed = 24 * TILE_ENTRIES  # bytes of a tile while its statistics are taken
    assert projected / 8 < peaks[1] < projected + fixed


def test_blocks_and_grids_that_were_made_are_taken_as_they_are():
    data = as_blocks(matrix(), 3, dtype="float64")
    assert as_blocks(data) is data
    assert as_blocks(data, 3) is data
    refused(OptionError, "grid of 3 x 3 blocks already", as_blocks, data, 4)
    values = matrix()
    grid = Grid(Bands((0, 10, 103)), Bands((0, 40, 47)))
    for data in (values, da.from_array(values, chunks=(50, 9))):
        blocks = as_blocks(data, grid)
        assert blocks.grid == grid
        assert as_blocks(blocks, grid) is blocks
        np.testing.assert_array_equal(blocks.to_numpy(), values)
    refused(OptionError, "the grid is for a matrix of shape", as_blocks, values.T, grid)


def test_no_library_is_imported_for_numpy_input():
    code = (
        "import sys, numpy as np; from daskfactor.data.sources import as_blocks;"
        "as_blocks(np.ones((70, 70), 'f4'));"
        "assert not {'dask', 'zarr', 'xarray', 'pandas', 'distributed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_are_checked():
    values = matrix()
    for options, message in [
        ({"dtype": "float16"}, 'dtype must be "float32" or "float64", got \'float16\''),
        ({"dtype": "nonsense"}, "dtype must be"),
        ({"unstored": "nan"}, 'unstored must be "zero" or "missing"'),
        ({"unstored": "missing"}, 'unstored is "missing", but the input is dense'),
        ({"workers": 0}, "workers must be at least 1"),
        *(({"memory_limit": x}, "memory_limit must be a number of b") for x in ("lots", -1, 1.5)),
        *(({"blocks": x}, "blocks must be a whole number from 1 to 47") for x in (0, 48)),
        *(({"blocks": x}, "blocks must be a whole number") for x in (2.0, True)),
    ]:
        refused(OptionError, message, as_blocks, values, **options)
    with warnings.catch_warnings(action="error"):
        assert isinstance(as_blocks(values, np.int64(2), unstored="zero"), BlockedData)


@pytest.mark.parametrize("kind", ["xarray", "pandas"])
def test_times_with_a_zone_become_utc_and_periods_their_names(kind):
    zoned = pd.date_range("2024-03-30 12:00", periods=3, tz="Europe/Berlin", name="t")
    months = pd.period_range("2024-01", periods=3, freq="M", name="t")

    def labels(index):
        array = xr.DataArray(np.ones((3, 2)), {"t": index}, ("t", "x"))
        data = array if kind == "xarray" else pd.DataFrame(array.values, index=index)
        return as_blocks(data).labels.row_coords["t"]

    with pytest.warns(DataWarning, match="'t' are times with the zone Europe/Berlin; .* in UTC"):
        found = labels(zoned)
    assert found.dtype.kind == "M"
    assert (pd.DatetimeIndex(found, tz="UTC") == zoned).all()
    assert labels(months).tolist() == ["2024-01", "2024-02", "2024-03"]


def test_labels_of_text_and_none_are_held_out_and_named():
    labels = np.array(["a", None, "b"], object)
    array = xr.DataArray(np.ones((3, 4)), dims=("r", "c"), coords={"r": labels})
    own = list(map(str, array["r"].to_numpy()))  # pandas 3 makes NaN of None
    held = hold_out(array, 0.2, random_seed=0)
    assert list(map(str, held.train["r"].to_numpy())) == own
    refused(DataError, "1 of the 3 labels 'r' are missing, the first at pos", as_blocks, array)


def test_a_module_of_the_user_may_be_called_like_a_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "sparse", ModuleType("sparse"))
    assert as_blocks(np.ones((4, 4)), 2).n_missing == 0
    refused(DataError, "data of type list cannot be read", as_blocks, [[1.0]])
