"""Data of tests are small, and would be one block each: here they are four, as large data are."""

import pytest

from daskfactor.data import grid, tensor


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Have two bands worth their price, however few entries a block has."""
    monkeypatch.setattr(grid, "WORTHWHILE_WORK", 1)
    monkeypatch.setattr(grid, "USUAL_BLOCKS", 2)
    monkeypatch.setattr(tensor, "WORTHWHILE_BLOCK", 0)
    monkeypatch.setattr(tensor, "USUAL_BANDS", 2)
