"""The components of a result: one by one, as lists, maps and curves, and how much each carries."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import one_of, whole_number
from daskfactor.errors import OptionError
from daskfactor.plots.canvas import (
    NORMAL,
    SMALL,
    new_figure,
    short_label,
    subplots,
    theme,
)
from daskfactor.plots.panels import (
    height_over_width,
    name_axis,
    name_map,
    panel,
    picture,
    scale_beside,
)
from daskfactor.plots.registry import figure
from daskfactor.plots.sides import Side, side_of
from daskfactor.plots.traces import trace_plot
from daskfactor.results.components import (
    INTERVAL,
    SURE,
    Components,
    Factor,
    components_of,
    with_names,
)
from daskfactor.results.trace import Trace, as_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Shape = tuple[int, int] | None
Show = Mapping[Any, str] | None
Result = Trace | xr.Dataset

_LISTED: Final = 5
"""Entries of a component that are listed beside its other factor."""
_LINES: Final = {"picture": 1.25, "map": 1.25, "names": 1.05}
"""Height of a line of the figure, in inches; of others .9."""
_WIDTHS: Final = {"picture": 1.5, "map": 1.9}


@figure("components")
def components(
    result: Result,
    image_shape: Shape = None,
    count: int = 6,
    chain: int | None = None,
    *,
    show: Show = None,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """The components that carry most of the data, each with its column of W and its row of H.

    A dimension is shown as its labels suggest: dates as a course of time, numbers with a unit
    as a curve, two coordinates of numbers (latitude and longitude) as a map, up to 30 names as
    bars, more as a list of the largest. Columns of W are relative to their mean, rows of H are
    what the component adds to a column of the data, in its unit. Bands and whiskers hold 90 %.

    Parameters
    ----------
    result : xarray.DataTree, xarray.Dataset, str or Path
        What `sample`, `resume`, `open_run`, `align`, `stein_posterior` or `optimize` returned.
        Draws are aligned, if they are not, and all chains taken together; of a run that kept
        moments alone, one chain is shown.
    image_shape : (int, int), optional
        Height and width, if rows or columns of the data are the pixels of an image.
    count : int
        How many components.
    chain : int, optional
        Position of the only chain to show.
    show : mapping, optional
        Of dimensions that are to be shown otherwise: ``"picture"``, ``"map"``, ``"time"``,
        ``"curve"``, ``"bars"`` or ``"names"``.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If there are no factors, an argument does not fit, or matplotlib is missing.

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
    found = components_of(result, chain)
    sides = _sides(found, image_shape, show)
    count = min(whole_number("count", count, 1), len(found.labels))
    heights = [_LINES.get(side.kind, 0.9) for side in sides]
    target = new_figure(9.0, max(heights) * count + 0.9) if figure is None else figure
    widths = [_WIDTHS.get(side.kind, 3.4) for side in sides]
    axes = subplots(target, count, 3, width_ratios=(1.0, *widths))
    for k, told in enumerate(_told(found)[:count]):
        axes[k, 0].set_axis_off()
        axes[k, 0].text(1.0, 0.5, told, ha="right", va="center")
    for column, (factor, side) in enumerate(zip((found.W, found.H), sides, strict=True), 1):
        _draw_column(target, axes[:, column], factor, side)
        axes[0, column].set_title(f"{factor.name}: {_values(found, factor)}", fontsize=NORMAL)
    return target.get_figure(root=True)


def _draw_column(target: Any, axes: NDArray[np.object_], factor: Factor, side: Side) -> None:
    """One factor, components below each other, their axis named below the last."""
    for k, ax in enumerate(axes):
        image, last = panel(ax, factor, side, k, _LISTED), k == len(axes) - 1
        if image is not None:
            scale_beside(target, ax, image)
            name_map(ax, side, left=True, bottom=last, ticks=2)
        elif last:
            name_axis(ax, side)
        elif side.kind != "names":
            ax.sharex(axes[-1])
            ax.tick_params(labelbottom=False)


def _sides(found: Components, image_shape: Shape, show: Show) -> tuple[Side, Side]:
    sizes = [factor.mean.shape[1] for factor in (found.W, found.H)]
    if image_shape is not None and image_shape[0] * image_shape[1] not in sizes:
        raise OptionError(
            f"image_shape {image_shape} has {image_shape[0] * image_shape[1]} pixels, the factor W "
            f"has {sizes[0]} rows and H {sizes[1]} columns"
        )
    wrong = set(show or {}) - {found.W.dim, found.H.dim}
    if wrong:
        raise OptionError(
            f"show names {sorted(map(str, wrong))}; the dimensions are {found.W.dim!r} and "
            f"{found.H.dim!r}"
        )
    # Of two sides with as many entries, rows are the pixels.
    other = None if image_shape is not None and sizes[0] == sizes[1] else image_shape
    if image_shape is not None and image_shape[0] * image_shape[1] != sizes[0]:
        other = image_shape
    return side_of(found.W, image_shape, show), side_of(found.H, other, show)


def _told(found: Components) -> list[str]:
    """What is written beside each component."""
    told = []
    for k, title in enumerate(found.titles):
        lines = short_label(title, 20), f"{found.weight[k]:.1%} of the data", _rare(found, k)
        told.append("\n".join(filter(None, lines)))
    return told


def _short(found: Components, k: int) -> str:
    """Name and share of a component in one line."""
    shares = f"{found.weight[k]:.1%}", _rare(found, k)
    return f"{short_label(found.titles[k], 20)}: {', '.join(filter(None, shares))}"


def _rare(found: Components, k: int) -> str:
    """In how many draws a component is, if not in about all of them."""
    if found.present is None or found.present[k] >= SURE:
        return ""
    return f"in {found.present[k]:.0%} of draws"


def _values(found: Components, factor: Factor) -> str:
    """What the values of a factor are."""
    if factor.name == "W":
        return "relative to its mean" if factor.nonnegative else "relative to its size"
    return f"{found.quantity} added"


@figure("overview")
def overview(
    result: Result,
    image_shape: Shape = None,
    count: int = 6,
    title: str | None = None,
    *,
    show: Show = None,
) -> "Figure":
    """The log density of a run above the components that carry most of the data.

    Parameters
    ----------
    result
        As for `components`.
    image_shape : (int, int), optional
        Height and width, if rows or columns of the data are the pixels of an image.
    count : int
        How many components.
    title : str, optional
        Headline of the figure.
    show : mapping, optional
        Of dimensions that are to be shown otherwise, as for `components`.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

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
    found = result if isinstance(result, xr.Dataset) else with_names(as_tree(result))
    if isinstance(found, xr.Dataset):
        whole = components(found, image_shape, count, show=show)
    else:
        lines = min(count, len(components_of(found).labels))
        whole = new_figure(9.0, 3.0 + 1.1 * lines)
        parts: Any = whole.subfigures(2, 1, height_ratios=(2.6, 1.1 * lines + 0.4))
        upper, lower = parts
        trace_plot(found, figure=upper)
        components(found, image_shape, count, show=show, figure=lower)
    if title:
        whole.suptitle(title)
    return whole


@figure("top-entries")
def top_entries(
    result: Result,
    factor: Literal["W", "H"] | None = None,
    count: int = 9,
    entries: int = 10,
    *,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """The largest entries of each component with their names: words, genes, films, pixels.

    Parameters
    ----------
    result
        As for `components`.
    factor : "W" or "H", optional
        Rows or columns of the data; by default the side that has names, or the longer one.
    count : int
        How many components, those that carry most of the data first.
    entries : int
        How many entries of each component.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

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
    found = components_of(result)
    factor = _checked(factor) or _named_side(found)
    shown = found.factor(factor)
    side = side_of(shown, show={shown.dim: "names"})
    entries = min(whole_number("entries", entries, 1), shown.mean.shape[1])
    return _grid(found, shown, side, count, (3.0, 0.19 * entries + 0.75), figure, entries)


@figure("curves")
def curves(
    result: Result,
    factor: Literal["W", "H"] | None = None,
    count: int = 9,
    *,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Each component over an ordered dimension, with its interval: spectra, courses of time.

    Parameters
    ----------
    result
        As for `components`.
    factor : "W" or "H", optional
        Rows or columns of the data; by default the side whose labels are dates, or
        numbers with a unit.
    count : int
        How many components, those that carry most of the data first.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

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
    found = components_of(result)
    shown, side = _fitting(found, _checked(factor), None, ("time", "curve"), "curves")
    return _grid(found, shown, side, count, (3.0, 1.7), figure)


@figure("maps")
def maps(
    result: Result,
    factor: Literal["W", "H"] | None = None,
    image_shape: Shape = None,
    count: int = 9,
    *,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Each component as a map or picture, and below it its standard deviation.

    Parameters
    ----------
    result
        As for `components`.
    factor : "W" or "H", optional
        Rows or columns of the data; by default the side with two coordinates of
        numbers, or with as many entries as pixels.
    image_shape : (int, int), optional
        Height and width, if rows or columns of the data are the pixels of an image.
    count : int
        How many components, those that carry most of the data first.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

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
    found = components_of(result)
    shown, side = _fitting(found, _checked(factor), image_shape, ("map", "picture"), "maps")
    tall = 1.8 * min(max(height_over_width(side), 0.4), 1.6) + 0.25
    lines = 1 if shown.variance is None else 2
    count = min(whole_number("count", count, 1), len(found.labels))
    target, cells = _cells(count, 4, (2.4, tall * lines + 0.4), (0.4, 0.4), figure, lines)
    for k, pair in enumerate(cells):
        _map_pair(target, pair, found, shown, side, k)
        for ax in pair:
            last = k + 4 >= count and ax is pair[-1]
            name_map(ax, side, left=k % 4 == 0, bottom=last)
    target.suptitle(f"{shown.name}: {_values(found, shown)}, by {side.dim}")
    return target.get_figure(root=True)


def _map_pair(target: Any, pair: Any, found: Components, shown: Factor, side: Side, k: int) -> None:
    """The mean of a component and, where it is known, its standard deviation."""
    values = [(shown.mean[k], shown.nonnegative, _short(found, k))]
    if shown.variance is not None:
        values.append((np.sqrt(shown.variance[k]), True, "standard deviation"))
    for ax, (one, nonnegative, told) in zip(pair, values, strict=True):
        image = picture(ax, one, side, nonnegative)
        scale_beside(target, ax, image)
        ax.set_title(told, fontsize=SMALL)


@figure("shares")
def shares(
    result: Result, count: int = 50, *, figure: "Figure | SubFigure | None" = None
) -> "Figure":
    """How much of the data each component carries, and in how many draws each is found.

    Parameters
    ----------
    result
        As for `components`.
    count : int
        How many components, those that carry most of the data first.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

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
    found, colors = components_of(result), theme()
    count = min(whole_number("count", count, 1), len(found.labels))
    known = found.present is not None
    size = 7.0 if known else 4.5, 0.19 * count + 1.1
    target = new_figure(*size) if figure is None else figure
    axes = subplots(target, 1, 2 if known else 1, sharey=True)[0]
    at = np.arange(count)
    axes[0].barh(at, 100 * found.weight[:count], height=0.72, color=colors.accent)
    axes[0].set_xlabel("of the data (%)")
    axes[0].set_title("what a component carries")
    if found.present is not None and found.present_by_chain is not None:
        each = 100 * found.present_by_chain[:, :count]
        axes[1].barh(at, 100 * found.present[:count], height=0.72, color=colors.quiet)
        if len(each) > 1:
            for own, beside in zip(each, np.linspace(-0.24, 0.24, len(each)), strict=True):
                axes[1].plot(
                    own, at + beside, "o", ms=3.5, color=colors.accent, clip_on=False, zorder=4
                )
        axes[1].set_xlim(0, 100)
        axes[1].set_xlabel("of the draws (%)")
        dots = "; a dot is a chain" if len(each) > 1 else ""
        axes[1].set_title(f"where it is found{dots}")
    axes[0].set_yticks(at, [short_label(title) for title in found.titles[:count]])
    axes[0].set_ylim(count - 0.4, -0.6)
    return target.get_figure(root=True)


def _checked(factor: Any) -> Any:
    one_of("factor", factor, (None, "W", "H"))
    return factor


def _named_side(found: Components) -> Literal["W", "H"]:
    """The factor whose entries have names in words, or the longer one."""

    def rank(factor: Factor) -> tuple[bool, int]:
        named = any(one.dtype.kind in "OUT" for one in factor.labels.coords.values())
        return named, factor.mean.shape[1]

    return "W" if rank(found.W) > rank(found.H) else "H"


def _fitting(
    found: Components, factor: Any, image_shape: Shape, kinds: tuple[str, ...], what: str
) -> tuple[Factor, Side]:
    """The factor that can be shown as one of some kinds."""
    both = [(one, side_of(one, image_shape)) for one in (found.W, found.H)]
    for shown, side in both:
        if factor in (None, shown.name) and side.kind in kinds:
            return shown, side
    if factor is not None and "curve" in kinds:  # whatever its labels are
        shown = found.factor(factor)
        return shown, side_of(shown, show={shown.dim: "curve"})
    told = " and ".join(f"{shown.dim!r} is shown as {side.kind}" for shown, side in both)
    needed = {
        "curves": 'dates, or numbers with a unit, as labels; factor="W" or "H" draws it anyhow',
        "maps": "two coordinates of numbers along a dimension, or image_shape=(height, width)",
    }
    raise OptionError(f"there are no {what} to draw: {told}. They take {needed[what]}")


def _grid(
    found: Components,
    shown: Factor,
    side: Side,
    count: int,
    size: tuple[float, float],
    figure: Any,
    names: int = _LISTED,
) -> "Figure":
    """One factor, a panel for each component."""
    count = min(whole_number("count", count, 1), len(found.labels))
    target, cells = _cells(count, 3, size, (0.0, 0.5), figure)
    for k, (ax,) in enumerate(cells):
        panel(ax, shown, side, k, names)
        ax.set_title(_short(found, k), fontsize=NORMAL)
        if side.kind != "names":
            name_axis(ax, side)
            if k + 3 < count:
                ax.set_xlabel("")
    spread = "no interval" if shown.variance is None else f"{INTERVAL:.0%} intervals"
    target.suptitle(f"{shown.name}: {_values(found, shown)}, by {side.label}; {spread}")
    return target.get_figure(root=True)


def _cells(
    count: int,
    across: int,
    size: tuple[float, float],
    margin: tuple[float, float],
    figure: Any,
    lines: int = 1,
) -> tuple["Figure | SubFigure", Any]:
    """Return a figure and its cells of a few axes below each other, a cell for a component."""
    across = min(across, count)
    bands = ceil(count / across)
    target = figure or new_figure(size[0] * across + margin[0], size[1] * bands + margin[1])
    axes = subplots(target, bands * lines, across)
    cells = axes.reshape(bands, lines, across).swapaxes(1, 2).reshape(-1, lines)
    for ax in cells[count:].flat:
        ax.set_axis_off()
    return target, cells[:count]
