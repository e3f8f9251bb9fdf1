"""The part of the log-likelihood that does not depend on the factors."""

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.kernels.blockwise import observed_values
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.divergence import log_normalizer

CHEAP = (2.0, 1.0, 0.5, 0.0, -1.0)
"""Powers whose density has a closed form."""


def log_normalizer_sum(
    data: BlockedData, dispersion: float, beta: float, executor: Executor
) -> float:
    """Σ log p(v | μ) + d_β(v | μ) / φ over the observed entries.

    Zero, so that log-likelihoods are relative ones, for powers without a closed
    form, where it would cost a series per entry.
    """
    return normalizer(data, dispersion, beta, executor) if beta in CHEAP else 0.0


def normalizer(data: BlockedData, dispersion: float, beta: float, executor: Executor) -> float:
    """Σ log p(v | μ) + d_β(v | μ) / φ over the observed entries, for every β with a density."""

    def one_row(row: int, work: Workspace) -> float:
        del work
        total = 0.0
        for col in range(data.grid.blocks):
            for values, zeros in observed_values(data.view(row, col)):
                total += float(log_normalizer(values, dispersion, beta).sum())
                if zeros:
                    total += zeros * float(log_normalizer(np.zeros(1), dispersion, beta)[0])
        return total

    return float(sum(executor.map(one_row, range(data.grid.blocks))))
