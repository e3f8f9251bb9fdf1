"""Where figures come from: matplotlib, imported late, without touching anybody's backend."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from daskfactor.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#333333"
ACCENT = "#20639b"
QUIET = "#b8c4d0"
WARN = "#c0392b"


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of the given size in inches.

    Made without pyplot, so that no window opens, nothing stays registered globally and no
    display is needed.

    Raises
    ------
    OptionError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "figures need matplotlib, which is not installed here: "
            "run  pip install 'daskfactor[plots]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def group(tree: xr.DataTree, name: str) -> xr.Dataset:
    """The variables of one group of a result.

    Raises
    ------
    OptionError
        If the tree does not have it.
    """
    if name not in tree.children:
        raise OptionError(
            f"the tree has no group {name!r}, only {sorted(tree.children)}: "
            "pass what sample() or open_run() returned"
        )
    return tree.children[name].to_dataset()


def chain_colors(count: int) -> list[str]:
    """Colors that keep chains apart, also for color-blind readers."""
    palette = ["#20639b", "#d1682b", "#3b8f5c", "#8e5aa8", "#a88a12", "#5b6770"]
    return [palette[index % len(palette)] for index in range(count)]


def tidy(ax: "Axes", labelsize: float = 7) -> None:
    """Take the frame above and to the right away, and make ticks small."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=labelsize, colors=INK, length=2)


def short_label(label: Any, longest: int = 22) -> str:
    """Write a label in few letters: dates without needless digits, long text cut."""
    text = np.datetime_as_string(label, unit="auto") if isinstance(label, np.datetime64) else label
    text = f"{text:.6g}" if isinstance(text, float | np.floating) else str(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the suffix of the path is its format.

    Raises
    ------
    OptionError
        If the suffix names no format that matplotlib writes.
    """
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise OptionError(f"{path} has no suffix of a picture; take one of {', '.join(known)}")
    figure.savefig(path, dpi=160, facecolor="white")
