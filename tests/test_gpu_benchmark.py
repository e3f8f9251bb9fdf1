"""Rows of `benchmarks/gpu.py`, on kernels that are compiled for processors: no figure of a GPU."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu
from daskfactor.errors import OptionError
from daskfactor.kernels import philox
from daskfactor.kernels.cuda import device, steps

ROOT = Path(__file__).parents[1]
TINY = gpu.Sizes(
    dense=(64, 40, 5),
    sparse=(200, 60, 5),
    components=(3,),
    part=4,
    cycles=2,
    iterations=32,
    pixels=46,
    streamed=(96, 64, 4),
    numbers=20_000,
    draws=6,
    ratings=20_000,
    rating_draws=6,
    updates=16,
    new=(24, 12, 2),
    new_draws=2,
    repeats=1,
)


@pytest.mark.slow
@pytest.mark.parametrize("row", gpu.ROWS)
def test_every_row_is_printed(row, stand_in, capsys):
    assert gpu.main(["--only", row], TINY) == 0
    title, *lines, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("no GPU")
    assert lines
    assert all(line.startswith(row) for line in lines)


def test_bits_that_differ_are_counted(monkeypatch):
    class Here:
        def empty(self, shape, dtype):
            return np.empty(shape, dtype)

        def take(self, array):
            return array

    def off_by_two(out, *address):
        philox.fill_normals(out, *address)
        out.view(np.int32)[0, :3] += 2

    monkeypatch.setattr(steps, "fill_normals", off_by_two)
    assert gpu.differences(Here(), "float32", 640) == {0: 637, 2: 3}


def test_rows_that_fail_do_not_end_the_table(stand_in, monkeypatch, capsys):
    def broken(given, sizes):
        raise RuntimeError("out of order")

    monkeypatch.setitem(gpu.ROWS, "a", broken)
    monkeypatch.setitem(gpu.ROWS, "b", lambda *_: iter([gpu.at_least("speed", 2.0, 1.0)]))
    assert gpu.main(["--only", "a,b"], TINY) == 1
    told = capsys.readouterr().out
    assert "RuntimeError: out of order" in told
    assert "speed" in told


def test_without_a_gpu_it_says_so_and_exits_with_2(monkeypatch, capsys):
    def none():
        raise OptionError("there is no GPU")

    monkeypatch.setattr(device, "current", none)
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == "nothing was measured: there is no GPU\n"


def test_the_command_has_help():
    command = [sys.executable, "-m", "benchmarks.gpu", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "--only" in done.stdout
