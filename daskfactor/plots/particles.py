"""A posterior of particles: their masses, how well they fit, how far apart they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import ACCENT, INK, QUIET, WARN, group, new_figure, tidy
from daskfactor.results.compare import pairwise_distances
from daskfactor.results.trace import Trace, as_tree, draw_masses, effective_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FloatArray = NDArray[np.float64]

MOST_NAMES: Final = 40
"""Particles of which every one gets its name below an axis."""
LEAST_SPAN: Final = 0.1
"""Of the colors of a scaled Stein matrix: what is less is next to nothing, and looks it."""


def heaviest(mass: xr.DataArray, count: int) -> NDArray[np.int64]:
    """Positions (over chains and draws) of the draws of largest mass, in descending order.

    Of draws that all weigh the same, some at even distances.
    """
    values = mass.values.reshape(-1)
    count = min(count, values.size)
    if np.ptp(values) <= 1e-12:
        return np.linspace(0, values.size - 1, count).round().astype(np.int64)
    return np.asarray(np.argsort(-values, kind="stable")[:count], dtype=np.int64)


def particle_names(mass: xr.DataArray) -> list[str]:
    """What every draw is called, chains one after the other."""
    chains, draws = mass["chain"].values, mass["draw"].values
    if chains.size == 1:
        return [str(draw) for draw in draws]
    return [f"{chain}:{draw}" for chain in chains for draw in draws]


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

    Raises
    ------
    OptionError
        If the tree holds no draws, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figures 13 and 14.
    """
    tree = as_tree(tree)
    mass = draw_masses(tree)
    values = mass.values.reshape(-1)
    order = np.argsort(-values, kind="stable")
    stats = group(tree, "sample_stats").sel(chain=mass["chain"], draw=mass["draw"])
    fit = next((name for name in ("objective", "lp") if name in stats), None)
    target = new_figure(7.2, 4.6 if fit else 2.6) if figure is None else figure
    axes = target.subplots(2 if fit else 1, 1, sharex=True, squeeze=False)[:, 0]
    at = np.arange(order.size)
    colors = np.where(values[order] > 0, ACCENT, QUIET).tolist()
    axes[0].bar(at, values[order], width=0.8, color=ACCENT)
    axes[0].axhline(1 / at.size, color=INK, lw=0.8, ls=":")
    axes[0].annotate(
        f"equal masses, 1/{at.size}",
        (1.0, 1 / at.size),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=7,
        color=INK,
    )
    told = f"mass, spread as far as over {effective_number(values):.1f} particles of equal mass"
    axes[0].set_title(told, loc="left", fontsize=9, color=INK)
    axes[0].set_ylabel("mass", fontsize=8)
    if fit:
        each = stats[fit].transpose("chain", "draw").values.reshape(-1)[order]
        axes[1].scatter(at, each, c=colors, s=16)
        title = "objective" if fit == "objective" else "log density"
        axes[1].set_title(title, loc="left", fontsize=9, color=INK)
        axes[1].set_ylabel(title, fontsize=8)
        _threshold(axes[1], tree, fit)
    _name_ticks(axes[-1], particle_names(mass), order)
    axes[-1].set_xlabel("particle, the largest mass first", fontsize=8)
    for ax in axes:
        tidy(ax)
    return target.get_figure(root=True)


def _threshold(ax: "Axes", tree: xr.DataTree, fit: str) -> None:
    """The line above which a factorization is not good enough, if the model has one."""
    constants = group(tree, "constant_data") if "constant_data" in tree.children else {}
    if fit != "objective" or "threshold" not in constants:
        return
    level = float(constants["threshold"])
    ax.axhline(level, color=WARN, lw=1.0, ls="--")
    ax.annotate(
        "threshold",
        (1.0, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=7,
        color=WARN,
        bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1.0},
    )
    ax.margins(y=0.15)


def _name_ticks(ax: "Axes", names: Sequence[str], order: NDArray[np.int64]) -> None:
    """Names below an axis, if there is room for all of them."""
    if order.size > MOST_NAMES:
        ax.set_xticks([])
        return
    long = max(len(name) for name in names) > 3 or order.size > 24
    shown = [names[at] for at in order]
    ax.set_xticks(np.arange(order.size), shown, rotation=90 if long else 0)


def diversity_plot(
    tree: Trace,
    of: Literal["W", "H", "both"] = "W",
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Distances between all particles, and beside them the Stein matrix, in one order.

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

    Raises
    ------
    OptionError
        If the tree holds no draws, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figures 15 to 17.
    """
    tree = as_tree(tree)
    distances = pairwise_distances(tree, of)
    order = _alike(distances.values)
    stein = _stein(tree, distances)
    target = new_figure(8.6 if stein is not None else 4.6, 4.0) if figure is None else figure
    axes = target.subplots(1, 1 if stein is None else 2, squeeze=False)[0]
    what = {"W": "W", "H": "H", "both": "W and H"}[of]
    _heat(axes[0], distances.values[np.ix_(order, order)], "viridis", (0.0, None))
    axes[0].set_title(f"distance in {what}", loc="left", fontsize=9, color=INK)
    _bar(target, axes[0], "mean angle of components (degrees)", "neither")
    if stein is not None:
        _stein_panel(target, axes[1], stein[np.ix_(order, order)])
    for ax in axes:
        names = np.array(_axis_names(distances))[order]
        _matrix_ticks(ax, names.tolist())
    return target.get_figure(root=True)


def _heat(
    ax: "Axes", table: FloatArray, cmap: str, span: tuple[float | None, float | None]
) -> None:
    ax.imshow(table, cmap=cmap, vmin=span[0], vmax=span[1], interpolation="nearest")


def _bar(target: "Figure | SubFigure", ax: "Axes", told: str, extend: str) -> None:
    """What the colors of a table mean, on its right."""
    bar = target.colorbar(ax.images[0], ax=ax, shrink=0.82, pad=0.02, extend=extend)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, colors=INK)
    bar.set_label(told, fontsize=8, color=INK)


def _stein_panel(target: "Figure | SubFigure", ax: "Axes", scaled: FloatArray) -> None:
    """The colors reach to the largest entry off the diagonal, which is 1."""
    apart = np.abs(scaled[~np.eye(len(scaled), dtype=bool)])
    most = float(apart.max(initial=0.0))
    top = max(most, LEAST_SPAN)
    _heat(ax, scaled, "PuOr_r", (-top, top))
    told = "" if most >= LEAST_SPAN else f", at most {most:.1g} off the diagonal"
    ax.set_title(f"Stein matrix{told}", loc="left", fontsize=9, color=INK)
    _bar(target, ax, "divided by roots of the diagonal", "max" if top < 1.0 else "neither")


def _axis_names(distances: xr.DataArray) -> list[str]:
    chains, draws = distances["chain"].values, distances["draw"].values
    if np.unique(chains).size == 1:
        return [str(draw) for draw in draws]
    return [f"{chain}:{draw}" for chain, draw in zip(chains, draws, strict=True)]


def _matrix_ticks(ax: "Axes", names: list[str]) -> None:
    ax.tick_params(labelsize=6, colors=INK, length=2)
    if len(names) <= MOST_NAMES:
        ax.set_xticks(np.arange(len(names)), names, rotation=90)
        ax.set_yticks(np.arange(len(names)), names)
    else:
        ax.set_xticks([])
        ax.set_yticks([])
    ax.set_xlabel("particle", fontsize=8)
    ax.set_ylabel("particle", fontsize=8)


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
