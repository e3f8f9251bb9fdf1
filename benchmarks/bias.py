"""How far Langevin samplers are off at their automatic step, on kinds of data that are hard.

For each kind of data this prints, side by side for the transitions asked for (of samplers that
have them), against a long run that is exact (Gibbs sampling for Poisson counts, BlockHMC for
others):

    shift      of posterior means of μ = WH: root mean square over all cells, in posterior
               standard deviations, less what Monte Carlo errors explain; and what they are
    worst      the largest of these shifts, Monte Carlo errors included
    variance   posterior variance of μ over the reference's: geometric mean over the cells
    lp         shift of the mean log density of data and factors, in its standard deviations
    total      shift of the sum of all μ, in per cent

    python benchmarks/bias.py [--cases sparse dense ...] [--transitions euler moments]
        [--sampler PSGLD | SGHMC | auto] [--step 0.2] [--draws 3000] [--chains 4] [--json]

Under ``--sampler auto`` a line says which sampler that is, and ends with what the run warned of
if it misses: a shift of .1 sd above Monte Carlo errors, a cell beyond 1 sd, a variance ratio
outside .93 to 1.08, a log density beyond .5 sd, each with two of its errors.

A case takes about half a minute. Errors of a mean come from the spread of chains, which start
from points of their own.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.errors import ModelError, SamplingWarning
from daskfactor.inference.base import best_sampler, checked_sampler

Array = NDArray[Any]


class Case(NamedTuple):
    """Data, and a model with all of its numbers given; B."""

    V: Any
    model: dfac.TweedieNMF
    blocks: int = 3


class Found(NamedTuple):
    """Of every chain: means and variances of all cells, (chains, cells); of lp, (chains, draws)."""

    mean: Array
    variance: Array
    density: Array


def factors(
    shape: tuple[int, int], components: int, mean: float, rng: np.random.Generator
) -> tuple[Array, Array, float]:
    """Exponential factors whose product has this mean, and their rate."""
    rate = (components / mean) ** 0.5
    W = rng.exponential(1 / rate, (shape[0], components))
    return W, rng.exponential(1 / rate, (components, shape[1])), rate


def counts(
    rows: int = 60,
    columns: int = 50,
    components: int = 4,
    mean: float = 3.0,
    times: float = 1.0,
    shape: float = 1.0,
    change: Callable[[Array], Array] | None = None,
    blocks: int = 3,
) -> Case:
    """Poisson counts; ``times`` the rates that made them are the model's."""
    rng = np.random.default_rng(1)
    W, H, rate = factors((rows, columns), components, mean, rng)
    mu = W @ H if change is None else change(W @ H)
    V = np.where(np.isnan(mu), np.nan, rng.poisson(np.nan_to_num(mu))).astype(np.float32)
    rate *= times * shape
    numbers = {"rate_w": rate, "rate_h": rate, "shape_w": shape, "shape_h": shape}
    model = dfac.TweedieNMF(components, beta=1.0, dispersion=1.0, **numbers)
    return Case(V, model, blocks)


def sparse_counts(shape: float = 1.0) -> Case:
    case = counts(200, 150, 10, 0.05, shape=shape)
    return case._replace(V=sp.csr_array(case.V))


def emptied(mu: Array) -> Array:
    """Some rows and columns without a count."""
    mu = mu.copy()
    mu[::6] = 0
    mu[:, ::5] = 0
    return mu


def uneven(mu: Array) -> Array:
    """Most of what is observed lies in a few blocks."""
    rows, columns = (np.arange(n) // -(-n // 3) for n in mu.shape)
    seen = np.where(rows[:, None] == columns, 0.95, 0.1)
    return np.where(np.random.default_rng(2).random(mu.shape) < seen, mu, np.nan)


def heavy(mu: Array) -> Array:
    """Rows whose sizes follow a power law."""
    return mu * (len(mu) ** 0.7 / np.arange(1, len(mu) + 1) ** 1.2)[:, None]


def real(beta: float, dispersion: float, mean: float) -> Case:
    """Data under another law: near zero, with many zeros, or of both signs."""
    rng = np.random.default_rng(3)
    W, H, rate = factors((40, 30), 3, mean, rng)
    mu = W @ H
    if beta == 0:
        V = rng.gamma(1 / dispersion, mu * dispersion)
    elif beta == 0.5:  # a Poisson number of gamma numbers, of shape 1
        n, scale = rng.poisson(2 * mu**0.5 / dispersion), dispersion * mu**0.5 / 2
        V = np.where(n > 0, rng.gamma(np.maximum(n, 1), scale), 0.0)
    else:
        V = mu + rng.normal(size=mu.shape) * dispersion**0.5
    numbers = {"dispersion": dispersion, "rate_w": rate, "rate_h": rate}
    return Case(V.astype(np.float32), dfac.TweedieNMF(3, beta=beta, **numbers), 3)


CASES: dict[str, Callable[[], Case]] = {
    "dense": lambda: counts(100, 60, 8, 5.0),
    "sparse": sparse_counts,
    "empty rows": lambda: counts(change=emptied),
    "rank > columns": lambda: counts(60, 5, 8),
    "one row": lambda: counts(1, 60, 3, blocks=1),
    "one column": lambda: counts(60, 1, 3, blocks=1),
    "strong priors": lambda: counts(times=10.0),
    "weak priors": lambda: counts(times=0.05),
    "shape 3": lambda: counts(shape=3.0),
    "shape .5": lambda: counts(shape=0.5),
    "shape .3": lambda: counts(shape=0.3),
    "sparse, shape .3": lambda: sparse_counts(0.3),
    "unequal blocks": lambda: counts(change=uneven),
    "power law": lambda: counts(change=heavy),
    "beta 0, near 0": lambda: real(0.0, 0.5, 1e-3),
    "beta .5, zeros": lambda: real(0.5, 2.0, 0.5),
    "beta 2, signs": lambda: real(2.0, 1.0, 0.7),
    "rank 1": lambda: counts(20, 15, 1, 2.0),
    "rank 2": lambda: counts(20, 15, 2, 2.0),
}


def blocked(case: Case, blocks: int) -> Any:
    """Return the data on a grid."""
    unstored = None if isinstance(case.V, np.ndarray) else "zero"
    return dfac.as_blocks(case.V, blocks, unstored=unstored, allow_empty=True)


def run(
    case: Case, sampler: Any, draws: int, chains: int, *, tune: int, seed: int, blocks: int
) -> Found:
    """Chains of a sampler, and what is known of every cell."""
    tree = dfac.sample(
        blocked(case, blocks),
        case.model,
        sampler,
        draws,
        tune,
        chains,
        random_seed=seed,
        keep="moments",
        monitor=np.ones(case.V.shape, bool),
        progressbar=False,
        executor="serial",
    )
    cells = tree["monitor"]
    return Found(cells["mean"].values, cells["var"].values, tree["sample_stats"]["lp"].values)


def against(found: Found, exact: Found) -> dict[str, float]:
    """The figures of one line of the table."""
    (mean, variance), (truth, spread) = (
        (
            one.mean.mean(axis=0, dtype=float),
            one.variance.mean(axis=0, dtype=float) + one.mean.var(axis=0, dtype=float),
        )
        for one in (found, exact)
    )
    shift = (mean - truth) / np.sqrt(spread)
    error = sum(one.mean.var(axis=0, ddof=1) / len(one.mean) for one in (found, exact)) / spread
    density = exact.density
    return {
        "shift": float(np.sqrt(max(0.0, np.mean(shift**2) - np.mean(error)))),
        "error": float(np.sqrt(np.mean(error))),
        "worst": float(np.abs(shift).max()),
        "variance": float(np.exp(np.mean(np.log(variance / spread)))),
        "lp": float((found.density.mean() - density.mean()) / density.std()),
        "lp error": float(
            np.hypot(*(one.density.mean(axis=1).std() for one in (found, exact)))
            / np.sqrt(len(density))
            / density.std()
        ),
        "total": float(100 * (mean.sum() / truth.sum() - 1)),
    }


def missed(line: dict[str, float]) -> str:
    """Tell what is beyond its bar, by more than two errors where these are known."""
    bars = {
        "shift": line["shift"] > 0.1 + line["error"],
        "worst": line["worst"] > 1.0 + 4 * line["error"],
        "variance": not 0.93 <= line["variance"] <= 1.08,
        "lp": abs(line["lp"]) > 0.5 + 2 * line["lp error"],
    }
    found = [name for name, beyond in bars.items() if beyond]
    return f"  MISSES {', '.join(found)}" if found else ""


def reference(case: Case, draws: int, chains: int) -> Found:
    """A run without a bias."""
    exact = dfac.Gibbs() if case.model.beta == 1 else dfac.BlockHMC()
    return run(case, exact, 2 * draws, chains, tune=draws // 2, seed=1, blocks=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--transitions", nargs="+", default=["euler", "moments"])
    parser.add_argument("--sampler", default="PSGLD")
    parser.add_argument("--step", type=float, default=None)
    parser.add_argument("--draws", type=int, default=3000)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    head = f"{'shift':>8}{'':8}{'worst':>7}{'variance':>10}{'lp':>8}{'':7}{'total':>8}"
    print(f"{'case':18}{'transition':12}{head}")
    results: dict[str, Any] = {}
    for name in args.cases:
        case = CASES[name]()
        own = {"step": args.step or "auto"}
        if args.sampler == "auto":
            with blocked(case, case.blocks) as data:
                best = best_sampler(case.model, data)
            samplers = {best.name: best}
        else:
            kind = getattr(dfac, args.sampler)
            samplers = {args.sampler: kind(**own)}
            if hasattr(kind, "transition"):
                samplers = {name: kind(**own, transition=name) for name in args.transitions}
        try:
            checked_sampler(case.model, next(iter(samplers.values())))
        except ModelError as refused:
            print(f"{name:18}{refused}")
            continue
        exact = reference(case, args.draws, args.chains)
        for kind, sampler in samplers.items():
            settings = {"tune": args.draws // 3, "seed": 0, "blocks": case.blocks}
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                line = against(run(case, sampler, args.draws, args.chains, **settings), exact)
            warned = sum(issubclass(one.category, SamplingWarning) for one in told)
            results.setdefault(name, {})[kind] = line
            print(
                f"{name:18}{kind:12}{line['shift']:8.3f} ±{line['error']:.3f} {line['worst']:7.2f}"
                f"{line['variance']:10.3f}{line['lp']:+8.2f} ±{line['lp error']:.2f}"
                f"{line['total']:+8.2f} %{missed(line)}" + " (warned)" * bool(warned),
                flush=True,
            )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
