"""Kernels on one core, beside this machine's own matrix product and memory; epochs beside LIBMF's.

Times are processor time of the thread, medians of calls that take turns, with BLAS on one thread.

*Dense*: 6 m n K operations are three matrix products; the entries between them cost a division
(β = 1, 0, −1), a division and a root (β = .5) or nothing (β = 2). What is left is BLAS on small
matrices: "three bare products" are the limit. It falls with K, since each entry of the tile is
written and read three times for 2 K operations each. Any other β pays for a logarithm and an
exponential in double precision.

*Sparse*: an entry reads a row of H, and reads and writes a row of H's gradient, 12 K + 6 bytes
from memory; rows of a block that fits the second-level cache make it faster than that.

*Epochs*: P-SGLD in the majoriser's metric (gradient, noise and update of both factors) by threads
on a B × B grid of a million synthetic ratings, 6040 × 3706, and LIBMF's stochastic gradient on
squared loss, which draws no noise: a long run less a short one. LIBMF is given as
``--with libmf=PATH`` of a library that its own Makefile's flags make with AVX, ``g++ -O3 -pthread
-std=c++11 -march=native -DUSEAVX -DUSEOMP -fopenmp -fPIC -shared mf.cpp -o libmf.so``; a wheel of
it that was built without AVX is no fair peer.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from scipy import sparse
from scipy.linalg.blas import sgemm
from threadpoolctl import threadpool_limits

from benchmarks.harness import Array, Figure, Run, line, per_call, race
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled
from daskfactor.data.sources import as_blocks
from daskfactor.executors import ThreadsExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, make_state
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.program import METRIC, RECORDED, Program, prepare_state
from daskfactor.inference.steps import ConstantStep
from daskfactor.kernels import blockwise, linalg
from daskfactor.kernels.dense import accumulation
from daskfactor.kernels.jit import jit
from daskfactor.kernels.langevin import accumulate_moments, fill_normals
from daskfactor.kernels.philox import Address
from daskfactor.kernels.steps import langevin_step
from daskfactor.kernels.views import NO_WEIGHTS, SparseBlock, Workspace
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.models.tweedie_law import Tweedie

FLOOR = (1e-6, ())
RATINGS = (6040, 3706)
ENTRIES = 1_000_000


@jit
def three_products(W: Array, H: Array, GW: Array, GH: Array, tile: Array) -> None:
    """Do what the gradient kernel does without its elementwise part."""
    GW[:, :] = 0
    GH[:, :] = 0
    for begin in range(0, W.shape[0], tile.shape[0]):
        end = min(begin + tile.shape[0], W.shape[0])
        w, r = W[begin:end], tile[: end - begin]
        linalg.matmul_nt(w, H, r)
        linalg.add_matmul_nn(r, H, GW[begin:end])
        linalg.add_matmul_tn(r, w, GH)


def numpy_gradient(V: Array, W: Array, H: Array) -> tuple[Array, Array]:
    """Take the gradient at β = 1 in plain NumPy, as one would write it."""
    mu = W @ H.T
    residual = np.nan_to_num((V - mu) / mu)
    return residual @ H, residual.T @ W


def dense_calls(shape: tuple[int, int], K: int) -> dict[str, Callable[[], Any]]:
    """Return calls on one block with a tenth of the cells missing."""
    rng = np.random.default_rng(1)
    V = rng.gamma(2.0, size=shape).astype(np.float32)
    V[rng.random(shape) < 0.1] = np.nan
    W, H = (rng.gamma(2.0, size=(n, K)).astype(np.float32) for n in shape)
    H /= K
    work, block = Workspace(), (V, 0, 0, NO_WEIGHTS)
    tiles, pair = work.tiles(*shape, K), work.gradients(shape, K)
    large = np.asfortranarray(rng.random((2048, 2048)).astype(np.float32))
    into = np.zeros_like(large)

    def gradient(beta: float) -> Callable[[], Any]:
        kernel, sums = accumulation(Tweedie(beta), "score", None, False), (pair, pair, np.empty(0))
        return lambda: kernel(block, (W, H), 1.0, FLOOR, sums, tiles)

    return {
        "peak": lambda: sgemm(1.0, large, large, 0.0, into, overwrite_c=1),
        "products": lambda: three_products(W, H, *pair, tiles[0]),
        "numpy": lambda: numpy_gradient(V, W, H),
        **{f"{beta:g}": gradient(beta) for beta in (1.0, 2.0, 0.5, 0.0, -1.0, 0.3)},
    }


@line(
    "gradient of a dense block, float32, one core: share of sgemm's peak",
    "three bare products",
    minutes=0.2,
)
def dense(run: Run) -> Iterator[Figure]:
    cases = [((1288, 50), 100), ((1024, 1024), 100), ((1288, 50), 32), ((1024, 1024), 16)]
    with threadpool_limits(limits=1):
        for shape, K in run.pick(cases[:1], cases):
            taken = per_call(dense_calls(shape, K), run.pick(3, 7))
            peak = 2 * 2048**3 / taken["peak"]
            share = {n: 6 * shape[0] * shape[1] * K / t / peak for n, t in taken.items()}
            what = f"{shape[0]} × {shape[1]}, K = {K}"
            goal = "ratio >= 0.98" if K > 32 else ">= 0.7"
            yield Figure(share["1"], "", share["products"], f"{what}, β = 1", "more", goal)
            if K == 100:
                slowest = min(share[beta] for beta in ("2", "0.5", "0", "-1"))
                others = {"slowest of β = 2, .5, 0, −1": slowest, "β = .3": share["0.3"]}
                for label, other in others.items():
                    ours = other / share["1"]
                    yield Figure(ours, "", 1.0, f"{what}, {label}", "more", beside="β = 1")
                peer, label = share["numpy"], "plain NumPy"
                yield Figure(share["1"], "", peer, f"{what}, β = 1, {label}", "more", beside=label)


@line("a normal number in a factor, 1288 × 100, float32, one core", "NumPy's Philox", minutes=0.1)
def noise(run: Run) -> Iterator[Figure]:
    shape, key = (1288, 100), np.array([1, 2], np.uint32)
    z, theta, metric = np.empty(shape, "f4"), np.ones(shape, "f4"), np.ones(shape, "f4")
    grad, mean, m2 = np.zeros(shape, "f4"), np.zeros(shape), np.zeros(shape)
    philox = np.random.Generator(np.random.Philox(0))
    told = grad, metric, 0.1, (1.0, 1.0), Address(key, 1, 0), False
    calls: dict[str, Callable[[], Any]] = {
        "drawn": lambda: fill_normals(z, key, 1, 0, 0),
        "peer": lambda: philox.standard_normal(shape, "f4", out=z),
        "drawn, with the step": lambda: langevin_step(theta, *told),
        "moments": lambda: accumulate_moments(theta, 3, mean, m2),
    }
    taken = {name: 1e9 * t / z.size for name, t in per_call(calls, run.pick(3, 9)).items()}
    yield Figure(taken["drawn"], "ns", taken["peer"], "drawn")
    for name in ("drawn, with the step", "moments"):
        yield Figure(taken[name], "ns", None, name)


# -- sparse --------------------------------------------------------------------------------------


@cache
def ratings() -> sparse.csr_array:
    """Return distinct cells by power-law frequencies, values 1 to 5."""
    rng = np.random.default_rng(0)
    share = [(np.arange(size) + 20.0) ** -0.8 for size in RATINGS]
    rows, cols = (rng.permutation(weights / weights.sum()) for weights in share)
    cells = np.empty(0, np.int64)
    while cells.size < ENTRIES:
        drawn = rng.choice(RATINGS[0], ENTRIES, p=rows) * RATINGS[1]
        cells = np.union1d(cells, drawn + rng.choice(RATINGS[1], ENTRIES, p=cols))
    cells = rng.choice(cells, ENTRIES, replace=False)
    values = rng.integers(1, 6, ENTRIES).astype(np.float32)
    matrix = sparse.csr_array((values, np.divmod(cells, RATINGS[1])), shape=RATINGS)
    matrix.sort_indices()
    return matrix


def factors(K: int, mean: float) -> list[Array]:
    rng, scale = np.random.default_rng(K), np.sqrt(mean / K) / 2
    return [(rng.gamma(2.0, size=(n, K)) * scale).astype(np.float32) for n in RATINGS]


@jit
def copy(source: Array, target: Array) -> None:
    for i in range(source.size):
        target[i] = source[i]


@line(
    "gradient of a million stored entries, one core", "memory's rate at 12 K + 6 bytes", minutes=0.1
)
def stored(run: Run) -> Iterator[Figure]:
    V, (source, target) = ratings(), np.ones((2, 2**25), np.float32)
    rate = 2 * source.nbytes / per_call({"": lambda: copy(source, target)}, 3)[""]
    for K in run.pick((32,), (32, 64)):
        W, H = factors(K, 3.0)
        for unstored, beta in (("missing", 1.0), ("zero", 1.0), ("missing", 0.5)):
            pointers, indices = V.indptr.astype(np.int32), V.indices.astype(np.uint16)
            view = SparseBlock(pointers, indices, V.data, *RATINGS, unstored == "zero")
            step = ((view, Tweedie(beta), (W, H), FLOOR[0]), 1.0, Workspace())
            taken = per_call({"": partial(blockwise.gradient, *step)}, run.pick(2, 5))[""]
            peer = rate / (12 * K + 6) / 1e6
            what = f"K = {K}, β = {beta:g}, unstored {unstored}"
            yield Figure(ENTRIES / taken / 1e6, "million/s", peer, what, "more")


def program() -> Program:
    return Program(
        PSGLD().kernel(TweedieNMF(2)),
        likelihood=Tweedie(1.0),
        hyper=Hyperparameters(1.0, 1.0, 1.0),
        floor=FLOOR[0],
        key=(1, 2),
        step=ConstantStep(0.1),
    )


def cycle_plan(data: BlockedData, cycles: int) -> Any:
    """Return a plan of whole cycles."""
    observed, options = data.n_observed, lambda cycle: CycleOptions()
    return build_plan(Reshuffled(), observed, range(cycles), np.random.default_rng, options)


def epoch(data: BlockedData, K: int, threads: int, cycles: int) -> Callable[[], Any]:
    """Return a segment of some cycles; the metric is a typical one: speed is the same for any."""
    executor, state, plan = ThreadsExecutor(threads), start(data, K), cycle_plan(data, cycles)
    return lambda: executor.run(plan, program(), state, data)


def start(data: BlockedData, K: int) -> ChainState:
    """Return a state near the data's mean, with one typical metric for each band."""
    rng, scale = np.random.default_rng(K), np.sqrt(data.mean / K) / 2
    sizes = [side.offsets[-1] for side in data.grid.sides]
    made = [(rng.standard_gamma(2.0, (n, K), np.float32) * scale).astype("f4") for n in sizes]
    state = make_state(data.grid, *made)
    prepare_state(state, RECORDED | METRIC)
    observed = [*data.n_observed.sum(axis=1), *data.n_observed.sum(axis=0)]
    for band, n in zip(state.bands(), observed, strict=True):
        typical = n / len(band.values) * float(band.values.mean())
        band.arrays["metric"][:] = max(typical, 1.0)
    return state


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
        *((n, ctypes.c_float) for n in ("lambda_p1", "lambda_p2", "lambda_q1", "lambda_q2")),
        *((name, ctypes.c_float) for name in ("eta", "alpha", "c")),
        *((name, ctypes.c_bool) for name in ("do_nmf", "quiet", "copy_data")),
    )


def libmf(path: str) -> Callable[[int, int, int], None]:
    """Return a function that trains LIBMF: components, threads, iterations."""
    library, entries = ctypes.CDLL(path), ratings().tocoo()
    library.mf_get_default_param.restype = Parameter
    library.mf_train.restype = ctypes.c_void_p
    library.mf_train.argtypes = (ctypes.POINTER(Problem), Parameter)
    library.mf_destroy_model.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
    nodes = np.empty(ENTRIES, np.dtype([("u", np.int32), ("v", np.int32), ("r", np.float32)]))
    (nodes["u"], nodes["v"]), nodes["r"] = entries.coords, entries.data
    problem = Problem(*RATINGS, ENTRIES, nodes.ctypes.data_as(ctypes.POINTER(Node)))

    def train(K: int, threads: int, iterations: int) -> None:
        parameter = library.mf_get_default_param()
        parameter.k, parameter.nr_threads, parameter.nr_iters = K, threads, iterations
        parameter.quiet = True
        model = ctypes.c_void_p(library.mf_train(ctypes.byref(problem), parameter))
        library.mf_destroy_model(ctypes.byref(model))
        assert len(nodes) == ENTRIES  # which the library reads

    return train


@line("an epoch of a million ratings, K = 32", "LIBMF with AVX", minutes=0.2)
def epochs(run: Run) -> Iterator[Figure]:
    path, cycles, K = run.options.get("libmf"), run.pick(2, 5), 32
    if path is None:
        run.missing.add("libmf")
    clocks = {1: time.process_time, 2: time.perf_counter}
    grids = {
        B: as_blocks(ratings(), blocks=B, unstored="missing", allow_empty=True)
        for B in run.pick((2,), (2, 4, 8))
    }
    with threadpool_limits(limits=1):
        for threads in range(1, min(2, run.threads) + 1):
            calls = {f"{B}": epoch(data, K, threads, cycles) for B, data in grids.items()}
            if path is not None:
                train = libmf(path)
                calls["short"] = lambda t=threads, f=train: f(K, t, 3)
                calls["long"] = lambda t=threads, f=train: f(K, t, 13)
            taken = race(calls, run.pick(1, 5), clocks[threads])
            peer = None if path is None else 1e2 * (taken["long"] - taken["short"])
            for B in grids:
                goal = "ratio >= 4" if threads == 1 else ""
                ours = 1e3 * taken[f"{B}"] / cycles
                yield Figure(ours, "ms", peer, f"B = {B}, threads {threads}", goal=goal)
