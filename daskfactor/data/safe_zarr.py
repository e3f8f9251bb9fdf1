"""Zarr stores of unknown origin, opened so that reading them runs no code and bounds memory.

The store itself says which codec decodes a chunk, and how large a chunk is. So arrays are read
through `SafeStore`: it allows only the codecs in `CODECS` (one of numcodecs' own unpickles), and no
chunks larger than memory. Failed reads are retried, see `daskfactor.urls`.
"""

import json
import math
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

import numpy as np
from zarr.abc.store import OffsetByteRequest, RangeByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from daskfactor.data.icechunks import repository_store
from daskfactor.errors import StoreError, StoreFormatError
from daskfactor.machine import available_memory
from daskfactor.urls import Location, is_url, retry_async, url_errors

DOCUMENTS: Final = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
CONSOLIDATED: Final = ".zmetadata"
SMALL: Final = 2**24
"""Bytes of a value that are asked for at once."""
DECODING_COPIES: Final = 4
"""Copies of a chunk while it is decoded: compressed, decompressed and in the array read."""
CHECKSUMS: Final = frozenset(["adler32", "crc32", "crc32c", "fletcher32"])
NUMBERS: Final = frozenset(["astype", "bitround", "delta", "fixedscaleoffset", "quantize"])
BYTES: Final = frozenset(["bytes", "packbits", "shuffle", "transpose", "vlen-bytes", "vlen-utf8"])
COMPRESSORS: Final = frozenset(["blosc", "bz2", "gzip", "lz4", "zlib", "zstd"])
CODECS: Final = CHECKSUMS | NUMBERS | BYTES | COMPRESSORS | {"sharding_indexed"}
"""Codecs that decode a chunk and do nothing else."""
POINTER: Final = 8
"""Bytes per entry of an array of texts, dates or time differences."""


def zarr_store(location: Location, names: Collection[str] | None = None) -> "SafeStore":
    """Return the store at a path or URL, zarr or Icechunk, for zarr, xarray and anndata.

    ``names`` lists the folder, if it is known; documents that are not among them are not asked for.
    """
    store = plain_store(location)
    with url_errors(store.location):
        if names is not None:
            store.preload_documents(names)
        else:
            store.refusal_is_absence = True
        if not any(sync(store.get(name, default_buffer_prototype())) for name in DOCUMENTS[:3]):
            repository = repository_store(store.location)
            if repository is not None:
                return SafeStore(repository[0], store.location, repository[1])
    return store


def plain_store(location: Location) -> "SafeStore":
    """Return the zarr store at a path or URL."""
    with url_errors(location):
        if location.is_url:
            plain: Any = FsspecStore.from_url(location.url, location.options, read_only=True)
        else:
            plain = LocalStore(str(location), read_only=True)
    return SafeStore(plain, location)


class SafeStore(WrapperStore[Any]):
    """Read-only zarr store that refuses arrays whose decoding could do harm.

    Parameters
    ----------
    store
        Store that holds the chunks.
    location
        Location of the store, for messages; reads from a URL are retried.
    inside
        Path inside the store.

    Attributes
    ----------
    refusal_is_absence
        True if a document that may not be read counts as absent: where a bucket may not be listed,
        S3 gives the same answer for both.
    """

    def __init__(self, store: Any, location: str = "", inside: str = "") -> None:
        super().__init__(store)
        self.location, self.inside = location, inside
        self.refusal_is_absence = False
        self._arrays: dict[str, Any] = {}
        self._checked: set[str] = set()
        self._documents: dict[str, Buffer | None] = {}

    def _with_store(self, store: Any) -> Self:
        other = type(self)(store, self.location, self.inside)
        other._arrays, other._checked = self._arrays, self._checked
        other._documents = self._documents
        other.refusal_is_absence = self.refusal_is_absence
        return other

    def preload_documents(self, names: Collection[str]) -> None:
        """Read consolidated metadata, and never ask for documents that a folder does not have."""
        self._documents |= {name: None for name in DOCUMENTS if name not in names}
        if CONSOLIDATED not in names:
            return
        consolidated = sync(self.get(CONSOLIDATED, default_buffer_prototype()))
        raw = b"" if consolidated is None else consolidated.to_bytes()
        with suppress(ValueError, AttributeError, TypeError, KeyError, RecursionError):
            for key, document in json.loads(raw)["metadata"].items():
                self._documents[key] = cpu.Buffer.from_bytes(json.dumps(document).encode())

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Read one value.

        Raises
        ------
        StoreFormatError
            If decoding it could run code, or take more memory than is free.
        StoreError
            If it cannot be reached after several attempts.
        """
        folder, _, name = key.rpartition("/")
        if name not in DOCUMENTS or byte_range is not None:
            self._check(key)
            return await self._read(key, prototype, byte_range)
        newer = f"{folder}/{DOCUMENTS[0]}".lstrip("/")
        if key != newer and self._documents.get(newer) is not None:
            return None  # it has format 3, and others are those of format 2
        if key not in self._documents:
            self._documents[key] = await self._read_document(key, prototype)
        document = self._documents[key]
        if document is not None:
            self._record_arrays(folder, document.to_bytes())
        return document

    async def _read_document(self, key: str, prototype: Any) -> Buffer | None:
        """Read a document; None if it is absent."""
        try:
            return await self._read(key, prototype)
        except StoreError as error:
            if self.refusal_is_absence and isinstance(error.__cause__, PermissionError):
                return None
            raise

    async def _read(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Read a value; a small one by one request, without asking for its size."""
        if byte_range is not None or not isinstance(self._store, FsspecStore):
            value: Buffer | None = await self._ask(self._store.get, key, prototype, byte_range)
            return value
        value = await self._ask(self._store.get, key, prototype, RangeByteRequest(0, SMALL))
        if value is not None and len(value) == SMALL:
            value += await self._ask(self._store.get, key, prototype, OffsetByteRequest(SMALL))
        return value

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Buffer | None]:
        """Read parts of several values, with the checks of `get`."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Return whether a key exists."""
        if key in self._documents:
            return self._documents[key] is not None
        return bool(await self._ask(self._store.exists, key))

    async def _ask(self, function: Any, *args: Any) -> Any:
        if not is_url(self.location):
            return await function(*args)
        return await retry_async(partial(function, *args), self.location)

    @property
    def _supports_sync_io(self) -> bool:
        return False  # every read goes through `get`, which checks it

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[Any], *, prototype: Any, **_: Any
    ) -> AsyncIterator[Sequence[tuple[int, Any]]]:
        """Read parts of a value one by one, with the checks of `get`."""
        for number, part in enumerate(byte_ranges):
            yield [(number, await self.get(key, prototype, part))]

    def _record_arrays(self, folder: str, raw: bytes) -> None:
        """Record the array metadata in a zarr document."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            return  # zarr raises a better error
        for path, array in _documents(folder, document):
            self._arrays[path] = array
            self._checked.discard(path)

    def _check(self, key: str) -> None:
        """Refuse a chunk of an array with a foreign codec or with chunks larger than memory."""
        path = key
        while path not in self._arrays:
            if not path:
                return
            path = path.rpartition("/")[0]
        if path in self._checked:
            return
        try:
            codecs, nbytes = _codecs_and_size(self._arrays[path])
        except Exception as error:
            raise self._refused(path, "has metadata that cannot be understood") from error
        for codec in codecs:
            if codec not in CODECS:
                raise self._refused(
                    path,
                    f"is encoded with {codec!r}, which is not read here, because what it does to a "
                    "chunk of unknown origin is not known",
                )
        if not 0 <= DECODING_COPIES * nbytes <= available_memory():
            raise self._refused(
                path,
                f"has chunks that take {DECODING_COPIES * nbytes} bytes to decode, more than is "
                "free",
                "rewrite it with smaller chunks, or use a larger machine",
            )
        self._checked.add(path)

    def _refused(self, path: str, reason: str, remedy: str = "do not trust it") -> StoreFormatError:
        return StoreFormatError(f"{path or 'the array'} of {self.location} {reason}; {remedy}")


def _documents(folder: str, document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield paths and metadata of all arrays in a document, consolidated or not."""
    if not isinstance(document, dict):
        return
    if "shape" in document:
        yield folder, document
    inside = document.get("metadata", document.get("consolidated_metadata"))
    inside = inside.get("metadata", inside) if isinstance(inside, dict) else {}
    for name, one in inside.items():
        if isinstance(one, dict) and "shape" in one:
            path = name.removesuffix("/.zarray")
            yield f"{folder}/{path}".strip("/"), one


def _codecs_and_size(document: dict[str, Any]) -> tuple[list[str], int]:
    """Return the codec names of an array of format 2 or 3, and the bytes of a chunk."""
    if document.get("zarr_format") == 2:
        codecs = [*(document.get("filters") or []), document.get("compressor")]
        sides, dtype = document["chunks"], document["dtype"]
    else:
        codecs, dtype = document["codecs"], document["data_type"]
        sides = document["chunk_grid"]["configuration"]["chunk_shape"]
    return list(_names(codecs)), math.prod(map(int, sides)) * _itemsize(dtype)


def _names(codecs: list[Any]) -> Iterator[str]:
    """Yield the names of codecs, including those inside shards."""
    for codec in filter(None, codecs):
        codec_document: dict[str, Any] = {"name": codec} if isinstance(codec, str) else codec
        yield str(
            codec_document["id"] if "id" in codec_document else codec_document["name"]
        ).removeprefix("numcodecs.")
        shard = codec_document.get("configuration") or {}
        yield from _names([*shard.get("codecs", ()), *shard.get("index_codecs", ())])


def _itemsize(dtype: Any) -> int:
    """Return the bytes per entry of a data type, as a document of format 2 or 3 writes it."""
    if isinstance(dtype, list):  # of a table of format 2
        return sum(_itemsize(field[1]) for field in dtype)
    if isinstance(dtype, dict):
        return int(dtype.get("configuration", {}).get("length_bytes", POINTER))
    if dtype in ("string", "variable_length_utf8", "variable_length_bytes"):
        return POINTER
    return np.dtype(str(dtype).replace("numpy.", "")).itemsize
