"""Balance: an order of rows and columns in which all bands hold about equally many entries."""

import numpy as np
from numpy.typing import NDArray

from daskfactor.grid.bands import Bands


def balanced_order(counts: NDArray[np.int64], bands: Bands) -> NDArray[np.int64]:
    """Rows in an order that spreads ``counts`` evenly over ``bands``.

    Rows are dealt out from the longest to the shortest, to and fro over the
    bands; rows of equal length keep their order, so that neighbours part. Inside
    a band rows stay in ascending order. The same counts and bands always give
    the same order.

    Parameters
    ----------
    counts
        (I,) entries of every row.
    bands
        Bands of the I rows, of any lengths.

    Returns
    -------
    numpy.ndarray
        (I,) int64: the row that comes to each position.
    """
    longest_first = np.argsort(-counts, kind="stable")
    sizes = np.array(bands.sizes)
    owner = np.repeat(np.arange(len(bands)), sizes)
    turn = np.arange(bands.size) - np.repeat(bands.offsets[:-1], sizes)
    # The k-th row of a band of n is dealt at time (k + 1/2)/n; odd rounds run backwards.
    time = (turn + 0.5) / sizes[owner]
    dealt = np.lexsort((np.where(turn % 2, -owner, owner), time))
    band = np.empty(bands.size, np.int64)
    band[longest_first] = owner[dealt]
    return np.argsort(band, kind="stable")


def inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position that every row comes to."""
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return position
