"""Back and forth between the caller's order of rows and columns and the grid's."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData

Array = NDArray[Any]


def positions(order: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Where on the grid each of the caller's rows lies; None if they are not permuted."""
    if order is None:
        return None
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return position


def in_callers_order(data: BlockedData, side: str, values: Array, axis: int = 0) -> Array:
    """Rows (or columns) of a factor as the caller numbers them."""
    position = positions(data.row_order if side == "rows" else data.col_order)
    return values if position is None else np.take(values, position, axis=axis)
