"""How long a fresh process takes to its first answer, with no kernel compiled yet and with all.

Every figure is of a new process: seconds from its start to its end, and the seconds of
processor time it took. ``cold`` is the first process with an empty folder for compiled kernels,
``warm`` the best of those after it. A worker is a new process of a cluster: seconds from the
beginning of its first task, which imports the package and samples, to the end.

Imports dominate: have Python's own compiled files written (run it twice, and not under
``PYTHONDONTWRITEBYTECODE``), as an installed package has.

    python benchmarks/first_answer.py [--repeats 5] [--kept]

``--kept`` leaves out the cold figures and takes the usual folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLE = """
import numpy as np
import daskfactor as dfac
V = np.random.default_rng(0).poisson(3.0, (200, 100))
dfac.sample(V, dfac.TweedieNMF(n_components=5, beta=1.0), {settings}progressbar=False)
"""
FEW = "draws=10, tune=10, "
SHELL = shutil.which("daskfactor", path=str(Path(sys.executable).parent))
PYTHON = [sys.executable, "-c"]


def first_task(code: str) -> float:
    began = time.perf_counter()
    exec(code, {})
    return time.perf_counter() - began


def worker() -> float:
    """Seconds of the first task of a fresh worker process."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        return float(client.submit(first_task, SAMPLE.format(settings=FEW)).result())


def process(command: list[str]) -> tuple[float, float]:
    """Seconds, and those of the processor, of a command; one that fails is one that answers."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=False, capture_output=True)
    after, seconds = os.times(), time.perf_counter() - began
    used = after.children_user + after.children_system
    return seconds, used - before.children_user - before.children_system


def report(name: str, command: list[str], repeats: int, cold: bool) -> None:
    figures = [process(command) for _ in range(repeats + cold)]
    warm = min(figures[cold:])
    first = f"{figures[0][0]:6.2f} ({figures[0][1]:5.2f})" if cold else " " * 14
    print(f"{name:44} {first}  {warm[0]:6.2f} ({warm[1]:5.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kept", action="store_true", help="take the usual folder")
    settings = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    if not settings.kept:
        os.environ["DASKFACTOR_JIT_CACHE"] = str(folder / "kernels")
    print(f"{'seconds (of the processor)':44} {'cold':>14}  {'warm':>14}")
    few, usual = SAMPLE.format(settings=FEW), SAMPLE.format(settings="")
    report(
        "import, sample 200x100, 10 + 10 cycles",
        [*PYTHON, few],
        settings.repeats,
        not settings.kept,
    )
    report("import, sample 200x100, 500 + 500 cycles", [*PYTHON, usual], settings.repeats, False)
    warm = min(worker() for _ in range(settings.repeats))
    print(f"{'the same in a worker, 10 + 10 cycles':44} {'':14}  {warm:6.2f}", flush=True)
    store = str(folder / "run.zarr")
    subprocess.run([*PYTHON, SAMPLE.format(settings=f"{FEW}store={store!r}, ")], check=True)
    for words in (["info", store], ["plot", "--help"], ["fit", "--wrong"]):
        name = " ".join(["daskfactor", *words]).replace(store, "run.zarr")
        report(name, [str(SHELL), *words], settings.repeats, False)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
