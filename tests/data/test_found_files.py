"""Files as they were found in public repositories, made anew, and how each is read."""

import gzip
import json
from io import BytesIO

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import sparse as pydata
import xarray as xr
import zarr
from scipy import io, sparse

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning
from tests.cli.shell import fails
from tests.data.written import names_of, written
from tests.refusals import refused

pytestmark = pytest.mark.libraries

V = np.arange(1.0, 13).reshape(4, 3)
OBS, VAR = [f"c{i}" for i in range(4)], [f"g{j}" for j in range(3)]
COUNTS = np.random.default_rng(0).poisson(0.7, (6, 4))
COUNTS[0] = COUNTS[:, 0] = 1
CELLS = [f"AAAC-{at}" for at in range(6)]
GENES = [("ENSG1", "ACTB"), ("ENSG2", "ACTB"), ("ENSG3", "CD4"), ("ENSG4", "CD8A")]
IDS, NAMES = map(list, zip(*GENES, strict=True))


def test_a_file_of_anndata_with_tables_of_names(tmp_path):
    kinds = [("index", "S3"), ("n", "f8")]
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        file["X"] = V.astype("f4")
        for side, names in (("obs", OBS), ("var", VAR)):
            file[side] = np.array([(name.encode(), 1.0) for name in names], kinds)
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


def put(path, lines, packed):
    """Write lines of fields between tabs, or a file that was made."""
    text = lines
    if not isinstance(lines, bytes):
        text = "".join("\t".join(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if packed else text)


def folder_of(path, packed, features="features.tsv", prefix=""):
    path.mkdir()
    end, matrix = ".gz" if packed else "", BytesIO()
    io.mmwrite(matrix, sparse.coo_array(COUNTS.T))  # genes × cells
    put(path / f"{prefix}matrix.mtx{end}", matrix.getvalue(), packed)
    put(path / f"{prefix}barcodes.tsv{end}", [[cell] for cell in CELLS], packed)
    put(path / f"{prefix}{features}{end}", [(*gene, "Gene Expression") for gene in GENES], packed)
    return path


def is_of_cells(data):
    np.testing.assert_array_equal(data.to_numpy(), COUNTS)
    assert names_of(data) == [CELLS, IDS]
    assert data.labels.col_coords["name"].tolist() == NAMES


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:.*unstored")
def test_a_folder_of_10x_and_its_matrix_are_cells_by_genes(tmp_path, packed):
    folder = folder_of(tmp_path / "f", packed, "features.tsv" if packed else "genes.tsv")
    matrix = next(folder.glob("matrix.mtx*"))
    for given in (folder, matrix, str(matrix)):
        with pytest.warns(DataWarning, match="columns of .* are used as rows.*6 cells and 4 g"):
            is_of_cells(dfac.as_blocks(given, 1, unstored="zero"))
    with pytest.warns(DataWarning, match="are used as rows"):
        dfac.convert(folder, tmp_path / "c.zarr", unstored="zero", progressbar=False)
    is_of_cells(dfac.as_blocks(tmp_path / "c.zarr"))


def test_a_prefix_and_names_of_another_matrix(tmp_path):
    folder = folder_of(tmp_path / "f", True, prefix="GSM1_")
    path, match = folder / "GSM1_matrix.mtx.gz", r"4 rows and 6 columns, .*name 4 genes and 4 cells"
    with pytest.warns(DataWarning, match="are used as rows"):
        is_of_cells(dfac.as_blocks(path, 1, unstored="zero"))
    put(folder / "GSM1_barcodes.tsv.gz", [[cell] for cell in CELLS[:4]], True)
    refused(DataError, f"{match}; move", dfac.as_blocks, path, 1, unstored="zero")


@pytest.mark.parametrize("version", [2, 3])
def test_hdf5_of_10x_is_cells_by_genes(tmp_path, version):
    path, matrix = tmp_path / "filtered.h5", sparse.csc_array(COUNTS.T)
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix" if version == 3 else "GRCh38")
        for name in ("data", "indices", "indptr", "shape"):
            group[name] = getattr(matrix, name)
        group["barcodes"] = np.array(CELLS, "S")
        if version == 3:
            group["features/id"], group["features/name"] = np.array(IDS, "S"), np.array(NAMES, "S")
        else:
            group["genes"], group["gene_names"] = np.array(IDS, "S"), np.array(NAMES, "S")
            group.attrs["CLASS"] = "GROUP"  # of PyTables, and no netCDF
    for place in (path,) if version == 3 else (path, f"{path}:GRCh38"):
        is_of_cells(dfac.as_blocks(place, 1))


def test_a_matrix_in_any_hdf5(tmp_path):
    path, cube = tmp_path / "a.hspy", tmp_path / "cube.emd"
    with h5py.File(path, "w") as file:
        file["Experiments/one/data"] = V
    np.testing.assert_array_equal(dfac.as_blocks(path, 1).to_numpy(), V)
    with h5py.File(path, "a") as file:
        file["cube"], file["other"] = np.ones((2, 3, 4)), V + 1
    match = r"2 matrices \(.*cube \(2, 3, 4\).*name one as .*:NAME"
    refused(DataError, match, dfac.as_blocks, path)
    np.testing.assert_array_equal(dfac.as_blocks(f"{path}:other", 1).to_numpy(), V + 1)
    with h5py.File(cube, "w") as file:
        file["a"] = V.reshape(2, 2, 3)
    match = r"pass an array of it in Python: xarray.DataArray\(.*cube.emd'\)\[NAME\]\[...\]\)"
    assert ":NAME" not in refused(DataError, match, dfac.as_blocks, cube)


@pytest.mark.parametrize("fill", [0, np.nan])
def test_a_sparse_frame_stays_sparse(fill):
    values = np.where(COUNTS > 0, COUNTS, fill).astype(float)
    frame = pd.DataFrame(values, index=CELLS, columns=["a", "b", "c", "d"])
    data = dfac.as_blocks(frame.astype(pd.SparseDtype("float64", fill)), 1)
    assert data.is_sparse
    assert data.unstored == ("missing" if np.isnan(fill) else "zero")
    np.testing.assert_array_equal(data.to_numpy(), values)
    assert data.labels.index[0].tolist() == CELLS


def test_of_netcdf_bounds_and_texts_are_no_matrices_and_names_are_kept(tmp_path):
    path, values = tmp_path / "c.nc", np.random.default_rng(0).random((4, 3, 2))
    cube = xr.Dataset({"tas": (("time", "y", "x"), values)})
    cube["time_bnds"] = (("time", "bnds"), np.ones((4, 2)))
    cube["time"] = ("time", np.arange(4), {"bounds": "time_bnds"})
    cube.to_netcdf(path, engine="h5netcdf")
    found = dfac.as_blocks(path, 1, rows="time", dtype="float64")
    np.testing.assert_array_equal(found.to_numpy(), values.reshape(4, 6))
    refused(DataError, "3 dimensions, 'time' and 'y' and 'x': name those", dfac.as_blocks, path)
    matrix = xr.DataArray(np.ones((4, 3)), {"site": list("abcd")}, ["site", "species"], "v")
    matrix.to_netcdf(tmp_path / "m.h5", engine="h5netcdf")
    assert names_of(dfac.as_blocks(tmp_path / "m.h5", 1)) == [list("abcd"), None]
    names = (("x", "y"), np.array([["a", "b"], ["c", "d"]]))
    xr.Dataset({"name": names, "v": (("x", "y"), V[:2, :2])}).to_netcdf(tmp_path / "v.nc")
    np.testing.assert_array_equal(dfac.as_blocks(tmp_path / "v.nc", 1).to_numpy(), V[:2, :2])


def test_columns_without_names_go_by_their_positions(tmp_path):
    path = written(tmp_path, "r.txt", "1 1 2\n1 2 4\n2 1 3.5\n2 2 1\n")
    match = r"pass rows=0, columns=1, values=2 \(or table=True\)"
    refused(DataError, match, dfac.as_blocks, path)
    data = dfac.as_blocks(path, 1, rows=0, columns=1, values=2, unstored="zero")
    np.testing.assert_array_equal(data.to_numpy(), [[2, 4], [3.5, 1]])
    words = "pass --rows 0, --columns 1, --values 2 (or --table)"
    fails(3, words, "fit", path, "--store", tmp_path / "run.zarr", "-k", "1")
    texts = written(tmp_path, "w.tsv", "love\tsex\t6.77\nlove\tcat\t1.5\n")
    assert dfac.as_blocks(texts, 1, table=True, unstored="missing").shape == (1, 2)


def test_a_matrix_whose_rows_have_two_labels_is_no_table_of_entries(tmp_path):
    frame = pd.DataFrame(V, columns=["SBS1", "SBS2", "SBS3"])
    frame.insert(0, "Type", ["C>A", "C>A", "C>T", "C>T"])
    frame.insert(1, "Subtype", ["ACA", "ACC", "ACA", "ACC"])
    frame.to_csv(tmp_path / "s.csv", index=False)
    match = "Subtype|field 2: 'ACA' is not a number"
    for given in (frame, tmp_path / "s.csv"):
        refused(DataError, match, dfac.as_blocks, given)
    whole = pd.read_csv(tmp_path / "s.csv", index_col=[0, 1])
    np.testing.assert_array_equal(dfac.as_blocks(whole, 1).to_numpy(), V)


def test_a_first_line_of_sizes_is_told_and_pairs_are_no_decimal_commas(tmp_path):
    path = written(tmp_path, "w2v.txt", "2 3\nthe .1 .2 .3\nof .1 .2 .4\n")
    refused(DataError, "line 2 has 4 fields, the lines before it 2", dfac.as_blocks, path)
    path = written(tmp_path, "c.tsv", "s\t1\t2\na\t1330421,1204131\t3,4\nb\t2,3\t1,1\n")
    assert "decimal" not in refused(DataError, "is not a number", dfac.as_blocks, path, table=False)


@pytest.mark.parametrize("name", ["__no_feature", "N_unmapped", "_total_ambiguous"])
def test_reads_of_no_gene_are_left_out(tmp_path, name):
    path = written(tmp_path, "c.tsv", f"{name}\t90\t80\t9.5\ng1\t5\t1\t2\ng2\t0\t7\t1\n")
    with pytest.warns(DataWarning, match="1 rows of .* are not genes but summaries"):
        data = dfac.as_blocks(path, 1)
    assert names_of(data)[0] == ["g1", "g2"]


def test_columns_with_types_behind_their_names(tmp_path):
    text = (
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t5\t3\t9e8\n2\t5\t4\t9e8\n"
    )
    named = {"rows": "user_id:token", "columns": "item_id:token", "values": "rating:float"}
    data = dfac.as_blocks(written(tmp_path, "r.inter", text), 1, unstored="missing", **named)
    np.testing.assert_array_equal(data.to_numpy(), [[3], [4]])


def test_lines_beside_texts_and_times_are_counted(tmp_path):
    path = written(tmp_path, "t.csv", "userId,movieId,tag,timestamp\n1,5,fun,99\n2,5,sad,98\n")
    data = dfac.as_blocks(path, 1, rows="userId", columns="movieId", values=False, unstored="zero")
    np.testing.assert_array_equal(data.to_numpy(), [[1], [1]])


def test_files_of_matlab_are_of_two_kinds(tmp_path):
    with h5py.File(tmp_path / "v.mat", "w", userblock_size=512) as file:
        file["V"] = V
    written(tmp_path, "w.mat", "MATLAB 5.0")
    calls = {"v.mat": r"h5py.File\(.*\['NAME'\]\[...\].T", "w.mat": "scipy.io.loadmat"}
    for name, call in calls.items():
        refused(DataError, f"pass what {call}", dfac.as_blocks, tmp_path / name)


def test_texts_of_unknown_kind_and_arrays_that_zarr_refuses(tmp_path):
    text = written(tmp_path, "quant.sf", "Name\tTPM\na\t1\n")
    refused(DataError, "copy it to a name that ends in .csv", dfac.as_blocks, text)
    (tmp_path / "x.blo").write_bytes(bytes(range(256)))
    assert "copy it" not in refused(DataError, "cannot be read", dfac.as_blocks, tmp_path / "x.blo")
    (tmp_path / "x.dat").write_bytes(bytes(range(256)))
    refused(DataError, "is not a text file", dfac.as_blocks, tmp_path / "x.dat")
    group = zarr.open_group(tmp_path / "g.zarr", mode="w")
    group.create_array("a", data=V)
    document = tmp_path / "g.zarr" / "a" / "zarr.json"
    told = json.loads(document.read_text())
    document.write_text(json.dumps(told | {"codecs": []}))
    refused(DataError, "cannot be read; give", dfac.as_blocks, tmp_path / "g.zarr")


# -- values that are packed: a scale, an offset, and a number for what is missing ---------------

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
    array = xr.DataArray(pydata.COO(np.eye(3)), attrs={"scale_factor": 0.1})
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
        array = zarr.create_array(place, shape=(10, 6), chunks=((3, 7), (6,)), dtype="f8")
        array[:] = values
        np.testing.assert_array_equal(dfac.as_blocks(array, 2, dtype="float64").to_numpy(), values)
