"""Figure of the ranks of a calibration: histograms, and ECDFs with simultaneous bands."""

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

MAX_BARS = 16
"""Largest number of bars of a histogram."""


@in_style
def calibration_plot(
    calibration: xr.Dataset,
    most: int = 5,
    path: str | PathLike[str] | None = None,
    overwrite: bool = False,
) -> "Figure":
    """Draw the ranks of the true values, the least uniform quantities first.

    The upper row shows histograms of the ranks: under uniform ranks, each bar lies in the band with
    a probability of 95 %. The lower row shows the distribution function of the ranks minus the
    uniform one: under uniform ranks, the whole line lies in the band with a probability of 95 %.

    Parameters
    ----------
    calibration : xarray.Dataset
        Result of `calibrate`.
    most
        Largest number of quantities to show.
    path
        Image file to write; its suffix selects the format.
    overwrite
        Whether to replace an existing file.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If the dataset is not a result of `calibrate`, or matplotlib is not installed.
    StoreError
        If the file exists.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.TweedieNMF(1, rate_w=1.0, rate_h=1.0, dispersion=1.0)
    >>> run = {"draws": 50, "tune": 50, "random_seed": 0, "progressbar": False}
    >>> calibration = dfac.calibrate(model, (4, 3), dfac.Gibbs(), replications=20, **run)
    >>> figure = dfac.plots.calibration_plot(calibration)
    >>> len(figure.axes) > 1
    True
    """
    is_complete = {"rank", "levels", "p"} <= set(calibration.data_vars)
    check_table(calibration, is_complete, "calibration_plot", "calibrate")
    ranked = calibration.isel(quantity=calibration["levels"].values > 0).isel(quantity=slice(most))
    count = ranked.sizes["quantity"]
    if not count:
        raise OptionError("no quantity has enough draws for ranks; pass more draws to calibrate()")
    figure = new_figure(max(2.1 * count, 4.0), 3.6)
    axes = subplots(figure, 2, count, sharey="row", height_ratios=(3, 2))
    for number, (above, below) in enumerate(axes.T):
        _panel(above, below, ranked.isel(quantity=number))
    axes[0, 0].set_ylabel("frequency / uniform")
    axes[1, 0].set_ylabel("ECDF - uniform")
    return save(figure, path, overwrite)


def _panel(above: "Axes", below: "Axes", one: xr.Dataset) -> None:
    """Draw the histogram of the ranks of a quantity, and the difference of the ECDF below it."""
    from scipy.stats import binom

    ranks, levels = one["rank"].values, int(one["levels"])
    bars = min(MAX_BARS, levels + 1)
    frequency = np.bincount(ranks * bars // (levels + 1), minlength=bars) * bars / ranks.size
    low, high = (binom.ppf(end, ranks.size, 1 / bars) * bars / ranks.size for end in (0.025, 0.975))
    above.axhspan(low, high, color=theme().quiet, alpha=0.45, lw=0)
    middle = (np.arange(bars) + 0.5) / bars
    outside = (frequency < low) | (frequency > high)
    above.bar(middle, frequency, 0.85 / bars, color=np.where(outside, theme().warn, theme().accent))
    above.set_title(f"{one['quantity'].item()}, p {float(one['p']):.2g}")
    at = np.arange(1, levels + 1) / (levels + 1)
    share = np.bincount(ranks, minlength=levels + 1).cumsum()[:-1] / ranks.size
    lower, upper = band(ranks.size, levels)
    below.fill_between(at, lower - at, upper - at, color=theme().quiet, alpha=0.45, lw=0)
    below.axhline(0.0, color=theme().ink, lw=0.5)
    below.step(at, share - at, where="post", color=theme().accent, lw=1.1)
    below.set_xlabel("rank / number of draws")
    for ax in (above, below):
        ax.set_xlim(0, 1)
