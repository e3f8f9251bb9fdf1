"""Hamiltonian Monte Carlo (HMC) on whole gradients, mirrored at zero."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import inner_share, positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes, Schedule
from daskfactor.errors import ModelError, OptionError
from daskfactor.executors.plan import Action, CycleOptions, Op, build_plan, plan_visits
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.inference.bands import drop_arrays, fill_array
from daskfactor.inference.base import (
    HYPER_EVERY,
    MOMENTS,
    Bands,
    ConstantStep,
    Sampler,
    StepSize,
    Track,
    Work,
)
from daskfactor.inference.chain import Chain, OnShare, TrackRun
from daskfactor.inference.multiplicative import OnStep
from daskfactor.inference.passes import Share
from daskfactor.inference.program import (
    COLUMNS,
    RATE,
    ROWS,
    SHIFT,
    Fit,
    Program,
    band_prior,
    law_of,
    take_fits,
)
from daskfactor.inference.setting import Setting
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.kernels import blockwise
from daskfactor.kernels.steps import accumulate_moments, fill_normals, leapfrog_drift, leapfrog_kick
from daskfactor.kernels.views import Workspace
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.settings import Mask
from daskfactor.random import Stream, generator
from daskfactor.results.schema import Variable, statistic

Array = NDArray[Any]

GAMMA, OFFSET, DECAY = 0.05, 10.0, 0.75
"""Pull of log ε towards its start, number of cycles that are damped, decay of the weights."""
REACH = math.log(10.0)
"""Steps that are tried gravitate to ten times the first one: large ones are cheap to try."""


LEARN_EVERY, RECENT = 5, 3.0
"""Cycles of tuning between looks at the widths of entries; later ones count more."""
FIRST_STEP = 0.5
"""Step that tuning begins with, for one entry; d of them take d^(-1/4) as much."""
JITTER = 0.2
"""A proposal's step is ε times a uniform factor within 1 ± this."""
START = ("values before", "gradient before")
"""Arrays of a band on its path: where this began."""
SLAB = 2**16
"""Monitored cells that are predicted together."""


def check_leapfrog(options: Any) -> None:
    """Check ``step``, ``steps`` and ``target_accept`` of a frozen dataclass, as plain numbers."""
    step, target = options.step, options.target_accept
    if isinstance(step, str):
        if step != "auto":
            raise OptionError(f'step must be "auto" or a number, got {step!r}')
    else:
        object.__setattr__(options, "step", positive_number("step", step))
    object.__setattr__(options, "steps", whole_number("steps", options.steps, 1))
    inner_share("target_accept", target)
    object.__setattr__(options, "target_accept", float(target))


def first_step(step: float | str, entries: int) -> float:
    """Return ε at the first proposal, for so many entries."""
    return FIRST_STEP * math.pow(entries, -0.25) if isinstance(step, str) else step


@dataclass(frozen=True)
class DualAveraging:
    """log ε and its average after ``count`` cycles.

    log ε ← log(10 ε₁) - √t / γ / (t + t₀) Σ (δ - α),  the average with weights t^(-κ)

    ``start`` is log ε₁, ``error`` the averaged δ - α; numbers, or arrays of many steps'.

    Source: Hoffman and Gelman 2014, "The No-U-Turn Sampler", equation 6 and algorithm 5.
    """

    start: float
    log_step: Any
    log_average: Any
    error: Any = 0.0
    count: int = 0

    @classmethod
    def at(cls, step: float) -> "DualAveraging":
        """Before the first cycle."""
        start = math.log(step)
        return cls(start, start, start)

    def after(self, acceptance: Any, target: float) -> "DualAveraging":
        """With one more cycle's acceptance probability."""
        count = self.count + 1
        share = 1.0 / (count + OFFSET)
        error = (1.0 - share) * self.error + share * (target - acceptance)
        log_step = self.start + REACH - math.sqrt(count) / GAMMA * error
        weight = count**-DECAY
        average = weight * log_step + (1.0 - weight) * self.log_average
        return replace(self, log_step=log_step, log_average=average, error=error, count=count)

    def size(self, step: float | str, tuning: bool, jitter: float) -> float:
        """Return ε of a proposal, times its random factor; ``step`` may fix it."""
        base = step
        if isinstance(base, str):
            base = math.exp(self.log_step if tuning else self.log_average)
        return base * (1.0 + JITTER * (2.0 * jitter - 1.0))


class HMCChain(TweedieChain):
    """A chain of a `TweedieNMF` under `HMC`.

    Between cycles a band's ``"gradient"`` is that of its ``values``, and ``fit`` is
    their fit; both are None or zero before the first cycle.
    """

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.sampler: Any = setting.sampler
        entries = sum(setting.data.shape) * setting.model.width
        self.averaging = DualAveraging.at(first_step(self.sampler.step, entries))
        self.fit: Fit | None = None
        self.size = math.exp(self.averaging.log_step)
        self.sizes: dict[int, float] = {}
        self.acceptance: dict[int, float] = {}

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Start as other chains do, with the widths of entries there."""
        super().start(on_step, first)
        self._learn_spread(self.tracks[0].state, 1.0)

    def _learn_spread(self, state: ChainState, weight: float) -> None:
        """Average S² = 1/m over states: the variance of Gamma(cθ + 1, c).

        1/m = (θ + 1/c) / c, with c the denominator of the multiplicative update; 0 where an
        entry is frozen. At a mode alone c would be far too large near zero for β < 1.
        """
        how: Any = {"hyper": self.tempered, "weight": weight, "frozen": self.model.frozen}
        self._with_shares(state, partial(average_spread, **how), "spread")

    def _follow_dispersion(self) -> None:
        super()._follow_dispersion()
        if not self.rule.divides:  # fit and gradient are another law's
            self._forget_gradient(self.tracks[0])

    def _rescale(self, run: TrackRun) -> None:
        super()._rescale(run)
        self._forget_gradient(run)

    def _forget_gradient(self, run: TrackRun) -> None:
        self.fit = None
        run.state.each(partial(fill_array, name="gradient", value=0.0))

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

    # -- cycles ----------------------------------------------------------------------

    def step_for(self, track: Track) -> StepSize:
        """Return the step of the present cycle."""
        del track
        return ConstantStep(self.size)

    def step_sizes(self, run: TrackRun, cycles: list[int]) -> Array:
        """Return ε at cycles of the running segment."""
        del run
        return np.array([self.sizes[cycle] for cycle in cycles])

    def _run_cycles(self, run: TrackRun, end: int, tell: OnShare) -> None:
        if self.fit is None:  # gradient and fit where the chain starts
            self.fit = self._run(run, run.cycle, 1, CycleOptions(adapt=True, evaluate=True))
        for cycle in range(run.cycle, end):
            if cycle < self.setting.options.tune and cycle % LEARN_EVERY == 0:
                self._learn_spread(run.state, RECENT / (cycle // LEARN_EVERY + RECENT))
            self._cycle(run, cycle)
            self._record(run, cycle, self._wanted(run, cycle, end))
            run.cycle = cycle + 1
            tell(0)

    def _run(self, run: TrackRun, cycle: int, passes: int, wanted: CycleOptions) -> Fit:
        """Run so many passes from the present values; return the fit where they lead."""
        setting, program = self.setting, self.program(run.track)
        plan = build_plan(
            Passes(passes),
            setting.data.n_observed,
            range(cycle, cycle + 1),
            lambda cycle: np.random.default_rng(0),  # passes have one order only
            lambda cycle: wanted,
        )
        run.state = setting.executor.run(plan, program, run.state, setting.data)
        return take_fits(run.state)[cycle]

    def _cycle(self, run: TrackRun, cycle: int) -> None:
        """Propose, and accept or go back."""
        seed, tuning = self.setting.options.seed, cycle < self.setting.options.tune
        fit = cast("Fit", self.fit)
        jitter, threshold = generator(seed, self.number, Stream.ACCEPTANCE, cycle).random(2)
        self.size = self.averaging.size(self.sampler.step, tuning, float(jitter)) * self.shrink
        self.sizes[cycle] = self.size
        sampler, program = self.sampler, self.program(run.track)
        begun, ended = [], []
        for factor in (ROWS, COLUMNS):
            off = partial(set_off, program=program, cycle=cycle, factor=factor)
            begun += run.state.each(off, factor)
        with np.errstate(all="ignore"):  # a proposal may run away: it is then rejected
            self.fit = self._run(run, cycle, sampler.steps, CycleOptions(evaluate=True))
        for factor in (ROWS, COLUMNS):
            ended += run.state.each(partial(energies, program=program, factor=factor), factor)
        change = energy(program, ended, self.fit) - energy(program, begun, fit)
        probability = math.exp(min(0.0, -change)) if math.isfinite(change) else 0.0
        if not threshold < probability:
            self.fit = fit
            run.state.each(go_back)
        run.state.each(partial(drop_arrays, names=START))
        self.acceptance[cycle] = probability
        if tuning:
            self.averaging = self.averaging.after(probability, self.sampler.target_accept)

    def _record(self, run: TrackRun, cycle: int, wanted: CycleOptions) -> None:
        """Record the state that was decided on, as other samplers do inside operations."""
        setting, observed = self.setting, self.setting.data.n_observed
        plan = plan_visits(observed, Action.UPDATE, cycle, wanted)[-1:]  # every band once
        if wanted.record and run.state.cells:
            plan += plan_visits(observed, Action.EVALUATE, cycle, wanted)
        program = Recorder(self.program(run.track))
        run.state = setting.executor.run(plan, program, run.state, setting.data)
        run.state.evaluations.clear()
        if wanted.evaluate:
            self._note(run, cycle, cast("Fit", self.fit), self.learnt(run))


def average_spread(
    band: FactorBand,
    share: Share,
    factor: int,
    cycle: int,
    hyper: Hyperparameters,
    weight: float,
    frozen: tuple[Mask, Mask],
) -> None:
    """Average S² = (θ + 1/c) / c over states, c = D / φ + λ with a denominator D."""
    del cycle
    c = share[1] / hyper.dispersion + band_prior(band, hyper, factor)[0]
    spread, own = band.arrays["spread"], (band.values + 1.0 / c) / c
    spread[:] = np.sqrt((1.0 - weight) * spread**2 + weight * own)
    if frozen[factor] is not None:
        spread[:, frozen[factor]] = 0


def set_off(band: FactorBand, program: Program, cycle: int, factor: int) -> tuple[float, float]:
    """Draw the momenta of a band, and take the first half kick and drift; return `energies`.

    Where they begin is kept.
    """
    for name, own in zip(START, (band.values, band.arrays["gradient"]), strict=True):
        band.arrays[name] = own.copy()
    fill_normals(band.arrays["momentum"], *program.address(band, cycle, factor))
    found, sampler = energies(band, program, factor), program.algorithm
    with np.errstate(all="ignore"):  # a proposal may run away: it is then rejected
        sampler.kick(program, band, factor, 0.5)
        sampler.drift(program, band)
    return found


def energies(band: FactorBand, program: Program, factor: int) -> tuple[float, float]:
    """Return minus the log prior density of a band, and the energy of its momenta."""
    u = band.arrays["momentum"]
    with np.errstate(all="ignore"):
        prior = -program.algorithm.log_prior(program, band, factor)
        return prior, 0.5 * float(np.sum(np.square(u, dtype=np.float64)))


def energy(program: Program, found: list[tuple[float, float]], fit: Fit) -> float:
    """Return -log p(V | W, H)^t p(W, H) but for a constant, and the momenta's energy."""
    parts = [-fit.negative_divergence / program.hyper.dispersion, *chain.from_iterable(found)]
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan


def go_back(band: FactorBand) -> None:
    """Go back to where a path began."""
    band.values[:], band.arrays["gradient"][:] = (band.arrays[name] for name in START)


@dataclass(frozen=True)
class Recorder:
    """Records the state that was decided on, and what it predicts for monitored cells."""

    program: Program

    def update(self, op: Op, data: BlockedData, bands: Bands, workspace: Workspace) -> None:
        """Record two bands."""
        del data, workspace
        self.program.finish_cycle(op, bands)

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        bands: Bands,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        """Move the moments of a block's monitored cells."""
        del data, workspace
        if cells is not None:
            rows, cols = bands
            watch(cells, rows.values, cols.values)
        return Evaluation(op.cycle, op.block, np.zeros(2))

    def touches(self, op: Op) -> tuple[str, ...]:
        """Name the arrays that priors and moments need."""
        return (RATE, SHIFT, *MOMENTS) if op.action == Action.UPDATE else ()

    def changes(self, op: Op) -> tuple[str, ...]:
        """Name the moments."""
        return MOMENTS if op.action == Action.UPDATE else ()


def watch(cells: BlockCells, W: Array, H: Array) -> None:
    """Add the means at the monitored cells of a block to their moments."""
    cells.count += 1
    mu = np.empty_like(cells.mean)
    for start in range(0, mu.size, SLAB):
        span = slice(start, start + SLAB)
        mu[span] = np.einsum("ck,ck->c", W[cells.at[0][span]], H[cells.at[1][span]])
    accumulate_moments(mu[:, None], cells.count, cells.mean[:, None], cells.m2[:, None])


@dataclass(frozen=True)
class HMC(Sampler):
    """Hamiltonian Monte Carlo on W and H: exact, at the price of several passes a draw.

    Each cycle draws momenta p ~ Normal(0, m), goes ``steps`` leapfrog steps

        p ← p + ½ε G,   θ ← θ + ε p / m,   p ← p + ½ε G

    and accepts where they lead with probability min(1, e^-ΔE); otherwise the draw is
    repeated. θ < 0 is the mirror image of -θ: an entry that passes zero comes back with
    its momentum turned. The mass m of an entry is one over its variance as it is known while
    tuning, 1 / m = mean of (θ + 1/c) / c with c the denominator of the multiplicative update.

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
        100, down to 20 where a pass is dear (beyond 10⁹ entries times components), and up to
        2000 where it is cheap, while the log density still rises.

    Raises
    ------
    OptionError
        If an option is not one of these.

    Notes
    -----
    Neal 2011, "MCMC using Hamiltonian dynamics", section 5.3.2 and, for the reflection,
    5.5.1.5; Hoffman and Gelman 2014, "The No-U-Turn Sampler", section 3.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.HMC(steps=5), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    chain: ClassVar[type[Chain]] = HMCChain
    step: float | Literal["auto"] = "auto"
    steps: int = 10
    target_accept: float = 0.8
    warm_start: int | Literal["auto"] = "auto"
    schedule: Schedule = field(default=Passes(10), init=False, repr=False)

    statistics: ClassVar[tuple[Variable, ...]] = (
        statistic("acceptance_rate", "acceptance probability of the proposal"),
    )
    biased: ClassVar[bool] = False
    tempers: ClassVar[bool] = False  # one test for all entries: chains hardly move where t is low
    by_rows: ClassVar[bool] = False
    rescales_every: ClassVar[int | None] = HYPER_EVERY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_leapfrog(self)
        object.__setattr__(self, "schedule", Passes(self.steps))

    def check_model(self, model: Any) -> None:
        """Refuse shapes that are learnt: densities of those below 1 have a pole at zero."""
        super().check_model(model)
        if any(own.name.startswith("shape") for own in model.learnt) and not self.by_rows:
            raise ModelError(
                'HMC() takes shapes of priors that are numbers, got "auto"; use BlockHMC(), which '
                "goes along powers of the factors where a shape is below 1, or Gibbs() or PSGLD()"
            )

    def work(self, blocks: int) -> Work:
        """Count one visit for each step, and one for the energy where they lead."""
        del blocks
        return Work(1, self.steps + 1, self.steps + 1 / 3)

    @property
    def arrays(self) -> tuple[str, ...]:
        return (*MOMENTS, "gradient", "momentum", "spread")

    def sizes(self, width: int) -> dict[str, float]:
        """Count values and gradients to go back to, too."""
        return super().sizes(width) | {"values to go back to": 1.0, "gradients to go back to": 1.0}

    def for_compilation(self) -> Self:
        return replace(super().for_compilation(), steps=1, step="auto", target_accept=0.8)

    def block_step(
        self, program: Program, op: Op, data: BlockedData, bands: Bands, workspace: Workspace
    ) -> None:
        """Add the block's share of the gradients; kick, and drift on, at a pass's end.

        Gradients are those of the log-likelihood at dispersion 1. The first half kick and the
        first drift come before the plan; every pass but the last ends with a kick and a
        drift, the last one with the second half kick. In a cycle that adapts the gradients
        are added up and nothing moves.
        """
        view, (rows, cols) = data.view(*op.block), bands
        law = law_of(program.likelihood, op.block, cols)
        block = (view, law, (rows.values, cols.values), op.scale, program.floor)
        shares = blockwise.gradient(*block, workspace)
        last_block = op.iteration % data.grid.blocks == data.grid.blocks - 1
        for factor, band in enumerate(bands):
            band.arrays["gradient"] += shares[factor]
            if last_block and not op.wanted.adapt:
                self.kick(program, band, factor, 0.5 if op.last else 1.0)
                if not op.last:
                    self.drift(program, band)

    def reads(self) -> tuple[str, ...]:
        return ("spread",)

    def writes(self, op: Op) -> tuple[str, ...]:
        del op
        return ("gradient", "momentum")

    def kick(self, program: Program, band: FactorBand, factor: int, share: float) -> None:
        """Kick the momentum of a band, for a share of a step."""
        arrays, size, phi = band.arrays, program.step(0), program.hyper.dispersion
        gradient, (rate, shape) = program.prior_of(band, factor, arrays["gradient"], phi)
        moved = (band.values, arrays["momentum"], gradient, arrays["spread"])
        leapfrog_kick(*moved, share * size, 1.0 / phi, rate, shape)

    def drift(self, program: Program, band: FactorBand) -> None:
        """Let a band drift; its gradient is to be summed anew where it leads."""
        momentum, spread = band.arrays["momentum"], band.arrays["spread"]
        leapfrog_drift(band.values, momentum, spread, program.step(0))
        band.arrays["gradient"][:] = 0
