"""Coverage of predictive intervals at held-out cells with known values."""

from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import cells_at, cells_of_tensor
from daskfactor.data.holdout import find_cells
from daskfactor.errors import OptionError
from daskfactor.results.predict import monitored, predict, predict_at
from daskfactor.runs.schema import CELL_INDICES, MONITOR
from daskfactor.runs.trace import Run, Trace, reads_in_threads

Cells = tuple[ArrayLike, ...]

CELLS: Final = "held-out cells are a pair (rows, columns) of integer positions"
LEVELS: Final = (0.5, 0.8, 0.9, 0.95)


@reads_in_threads
def held_out_coverage(
    trace: Trace, cells: Cells, values: ArrayLike, levels: tuple[float, ...] = LEVELS
) -> xr.Dataset:
    r"""Compare predictions of held-out cells with their observed values.

    Parameters
    ----------
    trace
        Result of a run, or the path of its store, that kept draws or monitored these cells.
    cells
        Positions of rows and columns (for a tensor, along each axis), as `hold_out` returns them.
    values
        Observed values of these cells, in the unit of the data; NaN is ignored.
    levels
        Probabilities of the intervals.

    Returns
    -------
    Dataset
        Over ``level``: ``inside``, the share of cells inside their predictive interval, and
        ``error``, its standard error for independent cells; ``rmse`` and ``mae`` of the
        posterior mean; ``cells``, the number of cells.

    Raises
    ------
    OptionError
        If cells and values do not match, or the run cannot predict these cells.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> held = dfac.hold_out(V, 0.1, random_seed=0)
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(held.train, dfac.TweedieNMF(2), **run)
    >>> dfac.held_out_coverage(trace, held.cells, held.values)["inside"].dims
    ('level',)
    """
    run = Run.of(trace)
    at: Any = cells if run.axes is None else cells_of_tensor(cells, run.axes.sizes) or ((), ())
    rows, columns = (np.asarray(one).ravel() for one in at)
    observed = np.asarray(values, dtype=np.float64).ravel()
    if not rows.size == columns.size == observed.size or not observed.size:
        raise OptionError(
            "held-out cells need a row, a column and a value each, got "
            f"{rows.size} rows, {columns.size} columns and {observed.size} values; pass the cells "
            "and values of hold_out()"
        )
    valid = np.isfinite(observed)
    rows, columns, observed = rows[valid], columns[valid], observed[valid]
    inside = []
    mean = np.zeros(0)
    for level in levels:
        prediction = _predicted(run, rows, columns, level)
        mean = prediction["mean"].values
        within = (observed >= prediction["lower"].values) & (observed <= prediction["upper"].values)
        inside.append(float(within.mean()))
    share = np.array(inside)
    return xr.Dataset(
        {
            "inside": ("level", share),
            "error": ("level", np.sqrt(share * (1 - share) / observed.size)),
            "rmse": float(np.sqrt(np.mean((observed - mean) ** 2))),
            "mae": float(np.mean(np.abs(observed - mean))),
            "cells": observed.size,
        },
        coords={"level": list(levels)},
        attrs={"of": prediction.attrs["of"]},
    )


def _predicted(run: Run, rows: NDArray[Any], columns: NDArray[Any], level: float) -> xr.Dataset:
    """Return predictions of some cells from monitored moments, or from the draws.

    ``columns`` of a tensor are those of its first unfolding.
    """
    if MONITOR in run:
        stored = [run.group(MONITOR)[name].values.astype(np.int64) for name in CELL_INDICES]
        width = int(max(stored[1].max(), columns.max())) + 1
        requested = rows.astype(np.int64) * width + columns.astype(np.int64)
        at, absent = find_cells(stored[0] * width + stored[1], requested)
        if not absent.any():
            return monitored(run.tree, interval=level).isel(cell=at)
    if not run.has_draws:
        raise OptionError(
            "the run stored only moments and did not monitor these cells; run again with "
            "monitor=held.cells, or keep='draws'"
        )
    if run.axes is not None:
        return predict(run.tree, (rows, *run.axes.fibres(columns)), interval=level).load()
    run.require_matrix("predict")
    shape = [run.posterior.sizes[dim] for dim in run.dims]
    rows, columns = cells_at((rows, columns), shape, CELLS)
    cells = xr.DataArray(rows, dims="cell"), xr.DataArray(columns, dims="cell")
    return predict_at(run, cells, level).load()
