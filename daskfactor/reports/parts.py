"""What stands in the parts of a report: sentences, tables and pictures, ready to be laid out."""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xarray as xr

from daskfactor.checks import require
from daskfactor.errors import OptionError
from daskfactor.evidence.base import Evidence
from daskfactor.plots import components as components_figure
from daskfactor.plots import draw, plot_ranks
from daskfactor.results.components import SURE, Components, Factor, format_label, format_quantity
from daskfactor.results.describe import description_lines
from daskfactor.results.series import TITLES
from daskfactor.results.summary import Summary, sections_of
from daskfactor.results.trace import Run
from daskfactor.results.verdict import LIGHTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN: Final = 8
"""Components of which there are pictures."""
LISTED: Final = 30
"""Components of which the largest entries are listed."""
ENTRIES: Final = 6
SIGNS: Final = {"green": "✓", "amber": "!", "red": "✕", "none": "–"}
WORDS: Final = {
    "green": "Rely on it",
    "amber": "With care",
    "red": "Do not rely on it",
    "none": "Cannot be told",
}
SEEN: Final = 0.05
"""Share of draws from which on a swap is worth a word."""
WIDE: Final = 1.0
"""Relative width of intervals from which on a component is known by its order of size only."""
CLEAR: Final = {"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"}
"""Pictures have the ground of the page."""
DPI: Final = 130
PIXELS: Final = 96
"""Of a page, in an inch."""


class Picture(NamedTuple):
    """A figure for both grounds, in PNG as base64, and what it shows in words."""

    alt: str
    width: int
    height: int
    light: str
    dark: str


def picture(alt: str, draw: Callable[[], "Figure"]) -> Picture:
    """Draw a figure twice, in matplotlib's own styles, whatever the user's is."""
    style = require("matplotlib.style", "plots", "figures")
    drawn = []
    for look in ("default", "dark_background"):
        with style.context([look, CLEAR]):
            figure: Any = draw()
            file = BytesIO()
            figure.savefig(file, format="png", dpi=DPI)
        drawn.append(base64.b64encode(file.getvalue()).decode())
    width, height = (round(PIXELS * inches) for inches in figure.get_size_inches())
    return Picture(alt, width, height, *drawn)


class Table(NamedTuple):
    """A table: what it is, names of its columns, and rows that begin with their names."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def lights(summary: Summary) -> list[dict[str, Any]]:
    """The lights, with signs and words beside their colors."""
    return [
        {
            "name": LIGHTS[name].capitalize(),
            "status": light.status,
            "sign": SIGNS[light.status],
            "word": WORDS[light.status],
            "reasons": light.reasons,
            "advice": light.advice,
        }
        for name, light in summary.lights.items()
    ]


def cautions(
    summary: Summary,
    about: Mapping[str, Any],
    found: Components,
    swaps: xr.Dataset | None,
    coverage: xr.Dataset | None,
) -> list[str]:
    """What to be careful about, in words."""
    told = []
    if about["diverging"]:
        told.append(
            f"{about['diverging']} steps diverged and were taken back; draws around them may miss "
            "a part of the posterior."
        )
    if found.chain is not None:
        told.append(
            "The run kept no draws, so that components of its chains cannot be put in one order: "
            f"those of chain {found.chain} are shown."
        )
    if swaps is not None:
        told += _told_swaps(swaps, found)
    if coverage is not None:
        told += _told_coverage(coverage)
    return [*told, *summary.notes]


def _told_swaps(swaps: xr.Dataset, found: Components) -> list[str]:
    titles = dict(zip(found.labels, found.titles, strict=True))
    told, lost = [], []
    for label, own, _, others in _matches(swaps, found):
        near = [f"{titles[k]} ({n:.0%} of draws)" for k, n in others.items() if n >= SEEN]
        if near:
            told.append(
                f"{titles[label].capitalize()} is at times nearer to {', '.join(near)}: see both."
            )
        if own["none"] >= SEEN:
            lost.append(f"{titles[label]} ({float(own['none']):.0%} of draws)")
    if lost:
        told.append(f"At times these are like no component of the mean: {', '.join(lost)}.")
    return told


def _matches(
    swaps: xr.Dataset, found: Components
) -> Iterator[tuple[Any, xr.Dataset, float, dict[Any, float]]]:
    """Yield each component, its numbers, and shares of draws as itself and as each other one."""
    for label in found.labels:
        own = swaps.sel(component=label)
        shares = own["matched"].sel(other=found.labels).values.tolist()
        others = dict(zip(found.labels, shares, strict=True))
        itself = others.pop(label)
        yield label, own, itself, others


def _told_coverage(coverage: xr.Dataset) -> list[str]:
    told = []
    for level in coverage["level"].values.tolist():
        one = coverage.sel(level=level)
        off = float(one["inside"]) - level
        if abs(off) > max(0.03, 3 * float(one["error"])):
            what = "wide" if off > 0 else "narrow"
            told.append(
                f"Intervals of {level:.0%} hold {float(one['inside']):.1%} of the values that were "
                f"held out: they are too {what}."
            )
    return told


def data(about: Mapping[str, Any], found: Components) -> list[tuple[str, str]]:
    """Size, what is missing, units and labels."""
    facts = dict(description_lines(about))
    rows, columns = about["data"]["shape"]
    missing = rows * columns - about["data"]["n_observed"]
    lines = [("size", facts["data"])]
    lines.append(("not observed", f"{missing:,} cells ({missing / (rows * columns):.1%})"))
    mean = about["data"].get("mean")
    told = found.quantity if mean is None else f"{found.quantity}, mean {mean:.4g}"
    lines.append(("values", told))
    for name, factor in (("rows", found.W), ("columns", found.H)):
        lines.append((f"{name}: {factor.dim}", _told_labels(factor)))
    return lines


def _told_labels(factor: Factor) -> str:
    """Coordinates along a dimension, each with its first and last label."""
    told = []
    for name, one in factor.labels.coords.items():
        first, last = (format_label(one.values[at]) for at in (0, -1))
        told.append(f"{format_quantity(one.attrs, str(name))}: {first} to {last}")
    return f"{factor.mean.shape[1]:,}; {'; '.join(told) or 'without labels'}"


def settings(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Model, sampler, draws, time and versions."""
    return [line for line in description_lines(about) if line[0] != "data"]


def spread(found: Components) -> str:
    """What bands and whiskers are."""
    return "" if found.W.variance is None else "Bands, whiskers and brackets are 90 % intervals."


def pictures(tree: xr.DataTree, found: Components, image_shape: Any) -> list[Picture]:
    """Figures of components; those that do not fit are left out."""
    count = min(SHOWN, len(found.labels))
    what = f"{found.W.dim} (left) and {found.H.dim} (right)"
    whole = f"The {count} components that carry most of the data, by {what}, with 90 % intervals."
    made = [picture(whole, partial(components_figure, tree, image_shape, count))]
    told = {
        "shares": "How much of the data each component carries, and the share of the draws in "
        "which it is found.",
        "maps": "Maps of components, each with its standard deviation below.",
    }
    for name, alt in told.items():
        options = {"image_shape": image_shape} if name == "maps" else {}
        try:
            made.append(picture(alt, partial(draw, tree, name, **options)))
        except OptionError:
            continue
    return made


def components(found: Components) -> list[dict[str, Any]]:
    """The largest entries of every component, as tables."""
    return [_component(found, k) for k in range(min(LISTED, len(found.labels)))]


def _component(found: Components, k: int) -> dict[str, Any]:
    told = f"{found.weight[k]:.1%} of the data"
    if found.present is not None:
        told += f"; found in {found.present[k]:.0%} of the draws"
    if found.present_by_chain is not None and len(found.present_by_chain) > 1:
        each = ", ".join(f"{share:.0%}" for share in found.present_by_chain[:, k])
        told += f" (by chain: {each})" if found.present[k] < SURE else ""  # type: ignore[index]
    sides = [_entries(found.W, k, "relative"), _entries(found.H, k, found.quantity)]
    return {"title": found.titles[k].capitalize(), "told": told, "sides": sides}


def _entries(factor: Factor, k: int, unit: str) -> Table:
    best = factor.largest(k, ENTRIES)
    mean, ends = factor.mean[k][best], factor.interval(k, best)
    names = factor.names
    rows = [[names[at], f"{value:.3g}"] for at, value in zip(best, mean, strict=True)]
    if ends is None:
        return Table(f"{factor.dim}, {unit}", [factor.dim, "mean"], rows)
    for row, low, high in zip(rows, *ends, strict=True):
        row.append(f"{low:.3g} to {high:.3g}")
    return Table(f"{factor.dim}, {unit}", [factor.dim, "mean", "90 % interval"], rows)


def swaps(found: Components, table: xr.Dataset) -> Table:
    """A line for each component."""
    titles = dict(zip(found.labels, found.titles, strict=True))
    rows = []
    for label, own, itself, others in _matches(table, found):
        shown = "–"
        if any(others.values()):
            most = max(others, key=lambda other: others[other])
            shown = f"{sum(others.values()):.1%}, most often {titles[most]}"
        widths = (float(own[name]) for name in ("width_w", "width_h"))
        told = [f"{width:.0%}" if np.isfinite(width) else "–" for width in widths]
        shares = [f"{itself:.1%}", shown, f"{float(own['none']):.1%}"]
        rows.append([titles[label], *shares, *told, _reading(itself, own)])
    head = ["component", "itself", "another", "none", "width of W", "width of H", "reading"]
    return Table("Share of the draws in which each component is", head, rows)


def _reading(itself: float, own: xr.Dataset) -> str:
    """What the numbers of a component say."""
    if itself < SURE:
        return "not told apart" if itself < 0.5 else "swaps"
    widths = float(own["width_w"]), float(own["width_h"])
    return "told apart, but wide" if np.nanmax([*widths, 0.0]) > WIDE else "told apart"


def convergence(summary: Summary) -> Table | None:
    """The worst of each kind of number, as `summarize` prints them."""
    if "rhat" not in summary:
        return None
    rows = []
    for part in sections_of(summary).to_dict(orient="records"):
        numbers = [f"{part['rhat']:.3f}", f"{part['ess_bulk']:.0f}", f"{part['ess_tail']:.0f}"]
        told = [number.replace("nan", "–") for number in numbers]
        rows.append([TITLES[part["kind"]], *told, f"{part['total']}"])
    size = f"{summary.attrs['chains']} chains of {summary.attrs['draws']} draws"
    return Table(
        f"{size}; the worst of each kind of number",
        ["kind", "R-hat", "ESS bulk", "ESS tail", "numbers"],
        rows,
    )


def traces(tree: xr.DataTree) -> list[Picture]:
    """The log density over the run; of particles their weights and distances, too."""
    told = {
        "trace": "Log density of each chain over its cycles; on the right of the draws alone, "
        "without what sizes of W and H add to it, which is what the verdict goes by."
    }
    if Run(tree).is_particles:
        told = {
            "trace": "Objective or log density of each particle; the area of a dot is its weight.",
            "weights": "Mass of each particle, the largest first, above how well it fits.",
            "diversity": "Distances between particles in degrees, those that are alike together.",
        }
    return [picture(alt, partial(draw, tree, name)) for name, alt in told.items()]


def calibration(coverage: xr.Dataset, found: Components) -> dict[str, Any]:
    """How often intervals held what was left out."""
    told = (
        f"{int(coverage['cells']):,} cells were left out of the fit and predicted. The root mean "
        f"square error of the posterior mean is {float(coverage['rmse']):.4g}, the mean absolute "
        f"error {float(coverage['mae']):.4g} ({found.quantity})."
    )
    rows = [
        [f"{level:.0%}", f"{float(inside):.1%}", f"± {2 * float(error):.1%}"]
        for level, inside, error in coverage[["inside", "error"]].to_dataframe().itertuples()
    ]
    what = "a new observation" if coverage.attrs["of"] == "observation" else "the mean"
    caption = f"Share of these cells inside their interval of {what}"
    return {
        "told": told,
        "table": Table(caption, ["interval", "holds", "two standard errors"], rows),
    }


def evidence(given: Any) -> dict[str, Any]:
    """Ranks and their evidence, or the evidence of this model."""
    if isinstance(given, Evidence):
        what = "is at least" if given.bound else "is"
        said = f"The log evidence {what} {given.value:.6g} ± {given.total_error:.2g} nats."
        return {"told": [said], "table": None, "picture": None}
    if not isinstance(given, xr.Dataset) or "log_evidence" not in given:
        raise OptionError(
            "evidence must be what select_rank() or log_evidence() returned, got "
            f"{type(given).__name__}"
        )
    names = {
        "log_evidence": "log evidence",
        "standard_error": "standard error",
        "discretization_error": "of temperatures",
        "held_out_log_score": "held-out log score",
    }
    shown = [name for name in names if name in given]
    rows = [
        [str(n), *(f"{float(given[name].sel(rank=n)):.5g}".replace("nan", "–") for name in shown)]
        for n in given["rank"].values.tolist()
    ]
    table = Table("Ranks that were tried", ["rank", *(names[name] for name in shown)], rows)
    alt = "Log evidence over the number of components, with two standard errors."
    return {
        "told": list(_told_ranks(given.attrs)),
        "table": table,
        "picture": picture(alt, partial(plot_ranks, given)),
    }


def _told_ranks(attrs: Mapping[str, Any]) -> Iterable[str]:
    if np.size(attrs.get("evidence_at", attrs["best"])):
        yield f"The evidence is largest for {attrs['best']} components."
    others = np.atleast_1d(attrs.get("not_distinguishable", [])).tolist()  # files keep an array
    if others:
        yield f"Within its errors these are as good: {', '.join(map(str, others))}."
    if "best_held_out" in attrs:
        yield f"Cells that were left out are predicted best by {attrs['best_held_out']} components."
    if attrs.get("at_edge"):
        yield f"The best is at the {attrs['at_edge']} rank tried: try ranks beyond it."
