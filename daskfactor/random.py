"""Counter-based random numbers.

Every number is a function of an address: seed, chain, purpose and position. There is no state, so
that a rerun of any block, on any worker, after any failure, draws the same bits. Normal variates of
the samplers come from the Philox kernels (``kernels/philox.py``) under a key from this module.
Small and rare numbers (shuffles, starting points) come from NumPy generators that are seeded with
the address.
"""

import secrets
from enum import IntEnum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import OptionError

Key = NewType("Key", NDArray[np.uint32])

MAX_SEED = 2**64 - 1
MAX_FACTORS = 32
"""Largest number of factors that addresses encode, see `inference.program.factor_word`."""
MAX_COMPONENTS = 2**24
"""Largest number of components that addresses encode, see `kernels.variates.start_entry`."""


class Stream(IntEnum):
    """Purpose of a stream of random numbers; part of every address."""

    NOISE = 0
    SCHEDULE = 1
    START = 2
    COARSE_SCHEDULE = 3
    HYPER = 4
    ACCEPTANCE = 5
    TEMPERATURE = 6
    THINNING = 7
    SIMULATION = 8
    SCALE = 9
    PREDICTION = 10
    TRANSFORM = 11


def resolve_seed(random_seed: int | None) -> int:
    """Return a checked seed, or a fresh one from the operating system for None."""
    if random_seed is None:
        return secrets.randbits(63)
    if isinstance(random_seed, bool) or not isinstance(random_seed, int | np.integer):
        raise OptionError(
            f"random_seed must be a whole number or None, got {random_seed!r} of type "
            f"{type(random_seed).__name__}"
        )
    if not 0 <= int(random_seed) <= MAX_SEED:
        raise OptionError(f"random_seed must be between 0 and 2**64 - 1, got {random_seed}")
    return int(random_seed)


def _sequence(seed: int, chain: int, stream: Stream, *address: int) -> np.random.SeedSequence:
    """Return the seed sequence of an address."""
    return np.random.SeedSequence(seed, spawn_key=(chain, int(stream), *address))


def noise_key(seed: int, chain: int, stream: Stream = Stream.NOISE) -> Key:
    """Return the Philox key, two 32-bit words, of a stream of one chain."""
    words = _sequence(seed, chain, stream).generate_state(2, np.uint32)
    return Key(words.astype(np.uint32))


def generator(seed: int, chain: int, stream: Stream, *address: int) -> np.random.Generator:
    """Return a NumPy generator that depends only on the address."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, chain, stream, *address)))
