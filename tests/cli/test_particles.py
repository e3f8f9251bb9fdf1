"""The command line on a store of particles, and the command that makes one."""

import json

import numpy as np
import pytest

import daskfactor as dfac
from tests.cli.shell import answer, fails, plain, succeed
from tests.results.particle_tree import particle_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("particles")
    particle_store(folder / "silf.zarr")
    particle_store(folder / "tweedie.zarr", silf=False)
    particle_store(folder / "early.zarr", done=4)
    return folder


def test_info_tells_of_particles_and_their_weights(stores):
    text = plain(succeed("info", stores / "silf.zarr"))
    assert "6 of 6 particles done" in text
    assert "4 particles with positive weight, effective number 2.8, the largest weight 50%" in text
    assert "Stein discrepancy 0.5 (0.75 with equal weights)" in text
    assert "objective 4.463 to 5.65" in text
    assert "resolved threshold 9" in text
    assert "Ensemble(start=q_transform)" in text
    for absent in ("divergences", "resume", "tuning", "dispersion"):
        assert absent not in text
    text = plain(succeed("info", stores / "tweedie.zarr"))
    assert "dispersion 1, prior rates 2 (W) and 3 (H)" in text
    assert "objective" not in text


def test_info_of_particles_that_are_not_all_there(stores):
    text = plain(succeed("info", stores / "early.zarr"))
    assert "4 of 6 particles done" in text
    assert "none yet: particles have equal weights until all of them are finished" in text
    assert "to finish daskfactor resume" in text
    assert "--draws" not in text
    found = answer("info", stores / "early.zarr")
    assert found["particles"]["with_weight"] is None
    assert (found["draws_done"], found["draws_kept"]) == (4, 4)


def test_info_as_json_and_with_a_diagnosis(stores):
    found = answer("info", stores / "silf.zarr", "--diagnose")
    particles = found["particles"]
    assert (particles["done"], particles["planned"], particles["with_weight"]) == (6, 6, 4)
    assert (particles["threshold"], particles["discrepancy"]) == (9.0, 0.5)
    assert found["lights"]["predictions"]["status"] == "red"
    assert "effective number of 2.8" in found["lights"]["predictions"]["reasons"]
    assert "one_particle" in found["convergence"]["functionals"]["mu_mean"]
    assert "widest of" in succeed("info", stores / "silf.zarr", "--diagnose")


def test_predict_and_plot_take_what_the_model_has(stores, tmp_path):
    lines = succeed("predict", stores / "silf.zarr", "--rows", "0:2").splitlines()
    assert len(lines) == 1 + 2 * 5
    assert np.isfinite([float(value) for value in lines[1].split(",")[2:]]).all()
    fails(3, "SILFNMF does not have", "predict", stores / "silf.zarr", "--of", "observation")
    succeed("predict", stores / "tweedie.zarr", "--of", "observation")
    succeed("plot", stores / "silf.zarr", "-o", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def matrix(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "V.npy"
    np.save(path, rng.random((12, 2)) @ rng.random((2, 9)) + 0.05)
    return str(path)


def test_particles_of_a_matrix(matrix, tmp_path):
    store = tmp_path / "modes.zarr"
    arguments = [matrix, "--store", store, "-k", 2, "-m", 3, "--pilot", 1, "--seed", 5]
    made = answer("particles", *arguments, "--start", "random", "--max-iter", 30, "--quiet")
    assert made["particles"]["done"] == 3
    tree = dfac.open_run(store)
    made = json.loads(tree.attrs["sampler"])
    assert (made["start"], made["max_iter"], tree.attrs["random_seed"]) == ("random", 30, "5")
    assert "3 of 3 particles" in succeed("resume", store, "--quiet")
    assert "Stein discrepancy" in succeed("info", store, "--diagnose")


def test_what_cannot_be_done_is_one_sentence(matrix, tmp_path):
    store = tmp_path / "modes.zarr"
    for option, said in ((("--threshold", -1), "threshold must be"), (("--beta", 1.5), "beta")):
        fails(3, said, "particles", matrix, "--store", store, "-k", 2, "--quiet", *option)
        assert not store.exists()
