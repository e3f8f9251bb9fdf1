"""Passes over the data: every band of a factor against all the blocks it meets.

The sums over a band's blocks are taken in the blocks' order by one worker, so
they have the same bits on every executor.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.kernels import blockwise
from daskfactor.kernels.blockwise import observed_values
from daskfactor.kernels.views import Workspace
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.settings import Mask

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
    likelihood: Likelihood,
    floor: float,
    work: Workspace,
) -> Share:
    """Add up the share of one band over the blocks it meets, in their order."""
    by_rows = side == "rows"
    own = (state.rows if by_rows else state.cols)[number].values
    share = Share(np.zeros_like(own), np.zeros_like(own))
    for other in range(data.grid.blocks):
        row, col = (number, other) if by_rows else (other, number)
        factors = (state.rows[row].values, state.cols[col].values)
        blockwise.multiplicative(
            data.view(row, col), likelihood, by_rows, *factors, floor, share, work
        )
    return share


def shares(
    executor: Executor,
    data: BlockedData,
    state: ChainState,
    side: str,
    likelihood: Likelihood,
    floor: float,
) -> list[Share]:
    """Return numerators and denominators for every band of one side, at the present state."""
    return executor.map(
        lambda band, work: _share(side, band, data, state, likelihood, floor, work),
        range(data.grid.blocks),
        "multiplicative-update",
    )


def evaluate(
    executor: Executor, data: BlockedData, state: ChainState, likelihood: Likelihood, floor: float
) -> Fit:
    """Evaluate how well a state fits, summed over blocks in row-major order."""

    def one_row(row: int, work: Workspace) -> Array:
        values = state.rows[row].values
        sums = np.zeros((len(state.cols), 2))
        for col, band in enumerate(state.cols):
            blockwise.evaluate(
                data.view(row, col), likelihood, values, band.values, floor, sums[col], None, work
            )
        return sums

    table = np.concatenate(executor.map(one_row, range(data.grid.blocks), "log-likelihood"))
    return Fit(*(float(total) for total in table.sum(axis=0)))


def total(bands: list[FactorBand], frozen: Mask = None) -> float:
    """Add up all entries of a factor that are not frozen, band by band."""
    return float(sum(float(moving(band, frozen).sum(dtype=np.float64)) for band in bands))


def total_log(bands: list[FactorBand], frozen: Mask = None) -> float:
    """Add up their logarithms; a zero counts as the smallest normal number."""
    tiny = np.finfo(bands[0].values.dtype).tiny
    return math.fsum(
        float(np.log(np.maximum(moving(band, frozen), tiny)).sum(dtype=np.float64))
        for band in bands
    )


def moving(band: FactorBand, frozen: Mask) -> Array:
    """Return the columns of a band that are not frozen."""
    return band.values if frozen is None else band.values[:, ~frozen]


def log_normalizer_sum(
    data: BlockedData, dispersion: float, likelihood: Likelihood, executor: Executor
) -> float:
    """Σ log p(v | μ) + d_β(v | μ) / φ over the observed entries.

    Zero, so that log-likelihoods are relative ones, for laws without a closed
    form, where it would cost a series per entry.
    """
    return normalizer(data, dispersion, likelihood, executor) if likelihood.closed_form else 0.0


def normalizer(
    data: BlockedData, dispersion: float, likelihood: Likelihood, executor: Executor
) -> float:
    """Σ log p(v | μ) + d_β(v | μ) / φ over the observed entries, for every law with a density."""

    def one_row(row: int, work: Workspace) -> float:
        del work
        total = 0.0
        for col in range(data.grid.blocks):
            for values, zeros in observed_values(data.view(row, col)):
                total += float(likelihood.log_normalizer(values, dispersion).sum())
                if zeros:
                    total += zeros * float(likelihood.log_normalizer(np.zeros(1), dispersion)[0])
        return total

    return float(sum(executor.map(one_row, range(data.grid.blocks), "log-normalizer")))
