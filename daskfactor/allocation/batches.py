"""One island: a group of particles that resample among themselves, as a task of its own.

An island needs nothing of the others and gives an unbiased estimate of p(X), so islands
may run anywhere and in any order. Its random numbers have the address (seed; round,
island, particle, token); a *round* is a new start with more particles per island.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.placement import Placement
from daskfactor.kernels.polya import (
    BLOCK,
    CHUNK,
    LANES,
    Particles,
    Small,
    Sums,
    Wide,
    Words,
    average_counts,
    start_crowd,
    unfold_counts,
)
from daskfactor.kernels.resampling import (
    NEVER,
    PURPOSES,
    SCHEMES,
    Scratch,
    Walk,
    normalise,
    shuffle_orders,
    walk,
)
from daskfactor.kernels.workspace import Workspace
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
_KEY = np.array([0x8F14E45F, 0x2C9341CA], np.uint32)  # keeps these uniforms apart from others'


class Journey(NamedTuple):
    """What all islands of a round have in common.

    ``resampling``: a name of `SCHEMES` or None; ``least``: share of P below which to resample;
    ``own``: whether every particle has an order of its own; ``keep``: whether to return counts;
    ``moves``: sweeps at a time, see ``moving.py``.
    """

    placement: Placement
    values: NDArray[np.int64]
    cells: int
    particles: int
    resampling: str | None
    least: float
    own: bool
    keep: bool
    seed: int
    round: int
    moves: int = 0

    @property
    def edges(self) -> NDArray[np.int64]:
        """Numbers of tokens after which the weights are looked at."""
        return stretch_edges(self.placement.tokens, LOOKS if self.moves else STRETCHES)

    @property
    def moved(self) -> NDArray[np.uint8]:
        """1 for the stretches after which particles move; without resampling they never do."""
        edges = self.edges
        if not self.moves or self.resampling is None:
            return np.zeros(len(edges) - 1, np.uint8)
        return move_schedule(edges)


class Island(NamedTuple):
    """What an island found.

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
    ``kernels/moving.py``; and after the last token nothing is left to gain.
    """
    moved = np.zeros(len(edges) - 1, np.uint8)
    last = 0
    for e, end in enumerate(edges[1:-1]):
        if end >= (1 + GROWTH) * last:
            moved[e], last = 1, end
    return moved


def make_key(seed: int) -> Words:
    """Two words that key the uniforms of all islands."""
    words = generator(seed, 0, Stream.NOISE, 5).integers(0, 2**32, 2, np.uint32)
    return np.asarray(words ^ _KEY)


def run_island(journey: Journey, island: int, workspace: Workspace) -> Island:
    """Take the particles of one island from the first token to the last."""
    del workspace
    crowd, way = _gather(journey, island), make_walk(journey, island)
    sums, scratch = make_buffers(journey)
    network, stretches = journey.placement.network, len(way.ess)
    step = max(1, int(WORK / (journey.particles * network.states * (int(way.edges[1]) + 1))))
    for first in range(0, stretches, step):
        walk(network, crowd, way, first, min(first + step, stretches), sums, scratch)
    return sum_up(journey, crowd, way, scratch)


def make_walk(journey: Journey, island: int) -> Walk:
    """The way of an island, before its first token."""
    edges = journey.edges
    return Walk(
        edges=edges,
        island=island,
        tag=PURPOSES * journey.round,
        key=make_key(journey.seed),
        scheme=NEVER if journey.resampling is None else SCHEMES[journey.resampling],
        least=journey.least * journey.particles,
        moved=journey.moved,
        ess=np.zeros(len(edges) - 1),
        resampled=np.zeros(len(edges) - 1, np.uint8),
        level=np.zeros(1),
    )


def draw_orders(journey: Journey, island: int) -> Small:
    """Cells of the tokens, (1, T), or (P, T) if every particle has an order of its own."""
    tokens = np.repeat(np.arange(len(journey.values), dtype=np.int32), journey.values)
    if not journey.own:
        rng = generator(journey.seed, island, Stream.SCHEDULE, journey.round)
        return np.asarray(rng.permutation(tokens)[None])
    orders = np.tile(tokens, (journey.particles, 1))
    uniforms = np.empty(len(tokens) + len(tokens) % 2)
    shuffle_orders(orders, island, PURPOSES * journey.round, make_key(journey.seed), uniforms)
    return orders


def _gather(journey: Journey, island: int) -> Particles:
    """Particles without tokens, and the order in which they will get them."""
    placement, size = journey.placement, journey.particles
    states = BLOCK * -(-placement.network.states // BLOCK)
    crowd = Particles(
        tables=np.empty((size, placement.width), placement.kind),
        slots=np.empty((size, placement.slots), placement.kind),
        values=np.empty((size, states)),
        nexts=np.empty((size, states)),
        balls=np.empty((size, states)),
        log_weights=np.empty(size),
        orders=draw_orders(journey, island),
    )
    start_crowd(placement.network, crowd)
    return crowd


def make_buffers(journey: Journey) -> tuple[Sums, Scratch]:
    """Room for the numbers that an island works with."""
    size, blocks = journey.particles, -(-journey.placement.network.states // BLOCK)
    sums = Sums(
        w=np.zeros((LANES, BLOCK * blocks)),
        running=np.zeros((LANES, 1 + blocks)),
        uniforms=np.empty((LANES, CHUNK)),
        product=np.empty(LANES),
        offset=np.empty(2 + len(journey.placement.network.alpha), np.uint64),
    )
    return sums, Scratch(
        weights=np.empty(size),
        draws=np.empty(size + size % 2),
        offspring=np.empty(size, np.int64),
        parents=np.empty(size, np.int64),
    )


def sum_up(journey: Journey, crowd: Particles, way: Walk, scratch: Scratch) -> Island:
    """What the particles of an island found when all tokens are in."""
    placement, size = journey.placement, journey.particles
    places = placement.places[:3]
    mean, _ = normalise(crowd.log_weights, scratch.weights)
    means = np.zeros(journey.cells)
    means[placement.places.known] += placement.places.balls
    average_counts(placement.network, crowd, places, scratch.weights, means)
    counts = None
    if journey.keep:
        counts = np.zeros((size, journey.cells), np.int32)
        counts[:, placement.places.known] += placement.places.balls.astype(np.int32)
        unfold_counts(placement.network, crowd, places, counts)
    level = float(way.level[0])
    log_weights = crowd.log_weights + level
    return Island(level + mean, log_weights, means, way.ess, way.resampled, counts)
