"""Blocked data for other processes: a small handle that each of them opens.

What lies in a store, or in a dense zarr array, that other processes can open is
read from there, block by block. Everything else is written once to a file in
dask's ``temporary-directory``, which the processes of the same machine map, so
that they share its pages.
"""

import contextlib
import hashlib
import os
import pickle
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from daskfactor.data.adapters import Source, open_source
from daskfactor.data.decode import Decoder
from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels, SourceInfo, SparseLayout
from daskfactor.data.loading import read
from daskfactor.data.scratch import ArrayFile, Extent, scratch_directory
from daskfactor.data.statistics import Statistics
from daskfactor.data.storage import (
    FloatType,
    LoadedBlocks,
    MappedBlocks,
    ScratchBlocks,
    Storage,
    block_bytes,
)
from daskfactor.data.store import BlockStore
from daskfactor.errors import StoreError
from daskfactor.kernels.views import BlockView
from daskfactor.machine import memory_budget

PREFIX = "daskfactor-shared-"
OLD = 60.0
"""Seconds after which a file that nobody holds is taken to be left behind."""


class About(NamedTuple):
    """All that is known of blocked data, but not the blocks."""

    grid: Grid
    labels: Labels
    statistics: Statistics
    source: SourceInfo
    dtype: FloatType
    sparse: SparseLayout | None


class DataHandle(NamedTuple):
    """What another process needs to read blocked data.

    ``token`` names these data and no others. ``kind`` is ``"file"`` (on this machine),
    ``"zarr"`` or ``"store"`` (by location). ``facts`` tells what is known of the data, or
    where in the file that is.
    """

    token: str
    kind: str
    location: str
    dtype: str
    facts: About | Extent | None

    def open(self, memory_limit: int | str | None = None) -> tuple[About, Storage]:
        """What is known of the data, and blocks for any number of threads.

        Parameters
        ----------
        memory_limit
            Bytes for decoded blocks that are kept; half of the free memory by
            default. A file on this machine is mapped and needs none.

        Raises
        ------
        StoreError
            If this process cannot read the data, or they have changed (of a dense
            zarr array, only a change of its shape is noticed).
        """
        if self.kind == "file":
            return _mapped(self)
        reader = _zarr_blocks if self.kind == "zarr" else _store_blocks
        return reader(self, memory_budget(memory_limit))


def share(about: About, storage: Storage) -> tuple[DataHandle, Callable[[], None]]:
    """Make blocked data readable by other processes; returns what removes the file again.

    Raises
    ------
    StoreError
        If there is no room for the file.
    """
    dtype, location = about.dtype.name, about.source.location
    if location is not None and not location.startswith("memory:"):
        token = _token(location, about.statistics.fingerprint, dtype)
        if isinstance(storage, LoadedBlocks):
            return DataHandle(token, "store", location, dtype, None), _nothing
        if about.source.kind == "zarr":
            return DataHandle(token, "zarr", location, dtype, about), _nothing
    token = uuid.uuid4().hex
    _sweep(Path(scratch_directory()))
    file = ArrayFile(scratch_directory(), name=f"{PREFIX}{token}.blocks")
    try:
        file.hold()
        blocks = ScratchBlocks(about.grid, about.sparse and about.sparse.unstored, file)
        for block in about.grid.all_blocks():
            blocks.put(block, storage.view(*block))
        index = pickle.dumps((token, about, blocks.extents))
        extent = file.append(np.frombuffer(index, np.uint8))
    except BaseException:
        file.remove()
        raise
    return DataHandle(token, "file", file.path, dtype, extent), file.remove


def _token(location: str, fingerprint: str, dtype: str) -> str:
    """The same for the same data, so that a worker that has them open opens them once."""
    return hashlib.blake2b(f"{location}\x00{fingerprint}\x00{dtype}".encode()).hexdigest()[:32]


def _mapped(handle: DataHandle) -> tuple[About, Storage]:
    assert isinstance(handle.facts, Extent)
    file = None
    try:
        file = ArrayFile(path=handle.location)
        raw = file.read([handle.facts])[0].tobytes()
        # The file is this user's own and was written a moment ago by a process of theirs.
        token, about, extents = pickle.loads(raw)
        if token != handle.token:
            raise ValueError("it is another file")
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        if file is not None:
            file.close()
        raise StoreError(
            f"this worker cannot read the shared data at {handle.location}: data in the client's "
            "memory can only be shared with workers on the same machine, for as long as the client "
            "lives; for workers elsewhere make a store that all of them can read, with daskfactor "
            "convert, and pass its location"
        ) from error
    blocks = MappedBlocks(about.grid, about.sparse and about.sparse.unstored, file)
    blocks.extents = extents
    return about, blocks


def _zarr_blocks(handle: DataHandle, budget: int) -> tuple[About, Storage]:
    about = handle.facts
    assert isinstance(about, About)
    grid = about.grid
    try:
        source = open_source(handle.location)
    except StoreError as error:
        raise _unreachable(handle, error) from error
    if not isinstance(source, Source) or source.shape != grid.shape:
        raise StoreError(
            f"the array at {handle.location} is not the one that was shared: its shape is "
            f"{source.shape}, not {grid.shape}; leave it as it is while a run reads it"
        )

    def load(block: Block) -> BlockView:
        rows, cols = grid.slices(block)
        decoder = Decoder(about.dtype, Labels())
        values = decoder.decode(read(source, (rows, cols)), rows.start, cols.start)
        return BlockView(np.require(values, requirements=["C", "W"]), 0, 0, *values.shape)

    return about, LoadedBlocks(grid, load, block_bytes(grid, about.dtype, None), budget)


def _store_blocks(handle: DataHandle, budget: int) -> tuple[About, Storage]:
    try:
        store = BlockStore(handle.location)
    except StoreError as error:
        raise _unreachable(handle, error) from error
    if _token(handle.location, store.statistics.fingerprint, handle.dtype) != handle.token:
        raise StoreError(
            f"the store at {handle.location} is not the one that was shared: its blocks are "
            "others; leave it as it is while a run reads it"
        )
    return about_store(store, np.dtype(handle.dtype)), store.blocks(np.dtype(handle.dtype), budget)


def about_store(store: BlockStore, dtype: FloatType) -> About:
    """What is known of the data of a store."""
    source = SourceInfo("blocks", store.location, lazy=True)
    layout = SparseLayout(store.unstored, store.row_order, store.col_order)
    return About(store.grid, store.labels, store.statistics, source, dtype, layout)


def _nothing() -> None:
    """Remove nothing: no file was written."""


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
                if time.time() - path.stat().st_mtime > OLD and not ArrayFile.held(str(path)):
                    os.unlink(path)  # noqa: PTH108 - one that is gone already is an OSError too
