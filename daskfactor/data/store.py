"""The blocked sparse store: a zarr group that holds a sparse matrix block by block.

A group of zarr format 3 with these attributes

    format            "daskfactor-blocked-sparse"
    format_version    1
    shape             [I, J]
    blocks            B, the number of row bands and of column bands
    dtype             "float32" or "float64"
    unstored          "zero" or "missing": what an entry that is not stored means
    row_dim, column_dim, name, row_labels, column_labels      names from the caller
    label_attrs, about      units and long names, of labels by their name and of the values
    statistics        total, minimum, maximum, is_integer, fingerprint
    arrays            of each array below its shape, dtype and, if it is not a stream of blocks,
                      the CRC-32 of its contents, little-endian
    complete          true; written last, so a store without it is unfinished
    checksum          CRC-32 of all other attributes as JSON with sorted keys; written with complete

and these arrays, with blocks one after another, row by row of blocks, each
beginning on a chunk boundary and stored as compressed sparse rows:

    values            entries, in ``dtype``; NaN is a missing entry
    columns           column of each entry inside its block, uint16 or uint32
    row_starts        of each block m + 1 numbers: where its rows begin, from 0; uint32 or uint64
    block_table       (B, B, 4) int64: first entry in values and columns, first number in
                      row_starts, entries stored, CRC-32 of the block's values, columns and
                      row_starts, little-endian, in this order
    block_observed    (B, B) int64; block_totals (B, B) float64, sums of the values
    row_offsets, column_offsets      (B + 1,) edges of the bands
    row_observed, column_observed    (I,), (J,) observed entries, in the order of the blocks
    row_order, column_order          (I,), (J,) the caller's row or column at each place of the
                                     blocks; only in a balanced store
    row_label_0, column_label_0, ... coordinates, in the caller's order; texts are UTF-8 bytes
                                     with ..._ends, where each text ends

What lies between a block's end and the next chunk boundary is padding. Every chunk ends with
zarr's crc32c. Stores of version 0.1.0 have neither that nor ``arrays`` nor ``checksum``.
"""

import contextlib
import json
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from daskfactor.checks import one_of
from daskfactor.data.coo import text_array
from daskfactor.data.grid import Bands, Block, Grid
from daskfactor.data.labels import SIDES, Labels
from daskfactor.data.places import FORMAT, Place, find_place, kind_of
from daskfactor.data.statistics import DataInfo, Layout, SourceInfo, Statistics, crc32
from daskfactor.data.storage import DISK_FULL, Storage, block_bytes
from daskfactor.errors import DaskfactorError, StoreError, StoreFormatError
from daskfactor.kernels.views import NARROW_COLUMNS, SparseBlock, index_type, pointer_type
from daskfactor.machine import available_memory
from daskfactor.publish import Publication
from daskfactor.urls import Location, error_summary, is_url, safe_cause, url_errors

FORMAT_VERSION = 1
ENTRY, START, STORED, CHECKSUM = range(4)
"""Fields of the block table."""
STREAMS = ("values", "columns", "row_starts")
NUMBERS = ("total", "minimum", "maximum", "is_integer", "fingerprint")
"""Fields of `Statistics` that are not arrays."""

NODE = "zarr.json"

COMPRESSIONS = {"lz4": 5, "zstd": 3, "none": 0}
"""Compression level of each codec."""
MAX_CHUNK = 2**24
"""Largest chunk in bytes; a larger block is cut into several chunks."""
CHUNK_COST = 2**16
"""Bytes that could be read in the time it takes to find and open a chunk."""
MIN_CHUNK = 1024
READ_COPIES = 3
"""Copies of a block while it is read: in chunks, assembled and in another dtype."""


class BlockStore:
    """A blocked sparse store, open for reading from any number of threads.

    ``known`` describes its blocks, with the dtype of the stored values.

    Raises
    ------
    StoreError
        If there is no store, it cannot be read, or it is unfinished.
    StoreFormatError
        If it is not a blocked store, damaged, or of a newer version.
    """

    def __init__(self, location: str) -> None:
        self.location = Location.of(location)
        self._group = _open_group(self.location)
        attributes = dict(self._group.attrs)
        _check_attributes(self.location, attributes)
        self._listed: dict[str, Any] | None = attributes.get("arrays")
        try:
            self.unstored: str = attributes["unstored"]
            self._values, self._columns, self._starts = (self._stream(name) for name in STREAMS)
            self._table: NDArray[np.int64] = self._array("block_table")
            self.known = self._read_info(attributes)
        except DaskfactorError:
            raise
        except Exception as error:
            raise _unreadable(self.location, error) from error

    def _read_info(self, attributes: dict[str, Any]) -> DataInfo:
        grid = Grid(*(Bands(tuple(self._array(f"{side}_offsets").tolist())) for side in SIDES))
        if [*grid.shape] != attributes["shape"] or self._table.shape != (grid.blocks,) * 2 + (4,):
            raise ValueError("shape, offsets and block table do not agree")
        statistics = Statistics(
            n_observed=self._array("block_observed"),
            row_observed=self._array("row_observed"),
            col_observed=self._array("column_observed"),
            n_stored=self._table[:, :, STORED],
            **{name: attributes["statistics"][name] for name in NUMBERS},
        )
        labels = Labels(
            attributes["row_dim"],
            attributes["column_dim"],
            self._coordinates("row", attributes["row_labels"]),
            self._coordinates("column", attributes["column_labels"]),
            attributes.get("name"),
            attributes.get("label_attrs", {}),
            attributes.get("about", {}),
        )
        ordered = "row_order" in (self._group if self._listed is None else self._listed)
        orders = [self._array(f"{side}_order") for side in SIDES] if ordered else []
        source = SourceInfo("blocks", self.location, lazy=True)
        layout = Layout(self.unstored, *orders)
        return DataInfo(grid, labels, statistics, source, np.dtype(attributes["dtype"]), layout)

    def blocks(self, dtype: np.dtype[Any], budget: int) -> Storage:
        """Return the blocks in another dtype, each read on demand."""
        grid, unstored = self.known.grid, self.unstored
        nbytes = int(block_bytes(grid, dtype, self.known.statistics.n_stored).sum())
        return Storage(
            grid,
            unstored,
            load=lambda block: self.read(*block, dtype),
            nbytes=nbytes,
            budget=budget,
        )

    def read(self, row: int, col: int, dtype: DTypeLike | None = None) -> SparseBlock:
        """Return block (row, col), verified by its checksum."""
        m, n = self.known.grid.block_shape(Block(row, col))
        entry, start, stored, checksum = self._table[row, col].tolist()
        what = f"block ({row}, {col}) of "
        if not 0 <= stored <= m * n or min(entry, start) < 0:
            raise _unreadable(self.location, ValueError("its size cannot be"), what)
        if READ_COPIES * stored * self.known.dtype.itemsize > available_memory():
            raise StoreError(
                f"{what}the store at {self.location} has {stored} entries, which take more memory "
                "than is free; convert the data again, with more blocks"
            )
        try:
            values = np.asarray(self._values[entry : entry + stored])
            columns = np.asarray(self._columns[entry : entry + stored])
            starts = np.asarray(self._starts[start : start + m + 1])
        except Exception as error:  # noqa: BLE001 - every store raises errors of other types
            raise _unreadable(self.location, error, what) from safe_cause(error, self.location)
        if crc32((values, columns, starts)) != checksum:
            mismatch = ValueError("its checksum is not what it was when it was written")
            raise _unreadable(self.location, mismatch, what)
        if not _is_valid_csr(starts, columns, n):
            raise _unreadable(self.location, ValueError("it has entries outside of it"), what)
        values = values if dtype is None else values.astype(dtype, copy=False)
        indptr = starts.astype(pointer_type(stored))
        indices = columns.astype(index_type(n), copy=False)
        return SparseBlock(indptr, indices, values, m, n, self.unstored == "zero")

    def _stream(self, name: str) -> Any:
        """Return an unread array, refused if its shape or dtype differ from those written."""
        array = self._group[name]
        shape_and_type = [list(array.shape), str(array.dtype)]
        if self._listed is not None and self._listed[name][:2] != shape_and_type:
            raise ValueError(f"{name} has another shape or type than when it was written")
        return array

    def _array(self, name: str) -> NDArray[Any]:
        """Return an array, verified by its checksum."""
        array = self._stream(name)
        if array.nbytes > available_memory() // 2:
            raise ValueError(f"{name} has {array.nbytes} bytes, more than fit into memory")
        values = np.asarray(array[...])
        if self._listed is not None and self._listed[name][2] != crc32([values]):
            raise ValueError(f"{name} has other contents than when it was written")
        return values

    def _coordinates(self, side: str, names: list[dict[str, str]]) -> dict[str, NDArray[Any]]:
        """Return the coordinates of one side, by name."""
        coords = {}
        for number, about in enumerate(names):
            array = self._array(f"{side}_label_{number}")
            if about["kind"] == "text":
                ends = self._array(f"{side}_label_{number}_ends")
                coords[about["name"]] = _texts(array.tobytes(), ends.tolist())
            else:
                coords[about["name"]] = array.view(np.dtype(about["kind"]))
        return coords


class StoreWriter:
    """Context manager that writes a blocked store; `finish` makes the store visible.

    The store is written to a draft: a local one in a hidden folder, one that replaces another at a
    URL under a name of its own. A new store at a URL is written in place, and is incomplete until
    its last attribute is written.

    Raises
    ------
    OptionError
        If ``compression`` is not one of the codecs.
    StoreError
        If the location exists and may not be replaced, or another process writes to it.
    """

    def __init__(self, location: str, compression: str = "lz4", overwrite: bool = False) -> None:
        one_of("compression", compression, [*COMPRESSIONS])
        self.location = Location(location)
        self._files, self._place = self.location.file_system()
        self._compression = compression
        self._overwrite = overwrite
        self._replaced = self._check_place()
        self._publication: Publication | None = None
        self._target = self.location
        if not is_url(self.location):
            Path(self.location).parent.mkdir(parents=True, exist_ok=True)
            self._publication = Publication(self.location)
            self._target = Location(self._publication.draft)
        elif self._replaced is not None:
            draft = f"{self.location.url.rstrip('/')}.{uuid.uuid4().hex}.partial"
            self._target = self.location.sibling(draft)
        self._group: Any = None
        self._arrays: dict[str, list[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.abort()
        if self._publication is not None:
            self._publication.close()

    def begin(
        self,
        grid: Grid,
        counts: NDArray[np.int64],
        dtype: np.dtype[Any],
        unmerged_share: float = 1.0,
    ) -> None:
        """Create the arrays for blocks of at most ``counts`` entries, some of which will be merged.

        There is space for all entries, and empty chunks take none; the chunk length suits blocks
        that retain ``unmerged_share`` of their entries.
        """
        import zarr

        self._claim()
        options = self._target.options or None
        self._group = zarr.open_group(self._target.url, mode="r+", storage_options=options)
        rows = np.repeat(np.array(grid.rows.sizes) + 1, grid.blocks)
        entries, square = counts.ravel(), (grid.blocks, grid.blocks)
        starts = np.dtype(np.uint32 if counts.max() < 2**32 else np.uint64)
        columns = np.dtype(np.uint32 if max(grid.cols.sizes) > NARROW_COLUMNS else np.uint16)
        merged = np.ceil(unmerged_share * entries).astype(np.int64)
        steps = chunk_length(merged, dtype.itemsize), chunk_length(rows, starts.itemsize)
        self._table = np.zeros((*square, 4), np.int64)
        self._totals = np.zeros(square)
        ends = []
        for field, (lengths, step) in enumerate(zip((entries, rows), steps, strict=True)):
            padded_lengths = -(-lengths // step) * step  # each block begins on a chunk boundary
            ends.append(max(step, int(padded_lengths.sum())))
            self._table[..., field] = (np.cumsum(padded_lengths) - padded_lengths).reshape(square)
        self._streams = [
            self._create(name, (ends[field],), (steps[field],), kind, self._compression)
            for name, kind, field in zip(STREAMS, (dtype, columns, starts), (0, 0, 1), strict=True)
        ]

    def put(self, block: Block, view: SparseBlock) -> None:
        """Write one block. Safe from any thread: no chunk belongs to two blocks."""
        entry, start = self._table[block][:2].tolist()
        pairs = zip(self._streams, (view.values, view.indices, view.indptr), strict=True)
        parts = [data.astype(array.dtype, copy=False) for array, data in pairs]
        for array, at, data in zip(self._streams, (entry, entry, start), parts, strict=True):
            # Zeros up to the chunk boundary: whole chunks need not be read back.
            padded = np.pad(data, (0, -data.size % array.chunks[0]))
            if padded.size:
                array[at : at + padded.size] = padded
        self._table[block][2:] = view.values.size, crc32(parts)
        self._totals[block] = np.nansum(view.values, dtype=np.float64)

    def finish(self, info: DataInfo) -> None:
        """Write the description of the data, and make the store visible."""
        import zarr

        grid, labels, statistics, _, dtype, layout = info
        small = {
            "block_table": self._table,
            "block_totals": self._totals,
            "block_observed": statistics.n_observed,
            "row_observed": statistics.row_observed,
            "column_observed": statistics.col_observed,
            "row_offsets": np.array(grid.rows.offsets, np.int64),
            "column_offsets": np.array(grid.cols.offsets, np.int64),
            "row_order": layout.row_order,
            "column_order": layout.col_order,
        }
        for name, array in small.items():
            if array is not None:
                self._put(name, array)
        attributes = {
            "shape": list(grid.shape),
            "blocks": grid.blocks,
            "dtype": str(dtype),
            "unstored": layout.unstored,
            "row_dim": labels.row_dim,
            "column_dim": labels.col_dim,
            "name": labels.name,
            "label_attrs": {name: dict(of) for name, of in labels.attrs.items()},
            "about": dict(labels.about),
            "row_labels": self._put_coordinates("row", labels.row_coords),
            "column_labels": self._put_coordinates("column", labels.col_coords),
            "statistics": {name: getattr(statistics, name) for name in NUMBERS},
            "arrays": self._arrays,
            "complete": True,
        }
        all_attributes = dict(self._group.attrs) | attributes
        with warnings.catch_warnings(
            action="ignore"
        ):  # zarr warns that format 3 does not define it
            self._group = zarr.consolidate_metadata(self._group.store)
        self._group.attrs.update(attributes | {"checksum": attributes_checksum(all_attributes)})
        if self._target != self.location:
            self._publish()

    def abort(self) -> None:
        """Remove the files written so far, if possible."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                files, place = self._target.file_system()
                files.rm(place, recursive=True)

    def nbytes(self) -> int:
        """Return the bytes of the store."""
        return int(self._files.du(self._place))

    def _claim(self) -> None:
        """Create the empty root group by a write that fails if one exists."""
        attributes = {"format": FORMAT, "format_version": FORMAT_VERSION}
        root = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        files, place = self._target.file_system()
        file, text = f"{place}/{NODE}", json.dumps(root).encode()
        if self._publication is not None:
            files.makedirs(place)
        try:
            files.pipe_file(file, text, mode="create")
        except Exception as error:  # noqa: BLE001 - each file system raises errors of other types
            files.invalidate_cache()
            if isinstance(error, FileExistsError) or files.exists(file):
                raise self._exists_already() from None
            files.pipe_file(file, text)  # many servers lack exclusive writes

    def _check_place(self) -> bytes | None:
        """Refuse to replace anything but a store; return the root document of that."""
        files, place = self._files, self._place
        with url_errors(self.location):
            if not files.exists(place) or (files.isdir(place) and not files.ls(place)):
                return None
        if kind_of(Location(self.location)) != "blocks":
            raise StoreError(
                f"{self.location} exists and is not a blocked store, so it is left alone; "
                "pass another name, or remove it yourself"
            )
        if not self._overwrite:
            raise self._exists_already()
        with url_errors(self.location):
            root = f"{place}/{NODE}"
            return bytes(files.cat_file(root)) if files.exists(root) else b""

    def _exists_already(self) -> StoreError:
        return StoreError(
            f"{self.location} exists already; give another name, or allow it to be replaced "
            "with overwrite=True"
        )

    def _put(self, name: str, array: NDArray[Any]) -> None:
        chunks = tuple(max(1, min(side, MAX_CHUNK // 8)) for side in array.shape)
        made = self._create(name, array.shape, chunks, array.dtype, checksum=crc32([array]))
        if array.size:
            made[...] = array

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dtype: np.dtype[Any],
        compression: str = "zstd",
        checksum: int | None = None,
    ) -> Any:
        """Create an array with a checksum per chunk, and list it in the attributes."""
        from zarr.codecs import BloscCodec, Crc32cCodec

        codecs: list[Any] = [Crc32cCodec()]
        if level := COMPRESSIONS[compression]:
            name_of_codec: Any = compression
            codecs.insert(0, BloscCodec(cname=name_of_codec, clevel=level, shuffle="shuffle"))
        self._arrays[name] = [list(shape), str(dtype), checksum]
        return self._group.create_array(
            name, shape=shape, chunks=chunks, dtype=dtype, compressors=codecs, fill_value=0
        )

    def _put_coordinates(
        self, side: str, coords: Mapping[str, NDArray[Any]]
    ) -> list[dict[str, str]]:
        """Write coordinates as arrays of numbers or bytes, which every zarr reader supports."""
        descriptions = []
        for number, (name, array) in enumerate(coords.items()):
            array = np.asarray(array)
            array_name = f"{side}_label_{number}"
            if array.dtype.kind in "OSUT":
                raw = [x if isinstance(x, bytes) else str(x).encode() for x in array.tolist()]
                self._put(array_name, np.frombuffer(b"".join(raw), np.uint8))
                self._put(
                    f"{array_name}_ends", np.cumsum([len(item) for item in raw], dtype=np.int64)
                )
                descriptions.append({"name": name, "kind": "text"})
            else:
                native = array.astype(array.dtype.newbyteorder("="))
                self._put(
                    array_name, native.view(np.int64) if native.dtype.kind in "mM" else native
                )
                descriptions.append({"name": name, "kind": native.dtype.str})
        return descriptions

    def _publish(self) -> None:
        """Move the finished store to its location."""
        root_document = self._check_place()  # again: another process may have written meanwhile
        if self._publication is not None:
            self._publication.publish(self._overwrite)
            return
        if root_document != self._replaced:
            raise StoreError(
                f"{self.location} was written by another process meanwhile; convert again"
            )
        # An object store cannot rename: the finished draft is copied, its root last.
        files, new = self._target.file_system()
        root, place = new + f"/{NODE}", self._place
        try:
            with url_errors(self.location):
                files.invalidate_cache()
                others = [name for name in files.find(new) if name != root]
                self._group = None  # from here on the draft is the only copy, so never abort
                files.rm(place, recursive=True)
                files.copy(others, [place + name.removeprefix(new) for name in others])
                files.cp_file(root, place + f"/{NODE}")
                files.rm(new, recursive=True)
        except DaskfactorError as error:
            raise StoreError(
                f"{error}; the new store is whole at {self._target}: pass that instead, or copy it"
            ) from error.__cause__


def attributes_checksum(attributes: dict[str, Any]) -> int:
    """Return the CRC-32 of all attributes of a store except the checksum."""
    others = {key: value for key, value in attributes.items() if key != "checksum"}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def _is_valid_csr(starts: NDArray[Any], columns: NDArray[Any], width: int) -> bool:
    """Return whether CSR arrays are valid; kernels do no bounds checks."""
    rises = bool((starts[1:] >= starts[:-1]).all())
    rises = rises and starts[0] == 0 and starts[-1] == columns.size
    return rises and (not columns.size or int(columns.max()) < width)


def _texts(raw: bytes, ends: list[int]) -> NDArray[Any]:
    starts = [0, *ends[:-1]]
    return text_array([raw[a:b].decode() for a, b in zip(starts, ends, strict=True)])


def _open_group(location: Location) -> Any:
    place = find_place(location)
    if place.kind == "array":
        place = Place("array", error=ValueError("it is an array"))
    if place.node is not None:
        return place.node
    error = place.error or FileNotFoundError("there is no zarr group")
    if isinstance(error, DaskfactorError):
        raise error
    if place.kind == "blocks":
        raise _unreadable(location, ValueError(str(error))) from error
    raise StoreError(
        f"no store can be opened at {location} ({error_summary(error, location)}); give the "
        "path or URL of a store that daskfactor convert made"
    ) from safe_cause(error, location)


def _check_attributes(location: Location, attributes: dict[str, Any]) -> None:
    if attributes.get("format") != FORMAT:
        if find_place(location).kind == "blocks":
            raise _unreadable(location, ValueError("its attributes are not those of a store"))
        raise StoreFormatError(
            f"{location} is a zarr group, but not a blocked sparse store; give a store that "
            "daskfactor convert made"
        )
    version = attributes.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise StoreFormatError(
            f"the blocked store at {location} has format version {version!r}, and this version of "
            f"daskfactor reads up to {FORMAT_VERSION}, from 1; install a newer daskfactor, or "
            "convert again"
        )
    checksum = attributes.get("checksum")
    if (checksum is not None or "arrays" in attributes) and (
        checksum != attributes_checksum(attributes)
    ):
        raise _unreadable(location, ValueError("its attributes were changed"))
    if attributes.get("complete") is not True:
        raise StoreError(
            f"the blocked store at {location} is unfinished: its conversion goes on or was "
            "interrupted; wait for it, or convert again with overwrite"
        )


def _unreadable(location: str, error: Exception, what: str = "") -> StoreError:
    """Return the error for a store, or a block of it, that is damaged or out of reach."""
    if isinstance(error, DaskfactorError):
        return error if isinstance(error, StoreError) else StoreError(str(error))
    reason = f"{error}" if type(error) is ValueError else error_summary(error, location)
    advice = "convert the data again, or copy the store again from where it came from"
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return StoreError(
            f"{what}the store at {location} cannot be read ({reason}); check that its files can "
            f"be reached, or {advice}"
        )
    return StoreFormatError(f"{what}the store at {location} is damaged ({reason}); {advice}")


@contextlib.contextmanager
def writing_errors(location: str) -> Iterator[None]:
    """Raise errors of disk or network while a store is written as StoreError."""
    try:
        yield
    except DaskfactorError:
        raise
    except OSError as error:
        full = error.errno in DISK_FULL
        message = error_summary(error, location) if is_url(location) else str(error)
        cause = "there is no room left" if full else message
        remedy = "free some room" if full else "make its place writable"
        raise StoreError(
            f"the store {location} could not be written: {cause}; nothing was left there, so "
            f"{remedy} and convert again"
        ) from safe_cause(error, location)
    except Exception as error:
        if not is_url(location):
            raise
        raise StoreError(
            f"the store {location} could not be written: {error_summary(error, location)}; the "
            "store there is unfinished, so check that the location can be reached and convert again"
        ) from safe_cause(error, location)


def chunk_length(counts: NDArray[np.int64], itemsize: int) -> int:
    """Return the chunk length at which reading all blocks, with padding, takes least time."""
    largest = max(1, int(counts.max()))
    fewest = -(-largest * itemsize // MAX_CHUNK)
    candidates = {-(-largest // parts) for parts in range(fewest, fewest + 32)}
    candidates = {max(MIN_CHUNK, length) for length in candidates}

    def cost(length: int) -> tuple[int, int]:
        chunks = int((-(-counts // length)).sum())
        return chunks * (length * itemsize + CHUNK_COST), length

    return min(candidates, key=cost)
