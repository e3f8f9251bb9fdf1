"""Posteriors made of a few weighted factorizations, and how far a set of them is from one."""

from daskfactor.particles.kernel import IMQ
from daskfactor.particles.verbs import stein_discrepancy
from daskfactor.particles.weights import discrepancy, stein_weights

__all__ = ["IMQ", "discrepancy", "stein_discrepancy", "stein_weights"]
