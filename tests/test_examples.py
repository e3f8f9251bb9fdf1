"""Every script in ``examples`` runs, at a small size, from an empty directory."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "sensor_gaps.py": ["--weeks", "2", "--draws", "60", "--picture", "picture.png"],
    "ratings.py": ["--components", "6", "--draws", "150", "--picture", "picture.png"],
}


def test_every_example_has_a_small_size_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *SMALL[name]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    share = float(done.stdout.split("90 % intervals:")[1])
    assert 0.85 < share < 0.95, done.stdout
    assert (tmp_path / "picture.png").stat().st_size > 10_000
