"""Figures of particles: by weight, aligned, one dot a particle."""

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import OptionError
from daskfactor.results.components import components_of, factor_moments
from tests.fake_run import fake_run
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, particle_store, particle_tree


def dots(ax):
    """Places and areas of the dots and the crosses of an axes."""
    found = [one for one in ax.collections if isinstance(one, PathCollection)]
    return [(one.get_offsets().data, one.get_sizes()) for one in found]


def test_trace_plot_shows_particles_by_weight():
    tree = particle_tree()
    left, right = plots.trace_plot(tree).axes
    (places, areas), (crosses, _) = dots(left)
    heavy = np.flatnonzero(WEIGHTS)
    assert places[:, 0].tolist() == heavy.tolist()
    assert_array_equal(places[:, 1], tree["sample_stats/objective"].values[0, heavy])
    assert_allclose(areas / areas.max(), WEIGHTS[heavy] / WEIGHTS.max())
    assert crosses[:, 0].tolist() == np.flatnonzero(WEIGHTS == 0).tolist()
    assert left.get_ylabel() == "objective"
    assert [line.get_ydata()[0] for line in left.lines] == [9.0]
    assert left.get_xlabel() == right.get_xlabel() == "particle"
    (places, _), (crosses, _) = dots(right)
    assert_array_equal(places[:, 1], tree["sample_stats/lp"].values[0, heavy])
    assert not len(crosses)


def test_trace_plot_without_an_objective_shows_densities_twice():
    left, _ = plots.trace_plot(particle_tree(silf=False)).axes
    assert left.get_ylabel() == "log density"
    assert not left.lines
    assert len(dots(left)[0][0]) == 4


def test_particles_without_weights_are_shown_alike(tmp_path):
    tree = particle_store(tmp_path / "run.zarr", done=4)
    left, right = plots.trace_plot(tree).axes
    (places, areas), _ = dots(left)
    assert len(places) == 4
    assert len(set(areas.tolist())) == 1
    assert "not known before" in right.texts[0].get_text()
    assert len(plots.overview(tree).axes) == 2 + 3 * 3


@pytest.mark.parametrize("chain", [0, None])
def test_components_of_particles_are_aligned_and_weighted(chain):
    tree = particle_tree()
    aligned = dfac.align(tree)
    W = aligned["posterior/W"].values[0]
    mean = np.einsum("m,mik->ki", WEIGHTS, W)
    sd = np.sqrt(np.einsum("m,mik->ki", WEIGHTS, (W - mean.T) ** 2))
    found = factor_moments(aligned, "W", chain)
    assert_allclose(found[0], mean)
    assert_allclose(found[1], sd)
    shown = components_of(tree, chain)
    order = shown.labels
    assert_allclose(shown.W.mean, mean[order] / mean[order].mean(axis=1)[:, None])
    assert order == list(range(len(order)))
    assert_allclose(shown.present, aligned["alignment/share"].values[order])
    assert len(plots.components(tree, chain=chain).axes) == 3 * 3
    assert len(plots.overview(tree, count=2).axes) == 2 + 3 * 2


def test_moments_of_unaligned_particles_are_weighted():
    tree = particle_tree()
    mean, sd = factor_moments(tree, "H", 0)
    H = tree["posterior/H"].values[0]
    assert_allclose(mean, np.einsum("m,mkj->kj", WEIGHTS, H))
    assert_allclose(sd**2, np.einsum("m,mkj->kj", WEIGHTS, (H - mean) ** 2))


def test_equal_weights_give_the_plain_moments():
    tree = fake_run().filter(lambda node: node.name != "posterior_moments")
    plain = factor_moments(tree, "W", 0)
    weights = np.full((2, 20), 1 / 40)
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights)
    assert_array_equal(factor_moments(tree, "W", 0), plain)
    W = tree["posterior/W"].isel(chain=0).transpose("draw", "component", ...).values
    assert_allclose(plain, [W.mean(0), W.std(0)], rtol=1e-5)
    weights[0, 10:] = 0
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights / weights.sum())
    found = factor_moments(tree, "W", 0)
    assert_allclose(found, [W[:10].mean(0), W[:10].std(0)], rtol=1e-5)


def test_chains_are_pooled_by_their_mass():
    tree = fake_run()
    stats = tree["sample_stats"].to_dataset()
    weights = np.random.default_rng(0).random((2, 20))
    weights[1] *= 0.1
    weights /= weights.sum()
    tree["sample_stats/weight"] = stats["lp"].copy(data=weights)
    aligned = dfac.align(tree)
    mean, sd = factor_moments(aligned, "W", None)
    W = aligned["posterior/W"].transpose("chain", "draw", "component", "row").values
    expected = np.einsum("cd,cdki->ki", weights, W)
    assert_allclose(mean, expected)
    assert_allclose(sd**2, np.einsum("cd,cdki->ki", weights, (W - expected) ** 2))
    tree["sample_stats/weight"].values[0] = 0.0
    bare = tree.filter(lambda node: node.name != "posterior_moments")
    refused(OptionError, "no draw of chain 0 has any weight", factor_moments, bare, "W", 0)
