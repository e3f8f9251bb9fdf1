import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import OptionError
from daskfactor.plots.canvas import save
from daskfactor.plots.factors import factor_moments
from daskfactor.results.compare import intensity_shares
from tests.fake_run import COMPONENTS, SHAPE, fake_run


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
    np.testing.assert_array_equal(axes[1, 2].images[0].get_array().mask, np.isnan(erased[2]))


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
    np.testing.assert_array_equal(whole.lines[0].get_ydata(), lp[0])
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
    np.testing.assert_allclose(streamed, draws)


def test_a_run_without_draws_has_no_components():
    tree = fake_run().filter(lambda node: node.name == "posterior").isel(draw=slice(0))
    with pytest.raises(OptionError, match="no draws yet"):
        plots.overview(tree)


def test_shares_add_up_and_follow_the_product():
    shares = intensity_shares(np.array([[1.0, 2.0], [1.0, 4.0]]), np.array([[3.0], [1.0]]), False)
    np.testing.assert_allclose(shares, [0.5, 0.5])
    np.testing.assert_allclose(intensity_shares(np.zeros((2, 4)), np.zeros((4, 3)), False), 0.25)


def test_components_puts_the_strongest_first_and_draws_pictures():
    tree = fake_run()
    figure = plots.components(tree, image_shape=(4, 3), count=2)
    w, h = (factor_moments(tree, name, 0)[0] for name in "WH")
    strongest = int(np.argmax(intensity_shares(w.T, h, False)))
    left = figure.axes[0]
    np.testing.assert_allclose(left.images[0].get_array(), w[strongest].reshape(4, 3))
    assert left.get_ylabel().startswith(f"{strongest}\n")


def test_components_of_all_chains_take_an_aligned_trace():
    tree = fake_run()
    with pytest.raises(OptionError, match="what align"):
        plots.components(tree, chain=None)
    aligned = dfac.align(tree)
    mean, sd = factor_moments(aligned, "W", None)
    draws = (
        aligned["posterior/W"]
        .transpose("component", "row", ...)
        .values.reshape(COMPONENTS, SHAPE[0], -1)
    )
    np.testing.assert_allclose(mean, draws.mean(axis=-1))
    np.testing.assert_allclose(sd, draws.std(axis=-1))
    labels = [ax.get_ylabel() for ax in plots.components(aligned, chain=None).axes[::2]]
    shares = aligned["alignment/share"].values
    assert {text.split("in ")[1] for text in labels} == {f"{share:.0%}" for share in shares}


def test_components_refuses_a_shape_that_does_not_fit():
    with pytest.raises(OptionError, match="20 pixels, the factor W has 12 rows"):
        plots.components(fake_run(), image_shape=(4, 5))


@pytest.mark.parametrize("keep", ["draws", "moments"])
def test_overview_is_written_as_a_picture(tmp_path, keep):
    path = tmp_path / "run.png"
    save(plots.overview(fake_run(keep=keep), count=9, title="run"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_suffix_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(OptionError, match="no suffix of a picture"):
        save(plots.trace_plot(fake_run()), tmp_path / "run.doc")
    assert not list(tmp_path.iterdir())


def renamed(tree, names):
    def rename(group):
        return group.rename({old: new for old, new in names.items() if old in group.dims})

    return tree.map_over_datasets(rename)


def test_components_are_told_by_the_names_of_the_data():
    figure = plots.components(renamed(fake_run(), {"column": "sample"}))
    left, right = figure.axes[-2:]
    assert [figure.axes[0].get_title("left"), figure.axes[1].get_title("left")] == [
        "W, by row",
        "H, by sample",
    ]
    assert (left.get_xlabel(), right.get_xlabel()) == ("row", "sample")
    figure.draw_without_rendering()
    told = [tick.get_text() for tick in left.get_xticklabels()]
    assert told == [f"r{row}" for row in range(SHAPE[0])]


def test_of_many_entries_some_have_their_labels_below():
    rng = np.random.default_rng(0)
    V = xr.DataArray(
        rng.poisson(3.0, (120, 9)),
        dims=("time", "sensor"),
        coords={"time": np.arange("2026-01-01", "2026-05-01", dtype="datetime64[D]")},
    )
    trace = dfac.sample(V, dfac.TweedieNMF(2), draws=3, tune=3, random_seed=0, progressbar=False)
    figure = plots.components(trace)
    left, right = figure.axes[-2:]
    figure.draw_without_rendering()
    told = [tick.get_text() for tick in left.get_xticklabels() if tick.get_text()]
    assert 2 <= len(told) <= 12
    assert told[0] == "2026-01-01"
    assert [tick.get_text() for tick in right.get_xticklabels()][1] in {"0", "1", "2"}


def test_the_legend_covers_no_trace():
    figure = plots.trace_plot(fake_run(chains=2))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["chain 0", "diverging", "chain 1"]
    box = legend.get_window_extent()
    assert not any(ax.get_window_extent().overlaps(box) for ax in figure.axes)
    assert all(ax.get_legend() is None for ax in figure.axes)
