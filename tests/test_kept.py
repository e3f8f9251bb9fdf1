"""What tests keep between sessions is keyed by content, survives damage, and does not grow."""

import ctypes
import os
import shutil
import time
from pathlib import Path

import pytest

from tests import kept
from tests.kernels.cuda import fake
from tests.statistical import exact


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(kept.FOLDER, str(tmp_path))
    return tmp_path


def test_folder_is_the_users_or_the_sessions(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (kept.FOLDER, kept.KERNELS):
        monkeypatch.delenv(name)
    kept.set_up()
    own = tmp_path / "cache" / "daskfactor" / "tests"
    assert os.environ[kept.FOLDER] == str(own)
    assert os.environ[kept.KERNELS] == str(own / "kernels")
    assert own.stat().st_mode & 0o077 == 0  # files are unpickled: nobody else may write one
    kept.set_up()  # as processes of the session do
    assert os.environ[kept.FOLDER] == str(own)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.delenv(kept.FOLDER)
    kept.set_up()
    assert os.environ[kept.FOLDER] != str(own)
    assert Path(os.environ[kept.FOLDER]).is_dir()
    assert os.environ[kept.KERNELS] == str(own / "kernels")  # as it was asked for


def test_names_follow_from_every_part():
    parts = ("a", "b", "c"), ("a", "b", b"d"), ("a", "bc"), ("a", "b", "c", ""), ("b", "b", "c")
    assert len({kept.named(*own) for own in parts}) == 5
    assert kept.named("a", "b", "c") == kept.named("a", b"b", "c")


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_made_again(damage):
    made = []

    def make():
        made.append(1)
        return b"content"

    file = kept.named("things", "one")
    assert [kept.kept(file, make) for _ in range(2)] == [b"content"] * 2
    assert len(made) == 1
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] if damage is None else damage)
    assert kept.kept(file, make) == b"content"
    assert len(made) == 2
    assert file.read_bytes() == whole
    assert list(file.parent.iterdir()) == [file]  # nor anything begun


def test_files_that_nobody_uses_go():
    old, used = kept.named("things", "old"), kept.named("things", "used")
    for file in (old, used):
        kept.write(file, b"content")
        os.utime(file, (time.time() - 31 * kept.DAY,) * 2)
    assert kept.read(used) == b"content"
    kept.sweep()
    assert (old.exists(), used.exists()) == (False, True)


def test_a_posterior_is_kept_for_its_sources_and_arguments(monkeypatch):
    calls = []

    def find(a, b):
        calls.append((a, b))
        return {"sum": a + b}

    assert exact.kept(find)(1.0, 2.0) == exact.kept(find)(1.0, 2.0) == {"sum": 3.0}
    assert calls == [(1.0, 2.0)]
    exact.kept(find)(2.0, 1.0)
    assert calls == [(1.0, 2.0), (2.0, 1.0)]
    monkeypatch.setattr(exact, "_source", lambda: b"another")
    exact.kept(find)(1.0, 2.0)
    assert len(calls) == 3


KERNEL = 'extern "C" __global__ void put(double *out) { out[0] = %s; }'


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles kernels by g++")
def test_libraries_are_kept_for_their_text(folder, monkeypatch):
    def result(constant):
        fake.compiled.cache_clear()  # as in another process
        library, _ = fake.compiled(KERNEL % constant, ())
        out = ctypes.c_double()
        pointer = ctypes.c_void_p(ctypes.addressof(out))
        library.run_put(1, 1, (ctypes.c_void_p * 1)(ctypes.addressof(pointer)))
        return out.value

    assert result("2.5") == 2.5
    (file,) = (folder / "host-kernels").iterdir()
    before = file.stat().st_mtime_ns
    assert result("2.5") == 2.5
    assert file.stat().st_mtime_ns == before
    assert result("3.5") == 3.5  # an edited constant has a name of its own
    assert len(list((folder / "host-kernels").iterdir())) == 2
    monkeypatch.setattr(fake, "_compiler", lambda: "another")
    assert result("2.5") == 2.5
    assert len(list((folder / "host-kernels").iterdir())) == 3
