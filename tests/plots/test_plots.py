import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor import plots
from daskfactor.errors import OptionError
from daskfactor.plots.canvas import save
from daskfactor.results.compare import intensity_shares
from daskfactor.results.components import factor_moments
from tests.fake_run import COMPONENTS, SHAPE, fake_run
from tests.refusals import refused


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
