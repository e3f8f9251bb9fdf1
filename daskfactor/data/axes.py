"""Factors that several matrices share: their names, rows matched by label, and on which side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.known import DEFAULT_DIMS, RESERVED
from daskfactor.errors import DataError, ModelError

Index = NDArray[np.int64]


@dataclass
class Axis:
    """A factor: its length, its labels, and where each relation has its rows.

    ``side`` is 0 among the rows of the joint matrix and 1 among its columns, ``start`` its first
    position there. ``places`` gives, by relation, the position in it of every row, -1 where it
    lacks that. ``groups`` are lengths of runs of ``order`` that the same relations have.
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
        """Put rows together that the same relations have, in the order that they came in."""
        present = np.stack([own >= 0 for own in self.places.values()])
        codes = np.unique(present, axis=1, return_inverse=True)[1].ravel()
        self.order = np.argsort(codes, kind="stable").astype(np.int64)
        self.groups = [int(size) for size in np.bincount(codes)]

    @property
    def kind(self) -> str | None:
        """The type of its labels, as NumPy writes it; None where it has none."""
        return None if self.labels is None else self.labels.dtype.str

    @property
    def span(self) -> tuple[int, int]:
        """First and last position on its side."""
        return self.start, self.start + self.length


def axes_of(part: BlockedData, name: str, relation: Any) -> tuple[str, str]:
    """Names of the factors of a matrix's rows and columns: asked for, its own, or usual ones."""
    labels, named = part.labels, part.source.kind in ("xarray", "netcdf")
    own_rows = labels.row_dim
    own_cols = labels.col_dim if named and labels.col_dim != DEFAULT_DIMS[1] else name
    rows = getattr(relation, "rows", None) or own_rows
    columns = getattr(relation, "columns", None) or own_cols
    for factor in (rows, columns):
        if factor in RESERVED:
            raise ModelError(
                f"a factor of {name!r} is called {factor!r}, as results call something else; give "
                f'it another name: Relation("rows", "columns"), or rename the dimension'
            )
    if rows == columns:
        raise ModelError(
            f"the rows and the columns of {name!r} are one factor, {rows!r}; name two, or see "
            "AllocationModel.symmetric_nmf"
        )
    return rows, columns


def factors_of(parts: Mapping[str, BlockedData], axes: Mapping[str, tuple[str, str]]) -> list[Axis]:
    """Match the rows of all relations of a factor, by their labels where they have any."""
    met: dict[str, list[tuple[str, int]]] = {}
    for name, own in axes.items():
        for side, axis in enumerate(own):
            met.setdefault(axis, []).append((name, side))
    return [_matched(axis, [(n, parts[n], side) for n, side in own]) for axis, own in met.items()]


def _refuse_other_orders(
    axis: str, met: Sequence[tuple[str, BlockedData, int]], labels: Sequence[Any]
) -> None:
    """Refuse to match by position what has labels that say otherwise."""
    known = [own for own in labels if own is not None]
    levels = any(isinstance(part.labels.keys[side], dict) for _, part, side in met)
    if len(met) > 1 and levels:
        raise DataError(
            f"{axis} have several levels of labels, by which matrices cannot be matched; make one "
            "label of them, for example a text"
        )
    if any(not np.array_equal(own, known[0]) for own in known[1:]):
        raise DataError(
            f"{axis} have labels in different orders, or different ones, and one of the matrices "
            "has none to be matched by; give it labels, too"
        )


def _matched(axis: str, met: Sequence[tuple[str, BlockedData, int]]) -> Axis:
    import pandas as pd

    labels = [part.labels.index[side] for _, part, side in met]
    lengths = [part.shape[side] for _, part, side in met]
    first = next((own for own in labels if own is not None), None)
    if first is None or any(own is None for own in labels):
        if len(set(lengths)) > 1:
            told = ", ".join(
                f"{length} of {name!r}" for length, (name, *_) in zip(lengths, met, strict=True)
            )
            raise DataError(
                f"the matrices differ in the size of {axis!r}: {told}, and not all have labels to "
                "match them by; give all of them labels (xarray, pandas, AnnData), or one size"
            )
        _refuse_other_orders(axis, met, labels)
        every = np.arange(lengths[0])
        return Axis(axis, lengths[0], first, {name: every for name, *_ in met})
    indexes = [pd.Index(np.asarray(own)) for own in labels]
    for index, (name, *_) in zip(indexes, met, strict=True):
        if not index.is_unique:
            twice = index[index.duplicated()][0]
            raise DataError(
                f"{axis} of {name!r} have the label {twice!s} more than once, so that they cannot "
                "be matched with those of other matrices; make labels unique"
            )
    union = indexes[0]
    for index in indexes[1:]:
        union = union.append(index.difference(union, sort=False))
    places = {
        name: index.get_indexer(union).astype(np.int64)
        for index, (name, *_) in zip(indexes, met, strict=True)
    }
    _refuse_strangers(axis, places, dict(zip(places, indexes, strict=True)))
    return Axis(axis, len(union), union.to_numpy(), places)


def _refuse_strangers(axis: str, places: Mapping[str, Index], labels: Mapping[str, Any]) -> None:
    """Refuse a relation that has no row which another has, as of labels that are written apart."""
    having = np.sum([own >= 0 for own in places.values()], axis=0)
    for name, own in places.items():
        if len(places) > 1 and not np.any(having[own >= 0] > 1):
            others = [other for other in places if other != name]
            told = ", ".join(f"{labels[n][0]!r} of {n!r}" for n in (name, *others))
            raise DataError(
                f"{axis} of {name!r} and of {' or '.join(map(repr, others))} have no label in "
                f"common; first ones are {told}"
            )


def put_on_sides(axes: Mapping[str, tuple[str, str]], factors: Sequence[Axis]) -> None:
    """Put every factor on one side, so that each relation has one on both.

    Raises
    ------
    ModelError
        If that cannot be, as of three factors with a relation between any two.
    """
    known: dict[str, int] = {}
    left = dict(axes)
    while left:
        name = next((n for n, own in left.items() if known.keys() & set(own)), next(iter(left)))
        rows, columns = left.pop(name)
        if rows not in known and columns not in known:
            known[rows] = 0
        if rows in known:
            found = known.setdefault(columns, 1 - known[rows])
        else:
            known[rows], found = 1 - known[columns], known[columns]
        if found == known[rows]:
            raise ModelError(
                f"relations go round in an odd circle, which {name!r} ({rows} x {columns}) closes: "
                "factors cannot be put on two sides; leave one of these relations out"
            )
    ends = [0, 0]
    for axis in factors:
        axis.side = known[axis.name]
        axis.start = ends[axis.side]
        ends[axis.side] += axis.length


def refuse_doubles(axes: Mapping[str, tuple[str, str]]) -> None:
    """Refuse two relations of one pair of factors."""
    seen: dict[frozenset[str], str] = {}
    for name, own in axes.items():
        other = seen.setdefault(frozenset(own), name)
        if other != name:
            raise ModelError(
                f"{other!r} and {name!r} relate the same factors, {own[0]} and {own[1]}; two "
                "relations of one pair are not to be had: name factors of their own, or add the "
                "matrices up"
            )
