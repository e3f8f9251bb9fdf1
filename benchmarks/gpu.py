"""What an NVIDIA GPU gives, beside the processors of the same machine and what the GPU can do.

Run it with

    python -m benchmarks.gpu [--only a,c] [--small]

Lines are printed as they are found, each with its bar and whether it is met; all rows
take about ten minutes, those of ``--small`` one or two. A machine without a GPU gets one
sentence and exit code 2; a row that fails says so, and the exit code is 1.

- ``a``, dense: a cycle of P-SGLD over 100,000 x 20,000 cells (K = 100, float32) that lie on
  the device, beside cuBLAS on the three products of every block alone (same shapes, same
  tiles); and beside two processors, on a tenth of the rows, times ten.
- ``b``, faces: 1000 parts of 8 blocks with moments at every cycle (see ``faces.py``), beside
  two processors; kernels, products and small copies that a cycle asks for, and what they
  would take if each did nothing: no cycle is shorter. CuPy's own sums are not counted.
- ``c``, sparse: an epoch of P-SGLD over 10^8 entries (1,000,000 x 100,000, columns uniform),
  K = 32 and 64, beside two processors on a tenth of the rows, times ten. Bytes that must
  move are, for an entry, its column, value and term by rows, its row, place and term by
  columns (28 bytes), and a row of H and one of W (8 K bytes); for each of B updates of a
  number of the factors seven numbers (gradient: zeros, read, written, read; metric; the
  number itself: read, written). The rate is that of a copy on the device, read and written.
  Rows of H that the second-level cache has come faster, so that the share may exceed 1.
- ``d``, streaming: dense data of four times ``CUDA(memory_limit=...)``. Of every cycle at
  least what the limit does not hold comes by copies from pinned memory; a cycle is no shorter
  than these at the rate measured here, nor than one of data that stay on the device.
- ``e``, noise: bits of 10^9 normal numbers of float32, and a tenth as many of float64,
  against those of processors; where they differ, by how many units in the last place.
- ``f``, posteriors: erased pixels of faces (relative error, share in 90 % intervals) and
  held-out ratings (RMSE, see ``ratings.py``), each on both.
- ``g``, torchnmf: its multiplicative updates (beta = 1) and ours on the same device, seconds
  to the same error of held-out pixels, the larger of the two that are reached. It takes no
  gaps, so they are filled with the means of their rows.
- ``h``, a whole call: what a draw of `sample` takes beside a sweep alone, on half of the rows and
  columns of ``a``: it evaluates the fit and adds to moments as well, and states come home.
- ``i``, new rows: `transform` under draws of a point, beside two processors on a tenth of the
  rows, times ten.

Seconds of cycles are those of a long run less a short one, so that neither compiling nor
placing data and factors counts; clocks are read when the device has finished.
"""

import argparse
import importlib.util
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from dask.system import cpu_count
from numpy.typing import NDArray

import daskfactor as dfac
from benchmarks import faces, ratings
from daskfactor import demos
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Reshuffled
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataWarning, OptionError
from daskfactor.executors import Executor, ThreadsExecutor
from daskfactor.executors.device import DeviceExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, make_state
from daskfactor.inference.base import METRIC, MOMENTS, ConstantStep
from daskfactor.inference.program import Program, prepare_state
from daskfactor.kernels import philox
from daskfactor.kernels.cuda import blocks as cuda_blocks
from daskfactor.kernels.cuda import device as cuda_device
from daskfactor.kernels.cuda import source, steps
from daskfactor.kernels.cuda.device import Device
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.tweedie_law import Tweedie

Array = NDArray[Any]
FLOOR = 1e-6
LANES = 2
"""Processors that a GPU is compared with."""
TIMES_CPU = {"a": 50.0, "b": 10.0, "c": 15.0}
"""Bars: times as fast as so many processors."""
CUBLAS_SHARE, MEMORY_SHARE, COPY_SHARE = 0.5, 0.4, 0.7
"""Bars: shares of what cuBLAS, the device's memory and copies to it permit."""
SAME_ERROR, SAME_COVERAGE = 0.005, 0.01
"""Bars: how far errors, and shares in intervals, may be from those of processors."""
ASKED = ("launch", "products", "zeros", "put")
"""What of `Device` gives the device something to do."""
MISSING = 0.3


@dataclass(frozen=True)
class Sizes:
    """How large the rows of the table are; ``part``: one of so many rows is for processors."""

    dense: tuple[int, int, int] = (100_000, 20_000, 100)
    sparse: tuple[int, int, int] = (1_000_000, 100_000, 100)  # the last: entries of a row
    components: tuple[int, ...] = (32, 64)
    part: int = 10
    cycles: int = 10
    iterations: int = 1000
    pixels: int = 10_304
    streamed: tuple[int, int, int] = (40_000, 25_000, 100)
    numbers: int = 10**9
    draws: int = 500
    ratings: int = 1_000_000
    rating_draws: int = 300
    updates: int = 320
    new: tuple[int, int, int] = (20_000, 1000, 50)
    new_draws: int = 20
    repeats: int = 5


SMALL = Sizes(
    dense=(20_000, 5_000, 100),
    sparse=(100_000, 20_000, 100),
    iterations=400,
    streamed=(10_000, 10_000, 100),
    numbers=10**8,
    draws=100,
    ratings=100_000,
    rating_draws=100,
    updates=80,
    new=(5000, 500, 30),
)


class Figure(NamedTuple):
    """A line of the table."""

    what: str
    value: str
    bar: str = ""
    met: bool | None = None


def at_least(what: str, value: float, bar: float, unit: str = "") -> Figure:
    return Figure(what, f"{value:.3g}{unit}", f">= {bar:g}{unit}", value >= bar)


def beside_cpu(row: str, what: str, gpu: float, cpu: float) -> Figure:
    return at_least(f"{what}, times {LANES} cores", cpu / gpu, TIMES_CPU[row])


# -- clocks ------------------------------------------------------------------------------


def seconds_of(device: Device, function: Callable[[], Any], repeats: int) -> float:
    """Median of what calls take, the device's work included, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        device.wait()
        began = time.perf_counter()
        function()
        device.wait()
        found.append(time.perf_counter() - began)
    return float(np.median(found[1:]))


def start(data: BlockedData, K: int) -> ChainState:
    """A state near the data's mean, with one typical metric: speed is the same for any."""
    rng, scale = np.random.default_rng(K), np.sqrt(data.mean / K) / 2
    sizes = [side.offsets[-1] for side in data.grid.sides]
    made = [(rng.standard_gamma(2.0, (n, K), np.float32) * scale).astype("f4") for n in sizes]
    state = make_state(data.grid, *made)
    prepare_state(state, (*MOMENTS, *METRIC))
    for band, counts in zip(
        state.bands(), [*data.n_observed.sum(axis=1), *data.n_observed.sum(axis=0)], strict=True
    ):
        typical = counts / len(band.values) * float(band.values.mean())
        band.arrays["metric"][:] = max(typical, 1.0)
    return state


def cycle_seconds(data: BlockedData, K: int, executor: Executor, cycles: int) -> float:
    """Seconds of one cycle of P-SGLD: a long run less a short one."""
    program = Program(
        dfac.PSGLD(),
        likelihood=Tweedie(1.0),
        hyper=Hyperparameters(1.0, 1.0, 1.0),
        floor=FLOOR,
        key=(1, 2),
        step=ConstantStep(0.1),
    )
    state, taken = start(data, K), []
    for count in (1, 1, 1 + cycles):  # the first compiles, and places the data
        plan = build_plan(
            Reshuffled(),
            data.n_observed,
            range(count),
            np.random.default_rng,
            lambda _: CycleOptions(),
        )
        began = time.perf_counter()
        state = executor.run(plan, program, state, data)
        taken.append(time.perf_counter() - began)
    return max(taken[2] - taken[1], 1e-9) / cycles


def on_gpu(V: Any, K: int, blocks: int, sizes: Sizes, **options: Any) -> float:
    """Seconds of a cycle on the device, with options of `CUDA`."""
    made = closing(DeviceExecutor(dfac.CUDA(**options)))
    with made as executor, as_blocks(V, blocks, **told(V)) as data:
        return cycle_seconds(data, K, executor, sizes.cycles)


def on_processors(V: Any, K: int, cycles: int) -> float:
    """Seconds of a cycle on `LANES` processors, with a block for each."""
    blocks = LANES
    with closing(ThreadsExecutor(LANES)) as executor, as_blocks(V, blocks, **told(V)) as data:
        return cycle_seconds(data, K, executor, cycles)


def told(V: Any) -> dict[str, Any]:
    """Say what is to be known of sparse data."""
    return {"unstored": "missing", "allow_empty": True} if scipy.sparse.issparse(V) else {}


def counts_of(rows: int, cols: int) -> Array:
    """Counts of some cells again and again, which no kernel's speed depends on."""
    few = np.random.default_rng(0).poisson(4.0, (min(rows, 500), cols)).astype(np.float32)
    few += np.float32(1)
    return np.tile(few, (-(-rows // len(few)), 1))[:rows]


# -- a: dense ----------------------------------------------------------------------------


def products_seconds(device: Device, shape: tuple[int, int, int], blocks: int, n: int) -> float:
    """Seconds that the three products of all blocks of a cycle take, tile by tile."""
    rows, cols, K = shape
    m, q = -(-rows // blocks), -(-cols // blocks)
    rng = np.random.default_rng(0)
    w, h = (device.put(rng.random((blocks, size, K), np.float32)) for size in (m, q))
    lines = max(1, min(m, cuda_blocks.TILE_BYTES // (blocks * q * 4)))
    tile = device.zeros((blocks, lines, q), np.float32)
    left, right = device.zeros((blocks, lines, K), np.float32), device.zeros(h.shape, np.float32)

    def cycle() -> None:
        for _ in range(blocks):
            for begin in range(0, m, lines):
                own = w[:, begin : begin + lines]
                terms, sums = tile[:, : own.shape[1]], left[:, : own.shape[1]]
                device.products(own, h, (False, True), out=terms)
                device.products(terms, h, out=sums)
                device.products(terms, own, (True, False), out=right, add=begin > 0)

    return seconds_of(device, cycle, n)


def dense(device: Device, sizes: Sizes) -> Iterator[Figure]:
    blocks, (rows, cols, K) = 4, sizes.dense
    V = counts_of(rows, cols)
    alone = products_seconds(device, sizes.dense, blocks, sizes.repeats)
    full = on_gpu(V, K, blocks, sizes)
    what = f"{rows} x {cols}, K = {K}, B = {blocks}"
    yield Figure(f"{what}: ms of a cycle", f"{1e3 * full:.4g}")
    rate = 6e-12 * rows * cols * K / alone
    yield Figure("cuBLAS on the three products: TFLOP/s", f"{rate:.3g}")
    yield at_least("share of cuBLAS alone", alone / full, CUBLAS_SHARE)
    part = V[: max(8, rows // sizes.part)]
    yield beside_cpu("a", what, full, on_processors(part, K, 2) * rows / len(part))


# -- h: a whole call -----------------------------------------------------------------------


def call_seconds(data: BlockedData, K: int, draws: int) -> float:
    """Seconds of a call of `sample` that keeps moments, from first to last."""
    model = dfac.TweedieNMF(K, dispersion=1.0)
    run: dict[str, Any] = {"tune": 10, "keep": "moments", "random_seed": 0, "progressbar": False}
    began = time.perf_counter()
    dfac.sample(data, model, dfac.PSGLD(warm_start=2), draws=draws, device="cuda", **run)
    return time.perf_counter() - began


def calls(device: Device, sizes: Sizes) -> Iterator[Figure]:
    del device
    blocks, K, cycles = 4, sizes.dense[2], 10 * sizes.cycles
    rows, cols = (max(8, n // 2) for n in sizes.dense[:2])
    with as_blocks(counts_of(rows, cols), blocks) as data:
        with closing(DeviceExecutor()) as executor:
            sweep = cycle_seconds(data, K, executor, sizes.cycles)
        call_seconds(data, K, 10)
        short, long = (call_seconds(data, K, draws) for draws in (10, 10 + cycles))
    each = max(long - short, 1e-9) / cycles
    yield Figure(f"{rows} x {cols}, K = {K}, B = {blocks}: ms of a sweep", f"{1e3 * sweep:.4g}")
    yield Figure("ms of a draw in `sample`, its fit and moments included", f"{1e3 * each:.4g}")
    yield Figure("sweeps that a draw takes as long as", f"{each / sweep:.3g}")
    yield Figure("s of the call without its draws", f"{short - 10 * each:.3g}")


# -- i: new rows ---------------------------------------------------------------------------


def new_rows(device: Device, sizes: Sizes) -> Iterator[Figure]:
    del device
    rows, cols, K = sizes.new
    V = counts_of(rows, cols)
    run: dict[str, Any] = {"random_seed": 0, "progressbar": False}
    point = dfac.optimize(V[: max(8, rows // 100)], dfac.TweedieNMF(K, dispersion=1.0), **run)

    def seconds(some: Array, **place: Any) -> float:
        began = time.perf_counter()
        dfac.transform(point, some, draws=sizes.new_draws, **place, **run)
        return time.perf_counter() - began

    part = V[: max(8, rows // sizes.part)]
    places: tuple[dict[str, Any], ...] = (
        {"device": "cuda"},
        {"executor": ThreadsExecutor(LANES)},
    )
    for place in places:
        seconds(V[:8], **place)  # which compiles
    gpu, cpu = seconds(V, **places[0]), seconds(part, **places[1]) * rows / len(part)
    what = f"{rows} new rows of {cols} cells, K = {K}, {sizes.new_draws} draws"
    yield Figure(f"{what}: s", f"{gpu:.4g}")
    yield Figure(f"{what}, times {LANES} cores", f"{cpu / gpu:.4g}")


# -- b: faces ----------------------------------------------------------------------------


@contextmanager
def counted(device: Device) -> Iterator[Counter[str]]:
    """Count what the device is asked for."""
    asked: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            asked[name] += 1
            return function(*args, **options)

        return call

    for name in ASKED:
        setattr(device, name, counting(name, getattr(device, name)))
    try:
        yield asked
    finally:
        for name in ASKED:
            delattr(device, name)


def launch_seconds(device: Device, repeats: int) -> float:
    """Seconds of a launch that has nothing to do, of many one after the other."""
    kernel, one = source.bands("float32"), np.int64(1)
    first, count = (device.put(np.array([n], np.int64)) for n in (0, 1))
    rows, out = device.zeros((1, 1), np.float32), device.zeros((1, 1), np.float32)

    def many() -> None:
        for _ in range(1000):
            device.launch(kernel, "stack_rows", 1, one, one, one, first, count, rows, out)

    return seconds_of(device, many, repeats) / 1000


def pixels(sizes: Sizes) -> Array:
    """The faces, a tenth of their pixels missing."""
    V = faces.matrix()[: sizes.pixels]
    V[np.random.default_rng(1).random(V.shape) < 0.1] = np.nan
    return V


def face_run(device: Device, sizes: Sizes) -> Iterator[Figure]:
    blocks, V, asked = 8, pixels(sizes), []
    cycles = sizes.iterations // blocks

    def run(iterations: int, executor: Executor) -> float:
        return faces.ours(V, iterations, blocks, likelihood=False, executor=executor)[0]

    for number in (2, 4):
        with counted(device) as found:
            run(number * blocks, DeviceExecutor())
        asked.append(found)
    each = {name: (asked[1][name] - asked[0][name]) / 2 for name in ASKED}
    gpu, cpu = (run(sizes.iterations, made) for made in (DeviceExecutor(), ThreadsExecutor(LANES)))
    floor = sum(each.values()) * launch_seconds(device, sizes.repeats)
    what = f"{V.shape[0]} x {V.shape[1]}, K = {faces.COMPONENTS}, B = {blocks}"
    yield Figure(f"{what}: s of {sizes.iterations} parts", f"{gpu:.4g}")
    yield beside_cpu("b", what, gpu, cpu)
    parts = ", ".join(f"{name} {number:g}" for name, number in each.items())
    yield Figure(f"asked for in a cycle ({parts})", f"{sum(each.values()):g}")
    yield Figure("ms of a cycle, at least by what is asked for", f"{1e3 * floor:.3g}")
    yield Figure("share of this in the time of a cycle", f"{floor / (gpu / cycles):.2f}")


# -- c: sparse ---------------------------------------------------------------------------


def entries_of(rows: int, cols: int, each: int) -> scipy.sparse.csr_array:
    """As many entries in every row, in columns far from each other."""
    rng, stride = np.random.default_rng(0), cols // each
    indices = rng.integers(0, stride, (rows, each), np.int32)
    indices += stride * np.arange(each, dtype=np.int32)
    values = rng.integers(1, 6, rows * each, np.int8).astype(np.float32)
    indptr = each * np.arange(rows + 1, dtype=np.int64)
    return scipy.sparse.csr_array((values, indices.ravel(), indptr), shape=(rows, cols))


def copy_on_device(device: Device, size: int, repeats: int) -> float:
    """Bytes read and written in a second by a copy from the device's memory to itself."""
    one, other = (device.zeros((size // 4,), np.float32) for _ in range(2))

    def copy() -> None:
        other[...] = one

    return 2 * 4 * (size // 4) / seconds_of(device, copy, repeats)


def sparse_epoch(device: Device, sizes: Sizes) -> Iterator[Figure]:
    blocks, (rows, cols, each) = 8, sizes.sparse
    V, count = entries_of(rows, cols, each), rows * each
    part = V[: max(8, rows // sizes.part)]
    rate = copy_on_device(device, 10 * count, sizes.repeats)
    yield Figure("copy on the device: GB/s", f"{rate / 1e9:.4g}")
    with closing(DeviceExecutor()) as executor, as_blocks(V, blocks, **told(V)) as data:
        found = {K: cycle_seconds(data, K, executor, sizes.cycles) for K in sizes.components}
    for K, gpu in found.items():
        moved = count * (28 + 8 * K) + blocks * 7 * 4 * K * (rows + cols)
        what = f"{count:.0e} entries, K = {K}, B = {blocks}"
        yield Figure(f"{what}: ms of an epoch", f"{1e3 * gpu:.4g}")
        yield at_least(f"{what}: share of the rate", moved / gpu / rate, MEMORY_SHARE)
        yield beside_cpu("c", what, gpu, on_processors(part, K, 2) * rows / part.shape[0])


# -- d: data beyond the device's memory ----------------------------------------------------


def copy_to_device(device: Device, size: int, repeats: int) -> float:
    """Bytes copied in a second from pinned memory."""
    host = device.pinned((size,), np.uint8)
    host[:] = 1

    def copy() -> None:
        _, done = device.begin_copies([host])
        device.wait_for_copies(done)

    return size / seconds_of(device, copy, repeats)


def streaming(device: Device, sizes: Sizes) -> Iterator[Figure]:
    blocks, (rows, cols, K) = 16, sizes.streamed
    V = counts_of(rows, cols)
    limit = V.nbytes // 4
    rate = copy_to_device(device, V.nbytes // blocks, sizes.repeats)
    yield Figure("copy from pinned memory: GB/s", f"{rate / 1e9:.4g}")
    stays = on_gpu(V, K, blocks, sizes)
    streams = on_gpu(V, K, blocks, sizes, memory_limit=limit)
    what = f"{V.nbytes / 1e9:.2g} GB, {limit / 1e9:.2g} GB allowed, K = {K}, B = {blocks}"
    yield Figure(f"{what}: ms of a cycle", f"{1e3 * streams:.4g}")
    yield Figure("ms of a cycle if all of it stays there", f"{1e3 * stays:.4g}")
    bound = max(stays, (V.nbytes - limit) / rate)
    yield at_least("share of what copies permit", bound / streams, COPY_SHARE)


# -- e: noise ----------------------------------------------------------------------------


def differences(device: Device, kind: str, count: int) -> Counter[int]:
    """Count numbers by how many units in the last place they are from those of processors."""
    components, rows = 64, min(2**18, max(1, count // 64))
    key, word = np.array([11, 22], np.uint32), {"float32": np.int32, "float64": np.int64}[kind]
    found: Counter[int] = Counter()

    def compared(number: int, there: Array) -> tuple[Array, Array]:
        here = np.empty_like(there)
        philox.fill_normals(here, key, number, number % 2, number * rows)
        away = np.abs(here.view(word).astype(np.int64) - there.view(word).astype(np.int64))
        sizes, counts = np.unique(away, return_counts=True)
        return sizes, counts

    with ThreadPoolExecutor(cpu_count()) as pool:
        chunks, waiting = -(-count // (rows * components)), []
        for number in range(chunks):
            out = device.empty((rows, components), np.dtype(kind))
            steps.fill_normals(out, key, number, number % 2, number * rows)
            waiting.append(pool.submit(compared, number, device.take(out)))
            if len(waiting) > 2 * cpu_count() or number + 1 == chunks:
                for one in waiting:
                    found.update(dict(zip(*(own.tolist() for own in one.result()), strict=True)))
                waiting.clear()
    return found


def noise(device: Device, sizes: Sizes) -> Iterator[Figure]:
    for kind, count in (("float32", sizes.numbers), ("float64", sizes.numbers // 10)):
        found = differences(device, kind, count)
        other = sum(found.values()) - found[0]
        what = f"{kind}: other bits, of {sum(found.values()):.3g} numbers"
        yield Figure(what, str(other), "0", other == 0)
        if other:
            most = sorted((ulp, number) for ulp, number in found.items() if ulp)
            for ulp, number in most[:8]:
                yield Figure(f"{kind}: {ulp} units in the last place", str(number))
            yield Figure(f"{kind}: most units", str(most[-1][0]))


# -- f: posteriors -------------------------------------------------------------------------


def restored(device: str | None, images: Any, draws: int) -> tuple[float, float, float]:
    """Relative error and share in 90 % intervals of erased pixels, and seconds."""
    observed = demos.erase(images, MISSING, 0)
    erased = np.isnan(observed.values)
    began = time.perf_counter()
    with warnings.catch_warnings():  # gray values are whole numbers, but nobody counted them
        warnings.simplefilter("ignore", DataWarning)
        trace = dfac.sample(
            observed,
            dfac.TweedieNMF(images.n_components),
            dfac.PSGLD(),
            draws=draws,
            tune=draws,
            blocks=8,
            keep="moments",
            monitor=erased,
            random_seed=0,
            device=device,
            progressbar=False,
        )
    seconds = time.perf_counter() - began
    new = dfac.monitored(trace, interval=demos.INTERVAL).load()
    cells = new["row_index"].values, new["column_index"].values
    mean = demos.on_grid(new["mean"].values, cells, images.truth)
    inside = demos.coverage(images.truth[cells], new["lower"].values, new["upper"].values)
    return demos.relative_error(images.truth, mean, erased), inside, seconds


def alike(what: str, gpu: float, cpu: float, most: float) -> Figure:
    away = abs(gpu - cpu)
    return Figure(f"{what}, on processors {cpu:.4f}", f"{gpu:.4f}", f"± {most:g}", away <= most)


def posteriors(device: Device, sizes: Sizes) -> Iterator[Figure]:
    del device
    try:
        images = demos.load_faces()
    except (ImportError, OptionError) as reason:
        yield Figure(f"faces: {reason}", "not there")
    else:
        images = images._replace(truth=images.truth[: sizes.pixels])
        (gpu, cpu) = (restored(place, images, sizes.draws) for place in ("cuda", None))
        yield alike(f"faces, {MISSING:.0%} erased: error", gpu[0], cpu[0], SAME_ERROR)
        yield alike("faces: share in 90 % intervals", gpu[1], cpu[1], SAME_COVERAGE)
        yield Figure(f"faces: s of the whole call, {cpu[2]:.1f} on processors", f"{gpu[2]:.1f}")
    train, test = ratings.split(ratings.made_up_ratings(sizes.ratings), 0)
    lengths = {"tune": sizes.rating_draws // 3, "draws": sizes.rating_draws, "seed": 0}
    task = ratings.Task(train, test, 32, max(2, cpu_count()), **lengths)
    model, sampler = dfac.GaussianMF(32), dfac.SGHMC()
    found = [ratings.ours(task._replace(device=place), model, sampler) for place in ("cuda", None)]
    yield alike("ratings: RMSE", found[0].rmse, found[1].rmse, SAME_ERROR)
    yield alike("ratings: share in 90 %", found[0].coverage, found[1].coverage, SAME_COVERAGE)
    seconds = [one.seconds for one in found]
    what = f"ratings: s of the whole call, {seconds[1]:.1f} on processors"
    yield Figure(what, f"{seconds[0]:.1f}")


# -- g: torchnmf -------------------------------------------------------------------------

Path = list[tuple[float, float]]
"""Seconds, and the error by then."""


def our_updates(V: Array, error: Callable[[Array], float], counts: list[int]) -> Path:
    """One call for each length, data brought to the device included."""
    path = []
    for count in [counts[0], *counts]:  # the first compiles
        method = dfac.MultiplicativeUpdates(count, 0)
        began = time.perf_counter()
        point = dfac.optimize(
            V,
            dfac.TweedieNMF(faces.COMPONENTS, dispersion=1.0),
            method,
            blocks=1,
            random_seed=0,
            device="cuda",
            progressbar=False,
        )
        seconds = time.perf_counter() - began
        path.append((seconds, error(point["W"].values @ point["H"].values)))
    return path[1:]


def their_updates(filled: Array, error: Callable[[Array], float], counts: list[int]) -> Path:
    """The same of torchnmf, which goes on from where it was."""
    import torch
    from torchnmf.nmf import NMF

    torch.manual_seed(0)
    NMF(filled.shape, rank=faces.COMPONENTS).cuda().fit(torch.tensor(filled).cuda(), max_iter=2)
    path, spent, done = [], 0.0, 0
    began = time.perf_counter()
    V, model = torch.tensor(filled).cuda(), NMF(filled.shape, rank=faces.COMPONENTS).cuda()
    for count in counts:
        model.fit(V, beta=1, tol=0, max_iter=count - done)
        torch.cuda.synchronize()
        spent, done = spent + time.perf_counter() - began, count
        path.append((spent, error(model().detach().cpu().numpy())))
        began = time.perf_counter()
    return path


def peer(device: Device, sizes: Sizes) -> Iterator[Figure]:
    del device
    V = faces.matrix()[: sizes.pixels]
    erased = np.random.default_rng(2).random(V.shape) < 0.1
    seen = np.where(erased, np.float32(np.nan), V)
    error = partial(demos.relative_error, V, erased=erased)
    counts = [sizes.updates // 2**n for n in range(4, -1, -1)]
    ours = our_updates(seen, error, counts)
    yield Figure(f"our error of held-out pixels after {sizes.updates}", f"{ours[-1][1]:.4f}")
    if importlib.util.find_spec("torchnmf") is None:
        yield Figure("torchnmf", "not installed")
        return
    theirs = their_updates(demos.row_means(seen).astype(np.float32), error, counts)
    target = max(min(one for _, one in path) for path in (ours, theirs))
    first = [next(spent for spent, one in path if one <= target) for path in (ours, theirs)]
    yield Figure(f"s to an error of {target:.4f}, torchnmf {first[1]:.3g}", f"{first[0]:.3g}")
    yield at_least("times as fast as torchnmf", first[1] / first[0], 1.0)


# -- the table -----------------------------------------------------------------------------

ROWS: dict[str, Callable[[Device, Sizes], Iterator[Figure]]] = {
    "a": dense,
    "b": face_run,
    "c": sparse_epoch,
    "d": streaming,
    "e": noise,
    "f": posteriors,
    "g": peer,
    "h": calls,
    "i": new_rows,
}


def release(device: Device) -> None:
    """Give memory back that nothing lies in any more: rows, and torch, find all of it free."""
    device.release()


def shown(row: str, figure: Figure) -> str:
    met = {None: "", True: "met", False: "NOT MET"}[figure.met]
    return f"{row:2} {figure.what:76} {figure.value:>12} {figure.bar:>9}  {met}".rstrip()


def table(device: Device, wanted: list[str], sizes: Sizes) -> bool:
    """Print all lines; tell whether every row was measured."""
    good = True
    print(f"{device.name}, {cpu_count()} cores")
    for row in wanted:
        began = time.perf_counter()
        try:
            for figure in ROWS[row](device, sizes):
                print(shown(row, figure), flush=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            good = False
            print(shown(row, Figure(f"{type(error).__name__}: {error}", "failed")), flush=True)
        release(device)
        print(f"{row:2} ({time.perf_counter() - began:.0f} s)", flush=True)
    return good


def main(given: list[str] | None = None, sizes: Sizes | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(ROWS), help="rows, as a,c")
    parser.add_argument("--small", action="store_true", help="sizes for a quick pass")
    options = parser.parse_args(given)
    wanted = options.only.split(",")
    if set(wanted) - set(ROWS):
        parser.error(f"--only takes some of {','.join(ROWS)}, got {options.only}")
    try:
        device = cuda_device.current()
    except OptionError as reason:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 2
    return 0 if table(device, wanted, sizes or (SMALL if options.small else Sizes())) else 1


if __name__ == "__main__":
    sys.exit(main())
