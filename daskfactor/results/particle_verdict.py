"""What a summary of particles comes to, in sentences and as a table."""

from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

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
