"""Checkpoints: two alternating slots, and a marker that says which of them counts.

The slot that does not count is overwritten and flushed first; then the marker, one
small file, is replaced in an instant. Killed at any moment, the store still holds
the last checkpoint whole.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results.files import DurableStore, read_json, replace_json
from daskfactor.results.layout import CHUNK_BYTES
from daskfactor.results.skeleton import CHECKPOINT, NODE, STATE, plain, scratch_folder

Arrays = dict[str, NDArray[Any]]
_PAGE = 4096


class Counts(NamedTuple):
    """Draws that a checkpoint vouches for, per chain."""

    draws: tuple[int, ...]
    warmup_draws: tuple[int, ...]


def counts_of(marker: Mapping[str, Any], chains: int) -> Counts:
    """What the newest checkpoint of a marker vouches for; nothing, if there is none."""
    slots, newest = marker.get("slots"), marker.get("newest")
    if not slots or newest is None or slots[newest] is None:
        return Counts((0,) * chains, (0,) * chains)
    entry = slots[newest]
    return Counts(tuple(entry["draws"]), tuple(entry["warmup_draws"]))


class Slots:
    """The checkpoints of one run store.

    Parameters
    ----------
    root
        The run store.
    chains, warmup_draws
        Of the run, to read the counts in a checkpoint's meta.
    """

    def __init__(self, root: Path, chains: int, warmup_draws: int) -> None:
        self._root = root
        self._chains = chains
        self._warmup = warmup_draws
        self._document = _read_marker(root)
        self.newest: int | None = self._document["attributes"].get("newest")

    @property
    def layout(self) -> dict[str, Any]:
        return dict(self._document["attributes"]["layout"])

    @property
    def counts(self) -> Counts:
        """Draws that exist."""
        marker = self._document["attributes"] | {"newest": self.newest}
        return counts_of(marker, self._chains)

    def commit(
        self, store: DurableStore, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint and make it the one that counts.

        Raises
        ------
        OptionError
            If ``meta`` does not say how many draws there are, or an array is not of numbers.
        OSError
            If it cannot be written; the previous checkpoint still counts.
        """
        target = 0 if self.newest is None else 1 - self.newest
        flat = {name: _flat(name, array) for name, array in arrays.items()}
        entries, total = _table(flat)
        state = self._room(store, total)
        _fill(state, target, list(flat.values()), total)
        store.flush()
        text = json.dumps(plain(meta))
        entry = {
            "draws": per_chain("draws", meta.get("draws"), self._chains),
            "warmup_draws": per_chain(
                "warmup_draws", meta.get("warmup_draws", self._warmup), self._chains
            ),
            "meta": text,
            "meta_crc32": zlib.crc32(text.encode()),
            "arrays": entries,
        }
        attributes = self._document["attributes"]
        slots = list(attributes.get("slots") or [None, None])
        slots[target] = entry
        document = self._document | {"attributes": attributes | {"slots": slots, "newest": target}}
        replace_json(self._root / CHECKPOINT / NODE, document, scratch_folder(self._root))
        self._document, self.newest = document, target

    def load(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and meta of the newest checkpoint that is whole; it becomes the one that counts.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        if self.newest is None:
            raise StoreFormatError(
                f"{self._root} holds no checkpoint: the run was stopped before its first one; "
                "start it again with overwrite=True"
            )
        faults = []
        for slot in (self.newest, 1 - self.newest):
            entry = self._document["attributes"]["slots"][slot]
            if entry is not None:
                try:
                    found = self._read(slot, entry)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    faults.append(str(error))
                else:
                    self.newest = slot
                    return found
        raise StoreFormatError(
            f"no checkpoint of {self._root} is whole ({'; '.join(faults)}); "
            "its draws can still be read, but the run cannot be resumed"
        )

    def _read(self, slot: int, entry: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
        if zlib.crc32(entry["meta"].encode()) != entry["meta_crc32"]:
            raise ValueError("its description is damaged")
        state = zarr.open_array(str(self._root), path=f"{CHECKPOINT}/{STATE}", mode="r")
        arrays: Arrays = {}
        for row in entry["arrays"]:
            raw = np.ascontiguousarray(state[slot, row["offset"] : row["offset"] + row["nbytes"]])
            if len(raw) != row["nbytes"] or _crc32(raw) != row["crc32"]:
                raise ValueError(f"its array {row['name']!r} is damaged")
            arrays[row["name"]] = raw.view(row["dtype"]).reshape(row["shape"])
        return arrays, json.loads(entry["meta"])

    @property
    def _empty(self) -> bool:
        """Whether no checkpoint holds an array yet (the first one of a run has none)."""
        slots = self._document["attributes"].get("slots") or []
        return not any(entry and entry["arrays"] for entry in slots)

    def _room(self, store: DurableStore, total: int) -> Any:
        """The state array, made long enough."""
        name = f"{CHECKPOINT}/{STATE}"
        path = self._root / name / NODE
        node = read_json(path)
        chunk = node["chunk_grid"]["configuration"]["chunk_shape"]
        if self._empty:  # later, another chunk length would tear the slot that counts
            pieces = max(1, -(-total // CHUNK_BYTES))
            chunk[1] = max(1, -(-total // (pieces * _PAGE))) * _PAGE
        length = max(1, -(-total // chunk[1])) * chunk[1]
        if self._empty or length > node["shape"][1]:
            node["shape"][1] = length
            replace_json(path, node, scratch_folder(self._root))
        return zarr.open_array(store, path=name, mode="r+")


def _read_marker(root: Path) -> dict[str, Any]:
    try:
        document = dict(read_json(root / CHECKPOINT / NODE))
        _ = document["attributes"]["layout"]["shape"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreFormatError(
            f"{root} is a damaged run store: {CHECKPOINT}/{NODE} cannot be read ({error}); "
            "restore it from a copy"
        ) from error
    return document


def per_chain(name: str, value: Any, chains: int) -> list[int]:
    """A count for all chains, or one for each.

    Raises
    ------
    OptionError
        If it is neither.
    """
    counts = [value] * chains if np.ndim(value) == 0 else list(value)
    whole = all(isinstance(count, int | np.integer) and count >= 0 for count in counts)
    if len(counts) != chains or not whole:
        raise OptionError(
            f"meta[{name!r}] of a checkpoint must be a number of draws, or one per chain "
            f"({chains}), got {value!r}"
        )
    return [int(count) for count in counts]


def _crc32(raw: NDArray[np.uint8]) -> int:
    return zlib.crc32(raw.data)


def _flat(name: str, array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)
    if array.dtype.kind not in "biufc":
        raise OptionError(f"checkpoint array {name!r} must hold numbers, got dtype {array.dtype}")
    return np.ascontiguousarray(array).reshape(array.shape)


def _table(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[dict[str, Any]], int]:
    """Where each array lies among the bytes of a slot, and how many bytes there are."""
    entries, offset = [], 0
    for name, array in arrays.items():
        raw = array.reshape(-1).view(np.uint8)
        entries.append(
            {
                "name": name,
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "offset": offset,
                "nbytes": raw.nbytes,
                "crc32": _crc32(raw),
            }
        )
        offset += raw.nbytes
    return entries, offset


def _fill(state: Any, slot: int, arrays: list[NDArray[Any]], total: int) -> None:
    """Write arrays one after the other, a whole chunk at a time."""
    chunk = int(state.chunks[1])
    buffer = np.zeros(chunk, dtype=np.uint8)
    start = used = 0
    for array in arrays:
        raw = array.reshape(-1).view(np.uint8)
        at = 0
        while at < len(raw):
            step = min(chunk - used, len(raw) - at)
            buffer[used : used + step] = raw[at : at + step]
            at, used = at + step, used + step
            if used == chunk:
                state[slot, start : start + chunk] = buffer
                start, used = start + chunk, 0
    if used:
        state[slot, start : start + chunk] = buffer
