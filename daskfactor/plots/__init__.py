"""Figures of results: every function returns a matplotlib Figure without displaying it.

`FIGURES` lists the figures of a whole result by the names that `draw` and ``daskfactor plot`` use.
"""

from typing import NoReturn

from daskfactor.plots.calibration import calibration_plot as calibration_plot
from daskfactor.plots.components import components as components
from daskfactor.plots.components import curves as curves
from daskfactor.plots.components import maps as maps
from daskfactor.plots.components import overview as overview
from daskfactor.plots.components import shares as shares
from daskfactor.plots.components import top_entries as top_entries
from daskfactor.plots.particles import diversity_plot as diversity_plot
from daskfactor.plots.particles import weights_plot as weights_plot
from daskfactor.plots.pictures import faces_panel as faces_panel
from daskfactor.plots.pictures import particle_panel as particle_panel
from daskfactor.plots.registry import FIGURES as FIGURES
from daskfactor.plots.registry import draw as draw
from daskfactor.plots.registry import draw_all as draw_all
from daskfactor.plots.traces import plot_ranks as plot_ranks
from daskfactor.plots.traces import trace_plot as trace_plot


def __getattr__(name: str) -> NoReturn:
    moved = name in ("scores_plot", "top_entries_plot")
    advice = "; examples/readings.py draws this figure of a paper with matplotlib" if moved else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
