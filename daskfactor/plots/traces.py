"""The log density of a run, cycle by cycle."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.plots.canvas import INK, QUIET, WARN, chain_colors, group, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


def trace_plot(tree: xr.DataTree, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Log density (``lp``) over cycles: the whole run on the left, the draws alone on the right.

    Tuning has a shaded ground; a red tick marks a draw whose step diverged and was taken back.

    Parameters
    ----------
    tree : xarray.DataTree
        A result of `sample`, `resume` or `open_run`.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If the tree has no ``sample_stats``, or matplotlib is not installed.
    """
    stats = group(tree, "sample_stats")
    target = new_figure(9.0, 2.8) if figure is None else figure
    whole, zoom = target.subplots(1, 2, width_ratios=(3, 2))
    colors = chain_colors(stats.sizes["chain"])
    draw = np.asarray(stats["draw"].values)
    for index, color in enumerate(colors):
        lp = stats["lp"].isel(chain=index).values
        name = f"chain {stats['chain'].values[index]}"
        for ax in (whole, zoom):
            ax.plot(draw, lp, color=color, lw=0.9, label=name)
        _mark_divergences(zoom, draw, stats, index)
    _warmup(whole, tree, colors)
    whole.set_title("whole run", loc="left", fontsize=9, color=INK)
    zoom.set_title("draws", loc="left", fontsize=9, color=INK)
    whole.set_ylabel("log density", fontsize=8)
    for ax in (whole, zoom):
        _tidy(ax)
    if len(colors) > 1:
        zoom.legend(fontsize=7, frameon=False)
    return target.get_figure(root=True)


def _warmup(ax: "Axes", tree: xr.DataTree, colors: list[str]) -> None:
    if "warmup_sample_stats" not in tree.children:
        return
    warmup = group(tree, "warmup_sample_stats")
    count = warmup.sizes["warmup_draw"]
    if not count:
        return
    # Looks at the fit while tuning are fewer than its cycles, and about evenly spaced.
    tune = float(tree.attrs.get("tune", count))
    cycle = np.arange(1, count + 1) * tune / count
    for index, color in enumerate(colors):
        ax.plot(cycle, warmup["lp"].isel(chain=index).values, color=color, lw=0.9, alpha=0.5)
    ax.axvspan(0.0, tune, color=QUIET, alpha=0.25, lw=0)
    # The first few cycles lie so deep that they would flatten all the rest.
    _clip_low_end(ax, warmup["lp"].values, group(tree, "sample_stats")["lp"].values)


def _clip_low_end(ax: "Axes", warmup: NDArray[np.float64], draws: NDArray[np.float64]) -> None:
    finite = np.concatenate([warmup[np.isfinite(warmup)], draws[np.isfinite(draws)]])
    if finite.size:
        low, high = float(np.quantile(finite, 0.02)), float(finite.max())
        margin = 0.08 * (high - low) or 1.0
        ax.set_ylim(low - margin, high + margin)


def _mark_divergences(ax: "Axes", draw: NDArray[np.integer], stats: xr.Dataset, index: int) -> None:
    if "diverging" in stats:
        bad = stats["diverging"].isel(chain=index).values.astype(bool)
        if bad.any():
            low = np.nanmin(stats["lp"].values)
            ax.plot(draw[bad], np.full(bad.sum(), low), "|", color=WARN, ms=10, label="diverging")


def _tidy(ax: "Axes") -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel("cycle", fontsize=8)
    ax.tick_params(labelsize=7, colors=INK)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    ax.yaxis.get_offset_text().set_fontsize(7)
