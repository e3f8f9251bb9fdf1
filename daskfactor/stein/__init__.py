"""Posteriors made of a few weighted factorizations, and how far a set of them is from one."""

from daskfactor.stein.ensemble import Ensemble
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.measure import stein_discrepancy
from daskfactor.stein.posterior import stein_posterior
from daskfactor.stein.simplex_hmc import SimplexHMC
from daskfactor.stein.stein_descent import SteinDescent
from daskfactor.stein.svgd import SVGD
from daskfactor.stein.weights import discrepancy, stein_weights

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
