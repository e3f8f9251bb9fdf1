"""What ``summarize`` says of runs that are sound and of runs that are not: the table of its lights.

Every case has a truth of its own: a posterior worked out by quadrature, or long runs of
`BlockHMC` (of `Gibbs` for Gaussian models) from other starts. ``off`` is the root mean square, over
cells, of how far a run's means of WH are from it, in posterior standard deviations; ``sd`` the
median ratio of standard deviations. A run is sound if it is off by less than a fifth and sd is
within a sixth, unsound if it is off by half or sd by a third, else in between. Then come the
least cosine of a component's means with the truth's (a component that the truth has not got
counts as 0; - where components mean nothing), and how far the mean log density of a chain is from
that of the truth, in its standard deviations; and the three lights. A green light is false over
what is unsound: predictions as above, a component with a cosine below 0.8, a log density off by 2
or more. A red one is false over predictions that are sound, components with cosines of 0.95 or
more, a log density off by half or less.

Thresholds were chosen with the cases of ``usual`` and seeds 0 to 2. Those of ``fresh`` were written
down afterwards, and looked at once: they say how the lights do on what they were not made for.

    python benchmarks/verdicts.py [--set fresh] [--cases default ...] [--seeds 3] [--first 0]
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DaskfactorError
from daskfactor.results.align import law_of, match, reference_from
from daskfactor.results.diagnose import balanced_density
from daskfactor.results.verdict import LIGHTS

Array = NDArray[Any]
QUIET = {"progressbar": False, "executor": "serial"}
CELLS = 300


class Truth(NamedTuple):
    """Posterior mean and sd of WH at cells, the components (W, H) where they mean something, and
    mean and sd of the log density with the dispersion that it is taken at."""

    rows: Array
    columns: Array
    mean: Array
    sd: Array
    factors: tuple[Array, Array] | None
    lp: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Case:
    """A run, by seed, of data with a model whose posterior is known."""

    name: str
    data: Callable[[], Any]
    model: Any
    settings: dict[str, Any] = field(default_factory=dict)
    run: Callable[..., Any] = dfac.sample
    truth: Callable[["Case"], Truth] | None = None


def counts(rows=60, columns=40, components=4, mean=5.0, seed=0) -> Array:
    """Poisson counts under factors from exponential laws."""
    rng = np.random.default_rng(seed)
    mu = rng.exponential(size=(rows, components)) @ rng.exponential(size=(components, columns))
    return rng.poisson(mu * mean / mu.mean()).astype(np.float32)


def gaps(share=0.3) -> Array:
    """Counts of which some are missing."""
    V = counts()
    V[np.random.default_rng(1).random(V.shape) < share] = np.nan
    return V


def stored(share=0.3) -> Any:
    """The observed ones alone."""
    V = gaps(1 - share)
    rows, columns = np.nonzero(~np.isnan(V))
    return sparse.coo_array((V[rows, columns], (rows, columns)), shape=V.shape).tocsr()


def parts() -> Array:
    """Four parts that share nothing, for three components: which two go together is a mode."""
    mu = np.kron(np.eye(4), np.ones((8, 6))) * 8 + 0.5
    return np.random.default_rng(2).poisson(mu).astype(np.float32)


def real_valued() -> Array:
    """Ratings, more or less."""
    rng = np.random.default_rng(3)
    return (rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40)) + rng.normal(size=(60, 40))).astype(
        "f4"
    )


def positions(V: Any, count: int = CELLS) -> tuple[Array, Array]:
    """Cells, drawn at random."""
    rng = np.random.default_rng(5)
    chosen = rng.choice(V.shape[0] * V.shape[1], min(count, V.shape[0] * V.shape[1]), replace=False)
    return np.divmod(chosen, V.shape[1])


_long: dict[Any, Truth] = {}


def long_run(case: Case) -> Truth:
    """Means over two chains of 2,000 draws each, from other starts and other seeds."""
    key = case.data, repr(case.model)
    if key not in _long:
        V, gaussian = case.data(), isinstance(case.model, dfac.GaussianMF)
        sampler = dfac.Gibbs() if gaussian else dfac.BlockHMC()
        options = QUIET | {"chains": 2, "random_seed": 1000, "keep": "draws"}
        init = {} if gaussian else {"init": "random", "starts": 4}
        meant = observed(V) | {k: v for k, v in case.settings.items() if k == "unstored"}
        tree = dfac.sample(V, case.model, sampler, 2000, 1000, **options, **init, **meant)
        _long[key] = reading(tree, *positions(V), components=not gaussian)
    return _long[key]


def observed(V: Any) -> dict[str, Any]:
    """What an entry means that a sparse matrix does not store."""
    return {"unstored": "missing"} if sparse.issparse(V) else {}


def reading(tree: Any, rows: Array, columns: Array, components: bool) -> Truth:
    """Means over all draws of a tree."""
    W, H = (tree["posterior"][name].values.astype(np.float64) for name in "WH")
    if "biases" in str(tree.attrs.get("model")):
        components = False
    drawn = np.einsum("cdpk,cdkp->cdp", W[:, :, rows], H[:, :, :, columns]).reshape(-1, len(rows))
    factors = None
    if components:
        moments = dfac.align(tree)["posterior_moments"].to_dataset().mean("chain")
        factors = moments["W_mean"].values, moments["H_mean"].values
    lp = density(tree)
    own = lp.mean(), lp.std(), tree.attrs.get("dispersion", np.nan)
    level = None if "weight" in tree["sample_stats"] else tuple(map(float, own))
    return Truth(rows, columns, drawn.mean(axis=0), drawn.std(axis=0), factors, level)


def density(tree: Any) -> Array:
    """The log density with W and H of one weight, as the lights take it, where the model tells."""
    balanced = balanced_density(tree)
    return tree["sample_stats"]["lp"].values if balanced is None else balanced


def by_quadrature(case: Case) -> Truth:
    r"""One component, two columns: given H, every row of W is gamma, and H has two dimensions.

    .. math:: p(h | V) \propto e^{-\lambda (h_1 + h_2)} h_1^{s_1} h_2^{s_2}
        (\lambda + h_1 + h_2)^{-\sum_i (1 + r_i)}
    """
    V = case.data().astype(np.float64)
    rate, (r, s) = float(case.model.rate_w), (V.sum(axis=1), V.sum(axis=0))
    x = np.exp(np.linspace(-7, 4, 900))
    h1, h2 = np.meshgrid(x, x, indexing="ij")
    log = -rate * (h1 + h2) + (s[0] + 1) * np.log(h1) + (s[1] + 1) * np.log(h2)
    log -= (len(r) + r.sum()) * np.log(rate + h1 + h2)
    mass = np.exp(log - log.max())
    mass /= mass.sum()
    rows, columns = positions(V)
    first, second = [], []
    for i, j in zip(rows, columns, strict=True):
        h, shape, scale = (h1, h2)[j], 1 + r[i], rate + h1 + h2
        first.append((mass * h * shape / scale).sum())
        second.append((mass * h**2 * shape * (shape + 1) / scale**2).sum())
    mean = np.array(first)
    return Truth(rows, columns, mean, np.sqrt(np.array(second) - mean**2), None)


def tiny() -> Array:
    return np.array([[3, 1], [0, 2], [5, 4]], dtype=np.float32)


def particles(V: Any, model: Any, random_seed: int, **options: Any) -> Any:
    options.pop("executor")
    return dfac.stein_posterior(V, model, particles=20, random_seed=random_seed, **options)


def point(V: Any, model: Any, **options: Any) -> Any:
    return dfac.optimize(V, model, **options)


@cache
def cases() -> list[Case]:
    """All of them."""
    K4 = dfac.TweedieNMF(4)
    one = dfac.TweedieNMF(1, dispersion=1.0, rate_w=1.0, rate_h=1.0)
    moments = {"keep": "moments", "monitor": "missing"}
    langevin = {"sampler": dfac.PSGLD()}
    large = lambda: counts(200, 100, 5)  # noqa: E731
    crude = {"sampler": dfac.PSGLD(warm_start=0, step=0.02)}
    return [
        Case("default, 200 x 100", large, dfac.TweedieNMF(5)),
        Case("default, mean 50", lambda: counts(200, 100, 5, 50.0, 1), dfac.TweedieNMF(5)),
        Case("default, K = 10", lambda: counts(200, 100, 10, 10.0, 2), dfac.TweedieNMF(10)),
        Case("default, 60 x 40", counts, K4),
        Case("four chains", counts, K4, {"chains": 4}),
        Case("Gibbs", counts, dfac.TweedieNMF(4, dispersion=1.0), {"sampler": dfac.Gibbs()}),
        Case("SGHMC", counts, K4, {"sampler": dfac.SGHMC()}),
        Case("PSGLD", counts, K4, langevin),
        Case("PSGLD, long", counts, K4, langevin | {"draws": 5000, "tune": 2000}),
        Case("missing cells", gaps, K4),
        Case("sparse", stored, K4, {"unstored": "missing"}),
        Case("sparse, modes", stored, dfac.TweedieNMF(2), {"unstored": "missing", "chains": 4}),
        Case("rates learnt", counts, dfac.TweedieNMF(4, rate_w="component", rate_h="component")),
        Case("beta = 2", counts, dfac.TweedieNMF(4, beta=2.0)),
        Case("GaussianMF", real_valued, dfac.GaussianMF(3), {"sampler": dfac.Gibbs()}),
        Case("one component", counts, dfac.TweedieNMF(1)),
        Case("one component, tiny", tiny, one, truth=by_quadrature),
        Case("two components, tiny", lambda: counts(4, 3, 2, 3.0), dfac.TweedieNMF(2)),
        Case("moments, four chains", gaps, K4, moments | {"chains": 4}),
        Case("moments, one chain", gaps, K4, moments),
        Case("too many components", counts, dfac.TweedieNMF(8), {"chains": 2}),
        Case("twenty draws", counts, K4, {"draws": 20, "tune": 5, "init": "random"}),
        Case("a hundred draws", counts, K4, {"draws": 100, "tune": 100}),
        Case("from a random start", counts, K4, {"draws": 200, "tune": 0, "init": "random"}),
        Case("drift", counts, K4, crude | {"draws": 200, "tune": 0, "init": "random"}),
        Case("chains in modes", parts, dfac.TweedieNMF(3), {"chains": 4, "init": "random"}),
        Case("step large", counts, K4, {"sampler": dfac.PSGLD(step=1.0)}),
        Case("step too large", counts, K4, {"sampler": dfac.PSGLD(step=5.0)}),
        Case("step too small", counts, K4, {"sampler": dfac.PSGLD(step=0.0005)}),
        Case("particles", counts, K4, run=particles),
        Case("optimize's point", counts, K4, run=point),
    ]


def zeros() -> Any:
    """Counts of which most are zero, as a sparse matrix has them."""
    return sparse.csr_array(counts(300, 60, 4, 0.3, 11))


def positive() -> Array:
    """Amounts whose spread grows with their mean."""
    mu = counts(80, 50, 3, 5.0, 12) + 1.0
    return (mu * np.random.default_rng(12).gamma(8.0, 1 / 8.0, mu.shape)).astype("f4")


def spread() -> Array:
    """Counts that vary more than Poisson's."""
    mu = counts(100, 40, 3, 6.0, 13) + 0.5
    rng = np.random.default_rng(13)
    return rng.poisson(mu * rng.gamma(3.0, 1 / 3.0, mu.shape)).astype("f4")


def halves() -> Array:
    """Six parts for four components: which go together is a mode."""
    mu = np.kron(np.eye(6), np.ones((10, 5))) * 5 + 0.3
    return np.random.default_rng(14).poisson(mu).astype(np.float32)


def noisy() -> Array:
    """Four factors under noise, to be explained by two that are not negative."""
    rng = np.random.default_rng(15)
    mu = rng.exponential(size=(70, 4)) @ rng.exponential(size=(4, 50))
    return np.abs(mu + rng.normal(size=mu.shape)).astype("f4")


def wide() -> Array:
    rng = np.random.default_rng(16)
    return (rng.normal(size=(30, 2)) @ rng.normal(size=(2, 150)) * 2).astype("f4") + rng.normal(
        size=(30, 150)
    ).astype("f4")


def one_stuck(V: Any, model: Any, **options: Any) -> Any:
    """Four chains of which one never leaves its first draw."""
    tree = dfac.sample(V, model, chains=4, **options)
    for group in ("posterior", "sample_stats"):
        drawn = tree[group].to_dataset()
        for name, of in drawn.data_vars.items():
            values = of.values.copy()
            values[1] = values[1, :1]
            drawn[name] = of.copy(data=values)
        tree[group] = xr.DataTree(drawn)
    return tree


def drifting(V: Any, model: Any, **options: Any) -> Any:
    """Draws on their way from a start to the posterior: those of tuning, kept."""
    return dfac.sample(V, model, dfac.PSGLD(warm_start=2), draws=150, tune=0, **options)


@cache
def fresh() -> list[Case]:
    """Cases that nobody looked at when thresholds were chosen."""
    tall, long = lambda: counts(400, 30, 3, 3.0, 21), lambda: counts(25, 250, 4, 8.0, 22)
    K3, four = dfac.TweedieNMF(3), {"chains": 4}
    few = {"draws": 40, "tune": 40}
    return [
        Case("400 x 30", tall, K3),
        Case("25 x 250", long, dfac.TweedieNMF(4), four),
        Case("zeros, sparse", zeros, dfac.TweedieNMF(4), {"unstored": "zero"}),
        Case("zeros, four chains", zeros, dfac.TweedieNMF(4), {"unstored": "zero"} | four),
        Case("beta = 0", positive, dfac.TweedieNMF(3, beta=0.0), four),
        Case("beta = 0, one chain", positive, dfac.TweedieNMF(3, beta=0.0)),
        Case("negative binomial", spread, dfac.NegativeBinomialNMF(3), four),
        Case("overdispersed", spread, K3),
        Case("beta = 2, low rank", noisy, dfac.TweedieNMF(2, beta=2.0), four),
        Case("beta = 2, one chain", noisy, dfac.TweedieNMF(2, beta=2.0)),
        Case("GaussianMF, wide", wide, dfac.GaussianMF(2), four),
        Case("modes, one chain", halves, dfac.TweedieNMF(4), {"init": "random"}),
        Case("modes, four chains", halves, dfac.TweedieNMF(4), {"init": "random"} | four),
        Case("modes, defaults", halves, dfac.TweedieNMF(4)),
        Case("rank too high", tall, dfac.TweedieNMF(6), four),
        Case("one chain stuck", tall, K3, run=one_stuck),
        Case("drifting", long, dfac.TweedieNMF(4), run=drifting),
        Case("step too large", tall, K3, {"sampler": dfac.PSGLD(step=3.0)}),
        Case("SGLD, step large", long, dfac.TweedieNMF(4), {"sampler": dfac.SGLD(step=0.5)}),
        Case("forty draws", tall, K3, few),
        Case("forty draws, four", long, dfac.TweedieNMF(4), few | four),
    ]


SETS = {"usual": cases, "fresh": fresh}


def sized(off: float, sd: float) -> str:
    if off < 0.2 and abs(np.log(sd)) < np.log(7 / 6):
        return "sound"
    return "unsound" if off > 0.5 or abs(np.log(sd)) > np.log(4 / 3) else "between"


def compared(case: Case, tree: Any) -> tuple[float, float, float, float]:
    """How far means are off, the ratio of sds, the least cosine, how far the density is off."""
    truth = (case.truth or long_run)(case)
    if "posterior" in tree.children and "W" in tree["posterior"]:
        own = reading(tree, truth.rows, truth.columns, truth.factors is not None)
        if "weight" in tree["sample_stats"]:
            found = dfac.predict(tree, rows=truth.rows, columns=truth.columns)
            own = own._replace(mean=np.diag(found["mean"]), sd=np.diag(found["sd"]))
    else:
        found = dfac.monitored(tree, of="mean")
        at = {cell: n for n, cell in enumerate(zip(truth.rows, truth.columns, strict=True))}
        cells = list(zip(found["row_index"].values, found["column_index"].values, strict=True))
        both = [(at[cell], n) for n, cell in enumerate(cells) if cell in at]
        there, here = np.array(both).T
        truth = truth._replace(mean=truth.mean[there], sd=truth.sd[there])
        own = truth._replace(
            lp=(np.nan, np.nan, tree.attrs.get("dispersion", np.nan)),
            mean=found["mean"].values[here],
            sd=found["sd"].values[here],
            factors=None,
        )
    off = float(np.sqrt(np.mean(((own.mean - truth.mean) / truth.sd) ** 2)))
    cosine = np.nan
    if own.factors is not None and truth.factors is not None:
        reference = reference_from(*truth.factors)
        each = match(*own.factors, reference, law_of(tree), 0.8)
        W, H = own.factors[0][:, each.permutation], own.factors[1][each.permutation]
        again = reference_from(W, H)
        both = (again.W * reference.W).sum(axis=0), (again.H * reference.H).sum(axis=1)
        cosine = float(np.minimum(*both).min())
    level = np.nan
    if truth.lp is not None and own.lp is not None and own.lp[2] == truth.lp[2]:
        means = density(tree).mean(axis=1)
        level = float(np.abs(means - truth.lp[0]).max()) / truth.lp[1]
    return off, float(np.median(own.sd / truth.sd)), cosine, level


def falsehoods(
    lights: list[str], truth: str, cosine: float, level: float
) -> list[tuple[bool, bool]]:
    """Whether each light is falsely green, and whether falsely red."""
    unsound = truth == "unsound", cosine < 0.8, level >= 2.0
    sound = truth == "sound", cosine >= 0.95, level <= 0.5
    return [
        (light == "green" and bad, light == "red" and good)
        for light, bad, good in zip(lights, unsound, sound, strict=True)
    ]


def show(cases: list[Case], chosen: list[str] | None, seeds: range) -> None:
    """Print the table."""
    print(
        f"{'':24}{'off':>6}{'sd':>6}{'cosine':>8}{'lp':>7}  {'truth':9}"
        "predictions  components  log density"
    )
    counted: dict[str, Counter[str]] = {name: Counter() for name in LIGHTS}
    for case in cases:
        if chosen and not any(name in case.name for name in chosen):
            continue
        for seed in seeds:
            settings = QUIET | case.settings | {"random_seed": seed}
            tree = case.run(case.data(), case.model, **settings)
            try:
                found = dfac.summarize(tree)
            except DaskfactorError as error:
                print(f"{case.name:24}refused: {error}"[:130])
                break
            off, sd, cosine, level = compared(case, tree)
            truth = sized(off, sd)
            lights = [light.status for light in found.lights.values()]
            wrong = falsehoods(lights, truth, cosine, level)
            for name, status, (green, red) in zip(LIGHTS, lights, wrong, strict=True):
                counted[name].update([status, *["false green"] * green, *["false red"] * red])
            told = [f"{'-':>7}" if np.isnan(one) else f"{one:7.2f}" for one in (cosine, level)]
            marks = [
                f"{status}{' FALSE' if any(false) else ''}"
                for status, false in zip(lights, wrong, strict=True)
            ]
            print(
                f"{case.name:24}{off:6.2f}{sd:6.2f} {told[0]}{told[1]}  {truth:9}"
                f"{marks[0]:13}{marks[1]:12}{marks[2]}",
                flush=True,
            )
            if seed == seeds[0]:
                for name, light in found.lights.items():
                    if light.advice:
                        print(f"{'':6}{name}: {light.advice}")
    columns = "green", "amber", "red", "none", "false green", "false red"
    print("\n" + " " * 14 + "".join(f"{column:>13}" for column in columns))
    for name, counts_of in counted.items():
        print(f"{name:14}" + "".join(f"{counts_of[column]:13}" for column in columns))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--set", choices=SETS, default="usual")
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = range(options.first, options.first + options.seeds)
    show(SETS[options.set](), options.cases, seeds)
