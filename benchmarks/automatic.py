"""Effective draws per second of held-out cells' means: the table that ``sampler="auto"`` goes by.

Data are drawn from the model itself; a tenth of them is held out, and the bulk effective
sample size (ArviZ) of μ = WH at 100 held-out cells is taken over draws after tuning. Samplers
run one after the other on one core, in float32, with their defaults; seconds are CPU
seconds of the drawing cycles alone. A biased sampler's draws are counted as if they were right:
the shift of its means beside BlockHMC's, in posterior standard deviations, stands beside them.

    python benchmarks/automatic.py [--sizes 15x12 150x100] [--means 0.05 0.3 5 50]
        [--components 3 10] [--betas 1 0] [--missing 0.1] [--seconds 3]
        [--tune 300] [--least 100] [--samplers PSGLD SGHMC Gibbs BlockHMC]

The size, K, beta and mean of the data stand before every line. Of laws other than Poisson's the
dispersion is such that single entries have the mean's size for their standard deviation.
"""

import argparse
import itertools
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from exact_draws import COLUMNS, erased, race, show
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError

Array = NDArray[Any]


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
    return V, erased(V, rng.random(V.shape) < missing)


def compare(args: argparse.Namespace) -> None:
    """Print the table."""
    print(f"{'':32}" + "".join(f"{name:>18}" for name in (*COLUMNS, "shift, sd")))
    sizes = (tuple(map(int, size.split("x"))) for size in args.sizes)
    for size, *rest in itertools.product(sizes, args.components, args.betas, args.means):
        problem = Problem(*size, *rest)
        V, cells = made_up(problem, args.missing)
        found = {}
        for name in args.samplers:
            sampler = getattr(dfac, name)()
            with suppress(ModelError, DataError):
                found[name] = race(V, cells, problem.model, sampler, args, allow_empty=True)
        show(str(problem), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["150x100", "1000x1000"])
    parser.add_argument("--means", nargs="+", type=float, default=[0.3, 5.0, 50.0])
    parser.add_argument("--components", nargs="+", type=int, default=[5])
    parser.add_argument("--betas", nargs="+", type=float, default=[1.0])
    parser.add_argument("--missing", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tune", type=int, default=300)
    parser.add_argument("--least", type=int, default=100, help="draws, at least")
    parser.add_argument("--samplers", nargs="+", default=["PSGLD", "SGHMC", "Gibbs", "BlockHMC"])
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
