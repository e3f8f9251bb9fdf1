import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import OptionError
from daskfactor.plots.canvas import save
from daskfactor.results.compare import intensity_shares
from daskfactor.results.components import components_of, factor_moments
from tests.fake_run import fake_run
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, particle_store, particle_tree

BARE = fake_run().filter(lambda node: node.name == "posterior")


def pictures(count=3, height=4, width=5):
    return np.random.default_rng(0).random((count, height, width)) * 255


def test_faces_panel_shares_one_gray_scale_and_gives_sd_its_own():
    original = pictures()
    erased = np.where(original > 100, np.nan, original)
    figure = plots.faces_panel(original, erased, original, original / 50, labels=list("abc"))
    axes = np.array(figure.axes[:12]).reshape(4, 3)
    limits = {ax.images[0].get_clim() for ax in axes[:3].ravel()}
    assert limits == {(0.0, original.max())}
    assert axes[3, 0].images[0].get_clim()[1] < original.max() / 40
    assert [ax.get_title() for ax in axes[0]] == ["a", "b", "c"]
    assert_array_equal(axes[1, 2].images[0].get_array().mask, np.isnan(erased[2]))
    nowhere = plots.faces_panel(original, original, original, original * np.nan)
    assert isinstance(nowhere, Figure)


def without(tree, *names):
    return tree.filter(lambda node: node.name not in names)


def test_what_figures_refuse():
    for call, match in (
        (lambda a: plots.faces_panel(a, a, a[:2], a), r"restored \(2, 4, 5\)"),
        (lambda a: plots.faces_panel(a[0], a, a, a), "stack of images"),
        (
            lambda _: plots.trace_plot(without(fake_run(), "sample_stats")),
            "no group 'sample_stats'",
        ),
        (lambda _: plots.overview(BARE.isel(draw=slice(0))), "no draws yet"),
        (lambda _: save(plots.trace_plot(fake_run()), "run.doc"), "no suffix of a picture"),
        (lambda _: plots.plot_ranks(xr.Dataset()), "select_rank"),
    ):
        refused(OptionError, match, call, pictures())


def test_trace_plot_draws_every_chain_in_both_panels_and_marks_divergences():
    tree = fake_run(chains=2, draws=20, warmup=5)
    whole, zoom = plots.trace_plot(tree).axes
    lp = tree["sample_stats/lp"].values
    assert_array_equal(whole.lines[0].get_ydata(), lp[0])
    assert (len(whole.lines), whole.lines[2].get_xdata()[-1]) == (4, tree.attrs["tune"])
    (mark,) = [line for line in zoom.lines if line.get_marker() == "|"]
    assert list(mark.get_xdata()) == [tree["sample_stats/draw"].values[3]]


def test_trace_plot_cuts_no_draw_off_but_the_first_looks_at_the_fit():
    tree = fake_run(chains=1, draws=100, warmup=5)
    tree["sample_stats/lp"][0, 50] -= 1000.0
    tree["warmup_sample_stats/lp"][0, 0] -= 1e6
    bottom, _ = plots.trace_plot(tree).axes[0].get_ylim()
    lowest = float(tree["sample_stats/lp"].min())
    assert lowest - 1000 < bottom < lowest
    assert len(plots.trace_plot(without(fake_run(), "warmup_sample_stats")).axes) == 2


def test_shares_add_up_and_follow_the_product():
    shares = intensity_shares(np.array([[1.0, 2.0], [1.0, 4.0]]), np.array([[3.0], [1.0]]), False)
    assert_allclose(shares, [0.5, 0.5])
    assert_allclose(intensity_shares(np.zeros((2, 4)), np.zeros((4, 3)), False), 0.25)


@pytest.mark.parametrize("keep", ["draws", "moments"])
def test_overview_is_written_as_a_picture(tmp_path, keep):
    path = tmp_path / "run.png"
    save(plots.overview(fake_run(keep=keep), count=9, title="run"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_legend_covers_no_trace():
    figure = plots.trace_plot(fake_run(chains=2))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["chain 0", "diverging", "chain 1"]
    box = legend.get_window_extent()
    assert not any(ax.get_window_extent().overlaps(box) for ax in figure.axes)
    assert all(ax.get_legend() is None for ax in figure.axes)


def dots(ax):
    """Places and areas of the dots and the crosses of an axes."""
    found = [one for one in ax.collections if isinstance(one, PathCollection)]
    return [(one.get_offsets().data, one.get_sizes()) for one in found]


def test_trace_plot_shows_particles_by_weight():
    tree, heavy = particle_tree(), np.flatnonzero(WEIGHTS)
    left, right = plots.trace_plot(tree).axes
    (places, areas), (crosses, _) = dots(left)
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
    left, _ = plots.trace_plot(particle_tree(silf=False)).axes  # without an objective
    assert left.get_ylabel() == "log density"
    assert not left.lines
    assert len(dots(left)[0][0]) == 4


def test_particles_without_weights_are_shown_alike(tmp_path):
    tree = particle_store(tmp_path / "run.zarr", done=4)
    left, right = plots.trace_plot(tree).axes
    (places, areas), _ = dots(left)
    assert (len(places), len(set(areas.tolist()))) == (4, 1)
    assert "not known before" in right.texts[0].get_text()
    assert len(plots.overview(tree).axes) == 2 + 3 * 3


def weighted(weights, draws):
    """Mean and spread over the first axis."""
    mean = np.tensordot(weights, draws, 1)
    return mean, np.sqrt(np.tensordot(weights, (draws - mean) ** 2, 1))


@pytest.mark.parametrize("chain", [0, None])
def test_components_of_particles_are_aligned_and_weighted(chain):
    tree = particle_tree()
    aligned = dfac.align(tree)
    mean, sd = weighted(WEIGHTS, aligned["posterior/W"].values[0].swapaxes(1, 2))
    assert_allclose(factor_moments(aligned, "W", chain), [mean, sd])
    shown = components_of(tree, chain)
    order = shown.labels
    assert_allclose(shown.W.mean, mean[order] / mean[order].mean(axis=1)[:, None])
    assert order == list(range(len(order)))
    assert_allclose(shown.present, aligned["alignment/share"].values[order])
    assert len(plots.components(tree, chain=chain).axes) == 3 * 3
    assert len(plots.overview(tree, count=2).axes) == 2 + 3 * 2
    unaligned = weighted(WEIGHTS, tree["posterior/H"].values[0])
    assert_allclose(factor_moments(tree, "H", 0), unaligned)


def test_equal_weights_give_the_plain_moments():
    tree = without(fake_run(), "posterior_moments")
    assert_allclose(factor_moments(fake_run(), "H", 1), factor_moments(tree, "H", 1))  # streamed
    plain, weights = factor_moments(tree, "W", 0), np.full((2, 20), 1 / 40)
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights)
    assert_array_equal(factor_moments(tree, "W", 0), plain)
    W = tree["posterior/W"].isel(chain=0).transpose("draw", "component", ...).values
    assert_allclose(plain, [W.mean(0), W.std(0)], rtol=1e-5)
    weights[0, 10:] = 0
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights / weights.sum())
    assert_allclose(factor_moments(tree, "W", 0), [W[:10].mean(0), W[:10].std(0)], rtol=1e-5)


def test_chains_are_pooled_by_their_mass():
    tree, weights = fake_run(), np.random.default_rng(0).random((2, 20))
    weights[1] *= 0.1
    weights /= weights.sum()
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights)
    aligned = dfac.align(tree)
    W = aligned["posterior/W"].transpose("chain", "draw", "component", "row").values
    expected = weighted(weights.ravel(), W.reshape(-1, *W.shape[2:]))
    assert_allclose(factor_moments(aligned, "W", None), expected)
    tree["sample_stats/weight"].values[0] = 0.0
    bare, match = without(tree, "posterior_moments"), "no draw of chain 0 has any weight"
    refused(OptionError, match, factor_moments, bare, "W", 0)


def table(scored=True):
    names = ["log_evidence", "standard_error", "discretization_error"]
    names += ["held_out_log_score", "held_out_difference_error"] if scored else []
    columns = {name: ("rank", np.array([-3.0, -1.0, -2.0])) for name in names}
    attrs = {"best": 2, "not_distinguishable": [3], "best_held_out": 2}
    return abs(xr.Dataset(columns, coords={"rank": [1, 2, 3]})).assign_attrs(attrs)


def test_two_panels_or_one_and_a_file(tmp_path):
    figure = plots.plot_ranks(table(), tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["evidence", "cells left out"]
    assert len(plots.plot_ranks(table(scored=False)).axes) == 1
