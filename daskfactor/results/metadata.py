"""The file at the root of a run store, which says what the store holds: read without zarr.

What opens a store to read or write it begins here; `daskfactor info` needs nothing more of a run
that has ended. So no library that takes time to import is imported here.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from daskfactor.errors import StoreError, StoreFormatError
from daskfactor.machine import available_memory
from daskfactor.results.files import NODE, check_seal, damaged

if TYPE_CHECKING:
    from daskfactor.results.backends import View

LIBRARY: Final = "daskfactor"
FORMAT_VERSION: Final = 2
INDEX: Final = "consolidated_metadata"
DESCRIPTIONS: Final = frozenset({"data", "init", "model", "run", "sampler"})
"""Attributes of the root that are JSON documents."""
LENGTHS: Final = frozenset({"chains", "draws", "keep_every", "thin", "tune"})
"""Attributes of the root that are whole numbers."""
HARMLESS: Final = frozenset(
    {"blosc", "bytes", "crc32c", "gzip", "transpose", "vlen-bytes", "vlen-utf8", "zstd"}
)
"""Codecs that turn bytes into numbers and texts and do nothing else."""
TEXT: Final = 64
"""Bytes that a label takes in memory that is a text of usual length."""
CHUNK: Final = 256
"""Bytes that a chunk takes in a list of them."""


def read_root(view: "View") -> dict[str, Any]:
    """Read the root's own file, checked to be a run store of a version that we know.

    Raises
    ------
    StoreError
        If there is nothing.
    StoreFormatError
        If it is not ours, damaged or of another version.
    """
    root = view.name
    if not view.exists():
        raise StoreError(f"there is no run store at {root}; check the path")
    foreign = f"{root} is not a run store of {LIBRARY}; pass the path given as store="
    try:
        document = dict(view.document(NODE))
        attrs = dict(document["attributes"])
        if attrs.get("inference_library") == LIBRARY:
            version = attrs.get("format_version")
            if not isinstance(version, int) or version < 1:
                why = f"it says that its format version is {version!r}, and the first one is 1"
                raise damaged(root, why)
            if version > FORMAT_VERSION:
                raise StoreFormatError(
                    f"{root} has format version {version}, this version of {LIBRARY} reads up to "
                    f"{FORMAT_VERSION}; upgrade {LIBRARY} to open it"
                )
        check_seal(document, INDEX)
        for name in DESCRIPTIONS & attrs.keys():
            if not isinstance(json.loads(attrs[name]), dict):
                raise damaged(root, f"what it says of its {name} is {attrs[name]}")
        for name in LENGTHS & attrs.keys():
            if not isinstance(attrs[name], int):
                raise damaged(root, f"what it says of its {name} is {attrs[name]!r}")
        _ = nodes_of(document)["sample_stats/lp"]["shape"]
        _check_harmless(root, nodes_of(document))
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        kind = view.kind()
        if kind == "blocks":
            raise StoreFormatError(
                f"{root} is a matrix that {LIBRARY}.convert wrote, not a run: pass it as V to "
                f"{LIBRARY}.sample, or to daskfactor fit"
            ) from error
        if kind == "run":
            raise damaged(root, f"its {NODE} is incomplete") from error
        raise StoreFormatError(foreign) from error
    if attrs.get("inference_library") != LIBRARY:
        raise StoreFormatError(foreign)
    return document


def _check_harmless(root: str, nodes: dict[str, Any]) -> None:
    """Refuse what no run store has: codecs that may execute anything, more than memory can hold.

    Opening a run reads its labels, and lists its chunks.
    """
    labels, chunks = 0, 0
    for name, node in nodes.items():
        if node["node_type"] != "array":
            continue
        codecs, shape = {codec["name"] for codec in node["codecs"]}, node["shape"]
        if not codecs <= HARMLESS or node.get("storage_transformers"):
            others = ", ".join(sorted(codecs - HARMLESS)) or "a storage transformer"
            raise StoreFormatError(
                f"{root} is no run store that can be trusted: {name} is decoded by {others}, which "
                f"{LIBRARY} never writes; open only what comes from where you think it does"
            )
        pieces = node["chunk_grid"]["configuration"]["chunk_shape"]
        chunks += math.prod(map(_parts, shape, pieces))
        if len(shape) == 1:
            labels += int(shape[0]) * (TEXT if node["data_type"] == "string" else 8)
    free = available_memory()
    needed = labels + CHUNK * chunks
    if needed > free:
        raise StoreFormatError(
            f"{root} has {chunks:,} chunks and {labels / 2**30:,.1f} GiB of labels, which take "
            f"{needed / 2**30:,.1f} GiB to open, and {free / 2**30:,.1f} GiB of memory are free; "
            "open it on a machine with more, if it comes from where you think it does"
        )


def nodes_of(document: dict[str, Any]) -> dict[str, Any]:
    """Metadata of all groups and arrays that readers see, by path."""
    return dict(document[INDEX]["metadata"])


def intact(root: Path, document: dict[str, Any], limit: int | None = None) -> bool:
    """Whether all chunks of a local store are there, each as it was written.

    Parameters
    ----------
    root
        A run store in which nothing is left to write.
    document
        Its root's own file. An array without checksums is not known to be intact.
    limit
        Bytes beyond which an array's chunks are only counted.
    """
    import google_crc32c

    for name, node in nodes_of(document).items():
        if node["node_type"] != "array":
            continue
        if not any(codec["name"] == "crc32c" for codec in node["codecs"]):
            return False
        chunks = node["chunk_grid"]["configuration"]["chunk_shape"]
        expected = math.prod(map(_parts, node["shape"], chunks))
        found = [file for file in (root / name).glob("c/**/*") if file.is_file()]
        found = found or [file for file in [root / name / "c"] if file.is_file()]
        if len(found) != expected:
            return False
        size = sum(file.stat().st_size for file in found)
        for file in found if limit is None or size <= limit else ():
            raw = file.read_bytes()
            if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
                return False
    return True


def _parts(size: int, chunk: int) -> int:
    return -(-size // chunk)
