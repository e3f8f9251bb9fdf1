"""The log density of a run, cycle by cycle or particle by particle."""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.plots.canvas import ACCENT, INK, QUIET, WARN, chain_colors, group, new_figure, tidy
from daskfactor.results.trace import is_particles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


_DOT_AREA = 90.0
"""Of the particle of most weight, in square points."""


def trace_plot(tree: xr.DataTree, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Log density (``lp``) over cycles: the whole run on the left, the draws alone on the right.

    Tuning has a shaded ground; a red tick marks a draw whose step diverged and was taken back.
    Particles have no cycles: their objective (or log density) is on the left, the log density
    of those with weight on the right, each as a dot whose area is its weight; those without
    any are gray crosses.

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
    if is_particles(tree):
        _particles(whole, zoom, tree, stats)
        return target.get_figure(root=True)
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
    handles, labels = zoom.get_legend_handles_labels()
    told = dict(zip(labels, handles, strict=True))  # every chain may mark divergences
    if len(told) > 1:
        target.legend(
            told.values(),
            told.keys(),
            loc="outside lower center",  # inside the axes it would cover traces
            ncols=min(len(told), 8),
            fontsize=7,
            frameon=False,
        )
    return target.get_figure(root=True)


def _particles(left: "Axes", right: "Axes", tree: xr.DataTree, stats: xr.Dataset) -> None:
    """Objective or log density of all particles, log density of those with weight."""
    found = stats["weight"].values.ravel() if "weight" in stats else None
    number = np.arange(stats.sizes["chain"] * stats.sizes["draw"])
    count = np.full(number.shape, 1.0 / max(1, number.size)) if found is None else found
    name = "objective" if "objective" in stats else "lp"
    _dots(left, number, stats, name, count)
    left.set_title("all particles", loc="left", fontsize=9, color=INK)
    if name == "objective":
        _threshold(left, tree)
    heavy = count > 0
    _dots(right, number[heavy], stats, "lp", count)
    told = "with weight" if found is not None else "not weighted yet"
    right.set_title(told, loc="left", fontsize=9, color=INK)
    for ax in (left, right):
        _tidy(ax, "particle")


def _dots(
    ax: "Axes",
    number: NDArray[np.integer],
    stats: xr.Dataset,
    name: str,
    weight: NDArray[np.float64],
) -> None:
    """One statistic of some particles; nothing where it is not known yet."""
    ax.set_ylabel({"lp": "log density"}.get(name, name), fontsize=8)
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if name not in stats:
        said = "not known before all\nparticles are there"
        ax.text(0.5, 0.5, said, ha="center", va="center", fontsize=8, transform=ax.transAxes)
        return
    values, mass = stats[name].values.ravel()[number], weight[number]
    some = mass > 0
    area = _DOT_AREA * mass[some] / weight.max()
    ax.scatter(number[some], values[some], s=area, color=ACCENT, alpha=0.7, lw=0)
    ax.scatter(number[~some], values[~some], s=14, color=QUIET, marker="x", lw=0.9)


def _threshold(ax: "Axes", tree: xr.DataTree) -> None:
    if "constant_data" not in tree.children:
        return
    constants = group(tree, "constant_data")
    if "threshold" in constants and np.isfinite(constants["threshold"].values):
        level = float(constants["threshold"])
        ax.axhline(level, color=WARN, lw=0.9, ls="--", label="threshold")
        ax.legend(fontsize=7, frameon=False)


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


def _tidy(ax: "Axes", what: str = "cycle") -> None:
    tidy(ax)
    ax.set_xlabel(what, fontsize=8)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    ax.yaxis.get_offset_text().set_fontsize(7)
