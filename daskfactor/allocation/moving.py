"""One island of particles that move: as in ``batches.py``, with Gibbs sweeps now and then.

Particles keep the states of all their tokens and plain tables, so that a token can be taken
out of its urns again; see ``kernels/moving.py``.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.batches import (
    WORK,
    Island,
    Journey,
    draw_orders,
    make_buffers,
    make_walk,
    sum_up,
)
from daskfactor.allocation.placement import Placement
from daskfactor.kernels.moving import Movers, Terms, start_movers, travel
from daskfactor.kernels.polya import BLOCK, Network, Particles, Wide
from daskfactor.kernels.workspace import Workspace

BYTE = 256
"""States up to which that of a token takes one byte, not two."""


class Chart(NamedTuple):
    """What particles need to know: ``terms``, and rows that follow from the states' tokens.

    ``follow``: (row, times), rows of the table that hold so many times the tokens of every
    state; filled in when all tokens are in.
    """

    terms: Terms
    follow: tuple[tuple[int, int], ...]


def make_chart(placement: Placement) -> Chart:
    """Find the rows that all tokens share: their factors are one number for each state.

    Parameters
    ----------
    placement : without light rows
    """
    net = placement.network
    terms = Terms(
        place=net.place,
        scale=net.scale,
        base=np.zeros((0, 0)),
        value=np.empty(0),
        alpha=net.alpha,
        column=net.column,
        divides=net.divides,
        tied=_tied(net),
        states=net.states,
    )
    if net.simple == 1:
        above, below = ([(float(a), 1) for a in alphas] for alphas in (net.above, net.below))
        value = _values(above, below, placement.tokens)
        base = np.tile(net.alpha, (len(net.place), 1))
        return Chart(terms._replace(base=base, value=value), ())
    alone = (net.place == net.place[0]).all(axis=0)
    return _set_apart(placement, terms, alone) if _separate(net, alone) else Chart(terms, ())


def _set_apart(placement: Placement, terms: Terms, alone: NDArray[np.bool_]) -> Chart:
    """Rows that follow from the states' tokens go into the value of a state."""
    net = placement.network
    rows, kept = net.place[0], np.flatnonzero(~alone)
    factors: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
    follow = {}
    for n in np.flatnonzero(alone):
        same = np.flatnonzero(alone & (rows == rows[n]))
        factors[int(net.divides[n])].append((net.alpha[n] + np.sum(same < n), len(same)))
        follow[int(rows[n])] = len(same)
    base = [
        net.alpha[n] + (net.place[:, kept[:e]] == net.place[:, [n]]).sum(axis=1)
        for e, n in enumerate(kept)
    ]
    terms = terms._replace(
        place=np.ascontiguousarray(net.place[:, kept]),
        base=np.stack(base, 1),
        value=_values(factors[0], factors[1], placement.tokens),
    )
    return Chart(terms, tuple(follow.items()))


def _tied(net: Network) -> NDArray[np.uint8]:
    """Registers that an earlier one may share a count with."""
    if net.twin.size == 0:
        return np.zeros(len(net.alpha), np.uint8)
    return np.asarray(net.twin.any(axis=1), np.uint8)


def _separate(net: Network, alone: NDArray[np.bool_]) -> bool:
    """Whether a state meets rows of counts of its own, and none that is both alone and not."""
    plain = (net.column == np.arange(net.states)).all()
    if not plain or alone.all() or net.divides[~alone].any():
        return False
    rows = np.unique(net.place)
    clear = bool((np.diff(rows) >= net.states).all())
    return clear and not np.isin(net.place[:, ~alone], net.place[0, alone]).any()


def _values(above: list[tuple[float, int]], below: list[tuple[float, int]], tokens: int) -> Wide:
    r"""Factors :math:`\prod (a + g n) / \prod (b + g n)` of a state with n = 0 .. T tokens."""
    count = np.arange(tokens + 1.0)
    top, bottom = np.ones(tokens + 1), np.ones(tokens + 1)
    for factors, product in ((above, top), (below, bottom)):
        for alpha, times in factors:
            product *= alpha + times * count
    return top / bottom


def run_moving_island(journey: Journey, island: int, workspace: Workspace) -> Island:
    """Take the particles of one island from the first token to the last, with moves.

    The journey's ``placement`` is without light rows.
    """
    del workspace
    chart = make_chart(journey.placement)
    movers, way = _gather(journey, island, chart.terms), make_walk(journey, island)
    sums, scratch = make_buffers(journey)
    cursor = np.zeros(4, np.int64)
    while cursor[0] < len(way.ess):
        travel(chart.terms, movers, way, journey.moves, cursor, WORK, sums, scratch)
    return sum_up(journey, _as_crowd(chart, movers), way, scratch)


def mover_bytes(placement: Placement) -> int:
    """Memory of one particle that moves, without an order of its own."""
    states = placement.network.states
    tokens = placement.tokens * (1 if states <= BYTE else 2)
    return 4 * placement.width + 12 * states + tokens + 40


def _gather(journey: Journey, island: int, terms: Terms) -> Movers:
    """Particles without tokens, and the order in which they will get them."""
    size, tokens = journey.particles, journey.placement.tokens
    movers = Movers(
        tables=np.empty((size, journey.placement.width), np.int32),
        urns=np.empty((size, BLOCK * -(-terms.states // BLOCK))),
        balls=np.empty((size, terms.states), np.int32),
        states=np.empty((size, tokens), np.uint8 if terms.states <= BYTE else np.uint16),
        log_weights=np.empty(size),
        orders=draw_orders(journey, island),
    )
    start_movers(terms, movers)
    return movers


def _as_crowd(chart: Chart, movers: Movers) -> Particles:
    """The particles as `islands.sum_up` expects them, with all rows filled in."""
    for row, times in chart.follow:
        movers.tables[:, row : row + chart.terms.states] += times * movers.balls
    return Particles(
        tables=movers.tables,
        slots=np.empty((len(movers.tables), 0), np.uint8),
        values=movers.urns,
        nexts=movers.urns,
        balls=movers.balls.astype(np.float64),
        log_weights=movers.log_weights,
        orders=movers.orders,
    )
