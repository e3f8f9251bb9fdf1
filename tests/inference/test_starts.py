"""Where chains and descents begin: kinds of start, warm starts, results."""

import json
import math

import numpy as np
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import SerialExecutor
from daskfactor.inference import gamma_parameters, setting, starts
from daskfactor.inference.chain import Chain
from daskfactor.inference.inits import KINDS, SHORT, Init, checked_init
from daskfactor.inference.multiplicative import Descent, initial_state, start_state
from daskfactor.inference.passes import Place, evaluate
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.settings import FactorModel
from daskfactor.random import Stream, generator
from tests.inference.rainfall import rainfall
from tests.refusals import refused

K = 3
QUIET = {"progressbar": False, "executor": "serial", "random_seed": 0}
SHORTLY = QUIET | {"draws": 4, "tune": 4}
MODEL = dfac.TweedieNMF(K, dispersion=1.0)
REAL = dfac.GaussianMF(1)
ASKED = [(kind, n) for kind in FactorModel.inits for n in (1, 3) if n == 1 or KINDS[kind].varies]
"""Kinds and numbers of starts that go together."""


def counts(gaps=False):
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.exponential(size=(30, K)) @ rng.exponential(size=(K, 24))).astype(float)
    V[:, 0], V[0] = 1, 1
    return np.where(rng.random(V.shape) < 0.2, np.nan, V) if gaps else V


def factors(tree, chain=0, draw=-1):
    group = tree["posterior"]
    return group["W"].values[chain, draw], group["H"].values[chain, draw]


def begun(V, model, init, sampler, count=1, **reading):
    """W and H of chains that have been started, in the caller's order, the chains, and fits."""
    found = []
    with dfac.as_blocks(V, 2, **reading) as data:
        options = RunOptions(1, 0, count, 1, 0, "draws", 1, str(data.dtype))
        asked = checked_init(init, 1, model, data, count)
        kernel = sampler.kernel(model, data)
        setting = Setting(data, model, kernel, options, SerialExecutor(), init=asked)
        for number in range(count):
            chain = Chain(setting, number)
            chain.start()
            state = chain.tracks[0].state
            W, Ht = (state.gather(side) for side in ("rows", "columns"))
            if data.row_order is not None:
                W, Ht = W[np.argsort(data.row_order)], Ht[np.argsort(data.col_order)]
            fit = evaluate(Place(SerialExecutor(), data, state, chain.floor), model.likelihood)
            found.append((W, Ht.T, chain, fit))
    return found


@pytest.fixture(scope="module")
def trace():
    return dfac.sample(counts(), MODEL, dfac.BlockHMC(), chains=2, **SHORTLY | {"draws": 9})


@pytest.mark.quick("multiplicative-1", "q_transform-3", "nndsvd-1", "nndsvdar-3", "random-3")
@pytest.mark.parametrize(("kind", "count"), ASKED)
def test_same_bits_from_threads_and_from_sparse_data(kind, count):
    assert {*FactorModel.inits, *dfac.GaussianMF.inits} < KINDS.keys()
    V, asked = counts(), {"init": kind.replace("_", "-"), "starts": count, "chains": 2}
    options = SHORTLY | asked | {"blocks": 3}
    one = dfac.sample(V, MODEL, **options)
    assert json.loads(one.attrs["init"]) == {"kind": kind, "starts": count, "drawn": []}
    other = dfac.sample(V, MODEL, **options | {"executor": "threads"})
    for mine, its in zip(factors(one, 1), factors(other, 1), strict=True):
        np.testing.assert_array_equal(mine, its)
    method = dfac.MultiplicativeUpdates(max_iter=40, tol=0)
    asked = QUIET | {"init": kind, "starts": count, "blocks": 3}
    dense, sparsely = (
        dfac.optimize(
            dfac.as_blocks(given, 3, dtype="float64", unstored=zero), MODEL, method, **asked
        )
        for given, zero in ((V, None), (sparse.csr_array(V), "zero"))
    )
    np.testing.assert_allclose(dense.W @ dense.H, sparsely.W @ sparsely.H, rtol=1e-5)


def test_the_usual_start_is_the_multiplicative_one():
    V = counts()
    inits = {"init": "auto"}, {"init": "multiplicative"}
    usual, named = (dfac.sample(V, MODEL, **SHORTLY, **own) for own in inits)
    np.testing.assert_array_equal(factors(usual)[0], factors(named)[0])
    points = [dfac.optimize(V, MODEL, **QUIET, **own) for own in inits]
    assert points[0].drop_attrs().identical(points[1].drop_attrs())
    descents = [dfac.optimize(V, MODEL, dfac.DSGD(5), **QUIET, **own) for own in inits]
    first, second = (float(one["objective"][0]) for one in descents)
    assert second < 0.9 * first  # it has been brought on


def test_kinds_are_different_starts_and_keep_what_is_frozen():
    fixed, found = np.random.default_rng(1).exponential(size=(30, 1)), []
    model = dfac.TweedieNMF(K, dispersion=1.0, fixed_w=fixed)
    for kind in FactorModel.inits:
        found.append(begun(counts(), MODEL, kind, dfac.PSGLD(warm_start=0))[0][0])
        assert (found[-1] > 0).all()
        assert all(not np.allclose(found[-1], other, rtol=0.01) for other in found[:-1])
        W = begun(counts(gaps=True), model, kind, dfac.PSGLD(warm_start=5))[0][0]
        np.testing.assert_array_equal(W[:, 0], fixed[:, 0].astype(np.float32))


def test_the_best_of_several_starts_goes_on(monkeypatch):
    found = []

    def noted(*given, **options):
        found.append(run(*given, **options))
        return found[-1]

    run = starts.run_updates
    monkeypatch.setattr(starts, "run_updates", noted)
    V, _ = rainfall()
    model, none = dfac.TweedieNMF(6, beta=0.5, dispersion=0.3), SerialExecutor()
    with dfac.as_blocks(V, 2) as data:
        make = starts.state_maker(data, model, none, Init(starts=4), 2)
        states = (make(0, n) for n in range(4))
        best = starts.best_of(Descent(data, model, none, state) for state in states)
    ends = [point.objective[-1] for point in found]
    assert [iterations for iterations, _ in ends] == [SHORT] * 4
    values = [value for _, value in ends]
    assert best is found[int(np.argmin(values))].state
    assert max(values) > 1.2 * min(values)


def test_a_first_attempt_does_not_depend_on_their_number():
    with dfac.as_blocks(counts(), 2) as data:
        for kind in FactorModel.inits:
            few, many = (
                starts.state_maker(data, MODEL, SerialExecutor(), Init(kind, count), 5)
                for count in (1, 3)
            )
            states = few(0, 0), many(0, 0), many(0, 1)
            one, same, other = (state.factors[0][0].values for state in states)
            np.testing.assert_array_equal(one, same)
            alike = np.array_equal(same, other)
            assert alike != KINDS[kind].varies


@pytest.mark.filterwarnings("ignore:around the means")
def test_a_dispersion_that_is_drawn_is_the_same_for_starts_that_are_compared():
    model = dfac.NegativeBinomialNMF(K)
    tree = dfac.sample(counts(), model, **SHORTLY, starts=2)
    assert np.isfinite(tree["sample_stats"]["lp"].values).all()
    point = dfac.optimize(counts(), model.with_dispersion(1.0), **QUIET, starts=2)
    assert json.loads(point.attrs["init"])["starts"] == 2


def test_a_chain_goes_on_from_the_same_log_density(trace):
    for sampler in (dfac.BlockHMC(), dfac.SGHMC(), dfac.PSGLD()):
        found = begun(counts(), MODEL, trace, sampler, 3)
        hyper = found[0][2].hyper
        for (W, H, chain, fit), (own, draw) in zip(found, ((0, 8), (1, 8), (0, 4)), strict=True):
            before = factors(trace, own, draw)
            np.testing.assert_allclose(W @ H, before[0] @ before[1], rtol=1e-5)
            np.testing.assert_array_equal(W, before[0])
            rates = hyper.rate_w, hyper.rate_h
            prior = MODEL.log_prior(W.astype(float), H.astype(float), *rates)
            density = chain._lp(fit)
            stats = trace["sample_stats"]["lp"].values[own, draw]
            assert density + prior == pytest.approx(stats, rel=1e-5)


def test_runs_and_optimizers_go_on_from_a_point_or_a_run(trace):
    V, passes = counts(), 100
    point = dfac.optimize(V, MODEL, dfac.MultiplicativeUpdates(passes, tol=0), **QUIET)
    plain = dfac.sample(V, MODEL, dfac.PSGLD(warm_start=passes), **SHORTLY)
    given = dfac.sample(V, MODEL, dfac.PSGLD(), init=point, **SHORTLY)
    for mine, its in zip(factors(plain), factors(given), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert json.loads(given.attrs["init"])["kind"] == "optimize"
    for method in (dfac.MultiplicativeUpdates(40, tol=0), dfac.DSGD(20)):
        first = dfac.optimize(V, MODEL, method, **QUIET)
        second = dfac.optimize(V, MODEL, method, **QUIET, init=first)
        assert second["objective"][-1] <= first["objective"][-1]
    assert dfac.optimize(V, MODEL, **QUIET, init=trace).attrs["n_iter"] > 1


def test_rows_that_the_grid_permutes_keep_their_places_and_frozen_components_win(trace):
    V = sparse.csr_array(counts())
    for W, H, *_ in begun(V, MODEL, trace, dfac.BlockHMC(), unstored="zero", balance=True):
        np.testing.assert_array_equal(W, factors(trace)[0])
        np.testing.assert_array_equal(H, factors(trace)[1])
    W, _ = factors(trace)
    slightly = W[:, :1].astype(float) * (1 + 1e-7)
    model = dfac.TweedieNMF(K, dispersion=1.0, fixed_w=slightly)
    start = begun(counts(), model, trace, dfac.BlockHMC(), dtype="float64")[0][0]
    np.testing.assert_array_equal(start[:, :1], slightly)
    np.testing.assert_array_equal(start[:, 1:], W[:, 1:])
    with pytest.raises(OptionError, match="other values in the components that fixed_w"):
        begun(counts(), dfac.TweedieNMF(K, fixed_w=W[:, :1] + 0.1), trace, dfac.BlockHMC())


def test_particles_begin_with_the_heaviest():
    model, found = dfac.SILFNMF(K), None
    tree = dfac.stein_posterior(counts(), model, particles=4, pilot=2, **QUIET)
    weights = tree["sample_stats"]["weight"].values[0]
    with dfac.as_blocks(counts()) as data:
        found = checked_init(tree, 1, MODEL, data, 2)
    order = np.argsort(-weights, kind="stable")[: min(2, np.count_nonzero(weights))]
    assert [draw for _, draw in found.drawn] == order.tolist()


def test_real_valued_factors_go_on_with_their_biases():
    rng = np.random.default_rng(0)
    R = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 30)) + rng.normal(size=(40, 30)) / 3
    model = dfac.GaussianMF(2)
    first = dfac.sample(R, model, **SHORTLY | {"draws": 200, "tune": 200})
    for sampler in (dfac.SGHMC(), dfac.Gibbs()):
        W, _, chain, _ = begun(R, model, first, sampler)[0]
        before = factors(first)[0]
        np.testing.assert_array_equal(W, before)
        noise = first["posterior"]["noise"].values
        assert noise.min() / 1.2 < chain.hyper.noise < noise.max() * 1.2
        again = dfac.sample(R, model, sampler, init=first, **SHORTLY)
        densities = first["sample_stats"]["lp"].values[0, 100:]
        away = again["sample_stats"]["lp"].values - densities.mean()
        assert abs(away).max() < 5 * densities.std()
    shifted = begun(R + 1, model, first, dfac.SGHMC())[0]
    np.testing.assert_array_equal(shifted[0][:, -1], 1.0)  # a constant stays one
    point = dfac.optimize(R, model, **QUIET)
    again = dfac.optimize(R, model, **QUIET, init=point)
    assert again["objective"][-1] < 1.001 * point["objective"][-1]


@pytest.mark.parametrize("asked", ["result", "best"])
def test_a_run_that_was_cut_short_goes_on_without_the_result(asked, tmp_path, trace):
    options = SHORTLY | {"init": trace} if asked == "result" else SHORTLY | {"starts": 2}
    sampler, path = dfac.PSGLD(warm_start=5), tmp_path / "run.zarr"
    whole = dfac.sample(counts(), MODEL, sampler, chains=2, **options)

    def stop(event):
        if event.phase == "warm start":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dfac.sample(counts(), MODEL, sampler, chains=2, store=path, callback=stop, **options)
    finished = dfac.resume(path, progressbar=False)
    for mine, its in zip(factors(whole, 1), factors(finished, 1), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert finished.attrs["init"] == whole.attrs["init"]


def test_a_store_is_a_start_also_of_the_run_that_takes_its_place(tmp_path):
    path = tmp_path / "run.zarr"
    first = dfac.sample(counts(), MODEL, store=path, **SHORTLY)
    expected = dfac.sample(counts(), MODEL, init=first, **SHORTLY)
    found = dfac.sample(counts(), MODEL, init=path, store=path, overwrite=True, **SHORTLY)
    np.testing.assert_array_equal(factors(found)[0], factors(expected)[0])
    more = dfac.resume(path, draws=3, progressbar=False)
    assert json.loads(more.attrs["init"])["drawn"] == [[0, 3]]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"init": "qtransform"}, r'"multiplicative", "q-transform", .* got \'qtransform\''),
        ({"init": "prior"}, "init of a TweedieNMF must be"),
        ({"init": 3}, "init of a TweedieNMF must be .* got 3"),
        ({"starts": 0}, "starts must be a whole number of at least 1, got 0"),
        ({"init": "nndsvd", "starts": 2}, 'none where init is "nndsvd"; take'),
    ],
)
def test_what_is_no_start_is_refused(asked, words):
    for verb in (dfac.sample, dfac.optimize):
        refused(OptionError, words, verb, counts(), MODEL, **QUIET, **asked)


@pytest.mark.parametrize(
    ("change", "model", "options", "words"),
    [
        (slice(1, None), MODEL, {}, r"30 x 3 x 24 .* need 29 x 3 x 24"),
        (..., dfac.TweedieNMF(4), {}, "need 30 x 4 x 24"),
        (..., MODEL, {"starts": 2}, r'starts=2 .* where init is "sample"'),
        (..., REAL, {}, r"components \['0', '1', '2'\], those of a GaussianMF"),
        (..., REAL, {"init": "q-transform"}, 'GaussianMF must be "auto", "prior", a Dataset'),
        (..., REAL, {"init": "auto", "starts": 2}, 'where init is "prior"; leave starts out'),
    ],
)
def test_results_of_other_data_or_models_are_refused(trace, change, model, options, words):
    given = SHORTLY | {"init": trace} | options
    refused(OptionError, words, dfac.sample, counts()[change], model, **given)


def test_labels_are_compared():
    names = {"cell": [f"c{n}" for n in range(24)]}
    labelled = xr.DataArray(counts()[:24], names, ("cell", "gene"))
    point = dfac.optimize(labelled, MODEL, **QUIET)
    again = dfac.optimize(labelled, MODEL, **QUIET, init=point)
    assert list(again["cell"].values) == list(point["cell"].values)
    for other, words in (
        (labelled[::-1], "different labels 'cell'"),
        (labelled.T, "cell as rows and gene as columns, the data the other"),
    ):
        refused(OptionError, words, dfac.optimize, other, MODEL, **QUIET, init=point)


def counts_of_mean(mean):
    """Poisson counts (40, 30), a fifth hidden; their means, and which are hidden."""
    rng = np.random.default_rng(0)
    mu = rng.exponential(size=(40, K)) @ rng.exponential(size=(K, 30))
    mu *= mean / mu.mean()
    hidden = rng.random(mu.shape) < 0.2
    return np.where(hidden, np.nan, rng.poisson(mu)), mu, hidden


def draw(V, sampler=None, **options):
    settings = {"draws": 200, "tune": 200, "random_seed": 0, "progressbar": False}
    model = dfac.TweedieNMF(K, dispersion=options.pop("dispersion", "auto"))
    return dfac.sample(V, model, sampler, **settings | options)


def climbed(V, passes):
    model = dfac.TweedieNMF(K, dispersion=1.0)
    with dfac.as_blocks(V, 2) as data:
        state = start_state(data, model, 0, 0)
        descent = Descent(data, model, SerialExecutor(), state)
        starts.climb(descent, passes)
        return descent


def test_large_counts_are_poisson_and_their_intervals_hold_the_truth():
    V, mu, hidden = counts_of_mean(1e5)
    tree = draw(V)
    assert tree.attrs["dispersion"] == 1.0
    W, H = (tree["posterior"][name].values[0].astype(float) for name in "WH")
    low, high = np.quantile((W @ H)[:, hidden], [0.05, 0.95], axis=0)
    assert np.mean((low < mu[hidden]) & (mu[hidden] < high)) > 0.75  # .4 after 100 passes
    density = tree["sample_stats"]["lp"].values[0]
    assert abs(density[:50].mean() - density[-50:].mean()) < 3 * density.std()


def test_a_number_of_passes_stays_that_number(monkeypatch):
    found = []

    def noted(*given):
        found.append(starts.climb(*given))
        return found[-1]

    monkeypatch.setattr(gamma_parameters, "climb", noted)
    V = counts_of_mean(1e5)[0]
    for sampler in (dfac.PSGLD(warm_start=120), dfac.PSGLD()):
        draw(V, sampler, draws=1, tune=0, dispersion=1.0)
    fixed, automatic = (iterations for iterations, _ in found[-2:])
    assert fixed == 120
    assert 200 < automatic < setting.LONGEST_WARM_START


def test_extrapolated_updates_come_further_than_plain_ones_and_never_lose():
    model, values = dfac.TweedieNMF(K), []
    with dfac.as_blocks(counts_of_mean(1e3)[0], 2, dtype="float64") as data:
        descent = Descent(data, model, SerialExecutor(), start_state(data, model, 1, 0))
        descent.hyper = Hyperparameters(1.0, 1.0, 1.0)
        for _ in range(60):
            starts.extrapolate(descent)
            values.append(descent.loss)
    assert (np.diff(values) < 1e-9 * values[0]).all()
    V = counts_of_mean(1e5)[0]
    plain, extrapolated = (climbed(V, passes) for passes in ((300, 300), (100, 300)))
    best = climbed(V, (100, 2000)).objective[-1][1]
    behind, ahead = (one.objective[-1][1] - best for one in (plain, extrapolated))
    assert ahead < 0.2 * behind


def test_a_warm_start_that_ends_too_early_is_told(monkeypatch):
    monkeypatch.setattr(setting, "LONGEST_WARM_START", 120)
    with pytest.warns(SamplingWarning, match=r"after 118 passes.*warm_start=1180"):
        draw(counts_of_mean(1e5)[0], draws=5, tune=5)


@pytest.mark.parametrize("attempt", [0, 2])
def test_bands_draw_the_rows_that_a_whole_factor_would_have(attempt):
    """Whatever the number of bands, numbers are those of one stream for each factor."""
    V, size = np.full((11, 7), 3.0), math.sqrt(3.0 / 4)
    for blocks in (1, 3):
        with dfac.as_blocks(V, blocks) as data:
            state = initial_state(data, 4, 5, 1, attempt)
            for factor, side in enumerate(("rows", "columns")):
                address = 5, 1, Stream.START, factor, *([attempt] if attempt else [])
                whole = size * (0.5 + generator(*address).random((data.shape[factor], 4)))
                np.testing.assert_array_equal(state.gather(side), whole.astype(data.dtype))
