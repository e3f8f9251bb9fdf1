"""Stochastic gradient descent by strata: it goes down, to the right place, by any executor."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp

from daskfactor.data.grid import Cyclic, NestedReshuffled, Proportional
from daskfactor.data.sources import as_blocks
from daskfactor.errors import OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.inference.dsgd import DSGD, StochasticDescent
from daskfactor.inference.multiplicative import (
    DispersionRule,
    initial_state,
    objective,
    run_updates,
)
from daskfactor.inference.passes import evaluate
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.models.tweedie_law import Tweedie
from tests.executors.audit import AuditExecutor
from tests.refusals import refused


def counts(shape=(90, 70), rank=3, size=10.0, seed=0):
    rng = np.random.default_rng(seed)
    W, H = rng.gamma(2.0, size=(shape[0], rank)), rng.gamma(2.0, size=(rank, shape[1]))
    return rng.poisson(size * W @ H / (4 * rank)).astype(np.float32)


def with_gaps(V, share, seed=1):
    V = V.copy()
    V[np.random.default_rng(seed).random(V.shape) < share] = np.nan
    return V


def signed(share=0.5, noise=0.3, shape=(120, 90), rank=2, seed=0):
    """Real-valued data with biases, gaps, and a part of the entries held out."""
    rng = np.random.default_rng(seed)
    W, H = rng.normal(size=(shape[0], rank)), rng.normal(size=(rank, shape[1]))
    bias = rng.normal(size=(shape[0], 1)) + rng.normal(size=shape[1])
    truth = 3 + bias + W @ H
    V = (truth + noise * rng.normal(size=shape)).astype(np.float32)
    return truth, with_gaps(V, share)


def fitted(data, model, executor=None, seed=0, on_iteration=None, **options):
    method = DSGD(**options)
    method.check_model(model)
    descent = StochasticDescent(data, model, method, executor or SerialExecutor(), seed)
    for iteration in range(1, method.max_iter + 1):
        descent.advance(iteration)
        if on_iteration is not None:
            on_iteration(iteration, descent.loss)
        if descent.finished:
            break
    return descent.result()


def bits(point):
    return point.state.gather("rows").tobytes() + point.state.gather("columns").tobytes()


@pytest.mark.parametrize(("beta", "share"), [(1.0, 0.0), (1.0, 0.4), (2.0, 0.4), (0.5, 0.0)])
def test_objective_falls_at_every_iteration_that_is_kept(beta, share):
    data = as_blocks(with_gaps(counts(), share), 3)
    model = TweedieNMF(3, beta=beta, dispersion=1.0)
    point = fitted(data, model, max_iter=30, tol=0.0)
    values = [value for _, value in point.objective]
    assert len(values) > 10
    assert np.all(np.diff(values) < 0)
    fit = evaluate(SerialExecutor(), data, point.state, Tweedie(beta), 1e-6 * data.mean)
    assert objective(model, point.state, point.hyper, fit) == pytest.approx(values[-1], rel=1e-6)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_reaches_what_multiplicative_updates_reach(beta):
    data = as_blocks(counts(), 3)
    model = TweedieNMF(3, beta=beta, dispersion=1.0)
    executor = SerialExecutor()
    start = initial_state(data, 3, 0, 0)
    rule = DispersionRule(model, data)
    other = run_updates(data, model, start, executor, rule, 500).objective[-1][1]
    ours = fitted(data, model, executor, max_iter=200).objective[-1][1]
    assert ours < 1.01 * other


def test_ends_where_likelihood_and_exponential_priors_balance():
    V = counts()
    model = TweedieNMF(2, dispersion=2.0, rate_w=2.0, rate_h=2.0)
    point = fitted(as_blocks(V, 3), model, max_iter=150, tol=0.0)
    W, H = (point.state.gather(side).astype(float) for side in ("rows", "columns"))
    R = V / (W @ H.T) - 1
    for factor, force in ((W, R @ H), (H, R.T @ W)):
        assert np.vdot(force, factor) / factor.sum() == pytest.approx(4.0, rel=0.1)


def test_ends_where_likelihood_and_gaussian_priors_balance():
    _, V = signed()
    model = GaussianMF(2, noise=0.5, precision_w=20.0, precision_h=10.0, biases=False)
    point = fitted(as_blocks(V, 3), model, max_iter=150, tol=0.0)
    W, H = (point.state.gather(side).astype(float) for side in ("rows", "columns"))
    R = np.nan_to_num(V - W @ H.T)
    for factor, pull, force in ((W, 10.0, R @ H), (H, 5.0, R.T @ W)):
        own = factor[:, :2]  # the last column is the level
        slope = np.vdot(force[:, :2], own) / np.vdot(own, own)
        assert slope == pytest.approx(pull, rel=0.05)


@pytest.mark.parametrize("schedule", [None, NestedReshuffled(2), Proportional()])
def test_same_bits_on_every_executor(schedule):
    data = as_blocks(with_gaps(counts(), 0.3), 4)
    options = {"max_iter": 6} | ({} if schedule is None else {"schedule": schedule})
    found = set()
    for executor in (SerialExecutor(), AuditExecutor()):
        found.add(bits(fitted(data, TweedieNMF(3), executor, **options)))
        executor.close()
    assert len(found) == 1


def test_seeds_differ_and_repeat():
    data = as_blocks(counts(), 3)
    runs = [bits(fitted(data, TweedieNMF(2), seed=seed, max_iter=3)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_sparse_data_give_what_dense_data_with_gaps_give():
    V = counts() + 1  # no zeros, so that a sparse matrix stores all that is observed
    dense = with_gaps(V, 0.5)
    sparse = as_blocks(sp.csr_array(np.nan_to_num(dense)), 3, unstored="missing")
    model = TweedieNMF(3, dispersion=1.0)
    one, other = (
        fitted(data, model, max_iter=10, step=0.05) for data in (as_blocks(dense, 3), sparse)
    )
    for side in ("rows", "columns"):
        np.testing.assert_allclose(
            one.state.gather(side), other.state.gather(side), rtol=1e-4, atol=1e-5
        )
    assert one.objective[-1][1] == pytest.approx(other.objective[-1][1], rel=1e-5)


def test_observed_zeros_that_are_not_stored_are_refused():
    data = as_blocks(sp.csr_array(counts(size=1.0)), 3, unstored="zero", allow_empty=True)
    with pytest.raises(OptionError, match="MultiplicativeUpdates"):
        DSGD().fit(data, TweedieNMF(2), SerialExecutor(), 0, lambda done, total: None)


def test_a_step_that_is_too_large_is_halved_and_undone():
    data = as_blocks(counts(), 3)
    told = []
    model = TweedieNMF(3, beta=2.0, dispersion=1.0)
    point = fitted(
        data, model, max_iter=12, step=1e4, tol=0.0, on_iteration=lambda *it: told.append(it)
    )
    assert [number for number, _ in told] == list(range(1, 13))
    assert all(now <= before for (_, before), (_, now) in itertools.pairwise(told))
    assert len(point.objective) < 12
    assert np.isfinite(told[-1][1])


def test_stops_when_it_no_longer_falls():
    data = as_blocks(counts((30, 20)), 2)
    told = []
    fitted(
        data,
        TweedieNMF(1),
        max_iter=500,
        tol=1e-2,
        on_iteration=lambda number, value: told.append(number),
    )
    assert len(told) < 100


def test_rows_without_an_entry_go_to_the_mode_of_their_prior():
    V = with_gaps(counts(), 0.2)
    V[5] = np.nan
    data = as_blocks(V, 3, allow_empty=True)
    point = fitted(data, TweedieNMF(2), max_iter=3)
    W = point.state.gather("rows")
    assert not W[5].any()
    assert W[4].any()


def test_counts_have_dispersion_one_and_nothing_is_left_on_the_bands():
    data = as_blocks(counts(), 3)
    point = fitted(data, TweedieNMF(3), max_iter=20)
    assert point.hyper.dispersion == 1.0
    assert not any(band.arrays for band in point.state.bands())


def test_every_stratum_is_visited_once_an_iteration(monkeypatch):
    visits = []
    original = DSGD.block_step

    def watched(self, program, op, *rest):
        visits.append((op.iteration, op.block))
        original(self, program, op, *rest)

    monkeypatch.setattr(DSGD, "block_step", watched)
    data = as_blocks(counts(), 3)
    fitted(data, TweedieNMF(2), max_iter=2, step=1e-3, schedule=Cyclic())
    assert len(visits) == len(set(visits)) == 2 * 9


@pytest.mark.parametrize("biases", [True, False])
def test_real_valued_models(biases):
    truth, V = signed()
    data = as_blocks(V, 3)
    model = GaussianMF(2 if biases else 4, biases=biases)
    point = fitted(data, model, max_iter=60)
    values = [value for number, value in point.objective if number > 15]
    assert np.all(np.diff(values) < 0)
    W, H = point.state.gather("rows"), point.state.gather("columns")
    unseen = np.isnan(V)
    error = np.sqrt(np.mean((W @ H.T - truth)[unseen] ** 2))
    assert error < 0.3
    assert 0.05 < point.hyper.noise < 0.2
    assert (W[:, -1] == 1).all()
    assert not any(band.arrays for band in point.state.bands())


def test_a_noise_that_is_given_stays():
    _, V = signed()
    point = fitted(as_blocks(V, 3), GaussianMF(2, noise=0.5), max_iter=20)
    assert point.hyper.noise == 0.5


def test_empty_rows_of_real_valued_models_are_at_their_prior_mean():
    _, V = signed()
    V[:, 7] = np.nan
    data = as_blocks(V, 3, allow_empty=True)
    H = fitted(data, GaussianMF(2), max_iter=3).state.gather("columns")
    np.testing.assert_allclose(H[7], [0, 0, 1, data.mean], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"max_iter": 0},
        {"max_iter": 1.5},
        {"step": "large"},
        {"step": 0},
        {"step": float("nan")},
        {"tol": -1},
        {"tol": float("inf")},
        {"schedule": "cyclic"},
    ],
)
def test_bad_options(options):
    refused(OptionError, next(iter(options)), DSGD, **options)
