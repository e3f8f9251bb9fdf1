"""Where figures come from: matplotlib, imported late, without touching anybody's backend.

And what several of them have in common: titles, labels, bars of colors, names of particles.
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
from daskfactor.results.files import disk_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

P = ParamSpec("P")
R = TypeVar("R")
FloatArray = NDArray[np.float64]

SMALL, NORMAL, LARGE = 8, 9, 10
"""Sizes of letters, in points: ticks and legends; axes; headlines."""


class Theme(NamedTuple):
    """Colors that can be told apart by color-blind readers, on the ground of the style in use."""

    ink: str
    accent: str
    quiet: str
    warn: str
    other: str
    between: str
    chains: tuple[str, ...]


LIGHT = Theme(
    ink="#333333",
    accent="#20639b",
    quiet="#b8c4d0",
    warn="#c0392b",
    other="#d1682b",
    between="#7fa6c9",
    chains=("#20639b", "#d1682b", "#3b8f5c", "#8e5aa8", "#a88a12", "#5b6770"),
)
DARK = Theme(
    ink="#e6e6e6",
    accent="#6db3f2",
    quiet="#5a6672",
    warn="#ff7b6b",
    other="#f0955a",
    between="#4a7396",
    chains=("#6db3f2", "#f0955a", "#6cc48f", "#c79be0", "#d9bc4a", "#a9b4bd"),
)


def theme() -> Theme:
    """The colors that suit the style of matplotlib that is in use."""
    from matplotlib import rcParams
    from matplotlib.colors import to_rgb

    ground = rcParams["figure.facecolor"]
    if ground == "none":  # the page's own, which letters are chosen for
        return DARK if np.mean(to_rgb(rcParams["text.color"])) > 0.5 else LIGHT
    return DARK if np.mean(to_rgb(ground)) < 0.5 else LIGHT


def style() -> Any:
    """Return a context in which matplotlib has the sizes and colors of all figures.

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
    """Have a function draw in the common style."""

    @wraps(function)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        with style():
            return function(*args, **kwargs)

    return drawn


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of the given size in inches.

    Made without pyplot, so that no window opens, nothing stays registered globally and no
    display is needed.
    """
    from daskfactor.plots.shown import Shown

    return Shown(figsize=(width, height), layout="constrained")


def subplots(target: "Figure | SubFigure", rows: int, columns: int, **options: Any) -> Any:
    """Divide a figure into axes, whose ticks are small.

    Ticks are made when a figure is written, which is outside of `style`.
    """
    axes: Any = target.subplots(rows, columns, squeeze=False, **options)
    colors = theme()
    for ax in axes.flat:
        ax.tick_params(labelsize=SMALL, labelcolor=colors.ink, length=2, color=colors.quiet)
    return axes


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


def check_table(table: xr.Dataset, whole: bool, purpose: str, maker: str) -> None:
    """Refuse a dataset that is not the ``whole`` of what ``maker`` returned.

    Raises
    ------
    OptionError
        If it is not.
    """
    if not whole:
        raise OptionError(
            f"{purpose} takes what {maker} returned, got a dataset with {sorted(map(str, table))}"
        )


def chain_colors(count: int) -> list[str]:
    """Colors that keep chains apart, also for color-blind readers."""
    palette = theme().chains
    return [palette[index % len(palette)] for index in range(count)]


def bare(ax: "Axes", *, frame: bool = False) -> None:
    """Take the ticks away, and the frame unless it is to stay."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(frame)


def color_bar(figure: "Figure | SubFigure", image: Any, ax: Any, told: str, **options: Any) -> None:
    """What the colors of a picture mean, on its right."""
    bar = figure.colorbar(image, ax=ax, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL, length=2, colors=theme().ink)
    bar.set_label(told, fontsize=SMALL)


def legend(figure: "Figure | SubFigure", handles: Any = None, **options: Any) -> None:
    """Say what lines and colors are, outside the axes: inside it would cover them."""
    figure.legend(handles=handles, **{"loc": "outside lower center"} | options)


def note_line(ax: "Axes", level: float, told: str, color: str, **line: Any) -> None:
    """A level that is worth a line, named at its right end."""
    ax.axhline(level, color=color, **line)
    ax.annotate(
        told,
        (1.0, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color=color,
        bbox={"facecolor": ax.get_facecolor(), "alpha": 0.8, "lw": 0, "pad": 1.0},
    )


def threshold_line(ax: "Axes", tree: xr.DataTree) -> None:
    """The line above which a factorization is not good enough, if the model has one."""
    constants = group(tree, "constant_data") if "constant_data" in tree.children else {}
    if "threshold" in constants and np.isfinite(constants["threshold"]):
        note_line(ax, float(constants["threshold"]), "threshold", theme().warn, lw=1.0, ls="--")
        ax.margins(y=0.15)


def component_titles(labels: Any, names: Sequence[str] | None) -> Sequence[str]:
    """Titles of components: their names, or the labels they have.

    Raises
    ------
    OptionError
        If there is not one name for each.
    """
    titles = [component_title(label) for label in labels] if names is None else names
    if len(titles) != len(labels):
        raise OptionError(
            f"names must be one for each of {len(labels)} components, got {len(titles)}"
        )
    return titles


def heaviest(mass: xr.DataArray, count: int) -> NDArray[np.int64]:
    """Positions (over chains and draws) of the draws of largest mass, in descending order.

    Of draws that all weigh the same, some at even distances.
    """
    values = mass.values.reshape(-1)
    count = min(count, values.size)
    if np.ptp(values) <= 1e-12:
        return np.linspace(0, values.size - 1, count).round().astype(np.int64)
    return np.asarray(np.argsort(-values, kind="stable")[:count], dtype=np.int64)


def particle_names(of: xr.DataArray) -> list[str]:
    """What every draw is called, chains one after the other; of masses, or of distances."""
    chains, draws = (one.values.ravel() for one in xr.broadcast(of["chain"], of["draw"]))
    if np.unique(chains).size == 1:
        return [str(draw) for draw in draws]
    return [f"{chain}:{draw}" for chain, draw in zip(chains, draws, strict=True)]


def short_label(label: Any, longest: int = 24) -> str:
    """Write a label in few letters; of long text the beginning and the end, where names differ."""
    text = " ".join(format_label(label).split()).replace("$", r"\$")
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 1].rstrip()}…{text[-end:].lstrip()}"


def save(figure: "Figure", path: str | PathLike[str] | None, overwrite: bool = False) -> "Figure":
    """Write a figure, if there is a path; its suffix is the format.

    Raises
    ------
    OptionError
        If the suffix names no format that matplotlib writes.
    StoreError
        If there is a file of this name already, and not ``overwrite``, or it cannot be written.
    """
    if path is None:
        return figure
    known = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise OptionError(f"{path} has no suffix of a picture; take one of {', '.join(known)}")
    with (
        disk_errors("a picture", Path(path), "nothing else was changed", "try again"),
        publishing(path, overwrite) as draft,
    ):
        figure.savefig(draft, dpi=160)
    return figure
