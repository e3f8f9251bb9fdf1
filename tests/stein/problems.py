"""Tiny problems of every kind of data, their particles, and densities written out in NumPy."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.silf import SILFNMF
from tests.models.laws import divergence


@dataclass(frozen=True)
class Problem:
    """Data, a model of numbers only, and how to open them."""

    name: str
    model: Any
    V: Any
    dense: Any
    options: dict = field(default_factory=dict)

    def open(self, blocks=2, dtype="float64"):
        return as_blocks(self.V, blocks, dtype=dtype, **self.options)

    def particles(self, count, seed=0):
        """Around one pair of factors; on the simplex for a `SILFNMF`."""
        rng = np.random.default_rng([seed, 7])
        (rows, cols), K = self.dense.shape, self.model.n_components
        W, H = (
            0.5 + rng.gamma(1.0, size=shape) + 0.1 * rng.gamma(1.0, size=(count, *shape))
            for shape in ((rows, K), (K, cols))
        )
        if isinstance(self.model, SILFNMF):
            total = W.sum(axis=1, keepdims=True)
            return W / total, H * total.swapaxes(1, 2)
        for one in self.model.fixed:
            if one is not None and one.values is not None:
                W[:, :, list(one.frozen)] = one.values.T
        return W, H

    def log_density(self, W, H):
        """Written out: nothing of the package but d_β of a single entry."""
        seen, mu, model = ~np.isnan(self.dense), W @ H, self.model
        d = float(divergence(self.dense[seen], mu[seen], model.beta).sum())
        if isinstance(model, SILFNMF):
            return model.log_density(d * (2.0 if model.beta == 2.0 else 1.0), H)
        total = -d / float(model.dispersion)
        for factor, rate, shape, mask in (
            (W.T, model.rate_w, model.shape_w, model.frozen[0]),
            (H, model.rate_h, model.shape_h, model.frozen[1]),
        ):
            own = factor if mask is None else factor[~mask]
            total += float(((shape - 1) * np.log(own) - float(rate) * own).sum())
        return total


def tweedie(beta, **settings):
    numbers = {"dispersion": 0.7, "rate_w": 0.8, "rate_h": 1.3}
    return TweedieNMF(2, beta=beta, **(numbers | settings))


def _dense(kind="positive"):
    V = np.random.default_rng(3).gamma(2.0, 2.0, size=(7, 6))
    if kind == "gaps":
        V[[0, 2, 5, 6], [1, 1, 4, 0]] = np.nan
    return np.floor(V / 2) if kind == "counts" else V


def _sparse(unstored):
    V = _dense("counts") * (np.random.default_rng(5).random((7, 6)) < 0.7)
    V[np.arange(6), np.arange(6)], V[6, 0] = 3.0, 2.0
    return sparse.csr_array(V), V if unstored == "zero" else np.where(V == 0, np.nan, V)


ZERO = {"unstored": "zero"}


def problems():
    full, gaps, counts = _dense(), _dense("gaps"), _dense("counts")
    zeros, missing = (*_sparse("zero"), ZERO), (*_sparse("missing"), {"unstored": "missing"})
    permuted = (*missing[:2], missing[2] | {"balance": True})
    fixed = np.random.default_rng(1).gamma(2.0, size=(7, 1))
    near, above = SILFNMF(2, threshold=2400.0, smoothness=0.9), SILFNMF(2, threshold=1.0, rate=0.4)
    return [
        Problem("silf, in the transition", near, full, full),
        Problem("silf, above", above, gaps, gaps),
        Problem("silf, counts", SILFNMF(2, beta=1.0, threshold=2.0), counts, counts),
        Problem("silf, sparse zeros", above, *zeros),
        Problem("gaussian", tweedie(2.0), gaps, gaps),
        Problem("poisson, dense", tweedie(1.0), counts, counts),
        Problem("poisson, zeros", tweedie(1.0), *zeros),
        Problem("gaussian, zeros", tweedie(2.0), *zeros),
        Problem("poisson, missing", tweedie(1.0), *missing),
        Problem("gaussian, missing, permuted", tweedie(2.0), *permuted),
        Problem("compound", tweedie(0.5), gaps, gaps),
        Problem("gamma", tweedie(0.0), full, full),
        Problem("gamma priors", tweedie(1.0, shape_w=2.0, shape_h=0.6), counts, counts),
        Problem("frozen", tweedie(1.0, fixed_w=fixed), counts, counts),
    ]


PROBLEMS = problems()
BY_NAME = {problem.name: problem for problem in PROBLEMS}
