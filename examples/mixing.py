"""Mixing and cost of samplers on synthetic counts and compound Poisson data.

Reproduces figure 2 of Şimşekli et al. 2015 (section 4.1): PSGLD, Langevin dynamics with full
gradients (LD), SGLD with entries drawn with replacement and, for counts, the Gibbs sampler.
Matrices of several sizes are drawn from the model. Every sampler runs twice: from a random start,
to measure when its log-posterior becomes stationary, and from the package's own start, to measure
the time and the efficiency of draws.

    python examples/mixing.py [--rows 64 128 256] [--components 8] [--draws 600]
        [--laws Poisson compound] [--picture mixing.png]

A draw is taken after every pass over the data: B steps of PSGLD and SGLD, one of LD, one sweep of
Gibbs. Times are CPU seconds on one core. Effective sample sizes (ESS) are those of the
log-posterior and of WH (its mean, norm, singular values and some cells), which do not depend on
the order or scale of the components. The Langevin samplers use this package's metric and automatic
steps (SGLD 1/B of the step of LD, because of its noise), whereas the paper tuned plain steps by
hand.

Prints a table, and whether the results confirm the claims of the paper. The claims ignore the bias
of a finite step, which shows in the stationary level of the log-posterior.
"""

import argparse
import time
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[np.floating]
BETAS = {"Poisson": 1.0, "compound": 0.5}
SAMPLERS = {
    "PSGLD": dfac.PSGLD,
    "LD": dfac.LangevinDynamics,
    "SGLD": dfac.SGLD,
    "Gibbs": dfac.Gibbs,
}
BLOCKS = 4
RATE = 1.3
"""Rate of the exponential priors: the mean of the data is 5 for 8 components."""


class Run(NamedTuple):
    """Results of a sampler on one matrix."""

    law: str
    rows: int
    name: str
    path: Array
    """Log-posterior from a random start."""
    clock: Array
    """CPU seconds at each value of the path."""
    draw: float
    """CPU seconds per draw."""
    efficiency: Array
    """Effective samples per draw, for every functional."""
    level: float
    spread: float

    @property
    def burn_in(self) -> float:
        """Seconds until the path first reaches the range of the tuned run."""
        inside = np.flatnonzero(self.path > self.level - 3 * self.spread)
        return float(self.clock[inside[0]]) if inside.size else np.inf

    @property
    def speed(self) -> float:
        """Effective samples per second, as the median over functionals."""
        return float(np.median(self.efficiency)) / self.draw


def made_up(law: str, rows: int, components: int) -> Array:
    """Simulate a square matrix from the model with dispersion 1."""
    rng = np.random.default_rng(rows)
    W = rng.exponential(1 / RATE, (rows, components))
    mean = W @ rng.exponential(1 / RATE, (components, rows))
    if law == "Poisson":
        return rng.poisson(mean).astype(np.float32)
    # A Poisson number of exponential jumps: for beta = 1/2, the variance is mean^1.5.
    jumps = rng.poisson(2 * np.sqrt(mean))
    return (rng.standard_gamma(np.maximum(jumps, 1)) * np.sqrt(mean) / 2 * (jumps > 0)).astype(
        np.float32
    )


def timed(
    V: Array, model: dfac.TweedieNMF, sampler: object, draws: int, tune: int
) -> tuple[xr.DataTree, float]:
    """Return a run and the CPU seconds of its draws, without warm-up."""
    begun = ended = 0.0

    def listen(event: dfac.RunEvent) -> None:
        nonlocal begun, ended
        if event.phase == "draw":
            ended = time.process_time()
        else:
            begun = time.process_time()

    trace = dfac.sample(
        V,
        model,
        sampler,
        draws=draws,
        tune=tune,
        random_seed=0,
        blocks=BLOCKS,
        executor="serial",
        progressbar=False,
        callback=listen,
    )
    return trace, ended - begun


def look(law: str, rows: int, name: str, settings: argparse.Namespace) -> Run:
    """One sampler on one matrix, from both starts."""
    V = made_up(law, rows, settings.components)
    model = dfac.TweedieNMF(
        settings.components, beta=BETAS[law], dispersion=1.0, rate_w=RATE, rate_h=RATE
    )
    sampler = SAMPLERS[name]
    trace, seconds = timed(V, model, sampler(warm_start=0), settings.draws, 0)
    path = trace["sample_stats"]["lp"].values[0]
    clock = np.linspace(0, seconds, settings.draws + 1)[1:]
    trace, seconds = timed(V, model, sampler(), settings.draws, settings.draws // 2)
    summary = dfac.summarize(trace, cells=32).to_dataframe()
    ess = summary.loc[summary["kind"].isin(["density", "product"]), "ess_bulk"]
    efficiency, lp = ess.to_numpy() / settings.draws, summary.loc["lp"]
    draw = seconds / settings.draws
    return Run(law, rows, name, path, clock, draw, efficiency, lp["mean"], lp["sd"])


def table(runs: list[Run]) -> None:
    """Print the results."""
    print(
        "\n                        ms per   seconds       log-    ESS per draw   ESS per second\n"
        "law       rows sampler    draw  burn-in  posterior  median     min   median      min"
    )
    for run in runs:
        middle, least = np.median(run.efficiency), run.efficiency.min()
        burn_in = f"{run.burn_in:9.2f}" if np.isfinite(run.burn_in) else "    never"
        print(
            f"{run.law:9}{run.rows:5d} {run.name:8}{1e3 * run.draw:7.2f}{burn_in}{run.level:11.0f}"
            f"{middle:8.3f}{least:8.3f}{run.speed:9.1f}{least / run.draw:9.1f}"
        )


def ratio(runs: list[Run], law: str, of: str, to: str) -> dict[str, Array]:
    """Return ratios of two samplers by size: time per draw, efficiency, and speed."""
    one, other = ([run for run in runs if (run.law, run.name) == (law, name)] for name in (of, to))
    pairs = list(zip(one, other, strict=True))
    return {
        "draw": np.array([a.draw / b.draw for a, b in pairs]),
        "efficiency": np.array(
            [np.median(a.efficiency) / np.median(b.efficiency) for a, b in pairs]
        ),
        "speed": np.array([a.speed / b.speed for a, b in pairs]),
    }


def claim(holds: bool, text: str, *figures: Array) -> None:
    """Print a claim, whether it holds, and the numbers."""
    lists = [", ".join(f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in own) for own in figures]
    print(f"  {'holds' if holds else 'DOES NOT HOLD':13}  {text.format(*lists)}")


def claims(runs: list[Run]) -> None:
    """Print the claims of the paper with ratios for all sizes."""
    print("\nThe paper's claims, with numbers from the smallest to the largest matrix:")
    for law in dict.fromkeys(run.law for run in runs):
        print(law)
        if law == "Poisson":
            against_gibbs(ratio(runs, law, "PSGLD", "Gibbs"))
        for other in ("LD", "SGLD"):
            found = ratio(runs, law, "PSGLD", other)
            text = f"PSGLD mixes better than {other}: {{}} times the ESS per draw"
            claim(found["efficiency"].min() > 1, text, found["efficiency"])
            text = f"and is faster: {{}} times the time of {other} per draw, {{}} times the ESS/s"
            claim(found["draw"].max() < 1, text, found["draw"], found["speed"])
        found = ratio(runs, law, "LD", "SGLD")
        text = "LD mixes better than SGLD: {} times the ESS per draw"
        claim(found["efficiency"].min() > 1, text, found["efficiency"])
        text = "and SGLD saves no time by subsampling: LD takes {} times its time per draw"
        claim(found["draw"].max() < 1, text, found["draw"])


def against_gibbs(found: dict[str, Array]) -> None:
    """Print the claims about PSGLD and Gibbs."""
    slower, text = 1 / found["draw"], "PSGLD mixes as well as Gibbs: {} times the ESS per draw"
    claim(found["efficiency"].min() > 0.5, text, found["efficiency"])
    text = "Gibbs takes 700 times as long on a GPU: {} times on one core"
    claim(slower.max() > 700, text, slower)
    text = "and the ratio grows with the data: {} times per effective sample"
    claim(slower.size > 1 and bool(np.all(np.diff(slower) > 0)), text, found["speed"])


def draw(runs: list[Run], path: str) -> None:
    """Paths of the largest matrices, times and speeds against size."""
    import matplotlib.pyplot as plt

    laws = list(dict.fromkeys(run.law for run in runs))
    colours = {name: f"C{number}" for number, name in enumerate(SAMPLERS)}
    figure, grid = plt.subplots(
        len(laws), 3, figsize=(13, 3.8 * len(laws)), layout="constrained", squeeze=False
    )
    for law, (left, middle, right) in zip(laws, grid, strict=True):
        own = [run for run in runs if run.law == law]
        largest = max(run.rows for run in own)
        top = max(run.level for run in own if run.rows == largest)
        for name, colour in colours.items():
            mine = [run for run in own if run.name == name]
            if not mine:
                continue
            last = mine[-1]
            left.plot(last.clock, last.path, colour, label=name)
            rows = [run.rows for run in mine]
            middle.loglog(rows, [1e3 * run.draw for run in mine], "o-", color=colour)
            right.loglog(rows, [run.speed for run in mine], "o-", color=colour)
        paths = np.concatenate([run.path[1:] for run in own if run.rows == largest])
        left.set(xscale="log", ylim=(np.quantile(paths, 0.02), top + 0.05 * (top - paths.min())))
        left.set(
            xlabel="CPU seconds",
            ylabel="log-posterior",
            title=f"{law}, {largest} x {largest}, random start",
        )
        left.legend()
        middle.set(xlabel="rows", ylabel="ms per draw", title="time per draw")
        right.set(xlabel="rows", ylabel="effective samples per second", title="effective speed")
        for panel in (middle, right):
            panel.set_xticks(rows, [str(size) for size in rows])
            panel.xaxis.minorticks_off()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[64, 128, 256], help="sizes of the matrices"
    )
    parser.add_argument("--components", type=int, default=8, help="number of components")
    parser.add_argument("--draws", type=int, default=600, help="number of draws per run")
    parser.add_argument(
        "--laws", nargs="+", choices=list(BETAS), default=list(BETAS), help="likelihoods"
    )
    parser.add_argument("--picture", help="image file to write")
    arguments = parser.parse_args()

    runs = [
        look(law, rows, name, arguments)
        for law in arguments.laws
        for rows in sorted(arguments.rows)
        for name in SAMPLERS
        if law == "Poisson" or name != "Gibbs"
    ]
    table(runs)
    claims(runs)
    if arguments.picture:
        draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
