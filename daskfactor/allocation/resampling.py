"""Resampling of particles, and the trajectory of a batch along its tokens, with moves.

A scheme turns weights W_1 .. W_P that sum to one into numbers of offspring N_p with
E[N_p] = P W_p and sum N_p = P:

    systematic    one uniform U:        N_p = #{i : (i + U) / P in p's stretch of the unit line}
    stratified    P of them:            N_p = #{i : (i + U_i) / P in p's stretch}
    multinomial   P of them:            N_p = #{i : U_i in p's stretch}
    residual      floor(P W_p), and the rest multinomial with what is left of the weights

Survivors stay where they are; the rest take a place that has become free.

Particles that move sweep over their past tokens now and then. Estimates stay unbiased only
because the weights have no say in when they do. To move them whenever they were resampled
would replace the states of just those sets of particles whose weights are uneven, and leave
the others as they are: estimates of p(X) of nine tokens by 8 particles then are 5 % too small
on average.

Source: R. Douc, O. Cappé and E. Moulines, "Comparison of resampling schemes for particle
filtering", ISPA 2005.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.urns import (
    CHUNK,
    LANES,
    Buffers,
    Ints,
    Network,
    Particles,
    Wide,
    Words,
    fill_uniforms,
    visit,
)
from daskfactor.kernels.jit import jit_exact

SCHEMES = {"systematic": 0, "stratified": 1, "residual": 2, "multinomial": 3}
"""Names of the schemes and their numbers in the kernels."""
NEVER = -1

STATES, OFFSPRING, ORDERS, MOVES = 0, 1, 2, 3
"""Purposes of a batch's uniforms, in the last word of their address."""
PURPOSES = 4
SWEEP = 2**10
"""Tags between two sweeps: room for the rounds."""


class Trajectory(NamedTuple):
    """Schedule of a batch, and its statistics.

    ``edges``: (E + 1,), tokens between which the weights are looked at
    ``batch``, ``tag``, ``key``: address of its uniforms; ``tag`` is a multiple of PURPOSES
    ``scheme``: of `SCHEMES`, or `NEVER`;  ``least``: effective size below which to resample
    ``moved``: (E,), 1 for stretches after which particles move
    ``ess``, ``resampled``: (E,), written;  ``level``: (1,), log of the weights' common factor
    """

    edges: Ints
    batch: int
    tag: int
    key: Words
    scheme: int
    least: float
    moved: NDArray[np.uint8]
    ess: Wide
    resampled: NDArray[np.uint8]
    level: Wide


@jit_exact
def _place_sorted(weights: Wide, draws: Wide, step: int, offspring: Ints) -> None:
    """Count offspring from P ordered points i + draws[step i], on a line of length P."""
    size = weights.size
    end, i = 0.0, 0
    for p in range(size):
        end += weights[p] * size
        while i < size and i + draws[step * i] < end:
            offspring[p] += 1
            i += 1
    if i < size:  # the sum was a rounding error short of P
        offspring[np.argmax(weights)] += size - i


@jit_exact
def _place_apart(weights: Wide, draws: Wide, count: int, offspring: Ints) -> None:
    """Count offspring from ``count`` independent points; ``weights`` becomes its running sum."""
    size = weights.size
    for p in range(1, size):
        weights[p] += weights[p - 1]
    for i in range(count):
        aim = draws[i] * weights[size - 1]
        low, high = 0, size - 1
        while low < high:
            middle = (low + high) // 2
            if weights[middle] <= aim:
                low = middle + 1
            else:
                high = middle
        offspring[low] += 1


@jit_exact
def count_offspring(scheme: int, weights: Wide, draws: Wide, offspring: Ints) -> None:
    """Count the offspring of every particle under a scheme.

    Parameters
    ----------
    scheme : a value of `SCHEMES`
    weights : (P,), sum 1, overwritten
    draws : (P,) uniforms in [0, 1)
    offspring : (P,), overwritten
    """
    size = weights.size
    offspring[:] = 0
    if scheme <= 1:
        _place_sorted(weights, draws, scheme, offspring)
        return
    count = size
    if scheme == 2:
        for p in range(size):
            share = math.floor(weights[p] * size)
            offspring[p] = share
            weights[p] = weights[p] * size - share
            count -= share
    _place_apart(weights, draws, count, offspring)


@jit_exact
def choose_parents(offspring: Ints, parents: Ints) -> None:
    """Set parents[p] = p for every particle with offspring; the others go to the surplus."""
    size, giver = offspring.size, 0
    for p in range(size):
        parents[p] = p
    for p in range(size):
        if offspring[p] > 0:
            continue
        while offspring[giver] < 2:
            giver += 1
        offspring[giver] -= 1
        parents[p] = giver


@jit_exact
def _copy(array: Any, p: int, q: int) -> None:
    """Copy row q over row p; NumPy would make a temporary array."""
    for c in range(array.shape[1]):
        array[p, c] = array[q, c]


@jit_exact
def _inherit(particles: Particles, parents: Ints, tokens: int) -> None:
    """Replace particles by copies of their parents, with the tokens so far."""
    separate, count = particles.orders.shape[0] > 1, min(tokens, particles.states.shape[1])
    for p in range(parents.size):
        q = parents[p]
        if q != p:
            _copy(particles.tables, p, q)
            _copy(particles.values, p, q)
            _copy(particles.balls, p, q)
            for t in range(count):
                particles.states[p, t] = particles.states[q, t]
            if separate:
                _copy(particles.orders, p, q)


@jit_exact
def normalise(log_weights: Wide, weights: Wide) -> tuple[float, float]:
    """Compute weights that sum to one; return the log mean weight, and the effective size."""
    top = log_weights.max()
    total, squares = 0.0, 0.0
    for p in range(weights.size):
        weights[p] = math.exp(log_weights[p] - top)
        total += weights[p]
        squares += weights[p] * weights[p]
    for p in range(weights.size):
        weights[p] /= total
    return top + math.log(total / weights.size), total * total / squares


@jit_exact
def resample(trajectory: Trajectory, e: int, log_weights: Wide, buffers: Buffers) -> bool:
    """Choose parents after stretch e; return False if the weights are even enough.

    Otherwise weights become one, and their mean goes to the level.
    """
    size = log_weights.size
    mean, trajectory.ess[e] = normalise(log_weights, buffers.weights)
    is_even, is_last = trajectory.ess[e] >= trajectory.least, e == trajectory.edges.size - 2
    if trajectory.scheme == NEVER or is_even or is_last:
        return False
    trajectory.resampled[e] = 1
    trajectory.level[0] += mean
    fill_uniforms(buffers.draws, 0, e, trajectory.batch, trajectory.tag + OFFSPRING, trajectory.key)
    count_offspring(trajectory.scheme, buffers.weights, buffers.draws[:size], buffers.offspring)
    choose_parents(buffers.offspring, buffers.parents)
    log_weights[:] = 0.0
    return True


@jit_exact
def propagate(
    net: Network,
    particles: Particles,
    trajectory: Trajectory,
    moves: int,
    step: int,
    work: float,
    buffers: Buffers,
) -> int:
    """Propagate a batch from a step on, until some work is done or all tokens are; return the next.

    The mean weight so far is exp(level) mean(exp(log_weights)): an unbiased estimate,
    because resampling turns weights into their mean.

    Parameters
    ----------
    moves : sweeps after a stretch that ``trajectory.moved`` marks
    step : number of the stretch times ``moves`` + 1, plus that of the sweep, from 1
    work : factors to compute in this call, about a nanosecond each
    """
    buffers.w[:, :] = 0.0
    buffers.running[:, 0] = 0.0
    size, factors = particles.log_weights.size, net.states
    if net.value.size == 0:
        factors *= net.place.shape[1]
    while work > 0 and step < (trajectory.edges.size - 1) * (moves + 1):
        e, sweep = step // (moves + 1), step % (moves + 1)
        step += 1
        if sweep > 0 and trajectory.moved[e] == 0:
            continue
        begin, end = 0 if sweep > 0 else trajectory.edges[e], trajectory.edges[e + 1]
        tag = trajectory.tag + (STATES if sweep == 0 else MOVES + SWEEP * (e * moves + sweep))
        for p in range(0, size, LANES):
            q = min(p + LANES, size)
            for t in range(begin, end, CHUNK):
                stop = min(t + CHUNK, end)
                for lane in range(q - p):
                    uniforms = buffers.uniforms[lane, : (stop - t + 1) // 2 * 2]
                    fill_uniforms(uniforms, t // 2, p + lane, trajectory.batch, tag, trajectory.key)
                visit(net, particles, (p, q), (t, stop), sweep > 0, buffers)
        work -= float(size * (end - begin) * (20 + factors))
        if sweep == 0 and resample(trajectory, e, particles.log_weights, buffers):
            _inherit(particles, buffers.parents, end)
    return step


@jit_exact
def shuffle_orders(orders: Any, batch: int, tag: int, key: Words, uniforms: Wide) -> None:
    """Shuffle every row by itself (Fisher and Yates), by address.

    Parameters
    ----------
    orders : (P, T), shuffled in place
    uniforms : (an even number >= T,), scratch
    """
    for p in range(orders.shape[0]):
        fill_uniforms(uniforms, 0, p, batch, tag + ORDERS, key)
        order = orders[p]
        for t in range(order.size - 1, 0, -1):
            other = int(uniforms[t] * (t + 1))
            order[t], order[other] = order[other], order[t]
