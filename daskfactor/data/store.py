"""The blocked sparse store: a zarr group that holds a sparse matrix block by block.

A group of zarr format 3 with these attributes

    format            "daskfactor-blocked-sparse"
    format_version    1
    shape             [I, J]
    blocks            B, the number of row bands and of column bands
    dtype             "float32" or "float64"
    unstored          "zero" or "missing": what an entry that is not stored means
    row_dim, column_dim, name, row_labels, column_labels      names, as the caller has them
    statistics        total, minimum, maximum, is_integer, fingerprint
    arrays            of each array below its shape, dtype and, if it is not a stream of blocks,
                      the CRC-32 of its contents, little-endian
    complete          true; written last, so a store without it is half a store
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

import json
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from daskfactor.data.grid import Bands, Block, Grid
from daskfactor.data.labels import Labels
from daskfactor.data.statistics import Statistics, crc32
from daskfactor.data.storage import Storage, block_bytes
from daskfactor.errors import DaskfactorError, StoreError, StoreFormatError
from daskfactor.kernels.views import SparseBlock, index_type, pointer_type

FORMAT = "daskfactor-blocked-sparse"
FORMAT_VERSION = 1
ENTRY, START, STORED, CHECKSUM = range(4)
"""Fields of the block table."""
STREAMS = ("values", "columns", "row_starts")
NUMBERS = ("total", "minimum", "maximum", "is_integer", "fingerprint")
"""What `Statistics` has that is no array."""
DOCUMENTS = ("zarr.json", ".zgroup", ".zarray")

Kind = Literal["blocks", "run", "array", "group"]
"""What a zarr directory may be: a blocked store, a run store, or what somebody else made."""


class BlockStore:
    """A blocked sparse store, open for reading. From any number of threads.

    Raises
    ------
    StoreError
        If there is no store, it cannot be read, or it was never finished.
    StoreFormatError
        If it is something else, damaged, or of a newer version.
    """

    def __init__(self, location: str) -> None:
        self.location = absolute(location)
        self._group = _open_group(self.location)
        attributes = dict(self._group.attrs)
        _check_attributes(self.location, attributes)
        self._listed: dict[str, Any] | None = attributes.get("arrays")
        try:
            self._read_plan(attributes)
        except DaskfactorError:
            raise
        except Exception as error:
            raise _unreadable(self.location, error) from error

    def _read_plan(self, attributes: dict[str, Any]) -> None:
        self.unstored: str = attributes["unstored"]
        self.zeros = self.unstored == "zero"
        self.dtype = np.dtype(attributes["dtype"])
        self.grid = Grid(
            Bands(tuple(self._array("row_offsets").tolist())),
            Bands(tuple(self._array("column_offsets").tolist())),
        )
        self._table: NDArray[np.int64] = self._array("block_table")
        if list(self.grid.shape) != attributes["shape"] or self._table.shape != (
            self.grid.blocks,
            self.grid.blocks,
            4,
        ):
            raise ValueError("shape, offsets and block table do not agree")
        self.n_stored = self._table[:, :, STORED]
        self.statistics = Statistics(
            n_observed=self._array("block_observed"),
            row_observed=self._array("row_observed"),
            col_observed=self._array("column_observed"),
            n_stored=self.n_stored,
            **{name: attributes["statistics"][name] for name in NUMBERS},
        )
        self.labels = Labels(
            attributes["row_dim"],
            attributes["column_dim"],
            self._coordinates("row", attributes["row_labels"]),
            self._coordinates("column", attributes["column_labels"]),
            attributes.get("name"),
        )
        ordered = "row_order" in (self._group if self._listed is None else self._listed)
        self.row_order = self._array("row_order") if ordered else None
        self.col_order = self._array("column_order") if ordered else None
        self._values, self._columns, self._starts = (self._stream(name) for name in STREAMS)

    def blocks(self, dtype: np.dtype[Any], budget: int) -> Storage:
        """The blocks in another type, each read when it is wanted."""
        nbytes = int(block_bytes(self.grid, dtype, self.n_stored).sum())
        return Storage(
            self.grid,
            self.unstored,
            load=lambda block: self.read(*block, dtype),
            nbytes=nbytes,
            budget=budget,
        )

    def read(self, row: int, col: int, dtype: DTypeLike | None = None) -> SparseBlock:
        """Block (row, col), checked against its checksum."""
        m, n = self.grid.block_shape(Block(row, col))
        entry, start, stored, checksum = self._table[row, col].tolist()
        try:
            values = np.asarray(self._values[entry : entry + stored])
            columns = np.asarray(self._columns[entry : entry + stored])
            starts = np.asarray(self._starts[start : start + m + 1])
        except Exception as error:
            raise _unreadable(self.location, error, f"block ({row}, {col}) of ") from error
        if crc32(values, columns, starts) != checksum:
            why = ValueError("its checksum is not what it was when it was written")
            raise _unreadable(self.location, why, f"block ({row}, {col}) of ")
        values = values.astype(dtype or self.dtype, copy=False)
        indptr = starts.astype(pointer_type(stored))
        indices = columns.astype(index_type(n), copy=False)
        return SparseBlock(indptr, indices, values, m, n, self.zeros)

    def _stream(self, name: str) -> Any:
        """An array of the store, unread; its shape and type as they were written."""
        array = self._group[name]
        about = [list(array.shape), str(array.dtype)]
        if self._listed is not None and self._listed[name][:2] != about:
            raise ValueError(f"{name} has another shape or type than when it was written")
        return array

    def _array(self, name: str) -> NDArray[Any]:
        found = np.asarray(self._stream(name)[...])
        if self._listed is not None and self._listed[name][2] != crc32(found):
            raise ValueError(f"{name} has other contents than when it was written")
        return found

    def _coordinates(self, side: str, names: list[dict[str, str]]) -> dict[str, NDArray[Any]]:
        """Coordinates of one side, by name."""
        found: dict[str, NDArray[Any]] = {}
        for number, about in enumerate(names):
            raw = self._array(f"{side}_label_{number}")
            if about["kind"] == "text":
                ends = self._array(f"{side}_label_{number}_ends")
                found[about["name"]] = _texts(raw.tobytes(), ends.tolist())
            else:
                found[about["name"]] = raw.view(np.dtype(about["kind"]))
        return found


def zarr_kind(location: str) -> Kind | None:
    """Tell what a zarr directory is by what it contains, whatever its name; None if it is none.

    A run store is a group that `sample` made. A blocked store that was damaged, or never
    finished, is one all the same: opening it says what is wrong with it.
    """
    import zarr

    location = absolute(location)
    local = "://" not in location
    table = local and (Path(location) / "block_table").is_dir()
    if local and not any((Path(location) / name).is_file() for name in DOCUMENTS):
        return "blocks" if table else None
    try:
        node = zarr.open(store=location, mode="r")
    except Exception:  # noqa: BLE001 - whatever its document is, it is no zarr that can be opened
        return "blocks" if table else None
    if isinstance(node, zarr.Array):
        return "array"
    if table or node.attrs.get("format") == FORMAT:
        return "blocks"
    return "run" if node.attrs.get("inference_library") == "daskfactor" else "group"


def is_blocked_store(location: str) -> bool:
    """Whether a path or URL is a blocked sparse store of any version, finished or not."""
    return zarr_kind(location) == "blocks"


def absolute(location: str) -> str:
    """A local path made absolute; a URL as it is, but file:// as a path."""
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    if "://" in location:
        return location
    return str(Path(location).expanduser().absolute())


def attributes_checksum(attributes: dict[str, Any]) -> int:
    """CRC-32 of all attributes of a store but the checksum itself."""
    others = {key: value for key, value in attributes.items() if key != "checksum"}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def _texts(raw: bytes, ends: list[int]) -> NDArray[Any]:
    from daskfactor.data.entries import text_array

    starts = [0, *ends[:-1]]
    return text_array([raw[a:b].decode() for a, b in zip(starts, ends, strict=True)])


def _open_group(location: str) -> Any:
    import zarr

    try:
        return zarr.open_group(location, mode="r")
    except Exception as error:
        if is_blocked_store(location):
            raise _unreadable(location, ValueError(str(error))) from error
        raise StoreError(
            f"no store can be opened at {location} ({type(error).__name__}: {error}); give the "
            "path or URL of a store that daskfactor convert made"
        ) from error


def _check_attributes(location: str, attributes: dict[str, Any]) -> None:
    if attributes.get("format") != FORMAT:
        if is_blocked_store(location):
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
    """The error for a store, or a block of it, that is damaged or cannot be reached."""
    reason = f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}"
    advice = "convert the data again, or copy the store again from where it came from"
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return StoreError(
            f"{what}the store at {location} cannot be read ({reason}); check that its files can "
            f"be reached, or {advice}"
        )
    return StoreFormatError(f"{what}the store at {location} is damaged ({reason}); {advice}")
