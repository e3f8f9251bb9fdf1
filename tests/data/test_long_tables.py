"""Long tables are told from matrices, whatever library they come from, and refused if unclear."""

import gzip
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, OptionError
from tests.data.written import names_of
from tests.refusals import refused

pytestmark = pytest.mark.libraries

LONG = pd.DataFrame(
    {"who": ["b", "a", "b", "c"], "what": [30, 7, 7, 1000], "stars": [1.5, 2.0, 4.0, 0.5]}
)
DENSE = np.array([[2.0, 0, 0], [4.0, 1.5, 0], [0, 0, 0.5]])
WHOLE = pd.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]})
USERS, ITEMS = [3, 5, 3, 8], [20, 20, 9, 9]
RATINGS = pd.DataFrame({"user": USERS, "item": ITEMS, "rating": [1.5, 2.0, 4.0, 0.5]})
OF_RATINGS = [[4.0, 1.5], [0, 2.0], [0.5, 0]]
NAMED = {"rows": "who", "columns": "what", "values": "stars"}
ASIDE = "pass rows='user', columns='item', values='rating'.* if it has a line .*table=False"


class Interchange:
    """Gives out columns by the dataframe interchange protocol alone."""

    def __init__(self, frame):
        self._table = pa.Table.from_pandas(frame, preserve_index=False)

    def __dataframe__(self, **options):
        return self._table.__dataframe__(**options)


class Stream:
    """Gives out columns as Arrow streams alone, as a relation of a database does."""

    def __init__(self, frame):
        self._table, self.columns = pa.Table.from_pandas(frame, preserve_index=False), list(frame)

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def write(folder, frame, ending):
    path = folder / f"t.{ending}"
    text = frame.to_csv(index=False)
    if ending == "parquet":
        frame.to_parquet(path)
    elif ending == "csv.gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text.replace(",", "\t") if ending == "tsv" else text)
    return str(path)


KINDS = {"pandas": pd.DataFrame, "arrow": pa.table, "interchange": Interchange, "stream": Stream}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", [{"table": True}, NAMED | {"columns": 1}])
def test_tables_in_memory(kind, choice):
    data = dfac.as_blocks(KINDS[kind](LONG), 1, unstored="zero", **choice)
    np.testing.assert_array_equal(data.to_numpy(), DENSE)
    assert names_of(data) == [["a", "b", "c"], [7, 30, 1000]]


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "parquet"])
def test_tables_in_files_are_those_in_memory(tmp_path, ending):
    options = {"unstored": "missing", "allow_empty": True}
    found = dfac.as_blocks(write(tmp_path, LONG, ending), rows="who", **options)
    own = dfac.as_blocks(LONG, unstored="missing", table=True)
    assert found.fingerprint == own.fingerprint
    assert found.labels.row_coords["who"].tolist() == ["a", "b", "c"]
    store = tmp_path / "s.zarr"
    dfac.convert(LONG, store, unstored="missing", table=True, progressbar=False)
    assert dfac.as_blocks(store).fingerprint == own.fingerprint


@pytest.mark.parametrize(
    ("keys", "dtype", "labels"),
    [
        pytest.param([*"zbza"], "category", ["a", "b", "z"], id="categories"),
        pytest.param([3, 1, 3, 2], "category", [1, 2, 3], id="whole categories"),
        pytest.param([3, 1, 3, 2], "Int64", [1, 2, 3], id="nullable"),
        pytest.param([2**40, -5, 2**40, 7], None, [-5, 7, 2**40], id="large"),
        pytest.param(["2024-03-01", "2020", "2024-03-01", "2021"], "M8[s]", None, id="dates"),
        pytest.param([*"zbza"], "string", ["a", "b", "z"], id="texts"),
    ],
)
def test_keys_of_any_type(keys, dtype, labels):
    keys = pd.Series(keys, dtype=dtype)
    data = dfac.as_blocks(LONG.assign(who=keys), 1, unstored="zero", table=True)
    found = data.labels.row_coords["who"]
    sums = LONG["stars"].groupby(keys.astype(object)).sum()
    np.testing.assert_array_equal(data.to_numpy().sum(axis=1), sums)
    assert found[1] == np.datetime64("2021-01-01") if labels is None else found.tolist() == labels


def test_lines_of_one_cell_are_added_up_or_the_last_one_stays(tmp_path):
    twice = pd.DataFrame({"user": [4, 4, 5, 5], "item": [0, 0, 0, 1], "n": [1.0, 2.0, 3.0, np.nan]})
    for table in (twice, write(tmp_path, twice, "csv")):
        added = dfac.as_blocks(table, 1, unstored="zero", table=True, allow_empty=True)
        np.testing.assert_array_equal(added.to_numpy(), [[3, 0], [3, np.nan]])
        with pytest.warns(DataWarning, match="1 entries name a cell that was named before"):
            last = dfac.as_blocks(table, 1, unstored="missing", table=True, allow_empty=True)
        np.testing.assert_array_equal(last.to_numpy(), [[2, np.nan], [3, np.nan]])
        counted = dfac.as_blocks(table, 1, rows=0, columns=1, values=False, unstored="zero")
        np.testing.assert_array_equal(counted.to_numpy(), [[2, 0], [1, 1]])


@pytest.mark.parametrize("ending", [None, "csv", "parquet"])
def test_what_could_be_either_is_refused(tmp_path, ending):
    table = WHOLE if ending is None else write(tmp_path, WHOLE, ending)
    match = r"rows='a', columns='b', values='c' \(or table=True\)"
    refused(DataError, match, dfac.as_blocks, table)
    refused(DataError, match, dfac.sample, table, dfac.TweedieNMF(1), progressbar=False)
    assert dfac.as_blocks(table, table=False).to_numpy().tolist() == WHOLE.to_numpy().tolist()
    assert dfac.as_blocks(table, 1, table=True, unstored="zero").to_numpy().trace() == 24


RATED = pd.DataFrame({"user": [3, 5, 3, 8], "item": [20, 20, 9, 9], "stars": [1.0, 2, 4, 5]})


@pytest.mark.parametrize("ending", [None, "csv", "tsv", "parquet"])
@pytest.mark.parametrize("users", [[3, 5, 3, 8], [*"abab"]], ids=["whole", "texts"])
def test_ratings_with_their_times_are_not_fitted_as_a_matrix(tmp_path, ending, users):
    rated = RATED.assign(user=users, time=[10, 20, 30, 40])
    table = rated if ending is None else write(tmp_path, rated, ending)
    refused(DataError, "matrix of 4 columns; say which: pass rows='user'", dfac.as_blocks, table)
    data = dfac.as_blocks(table, 1, table=True, unstored="zero")
    assert data.to_numpy().sum() == 12


@pytest.mark.parametrize("ending", [None, "csv", "parquet"])
def test_fractions_that_repeat_may_be_keys_wherever_the_table_is(tmp_path, ending):
    doses = RATED.assign(user=[0.5, 1.5, 0.5, 2.5], time=[10, 20, 30, 40])
    table = doses if ending is None else write(tmp_path, doses, ending)
    name = "the DataFrame" if ending is None else rf"t\.{ending}"
    refused(DataError, f"{name} could be .* matrix of 4 columns", dfac.as_blocks, table)


def test_measurements_and_counts_of_genes_are_matrices(tmp_path):
    genes = pd.DataFrame({"gene": [*"abc"], "s1": [1, 2, 3], "s2": [0, 2, 1], "s3": [4, 4, 1]})
    flowers = pd.DataFrame(np.arange(1, 13).reshape(3, 4) / 8, columns=[*"wxyz"])
    for frame, shape in ((genes, (3, 3)), (flowers, (3, 4))):
        for table in (frame, write(tmp_path, frame, "csv"), write(tmp_path, frame, "parquet")):
            assert dfac.as_blocks(table).shape == shape


def test_an_index_that_was_written_is_no_column_of_keys(tmp_path):
    path = tmp_path / "rated.csv"
    RATED.to_csv(path)
    refused(DataError, "matrix of 3 columns; say which: pass rows='user'", dfac.as_blocks, path)
    data = dfac.as_blocks(path, 1, table=True, unstored="zero")
    assert names_of(data) == [[3, 5, 8], [9, 20]]


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (LONG, {"rows": "whom"}, "no column 'whom' for rows; did you mean 'who'"),
        (
            LONG,
            {"values": "who", "rows": "what", "columns": "stars"},
            "holds floating data; keys must",
        ),
        (LONG, {"values": "who", "rows": "stars", "columns": "what"}, "keys must be whole"),
        (LONG.assign(stars="good"), {"table": True}, "values must be numbers; choose another"),
        (LONG.assign(who=["a", None, "b", "c"]), {"table": True}, "1 lines of .* nothing in the"),
        (
            LONG.assign(who=["a", 1, "b", "c"]),
            {"table": True},
            "holds mixed-integer data; keys must be",
        ),
        (LONG.assign(who=[[1], [2], [3], [4]]), {"table": True}, "keys must be whole numbers"),
        (LONG.set_axis(["x", "x", "y"], axis=1), {"table": True}, "two columns of one name"),
        (np.ones((3, 3)), {"rows": "a"}, "how to read a table .* got ndarray"),
    ],
)
def test_bad_tables(frame, options, message):
    refused((DataError, OptionError), message, dfac.as_blocks, frame, unstored="zero", **options)


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.bool_(), pa.decimal128(20, 1)])
def test_values_may_be_missing_in_a_column_of_any_numbers(kind):
    table = pa.table({"who": [1, 2, 1], "what": [5, 5, 6], "v": pa.array([1, None, 1]).cast(kind)})
    data = dfac.as_blocks(table, table=True, unstored="missing", allow_empty=True)
    assert sorted(data.observed_sparse().data.tolist()) == [1.0, 1.0]


def test_every_verb_takes_tables(tmp_path):
    rng = np.random.default_rng(0)
    rows, cols = np.nonzero(rng.random((12, 9)) < 0.7)
    table = pd.DataFrame({"user": rows + 100, "item": cols, "count": rng.poisson(3, rows.size)})
    path = write(tmp_path, table, "csv")
    named = {"rows": "user", "columns": "item", "values": "count"}
    run = {"draws": 2, "tune": 2, "random_seed": 0, "progressbar": False, "unstored": "zero"}
    store = str(tmp_path / "run.zarr")
    trace = dfac.sample(path, dfac.TweedieNMF(2), store=store, **named, **run)
    assert trace["posterior"]["user"].values[0] == 100
    assert dfac.resume(store, draws=1, progressbar=False) is not None
    own = dfac.sample(table, dfac.TweedieNMF(2), table=True, **run)
    np.testing.assert_array_equal(own["posterior"]["W"], trace["posterior"]["W"])
    held = dfac.hold_out(path, 0.2, unstored="missing", random_seed=0, **named)
    assert held.train.dims == ("user", "item")
    quiet = {"random_seed": 0, "progressbar": False}
    found = dfac.log_evidence(table.head(9), dfac.AllocationModel.nmf(1), **named, **quiet)
    assert np.isfinite(found.value)
    cost = dfac.estimate_cost(path, dfac.TweedieNMF(2), unstored="zero", **named)
    with dfac.as_blocks(path, unstored="zero", **named) as data:
        assert cost.data == data.nbytes


@pytest.mark.quick("csv", "None")
@pytest.mark.parametrize("ending", ["csv", "parquet", None])
def test_a_run_finds_the_columns_of_its_table_again(tmp_path, ending):
    rng, store = np.random.default_rng(0), str(tmp_path / "run.zarr")
    places = rng.permutation(12 * 9)[:70]
    columns = {"stars": rng.integers(1, 6, 70), "b": places // 9, "a": 100 + places % 9}
    table = pd.DataFrame(columns | {"c": places})
    given = table if ending is None else write(tmp_path, table, ending)
    data = dfac.as_blocks(given, rows="b", columns="a", values="stars", unstored="missing")
    run = {"draws": 2, "tune": 2, "random_seed": 0, "progressbar": False}
    dfac.sample(data, dfac.TweedieNMF(2), store=store, **run)
    with warnings.catch_warnings(action="error", category=DataWarning):
        if ending is None:
            refused(DataError, "pass the data again", dfac.resume, store, progressbar=False)
        again = {"V": table} if ending is None else {}
        trace = dfac.resume(store, draws=1, progressbar=False, **again)
        if ending is not None:
            best = dfac.recommend(store, n=9, exclude="seen")
            assert (best["position"].values >= 0).sum() == 12 * 9 - 70
    assert trace["posterior"].sizes["draw"] == 3


@pytest.mark.parametrize(
    "table",
    [
        RATINGS,
        RATINGS.astype({"user": float}),
        RATINGS.assign(user=[3, np.nan, 3, 8]),
        RATINGS.assign(item=list("abba")),
        RATINGS + 0.25,
    ],
)
@pytest.mark.parametrize("ending", [None, "csv", "parquet"])
def test_three_columns_are_refused_until_they_are_named(tmp_path, table, ending):
    given = table if ending is None else write(tmp_path, table, ending)
    refused(DataError, f"could be a table .*{ASIDE}", dfac.as_blocks, given, unstored="missing")


@pytest.mark.parametrize(
    "frame",
    [
        WHOLE.assign(d=1, e=2),
        WHOLE.set_index(pd.Index(["x", "y", "z"])),
        WHOLE.rename_axis("gene"),
        WHOLE[["a"]],
        RATINGS[["user", "item"]],
        RATINGS.set_index("user"),
        pd.DataFrame(np.arange(8.0).reshape(4, 2) + 0.25),
        RATINGS.set_axis(["x", "y", "z"], axis=1).set_index("x", append=True),
        pd.DataFrame(np.ones((2, 9)), columns=["doc", *"abcdefg", "word"]),
        WHOLE.astype(float).set_index(pd.Index([2, 3, 5], name="gene")),
    ],
)
def test_other_tables_are_matrices(frame):
    with warnings.catch_warnings(action="error"):
        assert dfac.as_blocks(frame).shape == frame.shape


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_names_of_rows_are_no_third_column(tmp_path, ending):
    path = tmp_path / f"v.{ending}"
    frame = WHOLE[["a", "b"]].set_index(
        pd.Index(["x", "y", "z"], name="" if ending == "csv" else "n")
    )
    frame.to_csv(path) if ending == "csv" else frame.to_parquet(path)
    assert names_of(dfac.as_blocks(path, 1))[1] == ["a", "b"]


def test_a_table_without_names_of_columns_that_holds_texts_is_told_what_to_name(tmp_path):
    table = RATINGS.assign(item=list("abba"), time=7, place=1)
    for given in (table, write(tmp_path, table, "csv")):
        refused(DataError, "line for each entry pass rows, columns and val", dfac.as_blocks, given)
    ratings = RATINGS.assign(time=7, place=1)
    refused(OptionError, "entry pass rows", dfac.as_blocks, ratings, unstored="missing")


@pytest.mark.parametrize("names", [("user", "item"), (None, None)])
def test_a_series_with_two_keys_is_a_table_with_a_line_for_each_entry(names):
    series = RATINGS.set_index(["user", "item"])["rating"].rename_axis(names)
    dims = ("user", "item") if names[0] else ("row", "column")
    for stacked in (series, series.to_frame(), series.rename(None)):
        data = dfac.as_blocks(stacked, 1, unstored="zero")
        np.testing.assert_array_equal(data.to_numpy(), OF_RATINGS)
        assert (data.labels.row_dim, data.labels.col_dim) == dims
        assert names_of(data) == [[3, 5, 8], [9, 20]]
    assert dfac.as_blocks(series.to_frame(), table=False).shape == (4, 1)
    match = r"leave table out, or pass series\.unstack"
    refused(OptionError, match, dfac.as_blocks, series, table=False)
    assert dfac.as_blocks(series, 1, table=True, unstored="zero").shape == (3, 2)
