"""`BlockHMC` through `sample`: what its rows learn, sparse data, small shapes, runaway paths."""

import numpy as np
import pytest
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor.executors.state import FactorBand
from daskfactor.inference.block_hmc import LOGARITHMS, MASS, PATH, STEPS
from tests.inference.test_conformance import counts

SETTINGS = {"draws": 8, "tune": 20, "random_seed": 3, "executor": "serial", "progressbar": False}


def draw(V, sampler, model=None, **options):
    reading = {"unstored": options.pop("unstored", None), "dtype": options.pop("dtype", "float64")}
    data = dfac.as_blocks(V, options.pop("blocks", 2), **reading)
    model = model or dfac.TweedieNMF(2, dispersion=1.0)
    return dfac.sample(data, model, sampler, **SETTINGS | options)


def test_zeros_that_are_not_stored_count_as_those_that_are():
    """The kernels of beta = 2 are compared in tests/kernels/test_blocks.py."""
    V = np.random.default_rng(0).poisson(0.7, (11, 9)).astype(float)
    V[0] = V[:, 0] = 1.0
    model = dfac.TweedieNMF(2, dispersion=1.0)
    sampler = dfac.BlockHMC(0.3, steps=2, warm_start=3)  # paths part soon
    dense = draw(V, sampler, model, tune=2)["posterior"]
    stored = draw(sparse.csr_array(V), sampler, model, tune=2, unstored="zero")["posterior"]
    np.testing.assert_allclose(dense["W"], stored["W"], rtol=1e-9)
    np.testing.assert_allclose(dense["H"], stored["H"], rtol=1e-9)


@pytest.mark.parametrize(("shape", "logarithms"), [(1.0, 0), (0.4, 0), (2.0, 0), (1.0, 1)])
def test_masses_go_with_columns_that_are_multiplied(shape, logarithms):
    """The mass of y = θ^p is in units of 1 / y²; that of log θ has no unit."""
    told = {"dispersion": 1.0, "rate_w": 1.0, "rate_h": 1.0, "shape_w": shape, "shape_h": 1.0}
    hyper = dfac.TweedieNMF(2, shape_w=shape).hyper_told(told, 1.0)
    band = FactorBand(0, np.ones((3, 2)), {MASS: np.full((3, 2), 5.0)}, {LOGARITHMS: logarithms})
    dfac.BlockHMC().resize(band, 0, np.array([2.0, 0.5]), hyper)
    power = shape if shape < 1 else 1.0 - logarithms
    np.testing.assert_array_equal(band.values, [[2.0, 0.5]] * 3)
    y = np.array([2.0, 0.5]) ** power
    np.testing.assert_allclose(band.arrays[MASS], [5.0 / y**2] * 3)


def test_rows_are_refused_one_by_one_and_learn_steps_of_their_own():
    tree = draw(counts(), dfac.BlockHMC(steps=3, warm_start=20), draws=200, tune=200)
    W, stats_ = tree["posterior"]["W"].values[0], tree["sample_stats"]
    still = np.all(np.diff(W, axis=0) == 0, axis=2)
    assert still.any(axis=0).sum() > 3
    assert not np.any(still.all(axis=1))
    rate = stats_["acceptance_rate"].values
    assert rate.mean() == pytest.approx(0.8, abs=0.12)
    assert 1 - still.mean() == pytest.approx(rate.mean(), abs=0.08)
    assert np.ptp(stats_["step_size"].values) == 0  # kept after tuning


def test_paths_that_run_away_go_back():
    tree = draw(counts(), dfac.BlockHMC(1e12, warm_start=3))
    assert not tree["sample_stats"]["acceptance_rate"].values.any()
    W, H = (tree["posterior"][name].values[0] for name in "WH")
    for moved in (W / W.sum(axis=1, keepdims=True), H / H.sum(axis=2, keepdims=True)):
        assert np.ptp(moved, axis=0).max() < 1e-6, "the scale alone is drawn"
    assert tree.attrs["divergences"] == 0


def test_nothing_of_a_path_is_left_in_a_checkpoint(tmp_path, monkeypatch):
    from daskfactor.inference.chain import TrackRun

    seen = []
    right = TrackRun.snapshot

    def watched(run, kept, chain):
        seen.append(set(run.state.factors[0][0].arrays))
        return right(run, kept, chain)

    monkeypatch.setattr(TrackRun, "snapshot", watched)
    draw(counts(), dfac.BlockHMC(warm_start=3), store=tmp_path / "run.zarr")
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
