"""Panels of one component of one factor, for each kind of axis."""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from daskfactor.plots.axis_kinds import FactorAxis, Grid
from daskfactor.plots.canvas import SMALL, bare, color_bar, short_label, theme
from daskfactor.results.components import Factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

Array = NDArray[np.float64]
Interval = tuple[Array, Array] | None

_THIN_FROM: Final = 400
"""Number of points from which on the line of a curve is thin."""
_YEARS: Final = ["", "%Y", "%Y", "%Y-%m-%d", "%Y-%m-%d", "%Y-%m-%d %H:%M"]
"""Formats of the text next to an axis of years, months, days, hours, minutes and seconds."""
_ROOM: Final = 1.12
"""Ratio of the height of an axis to the largest value."""


def panel(ax: "Axes", factor: Factor, axis: FactorAxis, component: int, names: int = 5) -> Any:
    """Draw one component of a factor as the kind of its axis; return the image of an image or map.

    Parameters
    ----------
    ax
        Axes to draw into.
    factor
        Factor.
    axis
        Axis of the entries of the factor.
    component
        Position of the component.
    names
        Number of entries in a list of the largest.
    """
    match axis.kind:
        case "picture" | "map":
            return picture(ax, factor.mean[component], axis.grid, factor.nonnegative)
        case "names":
            entries(ax, factor, axis, component, names)
        case "bars":
            bars(ax, factor, component)
        case _:
            curve(ax, factor, axis, component)
    return None


def curve(ax: "Axes", factor: Factor, axis: FactorAxis, component: int) -> None:
    """Draw a line over numbers or dates, with a band for its interval."""
    colors = theme()
    at, order = axis.at[axis.order], axis.order
    mean, interval = factor.mean[component], factor.interval(component)
    if interval is not None:
        low, high = interval
        ax.fill_between(at, low[order], high[order], color=colors.accent, alpha=0.3, lw=0)
    width = 1.0 if at.size <= _THIN_FROM else 0.6
    ax.plot(at, mean[order], color=colors.accent, lw=width)
    _from_zero(ax, factor, mean, interval, zorder=0)
    if at.size > 1:
        ax.set_xlim(at[0], at[-1])


def bars(ax: "Axes", factor: Factor, component: int) -> None:
    """Draw a bar for each of a few entries, with a whisker for its interval."""
    mean, interval = factor.mean[component], factor.interval(component)
    at = np.arange(mean.size)
    ax.bar(at, mean, width=0.72, color=theme().accent)
    if interval is not None:
        ax.vlines(at, *interval, color=theme().ink, lw=1.0)
    _from_zero(ax, factor, mean, interval)
    ax.set_xlim(-0.6, mean.size - 0.4)


def entries(ax: "Axes", factor: Factor, axis: FactorAxis, component: int, count: int) -> None:
    """Draw the largest entries with their names, from the top down."""
    best = factor.largest(component, count)
    mean, interval = factor.mean[component][best], factor.interval(component, best)
    at = np.arange(best.size)
    ax.barh(at, mean, height=0.72, color=theme().accent)
    if interval is not None:
        ax.hlines(at, *interval, color=theme().ink, lw=1.0)
    ax.set_yticks(at, [short_label(axis.names[entry]) for entry in best])
    ax.set_ylim(best.size - 0.4, -0.6)
    _from_zero(ax, factor, mean, interval, vertical=False)
    ax.tick_params(axis="y", length=0)
    ax.locator_params(axis="x", nbins=4)


def _from_zero(
    ax: "Axes", factor: Factor, mean: Array, interval: Interval, vertical: bool = True, **line: Any
) -> None:
    """Start the axis of values at zero, or draw a line at zero if values may be negative."""
    if not factor.nonnegative:
        (ax.axhline if vertical else ax.axvline)(0.0, color=theme().quiet, lw=0.6, **line)
        return
    top = float(np.nanmax(mean if interval is None else interval[1], initial=0.0))
    (ax.set_ylim if vertical else ax.set_xlim)(0.0, _ROOM * top if top > 0 else 1.0)


def picture(
    ax: "Axes", values: Array, grid: Grid | None, nonnegative: bool, top: float | None = None
) -> "ScalarMappable":
    """Draw an image or a map; colors start at zero, or are symmetric if values may be negative."""
    assert grid is not None
    if top is None:
        top = float(np.quantile(np.abs(values), 0.998)) or float(np.abs(values).max()) or 1.0
    options: dict[str, Any] = {"vmin": 0.0 if nonnegative else -top, "vmax": top, "cmap": "RdBu_r"}
    if nonnegative:
        options["cmap"] = "gray" if grid.coordinates is None else "viridis"
    bare(ax, frame=True)
    pixels = grid.picture(values)
    if grid.coordinates is None:
        return ax.imshow(pixels, interpolation="nearest", **options)
    rows, columns = grid.coordinates
    image = ax.pcolormesh(columns, rows, pixels, shading="nearest", rasterized=True, **options)
    ax.set_aspect(grid.height_over_width() * float(np.ptp(columns)) / float(np.ptp(rows)))
    return image


def add_color_scale(figure: Any, ax: "Axes", image: Any) -> None:
    """Add a color bar on the right of an image, as high as the image."""
    color_bar(figure, image, None, "", cax=ax.inset_axes((1.03, 0.0, 0.06, 1.0)))


def name_axis(ax: "Axes", axis: FactorAxis) -> None:
    """Set the label and the ticks of an axis of entries."""
    ax.set_xlabel(axis.label)
    if axis.kind == "bars":
        names = [short_label(name, 16) for name in axis.names]
        rotation = 90 if max(map(len, names)) * len(names) > 36 else 0
        ax.set_xticks(np.arange(len(names)), names, rotation=rotation)
    elif axis.kind == "time":
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator: Any = AutoDateLocator(maxticks=7)  # type: ignore[no-untyped-call]
        ax.xaxis.set_major_locator(locator)
        formatter: Any = ConciseDateFormatter(locator, offset_formats=_YEARS)  # type: ignore[no-untyped-call]
        ax.xaxis.set_major_formatter(formatter)


def name_map(ax: "Axes", axis: FactorAxis, *, left: bool, bottom: bool, ticks: int = 4) -> None:
    """Label the coordinates of a map on its left and below it."""
    grid = axis.grid
    if grid is None or grid.coordinates is None:
        return
    from matplotlib.ticker import MaxNLocator

    for ruler, labelled, name in (
        (ax.xaxis, bottom, grid.names[1]),
        (ax.yaxis, left, grid.names[0]),
    ):
        if labelled:
            ruler.set_major_locator(MaxNLocator(ticks))
            ruler.set_label_text(name, fontsize=SMALL)
