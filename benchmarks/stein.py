"""What a Stein matrix costs: time and memory, and against loops over pairs.

    python benchmarks/stein.py                  50 particles of 10304 x 400, K = 10
    python benchmarks/stein.py --model tweedie --dtype float64
    python benchmarks/stein.py --data faces.npz the array under the first key, else made-up data

Peak memory is that of this process above what it took before, data and particles being
there already. The naive way holds particles² x dimension numbers, so it is run on a
smaller problem, beside ours on the same.
"""

import argparse
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.stein.particles import Particles, Posterior

Array = NDArray[Any]

BAR_SECONDS = 10.0
BAR_MEMORY = 2.0


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()


def release() -> None:
    """Give memory that was freed back to the system, so that its use again is seen."""
    ctypes.CDLL(None).malloc_trim(0)


class Watch:
    """Peak of resident memory above its start, looked at every two milliseconds."""

    def __enter__(self) -> "Watch":
        gc.collect()
        release()
        self.start = self.peak = resident()
        self.going = True
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while self.going:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.going = False
        self.thread.join()

    @property
    def grown(self) -> int:
        return self.peak - self.start


class Problem(NamedTuple):
    V: Array
    W: Array
    H: Array
    model: Any


def problem(args: argparse.Namespace, shape: tuple[int, int], count: int) -> Problem:
    """Data, and particles at a few multiplicative updates' distance from each other."""
    rng = np.random.default_rng(0)
    K = args.components
    if args.data:
        with np.load(args.data) as file:
            V = next(value for value in file.values() if value.ndim >= 2)
        V = V.reshape(len(V), -1)
        V = (V.T if V.shape[0] < V.shape[1] else V)[: shape[0], : shape[1]].astype(args.dtype)
    else:
        V = rng.gamma(0.5, size=(shape[0], K)) @ rng.gamma(0.5, size=(K, shape[1]))
        V = (V + 0.1 * rng.random(shape)).astype(args.dtype)
    size = np.sqrt(V.mean() / K)
    W = (size * rng.gamma(1.0, size=(count, V.shape[0], K))).astype(args.dtype)
    H = (size * rng.gamma(1.0, size=(count, K, V.shape[1]))).astype(args.dtype)
    if args.model == "silf":
        f = [float(((V - w @ h) ** 2).sum()) for w, h in zip(W[:5], H[:5], strict=True)]
        return Problem(V, W, H, dfac.SILFNMF(K).resolve(np.array(f) / 2))
    return Problem(V, W, H, dfac.TweedieNMF(K, beta=1.0, dispersion=1.0))


def timed(call: Callable[[], Any]) -> tuple[Any, float, int]:
    with Watch() as watch:
        started = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - started
    return found, seconds, watch.grown


def stages(data: Any, made: Problem, particles: Particles, lanes: int) -> None:
    """Parts of the verb one by one, and scores as arrays, which it does without."""

    def line(name: str, call: Callable[[Any], Any]) -> Any:
        executor = LanesExecutor(lanes)
        found, seconds, grown = timed(lambda: call(executor))
        executor.close()
        print(f"  {name:48}{seconds:7.2f} s{grown / particles.nbytes:10.2f}")
        return found

    silf = isinstance(made.model, dfac.SILFNMF)
    kernel = dfac.IMQ() if silf else dfac.IMQ("median", "median")

    def posterior(executor: Any) -> Posterior:
        return Posterior.of(executor, data, made.model, kernel, tangent=False)

    particles = line("look at the particles", lambda e: particles.checked(e, silf))
    line("divergences", lambda e: posterior(e).divergences(particles))
    line(
        "divergences, scores and Stein matrix, in bands",
        lambda e: posterior(e).stein_matrix(particles),
    )
    line("(scores as arrays, in place of that)", lambda e: posterior(e).scores(particles))


def large(args: argparse.Namespace) -> None:
    """The bar: seconds and memory of the whole verb."""
    made = problem(args, (args.rows, args.columns), args.particles)
    tiny = problem(args, (64, 64), 2)  # compile
    dfac.stein_discrepancy((tiny.W, tiny.H), tiny.V, tiny.model, progressbar=False)
    with dfac.as_blocks(made.V, dtype=args.dtype) as data:
        particles = Particles.of(made.W, made.H, data)
        print(
            f"{args.particles} particles of {data.shape[0]} x {data.shape[1]}, K = "
            f"{args.components}, {args.dtype}, {data.grid.blocks} x {data.grid.blocks} blocks, "
            f"{args.lanes} lanes; the particles take {particles.nbytes / 1e6:.0f} MB"
        )
        executor = LanesExecutor(args.lanes)
        pair = (made.W, made.H)
        found, seconds, grown = timed(
            lambda: dfac.stein_discrepancy(
                pair, data, made.model, executor=executor, progressbar=False
            )
        )
        executor.close()
        share = grown / particles.nbytes
        print(f"{'':50}{'wall':>9}{'peak / particles':>18}")
        print(f"  {'stein_discrepancy':48}{seconds:7.2f} s{share:10.2f}")
        stages(data, made, particles, args.lanes)
    equal, best = float(found.discrepancy_equal), float(found.discrepancy_optimal)
    print(f"  discrepancy with equal weights {equal:.4g}, with the best {best:.4g}")
    for name, value, bar in (("seconds", seconds, BAR_SECONDS), ("memory", share, BAR_MEMORY)):
        print(f"  bar of {bar:g} ({name}): {'met' if value < bar else 'MISSED'} ({value:.2f})")


def naive(W: Array, H: Array, by_w: Array, by_h: Array, kernel: dfac.IMQ) -> Array:
    """All differences at once, as one would write it down."""
    total, mixed, value = 0.0, 0.0, 0.0
    for x, s, own in zip((W, H), (by_w, by_h), kernel.blocks, strict=True):
        x, s = (one.reshape(len(one), -1).astype(float) for one in (x, s))
        difference = x[:, None] - x
        r2 = (difference**2).sum(axis=2)
        gradient = 2 * own.slope(r2)[..., None] * difference
        mixed = mixed + s @ s.T
        value = value + own.value(r2)
        total = total + np.einsum("mnd,nd->mn", gradient, s) - np.einsum("mnd,md->mn", gradient, s)
        total = total + own.trace(r2, x.shape[1])
    return np.asarray(total + value * mixed)


def small(args: argparse.Namespace) -> None:
    """Against the naive way, at a size that it can do."""
    made = problem(args, (args.rows // 16, args.columns // 4), args.particles)
    with dfac.as_blocks(made.V, dtype=args.dtype) as data:
        kernel = dfac.IMQ("median", "median")
        posterior = Posterior.of(SerialExecutor(), data, made.model, kernel, tangent=False)
        particles = Particles.of(made.W, made.H, data)
        posterior.stein_matrix(particles)  # compile
        ours, seconds, grown = timed(lambda: posterior.stein_matrix(particles))

        def plain() -> Array:
            found = posterior.scores(particles)
            return naive(made.W, made.H, found.W, found.H, ours.kernel)

        theirs, slow, large = timed(plain)
    error = np.abs(ours.matrix / theirs - 1).max()
    print(
        f"\n{args.particles} particles of {data.shape[0]} x {data.shape[1]}, one core: ours "
        f"{seconds:.2f} s and {grown / particles.nbytes:.2f} times the particles' memory, naive "
        f"{slow:.2f} s and {large / particles.nbytes:.1f} times; {slow / seconds:.0f} times as "
        f"fast, largest relative difference {error:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10304)
    parser.add_argument("--columns", type=int, default=400)
    parser.add_argument("--components", type=int, default=10)
    parser.add_argument("--particles", type=int, default=50)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--model", choices=("silf", "tweedie"), default="silf")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--data")
    args = parser.parse_args()
    large(args)
    small(args)


if __name__ == "__main__":
    main()
