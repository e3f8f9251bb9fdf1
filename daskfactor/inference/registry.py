"""The public algorithms of every kind, by name, and where each is defined."""

from importlib import import_module
from typing import Any

import daskfactor
from daskfactor.errors import OptionError, StoreFormatError

ALGORITHMS: dict[str, dict[str, str]] = {
    "Sampler": {
        "BlockHMC": "inference.block_hmc",
        "Gibbs": "inference.gibbs",
        "LangevinDynamics": "inference.langevin",
        "PSGLD": "inference.langevin",
        "PSGRRLD": "inference.langevin",
        "SGHMC": "inference.sghmc",
        "SGLD": "inference.langevin",
    },
    "Optimizer": {
        "CoordinateDescent": "inference.coordinate_descent",
        "DSGD": "inference.dsgd",
        "MultiplicativeUpdates": "inference.multiplicative",
    },
    "EvidenceMethod": {
        "Chib": "evidence.chib",
        "Enumeration": "allocation.exact",
        "SequentialMonteCarlo": "allocation.smc",
        "ThermodynamicIntegration": "evidence.thermodynamic",
        "VariationalBayes": "allocation.variational",
    },
    "ParticleMethod": {
        "Ensemble": "stein.ensemble",
        "SVGD": "stein.descent",
        "SimplexHMC": "stein.simplex_hmc",
        "SteinDescent": "stein.descent",
    },
}
"""Modules of the classes, by the name of their base class and their own, in alphabetical order."""


def algorithms(base: type) -> dict[str, Any]:
    """Return the public algorithms that derive from a base class, by name."""
    return {name: _load(base, name) for name in ALGORITHMS[base.__name__]}


def algorithm_from_dict(base: type, values: dict[str, Any], made_by: str) -> Any:
    """Make the algorithm that ``to_dict`` described; ``made_by`` is "the run was made by a …"."""
    name, names = values.get("type"), ALGORITHMS[base.__name__]
    if name not in names:
        advice = daskfactor.REMOVED.get(str(name)) or f"it knows {', '.join(names)}"
        raise StoreFormatError(
            f"{made_by} called {name!r}, which this version does not have; {advice}"
        )
    return _load(base, name).from_dict(values)


def requested_algorithm(base: type, value: object, usual: str, argument: str) -> Any:
    """Return the value of an argument if it is such an algorithm; for None the ``usual`` one."""
    if value is None:
        return _load(base, usual)()
    if not isinstance(value, base):
        raise OptionError(f"{argument} must be one of {calls(base)}, got {value!r}")
    return value


def calls(base: type) -> str:
    """Name the algorithms that derive from a base class as calls, as error messages do."""
    return ", ".join(f"{name}()" for name in ALGORITHMS[base.__name__])


def _load(base: type, name: str) -> Any:
    return getattr(import_module(f"daskfactor.{ALGORITHMS[base.__name__][name]}"), name)
