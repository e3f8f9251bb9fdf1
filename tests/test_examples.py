"""Every script in ``examples`` runs, at a small size, from an empty directory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
CHECKS = {}
"""Options that make an example small, and a check of what it printed."""


def example(name, options):
    def known(check):
        CHECKS[name] = options, check
        return check

    return known


@example("sensor_gaps.py", "--weeks 2 --draws 60")
@example("ratings.py", "--components 6 --draws 150")
@example(
    "faces_laws.py", "--missing 30 --shrink 4 --people 12 --components 12 --draws 30 --beta 0.5"
)
def covers(printed):
    share = float(printed.split("90 % intervals:")[1])
    assert 0.85 < share < 0.95


@example("evidence.py", "--ranks 3 --rows 16 --columns 12")
def finds_the_exact_peak(printed):
    assert "power ladder: maximum at R = 3, exact maximum at R = 3" in printed


@example("mixing.py", "--rows 16 24 --draws 20 --laws Poisson")
def compares_claims(printed):
    assert "The paper's claims" in printed


@example("piano.py", "--seconds 1 --components 4 --draws 10")
def agrees_on_notes(printed):
    rows = re.findall(r"^(LD|PSGLD.*?)\s\s+(.*)$", printed, re.M)
    found = {name: [float(value) for value in values.split()] for name, values in rows}
    density = found["LD"][1]
    for name in ("PSGLD", "PSGLD, other start"):
        assert found[name][1] > density - 0.025 * abs(density), name
        assert found[name][3] > 0.9, name  # cosine of the dictionaries, in the median
    assert found["PSGLD"][4] > 0.8  # and at worst


@example("speech.py", "--seconds 1 --rate 8000 --ranks 2 5 --snr 5 --temperatures 4 --draws 10")
def larger_dictionary_wins(printed):
    rows = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert float(rows["5"][1]) > float(rows["2"][1])  # log evidence
    assert float(rows["5"][4]) > float(rows["2"][4]) + 0.5  # SDR in dB
    assert "they agree" in printed


@example("allocation.py", "--ranks 3 --tensors 1 --sizes 100 10000 --total 2000")
def finds_the_rank_that_the_bound_misses(printed):
    ranks = (
        "the largest exact evidence is at rank 2, that of particles at 2, the largest bound at 1"
    )
    assert ranks in printed
    assert "correct or tied within errors in 1 of 1" in printed


@example("letters.py", "--tokens 200 --ranks 1 2 --particles 2048")
def prefers_two_tables(printed):
    one, two = (line.split() for line in re.findall(r"^ +[12] .*$", printed, re.M))
    assert float(one[0 + 1]) == float(one[4])  # one component: the bound is the evidence
    assert float(two[1]) > float(two[4])  # and below it with two
    assert float(two[1]) > float(two[5])  # first and second letters differ
    assert float(one[1]) < float(one[5])  # where nothing tells letters apart, one table is enough


@example("topics.py", "--topics 2 10 --starts 2 --tokens 60")
def finds_topics_of_python(printed):
    bounds = [float(line.split()[1]) for line in re.findall(r"^ +\d+ +-\d+ .*$", printed, re.M)]
    assert bounds[1] > bounds[0] + 1000  # ten topics rather than two
    assert re.search(r"\b(import|module|namespace)\b", printed)


@example(
    "modes.py",
    "--shrink 4 --people 12 --components 6 --particles 8 --sizes 3 8 --pilot 3"
    " --baselines --draws 16 --steps 10",
)
def nndsvdar_finds_one_mode_and_others_find_many(printed):
    table = r"^(Q-Transform|random|NNDSVDar|HMC) +3 (.*)\n +8 (.*)$"
    rows = {
        name: [float(one) for one in f"{few} {all_}".replace("°", "").split()]
        for name, few, all_ in re.findall(table, printed, re.M)
    }
    copies, chain = rows.pop("NNDSVDar"), rows.pop("HMC")
    assert set(rows) == {"Q-Transform", "random"}
    for own in rows.values():
        assert own[1] > 1.3 * own[9]  # the discrepancy of three particles, and of eight
        assert own[3] > 2.3  # count as so many unrelated ones
        assert own[11] > 5.0
        assert own[11] > 2.5 * copies[11]
        assert own[4] > 3 * max(copies[4], chain[4])  # degrees apart
        assert own[6] < 0.9  # the worst objective, of the threshold
    for name in ("NNDSVDar", "HMC"):
        assert f'Claim "{name} finds few distinct factorizations": REPRODUCED' in printed
    for name in ("SVGD", "Stein descent"):
        assert re.search(rf"^{name} +3 ", printed, re.M)


@example("readings.py", "--topics 6 --components 8 --particles 4 --pilot 2")
def particles_differ_in_what_they_are_good_for(printed):
    rows = re.findall(r"^ +\d( +[01]\.\d{4}){4}.*$", printed, re.M)
    assert len(rows) == 10
    assert int(re.findall(r"^(\d+) different particles are best", printed, re.M)[0]) > 1
    assert int(re.findall(r"above the mean for (\d+)", printed)[0]) >= 8
    assert printed.count("words of the 3 particles with the largest weights") == 2
    assert re.search(r"\b(import|module|namespace)\b", printed)


@example("endmembers.py", "--side 20 --particles 10 --pilot 3")
def finds_materials_within_their_spread(printed):
    rows = re.findall(r"^([ABCD]) +(.*)$", printed, re.M)
    assert [name for name, _ in rows] == list("ABCD")
    for _, row in rows:
        numbers = map(float, re.findall(r"\d+\.\d", row))
        spread, _, _, _, _, known, known_sd, low, high, error = numbers
        assert 5.0 < spread < 45.0
        assert low < known < high
        assert known < spread + 2 * known_sd
        assert error < 21.5  # per cent; a quarter everywhere is off by 22 to 32
    assert float(re.findall(r"known endmembers: ([\d.]+)°", printed)[0]) < 30.0


@example("views.py", "--cells 150 --draws 80")
def tells_what_only_one_measurement_shows(printed):
    rows = re.findall(r"^\d +(.*)$", printed, re.M)
    shares = [[int(one) for one in re.findall(r"(-?\d+) \(", row)] for row in rows]
    assert len(shares) == 5
    assert all(own[0] > 3 for own in shares)  # RNA shows all programs
    assert [own[1] > 5 for own in shares] == [True] * 3 + [False] * 2  # proteins three of them
    assert sorted(own[2] > 3 for own in shares) == [False] + [True] * 4
    of = (re.findall(rf"{words} cells: ([\d.]+)", printed)[0] for words in ("such", "all"))
    own, plain = map(float, of)
    assert own < 0.5 * plain
    covers(printed)


@example("tensors.py", "--people 40 --draws 100")
def finds_hours_and_predicts(printed):
    error, spread = (float(own) for own in re.findall(r"(?:means|all cells) ([\d.]+)[,;]", printed))
    assert error < 0.15 * spread
    assert float(re.findall(r"90 % intervals: ([\d.]+)", printed)[0]) > 0.9
    found = sorted(float(own) for own in re.findall(r"pattern \d: +([\d.]+) h", printed))
    assert len(found) == 4
    patterns = ((1, 23), (8, 18), (10, 20), (11, 16))
    seen = {own for own in patterns for hour in found if min(abs(hour - at) for at in own) <= 0.5}
    assert seen == set(patterns), found


def test_every_example_has_a_small_size_and_a_check_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs(name, tmp_path):
    options, check = CHECKS[name]
    command = [sys.executable, EXAMPLES / name, *options.split(), "--picture", "picture.png"]
    told = {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, check=False, cwd=tmp_path, **told)
    assert done.returncode == 0, done.stderr
    check(done.stdout)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
