"""Figures of components: side by side, as lists, maps and curves, and their shares of the data."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import one_of, whole_number
from daskfactor.errors import OptionError
from daskfactor.plots.axis_kinds import FactorAxis, factor_axis
from daskfactor.plots.canvas import (
    NORMAL,
    SMALL,
    new_figure,
    short_label,
    subplots,
    theme,
)
from daskfactor.plots.panels import (
    add_color_scale,
    name_axis,
    name_map,
    panel,
    picture,
)
from daskfactor.plots.registry import figure
from daskfactor.plots.traces import trace_plot
from daskfactor.results.components import (
    INTERVAL,
    SURE,
    Components,
    Factor,
    components_of,
    with_names,
)
from daskfactor.runs.trace import Trace, as_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Shape = tuple[int, int] | None
Show = Mapping[Any, str] | None
Result = Trace | xr.Dataset
Name = Literal["W", "H"] | None
Target: TypeAlias = "Figure | SubFigure | None"

_LIST_LENGTH: Final = 5
"""Number of entries in the lists of `components`."""
_HEIGHTS: Final = {"picture": 1.25, "map": 1.25, "names": 1.05}
"""Height of a row of the figure in inches, by kind of axis; 0.9 for other kinds."""
_WIDTHS: Final = {"picture": 1.5, "map": 1.9}
"""Width of a column of the figure in inches, by kind of axis; 3.4 for other kinds."""


@figure("components")
def components(
    result: Result,
    image_shape: Shape = None,
    count: int = 6,
    chain: int | None = None,
    *,
    show: Show = None,
    figure: Target = None,
) -> "Figure":
    """Draw the largest components, each with its column of W and its row of H.

    The labels of a dimension determine how it is drawn: dates as a time series, numbers with a unit
    as a curve, two numeric coordinates (latitude and longitude) as a map, up to 30 names as bars,
    more as a list of the largest entries. Columns of W are relative to their mean; rows of H are
    the contribution of the component to a column of the data, in its unit. Bands and whiskers are
    90 % intervals.

    Parameters
    ----------
    result : xarray.DataTree, xarray.Dataset, str or Path
        Result of `sample`, `resume`, `open_run`, `align`, `stein_posterior` or `optimize`. Draws
        are aligned, if they are not yet, and all chains combined. Of a run that has only moments,
        one chain is drawn.
    image_shape : (int, int), optional
        Height and width of an image whose pixels are the rows or columns of the data.
    count : int
        Number of components.
    chain : int, optional
        Position of a single chain to draw.
    show : mapping, optional
        Kinds of drawing by dimension, instead of the automatic choice: ``"picture"``, ``"map"``,
        ``"time"``, ``"curve"``, ``"bars"`` or ``"names"``.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the result has no factors, an argument is invalid, or matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.components(trace)
    >>> len(figure.axes)
    6
    """
    content = components_of(result, chain)
    kinds = _factor_axes(content, image_shape, show)
    count = min(whole_number("count", count, 1), len(content.labels))
    heights = [_HEIGHTS.get(axis.kind, 0.9) for axis in kinds]
    target = new_figure(9.0, max(heights) * count + 0.9) if figure is None else figure
    widths = [_WIDTHS.get(axis.kind, 3.4) for axis in kinds]
    axes = subplots(target, count, 3, width_ratios=(1.0, *widths))
    for k in range(count):
        axes[k, 0].set_axis_off()
        axes[k, 0].text(1.0, 0.5, _caption(content, k), ha="right", va="center")
    for column, (factor, axis) in enumerate(zip((content.W, content.H), kinds, strict=True), 1):
        _draw_column(target, axes[:, column], factor, axis)
        axes[0, column].set_title(f"{factor.name}: {_quantity(content, factor)}", fontsize=NORMAL)
    return target.get_figure(root=True)


def _draw_column(target: Any, axes: NDArray[np.object_], factor: Factor, axis: FactorAxis) -> None:
    """Draw the components of one factor below each other, with labels below the last."""
    for k, ax in enumerate(axes):
        image, last = panel(ax, factor, axis, k, _LIST_LENGTH), k == len(axes) - 1
        if image is not None:
            add_color_scale(target, ax, image)
            name_map(ax, axis, left=True, bottom=last, ticks=2)
        elif last:
            name_axis(ax, axis)
        elif axis.kind != "names":
            ax.sharex(axes[-1])
            ax.tick_params(labelbottom=False)


def _factor_axes(
    content: Components, image_shape: Shape, show: Show
) -> tuple[FactorAxis, FactorAxis]:
    """Return the axes of W and H for an image shape and kinds of drawing by dimension."""
    sizes = [factor.mean.shape[1] for factor in (content.W, content.H)]
    if image_shape is not None and image_shape[0] * image_shape[1] not in sizes:
        raise OptionError(
            f"image_shape must have as many pixels as W has rows ({sizes[0]}) or H has columns "
            f"({sizes[1]}), got {image_shape} with {image_shape[0] * image_shape[1]} pixels"
        )
    wrong = set(show or {}) - {content.W.dim, content.H.dim}
    if wrong:
        raise OptionError(
            f"show must have the keys {content.W.dim!r} or {content.H.dim!r}, got "
            f"{sorted(map(str, wrong))}"
        )
    pixels = image_shape and image_shape[0] * image_shape[1]
    shape_of_h = None if pixels == sizes[0] else image_shape  # of equal sizes, rows are the pixels
    return factor_axis(content.W, image_shape, show), factor_axis(content.H, shape_of_h, show)


def _caption(content: Components, k: int) -> str:
    """Return the text next to a component: name, share of the data, and of the draws if small."""
    share = f"{content.weight[k]:.1%} of the data"
    lines = short_label(content.titles[k], 20), share, _share_of_draws(content, k)
    return "\n".join(filter(None, lines))


def _short_caption(content: Components, k: int) -> str:
    """Return the name and shares of a component in one line."""
    shares = f"{content.weight[k]:.1%}", _share_of_draws(content, k)
    return f"{short_label(content.titles[k], 20)}: {', '.join(filter(None, shares))}"


def _share_of_draws(content: Components, k: int) -> str:
    """Return the share of draws that contain a component, or ``""`` if these are almost all."""
    if content.present is None or content.present[k] >= SURE:
        return ""
    return f"in {content.present[k]:.0%} of draws"


def _quantity(content: Components, factor: Factor) -> str:
    """Return the quantity that the values of a factor are."""
    if factor.name == "W":
        return "relative to its mean" if factor.nonnegative else "relative to its size"
    return f"{content.quantity} added"


@figure("overview")
def overview(
    result: Result,
    image_shape: Shape = None,
    count: int = 6,
    title: str | None = None,
    *,
    show: Show = None,
) -> "Figure":
    """Draw the log density of a run above its largest components.

    Parameters
    ----------
    result
        As for `components`.
    image_shape : (int, int), optional
        Height and width of an image whose pixels are the rows or columns of the data.
    count : int
        Number of components.
    title : str, optional
        Title of the figure.
    show : mapping, optional
        Kinds of drawing by dimension, as for `components`.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.overview(trace)
    >>> len(figure.axes)
    8
    """
    if isinstance(result, xr.Dataset):
        target = components(result, image_shape, count, show=show)
    else:
        tree = with_names(as_tree(result))
        rows = min(count, len(components_of(tree).labels))
        target = new_figure(9.0, 3.0 + 1.1 * rows)
        parts: Any = target.subfigures(2, 1, height_ratios=(2.6, 1.1 * rows + 0.4))
        upper, lower = parts
        trace_plot(tree, figure=upper)
        components(tree, image_shape, count, show=show, figure=lower)
    if title:
        target.suptitle(title)
    return target


@figure("top-entries")
def top_entries(
    result: Result, factor: Name = None, count: int = 9, entries: int = 10, *, figure: Target = None
) -> "Figure":
    """Draw the largest entries of each component with their names, such as words or genes.

    Parameters
    ----------
    result
        As for `components`.
    factor : "W" or "H", optional
        Factor of the rows (W) or columns (H) of the data; by default the one whose entries have
        names, or the longer one.
    count : int
        Number of components, those with the largest share of the data first.
    entries : int
        Number of entries of each component.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.top_entries(trace)
    >>> len(figure.axes)
    2
    """
    content = components_of(result)
    one_of("factor", factor, (None, "W", "H"))
    matrix = content.factor(factor or _factor_with_names(content))
    axis = factor_axis(matrix, show={matrix.dim: "names"})
    entries = min(whole_number("entries", entries, 1), matrix.mean.shape[1])
    return _grid(content, matrix, axis, count, (3.0, 0.19 * entries + 0.75), figure, entries)


@figure("curves")
def curves(
    result: Result, factor: Name = None, count: int = 9, *, figure: Target = None
) -> "Figure":
    """Draw each component over an ordered dimension, with intervals, such as spectra.

    Parameters
    ----------
    result
        As for `components`.
    factor : "W" or "H", optional
        Factor of the rows (W) or columns (H) of the data; by default the one whose labels are
        dates, or numbers with a unit.
    count : int
        Number of components, those with the largest share of the data first.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.curves(trace, "H")
    >>> len(figure.axes)
    2
    """
    content = components_of(result)
    matrix, axis = _suitable_factor(content, factor, None, ("time", "curve"), "curves")
    return _grid(content, matrix, axis, count, (3.0, 1.7), figure)


@figure("maps")
def maps(
    result: Result,
    factor: Name = None,
    image_shape: Shape = None,
    count: int = 9,
    *,
    figure: Target = None,
) -> "Figure":
    """Draw each component as a map or image, with its standard deviation below.

    Parameters
    ----------
    result
        As for `components`.
    factor : "W" or "H", optional
        Factor of the rows (W) or columns (H) of the data; by default the one with two numeric
        coordinates, or with as many entries as pixels.
    image_shape : (int, int), optional
        Height and width of an image whose pixels are the rows or columns of the data.
    count : int
        Number of components, those with the largest share of the data first.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.maps(trace, image_shape=(3, 5))
    >>> len(figure.axes)
    4
    """
    content = components_of(result)
    matrix, axis = _suitable_factor(content, factor, image_shape, ("map", "picture"), "maps")
    assert axis.grid is not None
    height = 1.8 * min(max(axis.grid.height_over_width(), 0.4), 1.6) + 0.25
    rows = 1 if matrix.variance is None else 2
    cell, margin = (2.4, height * rows + 0.4), (0.4, 0.4)
    target, cells = _cells(content, count, 4, cell, margin, figure, rows)
    for k, pair in enumerate(cells):
        panels = [(matrix.mean[k], matrix.nonnegative, _short_caption(content, k))]
        if matrix.variance is not None:
            panels.append((np.sqrt(matrix.variance[k]), True, "standard deviation"))
        for ax, (values, nonnegative, title) in zip(pair, panels, strict=True):
            add_color_scale(target, ax, picture(ax, values, axis.grid, nonnegative))
            ax.set_title(title, fontsize=SMALL)
            last = k + 4 >= len(cells) and ax is pair[-1]
            name_map(ax, axis, left=k % 4 == 0, bottom=last)
    target.suptitle(f"{matrix.name}: {_quantity(content, matrix)}, by {axis.dim}")
    return target.get_figure(root=True)


@figure("shares")
def shares(result: Result, count: int = 50, *, figure: Target = None) -> "Figure":
    """Draw the share of the data of each component, and the share of draws that contain it.

    Parameters
    ----------
    result
        As for `components`.
    count : int
        Number of components, those with the largest share of the data first.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.shares(trace)
    >>> len(figure.axes)
    2
    """
    content, colors = components_of(result), theme()
    count = min(whole_number("count", count, 1), len(content.labels))
    aligned = content.present is not None
    size = 7.0 if aligned else 4.5, 0.19 * count + 1.1
    target = new_figure(*size) if figure is None else figure
    axes = subplots(target, 1, 2 if aligned else 1, sharey=True)[0]
    at = np.arange(count)
    axes[0].barh(at, 100 * content.weight[:count], height=0.72, color=colors.accent)
    axes[0].set_xlabel("share of the data (%)")
    axes[0].set_title("weight of each component")
    if content.present is not None and content.present_by_chain is not None:
        chains = 100 * content.present_by_chain[:, :count]
        axes[1].barh(at, 100 * content.present[:count], height=0.72, color=colors.quiet)
        if len(chains) > 1:
            for percent, offset in zip(chains, np.linspace(-0.24, 0.24, len(chains)), strict=True):
                axes[1].plot(
                    percent, at + offset, "o", ms=3.5, color=colors.accent, clip_on=False, zorder=4
                )
        axes[1].set_xlim(0, 100)
        axes[1].set_xlabel("share of the draws (%)")
        dots = "; dots: chains" if len(chains) > 1 else ""
        axes[1].set_title(f"draws with the component{dots}")
    axes[0].set_yticks(at, [short_label(title) for title in content.titles[:count]])
    axes[0].set_ylim(count - 0.4, -0.6)
    return target.get_figure(root=True)


def _factor_with_names(content: Components) -> Literal["W", "H"]:
    """Return the factor whose entries have text labels, or the longer one."""

    def rank(factor: Factor) -> tuple[bool, int]:
        has_names = any(label.dtype.kind in "OUT" for label in factor.labels.coords.values())
        return has_names, factor.mean.shape[1]

    return "W" if rank(content.W) > rank(content.H) else "H"


def _suitable_factor(
    content: Components, name: Any, image_shape: Shape, kinds: tuple[str, ...], figure_name: str
) -> tuple[Factor, FactorAxis]:
    """Return the factor that can be drawn as one of some kinds, and its axis."""
    one_of("factor", name, (None, "W", "H"))
    both = [(factor, factor_axis(factor, image_shape)) for factor in (content.W, content.H)]
    for factor, axis in both:
        if name in (None, factor.name) and axis.kind in kinds:
            return factor, axis
    if name is not None and "curve" in kinds:  # for labels of any kind
        factor = content.factor(name)
        return factor, factor_axis(factor, show={factor.dim: "curve"})
    actual = " and ".join(f"{factor.dim!r} is drawn as {axis.kind}" for factor, axis in both)
    advice = {
        "curves": "pass data with dates, or numbers with a unit, as labels; or pass "
        'factor="W" or "H" to draw curves of any labels',
        "maps": "pass data with two numeric coordinates along a dimension, or "
        "image_shape=(height, width)",
    }
    raise OptionError(f"there are no {figure_name} to draw: {actual}; {advice[figure_name]}")


def _grid(
    content: Components,
    factor: Factor,
    axis: FactorAxis,
    count: int,
    cell: tuple[float, float],
    figure: Target,
    names: int = _LIST_LENGTH,
) -> "Figure":
    """Draw one factor with a panel for each component."""
    target, cells = _cells(content, count, 3, cell, (0.0, 0.5), figure)
    for k, (ax,) in enumerate(cells):
        panel(ax, factor, axis, k, names)
        ax.set_title(_short_caption(content, k), fontsize=NORMAL)
        if axis.kind != "names":
            name_axis(ax, axis)
            if k + 3 < len(cells):
                ax.set_xlabel("")
    spread = "no interval" if factor.variance is None else f"{INTERVAL:.0%} intervals"
    target.suptitle(f"{factor.name}: {_quantity(content, factor)}, by {axis.label}; {spread}")
    return target.get_figure(root=True)


def _cells(
    content: Components,
    count: int,
    across: int,
    cell: tuple[float, float],
    margin: tuple[float, float],
    figure: Target,
    rows: int = 1,
) -> tuple["Figure | SubFigure", Any]:
    """Return a figure and its cells, one per component, each with ``rows`` axes."""
    count = min(whole_number("count", count, 1), len(content.labels))
    across = min(across, count)
    bands = ceil(count / across)
    target = figure or new_figure(cell[0] * across + margin[0], cell[1] * bands + margin[1])
    axes = subplots(target, bands * rows, across)
    cells = axes.reshape(bands, rows, across).swapaxes(1, 2).reshape(-1, rows)
    for ax in cells[count:].flat:
        ax.set_axis_off()
    return target, cells[:count]
