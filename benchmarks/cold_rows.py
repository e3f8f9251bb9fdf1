"""Counts of rows that nothing was observed of, predicted with and without covariates.

Counts are simulated: 2000 x 300, 5 components whose rows follow from 6 covariates in part (the
shape of the prior around them is 2), a fifth of the rows without any data. Scored are these rows,
cell by cell: the log density of the law that the draws predict, the root mean square error of its
mean (and of the true one), and the share of counts that 90 % intervals hold, their ends randomised
as counts are discrete.

    python benchmarks/cold_rows.py [--rows 2000] [--columns 300] [--seeds 2] [--draws 200]
"""

import argparse
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

import daskfactor as dfac

Array = NDArray[Any]
COMPONENTS, COVARIATES, SHAPE, COLD = 5, 6, 2.0, 0.2
ROWS_AT_ONCE = 20


class Problem(NamedTuple):
    V: Array
    X: Array
    mean: Array
    cold: Array


def simulated(rows: int, columns: int, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, COVARIATES))
    link = 0.4 * rng.normal(size=(COVARIATES, COMPONENTS))
    W = rng.gamma(SHAPE, np.exp(X @ link) / SHAPE)
    mean = W @ rng.gamma(0.5, 1.0, (COMPONENTS, columns))
    return Problem(rng.poisson(mean), X, mean, np.arange(rows) >= (1 - COLD) * rows)


def scores(trace: Any, problem: Problem, seed: int) -> tuple[float, float, float, float]:
    """Log predictive density, error of the mean, and shares that intervals hold."""
    W, H = (trace["posterior"][name].values[0].astype(np.float64) for name in "WH")
    rng, logs, errors, inside, plain = np.random.default_rng(seed), [], [], [], []
    for rows in np.array_split(
        np.flatnonzero(problem.cold), max(1, problem.cold.sum() // ROWS_AT_ONCE)
    ):
        mu, v = np.maximum(W[:, rows] @ H, 1e-12), problem.V[rows]
        logs.append(np.log(stats.poisson.pmf(v, mu).mean(axis=0) + 1e-300))
        errors.append((mu.mean(axis=0) - v) ** 2)
        below, upto = (stats.poisson.cdf(at, mu).mean(axis=0) for at in (v - 1, v))
        at = below + rng.random(v.shape) * (upto - below)
        inside.append((at >= 0.05) & (at <= 0.95))
        cells = dfac.predict(trace, rows=rows, of="observation")
        plain.append((cells["lower"].values <= v) & (v <= cells["upper"].values))
    flat = [np.concatenate(own) for own in (logs, errors, inside, plain)]
    return flat[0].mean(), flat[1].mean() ** 0.5, flat[2].mean(), flat[3].mean()


METHODS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "Gibbs": (dfac.Gibbs(), {}, False),
    "Gibbs, covariates": (dfac.Gibbs(), {}, True),
    "Gibbs, shape learnt": (dfac.Gibbs(), {"shape_w": "auto"}, True),
    "PSGLD": (dfac.PSGLD(), {}, False),
    "PSGLD, covariates": (dfac.PSGLD(), {}, True),
    "PSGLD, shape learnt": (dfac.PSGLD(), {"shape_w": "auto"}, True),
    "SGHMC, covariates": (dfac.SGHMC(), {}, True),
    "BlockHMC, covariates": (dfac.BlockHMC(steps=3), {"shape_w": "auto"}, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--columns", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    given = parser.parse_args()
    print("seed  method                log density    RMSE   randomised   90 % hold   CPU seconds")
    for seed in range(given.seeds):
        problem = simulated(given.rows, given.columns, seed)
        V = problem.V.astype(np.float32)
        V[problem.cold] = np.nan
        for name in given.methods:
            sampler, settings, linked = METHODS[name]
            own = settings | ({"covariates_w": problem.X} if linked else {})
            model = dfac.TweedieNMF(COMPONENTS, dispersion=1.0, **own)
            begun = time.process_time()
            with dfac.as_blocks(V, allow_empty=True) as data:
                lengths = {"draws": given.draws, "tune": given.draws, "random_seed": seed}
                trace = dfac.sample(data, model, sampler, progressbar=False, **lengths)
            took = time.process_time() - begun
            density, error, randomised, plain = scores(trace, problem, seed)
            print(
                f"{seed:4}  {name:22}{density:10.4f}{error:8.3f}{randomised:13.3f}{plain:12.3f}"
                f"{took:14.1f}",
                flush=True,
            )
        truth = problem.mean[problem.cold], problem.V[problem.cold]
        print(
            f"{seed:4}  {'true means':22}{'':10}{np.mean((truth[0] - truth[1]) ** 2) ** 0.5:8.3f}"
        )


if __name__ == "__main__":
    main()
