"""One temperature of a factorization: a chain that draws from p(V | W, H)^t p(W, H).

Either rows are moved one by one, and accepted or not, which has no bias of a step size, or a
sampler of the package does it as in a whole run. At t = 0 the prior is drawn from instead.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.evidence.quadrature import FitSeries
from daskfactor.executors import SerialExecutor
from daskfactor.executors.state import make_state
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.options import RunOptions
from daskfactor.inference.passes import evaluate
from daskfactor.kernels.rowwise import LONGEST, SMALLEST, Entries, Prior, Target, row_kernels
from daskfactor.kernels.views import AnyBlock, SparseBlock
from daskfactor.models.fixed import FixedComponents
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.tweedie import TweedieNMF

Array = NDArray[Any]
Factor = NDArray[np.float64]

BATCHES = 12
"""Parts of tuning, after each of which the proposal's length is looked at."""
LEAST_ACCEPTED = 0.25
CLIMB = 300
"""Multiplicative updates before the first sweep."""
SMALLEST_MEAN = 1e-30
"""Floor of μ for likelihoods under the prior, which no gradient is taken of."""


class Sides(NamedTuple):
    """The same entries by rows and by columns.

    ``constant`` is what -Σ d_β(v|μ) has besides the part that the kernels compute.
    """

    by_rows: Entries
    by_cols: Entries
    constant: float


def listed_entries(data: BlockedData, likelihood: Likelihood) -> int:
    """Count the cells that a sweep over rows looks at.

    Zeros need no look where they are summed over rows; cells that sparse input leaves out as
    missing do, because they are taken off the sums over all.
    """
    if data.is_sparse and data.unstored == "zero" and likelihood.zeros == "constant":
        return int(data.n_stored.sum())
    return data.shape[0] * data.shape[1] if data.is_sparse else data.total_observed


def both_sides(data: BlockedData, likelihood: Likelihood) -> Sides:
    """Copy the observed entries, in the grid's order, for `daskfactor.kernels.rowwise`."""
    summed = likelihood.zeros == "constant"
    found = [
        _cells(data.view(block.row, block.col), summed, *_corner(data, block.row, block.col))
        for block in data.grid.all_blocks()
    ]
    seen = np.concatenate([cells for cells, _ in found], axis=1)
    gone = np.concatenate([cells for _, cells in found], axis=1)
    rows, cols = data.shape
    return Sides(
        _by_rows(seen, gone, (rows, cols)),
        _by_rows(seen[[1, 0, 2]], gone[[1, 0, 2]], (cols, rows)),
        likelihood.fit_constant(seen[2]),
    )


def _corner(data: BlockedData, row: int, col: int) -> tuple[int, int]:
    return data.grid.rows.offsets[row], data.grid.cols.offsets[col]


def _cells(view: AnyBlock, summed: bool, row0: int, col0: int) -> tuple[Array, Array]:
    """(rows, columns, values) of the entries to list and of the missing ones, (3, n) each.

    Zeros are not listed if they are ``summed`` over rows.
    """
    if isinstance(view, SparseBlock):
        rows = np.repeat(np.arange(view.m), np.diff(view.indptr))
        stored = np.stack([rows + row0, view.indices.astype(np.int64) + col0, view.values])
        missing = np.isnan(stored[2])
        if not view.zeros:
            missing = _complement(view, stored[:2], row0, col0)
            return stored[:, ~np.isnan(stored[2])], missing
        listed = stored[:, ~missing]
        if not summed:
            zeros = _complement(view, stored[:2], row0, col0)
            listed = np.concatenate([listed, zeros], axis=1)
        return listed, stored[:, missing]
    block = np.asarray(view.block, dtype=np.float64)
    missing = np.isnan(block)
    listed = ~missing & (block != 0) if summed else ~missing
    return _positions(block, listed, row0, col0), _positions(block, missing, row0, col0)


def _complement(view: SparseBlock, stored: Array, row0: int, col0: int) -> Array:
    """List the cells of a block that it does not store."""
    absent = np.ones((view.m, view.n), dtype=bool)
    absent[stored[0].astype(np.int64) - row0, stored[1].astype(np.int64) - col0] = False
    return _positions(np.zeros(absent.shape), absent, row0, col0)


def _positions(block: Array, wanted: NDArray[np.bool_], row0: int, col0: int) -> Array:
    rows, cols = np.nonzero(wanted)
    return np.stack([rows + row0, cols + col0, block[rows, cols]]).astype(np.float64)


def _by_rows(seen: Array, gone: Array, shape: tuple[int, int]) -> Entries:
    pointers, columns, values = _compressed(seen, shape)
    missing_pointers, missing, _ = _compressed(gone, shape)
    return Entries(pointers, columns, values, missing_pointers, missing)


def _compressed(cells: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Row pointers, columns and values, rows and columns ascending."""
    rows, cols = cells[:2].astype(np.int64)
    order = np.lexsort((cols, rows))
    pointers = np.searchsorted(rows[order], np.arange(shape[0] + 1)).astype(np.int64)
    return pointers, cols[order], np.ascontiguousarray(cells[2][order])


def prior_draw(
    model: TweedieNMF, data: BlockedData, rng: np.random.Generator
) -> tuple[Factor, Factor]:
    """Draw W (I, K) and Hᵀ (J, K) from their prior; frozen components stay as they are."""
    hyper = model.resolve(data.mean, 1.0)
    drawn = []
    for side, (length, fixed, order) in enumerate(
        zip(data.shape, model.fixed, (data.row_order, data.col_order), strict=True)
    ):
        rate, shape = hyper.prior(side)
        factor = rng.standard_gamma(shape, (length, model.n_components)) / rate
        _put(fixed, factor, order)
        drawn.append(np.maximum(factor, SMALLEST))
    return drawn[0], drawn[1]


def _put(fixed: FixedComponents | None, factor: Factor, order: NDArray[np.int64] | None) -> None:
    if fixed is not None:
        fixed.put(factor, slice(None) if order is None else order)


def priors(model: TweedieNMF, data: BlockedData) -> tuple[Prior, Prior]:
    """Give both priors as the kernels take them."""
    hyper = model.resolve(data.mean, 1.0)
    masks = [
        np.zeros(model.n_components, dtype=bool) if mask is None else mask for mask in model.frozen
    ]
    return Prior(*hyper.prior(0), masks[0]), Prior(*hyper.prior(1), masks[1])


def prior_series(
    model: TweedieNMF, data: BlockedData, sides: Sides, rng: np.random.Generator, draws: int
) -> FitSeries:
    """Fits at independent draws from the prior, for exact moves: t = 0 without a chain."""
    fits, log_fit = np.empty(draws), row_kernels(model.likelihood).log_fit
    for draw in range(draws):
        W, H = prior_draw(model, data, rng)
        fits[draw] = log_fit(W, H, sides.by_rows)
    return FitSeries(fits)


class TemperedChain:
    """Draws from p(V | W, H)^t p(W, H) at one t; ``W`` and ``H`` (Hᵀ) are its state."""

    def __init__(
        self, model: TweedieNMF, data: BlockedData, sides: Sides, rng: np.random.Generator
    ) -> None:
        self.model, self.sides, self.rng = model, sides, rng
        self.W, self.H = prior_draw(model, data, rng)
        self.priors = priors(model, data)
        self.kernels = row_kernels(model.likelihood)
        self.tau = LONGEST

    def _target(self, t: float) -> Target:
        s = t / float(self.model.dispersion)
        return Target(self.sides.by_rows, self.sides.by_cols, s, *self.priors)

    def sweep(self, t: float, count: int) -> tuple[NDArray[np.float64], float]:
        """Sweep ``count`` times at temperature t; fits, and the share of accepted rows."""
        fits = np.empty(count)
        target = self._target(t)
        accepted = self.kernels.run_sweeps(self.W, self.H, target, self.tau, self.rng, fits)
        return fits, accepted / max(1, count * (len(self.W) + len(self.H)))

    def climb(self, t: float, count: int) -> None:
        """Go where sweeps without noise lead: among the bulk of the posterior at t."""
        self.kernels.climb(self.W, self.H, self._target(t), count)

    def tune(self, t: float, count: int) -> None:
        """Sweep without looking; the proposal is shortened while it is too bold."""
        for batch in range(BATCHES):
            size = count * (batch + 1) // BATCHES - count * batch // BATCHES
            _, accepted = self.sweep(t, size)
            if size and accepted < LEAST_ACCEPTED:
                self.tau = min(self.tau, 2.0) / 2.0


def tempered_series(
    model: TweedieNMF,
    data: BlockedData,
    sides: Sides,
    rng: np.random.Generator,
    t: float,
    lengths: tuple[int, int, int],
) -> FitSeries:
    """Fits of one chain at one temperature; ``lengths`` are draws, tuning sweeps, thinning."""
    draws, tune, every = lengths
    chain = TemperedChain(model, data, sides, rng)
    chain.climb(t, CLIMB)
    chain.tune(t, tune)
    fits, accepted = chain.sweep(t, draws * every)
    return FitSeries(fits[every - 1 :: every], acceptance=accepted)


def prior_fits(
    model: TweedieNMF, data: BlockedData, rng: np.random.Generator, draws: int
) -> FitSeries:
    """Fits at independent draws from the prior, for a sampler."""
    executor = SerialExecutor()
    fits = np.empty(draws)
    for draw in range(draws):
        W, H = (factor.astype(data.dtype) for factor in prior_draw(model, data, rng))
        state = make_state(data.grid, W, H)
        fit = evaluate(executor, data, state, model.likelihood, SMALLEST_MEAN)
        fits[draw] = fit.negative_divergence
    return FitSeries(fits)


def sampled_fits(
    model: TweedieNMF,
    data: BlockedData,
    sampler: Sampler,
    address: tuple[int, int],
    t: float,
    lengths: tuple[int, int, int],
) -> FitSeries:
    """Fits at the draws of a sampler's chain at temperature t, addressed (seed, number)."""
    seed, number = address
    options = _options(sampler, lengths, seed, str(data.dtype))
    setting = Setting(data, model, sampler, options, SerialExecutor(), temperature=t)
    chain = setting.chain(number)
    chain.start()
    found: list[list[float]] = [[] for _ in sampler.tracks]
    for end in setting.ends:
        chain.advance(end)
        if end > options.tune:
            _collect(chain, found)
        chain.forget()
    series = [np.array(values) for values in found]
    return FitSeries(series[0], series[1] if len(series) > 1 else None)


def _options(sampler: Sampler, lengths: tuple[int, int, int], seed: int, dtype: str) -> RunOptions:
    """Round draws and tuning cycles up to what every track of the sampler divides."""
    draws, tune, every = lengths
    coarseness = max(track.coarseness for track in sampler.tracks)
    draws, tune = (-(-count // coarseness) * coarseness for count in (draws, tune))
    sampler.check_lengths(draws, tune)
    return RunOptions(draws, tune, 1, every, seed, "moments", 0, dtype)


def _collect(chain: Chain, found: list[list[float]]) -> None:
    for run, values in zip(chain.tracks, found, strict=True):
        options = chain.track_options(run.track)
        values.extend(
            run.fits[cycle].negative_divergence
            for cycle in sorted(run.fits)
            if options.draw_index(cycle) is not None
        )
