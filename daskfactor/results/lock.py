"""What is at the path of a run, and who may write there."""

from pathlib import Path

from daskfactor.errors import StoreError, StoreFormatError
from daskfactor.results.files import WriterLock
from daskfactor.results.skeleton import read_root, scratch_folder
from daskfactor.results.slots import Slots


def local_path(path: str | Path) -> Path:
    """An absolute local path.

    Raises
    ------
    StoreError
        If it is a URL.
    """
    if "://" in str(path):
        raise StoreError(
            f"a run is written to a local path, got the URL {path}; "
            "write it locally and copy it there when it is done"
        )
    return Path(path).expanduser().absolute()


def lock_of(path: Path) -> WriterLock:
    """The right to write the run store at ``path``, acquired.

    Raises
    ------
    StoreError
        If another writer has it, or if the store is damaged or write-protected.
    """
    lock = WriterLock(scratch_folder(path) / "lock", path)
    try:
        lock.acquire()
    except FileNotFoundError as error:
        raise StoreFormatError(
            f"{path} is a damaged run store: its checkpoint folder is gone; restore it from a copy"
        ) from error
    except PermissionError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; open it to read") from error
    return lock


def claim(path: Path, overwrite: bool) -> WriterLock | None:
    """Refuse what is in the way of a new run store, or lock the one that is to be replaced.

    Raises
    ------
    StoreError
        If there is anything but a run store, or a run store and not ``overwrite``.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    try:
        here = _describe(path)
    except StoreError as error:
        names = sorted(entry.name for entry in path.iterdir())[:3] if path.is_dir() else []
        what = f"a folder with {', '.join(names)}" if names else "a file"
        raise StoreError(
            f"{path} exists and is {what}, no run store that could be replaced; pass another path"
        ) from error
    if not overwrite:
        raise StoreError(
            f"{path} exists and holds {here}; pass another path, overwrite=True to replace it, "
            "or use daskfactor.resume to go on with it"
        )
    return lock_of(path)


def _describe(path: Path) -> str:
    shape = read_root(path)["consolidated_metadata"]["metadata"]["sample_stats/lp"]["shape"]
    done = ", ".join(str(count) for count in Slots(path, shape[0], 0).counts.draws)
    return f"a run (draws per chain: {done} of {shape[1]})"
