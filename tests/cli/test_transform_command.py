"""``daskfactor transform``: components of new rows from the shell."""

import sys

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.kernels.cuda import device
from tests.cli.shell import answer, fails, succeed


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


def of_transform(folder):
    """The words of a command."""
    return "transform", folder / "run.zarr", folder / "new.csv", "-q"


def test_means_and_deviations_go_to_the_terminal(folder):
    first, *lines = succeed(*of_transform(folder)).splitlines()
    assert first == "row,component,mean,sd"
    assert [line[:5] for line in lines] == ["r10,0", "r10,1", "r11,0", "r11,1"]


def test_a_gpu_may_draw_them(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device._opened.cache_clear()
    fails(3, "needs CuPy", *of_transform(folder), "--device", "cuda")


def test_draws_go_to_a_file(folder):
    command = (*of_transform(folder), "--keep-draws")
    told = answer(*command, "--draws", 3, "-o", folder / "W.nc")
    assert told["sizes"] == {"chain": 1, "draw": 3, "row": 2, "component": 2}
    with xr.open_dataset(folder / "W.nc") as found:
        assert found["W"].dims == ("chain", "draw", "row", "component")
    fails(3, "--output is a .nc or .zarr file", *command)


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
