"""Particles by plain loops over the tokens, and how exact one of them is."""

import math
import warnings
from collections import defaultdict

import numpy as np

from daskfactor.allocation.batches import BatchPlan, run_batch
from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import as_counts
from daskfactor.allocation.model import AllocationModel
from daskfactor.allocation.placement import place_counts
from daskfactor.errors import SamplingWarning
from daskfactor.kernels.views import Workspace
from tests.allocation.cases import CASES, TOY


def problems(total):
    """Small models and data of every kind; the largest have `total` tokens."""
    symmetric = AllocationModel.symmetric_nmf(5, concentration_shared=0.1)
    return [
        *[(name, model, X) for name, model, _, X in CASES],
        ("one component", AllocationModel.nmf(1), TOY),
        ("many components", AllocationModel.nmf(11), crowded(total)),
        ("order 4", AllocationModel.cp(5, order=4), np.ones((2, 3, 2, 2), int)),
        ("one row", AllocationModel.topics(6), crowded(total, 1)),
        ("symmetric, larger", symmetric, crowded(total, 2)),
    ]


def crowded(total, seed=0, size=12):
    """Counts that crowd into the first rows and columns."""
    rng, X = np.random.default_rng(seed), np.zeros((size, size), int)
    where = np.minimum(rng.exponential(2.0, (2, total)), size - 1).astype(int)
    np.add.at(X, tuple(where), 1)
    return X


def blocks(total, size=30, seed=0):
    """Counts in three blocks on the diagonal."""
    rng = np.random.default_rng(seed)
    part, width = rng.integers(0, 3, total) * (size // 3), size // 3
    X = np.zeros((size, size), np.int64)
    np.add.at(X, tuple(part + rng.integers(0, width, total) for _ in range(2)), 1)
    return X


def in_turn(function, items):
    return [function(item, Workspace()) for item in items]


def run_smc(compiled, method, *args):
    return method.run(compiled, *args)


def quiet(*args):
    """run_smc without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return run_smc(*args)


def compiled_of(X, model):
    return compile_model(model, as_counts(X, model))


def plan_of(compiled, particles, **changes):
    settings = {"placement": place_counts(compiled), "particles": particles, "seed": 1}
    settings |= {"resampling": "systematic", "least": 0.5, "round": 0}
    settings |= {"separate_orders": False, "unfold": False}
    return BatchPlan(**settings | changes)


def batch_of(plan, batch=0):
    return run_batch(plan, batch, Workspace())


def predictive(compiled, m, C, D):
    """w[h] of a token at observed cell m, from the definition: draws one after the other."""
    w = np.ones(compiled.states)
    for h in range(compiled.states):
        balls = defaultdict(int)
        for n in range(len(compiled.alpha)):
            cell = compiled.row[m, n] + compiled.column[n, h]
            total = compiled.total_row[m, n] + compiled.total_column[n, h]
            w[h] *= compiled.alpha[n] + C[cell] + balls["cell", cell]
            w[h] /= compiled.alpha_total[n] + D[total] + balls["total", total]
            balls["cell", cell] += 1
            balls["total", total] += 1
    return w


def add(compiled, m, h, C, D, by=1):
    for n in range(len(compiled.alpha)):
        C[compiled.row[m, n] + compiled.column[n, h]] += by
        D[compiled.total_row[m, n] + compiled.total_column[n, h]] += by


def walk(compiled, order, uniforms):
    """Log p(X) estimate of one particle, and its flat counts."""
    C, D = np.zeros(compiled.cells, int), np.zeros(compiled.totals, int)
    logs = compiled.log_factor + compiled.constant
    for m, uniform in zip(order, uniforms, strict=True):
        running = np.cumsum(predictive(compiled, m, C, D))
        logs += math.log(running[-1])
        h = int(np.searchsorted(running[:-1], uniform * running[-1], side="right"))
        add(compiled, m, h, C, D)
    return logs, C


def relative_variance(compiled):
    """Var p̂ / p² of one particle without resampling, over orders and draws.

    E p̂² by dynamic programming over allocations S: a path has the probability
    Π (X - S_V) / (T - τ) · w / u and the weight (Π u)².
    """
    X, T = compiled.values, int(compiled.values.sum())
    level = {(0,) * (len(X) * compiled.states): (1.0, 1.0)}
    for tau in range(T):
        following = defaultdict(lambda: (0.0, 0.0))
        for S, (first, second) in level.items():
            C, D = np.zeros(compiled.cells, int), np.zeros(compiled.totals, int)
            table = np.array(S).reshape(len(X), compiled.states)
            for m, h in zip(*np.nonzero(table), strict=True):
                add(compiled, m, h, C, D, table[m, h])
            for m in np.flatnonzero(table.sum(1) < X):
                chance, w = (X[m] - table[m].sum()) / (T - tau), predictive(compiled, m, C, D)
                for h in range(compiled.states):
                    key = list(S)
                    key[m * compiled.states + h] += 1
                    one, two = following[tuple(key)]
                    following[tuple(key)] = (
                        one + first * chance * w[h],
                        two + second * chance * w[h] * w.sum(),
                    )
        level = dict(following)
    mean, square = sum(one for one, _ in level.values()), sum(two for _, two in level.values())
    return square / mean**2 - 1


def score(values):
    """Standard errors between the mean and one, where errors are at least 1e-10."""
    error = max(values.std(ddof=1) / math.sqrt(len(values)), 1e-10)
    return float((values.mean() - 1) / error)
