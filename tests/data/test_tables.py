"""Tables of every dialect and matrices in files; and what is said of those that are broken."""

import bz2
import datetime as dt
import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor import as_blocks, convert
from daskfactor.data import coo as keys
from daskfactor.data import matrix_market, tables
from daskfactor.data.opening import load
from daskfactor.data.store import BlockStore
from daskfactor.data.tables import ReadOptions, read_table
from daskfactor.errors import DaskfactorError, DataError, DataWarning, OptionError, StoreError
from tests.data.written import names_of
from tests.data.written import written as write
from tests.refusals import refused

pytestmark = pytest.mark.libraries

LINES = [("b", 30, 1.5), ("a", 7, 2.0), ("b", 7, 4.0), ("c", 1000, 0.5)]
TEXTS = [(own, header, None) for own in (",", "\t", ";", "|", " ") for header in (True, False)]
DENSE = np.array([[2.0, 0, 0], [4.0, 1.5, 0], [0, 0, 0.5]])
VALUES = np.array([[1.0, 2.0], [np.nan, 4.5]])
MM = "%%MatrixMarket matrix"
NAMES, NUMBERS = ["b", "a", "b", "c"], [2, 1, 2, 3]
KEYS = {
    "string": pa.array(NAMES),
    "large_string": pa.array(NAMES, pa.large_string()),
    "dictionary": pa.array(NAMES).dictionary_encode(),
    "int32": pa.array(NUMBERS, pa.int32()),
    "uint64": pa.array(NUMBERS, pa.uint64()),
}


def text(header=True, separator=","):
    lines = [separator.join(("user", "film", "stars"))] if header else []
    lines += [separator.join(map(str, line)) for line in LINES]
    return "\n".join(lines) + "\n"


def converted(source, **options):
    options = {"unstored": "zero", "blocks": 1, "progressbar": False} | options
    target = source.with_name("converted.zarr")
    convert(source, target, overwrite=True, **options)
    return as_blocks(str(target), allow_empty=True)


@pytest.mark.parametrize(
    ("separator", "header", "pack"), [*TEXTS, ("\t", True, gzip), ("\t", True, bz2)]
)
def test_separators_headers_and_packed_text(tmp_path, separator, header, pack):
    content = text(header, separator).encode()
    path = tmp_path / ("t.csv" if pack is None else f"t.tsv.{'gz' if pack is gzip else 'bz2'}")
    path.write_bytes(content if pack is None else pack.compress(content))
    data = converted(path)
    np.testing.assert_array_equal(data.to_numpy(), DENSE)
    labels = data.labels
    assert (labels.row_dim, labels.col_dim) == (("user", "film") if header else ("row", "column"))
    assert names_of(data) == [["a", "b", "c"], [7, 30, 1000]]


def test_comments_quotes_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path, "t.csv", '% made by hand\n# really\n"user","film","stars"\n"a, b",1,2\n')
    assert names_of(converted(path)) == [["a, b"], [1]]
    marked = write(tmp_path, "m.csv", "\ufeff" + text())
    assert converted(marked).labels.row_dim == "user"


def test_columns_by_name_by_position_and_lines_that_are_counted(tmp_path):
    path = write(tmp_path, "t.csv", "when,stars,film,user\n1,2.5,10,7\n2,3.5,11,7\n")
    named = {"rows": "user", "columns": "film", "values": "stars"}
    placed = {"rows": 3, "columns": 2, "values": 1}
    for choice in (named, placed, {name: str(at) for name, at in placed.items()}):
        np.testing.assert_array_equal(converted(path, **choice).to_numpy(), [[2.5, 3.5]])
    timed = write(tmp_path, "t.csv", "user,page,time\nu,x,1\nu,x,2\nv,x,3\nu,y,4\n")
    pairs = write(tmp_path, "p.csv", "user,page\nu,x\nu,x\nv,x\nu,y\n")
    for path, options in ((timed, {"values": False}), (pairs, {})):
        np.testing.assert_array_equal(converted(path, **options).to_numpy(), [[2, 1], [1, 0]])


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({"values": "star"}, DataError, "no column 'star' for values; did you mean 'stars'"),
        ({"rows": "x"}, DataError, "has no column 'x' for rows; it has the columns user, fi"),
        ({"columns": 9}, DataError, "no column at position 9 for columns"),
        ({"columns": "user"}, OptionError, "need different columns, got user, user, stars"),
        (None, DataError, r"no column at position 1 for columns; .* single column"),
    ],
)
def test_a_wrong_name_lists_the_columns(tmp_path, choice, error, message):
    path = write(tmp_path, "t.csv", "user\n1\n" if choice is None else text())
    refused(error, message, converted, path, **choice or {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "is empty"),
        ("t.csv", "user,film,stars\n", "has no entries"),
        ("t.csv", "user,user,stars\n1,2,3\n", "two columns of one name"),
        ("t.csv", "user,film,stars\n1,2,3\n1,2\n", "Expected 3 columns, got 2"),
        ("t.csv", "user,film,stars\n1,2,3\n1,2,good\n", "invalid value 'good'"),
        ("t.csv", "user,film,stars\n1,2,3\n,2,3\n", "nothing in the key column 'user'"),
        ("t.parquet", "PAR1 and then nothing", "cannot be read as a table"),
        ("m.mtx", "1 2 3\n", "is not a Matrix Market file"),
        ("m.mtx", f"{MM} array real general\n1 1\n2\n", "holds a array matrix"),
        ("m.mtx", f"{MM} coordinate complex general\n1 1 1\n1 1 1 1\n", "complex numbers"),
        ("m.mtx", f"{MM} coordinate real general\nx\n", "numbers of rows, columns"),
        ("m.mtx", f"{MM} coordinate real general\n2 2 2\n1 1 1\n", "2 entries, but has 1"),
        ("m.mtx", f"{MM} coordinate real general\n2 2 1\n3 1 1\n", "cannot be read as"),
        ("m.mtx", f"{MM} coordinate real general\n2 2 1\n1 1 x\n", "cannot be read as"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    refused(DataError, message, converted, write(tmp_path, name, content))
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_keys_that_only_look_like_numbers_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BLOCK", 64)
    lines = "".join(f"{number},{number % 3},1\n" for number in range(20))
    for key in ("007", 20 * "9", "x21"):
        path = write(tmp_path, "t.csv", f"user,film,stars\n{lines}{key},1,1\n")
        match = f"'user' of .* begins with whole numbers and has the text '{key}' later; read it"
        refused(DataError, match, converted, path)
    frame = pd.read_csv(path, dtype={"user": str})
    found = names_of(as_blocks(frame, 1, table=True, unstored="zero"))
    assert found == [sorted([*map(str, range(20)), "x21"]), [0, 1, 2]]
    dates = write(tmp_path, "d.csv", "day,film,stars\n2024-01-02,1.5,3\n2024-01-01,1.5,4\n")
    assert names_of(converted(dates)) == [["2024-01-01", "2024-01-02"], ["1.5"]]


def test_empty_values_are_missing_cells(tmp_path):
    path = write(tmp_path, "t.csv", "user,film,stars\na,1,NA\na,2,5\nb,1,\nb,2,1\n")
    data = converted(path)
    np.testing.assert_array_equal(data.to_numpy(), [[np.nan, 5], [np.nan, 1]])
    assert data.n_observed.sum() == 2
    assert converted(path, unstored="missing").n_stored.sum() == 2


@pytest.mark.parametrize("kind", KEYS)
def test_parquet_keys(tmp_path, kind):
    table = pa.table({"user": KEYS[kind], "film": [30, 7, 7, 1000], "stars": [1.5, 2, 4, 0.5]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    data = converted(tmp_path / "t.parquet")
    np.testing.assert_array_equal(data.to_numpy(), DENSE)
    wanted = [1, 2, 3] if "int" in kind else ["a", "b", "c"]
    assert data.labels.row_coords["user"].tolist() == wanted


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 2, None, 4], pa.int8()),
        pa.array([True, False, True, True]),
        pa.array([1.5, 2, None, 4], pa.float64()),
        pa.array([1, 2, 3, 4], pa.float16()),
        pa.array([1, 2, 3, 4], pa.decimal128(5, 2)),
    ],
)
def test_parquet_values(tmp_path, values):
    table = pa.table({"r": [0, 0, 1, 1], "c": [0, 1, 0, 1], "v": values})
    pq.write_table(table, tmp_path / "t.parquet")
    wanted = np.array([np.nan if v is None else float(v) for v in values.to_pylist()])
    np.testing.assert_array_equal(converted(tmp_path / "t.parquet").to_numpy().ravel(), wanted)


def test_a_folder_of_parquet_files(tmp_path):
    folder = tmp_path / "parts"
    (folder / "deep").mkdir(parents=True)
    for number, line in enumerate(LINES):
        path = folder / ("deep" if number % 2 else "") / f"{number}.parquet"
        pq.write_table(pa.table({n: [v] for n, v in zip("ufs", line, strict=True)}), path)
    (folder / "_SUCCESS").write_text("")
    np.testing.assert_array_equal(converted(folder).to_numpy(), DENSE)
    (tmp_path / "empty").mkdir()
    refused(StoreError, "there is nothing of that kind", converted, tmp_path / "empty")


def test_logs_in_a_folder_of_parquet_files_are_no_data(tmp_path):
    """Delta Lake writes checkpoints of its log as Parquet."""
    table = pa.table({"u": [0, 1], "f": [1, 0], "s": [1, 2]})
    for name in ("part", "_delta_log/00000000000000000010.checkpoint", ".hidden/year=2025/part"):
        place = tmp_path / "_lake" / f"{name}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, place)
    files = tables.parquet_files(str(tmp_path / "_lake"))
    assert files == [str(tmp_path / "_lake" / "part.parquet")]


def test_a_folder_without_parquet_files_is_not_searched(tmp_path, monkeypatch):
    """It may be the root of all files; of what lies in it only parts by key are looked into."""
    table = pa.table({"u": [0, 1], "f": [1, 0], "s": [1, 2]})
    for name in ("home/user", "dated/year=2025", "dated/year=2026/month=1"):
        (tmp_path / name).mkdir(parents=True)
        pq.write_table(table, tmp_path / name / "part.parquet")
    dated = sorted(map(str, tmp_path.glob("dated/**/*.parquet")))
    assert tables.parquet_files(str(tmp_path / "dated")) == dated
    monkeypatch.setattr(os, "walk", None)
    seen, listed = [], os.scandir

    def listing(place):
        if not isinstance(place, int):  # a folder of convert's own, which is removed again
            seen.append(str(place))
        return listed(place)

    monkeypatch.setattr(os, "scandir", listing)
    for place in (tmp_path, Path("/")):
        refused(DaskfactorError, None, as_blocks, str(place))
        refused(DaskfactorError, None, convert, place, tmp_path / "s.zarr", progressbar=False)
    assert {own.rstrip("/") for own in seen} <= {"", str(tmp_path)}


@pytest.mark.parametrize(
    ("r", "c", "v", "message"),
    [
        ([1.0], [1], [1.0], "'r' .* holds floating data; keys must be"),
        ([1], [1], ["x"], "'v' .* holds string data; values .*; it has the columns r, c, v$"),
        ([1, 2], [1, None], [1.0, 2.0], "1 lines .* nothing in the key column 'c'"),
        (pa.array([2**63 + 1], pa.uint64()), [1], [1.0], "'r' .* numbers of 2\\*\\*63 or more"),
    ],
)
def test_bad_parquet(tmp_path, r, c, v, message):
    pq.write_table(pa.table({"r": r, "c": c, "v": v}), tmp_path / "t.parquet")
    refused(DataError, message, converted, tmp_path / "t.parquet")


def test_integer_keys_of_several_types_in_a_folder(tmp_path):
    (tmp_path / "t").mkdir()
    large = 2**60
    parts = {"a": (pa.int32(), [2, 1]), "b": (pa.uint64(), [large + 1, large])}
    for part, (kind, rows) in parts.items():
        table = pa.table({"r": pa.array(rows, kind), "c": [1, 2], "v": [1.0, 2.0]})
        pq.write_table(table, tmp_path / "t" / f"{part}.parquet")
    labels = converted(tmp_path / "t", table=True).labels.row_coords["r"]
    assert labels.dtype == np.int64
    assert labels.tolist() == [1, 2, large, large + 1]


@pytest.mark.parametrize("unit", ["day", "s", "ms", "us", "ns"])
def test_dates_are_labels_as_those_of_a_frame(tmp_path, unit):
    kind = pa.date32() if unit == "day" else pa.timestamp(unit)
    days = pa.array([dt.datetime(2024, 1, 2), dt.datetime(1965, 1, 1, 6)], pa.timestamp("s"))
    days = days.cast(kind, safe=False)
    table = pa.table({"c": [0, 1], "day": days, "v": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    found = converted(tmp_path / "t.parquet").labels.col_coords["day"]
    assert found.dtype.kind == "M"
    frame = table.to_pandas()
    with as_blocks(frame.astype({"day": "M8[ns]"}), table=True, unstored="zero") as data:
        assert (found == data.labels.col_coords["day"]).all()


def test_dates_with_a_zone_are_texts(tmp_path):
    days = pa.array([dt.datetime(2024, 1, 2), dt.datetime(2024, 1, 1)], pa.timestamp("s", "UTC"))
    pq.write_table(pa.table({"day": days, "c": [0, 1], "v": [1, 2]}), tmp_path / "t.parquet")
    labels = converted(tmp_path / "t.parquet").labels
    assert labels.row_coords["day"].tolist()[0].startswith("2024-01-01")


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
@pytest.mark.parametrize("chunk", [8, 2**24])
def test_matrix_market(tmp_path, monkeypatch, symmetry, chunk):
    monkeypatch.setattr(matrix_market, "TEXT_CHUNK", chunk)
    path = tmp_path / "m.mtx.gz"
    body = f"{MM} coordinate real {symmetry}\n% a comment\n\n4 4 3\n"
    path.write_bytes(gzip.compress(f"{body}2 1 1.5\n\n  3 1  -2e1\n4 3 1\n".encode()))
    wanted = np.zeros((4, 4))
    wanted[[1, 2, 3], [0, 0, 2]] = [1.5, -20, 1]
    if symmetry != "general":
        wanted += wanted.T * (1 if symmetry == "symmetric" else -1)
    np.testing.assert_array_equal(converted(path).to_numpy(), wanted)


def test_matrix_market_of_a_pattern_without_a_last_newline(tmp_path):
    path = write(tmp_path, "m.mtx", f"{MM} coordinate pattern general\n2 3 2\n1 3\n2 1")
    np.testing.assert_array_equal(converted(path).to_numpy(), [[0, 0, 1], [1, 0, 0]])


def numbers(*values):
    return np.array(values, np.int64)


def texts(codes, names):
    return pd.Categorical.from_codes(codes, names)


def learnt(*parts, **options):
    axis = keys.Axis("row", **options)
    for part in parts:
        axis.learn(part)
    return axis, *axis.finish()


def test_number_axes_learn_any_keys():
    rng = np.random.default_rng(0)
    for spread in (1, 50, 10**12):
        parts = [rng.integers(-spread, spread, 30) for _ in range(20)]
        axis, found, named = learnt(numbers(), *parts)
        labels, counts = np.unique(np.concatenate(parts), return_counts=True)
        np.testing.assert_array_equal(named, labels)
        np.testing.assert_array_equal(found, counts)
        for part in parts:
            np.testing.assert_array_equal(labels[axis.positions(part)], part)
        for unknown in (-spread - 1, spread, -(2**63), 2**63 - 1):
            match = "has a row key that was not there"
            refused(StoreError, match, axis.positions, numbers(unknown))
    np.testing.assert_array_equal(learnt(numbers(2, 0, 1))[2], [0, 1, 2])  # as others are


@pytest.mark.parametrize("kind", ["int64", "uint64", "int8", "uint8"])
def test_number_axes_take_the_ends_of_a_type(kind):
    ends = np.iinfo(kind)
    for edge, inwards in ((ends.min, 1), (ends.max, -1)):
        part = np.array([edge, int(edge) + 2 * inwards, edge], kind)
        axis, counts, named = learnt(part)
        assert sorted(counts.tolist()) == [1, 2]
        assert named[axis.positions(part)].tolist() == part.tolist()


@pytest.mark.parametrize("first", [numbers(0), texts([0], ["a"])])
def test_axes_refuse_the_other_kind(first):
    other = numbers(0) if isinstance(first, pd.Categorical) else texts([0], ["a"])
    axis = keys.Axis("row")
    axis.learn(first)
    refused(DataError, "in another", axis.learn, other)
    axis.finish()
    refused(DataError, "in another", axis.positions, other)
    refused(DataError, "in another", keys.Axis("row", 1).learn, texts([0], ["a"]))


def test_axes_refuse_positions_outside_and_ignore_names_that_no_entry_has():
    axis = keys.Axis("row", 2)
    axis.learn(numbers(1, 1, 0))
    assert axis.finish()[0].tolist() == [1, 2]
    for wrong in (-1, 2):
        match = f"an entry is in row {wrong}, but the matrix has rows"
        refused(DataError, match, axis.learn, numbers(0, wrong))
    axis, _, named = learnt(texts([2, 0], ["b", "unused", "a"]))
    assert named.tolist() == ["a", "b"]
    assert axis.positions(texts([1, 1], ["?", "b"])).tolist() == [1, 1]


def test_a_matrix_as_text_needs_no_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    plain, gz, zst, long = (tmp_path / f"{n}" for n in ("m.csv", "m.csv.gz", "m.csv.zst", "l.csv"))
    plain.write_text("1,2,nan,4,1\n3,0,1,2,1\n2,2,5,1,1\n")
    gz.write_bytes(gzip.compress(plain.read_bytes()))
    long.write_text("user,item,rating\nann,dune,4\nbob,dune,3\nann,emma,1\n")
    zst.write_bytes(b"")
    for path in (plain, gz):
        np.testing.assert_array_equal(load(str(path))[1], [3, 0, 1, 2, 1])
    for path in (long, zst):
        wanted = ReadOptions(table=path == long)
        refused(OptionError, r"pip install 'daskfactor\[tables\]'", load, str(path), wanted)


# -- matrices in files of every kind -------------------------------------------------------


def test_npy_and_npz_alone_or_named(tmp_path):
    path = tmp_path / "v.npz"
    np.save(tmp_path / "v.npy", VALUES)
    np.savez(path, a=VALUES, b=VALUES + 1)
    np.savez(tmp_path / "w.npz", a=VALUES)
    for name, wanted in (("v.npy", VALUES), ("w.npz", VALUES), ("v.npz:b", VALUES + 1)):
        np.testing.assert_array_equal(load(f"{tmp_path}/{name}"), wanted)
    refused(DataError, "no array 'c', only a, b", load, f"{path}:c")


@pytest.mark.parametrize("form", [2, 3])
def test_arrays_of_a_zarr_group_go_by_their_names(tmp_path, form):
    path = tmp_path / "v.zarr"
    group = zarr.create_group(path, zarr_format=form)
    for name in ("a", "b"):
        group.create_array(name, data=VALUES)
    found = dfac.as_blocks(load(f"{path}:b"), 1)
    np.testing.assert_array_equal(found.to_numpy(), VALUES)
    match = r"holds 2 zarr arrays \(a, b\); name one as .*:NAME"
    for wrong in (path, f"{path}:c"):
        refused(DataError, match, load, str(wrong))


@pytest.mark.parametrize("name", ["v.npy", "v.npz"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"anything at all"])
def test_empty_and_cut_off_arrays_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(DataError, r"not a readable NumPy (array file|archive)", load, str(tmp_path / name))


@pytest.mark.parametrize("text", ["1,2\n,4.5\n", "1;2\n\nNA;4.5", "1\t2\nnan\t4.5\n", "1 2\n? 4.5"])
def test_bare_tables(tmp_path, text):
    np.testing.assert_array_equal(read_table(write(tmp_path, "t.csv", text)), VALUES)


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
    result = read_table(write(tmp_path, "t.csv", text))
    np.testing.assert_array_equal(result.values, VALUES)
    assert result.dims == ("row", "column")
    for dim, names in (("row", rows), ("column", columns)):
        assert (list(result[dim].values) if dim in result.coords else None) == names


def test_columns_named_by_rising_numbers_are_told_of(tmp_path):
    with pytest.warns(DataWarning, match="first line of .* taken for names .* write NaN"):
        found = read_table(write(tmp_path, "t.csv", ",400.5,401\n0,1,2\n1,,4.5\n"))
    np.testing.assert_array_equal(found.values, VALUES)
    assert list(found["column"].values) == ["400.5", "401"]


@pytest.mark.parametrize("first", [",5,2", "NaN,2,5", ",2,2", ",2,", ",,3"])
def test_a_missing_cell_begins_a_line_of_data(tmp_path, first):
    assert read_table(write(tmp_path, "t.csv", f"{first}\n1,2,3\n")).shape == (2, 3)
    path, given = write(tmp_path, "b.csv", "\n1,2\n,4.5\n"), {"table": True, "unstored": "zero"}
    refused(DataError, "1 lines of .* have nothing in the key", as_blocks, path, **given)


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
        ("x,y\n1,2\n3,four\n", "line 3, field 2: 'four' is not a number$"),
        (
            "user,film,stars\nu1,f1,5\n",
            "'f1' is not a number; for a table with a line for each entry",
        ),
        ("x,y,z\n1,2\n", "3 names in its header, but 2 columns"),
    ],
)
def test_broken_tables_say_where(tmp_path, text, message):
    refused(DataError, message, read_table, write(tmp_path, "t.csv", text))


def test_zarr_arrays_and_stores_of_any_name_are_left_to_the_library(tmp_path):
    array, store = tmp_path / "v.zarr", tmp_path / "t.zarr.blocks"
    zarr.save_array(array, VALUES)
    dfac.convert(sparse.eye_array(4, format="csr"), store, unstored="zero", progressbar=False)
    assert isinstance(load(str(array)), zarr.Array)
    assert isinstance(load(str(store)), BlockStore)


@pytest.mark.parametrize("name", ["v.nc", "v.zarr"])
def test_labelled_files(tmp_path, name):
    path, variables = tmp_path / name, {"v": (("time", "band"), VALUES)}
    dataset = xr.Dataset(variables | {"line": ("band", [1.0, 2.0])}, {"band": [450.0, 550.0]})
    if name == "v.nc":
        dataset.to_netcdf(path, engine="h5netcdf")
    else:
        dataset.to_zarr(path, consolidated=False)
    only = load(str(path))
    assert only.dims == ("time", "band")
    np.testing.assert_array_equal(only.values, VALUES)
    xr.testing.assert_equal(load(f"{path}:v").load(), only.load())
    refused(DataError, "no variable 'w', only line, v", load, f"{path}:w")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v.zarr", r"2 variables of two dimensions or more \(a, b\)"),
        ("none.npy", "does not exist"),
        ("v.jpg", r"v\.jpg cannot be read; give \.npy.*\(\.nc\); if it is a table"),
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
    refused(DataError, message, load, f"{tmp_path}/{name}")


@pytest.mark.parametrize("option", [{"rows": "u"}, {"layer": "counts"}, {"table": True}])
def test_a_name_that_is_misspelt_is_said_before_its_options(tmp_path, option):
    refused(DataError, "missing.csv does not exist", as_blocks, tmp_path / "missing.csv", **option)


def test_a_folder_named_like_a_file_is_told(tmp_path):
    (tmp_path / "v.csv").mkdir()
    (tmp_path / "v.csv" / "part-0.csv").write_text("1,2\n3,4\n")
    refused(DataError, "v.csv is a folder without .*; pass a file", as_blocks, tmp_path / "v.csv")


def test_codes_keep_their_leading_zeros(tmp_path):
    path = write(tmp_path, "t.csv", "user,film,stars\n007,1,5\n7,2,4\n012,1,3\n")
    assert names_of(converted(path)) == [["007", "012", "7"], [1, 2]]
    dense = write(tmp_path, "d.csv", "place,a,b\n02134,1.5,2\n10001,3,4\n")
    with pytest.warns(DataWarning, match="begins with 0 as codes do"):
        found = as_blocks(dense, 1, table=False)
    assert names_of(found) == [["02134", "10001"], ["a", "b"]]
    padded = write(tmp_path, "p.csv", "05,12,03,1.5,1\n07,01,10,2,1\n")
    assert as_blocks(padded, 1).shape == (2, 5)
    codes = ["1212092628029698048", "12120926280296980481"]
    large = write(tmp_path, "s.csv", "user,film,stars\n{},1,5\n{},2,4\n".format(*codes))
    assert names_of(converted(large))[0] == codes


@pytest.mark.parametrize("code", [-9, -999])
def test_a_code_for_missing_cells_is_told(tmp_path, code):
    path = write(tmp_path, "t.csv", f"a,b\n1.5,2\n{code},4\n3,{code}\n")
    with pytest.warns(DataWarning, match=rf"2 cells are {code}, and no other value is negative"):
        data = as_blocks(path, 1)
    assert data.minimum == code
    as_blocks(np.array([[1.0, code], [-2.0, 3.0]]), 1)  # a negative value like others
    as_blocks(np.array([[1.0, -1.0], [2.0, 3.0]]), 1)


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_header_of_positions_is_no_row(tmp_path, separator):
    values = np.random.default_rng(0).random((4, 5))
    path = tmp_path / "t.csv"
    pd.DataFrame(values).to_csv(path, index=False, sep=separator)
    with pytest.warns(DataWarning, match="names of columns, because it counts from 0 on"):
        np.testing.assert_allclose(as_blocks(path, 1, dtype="float64").to_numpy(), values)


def test_times_of_two_units_are_not_mixed(tmp_path):
    for unit in ("us", "ms"):
        days = pa.array([dt.datetime(2024, 1, 2)], pa.timestamp(unit))
        pq.write_table(pa.table({"day": days, "c": [0], "v": [1.0]}), tmp_path / f"{unit}.parquet")
    refused(DataError, "datetime64.* in one file and datetime64.* in another", converted, tmp_path)
