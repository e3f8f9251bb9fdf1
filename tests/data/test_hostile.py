"""Stores made to do harm: nothing of theirs is run, and memory stays in bounds."""

import gzip
import json
import os
import pickle
import zipfile
from pathlib import Path

import numcodecs.abc
import numcodecs.registry
import numpy as np
import pytest
import zarr

import daskfactor as dfac
from daskfactor.data.statistics import crc32
from daskfactor.data.store import attributes_checksum
from daskfactor.errors import DaskfactorError, DataError, StoreError, StoreFormatError
from daskfactor.urls import Location, is_url
from tests.random_sparse import random_array
from tests.refusals import refused

VALUES = np.random.default_rng(3).gamma(2.0, 1.0, (40, 30)).astype("f4")


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def v2_array(place, chunk, **changes):
    """An array of zarr format 2 with one chunk."""
    place.mkdir()
    document = {"zarr_format": 2, "shape": [40, 30], "chunks": [40, 30], "dtype": "<f4"}
    document |= {"order": "C", "fill_value": 0, "compressor": None, "filters": None}
    (place / ".zarray").write_text(json.dumps(document | changes))
    (place / "0.0").write_bytes(chunk)


def changed(place, change):
    """The document of a node, changed."""
    document = json.loads((place / "zarr.json").read_text())
    change(document)
    (place / "zarr.json").write_text(json.dumps(document))


class Acts(numcodecs.abc.Codec):
    """A codec that does something, as `numcodecs.Pickle` might."""

    codec_id = "acts"

    def encode(self, buf):
        return buf

    def decode(self, buf, out=None):
        Path(os.environ["ACTS"]).touch()
        return buf


def test_nothing_is_run(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.setenv("ACTS", str(mark))
    monkeypatch.setitem(numcodecs.registry.codec_registry, "acts", Acts)
    v2_array(tmp_path / "v.zarr", VALUES.tobytes(), filters=[{"id": "acts"}])
    match = r"encoded with 'acts', which is not read.*do not trust"
    refused(StoreError, match, dfac.as_blocks, tmp_path / "v.zarr")
    assert not mark.exists()
    assert np.array_equal(zarr.open_array(tmp_path / "v.zarr", mode="r")[:], VALUES)
    assert mark.exists()


@pytest.mark.parametrize("dtype", ["<f4", "|O"])
def test_nothing_is_unpickled(tmp_path, dtype):
    mark = tmp_path / "mark"
    harm = pickle.dumps(Harm(mark))
    for filters, compressor in (([{"id": "pickle"}], None), (None, {"id": "pickle"})):
        place = tmp_path / f"v{filters is None}.zarr"
        v2_array(place, harm, dtype=dtype, filters=filters, compressor=compressor)
        refused(DaskfactorError, None, dfac.as_blocks, place)
    np.save(tmp_path / "v.npy", np.array([[Harm(mark)]], object), allow_pickle=True)
    np.savez(tmp_path / "v.npz", a=np.array([[Harm(mark)]], object))
    for name in ("v.npy", "v.npz"):
        told = refused(DataError, "it holds no numbers", dfac.as_blocks, tmp_path / name)
        assert "allow_pickle" not in told
    assert not mark.exists()


def test_codecs_inside_of_shards_are_looked_at(tmp_path):
    made = zarr.create_array(
        tmp_path / "v.zarr", shape=(40, 30), chunks=(20, 15), shards=(40, 30), dtype="f4"
    )
    made[:] = VALUES
    assert np.array_equal(dfac.as_blocks(tmp_path / "v.zarr").to_numpy(), VALUES)

    def strange(document):
        shard = document["codecs"][0]["configuration"]
        shard["codecs"][-1] = {"name": "numcodecs.pickle", "configuration": {}}

    changed(tmp_path / "v.zarr", strange)
    refused(DaskfactorError, None, dfac.as_blocks, tmp_path / "v.zarr")


def test_metadata_that_announces_absurd_sizes(tmp_path):
    zarr.create_array(tmp_path / "v.zarr", data=VALUES, chunks=(20, 15))
    for size, chunk, kind, message in (
        (10**13, None, DataError, r"take 640000000000000 bytes, more than is free"),
        (10**6, 10**6, DaskfactorError, r"20000976562500 bytes, far more than is free"),
    ):

        def huge(document, size=size, chunk=chunk):
            document["shape"] = [size, size]
            if chunk:
                document["chunk_grid"]["configuration"]["chunk_shape"] = [chunk, chunk]

        changed(tmp_path / "v.zarr", huge)
        refused(kind, message, dfac.as_blocks, tmp_path / "v.zarr")
    np.save(tmp_path / "v.npy", VALUES)
    cut = (tmp_path / "v.npy").read_bytes().replace(b"(40, 30)", b"(1000000")
    (tmp_path / "w.npy").write_bytes(cut)
    refused(
        DataError, r"w\.npy is not a readable NumPy array file", dfac.as_blocks, tmp_path / "w.npy"
    )


def test_an_archive_that_grows_and_a_text_that_never_ends(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "v.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(2**24))
    (tmp_path / "v.csv.gz").write_bytes(gzip.compress(b"1,2\n" + b"3" * 2**24))
    for module, name, options, message in (
        ("numpy_files", "v.npz", {}, "holds arrays of 16777216 bytes, which are read whole"),
        ("dialects", "v.csv.gz", {"table": False}, "is too large for the memory that is free"),
    ):
        monkeypatch.setattr(f"daskfactor.data.{module}.available_memory", lambda: 2**23)
        refused(DataError, message, dfac.as_blocks, tmp_path / name, **options)


def blocked(place):
    counts = random_array((60, 40), density=0.3, rng=np.random.default_rng(0), format="csr")
    dfac.convert(counts, place, unstored="missing", blocks=2, progressbar=False)
    return place


def forged(place, array, values):
    """An array of a blocked store, changed together with all that tells of it."""
    zarr.open_array(place / array, mode="r+")[:] = values

    def seal(document):
        about = document["attributes"]
        if about["arrays"][array][2] is not None:
            about["arrays"][array][2] = crc32([values])
        about["checksum"] = attributes_checksum(about)

    changed(place, seal)


def test_blocks_whose_entries_lie_outside(tmp_path):
    for array, change in (("columns", 2**15), ("row_starts", 2**30)):
        place = blocked(tmp_path / f"{array}.zarr")
        group = zarr.open_group(place, mode="r")
        found, table = group[array][:], group["block_table"][:]
        entry, start, stored, _ = table[0, 0].tolist()
        at = entry if array == "columns" else start
        found[at + 3] = change
        forged(place, array, found)
        group = zarr.open_group(place, mode="r")
        parts = [group[name][entry : entry + stored] for name in ("values", "columns")]
        table[0, 0, 3] = crc32([*parts, group["row_starts"][start : start + 31]])
        forged(place, "block_table", table)
        match, data = r"block \(0, 0\) .* outside of it", dfac.as_blocks(place)
        refused(StoreFormatError, match, data.view, 0, 0)


@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_block_of_absurd_size(tmp_path, consolidated, listed):
    place, size = blocked(tmp_path / "c.zarr"), [10**14]
    table = zarr.open_array(place / "block_table", mode="r")[:]
    table[0, 0, 2] = 10**13
    forged(place, "block_table", table)

    def forge(document):
        about, metadata = document["attributes"], document["consolidated_metadata"]["metadata"]
        for name in ("values", "columns"):
            metadata[name]["shape"] = size
            if listed:
                about["arrays"][name][0] = size
        about["checksum"] = attributes_checksum(about)
        if not consolidated:
            del document["consolidated_metadata"]

    changed(place, forge)
    if not consolidated:
        for name in ("values", "columns"):
            changed(place / name, lambda document: document.update(shape=size))
    refused(StoreFormatError, r"damaged", lambda: dfac.as_blocks(place).view(0, 0))


def test_what_a_url_is():
    places = "s3://a/b", "simplecache::https://a/b", "file:///a/b", Path("a/b")
    assert [is_url(place) for place in places] == [True, True, False, False]
    assert Location("file:///a/b") == "/a/b"
