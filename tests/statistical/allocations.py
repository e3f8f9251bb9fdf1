"""Exact posteriors of tiny Poisson factorizations under gamma priors, by allocations.

Given the allocation S the components are independent, and in each of them

    p(w, h | s) ∝ Π_i w_i^(a_w + s_i+ - 1) Π_j h_j^(a_h + s_+j - 1)
                  exp(-λ_w A - λ_h B - A B),        A = Σ w,  B = Σ h

so that w / A and h / B are Dirichlet vectors of their own, and A and B are left
for a quadrature of one dimension (B given A is a gamma variable).
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from scipy import special


class Priors(NamedTuple):
    """Gamma priors on W and H."""

    rate_w: float = 1.0
    rate_h: float = 1.0
    shape_w: float = 1.0
    shape_h: float = 1.0


class Component(NamedTuple):
    """One component given its share of the counts."""

    log_evidence: float
    mean: np.ndarray  # E w_i h_j
    square: np.ndarray  # E (w_i h_j)²
    sum_w: float


def _sizes(total_w, total_h, priors):
    """Log-mass of A^(t_w - 1) B^(t_h - 1) exp(-λ_w A - λ_h B - A B); E A, E AB, E (AB)²."""
    u = np.linspace(-12.0, 12.0, 4001) - np.log(priors.rate_w)
    A = np.exp(u)
    slope = priors.rate_h + A
    log = total_w * u - priors.rate_w * A + special.gammaln(total_h) - total_h * np.log(slope)
    mass = special.logsumexp(log) + np.log(u[1] - u[0])
    weight = np.exp(log - special.logsumexp(log))
    b1, b2 = total_h / slope, total_h * (total_h + 1) / slope**2
    return float(mass), float(weight @ A), float(weight @ (A * b1)), float(weight @ (A**2 * b2))


def component(s, priors):
    """The posterior of one component that has the counts s."""
    a, b = priors.shape_w + s.sum(axis=1), priors.shape_h + s.sum(axis=0)
    mass, A, AB, AB2 = _sizes(a.sum(), b.sum(), priors)
    log = mass - special.gammaln(s + 1).sum()
    sides = (a, priors.rate_w, priors.shape_w), (b, priors.rate_h, priors.shape_h)
    for own, rate, shape in sides:
        log += special.gammaln(own).sum() - special.gammaln(own.sum())
        log += own.size * (shape * np.log(rate) - special.gammaln(shape))
    first = np.outer(a / a.sum(), b / b.sum())
    squares = [own * (own + 1) / (own.sum() * (own.sum() + 1)) for own in (a, b)]
    second = np.outer(*squares)
    return Component(float(log), AB * first, AB2 * second, A)


def shared_out(V, K):
    """Every way to share the counts out among K components, each (K, I, J)."""
    ways = [_compositions(int(v), K) for v in V.ravel()]
    return [np.array(way).T.reshape(K, *V.shape) for way in product(*ways)]


def _compositions(total, parts):
    if parts == 1:
        return [(total,)]
    return [(n, *rest) for n in range(total + 1) for rest in _compositions(total - n, parts - 1)]


def posterior(V, K, priors):
    """``mean_mu``, ``var_mu`` (I, J), ``sum_w``, ``log_evidence``; no cell may be missing."""
    logs, means, squares, sums = [], [], [], []
    for S in shared_out(V, K):
        parts = [component(s, priors) for s in S]
        mean = np.sum([part.mean for part in parts], axis=0)
        spread = np.sum([part.square - part.mean**2 for part in parts], axis=0)
        logs.append(sum(part.log_evidence for part in parts))
        means.append(mean)
        squares.append(spread + mean**2)
        sums.append(sum(part.sum_w for part in parts))
    log_evidence = float(special.logsumexp(logs))
    weight = np.exp(np.array(logs) - log_evidence)
    mean = np.tensordot(weight, means, 1)
    return {
        "mean_mu": mean,
        "var_mu": np.tensordot(weight, squares, 1) - mean**2,
        "sum_w": float(weight @ sums),
        "log_evidence": log_evidence,
    }
