"""Held-out counts of cells x genes: this package, scikit-learn and poismf side by side.

A tenth of all cells of the matrix, zeros included, is held out. This package is
told that they are missing; the others take no missing entries, see zeros there,
and have their predictions divided by the share that was left in, which is what
makes them fair. Scored is the Poisson log-likelihood of the held-out counts at
the predicted mean, per held-out entry, which the three have in common; and for
this package, under Poisson and negative binomial laws with rates of rows and columns or
without, that of the predictive law, which has the mean and the variance of predictions.
Intervals of small counts cannot but hold too much, because ends are whole numbers: the share
to go by is the one of intervals with ends that are randomised, which would be .9 if the
predictive law were the data's.

    python benchmarks/single_cell.py [--data counts.h5ad] [--components 10 20] [--seeds 3]

``--data`` takes an .h5ad file or a scipy .npz; without it, counts are simulated.
poismf is left out where it cannot be imported.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special, stats
from sklearn.decomposition import NMF

import daskfactor as dfac

Array = NDArray[Any]
SHARE = 0.1
LEAST = 1e-6  # a predicted mean of zero is not held against anybody for ever


class Score(NamedTuple):
    plug_in: float
    predictive: float
    coverage: float
    randomised: float
    seconds: float


def counts(path: str | None) -> sparse.csr_array:
    """The matrix without genes that were never seen."""
    if path is None:
        rng = np.random.default_rng(0)
        mean = rng.gamma(0.3, 1.0, (600, 8)) @ rng.gamma(0.2, 2.0, (8, 6000))
        found = sparse.csr_array(rng.poisson(mean))
    elif Path(path).suffix == ".h5ad":
        import anndata

        found = sparse.csr_array(anndata.read_h5ad(path).X)
    else:
        with np.load(path) as archive:
            parts = (archive["data"], archive["indices"].astype(np.int64), archive["indptr"])
            found = sparse.csr_array(parts, shape=tuple(archive["shape"]))
    found = found.astype(np.float32)
    seen = found.sum(axis=0) > 0
    return found[found.sum(axis=1) > 0][:, seen].tocsr()


def log_poisson(values: Array, mean: Array) -> float:
    mean = np.maximum(mean, LEAST)
    return float(np.mean(special.xlogy(values, mean) - mean - special.gammaln(values + 1)))


def log_negative_binomial(values: Array, mean: Array, variance: Array) -> float:
    """The law that predictions use for counts: mean and total variance matched."""
    mean = np.maximum(mean, LEAST)
    size = mean**2 / np.maximum(variance, 1e-12 * mean**2)
    return float(np.mean(stats.nbinom.logpmf(values, size, size / (size + mean))))


def randomised_coverage(values: Array, mean: Array, variance: Array) -> float:
    """Share of F(v - 1) to F(v) that lies between 5 and 95 %, F the predictive law's."""
    mean = np.maximum(mean, LEAST)
    size = mean**2 / np.maximum(variance, 1e-12 * mean**2)
    low, high = (stats.nbinom.cdf(v, size, size / (size + mean)) for v in (values - 1, values))
    inside = np.minimum(high, 0.95) - np.maximum(low, 0.05)
    return float(np.mean(np.clip(inside / np.maximum(high - low, 1e-300), 0.0, 1.0)))


def models(components: int) -> dict[str, Any]:
    rates: dict[str, Any] = {"rate_w": "row", "rate_h": "column"}
    poisson = dfac.TweedieNMF(components, beta=1.0, dispersion=1.0)
    overdispersed = dfac.NegativeBinomialNMF(components)
    by_column = replace(overdispersed, dispersion="column")
    return {
        "Poisson": poisson,
        "Poisson, rates": replace(poisson, **rates),
        "one alpha": overdispersed,
        "one alpha, rates": replace(overdispersed, **rates),
        "alpha by gene": by_column,
        "alpha by gene, rates": replace(by_column, **rates),
    }


def ours(held: Any, model: Any, seed: int, draws: int) -> Score:
    started = time.perf_counter()
    trace = dfac.sample(
        dfac.as_blocks(held.train, unstored="zero", balance=True),
        model,
        draws=draws,
        tune=draws,
        random_seed=seed,
        monitor=held.cells,
        keep="moments",
        progressbar=False,
    )
    seconds = time.perf_counter() - started
    mean, var = (trace["monitor"][name].values[0].astype(np.float64) for name in ("mean", "var"))
    found = dfac.monitored(trace, interval=0.9)
    inside = (held.values >= found["lower"].values) & (held.values <= found["upper"].values)
    law, alpha = model.likelihood, float(trace.attrs["dispersion"])
    if "dispersion_mean" in trace["posterior_moments"]:
        alpha = trace["posterior_moments"]["dispersion_mean"].values[0][held.cells[1]]
    excess = law.observation_variance(mean, var, alpha) - mean
    return Score(
        log_poisson(held.values, mean),
        log_negative_binomial(held.values, mean, excess),
        float(inside.mean()),
        randomised_coverage(held.values, mean, excess),
        seconds,
    )


def zero_filled(held: Any) -> sparse.csr_array:
    train = held.train.copy()
    train.data[np.isnan(train.data)] = 0
    train.eliminate_zeros()
    return train


def at_cells(W: Array, H: Array, held: Any) -> Array:
    rows, cols = held.cells
    means = np.concatenate(
        [
            np.einsum("nk,nk->n", W[rows[at : at + 65536]], H[:, cols[at : at + 65536]].T)
            for at in range(0, rows.size, 65536)
        ]
    )
    return means / (1 - SHARE)


def scikit_learn(held: Any, components: int, seed: int) -> Score:
    started = time.perf_counter()
    nmf = NMF(
        components,
        beta_loss="kullback-leibler",
        solver="mu",
        init="random",
        max_iter=300,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        W = nmf.fit_transform(sparse.csr_matrix(zero_filled(held)))
    seconds = time.perf_counter() - started
    mean = at_cells(W, nmf.components_, held)
    return Score(log_poisson(held.values, mean), np.nan, np.nan, np.nan, seconds)


def poismf(held: Any, components: int, seed: int) -> Score | None:
    try:
        from poismf import PoisMF
    except ImportError:
        return None
    started = time.perf_counter()
    model = PoisMF(k=components, random_state=seed, produce_dicts=False)
    model.fit(sparse.coo_matrix(zero_filled(held)))
    seconds = time.perf_counter() - started
    mean = at_cells(np.asarray(model.A), np.asarray(model.B).T, held)
    return Score(log_poisson(held.values, mean), np.nan, np.nan, np.nan, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--components", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--rows", type=int, help="take so many cells alone")
    parser.add_argument("--every", action="store_true", help="print every seed's figures")
    arguments = parser.parse_args()
    V = counts(arguments.data)
    if arguments.rows:
        V = V[np.sort(np.random.default_rng(0).permutation(V.shape[0])[: arguments.rows])]
        V = V[:, V.sum(axis=0) > 0].tocsr()
    print(f"{V.shape[0]} x {V.shape[1]}, {V.nnz} stored, {SHARE:.0%} of all cells held out")
    print("  K  method                at the mean   predictive   90 % holds   randomised   seconds")
    for components in arguments.components:
        scores: dict[str, list[Score]] = {}
        for seed in range(arguments.seeds):
            held = dfac.hold_out(V, SHARE, unstored="zero", random_seed=seed)
            made: dict[str, Callable[[], Score | None]] = {
                name: partial(ours, held, model, seed, arguments.draws)
                for name, model in models(components).items()
            }
            made["scikit-learn"] = partial(scikit_learn, held, components, seed)
            made["poismf"] = partial(poismf, held, components, seed)
            for name, make in made.items():
                if (found := make()) is not None:
                    scores.setdefault(name, []).append(found)
                    if arguments.every:
                        print(f"{components:3d}  {name:20s} seed {seed}", *found, flush=True)
        for name, own in scores.items():
            middle = [statistics.median(values) for values in zip(*own, strict=True)]
            print(
                f"{components:3d}  {name:20s} {middle[0]:12.5f} {middle[1]:12.5f} "
                f"{middle[2]:12.3f} {middle[3]:12.3f} {middle[4]:9.1f}"
            )


if __name__ == "__main__":
    main()
