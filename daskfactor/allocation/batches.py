"""One batch: a group of particles that resample among themselves, as a task of its own.

A batch needs nothing of the others and gives an unbiased estimate of p(X), so batches may
run anywhere and in any order. Its random numbers have the address (seed; round, batch,
particle, token); a *round* is a new start with more particles per batch.

Particles that move keep the states of all their tokens and whole tables, so that a token can
be taken out of its urns again; see `daskfactor.allocation.urns`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.allocation.model import AllocationModel
from daskfactor.allocation.placement import Placement
from daskfactor.allocation.resampling import (
    NEVER,
    PURPOSES,
    SCHEMES,
    Scratch,
    Walk,
    normalise,
    shuffle_orders,
    travel,
)
from daskfactor.allocation.urns import (
    BLOCK,
    CHUNK,
    LANES,
    Network,
    Particles,
    Small,
    Sums,
    Wide,
    Words,
    average_counts,
    start_crowd,
    unfold_counts,
)
from daskfactor.kernels.views import Workspace
from daskfactor.random import Stream, generator

STRETCHES = 256
"""The weights are looked at every T / STRETCHES tokens, rounded up to an even number."""
LOOKS = 1024
"""As `STRETCHES`, for particles that move: those that have become alike by then stay so."""
GROWTH = 0.04
"""Share of its tokens that a particle takes up between two moves. Measured with 64 particles
on letter pairs, blocks and tensors of 300 to 1600 tokens: from 0.1 to 0.02 the spread of log
estimates falls by a third while the time grows four times."""
WORK = 1e8
"""States weighed in one call of the kernel: under a second, so that Ctrl-C is heard."""
BYTE = 256
"""States up to which that of a token takes one byte, not two."""
GATHERED = 2**25
"""Numbers that are gathered from all particles together: a second or two."""
PASSES = 2
_KEY = np.array([0x8F14E45F, 0x2C9341CA], np.uint32)  # keeps these uniforms apart from others'


@dataclass(frozen=True)
class BatchPlan:
    """What all batches of a round have in common, worked out once for all of them.

    ``resampling``: a name of `SCHEMES` or None; ``least``: share of P below which to resample;
    ``own``: whether every particle has an order of its own; ``keep``: whether to return counts;
    ``moves``: sweeps at a time, 0 for particles that cannot move.
    """

    placement: Placement
    particles: int
    resampling: str | None
    least: float
    own: bool
    keep: bool
    seed: int
    round: int
    moves: int = 0

    @cached_property
    def edges(self) -> NDArray[np.int64]:
        """Numbers of tokens after which the weights are looked at."""
        return stretch_edges(self.placement.tokens, LOOKS if self.moves else STRETCHES)

    @cached_property
    def moved(self) -> NDArray[np.uint8]:
        """1 for the stretches after which particles move; without resampling they never do."""
        edges = self.edges
        if not self.moves or self.resampling is None:
            return np.zeros(len(edges) - 1, np.uint8)
        return move_schedule(edges)

    @cached_property
    def key(self) -> Words:
        """Two words that key the uniforms of all batches."""
        return make_key(self.seed)

    @cached_property
    def token_cells(self) -> Small:
        """The tokens' cells, in the order of the cells."""
        values = self.placement.values
        return np.repeat(np.arange(len(values), dtype=np.int32), values)

    @cached_property
    def network(self) -> tuple[Network, dict[int, int]]:
        """What `complete_network` finds."""
        return complete_network(self.placement, self.moves > 0)

    @property
    def moving_bytes(self) -> int:
        """Memory of a batch of particles that move."""
        tokens, states = self.placement.tokens, self.placement.network.states
        each = 4 * self.placement.width + 12 * states + 40
        each += tokens * ((1 if states <= BYTE else 2) + 4 * self.own)
        return each * self.particles


class Batch(NamedTuple):
    """What a batch found.

    ``log_z``: log of its estimate of E[product of u]; ``log_weights``: (P,), their mean is
    the estimate; ``mean_counts``: (cells,) posterior mean; ``ess``, ``resampled``: (E,);
    ``counts``: (P, cells) or None.
    """

    log_z: float
    log_weights: Wide
    mean_counts: Wide
    ess: Wide
    resampled: NDArray[np.uint8]
    counts: Small | None


def stretch_edges(tokens: int, stretches: int = STRETCHES) -> NDArray[np.int64]:
    """Edges of about so many stretches of tokens: first 0, last T; all even but T."""
    step = 2 * -(-tokens // (2 * stretches))
    return np.append(np.arange(0, tokens, step), tokens).astype(np.int64)


def move_schedule(edges: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Mark the stretches after which particles move: all at first, then fewer and fewer.

    The tokens between two moves are `GROWTH` of those before, so that all sweeps together
    visit about T / GROWTH tokens. The weights must have no say in it, see
    `daskfactor.allocation.resampling`; and after the last token nothing is left to gain.
    """
    moved = np.zeros(len(edges) - 1, np.uint8)
    last = 0
    for e, end in enumerate(edges[1:-1]):
        if end >= (1 + GROWTH) * last:
            moved[e], last = 1, end
    return moved


def make_key(seed: int) -> Words:
    """Two words that key the uniforms of all batches."""
    words = generator(seed, 0, Stream.NOISE, 5).integers(0, 2**32, 2, np.uint32)
    return np.asarray(words ^ _KEY)


def run_batch(plan: BatchPlan, batch: int, workspace: Workspace) -> Batch:
    """Take the particles of one batch from the first token to the last."""
    del workspace
    way, orders = _make_walk(plan, batch), _draw_orders(plan, batch)
    sums, scratch = _make_buffers(plan)
    return _sum_up(plan, _take(plan, way, orders, sums, scratch), way, scratch)


def _take(plan: BatchPlan, way: Walk, orders: Small, sums: Sums, scratch: Scratch) -> Particles:
    """Give all tokens to the particles; a placement for those that move has no light rows."""
    placement, size, moving = plan.placement, plan.particles, plan.moves > 0
    network, follow = plan.network
    states = network.states
    crowd = Particles(
        tables=np.empty((size, placement.width), np.int32 if moving else placement.kind),
        slots=np.empty((size, placement.slots), np.uint8 if moving else placement.kind),
        values=np.empty((size, BLOCK * -(-states // BLOCK))),
        balls=np.empty((size, states), np.int32),
        states=np.empty(
            (size, placement.tokens if moving else 0),
            np.uint16 if moving and states > BYTE else np.uint8,
        ),
        log_weights=np.empty(size),
        orders=orders,
    )
    start_crowd(network, crowd)
    cursor = np.zeros(4, np.int64)
    while cursor[0] < len(way.ess):
        travel(network, crowd, way, plan.moves, cursor, WORK, sums, scratch)
    for row, times in follow.items():
        crowd.tables[:, row : row + states] = times * crowd.balls
    return crowd


def _make_walk(plan: BatchPlan, batch: int) -> Walk:
    """Start the way of a batch, before its first token."""
    edges = plan.edges
    return Walk(
        edges=edges,
        batch=batch,
        tag=PURPOSES * plan.round,
        key=plan.key,
        scheme=NEVER if plan.resampling is None else SCHEMES[plan.resampling],
        least=plan.least * plan.particles,
        moved=plan.moved,
        ess=np.zeros(len(edges) - 1),
        resampled=np.zeros(len(edges) - 1, np.uint8),
        level=np.zeros(1),
    )


def _draw_orders(plan: BatchPlan, batch: int) -> Small:
    """Draw the cells of the tokens, (1, T), or (P, T) if every particle has its own order."""
    tokens = plan.token_cells
    if not plan.own:
        rng = generator(plan.seed, batch, Stream.SCHEDULE, plan.round)
        return np.asarray(rng.permutation(tokens)[None])
    orders = np.tile(tokens, (plan.particles, 1))
    uniforms = np.empty(len(tokens) + len(tokens) % 2)
    shuffle_orders(orders, batch, PURPOSES * plan.round, plan.key, uniforms)
    return orders


def _make_buffers(plan: BatchPlan) -> tuple[Sums, Scratch]:
    """Make room for the numbers that a batch works with."""
    size, blocks = plan.particles, -(-plan.placement.network.states // BLOCK)
    sums = Sums(
        w=np.zeros((LANES, BLOCK * blocks)),
        running=np.zeros((LANES, 1 + blocks)),
        uniforms=np.empty((LANES, CHUNK)),
        product=np.empty(LANES),
    )
    return sums, Scratch(
        weights=np.empty(size),
        draws=np.empty(size + size % 2),
        offspring=np.empty(size, np.int64),
        parents=np.empty(size, np.int64),
    )


def _sum_up(plan: BatchPlan, crowd: Particles, way: Walk, scratch: Scratch) -> Batch:
    """Sum up what the particles of a batch found when all tokens are in."""
    placement, size = plan.placement, plan.particles
    places = placement.places
    mean, _ = normalise(crowd.log_weights, scratch.weights)
    means = np.zeros(placement.cells)
    means[placement.known] += placement.balls
    average_counts(placement.network, crowd, places, scratch.weights, means)
    counts = None
    if plan.keep:
        counts = np.zeros((size, placement.cells), np.int32)
        counts[:, placement.known] += placement.balls.astype(np.int32)
        unfold_counts(placement.network, crowd, places, counts)
    level = float(way.level[0])
    log_weights = crowd.log_weights + level
    return Batch(level + mean, log_weights, means, way.ess, way.resampled, counts)


def complete_network(placement: Placement, moving: bool) -> tuple[Network, dict[int, int]]:
    """Find what a state weighs by its tokens alone: all factors of rows that all tokens share.

    Returns
    -------
    network
        The placement's, plain if it can be so. Only particles that are ``moving`` keep rows
        that follow from others out of their tables meanwhile.
    follow
        Rows of the table that hold so many times the tokens of every state; filled in when
        all tokens are in.
    """
    net, tokens = placement.network, placement.tokens
    if placement.alone is not None:
        above, below = ([(float(a), 1) for a in alphas] for alphas in placement.alone)
        return net._replace(value=_values(above, below, tokens)), {}
    alone = (net.place == net.place[0]).all(axis=0)
    return _set_apart(net, tokens, alone) if moving and _separate(net, alone) else (net, {})


def _set_apart(
    net: Network, tokens: int, alone: NDArray[np.bool_]
) -> tuple[Network, dict[int, int]]:
    """Put rows that follow from the states' tokens into the value of a state."""
    rows, kept = net.place[0], np.flatnonzero(~alone)
    factors: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
    follow = {}
    for n in np.flatnonzero(alone):
        same = np.flatnonzero(alone & (rows == rows[n]))
        factors[int(net.divides[n])].append((net.alpha[0, n] + np.sum(same < n), len(same)))
        follow[int(rows[n])] = len(same)
    alpha = [
        net.alpha[0, n] + (net.place[:, kept[:e]] == net.place[:, [n]]).sum(axis=1)
        for e, n in enumerate(kept)
    ]
    plain = net._replace(
        place=np.ascontiguousarray(net.place[:, kept]),
        column=net.column[kept],
        alpha=np.stack(alpha, 1),
        value=_values(factors[0], factors[1], tokens),
    )
    return plain, follow


def _separate(net: Network, alone: NDArray[np.bool_]) -> bool:
    """Tell whether a state meets rows of counts of its own, and none that is both alone and not."""
    plain = (net.column == np.arange(net.states)).all()
    if not plain or alone.all() or net.divides[~alone].any():
        return False
    rows = np.unique(net.place)
    clear = bool((np.diff(rows) >= net.states).all())
    return clear and not np.isin(net.place[:, ~alone], net.place[0, alone]).any()


def _values(above: list[tuple[float, int]], below: list[tuple[float, int]], tokens: int) -> Wide:
    r"""Multiply a state's factors, :math:`\prod (a + g n) / \prod (b + g n)`, n = 0 .. T."""
    count = np.arange(tokens + 1.0)
    top, bottom = np.ones(tokens + 1), np.ones(tokens + 1)
    for factors, product in ((above, top), (below, bottom)):
        for alpha, times in factors:
            product *= alpha + times * count
    return top / bottom


# -- the mean over particles, numbered alike ------------------------------------------------
#
# Hidden states have no names: any renumbering of them is as probable, and a mean over
# particles that differ in it makes all states alike. Particles are renumbered to agree with
# one of them, and then with their own mean, one hidden variable after the other, by the
# Hungarian method on the overlap of counts
#
#     overlap(a, b) = sum over cells of sqrt(C_a C'_b).


def exchangeable(model: AllocationModel) -> tuple[str, ...]:
    """Hidden variables whose values can be renumbered without a change of the law.

    Not those that share an axis of a tied table with another variable, whose numbers they
    take over.
    """
    families = [[model.network.family(name) for name in group] for group in model.groups]
    axes = [set(axis) for group in families for axis in zip(*group, strict=True)]
    return tuple(
        name for name in model.hidden if all(axis == {name} for axis in axes if name in axis)
    )


def matched_mean(
    compiled: CompiledModel, free: tuple[str, ...], counts: Small, log_weights: Wide
) -> Wide:
    """Mean of the flat counts of particles, renumbered to agree.

    Parameters
    ----------
    compiled
        The compiled problem.
    free
        Hidden variables whose values may be renumbered.
    counts : (P, cells)
    log_weights : (P,)
        Unnormalised. Of many particles only some are taken, by systematic resampling;
        of the largest problems one.
    """
    picks = _picks(log_weights, max(1, GATHERED // (compiled.row.size * compiled.states)))
    if len(picks) == 1:
        return np.asarray(counts[picks[0]], np.float64)
    place = compiled.row[:, :, None] + compiled.column
    sizes = tuple(compiled.hidden.values())
    axes = [1 + axis for axis, name in enumerate(compiled.hidden) if name in free]
    # Tables that no data index reaches tell of the states' sizes alone.
    telling = np.ptp(compiled.row, axis=0) > 0
    shape = (*place.shape[:2], *sizes)
    reference = counts[picks[0]][place].reshape(shape)[:, telling]
    mean = reference
    for _ in range(PASSES):
        total = np.zeros(shape)
        root = np.sqrt(reference).reshape(-1, *sizes)
        for pick in picks:
            own = counts[pick][place].reshape(shape)
            total += _renumbered(own, telling, root, axes)
        mean = total / len(picks)
        reference = mean[:, telling]
    result = np.zeros(compiled.cells)
    result[place] = mean.reshape(place.shape)
    return result


def _picks(log_weights: Wide, most: int) -> NDArray[np.int64]:
    """Particles for a plain mean, the heaviest first."""
    weights = np.exp(log_weights - log_weights.max())
    cumulative = np.cumsum(weights) / weights.sum()
    count = min(most, len(weights))
    found = np.searchsorted(cumulative, (np.arange(count) + 0.5) / count)
    found = np.minimum(found, len(weights) - 1)
    found[np.argmax(weights[found])], found[0] = found[0], found[np.argmax(weights[found])]
    return found


def _renumbered(own: Small, telling: NDArray[np.bool_], root: Wide, axes: list[int]) -> Small:
    """Counts (M, N, ...) with the values of hidden variables where they overlap most."""
    for _ in range(1 if len(axes) == 1 else PASSES):
        for axis in axes:
            mine = np.sqrt(own[:, telling]).reshape(root.shape)
            overlap = _rows(root, axis) @ _rows(mine, axis).T
            _, order = scipy.optimize.linear_sum_assignment(overlap, maximize=True)
            own = np.take(own, order, axis=axis + 1)
    return own


def _rows(counts: Wide, axis: int) -> Wide:
    return np.moveaxis(counts, axis, 0).reshape(counts.shape[axis], -1)
