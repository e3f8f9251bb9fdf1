"""Passes over the data: every band of a factor against all the blocks it meets.

The sums over a band's blocks are taken in the blocks' order by one worker, so
they have the same bits on every executor.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.engine.base import Executor
from daskfactor.engine.state import ChainState, FactorBand
from daskfactor.io.blocks import BlockedData
from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.workspace import Workspace

Array = NDArray[Any]


class Fit(NamedTuple):
    """Sums over the observed entries: -Σ d_β(v|μ) and Σ (v - μ)² μ^(β-2)."""

    negative_divergence: float
    pearson: float


class Share(NamedTuple):
    """Numerator and denominator of the multiplicative update, each (rows, K)."""

    numerator: Array
    denominator: Array


def _share(
    side: str,
    number: int,
    data: BlockedData,
    state: ChainState,
    beta: float,
    floor: float,
    work: Workspace,
) -> Share:
    """The share of one band, summed over the blocks it meets, in their order."""
    by_rows = side == "rows"
    own = (state.rows if by_rows else state.cols)[number].values
    kernels = dense_kernels(beta)
    multiplicative = kernels.multiplicative_rows if by_rows else kernels.multiplicative_cols
    share = Share(np.zeros_like(own), np.zeros_like(own))
    for other in range(data.grid.blocks):
        row, col = (number, other) if by_rows else (other, number)
        view = data.view(row, col)
        buffers = work.arrays(view.m, view.n, own.shape[1], own.dtype)
        multiplicative(
            view.array,
            view.row0,
            view.col0,
            state.rows[row].values,
            state.cols[col].values,
            floor,
            *share,
            buffers.tile,
            buffers.tile2,
        )
    return share


def shares(
    executor: Executor, data: BlockedData, state: ChainState, side: str, beta: float, floor: float
) -> list[Share]:
    """Numerators and denominators for every band of one side, at the present state."""
    bands = range(data.grid.blocks)
    return executor.map(
        lambda band, work: _share(side, band, data, state, beta, floor, work), bands
    )


def evaluate(
    executor: Executor, data: BlockedData, state: ChainState, beta: float, floor: float
) -> Fit:
    """How well a state fits, summed over blocks in row-major order."""
    none = np.empty(0, np.int32)

    def one_row(row: int, work: Workspace) -> Array:
        values = state.rows[row].values
        nothing = np.empty(0, values.dtype)
        sums = np.zeros((len(state.cols), 2))
        for col, band in enumerate(state.cols):
            view = data.view(row, col)
            buffers = work.arrays(view.m, view.n, values.shape[1], values.dtype)
            dense_kernels(beta).evaluate(
                view.array,
                view.row0,
                view.col0,
                values,
                band.values,
                floor,
                buffers.tile,
                sums[col],
                none,
                none,
                nothing,
                nothing,
                1,
            )
        return sums

    table = np.concatenate(executor.map(one_row, range(data.grid.blocks)))
    return Fit(*(float(total) for total in table.sum(axis=0)))


def total(bands: list[FactorBand]) -> float:
    """Sum of all entries of a factor, band by band."""
    return float(sum(float(band.values.sum(dtype=np.float64)) for band in bands))
