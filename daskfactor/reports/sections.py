"""Contents of the sections of a report: texts, tables and images for the template."""

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

MAX_DRAWN: Final = 8
"""Largest number of components that are drawn."""
MAX_LISTED: Final = 30
"""Largest number of components whose largest entries are listed."""
ENTRIES: Final = 6
"""Number of entries in these lists."""
SIGNS: Final = {"green": "✓", "amber": "!", "red": "✕", "none": "–"}
WORDS: Final = {
    "green": "Reliable",
    "amber": "Use with care",
    "red": "Not reliable",
    "none": "Unknown",
}
MIN_SWAPS: Final = 0.05
"""Smallest share of draws with a swap that is reported."""
MAX_WIDTH: Final = 1.0
"""Largest relative width of the intervals of a component that is not reported as wide."""
TRANSPARENT: Final = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
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


class Table(NamedTuple):
    """Table with a caption, names of columns, and rows that start with their names."""

    caption: str
    head: list[str]
    rows: list[list[str]]


def lights(summary: Summary) -> list[dict[str, Any]]:
    """Return the lights of the verdict, with signs and words."""
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
    content: Components,
    swaps: xr.Dataset | None,
    coverage: xr.Dataset | None,
) -> list[str]:
    """Return sentences about results that need care."""
    cautions = []
    if about["diverging"]:
        cautions.append(
            f"{about['diverging']} steps diverged and were rejected; draws around them may miss a "
            "part of the posterior."
        )
    if content.chain is not None:
        cautions.append(
            "The run has no draws, so that the components of its chains cannot be aligned: those "
            f"of chain {content.chain} are shown."
        )
    if swaps is not None:
        cautions += _swap_cautions(swaps, content)
    if coverage is not None:
        cautions += _coverage_cautions(coverage)
    return [*cautions, *summary.notes]


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


def data(about: Mapping[str, Any], content: Components) -> list[tuple[str, str]]:
    """Return size, missing cells, units and labels of the data."""
    facts = dict(description_lines(about))
    rows, columns = about["data"]["shape"]
    missing = rows * columns - about["data"]["n_observed"]
    lines = [("size", facts["data"])]
    lines.append(("not observed", f"{missing:,} cells ({missing / (rows * columns):.1%})"))
    mean = about["data"].get("mean")
    values = content.quantity if mean is None else f"{content.quantity}, mean {mean:.4g}"
    lines.append(("values", values))
    for name, factor in (("rows", content.W), ("columns", content.H)):
        lines.append((f"{name}: {factor.dim}", _label_ranges(factor)))
    return lines


def _label_ranges(factor: Factor) -> str:
    """Return the size and the coordinates of a dimension, each with its first and last label."""
    ranges = []
    for name, one in factor.labels.coords.items():
        first, last = (format_label(one.values[at]) for at in (0, -1))
        ranges.append(f"{format_quantity(one.attrs, str(name))}: {first} to {last}")
    return f"{factor.mean.shape[1]:,}; {'; '.join(ranges) or 'no labels'}"


def settings(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return model, sampler, draws, time and versions."""
    return [line for line in description_lines(about) if line[0] != "data"]


def spread(content: Components) -> str:
    """Return an explanation of bands and whiskers."""
    return "" if content.W.variance is None else "Bands, whiskers and ranges are 90 % intervals."


def pictures(tree: xr.DataTree, content: Components, image_shape: Any) -> list[Picture]:
    """Return figures of the components, without those that do not apply."""
    count = min(MAX_DRAWN, len(content.labels))
    caption = (
        f"The {count} components with the largest shares of the data, by {content.W.dim} (left) "
        f"and {content.H.dim} (right), with 90 % intervals."
    )
    images = [picture(caption, partial(components_figure, tree, image_shape, count))]
    captions = {
        "shares": "Share of the data of each component, and share of the draws that contain it.",
        "maps": "Maps of components, each with its standard deviation below.",
    }
    for name, alt in captions.items():
        options = {"image_shape": image_shape} if name == "maps" else {}
        try:
            images.append(picture(alt, partial(draw, tree, name, **options)))
        except OptionError:
            continue
    return images


def components(content: Components) -> list[dict[str, Any]]:
    """Return the largest entries of every component as tables."""
    return [_component(content, k) for k in range(min(MAX_LISTED, len(content.labels)))]


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


def swaps(content: Components, table: xr.Dataset) -> Table:
    """Return a table of the swaps of each component."""
    titles = dict(zip(content.labels, content.titles, strict=True))
    rows = []
    for label, row, itself, others in _matches(table, content):
        another = "–"
        if any(others.values()):
            most = max(others, key=lambda other: others[other])
            another = f"{sum(others.values()):.1%}, most often {titles[most]}"
        numbers = (float(row[name]) for name in ("width_w", "width_h"))
        widths = [f"{width:.0%}" if np.isfinite(width) else "–" for width in numbers]
        shares = [f"{itself:.1%}", another, f"{float(row['none']):.1%}"]
        rows.append([titles[label], *shares, *widths, _interpretation(itself, row)])
    head = ["component", "itself", "another", "none", "width of W", "width of H", "interpretation"]
    return Table("Share of the draws in which each component matches", head, rows)


def _interpretation(itself: float, row: xr.Dataset) -> str:
    """Return the interpretation of the shares and widths of a component."""
    if itself < SURE:
        return "not identified" if itself < 0.5 else "swaps"
    widths = float(row["width_w"]), float(row["width_h"])
    return "identified, but wide" if np.nanmax([*widths, 0.0]) > MAX_WIDTH else "identified"


def convergence(summary: Summary) -> Table | None:
    """Return the worst values of each kind of quantity, as `summarize` prints them."""
    if "rhat" not in summary:
        return None
    rows = []
    for part in sections_of(summary).to_dict(orient="records"):
        numbers = [f"{part['rhat']:.3f}", f"{part['ess_bulk']:.0f}", f"{part['ess_tail']:.0f}"]
        cells = [number.replace("nan", "–") for number in numbers]
        rows.append([TITLES[part["kind"]], *cells, f"{part['total']}"])
    size = f"{summary.attrs['chains']} chains of {summary.attrs['draws']} draws"
    return Table(
        f"{size}; worst value of each kind of quantity",
        ["kind", "R-hat", "ESS bulk", "ESS tail", "quantities"],
        rows,
    )


def traces(tree: xr.DataTree) -> list[Picture]:
    """Return the figure of the log density, and for particles those of weights and distances."""
    captions = {
        "trace": "Log density of each chain over its cycles. Right: draws only, without the effect "
        "of the relative scales of W and H; the verdict is based on this series."
    }
    if Run(tree).is_particles:
        captions = {
            "trace": "Objective or log density of each particle; the area of a dot is its weight.",
            "weights": "Mass of each particle, the largest first, and its fit below.",
            "diversity": "Distances between particles in degrees, with similar particles together.",
        }
    return [picture(alt, partial(draw, tree, name)) for name, alt in captions.items()]


def calibration(coverage: xr.Dataset, content: Components) -> dict[str, Any]:
    """Return errors and the coverage of intervals for held-out cells."""
    text = (
        f"{int(coverage['cells']):,} cells were held out of the fit and predicted. The root mean "
        f"square error of the posterior mean is {float(coverage['rmse']):.4g}, the mean absolute "
        f"error {float(coverage['mae']):.4g} ({content.quantity})."
    )
    rows = [
        [f"{level:.0%}", f"{float(inside):.1%}", f"± {2 * float(error):.1%}"]
        for level, inside, error in coverage[["inside", "error"]].to_dataframe().itertuples()
    ]
    target = "a new observation" if coverage.attrs["of"] == "observation" else "the mean"
    caption = f"Share of these cells inside the interval of {target}"
    return {
        "text": text,
        "table": Table(caption, ["interval", "coverage", "two standard errors"], rows),
    }


def evidence(result: Any) -> dict[str, Any]:
    """Return the evidence of ranks, or of this model."""
    if isinstance(result, Evidence):
        relation = "is at least" if result.bound else "is"
        text = f"The log evidence {relation} {result.value:.6g} ± {result.total_error:.2g} nats."
        return {"lines": [text], "table": None, "picture": None}
    if not isinstance(result, xr.Dataset) or "log_evidence" not in result:
        raise OptionError(
            "evidence must be a result of select_rank() or log_evidence(), got "
            f"{type(result).__name__}"
        )
    names = {
        "log_evidence": "log evidence",
        "standard_error": "standard error",
        "discretization_error": "discretization error",
        "held_out_log_score": "held-out log score",
    }
    columns = [name for name in names if name in result]
    rows = [
        [
            str(n),
            *(f"{float(result[name].sel(rank=n)):.5g}".replace("nan", "–") for name in columns),
        ]
        for n in result["rank"].values.tolist()
    ]
    table = Table("Compared ranks", ["rank", *(names[name] for name in columns)], rows)
    alt = "Log evidence over the number of components, with two standard errors."
    return {
        "lines": list(_rank_lines(result.attrs)),
        "table": table,
        "picture": picture(alt, partial(plot_ranks, result)),
    }


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
