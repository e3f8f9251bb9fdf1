"""Figures of components: what each dimension is shown as, names, units, no overlap."""

import inspect
import itertools

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import DataWarning, OptionError
from daskfactor.plots.axis_kinds import factor_axis
from daskfactor.plots.canvas import save, short_label
from daskfactor.results.components import components_of
from tests.fake_run import COMPONENTS, SHAPE, fake_run
from tests.refusals import refused
from tests.results.particle_tree import particle_tree
from tests.tiers import tiered

WAVES = xr.Variable("column", np.linspace(400.0, 2500.0, SHAPE[1]), {"units": "nm"})
DATES = xr.Variable("row", np.arange("2026-01-01", "2026-01-13", dtype="datetime64[D]"))
NUMBERS = np.arange(SHAPE[0])
MAP = {
    "lon": ("row", 10.5 + NUMBERS % 3, {"units": "degrees_east"}),
    "lat": ("row", 50.5 - NUMBERS // 3, {"units": "degrees_north"}),
}
PIXELS = {"pixel_row": ("row", NUMBERS // 3), "pixel_column": ("row", NUMBERS % 3)}


def labelled(coords, drop=(), **options):
    """A run with coordinates of its own."""

    def dim_of(one):
        return (one.dims if isinstance(one, xr.Variable) else one[:1])[0]

    def change(group):
        fits = {name: one for name, one in coords.items() if dim_of(one) in group.dims}
        return group.drop_vars(drop, errors="ignore").assign_coords(fits)

    return fake_run(**options).map_over_datasets(change)


def point(rows, labels=None, smooth=False):
    W = np.random.default_rng(0).gamma(1.0, size=(rows, 2))
    W, H = np.cumsum(W, axis=0) if smooth else W, np.ones((2, 4)) + np.eye(2, 4)
    coords = {} if labels is None else {"gene": labels}
    return xr.Dataset({"W": (("gene", "component"), W), "H": (("component", "day"), H)}, coords)


def kinds(tree, **options):
    found = components_of(tree)
    return factor_axis(found.W, **options).kind, factor_axis(found.H, **options).kind


def test_labels_say_how_a_dimension_is_shown():
    for coords, drop, expected in (
        ({}, (), ("bars", "bars")),
        ({"column": WAVES, "row": DATES}, (), ("time", "curve")),
        (MAP, ["row"], ("map", "bars")),
        (PIXELS, ["row"], ("picture", "bars")),
        (MAP | {"row": DATES}, (), ("time", "bars")),
        ({"row": ("row", NUMBERS + 0.25)}, (), ("curve", "bars")),
        ({"row": ("row", np.roll(NUMBERS + 0.25, 1))}, (), ("bars", "bars")),
    ):
        tree = labelled(coords, drop)
        assert (kinds(tree), len(plots.components(tree).axes)) == (expected, 3 * COMPONENTS)


def test_many_entries_are_a_list_unless_neighbours_are_alike():
    for data, expected in (
        (point(200), "names"),
        (point(200, smooth=True), "curve"),
        (point(200, np.arange(200) * 7), "names"),
        (point(200, [f"g{i}" for i in range(200)], smooth=True), "names"),
        (point(20), "bars"),
    ):
        assert kinds(data) == (expected, "bars")
        assert isinstance(plots.components(data), Figure)


def test_a_kind_can_be_asked_for():
    assert kinds(point(200), show={"gene": "curve"}) == ("curve", "bars")
    assert kinds(fake_run(), image_shape=(4, 3)) == ("picture", "bars")
    assert kinds(fake_run(), image_shape=(7, 1)) == ("bars", "picture")
    for show, match in (
        ({"gene": "pie"}, "one of picture, map, time"),
        ({"gene": "map"}, "gene cannot be drawn as map"),
        ({"genes": "names"}, r"show must have the keys 'gene' or .*, got \['genes'\]"),
    ):
        refused(OptionError, match, plots.components, point(20), show=show)
    match = r"as W has rows \(12\) or H has columns \(7\), got .* with 20 pixels"
    refused(OptionError, match, plots.components, fake_run(), (4, 5))


def test_a_map_has_north_at_the_top_and_its_names_beside_it():
    tree = labelled(MAP, ["row"])
    found = components_of(tree)
    grid, values = factor_axis(found.W).grid, found.W.mean[0]
    assert grid.names == ("lat [degrees_north]", "lon [degrees_east]")
    at = np.argwhere(grid.picture(values) == values[0])[0]
    assert (grid.coordinates[0][at[0]], grid.coordinates[1][at[1]]) == (50.5, 10.5)
    axes = plots.maps(tree).axes
    assert set(grid.names) <= {ax.get_ylabel() for ax in axes} | {ax.get_xlabel() for ax in axes}
    assert axes[0].get_ylim()[0] < axes[0].get_ylim()[1]
    some = labelled(MAP, ["row"]).isel(row=[0, 1, 3, 4, 5, 8, 11])  # others stay empty
    assert np.isnan(factor_axis(components_of(some).W).grid.picture(np.ones(7))).sum() == 5


def test_stacked_dimensions_are_maps():
    coords = {"lat": [60.0, 50.0, 40.0], "lon": [1.0, 2.0, 3.0, 4.0]}
    values = np.random.default_rng(0).poisson(3.0, (20, 3, 4)).astype(float)
    V = xr.DataArray(values, coords, ("time", "lat", "lon"))
    V[:, 1, 2] = np.nan
    options = {"rows": "time", "draws": 4, "tune": 4, "progressbar": False, "random_seed": 0}
    with pytest.warns(DataWarning, match="1 of 12 places"):
        trace = dfac.sample(V, dfac.TweedieNMF(2), **options)
    H = components_of(trace).H
    side = factor_axis(H)
    assert (side.kind, side.names[0]) == ("map", "lat 60, lon 1")
    assert np.argwhere(np.isnan(side.grid.picture(H.mean[0]))).tolist() == [[1, 2]]
    assert len([ax for ax in plots.maps(trace).axes if ax.collections]) == 4
    assert "lat 60, lon 1" in dfac.report(trace).html


def test_components_name_what_they_show():
    tree = labelled({"column": WAVES, "row": DATES})
    tree.attrs["data"] = '{"shape": [12, 7], "long_name": "radiance", "units": "W"}'
    figure = plots.components(tree, count=2)
    _, left, right, text, below, last = figure.axes
    assert left.get_title("left") == "W: relative to its mean"
    assert right.get_title("left") == "H: radiance [W] added"
    assert (below.get_xlabel(), last.get_xlabel()) == ("row", "column [nm]")
    assert text.texts[0].get_text().startswith("component 1\n")
    figure.draw_without_rendering()
    assert "2026" in below.xaxis.get_offset_text().get_text()


def test_bands_are_there_where_draws_are():
    for given, bands in ((labelled({"column": WAVES}), 1), (point(200, smooth=True), 0)):
        assert len(plots.curves(given).axes[0].collections) == bands


def test_the_largest_entries_come_first_with_their_names():
    data = point(300, [f"gene number {i}" for i in range(300)])
    figure, found = plots.top_entries(data, entries=4), components_of(data)
    best, ax = np.argsort(-found.W.mean[0])[:4], figure.axes[0]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [f"gene number {i}" for i in best]
    assert [bar.get_width() for bar in ax.patches] == found.W.mean[0][best].tolist()
    assert "by gene; no interval" in figure.get_suptitle()
    other = plots.top_entries(data, "H").axes[0]
    assert other.get_yticklabels()[0].get_text().startswith("day ")


def overlapping(figure):
    """Pairs of texts of a figure that cover each other."""
    figure.draw_without_rendering()
    renderer, texts = FigureCanvasAgg(figure).get_renderer(), []
    for ax in figure.axes:
        texts += [ax._left_title, ax.xaxis.label, *ax.texts]
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            low, high = sorted(axis.get_view_interval())
            shown = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [tick.label1 for tick in shown]
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    boxes = [(one.get_text(), one.get_window_extent(renderer).shrunk(0.8, 0.8)) for one in shown]
    pairs = itertools.combinations(boxes, 2)
    return [(a, b) for (a, box), (b, beside) in pairs if a != b and box.overlaps(beside)]


@pytest.mark.parametrize("count", [2, 9])
def test_long_labels_touch_nothing(count):
    names = [f"a label that is very much too long for any figure, number {i}" for i in range(300)]
    assert overlapping(plots.top_entries(point(300, names), count=count)) == []
    assert overlapping(plots.components(point(300, names), count=count)) == []
    assert overlapping(plots.components(point(25, names[:25]), count=count)) == []
    one, other = (short_label(f"Long station name no. {i}", 16) for i in range(2))
    assert one != other
    assert len(one) <= 16
    assert short_label("$5 and $6") == r"\$5 and \$6"


def test_shares_have_a_bar_for_a_component_and_a_dot_for_a_chain():
    left, right = plots.shares(fake_run()).axes
    found = components_of(fake_run())
    assert [bar.get_width() for bar in left.patches] == (100 * found.weight).tolist()
    assert (len(right.lines), len(plots.shares(point(20)).axes)) == (2, 1)


@pytest.mark.parametrize("name", sorted(plots.FIGURES))
@pytest.mark.parametrize("look", tiered(["default", "dark_background"], "default".__eq__))
def test_every_figure_has_the_ground_of_the_style(name, look, tmp_path):
    options = {"curves": {"factor": "W"}, "maps": {"image_shape": (7, 1)}}
    with style.context(look):
        ground = to_hex(mpl.rcParams["figure.facecolor"])
        figure = plots.draw(particle_tree(), name, **options.get(name, {}))
        save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 3000
    assert to_hex(figure.get_facecolor()) == ground
    for ax in figure.axes:
        for text in (ax._left_title, ax.xaxis.label, *ax.get_xticklabels()):
            if text.get_text():
                assert (np.mean(to_rgb(text.get_color())) > 0.5) == (look != "default")


def test_figures_have_names_and_those_that_fit_come_with_a_reason_for_others():
    drawn = dict(plots.draw_all(fake_run(), count=2))
    assert "weights" not in drawn
    for name in ("maps", "curves"):
        assert isinstance(drawn.pop(name), OptionError)
    assert all(isinstance(figure, Figure) for figure in drawn.values())
    assert {"weights", "particles"} <= set(dict(plots.draw_all(particle_tree())))
    assert {"overview", "components", "top-entries", "maps", "trace"} <= set(plots.FIGURES)
    for kind in plots.FIGURES.values():  # all take a result first
        first = next(iter(inspect.signature(kind.draw).parameters.values()))
        assert (first.default, kind.title[-1]) == (inspect.Parameter.empty, ".")
    match = "no figure 'heatmap'; use one of components, curves"
    refused(OptionError, match, plots.draw, fake_run(), "heatmap")
    match = "'trace' takes no count; pass no options"
    refused(OptionError, match, plots.draw, fake_run(), "trace", count=3)


def test_a_cell_shows_a_figure_that_pyplot_does_not_know():
    import matplotlib.pyplot as plt

    assert plots.shares(point(20))._repr_png_().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
