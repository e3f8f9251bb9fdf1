"""What the diagnostics of a run come to, in sentences: what has converged, what to do."""

import math
from typing import Final, Literal, NamedTuple

import numpy as np
import xarray as xr

from daskfactor.results.convergence import LEAST_DRAWS

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
