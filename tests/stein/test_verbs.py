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
    given, options = (problem.particles(count), problem.V, problem.model), QUIET | problem.options
    return dfac.stein_discrepancy(*given, blocks=2, **options | settings)


def counts():
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(1, 2, (20, 2)) @ rng.gamma(1, 2, (2, 18))).astype(float)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    return path, dfac.sample(counts(), dfac.TweedieNMF(2), store=path, **RUN)


def of_counts(particles, model=None, **options):
    """The discrepancy under the posterior of the counts."""
    model = dfac.TweedieNMF(2) if model is None else model
    return dfac.stein_discrepancy(particles, counts(), model, blocks=2, **(QUIET | options))


def test_gives_the_matrix_and_three_values():
    kernel, weights = dfac.IMQ(0.7, 2.5), np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    found, K = run(weights=weights, kernel=kernel), matrix(ABOVE, kernel=kernel)
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
    # Equal weights unless told, and the paper's kernel.
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
    given = {"V": ABOVE.V, "model": ABOVE.model} | QUIET
    found = dfac.stein_discrepancy((W * scale[:, None], H / scale[:, :, None]), blocks=2, **given)
    assert_allclose(found["stein_matrix"], run()["stein_matrix"], rtol=1e-8)
    W[2, :, 1] = 0.0
    match = "component 1 of particle 2 is zero"
    refused(OptionError, match, dfac.stein_discrepancy, (W, H), **given)


def test_draws_of_a_run(trace):
    path, tree = trace
    found = of_counts(tree)
    assert found.sizes["particle"] == 24
    assert_array_equal(found["chain"], np.repeat([0, 1], 12))
    assert_array_equal(found["draw"], np.tile(tree["posterior"]["draw"], 2))
    xr.testing.assert_identical(of_counts(str(path)), found)
    kept = dfac.sample(counts(), dfac.TweedieNMF(2), **RUN)
    assert_array_equal(of_counts(kept)["stein_matrix"], found["stein_matrix"])
    W, H = (tree["posterior"][name].values for name in "WH")
    pair = W.reshape(24, 20, 2), H.reshape(24, 2, 18)
    constants = {name: float(value) for name, value in tree["constant_data"].data_vars.items()}
    fixed = of_counts(pair, dfac.TweedieNMF(2, **constants))
    assert_array_equal(fixed["stein_matrix"], found["stein_matrix"])
    # What the run decided is what a pair alone would have been given.
    assert_allclose(of_counts(pair)["stein_matrix"], found["stein_matrix"], rtol=1e-5)


def test_other_posteriors_take_draws_and_pairs(trace):
    under, rng = of_counts(trace[1], dfac.SILFNMF(2, threshold=1000.0)), np.random.default_rng(0)
    pair = rng.gamma(1.0, size=(4, 20, 2)), rng.gamma(1.0, size=(4, 2, 18))
    estimated = dfac.stein_discrepancy(pair, counts() + 0.5, dfac.TweedieNMF(2, beta=2.0), **QUIET)
    assert np.isfinite([under["discrepancy"], estimated["discrepancy"]]).all()


def test_many_draws_are_thinned_with_a_notice(trace):
    _, tree = trace
    with pytest.warns(SamplingWarning, match="of the 24 draws one in 3 is used"):
        found = of_counts(tree, most=10)
    assert found.sizes["particle"] == 8
    assert_array_equal(found["draw"], np.tile(tree["posterior"]["draw"], 2)[::3])
    weights = np.full(24, 1 / 24)
    refused(OptionError, "pass most=24 as well", of_counts, tree, most=10, weights=weights)


def peak_of(*given):
    """Memory at its peak in bytes; what compiles has done so before."""
    tracemalloc.start()
    found, peak = dfac.stein_discrepancy(*given, **QUIET), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.isfinite(found["discrepancy"])
    return peak


def test_memory_beside_the_particles():
    """50 pairs of factors of 10304 x 400 take 21 MB, and less than as much again."""
    rng = np.random.default_rng(0)
    V = rng.random((10304, 400), dtype=np.float32)
    pair = rng.random((50, 10304, 10), np.float32), rng.random((50, 10, 400), np.float32)
    model = dfac.SILFNMF(10, threshold=1e5)
    with dfac.as_blocks(V, 8) as data:
        dfac.stein_discrepancy(tuple(one[:2] for one in pair), data, model, **QUIET)
        assert peak_of(pair, data, model) < sum(one.nbytes for one in pair)


def test_sparse_data_are_never_dense():
    """10 million cells would be 80 MB."""
    rng = np.random.default_rng(0)
    rows, cols = rng.integers(0, 5000, 10_000), rng.integers(0, 2000, 10_000)
    V = sparse.coo_array((np.ones(10_000), (rows, cols)), shape=(5000, 2000)).tocsr()
    pair = rng.gamma(1.0, size=(3, 5000, 2)), rng.gamma(1.0, size=(3, 2, 2000))
    model = dfac.TweedieNMF(2, beta=1.0, dispersion=1.0)
    with dfac.as_blocks(V, 2, dtype="float64", unstored="zero", allow_empty=True) as data:
        dfac.stein_discrepancy(pair, data, model, **QUIET)
        assert peak_of(pair, data, model) < 5e6


W, H = ABOVE.particles(3)


def test_what_is_refused():
    usual = {"particles": (W, H), "V": ABOVE.V, "model": ABOVE.model} | QUIET
    for settings, message in (
        ({"model": dfac.GaussianMF(2)}, "model must be a SILFNMF"),
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
        ({"model": dfac.SILFNMF(2)}, "resolved first"),
    ):
        given = usual | settings
        refused((OptionError, ModelError), message, dfac.stein_discrepancy, **given)


def test_options_that_are_refused_and_those_that_are_usual():
    for kind, settings, message in (
        (dfac.IMQ, {"scale_w": 0.0}, "scale_w"),
        (dfac.IMQ, {"scale_h": "mean"}, "scale_h"),
        (dfac.IMQ, {"scale_h": -1}, "scale_h"),
        (dfac.IMQ, {"scale_w": True}, "scale_w"),
        (dfac.IMQ, {"power_w": 0.5}, "power_w"),
        (dfac.IMQ, {"power_h": -1.0}, "power_h"),
        (dfac.SVGD, {"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        (dfac.SVGD, {"step": 0}, "step must be a positive"),
        (dfac.SVGD, {"step": "fast"}, "step must be \"auto\" or a positive number, got 'fast'"),
        (dfac.SteinDescent, {"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        (dfac.SteinDescent, {"step": -1.0}, "step must be a positive"),
        (dfac.SteinDescent, {"step": "fast"}, "step must be"),
        (dfac.SimplexHMC, {"draws": 0}, "draws must be a whole number of at least 1, got 0"),
        (dfac.SimplexHMC, {"tune": -1}, "tune must be a whole number"),
        (dfac.SimplexHMC, {"steps": 2.5}, "steps must be a whole number"),
        (dfac.SimplexHMC, {"step": "fast"}, "step must be"),
        (dfac.SimplexHMC, {"step": 0.0}, "step must be a positive"),
        (dfac.SimplexHMC, {"target_accept": 1.0}, "lie strictly between 0 and 1, got 1.0"),
        (dfac.Ensemble, {"start": "warm"}, 'start must be "'),
        (dfac.Ensemble, {"optimizer": "adam"}, 'optimizer must be "auto"'),
        (dfac.Ensemble, {"max_iter": 0}, "max_iter"),
        (dfac.Ensemble, {"tol": -1.0}, "tol"),
        (dfac.Ensemble, {"tol": float("nan")}, "tol"),
        (dfac.Ensemble, {"transfer_rank": 0}, "transfer_rank"),
    ):
        refused(OptionError, message, kind, **settings)
    usual = {"draws": 1000, "tune": 200, "steps": 20, "step": "auto", "target_accept": 0.8}
    assert dfac.SimplexHMC().to_dict() == {"type": "SimplexHMC"} | usual
    assert dfac.SVGD(7).to_dict() == {"type": "SVGD", "steps": 7, "step": "auto"}
