"""Evidence and rank of small counts with Pólya urns, and the cost of computing them.

Reproduces figures 1 and 2 of Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns". For a 3 x 4 matrix of nine tokens, the example computes
the log evidence of every rank exactly, by sequential Monte Carlo, and as a variational bound, and
the weights of the particles. Then it estimates the ranks of synthetic tensors, and measures the
time of both methods for tensors of growing size with the same total.

    python examples/allocation.py [--tensors 5] [--sizes 100 1000 10000] [--picture a.png]

Prints tables, and whether the results confirm the claims of the paper.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[np.float64]
TOY = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
TRUE_RANK, TENSOR, TOKENS = 3, (8, 8, 8), 300


class Toy(NamedTuple):
    """Log evidences of the small matrix by rank, and log weights of particles at rank 2."""

    exact: Array
    particles: Array
    error: Array
    bound: Array
    weights: Array


def evidence(X: Any, model: dfac.AllocationModel, method: Any, seed: int = 0) -> dfac.Evidence:
    """Log p(X), without a progress bar and without warnings: errors are in the tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dfac.log_evidence(X, model, method, random_seed=seed, progressbar=False)


def toy(ranks: Sequence[int]) -> Toy:
    """Every method on the small matrix."""
    models = [dfac.AllocationModel.nmf(rank) for rank in ranks]
    exact = [evidence(TOY, model, dfac.Enumeration()) for model in models]
    found = [evidence(TOY, model, dfac.SequentialMonteCarlo(target=0.02)) for model in models]
    bound = [evidence(TOY, model, dfac.VariationalBayes()) for model in models]
    plain = dfac.SequentialMonteCarlo(particles=2048, islands=4, target=1.0, resampling=None)
    weights = evidence(TOY, dfac.AllocationModel.nmf(2), plain).trace["log_weight"]
    return Toy(
        np.array([one.value for one in exact]),
        np.array([one.value for one in found]),
        np.array([one.standard_error for one in found]),
        np.array([one.value for one in bound]),
        weights.values.ravel(),
    )


def tensor(seed: int) -> Any:
    """Return counts of a tensor of three components, with tables neither flat nor spiky."""
    model = dfac.AllocationModel.cp(
        TRUE_RANK, concentration={"r": 10.0, "i": 0.3, "j": 0.3, "k": 0.3}
    )
    return dfac.simulate(model, TENSOR, total=TOKENS, random_seed=seed).counts


def ranks_of_tensors(ranks: Sequence[int], count: int) -> dict[str, Array]:
    """Log evidence (tensor, rank) of the contracted prior, by both methods."""
    found: dict[str, list[list[float]]] = {"particles": [], "error": [], "bound": []}
    method = dfac.SequentialMonteCarlo(target=0.5, max_particles=2**15)
    for seed in range(count):
        X = tensor(seed)
        models = [dfac.AllocationModel.cp(rank, concentration=10.0) for rank in ranks]
        smc = [evidence(X, model, method, seed) for model in models]
        found["particles"].append([one.value for one in smc])
        found["error"].append([one.standard_error for one in smc])
        bounds = [evidence(X, model, dfac.VariationalBayes(), seed) for model in models]
        found["bound"].append([one.value for one in bounds])
    return {name: np.array(values) for name, values in found.items()}


def seconds_by_size(sizes: Sequence[int], total: int) -> dict[str, Array]:
    """Seconds for matrices of one total: a fixed number of particles, and of iterations."""
    model = dfac.AllocationModel.nmf(4, concentration=100.0)
    methods: dict[str, Any] = {
        "particles": dfac.SequentialMonteCarlo(
            particles=64, islands=4, target=1e9, max_particles=256, moves=0
        ),
        "bound": dfac.VariationalBayes(starts=1, max_iterations=100, tolerance=1e-12),
    }
    found: dict[str, list[float]] = {name: [] for name in methods}
    for size in sizes:
        X = dfac.simulate(model, (size, size), total=total, random_seed=0).counts
        for name, method in methods.items():
            evidence(X, model, method)  # compiles the kernels
            taken = []
            for _ in range(3):
                started = time.perf_counter()
                evidence(X, model, method)
                taken.append(time.perf_counter() - started)
            found[name].append(min(taken))
    return {name: np.array(values) for name, values in found.items()}


def chosen(values: Array, ranks: Sequence[int]) -> Array:
    """Return the rank of the largest value in each row."""
    return np.asarray(ranks)[values.argmax(axis=1)]


def tell(
    ranks: Sequence[int],
    small: Toy,
    tensors: dict[str, Array],
    sizes: Sequence[int],
    seconds: dict[str, Array],
) -> None:
    """Print all tables, and the verdicts on the claims of the paper."""
    print("The 3 x 4 matrix: log evidence (nats)\nrank     exact   particles    error     bound")
    for row, rank in enumerate(ranks):
        print(
            f"{rank:4d}{small.exact[row]:10.3f}{small.particles[row]:12.3f}"
            f"{small.error[row]:9.3f}{small.bound[row]:10.3f}"
        )
    by_particles, by_bound = (chosen(tensors[name], ranks) for name in ("particles", "bound"))
    print(f"\nEstimated ranks of tensors of rank {TRUE_RANK} with {TOKENS} tokens")
    print(f"  particles {by_particles.tolist()}\n  bound     {by_bound.tolist()}")
    print("\nSeconds for the same total\n    size  particles     bound")
    for row, size in enumerate(sizes):
        print(f"{size:8d}{seconds['particles'][row]:11.3f}{seconds['bound'][row]:10.3f}")
    print("\nThe paper's claims")
    peaks = [ranks[int(np.argmax(v))] for v in (small.exact, small.particles, small.bound)]
    print(
        f"  toy: the largest exact evidence is at rank {peaks[0]}, that of particles at "
        f"{peaks[1]}, the largest bound at {peaks[2]}"
    )
    at_true = tensors["particles"][:, ranks.index(TRUE_RANK)]
    best = tensors["particles"].max(axis=1)
    tied = best - at_true <= 2 * np.sqrt(2) * tensors["error"].max(axis=1)
    print(
        f"  rank of tensors: particles are correct or tied within errors in {int(tied.sum())} of "
        f"{len(tied)}, the bound is correct in {int((by_bound == TRUE_RANK).sum())}"
    )
    growth = {name: values[-1] / values[0] for name, values in seconds.items()}
    print(
        f"  from size {sizes[0]} to {sizes[-1]}, the time grows by a factor of "
        f"{growth['particles']:.1f} with particles and {growth['bound']:.1f} with the bound, which "
        "visits only occupied cells and therefore does not grow with the size, either"
    )


def picture(
    path: str,
    ranks: Sequence[int],
    small: Toy,
    tensors: dict[str, Array],
    sizes: Sequence[int],
    seconds: dict[str, Array],
) -> None:
    """Weights, evidences of the matrix, evidences of the tensors, seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    (weights, by_rank), (of_tensors, of_sizes) = axes
    weights.hist(small.weights, bins=60, color="0.6")
    weights.axvline(small.exact[ranks.index(2)], color="k", label="exact log evidence")
    weights.set(title="Weights of particles, rank 2", xlabel="log weight (nats)")
    weights.set_ylabel("particles")
    by_rank.plot(ranks, small.exact, "k-", label="exact")
    by_rank.errorbar(ranks, small.particles, 2 * small.error, fmt="o", label="particles")
    by_rank.plot(ranks, small.bound, "s--", label="variational bound")
    by_rank.set(title="A 3 x 4 matrix of nine tokens", xlabel="rank")
    by_rank.set_ylabel("log evidence (nats)")
    for name, mark, label in (
        ("particles", "o-", "particles"),
        ("bound", "s--", "variational bound"),
    ):
        curve = tensors[name] - tensors["particles"].max(axis=1, keepdims=True)
        middle = np.median(curve, axis=0)
        spread = np.abs(np.quantile(curve, [0, 1], axis=0) - middle)
        of_tensors.errorbar(ranks, middle, spread, fmt=mark, capsize=3, label=label)
        of_sizes.loglog(sizes, seconds[name], mark, label=label)
    of_tensors.axvline(TRUE_RANK, color="0.7", zorder=0)
    of_tensors.set(title=f"Tensors of rank {TRUE_RANK}, {TOKENS} tokens", xlabel="rank")
    of_tensors.set_ylabel("relative to the maximum of particles (nats)")
    of_sizes.set(title="Growing size, same total", xlabel="rows and columns", ylabel="seconds")
    of_sizes.set_ylim(bottom=seconds["bound"].min() / 4, top=4 * seconds["particles"].max())
    for panel in axes.flat:
        panel.legend(frameon=False)
    for panel in (by_rank, of_tensors):
        panel.set_xticks(ranks)
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=5, help="largest rank, at least 3")
    parser.add_argument("--tensors", type=int, default=5, help="number of synthetic tensors")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--total", type=int, default=10_000, help="number of tokens in each matrix")
    parser.add_argument("--picture", default="allocation.png", help="image file to write")
    options = parser.parse_args()
    ranks = range(1, max(options.ranks, TRUE_RANK) + 1)
    small = toy(ranks)
    tensors = ranks_of_tensors(ranks, options.tensors)
    seconds = seconds_by_size(options.sizes, options.total)
    tell(ranks, small, tensors, options.sizes, seconds)
    picture(options.picture, ranks, small, tensors, options.sizes, seconds)


if __name__ == "__main__":
    main()
