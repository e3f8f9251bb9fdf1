"""Ground truth for real-valued models, and a driver of the sampler's pieces."""

from typing import NamedTuple

import numpy as np

from daskfactor import SGHMC, SerialExecutor
from daskfactor.inference.chain import Chain
from daskfactor.inference.setting import RunOptions, Setting


def exact_one_component(V, noise, precision_w, precision_h, level):
    """Posterior mean and variance of ``level + w_i h_j``: two columns, quadrature over H. Given H
    the rows are independent and Gaussian. ``noise`` may be that of every cell."""
    nodes = np.linspace(-6, 6, 401) / np.sqrt(precision_h)
    h = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), axis=-1).reshape(-1, 2)
    residual, seen = np.nan_to_num(V - level), ~np.isnan(V)
    precision = precision_w + h**2 @ (seen / noise).T
    centre = h @ (residual / noise).T / precision
    log_weight = -0.5 * precision_h * (h**2).sum(axis=1)
    log_weight += (0.5 * centre**2 * precision - 0.5 * np.log(precision)).sum(axis=1)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = np.einsum("g,gi,gj->ij", weight, centre, h)
    second = np.einsum("g,gi,gj->ij", weight, centre**2 + 1 / precision, h**2)
    return mean + level, second - mean**2


class Draws(NamedTuple):
    """Draws of the Gibbs reference: noise (T,), precisions (T, K), mean, mu (T, I, J). Of a model
    with covariates of the rows also their ridge, and the row biases that they predict (T, I)."""

    noise: np.ndarray
    precision: np.ndarray
    column_bias_precision: np.ndarray
    mean: np.ndarray
    mu: np.ndarray
    ridge: np.ndarray
    predicted: np.ndarray


def gibbs(V, model, priors, sweeps, seed):
    """The whole model by Gibbs sampling in NumPy, everything ``"auto"``. The link from covariates
    of the rows is drawn given all rows, those without data included."""
    rng = np.random.default_rng(seed)
    seen, filled = (~np.isnan(V)).astype(float), np.nan_to_num(V)
    (rows, cols), K = V.shape, model.n_components
    W, H = rng.normal(size=(rows, K)), rng.normal(size=(cols, K))
    a, b = np.zeros(rows), np.full(cols, np.nanmean(V))
    noise, mean = priors.noise, priors.mean
    lam = np.array(priors.precision_w)
    la, lb = priors.row_bias_precision, priors.column_bias_precision
    X = np.zeros((rows, 1)) if model.covariates_w is None else model.covariates_w.values
    link, ridge = np.zeros((X.shape[1], K + 1)), priors.link_precision_w
    features = 0 if model.covariates_w is None else X.shape[1]
    kept = []
    for sweep in range(sweeps):
        one = np.ones((cols, 1))
        own = _regress(
            rng, filled - seen * b, seen, np.hstack([H, one]), np.r_[lam, la], noise, X @ link
        )
        W, a = own[:, :K], own[:, K]
        prior_mean = np.r_[np.zeros(K), mean]
        own = _regress(
            rng,
            (filled - seen * a[:, None]).T,
            seen.T,
            np.hstack([W, np.ones((rows, 1))]),
            np.r_[lam, lb],
            noise,
            prior_mean,
        )
        H, b = own[:, :K], own[:, K]
        mu = a[:, None] + b + W @ H.T
        rate = 0.5 * (seen * (filled - mu) ** 2).sum() + 0.01 * priors.noise
        noise = 1 / rng.gamma(1 + seen.sum() / 2, 1 / rate)
        if features:
            root = np.linalg.cholesky(X.T @ X + ridge * np.eye(features))
            centre = np.linalg.solve(root @ root.T, X.T @ np.c_[W, a])
            noises = np.linalg.solve(root.T, rng.normal(size=centre.shape))
            link = centre + noises / np.sqrt(np.r_[lam, la])
            rate = 1 / priors.link_precision_w + 0.5 * (np.r_[lam, la] * link**2).sum()
            ridge = rng.gamma(1 + link.size / 2, 1 / rate)
        squares = ((np.c_[W, a] - X @ link) ** 2).sum(0) + ridge * (link**2).sum(0)
        rates = 1 / np.array(priors.precision_w) + 0.5 * (squares[:K] + (H**2).sum(0))
        lam = rng.gamma(1 + (rows + features + cols) / 2, 1 / rates)
        rate = 1 / priors.row_bias_precision + 0.5 * squares[K]
        la = rng.gamma(1 + (rows + features) / 2, 1 / rate)
        spread = 0.5 * ((b - mean) ** 2).sum()
        lb = rng.gamma(1 + cols / 2, 1 / (1 / priors.column_bias_precision + spread))
        mean = b.mean() + rng.normal() / np.sqrt(cols * lb)
        if sweep >= sweeps // 10:
            kept.append((noise, np.sort(lam), lb, mean, mu, ridge, X @ link[:, K]))
    return Draws(*(np.array(values) for values in zip(*kept, strict=True)))


def _regress(rng, residual, seen, X, precision, noise, prior_mean):
    """Draws of the coefficients of every row: Bayesian linear regression on X."""
    Q = np.einsum("ij,jk,jl->ikl", seen, X, X) / noise + np.diag(precision)
    target = (residual * seen) @ X / noise + precision * prior_mean
    centre = np.linalg.solve(Q, target[..., None])[..., 0]
    factor = np.linalg.cholesky(Q)
    z = rng.normal(size=centre.shape)
    return centre + np.linalg.solve(np.swapaxes(factor, 1, 2), z[..., None])[..., 0]


def chain_of(data, model, sampler=None, *, tune=0, draws=1, number=0):
    """A chain that has not started."""
    kernel = (sampler or SGHMC()).kernel(model, data)
    options = RunOptions(draws, tune, 1, 1, 0, "moments", 0, str(data.dtype))
    return Chain(Setting(data, model, kernel, options, SerialExecutor()), number)


def run_chain(*given, **run):
    """A chain that has drawn."""
    chain = chain_of(*given, **run)
    chain.start()
    for end in chain.setting.ends:
        chain.advance(end)
        chain.forget()
    return chain
