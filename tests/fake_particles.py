"""A posterior of particles as `stein_posterior` returns it, made by hand, for tests of readers."""

import json

import numpy as np
import xarray as xr

from tests.fake_run import drawn_tree


def fake_particles(W, H, weight=None, *, kind="SILFNMF", words=None, draws=None):
    """The tree of particles W (M, I, K) and H (M, K, J); of several chains (chain, draw, ...)."""
    W, H = (np.asarray(one, dtype=np.float64) for one in (W, H))
    if W.ndim == 3:
        W, H = W[None], H[None]
    chains, count, rows, components = W.shape
    draw = np.arange(count) if draws is None else np.asarray(draws)
    names = {"word": [f"w{i}" for i in range(rows)] if words is None else words}
    names |= {"text": np.arange(H.shape[3]), "component": np.arange(components)}
    each = np.arange(chains * count, dtype=np.float64).reshape(chains, count)
    tree = drawn_tree(W, H, ("word", "text"), lp=-10.0 - each, draw=draw, **names)
    if weight is not None:
        found = {"weight": np.reshape(weight, (chains, count)), "objective": 90.0 + each}
        stats = {name: (("chain", "draw"), own) for name, own in found.items()}
        tree["sample_stats"] = xr.DataTree(tree["sample_stats"].to_dataset().assign(stats))
    if weight is not None and chains == 1:
        matrix = 2.0 * np.eye(count) + 0.5 * np.add.outer(each[0], each[0]) / max(1, each.max())
        values = {"stein_matrix": (("draw", "other_draw"), matrix), "discrepancy": 1.0}
        scales = {"scale_w": 0.01, "scale_h": 1000.0}
        tree["stein"] = xr.DataTree(xr.Dataset(values, {"draw": draw, "other_draw": draw}, scales))
        tree["constant_data"] = xr.DataTree(xr.Dataset({"threshold": 110.0}))
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
