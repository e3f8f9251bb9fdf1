"""One batch: a group of particles that resample among themselves, as a task of its own.

A batch needs nothing of the others and gives an unbiased estimate of p(X), so batches may
run anywhere and in any order. Its random numbers have the address (seed; round, batch,
particle, token); a *round* is a new start with more particles per batch.

Particles that move keep the states of all their tokens, so that a token can be taken out of its
urns again; see `daskfactor.allocation.urns`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from daskfactor.allocation.compiled_model import CompiledModel
from daskfactor.allocation.model import AllocationModel
from daskfactor.allocation.placement import Placement, state_values
from daskfactor.allocation.resampling import (
    NEVER,
    PURPOSES,
    SCHEMES,
    Trajectory,
    normalise,
    propagate,
    shuffle_orders,
)
from daskfactor.allocation.urns import (
    BLOCK,
    CHUNK,
    LANES,
    Buffers,
    Network,
    Particles,
    Small,
    Wide,
    Words,
)
from daskfactor.kernels.views import Workspace
from daskfactor.random import Stream, generator

STRETCHES = 256
"""Number of times at which the weights are checked."""
LOOKS = 1024
"""The same for particles that move: those that have become alike by then stay so."""
GROWTH = 0.04
"""Share of its tokens that a particle takes up between two moves. Measured with 64 particles
on letter pairs, blocks and tensors of 300 to 1600 tokens: from 0.1 to 0.02 the spread of log
estimates falls by a third while the time grows four times."""
WORK = 1e8
"""Factors computed in one call of the kernel: about a second, so that Ctrl-C is heard."""
BYTE = 256
"""States up to which that of a token takes one byte, not two."""
GATHERED = 2**25
"""Numbers that are gathered from all particles together: a second or two."""
PASSES = 2
_KEY = np.array([0x8F14E45F, 0x2C9341CA], np.uint32)  # keeps these uniforms apart from others'


@dataclass(frozen=True)
class BatchPlan:
    """Settings and arrays that all batches of a round share.

    ``resampling``: a name of `SCHEMES` or None; ``least``: share of P below which to resample;
    ``separate_orders``: every particle takes the tokens in another order; ``unfold``: return the
    counts of every particle; ``average``: return their mean; ``moves``: sweeps at a time, 0 for
    particles that cannot move.
    """

    placement: Placement
    particles: int
    resampling: str | None
    least: float
    separate_orders: bool
    unfold: bool
    seed: int
    round: int
    moves: int = 0
    average: bool = True

    @cached_property
    def edges(self) -> NDArray[np.int64]:
        """Numbers of tokens after which the weights are checked."""
        return stretch_edges(self.placement.tokens, LOOKS if self.moves else STRETCHES)

    @cached_property
    def moved(self) -> NDArray[np.uint8]:
        """1 for the stretches after which particles move; without resampling they never do."""
        edges = self.edges
        if not self.moves or self.resampling is None:
            return np.zeros(len(edges) - 1, np.uint8)
        return move_schedule(edges)

    @cached_property
    def network(self) -> tuple[Network, dict[int, int]]:
        """The network of the placement, and rows that follow, see `complete_network`."""
        return complete_network(self.placement, self.moves > 0)

    @property
    def state_kind(self) -> type[np.unsignedinteger]:
        """Dtype of the states of tokens."""
        return np.uint8 if self.placement.network.states <= BYTE else np.uint16

    @property
    def moving_bytes(self) -> int:
        """Memory of a batch of particles that move."""
        placement = self.placement
        each = placement.kind.itemsize * placement.width + 12 * placement.network.states + 40
        each += placement.tokens * (np.dtype(self.state_kind).itemsize + 4 * self.separate_orders)
        return each * self.particles


class Batch(NamedTuple):
    """Results of a batch.

    ``log_z``: log of its estimate of E[product of u]; ``log_weights``: (P,), their mean is
    the estimate; ``ess``, ``resampled``: (E,); ``mean_counts``: (cells,) posterior mean, or None;
    ``counts``: (P, cells) or None.
    """

    log_z: float
    log_weights: Wide
    ess: Wide
    resampled: NDArray[np.uint8]
    mean_counts: Wide | None
    counts: Small | None


def stretch_edges(tokens: int, stretches: int = STRETCHES) -> NDArray[np.int64]:
    """Return the edges of about so many stretches of tokens: first 0, last T; all even but T."""
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
    """Return two words that key the uniforms of all batches."""
    words = generator(seed, 0, Stream.NOISE, 5).integers(0, 2**32, 2, np.uint32)
    return np.asarray(words ^ _KEY)


def run_batch(plan: BatchPlan, batch: int, workspace: Workspace) -> Batch:
    """Take the particles of one batch from the first token to the last."""
    del workspace
    placement, size, edges = plan.placement, plan.particles, plan.edges
    network, followers = plan.network
    states = network.states
    particles = Particles(
        tables=np.zeros((size, placement.width), placement.kind),
        values=np.zeros((size, BLOCK * -(-states // BLOCK))),
        balls=np.zeros((size, states), np.int32),
        states=np.zeros((size, placement.tokens if plan.moves else 0), plan.state_kind),
        log_weights=np.zeros(size),
        orders=_draw_orders(plan, batch),
    )
    particles.values[:, :states] = network.value[0] if network.value.size else 0.0
    trajectory = Trajectory(
        edges=edges,
        batch=batch,
        tag=PURPOSES * plan.round,
        key=make_key(plan.seed),
        scheme=NEVER if plan.resampling is None else SCHEMES[plan.resampling],
        least=plan.least * size,
        moved=plan.moved,
        ess=np.zeros(len(edges) - 1),
        resampled=np.zeros(len(edges) - 1, np.uint8),
        level=np.zeros(1),
    )
    step, buffers = 0, make_buffers(plan)
    while step < len(trajectory.ess) * (plan.moves + 1):
        step = propagate(network, particles, trajectory, plan.moves, step, WORK, buffers)
    for row, times in followers.items():
        particles.tables[:, row : row + states] = times * particles.balls
    log_mean, _ = normalise(particles.log_weights, buffers.weights)
    level = float(trajectory.level[0])
    return Batch(
        level + log_mean,
        particles.log_weights + level,
        trajectory.ess,
        trajectory.resampled,
        _average(placement, particles, buffers.weights) if plan.average else None,
        _unfold(placement, particles, slice(None)) if plan.unfold else None,
    )


def _draw_orders(plan: BatchPlan, batch: int) -> Small:
    """Draw the cells of the tokens, (1, T), or (P, T) if particles have separate orders."""
    values = plan.placement.values
    tokens = np.repeat(np.arange(len(values), dtype=np.int32), values)
    if not plan.separate_orders:
        rng = generator(plan.seed, batch, Stream.SCHEDULE, plan.round)
        return np.asarray(rng.permutation(tokens)[None])
    orders = np.tile(tokens, (plan.particles, 1))
    uniforms = np.empty(len(tokens) + len(tokens) % 2)
    shuffle_orders(orders, batch, PURPOSES * plan.round, make_key(plan.seed), uniforms)
    return orders


def make_buffers(plan: BatchPlan) -> Buffers:
    """Make the buffers of a batch."""
    size, blocks = plan.particles, -(-plan.placement.network.states // BLOCK)
    return Buffers(
        w=np.zeros((LANES, BLOCK * blocks)),
        running=np.zeros((LANES, 1 + blocks)),
        uniforms=np.empty((LANES, CHUNK)),
        product=np.empty(LANES),
        weights=np.empty(size),
        draws=np.empty(size + size % 2),
        offspring=np.empty(size, np.int64),
        parents=np.empty(size, np.int64),
    )


def _unfold(placement: Placement, particles: Particles, rows: slice) -> Small:
    """Return the flat counts of some particles, (P, cells)."""
    tables, balls = particles.tables[rows], particles.balls[rows]
    counts = np.zeros((len(tables), placement.cells), np.int32)
    counts[:, placement.table_cells] = tables[:, placement.table_columns]
    counts[:, placement.state_cells] = balls[:, None]
    counts[:, placement.constant_cells] = placement.constant_counts
    return counts


def _average(placement: Placement, particles: Particles, weights: Wide) -> Wide:
    """Return the mean of the flat counts, one particle at a time."""
    means = np.zeros(placement.cells)
    for p, weight in enumerate(weights):
        means += weight * _unfold(placement, particles, slice(p, p + 1))[0]
    means[placement.constant_cells] = placement.constant_counts
    return means


def complete_network(placement: Placement, moving: bool) -> tuple[Network, dict[int, int]]:
    """Multiply the factors that depend on a state's tokens alone: of rows that all tokens share.

    Returns
    -------
    network
        The placement's, plain if it can be so. Only particles that are ``moving`` keep rows
        that follow from others out of their tables meanwhile.
    followers
        Rows of the table that hold so many times the tokens of every state; filled in when
        all tokens are in.
    """
    net = placement.network
    alone = (net.place == net.place[0]).all(axis=0)
    if net.value.size > 0 or not moving or not _separate(net, alone):
        return net, {}
    return _set_apart(net, placement.tokens, alone)


def _set_apart(
    net: Network, tokens: int, alone: NDArray[np.bool_]
) -> tuple[Network, dict[int, int]]:
    """Put rows that follow from the states' tokens into the value of a state."""
    rows, others = net.place[0], np.flatnonzero(~alone)
    factors: dict[int, list[tuple[float, int]]] = {0: [], 1: []}
    followers = {}
    for n in np.flatnonzero(alone):
        same = np.flatnonzero(alone & (rows == rows[n]))
        factors[int(net.divides[n])].append((net.alpha[0, n] + np.sum(same < n), len(same)))
        followers[int(rows[n])] = len(same)
    alpha = [
        net.alpha[0, n] + (net.place[:, others[:e]] == net.place[:, [n]]).sum(axis=1)
        for e, n in enumerate(others)
    ]
    plain = net._replace(
        place=np.ascontiguousarray(net.place[:, others]),
        column=net.column[others],
        alpha=np.stack(alpha, 1),
        value=state_values(factors[0], factors[1], tokens),
    )
    return plain, followers


def _separate(net: Network, alone: NDArray[np.bool_]) -> bool:
    """Check that a state has rows of counts, and none of them is both alone and not."""
    plain = (net.column == np.arange(net.states)).all()
    if not plain or alone.all() or net.divides[~alone].any():
        return False
    rows = np.unique(net.place)
    clear = bool((np.diff(rows) >= net.states).all())
    return clear and not np.isin(net.place[:, ~alone], net.place[0, alone]).any()


# -- the mean over particles, numbered alike ------------------------------------------------
#
# Hidden states have no names: any renumbering of them is as probable, and a mean over
# particles that differ in it makes all states alike. Particles are renumbered to agree with
# one of them, and then with their own mean, one hidden variable after the other, by the
# Hungarian method on the overlap of counts
#
#     overlap(a, b) = sum over cells of sqrt(C_a C'_b).


def exchangeable(model: AllocationModel) -> tuple[str, ...]:
    """Return the hidden variables whose values can be renumbered without a change of the law.

    A variable that shares an axis of a tied table with another one takes over its numbers.
    """
    families = [[model.network.family(name) for name in group] for group in model.groups]
    axes = [set(axis) for group in families for axis in zip(*group, strict=True)]
    return tuple(
        name for name in model.hidden if all(axis == {name} for axis in axes if name in axis)
    )


def matched_mean(
    compiled: CompiledModel, free: tuple[str, ...], counts: Small, log_weights: Wide
) -> Wide:
    """Return the mean of the flat counts of particles, renumbered to agree.

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
    # Tables that no data index reaches hold the states' sizes alone.
    indexed = np.ptp(compiled.row, axis=0) > 0
    shape = (*place.shape[:2], *sizes)
    reference = counts[picks[0]][place].reshape(shape)[:, indexed]
    mean = reference
    for _ in range(PASSES):
        total = np.zeros(shape)
        root = np.sqrt(reference).reshape(-1, *sizes)
        for pick in picks:
            total += _renumbered(counts[pick][place].reshape(shape), indexed, root, axes)
        mean = total / len(picks)
        reference = mean[:, indexed]
    result = np.zeros(compiled.cells)
    result[place] = mean.reshape(place.shape)
    return result


def _picks(log_weights: Wide, most: int) -> NDArray[np.int64]:
    """Pick particles for a plain mean, the heaviest first."""
    weights = np.exp(log_weights - log_weights.max())
    cumulative = np.cumsum(weights) / weights.sum()
    count = min(most, len(weights))
    picks = np.searchsorted(cumulative, (np.arange(count) + 0.5) / count)
    picks = np.minimum(picks, len(weights) - 1)
    heaviest = int(np.argmax(weights[picks]))
    picks[[0, heaviest]] = picks[[heaviest, 0]]
    return picks


def _renumbered(counts: Small, indexed: NDArray[np.bool_], root: Wide, axes: list[int]) -> Small:
    """Renumber the values of hidden variables in counts (M, N, ...) to overlap most."""
    for _ in range(1 if len(axes) == 1 else PASSES):
        for axis in axes:
            square_root = np.sqrt(counts[:, indexed]).reshape(root.shape)
            overlap = _rows(root, axis) @ _rows(square_root, axis).T
            _, order = scipy.optimize.linear_sum_assignment(overlap, maximize=True)
            counts = np.take(counts, order, axis=axis + 1)
    return counts


def _rows(counts: Wide, axis: int) -> Wide:
    return np.moveaxis(counts, axis, 0).reshape(counts.shape[axis], -1)
