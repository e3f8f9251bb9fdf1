"""Figures from a result: every function returns a matplotlib Figure and shows nothing."""

from daskfactor.plots.calibration import calibration_plot
from daskfactor.plots.factors import components, faces_panel, overview, particle_panel
from daskfactor.plots.particles import diversity_plot, scores_plot, top_entries_plot, weights_plot
from daskfactor.plots.traces import plot_ranks, trace_plot

__all__ = [
    "calibration_plot",
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
