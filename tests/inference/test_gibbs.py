"""Gibbs through `sample`, and the pieces of the real-valued samplers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor import SGHMC, GaussianMF, Gibbs, SerialExecutor, as_blocks, sample
from daskfactor.errors import DataError, ModelError
from daskfactor.inference import normal_parameters as chains
from daskfactor.inference.chain import Chain
from daskfactor.inference.normal_parameters import observation_weights, quadratic_form, warm_start
from daskfactor.inference.program import Fit
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.sghmc import automatic_momentum_step
from daskfactor.models.gaussian import GaussianHyper
from tests.inference.gaussian_reference import chain_of, run_chain
from tests.inference.test_conformance import same
from tests.refusals import refused

QUIET = {"progressbar": False, "random_seed": 5}
REAL = dfac.GaussianMF(3)


def counts(shape=(23, 17), K=3):
    rng = np.random.default_rng(1)
    W, H = rng.gamma(0.7, 2.0, (shape[0], K)), rng.gamma(0.7, 2.0, (K, shape[1]))
    return rng.poisson(W @ H).astype(np.float64)


def drawn(V, sampler=None, **options):
    settings = {"draws": 6, "tune": 3, **QUIET, **options}
    model = settings.pop("model", dfac.TweedieNMF(2))  # sparse kernels that others compile, too
    reading = {"unstored": settings.pop("unstored", None), "dtype": "float64"}
    reading["allow_empty"] = settings.pop("allow_empty", False)
    data = dfac.as_blocks(V, settings.pop("blocks", 3), **reading)
    return dfac.sample(data, model, sampler or dfac.Gibbs(warm_start=3), **settings)


def factors(trace):
    return trace["posterior"]["W"].values, trace["posterior"]["H"].values


def close(one, other):
    for a, b in zip(factors(one), factors(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_sparse_data_and_other_grids_change_rounding_alone():
    """S is drawn cell by cell and by cycle: another grid gives other sums of floats only."""
    V = counts()
    close(drawn(V), drawn(sparse.csr_array(V), unstored="zero"))
    close(drawn(V, blocks=1), drawn(V, blocks=4))
    V[V == 0] = np.nan
    close(drawn(V), drawn(sparse.csr_array(np.nan_to_num(V)), unstored="missing"))


def test_results_say_that_the_dispersion_is_one():
    trace = drawn(3 * counts())  # overdispersed: PSGLD would estimate it
    assert trace.attrs["dispersion"] == 1.0
    assert json.loads(trace.attrs["sampler"])["type"] == "Gibbs"
    assert (trace["sample_stats"]["step_size"].values == 1).all()
    lp = trace["sample_stats"]["lp"].values
    assert np.isfinite(lp).all()


@pytest.mark.parametrize(
    ("settings", "scale", "error", "message"),
    [
        ({"beta": 2.0}, 1.0, ModelError, r"beta=1, and the model has beta=2; use PSGLD"),
        ({"dispersion": 2.5}, 1.0, ModelError, r"dispersion=2\.5; leave it at"),
        ({}, 0.5, DataError, r"whole numbers, got data with fractions"),
        ({}, 2.0**31, DataError, r"up to 2\*\*31, got one of"),
    ],
)
def test_what_is_refused(settings, scale, error, message):
    refused(error, message, drawn, scale * counts(), model=dfac.TweedieNMF(3, **settings))


def test_tempered_posteriors_are_refused():
    model, sampler = dfac.TweedieNMF(2), Gibbs(warm_start=1)
    options = RunOptions(2, 2, 1, 1, 0, "draws", 1, "float32")
    with dfac.as_blocks(counts(), 2) as data:
        kernel = sampler.kernel(model, data)
        setting = Setting(data, model, kernel, options, SerialExecutor(), temperature=0.5)
        chain = Chain(setting, 0)
        chain.start()
        refused(ModelError, "use PSGLD", chain.advance, 2)
        chain = Chain(replace(setting, temperature=1.0), 0)
        chain.start()
        chain.advance(2)


def test_empty_rows_come_from_the_prior():
    V = counts((40, 12))
    V[3:] = np.nan
    model = dfac.TweedieNMF(3, rate_w=2.0, rate_h=1.0)
    trace = drawn(V, model=model, draws=200, allow_empty=True)
    free = factors(trace)[0][0, :, 3:]
    assert abs(free.mean() * 2.0 - 1) < 5 / np.sqrt(free.size)


def signed(missing=0.3):
    rng = np.random.default_rng(4)
    V = rng.normal(size=(23, 3)) @ rng.normal(size=(3, 17)) + rng.normal(size=17)
    V += 0.3 * rng.normal(size=V.shape)
    V[rng.random(V.shape) < missing] = np.nan
    return V


@pytest.mark.parametrize("sampler", [Gibbs(), SGHMC()], ids=lambda own: own.name)
def test_sparse_data_and_other_grids_change_rounding_alone_of_real_valued_draws(sampler):
    V = signed()
    V[4] = np.nan
    seen, given = ~np.isnan(V), {"model": REAL, "allow_empty": True}
    table = sparse.csr_array((V[seen], np.nonzero(seen)), shape=V.shape)
    close(drawn(V, sampler, **given), drawn(table, sampler, unstored="missing", **given))
    V = np.where(np.random.default_rng(1).random(V.shape) < 0.6, 0.0, signed(0.0))
    close(drawn(V, sampler, **given), drawn(sparse.csr_array(V), sampler, unstored="zero", **given))
    if sampler == Gibbs():  # SGHMC draws the order of blocks
        for missing in (0.0, 0.3):
            one, other = (drawn(signed(missing), blocks=blocks, **given) for blocks in (1, 3))
            close(one, other)


def test_real_valued_results_are_read_like_any_other(tmp_path):
    V, store = signed(0.1), tmp_path / "run.zarr"
    held = dfac.hold_out(V, 0.1, random_seed=0)
    options = {"tune": 40, "monitor": held.cells, **QUIET}
    whole = dfac.sample(held.train, REAL, dfac.Gibbs(), draws=60, **options)
    dfac.sample(held.train, REAL, dfac.Gibbs(), draws=30, store=store, **options)
    trace = dfac.resume(store, draws=30, progressbar=False)
    assert same(whole, trace)
    assert json.loads(trace.attrs["sampler"]) == dfac.Gibbs().to_dict()
    rows, cols = (xr.DataArray(index, dims="cell") for index in held.cells)
    found = dfac.predict(trace, rows=rows, columns=cols)["mean"].values
    np.testing.assert_allclose(dfac.monitored(trace)["mean"].values.ravel(), found, rtol=1e-3)
    assert np.sqrt(np.mean((found - held.values) ** 2)) < 0.5 * np.nanstd(V)
    summary = dfac.summarize(trace)
    assert float(summary["rhat"].sel(functional="lp")) < 1.2


def small_data(blocks=2, **settings):
    rng = np.random.default_rng(0)
    V = rng.normal(size=(23, 17)) + rng.normal(size=17)
    V[rng.random(V.shape) < 0.5] = np.nan
    V[4] = np.nan
    return as_blocks(V, blocks, allow_empty=True, **settings)


def test_what_is_fixed_stays_and_free_hyperparameters_move():
    """Partner columns of the biases are, too."""
    with small_data() as data:
        chain = run_chain(data, GaussianMF(3), tune=30, draws=10)
        hyper, state = chain.hyper, chain.tracks[0].state
        np.testing.assert_array_equal(state.gather("rows")[:, 4], 1)
        np.testing.assert_array_equal(state.gather("columns")[:, 3], 1)
        assert hyper.precision_w == hyper.precision_h
        assert hyper.noise != GaussianMF(3).start(data.mean, 1.0).noise
        fixed = GaussianMF(3, noise=0.7, precision_w=2.0, biases=False)
        chain = run_chain(data, fixed, tune=30, draws=10)
        hyper, state = chain.hyper, chain.tracks[0].state
        np.testing.assert_array_equal(state.gather("rows")[:, 3], 1)
        np.testing.assert_array_equal(state.gather("columns")[:, 3], np.float32(data.mean))
        assert (hyper.noise, hyper.precision_w) == (0.7, (2.0, 2.0, 2.0))
        assert len(set(hyper.precision_h)) == 3


def test_the_metric_learns_while_tuning_only_and_nothing_is_drawn_at_first():
    model = GaussianMF(3)
    with small_data() as data:
        state, priors = warm_start(data, model, 0, 0, SerialExecutor())
        chain, other = (chain_of(data, model, number=number) for number in (0, 1))
        options = chain.setting.options
        fit, first = Fit(-50.0, 100.0), priors._asdict()

        def after(own, cycle, tuning):
            own.values = own.values | first | {"priors": first}
            own.setting = replace(own.setting, options=replace(options, tune=4 * cycle * tuning))
            own.update(state, cycle, fit)
            return own.hyper

        held = after(chain, chains.HOLD - 1, True)
        assert held._replace(ratio_w=1.0, ratio_h=1.0) == priors
        assert held.ratio_w != 1.0
        cycle = chains.HOLD + 1  # at which W and H stay where they are
        tuned = after(chain, cycle, True)
        drawn = after(chain, cycle, False)
        assert tuned._replace(ratio_w=1.0, ratio_h=1.0) == drawn
        assert after(chain, cycle + 5, False).noise != drawn.noise
        assert after(other, cycle, False).noise != drawn.noise


def test_log_densities_are_scipys():
    """Biases among them, whose mean results do not have."""
    model, hyper = GaussianMF(2), GaussianHyper(0.5, 1.2, 2.0, 3.0, (1.5, 0.7), (4.0, 2.5))
    with small_data(dtype="float64") as data:
        state, _ = warm_start(data, model, 0, 0, SerialExecutor())
        for band in state.bands():
            band.values[:, 2:] += np.random.default_rng(1).normal(size=band.values[:, 2:].shape)
        W, H = state.gather("rows"), state.gather("columns")
        expected = (
            stats.norm(0, 1 / np.sqrt([1.5, 0.7])).logpdf(W[:, :2]).sum()
            + stats.norm(0, 1 / np.sqrt([4.0, 2.5])).logpdf(H[:, :2]).sum()
            + stats.norm(0, 1 / np.sqrt(2.0)).logpdf(W[:, 2]).sum()
            + stats.norm(1.2, 1 / np.sqrt(3.0)).logpdf(H[:, 3]).sum()
        )
        tables = chains.column_table(hyper, model.width)
        pairs = zip(state.factors, tables, strict=True)
        own = sum(quadratic_form(band.values, table) for bands, table in pairs for band in bands)
        assert chains.log_prior_constant(model, hyper, data.shape) + own == pytest.approx(expected)
        V = data.to_numpy()
        residual = (V - W @ H.T)[~np.isnan(V)]
        fit = Fit(-0.5 * float(residual @ residual), float(residual @ residual))
        chain = chain_of(data, model)
        chain.values = chain.values | hyper._asdict()
        density = stats.norm(0, np.sqrt(0.5)).logpdf(residual).sum()
        assert chain._lp(fit) == pytest.approx(density)


def test_weights_grow_with_the_data_and_vanish_without():
    weights = observation_weights(np.array([0, 1, 10, 1000]), 16)[:, 0]
    assert weights[0] == 0
    assert np.all(np.diff(weights) > 0)
    assert weights[1] > 1
    assert weights[3] < 1100


def test_the_length_of_a_cycle_does_not_depend_on_the_number_of_blocks():
    lengths = [blocks**2 * automatic_momentum_step(blocks, 8)(0) for blocks in (1, 2, 5)]
    np.testing.assert_allclose(lengths, lengths[0])
    assert automatic_momentum_step(2, 1)(0) < automatic_momentum_step(2, 2)(0)


@pytest.mark.parametrize("noise", [1e-3, 1e-4])
def test_a_fixed_noise_far_below_the_variance_is_no_divergence(noise):
    rng = np.random.default_rng(0)
    V = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 30)) + noise**0.5 * rng.normal(size=(40, 30))
    run = {"draws": 20, "tune": 200, "random_seed": 0, "blocks": 2, "progressbar": False}
    trace = sample(V.astype(np.float32), GaussianMF(2, noise=noise), **run)
    assert trace.attrs["divergences"] == 0
    assert trace.attrs["dispersion"] == pytest.approx(noise)
