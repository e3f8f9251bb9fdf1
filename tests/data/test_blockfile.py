"""Files of arrays: what was written comes back, in the process and in others."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskfactor.data.storage import OLD, PREFIX, ArrayFile, sweep
from daskfactor.errors import StoreError

ARRAYS = st.lists(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int32, np.uint16]),
        hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9),
    ),
    max_size=3,
)


@given(st.lists(ARRAYS, min_size=1, max_size=4))
def test_arrays_come_back(groups):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = ArrayFile(folder, named=True)
        file.append(np.ones(1))  # an empty file cannot be mapped
        extents = [[file.append(array) for array in arrays] for arrays in groups]
        opened = ArrayFile(path=file.path)
        for arrays, places in zip(groups, extents, strict=True):
            if not places:
                continue
            again = file.read(places, again=True)
            ways = (file.read(places), opened.read(places), again, opened.map(places))
            for way in ways:
                for array, found in zip(arrays, way, strict=True):
                    np.testing.assert_array_equal(found, array)
                    assert found.dtype == array.dtype
                    assert found.flags.writeable
                    assert found.flags.aligned
                    assert found.flags.c_contiguous
        opened.close()
        file.remove()
        assert not any(Path(folder).iterdir())


def made(folder):
    file = ArrayFile(str(folder), named=True)
    first = [file.append(np.arange(10.0)), file.append(np.arange(3, dtype="uint16"))]
    return file, first, [file.append(np.ones(5000))]


def test_writing_to_a_mapped_array_changes_nothing(tmp_path):
    file, first, _ = made(tmp_path)
    opened = ArrayFile(path=file.path)
    mapped = opened.map(first)[0]
    mapped[:] = -1
    np.testing.assert_array_equal(file.read(first)[0], np.arange(10.0))
    opened.close()
    file.remove()
    np.testing.assert_array_equal(mapped, -1)  # mapped pages outlive the file


def test_memory_is_new_or_of_the_thread(tmp_path):
    file, first, second = made(tmp_path)
    own = file.read(second, again=True)[0]
    assert np.shares_memory(own, file.read(first, again=True)[0])
    assert not np.shares_memory(own, file.read(first)[0])
    found = []
    thread = threading.Thread(target=lambda: found.extend(file.read(first, again=True)))
    thread.start()
    thread.join()
    assert not np.shares_memory(own, found[0])
    file.remove()


def test_a_file_that_shrinks_is_noticed(tmp_path):
    file, _, second = made(tmp_path)
    os.truncate(file.path, 100)
    with pytest.raises(StoreError, match="ends too early, at byte"):
        file.read(second)
    file.remove()


def test_files_are_for_this_user_and_without_a_name_where_none_is_asked(tmp_path):
    file, _, _ = made(tmp_path)
    assert Path(file.path).stat().st_mode & 0o077 == 0
    file.remove()
    unnamed = ArrayFile(str(tmp_path / "new" / "folder"))
    extent = unnamed.append(np.ones(3))
    assert unnamed.path == ""
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    np.testing.assert_array_equal(unnamed.read([extent])[0], 1)
    unnamed.close()


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    file = ArrayFile(str(tmp_path))
    extent = file.append(np.arange(100.0))
    np.testing.assert_array_equal(file.read([extent])[0], np.arange(100.0))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=r"of 1632 or more bytes .* not enough room; free some"):
        file.append(np.arange(100.0))
    file.close()


def test_what_a_killed_process_left_is_swept_away_and_nothing_before(tmp_path):
    code = (
        "import sys; from daskfactor.data.storage import ArrayFile\n"
        f"file = ArrayFile({str(tmp_path)!r}, named=True)\n"
        "print(file.path, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.parent == tmp_path
    assert path.name.startswith(PREFIX)
    long_ago = time.time() - 2 * OLD
    os.utime(path, (long_ago, long_ago))
    sweep(str(tmp_path))
    assert path.exists()  # held
    process.kill()
    process.communicate()
    os.utime(path)
    sweep(str(tmp_path))
    assert path.exists()  # too young
    os.utime(path, (long_ago, long_ago))
    sweep(str(tmp_path))
    assert not path.exists()
