"""Several matrices that share factors, as one matrix on one grid.

Every factor of a relation lies on one of the two sides of the joint matrix, behind the others of
its side, and a relation fills the rectangle of its two factors: views of the same rows stand
side by side, and a chain (users x items, items x features) is bent back, one of its matrices
turned. Bands end where factors do, so that a block belongs to one relation, or to none: then it
stores no entry. Whatever samples a matrix in blocks samples them all.

Rows of a factor that are missing from the same relations lie together, in bands of their own, so
that a relation has nothing there. Each relation is in units of its mean: all of them then have
the scale of one matrix.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.axes import Axis, Index, axes_of, factors_of, put_on_sides, refuse_doubles
from daskfactor.data.bands import band_of
from daskfactor.data.blocks import BlockedData, as_scipy
from daskfactor.data.grid import Bands, Block, Grid, default_blocks, inverse
from daskfactor.data.known import (
    Labels,
    Layout,
    SourceInfo,
    StatisticsBuilder,
)
from daskfactor.data.sources import as_blocks, checked_options, stores_all
from daskfactor.data.sparse import block_of
from daskfactor.data.storage import Storage, block_bytes
from daskfactor.errors import DataError, ModelError, OptionError, StoreError
from daskfactor.kernels.views import AnyBlock, BlockView, SparseBlock, index_type
from daskfactor.machine import memory_budget

BY_ITSELF = "; pass as_blocks(V, ...) of those that need it, by name"
SIDES = ("row", "column")
"""Dimensions of the joint matrix where several factors lie behind one another."""
LABEL = "{}_label"
"""Their labels, as text."""
FACTOR = "{}_factor"
"""Names of the factors that these are of."""


class JointLabels(Labels):
    """Labels of which a message tells the factor, too, where a side has several."""

    def _label(self, dim: str, coords: Mapping[str, NDArray[Any]], index: int) -> str:
        if (factor := coords.get(FACTOR.format(dim))) is None:
            return super()._label(dim, coords, index)
        return f" ({coords[LABEL.format(dim)][index]!s} of {factor[index]!s})"


class Joint(NamedTuple):
    """A relation in its place.

    Attributes
    ----------
    name, axes
        Of the relation, and of the factors of its rows and of its columns.
    turned
        Whether the joint matrix has it turned: its rows among the columns.
    unit
        What its values were divided by.
    n_observed, mean, minimum, maximum, is_integer, unstored
        Of its values as they were given.
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


class JoinedData(BlockedData):
    """Several matrices on the blocks of a joint one.

    Attributes
    ----------
    joints : tuple of Joint
        The relations, in the order that they were given.
    axes : dict of Axis
        The factors by name.
    owner : numpy.ndarray
        The number of the relation that a block belongs to, (B, B); -1: none.
    """

    joints: tuple[Joint, ...] = ()
    axes: Mapping[str, Axis]
    owner: NDArray[np.int64]

    @cached_property
    def placed(self) -> dict[str, Any]:
        """What results keep of it, as JSON can have it: relations, factors, and who has a block."""
        return {
            "relations": [own._asdict() for own in self.joints],
            "factors": {
                name: {"side": own.side, "span": own.span, "labels": own.kind}
                for name, own in self.axes.items()
            },
            "owner": self.owner.tolist(),
        }

    def missing_cells(self) -> tuple[Index, Index]:
        """Refuse: blocks of no relation would be among them."""
        raise OptionError(
            "missing cells of several matrices are named matrix by matrix, for example "
            f'monitor={{"{self.joints[0].name}": (rows, columns)}}'
        )

    def cells_of(self, name: str, rows: Index, cols: Index) -> tuple[Index, Index]:
        """Cells of a relation, by position in it, as cells of the joint matrix."""
        (joint,) = (own for own in self.joints if own.name == name)
        found: list[Any] = [None, None]
        for axis_name, given in zip(joint.axes, (rows, cols), strict=True):
            axis = self.axes[axis_name]
            places = axis.places[name]
            where = np.full(int(places.max()) + 1, -1, np.int64)
            where[places[places >= 0]] = np.flatnonzero(places >= 0)
            found[axis.side] = axis.start + where[given]
        return found[0], found[1]

    def part_shape(self, name: str) -> tuple[int, int]:
        """The shape of a relation as it was given."""
        (joint,) = (own for own in self.joints if own.name == name)
        rows, cols = (int(self.axes[axis].places[name].max()) + 1 for axis in joint.axes)
        return rows, cols


def join(
    given: Any,
    relations: Mapping[str, Any] | None = None,
    blocks: int | Grid | None = None,
    *,
    dtype: Any = "float32",
    memory_limit: int | str | None = None,
    allow_empty: bool = False,
    unstored: str | Mapping[str, str | None] | None = None,
    **others: Any,
) -> JoinedData:
    """Put several matrices that share factors on the grid of a joint one.

    Parameters
    ----------
    given
        Matrices by name: a dict of anything that `as_blocks` takes, an xarray.Dataset, or a
        MuData.
    relations
        By name, what has ``rows`` and ``columns``, the names of the factors of a matrix; None,
        or a name that is None: as the matrix's own labels have it.
    blocks, dtype, memory_limit, allow_empty, unstored
        As for `as_blocks`; ``unstored`` may differ by name.

    Raises
    ------
    DataError, OptionError, StoreError
        As from `as_blocks`; or rows that are to be the same do not match.
    ModelError
        If relations name matrices that are not there, or form no two sides.
    """
    for name, own in others.items():
        if own is not None and own is not False:
            advice = "" if name in ("uncertainty", "weights") else BY_ITSELF
            raise OptionError(f"{name} cannot be given for several matrices{advice}")
    matrices, kind = _matrices(given), checked_options(dtype, None)
    _check_names(matrices, relations)
    if isinstance(unstored, Mapping) and (unknown := set(unstored) - set(matrices)):
        raise OptionError(
            f"unstored names {', '.join(map(repr, sorted(unknown)))}, and the matrices are "
            f"{', '.join(matrices)}"
        )
    limit = memory_budget(memory_limit)
    share = limit // (2 * len(matrices))  # they are all there while the joint one is made
    parts: dict[str, BlockedData] = {}
    try:
        for name, V in matrices.items():
            with _naming(name):
                parts[name] = as_blocks(
                    V, dtype=kind, memory_limit=share, allow_empty=True,
                    unstored=_meaning(name, V, unstored),
                )  # fmt: skip
            parts[name].refuse_weights(f"a matrix beside others ({name!r})")
        return _joined(parts, dict(relations or {}), blocks, kind, limit, allow_empty)
    finally:
        for name, part in parts.items():
            if part is not matrices[name]:
                part.close()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say in an error of which matrix it is."""
    try:
        yield
    except (DataError, OptionError, StoreError) as error:
        error.args = (f"{name!r}: {error}",)
        raise


def _matrices(given: Any) -> dict[str, Any]:
    """Matrices by name, of whatever holds several."""
    if type(given).__module__.partition(".")[0] in ("mudata", "muon"):
        given = given.mod
    if hasattr(given, "data_vars"):
        given = given.data_vars
    if not isinstance(given, Mapping) or not given:
        raise OptionError(
            "a coupled model takes several matrices: a dict of them by name, an xarray.Dataset or "
            f"a MuData, got {type(given).__name__}"
        )
    for name in given:
        if not isinstance(name, str) or not name or "/" in name:
            raise OptionError(f"names of matrices must be texts without a slash, got {name!r}")
    return dict(given)


def _check_names(matrices: Mapping[str, Any], relations: Mapping[str, Any] | None) -> None:
    if relations is not None and (unknown := set(relations) ^ set(matrices)):
        raise ModelError(
            f"the model has relations {', '.join(relations)}, and the data are "
            f"{', '.join(matrices)}: {', '.join(sorted(unknown))} is in one only; name them alike"
        )


def _meaning(name: str, V: Any, unstored: str | Mapping[str, str | None] | None) -> str | None:
    """What entries mean that a matrix does not store; nothing where it stores them all."""
    if isinstance(unstored, Mapping):
        return unstored.get(name)
    if isinstance(V, BlockedData):
        return None
    return None if unstored == "missing" and stores_all(V) else unstored


# -- the grid -------------------------------------------------------------------------------


def _grid(
    parts: Mapping[str, BlockedData],
    axes: Mapping[str, tuple[str, str]],
    factors: Sequence[Axis],
    blocks: int | Grid | None,
) -> Grid:
    """Choose bands that end where factors do, and where rows that a relation lacks begin."""
    sides = [[own for own in factors if own.side == side] for side in (0, 1)]
    groups = [[size for own in side for size in own.groups] for side in sides]
    shape = sum(groups[0]), sum(groups[1])
    if isinstance(blocks, Grid):
        edges = [set(np.cumsum(side).tolist()) for side in groups]
        if blocks.shape != shape or any(
            not edge <= set(own.offsets)
            for edge, own in zip(edges, (blocks.rows, blocks.cols), strict=True)
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
    loads = [[load for own in side for load in _loads(own, axes, parts)] for side in sides]
    rows, cols = (_bands(*both, count) for both in zip(groups, loads, strict=True))
    return Grid(rows, cols)


def _loads(
    axis: Axis, axes: Mapping[str, tuple[str, str]], parts: Mapping[str, BlockedData]
) -> list[int]:
    """Observed entries of the rows of each group of a factor, in all relations."""
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
    """Share bands out among runs of rows: each one at least, then where most entries wait."""
    share = [1] * len(sizes)
    while sum(share) < count:
        open_runs = [run for run, size in enumerate(sizes) if share[run] < size]
        share[max(open_runs, key=lambda run: (loads[run] / share[run], -run))] += 1
    cut = [Bands.even(size, own).sizes for size, own in zip(sizes, share, strict=True)]
    return Bands.from_sizes([size for own in cut for size in own])


# -- blocks ---------------------------------------------------------------------------------


def _joined(
    parts: Mapping[str, BlockedData],
    relations: Mapping[str, Any],
    blocks: int | Grid | None,
    dtype: Any,
    limit: int,
    allow_empty: bool,
) -> JoinedData:
    axes = {name: axes_of(part, name, relations.get(name)) for name, part in parts.items()}
    refuse_doubles(axes)
    factors = factors_of(parts, axes)
    put_on_sides(axes, factors)
    by_name = {own.name: own for own in factors}
    grid = _grid(parts, axes, factors, blocks)
    joints, owner = list[Joint](), np.full((grid.blocks, grid.blocks), -1, np.int64)
    meaning: dict[Block, str | None] = {}
    for number, (name, part) in enumerate(parts.items()):
        turned = by_name[axes[name][0]].side == 1
        unit = part.level if part.level > 0 and len(parts) > 1 else 1.0
        told: Any = part.total_observed, part.mean, part.minimum, part.maximum
        told += part.is_integer, part.unstored
        joints.append(Joint(name, axes[name], turned, unit, *told))
        for block in _blocks_of(joints[-1], by_name, grid):
            owner[block], meaning[block] = number, part.unstored
    for block in grid.all_blocks():
        meaning.setdefault(block, "missing")
    kinds = set(meaning.values())
    layout = Layout(kinds.pop() if len(kinds) == 1 else meaning, *_orders(factors))
    alone = next(iter(parts)) if len(parts) == 1 else None
    labels = _labels(factors, [part.labels for part in parts.values()], alone)
    builder = StatisticsBuilder(grid, labels, layout)
    size = int(
        block_bytes(grid, dtype, None).sum()
        if layout.unstored is None
        else sum(part.nbytes for part in parts.values())
    )
    storage = Storage(grid, layout.unstored, nbytes=size, budget=limit)
    try:
        for joint in joints:
            for block, view in _cut(joint, parts[joint.name], by_name, grid, dtype):
                storage.put(block, view)
                builder.scan(block, view)
        for block in grid.all_blocks():
            if owner[block] < 0:
                empty = _empty(grid.block_shape(block), dtype)
                storage.put(block, empty)
                builder.scan(block, empty)
        lazy = any(part.source.lazy for part in parts.values())
        known = builder.finish(SourceInfo("coupled", lazy=lazy), dtype, allow_empty)
        made = JoinedData(known, storage)
    except BaseException:
        storage.close()
        raise
    made.joints, made.axes, made.owner = tuple(joints), by_name, owner
    return made


def _orders(factors: Sequence[Axis]) -> tuple[Index | None, Index | None]:
    """The caller's row, and column, at each position of the grid; None where all are the same."""
    rows, cols = (
        np.concatenate([own.start + own.order for own in factors if own.side == side])
        for side in (0, 1)
    )
    same = all(np.array_equal(own, np.arange(own.size)) for own in (rows, cols))
    return (None, None) if same else (rows, cols)


def _labels(factors: Sequence[Axis], given: Sequence[Labels], name: str | None) -> Labels:
    """Names of both sides: those of their one factor, or of factors and their labels as text."""
    dims, coords = [], []
    for side in (0, 1):
        own = [axis for axis in factors if axis.side == side]
        if len(own) == 1:
            dims.append(own[0].name)
            coords.append({} if own[0].labels is None else {own[0].name: own[0].labels})
            continue
        dims.append(SIDES[side])
        coords.append(stacked_labels(SIDES[side], [(a.name, a.length, a.labels) for a in own]))
    attrs = {dim: told for own in given for dim, told in own.attrs.items() if dim in dims}
    return JointLabels(dims[0], dims[1], coords[0], coords[1], name, attrs)


def stacked_labels(
    dim: str, factors: Sequence[tuple[str, int, NDArray[Any] | None]]
) -> dict[str, NDArray[Any]]:
    """Return coordinates of a side where factors (name, length, labels) are one behind another."""
    names, lengths, labels = zip(*factors, strict=True)
    texts = [
        (np.arange(length) if own is None else own).astype(str)
        for own, length in zip(labels, lengths, strict=True)
    ]
    return {
        FACTOR.format(dim): np.repeat(names, lengths),
        LABEL.format(dim): np.concatenate(texts),
    }


def _pieces(joint: Joint, axis: Axis, bands: Bands) -> Iterator[tuple[int, Index]]:
    """Bands of a factor in which a relation has rows: their number, and which rows these are."""
    for number in range(len(bands)):
        span = bands.slice(number)
        low, high = span.start - axis.start, span.stop - axis.start
        if low >= 0 and high <= axis.length and low < high:
            rows = axis.places[joint.name][axis.order[low:high]]
            if rows[0] >= 0:
                yield number, rows


def _by_side(joint: Joint, axes: Mapping[str, Axis], grid: Grid) -> list[dict[int, Index]]:
    """The same of both sides of the joint matrix."""
    found: list[dict[int, Index]] = [{}, {}]
    for name in joint.axes:
        side = axes[name].side
        found[side] = dict(_pieces(joint, axes[name], (grid.rows, grid.cols)[side]))
    return found


def _blocks_of(joint: Joint, axes: Mapping[str, Axis], grid: Grid) -> list[Block]:
    """The blocks that belong to a relation."""
    rows, cols = _by_side(joint, axes, grid)
    return [Block(row, col) for row in rows for col in cols]


def _cut(
    joint: Joint, part: BlockedData, axes: Mapping[str, Axis], grid: Grid, dtype: Any
) -> Iterator[tuple[Block, AnyBlock]]:
    """The blocks of a relation, in its unit, from those of its own matrix: a band at a time."""
    sides = _by_side(joint, axes, grid)
    outer, inner = sides[::-1] if joint.turned else sides
    for first, rows in outer.items():
        strip = _strip(part, rows)
        for second, cols in inner.items():
            place = Block(second, first) if joint.turned else Block(first, second)
            yield place, _piece(strip, cols, joint, dtype)


def _strip(part: BlockedData, rows: Index) -> Any:
    """Some rows of a matrix, as an array or as compressed rows, columns as the caller has them."""
    band, place = part._placed(rows, 0)
    found, order = [], np.empty(0, np.int64)
    for number in np.unique(band):
        which = np.flatnonzero(band == number)
        view = band_of(part, True, int(number))
        own: Any = as_scipy(view) if isinstance(view, SparseBlock) else view.block
        found.append(own[place[which]])
        order = np.concatenate([order, which])
    whole: Any = (
        sparse.vstack(found, format="csr") if sparse.issparse(found[0]) else np.concatenate(found)
    )
    whole = whole[inverse(order)]
    return whole if part.col_order is None else whole[:, inverse(part.col_order)]


def _piece(strip: Any, cols: Index, joint: Joint, dtype: Any) -> AnyBlock:
    """Some columns of a strip as a block, turned if the joint matrix has it so."""
    own: Any = strip[:, cols]
    own = own.T if joint.turned else own
    if sparse.issparse(own):
        rows = sparse.csr_array(cast("Any", own))
        rows.sort_indices()
        values = rows.data.astype(dtype) / dtype.type(joint.unit)
        return block_of(rows.indptr, rows.indices, values, rows.shape, joint.unstored == "zero")
    values = np.array(own, dtype, order="C")
    values /= dtype.type(joint.unit)
    return BlockView(values, 0, 0, *values.shape)


def _empty(shape: tuple[int, int], dtype: Any) -> SparseBlock:
    pointers, indices = np.zeros(shape[0] + 1, np.int32), np.empty(0, index_type(shape[1]))
    return SparseBlock(pointers, indices, np.empty(0, dtype), *shape, False)
