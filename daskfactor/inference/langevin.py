"""Langevin dynamics: on conflict-free parts (P-SGLD, P-SGRRLD), on whole gradients, on samples.

For a block of part Π, both gradients from the same old state, with
R = M ⊙ (V - μ) ⊙ μ^(β-2) / φ:

    G_W = s R Hᵀ - λ_w + (a_w - 1) / W        G_H = s Wᵀ R - λ_h + (a_h - 1) / H

(Şimşekli et al. 2017, equation 13; Şimşekli et al. 2015, equations 8 and 9),
followed by the plain step or by the step in the majoriser's metric.

On the schedule `Passes` every block adds its share of the gradient to both of its bands
and moves neither; the last block of a pass that a band meets has all the others' shares
before it, and moves it. Sums follow the plan, so every executor gives the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import is_number, one_of
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes, Reshuffled, Schedule
from daskfactor.errors import OptionError
from daskfactor.inference.base import Data, Sampler, Track, check_schedule, count_parts
from daskfactor.inference.program import (
    HYPER_EVERY,
    METRIC,
    RECORDED,
    UNIT_STEP,
    Arrays,
    ArraySpec,
    Bands,
    Kernel,
    Program,
    Visit,
    Work,
    law_of,
    values_of,
)
from daskfactor.inference.steps import ConstantStep, Step, automatic_step, checked_step
from daskfactor.kernels import blockwise
from daskfactor.kernels.steps import langevin_step
from daskfactor.kernels.subsample import block_address
from daskfactor.models.settings import preserve_columns

Array = NDArray[Any]
Preconditioner = Literal["majorizer", "identity"]
Transition = Literal["moments", "euler"]

STEEPEST = 8**0.5
"""Farthest that a gradient may move an entry up under laws whose gradients have poles at zero, in
units of √(s (θ + s)): two standard deviations of its noise."""
FIBRES, PRIMES = 1024, (2, 3, 5, 7, 11, 13, 17)
"""Fibres of a tensor's block at which the share of a component is taken, and what spreads them."""
SUBSAMPLE = 0x5B5A
"""Tells the generator that shares entries out among blocks from others of the same key."""


@lru_cache(maxsize=64)
def allotment(
    key: tuple[int, int], iteration: int, entries: int, observed: bytes
) -> NDArray[np.int64]:
    """Share out the entries drawn in an iteration among the blocks: a multinomial draw.

    ``observed`` are the blocks' observed entries, int64, row by row; a block without any
    gets none. A function of its arguments alone, so that every operation may ask for it.
    """
    sizes = np.frombuffer(observed, np.int64)
    full = np.flatnonzero(sizes)  # rounding must not send an entry to an empty block
    rng = np.random.default_rng((*key, SUBSAMPLE, iteration))
    counts = np.zeros(sizes.size, np.int64)
    counts[full] = rng.multinomial(entries, sizes[full] / sizes.sum())
    counts.setflags(write=False)
    return counts


@lru_cache(maxsize=64)
def block_balance(mass: bytes, shape: tuple[int, ...]) -> list[NDArray[np.float64]]:
    """Tell for every band of each factor how evenly its observed entries lie in its blocks.

    1 - variance / mean² over the band's blocks, at least 0; ``mass`` are these entries by
    weight, float64, in row-major order of ``shape``, the bands of each factor.
    """
    counts, shares = np.frombuffer(mass, np.float64).reshape(shape), []
    for factor in range(len(shape)):
        others: Any = tuple(axis for axis in range(len(shape)) if axis != factor)
        others = others[0] if len(others) == 1 else others
        spread = counts.var(axis=others) / np.maximum(counts.mean(axis=others), 0.1) ** 2
        shares.append(np.maximum(0.0, 1.0 - spread))
    return shares


def first_two(bands: Bands) -> tuple[Array, Array]:
    """Return two factors whose product has the shares of components in the means of a block.

    Of a tensor the second is that of some cells of all further factors, spread evenly.
    """
    first, *others = (band.values for band in bands)
    if len(others) == 1:
        return first, others[0]
    product = np.ones((FIBRES, first.shape[1]), first.dtype)
    for n, values in enumerate(others):
        # Multiples of an irrational number that differ by factor, so that all corners are seen.
        at = (np.arange(FIBRES) * math.sqrt(PRIMES[n % len(PRIMES)])) % 1.0
        product *= values[(at * len(values)).astype(np.int64)]
    return first, product


@dataclass(frozen=True)
class LangevinKernel(Kernel):
    """Langevin steps on gradients that are added up over a pass before all factors move.

    The noise of pass t has the address t.
    """

    learns_every: ClassVar[int] = HYPER_EVERY
    rescales_every: ClassVar[int | None] = 20

    def step(self, program: Program, visit: Visit) -> None:
        """Add the block's share of the gradients to both bands; move them at a pass's end."""
        self._add(program, visit)
        parts = visit.data.grid.parts
        number, position = divmod(visit.op.iteration, parts)
        if position == parts - 1:
            gradients = [band.arrays["gradient"] for band in visit.bands]
            self._move(program, visit, gradients, number)
            for gradient in gradients:
                gradient[:] = 0
        self._learn_metric(program, visit)

    def _add(self, program: Program, visit: Visit) -> None:
        """Add the block's share of the gradients, and of the curvature while it is learnt."""
        shares = program.gradient(visit, self._gathered(visit))
        for band, share in zip(visit.bands, shares, strict=True):
            band.arrays["gradient"] += share

    def _balance(self, visit: Visit) -> Sequence[float]:
        """Return how evenly a cycle's steps share the data of each band."""
        return (1.0,) * len(visit.bands)

    def _move(
        self, program: Program, visit: Visit, gradients: Sequence[Array], iteration: int
    ) -> None:
        """Take the steps of all bands."""
        matched: Any = (None,) * len(visit.bands)
        if self.options.transition == "moments" and "metric" in self.arrays:
            # Numerators times θ grow without end as θ falls where their exponent is below 1.
            bound = STEEPEST if program.likelihood.exponent < 1 else np.inf
            view = partial(visit.data.view, *visit.op.block)
            shares = blockwise.mean_shares(first_two(visit.bands), self._balance(visit), view)
            matched = [(share, bound) for share in shares]
        size = program.step_size(iteration)
        for factor, band in enumerate(visit.bands):
            gradient, prior = program.prior_of(band, factor, gradients[factor])
            rest = size, prior, program.address(band, iteration, factor), program.coarse
            if "metric" in self.arrays:  # the metric of frozen components is infinite
                langevin_step(band.values, gradient, band.arrays["metric"], *rest, matched[factor])
            else:
                with preserve_columns(band.values, program.frozen[factor]):
                    langevin_step(band.values, gradient, None, *rest)


class PartsKernel(LangevinKernel):
    """Langevin steps on the gradients of conflict-free parts of the data."""

    def step(self, program: Program, visit: Visit) -> None:
        """Move all bands by the block's own gradients, from the same old state."""
        op, curvatures = visit.op, None
        if self._gathered(visit) is not None:
            curvatures = tuple(np.zeros_like(band.values) for band in visit.bands)
        gradients = program.gradient(visit, curvatures)
        if curvatures is not None:
            # Gathered with weight s / B: 1 where every part comes up once a cycle,
            # N / (B |part|) where parts are drawn.
            weight = op.scale / visit.data.grid.parts
            for band, curvature in zip(visit.bands, curvatures, strict=True):
                band.arrays["gathered"] += curvature.dtype.type(weight) * curvature
        self._move(program, visit, gradients, op.iteration)
        self._learn_metric(program, visit)

    def _balance(self, visit: Visit) -> Sequence[float]:
        # A cycle of uneven steps in any order narrows the posterior: a cycle that pulls back at
        # the rates k_1 to k_B keeps the variance with k (1 - Var k / k²) in place of their mean k.
        balance = block_balance(visit.data.mass_key, visit.data.n_observed.shape)
        return [bands.take(number) for bands, number in zip(balance, visit.op.block, strict=True)]


class SubsampleKernel(LangevinKernel):
    """Langevin steps on gradients from entries drawn with replacement."""

    def entries(self, data: BlockedData) -> int:
        """Return |Ω|, the number of entries drawn in an iteration."""
        share: float = self.options.share(data.grid.blocks)
        return max(1, round(data.total_observed * share))

    def _add(self, program: Program, visit: Visit) -> None:
        op, data, bands, _ = visit
        blocks = data.grid.blocks
        number, (row, col) = op.iteration // blocks, map(np.asarray, op.block)
        place = row * blocks + col  # on the device the numbers of all blocks of a round
        entries = self.entries(data)
        count = allotment(program.key, number, entries, data.observed_key)[place]
        if not count.any():
            return
        law, gathered = law_of(program.likelihood, op.block, bands[1]), self._gathered(visit)
        # N / |Ω|: how many entries one that is drawn stands for.
        weight = data.total_observed / entries * law.share
        curvature = None if gathered is None else (gathered, weight / self.work.moves)
        block = data.view(*op.block), law, values_of(bands), program.floor
        key, scale = np.array(program.key, dtype=np.uint32), weight / program.hyper.dispersion
        draws = count, block_address(key, number, place)
        gradients = tuple(band.arrays["gradient"] for band in bands)
        blockwise.add_subsample(block, draws, scale, gradients, curvature)


class LangevinSampler(Sampler):
    """Options of all samplers that take Langevin steps.

    A subclass is a frozen dataclass with the fields ``step``, ``preconditioner``,
    ``warm_start`` and ``transition``.
    """

    on_device: ClassVar[bool] = True
    step: Step
    preconditioner: Preconditioner
    transition: Transition

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("transition", self.transition, get_args(Transition))
        one_of("preconditioner", self.preconditioner, ("majorizer", "identity"))
        object.__setattr__(self, "step", checked_step(self.step))
        if self.step == "auto" and self.preconditioner != "majorizer":
            raise OptionError(
                "the plain step has no automatic size; pass a number such as step=1e-5, or use "
                'preconditioner="majorizer"'
            )

    def _arrays(self, full: bool = True) -> Arrays:
        """Return the arrays of a kernel, on ``full`` gradients or on parts of them."""
        metric = METRIC if self.preconditioner == "majorizer" else {}
        return RECORDED | metric | ({"gradient": ArraySpec()} if full else {})

    def _step(self, model: Any, data: Data, blocks: int = 1, share: float = 1.0) -> Any:
        """Return the step; an automatic one where none is chosen and there are data."""
        if self.step != "auto" or data is None:  # the number of components may not be known yet
            return UNIT_STEP if self.step == "auto" else self.step
        return ConstantStep(automatic_step(blocks, model.n_components).size * share)


@dataclass(frozen=True)
class PSGLD(LangevinSampler):
    """Langevin dynamics on conflict-free parts of the data.

    In the majoriser's metric (the default) an entry follows, over one step, a process
    whose mean and variance are known. With c the averaged denominator of the
    multiplicative update, a the shape of the prior, whose term (a - 1)/θ G leaves out,
    and s = (1 - e^-ε)/c:

        m = θ + s (θ G + a),   v = 2 s m - s² (a + f θ (G + c)),
        θ ← m (b + z)² / (1 + b²),   b² = r - 1 + √(r (r - 1)),   r = 2 m² / v

    The square of a normal number has both moments and is positive, without clip and
    mirror. f is the share that a component has in the means that it is a part of: where
    others make up for it, an entry is pulled back by less than c. With f = 1 these are
    the moments of the Cox-Ingersoll-Ross process. Shapes below ½ take a gamma number of
    mean m and variance v where v > 2m², near zero. For β < 1, θ + s θ G is at most
    θ + 2√(2s(θ + s)).

    With ``transition="euler"``, y = ε / c:

        θ ← | θ + clip(y θ G, ±2√(2y(θ + y))) + a y + √(2yθ) z |

    With ``preconditioner="identity"``, the papers' plain step, whatever the transition:

        θ ← | θ + clip(εG, ±2√(2ε)) + √(2ε) z |

    Draws are off by a finite step. Of 2 x 2 data under Poisson's, a gamma or a compound Poisson
    law, the automatic step leaves the variances of WH within 6 % with one component, where it is
    0.05, and makes them up to 14 % too large with three, where it is 0.2; means are off by 0.01
    and 0.05 posterior standard deviations. :class:`BlockHMC`, which ``sampler="auto"`` takes for
    such data, has no such error.

    Parameters
    ----------
    step
        ``"auto"`` (only in the majoriser's metric: min(0.2, 1/B), without a
        unit), a number, or a step such as ``ConstantStep`` or ``PolynomialStep``.
    preconditioner
        ``"majorizer"`` or ``"identity"``.
    schedule
        Order of the parts; reshuffled every cycle by default.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, down to 20 where a pass is dear (beyond 10⁹ entries times components), and up to
        2000 where it is cheap, while the log density still rises.
    transition
        Step in the majoriser's metric: ``"moments"`` or ``"euler"``.

    Notes
    -----
    Şimşekli et al. 2017, equations 12 and 13, and Şimşekli et al. 2015,
    equations 7 to 9; the mirror of section 4 there. The clip and the metric are
    this package's own. Matched moments: Andersen 2008, "Simple and efficient simulation
    of the Heston stochastic volatility model", section 3.2 (the share f is ours).

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.PSGLD(step=0.1), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    schedule: Schedule = field(default_factory=Reshuffled)
    warm_start: int | Literal["auto"] = "auto"
    transition: Transition = "moments"
    reason: ClassVar[str] = "it takes priors of any shape, at one pass over the data a draw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_schedule(self.schedule)

    def efficiency(self, model: Any, data: BlockedData) -> float:
        """Return 1: it is what others are measured by."""
        return 1.0

    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        self._check(model, data, on_device)
        parts = count_parts(data)
        step = self._step(model, data, parts)
        return PartsKernel(self, self.schedule, self._arrays(full=False), Work(parts), step)


class Pair(LangevinSampler):
    """Two coupled chains of a sampler on full or partial gradients, with half a step and one."""

    efficiency = Sampler.efficiency
    tracks: ClassVar[tuple[Track, ...]] = (
        Track("fine", "posterior", 1),
        Track("coarse", "posterior_coarse", 2),
    )


@dataclass(frozen=True)
class PSGRRLD(Pair, PSGLD):
    """Two coupled P-SGLD chains whose combination cancels the bias of first order in ε.

    The fine chain takes 2T iterations with ε/2, the coarse one T iterations with
    ε and z_coarse = (z_{2t} + z_{2t+1}) / √2 of the fine chain's normals; for
    any function f of the factors

        f̂ = 2 mean f(fine) - mean f(coarse).

    ``draws`` and ``tune`` count the fine chain's cycles and must be even. The
    fine chain is the trace's ``posterior`` group, the coarse one
    ``posterior_coarse``; :func:`daskfactor.expectation` combines them, as monitored cells do;
    whatever else reads draws reads those of the fine chain, which have the bias of half the step.
    Both leave the same point with the same metric after the first half of tuning.

    Parameters
    ----------
    step, preconditioner, schedule, warm_start
        As for :class:`PSGLD`; the step is that of the coarse chain.
    transition
        ``"euler"`` or ``"moments"``.

    Notes
    -----
    Şimşekli et al. 2017, equations 9 to 11. With ``"moments"`` the bias of a single chain
    has hardly a first order that could be cancelled.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.PSGRRLD(), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    transition: Transition = "euler"


@dataclass(frozen=True)
class LangevinDynamics(LangevinSampler):
    """Langevin dynamics on the gradient over all the data: one step a cycle.

    It takes the steps of :class:`PSGLD`, in the majoriser's metric by default. Those of
    ``transition="euler"`` depend on the grid through the order of sums alone.

    Nothing is subsampled, so that the only error is that of a finite step; for the same
    time in ε a cycle costs B times what one of :class:`PSGLD` does.

    Parameters
    ----------
    step
        ``"auto"`` (only in the majoriser's metric: 0.2, or 0.05 for one or two
        components, without a unit), a number, or a step such as ``ConstantStep`` or
        ``PolynomialStep``, which counts cycles.
    preconditioner
        ``"majorizer"`` or ``"identity"``.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, down to 20 where a pass is dear (beyond 10⁹ entries times components), and up to
        2000 where it is cheap, while the log density still rises.
    transition
        Step in the majoriser's metric, ``"euler"`` or ``"moments"``: see :class:`PSGLD`.
        The share f of ``"moments"`` is that of a block, so that draws depend on the grid.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Şimşekli et al. 2015, section 2 (equation 2), and Şimşekli et al. 2017, equation 6,
    with N entries in every step.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.LangevinDynamics(warm_start=20), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    warm_start: int | Literal["auto"] = "auto"
    transition: Transition = "euler"

    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        self._check(model, data, on_device)
        return LangevinKernel(self, Passes(1), self._arrays(), Work(1), self._step(model, data))


class LangevinPair(Pair, LangevinDynamics):
    """`LangevinDynamics` in two coupled chains."""


@dataclass(frozen=True)
class SGLD(LangevinSampler):
    """Langevin dynamics on gradients from entries drawn with replacement.

    The gradient is::

        G = (N / |Ω|) ∇ Σ_{(i, j) ∈ Ω} log p(v_ij | μ_ij) + ∇ log p(W, H)

    and then the step of :class:`LangevinDynamics`.

    Every iteration draws Ω from all N observed entries and moves all of W and H. A cycle
    is 1 / ``subsample`` iterations: about one pass over the entries. For comparison with
    :class:`PSGLD`, which visits every entry once a cycle in order and so is faster and
    has less noise.

    Parameters
    ----------
    step
        ``"auto"`` (only in the majoriser's metric: 0.2 ``subsample``, or 0.05 ``subsample``
        for one or two components, without a unit), a number, or a step such as
        ``ConstantStep`` or ``PolynomialStep``, which counts iterations.
    preconditioner
        ``"majorizer"`` or ``"identity"``.
    subsample
        ``|Ω| / N``, the share of the observed entries drawn in an iteration; ``"auto"`` is
        1 / B, the share of one of PSGLD's parts.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, down to 20 where a pass is dear (beyond 10⁹ entries times components), and up to
        2000 where it is cheap, while the log density still rises.
    transition
        Step in the majoriser's metric, ``"euler"`` or ``"moments"``: see :class:`PSGLD`.
        The share f of ``"moments"`` is that of a block, so that draws depend on the grid.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin dynamics",
    equation 4; Şimşekli et al. 2015, equation 3.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.SGLD(subsample=0.5), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    subsample: float | Literal["auto"] = "auto"
    warm_start: int | Literal["auto"] = "auto"
    transition: Transition = "euler"

    def __post_init__(self) -> None:
        super().__post_init__()
        share: Any = self.subsample
        if share == "auto":
            return
        if not is_number(share) or not 0 < share <= 1:
            raise OptionError(
                'subsample must be "auto" or the share of the observed entries that an iteration '
                f"draws, above 0 and at most 1, got {share!r}"
            )
        object.__setattr__(self, "subsample", float(share))

    def share(self, blocks: int) -> float:
        """Return |Ω| / N on a grid of ``blocks`` x ``blocks``."""
        return 1.0 / blocks if isinstance(self.subsample, str) else self.subsample

    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        self._check(model, data, on_device, tensors=False)
        share = self.share(count_parts(data))
        moves = max(1, round(1.0 / share))
        schedule = Passes(None if self.subsample == "auto" else moves)
        # The gradient of a share f has noise in 1 / f, which widens the posterior as ε / f.
        step = self._step(model, data, share=share)
        return SubsampleKernel(self, schedule, self._arrays(), Work(moves, moves), step)


class SGLDPair(Pair, SGLD):
    """`SGLD` in two chains whose noise is coupled, though not the entries that they draw."""


def coupled(sampler: Sampler) -> Sampler | None:
    """Return a sampler as two coupled chains; None if there is no such pair."""
    if len(sampler.tracks) > 1:
        return sampler
    for kind, pair in ((PSGLD, PSGRRLD), (LangevinDynamics, LangevinPair), (SGLD, SGLDPair)):
        if isinstance(sampler, kind):
            return pair.from_dict(sampler.to_dict())
    return None
