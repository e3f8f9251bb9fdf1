"""A result as `sample` returns it, made of random numbers, for tests of what reads results."""

import json

import numpy as np
import xarray as xr

SHAPE = (12, 7)
COMPONENTS = 3


def fake_run(chains=2, draws=20, warmup=5, keep="draws"):
    rng = np.random.default_rng(7)
    rows, columns = SHAPE
    row_names = [f"r{i}" for i in range(rows)]
    chain = np.arange(chains)
    w = rng.gamma(2.0, 1.0, (chains, draws, rows, COMPONENTS))
    h = rng.gamma(2.0, 1.0, (chains, draws, COMPONENTS, columns))
    names = {"chain": chain, "row": row_names, "column": np.arange(columns)}
    # The cycle numbers of the draws: they follow the warm-up's.
    cycles = {"draw": np.arange(warmup, warmup + draws)}
    lp = -1000.0 + rng.standard_normal((chains, draws))
    diverging = np.zeros((chains, draws), dtype=bool)
    diverging[0, 3] = True
    groups = {
        "posterior_moments": xr.Dataset(
            {
                "W_mean": (("chain", "row", "component"), w.mean(1)),
                "W_var": (("chain", "row", "component"), w.var(1)),
                "H_mean": (("chain", "component", "column"), h.mean(1)),
                "H_var": (("chain", "component", "column"), h.var(1)),
                "count": (("chain",), np.full(chains, draws)),
            },
            coords=names,
        ),
        "sample_stats": xr.Dataset(
            {
                "lp": (("chain", "draw"), lp),
                "step_size": (("chain", "draw"), np.full((chains, draws), 0.125)),
                "diverging": (("chain", "draw"), diverging),
            },
            coords={"chain": chain, **cycles},
        ),
        "warmup_sample_stats": xr.Dataset(
            {
                "lp": (("chain", "warmup_draw"), -1500.0 + rng.random((chains, warmup))),
                "step_size": (("chain", "warmup_draw"), np.full((chains, warmup), 0.125)),
            },
            coords={"chain": chain, "warmup_draw": np.arange(warmup)},
        ),
        "monitor": xr.Dataset(
            {
                "mean": (("chain", "cell"), np.array([[4.0, 6.0], [6.0, 6.0]])[:chains]),
                "var": (("chain", "cell"), np.array([[1.0, 2.0], [1.0, 2.0]])[:chains]),
                "count": (("chain",), np.full(chains, draws)),
            },
            coords={
                "chain": chain,
                "row_index": ("cell", [0, 11]),
                "column_index": ("cell", [1, 6]),
            },
        ),
    }
    if keep == "draws":
        groups["posterior"] = xr.Dataset(
            {
                "W": (("chain", "draw", "row", "component"), w),
                "H": (("chain", "draw", "component", "column"), h),
            },
            coords={**names, **cycles},
        )
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = {
        "inference_library": "daskfactor",
        "inference_library_version": "0.1.0",
        "created_at": "2026-01-01T00:00:00+00:00",
        "random_seed": 7,
        "model": json.dumps({"name": "TweedieNMF", "n_components": COMPONENTS, "beta": 1.0}),
        "sampler": json.dumps({"name": "PSGLD", "step": "auto"}),
        "data": json.dumps({"shape": SHAPE, "dims": ["row", "column"], "n_observed": 63}),
        "keep": keep,
        "draws": draws,
        "tune": warmup,
        "thin": 1,
        "chains": chains,
        "dtype": "float32",
        "executor": "lanes",
        "sampling_time": 1.25,
        "dispersion": 1.5,
        "rate_w": 0.5,
        "rate_h": 0.5,
        "format_version": 1,
    }
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
