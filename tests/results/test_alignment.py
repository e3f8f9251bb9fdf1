import json
from itertools import permutations

import dask
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import OptionError
from daskfactor.results.align import _best_draw, match, reference_from
from daskfactor.runs.schema import factor_dims
from daskfactor.runs.trace import Run, Symmetries
from tests.fake_run import drawn_tree, fake_run
from tests.refusals import refused
from tests.results.particle_tree import modes, particle_tree

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
    rng, (W0, H0) = np.random.default_rng(seed), truth(signed=signed)
    W, H = np.empty((CHAINS, DRAWS, ROWS, K)), np.empty((CHAINS, DRAWS, K, COLUMNS))
    orders, free = np.empty((CHAINS, DRAWS, K), dtype=int), np.setdiff1d(np.arange(K), fixed)
    for at in np.ndindex(CHAINS, DRAWS):
        order, scale = np.arange(K), np.ones(K)
        order[free] = rng.permutation(free)
        scale[free] = rng.uniform(0.3, 3.0, free.size)
        if signed:
            scale[free] *= rng.choice([-1, 1], free.size)
        W[at] = (W0 * np.exp(noise * rng.normal(size=W0.shape)))[:, order] * scale
        H[at] = (H0 * np.exp(noise * rng.normal(size=H0.shape)))[order] / scale[:, None]
        orders[at] = order
    lp, genes = rng.normal(size=(CHAINS, DRAWS)), [f"g{i}" for i in range(ROWS)]
    tree = drawn_tree(W, H, ("gene", "day"), lp, draw=np.arange(DRAWS) * 3, gene=genes)
    model = {"type": "GaussianMF" if signed else "TweedieNMF", "n_components": K}
    model |= {"fixed_w": list(fixed)} if len(fixed) else {}
    tree.attrs = {"model": json.dumps(model), "dispersion": 1.0}
    return tree, orders


def product(tree):
    return tree["posterior/W"].values @ tree["posterior/H"].values


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
    size = np.linalg.norm if signed else np.sum
    assert_allclose(size(W, axis=2), size(H, axis=3), rtol=1e-10)
    assert aligned["alignment/share"].values.tolist() == [1.0] * K
    assert aligned["alignment/similarity"].values.min() > 0.98
    moments = aligned["posterior_moments"]
    for name in "WH":
        draws = aligned["posterior"][name]
        assert_allclose(moments[f"{name}_mean"], draws.mean("draw"), rtol=1e-10)
        assert_allclose(moments[f"{name}_var"], draws.var("draw"), rtol=1e-8)


def weights_of(aligned):
    """What each component carries of the mean of WH."""
    draws = aligned["posterior"].mean(("chain", "draw"))
    W, H = (draws[name].sum(dim) for name, dim in zip("WH", factor_dims(aligned), strict=True))
    return (W * H).values


def test_components_come_by_weight_under_the_labels_that_they_had():
    tree, _ = shuffled()
    aligned = dfac.align(tree)
    weights = weights_of(aligned)
    assert (np.diff(weights) < 0).all()
    named = tree.copy()
    named["posterior"] = tree["posterior"].to_dataset().assign_coords(component=list("abcd"))
    labels = dfac.align(named)
    for group in ("posterior", "posterior_moments", "alignment"):
        assert "component" not in aligned[group].coords
        assert labels[group]["component"].values.tolist() == list("abcd")
    backwards = dfac.align(tree.isel(draw=slice(None, None, -1)))
    assert_allclose(weights_of(backwards), weights, rtol=1e-12)
    W, H = truth()[0][:, ::-1], truth()[1][::-1]
    rank = np.argsort(np.argsort(-W.sum(axis=0) * H.sum(axis=1)))
    assert_allclose(weights_of(dfac.align(tree, (W, H))), weights[rank])


def test_factor_and_permutation_say_what_was_done():
    tree, _ = shuffled(signed=True)
    aligned, at = dfac.align(tree), {"chain": 1, "draw": 5}
    order = aligned["alignment/permutation"].isel(at).values
    factor = aligned["alignment/factor"].isel(at).values
    for name, by in (("W", factor), ("H", 1 / factor)):
        both = (own["posterior"][name].isel(at) for own in (tree, aligned))
        old, new = (own.transpose("component", ...) for own in both)
        assert_allclose(new, old.values[order] * by[:, None], rtol=1e-12)


def test_frozen_components_and_biases_keep_their_place_and_scale():
    tree, _ = shuffled(fixed=(0, 1))
    aligned = dfac.align(tree)
    for name in "WH":
        one, other = (own["posterior"][name].isel(component=[0, 1]) for own in (aligned, tree))
        assert_array_equal(one, other)
    assert (aligned["alignment/permutation"].values[..., :2] == [0, 1]).all()
    assert (aligned["alignment/share"].values == 1).all()
    tree, _ = shuffled(signed=True, fixed=(2, 3))
    tree.attrs["model"] = json.dumps({"type": "GaussianMF", "n_components": 2})
    # The first two change places, the last two stand for biases.
    named = tree["posterior"].isel(component=[2, 3, 0, 1]).to_dataset()
    named["W"][..., 2:] = 1.0
    labels = ["0", "1", "row_bias", "b"]
    tree["posterior"] = xr.DataTree(named.assign_coords(component=labels))
    aligned = dfac.align(tree)
    assert (aligned["alignment/permutation"].values[..., 2:] == [2, 3]).all()
    assert (aligned["posterior/W"].values[..., 2:] == 1.0).all()
    assert aligned["alignment"]["component"].values.tolist() == labels


def test_a_component_of_one_chain_has_that_chains_share():
    tree, _ = shuffled()
    # So large that a mean over both chains would be all its own.
    (W, H), other = truth(), [100 * factor for factor in truth(seed=9)]
    W[:, 0], H[0] = other[0][:, 0], other[1][0]
    tree["posterior/W"].values[1], tree["posterior/H"].values[1] = W, H
    tree["sample_stats/lp"].values[0] += 10.0
    found = dfac.align(tree)["alignment"]
    assert sorted(found["share"].values.tolist()) == [0.5, 1.0, 1.0, 1.0]
    lonely = int(np.argmin(found["share"].values))
    assert found["share_by_chain"].values[:, lonely].tolist() == [1.0, 0.0]


def test_a_reference_gives_the_names():
    tree, _ = shuffled()
    order = [2, 0, 3, 1]
    W, H = truth()[0][:, order], truth()[1][order]
    by_pair = dfac.align(tree, (W, H))
    point = xr.Dataset({"W": (("gene", "component"), W), "H": (("component", "day"), H)})
    for found in (by_pair, dfac.align(tree, point), dfac.align(tree, by_pair)):
        mean = found["posterior/H"].mean(("chain", "draw")).values
        lengths = np.linalg.norm(mean, axis=1) * np.linalg.norm(H, axis=1)
        assert_allclose((mean * H).sum(1) / lengths, 1.0, atol=1e-3)
    twice = dfac.align(by_pair, by_pair)
    assert (twice["alignment/permutation"].values == np.arange(K)).all()
    assert_allclose(twice["posterior/W"], by_pair["posterior/W"], rtol=1e-12)


def test_an_aligned_trace_has_no_coarse_chain():
    tree, _ = shuffled()
    tree["posterior_coarse"] = tree["posterior"].to_dataset().isel(draw=slice(1, None, 2))
    assert "posterior_coarse" not in dfac.align(tree).children


def test_a_lazy_trace_stays_lazy_and_gives_the_same():
    tree, _ = shuffled()
    lazy, chunks = tree.copy(), {"chain": 1, "draw": 5, "gene": 4, "component": 3}
    lazy["posterior"] = lazy["posterior"].to_dataset().chunk(chunks)
    found, expected = (dfac.align(own)["posterior"] for own in (lazy, tree))
    for name in "WH":
        assert dask.is_dask_collection(found[name].data)
        xr.testing.assert_allclose(found[name].compute(), expected[name])


def test_a_component_that_is_zero_does_no_harm():
    tree, _ = shuffled()
    tree["posterior/W"].values[0, 3, :, 1], tree["posterior/H"].values[0, 3, 1] = 0.0, 0.0
    aligned = dfac.align(tree)
    assert np.isfinite(aligned["alignment"].to_dataset().to_array()).all()
    assert_allclose(product(aligned), product(tree), rtol=1e-12)


def test_what_cannot_be_aligned_is_refused():
    tree, (W, H) = shuffled()[0], truth()
    for trace, options, message in (
        (fake_run(keep="moments"), {}, "stored only moments"),
        (tree.isel(draw=slice(0)), {}, "no draws yet"),
        (tree, {"reference": (W[:, :3], H[:3])}, r"shapes \(14, 3\)"),
        (tree, {"reference": W}, "got ndarray"),
        (tree, {"reference": (W * np.nan, H)}, "not finite"),
        (tree, {"threshold": 0.0}, "cosine above 0"),
        (particle_tree(), {"by": "h"}, 'by must be "both" or "w"'),
    ):
        refused(OptionError, message, dfac.align, trace, **options)


@pytest.mark.parametrize("by", ["both", "w"])
def test_columns_on_the_simplex_stay_there(by):
    W, H, orders = modes()
    w = np.random.default_rng(3).dirichlet(np.ones(12))
    aligned = dfac.align(particle_tree(W, H, w), by=by)
    found = aligned["posterior"].to_dataset()
    assert_allclose(found["W"].sum("gene"), 1.0, rtol=1e-12)
    assert (aligned["alignment/factor"].values == 1.0).all()
    assert_allclose(found["W"].values[0] @ found["H"].values[0], W @ H)
    back = np.take_along_axis(orders, aligned["alignment/permutation"].values[0], axis=1)
    assert (back == back[0]).all()
    assert_allclose(aligned["alignment/share"], 1.0)
    moments, ours = aligned["posterior_moments"].to_dataset(), found["H"].values[0]
    mean = np.einsum("m,mkj->kj", w, ours)
    assert_allclose(moments["H_mean"][0], mean, rtol=1e-10)
    variance = np.einsum("m,mkj->kj", w, (ours - mean) ** 2)
    assert_allclose(moments["H_var"][0], variance, rtol=1e-8)
    if by == "w":
        assert aligned["alignment"].attrs["by"] == "w"


def test_the_reference_is_the_mean_by_weight():
    W, H, _ = modes(noise=0.3, count=5)
    w = np.array([0.7, 0.0, 0.1, 0.15, 0.05])
    aligned = dfac.align(particle_tree(W, H, w), threshold=0.1)
    found, cosine = aligned["posterior"].to_dataset(), 1.0
    for name, axis in (("W", "gene"), ("H", "day")):
        mean = found[name].weighted(aligned["sample_stats/weight"]).mean(("chain", "draw"))
        lengths = np.sqrt((found[name] ** 2).sum(axis) * (mean**2).sum(axis))
        cosine = cosine * (found[name] * mean).sum(axis) / lengths
    similarity = aligned["alignment/similarity"]
    assert_allclose(similarity, cosine.transpose(*similarity.dims), rtol=1e-10)


def test_under_a_tweedie_model_scales_are_still_shared_out():
    W, H, _ = modes(silf=False)
    W *= 4.0
    aligned = dfac.align(particle_tree(W, H, np.full(12, 1 / 12), silf=False))["posterior"]
    assert_allclose(aligned["W"].sum("gene"), aligned["H"].sum("day"), rtol=1e-10)


def test_alignment_starts_at_the_particle_of_most_weight():
    W, H, orders = modes()
    unlike = [at for at in range(1, 12) if orders[at].tolist() != orders[0].tolist()]
    light, heavy, w = unlike[0], unlike[1], np.full(12, 0.05)
    w[[0, heavy]] = 0.25
    lp = np.zeros(12)
    lp[light], lp[0], lp[heavy] = 99.0, 50.0, 40.0
    assert _best_draw(Run(particle_tree(W, H, w, lp=lp))) == (0, 0)


def test_shares_are_of_the_mass():
    W, H, _ = modes(count=4)
    # One component of the last is another.
    W[3, :, 0] = np.where(np.arange(12) % 2, 0.15, 0.01)
    aligned = dfac.align(particle_tree(W, H, [0.3, 0.3, 0.3, 0.1]))["alignment"]
    assert sorted(aligned["share"].values.round(6)) == [0.9, 1.0, 1.0]
    assert_allclose(aligned["share_by_chain"][0], aligned["share"])


def cosines(one, other):
    """Of every row of one matrix and every row of another."""
    lengths = (np.linalg.norm(own, axis=1) for own in (one, other))
    return one @ other.T / np.outer(*lengths)


def test_the_order_is_the_best_of_all_and_by_w_that_of_the_papers_cost():
    rng, each, differ = np.random.default_rng(0), range(4), 0
    law, of_both = Symmetries(np.arange(4), False, 4, True), Symmetries(np.arange(4), False, 4)
    for _ in range(40):
        W, H, W0, H0 = (rng.gamma(0.5, size=s) + 1e-3 for s in ((9, 4), (4, 8)) * 2)
        reference, of_w = reference_from(W0, H0), cosines(W0.T, W.T)
        best = min(permutations(each), key=lambda own, c=of_w: np.arccos(c[each, own]).sum())
        for rows in (H, H[::-1]):
            found = match(W, rows, reference, law, 0.8, "w")
            assert tuple(found.permutation) == best
        assert_allclose(found.similarity, of_w[each, best])
        assert_array_equal(found.matched, of_w[each, best] >= 0.8)
        found, joint = match(W, H, reference, of_both, 0.8), of_w * cosines(H0, H)
        other = max(permutations(each), key=lambda own, c=joint: c[each, own].sum())
        assert tuple(found.permutation) == other
        assert found.similarity.sum() == pytest.approx(joint[each, other].sum())
        differ += other != best
    assert differ  # else the option would make no difference


def test_lines_of_real_valued_columns_have_no_direction():
    rng, order = np.random.default_rng(1), [2, 0, 1]
    W0, H0 = rng.normal(size=(9, 3)), rng.normal(size=(3, 8))
    given = reference_from(W0, H0), Symmetries(np.arange(3), True, 3), 0.8, "w"
    found = match(-W0[:, order], -H0[order], *given)
    assert found.permutation.tolist() == [1, 2, 0]
    assert (found.factor < 0).all()
    assert_allclose(found.similarity, 1.0)
