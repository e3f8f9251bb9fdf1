"""Data beyond memory, files that become stores, and clients through which factors never pass.

Runs under a limit are in a process of their own whose data segment the operating system limits
(RLIMIT_DATA), or whose high-water mark of memory is read (VmHWM), above what it has once everything
is imported and compiled. Out of core, blocks come from a scratch file through the page cache, 5 to
10 GB/s; files are in the page cache, so that disks are not measured.
"""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, cycle_seconds, line
from benchmarks.processes import child, limit_data, memory, restart_peak
from daskfactor.data.store import COMPRESSIONS, BlockStore

MIB = 2**20
PIECE = 5_000_000


def poisson_model(K: int) -> dfac.TweedieNMF:
    return dfac.TweedieNMF(K, dispersion=1.0)


# -- dense, out of core --------------------------------------------------------------------------


def dense_cycle(path: str, K: int, cycles: int, limited: bool) -> float:
    """Return the seconds of a cycle on a store, in memory or within a quarter of it."""
    import zarr

    sampler, options = dfac.PSGLD(warm_start=0), {"blocks": 8}
    # Compiles, and lets BLAS set up its buffer for each thread, which it cannot do later.
    cycle_seconds(np.ones((2048, 1024), np.float32), poisson_model(K), sampler, 2, **options)
    array = zarr.open_array(path, mode="r")
    if not limited:
        return cycle_seconds(np.asarray(array[:]), poisson_model(K), sampler, cycles, **options)
    size = array.shape[0] * array.shape[1] * 4
    limit_data(max(size // 4, 134_000_000))
    with dfac.as_blocks(path, 8, memory_limit=size // 8) as data:
        assert not data.in_memory
        return cycle_seconds(data, poisson_model(K), sampler, cycles)


@line(
    "a cycle of PSGLD out of core, dense, 537 MB under 134 MB, K = 32",
    "in memory",
    "ratio >= 0.9",
    minutes=0.9,
)
def out_of_core(run: Run) -> Figure:
    import zarr

    rows, cols = run.pick((8192, 4096), (16384, 8192))
    with tempfile.TemporaryDirectory() as folder:
        path, rng, part = f"{folder}/matrix.zarr", np.random.default_rng(0), rows // 8
        array = zarr.create_array(path, shape=(rows, cols), chunks=(part, cols // 8), dtype="f4")
        for start in range(0, rows, part):
            array[start : start + part] = rng.poisson(5.0, (part, cols)).astype(np.float32)
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(run.pick(1, 2, 5)):
            for limited, seconds in taken.items():
                options = {"path": path, "K": 32, "cycles": run.pick(2, 6), "limited": limited}
                seconds.append(child(dense_cycle, **options))
    note = f"{rows * cols * 4 / 1e6:.0f} MB"
    return Figure(float(np.median(taken[True])), "s", float(np.median(taken[False])), note=note)


# -- sparse, out of core -------------------------------------------------------------------------


def write_table(path: str, shape: tuple[int, int], entries: int) -> None:
    """Write entries at random, a piece at a time; the first ones meet all rows and columns."""
    rng = np.random.default_rng(0)
    fields = [("row", pa.int64()), ("column", pa.int64()), ("value", pa.float32())]
    with pq.ParquetWriter(path, pa.schema(fields)) as file:
        for start in range(0, entries, PIECE):
            number = np.arange(start, min(start + PIECE, entries))
            drawn = ((size, rng.integers(0, size, number.size)) for size in shape)
            row, column = (np.where(number < size, number, at) for size, at in drawn)
            value = rng.integers(1, 6, number.size).astype(np.float32)
            file.write_table(pa.table({"row": row, "column": column, "value": value}))


def sparse_cycle(store: str, cycles: int, limit: str | None) -> dict[str, float]:
    """Measure a run on a blocked store within a limit of memory."""
    model, sampler = poisson_model(16), dfac.PSGLD(warm_start=0)
    tiny = sparse.random_array((200, 100), density=0.2, rng=np.random.default_rng(0)).tocsr()
    with dfac.as_blocks(tiny, unstored="missing", allow_empty=True) as few:
        cycle_seconds(few, model, sampler, 2)
    lengths: dict[str, Any] = {"draws": cycles, "tune": 2, "keep": "moments"}
    cost = dfac.estimate_cost(store, model, sampler, memory_limit=limit, **lengths)
    before = restart_peak()
    with dfac.as_blocks(store, memory_limit=limit) as data:
        seconds = cycle_seconds(data, model, sampler, cycles)
    peak = memory("VmHWM") - before
    return {"seconds": seconds, "peak": peak, "estimate": cost.peak}


@line("stored entries out of core under 64 MiB, K = 16", "in memory", minutes=0.5)
def huge(run: Run) -> Iterator[Figure]:
    entries = int(1e6 * run.pick(0.2, 20, 300))
    shape = max(200, entries // 1500), max(100, entries // 3000)
    limit, cycles = run.pick("1 MiB", "64 MiB", "512 MiB"), run.pick(2, 4)
    with tempfile.TemporaryDirectory() as folder:
        table, store = f"{folder}/table.parquet", f"{folder}/store.zarr"
        write_table(table, shape, entries)
        made = dfac.convert(table, store, unstored="missing", blocks=8, progressbar=False)
        both = [child(sparse_cycle, store=store, cycles=cycles, limit=one) for one in (limit, None)]
    rate = made.entries_per_second / 1e6
    yield Figure(rate, "million/s", None, f"{entries:.0e} entries, conversion", "more")
    ours, peer = (made.n_stored / one["seconds"] / 1e6 for one in both)
    yield Figure(ours, "million/s", peer, f"{entries:.0e} entries, a cycle", "more")
    peak, told = (both[0][name] / MIB for name in ("peak", "estimate"))
    what = f"{entries:.0e} entries, peak above the start"
    yield Figure(peak, "MiB", told, what, beside="`estimate_cost`")


# -- maps ----------------------------------------------------------------------------------------


def globe(lines: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Return where the sea is, and what the components are there, (component, lat, lon)."""
    lat = xr.DataArray(np.linspace(89.5, -89.5, lines), dims="lat")
    lon = xr.DataArray(np.linspace(0.5, 359.5, 2 * lines), dims="lon")
    coords = {"lat": lat, "lon": lon}
    north, east = np.deg2rad(lat), np.deg2rad(lon)
    land = np.sin(3 * east + 2 * np.cos(2 * north)) + np.cos(4 * north - east) > 1.1
    centres = np.random.default_rng(1).uniform((-60, 0), (60, 360), (5, 2))
    bumps = [
        np.exp(-(((lat - a) / 25) ** 2) - (((lon - b + 180) % 360 - 180) / 50) ** 2)
        for a, b in centres
    ]
    return (~land).assign_coords(coords), xr.concat(bumps, "component").assign_coords(coords)


def seasons(times: Any) -> Array:
    return 1 + np.cos(2 * np.pi * (np.asarray(times)[:, None] / 365 - np.arange(5) / 5))


def write_rain(path: str, times: int, lines: int) -> int:
    """Write made-up rain with continents and gaps; return its bytes."""
    sea, bumps = globe(lines)
    rng, step = np.random.default_rng(0), 64
    flat = bumps.transpose("component", "lat", "lon").values.reshape(5, -1)
    dry = ~sea.transpose("lat", "lon").values.reshape(-1)
    days = np.datetime64("2001-01-01", "ns") + np.arange(times) * np.timedelta64(1, "D")
    for start in range(0, times, step):
        at = np.arange(start, min(times, start + step))
        mean = (0.1 + 3 * seasons(at) @ flat).astype(np.float32)
        values = mean * rng.standard_gamma(4.0, mean.shape, np.float32) / 4
        values[rng.random(values.shape, np.float32) < 0.05] = np.nan
        values[:, dry] = np.nan
        cube = xr.DataArray(
            values.reshape(-1, lines, 2 * lines),
            {"time": days[at], "lat": sea["lat"], "lon": sea["lon"]},
            ("time", "lat", "lon"),
            name="rain",
        )
        chunks = {"rain": {"chunks": (step, max(1, lines // 6), max(1, lines // 3))}}
        more = {"append_dim": "time"} if start else {"encoding": chunks}
        cube.to_dataset().to_zarr(path, consolidated=False, mode="a" if start else "w", **more)
    return times * lines * 2 * lines * 4


def map_draws(folder: str, name: str, draws: int, limit: int | None) -> float:
    """Draw maps and predict a day; return the error of the day."""
    path = f"{folder}/{name}.zarr"
    ds = xr.open_zarr(path, chunks=None, consolidated=False)
    lengths = {"draws": draws, "tune": draws, "store": f"{folder}/{name}-run.zarr"}
    with dfac.as_blocks(ds, rows="time", memory_limit=limit) as data:
        model, sampler = dfac.TweedieNMF(6, beta=1.0), dfac.PSGLD(warm_start=10)
        trace = dfac.sample(data, model, sampler, **lengths, **QUIET)
    moments = dfac.align(trace)["posterior_moments"].to_dataset()[["H_mean", "H_var"]]
    dfac.unstack(moments).load().to_netcdf(f"{folder}/{name}.nc")
    day = dfac.predict(trace, rows=[ds["time"].values[0]], of="mean").load()
    sea, bumps = globe(ds.sizes["lat"])
    weights = xr.DataArray(seasons([0])[0], dims="component")
    truth = 0.1 + 3 * (bumps * weights).sum("component")
    off = (day["mean"].isel(time=0) - truth).where(sea)
    return float(np.sqrt((off**2).mean() / (truth.where(sea) ** 2).mean()))


def map_costs(folder: str, times: int, lines: int, draws: int) -> dict[str, float]:
    """Measure the maps of a store; a process of its own."""
    write_rain(f"{folder}/small.zarr", 32, 24)
    map_draws(folder, "small", draws, None)
    size = times * lines * 2 * lines * 4
    before = restart_peak()
    error = map_draws(folder, "rain", draws, size // 16)
    return {"peak": memory("VmHWM") - before, "error": error, "start": before}


@line(
    "maps of rain, 20 draws, K = 6, and a predicted day, within a quarter of the data", minutes=0.5
)
def maps(run: Run) -> Iterator[Figure]:
    times, lines = run.pick((64, 60), (256, 360), (1024, 360))
    with tempfile.TemporaryDirectory() as folder:
        size = write_rain(f"{folder}/rain.zarr", times, lines)
        sizes = {"times": times, "lines": lines, "draws": run.pick(4, 20)}
        found = child(map_costs, folder=folder, **sizes)
    what = f"{times} × {lines} × {2 * lines}, peak above the start"
    peak, quarter, beside = found["peak"] / MIB, size / 4 / MIB, "a quarter of the data"
    yield Figure(peak, "MiB", quarter, what, goal="ratio >= 1", beside=beside)
    yield Figure(found["error"], "", None, "relative error of the day's means")


# -- tables --------------------------------------------------------------------------------------


@line("a Parquet table into a blocked store and back", minutes=0.3)
def convert(run: Run) -> Iterator[Figure]:
    entries = int(1e6 * run.pick(0.1, 5, 20))
    with tempfile.TemporaryDirectory() as made_up:
        folder = Path(made_up)
        rng, powers = np.random.default_rng(1), (1.5, 3)
        shape = max(1000, entries // 100), max(500, entries // 1000)
        spread = (n * rng.random(entries) ** p for n, p in zip(shape, powers, strict=True))
        rows, cols = (own.astype(np.int64) for own in spread)
        stars = (rng.integers(1, 11, entries) / 2).astype(np.float32)
        table = pa.table({"user": rows * 3 + 7, "film": cols * 11 + 1, "stars": stars})
        pq.write_table(table, folder / "table.parquet")
        options: Any = {"unstored": "zero", "blocks": 8, "progressbar": False}
        dfac.convert(folder / "table.parquet", folder / "warm.zarr", **options)
        for codec in COMPRESSIONS:
            store = folder / f"{codec}.zarr"
            made = dfac.convert(folder / "table.parquet", store, compression=codec, **options)
            rate = made.entries_per_second / 1e6
            note = f"{made.nbytes / made.n_stored:.1f} bytes an entry"
            yield Figure(rate, "million/s", None, f"{codec}, written", "more", note=note)
            opened = BlockStore(str(store))
            blocks, taken = opened.known.grid.all_blocks(), []
            for _ in range(3):
                begun = time.perf_counter()
                with ThreadPoolExecutor(run.threads) as pool:
                    list(pool.map(lambda block, s=opened: s.read(*block).values.size, blocks))
                taken.append(time.perf_counter() - begun)
            rate = made.n_stored / min(taken) / 1e6
            yield Figure(rate, "million/s", None, f"{codec}, read", "more")


def h5ad_peak(folder: str, limit: str) -> int:
    """Return the bytes that converting an .h5ad takes; a process of its own."""
    options: Any = {"unstored": "zero", "blocks": 4, "progressbar": False, "overwrite": True}
    dfac.convert(f"{folder}/small.h5ad", f"{folder}/small.zarr", memory_limit=limit, **options)
    before = restart_peak()
    dfac.convert(f"{folder}/cells.h5ad", f"{folder}/cells.zarr", memory_limit=limit, **options)
    return memory("VmHWM") - before


@line("`convert` of an .h5ad: peak above the start", "the limit", minutes=0.6)
def h5ad(run: Run) -> Iterator[Figure]:
    import anndata

    rng, entries = np.random.default_rng(0), run.pick(10**5, 14_500_000)
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("small", 10**4), ("cells", entries)):
            shape = max(100, size // 1000), 5000
            indptr = np.linspace(0, size, shape[0] + 1).astype(np.int64)
            indices = np.sort(rng.integers(0, shape[1], size).astype(np.int32))
            values = rng.integers(1, 9, size).astype("f4")
            V = sparse.csr_matrix((values, rng.permutation(indices), indptr), shape)
            V.sum_duplicates()
            anndata.AnnData(V).write_h5ad(f"{folder}/{name}.h5ad")
        for limit in ("128 MiB", "32 MiB"):
            peak = child(h5ad_peak, folder=folder, limit=limit) / MIB
            bound = float(limit.split()[0])
            yield Figure(peak, "MiB", bound, f"{V.nnz / 1e6:.3g} million entries, {limit}")


# -- a client of a cluster -----------------------------------------------------------------------


def client_peaks(V: str, folder: str, cycles: int) -> dict[str, Any]:
    """Measure a run on a ring of two workers; a process of its own."""
    from benchmarks.cluster import workers

    model, sampler = poisson_model(32), dfac.PSGLD(warm_start=2)
    lengths: dict[str, Any] = {"draws": cycles, "tune": 2, "keep": "moments"}
    with workers(2) as client:
        options: Any = QUIET | lengths | {"client": client, "executor": "ring"}
        small = np.random.default_rng(0).poisson(2.0, (40, 40)).astype(np.float32)
        dfac.sample(dfac.as_blocks(small, 2), model, sampler, **options)
        foreseen = lengths | {"workers": 2, "executor": "ring", "store": "r"}
        cost = dfac.estimate_cost(V, model, sampler, **foreseen)
        before, theirs = restart_peak(), client.run(restart_peak)
        dfac.sample(V, model, sampler, store=f"{folder}/run.zarr", **options)
        peaks = client.run(memory, "VmHWM")
        most = max(peaks[worker] - theirs[worker] for worker in peaks)
        mine = memory("VmHWM") - before
    return {"client": mine, "worker": most, "told": [cost.client, cost.worker]}


@line(
    "a run of a ring of two workers, K = 32: peaks above the start",
    "`estimate_cost`",
    minutes=1,
    long=True,
)
def client(run: Run) -> Iterator[Figure]:
    rows, columns = run.pick((2000, 1000), (200_000, 100_000), (10_000_000, 1_000_000))
    with tempfile.TemporaryDirectory() as folder:
        table, V = f"{folder}/table.parquet", f"{folder}/v.zarr"
        write_table(table, (rows, columns), 10 * rows)
        dfac.convert(table, V, unstored="missing", blocks=4, progressbar=False)
        found = child(client_peaks, V=V, folder=folder, cycles=run.pick(2, 4))
    copies = f"one copy of the factors {(rows + columns) * 128 / MIB:.0f} MiB"
    for name, told in zip(("client", "worker"), found["told"], strict=True):
        what = f"{rows:,} × {columns:,}, the {name}"
        yield Figure(found[name] / MIB, "MiB", told / MIB, what, note=copies)
