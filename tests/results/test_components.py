"""Components as people are shown them: one scale, one order, one set of names."""

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import OptionError
from daskfactor.results.components import components_of, told_quantity
from tests.fake_run import COMPONENTS, SHAPE, fake_run
from tests.refusals import refused


def test_columns_of_w_have_mean_one_and_rows_of_h_what_a_component_adds():
    tree = fake_run(keep="moments", chains=1)
    found = components_of(tree)
    assert_allclose(found.W.mean.mean(axis=1), 1.0)
    W, H = (tree["posterior_moments"][f"{name}_mean"].values[0] for name in "WH")
    assert_allclose(found.W.mean.T @ found.H.mean, W @ H)
    added = (W[:, :, None] * H).mean(axis=0)
    assert_allclose(found.H.mean, added[found.labels])
    assert_allclose(found.weight, np.sort(added.sum(axis=1) / added.sum())[::-1])


def test_the_spread_is_scaled_like_the_mean_and_intervals_hold_it():
    tree = fake_run(keep="moments", chains=1)
    found, moments = components_of(tree), tree["posterior_moments"].isel(chain=0)
    own = (moments["H_var"] ** 0.5 / moments["H_mean"]).values[found.labels]
    assert_allclose(np.sqrt(found.H.variance) / found.H.mean, own)
    low, high = found.H.interval(1)
    assert (low > 0).all()
    assert ((low < found.H.mean[1]) & (found.H.mean[1] < high)).all()
    few_low, few_high = found.H.interval(1, [4, 2])
    assert_array_equal([few_low, few_high], [low[[4, 2]], high[[4, 2]]])


def test_draws_have_the_names_of_align_with_all_chains_together():
    tree = fake_run()
    found, aligned = components_of(tree), dfac.align(tree)
    assert found.labels == list(range(COMPONENTS))
    draws = aligned["posterior/W"].transpose("component", "row", ...)
    mean = draws.values.reshape(COMPONENTS, SHAPE[0], -1).mean(axis=-1)
    assert_allclose(found.W.mean, mean / mean.mean(axis=1)[:, None])
    assert_allclose(found.present, aligned["alignment/share"])
    assert found.chain is None
    assert components_of(tree, chain=1).chain == 1


def test_moments_of_chains_are_never_mixed():
    tree = fake_run(keep="moments")
    found = components_of(tree)
    assert (found.chain, found.present) == (0, None)
    alone = components_of(tree.isel(chain=[0]))
    assert_array_equal(found.H.mean, alone.H.mean)
    refused(OptionError, "from 0 to 1, got 2", components_of, tree, chain=2)


def test_a_point_has_no_interval():
    V = xr.DataArray(np.random.default_rng(0).poisson(3.0, (9, 7)), dims=("gene", "cell"))
    point = dfac.optimize(
        V, dfac.TweedieNMF(2), dfac.MultiplicativeUpdates(), random_seed=0, progressbar=False
    )
    found = components_of(point)
    assert found.H.interval(0) is None
    assert_allclose(found.W.mean.T @ found.H.mean, point["W"] @ point["H"], rtol=1e-5)
    assert found.W.names[:2] == ["gene 0", "gene 1"]
    refused(OptionError, "no factors W and H", components_of, point[["W"]])


@pytest.mark.parametrize(
    ("attrs", "expected"),
    [
        ({}, "a name"),
        ({"long_name": "radiance", "units": "W m-2"}, "radiance [W m-2]"),
        ({"standard_name": "air_pressure", "units": "1"}, "air pressure"),
    ],
)
def test_what_a_quantity_is_called(attrs, expected):
    assert told_quantity(attrs, "a_name") == expected
