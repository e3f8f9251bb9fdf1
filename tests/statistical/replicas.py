"""Many independent copies of a tiny problem in one matrix.

A matrix with the copies on its diagonal and nothing observed elsewhere has a
posterior that is the product of the copies' own, because a row and a column
only meet in the likelihood where an entry is observed. Rows are ordered so that
row r of every copy comes before row r + 1 of any, and columns likewise, so that
the grid's bands cut through every copy as they would through a single one. One
run of the real sampler then gives as many chains as there are copies.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.executors import LanesExecutor
from daskfactor.inference.base import RunOptions, Sampler, Setting
from daskfactor.inference.langevin import PSGLD
from daskfactor.models.tweedie import TweedieNMF
from tests.statistical.exact import Case

Array = NDArray[Any]


class Moments(NamedTuple):
    """Over draws and copies: E μ and Var μ per cell (NaN where missing), E ΣW; with errors."""

    mean: Array
    mean_error: Array
    variance: Array
    sum_w: float


def replicate(V: Array, copies: int) -> Array:
    """The block-diagonal matrix of ``copies`` copies, rows and columns interleaved."""
    rows, cols = V.shape
    out = np.full((rows, copies, cols, copies), np.nan)
    each = np.arange(copies)
    out[:, each, :, each] = V
    return out.reshape(rows * copies, cols * copies)


def cells_of(shape: tuple[int, int], copies: int) -> tuple[Array, Array]:
    """Positions of all cells of all copies, shape (copies, rows, cols) flattened."""
    rows, cols = shape
    each, row, col = np.meshgrid(np.arange(copies), np.arange(rows), np.arange(cols), indexing="ij")
    return (row * copies + each).ravel(), (col * copies + each).ravel()


def run_copies(
    case: Case,
    sampler: Sampler,
    *,
    copies: int = 200,
    tune: int = 300,
    draws: int = 1500,
    seed: int = 0,
    blocks: int | None = None,
    stored: bool = False,
) -> list[Moments]:
    """Moments from the sampler, one for each of its tracks (fine, coarse).

    ``blocks`` are bands a side, by default as many as cut through every row or column;
    ``stored``: the matrix is sparse, and what is not stored is missing.
    """
    grid = blocks or min(case.V.shape)
    V: Any = replicate(case.V, copies)
    reading: dict[str, Any] = {}
    if stored:
        seen = np.nonzero(~np.isnan(V))
        V, reading = sparse.coo_array((V[seen], seen), V.shape), {"unstored": "missing"}
    with as_blocks(V, grid, dtype="float64", **reading) as data:
        model = TweedieNMF(
            case.K,
            beta=case.beta,
            dispersion=case.dispersion,
            rate_w=case.rate_w,
            rate_h=case.rate_h,
            shape_w=case.shape_w,
            shape_h=case.shape_h,
        )
        options = RunOptions(draws, tune, 1, 1, seed, "moments", 0, "float64")
        cells = cells_of(case.V.shape, copies)
        executor = LanesExecutor(2)
        setting = Setting(data, model, sampler, options, executor, cells)
        chain = sampler.chain(setting, 0)
        chain.start()
        for end in setting.ends:
            chain.advance(end)
            chain.forget()
        executor.close()
        assert not chain.divergences
        return [_moments(run, case, copies) for run in chain.tracks]


def _moments(run: Any, case: Case, copies: int) -> Moments:
    shape = (copies, *case.V.shape)
    means = run.gather_cells("mean").reshape(shape)
    within = run.gather_cells("m2").reshape(shape) / run.cell_count
    sums = run.state.gather("rows", "mean").sum() / copies
    return Moments(
        means.mean(axis=0),
        means.std(axis=0) / np.sqrt(copies),
        within.mean(axis=0) + means.var(axis=0),
        float(sums),
    )


def with_step(sampler: PSGLD, size: float) -> PSGLD:
    """The same sampler at another step."""
    return replace(sampler, step=size)
