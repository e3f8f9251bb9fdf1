"""The command line on a store of particles."""

import json

import numpy as np
import pytest

from tests.cli.shell import call, plain
from tests.results.particle_tree import particle_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("particles")
    particle_store(folder / "silf.zarr")
    particle_store(folder / "tweedie.zarr", silf=False)
    particle_store(folder / "early.zarr", done=4)
    return folder


def test_info_tells_of_particles_and_their_weights(stores):
    text = plain(call("info", stores / "silf.zarr").stdout)
    assert "6 of 6 particles done" in text
    assert "4 particles carry weight, worth 2.8 of equal weight, the largest 50%" in text
    assert "Stein discrepancy 0.5 (0.75 under equal weights)" in text
    assert "objective 4.463 to 5.65" in text
    assert "resolved threshold 9" in text
    assert "Ensemble(start=q_transform)" in text
    for absent in ("divergences", "resume", "tuning", "dispersion"):
        assert absent not in text
    text = plain(call("info", stores / "tweedie.zarr").stdout)
    assert "dispersion 1, prior rates 2 (W) and 3 (H)" in text
    assert "objective" not in text


def test_info_of_particles_that_are_not_all_there(stores):
    text = plain(call("info", stores / "early.zarr").stdout)
    assert "4 of 6 particles done" in text
    assert "none yet: until all particles are there, they count alike" in text
    assert "to finish daskfactor resume" in text
    assert "--draws" not in text
    found = json.loads(call("info", stores / "early.zarr", "--json").stdout)
    assert found["particles"]["with_weight"] is None
    assert (found["draws_done"], found["draws_kept"]) == (4, 4)


def test_info_as_json_and_with_a_diagnosis(stores):
    found = json.loads(call("info", stores / "silf.zarr", "--json", "--diagnose").stdout)
    particles = found["particles"]
    assert (particles["done"], particles["planned"], particles["with_weight"]) == (6, 6, 4)
    assert particles["threshold"] == 9.0
    assert particles["discrepancy"] == 0.5
    assert found["lights"]["predictions"]["status"] == "red"
    assert "worth 2.8 of equal weight" in found["lights"]["predictions"]["reasons"]
    assert "one_particle" in found["convergence"]["functionals"]["mu_mean"]
    assert "widest of" in call("info", stores / "silf.zarr", "--diagnose").stdout


def test_predict_takes_what_the_model_has(stores):
    result = call("predict", stores / "silf.zarr", "--rows", "0:2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 2 * 5
    assert np.isfinite([float(value) for value in lines[1].split(",")[2:]]).all()
    refused = call("predict", stores / "silf.zarr", "--of", "observation")
    assert refused.exit_code == 3
    assert "a SILFNMF has none" in refused.stderr
    assert call("predict", stores / "tweedie.zarr", "--of", "observation").exit_code == 0


def test_plot_draws_them(stores, tmp_path):
    result = call("plot", stores / "silf.zarr", "-o", tmp_path / "p.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
