"""Zarr stores of a run: one to write to that can be flushed, one to read from that is checked.

zarr's own LocalStore writes a temporary file beside its target and renames it. It does not
flush to disk, and a temporary file beside a node's metadata would be taken for a broken member:
files are made elsewhere, and metadata of a store that has readers are replaced by `replace_json`.
"""

import asyncio
import contextlib
import io
import re
import uuid
from collections.abc import Callable, Collection
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
from daskfactor.results.files import (
    CHECKPOINT,
    NODE,
    damaged,
    flush_path,
    read_json,
    replace_file,
    scratch_folder,
    taking_place,
)
from daskfactor.urls import patiently

PIECE: Final = 2**23
"""Bytes of an archive in one object."""
_CHUNK: Final = re.compile(r"(?P<array>.+)/c(/\d+)*")


def check_chunk(where: object, key: str, chunk: Buffer) -> None:
    """Refuse a chunk that does not end in its CRC-32C."""
    raw = chunk.as_numpy_array().tobytes()
    if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
        raise damaged(where, f"{key} is not what was written")


class DurableStore(LocalStore):
    """A local zarr store that remembers what it wrote and can flush all of it to disk.

    Parameters
    ----------
    root
        The store.
    making
        Where files are made before they take their place. Once this folder is gone, nothing
        is written any more.
    """

    def __init__(self, root: Path, making: Path | None = None) -> None:
        super().__init__(root)
        self._making = making or scratch_folder(root)
        self._unflushed: set[Path] = set()
        # A store that is not open makes its folder when it is first used. Here the folder is that
        # of a run, and is not to be made anew where that has been removed.
        self._is_open = True

    def follow(self, root: Path) -> None:
        """Move to the folder that the store has now, with all arrays that are open."""
        self.root, self._making = root, scratch_folder(root)

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        """Replace an archive by what ``write`` writes into a file, atomically and durably."""
        replace_file(scratch_folder(self.root) / f"{name}.npz", write, self._making)

    def saved(self, name: str) -> IO[bytes]:
        """Open an archive to read it."""
        return (scratch_folder(self.root) / f"{name}.npz").open("rb")

    def with_read_only(self, read_only: bool = False) -> Self:
        """Give the store itself: it is only ever opened for writing."""
        return self

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        path = self.root / key
        with taking_place(path, self._making) as file:
            file.write(value.as_numpy_array())
        self._unflushed.add(path)

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Buffer | None:
        """Read one value, such as a chunk that is about to be rewritten in part.

        Raises
        ------
        StoreFormatError
            If it is a chunk that is damaged.
        """
        return self._whole(key, await super().get(key, prototype, byte_range), byte_range)

    def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Buffer | None:
        """Read one value, as `get`."""
        found = super().get_sync(key, prototype=prototype, byte_range=byte_range)
        return self._whole(key, found, byte_range)

    def _whole(self, key: str, found: Buffer | None, byte_range: Any) -> Buffer | None:
        if found is not None and byte_range is None and _CHUNK.fullmatch(key):
            check_chunk(self.root, key, found)
        return found

    def flush(self) -> None:
        """Force every file written since the last flush, and its name, to the disk."""
        folders: set[Path] = set()
        for path in self._unflushed:
            with contextlib.suppress(FileNotFoundError):
                flush_path(path)
                folders.update((path.parent, path.parent.parent))
        for folder in folders:
            flush_path(folder)
        self._unflushed.clear()


class CheckedStore(WrapperStore[Any]):
    """A zarr store to read from, in which a chunk is whole or a sentence about damage is raised.

    Parameters
    ----------
    store
        Where the chunks are.
    where
        The run store, for the message.
    checked
        Paths of the arrays whose chunks end in a CRC-32C and all exist, as far as they are read.
    run
        The ``trace_id`` of the run, which another may replace in its folder.
    """

    def __init__(
        self, store: Any, where: str = "", checked: Collection[str] = (), run: Any = None
    ) -> None:
        super().__init__(store)
        self.where = where
        self.checked = set(checked)
        self._run, self._seen = run, (0, 0)
        self.partial: set[str] = set()
        """Groups that may lack chunks: their values are being written for the first time."""
        self._token = uuid.uuid4().hex

    def _with_store(self, store: Any) -> Self:
        other = type(self)(store, self.where, self.checked, self._run)
        other.partial = self.partial
        return other

    def __dask_tokenize__(self) -> tuple[str, str]:
        # The same path may hold other draws the next time it is opened.
        return (self.where, self._token)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Read one value.

        Raises
        ------
        StoreFormatError
            If it is a chunk that is damaged or gone.
        StoreError
            If it is another run's.
        """
        found: Buffer | None = await self._store.get(key, prototype, byte_range)
        chunk = _CHUNK.fullmatch(key)
        if chunk is None or chunk["array"] not in self.checked or byte_range is not None:
            return found
        self._refuse_others()
        if found is None:
            if key.split("/", maxsplit=1)[0] in self.partial:
                return None
            raise damaged(self.where, f"{key} is missing")
        check_chunk(self.where, key, found)
        return found

    def _refuse_others(self) -> None:
        """Raise StoreError if another run has replaced this one; look when the root has changed."""
        if not isinstance(self._store, LocalStore):
            return
        root = self._store.root / NODE
        with contextlib.suppress(FileNotFoundError):
            stat = root.stat()
            if self._seen != (stat.st_ino, stat.st_mtime_ns):
                if read_json(root)["attributes"].get("trace_id") != self._run:
                    raise StoreError(
                        f"another run has taken the place of this one at {self.where}, so that its "
                        "draws are gone; open it again, or run anew"
                    )
                self._seen = stat.st_ino, stat.st_mtime_ns


class PatientStore(WrapperStore[Any]):
    """A zarr store in an object store, which is asked until it answers; see `urls.patiently`."""

    def __init__(self, store: Any, name: str = "") -> None:
        super().__init__(store)
        self.name = name

    @property
    def supports_consolidated_metadata(self) -> bool:
        """True: the root of a run has them, as any document of its own."""
        return True

    @property
    def session(self) -> Any:
        """The session of Icechunk that it writes to or reads from."""
        return self._store.session

    def follow(self, store: Any) -> None:
        """Go on with another session; arrays that are open do so, too."""
        self._store = store

    def _with_store(self, store: Any) -> Self:
        return type(self)(store, self.name)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        """Read one value."""

        async def get() -> Buffer | None:
            found: Buffer | None = await self._store.get(key, prototype, byte_range)
            # Icechunk gives none when it could not look for a document, too; `exists` fails then.
            if found is None and key.endswith(NODE) and await self._store.exists(key):
                found = await self._store.get(key, prototype, byte_range)
            return found

        return await patiently(get, self.name)

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value."""
        await self._ask(self._store.set, key, value)

    async def delete_dir(self, prefix: str) -> None:
        """Remove all that is below a prefix."""
        await self._ask(self._store.delete_dir, prefix)

    async def _ask(self, function: Any, *args: Any) -> Any:
        return await patiently(partial(function, *args), self.name)

    def flush(self) -> None:
        """Do nothing: what is in an object store stays there."""

    def save(self, name: str, write: Callable[[Any], object]) -> None:
        """Replace an archive, an array of bytes, by what ``write`` writes into a file."""

        def made(size: int) -> Any:
            return zarr.create_array(
                self,
                name=f"{CHECKPOINT}/{name}",
                shape=(0,),
                chunks=(min(size, PIECE),),  # a chunk is sent whole, however little is in it
                dtype="uint8",
                compressors=(Crc32cCodec(),),
                overwrite=True,
            )

        with ArrayFile(made=made) as file:
            write(file)

    def saved(self, name: str) -> IO[bytes]:
        """Open an archive to read it."""
        array = zarr.open_array(self, path=f"{CHECKPOINT}/{name}", mode="r+")
        return io.BufferedReader(ArrayFile(array), PIECE)


class ArrayFile(io.RawIOBase):
    """A file that is an array of bytes: written from its beginning to its end, or read anywhere."""

    def __init__(self, array: Any = None, made: Callable[[int], Any] | None = None) -> None:
        self._array, self._made, self._written = array, made, made is not None
        self._held, self._end = bytearray(), 0 if array is None else int(array.shape[0])
        self._at, self._number, self._piece = 0, -1, np.empty(0, np.uint8)

    def writable(self) -> bool:
        return self._written

    def write(self, data: Any) -> int:
        """Add bytes to the end; those of several pieces are sent at once."""
        self._held += data
        if len(self._held) >= 4 * PIECE:
            self._send(len(self._held) // PIECE * PIECE)
        return memoryview(data).nbytes

    def _send(self, size: int) -> None:
        if self._made is not None:
            self._array, self._made = self._made(size), None
        self._array.resize((self._end + size,))
        self._array[self._end : self._end + size] = np.frombuffer(self._held[:size], np.uint8)
        self._end += size
        del self._held[:size]

    def __exit__(self, kind: Any, *error: object) -> None:
        """Send what is still held, unless writing has failed."""
        if kind is None and self._held:
            self._send(len(self._held))
        self.close()

    def readable(self) -> bool:
        return not self._written

    def seekable(self) -> bool:
        return not self._written

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._written:
            raise io.UnsupportedOperation("it is written from its beginning to its end")
        self._at = offset + (0, self._at, self._end)[whence]
        return self._at

    def tell(self) -> int:
        if self._written:
            raise io.UnsupportedOperation("it is written from its beginning to its end")
        return self._at

    def readinto(self, out: Any) -> int:
        """Read up to the end of a piece, which is fetched once."""
        number, start = divmod(self._at, PIECE)
        if number != self._number:
            self._piece = np.asarray(self._array[number * PIECE : (number + 1) * PIECE])
            self._number = number
        found = self._piece[start : start + len(out)]
        out[: len(found)] = found.tobytes()
        self._at += len(found)
        return len(found)
