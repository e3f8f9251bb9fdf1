"""Thermodynamic integration: log p(V) = ∫₀¹ E_t[log p(V|θ)] dt from chains at a few values of t.

With t = u^c and u on T equal steps, the integrand g(u) = c u^(c-1) f(u^c),
f(t) = E_t[log p(V|θ)], is smooth and vanishes at u = 0 for c > 1; its slope at u = 1 is
known, because f'(t) = Var_t[log p(V|θ)]. Three rules, all linear in means and variances:

- ``"euler-maclaurin"``: the trapezoid in u less (1/T²)/12 (g'(1) - g'(0)), an error of
  order T⁻⁴ with a small constant;
- ``"variance"``: the trapezoid in t corrected by -Σ (Δt²/12)(Var_{i+1} - Var_i);
- ``"trapezoid"``: the plain one in t (Şimşekli et al. 2016, equation 7).

On Poisson counts of 100 x 75 with one component (the exact f is known), T = 10 and
c = 5, they miss by 0.00, +0.2 and -5.6 nats at 0.05 counts a cell, and by +0.04, +64 and
-160 at 25; so the first is the default. Standard errors take the correlation of the series
that means and variances are of.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from scipy.special import logsumexp

from daskfactor.checks import one_of, positive_number, warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import ModelError, OptionError, SamplingWarning
from daskfactor.evidence.base import Evidence, EvidenceMethod, EvidenceProblem
from daskfactor.evidence.tempered import (
    ADDITIVE_SAMPLER,
    MIN_SAMPLED,
    FitSeries,
    TemperedChains,
    Vector,
    additive_series,
    both_sides,
    listed_entries,
)
from daskfactor.inference.base import Sampler, reference_sampler
from daskfactor.inference.program import normalizer
from daskfactor.inference.run_loop import RunLoop, Values, join_values, split_values
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.progress import RunEvent

Rule = Literal["euler-maclaurin", "variance", "trapezoid"]

SMALL = 3e4
"""Listed entries times components up to which rows are moved exactly by default."""
FIRST_ROUND, SHORTEST_ROUND, ROUND = 0.01, 1e-4, 20.0
"""Shares of the chains in the first of several rounds and at least, and seconds of a later one."""
MIN_DRAWS = 0.1
"""Share of the draws at t = 1 that the lowest temperatures take, with exact moves."""
ORDERS: dict[str, float] = {"euler-maclaurin": 7.0, "variance": 7.0, "trapezoid": 1.0}
"""2^p - 1: what the change on doubling steps is divided by. p is one less than the order of a
rule (4, 4 and 2), because ladders that are usual are too short for it: with the order itself the
error of Gaussian directions far from their prior is up to four times too small."""
DEFAULTS = {
    "exact": (1000, 200, 1),
    "reference": (400, 200, 1),
    "sampler": (400, 400, 5),
    "vector": (16000, 1000, 1),
}
"""Draws, tuning cycles and thinning that None stands for."""
HIDDEN = 5.0
"""Excess of effective draws in autoregressions of 1 to 30 of them (30 to 400 draws)."""
MISSED_SHARE = 0.5
"""Share of the standard error from which on variance that chains miss is warned of."""
LARGEST = 1e300
"""Ratio that stands for all larger ones."""
MIN_WEIGHT, MIN_EFFECTIVE = 0.01, 10.0
"""Weight of a temperature from which on fewer effective draws than these are warned of."""


def ladder(count: int, power: float) -> Vector:
    """Return t_i = (i / T)^c for i = 0 .. T."""
    return np.asarray((np.arange(count + 1) / count) ** power, dtype=np.float64)


def weights(count: int, power: float, rule: Rule) -> Vector:
    """Return quadrature weights of a rule on the ladder of T = ``count`` steps, (2, T + 1).

    The integral is ``weights[0] · E + weights[1] · Var``.
    """
    mean, variance = result = np.zeros((2, count + 1))
    if rule != "euler-maclaurin":
        steps = np.diff(ladder(count, power))
        mean[1:] += steps / 2
        mean[:-1] += steps / 2
        if rule == "variance":
            variance[1:] -= steps**2 / 12
            variance[:-1] += steps**2 / 12
        return result
    mean[:] = power * (np.arange(count + 1) / count) ** (power - 1) / count
    mean[0] /= 2
    scale = 1 / (12 * count**2)
    variance[-1] -= scale * power**2
    if power == 2:  # g'(0) = 2 f(0)
        mean[0] += scale * 2
    if power == 1:  # g'(0) = Var_0
        variance[0] += scale
    # The rule is of E_t - E_1: a constant, and so the unit of the data, has no error.
    mean[-1] = 1.0 - mean[:-1].sum()
    return result


def integral(weight: Vector, means: Vector, variances: Vector) -> float:
    """Add up weighted means and variances; infinite ones without weight are left out."""
    return float(_times(weight[0], means).sum() + _times(weight[1], variances).sum())


def discretization_error(
    count: int,
    power: float,
    rule: Rule,
    means: Vector,
    variances: Vector,
    prior: Vector,
) -> float:
    """Estimate the size of a rule's error, from doubled steps and in the first interval.

    Every rule is a trapezoid with the slopes of the ends taken off, or without, so that every
    two neighbouring intervals have its integral in two steps and in one. The differences are
    added up by their size, because they change sign along the ladder and their sum may vanish,
    and divided by 2^p - 1 (Richardson). In the first interval, where the law changes from the
    prior to that of the data and no p is known, the rule is compared with `first_integral`;
    ``prior`` are log-likelihoods at draws from the prior.
    """
    means, prior = means - means[-1], prior - means[-1]  # rules are exact for constants
    x = t = ladder(count, power)
    y, slopes = means, variances if rule == "variance" else np.zeros(count + 1)
    if rule == "euler-maclaurin":
        x, shape = np.arange(count + 1) / count, max(power - 2, 0.0)
        y = _times(power * x ** (power - 1), means)
        slopes = _times(power * (power - 1) * x**shape, means)
        slopes += _times(power**2 * x ** (2 * power - 2), variances)

    def steps(width: int) -> Vector:
        """Return integrals over so many intervals at a time, one from every temperature on."""
        wide, rise = x[width:] - x[:-width], slopes[width:] - slopes[:-width]
        return np.asarray(wide / 2 * (y[width:] + y[:-width]) - wide**2 / 12 * rise)

    one = steps(1)
    changes = np.abs(one[:-1] + one[1:] - steps(2)).mean() * count / 2
    beginning = abs(one[0] - first_integral(float(t[1]), means, variances, prior))
    return float(changes / ORDERS[rule] + beginning)


def first_integral(t: float, means: Vector, variances: Vector, prior: Vector) -> float:
    """Return the integral of E from 0 to the first t > 0, which is log E_0[p(V|θ)^t].

    That is the mean over draws from the prior, unless it depends on a few of them; else
    the integral of k - a / (t + s), as of d = 2a parameters with s observations' worth of prior.
    Both means and the variance at t give a, s and k; with r = (t + s) / s

        r = (E_1 - E_0) / (t Var_1),   t E_1 - t² Var_1 (r / (r - 1))² (log r - 1 + 1 / r)
    """
    logs = t * prior
    total = logsumexp(logs)
    if np.exp(2 * total - logsumexp(2 * logs)) >= MIN_EFFECTIVE:
        return float(total - np.log(logs.size))
    square = t * t * float(variances[1])
    share, r = 0.5, 1.0
    if square > 0:
        r = min(float(means[1] - means[0]) * t / square, LARGEST)
    if r > 1.0 + 1e-4:  # below, digits are lost
        share = (r / (r - 1.0)) ** 2 * (np.log(r) - 1.0 + 1.0 / r)
    return float(t * means[1] - square * share)


def _times(factor: Vector, values: Vector) -> Vector:
    """Multiply; zero times infinity is zero."""
    with np.errstate(invalid="ignore"):
        return np.where(factor == 0, 0.0, factor * values)


def correlation_time(series: Vector) -> float:
    """Return 1 + 2 Σ ρ_k, at least 1, by the initial monotone sequence (Geyer 1992, 3.3)."""
    n = series.size
    centred = series - series.mean()
    power = float(centred @ centred)
    if n < 4 or power <= 0:
        return 1.0
    spectrum = np.fft.rfft(centred, 2 * n)
    correlation = np.fft.irfft(spectrum * spectrum.conj())[:n] / power
    pairs = correlation[: n // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    pairs = np.minimum.accumulate(pairs[: ends[0] if ends.size else pairs.size])
    return float(max(1.0, 2.0 * pairs.sum() - 1.0))


def standard_error(series: Vector) -> float:
    """Return the standard error of the mean of a correlated series, which may be short.

    The mean and the autocorrelations about it are of the same series, so that a slow one looks
    as if it had five more effective draws than it has.
    """
    if series.size < 2:
        return float("inf")
    effective = max(series.size / correlation_time(series) - HIDDEN, 1.0)
    return float(np.sqrt(series.var(ddof=1) / effective))


def unseen(t: Vector, table: pd.DataFrame) -> Vector:
    """Return the variances of the log-likelihood that chains missed, by the slope of their means.

    Var_t is the slope of E_t and hardly falls faster than as t⁻³, as of Gaussian directions far
    from their prior. So the slopes on both sides bound it from below. A chain that sees v of it
    alone has a mean that is off by a variance of Var_t - v: all of the variance is that within
    chains and that of their means. It counts beyond three errors of v and two of a slope.
    """
    means, errors = table["mean"].to_numpy(), table["mean_error"].to_numpy()
    doubt = 2 * np.hypot(errors[1:], errors[:-1])
    slopes = np.maximum(np.diff(means) - doubt, 0.0) / np.diff(t)
    least = np.zeros(t.size)
    least[1:-1] = np.sqrt(slopes[:-1] * slopes[1:]) * t[:-2] * t[2:] / t[1:-1] ** 2
    least[-1] = slopes[-1] * t[-2] ** 2
    seen = table["variance"] + 3 * table["variance_error"]
    return np.asarray(np.maximum(least - seen.to_numpy(), 0.0))


def summarize(series: FitSeries, mean_weight: float, variance_weight: float) -> dict[str, float]:
    """Return E_t and Var_t of the log-likelihood of a temperature, with standard errors.

    ``contribution_error`` is that of the temperature's part of the integral, the mean of
    a L + b (L - mean)², the linearised estimate; a Richardson-Romberg pair contributes
    2 fine - coarse throughout.
    """
    factors = (1.0,) if len(series.fits) == 1 else (2.0, -1.0)
    parts = list(zip(factors, series.fits, strict=True))
    squares = [(factor, (values - values.mean()) ** 2) for factor, values in parts]
    first, second = _combined(parts), _combined(squares)
    return {
        "mean": sum(factor * values.mean() for factor, values in parts),
        "variance": max(sum(factor * values.mean() for factor, values in squares), 0.0),
        "mean_error": standard_error(first),
        "variance_error": standard_error(second),
        "contribution_error": standard_error(mean_weight * first + variance_weight * second),
        "ess": first.size / correlation_time(first),
    }


def _combined(parts: list[tuple[float, Vector]]) -> Vector:
    """Add up factor · series, a series of twice the length averaged over pairs first."""
    length = min(values.size for _, values in parts)
    total = np.zeros(length)
    for factor, values in parts:
        step = values.size // length
        total += factor * values[: length * step].reshape(length, step).mean(axis=1)
    return total


class LadderRun(RunLoop):
    """The chains of all temperatures, all of which have reached the same share of their length.

    Where a process or a worker may be lost they advance in rounds, of about `ROUND` seconds each.
    """

    def __init__(
        self,
        problem: EvidenceProblem,
        chains: TemperedChains,
        items: list[tuple[int, float, float]],
    ) -> None:
        super().__init__(problem.executor, problem.store)
        self.problem, self.chains, self.items = problem, chains, items
        self.reached, self.states = 0.0, [Values() for _ in items]
        self.in_one_round = problem.store is None and problem.executor.in_process
        self.width = 1.0 if self.in_one_round else FIRST_ROUND

    @property
    def finished(self) -> bool:
        return self.reached >= 1.0

    def load(self, arrays: Mapping[str, Any], meta: Values) -> None:
        self.reached, self.width = meta["reached"], meta["width"]
        self.states = join_values(arrays, meta["chains"])["states"]

    def advance(self) -> None:
        start, reach = time.perf_counter(), min(1.0, self.reached + self.width)
        pairs = zip(self.items, self.states, strict=True)
        # The hottest chains, which are the longest, come first.
        items = [(*item, reach, state) for item, state in pairs][::-1]
        if self.in_one_round:
            states = self.problem.map(self.chains.advance, items, "tempered-chain")
        else:
            states = self.executor.map(self.chains.advance, items, "tempered-chain")
        self.states, self.reached = states[::-1], reach
        seconds = time.perf_counter() - start
        self.width = max(SHORTEST_ROUND, self.width * min(2.0, max(0.5, ROUND / seconds)))

    def _segment(self) -> None:
        super()._segment()
        if not self.in_one_round:
            self.problem.on_event(RunEvent("draw", round(100 * self.reached), 100))

    def snapshot(self, checkpoints: Any) -> tuple[Any, Values]:
        del checkpoints
        arrays, chains = split_values({"states": tuple(self.states)}, "")
        return arrays, {"reached": self.reached, "width": self.width, "chains": chains}

    def series(self) -> list[FitSeries]:
        """Run all chains to their ends, from the last checkpoint if there is one."""
        if self.problem.store is not None:
            arrays, meta = self.problem.store.state_of(self.problem.piece)
            if meta:
                self.restore(arrays, meta)
        self.go()
        return [FitSeries(one["fits"], one.get("acceptance", np.nan)) for one in self.states]


@dataclass(frozen=True)
class ThermodynamicIntegration(EvidenceMethod):
    r"""Log evidence by integrating the mean log-likelihood over temperatures.

    .. math:: \log p(V) = \int_0^1 E_t[\log p(V \mid \theta)]\,dt, \qquad
        p_t(\theta) \propto p(\theta)\,p(V \mid \theta)^t, \qquad t_i = (i/T)^c

    Every temperature is a chain of its own from its own start, so they run side by side
    and give the same numbers on every executor. The log-likelihood is that of all data,
    normaliser included. At t = 0 the prior is drawn from exactly.

    Parameters
    ----------
    temperatures
        T: the ladder has T + 1 temperatures, 0 and 1 among them.
    power
        c; 1 for the paper's uniform ladder (which misses by far more), else at least 2.
    draws
        Log-likelihoods taken at t = 1. A temperature t = u^c takes max(u³, 0.1) of
        them (0.3 with a sampler), because lower ones count less and forget faster. None:
        1000 with exact moves, 400 with a sampler, 16000 for a `GaussianAdditive`.
    tune
        Cycles or sweeps before the first draw at every temperature. None: 200, 400 with a
        sampler other than BlockHMC, or 1000 for a `GaussianAdditive`.
    every
        Cycles or sweeps from one draw to the next. None: 1, or 5 with a sampler other than
        BlockHMC.
    sampler
        ``"exact"`` moves entire rows by Metropolis and Hastings' rule
        (`daskfactor.evidence.rowwise`): no step, no bias. Any sampler of a `TweedieNMF`
        that can be tempered: :class:`BlockHMC`, which is exact, too, or with a warning those
        whose steps have a bias that no error knows of, such as :class:`PSGLD` (the paper's).
        None takes ``"exact"`` up to 30,000 listed entries times components (for β = 1 zeros are
        not listed) of a matrix, else BlockHMC, whose draws are exact, too.
    rule
        ``"euler-maclaurin"``, ``"variance"`` or ``"trapezoid"``
        (`daskfactor.evidence.thermodynamic`); None: the first, or the last on a uniform ladder.

    Notes
    -----
    Şimşekli et al. 2016 (stochastic thermodynamic integration; equation 10 there lacks
    the factor t of the likelihood's gradient); Friel and Pettitt 2008.

    Standard errors come from each chain's own autocorrelation, and from the slope of the
    mean log-likelihood along the ladder, which is its variance: a chain that varies by less
    has a mean that is off. The errors do not include parts of the posterior that no chain visits
    at any temperature.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (4, 3))
    >>> method = dfac.ThermodynamicIntegration(temperatures=5, draws=500, tune=200)
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> evidence = dfac.log_evidence(V, dfac.TweedieNMF(1), method, **run)
    >>> evidence.trace.sizes["temperature"]
    6
    """

    temperatures: int = 10
    power: float = 5.0
    draws: int | None = None
    tune: int | None = None
    every: int | None = None
    sampler: Sampler | Literal["exact"] | None = None
    rule: Rule | None = None
    suits = ("matrix", "vector")
    resumes = True

    def __post_init__(self) -> None:
        whole_number("temperatures", self.temperatures, 2)
        power = positive_number("power", self.power)
        if power != 1 and power < 2:
            raise OptionError(
                f"power must be 1 (a uniform ladder) or at least 2, got {self.power!r}; 5 suits "
                "most data"
            )
        object.__setattr__(self, "power", power)
        for name, least in (("draws", 10), ("tune", 0), ("every", 1)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        one_of("rule", self.rule, (None, *get_args(Rule)))
        if not (self.sampler in (None, "exact") or isinstance(self.sampler, Sampler)):
            raise OptionError(
                'sampler must be None, "exact" or a sampler such as BlockHMC(), got '
                f"{self.sampler!r}"
            )

    def check(self, model: Any) -> None:
        if model.evidence_data == "vector":
            return
        if not model.likelihood.has_density:
            raise ModelError(
                f"the law with {model.likelihood} has no density to integrate; an evidence needs "
                "beta = 2, 0, -1 or 0 < beta <= 1"
            )
        if model.tensor and self.sampler == "exact":
            raise ModelError(
                'sampler="exact" moves rows of a matrix, and this model is of a tensor; leave '
                f"sampler out for {reference_sampler(model).name}(), whose draws are exact, too"
            )
        if isinstance(self.sampler, Sampler):
            if self.sampler.dispersion is not None:
                raise ModelError(
                    f"{self.sampler.name} does not sample powers of a TweedieNMF's likelihood, or "
                    "not soon enough for an evidence; use BlockHMC(), or leave sampler out"
                )
            self.sampler.kernel(model)
            name = self.sampler.name
            if self.sampler.biased and np.isneginf(model.likelihood.log_normalizer(0.0, 1.0)):
                raise ModelError(
                    f"{name} takes steps of a finite size, which at low temperatures pass "
                    f"the means near zero that {model.likelihood} does not allow, and the "
                    "evidence is off by more than its size; use BlockHMC(), or leave sampler out"
                )

    @property
    def quadrature(self) -> Rule:
        """Quadrature rule in use."""
        return self.rule or ("trapezoid" if self.power == 1 else "euler-maclaurin")

    @property
    def _ladder(self) -> Vector:
        return ladder(self.temperatures, self.power)

    def choice(self, data: BlockedData, model: TweedieNMF) -> Sampler | None:
        """Return the sampler to use, or None for exact moves."""
        if self.sampler is not None:
            return self.sampler if isinstance(self.sampler, Sampler) else None
        if model.tensor:
            return reference_sampler(model)
        work = listed_entries(data, model.likelihood) * model.n_components
        return None if work <= SMALL else reference_sampler(model)

    def _lengths(self, kind: str) -> tuple[int, int, int]:
        """Return draws, tuning cycles and thinning, with defaults for None."""
        pairs = zip((self.draws, self.tune, self.every), DEFAULTS[kind], strict=True)
        draws, tune, every = (default if value is None else value for value, default in pairs)
        return draws, tune, every

    def _share(self, t: float, exact: bool) -> float:
        """Return the share of the draws that a temperature takes."""
        if self.power == 1 or self.quadrature != "euler-maclaurin":
            return 1.0
        return max(float(t ** (3 / self.power)), MIN_DRAWS if exact else MIN_SAMPLED)

    def remedy(self, discretization: bool) -> str:
        """Return advice that makes an error smaller."""
        if not discretization:
            return "raise draws and tune"
        more = f"raise temperatures above {self.temperatures}"
        return more if self.power > 1 else f"leave power={self.power:g} out, or {more}"

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        if problem.model.evidence_data == "vector":
            series = additive_series(problem, self._ladder, self._lengths("vector"))
            return self._assemble(series, {"sampler": ADDITIVE_SAMPLER}, problem)
        data, model = problem.data, problem.model
        sampler = self.choice(data, model)
        exact = sampler is None
        kind = "exact" if sampler is None else "sampler" if sampler.biased else "reference"
        if sampler is not None and sampler.biased:
            warn(
                f"the claimed errors leave out the bias of {sampler.name}'s steps, which "
                "grows with the data: of 100 x 75 counts and three components it was up to "
                f"four times as large; use {reference_sampler(model).name}(), or leave sampler out",
                SamplingWarning,
            )
        sides = both_sides(data, model.likelihood) if exact else None
        run = TemperedChains(model, data, problem.seed, sampler, sides, *self._lengths(kind))
        items = [(i, t, self._share(t, exact)) for i, t in enumerate(self._ladder.tolist())]
        chains = LadderRun(problem, run, items).series()
        dispersion = float(model.dispersion)
        law, phi = model.likelihood.at(dispersion)
        level = normalizer(data, dispersion, law, problem.executor)
        level += (sides.constant if sides is not None else 0.0) / phi
        attrs = {
            "sampler": "exact" if sampler is None else sampler.name,
            "dispersion": dispersion,
            "rate_w": model.rate_w,
            "rate_h": model.rate_h,
        }
        series = [
            chain._replace(fits=tuple(fit / phi + level for fit in chain.fits)) for chain in chains
        ]
        return self._assemble(series, attrs, problem)

    def _assemble(
        self, series: list[FitSeries], attrs: dict[str, Any], problem: EvidenceProblem
    ) -> Evidence:
        """Integrate means and variances; estimate both errors, and make the trace."""
        rule = self.quadrature
        weight = weights(self.temperatures, self.power, rule)
        rows = [summarize(*each) for each in zip(series, *weight, strict=True)]
        table = pd.DataFrame(rows, pd.Index(self._ladder, name="temperature"))
        missed = np.abs(weight[0]) * np.sqrt(unseen(self._ladder, table))
        table["contribution_error"] = np.hypot(table["contribution_error"], missed)
        worst = table["ess"].to_numpy()[np.abs(weight[0]) > MIN_WEIGHT].min()
        if np.hypot.reduce(missed) > MISSED_SHARE * np.hypot.reduce(table["contribution_error"]):
            warn(
                f"the chain at temperature {self._ladder[missed.argmax()]:.3g} sees a small part "
                "of the variance that its neighbours' log-likelihoods imply, and the standard "
                "error is a guess from that; raise tune and draws, or pass another sampler",
                SamplingWarning,
            )
        elif worst < MIN_EFFECTIVE:
            warn(
                f"the chain of one temperature has an effective sample size of {worst:.1f} only: "
                "its standard error is a guess, and it may not have converged yet; "
                "raise draws and tune",
                SamplingWarning,
            )
        table = table.assign(
            weight=weight[0],
            variance_weight=weight[1],
            draws=[one.fits[0].size for one in series],
            acceptance=[one.acceptance for one in series],
        )
        trace = table.to_xarray().assign_attrs(
            rule=rule,
            power=self.power,
            unit="nats",
            **attrs,
            n_components=problem.model.n_components,
            random_seed=str(problem.seed),
        )
        means, variances = trace["mean"].values, trace["variance"].values
        return Evidence(
            integral(weight, means, variances),
            float(np.sqrt(np.sum(trace["contribution_error"].values ** 2))),
            discretization_error(
                self.temperatures, self.power, rule, means, variances, series[0].fits[0]
            ),
            trace,
        )
