"""Factors that several matrices share: names, matching of rows by label, and sides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import DEFAULT_DIMS, RESERVED
from daskfactor.errors import DataError, ModelError

Index = NDArray[np.int64]


@dataclass
class Axis:
    """Factor of several relations: its length, its labels, and the rows of each relation.

    ``side`` is 0 if the factor lies among the rows of the joint matrix and 1 among its columns;
    ``start`` is its first position there. ``places`` gives, by relation, the position in it of
    every row, -1 if the relation lacks the row. ``groups`` are the lengths of runs of ``order``
    whose rows occur in the same relations.
    """

    name: str
    length: int
    labels: NDArray[Any] | None
    places: dict[str, Index]
    side: int = 0
    start: int = 0
    order: Index = field(default_factory=lambda: np.empty(0, np.int64))
    groups: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Sort the rows by the relations that have them, otherwise in their first order."""
        present = np.stack([positions >= 0 for positions in self.places.values()])
        codes = np.unique(present, axis=1, return_inverse=True)[1].ravel()
        self.order = np.argsort(codes, kind="stable").astype(np.int64)
        self.groups = [int(size) for size in np.bincount(codes)]

    @property
    def kind(self) -> str | None:
        """Return the NumPy type string of the labels; None without labels."""
        return None if self.labels is None else self.labels.dtype.str

    @property
    def span(self) -> tuple[int, int]:
        """Return the first position on its side, and the position after the last."""
        return self.start, self.start + self.length


def axes_of(part: BlockedData, name: str, relation: Any) -> tuple[str, str]:
    """Return the names of the factors of a matrix's rows and columns.

    Names come from the relation, else from the labels of the matrix, else from defaults.
    """
    labels, has_names = part.labels, part.source.kind in ("xarray", "netcdf")
    default_rows = labels.row_dim
    default_columns = labels.col_dim if has_names and labels.col_dim != DEFAULT_DIMS[1] else name
    rows = getattr(relation, "rows", None) or default_rows
    columns = getattr(relation, "columns", None) or default_columns
    for factor in (rows, columns):
        if factor in RESERVED:
            raise ModelError(
                f"a factor of {name!r} is called {factor!r}, a name that is reserved for results; "
                f'pass another name, Relation("rows", "columns"), or rename the dimension'
            )
    if rows == columns:
        raise ModelError(
            f"the rows and the columns of {name!r} are one factor, {rows!r}; name two, or see "
            "AllocationModel.symmetric_nmf"
        )
    return rows, columns


def factors_of(parts: Mapping[str, BlockedData], axes: Mapping[str, tuple[str, str]]) -> list[Axis]:
    """Match the rows of all relations of a factor, by their labels where they have any."""
    members: dict[str, list[tuple[str, int]]] = {}
    for name, sides in axes.items():
        for side, axis in enumerate(sides):
            members.setdefault(axis, []).append((name, side))
    return [
        _matched(axis, [(n, parts[n], side) for n, side in sides])
        for axis, sides in members.items()
    ]


def _refuse_other_orders(
    axis: str, members: Sequence[tuple[str, BlockedData, int]], labels: Sequence[Any]
) -> None:
    """Refuse to match rows by position if their labels differ."""
    indexes = [index for index in labels if index is not None]
    levels = any(isinstance(part.labels.keys[side], dict) for _, part, side in members)
    if len(members) > 1 and levels:
        raise DataError(
            f"{axis} have several levels of labels, by which matrices cannot be matched; combine "
            "the levels into one label, for example a text"
        )
    if any(not np.array_equal(index, indexes[0]) for index in indexes[1:]):
        raise DataError(
            f"{axis} have labels in different orders, or different ones, and one of the matrices "
            "has none to be matched by; give it labels, too"
        )


def _matched(axis: str, members: Sequence[tuple[str, BlockedData, int]]) -> Axis:
    import pandas as pd

    labels = [part.labels.index[side] for _, part, side in members]
    lengths = [part.shape[side] for _, part, side in members]
    first = next((index for index in labels if index is not None), None)
    if first is None or any(index is None for index in labels):
        if len(set(lengths)) > 1:
            sizes = ", ".join(
                f"{length} of {name!r}" for length, (name, *_) in zip(lengths, members, strict=True)
            )
            raise DataError(
                f"the matrices differ in the size of {axis!r}: {sizes}, and not all have labels to "
                "match them by; give all of them labels (xarray, pandas, AnnData), or one size"
            )
        _refuse_other_orders(axis, members, labels)
        every = np.arange(lengths[0])
        return Axis(axis, lengths[0], first, {name: every for name, *_ in members})
    indexes = [pd.Index(np.asarray(index)) for index in labels]
    for pandas_index, (name, *_) in zip(indexes, members, strict=True):
        if not pandas_index.is_unique:
            twice = pandas_index[pandas_index.duplicated()][0]
            raise DataError(
                f"{axis} of {name!r} have the label {twice!s} more than once, so that they cannot "
                "be matched with those of other matrices; make labels unique"
            )
    union = indexes[0]
    for pandas_index in indexes[1:]:
        union = union.append(pandas_index.difference(union, sort=False))
    places = {
        name: pandas_index.get_indexer(union).astype(np.int64)
        for pandas_index, (name, *_) in zip(indexes, members, strict=True)
    }
    _refuse_disjoint(axis, places, dict(zip(places, indexes, strict=True)))
    return Axis(axis, len(union), union.to_numpy(), places)


def _refuse_disjoint(axis: str, places: Mapping[str, Index], labels: Mapping[str, Any]) -> None:
    """Refuse a relation that shares no label with the others, as when spellings differ."""
    relations_per_row = np.sum([positions >= 0 for positions in places.values()], axis=0)
    for name, positions in places.items():
        if len(places) > 1 and not np.any(relations_per_row[positions >= 0] > 1):
            others = [other for other in places if other != name]
            examples = ", ".join(f"{labels[n][0]!r} of {n!r}" for n in (name, *others))
            raise DataError(
                f"{axis} of {name!r} and of {' or '.join(map(repr, others))} have no label in "
                f"common; first ones are {examples}"
            )


def put_on_sides(axes: Mapping[str, tuple[str, str]], factors: Sequence[Axis]) -> None:
    """Assign every factor to a side, so that each relation has one factor on either side.

    Raises
    ------
    ModelError
        If that is impossible, as for three factors with a relation between any two.
    """
    side_of: dict[str, int] = {}
    left = dict(axes)
    while left:
        name = next((n for n, pair in left.items() if side_of.keys() & set(pair)), next(iter(left)))
        rows, columns = left.pop(name)
        if rows not in side_of and columns not in side_of:
            side_of[rows] = 0
        if rows in side_of:
            column_side = side_of.setdefault(columns, 1 - side_of[rows])
        else:
            side_of[rows], column_side = 1 - side_of[columns], side_of[columns]
        if column_side == side_of[rows]:
            raise ModelError(
                f"relations form an odd circle, which {name!r} ({rows} x {columns}) closes: "
                "factors cannot be put on two sides; leave one of these relations out"
            )
    ends = [0, 0]
    for axis in factors:
        axis.side = side_of[axis.name]
        axis.start = ends[axis.side]
        ends[axis.side] += axis.length


def refuse_doubles(axes: Mapping[str, tuple[str, str]]) -> None:
    """Refuse two relations between the same pair of factors."""
    seen: dict[frozenset[str], str] = {}
    for name, pair in axes.items():
        other = seen.setdefault(frozenset(pair), name)
        if other != name:
            raise ModelError(
                f"{other!r} and {name!r} relate the same factors, {pair[0]} and {pair[1]}; only "
                "one matrix per pair of factors is supported: pass other factor names, or the sum "
                "of the matrices"
            )
