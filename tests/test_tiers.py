"""The quick tier leaves out what is marked ``full``, and says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
def run(tmp_path: Path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text(INI)

    def run(tier: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.tiers", "-v", *options],
            cwd=tmp_path,
            env=os.environ
            | {"DASKFACTOR_TIER": tier, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_quick_tier_leaves_marked_tests_out(run) -> None:
    """Worker processes collect the tests, and this one tells of them."""
    quick = run("", "-n", "1")
    assert quick.returncode == 0, quick.stdout
    assert "5 tests of the full tier left out; DASKFACTOR_TIER=full runs all" in quick.stdout
    assert "3 passed" in quick.stdout
    assert "test_chosen[a-2]" in quick.stdout


def test_the_full_tier_has_all(run) -> None:
    full = run("full", "-p", "no:xdist")
    assert full.returncode == 0, full.stdout
    assert "8 passed" in full.stdout
    assert "left out" not in full.stdout


def test_a_quick_case_that_there_is_not_is_refused(run, tmp_path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE.replace("a-2", "2"))
    refused = run("", "-p", "no:xdist")
    assert refused.returncode == 4
    assert "test_suite.py::test_chosen has no cases 2" in refused.stdout + refused.stderr


def test_another_tier_is_refused(run) -> None:
    refused = run("all")
    assert refused.returncode == 4
    assert "DASKFACTOR_TIER is 'all'. Use 'quick', which is the default, or 'full'" in (
        refused.stdout + refused.stderr
    )
