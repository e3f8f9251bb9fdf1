"""Whether what runs say is true: calibration of draws, warnings that are false, the lights.

*Calibration* is simulation-based: data say much of WH, and only the priors hold the scale that W
and H share, so that a sampler has to move along it for intervals of W and of H to cover. The
least p value of all quantities is below .001 by chance about once in a hundred lines.

*False alarms*: counts come from the model's own law, factors from gamma laws of the shapes that the
model has; what a run says against them is false. Of overdispersed counts, which are negative
binomial with the same ratio of variance to mean in every cell, it should say so. Runs are of the
default length while tuning, as the density of sparse factors still rises after 200 cycles.

*Lights*: each case has a truth of its own, long runs of `BlockHMC` (of `Gibbs` for Gaussian
models) from other starts. A run is sound if its means of WH are off by less than a fifth of a
posterior sd and its sds within a sixth, unsound if off by half an sd or sds by a third. A green
light for predictions is false over what is unsound, a red one over what is sound.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product as product_of
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, line
from daskfactor.errors import DaskfactorError, DivergenceError
from daskfactor.results.verdict import lights_in
from tests.statistical.made_counts import K, counts, means

SERIAL = QUIET | {"executor": "serial"}
SHAPE = 12, 9
COUNTS = {"moments": (50.0, 2500.0)}
FEW = {"moments": (2.0, 4.0)}


def pairs() -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Return models, samplers that `sampler="auto"` may choose for them, and what data are like."""
    each = {"rate_w": "component", "rate_h": "component"}
    poisson = {
        "Poisson": dfac.TweedieNMF(2, dispersion=1.0),
        "rates of rows": dfac.TweedieNMF(2, rate_w="row", rate_h="column", dispersion=1.0),
        "rates of components": dfac.TweedieNMF(2, dispersion=1.0, **each),
    }
    shapes = dfac.TweedieNMF(1, rate_w="component", shape_w="auto", shape_h="auto", dispersion=1.0)
    others = {
        "normal": dfac.TweedieNMF(2, beta=2.0, dispersion=4.0),
        "compound Poisson": dfac.TweedieNMF(2, beta=0.5, dispersion=0.5),
        "gamma": dfac.TweedieNMF(1, beta=0.0, dispersion=0.1, shape_w=2.0, shape_h=2.0),
        "negative binomial": dfac.NegativeBinomialNMF(1),
        "dispersions of columns": dfac.NegativeBinomialNMF(1, dispersion="column"),
    }
    linked = np.random.default_rng(0).normal(size=(SHAPE[0], 2))
    real = {
        "Gaussian": dfac.GaussianMF(1, biases=False),
        "Gaussian, biases": dfac.GaussianMF(1),
        "Gaussian, covariates": dfac.GaussianMF(1, covariates_w=linked),
    }
    peaked = dfac.TweedieNMF(2, shape_w=0.3, dispersion=1.0)
    block, gibbs, sghmc = dfac.BlockHMC(), dfac.Gibbs(), dfac.SGHMC()
    found = {}
    for name, law in (poisson | {"shapes": shapes} | others).items():
        found[f"BlockHMC, {name}"] = law, block, COUNTS
    for name, law in (poisson | {"shapes": shapes}).items():
        found[f"Gibbs, {name}"] = law, gibbs, FEW
    for name, law in (poisson | others).items():
        found[f"SGHMC, {name}"] = law, sghmc, COUNTS
    found["PSGLD, peaked priors"] = peaked, dfac.PSGLD(), COUNTS
    for name, law in real.items():
        found[f"Gibbs, {name}"] = law, gibbs, {}
        found[f"SGHMC, {name}"] = law, sghmc, {}
    return found


def covered(found: xr.Dataset, factor: str) -> float:
    """Return how often, in %, the truth's rank is among the middle 90 % of a factor's entries.

    A rank among L draws is one of L + 1 numbers, each of which stands for as long an interval: the
    truth is put anywhere in it, so that the share is 90 % for any L if all is right.
    """
    names = [name for name in found["quantity"].values if str(name).startswith(f"{factor}[")]
    names = [name for name in names if found["levels"].sel(quantity=name) > 0]
    levels = found["levels"].sel(quantity=names)
    ranks = found["rank"].sel(quantity=names)
    share = (ranks + np.random.default_rng(0).random(ranks.shape)) / (levels + 1)
    return 100 * float(((share > 0.05) & (share < 0.95)).mean()) if names else np.nan


def calibrated(chosen: list[str], replications: int, draws: int) -> Iterator[Figure]:
    every = pairs()
    for name in chosen or list(every):
        law, sampler, options = every[name]
        lengths = {"replications": replications, "draws": draws, "tune": draws}
        settings = SERIAL | options | lengths | {"random_seed": 1, "blocks": 1, "together": 1}
        try:
            found = dfac.calibrate(law, SHAPE, sampler, **settings)
        except DivergenceError as error:
            yield Figure(0.0, "", None, name, goal=">= 0.001", note=str(error))
            continue
        known = found.dropna("quantity", subset=["p"])
        if known["quantity"].size:
            note = f"of {known['quantity'].values[0]}, of {known['quantity'].size} quantities"
            least = float(known["p"].min())
            yield Figure(least, "", None, f"{name}, least p", "more", ">= 0.001", note=note)
        for factor in "wh":
            share, what = covered(found, factor), f"{name}, {factor.upper()} in 90 % intervals"
            if share == share:
                yield Figure(share, "%", None, what, "more")


@line("calibration of raw draws, 12 × 9", minutes=0.5)
def calibrations(run: Run) -> Iterator[Figure]:
    names = run.pick(["Gibbs, Gaussian"], ["BlockHMC, Poisson", "Gibbs, Poisson"])
    yield from calibrated(names, *run.pick((10, 20), (40, 200)))


@line("calibration of raw draws, every sampler and model of `auto`", minutes=180, long=True)
def all_calibrations(run: Run) -> Iterator[Figure]:
    yield from calibrated([], 200, 500)


# -- false alarms --------------------------------------------------------------------------------

WARNINGS = {
    "not Poisson": "times as much as Poisson",
    "log-likelihood fell": "below that of the start",
    "warm start ended": "the warm start ended",
    "density rose": "tune longer",
}


def alarms(shape: float, mean: float, ratio: float, replications: int) -> Counter[str]:
    """Count runs that warn, and those whose dispersion is not 1."""
    found: Counter[str] = Counter()
    for number in range(replications):
        rng = np.random.default_rng((0, number))
        V = counts(rng, means(rng, shape, mean), ratio)
        law = dfac.TweedieNMF(K, shape_w=shape, shape_h=shape)
        with warnings.catch_warnings(record=True, action="always") as caught:
            own = SERIAL | {"random_seed": number, "draws": 100}
            tree = dfac.sample(V, law, **own)
        texts = [str(one.message) for one in caught]
        kinds = [kind for kind, part in WARNINGS.items() if any(part in text for text in texts)]
        found.update([*kinds, *(["dispersion"] if tree.attrs["dispersion"] != 1 else [])])
    return found


@line("runs that say counts are not Poisson, 60 × 40, defaults", minutes=0.6)
def false_alarms(run: Run) -> Iterator[Figure]:
    few = ((0.3, 100.0, 1.0), (1.0, 1.0, 1.0), (0.3, 100.0, 2.0))
    shapes, levels, ratios = (0.05, 0.3, 1.0, 3.0), (0.01, 1.0, 100.0, 1e4), (1.0, 1.25, 2.0, 4.0)
    grid = tuple(product_of(shapes, levels, ratios))
    replications = run.pick(1, 6, 50)
    for shape, mean, ratio in run.pick(few[:1], few, grid):
        found = alarms(shape, mean, ratio, replications)
        wrong = ratio <= 1.25  # which a run takes for Poisson counts
        others = {kind: found[kind] for kind in WARNINGS if kind != "not Poisson"}
        note = ", ".join(f"{kind}: {count}" for kind, count in others.items() if count)
        better, goal = ("less", "<= 2") if wrong else ("more", ">= 90")
        what = f"shape {shape:g}, mean {mean:g}, variance {ratio:g} times the mean"
        share = 100 * found["dispersion"] / replications
        yield Figure(share, "%", None, what, better, goal, note=note)


# -- lights --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A run, by seed, of data with a model; the truth is that of long runs."""

    data: Callable[[], Any]
    model: Any
    settings: dict[str, Any]


def product(rows: int, columns: int, rank: int, mean: float, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    mu = rng.exponential(size=(rows, rank)) @ rng.exponential(size=(rank, columns))
    return rng.poisson(mu * mean / mu.mean()).astype(np.float32)


def plain() -> Array:
    return product(60, 40, 4, 5.0, 0)


def stored() -> Any:
    """Return a third of the cells, as a sparse matrix whose others are missing."""
    V = plain()
    rows, columns = np.nonzero(np.random.default_rng(1).random(V.shape) < 0.3)
    return sparse.coo_array((V[rows, columns], (rows, columns)), shape=V.shape).tocsr()


def parts() -> Array:
    """Return six parts that share nothing, for four components: which go together is a mode."""
    mu = np.kron(np.eye(6), np.ones((10, 5))) * 5 + 0.3
    return np.random.default_rng(14).poisson(mu).astype(np.float32)


def positive() -> Array:
    """Return amounts whose spread grows with their mean."""
    mu = product(80, 50, 3, 5.0, 12) + 1.0
    return (mu * np.random.default_rng(12).gamma(8.0, 1 / 8.0, mu.shape)).astype("f4")


def spread() -> Array:
    """Return counts that vary more than Poisson's."""
    mu = product(100, 40, 3, 6.0, 13) + 0.5
    rng = np.random.default_rng(13)
    return rng.poisson(mu * rng.gamma(3.0, 1 / 3.0, mu.shape)).astype("f4")


def signed() -> Array:
    rng = np.random.default_rng(3)
    mean = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40))
    return (mean + rng.normal(size=(60, 40))).astype("f4")


def cases() -> dict[str, Case]:
    """Return runs as users start them, and runs that cannot be sound."""
    four, missing, n4 = {"chains": 4}, {"unstored": "missing"}, dfac.TweedieNMF(4)
    tall, random = lambda: product(400, 30, 3, 3.0, 21), {"init": "random"}
    crude = {"sampler": dfac.PSGLD(warm_start=0, step=0.02), "draws": 200, "tune": 0} | random
    n3 = dfac.TweedieNMF(3)
    return {
        "defaults, 60 × 40": Case(plain, n4, {}),
        "defaults, 200 × 100": Case(lambda: product(200, 100, 5, 5.0, 0), dfac.TweedieNMF(5), {}),
        "four chains": Case(plain, n4, four),
        "Gibbs": Case(plain, dfac.TweedieNMF(4, dispersion=1.0), {"sampler": dfac.Gibbs()}),
        "SGHMC": Case(plain, n4, {"sampler": dfac.SGHMC()}),
        "PSGLD": Case(plain, n4, {"sampler": dfac.PSGLD()}),
        "sparse": Case(stored, n4, missing),
        "sparse, modes": Case(stored, dfac.TweedieNMF(2), missing | four),
        "β = 0": Case(positive, dfac.TweedieNMF(3, beta=0.0), four),
        "β = 2": Case(plain, dfac.TweedieNMF(4, beta=2.0), {}),
        "negative binomial": Case(spread, dfac.NegativeBinomialNMF(3), four),
        "Gaussian": Case(signed, dfac.GaussianMF(3), {"sampler": dfac.Gibbs()}),
        "too many components": Case(plain, dfac.TweedieNMF(8), {"chains": 2}),
        "rank too high": Case(tall, dfac.TweedieNMF(6), four),
        "modes, defaults": Case(parts, n4, {}),
        "modes, four chains": Case(parts, n4, four | random),
        "twenty draws": Case(plain, n4, {"draws": 20, "tune": 5} | random),
        "a hundred draws": Case(plain, n4, {"draws": 100, "tune": 100}),
        "drift": Case(plain, n4, crude),
        "step too large": Case(tall, n3, {"sampler": dfac.PSGLD(step=3.0)}),
        "step too small": Case(plain, n4, {"sampler": dfac.PSGLD(step=0.0005)}),
    }


def moments(tree: Any, V: Any) -> tuple[Array, Array]:
    """Return means and sds of WH at 300 cells."""
    rng = np.random.default_rng(5)
    rows, columns = (rng.integers(0, n, 300) for n in V.shape)
    W, H = (tree["posterior"][name].values.astype(np.float64) for name in "WH")
    mu = np.einsum("cdpk,cdkp->cdp", W[:, :, rows], H[:, :, :, columns]).reshape(-1, 300)
    return mu.mean(axis=0), mu.std(axis=0)


def soundness(tree: Any, truth: Any, V: Any) -> str:
    (mean, sd), (true, spread_of) = moments(tree, V), truth
    off = float(np.sqrt(np.mean(((mean - true) / spread_of) ** 2)))
    ratio = abs(np.log(np.median(sd / spread_of)))
    if off < 0.2 and ratio < np.log(7 / 6):
        return "sound"
    return "unsound" if off > 0.5 or ratio > np.log(4 / 3) else "between"


@line("lights of `summarize` for predictions that are false", minutes=1.0)
def lights(run: Run) -> Iterator[Figure]:
    every = cases()
    few = ["defaults, 60 × 40", "PSGLD", "modes, defaults", "twenty draws", "drift"]
    counted: Counter[str] = Counter()
    long, seeds = run.pick(20, 1000, 2000), run.pick(1, 1, 3)
    for name in run.pick(few[:1], few[1:4], list(every)):
        case = every[name]
        V, gaussian = case.data(), isinstance(case.model, dfac.GaussianMF)
        sampler = dfac.Gibbs() if gaussian else dfac.BlockHMC()
        meant = {key: own for key, own in case.settings.items() if key == "unstored"}
        more = {} if gaussian else {"init": "random", "starts": 4}
        options = SERIAL | more | meant | {"random_seed": 1000, "chains": 2}
        truth = moments(dfac.sample(V, case.model, sampler, long, long // 2, **options), V)
        for seed in range(seeds):
            own = SERIAL | case.settings | {"random_seed": seed}
            tree = dfac.sample(V, case.model, **own)
            try:
                status = lights_in(dfac.summarize(tree).attrs)["predictions"].status
            except DaskfactorError:
                continue
            sound = soundness(tree, truth, V)
            counted[f"{status}, {sound}"] += 1
            counted["all"] += 1
    note = ", ".join(f"{key}: {count}" for key, count in sorted(counted.items()))
    for status, bad in (("green", "unsound"), ("red", "sound")):
        share = 100 * counted[f"{status}, {bad}"] / max(counted["all"], 1)
        yield Figure(share, "%", None, f"{status} over what is {bad}", goal="<= 5", note=note)
