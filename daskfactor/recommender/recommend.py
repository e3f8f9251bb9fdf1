"""Recommend the best columns for every row by the posterior mean of WH."""

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
from daskfactor.data.grid import Block
from daskfactor.data.long_tables import UnclearTableError
from daskfactor.data.opening import open_source, reopen
from daskfactor.data.sources import as_blocks
from daskfactor.data.statistics import stored_cells
from daskfactor.data.storage import ArrayFile
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DataError, OptionError
from daskfactor.machine import memory_budget
from daskfactor.progress import RunEvent, progress_bar
from daskfactor.recommender.ranking import FEW, GROUP_BYTES, Best, Search, Stack, score_of
from daskfactor.results.predict import with_new
from daskfactor.results.selection import keys_of, select
from daskfactor.runs.schema import tree_of
from daskfactor.runs.trace import Run, Trace, factors_of, reads_in_threads

Array = NDArray[Any]
Ints = NDArray[np.int64]
By = Literal["mean", "lower", "upper"]

MEMORY: Final = 2**29
"""Default bytes of draws in memory, without those of the blocks in use."""
TABLES: Final = ("table", "csv", "parquet")
"""Kinds of sources that list only rows and columns that occur."""
FIGURES: Final = ("mean", "sd", "lower", "upper")


@reads_in_threads
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
    r"""Find the n best columns (items) for every row (user), with their posterior statistics.

    .. math:: \mathrm{E}[(WH)_{ij}] = \sum_d w_d \, W^{(d)}_i \cdot H^{(d)}_j

    over all draws d of all chains, or by the lower or upper end of the interval of the mean.
    The result is exact to double precision for any block size; for many rows, an upper bound
    excludes most cells without computing them. Ties are broken by position. ``by="mean"`` and,
    for non-negative models, ``"lower"`` exclude nearly all cells; otherwise the bound is loose, so
    that up to all cells are computed, at some microseconds each.

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
        Number of columns per row.
    exclude
        Cells not to recommend: data in any form, or ``"seen"`` for the data of the run itself,
        if it stores them or their location. What they store, or
        observe if they are dense, is left out, matched by label where both have labels, else by
        position; labels that the run does not know do not matter. A table of three columns has
        a line for each cell.
    by : {"mean", "lower", "upper"}
        Statistic to rank by; ``"lower"`` prefers safe columns, ``"upper"`` promising ones.
    interval
        Probability of the interval from ``lower`` to ``upper``.
    memory_limit
        Memory for draws, in bytes or as a text such as ``"1 GiB"``, 512 MiB by default; draws
        beyond it are read from a scratch file. Blocks at work take about as much again.
    progressbar
        Show progress on standard error.

    Returns
    -------
    Dataset
        Over rows and ``rank`` (1 is the best): the label of the column under the name of its
        dimension, those of each dimension where some are stacked, its ``position``, and
        ``mean``, ``sd``, ``lower`` and ``upper`` of the mean WH in the unit of the data. Where
        a row has fewer columns left, position is -1, statistics are NaN, and the label is empty,
        NaN, or -1. The attribute ``looked_at`` is the number of cells whose draws were all
        computed.

    Raises
    ------
    OptionError
        If there are no draws, a label is unknown or an option is not allowed.
    DataError
        If ``exclude`` does not match the run.

    Notes
    -----
    A :class:`PSGRRLD` run contributes only the draws of its fine chain. `lower` and `upper` are
    those of the mean, not of a new observation, whose noise is not a property of the column.

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
    request = _ranking_request(trace, rows, columns)
    starts, excluded = _excluded(exclude, request)
    tail = 0.5 * (1.0 - interval)
    weights = request.weights
    from dask.system import cpu_count

    sides = ((request.W, request.rows.values), (request.H, request.columns.values))
    shape = request.rows.size, request.columns.size
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

        draws = [_groups(factor, at, request.weighted) for factor, at in sides]
        if shape[0] <= FEW and file.fits(8 * weights.size * prod(shape)):
            rows_of_draws = np.concatenate([part for _, part in draws[0]])
            best = search(True).search_all_cells(rows_of_draws, draws[1], shape)
        else:
            stacks = [
                Stack.filled(
                    (at.size, weights.size, factor.sizes["component"]), factor.dtype, each, file
                )
                for (factor, at), each in zip(sides, draws, strict=True)
            ]
            nonnegative = all(side.least >= 0 for side in stacks)
            best = search(nonnegative).run(stacks[0], stacks[1], file)
    result = _with_labels(best, request)
    return result.assign_attrs(by=by, interval=interval, of="mean", looked_at=best.looked)


class RankingRequest(NamedTuple):
    """Draws, rows and columns of a ranking.

    ``W`` and ``H`` are (chain, draw, row or column, component); ``rows`` and ``columns`` hold
    positions with the user's names and labels, out of ``shape``; ``weighted`` (chain, draw) is
    True for draws with weight, ``weights`` (D,) are their weights.
    """

    run: Run
    W: xr.DataArray
    H: xr.DataArray
    rows: xr.DataArray
    columns: xr.DataArray
    shape: tuple[int, int]
    weighted: NDArray[np.bool_]
    weights: NDArray[np.float64]


def _ranking_request(trace: Any, rows: Any, columns: Any) -> RankingRequest:
    original = run = Run.of(trace, "a ranking", point=True)
    run.require_matrix("recommend")
    if isinstance(rows, xr.DataArray) and "component" in rows.dims:
        run, rows = with_new(*_with_same_draws(run, rows))
    at_rows, at_columns = select(run, rows, columns)
    W, H = factors_of(run.posterior)
    H = H.transpose("chain", "draw", H.dims[3], "component")
    masses = run.masses.values
    weighted = masses > 0
    weights = masses[weighted] / masses[weighted].sum()
    shape = W.shape[2], H.shape[2]
    at_rows, at_columns = (
        at if at.ndim else at.expand_dims(dim)
        for at, dim in zip((at_rows, at_columns), run.dims, strict=True)
    )
    return RankingRequest(original, W, H, at_rows, at_columns, shape, weighted, weights)


def _with_same_draws(run: Run, rows: xr.DataArray) -> tuple[Run, str, Any]:
    """Repeat a run of one draw for every draw of new rows; return what `with_new` takes."""
    group, alone = run.posterior, not {"chain", "draw"} & set(rows.dims)
    if group.sizes["chain"] * group.sizes["draw"] > 1:
        if alone:
            raise OptionError(
                "the new rows are a point estimate, but the run has draws; pass the result of "
                "daskfactor.transform(..., point=False)"
            )
        return run, "W", rows
    if alone:
        rows = rows.expand_dims(chain=group["chain"].values, draw=group["draw"].values)
    group = group.isel({dim: np.zeros(rows.sizes[dim], int) for dim in ("chain", "draw")})
    group = group.assign_coords(chain=rows.chain, draw=rows.draw)
    return Run(tree_of(run.groups | {"posterior": group}, run.attrs)), "W", rows


def _groups(
    factor: xr.DataArray, at: Ints, weighted: NDArray[np.bool_]
) -> Iterator[tuple[slice, Array]]:
    """Yield draws of a factor (chain, draw, row, component) with weight, (d, row, K) at once."""
    each = at.size * factor.sizes["component"] * factor.dtype.itemsize
    step, done = max(1, GROUP_BYTES // max(1, each)), 0
    every = at.size == factor.shape[2] and bool((at == np.arange(at.size)).all())
    for chain, mask in enumerate(weighted):
        draws = np.flatnonzero(mask)
        for start in range(0, draws.size, step):
            chosen = draws[start : start + step]
            contiguous = chosen[-1] - chosen[0] + 1 == chosen.size
            draw = slice(chosen[0], chosen[-1] + 1) if contiguous else chosen
            part = factor[chain, draw] if every else factor[chain, draw, at]
            yield slice(done, done + chosen.size), part.values
            done += chosen.size


def _excluded(exclude: Any, request: RankingRequest) -> tuple[Ints, Ints]:
    """Return the excluded columns of each requested row, by position, as compressed rows."""
    none = np.zeros(request.rows.size + 1, np.int64), np.zeros(0, np.int64)
    if exclude is None:
        return none
    if isinstance(exclude, str) and exclude == "seen":
        exclude = _data_of(request.run)
    is_blocked = isinstance(exclude, BlockedData)
    data = exclude if is_blocked else _opened(exclude)
    try:
        if not data.is_sparse and data.n_missing == 0:
            raise DataError(
                "exclude observes every cell, so that no column is left to recommend; pass a "
                "sparse matrix, a table, or an array with NaN at cells that may be recommended"
            )
        places = [
            _positions(data, side, at, request.shape)
            for side, at in enumerate((request.rows, request.columns))
        ]
        pairs = [_cells(data, Block(*block), places) for block in data.grid.all_blocks()]
    finally:
        if not is_blocked:
            data.close()
    rows, columns = (np.concatenate(side) for side in zip(*pairs, strict=True))
    order = np.lexsort((columns, rows))
    starts = np.searchsorted(rows[order], np.arange(request.rows.size + 1))
    return starts.astype(np.int64), columns[order].astype(np.int64)


def _data_of(run: Run) -> Any:
    """Return the data of a run, if it stores them or the location that they were read from."""
    observed = run.observed("V")
    if observed is not None:
        return observed
    source = run.document("run").get("source") or {}
    if source.get("location") is None:
        raise OptionError(
            'exclude="seen" needs the data of the run, which it does not store and which were not '
            "read from a path; pass exclude=V"
        )
    return reopen(source["location"], source)


def _opened(exclude: Any) -> BlockedData:
    """Return the cells to exclude as blocks; implicit zeros are not excluded.

    A table of three columns has a line for each cell.
    """
    try:
        source = open_source(exclude)
    except UnclearTableError:
        source = open_source(exclude, ReadOptions(table=True))
    unstored = "missing" if source.is_sparse else None
    return as_blocks(source, unstored=unstored, allow_empty=True)


def _positions(data: BlockedData, side: int, at: xr.DataArray, shape: tuple[int, int]) -> Ints:
    """Return the position of each excluded row (or column) among the requested ones, or -1."""
    what, labels = ("rows", "columns")[side], data.labels.keys[side]
    run_labels: Any = keys_of(at)
    if labels is not None and run_labels is not None:
        places = match_labels(labels, run_labels)
        refuse_repeated(places, what, "exclude")
        if (places.at < 0).all() and at.size == shape[side]:  # a selection of the run may have none
            raise DataError(
                f"none of the {what} of exclude is in the run: exclude has "
                f"{label_at(labels, 0)}, ..., the run has {label_at(run_labels, 0)}, ...; use the "
                "same labels in both"
            )
        return places.at
    if labels is not None and (isinstance(labels, dict) or labels.dtype.kind not in "iu"):
        raise DataError(
            f"the {what} of exclude have labels ({label_at(labels, 0)}, ...), but those of the run "
            "do not; pass exclude without labels, in the order of the run"
        )
    # Keys of a table are positions if the run has no labels; some may be absent.
    keyed = run_labels is None and (labels is not None or data.source.kind in TABLES)
    if not keyed and data.shape[side] != shape[side]:
        raise DataError(
            f"exclude has shape {data.shape[0]} x {data.shape[1]}, but the run {shape[0]} x "
            f"{shape[1]}; pass all {what} of the run in their order, or labels for them"
        )
    positions = np.arange(data.shape[side]) if labels is None else labels
    return match_labels(positions, at.values).at


def _cells(data: BlockedData, block: Block, places: list[Ints]) -> tuple[Ints, Ints]:
    """Return the observed cells of a block, as positions among the requested rows and columns."""
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
    valid = (row >= 0) & (col >= 0)
    return row[valid], col[valid]


def _with_labels(best: Best, request: RankingRequest) -> xr.Dataset:
    """Return the best columns with the names and labels of rows and columns."""
    rows, columns = request.rows, request.columns
    row, column = str(rows.dims[0]), str(columns.dims[0])
    place = best.columns
    valid = place >= 0
    position = np.where(valid, columns.values[place], -1)
    labels = columns[column].values if column in columns.coords else columns.values
    chosen = _with_none(labels[place], valid)
    shape = (row, "rank")
    values: dict[str, Any] = {column: (shape, chosen), "position": (shape, position)}
    values |= {
        name: (shape, _with_none(columns[name].values[place], valid))
        for name in columns.attrs["levels"]
    }
    values |= {name: (shape, best.figures[..., at]) for at, name in enumerate(FIGURES)}
    return xr.Dataset(values, {**rows.coords, "rank": np.arange(1, place.shape[1] + 1)})


def _with_none(labels: Array, valid: NDArray[np.bool_]) -> Array:
    """Return labels with a missing label at ranks without a column."""
    if valid.all():
        return labels
    none: Any = {"U": "", "O": "", "T": "", "f": np.nan, "M": "NaT", "m": "NaT"}
    if labels.dtype.kind == "u":
        labels = labels.astype(np.int64)
    return np.where(valid, labels, np.array(none.get(labels.dtype.kind, -1)).astype(labels.dtype))
