"""Bands of rows and columns, the grid of blocks they span, and which grid a matrix gets.

A grid is asked for, taken from the chunks, or follows from the shape. An order of rows and
columns balances it: all bands then hold about equally many entries.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import GridError, OptionError

Chunks = tuple[tuple[int, ...], tuple[int, ...]]

SMALLEST_BLOCK = 16_384
LARGEST_BLOCK = 2**24
NARROWEST_BAND = 16
USUAL_BLOCKS = 8
MOST_BLOCKS = 64


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


def choose_grid(
    shape: tuple[int, int],
    chunks: Chunks | None = None,
    blocks: int | None = None,
    workers: int | None = None,
    entries: int | None = None,
) -> Grid:
    """The grid for a matrix of this shape, stored in these chunks.

    ``blocks`` decides if it is given. Otherwise the chunk grid decides, if it
    has 2 to 64 chunks on both sides and not more than twice as many on one as on
    the other; otherwise the shape does, or for sparse data the number of ``entries``
    that are stored (`default_blocks`). Band edges fall on
    chunk edges wherever there are at least as many chunks as bands.
    """
    count = _checked(blocks, shape) if blocks is not None else None
    if chunks is None:
        return Grid.even(shape, count or default_blocks(shape, workers, entries))
    if count is None and not _square_enough(chunks):
        count = default_blocks(shape, workers, entries)
    return Grid.from_chunks(chunks, count)


def default_blocks(
    shape: tuple[int, int], workers: int | None = None, entries: int | None = None
) -> int:
    """B from the shape and the stored entries alone, so that every machine chooses the same.

    The largest power of two up to 8 that leaves at least 16,384 entries to a
    block and 16 rows and columns to a band, but at least 2 (1 if there is a
    single row or column); doubled, up to 64, while blocks hold more than 2^24
    entries. Where only ``entries`` of the matrix are stored, a block is counted as its
    share of them. ``workers`` raises B to two bands a worker as far as the same
    limits allow: only if the caller names a number, never by counting cores.
    """
    rows, cols = shape
    most = min(MOST_BLOCKS, min(rows, cols) // NARROWEST_BAND)
    count = min(2, rows, cols)

    def block(blocks: int) -> int:
        if entries is None:
            return (rows // blocks) * (cols // blocks)
        return entries // blocks**2

    while 2 * count <= min(USUAL_BLOCKS, most) and block(2 * count) >= SMALLEST_BLOCK:
        count *= 2
    while 2 * count <= most and block(count) > LARGEST_BLOCK:
        count *= 2
    if workers is not None:
        wanted = range(min(2 * workers, most), count, -1)
        count = next((b for b in wanted if block(b) >= SMALLEST_BLOCK), count)
    return count


def expand_chunks(shape: Sequence[int], chunk: Sequence[int]) -> Chunks:
    """Lengths of all chunks of a regular chunk grid, the last ones cut at the edge."""
    rows, cols = (
        tuple(min(step, size - start) for start in range(0, size, step))
        for size, step in zip(shape, chunk, strict=True)
    )
    return rows, cols


def chunk_bands(shape: tuple[int, int], chunks: Chunks | None, grid: Grid) -> tuple[Bands, Bands]:
    """Bands that a source is best read in: its chunks, or the blocks where it has none."""
    if chunks is None:
        return grid.rows, grid.cols
    return Bands.from_sizes(chunks[0]), Bands.from_sizes(chunks[1])


def _checked(blocks: SupportsIndex, shape: tuple[int, int]) -> int:
    allowed = min(shape)
    try:
        count = 0 if isinstance(blocks, bool) else operator.index(blocks)
    except TypeError:
        count = 0
    if not 1 <= count <= allowed:
        raise OptionError(
            f"blocks must be a whole number from 1 to {allowed}, the shorter side of a "
            f"{shape[0]} x {shape[1]} matrix, got {blocks!r}; leave it out for a default"
        )
    return count


def _square_enough(chunks: Chunks) -> bool:
    few, many = sorted((len(chunks[0]), len(chunks[1])))
    return few >= 2 and many <= min(MOST_BLOCKS, 2 * few)


def balanced_order(
    counts: NDArray[np.int64], bands: Bands, turning: bool = False
) -> NDArray[np.int64]:
    """Rows in an order that spreads ``counts`` evenly over ``bands``.

    Rows are dealt out in rounds from the longest to the shortest, the bands that
    hold the least come first, and those that hold much more wait. Rows of equal
    length keep their order, so that neighbours part; inside a band rows ascend.
    The same counts and bands always give the same order.

    Parameters
    ----------
    counts
        (I,) entries of every row.
    bands
        Bands of the I rows, of any lengths.
    turning
        Rounds go to and fro over the bands, or, if this is True, begin one band
        further each time. Pass True for one of the two sides of a matrix, so that
        row i and column i part even if they are dealt out alike: the diagonal of a
        symmetric matrix would come to B of its B^2 blocks otherwise.

    Returns
    -------
    numpy.ndarray
        (I,) int64: the row that comes to each position.
    """
    longest_first = np.argsort(-counts, kind="stable")
    room, load = np.array(bands.sizes), np.zeros(len(bands), np.int64)
    band = np.empty(bands.size, np.int64)
    dealt = rounds = 0
    while dealt < bands.size:
        open_bands = np.flatnonzero(room)
        by_load = open_bands[np.argsort(load[open_bands], kind="stable")]
        behind, height = _receivers(load[by_load], int(counts[longest_first[dealt]]))
        by_load = by_load[:behind]
        # Loads are looked at again after every round at first, later after many.
        height = min(height, 1 + rounds // 16, int(room[by_load].min()))
        deal = _deal(by_load, rounds, height, turning)
        part = longest_first[dealt : dealt + deal.size]
        band[part] = deal
        load += np.bincount(deal, counts[part], len(bands)).astype(np.int64)
        room[by_load] -= height
        dealt, rounds = dealt + deal.size, rounds + height
    return np.argsort(band, kind="stable")


def _receivers(loads: NDArray[np.int64], row: int) -> tuple[int, int]:
    """How many of the bands are next, given ascending loads, and for how many rows like this one.

    A band that is more than a row ahead of the last one waits until that has caught up.
    """
    behind = int(np.searchsorted(loads, loads[0] + row, side="right"))
    if behind == loads.size or row == 0:  # rows of nothing may go anywhere
        return loads.size, 2**62
    return behind, max(1, int(loads[behind] - loads[0]) // row)


def _deal(bands: NDArray[np.int64], first: int, height: int, turning: bool) -> NDArray[np.int64]:
    """The bands that ``height`` rounds go over, one after another."""
    turn = np.arange(first, first + height)[:, None]
    place = np.arange(bands.size)[None, :]
    if turning:
        place = (place + turn // 2) % bands.size
    elif height > 1:
        place = np.where(turn % 2, bands.size - 1 - place, place)
    return np.asarray(bands[place.ravel()])


def inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position that every row comes to."""
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return position
