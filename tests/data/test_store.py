"""A blocked store gives back what was put in, and says so when it cannot."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from daskfactor import as_blocks, convert
from daskfactor.data import store as stores
from daskfactor.data.grid import Bands, Grid
from daskfactor.data.places import kind_of
from daskfactor.data.storage import Storage, block_bytes
from daskfactor.data.store import BlockStore, chunk_length
from daskfactor.errors import DataError, StoreError, StoreFormatError
from daskfactor.kernels.views import BlockView
from daskfactor.urls import unreachable_error
from tests.refusals import refused

pytestmark = pytest.mark.libraries

BLOCKS = 3


def matrix(rows=50, cols=33, density=0.2):
    rng = np.random.default_rng(3)
    dense = rng.poisson(2.0, (rows, cols)) * (rng.random((rows, cols)) < density)
    dense[:, 0] = 1
    dense[0] = 1
    return sparse.csr_array(dense.astype(np.float32))


@pytest.fixture
def store(tmp_path):
    """A small store without compression, so that every byte of its chunks counts."""
    path = tmp_path / "data.zarr"
    convert(matrix(), path, unstored="zero", blocks=BLOCKS, compression="none", progressbar=False)
    return path


def change_attributes(path, **changes):
    """Change attributes as a program might that knows of no checksum."""
    changes = {"checksum": None, "arrays": None} | changes
    document = json.loads((path / "zarr.json").read_text())
    for name, value in changes.items():
        if value is None:
            del document["attributes"][name]
        else:
            document["attributes"][name] = value
    (path / "zarr.json").write_text(json.dumps(document))


def test_blocks_are_those_of_the_matrix(store):
    found = BlockStore(str(store))
    dense, grid = matrix().toarray(), found.known.grid
    sizes = block_bytes(grid, np.dtype("f4"), found.known.statistics.n_stored)
    for block in grid.all_blocks():
        view, part = found.read(*block), dense[grid.slices(block)]
        own = view.indptr, view.indices, view.values
        assert (view.m, view.n, view.zeros) == (*part.shape, True)
        assert [a.dtype for a in own] == [np.int32, np.uint16, np.float32]
        assert all(a.flags.writeable for a in own)
        rebuilt = sparse.csr_array((own[2], own[1].astype("i4"), own[0]), part.shape)
        np.testing.assert_array_equal(rebuilt.toarray(), part)
        assert sizes[block] == sum(a.nbytes for a in own)
    assert found.read(0, 0, np.float64).values.dtype == np.float64
    assert as_blocks(str(store), dtype="float64", allow_empty=True).dtype == np.float64


def test_wide_blocks_have_wide_column_numbers(tmp_path):
    rows, cols = np.array([0, 1]), np.array([69_999, 66_000])
    wide = sparse.coo_array((np.ones(2, "f4"), (rows, cols)), shape=(2, 70_000))
    convert(wide, tmp_path / "w.zarr", unstored="zero", blocks=1, progressbar=False)
    view = BlockStore(str(tmp_path / "w.zarr")).read(0, 0)
    assert view.indices.dtype == np.int32
    assert view.indices.tolist() == [69_999, 66_000]


def test_same_statistics_and_fingerprint_as_in_memory(store):
    wanted = as_blocks(matrix(), BLOCKS, unstored="zero")
    got = as_blocks(store)
    assert (got.fingerprint, got.source.kind) == (wanted.fingerprint, "blocks")
    assert (got.total, got.minimum, got.maximum) == (wanted.total, 0.0, wanted.maximum)
    assert got.is_integer
    for name in ("n_observed", "row_observed", "col_observed", "n_stored"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))


def flipped(raw, at):
    """Return bytes with one bit changed."""
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize("name", ["values", "columns", "row_starts"])
@pytest.mark.parametrize("harm", ["change", "cut", "delete"])
def test_a_damaged_chunk_names_its_block(store, name, harm):
    found, group = BlockStore(str(store)), zarr.open_group(str(store))
    start = int(group["block_table"][1, 2][1 if name == "row_starts" else 0])
    path = store / name / "c" / str(start // group[name].chunks[0])
    raw = path.read_bytes()
    path.unlink()
    if harm != "delete":
        path.write_bytes(raw[:-3] if harm == "cut" else flipped(raw, 5))
    refused(StoreError, r"block \(1, 2\) of the store", found.read, 1, 2)
    found.read(1, 1)


def test_damage_to_padding_is_noticed_too(store):
    found, path = BlockStore(str(store)), store / "values" / "c" / "0"
    last, raw = 4 * int(found.known.statistics.n_stored[0, 0]), path.read_bytes()
    assert len(raw) > last
    path.write_bytes(flipped(raw, last))
    refused(StoreFormatError, r"block \(0, 0\) of the store .* is damaged", found.read, 0, 0)


def test_what_is_no_store_says_what_it_is(tmp_path, store):
    refused(StoreError, "no store can be opened at", BlockStore, str(tmp_path / "nothing.zarr"))
    foreign = tmp_path / "foreign.zarr"
    zarr.open_group(str(foreign), mode="w").create_array("x", shape=(2,), dtype="f4")
    refused(StoreFormatError, "not a blocked sparse store", BlockStore, str(foreign))
    for place in (foreign, foreign / "x", tmp_path):
        assert kind_of(str(place)) != "blocks"
    assert kind_of(str(store)) == "blocks"
    assert kind_of(f"file://{store}") == "blocks"


def test_newer_stores_are_refused(store):
    change_attributes(store, format_version=2)
    assert kind_of(str(store)) == "blocks"
    refused(StoreFormatError, r"format version 2, .* reads up to 1", as_blocks, str(store))


@pytest.mark.parametrize("harm", ["table", "attribute", "offsets"])
def test_a_damaged_plan_is_reported(store, harm):
    if harm == "table":
        shutil.rmtree(store / "block_table")
    elif harm == "attribute":
        change_attributes(store, statistics=None)
    else:
        zarr.open_group(str(store))["row_offsets"][3] = 49
    refused(StoreFormatError, "damaged", BlockStore, str(store))


def test_rows_without_observed_entries_are_refused_unless_allowed(tmp_path):
    ratings = sparse.coo_array(([1.0, 2.0], ([0, 2], [0, 1])), shape=(3, 2))
    path = str(tmp_path / "s.zarr")
    convert(ratings, path, unstored="missing", blocks=1, balance=True, progressbar=False)
    refused(DataError, "1 of 3 rows have no observed entry: row 1", as_blocks, path)
    assert as_blocks(path, allow_empty=True).row_observed.sum() == 2


def test_blocks_are_kept_in_memory_within_the_budget(store):
    found, reads = BlockStore(str(store)), []
    read = found.read
    found.read = lambda row, col, dtype=None: (reads.append((row, col)), read(row, col, dtype))[1]
    sizes = block_bytes(found.known.grid, np.dtype("f4"), found.known.statistics.n_stored)
    storage = found.blocks(np.dtype(np.float32), int(sizes.ravel()[:4].sum()))
    assert not storage.in_memory
    for block in found.known.grid.all_blocks() * 3:
        storage.view(*block)
        np.testing.assert_array_equal(storage.view(*block).values, read(*block).values)
    # Four of nine blocks stay in memory, the others in a scratch file.
    assert len(reads) == 9
    storage.close()
    assert found.blocks(np.dtype(np.float32), int(sizes.sum())).in_memory
    assert not found.blocks(np.dtype(np.float32), int(sizes.sum()) - 1).in_memory


def no_room(*_):
    raise StoreError("no room")


def test_without_room_for_a_scratch_file_the_store_is_read_again(store, monkeypatch):
    monkeypatch.setattr("daskfactor.data.storage.ArrayFile.append", no_room)
    found = BlockStore(str(store))
    storage = found.blocks(np.dtype(np.float32), 0)
    for block in found.known.grid.all_blocks() * 2:
        np.testing.assert_array_equal(storage.view(*block).values, found.read(*block).values)
    storage.close()


@given(
    st.lists(st.integers(0, 50_000), min_size=1, max_size=20).filter(any),
    st.sampled_from([2, 4, 8]),
)
def test_chunks_cost_no_more_than_one_chunk_a_block(counts, itemsize):
    length = chunk_length(np.array(counts), itemsize)

    def cost(length):
        chunks = sum(-(-count // length) for count in counts)
        return chunks * (length * itemsize + stores.CHUNK_COST)

    assert length >= stores.MIN_CHUNK
    assert cost(length) <= cost(max(stores.MIN_CHUNK, *counts))


def test_no_chunk_holds_two_blocks(store):
    group = zarr.open_group(str(store))
    table = group["block_table"][...].reshape(-1, 4)
    for name, field in (("values", 0), ("columns", 0), ("row_starts", 1)):
        assert (table[:, field] % group[name].chunks[0] == 0).all()
        rows = BlockStore(str(store)).known.grid.rows.sizes
        used = table[:, stores.STORED] if field == 0 else np.repeat(rows, 3)
        assert (table[1:, field] >= (table[:, field] + used)[:-1]).all()


class Flaky:
    """Loads blocks of one row, and fails as often as it is told."""

    def __init__(self, monkeypatch, failures, error):
        self.failures, self.error, self.loaded, self.pauses = failures, error, [], []
        monkeypatch.setattr("daskfactor.data.storage.time.sleep", self.pauses.append)
        self.blocks = Storage(Grid.even((40, 40), 4), load=self.load, nbytes=6400, budget=0)

    def load(self, block):
        self.loaded.append(block)
        if self.failures:
            self.failures -= 1
            raise self.error("the network was away")
        return BlockView(np.zeros((10, 10), np.float32), 0, 0, 10, 10)


def waited_for(seconds):
    return lambda text: unreachable_error("s3://b/c.zarr", OSError(text), seconds)


@pytest.mark.parametrize(
    ("failures", "error", "attempts", "kind", "message"),
    [
        (2, OSError, 3, None, None),
        (3, OSError, 3, StoreError, r"block \(1, 2\) could not be read in 3 attempts: the net"),
        (3, DataError, 1, DataError, None),
        (3, StoreFormatError, 1, StoreFormatError, None),
        (3, MemoryError, 1, MemoryError, None),
        (3, waited_for(None), 1, StoreError, r"^s3://b/c\.zarr cannot be used"),
        (3, waited_for(300.0), 1, StoreError, r"^s3://b/c\.zarr cannot be used for 300 sec"),
    ],
)
def test_what_may_change_is_tried_again(monkeypatch, failures, error, attempts, kind, message):
    flaky = Flaky(monkeypatch, failures, error)
    with contextlib.nullcontext() if kind is None else pytest.raises(kind, match=message):
        flaky.blocks.view(1, 2)
    flaky.blocks.close()
    assert flaky.loaded == [(1, 2)] * attempts
    assert flaky.pauses == pytest.approx([0.1, 0.4][: attempts - 1])


def test_a_full_disk_does_not_keep_small_blocks_out_of_memory(monkeypatch):
    monkeypatch.setattr("daskfactor.data.storage.ArrayFile.append", no_room)
    loaded = []

    def load(block):
        loaded.append(block)
        shape = grid.block_shape(block)
        return BlockView(np.zeros(shape, np.float32), 0, 0, *shape)

    grid = Grid(Bands((0, 30, 40)), Bands((0, 30, 40)))
    storage = Storage(grid, load=load, nbytes=6400, budget=1600)
    for block in grid.all_blocks() * 2:
        storage.view(*block)
    # The disk is full from the first on; the second and the last fit in memory all the same.
    assert loaded == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (1, 0)]
    storage.close()
