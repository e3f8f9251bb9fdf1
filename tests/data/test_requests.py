"""Requests that opening an input at a URL takes before its data are read."""

import shutil

import numpy as np
import pytest
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor.data.opening import open_source
from daskfactor.errors import StoreError
from tests.object_store import BUCKET
from tests.refusals import refused

s3fs = pytest.importorskip("s3fs")

DENSE = np.random.default_rng(0).poisson(3.0, (12, 9)).astype(np.float32)
COUNTS = sparse.random_array((40, 30), density=0.2, rng=np.random.default_rng(1), format="csr")
RUN = {"draws": 3, "tune": 3, "random_seed": 0, "progressbar": False}


class Requests:
    """Requests to a server: all of them, and those for metadata."""

    def __init__(self, monkeypatch, s3):
        self.asked = []
        answer = s3._app

        def listening(environ, start_response):
            ask = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
            self.asked.append(ask)
            return answer(environ, start_response)

        monkeypatch.setattr(s3, "_app", listening)

    def of(self, function, *inputs):
        """Count the requests of a call by a client that has asked for nothing before."""
        s3fs.S3FileSystem.clear_instance_cache()
        self.asked.clear()
        function(*inputs)
        return list(self.asked)


@pytest.fixture
def requests(monkeypatch, s3):
    return Requests(monkeypatch, s3)


@pytest.fixture
def url(tmp_path, s3):
    """Copy what is in a folder of this test to the server."""

    def copied(name):
        target = f"s3://{BUCKET}/{tmp_path.name}/{name}"
        files = s3fs.S3FileSystem()
        if files.exists(target):
            files.rm(target, recursive=True)
        files.put(str(tmp_path / name), target, recursive=True)
        return target

    return copied


def written(folder, name):
    """Write an input of every format under a name."""
    place = folder / name
    match name:
        case "v.csv":
            np.savetxt(place, DENSE, delimiter=",")
        case "v.npy":
            np.save(place, DENSE)
        case "v.parquet":
            pd = pytest.importorskip("pandas")
            pytest.importorskip("pyarrow")
            pd.DataFrame(DENSE, columns=list(map(str, range(9)))).to_parquet(place)
        case "v2.zarr" | "v3.zarr":
            zarr.create_array(place, data=DENSE, chunks=(6, 9), zarr_format=int(name[1]))
        case "blocks.zarr":
            dfac.convert(COUNTS, place, blocks=2, unstored="zero", progressbar=False)
        case "a.h5ad" | "a.zarr":
            data = pytest.importorskip("anndata").AnnData(COUNTS.astype(np.float32))
            data.write_h5ad(place) if name == "a.h5ad" else data.write_zarr(place)
        case "run.zarr":
            dfac.sample(DENSE, dfac.TweedieNMF(2), store=place, **RUN)


def is_chunk(ask):
    """Of a zarr store, metadata are what is no chunk: c/0/0, or 0.0 and 0 of format 2."""
    parts = ask[1].split("/")
    return "c" in parts[-4:-1] or parts[-1].replace(".", "").isdigit()


@pytest.mark.parametrize("name", ["v.csv", "v.npy", "v.parquet", "a.h5ad"])
def test_a_file_is_opened_by_few_requests(tmp_path, requests, url, name):
    """A file of a few KiB comes with its first part, so that these are all requests for it.

    A Parquet file may be a folder, and so its size is asked for twice.
    """
    written(tmp_path, name)
    assert len(requests.of(open_source, url(name))) <= (3 if name == "v.parquet" else 2)


@pytest.mark.filterwarnings("ignore:Writing zarr v2 data")
@pytest.mark.parametrize("name", ["v2.zarr", "v3.zarr", "blocks.zarr", "a.zarr"])
def test_a_zarr_store_is_opened_by_few_requests_before_its_chunks(tmp_path, requests, url, name):
    """One for what is in the folder, the others for documents of zarr.

    Chunks are data: also those of names of AnnData, and of the table of a blocked store.
    """
    written(tmp_path, name)
    asked = requests.of(open_source, url(name))
    assert len([ask for ask in asked if not is_chunk(ask)]) <= 3
    chunks = [ask[1] for ask in asked if is_chunk(ask)]
    assert len(chunks) == len(set(chunks)) <= 6


@pytest.mark.filterwarnings("ignore:Writing zarr v2 data")
def test_chunks_of_a_large_flat_array_are_not_listed(tmp_path, requests, url):
    V = np.ones((30, 40), np.float32)
    zarr.create_array(tmp_path / "flat.zarr", data=V, chunks=(1, 1), zarr_format=2)
    assert len(requests.of(open_source, url("flat.zarr"))) <= 3


@pytest.mark.filterwarnings("ignore:Writing zarr v2 data")
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", ["v2.zarr", "v3.zarr", "blocks.zarr", "v.parquet"])
def test_data_that_may_be_read_but_not_listed_are_opened(tmp_path, s3, url, name, hidden):
    """``hidden``: what is absent is refused, too, as S3 does where a bucket may not be listed."""
    written(tmp_path, name)
    place = url(name)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}

    def fault(environ):
        path = environ["PATH_INFO"].partition(f"/{tmp_path.name}/")[2]
        lists = "list-type" in environ["QUERY_STRING"]
        refuses = lists or (hidden and path not in files)
        return (403, "AccessDenied") if refuses else None

    s3fs.S3FileSystem.clear_instance_cache()
    with s3.failing(fault), dfac.as_blocks(place, unstored=None) as data:
        assert data.shape in (DENSE.shape, COUNTS.shape)


def test_refused_credentials_are_told(tmp_path, s3, url):
    written(tmp_path, "v3.zarr")
    place = url("v3.zarr")
    s3fs.S3FileSystem.clear_instance_cache()
    with s3.failing(lambda environ: (403, "AccessDenied")):
        refused(StoreError, "cannot be used: the credentials are refused", dfac.as_blocks, place)


def test_a_copy_of_a_run_is_opened_by_few_requests_before_its_chunks(tmp_path, requests, url):
    """One says that it is no repository; the others are its root and its last checkpoint."""
    written(tmp_path, "run.zarr")
    asked = requests.of(dfac.open_run, url("run.zarr"))
    assert len([ask for ask in asked if not is_chunk(ask)]) <= 3


def test_a_run_in_a_repository_is_opened_by_the_requests_of_icechunk(tmp_path, requests, s3):
    """They are for its layout, its configuration, its branch (three times) and its snapshot.

    Manifests hold the chunks.
    """
    pytest.importorskip("icechunk")
    place = s3.url(tmp_path.name)
    dfac.sample(DENSE, dfac.TweedieNMF(2), store=place, **RUN)
    asked = requests.of(dfac.open_run, place)
    assert len([ask for ask in asked if "/manifests/" not in ask[1]]) <= 6


def test_what_is_read_of_a_file_is_read_once(tmp_path, requests, url):
    """The whole way to blocks asks for a small file as opening it does."""
    written(tmp_path, "v.csv")
    place = url("v.csv")

    def blocks():
        with dfac.as_blocks(place) as data:
            assert data.shape == DENSE.shape

    assert len(requests.of(blocks)) <= 2


def test_what_a_location_holds_is_found_again_in_another_call(tmp_path, requests, url):
    """What was found is kept with one call, not longer: data may have changed."""
    written(tmp_path, "v3.zarr")
    place = url("v3.zarr")
    with dfac.as_blocks(place) as data:
        before, location = data.to_numpy(), data.source.location
    zarr.create_array(tmp_path / "v3.zarr", data=DENSE + 1, chunks=(6, 9), overwrite=True)
    url("v3.zarr")
    with dfac.as_blocks(location) as data:
        np.testing.assert_array_equal(data.to_numpy(), before + 1)


def test_what_a_location_held_is_forgotten_by_every_call(tmp_path):
    place = tmp_path / "v"
    zarr.create_array(place, data=DENSE)
    with dfac.as_blocks(place) as data:
        location = data.source.location
    shutil.rmtree(place)
    dfac.convert(COUNTS, place, blocks=2, unstored="zero", progressbar=False)
    assert open_source(location).shape == COUNTS.shape
    dfac.convert(location, tmp_path / "copy", progressbar=False)
    assert dfac.as_blocks(tmp_path / "copy").shape == COUNTS.shape
    shutil.rmtree(place)
    zarr.create_array(place, data=np.ones((3, 4, 5), np.float32))
    assert dfac.as_tensor(location, 1).grid.sizes == (3, 4, 5)
