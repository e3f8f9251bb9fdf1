"""Data at URLs: a real S3 server on loopback, and fsspec's own memory where that is enough."""

import json
import os
import pickle
import socket
import time
import uuid
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from distributed import Client, LocalCluster
from scipy import sparse

import daskfactor as dfac
from daskfactor import urls
from daskfactor.data.store import BlockStore
from daskfactor.errors import DataError, OptionError, StoreError
from daskfactor.urls import Location, classify_error, error_summary, retry, safe_cause
from tests.cli.shell import fails, plain, succeed
from tests.object_store import BUCKET
from tests.random_sparse import random_array
from tests.refusals import refused
from tests.tiers import FULL

RNG = np.random.default_rng(16)
DENSE = RNG.gamma(2.0, 1.0, (48, 36)).astype(np.float32)
COUNTS = random_array((60, 40), density=0.2, rng=RNG, format="csr")
COUNTS.data[:] = 1 + RNG.poisson(0.3, COUNTS.nnz)
TABLE = pd.DataFrame(dict(zip(("row", "column", "value"), sparse.find(COUNTS), strict=True)))
FIT = {"draws": 4, "tune": 4, "progressbar": False, "random_seed": 1}
QUIET = {"unstored": "zero", "progressbar": False}


def fitted(V, **options):
    trace = dfac.sample(V, dfac.TweedieNMF(3, dispersion=0.9), **FIT, **options)
    return trace["posterior"]["W"].to_numpy()


def put(url, write):
    """A file at a URL."""
    made = BytesIO()
    write(made)
    with fsspec.open(url, "wb") as file:
        file.write(made.getvalue())


@pytest.fixture
def folder(s3):
    """The URL of an empty folder in a bucket."""
    pytest.importorskip("s3fs")
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def memory():
    yield "memory://data"
    fsspec.filesystem("memory").rm("/data", recursive=True)


def alike(place, elsewhere):
    """Data at a URL give the run that a copy on disk gives."""
    local = fitted(str(elsewhere))
    for executor in ("serial", "threads") if FULL else ("threads",):
        assert np.array_equal(fitted(place, executor=executor), local)


def test_a_dense_array_and_a_blocked_store(folder, tmp_path):
    for place in (f"{folder}/c.zarr", str(tmp_path / "c.zarr")):
        dfac.convert(COUNTS, place, blocks=4, **QUIET)
    alike(f"{folder}/c.zarr", tmp_path / "c.zarr")
    dfac.convert(f"{folder}/c.zarr", tmp_path / "back.zarr", blocks=2, progressbar=False)
    assert (dfac.as_blocks(tmp_path / "back.zarr").observed_sparse() != COUNTS).nnz == 0
    refused(StoreError, "exists already", dfac.convert, COUNTS, f"{folder}/c.zarr", **QUIET)
    dfac.convert(2 * COUNTS, f"{folder}/c.zarr", overwrite=True, **QUIET)
    assert dfac.as_blocks(f"{folder}/c.zarr").total == 2 * COUNTS.sum()
    for place in (f"{folder}/v.zarr", str(tmp_path / "v.zarr")):
        zarr.create_array(place, data=DENSE, chunks=(16, 12))
    alike(f"{folder}/v.zarr", tmp_path / "v.zarr")


@pytest.mark.full
def test_weights_come_through_the_same_reader(folder):
    zarr.create_array(f"{folder}/v.zarr", data=DENSE, chunks=(16, 12))
    zarr.create_array(f"{folder}/w.zarr", data=DENSE + 1, chunks=(16, 12))
    at_urls = dfac.as_blocks(f"{folder}/v.zarr", weights=f"{folder}/w.zarr")
    assert at_urls.fingerprint == dfac.as_blocks(DENSE, at_urls.grid, weights=DENSE + 1).fingerprint
    dfac.convert(COUNTS, f"{folder}/c.zarr", **QUIET)
    weights = COUNTS.copy()
    weights.data += 0.5
    dfac.convert(weights, f"{folder}/cw.zarr", unstored="missing", progressbar=False)
    at_urls = dfac.as_blocks(f"{folder}/c.zarr", weights=f"{folder}/cw.zarr", allow_empty=True)
    local = dfac.as_blocks(COUNTS, weights=weights, unstored="zero", allow_empty=True)
    assert at_urls.fingerprint == local.fingerprint


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "t.mtx", "t.npz", "folder"])
def test_entries(memory, name, tmp_path):
    url = f"{memory}/{name}"
    if ".csv" in name:
        text = TABLE.to_csv(index=False).encode()
        with fsspec.open(url, "wb", compression="infer") as file:
            file.write(text)
    elif name == "t.parquet":
        put(url, lambda file: TABLE.to_parquet(file, index=False))
    elif name == "folder":
        for part, rows in enumerate((TABLE[:100], TABLE[100:])):
            put(f"{url}/{part}.parquet", lambda file, rows=rows: rows.to_parquet(file, index=False))
    else:
        dfac.convert(COUNTS, tmp_path / "c.zarr", **QUIET)
        dfac.export(tmp_path / "c.zarr", tmp_path / name)
        put(url, lambda file: file.write((tmp_path / name).read_bytes()))
    options = {"shape": COUNTS.shape} if name[2:] not in ("mtx", "npz") else {}
    done = dfac.convert(url, f"{memory}/c.zarr", **QUIET, **options)
    assert done.n_stored == COUNTS.nnz
    assert (dfac.as_blocks(f"{memory}/c.zarr").observed_sparse() != COUNTS).nnz == 0
    if "shape" in options:
        table = {"rows": "row", "columns": "column", "values": "value"}
        assert dfac.as_blocks(url, unstored="zero", **table).total == COUNTS.sum()


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_npy_file_is_read_in_parts(folder, order, monkeypatch):
    monkeypatch.setattr("daskfactor.data.loading.MIN_READ", 2**10)
    monkeypatch.setattr("daskfactor.data.numpy_files.STRIP", 2**10)
    put(f"{folder}/v.npy", lambda file: np.save(file, np.asarray(DENSE, order=order)))
    data = dfac.as_blocks(f"{folder}/v.npy", memory_limit=2**10)
    assert data.source.kind == "npy"
    assert np.array_equal(data.to_numpy(), DENSE)
    again = pickle.loads(pickle.dumps(data.share()))
    assert again.kind == "zarr"  # read by workers from where it is
    put(f"{folder}/cut.npy", lambda file: (np.save(file, DENSE), file.truncate(300)))
    match = r"cut\.npy ends too early; it was cut off"
    refused(DataError, match, dfac.as_blocks, f"{folder}/cut.npy")


def test_dense_files(memory, tmp_path):
    labelled = xr.DataArray(DENSE, dims=("time", "place"), coords={"time": np.arange(48)}, name="v")
    labelled.to_netcdf(tmp_path / "v.nc", engine="h5netcdf")
    put(f"{memory}/v.nc", lambda file: file.write((tmp_path / "v.nc").read_bytes()))
    labelled.to_dataset().to_zarr(f"{memory}/x.zarr", consolidated=False)
    put(f"{memory}/a.npz", lambda file: np.savez(file, v=DENSE, other=DENSE + 1))
    put(f"{memory}/v.csv", lambda file: np.savetxt(file, DENSE, delimiter=","))
    put(f"{memory}/v.parquet", lambda file: pd.DataFrame(DENSE).add_prefix("c").to_parquet(file))
    for name in ("v.nc", "v.nc:v", "x.zarr", "x.zarr:v", "x.zarr/v", "a.npz:v", "v.csv"):
        data = dfac.as_blocks(f"{memory}/{name}")
        assert np.array_equal(data.to_numpy(), DENSE), name
        assert (data.labels.row_dim == "time") == (name[0] in "vx" and name[2:4] != "cs"), name
    data = dfac.as_blocks(f"{memory}/v.parquet", table=False)
    assert np.array_equal(data.to_numpy(), DENSE)


def test_storage_options(folder, monkeypatch, tmp_path):
    zarr.create_array(f"{folder}/v.zarr", data=DENSE, chunks=(16, 12))
    dfac.convert(COUNTS, f"{folder}/c.zarr", **QUIET)
    place = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    options = {"key": "theaccesskey", "secret": "averysecretkey", "client_kwargs": place}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    store = str(tmp_path / "run.zarr")
    run = {"storage_options": options, "store": store, **FIT}
    trace = dfac.sample(f"{folder}/v.zarr", dfac.TweedieNMF(2), **run)
    written = b"".join(path.read_bytes() for path in Path(store).rglob("*") if path.is_file())
    assert not [secret for secret in (b"averysecretkey", b"theaccesskey") if secret in written]
    assert json.loads(trace.attrs["run"])["source"]["location"] == f"{folder}/v.zarr"
    fsspec.filesystem("s3").clear_instance_cache()
    match = "no credentials in the environment; set them, or pass st"
    refused(StoreError, match, dfac.resume, store, draws=2, progressbar=False)
    trace = dfac.resume(store, draws=2, storage_options=options, progressbar=False)
    assert trace["posterior"].sizes["draw"] == FIT["draws"] + 2
    with dfac.as_blocks(f"{folder}/c.zarr", storage_options=options) as data:
        assert data.total == COUNTS.sum()
        # Workers get them, and nobody sees them.
        handle = pickle.loads(pickle.dumps(data.share()))
        assert handle.location.options == options
        assert "secret" not in repr(handle) + repr(data) + str(data.source)
    for V, wrong, match in (
        (DENSE, options, "storage_options are for URLs, not for a ndarray"),
        (f"{folder}/v.zarr", "anon", "must be a dict, as fsspec takes it, got str"),
    ):
        refused(OptionError, match, dfac.as_blocks, V, storage_options=wrong)


def test_a_key_that_a_server_repeats_is_not_told():
    private = "theaccesskey", "averysecretkey", "atoken"
    options = dict(zip(("key", "secret"), private, strict=False))
    options |= {"client_kwargs": {"aws_session_token": private[2], "tags": [["other"]]}}
    place = Location.of("s3://bucket/v.zarr", options)
    answer = OSError("403 in s3://bucket: " + ", ".join((*private, "other")))
    assert error_summary(answer, place) == "OSError: 403 in s3://bucket: " + ", ".join(["***"] * 4)
    assert safe_cause(answer, place) is None
    assert safe_cause(OSError("403"), place) is not None


def test_what_is_secret_in_a_url_is_not_told():
    url = "https://user:password@host.org:8000/v.npy?signature=abcdef"
    place = Location(url)
    assert place == f"{place}" == "https://host.org:8000/v.npy"
    again = pickle.loads(pickle.dumps(place))
    assert (again.url, again.options) == (url, {})
    assert json.dumps({"location": place}).count("abcdef") == 0
    said = error_summary(OSError(f"403 for {url}"), place)
    assert not [secret for secret in ("password", "abcdef") if secret in said]
    container = "abfs://container@account.host/v.zarr"
    assert Location(container) == container


def test_trouble_is_one_sentence(folder, monkeypatch):
    for url, kind, message in (
        ("s3://nowhere/v.zarr", StoreError, "at s3://nowhere/v.zarr .there is nothing of that k"),
        (f"{folder}/none.zarr", StoreError, "there is nothing of that kind"),
        (f"{folder}/none.npy", DataError, "there is nothing at"),
        (f"{folder}/none.csv", DataError, "there is nothing at"),
        ("nothing://v.zarr", DataError, "nothing:// is no kind of URL that fsspec knows"),
    ):
        refused(kind, message, dfac.as_blocks, url)
    place = f"{folder}/v.zarr"
    zarr.create_array(place, data=DENSE, chunks=(16, 12))
    files = fsspec.filesystem("s3")
    files.pipe(f"{place}/c/0/0", files.cat(f"{place}/c/0/0")[:-9])
    refused(StoreError, r"rows 0 to .* failed", dfac.as_blocks, place)
    files.clear_instance_cache()
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        match = "no credentials in the environment; set them"
        refused(StoreError, match, dfac.as_blocks, place)
    # Set now, they are taken.
    refused(StoreError, r"rows 0 to .* failed", dfac.as_blocks, place)


@pytest.mark.full
def test_a_server_that_stumbles_is_asked_again_and_one_that_is_gone_is_given_up(
    folder, s3, monkeypatch
):
    dfac.convert(COUNTS, f"{folder}/c.zarr", blocks=4, **QUIET)
    rng, asked = np.random.default_rng(0), []

    def stumbles(environ):
        asked.append(environ["PATH_INFO"])
        return (503, "SlowDown") if rng.random() < 0.3 else None

    with s3.failing(stumbles):
        store = BlockStore(f"{folder}/c.zarr")
        total = sum(store.read(row, col).values.sum() for row in range(4) for col in range(4))
    assert total == COUNTS.sum()
    assert len(asked) > 30
    monkeypatch.setenv("DASKFACTOR_STORE_PATIENCE", "1")
    gone = r"cannot be used for \d seconds: .*DASKFACTOR_STORE_PATI"
    with s3.failing(lambda _: (503, "SlowDown")):
        refused(StoreError, gone, store.read, 0, 0)
    assert store.read(0, 0).values.size


def test_what_a_server_answers_is_told(monkeypatch):
    exceptions = pytest.importorskip("botocore.exceptions")
    monkeypatch.setenv("DASKFACTOR_STORE_PATIENCE", "0.5")
    url = "s3://bucket/v.zarr"

    def answers(status, code, kind=OSError):
        asked = iter(range(100))

        def attempt():
            if next(asked) > 1 and status >= 500:
                raise TimeoutError  # the last attempt is cut off when time is up
            about = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise kind("no") from exceptions.ClientError(about, "GetObject")

        return attempt

    for status, code in ((500, "InternalError"), (503, "SlowDown")):
        match = rf"for \d seconds: it answers {status} {code}; check"
        refused(StoreError, match, retry, answers(status, code), url)
    monkeypatch.setenv("DASKFACTOR_STORE_PATIENCE", "300")
    for kind, status, code, message in (
        (PermissionError, 403, "AccessDenied", "the credentials are refused; check"),
        (OSError, 400, "ExpiredToken", "the credentials have expired; renew them"),
    ):
        refused(StoreError, f"used: {message}", retry, answers(status, code, kind), url)
    tree = 'x error\n  |-> service error\n  `-> Error { code: "InternalError", message: "m" }'
    assert classify_error(RuntimeError(tree)).reason == "it answers InternalError"


def test_a_store_is_not_made_where_it_is_not_allowed(folder, s3):
    match = "could not be written: FileNotFoundError: The spec"
    refused(StoreError, match, dfac.convert, COUNTS, "s3://nowhere/c.zarr", **QUIET)

    def refuses(environ):
        return (403, "AccessDenied") if environ["REQUEST_METHOD"] == "PUT" else None

    with s3.failing(refuses):
        match = r"could not be written: PermissionError"
        refused(StoreError, match, dfac.convert, COUNTS, f"{folder}/c.zarr", **QUIET)


def test_the_shell_takes_urls(folder, tmp_path):
    dfac.convert(COUNTS, f"{folder}/c.zarr", blocks=2, **QUIET)
    assert "60 x 40 sparse, 480 stored" in plain(succeed("info", f"{folder}/c.zarr"))
    command = ("fit", f"{folder}/none.zarr", "--store", tmp_path / "run.zarr", "-k", 2)
    fails(4, "there is nothing of that kind", *command)


def test_a_repository_of_icechunk(folder, tmp_path):
    icechunk = pytest.importorskip("icechunk")
    from daskfactor.data.icechunks import icechunk_storage

    for place in (f"{folder}/repo", str(tmp_path / "repo")):
        repository = icechunk.Repository.create(icechunk_storage(place))
        session = repository.writable_session("main")
        zarr.create_array(session.store, name="v", data=DENSE, chunks=(16, 12))
        session.commit("first")
        data = dfac.as_blocks(f"{place}/v")
        assert pickle.loads(pickle.dumps(data.share())).location == f"{place}/v"
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="v")[:] = DENSE + 1
        session.commit("second")
        assert np.array_equal(data.to_numpy(), DENSE)
        assert np.array_equal(dfac.as_blocks(data.source.location).to_numpy(), DENSE + 1)
        refused(DataError, r"holds 1 zarr array \(v\); name one as .*:NAME", dfac.as_blocks, place)


@pytest.fixture
def silence():
    """The port of a server that takes connections and never answers; what it was asked."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(20)
        yield server.getsockname()[1]


@pytest.mark.quick("x.csv", "x.zarr")
@pytest.mark.parametrize("name", ["x.npy", "x.csv", "x.zarr"])
def test_a_server_that_has_never_answered_is_given_up_soon(silence, name, monkeypatch, caplog):
    monkeypatch.setattr(urls, "FIRST_PATIENCE", 1.5)
    monkeypatch.setattr(urls, "FIRST_WARNING", 0.2)
    monkeypatch.delenv(urls.PATIENCE, raising=False)
    # A worker in this process is not what reads, and does not make the server known.
    with LocalCluster(1, processes=False, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            assert client.submit(urls._in_worker).result()
        begun = time.monotonic()
        match, place = r"used for [12] seconds: it does not answer", f"http://127.0.0.1:{silence}"
        refused(StoreError, match, dfac.as_blocks, f"{place}/{name}")
        assert time.monotonic() - begun < 20
    assert sum(record.name.startswith("daskfactor") for record in caplog.records) <= 1


def test_of_a_table_at_a_url_nothing_is_asked_in_vain(folder, s3):
    asked = []
    fsspec.filesystem("s3").pipe(f"{folder}/t.csv".removeprefix("s3://"), b"a,b\n1.5,2\n3,4\n")

    def note(environ):
        asked.append(environ["PATH_INFO"])

    with s3.failing(note):
        dfac.as_blocks(f"{folder}/t.csv", 1)
    assert all(path.endswith("t.csv") for path in asked), asked


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "an empty text was passed as a path; pass a path or URL"),
        ("~nobody-of-this-name/a.csv", "'~nobody-of-this-name/a.csv' cannot be a path"),
        ("a" * 5000, r"'a{100}\.\.\.' cannot be a path \(file name too long\)"),
        ("a\0b.csv", "cannot be a path .embedded null"),
        (Path("https://b/k.csv"), "pass a URL as text, got the path https:/b/k.csv"),
    ],
)
def test_a_text_that_is_no_path_is_refused(place, message):
    refused(StoreError, message, dfac.as_blocks, place)


def test_a_colon_in_the_name_of_a_folder_divides_nothing(tmp_path):
    missing = f"{tmp_path}/y:z/w.csv"
    refused(DataError, "y:z/w.csv does not exist", dfac.as_blocks, missing)
    assert Location(missing).divide() == (missing, None)
    assert Location(f"{tmp_path}/t.h5:group/a").divide() == (f"{tmp_path}/t.h5", "group/a")


def test_of_files_at_a_url_one_stays_open(monkeypatch):
    made = []

    class Failing(BytesIO):
        def read(self, size=-1):
            raise KeyboardInterrupt

    class System:
        kind = BytesIO

        def open(self, *_, **__):
            made.append(self.kind(b"text"))
            return made[-1]

    system, location = System(), Location("memory://data/a")
    monkeypatch.setattr(Location, "file_system", lambda self: (system, "a"))
    files = [location.open() for _ in range(3)]
    for file in files:
        file.close()
    assert [one.closed for one in made] == [False, True, True]
    assert location.idle_files == made[:1]
    location.idle_files.clear()
    system.kind = Failing
    with pytest.raises(KeyboardInterrupt), location.open() as file:
        file.read()
    assert made[-1].closed
    assert not location.idle_files


def test_the_end_of_a_first_attempt_is_raised():
    def interrupted():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        retry(interrupted, "s3://never-asked-before/v")
