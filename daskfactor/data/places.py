"""Find what is at a path or URL, asking a server as little as possible.

A folder is listed once, and documents of zarr that are read for it stay in the opened store. A flat
array of format 2 may have millions of chunks in its folder, so its document is asked for first.
Where a server cannot or may not list files, all documents are asked for.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

from daskfactor.data.icechunks import REPOSITORY
from daskfactor.errors import DaskfactorError, DataError, StoreFormatError
from daskfactor.publish import restore
from daskfactor.urls import Location, retry

FORMAT: Final = "daskfactor-blocked-sparse"
"""Attribute ``format`` of a blocked sparse store."""
Kind = Literal[
    "blocks", "run", "array", "group", "anndata", "parquet", "10x", "folder", "file", "nothing"
]
"""Kinds of content: a blocked store, a run, another array or group of zarr, an AnnData in zarr, a
folder with Parquet files or counts of 10x Genomics, another folder, a file of any format."""
NODE_DOCUMENTS: Final = frozenset(["zarr.json", ".zgroup", ".zarray"])
"""Documents of which one is in every zarr array and group."""
MATRIX: Final = ("matrix.mtx", "matrix.mtx.gz")
"""Names of the matrix in a folder of 10x Genomics."""
PARQUET: Final = (".parquet", ".pq")
WEB: Final = ("http", "https")
"""Schemes of servers that cannot list files."""


@dataclass(frozen=True)
class Place:
    """Content of a location.

    Attributes
    ----------
    kind
        Its kind. A damaged or unfinished blocked store counts as one.
    node
        The opened array or group of zarr, if it is one.
    error
        Error that opening it as zarr raised.
    files
        Parquet files in a folder of such, or the matrix in one of 10x Genomics.
    """

    kind: Kind
    node: Any = None
    error: Exception | None = None
    files: tuple[Location, ...] = ()


def find_place(place: str | PathLike[str]) -> Place:
    """Return the content of a location, found once and kept with it.

    Raises
    ------
    StoreError
        If a server cannot be reached.
    """
    location = Location.of(place)
    if location.place is None:
        location.place = _find(location)
    content: Place = location.place
    return content


def kind_of(place: str | PathLike[str]) -> Kind:
    """Return the kind of what is at a location."""
    return find_place(place).kind


def _find(location: Location) -> Place:
    if not location.is_url:
        restore(location)
    names = _names(location)
    if isinstance(names, str):
        return Place("file")
    if names and names.keys().isdisjoint((*NODE_DOCUMENTS, *(name[:4] for name in REPOSITORY))):
        if "block_table" in names:
            return Place("blocks")
        if not location.is_url and (matrices := [name for name in MATRIX if name in names]):
            return Place("10x", files=(location.child(matrices[0]),))
        if files := _parquet_in(location, names):
            return Place("parquet", files=files)
    return _zarr_place(location, names)


def _names(location: Location) -> dict[str, str] | str | None:
    """Return names and types of what is in a folder, or "file"; empty for nothing.

    None if the server cannot list its files, or refuses to.
    """
    if location.scheme in WEB:
        return "file" if location.suffix in PARQUET else None
    if not location.is_url:
        if not Path(location).is_dir():
            return "file" if Path(location).exists() else {}
        with suppress(OSError), os.scandir(location) as entries:
            return {item.name: "directory" if item.is_dir() else "file" for item in entries}
        return {}
    system, path = location.file_system()

    def ask() -> dict[str, str] | str | None:
        system.invalidate_cache(path)
        try:
            if location.suffix in PARQUET:
                if system.isfile(path):
                    return "file"
            elif _is_old_array(system, path):
                return dict.fromkeys((".zarray", ".zattrs"), "file")
            if system.isdir(path):
                return {_last(item["name"]): item["type"] for item in system.ls(path, detail=True)}
            return "file" if system.exists(path) else {}
        except PermissionError:  # files may be readable where their folder may not be listed
            return "file" if system.isfile(path) else None
        finally:
            system.invalidate_cache(path)

    return retry(ask, location)


def _is_old_array(system: Any, path: str) -> bool:
    """Return whether a folder at a URL is a zarr array of format 2."""
    try:  # its first byte, by one request without asking for its size
        system.cat_file(f"{path.rstrip('/')}/.zarray", 0, 1)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        return False
    return True


def _zarr_place(location: Location, names: Mapping[str, str] | None) -> Place:
    """Return the zarr array or group at a location, or in an Icechunk repository there or above."""
    import zarr

    from daskfactor.data.safe_zarr import zarr_store

    table = names is not None and "block_table" in names
    otherwise: Kind = "blocks" if table else "folder" if names else "nothing"
    try:
        store = zarr_store(location, names)
        node = zarr.open(store=store, path=store.inside, mode="r")
    except DaskfactorError as error:
        if location.is_url and not isinstance(error, StoreFormatError):
            raise  # it is out of reach, so its kind is unknown
        return Place(otherwise, error=error)
    except Exception as error:  # noqa: BLE001 - not a zarr that can be opened
        if names is None and not isinstance(error, ValueError) and _exists(location):
            otherwise = "file"
        return Place(otherwise, error=error)
    if isinstance(node, zarr.Array):
        return Place("array", node)
    if table or node.attrs.get("format") == FORMAT:
        return Place("blocks", node)
    if node.attrs.get("encoding-type") == "anndata" or _is_old_annotated(node, names):
        return Place("anndata", node)
    is_run = node.attrs.get("inference_library") == "daskfactor"
    return Place("run" if is_run else "group", node)


def _exists(location: Location) -> bool:
    system, path = location.file_system()
    return bool(retry(lambda: system.exists(path), location))


def _is_old_annotated(group: Any, names: Mapping[str, str] | None) -> bool:
    """Return whether anndata before 0.8 wrote a group: X and two tables, without a marker."""
    import zarr

    required = ("X", "obs", "var")
    if names and names.keys() & NODE_DOCUMENTS and not names.keys() >= {*required}:
        return False
    if not all(name in group for name in required):
        return False
    tables = group["obs"], group["var"]
    return all(isinstance(table, zarr.Group) or table.dtype.names is not None for table in tables)


# -- Parquet files in folders ---------------------------------------------------------------


def parquet_files(place: str | PathLike[str]) -> list[Location]:
    """Return the file itself, or the Parquet files of a folder; hidden files are skipped.

    Raises
    ------
    DataError
        If there is none.
    """
    location = Location.of(place)
    content = find_place(location)
    if content.kind == "file":
        return [location]
    if content.kind == "nothing":
        raise DataError(f"{location} does not exist")
    if not content.files:
        raise DataError(
            f"there is no .parquet file in {location} or in folders such as year=2026 in it; pass "
            "the folder that has the files"
        )
    return list(content.files)


def _parquet_in(location: Location, names: Mapping[str, str]) -> tuple[Location, ...]:
    """Return the Parquet files of a folder, if it or a ``key=value`` folder in it holds some.

    Other folders are not searched: the folder may be the root of a file system.
    """
    system, path = location.file_system()

    def holds_some(folder: str, names: Mapping[str, str]) -> bool:
        if any(map(_is_parquet, names)):
            return True
        parts = [f"{folder}/{name}" for name, kind in names.items() if kind == "directory"]
        return any(holds_some(part, listing(part)) for part in parts if "=" in _last(part))

    def listing(folder: str) -> dict[str, str]:
        try:
            return {_last(item["name"]): item["type"] for item in system.ls(folder, detail=True)}
        except OSError:
            return {}

    def ask() -> tuple[Location, ...]:
        if not holds_some(path.rstrip("/"), names):
            return ()
        files = sorted(filter(_is_parquet, system.find(path)))
        files = [name for name in files if not _is_hidden(name.removeprefix(path))]
        is_url = location.is_url
        return tuple(
            location.sibling(system.unstrip_protocol(name) if is_url else name) for name in files
        )

    return retry(ask, location)


def _is_parquet(name: str) -> bool:
    return name.endswith(PARQUET) and not _is_hidden(_last(name))


def _is_hidden(path: str) -> bool:
    """Return whether a path below a folder has a hidden part, such as the log of Delta Lake."""
    return any(part.startswith(("_", ".")) for part in path.split("/"))


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
