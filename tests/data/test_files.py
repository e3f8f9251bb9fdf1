"""Matrices in files of every kind, and what is said of those that cannot be read."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor.data.files import read_matrix
from daskfactor.data.tables import read_table
from daskfactor.errors import DataError, DataWarning

pytestmark = pytest.mark.libraries

VALUES = np.array([[1.0, 2.0], [np.nan, 4.5]])


def table(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_npy_and_npz_first_or_named(tmp_path):
    path = tmp_path / "v.npz"
    np.save(tmp_path / "v.npy", VALUES)
    np.savez(path, a=VALUES, b=VALUES + 1)
    for name, wanted in (("v.npy", VALUES), ("v.npz", VALUES), ("v.npz:b", VALUES + 1)):
        np.testing.assert_array_equal(read_matrix(f"{tmp_path}/{name}"), wanted)
    with pytest.raises(DataError, match="no array 'c', only a, b"):
        read_matrix(f"{path}:c")


@pytest.mark.parametrize("form", [2, 3])
def test_arrays_of_a_zarr_group_go_by_their_names(tmp_path, form):
    path = tmp_path / "v.zarr"
    group = zarr.create_group(path, zarr_format=form)
    for name in ("a", "b"):
        group.create_array(name, data=VALUES)
    found = dfac.as_blocks(read_matrix(f"{path}:b"), 1)
    np.testing.assert_array_equal(found.to_numpy(), VALUES)
    for wrong in (path, f"{path}:c"):
        with pytest.raises(DataError, match=r"holds 2 zarr arrays \(a, b\); name one as .*:NAME"):
            read_matrix(str(wrong))


@pytest.mark.parametrize("name", ["v.npy", "v.npz"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"anything at all"])
def test_empty_and_cut_off_arrays_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"no NumPy (array file|archive)"):
        read_matrix(str(tmp_path / name))


@pytest.mark.parametrize("text", ["1,2\n,4.5\n", "1;2\n\nNA;4.5", "1\t2\nnan\t4.5\n", "1 2\n? 4.5"])
def test_bare_tables(tmp_path, text):
    np.testing.assert_array_equal(read_table(table(tmp_path, text)), VALUES)


@pytest.mark.parametrize(
    ("text", "rows", "columns"),
    [
        pytest.param("x,y\n1,2\n,4.5\n", None, ["x", "y"], id="header"),
        pytest.param("g,x,y\na,1,2\nb,,4.5\n", ["a", "b"], ["x", "y"], id="both"),
        pytest.param(",x,y\n7,1,2\n8,,4.5\n", ["7", "8"], ["x", "y"], id="numbers as row names"),
        pytest.param("x,y\na,1,2\nb,,4.5\n", ["a", "b"], ["x", "y"], id="no corner"),
        pytest.param('"a, b",1,2\nb,,4.5\n', ["a, b", "b"], None, id="row names"),
        pytest.param(",0,1\n0,1,2\n1,,4.5\n", ["0", "1"], ["0", "1"], id="counted"),
        pytest.param(",1,2\na,1,2\nb,,4.5\n", ["a", "b"], ["1", "2"], id="from 1"),
    ],
)
def test_labelled_tables(tmp_path, text, rows, columns):
    result = read_table(table(tmp_path, text))
    np.testing.assert_array_equal(result.values, VALUES)
    assert result.dims == ("row", "column")
    for dim, names in (("row", rows), ("column", columns)):
        assert (list(result[dim].values) if dim in result.coords else None) == names


def test_columns_named_by_rising_numbers_are_told_of(tmp_path):
    with pytest.warns(DataWarning, match="first line of .* taken for names .* write NaN"):
        found = read_table(table(tmp_path, ",400.5,401\n0,1,2\n1,,4.5\n"))
    np.testing.assert_array_equal(found.values, VALUES)
    assert list(found["column"].values) == ["400.5", "401"]


@pytest.mark.parametrize("first", [",5,2", "NaN,2,5", ",2,2", ",2,", ",,3"])
def test_a_missing_cell_begins_a_line_of_data(tmp_path, first):
    assert read_table(table(tmp_path, f"{first}\n1,2,3\n")).shape == (2, 3)


def test_a_blank_first_line_holds_no_names(tmp_path):
    with pytest.raises(DataError):
        dfac.as_blocks(table(tmp_path, "\n1,2\n,4.5\n"), table=True)


@pytest.mark.parametrize("columns", [1, 2, 3, 30])
def test_frames_without_names_are_read_as_they_were_written(tmp_path, columns):
    V = np.random.default_rng(0).poisson(4.0, (10, columns)) + 1
    pd.DataFrame(V).to_csv(tmp_path / "v.csv")
    with dfac.as_blocks(tmp_path / "v.csv", 1) as data:
        np.testing.assert_array_equal(data.view(0, 0).block, V)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("x,y\n", "no line of numbers"),
        ("1,2\n3\n", "line 2 has 1 fields, the lines before it 2"),
        ("x,y\n1,2\n3,four\n", "line 3, field 2: 'four' is no number$"),
        ("user,film,stars\nu1,f1,5\n", "'f1' is no number; of a table with a line for each entry"),
        ("x,y,z\n1,2\n", "3 names in its header, but 2 columns"),
    ],
)
def test_broken_tables_say_where(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_table(table(tmp_path, text))


def test_zarr_arrays_and_stores_of_any_name_are_left_to_the_library(tmp_path):
    array, store = tmp_path / "v.zarr", tmp_path / "t.zarr.blocks"
    zarr.save_array(array, VALUES)
    dfac.convert(sparse.eye_array(4, format="csr"), store, unstored="zero", progressbar=False)
    for place in (array, store):
        assert read_matrix(str(place)) == str(place)


@pytest.mark.parametrize("name", ["v.nc", "v.zarr"])
def test_labelled_files(tmp_path, name):
    path = tmp_path / name
    dataset = xr.Dataset(
        {"v": (("time", "band"), VALUES), "line": (("band",), [1.0, 2.0])},
        coords={"band": [450.0, 550.0]},
    )
    if name == "v.nc":
        dataset.to_netcdf(path, engine="h5netcdf")
    else:
        dataset.to_zarr(path, consolidated=False)
    only = read_matrix(str(path))
    assert only.dims == ("time", "band")
    np.testing.assert_array_equal(only.values, VALUES)
    xr.testing.assert_equal(read_matrix(f"{path}:v").load(), only.load())
    with pytest.raises(DataError, match="no variable 'w', only line, v"):
        read_matrix(f"{path}:w")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v.zarr", r"2 two-dimensional variables \(a, b\)"),
        ("none.npy", "does not exist"),
        ("v.jpg", r"v\.jpg cannot be read; give \.npy.*\(\.nc\)$"),
        ("v.csv:foo", "v.csv holds one matrix, without a name, not 'foo'"),
        ("v.npy:foo", "v.npy holds one matrix, without a name, not 'foo'"),
    ],
)
def test_what_cannot_be_read_says_what_can(tmp_path, name, message):
    two = xr.Dataset({"a": (("x", "y"), VALUES), "b": (("x", "y"), VALUES)})
    two.to_zarr(tmp_path / "v.zarr", consolidated=False)
    np.save(tmp_path / "v.npy", VALUES)
    for file in ("v.csv", "v.jpg"):
        (tmp_path / file).write_text("1,2\n3,4\n")
    with pytest.raises(DataError, match=message):
        read_matrix(f"{tmp_path}/{name}")
