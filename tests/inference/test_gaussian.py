"""The pieces of the real-valued sampler: starts, hyperparameter draws, bits, log-densities."""

import numpy as np
import pytest
from scipy import sparse, stats

from daskfactor import as_blocks, sample
from daskfactor.executors import SerialExecutor
from daskfactor.inference.gaussian_chain import (
    HOLD,
    SYMMETRIES_EVERY,
    GaussianChain,
    column_table,
    log_prior_constant,
    observation_weights,
    quadratic_form,
    warm_start,
)
from daskfactor.inference.program import Fit
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.sghmc import SGHMC, automatic_momentum_step
from daskfactor.models.gaussian import GaussianHyper, GaussianMF
from tests.inference.gaussian_reference import chain_of, run_chain


def small_data(blocks=2, **settings):
    rng = np.random.default_rng(0)
    V = rng.normal(size=(23, 17)) + rng.normal(size=17)
    V[rng.random(V.shape) < 0.5] = np.nan
    V[4] = np.nan
    return as_blocks(V, blocks, allow_empty=True, **settings)


def test_dense_and_sparse_input_give_the_same_chain():
    with small_data(dtype="float64") as dense:
        V = dense.to_numpy()
        first = run_chain(dense, GaussianMF(3), tune=30, draws=10)
    seen = ~np.isnan(V)
    matrix = sparse.csr_array((V[seen], np.nonzero(seen)), shape=V.shape)
    with as_blocks(matrix, 2, dtype="float64", unstored="missing", allow_empty=True) as data:
        assert data.is_sparse
        second = run_chain(data, GaussianMF(3), tune=30, draws=10)
    assert first.hypers[-1].noise == pytest.approx(second.hypers[-1].noise, rel=1e-9)
    np.testing.assert_allclose(first.state.gather("rows"), second.state.gather("rows"), rtol=1e-7)


def test_partner_columns_of_the_biases_stay_as_they_are():
    with small_data() as data:
        state = run_chain(data, GaussianMF(3), tune=30, draws=10).state
        np.testing.assert_array_equal(state.gather("rows")[:, 4], 1)
        np.testing.assert_array_equal(state.gather("columns")[:, 3], 1)
        state = run_chain(data, GaussianMF(3, biases=False), tune=30, draws=10).state
        np.testing.assert_array_equal(state.gather("rows")[:, 3], 1)
        np.testing.assert_array_equal(state.gather("columns")[:, 3], np.float32(data.mean))


def test_fixed_hyperparameters_stay_and_free_ones_move():
    model = GaussianMF(3, noise=0.7, precision_w=2.0)
    with small_data() as data:
        last = run_chain(data, model, tune=30, draws=10).hypers[-1]
    assert last.noise == 0.7
    assert last.precision_w == (2.0, 2.0, 2.0)
    assert len(set(last.precision_h)) == 3
    with small_data() as data:
        last = run_chain(data, GaussianMF(3), tune=30, draws=10).hypers[-1]
    assert last.precision_w == last.precision_h
    assert last.noise != GaussianMF(3).start(data.mean, 1.0).noise


def test_the_metric_learns_while_tuning_only_and_nothing_is_drawn_at_first():
    model = GaussianMF(3)
    with small_data() as data:
        state, priors = warm_start(data, model, 0, 0, SerialExecutor())
        chain = chain_of(model, data, priors)
        fit = Fit(-50.0, 100.0)
        held = chain.draw_hyper(priors, state, fit, HOLD - 1, True)
        assert held._replace(ratio_w=1.0, ratio_h=1.0) == priors
        assert held.ratio_w != 1.0
        cycle = HOLD + 1  # at which W and H stay where they are
        tuned = chain.draw_hyper(priors, state, fit, cycle, True)
        drawn = chain.draw_hyper(priors, state, fit, cycle, False)
        assert tuned._replace(ratio_w=1.0, ratio_h=1.0) == drawn
        assert chain.draw_hyper(priors, state, fit, cycle + 5, False).noise != drawn.noise
        other = chain_of(model, data, priors, number=1)
        assert other.draw_hyper(priors, state, fit, cycle, False).noise != drawn.noise


def test_draws_of_the_hyperparameters_follow_their_full_conditionals():
    """Kolmogorov and Smirnov on the probability transforms over many addresses."""
    model = GaussianMF(2)
    with small_data(dtype="float64") as data:
        state, priors = warm_start(data, model, 0, 0, SerialExecutor())
        chain = chain_of(model, data, priors, seed=3)
        residual = 80.0
        drawn = [
            chain.draw_hyper(priors, state, Fit(-40.0, residual), cycle, False)
            for cycle in range(1, 5000, SYMMETRIES_EVERY)  # W and H stay where they are
        ]
        W, H = state.gather("rows"), state.gather("columns")
        n, (rows, cols) = data.total_observed, data.shape
    w, h, row, column = (
        (own**2).sum() for own in (W[:, 1], H[:, 1], W[:, 2], H[:, 3] - priors.mean)
    )

    def gamma(count, rate):
        return stats.gamma(1 + count / 2, scale=1 / rate)

    precision = gamma(rows + cols, 1 / priors.precision_w[1] + (w + h) / 2)
    laws = {
        "noise": (lambda own: 1 / own.noise, gamma(n, residual / 2 + 0.01 * priors.noise)),
        "precision": (lambda own: own.precision_w[1], precision),
        "row biases": (
            lambda own: own.row_bias_precision,
            gamma(rows, 1 / priors.row_bias_precision + row / 2),
        ),
        "column biases": (
            lambda own: own.column_bias_precision,
            gamma(cols, 1 / priors.column_bias_precision + column / 2),
        ),
        "level": (
            lambda own: (own.mean - H[:, 3].mean()) * np.sqrt(cols * own.column_bias_precision),
            stats.norm(),
        ),
    }
    for name, (number, law) in laws.items():
        assert stats.kstest([number(own) for own in drawn], law.cdf).pvalue > 1e-4, name


def test_log_densities_are_scipys():
    model = GaussianMF(2)
    hyper = GaussianHyper(0.5, 1.2, 2.0, 3.0, (1.5, 0.7), (4.0, 2.5))
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
        assert log_prior(model, hyper, state) == pytest.approx(expected)
        V = data.to_numpy()
        seen = ~np.isnan(V)
        residual = (V - W @ H.T)[seen]
        fit = Fit(-0.5 * float(residual @ residual), float(residual @ residual))
        density = stats.norm(0, np.sqrt(0.5)).logpdf(residual).sum()
        options = RunOptions(1, 0, 1, 1, 0, "moments", 0, "float64")
        chain = GaussianChain(Setting(data, model, SGHMC(), options, SerialExecutor()), 0)
        chain.hyper = hyper
        assert chain._lp(fit) == pytest.approx(density)


def log_prior(model, hyper, state):
    """The constant, and what is recorded band by band."""
    shape = len(state.gather("rows")), len(state.gather("columns"))
    tables = column_table(hyper, model.width)
    return log_prior_constant(model, hyper, shape) + sum(
        quadratic_form(band.values, table)
        for bands, table in zip(state.factors, tables, strict=True)
        for band in bands
    )


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
