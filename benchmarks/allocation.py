"""Sequential Monte Carlo by Pólya urns: what it costs, and whether it finds ranks.

Run ``python benchmarks/allocation.py sizes|totals|speed|workers|ranks`` (half a minute to a few
minutes each). Times of one core are CPU times of the thread, the best of interleaved repeats;
``workers`` measures time on the clock.

sizes    10^4 tokens in matrices from 10^2 x 10^2 to 10^6 x 10^6, of 10 blocks of rows and
         columns each; memory is the peak of a process of its own, and that of one particle
totals   10^3 to 10^6 tokens in a matrix of 1000 x 1000
speed    tokens x particles a second, beside the same in a plain loop over count tables for one
         kind of model, one particle after the other, and collapsed Gibbs sampling of
         tomotopy, tokens a second, if it is installed
workers  the same batches on one lane and on two; with --cluster, on one worker and on two
ranks    20 tensors of 10 x 10 x 10 with 2, 3 or 4 components (shares Dirichlet(5), factors
         Dirichlet(0.3)) and 200 to 1200 tokens; pseudo-counts of the model: 1 and 0.3.
         A rank is right if it is the generating one, tied if the two evidences differ by
         no more than two standard errors

What limits the speed: a token waits for the draw of the one before it, since that changes what
a state weighs, about 30 ns at 10 states; four particles take turns to fill that time. The
counts that a token needs lie somewhere else than the last one's, but where is known long
before, so they are fetched ahead. Without resampling nothing else costs; with it, moving
particles does, which is why their counts are bytes, and lists where rows are short.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import sparse

from daskfactor.allocation.batches import BatchPlan, run_batch
from daskfactor.allocation.compiled_model import CompiledModel, compile_model
from daskfactor.allocation.counts import as_counts
from daskfactor.allocation.placement import place_counts
from daskfactor.allocation.smc import SequentialMonteCarlo
from daskfactor.allocation.variational import VariationalBayes
from daskfactor.executors import make_executor
from daskfactor.kernels.jit import jit
from daskfactor.kernels.views import Workspace
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import ignore

SIZES = tuple(10**n for n in range(2, 7))
TOTALS = tuple(10**n for n in range(3, 7))
STATES = (3, 10, 50)
RANKS = range(1, 7)


def blocks(size: int, total: int, parts: int = 10) -> Any:
    """Tokens in ``parts`` blocks of rows and columns, in no order."""
    rng = np.random.default_rng(0)
    part, width = rng.integers(0, parts, total), size // parts
    rows, columns = (
        rng.permutation(size)[part * width + rng.integers(0, width, total)] for _ in range(2)
    )
    return sparse.COO(np.stack([rows, columns]), np.ones(total, np.int64), shape=(size, size))


def compiled_of(X: Any, model: AllocationModel) -> CompiledModel:
    return compile_model(model, as_counts(X, model))


def plan_of(
    compiled: CompiledModel, particles: int, resampling: str | None = "systematic"
) -> BatchPlan:
    return BatchPlan(
        placement=place_counts(compiled),
        particles=particles,
        resampling=resampling,
        least=0.5,
        own=False,
        keep=False,
        seed=1,
        round=0,
    )


def batch(plan: BatchPlan) -> Any:
    return run_batch(plan, 0, Workspace())


def best_times(calls: list[Callable[[], Any]], repeats: int = 5) -> list[float]:
    """CPU seconds of each, the best of interleaved repeats."""
    best = [np.inf] * len(calls)
    for call in calls:
        call()
    for _ in range(repeats):
        for n, call in enumerate(calls):
            start = time.thread_time()
            call()
            best[n] = min(best[n], time.thread_time() - start)
    return best


def sizes(particles: int = 200) -> None:
    compiled = [compiled_of(blocks(size, 10**4), AllocationModel.nmf(10)) for size in SIZES]
    for resampling in ("systematic", None):
        plans = [plan_of(own, particles, resampling) for own in compiled]
        seconds = best_times([lambda j=j: batch(j) for j in plans])
        print(f"\n10^4 tokens, 10 states, {particles} particles, resampling {resampling}")
        for size, plan, taken in zip(SIZES, plans, seconds, strict=True):
            each, moved = taken / particles * 1e5, int(batch(plan).resampled.sum())
            print(
                f"  {size:>8} squared: {each:6.1f} ns a token and particle, {moved:>3} times "
                f"resampled, {plan.placement.particle_bytes:>6} bytes a particle"
            )
        print(f"  slowest / fastest size: {max(seconds) / min(seconds):.2f}")
    peaks = []
    for size in SIZES:
        command = [sys.executable, __file__, "peak", "--size", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        base, peak = map(float, done.split())
        peaks.append(peak)
        print(f"  {size:>8} squared: peak {peak:.0f} MB, of which {peak - base:.0f} MB ours")
    print(f"  largest / smallest peak: {max(peaks) / min(peaks):.2f}")


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak(size: int) -> None:
    """Memory of a process before and after data, model and 1000 particles in one batch."""
    batch(plan_of(compiled_of(blocks(100, 500), AllocationModel.nmf(10)), 4))
    base = megabytes()
    batch(plan_of(compiled_of(blocks(size, 10**4), AllocationModel.nmf(10)), 1000))
    print(base, megabytes())


def totals(particles: int = 32) -> None:
    plans = [
        plan_of(compiled_of(blocks(1000, total), AllocationModel.nmf(10)), particles)
        for total in TOTALS
    ]
    seconds = best_times([lambda j=j: batch(j) for j in plans], 3)
    print(f"\n1000 x 1000, 10 states, {particles} particles")
    for total, taken in zip(TOTALS, seconds, strict=True):
        each = taken / total / particles * 1e9
        print(f"  {total:>8} tokens: {taken:.4f} s, {each:.1f} ns a token and particle")
    slope = np.polyfit(np.log(TOTALS), np.log(seconds), 1)[0]
    print(f"  time grows with the total to the power {slope:.2f}")


@jit
def plain_loop(rows: Any, columns: Any, R: int, alphas: Any, tables: Any, w: Any, out: Any) -> None:
    """NMF as one would write it by hand: one particle after the other, nothing but the tables."""
    Ci, Cj, S = tables
    ai, aj, ar, Ai, Aj = alphas
    x = np.uint64(88172645463325252)
    for p in range(out.size):
        Ci[:] = 0
        Cj[:] = 0
        S[:] = 0
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
    counts = (*tables, np.zeros(R, np.int64))
    alphas = (1 / (X.shape[0] * R), 1 / (X.shape[1] * R), 1 / R, 1 / R, 1 / R)
    out, w = np.empty(particles), np.empty(R)
    return lambda: plain_loop(rows[order], columns[order], R, alphas, counts, w, out)


def speed(particles: int = 100) -> None:
    total = 10**4
    print(f"\n{total} tokens, {particles} particles; millions of tokens x particles a second")
    for R in STATES:
        for size in (100, 1000, 10**6):
            X = blocks(size, total)
            compiled = compiled_of(X, AllocationModel.nmf(R))
            plans = [plan_of(compiled, particles, how) for how in (None, "systematic")]
            calls = [*(lambda j=j: batch(j) for j in plans), loop_over(X, R, particles)]
            rates = total * particles / np.array(best_times(calls, 7)) / 1e6
            print(
                f"  {R:>3} states, {size:>7} squared: {rates[0]:5.1f}, resampled {rates[1]:5.1f}, "
                f"plain loop {rates[2]:5.1f}; of the loop {rates[0] / rates[2]:.2f} and "
                f"{rates[1] / rates[2]:.2f}"
            )
    print(f"  other models, 10 states: {other_models(particles)}")
    tomotopy_speed(blocks(1000, 10**5))


def other_models(particles: int) -> str:
    X = blocks(100, 10**4)
    models = {
        "topics": AllocationModel.topics(10),
        "symmetric": AllocationModel.symmetric_nmf(10, concentration_shared=0.1),
        "chain of 5 and 2": AllocationModel("r -> s -> i, r -> j", {"r": 5, "s": 2}),
    }
    told = []
    for name, model in models.items():
        plan = plan_of(compiled_of(X, model), particles)
        (taken,) = best_times([lambda j=plan: batch(j)], 3)
        told.append(f"{name} {particles * 1e-2 / taken:.1f}")
    return ", ".join(told)


def tomotopy_speed(X: Any) -> None:
    try:
        import tomotopy
    except ImportError:
        print("  tomotopy: not installed")
        return
    for R in STATES:
        model = tomotopy.LDAModel(k=R, alpha=0.1, eta=0.01, seed=1)
        rows, columns = X.coords
        for d in np.unique(rows):
            model.add_doc([str(w) for w in columns[rows == d]])
        model.train(1, workers=1)
        start = time.perf_counter()
        model.train(20, workers=1)
        rate = 20 * X.nnz / (time.perf_counter() - start) / 1e6
        print(f"  tomotopy's collapsed Gibbs, {R} topics: {rate:.1f} million tokens a second")


def workers(cluster: bool = False) -> None:
    from daskfactor.executors import LanesExecutor

    if not cluster:
        compare_workers({"1 lane": LanesExecutor(1), "2 lanes": LanesExecutor(2)})
        return
    from dask.distributed import Client

    with (
        Client(n_workers=1, threads_per_worker=1, dashboard_address=None) as one,
        Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as two,
    ):
        made = {"1 worker": make_executor("tasks", one), "2 workers": make_executor("tasks", two)}
        compare_workers(made)


def compare_workers(executors: dict[str, Any], repeats: int = 5) -> None:
    compiled = compiled_of(blocks(1000, 10**4), AllocationModel.nmf(10))
    settings = SequentialMonteCarlo(32, 64, target=1e9, max_particles=2048, moves=0)
    times: dict[str, list[float]] = {name: [] for name in executors}
    busy: dict[str, list[float]] = {name: [] for name in executors}
    values = set()
    for repeat in range(repeats + 1):
        for name, executor in executors.items():
            start, used = time.perf_counter(), time.process_time()
            values.add(quiet(compiled, settings, executor.map).log_evidence)
            if repeat:
                times[name].append(time.perf_counter() - start)
                busy[name].append(time.process_time() - used)
    for executor in executors.values():
        executor.close()
    first = np.array(next(iter(times.values())))
    print(f"\n64 batches of 32 particles, 10^4 tokens; the same bits: {len(values) == 1}")
    for name, taken in times.items():
        ratios = first / np.array(taken)
        print(
            f"  {name}: best {min(taken):.2f} s, speed-up {min(first) / min(taken):.2f}, "
            f"of interleaved runs {np.median(ratios):.2f} ({ratios.min():.2f} to "
            f"{ratios.max():.2f}); {min(busy[name]):.2f} s of CPU in this process"
        )


def quiet(compiled: CompiledModel, settings: SequentialMonteCarlo, mapped: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return settings.run(compiled, 1, mapped, ignore)


def tensor(seed: int) -> tuple[Any, int]:
    """Counts of a CP model, and how many components it has."""
    rng = np.random.default_rng([7, seed])
    R, total = 2 + seed % 3, int(rng.integers(200, 1201))
    share = rng.dirichlet(np.full(R, 5.0))
    factors = [rng.dirichlet(np.full(10, 0.3), R) for _ in range(3)]
    rates = np.einsum("r,ri,rj,rk->ijk", share, *factors)
    return rng.multinomial(total, rates.ravel()).reshape(rates.shape), R


def ranks() -> None:
    right = {"SMC": 0, "VB": 0}
    seconds = {"SMC": 0.0, "VB": 0.0}
    executor, settings = make_executor("lanes"), SequentialMonteCarlo(max_particles=2**14)
    pseudo = {"r": 1.0, "i": 0.3, "j": 0.3, "k": 0.3}
    for seed in range(20):
        X, R = tensor(seed)
        smc, vb = [], []
        for rank in RANKS:
            compiled = compiled_of(X, AllocationModel.cp(rank, concentration=pseudo))
            start = time.perf_counter()
            smc.append(quiet(compiled, settings, executor.map))
            middle = time.perf_counter()
            vb.append(VariationalBayes().run(compiled, 1, executor.map).elbo)
            seconds["SMC"] += middle - start
            seconds["VB"] += time.perf_counter() - middle
        values = np.array([found.log_evidence for found in smc])
        errors = np.array([found.standard_error for found in smc])
        best, true = int(values.argmax()), R - 1
        tied = values[best] - values[true] <= 2 * np.hypot(errors[best], errors[true])
        right["SMC"] += int(best == true or tied)
        right["VB"] += int(int(np.argmax(vb)) == true)
        used = max(found.particles * len(found.batch_log_z) for found in smc)
        print(
            f"  {X.sum():>5} tokens of {R}: SMC {best + 1}{' (tied)' * (tied and best != true)}, "
            f"VB {int(np.argmax(vb)) + 1}; above rank {R}: {values[best] - values[true]:.2f} "
            f"± {np.hypot(errors[best], errors[true]):.2f}; worst error {errors.max():.2f}, "
            f"spread {max(found.spread for found in smc):.2f}, up to {used} particles",
            flush=True,
        )
    executor.close()
    for name, count in right.items():
        print(f"  {name}: {count} of 20 right or tied, {seconds[name]:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Sequential Monte Carlo by Pólya urns.")
    parser.add_argument("what", choices=("sizes", "totals", "speed", "workers", "ranks", "peak"))
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--cluster", action="store_true", help="workers instead of lanes")
    options = parser.parse_args()
    if options.what == "peak":
        peak(options.size)
    elif options.what == "workers":
        workers(options.cluster)
    else:
        globals()[options.what]()


if __name__ == "__main__":
    main()
