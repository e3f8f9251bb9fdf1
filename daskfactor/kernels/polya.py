"""Pólya urns: what a particle does with a stretch of tokens.

For token t in observed cell m, with counts C of the tokens before it,

    w[h] = prod_n (alpha_n + C[m, n, h]) / (A_n + D[m, n, h]),   u = sum_h w[h],

the hidden state is h with probability w[h] / u, the weight of the particle is multiplied
by u, and the counts that belong to (m, h) go up by one. Every factor of the product is a
*register*: an urn's count above the fraction line, a total below it. Factors that are the
same for every allocation are left out here and put in by ``allocation/placement.py``.

Counts of a register's row m are in one of two places, and both give the same bits:

- *dense*: ``table[place + column]``, for rows that many tokens fall in;
- *light*: a list of the columns of the row's earlier tokens, in slots of one or two bytes,
  laid out in a scratch row of the table while it is needed; so the memory of a particle
  follows the number of tokens, however large the tables are.

In a *simple* network (one urn per state: NMF, CP, topics) everything that does not depend on
m is a function of the number of tokens in state h. Its value is kept, and the value after
one more token too, so that no division waits for a draw.

Uniforms are Philox words by address (token // 2, particle, batch, tag); see ``philox.py``.

Source: Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
simulating Pólya urns", procedure BAM-SIS.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact
from daskfactor.kernels.philox import _rounds
from daskfactor.kernels.prefetch import prefetch

Scalar = Any
Wide = NDArray[np.float64]
Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Words = NDArray[np.uint32]
Counts = NDArray[Any]  # the smallest unsigned integers that hold them

CHUNK = 256  # tokens whose uniforms are made at a time
BLOCK = 4  # states weighed at a time
LANES = 4  # particles that take turns
AHEAD = 4  # tokens whose rows are fetched from memory before their turn
LARGE, SMALL = 1e150, 1e-150  # products of weights between them wait for their logarithm

_HALF_WORD = np.uint64(32)
_DROPPED = np.uint64(11)
_GRAIN = 2.0**-53
_ONE, _TWO, _THREE, _FOUR = (np.uint64(n) for n in (1, 2, 3, 4))


class Network(NamedTuple):
    """Registers of a model at its data; R of them, M observed cells, H states, L light rows.

    ``place``: (M, R), offset in the table, or -1 - l for light row l
    ``alpha``: (R,), pseudo-counts
    ``scratch``: (R,), offset of the register's scratch row in the table
    ``start``: (L + 1,), first slot of every light row, and the end of the last
    ``scale``: (M,), u is multiplied by it: 1 / X(m), so that particles with orders of their
    own are not judged by how frequent their cells are
    ``above``, ``below``: alphas of the registers that depend on h alone, in a simple network
    ``simple``: 1 if columns are 0 .. H-1 and only ``above`` and ``below`` have a fraction line

    and in other networks

    ``column``: (R, H), offset that state h adds
    ``divides``: (R,), 1 for a total
    ``address``: (M, R), the row in the model's own numbering
    ``twin``: (R, R), 1 at (n, e) if the earlier register e of a token counts in n's urn
    """

    place: Small
    alpha: Wide
    scratch: Ints
    start: Ints
    scale: Wide
    above: Wide
    below: Wide
    simple: int
    column: Small
    divides: NDArray[np.uint8]
    address: Ints
    twin: NDArray[np.uint8]
    states: int


class Particles(NamedTuple):
    """State of P particles.

    ``tables``: (P, W); ``slots``: (P, S); ``log_weights``: (P,)
    ``values``, ``nexts``, ``balls``: (P, 4 ceil(H/4)), what a state weighs before its rows are
    looked at, what it will weigh with one more token, and its tokens
    ``orders``: (1, T) or, if every particle has its own, (P, T): the tokens' cells
    """

    tables: Counts
    slots: Counts
    values: Wide
    nexts: Wide
    balls: Wide
    log_weights: Wide
    orders: Small


class Sums(NamedTuple):
    """Buffers of a batch, a row for each of the particles that go together.

    ``w``: (LANES, 4 ceil(H/4)); ``running``: (LANES, 1 + ceil(H/4)) sums of it;
    ``uniforms``: (LANES, CHUNK); ``product``: (LANES,); ``offset``: (R,) or more
    """

    w: Wide
    running: Wide
    uniforms: Wide
    product: Wide
    offset: NDArray[np.uint64]


@jit_exact
def fill_uniforms(out: Wide, pair: int, particle: int, batch: int, tag: int, key: Words) -> None:
    """Uniforms in [0, 1) on a grid of 2^-53; a pair of tokens shares a Philox counter."""
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    c1, c2, c3 = np.uint64(particle), np.uint64(batch), np.uint64(tag)
    for p in range(out.size // 2):
        w0, w1, w2, w3 = _rounds((np.uint64(pair + p), c1, c2, c3), k0, k1)
        out[2 * p] = np.float64(((w0 << _HALF_WORD) | w1) >> _DROPPED) * _GRAIN
        out[2 * p + 1] = np.float64(((w2 << _HALF_WORD) | w3) >> _DROPPED) * _GRAIN


@inline
def _empty(slots: Any) -> Scalar:
    """What stands in a slot before a token does: the largest number."""
    return slots.dtype.type((1 << (8 * slots.itemsize)) - 1)


@inline
def _pick(
    w: Wide, running: Wide, lane: Scalar, blocks: Scalar, states: Scalar, uniform: Scalar
) -> Scalar:
    """The state whose stretch of the running sums holds ``uniform`` of the total."""
    aim = uniform * running[lane, blocks]
    b = 0
    for k in range(1, blocks):
        b += running[lane, k] <= aim
    rest = aim - running[lane, b]
    b *= BLOCK
    one = w[lane, b]
    two = one + w[lane, b + 1]
    three = two + w[lane, b + 2]
    h = b + (one <= rest) + (two <= rest) + (three <= rest)
    return np.uint64(min(h, states - 1))


@inline
def _weigh(
    value: Wide, table: Counts, lane: Scalar, o: Scalar, a: Scalar, w: Wide, running: Wide
) -> None:
    """Weights w = value * (a + counts), and running sums of its blocks."""
    total, b = 0.0, np.uint64(0)
    for k in range(running.shape[1] - 1):
        x0 = value[lane, b] * (a + table[lane, o + b])
        x1 = value[lane, b + _ONE] * (a + table[lane, o + b + _ONE])
        x2 = value[lane, b + _TWO] * (a + table[lane, o + b + _TWO])
        x3 = value[lane, b + _THREE] * (a + table[lane, o + b + _THREE])
        w[lane, b], w[lane, b + _ONE] = x0, x1
        w[lane, b + _TWO], w[lane, b + _THREE] = x2, x3
        total += (x0 + x1) + (x2 + x3)
        running[lane, k + 1] = total
        b += _FOUR


@inline
def _weigh_two(
    value: Wide,
    table: Counts,
    lane: Scalar,
    o: Scalar,
    a: Scalar,
    p: Scalar,
    c: Scalar,
    w: Wide,
    running: Wide,
) -> None:
    """The same for two rows: w = value * (a + counts at o) * (c + counts at p)."""
    total, b = 0.0, np.uint64(0)
    for k in range(running.shape[1] - 1):
        d, e, f = b + _ONE, b + _TWO, b + _THREE
        x0 = value[lane, b] * (a + table[lane, o + b]) * (c + table[lane, p + b])
        x1 = value[lane, d] * (a + table[lane, o + d]) * (c + table[lane, p + d])
        x2 = value[lane, e] * (a + table[lane, o + e]) * (c + table[lane, p + e])
        x3 = value[lane, f] * (a + table[lane, o + f]) * (c + table[lane, p + f])
        w[lane, b], w[lane, d], w[lane, e], w[lane, f] = x0, x1, x2, x3
        total += (x0 + x1) + (x2 + x3)
        running[lane, k + 1] = total
        b += _FOUR


@inline
def state_value(count: Scalar, above: Wide, below: Wide) -> Scalar:
    """What a state with this many tokens weighs before its rows are looked at."""
    top, bottom = 1.0, 1.0
    for n in range(above.size):
        top *= above[n] + count
    for n in range(below.size):
        bottom *= below[n] + count
    return top / bottom


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


@inline
def _divide(w: Wide, bottom: Wide, lane: Scalar, states: Scalar, running: Wide) -> None:
    """Weights w / bottom, and running sums of its blocks."""
    total = 0.0
    for k in range(running.shape[1] - 1):
        block = 0.0
        for h in range(BLOCK * k, min(BLOCK * k + BLOCK, states)):
            w[lane, h] /= bottom[lane, h]
            block += w[lane, h]
        total += block
        running[lane, k + 1] = total


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
