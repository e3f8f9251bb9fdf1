"""Metadata file at the root of a run store, read without zarr.

Readers and writers of a store start here; for a finished run, `daskfactor info` needs nothing else.
Therefore this module imports no library that is slow to import.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from daskfactor.errors import StoreError, StoreFormatError
from daskfactor.machine import require_memory
from daskfactor.runs.files import MARKER, NODE, check_seal, damaged

if TYPE_CHECKING:
    from daskfactor.runs.backends import View

LIBRARY: Final = "daskfactor"
FORMAT_VERSION: Final = 2
INDEX: Final = "consolidated_metadata"
DESCRIPTIONS: Final = frozenset({"data", "init", "model", "run", "sampler"})
"""Attributes of the root that are JSON documents."""
LENGTHS: Final = frozenset({"chains", "draws", "keep_every", "thin", "tune"})
"""Attributes of the root that are integers."""
HARMLESS: Final = frozenset(
    {"blosc", "bytes", "crc32c", "gzip", "transpose", "vlen-bytes", "vlen-utf8", "zstd"}
)
"""Codecs that only decode bytes and cannot execute code."""
TEXT: Final = 64
"""Bytes of a text label of usual length in memory."""
CHUNK: Final = 256
"""Bytes of an entry in a list of chunks."""


def read_root(view: "View") -> dict[str, Any]:
    """Read and check the metadata of the root of a run store.

    Raises
    ------
    StoreError
        If there is no store.
    StoreFormatError
        If it is not a run store, is damaged or has another version.
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
                why = f"its format version is {version!r}, but versions start at 1"
                raise damaged(root, why)
            if version > FORMAT_VERSION:
                raise StoreFormatError(
                    f"{root} has format version {version}, this version of {LIBRARY} reads up to "
                    f"{FORMAT_VERSION}; upgrade {LIBRARY} to open it"
                )
        check_seal(document, INDEX)
        for name in DESCRIPTIONS & attrs.keys():
            if not isinstance(json.loads(attrs[name]), dict):
                raise damaged(root, f"its attribute {name!r} is {attrs[name]}")
        for name in LENGTHS & attrs.keys():
            if not isinstance(attrs[name], int):
                raise damaged(root, f"its attribute {name!r} is {attrs[name]!r}")
        _ = nodes_of(document)["sample_stats/lp"]["shape"]
        _check_harmless(root, nodes_of(document))
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        from daskfactor.data.places import FORMAT  # slow to import

        attrs = attributes_of(view, NODE)
        if attrs.get("format") == FORMAT:
            raise StoreFormatError(
                f"{root} is a matrix from {LIBRARY}.convert, not a run; pass it as V to "
                f"{LIBRARY}.sample, or to daskfactor fit"
            ) from error
        if not attrs and attributes_of(view, MARKER):
            raise StoreFormatError(
                f"{root} has checkpoints but no results: it is the store of log_evidence or "
                f"select_rank, which the same call opens again, or a run that has lost its {NODE}"
            ) from error
        if attrs.get("inference_library") == LIBRARY:
            raise damaged(root, f"its {NODE} is incomplete") from error
        raise StoreFormatError(foreign) from error
    if attrs.get("inference_library") != LIBRARY:
        raise StoreFormatError(foreign)
    return document


def attributes_of(view: "View", key: str) -> dict[str, Any]:
    """Return the attributes of a document; empty if it cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return dict(view.document(key)["attributes"])
    return {}


def _check_harmless(root: str, nodes: dict[str, Any]) -> None:
    """Refuse unsafe codecs, and stores that do not fit in memory.

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
                f"{root} is not a safe run store: {name} is decoded by {others}, which {LIBRARY} "
                "never writes; open only stores from sources that you trust"
            )
        pieces = node["chunk_grid"]["configuration"]["chunk_shape"]
        chunks += math.prod(map(_parts, shape, pieces))
        if len(shape) == 1:
            labels += int(shape[0]) * (TEXT if node["data_type"] == "string" else 8)
    require_memory(
        labels + CHUNK * chunks,
        f"opening the {chunks:,} chunks and {labels / 2**30:,.1f} GiB of labels of {root} takes",
        "open it on a machine with more memory if you trust its source",
        StoreFormatError,
    )


def nodes_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of all groups and arrays that readers see, by path."""
    return dict(document[INDEX]["metadata"])


def intact(root: Path, document: dict[str, Any], limit: int | None = None) -> bool:
    """Return True if a local store has all chunks, with correct checksums.

    Parameters
    ----------
    root
        Run store in which nothing is left to write.
    document
        Metadata of the root. False is returned for arrays without checksums.
    limit
        Size of an array in bytes above which its chunks are only counted.
    """
    import google_crc32c

    for name, node in nodes_of(document).items():
        if node["node_type"] != "array":
            continue
        if not any(codec["name"] == "crc32c" for codec in node["codecs"]):
            return False
        chunks = node["chunk_grid"]["configuration"]["chunk_shape"]
        expected = math.prod(map(_parts, node["shape"], chunks))
        files = [file for file in (root / name).glob("c/**/*") if file.is_file()]
        files = files or [file for file in [root / name / "c"] if file.is_file()]
        if len(files) != expected:
            return False
        size = sum(file.stat().st_size for file in files)
        for file in files if limit is None or size <= limit else ():
            raw = file.read_bytes()
            if google_crc32c.value(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
                return False
    return True


def _parts(size: int, chunk: int) -> int:
    return -(-size // chunk)
