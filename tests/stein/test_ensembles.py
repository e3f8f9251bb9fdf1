"""Ensembles: what brings particles down, on which data, and that a particle is its number."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.errors import OptionError
from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.inference.singular import fill_missing, prepare_starts, random_start, silent
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein import ensemble
from daskfactor.stein.ensemble import Ensemble, assemble_matrix, by_coordinates
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.particles import Posterior
from daskfactor.stein.silf import NO_RATE
from tests.models.laws import divergence
from tests.refusals import refused

SERIAL = SerialExecutor()


def divergence_of(beta=2.0, **settings):
    """A model whose priors hardly count."""
    numbers = {"dispersion": 1.0, "rate_w": NO_RATE, "rate_h": NO_RATE}
    return TweedieNMF(3, beta=beta, **(numbers | settings))


SQUARES = divergence_of()


def positive(shape=(30, 22), seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((shape[0], 3)) @ rng.random((3, shape[1]))
    return X * rng.gamma(20.0, 0.05, size=shape)


def start_of(X, K=3, seed=0):
    return random_start(X.shape, K, float(np.nanmean(X)), np.random.default_rng(seed))


def total(X, W, H, objective):
    """The objective, written out; coordinate descent halves both of its terms alike."""
    seen, mu = ~np.isnan(X), W.astype(float) @ H.astype(float)
    penalty = objective.rate_w * W.sum() + objective.rate_h * H.sum()
    fit = divergence(X[seen], mu[seen], objective.beta).sum()
    return float(fit + objective.dispersion * penalty)


def opened(X, kind, blocks=3, **options):
    """Blocks of a matrix, dense or by its entries."""
    unstored = None if kind == "dense" else "zero"
    given = X if kind == "dense" else sparse.csr_array(X)
    return as_blocks(given, blocks, unstored=unstored, **options)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.4, 0.1)])
def test_coordinate_descent_ends_at_a_minimum_of_the_objective(kind, rates):
    X = np.floor(5 * positive())
    shown = {"rate_w": rates[0], "rate_h": rates[1]} if rates[0] else {}
    with opened(X, kind, dtype="float64") as data:
        whole = assemble_matrix(data)
    assert_array_equal(whole.toarray() if kind == "sparse" else whole, X)
    with silent():
        objective = divergence_of(dispersion=0.7, **shown)
        W, H, n_iter = by_coordinates(whole, *start_of(X), objective, 20_000, 1e-12)
    assert n_iter > 1
    # At a minimum the gradient is zero where an entry is positive, and not negative elsewhere.
    residual = W @ H - X
    gradients = residual @ H.T + 0.7 * rates[0], W.T @ residual + 0.7 * rates[1]
    for factor, gradient in zip((W, H), gradients, strict=True):
        assert np.abs(gradient[factor > 1e-3]).max() < 1e-3
        assert gradient.min() > -1e-3


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("gaps", [False, True])
def test_updates_bring_the_objective_of_observed_entries_down(beta, gaps):
    X = positive() + 0.1
    X = np.where(np.random.default_rng(1).random(X.shape) < 0.3 * gaps, np.nan, X)
    objective, values = divergence_of(beta), []
    with as_blocks(X, 2, dtype="float64") as data:
        posterior = Posterior(SERIAL, data, objective, IMQ())
        start = prepare_starts(SERIAL, data, objective, "random", 1, 0)(0)
        values.append(total(X, *start, objective))
        for steps in range(5, 35, 5):
            method = Ensemble("random", "multiplicative", max_iter=steps, tol=0.0)
            [one] = method.particles(posterior, range(1), 0)
            assert one.n_iter == steps
            values.append(total(X, one.W, one.H, objective))
    assert (np.diff(values) <= 1e-9 * values[0]).all()
    assert values[-1] < 0.2 * values[0]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("options", [{"balance": True}, {"memory_limit": 1000}], ids=str)
def test_whole_matrices_are_in_the_grids_order(kind, options):
    X = np.floor(5 * positive())
    with opened(X, kind, **options) as data:
        whole = assemble_matrix(data)
        if data.row_order is not None:
            X = X[data.row_order][:, data.col_order]
    assert_array_equal(whole.toarray() if kind == "sparse" else whole, X)
    assert kind == "dense" or whole.has_sorted_indices


def particles(data, method, executor, numbers, **changes):
    posterior = Posterior(executor, data, divergence_of(**changes), IMQ())
    return list(method.particles(posterior, numbers, 5))


@pytest.mark.parametrize("optimizer", ["coordinate_descent", "multiplicative"])
@pytest.mark.parametrize("start", ["q_transform", "random", "nndsvdar"])
def test_a_particle_is_its_number_on_every_executor(start, optimizer):
    method = Ensemble(start=start, optimizer=optimizer, max_iter=8)
    with as_blocks(positive(), 3) as data:
        whole = particles(data, method, SERIAL, range(7))
        assert [one.number for one in whole] == list(range(7))
        for lanes, numbers in ((1, range(7)), (2, range(3, 7)), (3, range(6, 7))):
            for one in particles(data, method, LanesExecutor(lanes), numbers):
                assert_array_equal(one.W, whole[one.number].W)
                assert_array_equal(one.H, whole[one.number].H)
                assert one.n_iter == whole[one.number].n_iter
                assert one.seconds > 0


def test_starts_that_take_turns_are_the_same_as_side_by_side(monkeypatch):
    method = Ensemble(start="random", max_iter=8)
    with as_blocks(positive(), 3) as data:
        tasks = particles(data, method, LanesExecutor(2), range(3), beta=1.0)
        monkeypatch.setattr(ensemble, "SINGLE", 0)
        turns = particles(data, method, LanesExecutor(2), range(3), beta=1.0)
    for one, other in zip(tasks, turns, strict=True):
        assert_array_equal(one.W, other.W)
        assert_array_equal(one.H, other.H)


@pytest.mark.parametrize("start", ["q_transform", "nndsvdar"])
def test_missing_entries_do_not_matter(start):
    X = positive() + 0.1
    gaps = np.random.default_rng(4).random(X.shape) < 0.3
    method = Ensemble(start=start, max_iter=100)
    with as_blocks(np.where(gaps, np.nan, X), 2) as data:
        assert fill_missing(SERIAL, data, SQUARES, 5) is not None
        found = particles(data, method, SERIAL, range(3))
    for one in found:
        error = np.abs(one.W @ one.H - X)[gaps].mean() / X[gaps].mean()
        assert error < 0.25  # the noise of an entry alone has a standard deviation of 0.22
    with as_blocks(X, 2) as data:
        assert fill_missing(SERIAL, data, SQUARES, 5) is None


COORDINATES = "coordinate_descent"


@pytest.mark.parametrize(
    ("entry", "options", "law", "expected", "refusal"),
    [
        (None, {}, SQUARES, COORDINATES, None),
        (None, {}, divergence_of(1.0), "multiplicative", "beta=1"),
        (None, {}, divergence_of(shape_h=2.0), "multiplicative", "gamma priors"),
        (None, {"memory_limit": 1000}, SQUARES, "multiplicative", None),
        (-1.0, {}, SQUARES, "multiplicative", "negative"),
        (np.nan, {}, SQUARES, "multiplicative", "missing"),
    ],
)
def test_the_optimizer_that_data_and_model_allow(entry, options, law, expected, refusal):
    X = positive()
    X[0, 0] = X[0, 0] if entry is None else entry

    def chosen(optimizer):
        return Ensemble(optimizer=optimizer).for_data(data, law).optimizer

    with as_blocks(X, 2, **options) as data:
        assert data.in_memory is not bool(options)
        assert (chosen("auto"), chosen("multiplicative")) == (expected, "multiplicative")
        if refusal is None:
            assert chosen(COORDINATES) == COORDINATES
        else:
            refused(OptionError, refusal, chosen, COORDINATES)
