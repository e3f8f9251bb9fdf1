import numpy as np
import pytest
import xarray as xr

import daskfactor
from daskfactor.evidence import rank
from daskfactor.evidence.base import Evidence
from tests.cli.shell import answer, fails, stand_in, succeed
from tests.fake_run import fake_run


@pytest.fixture
def asked(monkeypatch):
    def select_rank(V, model, ranks, method, held_out, **options):
        found = [Evidence(-abs(r - 2) * 5.0, 0.5, 0.1, xr.Dataset()) for r in ranks]
        fits = [rank.RankFit(own, 1.0, None) for own in found]
        return rank._table(list(ranks), fits, method or daskfactor.ThermodynamicIntegration())

    return stand_in(monkeypatch, "select_rank", side_effect=select_rank)


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "V.npy"
    np.save(path, np.ones((4, 3)))
    return str(path)


def test_options_reach_the_library(asked, matrix, tmp_path):
    picture = tmp_path / "ranks.png"
    arguments = [matrix, "--ranks", "1:3", "--beta", "0.5", "--dispersion", "0.3", "--quiet"]
    arguments += ["--held-out", "0", "--temperatures", "6", "--seed", "4", "-o", str(picture)]
    assert "largest at rank 2" in succeed("select-rank", *arguments)
    (V, model, ranks, method, held_out), options = asked.call_args
    assert np.load(V).shape == (4, 3)
    assert (model.beta, model.dispersion, list(ranks)) == (0.5, 0.3, [1, 2, 3])
    assert (method.temperatures, held_out, options["random_seed"]) == (6, 0.0, 4)
    assert options["progressbar"] is False
    assert picture.exists()


def test_the_table_goes_into_a_report(asked, matrix, tmp_path, monkeypatch):
    table, page = tmp_path / "ranks.nc", tmp_path / "run.html"
    succeed("select-rank", matrix, "--ranks", "1:3", "-q", "-o", table)
    stand_in(monkeypatch, "open_run", return_value=fake_run())
    told = ["report", "run.zarr", "-o", page, "--evidence"]
    succeed(*told, table)
    assert "The evidence is largest for 2 components" in page.read_text()
    fails(3, "is no table of select-rank", *told, matrix)


def test_json_and_bad_ranks(asked, matrix):
    values = answer("select-rank", matrix, "--ranks", "2,4", "-q")
    assert (values["rank"], values["best"]) == ([2, 4], 2)
    for ranks in ("3:1", "a", "1:", "1,,2", "0:3", "0,2"):
        fails(3, "FIRST:LAST", "select-rank", matrix, "--ranks", ranks)


def test_allocation_model(asked, matrix):
    arguments = [matrix, "--ranks", "1:3", "--model", "allocation", "--concentration", "2", "-q"]
    succeed("select-rank", *arguments)
    _, model, ranks, method, held_out = asked.call_args.args
    assert model == daskfactor.AllocationModel.nmf(1, concentration=2.0)
    assert (list(ranks), held_out) == ([1, 2, 3], "auto")
    assert method == daskfactor.SequentialMonteCarlo()
    succeed("select-rank", *arguments, "--bound")
    assert asked.call_args.args[3] == daskfactor.VariationalBayes()


def test_options_of_the_other_model(asked, matrix):
    for wrong in (
        ["--concentration", "2"],
        ["--bound"],
        ["--model", "allocation", "--beta", "1"],
        ["--model", "allocation", "--held-out", "0.1"],
    ):
        fails(3, "belongs to --model", "select-rank", matrix, "--ranks", "1", "-q", *wrong)
        assert not asked.called
