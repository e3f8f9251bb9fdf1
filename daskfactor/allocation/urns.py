"""Pólya urns: allocation of a stretch of tokens by a few particles, for the first time or again.

For token t in observed cell m, with counts C of the tokens before it,

    w[h] = prod_n (alpha_n + C[m, n, h]) / (A_n + D[m, n, h]),   u = sum_h w[h],

the hidden state is h with probability w[h] / u, the weight of the particle is multiplied
by u, and the counts that belong to (m, h) go up by one. Every factor of the product is a
*register*: an urn's count above the fraction line, a total below it. Factors that are the
same for every allocation are left out here and put in by ``allocation/placement.py``.

A particle that moves visits earlier tokens again: it takes a token out of its urns, weighs all
states, draws one of them and puts the token back. That leaves p(z_1 .. z_τ | x_1 .. x_τ) as it
is, so that weights need no change, while copies of one particle become different ones.

In a *plain* network (one urn per state: NMF, CP, topics) everything that does not depend on
the observed cell m is a function of the number of tokens in state h, and is looked up.

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
    """Registers of a model at its data; R of them, M observed cells, H states.

    ``place``: (M, R), row of a register in a particle's table
    ``column``: (R, H), offset that a state adds to it
    ``alpha``: (1, R) or (M, R), pseudo-counts, and earlier draws of the same token from the row
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
    scale: Wide
    value: Wide
    divides: NDArray[np.uint8]
    address: Ints
    twin: NDArray[np.uint8]
    states: int


class Particles(NamedTuple):
    """State of P particles.

    ``tables``: (P, W) counts; ``log_weights``: (P,)
    ``values``: (P, 4 ceil(H/4)), weights of the states before their rows are looked up (scratch if
    the network is not plain); ``balls``: (P, H), tokens of the states, in a plain network
    ``states``: (P, T) of the tokens so far, or (P, 0) if the particles cannot move
    ``orders``: the cells of the tokens, (1, T), or (P, T) with one order for each particle
    """

    tables: Counts
    values: Wide
    balls: Small
    states: NDArray[Any]
    log_weights: Wide
    orders: Small


class Buffers(NamedTuple):
    """Buffers of a batch: a row for each of the particles that go together, then (P,) each.

    ``w``: (LANES, 4 ceil(H/4)); ``running``: (LANES, 1 + ceil(H/4)) sums of it;
    ``uniforms``: (LANES, CHUNK); ``product``: (LANES,); ``draws``: one longer if P is odd
    """

    w: Wide
    running: Wide
    uniforms: Wide
    product: Wide
    weights: Wide
    draws: Wide
    offspring: Ints
    parents: Ints


@jit_exact
def fill_uniforms(out: Wide, pair: int, particle: int, batch: int, tag: int, key: Words) -> None:
    """Fill ``out`` with uniforms on a grid of 2^-53; a pair of tokens shares a Philox counter."""
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    c1, c2, c3 = np.uint64(particle), np.uint64(batch), np.uint64(tag)
    for p in range(out.size // 2):
        w0, w1, w2, w3 = rounds((np.uint64(pair + p), c1, c2, c3), k0, k1)
        out[2 * p] = np.float64(((w0 << _HALF_WORD) | w1) >> _DROPPED) * _GRAIN
        out[2 * p + 1] = np.float64(((w2 << _HALF_WORD) | w3) >> _DROPPED) * _GRAIN


@inline
def _pick(
    w: Wide, running: Wide, lane: Scalar, blocks: Scalar, states: Scalar, uniform: Scalar
) -> Scalar:
    """Return the state whose stretch of the running sums holds ``uniform`` of the total."""
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
    """Compute weights w = value * (a + counts), and running sums of its blocks."""
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
    """Compute the same for two rows: w = value * (a + counts at o) * (c + counts at p)."""
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
    """Divide weights w by ``bottom``, and add up running sums of its blocks."""
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
    """Count the balls that earlier draws of the same token have put where draw n looks."""
    balls = 0
    cell = address[m, n] + column[n, h]
    for e in range(n):
        if twin[n, e] == 1 and address[m, e] + column[e, h] == cell:
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
    place: Small,
    m: Scalar,
    w: Wide,
    bottom: Wide,
    running: Wide,
) -> None:
    """Compute weights of the states in any network; ``bottom`` is scratch."""
    address, twin = twins
    states = column.shape[1]
    w[lane, :states] = 1.0
    bottom[lane, :states] = 1.0
    for n in range(column.shape[0]):
        tied, o = n > 0 and twin.size > 0, np.uint64(place[m, n])
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
    particles: Particles,
    rows: tuple[int, int],
    tokens: tuple[int, int],
    again: bool,
    buffers: Buffers,
    plain: bool,
) -> None:
    """Allocate tokens of a few particles, turn by turn: for the first time, or ``again``.

    One token waits for the draw of the one before it, and meanwhile other particles' tokens
    keep the processor busy. The first step adds logs of u.

    ``plain`` is a constant where this is merged into its caller: the loops are compiled without
    the branches of other networks, which cost up to a quarter.
    """
    # Arrays are taken out of tuples here, and rows are opened without a helper: numba
    # would count references in the inner loop, which costs more than the loop itself.
    place, column, alpha, value, scale = net.place, net.column, net.alpha, net.value, net.scale
    divides, twins, separate = net.divides, (net.address, net.twin), particles.orders.shape[0] > 1
    (first, end), (begin, stop) = rows, tokens
    tables, states = particles.tables[first:end], particles.states[first:end, begin:stop]
    values, balls = particles.values[first:end], particles.balls[first:end]
    logs, lanes, zero = particles.log_weights[first:end], np.uint64(end - first), np.uint64(0)
    orders = particles.orders[first:end] if separate else particles.orders
    orders = orders[:, begin:stop]
    w, running, uniforms, product = buffers.w, buffers.running, buffers.uniforms, buffers.product
    registers, blocks, last = place.shape[1], running.shape[1] - 1, net.states
    count, varied = stop - begin, alpha.shape[0] > 1
    recorded, kind = states.shape[1] > 0, states.dtype.type
    product[:] = 1.0
    for t in range(count):
        if again:
            for lane in range(lanes):
                m = np.uint64(orders[lane if separate else zero, t])
                h = np.uint64(states[lane, t])
                if plain:
                    balls[lane, h] -= 1
                    values[lane, h] = value[balls[lane, h]]
                for n in range(registers):
                    step = h if plain else np.uint64(column[n, h])
                    tables[lane, np.uint64(place[m, n]) + step] -= 1
        for lane in range(lanes):
            row = lane if separate else zero
            m, later = np.uint64(orders[row, t]), np.uint64(orders[row, min(t + AHEAD, count - 1)])
            for n in range(registers):
                prefetch(tables, lane, place[later, n])
            if plain:
                r, o = m if varied else zero, np.uint64(place[m, 0])
                if registers == 1:
                    _weigh(values, tables, lane, o, alpha[r, 0], w, running)
                else:
                    p, a, c = np.uint64(place[m, 1]), alpha[r, 0], alpha[r, 1]
                    _weigh_two(values, tables, lane, o, a, p, c, w, running)
                for n in range(2, registers):
                    _weigh(w, tables, lane, np.uint64(place[m, n]), alpha[r, n], w, running)
            else:
                _weigh_any(
                    alpha, column, divides, twins, tables, lane, place, m, w, values, running
                )
            h = _pick(w, running, lane, blocks, last, uniforms[lane, t])
            if plain:
                balls[lane, h] += 1
                values[lane, h] = value[balls[lane, h]]
            for n in range(registers):
                step = h if plain else np.uint64(column[n, h])
                tables[lane, np.uint64(place[m, n]) + step] += 1
            if recorded:
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
    particles: Particles,
    rows: tuple[int, int],
    tokens: tuple[int, int],
    again: bool,
    buffers: Buffers,
) -> None:
    """Allocate the next tokens of a few particles, or draw the states of past ones again.

    Parameters
    ----------
    rows : first and end of at most LANES particles
    tokens : first and end of at most CHUNK tokens
    again : True for past tokens, of particles that can move
    buffers : ``uniforms`` holds a number for each of them
    """
    if net.value.size > 0:
        _visit(net, particles, rows, tokens, again, buffers, True)
    else:
        _visit(net, particles, rows, tokens, again, buffers, False)
