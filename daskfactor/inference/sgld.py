"""Stochastic-gradient Langevin dynamics (SGLD): entries drawn with replacement."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import is_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes, Schedule
from daskfactor.errors import OptionError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import ConstantStep, Setup, Step, StepSize, Work, automatic_step
from daskfactor.inference.langevin import PassProgram, PassSampler
from daskfactor.inference.psgld import Preconditioner
from daskfactor.kernels.subsample import add_subsample, block_address
from daskfactor.kernels.views import Workspace

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
            data.view(op.block.row, op.block.col),
            self.likelihood,
            (rows.values, cols.values),
            (count, block_address(np.array(self.key, dtype=np.uint32), number, block)),
            self.factor / self.hyper.dispersion,
            self.floor,
            (rows.arrays["gradient"], cols.arrays["gradient"]),
            curvature,
        )


@dataclass(frozen=True)
class SGLD(PassSampler):
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

    def program(self, setup: Setup) -> SubsampleProgram:
        assert setup.observed is not None  # every chain of a TweedieNMF gives it
        total = int(setup.observed.sum())
        return SubsampleProgram(
            **self._fields(setup),
            observed=np.ascontiguousarray(setup.observed, np.int64).tobytes(),
            entries=max(1, round(total * self.share(setup.blocks))),
            passes=self.work(setup.blocks).moves,
        )
