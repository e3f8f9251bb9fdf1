"""Bayesian non-negative matrix factorization for data that does not fit in memory.

The public names are loaded when they are first used, so that ``import
daskfactor`` is immediate.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskfactor.allocation.simulation import simulate
    from daskfactor.engine import LanesExecutor, SerialExecutor, TasksExecutor
    from daskfactor.engine.progress import RunEvent
    from daskfactor.evidence import (
        Chib,
        Enumeration,
        Evidence,
        SequentialMonteCarlo,
        ThermodynamicIntegration,
        VariationalBayes,
        log_evidence,
        select_rank,
    )
    from daskfactor.grid.schedules import Cyclic, NestedReshuffled, Proportional, Reshuffled
    from daskfactor.io.convert import convert
    from daskfactor.io.export import export
    from daskfactor.io.holdout import hold_out
    from daskfactor.io.sources import as_blocks
    from daskfactor.models.additive import GaussianAdditive
    from daskfactor.models.allocation import AllocationModel
    from daskfactor.models.gaussian import GaussianMF
    from daskfactor.models.silf import SILFNMF
    from daskfactor.models.tweedie import TweedieNMF
    from daskfactor.optimizers import DSGD, MultiplicativeUpdates
    from daskfactor.particles import (
        IMQ,
        SVGD,
        Ensemble,
        SimplexHMC,
        SteinDescent,
        stein_discrepancy,
        stein_posterior,
    )
    from daskfactor.results.alignment import align
    from daskfactor.results.diversity import component_variability, pairwise_distances
    from daskfactor.results.prediction import monitored, predict
    from daskfactor.results.reading import downstream, top_entries
    from daskfactor.results.summary import summarize
    from daskfactor.results.trace import expectation, open_run
    from daskfactor.resuming import resume
    from daskfactor.runs.cost import Cost, estimate_cost
    from daskfactor.samplers import (
        HMC,
        PSGLD,
        PSGRRLD,
        SGHMC,
        SGLD,
        ConstantStep,
        Gibbs,
        LangevinDynamics,
        PolynomialStep,
    )
    from daskfactor.sampling import optimize, sample

__version__ = "0.1.0"

__all__ = [
    "DSGD",
    "HMC",
    "IMQ",
    "PSGLD",
    "PSGRRLD",
    "SGHMC",
    "SGLD",
    "SILFNMF",
    "SVGD",
    "AllocationModel",
    "Chib",
    "ConstantStep",
    "Cost",
    "Cyclic",
    "Ensemble",
    "Enumeration",
    "Evidence",
    "GaussianAdditive",
    "GaussianMF",
    "Gibbs",
    "LanesExecutor",
    "LangevinDynamics",
    "MultiplicativeUpdates",
    "NestedReshuffled",
    "PolynomialStep",
    "Proportional",
    "Reshuffled",
    "RunEvent",
    "SequentialMonteCarlo",
    "SerialExecutor",
    "SimplexHMC",
    "SteinDescent",
    "TasksExecutor",
    "ThermodynamicIntegration",
    "TweedieNMF",
    "VariationalBayes",
    "align",
    "as_blocks",
    "component_variability",
    "convert",
    "downstream",
    "estimate_cost",
    "expectation",
    "export",
    "hold_out",
    "log_evidence",
    "monitored",
    "open_run",
    "optimize",
    "pairwise_distances",
    "predict",
    "resume",
    "sample",
    "select_rank",
    "simulate",
    "stein_discrepancy",
    "stein_posterior",
    "summarize",
    "top_entries",
]

_HOME = {
    "simulate": "daskfactor.allocation.simulation",
    "Chib": "daskfactor.evidence",
    "Enumeration": "daskfactor.evidence",
    "SequentialMonteCarlo": "daskfactor.evidence",
    "VariationalBayes": "daskfactor.evidence",
    "Evidence": "daskfactor.evidence",
    "ThermodynamicIntegration": "daskfactor.evidence",
    "log_evidence": "daskfactor.evidence",
    "select_rank": "daskfactor.evidence",
    "AllocationModel": "daskfactor.models.allocation",
    "GaussianAdditive": "daskfactor.models.additive",
    "Cost": "daskfactor.runs.cost",
    "estimate_cost": "daskfactor.runs.cost",
    "DSGD": "daskfactor.optimizers",
    "hold_out": "daskfactor.io.holdout",
    "SGHMC": "daskfactor.samplers",
    "GaussianMF": "daskfactor.models.gaussian",
    "IMQ": "daskfactor.particles",
    "SILFNMF": "daskfactor.models.silf",
    "Ensemble": "daskfactor.particles",
    "SVGD": "daskfactor.particles",
    "SimplexHMC": "daskfactor.particles",
    "SteinDescent": "daskfactor.particles",
    "stein_discrepancy": "daskfactor.particles",
    "stein_posterior": "daskfactor.particles",
    "LanesExecutor": "daskfactor.engine",
    "SerialExecutor": "daskfactor.engine",
    "TasksExecutor": "daskfactor.engine",
    "RunEvent": "daskfactor.engine.progress",
    "Cyclic": "daskfactor.grid.schedules",
    "NestedReshuffled": "daskfactor.grid.schedules",
    "Proportional": "daskfactor.grid.schedules",
    "Reshuffled": "daskfactor.grid.schedules",
    "as_blocks": "daskfactor.io.sources",
    "convert": "daskfactor.io.convert",
    "export": "daskfactor.io.export",
    "TweedieNMF": "daskfactor.models.tweedie",
    "MultiplicativeUpdates": "daskfactor.optimizers",
    "align": "daskfactor.results.alignment",
    "component_variability": "daskfactor.results.diversity",
    "pairwise_distances": "daskfactor.results.diversity",
    "downstream": "daskfactor.results.reading",
    "top_entries": "daskfactor.results.reading",
    "monitored": "daskfactor.results.prediction",
    "predict": "daskfactor.results.prediction",
    "summarize": "daskfactor.results.summary",
    "expectation": "daskfactor.results.trace",
    "open_run": "daskfactor.results.trace",
    "HMC": "daskfactor.samplers",
    "LangevinDynamics": "daskfactor.samplers",
    "SGLD": "daskfactor.samplers",
    "PSGLD": "daskfactor.samplers",
    "PSGRRLD": "daskfactor.samplers",
    "Gibbs": "daskfactor.samplers",
    "ConstantStep": "daskfactor.samplers",
    "PolynomialStep": "daskfactor.samplers",
    "optimize": "daskfactor.sampling",
    "resume": "daskfactor.resuming",
    "sample": "daskfactor.sampling",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'daskfactor' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
