"""Particles: sequential Monte Carlo by Pólya urns, and Stein discrepancies.

A token waits for the draw of the one before it, about 30 ns at 10 states; four particles take
turns to fill that time, and counts are fetched ahead. Moving particles where they are resampled
costs, which is why their counts are bytes.

Stein: peak memory is that of the process above what it took before, data and particles being there
already. The naive way holds particles² × dimension numbers, so it is run on a smaller problem.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import sparse

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, line, per_call, race, timed
from benchmarks.processes import child, memory, restart_peak
from daskfactor.allocation.batches import BatchPlan, run_batch
from daskfactor.allocation.compiled_model import CompiledModel, compile_model
from daskfactor.allocation.counts import as_counts
from daskfactor.allocation.placement import place_counts
from daskfactor.executors import SerialExecutor
from daskfactor.kernels.jit import jit
from daskfactor.kernels.views import Workspace
from daskfactor.stein.particles import Particles, Posterior

NMF = dfac.AllocationModel.nmf


def tokens(size: int, total: int, parts: int = 10) -> Any:
    """Return tokens in blocks of rows and columns, in no order."""
    rng = np.random.default_rng(0)
    part, width = rng.integers(0, parts, total), size // parts
    where = [rng.permutation(size)[part * width + rng.integers(0, width, total)] for _ in range(2)]
    return sparse.COO(np.stack(where), np.ones(total, np.int64), shape=(size, size))


def compiled(X: Any, states: int = 10) -> CompiledModel:
    model = NMF(states)
    return compile_model(model, as_counts(X, model))


def batch(model: CompiledModel, particles: int, resampling: str | None) -> Callable[[], Any]:
    """Return a call that runs one batch of particles."""
    size: Any = {"placement": place_counts(model), "particles": particles, "seed": 1, "round": 0}
    how: Any = {"resampling": resampling, "least": 0.5, "separate_orders": False, "unfold": False}
    plan = BatchPlan(**size, **how)
    return lambda: run_batch(plan, 0, Workspace())


def peak_above(size: int, total: int) -> int:
    """Return the bytes that data, model and 1000 particles take; a process of its own."""
    batch(compiled(tokens(100, 500)), 4, "systematic")()
    before = restart_peak()
    batch(compiled(tokens(size, total)), 1000, "systematic")()
    return memory("VmHWM") - before


@line("10⁴ tokens, 10 states, 200 particles: from 10² × 10² to 10⁶ × 10⁶", "10² × 10²", minutes=0.2)
def sizes(run: Run) -> Iterator[Figure]:
    count, total = run.pick(4, 200), run.pick(10**3, 10**4)
    chosen = run.pick((10**2, 10**3), (10**2, 10**4, 10**6))
    calls = {f"{n}": batch(compiled(tokens(n, total)), count, "systematic") for n in chosen}
    taken = {n: 1e9 * t / total / count for n, t in per_call(calls, run.pick(1, 5)).items()}
    first, last = taken[f"{chosen[0]}"], taken[f"{chosen[-1]}"]
    yield Figure(last, "ns", first, "a token and particle", goal="ratio >= 0.67")
    low, high = (child(peak_above, size=n, total=total) for n in (chosen[0], chosen[-1]))
    yield Figure(high / 2**20, "MiB", low / 2**20, "memory of 1000 particles")


@line("tokens in 1000 × 1000, 10 states, 32 particles: time by total", minutes=0.1)
def totals(run: Run) -> Figure:
    chosen = run.pick((10**2, 10**3), (10**3, 10**4, 10**5, 10**6))
    calls = {f"{n}": batch(compiled(tokens(1000, n)), 32, "systematic") for n in chosen}
    taken = per_call(calls, run.pick(1, 3), 0.0)
    slope = np.polyfit(np.log(chosen), np.log([taken[f"{n}"] for n in chosen]), 1)[0]
    return Figure(float(slope), "", 1.0, "grows with the power", beside="the total")


@jit
def plain_loop(rows: Any, columns: Any, R: int, alphas: Any, tables: Any, w: Any, out: Any) -> None:
    """Do NMF as one would write it by hand: one particle after the other, nothing but tables."""
    Ci, Cj, S = tables
    ai, aj, ar, Ai, Aj = alphas
    x = np.uint64(88172645463325252)
    for p in range(out.size):
        Ci[:], Cj[:], S[:] = 0, 0, 0
        product, logs = 1.0, 0.0
        for t in range(rows.size):
            i, j = rows[t], columns[t]
            total = 0.0
            for r in range(R):
                urn = (ar + S[r]) / ((Ai + S[r]) * (Aj + S[r]))
                total += urn * (ai + Ci[i, r]) * (aj + Cj[j, r])
                w[r] = total
            x ^= x << np.uint64(13)
            x ^= x >> np.uint64(7)
            x ^= x << np.uint64(17)
            aim = np.float64(x >> np.uint64(11)) * 2.0**-53 * total
            r = 0
            while r < R - 1 and w[r] <= aim:
                r += 1
            S[r] += 1
            Ci[i, r] += 1
            Cj[j, r] += 1
            product *= total
            if product < 1e-150 or product > 1e150:
                logs += np.log(product)
                product = 1.0
        out[p] = logs + np.log(product)


def loop_over(X: Any, R: int, particles: int) -> Callable[[], Any]:
    coords = np.repeat(X.coords, X.data, axis=1)
    rows, columns = (np.unique(at, return_inverse=True)[1].astype(np.int32) for at in coords)
    order = np.random.default_rng(0).permutation(len(rows))
    tables = [np.zeros((at.max() + 1, R), np.int32) for at in (rows, columns)]
    state = (*tables, np.zeros(R, np.int64))
    alphas = (1 / (X.shape[0] * R), 1 / (X.shape[1] * R), 1 / R, 1 / R, 1 / R)
    out, w = np.empty(particles), np.empty(R)
    return lambda: plain_loop(rows[order], columns[order], R, alphas, state, w, out)


@line("10⁴ tokens in 1000 × 1000, 100 particles, one core", "a plain loop over tables", minutes=0.2)
def speed(run: Run) -> Iterator[Figure]:
    total, count = run.pick(10**3, 10**4), run.pick(4, 100)
    X = tokens(1000, total)
    for R in run.pick((10,), (3, 10, 50)):
        model = compiled(X, R)
        calls = {
            "ours": batch(model, count, None),
            "moved": batch(model, count, "systematic"),
            "peer": loop_over(X, R, count),
        }
        rates = {n: total * count / t / 1e6 for n, t in per_call(calls, run.pick(1, 5)).items()}
        unit = "million/s"
        yield Figure(rates["ours"], unit, rates["peer"], f"{R} states, no resampling", "more")
        yield Figure(rates["moved"], unit, rates["peer"], f"{R} states, resampled", "more")
        if run.has("tomotopy"):
            import tomotopy

            lda = tomotopy.LDAModel(k=R, alpha=0.1, eta=0.01, seed=1)
            for d in np.unique(X.coords[0]):
                lda.add_doc([str(w) for w in X.coords[1][X.coords[0] == d]])
            lda.train(1, workers=1)
            _, seconds = timed(lda.train, 20, workers=1)
            peer = 20 * X.nnz / seconds / 1e6
            beside = "tomotopy's collapsed Gibbs"
            yield Figure(rates["ours"], unit, peer, f"{R} states", "more", beside=beside)


def tensor(seed: int) -> tuple[Any, int]:
    """Return counts of a CP model, and how many components it has."""
    rng = np.random.default_rng([7, seed])
    R, total = 2 + seed % 3, int(rng.integers(200, 1201))
    share = rng.dirichlet(np.full(R, 5.0))
    factors = [rng.dirichlet(np.full(10, 0.3), R) for _ in range(3)]
    rates = np.einsum("r,ri,rj,rk->ijk", share, *factors)
    return rng.multinomial(total, rates.ravel()).reshape(rates.shape), R


@line(
    "ranks of 10 × 10 × 10 tensors of counts by particles",
    "by variational Bayes",
    minutes=5,
    long=True,
)
def ranks(run: Run) -> Iterator[Figure]:
    right, spent, seeds = {"ours": 0, "peer": 0}, {"ours": 0.0, "peer": 0.0}, run.pick(1, 4, 20)
    pseudo, most = {"r": 1.0, "i": 0.3, "j": 0.3, "k": 0.3}, run.pick(2**9, 2**14)
    methods = {
        "ours": dfac.SequentialMonteCarlo(max_particles=most),
        "peer": dfac.VariationalBayes(),
    }
    for seed in range(seeds):
        X, true = tensor(seed)
        for name, method in methods.items():
            given = X, dfac.AllocationModel.cp(1, concentration=pseudo), range(1, run.pick(4, 6))
            table, seconds = timed(dfac.select_rank, *given, method, **QUIET)
            spent[name] += seconds
            close = np.atleast_1d(table.attrs.get("not_distinguishable", []))
            right[name] += true == table.attrs["best"] or true in close
    shares = {name: 100 * count / seeds for name, count in right.items()}
    what = f"right or not told apart, of {seeds}"
    yield Figure(shares["ours"], "%", shares["peer"], what, better="more")
    yield Figure(spent["ours"] / seeds, "s", spent["peer"] / seeds, "a tensor")


# -- Stein ---------------------------------------------------------------------------------------


def problem(shape: tuple[int, int], K: int, count: int) -> tuple[Array, Array, Array, Any]:
    """Return data, particles, and a model."""
    rng = np.random.default_rng(0)
    V = rng.gamma(0.5, size=(shape[0], K)) @ rng.gamma(0.5, size=(K, shape[1]))
    V = (V + 0.1 * rng.random(shape)).astype(np.float32)
    size = np.sqrt(V.mean() / K)
    W = (size * rng.gamma(1.0, size=(count, shape[0], K))).astype(np.float32)
    H = (size * rng.gamma(1.0, size=(count, K, shape[1]))).astype(np.float32)
    fits = [float(((V - w @ h) ** 2).sum()) for w, h in zip(W[:5], H[:5], strict=True)]
    return V, W, H, dfac.SILFNMF(K).resolve(np.array(fits) / 2)


def discrepancy_costs(rows: int, columns: int, K: int, count: int) -> dict[str, float]:
    """Measure a Stein discrepancy; a process of its own."""
    tiny = problem((64, 64), K, 2)
    dfac.stein_discrepancy(tiny[1:3], tiny[0], tiny[3], progressbar=False)
    V, W, H, model = problem((rows, columns), K, count)
    before = restart_peak()
    _, seconds = timed(dfac.stein_discrepancy, (W, H), V, model, progressbar=False)
    return {"seconds": seconds, "memory": (memory("VmHWM") - before) / (W.nbytes + H.nbytes)}


@line("`stein_discrepancy` of 50 particles of 10304 × 400, K = 10", minutes=0.2)
def discrepancy(run: Run) -> Iterator[Figure]:
    rows, columns = run.pick((200, 50), (10304, 400))
    found = child(discrepancy_costs, rows=rows, columns=columns, K=10, count=run.pick(5, 50))
    yield Figure(found["seconds"], "s", None, "the call", goal="<= 10")
    yield Figure(found["memory"], "", None, "memory, of the particles'", goal="<= 2")


def naive(W: Array, H: Array, by_w: Array, by_h: Array, kernel: dfac.IMQ) -> Array:
    """Take all differences at once, as one would write it down."""
    total, mixed, value = 0.0, 0.0, 0.0
    for x, s, law in zip((W, H), (by_w, by_h), kernel.blocks, strict=True):
        x, s = (one.reshape(len(one), -1).astype(float) for one in (x, s))
        difference = x[:, None] - x
        r2 = (difference**2).sum(axis=2)
        gradient = 2 * law.slope(r2)[..., None] * difference
        mixed = mixed + s @ s.T
        value = value + law.value(r2)
        total = total + np.einsum("mnd,nd->mn", gradient, s) - np.einsum("mnd,md->mn", gradient, s)
        total = total + law.trace(r2, x.shape[1])
    return np.asarray(total + value * mixed)


@line("a Stein matrix of 50 particles of 644 × 100, K = 10, one core", "all differences in NumPy")
def matrix(run: Run) -> Figure:
    V, W, H, _ = problem(run.pick((60, 20), (644, 100)), 10, run.pick(5, 50))
    model = dfac.TweedieNMF(10, dispersion=1.0)
    with dfac.as_blocks(V, dtype="float32") as data:
        kernel = dfac.IMQ("median", "median")
        posterior = Posterior(SerialExecutor(), data, model, kernel).resolve()
        particles = Particles.of(W, H, data)
        found = posterior.stein_matrix(particles)

        def plain() -> Array:
            scores = posterior.scores(particles)
            return naive(W, H, scores.W, scores.H, found.kernel)

        error = float(np.abs(found.matrix / plain() - 1).max())
        calls = {"ours": lambda: posterior.stein_matrix(particles), "peer": plain}
        taken = race(calls, run.pick(1, 3))
    return Figure(taken["ours"], "s", taken["peer"], note=f"largest difference {error:.0e}")
