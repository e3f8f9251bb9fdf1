"""Coefficients of a stored entry of a sparse block, by the law and by the meaning of gaps.

Where entries that are not stored are observed zeros, their part has a closed
form if a zero's curvature is 1 and its residual -1 (column sums of the factors),
or if they are mu and -mu (Gram matrices): see `Likelihood.zeros`. It is added over
the whole block, without a floor under mu, and a stored entry's coefficient is what
it has beyond an observed zero's. A stored NaN is a missing entry: its coefficient
takes the zero's part back.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from daskfactor.kernels.jit import inline
from daskfactor.kernels.views import Law, entry_kernels, floored
from daskfactor.models.likelihood import Likelihood

Scalar = Any
EntryRule = Callable[..., tuple[Scalar, Scalar]]


class Rules(NamedTuple):
    """Coefficients of one stored entry.

    step    (v, mu, law, scale) -> what it adds to (scale R, C)
    ratio   (v, mu, law) -> what it adds to (Q, C) of a multiplicative update
    fit     (v, mu, law) -> what it adds to the sums of deviance and Pearson terms

    Those of blocks with weights take the entry's as one more argument.
    """

    step: EntryRule
    ratio: EntryRule
    fit: EntryRule


def _rules_of_observed(likelihood: Likelihood) -> Rules:
    """Make rules where entries that are not stored are missing."""
    weight, curvature, numerator, deviance, _ = entry_kernels(likelihood)

    @inline
    def step(v: Scalar, mu: Scalar, law: Law, scale: Scalar) -> tuple[Scalar, Scalar]:
        (floor, numbers), seen = law, v == v
        mean = floored(mu, floor)
        w = weight(v, mean, *numbers)
        zero = type(mu)(0)
        return (scale * (v - mean) * w if seen else zero), (
            curvature(type(mu)(1), v, mean, w, *numbers) if seen else zero
        )

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        (floor, numbers), seen = law, v == v
        mean = floored(mu, floor)
        w = weight(v, mean, *numbers)
        # Both before they are chosen from: inside the choices LLVM orders the sums of K
        # products after them otherwise, and bits would not be those of earlier versions.
        q = numerator(v, mean, w, *numbers)
        c = curvature(type(mu)(1), v, mean, w, *numbers)
        zero = type(mu)(0)
        return (q if seen else zero), (c if seen else zero)

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        floor, numbers = law
        mean = floored(mu, floor)
        v = v if v == v else mean  # a missing entry adds d(mu | mu) = 0
        pearson = (v - mean) * (v - mean) * weight(v, mean, *numbers)
        return np.float64(deviance(v, mean, *numbers)), np.float64(pearson)

    return Rules(step, ratio, fit)


def _rules_beyond(fit_observed: EntryRule, zeros: str) -> Rules:
    """Make rules beyond the zero of every cell, of curvature C0 = 1 or mu and R = -C0.

    C0 mu is its Pearson term and a share of that its deviance. Where C0 is mu, the weight of a
    stored entry is 1, and its mean needs no floor.
    """
    no_floor, share = zeros == "linear", 0.5 if zeros == "linear" else 1.0

    @inline
    def step(v: Scalar, mu: Scalar, law: Law, scale: Scalar) -> tuple[Scalar, Scalar]:
        real, seen = type(mu), v == v
        zero = mu if no_floor else real(1)
        a = scale * v if no_floor else scale * v / floored(mu, law[0])
        return (a if seen else scale * zero), (real(0) if seen else -zero)

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        real, seen = type(mu), v == v
        zero = mu if no_floor else real(1)
        a = v if no_floor else v / floored(mu, law[0])
        return (a if seen else real(0)), (real(0) if seen else -zero)

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law) -> tuple[Scalar, Scalar]:
        zero = np.float64(mu if no_floor else type(mu)(1)) * np.float64(mu)
        deviance, pearson = fit_observed(v, mu, (mu if no_floor else law[0], law[1]))
        return deviance - share * zero, pearson - zero

    return Rules(step, ratio, fit)


def _rules_by_weight(observed: Rules, zeros: str | None) -> Rules:
    """Make rules of an observation with a weight, beyond the zero of weight 1 of every cell.

    Its C0 is 0 where there are no zeros.
    """
    no_floor, constant = zeros == "linear", float(zeros == "constant")
    share = 0.5 if no_floor else 1.0
    step_observed, ratio_observed, fit_observed = observed

    @inline
    def curvature(mu: Scalar) -> Scalar:
        return mu if no_floor else type(mu)(constant)

    @inline
    def step(
        v: Scalar, mu: Scalar, law: Law, scale: Scalar, weight: Scalar
    ) -> tuple[Scalar, Scalar]:
        zero = curvature(mu)
        a, c = step_observed(v, mu, (mu if no_floor else law[0], law[1]), scale)
        weight = weight if v == v else type(mu)(0)
        return a * weight + scale * zero, c * weight - zero

    @inline
    def ratio(v: Scalar, mu: Scalar, law: Law, weight: Scalar) -> tuple[Scalar, Scalar]:
        q, c = ratio_observed(v, mu, (mu if no_floor else law[0], law[1]))
        weight = weight if v == v else type(mu)(0)
        return q * weight, c * weight - curvature(mu)

    @inline
    def fit(v: Scalar, mu: Scalar, law: Law, weight: Scalar) -> tuple[Scalar, Scalar]:
        zero = np.float64(curvature(mu)) * np.float64(mu)
        deviance, pearson = fit_observed(v, mu, (mu if no_floor else law[0], law[1]))
        weight = weight if v == v else type(mu)(0)
        return deviance * weight - share * zero, pearson * weight - zero

    return Rules(step, ratio, fit)


@lru_cache(maxsize=64)
def entry_rules(likelihood: Likelihood, zeros: bool, weights: bool = False) -> Rules:
    """Make the rules of one likelihood, shared by its kernels of every K."""
    observed, closed = _rules_of_observed(likelihood), likelihood.zeros if zeros else None
    if weights:
        return _rules_by_weight(observed, closed)
    return observed if closed is None else _rules_beyond(observed.fit, closed)
