"""Where particles keep their counts: dense rows, light rows, and factors that never vary.

A token's weight is a product of *registers*: an urn's count above the fraction line, a total
below it. A factor whose place does not depend on the hidden state is the same for every
allocation by the time that all tokens are in, whatever their order: a total over D
tokens gives Γ(A) / Γ(A + D). Such factors are taken out of the particles' weights and
stand in ``Placement.constant``.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.allocation.urns import BLOCK, Network

Ints = NDArray[np.int64]
Wide = NDArray[np.float64]

PAD = BLOCK  # a block of states may read past the last row
LONGEST = 0xFFFF  # states that a slot can tell apart, and one more for an empty one


@dataclass(frozen=True)
class Placement:
    """What the kernels need to know of a problem.

    Attributes
    ----------
    network
        Registers, see `daskfactor.allocation.urns.Network`.
    places
        Where a particle's counts belong in the flat counts of the `CompiledModel`, -1 for
        totals: of table cells (W,), of light rows' first cells (L,), and of the first cells of
        urns that hold one count per state (A,).
    known, balls
        Cells whose count every allocation has, and that count.
    values : (M,)
        Tokens at each observed cell.
    cells
        Length of the flat counts.
    width
        Cells of a particle's table.
    slots
        Slots of a particle's light rows.
    kind
        Dtype of both: the smallest that holds the tokens of any row, and its states.
    constant
        log p(X) = constant + log E[product of the tokens' scaled u].
    alone
        Alphas of the registers above and below the fraction line that depend on the hidden
        state alone, if the others are rows of a count per state; else None.
    """

    network: Network
    places: tuple[Ints, Ints, Ints]
    known: Ints
    balls: Ints
    values: Ints
    cells: int
    width: int
    slots: int
    kind: np.dtype[Any]
    constant: float
    alone: tuple[Wide, Wide] | None

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())


class _Registers(NamedTuple):
    """Registers of a model: R of them, M observed cells, H states.

    ``address``: R views of (M,), first place of a token's row; ``column``: (R, H), what a state
    adds to it; ``alpha``: (R,); ``urn``: (R,), equal where registers count in one urn;
    ``total``: (R,)
    """

    address: list[Ints]
    column: Ints
    alpha: NDArray[np.float64]
    urn: Ints
    total: NDArray[np.bool_]

    def take(self, chosen: Any) -> "_Registers":
        own = [self.address[n] for n in np.arange(len(self.address))[chosen]]
        return _Registers(own, *(values[chosen] for values in self[1:]))

    @property
    def shared(self) -> NDArray[np.bool_]:
        """Whether a register's row is the same for all tokens."""
        return np.array([bool((own == own[0]).all()) for own in self.address], bool)

    def groups(self) -> list[Ints]:
        """Registers that count in one urn, in the order of the first of each."""
        return [np.flatnonzero(self.urn == urn) for urn in dict.fromkeys(self.urn)]


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
    registers, known, balls, log_known = _without_known(compiled)
    simple = _is_simple(registers)
    shared = registers.shared & simple
    alone, rowed = registers.take(shared), registers.take(~shared)
    rows = _Rows(compiled.values, light)
    place = np.zeros((len(compiled.values), len(rowed.address)), np.int32)
    for members in rowed.groups():
        place[:, members] = rows.place(rowed.take(members)).T
    lengths = rowed.column.max(axis=1) + 1
    width = rows.width + int(lengths.sum()) + PAD
    dense = np.full(width, -1, np.int64)
    dense[: rows.width] = np.concatenate([np.empty(0, np.int64), *rows.dense])
    first = [own[0] for own, total in zip(alone.address, alone.total, strict=True) if not total]
    scaled = np.sum(compiled.values * np.log(compiled.values))  # makes up for Network.scale
    return Placement(
        network=Network(
            place=place,
            scratch=rows.width + np.cumsum(lengths) - lengths,
            start=np.cumsum([0, *rows.sizes]),
            scale=1.0 / compiled.values,
            value=np.empty(0),
            states=compiled.states,
            **_factors(rowed),
        ),
        places=(dense, np.array(rows.light, np.int64), np.array(first, np.int64)),
        known=known,
        balls=balls,
        values=compiled.values,
        cells=compiled.cells,
        width=width,
        slots=sum(rows.sizes),
        kind=np.min_scalar_type(max(rows.heaviest, rows.widest)),
        constant=float(compiled.log_factor + compiled.constant + log_known + scaled),
        alone=(alone.alpha[~alone.total], alone.alpha[alone.total]) if simple else None,
    )


def _without_known(compiled: CompiledModel) -> tuple[_Registers, Ints, Ints, float]:
    """Registers that vary; of the others the cells, their counts, and the log of their factors."""
    urns = [2 * compiled.group, 2 * compiled.group + 1]
    registers = _Registers(
        [*compiled.row.T, *compiled.total_row.T],
        np.concatenate([compiled.column, compiled.total_column]),
        np.concatenate([compiled.alpha, compiled.alpha_total]),
        np.concatenate(urns),
        np.repeat([False, True], len(compiled.group)),
    )
    fixed = (registers.column == registers.column[:, :1]).all(axis=1)
    kept, log = np.ones(len(fixed), bool), 0.0
    known, counted = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for members in registers.groups():
        if not fixed[members].all():
            continue
        kept[members] = False
        own = registers.take(members)
        where = (np.stack(own.address) + own.column[:, :1]).ravel()
        cells, at = np.unique(where, return_inverse=True)
        balls = np.bincount(at, np.tile(compiled.values, len(members))).astype(np.int64)
        rise = float(np.sum(gammaln(own.alpha[0] + balls) - gammaln(own.alpha[0])))
        if own.total[0]:
            log -= rise
        else:
            log += rise
            known.append(cells)
            counted.append(balls)
    return registers.take(kept), np.concatenate(known), np.concatenate(counted), log


def _is_simple(registers: _Registers) -> bool:
    """Tell whether every urn is drawn from once, by state, and no total needs a row of its own."""
    if len(np.unique(registers.urn)) < len(registers.urn):
        return False
    rowed = ~registers.shared
    plain = (registers.column == np.arange(registers.column.shape[1])).all()
    return bool(plain and rowed.any() and not registers.total[rowed].any())


@dataclass
class _Rows:
    """Gives the rows of registers their places, urn by urn."""

    values: Ints
    limit: int | None
    dense: list[Ints] = field(default_factory=list)
    width: int = 0
    light: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    widest: int = 0
    heaviest: int = 0

    def place(self, members: _Registers) -> Ints:
        """Places of the rows of all registers of an urn, (R, M)."""
        length, draws = int(members.column.max()) + 1, len(members.urn)
        rows, at = np.unique(np.stack(members.address), return_inverse=True)
        same = bool((members.column == members.column[0]).all())
        if same and bool(np.all(np.diff(rows) >= length)) and length <= LONGEST:
            place = self._apart(rows, at.ravel(), length, draws, bool(members.total[0]))
        else:  # all of them dense, as they are
            self.heaviest = max(self.heaviest, draws * int(self.values.sum()))
            place = self.width + rows - rows[0]
            self._add(np.arange(rows[0], rows[-1] + length), bool(members.total[0]))
        return np.asarray(place[at].reshape(draws, -1))

    def _apart(self, rows: Ints, at: Ints, length: int, draws: int, total: bool) -> Ints:
        """Each of them dense or light."""
        tokens = np.bincount(at, np.tile(self.values, draws)).astype(np.int64)
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


def _factors(rowed: _Registers) -> dict[str, Any]:
    """What a `Network` has of registers, but for their places."""
    twin = np.tril(rowed.urn[:, None] == rowed.urn, -1)
    none = np.zeros((0, 0), np.int64)
    return {
        "alpha": rowed.alpha[None],
        "column": rowed.column.astype(np.int32),
        "divides": rowed.total.astype(np.uint8),
        "address": np.stack(rowed.address, 1) if twin.any() else none,
        "twin": (twin if twin.any() else none).astype(np.uint8),
    }
