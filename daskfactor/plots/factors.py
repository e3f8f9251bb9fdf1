"""The components of a factorization with their uncertainty."""

from typing import TYPE_CHECKING, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import ACCENT, INK, group, new_figure, short_label, tidy
from daskfactor.results.align import align
from daskfactor.results.schema import factor_dims
from daskfactor.results.trace import draw_weights, is_particles, over_chains

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FloatArray = NDArray[np.float64]

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
    if chain is None:
        return _pooled_moments(tree, name)
    if "posterior_moments" in tree.children:
        moments = group(tree, "posterior_moments").isel(chain=chain)
        mean, variance = moments[f"{name}_mean"], moments[f"{name}_var"]
    else:
        draws = group(tree, "posterior")[name].isel(chain=chain)
        if draws.sizes["draw"] == 0:
            raise OptionError("the run has no draws yet: resume it first")
        mean, variance = _over_draws(draws, draw_weights(tree), chain)
    order = ("component", ...)
    return (
        np.asarray(mean.transpose(*order).values, dtype=np.float64),
        np.sqrt(np.asarray(variance.transpose(*order).values, dtype=np.float64)),
    )


def _over_draws(
    draws: xr.DataArray, weights: FloatArray | None, chain: int
) -> tuple[xr.DataArray, xr.DataArray]:
    """Mean and variance over the draws of a chain; those without weight are not read."""
    if weights is None:
        return draws.mean("draw"), draws.var("draw")
    kept = np.flatnonzero(weights[chain] > 0)
    if not kept.size:
        raise OptionError(f"no draw of chain {chain} has any weight: pass another chain")
    masses = xr.DataArray(weights[chain][kept], dims="draw")
    weighted = draws.isel(draw=kept).weighted(masses)
    return weighted.mean("draw"), weighted.var("draw")


def _pooled_moments(tree: xr.DataTree, name: str) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation over the draws of all chains."""
    if "alignment" not in tree.children:
        raise OptionError(
            "components have no common order across chains: pass the number of one chain, or "
            "what align() makes of this trace"
        )
    moments = group(tree, "posterior_moments").astype(np.float64)
    means = moments[[f"{name}_mean"]]
    mean = over_chains(tree, means)[f"{name}_mean"]
    between = over_chains(tree, (means - mean) ** 2)[f"{name}_mean"]
    variance = over_chains(tree, moments[[f"{name}_var"]])[f"{name}_var"] + between
    order = ("component", ...)
    return (
        np.asarray(mean.transpose(*order).values),
        np.sqrt(np.asarray(variance.transpose(*order).values)),
    )


def _names(tree: xr.DataTree) -> NDArray[np.object_]:
    """Numbers of the components, or their names where they have some."""
    for name in ("posterior_moments", "posterior"):
        if name in tree.children:
            return np.asarray(group(tree, name)["component"].values, dtype=object)
    raise OptionError("the run has no draws yet: resume it first")


def component_shares(w_mean: FloatArray, h_mean: FloatArray) -> FloatArray:
    """Share of the total intensity sum_ij (WH)_ij that each component carries, (K,).

    Where factors are real-valued, and parts cancel, the share of the sum of squares
    sum_k sum_ij (w_ik h_kj)^2.
    """
    if min(w_mean.min(), h_mean.min()) < 0:
        w_mean, h_mean = w_mean**2, h_mean**2
    weight = w_mean.sum(axis=1) * h_mean.sum(axis=1)
    total = float(weight.sum())
    return weight / total if total > 0 else np.full(weight.shape, 1.0 / weight.size)


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
    if image_shape is not None and image_shape[0] * image_shape[1] != w_mean.shape[1]:
        raise OptionError(
            f"image_shape {image_shape} has {image_shape[0] * image_shape[1]} pixels, "
            f"the factor W has {w_mean.shape[1]} rows"
        )
    shares = component_shares(w_mean, h_mean)
    names = _names(tree)
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
            left.set_xticks([])
            left.set_yticks([])
        _profile(right, h_mean[k], h_sd[k])
        told = f"{names[k]}\n{shares[k]:.1%}"
        if chain is None:
            told += f"\nin {float(group(tree, 'alignment')['share'][k]):.0%}"
        left.set_ylabel(told, rotation=0, ha="right", va="center", fontsize=8)
    for column, (name, dim) in enumerate(zip("WH", dims, strict=True)):
        axes[0, column].set_title(f"{name}, by {dim}", loc="left", fontsize=9, color=INK)
        if column or image_shape is None:
            _name_entries(axes[-1, column], tree, dim)
    return target.get_figure(root=True)


def _name_entries(ax: "Axes", tree: xr.DataTree, dim: str) -> None:
    """Write the labels of a dimension below an axis, all of them where there is room."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    name = next(name for name in ("posterior_moments", "posterior") if name in tree.children)
    moments = group(tree, name)
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
