"""The loop of a long run: segments, checkpoints where they are due, and recovery after a loss."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from daskfactor.executors import Executor
from daskfactor.inference.scratch_checkpoint import ScratchCheckpoint
from daskfactor.runs.files import Checkpoints, Late

Values = dict[str, Any]
"""State of a computation by name: arrays, tuples, and values that JSON can hold."""


def split_values(value: Any, path: str) -> tuple[Late, Any]:
    """Separate the arrays of a state of dicts and tuples, by their paths, from its JSON values."""
    arrays: Late = {}

    def split(part: Any, path: str) -> Any:
        if isinstance(part, np.ndarray):
            arrays[path] = part
            return {"array": path}
        if isinstance(part, tuple):
            return {"tuple": [split(one, f"{path}/{n}") for n, one in enumerate(part)]}
        if isinstance(part, dict):
            return {name: split(one, f"{path}/{name}") for name, one in part.items()}
        return part

    return arrays, split(value, path)


def join_values(arrays: Mapping[str, Any], value: Any) -> Any:
    """Return the state that `split_values` separated, with copies of the arrays."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array"}:
        return np.array(arrays[value["array"]])
    if value.keys() == {"tuple"}:
        return tuple(join_values(arrays, part) for part in value["tuple"])
    return {name: join_values(arrays, part) for name, part in value.items()}


class RunLoop(ABC):
    """A run in segments, which goes back to its last checkpoint when workers lose its state.

    A run that was resumed goes on with the same bits, and so does one that went back.

    Parameters
    ----------
    executor
        Executor of the segments.
    store
        Keeper of the checkpoints, such as a `RunStore`. Without one the loop keeps a
        `ScratchCheckpoint` where workers can lose the state.

    Attributes
    ----------
    seconds
        Time of the run before this process resumed it.
    started
        Time of this process's clock at which it began the run.
    """

    def __init__(self, executor: Executor, store: Any = None) -> None:
        self.executor = executor
        self.seconds, self.started = 0.0, time.perf_counter()
        self._backup, self._losses = store, 0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True if no segment is left."""

    @abstractmethod
    def load(self, arrays: Mapping[str, Any], meta: Values) -> None:
        """Take over the state of a checkpoint; start if it is of a run that had not started."""

    @abstractmethod
    def advance(self) -> None:
        """Run one segment."""

    @abstractmethod
    def snapshot(self, checkpoints: Checkpoints) -> tuple[Late, Values]:
        """Return the state to resume from; workers may write their part with ``checkpoints``."""

    def write(self, due: bool) -> None:
        """Write the results of a segment; ``due`` if a checkpoint follows."""
        del due

    @property
    def elapsed(self) -> float:
        """Seconds of the run in all processes."""
        return self.seconds + time.perf_counter() - self.started

    def restore(self, arrays: Mapping[str, Any], meta: Values) -> None:
        """Take over a checkpoint, again if workers lose the state meanwhile."""
        self.seconds = float(meta.get("seconds", 0.0))
        if self._backup is None and self.executor.max_losses:
            self._backup = ScratchCheckpoint(arrays, meta)
        self._recovering(partial(self.load, arrays, meta))

    def go(self) -> None:
        """Run all segments that are left."""
        while not self.finished:
            self._recovering(self._segment)

    def save(self) -> None:
        """Write a checkpoint, if the run keeps any."""
        if self._backup is not None:
            arrays, meta = self.snapshot(self._backup.checkpoints)
            self._backup.checkpoint(arrays, meta | {"seconds": self.elapsed})
            self._losses = 0

    def close(self) -> None:
        """Delete checkpoints that are kept for no longer than the run."""
        if isinstance(self._backup, ScratchCheckpoint):
            self._backup.close()

    def _segment(self) -> None:
        self.advance()
        due = self._backup is None or self._backup.checkpoints.is_due() or self.finished
        self.write(due)
        if due:
            self.save()

    def _recovering(self, work: Callable[[], None]) -> None:
        """Do some work; go back to the last checkpoint where workers lose the state."""

        def go_back() -> Callable[[], None]:
            self._losses += 1
            assert self._backup is not None  # a state can be lost only where it is saved
            return partial(self.load, *self._backup.load_checkpoint())

        self.executor.retry_on_loss(work, go_back, self._losses)
