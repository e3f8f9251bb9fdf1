"""What particles say, as figures: their largest entries side by side, their scores in use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.errors import OptionError
from daskfactor.plots.canvas import ACCENT, INK, QUIET, chain_colors, new_figure, short_label, tidy
from daskfactor.plots.particles import heaviest, particle_names
from daskfactor.results.align import component_positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FloatArray = NDArray[np.float64]

OWN: Final = "#d1682b"
"""Of an entry that a single one of the lists shown has."""
SOME: Final = "#7fa6c9"
_DOT: Final = "#8d9dac"
_MARKERS: Final = "osD^vPX*"
_MOST_ROWS: Final = 3
_MOST_LINES: Final = 4


def top_entries_plot(
    top: xr.Dataset,
    components: Any = None,
    particles: int = 3,
    *,
    names: Sequence[str] | None = None,
    figure: "Figure | SubFigure | None" = None,
) -> "Figure":
    """The largest entries of a component in several particles, side by side.

    A bar is as long as the entry is large. Orange is an entry that only one of the lists
    shown has, light blue one that some have, blue one that all have.

    Parameters
    ----------
    top : xarray.Dataset
        What `top_entries` returned.
    components
        Labels of the components; by default the first three of `top`.
    particles : int
        How many, those of the largest mass first.
    names : sequence of str, optional
        Titles of the components.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If it is not such a table, an argument does not fit, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figure 5.
    """
    if not {"label", "value", "share"} <= set(top.data_vars):
        raise OptionError(
            "top_entries_plot takes what top_entries returned, got a dataset with "
            f"{sorted(map(str, top))}"
        )
    mass = top["weight"].transpose("chain", "draw")
    rows = heaviest(mass, whole_number("particles", particles, 1))
    chosen = component_positions(top, components)[: _MOST_ROWS if components is None else None]
    titles = [f"component {top['component'].values[k]}" for k in chosen] if names is None else names
    if len(titles) != len(chosen):
        raise OptionError(
            f"names must be one for each of {len(chosen)} components, got {len(titles)}"
        )
    lists = top[["label", "value"]].stack(particle=("chain", "draw"), create_index=False)
    lists = lists.transpose("particle", "component", "rank")
    count = top.sizes["rank"]
    size = 2.5 * rows.size + 0.4, (0.17 * count + 0.55) * len(chosen) + 0.5
    target = new_figure(*size) if figure is None else figure
    axes: NDArray[np.object_] = target.subplots(len(chosen), rows.size, squeeze=False)
    called = particle_names(mass)
    for line, k, title in zip(axes, chosen, titles, strict=True):
        labels, values = (lists[name].values[rows, k] for name in ("label", "value"))
        seen = _times(labels, values)
        longest = float(np.abs(values).max()) or 1.0
        for ax, at, own, sizes, times in zip(line, rows, labels, values, seen, strict=True):
            _bars(ax, own, sizes / longest, [_color(n, rows.size) for n in times])
            weight = mass.values.reshape(-1)[at]
            ax.set_title(
                f"particle {called[at]}, mass {weight:.3f}", loc="left", fontsize=8, color=INK
            )
        line[0].set_ylabel(title, fontsize=9, color=INK)
    if rows.size > 1:
        _legend(target, rows.size)
    return target.get_figure(root=True)


def _times(labels: NDArray[Any], values: FloatArray) -> list[list[int]]:
    """In how many of the lists each entry of each list is; entries of 0 are in none."""
    lists = [set(own[sizes != 0].tolist()) for own, sizes in zip(labels, values, strict=True)]
    return [[sum(label in one for one in lists) for label in own] for own in labels.tolist()]


def _color(times: int, lists: int) -> str:
    if times == lists:
        return ACCENT
    return OWN if times == 1 else SOME


def _bars(ax: "Axes", labels: NDArray[Any], lengths: FloatArray, colors: list[str]) -> None:
    """Bars from the top down, what they are called inside the frame on their right."""
    at = np.arange(labels.size)
    ax.barh(at, np.abs(lengths), height=0.72, color=colors)
    for y, label, length in zip(at, labels, lengths, strict=True):
        text = short_label(label) if length >= 0 else f"{short_label(label)} (−)"
        ax.annotate(
            text,
            (abs(length), y),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=INK if length else QUIET,
        )
    ax.set_ylim(labels.size - 0.4, -0.6)
    ax.set_xlim(0.0, 1.9)
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)
    ax.spines["left"].set_color(QUIET)


def _legend(figure: "Figure | SubFigure", lists: int) -> None:
    from matplotlib.patches import Patch

    told = {ACCENT: "in all of these lists", SOME: "in some", OWN: "in this one alone"}
    if lists == 2:
        del told[SOME]
    handles = [Patch(color=color, label=text) for color, text in told.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(told), fontsize=8, frameon=False
    )


def scores_plot(scores: xr.Dataset, figure: "Figure | SubFigure | None" = None) -> "Figure":
    """Scores of all particles, class by class; a dotted line follows the best of each class.

    A dot is a particle, the larger the more mass it has, the short bar the mean. A particle
    that is best in one class and not in the others shows as a line that falls off. Of more
    than four particles that are best somewhere, lines follow those that are so most often,
    or fall off furthest.

    Parameters
    ----------
    scores : xarray.Dataset
        What `downstream` returned.
    figure : matplotlib Figure or SubFigure, optional
        Drawn into, if given.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If it is not such a table, or matplotlib is not installed.

    References
    ----------
    Masood and Doshi-Velez, figures 6 and 8.
    """
    if not {"value", "best_draw", "best_chain"} <= set(scores.data_vars):
        raise OptionError(
            "scores_plot takes what downstream returned, got a dataset with "
            f"{sorted(map(str, scores))}"
        )
    names = [str(name) for name in scores["score"].values]
    mass = scores["weight"].transpose("chain", "draw")
    values = scores["value"].transpose("chain", "draw", "score").values.reshape(mass.size, -1)
    best = _best_positions(scores)
    target = new_figure(2.9 + 1.1 * max(len(names), 2), 3.6) if figure is None else figure
    ax = target.subplots(1, 1)
    at = np.arange(len(names))
    share = mass.values.reshape(-1) / mass.values.max()
    spread = 0.26 * _even(mass.size)
    for k in at:
        ax.scatter(
            k + spread, values[:, k], s=6 + 34 * share, color=_DOT, alpha=0.75, lw=0, zorder=1
        )
    ax.hlines(scores["mean"].values, at - 0.3, at + 0.3, color=INK, lw=1.2, zorder=2)
    called = particle_names(mass)
    followed = _followed(best, values)
    for number, (particle, color) in enumerate(
        zip(dict.fromkeys(best), chain_colors(len(set(best))), strict=True)
    ):
        won = [k for k, one in enumerate(best) if one == particle]
        marker = _MARKERS[number % len(_MARKERS)]
        told = f"{called[particle]}: best in {', '.join(names[k] for k in won)}"
        x = at + spread[particle]
        if particle in followed:
            ax.plot(x, values[particle], ":", color=color, lw=1.3, zorder=3)
            ax.plot(
                x, values[particle], marker, color=color, ms=4, mfc="white", ls="none", zorder=4
            )
        ax.plot(
            x[won],
            values[particle, won],
            marker,
            color=color,
            ms=7,
            ls="none",
            zorder=5,
            label=told,
        )
    long = max(map(len, names)) > 12
    ax.set_xticks(at, names, rotation=20 if long else 0, ha="right" if long else "center")
    ax.set_xlim(-0.5, len(names) - 0.5)
    ax.set_ylabel("score", fontsize=8)
    ax.set_title("score of every particle; bar: mean", loc="left", fontsize=9, color=INK)
    tidy(ax)
    target.legend(
        loc="outside right upper",
        title="particle",
        title_fontsize=8,
        fontsize=7,
        frameon=False,
        alignment="left",
    )
    return target.get_figure(root=True)


def _best_positions(scores: xr.Dataset) -> list[int]:
    """Position of the best particle of every score, chains one after the other."""
    chains, draws = scores["chain"].values.tolist(), scores["draw"].values.tolist()
    return [
        chains.index(chain) * len(draws) + draws.index(draw)
        for chain, draw in zip(
            scores["best_chain"].values.tolist(), scores["best_draw"].values.tolist(), strict=True
        )
    ]


def _followed(best: list[int], values: FloatArray) -> list[int]:
    """Which of the particles that are best somewhere get a line."""
    highest = values[best, np.arange(len(best))]

    def rank(particle: int) -> tuple[int, float]:
        return -best.count(particle), -float(np.nanmax(np.abs(values[particle] - highest)))

    return sorted(set(best), key=rank)[:_MOST_LINES]


def _even(count: int) -> FloatArray:
    """Numbers from -1 to 1 that neighbours are far apart in, the same in every figure."""
    golden = (np.arange(count) * 0.6180339887498949) % 1.0
    return np.asarray(2.0 * golden - 1.0)
