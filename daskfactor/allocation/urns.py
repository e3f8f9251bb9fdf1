"""Pólya urns: what a particle does with a stretch of tokens, for the first time or again.

For token t in observed cell m, with counts C of the tokens before it,

    w[h] = prod_n (alpha_n + C[m, n, h]) / (A_n + D[m, n, h]),   u = sum_h w[h],

the hidden state is h with probability w[h] / u, the weight of the particle is multiplied
by u, and the counts that belong to (m, h) go up by one. Every factor of the product is a
*register*: an urn's count above the fraction line, a total below it. Factors that are the
same for every allocation are left out here and put in by ``allocation/placement.py``.

A particle that moves visits earlier tokens again: it takes a token out of its urns, weighs all
states, draws one of them and puts the token back. That leaves p(z_1 .. z_τ | x_1 .. x_τ) as it
is, so that weights need no change, while copies of one particle become different ones.

Counts of a register's row m are in one of two places, and both give the same bits:

- *dense*: ``table[place + column]``, for rows that many tokens fall in;
- *light*: a list of the columns of the row's earlier tokens, in slots of one or two bytes,
  laid out in a scratch row of the table while it is needed; so the memory of a particle
  follows the number of tokens, however large the tables are. Particles that move have none.

In a *plain* network (one urn per state: NMF, CP, topics) everything that does not depend on
m is a function of the number of tokens in state h, and is looked up.

Uniforms are Philox words by address (token // 2, particle, batch, tag); see ``philox.py``.

Sources: Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
simulating Pólya urns", procedure BAM-SIS. W. R. Gilks and C. Berzuini, "Following a moving
target: Monte Carlo inference for dynamic Bayesian models", JRSS B 63, 2001.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, prefetch
from daskfactor.kernels.philox import rounds

Scalar = Any
Wide = NDArray[np.float64]
Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Words = NDArray[np.uint32]
Counts = NDArray[Any]  # the smallest unsigned integers that hold them, or int32

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

    ``place``: (M, R), row of a register in a particle's table, or -1 - l for light row l
    ``column``: (R, H), what a state adds to it
    ``alpha``: (1, R) or (M, R), pseudo-counts, and earlier draws of the same token from the row
    ``scratch``: (R,), offset of the register's scratch row in the table
    ``start``: (L + 1,), first slot of every light row, and the end of the last
    ``scale``: (M,), u is multiplied by it: 1 / X(m), so that particles with orders of their
    own are not judged by how frequent their cells are
    ``value``: (T + 1,) in a plain network, all factors that depend on a state's number of
    tokens alone; registers are then rows of H counts

    and in other networks, where ``value`` is empty,

    ``divides``: (R,), 1 for a total
    ``address``: (M, R), the row in the model's own numbering
    ``twin``: (R, R), 1 at (n, e) if the earlier register e of a token counts in n's urn
    """

    place: Small
    column: Small
    alpha: Wide
    scratch: Ints
    start: Ints
    scale: Wide
    value: Wide
    divides: NDArray[np.uint8]
    address: Ints
    twin: NDArray[np.uint8]
    states: int


class Particles(NamedTuple):
    """State of P particles.

    ``tables``: (P, W), of signed numbers if they can move; ``slots``: (P, S), S = 0 if they can;
    ``log_weights``: (P,)
    ``values``: (P, 4 ceil(H/4)), what a state weighs before its rows are looked at (scratch if
    the network is not plain); ``balls``: (P, H), its tokens, in a plain network
    ``states``: (P, T) of the tokens so far, or (P, 0) if they cannot move
    ``orders``: (1, T) or, if every particle has its own, (P, T): the tokens' cells
    """

    tables: Counts
    slots: Counts
    values: Wide
    balls: Small
    states: NDArray[Any]
    log_weights: Wide
    orders: Small


class Sums(NamedTuple):
    """Buffers of a batch, a row for each of the particles that go together.

    ``w``: (LANES, 4 ceil(H/4)); ``running``: (LANES, 1 + ceil(H/4)) sums of it;
    ``uniforms``: (LANES, CHUNK); ``product``: (LANES,)
    """

    w: Wide
    running: Wide
    uniforms: Wide
    product: Wide


@jit_exact
def fill_uniforms(out: Wide, pair: int, particle: int, batch: int, tag: int, key: Words) -> None:
    """Uniforms in [0, 1) on a grid of 2^-53; a pair of tokens shares a Philox counter."""
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    c1, c2, c3 = np.uint64(particle), np.uint64(batch), np.uint64(tag)
    for p in range(out.size // 2):
        w0, w1, w2, w3 = rounds((np.uint64(pair + p), c1, c2, c3), k0, k1)
        out[2 * p] = np.float64(((w0 << _HALF_WORD) | w1) >> _DROPPED) * _GRAIN
        out[2 * p + 1] = np.float64(((w2 << _HALF_WORD) | w3) >> _DROPPED) * _GRAIN


@inline
def _empty(slots: Any) -> Scalar:
    """What stands in a slot before a token does: the largest number."""
    return slots.dtype.type((1 << (8 * slots.itemsize)) - 1)


@inline
def _offset(place: Small, spare: Ints, m: Scalar, n: Scalar, moving: Scalar) -> Scalar:
    """Where a register's row is, or is laid out."""
    return np.uint64(place[m, n] if moving or place[m, n] >= 0 else spare[n])


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
def _weigh_any(
    alpha: Wide,
    column: Small,
    divides: NDArray[np.uint8],
    twins: tuple[Ints, NDArray[np.uint8]],
    table: Counts,
    lane: Scalar,
    rows: tuple[Small, Ints, Scalar, Scalar],
    w: Wide,
    bottom: Wide,
    running: Wide,
) -> None:
    """Weights of the states in any network; ``bottom`` is scratch."""
    (address, twin), (place, spare, m, moving) = twins, rows
    states = column.shape[1]
    w[lane, :states] = 1.0
    bottom[lane, :states] = 1.0
    for n in range(column.shape[0]):
        tied, o = n > 0 and twin.size > 0, _offset(place, spare, m, n, moving)
        for h in range(states):
            factor = alpha[0, n] + table[lane, o + np.uint64(column[n, h])]
            if tied:
                factor += _earlier(address, column, twin, m, n, h)
            if divides[n] == 1:
                bottom[lane, h] *= factor
            else:
                w[lane, h] *= factor
    _divide(w, bottom, lane, states, running)


@inline
def _visit(
    net: Network,
    orders: Small,
    counts: tuple[Counts, Counts],
    urns: tuple[Wide, Small],
    states: NDArray[Any],
    logs: Wide,
    sums: Sums,
    again: bool,
    plain: bool,
) -> None:
    """Tokens of a few particles, turn by turn: their first step, or ``again``.

    One token waits for the draw of the one before it, and meanwhile other particles' tokens
    keep the processor busy. The first step adds logs of u.

    ``plain`` is a constant where this is merged into its caller, and ``moving`` follows from a
    type: the loops are compiled without what the others need, which costs them up to a quarter.
    """
    # Arrays are taken out of tuples here, and rows are opened without a helper: numba
    # would count references in the inner loop, which costs more than the loop itself.
    place, column, alpha, value = net.place, net.column, net.alpha, net.value
    spare, start, scale = net.scratch, net.start, net.scale
    divides, twins = net.divides, (net.address, net.twin)
    w, running, uniforms, product = sums.w, sums.running, sums.uniforms, sums.product
    (tables, slots), (values, balls) = counts, urns
    registers, blocks, last = place.shape[1], running.shape[1] - 1, net.states
    own, lanes, empty = orders.shape[0] > 1, np.uint64(tables.shape[0]), _empty(slots)
    moving, kind = np.iinfo(tables.dtype).min < 0, states.dtype.type
    again = again and moving
    tokens, varied = orders.shape[1], alpha.shape[0] > 1
    product[:] = 1.0
    for t in range(tokens):
        if again:
            for lane in range(lanes):
                mine = lane if own else np.uint64(0)
                m = np.uint64(orders[mine, t])
                later = np.uint64(orders[mine, min(t + AHEAD, tokens - 1)])
                for n in range(registers):
                    prefetch(tables, lane, place[later, n])
                h = np.uint64(states[lane, t])
                if plain:
                    balls[lane, h] -= 1
                    values[lane, h] = value[balls[lane, h]]
                for n in range(registers):
                    step = h if plain else np.uint64(column[n, h])
                    tables[lane, np.uint64(place[m, n]) + step] -= 1
        for lane in range(lanes):
            mine = lane if own else np.uint64(0)
            m = np.uint64(orders[mine, t])
            if not moving:
                later = np.uint64(orders[mine, min(t + AHEAD, tokens - 1)])
                for n in range(registers):
                    at = place[later, n]
                    if at < 0:
                        prefetch(slots, lane, start[-1 - at])
                    else:
                        prefetch(tables, lane, at)
                    at = place[m, n]
                    if at < 0:
                        s, stop = np.uint64(start[-1 - at]), np.uint64(start[-at])
                        while s < stop and slots[lane, s] != empty:
                            tables[lane, np.uint64(spare[n]) + np.uint64(slots[lane, s])] += 1
                            s += _ONE
            if plain:
                r, o = m if varied else np.uint64(0), _offset(place, spare, m, 0, moving)
                if registers == 1:
                    _weigh(values, tables, lane, o, alpha[r, 0], w, running)
                else:
                    p, a, c = _offset(place, spare, m, 1, moving), alpha[r, 0], alpha[r, 1]
                    _weigh_two(values, tables, lane, o, a, p, c, w, running)
                for n in range(2, registers):
                    o = _offset(place, spare, m, n, moving)
                    _weigh(w, tables, lane, o, alpha[r, n], w, running)
            else:
                rows = place, spare, m, moving
                _weigh_any(alpha, column, divides, twins, tables, lane, rows, w, values, running)
            h = _pick(w, running, lane, blocks, last, uniforms[lane, t])
            if plain:
                balls[lane, h] += 1
                values[lane, h] = value[balls[lane, h]]
            for n in range(registers):
                at, step = place[m, n], h if plain else np.uint64(column[n, h])
                if moving or at >= 0:
                    tables[lane, np.uint64(at) + step] += 1
                else:
                    s, stop = np.uint64(start[-1 - at]), np.uint64(start[-at])
                    while s < stop and slots[lane, s] != empty:
                        tables[lane, np.uint64(spare[n]) + np.uint64(slots[lane, s])] = 0
                        s += _ONE
                    slots[lane, s] = step
            if moving:
                states[lane, t] = kind(h)
            if not again:
                product[lane] *= running[lane, blocks] * scale[m]
                if not SMALL < product[lane] < LARGE:
                    logs[lane] += math.log(product[lane])
                    product[lane] = 1.0
    for lane in range(lanes):
        logs[lane] += math.log(product[lane])  # of one, if again


@jit_exact
def visit(
    net: Network,
    crowd: Particles,
    particles: tuple[int, int],
    tokens: tuple[int, int],
    again: bool,
    sums: Sums,
) -> None:
    """Give a few particles their next tokens, or draw the states of past ones again.

    Parameters
    ----------
    particles : a stretch of at most LANES
    tokens : a stretch of at most CHUNK
    again : whether the tokens are past ones, of particles that can move
    sums : ``uniforms`` holds a number for each of them
    """
    (p, q), (begin, end) = particles, tokens
    own = crowd.orders.shape[0] > 1
    orders = crowd.orders[p:q, begin:end] if own else crowd.orders[0:1, begin:end]
    counts, urns = (crowd.tables[p:q], crowd.slots[p:q]), (crowd.values[p:q], crowd.balls[p:q])
    states, logs = crowd.states[p:q, begin:end], crowd.log_weights[p:q]
    if net.value.size > 0:
        _visit(net, orders, counts, urns, states, logs, sums, again, True)
    else:
        _visit(net, orders, counts, urns, states, logs, sums, again, False)


@jit_exact
def start_crowd(net: Network, crowd: Particles) -> None:
    """No token yet: empty tables and slots, and what an empty state weighs."""
    crowd.tables[:, :] = 0
    crowd.slots[:, :] = _empty(crowd.slots)
    crowd.values[:, :] = 0.0
    crowd.balls[:, :] = 0
    crowd.log_weights[:] = 0.0
    if net.value.size > 0:
        crowd.values[:, : net.states] = net.value[0]


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
