"""The block update that P-SGLD and P-SGRRLD share.

For a block of part Π, both gradients from the same old state, with
R = M ⊙ (V - μ) ⊙ μ^(β-2) / φ:

    G_W = s R Hᵀ - λ_w + (a_w - 1) / W        G_H = s Wᵀ R - λ_h + (a_h - 1) / H

(Şimşekli et al. 2017, equation 13; Şimşekli et al. 2015, equations 8 and 9),
followed by the plain step or by the step in the majoriser's metric. At the end of a
cycle every sampler of a `TweedieNMF` calls `finish_cycle`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.plan import Action, Op
from daskfactor.executors.state import BlockCells, ChainState, Evaluation, FactorBand
from daskfactor.inference.base import MOMENTS, TUNING, StepSize
from daskfactor.kernels import blockwise
from daskfactor.kernels.langevin import accumulate_moments, langevin_step
from daskfactor.kernels.philox import Address
from daskfactor.kernels.views import AnyBlock, Workspace
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.settings import Mask, held
from daskfactor.models.tweedie import Hyperparameters, clipped_gamma_log_density

Array = NDArray[Any]
ROWS, COLUMNS = 0, 1
"""The two factors in the address of the noise: W and H."""


@dataclass(frozen=True)
class FactorProgram(ABC):
    """The part that all programs of two factors share: evaluation, and what they touch.

    Immutable, so that any executor may share it. A subclass adds `update`, and names the
    arrays that it reads and writes.

    Attributes
    ----------
    likelihood
        The law of an entry given its mean μ.
    floor
        Smallest μ that gradients and the fit are taken at.
    """

    likelihood: Likelihood
    floor: float

    @abstractmethod
    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        """Move the two bands of a block, in place."""

    def evaluate(
        self,
        op: Op,
        data: BlockedData,
        rows: FactorBand,
        cols: FactorBand,
        cells: BlockCells | None,
        workspace: Workspace,
    ) -> Evaluation:
        """Add up the fit over a block, and move the moments of its monitored cells."""
        view = data.view(op.block.row, op.block.col)
        watched = None
        if cells is not None and op.wanted.record:
            cells.count += 1
            watched = (cells.rows, cells.cols, cells.mean, cells.m2, cells.count)
        sums = np.zeros(2)
        factors = rows.values, cols.values
        blockwise.evaluate(view, self.likelihood, *factors, self.floor, sums, watched, workspace)
        return Evaluation(op.cycle, op.block, sums)

    def touches(self, op: Op) -> tuple[str, ...]:
        """Name the arrays of a band that an operation reads or writes."""
        if op.action != Action.UPDATE:
            return ()
        return (*self._reads(op), *self.changes(op))

    def changes(self, op: Op) -> tuple[str, ...]:
        """Name the arrays of a band that an operation writes."""
        if op.action != Action.UPDATE:
            return ()
        return (*self._writes(op), *(MOMENTS if op.last and op.wanted.record else ()))

    def _reads(self, op: Op) -> tuple[str, ...]:
        """Name what an update reads and never writes."""
        del op
        return ()

    def _writes(self, op: Op) -> tuple[str, ...]:
        """Name what an update writes besides moments."""
        del op
        return ()


@dataclass(frozen=True)
class LangevinProgram(FactorProgram):
    """Block operations of Langevin steps on conflict-free parts.

    Attributes
    ----------
    hyper
        Dispersion φ, rates and shapes of the priors.
    key
        Two 32-bit words that key the chain's noise.
    step, shrink
        ε per iteration, and the factor it was reduced by after divergences.
    majorizer
        Whether to step in the majoriser's metric or plainly.
    coarse
        Whether this is the coarse chain of a Richardson–Romberg pair, whose
        normals are (z_{2t} + z_{2t+1}) / √2 of the fine chain's.
    frozen
        Of W and of H, which components never move.
    """

    hyper: Hyperparameters
    key: tuple[int, int]
    step: StepSize
    shrink: float = 1.0
    majorizer: bool = True
    coarse: bool = False
    frozen: tuple[Mask, Mask] = (None, None)

    def step_size(self, iteration: int) -> float:
        """Return ε at an iteration, reductions included."""
        return self.step(iteration) * self.shrink

    def update(
        self, op: Op, data: BlockedData, rows: FactorBand, cols: FactorBand, workspace: Workspace
    ) -> None:
        view = data.view(op.block.row, op.block.col)
        gradients = self._gradients(op, view, rows, cols, workspace, data.grid.blocks)
        row_gradient, col_gradient = gradients
        self._move(rows, row_gradient, self.hyper.rate_w, op.iteration, ROWS)
        self._move(cols, col_gradient, self.hyper.rate_h, op.iteration, COLUMNS)
        if op.last:
            self._finish(op, rows, ROWS)
            self._finish(op, cols, COLUMNS)

    def _gradients(
        self,
        op: Op,
        view: AnyBlock,
        rows: FactorBand,
        cols: FactorBand,
        workspace: Workspace,
        blocks: int,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return gradients of the block's log-likelihood, scaled by s.

        Curvature is gathered with weight s / B: 1 where every part comes up once
        a cycle, N / (B |part|) where parts are drawn.
        """
        scale = op.scale / self.hyper.dispersion
        block = (view, self.likelihood, rows.values, cols.values, scale, self.floor)
        if not (op.wanted.adapt and self.majorizer):
            return blockwise.gradient(*block, workspace)
        CW, CH = np.zeros_like(rows.values), np.zeros_like(cols.values)
        gradients = blockwise.gradient(*block, workspace, (CW, CH))
        weight = rows.values.dtype.type(op.scale / blocks)
        rows.arrays["gathered"] += weight * CW
        cols.arrays["gathered"] += weight * CH
        return gradients

    def _move(
        self, band: FactorBand, gradient: NDArray[Any], rate: float, iteration: int, factor: int
    ) -> None:
        key = np.array(self.key, dtype=np.uint32)
        prior = (float(rate), float(self.hyper.prior(factor)[1]))
        address = Address(key, iteration, factor, band.offset)
        rest = (self.step_size(iteration), prior, address, self.coarse)
        if self.majorizer:  # the metric of frozen components is infinite
            langevin_step(band.values, gradient, band.arrays["metric"], *rest)
            return
        with held(band.values, self.frozen[factor]):
            langevin_step(band.values, gradient, None, *rest)

    def _finish(self, op: Op, band: FactorBand, factor: int) -> None:
        """Learn the metric from the cycle, and record where it ended."""
        rate = self.hyper.prior(factor)[0]
        if op.wanted.adapt and self.majorizer:
            band.counts["curvature"] += 1
            gathered, curvature = band.arrays["gathered"], band.arrays["curvature"]
            curvature += (gathered - curvature) / band.counts["curvature"]
            gathered[:] = 0
            set_metric(band, self.hyper.dispersion, rate, self.frozen[factor])
        finish_cycle(op, band, gamma_prior(self.hyper, factor, self.frozen))

    def _reads(self, op: Op) -> tuple[str, ...]:
        del op
        return ("metric",) if self.majorizer else ()

    def _writes(self, op: Op) -> tuple[str, ...]:
        if not (op.wanted.adapt and self.majorizer):
            return ()
        return ("gathered", *(("curvature", "metric") if op.last else ()))


def finish_cycle(op: Op, band: FactorBand, log_density: Callable[[Array], float]) -> None:
    """Record what a cycle left in a band: moments, a draw, its log prior density.

    Every program calls it for both bands of an operation that is the cycle's last
    (``op.last``), once they have moved. It does what ``op.wanted`` asks for;
    `prepare_state` makes the arrays.
    """
    if op.wanted.record:
        band.counts["moments"] += 1
        accumulate_moments(
            band.values, band.counts["moments"], band.arrays["mean"], band.arrays["m2"]
        )
    if op.wanted.keep:
        band.draws.append(band.values.copy())
    if op.wanted.evaluate:
        band.sums[op.cycle] = log_density(band.values)


def gamma_prior(
    hyper: Hyperparameters, factor: int, frozen: tuple[Mask, Mask] = (None, None)
) -> Callable[[Array], float]:
    """Make the log density of a factor's entries that move, as `finish_cycle` takes it."""
    mask = frozen[factor]

    def log_density(values: Array) -> float:
        free = values if mask is None else values[:, ~mask]
        return clipped_gamma_log_density(free, *hyper.prior(factor))

    return log_density


def set_metric(band: FactorBand, dispersion: float, rate: float, frozen: Mask = None) -> None:
    """Set C = curvature / φ + λ, the denominator of the multiplicative update.

    Infinite for frozen components, which leaves them where they are.
    """
    np.multiply(band.arrays["curvature"], 1.0 / dispersion, out=band.arrays["metric"])
    band.arrays["metric"] += rate
    if frozen is not None:
        band.arrays["metric"][:, frozen] = np.inf


def prepare_state(state: ChainState, names: Iterable[str] = MOMENTS) -> None:
    """Give every band arrays of zeros by these names, one number for each entry."""
    for band in state.bands():
        for name in names:
            band.arrays.setdefault(name, np.zeros_like(band.values))
        band.counts.setdefault("moments", 0)
        band.counts.setdefault("curvature", 0)


def refresh_metric(
    state: ChainState, hyper: Hyperparameters, frozen: tuple[Mask, Mask] = (None, None)
) -> None:
    """Recompute every band's metric, as is due when the dispersion has changed."""
    for band in state.rows:
        set_metric(band, hyper.dispersion, hyper.rate_w, frozen[ROWS])
    for band in state.cols:
        set_metric(band, hyper.dispersion, hyper.rate_h, frozen[COLUMNS])


def drop_adaptation(state: ChainState) -> None:
    """Free what only tuning needs; the metric stays."""
    for band in state.bands():
        for name in TUNING:
            band.arrays.pop(name, None)
