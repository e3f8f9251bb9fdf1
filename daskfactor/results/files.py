"""Files of a run store: replaced atomically, flushed to disk, checked when read, one writer.

Checkpoints are two alternating archives, and a marker that says which of them counts. The one
that does not count is replaced and flushed first; then the marker, one small file, is
replaced in an instant. Killed at any moment, the store still holds the last checkpoint whole.
Each is a NumPy archive, with a CRC-32 of every array and with its own description, so
that either may take the other's place. Arrays that a run needs all along and never changes are
in a third one.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.publish import Lock

if TYPE_CHECKING:
    from daskfactor.results.places import Place, View
    from daskfactor.results.writer import Writer

Arrays = dict[str, NDArray[Any]]
Late = dict[str, NDArray[Any] | Callable[[], NDArray[Any]]]
"""Arrays by name, or what makes them: then only one exists at a time."""

NODE: Final = "zarr.json"
CHECKPOINT: Final = "checkpoint"
MARKER: Final = f"{CHECKPOINT}/{NODE}"
STATE: Final = "state"
PARTIAL: Final = ".partial"
DEAREST: Final = 0.03
"""Share of a run that checkpoints may take where each takes a while."""
CHEAP: Final = 0.1
"""Seconds of a checkpoint that may come as often as there is something to save."""
_DISK_FULL: Final = frozenset({ENOSPC, EDQUOT})
SEAL: Final = "crc32"
"""Key under which a document keeps the checksum of all else that it says."""


def replace_file(path: Path, write: Callable[[Any], object], scratch: Path) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    File and name are forced to the disk, so that a power cut keeps the promise.

    Parameters
    ----------
    path
        The target; its folder is made if need be.
    write
        Called with the open file.
    scratch
        Folder on the same file system for the file in the making.

    Raises
    ------
    OSError
        If the disk is full or the folder cannot be written; the target is untouched.
    """
    with taking_place(path, scratch) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    flush_path(path.parent)


@contextlib.contextmanager
def taking_place(path: Path, scratch: Path) -> Iterator[Any]:
    """Give a file in a folder that takes its place at ``path`` at the end of the block."""
    making = scratch / f"{uuid.uuid4().hex}{PARTIAL}"
    try:
        with making.open("wb") as file:
            yield file
        path.parent.mkdir(parents=True, exist_ok=True)
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise


def remove_scratch(leftover: Path) -> None:
    """Remove a file in the making, or a folder of them: none takes its place from now on.

    The folder is renamed first: whoever makes another file in it meanwhile cannot find that again.
    """
    if leftover.is_dir():
        leftover = leftover.rename(leftover.with_name(f"{uuid.uuid4().hex}{PARTIAL}"))
        shutil.rmtree(leftover, ignore_errors=True)
    else:
        leftover.unlink(missing_ok=True)


def replace_json(path: Path, document: Any, scratch: Path) -> None:
    """Replace a JSON file atomically and force it to the disk."""
    text = json.dumps(document).encode()
    replace_file(path, lambda file: file.write(text), scratch)


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError if it is none, OSError if it is not there."""
    return json.loads(path.read_bytes())


def seal(document: dict[str, Any], part: str) -> dict[str, Any]:
    """Put a checksum of the whole document into one of its parts."""
    bare = {name: entry for name, entry in document[part].items() if name != SEAL}
    text = json.dumps(document | {part: bare}, sort_keys=True)
    return document | {part: bare | {SEAL: zlib.crc32(text.encode())}}


def check_seal(document: dict[str, Any], part: str) -> None:
    """Compare a document with its checksum, if it has one: others may have rewritten it.

    Raises
    ------
    ValueError
        If they do not agree.
    """
    found = document[part].get(SEAL)
    if found is not None and found != seal(document, part)[part][SEAL]:
        raise ValueError("its checksum does not agree")


def damaged(where: object, why: str) -> StoreFormatError:
    """The one sentence about a run store that is not as it was written."""
    return StoreFormatError(f"{where} is a damaged run store: {why}; restore it from a copy")


def flush_path(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and orders renames itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writer_lock(run: Path) -> Lock:
    """Take the exclusive right to write a run store, given up when the process ends in any way.

    Raises
    ------
    StoreError
        If another writer, here or in another process, holds it, or if the store is damaged or
        write-protected.
    """
    try:
        return Lock(scratch_folder(run), run)
    except FileNotFoundError as error:
        raise damaged(run, "its checkpoint folder is gone") from error
    except StoreError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise StoreError(
            f"{run} cannot be written: {why}; mend this, or open it to read"
        ) from error


@contextlib.contextmanager
def disk_errors(what: str, path: Path, safe: str, again: str = "resume the run") -> Iterator[None]:
    """Turn an OSError of a write into one sentence that says what is safe.

    Parameters
    ----------
    what
        What was being written.
    path
        The store.
    safe
        What survives, as a sentence.
    again
        What to do once the disk is mended.

    Raises
    ------
    StoreError
        In place of the OSError, with its errno.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        full = error.errno in _DISK_FULL
        cause = "the disk is full" if full else f"the system says: {error.strerror or error}"
        remedy = f"{'free some space' if full else 'mend this'} and {again}"
        failure = StoreError(f"could not write {what} to {path}, {cause}; {safe}; {remedy}")
        failure.errno = error.errno
        raise failure from error


_META: Final = ".meta"
_LASTING: Final = "lasting"
DAMAGE: Final = (
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


def read_marker(view: "View") -> dict[str, Any]:
    """Read the document of the group ``checkpoint``.

    Raises
    ------
    StoreFormatError
        If it is damaged or gone.
    """
    try:
        document = dict(view.document(MARKER))
        check_seal(document, "attributes")
        _check_slots(**document["attributes"])
    except StoreError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(view.name, f"{MARKER} cannot be read ({error})") from error
    return document


def _check_slots(slots: Any = None, newest: Any = None, **others: object) -> None:
    """Raise ValueError, or TypeError, where a marker's checkpoints are impossible."""
    del others
    if newest not in (None, 0, 1) or (newest is not None and slots[newest] is None):
        raise ValueError(f"its newest checkpoint is {newest!r}")
    for slot in filter(None, slots or ()):
        numbers = [*slot["draws"], *slot["warmup_draws"]]
        if not all(isinstance(own, int) and own >= 0 for own in numbers):
            raise ValueError(f"a checkpoint has draws {numbers!r}")


def counts_of(marker: Mapping[str, Any], chains: int) -> Counts:
    """Draws that the newest checkpoint of a marker vouches for; none, if there is none."""
    slots, newest = marker["attributes"].get("slots"), marker["attributes"].get("newest")
    if not slots or newest is None or slots[newest] is None:
        return Counts((0,) * chains, (0,) * chains)
    return Counts(tuple(slots[newest]["draws"]), tuple(slots[newest]["warmup_draws"]))


def archive(arrays: Mapping[str, Any], told: Mapping[str, Any]) -> Callable[[Any], None]:
    """Return what writes arrays and JSON values into a file: an archive of NumPy's.

    Arrays may be functions (see `Late`), each of which is called when its turn comes.

    Raises
    ------
    OptionError
        If a value is none of JSON's; when it is written, if an array is not of numbers.
    """
    text = json.dumps({"names": list(arrays), **plain(told)}).encode()
    every = {**arrays, _META: np.frombuffer(text, dtype=np.uint8)}

    def save(file: Any) -> None:
        """As `numpy.savez`, which wants all arrays at once."""
        with zipfile.ZipFile(file, "w") as made:
            for own, given in every.items():
                array = np.asarray(given() if callable(given) else given)
                if array.dtype.kind not in "biufc":
                    raise OptionError(
                        f"checkpoint array {own!r} must hold numbers, got dtype {array.dtype}"
                    )
                with made.open(f"{own}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return save


class Archives(Mapping[str, NDArray[Any]]):
    """Arrays of archives by name, each read when it is asked for, in other processes, too.

    Parameters
    ----------
    place
        Where the archives are; in another process, what its ``fork`` gave.
    of
        The archive of every array.
    """

    def __init__(self, place: Any, of: Mapping[str, str] | None = None) -> None:
        self._place, self._of = place, dict(of or {})
        self._files: dict[str, tuple[Any, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Archives, (self._place.fork(), self._of)

    @property
    def shared(self) -> Path | bool:
        """As `Place.shared`."""
        found: Path | bool = self._place.shared
        return found

    def add(self, name: str) -> dict[str, Any]:
        """Add an archive's arrays, all of them checked to be whole; return what else it says."""
        found = self._opened(name)
        if (broken := found.zip.testzip()) is not None:
            raise ValueError(f"{broken} is not what was written")
        told: dict[str, Any] = json.loads(found[_META].tobytes())
        self._of |= dict.fromkeys(told["names"], name)
        return told

    def _opened(self, name: str) -> Any:
        if name not in self._files:
            file = self._place.saved(name)
            try:
                self._files[name] = np.load(file), file
            except BaseException:
                file.close()
                raise
        return self._files[name][0]

    def __getitem__(self, name: str) -> NDArray[Any]:
        array: NDArray[Any] = self._opened(self._of[name])[name]
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def close(self) -> None:
        """Close all files; nothing can be read any more."""
        self._of.clear()
        while self._files:
            self._files.popitem()[1][1].close()

    def __del__(self) -> None:
        self.close()


class Checkpoints:
    """The checkpoints of one run store.

    A checkpoint is an archive, and those of its ``parts``, which others may have written.

    Parameters
    ----------
    place
        Where the run is.
    chains, warmup_draws
        Of the run, to read the counts in a checkpoint's meta.
    """

    def __init__(self, place: "Place", chains: int, warmup_draws: int) -> None:
        self._place = place
        self._chains = chains
        self._warmup = warmup_draws
        self._begin()
        self._arrays = Archives(place)
        self._saved, self._asked, self._costs = time.monotonic(), math.inf, (0.0, 0.0)
        self._document = read_marker(place)
        self._newest: int | None = self._document["attributes"].get("newest")
        self.counts = counts_of(self._document, chains)
        """Draws that exist."""

    def commit(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
        """Write a checkpoint and make it the one that counts; True if it is the first.

        Arrays may be functions (see `Late`). What writers have brought that were taken is in it.

        Raises
        ------
        OptionError
            If ``meta`` does not say how many draws there are, or an array is not of numbers.
        OSError
            If it cannot be written; the previous checkpoint still counts.
        """
        counts = self.counts_in(meta)
        first, target = self._newest is None, 1 - (1 if self._newest is None else self._newest)
        parts = sorted(name for part in self._parts for name in part.saved)
        self._place.merge([part.store for part in self._parts])
        self._place.flush()
        self._arrays.close()
        told = {"meta": meta, "stamp": self._stamp, "parts": parts}
        self._place.save(f"{target}", archive(arrays, told))
        slots = list(self._document["attributes"].get("slots") or [None, None])
        slots[target] = {name: list(number) for name, number in counts._asdict().items()}
        slots[target]["parts"] = parts
        self._mark(slots=slots, newest=target)
        self._newest, self.counts = target, counts
        self._place.tidy({name for slot in slots if slot for name in slot.get("parts", ())})
        self._begin()
        self._saved = time.monotonic()
        self._costs = self._costs[1], max(0.0, self._saved - self._asked)
        return first

    def _begin(self) -> None:
        """Have writers write for a checkpoint of which nothing is there yet."""
        self._stamp, self._parts = uuid.uuid4().hex, list["Writer"]()

    @property
    def shared(self) -> Path | bool:
        """As `Place.shared`."""
        return self._place.shared

    def writer(self) -> "Writer":
        """Give a writer for other processes, which comes back to `take`.

        Raises
        ------
        StoreError
            If the place is in the memory of this process.
        """
        from daskfactor.results.writer import Writer

        return Writer(self._place.fork(), self._place.name, self._stamp)

    def take(self, parts: "Sequence[Writer]") -> None:
        """Have the next checkpoint tell of what writers have written that came back."""
        self._parts += parts

    def is_due(self) -> bool:
        """Whether it is time for one, by the time that passed and what the last two took."""
        self._asked, every = time.monotonic(), self._place.every
        cost = min(self._costs)  # one may be dear by accident, as the first one often is
        if not every and cost < CHEAP:
            return True
        return self._asked - self._saved >= max(every, cost / DEAREST)

    def keep(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write arrays that `load` adds to every checkpoint's.

        Raises
        ------
        OptionError
            If an array is not of numbers.
        OSError
            If they cannot be written.
        """
        if arrays:
            self._place.save(_LASTING, archive(arrays, {}))
            self._mark(**{_LASTING: True})

    def _mark(self, **attributes: Any) -> None:
        """Change what the marker says, in an instant."""
        document = self._document | {"attributes": self._document["attributes"] | attributes}
        self._document = seal(document, "attributes")
        self._place.replace(MARKER, self._document)

    def load(self) -> tuple[Mapping[str, NDArray[Any]], dict[str, Any]]:
        """Open the newest checkpoint that is whole; from now on it is the one that counts.

        Its arrays are read as they are asked for, until the next one is opened or `close` called.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        self._place.recall()  # a worker that was lost may still be writing
        self._begin()  # what was brought for the one that failed is of another cycle
        if self._newest is None:
            raise StoreFormatError(
                f"{self._place.name} holds no checkpoint: the run was stopped before its first "
                "one; start it again with overwrite=True"
            )
        faults, marked = [], self._document["attributes"].get(_LASTING)
        for slot in (self._newest, 1 - self._newest):
            try:
                meta = self._open(f"{slot}")
                self.counts, self._newest = self.counts_in(meta), slot
            except StoreError:
                raise
            except DAMAGE as error:
                faults.append(f"{slot}.npz: {error}")
            else:
                break
        else:
            raise StoreFormatError(
                f"no checkpoint of {self._place.name} is whole ({'; '.join(faults)}); "
                "its draws can still be read, but the run cannot be resumed"
            )
        try:
            if marked:
                self._arrays.add(_LASTING)
        except StoreError:
            raise
        except DAMAGE as error:
            raise damaged(self._place.name, f"{_LASTING}.npz cannot be read ({error})") from error
        return self._arrays, meta

    def _open(self, name: str) -> dict[str, Any]:
        """Open a checkpoint, all of its parts; return its meta."""
        self._arrays.close()
        self._arrays = Archives(self._place)
        told = self._arrays.add(name)
        for part in told.get("parts", ()):
            if self._arrays.add(part)["stamp"] != told["stamp"]:
                raise ValueError(f"{part}.npz is of another checkpoint")
        meta: dict[str, Any] = told["meta"]
        return meta

    def close(self) -> None:
        """Close the checkpoint that was opened."""
        self._arrays.close()

    def counts_in(self, meta: Mapping[str, Any]) -> Counts:
        """Counts that a checkpoint's meta says, of every chain.

        Raises
        ------
        OptionError
            If they are no numbers of draws.
        """
        told = {"draws": meta.get("draws"), "warmup_draws": meta.get("warmup_draws", self._warmup)}
        found = []
        for name, value in told.items():
            counts = np.asarray(value)
            of_chains = counts.shape in ((), (self._chains,))
            if not of_chains or counts.dtype.kind not in "iu" or counts.min() < 0:
                raise OptionError(
                    f"meta[{name!r}] of a checkpoint must be a number of draws, or one per chain "
                    f"({self._chains}), got {value!r}"
                )
            found.append(tuple(np.broadcast_to(counts, self._chains).tolist()))
        return Counts(*found)


def plain(value: Any) -> Any:
    """Turn NumPy numbers and arrays into Python's, tuples into lists, keys into text, as in JSON.

    Raises
    ------
    OptionError
        If it holds anything that JSON does not have.
    """

    def known(other: Any) -> Any:
        if isinstance(other, Mapping):
            return dict(other)
        if isinstance(other, np.ndarray | np.generic):
            return other.tolist()
        raise TypeError(f"it holds a {type(other).__name__}")

    try:
        return json.loads(json.dumps(value, default=known))
    except (TypeError, ValueError) as error:
        raise OptionError(
            "what is written down about a run must be text, numbers, flags or None, lists of these "
            f"or dicts of them by text; got {str(value)[:200]}: {error}"
        ) from error
