"""Descent by strata, and multiplicative updates under gamma priors."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp

import daskfactor as dfac
from daskfactor import (
    DSGD,
    CoordinateDescent,
    GaussianMF,
    SerialExecutor,
    TweedieNMF,
    as_blocks,
)
from daskfactor.data.grid import Cyclic, NestedReshuffled, Proportional
from daskfactor.errors import DataWarning, OptionError
from daskfactor.inference import multiplicative
from daskfactor.inference.dsgd import DescentKernel
from daskfactor.inference.multiplicative import Descent, run_updates
from daskfactor.inference.passes import Place, evaluate
from daskfactor.kernels.steps import multiply_by_share
from daskfactor.models.tweedie_law import Tweedie
from tests.executors.audit import AuditExecutor
from tests.models.laws import divergence
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
    report = on_iteration or (lambda done, total: None)
    return method.fit(data, model, executor or SerialExecutor(), seed, report)


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
    fit = evaluate(Place(SerialExecutor(), data, point.state, 1e-6 * data.mean), Tweedie(beta))
    again = multiplicative.objective(model, point.state, point.hyper, fit)
    assert again == pytest.approx(values[-1], rel=1e-6)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_reaches_what_multiplicative_updates_reach(beta):
    data = as_blocks(counts(), 3)
    model = TweedieNMF(3, beta=beta, dispersion=1.0)
    executor = SerialExecutor()
    start = multiplicative.initial_state(data, 3, 0, 0)
    descent = Descent(data, model, executor, start)
    other = run_updates(descent, 500).objective[-1][1]
    ours = fitted(data, model, executor, max_iter=200).objective[-1][1]
    assert ours < 1.01 * other


def test_ends_where_likelihood_and_priors_balance():
    """Exponential ones, of which each entry feels the rate, and normal ones."""
    V = counts()
    model = TweedieNMF(2, dispersion=2.0, rate_w=2.0, rate_h=2.0)
    point = fitted(as_blocks(V, 3), model, max_iter=150, tol=0.0)
    W, H = (point.state.gather(side).astype(float) for side in ("rows", "columns"))
    R = V / (W @ H.T) - 1
    for factor, force in ((W, R @ H), (H, R.T @ W)):
        assert np.vdot(force, factor) / factor.sum() == pytest.approx(4.0, rel=0.1)
    _, V = signed()
    model = GaussianMF(2, noise=0.5, precision_w=20.0, precision_h=10.0, biases=False)
    point = fitted(as_blocks(V, 3), model, max_iter=150, tol=0.0)
    W, H = (point.state.gather(side).astype(float) for side in ("rows", "columns"))
    R = np.nan_to_num(V - W @ H.T)
    for factor, pull, force in ((W, 10.0, R @ H), (H, 5.0, R.T @ W)):
        own = factor[:, :2]  # the last column is the level
        assert np.vdot(force[:, :2], own) / np.vdot(own, own) == pytest.approx(pull, rel=0.05)


@pytest.mark.parametrize("schedule", [DSGD().schedule, NestedReshuffled(2), Proportional()])
def test_same_bits_on_every_executor_and_others_of_another_seed(schedule):
    data, options = as_blocks(with_gaps(counts(), 0.3), 4), {"max_iter": 6, "schedule": schedule}
    one, same, other = (
        bits(fitted(data, TweedieNMF(3), executor, seed, **options))
        for executor, seed in ((None, 1), (AuditExecutor(), 1), (None, 2))
    )
    assert one == same != other


def test_sparse_data_give_what_dense_data_with_gaps_give():
    V = counts() + 1  # no zeros, so that a sparse matrix stores all that is observed
    dense = with_gaps(V, 0.5)
    sparse = as_blocks(sp.csr_array(np.nan_to_num(dense)), 3, unstored="missing")
    model = TweedieNMF(3, dispersion=1.0)
    both = as_blocks(dense, 3), sparse
    one, other = (fitted(data, model, max_iter=10, step=0.05) for data in both)
    for side in ("rows", "columns"):
        pair = one.state.gather(side), other.state.gather(side)
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)
    assert one.objective[-1][1] == pytest.approx(other.objective[-1][1], rel=1e-5)


def test_zeros_that_are_not_stored_count():
    V, model = counts(size=1.0), TweedieNMF(3, dispersion=1.0)
    both = as_blocks(V, 3), as_blocks(sp.csr_array(V), 3, unstored="zero")
    one, other = (fitted(data, model, max_iter=30).objective[-1][1] for data in both)
    assert one == pytest.approx(other, rel=1e-4)


def test_a_tensor_is_descended_as_far_as_updates_lead():
    V = np.random.default_rng(0).poisson(3.0, (12, 10, 8)).astype(float)
    model, run = dfac.CP(2, dispersion=1.0), {"random_seed": 0, "progressbar": False}
    methods = DSGD(60, tol=0), dfac.MultiplicativeUpdates(30, tol=0)
    ours, other = (float(dfac.optimize(V, model, own, **run)["objective"][-1]) for own in methods)
    assert ours < 1.01 * other


def test_a_step_that_is_too_large_is_halved_and_undone_and_it_stops_when_it_no_longer_falls():
    numbers, model = [], TweedieNMF(3, beta=2.0, dispersion=1.0)
    options = {"step": 1e4, "tol": 0.0, "on_iteration": lambda *own: numbers.append(own[0])}
    point = fitted(as_blocks(counts(), 3), model, max_iter=40, **options)
    assert numbers == list(range(1, 41))
    values = [value for _, value in point.objective]
    assert all(after < before for before, after in itertools.pairwise(values))
    assert 1 < len(values) < 40
    assert np.isfinite(values).all()
    numbers.clear()
    options = {"tol": 1e-2, "on_iteration": lambda *own: numbers.append(own[0])}
    fitted(as_blocks(counts((30, 20)), 2), TweedieNMF(1), max_iter=500, **options)
    assert len(numbers) < 200


def test_rows_without_an_entry_go_to_the_mode_of_their_prior():
    V = with_gaps(counts(), 0.2)
    V[5] = np.nan
    point = fitted(as_blocks(V, 3, allow_empty=True), TweedieNMF(2), max_iter=3)
    W = point.state.gather("rows")
    assert not W[5].any()
    assert W[4].any()
    assert point.hyper.dispersion == 1.0  # of counts
    assert not any(band.arrays for band in point.state.bands())
    _, V = signed()
    V[:, 7] = np.nan
    data = as_blocks(V, 3, allow_empty=True)
    point = fitted(data, GaussianMF(2, noise=0.5), max_iter=3)
    np.testing.assert_allclose(point.state.gather("columns")[7], [0, 0, 1, data.mean], rtol=1e-6)
    assert point.hyper.noise == 0.5  # which was given


def test_every_stratum_is_visited_once_an_iteration(monkeypatch):
    visits = []
    original = DescentKernel.step

    def watched(self, program, visit):
        visits.append((visit.op.iteration, visit.op.block))
        original(self, program, visit)

    monkeypatch.setattr(DescentKernel, "step", watched)
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


def test_what_is_refused():
    for name, values in {
        "max_iter": (0, 1.5),
        "step": ("large", 0, float("nan")),
        "tol": (-1, float("inf")),
        "schedule": ("cyclic",),
    }.items():
        for value in values:
            refused(OptionError, name, DSGD, **{name: value})
    steep = dfac.TweedieNMF(2, shape_w=2.0)
    words = "exponential priors only, got shape_w=2"
    refused(OptionError, words, dfac.optimize, np.ones((4, 4)), steep, dfac.DSGD())


@pytest.mark.parametrize("beta", [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("pull", [-0.3, 1e-4, 0.8, 1e4])
def test_each_update_solves_its_equation(beta, pull):
    rng = np.random.default_rng(0)
    theta, num, den = (np.exp(rng.normal(scale=3, size=(200, 4))) for _ in range(3))
    num[:20] = 0.0
    theta[20:30] = 0.0
    new = theta.copy()
    multiply_by_share(new, (num, den), 0.0, pull, Tweedie(beta), 1e-9)
    assert (new >= 1e-9).all()
    old = np.maximum(theta, 1e-9)
    ratio, share = new / old, pull / old
    if pull < 0:
        gamma = 1 / (2 - beta) if beta < 1 else 1 / max(1, beta - 1)
        expected = np.maximum(old * (num / (den - share)) ** gamma, 1e-9)
        np.testing.assert_allclose(new, expected, rtol=1e-12)
        return
    m, n = (1.0, beta - 1.0) if beta <= 1 else (beta, 1.0)
    left, right = den * ratio**m, num * ratio**n + share
    free = new > 1e-9
    np.testing.assert_allclose(left[free], right[free], rtol=1e-8)


@pytest.mark.parametrize(
    ("beta", "shapes"), [(0.5, (2.0, 1.0)), (1.0, (1.5, 3.0)), (1.0, (1.0, 0.7)), (2.0, (2.0, 1.5))]
)
def test_the_objective_never_rises(beta, shapes):
    rng = np.random.default_rng(1)
    V = np.maximum(rng.poisson(rng.gamma(1, 2, (12, 2)) @ rng.gamma(1, 2, (2, 9))), 0.3)
    V = V.astype(float)
    V[2, 3] = np.nan
    model = dfac.TweedieNMF(2, beta=beta, dispersion=1.5, shape_w=shapes[0], shape_h=shapes[1])
    if min(shapes) < 1:
        with pytest.warns(DataWarning, match="shape_h=0.7 the posterior density is infinite"):
            fit = optimize(V, model)
    else:
        fit = optimize(V, model)
    found = fit["objective"].values
    assert (np.diff(found) <= 1e-9 * np.abs(found[:-1])).all()
    W, H = fit["W"].values, fit["H"].values
    seen = ~np.isnan(V)
    wanted = divergence(V[seen], (W @ H)[seen], beta).sum()
    for factor, side, shape in ((W, "w", shapes[0]), (H, "h", shapes[1])):
        rate = fit.attrs[f"rate_{side}"]
        wanted += 1.5 * (rate * factor.sum() - (shape - 1) * np.log(factor).sum())
    assert found[-1] == pytest.approx(wanted, rel=1e-6)


def optimize(V, model, max_iter=200):
    method, data = dfac.MultiplicativeUpdates(max_iter, tol=0), dfac.as_blocks(V, dtype="float64")
    return dfac.optimize(data, model, method, random_seed=0, progressbar=False)


def test_ends_where_the_gradient_of_the_posterior_is_zero():
    rng = np.random.default_rng(2)
    V = rng.poisson(6.0, (9, 7)).astype(float)
    model = dfac.TweedieNMF(1, dispersion=2.0, rate_w=1.0, rate_h=2.0, shape_w=3.0, shape_h=1.5)
    fit = optimize(V, model, 3000)
    W, H = fit["W"].values, fit["H"].values
    R = (V / (W @ H) - 1) / 2.0
    np.testing.assert_allclose(R @ H.T - 1.0 + 2.0 / W, 0, atol=1e-6)
    np.testing.assert_allclose(W.T @ R - 2.0 + 0.5 / H, 0, atol=1e-6)


# -- coordinate descent --------------------------------------------------------------------


def descended(V, iterations=200, blocks=3, executor=None, **options):
    data = as_blocks(V, blocks) if isinstance(V, np.ndarray) else V
    model = TweedieNMF(3, beta=2.0, dispersion=4.0, **options)
    method, told = CoordinateDescent(iterations, 0.0), lambda *step: None
    return method.fit(data, model, executor or SerialExecutor(), 0, told), model


def test_coordinate_descent_ends_where_no_entry_can_move():
    """The slope of an entry is zero, or it would push one that is zero below it."""
    V = counts()
    point, _ = descended(V, 600, rate_w=5.0, rate_h=20.0)
    W, H = (point.state.gather(side).astype(float) for side in ("rows", "columns"))
    for theta, other, values, rate in ((W, H, V, 5.0), (H, W, V.T, 20.0)):
        pull = values @ other
        slope = theta @ (other.T @ other) - pull + 4.0 * rate
        assert (theta == 0).any()
        assert np.abs(slope)[theta > 0].max() < 2e-4 * pull.max()
        assert slope[theta == 0].min() > -2e-4 * pull.max()
        assert 4.0 * rate > 1e-3 * pull.max()  # the prior counts


def test_coordinate_descent_never_lets_the_objective_rise_and_is_ahead_of_products():
    V = counts()
    values = np.array([value for _, value in descended(V)[0].objective])
    assert np.all(np.diff(values) <= 1e-6 * values[0])
    data, model = as_blocks(V, 3), TweedieNMF(3, beta=2.0, dispersion=4.0)
    start = multiplicative.initial_state(data, 3, 0, 0)
    others = run_updates(Descent(data, model, SerialExecutor(), start), 200).objective
    assert values[4] < others[-1][1]  # after 80 iterations, and after 200


def test_coordinate_descent_gives_the_same_bits_in_any_order_and_of_sparse_data_the_same_fit():
    V = counts()
    V[V < 8] = 0
    one, other = (descended(V, 20, executor=own)[0] for own in (None, AuditExecutor()))
    assert bits(one) == bits(other)
    stored = as_blocks(sp.csr_array(V), 3, unstored="zero")
    sparse = descended(stored, 20)[0]
    for side in ("rows", "columns"):
        np.testing.assert_allclose(
            one.state.gather(side), sparse.state.gather(side), rtol=1e-3, atol=1e-4
        )


def test_coordinate_descent_leaves_frozen_components_alone():
    V, fixed = counts(), np.full((90, 1), 2.0, np.float32)
    point, _ = descended(V, 30, fixed_w=fixed)
    W = point.state.gather("rows")
    assert (W[:, :1] == fixed).all()
    assert (W[:, 1:] != 2.0).any()


def test_coordinate_descent_is_the_usual_way_where_it_fits():
    V, run = counts(), {"random_seed": 0, "progressbar": False}
    model = TweedieNMF(3, beta=2)
    used = [
        dfac.optimize(data, own, **run).attrs["method"]
        for data, own in (
            (V, model),
            (as_blocks(sp.csr_array(V), unstored="zero"), model),
            (with_gaps(V, 0.1), model),
            (V, TweedieNMF(3)),
            (V, TweedieNMF(3, beta=2, shape_w=2.0)),
        )
    ]
    assert used == ["CoordinateDescent"] * 2 + ["MultiplicativeUpdates"] * 3
    method = CoordinateDescent()
    weights = np.full(V.shape, 2.0)
    for match, data, own, given in (
        ("exponential priors, got TweedieNMF", V, TweedieNMF(3), {}),
        ("no cell is missing or weighted", with_gaps(V, 0.1), model, {}),
        ("use MultiplicativeUpdates", V, model, {"weights": weights}),
    ):
        refused(OptionError, match, dfac.optimize, data, own, method, **run, **given)


@pytest.mark.parametrize("V", [[[3, 1, 4, 1, 5, 9, 2, 6]], [[3]]], ids=["a row", "a cell"])
def test_descents_of_little_data_reach_the_maximum_after_the_dispersion_has_settled(V):
    """Steps were halved for as long as the fit was perfect under a dispersion of nearly zero."""
    run = {"random_seed": 0, "progressbar": False}
    methods = DSGD(500), dfac.MultiplicativeUpdates()
    ours, other = (dfac.optimize(np.array(V), TweedieNMF(1), own, **run) for own in methods)
    assert float(ours["objective"][-1]) == pytest.approx(float(other["objective"][-1]), rel=1e-3)
    assert ours.attrs["dispersion"] == other.attrs["dispersion"] == 1.0
