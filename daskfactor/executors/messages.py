"""Column bands as messages: one small head and one run of bytes, whatever a band carries."""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from daskfactor.executors.state import Array, FactorBand

Attempt = tuple[str, int]

SMALL = 2**16
"""Bytes below which a body goes inside the message, which is cheaper than beside it."""


class Parcel(NamedTuple):
    """A column band that has been through some rounds, or the reason to stop.

    ``band`` is a `FactorBand`, or a `Sealed` one as it arrived. ``apart`` marks arrays
    without their band, for the round ``rounds``.
    """

    attempt: Attempt
    col: int
    rounds: int
    band: Any
    reason: str = ""
    apart: bool = False


class Sealed(NamedTuple):
    """A band as it arrived: opened by the thread that uses it, not by the event loop."""

    offset: int
    counts: dict[str, int]
    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...]
    body: Any

    def names(self) -> tuple[str, ...]:
        """Names of the arrays besides the values."""
        return tuple(name for name, *_ in self.arrays if name)

    def open(self) -> FactorBand:
        """The band, in arrays of its own."""
        made = {}
        for name, dtype, shape, start in self.arrays:
            count = int(np.prod(shape))
            made[name] = np.frombuffer(self.body, dtype, count, start).reshape(shape).copy()
        values = made.pop("")
        return FactorBand(self.offset, values, made, self.counts)


def write(parcels: Sequence[Parcel]) -> dict[str, Any]:
    """A message's fields for parcels; nothing of them is referred to afterwards."""
    heads: list[Any] = []
    pieces: list[Array] = []
    size = 0
    for attempt, col, rounds, band, reason, apart in parcels:
        if band is None:
            heads.append((attempt, col, rounds, None, reason, apart))
            continue
        arrays = []
        for name, array in (("", band.values), *band.arrays.items()):
            arrays.append((name, array.dtype.str, array.shape, size))
            pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            size += array.nbytes
        head = (band.offset, band.counts, tuple(arrays))
        heads.append((attempt, col, rounds, head, reason, apart))
    body = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    return {"heads": pickle.dumps(heads), "body": body}


def _sealed(head: tuple[Any, ...], body: Any) -> Sealed:
    offset, counts, arrays = head
    return Sealed(offset, counts, arrays, body)


def read(heads: bytes, body: Any) -> list[Parcel]:
    """The parcels of a message."""
    return [
        Parcel(attempt, col, rounds, sealed and _sealed(sealed, body), reason, apart)
        for attempt, col, rounds, sealed, reason, apart in pickle.loads(heads)
    ]


def opened(pieces: Sequence[Any]) -> FactorBand:
    """A band of its own from itself and the arrays that came apart, sealed or not."""
    parts = [piece.open() if isinstance(piece, Sealed) else piece for piece in pieces]
    band: FactorBand = parts[0]
    for part in parts[1:]:
        band.arrays.update(part.arrays)
    return band
