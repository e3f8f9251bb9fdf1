"""A result as `sample` returns it, made of random numbers, for tests of what reads results."""

import json

import numpy as np
import xarray as xr

SHAPE = (12, 7)
COMPONENTS = 3


def fake_run(chains=2, draws=20, warmup=5, keep="draws"):
    rng = np.random.default_rng(7)
    rows, columns = SHAPE
    w = rng.gamma(2.0, 1.0, (chains, draws, rows, COMPONENTS))
    h = rng.gamma(2.0, 1.0, (chains, draws, COMPONENTS, columns))
    # The cycle numbers of the draws follow the warm-up's.
    names = {"row": [f"r{i}" for i in range(rows)], "column": np.arange(columns)}
    names["draw"] = np.arange(warmup, warmup + draws)
    tree = drawn_tree(w, h, lp=-1000.0 + rng.standard_normal((chains, draws)), **names)
    if keep != "draws":
        del tree["posterior"]

    def put(group, coords, **values):
        """Add a group of variables, each with names of its dimensions behind the chain's."""
        found = {name: (("chain", *dims.split()), own) for name, (dims, own) in values.items()}
        kept = tree[group].to_dataset() if group in tree.children else xr.Dataset()
        tree[group] = xr.DataTree(kept.assign(found).assign_coords(chain=range(chains), **coords))

    diverging = np.zeros((chains, draws), dtype=bool)
    diverging[0, 3] = True
    steps = np.full((chains, draws), 0.125)
    put("sample_stats", {}, step_size=("draw", steps), diverging=("draw", diverging))
    put(
        "posterior_moments",
        {name: names[name] for name in ("row", "column")},
        W_mean=("row component", w.mean(1)),
        W_var=("row component", w.var(1)),
        H_mean=("component column", h.mean(1)),
        H_var=("component column", h.var(1)),
        count=("", np.full(chains, draws)),
    )
    put(
        "warmup_sample_stats",
        {"warmup_draw": np.arange(warmup)},
        lp=("warmup_draw", -1500.0 + rng.random((chains, warmup))),
        step_size=("warmup_draw", np.full((chains, warmup), 0.125)),
    )
    put(
        "monitor",
        {"row_index": ("cell", [0, 11]), "column_index": ("cell", [1, 6])},
        mean=("cell", np.array([[4.0, 6.0], [6.0, 6.0]])[:chains]),
        var=("cell", np.array([[1.0, 2.0], [1.0, 2.0]])[:chains]),
        count=("", np.full(chains, draws)),
    )
    tree.attrs = {
        "inference_library": "daskfactor",
        "inference_library_version": "0.1.0",
        "created_at": "2026-01-01T00:00:00+00:00",
        "random_seed": 7,
        "model": json.dumps({"name": "TweedieNMF", "n_components": COMPONENTS, "beta": 1.0}),
        "sampler": json.dumps({"name": "PSGLD", "step": "auto"}),
        "data": json.dumps({"shape": SHAPE, "dims": ["row", "column"], "n_observed": 63}),
    }
    tree.attrs |= {"keep": keep, "draws": draws, "tune": warmup, "thin": 1, "chains": chains}
    tree.attrs |= {"dtype": "float32", "executor": "lanes", "sampling_time": 1.25}
    tree.attrs |= {"dispersion": 1.5, "rate_w": 0.5, "rate_h": 0.5, "format_version": 1}
    return tree


def drawn_tree(W, H, dims=("row", "column"), lp=None, **coords):
    """The tree of draws W (chain, draw, I, K) and H (chain, draw, K, J), without attributes."""
    each = ("chain", "draw")
    at = {"chain": np.arange(W.shape[0]), "draw": coords.pop("draw", np.arange(W.shape[1]))}
    values = {"W": ((*each, dims[0], "component"), W), "H": ((*each, "component", dims[1]), H)}
    groups = {"posterior": xr.Dataset(values, at | coords)}
    if lp is not None:
        groups["sample_stats"] = xr.Dataset({"lp": (each, lp)}, at)
    return xr.DataTree.from_dict(groups)
