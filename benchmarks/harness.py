"""Register the lines of the board, measure them, and keep what was found in ``board.json``.

A line is a function with the decorator `line`, which says what the work is, beside what it is put,
and what the goal is. It is called with a `Run`, which knows the size that was asked for, and
returns a `Figure`, or yields several. ``python -m benchmarks`` calls them.

A ratio is always how good ours is beside the peer's: times as fast, or times as much. One is as
good, more is better.
"""

import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ROOT = Path(__file__).resolve().parents[1]
BOARD = ROOT / "benchmarks" / "board.json"
SIZES = ("quick", "usual", "long")
PACKAGES = ["numpy", "scipy", "numba", "llvmlite", "scikit-learn", "dask", "distributed", "zarr"]
PACKAGES += ["xarray", "pandas", "threadpoolctl"]
PEERS = {
    "cmfrec": "pip install cmfrec",
    "esat": "python3 -m venv esat && esat/bin/pip install esat, then --with esat=esat/bin/python",
    "libmf": "pip install libmf for its errors; for its speed see benchmarks/kernels.py",
    "numpyro": "pip install 'numpyro[cpu]'",
    "poismf": "pip install poismf",
    "smurff": "pip install smurff",
    "tensorly": "pip install tensorly",
    "tomotopy": "pip install tomotopy",
    "torchnmf": "pip install torchnmf",
}
"""Packages that lines are put beside if they are there, and what installs them."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
QUIET: dict[str, Any] = {"progressbar": False, "random_seed": 0}


class Skip(Exception):
    """A line cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Figure:
    """A line of the board."""

    ours: float
    unit: str = "s"
    peer: float | None = None  # what ours is compared with, in the same unit
    what: str = ""  # the part of the work, where a function yields several figures
    better: str = "less"  # or "more" of the unit
    goal: str = ""  # such as ``<= 1.0`` or ``>= 115`` of ours, or ``ratio >= 4``
    beside: str = ""  # the name of the peer, in place of the decorator's
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How good ours is beside the peer's."""
        if self.peer is None or not self.peer or not self.ours:
            return None
        return self.peer / self.ours if self.better == "less" else self.ours / self.peer

    def reaches(self, goal: str) -> bool | None:
        """Return whether a goal is reached; None if there is none, or nothing to compare with."""
        if not goal:
            return None
        words = goal.removeprefix("ratio ").split()
        value = self.ratio if goal.startswith("ratio") else self.ours
        if value is None:
            return None
        bound = float(words[1])
        return value <= bound if words[0] == "<=" else value >= bound


Found = Figure | Iterable[Figure]


@dataclass(frozen=True)
class Line:
    """Work that is measured; ``long`` lines are measured if they are asked for alone."""

    name: str
    work: str
    peer: str
    goal: str
    needs: tuple[str, ...]
    minutes: float
    long: bool
    measure: Callable[["Run"], Found]

    @property
    def table(self) -> str:
        return self.name.split(".")[0]


LINES: dict[str, Line] = {}


def line(
    work: str,
    peer: str = "",
    goal: str = "",
    needs: tuple[str, ...] = (),
    minutes: float = 0.3,
    long: bool = False,
) -> Callable[[Callable[["Run"], Found]], Callable[["Run"], Found]]:
    """Register a function as a line of the board; its name and its module's name it."""

    def register(measure: Callable[[Run], Found]) -> Callable[[Run], Found]:
        name = f"{measure.__module__.rsplit('.', 1)[-1]}.{measure.__name__}"
        LINES[name] = Line(name, work, peer, goal, needs, minutes, long, measure)
        return measure

    return register


@dataclass
class Run:
    """What lines are told: the size, the threads, options by name, and which peers are missing."""

    size: str = "usual"
    threads: int = 2
    options: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    def pick(self, quick: Any, usual: Any, long: Any = None) -> Any:
        """Return what belongs to the size that was asked for."""
        chosen = {"quick": quick, "usual": usual, "long": usual if long is None else long}
        return chosen[self.size]

    def has(self, package: str) -> bool:
        """Return whether a peer is installed; note it as missing if it is not."""
        there = importlib.util.find_spec(package) is not None
        if not there:
            self.missing.add(package)
        return there


# -- clocks ----------------------------------------------------------------------------------


Clock = Callable[[], float]


def timed(
    call: Callable[..., Any], *given: Any, clock: Clock = time.perf_counter, **more: Any
) -> Any:
    """Return what a call returns, and the seconds that it takes."""
    begun = clock()
    found = call(*given, **more)
    return found, clock() - begun


def race(
    calls: dict[str, Callable[[], Any]],
    repeats: int = 3,
    clock: Clock = time.perf_counter,
    warm: bool = True,
) -> dict[str, float]:
    """Return median seconds of calls that take turns, each called once before the clock starts."""
    if warm:
        for call in calls.values():
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            gc.collect()
            taken[name].append(timed(call, clock=clock)[1])
    return {name: statistics.median(each) for name, each in taken.items()}


def per_call(
    calls: dict[str, Callable[[], Any]], repeats: int = 5, least: float = 0.02
) -> dict[str, float]:
    """Return median processor seconds of one call of short functions on this thread, in turns."""
    times = {}
    for name, call in calls.items():
        call()
        begun = time.thread_time()
        call()
        times[name] = max(1, int(least / max(time.thread_time() - begun, 1e-6)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begun = time.thread_time()
            for _ in range(times[name]):
                call()
            taken[name].append((time.thread_time() - begun) / times[name])
    return {name: statistics.median(each) for name, each in taken.items()}


def effective(draws: Array) -> Array:
    """Return bulk effective sample sizes of quantities, from draws (chain, draw, quantity)."""
    from daskfactor.results.diagnose import convergence

    return np.array([convergence(draws[..., at]).ess_bulk for at in range(draws.shape[-1])])


def cycle_seconds(V: Any, model: Any, sampler: Any, cycles: int, **options: Any) -> float:
    """Return the seconds of a drawing cycle of `sample`, reading, tuning and compiling left out."""
    import daskfactor as dfac

    looks: list[tuple[float, float]] = []

    def note(event: Any) -> None:
        if event.phase == "draw":
            looks.append((event.done, time.perf_counter()))

    lengths: dict[str, Any] = {"draws": cycles, "tune": 2, "keep": "moments"}
    dfac.sample(V, model, sampler, callback=note, **(lengths | QUIET | options))
    (first, begun), (last, ended) = looks[0], looks[-1]
    return (ended - begun) / max(last - first, 1)


# -- the board -------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return versions of what figures depend on, peers among them."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *PEERS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return what figures depend on besides the code."""
    from threadpoolctl import threadpool_info

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [text.partition(": ")[2] for text in lines if text.startswith("model name")]
    libraries = [f"{one['internal_api']} {one['version']}" for one in threadpool_info()]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "libraries": sorted({text for text in libraries if "None" not in text}),
        "variables": {name: os.environ.get(name, "") for name in (*THREADS, "OPENBLAS_CORETYPE")},
    }


def commit() -> str:
    """Return the commit of the working tree, with a plus where files differ from it."""

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "daskfactor", "benchmarks/*.py")
    return git("rev-parse", "--short=9", "HEAD") + ("+" if changed else "")


def load_board(path: Path = BOARD) -> dict[str, Any]:
    """Return what was measured before."""
    if not path.exists():
        return {"machines": {}, "lines": {}}
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def merge(board: dict[str, Any], name: str, entries: list[dict[str, Any]], where: Any) -> None:
    """Put what a line has found in the place of what it had found before, and of nothing else.

    ``where`` is the machine with its versions, which lines refer to by number.
    """
    machines = board["machines"]
    number = next((key for key, one in machines.items() if one == where), None)
    if number is None:
        number = str(1 + max(map(int, machines), default=0))
        machines[number] = where
    board["lines"][name] = [entry | {"machine": number} for entry in entries]
    used = {entry["machine"] for each in board["lines"].values() for entry in each}
    board["machines"] = {key: one for key, one in machines.items() if key in used}


def save_board(board: dict[str, Any], path: Path = BOARD) -> None:
    board = board | {"lines": dict(sorted(board["lines"].items()))}
    path.write_text(json.dumps(board, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def measure(one: Line, run: Run) -> list[dict[str, Any]]:
    """Measure a line; return its entries of the board, without where it was measured."""
    run.missing = set()
    if lacking := [package for package in one.needs if not run.has(package)]:
        raise Skip(f"{', '.join(lacking)} not installed")
    begun = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):
        found = one.measure(run)
        figures = [found] if isinstance(found, Figure) else list(found)
    spent = time.perf_counter() - begun
    stamp = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "size": run.size,
        "threads": run.threads,
        "load": round(os.getloadavg()[0], 1),
        "minutes": round(spent / 60, 2),
    }
    entries = []
    for figure in figures:
        goal = figure.goal or one.goal
        numbers = {"ours": figure.ours, "peer": figure.peer, "ratio": figure.ratio}
        numbers = {
            key: None if v is None or not np.isfinite(v) else float(f"{v:.4g}")
            for key, v in numbers.items()
        }
        entry = {"work": one.work, "what": figure.what, **numbers, "unit": figure.unit}
        beside = figure.beside or ("" if figure.peer is None else one.peer)
        entry |= {"beside": beside, "goal": goal, "met": figure.reaches(goal)}
        entries.append(entry | {"note": figure.note} | stamp)
    if run.missing:
        lacking = next((entry for entry in entries if entry["peer"] is None), entries[0])
        notes = [lacking["note"], f"{', '.join(sorted(run.missing))}: missing"]
        lacking["note"] = "; ".join(filter(None, notes))
    return entries


def number(value: float | None) -> str:
    """Write a number with three digits that count."""
    if value is None:
        return "–"
    if value != value:
        return "?"
    digits = f"{value:.3g}"
    return f"{value:,.0f}" if "e" in digits and abs(value) >= 1000 else digits


def text_of(entry: dict[str, Any]) -> str:
    """Write an entry of the board as a line of the terminal."""
    work = f"{entry['work']}: {entry['what']}" if entry["what"] else entry["work"]
    ours = f"{number(entry['ours'])} {entry['unit']}".strip()
    peer = "–" if entry["peer"] is None else f"{number(entry['peer'])} {entry['unit']}".strip()
    met = {None: "", True: "met", False: "NOT MET"}[entry["met"]]
    beside = f" ({entry['beside']})" if entry["beside"] else ""
    text = f"{work[:96]:96} {ours:>14} {peer:>14} {number(entry['ratio']):>7}"
    text += f"  {entry['goal']:14} {met:7}{beside}"
    return text.rstrip() + (f"; {entry['note']}" if entry["note"] else "")


def run_lines(chosen: list[Line], run: Run, board: dict[str, Any], path: Path | None) -> bool:
    """Measure lines, print each, and write the board after each; return whether all went well."""
    well, where = True, {"machine": machine(), "versions": versions()}
    begun, missing = time.perf_counter(), set[str]()
    if run.size == "quick":
        print("Sizes are small: figures show that lines run, and no more; nothing is written.")
    print(f"{'work':96} {'ours':>14} {'peer or limit':>14} {'ratio':>7}  goal")
    for one in chosen:
        try:
            entries = measure(one, run)
            missing |= run.missing
        except Skip as reason:
            missing |= run.missing
            print(f"{one.work[:96]:96} left out: {reason}", flush=True)
            continue
        except Exception:  # noqa: BLE001 - whatever it is, the others go on
            well = False
            print(f"{one.work[:96]:96} FAILED\n{traceback.format_exc()}", flush=True)
            continue
        for entry in entries:
            print(text_of(entry), flush=True)
        if path is not None:
            merge(board, one.name, entries, where)
            save_board(board, path)
    for package in sorted(missing):
        print(f"{package} is missing: {PEERS.get(package, f'pip install {package}')}")
    print(f"{len(chosen)} lines in {(time.perf_counter() - begun) / 60:.1f} minutes")
    return well
