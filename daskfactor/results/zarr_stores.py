"""Zarr stores of a run: one to write to that can be flushed, one to read from that is checked.

zarr's own LocalStore writes a temporary file beside its target and renames it (since zarr
3.1.3, which is why no older one will do). It does not flush to disk, and a temporary file
beside a node's metadata would be taken for a broken member; so metadata of a store that has
readers are replaced by `replace_json`.
"""

import contextlib
import re
import uuid
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import google_crc32c
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, WrapperStore

from daskfactor.results.files import damaged, flush_path
from daskfactor.urls import patiently

_CHUNK: Final = re.compile(r"(?P<array>.+)/c(/\d+)*")


class DurableStore(LocalStore):
    """A local zarr store that remembers what it wrote and can flush all of it to disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._unflushed: set[Path] = set()

    def with_read_only(self, read_only: bool = False) -> Self:
        """Give the store itself: it is only ever opened for writing."""
        return self

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        await super().set(key, value)
        self._unflushed.add(self.root / key)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Write one value, atomically."""
        super().set_sync(key, value)
        self._unflushed.add(self.root / key)

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
    """

    def __init__(self, store: Any, where: str = "", checked: Collection[str] = ()) -> None:
        super().__init__(store)
        self.where = where
        self.checked = set(checked)
        self.partial: set[str] = set()
        """Groups that may lack chunks: their values are being written for the first time."""
        self._token = uuid.uuid4().hex

    def _with_store(self, store: Any) -> Self:
        other = type(self)(store, self.where, self.checked)
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
        """
        found: Buffer | None = await self._store.get(key, prototype, byte_range)
        chunk = _CHUNK.fullmatch(key)
        if chunk is None or chunk["array"] not in self.checked or byte_range is not None:
            return found
        if found is None:
            if key.split("/", maxsplit=1)[0] in self.partial:
                return None
            raise damaged(self.where, f"{key} is missing")
        raw = found.as_numpy_array().tobytes()
        if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
            raise damaged(self.where, f"{key} is not what was written")
        return found


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
        found: Buffer | None = await self._ask(self._store.get, key, prototype, byte_range)
        return found

    async def set(self, key: str, value: Buffer) -> None:
        """Write one value."""
        await self._ask(self._store.set, key, value)

    async def _ask(self, function: Any, *args: Any) -> Any:
        return await patiently(partial(function, *args), self.name)

    def flush(self) -> None:
        """Do nothing: what is in an object store stays there."""
