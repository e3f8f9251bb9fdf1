"""A local copy of an array of many dimensions, cut so that it can be read as a matrix.

Chunks of such an array may cut its dimensions in any way: one longitude at all times and
latitudes, for one. Neighbouring rows and columns of the matrix then lie in all chunks at once.
So every chunk is read once and its pieces are put side by side in a scratch file; a part of the
matrix is put together from the pieces that it needs.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.storage import ArrayFile

Box = tuple[slice, ...]


def joined(edges: Sequence[int], longest: int) -> Iterator[slice]:
    """Neighbouring intervals joined up to a length, at least one at a time."""
    start = edges[0]
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is None or following - start > longest:
            yield slice(start, edge)
            start = edge


def boxes(
    edges: Mapping[Any, Sequence[int]], order: Sequence[Any], entries: int
) -> dict[Any, list[slice]]:
    """Cut every dimension so that boxes are whole chunks, joined up to so many entries.

    Parameters
    ----------
    edges
        Of the chunks along each dimension.
    order
        The dimensions as they lie in storage: the last are joined first.
    """
    lengths = {dim: max(np.diff(own).tolist()) for dim, own in edges.items()}
    parts = {}
    for dim in reversed(order):
        others = math.prod(length for other, length in lengths.items() if other != dim)
        parts[dim] = list(joined(edges[dim], entries // max(1, others)))
        lengths[dim] = max(part.stop - part.start for part in parts[dim])
    return parts


class Stage:
    """An array whose boxes are put here once, to be read in slabs.

    A slab is a part of the first dimension of the rows and of the columns, and all of the others.

    Parameters
    ----------
    shape
        Sizes of the dimensions of rows, then of those of columns.
    split
        How many dimensions are rows.
    dtype
        Of the entries, as they are given.
    entries
        About as many make a slab.
    in_memory
        Whether it is small enough to be no file.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        split: int,
        dtype: np.dtype[Any],
        entries: int,
        in_memory: bool,
    ) -> None:
        self._shape, self._split, self._dtype = shape, split, dtype
        inner = math.prod(shape[1:split]) * math.prod(shape[split + 1 :])
        width = min(shape[split], max(1, entries // inner))
        height = min(shape[0], max(1, entries // (inner * width)))
        self.cuts = tuple(
            (*range(0, shape[axis], step), shape[axis])
            for axis, step in ((0, height), (split, width))
        )
        size = math.prod(shape) * dtype.itemsize
        self._file = ArrayFile(budget=size) if in_memory else ArrayFile(reserve=size)
        self._kept: list[tuple[Box, Any]] = []
        self._finalizer = weakref.finalize(self, self._file.close)

    def put(self, box: Box, values: NDArray[Any]) -> None:
        """Take over a box of the array: its pieces, slab by slab, one behind the other."""
        flat, start = np.empty(values.size, self._dtype), 0
        for piece in self._pieces(box):
            inside = tuple(
                slice(p.start - b.start, p.stop - b.start) for p, b in zip(piece, box, strict=True)
            )
            part = values[inside]
            flat[start : start + part.size] = part.reshape(-1)
            start += part.size
        self._kept.append((box, self._file.put(flat)))

    def read(self, above: slice, left: slice) -> NDArray[Any]:
        """All of some of the first dimension of the rows and of some of that of the columns."""
        wanted = [slice(0, size) for size in self._shape]
        wanted[0], wanted[self._split] = above, left
        found = np.empty([part.stop - part.start for part in wanted], self._dtype)
        for box, kept in self._kept:
            if not all(map(_meet, box, wanted)):
                continue
            start = 0
            for piece in self._pieces(box):
                size = math.prod(part.stop - part.start for part in piece)
                if all(map(_meet, piece, wanted)):
                    values = self._file.get(kept, slice(start, start + size))
                    self._place(found, wanted, piece, values)
                start += size
        return found

    def _place(
        self, found: NDArray[Any], wanted: list[slice], piece: Box, values: NDArray[Any]
    ) -> None:
        """Copy the part of a piece that is wanted to its place."""
        shape = [part.stop - part.start for part in piece]
        both = [
            slice(max(p.start, w.start), min(p.stop, w.stop))
            for p, w in zip(piece, wanted, strict=True)
        ]
        source, target = (
            tuple(
                slice(b.start - o.start, b.stop - o.start) for b, o in zip(both, own, strict=True)
            )
            for own in (piece, wanted)
        )
        found[target] = values.reshape(shape)[source]

    def _pieces(self, box: Box) -> Iterator[Box]:
        """The parts of a box in every slab that it meets."""
        cut = [
            [
                slice(max(low, box[axis].start), min(high, box[axis].stop))
                for low, high in itertools.pairwise(edges)
                if low < box[axis].stop and high > box[axis].start
            ]
            for axis, edges in zip((0, self._split), self.cuts, strict=True)
        ]
        for first, second in itertools.product(*cut):
            piece = list(box)
            piece[0], piece[self._split] = first, second
            yield tuple(piece)


def _meet(one: slice, other: slice) -> bool:
    """Whether two intervals have anything in common."""
    return bool(one.start < other.stop and other.start < one.stop)
