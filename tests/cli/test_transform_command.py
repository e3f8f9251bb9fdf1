"""``daskfactor transform``: components of new rows from the shell."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.kernels.cuda import device
from tests.cli.shell import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and two new rows whose columns are in another order."""
    at = tmp_path_factory.mktemp("shell")
    V = np.random.default_rng(0).poisson(5, (12, 4))
    table = pd.DataFrame(V, [f"r{n}" for n in range(12)], list("abcd"))
    lengths = {"draws": 6, "tune": 20, "random_seed": 0, "progressbar": False}
    dfac.sample(table[:10], dfac.TweedieNMF(2), store=at / "run.zarr", **lengths)
    table[10:][list("dcba")].to_csv(at / "new.csv")
    return at


def invoke(folder, *arguments):
    return call("transform", folder / "run.zarr", folder / "new.csv", "-q", *arguments)


def test_means_and_deviations_go_to_the_terminal(folder):
    done = invoke(folder)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "row,component,mean,sd"
    assert [line.split(",")[:2] for line in lines[1:]] == [
        ["r10", "0"],
        ["r10", "1"],
        ["r11", "0"],
        ["r11", "1"],
    ]


def test_a_gpu_may_draw_them(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device._opened.cache_clear()
    done = invoke(folder, "--device", "cuda")
    assert done.exit_code == 3
    assert "needs CuPy" in done.stderr


def test_draws_go_to_a_file(folder):
    done = invoke(folder, "--keep-draws", "--draws", "3", "-o", str(folder / "W.nc"), "--json")
    assert json.loads(done.stdout)["sizes"] == {"chain": 1, "draw": 3, "row": 2, "component": 2}
    with xr.open_dataset(folder / "W.nc") as found:
        assert found["W"].dims == ("chain", "draw", "row", "component")


def test_what_cannot_be_written_is_told(folder):
    done = invoke(folder, "--keep-draws")
    assert done.exit_code == 3
    assert "--output is a .nc or .zarr file" in done.stderr


@pytest.mark.full
def test_new_rows_of_a_weighted_run_bring_theirs(folder):
    matrix, run = str(folder / "new.csv"), str(folder / "weighed.zarr")
    pd.read_csv(matrix, index_col=0).map(lambda value: 0.5).to_csv(folder / "sigma.csv")
    sigma = str(folder / "sigma.csv")
    fit = ["fit", matrix, "--store", run, "-k", "1", "--beta", "2", "--draws", "2", "--tune", "2"]
    done = call(*fit, "-q", "--uncertainty", sigma)
    assert done.exit_code == 0, done.output
    again = ["transform", run, matrix, "-q"]
    refused = call(*again)
    assert refused.exit_code == 3
    assert "pass --uncertainty, of the shape of V" in refused.stderr
    found = [call(*again, "--uncertainty", own) for own in (sigma, "0.5")]
    assert found[0].exit_code == 0, found[0].output
    assert found[0].stdout == found[1].stdout
    assert call(*again, "--uncertainty", "0.1").stdout != found[0].stdout
