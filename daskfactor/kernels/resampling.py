"""Resampling particles, and the walk of one batch of them along its tokens.

A scheme turns weights W_1 .. W_P that sum to one into numbers of offspring N_p with
E[N_p] = P W_p and sum N_p = P:

    systematic    one uniform U:        N_p = #{i : (i + U) / P in p's stretch of the unit line}
    stratified    P of them:            N_p = #{i : (i + U_i) / P in p's stretch}
    multinomial   P of them:            N_p = #{i : U_i in p's stretch}
    residual      floor(P W_p), and the rest multinomial with what is left of the weights

Survivors stay where they are; the rest take a place that has become free.

Source: R. Douc, O. Cappé and E. Moulines, "Comparison of resampling schemes for particle
filtering", ISPA 2005.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import jit_exact
from daskfactor.kernels.polya import advance
from daskfactor.kernels.urns import Ints, Network, Particles, Sums, Wide, Words, fill_uniforms

SCHEMES = {"systematic": 0, "stratified": 1, "residual": 2, "multinomial": 3}
"""Names of the schemes and their numbers in the kernels."""
NEVER = -1

STATES, OFFSPRING, ORDERS = 0, 1, 2
"""What an batch's uniforms are for; in the last word of their address."""
PURPOSES = 4


class Scratch(NamedTuple):
    """Buffers of a batch, (P,) each; ``draws`` one longer if P is odd."""

    weights: Wide
    draws: Wide
    offspring: Ints
    parents: Ints


class Walk(NamedTuple):
    """How a batch goes, and what it leaves behind.

    ``edges``: (E + 1,), tokens between which the weights are looked at
    ``batch``, ``tag``, ``key``: address of its uniforms; ``tag`` is a multiple of PURPOSES
    ``scheme``: of `SCHEMES`, or `NEVER`;  ``least``: effective size below which to resample
    ``moved``: (E,), 1 after which stretches particles that can move do so
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
    """Offspring from P ordered points i + draws[step i], on a line of length P."""
    size = weights.size
    reached, i = 0.0, 0
    for p in range(size):
        reached += weights[p] * size
        while i < size and i + draws[step * i] < reached:
            offspring[p] += 1
            i += 1
    if i < size:  # the sum was a rounding error short of P
        offspring[np.argmax(weights)] += size - i


@jit_exact
def _place_apart(weights: Wide, draws: Wide, count: int, offspring: Ints) -> None:
    """Offspring from ``count`` independent points; ``weights`` becomes its running sum."""
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
    """Numbers of offspring under a scheme.

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
            whole = math.floor(weights[p] * size)
            offspring[p] = whole
            weights[p] = weights[p] * size - whole
            count -= whole
    _place_apart(weights, draws, count, offspring)


@jit_exact
def choose_parents(offspring: Ints, parents: Ints) -> None:
    """parents[p] = p for every particle with offspring; the others go to the surplus."""
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
    """Row q over row p; NumPy's way would go through a third place."""
    for c in range(array.shape[1]):
        array[p, c] = array[q, c]


@jit_exact
def _move(crowd: Particles, parents: Ints) -> None:
    own = crowd.orders.shape[0] > 1
    for p in range(parents.size):
        q = parents[p]
        if q != p:
            _copy(crowd.tables, p, q)
            _copy(crowd.slots, p, q)
            _copy(crowd.values, p, q)
            _copy(crowd.nexts, p, q)
            _copy(crowd.balls, p, q)
            if own:
                _copy(crowd.orders, p, q)


@jit_exact
def normalise(log_weights: Wide, weights: Wide) -> tuple[float, float]:
    """Weights that sum to one; returns the log of the mean weight, and the effective size."""
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
def look(way: Walk, e: int, log_weights: Wide, s: Scratch) -> bool:
    """Look at the weights after stretch e: whether every particle is to become its parent.

    If so, weights become one, and their mean goes to the level.
    """
    size = log_weights.size
    mean, way.ess[e] = normalise(log_weights, s.weights)
    if way.scheme == NEVER or way.ess[e] >= way.least or e == way.edges.size - 2:
        return False
    way.resampled[e] = 1
    way.level[0] += mean
    fill_uniforms(s.draws, 0, e, way.batch, way.tag + OFFSPRING, way.key)
    count_offspring(way.scheme, s.weights, s.draws[:size], s.offspring)
    choose_parents(s.offspring, s.parents)
    log_weights[:] = 0.0
    return True


@jit_exact
def walk(
    net: Network, crowd: Particles, way: Walk, first: int, last: int, sums: Sums, s: Scratch
) -> None:
    """Take all particles of a batch over stretches ``first`` to ``last`` of its tokens.

    The mean weight so far is exp(level) mean(exp(log_weights)): an unbiased estimate,
    because resampling turns weights into their mean.
    """
    address = (way.batch, way.tag + STATES)
    for e in range(first, last):
        span = (way.edges[e], way.edges[e + 1])
        advance(net, crowd, span, address, way.key, sums)
        if look(way, e, crowd.log_weights, s):
            _move(crowd, s.parents)


@jit_exact
def shuffle_orders(orders: Any, batch: int, tag: int, key: Words, uniforms: Wide) -> None:
    """Put every row in an order of its own (Fisher and Yates), by address.

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
