"""Draws of the sizes and levels that factors of a `GaussianMF` share leave its prior as it is."""

import numpy as np
import pytest

from daskfactor.data.sources import as_blocks
from daskfactor.executors.state import make_state
from daskfactor.inference import symmetries
from daskfactor.inference.program import COLUMNS, ROWS, SHIFT
from daskfactor.inference.symmetries import Prior, draw_level, draw_symmetries
from daskfactor.models.rates import draw_scales

pytestmark = pytest.mark.statistical

COPIES, ROWS_OF_W, ROWS_OF_H, K = 1500, 7, 3, 2
MEAN, RIDGE = 1.5, 0.7
X = np.random.default_rng(1).normal(size=(ROWS_OF_W, 2))
TABLES = (
    np.array([[0.0, 0.0, 0.0, 0.0], [1.3, 0.6, 2.0, 1.0], [0, 0, 0, 0], [1, 1, 1, 0]]),
    np.array([[0.0, 0.0, 0.0, MEAN], [0.8, 1.7, 1.0, 1.5], [0, 0, 0, 0], [1, 1, 0, 1]]),
)
"""Prior means and precisions of W, biases of rows and ones, and of H, ones and biases."""


def prior_draw(rng):
    """W, with a link to X in its first K columns, H as rows, and the link."""
    W, H = (
        rng.normal(table[0], 1 / np.sqrt(table[1]), (n, K + 2))
        for table, n in zip(TABLES, (ROWS_OF_W, ROWS_OF_H), strict=True)
    )
    link = np.zeros((2, K + 2))
    link[:, :K] = rng.normal(size=(2, K)) / np.sqrt(RIDGE * TABLES[ROWS][1, :K])
    W += X @ link
    W[:, K + 1], H[:, K] = 1.0, 1.0
    return W, H, link


def functions(W, H, link, mean):
    """Sizes and levels of what the prior is known of."""
    rest = W - X @ link
    biases = W[:, K].mean(), (H[:, K + 1] - mean).mean()
    levels = *rest[:, :K].mean(axis=0), *H[:, :K].mean(axis=0), *biases
    squares = [np.square(own[:, :K]).sum(axis=0) for own in (rest, H, link)]
    return np.concatenate([levels, np.square(levels), *np.log(squares)])


def moved(grid, rng):
    """Functions of a draw of the prior, and of where the draws along symmetries take it."""
    W, H, link = prior_draw(rng)
    state = make_state(grid, W.copy(), H.copy())
    (first,), (second,) = state.factors
    first.arrays[SHIFT] = X @ link
    priors = (
        Prior([slice(None)], TABLES[ROWS], K, (link, RIDGE)),
        Prior([slice(None)], TABLES[COLUMNS], K + 1, None),
    )
    scale, shift = draw_symmetries(state, priors, K, rng)
    sizes = np.concatenate([scale, np.ones(2)])
    np.testing.assert_allclose(first.values @ second.values.T, W @ H.T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(first.arrays[SHIFT], X @ (link * sizes))
    assert (np.abs(first.values[:, : K + 1] - W[:, : K + 1]) > 1e-9).all()
    after = functions(first.values, second.values, link * sizes, MEAN - shift)
    return functions(W, H, link, MEAN), after


def worst_shift():
    """The largest z of any mean, of draws that were moved against draws that were not."""
    rng = np.random.default_rng(3)
    with as_blocks(np.ones((ROWS_OF_W, ROWS_OF_H)), 1, dtype="float64") as data:
        pairs = [moved(data.grid, rng) for _ in range(COPIES)]
    before, after = (np.array(own) for own in zip(*pairs, strict=True))
    assert np.corrcoef(before[:, 0], after[:, 0])[0, 1] < 0.9, "hardly moved"
    change = after - before
    return float(np.abs(change.mean(axis=0) / change.std(axis=0)).max() * np.sqrt(COPIES))


def test_the_prior_stays_as_it_is():
    assert worst_shift() < 4.5


def without_volume(power, *rest):
    return draw_scales(0.0 * power, *rest)


def without_link(power, *rest):
    """Entries of the link are not counted."""
    return draw_scales(power - 1.0, *rest)


def without_biases(own, other, *rest):
    """What the other factor's biases say is left out."""
    return draw_level(own, other._replace(cross=0 * other.cross), *rest)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("draw_scales", without_volume),
        ("draw_scales", without_link),
        ("draw_level", without_biases),
    ],
)
def test_planted_bugs_are_seen(name, bug, monkeypatch):
    monkeypatch.setattr(symmetries, name, bug)
    assert worst_shift() > 4.5
