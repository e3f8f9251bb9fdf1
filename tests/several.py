"""Data of tests are small, and would be one block each: here they are four, as large data are."""

import pytest

from daskfactor.data import grid


@pytest.fixture(autouse=True, scope="module")
def several_blocks():
    """Have two bands worth their price, however few entries a block has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "WORTHWHILE_WORK", 1)
        patch.setattr(grid, "USUAL_BLOCKS", 2)
        patch.setattr(grid, "TENSOR_BLOCKS", (2, *grid.TENSOR_BLOCKS[1:]))
        yield
