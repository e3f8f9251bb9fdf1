"""Time of a pass over a sparse tensor, and held-out cells of a dense one, beside TensorLy.

First a pass over a made-up tensor of three axes, ``--millions`` of entries, float32, on one
thread: the gradients of all three factors by the kernel that samplers call, by a plain numba loop
over entries and components of the same job, and by TensorLy the three products with Khatri-Rao
matrices that a sweep of its sparse CP takes. Then cycles of ``PSGLD`` from `sample`, on two
threads, and how long the blocks took to make.

Then ``--cells`` tensors of 60 x 50 x 40 with 30 % of the cells missing: root mean squared error
of the true means there, by the posterior mean and by TensorLy's masked non-negative CP of the
same number of components; the share of these cells' values in 90 % intervals; and seconds.

    python benchmarks/tensors.py [--millions 10] [--components 16 32] [--runs 3] [--seeds 2]
        [--draws 300] [--skip-pass] [--skip-sample] [--skip-cells]

TensorLy is left out where it is not installed.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import sparse
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.data.tensor import as_tensor
from daskfactor.kernels import factorwise
from daskfactor.kernels.views import TensorBlock, Workspace
from daskfactor.machine import single_threaded_blas
from daskfactor.models.tweedie_law import Tweedie

Array = NDArray[Any]
SHAPE = (4_000, 2_000, 500)
SMALL = (60, 50, 40)
NOISE, FLOOR = 0.5, 1e-6


def made_up(entries: int, seed: int = 0) -> Any:
    """A sparse tensor of counts at random places."""
    rng = np.random.default_rng(seed)
    cells = np.unique(rng.integers(0, np.prod(SHAPE, dtype=np.int64), entries))
    places = np.array(np.unravel_index(cells, SHAPE))
    return sparse.COO(
        places, rng.poisson(2.0, cells.size).astype(np.float32) + 1, SHAPE, has_duplicates=False,
        sorted=True, fill_value=np.float32(np.nan),
    )  # fmt: skip


@numba.njit(fastmath=True)
def plain(i: Array, j: Array, l: Array, v: Array, A: Array, B: Array, C: Array, out: Any) -> None:  # noqa: E741
    """Gradients of a Poisson log-likelihood by three loops over components."""
    GA, GB, GC = out
    K = A.shape[1]
    GA[:], GB[:], GC[:] = 0, 0, 0
    for p in range(v.size):
        a, b, c = A[i[p]], B[j[p]], C[l[p]]
        mu = np.float32(0)
        for k in range(K):
            mu += a[k] * b[k] * c[k]
        r = v[p] / max(mu, np.float32(FLOOR)) - np.float32(1)
        ga, gb, gc = GA[i[p]], GB[j[p]], GC[l[p]]
        for k in range(K):
            ga[k] += r * b[k] * c[k]
            gb[k] += r * a[k] * c[k]
            gc[k] += r * a[k] * b[k]


def least(run: Callable[[], Any], runs: int) -> float:
    run()
    taken = []
    for _ in range(runs):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def khatri_rao(V: Any, factors: list[Array]) -> Callable[[], Any] | None:
    """The products of TensorLy's sparse CP, one for each axis."""
    try:
        import tensorly as tl
        from tensorly.contrib.sparse.cp_tensor import unfolding_dot_khatri_rao
    except ImportError:
        return None
    given = sparse.COO(V.coords, V.data, V.shape, fill_value=0.0)
    weights = tl.ones(factors[0].shape[1])

    def run() -> None:
        for mode in range(3):
            unfolding_dot_khatri_rao(given, (weights, factors), mode)

    return run


def tell_passes(V: Any, components: list[int], runs: int) -> None:
    entries = V.nnz
    print(f"\na pass over {entries / 1e6:.0f} million entries of {' x '.join(map(str, SHAPE))},")
    print("gradients of all factors, one thread: ns an entry (times the kernel's)")
    places = [own.astype(np.int32) for own in V.coords]
    pointers = np.searchsorted(places[0], np.arange(SHAPE[0] + 1)).astype(np.int32)
    indices = tuple(own.astype(np.uint16) for own in places[1:])
    block = TensorBlock(pointers, indices, V.data, SHAPE, False)
    rng = np.random.default_rng(1)
    for K in components:
        factors = tuple(rng.gamma(1, 0.5, (size, K)).astype(np.float32) for size in SHAPE)
        work, out = Workspace(np.float32), tuple(np.empty_like(own) for own in factors)
        law = Tweedie(1.0)

        def kernel(factors: Any = factors, work: Any = work, law: Any = law) -> Any:
            return factorwise.gradient(block, law, factors, 1.0, FLOOR, work)

        def loop(factors: Any = factors, out: Any = out) -> None:
            plain(*places, V.data, *factors, out)

        with single_threaded_blas():
            times = {"kernel": least(kernel, runs), "plain loop": least(loop, runs)}
            for one, other in zip(kernel(), out, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-1)
            other = khatri_rao(V, list(factors))
            if other is not None:
                times["TensorLy"] = least(other, 1) if entries <= 20e6 else float("nan")
        told = (
            f"{n} {1e9 * t / entries:.1f} ({t / times['kernel']:.2f})" for n, t in times.items()
        )
        print(f"K = {K}: " + ", ".join(told))
        # Rows of B and C are read, and those of their gradients read and written.
        moved = 4 * (2 * K + 2 * 2 * K) + 4 + 2 * 2
        print(f"    {moved} bytes an entry through the caches, {10 * K} operations")


def tell_sampling(V: Any, components: list[int]) -> None:
    begun = time.perf_counter()
    data = as_tensor(V)
    print(f"\nblocks made in {time.perf_counter() - begun:.1f} s: {data.describe()}")
    for K in components:
        taken = []
        for draws in (2, 2, 12):  # the first compiles
            begun = time.perf_counter()
            sampler = dfac.PSGLD(warm_start=2)
            settings: Any = {"draws": draws, "tune": 2, "keep": "moments", "random_seed": 1}
            dfac.sample(data, dfac.CP(K, dispersion=1.0), sampler, progressbar=False, **settings)
            taken.append(time.perf_counter() - begun)
        cycle = (taken[2] - taken[1]) / 10
        print(f"K = {K}: a cycle of PSGLD, two threads, {1e9 * cycle / V.nnz:.1f} ns an entry")


def masked(components: int, seed: int) -> tuple[Array, Array, Array]:
    """Values with gaps, true means, and where the gaps are."""
    rng = np.random.default_rng(seed)
    factors = [rng.gamma(0.8, 1.0, (size, components)) for size in SMALL]
    mean = np.einsum("ik,jk,lk->ijl", *factors)
    values = mean + NOISE * rng.normal(size=SMALL)
    missing = rng.random(SMALL) < 0.3
    return np.where(missing, np.nan, values), mean, missing


def of_tensorly(V: Array, missing: Array, components: int) -> Array | None:
    try:
        import tensorly as tl
        from tensorly.decomposition import non_negative_parafac
    except ImportError:
        return None
    mask = (~missing).astype(np.float64)
    found = non_negative_parafac(
        np.maximum(np.nan_to_num(V), 0), components, n_iter_max=500, init="random", tol=1e-8,
        random_state=0, mask=mask,
    )  # fmt: skip
    return np.asarray(tl.cp_to_tensor(found))


def tell_cells(seeds: int, draws: int, components: int = 5) -> None:
    print(f"\n{' x '.join(map(str, SMALL))}, {components} components, 30 % of the cells missing,")
    print(f"noise {NOISE}: error of the means of these cells, values in 90 % intervals, seconds")
    for seed in range(seeds):
        V, mean, missing = masked(components, seed)
        rng = np.random.default_rng(100 + seed)
        new = mean[missing] + NOISE * rng.normal(size=missing.sum())
        begun = time.perf_counter()
        trace = dfac.sample(
            V, dfac.CP(components, beta=2.0), dfac.BlockHMC(), draws, draws, monitor=missing,
            random_seed=1, progressbar=False,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        told = dfac.monitored(trace, of="observation")
        inside = np.mean((told["lower"].values <= new) & (new <= told["upper"].values))
        error = np.sqrt(np.mean((told["mean"].values - mean[missing]) ** 2))
        line = f"seed {seed}: daskfactor {error:.4f}, {inside:.3f}, {seconds:.1f} s"
        begun = time.perf_counter()
        found = of_tensorly(V, missing, components)
        if found is not None:
            error = np.sqrt(np.mean((found[missing] - mean[missing]) ** 2))
            line += f"; TensorLy {error:.4f}, {time.perf_counter() - begun:.1f} s"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=10)
    parser.add_argument("--components", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--skip-pass", action="store_true")
    parser.add_argument("--skip-sample", action="store_true")
    parser.add_argument("--skip-cells", action="store_true")
    asked = parser.parse_args()
    if not (asked.skip_pass and asked.skip_sample):
        V = made_up(int(asked.millions * 1e6))
        if not asked.skip_pass:
            tell_passes(V, asked.components, asked.runs)
        if not asked.skip_sample:
            tell_sampling(V, asked.components)
    if not asked.skip_cells:
        tell_cells(asked.seeds, asked.draws)


if __name__ == "__main__":
    main()
