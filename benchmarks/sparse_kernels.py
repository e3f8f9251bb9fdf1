"""Speed of the sparse kernels and of whole epochs on ratings, against LIBMF's.

Run ``python benchmarks/sparse_kernels.py`` (about two minutes); with ``--libmf PATH``
a LIBMF built by its own Makefile's flags with AVX runs in between:

    g++ -O3 -pthread -std=c++11 -march=native -DUSEAVX -DUSEOMP -fopenmp \\
        -fPIC -shared mf.cpp -o libmf.so

(a wheel of it that was built without AVX is several times slower: no fair peer).
The data are synthetic: 6040 x 3706, a million ratings from 1 to 5, row and column
frequencies by a power law, float32.

*Kernels*: one core, CPU time, all the data as one block. *Epochs*: P-SGLD in the
majoriser's metric (gradient, noise and update of both factors in every block) by the lanes
executor on a B x B grid, and LIBMF's stochastic gradient on squared loss, which draws no
noise; on one thread in CPU time, on two in wall time, repeats interleaved, medians.
LIBMF's epoch is the difference of a long and a short run, so its set-up does not count.

What limits the gradient: an entry reads a row of H, and reads and writes a row of H's
gradient. From memory that would be 12 K + 6 bytes an entry, at the copy bandwidth
measured here; the rows of a block that fits the second-level cache make it faster than
that. In an epoch the noise costs as much as the gradient from about B = 8 on.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled
from daskfactor.data.sources import as_blocks
from daskfactor.executors import LanesExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, make_state
from daskfactor.inference.base import METRIC, MOMENTS, ConstantStep
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.program import Program, prepare_state
from daskfactor.kernels import blockwise
from daskfactor.kernels.jit import jit
from daskfactor.kernels.views import SparseBlock, Workspace
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.tweedie_law import Tweedie

Array = NDArray[Any]
Clock = Callable[[], float]
Timed = dict[str, Callable[[], float]]

SHAPE = (6040, 3706)
ENTRIES = 1_000_000
FLOOR = 1e-6
KERNEL_BETAS = ((1.0, False), (2.0, False), (0.5, False), (0.3, False), (1.0, True), (2.0, True))
CYCLES = 5
SHORT_RUN, LONG_RUN = 3, 13


def ratings(seed: int = 0) -> scipy.sparse.csr_array:
    """Distinct cells by power-law frequencies, values 1 to 5."""
    rng = np.random.default_rng(seed)
    share = [(np.arange(size) + 20.0) ** -0.8 for size in SHAPE]
    rows, cols = (rng.permutation(weights / weights.sum()) for weights in share)
    cells = np.empty(0, np.int64)
    while cells.size < ENTRIES:
        drawn = rng.choice(SHAPE[0], ENTRIES, p=rows) * SHAPE[1]
        cells = np.union1d(cells, drawn + rng.choice(SHAPE[1], ENTRIES, p=cols))
    cells = rng.choice(cells, ENTRIES, replace=False)
    values = rng.integers(1, 6, ENTRIES).astype(np.float32)
    matrix = scipy.sparse.csr_array((values, np.divmod(cells, SHAPE[1])), shape=SHAPE)
    matrix.sort_indices()
    return matrix


def factors(K: int, mean: float) -> tuple[Array, Array]:
    rng = np.random.default_rng(K)
    scale = np.sqrt(mean / K) / 2
    return tuple((rng.gamma(2.0, size=(n, K)) * scale).astype(np.float32) for n in SHAPE)


def interleaved(timed: Timed, repeats: int) -> dict[str, float]:
    """Median of what each function says it took, calls interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for function in timed.values():
        function()
    for _ in range(repeats):
        for name, function in timed.items():
            samples[name].append(function())
    return {name: float(np.median(values)) for name, values in samples.items()}


def clocked(function: Callable[[], Any], clock: Clock) -> Callable[[], float]:
    def timed() -> float:
        start = clock()
        function()
        return clock() - start

    return timed


# -- kernels ---------------------------------------------------------------------------


def kernel_calls(view: SparseBlock, beta: float, K: int) -> Timed:
    W, H = factors(K, 3.0)
    CW, DW, CH, DH = (np.zeros_like(factor) for factor in (W, W, H, H))
    work, out = Workspace(), np.zeros(2)
    step = (view, Tweedie(beta), W, H, 1.0, FLOOR)
    calls: dict[str, Callable[[], Any]] = {
        "gradient": lambda: blockwise.gradient(*step, work),
        "with curvature": lambda: blockwise.gradient(*step, work, (CW, CH)),
        "rows' share": lambda: blockwise.multiplicative(
            view, Tweedie(beta), True, W, H, FLOOR, (CW, DW), work
        ),
        "columns' share": lambda: blockwise.multiplicative(
            view, Tweedie(beta), False, W, H, FLOOR, (CH, DH), work
        ),
        "evaluate": lambda: blockwise.evaluate(view, Tweedie(beta), W, H, FLOOR, out, None, work),
    }
    return {name: clocked(call, time.thread_time) for name, call in calls.items()}


@jit
def copy(source: Array, target: Array) -> None:
    for i in range(source.size):
        target[i] = source[i]


def copy_bandwidth() -> float:
    """Bytes read and written in a second by one core, arrays beyond every cache."""
    source, target = np.ones((2, 2**25), np.float32)
    seconds = interleaved({"": clocked(lambda: copy(source, target), time.thread_time)}, 7)[""]
    return 2 * source.nbytes / seconds


def report_kernels(matrix: scipy.sparse.csr_array, components: list[int], repeats: int) -> None:
    print(f"Kernels, one core, million entries/s (copy: {copy_bandwidth() / 1e9:.1f} GB/s)")
    titles = list(kernel_calls(whole(matrix, False), 1.0, 1))
    print(f"{'K':>4} {'beta':>5} {'unstored':>9}" + "".join(f"{t:>16}" for t in titles))
    for K in components:
        for beta, zeros in KERNEL_BETAS:
            seconds = interleaved(kernel_calls(whole(matrix, zeros), beta, K), repeats)
            meaning = "zero" if zeros else "missing"
            row = "".join(f"{ENTRIES / 1e6 / seconds[t]:>16.0f}" for t in titles)
            print(f"{K:>4} {beta:>5} {meaning:>9}{row}", flush=True)


def whole(matrix: scipy.sparse.csr_array, zeros: bool) -> SparseBlock:
    return SparseBlock(
        matrix.indptr.astype(np.int32),
        matrix.indices.astype(np.uint16),
        matrix.data,
        *SHAPE,
        zeros,
    )


# -- epochs ----------------------------------------------------------------------------


def start(data: BlockedData, K: int) -> ChainState:
    """A state near the data's mean, with one typical metric per band: speed is the same for any."""
    state = make_state(data.grid, *factors(K, data.mean))
    prepare_state(state, (*MOMENTS, *METRIC))
    for band, counts in zip(
        state.bands(),
        [*data.n_observed.sum(axis=1), *data.n_observed.sum(axis=0)],
        strict=True,
    ):
        typical = counts / len(band.values) * float(band.values.mean())
        band.arrays["metric"][:] = max(typical, 1.0)
    return state


def epoch_call(
    data: BlockedData, beta: float, K: int, lanes: int, clock: Clock
) -> Callable[[], float]:
    """Seconds of one cycle, from a segment of a few."""
    executor, state = LanesExecutor(lanes), start(data, K)
    program = Program(
        PSGLD(),
        likelihood=Tweedie(beta),
        hyper=Hyperparameters(1.0, 1.0, 1.0),
        floor=FLOOR,
        key=(1, 2),
        step=ConstantStep(0.1),
    )
    plan = build_plan(
        Reshuffled(),
        data.n_observed,
        range(CYCLES),
        np.random.default_rng,
        lambda _: CycleOptions(),
    )
    segment = clocked(lambda: executor.run(plan, program, state, data), clock)
    return lambda: segment() / CYCLES


class Node(ctypes.Structure):
    """LIBMF's ``mf_node``: one rating."""

    _fields_ = (("u", ctypes.c_int), ("v", ctypes.c_int), ("r", ctypes.c_float))


class Problem(ctypes.Structure):
    """LIBMF's ``mf_problem``."""

    _fields_ = (
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("nnz", ctypes.c_longlong),
        ("R", ctypes.POINTER(Node)),
    )


class Parameter(ctypes.Structure):
    """LIBMF's ``mf_parameter``, version 2.01 and later."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("fun", "k", "nr_threads", "nr_bins", "nr_iters")),
        *(
            (name, ctypes.c_float)
            for name in (
                "lambda_p1",
                "lambda_p2",
                "lambda_q1",
                "lambda_q2",
                "eta",
                "alpha",
                "c",
            )
        ),
        *((name, ctypes.c_bool) for name in ("do_nmf", "quiet", "copy_data")),
    )


class Libmf:
    """LIBMF in a shared library."""

    def __init__(self, path: str, matrix: scipy.sparse.csr_array) -> None:
        self.library = ctypes.CDLL(path)
        self.library.mf_get_default_param.restype = Parameter
        self.library.mf_train.restype = ctypes.c_void_p
        self.library.mf_train.argtypes = (ctypes.POINTER(Problem), Parameter)
        self.library.mf_destroy_model.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
        entries = matrix.tocoo()
        kinds = [("u", np.int32), ("v", np.int32), ("r", np.float32)]
        self.nodes = np.empty(ENTRIES, np.dtype(kinds))
        self.nodes["u"], self.nodes["v"] = entries.coords
        self.nodes["r"] = entries.data
        pointer = self.nodes.ctypes.data_as(ctypes.POINTER(Node))
        self.problem = Problem(*SHAPE, ENTRIES, pointer)

    def train(self, K: int, threads: int, iterations: int) -> None:
        parameter = self.library.mf_get_default_param()
        parameter.k, parameter.nr_threads, parameter.nr_iters = K, threads, iterations
        parameter.quiet = True
        model = ctypes.c_void_p(self.library.mf_train(ctypes.byref(self.problem), parameter))
        self.library.mf_destroy_model(ctypes.byref(model))

    def epoch_call(self, K: int, threads: int, clock: Clock) -> Callable[[], float]:
        """Seconds of one iteration: a long run less a short one."""
        short, long = (
            clocked(lambda count=count: self.train(K, threads, count), clock)
            for count in (SHORT_RUN, LONG_RUN)
        )
        return lambda: (long() - short()) / (LONG_RUN - SHORT_RUN)


def report_epochs(
    matrix: scipy.sparse.csr_array,
    beta: float,
    components: list[int],
    libmf: Libmf | None,
    repeats: int,
) -> None:
    print(f"\nEpochs at beta = {beta:g}, ms (LIBMF's time over ours)")
    grids = {
        B: as_blocks(matrix, blocks=B, unstored="missing", allow_empty=True) for B in (2, 4, 8)
    }
    titles = [f"B = {B}" for B in grids]
    print(f"{'K':>4} {'threads':>8} {'LIBMF':>9}" + "".join(f"{t:>17}" for t in titles))
    for K in components:
        for threads, clock in ((1, time.process_time), (2, time.perf_counter)):
            timed = {
                f"B = {B}": epoch_call(data, beta, K, threads, clock) for B, data in grids.items()
            }
            if libmf is not None:
                timed["LIBMF"] = libmf.epoch_call(K, threads, clock)
            seconds = interleaved(timed, repeats)
            peer = seconds.get("LIBMF", float("nan"))
            row = "".join(f"{1e3 * seconds[t]:>9.1f} ({peer / seconds[t]:4.2f}x)" for t in titles)
            print(f"{K:>4} {threads:>8} {1e3 * peer:>9.1f}{row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--libmf", metavar="PATH", help="shared library of LIBMF with AVX")
    parser.add_argument("--components", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--beta", type=float, default=1.0, help="of the epochs")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=("kernels", "epochs"))
    options = parser.parse_args()
    matrix = ratings()
    libmf = Libmf(options.libmf, matrix) if options.libmf else None
    with threadpool_limits(1, user_api="blas"):
        if options.only != "epochs":
            report_kernels(matrix, options.components, options.repeats)
        if options.only != "kernels":
            report_epochs(matrix, options.beta, options.components, libmf, options.repeats)


if __name__ == "__main__":
    main()
