"""Blocked data for other processes: a small handle that each of them opens once.

What lies in a store, or in a dense zarr array, that other processes can open is
read from there, block by block. Everything else is written once to a file in
dask's ``temporary-directory``, which the processes of the same machine map, so
that they share its pages.
"""

import contextlib
import hashlib
import os
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from daskfactor.data.adapters import Source, open_source
from daskfactor.data.blockfile import BlockFile
from daskfactor.data.blocks import BlockedData
from daskfactor.data.decode import Decoder
from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels
from daskfactor.data.loading import read
from daskfactor.data.memory import memory_budget
from daskfactor.data.reader import BlockReader, Pause, View
from daskfactor.data.scratch import scratch_directory
from daskfactor.data.storage import BlockView, FloatType, SparseBlock
from daskfactor.data.store import BlockStore, StoredBlocks
from daskfactor.errors import StoreError

PREFIX = "daskfactor-shared-"
NO_LIMIT = 2**62
"""Views of a mapped file take no memory of their own."""

OLD = 60.0
"""Seconds after which a file that nobody holds is taken to be left behind."""


class DataHandle:
    """What another process needs to read the blocks. Small, and can be pickled.

    Attributes
    ----------
    token : str
        Names these data and no others; a worker keeps one reader for each token.
    kind : str
        ``"file"`` (on this machine), ``"zarr"`` or ``"store"`` (by location).
    location : str
        Path or URL of what is read.
    grid : Grid
        Row bands and column bands.
    """

    def __init__(self, token: str, kind: str, location: str, grid: Grid, dtype: str) -> None:
        self.token = token
        self.kind = kind
        self.location = location
        self.grid = grid
        self.dtype = dtype
        self._remove: Any = None

    def open(self, memory_limit: int | str | None = None, pause: Pause = time.sleep) -> BlockReader:
        """A reader of the blocks, for any number of threads.

        Parameters
        ----------
        memory_limit
            Bytes for decoded blocks that are kept; half of the free memory by
            default. A file on this machine is mapped and needs none.
        pause
            Called with seconds between attempts to read what failed.

        Raises
        ------
        StoreError
            If this process cannot read the data, or they have changed (of a dense
            zarr array, only a change of its shape is noticed).
        """
        dtype = np.dtype(self.dtype)
        if self.kind == "file":
            return BlockReader(self.grid, dtype, self.token, *_mapped(self), NO_LIMIT, pause)
        budget = memory_budget(memory_limit)
        if self.kind == "zarr":
            return BlockReader(self.grid, dtype, self.token, *_zarr_blocks(self), budget, pause)
        # What the reader of a store keeps, in memory and beyond it, it keeps itself.
        return BlockReader(self.grid, dtype, self.token, *_store_blocks(self, budget), 0, pause)

    def close(self) -> None:
        """Delete the file, if one was written. Only for the process that shared the data."""
        if self._remove is not None:
            self._remove()

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.token, self.kind, self.location, self.grid, self.dtype)
        return DataHandle, fields

    def __repr__(self) -> str:
        return f"<DataHandle {self.kind} {self.location} {self.token}>"


def share(data: BlockedData) -> DataHandle:
    """Make blocked data readable by other processes.

    The handle that is returned owns the file that may have been written: it goes
    with the handle, or with this process; copies of the handle own nothing.

    Raises
    ------
    StoreError
        If there is no room for the file.
    """
    dtype, location = data.dtype.name, data.source.location
    if location is not None and not location.startswith("memory:"):
        token = _token(location, data.fingerprint, dtype)
        if data.reads(StoredBlocks):
            return DataHandle(token, "store", location, data.grid, dtype)
        if data.source.kind == "zarr":
            return DataHandle(token, "zarr", location, data.grid, dtype)
    token = uuid.uuid4().hex
    directory = scratch_directory()
    _sweep(Path(directory))
    file = _written(data, directory, token)
    handle = DataHandle(token, "file", str(file.path), data.grid, dtype)
    handle._remove = weakref.finalize(handle, file.remove)
    return handle


def _token(location: str, fingerprint: str, dtype: str) -> str:
    """The same for the same data, so that a worker that has them open opens them once."""
    return hashlib.blake2b(f"{location}\x00{fingerprint}\x00{dtype}".encode()).hexdigest()[:32]


def _written(data: BlockedData, directory: str, token: str) -> BlockFile:
    file = BlockFile(directory, f"{PREFIX}{token}.blocks")
    try:
        file.hold()
        for block in data.grid.all_blocks():
            view = data.view(*block)
            if isinstance(view, SparseBlock):
                file.write(block, [view.indptr, view.indices, view.values])
            else:
                file.write(block, [view.block])
        file.finish({"token": token, "unstored": data.unstored})
    except BaseException:
        file.remove()
        raise
    return file


def _mapped(handle: DataHandle) -> tuple[Any, Any]:
    try:
        file = BlockFile.open_path(handle.location)
        found = file.about.get("token")
    except StoreError as error:
        raise _not_here(handle) from error
    if found != handle.token:
        file.close()
        raise _not_here(handle)
    unstored, grid = file.about["unstored"], handle.grid  # not the handle, which owns the file

    def load(block: Block) -> View:
        arrays = file.map(block)
        m, n = grid.block_shape(block)
        if unstored is None:
            return BlockView(arrays[0], 0, 0, m, n)
        return SparseBlock(arrays[0], arrays[1], arrays[2], m, n, unstored == "zero")

    return load, file.close


def _zarr_blocks(handle: DataHandle) -> tuple[Any, Any]:
    try:
        source = open_source(handle.location)
    except StoreError as error:
        raise _unreachable(handle, error) from error
    dtype: FloatType = np.dtype(handle.dtype)
    if not isinstance(source, Source) or source.shape != handle.grid.shape:
        raise StoreError(
            f"the array at {handle.location} is not the one that was shared: its shape is "
            f"{source.shape}, not {handle.grid.shape}; leave it as it is while a run reads it"
        )

    def load(block: Block) -> View:
        rows, cols = handle.grid.slices(block)
        decoder = Decoder(dtype, Labels())
        values = decoder.decode(read(source, (rows, cols)), rows.start, cols.start)
        return BlockView(np.require(values, requirements=["C", "W"]), 0, 0, *values.shape)

    return load, _nothing


def _store_blocks(handle: DataHandle, budget: int) -> tuple[Any, Any]:
    try:
        store = BlockStore(handle.location)
    except StoreError as error:
        raise _unreachable(handle, error) from error
    token = _token(handle.location, store.statistics.fingerprint, handle.dtype)
    if store.grid != handle.grid or token != handle.token:
        raise StoreError(
            f"the store at {handle.location} is not the one that was shared: its blocks are "
            "others; leave it as it is while a run reads it"
        )
    blocks = StoredBlocks(store, np.dtype(handle.dtype), budget)
    return lambda block: blocks.view(block.row, block.col, blocks.new_buffer()), blocks.close


def _nothing() -> None:
    """Nothing to close."""


def _not_here(handle: DataHandle) -> StoreError:
    return StoreError(
        f"this worker cannot read the shared data at {handle.location}: data in the client's "
        "memory can only be shared with workers on the same machine, for as long as the client "
        "lives; for workers elsewhere make a store that all of them can read, with daskfactor "
        "convert, and pass its location"
    )


def _unreachable(handle: DataHandle, error: StoreError) -> StoreError:
    return StoreError(
        f"this worker cannot open the data at {handle.location}, which the client reads from: "
        f"{error}; put them where all workers can read them under one location"
    )


def _sweep(directory: Path) -> None:
    """Delete files of processes that were killed: nobody holds them any more."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f"{PREFIX}*.blocks"):
            with contextlib.suppress(OSError):
                # One that is being made is not held yet for a moment.
                if time.time() - path.stat().st_mtime > OLD and not BlockFile.held(str(path)):
                    os.unlink(path)  # noqa: PTH108 - one that is gone already is an OSError too
