"""The components of a factorization with their uncertainty, one page about a run, and panels.

Panels are pictures side by side: what was there, left, came back; what several particles say.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import (
    ACCENT,
    INK,
    FloatArray,
    bare,
    check_pixels,
    color_bar,
    component_titles,
    group,
    headline,
    heaviest,
    new_figure,
    particle_names,
    short_label,
    tidy,
)
from daskfactor.plots.traces import trace_plot
from daskfactor.results.align import align, aligned_trace, component_positions, law_of, unit_size
from daskfactor.results.compare import intensity_shares
from daskfactor.results.schema import MOMENTS, factor_dims
from daskfactor.results.trace import (
    Trace,
    draw_masses,
    draw_weights,
    each_draw,
    is_particles,
    over_chains,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage

MOST_COMPONENTS: Final = 10
_PICTURE: Final = 1.15
_STEPS: Final = (1.5, 0.55)
_ERASED_COLOR: Final = "#e8b04a"
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
    mass = np.ones(draws.sizes["draw"]) if weights is None else weights[chain]
    kept = np.flatnonzero(mass > 0)
    if not kept.size:
        raise OptionError(f"no draw of chain {chain} has any weight: pass another chain")
    if kept.size < mass.size:
        draws, mass = draws.isel(draw=kept), mass[kept]
    if (mass == mass[0]).all():
        return draws.mean("draw"), draws.var("draw")
    weighted = draws.weighted(xr.DataArray(mass, dims="draw"))
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


def _stack(images: ArrayLike, name: str) -> FloatArray:
    stack = np.asarray(images, dtype=np.float64)
    if stack.ndim != 3 or 0 in stack.shape:
        raise OptionError(
            f"{name} must be a stack of images (picture, height, width), got shape {stack.shape}"
        )
    return stack


def faces_panel(
    original: ArrayLike,
    erased: ArrayLike,
    restored: ArrayLike,
    sd: ArrayLike,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    white: float | None = None,
) -> "Figure":
    """Four rows of pictures: original, erased, restored, posterior standard deviation.

    The first three rows share one gray scale; erased pixels are drawn in a color that no
    gray can be mistaken for. The last row has its own perceptually uniform scale.

    Parameters
    ----------
    original, erased, restored, sd : array, (picture, height, width)
        In the unit of the data; NaN marks an erased pixel.
    labels : sequence of str, optional
        One per picture, written above it.
    title : str, optional
    white : float, optional
        The value shown as white; by default the largest of `original`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If the shapes differ, or matplotlib is not installed.
    """
    rows = {
        "original": _stack(original, "original"),
        "erased": _stack(erased, "erased"),
        "restored": _stack(restored, "restored"),
        "posterior sd": _stack(sd, "sd"),
    }
    shape = rows["original"].shape
    for name, stack in rows.items():
        if stack.shape != shape:
            raise OptionError(
                f"the four stacks must agree: original has shape {shape}, {name} {stack.shape}"
            )
    count, height, width = shape
    figure = new_figure(
        _PICTURE * count + 1.3, 4 * _PICTURE * height / width + (0.9 if title else 0.5)
    )
    axes: NDArray[np.object_] = figure.subplots(4, count, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.015, h_pad=0.015, wspace=0.0, hspace=0.0)
    top = float(np.nanmax(rows["original"])) if white is None else white
    known = rows["posterior sd"][np.isfinite(rows["posterior sd"])]
    sd_top = float(np.quantile(known, 0.995)) if known.size else 0.0
    gray = _row(axes[0], rows["original"], "gray", top)
    _row(axes[1], rows["erased"], "gray", top)
    _row(axes[2], rows["restored"], "gray", top)
    spread = _row(axes[3], rows["posterior sd"], "magma", sd_top if sd_top > 0 else 1.0)
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name, fontsize=10, color=INK)
    for ax, label in zip(axes[0], labels or [], strict=False):
        ax.set_title(label, fontsize=8, color=INK, pad=3)
    for image, span, told in ((gray, axes[:3], "value"), (spread, axes[3:], "sd")):
        options = {"pad": 0.01, "aspect": 12 * len(span)}
        color_bar(figure, image, span.ravel().tolist(), told, **options)
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    return figure


def _row(axes: Sequence["Axes"], stack: FloatArray, cmap: str, top: float) -> "AxesImage":
    for ax, picture in zip(axes, stack, strict=True):
        bare(ax)
        # NaN is not drawn, so the background shows through erased pixels.
        ax.set_facecolor(_ERASED_COLOR)
        image = ax.imshow(picture, cmap=cmap, vmin=0.0, vmax=top, interpolation="nearest")
    return image


def particle_panel(
    tree: Trace,
    image_shape: tuple[int, int] | None = None,
    particles: int | Sequence[int] = 6,
    components: Any = None,
    names: Sequence[str] | None = None,
    *,
    factor: Literal["W", "H"] = "W",
) -> "Figure":
    """The same components of several particles: a row for a particle, a column for a component.

    Components are aligned and of one size (they add up to 1), and a column of the figure has
    one scale, so that what differs in it differs between particles.

    Parameters
    ----------
    tree : xarray.DataTree, str or Path
        A posterior of particles, or another run with draws; aligned if it is not.
    image_shape : (int, int), optional
        Height and width, if the rows of W (or the columns of H) are the pixels of an image;
        else components are drawn as profiles.
    particles : int or sequence of int
        How many, those of the largest mass first, or the positions of some.
    components
        Labels of the components; by default the ten that carry most of these particles.
    names : sequence of str, optional
        Titles of the components.
    factor : "W" or "H"

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If an argument does not fit, there are no draws, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figure 10.
    """
    if factor not in ("W", "H"):
        raise OptionError(f'factor must be "W" or "H", got {factor!r}')
    aligned = aligned_trace(tree, "a panel of particles")
    mass, law = draw_masses(aligned), law_of(aligned)
    draws = aligned["posterior"].to_dataset()
    rows = _chosen(particles, mass)
    pairs = [
        next(each_draw(draws.isel(chain=[chain], draw=[draw]), None))
        for chain, draw in zip(*np.divmod(rows, draws.sizes["draw"]), strict=True)
    ]
    chosen = component_positions(draws, components)
    if components is None:
        carried = np.mean([intensity_shares(W, H, law.signed) for W, H in pairs], axis=0)
        chosen = np.argsort(-carried, kind="stable")[:MOST_COMPONENTS].tolist()
    values = np.array(
        [unit_size((W.T if factor == "W" else H)[chosen], law.signed) for W, H in pairs]
    )
    entries = values.shape[2]
    check_pixels(image_shape, entries, f"{factor} has {entries} entries for each component")
    titles = component_titles(draws["component"].values[chosen], names)
    called, masses = particle_names(mass), mass.values.reshape(-1)
    told = [f"particle {called[at]}\nmass {masses[at]:.3f}" for at in rows]
    return _panel(values, image_shape, titles, told)


def _chosen(particles: int | Sequence[int], mass: xr.DataArray) -> NDArray[np.int64]:
    """Positions of the particles to show, checked."""
    if isinstance(particles, int | np.integer):
        if particles < 1:
            raise OptionError(f"particles must be at least 1, got {particles}")
        return heaviest(mass, int(particles))
    at = np.asarray(particles)
    positions = at.ndim == 1 and at.size > 0 and at.dtype.kind in "iu"
    if not positions or at.min() < 0 or at.max() >= mass.size:
        raise OptionError(
            f"particles must be a number of them or positions from 0 to {mass.size - 1}, got "
            f"{particles!r}"
        )
    return at.astype(np.int64)


def _panel(
    values: FloatArray,
    image_shape: tuple[int, int] | None,
    titles: Sequence[str],
    row_titles: Sequence[str],
) -> "Figure":
    """Cells of one size; values are (particle, component, entry)."""
    count, width = values.shape[:2]
    cell, aspect = _STEPS
    if image_shape is not None:
        cell, aspect = _PICTURE, min(image_shape[0] / image_shape[1], 2.0)
    figure = new_figure(cell * width + 1.2, cell * aspect * count + 0.5)
    axes: NDArray[np.object_] = figure.subplots(count, width, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    low = min(float(values.min()), 0.0)
    for k, title in enumerate(titles):
        sizes = np.abs(values[:, k])
        top = float(np.quantile(sizes, 1.0 if image_shape is None else 0.995))
        top = top if top > 0 else max(float(sizes.max()), 1e-300)
        span = (-top if low < 0 else 0.0, top)
        for ax, own in zip(axes[:, k], values[:, k], strict=True):
            if image_shape is None:
                _steps(ax, own, span)
            else:
                cmap = "RdBu_r" if low < 0 else "gray"
                picture = own.reshape(image_shape)
                ax.imshow(picture, cmap=cmap, vmin=span[0], vmax=span[1], interpolation="nearest")
            bare(ax, frame=image_shape is not None)
        axes[0, k].set_title(title, fontsize=8, color=INK, pad=3)
    for ax, told in zip(axes[:, 0], row_titles, strict=True):
        ax.set_ylabel(told, rotation=0, ha="right", va="center", fontsize=8, color=INK)
    return figure


def _steps(ax: "Axes", values: FloatArray, span: tuple[float, float]) -> None:
    at = np.arange(values.size)
    ax.fill_between(at, 0.0, values, color=ACCENT, lw=0, step="mid")
    ax.axhline(0.0, color=INK, lw=0.5)
    ax.set_ylim(span[0] * 1.05, span[1] * 1.05)
    ax.set_xlim(-0.5, values.size - 0.5)
