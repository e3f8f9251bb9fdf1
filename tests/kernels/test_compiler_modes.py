"""The kernels under other compiler settings: JIT off, bounds checked, cached on disk."""

import json
import os
import subprocess
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import daskfactor
from daskfactor.kernels.jit import jit, jit_inner
from tests.kernels.small_run import all_results
from tests.refusals import refused

SCRIPT = Path(__file__).with_name("small_run.py")
ROOT = str(Path(daskfactor.__file__).parents[1])


def printed(*arguments, **settings):
    """The words that an interpreter of its own prints under these environment variables."""
    how = {"env": os.environ | {"PYTHONPATH": ROOT} | settings, "timeout": 300}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        ("all", {"NUMBA_DISABLE_JIT": "1"}),
        ("indexed", {"NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "0"}),
    ],
    ids=["no JIT", "bounds checked"],
)
def test_same_results(tmp_path, wanted, settings):
    printed(SCRIPT, tmp_path / "found.npz", wanted, **settings)
    other, plain = dict(np.load(tmp_path / "found.npz")), all_results()
    assert other.keys() <= plain.keys()
    assert len(other) == len(plain) or wanted == "indexed"
    for name, found in other.items():
        value, close = plain[name], 1e-4 if name.endswith("float32") else 1e-10
        close = 0 if name.startswith("exact/") else close
        least = close * np.abs(value).max()
        np.testing.assert_allclose(found, value, rtol=close, atol=least, err_msg=name)


def test_bounds_checks_are_on(tmp_path):
    code = (
        "import numpy as np; from daskfactor.kernels.langevin import accumulate_moments as a;"
        "a(np.ones((2, 2)), 1, np.ones((1, 2)), np.ones((1, 2)))"
    )
    settings = {"NUMBA_BOUNDSCHECK": "1", "DASKFACTOR_JIT_CACHE": "0"}
    refused(AssertionError, "IndexError", printed, "-c", code, **settings)


def test_python_cannot_call_an_inner_function():
    """Without the refusal a call would jump to the address 0, once the function is compiled."""

    @jit_inner
    def twice(x):
        return 2 * x

    @jit
    def outer(x):
        return twice(x)

    for _ in range(2):
        refused(TypeError, "compiled functions", twice, 1.0)
        assert outer(1.0) == 2.0


@pytest.mark.parametrize("case", ["optimize/descent/0.5/ratings float64"])
def test_bits_do_not_depend_on_what_the_cache_holds(tmp_path, case):
    """In the second process nothing is compiled, so that kernels have no others to call."""
    for name in ("empty", "kept"):
        words = "-m", "tests.fingerprints", "write", tmp_path / name, "--only", case
        printed(*words, DASKFACTOR_JIT_CACHE=str(tmp_path / "kernels"))
    empty, kept = (json.loads((tmp_path / name).read_text()) for name in ("empty", "kept"))
    assert empty["cases"]
    assert empty["cases"] == kept["cases"]


CLOSURES = """
import sys
import numpy as np
from daskfactor.kernels.sparse import accumulation
from daskfactor.kernels.views import NO_WEIGHTS, Workspace
from daskfactor.models.tweedie_law import Tweedie
for K in (int(text) for text in sys.argv[1:]):
    W, H = np.full((2, K), 0.7), np.full((3, K), 0.4)
    indptr, columns = np.array([0, 1, 3], np.int32), np.array([0, 1, 2], np.uint16)
    block = indptr, (columns,), np.arange(1.0, 4.0), NO_WEIGHTS
    space = Workspace()
    out = space.gradients((2, 3), K, np.float64)
    for own in out:
        own[:] = 0
    kernel = accumulation(Tweedie(1.0), True, 2, K, False, "score", None, False)
    sums = out, out, np.empty(0)
    kernel(block, (W, H), 1.0, (1e-6, ()), sums, space.sums(2, K, 0, np.float64))
    print(K, *(own.tolist() for own in out))
"""


def test_disk_cache_tells_closures_apart_that_processes_named_alike(tmp_path):
    """Both K are the first kernel of their process, and meet in a third one."""
    of = partial(printed, "-c", CLOSURES, DASKFACTOR_JIT_CACHE=str(tmp_path))
    five, eight = of(5), of(8)
    kept = sorted(tmp_path.rglob("*.nbc"))
    assert of(5, 8) == five + eight
    assert sorted(tmp_path.rglob("*.nbc")) == kept  # nothing was compiled again


TABLE = """
import sys
import numpy as np
from daskfactor.kernels.jit import jit
def looks_up(value):
    table = np.zeros(2000)
    table[1000] = value
    def look(i):
        return scale * table[i]
    return jit(look)
for value, scale in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0)):
    print(looks_up(value)(1000))
"""


def test_disk_cache_outlives_damage_and_tells_tables_and_globals_apart(tmp_path):
    script, cache = tmp_path / "table.py", tmp_path / "cache"
    script.write_text(TABLE)

    def look():
        return printed(script, DASKFACTOR_JIT_CACHE=str(cache)).split()

    assert look() == ["1.0", "2.0", "3.0"]
    kept = sorted(cache.rglob("*.nbc"))
    assert len(kept) == 3
    good = [file.read_bytes() for file in kept]
    for file, data in zip(kept, (b"", good[1][:-1], good[2][::-1]), strict=True):
        file.write_bytes(data)
    assert look() == ["1.0", "2.0", "3.0"]
    for file in kept:
        assert file.read_bytes()[:32] == sha256(file.read_bytes()[32:]).digest()
    folder = kept[0].parent
    assert sorted(folder.glob("*-*")) == kept  # nor anything begun
    for file in kept:
        file.unlink()
        file.mkdir()  # nothing can be read or written under this name
    assert look() == ["1.0", "2.0", "3.0"]
    assert sorted(folder.glob("*-*")) == kept
