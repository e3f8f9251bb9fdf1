"""Chains of Hamiltonian Monte Carlo: proposals run on the engine, decided between its runs."""

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.bands import Block
from daskfactor.data.schedules import Passes
from daskfactor.executors.plan import Action, CycleOptions, Op, build_plan
from daskfactor.executors.state import BlockCells, ChainState
from daskfactor.inference.averaging import DualAveraging
from daskfactor.inference.chain import ChainRun, OnShare, Setting, TrackRun
from daskfactor.inference.hmc import HamiltonianProgram
from daskfactor.inference.multiplicative import OnIteration
from daskfactor.inference.passes import Fit, shares
from daskfactor.inference.program import COLUMNS, ROWS, finish_cycle
from daskfactor.inference.samplers import HMC, Track
from daskfactor.inference.steps import ConstantStep, StepSize
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.kernels.langevin import accumulate_moments
from daskfactor.kernels.philox import fill_normals
from daskfactor.models.priors import clipped_gamma_log_density
from daskfactor.random import Stream, generator, noise_key

Array = NDArray[Any]

JITTER = 0.2
"""A cycle's step is ε times a uniform factor within 1 ± this."""
SLAB = 2**16
"""Monitored cells that are predicted together."""


class Place(NamedTuple):
    """Where a cycle starts: what a rejection goes back to."""

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

    def warm_start(
        self, on_iteration: OnIteration | None = None, like: ChainRun | None = None
    ) -> None:
        super().warm_start(on_iteration, like)
        self._set_masses(self.tracks[0].state)

    def _set_masses(self, state: ChainState) -> None:
        """S = 1/√m with 1/m = (θ + 1/c) / c: the width of Gamma(cθ + 1, c); 0 where frozen.

        c is the denominator of the multiplicative update at the start.
        """
        setting, hyper = self.setting, self.tempered
        for side, factor, bands in (("rows", ROWS, state.rows), ("columns", COLUMNS, state.cols)):
            found = shares(
                setting.executor, setting.data, state, side, self.model.beta, self._floor
            )
            frozen = self._frozen(factor)
            for band, share in zip(bands, found, strict=True):
                c = share.denominator / hyper.dispersion + hyper.prior(factor)[0]
                band.arrays["spread"][:] = np.sqrt((band.values + 1.0 / c) / c)
                if frozen is not None:
                    band.arrays["spread"][:, frozen] = 0

    def _frozen(self, factor: int) -> NDArray[np.bool_] | None:
        return self.model.frozen[factor]

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
        """The step of the present cycle."""
        del track
        return ConstantStep(self.size)

    def step_size(self, run: TrackRun, cycle: int) -> float:
        """ε at a cycle of the running segment."""
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
        """Gradient and fit where the chain starts."""
        program = self._program(run.track)
        assert isinstance(program, HamiltonianProgram)
        self.fit = self._run(
            run,
            run.cycle,
            HamiltonianProgram(program.beta, program.hyper, program.floor, program.size, passes=0),
        )

    def _run(self, run: TrackRun, cycle: int, program: HamiltonianProgram) -> Fit:
        """A program's passes from the present values; the fit where they lead."""
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
        """-log p(V | W, H)^t p(W, H) but for a constant, and that of the momenta."""
        hyper = self.tempered
        parts = [-fit.negative_divergence / hyper.dispersion]
        for factor, bands in ((ROWS, state.rows), (COLUMNS, state.cols)):
            frozen = self._frozen(factor)
            for band in bands:
                free = band.values if frozen is None else band.values[:, ~frozen]
                parts.append(-clipped_gamma_log_density(free, *hyper.prior(factor)))
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
        """What other samplers record inside operations, of the state that was decided on."""
        op = Op(Action.UPDATE, Block(0, 0), cycle, -1, 1.0, True, wanted)
        for factor, bands in ((ROWS, run.state.rows), (COLUMNS, run.state.cols)):
            for band in bands:
                finish_cycle(op, band, *self.hyper.prior(factor), self._frozen(factor))
        if wanted.record:
            for block, cells in run.state.cells.items():
                row, col = run.state.rows[block.row], run.state.cols[block.col]
                watch(cells, row.values, col.values)
        if wanted.evaluate:
            assert self.fit is not None
            run.fits[cycle] = self.fit
            run.densities[cycle] = self._lp(self.fit) + self._log_prior(run.state, cycle)


def watch(cells: BlockCells, W: Array, H: Array) -> None:
    """Add the means at the monitored cells of a block to their moments."""
    cells.count += 1
    mu = np.empty_like(cells.mean)
    for start in range(0, mu.size, SLAB):
        span = slice(start, start + SLAB)
        mu[span] = np.einsum("ck,ck->c", W[cells.rows[span]], H[cells.cols[span]])
    accumulate_moments(mu[:, None], cells.count, cells.mean[:, None], cells.m2[:, None])
