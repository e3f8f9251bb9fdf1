"""Four lights over a run, each with what to do about it.

What a light goes by does not depend on the problem. Predictions: the Monte Carlo error of means
of WH, in posterior standard deviations, and R-hat. Observations: how far predicted means are apart
between chains, and their error, in standard deviations of a new observation, beside whose noise
chains that have settled apart may hardly differ. Components: in how many chains they are, how
alike they are there, and whether sizes of W and H and sampled hyperparameters have settled. The
log density has to be at one level, which needs no precision.

R-hat is the one that is left once the draws' own autocorrelation is taken off: of short chains that
are right it is large for this reason alone.

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
"""Names of the lights, and what they are called in print."""

RULES: Final = 4
"""Number of the rules by which runs are judged: a verdict under others is none. Raise it when
what a light says, or a threshold below, changes."""
SMALL_ERROR: Final = 0.1
"""Monte Carlo error of a mean, in posterior standard deviations, that adds nothing worth telling:
half a percent of the whole error. It takes 100 effective draws."""
LARGE_ERROR: Final = 0.3
"""One from which on intervals of 90% hold less than 88%, and standard deviations are rough."""
HARDLY_OFF: Final = 0.07
"""Error of predicted means, by the distances of chains, in standard deviations of an observation.
Measured on eight real data sets, a much longer run is up to 2.3 times as far off: by 0.15, of which
hardly anything shows, since an interval of 90 % then holds 0.4 % less."""
SETTLED_APART: Final = 1.15
"""R-hat from which on chains that are at rest do not come together, as measured on these sets."""
GOOD_RHAT: Final = 1.01
BAD_RHAT: Final = 1.05
PLAIN_RHAT: Final = 1.1
"""One by which all numbers together disagree, or a single one of many does for certain."""
NEAR: Final = 0.8
"""Cosine in W and in H from which on two components are taken to be the same."""
ALIKE: Final = 0.95
"""Cosine from which on what is read off a component is the same."""
RARE: Final = 0.5
"""Share of a chain's draws below which a chain has not got a component."""
FEW_DIVERGING: Final = 0.05
"""Share of draws after a step that diverged, up to which a smaller step has mended it."""
HUGE: Final = 1e300
"""Variance that stands for one that is too large for a float."""
FAR_OFF: Final = 20
"""Times as many draws, from which on another sampler is the better advice."""
MOST_TIMES: Final = 1000.0
"""Times as many draws, beyond which the estimate of how many are needed says no more."""

APART: Final = "Chains have settled apart, and more draws will not bring them together: "
SEVERAL_STARTS, MOST_STARTS = 8, 64
ALONE: Final = (
    "One chain cannot show whether others would end elsewhere, and the fit does not rule it out."
)
FOUR_CHAINS: Final = "Run four chains: sample(..., chains=4)."
ALIGNED: Final = "Read W and H through align(), which gives them one size in every draw."
PREDICTIONS_FIRST: Final = "See to the predictions first: components cannot be steadier than WH."
OWN_STEP: Final = 'Leave the step to the sampler, step="auto", or take another one, sampler="auto".'


@dataclass(frozen=True)
class Light:
    """What is to be thought of one side of a run.

    Attributes
    ----------
    status
        ``"green"``: rely on it; ``"amber"``: with care; ``"red"``: do not; ``"none"``: the run
        cannot tell, or there is nothing to judge.
    reasons
        Sentences, the most important first.
    advice
        The one thing to do about it; empty if there is none.
    numbers
        What the status goes by.
    alone
        Whether nothing speaks against it but that there is one chain. Attributes do not tell.
    """

    status: Status
    reasons: tuple[str, ...]
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    alone: bool = field(default=False, compare=False, repr=False)

    def as_dict(self) -> dict[str, str | float]:
        """All of it as text and numbers, such as attributes of files can be."""
        told: dict[str, str | float] = {"status": self.status, "reasons": "\n".join(self.reasons)}
        return told | {"advice": self.advice} | {k: float(v) for k, v in self.numbers.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Light":
        """Rebuild from :meth:`as_dict`."""
        rest = dict(values)
        status, reasons, advice = (rest.pop(key) for key in ("status", "reasons", "advice"))
        return cls(status, tuple(filter(None, reasons.split("\n"))), advice, rest)


def lights_in(attrs: Mapping[Any, Any]) -> dict[str, Light]:
    """All lights of a summary, from its attributes."""
    own = {
        name: {
            key.removeprefix(f"{name}_"): value
            for key, value in attrs.items()
            if str(key).startswith(f"{name}_")
        }
        for name in LIGHTS
    }
    return {name: Light.from_dict(values) for name, values in own.items()}


class Facts(NamedTuple):
    """What of a run bears on what to do.

    Attributes
    ----------
    chains, draws, tune
        Chains, kept draws of each, and cycles of tuning.
    diverging
        Share of the draws that came after a step that was too large.
    by_hand
        The step of a sampler whose finite step has a bias was chosen by the user.
    asked_for
        The sampler was chosen by the user.
    explained
        The model leaves no more of the data than its own noise, by a test that could have failed:
        one of several modes that are worse than the best does not, so that one chain is enough.
    starts
        Of how many starts each chain began with the best; None where there is no choice.
    """

    chains: int
    draws: int
    tune: int = 0
    diverging: float = 0.0
    by_hand: bool = False
    asked_for: bool = False
    explained: bool = False
    starts: int | None = 1

    @property
    def alone(self) -> bool:
        """Whether nothing tells that other chains would end where this one did."""
        return self.chains == 1 and not self.explained


def rounded_up(number: float) -> int:
    """The next number with two digits that count, hundreds at least."""
    size: int = max(100, 10 ** (int(math.log10(max(number, 1.0))) - 1))
    return math.ceil(number / size) * size


def more_draws(facts: Facts, times: float) -> str:
    """Tell to draw ``times`` as often as was drawn."""
    if not math.isfinite(times):
        return _of_stuck(facts)
    if times > FAR_OFF and facts.asked_for:
        return (
            f"Another sampler: this one would need {times:.0f} times as many draws; "
            'sampler="auto" chooses one.'
        )
    return _draw(facts, (min(times, MOST_TIMES) - 1.0) * facts.draws)


def other_starts(facts: Facts) -> str:
    """Tell what to do where chains have settled apart."""
    wanted = None if facts.starts is None else max(SEVERAL_STARTS, 4 * facts.starts)
    if wanted is None or wanted > MOST_STARTS:
        return f"{APART}each is an explanation of its own; look at what they share in align()."
    several = "several" if wanted == SEVERAL_STARTS else "more"
    return f"{APART}let each begin with the best of {several} starts, sample(..., starts={wanted})."


def _draw(facts: Facts, more: float) -> str:
    """Tell how many more draws are needed."""
    wanted = rounded_up(more)
    each = "" if facts.chains == 1 else " in each chain"
    return f"Draw about {wanted} more{each}: resume(..., draws={wanted})."


def _of_stuck(facts: Facts) -> str:
    """Tell what to do where nothing has changed: a few draws may be alike by chance."""
    return OWN_STEP if facts.draws >= ENOUGH_TO_TELL else _draw(facts, 100)


def _unknown(facts: Facts) -> Light:
    """Light over draws that say nothing."""
    told = (
        f"Nothing can be said of {facts.draws} draws: they are too few, never change, or are not "
        "finite."
    )
    return Light("red", (told,), _of_stuck(facts))


def pooled_rhat(rhat: Array) -> float:
    """Root of the mean square: of many numbers the largest is large by chance."""
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.mean(np.square(rhat))))


def error_of(ess: Array) -> float:
    """Root mean square of Monte Carlo errors, in posterior standard deviations; 0 of none."""
    return _error(np.sqrt(1.0 / np.maximum(ess, 1.0)).tolist())


def of_predictions(
    rhat: Array, ess: Array, facts: Facts, *, rising: bool, within: Callable[[], float]
) -> Light:
    """Judge numbers that WH gives, from the draws.

    Parameters
    ----------
    rhat, ess
        Of each number, (n,); those that never change left out.
    facts
        Of the run.
    rising
        The log density had a trend.
    within
        Finds the pooled R-hat of the halves of single chains.
    """
    if rhat.size == 0:
        return _unknown(facts)
    numbers = {
        "error": error_of(ess),
        "rhat": pooled_rhat(rhat),
        "worst_rhat": float(rhat.max()),
        "least_ess": float(ess.min()),
    }
    return _light_of_error(numbers, len(rhat), facts, rising=rising, within=within)


ENOUGH_TO_TELL: Final = 10
"""Draws that a chain that moves at all makes different ones of."""


def _light_of_error(
    numbers: dict[str, float],
    count: int,
    facts: Facts,
    *,
    rising: bool,
    within: Callable[[], float],
) -> Light:
    error, rhat, worst = numbers["error"], numbers["rhat"], numbers["worst_rhat"]
    said = f"Means of WH have a Monte Carlo error of {error:.2g} posterior sd ({count} numbers; up "
    reasons = [f"{said}to {SMALL_ERROR:g} is enough) and R-hat {rhat:.3f} (worst {worst:.3f})."]
    diverging = facts.diverging > FEW_DIVERGING
    crude = facts.by_hand and (rising or diverging)
    bad = error > LARGE_ERROR or rhat > PLAIN_RHAT or diverging or crude
    fine = error <= SMALL_ERROR and rhat <= GOOD_RHAT and worst <= PLAIN_RHAT
    if diverging:
        reasons.append(f"{facts.diverging:.0%} of the draws came after a step that diverged.")
    if facts.by_hand:
        reasons.append("The step was set by hand, and the bias of a finite step is not seen here.")
    sound = fine and not facts.by_hand and not rising
    alone = sound and facts.alone
    status: Status = "red" if bad else "green" if sound and not alone else "amber"
    if alone:
        reasons.append(ALONE)
    if diverging or crude:
        advice = OWN_STEP
    elif rhat > SETTLED_APART and facts.chains > 1 and within() <= BAD_RHAT:
        advice = other_starts(facts)
    elif rising:
        advice = longer_tuning(facts)
    elif not fine:
        excess = (rhat * rhat - 1.0) / (GOOD_RHAT**2 - 1.0)
        advice = more_draws(facts, max(1.5, (error / SMALL_ERROR) ** 2, excess))
    else:
        advice = "Measure the bias: discretization_bias(trace)." if facts.by_hand else ""
        advice = FOUR_CHAINS if alone else advice
    return Light(status, tuple(reasons), advice, numbers, alone)


def of_observations(means: Array, error: Array, sd: Array, facts: Facts, *, rising: bool) -> Light:
    r"""Judge predicted observations of cells, from the draws of their means.

    .. math:: \text{off}^2 = \frac 1{nM} \sum_c \frac{\operatorname{Var}_m \bar\mu_{mc}}{s_c^2}

    over n cells c and M parts of the run, with s the standard deviation of an observation.

    Parameters
    ----------
    means
        Means of WH in each chain, or in both halves of a single one, (part, cell).
    error, sd
        Monte Carlo errors of these means over all chains, and s, (cell,).
    facts
        Of the run.
    rising
        The log density had a trend.
    """
    if not sd.size:
        return _unknown(facts)
    numbers = {
        "off": math.sqrt(float(np.mean(means.var(axis=0, ddof=1) / len(means) / np.square(sd)))),
        "error": math.sqrt(float(np.mean(np.square(error / sd)))),
    }
    off = numbers["off"]
    parts = "halves of the chain" if facts.chains == 1 else "chains"
    said = f"As {parts} differ, predicted means are off by {off:.2g} sd of an observation"
    reasons = [f"{said} ({sd.size} cells; up to {HARDLY_OFF:g} hardly shows)."]
    fine = off <= HARDLY_OFF and numbers["error"] <= SMALL_ERROR
    sound = fine and not facts.by_hand and not rising
    alone = sound and facts.alone
    bad = max(off, numbers["error"]) > LARGE_ERROR or facts.diverging > FEW_DIVERGING
    status: Status = "red" if bad else "green" if sound and not alone else "amber"
    advice = ""
    if alone:
        reasons.append(ALONE)
        advice = FOUR_CHAINS
    elif not sound:
        advice = "Take the advice for predictions."
    return Light(status, tuple(reasons), advice, numbers, alone)


def longer_tuning(facts: Facts) -> str:
    """Tell to tune longer."""
    wanted = rounded_up(2 * max(facts.tune, facts.draws))
    return f"Tune longer: sample(..., tune={wanted})."


@np.errstate(over="ignore", invalid="ignore")
def of_moments(mean: Array, var: Array, count: Array, facts: Facts) -> Light:
    r"""Judge monitored cells from the means and variances of chains alone.

    .. math:: \hat R^2 = \frac{N-1}{N} + \frac{B}{W}, \qquad
        \text{error}^2 = \frac{B / M}{W + B}

    with B the variance of the means of M chains, W the mean of their variances.

    Parameters
    ----------
    mean, var
        (chain, cell).
    count
        Cycles of each chain, (chain,).
    facts
        Of the run.
    """
    within, chains = var.mean(axis=0), len(mean)
    known = np.isfinite(within) & np.isfinite(mean).all(axis=0) & (within > 0)
    if chains < 2 or not known.any():
        return Light(
            "none",
            ("The run kept no draws, and one chain's means cannot tell how sure they are.",),
            'Keep draws, keep="draws", or run four chains with monitor=.',
        )
    within, length = within[known], float(count.mean())
    between = np.minimum(mean[:, known].var(axis=0, ddof=1), HUGE)
    rhat = np.sqrt((length - 1.0) / length + between / within)
    numbers = {
        "error": math.sqrt(float(np.mean(between / chains / (within + between)))),
        "rhat": pooled_rhat(rhat),
        "worst_rhat": float(rhat.max()),
    }
    return _light_of_error(numbers, len(rhat), facts, rising=False, within=lambda: math.inf)


def of_density(
    rhat: float, moving: str | None, facts: Facts, *, within: Callable[[], float]
) -> Light:
    """Judge whether the log density is at one level.

    Parameters
    ----------
    rhat
        Its R-hat, of halves of all chains; NaN if nothing can be said.
    moving
        A trend that no stationary chain would have by chance, in words.
    facts
        Of the run.
    within
        Finds the R-hat of the halves of single chains.
    """
    numbers = {"rhat": rhat}
    if math.isnan(rhat):
        return _unknown(facts)
    advice = OWN_STEP if facts.by_hand else longer_tuning(facts)
    if moving is not None:
        return Light("red", (f"{moving[0].upper()}{moving[1:]}.",), advice, numbers)
    parts = "halves of the chain" if facts.chains == 1 else "chains"
    if rhat <= BAD_RHAT:
        return Light("green", (f"It is at one level (R-hat {rhat:.3f}).",), "", numbers)
    said = f"The {parts} have it at different levels (R-hat {rhat:.3f})."
    if rhat > SETTLED_APART and facts.chains > 1 and within() <= BAD_RHAT:
        advice = other_starts(facts)
    return Light("red" if rhat > PLAIN_RHAT else "amber", (said,), advice, numbers)


class Component(NamedTuple):
    """What is known of one component, once aligned.

    Attributes
    ----------
    name
        Its label.
    share
        Of all draws in which it appears.
    chains_with
        Chains that have it in half of their draws or more.
    agreement
        Least cosine, in W and in H, between its means in the halves of all chains.
    error
        Monte Carlo error of its size, in posterior standard deviations; NaN if unknown.
    """

    name: str
    share: float
    chains_with: int
    agreement: float
    error: float = math.nan


def status_of_component(one: Component, chains: int) -> Status:
    """Green: alike in all chains; amber: in all of them; red: not."""
    if one.chains_with < chains or one.share < RARE or one.agreement < NEAR:
        return "red"
    return "green" if one.agreement >= ALIKE else "amber"


class Unsettled(NamedTuple):
    """A variable that results show and that has not settled.

    Attributes
    ----------
    what
        Of which kind it is, in words.
    name, rhat
        The entry with the largest R-hat.
    times
        How many times as many draws it needs.
    drawn
        Aligned copies of W and H do not have the fault.
    """

    what: str
    name: str
    rhat: float
    times: float
    drawn: bool


def unsettled(
    what: str, names: Sequence[str], rhat: Array, error: float = 0.0, *, drawn: bool = False
) -> Unsettled | None:
    """Find out whether a variable has settled; None if it has, or if nothing can be said of it.

    Parameters
    ----------
    what, drawn
        As in `Unsettled`.
    names, rhat
        Of each entry; of many the largest R-hat is large by chance.
    error
        Monte Carlo error of all, in posterior standard deviations; 0 if it does not matter.
    """
    known = np.flatnonzero(~np.isnan(rhat))
    if not known.size:
        return None
    worst = int(known[rhat[known].argmax()])
    most, pooled = float(rhat[worst]), pooled_rhat(rhat[known])
    if pooled <= BAD_RHAT and most <= PLAIN_RHAT and error <= LARGE_ERROR:
        return None
    excess = (pooled * pooled - 1.0) / (BAD_RHAT**2 - 1.0)
    times = max(1.5, excess, (error / LARGE_ERROR) ** 2)
    return Unsettled(what, names[worst], most, times, drawn)


def with_unsettled(light: Light, found: Sequence[Unsettled], facts: Facts, *, sound: bool) -> Light:
    """Let the light over components tell of variables that have not settled.

    Parameters
    ----------
    light
        What it says of the components themselves.
    found
        Variables that have not settled; of each kind the worst is named.
    facts
        Of the run.
    sound
        WH may be relied on.
    """
    if not found:
        return light
    worst: dict[str, Unsettled] = {}
    for one in sorted(found, key=lambda one: -one.rhat):
        worst.setdefault(one.what, one)
    listed = "; ".join(f"{what} ({one.name}: R-hat {one.rhat:.3f})" for what, one in worst.items())
    said = f"Not settled, so that means and intervals are rough: {listed}."
    if light.status in ("red", "amber") and not light.alone:
        advice = light.advice
    elif not sound:
        advice = PREDICTIONS_FIRST
    elif all(one.drawn for one in found):
        advice = ALIGNED
    else:
        advice = more_draws(facts, max(one.times for one in found if not one.drawn))
    status: Status = "red" if light.status == "red" else "amber"
    numbers = {**light.numbers, "unsettled_rhat": max(one.rhat for one in found)}
    return Light(status, (*light.reasons, said), advice, numbers)


def of_components(found: Sequence[Component], facts: Facts, *, sound: bool) -> Light:
    """Judge components by their presence in all chains.

    Parameters
    ----------
    found
        All that may change places.
    facts
        Of the run.
    sound
        WH may be relied on.
    """
    by: dict[Status, list[Component]] = {"green": [], "amber": [], "red": [], "none": []}
    for one in found:
        by[status_of_component(one, facts.chains)].append(one)
    red, amber = by["red"], by["amber"]
    numbers = {
        "total": float(len(found)),
        "stable": float(len(by["green"])),
        "least_share": min(one.share for one in found),
        "least_chains": float(min(one.chains_with for one in found)),
        "least_agreement": min(one.agreement for one in found),
        "size_error": _error([one.error for one in found]),
    }
    rough = numbers["size_error"] > LARGE_ERROR
    alone = not (red or amber or rough) and facts.alone
    worst: Status = "red" if red else "amber" if amber or rough or alone else "green"
    halves = "both halves of the chain" if facts.chains == 1 else f"all {facts.chains} chains"
    reasons = []
    if not (red or amber):
        agreement = numbers["least_agreement"]
        which = f"All {len(found)} are" if len(found) > 1 else "It is"
        reasons.append(f"{which} in {halves}, alike to a cosine of {agreement:.2f}.")
    if red:
        are, them = ("is", "it") if len(red) == 1 else ("are", "them")
        reasons.append(
            f"{_listed(red)} of {len(found)} {are} not the same in {halves}: "
            f"{_why(red, facts.chains)}. Do not interpret {them}."
        )
    if amber:
        verb = "differs" if len(amber) == 1 else "differ"
        reasons.append(f"{_listed(amber)} {verb} between {halves} by more than a trifle.")
    if red and by["green"]:
        reasons.append(f"{_listed(by['green'])} may be read.")
    if rough and not red:
        have = "Their sizes have" if len(found) > 1 else "Its size has"
        reasons.append(
            f"{have} a Monte Carlo error of {numbers['size_error']:.2g} posterior sd: "
            "shapes may be read, sizes and intervals are rough."
        )
    if alone:
        reasons.append(ALONE)
    if not sound and worst != "green":
        advice = PREDICTIONS_FIRST
    elif red and facts.by_hand:
        advice = OWN_STEP
    elif red:
        advice = 'Take fewer components: n_components="auto" or select_rank find how many.'
    else:
        times = max(4.0 if amber else 1.5, (numbers["size_error"] / LARGE_ERROR) ** 2)
        advice = more_draws(facts, times) if amber or rough else FOUR_CHAINS if alone else ""
    return Light(worst, tuple(reasons), advice, numbers)


def _why(red: Sequence[Component], chains: int) -> str:
    """What is the matter with components that are not the same everywhere."""
    if any(0 < one.chains_with < chains for one in red):
        return "chains found different ones"
    if any(one.share < RARE for one in red):
        return "the data do not tell them from others"
    return "they still change"


def _error(errors: Sequence[float]) -> float:
    """Root mean square of those that are known."""
    known = np.array([one for one in errors if math.isfinite(one)])
    return math.sqrt(float(np.mean(np.square(known)))) if known.size else 0.0


def _listed(components: Sequence[Component]) -> str:
    names = [one.name for one in components]
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"Component {shown}" if len(names) == 1 else f"Components {shown}"
