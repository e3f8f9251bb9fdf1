"""The best columns for every row by the posterior of the mean: the verb ``recommend``."""

from collections.abc import Iterator
from contextlib import closing
from math import prod
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import (
    inner_share,
    label_at,
    match_labels,
    one_of,
    refuse_repeated,
    whole_number,
)
from daskfactor.data.blocks import BlockedData
from daskfactor.data.files import open_input, reopen
from daskfactor.data.grid import Block
from daskfactor.data.long_tables import UnclearTableError
from daskfactor.data.sources import as_blocks
from daskfactor.data.statistics import stored_cells
from daskfactor.data.storage import ArrayFile
from daskfactor.data.store import is_blocked_store
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DataError, OptionError
from daskfactor.machine import memory_budget
from daskfactor.progress import RunEvent, progress_bar
from daskfactor.results.predict import with_new
from daskfactor.results.ranking import FEW, GROUP_BYTES, Best, Search, Stack, score_of
from daskfactor.results.schema import tree_of
from daskfactor.results.selection import keys_of, select
from daskfactor.results.trace import Run, Trace, as_draws, factors_of, reads_here

Array = NDArray[Any]
Ints = NDArray[np.int64]
By = Literal["mean", "lower", "upper"]

MEMORY: Final = 2**29
"""Draws that are held in memory, at most, beside those of the blocks at work."""
TABLES: Final = ("table", "csv", "parquet")
"""Kinds of sources whose rows and columns are those that occur."""
FIGURES: Final = ("mean", "sd", "lower", "upper")


@reads_here
def recommend(
    trace: Trace | xr.Dataset,
    rows: Any = None,
    n: int = 10,
    *,
    columns: Any = None,
    exclude: Any = None,
    by: By = "mean",
    interval: float = 0.9,
    memory_limit: int | str | None = None,
    progressbar: bool = False,
) -> xr.Dataset:
    r"""Find the n best columns (items) for every row (user), with what is known of each.

    .. math:: \mathrm{E}[(WH)_{ij}] = \sum_d w_d \, W^{(d)}_i \cdot H^{(d)}_j

    over all draws d of all chains, or by the lower or upper end of the interval of the mean.
    The result is that of looking at every cell, to double precision, in any size of blocks;
    of many rows, most cells are ruled out by a bound without being looked at. Equal scores go by
    position.
    ``by="mean"`` and, of non-negative models, ``"lower"`` rule out nearly all cells; for others
    the bound is loose, so that up to all cells are looked at, at some microseconds each.

    Parameters
    ----------
    trace
        Result of a run that kept draws or of :func:`stein_posterior` (particles count by their
        weight), the path of its store, or a point of :func:`optimize`.
    rows, columns
        Which rows, and which columns may be recommended, as for :func:`predict`: all, labels, a
        slice or a mask; positions where there are no labels. ``rows`` may also be new
        rows' factors, from :func:`transform`.
    n
        How many columns for each row.
    exclude
        Cells that are not recommended: data in any form, such as those the run was made from, or
        ``"seen"`` for the run's own, where it keeps them or their place. What they store, or
        observe if they are dense, is left out, matched by label where both have labels, else by
        position; labels that the run does not know do not matter. A table of three columns has
        a line for each cell.
    by : {"mean", "lower", "upper"}
        What cells are ranked by; ``"lower"`` prefers what is sure, ``"upper"`` what may be good.
    interval
        Probability inside ``lower`` and ``upper``.
    memory_limit
        Bytes, or a text such as ``"1 GiB"``, of draws that are held in memory, 512 MiB by
        default; the others wait in a scratch file. Blocks at work take about as much again.
    progressbar
        Whether to show progress on standard error.

    Returns
    -------
    Dataset
        Over rows and ``rank`` (1 is the best): the label of the column under the name of its
        dimension, those of each dimension where some are stacked, its ``position``, and
        ``mean``, ``sd``, ``lower`` and ``upper`` of the mean WH in the unit of the data. Where
        a row has fewer columns left, position is -1, figures are NaN, and the label is that of
        no column: empty, NaN, or -1. The attribute ``looked_at`` is the number of cells whose
        draws were all computed.

    Raises
    ------
    OptionError
        If there are no draws, a label is unknown or an option is not allowed.
    DataError
        If ``exclude`` does not go with the run.

    Notes
    -----
    Of a :class:`PSGRRLD` run the draws of the fine chain alone are taken. `lower` and `upper`
    are about the mean and not about a new observation, whose noise says nothing of a column.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> best = dfac.recommend(trace, rows=[0, 4], n=3)
    >>> best["mean"].shape
    (2, 3)
    """
    n = whole_number("n", n, 1)
    one_of("by", by, ("mean", "lower", "upper"))
    inner_share("interval", interval)
    budget = MEMORY if memory_limit is None else memory_budget(memory_limit)
    asked = _asked(trace, rows, columns)
    starts, excluded = _left_out(exclude, asked)
    tail = 0.5 * (1.0 - interval)
    weights = asked.weights
    from dask.system import cpu_count

    sides = ((asked.W, asked.rows.values), (asked.H, asked.columns.values))
    shape = asked.rows.size, asked.columns.size
    with progress_bar(progressbar) as on_event, closing(ArrayFile(budget=budget)) as file:

        def search(nonnegative: bool) -> Search:
            return Search(
                score_of(by, (tail, 1.0 - tail), weights, nonnegative),
                n,
                (tail, 1.0 - tail),
                weights,
                starts,
                excluded,
                int(cpu_count()),
                lambda done: on_event(RunEvent("rows", done, shape[0])),
            )

        draws = [_groups(factor, at, asked.kept) for factor, at in sides]
        if shape[0] <= FEW and file.fits(8 * weights.size * prod(shape)):
            rows_of_draws = np.concatenate([part for _, part in draws[0]])
            best = search(True).look_at_all(rows_of_draws, draws[1], shape)
        else:
            stacks = [
                Stack.filled(
                    (at.size, weights.size, factor.sizes["component"]), factor.dtype, each, file
                )
                for (factor, at), each in zip(sides, draws, strict=True)
            ]
            nonnegative = all(side.least >= 0 for side in stacks)
            best = search(nonnegative).run(stacks[0], stacks[1], file)
    found = _labelled(best, asked)
    return found.assign_attrs(by=by, interval=interval, of="mean", looked_at=best.looked)


class RankingRequest(NamedTuple):
    """Draws and what is asked of them.

    ``W`` and ``H`` are (chain, draw, row or column, component); ``rows`` and ``columns`` hold
    positions under the user's names and labels, out of ``shape``; ``kept`` (chain, draw) which
    draws have weight, ``weights`` (D,) theirs.
    """

    run: Run
    W: xr.DataArray
    H: xr.DataArray
    rows: xr.DataArray
    columns: xr.DataArray
    shape: tuple[int, int]
    kept: NDArray[np.bool_]
    weights: NDArray[np.float64]


def _asked(trace: Any, rows: Any, columns: Any) -> RankingRequest:
    whole = run = as_draws(trace, "a ranking")
    run.require_matrix("recommend")
    if isinstance(rows, xr.DataArray) and "component" in rows.dims:
        run, rows = with_new(*_with_same_draws(run, rows))
    at_rows, at_columns = select(run, rows, columns)
    W, H = factors_of(run.posterior)
    H = H.transpose("chain", "draw", H.dims[3], "component")
    masses = run.masses.values
    kept = masses > 0
    weights = masses[kept] / masses[kept].sum()
    shape = W.shape[2], H.shape[2]
    at_rows, at_columns = (
        at if at.ndim else at.expand_dims(dim)
        for at, dim in zip((at_rows, at_columns), run.dims, strict=True)
    )
    return RankingRequest(whole, W, H, at_rows, at_columns, shape, kept, weights)


def _with_same_draws(run: Run, rows: xr.DataArray) -> tuple[Run, str, Any]:
    """Repeat a run of one draw for every draw of new rows; return what `with_new` takes."""
    group, alone = run.posterior, not {"chain", "draw"} & set(rows.dims)
    if group.sizes["chain"] * group.sizes["draw"] > 1:
        if alone:
            raise OptionError(
                "these new rows are a point, without draws, and the run has draws; pass what "
                "daskfactor.transform(..., point=False) gives"
            )
        return run, "W", rows
    if alone:
        rows = rows.expand_dims(chain=group["chain"].values, draw=group["draw"].values)
    group = group.isel({dim: np.zeros(rows.sizes[dim], int) for dim in ("chain", "draw")})
    group = group.assign_coords(chain=rows.chain, draw=rows.draw)
    return Run(tree_of(run.groups | {"posterior": group}, run.attrs)), "W", rows


def _groups(
    factor: xr.DataArray, at: Ints, kept: NDArray[np.bool_]
) -> Iterator[tuple[slice, Array]]:
    """Yield draws of a factor (chain, draw, row, component) with weight, (d, row, K) at once."""
    each = at.size * factor.sizes["component"] * factor.dtype.itemsize
    step, done = max(1, GROUP_BYTES // max(1, each)), 0
    every = at.size == factor.shape[2] and bool((at == np.arange(at.size)).all())
    for chain, own in enumerate(kept):
        draws = np.flatnonzero(own)
        for start in range(0, draws.size, step):
            chosen = draws[start : start + step]
            whole = chosen[-1] - chosen[0] + 1 == chosen.size
            draw = slice(chosen[0], chosen[-1] + 1) if whole else chosen
            part = factor[chain, draw] if every else factor[chain, draw, at]
            yield slice(done, done + chosen.size), part.values
            done += chosen.size


def _left_out(exclude: Any, asked: RankingRequest) -> tuple[Ints, Ints]:
    """Columns that each row leaves out, by place among those asked for, as compressed rows."""
    none = np.zeros(asked.rows.size + 1, np.int64), np.zeros(0, np.int64)
    if exclude is None:
        return none
    if isinstance(exclude, str) and exclude == "seen":
        exclude = _seen(asked.run)
    given = isinstance(exclude, BlockedData)
    data = exclude if given else _opened(exclude)
    try:
        if not data.is_sparse and data.n_missing == 0:
            raise DataError(
                "exclude observes every cell, so that nothing is left to recommend; pass a sparse "
                "matrix, a table, or an array that is NaN where a cell is not to be left out"
            )
        places = [
            _place(data, side, at, asked.shape)
            for side, at in enumerate((asked.rows, asked.columns))
        ]
        pairs = [_cells(data, Block(*block), places) for block in data.grid.all_blocks()]
    finally:
        if not given:
            data.close()
    rows, columns = (np.concatenate(side) for side in zip(*pairs, strict=True))
    order = np.lexsort((columns, rows))
    starts = np.searchsorted(rows[order], np.arange(asked.rows.size + 1))
    return starts.astype(np.int64), columns[order].astype(np.int64)


def _seen(run: Run) -> Any:
    """The data of a run, where it keeps them or the place that they were read from."""
    kept = run.observed("V")
    if kept is not None:
        return kept
    source = run.document("run").get("source") or {}
    if source.get("location") is None:
        raise OptionError(
            'exclude="seen" needs the data of the run, which it does not keep and which were read '
            "from no path; pass them: exclude=V"
        )
    return reopen(source["location"], source)


def _opened(exclude: Any) -> BlockedData:
    """Put the cells to leave out on blocks; what is not stored is not left out.

    A table of three columns has a line for each of them.
    """
    sparse = is_blocked_store(exclude)
    try:
        source = exclude if sparse else open_input(exclude)
    except UnclearTableError:
        source = open_input(exclude, ReadOptions(table=True))
    missing = sparse or source.is_sparse
    return as_blocks(source, unstored="missing" if missing else None, allow_empty=True)


def _place(data: BlockedData, side: int, at: xr.DataArray, shape: tuple[int, int]) -> Ints:
    """Where each row (or column) of the cells to leave out is among those asked for, or -1."""
    own: Any
    what, labels, own = (
        ("rows", "columns")[side],
        data.labels.keys[side],
        keys_of(at),
    )
    if labels is not None and own is not None:
        found = match_labels(labels, own)
        refuse_repeated(found, what, "exclude")
        if (found.at < 0).all() and at.size == shape[side]:  # a part may have none of them
            raise DataError(
                f"none of the {what} of exclude is among those of the run: it has "
                f"{label_at(labels, 0)}, ..., the run {label_at(own, 0)}, ...; give both the same "
                "labels"
            )
        return found.at
    if labels is not None and (isinstance(labels, dict) or labels.dtype.kind not in "iu"):
        raise DataError(
            f"the {what} of exclude have labels ({label_at(labels, 0)}, ...), and those of the run "
            "have none; pass exclude without labels, in the order of the run"
        )
    # Keys of a table are positions where the run has no labels: all of them need not occur.
    keyed = own is None and (labels is not None or data.source.kind in TABLES)
    if not keyed and data.shape[side] != shape[side]:
        raise DataError(
            f"exclude is {data.shape[0]} x {data.shape[1]}, and the run is {shape[0]} x "
            f"{shape[1]}; {what} without labels must be all of those of the run, in their order"
        )
    positions = np.arange(data.shape[side]) if labels is None else labels
    return match_labels(positions, at.values).at


def _cells(data: BlockedData, block: Block, places: list[Ints]) -> tuple[Ints, Ints]:
    """Observed cells of a block, by their places among rows and columns asked for."""
    view: Any = data.view(*block)
    corner = [part.start for part in data.grid.slices(block)]
    if data.is_sparse:
        row, col = stored_cells(view)
        seen = ~np.isnan(view.values)
    else:
        row, col = np.nonzero(~np.isnan(view.block))
        seen = np.ones(row.size, bool)
    row = row[seen].astype(np.int64) + corner[0]
    col = col[seen].astype(np.int64) + corner[1]
    row, col = data.known.layout.callers(row, col)
    row, col = places[0][row], places[1][col]
    known = (row >= 0) & (col >= 0)
    return row[known], col[known]


def _labelled(best: Best, asked: RankingRequest) -> xr.Dataset:
    """What was found under the names and labels of rows and columns."""
    rows, columns = asked.rows, asked.columns
    row, column = str(rows.dims[0]), str(columns.dims[0])
    place = best.columns
    there = place >= 0
    position = np.where(there, columns.values[place], -1)
    labels = columns[column].values if column in columns.coords else columns.values
    chosen = _with_none(labels[place], there)
    shape = (row, "rank")
    values: dict[str, Any] = {column: (shape, chosen), "position": (shape, position)}
    values |= {
        name: (shape, _with_none(columns[name].values[place], there))
        for name in columns.attrs["levels"]
    }
    values |= {name: (shape, best.figures[..., at]) for at, name in enumerate(FIGURES)}
    return xr.Dataset(values, {**rows.coords, "rank": np.arange(1, place.shape[1] + 1)})


def _with_none(labels: Array, there: NDArray[np.bool_]) -> Array:
    """Labels with those of no column where there is none."""
    if there.all():
        return labels
    none: Any = {"U": "", "O": "", "T": "", "f": np.nan, "M": "NaT", "m": "NaT"}
    if labels.dtype.kind == "u":
        labels = labels.astype(np.int64)
    return np.where(there, labels, np.array(none.get(labels.dtype.kind, -1)).astype(labels.dtype))
