"""Figures from a result: every function returns a matplotlib Figure and shows nothing."""

from daskfactor.plots.factors import components
from daskfactor.plots.images import faces_panel
from daskfactor.plots.overview import overview
from daskfactor.plots.ranks import plot_ranks
from daskfactor.plots.traces import trace_plot

__all__ = ["components", "faces_panel", "overview", "plot_ranks", "trace_plot"]
