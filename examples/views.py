"""Predict the proteins of cells from messenger RNA and open regions of DNA.

Three synthetic measurements of one tissue: RNA counts of 300 cells, levels of 12 surface proteins
of half of them, and counts of open regions of most, which are overdispersed. Each is a labelled
table with its own order of cells and its own likelihood. Five programs drive the cells: two of
them produce no protein, and one opens no region.

The matrices are sampled jointly and share the factor of the cells. The example prints the share of
the variance of each measurement that each program explains, with intervals, which reveals programs
that only one measurement shows; and the predicted proteins of cells without protein measurements,
next to the removed values.

    python examples/views.py [--cells 300] [--draws 400] [--picture views.png]

Also prints the share of these values inside their 90 % intervals.
"""

import argparse
from typing import NamedTuple

import numpy as np
import xarray as xr

import daskfactor as dfac

GENES, PROTEINS, REGIONS = 80, 12, 60
NOISE, ALPHA = 1.0, 0.3


class Tissue(NamedTuple):
    """Measurements by name, as they were written; and all proteins."""

    measured: dict[str, xr.DataArray]
    proteins: xr.DataArray


def tissue(cells: int, seed: int = 1) -> Tissue:
    """Make measurements of cells up, and take proteins of half of these away."""
    rng = np.random.default_rng(seed)
    names = np.array([f"cell{number:03d}" for number in range(cells)])
    programs = rng.gamma(0.8, 1.2, (cells, 5))
    weights = {
        "gene": rng.gamma(0.6, 2.0, (5, GENES)),
        "protein": rng.gamma(1.0, 2.0, (5, PROTEINS)),
        "region": rng.gamma(0.6, 1.5, (5, REGIONS)),
    }
    weights["protein"][3:] = 0  # two programs make no protein
    weights["region"][4] = 0  # one of these also opens no region
    mean = {name: programs @ own for name, own in weights.items()}
    values = {
        "gene": rng.poisson(mean["gene"]),
        "protein": rng.normal(mean["protein"], NOISE),
        "region": rng.negative_binomial(1 / ALPHA, 1 / (1 + ALPHA * mean["region"])),
    }
    full = {
        name: xr.DataArray(
            own.astype(np.float32),
            {"cell": names, name: [f"{name}{number:02d}" for number in range(own.shape[1])]},
            ["cell", name],
        )
        for name, own in values.items()
    }
    with_proteins, with_regions = (rng.permutation(cells)[: cells * n // 4] for n in (2, 3))
    measured = {
        "rna": full["gene"],
        "proteins": full["protein"][with_proteins],
        "regions": full["region"][with_regions],
    }
    return Tissue(measured, full["protein"])


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=300, help="number of cells")
    parser.add_argument("--draws", type=int, default=400, help="number of draws")
    parser.add_argument("--picture", help="image file to write")
    arguments = parser.parse_args()

    made = tissue(arguments.cells)
    model = dfac.Coupled(
        5,
        relations={
            "rna": dfac.Relation(law="poisson"),
            "proteins": dfac.Relation(law="normal"),
            "regions": dfac.Relation(law="negative binomial"),
        },
    )
    trace = dfac.sample(
        made.measured,
        model,
        draws=arguments.draws,
        tune=arguments.draws,
        random_seed=1,
        progressbar=False,
    )
    for name, own in made.measured.items():
        dispersion = trace.attrs[f"dispersion_{name}"]
        print(f"{name:9}{own.shape[0]:4} cells x {own.shape[1]:2}, dispersion {dispersion:.2f}")

    shares = tell_shares(trace)
    predicted, truth = tell_predictions(trace, made)
    if arguments.picture:
        draw(shares, predicted, truth, arguments.picture)


def tell_shares(trace: xr.DataTree) -> xr.DataArray:
    """Print the share of the variance of each measurement that each program explains."""
    shares = dfac.explained_variance(trace).stack(sample=("chain", "draw"))
    order = shares.mean("sample").sel(view="proteins").argsort().values[::-1]
    three = [own.isel(component=order) for own in (shares.mean("sample"), *ends(shares))]
    found = three[0]
    print("\nexplained share of the variance by program, % (90 % interval)")
    print("program  " + "".join(f"{name:>20}" for name in found["view"].values))
    for number in range(found.sizes["component"]):
        told = [
            "{:.0f} ({:.0f} to {:.0f})".format(*(100 * float(own[view, number]) for own in three))
            for view in range(found.sizes["view"])
        ]
        print(f"{number + 1:<9}" + "".join(f"{own:>20}" for own in told))
    total = "".join(f"{100 * float(own):>20.0f}" for own in found.sum("component"))
    print(f"total    {total}")
    return found


def ends(shares: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the ends of the central 90 % of the draws."""
    found = shares.quantile([0.05, 0.95], "sample")
    return found[0], found[1]


def tell_predictions(trace: xr.DataTree, made: Tissue) -> tuple[xr.Dataset, xr.DataArray]:
    """Print predicted proteins of cells without measured proteins, and their errors."""
    measured = made.measured["proteins"]
    unseen = np.setdiff1d(made.proteins["cell"].values, measured["cell"].values)
    run = dfac.view(trace, "proteins")
    predicted = dfac.predict(run, rows=list(unseen)).compute()
    truth = made.proteins.sel(cell=unseen)
    inside = (predicted["lower"] <= truth) & (truth <= predicted["upper"])
    error = float(np.sqrt(((predicted["mean"] - truth) ** 2).mean()))
    plain = float(np.sqrt(((measured.mean("cell") - truth) ** 2).mean()))
    print(f"\n{unseen[0]}, without measured proteins (90 % predictive interval)")
    for number in range(4):
        one = predicted.isel(cell=0, protein=number)
        print(
            f"{one['protein'].item()}  {float(one['mean']):5.1f} "
            f"({float(one['lower']):5.1f} to {float(one['upper']):5.1f}), "
            f"true {float(truth[0, number]):5.1f}"
        )
    print(f"root mean squared error in {unseen.size} such cells: {error:.2f}")
    print(f"with the mean of each protein over all cells: {plain:.2f}; noise: {NOISE:.2f}")
    print(f"share of their proteins inside the 90 % intervals: {float(inside.mean()):.3f}")
    return predicted, truth


def draw(shares: xr.DataArray, predicted: xr.Dataset, truth: xr.DataArray, path: str) -> None:
    """Shares of variance, and predictions against the truth."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    bottom = np.zeros(shares.sizes["view"])
    for number in range(shares.sizes["component"]):
        own = shares.isel(component=number).values
        left.bar(shares["view"].values, own, bottom=bottom, label=f"program {number + 1}")
        bottom = bottom + own
    left.set_ylabel("share of the variance")
    left.legend(fontsize="small")
    right.errorbar(
        predicted["mean"].values.ravel(),
        truth.values.ravel(),
        xerr=0.5 * (predicted["upper"] - predicted["lower"]).values.ravel(),
        fmt=".",
        alpha=0.15,
    )
    right.axline((0, 0), slope=1, color="k", linewidth=0.8)
    right.set_xlabel("predicted protein (from RNA and open regions)")
    right.set_ylabel("measured protein")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
