"""Files as they were found in public repositories, made anew, and how each is read."""

import json

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning
from tests.cli.shell import fails
from tests.data.written import names_of, written
from tests.refusals import refused

pytestmark = pytest.mark.libraries

V = np.arange(1.0, 13).reshape(4, 3)
OBS, VAR = [f"c{i}" for i in range(4)], [f"g{j}" for j in range(3)]


def test_a_file_of_anndata_with_tables_of_names(tmp_path):
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        file["X"] = V.astype("f4")
        for side, names in (("obs", OBS), ("var", VAR)):
            file[side] = np.array([(name.encode(), 1.0) for name in names], "S3,f8").astype(
                [("index", "S3"), ("n", "f8")]
            )
    data = dfac.as_blocks(tmp_path / "old.h5ad", 1)
    np.testing.assert_array_equal(data.to_numpy(), V)
    assert names_of(data) == [OBS, VAR]


@pytest.mark.filterwarnings("ignore:Writing zarr v2")
def test_a_store_of_anndata_without_marks(tmp_path):
    adata = anndata.AnnData(V.astype("f4"), pd.DataFrame(index=OBS), pd.DataFrame(index=VAR))
    adata.write_zarr(tmp_path / "old.zarr")
    document = next((tmp_path / "old.zarr").glob("*attrs"), tmp_path / "old.zarr" / "zarr.json")
    told = json.loads(document.read_text())
    for where in (told, told.get("attributes", {})):
        where.pop("encoding-type", None)
    document.write_text(json.dumps(told))
    for beside in (tmp_path / "old.zarr").glob(".zmetadata"):
        beside.unlink()
    assert names_of(dfac.as_blocks(tmp_path / "old.zarr", 1)) == [OBS, VAR]
    sides = {"obs": [*range(4)], "var": [*range(5, 8)]}
    array = xr.DataArray(V, sides, ("obs", "var"), "X")
    array.to_dataset().to_zarr(tmp_path / "xarray.zarr", consolidated=False)
    assert names_of(dfac.as_blocks(tmp_path / "xarray.zarr", 1)) == [*sides.values()]


def test_an_archive_of_several_matrices_is_asked_for_one(tmp_path):
    np.savez(tmp_path / "two.npz", names=V.astype("u1"), scores=V)
    match = r"holds 2 matrices of numbers \(its arrays are names, scores\); name one as .*:NAME"
    refused(DataError, match, dfac.as_blocks, tmp_path / "two.npz")
    np.testing.assert_array_equal(dfac.as_blocks(f"{tmp_path}/two.npz:scores", 1).to_numpy(), V)
    texts, more = np.array([["a", "b"], ["c", "d"]]), np.array([{}, 3], object)
    np.savez(tmp_path / "one.npz", labels=np.arange(3), more=more, mask=V > 3, texts=texts, V=V)
    np.testing.assert_array_equal(dfac.as_blocks(tmp_path / "one.npz", 1).to_numpy(), V)
    np.savez(tmp_path / "none.npz", a=np.arange(3), names=np.array(["a", "b"]))
    refused(DataError, "holds no matrices of numbers", dfac.as_blocks, tmp_path / "none.npz")


def test_what_pytables_wrote_is_no_netcdf(tmp_path):
    with h5py.File(tmp_path / "10x.h5", "w") as file:
        group = file.create_group("hg19")
        group.attrs["CLASS"] = "GROUP"
        group["shape"], group["barcodes"] = [3, 4], [name.encode() for name in OBS]
        group["genes"] = group["gene_names"] = [name.encode() for name in VAR]
        group["data"], group["indices"] = V.reshape(-1), np.tile(np.arange(3), 4)
        group["indptr"] = np.arange(5) * 3
    for name in ("", ":hg19"):
        data = dfac.as_blocks(f"{tmp_path}/10x.h5{name}", 1)
        np.testing.assert_array_equal(data.to_numpy(), V)
        assert names_of(data) == [OBS, VAR]


def test_hdf5_under_any_name(tmp_path):
    with h5py.File(tmp_path / "v.emd", "w") as file:
        file["signals/data"] = V
    np.testing.assert_array_equal(dfac.as_blocks(tmp_path / "v.emd", 1).to_numpy(), V)
    with h5py.File(tmp_path / "cube.emd", "w") as file:
        file["a"] = V.reshape(2, 2, 3)
    call = r"pass an array of it in Python: xarray.DataArray\(.*cube.emd'\)\[NAME\]\[...\]\)"
    told = refused(DataError, call, dfac.as_blocks, tmp_path / "cube.emd")
    assert ":NAME" not in told
    with h5py.File(tmp_path / "cube.emd") as file:
        cube = xr.DataArray(file["a"][...])
    assert dfac.as_blocks(cube, 1, rows="dim_0").shape == (2, 6)


def test_columns_without_names_go_by_their_positions(tmp_path):
    path = written(tmp_path, "r.txt", "1 1 2\n1 2 4\n2 1 3.5\n2 2 1\n")
    match = r"pass rows=0, columns=1, values=2 \(or table=True\)"
    refused(DataError, match, dfac.as_blocks, path)
    data = dfac.as_blocks(path, 1, rows=0, columns=1, values=2, unstored="zero")
    np.testing.assert_array_equal(data.to_numpy(), [[2, 4], [3.5, 1]])
    words = "pass --rows 0, --columns 1, --values 2 (or --table)"
    fails(3, words, "fit", path, "--store", tmp_path / "run.zarr", "-k", "1")
    texts = written(tmp_path, "w.tsv", "love\tsex\t6.77\nlove\tcat\t1.5\n")
    with pytest.warns(DataWarning, match="rows in column 0, of columns in column 1, values in col"):
        dfac.as_blocks(texts, 1, unstored="missing")


def test_a_matrix_whose_rows_have_two_labels_is_no_table_of_entries(tmp_path):
    frame = pd.DataFrame(V, columns=["SBS1", "SBS2", "SBS3"])
    frame.insert(0, "Type", ["C>A", "C>A", "C>T", "C>T"])
    frame.insert(1, "Subtype", ["ACA", "ACC", "ACA", "ACC"])
    frame.to_csv(tmp_path / "s.csv", index=False)
    match = "two labels, join these into one column, or pass a pandas.DataFrame with both"
    for given in (frame, tmp_path / "s.csv"):
        refused(DataError, match, dfac.as_blocks, given)
    whole = pd.read_csv(tmp_path / "s.csv", index_col=[0, 1])
    np.testing.assert_array_equal(dfac.as_blocks(whole, 1).to_numpy(), V)


def test_a_first_line_of_sizes_is_told(tmp_path):
    path = written(tmp_path, "w2v.txt", "2 3\nthe .1 .2 .3\nof .1 .2 .4\n")
    refused(DataError, "line 2 has 4 fields, the lines before it 2", dfac.as_blocks, path)


def test_pairs_of_counts_are_no_decimal_commas(tmp_path):
    path = written(tmp_path, "c.tsv", "s\t1\t2\na\t1330421,1204131\t3,4\nb\t2,3\t1,1\n")
    assert "decimal" not in refused(DataError, "is no number", dfac.as_blocks, path, table=False)


@pytest.mark.parametrize("name", ["__no_feature", "N_unmapped", "_total_ambiguous"])
def test_reads_of_no_gene_are_left_out(tmp_path, name):
    path = written(tmp_path, "c.tsv", f"{name}\t90\t80\t9.5\ng1\t5\t1\t2\ng2\t0\t7\t1\n")
    with pytest.warns(DataWarning, match="1 rows of .* are no genes but summaries"):
        data = dfac.as_blocks(path, 1)
    assert names_of(data)[0] == ["g1", "g2"]


@pytest.mark.parametrize("ending", ["inter", "tsv"])
def test_columns_with_types_behind_their_names(tmp_path, ending):
    text = (
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t5\t3\t9e8\n2\t5\t4\t9e8\n"
    )
    with pytest.warns(DataWarning) as caught:
        data = dfac.as_blocks(written(tmp_path, f"r.{ending}", text), 1)
    assert data.unstored == "missing"
    assert any("values in 'rating:float'" in str(one.message) for one in caught)


def test_times_are_no_values(tmp_path):
    path = written(tmp_path, "t.csv", "userId,movieId,tag,timestamp\n1,5,fun,99\n2,5,sad,98\n")
    match = "pass rows='userId', columns='movieId', values=False if it has a line"
    refused(DataError, match, dfac.as_blocks, path)
    data = dfac.as_blocks(path, 1, rows="userId", columns="movieId", values=False, unstored="zero")
    np.testing.assert_array_equal(data.to_numpy(), [[1], [1]])


def test_files_of_matlab_are_of_two_kinds(tmp_path):
    with h5py.File(tmp_path / "v.mat", "w", userblock_size=512) as file:
        file["V"] = V
    for name, call in (
        ("v.mat", r"h5py.File\(.*\['NAME'\]\[...\].T"),
        ("w.mat", "scipy.io.loadmat"),
    ):
        if name == "w.mat":
            written(tmp_path, name, "MATLAB 5.0")
        refused(DataError, f"pass what {call}", dfac.as_blocks, tmp_path / name)


def test_texts_of_unknown_kind_are_told_from_others(tmp_path):
    text = written(tmp_path, "quant.sf", "Name\tTPM\na\t1\n")
    refused(DataError, "copy it to a name that ends in .csv", dfac.as_blocks, text)
    (tmp_path / "x.blo").write_bytes(bytes(range(256)))
    assert "copy it" not in refused(DataError, "cannot be read", dfac.as_blocks, tmp_path / "x.blo")
    (tmp_path / "x.dat").write_bytes(bytes(range(256)))
    refused(DataError, "is no text file", dfac.as_blocks, tmp_path / "x.dat")


def test_variables_of_text_are_no_matrices(tmp_path):
    names = (("x", "y"), np.array([["a", "b"], ["c", "d"]]))
    xr.Dataset({"name": names, "v": (("x", "y"), V[:2, :2])}).to_netcdf(tmp_path / "v.nc")
    np.testing.assert_array_equal(dfac.as_blocks(tmp_path / "v.nc", 1).to_numpy(), V[:2, :2])


def test_a_zarr_array_that_zarr_refuses(tmp_path):
    group = zarr.open_group(tmp_path / "g.zarr", mode="w")
    group.create_array("a", data=V)
    document = tmp_path / "g.zarr" / "a" / "zarr.json"
    told = json.loads(document.read_text())
    document.write_text(json.dumps(told | {"codecs": []}))
    refused(DataError, "cannot be read; give", dfac.as_blocks, tmp_path / "g.zarr")
