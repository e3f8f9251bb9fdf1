"""What an executor moves about: bands of factors, and statistics of blocks."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid

Array = NDArray[Any]


@dataclass(slots=True)
class FactorBand:
    """One band of a factor with everything that travels with it.

    Attributes
    ----------
    offset
        Global number of the band's first row (part of the noise's address).
    values
        The factor, shape (rows, K).
    arrays
        Whatever the sampler keeps per entry (metric, moments, momentum), by
        name, each of the shape of ``values``.
    counts
        Small counters that belong to ``arrays``, by name.
    draws
        Copies of ``values`` at the recorded cycles of the running segment.
    sums
        Sum of ``values`` at the recorded or evaluated cycles, by cycle.
    """

    offset: int
    values: Array
    arrays: dict[str, Array] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    draws: list[Array] = field(default_factory=list)
    sums: dict[int, float] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self.arrays)

    def copy(self) -> "FactorBand":
        """An independent copy; recorded draws are never written to and stay shared."""
        return FactorBand(
            self.offset,
            self.values.copy(),
            {name: array.copy() for name, array in self.arrays.items()},
            dict(self.counts),
            list(self.draws),
            dict(self.sums),
        )


@dataclass(slots=True)
class BlockCells:
    """Monitored cells of one block, and the moments of their predicted means.

    ``rows`` and ``cols`` are local to the block, in row-major order; ``where``
    is their position in the caller's list.
    """

    rows: NDArray[np.int32]
    cols: NDArray[np.int32]
    where: NDArray[np.int64]
    mean: Array
    m2: Array
    count: int = 0

    def copy(self) -> "BlockCells":
        return replace(self, mean=self.mean.copy(), m2=self.m2.copy())


@dataclass(slots=True)
class Evaluation:
    """Sums over the observed entries of one block at the end of one cycle."""

    cycle: int
    block: Block
    values: NDArray[np.float64]


@dataclass(slots=True)
class ChainState:
    """Everything one chain carries from segment to segment."""

    rows: list[FactorBand]
    cols: list[FactorBand]
    cells: dict[Block, BlockCells]
    evaluations: list[Evaluation] = field(default_factory=list)

    def copy(self) -> "ChainState":
        return ChainState(
            [band.copy() for band in self.rows],
            [band.copy() for band in self.cols],
            {block: cells.copy() for block, cells in self.cells.items()},
            list(self.evaluations),
        )

    def forget(self) -> None:
        """Drop what the running segment recorded, once it has been read."""
        for band in (*self.rows, *self.cols):
            band.draws.clear()
            band.sums.clear()
        self.evaluations.clear()

    def bands(self) -> list[FactorBand]:
        """All bands, rows first."""
        return [*self.rows, *self.cols]

    def gather(self, side: str, name: str | None = None) -> Array:
        """A whole factor (or one of its arrays), bands put together: shape (I, K) or (J, K)."""
        bands = self.rows if side == "rows" else self.cols
        return np.concatenate(
            [band.values if name is None else band.arrays[name] for band in bands]
        )

    def gather_draws(self, side: str) -> Array:
        """The draws of the segment, shape (draws, I, K) or (draws, J, K)."""
        bands = self.rows if side == "rows" else self.cols
        return np.concatenate([np.stack(band.draws) for band in bands], axis=1)


def split_factor(factor: Array, offsets: tuple[int, ...]) -> list[Array]:
    """Bands of a factor, each contiguous; views where the factor allows it."""
    return [np.ascontiguousarray(factor[low:high]) for low, high in itertools.pairwise(offsets)]


def make_state(grid: Grid, row_factor: Array, col_factor: Array) -> ChainState:
    """A chain's state from whole factors, W (I, K) and Hᵀ (J, K)."""
    return ChainState(
        [
            FactorBand(offset, values)
            for offset, values in zip(
                grid.rows.offsets, split_factor(row_factor, grid.rows.offsets), strict=False
            )
        ],
        [
            FactorBand(offset, values)
            for offset, values in zip(
                grid.cols.offsets, split_factor(col_factor, grid.cols.offsets), strict=False
            )
        ],
        {},
    )


def place_cells(
    grid: Grid, rows: NDArray[np.int64], cols: NDArray[np.int64], dtype: np.dtype[Any]
) -> dict[Block, BlockCells]:
    """Sort monitored cells into the blocks they lie in."""
    row_band = np.searchsorted(grid.rows.offsets, rows, side="right") - 1
    col_band = np.searchsorted(grid.cols.offsets, cols, side="right") - 1
    code = row_band * grid.blocks + col_band
    order = np.lexsort((cols, rows, code))
    starts = np.searchsorted(code[order], np.arange(grid.blocks**2 + 1))
    placed = {}
    for block in grid.all_blocks():
        number = block.row * grid.blocks + block.col
        where = order[starts[number] : starts[number + 1]]
        if where.size:
            placed[block] = BlockCells(
                (rows[where] - grid.rows.offsets[block.row]).astype(np.int32),
                (cols[where] - grid.cols.offsets[block.col]).astype(np.int32),
                where.astype(np.int64),
                np.zeros(where.size, dtype),
                np.zeros(where.size, dtype),
            )
    return placed
