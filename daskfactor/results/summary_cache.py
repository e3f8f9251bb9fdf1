"""Cache the summary of a finished run so that `info` need not read its draws.

The attribute ``verdict`` of the root has, as JSON, the summary, further facts for `info`, and a
stamp of the draws that they describe. The cache is invalid if the stamp differs: for an extended
or active run, a selection of draws, or other rules of the lights. Slow libraries are imported when
needed.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from daskfactor.errors import StoreError
from daskfactor.results.verdict import RULES
from daskfactor.runs.backends import FolderView, view_of
from daskfactor.runs.files import counts_of, read_marker
from daskfactor.runs.metadata import intact, nodes_of, read_root

if TYPE_CHECKING:
    import xarray as xr

VERDICT: Final = "verdict"
"""Attribute of the root with the cache."""
READ_AT_ONCE: Final = 2**26
"""Largest size of an array in bytes whose checksums are always verified."""


class CachedSummary(NamedTuple):
    """Cached summary of a run.

    Attributes
    ----------
    measured
        Facts from `daskfactor.results.finalize.measured`.
    summary
        Result of `summarize` for `xarray.Dataset.from_dict`; None if it was not computed.
    """

    measured: dict[str, Any]
    summary: dict[str, Any] | None


def cache_attr(cache: CachedSummary, tree: "xr.DataTree") -> dict[str, str]:
    """Return the attribute of a finished run, with the stamp of its draws."""
    lp = tree["sample_stats"]["lp"]
    of = stamp(tree.attrs, [lp.sizes["draw"]] * lp.sizes["chain"])
    return {VERDICT: json.dumps({"of": of, "imprint": imprint(tree), **cache._asdict()})}


def stamp(attrs: Mapping[Any, Any], draws: Sequence[int]) -> dict[str, Any]:
    """Return the stamp of a cache: rules, planned draws and available draws."""
    return {"rules": RULES, "planned": attrs.get("draws"), "draws": list(draws)}


def imprint(tree: "xr.DataTree") -> int | None:
    """Return a checksum of shapes, statistics, monitored cells and a draw; None if aligned."""
    import dask

    if "alignment" in tree.children:
        return None
    checksum, last = 0, {"chain": slice(1), "draw": slice(-1, None)}
    with dask.config.set(scheduler="threads"):  # a Dask client may have no workers
        for name in ("posterior", "posterior_moments", "monitor", "sample_stats"):
            group = tree[name].to_dataset() if name in tree.children else {}
            for key in sorted(map(str, group)):
                values = group[key]
                short = name in ("monitor", "sample_stats")
                part = values if short else values.isel(last, missing_dims="ignore")
                title = repr((name, key, values.dims, values.shape))
                checksum = zlib.crc32(title.encode(), checksum)
                checksum = zlib.crc32(part.values.tobytes(), checksum)
    return checksum


def cached_in(tree: "xr.DataTree") -> CachedSummary | None:
    """Return the cached summary of a tree; None if there is none for its draws."""
    document = _document(tree.attrs)
    if document is None or document["of"]["rules"] != RULES:
        return None
    checksum = imprint(tree)
    if checksum is None or checksum != document["imprint"]:
        return None
    return CachedSummary(document["measured"], document["summary"])


def cached_at(
    path: str | PathLike[str], limit: int | None = None
) -> tuple[dict[str, Any], CachedSummary] | None:
    """Return attributes and cached summary of a finished local run, from its files.

    Parameters
    ----------
    path
        Run store.
    limit
        Size of an array in bytes above which its chunks are only counted.

    Returns
    -------
    (dict, CachedSummary) or None
        None if there is no cache, it describes other draws, or the store is damaged, which
        opening the store reports.
    """
    with suppress(StoreError):
        view = view_of(path)
        if not isinstance(view, FolderView):
            return None
        root = read_root(view)
        attrs = root["attributes"]
        document = _document(attrs)
        if document is None:
            return None
        counts = counts_of(read_marker(view), nodes_of(root)["sample_stats/lp"]["shape"][0])
        if document["of"] == stamp(attrs, counts.draws) and intact(view.path, root, limit):
            return attrs, CachedSummary(document["measured"], document["summary"])
    return None


def _document(attrs: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return the parsed attribute; None if it is missing or invalid."""
    try:
        document = json.loads(attrs[VERDICT])
        required = {"of", "imprint", *CachedSummary._fields}
        complete = required <= set(document) and "rules" in document["of"]
    except (KeyError, TypeError, ValueError):
        return None
    return document if complete else None
