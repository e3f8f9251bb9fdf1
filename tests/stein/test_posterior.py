"""``stein_posterior``: particles, weights and results, in memory and in a store."""

import json

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError, SamplingWarning, StoreError
from daskfactor.stein.particles import on_simplex
from tests.refusals import refused
from tests.results.runs import validate

ROWS, COLUMNS = 24, 18


def values(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((ROWS, 3)) @ rng.random((3, COLUMNS))
    return X * rng.gamma(20.0, 0.05, size=X.shape)


def gaps(share=0.2):
    return np.where(np.random.default_rng(1).random((ROWS, COLUMNS)) < share, np.nan, values())


def counts():
    return sparse.csr_array(np.random.default_rng(2).poisson(4 * values()))


def posterior(V, model=None, method=None, **options):
    settings = {"particles": 5, "pilot": 2, "random_seed": 4, "progressbar": False, "blocks": 2}
    settings |= options
    of_blocks = ("dtype", "balance", "allow_empty", "memory_limit")
    reading = {name: settings.pop(name) for name in of_blocks if name in settings}
    if reading:
        blocks, unstored = settings.pop("blocks"), settings.pop("unstored", None)
        V = dfac.as_blocks(V, blocks, unstored=unstored, **reading)
    model, method = model or dfac.SILFNMF(3), method or dfac.Ensemble(max_iter=120)
    return dfac.stein_posterior(V, model, method, **settings)


def same(one, other, exact=True):
    for name in ("posterior/W", "posterior/H", "sample_stats/weight", "stein/stein_matrix"):
        check = assert_array_equal if exact else assert_allclose
        check(one[name].values, other[name].values)


LABELLED = xr.DataArray(values(), dims=("pixel", "band"), coords={"band": np.arange(18.0)})
DATA = {"dense": (values(), {}), "gaps": (gaps(), {}), "labelled": (LABELLED, {})}
DATA |= {"zeros": (counts(), {"unstored": "zero"})}
DATA |= {"ratings": (counts(), {"unstored": "missing", "balance": True})}


@pytest.mark.parametrize("kind", DATA)
def test_particles_of_every_kind_of_data(kind):
    V, options = DATA[kind]
    tree = posterior(V, **options)
    validate(tree)
    W, H = (tree["posterior"][name].values[0] for name in "WH")
    assert (W.shape, H.shape) == ((5, ROWS, 3), (5, 3, COLUMNS))
    assert_allclose(W.sum(axis=1), 1.0, rtol=1e-5)
    assert min(W.min(), H.min()) >= 0
    stats, stein = tree["sample_stats"], tree["stein"]
    assert stats["weight"].sum() == pytest.approx(1.0)
    model = dfac.SILFNMF.from_dict(json.loads(tree.attrs["model"]))
    assert model.threshold == tree["constant_data"]["threshold"]
    dense = V.toarray().astype(float) if sparse.issparse(V) else np.asarray(V)
    if options.get("unstored") == "missing":
        dense = np.where(dense == 0, np.nan, dense)
    f = [model.objective(dense, *pair) for pair in zip(W, H, strict=True)]
    assert_allclose(stats["objective"].values[0], f, rtol=1e-4)
    made, complete = json.loads(tree.attrs["sampler"]), np.isfinite(dense).all()
    assert made["optimizer"] == ("coordinate_descent" if complete else "multiplicative")
    assert max(f) < 0.5 * np.nansum((dense - np.nanmean(dense)) ** 2)
    # What the verb says of its particles is what stein_discrepancy finds of them.
    given = {name: value for name, value in options.items() if name == "unstored"}
    judged = dfac.stein_discrepancy(tree, V, dfac.SILFNMF(3), progressbar=False, **given)
    assert_allclose(judged["stein_matrix"], stein["stein_matrix"], rtol=1e-5)
    assert float(judged["discrepancy_optimal"]) == pytest.approx(float(stein["discrepancy"]))
    assert stein["discrepancy"] <= stein["discrepancy_equal"]
    if isinstance(V, xr.DataArray):
        assert tree["posterior/W"].dims == ("chain", "draw", "pixel", "component")
        assert_array_equal(tree["posterior/H"]["band"], np.arange(18.0))


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_particles_of_a_tweedie_model_are_modes_of_its_posterior(beta):
    V = values() + 0.1
    model = dfac.TweedieNMF(3, beta=beta, dispersion=0.05, rate_w=0.3, rate_h=0.2)
    method = dfac.Ensemble(start="random", max_iter=1000, tol=1e-9)
    tree = posterior(V, model, method, dtype="float64", particles=3)
    validate(tree)
    assert "objective" not in tree["sample_stats"]
    updates = dfac.MultiplicativeUpdates(1000, 1e-9)
    point = dfac.optimize(dfac.as_blocks(V, dtype="float64"), model, updates, progressbar=False)
    pair, kernel = (point["W"].values[None], point["H"].values[None]), dfac.IMQ(1.0, 1.0)
    best = dfac.stein_discrepancy(pair, V, model, kernel=kernel, progressbar=False)
    assert tree["sample_stats"]["lp"].max() > float(best["log_density"][0]) - 0.5
    assert tree.attrs["dispersion"] == 0.05


def test_a_threshold_as_given_needs_no_pilot():
    events, given = [], dfac.SILFNMF(3, threshold=50.0)
    tree = posterior(values(), given, callback=lambda event: events.append(event.phase))
    assert tree["constant_data"]["threshold"] == 50.0
    assert "pilot" not in events
    assert events.count("particles") == 6
    events.clear()
    auto = posterior(values(), callback=lambda event: events.append(event.phase))
    assert events.count("pilot") == 2
    assert float(auto["constant_data"]["threshold"]) > auto["sample_stats"]["objective"].max()


def test_pilots_are_runs_of_their_own():
    tree = posterior(values(), method=dfac.Ensemble(start="random"))
    objective = tree["sample_stats/objective"].values[0]
    threshold = float(tree["constant_data/threshold"])
    assert np.abs(1.2 * objective / threshold - 1.0).min() > 1e-6
    assert 0.8 < threshold / (1.2 * objective.max()) < 1.25


def test_particles_that_are_all_the_same_are_weighed_too():
    """The posterior of one component has one mode, which all starts find."""
    model = dfac.TweedieNMF(1, beta=2.0, dispersion=0.1, rate_w=1.0, rate_h=1.0)
    method = dfac.Ensemble(start="random", max_iter=2000, tol=0.0)
    for count in (1, 3):
        tree = posterior(values(), model, method, particles=count, dtype="float64")
        assert float(tree["sample_stats/weight"].sum()) == pytest.approx(1.0)
        assert np.ptp(tree["sample_stats/lp"].values) < 1e-6


def test_particles_and_likelihoods_that_are_not_good_enough_are_told_of():
    with pytest.warns(SamplingWarning, match="sharpness=2 hardly tells"):
        posterior(1e-3 * values())
    posterior(1e-3 * values(), dfac.SILFNMF(3, sharpness=1e9))
    with pytest.warns(SamplingWarning, match="only 0 of 5"):
        posterior(values(), dfac.SILFNMF(3, threshold=1e-3, sharpness=1e6))


def test_a_store_holds_what_memory_would(tmp_path, monkeypatch):
    path = tmp_path / "run.zarr"
    stored, kept = posterior(gaps(), store=path), posterior(gaps())
    validate(stored)
    for own in (kept, dfac.open_run(path), dfac.resume(path, progressbar=False)):
        same(own, stored)
    for executor in ("serial", dfac.LanesExecutor(3)):
        same(posterior(gaps(), executor=executor), kept)
    refused(StoreError, None, posterior, gaps(), store=path)
    refused(OptionError, "weighted together", dfac.resume, path, 10, progressbar=False)
    monkeypatch.setattr("daskfactor.stein.posterior.memory_budget", lambda limit: 1000)
    refused(OptionError, "pass store=", posterior, values())
    assert posterior(values(), store=tmp_path / "other.zarr")["posterior"].sizes["draw"] == 5


def stop_at(done):
    """Return a callback that stops a run after so many particles."""

    def stop(event):
        if (event.phase, event.done) == ("particles", done):
            raise KeyboardInterrupt

    return stop


@pytest.mark.quick("1-kept", "3-given")
@pytest.mark.parametrize(("after", "data"), [(0, "given"), (1, "kept"), (3, "given"), (5, "kept")])
def test_a_run_cut_short_goes_on_to_the_same_end(tmp_path, after, data):
    V = gaps() if data == "kept" else counts()
    options = {} if data == "kept" else {"unstored": "zero", "balance": True}
    path, events = tmp_path / "run.zarr", []
    with pytest.raises(KeyboardInterrupt):
        posterior(V, store=path, callback=stop_at(after), executor="serial", **options)
    if after:
        part = dfac.open_run(path)
        assert part["posterior"].sizes["draw"] == after
        assert "weight" not in part["sample_stats"]
    again = {} if data == "kept" else {"V": V}
    whole = dfac.resume(path, progressbar=False, callback=events.append, **again)
    left = [one.done for one in events if one.phase == "particles"]
    assert left == (list(range(after, 6)) if after < 5 else [])
    same(whole, posterior(V, **options))


@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")  # few steps go not far
def test_a_chain_is_written_as_it_is_drawn(tmp_path):
    given, path = (values(), dfac.SILFNMF(3, threshold=50.0)), tmp_path / "run.zarr"
    method = dfac.SimplexHMC(draws=12, tune=4, steps=3)
    refused(KeyboardInterrupt, None, posterior, *given, method, store=path, callback=stop_at(2))
    assert dfac.open_run(path)["posterior"].sizes["draw"] == 2
    same(dfac.resume(path, progressbar=False), posterior(*given, method))


def test_an_error_before_the_first_particle_leaves_nothing(tmp_path):
    def fail(event):
        assert event.phase != "particles"

    refused(AssertionError, None, posterior, values(), store=tmp_path / "run.zarr", callback=fail)
    assert not list(tmp_path.iterdir())


def test_dead_components_lie_on_the_simplex():
    W = np.array([[1.0, 0.0, 2.0], [3.0, 0.0, 2.0]], np.float32)
    H = np.arange(6, dtype=np.float32).reshape(3, 2)
    new_w, new_h = on_simplex(W, H)
    assert_allclose(new_w, [[0.25, 0.5, 0.5], [0.75, 0.5, 0.5]])
    assert_allclose(new_w @ new_h, W @ H)


BY_COORDINATES = dfac.Ensemble(optimizer="coordinate_descent")
FIXING = dfac.TweedieNMF(3, fixed_w=np.ones((ROWS, 1)))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_is_one_sentence(tmp_path):
    for V, model, options, error, message in (
        (-values(), None, {}, DataError, "no entry is positive"),
        (values(), dfac.GaussianMF(3), {}, OptionError, "SILFNMF"),
        (values(), None, {"particles": 0}, OptionError, "particles"),
        (values(), None, {"pilot": 0}, OptionError, "pilot"),
        (values(), None, {"method": dfac.SimplexHMC(draws=4)}, OptionError, "more than draws=4"),
        (values(), None, {"method": dfac.Ensemble(start="nndsvd")}, OptionError, "one start only"),
        (values(), None, {"align": "yes"}, OptionError, "align must be True or False"),
        (values(), None, {"method": "adam"}, OptionError, "method must be one of Ensemble"),
        (values(), None, {"kernel": "imq"}, OptionError, "kernel must be IMQ"),
        (values(), dfac.TweedieNMF(3), {"tangent": True}, OptionError, "tangent"),
        (values(), FIXING, {}, OptionError, "fixes some"),
        (np.zeros((4, 3)), None, {}, DataError, "no entry is positive"),
        (values()[:, :0], None, {}, DataError, "empty"),
        (gaps(), None, {"method": BY_COORDINATES}, OptionError, "missing"),
    ):
        given = {"store": tmp_path / "run.zarr"} | options
        assert "\n" not in refused(error, message, posterior, V, model, **given)
        assert not list(tmp_path.iterdir())


def test_one_factorization_in_two_orders_is_one_mode(tmp_path):
    method = dfac.Ensemble(start="random", max_iter=2000, tol=1e-8)
    options = {"unstored": "zero", "particles": 4, "balance": True, "dtype": "float64"}
    aligned, stored, drawn = (
        posterior(counts(), dfac.SILFNMF(2), method, **options, **own).load()
        for own in ({}, {"store": tmp_path / "run.zarr"}, {"align": False})
    )
    same(aligned, stored)
    (W, H), (its_w, its_h) = (
        [tree["posterior"][name].values[0] for name in "WH"] for tree in (aligned, drawn)
    )
    swapped = [not np.allclose(*pair, rtol=1e-9) for pair in zip(W, its_w, strict=True)]
    assert any(swapped)
    for mine, its, turned in zip(W, its_w, swapped, strict=True):
        assert_allclose(mine, its[:, ::-1] if turned else its, rtol=1e-9)
        apart = np.linalg.norm(mine[:, :, None] - W[0][:, None], axis=0)
        assert np.trace(apart) <= np.trace(apart[::-1])
    assert_allclose(W @ H, its_w @ its_h)


METHODS = dfac.SimplexHMC(draws=12, tune=10, steps=3), dfac.SVGD(15), dfac.SteinDescent(5)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")  # few steps go not far
def test_other_methods_make_particles_too(tmp_path, method):
    given = values(), dfac.SILFNMF(3, threshold=50.0), method
    tree = posterior(*given, store=tmp_path / "run.zarr")
    same(tree, posterior(*given, executor=dfac.LanesExecutor(2)))
    validate(tree)
    assert json.loads(tree.attrs["sampler"]) == method.to_dict()
    W = tree["posterior/W"].values[0]
    assert_allclose(W.sum(axis=1), 1.0, rtol=1e-5)
    assert not np.allclose(W[0], W[1])


def test_weights_prefer_good_particles():
    """One good particle and four that did not get far: the weight is where the mass is."""
    V = values()
    tree = posterior(V, dfac.SILFNMF(3, threshold=30.0), dfac.Ensemble(max_iter=200))
    good = tree["posterior"]["W"].values[0, :1], tree["posterior"]["H"].values[0, :1]
    rng = np.random.default_rng(0)
    poor = rng.random((4, ROWS, 3)), 3 * rng.random((4, 3, COLUMNS))
    W, H = (np.concatenate(pair) for pair in zip(good, poor, strict=True))
    found = dfac.stein_discrepancy((W, H), V, dfac.SILFNMF(3, threshold=1.0), progressbar=False)
    assert float(found["weight"][0]) > 0.9
