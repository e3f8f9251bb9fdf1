"""Posteriors made of a few weighted factorizations, and how far a set of them is from one."""

from daskfactor.particles.direct import SteinDescent
from daskfactor.particles.ensembles import Ensemble
from daskfactor.particles.hamiltonian import SimplexHMC
from daskfactor.particles.kernel import IMQ
from daskfactor.particles.posterior import stein_posterior
from daskfactor.particles.svgd import SVGD
from daskfactor.particles.verbs import stein_discrepancy
from daskfactor.particles.weights import discrepancy, stein_weights

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
