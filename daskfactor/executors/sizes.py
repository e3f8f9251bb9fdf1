"""What Dask is to take as the size of our objects, so that workers spill in time."""

from collections.abc import Callable
from typing import Any

from dask.sizeof import sizeof

from daskfactor.executors.graph import TaskResult
from daskfactor.executors.records import Outcome, Records
from daskfactor.executors.serialization import Packed
from daskfactor.executors.state import BlockCells, FactorBand
from daskfactor.kernels.views import BlockView, SparseBlock

OBJECT = 200
"""Bytes of a small Python object with its dictionary or slots."""


def register() -> None:
    """Tell Dask, in this process; may be called again."""
    sizes: dict[type, Callable[[Any], int]] = {
        FactorBand: band_bytes,
        BlockCells: cells_bytes,
        BlockView: lambda view: OBJECT + int(view.block.nbytes),
        SparseBlock: sparse_bytes,
        TaskResult: result_bytes,
        Outcome: outcome_bytes,
        Packed: lambda packed: len(packed.head) + sum(b.nbytes for b in packed.buffers),
    }
    registry: Any = sizeof
    for kind, size in sizes.items():
        registry.register(kind, size)


def band_bytes(band: FactorBand) -> int:
    """Bytes of a band with everything that travels with it."""
    arrays = (band.values, *band.arrays.values(), *band.draws)
    return OBJECT + sum(array.nbytes for array in arrays)


def cells_bytes(cells: BlockCells) -> int:
    """Bytes of a block's monitored cells."""
    return OBJECT + sum(
        array.nbytes for array in (cells.rows, cells.cols, cells.where, cells.mean, cells.m2)
    )


def sparse_bytes(block: SparseBlock) -> int:
    """Bytes of a sparse block; Dask takes a named tuple of arrays for a plain tuple."""
    return OBJECT + block.indptr.nbytes + block.indices.nbytes + block.values.nbytes


def records_bytes(records: Records) -> int:
    """Bytes of recorded draws."""
    return OBJECT + sum(
        draw.nbytes for parts in records.draws.values() for _, draws in parts for draw in draws
    )


def result_bytes(result: TaskResult) -> int:
    """Bytes of what a task returns."""
    bands = sum(band_bytes(band) for band in (*result.rows, *result.cols))
    cells = sum(cells_bytes(own) for own in result.cells.values())
    return bands + cells + records_bytes(result.records) + OBJECT * len(result.evaluations)


def outcome_bytes(outcome: Outcome) -> int:
    """Bytes of what one worker's part of a ring segment leaves behind."""
    bands = sum(band_bytes(band) for band in (*outcome.rows.values(), *outcome.cols.values()))
    cells = sum(own.mean.nbytes + own.m2.nbytes for own in outcome.cells.values())
    return bands + cells + records_bytes(outcome.records) + OBJECT * len(outcome.evaluations)
