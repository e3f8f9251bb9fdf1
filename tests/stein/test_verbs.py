"""``stein_discrepancy``: what it takes, gives and refuses."""

import json
import tracemalloc

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import ModelError, OptionError, SamplingWarning
from daskfactor.stein import stein_weights
from tests.refusals import refused
from tests.stein.problems import BY_NAME
from tests.stein.test_stein import matrix

QUIET = {"progressbar": False, "executor": "serial"}
RUN = QUIET | {"draws": 12, "tune": 10, "chains": 2, "random_seed": 1, "blocks": 2}
ABOVE = BY_NAME["silf, above"]


def run(problem=ABOVE, count=5, **settings):
    pair = problem.particles(count)
    return dfac.stein_discrepancy(
        pair, problem.V, problem.model, blocks=2, **(QUIET | problem.options | settings)
    )


def counts():
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(1, 2, (20, 2)) @ rng.gamma(1, 2, (2, 18))).astype(float)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    return path, dfac.sample(counts(), dfac.TweedieNMF(2), store=path, **RUN)


def test_gives_the_matrix_and_three_values():
    kernel = dfac.IMQ(0.7, 2.5)
    weights = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    found = run(weights=weights, kernel=kernel)
    K = matrix(ABOVE, kernel=kernel).matrix
    assert_allclose(found["stein_matrix"], K, rtol=1e-10)
    assert found["stein_matrix"].dims == ("particle", "other_particle")
    assert float(found["discrepancy"]) == pytest.approx(np.sqrt(weights @ K @ weights))
    assert float(found["discrepancy_equal"]) == pytest.approx(np.sqrt(K.mean()))
    assert_allclose(found["weight"], stein_weights(K), atol=1e-9)
    assert float(found["discrepancy_optimal"]) <= float(found["discrepancy_equal"])
    pairs = list(zip(*ABOVE.particles(5), strict=True))
    densities = [ABOVE.log_density(*pair) for pair in pairs]
    assert_allclose(found["log_density"], densities, rtol=1e-9)
    objectives = [ABOVE.model.objective(ABOVE.dense, *pair) for pair in pairs]
    assert_allclose(found["objective"], objectives, rtol=1e-9)
    assert (found.attrs["scale_w"], found.attrs["scale_h"]) == (0.7, 2.5)
    assert json.loads(found.attrs["model"])["type"] == "SILFNMF"


def test_equal_weights_unless_told_and_the_papers_kernel():
    found = run()
    assert float(found["discrepancy"]) == float(found["discrepancy_equal"])
    assert (found.attrs["scale_w"], found.attrs["scale_h"]) == (1e-2, 1e3)
    assert run(tangent=True).attrs["tangent"] == 1


def test_median_scales_of_a_tweedie_model_are_reported():
    problem = BY_NAME["poisson, zeros"]
    found = run(problem)
    W, _ = problem.particles(5)
    distances = np.sqrt(((W[:, None] - W) ** 2).sum(axis=(2, 3)))
    median = np.median(distances[np.triu_indices(5, 1)])
    assert found.attrs["scale_w"] == pytest.approx(median, rel=1e-8)
    again = run(problem, kernel=dfac.IMQ(found.scale_w, found.scale_h))
    assert_allclose(again["stein_matrix"], found["stein_matrix"], rtol=1e-12)


def test_silf_particles_are_put_on_the_simplex_first():
    W, H = ABOVE.particles(5)
    scale = np.random.default_rng(0).gamma(2.0, size=(5, 2))
    pair = (W * scale[:, None], H / scale[:, :, None])
    found = dfac.stein_discrepancy(pair, ABOVE.V, ABOVE.model, blocks=2, **QUIET)
    assert_allclose(found["stein_matrix"], run()["stein_matrix"], rtol=1e-8)
    W[2, :, 1] = 0.0
    with pytest.raises(OptionError, match="component 1 of particle 2 is zero"):
        dfac.stein_discrepancy((W, H), ABOVE.V, ABOVE.model, **QUIET)


def test_draws_of_a_run(trace):
    path, tree = trace
    model = dfac.TweedieNMF(2)
    found = dfac.stein_discrepancy(tree, counts(), model, blocks=2, **QUIET)
    assert found.sizes["particle"] == 24
    assert_array_equal(found["chain"], np.repeat([0, 1], 12))
    assert_array_equal(found["draw"], np.tile(tree["posterior"]["draw"], 2))
    stored = dfac.stein_discrepancy(str(path), counts(), model, blocks=2, **QUIET)
    xr.testing.assert_identical(stored, found)
    posterior = tree["posterior"].to_dataset()
    W = posterior["W"].values.reshape(24, 20, 2)
    H = posterior["H"].values.reshape(24, 2, 18)
    constants = {name: float(value) for name, value in tree["constant_data"].data_vars.items()}
    fixed = dfac.TweedieNMF(2, **constants)
    pair = dfac.stein_discrepancy((W, H), counts(), fixed, blocks=2, **QUIET)
    assert_array_equal(pair["stein_matrix"], found["stein_matrix"])
    # What the run decided is what a pair alone would have been given.
    alone = dfac.stein_discrepancy((W, H), counts(), model, blocks=2, **QUIET)
    assert_allclose(alone["stein_matrix"], found["stein_matrix"], rtol=1e-5)


def test_draws_in_memory_are_those_of_a_store(trace):
    model = dfac.TweedieNMF(2)
    tree = dfac.sample(counts(), model, **RUN)
    one, two = (
        dfac.stein_discrepancy(own, counts(), model, blocks=2, **QUIET) for own in (tree, trace[1])
    )
    assert_array_equal(one["stein_matrix"], two["stein_matrix"])


def test_many_draws_are_thinned_with_a_notice(trace):
    _, tree = trace
    model = dfac.TweedieNMF(2)
    with pytest.warns(SamplingWarning, match="of the 24 draws one in 3 is looked at"):
        found = dfac.stein_discrepancy(tree, counts(), model, most=10, **QUIET)
    assert found.sizes["particle"] == 8
    assert_array_equal(found["draw"], np.tile(tree["posterior"]["draw"], 2)[::3])
    with pytest.raises(OptionError, match="pass most=24 as well"):
        dfac.stein_discrepancy(tree, counts(), model, most=10, weights=np.full(24, 1 / 24), **QUIET)


def test_draws_under_a_silf_posterior(trace):
    model = dfac.SILFNMF(2, threshold=1000.0)
    found = dfac.stein_discrepancy(trace[1], counts(), model, **QUIET)
    assert np.isfinite(found["discrepancy"])


def test_dispersion_that_nobody_knows_is_estimated():
    V = counts() + 0.5
    rng = np.random.default_rng(0)
    pair = rng.gamma(1.0, size=(4, 20, 2)), rng.gamma(1.0, size=(4, 2, 18))
    found = dfac.stein_discrepancy(pair, V, dfac.TweedieNMF(2, beta=2.0), **QUIET)
    assert np.isfinite(found["discrepancy"])


def test_memory_beside_the_particles():
    """50 pairs of factors of 10304 x 400 take 21 MB, and less than as much again."""
    rng = np.random.default_rng(0)
    V = rng.random((10304, 400), dtype=np.float32)
    pair = rng.random((50, 10304, 10), np.float32), rng.random((50, 10, 400), np.float32)
    model = dfac.SILFNMF(10, threshold=1e5)
    small = tuple(one[:2] for one in pair)
    with dfac.as_blocks(V) as data:
        dfac.stein_discrepancy(small, data, model, **QUIET)  # compile
        tracemalloc.start()
        found = dfac.stein_discrepancy(pair, data, model, **QUIET)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert np.isfinite(found["discrepancy"])
    assert peak < sum(one.nbytes for one in pair)


def test_sparse_data_are_never_dense():
    """10 million cells would be 80 MB."""
    rng = np.random.default_rng(0)
    rows, cols = rng.integers(0, 5000, 10_000), rng.integers(0, 2000, 10_000)
    V = sparse.coo_array((np.ones(10_000), (rows, cols)), shape=(5000, 2000)).tocsr()
    pair = rng.gamma(1.0, size=(3, 5000, 2)), rng.gamma(1.0, size=(3, 2, 2000))
    model = dfac.TweedieNMF(2, beta=1.0, dispersion=1.0)
    with dfac.as_blocks(V, 2, dtype="float64", unstored="zero", allow_empty=True) as data:
        dfac.stein_discrepancy(pair, data, model, **QUIET)
        tracemalloc.start()
        dfac.stein_discrepancy(pair, data, model, **QUIET)
        assert tracemalloc.get_traced_memory()[1] < 5e6
        tracemalloc.stop()


W, H = ABOVE.particles(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": dfac.GaussianMF(2)}, "is known from the posterior of"),
        ({"model": dfac.TweedieNMF(2, beta=2.0), "tangent": True}, "leave it out"),
        ({"model": dfac.SILFNMF(3, threshold=1.0)}, "have 2 components, the model 3"),
        ({"kernel": 1.0}, "kernel must be"),
        ({"most": 0}, "most must be"),
        ({"weights": [0.5, 0.5]}, "one number for each of the 3"),
        ({"particles": (W,)}, "a pair"),
        ({"particles": (W[0], H[0])}, "stack the factors"),
        ({"particles": (W, H[:2])}, "equally many particles"),
        ({"particles": (W, H[:, :1])}, "equally many particles"),
        ({"particles": (W[:0], H[:0])}, "at least one"),
        ({"particles": (W[:, :3], H)}, "the data have shape 7 x 6"),
        ({"particles": (-W, H)}, "W of particle 0 goes down to"),
        ({"particles": (W, np.where(H[1, 0, 2] == H, np.nan, H))}, "H of particle 1"),
    ],
)
def test_what_is_refused(settings, message):
    usual = {"particles": (W, H), "V": ABOVE.V, "model": ABOVE.model}
    refused(OptionError, message, dfac.stein_discrepancy, **usual | QUIET | settings)


def test_a_threshold_has_to_be_known():
    with pytest.raises(ModelError, match="resolved first"):
        dfac.stein_discrepancy((W, H), ABOVE.V, dfac.SILFNMF(2), **QUIET)
