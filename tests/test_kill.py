"""Runs that are killed with SIGKILL at random moments go on to the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import FULL

TRIALS = 8 if FULL else 2
"""Runs that are killed three times each, at moments of their own; each takes about five seconds."""


@pytest.mark.slow
def test_killed_runs_end_in_the_bits_of_an_unbroken_one(tmp_path):
    script = Path(__file__).with_name("killing.py")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", script, tmp_path, str(TRIALS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    trials = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(trials) == TRIALS
    assert all(trial["same"] for trial in trials), trials
    assert sum(trial["kills"] for trial in trials) >= TRIALS
    stopped = [draws for trial in trials for draws in trial["draws"]]
    assert any(0 < draws < 600 for draws in stopped), f"no run was killed half-way: {stopped}"
