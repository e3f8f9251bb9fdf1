"""Ranks of a calibration: histograms, and distribution functions with simultaneous bands."""

from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import (
    check_table,
    in_style,
    new_figure,
    save,
    subplots,
    theme,
)
from daskfactor.results.ranks import band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 16
"""Bars of a histogram."""


@in_style
def calibration_plot(
    calibration: xr.Dataset,
    most: int = 5,
    path: str | PathLike[str] | None = None,
    overwrite: bool = False,
) -> "Figure":
    """Draw the ranks of the true values, the least uniform quantities first.

    Above, how often ranks came up: bars should stay in the band, which each leaves once in
    twenty times. Below, how far the distribution function of ranks is from that of uniform
    ones: under uniform ranks the whole line stays in the band 19 times out of 20.

    Parameters
    ----------
    calibration : xarray.Dataset
        A result of `calibrate`.
    most
        Quantities to show.
    path
        Picture to write; its suffix is the format.
    overwrite
        Whether to replace a picture that is there already.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If it is no such result, or matplotlib is not installed.
    StoreError
        If the picture is there already.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.TweedieNMF(1, rate_w=1.0, rate_h=1.0, dispersion=1.0)
    >>> run = {"draws": 50, "tune": 50, "random_seed": 0, "progressbar": False}
    >>> found = dfac.calibrate(model, (4, 3), dfac.Gibbs(), replications=20, **run)
    >>> figure = dfac.plots.calibration_plot(found)
    >>> len(figure.axes) > 1
    True
    """
    whole = {"rank", "levels", "p"} <= set(calibration.data_vars)
    check_table(calibration, whole, "calibration_plot", "calibrate")
    shown = calibration.isel(quantity=calibration["levels"].values > 0).isel(quantity=slice(most))
    count = shown.sizes["quantity"]
    if not count:
        raise OptionError("no quantity has draws enough to be ranked among; calibrate with more")
    figure = new_figure(max(2.1 * count, 4.0), 3.6)
    axes = subplots(figure, 2, count, sharey="row", height_ratios=(3, 2))
    for number, (above, below) in enumerate(axes.T):
        _panel(above, below, shown.isel(quantity=number))
    axes[0, 0].set_ylabel("over uniform")
    axes[1, 0].set_ylabel("ECDF - uniform")
    return save(figure, path, overwrite)


def _panel(above: "Axes", below: "Axes", one: xr.Dataset) -> None:
    from scipy.stats import binom

    ranks, levels = one["rank"].values, int(one["levels"])
    bars = min(MOST_BARS, levels + 1)
    seen = np.bincount(ranks * bars // (levels + 1), minlength=bars) * bars / ranks.size
    low, high = (binom.ppf(end, ranks.size, 1 / bars) * bars / ranks.size for end in (0.025, 0.975))
    above.axhspan(low, high, color=theme().quiet, alpha=0.45, lw=0)
    middle = (np.arange(bars) + 0.5) / bars
    outside = (seen < low) | (seen > high)
    above.bar(middle, seen, 0.85 / bars, color=np.where(outside, theme().warn, theme().accent))
    above.set_title(f"{one['quantity'].item()}, p {float(one['p']):.2g}")
    at = np.arange(1, levels + 1) / (levels + 1)
    share = np.bincount(ranks, minlength=levels + 1).cumsum()[:-1] / ranks.size
    lower, upper = band(ranks.size, levels)
    below.fill_between(at, lower - at, upper - at, color=theme().quiet, alpha=0.45, lw=0)
    below.axhline(0.0, color=theme().ink, lw=0.5)
    below.step(at, share - at, where="post", color=theme().accent, lw=1.1)
    below.set_xlabel("rank over draws")
    for ax in (above, below):
        ax.set_xlim(0, 1)
