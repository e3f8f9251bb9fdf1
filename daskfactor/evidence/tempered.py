"""Log-likelihoods at draws from p(V | θ)^t p(θ), one temperature t after another.

Rows of a factorization are moved one by one, and accepted or not, which has no bias of a step
size, or a sampler of the package does it as in a whole run. At t = 0 the prior is drawn from
instead. A `GaussianAdditive` has stochastic-gradient Langevin dynamics, all temperatures side
by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.evidence.base import EvidenceProblem
from daskfactor.evidence.rowwise import LONGEST, SMALLEST, Entries, Prior, Target, row_kernels
from daskfactor.executors import SerialExecutor
from daskfactor.executors.state import make_state
from daskfactor.inference.base import Sampler, longest_stride
from daskfactor.inference.chain import Chain
from daskfactor.inference.passes import Place, evaluate
from daskfactor.inference.run_loop import Values
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.kernels.views import AnyBlock, SparseBlock
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator

Array = NDArray[Any]
Factor = NDArray[np.float64]
Vector = NDArray[np.float64]

MIN_SAMPLED = 0.3
"""Least share of the draws of a sampler that a low temperature takes."""
BATCHES = 12
"""Parts of tuning, after each of which the proposal's length may be shortened."""
MIN_ACCEPTANCE = 0.25
START_SWEEPS = 300
"""Multiplicative updates before the first sweep."""
SMALLEST_MEAN = 1e-30
"""Floor of μ for likelihoods under the prior, whose gradient is not needed."""
STEP = 0.05
"""Step ε in units of the inverse curvature along Σ θ_r, the one direction that the data inform."""
BATCH = 0.05
"""Share of the observations in the batch of a step (250 of 5000 in the paper)."""
MAX_BATCH_NOISE = 0.5
"""Largest share of the noise in Σ θ that batches may bring."""
ADDITIVE_SAMPLER = "SGLD"
"""Sampler of `additive_series`."""


class FitSeries(NamedTuple):
    """Log-likelihoods at the draws of one temperature.

    ``fits`` are those of one chain, or of the fine and the coarse one of a Richardson-Romberg
    pair; the latter's draws are as far apart in time as pairs of the former's.
    """

    fits: tuple[Vector, ...]
    acceptance: float = np.nan


class Sides(NamedTuple):
    """The same entries by rows and by columns.

    ``constant`` is the part of -Σ d_β(v|μ) that the kernels leave out.
    """

    by_rows: Entries
    by_cols: Entries
    constant: float


def listed_entries(data: BlockedData, likelihood: Likelihood) -> int:
    """Count the cells that a sweep over rows visits.

    Zeros are not visited where they are summed over rows; cells that sparse input leaves out as
    missing are, because they are subtracted from the sums over all.
    """
    if data.is_sparse and data.unstored == "zero" and likelihood.zeros == "constant":
        return int(data.n_stored.sum())
    return data.shape[0] * data.shape[1] if data.is_sparse else data.total_observed


def both_sides(data: BlockedData, likelihood: Likelihood) -> Sides:
    """Copy the observed entries, in the grid's order, for `daskfactor.evidence.rowwise`."""
    cells = []
    for block in data.grid.all_blocks():
        rows, cols = data.grid.slices(block)
        corner = np.array([[rows.start], [cols.start], [0]])
        pair = _cells(data.view(*block), likelihood.zeros == "constant")
        cells.append([part + corner for part in pair])
    listed, missing = (np.concatenate(parts, axis=1) for parts in zip(*cells, strict=True))
    by_rows, by_cols = (
        Entries(*_compressed(listed, *axes), *_compressed(missing, *axes)[:2], likelihood.numbers)
        for axes in ((0, 1, data.shape[0]), (1, 0, data.shape[1]))
    )
    return Sides(by_rows, by_cols, likelihood.fit_constant(listed[2]))


def _cells(view: AnyBlock, summed: bool) -> tuple[Array, Array]:
    """Return rows, columns, values of the entries to list and of the missing ones, (3, n) each.

    Zeros are not listed if they are ``summed`` over rows.
    """
    if not isinstance(view, SparseBlock):
        block = np.asarray(view.block, dtype=np.float64)
        missing = np.isnan(block)
        listed = ~missing & (block != 0) if summed else ~missing
        return _chosen(listed, block), _chosen(missing, block)
    rows = np.repeat(np.arange(view.m), np.diff(view.indptr))
    stored = np.stack([rows, view.indices, view.values]).astype(np.float64)
    nan = np.isnan(stored[2])
    listed, missing = stored[:, ~nan], stored[:, nan]
    if view.zeros and summed:
        return listed, missing
    absent = np.ones((view.m, view.n), dtype=bool)
    absent[rows, view.indices] = False
    others = _chosen(absent, np.zeros(absent.shape))
    return (np.concatenate([listed, others], axis=1), missing) if view.zeros else (listed, others)


def _chosen(mask: NDArray[np.bool_], block: Array) -> Array:
    return np.stack([*np.nonzero(mask), block[mask]])


def _compressed(cells: Array, major: int, minor: int, length: int) -> tuple[Array, Array, Array]:
    """Return pointers, indices and values along one of two axes, both ascending."""
    rows, cols = cells[[major, minor]].astype(np.int64)
    order = np.lexsort((cols, rows))
    pointers = np.searchsorted(rows[order], np.arange(length + 1)).astype(np.int64)
    return pointers, cols[order], np.ascontiguousarray(cells[2][order])


@dataclass(frozen=True)
class TemperedChains:
    """Chains of a model at all temperatures.

    Attributes
    ----------
    model, data, seed
        The model, with numbers for its settings, its data, and the root of random numbers.
    sampler, sides
        A sampler and None, or None and the entries for exact moves of rows.
    draws, tune, every
        Draws at t = 1, tuning sweeps, thinning.
    """

    model: TweedieNMF
    data: BlockedData
    seed: int
    sampler: Sampler | None
    sides: Sides | None
    draws: int
    tune: int
    every: int

    def advance(self, item: tuple[int, float, float, float, Values], work: Any = None) -> Values:
        """Bring one chain to a share of its length; an executor maps this, on any machine.

        ``item``: number of the temperature, t, its share of the draws, the share of the chain to
        reach, and the state that this returned before, empty at first. A state has log-likelihoods
        under ``fits`` and perhaps an ``acceptance``, as `FitSeries`.
        """
        del work
        number, t, share, reach, state = item
        draws = max(10, round(self.draws * share))
        if t and self.sampler is not None:
            return self._sampled(self.sampler, number, t, draws, reach, state)
        rng = generator(self.seed, number, Stream.TEMPERATURE, self.model.n_components)
        if state:
            rng.bit_generator.state = state["rng"]
        if t:
            return self._moved(rng, t, draws, reach, state)
        fits = list(state["fits"][0]) if state else []
        while len(fits) < reach * draws:
            fits.append(self._fit(self._draw_prior(rng)))
        return {"rng": rng.bit_generator.state, "fits": (np.array(fits),)}

    def _draw_prior(self, rng: np.random.Generator) -> list[Factor]:
        """Draw W (I, K), Hᵀ (J, K), further factors likewise; frozen components stay."""
        hyper, drawn = self.model.resolve(self.data.level, 1.0), []
        for side, bands in enumerate(self.data.grid.sides):
            rate, shape = hyper.prior(side)
            drawn.append(rng.standard_gamma(shape, (bands.size, self.model.n_components)) / rate)
        for side, fixed in enumerate(self.model.fixed):
            if fixed is not None:
                fixed.put(drawn[side], self.data.order(side))
        return [np.maximum(factor, SMALLEST) for factor in drawn]

    def _fit(self, factors: Sequence[Factor]) -> float:
        """Return the fit of factors by the kernels of exact moves, or by those of samplers."""
        likelihood, data = self.model.likelihood, self.data
        if self.sides is not None:
            return row_kernels(likelihood).log_fit(*factors, self.sides.by_rows)
        state = make_state(data.grid, *(factor.astype(data.dtype) for factor in factors))
        place = Place(SerialExecutor(), data, state, SMALLEST_MEAN)
        return evaluate(place, likelihood).negative_divergence

    def _moved(
        self, rng: np.random.Generator, t: float, draws: int, reach: float, state: Values
    ) -> Values:
        """Draw from p(V | W, H)^t p(W, H) by moving rows.

        The chain starts where sweeps without noise end, in the bulk of the posterior at t. While
        it is tuned the proposal is shortened when too few are accepted.
        """
        assert self.sides is not None
        hyper, tune = self.model.resolve(self.data.level, 1.0), self.tune
        none = np.zeros(self.model.n_components, dtype=bool)
        priors = (
            Prior(*hyper.prior(side), none if mask is None else mask)
            for side, mask in enumerate(self.model.frozen)
        )
        law, phi = self.model.likelihood.at(float(self.model.dispersion))
        kernels = row_kernels(law)
        target = Target(self.sides.by_rows, self.sides.by_cols, t / phi, *priors)
        if state:
            W, H = (np.array(factor) for factor in state["factors"])
            sweep, tau, accepted = state["sweep"], state["tau"], state["accepted"]
            series = [state["fits"][0]]
        else:
            W, H = self._draw_prior(rng)
            kernels.start_chain(W, H, target, START_SWEEPS)
            sweep, tau, accepted, series = 0, LONGEST, 0, [np.empty(0)]
        rows, last = len(W) + len(H), tune + draws * self.every
        for end in (*(tune * np.arange(1, BATCHES + 1) // BATCHES), math.ceil(reach * last)):
            if sweep >= min(end, reach * last):
                continue
            fits = np.empty(int(end) - sweep)
            moves = kernels.run_sweeps(W, H, target, tau, rng, fits)
            if end > tune:
                accepted += moves
                series.append(fits[(tune - sweep - 1) % self.every :: self.every])
            elif moves / (fits.size * rows) < MIN_ACCEPTANCE:
                tau = min(tau, 2.0) / 2.0
            sweep = int(end)
        return {
            "factors": (W, H),
            "rng": rng.bit_generator.state,
            "sweep": sweep,
            "tau": tau,
            "accepted": accepted,
            "fits": (np.concatenate(series),),
            "acceptance": accepted / ((last - tune) * rows),
        }

    def _sampled(
        self, sampler: Sampler, number: int, t: float, draws: int, reach: float, state: Values
    ) -> Values:
        """Draw from p(V | W, H)^t p(W, H) by a sampler's chain."""
        # Draws and tuning cycles are rounded up to a multiple of every track's stride.
        data, stride = self.data, longest_stride(sampler)
        draws, tune = (-(-count // stride) * stride for count in (draws, self.tune))
        dtype = str(data.dtype)
        options = RunOptions(draws, tune, 1, self.every, self.seed, "moments", 0, dtype)
        kernel = sampler.kernel(self.model, data)
        setting = Setting(data, self.model, kernel, options, SerialExecutor(), temperature=t)
        chain = Chain(setting, number)
        if state:
            saved = {name: np.array(array) for name, array in state["arrays"].items()}
            chain.restore(saved, state["chain"])
            fits, cycle = [list(values) for values in state["fits"]], state["cycle"]
        else:
            chain.start()
            fits, cycle = [[] for _ in sampler.tracks], 0
        for end in setting.ends:
            if end <= cycle or cycle >= reach * options.cycles:
                continue
            chain.advance(end)
            if end > options.tune:
                for run, values in zip(chain.tracks, fits, strict=True):
                    cycles = (n for n in sorted(run.fits) if run.options.draw_index(n) is not None)
                    values.extend(run.fits[cycle].negative_divergence for cycle in cycles)
            chain.forget()
            cycle = end
        arrays, meta = chain.snapshot(cast("Any", None))  # bands of this process need none
        return {
            "arrays": {name: one() if callable(one) else one for name, one in arrays.items()},
            "chain": meta,
            "cycle": cycle,
            "fits": tuple(map(np.array, fits)),
        }


def additive_series(
    problem: EvidenceProblem, temperatures: Vector, lengths: tuple[int, int, int]
) -> list[FitSeries]:
    """Return log-likelihoods of all data at draws from every power posterior.

    One step on a batch S of n of the N observations, at temperature t:

        θ ← θ + ε (t (N/n) Σ_S (x_n - Σ θ) / σ_x² - (θ - μ_θ) / σ_θ²) + √(2ε) z

    with ε = 0.05 / a, a = t N R / σ_x² + 1 / σ_θ². The log-likelihood sees Σ θ alone, of which
    that is an autoregression with the factor 1 - ε a. Its variance is right, R / a, if noise of
    the variance 2 ε R (1 - ε a / 2) is added in all, that of batches among it: they are drawn
    with replacement, so that this is known, and Σ z is made smaller by as much. Where batches
    would bring more than half, the step is shorter. At t = 0 draws come from the prior.
    Şimşekli et al. 2016, equation 10, with the factor t that is missing there.
    """
    x, model = problem.data, problem.model
    draws, tune, every = lengths
    rng = generator(problem.seed, 0, Stream.TEMPERATURE)
    hot = temperatures[1:, None]
    noise, prior = model.noise**2, model.scale**2
    curvature = hot * x.size * model.n_components / noise + 1 / prior
    size = max(1, round(BATCH * x.size))
    # Noise of batches in Σ θ, as a share of 2 ε R, for each unit of ε.
    share = model.n_components * (hot * x.size / noise) ** 2 * x.var() / (2 * size)
    step = np.minimum(STEP / curvature, MAX_BATCH_NOISE / np.maximum(share, 1e-300))
    noise_share = np.sqrt(1 - step * curvature / 2 - step * share)
    theta = model.draw_prior(rng, len(hot))
    # The data determine Σ θ, so the chain starts there.
    theta += (hot * x.size / noise) * (x.mean() - theta.sum(axis=1, keepdims=True)) / curvature
    centres = np.empty(0)
    totals = np.empty((draws, len(hot)))
    for number in range(tune + draws * every):
        if not centres.size:
            centres = rng.choice(x, (x.size // size, size)).mean(axis=1)
        centre, centres = centres[-1], centres[:-1]
        pull = hot * x.size * (centre - theta.sum(axis=1, keepdims=True)) / noise
        pull = pull - (theta - model.mean) / prior
        z = rng.standard_normal(theta.shape)
        z += (noise_share - 1) * z.mean(axis=1, keepdims=True)
        theta = theta + step * pull + np.sqrt(2 * step) * z
        if number >= tune and (number - tune + 1) % every == 0:
            totals[(number - tune) // every] = theta.sum(axis=1)
    cold = model.draw_prior(rng, draws).sum(axis=1)
    fits = model.log_likelihood(x, np.column_stack([cold, totals]))
    return [FitSeries((np.ascontiguousarray(column),)) for column in fits.T]
