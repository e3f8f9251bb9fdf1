"""Files of blocks: what was written comes back, in the process and in others."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskfactor.data.blockfile import BlockFile
from daskfactor.data.grid import Block
from daskfactor.data.rawfile import RawFile
from daskfactor.errors import StoreError, StoreFormatError

ARRAYS = st.lists(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int32, np.uint16]),
        hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9),
    ),
    max_size=3,
)


@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_blocks_come_back(blocks: list[list[np.ndarray]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = BlockFile(folder, "b")
        for number, arrays in enumerate(blocks):
            file.write(Block(0, number), arrays)
        file.finish({"token": "x"})
        opened = BlockFile.open_path(f"{folder}/b")
        assert opened.about == {"token": "x"}
        for number, arrays in enumerate(blocks):
            block = Block(0, number)
            for way in (file.read, opened.read, opened.map):
                for array, found in zip(arrays, way(block), strict=True):
                    np.testing.assert_array_equal(found, array)
                    assert found.dtype == array.dtype
                    assert found.flags.writeable
                    assert found.flags.aligned
                    assert found.flags.c_contiguous
        opened.close()
        file.remove()
        assert not any(Path(folder).iterdir())


def made(folder: Path) -> BlockFile:
    file = BlockFile(str(folder), "b")
    file.write(Block(0, 0), [np.arange(10.0), np.arange(3, dtype="uint16")])
    file.write(Block(0, 1), [np.ones(5000)])
    file.finish({})
    return file


def test_writing_to_a_mapped_array_changes_nothing(tmp_path: Path) -> None:
    file = made(tmp_path)
    opened = BlockFile.open_path(str(tmp_path / "b"))
    mapped = opened.map(Block(0, 0))[0]
    mapped[:] = -1
    np.testing.assert_array_equal(file.read(Block(0, 0))[0], np.arange(10.0))
    opened.close()
    file.remove()
    np.testing.assert_array_equal(mapped, -1)  # mapped pages outlive the file


def test_buffers_belong_to_threads_or_to_the_caller(tmp_path: Path) -> None:
    file = made(tmp_path)
    buffer = np.empty(file.largest, np.uint8)
    values, columns = file.read(Block(0, 0), buffer)
    assert np.shares_memory(values, buffer)
    assert np.shares_memory(columns, buffer)
    own = file.read(Block(0, 1))[0]
    assert np.shares_memory(own, file.read(Block(0, 0))[0])
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.extend(file.read(Block(0, 0))))
    thread.start()
    thread.join()
    assert not np.shares_memory(own, found[0])
    file.remove()


@pytest.mark.parametrize("keep", [0, 8, 40, 1000, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    made(tmp_path).close()
    whole = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(whole[:keep])
    with pytest.raises(StoreFormatError, match="not a finished file of blocks"):
        BlockFile.open_path(str(tmp_path / "b"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"the blocks at .*nowhere cannot be opened"):
        BlockFile.open_path(str(tmp_path / "nowhere"))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    file = made(tmp_path)
    os.truncate(tmp_path / "b", 100)
    with pytest.raises(StoreError, match=r"block \(0, 1\) could not be read back .* too early"):
        file.read(Block(0, 1))
    file.remove()


def test_files_are_for_this_user_and_without_a_name_where_none_is_asked(tmp_path: Path) -> None:
    file = made(tmp_path)
    assert (tmp_path / "b").stat().st_mode & 0o077 == 0
    file.remove()
    unnamed = BlockFile(str(tmp_path / "new" / "folder"))
    unnamed.write(Block(0, 0), [np.ones(3)])
    assert unnamed.path is None
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    np.testing.assert_array_equal(unnamed.read(Block(0, 0))[0], 1)
    unnamed.close()


@pytest.mark.parametrize("positioned", [True, False])
def test_a_full_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positioned: bool
) -> None:
    if not positioned:
        monkeypatch.delattr(os, "pwrite")
        monkeypatch.delattr(os, "preadv")
    file = RawFile(str(tmp_path))
    extent = file.append(np.arange(100.0))
    np.testing.assert_array_equal(file.read(extent), np.arange(100.0))

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file, "_write", full)
    with pytest.raises(StoreError, match=r"of 1600 bytes and more .* not enough room; free some"):
        file.append(np.arange(100.0))
    file.close()


def test_a_held_file_is_known_until_its_process_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from daskfactor.data.blockfile import BlockFile\n"
        f"file = BlockFile({str(tmp_path)!r}, 'b'); file.hold()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert BlockFile.held(str(tmp_path / "b"))
    process.kill()
    process.communicate()
    assert not BlockFile.held(str(tmp_path / "b"))
