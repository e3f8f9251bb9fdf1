"""Four lights that judge a run, each with advice.

The criteria are the same for all problems:

- predictions: R-hat and the Monte Carlo error of means of WH, in posterior standard deviations;
- observations: the difference of predicted means between chains and their Monte Carlo error, in
  standard deviations of a new observation (chains in different modes may agree on this scale);
- components: the number of chains in which each appears, its similarity across them, and the
  convergence of the sizes of W and H and of sampled hyperparameters;
- log density: stationarity; its mean need not be precise.

Lights use an R-hat that is corrected for the autocorrelation of the draws, because autocorrelation
alone makes the R-hat of short, correct chains large.

Notes
-----
Vehtari, Gelman, Simpson, Carpenter and Bürkner 2021: R-hat of at most 1.01, and 100 effective
draws, by which an error is a tenth of a standard deviation. Gelman and Rubin 1992: 1.1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Status = Literal["green", "amber", "red", "none"]

LIGHTS: Final = {
    "predictions": "predictions",
    "observations": "observations",
    "components": "components",
    "log_density": "log density",
}
"""Titles of the lights in print, by name."""

RULES: Final = 5
"""Version of the rules and texts of the lights. Raise it when a sentence or a threshold of a light
changes: cached summaries of other versions are ignored."""
SMALL_ERROR: Final = 0.1
"""Negligible Monte Carlo error of a mean, in posterior standard deviations: it adds half a percent
to the total error and takes 100 effective draws."""
LARGE_ERROR: Final = 0.3
"""Monte Carlo error above which 90% intervals have less than 88% coverage."""
SMALL_OFFSET: Final = 0.07
"""Negligible error of predicted means between chains, in standard deviations of an observation.
On eight real data sets, the true error (against a much longer run) was up to 2.3 times as large:
0.15, which lowers the coverage of a 90% interval by 0.4%."""
DIFFERENT_MODES_RHAT: Final = 1.15
"""R-hat above which stationary chains stayed in different modes, measured on the same data sets."""
GOOD_RHAT: Final = 1.01
BAD_RHAT: Final = 1.05
LARGE_RHAT: Final = 1.1
"""R-hat above which chains disagree, pooled over quantities or for the worst of many."""
MIN_COSINE: Final = 0.8
"""Least cosine similarity in W and in H of two copies of one component."""
GOOD_COSINE: Final = 0.95
"""Least cosine similarity of copies that have the same interpretation."""
MIN_SHARE: Final = 0.5
"""Least share of the draws of a chain in which a component of this chain appears."""
MAX_DIVERGING: Final = 0.05
"""Largest acceptable share of draws that follow a divergence."""
MAX_VARIANCE: Final = 1e300
"""Variance in place of one that overflows a float."""
MANY_TIMES: Final = 20
"""Factor of draws above which another sampler is the better advice."""
MAX_TIMES: Final = 1000.0
"""Largest factor of draws to advise: larger estimates are too uncertain."""

MODES: Final = "Chains are in different modes, and more draws will not change that: "
SEVERAL_STARTS, MAX_STARTS = 8, 64
ONE_CHAIN: Final = (
    "One chain cannot show whether other chains would reach another mode, and the fit does not "
    "rule it out."
)
FOUR_CHAINS: Final = "Run four chains: sample(..., chains=4)."
ALIGNED: Final = "Read W and H through align(), which gives components one scale in all draws."
PREDICTIONS_FIRST: Final = (
    "Improve the predictions first: components cannot be more stable than WH."
)
AUTO_STEP: Final = 'Let the sampler choose its step, step="auto", or use sampler="auto".'


@dataclass(frozen=True)
class Light:
    """Verdict on one aspect of a run; ``print`` shows its status and its sentences.

    Attributes
    ----------
    status
        ``"green"``: reliable; ``"amber"``: use with care; ``"red"``: unreliable; ``"none"``: not
        judged, because the run does not have the data for it or it does not apply.
    reasons
        Sentences, the most important first.
    advice
        The next step to take; empty if there is none.
    numbers
        Diagnostics that determine the status.
    alone
        True if the light is not green only because there is one chain. Not stored.
    """

    status: Status
    reasons: tuple[str, ...]
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    alone: bool = field(default=False, compare=False, repr=False)

    def as_dict(self) -> dict[str, str | float]:
        """Return all fields as text and numbers, as file attributes can hold them."""
        texts: dict[str, str | float] = {"status": self.status, "reasons": "\n".join(self.reasons)}
        return texts | {"advice": self.advice} | {k: float(v) for k, v in self.numbers.items()}

    def sentences(self) -> list[str]:
        """Return the reasons, followed by the advice if there is one."""
        return [*self.reasons, *([f"→ {self.advice}"] if self.advice else [])]

    def __str__(self) -> str:
        return f"{self.status.upper()}. {' '.join(self.sentences())}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Light":
        """Rebuild from :meth:`as_dict`."""
        rest = dict(values)
        status, reasons, advice = (rest.pop(key) for key in ("status", "reasons", "advice"))
        return cls(status, tuple(filter(None, reasons.split("\n"))), advice, rest)


def lights_in(attrs: Mapping[Any, Any]) -> dict[str, Light]:
    """Return all lights of a summary from its attributes."""
    fields = {
        name: {
            key.removeprefix(f"{name}_"): value
            for key, value in attrs.items()
            if str(key).startswith(f"{name}_")
        }
        for name in LIGHTS
    }
    return {name: Light.from_dict(values) for name, values in fields.items()}


class Facts(NamedTuple):
    """Properties of a run that determine the advice.

    Attributes
    ----------
    chains, draws, tune
        Number of chains, of stored draws per chain, and of tuning cycles.
    diverging
        Share of the draws that follow a divergence.
    fixed_step
        True if the user set the step of a sampler whose finite step has a bias.
    fixed_sampler
        True if the user chose the sampler.
    explained
        True if the residuals are no larger than the noise of the model, by a test that could have
        failed. A chain in an inferior mode fails it, so that one chain is enough.
    starts
        Number of starts of which each chain used the best; None if it cannot be chosen.
    """

    chains: int
    draws: int
    tune: int = 0
    diverging: float = 0.0
    fixed_step: bool = False
    fixed_sampler: bool = False
    explained: bool = False
    starts: int | None = 1

    @property
    def alone(self) -> bool:
        """True if nothing shows that other chains would reach the same mode."""
        return self.chains == 1 and not self.explained


def rounded_up(number: float) -> int:
    """Round up to two significant digits, and at least to hundreds."""
    size: int = max(100, 10 ** (int(math.log10(max(number, 1.0))) - 1))
    return math.ceil(number / size) * size


def more_draws(facts: Facts, times: float) -> str:
    """Return the advice to draw ``times`` as many draws in total."""
    if not math.isfinite(times):
        return _stuck_advice(facts)
    if times > MANY_TIMES and facts.fixed_sampler:
        return (
            f"Use another sampler: this one would need {times:.0f} times as many draws; "
            'sampler="auto" chooses one.'
        )
    return _draw(facts, (min(times, MAX_TIMES) - 1.0) * facts.draws)


def other_starts(facts: Facts) -> str:
    """Return the advice for chains in different modes."""
    starts = None if facts.starts is None else max(SEVERAL_STARTS, 4 * facts.starts)
    if starts is None or starts > MAX_STARTS:
        return f"{MODES}interpret each mode separately; align() shows what they have in common."
    several = "several" if starts == SEVERAL_STARTS else "more"
    return f"{MODES}begin each with the best of {several} starts, sample(..., starts={starts})."


def _draw(facts: Facts, more: float) -> str:
    """Return the advice to draw about ``more`` draws per chain."""
    draws = rounded_up(more)
    each = "" if facts.chains == 1 else " in each chain"
    return f"Draw about {draws} more{each}: resume(..., draws={draws})."


def _stuck_advice(facts: Facts) -> str:
    """Return the advice for constant draws; a few draws may be equal by chance."""
    return AUTO_STEP if facts.draws >= MIN_CONSTANT_DRAWS else _draw(facts, 100)


def _unusable_draws(facts: Facts) -> Light:
    """Return the light of draws that cannot be judged."""
    reason = (
        f"{facts.draws} draws cannot be judged: they are too few, constant or not finite."
        if facts.draws != 1
        else "One draw cannot be judged."
    )
    return Light("red", (reason,), _stuck_advice(facts))


def pooled_rhat(rhat: Array) -> float:
    """Return the root mean square; the largest of many is large by chance."""
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.mean(np.square(rhat))))


def error_of(ess: Array) -> float:
    """Return the RMS Monte Carlo error, in posterior standard deviations; 0 without values."""
    return _error(np.sqrt(1.0 / np.maximum(ess, 1.0)).tolist())


def predictions_light(
    rhat: Array, ess: Array, facts: Facts, *, rising: bool, within: Callable[[], float]
) -> Light:
    """Return the light of quantities of WH, from their draws.

    Parameters
    ----------
    rhat, ess
        R-hat and effective sample size of each quantity, (n,), without constant ones.
    facts
        Properties of the run.
    rising
        True if the log density has a trend.
    within
        Function that returns the pooled R-hat of the halves of single chains.
    """
    if rhat.size == 0:
        return _unusable_draws(facts)
    numbers = {
        "error": error_of(ess),
        "rhat": pooled_rhat(rhat),
        "worst_rhat": float(rhat.max()),
        "least_ess": float(ess.min()),
    }
    return _error_light(numbers, len(rhat), facts, rising=rising, within=within)


MIN_CONSTANT_DRAWS: Final = 10
"""Number of draws from which on constant draws mean that a chain does not move."""


def _error_light(
    numbers: dict[str, float],
    count: int,
    facts: Facts,
    *,
    rising: bool,
    within: Callable[[], float],
) -> Light:
    error, rhat, worst = numbers["error"], numbers["rhat"], numbers["worst_rhat"]
    reason = (
        f"Means of WH have a Monte Carlo error of {error:.2g} posterior standard deviations (limit "
        f"{SMALL_ERROR:g}) and R-hat {rhat:.3f} (largest of {count}: {worst:.3f})."
    )
    reasons = [reason]
    diverging = facts.diverging > MAX_DIVERGING
    crude = facts.fixed_step and (rising or diverging)
    bad = error > LARGE_ERROR or rhat > LARGE_RHAT or diverging or crude
    fine = error <= SMALL_ERROR and rhat <= GOOD_RHAT and worst <= LARGE_RHAT
    if diverging:
        reasons.append(f"{facts.diverging:.0%} of the draws follow a divergence.")
    if facts.fixed_step:
        reasons.append(
            "The step was set by hand, and these diagnostics do not show the bias of a finite step."
        )
    sound = fine and not facts.fixed_step and not rising
    alone = sound and facts.alone
    status: Status = "red" if bad else "green" if sound and not alone else "amber"
    if alone:
        reasons.append(ONE_CHAIN)
    if diverging or crude:
        advice = AUTO_STEP
    elif rhat > DIFFERENT_MODES_RHAT and facts.chains > 1 and within() <= BAD_RHAT:
        advice = other_starts(facts)
    elif rising:
        advice = longer_tuning(facts)
    elif not fine:
        excess = (rhat * rhat - 1.0) / (GOOD_RHAT**2 - 1.0)
        advice = more_draws(facts, max(1.5, (error / SMALL_ERROR) ** 2, excess))
    else:
        advice = "Measure the bias: discretization_bias(trace)." if facts.fixed_step else ""
        advice = FOUR_CHAINS if alone else advice
    return Light(status, tuple(reasons), advice, numbers, alone)


def observations_light(
    means: Array, error: Array, sd: Array, facts: Facts, *, rising: bool
) -> Light:
    r"""Return the light of predicted observations, from the draws of their means.

    .. math:: \text{off}^2 = \frac 1{nM} \sum_c \frac{\operatorname{Var}_m \bar\mu_{mc}}{s_c^2}

    over n cells c and M chains (or halves), with s the standard deviation of an observation.

    Parameters
    ----------
    means
        Means of WH in each chain, or in both halves of a single chain, (part, cell).
    error, sd
        Monte Carlo errors of the means over all chains, and s, (cell,).
    facts
        Properties of the run.
    rising
        True if the log density has a trend.
    """
    if not sd.size:
        return _unusable_draws(facts)
    numbers = {
        "off": math.sqrt(float(np.mean(means.var(axis=0, ddof=1) / len(means) / np.square(sd)))),
        "error": math.sqrt(float(np.mean(np.square(error / sd)))),
    }
    off = numbers["off"]
    parts = "halves of the chain" if facts.chains == 1 else "chains"
    reason = (
        f"Predicted means of {sd.size} cells have an error of {off:.2g} standard deviations of an "
        f"observation, by the differences between {parts} (limit {SMALL_OFFSET:g})."
    )
    reasons = [reason]
    fine = off <= SMALL_OFFSET and numbers["error"] <= SMALL_ERROR
    sound = fine and not facts.fixed_step and not rising
    alone = sound and facts.alone
    bad = max(off, numbers["error"]) > LARGE_ERROR or facts.diverging > MAX_DIVERGING
    status: Status = "red" if bad else "green" if sound and not alone else "amber"
    advice = ""
    if alone:
        reasons.append(ONE_CHAIN)
        advice = FOUR_CHAINS
    elif not sound:
        advice = "Follow the advice for predictions."
    return Light(status, tuple(reasons), advice, numbers, alone)


def longer_tuning(facts: Facts) -> str:
    """Return the advice to tune longer."""
    tune = rounded_up(2 * max(facts.tune, facts.draws))
    return f"Tune longer: sample(..., tune={tune})."


@np.errstate(over="ignore", invalid="ignore")
def moments_light(mean: Array, var: Array, count: Array, facts: Facts) -> Light:
    r"""Return the light of monitored cells, from the means and variances of chains.

    .. math:: \hat R^2 = \frac{N-1}{N} + \frac{B}{W}, \qquad
        \text{error}^2 = \frac{B / M}{W + B}

    with B the variance of the means of M chains and W the mean of their variances.

    Parameters
    ----------
    mean, var
        Mean and variance of each cell in each chain, (chain, cell).
    count
        Number of cycles of each chain, (chain,).
    facts
        Properties of the run.
    """
    within, chains = var.mean(axis=0), len(mean)
    usable = np.isfinite(within) & np.isfinite(mean).all(axis=0) & (within > 0)
    if chains < 2 or not usable.any():
        return Light(
            "none",
            ("Without stored draws, the means of one chain do not show their error.",),
            'Store draws, keep="draws", or run four chains with monitor=.',
        )
    within, length = within[usable], float(count.mean())
    between = np.minimum(mean[:, usable].var(axis=0, ddof=1), MAX_VARIANCE)
    rhat = np.sqrt((length - 1.0) / length + between / within)
    numbers = {
        "error": math.sqrt(float(np.mean(between / chains / (within + between)))),
        "rhat": pooled_rhat(rhat),
        "worst_rhat": float(rhat.max()),
    }
    return _error_light(numbers, len(rhat), facts, rising=False, within=lambda: math.inf)


def density_light(
    rhat: float, moving: str | None, facts: Facts, *, within: Callable[[], float]
) -> Light:
    """Return the light of the log density.

    Parameters
    ----------
    rhat
        R-hat of the halves of all chains; NaN if the draws cannot be judged.
    moving
        Description of a significant trend, if there is one.
    facts
        Properties of the run.
    within
        Function that returns the R-hat of the halves of single chains.
    """
    numbers = {"rhat": rhat}
    if math.isnan(rhat):
        return _unusable_draws(facts)
    advice = AUTO_STEP if facts.fixed_step else longer_tuning(facts)
    if moving is not None:
        return Light("red", (f"{moving[0].upper()}{moving[1:]}.",), advice, numbers)
    parts = "halves of the chain" if facts.chains == 1 else "chains"
    if rhat <= BAD_RHAT:
        return Light("green", (f"The log density is stationary (R-hat {rhat:.3f}).",), "", numbers)
    reason = f"The log density differs between {parts} (R-hat {rhat:.3f})."
    if rhat > DIFFERENT_MODES_RHAT and facts.chains > 1 and within() <= BAD_RHAT:
        advice = other_starts(facts)
    return Light("red" if rhat > LARGE_RHAT else "amber", (reason,), advice, numbers)


class Component(NamedTuple):
    """Diagnostics of one aligned component.

    Attributes
    ----------
    name
        Label of the component.
    share
        Share of all draws in which it appears.
    chains_with
        Number of chains in which it appears in half of the draws or more.
    agreement
        Least cosine similarity, in W and in H, of its means in the halves of all chains.
    error
        Monte Carlo error of its size, in posterior standard deviations; NaN if not available.
    """

    name: str
    share: float
    chains_with: int
    agreement: float
    error: float = math.nan


def status_of_component(one: Component, chains: int) -> Status:
    """Return green if all chains agree, amber if they have similar copies, red otherwise."""
    if one.chains_with < chains or one.share < MIN_SHARE or one.agreement < MIN_COSINE:
        return "red"
    return "green" if one.agreement >= GOOD_COSINE else "amber"


class Unconverged(NamedTuple):
    """Variable that has not converged.

    Attributes
    ----------
    kind
        Kind of the variable, in words.
    name, rhat
        Name and R-hat of the entry with the largest R-hat.
    times
        Factor by which the number of draws has to grow.
    drawn
        True if aligned W and H have converged.
    """

    kind: str
    name: str
    rhat: float
    times: float
    drawn: bool


def check_convergence(
    kind: str, names: Sequence[str], rhat: Array, error: float = 0.0, *, drawn: bool = False
) -> Unconverged | None:
    """Return a variable if it has not converged; None if it has or cannot be judged.

    Parameters
    ----------
    kind, drawn
        Attributes of `Unconverged`.
    names, rhat
        Name and R-hat of each entry.
    error
        RMS Monte Carlo error, in posterior standard deviations; 0 to ignore it.
    """
    valid = np.flatnonzero(~np.isnan(rhat))
    if not valid.size:
        return None
    worst = int(valid[rhat[valid].argmax()])
    most, pooled = float(rhat[worst]), pooled_rhat(rhat[valid])
    if pooled <= BAD_RHAT and most <= LARGE_RHAT and error <= LARGE_ERROR:
        return None
    excess = (pooled * pooled - 1.0) / (BAD_RHAT**2 - 1.0)
    times = max(1.5, excess, (error / LARGE_ERROR) ** 2)
    return Unconverged(kind, names[worst], most, times, drawn)


def with_unconverged(
    light: Light, variables: Sequence[Unconverged], facts: Facts, *, sound: bool
) -> Light:
    """Return the light of components with the variables that have not converged.

    Parameters
    ----------
    light
        Light of the components.
    variables
        Variables that have not converged; the worst of each kind is named.
    facts
        Properties of the run.
    sound
        True if WH is reliable.
    """
    if not variables:
        return light
    worst: dict[str, Unconverged] = {}
    for one in sorted(variables, key=lambda one: -one.rhat):
        worst.setdefault(one.kind, one)
    listed = "; ".join(f"{kind} ({one.name}: R-hat {one.rhat:.3f})" for kind, one in worst.items())
    reason = f"Not converged, so that means and intervals are imprecise: {listed}."
    if light.status in ("red", "amber") and not light.alone:
        advice = light.advice
    elif not sound:
        advice = PREDICTIONS_FIRST
    elif all(one.drawn for one in variables):
        advice = ALIGNED
    else:
        advice = more_draws(facts, max(one.times for one in variables if not one.drawn))
    status: Status = "red" if light.status == "red" else "amber"
    numbers = {**light.numbers, "unsettled_rhat": max(one.rhat for one in variables)}
    return Light(status, (*light.reasons, reason), advice, numbers)


HALVES: Final = {1: "both halves of the chain", 2: "both chains"}
"""Compared parts of a run, by the number of chains."""


def components_light(components: Sequence[Component], facts: Facts, *, sound: bool) -> Light:
    """Return the light of components, from their presence in all chains.

    Parameters
    ----------
    components
        All components whose order is arbitrary.
    facts
        Properties of the run.
    sound
        True if WH is reliable.
    """
    by: dict[Status, list[Component]] = {"green": [], "amber": [], "red": [], "none": []}
    for one in components:
        by[status_of_component(one, facts.chains)].append(one)
    red, amber = by["red"], by["amber"]
    numbers = {
        "total": float(len(components)),
        "stable": float(len(by["green"])),
        "least_share": min(one.share for one in components),
        "least_chains": float(min(one.chains_with for one in components)),
        "least_agreement": min(one.agreement for one in components),
        "size_error": _error([one.error for one in components]),
    }
    rough = numbers["size_error"] > LARGE_ERROR
    alone = not (red or amber or rough) and facts.alone
    worst: Status = "red" if red else "amber" if amber or rough or alone else "green"
    halves = HALVES.get(facts.chains, f"all {facts.chains} chains")
    reasons = []
    if not (red or amber):
        agreement = numbers["least_agreement"]
        total = len(components)
        which = f"All {total} components appear" if total > 1 else "The component appears"
        reasons.append(f"{which} in {halves} (lowest cosine similarity {agreement:.2f}).")
    if red:
        are, them = ("is", "it") if len(red) == 1 else ("are", "them")
        reasons.append(
            f"{_listed(red)} of {len(components)} {are} not the same in {halves}: "
            f"{_difference(red, facts.chains)}. Do not interpret {them}."
        )
    if amber:
        verb = "varies" if len(amber) == 1 else "vary"
        reasons.append(f"{_listed(amber)} {verb} noticeably across {halves}.")
    if red and by["green"]:
        reasons.append(f"{_listed(by['green'])} can be interpreted.")
    if rough and not red:
        have = "Their sizes have" if len(components) > 1 else "Its size has"
        reasons.append(
            f"{have} a Monte Carlo error of {numbers['size_error']:.2g} posterior standard "
            "deviations: shapes can be interpreted, but sizes and intervals are imprecise."
        )
    if alone:
        reasons.append(ONE_CHAIN)
    if not sound and worst != "green":
        advice = PREDICTIONS_FIRST
    elif red and facts.fixed_step:
        advice = AUTO_STEP
    elif red:
        advice = 'Use fewer components: n_components="auto" or select_rank chooses the number.'
    else:
        times = max(4.0 if amber else 1.5, (numbers["size_error"] / LARGE_ERROR) ** 2)
        advice = more_draws(facts, times) if amber or rough else FOUR_CHAINS if alone else ""
    return Light(worst, tuple(reasons), advice, numbers)


def _difference(red: Sequence[Component], chains: int) -> str:
    """Return the reason why components are not the same in all chains."""
    if any(0 < one.chains_with < chains for one in red):
        return "the chains disagree"
    if any(one.share < MIN_SHARE for one in red):
        return "the data do not separate them from other components"
    return "the chains are still changing"


def _error(errors: Sequence[float]) -> float:
    """Return the root mean square of the finite errors; 0 without any."""
    finite = np.array([one for one in errors if math.isfinite(one)])
    return math.sqrt(float(np.mean(np.square(finite)))) if finite.size else 0.0


def _listed(components: Sequence[Component]) -> str:
    names = [one.name for one in components]
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"Component {listed}" if len(names) == 1 else f"Components {listed}"
