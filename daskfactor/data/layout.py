"""The grid of blocks that a matrix gets: asked for, taken from the chunks, or from the shape."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from daskfactor.data.bands import Bands, Grid
from daskfactor.errors import OptionError

Chunks = tuple[tuple[int, ...], tuple[int, ...]]

SMALLEST_BLOCK = 16_384
LARGEST_BLOCK = 2**24
NARROWEST_BAND = 16
USUAL_BLOCKS = 8
MOST_BLOCKS = 64


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
