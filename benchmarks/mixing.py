"""P-SGLD against Gibbs sampling per effective sample, on Poisson counts of several sizes.

Both run through the same engine, on one core, in float32, in turns of about half a second
of CPU time; what is timed is what a run needs (updates, and the look at every draw's
log-likelihood), not what the benchmark computes from the draws. Counts are drawn from
the model itself and both chains start from the factors that made them, which are a draw
from the posterior: so nobody waits for a burn-in, of which examples/mixing.py has the
times. P-SGLD takes ``--tune`` cycles, not counted, to settle into its own bias.

    python benchmarks/mixing.py [--sizes 100 400 1600 sparse] [--seconds 10 30 60 30]
        [--chains 3] [--components 8] [--blocks 4] [--mean 5] [--tune 300] [--transition cir]
        [--step 0.1] [--json]

Effective sample sizes (bulk, rank-normalised, all chains together) are of the mean of
μ = WH, of 64 of its cells at random, and of the log-likelihood: what the order and scale
of components do not change. A speed at a wrong answer counts nothing, so posterior
means are compared, too: the root mean square over cells of their difference, in
posterior standard deviations, less what Monte Carlo errors explain, is P-SGLD's bias.
The log-likelihood's bias is printed beside it, which grows with the number of parameters.
"""

import argparse
import json
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.sources import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.inference.bands import pieces_of, take_values
from daskfactor.inference.base import Sampler
from daskfactor.inference.gibbs import Gibbs
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.tweedie_chain import TweedieChain, take_curvature
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.results.diagnose import addressed_cells, convergence

Array = NDArray[np.floating]
SPARSE_ROWS, SPARSE_MEAN = 1600, 0.05
TURN = 0.5
"""CPU seconds that a chain runs before it is the other's turn."""
CELLS = 64
NO_WORSE = 0.10
"""Bias of posterior means, in posterior standard deviations, that counts as agreement."""
NEVER = 10**9


class Counts(NamedTuple):
    """A problem, and the factors that made it."""

    data: BlockedData
    model: TweedieNMF
    W: Array
    H: Array
    entries: int


def made_up(size: str, components: int, blocks: int, mean: float) -> Counts:
    """Poisson counts from exponential factors; "sparse" ones are stored as such."""
    rows = SPARSE_ROWS if size == "sparse" else int(size)
    rate = (components / (SPARSE_MEAN if size == "sparse" else mean)) ** 0.5
    rng = np.random.default_rng(rows)
    W = rng.exponential(1 / rate, (rows, components))
    H = rng.exponential(1 / rate, (components, rows))
    V = rng.poisson(W @ H).astype(np.float32)
    data = as_blocks(sp.csr_array(V), blocks, unstored="zero") if size == "sparse" else V
    model = TweedieNMF(components, beta=1.0, dispersion=1.0, rate_w=rate, rate_h=rate)
    return Counts(
        data if size == "sparse" else as_blocks(V, blocks), model, W, H, int(np.count_nonzero(V))
    )


class Walk:
    """A chain from the true factors, and what it has seen."""

    def __init__(self, counts: Counts, sampler: Sampler, number: int, tune: int) -> None:
        options = RunOptions(NEVER, tune, 1, 1, 0, "draws", 1, str(counts.data.dtype))
        setting = Setting(counts.data, counts.model, sampler, options, SerialExecutor())
        self.chain = TweedieChain(setting, number)
        self.chain.start()
        state = self.chain.tracks[0].state
        for factor, whole in enumerate((counts.W, counts.H.T)):
            state.each(take_values, factor, pieces_of(counts.data.grid, factor, whole))
        if "metric" in sampler.arrays:
            self.chain._with_shares(state, take_curvature, "curvature")
            self.chain._follow_dispersion()
        self.cells = addressed_cells(counts.data.shape, CELLS, 0)
        self.seen: list[Array] = []
        self.seconds, self.wall = 0.0, 0.0
        self.pace = 0.1
        for end in sorted({tune // 2, tune} - {0}):
            self.chain.advance(end)
        self.chain.forget()

    @property
    def draws(self) -> int:
        return len(self.seen)

    def turn(self) -> None:
        """Go on for about `TURN` seconds, then note what of the draws is wanted."""
        cycles = min(2000, max(1, int(TURN / self.pace)))
        start, cpu, wall = self.chain.cycle, time.process_time(), time.perf_counter()
        self.chain.advance(start + cycles)
        spent = time.process_time() - cpu
        self.seconds, self.wall = self.seconds + spent, self.wall + time.perf_counter() - wall
        self.pace = max(spent, 1e-4) / cycles
        self._note()
        self.chain.forget()

    def _note(self) -> None:
        run = self.chain.tracks[0]
        W, Ht = (run.state.gather_draws(side).astype(float) for side in ("rows", "columns"))
        rows, cols = self.cells
        means = np.einsum("nk,nk->n", W.mean(axis=1), Ht.mean(axis=1))
        cells = np.einsum("npk,npk->np", W[:, rows], Ht[:, cols])
        fits = [self.chain._lp(run.fits[cycle]) for cycle in sorted(run.fits)]
        self.seen += list(np.column_stack([fits, means, cells]))


def race(
    counts: Counts, psgld: PSGLD, seconds: float, chains: int, tune: int
) -> dict[str, list[Walk]]:
    """Chains of both samplers in turns: ``seconds`` for each of Gibbs', half for P-SGLD's."""
    walks: dict[str, list[Walk]] = {"PSGLD": [], "Gibbs": []}
    for number in range(chains):
        fast = Walk(counts, psgld, number, tune)
        slow = Walk(counts, Gibbs(warm_start=0), number, min(tune, 2))
        while slow.seconds < seconds:
            slow.turn()
            if fast.seconds < seconds / 2:
                fast.turn()
        walks["PSGLD"].append(fast)
        walks["Gibbs"].append(slow)
    return walks


def worth(walks: list[Walk]) -> dict[str, Any]:
    """What a sampler's chains have drawn, and what that is worth."""
    least = min(walk.draws for walk in walks)
    drawn = np.stack([walk.seen[:least] for walk in walks])
    total = sum(walk.draws for walk in walks)
    seconds = sum(walk.seconds for walk in walks)
    found = [convergence(drawn[..., at]) for at in range(drawn.shape[2])]
    sizes = np.array([one.ess_bulk for one in found]) / (drawn.shape[0] * drawn.shape[1])
    singly = [median_size(walk) * walk.draws / walk.seconds for walk in walks]
    return {
        "draws": total,
        "milliseconds": 1e3 * seconds / total,
        "wall_ms": 1e3 * sum(walk.wall for walk in walks) / total,
        "rhat": max(one.rhat for one in found),
        "per_draw": {
            "log-likelihood": sizes[0],
            "mean of mu": sizes[1],
            "cells, median": float(np.median(sizes[2:])),
            "all, least": sizes.min(),
            "all, median": float(np.median(sizes)),
        },
        "singly": singly,
        "mean": drawn.mean(axis=(0, 1)),
        "sd": drawn.std(axis=(0, 1)),
        "error": drawn.std(axis=(0, 1)) / np.sqrt(sizes * drawn.shape[0] * drawn.shape[1]),
    }


def median_size(walk: Walk) -> float:
    """Median effective samples a draw, of one chain alone."""
    drawn = np.array(walk.seen)
    return float(np.median([convergence(one[None]).ess_bulk for one in drawn.T]) / len(drawn))


def compare(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Speed per effective sample, and how far the answers are apart."""
    fast, slow = found["PSGLD"], found["Gibbs"]
    factors = {
        name: fast["per_draw"][name] / fast["milliseconds"] * slow["milliseconds"] / size
        for name, size in slow["per_draw"].items()
    }
    singly = [a / b for a, b in zip(fast["singly"], slow["singly"], strict=True)]
    shift = (fast["mean"] - slow["mean"]) / slow["sd"]
    noise = np.hypot(fast["error"], slow["error"]) / slow["sd"]
    cells = shift[2:]
    excess = float(np.mean(cells**2) - np.mean(noise[2:] ** 2))
    unsure = float(np.sqrt(2 * np.sum(noise[2:] ** 4))) / len(cells)
    return {
        "factors": factors,
        "range": (min(singly), max(singly)),
        "per_draw": slow["milliseconds"] / fast["milliseconds"],
        "apart": float(np.sqrt(np.mean(cells**2))),
        "noise": float(np.sqrt(np.mean(noise[2:] ** 2))),
        "bias": [float(np.sqrt(max(0.0, excess + way * unsure))) for way in (-2, 0, 2)],
        "mean": (float(shift[1]), float(noise[1])),
        "fit": (float(shift[0]), float(noise[0]), float(fast["mean"][0] - slow["mean"][0])),
        "spread": float(np.median(fast["sd"][2:] / slow["sd"][2:])),
    }


def show(size: str, counts: Counts, found: dict[str, dict[str, Any]], versus: Any) -> None:
    """One size's tables."""
    print(f"\n{size}: {counts.data.describe()}, {counts.entries} entries that are not zero")
    names = list(found["PSGLD"]["per_draw"])
    print(f"{'':8}{'draws':>7}{'CPU ms':>9}{'wall ms':>9}{'R-hat':>7}   effective samples a draw")
    print(f"{'':8}{'':7}{'a draw':>9}{'a draw':>9}{'':7}" + "".join(f"{n:>16}" for n in names))
    for name, one in found.items():
        sizes = "".join(f"{one['per_draw'][n]:16.4f}" for n in names)
        times = f"{one['milliseconds']:9.2f}{one['wall_ms']:9.2f}{one['rhat']:7.3f}"
        print(f"{name:8}{one['draws']:7d}{times}{sizes}")
    print(
        f"{'P-SGLD is faster per effective sample by':>40}"
        + "".join(f"{versus['factors'][n]:16.1f}" for n in names)
    )
    low, high = versus["range"]
    print(
        f"  per draw {versus['per_draw']:.1f}; chain by chain, median of all: "
        f"{low:.1f} to {high:.1f}"
    )
    least, bias, most = versus["bias"]
    print(
        f"  posterior means of cells apart by {versus['apart']:.3f} sd, of which Monte Carlo "
        f"explains {versus['noise']:.3f}: bias {bias:.3f} ({least:.3f} to {most:.3f}); "
        f"spread of cells {versus['spread']:.3f} of Gibbs'"
    )
    print(
        f"  mean of mu {versus['mean'][0]:+.3f} ± {versus['mean'][1]:.3f} sd; log-likelihood "
        f"{versus['fit'][0]:+.2f} ± {versus['fit'][1]:.2f} sd ({versus['fit'][2]:+.1f} nats)"
    )
    print(f"  {verdict(versus)}")


def verdict(versus: dict[str, Any]) -> str:
    """Whether means of cells and of all of μ agree, up to `NO_WORSE` and Monte Carlo errors."""
    (shift, noise), (least, bias, most) = versus["mean"], versus["bias"]
    wrong = []
    if least > NO_WORSE:
        wrong.append(f"cells are off by {bias:.2f} sd")
    if abs(shift) - 2 * noise > NO_WORSE:
        wrong.append(f"their mean by {shift:.2f} sd")
    if wrong:
        return f"NOT the same answer to {NO_WORSE:g} sd: {' and '.join(wrong)}"
    if most > NO_WORSE:
        return f"no difference to be seen, but Monte Carlo errors hide one of {NO_WORSE:g} sd"
    return f"the same answer to {NO_WORSE:g} sd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["100", "400", "1600", "sparse"])
    parser.add_argument("--seconds", nargs="+", type=float, default=[10.0, 30.0, 60.0, 30.0])
    parser.add_argument("--chains", type=int, default=3)
    parser.add_argument("--components", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--mean", type=float, default=5.0)
    parser.add_argument("--tune", type=int, default=300)
    parser.add_argument("--transition", choices=["moments", "euler", "cir"], default="moments")
    parser.add_argument("--step", type=float, help="of P-SGLD; automatic by default")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    psgld = PSGLD(args.step or "auto", warm_start=0, transition=args.transition)
    seconds = np.resize(args.seconds, len(args.sizes))
    results = {}
    for size, budget in zip(args.sizes, seconds, strict=True):
        counts = made_up(size, args.components, args.blocks, args.mean)
        for sampler in (psgld, Gibbs(warm_start=0)):  # compile
            Walk(counts, sampler, 0, 10).turn()
        walks = race(counts, psgld, float(budget), args.chains, args.tune)
        found = {name: worth(own) for name, own in walks.items()}
        results[size] = compare(found)
        if not args.json:
            show(size, counts, found, results[size])
    if args.json:
        print(json.dumps(results))
        return
    dense = [size for size in args.sizes if size != "sparse"]
    factors = [results[size]["factors"]["all, median"] for size in dense]
    if len(dense) > 1:
        grows = all(a < b for a, b in pairwise(factors))
        steps = ", ".join(f"{s}: {f:.1f}" for s, f in zip(dense, factors, strict=True))
        print(f"\nthe factor {'grows' if grows else 'does not grow'} with size ({steps})")


if __name__ == "__main__":
    main()
