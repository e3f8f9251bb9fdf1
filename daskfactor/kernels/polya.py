"""Pólya urns: what a particle does with a stretch of tokens.

For token t in observed cell m, with counts C of the tokens before it,

    w[h] = prod_n (alpha_n + C[m, n, h]) / (A_n + D[m, n, h]),   u = sum_h w[h],

the hidden state is h with probability w[h] / u, the weight of the particle is multiplied
by u, and the counts that belong to (m, h) go up by one. Every factor of the product is a
*register*: an urn's count above the fraction line, a total below it. Factors that are the
same for every allocation are left out here and put in by ``allocation/placement.py``.

Where counts are kept is said in ``urns.py``.

In a *simple* network (one urn per state: NMF, CP, topics) everything that does not depend on
m is a function of the number of tokens in state h. Its value is kept, and the value after
one more token too, so that no division waits for a draw.

Source: Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
simulating Pólya urns", procedure BAM-SIS.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, prefetch
from daskfactor.kernels.urns import (
    _ONE,
    AHEAD,
    CHUNK,
    LANES,
    LARGE,
    SMALL,
    Counts,
    Ints,
    Network,
    Particles,
    Small,
    Sums,
    Wide,
    Words,
    _divide,
    _empty,
    _pick,
    _weigh,
    _weigh_two,
    fill_uniforms,
    state_value,
)

Scalar = Any


@jit_exact
def _advance_simple(
    net: Network,
    orders: Small,
    tables: Counts,
    slots: Counts,
    urns: tuple[Wide, Wide, Wide],
    logs: Wide,
    sums: Sums,
) -> None:
    """Tokens of a few particles of a simple network, turn by turn; adds logs of their u.

    One token waits for the draw of the one before it, and meanwhile other particles' tokens
    keep the processor busy. What a state weighs is kept in ``urns``, and so is what it
    will weigh with one more token.
    """
    # Arrays are taken out of tuples here, and rows are opened without a helper: numba
    # would count references in the inner loop, which costs more than the loop itself.
    place, alpha, spare, start, scale = net.place, net.alpha, net.scratch, net.start, net.scale
    above, below, w, running, offset = net.above, net.below, sums.w, sums.running, sums.offset
    value, then, balls = urns
    registers, blocks, states = alpha.size, running.shape[1] - 1, net.states
    uniforms, product = sums.uniforms, sums.product
    own, lanes, empty = orders.shape[0] > 1, tables.shape[0], _empty(slots)
    tokens = orders.shape[1]
    product[:] = 1.0
    for t in range(tokens):
        for lane in range(np.uint64(lanes)):
            mine = lane if own else np.uint64(0)
            m = np.uint64(orders[mine, t])
            later = np.uint64(orders[mine, min(t + AHEAD, tokens - 1)])
            for n in range(registers):
                at = place[later, n]
                if at < 0:
                    prefetch(slots, lane, start[-1 - at])
                else:
                    prefetch(tables, lane, at)
            for n in range(registers):
                at = place[m, n]
                if at < 0:
                    s, stop = np.uint64(start[-1 - at]), np.uint64(start[-at])
                    at = spare[n]
                    while s < stop and slots[lane, s] != empty:
                        table_at = np.uint64(at) + np.uint64(slots[lane, s])
                        tables[lane, table_at] += 1
                        s += _ONE
                offset[n] = at
            if registers == 1:
                _weigh(value, tables, lane, offset[0], alpha[0], w, running)
            else:
                _weigh_two(
                    value, tables, lane, offset[0], alpha[0], offset[1], alpha[1], w, running
                )
            for n in range(2, registers):
                _weigh(w, tables, lane, offset[n], alpha[n], w, running)
            h = _pick(w, running, lane, blocks, states, uniforms[lane, t])
            value[lane, h] = then[lane, h]
            balls[lane, h] += 1.0
            then[lane, h] = state_value(balls[lane, h] + 1.0, above, below)
            for n in range(registers):
                at = place[m, n]
                if at >= 0:
                    tables[lane, np.uint64(at) + h] += 1
                else:
                    s, stop = np.uint64(start[-1 - at]), np.uint64(start[-at])
                    while s < stop and slots[lane, s] != empty:
                        tables[lane, offset[n] + np.uint64(slots[lane, s])] = 0
                        s += _ONE
                    slots[lane, s] = h
            product[lane] *= running[lane, blocks] * scale[m]
            if not SMALL < product[lane] < LARGE:
                logs[lane] += math.log(product[lane])
                product[lane] = 1.0
    for p in range(lanes):
        logs[p] += math.log(product[p])


@inline
def _earlier(address: Ints, column: Small, twin: Any, m: Scalar, n: Scalar, h: Scalar) -> Scalar:
    """Balls that earlier draws of the same token have put where draw n now looks."""
    balls = 0
    here = address[m, n] + column[n, h]
    for e in range(n):
        if twin[n, e] == 1 and address[m, e] + column[e, h] == here:
            balls += 1
    return balls


@jit_exact
def _advance_general(
    net: Network,
    orders: Small,
    tables: Counts,
    slots: Counts,
    urns: tuple[Wide, Wide, Wide],
    logs: Wide,
    sums: Sums,
) -> None:
    """As `_advance_simple`, for any network; ``urns`` serve as scratch."""
    place, alpha, spare, start, scale = net.place, net.alpha, net.scratch, net.start, net.scale
    column, divides, address, twin = net.column, net.divides, net.address, net.twin
    w, running, bottom = sums.w, sums.running, urns[0]
    registers, blocks, states = alpha.size, running.shape[1] - 1, net.states
    uniforms, product = sums.uniforms, sums.product
    own, lanes, empty = orders.shape[0] > 1, tables.shape[0], _empty(slots)
    product[:] = 1.0
    for t in range(orders.shape[1]):
        for lane in range(lanes):
            m = orders[lane if own else 0, t]
            w[lane, :states] = 1.0
            bottom[lane, :states] = 1.0
            for n in range(registers):
                at = place[m, n]
                if at < 0:
                    s, stop = start[-1 - at], start[-at]
                    at = spare[n]
                    while s < stop and slots[lane, s] != empty:
                        tables[lane, at + slots[lane, s]] += 1
                        s += 1
                tied = n > 0 and twin.size > 0
                for h in range(states):
                    factor = alpha[n] + tables[lane, at + column[n, h]]
                    if tied:
                        factor += _earlier(address, column, twin, m, n, h)
                    if divides[n] == 1:
                        bottom[lane, h] *= factor
                    else:
                        w[lane, h] *= factor
            _divide(w, bottom, lane, states, running)
            h = _pick(w, running, lane, blocks, states, uniforms[lane, t])
            for n in range(registers):
                at = place[m, n]
                if at < 0:
                    s, stop = start[-1 - at], start[-at]
                    while s < stop and slots[lane, s] != empty:
                        tables[lane, spare[n] + slots[lane, s]] = 0
                        s += 1
            for n in range(registers):
                at = place[m, n]
                if at >= 0:
                    tables[lane, at + column[n, h]] += 1
                else:
                    s = start[-1 - at]
                    while slots[lane, s] != empty:
                        s += 1
                    slots[lane, s] = column[n, h]
            product[lane] *= running[lane, blocks] * scale[m]
            if not SMALL < product[lane] < LARGE:
                logs[lane] += math.log(product[lane])
                product[lane] = 1.0
    for p in range(lanes):
        logs[p] += math.log(product[p])


@jit_exact
def start_crowd(net: Network, crowd: Particles) -> None:
    """No token yet: empty tables and slots, and what an empty state weighs."""
    crowd.tables[:, :] = 0
    crowd.slots[:, :] = _empty(crowd.slots)
    crowd.values[:, :] = 0.0
    crowd.nexts[:, :] = 0.0
    crowd.balls[:, :] = 0.0
    crowd.log_weights[:] = 0.0
    if net.simple == 1:
        crowd.values[:, : net.states] = state_value(0.0, net.above, net.below)
        crowd.nexts[:, : net.states] = state_value(1.0, net.above, net.below)


@jit_exact
def advance(
    net: Network,
    crowd: Particles,
    span: tuple[int, int],
    address: tuple[int, int],
    key: Words,
    sums: Sums,
) -> None:
    """Give tokens ``span[0]`` to ``span[1]`` of their order to all particles, in place.

    Parameters
    ----------
    span : the first number is even
    address : batch and tag of the uniforms
    key : (2,) uint32
    """
    batch, tag = address
    own = crowd.orders.shape[0] > 1
    sums.w[:, :] = 0.0
    sums.running[:, 0] = 0.0
    for p in range(0, crowd.tables.shape[0], LANES):
        q = min(p + LANES, crowd.tables.shape[0])
        tables, slots = crowd.tables[p:q], crowd.slots[p:q]
        urns = crowd.values[p:q], crowd.nexts[p:q], crowd.balls[p:q]
        orders = crowd.orders[p:q] if own else crowd.orders[0:1]
        logs = crowd.log_weights[p:q]
        for begin in range(span[0], span[1], CHUNK):
            end = min(begin + CHUNK, span[1])
            for lane in range(q - p):
                uniforms = sums.uniforms[lane, : (end - begin + 1) // 2 * 2]
                fill_uniforms(uniforms, begin // 2, p + lane, batch, tag, key)
            if net.simple == 1:
                _advance_simple(net, orders[:, begin:end], tables, slots, urns, logs, sums)
            else:
                _advance_general(net, orders[:, begin:end], tables, slots, urns, logs, sums)


@jit_exact
def add_counts(
    net: Network,
    crowd: Particles,
    p: int,
    places: tuple[Ints, Ints, Ints],
    weight: Scalar,
    out: NDArray[Any],
) -> None:
    """Add ``weight`` times the counts of particle p to the flat counts of the model's tables.

    Parameters
    ----------
    places : first cells of table cells (W,), of light rows (L,), of urns per state (A,); -1 to skip
    out : (cells,), float64 or an integer dtype
    """
    dense, light, states = places
    table, slots, balls = crowd.tables[p], crowd.slots[p], crowd.balls[p]
    kind = out.dtype.type
    for c in range(dense.size):
        if dense[c] >= 0 and table[c] != 0:
            out[dense[c]] += kind(weight * table[c])
    for row in range(light.size):
        if light[row] < 0:
            continue
        for s in range(net.start[row], net.start[row + 1]):
            if slots[s] == _empty(slots):
                break
            out[light[row] + slots[s]] += kind(weight)
    for a in range(states.size):
        for h in range(net.states):
            out[states[a] + h] += kind(weight * balls[h])


@jit_exact
def average_counts(
    net: Network, crowd: Particles, places: tuple[Ints, Ints, Ints], weights: Wide, out: Wide
) -> None:
    """Add the weighted counts of all particles, in their order, to ``out`` (cells,)."""
    for p in range(weights.size):
        add_counts(net, crowd, p, places, weights[p], out)


@jit_exact
def unfold_counts(
    net: Network, crowd: Particles, places: tuple[Ints, Ints, Ints], out: Small
) -> None:
    """Add the counts of every particle to its row of ``out`` (P, cells)."""
    for p in range(out.shape[0]):
        add_counts(net, crowd, p, places, 1, out[p])
