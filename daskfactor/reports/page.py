"""One page about a run: everything in one file, for people who were not there."""

from dataclasses import dataclass
from html import escape
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

import xarray as xr

import daskfactor
from daskfactor.data.holdout import HeldOut
from daskfactor.errors import OptionError
from daskfactor.publish import check_free, publishing
from daskfactor.reports import parts
from daskfactor.results.components import components_of, with_names
from daskfactor.results.coverage import held_out_coverage
from daskfactor.results.files import disk_errors
from daskfactor.results.finalize import facts
from daskfactor.results.identifiability import component_swaps
from daskfactor.results.trace import Run, Trace, as_tree, reads_in_threads

PARTS: Final = {
    "verdict": "Verdict",
    "care": "What to be careful about",
    "data": "Data",
    "model": "Model and settings",
    "components": "Components",
    "identifiability": "Are components told apart?",
    "convergence": "Convergence",
    "held-out": "Held-out values",
    "rank": "How many components",
}


@dataclass(frozen=True)
class Report:
    """A page about a run.

    Attributes
    ----------
    html
        The whole page; it asks no server for anything and runs no script.
    """

    html: str

    def save(self, path: str | PathLike[str], overwrite: bool = False) -> None:
        """Write the page to a file.

        Raises
        ------
        OptionError
            If the name does not end in ``.html`` or ``.htm``.
        StoreError
            If there is a file of this name already, and not ``overwrite``, or it cannot be
            written.
        """
        target = Path(fspath(path))
        if target.suffix.lower() not in (".html", ".htm"):
            raise OptionError(f"a report is a page: its name ends in .html, got {str(target)!r}")
        with (
            disk_errors("a report", target, "nothing else was changed", "try again"),
            publishing(target, overwrite) as draft,
        ):
            draft.write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        return f"<Report, {len(self.html) / 1e6:.1f} MB; .save('report.html') writes it>"

    def _repr_html_(self) -> str:
        frame = 'style="width: 100%; height: 40rem; border: 0" title="report"'
        return f'<iframe srcdoc="{escape(self.html, quote=True)}" {frame}></iframe>'


@reads_in_threads
def report(
    trace: Trace,
    path: str | PathLike[str] | None = None,
    *,
    held_out: Any = None,
    evidence: Any = None,
    image_shape: tuple[int, int] | None = None,
    title: str | None = None,
    overwrite: bool = False,
) -> Report:
    """Make a page about a run that can be handed to a colleague.

    It tells of data, model and settings, whether predictions, components and log density may be
    relied on and what to do about it, shows the components with their intervals, which of them
    swap places, how often intervals held values that were left out, and how many components
    the evidence is for. One file of HTML, without scripts, that asks no server for anything.

    Parameters
    ----------
    trace : xarray.DataTree, str or Path
        What `sample`, `resume`, `stein_posterior`, `open_run` or `align` returned, or the path
        of a store.
    path
        Where to write the page.
    held_out : HeldOut or (cells, values), optional
        What `hold_out` returned, or positions (rows, columns) and the values there.
    evidence : xarray.Dataset or Evidence, optional
        What `select_rank` or `log_evidence` returned.
    image_shape : (int, int), optional
        Height and width, if rows or columns of the data are the pixels of an image.
    title : str, optional
        Headline of the page.
    overwrite
        Whether to replace a page that is there already.

    Returns
    -------
    Report
        Its ``html``, and ``save``; a notebook shows it.

    Raises
    ------
    OptionError
        If the run has no draws yet, an argument is not what it has to be, or matplotlib is
        missing.
    StoreError
        If the page is there already.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> page = dfac.report(trace, title="Counts")
    >>> "Counts" in page.html
    True
    """
    if path is not None:
        check_free(path, overwrite)
    whole = as_tree(trace)
    tree = with_names(whole)
    name = title or ("A run" if isinstance(trace, xr.DataTree) else Path(fspath(trace)).name)
    (about, summary), found = facts(whole, name, tree), components_of(tree)
    swaps = component_swaps(tree) if Run(tree).has_draws else None
    coverage = None if held_out is None else held_out_coverage(tree, *_checked(held_out))
    content = {
        "title": name,
        "subtitle": f"Bayesian matrix factorization with daskfactor, {about['created_at']}",
        "lights": parts.lights(summary),
        "sound": all(one.status in ("green", "none") for one in summary.lights.values()),
        "cautions": parts.cautions(summary, about, found, swaps, coverage),
        "data": parts.data(about, found),
        "settings": parts.settings(about),
        "size": "mean" if found.W.nonnegative else "size (root mean square)",
        "spread": parts.spread(found),
        "pictures": parts.pictures(tree, found, image_shape),
        "components": parts.components(found),
        "swaps": None if swaps is None else parts.swaps(found, swaps),
        "no_swaps": "The run kept means and variances alone; which components swap places can be "
        'told from draws: run again with keep="draws".',
        "convergence": parts.convergence(summary),
        "traces": parts.traces(tree),
        "calibration": None if coverage is None else parts.calibration(coverage, found),
        "evidence": None if evidence is None else parts.evidence(evidence),
        "footer": f"Made by daskfactor {daskfactor.__version__} from a run of version "
        f"{about['daskfactor']}. This page asks no server for anything.",
    }
    left_out = {"held-out"} if coverage is None else set()
    left_out |= {"rank"} if evidence is None else set()
    shown = [part for part in PARTS.items() if part[0] not in left_out]
    page = Report(_template().render(content, parts=shown))
    if path is not None:
        page.save(path, overwrite)
    return page


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))


def _checked(held_out: Any) -> tuple[Any, Any]:
    """Positions of rows and columns, and values."""
    if isinstance(held_out, HeldOut):
        return held_out.cells, held_out.values
    if isinstance(held_out, tuple) and len(held_out) == 2:
        cells, values = held_out
        if isinstance(cells, tuple | list) and len(cells) == 2:
            return (cells[0], cells[1]), values
    raise OptionError(
        "held_out must be what hold_out() returned, or ((rows, columns), values), got "
        f"{type(held_out).__name__}"
    )
