import csv
import io
import json
import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import daskfactor
from daskfactor.cli.output import Output, positions, write
from daskfactor.errors import DataError, DataWarning, OptionError
from tests.cli.shell import call, succeed
from tests.fake_run import fake_run


def predictions(rows, columns):
    shape = (len(rows), len(columns))
    mean = np.arange(np.prod(shape), dtype=float).reshape(shape)
    return xr.Dataset(
        {
            "mean": (("row", "column"), mean),
            "sd": (("row", "column"), mean / 10),
            "lower": (("row", "column"), mean - 1),
            "upper": (("row", "column"), mean + 1),
        },
        coords={"row": [f"r{i}" for i in rows], "column": columns},
    )


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def predict(trace, *, interval, of):
        names = list(trace["posterior"].coords["row"].values)
        numbers = [int(name.removeprefix("r")) for name in names]
        columns = trace["posterior"].coords["column"].values.tolist()
        calls.append({"rows": numbers, "columns": columns, "interval": interval, "of": of})
        return predictions(numbers, columns)

    monkeypatch.setattr(daskfactor, "open_run", lambda path: fake_run(), raising=False)
    monkeypatch.setattr(daskfactor, "predict", predict, raising=False)
    return calls


def invoke(*arguments):
    return call("predict", "run.zarr", *arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [3]),
        ("0:3", [0, 1, 2]),
        ("5, 0:2", [5, 0, 1]),
        (":2", [0, 1]),
        ("8:", [8, 9]),
        (":", list(range(10))),
    ],
)
def test_positions(text, expected):
    assert positions(text, 10, "--rows") == expected


@pytest.mark.parametrize(
    ("text", "labels", "by_label", "expected"),
    [
        ("bob,0:2", ["al", "bob", "cy"], False, [1, 0, 1]),
        ('"a, b",2', ["al", "a, b", "2"], False, [1, 2]),
        ("2", ["2", "bob", "cy"], False, [2]),
        ("2", ["2", "bob", "cy"], True, [0]),
        ("20,30", [10, 20, 30], True, [1, 2]),
        ("20,0:1", [10, 20, 30], False, [1, 0]),
        ("x", ["x", "y", "x"], False, [0, 2]),
    ],
)
def test_labels_beside_positions(text, labels, by_label, expected):
    index = pd.Index(labels, name="user")
    assert positions(text, 3, "--rows", index, by_label) == expected


@pytest.mark.parametrize(
    ("text", "labels", "message"),
    [
        ("bop", ["al", "bob"], "no label 'bop' among the 2 of 'user'; did you mean 'bob'"),
        ("x7", [7, 8], "no label 'x7' among"),
        ("7", None, "--by-label needs labels"),
    ],
)
def test_unknown_labels_are_refused(text, labels, message):
    index = None if labels is None else pd.Index(labels, name="user")
    with pytest.raises(OptionError, match=message):
        positions(text, 2, "--rows", index, by_label=labels != ["al", "bob"])


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "10", "3:2", "0:11", "0:4:2", "1.5"])
def test_impossible_positions_are_refused(text):
    with pytest.raises(OptionError, match="--rows"):
        positions(text, 10, "--rows")


def test_csv_on_stdout_has_a_line_for_every_cell(calls):
    result = invoke("--rows", "0,3", "--columns", "1:3", "--interval", 0.5, "--of", "observation")
    assert result.exit_code == 0, result.output
    assert calls == [{"rows": [0, 3], "columns": [1, 2], "interval": 0.5, "of": "observation"}]
    lines = list(csv.reader(io.StringIO(result.stdout)))
    assert lines[0] == ["row", "column", "mean", "sd", "lower", "upper"]
    assert lines[1:] == [
        ["r0", "1", "0", "0", "-1", "1"],
        ["r0", "2", "1", "0.1", "0", "2"],
        ["r3", "1", "2", "0.2", "1", "3"],
        ["r3", "2", "3", "0.3", "2", "4"],
    ]


def test_files_hold_what_was_predicted(calls, tmp_path):
    expected = predictions(range(12), range(7))
    assert invoke("-o", tmp_path / "p.nc").exit_code == 0
    with xr.open_dataset(tmp_path / "p.nc") as written:
        xr.testing.assert_equal(written.load(), expected)
    result = invoke("-o", tmp_path / "p.csv", "--json")
    assert json.loads(result.stdout)["sizes"] == {"row": 12, "column": 7}
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 12 * 7
    assert invoke("-o", tmp_path / "p.zarr").exit_code == 0
    np.testing.assert_array_equal(
        xr.open_zarr(tmp_path / "p.zarr", consolidated=False)["upper"].values,
        expected["upper"].values,
    )


def test_an_existing_store_is_left_alone(calls, tmp_path):
    target = tmp_path / "p.zarr"
    target.mkdir()
    result = invoke("-o", target)
    assert result.exit_code == 4
    assert "exists already" in result.stderr
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", ["p.csv", "p.nc"])
def test_a_folder_that_takes_nothing_is_told_of_in_one_way(calls, tmp_path, name):
    result = invoke("-o", tmp_path / "nowhere" / name)
    assert result.exit_code == 4
    assert result.stderr.strip().endswith(f"{name}: No such file or directory")


@pytest.mark.parametrize("arguments", [["-o", "p.xlsx"], ["--json"]])
def test_outputs_that_make_no_sense_are_refused_before_the_work(calls, arguments):
    assert invoke(*arguments).exit_code == 3
    assert not calls


def test_rows_of_one_label_are_told_apart_by_their_positions(tmp_path):
    V = xr.DataArray(
        np.random.default_rng(0).poisson(3.0, (8, 6)),
        dims=("row", "column"),
        coords={"row": list("aabbccdd")},
    )
    store = tmp_path / "run.zarr"
    model = daskfactor.TweedieNMF(2)
    trace = daskfactor.sample(V, model, draws=4, tune=4, store=store, random_seed=0)
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


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ("=1+1", True),
        ("@sum", True),
        ("+a", True),
        (" -cmd|x", True),
        ("-3.5", False),
        ("+1e3", False),
        ("a=b", False),
    ],
)
def test_labels_that_spreadsheets_compute_are_told_of(tmp_path, label, told):
    table = predictions(range(2), ["a", label])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        write(table, str(tmp_path / "a.csv"), False)
    assert [one.category for one in found] == [DataWarning] * told
    assert all(repr(label) in str(one.message) for one in found)
    with (tmp_path / "a.csv").open(newline="") as file:
        assert {row["column"] for row in csv.DictReader(file)} == {"a", label}


def test_a_label_that_netcdf_cannot_hold_is_refused_in_a_sentence(tmp_path):
    table = predictions(range(2), ["a", "b\0c"])
    with pytest.raises(DataError, match=r"NUL character.*'b\\x00c'.*\.parquet"):
        write(table, str(tmp_path / "a.nc"), False)
    assert not (tmp_path / "a.nc").exists()
    write(table, str(tmp_path / "a.parquet"), False)
    assert set(pd.read_parquet(tmp_path / "a.parquet")["column"]) == {"a", "b\0c"}


def test_figures_and_reports_tell_of_letters_in_one_line(tmp_path):
    rows = ["\x1b[31mred", "\u6f22\u5b57", "nul\0x", "\x9b1m", *"efgh"]
    V = np.random.default_rng(0).poisson(3.0, (8, 5)) + 0.0
    data = xr.DataArray(V, {"row": rows}, ("row", "column"))
    store, quiet = str(tmp_path / "run.zarr"), {"progressbar": False, "random_seed": 0}
    daskfactor.sample(
        data, daskfactor.TweedieNMF(1, dispersion=1.0), draws=8, tune=4, store=store, **quiet
    )
    for command, file in (("plot", "a.png"), ("report", "a.html")):
        done = call(command, store, "-o", str(tmp_path / file))
        assert done.exit_code == 0, done.output
        (line,) = done.stderr.strip().split("\n")
        assert line.startswith("note: labels have characters that the font")
        assert "'\u6f22'" in line or "'\u5b57'" in line
        assert ".py" not in done.output
    page = (tmp_path / "a.html").read_text()
    assert "\\u001b[31mred" in page
    assert not {"\x1b", "\0", "\x9b"} & set(page)
