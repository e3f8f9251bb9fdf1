"""A posterior of particles as `stein_posterior` returns it, made by hand, for tests of readers."""

import json

import numpy as np
import xarray as xr


def fake_particles(W, H, weight=None, *, kind="SILFNMF", words=None, draws=None):
    """The tree of particles W (M, I, K) and H (M, K, J); of several chains (chain, draw, ...)."""
    W, H = (np.asarray(one, dtype=np.float64) for one in (W, H))
    if W.ndim == 3:
        W, H = W[None], H[None]
    chains, count, rows, components = W.shape
    masses = None if weight is None else np.reshape(weight, (chains, count))
    chain = np.arange(chains)
    draw = np.arange(count) if draws is None else np.asarray(draws)
    names = {
        "chain": chain,
        "draw": draw,
        "word": [f"w{i}" for i in range(rows)] if words is None else words,
        "text": np.arange(H.shape[3]),
        "component": np.arange(components),
    }
    each = np.arange(chains * count, dtype=np.float64).reshape(chains, count)
    stats = {"lp": (("chain", "draw"), -10.0 - each)}
    if masses is not None:
        stats["weight"] = (("chain", "draw"), masses)
        stats["objective"] = (("chain", "draw"), 90.0 + each)
    groups = {
        "posterior": xr.Dataset(
            {
                "W": (("chain", "draw", "word", "component"), W),
                "H": (("chain", "draw", "component", "text"), H),
            },
            coords=names,
        ),
        "sample_stats": xr.Dataset(stats, coords={"chain": chain, "draw": draw}),
    }
    if masses is not None and chains == 1:
        matrix = 2.0 * np.eye(count) + 0.5 * np.add.outer(each[0], each[0]) / max(1, each.max())
        groups["constant_data"] = xr.Dataset({"threshold": 110.0})
        groups["stein"] = xr.Dataset(
            {"stein_matrix": (("draw", "other_draw"), matrix), "discrepancy": 1.0},
            coords={"draw": draw, "other_draw": draw},
            attrs={"scale_w": 0.01, "scale_h": 1000.0},
        )
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = {"model": json.dumps({"type": kind, "n_components": components})}
    return tree


def random_particles(count=5, rows=9, components=3, columns=7, seed=0, noise=0.05):
    """Particles around one factorization whose components are plainly different, and masses."""
    rng = np.random.default_rng(seed)
    W = rng.gamma(0.3, size=(rows, components)) + np.eye(rows, components)
    H = rng.gamma(0.3, size=(components, columns)) + np.eye(components, columns)
    W = W * np.exp(noise * rng.normal(size=(count, *W.shape)))
    H = H * np.exp(noise * rng.normal(size=(count, *H.shape)))
    return W, H, rng.dirichlet(np.ones(count))
