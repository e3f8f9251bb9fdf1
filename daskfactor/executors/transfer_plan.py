"""Which arrays of a column band have to be where: only what an operation touches travels.

A band's values go to every operation. Of the arrays that a sampler keeps beside
them, some are never changed in a plan (they are copied to every worker once), some
are touched by a cycle's last operation alone (they go straight to the next worker
that needs them), and some not at all (they stay with the client).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.plan import Op, Round
from daskfactor.executors.state import Array, FactorBand


@runtime_checkable
class Sparing(Protocol):
    """A program that says which of a band's arrays its operations touch.

    Both must be the same for all operations of a round. Of a program that does not
    say, every operation is taken to change every array.
    """

    def touches(self, op: Op) -> Collection[str]:
        """Names of the arrays that an operation reads or writes."""
        ...

    def changes(self, op: Op) -> Collection[str]:
        """Names of the arrays that an operation writes; all of them are touched, too."""
        ...


class Travel(NamedTuple):
    """The arrays of column bands during a plan.

    Attributes
    ----------
    needed
        By round, the changing arrays that its operations touch.
    following
        By name of such an array and by round, the next round that needs it; the
        number of rounds where none does.
    constant
        Arrays that are read but never changed.
    touched, changed
        All that operations touch, and all that they change.
    """

    needed: tuple[frozenset[str], ...]
    following: dict[str, NDArray[np.int32]]
    constant: frozenset[str]
    touched: frozenset[str]
    changed: frozenset[str]

    def due(self, name: str, number: int) -> int | None:
        """The first round after a round (from -1 on) that needs an array; None if none does.

        An array that nobody has heard of is needed always: an operation made it.
        """
        if name not in self.following:
            return number + 1 if number + 1 < len(self.needed) else None
        found = int(self.following[name][number + 1])
        return found if found < len(self.needed) else None

    def of_row(self, band: FactorBand) -> FactorBand:
        """A row band with what operations touch."""
        return only(band, [name for name in band.arrays if name in self.touched])

    def changed_of(self, band: FactorBand) -> FactorBand:
        """A band with what operations may have changed."""
        return only(band, [name for name in band.arrays if name not in self.constant])

    def constants_of(self, band: FactorBand) -> dict[str, Array]:
        """What every worker gets of a column band once."""
        return {name: band.arrays[name] for name in sorted(self.constant & band.arrays.keys())}

    def first_due(self, band: FactorBand) -> dict[int, FactorBand]:
        """A column band's values and what round 0 needs, and the other arrays by first need."""
        parts = {0: only(band, ())}
        for name, array in band.arrays.items():
            due = self.due(name, -1) if name in self.following else None
            if due is not None:
                part = parts.setdefault(due, late(band, {}))
                part.arrays[name] = array
        return parts


def only(band: FactorBand, names: Collection[str]) -> FactorBand:
    """A band with some of its arrays."""
    arrays = {name: band.arrays[name] for name in names}
    return FactorBand(band.offset, band.values, arrays, band.counts, band.draws, band.sums)


def late(band: FactorBand, arrays: dict[str, Array]) -> FactorBand:
    """Arrays of a band that go without its values."""
    return FactorBand(band.offset, band.values[:0], arrays)


def travel_of(plan: Sequence[Round], program: object, bands: Sequence[FactorBand]) -> Travel:
    """What a program's operations need of column bands, round by round."""
    names = frozenset().union(*(band.arrays for band in bands))
    if isinstance(program, Sparing):
        touched = [frozenset(program.touches(part.ops[0])) for part in plan]
        changed = frozenset().union(*(program.changes(part.ops[0]) for part in plan))
    else:
        touched, changed = [names] * len(plan), names
    every = frozenset().union(*touched)
    needed = tuple(found & changed for found in touched)
    following = {}
    for name in sorted(changed):
        rounds = np.array([name in found for found in needed], bool)
        ahead = np.where(rounds, np.arange(len(plan)), len(plan))
        following[name] = np.minimum.accumulate(ahead[::-1])[::-1].astype(np.int32)
        following[name] = np.append(following[name], np.int32(len(plan)))
    return Travel(needed, following, every - changed, every, changed)
