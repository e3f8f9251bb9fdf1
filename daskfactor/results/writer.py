"""Write regions of a run's arrays, in the process that opened it or in others."""

from collections.abc import Mapping
from typing import Any, Final, Self

import zarr

from daskfactor.results.files import archive

# A chunk of nothing but fill values is written all the same: one that is not there is damage.
_WHOLE: Final = {"array.write_empty_chunks": True}


class Writer:
    """Writes regions of arrays; a copy goes to another process, and comes back to be committed.

    Nobody sees what it wrote before the next checkpoint after what came back was taken.
    Regions that two write before the same checkpoint must not share a chunk.

    Parameters
    ----------
    store
        Where it writes.
    name
        Path or URL, for messages.
    stamp
        Of the checkpoint that is next: what its archives' names begin with, so that a writer that
        is late spoils no other.

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
        """Open an array to write it, all of its chunks; once."""
        if path not in self._arrays:
            with zarr.config.set(_WHOLE):
                self._arrays[path] = zarr.open_array(self.store, path=path, mode="r+")
        return self._arrays[path]

    def write(self, path: str, region: Any, values: Any) -> Self:
        """Write a region of an array and return the writer, which is what a task gives back.

        Raises
        ------
        StoreError
            If an object store cannot be used.
        OSError
            If the disk refuses.
        """
        self.array(path)[region] = values
        return self

    def save(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Write arrays that the next checkpoint has, in an archive of their own.

        Raises
        ------
        StoreError, OSError
            As `write`.
        """
        self.saved.append(f"{self.stamp}-{name}")
        self.store.save(self.saved[-1], archive(arrays, {"stamp": self.stamp}))

    def __getstate__(self) -> dict[str, Any]:
        self.store.flush()  # what comes back from another machine must be on the disk there
        return self.__dict__ | {"_arrays": {}}
