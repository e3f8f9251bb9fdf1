"""The two axes of a table of triples: which keys there are, and the position of each.

Positions follow the order of the keys (numbers by size, texts by code point), so
that they do not depend on the order of the lines of a file.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DataError, StoreError
from daskfactor.kernels.triples import count_keys, look_up

Positions = NDArray[np.int64]

LARGEST_TABLE = 2**25
"""Whole-number keys that span no more than this are looked up in a table, others in a hash."""


class Coded(NamedTuple):
    """Text keys: entry e has ``names[codes[e]]``."""

    codes: NDArray[np.integer[Any]]
    names: list[str]


Keys = Positions | Coded


class Axis(Protocol):
    """One axis: learns its keys in a first pass, gives their positions in a second one."""

    def learn(self, keys: Keys) -> None:
        """Take note of the keys of one piece."""

    def finish(self) -> "Learnt":
        """Called between the passes."""

    def positions(self, keys: Keys) -> Positions:
        """Where the keys of one piece are, once finished. From any thread."""


@dataclass(frozen=True)
class Learnt:
    """Size of an axis, entries at each position, and its labels unless they are 0, 1, 2, ..."""

    size: int
    counts: NDArray[np.int64]
    labels: NDArray[Any] | None


class PositionAxis:
    """Keys that are positions from 0 to ``size - 1`` already."""

    def __init__(self, side: str, size: int) -> None:
        self._side = side
        self._counts = np.zeros(size, np.int64)

    def learn(self, keys: Keys) -> None:
        count_keys(self._checked(keys), 0, self._counts)

    def finish(self) -> Learnt:
        return Learnt(self._counts.size, self._counts, None)

    def positions(self, keys: Keys) -> Positions:
        return self._checked(keys)

    def _checked(self, keys: Keys) -> Positions:
        numbers = _numbers(self._side, keys).astype(np.int64, copy=False)
        if numbers.size:
            low, high = int(numbers.min()), int(numbers.max())
            if low < 0 or high >= self._counts.size:
                raise DataError(
                    f"an entry is in {self._side} {low if low < 0 else high}, but the matrix has "
                    f"{self._side}s 0 to {self._counts.size - 1}; correct the source, or leave "
                    "out shape if these numbers are names rather than positions"
                )
        return numbers


class NumberAxis:
    """Whole-number keys such as user ids."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._low = 0
        self._counts: NDArray[np.int64] | None = np.zeros(0, np.int64)
        self._found: list[tuple[Positions, NDArray[np.int64]]] = []
        self._table = np.zeros(0, np.int32)
        self._index: Any = None

    def learn(self, keys: Keys) -> None:
        numbers = _numbers(self._side, keys)
        if numbers.size == 0:
            return
        if self._counts is not None and self._fits(int(numbers.min()), int(numbers.max())):
            count_keys(numbers, self._low, self._counts)
            return
        self._give_up_table()
        self._found.append(np.unique(numbers, return_counts=True))
        if len(self._found) > 1 and self._found[0][0].size < sum(
            found.size for found, _ in self._found[1:]
        ):
            self._merge()

    def finish(self) -> Learnt:
        if self._counts is None:
            import pandas as pd

            self._merge()
            labels, counts = self._found[0]
            self._index = pd.Index(labels)
        else:
            present = np.flatnonzero(self._counts)
            labels, counts = present + self._low, self._counts[present]
            self._table = np.full(self._counts.size, -1, np.int32)
            self._table[present] = np.arange(present.size, dtype=np.int32)
        counted = bool(np.array_equal(labels, np.arange(labels.size)))
        return Learnt(labels.size, counts, None if counted else labels)

    def positions(self, keys: Keys) -> Positions:
        numbers = _numbers(self._side, keys)
        if self._index is not None:
            out = np.asarray(self._index.get_indexer(numbers), np.int64)
            known = bool((out >= 0).all())
        else:
            out = np.empty(numbers.size, np.int64)
            known = bool(look_up(numbers, self._low, self._table, out))
        if not known:
            raise _changed(self._side)
        return out

    def _fits(self, low: int, high: int) -> bool:
        """Whether a table can hold these keys too; it is made larger if need be."""
        assert self._counts is not None
        if self._counts.size:
            low, high = min(low, self._low), max(high, self._low + self._counts.size - 1)
        if high - low >= LARGEST_TABLE:
            return False
        if high - low >= self._counts.size:
            grown = np.zeros(min(LARGEST_TABLE, (high - low + 1) * 2), np.int64)
            if self._counts.size:
                place = self._low - low
                grown[place : place + self._counts.size] = self._counts
            self._counts, self._low = grown, low
        return True

    def _give_up_table(self) -> None:
        if self._counts is not None:
            present = np.flatnonzero(self._counts)
            self._found.append((present + self._low, self._counts[present]))
            self._counts = None

    def _merge(self) -> None:
        keys = np.concatenate([found for found, _ in self._found])
        counts = np.concatenate([count for _, count in self._found])
        labels, place = np.unique(keys, return_inverse=True)
        total = np.zeros(labels.size, np.int64)
        np.add.at(total, place, counts)
        self._found = [(labels, total)]


class TextAxis:
    """Keys that are texts."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._counts: dict[str, int] = {}
        self._places: dict[str, int] = {}

    def learn(self, keys: Keys) -> None:
        coded = self._coded(keys)
        counts = np.bincount(coded.codes, minlength=len(coded.names)).tolist()
        known = self._counts
        for name, count in zip(coded.names, counts, strict=True):
            if count:
                known[name] = known.get(name, 0) + count

    def finish(self) -> Learnt:
        names = sorted(self._counts)
        counts = np.fromiter((self._counts[name] for name in names), np.int64, len(names))
        self._counts = {}
        self._places = {name: place for place, name in enumerate(names)}
        return Learnt(len(names), counts, text_array(names))

    def positions(self, keys: Keys) -> Positions:
        coded = self._coded(keys)
        places = (self._places.get(name, -1) for name in coded.names)
        table = np.fromiter(places, np.int64, len(coded.names))
        out: Positions = table[coded.codes]
        if out.size and out.min() < 0:
            raise _changed(self._side)
        return out

    def _coded(self, keys: Keys) -> Coded:
        if not isinstance(keys, Coded):
            raise _mixed(self._side)
        return keys


def axis_for(side: str, keys: Keys) -> Axis:
    """The kind of axis that the first piece calls for."""
    return TextAxis(side) if isinstance(keys, Coded) else NumberAxis(side)


def text_array(names: list[str]) -> NDArray[Any]:
    """Texts as an array of fixed width, or as objects where one long text would waste memory."""
    longest = max(map(len, names), default=0)
    roomy = longest > 64 and longest * len(names) > 4 * sum(map(len, names))
    found: NDArray[Any] = np.array(names, dtype=object if roomy else np.str_)
    return found


def _numbers(side: str, keys: Keys) -> Positions:
    if isinstance(keys, Coded):
        raise _mixed(side)
    return keys


def _mixed(side: str) -> DataError:
    return DataError(
        f"the keys of {side}s are whole numbers in one file and texts in another; write them all "
        "as one type"
    )


def _changed(side: str) -> StoreError:
    return StoreError(
        f"the source has a {side} key that was not there when it was read the first time; it was "
        "changed meanwhile, so convert it again when nobody writes to it"
    )
