"""Entries drawn with replacement: against NumPy, uniform, and without bias."""

from functools import partial
from itertools import count as attempts

import numpy as np
import pytest
from scipy import stats

from daskfactor.kernels import blockwise
from daskfactor.kernels.philox import philox4x32
from daskfactor.kernels.subsample import CHUNK, add_subsample, block_address, drawn_entries
from daskfactor.kernels.views import SparseBlock, Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels.problems import compressed, window

KEY = np.array([7, 99], np.uint32)
SHAPE = (6, 5)


def matrix(dtype="float64"):
    """Counts with zeros and missing entries."""
    rng = np.random.default_rng(3)
    V = rng.poisson(1.5, SHAPE).astype(dtype)
    V[rng.random(SHAPE) < 0.25] = np.nan
    return V


VIEWS = {"dense": window, "stored": partial(compressed, zeros=False)}
VIEWS |= {"zeros": partial(compressed, zeros=True)}


def draws(view, count, address):
    pieces = [[part.copy() for part in piece[:3]] for piece in drawn_entries(view, count, address)]
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def reference(view, V, count, address):
    """The same in NumPy, a draw at a time."""
    m, n = V.shape
    if isinstance(view, SparseBlock) and not view.zeros:
        cells = np.flatnonzero(~np.isnan(V.ravel()))
    else:
        cells = np.arange(m * n)
    found = []
    for t in range(count):
        for attempt in attempts():
            words = philox4x32(attempt, t // 2, address.iteration, address.factor, 7, 99)
            high, low = (int(word) for word in words[2 * (t % 2) : 2 * (t % 2) + 2])
            cell = cells[int(((high << 21) | (low >> 11)) / 2**53 * cells.size)]
            if not np.isnan(V.flat[cell]):
                break
        found.append((cell // n, cell % n, V.flat[cell]))
    return [np.array(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("name", VIEWS)
def test_draws_are_those_of_the_formula(name):
    V = matrix()
    view, given = VIEWS[name](V), (200, block_address(KEY, 11, 5))
    np.testing.assert_equal(draws(view, *given), reference(view, V, *given))


@pytest.mark.parametrize("name", VIEWS)
def test_draws_are_uniform_over_what_is_observed(name):
    V = matrix("float32")
    rows, cols, values = draws(VIEWS[name](V), 6000, block_address(KEY, 0, 0))
    np.testing.assert_array_equal(values, V[rows, cols])
    times = np.bincount(rows * SHAPE[1] + cols, minlength=V.size)[~np.isnan(V).ravel()]
    assert times.sum() == 6000 > CHUNK
    assert stats.chisquare(times).pvalue > 1e-4


def test_iterations_blocks_and_keys_draw_other_entries():
    view = window(np.arange(30_000.0).reshape(200, 150))
    addresses = (KEY, 0, 0), (KEY, 1, 0), (KEY, 0, 1), (KEY + 1, 0, 0)
    values = [draws(view, 64, block_address(*address))[2] for address in addresses]
    for number, own in enumerate(values):
        assert len(np.unique(own)) > 50
        for other in values[:number]:
            assert np.mean(own == other) < 0.1


@pytest.mark.quick("2.0-float32", "-0.7-float64")
@pytest.mark.parametrize(
    ("beta", "dtype"), [(2.0, "float32"), (1.0, "float64"), (0.5, "float32"), (-0.7, "float64")]
)
def test_gradient_and_curvature_against_numpy(beta, dtype):
    rng = np.random.default_rng(1)
    V = matrix(dtype) + 1
    W, H = (rng.random((size, 3)).astype(dtype) + 0.1 for size in SHAPE)
    address = block_address(KEY, 4, 2)
    rows, cols, values = draws(window(V), 50, address)
    mu = np.sum(W[rows].astype("f8") * H[cols], axis=1)
    slope, bend = 2.5 * (values - mu) * mu ** (beta - 2), 0.3 * mu ** (beta - 1)
    wanted = [np.zeros(factor.shape) for factor in (W, H, W, H)]
    for weight, target_w, target_h in ((slope, *wanted[:2]), (bend, *wanted[2:])):
        np.add.at(target_w, rows, weight[:, None] * H[cols])
        np.add.at(target_h, cols, weight[:, None] * W[rows])
    got = [np.zeros_like(factor) for factor in (W, H, W, H)]
    block = window(V), Tweedie(beta), (W, H), 1e-9
    add_subsample(block, (50, address), 2.5, (got[0], got[1]), ((got[2], got[3]), 0.3))
    for own, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, right, rtol=3e-4 if dtype == "float32" else 1e-10)


@pytest.mark.parametrize("name", VIEWS)
def test_the_mean_gradient_is_the_whole_one(name):
    """Within five standard errors, over independent iterations."""
    rng = np.random.default_rng(2)
    V, iterations, each = matrix(), 1000, 7
    W, H = (rng.random((size, 3)) + 0.2 for size in SHAPE)
    view = VIEWS[name](V)
    block = view, Tweedie(1.0), (W, H), 1e-9
    whole = np.concatenate(blockwise.gradient(block, 1.0, Workspace()))
    found = np.zeros((iterations, *whole.shape))
    observed = np.count_nonzero(~np.isnan(V))
    for iteration in range(iterations):
        out = found[iteration, : SHAPE[0]], found[iteration, SHAPE[0] :]
        draw = each, block_address(KEY, iteration, 0)
        add_subsample(block, draw, observed / each, out)
    error = found.std(axis=0) / np.sqrt(iterations)
    assert np.all(np.abs(found.mean(axis=0) - whole) < 5 * error)
    assert np.any(np.abs(1.4 * found.mean(axis=0) - whole) > 5 * error)  # a wrong scale is seen
