"""Panels of pictures: what was there, left and came back; what several particles say."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import one_of
from daskfactor.errors import OptionError
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
from daskfactor.plots.registry import figure
from daskfactor.results.align import aligned_run, component_positions, unit_size
from daskfactor.results.compare import intensity_shares
from daskfactor.results.schema import component_labels
from daskfactor.results.trace import Trace, each_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_COMPONENTS: Final = 10
_PICTURE: Final = 1.15
_STEPS: Final = (1.5, 0.55)
_ERASED_COLOR: Final = "#e8b04a"


def _stack(images: ArrayLike, name: str) -> FloatArray:
    stack = np.asarray(images, dtype=np.float64)
    if stack.ndim != 3 or 0 in stack.shape:
        raise OptionError(
            f"{name} must be a stack of images (picture, height, width), got shape {stack.shape}"
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
        Headline of the figure.
    white : float, optional
        The value shown as white; by default the largest of `original`.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

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
            raise OptionError(
                f"the four stacks must agree: original has shape {shape}, {name} {stack.shape}"
            )
    count, height, width = shape
    figure = new_figure(
        _PICTURE * count + 1.3, 4 * _PICTURE * height / width + (0.9 if title else 0.5)
    )
    axes = subplots(figure, 4, count)
    figure.set_layout_engine("constrained", w_pad=0.015, h_pad=0.015, wspace=0.0, hspace=0.0)
    top = float(np.nanmax(rows["original"])) if white is None else white
    known = rows["posterior sd"][np.isfinite(rows["posterior sd"])]
    sd_top = float(np.quantile(known, 0.995)) if known.size else 0.0
    gray = _row(axes[0], rows["original"], "gray", top)
    _row(axes[1], rows["erased"], "gray", top)
    _row(axes[2], rows["restored"], "gray", top)
    spread = _row(axes[3], rows["posterior sd"], "magma", sd_top if sd_top > 0 else 1.0)
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name)
    for ax, label in zip(axes[0], labels or [], strict=False):
        ax.set_title(label, fontsize=SMALL, loc="center", pad=3)
    for image, span, told in ((gray, axes[:3], "value"), (spread, axes[3:], "sd")):
        options = {"pad": 0.01, "aspect": 12 * len(span)}
        color_bar(figure, image, span.ravel().tolist(), told, **options)
    if title:
        figure.suptitle(title)
    return figure


def _row(axes: Sequence["Axes"], stack: FloatArray, cmap: str, top: float) -> "AxesImage":
    for ax, picture in zip(axes, stack, strict=True):
        bare(ax)
        # NaN is not drawn, so the background shows through erased pixels.
        ax.set_facecolor(_ERASED_COLOR)
        image = ax.imshow(picture, cmap=cmap, vmin=0.0, vmax=top, interpolation="nearest")
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
        Whose components: by rows or by columns of the data.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If an argument does not fit, there are no draws, or matplotlib is not installed.

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
    rows = _chosen(particles, mass)
    pairs = [
        next(each_draw(draws.isel(chain=[chain], draw=[draw])))
        for chain, draw in zip(*np.divmod(rows, draws.sizes["draw"]), strict=True)
    ]
    chosen = component_positions(draws, components)
    if components is None:
        carried = np.mean([intensity_shares(W, H, symmetries.signed) for W, H in pairs], axis=0)
        chosen = np.argsort(-carried, kind="stable")[:MOST_COMPONENTS].tolist()
    values = np.array(
        [unit_size((W.T if factor == "W" else H)[chosen], symmetries.signed) for W, H in pairs]
    )
    entries = values.shape[2]
    if image_shape is not None and image_shape[0] * image_shape[1] != entries:
        raise OptionError(
            f"image_shape {image_shape} has {image_shape[0] * image_shape[1]} pixels, {factor} has "
            f"{entries} entries for each component"
        )
    labels = component_labels(draws)
    titles = component_titles([labels[k] for k in chosen], names)
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
    axes = subplots(figure, count, width)
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
        axes[0, k].set_title(title, fontsize=SMALL, loc="center", pad=3)
    for ax, told in zip(axes[:, 0], row_titles, strict=True):
        ax.set_ylabel(told, rotation=0, ha="right", va="center", fontsize=SMALL)
    return figure


def _steps(ax: "Axes", values: FloatArray, span: tuple[float, float]) -> None:
    at = np.arange(values.size)
    ax.fill_between(at, 0.0, values, color=theme().accent, lw=0, step="mid")
    ax.axhline(0.0, color=theme().ink, lw=0.5)
    ax.set_ylim(span[0] * 1.05, span[1] * 1.05)
    ax.set_xlim(-0.5, values.size - 0.5)
