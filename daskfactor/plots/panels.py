"""Several factorizations of the same data side by side, as pictures or profiles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import ACCENT, INK, new_figure
from daskfactor.plots.particles import heaviest, particle_names
from daskfactor.results.align import (
    aligned_trace,
    component_positions,
    law_of,
    unit_size,
)
from daskfactor.results.compare import intensity_shares
from daskfactor.results.trace import Trace, draw_masses, each_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FloatArray = NDArray[np.float64]

MOST_COMPONENTS: Final = 10
_PICTURE: Final = 1.15
_PROFILE: Final = (1.5, 0.55)


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
    pairs = [_one_draw(draws, at) for at in rows]
    chosen = component_positions(draws, components)
    if components is None:
        carried = np.mean([intensity_shares(W, H, law.signed) for W, H in pairs], axis=0)
        chosen = np.argsort(-carried, kind="stable")[:MOST_COMPONENTS].tolist()
    values = np.array(
        [unit_size((W.T if factor == "W" else H)[chosen], law.signed) for W, H in pairs]
    )
    if image_shape is not None and image_shape[0] * image_shape[1] != values.shape[2]:
        raise OptionError(
            f"image_shape {image_shape} has {image_shape[0] * image_shape[1]} pixels, {factor} "
            f"has {values.shape[2]} entries for each component"
        )
    titles = (
        [f"component {draws['component'].values[k]}" for k in chosen] if names is None else names
    )
    if len(titles) != len(chosen):
        raise OptionError(
            f"names must be one for each of {len(chosen)} components, got {len(titles)}"
        )
    return _panel(values, image_shape, titles, _row_titles(mass, rows))


def _chosen(particles: int | Sequence[int], mass: xr.DataArray) -> NDArray[np.int64]:
    """Positions of the particles to show, checked."""
    if isinstance(particles, int | np.integer):
        if particles < 1:
            raise OptionError(f"particles must be at least 1, got {particles}")
        return heaviest(mass, int(particles))
    at = np.asarray(particles)
    if (
        at.ndim != 1
        or not at.size
        or at.dtype.kind not in "iu"
        or not (0 <= at.min() <= at.max() < mass.size)
    ):
        raise OptionError(
            f"particles must be a number of them or positions from 0 to {mass.size - 1}, got "
            f"{particles!r}"
        )
    return at.astype(np.int64)


def _one_draw(draws: xr.Dataset, position: int) -> tuple[NDArray[Any], NDArray[Any]]:
    chain, draw = divmod(int(position), draws.sizes["draw"])
    return next(each_draw(draws.isel(chain=[chain], draw=[draw]), None))


def _row_titles(mass: xr.DataArray, rows: NDArray[np.int64]) -> list[str]:
    names, values = particle_names(mass), mass.values.reshape(-1)
    return [f"particle {names[at]}\nmass {values[at]:.3f}" for at in rows]


def _panel(
    values: FloatArray,
    image_shape: tuple[int, int] | None,
    titles: Sequence[str],
    row_titles: Sequence[str],
) -> "Figure":
    """Cells of one size; values are (particle, component, entry)."""
    count, width = values.shape[:2]
    cell, aspect = _PROFILE
    if image_shape is not None:
        cell, aspect = _PICTURE, min(image_shape[0] / image_shape[1], 2.0)
    figure = new_figure(cell * width + 1.2, cell * aspect * count + 0.5)
    axes: NDArray[np.object_] = figure.subplots(count, width, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.0, hspace=0.0)
    low = min(float(values.min()), 0.0)
    for k, title in enumerate(titles):
        top = _quantile(np.abs(values[:, k]), 1.0 if image_shape is None else 0.995)
        span = (-top if low < 0 else 0.0, top)
        for ax, own in zip(axes[:, k], values[:, k], strict=True):
            if image_shape is None:
                _profile(ax, own, span)
            else:
                cmap = "RdBu_r" if low < 0 else "gray"
                picture = own.reshape(image_shape)
                ax.imshow(picture, cmap=cmap, vmin=span[0], vmax=span[1], interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
        axes[0, k].set_title(title, fontsize=8, color=INK, pad=3)
    for ax, told in zip(axes[:, 0], row_titles, strict=True):
        ax.set_ylabel(told, rotation=0, ha="right", va="center", fontsize=8, color=INK)
    return figure


def _quantile(values: FloatArray, share: float) -> float:
    top = float(np.quantile(values, share))
    return top if top > 0 else max(float(values.max()), 1e-300)


def _profile(ax: "Axes", values: FloatArray, span: tuple[float, float]) -> None:
    at = np.arange(values.size)
    ax.fill_between(at, 0.0, values, color=ACCENT, lw=0, step="mid")
    ax.axhline(0.0, color=INK, lw=0.5)
    ax.set_ylim(span[0] * 1.05, span[1] * 1.05)
    ax.set_xlim(-0.5, values.size - 0.5)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)
