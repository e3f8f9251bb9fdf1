"""Cache the summary of a finished run so that `info` need not read its draws.

One attribute of the root, ``verdict``, holds as JSON what `summarize` said, what else `info` tells
of the draws, and what both were taken of. It counts as long as this is what is there: a longer
run, one under way, a selection of draws, and other rules of judging have to be judged anew.
No library that takes time to import is imported here before it is needed.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from daskfactor.errors import StoreError
from daskfactor.results.files import counts_of, read_marker
from daskfactor.results.metadata import intact, nodes_of, read_root
from daskfactor.results.places import Folder, view_of
from daskfactor.results.verdict import RULES

if TYPE_CHECKING:
    import xarray as xr

VERDICT: Final = "verdict"
"""Attribute of the root."""
PIECE: Final = 2**25
"""Bytes of an array that are read at once for its imprint."""
READ_AT_ONCE: Final = 2**26
"""Bytes of an array that are compared with their checksum without being asked for it."""


class CachedSummary(NamedTuple):
    """What a run has cached of itself.

    Attributes
    ----------
    measured
        What `daskfactor.results.finalize.measured` found.
    summary
        What `summarize` said, as `xarray.Dataset.from_dict` takes it; None if it was not asked.
    """

    measured: dict[str, Any]
    summary: dict[str, Any] | None


def cache_attr(cache: CachedSummary, tree: "xr.DataTree") -> dict[str, str]:
    """Give the attribute for a run that has ended, with what it was taken of."""
    lp = tree["sample_stats"]["lp"]
    of = stamp(tree.attrs, [lp.sizes["draw"]] * lp.sizes["chain"])
    return {VERDICT: json.dumps({"of": of, "imprint": imprint(tree), **cache._asdict()})}


def stamp(attrs: Mapping[Any, Any], draws: Sequence[int]) -> dict[str, Any]:
    """What a verdict was taken of, as the files of a store tell: rules, draws planned and there."""
    return {"rules": RULES, "planned": attrs.get("draws"), "draws": list(draws)}


def imprint(tree: "xr.DataTree") -> int | None:
    """A checksum of shapes, statistics, monitored cells and one draw; None of an aligned trace."""
    import dask

    if "alignment" in tree.children:
        return None
    checksum, last = 0, {"chain": slice(1), "draw": slice(-1, None)}
    with dask.config.set(scheduler="threads"):  # a client that is about may have no workers
        for name in ("posterior", "posterior_moments", "monitor", "sample_stats"):
            group = tree[name].to_dataset() if name in tree.children else {}
            for key in sorted(map(str, group)):
                values = group[key]
                short = name in ("monitor", "sample_stats")
                part = values if short else values.isel(last, missing_dims="ignore")
                checksum = zlib.crc32(
                    repr((name, key, values.dims, values.shape)).encode(), checksum
                )
                for piece in _pieces(part):
                    checksum = zlib.crc32(piece.values.tobytes(), checksum)
    return checksum


def _pieces(values: "xr.DataArray") -> "Iterator[xr.DataArray]":
    """Cut an array along its longest axis, so that little of it is in memory at a time."""
    if values.nbytes <= PIECE:
        yield values
        return
    dim = max(values.dims, key=lambda axis: values.sizes[axis])
    step = max(1, PIECE * values.sizes[dim] // values.nbytes)
    for start in range(0, values.sizes[dim], step):
        yield values.isel({dim: slice(start, start + step)})


def cached_in(tree: "xr.DataTree") -> CachedSummary | None:
    """Return the cache of the run of a tree; None if there is none, or of other draws."""
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
    """Return attributes and cache of a local run that has ended, from its files alone.

    Parameters
    ----------
    path
        A run store.
    limit
        Bytes of an array beyond which its chunks are only counted.

    Returns
    -------
    (dict, CachedSummary) or None
        None if there is no verdict, if it was taken of other draws, or if anything is not as it
        was written: who opens the store to read it tells of that.
    """
    with suppress(StoreError):
        view = view_of(path)
        if not isinstance(view, Folder):
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
    """The attribute, read; None if there is none, or others wrote it."""
    try:
        document = json.loads(attrs[VERDICT])
        complete = {"of", "imprint", *CachedSummary._fields} <= set(
            document
        ) and "rules" in document["of"]
    except (KeyError, TypeError, ValueError):
        return None
    return document if complete else None
