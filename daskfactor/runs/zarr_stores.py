"""Zarr stores of a run: a durable one for writing, a checked one for reading, one with retries.

zarr's own LocalStore writes a temporary file next to its target and renames it. It does not flush
to disk, and zarr would read a temporary file next to a node's metadata as a broken member. So files
are written elsewhere and renamed.
"""

import asyncio
import contextlib
import io
import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self

import google_crc32c
import numpy as np
import zarr
from zarr.codecs import Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, WrapperStore

from daskfactor.errors import StoreError
from daskfactor.runs.files import (
    CHECKPOINT,
    NODE,
    STATE,
    atomic_replace,
    damaged,
    flush_path,
    scratch_folder,
)
from daskfactor.runs.schema import MOMENTS, MONITOR
from daskfactor.urls import retry_async

PIECE: Final = 2**23
"""Bytes of an archive per object."""
_CHUNK: Final = re.compile(r"(?P<array>.+)/c(/\d+)*")


def check_chunk(where: object, key: str, chunk: Buffer) -> None:
    """Raise StoreFormatError for a chunk that does not end with its CRC-32C."""
    raw = chunk.as_numpy_array().tobytes()
    if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
        raise damaged(where, f"{key} is not what was written")


def layered_keys(key: str, layers: Sequence[str]) -> list[str]:
    """Return the keys under which a value may be, the one that counts first."""
    is_moments = key.split("/", maxsplit=1)[0] in (MOMENTS, MONITOR) and _CHUNK.fullmatch(key)
    file = key.replace("/", ".")
    return [*(f"{CHECKPOINT}/{STATE}/{layer}/{file}" for layer in layers if is_moments), key]


class DurableStore(LocalStore):
    """Local zarr store of a run that can flush all files it has written to disk.

    Parameters
    ----------
    root
        Folder of the store.
    staging
        Folder in which files are written before they are renamed. Without this folder all writes
        fail.
    layers
        Names of folders with chunks of moments that take precedence over those in their arrays,
        the newest first. Moments are written to the first of these folders.
    """

    def __init__(self, root: Path, staging: Path | None = None, layers: Sequence[str] = ()) -> None:
        super().__init__(root)
        self._staging, self.layers = staging or scratch_folder(root), layers
        self._unflushed: set[Path] = set()
        # zarr creates the folder of a store that is not open yet. The folder of a run must not be
        # created again after it was removed.
        self._is_open = True

    def follow(self, root: Path) -> None:
        """Follow a renamed folder, together with all open arrays."""
        self.root, self._staging = root, scratch_folder(root)

    def write_new(self, name: str, write: Callable[[Any], object]) -> None:
        """Write an archive, atomically; ``write`` receives the open file."""
        self._write(scratch_folder(self.root) / f"{name}.npz", write)

    def open_archive(self, name: str) -> IO[bytes]:
        """Open an archive for reading."""
        return (scratch_folder(self.root) / f"{name}.npz").open("rb")

    def with_read_only(self, read_only: bool = False) -> Self:
        """Return the store itself, which is opened only for writing."""
        return self

    async def set(self, key: str, value: Buffer) -> None:
        """Write a value, atomically."""
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write a value, atomically."""
        path = self.root / layered_keys(key, self.layers)[0]
        self._write(path, lambda file: file.write(value.as_numpy_array()))

    def _write(self, path: Path, write: Callable[[Any], object]) -> None:
        with atomic_replace(path, self._staging) as file:
            write(file)
        self._unflushed.add(path)

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Buffer | None:
        """Return a value, such as a chunk to be rewritten in part.

        Raises
        ------
        StoreFormatError
            If it is a damaged chunk.
        """
        return await asyncio.to_thread(
            self.get_sync, key, prototype=prototype, byte_range=byte_range
        )

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Buffer | None:
        """Return a value, as `get`."""
        value = None
        for place in layered_keys(key, self.layers):
            value = super().get_sync(place, prototype=prototype, byte_range=byte_range)
            if value is not None:
                break
        if value is not None and byte_range is None and _CHUNK.fullmatch(key):
            check_chunk(self.root, key, value)
        return value

    def settle(self) -> None:
        """Move the moments of older layers into their arrays; `flush` makes this durable."""
        for layer in self.layers[1:]:
            for file in scratch_folder(self.root).glob(f"{layer}/*"):
                target = self.root / file.name.replace(".", "/")
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
                self._unflushed.add(target)

    def flush(self) -> None:
        """Flush every file written since the last flush, and its folder entry, to disk."""
        folders: set[Path] = set()
        for path in self._unflushed:
            with contextlib.suppress(FileNotFoundError):
                flush_path(path)
                folders.update((path.parent, path.parent.parent))
        for folder in folders:
            flush_path(folder)
        self._unflushed.clear()


class CheckedStore(WrapperStore[Any]):
    """Zarr store for reading that raises an error for damaged or missing chunks.

    Parameters
    ----------
    store
        The store with the chunks.
    where
        Path of the run store, for messages.
    checked
        Paths of arrays whose chunks end with a CRC-32C and must exist.
    run
        The ``trace_id`` of the run, to detect that another run has replaced it.
    layers
        See `DurableStore`.
    """

    def __init__(
        self,
        store: Any,
        where: str = "",
        checked: Collection[str] = (),
        run: Any = None,
        layers: Sequence[str] = (),
    ) -> None:
        super().__init__(store)
        self.where, self.checked, self.layers = where, set(checked), layers
        self._run, self._seen = run, (0, 0)
        self.partial: set[str] = set()
        """Groups whose chunks may be missing, because they are being written for the first time."""
        self._token = uuid.uuid4().hex

    def _with_store(self, store: Any) -> Self:
        other = type(self)(store, self.where, self.checked, self._run, self.layers)
        other.partial = self.partial
        return other

    def __dask_tokenize__(self) -> tuple[str, str]:
        # Another store at the same path may hold other draws.
        return (self.where, self._token)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Return a value.

        Raises
        ------
        StoreFormatError
            If it is a damaged or missing chunk.
        StoreError
            If another run has replaced this one.
        """
        value: Buffer | None = None
        for place in layered_keys(key, self.layers):
            value = await self._store.get(place, prototype, byte_range)
            if value is not None:
                break
        chunk = _CHUNK.fullmatch(key)
        if chunk is None or chunk["array"] not in self.checked or byte_range is not None:
            return value
        self._refuse_replaced()
        if value is None:
            if key.split("/", maxsplit=1)[0] in self.partial:
                return None
            raise damaged(self.where, f"{key} is missing")
        check_chunk(self.where, key, value)
        return value

    def _refuse_replaced(self) -> None:
        """Raise StoreError if another run has replaced this one; check only a changed root."""
        if not isinstance(self._store, LocalStore):
            return
        root = self._store.root / NODE
        with contextlib.suppress(FileNotFoundError):
            stat = root.stat()
            if self._seen != (stat.st_ino, stat.st_mtime_ns):
                if json.loads(root.read_bytes())["attributes"].get("trace_id") != self._run:
                    raise StoreError(
                        f"another run has taken the place of this one at {self.where}, so that its "
                        "draws are gone; open it again, or run anew"
                    )
                self._seen = stat.st_ino, stat.st_mtime_ns


class PatientStore(WrapperStore[Any]):
    """Zarr store in an object store whose requests are retried; see `urls.retry_async`."""

    def __init__(self, store: Any, name: str = "") -> None:
        super().__init__(store)
        self.name = name

    @property
    def supports_consolidated_metadata(self) -> bool:
        """True: the root document of a run includes them."""
        return True

    @property
    def session(self) -> Any:
        """Icechunk session of the store."""
        return self._store.session

    def follow(self, store: Any) -> None:
        """Switch to the store of another session, together with all open arrays."""
        self._store = store

    def _with_store(self, store: Any) -> Self:
        return type(self)(store, self.name)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Return a value."""

        async def get() -> Buffer | None:
            value: Buffer | None = await self._store.get(key, prototype, byte_range)
            # Icechunk also returns None if a request has failed; `exists` raises then.
            if value is None and key.endswith(NODE) and await self._store.exists(key):
                value = await self._store.get(key, prototype, byte_range)
            return value

        return await retry_async(get, self.name)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a value."""
        await retry_async(partial(self._store.set, key, value), self.name)

    async def delete_dir(self, prefix: str) -> None:
        """Remove all keys with a prefix."""
        await retry_async(partial(self._store.delete_dir, prefix), self.name)

    def flush(self) -> None:
        """Do nothing: objects are durable once they are sent."""

    def write_new(self, name: str, write: Callable[[Any], object]) -> None:
        """Write an archive, stored as an array of bytes; ``write`` receives the open file."""

        def create(size: int) -> Any:
            return zarr.create_array(
                self,
                name=f"{CHECKPOINT}/{name}",
                shape=(0,),
                chunks=(min(size, PIECE),),  # a chunk is always sent in full
                dtype="uint8",
                compressors=(Crc32cCodec(),),
                overwrite=True,
            )

        with ArrayWriter(create) as file:
            write(file)

    def open_archive(self, name: str) -> IO[bytes]:
        """Open an archive for reading."""
        array = zarr.open_array(self, path=f"{CHECKPOINT}/{name}", mode="r+")
        return io.BufferedReader(ArrayReader(array), PIECE)


class ArrayWriter(io.RawIOBase):
    """File that is written from its beginning to its end, as an array of bytes.

    ``create`` returns the empty array; it receives the number of bytes of the first piece.
    """

    def __init__(self, create: Callable[[int], Any]) -> None:
        self._create, self._pending = create, bytearray()
        self._array: Any = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes, which are sent in several pieces at once."""
        self._pending += data
        if len(self._pending) >= 4 * PIECE:
            self._send(len(self._pending) // PIECE * PIECE)
        return memoryview(data).nbytes

    def _send(self, size: int) -> None:
        self._array = self._create(size) if self._array is None else self._array
        self._array.append(np.frombuffer(self._pending[:size], np.uint8))
        del self._pending[:size]

    def __exit__(self, kind: Any, *error: object) -> None:
        """Send the remaining bytes, unless writing has failed."""
        if kind is None and self._pending:
            self._send(len(self._pending))
        self.close()


class ArrayReader(io.RawIOBase):
    """Array of bytes as a file for reading."""

    def __init__(self, array: Any) -> None:
        self._array, self._position = array, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, int(self._array.shape[0]))[whence]
        return self._position

    def readinto(self, out: Any) -> int:
        """Read up to the end of a chunk, so that a buffer fetches each chunk once."""
        size = self._array.chunks[0]
        stop = min(self._position + len(out), (self._position // size + 1) * size)
        data = np.asarray(self._array[self._position : stop]).tobytes()
        out[: len(data)] = data
        self._position += len(data)
        return len(data)
