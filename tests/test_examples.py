"""Every script in ``examples`` runs, at a small size, from an empty directory."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "allocation.py": [
        *("--ranks", "3", "--tensors", "1", "--sizes", "100", "10000", "--total", "2000"),
        *("--picture", "picture.png"),
    ],
    "letters.py": [
        *("--tokens", "150", "--ranks", "1", "2", "--particles", "4096"),
        *("--picture", "picture.png"),
    ],
    "topics.py": [
        *("--topics", "2", "10", "--starts", "2", "--tokens", "60", "--picture", "picture.png"),
    ],
    "sensor_gaps.py": ["--weeks", "2", "--draws", "60", "--picture", "picture.png"],
    "evidence.py": [
        *("--ranks", "3", "--rows", "20", "--columns", "15", "--picture", "picture.png"),
    ],
    "faces_laws.py": [
        *("--missing", "30", "--shrink", "4", "--people", "12", "--components", "12"),
        *("--draws", "30", "--beta", "0.5", "--picture", "picture.png"),
    ],
    "mixing.py": [
        *("--rows", "24", "32", "--draws", "40", "--laws", "Poisson"),
        *("--picture", "picture.png"),
    ],
    "piano.py": [
        *("--seconds", "1", "--components", "4", "--draws", "20"),
        *("--picture", "picture.png"),
    ],
    "ratings.py": ["--components", "6", "--draws", "150", "--picture", "picture.png"],
    "speech.py": [
        *("--seconds", "1", "--rate", "8000", "--ranks", "2", "5", "--snr", "5"),
        *("--temperatures", "4", "--draws", "10", "--picture", "picture.png"),
    ],
}


def covers(printed: str) -> None:
    share = float(printed.split("90 % intervals:")[1])
    assert 0.85 < share < 0.95


def finds_the_exact_peak(printed: str) -> None:
    assert "power ladder: largest at R = 3, the exact curve at R = 3" in printed


def compares_claims(printed: str) -> None:
    assert "The paper's claims" in printed


def agrees_on_notes(printed: str) -> None:
    rows = re.findall(r"^(LD|PSGLD.*?)\s\s+(.*)$", printed, re.M)
    found = {name: [float(value) for value in values.split()] for name, values in rows}
    density = found["LD"][1]
    for name in ("PSGLD", "PSGLD, exact", "PSGLD, other start"):
        assert found[name][1] > density - 0.025 * abs(density), name
        assert found[name][3] > 0.9, name  # cosine of the dictionaries, in the median
    assert min(found["PSGLD"][4], found["PSGLD, exact"][4]) > 0.8  # and at worst


def larger_dictionary_wins(printed: str) -> None:
    rows = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert float(rows["5"][1]) > float(rows["2"][1])  # log evidence
    assert float(rows["5"][4]) > float(rows["2"][4]) + 0.5  # SDR in dB
    assert "they agree" in printed


def finds_the_rank_that_the_bound_misses(printed: str) -> None:
    assert (
        "the exact evidence is largest at rank 2, that of particles at 2, the bound at 1" in printed
    )
    assert "right or tied within their errors in 1 of 1" in printed


def prefers_two_tables(printed: str) -> None:
    one, two = (line.split() for line in re.findall(r"^ +[12] .*$", printed, re.M))
    assert float(one[0 + 1]) == float(one[4])  # one component: the bound is the evidence
    assert float(two[1]) > float(two[4])  # and below it with two
    assert float(two[1]) > float(two[5])  # first and second letters differ
    assert float(one[1]) < float(one[5])  # where nothing tells letters apart, one table is enough


def finds_topics_of_python(printed: str) -> None:
    bounds = [float(line.split()[1]) for line in re.findall(r"^ +\d+ +-\d+ .*$", printed, re.M)]
    assert bounds[1] > bounds[0] + 1000  # ten topics rather than two
    assert re.search(r"\b(import|module|namespace)\b", printed)


CHECKS: dict[str, Callable[[str], None]] = {
    "allocation.py": finds_the_rank_that_the_bound_misses,
    "letters.py": prefers_two_tables,
    "topics.py": finds_topics_of_python,
    "evidence.py": finds_the_exact_peak,
    "faces_laws.py": covers,
    "mixing.py": compares_claims,
    "piano.py": agrees_on_notes,
    "ratings.py": covers,
    "sensor_gaps.py": covers,
    "speech.py": larger_dictionary_wins,
}
"""What an example must have printed."""


def test_every_example_has_a_small_size_and_a_check_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALL) == set(CHECKS)


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
    CHECKS[name](done.stdout)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
