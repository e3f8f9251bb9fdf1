"""Bayesian non-negative matrix factorization for data that does not fit in memory.

The public names are loaded when they are first used, so that ``import
daskfactor`` is immediate.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskfactor.allocation.simulation import simulate
    from daskfactor.data.convert import convert
    from daskfactor.data.export import export
    from daskfactor.data.holdout import hold_out
    from daskfactor.data.schedules import Cyclic, NestedReshuffled, Proportional, Reshuffled
    from daskfactor.data.sources import as_blocks
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
    from daskfactor.executors import LanesExecutor, SerialExecutor, TasksExecutor
    from daskfactor.executors.progress import RunEvent
    from daskfactor.inference.cost import Cost, estimate_cost
    from daskfactor.inference.optimizers import DSGD, MultiplicativeUpdates
    from daskfactor.inference.samplers import (
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
    from daskfactor.inference.sampling import optimize, sample
    from daskfactor.models.additive import GaussianAdditive
    from daskfactor.models.allocation import AllocationModel
    from daskfactor.models.gaussian import GaussianMF
    from daskfactor.models.silf import SILFNMF
    from daskfactor.models.tweedie import TweedieNMF
    from daskfactor.results.alignment import align
    from daskfactor.results.diversity import component_variability, pairwise_distances
    from daskfactor.results.prediction import monitored, predict
    from daskfactor.results.summary import summarize
    from daskfactor.results.top_entries import downstream, top_entries
    from daskfactor.results.trace import expectation, open_run
    from daskfactor.resuming import resume
    from daskfactor.stein import (
        IMQ,
        SVGD,
        Ensemble,
        SimplexHMC,
        SteinDescent,
        stein_discrepancy,
        stein_posterior,
    )

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
    "Cost": "daskfactor.inference.cost",
    "estimate_cost": "daskfactor.inference.cost",
    "DSGD": "daskfactor.inference.optimizers",
    "hold_out": "daskfactor.data.holdout",
    "SGHMC": "daskfactor.inference.samplers",
    "GaussianMF": "daskfactor.models.gaussian",
    "IMQ": "daskfactor.stein",
    "SILFNMF": "daskfactor.models.silf",
    "Ensemble": "daskfactor.stein",
    "SVGD": "daskfactor.stein",
    "SimplexHMC": "daskfactor.stein",
    "SteinDescent": "daskfactor.stein",
    "stein_discrepancy": "daskfactor.stein",
    "stein_posterior": "daskfactor.stein",
    "LanesExecutor": "daskfactor.executors",
    "SerialExecutor": "daskfactor.executors",
    "TasksExecutor": "daskfactor.executors",
    "RunEvent": "daskfactor.executors.progress",
    "Cyclic": "daskfactor.data.schedules",
    "NestedReshuffled": "daskfactor.data.schedules",
    "Proportional": "daskfactor.data.schedules",
    "Reshuffled": "daskfactor.data.schedules",
    "as_blocks": "daskfactor.data.sources",
    "convert": "daskfactor.data.convert",
    "export": "daskfactor.data.export",
    "TweedieNMF": "daskfactor.models.tweedie",
    "MultiplicativeUpdates": "daskfactor.inference.optimizers",
    "align": "daskfactor.results.alignment",
    "component_variability": "daskfactor.results.diversity",
    "pairwise_distances": "daskfactor.results.diversity",
    "downstream": "daskfactor.results.top_entries",
    "top_entries": "daskfactor.results.top_entries",
    "monitored": "daskfactor.results.prediction",
    "predict": "daskfactor.results.prediction",
    "summarize": "daskfactor.results.summary",
    "expectation": "daskfactor.results.trace",
    "open_run": "daskfactor.results.trace",
    "HMC": "daskfactor.inference.samplers",
    "LangevinDynamics": "daskfactor.inference.samplers",
    "SGLD": "daskfactor.inference.samplers",
    "PSGLD": "daskfactor.inference.samplers",
    "PSGRRLD": "daskfactor.inference.samplers",
    "Gibbs": "daskfactor.inference.samplers",
    "ConstantStep": "daskfactor.inference.samplers",
    "PolynomialStep": "daskfactor.inference.samplers",
    "optimize": "daskfactor.inference.sampling",
    "resume": "daskfactor.resuming",
    "sample": "daskfactor.inference.sampling",
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
