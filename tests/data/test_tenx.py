"""Counts as 10x Genomics writes them, other HDF5, sparse frames and cubes of netCDF."""

import gzip

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import io, sparse

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning

pytestmark = pytest.mark.libraries

COUNTS = np.random.default_rng(0).poisson(0.7, (6, 4))
COUNTS[0] = COUNTS[:, 0] = 1
CELLS = [f"AAAC-{at}" for at in range(6)]
GENES = [("ENSG1", "ACTB"), ("ENSG2", "ACTB"), ("ENSG3", "CD4"), ("ENSG4", "CD8A")]


def tsv(path, lines, packed):
    text = "".join("\t".join(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if packed else text)


def folder_of(path, packed, features="features.tsv", prefix=""):
    path.mkdir()
    end = ".gz" if packed else ""
    plain = path / "m.mtx"
    io.mmwrite(plain, sparse.coo_array(COUNTS.T))  # genes × cells
    raw = plain.read_bytes()
    plain.unlink()
    (path / f"{prefix}matrix.mtx{end}").write_bytes(gzip.compress(raw) if packed else raw)
    tsv(path / f"{prefix}barcodes.tsv{end}", [[cell] for cell in CELLS], packed)
    tsv(path / f"{prefix}{features}{end}", [(*gene, "Gene Expression") for gene in GENES], packed)
    return path


def is_of_cells(data):
    np.testing.assert_array_equal(data.to_numpy(), COUNTS)
    assert data.labels.row_coords["obs"].tolist() == CELLS
    assert data.labels.col_coords["var"].tolist() == [gene[0] for gene in GENES]
    assert data.labels.col_coords["name"].tolist() == [gene[1] for gene in GENES]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:.*unstored")
def test_a_folder_and_its_matrix_are_cells_by_genes(tmp_path, packed):
    folder = folder_of(tmp_path / "f", packed, "features.tsv" if packed else "genes.tsv")
    matrix = next(folder.glob("matrix.mtx*"))
    for given in (folder, matrix, str(matrix)):
        with pytest.warns(DataWarning, match="columns of .* are taken for rows.*6 cells and 4 g"):
            is_of_cells(dfac.as_blocks(given, 1, unstored="zero"))
    with pytest.warns(DataWarning, match="are taken for rows"):
        dfac.convert(folder, tmp_path / "c.zarr", unstored="zero", progressbar=False)
    is_of_cells(dfac.as_blocks(tmp_path / "c.zarr"))


def test_a_prefix_and_names_of_another_matrix(tmp_path):
    folder = folder_of(tmp_path / "f", True, prefix="GSM1_")
    with pytest.warns(DataWarning, match="are taken for rows"):
        is_of_cells(dfac.as_blocks(folder / "GSM1_matrix.mtx.gz", 1, unstored="zero"))
    tsv(folder / "GSM1_barcodes.tsv.gz", [[cell] for cell in CELLS[:4]], True)
    with pytest.raises(DataError, match=r"4 rows and 6 columns, .*name 4 genes and 4 cells; move"):
        dfac.as_blocks(folder / "GSM1_matrix.mtx.gz", 1, unstored="zero")


@pytest.mark.parametrize("version", [2, 3])
def test_hdf5_of_10x_is_cells_by_genes(tmp_path, version):
    path, matrix = tmp_path / "filtered.h5", sparse.csc_array(COUNTS.T)
    ids, names = (np.array(own, "S") for own in zip(*GENES, strict=True))
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix" if version == 3 else "GRCh38")
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
        group["shape"] = matrix.shape
        group["barcodes"] = np.array(CELLS, "S")
        if version == 3:
            group["features/id"], group["features/name"] = ids, names
        else:
            group["genes"], group["gene_names"] = ids, names
    is_of_cells(dfac.as_blocks(path, 1))


def test_a_matrix_in_any_hdf5(tmp_path):
    path, values = tmp_path / "a.hspy", np.random.default_rng(0).random((5, 3))
    with h5py.File(path, "w") as file:
        file["Experiments/one/data"] = values
    np.testing.assert_array_equal(dfac.as_blocks(path, 1, dtype="float64").to_numpy(), values)
    with h5py.File(path, "a") as file:
        file["cube"] = np.ones((2, 3, 4))
        file["other"] = values
    with pytest.raises(DataError, match=r"2 matrices \(.*cube \(2, 3, 4\).*name one as .*:NAME"):
        dfac.as_blocks(path)
    found = dfac.as_blocks(f"{path}:other", 1, dtype="float64")
    np.testing.assert_array_equal(found.to_numpy(), values)


@pytest.mark.parametrize("fill", [0, np.nan])
def test_a_sparse_frame_stays_sparse(fill):
    values = np.where(COUNTS > 0, COUNTS, fill).astype(float)
    frame = pd.DataFrame(values, index=CELLS, columns=["a", "b", "c", "d"])
    frame = frame.astype(pd.SparseDtype("float64", fill))
    data = dfac.as_blocks(frame, 1)
    assert data.is_sparse
    assert data.unstored == ("missing" if np.isnan(fill) else "zero")
    np.testing.assert_array_equal(data.to_numpy(), values)
    assert data.labels.index[0].tolist() == CELLS


def test_a_cube_of_netcdf(tmp_path):
    cube = xr.DataArray(
        np.random.default_rng(0).random((4, 3, 2)), dims=("time", "y", "x"), name="v"
    )
    cube.to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    found = dfac.as_blocks(tmp_path / "c.nc", 1, rows="time", dtype="float64")
    np.testing.assert_array_equal(found.to_numpy(), cube.values.reshape(4, 6))
    with pytest.raises(DataError, match="3 dimensions, 'time' and 'y' and 'x': name those"):
        dfac.as_blocks(tmp_path / "c.nc")


def test_bounds_are_no_matrix_and_netcdf_keeps_its_names(tmp_path):
    cube = xr.Dataset({"tas": (("time", "y", "x"), np.ones((4, 3, 2)))})
    cube["time_bnds"] = (("time", "bnds"), np.ones((4, 2)))
    cube["time"] = ("time", np.arange(4), {"bounds": "time_bnds"})
    cube.to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    assert dfac.as_blocks(tmp_path / "c.nc", 1, rows="time").shape == (4, 6)
    with pytest.raises(DataError, match="3 dimensions, 'time' and 'y' and 'x': name those"):
        dfac.as_blocks(tmp_path / "c.nc")
    matrix = xr.DataArray(np.ones((4, 3)), {"site": list("abcd")}, ["site", "species"], "v")
    matrix.to_netcdf(tmp_path / "m.h5", engine="h5netcdf")
    assert dfac.as_blocks(tmp_path / "m.h5", 1).labels.row_coords["site"].tolist() == list("abcd")
