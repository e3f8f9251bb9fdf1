"""Write regions of a run's arrays, in the process that opened it or in others."""

from typing import Any, Final, Self

import zarr

# A chunk of nothing but fill values is written all the same: one that is not there is damage.
_WHOLE: Final = {"array.write_empty_chunks": True}


class Writer:
    """Writes regions of arrays; a copy goes to another process, and comes back to be committed.

    Nobody sees what it wrote before `daskfactor.results.store.RunStore.checkpoint` was given what
    came back. Regions that two write before the same checkpoint must not share a chunk.

    Parameters
    ----------
    store
        Where it writes.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
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

    def __getstate__(self) -> dict[str, Any]:
        self.store.flush()  # what comes back from another machine must be on the disk there
        return {"store": self.store, "_arrays": {}}
