"""Maps out of core: a (time, lat, lon) store four times as large as the memory it may take.

Made-up rain on a globe, with continents where nothing is measured and gaps at sea, is written
to a zarr store. A child process draws from the posterior of ``sample(V, model, rows="time")``
and gives components and a prediction as maps. The limit is a quarter of the store, beside what
the process has once everything is imported and compiled (its floor); blocks and the pass that
makes them get a quarter of that as ``memory_limit``. It ends with an error if its resident
memory, of which the system keeps the high-water mark (VmHWM), ever was above the limit.

    python benchmarks/maps.py [--times 1024] [--lines 360] [--components 6] [--draws 20]
        [--chunks box | time | space | column] [--folder FOLDER] [--figure maps.png] [--json]

Chunks are boxes, single times of the whole globe, single places at all times, or columns of
places with one longitude at all times.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import xarray as xr

import daskfactor as dfac

TRUE = 5
STEP = 64


def status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def globe(lines: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Where the sea is, and what the components are there, (component, lat, lon)."""
    lat = xr.DataArray(np.linspace(89.5, -89.5, lines), dims="lat")
    lon = xr.DataArray(np.linspace(0.5, 359.5, 2 * lines), dims="lon")
    coords = {"lat": lat, "lon": lon}
    north, east = np.deg2rad(lat), np.deg2rad(lon)
    land = np.sin(3 * east + 2 * np.cos(2 * north)) + np.cos(4 * north - east) > 1.1
    centres = np.random.default_rng(1).uniform((-60, 0), (60, 360), (TRUE, 2))
    bumps = [
        np.exp(-(((lat - a) / 25) ** 2) - (((lon - b + 180) % 360 - 180) / 50) ** 2)
        for a, b in centres
    ]
    return (~land).assign_coords(coords), xr.concat(bumps, "component").assign_coords(coords)


def chunks_of(layout: str, times: int, lines: int) -> tuple[int, int, int]:
    """Sizes of chunks along time, lat and lon."""
    return {
        "box": (STEP, max(1, lines // 6), max(1, lines // 3)),
        "time": (1, lines, 2 * lines),
        "space": (times, 1, max(1, lines // 16)),
        "column": (times, lines, 1),
    }[layout]


def make_store(path: Path, times: int, lines: int, layout: str = "box") -> int:
    """Write the data, a part of the times at once; how many bytes they are as they are used."""
    sea, bumps = globe(lines)
    rng = np.random.default_rng(0)
    days = np.datetime64("2001-01-01", "ns") + np.arange(times) * np.timedelta64(1, "D")
    seasons = 1 + np.cos(2 * np.pi * (np.arange(times)[:, None] / 365 - np.arange(TRUE) / TRUE))
    flat = bumps.transpose("component", "lat", "lon").values.reshape(TRUE, -1)
    shape, chunks = (times, lines, 2 * lines), chunks_of(layout, times, lines)
    whole = np.lib.format.open_memmap(path.with_suffix(".npy"), "w+", np.float32, shape)
    for start in range(0, times, STEP):
        part = slice(start, min(times, start + STEP))
        mean = (0.1 + 3 * seasons[part] @ flat).astype(np.float32)
        values = mean * rng.standard_gamma(4.0, mean.shape, np.float32) / 4
        values[rng.random(values.shape, np.float32) < 0.05] = np.nan
        values[:, ~sea.transpose("lat", "lon").values.reshape(-1)] = np.nan
        whole[part] = values.reshape(-1, lines, 2 * lines)
    cube = xr.DataArray(
        whole,
        {"time": days, "lat": sea["lat"], "lon": sea["lon"]},
        ("time", "lat", "lon"),
        name="rain",
        attrs={"units": "mm/day"},
    )
    cube.to_dataset().to_zarr(path, consolidated=False, encoding={"rain": {"chunks": chunks}})
    path.with_suffix(".npy").unlink()
    return whole.nbytes


def drawn(path: Path, arguments: argparse.Namespace, limit: int | None, out: Path) -> None:
    """Draw from the posterior, and write the components' means and sds as maps."""
    ds = xr.open_zarr(path, chunks=None, consolidated=False)
    weights = np.cos(np.deg2rad(ds["lat"])) if arguments.weights else None
    with dfac.as_blocks(ds, rows="time", memory_limit=limit, weights=weights) as data:
        trace = dfac.sample(
            data,
            dfac.TweedieNMF(arguments.components, beta=1.0),
            dfac.PSGLD(warm_start=arguments.warm_start),
            draws=arguments.draws,
            tune=arguments.draws,
            random_seed=0,
            progressbar=False,
            store=out / "run.zarr",
            overwrite=True,
        )
    aligned = dfac.align(trace)
    moments = dfac.unstack(aligned["posterior_moments"].to_dataset()[["H_mean", "H_var"]])
    moments.load().to_netcdf(out / "maps.nc")
    some = dfac.predict(trace, rows=[ds["time"].values[0]], of="mean")
    some.load().to_netcdf(out / "day.nc")


def child(arguments: argparse.Namespace) -> None:
    """Do it under the limit, after a small run that compiles everything."""
    warnings.simplefilter("ignore")
    folder = Path(arguments.folder)
    small = folder / "small"
    small.mkdir()
    make_store(small / "small.zarr", 32, 24)
    drawn(small / "small.zarr", arguments, None, small)
    floor = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begun = time.perf_counter()
    drawn(folder / "rain.zarr", arguments, arguments.limit // 4, folder)
    found = {"seconds": time.perf_counter() - begun, "floor": floor, "peak": status("VmHWM")}
    print(json.dumps(found))


def errors(folder: Path, lines: int) -> dict[str, float]:
    """Hold the maps against the truth: labels, land, and the day's rain."""
    sea, bumps = globe(lines)
    maps, day = xr.open_dataset(folder / "maps.nc"), xr.open_dataset(folder / "day.nc")
    np.testing.assert_array_equal(maps["lat"], sea["lat"])
    np.testing.assert_array_equal(maps["lon"], sea["lon"])
    ours = maps["H_mean"].isel(chain=0)
    assert (ours.notnull().all("component") == sea).all()
    seasons = 1 + np.cos(2 * np.pi * np.arange(TRUE) / TRUE)
    truth = 0.1 + 3 * (bumps * xr.DataArray(seasons, dims="component")).sum("component")
    off = (day["mean"].isel(time=0) - truth).where(sea)
    scale = float(np.sqrt((truth.where(sea) ** 2).mean()))
    return {"error_of_a_day": float(np.sqrt((off**2).mean())) / scale}


def figure(folder: Path, path: str) -> None:
    """Mean and standard deviation of every component over the sea, and a day's rain."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    maps, day = xr.open_dataset(folder / "maps.nc"), xr.open_dataset(folder / "day.nc")
    mean, sd = maps["H_mean"].isel(chain=0), np.sqrt(maps["H_var"].isel(chain=0))
    panels = [(mean.sel(component=k), f"component {int(k)}, mean") for k in mean["component"]]
    panels += [(sd.isel(component=0), "component 0, sd")]
    panels += [(day["mean"].isel(time=0), "predicted rain of the first day")]
    columns = 2
    fig, axes = plt.subplots(
        -(-len(panels) // columns), columns, figsize=(11, 2.5 * -(-len(panels) // columns)),
        layout="constrained",
    )  # fmt: skip
    for axis, (panel, title) in zip(axes.flat, panels, strict=False):
        axis.set_facecolor("0.75")
        panel.plot.pcolormesh(x="lon", y="lat", ax=axis, cmap="viridis", rasterized=True)
        axis.set_title(title)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1024)
    parser.add_argument("--lines", type=int, default=360)
    parser.add_argument("--components", type=int, default=6)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--warm-start", type=int, default=10, help="passes over the data")
    parser.add_argument("--chunks", choices=("box", "time", "space", "column"), default="box")
    parser.add_argument("--weights", action="store_true", help="weigh cells by cos(lat)")
    parser.add_argument("--folder")
    parser.add_argument("--figure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.limit:
        child(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        where = Path(folder) / "rain.zarr"
        size = make_store(where, arguments.times, arguments.lines, arguments.chunks)
        words = [
            f"--{name.replace('_', '-')}={getattr(arguments, name)}"
            for name in ("times", "lines", "components", "draws", "warm_start")
        ]
        words += ["--weights"] if arguments.weights else []
        words += [f"--folder={folder}", f"--limit={size // 4}"]
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        report = {
            "data_mb": size / 1e6,
            "limit_mb": size / 4e6,
            "peak_above_floor_mb": (found["peak"] - found["floor"]) / 1e6,
            "floor_mb": found["floor"] / 1e6,
            "peak_of_process_mb": found["peak"] / 1e6,
            "seconds": found["seconds"],
            **errors(Path(folder), arguments.lines),
        }
        if arguments.figure:
            figure(Path(folder), arguments.figure)
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:32} {value:12.3f}")
    if report["peak_above_floor_mb"] > report["limit_mb"]:
        raise SystemExit("the peak is above the limit")


if __name__ == "__main__":
    main()
