"""Store of a call that returns no run: the same call goes on where a killed process stopped."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.inference.run_loop import Values, join_values, split_values
from daskfactor.publish import Publication
from daskfactor.runs.backends import FolderView, LocalBackend
from daskfactor.runs.files import MARKER, NODE, Checkpoints, disk_errors, plain, remove_scratch
from daskfactor.urls import is_url

WHAT, SAFE = "the store of an evidence", "the last checkpoint is safe"
AGAIN = "make the same call again"
FORMAT = 1
FIXED = {"format": FORMAT, "draws": 0}
"""Attributes of every checkpoint besides its contents."""


class CallStore:
    """Folder with the results that a call has finished, and the state of the unfinished one.

    Parameters
    ----------
    path
        Folder, which is created if it does not exist.

    Attributes
    ----------
    finished
        Results by name.
    piece
        Name of the result that is being computed.

    Raises
    ------
    OptionError
        If the path is not that of a local folder.
    StoreError
        If the folder holds something else, or another process writes it.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        location: Any = path
        if not isinstance(location, str | PathLike) or is_url(fspath(location)):
            raise OptionError(
                f"store must be the path of a directory on this machine, got {location!r}; only "
                "runs are written to object stores"
            )
        self.path = Path(fspath(path))
        with disk_errors(WHAT, self.path, "nothing was begun", AGAIN):
            self._is_new = FolderView(self.path).contents() is None
            if self._is_new:
                self._create()
            if not is_call_store(self.path):
                raise StoreError(
                    f"{self.path} exists and is no store of log_evidence or select_rank; pass "
                    "another path"
                )
            self._backend = LocalBackend.opened(self.path)
        self.call, self.finished, self.piece = Values(), Values(), ""
        try:
            self.checkpoints = Checkpoints(self._backend, 1, 0)
            self._read()
        except BaseException:
            self._backend.close()
            raise

    def _read(self) -> None:
        arrays, meta = self.checkpoints.load()
        if meta.get("format") != FORMAT:
            raise StoreFormatError(
                f"{self.path} was written by another version of daskfactor; use that version, or "
                "pass another path"
            )
        self.call, self.piece = meta["call"], meta["piece"]
        self.finished = join_values(arrays, meta["finished"])
        self._state = {name: arrays[name] for name in arrays}, meta["state"]

    def _create(self) -> None:
        """Create an empty store; a process that is killed meanwhile leaves none."""
        with Publication(self.path) as publication:
            empty = Checkpoints(LocalBackend.for_checkpoints(publication.draft), 1, 0)
            empty.commit({}, FIXED | {"call": {}, "finished": {}, "piece": "", "state": {}})
            publication.publish()

    def seed(self, random_seed: int | None) -> int | None:
        """Return the seed of the call that began the store if none is given."""
        return self.call.get("random_seed") if random_seed is None else random_seed

    def begin(self, **call: Any) -> None:
        """Note the arguments of the call, or refuse others than those that began the store.

        Raises
        ------
        StoreError
            If they are others.
        """
        call = plain(call)
        if not self.call:
            self.call = call
            self.checkpoint({}, {})
        elif other := [name for name in call if call[name] != self.call.get(name)]:
            if other[:2] == ["V", "blocks"]:  # fingerprints of data depend on their blocks
                other[:2] = ["V or of blocks"]
            raise StoreError(
                f"{self.path} was begun by a call with other values of {', '.join(other)}; repeat "
                "that call, or pass another path"
            )

    def state_of(self, piece: str) -> tuple[Mapping[str, Any], Values]:
        """Return the last checkpoint of a result, and note that it is being computed."""
        state = self._state if piece == self.piece else ({}, {})
        self.piece = piece
        return state

    def finish(self, piece: str, result: Values) -> None:
        """Keep a result."""
        self.finished[piece] = result
        self.checkpoint({}, {})

    def checkpoint(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Keep the state of the unfinished result, and all finished ones.

        Raises
        ------
        StoreError
            If it cannot be written.
        """
        arrays_of_results, finished = split_values(self.finished, "finished")
        call = {"call": self.call, "finished": finished, "piece": self.piece, "state": meta}
        with disk_errors(WHAT, self.path, SAFE, AGAIN):
            self.checkpoints.commit({**arrays_of_results, **arrays}, FIXED | call)

    def load_checkpoint(self) -> tuple[Mapping[str, Any], Values]:
        """Return the last state of the unfinished result."""
        arrays, meta = self.checkpoints.load()
        return arrays, meta["state"]

    def close(self) -> None:
        """Release the folder; remove a new one whose call was refused."""
        self.checkpoints.close()
        self._backend.close()
        if self._is_new and not self.call:
            remove_scratch(self.path)


@contextmanager
def call_store(path: str | PathLike[str] | None) -> Iterator[CallStore | None]:
    """Open the store of a call; yield None for a call without one."""
    if path is None:
        yield None
        return
    store = CallStore(path)
    try:
        yield store
    finally:
        store.close()


def is_call_store(path: str | PathLike[str]) -> bool:
    """Return True if there is the store of a call at a path."""
    return (Path(path) / MARKER).exists() and not (Path(path) / NODE).exists()


def identity_of(data: Any, model: Any) -> dict[str, Any]:
    """Return what identifies data and a model among the arguments of a call."""
    if isinstance(data, BlockedData):
        identity = f"{data.fingerprint} {data.unstored} {data.dtype}"
        blocks = [side.offsets for side in data.grid.sides]
    else:
        arrays = [data] if isinstance(data, np.ndarray) else [data.indices, data.values]
        identity, blocks = f"{getattr(data, 'shape', ())} {_digest(*arrays)}", []
    settings = {name: _digest(array) for name, array in model.arrays().items()}
    described = json.dumps([model.to_dict(), settings], default=str)
    V = hashlib.sha256(identity.encode()).hexdigest()
    return {"V": V, "blocks": blocks, "model": described}


def _digest(*arrays: Any) -> str:
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(one).tobytes() for one in arrays)
    ).hexdigest()
