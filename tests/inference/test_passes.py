"""Samplers on passes over all the data, and paths of rows: addresses, proposals, steps."""

import math

import numpy as np
import pytest
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor.executors.state import FactorBand, make_state
from daskfactor.inference import multiplicative
from daskfactor.inference.block_hmc import LOGARITHMS, MASS, PATH, STEPS, Path, dual_average
from daskfactor.inference.langevin import allotment
from daskfactor.inference.multiplicative import balance
from daskfactor.kernels import blockwise
from tests.inference.test_conformance import counts

MODEL = dfac.TweedieNMF(2, dispersion=1.0)
SETTINGS = {"draws": 8, "tune": 20, "random_seed": 3, "executor": "serial", "progressbar": False}


def draw(sampler, V=None, **options):
    reading = {"unstored": options.pop("unstored", None), "dtype": "float64"}
    data = dfac.as_blocks(counts() if V is None else V, options.pop("blocks", 2), **reading)
    return dfac.sample(data, MODEL, sampler, **SETTINGS | options)


@pytest.mark.parametrize(
    "sampler",
    [
        dfac.LangevinDynamics(warm_start=3),
        dfac.BlockHMC(0.3, steps=2, warm_start=3),
    ],
)
def test_the_grid_changes_nothing_but_the_order_of_sums(sampler):
    """The noise has the number of the pass as its address, not that of the operation."""
    one, four = (draw(sampler, blocks=blocks, tune=3)["posterior"] for blocks in (1, 4))
    np.testing.assert_allclose(one["W"], four["W"], rtol=1e-6)
    np.testing.assert_allclose(one["H"], four["H"], rtol=1e-6)


PRIORS = {
    "frozen": {"fixed_h": np.ones((1, counts().shape[1]))},
    "spikes": {"shape_w": 0.3, "shape_h": 0.6},
    "rates": {"rate_w": "component", "rate_h": "column", "shape_w": 2.0},
}


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("stored", [np.asarray, sparse.csr_array])
def test_a_path_in_one_call_has_the_bits_of_its_steps(stored, prior, gaps, monkeypatch):
    V = counts().astype(float)
    V[3, 4] = np.nan if gaps else 1.0
    model = dfac.TweedieNMF(3, dispersion=1.0, **PRIORS[prior])
    data = dfac.as_blocks(stored(V), 1, unstored=None if stored is np.asarray else "zero")

    def drawn():
        tree = dfac.sample(data, model, dfac.BlockHMC(warm_start=3), **SETTINGS)
        return tree["posterior"].to_dataset()

    def step_by_step(path, block, op, workspace):
        for visit in range(path.sampler.steps + 1):
            path.add_slope(block, visit, workspace)
            path.move(visit, op)

    calls, whole = [], blockwise.go_path
    monkeypatch.setattr(blockwise, "go_path", lambda *given: (calls.append(1), whole(*given)))
    one = drawn()
    assert calls
    monkeypatch.setattr(Path, "go", step_by_step)
    assert one.equals(drawn())


@pytest.mark.parametrize("case", ["complete", "gaps", "weights", "sparse"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_updates_in_one_call_have_the_bits_of_their_steps(beta, case, monkeypatch):
    V = counts().astype(float)
    V[3, 4] = np.nan if case == "gaps" else 1.0
    reading = {"weights": 1.0 + np.arange(V.size).reshape(V.shape) % 3} if case == "weights" else {}
    stored = sparse.csr_array(V) if case == "sparse" else V
    data = dfac.as_blocks(stored, 1, unstored="zero" if case == "sparse" else None, **reading)
    model, method = dfac.TweedieNMF(3, beta=beta), dfac.MultiplicativeUpdates(25, 0.0)

    def fitted():
        return dfac.optimize(data, model, method, random_seed=1, progressbar=False)

    calls, whole = [], blockwise.update_block
    monkeypatch.setattr(blockwise, "update_block", lambda *rest: (calls.append(1), whole(*rest)))
    one = fitted()
    assert len(calls) == 3  # until iterations 5, 20 and 25
    monkeypatch.setattr(multiplicative, "in_one_call", lambda *rest: False)
    other = fitted()
    assert len(calls) == 3
    assert one["W"].equals(other["W"])
    assert one["H"].equals(other["H"])


def shares(iteration, entries=40, sizes=(30, 0, 50, 20)):
    return allotment((1, 2), iteration, entries, np.array(sizes, np.int64).tobytes())


def test_blocks_share_the_drawn_entries_as_a_multinomial_does():
    found = np.array([shares(iteration) for iteration in range(4000)])
    allotment.cache_clear()
    np.testing.assert_array_equal(found[7], shares(7))
    others = [allotment((1, 3), 7, 40, np.array([30, 0, 50, 20]).tobytes()), shares(8), shares(9)]
    assert any(np.any(other != found[7]) for other in others)
    assert np.all(found.sum(axis=1) == 40)
    assert not found[:, 1].any()  # nothing is observed there
    p = np.array([0.3, 0.0, 0.5, 0.2])
    error = np.sqrt(40 * p * (1 - p) / 4000)
    assert np.all(np.abs(found.mean(axis=0) - 40 * p) <= 5 * error)
    np.testing.assert_allclose(found.var(axis=0), 40 * p * (1 - p), rtol=0.12)
    times = np.bincount(found[:, 0], minlength=41)
    law = stats.binom(40, 0.3).pmf(np.arange(41)) * 4000
    often = law > 10
    scaled = law[often] * times[often].sum() / law[often].sum()
    assert stats.chisquare(times[often], scaled)[1] > 1e-4


def test_sgld_takes_as_many_iterations_as_make_up_a_pass():
    model, data = dfac.TweedieNMF(5), dfac.as_blocks(counts(), 6)
    for options, moves in (({}, 6), ({"subsample": 0.3}, 3), ({"subsample": 0.9}, 1)):
        assert dfac.SGLD(**options).kernel(model, data).work.moves == moves
    assert dfac.SGLD().kernel(model, data).step_size(0) == pytest.approx(0.2 / 6)
    stepping = dfac.SGLD(dfac.PolynomialStep(0.01, 1.0), subsample=0.25, warm_start=3)
    tree = draw(stepping, tune=2)
    iterations = 4 * np.arange(3, 11)
    np.testing.assert_allclose(tree["sample_stats"]["step_size"][0], 0.01 / iterations)


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


def test_frozen_components_do_not_move():
    V, frozen = counts(), np.full((7, 1), 0.5)
    model = dfac.TweedieNMF(3, dispersion=1.0, fixed_w=frozen, shape_h=2.0)
    kinds = dfac.LangevinDynamics, dfac.SGLD, dfac.Gibbs, dfac.BlockHMC
    samplers = [kind(warm_start=3) for kind in kinds]
    for sampler in (*samplers, dfac.LangevinDynamics(1e-3, "identity", warm_start=3)):
        tree = dfac.sample(V, model, sampler, blocks=2, **SETTINGS)
        W = tree["posterior"]["W"].values[0]
        np.testing.assert_array_equal(W[:, :, 0], np.broadcast_to(frozen.T, W[:, :, 0].shape))
        assert np.ptp(W[:, :, 1:], axis=0).min() > 0
        assert np.all(np.isfinite(tree["sample_stats"]["lp"]))


def test_zeros_that_are_not_stored_count_as_those_that_are():
    """The kernels of beta = 2 are compared in tests/kernels/test_blocks.py."""
    V = np.random.default_rng(0).poisson(0.7, (11, 9)).astype(float)
    V[0] = V[:, 0] = 1.0
    sampler = dfac.BlockHMC(0.3, steps=2, warm_start=3)  # paths part soon
    dense = draw(sampler, V, tune=2)["posterior"]
    stored = draw(sampler, sparse.csr_array(V), tune=2, unstored="zero")["posterior"]
    np.testing.assert_allclose(dense["W"], stored["W"], rtol=1e-9)
    np.testing.assert_allclose(dense["H"], stored["H"], rtol=1e-9)


@pytest.mark.parametrize(("shape", "logarithms"), [(1.0, 0), (0.4, 0), (2.0, 0), (1.0, 1)])
def test_masses_go_with_columns_that_are_multiplied(shape, logarithms):
    """The mass of y = θ^p is in units of 1 / y²; that of log θ has no unit."""
    told = {"dispersion": 1.0, "rate_w": 1.0, "rate_h": 1.0, "shape_w": shape, "shape_h": 1.0}
    hyper = dfac.TweedieNMF(2, shape_w=shape).hyper_of_draw(told, 1.0)
    band = FactorBand(0, np.ones((3, 2)), {MASS: np.full((3, 2), 5.0)}, {LOGARITHMS: logarithms})
    dfac.BlockHMC().kernel(dfac.TweedieNMF(2)).retune(band, 0, np.array([2.0, 0.5]), hyper)
    power = shape if shape < 1 else 1.0 - logarithms
    np.testing.assert_array_equal(band.values, [[2.0, 0.5]] * 3)
    y = np.array([2.0, 0.5]) ** power
    np.testing.assert_allclose(band.arrays[MASS], [5.0 / y**2] * 3)


def test_rows_are_refused_one_by_one_and_learn_steps_of_their_own():
    tree = draw(dfac.BlockHMC(steps=3, warm_start=20), draws=200, tune=200)
    W, stats_ = tree["posterior"]["W"].values[0], tree["sample_stats"]
    still = np.all(np.diff(W, axis=0) == 0, axis=2)
    assert still.any(axis=0).sum() > 3
    assert not np.any(still.all(axis=1))
    rate = stats_["acceptance_rate"].values
    assert rate.mean() == pytest.approx(0.8, abs=0.12)
    assert 1 - still.mean() == pytest.approx(rate.mean(), abs=0.08)
    assert np.ptp(stats_["step_size"].values) == 0  # kept after tuning


def test_paths_that_run_away_go_back():
    """No roll-back and no warning: a path that diverges is a proposal like any other."""
    tree = draw(dfac.BlockHMC(1e12, warm_start=3))
    assert not tree["sample_stats"]["acceptance_rate"].values.any()
    W, H = (tree["posterior"][name].values[0] for name in "WH")
    for moved in (W / W.sum(axis=1, keepdims=True), H / H.sum(axis=2, keepdims=True)):
        assert np.ptp(moved, axis=0).max() < 1e-6, "the scale alone is drawn"
    assert tree.attrs["divergences"] == 0
    assert not tree["sample_stats"]["diverging"].values.any()


def test_nothing_of_a_path_is_left_in_a_checkpoint(tmp_path, monkeypatch):
    from daskfactor.inference.chain import TrackRun

    seen = []
    right = TrackRun.snapshot

    def watched(run, kept, chain):
        seen.append(set(run.state.factors[0][0].arrays))
        return right(run, kept, chain)

    monkeypatch.setattr(TrackRun, "snapshot", watched)
    draw(dfac.BlockHMC(warm_start=3), store=tmp_path / "run.zarr")
    assert seen
    assert all(STEPS in names and not names & set(PATH) for names in seen)


def test_a_shape_so_small_that_numbers_vanish_is_drawn_from_exactly():
    """Given H = 1 a row with count v is Gamma(a + v, 2); a third of those with v = 0 is lost."""
    rows, shape = 3000, 0.01
    V = (np.arange(rows) % 2).astype(np.float32)[:, None] * np.ones((1, 1))
    model = dfac.TweedieNMF(
        1, dispersion=1.0, shape_w=shape, rate_w=1.0, rate_h=1.0, fixed_h=np.ones((1, 1))
    )
    data = dfac.as_blocks(V, 1, allow_empty=True)
    tree = dfac.sample(data, model, dfac.BlockHMC(), **SETTINGS | {"tune": 100, "draws": 40})
    W = tree["posterior"]["W"].values[0, -1, :, 0].astype(float)
    smallest = float(np.finfo(np.float32).tiny)
    none, one = W[::2], W[1::2]
    lost = stats.gamma.cdf(smallest, shape, scale=0.5)
    assert 0.3 < lost < 0.5
    assert np.mean(none <= smallest) == pytest.approx(lost, abs=5 * (0.25 / len(none)) ** 0.5)
    kept = stats.gamma.cdf(none[none > smallest], shape, scale=0.5)
    assert stats.kstest((kept - lost) / (1 - lost), "uniform").pvalue > 1e-3
    assert stats.kstest(stats.gamma.cdf(one, 1 + shape, scale=0.5), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("target", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("first", [1e-3, 1.0, 50.0])
def test_averaging_finds_the_step(target, first):
    """Where acceptance is exp(-ε) on average, with noise."""
    rng = np.random.default_rng(0)
    start = math.log(first)
    log_step, average, error = start, start, 0.0
    for count in range(1, 2001):
        mean = math.exp(-math.exp(log_step))
        excess = target - (mean + rng.normal(0, 0.1))
        log_step, average, error = dual_average(start, average, error, count, excess)
    assert math.exp(-math.exp(average)) == pytest.approx(target, abs=0.03)
