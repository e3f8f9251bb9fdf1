"""Values that files keep packed: with a scale, an offset, and a number for what is missing."""

import h5py
import numpy as np
import pytest
import sparse
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning
from tests.refusals import refused

pytestmark = pytest.mark.libraries

TRUE = np.array([[5.001, np.nan, 5.25], [6.5, 7.0, np.nan]])
INTEGERS = {"dtype": "int16", "scale_factor": 0.001, "add_offset": 5.0, "_FillValue": -32768}
FLOATS = {"dtype": "float32", "_FillValue": np.float32(1e20)}


@pytest.mark.parametrize("packing", [INTEGERS, FLOATS], ids=["integers", "floats"])
def test_arrays_that_xarray_packed_are_decoded(tmp_path, packing):
    dataset, encoding = xr.Dataset({"pr": (("time", "cell"), TRUE)}), {"pr": packing}
    for version in (2, 3):
        path = f"{tmp_path}/{version}.zarr"
        dataset.to_zarr(path, encoding=encoding, zarr_format=version, consolidated=False)
        for given in (f"{path}:pr", f"{path}/pr", zarr.open_array(f"{path}/pr", mode="r")):
            data = dfac.as_blocks(given, 1, dtype="float64")
            np.testing.assert_allclose(data.to_numpy(), TRUE, rtol=1e-6, err_msg=str(given))
    dataset.to_netcdf(tmp_path / "p.nc", engine="h5netcdf", encoding=encoding)
    with h5py.File(tmp_path / "p.nc") as file:
        np.testing.assert_allclose(dfac.as_blocks(file["pr"], 1).to_numpy(), TRUE, rtol=1e-6)


def raw_array(lazy=False):
    raw = np.where(np.isnan(TRUE), -9999.0, TRUE)
    array = xr.DataArray(raw, dims=("time", "cell"), attrs={"_FillValue": -9999, "units": "mm"})
    return array.chunk(time=1) if lazy else array


@pytest.mark.parametrize("lazy", [False, True])
def test_arrays_whose_attributes_say_so_are_decoded(lazy):
    data = dfac.as_blocks(raw_array(lazy), 1, dtype="float64")
    np.testing.assert_array_equal(data.to_numpy(), TRUE)
    assert data.labels.about == {"units": "mm"}
    cube = raw_array(lazy).expand_dims(member=2)
    with dfac.as_blocks(cube, 1, rows=("member", "time"), dtype="float64") as folded:
        np.testing.assert_array_equal(folded.to_numpy(), np.vstack([TRUE, TRUE]))
    tensor = dfac.as_tensor(cube, 1, allow_empty=True)
    assert int(tensor.n_observed.sum()) == 2 * np.count_nonzero(~np.isnan(TRUE))


def test_floats_with_a_scale_are_unpacked_already_and_sparse_ones_refused():
    array = xr.DataArray(TRUE, dims=("time", "cell"), attrs={"scale_factor": 0.1})
    with pytest.warns(DataWarning, match="attributes scale_factor, and its values are taken as"):
        np.testing.assert_array_equal(dfac.as_blocks(array, 1, dtype="f8").to_numpy(), TRUE)
    packed = xr.DataArray(np.array([[1, 2]]), attrs={"scale_factor": 0.5})
    with pytest.warns(DataWarning, match="its values were unpacked"):
        np.testing.assert_array_equal(dfac.as_blocks(packed, 1).to_numpy(), [[0.5, 1.0]])
    array = xr.DataArray(sparse.COO(np.eye(3)), attrs={"scale_factor": 0.1})
    match = r"sparse, .*scale_factor.* packed; unpack them"
    refused(DataError, match, dfac.as_blocks, array, unstored="zero")


def test_held_out_cells_and_weights_of_a_packed_array_are_decoded():
    held = dfac.hold_out(raw_array(), cells=([0], [0]))
    assert held.values.tolist() == [5.001]
    assert np.isnan(held.train.values).sum() == 3
    sigma = raw_array()
    data = dfac.as_blocks(raw_array(), 1, uncertainty=sigma.where(sigma > 0, 1.0))
    np.testing.assert_allclose(data.weights.view(0, 0).block[0, 0], 1 / 5.001**2, rtol=1e-5)


def test_a_zarr_array_of_anybody_else_keeps_its_zeros(tmp_path):
    values = np.arange(6.0).reshape(2, 3)
    for zarr_format in (2, 3):
        path = tmp_path / f"{zarr_format}.zarr"
        zarr.create_array(str(path), data=values, chunks=(1, 3), zarr_format=zarr_format)
        np.testing.assert_array_equal(dfac.as_blocks(path, 1).to_numpy(), values)


@pytest.mark.skipif(not hasattr(zarr.Array, "read_chunk_sizes"), reason="zarr before 3.2")
def test_chunks_of_many_sizes(tmp_path):
    values, place = np.random.default_rng(0).random((10, 6)), str(tmp_path / "r.zarr")
    with zarr.config.set({"array.rectilinear_chunks": True}):
        array = zarr.create_array(place, data=values, chunks=((3, 7), (6,)))
        np.testing.assert_array_equal(dfac.as_blocks(array, 2, dtype="float64").to_numpy(), values)
