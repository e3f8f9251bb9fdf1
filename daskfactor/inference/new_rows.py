"""Rows of one factor given draws of the other, a band of them at a time.

Given H rows of W are independent of each other and of all other data, so that a band of new
rows goes through all draws of H by itself, by the very steps that samplers take in their pass
over the rows. Each of these leaves p(w_i | H, v_i) as it is. A band is brought to the maximum of
this density under the draw it begins with, learns its masses and steps while it visits draws from
the last to the first, and takes ``steps`` steps under every draw from where the one before has
led, in the scale that components have there: what is left of the latter falls geometrically with
the number of steps.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.bands import OneBlock, band_of, part_of, written_out
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block
from daskfactor.executors.base import raise_of_gpu
from daskfactor.executors.plan import Action, CycleOptions, Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.given import Condition, PosteriorDraws
from daskfactor.inference.multiplicative import SMALLEST
from daskfactor.inference.passes import Share, add_share
from daskfactor.inference.program import (
    DISPERSION,
    RATE,
    ROWS,
    Kernel,
    Program,
    Visit,
    band_prior,
    law_of,
)
from daskfactor.kernels.cuda.blocks import entries_on_device
from daskfactor.kernels.cuda.device import current
from daskfactor.kernels.steps import multiply_by_share, to_host, zeros_on_device_of
from daskfactor.kernels.variates import fill_gamma
from daskfactor.kernels.views import AnyBlock, SparseBlock, Workspace
from daskfactor.models.covariates import Covariates
from daskfactor.models.settings import held
from daskfactor.random import Stream, noise_key

if TYPE_CHECKING:
    from daskfactor.executors.device import CUDA

Array = NDArray[Any]
CLIMB = 40
"""Multiplicative updates that bring new rows to where their density is large."""
TUNE = 100
"""Steps in which masses and step sizes are learnt."""
PART = 2**22
"""Cells that rows have which are worked on together; what all of them need is small then."""
FEWER_AT_ONCE = "pass blocks=1, which has one part of the rows in work at a time"
SIDES = "rows", "columns"
OF_RATES = 6
"""Added to the factor in the address of the numbers that rates of rows are drawn from."""


@dataclass(frozen=True)
class NewRows:
    """Draws bands of new rows; executors map it over the bands.

    Attributes
    ----------
    data
        Of the new rows, with columns as ``posterior`` has them.
    posterior
        What the run says.
    kernel
        What moves rows.
    floor
        Smallest μ that gradients are taken at.
    seed, first
        Of the random numbers, and the number of the first row in their addresses.
    steps
        Steps under each draw.
    point
        Whether means over all draws are asked for, with numbers common to all rows.
    covariates, fixed
        Of the new rows, in the order of the grid, where the model has them.
    device
        How a GPU is used, where steps are taken on one.
    out
        `room` of all rows, in the order of the grid, where bands share it.
    """

    data: BlockedData
    posterior: PosteriorDraws
    kernel: Kernel
    floor: float
    seed: int
    first: int
    steps: int
    point: bool
    covariates: Covariates | None = None
    fixed: Array | None = None
    device: "CUDA | None" = None
    out: Array | None = None

    @property
    def draws_conditionally(self) -> bool:
        """Tell whether a draw of rows does not depend on where they were."""
        return not self.posterior.model.nonnegative

    def room(self, length: int) -> Array:
        """Give room for draws of so many rows, (chain, draw, n, K'), or their means (n, K')."""
        shape = length, self.posterior.model.width
        if self.point:
            return np.zeros(shape)
        return np.zeros((*self.posterior.shape, *shape), self.data.dtype)

    def __call__(self, number: int, work: Workspace) -> Array:
        """Draw a band into its place in ``out``, or into room of its own where there is none."""
        data, factor = self.data, self.posterior.factor
        span = (data.grid.rows, data.grid.cols)[factor].slice(number)
        count, out = span.stop - span.start, self.out
        draws = self.room(count) if out is None else out[..., span, :]
        block = band_of(data, factor == ROWS, number)
        cells = data.shape[1 - factor]
        if self.device is not None:  # where arrays as wide as the model are ten, and may be wider
            cells = max(cells, 10 * self.posterior.model.width)
        length = max(1, PART // max(1, cells))
        for start in range(0, count, length):
            stop = min(start + length, count)
            part = part_of(block, factor == ROWS, start, stop)
            at = slice(span.start + start, span.start + stop)
            try:
                self._draw(Rows(self, part, at, work), draws[..., start:stop, :])
            except MemoryError as error:
                raise_of_gpu(error, FEWER_AT_ONCE)
                raise
        return draws

    def _draw(self, rows: "Rows", out: Array) -> None:
        """Draw rows, (chain, draw, n, K'), or add up their means, (n, K')."""
        posterior, (chains, draws) = self.posterior, self.posterior.shape
        masses = self._masses()
        order = [list(range(draws))] if posterior.ordered else [[draw] for draw in range(draws)]
        for chain in range(chains):
            for each in order:
                rows.begin(chain, each)
                for draw in each:
                    values = rows.drawn(chain, draw)
                    if self.point:
                        out += masses[chain, draw] * values
                    else:
                        out[chain, draw] = values

    def _masses(self) -> Array:
        """Probability masses of the draws."""
        shape = self.posterior.shape
        if "weight" in self.posterior.coords.coords:
            return self.posterior.coords["weight"].values
        return np.full(shape, 1.0 / (shape[0] * shape[1]))


@lru_cache(maxsize=64)
def _key(seed: int, chain: int) -> tuple[int, int]:
    """Give the key of the noise of a chain."""
    first, second = noise_key(seed, chain, Stream.TRANSFORM)
    return int(first), int(second)


@dataclass
class Rows:
    """A band of new rows on its way through the draws.

    Attributes
    ----------
    plan, data, span
        What is asked for, the data of these rows, and which they are, in the order of the grid.
    band
        Of the factor that is drawn.
    draw
        The present one, of which chain.
    program, other, sizes, scale
        What the present draw says: priors and law, the other factor and the sums of its
        columns, what an alignment has multiplied columns with.
    cycle
        Of the next step, in the address of its noise.
    """

    plan: NewRows
    block: AnyBlock
    span: slice
    work: Workspace
    data: Any = field(init=False)
    band: FactorBand = field(init=False)
    draw: tuple[int, int] = field(init=False)
    program: Program = field(init=False)
    other: FactorBand = field(init=False)
    sizes: Array = field(init=False)
    scale: Array | None = field(init=False)
    cycle: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        plan, model, block = self.plan, self.plan.posterior.model, self.block
        zeros = isinstance(block, SparseBlock) and not model.likelihood.visits_all(block.zeros)
        if not (zeros or plan.draws_conditionally):
            block = written_out(block)
        self.data = OneBlock(block)
        if plan.device is not None:
            assert isinstance(block, SparseBlock)  # as those of all samplers that run there
            current().tf32 = plan.device.tf32
            self.data.block = entries_on_device(block, plan.data.dtype)
        shape = self.span.stop - self.span.start, model.width
        self.band = FactorBand(plan.first + self.span.start, np.zeros(shape, plan.data.dtype))

    def begin(self, chain: int, draws: list[int]) -> None:
        """Bring the band to where it can be drawn, and learn how; the first draw is next."""
        plan, posterior = self.plan, self.plan.posterior
        self.cycle = 0
        self._look(chain, draws[0], fresh=True)
        mean = posterior.prior_means(self.program.hyper)
        start = np.broadcast_to(np.asarray(mean, self.band.values.dtype), self.band.values.shape)
        values = np.empty(start.shape, start.dtype)
        values[:] = posterior.model.with_constants(SIDES[posterior.factor], start, posterior.mean)
        if plan.fixed is not None:
            values[:, self.program.frozen[posterior.factor]] = plan.fixed[self.span]
        self.band.values = self._placed(values)
        if plan.draws_conditionally:
            return
        self._climb()
        for step in range(TUNE):
            self._go_on(chain, draws[-1 - step * len(draws) // TUNE])
            self._step(adapt=True)

    def drawn(self, chain: int, draw: int) -> Array:
        """Take the steps under a draw; the band after them, or the mean of all."""
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
        self._look(chain, draw)
        if self.plan.draws_conditionally:
            return
        usable = (before > 0) & (self.sizes > 0)
        size = np.divide(before, self.sizes, out=np.ones_like(before), where=usable)
        factor = self.plan.posterior.factor
        mask = self.program.frozen[factor]
        size[mask if mask is not None else slice(0, 0)] = 1.0
        self.plan.kernel.retune(self.band, factor, size, self.program.hyper)

    def _look(self, chain: int, draw: int, fresh: bool = False) -> None:
        """Take over what a draw of the other factor says."""
        plan, posterior, dtype = self.plan, self.plan.posterior, self.plan.data.dtype
        sample, factor, self.draw = posterior.at(chain, draw), posterior.factor, (chain, draw)
        other = np.ascontiguousarray(sample.other, dtype)
        self.sizes = other.sum(axis=0, dtype=np.float64)
        self.other = FactorBand(0, self._placed(other))
        if sample.dispersions is not None and factor == ROWS:
            self.other.arrays[DISPERSION] = self._placed(sample.dispersions[:, None].copy())
        of_chain = chain if posterior.ordered else chain * posterior.shape[1] + draw
        key = _key(plan.seed, of_chain)
        self.program = Program(
            plan.kernel,
            sample.law,
            plan.floor,
            sample.hyper,
            key,
            posterior.model.frozen,
            common=plan.point,
        )
        self.scale = sample.scale
        self._take_priors(sample, fresh)

    def _placed(self, array: Array) -> Array:
        """Return an array where steps are taken."""
        if self.plan.device is not None:
            array = current().put(array)
        return array

    def _take_priors(self, sample: Condition, fresh: bool) -> None:
        """Give the band the priors of its rows, where these have their own."""
        plan, posterior = self.plan, self.plan.posterior
        if plan.covariates is not None and sample.link is not None:
            rate = sample.hyper.prior(posterior.factor)[0] if posterior.model.nonnegative else None
            rows = plan.covariates.at(np.arange(self.span.start, self.span.stop))
            prior = posterior.model.linked_prior(rows, sample.link, rate)
            self.band.arrays |= {name: np.asarray(value) for name, value in prior.items()}
        elif fresh and posterior.learns_rows:
            rate = sample.hyper.prior(posterior.factor)[0]
            self.band.arrays[RATE] = self._placed(np.full((len(self.band.values), 1), rate))

    def _climb(self) -> None:
        """Go to a maximum of the density by multiplicative updates; then begin what is learnt."""
        plan, posterior, program = self.plan, self.plan.posterior, self.program
        hyper = program.hyper
        rate, shape = band_prior(self.band, hyper, posterior.factor)
        phi, law = hyper.dispersion, program.likelihood
        smallest = SMALLEST * float(np.mean(posterior.prior_means(hyper)))
        prior = phi * rate, phi * (max(shape, 1.0) - 1.0)
        for _ in range(CLIMB):
            share = self._share()
            with held(self.band.values, program.frozen[posterior.factor]):
                multiply_by_share(self.band.values, share, *prior, law, smallest)
                np.maximum(self.band.values, smallest, out=self.band.values)
        _, denominator = self._share()
        plan.kernel.init(self.band, posterior.factor, denominator, hyper)

    def _share(self) -> Share:
        """Return numerator and denominator of the multiplicative update."""
        factor, program, values = self.plan.posterior.factor, self.program, self.band.values
        bands = (self.band, self.other) if factor == ROWS else (self.other, self.band)
        share = np.zeros_like(values), np.zeros_like(values)
        law = law_of(program.likelihood, (0, 0), bands[1])
        add_share(self.data.view(0, 0), law, factor, bands, program.floor, share, self.work)
        return share

    def _step(self, adapt: bool = False) -> None:
        """Take one of the sampler's steps with the band, and draw the rates of its rows."""
        plan, factor = self.plan, self.plan.posterior.factor
        bands = (self.band, self.other) if factor == ROWS else (self.other, self.band)
        # On one block each factor moves in an operation, in the order of the factors.
        op = Op(Action.UPDATE, Block(0, 0), self.cycle, factor, 1.0, False, CycleOptions(adapt))
        plan.kernel.step(self.program, Visit(op, self.data, bands, self.work))
        if RATE in self.band.arrays and plan.covariates is None:
            self._draw_rates()
        self.cycle += 1

    def _draw_rates(self) -> None:
        """Draw the rate of every row: λ_i ~ Gamma(α + a K, b + Σ_k θ_ik)."""
        posterior, band, program = self.plan.posterior, self.band, self.program
        shape, prior, free = posterior.rate_law(program.hyper)
        length = len(band.values)
        out = np.empty((1 if program.common else length, 1))
        address = program.address(band, self.cycle, posterior.factor, OF_RATES)
        fill_gamma(np.full_like(out, shape), np.ones_like(out), *address, out)
        total = to_host(band.values)[:, free].sum(axis=1, dtype=np.float64, keepdims=True)
        band.arrays[RATE] = self._placed(out / (prior + total))
