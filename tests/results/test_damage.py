"""Whatever happens to a file of a store: the same results, or one sentence about damage."""

import json
import zlib

import dask
import numpy as np
import pytest
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor.errors import StoreError, StoreFormatError
from daskfactor.results.files import seal
from daskfactor.results.root import INDEX
from daskfactor.results.store import RunStore
from daskfactor.results.trace import open_run
from tests.refusals import refused
from tests.results.runs import fill, make_spec


def whole_store(path):
    spec = make_spec(chains=1, warmup_draws=2, observed=np.arange(35.0).reshape(7, 5))
    state = {"lasting": np.arange(7.0)}, {"draws": 0, "warmup_draws": 0}
    with RunStore.create(path, spec, state=state) as store:
        fill(store, spec, draws=4)
        store.checkpoint({"state": np.arange(5)}, {"draws": 9})
        store.checkpoint({"state": np.arange(5)}, {"draws": 10, "warmup_draws": 2})
        for start in (4,):
            fill(store, spec)
            store.checkpoint({"state": np.arange(5)}, {"draws": 10, "from": start})
            store.checkpoint({"state": np.arange(5)}, {"draws": 10, "from": start})
        store.finish({"sampling_time": 1.0})
    return path


def everything(path):
    with dask.config.set(scheduler="synchronous"):
        tree = open_run(path).load()
    with RunStore.open(path) as held:
        arrays, meta = held.load_checkpoint()
        return tree, dict(arrays), meta


def flipped(raw, number):
    at = zlib.crc32(raw) % len(raw)
    return raw[:at] + bytes([raw[at] ^ (1 << number % 8)]) + raw[at + 1 :]


def cut(raw, number):
    """Without the last byte, half of it, or no file at all."""
    return (raw[:-1], raw[: len(raw) // 2], None)[number % 3]


@pytest.mark.slow
def test_damage_anywhere_is_told_or_does_nothing(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    expected, arrays, meta = everything(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())

    def told(changes):
        before = {file: file.read_bytes() for file in changes}
        for file, changed in changes.items():
            file.unlink() if changed is None else file.write_bytes(changed)
        try:
            tree, found, state = everything(path)
        except StoreError as error:
            return str(path) in str(error)
        else:
            xr.testing.assert_identical(tree, expected)
            assert state == meta
            assert all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)
            return False
        finally:
            for file, raw in before.items():
                file.write_bytes(raw)

    chunks = [file for file in files if "/c/" in str(file) or file.name == "c"]
    # What the root has a copy of: no reader opens these, so all are damaged at once.
    copied = [file for file in files if file.name == "zarr.json" and file.parent != path]
    copied.remove(path / "checkpoint" / "zarr.json")
    for damage in (flipped, cut):
        changes = {file: damage(file.read_bytes(), at) for at, file in enumerate(copied)}
        if told(changes):
            for file, changed in changes.items():
                told({file: changed})
    for number, file in enumerate(file for file in files if file not in copied):
        raw = file.read_bytes()
        if raw:
            assert told({file: flipped(raw, number)}) or file not in chunks
            # One check finds a change and a cut: a third of the files is enough of these.
            if number % 3 == 0 or file not in chunks:
                assert told({file: cut(raw, number // 3)}) or file not in chunks
    assert len(chunks) > 25


def test_damage_is_told_by_lazy_readings_too(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    tree = open_run(path)
    chunk = path / "posterior" / "W" / "c" / "0" / "0" / "0" / "0"
    raw = bytearray(chunk.read_bytes())
    raw[100] ^= 4
    chunk.write_bytes(raw)
    match = r"run\.zarr is a damaged run store: posterior/W/c/0/0/0/0 is not what was written"
    for read in (
        lambda: dfac.predict(tree).load(),
        lambda: dfac.expectation(path, lambda W, H: W),
        lambda: dfac.align(tree),
        lambda: dfac.summarize(path),
    ):
        refused(StoreFormatError, match, read)
    chunk.unlink()
    refused(StoreFormatError, "posterior/W/c/0/0/0/0 is missing", dfac.predict(path).load)


def test_what_others_write_into_the_root_is_taken(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    zarr.open_group(path, mode="r+").attrs["note"] = "mine"
    assert open_run(path).attrs["note"] == "mine"


def as_of_version_one(path):
    """Make a store what 0.1.0 wrote: no checksums, a marker and a state of its own."""
    for file in path.rglob("zarr.json"):
        document = json.loads(file.read_text())
        nodes = (document.get("consolidated_metadata") or {}).get("metadata", {})
        for node in (document, *nodes.values()):
            if "codecs" in node:
                node["codecs"] = [c for c in node["codecs"] if c["name"] != "crc32c"]
        (document.get("consolidated_metadata") or {}).pop("crc32", None)
        document["attributes"].pop("crc32", None)
        if "format_version" in document["attributes"]:
            document["attributes"]["format_version"] = 1
        file.write_text(json.dumps(document))
    for file in path.rglob("*"):
        if file.is_file() and ("/c/" in str(file) or file.name == "c"):
            file.write_bytes(file.read_bytes()[:-4])
    for file in (path / "checkpoint" / "state").glob("*.npz"):
        file.unlink()
    # Chunks of nothing but fill values were not written.
    (path / "monitor" / "chain" / "c" / "0").unlink()


def test_stores_of_the_first_version_are_read_and_not_resumed(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    expected = open_run(path).load()
    as_of_version_one(path)
    found = open_run(path).load()
    assert found.attrs.pop("format_version") == 1
    del expected.attrs["format_version"]
    xr.testing.assert_identical(found, expected)
    with pytest.raises(StoreFormatError, match=r"begun by daskfactor 0\.1\.0.*can be read"):
        dfac.resume(path, progressbar=False)


@pytest.mark.parametrize(
    ("node", "changed", "says"),
    [
        (
            "posterior/gene",
            {"codecs": [{"name": "numcodecs.pickle"}]},
            "decoded by numcodecs.pickle",
        ),
        ("posterior/W", {"codecs": [{"name": "numcodecs.pickle"}]}, "decoded by numcodecs.pickle"),
        ("posterior/gene", {"storage_transformers": [{"name": "any"}]}, "a storage transformer"),
        ("posterior/day", {"shape": [2**40]}, "GiB of labels, which take .* GiB of memory"),
        ("posterior/W", {"shape": [2, 2**40, 7, 3]}, "chunks and .* take .* GiB of memory"),
    ],
)
def test_a_store_of_somebody_else_executes_nothing_and_takes_bounded_memory(
    tmp_path, node, changed, says
):
    RunStore.create(tmp_path / "run.zarr", make_spec()).close()
    root = tmp_path / "run.zarr" / "zarr.json"
    document = json.loads(root.read_text())
    document[INDEX]["metadata"][node] |= changed
    root.write_text(json.dumps(seal(document, INDEX)))
    for opener in (open_run, RunStore.open):
        refused(StoreFormatError, says, opener, tmp_path / "run.zarr")
