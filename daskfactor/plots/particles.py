"""A posterior of particles: masses, fit, distances, their largest entries, their scores in use."""

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
    legend,
    new_figure,
    note_line,
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

MOST_NAMES: Final = 40
"""Particles of which every one gets its name below an axis."""
_MARKERS: Final = "osD^vPX*"
_MOST_ROWS: Final = 3
_MOST_LINES: Final = 4
LEAST_SPAN: Final = 0.1
"""Of the colors of a scaled Stein matrix: what is less is next to nothing, and looks it."""


@figure("weights", particles=True)
def weights_plot(tree: Trace, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Mass of every particle, the largest first, and below it how well the particle fits.

    That is its objective, with the threshold of the model as a line, or without objectives
    the log density. Particles without mass are pale.

    Parameters
    ----------
    tree : xarray.DataTree, str or Path
        A posterior of particles; of other runs draws weigh the same.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If the tree holds no draws, or matplotlib is not installed.

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
    note_line(axes[0], 1 / at.size, f"equal masses, 1/{at.size}", theme().ink, lw=0.8, ls=":")
    told = f"mass, spread as far as over {effective_number(values):.1f} particles of equal mass"
    axes[0].set_title(told)
    axes[0].set_ylabel("mass")
    if fit:
        each = stats[fit].transpose("chain", "draw").values.reshape(-1)[order]
        axes[1].scatter(at, each, c=colors, s=16)
        title = "objective" if fit == "objective" else "log density"
        axes[1].set_title(title)
        axes[1].set_ylabel(title)
        if fit == "objective":
            threshold_line(axes[1], run.tree)
    names = np.array(particle_names(mass))[order].tolist()
    if len(names) > MOST_NAMES:
        axes[-1].set_xticks([])
    else:
        long = max(map(len, names)) > 3 or len(names) > 24
        axes[-1].set_xticks(at, names, rotation=90 if long else 0)
    axes[-1].set_xlabel("particle, the largest mass first")
    return target.get_figure(root=True)


@figure("diversity", particles=True)
def diversity_plot(
    tree: Trace,
    of: Literal["W", "H", "both"] = "W",
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Draw distances between all particles, and beside them the Stein matrix, in one order.

    The order puts particles next to each other that are alike, so that modes are squares
    along the diagonal. The Stein matrix is divided by the roots of its diagonal; the masses
    of particles follow from it.

    Parameters
    ----------
    tree : xarray.DataTree, str or Path
        A posterior of particles, or another run with draws: it has distances alone.
    of : "W", "H" or "both"
        As for `pairwise_distances`: angles in degrees.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If the tree holds no draws, or matplotlib is not installed.

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
    order = _alike(distances.values)
    stein = _stein(tree, distances)
    target = new_figure(8.6 if stein is not None else 4.6, 4.0) if figure is None else figure
    axes = subplots(target, 1, 1 if stein is None else 2)[0]
    what = {"W": "W", "H": "H", "both": "W and H"}[of]
    near = distances.values[np.ix_(order, order)]
    image = axes[0].imshow(near, cmap="viridis", vmin=0.0, interpolation="nearest")
    axes[0].set_title(f"distance in {what}")
    told = "mean angle of components (degrees)"
    color_bar(target, image, axes[0], told, shrink=0.82, pad=0.02)
    if stein is not None:
        _stein_panel(target, axes[1], stein[np.ix_(order, order)])
    for ax in axes:
        _matrix_ticks(ax, np.array(particle_names(distances))[order].tolist())
    return target.get_figure(root=True)


def _stein_panel(target: "Figure | SubFigure", ax: "Axes", scaled: FloatArray) -> None:
    """The colors reach to the largest entry off the diagonal, which is 1."""
    apart = np.abs(scaled[~np.eye(len(scaled), dtype=bool)])
    most = float(apart.max(initial=0.0))
    top = max(most, LEAST_SPAN)
    image = ax.imshow(scaled, cmap="PuOr_r", vmin=-top, vmax=top, interpolation="nearest")
    told = "" if most >= LEAST_SPAN else f", at most {most:.1g} off the diagonal"
    ax.set_title(f"Stein matrix{told}")
    options = {"shrink": 0.82, "pad": 0.02, "extend": "max" if top < 1.0 else "neither"}
    color_bar(target, image, ax, "divided by roots of the diagonal", **options)


def _matrix_ticks(ax: "Axes", names: list[str]) -> None:
    ax.tick_params(labelsize=6)
    if len(names) > MOST_NAMES:
        bare(ax, frame=True)
    else:
        ax.set_xticks(np.arange(len(names)), names, rotation=90)
        ax.set_yticks(np.arange(len(names)), names)
    ax.set_xlabel("particle")
    ax.set_ylabel("particle")


def _alike(distances: FloatArray) -> NDArray[np.int64]:
    """An order in which neighbours are alike: the leaves of a tree of mean distances."""
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    if len(distances) < 3:
        return np.arange(len(distances))
    pairs = distances[np.triu_indices(len(distances), 1)]
    tree = optimal_leaf_ordering(linkage(pairs, "average"), pairs)
    return np.asarray(leaves_list(tree), dtype=np.int64)


def _stein(tree: xr.DataTree, distances: xr.DataArray) -> FloatArray | None:
    """The Stein matrix of the particles of a table, ones on its diagonal; None without one."""
    if "stein" not in tree.children or "stein_matrix" not in tree["stein"].data_vars:
        return None
    found = tree["stein"]["stein_matrix"].transpose("draw", "other_draw")
    known = tree["stein"].to_dataset()
    labels = distances["draw"].values
    for dim in ("draw", "other_draw"):
        if dim in known.coords:
            found = found.sel({dim: labels})
    matrix = np.asarray(found.values, dtype=np.float64)
    if matrix.shape != distances.shape:
        raise OptionError(
            f"the Stein matrix is of {matrix.shape[0]} x {matrix.shape[1]} particles, the trace "
            f"has {len(labels)}; select particles by their labels in the whole tree"
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
    """The largest entries of a component in several particles, side by side.

    A bar is as long as the entry is large. Orange is an entry that only one of the lists
    shown has, light blue one that some have, blue one that all have.

    Parameters
    ----------
    top : xarray.Dataset
        What `top_entries` returned.
    components
        Labels of the components; by default the first three of `top`.
    particles : int
        How many, those of the largest mass first.
    names : sequence of str, optional
        Titles of the components.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If it is not such a table, an argument does not fit, or matplotlib is not installed.

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
    whole = {"label", "value", "share"} <= set(top.data_vars)
    check_table(top, whole, "top_entries_plot", "top_entries")
    mass = top["weight"].transpose("chain", "draw")
    rows = heaviest(mass, whole_number("particles", particles, 1))
    chosen = component_positions(top, components)[: _MOST_ROWS if components is None else None]
    labels = component_labels(top)
    titles = component_titles([labels[k] for k in chosen], names)
    lists = top[["label", "value"]].stack(particle=("chain", "draw"), create_index=False)
    lists = lists.transpose("particle", "component", "rank")
    count = top.sizes["rank"]
    size = 2.5 * rows.size + 0.4, (0.17 * count + 0.55) * len(chosen) + 0.5
    target = new_figure(*size) if figure is None else figure
    axes = subplots(target, len(chosen), rows.size)
    called = particle_names(mass)
    for line, k, title in zip(axes, chosen, titles, strict=True):
        labels, values = (lists[name].values[rows, k] for name in ("label", "value"))
        seen = _times(labels, values)
        longest = float(np.abs(values).max()) or 1.0
        for ax, at, own, sizes, times in zip(line, rows, labels, values, seen, strict=True):
            colors = [
                {1: theme().other, rows.size: theme().accent}.get(n, theme().between) for n in times
            ]
            _bars(ax, own, sizes / longest, colors)
            weight = mass.values.reshape(-1)[at]
            ax.set_title(f"particle {called[at]}, mass {weight:.3f}", fontsize=NORMAL)
        line[0].set_ylabel(title, fontsize=LARGE)
    if rows.size > 1:
        _legend(target, rows.size)
    return target.get_figure(root=True)


def _times(labels: NDArray[Any], values: FloatArray) -> list[list[int]]:
    """In how many of the lists each entry of each list is; entries of 0 are in none."""
    lists = [set(own[sizes != 0].tolist()) for own, sizes in zip(labels, values, strict=True)]
    return [[sum(label in one for one in lists) for label in own] for own in labels.tolist()]


def _bars(ax: "Axes", labels: NDArray[Any], lengths: FloatArray, colors: list[str]) -> None:
    """Bars from the top down, what they are called inside the frame on their right."""
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
    from matplotlib.patches import Patch

    told = {
        theme().accent: "in all of these lists",
        theme().between: "in some",
        theme().other: "in this one alone",
    }
    if lists == 2:
        del told[theme().between]
    handles = [Patch(color=color, label=text) for color, text in told.items()]
    legend(figure, handles, ncols=len(told), fontsize=NORMAL)


@in_style
def scores_plot(scores: xr.Dataset, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Draw scores of all particles, class by class; a dotted line follows the best of each class.

    A dot is a particle, the larger the more mass it has, the short bar the mean. A particle
    that is best in one class and not in the others shows as a line that falls off. Of more
    than four particles that are best somewhere, lines follow those that are so most often,
    or fall off furthest.

    Parameters
    ----------
    scores : xarray.Dataset
        What `downstream` returned.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If it is not such a table, or matplotlib is not installed.

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
    whole = {"value", "best_draw", "best_chain"} <= set(scores.data_vars)
    check_table(scores, whole, "scores_plot", "downstream")
    names = [str(name) for name in scores["score"].values]
    mass = scores["weight"].transpose("chain", "draw")
    values = scores["value"].transpose("chain", "draw", "score").values.reshape(mass.size, -1)
    best = _best_positions(scores)
    target = new_figure(2.9 + 1.1 * max(len(names), 2), 3.6) if figure is None else figure
    ax = subplots(target, 1, 1)[0, 0]
    at = np.arange(len(names))
    share = mass.values.reshape(-1) / mass.values.max()
    spread = 0.26 * _even(mass.size)
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
    called = particle_names(mass)
    followed = _followed(best, values)
    for number, (particle, color) in enumerate(
        zip(dict.fromkeys(best), chain_colors(len(set(best))), strict=True)
    ):
        won = [k for k, one in enumerate(best) if one == particle]
        marker = _MARKERS[number % len(_MARKERS)]
        told = f"{called[particle]}: best in {', '.join(names[k] for k in won)}"
        x = at + spread[particle]
        if particle in followed:
            line: dict[str, Any] = {
                "ls": ":",
                "lw": 1.3,
                "ms": 4,
                "mfc": ax.get_facecolor(),
                "zorder": 3,
            }
            ax.plot(x, values[particle], marker, color=color, **line)
        best_of: dict[str, Any] = {"ls": "none", "ms": 7, "zorder": 5, "label": told}
        ax.plot(x[won], values[particle, won], marker, color=color, **best_of)
    long = max(map(len, names)) > 12
    ax.set_xticks(at, names, rotation=20 if long else 0, ha="right" if long else "center")
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylabel("score")
    ax.set_title("score of every particle; bar: mean")
    of_names = {"title": "particle", "title_fontsize": SMALL, "alignment": "left"}
    legend(target, loc="outside right upper", **of_names)
    return target.get_figure(root=True)


def _best_positions(scores: xr.Dataset) -> list[int]:
    """Position of the best particle of every score, chains one after the other."""
    chain, draw = (
        scores.indexes[dim].get_indexer(pd.Index(scores[f"best_{dim}"].values))
        for dim in ("chain", "draw")
    )
    if min(chain.min(initial=0), draw.min(initial=0)) < 0:
        raise OptionError(
            "the best particle of a score is not among those of the dataset; select particles "
            "before downstream, not after it"
        )
    return [int(at) for at in chain * scores.sizes["draw"] + draw]


def _followed(best: list[int], values: FloatArray) -> list[int]:
    """Which of the particles that are best somewhere get a line."""
    highest = values[best, np.arange(len(best))]

    def rank(particle: int) -> tuple[int, float]:
        return -best.count(particle), -float(np.nanmax(np.abs(values[particle] - highest)))

    return sorted(set(best), key=rank)[:_MOST_LINES]


def _even(count: int) -> FloatArray:
    """Numbers from -1 to 1 that neighbours are far apart in, the same in every figure."""
    golden = (np.arange(count) * 0.6180339887498949) % 1.0
    return np.asarray(2.0 * golden - 1.0)
