"""Write docs/benchmarks.md from ``board.json``: no figure is on that page that no command printed.

python -m benchmarks.page           write it
python -m benchmarks.page --check   only say whether it is what the board gives
"""

import argparse
import importlib
import sys
from typing import Any

from benchmarks.__main__ import TABLES
from benchmarks.harness import LINES, ROOT, load_board, number

PAGE = ROOT / "docs" / "benchmarks.md"
TITLES = {
    "near_end": "Small data and the first hour",
    "kernels": "Kernels and epochs",
    "peers": "Beside other packages",
    "accuracy": "What draws are worth",
    "calibration": "Whether what runs say is true",
    "lights": "Lights and several chains on real data",
    "evidence": "Evidences and ranks",
    "predictions": "New rows, cold rows and the best columns",
    "starts": "Starts",
    "particles": "Particles",
    "data": "Memory and disk",
    "cluster": "Clusters",
    "gpu": "GPUs",
}
HEAD = """# Benchmarks

`python -m benchmarks` measures what is on this page, in half an hour on two quiet cores, and writes
it into `benchmarks/board.json`, from which `python -m benchmarks.page` makes the page. Every line
has the work, what it takes us, what it takes a peer or what the machine permits, and a goal where
there is one.

```sh
git clone <the repository> && cd daskfactor
python3 -m venv .venv && .venv/bin/pip install -q -e '.[examples]' --group test
.venv/bin/python -m benchmarks --quick                # every line at a small size: five minutes
.venv/bin/python -m benchmarks                        # every line, into board.json
.venv/bin/python -m benchmarks --only optimize        # lines with that text in their name or work
.venv/bin/python -m benchmarks --long --only lights   # larger sizes, and lines that take an hour
.venv/bin/python -m benchmarks --list
```

A *ratio* is how good ours is beside the other: times as fast, or times as much; more than one is
better. Both take turns in one process on the same cores, kernels are compiled before the clock
starts, and threads of BLAS, OpenMP and numba are set by the command. Ratios hold between machines,
seconds do not. Peers that are not installed are left out, and the command says how to install them.
"""
TAIL = """## Examples

Scripts in `examples/` tell stories with figures, and run in the tests at a small size.

| script | story |
|---|---|
| `allocation.py`, `letters.py`, `evidence.py`, `mixing.py` | figures of the papers, with verdicts |
| `faces_laws.py`, `modes.py`, `piano.py`, `speech.py` | the same of faces, modes and sounds |
| `readings.py`, `topics.py` | documents and digits |
| `endmembers.py` | materials of a hyperspectral image |
| `ratings.py` | MovieLens, or ratings that are made up |
| `sensor_gaps.py` | gaps of sensors, filled hour by hour |
| `tensors.py` | people, places and hours |
| `views.py` | cells' proteins from their RNA |
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def row(entry: dict[str, Any], marks: dict[str, str]) -> str:
    """Return a row of a table."""
    work = f"{entry['work']}: {entry['what']}" if entry["what"] else entry["work"]
    work += f" ({entry['note']})" if entry["note"] else ""
    unit = f" {entry['unit']}" if entry["unit"] else ""
    peer = "" if entry["peer"] is None else f"{number(entry['peer'])}{unit}"
    beside = ", ".join(filter(None, [entry["beside"], peer]))
    ratio = "" if entry["ratio"] is None else number(entry["ratio"])
    goal = entry["goal"].replace("<=", "≤").replace(">=", "≥")
    goal += {None: "", True: ", met", False: ", not met"}[entry["met"]]
    when = f"{entry['date']} {entry['commit']}{marks[entry['machine']]}"
    cells = [work, f"{number(entry['ours'])}{unit}", beside, ratio, goal, when]
    return f"| {' | '.join(map(cell, cells))} |"


def machines_of(board: dict[str, Any], marks: dict[str, str]) -> str:
    """Return what the machines were, and which versions figures are of."""
    lines = ["## Machines\n"]
    for name, one in board["machines"].items():
        machine, versions = one["machine"], one["versions"]
        variables = ", ".join(f"{k}={v}" for k, v in machine["variables"].items() if v)
        lines.append(
            f"- {marks[name].strip() or 'All lines'}: {machine['processor']}, {machine['cores']} "
            f"cores, {machine['memory_gib']:g} GiB; {', '.join(machine['libraries'])}; "
            f"{variables}; " + ", ".join(f"{k} {v}" for k, v in versions.items())
        )
    return "\n".join(lines) + "\n"


def render(board: dict[str, Any]) -> str:
    """Return the page."""
    several = len(board["machines"]) > 1
    marks = {name: f" machine {name}" if several else "" for name in board["machines"]}
    parts = [HEAD, *(table_of(name, board["lines"], marks) for name in TITLES)]
    if board["machines"]:
        parts.append(machines_of(board, marks))
    return "\n".join([*parts, TAIL])


def table_of(table: str, entries: dict[str, Any], marks: dict[str, str]) -> str:
    """Return a part of the page: what lines measure, what was found, and what is to be measured."""
    document = sys.modules[f"benchmarks.{table}"].__doc__ or ""
    text = [f"## {TITLES[table]}\n", *document.strip().split("\n")[2:], ""]
    found = {name: each for name, each in entries.items() if name.startswith(f"{table}.")}
    if found:
        text += ["| work | ours | beside | ratio | goal | measured |", "|---|---|---|---|---|---|"]
        text += [row(entry, marks) for each in found.values() for entry in each] + [""]
    lacking = [one for name, one in LINES.items() if one.table == table and name not in found]
    if lacking:
        text.append("Not measured yet, or not on this machine:\n")
        for one in lacking:
            command = f"python -m benchmarks {'--long ' * one.long}--only {one.name}"
            text.append(f"- {one.work}: `{command}`")
        text.append("")
    return "\n".join(text)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for table in TABLES:
        importlib.import_module(f"benchmarks.{table}")
    text = render(load_board())
    if given.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
