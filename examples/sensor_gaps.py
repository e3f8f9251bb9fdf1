"""Fill the gaps of a labelled sensor record, with error bars.

Sixty sensors measure one value per hour for some weeks; every sensor fails now and then for
several hours. The record is a chunked xarray.DataArray, as if from a file larger than memory. It
consists of three daily and weekly patterns. A Gaussian model (beta = 2) finds these and fills the
missing values with their uncertainty.

    python examples/sensor_gaps.py [--weeks 8] [--draws 300] [--picture gaps.png]

Prints the share of the removed values inside their 90 % intervals.
"""

import argparse

import numpy as np
import xarray as xr

import daskfactor as dfac


def record(weeks: int, seed: int = 0) -> tuple[xr.DataArray, xr.DataArray]:
    """Simulate a record (time, sensor) in degrees; return it complete and with gaps."""
    rng = np.random.default_rng(seed)
    hours = np.arange(weeks * 7 * 24)
    patterns = np.stack(
        [
            6 + 5 * np.sin(2 * np.pi * (hours - 9) / 24),
            3 + 3 * (hours // 24 % 7 < 5),
            4 + 3 * np.cos(2 * np.pi * hours / (24 * 7)),
        ],
        axis=1,
    )
    shares = rng.gamma(2.0, 0.5, (3, 60))
    complete = xr.DataArray(
        patterns @ shares + rng.normal(0, 1.0, (hours.size, 60)),
        dims=("time", "sensor"),
        coords={
            "time": np.datetime64("2025-01-06", "h") + hours.astype("timedelta64[h]"),
            "sensor": [f"S{number:02d}" for number in range(60)],
        },
        name="temperature",
    )
    gaps = np.zeros(complete.shape, dtype=bool)
    for sensor in range(60):
        for start in rng.integers(0, hours.size, 4 * weeks):
            gaps[start : start + rng.integers(3, 20), sensor] = True
    return complete, complete.where(~gaps)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weeks", type=int, default=8, help="length of the record")
    parser.add_argument("--draws", type=int, default=300, help="number of draws")
    parser.add_argument("--picture", help="image file to write")
    arguments = parser.parse_args()

    complete, gappy = record(arguments.weeks)
    trace = dfac.sample(
        gappy.chunk(time=168, sensor=20),
        dfac.TweedieNMF(n_components=3, beta=2.0),
        draws=arguments.draws,
        tune=arguments.draws,
        random_seed=1,
        monitor="missing",
        progressbar=False,
    )
    filled = dfac.monitored(trace, interval=0.9)
    truth = complete.values[filled["row_index"], filled["column_index"]]
    inside = (truth >= filled["lower"]) & (truth <= filled["upper"])
    error = np.sqrt(np.mean((truth - filled["mean"]) ** 2))
    print(f"{gappy.isnull().mean().item():.0%} of {gappy.size} values are missing")
    print(f"noise: sd {np.sqrt(trace.attrs['dispersion']):.3f} estimated, 1 true")
    print(f"root mean squared error of the filled values: {float(error):.3f}")
    print(f"share inside the 90 % intervals: {float(inside.mean()):.3f}")
    if arguments.picture:
        draw(trace, complete, gappy, arguments.picture)


def draw(trace: xr.DataTree, complete: xr.DataArray, gappy: xr.DataArray, path: str) -> None:
    """One sensor's last week: measured, missing, filled in."""
    import matplotlib.pyplot as plt

    week = dfac.predict(trace, rows=complete["time"].values[-168:], columns=["S07"]).squeeze()
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    axes.fill_between(
        week["time"], week["lower"], week["upper"], alpha=0.25, label="90 % predictive interval"
    )
    axes.plot(week["time"], week["mean"], label="posterior mean")
    axes.plot(week["time"], gappy[-168:].sel(sensor="S07"), "k.", label="measured")
    missing = complete[-168:].where(gappy[-168:].isnull()).sel(sensor="S07")
    axes.plot(week["time"], missing, "rx", label="removed")
    axes.set_ylabel("sensor S07, degrees")
    axes.legend(ncols=4, fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
