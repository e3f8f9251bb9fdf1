"""Speed of the kernels on one core, against this machine's own matrix product.

Run ``python benchmarks/kernels.py`` (about a minute; ``--json`` for a machine).
Every figure is the median of interleaved repeats in CPU time of the thread, so
that a busy machine disturbs it little, with BLAS at one thread. ``of peak`` is
the fraction of the speed of a 2048**3 matrix product measured in between.

Why the gradient is as fast as it is, and what its limit is
-----------------------------------------------------------
6 m n K operations are three matrix products; the entries between them cost
one division (beta = 1, 0, -1), a division and a root (0.5) or nothing (2): 0.1
to 0.3 ns each, in full vectors, on a tile that is still in the cache. That is 3 %
at K = 100 and 15 % at K = 16. What is left is BLAS on small matrices: the row
"three products alone" is the limit. It falls with K: each entry of the tile is
written and read three times for 2 K operations each, and packing costs the
same for few components as for many. OpenBLAS skips packing below a million
terms, so tiles of narrow blocks are cut to stay below (see
``daskfactor/kernels/views.py``), worth 15 to 40 %. Any other beta pays for a
logarithm and an exponential in float64, 2 ns per entry.

Why a normal number costs what it does: 20 widening multiplications per four
numbers (Philox), then 30 operations of logarithm, sine and cosine, in loops of
constant length without calls. Rows whose length is no multiple of four pay
for closing the gaps. ``langevin_step`` with a metric adds two roots and a division per entry.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dgemm, sgemm
from threadpoolctl import threadpool_limits

from daskfactor.kernels import linalg
from daskfactor.kernels.dense import dense_kernels
from daskfactor.kernels.jit import jit
from daskfactor.kernels.langevin import accumulate_moments, langevin_step
from daskfactor.kernels.philox import Address, fill_normals
from daskfactor.kernels.views import NO_WEIGHTS, Workspace
from daskfactor.models.tweedie_law import Tweedie

Array = NDArray[Any]
Timed = dict[str, Callable[[], Any]]
Row = dict[str, Any]

SHAPES = ((1288, 50), (1024, 1024))
COMPONENTS = (16, 32, 100)
BETAS = (1.0, 2.0, 0.5, 0.0, -1.0, 0.3)
TARGET_SECONDS = 0.02

COMPILE = """
import time, numpy as np
from daskfactor.kernels.dense import dense_kernels
from daskfactor.models.tweedie_law import Tweedie
from daskfactor.kernels.langevin import accumulate_moments, langevin_step
from daskfactor.kernels.philox import Address
from daskfactor.kernels.views import NO_WEIGHTS, Workspace
start, start_cpu = time.perf_counter(), time.process_time()
W, H, V = (np.ones(shape, np.float32) for shape in ((8, 4), (6, 4), (8, 6)))
k, work = dense_kernels(Tweedie(1.0)), Workspace()
tiles, (GW, GH) = work.tiles(8, 6, 4), work.gradients(8, 6, 4)
cells, out, key = np.zeros(1, np.int32), np.zeros(2), np.zeros(2, np.uint32)
k.gradient((V, 0, 0, NO_WEIGHTS), W, H, 1.0, (1e-6, ()), (GW, GH), tiles)
k.gradient_curvature((V, 0, 0, NO_WEIGHTS), W, H, 1.0, (1e-6, ()), (GW, GH, W, H), tiles)
k.multiplicative_rows((V, 0, 0, NO_WEIGHTS), W, H, (1e-6, ()), (GW, GW), tiles)
k.multiplicative_cols((V, 0, 0, NO_WEIGHTS), W, H, (1e-6, ()), (GH, GH), tiles)
k.evaluate((V, 0, 0, NO_WEIGHTS), W, H, (1e-6, ()), out, (cells, cells, out[:1], out[:1], 1), tiles)
langevin_step(W, W, W, 0.1, (1.0, 1.0), Address(key, 0, 0), False)
accumulate_moments(W, 1, W, W)
print(time.perf_counter() - start, time.process_time() - start_cpu)
"""


@jit
def three_products(W: Array, H: Array, GW: Array, GH: Array, tile: Array) -> None:
    """The gradient kernel without its elementwise part."""
    GH[:, :] = 0
    for begin in range(0, W.shape[0], tile.shape[0]):
        end = min(begin + tile.shape[0], W.shape[0])
        w, r = W[begin:end], tile[: end - begin]
        linalg.matmul_nt(w, H, r)
        linalg.matmul_nn(r, H, GW[begin:end])
        linalg.add_matmul_tn(r, w, GH)


def numpy_gradient(V: Array, W: Array, H: Array) -> tuple[Array, Array]:
    """beta = 1 in plain NumPy, as one would write it."""
    mu = W @ H.T
    residual = np.nan_to_num((V - mu) / mu)
    return residual @ H, residual.T @ W


def measure(timed: Timed, repeats: int) -> dict[str, float]:
    """Median CPU seconds of one call of each function, calls interleaved."""
    calls = {}
    for name, function in timed.items():
        function()
        start = time.thread_time()
        function()
        calls[name] = max(1, int(TARGET_SECONDS / max(time.thread_time() - start, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, function in timed.items():
            start = time.thread_time()
            for _ in range(calls[name]):
                function()
            samples[name].append((time.thread_time() - start) / calls[name])
    return {name: float(np.median(values)) for name, values in samples.items()}


def peak_product(dtype: Any) -> Callable[[], Any]:
    """The reference: one large matrix product."""
    a = np.asfortranarray(np.random.default_rng(0).random((2048, 2048)).astype(dtype))
    c = np.zeros_like(a)
    product = sgemm if dtype == np.float32 else dgemm
    return lambda: product(1.0, a, a, 0.0, c, overwrite_c=1)


def block(m: int, n: int, components: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Data with a tenth missing, and two factors."""
    rng = np.random.default_rng(1)
    V = rng.gamma(2.0, size=(m, n)).astype(dtype)
    V[rng.random((m, n)) < 0.1] = np.nan
    W = rng.gamma(2.0, size=(m, components)).astype(dtype)
    H = (rng.gamma(2.0, size=(n, components)) / components).astype(dtype)
    return V, W, H


def gradient_functions(m: int, n: int, components: int, dtype: Any) -> Timed:
    """All variants of one block."""
    V, W, H = block(m, n, components, dtype)
    work = Workspace(dtype)
    tiles, (GW, GH) = work.tiles(m, n, components), work.gradients(m, n, components)
    CW, CH = np.zeros_like(W), np.zeros_like(H)
    cells, out = np.zeros(0, np.int32), np.zeros(2)
    timed: Timed = {
        "three products alone": lambda: three_products(W, H, GW, GH, tiles[0]),
        "plain NumPy, beta=1": lambda: numpy_gradient(V, W, H),
    }
    for beta in BETAS:
        kernel = dense_kernels(Tweedie(beta)).gradient
        timed[f"gradient, beta={beta:g}"] = lambda kernel=kernel: kernel(
            (V, 0, 0, NO_WEIGHTS), W, H, 1.0, (1e-6, ()), (GW, GH), tiles
        )
    k = dense_kernels(Tweedie(1.0))
    timed["gradient_curvature, beta=1"] = lambda: k.gradient_curvature(
        (V, 0, 0, NO_WEIGHTS), W, H, 1.0, (1e-6, ()), (GW, GH, CW, CH), tiles
    )
    timed["multiplicative_rows, beta=1"] = lambda: k.multiplicative_rows(
        (V, 0, 0, NO_WEIGHTS), W, H, (1e-6, ()), (CW, GW), tiles
    )
    timed["evaluate, beta=1"] = lambda: k.evaluate(
        (V, 0, 0, NO_WEIGHTS), W, H, (1e-6, ()), out, (cells, cells, out, out, 1), tiles
    )
    return timed


PRODUCTS = {"gradient_curvature, beta=1": 5, "multiplicative_rows, beta=1": 3}


def gradient_rows(dtype: Any, repeats: int) -> list[Row]:
    """Speed of every dense kernel as a fraction of the matrix product's."""
    rows = []
    for m, n in SHAPES:
        for components in COMPONENTS:
            timed = gradient_functions(m, n, components, dtype)
            seconds = measure({"peak": peak_product(dtype), **timed}, repeats)
            peak = 2 * 2048**3 / seconds.pop("peak")
            base = seconds["gradient, beta=1"]
            for name, value in seconds.items():
                products = 1 if "evaluate" in name else PRODUCTS.get(name, 3)
                rate = 2 * products * m * n * components / value
                row = {"block": f"{m}x{n}", "K": components, "kernel": name, "ms": value * 1e3}
                row |= {"GF/s": rate / 1e9, "of peak": rate / peak, "of beta=1": value / base}
                rows.append(row)
    return rows


def noise_rows(dtype: Any, repeats: int) -> list[Row]:
    """Nanoseconds per number of the noise and of the updates."""
    rows = []
    for shape in ((1288, 100), (1288, 50)):
        z, key = np.empty(shape, dtype), np.array([1, 2], np.uint32)
        theta, grad, metric = np.ones(shape, dtype), np.zeros(shape, dtype), np.ones(shape, dtype)
        mean, m2, address = np.zeros(shape), np.zeros(shape), Address(key, 1, 0)
        philox = np.random.Generator(np.random.Philox(0))
        timed: Timed = {
            "fill_normals": lambda z=z, key=key: fill_normals(z, key, 1, 0, 0),
            "metric step": lambda t=theta, g=grad, m=metric, a=address: langevin_step(
                t, g, m, 0.1, (1.0, 1.0), a, False
            ),
            "metric step, coarse": lambda t=theta, g=grad, m=metric, a=address: langevin_step(
                t, g, m, 0.1, (1.0, 1.0), a, True
            ),
            "plain step": lambda t=theta, g=grad, a=address: langevin_step(
                t, g, None, 0.1, (1.0, 1.0), a, False
            ),
            "accumulate_moments": lambda t=theta, a=mean, b=m2: accumulate_moments(t, 3, a, b),
            "NumPy Philox normals": lambda z=z, g=philox: g.standard_normal(
                z.shape, z.dtype, out=z
            ),
        }
        seconds = measure(timed, repeats)
        base = seconds["fill_normals"]
        for name, value in seconds.items():
            row = {"band": f"{shape[0]}x{shape[1]}", "kernel": name}
            rows.append(row | {"ns per number": value / z.size * 1e9, "ratio": value / base})
    return rows


def compile_seconds() -> Row:
    """Time of the first calls of all kernels of one beta, in a fresh process."""
    command = [sys.executable, "-c", COMPILE]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wall, cpu = map(float, printed.split())
    return {"wall": wall, "cpu": cpu}


def print_table(title: str, rows: list[Row]) -> None:
    """Print rows of equal keys as an aligned table."""
    cells = [
        [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in rows
    ]
    columns = list(zip(list(rows[0]), *cells, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    print(f"\n{title}")
    for line in zip(*columns, strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of the kernels on one core.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    dtype = np.dtype(options.dtype).type
    with threadpool_limits(limits=1):
        result: dict[str, Any] = {
            "machine": platform.processor() or platform.machine(),
            "dtype": options.dtype,
            "compile seconds": compile_seconds(),
            "dense": gradient_rows(dtype, options.repeats),
            "noise": noise_rows(dtype, options.repeats),
        }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print_table(f"Dense kernels, {options.dtype}", result["dense"])
    print_table(f"Noise and updates, {options.dtype}", result["noise"])
    seconds = result["compile seconds"]
    print(
        f"\nFirst calls of all kernels of one beta: "
        f"{seconds['cpu']:.1f} s of CPU, {seconds['wall']:.1f} s on the clock"
    )


if __name__ == "__main__":
    main()
