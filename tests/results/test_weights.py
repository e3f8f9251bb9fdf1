"""Weights wherever draws are averaged: equal ones as if none, zero as if absent, halves as one."""

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results import cellwise as cells_module
from daskfactor.results.align import Law, _best_draw, match, reference_from
from daskfactor.results.cellwise import weighted_quantiles
from daskfactor.results.predict import monitored
from daskfactor.results.trace import draw_weights, effective_number, is_particles
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, M, particle_factors, particle_store, particle_tree
from tests.results.runs import CHAINS, DRAWS, make_spec, memory_tree

SOME = settings(max_examples=12, deadline=None)
masses = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=2, max_size=9).filter(
    lambda found: sum(found) > 0
)


def normalised(found):
    return np.array(found) / sum(found)


def problem(found, seed=0):
    """Factors and masses of as many particles as there are masses."""
    W, H = particle_factors(len(found), seed)
    return W, H, normalised(found)


def naive(mu, w, levels):
    """Weighted moments and quantiles by the plainest loops; mu (M, ...)."""
    mean = sum(one * mass for one, mass in zip(mu, w, strict=True))
    variance = sum(mass * (one - mean) ** 2 for one, mass in zip(mu, w, strict=True))
    width = sum(mass**2 for mass in w)
    ends = np.empty((len(levels), *mean.shape))
    for place in np.ndindex(mean.shape):
        pairs = sorted(zip((one[place] for one in mu), w, strict=True))
        for number, level in enumerate(levels):
            low = level * (1 - width)
            high, below, total = low + width, 0.0, 0.0
            for value, mass in pairs:
                total += value * max(0.0, min(below + mass, high) - max(below, low))
                below += mass
            ends[number][place] = total / width
    return mean, variance, ends


@SOME
@given(found=masses, seed=st.integers(0, 99))
def test_predictions_are_those_of_plain_loops(found, seed):
    W, H, w = problem(found, seed)
    predicted = dfac.predict(particle_tree(W, H, w), interval=0.8).load()
    mean, variance, ends = naive(W @ H, w, (0.1, 0.9))
    assert_allclose(predicted["mean"], mean, rtol=1e-9)
    assert_allclose(predicted["sd"] ** 2, variance, rtol=1e-7, atol=1e-12)
    assert_allclose(predicted["lower"], ends[0], rtol=1e-7)
    assert_allclose(predicted["upper"], ends[1], rtol=1e-7)


@SOME
@given(count=st.integers(1, 9), silf=st.booleans(), seed=st.integers(0, 99))
def test_equal_weights_are_as_good_as_none_to_the_last_bit(count, silf, seed):
    W, H = particle_factors(count, seed, silf)
    tree = particle_tree(W, H, np.full(count, 1.0 / count), silf=silf, lp=np.arange(count))
    plain = tree.copy()
    plain["sample_stats"] = xr.DataTree(tree["sample_stats"].to_dataset().drop_vars("weight"))
    for of in ("mean", None):
        xr.testing.assert_identical(
            dfac.predict(tree, of=of).load(), dfac.predict(plain, of=of).load()
        )
    for chain in (None, 0):
        expected = dfac.expectation(plain, lambda W, H: W @ H, chain)
        assert_array_equal(dfac.expectation(tree, lambda W, H: W @ H, chain), expected)
    aligned, expected = dfac.align(tree), dfac.align(plain)
    for group in ("posterior", "posterior_moments", "alignment"):
        xr.testing.assert_identical(aligned[group].to_dataset(), expected[group].to_dataset())


@SOME
@given(found=masses, seed=st.integers(0, 99))
def test_a_draw_of_weight_zero_is_as_good_as_absent(found, seed):
    W, H, w = problem(found, seed)
    W[w == 0], H[w == 0] = np.nan, np.nan
    kept = w > 0
    tree, rest = particle_tree(W, H, w), particle_tree(W[kept], H[kept], w[kept] / w.sum())
    xr.testing.assert_allclose(dfac.predict(tree).load(), dfac.predict(rest).load(), 1e-10)
    points = [xr.DataArray(at, dims="p") for at in (["g0", "g6"], [1, 3])]
    xr.testing.assert_allclose(
        dfac.predict(tree, *points).load(), dfac.predict(rest, *points).load(), 1e-10
    )
    for function in (lambda W, H: W.sum(0), lambda W, H: (W @ H)[0, 0]):
        assert_allclose(dfac.expectation(tree, function), dfac.expectation(rest, function), 1e-12)


@SOME
@given(found=masses, seed=st.integers(0, 99), order=st.permutations(range(9)))
def test_order_of_alignment_does_not_know_draws_of_weight_zero(found, seed, order):
    W, H, w = problem(found, seed)
    kept = np.flatnonzero(w)
    lp = np.array(order[: len(w)], dtype=float)
    tree = dfac.align(particle_tree(W, H, w, lp=lp))
    rest = dfac.align(particle_tree(W[kept], H[kept], w[kept] / w.sum(), lp=lp[kept]))
    for name in ("W_mean", "H_mean", "W_var", "H_var", "count"):
        assert_allclose(
            tree["posterior_moments"][name], rest["posterior_moments"][name], rtol=1e-9, atol=1e-15
        )
    for name in ("share", "share_by_chain"):
        assert_allclose(tree["alignment"][name], rest["alignment"][name])
    assert_array_equal(tree["alignment/permutation"].values[:, kept], rest["alignment/permutation"])


@SOME
@given(found=masses, which=st.integers(0, 8), seed=st.integers(0, 99))
def test_a_particle_in_two_halves_is_the_particle(found, which, seed):
    W, H, w = problem(found, seed)
    which %= len(w)
    doubled = np.r_[np.arange(len(w)), which]
    half = w[doubled] * np.where(doubled == which, 0.5, 1.0)
    tree, split = particle_tree(W, H, w), particle_tree(W[doubled], H[doubled], half)
    before, after = dfac.predict(tree).load(), dfac.predict(split).load()
    assert_allclose(after["mean"], before["mean"], rtol=1e-10)
    assert_allclose(after["sd"], before["sd"], rtol=1e-7, atol=1e-9)
    assert_allclose(
        dfac.expectation(split, lambda W, H: W * H.sum()),
        dfac.expectation(tree, lambda W, H: W * H.sum()),
        rtol=1e-10,
    )
    # The window of a quantile is narrower, and lies within that of before.
    mu, width = W @ H, np.sum(w**2)
    for name, level in (("lower", 0.05), ("upper", 0.95)):
        low = level * (1 - width)
        ends = [inverse(mu, w, at) for at in (low + 1e-12, low + width - 1e-12)]
        assert (after[name] >= ends[0] - 1e-9).all()
        assert (after[name] <= ends[1] + 1e-9).all()


def inverse(mu, w, at):
    """Smallest value at which the cumulated weight reaches a level, cell by cell."""
    order = np.argsort(mu, axis=0)
    reached = np.cumsum(w[order], axis=0) >= at
    first = np.where(reached.any(0), reached.argmax(0), len(w) - 1)[None]
    return np.take_along_axis(np.take_along_axis(mu, order, 0), first, 0)[0]


@given(values=st.lists(st.floats(-9, 9), min_size=1, max_size=30), level=st.floats(0.0, 1.0))
def test_quantiles_of_equal_weights_are_the_usual_ones(values, level):
    found = weighted_quantiles(np.array(values), np.full(len(values), 0.3), (level,))
    assert_allclose(found[0], np.quantile(values, level), rtol=1e-9, atol=1e-9)


@given(values=st.lists(st.integers(-9, 9), min_size=2, max_size=9), level=st.floats(0.0, 1.0))
def test_a_tiny_weight_hardly_matters_however_far_off(values, level):
    values, weights = np.array(values, dtype=float), np.arange(1.0, 1 + len(values))
    before = weighted_quantiles(values, weights, (level,))
    after = weighted_quantiles(np.r_[values, 1e3], np.r_[weights, 1e-9], (level,))
    assert_allclose(after, before, atol=1e-5)


def test_quantiles_follow_the_levels_and_the_inverse_distribution():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=4000), rng.gamma(1.0, size=4000)
    levels = (0.0, 0.05, 0.5, 0.95, 1.0)
    found = weighted_quantiles(values[:, None], weights, levels)[:, 0]
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    expected = [values[order][np.searchsorted(reached, level)] for level in levels[1:-1]]
    assert_allclose(found[1:-1], expected, atol=0.02)
    assert (np.diff(found) > 0).all()


def test_slabs_change_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    values, weights = rng.random((5, 4, 7)), rng.random(5)
    whole = weighted_quantiles(values, weights, (0.1, 0.7))
    monkeypatch.setattr(cells_module, "_SLAB", 11)
    assert_array_equal(weighted_quantiles(values, weights, (0.1, 0.7)), whole)
    assert weighted_quantiles(values[:, :0], weights, (0.5,)).shape == (1, 0, 7)


@pytest.mark.parametrize("block", [100, 64 * 2**20])
def test_a_store_of_particles_is_predicted_like_the_tree(tmp_path, block, monkeypatch):
    stored = particle_store(tmp_path / "run.zarr")
    expected = dfac.predict(particle_tree()).load()
    monkeypatch.setattr(cells_module, "BLOCK_BYTES", block)
    found = dfac.predict(stored)
    assert found["upper"].chunks
    xr.testing.assert_allclose(found.load(), expected)
    assert dfac.predict(stored, rows=[]).load().sizes["gene"] == 0
    path = str(tmp_path / "run.zarr")
    assert_array_equal(
        dfac.expectation(path, lambda W, H: W @ H),
        dfac.expectation(particle_tree(), lambda W, H: W @ H),
    )


def guarded(tree, weights):
    """The same with draws that cannot be read where they have no weight, one draw a chunk."""

    def read(block, block_info=None):
        if block_info and weights[block_info[0]["chunk-location"][1]] == 0:
            raise AssertionError("a draw without weight was read")
        return block

    out = tree.copy()
    factors = tree["posterior"].to_dataset()
    lazy = {
        name: factors[name].copy(
            data=da.from_array(factors[name].values, chunks=(1, 1, -1, -1)).map_blocks(
                read, dtype=factors[name].dtype, meta=np.empty((0,) * 4)
            )
        )
        for name in ("W", "H")
    }
    out["posterior"] = xr.DataTree(factors.assign(lazy))
    return out


def test_draws_without_weight_are_not_read():
    tree = guarded(particle_tree(), WEIGHTS)
    refused(AssertionError, "without weight", tree["posterior/W"].load)
    xr.testing.assert_allclose(dfac.predict(tree).load(), dfac.predict(particle_tree()).load())
    found = dfac.expectation(tree, lambda W, H: H)
    assert_allclose(found, np.einsum("m,mkj->kj", WEIGHTS, particle_factors()[1]))


@pytest.fixture
def chains():
    """Two chains whose draws have weights, unlike numbers of them none."""
    tree = memory_tree(make_spec(has_coarse=False))
    weights = np.random.default_rng(2).random((CHAINS, DRAWS))
    weights[0, [1, 4]], weights[1, 7] = 0.0, 0.0
    weights /= weights.sum()
    stats = tree["sample_stats"].to_dataset()
    tree["sample_stats"] = xr.DataTree(stats.assign(weight=(("chain", "draw"), weights)))
    return tree, weights


@pytest.mark.parametrize("block", [100, 64 * 2**20])
def test_chains_with_weights_are_one_set_of_draws(chains, block, monkeypatch):
    monkeypatch.setattr(cells_module, "BLOCK_BYTES", block)
    tree, weights = chains
    W, H = (tree["posterior"][name].values.astype("f8") for name in "WH")
    mu = (W @ H).reshape(-1, W.shape[2], H.shape[3])
    mean, variance, ends = naive(mu, weights.ravel(), (0.1, 0.9))
    for trace in (tree, tree.chunk({"draw": 3})):
        found = dfac.predict(trace, interval=0.8, of="mean").load()
        assert_allclose(found["mean"], mean, rtol=1e-5)
        assert_allclose(found["sd"], np.sqrt(variance), rtol=1e-4)
        assert_allclose(found["lower"], ends[0], rtol=1e-4)
        assert_allclose(found["upper"], ends[1], rtol=1e-4)
    own = weights[1] / weights[1].sum()
    assert_allclose(
        dfac.expectation(tree, lambda W, H: W @ H, 1), np.tensordot(own, mu[DRAWS:], 1), rtol=1e-5
    )
    # Other labels' order, and a part of the draws.
    turned = tree.isel(draw=slice(None, None, -1)).isel(chain=[1])
    assert_allclose(draw_weights(turned), own[None, ::-1])


def test_a_chain_without_weight_has_no_expectation(chains):
    tree, _ = chains
    tree["sample_stats/weight"].values[0] = 0.0
    assert np.isfinite(dfac.expectation(tree, lambda W, H: H)).all()
    with pytest.raises(OptionError, match="no draw of chain 0 has any weight"):
        dfac.expectation(tree, lambda W, H: H, 0)
    aligned = dfac.align(tree)
    assert aligned["posterior_moments/count"].values.tolist() == [0, 9]
    assert np.isnan(aligned["alignment/share_by_chain"].values[0]).all()
    again = dfac.align(tree, aligned)
    assert np.isfinite(again["alignment/share"]).all()


def test_weights_are_masses_of_the_draws_that_are_there():
    tree = particle_tree()
    assert is_particles(tree)
    assert_allclose(draw_weights(tree), [WEIGHTS])
    assert_allclose(draw_weights(tree.isel(draw=[2, 3])), [[2 / 3, 1 / 3]])
    assert effective_number(np.full((2, 5), 0.1)) == pytest.approx(10.0)
    assert effective_number([1.0, 0.0]) == 1.0
    plain = memory_tree(make_spec())
    assert draw_weights(plain) is None
    assert not is_particles(plain)
    refused(OptionError, "all 0", draw_weights, tree.isel(draw=[1, 4]))


@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_weights_that_are_none_are_refused(bad):
    tree = particle_tree(weights=WEIGHTS)
    stats = tree["sample_stats"].to_dataset()
    wrong = stats["weight"].copy(data=[[bad, *WEIGHTS[1:]]])
    tree["sample_stats"] = xr.DataTree(stats.assign(weight=wrong))
    refused(StoreFormatError, "finite and at least 0", dfac.predict, tree)
    moved = stats.assign_coords(draw=np.arange(M) + 50)
    tree["sample_stats"] = xr.DataTree(moved)
    refused(StoreFormatError, "different labels", dfac.predict, tree)


def test_a_silf_model_has_no_law_of_observations():
    silf, tweedie = particle_tree(), particle_tree(silf=False)
    assert dfac.predict(silf).attrs["of"] == "mean"
    assert dfac.predict(tweedie).attrs["of"] == "observation"
    refused(OptionError, "SILFNMF has none", dfac.predict, silf, of="observation")
    assert monitored(memory_tree(make_spec())).attrs["of"] == "observation"


def modes(seed=0, count=12, noise=0.02, silf=True):
    """Particles of one mode, their components in any order."""
    rng = np.random.default_rng(seed)
    base_w, base_h = np.eye(3).repeat(4, axis=0) + 0.05, np.eye(3).repeat(3, axis=1) + 0.05
    W = base_w * np.exp(noise * rng.normal(size=(count, 12, 3)))
    H = base_h * np.exp(noise * rng.normal(size=(count, 3, 9)))
    orders = np.array([rng.permutation(3) for _ in range(count)])
    W = np.take_along_axis(W, orders[:, None], axis=2)
    H = np.take_along_axis(H, orders[:, :, None], axis=1)
    if silf:
        total = W.sum(axis=1)
        W, H = W / total[:, None], H * total[:, :, None]
    return W, H, orders


@pytest.mark.parametrize("by", ["both", "w"])
def test_columns_on_the_simplex_stay_there(by):
    W, H, orders = modes()
    w = normalised(np.random.default_rng(3).random(12))
    aligned = dfac.align(particle_tree(W, H, w), by=by)
    found = aligned["posterior"].to_dataset()
    assert_allclose(found["W"].sum("gene"), 1.0, rtol=1e-12)
    assert (aligned["alignment/factor"].values == 1.0).all()
    assert_allclose(found["W"].values[0] @ found["H"].values[0], W @ H)
    back = np.take_along_axis(orders, aligned["alignment/permutation"].values[0], axis=1)
    assert (back == back[0]).all()
    assert_allclose(aligned["alignment/share"], 1.0)
    moments = aligned["posterior_moments"].to_dataset()
    ours = found["H"].values[0]
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
    found = aligned["posterior"].to_dataset()
    cosine = 1.0
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
    light, heavy = unlike[0], unlike[1]
    w = np.full(12, 0.05)
    w[[0, heavy]] = 0.25
    lp = np.zeros(12)
    lp[light], lp[0], lp[heavy] = 99.0, 50.0, 40.0
    assert _best_draw(particle_tree(W, H, w, lp=lp), w[None]) == (0, 0)


def test_shares_are_of_the_mass():
    W, H, _ = modes(count=4)
    # One component of the last is another.
    W[3, :, 0] = np.where(np.arange(12) % 2, 0.15, 0.01)
    aligned = dfac.align(particle_tree(W, H, [0.3, 0.3, 0.3, 0.1]))["alignment"]
    assert sorted(aligned["share"].values.round(6)) == [0.9, 1.0, 1.0]
    assert_allclose(aligned["share_by_chain"][0], aligned["share"])


def test_the_angle_between_columns_of_w_is_the_papers_cost():
    rng = np.random.default_rng(0)
    law = Law(np.arange(4), False, 4, True)
    differ = 0
    for _ in range(40):
        W, H, W0, H0 = (rng.gamma(0.5, size=s) + 1e-3 for s in ((9, 4), (4, 8)) * 2)
        found = match(W, H, reference_from(W0, H0), law, 0.8, "w").permutation
        cosine = W0.T @ W / np.outer(np.linalg.norm(W0, axis=0), np.linalg.norm(W, axis=0))
        angle = np.arccos(cosine)
        every = np.array(np.meshgrid(*[range(4)] * 4)).reshape(4, -1).T
        every = [order for order in every if len(set(order.tolist())) == 4]
        best = min(every, key=lambda order: angle[np.arange(4), order].sum())
        assert found.tolist() == best.tolist()
        differ += (
            match(W, H, reference_from(W0, H0), law, 0.8).permutation.tolist() != best.tolist()
        )
        again = match(W, H[::-1], reference_from(W0, H0), law, 0.8, "w")
        assert again.permutation.tolist() == best.tolist()
        each = np.arange(4)
        assert_allclose(again.similarity, cosine[each, best])
        assert_array_equal(again.matched, cosine[each, best] >= 0.8)
    assert differ  # else the option would make no difference


def test_lines_of_real_valued_columns_have_no_direction():
    rng = np.random.default_rng(1)
    W0, H0 = rng.normal(size=(9, 3)), rng.normal(size=(3, 8))
    found = match(
        -W0[:, [2, 0, 1]],
        -H0[[2, 0, 1]],
        reference_from(W0, H0),
        Law(np.arange(3), True, 3),
        0.8,
        "w",
    )
    assert found.permutation.tolist() == [1, 2, 0]
    assert (found.factor < 0).all()
    assert_allclose(found.similarity, 1.0)


def test_another_way_to_compare_is_refused():
    refused(OptionError, 'by must be "both" or "w"', dfac.align, particle_tree(), by="h")
