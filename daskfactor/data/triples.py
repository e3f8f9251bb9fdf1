"""Sparse matrices in memory as streams of (row, column, value) triples, a piece at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.keys import Keys
from daskfactor.data.labels import Labels, SourceInfo

PIECE = 2**19
"""Entries that are handled together: 25 MB or so on their way through."""


class Piece(NamedTuple):
    """Some triples; ``values`` is None where only the keys were asked for."""

    rows: Keys
    cols: Keys
    values: NDArray[Any] | None


@dataclass(frozen=True)
class TripleSource:
    """Something that yields the same triples in the same order as often as it is asked.

    Attributes
    ----------
    info
        What it is and where.
    pieces
        Called with True yields keys and values, with False keys alone.
    shape
        (I, J) if keys are positions; None if they are names to be learnt.
    labels
        Labels of rows and columns, or, where they are learnt, the names of the dimensions.
    entries
        How many triples there are, if that is known before they are read.
    unstored
        What the source itself says about entries that it does not store.
    as_text
        Called when keys that looked like numbers turn out not to be; the source then
        gives texts. None where that cannot happen.
    """

    info: SourceInfo
    pieces: Callable[[bool], Iterator[Piece]]
    shape: tuple[int, int] | None = None
    labels: Labels = field(default_factory=Labels)
    entries: int | None = None
    unstored: str | None = None
    as_text: Callable[[], None] | None = None


class KeysAreText(Exception):  # noqa: N818 - a message between two modules, never shown
    """A key that is no whole number was met after others that were."""


def compressed_pieces(
    indptr: NDArray[Any], indices: Any, data: Any, by_row: bool, with_values: bool
) -> Iterator[Piece]:
    """Pieces of compressed rows (or columns) whose arrays may lie in a file."""
    total = int(indptr[-1])
    for start in range(int(indptr[0]), total, PIECE):
        stop = min(start + PIECE, total)
        first = int(np.searchsorted(indptr, start, side="right")) - 1
        last = int(np.searchsorted(indptr, stop, side="left"))
        edges = np.clip(indptr[first : last + 1].astype(np.int64), start, stop)
        major = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(edges))
        minor = np.asarray(indices[start:stop]).astype(np.int64)
        values = np.asarray(data[start:stop]) if with_values else None
        yield Piece(major, minor, values) if by_row else Piece(minor, major, values)


def coordinate_pieces(
    rows: NDArray[Any], cols: NDArray[Any], data: NDArray[Any], with_values: bool
) -> Iterator[Piece]:
    """Pieces of three arrays of the same length."""
    for start in range(0, data.size, PIECE):
        part = slice(start, start + PIECE)
        values = data[part] if with_values else None
        yield Piece(rows[part].astype(np.int64), cols[part].astype(np.int64), values)
