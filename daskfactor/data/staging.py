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

    A slab is a part of the first dimension of the rows and of the first dimension of the columns,
    and all of the other dimensions.

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
        self.cuts = tuple(
            (*range(0, shape[axis], step), shape[axis])
            for axis, step in ((0, height), (split, width))
        )
        size = math.prod(shape) * dtype.itemsize
        self._file = ArrayFile(budget=size) if in_memory else ArrayFile(reserve=size)
        self._boxes: list[tuple[Box, Any]] = []
        self._finalizer = weakref.finalize(self, self._file.close)

    def put(self, box: Box, values: NDArray[Any]) -> None:
        """Store a box of the array, cut into the pieces that lie in different slabs."""
        flat, start = np.empty(values.size, self._dtype), 0
        for piece in self._pieces(box):
            inside = tuple(
                slice(p.start - b.start, p.stop - b.start) for p, b in zip(piece, box, strict=True)
            )
            part = values[inside]
            flat[start : start + part.size] = part.reshape(-1)
            start += part.size
        self._boxes.append((box, self._file.put(flat)))

    def read(self, above: slice, left: slice) -> NDArray[Any]:
        """Return the array at some places of the first row and the first column dimension."""
        region = [slice(0, size) for size in self._shape]
        region[0], region[self._split] = above, left
        values = np.empty([part.stop - part.start for part in region], self._dtype)
        for box, stored in self._boxes:
            if not all(map(_overlap, box, region)):
                continue
            start = 0
            for piece in self._pieces(box):
                size = math.prod(part.stop - part.start for part in piece)
                if all(map(_overlap, piece, region)):
                    flat = self._file.get(stored, slice(start, start + size))
                    self._copy_overlap(values, region, piece, flat)
                start += size
        return values

    def _copy_overlap(
        self, out: NDArray[Any], region: list[slice], piece: Box, values: NDArray[Any]
    ) -> None:
        """Copy the part of a piece that lies in a region into an array of that region."""
        shape = [part.stop - part.start for part in piece]
        overlap = [
            slice(max(p.start, w.start), min(p.stop, w.stop))
            for p, w in zip(piece, region, strict=True)
        ]
        source, target = (
            tuple(
                slice(b.start - o.start, b.stop - o.start)
                for b, o in zip(overlap, origin, strict=True)
            )
            for origin in (piece, region)
        )
        out[target] = values.reshape(shape)[source]

    def _pieces(self, box: Box) -> Iterator[Box]:
        """Yield the parts of a box that lie in different slabs."""
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


def _overlap(one: slice, other: slice) -> bool:
    """Return whether two intervals overlap."""
    return bool(one.start < other.stop and other.start < one.stop)
