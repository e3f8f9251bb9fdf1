"""Balance: an order of rows and columns in which all bands hold about equally many entries."""

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.bands import Bands


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
