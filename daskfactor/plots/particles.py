"""Figures of a posterior of particles: masses, fit and distances."""

from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import (
    FloatArray,
    bare,
    color_bar,
    group,
    label_line,
    new_figure,
    particle_names,
    subplots,
    theme,
    threshold_line,
)
from daskfactor.plots.registry import figure
from daskfactor.results.compare import pairwise_distances
from daskfactor.runs.trace import Run, Trace, as_tree, effective_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MAX_NAMES: Final = 40
"""Largest number of particles whose names are written below an axis."""
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
