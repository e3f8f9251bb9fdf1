"""What draws are worth: effective draws by sampler, and how far biased samplers are off.

Samplers run one after the other on one core, in float32, with their defaults. Effective draws are
bulk effective sample sizes (median over 100 erased cells of WH); seconds are processor seconds of
the drawing cycles alone, tuning left out. A biased sampler's draws are counted as if they were
right; how far its means are off beside BlockHMC's, in posterior standard deviations, is in the
note.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linear_sum_assignment

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, effective, line
from benchmarks.near_end import CELLS
from daskfactor.errors import DataError, ModelError

SERIAL = QUIET | {"executor": "serial"}
COUNTED = "effective draws of 150 × 100 counts, K = 5, one core"


class Drawn(NamedTuple):
    """What a sampler gave."""

    per_pass: float
    per_second: float
    mean: Array
    sd: Array


def made_up(shape: tuple[int, int], K: int, mean: float, beta: float = 1.0) -> tuple[Array, Any]:
    """Return data of a law, a tenth of them missing, and erased cells to look at."""
    rng = np.random.default_rng(shape[0])
    size, phi = (mean / K) ** 0.5, dispersion(mean, beta)
    mu = rng.exponential(size, (shape[0], K)) @ rng.exponential(size, (K, shape[1]))
    if beta == 1:
        V = rng.poisson(mu).astype(np.float32)
    elif beta == 0:
        V = rng.gamma(1 / phi, mu * phi).astype(np.float32)
    else:
        V = (mu + rng.normal(size=mu.shape) * phi**0.5).astype(np.float32)
    gone = rng.random(shape) < 0.1
    V[gone] = np.nan
    return V, tuple(axis[:: max(1, gone.sum() // CELLS)][:CELLS] for axis in np.nonzero(gone))


def dispersion(mean: float, beta: float) -> float:
    """Return the dispersion at which single entries have the mean's size for their sd."""
    return 1.0 if beta == 1 else mean**beta


def drawn(V: Array, cells: Any, model: Any, sampler: Any, seconds: float, tune: int) -> Drawn:
    """Draw for about so many seconds."""
    begun: list[float] = []

    def note(event: dfac.RunEvent) -> None:
        if event.phase == "draw":
            begun.append(time.process_time())

    def draw(draws: int, tune: int) -> tuple[Any, float]:
        begun.clear()
        data = dfac.as_blocks(V, 2, allow_empty=True)
        tree = dfac.sample(data, model, sampler, draws, tune, callback=note, **SERIAL)
        return tree, begun[-1] - begun[0]

    draw(2, 2)
    brief = draw(10, 0)[1] / 10
    draws = int(np.clip(seconds / max(brief, 1e-5), 50, 5000))
    tree, spent = draw(draws, tune)
    group = tree["posterior"]
    W, H = group["W"].values[:, :, cells[0]], group["H"].values[..., cells[1]]
    mu = np.einsum("cdik,cdki->cdi", W, H, dtype=np.float64)
    size = float(np.median(effective(mu)))
    return Drawn(size / draws, size / spent, mu.mean(axis=(0, 1)), mu.std(axis=(0, 1)))


def race(shape: tuple[int, int], K: int, mean: float, beta: float, run: Run) -> dict[str, Drawn]:
    """Draw by all samplers that take the model."""
    V, cells = made_up(shape, K, mean, beta)
    model = dfac.TweedieNMF(K, beta=beta, dispersion=dispersion(mean, beta))
    found = {}
    for name in ("BlockHMC", "SGHMC", "PSGLD", "Gibbs"):
        with suppress(ModelError, DataError):
            sampler = getattr(dfac, name)()
            seconds, tune = run.pick((0.2, 20), (2.0, 300), (10.0, 300))
            found[name] = drawn(V, cells, model, sampler, seconds, tune)
    return found


def off(found: dict[str, Drawn]) -> str:
    """Say how far means are from BlockHMC's."""
    right = found["BlockHMC"]
    shifts = {
        name: float(np.sqrt(np.mean(((one.mean - right.mean) / right.sd) ** 2)))
        for name, one in found.items()
        if name != "BlockHMC"
    }
    return "means off: " + ", ".join(f"{name} {shift:.2f}" for name, shift in shifts.items())


def by_sampler(mean: float, run: Run) -> Iterator[Figure]:
    found = race(run.pick((40, 30), (150, 100)), 5, mean, 1.0, run)
    what, note = "BlockHMC, a second", off(found)
    for name in ("SGHMC", "PSGLD", "Gibbs"):
        ours, peer = found["BlockHMC"].per_second, found[name].per_second
        yield Figure(ours, "draws/s", peer, what, "more", beside=name, note=note)
    for name, other in (("PSGLD", "Gibbs"), ("SGHMC", "PSGLD")):
        ours, peer = found[name].per_pass, found[other].per_pass
        yield Figure(ours, "a pass", peer, f"{name}, a pass", "more", beside=other)


@line(f"{COUNTED}, mean 5", minutes=0.3)
def mean_5(run: Run) -> Iterator[Figure]:
    yield from by_sampler(5.0, run)


@line(f"{COUNTED}, mean .3", minutes=0.3)
def mean_03(run: Run) -> Iterator[Figure]:
    yield from by_sampler(0.3, run)


@line(f"{COUNTED}, mean 50", minutes=0.3)
def mean_50(run: Run) -> Iterator[Figure]:
    yield from by_sampler(50.0, run)


@line(f"{COUNTED}, mean .05", minutes=1, long=True)
def mean_005(run: Run) -> Iterator[Figure]:
    yield from by_sampler(0.05, run)


@line(
    "effective draws a second by size, K and law: what `sampler='auto'` goes by",
    minutes=25,
    long=True,
)
def laws(run: Run) -> Iterator[Figure]:
    for shape in ((15, 12), (150, 100), (1000, 1000)):
        for K in (3, 10):
            for beta in (1.0, 0.0, 2.0):
                for mean in (0.3, 5.0, 50.0):
                    found = race(shape, K, mean, beta, run)
                    best = max(found, key=lambda name: found[name].per_second)
                    others = [own.per_second for name, own in found.items() if name != best]
                    what = f"{shape[0]} × {shape[1]}, K = {K}, β = {beta:g}, mean {mean:g}: {best}"
                    ours = found[best].per_second
                    yield Figure(ours, "draws/s", max(others), what, "more", beside="the next")


@line("effective draws of faces, 30 % erased, K = 5, one core", minutes=3, long=True)
def faces(run: Run) -> Iterator[Figure]:
    from daskfactor.demos import load_faces

    V = np.ascontiguousarray(load_faces().truth, dtype=np.float32)
    gone = np.random.default_rng(0).random(V.shape) < 0.3
    V[gone] = np.nan
    cells = tuple(axis[:: gone.sum() // CELLS][:CELLS] for axis in np.nonzero(gone))
    model = dfac.TweedieNMF(5, dispersion=1.0)
    found = {
        name: drawn(V, cells, model, getattr(dfac, name)(), 30.0, 300)
        for name in ("BlockHMC", "SGHMC", "PSGLD")
    }
    passes = [found[name].per_pass for name in ("SGHMC", "PSGLD")]
    yield Figure(passes[0], "a pass", passes[1], "SGHMC, a pass", "more", beside="PSGLD")
    ours, note = found["BlockHMC"].per_second, off(found)
    for name in ("SGHMC", "PSGLD"):
        peer = found[name].per_second
        yield Figure(ours, "draws/s", peer, "BlockHMC", "more", beside=name, note=note)


# -- the scale that W and H share ------------------------------------------------------------------


def of_the_prior(K: int, seed: int) -> tuple[Array, Array, Any]:
    """Return counts, the W that they come from, and the model that both are drawn from."""
    rng, size = np.random.default_rng((seed, K)), (5.0 / K) ** 0.5
    W, H = rng.exponential(size, (150, K)), rng.exponential(size, (K, 100))
    model = dfac.TweedieNMF(K, rate_w=1 / size, rate_h=1 / size, dispersion=1.0)
    return rng.poisson(W @ H).astype(np.float32), W, model


@line("cycles between independent draws of log ΣW, 150 × 100 counts of mean 5", minutes=0.5)
def scale(run: Run) -> Iterator[Figure]:
    for K in (1, 3):
        V, _, model = of_the_prior(K, 0)
        for name, goal in (("BlockHMC", "<= 30"), ("SGHMC", ""), ("PSGLD", ""), ("Gibbs", "")):
            draws, tune = run.pick((50, 20), (2000, 300))
            tree = dfac.sample(V, model, getattr(dfac, name)(), draws, tune, **SERIAL)
            sums = np.log(tree["posterior"]["W"].values.sum(axis=2, dtype=np.float64))
            yield Figure(
                draws / float(effective(sums).min()), "cycles", None, f"{name}, K = {K}", goal=goal
            )


@line("entries of W in their 90 % intervals, 150 × 100 counts of the prior, 40 seeds", minutes=1)
def scale_intervals(run: Run) -> Iterator[Figure]:
    for K in (1, 3):
        inside = []
        for seed in range(run.pick(2, 40)):
            V, W, model = of_the_prior(K, seed)
            draws, tune = run.pick((50, 20), (500, 300))
            tree = dfac.sample(V, model, dfac.BlockHMC(), draws, tune, **SERIAL)
            drawn = tree["posterior"]["W"].values[0]
            mean = drawn.mean(axis=0)
            alike = (mean.T @ W) / np.linalg.norm(mean, axis=0)[:, None] / np.linalg.norm(W, axis=0)
            drawn = drawn[..., linear_sum_assignment(-alike.T)[1]]
            low, high = np.quantile(drawn, (0.05, 0.95), axis=0)
            inside.append(float(((low <= W) & (high >= W)).mean()))
        share = 100 * float(np.mean(inside))
        note = f"single seeds {100 * min(inside):.0f} to {100 * max(inside):.0f} %"
        yield Figure(share, "%", None, f"BlockHMC, K = {K}", "more", ">= 85", note=note)


# -- bias ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Data, and a model with all of its numbers given."""

    V: Any
    model: dfac.TweedieNMF
    blocks: int = 3


def poisson(
    rows: int = 60,
    columns: int = 50,
    K: int = 4,
    mean: float = 3.0,
    times: float = 1.0,
    shape: float = 1.0,
    change: Callable[[Array], Array] | None = None,
    blocks: int = 3,
) -> Case:
    """Return Poisson counts; ``times`` the rates that made them are the model's."""
    rng, rate = np.random.default_rng(1), (K / mean) ** 0.5
    mu = rng.exponential(1 / rate, (rows, K)) @ rng.exponential(1 / rate, (K, columns))
    mu = mu if change is None else change(mu)
    V = np.where(np.isnan(mu), np.nan, rng.poisson(np.nan_to_num(mu))).astype(np.float32)
    rate *= times * shape
    numbers = {"rate_w": rate, "rate_h": rate, "shape_w": shape, "shape_h": shape}
    return Case(V, dfac.TweedieNMF(K, dispersion=1.0, **numbers), blocks)


def stored(shape: float = 1.0) -> Case:
    case = poisson(200, 150, 10, 0.05, shape=shape)
    return case._replace(V=sparse.csr_array(case.V))


def emptied(mu: Array) -> Array:
    """Leave some rows and columns without a count."""
    mu = mu.copy()
    mu[::6] = mu[:, ::5] = 0
    return mu


def uneven(mu: Array) -> Array:
    """Erase so that most of what is observed lies in a few blocks."""
    rows, columns = (np.arange(n) // -(-n // 3) for n in mu.shape)
    seen = np.where(rows[:, None] == columns, 0.95, 0.1)
    return np.where(np.random.default_rng(2).random(mu.shape) < seen, mu, np.nan)


def heavy(mu: Array) -> Array:
    """Let sizes of rows follow a power law."""
    return mu * (len(mu) ** 0.7 / np.arange(1, len(mu) + 1) ** 1.2)[:, None]


def real(beta: float, phi: float, mean: float) -> Case:
    """Return data under another law: near zero, or of both signs."""
    rng, rate = np.random.default_rng(3), (3 / mean) ** 0.5
    mu = rng.exponential(1 / rate, (40, 3)) @ rng.exponential(1 / rate, (3, 30))
    V = rng.gamma(1 / phi, mu * phi) if beta == 0 else mu + rng.normal(size=mu.shape) * phi**0.5
    model = dfac.TweedieNMF(3, beta=beta, dispersion=phi, rate_w=rate, rate_h=rate)
    return Case(V.astype(np.float32), model)


CASES: dict[str, Callable[[], Case]] = {
    "sparse": stored,
    "dense": lambda: poisson(100, 60, 8, 5.0),
    "empty rows": lambda: poisson(change=emptied),
    "rank > columns": lambda: poisson(60, 5, 8),
    "one row": lambda: poisson(1, 60, 3, blocks=1),
    "strong priors": lambda: poisson(times=10.0),
    "weak priors": lambda: poisson(times=0.05),
    "shape .3": lambda: poisson(shape=0.3),
    "sparse, shape .3": lambda: stored(0.3),
    "unequal blocks": lambda: poisson(change=uneven),
    "power law": lambda: poisson(change=heavy),
    "β = 0, near 0": lambda: real(0.0, 0.5, 1e-3),
    "β = 2, signs": lambda: real(2.0, 1.0, 0.7),
    "rank 1": lambda: poisson(20, 15, 1, 2.0),
}


def moments(case: Case, sampler: Any, draws: int, tune: int, seed: int, blocks: int) -> Any:
    """Return means and variances of all cells, (chain, cell)."""
    unstored = None if isinstance(case.V, np.ndarray) else "zero"
    data = dfac.as_blocks(case.V, blocks, unstored=unstored, allow_empty=True)
    options = SERIAL | {"random_seed": seed, "keep": "moments"}
    watch = np.ones(case.V.shape, bool)
    tree = dfac.sample(data, case.model, sampler, draws, tune, 4, monitor=watch, **options)
    return tree["monitor"]["mean"].values, tree["monitor"]["var"].values


def against(found: Any, exact: Any) -> tuple[float, float, float]:
    """Return the shift of means in sds above chance, the ratio of variances, and totals in %."""
    (mean, var), (truth, spread) = (
        (one[0].mean(axis=0, dtype=float), one[1].mean(axis=0) + one[0].var(axis=0))
        for one in (found, exact)
    )
    error = sum(one[0].var(axis=0, ddof=1) / len(one[0]) for one in (found, exact)) / spread
    shift = float(np.sqrt(max(0.0, np.mean((mean - truth) ** 2 / spread) - np.mean(error))))
    ratio = float(np.exp(np.mean(np.log(var / spread))))
    return shift, ratio, float(100 * (mean.sum() / truth.sum() - 1))


def biases(names: list[str], run: Run) -> Iterator[Figure]:
    draws = run.pick(60, 1000, 3000)
    for name in names:
        case = CASES[name]()
        exact = dfac.Gibbs() if case.model.beta == 1 else dfac.BlockHMC()
        truth = moments(case, exact, 2 * draws, draws // 2, 1, 1)
        samplers = (dfac.PSGLD(transition=kind) for kind in ("moments", "euler"))
        found = (moments(case, own, draws, draws // 3, 0, case.blocks) for own in samplers)
        (shift, ratio, total), (other, _, theirs) = (against(one, truth) for one in found)
        note = f"variance {ratio:.2f} of the exact one; total {total:+.1f} %, "
        note += f"Euler's {theirs:+.1f} %"
        yield Figure(shift, "sd", other, f"{name}, shift of means", goal="<= 0.1", note=note)


BIASED = "bias of PSGLD at its automatic step"


@line(BIASED, "Euler's steps", minutes=1.3)
def bias(run: Run) -> Iterator[Figure]:
    yield from biases(run.pick(["rank 1"], ["sparse", "dense"]), run)


@line(f"{BIASED}, all kinds of data", "Euler's steps", minutes=15, long=True)
def bias_everywhere(run: Run) -> Iterator[Figure]:
    yield from biases(list(CASES), run)


@line(
    "bias of E WH by PSGRRLD on an exact posterior",
    "one chain at the same step",
    "ratio >= 5",
    minutes=0.5,
)
def romberg(run: Run) -> Iterator[Figure]:
    from tests.statistical.exact import CASES as EXACT
    from tests.statistical.pairs import bias as bias_of
    from tests.statistical.pairs import noise_ratio, run_pair
    from tests.statistical.pairs import romberg as combined

    case = next(one for one in EXACT if one.K == 1)
    copies, draws = run.pick((50, 50), (1500, 1500), (3000, 3000))
    for step in run.pick((0.2,), (0.2, 0.1)):
        sampler = dfac.PSGRRLD(step=step)
        pair = run_pair(case, sampler, copies, draws, 0)
        ours, peer = (bias_of(parts, case) for parts in (combined(*pair), [(1.0, pair.coarse)]))
        note = f"± {np.max(ours.mean_error):.4f}"
        sizes, what = (float(ours.mean_size), float(peer.mean_size)), f"{case.name}, ε = {step:g}"
        yield Figure(sizes[0], "sd", sizes[1], what, note=note)
        times, what = float(noise_ratio(*pair)), f"{what}, variance of the estimate"
        yield Figure(times, "", 1.0, what, beside="one chain", goal="<= 1.3")
