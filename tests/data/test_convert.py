"""Conversion: any source, the same matrix; and whatever goes wrong, nothing half-made is left."""

import errno
import subprocess
import sys
import warnings

import anndata
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sparse as pydata
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.io import mmread, mmwrite

from daskfactor.data import coo as reading
from daskfactor.data import sparse as passes
from daskfactor.data import tables
from daskfactor.data.adapters import Source
from daskfactor.data.convert import Conversion, convert, export
from daskfactor.data.coo import Piece
from daskfactor.data.grid import Grid
from daskfactor.data.places import kind_of
from daskfactor.data.sources import as_blocks
from daskfactor.data.statistics import SourceInfo
from daskfactor.data.store import StoreWriter
from daskfactor.errors import DataError, DataWarning, OptionError, StoreError
from tests.refusals import refused
from tests.tiers import FULL

QUIET = {"progressbar": False, "unstored": "zero"}
CHANGED = "convert it again when nobody writes to it"


def matrix(rows=40, cols=25):
    rng = np.random.default_rng(8)
    dense = rng.poisson(3.0, (rows, cols)) * (rng.random((rows, cols)) < 0.3)
    dense[rng.permutation(rows)[:cols], np.arange(cols)] = 9
    return sparse.csr_array(dense.astype(np.float32))


def same(data, wanted):
    found = data.observed_sparse()
    return found.shape == wanted.shape and (found != wanted).nnz == 0


def sources(folder, wanted):
    """The same matrix in every shape that keeps positions."""
    coo = wanted.tocoo()
    obs = pd.DataFrame(index=[f"c{n}" for n in range(wanted.shape[0])])
    for name, form in (("csr", sparse.csr_matrix(wanted)), ("csc", sparse.csc_matrix(wanted))):
        made = anndata.AnnData(form, obs=obs, layers={"twice": 2 * form})
        made.write_h5ad(folder / f"{name}.h5ad")
    mmwrite(folder / "m.mtx", coo)
    sparse.save_npz(folder / "scipy.npz", wanted)
    narrow = {"indices": wanted.indices.astype("u2"), "indptr": wanted.indptr.astype("u4")}
    np.savez(folder / "parts.npz", data=wanted.data, shape=wanted.shape, **narrow)
    np.savez(folder / "coo.npz", row=coo.row, col=coo.col, data=coo.data, shape=wanted.shape)
    convert(wanted, folder / "other.zarr", blocks=3, balance=True, **QUIET)
    return {
        "csr": wanted,
        "csc matrix": sparse.csc_matrix(wanted),
        "coo": coo,
        "pydata": pydata.COO.from_scipy_sparse(coo),
        "anndata": anndata.AnnData(sparse.csr_matrix(wanted), obs=obs),
        "blocks": as_blocks(wanted, 4, unstored="zero"),
        "a store": folder / "other.zarr",
        "h5ad": folder / "csr.h5ad",
        "h5ad by columns": str(folder / "csc.h5ad"),
        "mtx": folder / "m.mtx",
        "npz of scipy": folder / "scipy.npz",
        "npz of parts": folder / "parts.npz",
        "npz of triples": folder / "coo.npz",
    }


@pytest.mark.quick("7")
@pytest.mark.parametrize("piece", [7, 2**20])
def test_every_source_gives_the_same_store(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(reading, "PIECE", piece)
    wanted = matrix()
    prints = set()
    for name, source in sources(tmp_path, wanted).items():
        done = convert(source, tmp_path / "s.zarr", blocks=3, overwrite=True, **QUIET)
        data = as_blocks(str(tmp_path / "s.zarr"), allow_empty=True)
        assert same(data, wanted), name
        assert done.n_stored == wanted.nnz, name
        prints.add(data.fingerprint)
    assert prints == {as_blocks(wanted, 3, unstored="zero").fingerprint}


entries = st.lists(
    st.tuples(
        st.integers(-3, 12),
        st.sampled_from(["x", "y", "zebra", "é", "x10", "x9"]),
        st.sampled_from([0.0, 1.0, 2.5, -4.0, np.nan]),
    ),
    min_size=1,
    max_size=60,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30 if FULL else 15
)
@given(
    lines=entries,
    unstored=st.sampled_from(["zero", "missing"]),
    balance=st.booleans(),
    blocks=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "float64"]),
    on_disk=st.booleans(),
    kind=st.sampled_from(["parquet", "csv"]),
)
def test_any_table_round_trips(tmp_path, lines, unstored, balance, blocks, dtype, on_disk, kind):
    frame = pd.DataFrame(lines, columns=["r", "c", "v"])
    path = tmp_path / f"t.{kind}"
    frame.to_parquet(path) if kind == "parquet" else frame.to_csv(path, index=False)
    rows, cols = sorted(set(frame.r)), sorted(set(frame.c))
    cells = {}
    for row, col, value in lines:
        cell = rows.index(row), cols.index(col)
        cells[cell] = value + (cells.get(cell, 0) if unstored == "zero" else 0)
    wanted = np.full((len(rows), len(cols)), 0.0 if unstored == "zero" else np.nan)
    for cell, value in cells.items():
        wanted[cell] = value
    options = {"blocks": min(blocks, *wanted.shape), "balance": balance, "dtype": dtype}
    options |= {"unstored": unstored, "overwrite": True, "progressbar": False}
    options["memory_limit"] = 0 if on_disk else None
    if np.isnan(wanted).all():
        refused(DataError, "are missing", convert, path, tmp_path / "s.zarr", **options)
        return
    with warnings.catch_warnings(action="ignore", category=DataWarning):
        done = convert(path, tmp_path / "s.zarr", **options)
    data = as_blocks(tmp_path / "s.zarr", allow_empty=True, dtype=dtype)
    np.testing.assert_array_equal(data.to_numpy(), wanted.astype(dtype))
    assert done.n_duplicates == len(lines) - len(cells)
    assert data.labels.col_coords["c"].tolist() == cols
    assert data.row_order is None or balance


def test_the_last_one_is_the_last_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PIECE", 5)
    monkeypatch.setattr(passes, "deal_threads", lambda: 4)
    times, source = np.arange(200), tmp_path / "t.parquet"
    pq.write_table(pa.table({"r": times % 3, "c": times % 2, "v": times}), source)
    options = {"unstored": "missing", "overwrite": True, "progressbar": False}
    said = "194 entries name a cell that was named before; the last"
    for limit in (None, 0):
        with pytest.warns(DataWarning, match=said):
            done = convert(source, tmp_path / "s.zarr", memory_limit=limit, **options)
        assert done.n_duplicates == 194
        found = as_blocks(str(tmp_path / "s.zarr"), allow_empty=True).to_numpy()
        assert found.tolist() == [[198, 195], [196, 199], [194, 197]]


def test_many_duplicates_do_not_make_large_chunks(tmp_path):
    rng = np.random.default_rng(0)
    table = {"r": rng.integers(0, 20, 200_000), "c": rng.integers(0, 20, 200_000)}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    done = convert(tmp_path / "t.parquet", tmp_path / "s.zarr", compression="none", **QUIET)
    assert done.n_stored == 400
    assert done.nbytes < 200_000
    assert as_blocks(str(tmp_path / "s.zarr"), allow_empty=True).total == 200_000


def test_a_choice_that_was_made_is_named(tmp_path):
    with pytest.warns(DataWarning, match="taken to be observed zeros"):
        done = convert(matrix(), tmp_path / "s.zarr", progressbar=False)
    assert done.unstored == "zero"
    nan = pydata.COO([[0, 1], [0, 1]], [1.0, 2.0], shape=(2, 2), fill_value=np.nan)
    assert convert(nan, tmp_path / "n.zarr", progressbar=False).unstored == "missing"
    again = convert(tmp_path / "n.zarr", tmp_path / "m.zarr", progressbar=False)
    assert again.unstored == "missing"


def test_positions_with_a_shape(tmp_path):
    pq.write_table(pa.table({"r": [0, 3], "c": [1, 0], "v": [1, 2]}), tmp_path / "t.parquet")
    convert(tmp_path / "t.parquet", tmp_path / "s.zarr", shape=(5, 2), **QUIET)
    data = as_blocks(str(tmp_path / "s.zarr"), allow_empty=True)
    assert data.shape == (5, 2)
    assert not data.labels.row_coords
    texts = "user,item,value\n2020-01-01,1,1\n2020-01-02,2,2\n2020-01-02,1,3\n"
    (tmp_path / "t.csv").write_text(texts)
    for source, shape, error, message in (
        (tmp_path / "t.parquet", (2, 2), DataError, "in row 3, but the matrix has rows 0 to 1"),
        (tmp_path / "t.csv", (5, 5), DataError, "whole numbers"),
        (matrix(), (2, 2), OptionError, "shape is"),
    ):
        refused(error, message, convert, source, tmp_path / "x.zarr", shape=shape, **QUIET)
        assert not (tmp_path / "x.zarr").exists()


def test_bad_values_name_their_cell(tmp_path):
    source, target = tmp_path / "t.parquet", tmp_path / "s.zarr"
    for value, message, options in (
        (np.inf, "inf", {}),
        (np.inf, "inf", {"dtype": "float64", "balance": True}),
        (1e300, r"1e\+300, outside the range of float32", {}),
    ):
        pq.write_table(pa.table({"user": ["b", "a"], "film": [5, 6], "v": [1.0, value]}), source)
        match = rf"row 0 \(a\), column 1 \(6\) is {message}"
        refused(DataError, match, convert, source, target, **QUIET | options)
        assert [*tmp_path.iterdir()] == [source]


def test_options_are_checked_before_anything_is_read(tmp_path):
    for source, options, error, message in (
        (matrix(), {"dtype": "int8"}, OptionError, "dtype must be"),
        (matrix(), {"unstored": "what"}, OptionError, "unstored must be"),
        (matrix(), {"compression": "zip"}, OptionError, 'must be "lz4", "zstd" or "none", got'),
        (matrix(), {"shape": (0, 3)}, OptionError, "shape must be"),
        (matrix(), {"blocks": 1000}, OptionError, "blocks must be"),
        (matrix(), {"blocks": Grid.even((5, 5), 2)}, OptionError, "is for a matrix of shape"),
        (matrix(), {"memory_limit": -1}, OptionError, "memory_limit must be"),
        (tmp_path / "none.csv", {}, DataError, "does not exist"),
        (np.ones((2, 2)), {}, DataError, "is dense"),
        (as_blocks(np.ones((2, 2))), {}, DataError, "are dense"),
        (sparse.csr_array((3, 3)), {}, DataError, "no entries"),
        (object(), {}, DataError, "cannot be read"),
    ):
        refused(error, message, convert, source, tmp_path / "s.zarr", **QUIET | options)
    assert not list(tmp_path.iterdir())


def test_only_our_own_stores_are_replaced(tmp_path):
    place = tmp_path / "s.zarr"
    convert(matrix(), place, **QUIET)
    refused(StoreError, "exists already", convert, matrix(), place, **QUIET)
    convert(2 * matrix(), place, overwrite=True, **QUIET)
    assert same(as_blocks(str(place), allow_empty=True), 2 * matrix())
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("all of it")
    for wrong in (precious, precious / "thesis.txt"):
        refused(StoreError, "is left alone", convert, matrix(), wrong, overwrite=True, **QUIET)
    assert (precious / "thesis.txt").read_text() == "all of it"
    (tmp_path / "empty").mkdir()
    convert(matrix(), tmp_path / "empty", **QUIET)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), ValueError()]
)
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, error, existing):
    place = tmp_path / "s.zarr"
    if existing:
        convert(matrix(), place, **QUIET)
    calls, write = [], StoreWriter.put

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) >= 3:
            raise error
        write(self, *arguments)

    monkeypatch.setattr(StoreWriter, "put", failing)
    of_disk = isinstance(error, OSError)
    kind, match = (StoreError, "there is no room left") if of_disk else (type(error), None)
    refused(kind, match, convert, 3 * matrix(), place, blocks=2, overwrite=True, **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == (["s.zarr"] if existing else [])
    if existing:
        assert same(as_blocks(str(place), allow_empty=True), matrix())


KILLED = """
import os, signal, sys
from scipy import sparse
from daskfactor.data.convert import convert
from daskfactor.data.store import StoreWriter
calls = []
def kill(self, *arguments):
    calls.append(1)
    write(self, *arguments)
    if len(calls) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
write, StoreWriter.put = StoreWriter.put, kill
convert(sparse.load_npz(sys.argv[1]), sys.argv[2], blocks=2, unstored="zero", progressbar=False)
"""


def test_a_killed_conversion_leaves_nothing_that_opens(tmp_path):
    sparse.save_npz(tmp_path / "m.npz", matrix())
    folder, place = tmp_path / "place", str(tmp_path / "place" / "s.zarr")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "m.npz"), place]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert [left.name for left in folder.iterdir()] == [".s.zarr.partial"]
    refused(StoreError, None, as_blocks, place, allow_empty=True)
    convert(matrix(), place, **QUIET)
    assert [path.name for path in folder.iterdir()] == ["s.zarr"]
    assert same(as_blocks(place, allow_empty=True), matrix())


def die(*_):
    raise KeyboardInterrupt


def test_elsewhere_half_a_store_does_not_open(monkeypatch):
    """A store at a URL is made in its place; a process that dies leaves it without its end."""
    place = "memory://killed/s.zarr"
    monkeypatch.setattr(StoreWriter, "abort", lambda self: None)
    monkeypatch.setattr(StoreWriter, "finish", die)
    refused(KeyboardInterrupt, None, convert, matrix(), place, **QUIET)
    refused(StoreError, "unfinished", as_blocks, place, allow_empty=True)
    monkeypatch.undo()
    assert convert(matrix(), place, overwrite=True, **QUIET).nbytes > 0
    assert same(as_blocks(place, allow_empty=True), matrix())


@pytest.mark.parametrize("step", ["put", "finish"])
def test_elsewhere_a_store_stays_until_the_new_one_is_whole(monkeypatch, step):
    folder, files = f"/replaced-{step}", fsspec.filesystem("memory")
    place = f"memory:/{folder}/s.zarr"
    convert(matrix(), place, **QUIET)
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, step, die)
        refused(KeyboardInterrupt, None, convert, 2 * matrix(), place, overwrite=True, **QUIET)
    for wanted in (matrix(), 2 * matrix()):
        assert same(as_blocks(place, allow_empty=True), wanted)
        assert [own["name"] for own in files.ls(folder)] == [f"{folder}/s.zarr"]
        convert(2 * matrix(), place, overwrite=True, **QUIET)


@pytest.mark.parametrize("error", [OSError(5, "the network is down"), KeyboardInterrupt()])
def test_elsewhere_a_replacement_that_cannot_be_put_in_place_is_kept(monkeypatch, error):
    folder, files = f"/unreachable-{type(error).__name__}", fsspec.filesystem("memory")
    place = f"memory:/{folder}/s.zarr"
    convert(matrix(), place, **QUIET)

    def fail(*_, **options):
        raise error

    monkeypatch.setattr(type(files), "cp_file", fail)
    match = f"the new store is whole at memory:/{folder}" if isinstance(error, OSError) else None
    kinds = StoreError, KeyboardInterrupt
    told = refused(kinds, match, convert, 2 * matrix(), place, overwrite=True, **QUIET)
    (new,) = (own["name"] for own in files.ls(folder) if own["name"].endswith(".partial"))
    assert same(as_blocks(f"memory:/{new}", allow_empty=True), 2 * matrix())
    assert match is None or new in told


def test_elsewhere_what_another_process_has_begun_is_kept(monkeypatch):
    begin = StoreWriter.begin
    for overwrite, told in ((False, "exists already"), (True, "by another process meanwhile")):
        place = f"memory://both/{overwrite}.zarr"
        if overwrite:
            convert(matrix(), place, **QUIET)

        def late(self, *args):
            monkeypatch.undo()
            convert(3 * matrix(), place, overwrite=overwrite, **QUIET)  # noqa: B023
            begin(self, *args)

        monkeypatch.setattr(StoreWriter, "begin", late)
        refused(StoreError, told, convert, 2 * matrix(), place, overwrite=overwrite, **QUIET)
        assert kind_of(place) == "blocks"
        assert same(as_blocks(place, allow_empty=True), 3 * matrix())


def pieces_of(first, second):
    """Pieces of a source that somebody writes to between its two readings."""

    passes = iter((first, second))

    def pieces(add):
        rows, cols = (np.array(side, np.int64) for side in next(passes))
        yield Piece(rows, cols, np.ones(rows.size))

    return pieces


def broken(add):
    raise OSError(errno.EIO, "Input/output error")
    yield


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (pieces_of([[0, 1], [0, 1]], [[0, 1, 2], [0, 1, 1]]), CHANGED),
        (pieces_of([[0, 1], [0, 1]], [[0, 7], [0, 1]]), CHANGED),
        (pieces_of([[0, 1], [0, 1]], [[0], [0]]), CHANGED),
        (broken, r"reading t.csv failed after 0 pieces: OSError"),
    ],
    ids=["more", "elsewhere", "fewer", "broken"],
)
def test_trouble_in_a_source_is_noticed(tmp_path, monkeypatch, pieces, message):
    source = Source(SourceInfo("csv", "t.csv", True), pieces=pieces)
    monkeypatch.setattr("daskfactor.data.convert._sparse_source", lambda *_: source)
    refused(StoreError, message, convert, "t.csv", tmp_path / "s.zarr", **QUIET)


def test_balance_is_invisible_and_even(tmp_path):
    rng = np.random.default_rng(5)
    cells = (60 * rng.random(4000) ** 3).astype(int), rng.integers(0, 50, 4000)
    skewed = sparse.coo_array((np.ones(4000, "f4"), cells), shape=(60, 50))
    plain = convert(skewed, tmp_path / "p.zarr", blocks=5, **QUIET)
    even = convert(skewed, tmp_path / "b.zarr", blocks=5, balance=True, **QUIET)
    assert even.imbalance < 1.3 < plain.imbalance
    stores = [as_blocks(str(tmp_path / name), allow_empty=True) for name in ("p.zarr", "b.zarr")]
    assert same(stores[1], stores[0].observed_sparse())
    wanted = as_blocks(skewed, 5, unstored="zero", balance=True)
    assert stores[1].fingerprint == wanted.fingerprint
    np.testing.assert_array_equal(stores[1].row_order, wanted.row_order)


def test_stores_do_not_depend_on_threads_or_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 16)
    prints = set()
    for threads, limit in ((1, None), (4, None), (4, 0)):
        monkeypatch.setattr(passes, "deal_threads", lambda threads=threads: threads)
        convert(matrix(), tmp_path / "s.zarr", overwrite=True, memory_limit=limit, **QUIET)
        files = sorted(p for p in (tmp_path / "s.zarr").rglob("*") if p.is_file())
        prints.add(tuple((p.name, p.read_bytes()) for p in files))
    assert len(prints) == 1


@pytest.mark.quick("False-m.npz", "True-m.mtx", "False-m.mtx.gz", "True-m.h5ad")
@pytest.mark.parametrize("name", ["m.npz", "m.mtx", "m.mtx.gz", "m.h5ad"])
@pytest.mark.parametrize("balance", [False, True])
def test_export_round_trips(tmp_path, name, balance):
    table = pa.table({"user": ["b", "a", "é", "b"], "film": [9, 7, 7, 30], "v": [1.5, 2, 3, -1]})
    pq.write_table(table, tmp_path / "t.parquet")
    options = {"progressbar": False, "blocks": 2, "unstored": "missing"}
    convert(tmp_path / "t.parquet", tmp_path / "a.zarr", balance=balance, **options)
    export(tmp_path / "a.zarr", tmp_path / name)
    refused(StoreError, "exists already", export, tmp_path / "a.zarr", tmp_path / name)
    export(as_blocks(tmp_path / "a.zarr"), tmp_path / name, overwrite=True)
    convert(tmp_path / name, tmp_path / "b.zarr", **options)
    one, two = (as_blocks(str(tmp_path / f"{n}.zarr"), allow_empty=True) for n in "ab")
    assert same(two, one.observed_sparse())
    for side in ("row", "col"):
        (wanted,) = getattr(one.labels, f"{side}_coords").values()
        (found,) = getattr(two.labels, f"{side}_coords").values()
        assert list(map(str, found)) == list(map(str, wanted))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_export_touches_no_file_that_it_does_not_replace(tmp_path):
    table, target = tmp_path / "t.csv", tmp_path / "m.mtx"
    table.write_text("user,film,v\nb,x,1.5\na,y,2\n")
    labels, none, beside = (tmp_path / n for n in ("labels.zarr", "none.zarr", "m.rows.txt"))
    convert(table, labels, progressbar=False, unstored="missing")
    convert(matrix(), none, **QUIET)
    beside.write_text("precious")
    refused(StoreError, r"m\.rows\.txt exists already", export, labels, target)
    match = r"m\.rows\.txt would be read as labels of"  # of what has none
    for overwrite in (False, True):
        refused(StoreError, match, export, none, target, overwrite=overwrite)
    assert beside.read_text() == "precious"
    assert not target.exists()
    export(none, tmp_path / "m.npz")
    export(labels, target, overwrite=True)
    assert beside.read_text() == "a\nb\n"


@pytest.mark.filterwarnings("ignore:The default value for `spmatrix`")
def test_exports_are_what_others_read(tmp_path):
    convert(matrix(), tmp_path / "s.zarr", **QUIET)
    readers = {"npz": sparse.load_npz, "mtx": mmread, "h5ad": anndata.read_h5ad}
    for ending, read in readers.items():
        export(tmp_path / "s.zarr", tmp_path / f"m.{ending}")
        found = read(tmp_path / f"m.{ending}")
        assert (sparse.csr_array(getattr(found, "X", found)) != matrix()).nnz == 0
    refused(OptionError, "export writes", export, tmp_path / "s.zarr", tmp_path / "m.xlsx")
    refused(DataError, "dense", export, as_blocks(np.ones((2, 2))), tmp_path / "d.npz")


def test_labels_of_every_kind_come_back(tmp_path):
    days = np.array(["2024-01-01", "2024-01-02"], "M8[ns]")
    coords = {"time": days, "open": ("time", [True, False])}
    coords |= {"site": ["ü", ""], "height": ("site", [1.5, np.nan])}
    values = pydata.COO([[0, 1], [0, 1]], [1.0, 2.0], shape=(2, 2))
    array = xr.DataArray(values, coords, ("time", "site"), name="visits")
    convert(array, tmp_path / "s.zarr", balance=True, **QUIET)
    labels = as_blocks(str(tmp_path / "s.zarr"), allow_empty=True).labels
    assert (labels.row_dim, labels.col_dim, labels.name) == ("time", "site", "visits")
    for name, found in {**labels.row_coords, **labels.col_coords}.items():
        np.testing.assert_array_equal(found, array[name].to_numpy())
        assert found.dtype.kind == array[name].dtype.kind


def test_the_report_and_the_progress_bar(tmp_path, capsys):
    done = convert(matrix(), tmp_path / "s.zarr", blocks=2, unstored="zero")
    assert isinstance(done, Conversion)
    assert (done.location, done.shape) == (str(tmp_path / "s.zarr"), (40, 25))
    assert done.n_read == done.n_stored == matrix().nnz
    assert done.entries_per_second == done.n_read / done.seconds
    files = [path for path in (tmp_path / "s.zarr").rglob("*") if path.is_file()]
    assert done.nbytes == sum(path.stat().st_size for path in files)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(phase in captured.err for phase in ("keys", "entries", "blocks"))
