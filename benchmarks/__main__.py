"""Print the board: what every line of work takes, beside its peer or its limit, and its goal.

    python -m benchmarks                  every line: half an hour on two quiet cores
    python -m benchmarks --quick          small sizes, to see that every line runs: five minutes
    python -m benchmarks --only sample    lines with that text in their name or their work
    python -m benchmarks --long --only calibration
    python -m benchmarks --list

What was found goes into benchmarks/board.json, line by line, unless sizes were small; then
``python -m benchmarks.page`` writes docs/benchmarks.md from that file.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

TABLES = [
    "near_end",
    "kernels",
    "peers",
    "accuracy",
    "calibration",
    "lights",
    "evidence",
    "predictions",
    "starts",
    "particles",
    "data",
    "cluster",
    "gpu",
]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    parser.add_argument("--long", action="store_true", help="large sizes, and lines of hours")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--list", action="store_true", help="the names of all lines")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--board", type=Path, help="the file to write, in place of the usual one")
    parser.add_argument(
        "--with",
        dest="given",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="libmf=PATH of its library with AVX, esat=PYTHON, counts=FILE.npz, ratings=FILE; "
        "data of benchmarks/lights.py",
    )
    return parser.parse_args()


def main() -> int:
    """Measure the lines that were asked for."""
    given = parsed()
    # Libraries read these when they are imported.
    for name in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ[f"{name}_NUM_THREADS"] = str(given.threads)
    os.environ.pop("OPENBLAS_CORETYPE", None)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    from benchmarks import harness

    for table in TABLES:
        importlib.import_module(f"benchmarks.{table}")
    size = "quick" if given.quick else "long" if given.long else "usual"
    chosen = [
        one
        for one in harness.LINES.values()
        if (given.long or not one.long)
        and (not given.only or any(text in f"{one.name} {one.work}" for text in given.only))
    ]
    if given.list:
        for one in chosen:
            print(f"{one.name:34} {one.minutes:5.1f} min  {one.work}")
        print(f"{sum(one.minutes for one in chosen):.0f} minutes in all")
        return 0
    options = dict(text.partition("=")[::2] for text in given.given)
    run = harness.Run(size, given.threads, options)
    path = given.board or (None if given.quick else harness.BOARD)
    board = harness.load_board(path or harness.BOARD)
    return 0 if harness.run_lines(chosen, run, board, path) else 1


if __name__ == "__main__":
    sys.exit(main())
