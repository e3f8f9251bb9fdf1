import json

import numpy as np
import pytest
from typer.testing import CliRunner

import daskfactor as dfac
from daskfactor.cli.main import app


@pytest.fixture
def matrix(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "V.npy"
    np.save(path, rng.random((12, 2)) @ rng.random((2, 9)) + 0.05)
    return str(path)


def test_particles_of_a_matrix(matrix, tmp_path):
    store = str(tmp_path / "modes.zarr")
    arguments = [matrix, "--store", store, "-k", "2", "-m", "3", "--pilot", "1", "--seed", "5"]
    more = ["--start", "random", "--max-iter", "30", "--quiet", "--json"]
    result = CliRunner().invoke(app, ["particles", *arguments, *more])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["particles"]["done"] == 3
    tree = dfac.open_run(store)
    made = json.loads(tree.attrs["sampler"])
    assert (made["start"], made["max_iter"], tree.attrs["random_seed"]) == ("random", 30, "5")
    result = CliRunner().invoke(app, ["resume", store, "--quiet"])
    assert result.exit_code == 0, result.output
    assert "3 of 3 particles" in result.output
    result = CliRunner().invoke(app, ["info", store, "--diagnose"])
    assert result.exit_code == 0, result.output
    assert "Stein discrepancy" in result.output


def test_what_cannot_be_done_is_one_sentence(matrix, tmp_path):
    store = tmp_path / "modes.zarr"
    arguments = ["particles", matrix, "--store", str(store), "-k", "2", "--quiet"]
    result = CliRunner().invoke(app, [*arguments, "--threshold", "-1"])
    assert result.exit_code == 3
    assert "threshold must be" in result.output
    assert not store.exists()
    result = CliRunner().invoke(app, [*arguments, "--beta", "1.5"])
    assert result.exit_code == 3
    assert not store.exists()
