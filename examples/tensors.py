"""Patterns of visits by person, place and hour, and predictions of unrecorded visits.

Synthetic counts of visits by 120 people to 40 places in 48 half-hours. Each of four patterns
(commuters, shoppers, a night shift, sport) has people, places and hours. A tenth of all counts is
not recorded.

    python examples/tensors.py [--people 120] [--draws 400] [--picture tensors.png]

Prints the busiest hours of each pattern with intervals, and the errors of predictions for
unrecorded counts.
"""

import argparse

import numpy as np
import xarray as xr

import daskfactor as dfac

PLACES, HOURS, PATTERNS = 40, 48, 4
NAMES = ("person", "place", "hour")


def visits(people: int, seed: int = 1) -> tuple[xr.DataArray, np.ndarray]:
    """Return synthetic counts and their means."""
    rng = np.random.default_rng(seed)
    clock = np.arange(HOURS) / 2.0
    peaks = [(8.0, 18.0), (11.0, 16.0), (1.0, 23.0), (10.0, 20.0)]
    hours = np.stack(
        [sum(np.exp(-0.5 * ((clock - at) / 1.2) ** 2) for at in pair) for pair in peaks], axis=1
    )
    who = rng.gamma(0.4, 2.0, (people, PATTERNS))
    where = rng.gamma(0.3, 2.0, (PLACES, PATTERNS))
    mean = np.einsum("ik,jk,lk->ijl", who, where, hours)
    counts = xr.DataArray(
        rng.poisson(mean).astype(np.float32),
        {
            "person": [f"person{number:03d}" for number in range(people)],
            "place": [f"place{number:02d}" for number in range(PLACES)],
            "hour": clock,
        },
        NAMES,
    )
    return counts, mean


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=120, help="number of people")
    parser.add_argument("--draws", type=int, default=400, help="number of draws")
    parser.add_argument("--picture", help="image file to write")
    arguments = parser.parse_args()

    counts, mean = visits(arguments.people)
    held = dfac.hold_out(counts, 0.1, random_seed=2)
    trace = dfac.sample(
        held.train,
        dfac.CP(PATTERNS, dispersion=1.0),
        draws=arguments.draws,
        tune=arguments.draws,
        monitor=held.cells,
        random_seed=1,
        progressbar=False,
    )
    told = dfac.monitored(trace)
    inside = (told["lower"] <= held.values) & (held.values <= told["upper"])
    error = float(np.sqrt(np.mean((told["mean"].values - mean[held.cells]) ** 2)))
    print(f"{len(held.values)} unrecorded cells: root mean squared error of the predicted")
    print(f"means {error:.3f}, of the mean of all cells {mean[held.cells].std():.3f};")
    print(f"share of the counts inside the 90 % intervals: {float(inside.mean()):.3f}")

    hours = dfac.factors(dfac.align(trace))["hour"].stack(sample=("chain", "draw"))
    shares = hours / hours.sum("hour")
    print("\nbusiest half-hour of each pattern (share of its visits, 90 % interval)")
    for number in range(PATTERNS):
        own = shares.isel(component=number)
        best = int(own.mean("sample").values.argmax())
        low, high = own[best].quantile([0.05, 0.95]).values
        print(
            f"pattern {number + 1}: {float(own['hour'][best]):4.1f} h, "
            f"{float(own[best].mean()):.3f} ({low:.3f} to {high:.3f})"
        )
    if arguments.picture:
        draw(shares, arguments.picture)


def draw(shares: xr.DataArray, path: str) -> None:
    """Hours of every pattern, with intervals."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    low, high = shares.quantile([0.05, 0.95], "sample")
    for number in range(shares.sizes["component"]):
        own = shares.isel(component=number)
        (line,) = axes.plot(own["hour"], own.mean("sample"), label=f"pattern {number + 1}")
        ends = low.isel(component=number), high.isel(component=number)
        axes.fill_between(own["hour"], *ends, alpha=0.25, color=line.get_color())
    axes.set_xlabel("hour of the day")
    axes.set_ylabel("share of a pattern's visits")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
