"""What the diagnostics of a run come to, in sentences: what has converged, what to do."""

import math
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.diagnose import LEAST_DRAWS

GOOD_RHAT: Final = 1.01
BAD_RHAT: Final = 1.05
ESS_PER_CHAIN: Final = 100
"""Of Vehtari et al. 2021, sections 4 and 5: 50 for each half of a chain."""
RARE: Final = 0.5
"""Share of a chain's draws below which a component is not one of the whole posterior."""

State = Literal["good", "few", "apart"]


class Section(NamedTuple):
    """The worst values of one kind of functional.

    Attributes
    ----------
    total, unknown
        How many there are, and of how many nothing can be said.
    rhat, ess_bulk, ess_tail
        Largest R-hat, smallest effective sizes; NaN if nothing can be said of any.
    worst, slowest
        Names of the one with the largest R-hat, and of the one with the smallest size.
    apart
        Number of those with an R-hat above the bad one.
    rare
        Number of components that appear in fewer than half of the draws of some chain.
    """

    kind: str
    total: int
    unknown: int
    rhat: float
    ess_bulk: float
    ess_tail: float
    worst: str
    slowest: str
    apart: int
    rare: int

    @property
    def ess(self) -> float:
        return min(self.ess_bulk, self.ess_tail)

    def state(self, chains: int) -> State:
        """Converged; the draws agree but are few; or they do not agree."""
        if self.rhat > BAD_RHAT:
            return "apart"
        if self.rhat <= GOOD_RHAT and self.ess >= ESS_PER_CHAIN * chains:
            return "good"
        return "few"


class Seen(NamedTuple):
    """What a verdict takes into account besides R-hat and effective sizes.

    Attributes
    ----------
    drift
        Rise of the log density from the first to the second half of the draws, in sd.
    moved
        Whether components change places between draws.
    biased
        Whether the sampler has a step whose bias no such diagnostic sees.
    """

    drift: float
    moved: bool
    biased: bool


def sections_of(summary: xr.Dataset) -> list[Section]:
    """The worst of each kind of functional, in the order in which the kinds come."""
    kinds = summary["kind"].values
    return [_section(summary, str(kind), kinds == kind) for kind in dict.fromkeys(kinds.tolist())]


def _section(summary: xr.Dataset, kind: str, mask: np.ndarray) -> Section:
    names = summary["functional"].values[mask]
    rhat, bulk, tail, share = (
        summary[name].values[mask] for name in ("rhat", "ess_bulk", "ess_tail", "least_share")
    )
    known = np.isfinite(bulk)
    rare = int(np.sum(share < RARE))
    if not known.any():
        nothing = (math.nan, math.nan, math.nan, "-", "-", 0, rare)
        return Section(kind, len(names), len(names), *nothing)
    names, rhat, bulk, tail = names[known], rhat[known], bulk[known], tail[known]
    slowest = int(np.argmin(np.minimum(bulk, tail)))
    return Section(
        kind,
        len(share),
        len(share) - len(names),
        float(rhat.max()),
        float(bulk.min()),
        float(tail.min()),
        str(names[rhat.argmax()]),
        str(names[slowest]),
        int(np.sum(rhat > BAD_RHAT)),
        rare,
    )


def verdict_of(sections: list[Section], chains: int, draws: int, seen: Seen) -> list[str]:
    """Sentences, the most important first.

    Parameters
    ----------
    sections
        Of `sections_of`.
    chains, draws
        How many there are.
    seen
        What the sections do not tell.
    """
    of = {section.kind: section for section in sections if section.total > section.unknown}
    if not of:
        return [
            (
                f"Nothing can be said yet of {draws} draws: at least {LEAST_DRAWS} that are finite "
                "and differ are needed, and hundreds are wanted; go on with resume()."
            )
        ]
    said = [_of_product(of, chains, seen.drift)]
    if "product" not in of:
        said.append("The run kept no draws: of W H and of components nothing can be said.")
    said += _of_components(of, seen)
    said += _of_scale(of, chains)
    if chains == 1:
        said.append("One chain cannot show that another would end elsewhere: chains=4 can.")
    if seen.biased:
        said.append(
            "The bias of a finite step is not seen here: compare with half the step, or PSGRRLD."
        )
    return said


def _of_product(of: dict[str, Section], chains: int, drift: float) -> str:
    """On the log density and WH together: they are what predictions rest on."""
    both = [of[kind] for kind in ("density", "product") if kind in of]
    states = [section.state(chains) for section in both]
    worst = max(both, key=lambda section: section.rhat)
    slowest = min(both, key=lambda section: section.ess)
    names = {"density": "log density", "product": "W H"}
    what = " and ".join(names[section.kind] for section in both)
    if "apart" in states:
        return f"NOT CONVERGED: {worst.worst} has R-hat {worst.rhat:.3f}. " + (
            "The log density still rises: tune longer."
            if drift > 0.5
            else f"{'Halves of the chain' if chains == 1 else 'Chains'} disagree on it: tune "
            "longer and draw more."
        )
    if "few" in states:
        wanted = ESS_PER_CHAIN * chains
        if slowest.ess >= wanted:
            return (
                f"TOO FEW DRAWS to be sure: no disagreement is plain in {what}, but {worst.worst} "
                f"has R-hat {worst.rhat:.3f}: about twice as many draws would do."
            )
        times = max(2, math.ceil(wanted / max(slowest.ess, 1.0)))
        return (
            f"TOO FEW DRAWS to be sure: no disagreement is plain in {what} (R-hat at most "
            f"{worst.rhat:.3f}), but the draws of {slowest.slowest} are worth {slowest.ess:.0f} "
            f"independent ones of {wanted} wanted: about {times} times as many draws would do."
        )
    return (
        f"CONVERGED: {what} have R-hat at most {worst.rhat:.3f}, and their draws are worth "
        f"{slowest.ess:.0f} independent ones or more."
    )


def _of_components(of: dict[str, Section], seen: Seen) -> list[str]:
    aligned = of.get("aligned")
    if aligned is None:
        return []
    said = []
    if seen.moved:
        said.append(
            "Components change places between draws or chains: read W and H through align() only."
        )
    if aligned.rare:
        said.append(
            f"{aligned.rare} of {aligned.total} components appear in fewer than half of the "
            "draws of some chain: chains found different ones, or they are too weak to tell "
            "apart. Do not "
            "interpret these; W H may be trusted as far as it has converged."
        )
    elif aligned.apart:
        said.append(
            f"All {aligned.total} components appear in most draws, but the sizes of {aligned.apart}"
            f" have not settled (R-hat up to {aligned.rhat:.3f}, {aligned.worst}): draw more "
            "before their sizes are compared."
        )
    else:
        said.append(f"All {aligned.total} components appear in most draws, once aligned.")
    return said


def _of_scale(of: dict[str, Section], chains: int) -> list[str]:
    scale = of.get("scale")
    if scale is None or scale.state(chains) != "apart":
        return []
    return [
        (
            f"The sizes of W and of H have not settled (R-hat {scale.rhat:.3f}): only the priors "
            "hold them, and W H does not depend on them."
        )
    ]


POINT: Final = 0.9
"""Mass of one particle from which on the set is as good as a point estimate."""
FEW: Final = 5.0
"""Effective number of particles below which a spread is rough."""
ONE_MODE: Final = 0.95
"""Mass that has to be alike for all particles to be called one mode."""
MOSTLY: Final = 0.5
"""Share of a variance from which on it is mostly one particle's."""

TITLES: Final = {
    "density": "log density, objective",
    "product": "W H",
    "scale": "size of W and of H",
    "component": "components, as found",
    "aligned": "components, aligned",
}


def particle_verdict(summary: xr.Dataset) -> list[str]:
    """Sentences, the most important first."""
    said = [_of_weights(summary.attrs), *_of_objective(summary.attrs)]
    if np.isfinite(summary.attrs["alike"]) and summary.attrs["with_weight"] > 1:
        said.append(_of_modes(summary.attrs["alike"]))
    one = summary["one_particle"].values
    mostly = int(np.sum(one > MOSTLY))
    if mostly and summary.attrs["effective"] >= FEW:
        said.append(
            f"More than half of the variance of {mostly} of the {len(one)} numbers is a single "
            "particle's."
        )
    if "discrepancy" in summary.attrs:
        said.append(
            "Discrepancies compare sets of equally many particles under one kernel; by themselves "
            "they say nothing."
        )
    return said


def _of_weights(attrs: dict[str, Any]) -> str:
    count, effective = attrs["with_weight"], attrs["effective"]
    if not attrs["weighted"]:
        return (
            f"NOT WEIGHTED YET: {count} particles are there, and before all of them are they "
            "count alike."
        )
    if attrs["largest_weight"] >= POINT:
        return (
            f"ONE PARTICLE: number {attrs['heaviest']} carries {attrs['largest_weight']:.0%} of "
            "the mass, so this is little more than a point estimate; take spreads and intervals "
            "as too narrow, and try more particles or other starts."
        )
    if effective < FEW:
        return (
            f"FEW PARTICLES: {count} carry weight, worth {effective:.1f} of equal weight: spreads "
            "are rough and tails unknown; more particles may help."
        )
    return f"{count} particles carry weight, worth {effective:.1f} of equal weight."


def _of_objective(attrs: dict[str, Any]) -> list[str]:
    """What the objective says, if some of it is above the threshold."""
    number, mass = attrs.get("above_threshold", 0), attrs.get("mass_above_threshold", 0.0)
    if not number:
        return []
    return [
        (
            f"{number} of the particles, with {mass:.0%} of the mass, have an objective above the "
            "threshold: the model takes these for worse than good enough."
        )
    ]


def _of_modes(alike: float) -> str:
    if alike >= ONE_MODE:
        return (
            f"One mode: once aligned, particles with {alike:.0%} of the mass have the same "
            "components, and their means may be read."
        )
    return (
        "Several modes, or components too weak to tell apart: once aligned, particles with "
        f"{alike:.0%} of the mass have all components of the heaviest one. Do not read "
        "means of W and H; W H may be averaged, and particles looked at one by one."
    )


def particle_lines(summary: xr.Dataset) -> list[str]:
    """The print of a summary of particles: counts, and the widest of each kind of number."""
    attrs = summary.attrs
    worth = f", {attrs['with_weight']} with weight, worth {attrs['effective']:.1f} of equal weight"
    lines = [f"{attrs['particles']} particles" + (worth if attrs["weighted"] else "")]
    if "discrepancy" in attrs:
        equal = attrs["discrepancy_equal"]
        lines.append(
            f"Stein discrepancy {attrs['discrepancy']:.4g}, under equal weights {equal:.4g}"
        )
    if "objective_min" in attrs:
        limit = f", threshold {attrs['threshold']:.4g}" if "threshold" in attrs else ""
        lines.append(
            f"objective {attrs['objective_min']:.4g} to {attrs['objective_max']:.4g}{limit}"
        )
    head = f"{'':24}{'mean':>11}{'sd':>11}{'one particle':>14}   widest of"
    kinds = summary["kind"].values
    rows = [_row(summary, kind, kinds == kind) for kind in dict.fromkeys(kinds.tolist())]
    return [*lines, "", head, *rows]


def _row(summary: xr.Dataset, kind: str, mask: NDArray[np.bool_]) -> str:
    """The number of a kind that is widest for its mean."""
    mean, sd, one = (summary[name].values[mask] for name in ("mean", "sd", "one_particle"))
    relative = sd / np.where(mean == 0, 1.0, np.abs(mean))
    at = int(relative.argmax())
    part = f"{one[at]:.0%}" if np.isfinite(one[at]) else "-"
    name = summary["functional"].values[mask][at]
    return f"{TITLES[kind]:24}{mean[at]:11.4g}{sd[at]:11.3g}{part:>14}   {name}, {int(mask.sum())}"
