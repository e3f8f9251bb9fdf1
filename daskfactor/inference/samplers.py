"""Samplers: what an iteration does to a block, and what a run needs to know of it."""

from typing import Any

from daskfactor.errors import StoreFormatError
from daskfactor.inference.base import Sampler, Setup, Track
from daskfactor.inference.gibbs import Gibbs
from daskfactor.inference.hmc import HMC
from daskfactor.inference.langevin import LangevinDynamics
from daskfactor.inference.psgld import PSGLD
from daskfactor.inference.psgrrld import PSGRRLD
from daskfactor.inference.sghmc import SGHMC
from daskfactor.inference.sgld import SGLD
from daskfactor.inference.steps import ConstantStep, PolynomialStep, StepSize

__all__ = [
    "HMC",
    "KINDS",
    "PSGLD",
    "PSGRRLD",
    "SGHMC",
    "SGLD",
    "ConstantStep",
    "Gibbs",
    "LangevinDynamics",
    "PolynomialStep",
    "Sampler",
    "Setup",
    "StepSize",
    "Track",
    "sampler_from_dict",
]

KINDS: dict[str, type[Sampler]] = {
    kind.__name__: kind for kind in (PSGLD, PSGRRLD, SGHMC, Gibbs, LangevinDynamics, SGLD, HMC)
}
"""All samplers by name."""


def sampler_from_dict(values: dict[str, Any]) -> Sampler:
    """The sampler that ``to_dict`` described."""
    kind = KINDS.get(values.get("type", ""))
    if kind is None:
        raise StoreFormatError(
            f"the run was made by a sampler called {values.get('type')!r}, which this version does "
            f"not have; it knows {', '.join(KINDS)}"
        )
    return kind.from_dict(values)
