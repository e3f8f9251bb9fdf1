"""Swaps between components, widths of their intervals, and coverage of cells that were held out."""

import json

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.fake_particles import fake_particles
from tests.fake_run import fake_run

W = np.eye(6, 3) + np.eye(6, 3, -3) + 0.01
H = np.eye(3, 5) + 0.01


def trace(change=None, draws=10, noise=0.0):
    """Draws of three plain components, of which some are changed."""
    rng = np.random.default_rng(0)
    ws, hs = (np.stack([one] * draws) for one in (W, H * [[3.0], [2.0], [1.0]]))
    ws, hs = (
        one * rng.gamma(1 / noise**2, noise**2, one.shape) if noise else one for one in (ws, hs)
    )
    if change is not None:
        change(ws, hs)
    return fake_particles(ws, hs, np.full(draws, 1 / draws))


def test_plain_components_are_always_themselves():
    found = dfac.component_swaps(trace())
    assert_allclose(found["matched"], np.eye(3))
    assert_array_equal(found["none"], 0.0)


def test_components_that_are_another_or_nothing_are_counted():
    def change(ws, hs):
        # In two of ten draws component 2 is a copy of component 0; in one it is like nothing.
        ws[:2, :, 2], hs[:2, 2] = ws[:2, :, 0], hs[:2, 0] / 3
        ws[2, :, 2], hs[2, 2] = [0.01, 0.01, 0.01, 0.01, 0.01, 0.01], [0, 0, 0, 1.0, 1.0]

    found = dfac.component_swaps(trace(change))
    assert_allclose(found["matched"].sel(component=2), [0.2, 0.0, 0.7])
    assert_allclose(found["none"], [0.0, 0.0, 0.1])
    assert_allclose(found["matched"].sum("other") + found["none"], 1.0)


def modelled(**options):
    tree = fake_run(**options)
    tree.attrs["model"] = json.dumps({"type": "TweedieNMF", "n_components": 3, "beta": 1.0})
    return tree


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_widths_are_those_of_the_spread(noise):
    found = dfac.component_swaps(trace(noise=noise, draws=400))
    # 2 x 1.645 standard deviations; scales are shared out, so that a little less is left.
    assert_allclose(found["width_w"], 3.29 * noise, rtol=0.3)
    assert_allclose(found["width_h"], 3.29 * noise, rtol=0.6)


def test_coverage_counts_cells_inside_their_intervals():
    tree = modelled()
    rows, columns = np.indices((12, 7)).reshape(2, -1)
    inside = dfac.predict(tree, interval=0.8).load()
    values = inside["mean"].values.copy()
    values[:3] = inside["upper"].values[:3] + 1.0
    found = dfac.held_out_coverage(tree, (rows, columns), values.ravel(), levels=(0.8,))
    assert float(found["inside"][0]) == 9 / 12
    assert int(found["cells"]) == 84
    missed = np.square(values - inside["mean"].values).mean() ** 0.5
    assert_allclose(found["rmse"], missed)


def test_monitored_cells_need_no_draws():
    tree = modelled(keep="moments")
    cells = tree["monitor"]["row_index"].values[::-1], tree["monitor"]["column_index"].values[::-1]
    mean = dfac.monitored(tree)["mean"].values[::-1]
    found = dfac.held_out_coverage(tree, cells, mean)
    assert found["inside"].values.tolist() == [1.0] * 4
    assert float(found["rmse"]) == 0.0
    with pytest.raises(OptionError, match="did not monitor these cells"):
        dfac.held_out_coverage(tree, ([3], [3]), [1.0])


def test_values_that_are_not_known_are_left_out():
    tree = modelled()
    found = dfac.held_out_coverage(tree, ([3, 4], [3, 3]), [5.0, np.nan])
    assert int(found["cells"]) == 1
