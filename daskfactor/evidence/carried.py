"""A data set as a whole chain on a worker needs it: its blocks, and what is known of them."""

from typing import Any

from daskfactor.data.blocks import BlockedData


class CarriedData:
    """Stands in for a `BlockedData` where the blocks may be read by another process.

    When it is sent to a worker, the blocks become that worker's own reader of them, and
    the counts, moments and extremes go along. Only what chains ask for is here.
    """

    def __init__(self, data: BlockedData) -> None:
        self.blocks: Any = data
        self.grid = data.grid
        self.dtype = data.dtype
        self.statistics = data.statistics
        self.unstored = data.unstored
        self.row_order = data.row_order
        self.col_order = data.col_order
        self.shape = data.shape
        self.is_sparse = data.is_sparse
        self.n_stored = data.n_stored
        self.n_observed = data.n_observed
        self.row_observed = data.row_observed
        self.col_observed = data.col_observed
        self.total_observed = data.total_observed
        self.mean = data.mean
        self.minimum = data.minimum
        self.maximum = data.maximum
        self.is_integer = data.is_integer

    def view(self, row: int, col: int) -> Any:
        """Block (row, col), for reading."""
        return self.blocks.view(row, col)
