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
from daskfactor.results import predictive_moments
from daskfactor.results.predict import monitored
from daskfactor.results.predictive_moments import weighted_quantiles
from daskfactor.runs.trace import Run, effective_number
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, M, particle_factors, particle_store, particle_tree
from tests.results.runs import CHAINS, DRAWS, make_spec, memory_tree
from tests.tiers import FULL

SOME = settings(max_examples=12 if FULL else 6, deadline=None)
mass = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))
masses = st.lists(mass, min_size=2, max_size=9).filter(lambda found: sum(found) > 0)


def problem(found, seed=0):
    """Factors and masses of as many particles as there are masses."""
    W, H = particle_factors(len(found), seed)
    return W, H, np.array(found) / sum(found)


def naive(mu, w, levels):
    """Weighted moments and quantiles by the plainest loops; mu (M, ...)."""
    mean = sum(one * mass for one, mass in zip(mu, w, strict=True))
    variance = sum(mass * (one - mean) ** 2 for one, mass in zip(mu, w, strict=True))
    width, ends = sum(mass**2 for mass in w), np.empty((len(levels), *mean.shape))
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


def is_naive(predicted, mu, w, rtol=1e-7, of_mean=1e-9):
    """Predictions with intervals of 0.8 are those of plain loops."""
    mean, variance, ends = naive(mu, w, (0.1, 0.9))
    assert_allclose(predicted["mean"], mean, rtol=of_mean)
    assert_allclose(predicted["sd"] ** 2, variance, rtol=rtol, atol=1e-12)
    for name, values in zip(("lower", "upper"), ends, strict=True):
        assert_allclose(predicted[name], values, rtol=rtol)


@SOME
@given(found=masses, seed=st.integers(0, 99))
def test_predictions_are_those_of_plain_loops(found, seed):
    W, H, w = problem(found, seed)
    is_naive(dfac.predict(particle_tree(W, H, w), interval=0.8).load(), W @ H, w)


@SOME
@given(count=st.integers(1, 9), silf=st.booleans(), seed=st.integers(0, 99))
def test_equal_weights_are_as_good_as_none_to_the_last_bit(count, silf, seed):
    W, H = particle_factors(count, seed, silf)
    tree = particle_tree(W, H, np.full(count, 1.0 / count), silf=silf, lp=np.arange(count))
    plain = tree.copy()
    plain["sample_stats"] = xr.DataTree(tree["sample_stats"].to_dataset().drop_vars("weight"))
    for of in ("mean", None):
        one, other = (dfac.predict(own, of=of).load() for own in (tree, plain))
        xr.testing.assert_identical(one, other)
    for chain in (None, 0):
        one, other = (dfac.expectation(own, lambda W, H: W @ H, chain) for own in (tree, plain))
        assert_array_equal(one, other)
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
    points = [xr.DataArray(at, dims="p") for at in (["g0", "g6"], [1, 3])]
    for cells in ((), points):
        one, other = (dfac.predict(own, *cells).load() for own in (tree, rest))
        xr.testing.assert_allclose(one, other, 1e-10)
    for function in (lambda W, H: W.sum(0), lambda W, H: (W @ H)[0, 0]):
        one, other = (dfac.expectation(own, function) for own in (tree, rest))
        assert_allclose(one, other, 1e-12)


@SOME
@given(found=masses, seed=st.integers(0, 99), order=st.permutations(range(9)))
def test_order_of_alignment_does_not_know_draws_of_weight_zero(found, seed, order):
    W, H, w = problem(found, seed)
    kept, lp = np.flatnonzero(w), np.array(order[: len(w)], dtype=float)
    tree = dfac.align(particle_tree(W, H, w, lp=lp))
    rest = dfac.align(particle_tree(W[kept], H[kept], w[kept] / w.sum(), lp=lp[kept]))
    for group, names in {
        "posterior_moments": ("W_mean", "H_mean", "W_var", "H_var", "count"),
        "alignment": ("share", "share_by_chain"),
    }.items():
        for name in names:
            assert_allclose(tree[group][name], rest[group][name], rtol=1e-9, atol=1e-15)
    permutation = tree["alignment/permutation"].values[:, kept]
    assert_array_equal(permutation, rest["alignment/permutation"])


@SOME
@given(found=masses, which=st.integers(0, 8), seed=st.integers(0, 99))
def test_a_particle_in_two_halves_is_the_particle(found, which, seed):
    W, H, w = problem(found, seed)
    which %= len(w)
    doubled = np.r_[np.arange(len(w)), which]
    half = w[doubled] * np.where(doubled == which, 0.5, 1.0)
    trees = particle_tree(W, H, w), particle_tree(W[doubled], H[doubled], half)
    before, after = (dfac.predict(tree).load() for tree in trees)
    assert_allclose(after["mean"], before["mean"], rtol=1e-10)
    assert_allclose(after["sd"], before["sd"], rtol=1e-7, atol=1e-9)
    one, other = (dfac.expectation(tree, lambda W, H: W * H.sum()) for tree in trees)
    assert_allclose(other, one, rtol=1e-10)
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


def test_quantiles_follow_the_levels_and_the_inverse_distribution_in_slabs_too(monkeypatch):
    rng, levels = np.random.default_rng(0), (0.0, 0.05, 0.5, 0.95, 1.0)
    values, weights = rng.normal(size=4000), rng.gamma(1.0, size=4000)
    found, order = weighted_quantiles(values[:, None], weights, levels)[:, 0], np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    assert_allclose(found[1:-1], values[order][np.searchsorted(reached, levels[1:-1])], atol=0.02)
    assert (np.diff(found) > 0).all()
    rng = np.random.default_rng(1)
    values, weights = rng.random((5, 4, 7)), rng.random(5)
    whole = weighted_quantiles(values, weights, (0.1, 0.7))
    monkeypatch.setattr(predictive_moments, "_SLAB", 11)
    assert_array_equal(weighted_quantiles(values, weights, (0.1, 0.7)), whole)
    assert weighted_quantiles(values[:, :0], weights, (0.5,)).shape == (1, 0, 7)


@pytest.mark.parametrize("block", [100, 64 * 2**20])
def test_a_store_of_particles_is_predicted_like_the_tree(tmp_path, block, monkeypatch):
    stored, kept = particle_store(tmp_path / "run.zarr"), particle_tree()
    expected = dfac.predict(kept).load()
    monkeypatch.setattr(predictive_moments, "BLOCK_BYTES", block)
    found = dfac.predict(stored)
    assert found["upper"].chunks
    xr.testing.assert_allclose(found.load(), expected)
    assert dfac.predict(stored, rows=[]).load().sizes["gene"] == 0
    of_path = dfac.expectation(str(tmp_path / "run.zarr"), lambda W, H: W @ H)
    assert_array_equal(of_path, dfac.expectation(kept, lambda W, H: W @ H))


def guarded(tree, weights):
    """The same with draws that cannot be read where they have no weight, one draw a chunk."""

    def read(block, block_info=None):
        assert not block_info or weights[block_info[0]["chunk-location"][1]], "without weight"
        return block

    out, factors = tree.copy(), tree["posterior"].to_dataset()
    for name in "WH":
        values = da.from_array(factors[name].values, chunks=(1, 1, -1, -1))
        lazy = values.map_blocks(read, dtype=values.dtype, meta=np.empty((0,) * 4))
        factors[name] = factors[name].copy(data=lazy)
    out["posterior"] = xr.DataTree(factors)
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
    monkeypatch.setattr(predictive_moments, "BLOCK_BYTES", block)
    tree, weights = chains
    W, H = (tree["posterior"][name].values.astype("f8") for name in "WH")
    mu = (W @ H).reshape(-1, W.shape[2], H.shape[3])
    for trace in (tree, tree.chunk({"draw": 3})):
        predicted = dfac.predict(trace, interval=0.8, of="mean").load()
        is_naive(predicted, mu, weights.ravel(), 2e-4, 1e-5)
    own, found = weights[1] / weights[1].sum(), dfac.expectation(tree, lambda W, H: W @ H, 1)
    assert_allclose(found, np.tensordot(own, mu[DRAWS:], 1), rtol=1e-5)
    # Other labels' order, and a part of the draws.
    turned = tree.isel(draw=slice(None, None, -1)).isel(chain=[1])
    assert_allclose(Run(turned).weights, own[None, ::-1])


def test_a_chain_without_weight_has_no_expectation(chains):
    tree, _ = chains
    tree["sample_stats/weight"].values[0] = 0.0
    assert np.isfinite(dfac.expectation(tree, lambda W, H: H)).all()
    match = "no draw of chain 0 has (a positive|any) weight"
    refused(OptionError, match, dfac.expectation, tree, lambda W, H: H, 0)
    aligned = dfac.align(tree)
    assert aligned["posterior_moments/count"].values.tolist() == [0, 9]
    assert np.isnan(aligned["alignment/share_by_chain"].values[0]).all()
    assert np.isfinite(dfac.align(tree, aligned)["alignment/share"]).all()


def test_weights_are_masses_of_the_draws_that_are_there():
    tree = particle_tree()
    assert Run(tree).is_particles
    assert_allclose(Run(tree).weights, [WEIGHTS])
    assert_allclose(Run(tree.isel(draw=[2, 3])).weights, [[2 / 3, 1 / 3]])
    assert effective_number(np.full((2, 5), 0.1)) == pytest.approx(10.0)
    assert effective_number([1.0, 0.0]) == 1.0
    plain = memory_tree(make_spec())
    assert Run(plain).weights is None
    assert not Run(plain).is_particles
    refused(OptionError, "have weight 0", lambda: Run(tree.isel(draw=[1, 4])).weights)


@pytest.mark.parametrize("bad", [-1.0, np.nan])
def test_weights_that_are_none_are_refused(bad):
    tree = particle_tree(weights=WEIGHTS)
    stats = tree["sample_stats"].to_dataset()
    wrong = stats["weight"].copy(data=[[bad, *WEIGHTS[1:]]])
    tree["sample_stats"] = xr.DataTree(stats.assign(weight=wrong))
    refused(StoreFormatError, "finite and at least 0", dfac.predict, tree)
    tree["sample_stats"] = xr.DataTree(stats.assign_coords(draw=np.arange(M) + 50))
    refused(StoreFormatError, "different labels", dfac.predict, tree)


def test_a_silf_model_has_no_law_of_observations():
    silf, tweedie = particle_tree(), particle_tree(silf=False)
    assert dfac.predict(silf).attrs["of"] == "mean"
    assert dfac.predict(tweedie).attrs["of"] == "observation"
    refused(OptionError, "SILFNMF does not have", dfac.predict, silf, of="observation")
    assert monitored(memory_tree(make_spec())).attrs["of"] == "observation"
