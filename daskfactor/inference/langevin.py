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

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import is_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes, Reshuffled, Schedule
from daskfactor.errors import DataError, OptionError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import (
    METRIC,
    MOMENTS,
    ConstantStep,
    Step,
    StepSize,
    Track,
    Work,
    automatic_step,
    check_schedule,
    checked_step,
)
from daskfactor.inference.chain import Chain, NonNegativeSampler
from daskfactor.inference.program import TweedieProgram, finish_cycle, set_metric
from daskfactor.kernels import blockwise
from daskfactor.kernels.langevin import cir_step, langevin_step
from daskfactor.kernels.philox import Address
from daskfactor.kernels.subsample import add_subsample, block_address
from daskfactor.kernels.views import Workspace
from daskfactor.models.settings import held

Array = NDArray[Any]
Preconditioner = Literal["majorizer", "identity"]
Transition = Literal["euler", "cir"]

SUBSAMPLE = 0x5B5A
"""Tells the generator that shares entries out among blocks from others of the same key."""


# -- block operations ----------------------------------------------------------------------


@dataclass(frozen=True)
class LangevinProgram(TweedieProgram):
    """Block operations of Langevin steps on conflict-free parts.

    Attributes
    ----------
    step, shrink
        ε per iteration, and the factor it was reduced by after divergences.
    majorizer
        Whether to step in the majoriser's metric or plainly.
    coarse
        Whether this is the coarse chain of a Richardson–Romberg pair, whose
        normals are (z_{2t} + z_{2t+1}) / √2 of the fine chain's.
    exact
        Whether the metric's diffusion is drawn from exactly.
    """

    step: StepSize
    shrink: float = 1.0
    majorizer: bool = True
    coarse: bool = False
    exact: bool = False

    def step_size(self, iteration: int) -> float:
        """Return ε at an iteration, reductions included."""
        return self.step(iteration) * self.shrink

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        adapt = op.wanted.adapt and self.majorizer
        curvatures = None
        if adapt or self.exact:
            curvatures = np.zeros_like(rows.values), np.zeros_like(cols.values)
        view, scale = data.view(*op.block), op.scale / self.hyper.dispersion
        block = (view, self.likelihood, rows.values, cols.values, scale, self.floor)
        gradients = blockwise.gradient(*block, workspace, curvatures)
        for factor, band in enumerate((rows, cols)):
            if curvatures is not None and adapt:
                # Gathered with weight s / B: 1 where every part comes up once a cycle,
                # N / (B |part|) where parts are drawn.
                weight = band.values.dtype.type(op.scale / data.grid.blocks)
                band.arrays["gathered"] += weight * curvatures[factor]
            if curvatures is not None and self.exact:
                both = gradients[factor], curvatures[factor]
                self._draw(band, *both, scale, op.iteration, factor)
            else:
                self._move(band, gradients[factor], op.iteration, factor)
        if op.last:
            self._finish(op, rows, cols)

    def _move(self, band: FactorBand, gradient: Array, iteration: int, factor: int) -> None:
        rate, shape = self.hyper.prior(factor)
        prior, address = (float(rate), float(shape)), self._address(band, iteration, factor)
        rest = (self.step_size(iteration), prior, address, self.coarse)
        if self.majorizer:  # the metric of frozen components is infinite
            langevin_step(band.values, gradient, band.arrays["metric"], *rest)
            return
        with held(band.values, self.frozen[factor]):
            langevin_step(band.values, gradient, None, *rest)

    def _address(self, band: FactorBand, iteration: int, factor: int) -> Address:
        """Say which random numbers move a band."""
        return Address(np.array(self.key, dtype=np.uint32), iteration, factor, band.offset)

    def _draw(
        self,
        band: FactorBand,
        gradient: Array,
        curvature: Array,
        scale: float,
        iteration: int,
        factor: int,
    ) -> None:
        size, prior = self.step_size(iteration), self.hyper.prior(factor)
        taken = (gradient, curvature, band.arrays["metric"], scale, size, prior)
        cir_step(band.values, *taken, self._address(band, iteration, factor))

    def _finish(self, op: Op, rows: FactorBand, cols: FactorBand) -> None:
        """Learn the metric from the cycle, and record where it ended."""
        if op.wanted.adapt and self.majorizer:
            for factor, band in enumerate((rows, cols)):
                band.counts["curvature"] += 1
                gathered, curvature = band.arrays["gathered"], band.arrays["curvature"]
                curvature += (gathered - curvature) / band.counts["curvature"]
                gathered[:] = 0
                set_metric(band, self.hyper, factor, self.frozen[factor])
        finish_cycle(op, rows, cols, self.log_prior)

    def _reads(self) -> tuple[str, ...]:
        return ("metric",) if self.majorizer else ()

    def _writes(self, op: Op) -> tuple[str, ...]:
        if not (op.wanted.adapt and self.majorizer):
            return ()
        return ("gathered", *(("curvature", "metric") if op.last else ()))


class PassProgram(LangevinProgram):
    """Gradients over all blocks, and one step of both factors at the end of a pass.

    The noise of pass t has the address t, so that draws depend on the grid only through
    the order of sums.
    """

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        self._add(op, data, rows, cols, workspace)
        number, position = divmod(op.iteration, data.grid.blocks)
        if position == data.grid.blocks - 1:
            for factor, band in enumerate((rows, cols)):
                self._move(band, band.arrays["gradient"], number, factor)
                band.arrays["gradient"][:] = 0
        if op.last:
            self._finish(op, rows, cols)

    def _add(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        """Add the block's share of the gradients, and of the curvature while it is learnt."""
        view, scale = data.view(*op.block), op.scale / self.hyper.dispersion
        block = (view, self.likelihood, rows.values, cols.values, scale, self.floor)
        curvatures = None
        if op.wanted.adapt and self.majorizer:
            curvatures = rows.arrays["gathered"], cols.arrays["gathered"]
        shares = blockwise.gradient(*block, workspace, curvatures)
        rows.arrays["gradient"] += shares[0]
        cols.arrays["gradient"] += shares[1]

    def _writes(self, op: Op) -> tuple[str, ...]:
        return ("gradient", *super()._writes(op))


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


@dataclass(frozen=True)
class SubsampleProgram(PassProgram):
    """Gradients from entries that are drawn anew in every pass.

    Attributes
    ----------
    observed
        Observed entries of every block, int64, row by row, as bytes.
    entries
        |Ω|, entries drawn in a pass.
    passes
        Passes of a cycle.
    """

    observed: bytes = b""
    entries: int = 1
    passes: int = 1

    @cached_property
    def factor(self) -> float:
        """The weight N / |Ω| of an entry that is drawn."""
        return float(np.frombuffer(self.observed, np.int64).sum()) / self.entries

    def _add(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        del workspace
        blocks = data.grid.blocks
        number, block = op.iteration // blocks, op.block.row * blocks + op.block.col
        count = int(allotment(self.key, number, self.entries, self.observed)[block])
        if not count:
            return
        curvature = None
        if op.wanted.adapt and self.majorizer:
            weight = self.factor / self.passes
            curvature = ((rows.arrays["gathered"], cols.arrays["gathered"]), weight)
        add_subsample(
            data.view(*op.block),
            self.likelihood,
            (rows.values, cols.values),
            (count, block_address(np.array(self.key, dtype=np.uint32), number, block)),
            self.factor / self.hyper.dispersion,
            self.floor,
            (rows.arrays["gradient"], cols.arrays["gradient"]),
            curvature,
        )


# -- samplers ------------------------------------------------------------------------------


class LangevinSampler(NonNegativeSampler):
    """Options that all samplers share which take Langevin steps.

    A subclass is a frozen dataclass with the fields ``step``, ``preconditioner`` and
    ``warm_start``.
    """

    step: Step
    preconditioner: Preconditioner
    operations: ClassVar[type[LangevinProgram]] = LangevinProgram

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preconditioner not in ("majorizer", "identity"):
            raise OptionError(
                f'preconditioner must be "majorizer" or "identity", got {self.preconditioner!r}'
            )
        object.__setattr__(self, "step", checked_step(self.step))
        if self.step == "auto" and not self.majorizer:
            raise OptionError(
                "the plain step has no automatic size; pass a number such as step=1e-5, or use "
                'preconditioner="majorizer"'
            )

    @property
    def majorizer(self) -> bool:
        """Tell whether steps are taken in the majoriser's metric."""
        return self.preconditioner == "majorizer"

    @property
    def arrays(self) -> tuple[str, ...]:
        gradient = ("gradient",) if issubclass(self.operations, PassProgram) else ()
        return (*MOMENTS, *(METRIC if self.majorizer else ()), *gradient)

    def for_compilation(self) -> Self:
        step: Step = "auto" if self.majorizer else 1e-3
        return replace(super().for_compilation(), step=step)  # type: ignore[type-var]

    def program(self, chain: Chain, track: Track, **more: Any) -> LangevinProgram:
        return self.operations(
            **chain.program_fields,
            frozen=chain.setting.model.frozen,
            step=chain.step_for(track),
            shrink=chain.shrink,
            majorizer=self.majorizer,
            coarse=track.coarseness > 1,
            **more,
        )


@dataclass(frozen=True)
class PSGLD(LangevinSampler):
    """Langevin dynamics on conflict-free parts of the data.

    In the majoriser's metric (the default), with c the averaged denominator of
    the multiplicative update and y = ε / c:

        θ ← | θ + clip(y θ G, ±2√(2y(θ + y))) + a y + √(2yθ) z |

    where a is the shape of the prior and G leaves its term (a - 1)/θ out. With
    ``preconditioner="identity"``, the papers' plain step:

        θ ← | θ + clip(εG, ±2√(2ε)) + √(2ε) z |

    With ``transition="cir"`` the metric's diffusion is not stepped through but drawn
    from exactly, numerator and denominator of the multiplicative update held:

        τ = ε den/c,  n ~ Poisson(den θ / (e^τ - 1)),
        θ ← Gamma(θ num + a + n, rate den / (1 - e^(-τ)))

    so that θ stays positive without clip and mirror. Its random numbers cost about 150
    times as much, 0.4 µs an entry. On Poisson counts the bias of second moments is a
    small part of the other's at the same step; on strongly skewed laws (β = 0) it is
    about the same at small steps and grows faster from ε = 0.2 on.

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
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).
    transition
        ``"euler"``, the step above, or ``"cir"``: only in the majoriser's metric, and
        for data without negative entries.

    Notes
    -----
    Şimşekli et al. 2017, equations 12 and 13, and Şimşekli et al. 2015,
    equations 7 to 9; the mirror of section 4 there. The clip and the metric are
    this package's own. Exact transitions: Baker, Fearnhead, Fox and Nemeth 2018,
    "Large-scale stochastic sampling from the probability simplex".
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    schedule: Schedule = field(default_factory=Reshuffled)
    warm_start: int | Literal["auto"] = "auto"
    transition: Transition = "euler"

    def __post_init__(self) -> None:
        if self.transition not in ("euler", "cir"):
            raise OptionError(f'transition must be "euler" or "cir", got {self.transition!r}')
        super().__post_init__()
        if self.transition == "cir" and self.preconditioner != "majorizer":
            raise OptionError(
                'transition="cir" is a transition of the diffusion in the majoriser\'s metric; '
                'leave preconditioner at "majorizer", or transition at "euler"'
            )
        check_schedule(self.schedule)

    def check_data(self, data: BlockedData) -> None:
        """Refuse negative data under exact transitions: no gamma law has their numerator."""
        if self.transition == "cir" and data.minimum < 0:
            raise DataError(
                f'transition="cir" takes non-negative data, got a smallest value of '
                f'{data.minimum:g}; leave transition at "euler", or mask the negative values'
            )

    def for_compilation(self) -> Self:
        return replace(super().for_compilation(), schedule=Reshuffled())

    def program(self, chain: Chain, track: Track, **more: Any) -> LangevinProgram:
        return super().program(chain, track, exact=self.transition == "cir", **more)


@dataclass(frozen=True)
class ScaledStep(StepSize):
    """A fine chain's step: half of the coarse chain's step at the same time."""

    base: StepSize

    def __call__(self, iteration: int) -> float:
        return 0.5 * self.base(iteration // 2)

    def to_dict(self) -> dict[str, Any]:
        """Return what describes the coarse chain's step."""
        return self.base.to_dict()


@dataclass(frozen=True)
class PSGRRLD(PSGLD):
    """Two coupled P-SGLD chains whose combination cancels the bias of first order in ε.

    The fine chain takes 2T iterations with ε/2, the coarse one T iterations with
    ε and z_coarse = (z_{2t} + z_{2t+1}) / √2 of the fine chain's normals; for
    any function f of the factors

        f̂ = 2 mean f(fine) - mean f(coarse).

    ``draws`` and ``tune`` count the fine chain's cycles and must be even. The
    fine chain is the trace's ``posterior`` group, the coarse one
    ``posterior_coarse``; :func:`daskfactor.expectation` and
    :func:`daskfactor.predict` combine them. Both leave the same point with the
    same metric after the first half of tuning.

    Notes
    -----
    Şimşekli et al. 2017, equations 9 to 11.
    """

    biased: ClassVar[bool] = False  # of first order: the combination of both chains
    tracks: ClassVar[tuple[Track, ...]] = (
        Track("fine", "posterior", 1),
        Track("coarse", "posterior_coarse", 2),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transition != "euler":
            raise OptionError(
                f"PSGRRLD couples its chains through normal numbers, and "
                f"transition={self.transition!r} has none; use PSGLD, or leave it at "
                '"euler"'
            )

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        base = super().step_for(track, blocks, n_components)
        return ScaledStep(base) if track.coarseness == 1 else base


@dataclass(frozen=True)
class LangevinDynamics(LangevinSampler):
    """Langevin dynamics on the gradient over all the data: one step a cycle.

    In the majoriser's metric (the default), with c the averaged denominator of the
    multiplicative update, y = ε / c, and a the shape of the prior, whose term (a - 1)/θ
    G leaves out:

        θ ← | θ + clip(y θ G, ±2√(2y(θ + y))) + a y + √(2yθ) z |

    With ``preconditioner="identity"``:

        θ ← | θ + clip(εG, ±2√(2ε)) + √(2ε) z |

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
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Şimşekli et al. 2015, section 2 (equation 2), and Şimşekli et al. 2017, equation 6,
    with N entries in every step.
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    warm_start: int | Literal["auto"] = "auto"
    schedule: Schedule = field(default=Passes(1), init=False, repr=False)
    operations: ClassVar[type[LangevinProgram]] = PassProgram

    def automatic(self, blocks: int, n_components: int) -> StepSize:
        del blocks
        return automatic_step(1, n_components)

    def work(self, blocks: int) -> Work:
        del blocks
        return Work(1)


@dataclass(frozen=True)
class SGLD(LangevinSampler):
    """Langevin dynamics on gradients from entries drawn with replacement.

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
        |Ω| / N, the share of the observed entries drawn in an iteration; ``"auto"`` is
        1 / B, the share of one of PSGLD's parts.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin dynamics",
    equation 4; Şimşekli et al. 2015, equation 3.
    """

    step: Step = "auto"
    preconditioner: Preconditioner = "majorizer"
    subsample: float | Literal["auto"] = "auto"
    warm_start: int | Literal["auto"] = "auto"
    schedule: Schedule = field(default=Passes(None), init=False, repr=False)
    operations: ClassVar[type[LangevinProgram]] = SubsampleProgram

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
        object.__setattr__(self, "schedule", Passes(self.work(1).moves))

    def share(self, blocks: int) -> float:
        """Return |Ω| / N on a grid of ``blocks`` x ``blocks``."""
        return 1.0 / blocks if isinstance(self.subsample, str) else self.subsample

    def work(self, blocks: int) -> Work:
        moves = max(1, round(1.0 / self.share(blocks)))
        return Work(moves, moves)

    def automatic(self, blocks: int, n_components: int) -> StepSize:
        """The gradient of a share f has noise in 1 / f, which widens the posterior as ε / f."""
        return ConstantStep(automatic_step(1, n_components).size * self.share(blocks))

    def program(self, chain: Chain, track: Track, **more: Any) -> LangevinProgram:
        observed = chain.setting.data.n_observed
        blocks = len(observed)
        return super().program(
            chain,
            track,
            observed=np.ascontiguousarray(observed, np.int64).tobytes(),
            entries=max(1, round(int(observed.sum()) * self.share(blocks))),
            passes=self.work(blocks).moves,
            **more,
        )
