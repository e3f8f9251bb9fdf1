"""Damage to a blocked store is noticed, whatever byte of whatever file it hits."""

import shutil
import warnings
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor import as_blocks, convert
from daskfactor.data.places import kind_of
from daskfactor.data.store import BlockStore
from daskfactor.errors import DataError, StoreError, StoreFormatError
from tests.refusals import refused
from tests.tiers import FULL


def matrix():
    rng = np.random.default_rng(5)
    dense = rng.poisson(2.0, (17, 11)) + (rng.random((17, 11)) < 0.5)
    return sparse.csr_array(dense.astype(np.float32))


def labelled():
    sides = (("cell", 17), ("gene", 11))
    obs, var = (pd.DataFrame(index=[f"{side}{n}" for n in range(size)]) for side, size in sides)
    return anndata.AnnData(sparse.csr_matrix(matrix()), obs=obs, var=var)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    convert(labelled(), path, unstored="zero", blocks=2, balance=True, progressbar=False)
    return path


def contents(path):
    """Everything that a run would take from a store."""
    data = as_blocks(path, allow_empty=True)
    return {
        "matrix": data.to_numpy(),
        "blocks": [tuple(a.tobytes() for a in data.view(*b)[:3]) for b in data.grid.all_blocks()],
        "labels": [
            *(v.tolist() for v in data.labels.row_coords.values()),
            *(v.tolist() for v in data.labels.col_coords.values()),
            (data.labels.row_dim, data.labels.col_dim, data.labels.name),
        ],
        "facts": (
            *(data.fingerprint, data.total, data.minimum, data.maximum, data.is_integer),
            *(data.unstored, data.grid, str(data.dtype)),
        ),
        "orders": (data.row_order, data.col_order),
        "counts": (data.n_observed, data.n_stored, data.row_observed, data.col_observed),
    }


def became(path, wanted):
    """What became of a damaged store: any other error, or other data, fail the test."""
    try:
        with warnings.catch_warnings(action="error"):
            found = contents(path)
    except StoreFormatError as error:
        return "refused" if str(path) in str(error) else f"refused without its place: {error}"
    np.testing.assert_equal(found, wanted)
    return "same"


def files(path):
    return sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())


@pytest.fixture
def path(whole, tmp_path):
    """A copy of the store."""
    return shutil.copytree(whole, tmp_path / "s.zarr")


@pytest.mark.quick("delete", "flip")
@pytest.mark.parametrize("harm", ["delete", "cut", "flip"])
def test_damage_is_refused_or_harmless(whole, path, harm):
    wanted, rng, refusals = contents(whole), np.random.default_rng(11), 0
    for name in files(whole):
        raw = (whole / name).read_bytes()
        count = (40 if FULL else 12) if name == Path("zarr.json") else 2
        places = [0, *rng.integers(0, len(raw), count if harm == "flip" else 1).tolist()]
        for place in places if harm != "delete" else [0]:
            if harm == "delete":
                (path / name).unlink()
            elif harm == "cut":
                (path / name).write_bytes(raw[:place])
            else:
                changed = bytearray(raw)
                changed[place] ^= 1 << int(rng.integers(8))
                (path / name).write_bytes(changed)
            found = became(path, wanted)
            refusals += found == "refused"
            # Chunks hold data and a checksum: there is no harmless place in one that is read.
            harmless = name.name == "zarr.json" or name.parts[0] == "block_totals"
            assert found == "refused" or harmless, (name, place)
        (path / name).write_bytes(raw)
    assert refusals > 20


@pytest.mark.parametrize("name", ["row_order", "column_order", "row_label_0", "block_observed"])
def test_arrays_that_must_be_there_are_missed(path, name):
    shutil.rmtree(path / name)
    refused(StoreFormatError, r"damaged.*convert", contents, path)


def test_every_array_carries_a_checksum(whole):
    for name, array in zarr.open_group(str(whole), mode="r").arrays():
        codecs = [codec["name"] for codec in array.metadata.to_dict()["codecs"]]
        assert codecs[-1] == "crc32c", name


def old_store(whole, path):
    """A store as version 0.1.0 wrote it: no list of arrays, no checksums but those of blocks."""
    old = zarr.open_group(str(path), mode="w")
    group = zarr.open_group(str(whole), mode="r")
    attributes = dict(group.attrs)
    for name in ("arrays", "checksum"):
        del attributes[name]
    old.attrs.update(attributes)
    for name, array in group.arrays():
        old.create_array(name, data=array[...], chunks=array.chunks, fill_value=0)


def test_a_store_of_the_first_version_still_opens_and_of_none_that_was_not(whole, tmp_path):
    old_store(whole, tmp_path / "old.zarr")
    np.testing.assert_equal(contents(tmp_path / "old.zarr"), contents(whole))
    for version in (0, -1, True, "1", 1.5, None):
        zarr.open_group(tmp_path / "old.zarr").attrs["format_version"] = version
        refused(StoreFormatError, "format version", as_blocks, tmp_path / "old.zarr")


def test_what_a_zarr_directory_is_and_that_a_run_is_no_data(whole, path, tmp_path):
    zarr.create_array(str(tmp_path / "a.zarr"), data=np.eye(3))
    zarr.open_group(str(tmp_path / "g"), mode="w")
    path.rename(tmp_path / "blocks.of.mine")
    kinds = {whole: "blocks", "blocks.of.mine": "blocks", "a.zarr": "array", "g": "group"}
    for name, kind in (kinds | {"": "folder", "nothing": "nothing"}).items():
        assert kind_of(str(tmp_path / name)) == kind
    place, model = tmp_path / "run.zarr", dfac.TweedieNMF(2, dispersion=1.0)
    dfac.sample(matrix().toarray(), model, draws=2, tune=2, store=place, progressbar=False)
    assert kind_of(str(place)) == "run"
    refused(DataError, r"is a run of daskfactor.*open_run.*resume", as_blocks, place)
    match = "is a run of daskfactor, not data"
    refused(DataError, match, convert, place, tmp_path / "s.zarr", progressbar=False)


def test_what_is_gone_for_the_moment_is_no_damage(whole):
    """An error of the file system is told as such, so that reading may be tried again."""

    class Away:
        def __getitem__(self, part):
            raise TimeoutError("the network is away")

    found = BlockStore(str(whole))
    found._values = Away()
    with pytest.raises(StoreError, match=r"block \(0, 0\) of .*cannot be read.*away") as caught:
        found.read(0, 0)
    assert not isinstance(caught.value, StoreFormatError)
