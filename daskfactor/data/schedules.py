"""Schedules: which parts a cycle visits, in what order, at what scale.

A schedule turns a cycle number into plain data. The scale s multiplies the
gradient of a block's log-likelihood so that it estimates the gradient over all
the data: s = B when every part is visited once a cycle (cyclic and reshuffled
order), s = N / |part| when parts are drawn with probability proportional to
their size (Şimşekli et al. 2015, condition 2). N counts observed entries. The
other pairings are biased when parts differ in size.

Parts are sets of blocks that share no row band and no column band (Şimşekli et al. 2017,
definition 1; Şimşekli et al. 2015, definition 2). A part is told by one number, its
diagonal ``p``: it holds the blocks ``(b, (b + p) mod B)``. The B diagonals visit every block
exactly once.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.data.grid import Block
from daskfactor.errors import GridError


def diagonal(part: int, blocks: int) -> tuple[Block, ...]:
    """The blocks of diagonal ``part`` of a ``blocks`` x ``blocks`` grid."""
    if not 0 <= part < blocks:
        raise GridError(f"a grid of {blocks} x {blocks} blocks has no part {part}")
    return tuple(Block(row, (row + part) % blocks) for row in range(blocks))


def nested(outer: int, inner: int, groups: int, blocks: int) -> tuple[Block, ...]:
    """Diagonal ``inner`` inside every super-block on diagonal ``outer``.

    The B = groups * m bands are taken as ``groups`` super-bands of m bands. All
    m parts of one outer diagonal touch the same super-blocks, so that one task
    can do m * m block updates before a super-band has to move.
    """
    if groups < 1 or blocks % groups:
        raise GridError(f"{blocks} bands cannot be grouped into {groups} super-bands of equal size")
    size = blocks // groups
    return tuple(
        Block(upper * size + row, ((upper + outer) % groups) * size + (row + inner) % size)
        for upper in range(groups)
        for row in range(size)
    )


class Part(NamedTuple):
    """Blocks without a band in common, the gradient's scale, and the super-part they are of.

    Consecutive parts with the same ``outer`` stay inside the same super-blocks
    of ``size`` x ``size`` bands, so that one task can do them all.
    """

    blocks: tuple[Block, ...]
    scale: float
    outer: int
    size: int = 1


class Schedule(Protocol):
    """Anything that says which parts a cycle visits."""

    def cycle(
        self, blocks: int, sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Part, ...]:
        """The parts of one cycle, in order; ``sizes`` are observed entries per diagonal."""
        ...


@dataclass(frozen=True)
class Cyclic:
    """Diagonals 0, 1, …, B - 1, the same in every cycle.

    The order of Şimşekli et al. 2015, figure 4. Its discretisation error is several
    times that of the reshuffled order (means off by .035 against .005 posterior
    standard deviations on a problem with a known posterior), so it is for comparison.
    """

    def cycle(
        self, blocks: int, sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Part, ...]:
        del sizes, rng
        return _in_order(range(blocks), blocks)


@dataclass(frozen=True)
class Reshuffled:
    """Every diagonal once a cycle, in a new order each cycle (the default)."""

    def cycle(
        self, blocks: int, sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Part, ...]:
        del sizes
        return _in_order(rng.permutation(blocks).tolist(), blocks)


@dataclass(frozen=True)
class Proportional:
    """B diagonals a cycle, drawn with replacement, with probability |part| / N."""

    def cycle(
        self, blocks: int, sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Part, ...]:
        total = int(sizes.sum())
        if total == 0:
            raise GridError("no part holds an observed entry; there is nothing to sample from")
        drawn = rng.choice(blocks, size=blocks, p=sizes / total).tolist()
        return tuple(
            Part(diagonal(part, blocks), total / int(sizes[part]), position)
            for position, part in enumerate(drawn)
        )


@dataclass(frozen=True)
class NestedReshuffled:
    """Reshuffled in two levels: ``groups`` super-bands a side, all their parts before they move.

    Visits every part once a cycle, like :class:`Reshuffled`, but in an order
    that lets one task do the (B / groups)² block updates of a super-block.
    """

    groups: int

    def __post_init__(self) -> None:
        whole_number("groups", self.groups, 1)

    def cycle(
        self, blocks: int, sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Part, ...]:
        del sizes
        if blocks % self.groups:
            raise GridError(
                f"{blocks} bands cannot be grouped into {self.groups} super-bands of equal size; "
                f"choose groups so that it divides the number of blocks"
            )
        size = blocks // self.groups
        return tuple(
            Part(nested(outer, inner, self.groups, blocks), float(blocks), outer, size)
            for outer in rng.permutation(self.groups).tolist()
            for inner in rng.permutation(size).tolist()
        )


@dataclass(frozen=True)
class Passes:
    """Every diagonal in order, ``count`` times a cycle, at scale 1: for sums over all the data.

    Without a count as often as there are bands.
    """

    count: int | None = 1

    def __post_init__(self) -> None:
        if self.count is not None:
            whole_number("count", self.count, 1)

    def cycle(
        self, blocks: int, sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[Part, ...]:
        del sizes, rng
        return tuple(
            Part(diagonal(part, blocks), 1.0, part)
            for _ in range(self.count or blocks)
            for part in range(blocks)
        )


def _in_order(order: "range | list[int]", blocks: int) -> tuple[Part, ...]:
    return tuple(Part(diagonal(part, blocks), float(blocks), part) for part in order)


def diagonal_sizes(observed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Observed entries on every diagonal, from the (B, B) table of counts per block."""
    count = observed.shape[0]
    return np.array(
        [sum(int(observed[block]) for block in diagonal(part, count)) for part in range(count)],
        dtype=np.int64,
    )


SCHEDULES: dict[str, type] = {
    cls.__name__: cls for cls in (Cyclic, Reshuffled, Proportional, NestedReshuffled)
}
