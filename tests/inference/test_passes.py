"""Samplers on passes over all the data: addresses, shares of entries, proposals."""

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor.executors.state import make_state
from daskfactor.inference.langevin import allotment
from daskfactor.inference.multiplicative import balance
from tests.inference.test_conformance import counts

MODEL = dfac.TweedieNMF(2, dispersion=1.0)
SETTINGS = {"draws": 8, "tune": 20, "random_seed": 3, "executor": "serial", "progressbar": False}


def draw(sampler, **options):
    data = dfac.as_blocks(counts(), options.pop("blocks", None), dtype="float64")
    return dfac.sample(data, MODEL, sampler, **SETTINGS | options)


@pytest.mark.parametrize(
    "sampler",
    [
        dfac.LangevinDynamics(warm_start=3),
        dfac.HMC(0.1, steps=3, warm_start=3),
        dfac.BlockHMC(0.3, steps=2, warm_start=3),
    ],
)
def test_the_grid_changes_nothing_but_the_order_of_sums(sampler):
    """The noise has the number of the pass as its address, not that of the operation."""
    one, four = (draw(sampler, blocks=blocks, tune=3)["posterior"] for blocks in (1, 4))
    np.testing.assert_allclose(one["W"], four["W"], rtol=1e-6)
    np.testing.assert_allclose(one["H"], four["H"], rtol=1e-6)


def shares(iteration, entries=40, sizes=(30, 0, 50, 20)):
    return allotment((1, 2), iteration, entries, np.array(sizes, np.int64).tobytes())


def test_blocks_share_the_drawn_entries_as_a_multinomial_does():
    found = np.array([shares(iteration) for iteration in range(4000)])
    assert np.all(found.sum(axis=1) == 40)
    assert not found[:, 1].any()  # nothing is observed there
    p = np.array([0.3, 0.0, 0.5, 0.2])
    error = np.sqrt(40 * p * (1 - p) / 4000)
    assert np.all(np.abs(found.mean(axis=0) - 40 * p) <= 5 * error)
    np.testing.assert_allclose(found.var(axis=0), 40 * p * (1 - p), rtol=0.12)
    times = np.bincount(found[:, 0], minlength=41)
    law = stats.binom(40, 0.3).pmf(np.arange(41)) * 4000
    often = law > 10
    assert stats.chisquare(times[often], law[often] * times[often].sum() / law[often].sum())[1] > (
        1e-4
    )


def test_the_counts_that_shares_go_by_are_one_object():
    V = np.arange(30.0).reshape(5, 6)
    V[0, 0] = np.nan
    with dfac.as_blocks(V, blocks=2) as data:
        assert data.observed_key is data.observed_key
        found = np.frombuffer(data.observed_key, np.int64).reshape(2, 2)
        np.testing.assert_array_equal(found, data.n_observed)


def test_shares_are_a_function_of_their_address():
    allotment.cache_clear()
    first = shares(7).copy()
    shares(8)
    allotment.cache_clear()
    np.testing.assert_array_equal(shares(7), first)
    others = [allotment((1, 3), 7, 40, np.array([30, 0, 50, 20]).tobytes()), shares(8), shares(9)]
    assert any(np.any(other != first) for other in others)


def test_sgld_takes_as_many_iterations_as_make_up_a_pass():
    assert dfac.SGLD().work(6).moves == 6
    assert dfac.SGLD(subsample=0.3).work(6).moves == 3
    assert dfac.SGLD(subsample=0.9).work(6).moves == 1
    assert dfac.SGLD().step_for(dfac.SGLD.tracks[0], 4, 5)(0) == pytest.approx(0.2 / 4)
    stepping = dfac.SGLD(dfac.PolynomialStep(0.01, 1.0), subsample=0.25, warm_start=3)
    tree = draw(stepping, tune=2)
    iterations = 4 * np.arange(3, 11)
    np.testing.assert_allclose(tree["sample_stats"]["step_size"][0], 0.01 / iterations)


def test_a_fine_chain_takes_two_halves_of_every_coarse_step():
    fine, coarse = dfac.PSGRRLD.tracks
    sampler = dfac.PSGRRLD(dfac.PolynomialStep(0.5, 0.6))
    whole = [sampler.step_for(coarse, 3, 2)(t) for t in range(6)]
    halves = [sampler.step_for(fine, 3, 2)(t) for t in range(12)]
    assert len(set(whole)) == 6
    np.testing.assert_allclose(halves, np.repeat(whole, 2) / 2, rtol=1e-12)


def test_balanced_factors_have_equal_sums_and_the_same_product():
    rng = np.random.default_rng(4)
    W, H = rng.gamma(1.0, 5.0, (7, 3)), rng.gamma(1.0, 0.1, (6, 3))
    state = make_state(dfac.as_blocks(counts(), 3, dtype="float64").grid, W.copy(), H.copy())
    lift = 1e-3
    balance(state)
    left, right = state.gather("rows"), state.gather("cols")
    # The lift adds a thousandth of a factor's mean to each of its entries.
    left = left - lift * left.mean() / (1 + lift)
    right = right - lift * right.mean() / (1 + lift)
    np.testing.assert_allclose(left.sum(axis=0), right.sum(axis=0))
    np.testing.assert_allclose(left @ right.T, W @ H.T)


def test_hmc_repeats_a_draw_that_it_rejects():
    tree = draw(dfac.HMC(0.6, steps=3, warm_start=3), draws=60)
    rate = tree["sample_stats"]["acceptance_rate"].values[0]
    assert np.all((rate >= 0) & (rate <= 1))
    moved = [
        np.any(np.diff(tree["posterior"][name].values[0], axis=0) != 0, axis=(1, 2))
        for name in ("W", "H")
    ]
    np.testing.assert_array_equal(moved[0], moved[1])
    assert 0 < np.mean(moved[0]) < 1
    assert np.mean(moved[0]) == pytest.approx(rate[1:].mean(), abs=0.2)
    lp = tree["sample_stats"]["lp"].values[0]
    np.testing.assert_array_equal(np.diff(lp) != 0, moved[0])


def test_hmc_rejects_where_it_runs_away():
    """No roll-back and no warning: a path that diverges is a proposal like any other."""
    tree = draw(dfac.HMC(1e12, steps=3, warm_start=3))
    assert not tree["sample_stats"]["acceptance_rate"].values.any()
    W = tree["posterior"]["W"].values[0]
    shares = W / W.sum(axis=1, keepdims=True)  # the scale alone is drawn
    assert np.ptp(shares, axis=0).max() < 1e-6
    assert tree.attrs["divergences"] == 0
    assert not tree["sample_stats"]["diverging"].values.any()


def test_hmc_learns_its_step_while_tuning_and_keeps_it():
    tree = draw(dfac.HMC(steps=3, target_accept=0.7, warm_start=20), draws=150, tune=150)
    stats = tree["sample_stats"]
    steps = stats["step_size"].values[0]
    assert 1.2 < steps.max() / steps.min() <= 1.2 / 0.8  # ε times a factor from 0.8 to 1.2
    assert stats["acceptance_rate"].mean() == pytest.approx(0.7, abs=0.15)


def test_frozen_components_do_not_move():
    V, frozen = counts(), np.full((7, 1), 0.5)
    model = dfac.TweedieNMF(3, dispersion=1.0, fixed_w=frozen, shape_h=2.0)
    for sampler in (
        dfac.LangevinDynamics(warm_start=3),
        dfac.LangevinDynamics(1e-3, "identity", warm_start=3),
        dfac.SGLD(warm_start=3),
        dfac.HMC(steps=3, warm_start=3),
        dfac.BlockHMC(warm_start=3),
    ):
        tree = dfac.sample(V, model, sampler, blocks=2, **SETTINGS)
        W = tree["posterior"]["W"].values[0]
        np.testing.assert_array_equal(W[:, :, 0], np.broadcast_to(frozen.T, W[:, :, 0].shape))
        assert np.ptp(W[:, :, 1:], axis=0).min() > 0
        assert np.all(np.isfinite(tree["sample_stats"]["lp"]))
