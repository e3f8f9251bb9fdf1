"""The components of a factorization with their uncertainty, and one page about a run."""

from typing import TYPE_CHECKING, Final

import numpy as np
import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import (
    ACCENT,
    INK,
    FloatArray,
    bare,
    check_pixels,
    group,
    headline,
    new_figure,
    short_label,
    tidy,
)
from daskfactor.plots.traces import trace_plot
from daskfactor.results.align import align
from daskfactor.results.compare import intensity_shares
from daskfactor.results.schema import MOMENTS, factor_dims
from daskfactor.results.trace import draw_weights, is_particles, over_chains

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from numpy.typing import NDArray

_MOST_LABELS: Final = 40
"""Entries of which every one gets its label below the axis."""
_FEW_LABELS: Final = 8
"""Labels below the axis of more entries than that."""
_LINE: Final = 60
"""Letters that fit side by side below one axis."""


def factor_moments(
    tree: xr.DataTree, name: str, chain: int | None
) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation of factor ``W`` or ``H`` as (component, row or column).

    Of one chain, or with None of all chains together, which takes an aligned trace.
    Particles count by their weight.
    """
    if chain is None and "alignment" not in tree.children:
        raise OptionError(
            "components have no common order across chains: pass the number of one chain, or "
            "what align() makes of this trace"
        )
    if chain is None:
        moments = group(tree, MOMENTS).astype(np.float64)
        means = moments[[f"{name}_mean"]]
        mean = over_chains(tree, means)[f"{name}_mean"]
        between = over_chains(tree, (means - mean) ** 2)[f"{name}_mean"]
        variance = over_chains(tree, moments[[f"{name}_var"]])[f"{name}_var"] + between
    elif MOMENTS in tree.children:
        moments = group(tree, MOMENTS).isel(chain=chain)
        mean, variance = moments[f"{name}_mean"], moments[f"{name}_var"]
    else:
        mean, variance = _over_draws(tree, name, chain)
    each = (one.transpose("component", ...).values.astype(np.float64) for one in (mean, variance))
    return next(each), np.sqrt(next(each))


def _over_draws(tree: xr.DataTree, name: str, chain: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Mean and variance over the draws of a chain; those without weight are not read."""
    draws, weights = group(tree, "posterior")[name].isel(chain=chain), draw_weights(tree)
    if draws.sizes["draw"] == 0:
        raise OptionError("the run has no draws yet: resume it first")
    if weights is None:
        return draws.mean("draw"), draws.var("draw")
    kept = np.flatnonzero(weights[chain] > 0)
    if not kept.size:
        raise OptionError(f"no draw of chain {chain} has any weight: pass another chain")
    weighted = draws.isel(draw=kept).weighted(xr.DataArray(weights[chain][kept], dims="draw"))
    return weighted.mean("draw"), weighted.var("draw")


def _labelled(tree: xr.DataTree) -> xr.Dataset:
    """A group that has the labels of rows, columns and components."""
    return group(tree, MOMENTS if MOMENTS in tree.children else "posterior")


def with_order(tree: xr.DataTree, chain: int | None) -> tuple[xr.DataTree, int | None]:
    """A trace whose components can be shown, and the chain of it to show.

    A chain keeps the order of its components long enough; particles have none before
    they are aligned.
    """
    if not is_particles(tree):
        return tree, chain
    return (tree if "alignment" in tree.children else align(tree)), None


def components(
    tree: xr.DataTree,
    image_shape: tuple[int, int] | None = None,
    count: int = 6,
    chain: int | None = 0,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """Posterior mean of the strongest components, a band of one sd around it.

    One line of the figure per component: its column of W on the left (as a picture, if
    `image_shape` is given), its row of H on the right. One chain is shown because
    components have no common order across chains; of a trace that `align` has been
    through, ``chain=None`` shows all chains together, and in what share of their draws
    each component appears. Particles are aligned first, if they are not, and all are shown,
    by weight.

    Parameters
    ----------
    tree : xarray.DataTree
        A result of `sample`, `resume` or `open_run`.
    image_shape : (int, int), optional
        Height and width, if the rows of the data are the pixels of an image.
    count : int
        How many components, the one that carries most of the data first.
    chain : int, optional
        Position of the chain; None for all of them. Of particles always all.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If the tree holds no factors, `image_shape` does not fit, or matplotlib is missing.
    """
    tree, chain = with_order(tree, chain)
    w_mean, w_sd = factor_moments(tree, "W", chain)
    h_mean, h_sd = factor_moments(tree, "H", chain)
    rows = w_mean.shape[1]
    check_pixels(image_shape, rows, f"the factor W has {rows} rows")
    shares = intensity_shares(w_mean.T, h_mean, bool(min(w_mean.min(), h_mean.min()) < 0))
    names = _labelled(tree)["component"].values
    chosen = np.argsort(-shares, kind="stable")[:count]
    dims = factor_dims(tree)
    target = new_figure(9.0, 0.9 * len(chosen) + 0.9) if figure is None else figure
    axes: NDArray[np.object_] = target.subplots(
        len(chosen), 2, squeeze=False, width_ratios=(1, 3) if image_shape else (1, 1), sharex="col"
    )
    for (left, right), k in zip(axes, chosen, strict=True):
        if image_shape is None:
            _profile(left, w_mean[k], w_sd[k])
        else:
            left.imshow(w_mean[k].reshape(image_shape), cmap="gray", interpolation="nearest")
            bare(left, frame=True)
        _profile(right, h_mean[k], h_sd[k])
        told = f"{names[k]}\n{shares[k]:.1%}"
        if chain is None:
            told += f"\nin {float(group(tree, 'alignment')['share'][k]):.0%}"
        left.set_ylabel(told, rotation=0, ha="right", va="center", fontsize=8)
    for column, (name, dim) in enumerate(zip("WH", dims, strict=True)):
        headline(axes[0, column], f"{name}, by {dim}")
        if column or image_shape is None:
            _name_entries(axes[-1, column], tree, dim)
    return target.get_figure(root=True)


def _name_entries(ax: "Axes", tree: xr.DataTree, dim: str) -> None:
    """Write the labels of a dimension below an axis, all of them where there is room."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    moments = _labelled(tree)
    count = moments.sizes[dim]
    ax.set_xlabel(dim, fontsize=8)
    if dim not in moments.coords:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    labels = [short_label(label) for label in moments[dim].values]
    crowded = count > _MOST_LABELS
    ax.xaxis.set_major_locator(
        MaxNLocator(_FEW_LABELS, integer=True) if crowded else FixedLocator(range(count))
    )

    def label(position: float, _: int | None = None) -> str:
        at = round(position)
        return labels[at] if 0 <= at < count else ""

    ax.xaxis.set_major_formatter(FuncFormatter(label))
    shown = labels[:: max(1, count // _FEW_LABELS)] if crowded else labels
    if sum(map(len, shown)) > _LINE:  # side by side they would touch
        ax.tick_params(axis="x", labelrotation=45 if crowded else 90)


def _profile(ax: "Axes", mean: FloatArray, sd: FloatArray) -> None:
    position = np.arange(mean.size)
    signed = bool(mean.min() < 0)
    low = mean - sd if signed else np.maximum(mean - sd, 0)
    ax.fill_between(position, low, mean + sd, color=ACCENT, alpha=0.3, lw=0)
    ax.plot(position, mean, color=ACCENT, lw=0.8)
    if not signed:
        ax.set_ylim(bottom=0)
    ax.set_xlim(-0.5, mean.size - 0.5)
    tidy(ax, 6)


def overview(
    tree: xr.DataTree,
    image_shape: tuple[int, int] | None = None,
    count: int = 6,
    title: str | None = None,
) -> "Figure":
    """The trace of the log density above the strongest components; of particles, each by weight.

    Parameters are those of `trace_plot` and `components`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    tree, chain = with_order(tree, 0)
    shown = min(count, len(factor_moments(tree, "W", chain)[0]))
    figure = new_figure(9.0, 2.9 + 0.9 * shown)
    grid = figure.add_gridspec(2, 1, height_ratios=(2.6, 0.9 * shown + 0.3))
    upper = figure.add_subfigure(grid[0])
    lower = figure.add_subfigure(grid[1])
    trace_plot(tree, figure=upper)
    components(tree, image_shape=image_shape, count=count, chain=chain, figure=lower)
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    return figure
