"""The evidence of ranks, beside the score of cells left out."""

from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import ACCENT, INK, QUIET, WARN, new_figure, save, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_ranks(table: xr.Dataset, path: str | PathLike[str] | None = None) -> "Figure":
    """Log evidence over ranks, the held-out score below it, the best of each filled.

    Bars are two standard errors: of the evidence, both of its errors together; of the
    score, that of the difference to the best rank. Beside the title stands whether the best
    rank is at the edge of those tried, and whether errors are too large to decide.

    Parameters
    ----------
    table : xarray.Dataset
        A result of `select_rank`.
    path
        Picture to write; its suffix is the format.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    OptionError
        If it is not such a table, or matplotlib is not installed.
    """
    if "log_evidence" not in table or "best" not in table.attrs:
        raise OptionError(
            "plot_ranks takes what select_rank returned, got a dataset with "
            f"{sorted(map(str, table))}"
        )
    scored = "held_out_log_score" in table
    figure = new_figure(6.4, 5.2 if scored else 3.2)
    axes = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False)[:, 0]
    errors = np.hypot(table["standard_error"].values, table["discretization_error"].values)
    _curve(axes[0], table, "log_evidence", errors, table.attrs["best"])
    what = "log evidence" if "bound" not in table.attrs else "log evidence, lower bound"
    axes[0].set_ylabel(f"{what} (nats)", fontsize=8)
    axes[0].set_title("evidence", loc="left", fontsize=9, color=INK)
    axes[0].set_title(_caution(table.attrs), loc="right", fontsize=7, color=WARN)
    for rank in table.attrs["not_distinguishable"]:
        value = float(table["log_evidence"].sel(rank=rank))
        axes[0].plot([rank], [value], "o", ms=9, mfc="none", mec=WARN, label="within the errors")
    if table.attrs["not_distinguishable"]:
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].legend(handles[:1], labels[:1], fontsize=7, frameon=False, loc="lower right")
    if scored:
        errors = table["held_out_difference_error"].values
        _curve(axes[1], table, "held_out_log_score", errors, table.attrs["best_held_out"])
        axes[1].set_ylabel("mean log score of a cell (nats)", fontsize=8)
        axes[1].set_title("cells left out", loc="left", fontsize=9, color=INK)
    axes[-1].set_xlabel("number of components", fontsize=8)
    if path is not None:
        save(figure, Path(fspath(path)))
    return figure


def _caution(attrs: dict[str, Any]) -> str:
    """What to know before the best rank is taken."""
    if not attrs.get("decides", True):
        return "errors as large as the differences: not decided"
    end = attrs.get("at_edge")
    return f"best at the {end} rank tried: try {end[:-2]}r ones" if end else ""


def _curve(
    ax: "Axes", table: xr.Dataset, name: str, errors: NDArray[np.float64], best: int
) -> None:
    ranks, values = table["rank"].values, table[name].values
    ax.axvline(best, color=QUIET, lw=6, alpha=0.45, zorder=0)
    ax.errorbar(
        ranks,
        values,
        yerr=2 * errors,
        color=ACCENT,
        ecolor=INK,
        elinewidth=0.9,
        capsize=2.5,
        lw=1.1,
        marker="o",
        ms=4,
        mfc="white",
    )
    ax.plot([best], [float(table[name].sel(rank=best))], "o", ms=5, color=ACCENT, zorder=5)
    tidy(ax)
    ax.set_xticks(ranks)
