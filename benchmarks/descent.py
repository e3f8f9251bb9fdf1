"""DSGD beside P-SGLD on synthetic ratings of the size of MovieLens 1M.

Both run on the same grid, the same lanes, the same sparse blocks. A cycle of
P-SGLD is gradient, noise and update; an epoch of DSGD visits every entry. The
times below are of the updates alone; the curves count everything that the run
itself needs (DSGD's look at its objective, the sampler's tuning), but not the
benchmark's own look at the held-out ratings.

    python benchmarks/descent.py [--entries 1000000] [--components 32] [--blocks 4]
        [--epochs 40] [--lanes 1] [--json]

P-SGLD's curve is that of the mean of its predictions so far; DSGD's is that of
its present point, and the best step is found by its own search.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import scipy.sparse as sp

from daskfactor.data.grid import Reshuffled
from daskfactor.data.sources import as_blocks
from daskfactor.executors import LanesExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.inference.dsgd import DSGD, StochasticDescent
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.tweedie_chain import TweedieChain
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator

SHAPE = (6040, 3706)
RANK = 12
HELD_OUT = 0.1
REPEATS = 3


def ratings(entries: int, seed: int = 0) -> sp.coo_array:
    """Ratings 1 to 5: biases, twelve tastes and noise; users and items of unequal activity."""
    rng = np.random.default_rng(seed)
    J = SHAPE[1]
    users, items = (rng.lognormal(0.0, 1.0, n) for n in SHAPE)
    cells = np.unique(
        rng.choice(SHAPE[0], 2 * entries, p=users / users.sum()) * J
        + rng.choice(J, 2 * entries, p=items / items.sum())
    )
    cells = rng.choice(cells, min(entries, cells.size), replace=False)
    rows, cols = np.divmod(cells, J)
    W, H = (rng.normal(size=(n, RANK)) for n in SHAPE)
    taste = np.einsum("nk,nk->n", W[rows], H[cols]) * 0.6 / np.sqrt(RANK)
    bias = 0.4 * rng.normal(size=SHAPE[0])[rows] + 0.5 * rng.normal(size=J)[cols]
    values = 3.6 + bias + taste + 0.8 * rng.normal(size=cells.size)
    return sp.coo_array((np.clip(np.rint(values), 1, 5).astype(np.float32), (rows, cols)), SHAPE)


class Problem:
    """Training blocks and held-out ratings."""

    def __init__(self, entries: int, blocks: int) -> None:
        matrix = ratings(entries)
        rows, cols = matrix.coords
        held = np.random.default_rng(1).random(matrix.nnz) < HELD_OUT
        self.test = rows[held], cols[held], matrix.data[held]
        train = sp.csr_array((matrix.data[~held], (rows[~held], cols[~held])), SHAPE)
        self.data = as_blocks(train, blocks, unstored="missing", allow_empty=True)

    def predictions(self, state: Any) -> Any:
        rows, cols, _ = self.test
        W, H = state.gather("rows"), state.gather("columns")
        return np.concatenate(
            [
                np.einsum("nk,nk->n", W[r], H[c])
                for r, c in zip(np.array_split(rows, 8), np.array_split(cols, 8), strict=True)
            ]
        )

    def rmse(self, predictions: Any) -> float:
        return float(np.sqrt(np.mean((self.test[2] - np.clip(predictions, 1, 5)) ** 2)))


def descend(problem: Problem, components: int, epochs: int, lanes: LanesExecutor) -> dict[str, Any]:
    """Objective and held-out RMSE after each epoch, and seconds of an epoch's updates."""
    model = TweedieNMF(components, beta=2.0)
    curve = []
    started = time.perf_counter()
    descent = StochasticDescent(problem.data, model, DSGD(), lanes, 0)
    descent.choose_step()
    spent = time.perf_counter() - started
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        descent.iterate(epoch)
        descent.look(epoch)
        spent += time.perf_counter() - started
        error = problem.rmse(problem.predictions(descent.state))
        curve.append((spent, descent.loss, error, descent.step))
    updates = tuple(part for part in descent._plan(1) if part.ops[0].action == 0)
    program, state = descent.program(descent.step), descent.state
    return {
        "epoch": fastest(lambda: lanes.run(updates, program, state, problem.data)),
        "curve": curve,
    }


def fastest(run: Any) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def draw(problem: Problem, components: int, epochs: int, lanes: LanesExecutor) -> dict[str, Any]:
    """The same of P-SGLD: tuning for a quarter of the epochs, then averaged predictions."""
    model = TweedieNMF(components, beta=2.0)
    tune = max(4, epochs // 4)
    options = RunOptions(epochs, tune, 1, 1, 0, "moments", 0, "float32")
    setting = Setting(problem.data, model, PSGLD(warm_start=20), options, lanes)
    chain = TweedieChain(setting, 0)
    started = time.perf_counter()
    chain.start()
    spent = time.perf_counter() - started
    mean = np.zeros(problem.test[0].size)
    curve = []
    for cycle in range(1, tune + epochs + 1):
        started = time.perf_counter()
        chain.advance(cycle)
        spent += time.perf_counter() - started
        now = problem.predictions(chain.tracks[0].state)
        if cycle > tune:
            mean += (now - mean) / (cycle - tune)
        curve.append((spent, chain.log_likelihood(), problem.rmse(mean if cycle > tune else now)))
        chain.forget()
    run = chain.tracks[0]
    plan = build_plan(
        Reshuffled(),
        problem.data.n_observed,
        range(cycle, cycle + 1),
        lambda number: generator(0, 0, Stream.SCHEDULE, number),
        lambda number: CycleOptions(),
    )
    program = chain.program(run.track)
    return {
        "epoch": fastest(lambda: lanes.run(plan, program, run.state, problem.data)),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    problem = Problem(args.entries, args.blocks)
    lanes = LanesExecutor(args.lanes)
    for run in (descend, draw):  # compile
        run(problem, args.components, 4, lanes)
    found = {
        "DSGD": descend(problem, args.components, args.epochs, lanes),
        "PSGLD": draw(problem, args.components, args.epochs, lanes),
    }
    if args.json:
        print(json.dumps(found))
        return
    print(f"{problem.data.describe()}, K = {args.components}, {args.lanes} lane(s)")
    for name, result in found.items():
        print(f"\n{name}: {1e3 * result['epoch']:.1f} ms an epoch (updates alone)")
        print("   seconds   objective or log-likelihood   held-out RMSE")
        for row in result["curve"][:: max(1, len(result["curve"]) // 12)] + result["curve"][-1:]:
            print(f"   {row[0]:7.2f}   {row[1]:27.0f}   {row[2]:13.4f}")
    ratio = found["DSGD"]["epoch"] / found["PSGLD"]["epoch"]
    print(f"\none epoch of DSGD takes {ratio:.2f} times one cycle of P-SGLD")


if __name__ == "__main__":
    main()
