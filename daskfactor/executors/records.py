"""What column bands record on their way: it stays where it was recorded until the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from daskfactor.data.grid import Block
from daskfactor.executors.state import Array, Evaluation, FactorBand


@dataclass
class Records:
    """Draws and sums of column bands, by column; draws with the position they were recorded at."""

    draws: dict[int, list[tuple[int, list[Array]]]] = field(default_factory=dict)
    sums: dict[int, dict[int, float]] = field(default_factory=dict)

    def strip(self, col: int, position: int, band: FactorBand) -> None:
        """Take a band's records off it."""
        if band.draws:
            self.draws.setdefault(col, []).append((position, band.draws))
            band.draws = []
        if band.sums:
            self.sums.setdefault(col, {}).update(band.sums)
            band.sums = {}

    def copy(self) -> "Records":
        return Records(
            {col: list(parts) for col, parts in self.draws.items()},
            {col: dict(sums) for col, sums in self.sums.items()},
        )


class Moments(NamedTuple):
    """What an evaluation moves of a block's monitored cells."""

    mean: Array
    m2: Array
    number: int


@dataclass
class Outcome:
    """What one worker's part of a segment leaves behind.

    ``ended`` are arrays of column bands that were no longer needed, by column.
    """

    rows: dict[int, FactorBand]
    cols: dict[int, FactorBand]
    ended: dict[int, dict[str, Array]]
    cells: dict[Block, Moments]
    evaluations: list[Evaluation]
    records: Records
    busy: float
    seconds: float


def bare(band: FactorBand) -> FactorBand:
    """A band without what it has recorded: that stays with the client."""
    return FactorBand(band.offset, band.values, band.arrays, band.counts)


def with_own(before: FactorBand, after: FactorBand) -> FactorBand:
    """A row band with what it had before it was sent out and did not take along."""
    return replace(
        after,
        arrays={**before.arrays, **after.arrays},
        draws=[*before.draws, *after.draws],
        sums={**before.sums, **after.sums},
    )


def with_records(
    before: FactorBand, after: FactorBand, col: int, records: Sequence[Records]
) -> FactorBand:
    """A column band with what it recorded wherever it was, in order, and what stayed behind."""
    parts = sorted(
        (part for found in records for part in found.draws.get(col, [])), key=lambda part: part[0]
    )
    sums = {cycle: value for found in records for cycle, value in found.sums.get(col, {}).items()}
    return replace(
        after,
        arrays={**before.arrays, **after.arrays},
        draws=[*before.draws, *(draw for _, draws in parts for draw in draws)],
        sums={**before.sums, **dict(sorted(sums.items()))},
    )
