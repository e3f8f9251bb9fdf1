"""Gibbs sampling of Poisson factorizations: exact, no step to choose."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from daskfactor.checks import whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.schedules import Passes, Schedule
from daskfactor.errors import DataError, ModelError
from daskfactor.executors.state import ChainState
from daskfactor.inference.base import Sampler, Setup, Track
from daskfactor.inference.gibbs_program import PASSES, GibbsProgram
from daskfactor.inference.program import prepare_state
from daskfactor.inference.psgld import warm_passes
from daskfactor.inference.steps import ConstantStep, StepSize

LARGEST_COUNT = 2**31
"""Counts up to which binomials are drawn without loss."""

WORK = 20.0
"""Passes of multiplications that sharing out the counts is about as dear as: 10 if most are
small, 60 if all are large."""


@dataclass(frozen=True)
class Gibbs(Sampler):
    r"""Gibbs sampling for Poisson counts: draws from the exact posterior, no step to choose.

    .. math:: s_{ij\cdot} \sim \mathrm{Mult}(v_{ij}; w_{ik} h_{kj}), \quad
        w_{ik} \sim \mathrm{Gamma}(a_w + s_{i+k}, \lambda_w + \textstyle\sum_j h_{kj}), \quad
        h_{kj} \sim \mathrm{Gamma}(a_h + s_{+jk}, \lambda_h + \textstyle\sum_i w_{ik})

    with sums over observed entries. Each draw is a sweep, two passes over the data, at
    a price in proportion to the stored entries that are not zero, times K. The model
    must have ``beta=1``; ``dispersion="auto"`` is then exactly 1, because that is what
    Poisson counts have. ``step_size`` in the results is always 1.

    Parameters
    ----------
    warm_start
        Passes of multiplicative updates before the chain starts; ``"auto"`` takes
        100, and down to 20 where a pass is dear (beyond 10⁹ entries times components).

    Raises
    ------
    ModelError
        When used with another ``beta``, or a ``dispersion`` other than 1.
    DataError
        When used on data that are not whole numbers up to 2³¹.

    Notes
    -----
    Cemgil 2009, "Bayesian inference for nonnegative matrix factorisation models",
    section 3. The allocation ties W and H to each other from sweep to sweep, so the scale
    that they share in a component moves slowly where counts are large.
    """

    warm_start: int | Literal["auto"] = "auto"

    dispersion: ClassVar[float | None] = 1.0
    schedule: ClassVar[Schedule] = Passes(PASSES)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.warm_start != "auto":
            whole_number("warm_start", self.warm_start, 0)

    def check_model(self, model: Any) -> None:
        """Refuse any law but Poisson's."""
        if model.beta != 1.0:
            raise ModelError(
                f"Gibbs() samples Poisson counts, beta=1, and the model has beta={model.beta:g}; "
                "use PSGLD() for any other power"
            )
        if model.dispersion not in ("auto", 1.0):
            raise ModelError(
                "Gibbs() samples Poisson counts, whose dispersion is 1, and the model has "
                f'dispersion={model.dispersion:g}; leave it at "auto", or use PSGLD() for '
                "counts that vary more"
            )

    def check_data(self, data: BlockedData) -> None:
        """Refuse what are no counts."""
        if not data.is_integer:
            raise DataError(
                "Gibbs() takes whole numbers, got data with fractions; round or rescale them to "
                "counts, or use PSGLD(), which takes any non-negative numbers"
            )
        if data.maximum > LARGEST_COUNT:
            raise DataError(
                f"Gibbs() takes counts up to 2**31, got one of {data.maximum:.6g}; use PSGLD(), "
                "or count in larger units"
            )

    def warm_passes(self, entries: int, n_components: int) -> int:
        """Passes of the warm start for data with this many stored entries."""
        return warm_passes(self.warm_start, entries, n_components)

    def step_for(self, track: Track, blocks: int, n_components: int) -> StepSize:
        """A sweep has no step; 1 stands in the results."""
        del track, blocks, n_components
        return ConstantStep(1.0)

    def moves(self, blocks: int) -> int:
        """A sweep is one step."""
        del blocks
        return 1

    def visits(self, blocks: int) -> int:
        """How often a cycle's operations come to every block."""
        del blocks
        return PASSES

    def work(self, blocks: int) -> float:
        """Work of a cycle's updates, in passes over all the data: random numbers are dear."""
        del blocks
        return WORK

    @property
    def carried(self) -> tuple[float, float]:
        """Arrays of the factors' shape: values, two moments, two sums in double precision."""
        return 7, 7

    def prepare(self, state: ChainState) -> None:
        prepare_state(state, majorizer=False)

    def program(self, setup: Setup) -> GibbsProgram:
        if setup.hyper.dispersion != 1.0:
            raise ModelError(
                "Gibbs() samples the posterior of Poisson counts, of dispersion 1 at temperature "
                f"1, and was asked for a dispersion over temperature of {setup.hyper.dispersion:g};"
                " use PSGLD() for tempered posteriors"
            )
        return GibbsProgram(
            hyper=setup.hyper,
            floor=setup.floor,
            key=setup.key,
            frozen=(setup.frozen_w, setup.frozen_h),
        )

    def brief(self) -> Self:
        return replace(self, warm_start=2)

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.name, "warm_start": self.warm_start}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(warm_start=values["warm_start"])
