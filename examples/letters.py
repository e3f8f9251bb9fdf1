"""Pairs of letters: factorizations with and without symmetry, compared by evidence.

Reproduces figure 3 of Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns". The counts of letter pairs in English words are
factorized twice: X(i, j) ≈ Σ_r θ0(r) θ1(i, r) θ2(j, r), and with one table for both letters, X(i,
j) ≈ Σ_r θ0(r) θ1(i, r) θ1(j, r). The log evidence of each is estimated at every rank by sequential
Monte Carlo, and as a variational bound.

    python examples/letters.py [--counts FILE.npz] [--tokens 400] [--ranks 1 2 3 4 5]

Without a file, the words are those of the Python language reference, which is part of every
interpreter. A file has an array ``counts`` (26 x 26) and, optionally, ``letters``. Counts are
thinned to ``--tokens``, which the model permits: the evidences are those of the remaining tokens.
"""

import argparse
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[np.float64]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pairs_of_words() -> xr.DataArray:
    """Count adjacent letters in the words of the language reference."""
    from pydoc_data.topics import topics

    counts = np.zeros((26, 26), np.int64)
    for word in re.findall(r"[a-z]{2,}", " ".join(topics.values()).lower()):
        places = [LETTERS.index(letter) for letter in word]
        np.add.at(counts, (places[:-1], places[1:]), 1)
    return labelled(counts, list(LETTERS))


def pairs_of_file(path: str) -> xr.DataArray:
    """Read counts of adjacent letters from a file."""
    with np.load(path) as file:
        letters = [str(letter) for letter in file["letters"]] if "letters" in file else LETTERS
        return labelled(file["counts"].astype(np.int64), list(letters))


def labelled(counts: NDArray[np.int64], letters: list[str]) -> xr.DataArray:
    """Label counts with their letters."""
    return xr.DataArray(counts, {"first": letters, "second": letters}, ("first", "second"))


def thinned(counts: xr.DataArray, tokens: int) -> xr.DataArray:
    """About so many tokens, each kept with one probability: the same model, at another rate."""
    share = min(1.0, tokens / int(counts.sum()))
    return counts.copy(data=np.random.default_rng(0).binomial(counts.values, share))


def models(rank: int) -> dict[str, dfac.AllocationModel]:
    """Two tables of letters, or one; a letter's pseudo-count in a component is the same."""
    each = 0.1
    two = {"r": 1.0, "first": each, "second": each}
    dims = ("first", "second")
    graph = "r -> first, r -> second"
    return {
        "two tables": dfac.AllocationModel(graph, {"r": rank}, dims, two),
        "one table": dfac.AllocationModel(graph, {"r": rank}, dims, {"r": 1.0}, tied={dims: each}),
    }


def evidences(X: xr.DataArray, ranks: Sequence[int], particles: int) -> dict[str, Any]:
    """Estimates by model and method, rank by rank."""
    methods = {
        "particles": dfac.SequentialMonteCarlo(target=0.5, max_particles=particles),
        "bound": dfac.VariationalBayes(),
    }
    found: dict[str, Any] = {}
    for rank in ranks:
        for name, model in models(rank).items():
            for label, method in methods.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the table has the errors
                    one = dfac.log_evidence(X, model, method, random_seed=0, progressbar=False)
                found.setdefault(f"{name}, {label}", []).append(one)
    return found


def tell(X: xr.DataArray, ranks: Sequence[int], found: dict[str, Any]) -> None:
    """Print the table, the verdicts, and the letters of the components."""
    print(f"{int(X.sum())} pairs of letters; log evidence (nats)")
    print("rank" + "".join(f"{name:>24}" for name in found))
    for row, rank in enumerate(ranks):
        cells = []
        for values in found.values():
            one = values[row]
            error = "" if one.bound else f" ± {one.standard_error:.1f}"
            cells.append(f"{one.value:.1f}{error}".rjust(24))
        print(f"{rank:4d}" + "".join(cells))
    print("\nThe paper's claim: two tables have the larger evidence at every rank")
    for label in ("particles", "bound"):
        two, one = (
            [e.value for e in found[f"{name}, {label}"]] for name in ("two tables", "one table")
        )
        ahead = [rank for rank, a, b in zip(ranks, two, one, strict=True) if a > b]
        print(f"  {label}: true at {len(ahead)} of {len(ranks)} ranks")
    bounds = found["two tables, bound"]
    best = int(np.argmax([one.value for one in bounds]))
    trace = bounds[best].trace
    print(f"\nMost likely letters of the {ranks[best]} components (two tables, from the bound)")
    for r in np.argsort(-trace["table_r"].values):
        words = []
        for dim in ("first", "second"):
            table = trace[f"table_{dim}"].isel(r=r)
            top = table.sortby(table, ascending=False)[dim].values[:6]
            words.append(" ".join(top))
        print(f"  {float(trace['table_r'][r]):.2f}   first {words[0]}   second {words[1]}")


def picture(path: str, X: xr.DataArray, ranks: Sequence[int], found: dict[str, Any]) -> None:
    """Plot the counts, and the evidences of both models."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    shown = left.imshow(np.sqrt(X.values), cmap="Greys")
    for axis, dim in ((left.xaxis, "second"), (left.yaxis, "first")):
        axis.set_ticks(range(X.sizes[dim]), [str(letter) for letter in X[dim].values], fontsize=7)
    left.set(title=f"{int(X.sum())} pairs of letters", xlabel="second", ylabel="first")
    figure.colorbar(shown, ax=left, label="square root of the count", shrink=0.8)
    for (name, values), style in zip(
        found.items(), ("C0o-", "C0s--", "C1o-", "C1s--"), strict=True
    ):
        error = [0.0 if one.bound else 2 * one.standard_error for one in values]
        right.errorbar(ranks, [one.value for one in values], error, fmt=style, label=name)
    right.set(title="Log evidence", xlabel="rank", ylabel="nats")
    right.set_xticks(list(ranks))
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", help="npz file of counts")
    parser.add_argument("--tokens", type=int, default=400, help="number of tokens after thinning")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="ranks to compare"
    )
    parser.add_argument("--particles", type=int, default=2**14, help="largest number of particles")
    parser.add_argument("--picture", default="letters.png", help="image file to write")
    options = parser.parse_args()
    counts = pairs_of_file(options.counts) if options.counts else pairs_of_words()
    X = thinned(counts, options.tokens)
    found = evidences(X, options.ranks, options.particles)
    tell(X, options.ranks, found)
    picture(options.picture, X, options.ranks, found)


if __name__ == "__main__":
    main()
