"""Normal numbers by address: Philox4x32-10 and Box-Muller, in vectorised chunks.

    z(i, k) = z(key; counter = (k // 4, row0 + i, iteration, factor))[k % 4]

The four 32-bit words of one counter give the four components of a quad: words
(0, 1) and (2, 3) are the radius and the angle of two Box-Muller pairs. A
number depends on its address alone, never on the block it is drawn in, and on
IEEE 754 arithmetic alone, so it has the same bits on every CPU. Uniforms have
32 bits in both precisions: |z| <= 6.8.

Source: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, jit_exact_inner, stack_array
from daskfactor.kernels.polynomials import log, sincos

Scalar = Any
Array = NDArray[Any]
Words = tuple[Scalar, Scalar, Scalar, Scalar]

CHUNK = 128  # quads at a time: the buffers of a chunk stay in the first-level cache
NUMBERS = 4 * CHUNK
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PAIR_SCALE = 2.0**-32
_TURN = np.pi / 2 / 2**30


class Address(NamedTuple):
    """Address of the random numbers of a band.

    Attributes
    ----------
    key
        (2,) uint32, one per seed and chain.
    iteration, factor
        The last two words of the counter, 0 <= value < 2**32; the latter is that of
        :func:`daskfactor.inference.program.factor_word`, or of a block.
    row0
        Global index of the band's first row.
    """

    key: NDArray[np.uint32]
    iteration: int
    factor: int
    row0: int = 0


@inline
def _round(c: Words, k0: Scalar, k1: Scalar, number: Scalar) -> Words:
    """Do one round on 32-bit words in 64 bits, as the multiplier needs them."""
    p0 = _MULTIPLIER_0 * c[0]
    p1 = _MULTIPLIER_1 * c[2]
    k0 = (k0 + number * _WEYL_0) & _MASK
    k1 = (k1 + number * _WEYL_1) & _MASK
    return (p1 >> _HALF) ^ c[1] ^ k0, p1 & _MASK, (p0 >> _HALF) ^ c[3] ^ k1, p0 & _MASK


@inline
def rounds(c: Words, k0: Scalar, k1: Scalar) -> Words:
    """Do ten rounds, written out: an inner loop would keep the outer one from vectorising."""
    c = _round(c, k0, k1, np.uint64(0))
    c = _round(c, k0, k1, np.uint64(1))
    c = _round(c, k0, k1, np.uint64(2))
    c = _round(c, k0, k1, np.uint64(3))
    c = _round(c, k0, k1, np.uint64(4))
    c = _round(c, k0, k1, np.uint64(5))
    c = _round(c, k0, k1, np.uint64(6))
    c = _round(c, k0, k1, np.uint64(7))
    c = _round(c, k0, k1, np.uint64(8))
    return _round(c, k0, k1, np.uint64(9))


@jit_exact
def philox4x32(
    c0: int, c1: int, c2: int, c3: int, k0: int, k1: int
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """Return four random 32-bit words of one counter under one key (Philox4x32-10).

    Parameters
    ----------
    c0, c1, c2, c3 : counter words, 0 <= c < 2**32
    k0, k1 : key words, 0 <= k < 2**32
    """
    counter = (np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3))
    w0, w1, w2, w3 = rounds(counter, np.uint64(k0), np.uint64(k1))
    return np.uint32(w0), np.uint32(w1), np.uint32(w2), np.uint32(w3)


@inline
def radius(word: Scalar, one: Scalar) -> Scalar:
    real = type(one)
    uniform = (real(word) + real(0.5)) * real(_PAIR_SCALE)
    return np.sqrt(real(-2) * log(uniform))


@inline
def direction(word: Scalar, one: Scalar) -> Scalar:
    """Return cosine and sine of 2 pi word / 2**32 - pi/4: quadrant from the top two bits."""
    real = type(one)
    offset = np.int32(np.int32(word & np.uint32(0x3FFFFFFF)) - np.int32(0x20000000))
    s, c = sincos(real(offset) * real(_TURN))
    quadrant = np.int32(word >> np.uint32(30))
    swap = (quadrant & 1) == 1
    x = s if swap else c
    y = c if swap else s
    x = -x if quadrant == 1 or quadrant == 2 else x
    y = -y if quadrant >= 2 else y
    return x, y


@jit_exact_inner
def _addresses(quad: int, row: int, quads: int, c0: Array, c1: Array) -> None:
    for p in range(CHUNK):
        c0[p] = quad
        c1[p] = row
        quad += 1
        if quad == quads:
            quad = 0
            row += 1


@jit_exact_inner
def _words(c0: Array, c1: Array, address: Address, words: Array) -> None:
    k0, k1 = np.uint64(address.key[0]), np.uint64(address.key[1])
    c2, c3 = np.uint64(address.iteration), np.uint64(address.factor)
    for p in range(CHUNK):
        w0, w1, w2, w3 = rounds((np.uint64(c0[p]), np.uint64(c1[p]), c2, c3), k0, k1)
        words[p] = np.uint32(w0)
        words[p + CHUNK] = np.uint32(w1)
        words[p + 2 * CHUNK] = np.uint32(w2)
        words[p + 3 * CHUNK] = np.uint32(w3)


@jit_exact_inner
def _box_muller(words: Array, z: Array) -> None:
    one = z.dtype.type(1)
    for p in range(CHUNK):
        r, s = radius(words[p], one), radius(words[p + 2 * CHUNK], one)
        x, y = direction(words[p + CHUNK], one)
        u, v = direction(words[p + 3 * CHUNK], one)
        z[4 * p] = r * x
        z[4 * p + 1] = r * y
        z[4 * p + 2] = s * u
        z[4 * p + 3] = s * v


@jit_exact_inner
def _drop_padding(quad: int, quads: int, components: int, z: Array) -> int:
    """Close the gaps that the last quad of every row leaves; return how many numbers remain."""
    target = 0
    for p in range(CHUNK):
        width = min(4, components - 4 * quad)
        for c in range(width):
            z[target + c] = z[4 * p + c]
        target += width
        quad += 1
        if quad == quads:
            quad = 0
    return target


@jit_exact_inner
def normal_chunk(start: int, components: int, address: Address, z: Array) -> int:
    """Fill ``z`` with the numbers of CHUNK quads from quad ``start`` on, rows end to end.

    Quad ``start`` counts the quads of all rows of an (n, components) array.
    Returns how many of the NUMBERS places of ``z`` hold numbers.
    """
    c0 = stack_array(CHUNK, np.uint32)
    c1 = stack_array(CHUNK, np.uint32)
    words = stack_array(NUMBERS, np.uint32)
    quads = (components + 3) // 4
    quad, row = start % quads, address.row0 + start // quads
    _addresses(quad, row, quads, c0, c1)
    _words(c0, c1, address, words)
    _box_muller(words, z)
    if components % 4 == 0:
        return NUMBERS
    return _drop_padding(quad, quads, components, z)
