"""Coupled pairs of matrices against their exact posterior, by quadrature, and a planted bug.

Two views of the same rows, a column each, and one component: given both columns the rows
are independent. Hundreds of copies of the problem share a run, as blocks on a diagonal whose other
cells are missing.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor.models.coupled import JointLaw
from daskfactor.results.views import factors

pytestmark = pytest.mark.statistical

COPIES = 400
ERRORS = 5.0


class Pair(NamedTuple):
    """Two columns of data of the same rows, and their laws."""

    name: str
    first: list[float]
    second: list[float]
    relations: dict[str, dfac.Relation]


POISSON = dfac.Relation(law="poisson", dispersion=1.0)
NORMAL = dfac.Relation(law="normal", dispersion=0.7)
PAIRS = [
    Pair("poisson-normal", [4, 1, 9], [1.5, 0.4, 2.6], {"a": POISSON, "b": NORMAL}),
    Pair(
        "weighted-overdispersed",
        [2, 0, 5],
        [7, 3, 30],
        {
            "a": dfac.Relation(law="poisson", dispersion=1.0, weight=0.5),
            "b": dfac.Relation(law="negative binomial", dispersion=0.4),
        },
    ),
    Pair(
        "gamma-normal",
        [2.5, 0.3, 1.2],
        [3.5, 0.1, -0.6],
        {"a": dfac.Relation(law="gamma", dispersion=0.3), "b": NORMAL},
    ),
]


def log_density(relation, v, mu):
    """Log-densities by SciPy's own distributions."""
    phi = float(relation.dispersion)
    found: Any
    if relation.law == "poisson":
        found = stats.poisson.logpmf(v, mu)
    elif relation.law == "normal":
        found = stats.norm.logpdf(v, mu, np.sqrt(phi))
    elif relation.law == "gamma":
        found = stats.gamma.logpdf(v, 1 / phi, scale=phi * mu)
    else:
        found = stats.nbinom.logpmf(v, 1 / phi, 1 / (1 + phi * mu))
    return relation.weight * np.asarray(found)


def exact(pair, rate=1.0):
    """Posterior means of row factors, and of the means of both views: (3,), (2, 3).

    On a grid of log h and log g, with w of every row on a grid of its own.
    """
    columns, units = (np.array(pair.first), np.array(pair.second)), []
    units = [float(np.mean(own)) for own in columns]
    nodes = np.linspace(-5.5, 2.5, 161)
    h = np.exp(nodes)
    w = np.exp(np.linspace(-8.0, 3.0, 301))
    log_joint = -rate * h[:, None] - rate * h[None, :] + nodes[:, None] + nodes[None, :]
    rows = []
    for i in range(3):
        terms = []
        for view, name in enumerate("ab"):
            mu = units[view] * w[None, :] * h[:, None]
            terms.append(log_density(pair.relations[name], columns[view][i], mu))
        inner = terms[0][:, None, :] + terms[1][None, :, :] - rate * w + np.log(w)  # (h, g, w)
        top = inner.max(axis=2, keepdims=True)
        weight = np.exp(inner - top)
        total = weight.sum(axis=2)
        rows.append(weight @ w / total)
        log_joint = log_joint + np.log(total) + top[..., 0]
    p = np.exp(log_joint - log_joint.max())
    p /= p.sum()
    means = np.array([(p * own).sum() for own in rows])
    mu = np.array(
        [
            [
                (p * own * (h[:, None] if view == 0 else h[None, :])).sum() * units[view]
                for own in rows
            ]
            for view in (0, 1)
        ]
    )
    return means, mu


def drawn(pair, sampler, draws, tune=150):
    """Means over the draws of every copy: (copies, 3), (copies, 2, 3)."""
    data = {
        name: sparse.csr_array(sparse.block_diag([np.array(own)[:, None]] * COPIES))
        for name, own in (("a", pair.first), ("b", pair.second))
    }
    for own in data.values():
        assert own.nnz == 3 * COPIES, "a zero that is not stored would be missing"
    model = dfac.Coupled(1, relations=pair.relations, rate_w=1.0, rate_h=1.0)
    settings = {"draws": draws, "tune": tune, "random_seed": 5, "progressbar": False}
    trace = dfac.sample(data, model, sampler, unstored="missing", blocks=4, **settings)
    own = {name: values.values[0, ..., 0] for name, values in factors(trace).items()}
    W = own["row"].reshape(draws, COPIES, 3).astype(np.float64)
    units = [np.mean(pair.first), np.mean(pair.second)]
    mu = [unit * W * own[name][:, :, None] for name, unit in zip("ab", units, strict=True)]
    return W.mean(axis=0), np.stack([one.mean(axis=0) for one in mu], axis=1)


def worst(pair, sampler, draws=300):
    """The largest difference from the exact means in standard errors, and the largest of these
    errors in units of the means."""
    sizes, errors = [], []
    for found, true in zip(drawn(pair, sampler, draws), exact(pair), strict=True):
        error = found.std(axis=0, ddof=1) / np.sqrt(COPIES)
        sizes.append(np.abs(found.mean(axis=0) - true) / error)
        errors.append(error / true)
    return max(float(own.max()) for own in sizes), max(float(own.max()) for own in errors)


def test_quadrature_of_one_view_is_that_of_a_matrix_alone():
    """With the second view's weight near nothing the first is a gamma-Poisson problem."""
    vague = dfac.Relation(law="normal", dispersion=1e8)
    pair = Pair("alone", [4, 1, 9], [1.5, 0.4, 2.6], {"a": POISSON, "b": vague})
    means, mu = exact(pair)
    # By hand: given h, w_i ~ Gamma(v_i + 1, 1 + u h); p(h) ∝ h^Σv e^-h (1 + u h)^-(Σv + 3)
    h, v, u = np.exp(np.linspace(-12, 5, 20001)), np.array(pair.first), np.mean(pair.first)
    p = h ** (v.sum() + 1) * np.exp(-h) * (1 + u * h) ** -(v.sum() + 3.0)
    p /= p.sum()
    w = (v[:, None] + 1) / (1 + u * h)
    np.testing.assert_allclose(means, (p * w).sum(axis=1), rtol=2e-3)
    np.testing.assert_allclose(mu[0], u * (p * w * h).sum(axis=1), rtol=2e-3)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_exact_posteriors(pair):
    size, error = worst(pair, dfac.BlockHMC(warm_start=5))
    assert error < 0.02, "too few draws for the tolerance to mean anything"
    assert size < ERRORS


@pytest.mark.parametrize("bug", ["share", "turned"])
def test_planted_bugs_are_seen(bug, monkeypatch):
    if bug == "share":
        monkeypatch.setattr(JointLaw, "parts", property(lambda law: law.laws))
    else:
        own = JointLaw.of
        monkeypatch.setattr(JointLaw, "of", lambda law, block: own(law, (block[0], 0)))
    size, _ = worst(PAIRS[0], dfac.BlockHMC(warm_start=5))
    assert size > 2 * ERRORS
