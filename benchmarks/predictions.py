"""Predictions of rows and cells that a run has not seen, and the best of very many columns.

*New rows*: `transform` of new rows under a run's draws, beside refits with them in the data. Means
of WH are compared where cells are hidden from everybody, in posterior sds. H of a refit has seen
the new rows, which moves its means by about √(new / known) of what H adds to a posterior sd: .05
for the users, .07 for the faces.

*Cold rows*: nothing is observed of a fifth of the rows, whose components follow from covariates
in part.

*Leave-one-out*: the eight cells of the largest Pareto k are left out one at a time, and the exact
sampler runs again without them.

*Recommending*: looking at every cell with every draw takes 2 I J K D operations, which the bound
on a row's scores makes unnecessary for nearly all cells.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr
from scipy import sparse, stats

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, Skip, line, timed
from benchmarks.processes import child, memory, restart_peak
from daskfactor.errors import DaskfactorError

Moments = tuple[Array, Array]


def moments(tree: Any, new: Array | None = None) -> Moments:
    """Return means and sds of WH, of some rows."""
    group = tree["posterior"].to_dataset()
    W, H = (group[name].values[0].astype(np.float64) for name in "WH")
    mu = (W if new is None else W[:, new]) @ H
    return mu.mean(axis=0), mu.std(axis=0)


def compared(V: Array, model: Any, sampler: Any, count: int, lengths: Any) -> Iterator[Figure]:
    """Compare `transform` of some rows with a refit, and with another refit for a measure."""
    new = np.zeros(len(V), bool)
    new[np.linspace(0, len(V) - 2, count).astype(int)] = True
    hidden = (np.random.default_rng(1).random(V.shape) < 0.25) & new[:, None]
    V = np.where(hidden, np.float32(np.nan), V.astype(np.float32))

    def fit(rows: Array, seed: int, **options: Any) -> Any:
        with dfac.as_blocks(V[rows], allow_empty=True) as data:
            own = QUIET | {"random_seed": seed, "keep": "draws"} | options
            return dfac.sample(data, model, sampler, **lengths, **own)

    trace = fit(~new, 3)
    settings: dict[str, Any] = {"progressbar": False}
    found = dfac.transform(trace, V[new], random_seed=1, **settings)  # compiles, too
    # Refits go on where the run ended: posteriors have modes, and others would end in other ones.
    last = trace["posterior"].to_dataset().isel(chain=0, draw=-1)
    W = np.empty((len(new), found.shape[-1]), np.float32)
    W[~new], W[new] = last["W"].values, found.values[0, -1]
    factors = {"W": (("row", "component"), W), "H": (("component", "column"), last["H"].values)}
    names = ("component", "component_name")  # the latter of models with biases
    start = xr.Dataset(factors, {own: last[own].variable for own in names if own in last.coords})
    every = np.ones(len(V), bool)
    one, seconds = timed(fit, every, 1, init=start, clock=time.process_time)
    other = fit(every, 2, init=start)
    settings |= {"random_seed": 0, "clock": time.process_time}
    found, spent = timed(dfac.transform, trace, V[new], **settings)
    H = trace["posterior"]["H"].values[0].astype(np.float64)
    ours = (found.values[0].astype(np.float64) @ H).mean(axis=0)
    (mean, sd), (again, _) = moments(one, new), moments(other, new)
    here = hidden[new]

    def off(left: Array, right: Array) -> float:
        return float(np.sqrt(np.mean(((left - right)[here] / sd[here]) ** 2)))

    beside = "a refit, from another"
    what = "means of hidden cells off"
    yield Figure(off(ours, mean), "sd", off(again, mean), what, goal="<= 0.1", beside=beside)
    yield Figure(spent, "s", seconds, "processor time", goal="ratio >= 20", beside="a refit")


@line("`transform` of 5 new users, of 2000 with ratings of 300 films", minutes=0.4)
def new_users(run: Run) -> Iterator[Figure]:
    rng, (rows, columns) = np.random.default_rng(0), run.pick((100, 40), (2000, 300))
    share = np.minimum(0.5, 0.02 + 0.08 * rng.gamma(1.0, 1.0, columns))
    left, right = (rng.normal(size=(n, 2)) for n in (rows, columns))
    V = 3.5 + 0.3 * left @ right.T + 0.9 * rng.normal(size=(rows, columns))
    V += 0.4 * rng.normal(size=(rows, 1)) + 0.5 * rng.normal(size=columns)
    V[rng.random(V.shape) > share] = np.nan
    lengths = run.pick({"draws": 20, "tune": 10}, {"draws": 1000, "tune": 100})
    yield from compared(V, dfac.GaussianMF(2), dfac.Gibbs(), 5, lengths)


@line("`transform` of 2 new faces, of 400 at 28 × 23 pixels", minutes=1.2, long=True)
def new_faces(run: Run) -> Iterator[Figure]:
    from daskfactor.demos import load_faces

    try:
        V = load_faces().truth.T.reshape(-1, 28, 4, 23, 4).mean(axis=(2, 4))
    except DaskfactorError as reason:
        raise Skip(str(reason)) from None
    V = np.ascontiguousarray(V.reshape(len(V), -1)[:: run.pick(8, 1)], np.float32)
    lengths = run.pick({"draws": 20, "tune": 10}, {"draws": 500, "tune": 300, "thin": 2})
    yield from compared(V, dfac.TweedieNMF(5), dfac.BlockHMC(), 2, lengths)


@line("counts of rows without data, 2000 × 300, with covariates", "without", minutes=0.3)
def cold_rows(run: Run) -> Iterator[Figure]:
    rng, (rows, columns) = np.random.default_rng(0), run.pick((100, 30), (2000, 300))
    X = rng.normal(size=(rows, 6))
    W = rng.gamma(2.0, np.exp(X @ (0.4 * rng.normal(size=(6, 5)))) / 2.0)
    truth = rng.poisson(W @ rng.gamma(0.5, 1.0, (5, columns)))
    cold = np.arange(rows) >= 0.8 * rows
    V = truth.astype(np.float32)
    V[cold] = np.nan
    lengths = dict.fromkeys(("draws", "tune"), run.pick(10, 150))
    found = {}
    for name, options in {"ours": {"covariates_w": X, "shape_w": "auto"}, "peer": {}}.items():
        model = dfac.TweedieNMF(5, dispersion=1.0, **options)
        with dfac.as_blocks(V, allow_empty=True) as data:
            trace = dfac.sample(data, model, dfac.Gibbs(), **lengths, **QUIET)
        L, R = (trace["posterior"][n].values[0].astype(np.float64) for n in "WH")
        mu = np.maximum(L[:, cold][:, :100] @ R, 1e-12)
        v = truth[cold][:100]
        density = np.log(stats.poisson.pmf(v, mu).mean(axis=0) + 1e-300).mean()
        error = np.sqrt(np.mean((mu.mean(axis=0) - v) ** 2))
        below, upto = (stats.poisson.cdf(at, mu).mean(axis=0) for at in (v - 1, v))
        at = below + rng.random(v.shape) * (upto - below)
        found[name] = float(-density), float(error), 100 * float(np.mean((at > 0.05) & (at < 0.95)))
    ours, peer = found["ours"], found["peer"]
    yield Figure(ours[0], "nats lost", peer[0], "log density of a cell")
    yield Figure(ours[1], "", peer[1], "root mean square error")
    yield Figure(ours[2], "%", peer[2], "in 90 % intervals with randomised ends", "more")


@line("PSIS leave-one-out, 40 × 20 counts, K = 3", "refits without the cell", minutes=0.4)
def leave_one_out(run: Run) -> Iterator[Figure]:
    import arviz as az

    lengths = run.pick({"draws": 30, "tune": 10}, {"draws": 800, "tune": 150})
    options, each = QUIET | lengths | {"chains": 2}, run.pick(1, 4, 8)

    def loo(tree: Any) -> tuple[Array, Array]:
        data = az.from_datatree(tree) if hasattr(az, "from_datatree") else tree
        found = az.loo(data, pointwise=True)
        own = found.loo_i if hasattr(found, "loo_i") else found.elpd_i
        return np.asarray(own), np.asarray(found.pareto_k)

    def mean_density(terms: Array) -> Array:
        flat = terms.reshape(-1, terms.shape[-1])
        return np.logaddexp.reduce(flat, axis=0) - np.log(len(flat))

    for mean, seed in run.pick(((3.0, 0),), ((3.0, 0), (30.0, 1))):
        rng, (rows, columns) = np.random.default_rng(seed), run.pick((8, 6), (40, 20))
        mu = rng.gamma(1, 1, (rows, 3)) @ rng.gamma(1, 1, (3, columns)) * mean / 3
        V, model = rng.poisson(mu).astype(float), dfac.TweedieNMF(3, dispersion=1.0)
        trace = dfac.sample(V, model, dfac.Gibbs(), **options)
        _, every = loo(dfac.log_likelihood(trace, np.ones(V.shape, bool)).load())
        chosen = np.argsort(-every)[:each]
        tree = dfac.log_likelihood(trace, np.divmod(chosen, columns)).load()
        (psis, k), seen = loo(tree), mean_density(tree["log_likelihood"]["V"].values)
        wrapper = dfac.sampling_wrapper(tree, V, model, dfac.Gibbs(), **options)
        exact = np.empty(each)
        for cell in range(each):
            train, held = wrapper.sel_observations(cell)
            drawn = wrapper.log_likelihood__i(held, wrapper.sample(train))
            exact[cell] = mean_density(drawn.values)[0]
        off, fit = (float(np.abs(one - exact).max()) for one in (psis, seen))
        what = f"mean {mean:g}, {each} cells of the largest k, largest difference"
        note = f"k up to {k.max():.2f}; {(every > 0.7).sum()} of {V.size} cells have k > .7"
        yield Figure(off, "nats", fit, what, beside="the fit to the cell itself", note=note)


def made_up_draws(folder: str, rows: int, columns: int, K: int, draws: int) -> None:
    """Write draws of factors whose relative spread differs from row to row, .05 to .5."""
    import zarr

    rng = np.random.default_rng(0)
    for name, size in (("W", rows), ("H", columns)):
        centre = rng.gamma(0.5, 1, (size, K)).astype("f4")
        width = rng.uniform(0.05, 0.5, (size, 1)).astype("f4")
        form = {"shape": (draws, size, K), "chunks": (1, min(size, 2**16), K), "dtype": "f4"}
        array = zarr.create_array(f"{folder}/{name}", **form)
        for draw in range(draws):
            array[draw] = centre * np.exp(width * rng.standard_normal((size, K), "f4"))


def recommended(folder: str, rows: int, columns: int) -> dict[str, float]:
    """Recommend, and check some rows by every cell of them; a process of its own."""
    import dask.array as da

    W, H = (da.from_zarr(f"{folder}/{name}")[None] for name in ("W", "H"))
    values = {
        "W": (("chain", "draw", "user", "component"), W),
        "H": (("chain", "draw", "component", "item"), H.transpose(0, 1, 3, 2)),
    }
    coords = {"chain": [0], "draw": range(W.shape[1]), "component": range(W.shape[3])}
    trace = xr.DataTree.from_dict({"posterior": xr.Dataset(values, coords)})
    rng = np.random.default_rng(1)
    at = np.repeat(np.arange(rows), 20)
    popular = (columns * rng.random(at.size) ** 2).astype(int)
    seen = sparse.coo_array((np.ones(at.size, "f4"), (at, popular)), shape=(rows, columns)).tocsr()
    dfac.recommend(trace.isel(user=slice(50), item=slice(200)), n=5, progressbar=False)  # compiles
    before, started = restart_peak(), os.times()
    found = dfac.recommend(trace, n=10, exclude=seen, by="mean", progressbar=False)
    ended, peak = os.times(), memory("VmHWM")
    checked = np.sort(rng.permutation(rows)[:20])
    pairs = zip(W[0], H[0], strict=True)
    mu = np.mean([np.asarray(w[checked]).astype(float) @ np.asarray(h).T for w, h in pairs], axis=0)
    mu[seen[checked].toarray() > 0] = -np.inf
    best = np.argsort(-mu, axis=1, kind="stable")[:, :10]
    equal = (found["position"].isel(user=checked).values == best).all()
    return {
        "seconds": ended.user + ended.system - started.user - started.system,
        "looked_at": found.attrs["looked_at"] / (rows * columns),
        "above": peak - before,
        "equal": float(equal),
    }


@line("the ten best columns for every row, 100 draws of 32 components", minutes=0.3)
def recommend(run: Run) -> Iterator[Figure]:
    size, K, draws = run.pick(500, 10_000, 100_000), 32, run.pick(5, 100)
    with tempfile.TemporaryDirectory() as folder:
        made_up_draws(folder, size, size, K, draws)
        found = child(recommended, folder=folder, rows=size, columns=size)
    what = f"{size:,} × {size:,}"
    every = 2.0 * size * size * K * draws / 50e9  # at 50 GFLOP/s
    beside = "every cell with every draw, at 50 GFLOP/s"
    yield Figure(found["seconds"], "s", every, f"{what}, processor time", beside=beside)
    yield Figure(100 * found["looked_at"], "%", None, f"{what}, cells looked at")
    yield Figure(found["above"] / 2**30, "GiB", None, f"{what}, memory above the start")
    what = f"{what}, equal to brute force on 20 rows"
    yield Figure(found["equal"], "", 1.0, what, "more", ">= 1", beside="equal")
