"""`daskfactor convert`: what a stranger types, and what the terminal says."""

import json

import numpy as np
import pytest

import daskfactor
from daskfactor.data.sources import as_blocks
from daskfactor.errors import StoreError
from tests.cli.shell import call, plain

LINES = "user,film,stars\nb,7,1.5\na,7,2\nb,9,4\nb,9,3\n"


def invoke(*arguments):
    return call("convert", *arguments)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text(LINES)
    return path


def test_help_is_enough():
    text = invoke("--help").stdout
    for word in ("daskfactor convert ratings.csv ratings.zarr", "--unstored", "--balance", ".mtx"):
        assert word in text


def test_a_table_becomes_a_store(table, tmp_path):
    result = invoke(table, tmp_path / "s.zarr", "--unstored", "zero")
    assert result.exit_code == 0, result.output
    for fact in (
        "2 x 2, other cells observed zeros",
        "3 of 4 read, 1 of them for a cell once more",
        "entries a second",
        "bytes an entry",
    ):
        assert fact in plain(result.stdout)
    assert "keys" in result.stderr
    data = as_blocks(str(tmp_path / "s.zarr"), allow_empty=True)
    np.testing.assert_array_equal(data.to_numpy(), [[2, 0], [1.5, 7]])


def test_choices_are_noted_on_standard_error(table, tmp_path):
    result = invoke(table, tmp_path / "s.zarr", "-q")
    assert result.exit_code == 0
    assert result.stderr.startswith("note: cells without entry are taken to be observed zeros")
    result = invoke(table, tmp_path / "s.zarr", "-q", "--overwrite", "--unstored", "missing")
    assert result.stderr.startswith("note: 1 entries name a cell that was named before")


def test_json(table, tmp_path):
    result = invoke(table, tmp_path / "s.zarr", "--unstored", "zero", "--json", "--quiet")
    report = json.loads(result.stdout)
    assert report["shape"] == [2, 2]
    assert report["n_stored"] == 3
    assert report["entries_per_second"] > 0


def test_options_are_handed_on(table, tmp_path, monkeypatch):
    calls = []

    def convert(source, store, **options):
        calls.append({"source": source, "store": store, **options})
        raise StoreError("far enough")

    monkeypatch.setattr(daskfactor, "convert", convert, raising=False)
    result = invoke(
        table,
        "s.zarr",
        "--unstored",
        "missing",
        "--rows",
        "film",
        "--columns",
        "0",
        "--count",
        "--no-header",
        "--shape",
        3,
        4,
        "--layer",
        "counts",
        "--blocks",
        2,
        "--balance",
        "--dtype",
        "float64",
        "--compression",
        "zstd",
        "--overwrite",
        "--memory",
        "1GiB",
        "--quiet",
    )
    assert result.exit_code == 4
    assert calls == [
        {
            "source": str(table),
            "store": "s.zarr",
            "rows": "film",
            "columns": "0",
            "values": False,
            "header": False,
            "layer": "counts",
            "mask_var": None,
            "shape": (3, 4),
            "unstored": "missing",
            "blocks": 2,
            "balance": True,
            "dtype": "float64",
            "compression": "zstd",
            "overwrite": True,
            "memory_limit": "1GiB",
            "progressbar": False,
            "table": None,
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--values", "rating"], 3, "no column 'rating' for values; did you mean"),
        (["--count", "--values", "stars"], 3, "--count and --values exclude each other"),
        (["--blocks", "9"], 3, "blocks must be a whole number from 1 to 2"),
    ],
)
def test_errors_are_one_sentence(table, tmp_path, arguments, code, message):
    table.write_text(LINES.replace("stars", "ratings"))
    result = invoke(table, tmp_path / "s.zarr", "--unstored", "zero", "-q", *arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "s.zarr").exists()


def test_a_store_that_is_there_stays(table, tmp_path):
    first = invoke(table, tmp_path / "s.zarr", "--unstored", "zero", "-q")
    again = invoke(table, tmp_path / "s.zarr", "--unstored", "zero", "-q")
    assert (first.exit_code, again.exit_code) == (0, 4)
    assert "--overwrite" in again.stderr
