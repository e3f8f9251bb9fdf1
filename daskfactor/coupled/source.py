"""Several matrices that share factors, coupled as one joint matrix on one grid.

Every factor of a relation lies on one of the two sides of the joint matrix, after the other factors
of its side, and a relation occupies the rectangle of its two factors: matrices with the same rows
stand side by side, and in a chain (users x items, items x features) one matrix is transposed. Bands
end where factors do, so that a block belongs to one relation, or to none: then it stores no entry.
A sampler of a matrix in blocks thus samples all of them.

Rows of a factor that are missing from the same relations lie together, in separate bands, so that
such a relation has no blocks there. Each relation is divided by its mean, so that all have the same
scale.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.coupled.axes import Axis, Index, axes_of, factors_of, put_on_sides, refuse_doubles
from daskfactor.data.bands import band_of
from daskfactor.data.blocks import BlockedData, as_scipy, filled
from daskfactor.data.grid import Bands, Block, Grid, default_blocks, inverse
from daskfactor.data.labels import SIDES, JointLabels, Labels, stacked_labels
from daskfactor.data.opening import open_source
from daskfactor.data.sources import as_blocks, checked_options
from daskfactor.data.sparse import block_of
from daskfactor.data.statistics import DataInfo, Layout, SourceInfo, StatisticsBuilder
from daskfactor.data.storage import Storage, block_bytes
from daskfactor.errors import DataError, ModelError, OptionError, StoreError
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock, index_type
from daskfactor.machine import memory_budget

BY_ITSELF = "; pass as_blocks(V, ...) of those that need it, by name"


class Joint(NamedTuple):
    """Relation and its position in the joint matrix.

    Attributes
    ----------
    name, axes
        Name of the relation, and names of the factors of its rows and of its columns.
    turned
        True if the joint matrix holds it transposed: its rows among the columns.
    unit
        Number that its values were divided by.
    n_observed, mean, minimum, maximum, is_integer, unstored
        Statistics of its values before the division.
    """

    name: str
    axes: tuple[str, str]
    turned: bool
    unit: float
    n_observed: int
    mean: float
    minimum: float
    maximum: float
    is_integer: bool
    unstored: str | None


class CoupledData(BlockedData):
    """Several matrices on the blocks of a joint one.

    Attributes
    ----------
    joints : tuple of Joint
        The relations, in the order of the data.
    axes : dict of Axis
        The factors by name.
    owner : numpy.ndarray
        Number of the relation that a block belongs to, (B, B); -1: none.
    """

    joints: tuple[Joint, ...] = ()
    axes: Mapping[str, Axis]
    owner: NDArray[np.int64]

    @cached_property
    def placed(self) -> dict[str, Any]:
        """Return relations, factors and owners of blocks, as results keep them in JSON."""
        return {
            "relations": [item._asdict() for item in self.joints],
            "factors": {
                name: {"side": item.side, "span": item.span, "labels": item.kind}
                for name, item in self.axes.items()
            },
            "owner": self.owner.tolist(),
        }

    def missing_cells(self) -> tuple[Index, Index]:
        """Refuse to list missing cells, which would include blocks of no relation."""
        raise OptionError(
            "missing cells of several matrices are named matrix by matrix, for example "
            f'monitor={{"{self.joints[0].name}": (rows, columns)}}'
        )

    def cells_of(self, name: str, rows: Index, cols: Index) -> tuple[Index, Index]:
        """Return cells of a relation, by positions in it, as cells of the joint matrix."""
        (joint,) = (item for item in self.joints if item.name == name)
        cells: list[Any] = [None, None]
        for axis_name, positions in zip(joint.axes, (rows, cols), strict=True):
            axis = self.axes[axis_name]
            places = axis.places[name]
            where = np.full(int(places.max()) + 1, -1, np.int64)
            where[places[places >= 0]] = np.flatnonzero(places >= 0)
            cells[axis.side] = axis.start + where[positions]
        return cells[0], cells[1]

    def part_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of the matrix of a relation."""
        (joint,) = (item for item in self.joints if item.name == name)
        rows, cols = (int(self.axes[axis].places[name].max()) + 1 for axis in joint.axes)
        return rows, cols


def join(
    data: Any,
    relations: Mapping[str, Any] | None = None,
    blocks: int | Grid | None = None,
    *,
    dtype: Any = "float32",
    memory_limit: int | str | None = None,
    allow_empty: bool = False,
    unstored: str | Mapping[str, str | None] | None = None,
    **others: Any,
) -> CoupledData:
    """Put several matrices that share factors on the grid of a joint one.

    Parameters
    ----------
    data
        Matrices by name: a dict of anything that `as_blocks` takes, an xarray.Dataset, or a
        MuData.
    relations
        Objects by name with ``rows`` and ``columns``, the names of the factors of a matrix. None,
        or a name that is None, means the dimension names of the matrix.
    blocks, dtype, memory_limit, allow_empty, unstored
        As for `as_blocks`; ``unstored`` may differ by name.

    Raises
    ------
    DataError, OptionError, StoreError
        As from `as_blocks`; or rows of a shared factor do not match.
    ModelError
        If relations name missing matrices, or factors cannot be put on two sides.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            advice = "" if name in ("uncertainty", "weights") else BY_ITSELF
            raise OptionError(f"{name} cannot be given for several matrices{advice}")
    matrices, kind = _matrices(data), checked_options(dtype, None)
    _check_names(matrices, relations)
    if isinstance(unstored, Mapping) and (unknown := set(unstored) - set(matrices)):
        raise OptionError(
            f"unstored names {', '.join(map(repr, sorted(unknown)))}, and the matrices are "
            f"{', '.join(matrices)}"
        )
    limit = memory_budget(memory_limit)
    share = limit // (2 * len(matrices))  # all of them are in memory while the joint one is made
    parts: dict[str, BlockedData] = {}
    try:
        for name, V in matrices.items():
            with _naming(name):
                parts[name] = as_blocks(
                    V, dtype=kind, memory_limit=share, allow_empty=True,
                    unstored=_meaning(name, V, unstored),
                )  # fmt: skip
            parts[name].refuse_weights(f"a coupled matrix ({name!r})")
        return _couple(parts, dict(relations or {}), blocks, kind, limit, allow_empty)
    finally:
        for name, part in parts.items():
            if part is not matrices[name]:
                part.close()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the name of a matrix into errors."""
    try:
        yield
    except (DataError, OptionError, StoreError) as error:
        error.args = (f"{name!r}: {error}",)
        raise


def _matrices(data: Any) -> dict[str, Any]:
    """Return the matrices by name, from any container of several."""
    if type(data).__module__.partition(".")[0] in ("mudata", "muon"):
        data = data.mod
    if hasattr(data, "data_vars"):
        data = data.data_vars
    if not isinstance(data, Mapping) or not data:
        raise OptionError(
            "a coupled model takes several matrices: a dict of them by name, an xarray.Dataset or "
            f"a MuData, got {type(data).__name__}"
        )
    for name in data:
        if not isinstance(name, str) or not name or "/" in name:
            raise OptionError(f"names of matrices must be texts without a slash, got {name!r}")
    return dict(data)


def _check_names(matrices: Mapping[str, Any], relations: Mapping[str, Any] | None) -> None:
    if relations is not None and (unknown := set(relations) ^ set(matrices)):
        raise ModelError(
            f"the model has relations {', '.join(relations)}, and the data are "
            f"{', '.join(matrices)}: {', '.join(sorted(unknown))} is in one only; name them alike"
        )


def _meaning(name: str, V: Any, unstored: str | Mapping[str, str | None] | None) -> str | None:
    """Return the meaning of unstored entries of a matrix; None if it stores all of them."""
    if isinstance(unstored, Mapping):
        return unstored.get(name)
    if isinstance(V, BlockedData):
        return None
    return None if unstored == "missing" and not open_source(V).is_sparse else unstored


# -- the grid -------------------------------------------------------------------------------


def _grid(
    parts: Mapping[str, BlockedData],
    axes: Mapping[str, tuple[str, str]],
    factors: Sequence[Axis],
    blocks: int | Grid | None,
) -> Grid:
    """Choose bands that end where factors end, and where rows that a relation lacks begin."""
    sides = [[item for item in factors if item.side == side] for side in (0, 1)]
    groups = [[size for item in side for size in item.groups] for side in sides]
    shape = sum(groups[0]), sum(groups[1])
    if isinstance(blocks, Grid):
        edges = [set(np.cumsum(side).tolist()) for side in groups]
        if blocks.shape != shape or any(
            not edge <= set(item.offsets)
            for edge, item in zip(edges, (blocks.rows, blocks.cols), strict=True)
        ):
            raise OptionError(
                f"the grid is for other matrices: it has {blocks.shape} rows and columns, and the "
                f"joint matrix of these is {shape[0]} x {shape[1]}"
            )
        return blocks
    if len(parts) == 1 and blocks is None:
        (part,) = parts.values()
        return part.grid
    least = max(map(len, groups))
    if least > min(shape):
        raise DataError(
            f"the matrices need {least} bands on a side, one for each factor and for each set of "
            f"rows that the same matrices have, and the joint matrix is {shape[0]} x {shape[1]}: "
            "leave out rows that few of them have, or matrices"
        )
    if blocks is not None and not least <= blocks <= min(shape):
        raise OptionError(
            f"blocks must be from {least}, so that every factor has a band of its own, to "
            f"{min(shape)}, got {blocks!r}; leave it out for a default"
        )
    entries = sum(int(part.n_stored.sum()) for part in parts.values())
    count = blocks or min(max(default_blocks(shape, None, entries), least), *shape)
    loads = [[load for item in side for load in _loads(item, axes, parts)] for side in sides]
    rows, cols = (_bands(*both, count) for both in zip(groups, loads, strict=True))
    return Grid(rows, cols)


def _loads(
    axis: Axis, axes: Mapping[str, tuple[str, str]], parts: Mapping[str, BlockedData]
) -> list[int]:
    """Return the observed entries of each group of rows of a factor, in all relations."""
    total = np.zeros(axis.length, np.int64)
    for name, places in axis.places.items():
        counts = np.asarray(parts[name].counts(axes[name].index(axis.name)))
        order = (parts[name].row_order, parts[name].col_order)[axes[name].index(axis.name)]
        counts = counts if order is None else counts[inverse(order)]
        total += np.where(places >= 0, counts[places], 0)
    ends = np.cumsum([0, *axis.groups])
    ordered = np.concatenate([[0], np.cumsum(total[axis.order])])
    return [int(ordered[high] - ordered[low]) for low, high in itertools.pairwise(ends)]


def _bands(sizes: Sequence[int], loads: Sequence[int], count: int) -> Bands:
    """Distribute bands over runs of rows: at least one each, more to runs with more entries."""
    share = [1] * len(sizes)
    while sum(share) < count:
        open_runs = [run for run, size in enumerate(sizes) if share[run] < size]
        share[max(open_runs, key=lambda run: (loads[run] / share[run], -run))] += 1
    runs = zip(sizes, share, strict=True)
    cut = [Bands.even(size, run_bands).sizes for size, run_bands in runs]
    return Bands.from_sizes([length for lengths in cut for length in lengths])


# -- blocks ---------------------------------------------------------------------------------


def _couple(
    parts: Mapping[str, BlockedData],
    relations: Mapping[str, Any],
    blocks: int | Grid | None,
    dtype: Any,
    limit: int,
    allow_empty: bool,
) -> CoupledData:
    """Put the blocks of several matrices on the grid of the joint matrix."""
    axes = {name: axes_of(part, name, relations.get(name)) for name, part in parts.items()}
    refuse_doubles(axes)
    factors = factors_of(parts, axes)
    put_on_sides(axes, factors)
    by_name = {factor.name: factor for factor in factors}
    grid = _grid(parts, axes, factors, blocks)
    joints = {name: _joint(name, part, axes[name], by_name, parts) for name, part in parts.items()}
    spans = {name: _spans(joint, by_name, grid) for name, joint in joints.items()}
    owner = np.full((grid.blocks, grid.blocks), -1, np.int64)
    meaning: dict[Block, str | None] = dict.fromkeys(grid.all_blocks(), "missing")
    for number, (name, (rows, cols)) in enumerate(spans.items()):
        for block in itertools.starmap(Block, itertools.product(rows, cols)):
            owner[block], meaning[block] = number, parts[name].unstored
    kinds = set(meaning.values())
    layout = Layout(kinds.pop() if len(kinds) == 1 else meaning, *_orders(factors))
    alone = next(iter(parts)) if len(parts) == 1 else None
    labels = _labels(factors, [part.labels for part in parts.values()], alone)
    size = int(
        block_bytes(grid, dtype, None).sum()
        if layout.unstored is None
        else sum(part.nbytes for part in parts.values())
    )

    def views() -> Iterator[tuple[Block, AnyBlock]]:
        for name, joint in joints.items():
            yield from _cut(joint, parts[name], *spans[name], dtype)
        for block in map(Block._make, np.argwhere(owner < 0).tolist()):
            yield block, _empty(grid.block_shape(block), dtype)

    storage = Storage(grid, layout.unstored, nbytes=size, budget=limit)
    lazy = any(part.source.lazy for part in parts.values())

    def fill() -> DataInfo:
        builder = StatisticsBuilder(grid, labels, layout).scan_all(views(), storage.put)
        return builder.finish(SourceInfo("coupled", lazy=lazy), dtype, allow_empty)

    coupled = filled(storage, fill, make=CoupledData)
    coupled.joints, coupled.axes, coupled.owner = tuple(joints.values()), by_name, owner
    return coupled


def _joint(
    name: str,
    part: BlockedData,
    factors: tuple[str, str],
    axes: Mapping[str, Axis],
    parts: Mapping[str, BlockedData],
) -> Joint:
    """Return the description of a relation."""
    unit = part.level if part.level > 0 and len(parts) > 1 else 1.0
    return Joint(
        name,
        factors,
        axes[factors[0]].side == 1,
        unit,
        part.total_observed,
        part.mean,
        part.minimum,
        part.maximum,
        part.is_integer,
        part.unstored,
    )


def _orders(factors: Sequence[Axis]) -> tuple[Index | None, Index | None]:
    """Return the caller's row, and column, at each position of the grid; None if unchanged."""
    rows, cols = (
        np.concatenate([factor.start + factor.order for factor in factors if factor.side == side])
        for side in (0, 1)
    )
    same = all(np.array_equal(order, np.arange(order.size)) for order in (rows, cols))
    return (None, None) if same else (rows, cols)


def _labels(factors: Sequence[Axis], part_labels: Sequence[Labels], name: str | None) -> Labels:
    """Return the labels of both sides; those of several factors are text."""
    dims, coords = [], []
    for side in (0, 1):
        side_factors = [axis for axis in factors if axis.side == side]
        if len(side_factors) == 1:
            dims.append(side_factors[0].name)
            coords.append(
                {}
                if side_factors[0].labels is None
                else {side_factors[0].name: side_factors[0].labels}
            )
            continue
        dims.append(SIDES[side])
        coords.append(
            stacked_labels(SIDES[side], [(a.name, a.length, a.labels) for a in side_factors])
        )
    attrs = {
        dim: units for labels in part_labels for dim, units in labels.attrs.items() if dim in dims
    }
    return JointLabels(dims[0], dims[1], coords[0], coords[1], name, attrs)


Spans = dict[int, Index]
"""Bands of a side in which a relation has rows, and these rows of the relation."""


def _spans(joint: Joint, axes: Mapping[str, Axis], grid: Grid) -> tuple[Spans, Spans]:
    """Return the bands of a relation among the rows, and among the columns, of the joint matrix."""
    spans: tuple[Spans, Spans] = ({}, {})
    for axis in (axes[name] for name in joint.axes):
        bands = grid.sides[axis.side]
        for number in bands.numbers(slice(*axis.span)):
            span = bands.slice(number)
            rows = axis.places[joint.name][
                axis.order[span.start - axis.start : span.stop - axis.start]
            ]
            if rows[0] >= 0:
                spans[axis.side][number] = rows
    return spans


def _cut(
    joint: Joint, part: BlockedData, rows: Spans, cols: Spans, dtype: Any
) -> Iterator[tuple[Block, AnyBlock]]:
    """Yield the blocks of a relation in its unit, made from its own matrix band by band."""
    outer, inner = (cols, rows) if joint.turned else (rows, cols)
    for first, strip_rows in outer.items():
        strip = _strip(part, strip_rows)
        for second, strip_cols in inner.items():
            place = Block(second, first) if joint.turned else Block(first, second)
            yield place, _piece(strip, strip_cols, joint, dtype)


def _strip(part: BlockedData, rows: Index) -> Any:
    """Return some rows of a matrix, dense or compressed, with columns in the caller's order."""
    band, place = part._placed(rows, 0)
    pieces, order = [], np.empty(0, np.int64)
    for number in np.unique(band):
        which = np.flatnonzero(band == number)
        view = band_of(part, True, int(number))
        matrix: Any = as_scipy(view) if isinstance(view, SparseBlock) else view.block
        pieces.append(matrix[place[which]])
        order = np.concatenate([order, which])
    stacked: Any = (
        sparse.vstack(pieces, format="csr")
        if sparse.issparse(pieces[0])
        else np.concatenate(pieces)
    )
    stacked = stacked[inverse(order)]
    return stacked if part.col_order is None else stacked[:, inverse(part.col_order)]


def _piece(strip: Any, cols: Index, joint: Joint, dtype: Any) -> AnyBlock:
    """Return some columns of a strip as a block, transposed if the joint matrix requires it."""
    part: Any = strip[:, cols]
    part = part.T if joint.turned else part
    if sparse.issparse(part):
        rows = sparse.csr_array(cast("Any", part))
        rows.sort_indices()
        values = rows.data.astype(dtype) / dtype.type(joint.unit)
        return block_of(rows.indptr, rows.indices, values, rows.shape, joint.unstored == "zero")
    values = np.array(part, dtype, order="C")
    values /= dtype.type(joint.unit)
    return BlockView(values, 0, 0, *values.shape)


def _empty(shape: tuple[int, int], dtype: Any) -> SparseBlock:
    pointers, indices = np.zeros(shape[0] + 1, np.int32), np.empty(0, index_type(shape[1]))
    return SparseBlock(pointers, indices, np.empty(0, dtype), *shape, False)
