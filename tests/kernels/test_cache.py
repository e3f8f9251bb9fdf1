"""Where compiled kernels are kept, what names them, and what may go wrong with a folder."""

import os
import subprocess
import sys
import time
from errno import ENOSPC
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

from daskfactor.errors import OptionError
from daskfactor.kernels import cache, polynomials
from daskfactor.kernels.cache import KernelCache, cache_folder, description, sweep
from daskfactor.kernels.jit import jit, overload
from tests.kernels.test_compiler_modes import ROOT, printed
from tests.refusals import refused


@pytest.fixture
def settings(monkeypatch):
    """Set the variables that say where kernels are kept, and no others of them."""

    def say(**wanted):
        for name in ("DASKFACTOR_JIT_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(numba.config, "CACHE_DIR", wanted.pop("NUMBA_CACHE_DIR", ""))
        for name, value in wanted.items():
            monkeypatch.setenv(name, value)
        return cache_folder()

    return say


def test_folder_is_the_first_that_is_named(settings, tmp_path):
    home = {"HOME": str(tmp_path)}
    assert settings(**home) == tmp_path / ".cache/daskfactor/kernels"
    assert settings(**home, DASKFACTOR_JIT_CACHE="1") == settings(**home)
    assert settings(**home, XDG_CACHE_HOME="relative") == settings(**home)
    assert settings(XDG_CACHE_HOME="/xdg") == Path("/xdg/daskfactor/kernels")
    numba_too = {"NUMBA_CACHE_DIR": "/numba", "XDG_CACHE_HOME": "/xdg"}
    assert settings(**numba_too) == Path("/numba/daskfactor")
    assert settings(**numba_too, DASKFACTOR_JIT_CACHE="/own") == Path("/own")
    assert settings(**home, DASKFACTOR_JIT_CACHE="~/own") == tmp_path / "own"
    assert settings(**numba_too, DASKFACTOR_JIT_CACHE="0") is None


def test_folder_is_none_of_a_user_without_a_home(settings, monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert settings() is None
    assert settings(DASKFACTOR_JIT_CACHE="1") is None
    assert settings(XDG_CACHE_HOME="/xdg") == Path("/xdg/daskfactor/kernels")


@pytest.mark.parametrize("said", ["off", "kernels", "./here"])
def test_a_relative_folder_is_refused(settings, said):
    words = r"DASKFACTOR_JIT_CACHE is .* 0 .* 1 .* absolute path"
    refused(OptionError, words, settings, DASKFACTOR_JIT_CACHE=said)


def kernel(folder):
    """A small kernel that is kept in a folder."""

    def double(x):
        return 2 * x

    made = jit(double)
    made._cache = KernelCache(made, folder)
    return made


def hits(made):
    return sum(made.stats.cache_hits.values())


def test_a_kernel_is_kept_once_and_loaded(tmp_path):
    folder = tmp_path / "not" / "there"
    first, second = kernel(folder), kernel(folder)
    assert (first(1), second(1), hits(first), hits(second)) == (2, 2, 0, 1)
    assert len(list(folder.glob("double-*.nbc"))) == 1
    assert folder.stat().st_mode & 0o077 == 0  # files are unpickled: nobody else may write one
    assert second(1.0) == 2.0
    assert hits(second) == 1
    assert len(list(folder.glob("double-*.nbc"))) == 2


def full_disk(monkeypatch):
    def write(self, data):
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)


def read_only(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("Permission denied")

    for name in ("write_bytes", "mkdir", "touch", "unlink", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "utime", refuse)


@pytest.mark.parametrize("trouble", [full_disk, read_only])
def test_a_folder_that_cannot_be_written_is_left_as_it_is(tmp_path, monkeypatch, trouble):
    assert kernel(tmp_path)(1) == 2
    (file,) = tmp_path.glob("*.nbc")
    os.utime(file, (0, 0))
    with monkeypatch.context() as context:
        trouble(context)
        made = kernel(tmp_path)
        assert (made(1), hits(made)) == (2, 1)  # what is there is read
        assert (made(1.0), hits(made)) == (2.0, 1)
    assert [path.name for path in tmp_path.iterdir() if path.name != cache.SWEPT] == [file.name]


def test_what_is_no_folder_is_as_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    made = kernel(tmp_path / "file" / "below")
    assert (made(1), made(1.0)) == (2, 2.0)


def test_damage_within_a_good_file_is_as_no_file(tmp_path):
    """A file whose checksum holds, written by something else."""
    kernel(tmp_path)(1)
    (file,) = tmp_path.glob("*.nbc")
    for content in (b"", b"no pickle", b"cmissing_module\nname\n."):
        file.write_bytes(sha256(content).digest() + content)
        made = kernel(tmp_path)
        assert (made(1), hits(made)) == (2, 0)
        again = kernel(tmp_path)
        assert (again(1), hits(again)) == (2, 1)


def test_description_follows_overloads_modules_and_defaults(monkeypatch):
    def base():
        return 1

    maths = polynomials

    def uses(x, scale=1.0):
        return maths.log(x) * base() * scale

    plain = description(jit(uses))
    assert description(jit(uses)) == plain
    with monkeypatch.context() as context:
        context.setattr(polynomials, "log", polynomials.split)
        assert description(jit(uses)) != plain
    # What compiled code of polynomials.log calls in the place of a Python function.
    with monkeypatch.context() as context:
        context.setitem(cache.OVERLOADS, polynomials.split, (polynomials.log_tail, {}))
        assert description(jit(uses)) != plain
    overload(base)(lambda: lambda: 2)
    with_overload = description(jit(uses))
    assert with_overload != plain
    uses.__defaults__ = (2.0,)
    assert description(jit(uses)) != with_overload


EDITED = """
import numpy as np
from numba import types
from numba.extending import intrinsic
from daskfactor.kernels import polynomials
from daskfactor.kernels.jit import inline, jit
SCALE = 2.0
TABLE = np.array([2.0, 3.0])
class Builder:
    number = 2.0
    def load(self, context):
        return context.get_constant(types.float64, 2.0)
Builder.__module__ = "daskfactor.kernels.edited"
@intrinsic
def generated(typingctx):
    return types.float64(), lambda context, builder, signature, args: Builder().load(context)
@inline
def called(x):
    return x * 2.0
def made(factor):
    def closure(x):
        return factor * x
    return jit(closure)
def literal(x):
    return x * 2.0
def of_global(x):
    return x * SCALE
def of_table(x):
    return x * TABLE[0]
def of_call(x):
    return called(x)
def of_default(x, by=2.0):
    return x * by
def of_generated(x):
    return x * generated()
for function in (literal, of_global, of_table, of_call, of_default, of_generated):
    print(function.__name__, jit(function)(1.5))
print("closure", made(2.0)(1.5))
"""
EDITS = {
    "literal": ("def literal(x):\n    return x * 2.0", "def literal(x):\n    return x * 4.0"),
    "of_global": ("SCALE = 2.0", "SCALE = 4.0"),
    "of_table": ("[2.0, 3.0]", "[4.0, 3.0]"),
    "of_call": ("def called(x):\n    return x * 2.0", "def called(x):\n    return x * 4.0"),
    "of_default": ("by=2.0", "by=4.0"),
    "of_generated": ("types.float64, 2.0", "types.float64, 4.0"),
    "closure": ("made(2.0)", "made(4.0)"),
}
"""Kernels of this script, and an edit of the constant that each one depends on."""


def test_a_kernel_whose_constant_is_edited_has_a_name_of_its_own(tmp_path):
    folder, script = tmp_path / "kernels", tmp_path / "edited.py"

    def results(text):
        script.write_text(text)
        return printed(script, DASKFACTOR_JIT_CACHE=str(folder)).split("\n")[:-1]

    def names():
        return sorted(file.name.rpartition("-")[0] for file in folder.glob("*.nbc"))

    edited = EDITED
    for edit in EDITS.values():
        assert edit[0] in edited
        edited = edited.replace(*edit)
    assert results(EDITED) == [f"{name} 3.0" for name in EDITS]
    before = names()
    assert set(EDITS) < set(before)
    assert results(edited) == [f"{name} 6.0" for name in EDITS]
    assert names() == sorted(before * 2)  # each is there twice


def test_description_tells_functions_of_one_name_apart():
    def helper(scale):
        def same(x):
            return x * scale

        return jit(same)

    one, two = helper(1.0), helper(2.0)

    def uses(first, second):
        def kernel(x):
            return one(x) + two(x) + first(x) - second(x)

        return jit(kernel)

    assert description(uses(one, two)) != description(uses(two, one))


def test_description_is_the_same_in_every_process():
    """Sets of strings change their order with the hash seed of a process."""
    code = (
        "from daskfactor.kernels.cache import description\n"
        "from daskfactor.kernels.jit import jit\n"
        "def ask(x): return x in {'a', 'b', 'c', 'd', 'e'}\n"
        "print(description(jit(ask)))"
    )
    seen = {printed("-c", code, PYTHONHASHSEED=seed) for seed in "12"}
    assert len(seen) == 1


def test_what_has_no_description_is_compiled_and_not_kept(tmp_path):
    strange = SimpleNamespace(at=object())

    def uses(x):
        return x if strange is None else 2 * x

    refused(TypeError, "no description that holds in another process", description, jit(uses))


def aged(folder, name, age, size=1):
    file = folder / name
    file.write_bytes(bytes(size))
    os.utime(file, (time.time() - age,) * 2)
    return file


DAY = 24 * cache.HOUR


def test_sweep_removes_what_is_unused_begun_or_too_much(tmp_path):
    old, used = aged(tmp_path, "a.nbc", 31 * DAY), aged(tmp_path, "b.nbc", 29 * DAY)
    begun, killed = aged(tmp_path, "c.1f", 10), aged(tmp_path, "c.2f", 2 * cache.HOUR)
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([used, begun, tmp_path / cache.SWEPT])
    assert not old.exists()
    assert not killed.exists()
    old = aged(tmp_path, "a.nbc", 31 * DAY)
    sweep(tmp_path)
    assert old.exists()  # once an hour
    os.utime(tmp_path / cache.SWEPT, (0, 0))
    new, newer = aged(tmp_path, "d.nbc", 2, 60), aged(tmp_path, "e.nbc", 1, 60)
    sweep(tmp_path, most=100)
    assert sorted(tmp_path.glob("*.nbc")) == [newer]
    assert not new.exists()


def test_what_is_used_stays(tmp_path):
    kernel(tmp_path)(1)
    (file,) = tmp_path.glob("*.nbc")
    os.utime(file, (0, 0))
    kernel(tmp_path)(1)
    os.utime(tmp_path / cache.SWEPT, (0, 0))
    sweep(tmp_path)
    assert file.exists()


AT_ONCE = """
import sys, time
import numpy as np
from daskfactor.kernels.cache import cache_folder, sweep
from daskfactor.kernels.jit import jit
def made(k):
    def double(x):
        return k * x
    return jit(double)
while time.time() < float(sys.argv[1]):
    pass
for k in range(8):
    assert made(k)(3) == 3 * k
    (cache_folder() / "swept").unlink(missing_ok=True)
    sweep(cache_folder(), unused=0.0)  # under the others, as rudely as can be
"""


def test_processes_write_read_and_remove_at_once(tmp_path):
    environment = os.environ | {"PYTHONPATH": ROOT, "DASKFACTOR_JIT_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", AT_ONCE, str(time.time() + 2)]
    how = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **how) for _ in range(3)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert not [file for file in tmp_path.iterdir() if file.suffix not in ("", ".nbc")]
    for file in tmp_path.glob("*.nbc"):
        kept = file.read_bytes()
        assert sha256(kept[32:]).digest() == kept[:32]


MAIN_PATH = """
import numpy as np, scipy.sparse
from numba.core import event
import daskfactor as dfac
V = np.random.default_rng(0).poisson(3.0, (30, 20))
settings = {"draws": 2, "tune": 2, "progressbar": False}
with event.install_recorder("numba:compile") as compiled:
    for data in (V, scipy.sparse.csr_array(V)):
        dfac.sample(data, dfac.TweedieNMF(2, beta=1.0), **settings)
        dfac.sample(data, dfac.TweedieNMF(2, beta=1.0), dfac.PSGLD(), **settings)
    dfac.sample(V.astype(float), dfac.GaussianMF(2), **settings)
print(sorted({str(each.data["dispatcher"]) for _, each in compiled.buffer}))
"""


@pytest.mark.full
def test_a_second_process_compiles_nothing():
    first, second = (printed("-c", MAIN_PATH, PYTHONWARNINGS="ignore") for _ in range(2))
    assert second == "[]\n", first
