"""Sharing blocks with other processes: the same bits, bounded memory, nothing left behind."""

import multiprocessing
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from daskfactor.data import sharing
from daskfactor.data.blocks import BlockedData
from daskfactor.data.convert import convert
from daskfactor.data.grid import Block, Grid
from daskfactor.data.reader import BlockReader
from daskfactor.data.sharing import DataHandle, share
from daskfactor.data.sources import as_blocks
from daskfactor.data.storage import BlockView, SparseBlock
from daskfactor.errors import DataError, StoreError

RNG = np.random.default_rng(4)
DENSE = np.where(RNG.random((50, 40)) < 0.4, RNG.random((50, 40)), np.nan).astype("float32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Any:
    place = tmp_path / "scratch"
    with dask.config.set({"temporary-directory": str(place)}):
        yield place
    assert not place.exists() or list(place.iterdir()) == []


def sparse_matrix() -> sp.csr_array:
    return sp.csr_array(np.nan_to_num(DENSE))


def dense_zarr(tmp_path: Path) -> str:
    zarr.create_array(str(tmp_path / "v"), data=DENSE, chunks=(7, 40))
    return str(tmp_path / "v")


def store(tmp_path: Path) -> str:
    convert(sparse_matrix(), tmp_path / "s.zarr", unstored="zero", blocks=3, progressbar=False)
    return str(tmp_path / "s.zarr")


def kinds(tmp_path: Path) -> dict[str, tuple[BlockedData, str]]:
    zero: dict[str, Any] = {"unstored": "zero"}
    sheet = np.asfortranarray(DENSE)
    return {
        "array": (as_blocks(DENSE.copy(), 3), "file"),
        "cache": (as_blocks(sheet, 3, dtype="float64"), "file"),
        "scratch": (as_blocks(sheet, 3, memory_limit=0), "file"),
        "sparse": (as_blocks(sparse_matrix(), 3, **zero), "file"),
        "balanced": (as_blocks(sparse_matrix(), 3, unstored="missing", balance=True), "file"),
        "sparse scratch": (as_blocks(sparse_matrix(), 3, memory_limit=0, **zero), "file"),
        "zarr": (as_blocks(dense_zarr(tmp_path), 3, dtype="float64"), "zarr"),
        "zarr in scratch": (as_blocks(str(tmp_path / "v"), 3, memory_limit=0), "zarr"),
        "store": (as_blocks(store(tmp_path)), "store"),
        "store, other blocks": (as_blocks(str(tmp_path / "s.zarr"), 4), "file"),
    }


def arrays(view: BlockView | SparseBlock) -> list[np.ndarray]:
    return list(view[:3]) if isinstance(view, SparseBlock) else [view.block]


def same_view(view: Any, other: Any) -> None:
    assert type(view) is type(other)
    for array, found in zip(arrays(view), arrays(other), strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
        assert found.flags.aligned
        assert found.flags.writeable
    assert view[3:] == other[3:]
    if isinstance(other, BlockView):
        assert other.array.flags.c_contiguous


@pytest.mark.parametrize("name", sorted(["array", "cache", "scratch", "sparse", "balanced",
    "sparse scratch", "zarr", "zarr in scratch", "store", "store, other blocks"]))  # fmt: skip
@pytest.mark.parametrize("memory_limit", [None, 0])
def test_readers_give_the_blocks_bit_for_bit(
    name: str, memory_limit: int | None, tmp_path: Path
) -> None:
    data, kind = kinds(tmp_path)[name]
    handle = share(data)
    assert handle.kind == kind
    sent = pickle.dumps(handle)
    assert len(sent) < 1000
    reader = pickle.loads(sent).open(memory_limit)
    assert (reader.grid, reader.dtype, reader.token) == (data.grid, data.dtype, handle.token)
    with ThreadPoolExecutor(4) as pool:
        blocks = data.grid.all_blocks() * 3
        for block, view in zip(blocks, pool.map(lambda b: reader.view(*b), blocks), strict=True):
            same_view(data.view(*block), view)
    reader.close()
    handle.close()
    data.close()


def checked(handle: DataHandle, pipe: Any) -> None:
    try:
        reader = handle.open()
        total = sum(float(reader.view(*block).values.sum()) for block in reader.grid.all_blocks())
        pipe.send(total)
    except StoreError as error:
        pipe.send(str(error))


def elsewhere(handle: DataHandle) -> Any:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=checked, args=(handle, there))
    process.start()
    found = here.recv()
    process.join()
    return found


def test_another_process_reads_and_removes_nothing(folder: Path) -> None:
    data = as_blocks(sparse_matrix(), 3, unstored="zero", dtype="float64")
    handle = share(data)
    assert elsewhere(handle) == pytest.approx(data.total)
    assert len(list(folder.iterdir())) == 1
    handle.close()
    handle.close()
    said = elsewhere(handle)
    assert "cannot read the shared data at" in said
    assert "only be shared with workers on the same machine" in said
    assert "daskfactor convert" in said


def test_the_file_goes_with_the_handle(folder: Path) -> None:
    handle = share(as_blocks(DENSE.copy(), 2))
    reader = handle.open()
    copied = pickle.loads(pickle.dumps(handle))
    del copied
    assert len(list(folder.iterdir())) == 1
    del handle
    assert list(folder.iterdir()) == []
    same_view(reader.view(1, 1), as_blocks(DENSE.copy(), 2).view(1, 1))


def test_a_file_of_other_data_is_refused() -> None:
    handle, other = share(as_blocks(DENSE.copy(), 2)), share(as_blocks(DENSE.copy(), 2))
    assert handle.token != other.token
    mixed = DataHandle(handle.token, "file", other.location, handle.grid, "float32")
    with pytest.raises(StoreError, match="cannot read the shared data"):
        mixed.open()
    handle.close()
    other.close()


def test_files_of_killed_processes_are_swept_away(folder: Path) -> None:
    handle = share(as_blocks(DENSE.copy(), 2))
    old, young = (folder / f"{sharing.PREFIX}{name}.blocks" for name in ("old", "young"))
    old.write_bytes(b"left behind")
    young.write_bytes(b"being made")
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    os.utime(handle.location, (long_ago, long_ago))
    share(as_blocks(DENSE.copy(), 2)).close()
    assert not old.exists()
    assert young.exists()
    assert Path(handle.location).exists()
    young.unlink()
    handle.close()


def test_data_that_are_gone_or_changed_are_refused(tmp_path: Path) -> None:
    place = dense_zarr(tmp_path)
    handle = share(as_blocks(place, 3))
    zarr.create_array(place, data=DENSE[:30], chunks=(7, 40), overwrite=True)
    with pytest.raises(StoreError, match="is not the one that was shared: its shape"):
        handle.open()
    gone = DataHandle("t", "zarr", str(tmp_path / "nowhere"), handle.grid, "float32")
    with pytest.raises(StoreError, match=r"cannot open the data at .*under one location"):
        gone.open()
    gone = DataHandle("t", "store", str(tmp_path / "nowhere"), handle.grid, "float32")
    with pytest.raises(StoreError, match="cannot open the data at"):
        gone.open()
    other = DataHandle("t", "store", store(tmp_path), Grid.even((50, 40), 2), "float32")
    with pytest.raises(StoreError, match="its blocks are others"):
        other.open()


class Flaky:
    """Loads blocks of one row, and fails as often as it is told."""

    def __init__(self, failures: int = 0, error: type[Exception] = OSError) -> None:
        self.failures = failures
        self.error = error
        self.loaded: list[tuple[int, int]] = []
        self.pauses: list[float] = []

    def reader(self, budget: int = 0) -> BlockReader:
        return BlockReader(
            Grid.even((40, 40), 4),
            np.dtype("float32"),
            "token",
            self.load,
            lambda: None,
            budget,
            self.pauses.append,
        )

    def load(self, block: Block) -> BlockView:
        self.loaded.append(tuple(block))
        if self.failures:
            self.failures -= 1
            raise self.error("the network was away")
        return BlockView(np.zeros((10, 10), np.float32), 0, 0, 10, 10)


def test_what_fails_is_tried_again() -> None:
    flaky = Flaky(2)
    flaky.reader().view(1, 2)
    assert flaky.loaded == [(1, 2)] * 3
    assert flaky.pauses == pytest.approx([0.1, 0.4])


def test_what_fails_three_times_is_named() -> None:
    flaky = Flaky(3)
    with pytest.raises(
        StoreError, match=r"block \(1, 2\) could not be read in 3 attempts: the net"
    ):
        flaky.reader().view(1, 2)
    assert len(flaky.pauses) == 2


def test_bad_data_are_not_tried_again() -> None:
    flaky = Flaky(3, DataError)
    with pytest.raises(DataError):
        flaky.reader().view(1, 2)
    assert len(flaky.loaded) == 1


def test_blocks_stay_within_the_budget_and_are_not_thrown_out_in_turn() -> None:
    flaky = Flaky()
    reader = flaky.reader(budget=3 * 400 + 399)
    cycle = [(row, col) for row in range(4) for col in range(4)]
    for _ in range(3):
        for block in cycle:
            reader.view(*block)
    assert len(flaky.loaded) == 16 + 2 * 13
    assert set(cycle[:3]).isdisjoint(flaky.loaded[16:])
    # Other blocks from now on: the first ones give way once nobody has read them for long.
    for _ in range(40):
        reader.view(3, 3)
    flaky.loaded.clear()
    reader.view(3, 3)
    assert flaky.loaded == []


def test_readers_are_not_pickled() -> None:
    with pytest.raises(TypeError, match="pickle the DataHandle"):
        pickle.dumps(Flaky().reader())
