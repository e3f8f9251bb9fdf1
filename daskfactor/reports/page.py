"""Report about a run: one HTML file."""

from dataclasses import dataclass
from html import escape
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import xarray as xr

import daskfactor
from daskfactor.data.holdout import HeldOut
from daskfactor.errors import OptionError
from daskfactor.publish import check_free, publishing
from daskfactor.reports import sections
from daskfactor.results.components import components_of, with_names
from daskfactor.results.coverage import held_out_coverage
from daskfactor.results.finalize import facts
from daskfactor.results.identifiability import component_swaps
from daskfactor.runs.files import disk_errors
from daskfactor.runs.trace import Run, Trace, as_tree, reads_in_threads


@dataclass(frozen=True)
class Report:
    """Report about a run.

    Attributes
    ----------
    html
        Complete HTML page, which loads nothing from the network and runs no script.
    """

    html: str

    def save(self, path: str | PathLike[str], overwrite: bool = False) -> None:
        """Write the page to a file.

        Raises
        ------
        OptionError
            If the name does not end in ``.html`` or ``.htm``.
        StoreError
            If the file exists and ``overwrite`` is False, or it cannot be written.
        """
        target = Path(fspath(path))
        if target.suffix.lower() not in (".html", ".htm"):
            raise OptionError(f"the name of a report must end in .html, got {str(target)!r}")
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
    """Make a report about a run as one HTML page, for colleagues.

    The report covers data, model and settings; whether predictions, components and log density are
    reliable, and how to improve them; the components with their intervals, and components that
    swap; the coverage of intervals for held-out values; and the evidence for numbers of components.
    The page has no scripts and loads nothing from the network.

    Parameters
    ----------
    trace : xarray.DataTree, str or Path
        Result of `sample`, `resume`, `stein_posterior`, `open_run` or `align`, or the path of a
        store.
    path
        HTML file to write.
    held_out : HeldOut or (cells, values), optional
        Result of `hold_out`, or positions (rows, columns) and the values at these.
    evidence : xarray.Dataset or Evidence, optional
        Result of `select_rank` or `log_evidence`.
    image_shape : (int, int), optional
        Height and width of an image whose pixels are the rows or columns of the data.
    title : str, optional
        Title of the page.
    overwrite
        Whether to replace an existing file.

    Returns
    -------
    Report
        The report, with ``html`` and ``save``; a notebook displays it.

    Raises
    ------
    OptionError
        If the run has no draws yet, an argument is invalid, or matplotlib is not installed.
    StoreError
        If the file exists.

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
    unaligned = as_tree(trace)
    tree = with_names(unaligned)
    name = title or ("A run" if isinstance(trace, xr.DataTree) else Path(fspath(trace)).name)
    about, summary = facts(unaligned, name, tree)
    content = sections.Content(
        tree,
        about,
        summary,
        components_of(tree),
        swaps=component_swaps(tree) if Run(tree).has_draws else None,
        coverage=None
        if held_out is None
        else held_out_coverage(tree, *_cells_and_values(held_out)),
        evidence=evidence,
        image_shape=image_shape,
    )
    parts = ((key, title, make(content)) for key, (title, make) in sections.SECTIONS.items())
    variables = {
        "title": name,
        "subtitle": f"Bayesian matrix factorization with daskfactor, {about['created_at']}",
        "sections": [section for section in parts if section[2]],
        "footer": f"Made by daskfactor {daskfactor.__version__} from a run of version "
        f"{about['daskfactor']}. This page loads nothing from the network.",
    }
    page = Report(_template().render(variables))
    if path is not None:
        page.save(path, overwrite)
    return page


def _template() -> Any:
    """Return the template of the page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))


def _cells_and_values(held_out: Any) -> tuple[Any, Any]:
    """Return positions of rows and columns, and values, of held-out cells."""
    if isinstance(held_out, HeldOut):
        return held_out.cells, held_out.values
    if isinstance(held_out, tuple) and len(held_out) == 2:
        cells, values = held_out
        if isinstance(cells, tuple | list) and len(cells) == 2:
            return (cells[0], cells[1]), values
    raise OptionError(
        "held_out must be a result of hold_out(), or ((rows, columns), values), got "
        f"{type(held_out).__name__}"
    )
