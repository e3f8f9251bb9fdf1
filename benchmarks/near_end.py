"""The near end: small data, the first hour, what a user calls, beside what they would use instead.

Effective draws are bulk effective sample sizes (median over 100 cells of WH) per second of the
whole call, tuning and reading included. Kernels are compiled before the clock starts, unless it is
said that they are not.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

import daskfactor as dfac
from benchmarks import harness
from benchmarks.harness import QUIET, Array, Figure, Run, Skip, effective, line, per_call, race
from daskfactor.kernels import blockwise
from daskfactor.kernels.views import BlockView, Workspace
from daskfactor.machine import single_threaded_blas
from daskfactor.models.tweedie_law import Tweedie

CELLS = 100
FIRST = """
import numpy as np
import daskfactor as dfac
V = np.random.default_rng(0).poisson(3.0, (200, 100))
dfac.sample(V, dfac.TweedieNMF(5, beta=1.0), draws=10, tune=10, progressbar=False)
"""


def counts(rows: int, columns: int, components: int, mean: float = 5.0) -> Array:
    """Return Poisson counts of a mean, under factors from exponential laws."""
    rng = np.random.default_rng(rows)
    size = (mean / components) ** 0.5
    mu = rng.exponential(size, (rows, components)) @ rng.exponential(size, (components, columns))
    return rng.poisson(mu).astype(np.float32)


def watched(V: Array) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    return tuple(rng.integers(0, size, CELLS) for size in V.shape)  # type: ignore[return-value]


def worth(W: Array, H: Array, cells: tuple[Array, Array]) -> float:
    """Return the median effective sample size of WH at cells, from draws (chain, draw, ...)."""
    mu = np.einsum("cdpk,cdkp->cdp", W[:, :, cells[0]], H[..., cells[1]], dtype=np.float64)
    return float(np.median(effective(mu)))


def worth_of(tree: Any, cells: tuple[Array, Array]) -> float:
    group = tree["posterior"]
    return worth(group["W"].values, group["H"].values, cells)


# -- sample ------------------------------------------------------------------------------------


def defaults(V: Array, K: int, run: Run, repeats: int, goal: str, rate: str) -> Iterator[Figure]:
    """Measure `sample` at its defaults, beside itself on one block in one thread if repeated."""
    model, found, lengths = dfac.TweedieNMF(K), {}, run.pick({"draws": 50, "tune": 50}, {})
    ways: dict[str, dict[str, Any]] = {"ours": {}}
    if repeats:
        ways["serial"] = {"executor": "serial", "blocks": 1}

    def draw(name: str) -> None:
        found[name] = dfac.sample(V, model, **lengths, **QUIET, **ways[name])

    for options in ways.values():
        dfac.sample(V, model, draws=2, tune=2, **QUIET, **options)
    taken = race({name: partial(draw, name) for name in ways}, max(1, repeats), warm=False)
    rates = {name: worth_of(tree, watched(V)) / taken[name] for name, tree in found.items()}
    note = json.loads(found["ours"].attrs["sampler"])["type"]
    yield Figure(taken["ours"], "s", taken.get("serial"), "the call", goal=goal, note=note)
    what = "effective draws"
    yield Figure(rates["ours"], "draws/s", rates.get("serial"), what, better="more", goal=rate)


@line("`sample` of 200 × 100 counts, K = 10, defaults", "ours, serial with blocks=1", minutes=0.4)
def sample_small(run: Run) -> Iterator[Figure]:
    yield from defaults(counts(200, 100, 10), 10, run, run.pick(1, 2), "<= 1.0", ">= 115")


@line("`sample` of 1000 × 500 counts, K = 10, defaults", "ours, serial with blocks=1", minutes=0.2)
def sample_middle(run: Run) -> Iterator[Figure]:
    shape = run.pick((300, 150), (1000, 500))
    yield from defaults(counts(*shape, 10), 10, run, 1, "<= 3", "")


@line("`sample` of 5000 × 2000 counts, K = 10, defaults", minutes=1)
def sample_large(run: Run) -> Iterator[Figure]:
    shape = run.pick((500, 200), (5000, 2000))
    yield from defaults(counts(*shape, 10), 10, run, 0, "<= 30", "")


@line("`sample` of 200 × 100 counts, K = 5", "NumPyro's NUTS, the same model", "ratio >= 4")
def sample_nuts(run: Run) -> Figure:
    V = counts(200, 100, 5)
    model = dfac.TweedieNMF(5, dispersion=1.0)
    draws = run.pick(50, 500)
    dfac.sample(V, model, draws=2, tune=2, **QUIET)
    tree, seconds = harness.timed(dfac.sample, V, model, draws=draws, tune=draws, **QUIET)
    ours = worth_of(tree, watched(V)) / seconds
    theirs = nuts(V, model, draws) if run.has("numpyro") else None
    return Figure(ours, "draws/s", theirs, "effective draws", better="more")


def nuts(V: Array, model: dfac.TweedieNMF, draws: int) -> float:
    """Return effective draws per second of NUTS, of the call after the one that compiles."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    rate = float(model.auto_rate(float(V.mean())))
    K = model.n_components

    def poisson() -> None:
        law = numpyro.distributions
        W = numpyro.sample("W", law.Exponential(rate).expand([V.shape[0], K]).to_event(2))
        H = numpyro.sample("H", law.Exponential(rate).expand([K, V.shape[1]]).to_event(2))
        numpyro.sample("V", law.Poisson(W @ H).to_event(2), obs=jnp.asarray(V))

    chain = MCMC(NUTS(poisson), num_warmup=draws, num_samples=draws, progress_bar=False)
    chain.run(jax.random.key(0))
    begun = time.perf_counter()
    chain.run(jax.random.key(1))
    found = {name: np.asarray(one)[None] for name, one in chain.get_samples().items()}
    seconds = time.perf_counter() - begun
    return worth(found["W"], found["H"], watched(V)) / seconds


# -- optimize ----------------------------------------------------------------------------------


def thinned(rows: int, columns: int, K: int = 10) -> tuple[Array, Array]:
    """Return counts to learn from, and as many to be told, of the same means."""
    V = counts(rows, columns, K, 10.0)
    test = np.random.default_rng(2).binomial(V.astype(int), 0.5).astype(np.float32)
    return V - test, test


def told(test: Array, mu: Array, beta: int) -> float:
    """Return the deviance of counts from means, per cell."""
    mu = np.maximum(mu, 1e-10)
    if beta == 2:
        return float(np.mean((test - mu) ** 2))
    return float(np.mean(mu - test * np.log(mu)))


def to_the_same(shape: tuple[int, int], beta: int, run: Run) -> Figure:
    """Compare seconds to the same held-out deviance: within .1 % of the worse one's end."""
    from sklearn.decomposition import NMF

    train, test = thinned(*shape)
    loss, solver = {1: ("kullback-leibler", "mu"), 2: ("frobenius", "cd")}[beta]
    model = dfac.TweedieNMF(10, beta=float(beta))

    def ours(steps: int, tol: float = 0.0) -> float:
        method = (dfac.CoordinateDescent if beta == 2 else dfac.MultiplicativeUpdates)(steps, tol)
        point = dfac.optimize(train, model, method, **QUIET)
        return told(test, point["W"].values @ point["H"].values, beta)

    def theirs(steps: int, tol: float = 0.0) -> float:
        start: Any = {"init": "random", "random_state": 0}
        nmf = NMF(10, beta_loss=loss, solver=solver, max_iter=steps, tol=tol, **start)
        return told(test, nmf.fit_transform(train) @ nmf.components_, beta)

    ours(2), theirs(2)
    most = run.pick(20, 300)
    end = max(ours(most, 1e-4), theirs(most, 1e-4))
    goal = end + 1e-3 * abs(end)

    def first(fit: Callable[[int], float]) -> tuple[float, int]:
        steps = 5
        while True:
            deviance, seconds = harness.timed(fit, steps)
            if deviance <= goal or steps >= most:
                return seconds, steps
            steps = min(most, 2 * steps)

    (mine, count), (peer, other) = first(ours), first(theirs)
    return Figure(mine, "s", peer, note=f"{count} and {other} iterations")


OPTIMIZED = "`optimize` to the same held-out deviance"


@line(f"{OPTIMIZED}, KL, 200 × 100", "scikit-learn, mu", "ratio >= 0.67", minutes=0.2)
def optimize_kl_small(run: Run) -> Figure:
    return to_the_same((200, 100), 1, run)


@line(f"{OPTIMIZED}, KL, 1000 × 500", "scikit-learn, mu", "ratio >= 1.25", minutes=0.2)
def optimize_kl_middle(run: Run) -> Figure:
    return to_the_same(run.pick((300, 150), (1000, 500)), 1, run)


@line(f"{OPTIMIZED}, KL, 5000 × 2000", "scikit-learn, mu", "ratio >= 1.67", minutes=1.5)
def optimize_kl_large(run: Run) -> Figure:
    return to_the_same(run.pick((500, 200), (5000, 2000)), 1, run)


@line(f"{OPTIMIZED}, β = 2, 1000 × 500", "scikit-learn, cd", "ratio >= 0.83", minutes=0.2)
def optimize_squares_middle(run: Run) -> Figure:
    return to_the_same(run.pick((300, 150), (1000, 500)), 2, run)


@line(f"{OPTIMIZED}, β = 2, 5000 × 2000", "scikit-learn, cd", "ratio >= 1.25", minutes=1)
def optimize_squares_large(run: Run) -> Figure:
    return to_the_same(run.pick((500, 200), (5000, 2000)), 2, run)


# -- select_rank -------------------------------------------------------------------------------


def thinned_validation(V: Array, ranks: range) -> int:
    """Return the rank whose fit to a half of the counts tells the other half best."""
    from sklearn.decomposition import NMF

    test = np.random.default_rng(0).binomial(V.astype(int), 0.5)
    scores = {}
    for rank in ranks:
        nmf = NMF(rank, beta_loss="kullback-leibler", solver="mu", init="random", random_state=0)
        scores[rank] = told(test, nmf.fit_transform(V - test) @ nmf.components_, 1)
    return min(scores, key=scores.__getitem__)


def bi_validation(V: Array, ranks: range, folds: int = 3) -> int:
    """Return the rank by bi-cross-validation: blocks of rows and columns from the other blocks."""
    from sklearn.decomposition import NMF

    rows, columns = (np.random.default_rng(0).permutation(n) % folds for n in V.shape)
    scores = dict.fromkeys(ranks, 0.0)
    for rank in ranks:
        for i in range(folds):
            for j in range(folds):
                away, aside = rows == i, columns == j
                nmf = NMF(rank, beta_loss="kullback-leibler", solver="mu", random_state=0)
                W = nmf.fit_transform(V[~away][:, ~aside])
                left = nmf.transform(np.ascontiguousarray(V[away][:, ~aside]))
                nmf.components_, nmf.n_features_in_ = W.T.copy(), len(W)
                right = nmf.transform(np.ascontiguousarray(V[~away][:, aside].T))
                scores[rank] += told(V[away][:, aside], left @ right.T, 1)
    return min(scores, key=scores.__getitem__)


@line("`select_rank` of 200 × 150 counts, ranks 1 to 10", "", "<= 12", minutes=3.4)
def select_rank(run: Run) -> Iterator[Figure]:
    shape, ranks = run.pick(((60, 40), range(1, 4)), ((200, 150), range(1, 11)))
    V = counts(*shape, min(4, len(ranks)))
    dfac.log_evidence(V[:20, :20], dfac.TweedieNMF(2), **QUIET)
    table, ours = harness.timed(dfac.select_rank, V, dfac.TweedieNMF(1), ranks, **QUIET)
    for name, validate in (("bi-cross-", bi_validation), ("thinned ", thinned_validation)):
        rank, peer = harness.timed(validate, V, ranks)
        note = f"ranks {table.attrs['best']} and {rank}"
        what, beside = f"beside {name}validation", "scikit-learn, points"
        yield Figure(ours, "s", peer, what, beside=beside, note=note)


# -- the first answer --------------------------------------------------------------------------


def process(command: list[str], cache_folder: str | None = None) -> float:
    """Return the seconds of a new process."""
    environment = dict(os.environ)
    if cache_folder:
        environment["DASKFACTOR_JIT_CACHE"] = cache_folder
    options = {"check": True, "capture_output": True, "env": environment}
    return float(harness.timed(subprocess.run, command, **options)[1])


@line("a new process, kernels in the cache, 20 cycles", "import of xarray and pandas", "<= 1.5")
def new_process(run: Run) -> Figure:
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: process([sys.executable, "-c", FIRST]),
        "peer": lambda: process([sys.executable, "-c", "import xarray, pandas"]),
    }
    taken = race(calls, run.pick(1, 5))
    return Figure(taken["ours"], "s", taken["peer"])


@line("a new machine, nothing in the cache, 20 cycles", "", "<= 12", minutes=0.5)
def new_machine(run: Run) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        return Figure(process([sys.executable, "-c", FIRST], folder))


@line("the command line, kernels in the cache", "import of xarray and pandas")
def command_line(run: Run) -> Iterator[Figure]:
    shell = shutil.which("daskfactor", path=str(Path(sys.executable).parent))
    if shell is None:
        raise Skip("the package is not installed beside this interpreter")
    with tempfile.TemporaryDirectory() as folder:
        store, V = f"{folder}/run.zarr", counts(60, 40, 2)
        dfac.sample(V, dfac.TweedieNMF(2), draws=10, tune=10, store=store, **QUIET)
        commands = {"info run.zarr": ["info", store], "plot --help": ["plot", "--help"]}
        calls: dict[str, Callable[[], Any]]
        calls = {name: partial(process, [shell, *words]) for name, words in commands.items()}
        calls["peer"] = lambda: process([sys.executable, "-c", "import xarray, pandas"])
        taken = race(calls, run.pick(1, 3))
    for name in commands:
        yield Figure(taken[name], "s", taken["peer"], f"daskfactor {name}")


@line("the first task of a new worker, 20 cycles")
def new_worker(run: Run) -> Figure:
    from distributed import Client, LocalCluster

    def first_task() -> float:  # which the worker gets by its value: it has imported nothing yet
        begun = time.perf_counter()
        exec(FIRST, {})
        return time.perf_counter() - begun

    size: Any = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**size) as cluster, Client(cluster) as client:
        return Figure(float(client.submit(first_task).result()))


# -- a cycle -----------------------------------------------------------------------------------


@line("the log-likelihood of a draw, 1000 × 500, K = 10, one core", "its gradient", "ratio >= 1.0")
def evaluation(run: Run) -> Figure:
    rng, K = np.random.default_rng(0), 10
    V = counts(1000, 500, K)
    W, H = (rng.gamma(2.0, size=(n, K)).astype(np.float32) for n in V.shape)
    block, law, work = BlockView(V, 0, 0, *V.shape), Tweedie(1.0), Workspace()
    total = np.zeros(2)
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: blockwise.evaluate((block, law, (W, H), 1e-6), total, work),
        "gradient": lambda: blockwise.gradient((block, law, (W, H), 1e-6), 1.0, work),
    }
    with single_threaded_blas():
        taken = per_call(calls, run.pick(3, 9))
    fit, gradient = (1e9 * taken[name] / V.size for name in calls)
    return Figure(fit, "ns a cell", gradient)


@line(
    "a cycle of tuning, dispersion learnt, 10⁷ stored counts",
    "a cycle of drawing",
    "ratio >= 0.77",
    minutes=0.7,
)
def tuning(run: Run) -> Figure:
    rng, entries = np.random.default_rng(0), run.pick(10**5, 10**7)
    shape = (entries // 100, entries // 500)
    where = [rng.integers(0, size, entries, np.int32) for size in shape]
    values = (1 + rng.negative_binomial(0.5, 0.2, entries)).astype(np.float32)
    V = sparse.coo_array((values, where), shape=shape).tocsr()
    ends: dict[str, list[tuple[float, float]]] = {"tune": [], "draw": []}

    def note(event: dfac.RunEvent) -> None:
        if event.phase in ends:
            ends[event.phase].append((event.done, time.perf_counter()))

    lengths = run.pick({"draws": 10, "tune": 20}, {"draws": 30, "tune": 60})
    with dfac.as_blocks(V, unstored="zero", allow_empty=True) as data:
        model, sampler = dfac.TweedieNMF(10), dfac.PSGLD(warm_start=2)
        dfac.sample(data, model, sampler, keep="moments", callback=note, **lengths, **QUIET)
    rates = {}
    for phase, each in ends.items():
        (first, begun), (last, ended) = each[0], each[-1]
        rates[phase] = 1e3 * (ended - begun) / max(last - first, 1)
    return Figure(rates["tune"], "ms", rates["draw"], f"{V.nnz / 1e6:.2g} million")


# -- faces -------------------------------------------------------------------------------------


@cache
def restored(missing: float, short: bool) -> tuple[Any, float, int]:
    """Return the score of `demo faces`, the seconds of its call of `sample`, and red lights."""
    from daskfactor import demos
    from daskfactor.errors import DaskfactorError
    from daskfactor.results.verdict import lights_in

    try:
        images = demos.load_faces()
    except DaskfactorError as reason:
        raise Skip(str(reason)) from None
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/faces.zarr"
        lengths = {"draws": 5, "tune": 5, "thin": 1} if short else {}
        found = demos.run(images, missing=missing, store=store, progressbar=False, **lengths)
        summary = dfac.summarize(dfac.open_run(store))
    red = sum(light.status == "red" for light in lights_in(summary.attrs).values())
    seconds = next(score.seconds for score in found.scores if score.method == "posterior mean")
    return found, seconds, red


@line("`demo faces`", minutes=2)
def faces(run: Run) -> Iterator[Figure]:
    yield from scores_of(0.3, run)


@line("`demo faces`, less and more erased", minutes=4, long=True)
def faces_otherwise(run: Run) -> Iterator[Figure]:
    for missing in (0.1, 0.5):
        yield from scores_of(missing, run)


def scores_of(missing: float, run: Run) -> Iterator[Figure]:
    found, seconds, red = restored(missing, run.pick(True, False))
    share = f"{missing:.0%} erased"
    scores = {score.method: score.error for score in found.scores}
    peer = scores["multiplicative updates"]
    beside = "multiplicative updates"
    yield Figure(scores["posterior mean"], "", peer, f"{share}, relative error", beside=beside)
    yield Figure(100 * found.coverage, "%", None, f"{share}, in 90 % intervals", "more")
    if missing == 0.3:
        yield Figure(seconds, "s", None, f"{share}, the call of `sample`", goal="<= 120")
        yield Figure(float(red), "", None, f"{share}, red lights", goal="<= 0")
