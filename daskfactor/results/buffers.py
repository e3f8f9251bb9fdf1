"""Draws on their way to the store, gathered until a chunk is full."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Write = Callable[[str, int, int, NDArray[Any]], None]


@dataclass
class _Pending:
    start: int
    blocks: list[NDArray[Any]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + sum(len(block) for block in self.blocks)


class DrawBuffer:
    """Gathers consecutive draws of each variable and chain; writes when a chunk is full.

    Nothing counts before the next checkpoint anyway, and a chunk that is written
    once instead of once per draw makes a draw cheap. At most one chunk per variable
    and chain is held.

    Parameters
    ----------
    write
        Called with path, chain, first draw and draws.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._pending: dict[tuple[str, int], _Pending] = {}

    def append(self, path: str, chain: int, start: int, block: NDArray[Any], chunk: int) -> None:
        """Take a copy of ``block``: draws from ``start`` on; ``chunk`` draws fill a chunk."""
        pending = self._pending.get((path, chain))
        if pending is not None and pending.stop != start:
            self._flush(path, chain)
            pending = None
        if pending is None:
            pending = self._pending[path, chain] = _Pending(start)
        pending.blocks.append(np.array(block, order="C"))
        if pending.stop >= (pending.start // chunk + 1) * chunk:
            self._flush(path, chain)

    def flush(self) -> None:
        """Write everything."""
        for path, chain in list(self._pending):
            self._flush(path, chain)

    def _flush(self, path: str, chain: int) -> None:
        pending = self._pending[path, chain]
        blocks = pending.blocks
        self._write(path, chain, pending.start, blocks[0] if len(blocks) == 1 else _join(blocks))
        del self._pending[path, chain]


def _join(blocks: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(blocks)
