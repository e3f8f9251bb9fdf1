"""Samplers: what an iteration does to a block, and what a run needs to know of it."""

from typing import Any

from daskfactor.errors import StoreFormatError
from daskfactor.samplers.psgld import PSGLD, Track, arguments_from_dict
from daskfactor.samplers.psgrrld import PSGRRLD
from daskfactor.samplers.sghmc import SGHMC
from daskfactor.samplers.steps import ConstantStep, PolynomialStep, StepSize

__all__ = [
    "PSGLD",
    "PSGRRLD",
    "SGHMC",
    "ConstantStep",
    "PolynomialStep",
    "Sampler",
    "StepSize",
    "Track",
    "sampler_from_dict",
]

Sampler = PSGLD | SGHMC
_KINDS: dict[str, type[PSGLD]] = {"PSGLD": PSGLD, "PSGRRLD": PSGRRLD}


def sampler_from_dict(values: dict[str, Any]) -> Sampler:
    """The sampler that ``to_dict`` described."""
    if values.get("type") == "SGHMC":
        return SGHMC.from_dict(values)
    kind = _KINDS.get(values.get("type", ""))
    if kind is None:
        raise StoreFormatError(
            f"the run was made by a sampler called {values.get('type')!r}, which this version does "
            f"not have; it knows {', '.join([*_KINDS, 'SGHMC'])}"
        )
    return kind(**arguments_from_dict(values))
