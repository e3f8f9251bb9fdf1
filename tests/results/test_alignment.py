import json
from itertools import permutations

import dask
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import OptionError
from daskfactor.results.align import Law, match, reference_from
from daskfactor.results.schema import factor_dims
from daskfactor.results.store import RunStore
from tests.fake_run import drawn_tree, fake_run
from tests.refusals import refused
from tests.results.runs import ATTRS, fill, make_spec, memory_tree

ROWS, COLUMNS, K, CHAINS, DRAWS = 14, 9, 4, 2, 12


def truth(seed=0, signed=False):
    """Components that are plainly different."""
    rng = np.random.default_rng(seed)
    W, H = rng.gamma(0.3, size=(ROWS, K)) + 0.01, rng.gamma(0.3, size=(K, COLUMNS)) + 0.01
    if signed:
        W, H = W * rng.choice([-1, 1], W.shape), H * rng.choice([-1, 1], H.shape)
    return W, H


def shuffled(seed=1, noise=0.02, signed=False, fixed=()):
    """A trace of one posterior mode whose components change place, scale and sign."""
    rng = np.random.default_rng(seed)
    W0, H0 = truth(signed=signed)
    W = np.empty((CHAINS, DRAWS, ROWS, K))
    H = np.empty((CHAINS, DRAWS, K, COLUMNS))
    orders = np.empty((CHAINS, DRAWS, K), dtype=int)
    free = np.setdiff1d(np.arange(K), fixed)
    for at in np.ndindex(CHAINS, DRAWS):
        order = np.arange(K)
        order[free] = rng.permutation(free)
        scale = np.ones(K)
        scale[free] = rng.uniform(0.3, 3.0, free.size)
        if signed:
            scale[free] *= rng.choice([-1, 1], free.size)
        W[at] = (W0 * np.exp(noise * rng.normal(size=W0.shape)))[:, order] * scale
        H[at] = (H0 * np.exp(noise * rng.normal(size=H0.shape)))[order] / scale[:, None]
        orders[at] = order
    lp = rng.normal(size=(CHAINS, DRAWS))
    genes = [f"g{i}" for i in range(ROWS)]
    tree = drawn_tree(W, H, ("gene", "day"), lp, draw=np.arange(DRAWS) * 3, gene=genes)
    kind = "GaussianMF" if signed else "TweedieNMF"
    model = {"type": kind, "n_components": K}
    if len(fixed):
        model["fixed_w"] = list(fixed)
    tree.attrs = {"model": json.dumps(model), "dispersion": 1.0}
    return tree, orders


def product(tree):
    return np.einsum("cdik,cdkj->cdij", tree["posterior/W"].values, tree["posterior/H"].values)


@pytest.mark.parametrize("signed", [False, True])
def test_permutation_scale_and_sign_are_undone(signed):
    tree, orders = shuffled(signed=signed)
    aligned = dfac.align(tree)
    assert_allclose(product(aligned), product(tree), rtol=1e-12)
    permutation = aligned["alignment/permutation"].values
    back = np.take_along_axis(orders, permutation, axis=2)
    assert (back == back[0, 0]).all()
    W, H = (aligned["posterior"][name].values for name in "WH")
    spread = W.std(axis=(0, 1)) / np.abs(W.mean(axis=(0, 1)))
    assert spread.max() < 0.15  # of 0.02 times what scaling adds; unaligned it is above 1
    if signed:
        sizes = np.linalg.norm(W, axis=2), np.linalg.norm(H, axis=3)
    else:
        sizes = W.sum(axis=2), H.sum(axis=3)
    assert_allclose(*sizes, rtol=1e-10)
    assert aligned["alignment/share"].values.tolist() == [1.0] * K
    assert aligned["alignment/similarity"].values.min() > 0.98
    for name in "WH":
        assert_allclose(
            aligned["posterior_moments"][f"{name}_mean"],
            aligned["posterior"][name].mean("draw"),
            rtol=1e-10,
        )
        assert_allclose(
            aligned["posterior_moments"][f"{name}_var"],
            aligned["posterior"][name].var("draw"),
            rtol=1e-8,
        )


def weights_of(aligned):
    """What each component carries of the mean of WH."""
    draws = aligned["posterior"].mean(("chain", "draw"))
    sums = [draws[name].sum(dim) for name, dim in zip("WH", factor_dims(aligned), strict=True)]
    return (sums[0] * sums[1]).values


def test_components_come_by_weight_under_the_labels_that_they_had():
    tree, _ = shuffled()
    aligned = dfac.align(tree)
    weights = weights_of(aligned)
    assert (np.diff(weights) < 0).all()
    named = tree.map_over_datasets(
        lambda group: group.assign_coords(component=list("abcd")) if "W" in group else group
    )
    labels = dfac.align(named)
    for group in ("posterior", "posterior_moments", "alignment"):
        assert "component" not in aligned[group].coords
        assert labels[group]["component"].values.tolist() == list("abcd")
    backwards = dfac.align(tree.isel(draw=slice(None, None, -1)))
    assert_allclose(weights_of(backwards), weights, rtol=1e-12)
    pair = (truth()[0][:, ::-1], truth()[1][::-1])
    assert_allclose(weights_of(dfac.align(tree, pair)), sorted_as(pair, weights))


def sorted_as(pair, weights):
    """Weights in the order of the components of a pair of factors, of which they are."""
    rank = np.argsort(np.argsort(-pair[0].sum(axis=0) * pair[1].sum(axis=1)))
    return weights[rank]


def test_factor_and_permutation_say_what_was_done():
    tree, _ = shuffled(signed=True)
    aligned = dfac.align(tree)
    at = {"chain": 1, "draw": 5}
    order = aligned["alignment/permutation"].isel(at).values
    factor = aligned["alignment/factor"].isel(at).values
    for name, by in (("W", factor), ("H", 1 / factor)):
        old, new = (
            t["posterior"][name].isel(at).transpose("component", ...) for t in (tree, aligned)
        )
        assert_allclose(new, old.values[order] * by[:, None], rtol=1e-12)


def test_the_order_is_the_best_of_all():
    rng = np.random.default_rng(5)
    reference = reference_from(rng.random((6, 4)), rng.random((4, 5)))
    W, H = rng.random((6, 4)), rng.random((4, 5))
    unit_w = W / np.linalg.norm(W, axis=0)
    unit_h = H / np.linalg.norm(H, axis=1, keepdims=True)

    def score(order):
        order = list(order)
        cosines = (reference.W * unit_w[:, order]).sum(0) * (reference.H * unit_h[order]).sum(1)
        return cosines.sum()

    found = match(W, H, reference, Law(np.arange(4), False, 4), 0.8)
    best = max(permutations(range(4)), key=score)
    assert tuple(found.permutation) == best
    assert found.similarity.sum() == pytest.approx(score(best))


def test_frozen_components_keep_their_place_and_scale():
    tree, _ = shuffled(fixed=(0, 1))
    aligned = dfac.align(tree)
    for name in "WH":
        assert_array_equal(
            aligned["posterior"][name].isel(component=[0, 1]),
            tree["posterior"][name].isel(component=[0, 1]),
        )
    assert (aligned["alignment/permutation"].values[..., :2] == [0, 1]).all()
    assert (aligned["alignment/share"].values == 1).all()


def test_biases_keep_their_place():
    tree, _ = shuffled(signed=True, fixed=(2, 3))
    tree.attrs["model"] = json.dumps({"type": "GaussianMF", "n_components": 2})
    # The first two change places, the last two stand for biases.
    tree["posterior"] = tree["posterior"].isel(component=[2, 3, 0, 1]).to_dataset()
    tree["posterior"]["W"][..., 2:] = 1.0
    named = tree["posterior"].to_dataset().assign_coords(component=["0", "1", "row_bias", "b"])
    tree["posterior"] = named
    aligned = dfac.align(tree)
    assert (aligned["alignment/permutation"].values[..., 2:] == [2, 3]).all()
    assert (aligned["posterior/W"].values[..., 2:] == 1.0).all()
    assert aligned["alignment"]["component"].values.tolist() == ["0", "1", "row_bias", "b"]


def test_a_component_of_one_chain_has_that_chains_share():
    tree, _ = shuffled()
    # So large that a mean over both chains would be all its own.
    other = tuple(100 * factor for factor in truth(seed=9))
    tree["posterior/W"].values[1, :, :, :] = np.where(
        np.arange(K) == 0, other[0][:, [0]], truth()[0]
    )
    tree["posterior/H"].values[1] = np.where(np.arange(K)[:, None] == 0, other[1][[0]], truth()[1])
    tree["sample_stats/lp"].values[0] += 10.0
    found = dfac.align(tree)["alignment"]
    assert sorted(found["share"].values.tolist()) == [0.5, 1.0, 1.0, 1.0]
    lonely = int(np.argmin(found["share"].values))
    assert found["share_by_chain"].values[:, lonely].tolist() == [1.0, 0.0]


def test_a_reference_gives_the_names():
    tree, _ = shuffled()
    W, H = truth()
    order = [2, 0, 3, 1]
    by_pair = dfac.align(tree, (W[:, order], H[order]))
    dims = (("gene", "component"), ("component", "day"))
    point = xr.Dataset({"W": (dims[0], W[:, order]), "H": (dims[1], H[order])})
    by_point = dfac.align(tree, point)
    by_trace = dfac.align(tree, by_pair)
    for found in (by_pair, by_point, by_trace):
        mean = found["posterior/H"].mean(("chain", "draw")).values
        cosines = (mean * H[order]).sum(1) / np.linalg.norm(mean, axis=1)
        assert_allclose(cosines / np.linalg.norm(H[order], axis=1), 1.0, atol=1e-3)
    twice = dfac.align(by_pair, by_pair)
    assert (twice["alignment/permutation"].values == np.arange(K)).all()
    assert_allclose(twice["posterior/W"], by_pair["posterior/W"], rtol=1e-12)


def test_the_coarse_chain_follows_the_fine_one():
    tree, _ = shuffled()
    coarse = tree["posterior"].to_dataset().isel(draw=slice(1, None, 2))
    tree["posterior_coarse"] = coarse
    aligned = dfac.align(tree)
    fine = aligned["posterior"].to_dataset().isel(draw=slice(1, None, 2))
    xr.testing.assert_allclose(aligned["posterior_coarse"].to_dataset(), fine)
    assert aligned["alignment_coarse/permutation"].sizes["draw"] == DRAWS // 2
    raw, done = (dfac.expectation(t, lambda W, H: W @ H) for t in (tree, aligned))
    assert_allclose(raw, done, rtol=1e-10)


def test_a_lazy_trace_stays_lazy_and_gives_the_same():
    tree, _ = shuffled()
    lazy = tree.copy()
    chunks = {"chain": 1, "draw": 5, "gene": 4, "component": 3}
    lazy["posterior"] = lazy["posterior"].to_dataset().chunk(chunks)
    aligned = dfac.align(lazy)
    for name in "WH":
        found = aligned["posterior"][name]
        assert dask.is_dask_collection(found.data)
        xr.testing.assert_allclose(found.compute(), dfac.align(tree)["posterior"][name])


def test_a_stored_run_is_aligned_from_its_path(tmp_path):
    spec = make_spec(attrs=ATTRS)
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    aligned = dfac.align(tmp_path / "run.zarr")
    assert dask.is_dask_collection(aligned["posterior/W"].data)
    xr.testing.assert_allclose(
        aligned["posterior"].to_dataset().compute(),
        dfac.align(memory_tree(spec))["posterior"].to_dataset(),
    )
    at = {"rows": ["g3"], "columns": [spec.coords["day"][2]]}
    expected = dfac.predict(memory_tree(spec), **at)
    assert_allclose(dfac.predict(aligned, **at)["mean"], expected["mean"], rtol=1e-6)


def test_a_component_that_is_zero_does_no_harm():
    tree, _ = shuffled()
    tree["posterior/W"].values[0, 3, :, 1] = 0.0
    tree["posterior/H"].values[0, 3, 1] = 0.0
    aligned = dfac.align(tree)
    for array in aligned["alignment"].data_vars.values():
        assert np.isfinite(array.values).all()
    assert_allclose(product(aligned), product(tree), rtol=1e-12)


def test_what_cannot_be_aligned_is_refused():
    tree, _ = shuffled()
    refused(OptionError, "kept moments only", dfac.align, fake_run(keep="moments"))
    refused(OptionError, "no draws yet", dfac.align, tree.isel(draw=slice(0)))
    refused(OptionError, r"shapes \(14, 3\)", dfac.align, tree, (truth()[0][:, :3], truth()[1][:3]))
    refused(OptionError, "got ndarray", dfac.align, tree, truth()[0])
    refused(OptionError, "not finite", dfac.align, tree, (truth()[0] * np.nan, truth()[1]))
    refused(OptionError, "cosine above 0", dfac.align, tree, threshold=0.0)
