"""Summary of particles: weighted moments, effective number, and number of modes.

Particles are not a chain, so that convergence does not apply.
"""

import math
from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.align import match, reference_from
from daskfactor.results.diagnose import all_series
from daskfactor.results.series import TITLES, Series
from daskfactor.results.verdict import MIN_COSINE, SMALL_ERROR, Light, Status
from daskfactor.runs.schema import STEIN
from daskfactor.runs.trace import (
    Run,
    Weights,
    draw_at,
    each_draw,
    effective_number,
)

Array = NDArray[np.float64]

PARTICLE_TITLES: Final = TITLES | {
    "density": "log density, objective",
    "component": "components, as found",
}
POINT_ESTIMATE: Final = 0.9
"""Mass of one particle above which the set is hardly more than a point estimate."""
MIN_EFFECTIVE: Final = 5.0
"""Effective number of particles below which standard deviations are imprecise."""
ONE_MODE: Final = 0.95
"""Least mass of particles with the same components that counts as one mode."""
DOMINANT: Final = 0.5
"""Share of one particle in a variance above which this particle dominates it."""


def particle_series(
    run: Run, cells: int, seed: int
) -> tuple[list[Series], dict[str, Any], dict[str, Any]]:
    r"""Return series, weighted moments and attributes of particles.

    .. math:: \bar x = \sum_m w_m x_m, \qquad s^2 = \sum_m w_m (x_m - \bar x)^2

    References
    ----------
    Masood and Doshi-Velez, sections 4 and 7.
    """
    weights = run.masses.values  # equal until all are finished
    series, _ = all_series(run.tree, cells, seed, weights)
    masses = weights[weights > 0]
    spreads = np.array([_spread(one.values, masses) for one in series])
    columns = dict(zip(("mean", "sd", "one_particle"), spreads.T, strict=True))
    columns["share"] = np.array([one.share for one in series])
    return series, columns, _particle_attrs(run, weights)


def particle_lights(
    columns: dict[str, Any], attrs: dict[str, Any]
) -> tuple[dict[str, Light], list[str]]:
    """Return the lights of a set of particles, and further sentences."""
    notes = []
    number, mass = attrs.get("above_threshold", 0), attrs.get("mass_above_threshold", 0.0)
    if number:
        notes.append(
            f"{number} of the particles, with {mass:.0%} of the mass, have an objective above the "
            "threshold: the model does not count these as good factorizations."
        )
    mostly = int(np.sum(columns["one_particle"] > DOMINANT))
    if mostly and attrs["effective"] >= MIN_EFFECTIVE:
        notes.append(
            f"For {mostly} of the {len(columns['mean'])} quantities, one particle causes more than "
            "half of the variance."
        )
    if "discrepancy" in attrs:
        notes.append(
            "Stein discrepancies only compare sets of equally many particles with the same kernel; "
            "a single value has no meaning."
        )
    lights = {
        "predictions": _weights_light(attrs),
        "observations": Light("none", ("Not judged for particles.",)),
        "components": _modes_light(attrs),
        "log_density": Light("none", ("Does not apply: particles are not a chain.",)),
    }
    return lights, notes


def _mass_alike(run: Run, masses: Weights) -> float:
    """Return the mass of particles with the same components as the heaviest one.

    The mean is no reference, since that of two modes may be near both. Frozen components are
    ignored; NaN with fewer than two others.
    """
    group, symmetries = run.posterior, run.symmetries
    if symmetries.free.size < 2:
        return math.nan
    chain, draw = np.unravel_index(int(masses.argmax()), masses.shape)
    reference = reference_from(*draw_at(group, int(chain), int(draw)))
    alike = total = 0.0
    for W, H, mass in each_draw(group, masses):
        total += mass
        if match(W, H, reference, symmetries, MIN_COSINE).matched[symmetries.free].all():
            alike += mass
    return alike / total


def _spread(values: Array, masses: Array) -> tuple[float, float, float]:
    """Return weighted mean, sd, and the largest share of one particle in the variance."""
    mean = float(masses @ values)
    parts = masses * (values - mean) ** 2
    total = float(parts.sum())
    # Ignore a spread that is due to rounding.
    none = not total > (1e-12 * float(np.abs(values).max(initial=0.0))) ** 2
    return mean, 0.0 if none else total**0.5, float("nan") if none else float(parts.max()) / total


def facts_of_particles(run: Run) -> dict[str, Any]:
    """Return counts, weights, objectives and discrepancies of particles; None if unknown."""

    def scalar(group: str, name: str, reduced: str = "max") -> float | None:
        values = run.group(group).get(name)
        return float(getattr(values, reduced)()) if values is not None and values.size else None

    weights = run.weights
    return {
        "done": run.stats.sizes["draw"],
        "planned": run.attrs.get("particles"),
        "with_weight": None if weights is None else int((weights > 0).sum()),
        "effective": None if weights is None else effective_number(weights),
        "largest_weight": None if weights is None else float(weights.max()),
        "threshold": scalar("constant_data", "threshold"),
        "objective_min": scalar("sample_stats", "objective", "min"),
        "objective_max": scalar("sample_stats", "objective"),
        "discrepancy": scalar(STEIN, "discrepancy"),
        "discrepancy_equal": scalar(STEIN, "discrepancy_equal"),
    }


def _particle_attrs(run: Run, weights: Weights) -> dict[str, Any]:
    """Return the attributes of the summary of particles."""
    weighted, masses, facts = weights > 0, weights[weights > 0], facts_of_particles(run)
    heaviest = np.unravel_index(int(weights.argmax()), weights.shape)[1]
    attrs: dict[str, Any] = {
        "particles": int(weighted.size),
        "with_weight": len(masses),
        "weighted": int(run.weights is not None),
        "effective": effective_number(masses),
        "heaviest": run.posterior["draw"].values[heaviest].item(),
        "largest_weight": float(masses.max()),
        "alike": _mass_alike(run, weights),
    }
    names = ("discrepancy", "discrepancy_equal", "objective_min", "objective_max")
    attrs |= {name: facts[name] for name in names if facts[name] is not None}
    level = facts["threshold"]
    if "objective" in run.stats and level is not None and math.isfinite(level):
        above = run.stats["objective"].transpose("chain", "draw").values > level
        attrs["threshold"] = level
        attrs["above_threshold"] = int(above.sum())
        attrs["mass_above_threshold"] = float(masses[above[weighted]].sum())
    return attrs


def _weights_light(attrs: dict[str, Any]) -> Light:
    count, effective = attrs["with_weight"], attrs["effective"]
    numbers = {"effective": float(effective), "largest_weight": float(attrs["largest_weight"])}
    numbers["error"] = 1.0 / math.sqrt(effective)
    advice = "Use more particles with other starts: stein_posterior(..., particles=...)."
    status: Status = "red"
    reason = f"{count} particles have positive weight, with an effective number of {effective:.1f}"
    if not attrs["weighted"]:
        reason = f"{count} particles have no weights yet: weights need all particles."
        advice = "Compute the remaining particles: resume(...)."
    elif attrs["largest_weight"] >= POINT_ESTIMATE:
        reason = (
            f"Particle {attrs['heaviest']} has {attrs['largest_weight']:.0%} of the mass: the "
            "result is little more than a point estimate, and intervals are too narrow."
        )
    elif effective < MIN_EFFECTIVE:
        reason += ": standard deviations are imprecise, intervals unreliable."
    elif numbers["error"] > SMALL_ERROR:
        status, reason = "amber", f"{reason}: means are good, standard deviations imprecise."
    else:
        status, reason, advice = "green", f"{reason}.", ""
    return Light(status, (reason,), advice, numbers)


def _modes_light(attrs: dict[str, Any]) -> Light:
    alike = attrs["alike"]
    if not np.isfinite(alike) or attrs["with_weight"] < 2:
        reason = "There is only one particle or component, and so nothing to compare."
        return Light("none", (reason,))
    numbers = {"alike": float(alike)}
    if alike >= ONE_MODE:
        reason = (
            f"One mode: after alignment, particles with {alike:.0%} of the mass have the same "
            "components, and their means can be interpreted."
        )
        return Light("green", (reason,), "", numbers)
    reason = (
        "Several modes, or components too weak to distinguish: after alignment, particles with "
        f"{alike:.0%} of the mass have the same components as the heaviest one."
    )
    advice = (
        "Do not average W and H: examine single particles (component_variability, "
        "pairwise_distances)."
    )
    return Light("red", (reason,), advice, numbers)


def particle_lines(summary: xr.Dataset) -> list[str]:
    """Return the printed table of particles: counts, and the widest quantity of each kind."""
    attrs = summary.attrs
    effective = f"effective number {attrs['effective']:.1f}"
    weights = f", {attrs['with_weight']} with positive weight, {effective}"
    lines = [f"{attrs['particles']} particles" + (weights if attrs["weighted"] else "")]
    if "discrepancy" in attrs:
        equal = attrs["discrepancy_equal"]
        lines.append(
            f"Stein discrepancy {attrs['discrepancy']:.4g}, with equal weights {equal:.4g}"
        )
    if "objective_min" in attrs:
        limit = f", threshold {attrs['threshold']:.4g}" if "threshold" in attrs else ""
        lines.append(
            f"objective {attrs['objective_min']:.4g} to {attrs['objective_max']:.4g}{limit}"
        )
    head = f"{'':24}{'mean':>11}{'sd':>11}{'one particle':>14}   widest of"
    rows = []
    for kind, part in summary.to_dataframe().groupby("kind", sort=False):
        # The quantity with the largest sd relative to its mean.
        widest = int((part["sd"] / part["mean"].abs().replace(0.0, 1.0)).to_numpy().argmax())
        mean, sd, one = part[["mean", "sd", "one_particle"]].to_numpy()[widest]
        share = f"{one:.0%}" if np.isfinite(one) else "-"
        name = f"{part.index[widest]}, {len(part)}"
        rows.append(f"{PARTICLE_TITLES[str(kind)]:24}{mean:11.4g}{sd:11.3g}{share:>14}   {name}")
    return [*lines, "", head, *rows]
