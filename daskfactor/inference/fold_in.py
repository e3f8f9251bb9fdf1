"""Rows of one factor given draws of the other, a band of them at a time.

Given H, rows of W are independent of each other and of all other data, so that a band of new
rows goes through all draws of H by itself, by the very steps that samplers take in their pass
over the rows. Each of these leaves p(w_i | H, v_i) as it is. A band is brought to the maximum of
this density under the draw it begins with, learns its masses and steps while it visits draws from
the last to the first, and takes ``steps`` steps under every draw from where the one before has
led, in the scale that components have there: what is left of the latter falls geometrically with
the number of steps.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.bands import OneBlock, band_of, expand_block, part_of
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block
from daskfactor.executors.base import raise_gpu_memory_error
from daskfactor.executors.plan import Action, CycleOptions, Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.multiplicative import SMALLEST, move_by_share
from daskfactor.inference.parameters import SIDES
from daskfactor.inference.passes import SharePass, init_band
from daskfactor.inference.posterior_draws import PosteriorDraws
from daskfactor.inference.program import (
    DISPERSION,
    RATE,
    ROWS,
    Bands,
    Kernel,
    Program,
    Visit,
    band_prior,
)
from daskfactor.kernels.cuda.blocks import entries_on_device
from daskfactor.kernels.cuda.device import current
from daskfactor.kernels.steps import to_host, zeros_on_device_of
from daskfactor.kernels.variates import fill_gamma
from daskfactor.kernels.views import AnyBlock, SparseBlock, Workspace
from daskfactor.random import Stream, noise_key

if TYPE_CHECKING:
    from daskfactor.executors.device import CUDA

Array = NDArray[Any]
CLIMB = 40
"""Multiplicative updates that bring new rows to where their density is large."""
TUNE = 100
"""Steps in which masses and step sizes are learnt."""
PART = 2**22
"""Cells of the rows that are in work together: what all of them need is small then."""
FEWER_AT_ONCE = "pass blocks=1, which has one part of the rows in work at a time"
OF_RATES = 6
"""Added to the factor in the address of the numbers that rates of rows are drawn from."""


@dataclass(frozen=True)
class NewRows:
    """Draws bands of new rows; executors map it over the bands.

    Attributes
    ----------
    data
        Data of the new rows, with the columns of ``posterior``.
    model
        Model of the new rows: covariates and frozen components are theirs, in the grid's order.
    posterior
        Draws of the other factor.
    kernel
        Kernel that moves rows.
    seed, first
        Seed of the random numbers, and the number of the first row in their addresses.
    steps
        Steps under each draw.
    point
        Whether to return means over all draws, with random numbers common to all rows.
    device
        Settings of the GPU that takes the steps; None: processors take them.
    out
        `room` for all rows, in the grid's order, where bands share it.
    """

    data: BlockedData
    model: Any
    posterior: PosteriorDraws
    kernel: Kernel
    seed: int
    first: int
    steps: int
    point: bool
    device: "CUDA | None" = None
    out: Array | None = None

    def room(self, length: int) -> Array:
        """Return zeros for draws of so many rows, (chain, draw, n, K'), or for means, (n, K')."""
        shape = length, self.model.width
        if self.point:
            return np.zeros(shape)
        return np.zeros((*self.posterior.shape, *shape), self.data.dtype)

    def placed(self, array: Array) -> Array:
        """Return an array where steps are taken."""
        return array if self.device is None else current().put(array)

    def __call__(self, number: int, work: Workspace) -> Array:
        """Draw a band into its place in ``out``, or into an array of its size."""
        data, factor = self.data, self.posterior.factor
        span = data.grid.sides[factor].slice(number)
        count, out = span.stop - span.start, self.out
        draws = self.room(count) if out is None else out[..., span, :]
        block = band_of(data, factor == ROWS, number)
        cells = data.shape[1 - factor]
        if self.device is not None:  # ten arrays are as wide as the model, which may be wider
            cells = max(cells, 10 * self.model.width)
        length = max(1, PART // max(1, cells))
        for start in range(0, count, length):
            stop = min(start + length, count)
            part = part_of(block, factor == ROWS, start, stop)
            at = slice(span.start + start, span.start + stop)
            try:
                self._draw(Rows(self, part, at, work), draws[..., start:stop, :])
            except MemoryError as error:
                raise_gpu_memory_error(error, FEWER_AT_ONCE)
                raise
        return draws

    def _draw(self, rows: "Rows", out: Array) -> None:
        """Draw rows, (chain, draw, n, K'), or add up their means, (n, K')."""
        (chains, draws), masses = self.posterior.shape, self.posterior.masses
        paths = [range(draws)] if self.posterior.ordered else [[draw] for draw in range(draws)]
        for chain in range(chains):
            for path in paths:
                rows.begin(chain, path)
                for draw in path:
                    values = rows.values_under(chain, draw)
                    if self.point:
                        out += masses[chain, draw] * values
                    else:
                        out[chain, draw] = values


class Rows:
    """A band of new rows on its way through the draws.

    Attributes
    ----------
    plan, span, work, data
        Options of the draws, places of these rows in the grid's order, buffers, data of the rows.
    band
        Band of the factor that is drawn.
    draw
        Numbers of the present chain and draw.
    program, other, sizes, scale
        Priors and likelihood under the present draw, the other factor with the sums of its
        columns, and the scale of a `PosteriorDraw`.
    factor, free, covariates
        Factor that is drawn, mask of its components that are not frozen, covariates of the rows.
    cycle
        Number of the next step, in the address of its noise.
    """

    data: Any

    def __init__(self, plan: NewRows, block: AnyBlock, span: slice, work: Workspace) -> None:
        self.plan, self.span, self.work, self.cycle = plan, span, work, 0
        dtype = plan.data.dtype
        zeros = isinstance(block, SparseBlock) and not plan.model.likelihood.visits_all(block.zeros)
        if plan.model.nonnegative and not zeros:
            block = expand_block(block)
        self.data = OneBlock(block)
        if plan.device is not None:
            assert isinstance(block, SparseBlock)  # as those of all samplers that run there
            current().tf32 = plan.device.tf32
            self.data.block = entries_on_device(block, dtype)
        shape = span.stop - span.start, plan.model.width
        self.band = FactorBand(plan.first + span.start, np.zeros(shape, dtype))
        self.factor = plan.posterior.factor
        self.free = plan.model.free(self.factor)
        covariates = plan.model.covariates[self.factor]
        self.covariates = None if covariates is None else covariates.at(span)

    @property
    def bands(self) -> Bands:
        """Bands of W and of H."""
        return (self.band, self.other) if self.factor == ROWS else (self.other, self.band)

    def begin(self, chain: int, draws: Any) -> None:
        """Bring the band to where it can be drawn, and learn how; the first draw is next."""
        plan, factor, model = self.plan, self.factor, self.plan.model
        self.cycle = 0
        self._take_draw(chain, draws[0], fresh=True)
        mean = np.asarray(model.prior_means(factor, self.program.hyper), self.band.values.dtype)
        values = np.broadcast_to(mean, self.band.values.shape).copy()
        values[:] = model.with_constants(SIDES[factor], values, plan.posterior.mean)
        if (fixed := model.fixed[factor]) is not None:
            fixed.put(values, self.span)
        self.band.values = plan.placed(values)
        if not plan.model.nonnegative:  # a draw does not depend on where rows were
            return
        self._climb()
        for step in range(TUNE):
            self._go_on(chain, draws[-1 - step * len(draws) // TUNE])
            self._step(adapt=True)

    def values_under(self, chain: int, draw: int) -> Array:
        """Take the steps under a draw, and return the band after them, or the mean of all."""
        self._go_on(chain, draw)
        plan, values = self.plan, self.band.values
        total = zeros_on_device_of(values, values.shape, np.float64)
        for _ in range(plan.steps):
            self._step()
            if plan.point:
                total += self.band.values
        result: Array = to_host(total / plan.steps if plan.point else self.band.values)
        return result if self.scale is None else result * self.scale.astype(result.dtype)

    def _go_on(self, chain: int, draw: int) -> None:
        """Go on to a draw, with components of the size that they have under it."""
        if (chain, draw) == self.draw:
            return
        before = self.sizes
        self._take_draw(chain, draw)
        if not self.plan.model.nonnegative:
            return
        usable = (before > 0) & (self.sizes > 0) & self.free
        size = np.divide(before, self.sizes, out=np.ones_like(before), where=usable)
        self.plan.kernel.retune(self.band, self.factor, size, self.program.hyper)

    def _take_draw(self, chain: int, draw: int, fresh: bool = False) -> None:
        """Take the other factor, the likelihood and the priors of a draw."""
        plan, posterior, self.draw = self.plan, self.plan.posterior, (chain, draw)
        sample = posterior.at(chain, draw)
        other = np.ascontiguousarray(sample.other, plan.data.dtype)
        self.sizes, self.scale = other.sum(axis=0, dtype=np.float64), sample.scale
        self.other = FactorBand(0, plan.placed(other))
        if sample.dispersions is not None:
            self.other.arrays[DISPERSION] = plan.placed(sample.dispersions[:, None].copy())
        path = chain if posterior.ordered else chain * posterior.shape[1] + draw
        first, second = map(int, noise_key(plan.seed, path, Stream.TRANSFORM))
        law = plan.kernel, sample.likelihood, posterior.floor, sample.hyper
        frozen = posterior.model.frozen
        self.program = Program(*law, (first, second), frozen, common=plan.point)
        # The priors of rows, where these differ.
        factor, model = self.factor, plan.model
        rate = sample.hyper.prior(factor)[0] if model.nonnegative else None
        if self.covariates is not None and sample.link is not None:
            prior = model.linked_prior(self.covariates, sample.link, rate)
            self.band.arrays |= {name: np.asarray(value) for name, value in prior.items()}
        elif fresh and model.rates_of[factor] in ("row", "column"):
            self.band.arrays[RATE] = plan.placed(np.full((len(self.band.values), 1), rate))

    def _climb(self) -> None:
        """Go to a maximum of the density by multiplicative updates; then begin what is learnt."""
        kernel, program, factor = self.plan.kernel, self.program, self.factor
        hyper, likelihood = program.hyper, program.likelihood
        rate, shape = band_prior(self.band, hyper, factor)
        phi, mean = hyper.dispersion, self.plan.model.prior_means(factor, hyper)
        move = partial(
            move_by_share,
            priors={factor: (phi * rate, phi * (max(shape, 1.0) - 1.0))},
            frozen=program.frozen,
            likelihood=likelihood,
            smallest=SMALLEST * float(np.mean(mean)),
            everywhere=True,
        )
        for _ in range(CLIMB):
            self._gather(move)
        self._gather(partial(init_band, kernel=kernel, hyper=hyper))

    def _gather(self, finish: Any) -> None:
        """Gather the sums of a multiplicative update, and ``finish`` with them."""
        gathers = SharePass(
            self.program.likelihood, self.program.floor, (self.factor,), finish=finish
        )
        gathers.update(self._op(), self.data, self.bands, self.work)

    def _op(self, adapt: bool = False) -> Op:
        """Return the operation that moves the factor on the one block."""
        options = CycleOptions(adapt)
        return Op(Action.UPDATE, Block(0, 0), self.cycle, self.factor, 1.0, False, options)

    def _step(self, adapt: bool = False) -> None:
        """Take one of the sampler's steps with the band, and draw the rates of its rows."""
        visit = Visit(self._op(adapt), self.data, self.bands, self.work)
        self.plan.kernel.step(self.program, visit)
        if RATE in self.band.arrays and self.covariates is None:
            self._draw_rates()
        self.cycle += 1

    def _draw_rates(self) -> None:
        """Draw the rate of every row given its entries."""
        band, program, factor, posterior = self.band, self.program, self.factor, self.plan.posterior
        shapes, free = (program.hyper.shape_w, program.hyper.shape_h), self.free
        prior = posterior.model.hyperpriors(posterior.mean, shapes)[factor]
        total = to_host(band.values)[:, free].sum(axis=1, dtype=np.float64, keepdims=True)
        shape, rate = prior.posterior(shapes[factor] * float(free.sum()), total)
        out = np.empty((1 if program.common else len(total), 1))
        address = program.address(band, self.cycle, factor, OF_RATES)
        fill_gamma(np.full_like(out, shape), np.ones_like(out), *address, out)
        band.arrays[RATE] = self.plan.placed(out / rate)
