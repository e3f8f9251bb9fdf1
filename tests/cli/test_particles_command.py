import json

import numpy as np
import pytest

import daskfactor as dfac
from tests.cli.shell import call, succeed


@pytest.fixture
def matrix(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "V.npy"
    np.save(path, rng.random((12, 2)) @ rng.random((2, 9)) + 0.05)
    return str(path)


def test_particles_of_a_matrix(matrix, tmp_path):
    store = tmp_path / "modes.zarr"
    arguments = [matrix, "--store", store, "-k", 2, "-m", 3, "--pilot", 1, "--seed", 5]
    more = ["--start", "random", "--max-iter", 30, "--quiet", "--json"]
    made = json.loads(succeed("particles", *arguments, *more))
    assert made["particles"]["done"] == 3
    tree = dfac.open_run(store)
    made = json.loads(tree.attrs["sampler"])
    assert (made["start"], made["max_iter"], tree.attrs["random_seed"]) == ("random", 30, "5")
    assert "3 of 3 particles" in succeed("resume", store, "--quiet")
    assert "Stein discrepancy" in succeed("info", store, "--diagnose")


def test_what_cannot_be_done_is_one_sentence(matrix, tmp_path):
    store = tmp_path / "modes.zarr"
    for option, said in ((("--threshold", -1), "threshold must be"), (("--beta", 1.5), "beta")):
        result = call("particles", matrix, "--store", store, "-k", 2, "--quiet", *option)
        assert result.exit_code == 3
        assert said in result.output
        assert not store.exists()
