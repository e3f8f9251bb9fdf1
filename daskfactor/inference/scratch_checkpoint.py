"""The last checkpoint of a run that has no store, for when bands are lost with a worker."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from daskfactor.data.storage import scratch_directory
from daskfactor.runs.backends import LocalBackend
from daskfactor.runs.files import Checkpoints, disk_errors

WHAT = "what a run on a cluster goes on from when a worker is lost"
AGAIN = (
    "run again, name another directory with the dask option 'temporary-directory', or pass store="
)


class ScratchCheckpoint:
    """Checkpoints in a folder of this machine that goes with the run.

    Parameters
    ----------
    arrays, meta
        What the run begins with, which is the first checkpoint.
    """

    def __init__(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        with disk_errors(WHAT, Path(scratch_directory()), "nothing was begun", AGAIN):
            self._folder = TemporaryDirectory(prefix="daskfactor-", dir=scratch_directory())
            place = LocalBackend.for_checkpoints(Path(self._folder.name))
            self.checkpoints = Checkpoints(place, 1, 0)
            self.checkpoints.commit(arrays, meta)

    def checkpoint(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Replace the checkpoint; the one before counts until all is written.

        Raises
        ------
        StoreError
            If it cannot be written.
        """
        with disk_errors(WHAT, Path(self._folder.name), "nothing of the run is kept", AGAIN):
            self.checkpoints.commit(arrays, meta)

    def load_checkpoint(self) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the newest checkpoint; its arrays are read as they are asked for."""
        return self.checkpoints.load()

    def close(self) -> None:
        """Delete what there is on the disk."""
        self.checkpoints.close()
        self._folder.cleanup()
