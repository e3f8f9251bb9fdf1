"""Figures of a posterior of particles: masses, fit, distances, largest entries and scores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.plots.canvas import (
    LARGE,
    NORMAL,
    SMALL,
    FloatArray,
    bare,
    chain_colors,
    check_table,
    color_bar,
    component_titles,
    group,
    heaviest,
    in_style,
    label_line,
    legend,
    new_figure,
    particle_names,
    short_label,
    subplots,
    theme,
    threshold_line,
)
from daskfactor.plots.registry import figure
from daskfactor.results.align import component_positions
from daskfactor.results.compare import pairwise_distances
from daskfactor.results.schema import component_labels
from daskfactor.results.trace import Run, Trace, as_tree, effective_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MAX_NAMES: Final = 40
"""Largest number of particles whose names are written below an axis."""
_MARKERS: Final = "osD^vPX*"
_MAX_ROWS: Final = 3
"""Default number of components of `top_entries_plot`."""
_MAX_LINES: Final = 4
"""Largest number of lines of `scores_plot`."""
MIN_SPAN: Final = 0.1
"""Smallest range of the colors of a scaled Stein matrix, so that negligible entries are pale."""


@figure("weights", particles=True)
def weights_plot(tree: Trace, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Draw the mass of every particle, the largest first, and the fit of the particle below it.

    The fit is the objective, with the threshold of the model as a line, or else the log density.
    Particles without mass are pale.

    Parameters
    ----------
    tree : xarray.DataTree, str or Path
        A posterior of particles; the draws of other runs have equal masses.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the tree has no draws, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figures 13 and 14.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> figure = dfac.plots.weights_plot(modes)
    >>> len(figure.axes)
    2
    """
    run = Run.of(tree, "a mass of every draw")
    mass = run.masses
    values = mass.values.reshape(-1)
    order = np.argsort(-values, kind="stable")
    stats = group(run.tree, "sample_stats").sel(chain=mass["chain"], draw=mass["draw"])
    fit = next((name for name in ("objective", "lp") if name in stats), None)
    target = new_figure(7.2, 4.6 if fit else 2.6) if figure is None else figure
    axes = subplots(target, 2 if fit else 1, 1, sharex=True)[:, 0]
    at = np.arange(order.size)
    colors = np.where(values[order] > 0, theme().accent, theme().quiet).tolist()
    axes[0].bar(at, values[order], width=0.8, color=theme().accent)
    label_line(axes[0], 1 / at.size, f"equal masses, 1/{at.size}", theme().ink, lw=0.8, ls=":")
    axes[0].set_title(f"mass, equivalent to {effective_number(values):.1f} particles of equal mass")
    axes[0].set_ylabel("mass")
    if fit:
        heights = stats[fit].transpose("chain", "draw").values.reshape(-1)[order]
        axes[1].scatter(at, heights, c=colors, s=16)
        title = "objective" if fit == "objective" else "log density"
        axes[1].set_title(title)
        axes[1].set_ylabel(title)
        if fit == "objective":
            threshold_line(axes[1], run.tree)
    names = np.array(particle_names(mass))[order].tolist()
    if len(names) > MAX_NAMES:
        axes[-1].set_xticks([])
    else:
        crowded = max(map(len, names)) > 3 or len(names) > 24
        axes[-1].set_xticks(at, names, rotation=90 if crowded else 0)
    axes[-1].set_xlabel("particle, sorted by mass")
    return target.get_figure(root=True)


@figure("diversity", particles=True)
def diversity_plot(
    tree: Trace,
    of: Literal["W", "H", "both"] = "W",
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Draw the distances between all particles and the Stein matrix, in the same order.

    Similar particles are next to each other, so that modes appear as squares along the diagonal.
    The Stein matrix, which determines the masses of the particles, is divided by the square roots
    of its diagonal.

    Parameters
    ----------
    tree : xarray.DataTree, str or Path
        A posterior of particles, or another run with draws, which has only distances.
    of : "W", "H" or "both"
        Factor to compare, as for `pairwise_distances`: angles in degrees.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the tree has no draws, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figures 15 to 17.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> figure = dfac.plots.diversity_plot(modes)
    >>> len(figure.axes)
    4
    """
    tree = as_tree(tree)
    distances = pairwise_distances(tree, of)
    order = _similarity_order(distances.values)
    stein = _scaled_stein_matrix(tree, distances)
    target = new_figure(8.6 if stein is not None else 4.6, 4.0) if figure is None else figure
    axes = subplots(target, 1, 1 if stein is None else 2)[0]
    names = {"W": "W", "H": "H", "both": "W and H"}[of]
    near = distances.values[np.ix_(order, order)]
    image = axes[0].imshow(near, cmap="viridis", vmin=0.0, interpolation="nearest")
    axes[0].set_title(f"distance in {names}")
    label = "mean angle between components (degrees)"
    color_bar(target, image, axes[0], label, shrink=0.82, pad=0.02)
    if stein is not None:
        _stein_panel(target, axes[1], stein[np.ix_(order, order)])
    for ax in axes:
        _matrix_ticks(ax, np.array(particle_names(distances))[order].tolist())
    return target.get_figure(root=True)


def _stein_panel(target: "Figure | SubFigure", ax: "Axes", scaled: FloatArray) -> None:
    """Draw a Stein matrix with ones on its diagonal, on the scale of the other entries."""
    others = np.abs(scaled[~np.eye(len(scaled), dtype=bool)])
    largest = float(others.max(initial=0.0))
    top = max(largest, MIN_SPAN)
    image = ax.imshow(scaled, cmap="PuOr_r", vmin=-top, vmax=top, interpolation="nearest")
    note = "" if largest >= MIN_SPAN else f", at most {largest:.1g} off the diagonal"
    ax.set_title(f"Stein matrix{note}")
    options = {"shrink": 0.82, "pad": 0.02, "extend": "max" if top < 1.0 else "neither"}
    color_bar(target, image, ax, "divided by square roots of the diagonal", **options)


def _matrix_ticks(ax: "Axes", names: list[str]) -> None:
    """Label both axes of a matrix with the names of particles."""
    ax.tick_params(labelsize=6)
    if len(names) > MAX_NAMES:
        bare(ax, frame=True)
    else:
        ax.set_xticks(np.arange(len(names)), names, rotation=90)
        ax.set_yticks(np.arange(len(names)), names)
    ax.set_xlabel("particle")
    ax.set_ylabel("particle")


def _similarity_order(distances: FloatArray) -> NDArray[np.int64]:
    """Return an order with similar neighbors: the leaves of a tree of average linkage."""
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    if len(distances) < 3:
        return np.arange(len(distances))
    pairs = distances[np.triu_indices(len(distances), 1)]
    tree = optimal_leaf_ordering(linkage(pairs, "average"), pairs)
    return np.asarray(leaves_list(tree), dtype=np.int64)


def _scaled_stein_matrix(tree: xr.DataTree, distances: xr.DataArray) -> FloatArray | None:
    """Return the Stein matrix of the particles of a table, scaled to diagonal 1, or None."""
    if "stein" not in tree.children or "stein_matrix" not in tree["stein"].data_vars:
        return None
    stein = tree["stein"].to_dataset()
    stein_matrix = stein["stein_matrix"].transpose("draw", "other_draw")
    labels = distances["draw"].values
    for dim in ("draw", "other_draw"):
        if dim in stein.coords:
            stein_matrix = stein_matrix.sel({dim: labels})
    matrix = np.asarray(stein_matrix.values, dtype=np.float64)
    if matrix.shape != distances.shape:
        raise OptionError(
            f"the Stein matrix has {matrix.shape[0]} x {matrix.shape[1]} particles, but the trace "
            f"has {len(labels)}; select particles by label in the complete tree"
        )
    root = np.sqrt(np.maximum(np.diag(matrix), np.finfo(np.float64).tiny))
    return np.asarray(matrix / root / root[:, None])


@in_style
def top_entries_plot(
    top: xr.Dataset,
    components: Any = None,
    particles: int = 3,
    *,
    names: Sequence[str] | None = None,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Draw the largest entries of components in several particles side by side.

    The length of a bar is the size of the entry. Orange entries are in only one of the lists,
    light blue ones in some, blue ones in all.

    Parameters
    ----------
    top : xarray.Dataset
        Result of `top_entries`.
    components
        Labels of the components; by default the first three of `top`.
    particles : int
        Number of particles, those with the largest mass first.
    names : sequence of str, optional
        Titles of the components.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the dataset is not a result of `top_entries`, an argument is invalid, or matplotlib is
        not installed.

    References
    ----------
    Masood and Doshi-Velez, figure 5.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> figure = dfac.plots.top_entries_plot(dfac.top_entries(modes, count=3))
    >>> len(figure.axes)
    6
    """
    is_complete = {"label", "value", "share"} <= set(top.data_vars)
    check_table(top, is_complete, "top_entries_plot", "top_entries")
    mass = top["weight"].transpose("chain", "draw")
    rows = heaviest(mass, whole_number("particles", particles, 1))
    chosen = component_positions(top, components)[: _MAX_ROWS if components is None else None]
    labels = component_labels(top)
    titles = component_titles([labels[k] for k in chosen], names)
    lists = top[["label", "value"]].stack(particle=("chain", "draw"), create_index=False)
    lists = lists.transpose("particle", "component", "rank")
    count = top.sizes["rank"]
    size = 2.5 * rows.size + 0.4, (0.17 * count + 0.55) * len(chosen) + 0.5
    target = new_figure(*size) if figure is None else figure
    axes = subplots(target, len(chosen), rows.size)
    particle_labels = particle_names(mass)
    for line, k, title in zip(axes, chosen, titles, strict=True):
        labels, values = (lists[name].values[rows, k] for name in ("label", "value"))
        counts = _list_counts(labels, values)
        longest = float(np.abs(values).max()) or 1.0
        for ax, at, entry_names, sizes, list_counts in zip(
            line, rows, labels, values, counts, strict=True
        ):
            colors = [
                {1: theme().other, rows.size: theme().accent}.get(n, theme().between)
                for n in list_counts
            ]
            _bars(ax, entry_names, sizes / longest, colors)
            weight = mass.values.reshape(-1)[at]
            ax.set_title(f"particle {particle_labels[at]}, mass {weight:.3f}", fontsize=NORMAL)
        line[0].set_ylabel(title, fontsize=LARGE)
    if rows.size > 1:
        _legend(target, rows.size)
    return target.get_figure(root=True)


def _list_counts(labels: NDArray[Any], values: FloatArray) -> list[list[int]]:
    """Return, for each entry of each list, the number of lists with it; zeros count as absent."""
    lists = [set(row[sizes != 0].tolist()) for row, sizes in zip(labels, values, strict=True)]
    return [[sum(label in one for one in lists) for label in row] for row in labels.tolist()]


def _bars(ax: "Axes", labels: NDArray[Any], lengths: FloatArray, colors: list[str]) -> None:
    """Draw bars from the top down, with their names to the right."""
    at = np.arange(labels.size)
    ax.barh(at, np.abs(lengths), height=0.72, color=colors)
    for y, label, length in zip(at, labels, lengths, strict=True):
        text = short_label(label) if length >= 0 else f"{short_label(label)} (−)"
        ax.annotate(
            text,
            (abs(length), y),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            color=theme().ink if length else theme().quiet,
        )
    ax.set_ylim(labels.size - 0.4, -0.6)
    ax.set_xlim(0.0, 1.9)
    bare(ax)
    ax.spines["left"].set(visible=True, color=theme().quiet)


def _legend(figure: "Figure | SubFigure", lists: int) -> None:
    """Add the legend of the colors of entries."""
    from matplotlib.patches import Patch

    texts = {
        theme().accent: "in all lists",
        theme().between: "in some lists",
        theme().other: "in one list",
    }
    if lists == 2:
        del texts[theme().between]
    handles = [Patch(color=color, label=text) for color, text in texts.items()]
    legend(figure, handles, ncols=len(texts), fontsize=NORMAL)


@in_style
def scores_plot(scores: xr.Dataset, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Draw the scores of all particles by class, with a dotted line for the best of each class.

    A dot is a particle, whose area grows with its mass; a short bar is the mean. If a particle is
    best in one class only, its line is low in the others. At most four particles have a line: those
    that are best in most classes, then those with the largest difference to the best.

    Parameters
    ----------
    scores : xarray.Dataset
        Result of `downstream`.
    figure : matplotlib Figure or SubFigure, optional
        Figure to draw into; by default a new one.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the dataset is not a result of `downstream`, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figures 6 and 8.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> def error(W, H):
    ...     return np.mean((V - W @ H) ** 2)
    >>> figure = dfac.plots.scores_plot(dfac.downstream(modes, error, best="lowest"))
    >>> len(figure.axes)
    1
    """
    is_complete = {"value", "best_draw", "best_chain"} <= set(scores.data_vars)
    check_table(scores, is_complete, "scores_plot", "downstream")
    names = [str(name) for name in scores["score"].values]
    mass = scores["weight"].transpose("chain", "draw")
    values = scores["value"].transpose("chain", "draw", "score").values.reshape(mass.size, -1)
    best = _best_positions(scores)
    target = new_figure(2.9 + 1.1 * max(len(names), 2), 3.6) if figure is None else figure
    ax = subplots(target, 1, 1)[0, 0]
    at = np.arange(len(names))
    share = mass.values.reshape(-1) / mass.values.max()
    spread = 0.26 * _jitter(mass.size)
    for k in at:
        ax.scatter(
            k + spread,
            values[:, k],
            s=6 + 34 * share,
            color=theme().quiet,
            alpha=0.75,
            lw=0,
            zorder=1,
        )
    ax.hlines(scores["mean"].values, at - 0.3, at + 0.3, color=theme().ink, lw=1.2, zorder=2)
    particle_labels = particle_names(mass)
    with_line = _particles_with_line(best, values)
    for number, (particle, color) in enumerate(
        zip(dict.fromkeys(best), chain_colors(len(set(best))), strict=True)
    ):
        won = [k for k, one in enumerate(best) if one == particle]
        marker = _MARKERS[number % len(_MARKERS)]
        label = f"{particle_labels[particle]}: best in {', '.join(names[k] for k in won)}"
        x = at + spread[particle]
        if particle in with_line:
            line: dict[str, Any] = {
                "ls": ":",
                "lw": 1.3,
                "ms": 4,
                "mfc": ax.get_facecolor(),
                "zorder": 3,
            }
            ax.plot(x, values[particle], marker, color=color, **line)
        best_of: dict[str, Any] = {"ls": "none", "ms": 7, "zorder": 5, "label": label}
        ax.plot(x[won], values[particle, won], marker, color=color, **best_of)
    slanted = max(map(len, names)) > 12
    ax.set_xticks(at, names, rotation=20 if slanted else 0, ha="right" if slanted else "center")
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylabel("score")
    ax.set_title("score of every particle (bar: mean)")
    options = {"title": "particle", "title_fontsize": SMALL, "alignment": "left"}
    legend(target, loc="outside right upper", **options)
    return target.get_figure(root=True)


def _best_positions(scores: xr.Dataset) -> list[int]:
    """Return the position of the best particle of every score, chain after chain."""
    chain, draw = (
        scores.indexes[dim].get_indexer(pd.Index(scores[f"best_{dim}"].values))
        for dim in ("chain", "draw")
    )
    if min(chain.min(initial=0), draw.min(initial=0)) < 0:
        raise OptionError(
            "scores must contain the best particle of every score; select particles before "
            "downstream(), not after it"
        )
    return [int(at) for at in chain * scores.sizes["draw"] + draw]


def _particles_with_line(best: list[int], values: FloatArray) -> list[int]:
    """Return those of the best particles that get a line."""
    highest = values[best, np.arange(len(best))]

    def rank(particle: int) -> tuple[int, float]:
        return -best.count(particle), -float(np.nanmax(np.abs(values[particle] - highest)))

    return sorted(set(best), key=rank)[:_MAX_LINES]


def _jitter(count: int) -> FloatArray:
    """Return numbers from -1 to 1, with distant neighbors, that are the same in every figure."""
    golden = (np.arange(count) * 0.6180339887498949) % 1.0
    return np.asarray(2.0 * golden - 1.0)
