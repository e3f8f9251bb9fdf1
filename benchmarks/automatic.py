"""Effective draws per second of held-out cells' means: the table that ``sampler="auto"`` goes by.

Data are drawn from the model itself; a tenth of them is held out, and the bulk effective
sample size (ArviZ) of μ = WH at 100 held-out cells is taken over draws after tuning. Samplers
run one after the other on one core, in float32, with their defaults; seconds are CPU
seconds of the drawing cycles alone. A biased sampler's draws are counted as if they were right:
the shift of its means beside BlockHMC's, in posterior standard deviations, stands beside them.

    python benchmarks/automatic.py [--sizes 15x12 150x100] [--means 0.05 0.3 5 50]
        [--components 3 10] [--betas 1 0] [--missing 0.1] [--seconds 3]
        [--samplers PSGLD SGHMC Gibbs BlockHMC]

The size, K, beta and mean of the data stand before every line. Of laws other than Poisson's the
dispersion is such that single entries have the mean's size for their standard deviation.
"""

import argparse
import itertools
import time
from typing import Any, NamedTuple

import numpy as np
from exact_draws import COLUMNS, worth
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError

Array = NDArray[Any]
CELLS, TUNE = 100, 300


class Problem(NamedTuple):
    """What is sampled: size, K, β, and the mean of the data."""

    rows: int
    columns: int
    components: int
    beta: float
    mean: float

    @property
    def model(self) -> dfac.TweedieNMF:
        return dfac.TweedieNMF(self.components, beta=self.beta, dispersion=self.dispersion)

    @property
    def dispersion(self) -> float:
        return 1.0 if self.beta == 1 else self.mean**self.beta

    def __str__(self) -> str:
        size = f"{self.rows}x{self.columns}"
        return f"{size:10}{self.components:4}{self.beta:5g}{self.mean:7g}"


def made_up(problem: Problem, missing: float) -> tuple[Array, Any]:
    """Data, some of them missing, and held-out cells among these."""
    rows, cols, K, beta, mean = problem
    rng = np.random.default_rng(rows)
    size, phi = (mean / K) ** 0.5, problem.dispersion
    mu = rng.exponential(size, (rows, K)) @ rng.exponential(size, (K, cols))
    if beta == 1:
        V = rng.poisson(mu).astype(np.float32)
    elif beta == 0:
        V = rng.gamma(1 / phi, mu * phi).astype(np.float32)
    elif beta == 2:
        V = (mu + rng.normal(size=mu.shape) * phi**0.5).astype(np.float32)
    else:  # a Poisson number of gamma numbers
        n, power = rng.poisson(mu**beta / (phi * beta)), (1 - beta) / beta
        V = np.where(
            n > 0, rng.gamma(np.maximum(n, 1) / power, phi * (1 - beta) * mu ** (1 - beta)), 0
        )
        V = V.astype(np.float32)
    gone = rng.random(V.shape) < missing
    V[gone] = np.nan
    return V, tuple(axis[:: max(1, gone.sum() // CELLS)][:CELLS] for axis in np.nonzero(gone))


def race(V: Array, cells: Any, sampler: Any, problem: Problem, seconds: float) -> dict[str, Any]:
    """Draw for about so many seconds, and say what that was worth."""
    began: list[float] = []

    def note(event: dfac.RunEvent) -> None:
        if event.phase == "draw":
            began.append(time.process_time())

    def run(draws: int, tune: int) -> tuple[Any, float]:
        began.clear()
        data = dfac.as_blocks(V, allow_empty=True)
        options: dict[str, Any] = {"executor": "serial", "random_seed": 0, "progressbar": False}
        tree = dfac.sample(data, problem.model, sampler, draws, tune, callback=note, **options)
        return tree, began[-1] - began[0]

    run(2, 2)
    _, brief = run(30, 0)
    draws = int(np.clip(seconds / max(brief / 30, 1e-5), 100, 5000))
    tree, spent = run(draws, TUNE)
    W, H = (tree["posterior"][name].values.astype(float) for name in ("W", "H"))
    mu = np.einsum("cdik,cdki->cdi", W[:, :, cells[0]], H[:, :, :, cells[1]])
    return worth(mu, spent)


def compare(args: argparse.Namespace) -> None:
    """Print the table."""
    print(
        f"{'size':10}{'K':>4}{'beta':>5}{'mean':>7}{'':10}"
        + "".join(f"{name:>17}" for name in (*COLUMNS, "shift, sd"))
    )
    sizes = (tuple(map(int, size.split("x"))) for size in args.sizes)
    for size, *rest in itertools.product(sizes, args.components, args.betas, args.means):
        problem = Problem(*size, *rest)
        V, cells = made_up(problem, args.missing)
        found = {}
        for name in args.samplers:
            sampler = getattr(dfac, name)()
            try:
                found[name] = race(V, cells, sampler, problem, args.seconds)
            except (ModelError, DataError):
                continue
        right = found.get("BlockHMC")
        for name, one in found.items():
            numbers = "".join(f"{one[column]:17.4g}" for column in COLUMNS)
            shift = float("nan")
            if right is not None:
                shift = float(np.sqrt(np.mean(((one["mean"] - right["mean"]) / right["sd"]) ** 2)))
            print(f"{problem} {name:9}{numbers}{shift:17.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["150x100", "1000x1000"])
    parser.add_argument("--means", nargs="+", type=float, default=[0.3, 5.0, 50.0])
    parser.add_argument("--components", nargs="+", type=int, default=[5])
    parser.add_argument("--betas", nargs="+", type=float, default=[1.0])
    parser.add_argument("--missing", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--samplers", nargs="+", default=["PSGLD", "SGHMC", "Gibbs", "BlockHMC"])
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
