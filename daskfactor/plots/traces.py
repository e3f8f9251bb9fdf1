"""Curves: the log density of a run, by cycle or particle, and the evidence of ranks."""

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
from daskfactor.results.trace import Run, Trace, as_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


_DOT_AREA: Final = 90.0
"""Of the particle of most weight, in square points."""


@figure("trace")
def trace_plot(tree: Trace, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Log density (``lp``) over cycles: the whole run on the left, the draws alone on the right.

    On the right is what the verdict of `summarize` goes by: where the model tells how sizes of W
    and H, which WH does not depend on, change it, the density without that change ("balanced").
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
        What was drawn; nothing is shown.

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
    whole, zoom = subplots(target, 1, 2, width_ratios=(3, 2))[0]
    if Run(tree).is_particles:
        _particles(whole, zoom, tree, stats)
        return target.get_figure(root=True)
    colors = chain_colors(stats.sizes["chain"])
    draw = np.asarray(stats["draw"].values)
    lp, balanced = stats["lp"].transpose("chain", "draw").values, balanced_density(tree)
    judged = lp if balanced is None else balanced
    for index, color in enumerate(colors):
        name = f"chain {stats['chain'].values[index]}"
        for ax, values in ((whole, lp), (zoom, judged)):
            ax.plot(draw, values[index], color=color, lw=0.9, label=name)
        _mark_divergences(zoom, draw, stats, index, float(np.nanmin(judged)))
    _warmup(whole, tree, colors)
    whole.set_title("whole run")
    zoom.set_title("draws" if balanced is None else "draws, balanced")
    whole.set_ylabel("log density")
    for ax in (whole, zoom):
        _cycles(ax)
    handles, labels = zoom.get_legend_handles_labels()
    told = dict(zip(labels, handles, strict=True))  # every chain may mark divergences
    if len(told) > 1:
        legend(target, list(told.values()), ncols=min(len(told), 8))
    return target.get_figure(root=True)


def _particles(left: "Axes", right: "Axes", tree: xr.DataTree, stats: xr.Dataset) -> None:
    """Objective or log density of all particles, log density of those with weight."""
    found = stats["weight"].values.ravel() if "weight" in stats else None
    number = np.arange(stats.sizes["chain"] * stats.sizes["draw"])
    count = np.full(number.shape, 1.0 / max(1, number.size)) if found is None else found
    name = "objective" if "objective" in stats else "lp"
    told = "with weight" if found is not None else "not weighted yet"
    for ax, fit, shown, title in (
        (left, name, number, "all particles"),
        (right, "lp", number[count > 0], told),
    ):
        _dots(ax, shown, stats, fit, count)
        ax.set_title(title)
        _cycles(ax, "particle")
    if name == "objective":
        threshold_line(left, tree)


def _dots(
    ax: "Axes",
    number: NDArray[np.integer],
    stats: xr.Dataset,
    name: str,
    weight: FloatArray,
) -> None:
    """One statistic of some particles; nothing where it is not known yet."""
    ax.set_ylabel({"lp": "log density"}.get(name, name))
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if name not in stats:
        said = "not known before all\nparticles are there"
        ax.text(0.5, 0.5, said, ha="center", va="center", fontsize=NORMAL, transform=ax.transAxes)
        return
    values, mass = stats[name].values.ravel()[number], weight[number]
    some = mass > 0
    area = _DOT_AREA * mass[some] / weight.max()
    ax.scatter(number[some], values[some], s=area, color=theme().accent, alpha=0.7, lw=0)
    ax.scatter(number[~some], values[~some], s=14, color=theme().quiet, marker="x", lw=0.9)


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
    ax.axvspan(0.0, tune, color=theme().quiet, alpha=0.25, lw=0)
    # The first few cycles lie so deep that they would flatten all the rest; draws are all shown.
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
    if "diverging" in stats:
        bad = draw[stats["diverging"].isel(chain=index).values.astype(bool)]
        if bad.size:
            ax.plot(bad, [low] * bad.size, "|", color=theme().warn, ms=10, label="diverging")


def _cycles(ax: "Axes", what: str = "cycle") -> None:
    ax.set_xlabel(what)
    ax.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    ax.yaxis.get_offset_text().set_fontsize(7)


@in_style
def plot_ranks(
    table: xr.Dataset, path: str | PathLike[str] | None = None, overwrite: bool = False
) -> "Figure":
    """Log evidence over ranks, the held-out score below it, the best of each filled.

    Bars are two standard errors: of the evidence, both of its errors together; of the
    score, that of the difference to the best rank. Beside the title stands whether the best
    rank is at the edge of those tried, and whether errors are too large to decide.

    Parameters
    ----------
    table : xarray.Dataset
        A result of `select_rank`.
    path
        Picture to write; its suffix is the format.
    overwrite
        Whether to replace a picture that is there already.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If it is not such a table, or matplotlib is not installed.
    StoreError
        If the picture is there already.

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
    whole = "log_evidence" in table and "best" in table.attrs
    check_table(table, whole, "plot_ranks", "select_rank")
    scored = "held_out_log_score" in table
    computed = bool(table["log_evidence"].notnull().any())
    figure = new_figure(6.4, 5.2 if scored and computed else 3.2)
    axes = subplots(figure, scored + computed, 1, sharex=True)[:, 0]
    if computed:
        _evidence_curve(axes[0], table)
    if scored:
        errors = table["held_out_difference_error"].values
        _curve(axes[-1], table, "held_out_log_score", errors, table.attrs["best_held_out"])
        axes[-1].set_ylabel("mean log score of a cell (nats)")
        axes[-1].set_title("cells left out")
    axes[-1].set_xlabel("number of components")
    return save(figure, path, overwrite)


def _evidence_curve(axes: Any, table: xr.Dataset) -> None:
    """Draw the evidences that were computed, and circles around those within the errors."""
    errors = np.hypot(table["standard_error"].values, table["discretization_error"].values)
    _curve(axes, table, "log_evidence", errors, table.attrs["best"])
    what = "log evidence" if "bound" not in table.attrs else "log evidence, lower bound"
    axes.set_ylabel(f"{what} (nats)")
    axes.set_title("evidence")
    axes.set_title(_caution(table.attrs), loc="right", fontsize=SMALL, color=theme().warn)
    others = np.atleast_1d(table.attrs["not_distinguishable"])  # files keep lists as arrays
    for rank in others:
        value = float(table["log_evidence"].sel(rank=rank))
        axes.plot(
            [rank], [value], "o", ms=9, mfc="none", mec=theme().warn, label="within the errors"
        )
    if others.size:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[:1], labels[:1], loc="lower right")


def _caution(attrs: dict[str, Any]) -> str:
    """What to know before the best rank is taken."""
    if not attrs.get("decides", True):
        return "errors as large as the differences: not decided"
    end = attrs.get("at_edge")
    return f"best at the {end} rank tried: try {end[:-2]}r ones" if end else ""


def _curve(ax: "Axes", table: xr.Dataset, name: str, errors: FloatArray, best: int) -> None:
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
