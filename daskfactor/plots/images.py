"""Pictures: what was there, what was left, what came back, how sure that is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_CELL_WIDTH = 1.15
_ERASED_COLOR = "#e8b04a"


def _stack(images: ArrayLike, name: str) -> NDArray[np.float64]:
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
        _CELL_WIDTH * count + 1.3, 4 * _CELL_WIDTH * height / width + (0.9 if title else 0.5)
    )
    axes: NDArray[np.object_] = figure.subplots(4, count, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.015, h_pad=0.015, wspace=0.0, hspace=0.0)
    top = float(np.nanmax(rows["original"])) if white is None else white
    sd_top = _quantile(rows["posterior sd"], 0.995)
    gray = _row(axes[0], rows["original"], "gray", top)
    _row(axes[1], rows["erased"], "gray", top)
    _row(axes[2], rows["restored"], "gray", top)
    spread = _row(axes[3], rows["posterior sd"], "magma", sd_top)
    for ax, name in zip(axes[:, 0], rows, strict=True):
        ax.set_ylabel(name, fontsize=10, color=INK)
    for ax, label in zip(axes[0], labels or [], strict=False):
        ax.set_title(label, fontsize=8, color=INK, pad=3)
    for image, span, text in ((gray, axes[:3], "value"), (spread, axes[3:], "sd")):
        bar = figure.colorbar(image, ax=span.ravel().tolist(), pad=0.01, aspect=12 * len(span))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7, length=2, colors=INK)
        bar.set_label(text, fontsize=8, color=INK)
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    return figure


def _quantile(values: NDArray[np.float64], share: float) -> float:
    finite = values[np.isfinite(values)]
    top = float(np.quantile(finite, share)) if finite.size else 0.0
    return top if top > 0 else 1.0


def _row(axes: Sequence["Axes"], stack: NDArray[np.float64], cmap: str, top: float) -> "AxesImage":
    for ax, picture in zip(axes, stack, strict=True):
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_visible(False)
        # NaN is not drawn, so the background shows through erased pixels.
        ax.set_facecolor(_ERASED_COLOR)
        image = ax.imshow(picture, cmap=cmap, vmin=0.0, vmax=top, interpolation="nearest")
    return image
