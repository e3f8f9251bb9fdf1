"""Links from covariates to a factor: their draws, and the prior means that follow from them.

A link's conditional needs the whole factor, which is brought together for it.
Rows without any data tell nothing of it: they are integrated out wherever hyperparameters are
drawn, and drawn anew from their prior afterwards. Among many of them a link would hardly move.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from daskfactor.executors.state import ChainState
from daskfactor.inference.bands import pieces_of, take_array
from daskfactor.inference.program import SHIFT
from daskfactor.inference.setting import Setting, in_callers_order
from daskfactor.machine import single_threaded_blas

Array = NDArray[Any]
SIDES = ("rows", "columns")
LINKS = ("link_w", "link_h")
LINK_PRECISIONS = ("link_precision_w", "link_precision_h")


class Draw(NamedTuple):
    """A run, a state and random numbers, which hyperparameters are drawn given."""

    setting: Setting
    state: ChainState
    rng: Generator


def draw_link(context: Draw, factor: int, table: Array, ridge: float) -> Array:
    """Draw the link B of a factor, (F, K'); what it adds to prior means goes into the bands.

    Parameters
    ----------
    context
        Of a run whose model has covariates for the rows (``factor`` 0) or the columns (1).
    table
        Prior means and precisions of the factor's columns, (4, K').
    ridge
        As for `Covariates.draw_link`.
    """
    setting, state, rng = context
    moving: Any = table[3] > 0
    covariates, observed_covariates = setting.model.covariates[factor], setting.told[factor]
    residual = (telling_rows(setting, state, factor) - table[0])[:, moving]
    link = np.zeros((covariates.shape[1], len(moving)))
    with single_threaded_blas():  # the same bits whatever the machine does meanwhile
        link[:, moving] = observed_covariates.draw_link(residual, table[1, moving], ridge, rng)
        shift = covariates.predicted(link)
    place(setting, state, factor, SHIFT, shift)
    return link


def telling_rows(setting: Setting, state: ChainState, factor: int) -> Array:
    """Return the rows of a factor that have data, in the caller's order and double precision."""
    data, side = setting.data, SIDES[factor]
    seen = in_callers_order(data, side, observed(setting, factor))
    return in_callers_order(data, side, state.gather(side))[seen].astype(np.float64)


def place(setting: Setting, state: ChainState, factor: int, name: str, values: Array) -> None:
    """Put an array, a row for each of a factor's in the caller's order, into the bands."""
    data = setting.data
    order, values = (data.row_order, data.col_order)[factor], values.astype(data.dtype)
    pieces = pieces_of(data.grid, factor, values if order is None else values[order])
    state.each(partial(take_array, name=name), factor, pieces)


def observed(setting: Setting, factor: int) -> NDArray[np.bool_]:
    """Tell which rows (columns) have any data, in the grid's order."""
    data = setting.data
    return np.asarray((data.row_observed, data.col_observed)[factor] > 0)


def observed_pieces(setting: Setting, factor: int) -> list[NDArray[np.bool_]]:
    """Cut `observed` into bands'."""
    return pieces_of(setting.data.grid, factor, observed(setting, factor))


def telling(setting: Setting, factor: int) -> list[Any]:
    """Say which rows of every band of a factor tell of hyperparameters.

    They are all rows, or those that have data where there are covariates.
    """
    if setting.model.covariates[factor] is None:
        return [slice(None)] * setting.data.grid.blocks
    return observed_pieces(setting, factor)
