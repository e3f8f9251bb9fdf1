"""The board of benchmarks: its lines, its file and its page; and lines of GPUs on a stand-in."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import gpu, harness, page
from benchmarks.__main__ import TABLES
from benchmarks.harness import Figure, Line, Run
from daskfactor.errors import OptionError
from daskfactor.kernels import langevin, steps
from daskfactor.kernels.cuda import device

ROOT = Path(__file__).parents[1]
WHERE = {"machine": {"cores": 2}, "versions": {"numpy": "2"}}
SHAPES = {"dense": (64, 40, 5), "sparse": (200, 60, 5), "streamed": (96, 64, 4), "new": (24, 12, 2)}
RUNS = {"cycles": 2, "iterations": 32, "draws": 6, "rating_draws": 6, "updates": 16, "new_draws": 2}
SIZES = {"components": (3,), "part": 4, "pixels": 46, "numbers": 20_000, "ratings": 20_000}
TINY = gpu.Sizes(**SHAPES, **RUNS, **SIZES, repeats=1)
OF_GPUS = [name for name in harness.LINES if name.startswith("gpu.")]


def made(name, measure, **options):
    usual = {"peer": "", "goal": "", "needs": (), "minutes": 0.1, "long": False}
    return Line(f"table.{name}", name, measure=measure, **(usual | options))


@pytest.fixture(scope="module")
def every_line():
    for table in TABLES:
        importlib.import_module(f"benchmarks.{table}")
    return harness.LINES


def test_the_page_is_what_the_board_gives_and_has_every_line(every_line):
    command = "run  python -m benchmarks.page"
    assert page.PAGE.read_text(encoding="utf-8") == page.render(harness.load_board()), command
    assert set(harness.load_board()["lines"]) <= set(every_line)
    text = page.PAGE.read_text(encoding="utf-8")
    assert set(TABLES) == set(page.TITLES)
    for name, one in every_line.items():
        assert one.work in text, name


def test_a_figure_that_is_measured_again_is_written_anew(every_line):
    board = harness.load_board(Path("nowhere"))
    one = every_line["near_end.new_machine"]
    line = made("new_machine", lambda run: Figure(12.345), goal="<= 12")
    entries = harness.measure(line, Run())
    harness.merge(board, one.name, entries, {"machine": harness.machine(), "versions": {}})
    text = page.render(board)
    assert "12.3 s" in text
    assert "≤ 12, not met" in text


def test_a_ratio_of_more_than_one_is_better():
    assert Figure(2.0, "s", 6.0).ratio == 3.0
    assert Figure(6.0, "draws/s", 2.0, better="more").ratio == 3.0
    assert Figure(2.0).ratio is None


def test_goals_are_of_ours_or_of_the_ratio_which_needs_a_peer(every_line):
    goals = {"": None, "<= 2": True, "<= 1.9": False, ">= 2.1": False, "ratio >= 3": True}
    assert {goal: Figure(2.0, "s", 6.0).reaches(goal) for goal in goals} == goals
    assert Figure(2.0).reaches("ratio >= 1") is None
    for one in every_line.values():  # all can be read
        assert (Figure(1.0, "s", 1.0).reaches(one.goal) is None) is (not one.goal)


def test_a_run_of_some_lines_leaves_the_others(tmp_path):
    path = tmp_path / "board.json"
    board = harness.load_board(path)
    harness.merge(board, "table.kept", [{"ours": 1.0}], WHERE)
    harness.merge(board, "table.again", [{"ours": 1.0}], WHERE)
    harness.save_board(board, path)
    run = Run(size="usual")
    again = [made("again", lambda run: [Figure(2.0, what="a"), Figure(3.0, what="b")])]
    assert harness.run_lines(again, run, harness.load_board(path), path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["lines"]["table.kept"] == [{"ours": 1.0, "machine": "1"}]
    entries = found["lines"]["table.again"]
    assert [entry["ours"] for entry in entries] == [2.0, 3.0]
    assert set(found["machines"]) == {"1", "2"}
    assert found["machines"]["2"]["versions"]["numpy"] == np.__version__
    assert all(entry["date"] and entry["commit"] and entry["machine"] == "2" for entry in entries)
    harness.merge(found, "table.kept", [{"ours": 1.0}], found["machines"]["2"])
    assert set(found["machines"]) == {"2"}


def test_a_line_that_fails_does_not_end_the_others(tmp_path, capsys):
    def broken(run):
        raise RuntimeError("out of order")

    def absent(run):
        raise harness.Skip("there is no moon")

    lines = [made("broken", broken), made("absent", absent), made("good", lambda run: Figure(1.0))]
    path = tmp_path / "board.json"
    assert not harness.run_lines(lines, Run(), {"machines": {}, "lines": {}}, path)
    told = capsys.readouterr().out
    assert "RuntimeError: out of order" in told
    assert "left out: there is no moon" in told
    assert list(json.loads(path.read_text())["lines"]) == ["table.good"]


def test_a_peer_that_is_not_installed_is_said_to_be_missing(monkeypatch, capsys):
    monkeypatch.setitem(harness.PEERS, "no_such_peer", "pip install no-such-peer")

    def alone(run):
        return Figure(1.0, "s", 2.0 if run.has("no_such_peer") else None)

    lines = [made("alone", alone, goal="ratio >= 4"), made("all", alone, needs=("no_such_peer",))]
    assert harness.run_lines(lines, Run(), {"machines": {}, "lines": {}}, None)
    told = capsys.readouterr().out
    assert "no_such_peer: missing" in told
    assert "no_such_peer is missing: pip install no-such-peer" in told
    assert "left out: no_such_peer not installed" in told
    assert "NOT MET" not in told


def test_the_command_lists_its_lines():
    command = [sys.executable, "-m", "benchmarks", "--list", "--only", "near_end"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "near_end.select_rank" in done.stdout
    assert "kernels.dense" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_GPUS)
def test_every_line_of_a_gpu_is_measured(name, stand_in, monkeypatch):
    monkeypatch.setitem(gpu.SIZES, "quick", TINY)
    entries = harness.measure(harness.LINES[name], Run(size="quick"))
    assert entries
    assert all(np.isfinite(entry["ours"]) for entry in entries)


def test_bits_that_differ_are_counted(monkeypatch):
    def off_by_two(out, *address):
        langevin.fill_normals(out, *address)
        out.view(np.int32)[0, :3] += 2

    monkeypatch.setattr(steps, "fill_normals", off_by_two)
    here = SimpleNamespace(empty=np.empty, take=np.asarray)
    assert gpu.differences(here, "float32", 640) == {0: 637, 2: 3}


def test_without_a_gpu_its_lines_are_left_out(monkeypatch, capsys):
    def none():
        raise OptionError("there is no GPU")

    monkeypatch.setattr(device, "current", none)
    lines = [harness.LINES[name] for name in OF_GPUS]
    assert harness.run_lines(lines, Run(size="quick"), {"machines": {}, "lines": {}}, None)
    assert capsys.readouterr().out.count("left out: there is no GPU") == len(OF_GPUS)
