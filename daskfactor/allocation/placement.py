"""Layout of a particle's counts: rows of a table, and factors that never vary.

A token's weight is a product of *registers*: an urn's count above the fraction line, a total
below it. A factor whose place does not depend on the hidden state is the same for every
allocation by the time that all tokens are in, whatever their order: a total over D
tokens gives Γ(A) / Γ(A + D). Such factors are taken out of the particles' weights and
stand in ``Placement.constant``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.allocation.urns import BLOCK, Network

Ints = NDArray[np.int64]
Wide = NDArray[np.float64]

PAD = BLOCK  # a block of states may read past the last row


@dataclass(frozen=True)
class Placement:
    """Layout of the particles' tables for the kernels.

    Attributes
    ----------
    network
        Registers, see `daskfactor.allocation.urns.Network`.
    table_columns, table_cells
        Columns of a particle's table that hold counts (the others hold totals), and their cells
        among the flat counts of the `CompiledModel`.
    state_cells : (A, H)
        Cells of urns that hold one count per state.
    constant_cells, constant_counts
        Cells whose count is the same under every allocation, and that count.
    values : (M,)
        Tokens at each observed cell.
    cells
        Length of the flat counts.
    width
        Cells of a particle's table.
    kind
        Dtype of a particle's table: the smallest that holds the tokens of any row.
    constant
        log p(X) = constant + log E[product of the tokens' scaled u].
    """

    network: Network
    table_columns: Ints
    table_cells: Ints
    state_cells: Ints
    constant_cells: Ints
    constant_counts: Ints
    values: Ints
    cells: int
    width: int
    kind: np.dtype[Any]
    constant: float

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())


class _Registers(NamedTuple):
    """Registers of a model: R of them, M observed cells, H states.

    ``address``: (R, M), first cell of a token's row; ``column``: (R, H), offset of a state in it;
    ``alpha``: (R,); ``urn``: (R,), equal where registers count in one urn;
    ``total``: (R,)
    """

    address: Ints
    column: Ints
    alpha: NDArray[np.float64]
    urn: Ints
    total: NDArray[np.bool_]

    def take(self, chosen: Any) -> "_Registers":
        """Return the chosen registers."""
        return _Registers(*(values[chosen] for values in self))

    @property
    def shared(self) -> NDArray[np.bool_]:
        """Registers whose row is the same for all tokens."""
        return np.asarray((self.address == self.address[:, :1]).all(axis=1))

    def groups(self) -> list[Ints]:
        """Return the registers that count in one urn, in the order of the first of each."""
        return [np.flatnonzero(self.urn == urn) for urn in dict.fromkeys(self.urn)]


def place_counts(compiled: CompiledModel) -> Placement:
    """Choose a place for every count of a particle."""
    registers, constant_cells, constant_counts, log_constant = _without_constants(compiled)
    simple = _is_simple(registers)
    shared = registers.shared & simple
    by_state, rowed = registers.take(shared), registers.take(~shared)
    place = np.zeros((len(compiled.values), len(rowed.address)), np.int32)
    cells, width, heaviest = [np.empty(0, np.int64)], 0, 0
    for members in rowed.groups():
        rows, row_cells, most = _place_rows(rowed.take(members), compiled.values)
        place[:, members] = width + rows
        cells.append(row_cells)
        width, heaviest = width + len(row_cells), max(heaviest, most)
    table = np.concatenate(cells)
    columns = np.flatnonzero(table >= 0)
    scaled = np.sum(compiled.values * np.log(compiled.values))  # makes up for Network.scale
    twin, none = np.tril(rowed.urn[:, None] == rowed.urn, -1), np.zeros((0, 0), np.int64)
    above, below = (
        [(float(alpha), 1) for alpha in by_state.alpha[by_state.total == total]]
        for total in (False, True)
    )
    tokens = int(compiled.values.sum())
    return Placement(
        network=Network(
            place=place,
            column=rowed.column.astype(np.int32),
            alpha=rowed.alpha[None],
            scale=1.0 / compiled.values,
            value=state_values(above, below, tokens) if simple else np.empty(0),
            divides=rowed.total.astype(np.uint8),
            address=rowed.address.T.copy() if twin.any() else none,
            twin=(twin if twin.any() else none).astype(np.uint8),
            states=compiled.states,
        ),
        table_columns=columns,
        table_cells=table[columns],
        state_cells=by_state.address[~by_state.total, :1] + np.arange(compiled.states),
        constant_cells=constant_cells,
        constant_counts=constant_counts,
        values=compiled.values,
        cells=compiled.cells,
        width=width + PAD,
        kind=np.min_scalar_type(heaviest),
        constant=float(compiled.log_factor + compiled.constant + log_constant + scaled),
    )


def _without_constants(compiled: CompiledModel) -> tuple[_Registers, Ints, Ints, float]:
    """Return the registers that vary; of the others the cells, counts, and log of the factors."""
    urns = [2 * compiled.group, 2 * compiled.group + 1]
    registers = _Registers(
        np.concatenate([compiled.row.T, compiled.total_row.T]),
        np.concatenate([compiled.column, compiled.total_column]),
        np.concatenate([compiled.alpha, compiled.alpha_total]),
        np.concatenate(urns),
        np.repeat([False, True], len(compiled.group)),
    )
    fixed = (registers.column == registers.column[:, :1]).all(axis=1)
    varies, log = np.ones(len(fixed), bool), 0.0
    constant_cells, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for members in registers.groups():
        if not fixed[members].all():
            continue
        varies[members] = False
        constant = registers.take(members)
        places = (constant.address + constant.column[:, :1]).ravel()
        cells, index = np.unique(places, return_inverse=True)
        balls = np.bincount(index, np.tile(compiled.values, len(members))).astype(np.int64)
        rise = float(np.sum(gammaln(constant.alpha[0] + balls) - gammaln(constant.alpha[0])))
        if constant.total[0]:
            log -= rise
        else:
            log += rise
            constant_cells.append(cells)
            counts.append(balls)
    return registers.take(varies), np.concatenate(constant_cells), np.concatenate(counts), log


def _is_simple(registers: _Registers) -> bool:
    """Check that every urn is drawn from once, by state, and that no total needs rows."""
    if len(np.unique(registers.urn)) < len(registers.urn):
        return False
    rowed = ~registers.shared
    plain = (registers.column == np.arange(registers.column.shape[1])).all()
    return bool(plain and rowed.any() and not registers.total[rowed].any())


def _place_rows(members: _Registers, values: Ints) -> tuple[Ints, Ints, int]:
    """Lay out the rows of all registers of one urn.

    Returns
    -------
    place : (M, R)
        First column of a token's row.
    cells
        Cell of each column among the flat counts, -1 for totals.
    tokens
        Largest count of a row.
    """
    length, draws = int(members.column.max()) + 1, len(members.urn)
    rows, index = np.unique(members.address, return_inverse=True)
    same = bool((members.column == members.column[0]).all())
    if same and bool(np.all(np.diff(rows) >= length)):
        place = length * np.arange(len(rows))
        cells = (rows[:, None] + np.arange(length)).ravel()
        tokens = int(np.bincount(index.ravel(), np.tile(values, draws)).max())
    else:  # rows that overlap stay where they are
        place, cells = rows - rows[0], np.arange(rows[0], rows[-1] + length)
        tokens = draws * int(values.sum())
    cells = np.full(len(cells), -1) if members.total[0] else cells
    return place[index].reshape(draws, -1).T, cells, tokens


def state_values(
    above: list[tuple[float, int]], below: list[tuple[float, int]], tokens: int
) -> Wide:
    r"""Multiply a state's factors, :math:`\prod (a + g n) / \prod (b + g n)`, n = 0 .. T."""
    count = np.arange(tokens + 1.0)
    top, bottom = np.ones(tokens + 1), np.ones(tokens + 1)
    for factors, product in ((above, top), (below, bottom)):
        for alpha, times in factors:
            product *= alpha + times * count
    return top / bottom
