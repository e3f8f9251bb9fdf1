"""One page about a run."""

from typing import TYPE_CHECKING

import xarray as xr

from daskfactor.plots.canvas import INK, new_figure
from daskfactor.plots.factors import components, factor_moments, with_order
from daskfactor.plots.traces import trace_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overview(
    tree: xr.DataTree,
    image_shape: tuple[int, int] | None = None,
    count: int = 6,
    title: str | None = None,
) -> "Figure":
    """The trace of the log density above the strongest components; of particles, each by weight.

    Parameters are those of `trace_plot` and `components`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    tree, chain = with_order(tree, 0)
    shown = min(count, len(factor_moments(tree, "W", chain)[0]))
    figure = new_figure(9.0, 2.9 + 0.9 * shown)
    grid = figure.add_gridspec(2, 1, height_ratios=(2.6, 0.9 * shown + 0.3))
    upper = figure.add_subfigure(grid[0])
    lower = figure.add_subfigure(grid[1])
    trace_plot(tree, figure=upper)
    components(tree, image_shape=image_shape, count=count, chain=chain, figure=lower)
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    return figure
