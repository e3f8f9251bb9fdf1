"""Writer of regions of a run's arrays, in any process."""

from collections.abc import Mapping
from typing import Any, Final, Self

import zarr

from daskfactor.runs.files import archive

# Chunks of fill values are written too, because a missing chunk counts as damage.
_WRITE_EMPTY: Final = {"array.write_empty_chunks": True}


class Writer:
    """Writes regions of arrays; can be pickled to another process and returned to be committed.

    Its writes become visible with the next checkpoint after `Checkpoints.add_parts`. Two writers
    must not write to the same chunk before the same checkpoint.

    Parameters
    ----------
    store
        Zarr store to write to.
    name
        Path or URL, for messages.
    stamp
        Prefix of its archives' names, which identifies the next checkpoint, so that a late writer
        cannot damage a later checkpoint.

    Attributes
    ----------
    saved
        Names of the archives that it has written.
    """

    def __init__(self, store: Any, name: str = "", stamp: str = "") -> None:
        self.store, self.name, self.stamp = store, name, stamp
        self.saved: list[str] = []
        self._arrays: dict[str, Any] = {}

    def array(self, path: str) -> Any:
        """Return an array opened for writing, from a cache."""
        if path not in self._arrays:
            with zarr.config.set(_WRITE_EMPTY):
                self._arrays[path] = zarr.open_array(self.store, path=path, mode="r+")
        return self._arrays[path]

    def write(self, path: str, region: Any, values: Any) -> Self:
        """Write a region of an array and return the writer, the result of a task.

        Raises
        ------
        StoreError
            If an object store cannot be used.
        OSError
            If the disk cannot be written.
        """
        self.array(path)[region] = values
        return self

    def save(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Write arrays of the next checkpoint to an archive.

        Raises
        ------
        StoreError, OSError
            See `write`.
        """
        self.saved.append(f"{self.stamp}-{name}")
        self.store.write_new(self.saved[-1], archive(arrays, {"stamp": self.stamp}))

    def __getstate__(self) -> dict[str, Any]:
        self.store.flush()  # files written on another machine must be durable there
        return self.__dict__ | {"_arrays": {}}
