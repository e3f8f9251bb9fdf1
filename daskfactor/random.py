"""Random numbers by address.

Nothing here holds a state: every number is a function of what it is for. A
rerun of any block, on any worker, after any loss, draws the same bits. Normals
for the samplers come from the Philox kernels (``kernels/philox.py``) under a
key made here; everything small and rare (shuffles, starting points) comes from
NumPy generators seeded with the address itself.
"""

import secrets
from enum import IntEnum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import OptionError

Key = NewType("Key", NDArray[np.uint32])

MAX_SEED = 2**64 - 1
MOST_FACTORS = 32
"""Factors of a tensor whose noise has addresses, see `daskfactor.inference.program.factor_word`."""
MOST_COMPONENTS = 2**24
"""Components whose numbers by rejection have addresses, see `kernels.variates.start_entry`."""


class Stream(IntEnum):
    """What a stream of random numbers is for; part of every address."""

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
    """The seed itself, or a fresh one from the operating system; checked either way."""
    if random_seed is None:
        return secrets.randbits(63)
    if isinstance(random_seed, bool) or not isinstance(random_seed, int | np.integer):
        raise OptionError(
            f"random_seed must be a whole number or None, got {random_seed!r} "
            f"of type {type(random_seed).__name__}"
        )
    if not 0 <= int(random_seed) <= MAX_SEED:
        raise OptionError(f"random_seed must be between 0 and 2**64 - 1, got {random_seed}")
    return int(random_seed)


def _sequence(seed: int, chain: int, stream: Stream, *address: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(chain, int(stream), *address))


def noise_key(seed: int, chain: int, stream: Stream = Stream.NOISE) -> Key:
    """Two 32-bit words that key the noise of one chain, or what it starts with."""
    words = _sequence(seed, chain, stream).generate_state(2, np.uint32)
    return Key(words.astype(np.uint32))


def generator(seed: int, chain: int, stream: Stream, *address: int) -> np.random.Generator:
    """A NumPy generator that depends on the address alone."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, chain, stream, *address)))
