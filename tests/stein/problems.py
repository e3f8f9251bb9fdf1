"""Tiny problems of every kind of data, their particles, and densities written out in NumPy."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF
from tests.models.laws import divergence

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """Data, a model of numbers only, and how to open them."""

    name: str
    model: SILFNMF | TweedieNMF
    V: Any
    dense: Array
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, blocks=2, dtype="float64"):
        return as_blocks(self.V, blocks, dtype=dtype, **self.options)

    def particles(self, count, seed=0):
        """Around one pair of factors; on the simplex for a `SILFNMF`."""
        rng = np.random.default_rng([seed, 7])
        (rows, cols), K = self.dense.shape, self.model.n_components
        W = 0.5 + rng.gamma(1.0, size=(rows, K)) + 0.1 * rng.gamma(1.0, size=(count, rows, K))
        H = 0.5 + rng.gamma(1.0, size=(K, cols)) + 0.1 * rng.gamma(1.0, size=(count, K, cols))
        if isinstance(self.model, SILFNMF):
            total = W.sum(axis=1, keepdims=True)
            W, H = W / total, H * total.swapaxes(1, 2)
        for one in self.model.fixed if isinstance(self.model, TweedieNMF) else ():
            if one is not None and one.values is not None:
                W[:, :, list(one.frozen)] = one.values.T
        return W, H

    def log_density(self, W, H):
        """Written out: nothing of the package but d_β of a single entry."""
        seen = ~np.isnan(self.dense)
        mu, model = W @ H, self.model
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
    rng = np.random.default_rng(3)
    V = rng.gamma(2.0, 2.0, size=(7, 6))
    if kind == "gaps":
        V[[0, 2, 5, 6], [1, 1, 4, 0]] = np.nan
    if kind == "counts":
        V = np.floor(V / 2)
    return V


def _sparse(unstored):
    V = _dense("counts") * (np.random.default_rng(5).random((7, 6)) < 0.7)
    V[np.arange(6), np.arange(6)] = 3.0
    V[6, 0] = 2.0
    stored = sparse.csr_array(V)
    return stored, V if unstored == "zero" else np.where(V == 0, np.nan, V)


def problems():
    full, gaps, counts = _dense(), _dense("gaps"), _dense("counts")
    zeros, as_zeros = _sparse("zero")
    missing, as_missing = _sparse("missing")
    fixed = np.random.default_rng(1).gamma(2.0, size=(7, 1))
    near, above = SILFNMF(2, threshold=2400.0, smoothness=0.9), SILFNMF(2, threshold=1.0, rate=0.4)
    return [
        Problem("silf, in the transition", near, full, full),
        Problem("silf, above", above, gaps, gaps),
        Problem("silf, counts", SILFNMF(2, beta=1.0, threshold=2.0), counts, counts),
        Problem("silf, sparse zeros", above, zeros, as_zeros, {"unstored": "zero"}),
        Problem("gaussian", tweedie(2.0), gaps, gaps),
        Problem("poisson, dense", tweedie(1.0), counts, counts),
        Problem("poisson, zeros", tweedie(1.0), zeros, as_zeros, {"unstored": "zero"}),
        Problem("gaussian, zeros", tweedie(2.0), zeros, as_zeros, {"unstored": "zero"}),
        Problem("poisson, missing", tweedie(1.0), missing, as_missing, {"unstored": "missing"}),
        Problem(
            "gaussian, missing, permuted",
            tweedie(2.0),
            missing,
            as_missing,
            {"unstored": "missing", "balance": True},
        ),
        Problem("compound", tweedie(0.5), gaps, gaps),
        Problem("gamma", tweedie(0.0), full, full),
        Problem("gamma priors", tweedie(1.0, shape_w=2.0, shape_h=0.6), counts, counts),
        Problem("frozen", tweedie(1.0, fixed_w=fixed), counts, counts),
    ]


PROBLEMS = problems()
BY_NAME = {problem.name: problem for problem in PROBLEMS}
