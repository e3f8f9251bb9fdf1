"""Figures from a result: every function returns a matplotlib Figure and shows nothing."""

from daskfactor.plots.factors import components
from daskfactor.plots.images import faces_panel
from daskfactor.plots.overview import overview
from daskfactor.plots.panels import particle_panel
from daskfactor.plots.particles import diversity_plot, weights_plot
from daskfactor.plots.ranks import plot_ranks
from daskfactor.plots.readings import scores_plot, top_entries_plot
from daskfactor.plots.traces import trace_plot

__all__ = [
    "components",
    "diversity_plot",
    "faces_panel",
    "overview",
    "particle_panel",
    "plot_ranks",
    "scores_plot",
    "top_entries_plot",
    "trace_plot",
    "weights_plot",
]
