"""Evidence of allocation models by brute force, over labelled sequences of tokens.

Written from the model's definition and on purpose without anything of the package:
every token draws its variables one after another from urns that are dictionaries.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import gammaln

CLOSED_FORM = 3000
"""Sequences of which the product of predictives is compared with the ratio of B functions."""


@dataclass
class Network:
    """Parents of each variable, parents before children; ``table`` says who shares one."""

    parents: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    alpha: Mapping[str, float]
    hidden: Sequence[str]
    observed: Sequence[str]
    a: float = 1.0
    b: float = 1.0
    table: Mapping[str, str] = field(default_factory=dict)

    def draws(self, token):
        """(table, parent values, value) of each draw of one token."""
        return [
            (self.table.get(v, v), tuple(token[p] for p in self.parents[v]), token[v])
            for v in self.parents
        ]

    def size_of(self, table):
        return next(self.sizes[v] for v in self.parents if self.table.get(v, v) == table)

    def closed_form(self, counts):
        """Log Π B(α + C) / B(α)."""
        compiled = defaultdict(list)
        for (table, parents, _), count in counts.items():
            compiled[table, parents].append(count)
        result = 0.0
        for (table, _), own in compiled.items():
            alpha, size = self.alpha[table], self.size_of(table)
            z = np.array(own + [0.0] * (size - len(own))) + alpha
            result += gammaln(z).sum() - gammaln(z.sum())
            result -= size * gammaln(alpha) - gammaln(size * alpha)
        return float(result)


def tokens_of(X):
    return [cell for cell in np.ndindex(X.shape) for _ in range(int(X[cell]))]


def walk(net, cells):
    """Probability and counts of every sequence of tokens with these observed cells."""
    counts, totals = defaultdict(float), defaultdict(float)

    def further(t, probability):
        if t == len(cells):
            yield probability, counts
            return
        for state in itertools.product(*(range(net.sizes[h]) for h in net.hidden)):
            token = dict(zip(net.observed, cells[t], strict=True))
            token |= dict(zip(net.hidden, state, strict=True))
            drawn, p = net.draws(token), probability
            for key in drawn:
                alpha, urn = net.alpha[key[0]], key[:2]
                p *= (alpha + counts[key]) / (alpha * net.size_of(key[0]) + totals[urn])
                counts[key] += 1
                totals[urn] += 1
            yield from further(t + 1, p)
            for key in drawn:
                counts[key] -= 1
                totals[key[:2]] -= 1

    yield from further(0, 1.0)


def evidence(net, X):
    """Log p(X), and the posterior mean of the counts of every cell of every table."""
    cells, states = tokens_of(X), math.prod(net.sizes[h] for h in net.hidden)
    small = states ** len(cells) <= CLOSED_FORM
    mass, means = 0.0, defaultdict(float)
    for probability, counts in walk(net, cells):
        mass += probability
        if small:
            assert abs(math.log(probability) - net.closed_form(counts)) < 1e-10
            for key, count in counts.items():
                means[key] += probability * count
    T = len(cells)
    log_nb = math.lgamma(net.a + T) - math.lgamma(net.a) - math.lgamma(T + 1)
    log_nb += net.a * math.log(net.b / (net.b + 1)) - T * math.log(net.b + 1)
    arrangements = math.lgamma(T + 1) - sum(math.lgamma(x + 1) for x in X.ravel())
    return log_nb + arrangements + math.log(mass), {k: v / mass for k, v in means.items()}
