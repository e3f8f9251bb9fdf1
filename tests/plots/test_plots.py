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
from tests.fake_run import COMPONENTS, SHAPE, fake_run
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, particle_store, particle_tree


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


def test_faces_panel_survives_a_sd_that_is_nowhere_known():
    original = pictures()
    assert isinstance(plots.faces_panel(original, original, original, original * np.nan), Figure)


def test_faces_panel_names_the_stack_that_differs():
    original = pictures()
    with pytest.raises(OptionError, match=r"restored \(2, 4, 5\)"):
        plots.faces_panel(original, original, original[:2], original)
    with pytest.raises(OptionError, match="stack of images"):
        plots.faces_panel(original[0], original, original, original)


def test_trace_plot_draws_every_chain_in_both_panels_and_marks_divergences():
    tree = fake_run(chains=2, draws=20, warmup=5)
    whole, zoom = plots.trace_plot(tree).axes
    lp = tree["sample_stats/lp"].values
    assert_array_equal(whole.lines[0].get_ydata(), lp[0])
    assert len(whole.lines) == 4
    assert whole.lines[2].get_xdata()[-1] == tree.attrs["tune"]
    (mark,) = [line for line in zoom.lines if line.get_marker() == "|"]
    assert list(mark.get_xdata()) == [tree["sample_stats/draw"].values[3]]


def test_trace_plot_cuts_no_draw_off_but_the_first_looks_at_the_fit():
    tree = fake_run(chains=1, draws=100, warmup=5)
    tree["sample_stats/lp"][0, 50] -= 1000.0
    tree["warmup_sample_stats/lp"][0, 0] -= 1e6
    bottom, _ = plots.trace_plot(tree).axes[0].get_ylim()
    lowest = float(tree["sample_stats/lp"].min())
    assert lowest - 1000 < bottom < lowest


def test_trace_plot_without_warmup():
    tree = fake_run().filter(lambda node: "warmup" not in node.name if node.name else True)
    assert len(plots.trace_plot(tree).axes) == 2


def test_trace_plot_says_what_it_needs():
    with pytest.raises(OptionError, match="no group 'sample_stats'"):
        plots.trace_plot(fake_run().filter(lambda node: node.name == "posterior"))


def test_moments_come_from_draws_where_none_were_streamed():
    tree = fake_run()
    streamed = factor_moments(tree, "H", 1)
    draws = factor_moments(tree.filter(lambda node: node.name == "posterior"), "H", 1)
    assert streamed[0].shape == (COMPONENTS, SHAPE[1])
    assert_allclose(streamed, draws)


def test_a_run_without_draws_has_no_components():
    tree = fake_run().filter(lambda node: node.name == "posterior").isel(draw=slice(0))
    refused(OptionError, "no draws yet", plots.overview, tree)


def test_shares_add_up_and_follow_the_product():
    shares = intensity_shares(np.array([[1.0, 2.0], [1.0, 4.0]]), np.array([[3.0], [1.0]]), False)
    assert_allclose(shares, [0.5, 0.5])
    assert_allclose(intensity_shares(np.zeros((2, 4)), np.zeros((4, 3)), False), 0.25)


@pytest.mark.parametrize("keep", ["draws", "moments"])
def test_overview_is_written_as_a_picture(tmp_path, keep):
    path = tmp_path / "run.png"
    save(plots.overview(fake_run(keep=keep), count=9, title="run"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_suffix_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(OptionError, match="no suffix of a picture"):
        save(plots.trace_plot(fake_run()), tmp_path / "run.doc")
    assert not list(tmp_path.iterdir())


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


def table(scored=True):
    names = ["log_evidence", "standard_error", "discretization_error"]
    if scored:
        names += ["held_out_log_score", "held_out_difference_error"]
    columns = {name: ("rank", np.array([-3.0, -1.0, -2.0])) for name in names}
    attrs = {"best": 2, "not_distinguishable": [3], "best_held_out": 2}
    return abs(xr.Dataset(columns, coords={"rank": [1, 2, 3]})).assign_attrs(attrs)


def test_two_panels_or_one_and_a_file(tmp_path):
    figure = plots.plot_ranks(table(), tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["evidence", "cells left out"]
    assert len(plots.plot_ranks(table(scored=False)).axes) == 1


def test_it_wants_a_table_of_ranks():
    refused(OptionError, "select_rank", plots.plot_ranks, xr.Dataset())
