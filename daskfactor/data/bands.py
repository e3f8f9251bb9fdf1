"""Bands: contiguous ranges of rows or columns, and the grid that two sets of them span."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from daskfactor.errors import GridError


class Block(NamedTuple):
    """Address of a block: its row band and its column band."""

    row: int
    col: int


@dataclass(frozen=True)
class Bands:
    """A partition of ``range(size)`` into contiguous, non-empty bands.

    ``offsets`` has one more element than there are bands; band ``b`` is
    ``range(offsets[b], offsets[b + 1])``.
    """

    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        offsets = self.offsets
        if len(offsets) < 2 or offsets[0] != 0:
            raise GridError(f"bands need offsets that start at 0, got {offsets!r}")
        if any(low >= high for low, high in itertools.pairwise(offsets)):
            raise GridError(f"bands must be non-empty and in order, got offsets {offsets!r}")

    @classmethod
    def even(cls, size: int, count: int) -> "Bands":
        """Split ``size`` rows into ``count`` bands whose lengths differ by at most one."""
        if not 1 <= count <= size:
            raise GridError(
                f"cannot split {size} rows or columns into {count} bands; "
                f"pass a number of blocks between 1 and {size}"
            )
        return cls(tuple(size * band // count for band in range(count + 1)))

    @classmethod
    def from_sizes(cls, sizes: Iterable[int]) -> "Bands":
        """Bands with the given lengths, as a chunk tuple of dask or zarr gives them."""
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + int(size))
        return cls(tuple(offsets))

    @property
    def size(self) -> int:
        return self.offsets[-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slice(self, band: int) -> slice:
        """The rows of one band."""
        return slice(self.offsets[band], self.offsets[band + 1])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Length of every band."""
        return tuple(high - low for low, high in zip(self.offsets, self.offsets[1:], strict=False))

    def regroup(self, count: int) -> "Bands":
        """At most ``count`` bands made of whole neighbouring bands, as equal as that allows."""
        if count >= len(self):
            return self
        edges = [0]
        for band in range(1, count):
            wanted = self.size * band / count
            allowed = range(edges[-1] + 1, len(self) - (count - band) + 1)
            edges.append(min(allowed, key=lambda edge: abs(self.offsets[edge] - wanted)))
        edges.append(len(self))
        return Bands(tuple(self.offsets[edge] for edge in edges))


@dataclass(frozen=True)
class Grid:
    """The grid of blocks that row bands and column bands span.

    Parts need as many row bands as column bands: every block of a part must
    have a row band and a column band of its own, and every band must be
    updated once in every part for the scale of the gradient to be right.
    """

    rows: Bands
    cols: Bands

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.cols):
            raise GridError(
                f"a grid needs as many row bands as column bands, got {len(self.rows)} row bands "
                f"and {len(self.cols)} column bands; pass one number of blocks for both"
            )

    @classmethod
    def even(cls, shape: tuple[int, int], blocks: int) -> "Grid":
        """``blocks`` x ``blocks`` nearly equal blocks over a matrix of this shape."""
        return cls(Bands.even(shape[0], blocks), Bands.even(shape[1], blocks))

    @classmethod
    def from_chunks(cls, chunks: Sequence[Sequence[int]], blocks: int | None = None) -> "Grid":
        """A square grid that respects a chunk grid wherever it can.

        Neighbouring chunks are grouped until both sides have the same number of
        bands; a side with fewer chunks than bands is split evenly instead.
        """
        rows, cols = Bands.from_sizes(chunks[0]), Bands.from_sizes(chunks[1])
        count = blocks if blocks is not None else min(len(rows), len(cols))
        return cls(_fit(rows, count), _fit(cols, count))

    @property
    def blocks(self) -> int:
        """B: the number of bands on each side, and of blocks in each part."""
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.size, self.cols.size

    def slices(self, block: Block) -> tuple[slice, slice]:
        """Rows and columns of one block."""
        return self.rows.slice(block.row), self.cols.slice(block.col)

    def block_shape(self, block: Block) -> tuple[int, int]:
        return self.rows.sizes[block.row], self.cols.sizes[block.col]

    def all_blocks(self) -> list[Block]:
        """Every block, row by row."""
        count = self.blocks
        return [Block(row, col) for row in range(count) for col in range(count)]


def _fit(bands: Bands, count: int) -> Bands:
    if count < 1:
        raise GridError(f"the number of blocks must be at least 1, got {count}")
    return bands.regroup(count) if count <= len(bands) else Bands.even(bands.size, count)
