"""Figures of the log density of a run, by cycle or particle, and of the evidence of ranks."""

from os import PathLike
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.plots.canvas import (
    NORMAL,
    SMALL,
    FloatArray,
    chain_colors,
    check_table,
    group,
    in_style,
    legend,
    new_figure,
    save,
    subplots,
    theme,
    threshold_line,
)
from daskfactor.plots.registry import figure
from daskfactor.results.series import balanced_density
from daskfactor.runs.trace import Run, Trace, as_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


_DOT_AREA: Final = 90.0
"""Area of the dot of the particle with the largest weight, in square points."""


@figure("trace")
def trace_plot(tree: Trace, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Draw the log density over cycles: the complete run on the left, the draws on the right.

    The right panel shows the series that `summarize` judges. If the model separates the effect of
    the relative scales of W and H, on which WH does not depend, this is the density without it
    ("balanced"). Tuning has a shaded background; a red tick marks a draw whose step diverged and
    was rejected. For particles, the left panel shows the objective (or log density), the right one
    the log density of particles with weight. The area of a dot is the weight; particles without
    weight are gray crosses.

    Parameters
    ----------
    tree : xarray.DataTree
        Result of `sample`, `resume` or `open_run`.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the tree has no ``sample_stats``, or matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.trace_plot(trace)
    >>> len(figure.axes)
    2
    """
    tree = as_tree(tree)
    stats = group(tree, "sample_stats")
    target = new_figure(9.0, 2.8) if figure is None else figure
    full, zoom = subplots(target, 1, 2, width_ratios=(3, 2))[0]
    if Run(tree).is_particles:
        _particles(full, zoom, tree, stats)
        return target.get_figure(root=True)
    colors = chain_colors(stats.sizes["chain"])
    draw = np.asarray(stats["draw"].values)
    lp, balanced = stats["lp"].transpose("chain", "draw").values, balanced_density(tree)
    series = lp if balanced is None else balanced
    for index, color in enumerate(colors):
        name = f"chain {stats['chain'].values[index]}"
        for ax, values in ((full, lp), (zoom, series)):
            ax.plot(draw, values[index], color=color, lw=0.9, label=name)
        _mark_divergences(zoom, draw, stats, index, float(np.nanmin(series)))
    _warmup(full, tree, colors)
    full.set_title("complete run")
    zoom.set_title("draws" if balanced is None else "draws, balanced")
    full.set_ylabel("log density")
    for ax in (full, zoom):
        _label_cycles(ax)
    handles, labels = zoom.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))  # several chains may mark divergences
    if len(entries) > 1:
        legend(target, list(entries.values()), ncols=min(len(entries), 8))
    return target.get_figure(root=True)


def _particles(left: "Axes", right: "Axes", tree: xr.DataTree, stats: xr.Dataset) -> None:
    """Draw the objective or log density of all particles, and the log density of weighted ones."""
    stored = stats["weight"].values.ravel() if "weight" in stats else None
    number = np.arange(stats.sizes["chain"] * stats.sizes["draw"])
    weight = np.full(number.shape, 1.0 / max(1, number.size)) if stored is None else stored
    name = "objective" if "objective" in stats else "lp"
    weighted_title = "with weight" if stored is not None else "not weighted yet"
    for ax, fit, numbers, title in (
        (left, name, number, "all particles"),
        (right, "lp", number[weight > 0], weighted_title),
    ):
        _dots(ax, numbers, stats, fit, weight)
        ax.set_title(title)
        _label_cycles(ax, "particle")
    if name == "objective":
        threshold_line(left, tree)


def _dots(
    ax: "Axes",
    number: NDArray[np.integer],
    stats: xr.Dataset,
    name: str,
    weight: FloatArray,
) -> None:
    """Draw a statistic of some particles, or a note if it is not available yet."""
    ax.set_ylabel({"lp": "log density"}.get(name, name))
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if name not in stats:
        text = "not available until all\nparticles are finished"
        ax.text(0.5, 0.5, text, ha="center", va="center", fontsize=NORMAL, transform=ax.transAxes)
        return
    values, mass = stats[name].values.ravel()[number], weight[number]
    weighted = mass > 0
    area = _DOT_AREA * mass[weighted] / weight.max()
    ax.scatter(number[weighted], values[weighted], s=area, color=theme().accent, alpha=0.7, lw=0)
    ax.scatter(number[~weighted], values[~weighted], s=14, color=theme().quiet, marker="x", lw=0.9)


def _warmup(ax: "Axes", tree: xr.DataTree, colors: list[str]) -> None:
    """Draw the log density while tuning, and limit the axis to the range after the first cycles."""
    if "warmup_sample_stats" not in tree.children:
        return
    warmup = group(tree, "warmup_sample_stats")
    count = warmup.sizes["warmup_draw"]
    if not count:
        return
    # The fit is evaluated in some of the cycles of tuning, at about even distances.
    tune = float(tree.attrs.get("tune", count))
    cycle = np.arange(1, count + 1) * tune / count
    for index, color in enumerate(colors):
        ax.plot(cycle, warmup["lp"].isel(chain=index).values, color=color, lw=0.9, alpha=0.5)
    ax.axvspan(0.0, tune, color=theme().quiet, alpha=0.25, lw=0)
    # The first cycles are so low that they would flatten the rest; all draws stay visible.
    both = warmup["lp"].values, group(tree, "sample_stats")["lp"].values
    early, drawn = (values[np.isfinite(values)] for values in both)
    finite = np.concatenate([early, drawn])
    if finite.size:
        low = float(min(np.quantile(finite, 0.02), drawn.min(initial=np.inf)))
        high = float(finite.max())
        margin = 0.08 * (high - low) or 1.0
        ax.set_ylim(low - margin, high + margin)


def _mark_divergences(
    ax: "Axes", draw: NDArray[np.integer], stats: xr.Dataset, index: int, low: float
) -> None:
    """Mark the diverging draws of a chain."""
    if "diverging" in stats:
        bad = draw[stats["diverging"].isel(chain=index).values.astype(bool)]
        if bad.size:
            ax.plot(bad, [low] * bad.size, "|", color=theme().warn, ms=10, label="diverging")


def _label_cycles(ax: "Axes", label: str = "cycle") -> None:
    """Label the axis of cycles or particles, and format that of the density."""
    ax.set_xlabel(label)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    ax.yaxis.get_offset_text().set_fontsize(7)


@in_style
def plot_ranks(
    table: xr.Dataset, path: str | PathLike[str] | None = None, overwrite: bool = False
) -> "Figure":
    """Draw the log evidence over ranks, and the held-out score below it.

    The best rank of each is filled. Bars are two standard errors: for the evidence, both errors
    combined; for the score, the error of the difference to the best rank. A note next to the title
    tells if the best rank is at the edge of the range, or if the errors are too large to decide.

    Parameters
    ----------
    table : xarray.Dataset
        Result of `select_rank`.
    path
        Image file to write; its suffix selects the format.
    overwrite
        Whether to replace an existing file.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the dataset is not a result of `select_rank`, or matplotlib is not installed.
    StoreError
        If the file exists.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (4, 3))
    >>> model = dfac.TweedieNMF(1, dispersion=1)
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> table = dfac.select_rank(V, model, [1, 2], dfac.Chib(500, 200), None, **run)
    >>> figure = dfac.plots.plot_ranks(table)
    >>> len(figure.axes)
    1
    """
    is_complete = "log_evidence" in table and "best" in table.attrs
    check_table(table, is_complete, "plot_ranks", "select_rank")
    scored = "held_out_log_score" in table
    computed = bool(table["log_evidence"].notnull().any())
    figure = new_figure(6.4, 5.2 if scored and computed else 3.2)
    axes = subplots(figure, scored + computed, 1, sharex=True)[:, 0]
    if computed:
        _evidence_curve(axes[0], table)
    if scored:
        errors = table["held_out_difference_error"].values
        _curve(axes[-1], table, "held_out_log_score", errors, table.attrs["best_held_out"])
        axes[-1].set_ylabel("mean log score per cell (nats)")
        axes[-1].set_title("held-out cells")
    axes[-1].set_xlabel("number of components")
    return save(figure, path, overwrite)


def _evidence_curve(axes: Any, table: xr.Dataset) -> None:
    """Draw the evidences, with circles around those within the errors of the best."""
    errors = np.hypot(table["standard_error"].values, table["discretization_error"].values)
    _curve(axes, table, "log_evidence", errors, table.attrs["best"])
    name = "log evidence" if "bound" not in table.attrs else "lower bound of log evidence"
    axes.set_ylabel(f"{name} (nats)")
    axes.set_title("evidence")
    axes.set_title(_caution(table.attrs), loc="right", fontsize=SMALL, color=theme().warn)
    others = np.atleast_1d(table.attrs["not_distinguishable"])  # files keep lists as arrays
    for rank in others:
        value = float(table["log_evidence"].sel(rank=rank))
        axes.plot([rank], [value], "o", ms=9, mfc="none", mec=theme().warn, label="within errors")
    if others.size:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[:1], labels[:1], loc="lower right")


def _caution(attrs: dict[str, Any]) -> str:
    """Return a warning about the best rank, or ``""``."""
    if not attrs.get("decides", True):
        return "undecided: errors as large as differences"
    end = attrs.get("at_edge")
    return f"best is the {end} rank: try {end[:-2]}r ranks" if end else ""


def _curve(ax: "Axes", table: xr.Dataset, name: str, errors: FloatArray, best: int) -> None:
    """Draw a score over ranks with error bars, and highlight the best."""
    ranks, values = table["rank"].values, table[name].values
    ax.axvline(best, color=theme().quiet, lw=6, alpha=0.45, zorder=0)
    ax.errorbar(
        ranks,
        values,
        yerr=2 * errors,
        color=theme().accent,
        ecolor=theme().ink,
        elinewidth=0.9,
        capsize=2.5,
        lw=1.1,
        marker="o",
        ms=4,
        mfc=ax.get_facecolor(),
    )
    ax.plot([best], [float(table[name].sel(rank=best))], "o", ms=5, color=theme().accent, zorder=5)
    ax.set_xticks(ranks)
