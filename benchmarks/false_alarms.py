"""How often a run warns of counts that are what its model says, and finds those that are not.

Counts come from the model's own law: factors from gamma laws of the shapes that the model has, at a
mean, with K of the truth or more. Every cell of the table is so many data sets and runs of
``sample`` at its defaults (with fewer draws), in per cent of runs: the dispersion was not 1
(``phi``), and the warnings of it (``model``), of the step or a log-likelihood below the start
(``fall``), of a warm start that ended early (``warm``), of a density that still rose (``rise``),
any other (``other``); ``least`` is the smallest dispersion. Then `optimize` (``point``), and
overdispersed counts: negative binomial ones whose variance is ``ratio`` times the mean in every
cell, of which the share is told that is found to be no Poisson counts. Ratios up to 1.25 are within
what the run takes for Poisson counts.

    python benchmarks/false_alarms.py [--full] [--replications 50] [--only null|found] [--seed 0]
        [--chains 1]
"""

import argparse
import warnings
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac

SHAPE, K = (60, 40), 3
RUN: dict[str, Any] = {"draws": 100, "tune": 200, "chains": 1, "executor": "serial"}
WARNINGS = {
    "model": "times as much as Poisson",
    "fall": "below that of the start",
    "warm": "the warm start ended",
    "rise": "tune longer",
}
SHAPES = 0.05, 0.3, 1.0, 3.0
MEANS = 0.01, 1.0, 100.0, 1e4, 1e6
FULL_SHAPES = 0.05, 0.1, 0.3, 1.0, 3.0
FULL_MEANS = 0.01, 0.1, 1.0, 10.0, 100.0, 1e4, 1e6
RATIOS = 1.05, 1.25, 2.0, 4.0


def means(rng: np.random.Generator, shape: float, mean: float) -> NDArray[Any]:
    """Draw the means of a matrix."""
    (rows, columns), mu = SHAPE, np.zeros(1)
    while not mu.mean():
        mu = rng.gamma(shape, size=(rows, K)) @ rng.gamma(shape, size=(K, columns))
    return mu * mean / mu.mean()


def counts(rng: np.random.Generator, mu: NDArray[Any], ratio: float = 1.0) -> NDArray[Any]:
    """Draw counts that vary ``ratio`` times as much as Poisson counts; some are positive."""
    V = np.zeros(1)
    while not V.any():
        excess = ratio - 1
        V = rng.poisson(rng.gamma(mu / excess, excess) if excess else mu)
    return V.astype(np.float64)


def look(V: NDArray[Any], shape: float, k: int, seed: int) -> tuple[float, float, list[str]]:
    """Give the dispersions of a run and of a point estimate, and the kinds of warnings."""
    model = dfac.TweedieNMF(k, shape_w=shape, shape_h=shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = dfac.sample(V, model, random_seed=seed, progressbar=False, **RUN)
    texts = [str(one.message) for one in caught]
    kinds = [
        next((kind for kind, part in WARNINGS.items() if part in text), "other") for text in texts
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        point = dfac.optimize(V, model, random_seed=seed, progressbar=False, executor="serial")
    return run.attrs["dispersion"], point.attrs["dispersion"], kinds


def show(replications: int, shape: float, mean: float, k: int, ratio: float, seed: int) -> None:
    """Print a line of the table."""
    found: Counter[str] = Counter()
    least = 1.0
    for number in range(replications):
        rng = np.random.default_rng((seed, number))
        V = counts(rng, means(rng, shape, mean), ratio)
        phi, point, kinds = look(V, shape, k, number)
        found.update({*kinds, *(["phi"] if phi != 1 else []), *(["point"] if point != 1 else [])})
        least = min(least, phi, point)
    shares = (100 * found[kind] / replications for kind in ("phi", "point", *WARNINGS, "other"))
    table = " ".join(f"{share:6.0f}" for share in shares)
    print(f"{shape:6g} {mean:8g} {k:4d} {ratio:6g} {table} {least:7.3g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--replications", type=int, default=50)
    parser.add_argument("--only", choices=("null", "found"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=1, help="more may be stuck")
    options = parser.parse_args()
    RUN["chains"] = options.chains
    shapes, levels = (FULL_SHAPES, FULL_MEANS) if options.full else (SHAPES, MEANS)
    names = " ".join(f"{name:>6}" for name in ("phi", "point", *WARNINGS, "other"))
    print(f"{'shape':>6} {'mean':>8} {'K':>4} {'ratio':>6} {names} {'least':>7}")
    if options.only != "found":
        for shape, mean, k in product(shapes, levels, (K, 2 * K)):
            show(options.replications, shape, mean, k, 1.0, options.seed)
    if options.only != "null":
        for shape, mean, ratio in product((0.3, 1.0), (1.0, 100.0, 1e4), RATIOS):
            show(options.replications, shape, mean, K, ratio, options.seed)


if __name__ == "__main__":
    main()
