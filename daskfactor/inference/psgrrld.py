"""Parallel stochastic-gradient Richardson–Romberg Langevin dynamics (P-SGRRLD)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from daskfactor.errors import OptionError
from daskfactor.inference.base import StepSize, Track
from daskfactor.inference.psgld import PSGLD


@dataclass(frozen=True)
class ScaledStep:
    """A fine chain's step: half of the coarse chain's step at the same time."""

    base: StepSize

    def __call__(self, iteration: int) -> float:
        return 0.5 * self.base(iteration // 2)

    def to_dict(self) -> dict[str, Any]:
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
