"""Rows that one of three matrices lacks, predicted from the others, and what coupling costs.

Three matrices of the same rows are made up: counts, values with normal noise, and overdispersed
counts. One of them, ``--cold``, lacks half of the rows. Scored are these rows, cell by cell: the
root mean square error of the predictive mean (that of the true means is the least that can be had)
and the share of observations in their 90 % intervals (those of counts hold a little more, as these
are discrete); of all three matrices, of each pair, and of the matrix alone, which knows nothing of
these rows but the prior, beside the means of its columns. Then one relation of Poisson counts
against ``TweedieNMF``, whose draws it has bit for bit: CPU seconds of both on one thread, the
least of several runs in turn, and their ratio.

    python benchmarks/views.py [--rows 400] [--components 5] [--cold values] [--draws 300]
        [--seeds 2] [--sampler BlockHMC] [--runs 5] [--size 1000]
"""

import argparse
import time
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[Any]
COLUMNS = {"counts": 60, "values": 40, "over": 50}
NOISE, ALPHA = 1.5, 0.3
LAWS = {"counts": "poisson", "values": "normal", "over": "negative binomial"}
BETAS = {"counts": 1.0, "values": 2.0}


class Problem(NamedTuple):
    """Matrices with and without the rows that one lacks, and means."""

    given: dict[str, xr.DataArray]
    full: dict[str, Array]
    mean: dict[str, Array]
    cold: Array


def simulated(rows: int, components: int, cold: str, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    W = rng.gamma(1.0, 1.0, (rows, components))
    mean = {
        name: 2 * W @ rng.gamma(0.7, 1.0, (components, count)) for name, count in COLUMNS.items()
    }
    full = {
        "counts": rng.poisson(mean["counts"]),
        "values": rng.normal(mean["values"], NOISE),
        "over": rng.negative_binomial(1 / ALPHA, 1 / (1 + ALPHA * mean["over"])),
    }
    lacking = np.sort(rng.permutation(rows)[: rows // 2])
    given = {
        name: xr.DataArray(own.astype(np.float32), {"row": np.arange(rows)}, ["row", name])
        for name, own in full.items()
    }
    given[cold] = given[cold].drop_sel(row=lacking)
    return Problem(given, full, mean, lacking)


def scored(found: xr.Dataset, truth: Array) -> tuple[float, float]:
    """Error of the predictive mean, and the share of observations in their intervals."""
    found = found.compute()
    inside = (found["lower"].values <= truth) & (truth <= found["upper"].values)
    return float(np.sqrt(np.mean((found["mean"].values - truth) ** 2))), float(inside.mean())


def coupled(problem: Problem, names: list[str], cold: str, given: Any, seed: int) -> xr.Dataset:
    model = dfac.Coupled(
        given.components, relations={name: dfac.Relation(law=LAWS[name]) for name in names}
    )
    data = {name: problem.given[name] for name in names}
    trace = dfac.sample(data, model, sampler(given), **lengths(given, seed))
    return dfac.predict(dfac.view(trace, cold), rows=problem.cold)


def alone(problem: Problem, cold: str, given: Any, seed: int) -> xr.Dataset:
    model: Any = dfac.NegativeBinomialNMF(given.components)
    if cold in BETAS:
        model = dfac.TweedieNMF(given.components, beta=BETAS[cold])
    V = problem.full[cold].astype(np.float32)
    V[problem.cold] = np.nan
    with dfac.as_blocks(V, allow_empty=True) as data:
        trace = dfac.sample(data, model, sampler(given), **lengths(given, seed))
    return dfac.predict(trace, rows=problem.cold)


def sampler(given: Any) -> Any:
    return getattr(dfac, given.sampler)()


def lengths(given: Any, seed: int) -> dict[str, Any]:
    return {"draws": given.draws, "tune": given.draws, "random_seed": seed, "progressbar": False}


def missing_rows(given: Any) -> None:
    others = [name for name in COLUMNS if name != given.cold]
    sets = [[*others, given.cold], *([other, given.cold] for other in others)]
    print("seed  matrices                    RMSE   90 % hold   seconds")
    for seed in range(given.seeds):
        problem = simulated(given.rows, given.components, given.cold, seed)
        truth = problem.full[given.cold][problem.cold]

        def line(
            name: str, error: float, inside: str = "", seconds: str = "", n: int = seed
        ) -> None:
            print(f"{n:4}  {name:25}{error:7.3f}{inside:>12}{seconds:>10}", flush=True)

        for names in [*sets, []]:
            begun = time.perf_counter()
            if names:
                found = coupled(problem, names, given.cold, given, seed)
            else:
                found = alone(problem, given.cold, given, seed)
            error, inside = scored(found, truth)
            told = " + ".join(names) or f"{given.cold} alone (prior)"
            line(told, error, f"{inside:.3f}", f"{time.perf_counter() - begun:.1f}")
        seen = np.setdiff1d(np.arange(given.rows), problem.cold)
        means = problem.full[given.cold][seen].mean(axis=0)
        line("means of columns", float(np.sqrt(np.mean((means - truth) ** 2))))
        true = problem.mean[given.cold][problem.cold]
        line("true means", float(np.sqrt(np.mean((true - truth) ** 2))))


def cost_of_coupling(given: Any) -> None:
    rng = np.random.default_rng(0)
    W, H = rng.gamma(1.0, 1.0, (given.size, 10)), rng.gamma(1.0, 1.0, (10, given.size))
    V = rng.poisson(W @ H).astype(np.float32)
    one = dfac.Relation("row", "column", law="poisson", dispersion=1.0)
    cases: dict[str, Any] = {
        "TweedieNMF": (V, dfac.TweedieNMF(10, dispersion=1.0)),
        "one relation": ({"counts": V}, dfac.Coupled(10, relations={"counts": one})),
    }
    print(f"\n{given.size} x {given.size} counts, 10 components, CPU seconds, least of runs")
    for method in (dfac.PSGLD(), dfac.SGHMC(), dfac.BlockHMC()):
        took: dict[str, list[float]] = {name: [] for name in cases}
        for run in range(given.runs + 1):
            for name, (data, model) in cases.items():
                options: Any = {"blocks": 4, "random_seed": 1, "progressbar": False, "tune": 20}
                begun = time.process_time()
                dfac.sample(data, model, method, 40, executor="serial", **options)
                if run:  # the first one compiles
                    took[name].append(time.process_time() - begun)
        least = {name: min(own) for name, own in took.items()}
        ratio = least["one relation"] / least["TweedieNMF"]
        told = ", ".join(f"{name} {seconds:.3f}" for name, seconds in least.items())
        print(f"{method.name:10}{told}, ratio {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--components", type=int, default=5)
    parser.add_argument("--cold", default="values", choices=list(COLUMNS))
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sampler", default="BlockHMC", help="by the name of its class")
    parser.add_argument("--runs", type=int, default=5, help="of each model, for the ratio of times")
    parser.add_argument("--size", type=int, default=1000, help="rows and columns for the ratio")
    given = parser.parse_args()
    if given.seeds:
        missing_rows(given)
    if given.runs:
        cost_of_coupling(given)


if __name__ == "__main__":
    main()
