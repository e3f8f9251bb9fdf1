"""Files of arrays and scratch files: what was written comes back, nothing is left behind."""

import errno
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import dask
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskfactor.data.grid import Grid, choose_grid
from daskfactor.data.loading import working_bytes
from daskfactor.data.opening import open_source
from daskfactor.data.sources import as_blocks
from daskfactor.data.storage import OLD, PREFIX, ArrayFile, Storage, scratch_directory, sweep
from daskfactor.errors import DataError, DataWarning, StoreError
from daskfactor.kernels.views import BlockView
from tests.refusals import refused

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "scratch"
    with dask.config.set({"temporary-directory": str(place)}):
        yield place


def matrix():
    rng = np.random.default_rng(8)
    values = rng.gamma(2.0, 3.0, (103, 47)).astype("float32")
    values[rng.random(values.shape) < 0.1] = np.nan
    return values


def test_scratch_holds_what_memory_holds(folder):
    values = matrix().astype("float64")
    kept = as_blocks(values, 5)
    with as_blocks(values, 5, memory_limit=0) as data:
        assert (kept.in_memory, data.in_memory) == (True, False)
        assert "in memory" in kept.describe()
        assert "in a scratch file" in data.describe()
        assert data.fingerprint == kept.fingerprint
        assert np.shares_memory(data.view(1, 1).array, data.view(1, 1).array)
        for block in data.grid.all_blocks():
            np.testing.assert_array_equal(data.view(*block).block, kept.view(*block).block)
        np.testing.assert_array_equal(data.missing_cells(), kept.missing_cells())
        cells = [1, 102], [0, 46]
        np.testing.assert_array_equal(data.values(*cells), kept.values(*cells))
    assert as_blocks(values, 2, memory_limit="10 MB").in_memory
    assert not as_blocks(values, 2, memory_limit="10 kB").in_memory


@pytest.mark.parametrize("scratch", [False, True])
def test_blocks_that_come_in_pieces_are_put_together(tmp_path, scratch):
    values, grid = matrix(), Grid.even((103, 47), 3)
    storage = Storage(grid, file=ArrayFile(str(tmp_path)) if scratch else None)
    for block in reversed(grid.all_blocks()):
        part = values[grid.slices(block)]
        end, right = part.shape
        for rows, cols in itertools.product(((20, end), (0, 20)), ((0, 5), (5, right))):
            piece = slice(*rows), slice(*cols)
            storage.write(block, piece, np.asfortranarray(part[piece]))
    for block in grid.all_blocks():
        np.testing.assert_array_equal(storage.view(*block).block, values[grid.slices(block)])
    storage.close()


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_views_from_many_threads_do_not_disturb_each_other(memory_limit):
    values = matrix()
    with as_blocks(values.astype("float64"), 4, memory_limit=memory_limit) as data:
        blocks = data.grid.all_blocks()
        together = threading.Barrier(8)

        def read(seed):
            order = np.random.default_rng(seed).permutation(len(blocks) * 20) % len(blocks)
            together.wait(timeout=30)
            for number in order:
                block = blocks[number]
                wanted = values[data.grid.slices(block)]
                np.testing.assert_array_equal(data.view(*block).block, wanted)
            return len(order)

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(read, range(8))) == 8 * 20 * len(blocks)


def open_files(folder):
    """Files of this process that lie, or lay before they were unlinked, in a folder."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(link.readlink()))
    return [link for link in links if link.startswith(str(folder))]


@needs_proc
def test_the_scratch_file_goes_with_close_with_block_or_with_the_object(folder):
    wide = matrix().astype("float64")
    data = as_blocks(wide, memory_limit=0)
    assert len(open_files(folder)) == 1
    data.close()
    data.close()
    assert not open_files(folder)
    with as_blocks(wide, memory_limit=0):
        assert len(open_files(folder)) == 1
    assert not open_files(folder)
    data = as_blocks(wide, memory_limit=0)
    del data
    assert not open_files(folder)
    assert not list(folder.iterdir())


@needs_proc
@pytest.mark.parametrize("error", [DataError, KeyboardInterrupt])
def test_nothing_stays_open_after_bad_data_or_an_interrupt(folder, monkeypatch, error):
    if error is KeyboardInterrupt:
        interrupted = Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr("daskfactor.data.loading.Decoder.decode", interrupted)
    values = np.ones((40, 40))
    values[39, 39] = np.inf
    match = "row 39, column 39 is inf" if error is DataError else None
    refused(error, match, as_blocks, values, memory_limit=0)
    assert not open_files(folder)
    assert not list(folder.iterdir())


def run(folder, code, *arguments):
    """Run a program whose scratch files lie in a folder."""
    environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": str(folder)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


KILLED = """
import os, signal, numpy as np
from daskfactor.data.sources import as_blocks
data = as_blocks(np.ones((400, 400)), memory_limit=0)
assert not data.in_memory
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.quick("SIGKILL")
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_nothing_stays_after_the_process_was_killed(folder, signal):
    folder.mkdir()
    done = run(folder, KILLED.format(signal=signal))
    assert done.returncode != 0
    assert "AssertionError" not in done.stderr
    assert not list(folder.iterdir())


LIMITED = """
import resource, numpy as np
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from daskfactor.data.sources import as_blocks
from daskfactor.errors import StoreError
try:
    as_blocks(np.full((400, 400), np.inf), memory_limit=0)
except StoreError as error:
    print(error)
"""


def test_too_little_room_is_noticed_before_the_pass(folder):
    """The limit on file sizes is real here: the kernel refuses, as on a full disk."""
    done = run(folder, LIMITED)
    assert f"a scratch file of 640000 bytes is needed in {folder}" in done.stdout
    assert "there is not enough room; free some" in done.stdout
    assert not list(folder.iterdir())


@needs_proc
def test_a_disk_that_fills_up_while_writing_is_reported(folder, monkeypatch):
    real, calls = os.pwrite, []

    def fills_up(descriptor, data, offset):
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", fills_up)
    match = r"of 6400 bytes .* there is not enough room"
    refused(StoreError, match, as_blocks, np.ones((40, 40)), 2, memory_limit=0)
    assert len(calls) == 4
    assert not open_files(folder)
    assert not list(folder.iterdir())


def test_a_file_that_finds_no_room_says_how_much_it_holds(tmp_path, monkeypatch):
    file, values = ArrayFile(str(tmp_path)), np.arange(100.0)
    extent = file.append(values)
    np.testing.assert_array_equal(file.read([extent])[0], values)
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    match = r"of 1632 or more bytes .* not enough room; free some"
    refused(StoreError, match, file.append, values)
    file.close()


def test_reads_and_writes_come_in_pieces_and_a_file_cut_short_is_reported(folder, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:77], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: read(fd, [data[0][:101]], at))
    values = matrix()
    with as_blocks(values.astype("float64"), 3, memory_limit=0) as data:
        np.testing.assert_array_equal(data.to_numpy(), values)
    with as_blocks(np.ones((40, 40)), 2, memory_limit=0) as data:
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        refused(StoreError, r"block \(1, 0\) could not be read back .* too early", data.view, 1, 0)


@pytest.mark.parametrize("memory_limit", [None, 0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_closed_blocks_say_so(memory_limit, dtype):
    data = as_blocks(np.ones((40, 40), "float32"), dtype=dtype, memory_limit=memory_limit)
    data.close()
    refused(StoreError, "these blocks were closed", data.view, 0, 0)


def test_scratch_goes_to_a_directory_of_dask_or_the_system_and_an_unusable_one_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    words = r"needed in .*file, but .*temporary-directory"
    with dask.config.set({"temporary-directory": str(tmp_path / "file")}):
        refused(StoreError, words, as_blocks, np.ones((40, 40)), memory_limit=0)
    with dask.config.set({"temporary-directory": None}):
        assert Path(scratch_directory()).is_dir()


def test_one_chunk_larger_than_the_limit_is_reported():
    values = np.broadcast_to(np.float32(1), (4096, 4608))
    with pytest.warns(DataWarning, match="memory_limit allows 1000000 bytes, but one block"):
        as_blocks(values, 1, memory_limit="1 MB")


PEAK = """
import re, sys, numpy, zarr, dask
from pathlib import Path
from daskfactor.data.sources import as_blocks

def memory(kind):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(kind + r":\\s+(\\d+) kB", status)[1])

as_blocks(numpy.ones((300, 300)), memory_limit=0).view(0, 0)
as_blocks(sys.argv[1] + "/small", memory_limit=0).view(0, 0)
# The peak is taken from here on: getrusage would count the parent's before it forked.
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
data = as_blocks(sys.argv[1] + "/large", memory_limit="16 MiB")
for block in data.grid.all_blocks():
    assert (data.view(*block).block == 3).all()
print(data.in_memory, data.total_observed, memory("VmHWM") - before)
"""


@pytest.mark.quick("chunks3")
@needs_proc
@pytest.mark.parametrize("chunks", [(512, 512), (64, 4096), (333, 700), (200, 200)])
def test_peak_memory_stays_below_the_limit(tmp_path, chunks):
    for name, side in (("small", 100), ("large", 4096)):
        values, cut = np.full((side, side), np.float32(3)), tuple(min(side, own) for own in chunks)
        zarr.create_array(str(tmp_path / name), data=values, chunks=cut)
    done = run(tmp_path, PEAK, str(tmp_path))
    in_memory, observed, peak = done.stdout.split()
    assert (in_memory, int(observed)) == ("False", 4096**2)
    source = open_source(tmp_path / "large")
    grid = choose_grid(source.shape, source.chunks)
    # What zarr's threads and the allocator hold whatever the size: 2.5 MiB with zarr 3.4.
    fixed = 4 * 2**20
    assert int(peak) < working_bytes(source, grid, np.dtype("f4"), 2**20) + fixed
    assert int(peak) < 16 * 2**20


def test_a_block_that_two_threads_load_is_kept_once():
    grid = Grid.even((4, 4), 2)
    both = threading.Barrier(2)

    def load(block):
        if block == (0, 0):
            both.wait(timeout=20)
        return BlockView(np.ones((2, 2)), 0, 0, 2, 2)

    storage = Storage(grid, None, budget=4 * 32, load=load)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: storage.view(0, 0), range(2)))
    for row, col in ((0, 1), (1, 0), (1, 1)):
        storage.view(row, col)
    assert storage.in_memory
    assert not storage.extents


# -- files of arrays -------------------------------------------------------------------------

ARRAYS = st.lists(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int32, np.uint16]),
        hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9),
    ),
    max_size=3,
)


@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_arrays_come_back(groups):
    with tempfile.TemporaryDirectory() as folder:
        file = ArrayFile(folder, named=True)
        file.append(np.ones(1))  # an empty file cannot be mapped
        extents = [[file.append(array) for array in arrays] for arrays in groups]
        opened = ArrayFile(path=file.path)
        for arrays, places in zip(groups, extents, strict=True):
            if not places:
                continue
            again = file.read(places, reuse=True)
            for way in (file.read(places), opened.read(places), again, opened.map(places)):
                for array, found in zip(arrays, way, strict=True):
                    np.testing.assert_array_equal(found, array, strict=True)
                    assert found.flags.carray  # contiguous, aligned, writeable
        opened.close()
        file.remove()
        assert not any(Path(folder).iterdir())


def made(folder):
    file = ArrayFile(str(folder), named=True)
    first = [file.append(np.arange(10.0)), file.append(np.arange(3, dtype="uint16"))]
    return file, first, [file.append(np.ones(5000))]


def test_memory_is_new_or_of_the_thread_and_mapped_arrays_may_be_written_to(tmp_path):
    file, first, _ = made(tmp_path)
    opened = ArrayFile(path=file.path)
    mapped = opened.map(first)[0]
    mapped[:] = -1
    np.testing.assert_array_equal(file.read(first)[0], np.arange(10.0))
    opened.close()
    file.remove()
    np.testing.assert_array_equal(mapped, -1)  # mapped pages outlive the file
    file, first, second = made(tmp_path)
    own = file.read(second, reuse=True)[0]
    assert np.shares_memory(own, file.read(first, reuse=True)[0])
    assert not np.shares_memory(own, file.read(first)[0])
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(file.read, first, reuse=True).result()[0]
    assert not np.shares_memory(own, elsewhere)
    file.remove()


def test_a_file_is_for_this_user_notices_that_it_shrinks_and_may_have_no_name(tmp_path):
    file, _, second = made(tmp_path)
    assert Path(file.path).stat().st_mode & 0o077 == 0
    os.truncate(file.path, 100)
    refused(StoreError, "ends too early, at byte", file.read, second)
    file.remove()
    unnamed = ArrayFile(str(tmp_path / "new" / "folder"))
    extent = unnamed.append(np.ones(3))
    assert unnamed.path == ""
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    np.testing.assert_array_equal(unnamed.read([extent])[0], 1)
    unnamed.close()


def test_what_a_killed_process_left_is_swept_away_and_nothing_before(tmp_path):
    code = (
        "import sys; from daskfactor.data.storage import ArrayFile\n"
        f"file = ArrayFile({str(tmp_path)!r}, named=True)\n"
        "print(file.path, flush=True); sys.stdin.read()"
    )
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], **how)
    path = Path(process.stdout.readline().strip())
    assert (path.parent, path.name.startswith(PREFIX)) == (tmp_path, True)
    long_ago = time.time() - 2 * OLD

    def swept(age):
        os.utime(path, age)
        sweep(str(tmp_path))
        return not path.exists()

    assert not swept((long_ago, long_ago))  # held
    process.kill()
    process.communicate()
    assert not swept(None)  # too young
    assert swept((long_ago, long_ago))
