"""Posteriors made of a few weighted factorizations, and how far a set of them is from one."""

from daskfactor.stein.descent import SVGD, SteinDescent
from daskfactor.stein.ensemble import Ensemble
from daskfactor.stein.kernel import IMQ, discrepancy, stein_weights
from daskfactor.stein.posterior import stein_discrepancy, stein_posterior
from daskfactor.stein.simplex_hmc import SimplexHMC

__all__ = [
    "IMQ",
    "SVGD",
    "Ensemble",
    "SimplexHMC",
    "SteinDescent",
    "discrepancy",
    "stein_discrepancy",
    "stein_posterior",
    "stein_weights",
]
