"""Urns of particles and the weights of their states: what the particle kernels share.

Counts of a register's row m are in one of two places, and both give the same bits:

- *dense*: ``table[place + column]``, for rows that many tokens fall in;
- *light*: a list of the columns of the row's earlier tokens, in slots of one or two bytes,
  laid out in a scratch row of the table while it is needed; so the memory of a particle
  follows the number of tokens, however large the tables are.

Uniforms are Philox words by address (token // 2, particle, batch, tag); see ``philox.py``.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact
from daskfactor.kernels.philox import _rounds

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
