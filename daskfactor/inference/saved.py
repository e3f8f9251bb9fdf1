"""The last checkpoint of a run that has no store, for when bands are lost with a worker."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from daskfactor.data.storage import scratch_directory
from daskfactor.errors import StoreError
from daskfactor.results.files import Arrays, plain


class Saved:
    """A checkpoint on this machine's disk, in a folder that goes with the run.

    The client writes it, so that workers need no folder in common with it.

    Parameters
    ----------
    arrays, meta
        What the run begins with, which is the first checkpoint.
    """

    def __init__(self, arrays: Arrays, meta: dict[str, Any]) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._first, self._meta = arrays, meta
        self._names: dict[str, Path] | None = None
        self._number = 0

    def checkpoint(self, arrays: Mapping[str, Any], meta: dict[str, Any]) -> None:
        """Replace the checkpoint; the one before counts until all is written.

        Raises
        ------
        StoreError
            If it cannot be written.
        """
        try:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="daskfactor-", dir=scratch_directory())
            before, self._number = self._part(), self._number + 1
            self._part().mkdir()
            names = {}
            for number, (name, given) in enumerate(arrays.items()):
                names[name] = self._part() / f"{number}.npy"
                np.save(names[name], given() if callable(given) else given)
            self._names, self._meta = names, plain(meta)
            shutil.rmtree(before, ignore_errors=True)
        except OSError as error:
            raise StoreError(
                f"a run on a cluster keeps its last state in {scratch_directory()}, where it goes "
                f"on from when a worker is lost, and that cannot be written ({error}); free space, "
                "name another directory with the dask option 'temporary-directory', or pass store="
            ) from error

    def load_checkpoint(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the checkpoint; its arrays are read from the disk as they are needed."""
        if self._names is None:
            return self._first, self._meta
        # Whoever writes to these arrays writes to memory.
        return {n: np.load(path, mmap_mode="c") for n, path in self._names.items()}, self._meta

    def close(self) -> None:
        """Delete what there is on the disk."""
        if self._folder is not None:
            self._folder.cleanup()

    def _part(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{self._number}"
