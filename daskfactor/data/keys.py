"""Entries on their way to blocks, and the positions that their row and column keys have.

Positions follow the order of the keys (numbers by size, texts by code point), so
that they do not depend on the order of the lines of a file.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import DaskfactorError, DataError, StoreError

Positions = NDArray[np.int64]


class Coded(NamedTuple):
    """Text keys: entry e has ``names[codes[e]]``."""

    codes: NDArray[np.integer[Any]]
    names: list[str]


Keys = Positions | Coded


class Piece(NamedTuple):
    """Some entries; ``values`` is None where only the keys were asked for."""

    rows: Keys
    cols: Keys
    values: NDArray[Any] | None


class KeysAreText(DaskfactorError):  # noqa: N818 - a message between two modules, never shown
    """A key that is no whole number was met after others that were; ``source`` gives texts."""

    def __init__(self, source: Any) -> None:
        super().__init__("keys are texts")
        self.source = source


@dataclass(frozen=True)
class Learnt:
    """Size of an axis, entries at each position, and its labels unless they are 0, 1, 2, ..."""

    size: int
    counts: NDArray[np.int64]
    labels: NDArray[Any] | None


class Axis(Protocol):
    """One axis: learns its keys in a first pass, gives their positions in a second one."""

    def learn(self, keys: Keys) -> None:
        """Take note of the keys of one piece."""

    def finish(self) -> Learnt:
        """Called between the passes."""

    def positions(self, keys: Keys) -> Positions:
        """Where the keys of one piece are, once finished. From any thread."""


class PositionAxis:
    """Keys that are positions from 0 to ``size - 1`` already."""

    def __init__(self, side: str, size: int) -> None:
        self._side = side
        self._counts = np.zeros(size, np.int64)

    def learn(self, keys: Keys) -> None:
        np.add.at(self._counts, self.positions(keys), 1)

    def finish(self) -> Learnt:
        return Learnt(self._counts.size, self._counts, None)

    def positions(self, keys: Keys) -> Positions:
        if isinstance(keys, Coded):
            raise _mixed(self._side)
        numbers = keys.astype(np.int64, copy=False)
        wrong = numbers[(numbers < 0) | (numbers >= self._counts.size)]
        if wrong.size:
            raise DataError(
                f"an entry is in {self._side} {wrong[0]}, but the matrix has "
                f"{self._side}s 0 to {self._counts.size - 1}; correct the source, or leave "
                "out shape if these numbers are names rather than positions"
            )
        return numbers


class KeyAxis:
    """Keys that are names: whole numbers such as user ids, or texts, as the first piece says."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._text: bool | None = None
        self._found: list[Any] = []
        self._index: Any = None

    def learn(self, keys: Keys) -> None:
        import pandas as pd

        text = isinstance(keys, Coded)
        if self._text not in (None, text):
            raise _mixed(self._side)
        if isinstance(keys, Coded):
            counts = np.bincount(keys.codes, minlength=len(keys.names))
            found = pd.Series(counts, pd.Index(keys.names, dtype=object))[counts > 0]
        else:
            found = pd.Series(keys).value_counts(sort=False)
        if found.size:
            self._text = text
            self._found.append(found)
        if sum(map(len, self._found[1:])) > len(self._found[0] if self._found else ()):
            self._merge()

    def finish(self) -> Learnt:
        if not self._found:
            return Learnt(0, np.zeros(0, np.int64), None)
        self._merge()
        self._index, counts = self._found[0].index, self._found[0].to_numpy(np.int64)
        self._index.get_indexer(self._index[:1])  # makes its table, before threads ask for it
        if self._text:
            return Learnt(counts.size, counts, text_array(self._index.tolist()))
        labels = self._index.to_numpy()
        counted = np.array_equal(labels, np.arange(labels.size))
        return Learnt(counts.size, counts, None if counted else labels)

    def positions(self, keys: Keys) -> Positions:
        import pandas as pd

        if isinstance(keys, Coded) != self._text:
            raise _mixed(self._side)
        if isinstance(keys, Coded):
            names = pd.Index(keys.names, dtype=object)
            out = self._index.get_indexer(names).astype(np.int64, copy=False)[keys.codes]
        else:
            out = self._index.get_indexer(keys).astype(np.int64, copy=False)
        if out.size and out.min() < 0:
            raise StoreError(
                f"the source has a {self._side} key that was not there when it was read the first "
                "time; it was changed meanwhile, so convert it again when nobody writes to it"
            )
        return np.asarray(out)

    def _merge(self) -> None:
        """Add up what was counted so far, in the order of the keys."""
        import pandas as pd

        self._found = [pd.concat(self._found).groupby(level=0).sum()]


def text_array(names: list[str]) -> NDArray[Any]:
    """Texts as an array of fixed width, or as objects where one long text would waste memory."""
    longest = max(map(len, names), default=0)
    roomy = longest > 64 and longest * len(names) > 4 * sum(map(len, names))
    found: NDArray[Any] = np.array(names, dtype=object if roomy else np.str_)
    return found


def _mixed(side: str) -> DataError:
    return DataError(
        f"the keys of {side}s are whole numbers in one file and texts in another; write them all "
        "as one type"
    )
