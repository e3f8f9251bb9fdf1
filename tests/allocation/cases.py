"""Small allocation models of every kind, each beside its description for the brute force."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from scipy.special import gammaln

from daskfactor.allocation.compiled_model import rising
from daskfactor.allocation.exact import enumerate_allocations
from daskfactor.allocation.model import AllocationModel

# Evidence by brute force over labelled sequences of tokens, written from the model's definition and
# on purpose without anything of the package: every token draws from urns that are dictionaries.
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


TOY = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
TOY_EVIDENCE = {1: -23.9077021285, 2: -23.4912664223, 3: -23.7737913352}


def enumerate_evidence(*args, **options):
    return enumerate_allocations(*args, **options).log_evidence


def log_f(compiled, counts):
    """Σ ln B(α + C) - ln B(α) over tables with hidden variables, for flat counts (..., cells)."""
    C = np.asarray(counts, float)
    rows = C.reshape(-1, compiled.cells)
    D = np.array([np.bincount(compiled.owner, own, compiled.totals) for own in rows])
    result = rising(compiled.cell_alpha, rows).sum(1) - rising(compiled.total_alpha, D).sum(1)
    return result.reshape(C.shape[:-1])


def network(draws, sizes, hidden, observed="", a=1.0, b=1.0, alpha=None, tied=()):
    """Describe a model: draws of a token as "r i|r j|r,i", sizes as "r:2 i:3".

    Observed variables are, if not named, those that are not hidden. Tables of variables that
    are tied are called t; others have, if nothing else is said, a shared out over their cells.
    """
    parents = {}
    for name, _, given in (own.partition("|") for own in draws.split()):
        parents[name] = tuple(given.split(",")) if given else ()
    numbers = {name: int(size) for name, size in (own.split(":") for own in sizes.split())}
    seen = observed.split() or [name for name in parents if name not in hidden.split()]
    own = {v: a / (numbers[v] * prod(numbers[p] for p in ps)) for v, ps in parents.items()}
    table = dict.fromkeys(tied, "t")
    return Network(parents, numbers, own | (alpha or {}), hidden.split(), seen, a, b, table)


def toy(R):
    return network("r i|r j|r", f"r:{R} i:3 j:4", "r")


def tensor(shape, seed, total):
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, prod(shape), total)
    return np.bincount(cells, minlength=prod(shape)).reshape(shape)


SHARED, LENGTHS = {"r": 1.0, "t": 0.3}, {"d": 0.6, "r": 0.4, "w": 0.2}
TWO = {"r": 2}
CORE = "r1 r2|r1 r3|r1,r2 i|r1 j|r2 k|r3"
LOOSE = "i j|i k|j r l|r n", "i:2 j:2 k:2 r:2 l:2 n:2"
MODELS = {
    "cp": (
        AllocationModel.cp(2, order=3, concentration=1.5, rate=0.7),
        network("r i|r j|r k|r", "r:2 i:2 j:2 k:2", "r", a=1.5, b=0.7),
        tensor((2, 2, 2), 0, 7),
    ),
    "symmetric": (
        AllocationModel.symmetric_nmf(2, concentration_shared=0.3, concentration=2.0),
        network("r i|r j|r", "r:2 i:3 j:3", "r", a=2.0, alpha=SHARED, tied="ij"),
        np.array([[2, 1, 0], [1, 1, 0], [0, 0, 2]]),
    ),
    "chain": (
        AllocationModel("r -> s -> i, r -> j", TWO | {"s": 2}),
        network("r s|r i|s j|r", "r:2 s:2 i:2 j:3", "r s"),
        tensor((2, 3), 1, 5),
    ),
    "collider": (
        AllocationModel("r -> i, s -> i, s -> j", {"s": 3, "r": 2}, ["j", "i"], 0.8),
        network("r s i|r,s j|s", "r:2 s:3 i:2 j:3", "r s", "j i", a=0.8),
        tensor((3, 2), 2, 5),
    ),
    "observed parents": (
        AllocationModel("d -> i, r -> i, d -> j, r -> j, i -> j", TWO, ["i", "j", "d"]),
        network("d r i|d,r j|d,r,i", "r:2 i:2 j:2 d:3", "r", "i j d"),
        tensor((2, 2, 3), 3, 7),
    ),
    "topics": (
        AllocationModel.topics(3, document=0.4, word=0.2, length=0.6, rate=2.0, shape=1.7),
        network("d r|d w|r", "d:3 r:3 w:4", "r", a=1.7, b=2.0, alpha=LENGTHS),
        tensor((3, 4), 4, 6),
    ),
    "tucker": (
        AllocationModel.tucker((2, 2, 2), concentration=3.0),
        network(CORE, "r1:2 r2:2 r3:2 i:2 j:2 k:3", "r1 r2 r3", a=3.0),
        tensor((2, 2, 3), 5, 4),
    ),
    "tied hidden and observed": (
        AllocationModel("s -> i -> j, s -> k", {"s": 3}, concentration=0.9, tied={("i", "j"): 0.5}),
        network("s i|s j|i k|s", "s:3 i:3 j:3 k:2", "s", a=0.9, alpha={"t": 0.5}, tied="ij"),
        tensor((3, 3, 2), 6, 6),
    ),
    "tied hidden roots": (
        AllocationModel("r; s; r -> i; s -> i", TWO | {"s": 2}, tied={("r", "s"): 0.4}),
        network("r s i|r,s", "r:2 s:2 i:3", "r s", alpha={"t": 0.4}, tied="rs"),
        np.array([2, 1, 2]),
    ),
    "tables without hidden variables": (
        AllocationModel("i -> j -> k, r -> l, n", TWO, tied={("j", "k"): 0.7}),
        network(*LOOSE, "r", alpha={"t": 0.7}, tied="jk"),
        tensor((2, 2, 2, 2, 2), 7, 6),
    ),
}
CASES = [(name, *case) for name, case in MODELS.items()]
NAMES = list(MODELS)


@st.composite
def graphs(draw):
    """A random graph of up to four variables, some of them tied, and both descriptions of it."""
    names = "abcd"[: draw(st.integers(2, 4))]
    pairs = list(itertools.combinations(names, 2))
    edges = [pair for pair in pairs if draw(st.booleans())]
    sizes = {name: draw(st.integers(1, 3)) for name in names}
    hidden = [name for name in names if draw(st.booleans())]
    assume(0 < len(hidden) < len(names))
    observed = draw(st.permutations([name for name in names if name not in hidden]))
    parents = {name: tuple(p for p, child in edges if child == name) for name in names}
    a, b = draw(st.sampled_from([0.3, 1.0, 4.0])), draw(st.sampled_from([0.5, 1.0, 3.0]))

    def sides(name):
        return [sizes[axis] for axis in (*parents[name], name)]

    alike = [pair for pair in pairs if sides(pair[0]) == sides(pair[1])]
    tied = draw(st.sampled_from([*alike, None])) if alike else None
    alpha = {name: a / prod(sides(name)) for name in names} | ({"t": 0.6} if tied else {})
    text = ", ".join([*names, *(" -> ".join(edge) for edge in edges)])
    shared = {tied: 0.6} if tied else {}
    own = {name: sizes[name] for name in hidden}
    model = AllocationModel(text, own, observed, a, rate=b, tied=shared)
    table = dict.fromkeys(tied or (), "t")
    return model, Network(parents, sizes, alpha, hidden, observed, a, b, table)


def tokens(network):
    """Counts of up to four tokens in the observed cells of a graph."""
    shape = tuple(network.sizes[name] for name in network.observed)
    cells = st.lists(st.integers(0, prod(shape) - 1), min_size=1, max_size=4)
    return cells.map(lambda own: np.bincount(own, minlength=prod(shape)).reshape(shape))
