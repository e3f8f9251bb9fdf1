"""Effective draws per second of held-out cells' means, on Poisson counts of several means.

Counts are drawn from the model itself; a tenth of them is held out, and the bulk effective
sample size (ArviZ) of μ = WH at 100 held-out cells is taken over draws after tuning. Samplers
run one after the other on one core, in float32, with their defaults; seconds are CPU
seconds of the drawing cycles alone. A biased sampler's draws are counted as if they were right:
the shift of its means beside BlockHMC's, in posterior standard deviations, stands beside them.

    python benchmarks/exact_draws.py [--sizes 150x100 1000x1000] [--means 0.3 5 50]
        [--components 5] [--seconds 10] [--steps 4] [--samplers PSGLD Gibbs BlockHMC]
    python benchmarks/exact_draws.py --acceptance      acceptance of BlockHMC over sizes
"""

import argparse
import time
from typing import Any

import arviz
import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[Any]
CELLS, TUNE = 100, 300


def made_up(rows: int, cols: int, mean: float, components: int) -> tuple[Array, Any]:
    """Poisson counts, a tenth of them missing, and held-out cells among these."""
    rng = np.random.default_rng(rows)
    size = (mean / components) ** 0.5
    W = rng.exponential(size, (rows, components))
    H = rng.exponential(size, (components, cols))
    V = rng.poisson(W @ H).astype(np.float32)
    gone = rng.random(V.shape) < 0.1
    V[gone] = np.nan
    return V, tuple(axis[:: max(1, gone.sum() // CELLS)][:CELLS] for axis in np.nonzero(gone))


def race(V: Array, cells: Any, sampler: Any, components: int, seconds: float) -> dict[str, Any]:
    """Draw for about so many seconds, and say what that was worth."""
    began: list[float] = []

    def note(event: dfac.RunEvent) -> None:
        if event.phase == "draw":
            began.append(time.process_time())

    def run(draws: int, tune: int) -> tuple[Any, float]:
        began.clear()
        data = dfac.as_blocks(V, 2)
        model = dfac.TweedieNMF(components, dispersion=1.0)
        options: dict[str, Any] = {"executor": "serial", "random_seed": 0, "progressbar": False}
        tree = dfac.sample(data, model, sampler, draws, tune, callback=note, **options)
        return tree, began[-1] - began[0]

    run(2, 2)
    _, brief = run(30, 0)
    draws = int(np.clip(seconds / max(brief / 30, 1e-5), 100, 5000))
    tree, spent = run(draws, TUNE)
    W, H = (tree["posterior"][name].values.astype(float) for name in ("W", "H"))
    mu = np.einsum("cdik,cdki->cdi", W[:, :, cells[0]], H[:, :, :, cells[1]])
    ess = np.array([arviz.ess(mu[..., i]) for i in range(mu.shape[-1])])
    rate = tree["sample_stats"].get("acceptance_rate")
    return {
        "ms": 1e3 * spent / draws,
        "draws": draws,
        "per draw": float(np.median(ess)) / draws,
        "per second": float(np.median(ess)) / spent,
        "least per second": float(np.quantile(ess, 0.05)) / spent,
        "acceptance": float("nan") if rate is None else float(rate.mean()),
        "mean": mu.mean(axis=(0, 1)),
        "sd": mu.std(axis=(0, 1)),
    }


COLUMNS = ("ms", "draws", "per draw", "per second", "least per second", "acceptance")


def compare(args: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{'':26}" + "".join(f"{name:>18}" for name in (*COLUMNS, "shift, sd")))
    for size in args.sizes:
        rows, cols = map(int, size.split("x"))
        for mean in args.means:
            V, cells = made_up(rows, cols, mean, args.components)
            found = {}
            for name in args.samplers:
                own = {"steps": args.steps} if name == "BlockHMC" else {}
                sampler = getattr(dfac, name)(**own)
                found[name] = race(V, cells, sampler, args.components, args.seconds)
            right = found.get("BlockHMC")
            for name, one in found.items():
                numbers = "".join(f"{one[column]:18.4g}" for column in COLUMNS)
                shift = float("nan")
                if right is not None:
                    shift = float(
                        np.sqrt(np.mean(((one["mean"] - right["mean"]) / right["sd"]) ** 2))
                    )
                print(f"{size:10}{mean:6g} {name:9}{numbers}{shift:18.3f}", flush=True)


def acceptance(components: int) -> None:
    """Print how many paths are accepted at sizes from 100 to 1000 squared."""
    for side in (100, 300, 1000):
        V, _ = made_up(side, side, 5.0, components)
        options: dict[str, Any] = {"executor": "serial", "random_seed": 0, "progressbar": False}
        model = dfac.TweedieNMF(components, dispersion=1.0)
        tree = dfac.sample(V, model, dfac.BlockHMC(), 50, 200, **options)
        stats = tree["sample_stats"]
        print(
            f"{side:5} squared: acceptance {float(stats['acceptance_rate'].mean()):.3f}, "
            f"step {float(stats['step_size'].mean()):.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["150x100", "1000x1000"])
    parser.add_argument("--means", nargs="+", type=float, default=[0.3, 5.0, 50.0])
    parser.add_argument("--components", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samplers", nargs="+", default=["PSGLD", "Gibbs", "BlockHMC"])
    parser.add_argument("--acceptance", action="store_true")
    args = parser.parse_args()
    if args.acceptance:
        acceptance(args.components)
    else:
        compare(args)


if __name__ == "__main__":
    main()
