"""One component of one factor, drawn into an axes in the way its dimension is shown."""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from daskfactor.plots.canvas import SMALL, bare, color_bar, short_label, theme
from daskfactor.plots.sides import Side
from daskfactor.results.components import Factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Array = NDArray[np.float64]
Interval = tuple[Array, Array] | None

_MANY: Final = 400
"""Points of a curve from which on its line is thin."""
_YEARS: Final = ["", "%Y", "%Y", "%Y-%m-%d", "%Y-%m-%d", "%Y-%m-%d %H:%M"]
"""What is written beside an axis of years, months, days, hours, minutes and seconds."""
_ROOM: Final = 1.12
"""Height of an axis over the largest value."""


def panel(ax: "Axes", factor: Factor, side: Side, component: int, names: int = 5) -> Any:
    """Draw one component as the kind of its side; returns the picture, if it is one.

    Parameters
    ----------
    names
        How many entries, where the largest are listed.
    """
    match side.kind:
        case "picture" | "map":
            return picture(ax, factor.mean[component], side, factor.nonnegative)
        case "names":
            entries(ax, factor, side, component, names)
        case "bars":
            bars(ax, factor, component)
        case _:
            curve(ax, factor, side, component)
    return None


def curve(ax: "Axes", factor: Factor, side: Side, component: int) -> None:
    """A line over numbers or dates, its interval a band."""
    colors = theme()
    at, order = side.at[side.order], side.order
    mean, found = factor.mean[component], factor.interval(component)
    if found is not None:
        low, high = found
        ax.fill_between(at, low[order], high[order], color=colors.accent, alpha=0.3, lw=0)
    thin = 1.0 if at.size <= _MANY else 0.6
    ax.plot(at, mean[order], color=colors.accent, lw=thin)
    _from_zero(ax, factor, mean, found, zorder=0)
    if at.size > 1:
        ax.set_xlim(at[0], at[-1])


def bars(ax: "Axes", factor: Factor, component: int) -> None:
    """A bar for each of a few entries, its interval a whisker."""
    mean, found = factor.mean[component], factor.interval(component)
    at = np.arange(mean.size)
    ax.bar(at, mean, width=0.72, color=theme().accent)
    if found is not None:
        ax.vlines(at, *found, color=theme().ink, lw=1.0)
    _from_zero(ax, factor, mean, found)
    ax.set_xlim(-0.6, mean.size - 0.4)


def entries(ax: "Axes", factor: Factor, side: Side, component: int, count: int) -> None:
    """The largest entries with their names, from the top down."""
    best = factor.largest(component, count)
    mean, found = factor.mean[component][best], factor.interval(component, best)
    at = np.arange(best.size)
    ax.barh(at, mean, height=0.72, color=theme().accent)
    if found is not None:
        ax.hlines(at, *found, color=theme().ink, lw=1.0)
    ax.set_yticks(at, [short_label(side.names[entry]) for entry in best])
    ax.set_ylim(best.size - 0.4, -0.6)
    _from_zero(ax, factor, mean, found, upright=False)
    ax.tick_params(axis="y", length=0)
    ax.locator_params(axis="x", nbins=4)


def _from_zero(
    ax: "Axes", factor: Factor, mean: Array, found: Interval, upright: bool = True, **line: Any
) -> None:
    """Let the axis of values begin at zero, or mark where zero is."""
    if not factor.nonnegative:
        (ax.axhline if upright else ax.axvline)(0.0, color=theme().quiet, lw=0.6, **line)
        return
    most = float(np.nanmax(mean if found is None else found[1], initial=0.0))
    (ax.set_ylim if upright else ax.set_xlim)(0.0, _ROOM * most if most > 0 else 1.0)


def picture(
    ax: "Axes", values: Array, side: Side, nonnegative: bool, top: float | None = None
) -> "AxesImage":
    """A picture or a map: of one sign from zero up, of both around zero."""
    grid = side.grid
    assert grid is not None
    if top is None:
        top = float(np.quantile(np.abs(values), 0.998)) or float(np.abs(values).max()) or 1.0
    options: dict[str, Any] = {"vmin": 0.0 if nonnegative else -top, "vmax": top}
    gray = grid.sides is None
    options["cmap"] = ("gray" if gray else "viridis") if nonnegative else "RdBu_r"
    if grid.sides is None:
        image = ax.imshow(grid.picture(values), interpolation="nearest", **options)
    else:
        rows, columns = grid.sides
        image = ax.pcolormesh(  # type: ignore[assignment]
            columns, rows, grid.picture(values), shading="nearest", rasterized=True, **options
        )
        ratio = height_over_width(side) * float(np.ptp(columns)) / float(np.ptp(rows))
        ax.set_aspect(ratio)
    bare(ax, frame=True)
    return image


def scale_beside(figure: Any, ax: "Axes", image: Any) -> None:
    """The colors of one picture on its right, as high as the picture."""
    color_bar(figure, image, None, "", cax=ax.inset_axes((1.03, 0.0, 0.06, 1.0)))


def height_over_width(side: Side) -> float:
    """Of a picture as it is drawn, within reason."""
    grid = side.grid
    assert grid is not None
    height, width = grid.shape if grid.sides is None else map(np.ptp, grid.sides)
    ratio = float(height) / float(width)
    return ratio if 0.25 <= ratio <= 4.0 else 0.75


def name_axis(ax: "Axes", side: Side) -> None:
    """Write below an axis what it is, and its labels or numbers."""
    ax.set_xlabel(side.label)
    if side.kind == "bars":
        told = [short_label(name, 16) for name in side.names]
        upright = max(map(len, told)) * len(told) > 36
        ax.set_xticks(np.arange(len(told)), told, rotation=90 if upright else 0)
    elif side.kind == "time":
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator: Any = AutoDateLocator(maxticks=7)  # type: ignore[no-untyped-call]
        ax.xaxis.set_major_locator(locator)
        written: Any = ConciseDateFormatter(locator, offset_formats=_YEARS)  # type: ignore[no-untyped-call]
        ax.xaxis.set_major_formatter(written)


def name_map(ax: "Axes", side: Side, *, left: bool, bottom: bool, ticks: int = 4) -> None:
    """Write coordinates beside a map, at the outer ends of a figure."""
    grid = side.grid
    if grid is None or grid.sides is None:
        return
    from matplotlib.ticker import MaxNLocator

    for axis, shown, name in ((ax.xaxis, bottom, grid.names[1]), (ax.yaxis, left, grid.names[0])):
        if shown:
            axis.set_major_locator(MaxNLocator(ticks))
            axis.set_label_text(name, fontsize=SMALL)
