"""Where particles keep their counts: dense rows, light rows, and factors that never vary.

A factor whose place does not depend on the hidden state is the same for every
allocation by the time that all tokens are in, whatever their order: a total over D
tokens gives Γ(A) / Γ(A + D). Such factors are taken out of the particles' weights and
stand in ``Placement.constant``.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.kernels.urns import BLOCK, Network

Ints = NDArray[np.int64]

PAD = BLOCK  # a block of states may read past the last row
LONGEST = 0xFFFF  # states that a slot can tell apart, and one more for an empty one


class CountPlaces(NamedTuple):
    """Flat counts (see `CompiledModel`) of what particles keep; -1 for totals.

    ``dense``: (W,) of table cells; ``light``: (L,) of light rows' first cell;
    ``states``: (A,) first cells of urns that hold one count per state;
    ``known``, ``balls``: cells whose count every allocation has, and that count.
    """

    dense: Ints
    light: Ints
    states: Ints
    known: Ints
    balls: Ints


@dataclass(frozen=True)
class Placement:
    """What the kernels need to know of a problem.

    Attributes
    ----------
    network
        Registers, see `daskfactor.kernels.urns.Network`.
    places
        Where a particle's counts belong in the flat counts of the `CompiledModel`.
    tokens
        Number of tokens T.
    width
        Cells of a particle's table.
    slots
        Slots of a particle's light rows.
    kind
        Dtype of both: the smallest that holds the tokens of any row, and its states.
    constant
        log p(X) = constant + log E[product of the tokens' scaled u].
    """

    network: Network
    places: CountPlaces
    tokens: int
    width: int
    slots: int
    kind: type[np.unsignedinteger[Any]]
    constant: float

    @property
    def particle_bytes(self) -> int:
        """Memory of one particle, without an order of its own."""
        counts = np.dtype(self.kind).itemsize * (self.width + self.slots)
        return counts + 24 * BLOCK * math.ceil(self.network.states / BLOCK) + 40


class _Register(NamedTuple):
    """One factor of a token's weight: an urn's count, or a total."""

    address: Ints  # (M,)
    column: Ints  # (H,)
    alpha: float
    group: int
    total: bool

    @property
    def fixed(self) -> bool:
        """Whether its place is the same for all hidden states."""
        return bool(np.all(self.column == self.column[0]))

    @property
    def shared(self) -> bool:
        """Whether its row is the same for all tokens."""
        return bool(np.all(self.address == self.address[0]))


def place_counts(compiled: CompiledModel, light: int | None = None) -> Placement:
    """Choose a place for every count of a particle.

    Parameters
    ----------
    compiled
        The compiled problem.
    light
        Rows with at most this many tokens are lists; None chooses a quarter of the row's
        length (at least 2): longer lists save little and take longer.
    """
    registers, known = _without_known(compiled)
    simple = _is_simple(registers, compiled.states)
    alone = [r for r in registers if simple and r.shared]
    rowed = [r for r in registers if not (simple and r.shared)]
    rows = _Rows(compiled.values, light)
    place = np.zeros((len(compiled.values), len(rowed)), np.int64)
    for members in _groups(rowed).values():
        for n, found in zip(members, rows.place([rowed[n] for n in members]), strict=True):
            place[:, n] = found
    lengths = [int(r.column.max()) + 1 for r in rowed]
    scratch = rows.width + np.cumsum([0, *lengths])
    width = int(scratch[-1]) + PAD
    dense = np.full(width, -1, np.int64)
    dense[: rows.width] = np.concatenate([np.empty(0, np.int64), *rows.dense])
    first = [int(r.address[0]) for r in alone if not r.total]
    listed = (rows.light, first, known.cells, known.balls)
    network = _network(compiled, rowed, alone, simple)._replace(
        place=place.astype(np.int32),
        scratch=scratch[:-1].astype(np.int64),
        start=np.concatenate([[0], np.cumsum(rows.sizes)]).astype(np.int64),
    )
    scaled = np.sum(compiled.values * np.log(compiled.values))  # makes up for Network.scale
    return Placement(
        network=network,
        places=CountPlaces(dense, *(np.array(values, np.int64) for values in listed)),
        tokens=int(compiled.values.sum()),
        width=width,
        slots=int(network.start[-1]),
        kind=_smallest(max(rows.heaviest, rows.widest)),
        constant=float(compiled.log_factor + compiled.constant + known.log + scaled),
    )


def _registers(compiled: CompiledModel) -> list[_Register]:
    found = []
    for total in (False, True):
        rows = compiled.total_row if total else compiled.row
        columns = compiled.total_column if total else compiled.column
        alphas = compiled.alpha_total if total else compiled.alpha
        for n in range(len(compiled.alpha)):
            made = (rows[:, n], columns[n], float(alphas[n]), int(compiled.group[n]), total)
            found.append(_Register(*made))
    return found


def _groups(registers: list[_Register]) -> dict[tuple[int, bool], list[int]]:
    """Registers that count in one urn."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for n, register in enumerate(registers):
        groups.setdefault((register.group, register.total), []).append(n)
    return groups


class _Known(NamedTuple):
    """Factors that are the same for every allocation: their log, and their urns' counts."""

    log: float
    cells: list[int]
    balls: list[int]


def _count_known(group: list[_Register], values: Ints) -> tuple[Ints, Ints, float]:
    """Cells, balls and log of a group's factors when no place depends on the hidden state."""
    where = np.concatenate([member.address + member.column[0] for member in group])
    cells, at = np.unique(where, return_inverse=True)
    balls = np.bincount(at, weights=np.tile(values, len(group))).astype(np.int64)
    alpha = group[0].alpha
    return cells, balls, float(np.sum(gammaln(alpha + balls) - gammaln(alpha)))


def _without_known(compiled: CompiledModel) -> tuple[list[_Register], _Known]:
    registers = _registers(compiled)
    kept: list[int] = []
    found = _Known(0.0, [], [])
    for members in _groups(registers).values():
        group = [registers[n] for n in members]
        if not all(register.fixed for register in group):
            kept.extend(members)
            continue
        cells, balls, rise = _count_known(group, compiled.values)
        if group[0].total:
            found = found._replace(log=found.log - rise)
        else:
            found = _Known(
                found.log + rise, found.cells + cells.tolist(), found.balls + balls.tolist()
            )
    return [registers[n] for n in sorted(kept)], found


def _is_simple(registers: list[_Register], states: int) -> bool:
    if len(_groups(registers)) < len(registers):
        return False
    plain = all(np.array_equal(register.column, np.arange(states)) for register in registers)
    rowed = [register for register in registers if not register.shared]
    return plain and bool(rowed) and not any(register.total for register in rowed)


def _smallest(largest: int) -> type[np.unsignedinteger[Any]]:
    kinds: tuple[type[np.unsignedinteger[Any]], ...] = (np.uint8, np.uint16)
    return next((kind for kind in kinds if largest <= np.iinfo(kind).max), np.uint32)


class _Rows:
    """Gives the rows of registers their places, group by group."""

    def __init__(self, values: Ints, light: int | None) -> None:
        self.values = values
        self.limit = light
        self.dense: list[Ints] = []
        self.width = 0
        self.light: list[int] = []
        self.sizes: list[int] = []
        self.widest = 0
        self.heaviest = 0

    def place(self, members: list[_Register]) -> list[Ints]:
        """Places (M,) of the rows of every register of a group."""
        length = max(int(member.column.max()) for member in members) + 1
        rows, at = np.unique(
            np.concatenate([member.address for member in members]), return_inverse=True
        )
        same = all(np.array_equal(member.column, members[0].column) for member in members)
        total = members[0].total
        if same and bool(np.all(np.diff(rows) >= length)) and length <= LONGEST:
            place = self._apart(rows, at, length, len(members), total)
        else:
            place = self._overlapping(rows, length, len(members), total)
        return np.split(place[at], len(members))

    def _overlapping(self, rows: Ints, length: int, draws: int, total: bool) -> Ints:
        """All of them dense, as they are."""
        self.heaviest = max(self.heaviest, draws * int(self.values.sum()))
        place = self.width + rows - rows[0]
        self._add(np.arange(rows[0], rows[-1] + length), total)
        return np.asarray(place)

    def _apart(self, rows: Ints, at: Ints, length: int, draws: int, total: bool) -> Ints:
        """Each of them dense or light."""
        tokens = np.bincount(at, weights=np.tile(self.values, draws)).astype(np.int64)
        self.heaviest = max(self.heaviest, int(tokens.max()))
        limit = max(2, length // 4) if self.limit is None else self.limit
        light = tokens <= limit
        place = np.empty(len(rows), np.int64)
        dense = rows[~light]
        place[~light] = self.width + length * np.arange(len(dense))
        self._add((dense[:, None] + np.arange(length)).ravel(), total)
        place[light] = -1 - (len(self.light) + np.arange(int(light.sum())))
        self.light.extend(np.where(total, -1, rows[light]).tolist())
        self.sizes.extend(tokens[light].tolist())
        if light.any():
            self.widest = max(self.widest, length)
        return place

    def _add(self, cells: Ints, total: bool) -> None:
        self.dense.append(np.where(total, -1, cells))
        self.width += len(cells)


def _network(
    compiled: CompiledModel, rowed: list[_Register], alone: list[_Register], simple: bool
) -> Network:
    """Registers, without their places."""
    size = len(rowed)
    twin = np.zeros((size, size), np.uint8)
    for members in _groups(rowed).values():
        for n in members:
            twin[n, [e for e in members if e < n]] = 1
    cells = len(compiled.values)
    address = np.array([r.address for r in rowed], np.int64).reshape(size, cells).T
    column = np.array([r.column for r in rowed], np.int32).reshape(size, compiled.states)
    return Network(
        place=np.zeros((cells, size), np.int32),
        alpha=np.array([r.alpha for r in rowed], np.float64),
        scratch=np.zeros(size, np.int64),
        start=np.zeros(1, np.int64),
        scale=1.0 / compiled.values,
        above=np.array([r.alpha for r in alone if not r.total], np.float64),
        below=np.array([r.alpha for r in alone if r.total], np.float64),
        simple=int(simple),
        column=np.zeros((0, 0), np.int32) if simple else column,
        divides=np.array([r.total for r in rowed], np.uint8),
        address=np.ascontiguousarray(address) if twin.any() else np.zeros((0, 0), np.int64),
        twin=twin if twin.any() else np.zeros((0, 0), np.uint8),
        states=compiled.states,
    )
