"""Tools of tests: the quick tier says what it leaves out; rows that stand for a full product."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.pairwise import covering

SUITE = """
import pytest
def test_quick(): pass
@pytest.mark.full
def test_long(): pass
@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.full)])
def test_cases(case): pass
@pytest.mark.quick("a-2")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("text", ["a", "b"])
def test_chosen(text, number): pass
"""
INI = """[pytest]
markers =
    full: of the full tier
    quick: some of its cases
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(INI)

    def run(tier, *options):
        command = [sys.executable, "-m", "pytest", "-p", "tests.tiers", "-v", *options]
        own = {"DASKFACTOR_TIER": tier, "PYTHONPATH": str(Path(__file__).parents[1])}
        options = {"cwd": tmp_path, "env": os.environ | own, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **options)

    return run


def test_the_quick_tier_leaves_marked_tests_out(run):
    """Worker processes collect the tests, and this one tells of them."""
    quick = run("", "-n", "1")
    assert quick.returncode == 0, quick.stdout
    assert "5 tests of the full tier left out; DASKFACTOR_TIER=full runs all" in quick.stdout
    assert "3 passed" in quick.stdout
    assert "test_chosen[a-2]" in quick.stdout


def test_the_full_tier_has_all_and_another_one_is_refused(run):
    full = run("full", "-p", "no:xdist")
    assert full.returncode == 0, full.stdout
    assert "8 passed" in full.stdout
    assert "left out" not in full.stdout
    refused = run("all")
    assert refused.returncode == 4
    match = "DASKFACTOR_TIER is 'all'. Use 'quick', which is the default, or 'full'"
    assert match in refused.stdout + refused.stderr


def test_a_quick_case_that_there_is_not_is_refused(run, tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE.replace("a-2", "2"))
    refused = run("", "-p", "no:xdist")
    assert refused.returncode == 4
    assert "test_suite.py::test_chosen has no cases 2" in refused.stdout + refused.stderr


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3, 4), (3, 2, 2, 2, 3), (4, 4, 4, 4)])
def test_every_two_values_share_a_row_and_rows_are_few(sizes):
    axes = [range(10 * n, 10 * n + size) for n, size in enumerate(sizes)]
    rows = covering(*axes)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(rows) <= 1.6 * first * second
    assert covering(*axes) == rows
