"""Evidences by other ways than integrating over temperatures."""

import itertools
import math

import numpy as np
from scipy.special import gammaln, logsumexp

from tests.models.laws import log_density


def one_component_by_quadrature(
    V, beta, dispersion, rates=(1.0, 1.0), shapes=(1.0, 1.0), power=1.0
):
    """Log p(V) of K = 1 for a matrix of two rows, NaN missing: sums over grids of logs.

    Of the likelihood's ``power`` t, log of the integral of p(V | W, H)^t p(W, H).
    """
    grid = np.linspace(-14.0, 5.0, 191)
    step, values = grid[1] - grid[0], np.exp(grid)

    def prior(rate, shape):
        density = shape * np.log(rate) + shape * grid - rate * values - gammaln(shape)
        return density + np.log(step)

    inner, outer = prior(rates[1], shapes[1]), prior(rates[0], shapes[0])
    total = outer[:, None] + outer[None, :]
    mu = np.multiply.outer(values, values)  # w by h
    for column in V.T:
        fits = [
            np.zeros_like(mu) if np.isnan(v) else power * log_density(v, mu, dispersion, beta)
            for v in column
        ]
        # a sum over h of exp(a + b) for every pair of w: products of matrices
        tops = [fit.max() for fit in fits]
        left, right = np.exp(fits[0] - tops[0] + inner), np.exp(fits[1] - tops[1])
        with np.errstate(divide="ignore"):
            total = total + np.log(left @ right.T) + sum(tops)
    return float(logsumexp(total))


def _one_component(table, kappa):
    """Log p1(S) of one component's counts, by quadrature over the sum of its W."""
    rows, cols = table.sum(axis=1), table.sum(axis=0)
    n, (many, wide) = table.sum(), table.shape
    u = np.linspace(-25.0, 25.0, 20001)
    # W = S w with w on the simplex, rates (kappa, 1)
    log = (n + many) * u - kappa * np.exp(u) - (n + wide) * np.log1p(np.exp(u))
    integral = logsumexp(log) + np.log(u[1] - u[0])
    value = many * math.log(kappa) + gammaln(rows + 1).sum() + gammaln(cols + 1).sum()
    value += integral - gammaln(n + many)
    return value - gammaln(table + 1).sum()


def _splits(count, parts):
    """All ways to put ``count`` into labelled parts."""
    for bars in itertools.combinations(range(count + parts - 1), parts - 1):
        edges = (-1, *bars, count + parts - 1)
        yield tuple(high - low - 1 for low, high in itertools.pairwise(edges))


def poisson_by_enumeration(X, components, kappa=1.0):
    """Log p(X) of Poisson NMF with exponential priors: a sum over all allocations of X."""
    shape, known = X.shape, {}

    def term(key):
        if key not in known:
            known[key] = _one_component(np.array(key).reshape(shape), kappa)
        return known[key]

    cells = [list(_splits(int(count), components)) for count in X.ravel()]
    logs = [
        sum(term(tuple(cell[k] for cell in allocation)) for k in range(components))
        for allocation in itertools.product(*cells)
    ]
    return float(logsumexp(logs))
