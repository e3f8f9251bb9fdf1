"""Hamiltonian Monte Carlo (HMC) on whole gradients, mirrored at zero."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import is_number, positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Block, Passes, Schedule
from daskfactor.errors import OptionError
from daskfactor.executors.plan import Action, CycleOptions, Op, build_plan
from daskfactor.executors.state import BlockCells, ChainState, FactorBand
from daskfactor.inference.base import MOMENTS, ConstantStep, Setup, StepSize, Track, Work
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.passes import Fit, shares
from daskfactor.inference.program import COLUMNS, ROWS, FactorProgram, finish_cycle, gamma_prior
from daskfactor.inference.run import OnShare, OnStep
from daskfactor.inference.track import TrackRun
from daskfactor.inference.tweedie_chain import NonNegativeSampler, TweedieChain
from daskfactor.kernels import blockwise
from daskfactor.kernels.langevin import accumulate_moments
from daskfactor.kernels.momentum import leapfrog_drift, leapfrog_kick
from daskfactor.kernels.philox import fill_normals
from daskfactor.kernels.views import Workspace
from daskfactor.models.tweedie import Hyperparameters
from daskfactor.random import Stream, generator, noise_key
from daskfactor.results.schema import Variable, statistic

GAMMA, OFFSET, DECAY = 0.05, 10.0, 0.75
"""Pull of log ε towards its start, number of cycles that are damped, decay of the weights."""
REACH = math.log(10.0)
"""Steps that are tried gravitate to ten times the first one: large ones are cheap to try."""


@dataclass(frozen=True)
class DualAveraging:
    """log ε and its average after ``count`` cycles.

    log ε ← log(10 ε₁) - √t / γ / (t + t₀) Σ (δ - α),  the average with weights t^(-κ)

    ``start`` is log ε₁, ``error`` the averaged δ - α.

    Source: Hoffman and Gelman 2014, "The No-U-Turn Sampler", equation 6 and algorithm 5.
    """

    start: float
    log_step: float
    log_average: float
    error: float = 0.0
    count: int = 0

    @classmethod
    def at(cls, step: float) -> "DualAveraging":
        """Before the first cycle."""
        start = math.log(step)
        return cls(start, start, start)

    def after(self, acceptance: float, target: float) -> "DualAveraging":
        """With one more cycle's acceptance probability."""
        count = self.count + 1
        share = 1.0 / (count + OFFSET)
        error = (1.0 - share) * self.error + share * (target - acceptance)
        log_step = self.start + REACH - math.sqrt(count) / GAMMA * error
        weight = count**-DECAY
        average = weight * log_step + (1.0 - weight) * self.log_average
        return replace(self, log_step=log_step, log_average=average, error=error, count=count)


FIRST_STEP = 0.5
"""Step that tuning begins with, for one entry; d of them take d^(-1/4) as much."""


@dataclass(frozen=True)
class HamiltonianProgram(FactorProgram):
    """The leapfrog steps of one proposal, on passes over the data.

    The first half kick and the first drift come before the plan; every pass but the last
    ends with a kick and a drift, the last one with the second half kick. Gradients are
    those of the log-likelihood at dispersion 1.

    Attributes
    ----------
    hyper
        Dispersion, rates and shapes of the priors.
    size
        ε, the time of a step.
    passes
        Passes of a cycle; 0 only adds the gradients up.
    """

    hyper: Hyperparameters
    size: float
    passes: int

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        view = data.view(op.block.row, op.block.col)
        block = (view, self.likelihood, rows.values, cols.values, op.scale, self.floor)
        shares = blockwise.gradient(*block, workspace)
        rows.arrays["gradient"] += shares[0]
        cols.arrays["gradient"] += shares[1]
        blocks = data.grid.blocks
        if self.passes and op.iteration % blocks == blocks - 1:
            for band, factor in ((rows, ROWS), (cols, COLUMNS)):
                self.kick(band, factor, 0.5 if op.last else 1.0)
                if not op.last:
                    self.drift(band)

    def _reads(self, op: Op) -> tuple[str, ...]:
        del op
        return ("spread",)

    def _writes(self, op: Op) -> tuple[str, ...]:
        del op
        return ("gradient", "momentum")

    def kick(self, band: FactorBand, factor: int, share: float) -> None:
        """Kick the momentum of a band, for a share of a step."""
        arrays = band.arrays
        moved = (band.values, arrays["momentum"], arrays["gradient"], arrays["spread"])
        rate, shape = self.hyper.prior(factor)
        leapfrog_kick(*moved, share * self.size, 1.0 / self.hyper.dispersion, rate, shape)

    def drift(self, band: FactorBand) -> None:
        """Let a band drift; its gradient is to be summed anew where it leads."""
        leapfrog_drift(band.values, band.arrays["momentum"], band.arrays["spread"], self.size)
        band.arrays["gradient"][:] = 0


@dataclass(frozen=True)
class HMC(NonNegativeSampler):
    """Hamiltonian Monte Carlo on W and H: exact, at the price of several passes a draw.

    Each cycle draws momenta p ~ Normal(0, m), goes ``steps`` leapfrog steps

        p ← p + ½ε G,   θ ← θ + ε p / m,   p ← p + ½ε G

    and accepts where they lead with probability min(1, e^-ΔE); otherwise the draw is
    repeated. θ < 0 is the mirror image of -θ: an entry that passes zero comes back with
    its momentum turned. The mass m of an entry is the curvature of the log posterior at
    the mode, 1 / m = (θ + 1/c) / c with c the denominator of the multiplicative update.

    Parameters
    ----------
    step
        ``"auto"`` learns ε by dual averaging while tuning, then keeps it; a number, in
        units of the posterior's width, fixes it. Each cycle takes ε times a random
        factor from 0.8 to 1.2, so that no direction comes back to where it was.
    steps
        Leapfrog steps of a cycle, each a pass over the data.
    target_accept
        Mean acceptance rate that tuning aims at, between 0 and 1.
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Neal 2011, "MCMC using Hamiltonian dynamics", section 5.3.2 and, for the reflection,
    5.5.1.5; Hoffman and Gelman 2014, "The No-U-Turn Sampler", section 3.2.1.
    """

    step: float | Literal["auto"] = "auto"
    steps: int = 10
    target_accept: float = 0.8
    warm_start: int | Literal["auto"] = "auto"
    schedule: Schedule = field(default=Passes(10), init=False, repr=False)

    statistics: ClassVar[tuple[Variable, ...]] = (
        statistic("acceptance_rate", "acceptance probability of the proposal"),
    )
    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.step, str):
            if self.step != "auto":
                raise OptionError(f'step must be "auto" or a number, got {self.step!r}')
        else:
            object.__setattr__(self, "step", positive_number("step", self.step))
        object.__setattr__(self, "steps", whole_number("steps", self.steps, 1))
        target: Any = self.target_accept
        if not is_number(target) or not 0 < target < 1:
            raise OptionError(f"target_accept must be a number between 0 and 1, got {target!r}")
        object.__setattr__(self, "target_accept", float(target))
        object.__setattr__(self, "schedule", Passes(self.steps))

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """Return the step that a chain begins with, of one entry (see `first_step`)."""
        del track, blocks, n_components
        return ConstantStep(FIRST_STEP if isinstance(self.step, str) else self.step)

    def first_step(self, entries: int) -> float:
        """Return ε at the first cycle for factors of so many entries."""
        if not isinstance(self.step, str):
            return self.step
        return FIRST_STEP * math.pow(entries, -0.25)

    def work(self, blocks: int) -> Work:
        """Count one visit for each step, and one for the energy where they lead."""
        del blocks
        return Work(1, self.steps + 1, self.steps + 1 / 3)

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*MOMENTS, "gradient", "momentum", "spread")

    def carried(self, width: int) -> tuple[float, float]:
        """Count values and gradients to go back to, too."""
        tuning, after = super().carried(width)
        return tuning + 2, after + 2

    def chain(self, setting: Setting, number: int) -> Chain:
        return HMCChain(setting, number)

    def program(self, setup: Setup) -> HamiltonianProgram:
        return HamiltonianProgram(
            setup.model.likelihood, setup.floor, setup.hyper, setup.step(0), self.steps
        )

    def for_compilation(self) -> Self:
        return replace(super().for_compilation(), steps=1, step="auto", target_accept=0.8)


Array = NDArray[Any]

JITTER = 0.2
"""A cycle's step is ε times a uniform factor within 1 ± this."""
SLAB = 2**16
"""Monitored cells that are predicted together."""


class Place(NamedTuple):
    """The start of a cycle, which a rejection goes back to."""

    values: list[Array]
    gradients: list[Array]
    fit: Fit


class HMCChain(TweedieChain):
    """A chain of a `TweedieNMF` under `HMC`.

    Between cycles a band's ``"gradient"`` is that of its ``values``, and ``fit`` is
    their fit; both are None or zero before the first cycle.
    """

    sampler: HMC

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        assert isinstance(setting.sampler, HMC)
        self.sampler = setting.sampler
        entries = sum(setting.data.shape) * setting.model.width
        self.averaging = DualAveraging.at(self.sampler.first_step(entries))
        self.fit: Fit | None = None
        self.size = math.exp(self.averaging.log_step)
        self.sizes: dict[int, float] = {}
        self.acceptance: dict[int, float] = {}

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        super().start(on_step, first)
        self._set_masses(self.tracks[0].state)

    def _set_masses(self, state: ChainState) -> None:
        """Set S = 1/√m with 1/m = (θ + 1/c) / c: the width of Gamma(cθ + 1, c); 0 where frozen.

        c is the denominator of the multiplicative update at the start.
        """
        setting, hyper = self.setting, self.tempered
        for side, factor, bands in (("rows", ROWS, state.rows), ("columns", COLUMNS, state.cols)):
            found = shares(
                setting.executor, setting.data, state, side, self.model.likelihood, self.floor
            )
            frozen = self.model.frozen[factor]
            for band, share in zip(bands, found, strict=True):
                c = share.denominator / hyper.dispersion + hyper.prior(factor)[0]
                band.arrays["spread"][:] = np.sqrt((band.values + 1.0 / c) / c)
                if frozen is not None:
                    band.arrays["spread"][:, frozen] = 0

    # -- what a checkpoint holds ---------------------------------------------------

    def memory(self) -> dict[str, Any]:
        fit = None if self.fit is None else list(self.fit)
        return super().memory() | {"fit": fit, "averaging": asdict(self.averaging)}

    def recall(self, memory: dict[str, Any]) -> None:
        super().recall(memory)
        self.fit = None if memory["fit"] is None else Fit(*memory["fit"])
        self.averaging = DualAveraging(**memory["averaging"])

    def forget(self) -> None:
        super().forget()
        self.sizes.clear()
        self.acceptance.clear()

    def statistics(self, cycles: list[int]) -> dict[str, Array]:
        return {"acceptance_rate": np.array([self.acceptance[cycle] for cycle in cycles])}

    # -- steps -----------------------------------------------------------------------

    def step_for(self, track: Track) -> StepSize:
        """Return the step of the present cycle."""
        del track
        return ConstantStep(self.size)

    def step_size(self, run: TrackRun, cycle: int) -> float:
        """Return ε at a cycle of the running segment."""
        del run
        return self.sizes[cycle]

    def _size_at(self, cycle: int, jitter: float) -> float:
        if not isinstance(self.sampler.step, str):
            base = self.sampler.step
        elif cycle < self.setting.options.tune or not self.averaging.count:
            base = math.exp(self.averaging.log_step)
        else:
            base = math.exp(self.averaging.log_average)
        return base * (1.0 + JITTER * (2.0 * jitter - 1.0)) * self.shrink

    # -- cycles ----------------------------------------------------------------------

    def _run_stretch(
        self, run: TrackRun, end: int, on_share: OnShare | None, before: float, share: float
    ) -> None:
        first = run.cycle
        if self.fit is None:
            self._look(run)
        for cycle in range(first, end):
            self._cycle(run, cycle)
            self._record(run, cycle, self._wanted(run.track, cycle, end))
            run.cycle = cycle + 1
            if on_share is not None:
                on_share(before + share * (run.cycle - first) / (end - first))

    def _look(self, run: TrackRun) -> None:
        """Take gradient and fit where the chain starts."""
        program = self._program(run.track)
        assert isinstance(program, HamiltonianProgram)
        self.fit = self._run(run, run.cycle, replace(program, passes=0))

    def _run(self, run: TrackRun, cycle: int, program: HamiltonianProgram) -> Fit:
        """Run a program's passes from the present values; return the fit where they lead."""
        setting = self.setting
        plan = build_plan(
            Passes(program.passes or 1),
            setting.data.n_observed,
            range(cycle, cycle + 1),
            lambda cycle: np.random.default_rng(0),  # passes have one order only
            lambda cycle: CycleOptions(evaluate=True),
        )
        run.state = setting.executor.run(plan, program, run.state, setting.data)
        sums = np.sum([evaluation.values for evaluation in run.state.evaluations], axis=0)
        run.state.evaluations.clear()
        return Fit(float(sums[0]), float(sums[1]))

    def _cycle(self, run: TrackRun, cycle: int) -> None:
        """Propose, and accept or go back."""
        options = self.setting.options
        assert self.fit is not None
        rng = generator(options.seed, self.number, Stream.ACCEPTANCE, cycle)
        jitter, threshold = rng.random(2)
        self.size = self.sizes[cycle] = self._size_at(cycle, float(jitter))
        bands = run.state.bands()
        start = Place(
            [band.values.copy() for band in bands],
            [band.arrays["gradient"].copy() for band in bands],
            self.fit,
        )
        self._draw_momenta(run.state, cycle)
        before = self._energy(run.state, self.fit)
        program = self._program(run.track)
        assert isinstance(program, HamiltonianProgram)
        with np.errstate(all="ignore"):  # a proposal may run away: it is then rejected
            for factor, own in ((ROWS, run.state.rows), (COLUMNS, run.state.cols)):
                for band in own:
                    program.kick(band, factor, 0.5)
                    program.drift(band)
            self.fit = self._run(run, cycle, program)
            change = self._energy(run.state, self.fit) - before
        probability = math.exp(min(0.0, -change)) if math.isfinite(change) else 0.0
        if not threshold < probability:
            self._go_back(run.state, start)
        self.acceptance[cycle] = probability
        if cycle < options.tune:
            self.averaging = self.averaging.after(probability, self.sampler.target_accept)

    def _draw_momenta(self, state: ChainState, cycle: int) -> None:
        key = noise_key(self.setting.options.seed, self.number)
        for factor, bands in ((ROWS, state.rows), (COLUMNS, state.cols)):
            for band in bands:
                fill_normals(band.arrays["momentum"], key, cycle, factor, band.offset)

    def _energy(self, state: ChainState, fit: Fit) -> float:
        """Return -log p(V | W, H)^t p(W, H) but for a constant, and the momenta's energy."""
        hyper = self.tempered
        parts = [-fit.negative_divergence / hyper.dispersion]
        for factor, bands in ((ROWS, state.rows), (COLUMNS, state.cols)):
            log_density = gamma_prior(hyper, factor, self.model.frozen)
            for band in bands:
                parts.append(-log_density(band.values))
                u = band.arrays["momentum"]
                parts.append(0.5 * float(np.sum(np.square(u, dtype=np.float64))))
        return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan

    def _go_back(self, state: ChainState, start: Place) -> None:
        for band, values, gradient in zip(
            state.bands(), start.values, start.gradients, strict=True
        ):
            band.values[:] = values
            band.arrays["gradient"][:] = gradient
        self.fit = start.fit

    def _record(self, run: TrackRun, cycle: int, wanted: CycleOptions) -> None:
        """Record the state that was decided on, as other samplers do inside operations."""
        op = Op(Action.UPDATE, Block(0, 0), cycle, -1, 1.0, True, wanted)
        for factor, bands in ((ROWS, run.state.rows), (COLUMNS, run.state.cols)):
            for band in bands:
                finish_cycle(op, band, gamma_prior(self.hyper, factor, self.model.frozen))
        if wanted.record:
            for block, cells in run.state.cells.items():
                row, col = run.state.rows[block.row], run.state.cols[block.col]
                watch(cells, row.values, col.values)
        if wanted.evaluate:
            assert self.fit is not None
            run.fits[cycle] = self.fit
            run.densities[cycle] = self._density(run, cycle)


def watch(cells: BlockCells, W: Array, H: Array) -> None:
    """Add the means at the monitored cells of a block to their moments."""
    cells.count += 1
    mu = np.empty_like(cells.mean)
    for start in range(0, mu.size, SLAB):
        span = slice(start, start + SLAB)
        mu[span] = np.einsum("ck,ck->c", W[cells.rows[span]], H[cells.cols[span]])
    accumulate_moments(mu[:, None], cells.count, cells.mean[:, None], cells.m2[:, None])
