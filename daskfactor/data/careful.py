"""Zarr of anybody's making, opened so that reading it runs nothing and takes memory in bounds.

Which codec decodes a chunk, and how large it gets, is written in the store itself. So arrays
are read through `CarefulStore`: codecs are those of `CODECS` alone (one of numcodecs' own
unpickles), and before a chunk is decoded it is looked up what it would become. What fails on
the way is tried again, see `daskfactor.urls`.
"""

import bz2
import json
import math
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Self

import numpy as np
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from daskfactor.data.icechunks import repository_store
from daskfactor.errors import StoreFormatError
from daskfactor.machine import available_memory
from daskfactor.urls import (
    absolute,
    is_url,
    patiently,
    reached,
    reaching,
)

DOCUMENTS: Final = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
LARGEST_DOCUMENT: Final = 2**26
COPIES: Final = 4
"""A chunk that is being decoded exists compressed, decompressed and in what is read of it."""
SLACK: Final = 2**18
LONGEST_RATIO: Final = 1032
"""What deflate makes of one byte at most."""
ZSTD_BLOCK: Final = 2**17

CHECKSUMS: Final = frozenset(["adler32", "crc32", "crc32c", "fletcher32"])
TEXTS: Final = frozenset(["vlen-bytes", "vlen-utf8"])
TYPES_OF_TEXT: Final = "string", "variable_length_utf8", "variable_length_bytes"
NUMBERS: Final = frozenset(["astype", "bitround", "delta", "fixedscaleoffset", "quantize"])
BYTES: Final = frozenset(["bytes", "packbits", "shuffle", "transpose"])
COMPRESSORS: Final = frozenset(["blosc", "bz2", "gzip", "lz4", "zlib", "zstd"])
CODECS: Final = CHECKSUMS | TEXTS | NUMBERS | BYTES | COMPRESSORS | {"sharding_indexed"}
HEADERS: Final = {"blosc": slice(4, 8), "lz4": slice(0, 4)}
"""Where a chunk says how long it gets."""


class Chunk(NamedTuple):
    """What the chunks of an array are.

    ``nbytes`` are theirs once decoded, None of texts, which may have any length; ``codecs`` are
    in the order in which they were applied; ``inner`` are the chunks in a shard, whose index is
    at its ``where``.
    """

    nbytes: int | None
    entries: int
    codecs: tuple[str, ...]
    inner: "Chunk | None" = None
    where: str = "end"


def zarr_store(location: str) -> "CarefulStore":
    """What is at a path or URL, as a store that zarr, xarray and anndata read: zarr or Icechunk."""
    store = plain_store(location)
    with reaching(store.location):
        if not any(sync(store.exists(name)) for name in DOCUMENTS[:3]):
            found = repository_store(store.location)
            if found is not None:
                return CarefulStore(found[0], found[2], found[1])
    return store


def plain_store(location: str) -> "CarefulStore":
    """The same of zarr alone."""
    location = absolute(location)
    with reaching(location):
        url, options = reached(location)
        if is_url(location):
            plain: Any = FsspecStore.from_url(url, options, read_only=True)
        else:
            plain = LocalStore(location, read_only=True)
    return CarefulStore(plain, location)


def open_zarr(location: str) -> Any:
    """The array or group at a path or URL, for reading."""
    import zarr

    store = zarr_store(location)
    return zarr.open(store=store, path=store.inside, mode="r")


class CarefulStore(WrapperStore[Any]):
    """A zarr store to read from that gives out nothing whose decoding would do harm.

    Parameters
    ----------
    store
        Where the chunks are.
    location
        The same for messages, and to know whether a network is between.
    inside
        Where in the store it is.
    """

    def __init__(self, store: Any, location: str = "", inside: str = "") -> None:
        super().__init__(store)
        self.location, self.inside = location, inside
        self._arrays: dict[str, Any] = {}
        self._chunks: dict[str, Chunk] = {}

    def _with_store(self, store: Any) -> Self:
        other = type(self)(store, self.location, self.inside)
        other._arrays, other._chunks = self._arrays, self._chunks
        return other

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Read one value.

        Raises
        ------
        StoreFormatError
            If decoding it may run code, or take more memory than there is.
        StoreError
            If it is out of reach for too long.
        """
        folder, _, name = key.rpartition("/")
        document = name in DOCUMENTS
        chunk = None if document else self._chunk_of(key)
        most = LARGEST_DOCUMENT if document else self._most(key, chunk, byte_range)
        whole = byte_range is None and isinstance(self._store, FsspecStore)
        bounded = RangeByteRequest(0, most + 1) if whole else byte_range
        found: Buffer | None = await self._ask(self._store.get, key, prototype, bounded)
        if found is None:
            return None
        if byte_range is None and len(found) > most:
            raise self._refused(key, f"has more than {most} bytes")
        if document:
            self._note(folder, found.to_bytes())
        elif chunk is not None:
            self._check(key, chunk, found, byte_range)
        return found

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Buffer | None]:
        """Read parts of values, each like one."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(await self._ask(self._store.exists, key))

    async def _ask(self, function: Any, *args: Any) -> Any:
        if not is_url(self.location):
            return await function(*args)
        return await patiently(partial(function, *args), self.location)

    @property
    def _supports_sync_io(self) -> bool:
        return False  # all is read by `get`, which checks it

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[Any], *, prototype: Any, **_: Any
    ) -> AsyncIterator[Sequence[tuple[int, Any]]]:
        """Read parts one by one: of several that are read at once none could be checked."""
        for number, part in enumerate(byte_ranges):
            yield [(number, await self.get(key, prototype, part))]

    def _note(self, folder: str, raw: bytes) -> None:
        """Remember what a document says of arrays."""
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            return  # zarr says it better
        for path, document in _documents(folder, found):
            self._arrays[path] = document
            self._chunks.pop(path, None)

    def _chunk_of(self, key: str) -> Chunk | None:
        """What is known of the array to which a chunk belongs."""
        path = key
        while path not in self._arrays:
            if not path:
                return None
            path = path.rpartition("/")[0]
        if path not in self._chunks:
            try:
                self._chunks[path] = _described(self._arrays[path])
            except StoreFormatError as error:
                raise self._refused(path, str(error)) from None
            except Exception as error:
                raise self._refused(path, "has metadata that cannot be understood") from error
            needed = COPIES * (self._chunks[path].nbytes or 8 * self._chunks[path].entries)
            if needed > available_memory():
                raise self._refused(
                    path,
                    f"has chunks that take {needed} bytes to decode, more than is free",
                    "rewrite it with smaller chunks, or use a larger machine",
                )
        return self._chunks[path]

    def _most(self, key: str, chunk: Chunk | None, part: Any) -> int:
        """Most bytes that a value may have; of an array, those of a chunk and some more."""
        nbytes = None if chunk is None else chunk.nbytes
        most = available_memory() // COPIES if nbytes is None else nbytes + nbytes // 8 + SLACK
        if chunk is not None and chunk.inner is not None:
            most += 16 * chunk.entries
        wanted = 0
        if isinstance(part, RangeByteRequest):
            wanted = part.end - part.start
        elif isinstance(part, SuffixByteRequest):
            wanted = part.suffix
        if wanted > most:
            raise self._refused(key, f"has a part of {wanted} bytes, more than a chunk has")
        return most

    def _check(self, key: str, chunk: Chunk, found: Buffer, part: Any) -> None:
        """Refuse a chunk that would become larger than chunks of its array are."""
        raw = memoryview(found.to_bytes()).cast("B")
        if chunk.inner is None:
            parts = [raw]
        elif part is None:
            parts = list(_parts_of_shard(raw, chunk))
        else:
            index = 16 * (chunk.entries // max(1, chunk.inner.entries))
            parts = [] if len(raw) in (index, index + 4) else [raw]
        for one in parts:
            if not _fits(one, chunk.inner or chunk):
                raise self._refused(key, "would get larger than its array says that chunks are")

    def _refused(self, key: str, why: str, remedy: str = "do not trust it") -> StoreFormatError:
        return StoreFormatError(f"{key or 'the array'} of {self.location} {why}; {remedy}")


def _documents(folder: str, found: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and documents of all arrays in a document, which may hold those of a whole tree."""
    if not isinstance(found, dict):
        return
    if "shape" in found:
        yield folder, found
    inside = found.get("metadata", found.get("consolidated_metadata"))
    inside = inside.get("metadata", inside) if isinstance(inside, dict) else {}
    for name, one in inside.items():
        if isinstance(one, dict) and "shape" in one:
            path = name.removesuffix("/.zarray")
            yield f"{folder}/{path}".strip("/"), one


def _described(document: dict[str, Any]) -> Chunk:
    """The chunks of an array, by its document of zarr format 2 or 3."""
    if document.get("zarr_format") == 2:
        applied = [*(document.get("filters") or []), document.get("compressor")]
        names = [str(one["id"]) for one in applied if one]
        return _chunk(names, document["chunks"], document["dtype"])
    sides = document["chunk_grid"]["configuration"]["chunk_shape"]
    return _sharded(document["codecs"], sides, document["data_type"])


def _sharded(codecs: list[dict[str, Any]], sides: list[int], dtype: Any) -> Chunk:
    names = [_name_of(one) for one in codecs]
    found = _chunk(names, sides, dtype)
    if "sharding_indexed" not in names:
        return found
    shard = codecs[names.index("sharding_indexed")]["configuration"]
    if {_name_of(one) for one in shard["index_codecs"]} - {"bytes", "crc32c"} or len(names) > 1:
        raise StoreFormatError("has shards of a kind that is not read")
    inner = _sharded(shard["codecs"], shard["chunk_shape"], dtype)
    if inner.inner is not None:
        raise StoreFormatError("has shards in shards")
    return found._replace(inner=inner, where=shard.get("index_location", "end"))


def _name_of(codec: Any) -> str:
    name = codec if isinstance(codec, str) else codec["name"]
    return str(name).removeprefix("numcodecs.")


def _chunk(names: list[str], sides: list[int], dtype: Any) -> Chunk:
    entries = math.prod(int(side) for side in sides)
    strange = [name for name in names if name not in CODECS]
    if strange:
        raise StoreFormatError(
            f"is encoded with {strange[0]!r}, which is not read here, because what it does to a "
            "chunk of unknown origin is not known"
        )
    if len(COMPRESSORS & set(names)) > 1 or len(names) > len(set(names)):
        raise StoreFormatError("is compressed more than once")
    if any(int(side) < 0 for side in sides):
        raise StoreFormatError("has chunks of negative length")
    texts = TEXTS & set(names) or dtype in TYPES_OF_TEXT  # shards have no codec of their own
    nbytes = None if texts else entries * _itemsize(dtype)
    return Chunk(nbytes, entries, tuple(names))


def _itemsize(dtype: Any) -> int:
    """Bytes of an entry; of types whose entries are Python's objects there are none."""
    if isinstance(dtype, dict):
        length = dtype.get("configuration", {}).get("length_bytes")
        return int(length) if length is not None else 8  # dates and differences of dates
    found = np.dtype(str(dtype).replace("numpy.", ""))
    if found.hasobject:
        raise StoreFormatError("has entries that are objects, which are not read")
    return found.itemsize


def _parts_of_shard(raw: memoryview, chunk: Chunk) -> Iterator[memoryview]:
    """The chunks in a whole shard, by its index."""
    assert chunk.inner is not None
    count = chunk.entries // max(1, chunk.inner.entries)
    if len(raw) < 16 * count:
        return
    starts = {len(raw) - 16 * count - 4, len(raw) - 16 * count}
    for start in starts if chunk.where == "end" else {0}:
        if start >= 0:
            index = np.frombuffer(raw, "<u8", 2 * count, start).reshape(count, 2).tolist()
            yield from (raw[at : at + size] for at, size in index if at + size <= len(raw))


def _fits(raw: memoryview, chunk: Chunk) -> bool:
    """Whether an encoded chunk gets no larger than it should, as far as its compressor tells."""
    names = list(chunk.codecs)
    while names and names[-1] not in COMPRESSORS:
        checked = names.pop() in CHECKSUMS
        if checked and "bytes" in chunk.codecs:  # of format 3, where a checksum comes last
            raw = raw[:-4]
    filtered = any(name not in ("bytes", "crc32c", "transpose") for name in names[:-1])
    texts = chunk.nbytes is None
    limit = available_memory() // COPIES if chunk.nbytes is None else chunk.nbytes
    limit = limit * (8 if filtered and not texts else 1) + SLACK
    if names and decoded_bytes(names[-1], raw, limit) > limit:
        return False
    return not texts or _few_texts(names[-1:], raw, chunk.entries)


def _few_texts(compressor: list[str], raw: memoryview, entries: int) -> bool:
    """Whether a chunk of texts, whose size is known to be in bounds, holds no more than said."""
    from numcodecs import get_codec

    plain = bytes(raw)
    for name in compressor:
        plain = bytes(get_codec({"id": name}).decode(plain))
    return int.from_bytes(plain[:4], "little") <= entries


def decoded_bytes(compressor: str, raw: memoryview, limit: int) -> int:
    """What decompressing will write at most; of streams, which do not say it, ``limit`` or more."""
    if compressor in HEADERS:
        return int.from_bytes(raw[HEADERS[compressor]], "little")
    if compressor == "zstd":
        return _zstd_bytes(raw)
    if compressor != "bz2" and len(raw) * LONGEST_RATIO <= limit:
        return 0
    total, data = 0, bytes(raw)
    while data and total <= limit:
        stream: Any = bz2.BZ2Decompressor() if compressor == "bz2" else zlib.decompressobj(47)
        while not stream.eof and total <= limit:
            try:
                found = stream.decompress(data, 2**20)
            except (OSError, ValueError, zlib.error):
                return total  # whoever decodes it says so
            total += len(found)
            data = b"" if compressor == "bz2" else stream.unconsumed_tail
            if not found and not data:
                break
        data = stream.unused_data
    return total


def _zstd_bytes(raw: memoryview) -> int:
    """What the header of a Zstandard frame announces, or at most comes of its blocks (RFC 8878)."""
    if len(raw) < 6 or bytes(raw[:4]) != b"\x28\xb5\x2f\xfd":
        return 0
    flag = raw[4]
    single = flag >> 5 & 1
    at = 5 + (not single) + (0, 1, 2, 4)[flag & 3]
    size = (single, 2, 4, 8)[flag >> 6]
    if size:
        return int.from_bytes(raw[at : at + size], "little") + (256 if size == 2 else 0)
    total = 0
    while at + 3 <= len(raw):
        head = int.from_bytes(raw[at : at + 3], "little")
        kind, length = head >> 1 & 3, head >> 3
        total += ZSTD_BLOCK if kind == 2 else length
        at += 3 + (1 if kind == 1 else length)
        if head & 1:
            break
    return total
