"""What an NVIDIA GPU gives, beside two processors of the same machine and what the GPU can do.

A machine without a GPU leaves these lines out. Seconds of cycles are those of a long run less a
short one, so that neither compiling nor placing data and factors counts; clocks are read when the
device has finished. Processors work on a tenth of the rows; their seconds are times ten.

*Sparse*: bytes that must move are, for an entry, its column, value and term by rows, its row, place
and term by columns (28 bytes), and a row of H and one of W (8 K bytes); for each of B updates of a
number of the factors seven numbers. The rate is that of a copy on the device. Rows of H that the
second-level cache has come faster, so that the share may exceed 1.

*Streaming*: of every cycle at least what the limit does not hold comes by copies from pinned
memory.

*torchnmf* takes no gaps, so they are filled with the means of their rows.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
from dask.system import cpu_count

import daskfactor as dfac
from benchmarks import peers
from benchmarks.harness import QUIET, Array, Figure, Run, Skip, line, timed
from benchmarks.kernels import cycle_plan, program, start
from daskfactor import demos
from daskfactor.data.blocks import BlockedData
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataWarning, OptionError
from daskfactor.executors import Executor, ThreadsExecutor
from daskfactor.executors.device import DeviceExecutor
from daskfactor.inference.chain import Chain
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.kernels import langevin, steps
from daskfactor.kernels.cuda import blocks as cuda_blocks
from daskfactor.kernels.cuda import device as cuda_device
from daskfactor.kernels.cuda import source
from daskfactor.kernels.cuda.device import Device

LANES = 2
"""Processors that a GPU is compared with."""
CPU = f"{LANES} processors"
ASKED = ("launch", "products", "zeros", "put")
"""What of `Device` gives the device something to do."""
K_FACES, MISSING = 100, 0.3


@dataclass(frozen=True)
class Sizes:
    """How large the work is; ``part``: one of so many rows is for processors."""

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


SIZES = {
    "usual": Sizes(),
    "long": Sizes(),
    "quick": Sizes(
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
    ),
}


def here(run: Run) -> tuple[Device, Sizes]:
    """Return the device, all of whose memory is free, and the sizes."""
    try:
        device = cuda_device.current()
    except OptionError as reason:
        raise Skip(str(reason)) from None
    device.release()
    return device, SIZES[run.size]


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


def cycle_seconds(data: BlockedData, K: int, executor: Executor, cycles: int) -> float:
    """Return the seconds of one cycle of P-SGLD: a long run less a short one."""
    state, taken = start(data, K), []
    for count in (1, 1, 1 + cycles):  # the first compiles, and places the data
        begun = time.perf_counter()
        state = executor.run(cycle_plan(data, count), program(), state, data)
        taken.append(time.perf_counter() - begun)
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


# -- sweeps --------------------------------------------------------------------------------------


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


@line("a sweep of dense cells on a GPU, 100,000 × 20,000, K = 100")
def dense(run: Run) -> Iterator[Figure]:
    device, sizes = here(run)
    blocks, (rows, cols, K) = 4, sizes.dense
    V = counts_of(rows, cols)
    alone = products_seconds(device, sizes.dense, blocks, sizes.repeats)
    full = on_gpu(V, K, blocks, sizes)
    part = V[: max(8, rows // sizes.part)]
    cpu = on_processors(part, K, 2) * rows / len(part)
    beside = "cuBLAS on the three products"
    yield Figure(1e3 * full, "ms", 1e3 * alone, "a cycle", goal="ratio >= 0.5", beside=beside)
    yield Figure(1e3 * full, "ms", 1e3 * cpu, "a cycle", goal="ratio >= 50", beside=CPU)


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


def copy_to_device(device: Device, size: int, repeats: int) -> float:
    """Bytes copied in a second from pinned memory."""
    host = device.pinned((size,), np.uint8)
    host[:] = 1

    def copy() -> None:
        _, done = device.begin_copies([host])
        device.wait_for_copies(done)

    return size / seconds_of(device, copy, repeats)


@line("an epoch of stored entries on a GPU, 10⁸ of 1,000,000 × 100,000")
def stored(run: Run) -> Iterator[Figure]:
    device, sizes = here(run)
    blocks, (rows, cols, each) = 8, sizes.sparse
    V, count = entries_of(rows, cols, each), rows * each
    part = V[: max(8, rows // sizes.part)]
    rate = copy_on_device(device, 10 * count, sizes.repeats)
    with closing(DeviceExecutor()) as executor, as_blocks(V, blocks, **told(V)) as data:
        found = {K: cycle_seconds(data, K, executor, sizes.cycles) for K in sizes.components}
    for K, gpu in found.items():
        moved = count * (28 + 8 * K) + blocks * 7 * 4 * K * (rows + cols)
        cpu = on_processors(part, K, 2) * rows / part.shape[0]
        what, limit, beside = f"K = {K}", 1e3 * moved / rate, "the rate of a copy"
        yield Figure(1e3 * gpu, "ms", limit, what, goal="ratio >= 0.4", beside=beside)
        yield Figure(1e3 * gpu, "ms", 1e3 * cpu, what, goal="ratio >= 15", beside=CPU)


@line("a cycle over four times the memory that a GPU may use")
def streaming(run: Run) -> Iterator[Figure]:
    device, sizes = here(run)
    blocks, (rows, cols, K) = 16, sizes.streamed
    V = counts_of(rows, cols)
    limit = V.nbytes // 4
    rate = copy_to_device(device, V.nbytes // blocks, sizes.repeats)
    stays = on_gpu(V, K, blocks, sizes)
    streams = on_gpu(V, K, blocks, sizes, memory_limit=limit)
    bound = max(stays, (V.nbytes - limit) / rate)
    what = f"{V.nbytes / 1e9:.2g} GB, {limit / 1e9:.2g} GB allowed"
    beside = "copies from pinned memory"
    yield Figure(1e3 * streams, "ms", 1e3 * bound, what, goal="ratio >= 0.7", beside=beside)


# -- whole calls ---------------------------------------------------------------------------------


def call_seconds(data: BlockedData, K: int, draws: int) -> float:
    """Seconds of a call of `sample` that keeps moments, from first to last."""
    model = dfac.TweedieNMF(K, dispersion=1.0)
    run: dict[str, Any] = QUIET | {"tune": 10, "keep": "moments", "device": "cuda"}
    return timed(dfac.sample, data, model, dfac.PSGLD(warm_start=2), draws=draws, **run)[1]


@line("a draw of `sample` on a GPU, its fit and moments included")
def calls(run: Run) -> Figure:
    _, sizes = here(run)
    blocks, K, cycles = 4, sizes.dense[2], 10 * sizes.cycles
    rows, cols = (max(8, n // 2) for n in sizes.dense[:2])
    with as_blocks(counts_of(rows, cols), blocks) as data:
        with closing(DeviceExecutor()) as executor:
            sweep = cycle_seconds(data, K, executor, sizes.cycles)
        call_seconds(data, K, 10)
        short, long = (call_seconds(data, K, draws) for draws in (10, 10 + cycles))
    each = max(long - short, 1e-9) / cycles
    return Figure(1e3 * each, "ms", 1e3 * sweep, f"{rows} × {cols}, K = {K}", beside="a sweep")


@line("`transform` of new rows on a GPU", CPU)
def new_rows(run: Run) -> Figure:
    _, sizes = here(run)
    rows, cols, K = sizes.new
    V = counts_of(rows, cols)
    point = dfac.optimize(V[: max(8, rows // 100)], dfac.TweedieNMF(K, dispersion=1.0), **QUIET)

    def seconds(some: Array, **place: Any) -> float:
        return timed(dfac.transform, point, some, draws=sizes.new_draws, **place, **QUIET)[1]

    part = V[: max(8, rows // sizes.part)]
    places: tuple[dict[str, Any], ...] = ({"device": "cuda"}, {"executor": ThreadsExecutor(LANES)})
    for place in places:
        seconds(V[:8], **place)  # which compiles
    gpu, cpu = seconds(V, **places[0]), seconds(part, **places[1]) * rows / len(part)
    return Figure(gpu, "s", cpu, f"{rows} rows of {cols} cells, K = {K}, {sizes.new_draws} draws")


# -- faces ---------------------------------------------------------------------------------------


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


def parts_of_faces(V: Array, iterations: int, executor: Executor) -> float:
    """Return seconds of parts of 8 blocks with moments of every cycle, and no other look."""
    from daskfactor.executors.plan import CycleOptions

    cycles = iterations // 8
    with as_blocks(V, 8) as data:
        options = RunOptions(2 * cycles, 0, 1, 1, 0, "moments", 0, "float32")
        model, sampler = dfac.TweedieNMF(K_FACES, dispersion=1.0), dfac.PSGLD(warm_start=2)
        kernel = sampler.kernel(model, data)
        chain: Any = Chain(Setting(data, model, kernel, options, executor), 0)
        chain.start()
        chain._cycle_options = lambda run, end, cycle: CycleOptions(
            record=True, evaluate=cycle == end - 1
        )
        chain.advance(2)  # compiles and touches every buffer
        _, seconds = timed(chain.advance, 2 + cycles)
    executor.close()
    return seconds


@line("1000 parts of faces on a GPU, 10304 × 400, K = 100, B = 8")
def faces(run: Run) -> Iterator[Figure]:
    device, sizes = here(run)
    V, asked = peers.pictures(sizes.pixels), []
    for number in (2, 4):
        with counted(device) as found:
            parts_of_faces(V, number * 8, DeviceExecutor())
        asked.append(found)
    each = {name: (asked[1][name] - asked[0][name]) / 2 for name in ASKED}
    places = (DeviceExecutor(), ThreadsExecutor(LANES))
    gpu, cpu = (parts_of_faces(V, sizes.iterations, place) for place in places)
    floor = sum(each.values()) * launch_seconds(device, sizes.repeats) * (sizes.iterations // 8)
    gpu, cpu, floor = (1000 * seconds / sizes.iterations for seconds in (gpu, cpu, floor))
    note = ", ".join(f"{name} {number:g}" for name, number in each.items())
    what, beside = "moments of every cycle", "what is asked for, if it did nothing"
    yield Figure(gpu, "s", cpu, what, goal="ratio >= 10", beside=CPU)
    yield Figure(gpu, "s", floor, what, note=note, beside=beside)


# -- the same numbers ----------------------------------------------------------------------------


def differences(device: Device, kind: str, count: int) -> Counter[int]:
    """Count numbers by how many units in the last place they are from those of processors."""
    components, rows = 64, min(2**18, max(1, count // 64))
    key, word = np.array([11, 22], np.uint32), {"float32": np.int32, "float64": np.int64}[kind]
    found: Counter[int] = Counter()

    def compared(number: int, there: Array) -> tuple[Array, Array]:
        here = np.empty_like(there)
        langevin.fill_normals(here, key, number, number % 2, number * rows)
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


@line("normal numbers of a GPU with other bits than those of processors")
def noise(run: Run) -> Iterator[Figure]:
    device, sizes = here(run)
    for kind, count in (("float32", sizes.numbers), ("float64", sizes.numbers // 10)):
        found = differences(device, kind, count)
        other = sum(found.values()) - found[0]
        note = f"up to {max(found)} units in the last place" if other else ""
        what = f"{kind}, of {sum(found.values()):.3g}"
        yield Figure(float(other), "", None, what, goal="<= 0", note=note)


def restored(device: str | None, images: Any, draws: int) -> tuple[float, float]:
    """Return the relative error of erased pixels, and their share in 90 % intervals."""
    observed = demos.erase(images, MISSING, 0)
    erased = np.isnan(observed.values)
    model, lengths = dfac.TweedieNMF(images.n_components), {"draws": draws, "tune": draws}
    options = {"blocks": 8, "keep": "moments", "monitor": erased, "device": device}
    # Gray values are whole numbers, but nobody counted them.
    with warnings.catch_warnings(action="ignore", category=DataWarning):
        trace = dfac.sample(observed, model, dfac.PSGLD(), **lengths, **options, **QUIET)
    new = dfac.monitored(trace, interval=demos.INTERVAL).load()
    cells = new["row_index"].values, new["column_index"].values
    mean = demos.on_grid(new["mean"].values, cells, images.truth)
    inside = demos.coverage(images.truth[cells], new["lower"].values, new["upper"].values)
    return demos.relative_error(images.truth, mean, erased), inside


@line("posteriors on a GPU and on processors: how far they differ")
def posteriors(run: Run) -> Iterator[Figure]:
    _, sizes = here(run)

    def alike(what: str, gpu: float, cpu: float, most: float) -> Figure:
        note = f"{gpu:.4f} and {cpu:.4f}"
        return Figure(abs(gpu - cpu), "", None, what, goal=f"<= {most:g}", note=note)

    try:
        images = demos.load_faces()
    except (ImportError, OptionError):
        pass
    else:
        images = images._replace(truth=images.truth[: sizes.pixels])
        gpu, cpu = (restored(place, images, sizes.draws) for place in ("cuda", None))
        yield alike("faces, 30 % erased, error", gpu[0], cpu[0], 0.005)
        yield alike("faces, share in 90 % intervals", gpu[1], cpu[1], 0.01)
    train, test = peers.split(peers.made_up_ratings(sizes.ratings), 0)
    lengths = {"tune": sizes.rating_draws // 3, "draws": sizes.rating_draws}
    scores = partial(peers.our_ratings, train, test, dfac.SGHMC(), **lengths)
    gpu, cpu = scores(device="cuda"), scores(device=None)
    yield alike("ratings, RMSE", gpu[0], cpu[0], 0.005)
    yield alike("ratings, share in 90 % intervals", gpu[1], cpu[1], 0.01)


# -- torchnmf ------------------------------------------------------------------------------------

Path = list[tuple[float, float]]
"""Seconds, and the error by then."""


def our_updates(V: Array, error: Callable[[Array], float], counts: list[int]) -> Path:
    """One call for each length, data brought to the device included."""
    path, model = [], dfac.TweedieNMF(K_FACES, dispersion=1.0)
    for count in [counts[0], *counts]:  # the first compiles
        given = V, model, dfac.MultiplicativeUpdates(count, 0)
        point, seconds = timed(dfac.optimize, *given, blocks=1, device="cuda", **QUIET)
        path.append((seconds, error(point["W"].values @ point["H"].values)))
    return path[1:]


def their_updates(filled: Array, error: Callable[[Array], float], counts: list[int]) -> Path:
    """The same of torchnmf, which goes on from where it was."""
    import torch
    from torchnmf.nmf import NMF

    torch.manual_seed(0)
    NMF(filled.shape, rank=K_FACES).cuda().fit(torch.tensor(filled).cuda(), max_iter=2)
    path, spent, done = [], 0.0, 0
    began = time.perf_counter()
    V, model = torch.tensor(filled).cuda(), NMF(filled.shape, rank=K_FACES).cuda()
    for count in counts:
        model.fit(V, beta=1, tol=0, max_iter=count - done)
        torch.cuda.synchronize()
        spent, done = spent + time.perf_counter() - began, count
        path.append((spent, error(model().detach().cpu().numpy())))
        began = time.perf_counter()
    return path


@line(
    "seconds to an error of held-out pixels by multiplicative updates on a GPU",
    "torchnmf",
    "ratio >= 1",
)
def updates(run: Run) -> Figure:
    _, sizes = here(run)
    V = np.nan_to_num(peers.pictures(sizes.pixels), nan=1.0)
    erased = np.random.default_rng(2).random(V.shape) < 0.1
    seen = np.where(erased, np.float32(np.nan), V)
    error = partial(demos.relative_error, V, erased=erased)
    counts = [sizes.updates // 2**n for n in range(4, -1, -1)]
    ours = our_updates(seen, error, counts)
    if not run.has("torchnmf"):
        return Figure(ours[-1][0], "s", None, f"error {ours[-1][1]:.4f}")
    theirs = their_updates(demos.row_means(seen).astype(np.float32), error, counts)
    target = max(min(one for _, one in path) for path in (ours, theirs))
    first = [next(spent for spent, one in path if one <= target) for path in (ours, theirs)]
    return Figure(first[0], "s", first[1], f"error {target:.4f}")
