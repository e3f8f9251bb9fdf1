"""Panels of images: restored images, and components of several particles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import one_of
from daskfactor.errors import OptionError
from daskfactor.plots.axis_kinds import pixel_grid
from daskfactor.plots.canvas import (
    SMALL,
    FloatArray,
    bare,
    color_bar,
    component_titles,
    heaviest,
    in_style,
    new_figure,
    particle_names,
    subplots,
    theme,
)
from daskfactor.plots.panels import picture
from daskfactor.plots.registry import figure
from daskfactor.results.align import aligned_run, component_positions, unit_size
from daskfactor.results.compare import intensity_shares
from daskfactor.runs.schema import component_labels
from daskfactor.runs.trace import Trace, draw_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DEFAULT_COMPONENTS: Final = 10
"""Default number of components of `particle_panel`."""
_IMAGE_WIDTH: Final = 1.15
_PROFILE_SIZE: Final = (1.5, 0.55)
_ERASED_COLOR: Final = "#e8b04a"


def _stack(images: ArrayLike, name: str) -> FloatArray:
    """Return images as an array (image, height, width); refuse other shapes."""
    stack = np.asarray(images, dtype=np.float64)
    if stack.ndim != 3 or 0 in stack.shape:
        raise OptionError(
            f"{name} must be an array of images (image, height, width), got shape {stack.shape}"
        )
    return stack


@in_style
def faces_panel(
    original: ArrayLike,
    erased: ArrayLike,
    restored: ArrayLike,
    sd: ArrayLike,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    white: float | None = None,
) -> "Figure":
    """Draw four rows of images: original, erased, restored, posterior standard deviation.

    The first three rows share one gray scale; erased pixels are amber. The last row has its own
    perceptually uniform scale.

    Parameters
    ----------
    original, erased, restored, sd : array, (image, height, width)
        Values in the unit of the data; NaN marks an erased pixel.
    labels : sequence of str, optional
        Titles of the images.
    title : str, optional
        Title of the figure.
    white : float, optional
        Value that is drawn white; by default the largest of `original`.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the shapes differ, or matplotlib is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> pictures = np.random.default_rng(0).gamma(1.0, 1.0, (3, 8, 6))
    >>> erased = np.where(pictures > 2, np.nan, pictures)
    >>> figure = dfac.plots.faces_panel(pictures, erased, pictures, 0.1 * pictures)
    >>> len(figure.axes)
    14
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
            raise OptionError(f"{name} must have the shape of original, {shape}, got {stack.shape}")
    count, height, width = shape
    size = _IMAGE_WIDTH * count + 1.3, 4 * _IMAGE_WIDTH * height / width + (0.9 if title else 0.5)
    figure, axes = _sheet(size, 0.015, 4, labels or [""] * count)
    top = float(np.nanmax(rows["original"])) if white is None else white
    finite = rows["posterior sd"][np.isfinite(rows["posterior sd"])]
    sd_top = float(np.quantile(finite, 0.995)) if finite.size else 0.0
    gray = _row(axes[0], rows["original"], "gray", top)
    _row(axes[1], rows["erased"], "gray", top)
    _row(axes[2], rows["restored"], "gray", top)
    spread = _row(axes[3], rows["posterior sd"], "magma", sd_top if sd_top > 0 else 1.0)
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name)
    for image, span, label in ((gray, axes[:3], "value"), (spread, axes[3:], "sd")):
        options = {"pad": 0.01, "aspect": 12 * len(span)}
        color_bar(figure, image, span.ravel().tolist(), label, **options)
    if title:
        figure.suptitle(title)
    return figure


def _row(axes: Sequence["Axes"], stack: FloatArray, cmap: str, top: float) -> "AxesImage":
    """Draw a row of images on a scale from 0 to ``top``."""
    for ax, pixels in zip(axes, stack, strict=True):
        bare(ax)
        # NaN is not drawn, so that erased pixels have the color of the background.
        ax.set_facecolor(_ERASED_COLOR)
        image = ax.imshow(pixels, cmap=cmap, vmin=0.0, vmax=top, interpolation="nearest")
    return image


@figure("particles", particles=True)
def particle_panel(
    tree: Trace,
    image_shape: tuple[int, int] | None = None,
    particles: int | Sequence[int] = 6,
    components: Any = None,
    names: Sequence[str] | None = None,
    *,
    factor: Literal["W", "H"] = "W",
) -> "Figure":
    """Draw the same components of several particles: a row per particle, a column per component.

    Components are aligned and scaled to sum 1. Each column of the figure has one color scale, so
    that differences in a column are differences between particles.

    Parameters
    ----------
    tree : xarray.DataTree, str or Path
        A posterior of particles, or another run with draws; aligned if it is not yet.
    image_shape : (int, int), optional
        Height and width of an image whose pixels are the rows of W (or the columns of H); by
        default components are drawn as profiles.
    particles : int or sequence of int
        Number of particles, those with the largest mass first, or their positions.
    components
        Labels of the components; by default the ten with the largest shares of these particles.
    names : sequence of str, optional
        Titles of the components.
    factor : "W" or "H"
        Factor to draw: rows (W) or columns (H) of the data.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If an argument is invalid, there are no draws, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figure 10.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), **run)
    >>> figure = dfac.plots.particle_panel(modes, image_shape=(4, 5))
    >>> len(figure.axes)
    8
    """
    one_of("factor", factor, ("W", "H"))
    aligned = aligned_run(tree, "a panel of particles")
    mass, symmetries, draws = aligned.masses, aligned.symmetries, aligned.posterior
    rows = _positions(particles, mass)
    pairs = [
        draw_at(draws, chain, draw)
        for chain, draw in zip(*np.divmod(rows, draws.sizes["draw"]), strict=True)
    ]
    chosen = component_positions(draws, components)
    if components is None:
        carried = np.mean([intensity_shares(W, H, symmetries.signed) for W, H in pairs], axis=0)
        chosen = np.argsort(-carried, kind="stable")[:DEFAULT_COMPONENTS].tolist()
    values = np.array(
        [unit_size((W.T if factor == "W" else H)[chosen], symmetries.signed) for W, H in pairs]
    )
    entries = values.shape[2]
    if image_shape is not None and image_shape[0] * image_shape[1] != entries:
        raise OptionError(
            f"image_shape must have {entries} pixels, the number of entries of {factor} per "
            f"component, got {image_shape} with {image_shape[0] * image_shape[1]} pixels"
        )
    labels = component_labels(draws)
    titles = component_titles([labels[k] for k in chosen], names)
    particle_labels, masses = particle_names(mass), mass.values.reshape(-1)
    row_titles = [f"particle {particle_labels[at]}\nmass {masses[at]:.3f}" for at in rows]
    return _panel(values, image_shape, titles, row_titles)


def _positions(particles: int | Sequence[int], mass: xr.DataArray) -> NDArray[np.int64]:
    """Return the positions of the particles to draw; refuse invalid ones."""
    if isinstance(particles, int | np.integer):
        if particles < 1:
            raise OptionError(f"particles must be at least 1, got {particles}")
        return heaviest(mass, int(particles))
    at = np.asarray(particles)
    is_list = at.ndim == 1 and at.size > 0 and at.dtype.kind in "iu"
    if not is_list or at.min() < 0 or at.max() >= mass.size:
        raise OptionError(
            f"particles must be a number of particles, or positions from 0 to {mass.size - 1}, "
            f"got {particles!r}"
        )
    return at.astype(np.int64)


def _panel(
    values: FloatArray,
    image_shape: tuple[int, int] | None,
    titles: Sequence[str],
    row_titles: Sequence[str],
) -> "Figure":
    """Draw cells of one size; values are (particle, component, entry)."""
    count, width, size = values.shape
    grid = pixel_grid(image_shape, size)
    cell, aspect = _PROFILE_SIZE
    if grid is not None:
        cell, aspect = _IMAGE_WIDTH, min(grid.shape[0] / grid.shape[1], 2.0)
    figure_size = cell * width + 1.2, cell * aspect * count + 0.5
    figure, axes = _sheet(figure_size, 0.02, count, titles)
    nonnegative = float(values.min()) >= 0
    for k in range(width):
        sizes = np.abs(values[:, k])
        top = float(np.quantile(sizes, 1.0 if grid is None else 0.995))
        top = top if top > 0 else max(float(sizes.max()), 1e-300)
        for ax, entries in zip(axes[:, k], values[:, k], strict=True):
            if grid is None:
                _draw_profile(ax, entries, (0.0 if nonnegative else -top, top))
            else:
                picture(ax, entries, grid, nonnegative, top)
    for ax, title in zip(axes[:, 0], row_titles, strict=True):
        ax.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=SMALL)
    return figure


def _sheet(
    size: tuple[float, float], pad: float, rows: int, titles: Sequence[str]
) -> tuple["Figure", Any]:
    """Return a figure with cells close to each other, and a title above each column."""
    figure = new_figure(*size)
    axes = subplots(figure, rows, len(titles))
    figure.set_layout_engine("constrained", w_pad=pad, h_pad=pad, wspace=0.0, hspace=0.0)
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, fontsize=SMALL, loc="center", pad=3)
    return figure, axes


def _draw_profile(ax: "Axes", values: FloatArray, span: tuple[float, float]) -> None:
    """Draw the entries of a component as steps."""
    at = np.arange(values.size)
    ax.fill_between(at, 0.0, values, color=theme().accent, lw=0, step="mid")
    ax.axhline(0.0, color=theme().ink, lw=0.5)
    ax.set_ylim(span[0] * 1.05, span[1] * 1.05)
    ax.set_xlim(-0.5, values.size - 0.5)
    bare(ax)
