"""What the spread of particles comes to: weighted means, what they are worth, whether one mode.

Particles have no chain that could converge.
"""

import math
from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.align import match, reference_from
from daskfactor.results.diagnose import all_series
from daskfactor.results.schema import STEIN
from daskfactor.results.series import TITLES, Series
from daskfactor.results.trace import (
    Run,
    Weights,
    each_draw,
    each_weighted_draw,
    effective_number,
)
from daskfactor.results.verdict import MIN_COSINE, SMALL_ERROR, Light

Array = NDArray[np.float64]

PARTICLE_TITLES: Final = TITLES | {
    "density": "log density, objective",
    "component": "components, as found",
}
POINT: Final = 0.9
"""Mass of one particle from which on the set is as good as a point estimate."""
FEW: Final = 5.0
"""Effective number of particles below which a spread is rough."""
ONE_MODE: Final = 0.95
"""Mass that has to be alike for all particles to be called one mode."""
MOSTLY: Final = 0.5
"""Share of a variance from which on it is mostly one particle's."""


def particle_series(
    run: Run, cells: int, seed: int
) -> tuple[list[Series], dict[str, Any], dict[str, Any]]:
    r"""Weighted mean and spread of what can be compared between particles; and their counts.

    .. math:: \bar x = \sum_m w_m x_m, \qquad s^2 = \sum_m w_m (x_m - \bar x)^2

    References
    ----------
    Masood and Doshi-Velez, sections 4 and 7.
    """
    weights = run.masses.values  # those that have none yet count alike
    series, _ = all_series(run.tree, cells, seed, weights)
    masses = weights[weights > 0]
    spreads = np.array([_spread(one.values, masses) for one in series])
    columns = dict(zip(("mean", "sd", "one_particle"), spreads.T, strict=True))
    columns["share"] = np.array([one.share for one in series])
    return series, columns, _particle_attrs(run, weights)


def particle_lights(
    columns: dict[str, Any], attrs: dict[str, Any]
) -> tuple[dict[str, Light], list[str]]:
    """Judge a set of particles; and say what else is to be known of it."""
    notes = []
    number, mass = attrs.get("above_threshold", 0), attrs.get("mass_above_threshold", 0.0)
    if number:
        notes.append(
            f"{number} of the particles, with {mass:.0%} of the mass, have an objective above the "
            "threshold: the model takes these for worse than good enough."
        )
    mostly = int(np.sum(columns["one_particle"] > MOSTLY))
    if mostly and attrs["effective"] >= FEW:
        notes.append(
            f"More than half of the variance of {mostly} of the {len(columns['mean'])} numbers is "
            "a single particle's."
        )
    if "discrepancy" in attrs:
        notes.append(
            "Discrepancies compare sets of equally many particles under one kernel; by themselves "
            "they say nothing."
        )
    lights = {
        "predictions": _of_weights(attrs),
        "observations": Light("none", ("New observations of particles are not judged.",)),
        "components": _of_modes(attrs),
        "log_density": Light("none", ("Particles have no chain that could settle.",)),
    }
    return lights, notes


def _mass_alike(run: Run, masses: Weights) -> float:
    """Mass of particles whose components that may move are all those of the heaviest one.

    (A mean of two modes may be near both.) NaN if there is nothing to put in order.
    """
    group, law = run.posterior, run.law
    if law.free.size < 2:
        return math.nan
    chain, draw = np.unravel_index(int(masses.argmax()), masses.shape)
    reference = reference_from(*next(each_draw(group.isel(chain=[chain], draw=[draw]))))
    alike = total = 0.0
    for (W, H), mass in each_weighted_draw(group, masses):
        total += mass
        if match(W, H, reference, law, MIN_COSINE).matched[law.free].all():
            alike += mass
    return alike / total


def _spread(values: Array, masses: Array) -> tuple[float, float, float]:
    """Weighted mean and sd, and the largest share of the variance that one particle makes."""
    mean = float(masses @ values)
    parts = masses * (values - mean) ** 2
    total = float(parts.sum())
    # What rounding alone has left over is no spread.
    none = not total > (1e-12 * float(np.abs(values).max(initial=0.0))) ** 2
    return mean, 0.0 if none else total**0.5, float("nan") if none else float(parts.max()) / total


def _particle_attrs(run: Run, weights: Weights) -> dict[str, Any]:
    """Counts, discrepancies, and how many objectives are above the threshold."""
    kept, masses = weights > 0, weights[weights > 0]
    heaviest = np.unravel_index(int(weights.argmax()), weights.shape)[1]
    attrs: dict[str, Any] = {
        "particles": int(kept.size),
        "with_weight": len(masses),
        "weighted": int(run.weights is not None),
        "effective": effective_number(masses),
        "heaviest": run.posterior["draw"].values[heaviest].item(),
        "largest_weight": float(masses.max()),
        "alike": _mass_alike(run, weights),
    }
    stein = run.group(STEIN).data_vars.items()
    attrs |= {str(name): float(one) for name, one in stein if one.ndim == 0}
    if "objective" not in run.stats:
        return attrs
    objective = run.stats["objective"].transpose("chain", "draw").values
    attrs |= {"objective_min": float(objective.min()), "objective_max": float(objective.max())}
    level = float(run.group("constant_data").get("threshold", math.nan))
    if np.isfinite(level):
        attrs["threshold"] = level
        attrs["above_threshold"] = int((objective > level).sum())
        attrs["mass_above_threshold"] = float(masses[objective[kept] > level].sum())
    return attrs


def _of_weights(attrs: dict[str, Any]) -> Light:
    count, effective = attrs["with_weight"], attrs["effective"]
    numbers = {"effective": float(effective), "largest_weight": float(attrs["largest_weight"])}
    numbers["error"] = 1.0 / math.sqrt(effective)
    if not attrs["weighted"]:
        said = f"{count} particles are there, not weighted yet: until all are, they count alike."
        return Light("red", (said,), "Go on until all are there: resume(...).", numbers)
    more = "Take more particles, from other starts: stein_posterior(..., particles=...)."
    if attrs["largest_weight"] >= POINT:
        said = (
            f"Particle {attrs['heaviest']} carries {attrs['largest_weight']:.0%} of the mass: "
            "little more than a point estimate, with spreads and intervals that are too narrow."
        )
        return Light("red", (said,), more, numbers)
    said = f"{count} particles carry weight, worth {effective:.1f} of equal weight"
    if effective < FEW:
        return Light("red", (f"{said}: spreads are rough and tails unknown.",), more, numbers)
    if numbers["error"] > SMALL_ERROR:
        return Light("amber", (f"{said}: means are good, spreads are rough.",), more, numbers)
    return Light("green", (f"{said}.",), "", numbers)


def _of_modes(attrs: dict[str, Any]) -> Light:
    alike = attrs["alike"]
    if not np.isfinite(alike) or attrs["with_weight"] < 2:
        said = "There is one particle, or one component, and nothing to compare."
        return Light("none", (said,))
    numbers = {"alike": float(alike)}
    if alike >= ONE_MODE:
        said = (
            f"One mode: once aligned, particles with {alike:.0%} of the mass have the same "
            "components, and their means may be read."
        )
        return Light("green", (said,), "", numbers)
    said = (
        "Several modes, or components too weak to tell apart: once aligned, particles with "
        f"{alike:.0%} of the mass have all components of the heaviest one."
    )
    advice = (
        "Read no means of W and H: look at particles one by one (component_variability, "
        "pairwise_distances)."
    )
    return Light("red", (said,), advice, numbers)


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
    rows = []
    for kind, part in summary.to_dataframe().groupby("kind", sort=False):
        # The number of a kind that is widest for its mean.
        widest = int((part["sd"] / part["mean"].abs().replace(0.0, 1.0)).to_numpy().argmax())
        mean, sd, one = part[["mean", "sd", "one_particle"]].to_numpy()[widest]
        told = f"{one:.0%}" if np.isfinite(one) else "-"
        name = f"{part.index[widest]}, {len(part)}"
        rows.append(f"{PARTICLE_TITLES[str(kind)]:24}{mean:11.4g}{sd:11.3g}{told:>14}   {name}")
    return [*lines, "", head, *rows]
