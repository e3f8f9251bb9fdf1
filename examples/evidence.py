"""Number of components by thermodynamic integration, with exact evidences and Chib's method.

Reproduces figures 1 and 3 of Şimşekli et al. 2016 (section 4.1). The first model is a sum of R
Gaussian variables, whose evidence is known: it compares this package's temperature ladder with the
uniform one of the paper. The second one is a Poisson factorization of counts of rank 5: it
compares the estimates and the times of thermodynamic integration and Chib's method at every rank.

    python examples/evidence.py [--ranks 10] [--rows 100] [--columns 75] [--picture e.png]

Prints tables, and whether the results confirm the claims of the paper.
"""

import argparse
import time
import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[np.float64]
RATE = 5.0
"""Of the exponential priors on both factors."""
TRUE_RANK = 5


def gaussian_sums(ranks: Sequence[int]) -> dict[str, Array]:
    """Exact evidences of a sum of Gaussian variables, and two ladders' estimates."""

    def law(rank: int) -> dfac.GaussianAdditive:
        return dfac.GaussianAdditive(rank, mean=5.0, scale=3**0.5, noise=5**0.5)

    x = law(TRUE_RANK).generate(np.random.default_rng(0), 5000)
    found = {"exact": np.array([law(rank).log_evidence(x) for rank in ranks])}
    for name, power in (("power ladder", 5.0), ("uniform ladder", 1.0)):
        method = dfac.ThermodynamicIntegration(temperatures=10, power=power)
        estimates = [dfac.log_evidence(x, law(rank), method, random_seed=0) for rank in ranks]
        found[name] = np.array([one.value for one in estimates])
        found[f"{name}, error"] = np.array([one.total_error for one in estimates])
    return found


def factorizations(
    ranks: Sequence[int], rows: int, columns: int
) -> tuple[dict[str, Array], dict[str, float]]:
    """Evidences of counts at every rank by both methods, and the seconds they took."""
    rng = np.random.default_rng(0)
    W = rng.exponential(1 / RATE, (rows, TRUE_RANK))
    V = rng.poisson(W @ rng.exponential(1 / RATE, (TRUE_RANK, columns)))
    methods = {"thermodynamic": dfac.ThermodynamicIntegration(), "Chib": dfac.Chib()}
    found: dict[str, Array] = {}
    seconds: dict[str, float] = {}
    for name, method in methods.items():
        evidence(V, ranks[0], method)  # compiles the kernels
        started = time.perf_counter()
        estimates = [evidence(V, rank, method) for rank in ranks]
        seconds[name] = time.perf_counter() - started
        found[name] = np.array([one.value for one in estimates])
        found[f"{name}, error"] = np.array([one.total_error for one in estimates])
        if name == "Chib":
            found["sweeps that count"] = np.array(
                [float(one.trace["effective_w"]) for one in estimates]
            )
    return found, seconds


def evidence(V: Array, rank: int, method: object) -> dfac.Evidence:
    """Log p(V) at one rank; Chib's warnings are printed as a column instead."""
    model = dfac.TweedieNMF(rank, rate_w=RATE, rate_h=RATE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dfac.log_evidence(
            V, model, method, random_seed=0, progressbar=False, executor="serial"
        )


def table(title: str, ranks: Sequence[int], found: dict[str, Array]) -> None:
    """Print the results by rank."""
    print(f"\n{title}\nrank" + "".join(f"{name:>22}" for name in found))
    for row, rank in enumerate(ranks):
        print(f"{rank:4d}" + "".join(f"{values[row]:22.2f}" for values in found.values()))


def verdict(
    ranks: Sequence[int],
    sums: dict[str, Array],
    counts: dict[str, Array],
    seconds: dict[str, float],
) -> None:
    """Print the verdicts on the claims of the paper."""

    def best(values: Array) -> int:
        return ranks[int(np.argmax(values))]

    exact = sums["exact"]
    print("\nThe paper's claims")
    for name in ("power ladder", "uniform ladder"):
        worst = float(np.abs(sums[name] - exact).max())
        inside = float(np.mean(np.abs(sums[name] - exact) < 2 * sums[f"{name}, error"]))
        print(
            f"  {name}: maximum at R = {best(sums[name])}, exact maximum at R = {best(exact)}; "
            f"largest error {worst:.1f} nats, {inside:.0%} within two standard errors"
        )
    print(
        f"  rank of the counts (true: {TRUE_RANK}): thermodynamic integration "
        f"{best(counts['thermodynamic'])}, Chib {best(counts['Chib'])}"
    )
    ratio = seconds["Chib"] / seconds["thermodynamic"]
    print(
        f"  time for {len(ranks)} ranks: {seconds['thermodynamic']:.1f} s and "
        f"{seconds['Chib']:.1f} s with Chib's method, a factor of {ratio:.1f} (paper: 6)"
    )
    apart = counts["Chib"] - counts["thermodynamic"]
    poor = counts["sweeps that count"] < 10
    if poor.any():
        print(
            f"  but Chib's estimate depends on fewer than ten sweeps at {int(poor.sum())} of "
            f"{len(ranks)} ranks, and differs by up to {np.abs(apart).max():.0f} nats: the times "
            "are not for equally accurate results"
        )


def picture(
    path: str, ranks: Sequence[int], sums: dict[str, Array], counts: dict[str, Array]
) -> None:
    """Both sets of curves."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    highest = sums["exact"].max()
    left.plot(ranks, sums["exact"] - highest, "k-", label="exact")
    for name, mark in (("power ladder", "o"), ("uniform ladder", "s")):
        error = 2 * sums[f"{name}, error"] if name == "power ladder" else None
        left.errorbar(ranks, sums[name] - highest, error, fmt=mark, label=name, ms=5)
    left.set_yscale("symlog", linthresh=10)
    left.set(title="A sum of R Gaussian variables", xlabel="R")
    left.set_ylabel("log evidence relative to the exact maximum (nats)")
    for name, mark in (("thermodynamic", "o-"), ("Chib", "s--")):
        right.errorbar(ranks, counts[name], 2 * counts[f"{name}, error"], fmt=mark, label=name)
    if TRUE_RANK in ranks:
        right.axvline(TRUE_RANK, color="0.7", zorder=0)
    right.set(title=f"Poisson counts of rank {TRUE_RANK}", xlabel="rank")
    right.set_ylabel("log evidence (nats)")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.set_xticks(ranks)
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=10, help="largest rank")
    parser.add_argument("--rows", type=int, default=100, help="rows of the counts")
    parser.add_argument("--columns", type=int, default=75, help="columns of the counts")
    parser.add_argument("--picture", default="evidence.png", help="image file to write")
    options = parser.parse_args()
    ranks = range(1, options.ranks + 1)
    sums = gaussian_sums(ranks)
    table("A sum of Gaussian variables: log evidence (nats)", ranks, sums)
    counts, seconds = factorizations(ranks, options.rows, options.columns)
    size = f"{options.rows} x {options.columns}"
    table(f"Poisson counts, {size}: log evidence (nats)", ranks, counts)
    verdict(ranks, sums, counts, seconds)
    picture(options.picture, ranks, sums, counts)


if __name__ == "__main__":
    main()
