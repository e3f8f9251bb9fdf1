"""`daskfactor convert`: what a stranger types, and what the terminal says."""

import numpy as np
import pytest

from daskfactor.data.sources import as_blocks
from daskfactor.errors import StoreError
from tests.cli.shell import answer, call, fails, plain, stand_in, succeed

LINES = "user,film,stars\nb,7,1.5\na,7,2\nb,9,4\nb,9,3\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text(LINES)
    return path


def test_a_table_becomes_a_store(table, tmp_path):
    result = call("convert", table, tmp_path / "s.zarr", "--unstored", "zero")
    assert result.exit_code == 0, result.output
    for fact in (
        "2 x 2, other cells observed zeros",
        "3 of 4 read, 1 repeated",
        "entries per second",
        "bytes per entry",
    ):
        assert fact in plain(result.stdout)
    assert "keys" in result.stderr
    data = as_blocks(str(tmp_path / "s.zarr"), allow_empty=True)
    np.testing.assert_array_equal(data.to_numpy(), [[2, 0], [1.5, 7]])
    report = answer("convert", table, tmp_path / "t.zarr", "--unstored", "zero", "--quiet")
    assert (report["shape"], report["n_stored"]) == ([2, 2], 3)
    assert report["entries_per_second"] > 0


def test_choices_are_noted_on_standard_error(table, tmp_path):
    command = ["convert", table, tmp_path / "s.zarr", "-q"]
    result = call(*command)
    assert result.exit_code == 0
    assert result.stderr.startswith(
        "note: cells without entry are taken to be observed zeros, as in"
    )
    assert "say --unstored zero if they are zeros" in result.stderr
    result = call(*command, "--overwrite", "--unstored", "missing")
    assert result.stderr.startswith("note: 1 entries name a cell that was named before")


OPTIONS = """
--unstored missing --rows film --columns 0 --count --no-header --shape 3 4 --layer counts
--blocks 2 --balance --dtype float64 --compression zstd --overwrite --memory 1GiB --quiet
"""


def test_options_are_handed_on_and_told_by_the_help(table, monkeypatch):
    verb = stand_in(monkeypatch, "convert", side_effect=StoreError("far enough"))
    fails(4, "far enough", "convert", table, "s.zarr", *OPTIONS.split())
    told = {"rows": "film", "columns": "0", "values": False, "header": False, "layer": "counts"}
    told |= {"shape": (3, 4), "unstored": "missing", "blocks": 2, "balance": True}
    told |= {"dtype": "float64", "compression": "zstd", "overwrite": True, "memory_limit": "1GiB"}
    told |= {"progressbar": False, "table": None, "mask_var": None}
    verb.assert_called_once_with(str(table), "s.zarr", **told)
    text = succeed("convert", "--help")
    for word in ("daskfactor convert ratings.csv ratings.zarr", "--unstored", "--balance", ".mtx"):
        assert word in text


def test_errors_are_one_sentence_and_a_store_that_is_there_stays(table, tmp_path):
    table.write_text(LINES.replace("stars", "ratings"))
    command = ["convert", table, tmp_path / "s.zarr", "--unstored", "zero", "-q"]
    for arguments, message in (
        (["--values", "rating"], "no column 'rating' for values; did you mean"),
        (["--count", "--values", "stars"], "--count cannot be combined with --values"),
        (["--blocks", "9"], "blocks must be a whole number from 1 to 2"),
    ):
        told = fails(3, message, *command, *arguments)
        assert told.startswith("error: ")
        assert told.count("\n") == 1
        assert not (tmp_path / "s.zarr").exists()
    succeed(*command)
    fails(4, "--overwrite", *command)
