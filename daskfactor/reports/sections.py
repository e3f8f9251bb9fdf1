"""Sections of a report, by a table: each is a list of parts, which macros of the template draw."""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
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

MAX_DRAWN: Final = 8
"""Largest number of components that are drawn."""
MAX_LISTED: Final = 30
"""Largest number of components whose largest entries are listed."""
ENTRIES: Final = 6
"""Number of entries in these lists."""
WORDS: Final = {
    "green": ("✓", "Reliable"),
    "amber": ("!", "Use with care"),
    "red": ("✕", "Not reliable"),
    "none": ("–", "Unknown"),
}
"""Sign and text of each light."""
RANK_COLUMNS: Final = {
    "log_evidence": "log evidence",
    "standard_error": "standard error",
    "discretization_error": "discretization error",
    "held_out_log_score": "held-out log score",
}
"""Titles of the columns of the table of ranks."""
MIN_SWAPS: Final = 0.05
"""Smallest share of draws with a swap that is reported."""
MAX_WIDTH: Final = 1.0
"""Largest relative width of the intervals of a component that is not reported as wide."""
TRANSPARENT: Final = dict.fromkeys(
    ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"
)
"""Settings of matplotlib for images with the background of the page."""
DPI: Final = 130
"""Resolution of images, in pixels per inch."""
PIXELS: Final = 96
"""Resolution of the page, in pixels per inch."""


class Picture(NamedTuple):
    """Figure for light and dark pages, as base64 of PNG, with its size and a description."""

    alt: str
    width: int
    height: int
    light: str
    dark: str


def picture(alt: str, draw: Callable[[], "Figure"]) -> Picture:
    """Return a figure in the light and the dark default style of matplotlib."""
    style = require("matplotlib.style", "plots", "figures")
    images = []
    for look in ("default", "dark_background"):
        with style.context([look, TRANSPARENT]):
            figure: Any = draw()
            file = BytesIO()
            figure.savefig(file, format="png", dpi=DPI)
        images.append(base64.b64encode(file.getvalue()).decode())
    width, height = (round(PIXELS * inches) for inches in figure.get_size_inches())
    return Picture(alt, width, height, *images)


class Content(NamedTuple):
    """Run of a report: its tree, description and summary, and results to include."""

    tree: xr.DataTree
    about: Mapping[str, Any]
    summary: Summary
    components: Components
    swaps: xr.Dataset | None
    coverage: xr.Dataset | None
    evidence: Any
    image_shape: tuple[int, int] | None


Parts = list[tuple[str, Any]]
"""Parts of a section: the name of a macro of the template, and the value that it draws."""


class Table(NamedTuple):
    """Table with a caption, names of columns, and rows that start with their names."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def verdict(run: Content) -> Parts:
    """Return the lights of the verdict, with signs and words."""
    lights = [
        (LIGHTS[name].capitalize(), *WORDS[light.status], light)
        for name, light in run.summary.lights.items()
    ]
    return [("lights", lights)]


def cautions(run: Content) -> Parts:
    """Return sentences about results that need care."""
    lines = []
    if run.about["diverging"]:
        lines.append(
            f"{run.about['diverging']} steps diverged and were rejected; draws around them may "
            "miss a part of the posterior."
        )
    if run.components.chain is not None:
        lines.append(
            "The run has no draws, so that the components of its chains cannot be aligned: those "
            f"of chain {run.components.chain} are shown."
        )
    if run.swaps is not None:
        lines += _swap_cautions(run.swaps, run.components)
    if run.coverage is not None:
        lines += _coverage_cautions(run.coverage)
    if lines := [*lines, *run.summary.notes]:
        return [("lines", lines)]
    sound = all(one.status in ("green", "none") for one in run.summary.lights.values())
    return [("text", "None." if sound else "None, except those in the verdict above.")]


def _swap_cautions(swaps: xr.Dataset, content: Components) -> list[str]:
    """Return sentences about components that swap."""
    titles = dict(zip(content.labels, content.titles, strict=True))
    cautions, unmatched = [], []
    for label, row, _, others in _matches(swaps, content):
        near = [f"{titles[k]} ({n:.0%} of draws)" for k, n in others.items() if n >= MIN_SWAPS]
        if near:
            cautions.append(
                f"{titles[label].capitalize()} is sometimes closer to {', '.join(near)}: interpret "
                "them together."
            )
        if row["none"] >= MIN_SWAPS:
            unmatched.append(f"{titles[label]} ({float(row['none']):.0%} of draws)")
    if unmatched:
        cautions.append(f"Sometimes similar to no mean component: {', '.join(unmatched)}.")
    return cautions


def _matches(
    swaps: xr.Dataset, content: Components
) -> Iterator[tuple[Any, xr.Dataset, float, dict[Any, float]]]:
    """Yield each component, its row, and its shares of draws as itself and as each other one."""
    for label in content.labels:
        row = swaps.sel(component=label)
        shares = row["matched"].sel(other=content.labels).values.tolist()
        others = dict(zip(content.labels, shares, strict=True))
        itself = others.pop(label)
        yield label, row, itself, others


def _coverage_cautions(coverage: xr.Dataset) -> list[str]:
    """Return sentences about intervals with a wrong coverage."""
    cautions = []
    for level in coverage["level"].values.tolist():
        one = coverage.sel(level=level)
        off = float(one["inside"]) - level
        if abs(off) > max(0.03, 3 * float(one["error"])):
            width = "wide" if off > 0 else "narrow"
            cautions.append(
                f"The {level:.0%} intervals contain {float(one['inside']):.1%} of the held-out "
                f"values: they are too {width}."
            )
    return cautions


def data(run: Content) -> Parts:
    """Return size, missing cells, units and labels of the data."""
    content, about = run.components, run.about["data"]
    rows, columns = about["shape"]
    missing = rows * columns - about["n_observed"]
    mean = "" if about.get("mean") is None else f", mean {about['mean']:.4g}"
    lines = [
        ("size", dict(description_lines(run.about))["data"]),
        ("not observed", f"{missing:,} cells ({missing / (rows * columns):.1%})"),
        ("values", content.quantity + mean),
        (f"rows: {content.W.dim}", _label_ranges(content.W)),
        (f"columns: {content.H.dim}", _label_ranges(content.H)),
    ]
    return [("facts", lines)]


def _label_ranges(factor: Factor) -> str:
    """Return the size and the coordinates of a dimension, each with its first and last label."""
    ranges = []
    for name, one in factor.labels.coords.items():
        first, last = (format_label(one.values[at]) for at in (0, -1))
        ranges.append(f"{format_quantity(one.attrs, str(name))}: {first} to {last}")
    return f"{factor.mean.shape[1]:,}; {'; '.join(ranges) or 'no labels'}"


def settings(run: Content) -> Parts:
    """Return model, sampler, draws, time and versions."""
    return [("facts", [line for line in description_lines(run.about) if line[0] != "data"])]


def components(run: Content) -> Parts:
    """Return figures of the components, without those that do not apply, and largest entries."""
    content, tree = run.components, run.tree
    intervals = (
        "" if content.W.variance is None else "Bands, whiskers and ranges are 90 % intervals."
    )
    size = "mean" if content.W.nonnegative else "size (root mean square)"
    count = min(MAX_DRAWN, len(content.labels))
    caption = (
        f"The {count} components with the largest shares of the data, by {content.W.dim} (left) "
        f"and {content.H.dim} (right), with 90 % intervals."
    )
    first = picture(caption, partial(components_figure, tree, run.image_shape, count))
    parts: Parts = [("about_components", (size, intervals)), ("figure", first)]
    captions = {
        "shares": "Share of the data of each component, and share of the draws that contain it.",
        "maps": "Maps of components, each with its standard deviation below.",
    }
    for name, alt in captions.items():
        options = {"image_shape": run.image_shape} if name == "maps" else {}
        with suppress(OptionError):
            parts.append(("figure", picture(alt, partial(draw, tree, name, **options))))
    listed = range(min(MAX_LISTED, len(content.labels)))
    return [*parts, ("entries", [_component(content, k) for k in listed])]


def _component(content: Components, k: int) -> dict[str, Any]:
    """Return title, shares and tables of a component."""
    text = f"{content.weight[k]:.1%} of the data"
    if content.present is not None:
        text += f"; in {content.present[k]:.0%} of the draws"
    if content.present_by_chain is not None and len(content.present_by_chain) > 1:
        chains = ", ".join(f"{share:.0%}" for share in content.present_by_chain[:, k])
        text += f" (by chain: {chains})" if content.present[k] < SURE else ""  # type: ignore[index]
    tables = [_entries(content.W, k, "relative"), _entries(content.H, k, content.quantity)]
    return {"title": content.titles[k].capitalize(), "text": text, "tables": tables}


def _entries(factor: Factor, k: int, unit: str) -> Table:
    """Return a table of the largest entries of a component."""
    best = factor.largest(k, ENTRIES)
    mean, ends = factor.mean[k][best], factor.interval(k, best)
    names = factor.names
    rows = [[names[at], f"{value:.3g}"] for at, value in zip(best, mean, strict=True)]
    if ends is None:
        return Table(f"{factor.dim}, {unit}", [factor.dim, "mean"], rows)
    for row, low, high in zip(rows, *ends, strict=True):
        row.append(f"{low:.3g} to {high:.3g}")
    return Table(f"{factor.dim}, {unit}", [factor.dim, "mean", "90 % interval"], rows)


def identifiability(run: Content) -> Parts:
    """Return a table of the swaps of each component."""
    if run.swaps is None:
        text = "The run has only means and variances. Finding components that swap needs draws: "
        return [("text", f'{text}run again with keep="draws".')]
    titles = dict(zip(run.components.labels, run.components.titles, strict=True))
    rows = []
    for label, row, itself, others in _matches(run.swaps, run.components):
        another = "–"
        if any(others.values()):
            most = max(others, key=lambda other: others[other])
            another = f"{sum(others.values()):.1%}, most often {titles[most]}"
        numbers = (float(row[name]) for name in ("width_w", "width_h"))
        widths = [f"{width:.0%}" if np.isfinite(width) else "–" for width in numbers]
        shares = [f"{itself:.1%}", another, f"{float(row['none']):.1%}"]
        rows.append([titles[label], *shares, *widths, _interpretation(itself, row)])
    head = ["component", "itself", "another", "none", "width of W", "width of H", "interpretation"]
    table = Table("Share of the draws in which each component matches", head, rows)
    return [("about_swaps", None), ("table", table)]


def _interpretation(itself: float, row: xr.Dataset) -> str:
    """Return the interpretation of the shares and widths of a component."""
    if itself < SURE:
        return "not identified" if itself < 0.5 else "swaps"
    widths = float(row["width_w"]), float(row["width_h"])
    return "identified, but wide" if np.nanmax([*widths, 0.0]) > MAX_WIDTH else "identified"


def convergence(run: Content) -> Parts:
    """Return the worst values of each kind of quantity, as `summarize` prints them, and figures."""
    parts: Parts = [] if "rhat" not in run.summary else [("table", _worst_values(run.summary))]
    captions = {
        "trace": "Log density of each chain over its cycles. Right: draws only, without the effect "
        "of the relative scales of W and H; the verdict is based on this series."
    }
    if Run(run.tree).is_particles:
        captions = {
            "trace": "Objective or log density of each particle; the area of a dot is its weight.",
            "weights": "Mass of each particle, the largest first, and its fit below.",
            "diversity": "Distances between particles in degrees, with similar particles together.",
        }
    figures = (picture(alt, partial(draw, run.tree, name)) for name, alt in captions.items())
    return parts + [("figure", one) for one in figures]


def _worst_values(summary: Summary) -> Table:
    """Return the worst values of each kind of quantity."""
    rows = []
    for part in sections_of(summary).to_dict(orient="records"):
        numbers = [f"{part['rhat']:.3f}", f"{part['ess_bulk']:.0f}", f"{part['ess_tail']:.0f}"]
        cells = [number.replace("nan", "–") for number in numbers]
        rows.append([TITLES[part["kind"]], *cells, f"{part['total']}"])
    size = f"{summary.attrs['chains']} chains of {summary.attrs['draws']} draws"
    head = ["kind", "R-hat", "ESS bulk", "ESS tail", "quantities"]
    return Table(f"{size}; worst value of each kind of quantity", head, rows)


def predictions(run: Content) -> Parts:
    """Return errors and the coverage of intervals for held-out cells."""
    coverage = run.coverage
    if coverage is None:
        return []
    text = (
        f"{int(coverage['cells']):,} cells were held out of the fit and predicted. The root mean "
        f"square error of the posterior mean is {float(coverage['rmse']):.4g}, the mean absolute "
        f"error {float(coverage['mae']):.4g} ({run.components.quantity})."
    )
    rows = [
        [f"{level:.0%}", f"{float(inside):.1%}", f"± {2 * float(error):.1%}"]
        for level, inside, error in coverage[["inside", "error"]].to_dataframe().itertuples()
    ]
    target = "a new observation" if coverage.attrs["of"] == "observation" else "the mean"
    caption = f"Share of these cells inside the interval of {target}"
    table = Table(caption, ["interval", "coverage", "two standard errors"], rows)
    return [("text", text), ("table", table)]


def rank(run: Content) -> Parts:
    """Return the evidence of ranks, or of this model."""
    result = run.evidence
    if result is None:
        return []
    if isinstance(result, Evidence):
        relation = "is at least" if result.bound else "is"
        text = f"The log evidence {relation} {result.value:.6g} ± {result.total_error:.2g} nats."
        return [("text", text)]
    if not isinstance(result, xr.Dataset) or "log_evidence" not in result:
        raise OptionError(
            "evidence must be a result of select_rank() or log_evidence(), got "
            f"{type(result).__name__}"
        )
    columns = {name: title for name, title in RANK_COLUMNS.items() if name in result}
    table = result[[*columns]].to_dataframe()
    rows = [
        [f"{one.Index}", *(f"{value:.5g}".replace("nan", "–") for value in one[1:])]
        for one in table.itertuples()
    ]
    alt = "Log evidence over the number of components, with two standard errors."
    return [
        *(("text", line) for line in _rank_lines(result.attrs)),
        ("table", Table("Compared ranks", ["rank", *columns.values()], rows)),
        ("figure", picture(alt, partial(plot_ranks, result))),
    ]


def _rank_lines(attrs: Mapping[str, Any]) -> Iterable[str]:
    """Yield sentences about the best rank."""
    if np.size(attrs.get("evidence_at", attrs["best"])):
        yield f"The evidence is largest for {attrs['best']} components."
    others = np.atleast_1d(attrs.get("not_distinguishable", [])).tolist()  # files keep an array
    if others:
        yield f"Equally good within the errors: {', '.join(map(str, others))} components."
    if "best_held_out" in attrs:
        yield f"Held-out cells are predicted best with {attrs['best_held_out']} components."
    if attrs.get("at_edge"):
        yield f"The best rank is the {attrs['at_edge']} of the compared ones: try ranks beyond it."


SECTIONS: Final[dict[str, tuple[str, Callable[[Content], Parts]]]] = {
    "verdict": ("Verdict", verdict),
    "care": ("Cautions", cautions),
    "data": ("Data", data),
    "model": ("Model and settings", settings),
    "components": ("Components", components),
    "identifiability": ("Identifiability of components", identifiability),
    "convergence": ("Convergence", convergence),
    "held-out": ("Held-out values", predictions),
    "rank": ("Number of components", rank),
}
"""Titles and contents of the sections, by anchor; a section without parts is left out."""
