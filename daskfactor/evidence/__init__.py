"""Marginal likelihoods, and the rank they speak for."""

from daskfactor.evidence.allocation import Enumeration, SequentialMonteCarlo, VariationalBayes
from daskfactor.evidence.base import Evidence
from daskfactor.evidence.chib import Chib
from daskfactor.evidence.selection import select_rank
from daskfactor.evidence.thermodynamic import ThermodynamicIntegration
from daskfactor.evidence.verbs import log_evidence

__all__ = [
    "Chib",
    "Enumeration",
    "Evidence",
    "SequentialMonteCarlo",
    "ThermodynamicIntegration",
    "VariationalBayes",
    "log_evidence",
    "select_rank",
]
