"""How good evidences are, and what they cost: tables.

    python benchmarks/evidence.py                 one, rules, additive, ranks, chib: three minutes
    python benchmarks/evidence.py one ranks ...   some of them
    python benchmarks/evidence.py coverage        claims of every sampler: half an hour
    python benchmarks/evidence.py short_coverage  of short runs: ten minutes

Counts are of 100 x 75 under exponential priors of rate 5, as in Şimşekli et al. 2016,
section 4.1.2. Seconds are CPU time of this process.
"""

import sys
import time
import warnings

import numpy as np
from scipy.special import gammaln, logsumexp

import daskfactor as dfac
from daskfactor.inference.base import Sampler, known
from tests.evidence.exact_evidence import one_component_by_quadrature, poisson_by_enumeration

RATE = 5.0
RANKS = range(1, 11)
QUIET = {"progressbar": False, "executor": "serial"}


def counts(rank, seed):
    rng = np.random.default_rng(seed)
    W, H = rng.exponential(1 / RATE, (100, rank)), rng.exponential(1 / RATE, (rank, 75))
    return rng.poisson(W @ H)


def model(components):
    return dfac.TweedieNMF(components, rate_w=RATE, rate_h=RATE)


def exact_one(X, t=1.0):
    """Log of the power posterior's normaliser for K = 1: by a sum over log ΣW."""
    (rows, cols), n = X.shape, t * X.sum()
    u = np.linspace(-25.0, 25.0, 200001)
    log = (n + rows) * u - RATE * np.exp(u) - (n + cols) * np.log(RATE + t * np.exp(u))
    value = (rows + cols) * np.log(RATE) - t * gammaln(X + 1).sum()
    value += gammaln(t * X.sum(1) + 1).sum() + gammaln(t * X.sum(0) + 1).sum()
    return value + logsumexp(log) + np.log(u[1] - u[0]) - gammaln(n + rows)


def one():
    """K = 1: estimate less the exact value, ten seeds."""
    print("\nK = 1, T = 10: miss (nats), its error bar (both errors, one sigma), seconds")
    X = counts(1, 0)
    exact, covered = exact_one(X), 0
    for seed in range(10):
        started = time.process_time()
        found = dfac.log_evidence(X, model(1), random_seed=seed, **QUIET)
        miss = found.value - exact
        covered += abs(miss) <= 2 * found.total_error
        took = time.process_time() - started
        print(f"  {seed}: {miss:+6.2f} ± {found.total_error:.2f}   {took:.2f} s")
    print(f"  within two sigma: {covered} of 10")


def rules():
    """K = 1 with exact means and variances: what the ladder alone does."""
    from daskfactor.evidence.thermodynamic import discretization_error, integral, ladder, weights

    print("\nK = 1, exact E_t and Var_t: miss of each rule and the error it reports (nats)")
    X = counts(1, 0)
    exact = exact_one(X)
    for power in (1, 4, 5):
        for count in (10, 20, 30):
            t = ladder(count, power)
            h = np.maximum(1e-3 * t, 1e-9)
            low, mid, high = (np.array([exact_one(X, s) for s in t + d * h]) for d in (0, 1, 2))
            means = (4 * mid - 3 * low - high) / (2 * h)
            variances = (low - 2 * mid + high) / h**2
            line = f"  c = {power}, T = {count}:"
            for rule in ("euler-maclaurin", "variance", "trapezoid"):
                miss = integral(weights(count, power, rule), means, variances) - exact
                error = discretization_error(count, power, rule, means, variances, np.zeros(1))
                line += f"  {rule} {miss:+9.2f} ({error:.2f})"
            print(line)


def additive():
    """GaussianAdditive, R = 1..10, against the exact curve."""
    print("\nGaussianAdditive, N = 5000: R, exact, miss, Monte Carlo and ladder error")

    def law(rank):
        return dfac.GaussianAdditive(rank, mean=5.0, scale=3**0.5, noise=5**0.5)

    started, agree, covered, total = time.process_time(), 0, 0, 0
    for true in (3, 5, 8):
        x = law(true).generate(np.random.default_rng(true), 5000)
        exact = np.array([law(rank).log_evidence(x) for rank in RANKS])
        table = dfac.select_rank(x, law(1), RANKS)
        miss = table["log_evidence"].values - exact
        error = np.hypot(table["standard_error"].values, table["discretization_error"].values)
        covered, total = covered + int((np.abs(miss) < 2 * error).sum()), total + len(exact)
        agree += table.attrs["best"] == 1 + int(exact.argmax())
        print(f"  R = {true}: exact peak {1 + exact.argmax()}, found {table.attrs['best']}")
        print("    miss ", np.round(miss, 2))
        print("    error", np.round(error, 2))
    took = time.process_time() - started
    print(f"  peaks agree {agree} of 3, within two sigma {covered} of {total}, {took:.1f} s")


def ranks():
    """True ranks 3 and 5, five data sets each."""
    print("\nPoisson, 10 ranks of 100 x 75: true rank, found, not told from it, seconds")
    started, equal, close, near = time.process_time(), 0, 0, 0
    for true in (3, 5):
        for seed in range(5):
            begun = time.process_time()
            table = dfac.select_rank(counts(true, seed), model(1), RANKS, held_out=0, **QUIET)
            best, others = table.attrs["best"], table.attrs["not_distinguishable"]
            equal, near = equal + (best == true), near + (abs(best - true) <= 1)
            close += best == true or true in others
            value = table["log_evidence"].values
            print(
                f"  {true} -> {best} {others}  {time.process_time() - begun:5.1f} s ",
                np.round(value - value.max(), 1),
            )
    took = time.process_time() - started
    print(
        f"  equal {equal}, equal or not told apart {close}, within one {near} of 10; {took:.0f} s"
    )


def chib():
    """Ten ranks by thermodynamic integration and by Chib's method, 14,000 sweeps in all."""
    from daskfactor.evidence.chib import Chib

    X = counts(5, 0)
    found = {}
    for name, method in (
        ("thermodynamic", dfac.ThermodynamicIntegration()),
        ("Chib", Chib(draws=5000, tune=2666)),
    ):
        for rank in (1, 2):
            dfac.log_evidence(X, model(rank), method, random_seed=0, **QUIET)  # compiled now
        started = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = [
                dfac.log_evidence(X, model(rank), method, random_seed=0, **QUIET).value
                for rank in RANKS
            ]
        found[name] = time.process_time() - started
        print(f"\n{name}: {found[name]:.1f} s", np.round(values, 1))
    first, second = found.values()
    print(f"  ratio {second / first:.1f}")


def samplers():
    """K = 1 and 5: the same evidence by other samplers."""
    print("\nSamplers: K, miss of the exact moves' own long run (K = 1: of the exact value)")
    long = dfac.ThermodynamicIntegration(draws=20000, temperatures=20, tune=500)
    for K in (1, 5):
        X = counts(K, 0)
        exact = (
            exact_one(X)
            if K == 1
            else dfac.log_evidence(X, model(K), long, random_seed=9, **QUIET).value
        )
        for choice in (None, dfac.BlockHMC(), dfac.SGHMC(), dfac.PSGRRLD(), dfac.PSGLD()):
            method = dfac.ThermodynamicIntegration(sampler=choice)
            started = time.process_time()
            found = dfac.log_evidence(X, model(K), method, random_seed=0, **QUIET)
            took, name = time.process_time() - started, found.trace.attrs["sampler"]
            miss = found.value - exact
            print(f"  {K}  {name:8s} {miss:+7.2f} ± {found.total_error:.2f}  {took:.1f} s")


def cases():
    """Data, model and exact evidence: a closed form, quadrature, enumeration, a closed form."""
    small, tiny, X = np.array([[4.0, 7], [2, 5]]), np.array([[2, 1], [0, 3]]), counts(1, 0)
    unit = {"rate_w": 1.0, "rate_h": 1.0}
    yield "Poisson 100x75", X, model(1), exact_one(X)
    for beta, phi in ((2.0, 1.0), (0.0, 0.3)):
        law = dfac.TweedieNMF(1, beta=beta, dispersion=phi, **unit)
        yield f"beta = {beta:g}", small, law, one_component_by_quadrature(small, beta, phi)
    two = dfac.TweedieNMF(2, dispersion=1.0, **unit)
    yield "Poisson 2x2, K = 2", tiny, two, poisson_by_enumeration(tiny, 2)
    additive = dfac.GaussianAdditive(3, mean=5.0, scale=3**0.5, noise=5**0.5)
    x = additive.generate(np.random.default_rng(3), 500)
    yield "GaussianAdditive", x, additive, additive.log_evidence(x)


def coverage(seeds=20, **lengths):
    """How often claimed errors hold: cases of which the evidence is known, every sampler.

    ``seeds`` runs each, of the usual lengths but for those given.
    """
    print("\nCoverage: within 1 and 2 claimed errors, mean miss, spread, mean claim, seconds a run")
    for name, V, law, exact in cases():
        choices = [None]
        if law.evidence_data == "matrix":
            suited = (kind().suited(law) for kind in known(Sampler).values())
            choices = ["exact", *(one for one in suited if one is not None and one.tempers)]
        for choice in choices:
            method = dfac.ThermodynamicIntegration(sampler=choice, **lengths)
            started, found = time.process_time(), []
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for seed in range(seeds):
                        own = dfac.log_evidence(V, law, method, random_seed=seed, **QUIET)
                        found.append((own.value - exact, own.total_error))
            except dfac.errors.ModelError:
                print(f"  {name:18s} {choice.name:16s} refused")
                continue
            took, sampler = (time.process_time() - started) / seeds, own.trace.attrs["sampler"]
            miss, claim = np.array(found).T
            within = [int((np.abs(miss) <= n * claim).sum()) for n in (1, 2)]
            print(
                f"  {name:18s} {sampler:16s} {within[0]:2d} {within[1]:2d} of {seeds}  "
                f"{miss.mean():+7.2f} {miss.std():6.2f} {claim.mean():6.2f}  {took:.2f} s",
                flush=True,
            )


def short_coverage():
    """The same of short runs, in which errors must hold first of all."""
    coverage(temperatures=8, draws=100, tune=100, every=2)


TABLES = {
    table.__name__: table
    for table in (one, rules, additive, ranks, chib, samplers, coverage, short_coverage)
}

APART = "samplers", "coverage", "short_coverage"
"""Tables that are made if they are asked for."""

if __name__ == "__main__":
    dfac.log_evidence(counts(2, 0), model(2), random_seed=0, **QUIET)  # compiles the kernels
    for name in sys.argv[1:] or [name for name in TABLES if name not in APART]:
        TABLES[name]()
