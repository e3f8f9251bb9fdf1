"""Writing a blocked sparse store: beside its place first, and there only when it is whole."""

import contextlib
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.grid import Block, Grid
from daskfactor.data.labels import Labels, SparseLayout
from daskfactor.data.statistics import Statistics, crc32
from daskfactor.data.storage import DISK_FULL
from daskfactor.data.store import (
    FORMAT,
    FORMAT_VERSION,
    NUMBERS,
    absolute,
    attributes_checksum,
    is_blocked_store,
)
from daskfactor.errors import DaskfactorError, OptionError, StoreError
from daskfactor.kernels.views import NARROW_COLUMNS, SparseBlock

COMPRESSIONS = ("lz4", "zstd", "none")
LARGEST_CHUNK = 2**24
"""Bytes; a block of more is cut into several chunks."""
CHUNK_COST = 2**16
"""Bytes that could be read while a chunk is found and opened."""
SMALLEST_CHUNK = 1024


class StoreWriter:
    """A blocked store in the making. `finish` makes it appear; `abort` leaves nothing.

    A local store is made in a folder beside its place and renamed. Elsewhere it is
    made in its place, and only its last attribute makes it a store.

    Raises
    ------
    OptionError
        If ``compression`` is none of the codecs.
    StoreError
        If something is there already that may not be replaced.
    """

    def __init__(self, location: str, compression: str = "lz4", overwrite: bool = False) -> None:
        from fsspec.core import url_to_fs

        if compression not in COMPRESSIONS:
            raise OptionError(
                f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}"
            )
        self.location = absolute(location)
        self._files, self._place = url_to_fs(self.location)
        self._compression = compression
        self._overwrite = overwrite
        self._check_place()
        self._local = "://" not in self.location
        self._target = str(_making(Path(self.location))) if self._local else self.location
        self._group: Any = None
        self._arrays: dict[str, list[Any]] = {}

    def begin(
        self,
        grid: Grid,
        counts: NDArray[np.int64],
        dtype: np.dtype[Any],
        kept: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Make the arrays for blocks of at most ``counts`` entries, of which some will be merged.

        Room is set aside for all, and chunks that stay empty take none; chunks are as long
        as suits blocks that keep between ``kept[0]`` and ``kept[1]`` of their entries.
        """
        import zarr

        self._grid = grid
        if not self._local and is_blocked_store(self.location):
            self._files.rm(self._place, recursive=True)
        self._group = zarr.open_group(self._target, mode="w-")
        self._group.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION})
        rows = np.repeat(np.array(grid.rows.sizes) + 1, grid.blocks)
        wide = max(grid.cols.sizes) > NARROW_COLUMNS
        starts = np.dtype(np.uint32 if counts.max() < 2**32 else np.uint64)
        usual = np.ceil(np.outer(kept, counts.ravel())).astype(np.int64).ravel()
        chunk = chunk_length(usual, dtype.itemsize)
        starts_chunk = chunk_length(rows, starts.itemsize)
        square = (grid.blocks, grid.blocks)
        self._table = np.zeros((*square, 4), np.int64)
        self._totals = np.zeros(square)
        ends = []
        for field, (lengths, step) in enumerate(((counts.ravel(), chunk), (rows, starts_chunk))):
            whole = -(-lengths // step) * step  # each block begins on a chunk boundary
            ends.append(max(step, int(whole.sum())))
            self._table[..., field] = (np.cumsum(whole) - whole).reshape(square)
        columns = np.dtype(np.uint32 if wide else np.uint16)
        self._values = self._stream("values", ends[0], chunk, dtype)
        self._columns = self._stream("columns", ends[0], chunk, columns)
        self._starts = self._stream("row_starts", ends[1], starts_chunk, starts)

    def put(self, block: Block, view: SparseBlock) -> None:
        """Write one block. From any thread: no chunk belongs to two blocks."""
        entry, start = self._table[block][:2].tolist()
        starts, values = view.indptr.astype(self._starts.dtype), view.values
        columns = view.indices.astype(self._columns.dtype, copy=False)
        for array, at, data in (
            (self._values, entry, values),
            (self._columns, entry, columns),
            (self._starts, start, starts),
        ):
            # Zeros up to the chunk boundary: whole chunks need not be read back.
            padded = np.pad(data, (0, -data.size % array.chunks[0]))
            if padded.size:
                array[at : at + padded.size] = padded
        self._table[block][2:] = values.size, crc32(values, columns, starts)
        self._totals[block] = np.nansum(values, dtype=np.float64)

    def finish(self, statistics: Statistics, labels: Labels, layout: SparseLayout) -> None:
        """Write what is known of the whole, and make the store appear."""
        small = {
            "block_table": self._table,
            "block_totals": self._totals,
            "block_observed": statistics.n_observed,
            "row_observed": statistics.row_observed,
            "column_observed": statistics.col_observed,
            "row_offsets": np.array(self._grid.rows.offsets, np.int64),
            "column_offsets": np.array(self._grid.cols.offsets, np.int64),
            "row_order": layout.row_order,
            "column_order": layout.col_order,
        }
        for name, array in small.items():
            if array is not None:
                self._put(name, array)
        attributes = {
            "shape": list(self._grid.shape),
            "blocks": self._grid.blocks,
            "dtype": str(self._values.dtype),
            "unstored": layout.unstored,
            "row_dim": labels.row_dim,
            "column_dim": labels.col_dim,
            "name": labels.name,
            "row_labels": self._put_coordinates("row", labels.row_coords),
            "column_labels": self._put_coordinates("column", labels.col_coords),
            "statistics": {name: getattr(statistics, name) for name in NUMBERS},
            "arrays": self._arrays,
            "complete": True,
        }
        found = dict(self._group.attrs) | attributes
        self._group.attrs.update(attributes | {"checksum": attributes_checksum(found)})
        if self._local:
            self._appear()

    def abort(self) -> None:
        """Remove what was written, as far as that is possible."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._files.rm(self._target if self._local else self._place, recursive=True)

    def nbytes(self) -> int:
        """Bytes that the store takes."""
        return int(self._files.du(self._place))

    def _check_place(self) -> None:
        files, place = self._files, self._place
        if not files.exists(place) or (files.isdir(place) and not files.ls(place)):
            return
        if not is_blocked_store(self.location):
            raise StoreError(
                f"{self.location} exists and is no blocked store, so it is not touched; give "
                "another name, or remove it yourself"
            )
        if not self._overwrite:
            raise StoreError(
                f"{self.location} exists already; give another name, or allow it to be replaced "
                "with overwrite=True (--overwrite)"
            )

    def _stream(self, name: str, length: int, chunk: int, dtype: np.dtype[Any]) -> Any:
        return self._create(name, (length,), (chunk,), dtype, self._compression, None)

    def _put(self, name: str, array: NDArray[Any]) -> None:
        chunks = tuple(max(1, min(side, LARGEST_CHUNK // 8)) for side in array.shape)
        made = self._create(name, array.shape, chunks, array.dtype, "zstd", crc32(array))
        if array.size:
            made[...] = array

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dtype: np.dtype[Any],
        compression: str,
        checksum: int | None,
    ) -> Any:
        """An array, with a checksum of each chunk; the store lists what it is to hold."""
        from zarr.codecs import BloscCodec, Crc32cCodec

        codecs: list[Any] = [Crc32cCodec()]
        if compression != "none":
            cname: Any = compression
            level = {"lz4": 5, "zstd": 3}[cname]
            codecs.insert(0, BloscCodec(cname=cname, clevel=level, shuffle="shuffle"))
        self._arrays[name] = [list(shape), str(dtype), checksum]
        return self._group.create_array(
            name, shape=shape, chunks=chunks, dtype=dtype, compressors=codecs, fill_value=0
        )

    def _put_coordinates(
        self, side: str, coords: Mapping[str, NDArray[Any]]
    ) -> list[dict[str, str]]:
        """Coordinates as arrays of numbers or bytes, which every zarr reader has."""
        about = []
        for number, (name, array) in enumerate(coords.items()):
            array = np.asarray(array)
            where = f"{side}_label_{number}"
            if array.dtype.kind in "OSUT":
                raw = [x if isinstance(x, bytes) else str(x).encode() for x in array.tolist()]
                self._put(where, np.frombuffer(b"".join(raw), np.uint8))
                self._put(f"{where}_ends", np.cumsum([len(item) for item in raw], dtype=np.int64))
                about.append({"name": name, "kind": "text"})
            else:
                native = array.astype(array.dtype.newbyteorder("="))
                self._put(where, native.view(np.int64) if native.dtype.kind in "mM" else native)
                about.append({"name": name, "kind": native.dtype.str})
        return about

    def _appear(self) -> None:
        self._check_place()  # again: a conversion takes its time
        place = Path(self.location)
        aside = place.with_name(f".{place.name}.replaced-{os.getpid()}")
        if place.exists():
            place.rename(aside)
        try:
            Path(self._target).rename(place)
        except OSError:
            if aside.exists():
                aside.rename(place)
            raise
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def writing_errors(location: str) -> Any:
    """Trouble with a disk while a store is written, as one `StoreError`."""
    try:
        yield
    except DaskfactorError:
        raise
    except OSError as error:
        full = error.errno in DISK_FULL
        cause = "there is no room left" if full else str(error)
        remedy = "free some room" if full else "make its place writable"
        raise StoreError(
            f"the store {location} could not be written: {cause}; nothing was left there, so "
            f"{remedy} and convert again"
        ) from error


def chunk_length(counts: NDArray[np.int64], itemsize: int) -> int:
    """Entries per chunk at which reading all blocks, padding included, takes least time."""
    largest = max(1, int(counts.max()))
    fewest = -(-largest * itemsize // LARGEST_CHUNK)
    candidates = {-(-largest // parts) for parts in range(fewest, fewest + 32)}
    candidates = {max(SMALLEST_CHUNK, length) for length in candidates}

    def cost(length: int) -> tuple[int, int]:
        chunks = int((-(-counts // length)).sum())
        return chunks * (length * itemsize + CHUNK_COST), length

    return min(candidates, key=cost)


def _making(place: Path) -> Path:
    """A name beside a store for the store in the making; what dead processes left is removed."""
    import psutil

    prefix = f".{place.name}.partial-{socket.gethostname()}-"
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(f"{prefix}*"):
        number = left.name.removeprefix(prefix).partition("-")[0]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    return place.with_name(f"{prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}")
