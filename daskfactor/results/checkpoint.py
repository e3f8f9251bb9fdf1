"""Checkpoints: two alternating files, and a marker that says which of them counts.

The file that does not count is replaced and flushed first; then the marker, one
small file, is replaced in an instant. Killed at any moment, the store still holds
the last checkpoint whole. Each file is a NumPy archive, with a CRC-32 of every array
and with its own description, so that either may take the other's place.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results.files import check_seal, read_json, replace_file, replace_json, seal

Arrays = dict[str, NDArray[Any]]

NODE: Final = "zarr.json"
CHECKPOINT: Final = "checkpoint"
STATE: Final = "state"
_META: Final = ".meta"
_DAMAGE: Final = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, NotImplementedError),
)
"""What NumPy and zipfile raise on archives whose bytes have changed."""


class Counts(NamedTuple):
    """Draws that a checkpoint vouches for, per chain."""

    draws: tuple[int, ...]
    warmup_draws: tuple[int, ...]


def scratch_folder(root: Path) -> Path:
    """Where checkpoints, lock and files in the making are: an array's folder, not listed."""
    return root / CHECKPOINT / STATE


def read_marker(root: str | PathLike[str]) -> dict[str, Any]:
    """Read the document of the group ``checkpoint``.

    Raises
    ------
    StoreFormatError
        If it is damaged or gone.
    """
    try:
        document = dict(read_json(f"{root}/{CHECKPOINT}/{NODE}"))
        check_seal(document, "attributes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreFormatError(
            f"{root} is a damaged run store: {CHECKPOINT}/{NODE} cannot be read ({error}); "
            "restore it from a copy"
        ) from error
    return document


def counts_of(marker: Mapping[str, Any], chains: int) -> Counts:
    """Draws that the newest checkpoint of a marker vouches for; none, if there is none."""
    slots, newest = marker["attributes"].get("slots"), marker["attributes"].get("newest")
    if not slots or newest is None or slots[newest] is None:
        return Counts((0,) * chains, (0,) * chains)
    return Counts(tuple(slots[newest]["draws"]), tuple(slots[newest]["warmup_draws"]))


class Checkpoints:
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
        self._document = read_marker(root)
        self._newest: int | None = self._document["attributes"].get("newest")
        self.counts = counts_of(self._document, chains)
        """Draws that exist."""

    def commit(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> bool:
        """Write a checkpoint and make it the one that counts; True if it is the first.

        Raises
        ------
        OptionError
            If ``meta`` does not say how many draws there are, or an array is not of numbers.
        OSError
            If it cannot be written; the previous checkpoint still counts.
        """
        counts = self.counts_in(meta)
        first = self._newest is None
        target = 1 - (1 if self._newest is None else self._newest)
        found = {name: _numbers(name, array) for name, array in arrays.items()}
        text = json.dumps({"names": list(found), "meta": plain(meta)}).encode()
        found[_META] = np.frombuffer(text, dtype=np.uint8)
        scratch = scratch_folder(self._root)
        save: Any = np.savez  # names of arrays may be those of its own arguments
        path = scratch / f"{target}.npz"
        replace_file(path, lambda file: save(file, **found), scratch, flush=True)
        attributes = self._document["attributes"]
        slots = list(attributes.get("slots") or [None, None])
        slots[target] = {name: list(number) for name, number in counts._asdict().items()}
        document = self._document | {"attributes": attributes | {"slots": slots, "newest": target}}
        document = seal(document, "attributes")
        replace_json(self._root / CHECKPOINT / NODE, document, scratch)
        self._document, self._newest, self.counts = document, target, counts
        return first

    def load(self) -> tuple[Arrays, dict[str, Any]]:
        """Read the newest checkpoint that is whole; from now on it is the one that counts.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        if self._newest is None:
            raise StoreFormatError(
                f"{self._root} holds no checkpoint: the run was stopped before its first one; "
                "start it again with overwrite=True"
            )
        faults = []
        for slot in (self._newest, 1 - self._newest):
            try:
                arrays, meta = _read(scratch_folder(self._root) / f"{slot}.npz")
                self.counts, self._newest = self.counts_in(meta), slot
            except _DAMAGE as error:
                faults.append(f"{slot}.npz: {error}")
            else:
                return arrays, meta
        raise StoreFormatError(
            f"no checkpoint of {self._root} is whole ({'; '.join(faults)}); "
            "its draws can still be read, but the run cannot be resumed"
        )

    def counts_in(self, meta: Mapping[str, Any]) -> Counts:
        """Counts that a checkpoint's meta says, of every chain.

        Raises
        ------
        OptionError
            If they are no numbers of draws.
        """
        warmup = meta.get("warmup_draws", self._warmup)
        return Counts(
            _per_chain("draws", meta.get("draws"), self._chains),
            _per_chain("warmup_draws", warmup, self._chains),
        )


def _read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    with path.open("rb") as file, np.load(file) as archive:
        told = json.loads(archive[_META].tobytes())
        return {name: archive[name] for name in told["names"]}, told["meta"]


def _per_chain(name: str, value: Any, chains: int) -> tuple[int, ...]:
    """A count for all chains, or one for each."""
    counts = [value] * chains if np.ndim(value) == 0 else list(value)
    whole = all(isinstance(count, int | np.integer) and count >= 0 for count in counts)
    if len(counts) != chains or not whole:
        raise OptionError(
            f"meta[{name!r}] of a checkpoint must be a number of draws, or one per chain "
            f"({chains}), got {value!r}"
        )
    return tuple(int(count) for count in counts)


def _numbers(name: str, array: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(array)
    if array.dtype.kind not in "biufc":
        raise OptionError(f"checkpoint array {name!r} must hold numbers, got dtype {array.dtype}")
    return array


def plain(value: Any) -> Any:
    """Turn NumPy numbers and arrays into Python's, so that JSON takes them."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist()) if np.ndim(value) else value.item()
    return value
