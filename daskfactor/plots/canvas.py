"""Style and elements shared by all figures.

matplotlib is imported late, and its backend is left unchanged.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import require
from daskfactor.errors import OptionError
from daskfactor.publish import publishing
from daskfactor.results.components import component_title, format_label
from daskfactor.runs.files import disk_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

P = ParamSpec("P")
R = TypeVar("R")
FloatArray = NDArray[np.float64]

SMALL, NORMAL, LARGE = 8, 9, 10
"""Font sizes in points: ticks and legends; axes; titles."""


class Theme(NamedTuple):
    """Colors that color-blind readers can distinguish, for the background of the current style."""

    ink: str
    accent: str
    quiet: str
    warn: str
    chains: tuple[str, ...]


LIGHT = Theme(
    ink="#333333",
    accent="#20639b",
    quiet="#b8c4d0",
    warn="#c0392b",
    chains=("#20639b", "#d1682b", "#3b8f5c", "#8e5aa8", "#a88a12", "#5b6770"),
)
DARK = Theme(
    ink="#e6e6e6",
    accent="#6db3f2",
    quiet="#5a6672",
    warn="#ff7b6b",
    chains=("#6db3f2", "#f0955a", "#6cc48f", "#c79be0", "#d9bc4a", "#a9b4bd"),
)


def theme() -> Theme:
    """Return the colors for the current style of matplotlib."""
    from matplotlib import rcParams
    from matplotlib.colors import to_rgb

    background = rcParams["figure.facecolor"]
    if background == "none":  # transparent: the color of texts fits the page
        return DARK if np.mean(to_rgb(rcParams["text.color"])) > 0.5 else LIGHT
    return DARK if np.mean(to_rgb(background)) < 0.5 else LIGHT


def style() -> Any:
    """Return a context that applies the common sizes and colors to matplotlib.

    Raises
    ------
    OptionError
        If matplotlib is not installed.
    """
    matplotlib = require("matplotlib", "plots", "figures")
    colors = theme()
    return matplotlib.rc_context(
        {
            "axes.edgecolor": colors.quiet,
            "axes.labelcolor": colors.ink,
            "axes.labelsize": NORMAL,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": colors.ink,
            "axes.titlelocation": "left",
            "axes.titlesize": LARGE,
            "figure.titlesize": LARGE,
            "font.size": SMALL,
            "legend.fontsize": SMALL,
            "legend.frameon": False,
            "text.color": colors.ink,
            "xtick.labelsize": SMALL,
            "ytick.labelsize": SMALL,
        }
    )


def in_style(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function draw in the common style."""

    @wraps(function)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with style():
            return function(*args, **kwargs)

    return styled


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches.

    It is made without pyplot: no window opens, no figure is registered globally, and no display
    is needed.
    """
    from daskfactor.plots.notebook_figure import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained")


def subplots(target: "Figure | SubFigure", rows: int, columns: int, **options: Any) -> Any:
    """Divide a figure into axes with small ticks.

    Ticks are set here because matplotlib makes them when a figure is written, outside of `style`.
    """
    axes: Any = target.subplots(rows, columns, squeeze=False, **options)
    colors = theme()
    for ax in axes.flat:
        ax.tick_params(labelsize=SMALL, labelcolor=colors.ink, length=2, color=colors.quiet)
    return axes


def group(tree: xr.DataTree, name: str) -> xr.Dataset:
    """Return the variables of one group of a result.

    Raises
    ------
    OptionError
        If the tree does not have the group.
    """
    if name not in tree.children:
        raise OptionError(
            f"the tree must have a group {name!r}, got {sorted(tree.children)}; pass what sample() "
            "or open_run() returned"
        )
    return tree.children[name].to_dataset()


def check_table(table: xr.Dataset, is_complete: bool, purpose: str, verb: str) -> None:
    """Refuse a dataset that a verb has not returned, or that lacks some of its variables.

    Raises
    ------
    OptionError
        If ``is_complete`` is False.
    """
    if not is_complete:
        raise OptionError(
            f"{purpose} takes the result of {verb}, got a dataset with {sorted(map(str, table))}"
        )


def chain_colors(count: int) -> list[str]:
    """Return colors for chains that color-blind readers can distinguish, too."""
    palette = theme().chains
    return [palette[index % len(palette)] for index in range(count)]


def bare(ax: "Axes", *, frame: bool = False) -> None:
    """Remove the ticks, and the frame unless ``frame`` is True."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(frame)


def color_bar(
    figure: "Figure | SubFigure", image: Any, ax: Any, label: str, **options: Any
) -> None:
    """Add a color bar to the right of an image."""
    bar = figure.colorbar(image, ax=ax, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL, length=2, colors=theme().ink)
    bar.set_label(label, fontsize=SMALL)


def legend(figure: "Figure | SubFigure", handles: Any = None, **options: Any) -> None:
    """Add a legend outside the axes, so that it covers no data."""
    figure.legend(handles=handles, **{"loc": "outside lower center"} | options)


def label_line(ax: "Axes", level: float, label: str, color: str, **line: Any) -> None:
    """Draw a horizontal line with a label at its right end."""
    ax.axhline(level, color=color, **line)
    ax.annotate(
        label,
        (1.0, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color=color,
        bbox={"facecolor": ax.get_facecolor(), "alpha": 0.8, "lw": 0, "pad": 1.0},
    )


def threshold_line(ax: "Axes", tree: xr.DataTree) -> None:
    """Draw the threshold of the objective, if the model has one."""
    constants = group(tree, "constant_data") if "constant_data" in tree.children else {}
    if "threshold" in constants and np.isfinite(constants["threshold"]):
        label_line(ax, float(constants["threshold"]), "threshold", theme().warn, lw=1.0, ls="--")
        ax.margins(y=0.15)


def component_titles(labels: Any, names: Sequence[str] | None) -> Sequence[str]:
    """Return titles of components: names if there are any, else titles from their labels.

    Raises
    ------
    OptionError
        If the numbers of names and of components differ.
    """
    titles = [component_title(label) for label in labels] if names is None else names
    if len(titles) != len(labels):
        raise OptionError(
            f"names must have one name for each of {len(labels)} components, got {len(titles)}"
        )
    return titles


def heaviest(mass: xr.DataArray, count: int) -> NDArray[np.int64]:
    """Return positions (over chains and draws) of the draws with the largest mass, descending.

    If all masses are equal, the positions are evenly spaced.
    """
    values = mass.values.reshape(-1)
    count = min(count, values.size)
    if np.ptp(values) <= 1e-12:
        return np.linspace(0, values.size - 1, count).round().astype(np.int64)
    return np.asarray(np.argsort(-values, kind="stable")[:count], dtype=np.int64)


def particle_names(table: xr.DataArray) -> list[str]:
    """Return the name of every draw of a table of masses or distances, chain after chain."""
    chains, draws = (one.values.ravel() for one in xr.broadcast(table["chain"], table["draw"]))
    if np.unique(chains).size == 1:
        return [str(draw) for draw in draws]
    return [f"{chain}:{draw}" for chain, draw in zip(chains, draws, strict=True)]


def short_label(label: Any, longest: int = 24) -> str:
    """Return a label, or the start and the end, where names differ, of one that is too long."""
    text = " ".join(format_label(label).split()).replace("$", r"\$")
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 1].rstrip()}…{text[-end:].lstrip()}"


def save(figure: "Figure", path: str | PathLike[str] | None, overwrite: bool = False) -> "Figure":
    """Write a figure to a file, unless ``path`` is None; its suffix selects the format.

    Raises
    ------
    OptionError
        If matplotlib does not support the format.
    StoreError
        If the file exists and ``overwrite`` is False, or it cannot be written.
    """
    if path is None:
        return figure
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in formats:
        raise OptionError(
            f"the name of an image file must end in .{', .'.join(formats)}, got {str(path)!r}"
        )
    with (
        disk_errors("a picture", Path(path), "nothing else was changed", "try again"),
        publishing(path, overwrite) as draft,
    ):
        figure.savefig(draft, dpi=160)
    return figure
