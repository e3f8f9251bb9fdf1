"""Gamma, Poisson and binomial numbers by address: Philox streams that rejection may draw on.

A stream is eight 64-bit words in the caller's scratch: key, counter, and half a
Philox block. Its first counter word counts up, so that a draw may take any
number of words; the other three and the key are its address:

    entry of a factor:  key ^ ENTRY, (count, global row, iteration, 256 component + factor % 256)
    cell of the data:   key ^ CELL,  (count, global row, iteration, global column)

The two kinds have keys of their own, so no stream meets another or the normals of
``philox.py``. A number depends on its address and parameters alone, never on the
block that it is drawn in, and on IEEE 754 arithmetic alone.

Sources: G. Marsaglia and W. W. Tsang, "A simple method for generating gamma
variables", ACM TOMS 26, 2000. W. Hörmann, "The transformed rejection method for
generating Poisson random variables", Insurance: Mathematics and Economics 12, 1993
(PTRS); "The generation of binomial random variates", Journal of Statistical
Computation and Simulation 46, 1993 (BTRS).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.jit import inline, jit_exact, stack_array
from daskfactor.kernels.philox import direction, rounds
from daskfactor.kernels.polynomials import log, log_tail, power

Array = NDArray[Any]
Scalar = Any
Stream = NDArray[np.uint64]

STREAM = 8
"""64-bit words of a stream: ``stream = stack_array(STREAM, np.uint64)`` makes room for one."""

TINY_32, TINY_64 = 1e-37, 1e-150
"""Smallest gamma number that `fill_gamma` writes: a product of two is still positive in float64."""

ENTRY = np.uint64(0x5851F42D)
CELL = np.uint64(0xA3EC6476)
FEW = 10.0
"""Largest mean of counts that are drawn by adding up probabilities; above it by rejection."""
LONGEST_SEARCH = 110
"""Counts beyond which a search starts anew: their probability at a mean of FEW is below 1e-70."""

_HALF_WORD = np.uint64(32)
_LOW_BITS = np.uint64(12)
_GRAIN = 2.0**-52
_LOG_ROOT_TURN = 0.9189385332046727  # log(2 pi) / 2
_E = 2.718281828459045


@inline
def start_cell(
    stream: Stream, key: NDArray[np.uint32], iteration: int, row: int, column: Scalar
) -> None:
    """Open the stream of one cell of the data.

    Parameters
    ----------
    stream : (STREAM,) uint64, overwritten
    key : (2,) uint32, one per seed and chain
    iteration, row, column : 0 <= value < 2**32; row and column are global
    """
    stream[0] = np.uint64(key[0]) ^ CELL
    stream[1] = np.uint64(key[1])
    stream[2] = np.uint64(0)
    stream[3] = np.uint64(row)
    stream[4] = np.uint64(iteration)
    stream[5] = np.uint64(column)
    stream[7] = np.uint64(0)


@inline
def start_entry(
    stream: Stream, key: NDArray[np.uint32], iteration: int, factor: int, row: int, component: int
) -> None:
    """Open the stream of one entry of a factor.

    Parameters
    ----------
    stream : (STREAM,) uint64, overwritten
    key : (2,) uint32, one per seed and chain
    iteration, row : 0 <= value < 2**32; ``row`` is global
    factor : its last eight bits tell factors apart, see
        :func:`daskfactor.inference.program.factor_word`
    component : 0 <= component < 2**24
    """
    start_cell(stream, key, iteration, row, component * 256 + (factor & 255))
    stream[0] = np.uint64(key[0]) ^ ENTRY


@jit_exact
def _next_words(stream: Stream) -> Scalar:
    """Return half of the next Philox block and store the other half."""
    w0, w1, w2, w3 = rounds((stream[2], stream[3], stream[4], stream[5]), stream[0], stream[1])
    stream[2] += np.uint64(1)
    stream[6] = (w2 << _HALF_WORD) | w3
    stream[7] = np.uint64(1)
    return (w0 << _HALF_WORD) | w1


@inline
def word(stream: Stream) -> Scalar:
    """Draw 64 random bits."""
    if stream[7] == np.uint64(1):
        stream[7] = np.uint64(0)
        return stream[6]
    return _next_words(stream)


@inline
def uniform(stream: Stream) -> Scalar:
    """Draw a float64 strictly between 0 and 1, on a grid of 2**-52."""
    return (np.float64(word(stream) >> _LOW_BITS) + 0.5) * _GRAIN


@inline
def normal(stream: Stream) -> Scalar:
    """Draw a standard normal float64 (Box-Muller)."""
    radius = np.sqrt(-2.0 * log(uniform(stream)))
    x, _ = direction(np.uint32(word(stream) >> _HALF_WORD), 1.0)
    return radius * x


@jit_exact
def _gamma_from_one(shape: float, stream: Stream) -> float:
    """Draw a Gamma(shape, 1) number for shape >= 1 (Marsaglia and Tsang 2000, section 3)."""
    d = shape - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    while True:
        x = normal(stream)
        v = 1.0 + c * x
        if v <= 0.0:
            continue
        v = v * v * v
        u = uniform(stream)
        square = x * x
        if u < 1.0 - 0.0331 * square * square:
            return d * v
        if log(u) < 0.5 * square + d * (1.0 - v + log(v)):
            return d * v


@jit_exact
def gamma(shape: float, rate: float, stream: Stream) -> float:
    """Draw a number from Gamma(shape, rate), of mean ``shape / rate``.

    Parameters
    ----------
    shape : > 0; below 1 a Gamma(shape + 1) number is multiplied by u**(1 / shape),
        which may be 0 in float64 for shapes below about 0.05
    rate : > 0, in units of 1 / the number's
    stream : opened by :func:`start_entry` or :func:`start_cell`
    """
    if shape >= 1.0:
        return _gamma_from_one(shape, stream) / rate
    boost = 1.0 / shape * log(uniform(stream))
    if boost < -700.0:
        return 0.0
    return power(_E, boost) * _gamma_from_one(shape + 1.0, stream) / rate


@jit_exact
def _stirling_tail(k: Scalar) -> Scalar:
    """Return ``log k! - (log(2 pi) / 2 + (k + 1/2) log(k + 1) - (k + 1))`` of a whole k >= 0."""
    n = k + 1.0
    if k < 10.0:
        factorial = 1.0
        for i in range(2, int(k) + 1):
            factorial *= i
        return log(factorial) - (_LOG_ROOT_TURN + (k + 0.5) * log(n) - n)
    square = 1.0 / (n * n)
    return (1.0 / 12.0 - (1.0 / 360.0 - (1.0 / 1260.0 - square / 1680.0) * square) * square) / n


@inline
def _log_ratio(x: Scalar, y: Scalar) -> Scalar:
    """Return ``log(x / y)``, without loss where x and y are large and close."""
    f = (x - y) / y
    if -0.25 < f < 0.4:
        return f + log_tail(f)
    return log(x / y)


@jit_exact
def _poisson_search(mean: float, stream: Stream) -> np.int64:
    start = power(_E, -mean)
    while True:
        u = uniform(stream)
        chance = start
        for k in range(LONGEST_SEARCH):
            if u <= chance:
                return np.int64(k)
            u -= chance
            chance *= mean / (k + 1)


@jit_exact
def _poisson_rejection(mean: float, stream: Stream) -> np.int64:
    b = 0.931 + 2.53 * np.sqrt(mean)
    a = -0.059 + 0.02483 * b
    height = log(1.1239 + 1.1328 / (b - 3.4))
    inside = 0.9277 - 3.6224 / (b - 2.0)
    while True:
        u = uniform(stream) - 0.5
        v = uniform(stream)
        edge = 0.5 - np.abs(u)
        k = np.floor((2.0 * a / edge + b) * u + mean + 0.43)
        if edge >= 0.07 and v <= inside:
            return np.int64(k)
        if k < 0.0 or k > 9e18 or (edge < 0.013 and v > edge):
            continue
        # log of mean**k exp(-mean) / k!, with k! by Stirling's formula at k + 1
        chance = k * _log_ratio(mean, k + 1.0) - 0.5 * log(k + 1.0) + (k + 1.0 - mean)
        chance -= _LOG_ROOT_TURN + _stirling_tail(k)
        if log(v) + height - log(a / (edge * edge) + b) <= chance:
            return np.int64(k)


@jit_exact
def poisson(mean: float, stream: Stream) -> np.int64:
    """Draw a count from Poisson(mean).

    Parameters
    ----------
    mean : 0 <= mean <= 1e9; by search up to 10, by PTRS (Hörmann 1993) above
    stream : opened by :func:`start_entry` or :func:`start_cell`
    """
    if mean <= 0.0:
        return np.int64(0)
    return _poisson_search(mean, stream) if mean < FEW else _poisson_rejection(mean, stream)


@jit_exact
def _binomial_search(n: int, p: float, stream: Stream) -> np.int64:
    q = 1.0 - p
    start = power(_E, n * (log_tail(-p) - p)) if p < 0.25 else power(q, n)
    odds = p / q
    while True:
        u = uniform(stream)
        chance = start
        for k in range(min(n, LONGEST_SEARCH) + 1):
            if u <= chance:
                return np.int64(k)
            u -= chance
            chance *= odds * (n - k) / (k + 1)


@jit_exact
def _binomial_rejection(n: int, p: float, stream: Stream) -> np.int64:
    deviation = np.sqrt(n * p * (1.0 - p))
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p
    center = n * p + 0.5
    inside = 0.92 - 4.2 / b
    height = (2.83 + 5.1 / b) * deviation
    odds = p / (1.0 - p)
    mode = np.floor((n + 1.0) * p)
    at_mode = _stirling_tail(mode) + _stirling_tail(n - mode)
    while True:
        u = uniform(stream) - 0.5
        v = uniform(stream)
        edge = 0.5 - np.abs(u)
        k = np.floor((2.0 * a / edge + b) * u + center)
        if edge >= 0.07 and v <= inside:
            return np.int64(k)
        if k < 0.0 or k > n:
            continue
        # log of the probability of k over that of the mode, with Stirling's formula
        chance = (mode + 0.5) * log((mode + 1.0) / (odds * (n - mode + 1.0)))
        chance += (n + 1.0) * _log_ratio(n - mode + 1.0, n - k + 1.0)
        chance += (k + 0.5) * log(odds * (n - k + 1.0) / (k + 1.0))
        chance += at_mode - _stirling_tail(k) - _stirling_tail(n - k)
        if log(v * height / (a / (edge * edge) + b)) <= chance:
            return np.int64(k)


@jit_exact
def binomial(n: int, p: float, stream: Stream) -> np.int64:
    """Draw a count from Binomial(n, p).

    Parameters
    ----------
    n : 0 <= n <= 2**31
    p : at most 0 gives 0, at least 1 gives n; by search up to a mean of 10, by
        BTRS (Hörmann 1993) above
    stream : opened by :func:`start_entry` or :func:`start_cell`
    """
    if n <= 0 or p <= 0.0:
        return np.int64(0)
    if p >= 1.0:
        return np.int64(n)
    rare = min(p, 1.0 - p)
    few = n * rare < FEW
    k = _binomial_search(n, rare, stream) if few else _binomial_rejection(n, rare, stream)
    return np.int64(k) if p <= 0.5 else np.int64(n - k)


@jit_exact
def fill_gamma(
    shape: Array, rate: Array, key: Array, iteration: int, factor: int, row0: int, out: Array
) -> None:
    """Draw gamma numbers of one factor band at one iteration.

    out[i, k] ~ Gamma(shape[i, k], rate[i, k])

    Parameters
    ----------
    shape, rate : (n, K), positive, float64; either may be a broadcast view
    key : (2,) uint32, one per seed and chain
    iteration, factor, row0 : the address, see :func:`start_entry`; row0 is the global
        index of the first row
    out : (n, K), float32 or float64, overwritten; nothing below TINY_32 or TINY_64 is written, so
        that no component is lost to underflow
    """
    stream, smallest = stack_array(STREAM, np.uint64), TINY_32 if out.itemsize == 4 else TINY_64
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            start_entry(stream, key, iteration, factor, row0 + i, k)
            out[i, k] = max(gamma(shape[i, k], rate[i, k], stream), smallest)
