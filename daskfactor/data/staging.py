"""Scratch copy of an array with many dimensions, stored so that parts of a matrix can be read.

Chunks of such an array may cut its dimensions in any way, for example one longitude at all times
and latitudes. Neighbouring rows and columns of the matrix are then spread over all chunks. Every
chunk is read once, and its pieces are written next to each other to a scratch file; a part of the
matrix is assembled from the pieces that overlap it.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Bands
from daskfactor.data.storage import ArrayFile

Box = tuple[slice, ...]


def join_intervals(edges: Sequence[int], longest: int) -> Iterator[slice]:
    """Yield neighbouring intervals, joined up to a length; at least one interval each time."""
    start = edges[0]
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is None or following - start > longest:
            yield slice(start, edge)
            start = edge


def boxes(
    edges: Mapping[Any, Sequence[int]], order: Sequence[Any], entries: int
) -> dict[Any, list[slice]]:
    """Cut every dimension at chunk edges, so that boxes have about ``entries`` entries.

    Parameters
    ----------
    edges
        Edges of the chunks along each dimension.
    order
        The dimensions in storage order; chunks are joined along the last ones first.
    """
    lengths = {dim: max(np.diff(offsets).tolist()) for dim, offsets in edges.items()}
    parts = {}
    for dim in reversed(order):
        others = math.prod(length for other, length in lengths.items() if other != dim)
        parts[dim] = list(join_intervals(edges[dim], entries // max(1, others)))
        lengths[dim] = max(part.stop - part.start for part in parts[dim])
    return parts


class ScratchCopy:
    """Copy of an array that is written box by box, once, and read in slabs.

    A slab is a band of the first dimension of the rows and a band of the first dimension of the
    columns, and all of the other dimensions.

    Parameters
    ----------
    shape
        Sizes of the dimensions of rows, then of those of columns.
    split
        Number of dimensions that form the rows.
    dtype
        Type of the entries.
    entries
        Approximate number of entries in a slab.
    in_memory
        Keep the copy in memory, without a scratch file.
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
        self.bands = tuple(
            Bands((*range(0, shape[axis], step), shape[axis]))
            for axis, step in ((0, height), (split, width))
        )
        size = math.prod(shape) * dtype.itemsize
        self._file = ArrayFile(budget=size) if in_memory else ArrayFile(reserve=size)
        self._boxes: list[tuple[Box, Any, list[int]]] = []
        self._finalizer = weakref.finalize(self, self._file.close)

    def put(self, box: Box, values: NDArray[Any]) -> None:
        """Store a box of the array, slab by slab."""
        sides = zip(self.bands, (box[0], box[self._split]), strict=True)
        pieces = [
            values[self._at(rows, cols)].reshape(-1)
            for (_, _, rows), (_, _, cols) in itertools.product(*(b.overlaps(p) for b, p in sides))
        ]
        edges = [0, *itertools.accumulate(piece.size for piece in pieces)]
        flat = np.concatenate(pieces, dtype=self._dtype)
        self._boxes.append((box, self._file.put(flat), edges))

    def read(self, above: slice, left: slice) -> NDArray[Any]:
        """Return the array at some places of the first row and the first column dimension."""
        values = self._empty(above, left)
        sides = zip(self.bands, (above, left), strict=True)
        for row, col in itertools.product(*(bands.overlaps(part) for bands, part in sides)):
            slab = self._slab(row[0], col[0])
            values[self._at(row[2], col[2])] = slab[self._at(row[1], col[1])]
        return values

    def _slab(self, row: int, col: int) -> NDArray[Any]:
        """Return the slab of two bands, put together from the boxes that overlap it."""
        rows, cols = self.bands
        slab = self._empty(rows.slice(row), cols.slice(col))
        for box, stored, edges in self._boxes:
            row_numbers = rows.numbers(box[0])
            col_numbers = cols.numbers(box[self._split])
            if row not in row_numbers or col not in col_numbers:
                continue
            number = row_numbers.index(row) * len(col_numbers) + col_numbers.index(col)
            place = list(box)
            place[0] = rows.overlap(row, box[0])[0]
            place[self._split] = cols.overlap(col, box[self._split])[0]
            part = slab[tuple(place)]
            flat = self._file.get(stored, slice(*edges[number : number + 2]))
            part[...] = flat.reshape(part.shape)
        return slab

    def _empty(self, above: slice, left: slice) -> NDArray[Any]:
        """Return a new array for some places of the two dimensions, and all of the others."""
        shape = list(self._shape)
        shape[0], shape[self._split] = above.stop - above.start, left.stop - left.start
        return np.empty(shape, self._dtype)

    def _at(self, above: slice, left: slice) -> Box:
        """Return the index of some places of the two dimensions, and all of the others."""
        index = [slice(None)] * len(self._shape)
        index[0], index[self._split] = above, left
        return tuple(index)
