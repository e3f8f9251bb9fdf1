import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, M, particle_factors, particle_store, particle_tree
from tests.results.test_weights import modes


def test_means_and_spreads_are_those_of_the_masses():
    W, H = particle_factors()
    objective = np.array([3.0, 70.0, 4.0, 8.0, 0.5, 5.0])
    found = dfac.summarize(particle_tree(objective=objective), cells=40)
    expected = {
        "lp": -100.0 + np.cos(2.0 * np.arange(M)),
        "objective": objective,
        "mu_mean": (W @ H).mean(axis=(1, 2)),
        "mu_norm": np.linalg.norm(W @ H, axis=(1, 2)),
        "mu[2,4]": (W @ H)[:, 2, 4],
        "h_sum": H.sum(axis=(1, 2)),
    }
    for name, values in expected.items():
        one = found.sel(functional=name)
        mean = WEIGHTS @ values
        parts = WEIGHTS * (values - mean) ** 2
        assert float(one["mean"]) == pytest.approx(mean)
        assert float(one["sd"]) == pytest.approx(np.sqrt(parts.sum()))
        assert float(one["one_particle"]) == pytest.approx(parts.max() / parts.sum())
    assert {"rhat", "ess_bulk"}.isdisjoint(found.data_vars)
    attrs = found.attrs
    assert (attrs["particles"], attrs["with_weight"], attrs["heaviest"]) == (6, 4, 2)
    assert attrs["effective"] == pytest.approx(1 / (WEIGHTS**2).sum())
    assert (attrs["discrepancy"], attrs["discrepancy_equal"]) == (0.5, 0.75)
    assert (attrs["objective_min"], attrs["objective_max"]) == (0.5, 70.0)
    # Of no mass, but above the threshold of 9.
    assert "1 of the particles, with 0% of the mass, have an objective above" in found.verdict


def test_draws_without_weight_and_halves_change_nothing():
    W, H, _ = modes()
    w = np.r_[0.0, np.arange(1.0, 12.0)]
    w /= w.sum()
    lp = np.sin(np.arange(12.0))
    doubled = np.r_[np.arange(12), 5]
    half = w[doubled] * np.where(doubled == 5, 0.5, 1.0)
    W[0], H[0] = W[0, ::-1], 100.0
    found = dfac.summarize(particle_tree(W, H, w, lp=lp))
    less = dfac.summarize(particle_tree(W[1:], H[1:], w[1:], lp=lp[1:], objective=5 + lp[1:]))
    more = dfac.summarize(particle_tree(W[doubled], H[doubled], half, lp=lp[doubled]))
    for name in ("mean", "sd"):
        ours = found[name].drop_sel(functional="objective")
        for other in (less, more):
            theirs = other[name].drop_sel(functional="objective")
            xr.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert found.attrs["with_weight"] == less.attrs["with_weight"] == 11
    assert found.attrs["alike"] == pytest.approx(1.0)


def test_one_mode_is_told_from_several():
    W, H, orders = modes()
    w = np.full(12, 1.0 / 12)
    one = dfac.summarize(particle_tree(W, H, w))
    assert one.attrs["alike"] == pytest.approx(1.0)
    assert "One mode" in one.verdict
    assert [one.predictions.status, one.components.status] == ["amber", "green"]
    assert "12 particles carry weight, worth 12.0 of equal weight:" in one.verdict
    sizes = one["mean"].where(one["kind"] == "aligned", drop=True)
    assert sizes.sizes["functional"] == 3
    assert_allclose(one["share"].sel(functional="aligned[1]"), 1.0)
    # Six particles of another mode: one component lies elsewhere.
    other = W.copy()
    for m in range(6):
        moved = int(np.flatnonzero(orders[m] == 0)[0])
        other[m][:, moved] = np.roll(W[m][:, moved], 2)
    two = dfac.summarize(particle_tree(other, H, w))
    assert two.attrs["alike"] == pytest.approx(0.5)
    assert "Several modes" in two.verdict
    assert two.components.status == "red"
    assert "Read no means of W and H" in two.components.advice
    # The other mode without mass is no mode.
    some = np.where(np.arange(12) < 6, 0.0, 1.0 / 6)
    assert dfac.summarize(particle_tree(other, H, some)).attrs["alike"] == pytest.approx(1.0)


def test_aligned_sizes_are_those_of_an_aligned_trace():
    W, H, _ = modes()
    w = np.arange(12.0) / 66
    tree = particle_tree(W, H, w)
    aligned = dfac.align(tree)
    found, again = dfac.summarize(tree), dfac.summarize(aligned)
    sizes = aligned["posterior/W"].sum("gene") * aligned["posterior/H"].sum("day") / (12 * 9)
    mean = sizes.values[0].T @ w
    for summary in (found, again):
        ours = summary["mean"].where(summary["kind"] == "aligned", drop=True)
        assert_allclose(ours, mean)


def test_a_particle_that_carries_everything_is_named():
    weights = np.array([0.01, 0.0, 0.0, 0.97, 0.02, 0.0])
    found = dfac.summarize(particle_tree(weights=weights))
    assert found.predictions.status == "red"
    assert "Particle 3 carries 97% of the mass" in found.verdict
    alone = dfac.summarize(particle_tree(weights=np.eye(M)[4]))
    assert "Particle 4 carries 100%" in alone.verdict
    assert (alone["sd"] == 0).all()
    assert alone.components.status == "none"
    assert "4 particles carry weight, worth 2.8" in dfac.summarize(particle_tree()).verdict


def test_the_print_tells_it_all():
    text = str(dfac.summarize(particle_tree()))
    lines = text.split("\n")
    assert lines[0] == "6 particles, 4 with weight, worth 2.8 of equal weight"
    assert lines[1] == "Stein discrepancy 0.5, under equal weights 0.75"
    assert lines[2].startswith("objective 4.463 to 5.65, threshold 9")
    titles = ("log density, objective", "W H", "size of W", "components, aligned")
    assert all(any(line.startswith(title) for line in lines) for title in titles)
    assert "predictions  RED    4 particles carry weight, worth 2.8" in text
    assert "R-hat" not in text
    table = dfac.summarize(particle_tree(silf=False))
    assert "objective" not in str(table).split("\n")[2]
    assert "mean" in table.to_dataframe()
    assert "<xarray" in repr(table[["mean"]])


def test_particles_without_weights_yet_count_alike(tmp_path):
    tree = particle_store(tmp_path / "run.zarr", done=4)
    found = dfac.summarize(tree)
    assert "4 particles are there, not weighted yet" in found.predictions.reasons[0]
    assert str(found).startswith("4 particles\nobjective")
    values = np.linalg.norm(np.matmul(*(part[:4] for part in particle_factors())), axis=(1, 2))
    assert float(found["mean"].sel(functional="mu_norm")) == pytest.approx(values.mean())
    refused(OptionError, "no draws yet", dfac.summarize, tree.isel(draw=slice(0)))


def test_one_component_has_no_order():
    W, H = particle_factors()
    W1 = W[..., :1]
    found = dfac.summarize(particle_tree(W1, H[:, :1], WEIGHTS))
    assert set(found["kind"].values) == {"density", "product", "scale", "component"}
    assert found.components.status == "none"
