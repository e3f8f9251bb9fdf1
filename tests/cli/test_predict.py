import csv
import io
import re
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import daskfactor
from daskfactor.cli.output import Output, positions, write
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.kernels.cuda import device
from tests.cli.shell import answer, call, fails, stand_in, succeed
from tests.fake_run import fake_run
from tests.refusals import refused


def predictions(rows, columns):
    shape = (len(rows), len(columns))
    mean = np.arange(np.prod(shape), dtype=float).reshape(shape)
    found = {"mean": mean, "sd": mean / 10, "lower": mean - 1, "upper": mean + 1}
    values = {name: (("row", "column"), own) for name, own in found.items()}
    return xr.Dataset(values, {"row": [f"r{i}" for i in rows], "column": columns})


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def predict(trace, *, interval, of):
        names = list(trace["posterior"].coords["row"].values)
        numbers = [int(name.removeprefix("r")) for name in names]
        columns = trace["posterior"].coords["column"].values.tolist()
        calls.append({"rows": numbers, "columns": columns, "interval": interval, "of": of})
        return predictions(numbers, columns)

    stand_in(monkeypatch, "open_run", side_effect=lambda path: fake_run())
    stand_in(monkeypatch, "predict", side_effect=predict)
    return calls


RUN = "predict", "run.zarr"


def test_positions():
    expected = {"3": [3], "0:3": [0, 1, 2], "5, 0:2": [5, 0, 1], ":2": [0, 1], "8:": [8, 9]}
    expected |= {":": list(range(10))}
    assert {text: positions(text, 10, "--rows") for text in expected} == expected
    for text in ("", "a", "1,,2", "-1", "10", "3:2", "0:11", "0:4:2", "1.5"):
        refused(OptionError, "--rows", positions, text, 10, "--rows")


def test_labels_beside_positions():
    for text, labels, by_label, expected in (
        ("bob,0:2", ["al", "bob", "cy"], False, [1, 0, 1]),
        ('"a, b",2', ["al", "a, b", "2"], False, [1, 2]),
        ("2", ["2", "bob", "cy"], False, [2]),
        ("2", ["2", "bob", "cy"], True, [0]),
        ("20,30", [10, 20, 30], True, [1, 2]),
        ("20,0:1", [10, 20, 30], False, [1, 0]),
        ("x", ["x", "y", "x"], False, [0, 2]),
    ):
        index = pd.Index(labels, name="user")
        assert positions(text, 3, "--rows", index, by_label) == expected


def test_unknown_labels_are_refused():
    for text, labels, message in (
        ("bop", ["al", "bob"], "no label 'bop' among the 2 labels of 'user'; did you mean 'bob'"),
        ("x7", [7, 8], "no label 'x7' among"),
        ("7", None, "--by-label needs labels"),
    ):
        index = None if labels is None else pd.Index(labels, name="user")
        by_label = labels != ["al", "bob"]
        refused(OptionError, message, positions, text, 2, "--rows", index, by_label=by_label)


def test_csv_on_stdout_has_a_line_for_every_cell(calls):
    cells = ("--rows", "0,3", "--columns", "1:3")
    text = succeed(*RUN, *cells, "--interval", 0.5, "--of", "observation")
    assert calls == [{"rows": [0, 3], "columns": [1, 2], "interval": 0.5, "of": "observation"}]
    assert text.splitlines() == [
        "row,column,mean,sd,lower,upper",
        *("r0,1,0,0,-1,1", "r0,2,1,0.1,0,2", "r3,1,2,0.2,1,3", "r3,2,3,0.3,2,4"),
    ]


def test_files_hold_what_was_predicted(calls, tmp_path):
    expected = predictions(range(12), range(7))
    succeed(*RUN, "-o", tmp_path / "p.nc")
    with xr.open_dataset(tmp_path / "p.nc") as written:
        xr.testing.assert_equal(written.load(), expected)
    told = answer(*RUN, "-o", tmp_path / "p.csv")
    assert told["sizes"] == {"row": 12, "column": 7}
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 12 * 7
    succeed(*RUN, "-o", tmp_path / "p.zarr")
    stored = xr.open_zarr(tmp_path / "p.zarr", consolidated=False)["upper"]
    np.testing.assert_array_equal(stored, expected["upper"])


def test_outputs_that_cannot_be_written_are_refused_in_one_way(calls, tmp_path):
    target = tmp_path / "p.zarr"
    target.mkdir()
    fails(4, "exists already", *RUN, "-o", target)
    assert not list(target.iterdir())
    for name in ("p.csv", "p.nc"):
        told = fails(4, "", *RUN, "-o", tmp_path / "nowhere" / name)
        assert told.strip().endswith(f"{name}: No such file or directory")
    calls.clear()
    for arguments in (["-o", "p.xlsx"], ["--json"]):
        fails(3, "", *RUN, *arguments)
    assert not calls  # before the work


def test_rows_of_one_label_are_told_apart_by_their_positions(tmp_path):
    values, store = np.random.default_rng(0).poisson(3.0, (8, 6)), tmp_path / "run.zarr"
    V = xr.DataArray(values, {"row": list("aabbccdd")}, ("row", "column"))
    model, options = daskfactor.TweedieNMF(2), {"draws": 4, "tune": 4, "random_seed": 0}
    trace = daskfactor.sample(V, model, store=store, **options)
    text = succeed("predict", store, "--rows", "3,2", "--columns", "5")
    lines = list(csv.reader(io.StringIO(text)))
    whole = daskfactor.predict(trace)["mean"].values
    assert [line[:2] for line in lines[1:]] == [["b", "5"], ["b", "5"]]
    np.testing.assert_allclose([float(line[2]) for line in lines[1:]], whole[[3, 2], 5], rtol=1e-6)


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_obeys_no_label(monkeypatch):
    table = predictions(range(2), ["a", "b"]).assign_coords(row=["\x1b[31mred", "bell\x07\x9b1m"])
    piped, screen = io.StringIO(), Screen()
    for file in (piped, screen):
        monkeypatch.setattr("sys.stdout", file)
        Output(output="-").put(table)
    monkeypatch.undo()
    assert "\x1b[31mred,a" in piped.getvalue()  # what programs read is what there is
    assert "\\u001b[31mred,a" in screen.getvalue()
    assert all(one.isprintable() or one == "\n" for one in screen.getvalue())


COMPUTED, PLAIN = ("=1+1", "@sum", "+a", " -cmd|x"), ("-3.5", "+1e3", "a=b")


@pytest.mark.parametrize("label", [*COMPUTED, *PLAIN])
def test_labels_that_spreadsheets_compute_are_told_of(tmp_path, label):
    table = predictions(range(2), ["a", label])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        write(table, str(tmp_path / "a.csv"), False)
    assert [one.category for one in found] == [DataWarning] * (label in COMPUTED)
    assert all(repr(label) in str(one.message) for one in found)
    with (tmp_path / "a.csv").open(newline="") as file:
        assert {row["column"] for row in csv.DictReader(file)} == {"a", label}


def test_a_label_that_netcdf_cannot_hold_is_refused_in_a_sentence(tmp_path):
    table = predictions(range(2), ["a", "b\0c"])
    match = r"NUL character.*'b\\x00c'.*\.parquet"
    refused(DataError, match, write, table, str(tmp_path / "a.nc"), False)
    assert not (tmp_path / "a.nc").exists()
    write(table, str(tmp_path / "a.parquet"), False)
    assert set(pd.read_parquet(tmp_path / "a.parquet")["column"]) == {"a", "b\0c"}


def test_figures_and_reports_tell_of_letters_in_one_line(tmp_path):
    rows = ["\x1b[31mred", "\u6f22\u5b57", "nul\0x", "\x9b1m", *"efgh"]
    V = np.random.default_rng(0).poisson(3.0, (8, 5)) + 0.0
    data = xr.DataArray(V, {"row": rows}, ("row", "column"))
    model, store = daskfactor.TweedieNMF(1, dispersion=1.0), str(tmp_path / "run.zarr")
    options = {"draws": 8, "tune": 4, "store": store, "progressbar": False, "random_seed": 0}
    daskfactor.sample(data, model, **options)
    for command, file in (("plot", "a.png"), ("report", "a.html")):
        done = call(command, store, "-o", str(tmp_path / file))
        assert done.exit_code == 0, done.output
        (line,) = done.stderr.strip().split("\n")
        assert re.match(r"note: the font .* lacks characters of labels", line)
        assert "'\u6f22'" in line or "'\u5b57'" in line
        assert ".py" not in done.output
    page = (tmp_path / "a.html").read_text()
    assert "\\u001b[31mred" in page
    assert not {"\x1b", "\0", "\x9b"} & set(page)


# -- transform -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and two new rows whose columns are in another order."""
    at = tmp_path_factory.mktemp("shell")
    V = np.random.default_rng(0).poisson(5, (12, 4))
    table = pd.DataFrame(V, [f"r{n}" for n in range(12)], list("abcd"))
    lengths = {"draws": 6, "tune": 20, "random_seed": 0, "progressbar": False}
    daskfactor.sample(table[:10], daskfactor.TweedieNMF(2), store=at / "run.zarr", **lengths)
    table[10:][list("dcba")].to_csv(at / "new.csv")
    return at


def of_transform(folder):
    """The words of a command."""
    return "transform", folder / "run.zarr", folder / "new.csv", "-q"


def test_means_and_deviations_of_new_rows_go_to_the_terminal(folder):
    first, *lines = succeed(*of_transform(folder)).splitlines()
    assert first == "row,component,mean,sd"
    assert [line[:5] for line in lines] == ["r10,0", "r10,1", "r11,0", "r11,1"]


def test_a_gpu_may_draw_new_rows(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device._opened.cache_clear()
    fails(3, "needs CuPy", *of_transform(folder), "--device", "cuda")


def test_draws_of_new_rows_go_to_a_file(folder):
    command = (*of_transform(folder), "--keep-draws")
    told = answer(*command, "--draws", 3, "-o", folder / "W.nc")
    assert told["sizes"] == {"chain": 1, "draw": 3, "row": 2, "component": 2}
    with xr.open_dataset(folder / "W.nc") as found:
        assert found["W"].dims == ("chain", "draw", "row", "component")
    fails(3, "--output must be a .nc or .zarr file", *command)


@pytest.mark.full
def test_new_rows_of_a_weighted_run_bring_theirs(folder):
    matrix, run = str(folder / "new.csv"), str(folder / "weighed.zarr")
    pd.read_csv(matrix, index_col=0).map(lambda value: 0.5).to_csv(folder / "sigma.csv")
    sigma = str(folder / "sigma.csv")
    fit = ["fit", matrix, "--store", run, "-k", "1", "--beta", "2", "--draws", "2", "--tune", "2"]
    succeed(*fit, "-q", "--uncertainty", sigma)
    again = ["transform", run, matrix, "-q"]
    fails(3, "pass --uncertainty, of the shape of V", *again)
    found = [succeed(*again, "--uncertainty", own) for own in (sigma, "0.5", "0.1")]
    assert found[0] == found[1] != found[2]
