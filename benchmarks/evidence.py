"""Evidences and ranks: how good they are, and what they cost.

Counts are of 100 × 75 under exponential priors of rate 5, as in Şimşekli et al. 2016, section
4.1.2, where integration was six times as fast as Chib's method. Seconds are processor time of one
core, kernels compiled.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, line, timed
from daskfactor.inference.base import Sampler
from daskfactor.inference.registry import algorithms

RATE = 5.0
SERIAL = QUIET | {"executor": "serial"}
Integration = dfac.ThermodynamicIntegration


def counts(rank: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    W, H = rng.exponential(1 / RATE, (100, rank)), rng.exponential(1 / RATE, (rank, 75))
    return rng.poisson(W @ H)


def model(components: int) -> dfac.TweedieNMF:
    return dfac.TweedieNMF(components, dispersion=1.0, rate_w=RATE, rate_h=RATE)


def exact_one(X: Array) -> float:
    """Return the log evidence of one component, by a sum over log ΣW."""
    (rows, cols), n = X.shape, X.sum()
    u = np.linspace(-25.0, 25.0, 200001)
    log = (n + rows) * u - RATE * np.exp(u) - (n + cols) * np.log(RATE + np.exp(u))
    value = (rows + cols) * np.log(RATE) - gammaln(X + 1).sum()
    value += gammaln(X.sum(1) + 1).sum() + gammaln(X.sum(0) + 1).sum()
    return float(value + logsumexp(log) + np.log(u[1] - u[0]) - gammaln(n + rows))


class Estimate(NamedTuple):
    value: float
    error: float
    seconds: float


def estimate(V: Array, law: Any, method: Any, seed: int, **options: Any) -> Estimate:
    begun = time.process_time()
    found = dfac.log_evidence(V, law, method, **(SERIAL | {"random_seed": seed} | options))
    # Chib's method has no discretization: its error of that kind is NaN or 0.
    error = np.hypot(found.standard_error, np.nan_to_num(found.discretization_error))
    return Estimate(found.value, float(error), time.process_time() - begun)


def short(run: Run) -> dict[str, Any]:
    return run.pick({"draws": 20, "tune": 10, "temperatures": 4}, {})


@line(
    "log evidence of one component by integration, 100 × 75 counts",
    "its claimed error",
    minutes=0.1,
)
def one(run: Run) -> Iterator[Figure]:
    X, seeds = counts(1, 0), run.pick(2, 10)
    estimate(X, model(1), Integration(4, draws=10, tune=5), 0)
    found = [estimate(X, model(1), Integration(**short(run)), seed) for seed in range(seeds)]
    miss = np.array([own.value for own in found]) - exact_one(X)
    error = np.array([own.error for own in found])
    size, claim = (float(np.sqrt(np.mean(values**2))) for values in (miss, error))
    note = f"{int((np.abs(miss) <= 2 * error).sum())} of {seeds} within 2 σ"
    yield Figure(size, "nats", claim, "root mean square miss", note=note)
    yield Figure(float(np.mean([own.seconds for own in found])), "s", None, "a run")


@line("rank of 100 × 75 counts by the largest evidence", minutes=5, long=True)
def ranks(run: Run) -> Iterator[Figure]:
    spent, equal, total = 0.0, 0, 0
    method = Integration(**short(run))
    estimate(counts(2, 0), model(2), Integration(4, draws=10, tune=5), 0)
    for true in run.pick((3,), (3, 5)):
        for seed in range(run.pick(1, 1, 5)):
            tried = range(1, true + 3) if run.size != "long" else range(1, 11)
            given, clock = (counts(true, seed), model(1), tried, method), time.process_time
            table, seconds = timed(dfac.select_rank, *given, held_out=None, clock=clock, **SERIAL)
            spent, total = spent + seconds, total + 1
            close = np.atleast_1d(table.attrs["not_distinguishable"])
            equal += true in (table.attrs["best"], *close)
    yield Figure(100 * equal / total, "%", None, f"right or not told apart, of {total}", "more")
    yield Figure(spent / total, "s", None, "a table")


@line(
    "log evidences of ranks by integration, 100 × 75 counts of rank 5", "Chib's method", minutes=0.6
)
def against_chib(run: Run) -> Iterator[Figure]:
    V, tried = counts(5, 0), run.pick((1,), (1, 5, 10), tuple(range(1, 11)))
    chib = dfac.Chib(draws=50, tune=10) if run.size == "quick" else dfac.Chib()
    methods: dict[str, tuple[Any, dict[str, Any]]] = {
        "ours": (Integration(**short(run)), {}),
        "peer": (chib, {}),
        "truth": (Integration(16, draws=run.pick(20, 1500, 6000), tune=run.pick(10, 1000)), {}),
    }
    if run.size == "long":  # six uniform temperatures and 14,000 sweeps
        papers = Integration(5, power=1, draws=400, tune=1600, every=1, sampler=dfac.PSGLD())
        methods |= {
            "ours, paper": (papers, {"blocks": 5}),
            "peer, paper": (dfac.Chib(draws=2000, tune=7000), {}),
        }
    found: dict[str, list[Estimate]] = {name: [] for name in methods}
    for method in (Integration(4, draws=10, tune=5), dfac.Chib(draws=50, tune=4)):
        estimate(V, model(2), method, 0)
    for rank in tried:
        for name, (method, options) in methods.items():
            found[name].append(estimate(V, model(rank), method, 1, **options))
    truth = np.array([own.value for own in found["truth"]])
    seconds = {name: sum(own.seconds for own in each) for name, each in found.items()}
    miss = {
        name: float(np.sqrt(np.mean((np.array([own.value for own in each]) - truth) ** 2)))
        for name, each in found.items()
    }
    for label in ("", ", paper") if run.size == "long" else ("",):
        ours, peer = f"ours{label}", f"peer{label}"
        what = "the paper's settings" if label else "defaults"
        note = f"errors {miss[ours]:.2f} and {miss[peer]:.2f} nats"
        yield Figure(seconds[ours], "s", seconds[peer], f"{what}, {len(tried)} ranks", note=note)


@line(
    'rank that one run of `TweedieNMF("auto")` finds, 200 × 150 counts',
    "the true rank",
    minutes=0.6,
)
def automatic(run: Run) -> Iterator[Figure]:
    rows, columns = run.pick((40, 30), (200, 150))
    for mean in run.pick((20.0,), (20.0, 5.0, 1.0)):
        for rank in run.pick((3,), (3, 6, 10, 15, 20)):
            rng = np.random.default_rng([0, rank])
            mu = rng.gamma(0.5, 1.0, (rows, rank)) @ rng.gamma(0.5, 1.0, (rank, columns))
            V = rng.poisson(mu * (mean / mu.mean())).astype(np.float32)
            lengths = dict.fromkeys(("draws", "tune"), run.pick(20, 200))
            law = dfac.TweedieNMF("auto", dispersion=1.0)
            tree = dfac.sample(V, law, keep="moments", **lengths, **QUIET)
            found = float(np.median(tree["posterior"]["effective_components"].values))
            yield Figure(found, "", float(rank), f"mean {mean:g}", better="more")


@line("claimed errors of log evidences by every sampler", "1", minutes=30, long=True)
def coverage(run: Run) -> Iterator[Figure]:
    from tests.statistical.exact import exact_posterior

    small, tiny, X = np.array([[4.0, 7], [2, 5]]), np.array([[2, 1], [0, 3]]), counts(1, 0)
    unit: dict[str, Any] = {"rate_w": 1.0, "rate_h": 1.0}
    cases = {"Poisson 100 × 75": (X, model(1), exact_one(X))}
    for beta, phi in ((2.0, 1.0), (0.0, 0.3)):
        law = dfac.TweedieNMF(1, beta=beta, dispersion=phi, **unit)
        cases[f"β = {beta:g}"] = small, law, exact_posterior(small, beta, phi)["log_evidence"]
    two = dfac.TweedieNMF(2, dispersion=1.0, **unit)
    cases["Poisson 2 × 2, K = 2"] = tiny, two, exact_posterior(tiny, 1.0, K=2)["log_evidence"]
    for name, (V, law, exact) in cases.items():
        samplers = (kind() for kind in algorithms(Sampler).values())
        for sampler in ("exact", *(own for own in samplers if own.dispersion is None)):
            method = Integration(sampler=sampler)
            try:
                found = [estimate(V, law, method, seed) for seed in range(20)]
            except dfac.errors.ModelError:
                continue
            scaled = [(own.value - exact) / own.error for own in found]
            label = getattr(sampler, "name", sampler)
            size = float(np.sqrt(np.mean(np.square(scaled))))
            within = int((np.abs(scaled) <= 2).sum())
            note = f"{within} of 20 within 2 σ"
            yield Figure(size, "σ", None, f"{name}, {label}", goal="<= 1.5", note=note)
