import numpy as np
import xarray as xr

from daskfactor import plots
from daskfactor.errors import OptionError
from tests.refusals import refused


def table(scored=True):
    names = ["log_evidence", "standard_error", "discretization_error"]
    if scored:
        names += ["held_out_log_score", "held_out_difference_error"]
    columns = {name: ("rank", np.array([-3.0, -1.0, -2.0])) for name in names}
    attrs = {"best": 2, "not_distinguishable": [3], "best_held_out": 2}
    return abs(xr.Dataset(columns, coords={"rank": [1, 2, 3]})).assign_attrs(attrs)


def test_two_panels_or_one_and_a_file(tmp_path):
    figure = plots.plot_ranks(table(), tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["evidence", "cells left out"]
    assert len(plots.plot_ranks(table(scored=False)).axes) == 1


def test_it_wants_a_table_of_ranks():
    refused(OptionError, "select_rank", plots.plot_ranks, xr.Dataset())
