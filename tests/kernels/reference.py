"""Plain-NumPy twins of the kernels: the definition that each of them is tested against.

Same names and arguments; no tiles, no floors on cost. They compute in the
dtype of the factors, so float64 factors give the reference values.
"""

import numpy as np

_MASK = 0xFFFFFFFF


def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 on arrays of counter words."""
    words = [np.asarray(c, np.uint64) for c in (c0, c1, c2, c3)]
    key = [int(k0), int(k1)]
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * words[0]
        p1 = np.uint64(0xCD9E8D57) * words[2]
        high0, low0 = p0 >> np.uint64(32), p0 & np.uint64(_MASK)
        high1, low1 = p1 >> np.uint64(32), p1 & np.uint64(_MASK)
        words = [
            high1 ^ words[1] ^ np.uint64(key[0]),
            low1,
            high0 ^ words[3] ^ np.uint64(key[1]),
            low0,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return tuple(word.astype(np.uint32) for word in words)


def _box_muller(radius_word, angle_word, dtype):
    # The kernel rounds the word to its dtype before it takes the logarithm.
    word = radius_word.astype(dtype) + np.asarray(0.5, dtype)
    radius = np.sqrt(-2 * np.log(word.astype(np.float64) * 2.0**-32))
    angle = 2 * np.pi * angle_word.astype(np.float64) / 2.0**32 - np.pi / 4
    return radius * np.cos(angle), radius * np.sin(angle)


def normals(shape, key, iteration, factor, row0, dtype):
    """Noise of an (n, K) band as float64, from uniforms rounded to ``dtype``."""
    n, components = shape
    quads = (components + 3) // 4
    rows, quad = np.meshgrid(np.arange(row0, row0 + n), np.arange(quads), indexing="ij")
    words = philox4x32(quad, rows, iteration, factor, int(key[0]), int(key[1]))
    pairs = [*_box_muller(words[0], words[1], dtype), *_box_muller(words[2], words[3], dtype)]
    return np.stack(pairs, axis=-1).reshape(n, 4 * quads)[:, :components]


def _noise(theta, key, iteration, factor, row0, coarse):
    if not coarse:
        return normals(theta.shape, key, iteration, factor, row0, theta.dtype)
    first = normals(theta.shape, key, 2 * iteration, factor, row0, theta.dtype)
    second = normals(theta.shape, key, 2 * iteration + 1, factor, row0, theta.dtype)
    return (first + second) / np.sqrt(2)


def langevin_step(theta, grad, metric, step, prior, address, coarse):
    """Twin of :func:`daskfactor.kernels.steps.langevin_step`."""
    z, (rate, shape) = _noise(theta, *address, coarse), prior
    if metric is None:
        deviation = np.sqrt(2 * step)
        push, limit = (shape - 1) / np.maximum(theta, 1e-30), 2 * deviation
        drift = np.clip(step * (grad - rate + push), -limit, limit)
    else:
        y = step / metric
        deviation, limit = np.sqrt(2 * y * theta), 2 * np.sqrt(2 * y * (theta + y))
        drift = np.clip(y * theta * (grad - rate), -limit, limit) + shape * y
    theta[...] = np.abs(theta + drift + deviation * z)


def step_moments(theta, grad, metric, step, rate, shape=1.0, matched=(1.0, np.inf)):
    """Mean and variance of an entry after a step that matches them."""
    share, bound = matched
    decay = np.exp(-step)
    s = (1 - decay) / metric
    highest = np.maximum(bound * np.sqrt(s * (theta + s)), 0)
    kept = np.clip(s * theta * (grad - rate), -theta, highest) + theta
    mean = kept + shape * s
    return mean, 2 * s * mean - s**2 * shape - share * s * (kept - decay * theta)


def moment_step(theta, grad, metric, step, rate, address, shape=1.0, matched=(1.0, np.inf)):
    """Twin of `langevin_step` that matches moments, where variance <= 2 mean².

    ``address`` is (key, iteration, factor, row0, coarse).
    """
    z = _noise(theta, *address)
    mean, variance = step_moments(theta, grad, metric, step, rate, shape, matched)
    r = np.maximum(2 * mean**2 / variance, 1)
    square = r - 1 + np.sqrt(r * (r - 1))
    theta[...] = np.maximum(mean * (np.sqrt(square) + z) ** 2 / (1 + square), 1e-37)


def deviance(v, mu, beta):
    """d_beta(v | mu) by its definition, with the limit at v = 0; in extended precision."""
    v, mu, b = (np.asarray(x, np.longdouble) for x in (v, mu, beta))
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta == 1:
            return np.where(v == 0, mu, v * np.log(v / mu) - v + mu)
        if beta == 0:
            return v / mu - np.log(v / mu) - 1
        data_term = np.where(v == 0, 0, v**b / (b * (b - 1)))
        return data_term - v * mu ** (b - 1) / (b - 1) + mu**b / b


def watched_cells(m, n):
    """Positions of some cells, in row-major order."""
    at = np.unique(np.linspace(0, m * n - 1, 6).astype(int))
    return (at // n).astype(np.int32), (at % n).astype(np.int32)


def everything(V, W, H, beta, *, scale=1.7, floor=1e-6, start=7.0):
    """Twin of `tests.kernels.problems.everything` for a block as an array, NaN where missing."""
    means = W.astype(float) @ H.T.astype(float)
    mu, seen = np.maximum(means, floor), ~np.isnan(V)
    v = np.where(seen, V, 1.0)
    residual = seen * (v - mu) * mu ** (beta - 2)
    curvature = seen * mu ** (beta - 1)
    off = np.where(seen, deviance(v, mu, beta), 0.0).astype(float)
    found = {"fit": start + np.array([-off.sum(), (residual * (v - mu)).sum()])}
    for name, terms, begun in (
        ("gradient", scale * residual, 0.0),
        ("gradient again", scale * residual, 0.0),
        ("curvature", curvature, start),
        ("numerator", seen * v * mu ** (beta - 2), start),
        ("denominator", curvature, start),
        ("slope", residual, start),
        ("slope alone", residual, start),
    ):
        found[f"{name} W"], found[f"{name} H"] = begun + terms @ H, begun + terms.T @ W
    found["fits W"], found["fits H"] = start - off.sum(axis=1), start - off.sum(axis=0)
    found["mean"] = 1.0 + (means[watched_cells(*V.shape)] - 1.0) / 3
    found["m2"] = 0.5 + (found["mean"] - 1.0) ** 2 * 6  # the third number of three
    return found


def _time_steps(weights, columns, step):
    """The d of the momentum kernels, (n, K)."""
    _, precision, curvature, free = columns
    return free * np.sqrt(step / (weights * curvature + precision))


def kick_drift(x, momentum, grad, weights, columns, step, share):
    """Twin of :func:`daskfactor.kernels.langevin.kick_drift`."""
    d = _time_steps(weights, columns, step)
    momentum += d * (grad - columns[1] * (x - columns[0]))
    x += share * d * momentum


def drift(x, momentum, weights, columns, step, share):
    """Twin of :func:`daskfactor.kernels.langevin.drift`."""
    x += share * _time_steps(weights, columns, step) * momentum


def refresh(momentum, keep, key, iteration, factor, row0):
    """Twin of :func:`daskfactor.kernels.langevin.refresh`."""
    z = normals(momentum.shape, key, iteration, factor, row0, momentum.dtype)
    momentum[...] = keep * momentum + np.sqrt(1 - keep**2) * z


def sums_of_squares(x, centre, out):
    """Twin of :func:`daskfactor.kernels.langevin.sums_of_squares`."""
    out += ((x.astype(np.float64) - centre) ** 2).sum(axis=0)


def equations(V, other):
    """G (m, K, K) and t (m, K) of :mod:`daskfactor.kernels.regression`; NaN where missing."""
    wide = other.astype(np.float64)
    grams = np.einsum("ij,ja,jb->iab", ~np.isnan(V), wide, wide, optimize=True)
    return grams, np.nan_to_num(V).astype(np.float64) @ wide


def draw_rows(values, grams, targets, columns, noise, z):
    """Twin of :func:`daskfactor.kernels.regression.draw_rows`; grams are (m, K, K)."""
    mean, precision, _, moves = columns
    free = moves > 0
    A = grams[:, free][:, :, free] / noise + np.diag(precision[free])
    held = np.einsum("iab,ib->ia", grams[:, :, ~free], values[:, ~free].astype(np.float64))
    b = (targets - held)[:, free] / noise + (precision * mean)[free]
    upper = np.swapaxes(np.linalg.cholesky(A), 1, 2)
    drawn = np.linalg.solve(A, b[..., None]) + np.linalg.solve(upper, z[:, free, None])
    values[:, free] = drawn[..., 0]
