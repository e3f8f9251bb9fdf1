"""Thermodynamic integration against Chib's method: time and accuracy over ranks.

Poisson counts of 100 x 75 from the model itself (rates 5, rank 5), as in Şimşekli et al.
2016, section 4.2, where integration was 6 times as fast as Chib's method (137 s against
835 s for ten ranks) at "similar" values. Both are run here at several settings, on one
core, rank by rank in turns; times are CPU seconds without compilation. Errors are
against a long integration, whose own errors are printed.

    python benchmarks/evidence_time.py [--ranks 1 2 3 4 5 6 7 8 9 10] [--repeats 2]
        [--true-rank 5] [--papers] [--profile] [--json]

With ``--papers`` two more: the paper's own Chib (14,000 sweeps) and its integration by
PSGLD (six uniform temperatures, 10,000 iterations each on 5 x 5 blocks). With
``--profile`` also where integration at the default settings spends its time.
"""

import argparse
import json
import time
import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor import Chib, log_evidence
from daskfactor import ThermodynamicIntegration as Integration
from daskfactor.errors import SamplingWarning
from daskfactor.evidence.thermodynamic import ladder

Array = NDArray[np.floating]
SHAPE, RATE = (100, 75), 5.0
BAR = 6.0
REFERENCE = Integration(temperatures=16, draws=6000, tune=1000)


class Contender(NamedTuple):
    """A method at a setting."""

    method: Any
    blocks: int = 1
    repeats: int | None = None


CONTENDERS = {
    "integration": Contender(Integration()),
    "integration, 1/4": Contender(Integration(draws=250, tune=100)),
    "integration, 1/16": Contender(Integration(draws=60, tune=50, temperatures=8)),
    "Chib": Contender(Chib()),
    "Chib, 1/4": Contender(Chib(draws=500, tune=250)),
}
PAPERS = {
    "Chib, the paper's": Contender(Chib(draws=2000, tune=7000), repeats=1),
    "integration, paper's": Contender(
        Integration(temperatures=5, power=1, draws=400, tune=1600, every=1, sampler=dfac.PSGLD()),
        blocks=5,
        repeats=1,
    ),
}
QUICK = {Integration: {"draws": 10, "tune": 0}, Chib: {"draws": 50, "tune": 4}}


class Run(NamedTuple):
    """One estimate, in nats and seconds."""

    value: float
    error: float
    cpu: float
    wall: float
    warned: bool


def made_up(rank: int) -> Array:
    """Counts from exponential factors."""
    rng = np.random.default_rng(0)
    W = rng.exponential(1 / RATE, (SHAPE[0], rank))
    return rng.poisson(W @ rng.exponential(1 / RATE, (rank, SHAPE[1]))).astype(np.float32)


def estimate(V: Array, rank: int, contender: Contender, seed: int) -> Run:
    """One rank by one method."""
    model = dfac.TweedieNMF(rank, beta=1.0, dispersion=1.0, rate_w=RATE, rate_h=RATE)
    cpu, wall = time.process_time(), time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SamplingWarning)
        found = log_evidence(
            V,
            model,
            contender.method,
            random_seed=seed,
            blocks=contender.blocks,
            executor="serial",
            progressbar=False,
        )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    # Chib's method has no discretization: its error of that kind is NaN or 0.
    error = float(np.hypot(found.standard_error, np.nan_to_num(found.discretization_error)))
    warned = any(issubclass(one.category, SamplingWarning) for one in caught)
    return Run(found.value, error, cpu, wall, warned)


class Column(NamedTuple):
    """What a contender gave, (repeat, rank)."""

    values: Array
    errors: Array
    cpu: Array
    wall: Array
    warned: Array

    @property
    def seconds(self) -> float:
        """CPU seconds for all ranks."""
        return float(self.cpu.sum(axis=1).mean())


def column(runs: list[list[Run]]) -> Column:
    """Runs as arrays."""
    return Column(*(np.moveaxis(np.array(runs, dtype=float), 2, 0)))


def race(V: Array, ranks: list[int], contenders: dict[str, Contender], repeats: int) -> Any:
    """All contenders in turns, rank by rank, repeat by repeat."""
    found: dict[str, list[list[Run]]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        here: dict[str, list[Run]] = {name: [] for name in contenders}
        for rank in ranks:
            for name, one in contenders.items():
                if one.repeats is None or repeat < one.repeats:
                    here[name].append(estimate(V, rank, one, 1 + repeat))
        for name, runs in here.items():
            if runs:
                found[name].append(runs)
    return {name: column(runs) for name, runs in found.items()}


def show(ranks: list[int], truth: Column, found: dict[str, Column]) -> None:
    """Values per rank, then time, accuracy and choice of every contender."""
    print("log evidence (first repeat) ± its own error; ! where the method warns\n")
    print(f"{'rank':>5}{'reference':>18}" + "".join(f"{name:>22}" for name in found))
    for at, rank in enumerate(ranks):
        cells = [f"{truth.values[0, at]:9.2f} ± {truth.errors[0, at]:.2f}"]
        for one in found.values():
            mark = "!" if one.warned[0, at] else " "
            cells.append(f"{one.values[0, at]:9.2f} ± {one.errors[0, at]:.2f}{mark}")
        print(f"{rank:5d}{cells[0]:>18}" + "".join(f"{cell:>22}" for cell in cells[1:]))
    print(f"\nreference: {truth.seconds:.1f} CPU s, picks {chosen(ranks, truth)[0]}")
    print(f"{'':22}{'CPU s':>8}{'wall s':>8}{'rms error in nats':>20}{'own':>7}   picks")
    print(f"{'':22}{'all ranks':>16}{'all':>10}{'rank > 1':>10}{'error':>7}")
    for name, one in found.items():
        print(
            f"{name:22}{one.seconds:8.2f}{one.wall.sum(axis=1).mean():8.2f}"
            f"{rms(one, truth):10.2f}{rms(one, truth, 1):10.2f}"
            f"{np.sqrt(np.mean(one.errors**2)):7.2f}   {', '.join(chosen(ranks, one))}"
        )


def rms(one: Column, truth: Column, first: int = 0) -> float:
    """Root mean square distance from the reference, over ranks and repeats."""
    return float(np.sqrt(np.mean((one.values - truth.values)[:, first:] ** 2)))


def chosen(ranks: list[int], one: Column) -> list[str]:
    """The rank with the largest evidence, of every repeat."""
    return [str(ranks[at]) for at in one.values.argmax(axis=1)]


def ratios(truth: Column, found: dict[str, Column]) -> dict[str, float]:
    """Chib's time over that of default integration, and of the cheapest that is no worse.

    No worse in the root mean square over all ranks: at rank 1 Chib's method is all but exact.
    """
    usual, lines = found["integration"], {}
    print()
    for name, one in found.items():
        if not name.startswith("Chib"):
            continue
        able = {
            other: column.seconds
            for other, column in found.items()
            if other.startswith("integration") and rms(column, truth) <= rms(one, truth)
        }
        lines[name] = one.seconds / usual.seconds
        text = f"{name}: {lines[name]:.1f} times the time of integration at its defaults"
        if able:
            cheapest = min(able, key=lambda other: able[other])
            lines[f"{name}, equal"] = one.seconds / able[cheapest]
            text += f"; {lines[f'{name}, equal']:.1f} times that of {cheapest!r}, which is no worse"
        print(text)
    said = {"defaults against defaults": lines["Chib"]}
    equal = [value for name, value in lines.items() if name.endswith("equal")]
    if equal:
        said["no worse accuracy"] = min(equal)
    for name, value in said.items():
        met = "met" if value >= BAR else "MISSED"
        print(f"bar of {BAR:g} times, {name}: {met} ({value:.1f})")
    return lines


def profile(V: Array, rank: int) -> None:
    """Where default integration spends its time, and where draws would be spent better."""
    model = dfac.TweedieNMF(rank, beta=1.0, dispersion=1.0, rate_w=RATE, rate_h=RATE)
    method = Integration()
    found = log_evidence(V, model, method, random_seed=1, executor="serial", progressbar=False)
    trace = found.trace
    errors, draws = trace["contribution_error"].values, trace["draws"].values
    best = errors * np.sqrt(draws)
    best *= draws[1:].sum() / best[1:].sum()
    print(f"\nrank {rank}: standard error {found.standard_error:.2f}, by temperature:")
    print(f"{'t':>9}{'draws':>8}{'ESS':>8}{'error':>8}{'accepted':>10}{'best draws':>12}")
    for at, t in enumerate(ladder(method.temperatures, method.power)):
        print(
            f"{t:9.5f}{draws[at]:8d}{trace['ess'].values[at]:8.0f}{errors[at]:8.3f}"
            f"{trace['acceptance'].values[at]:10.2f}{best[at]:12.0f}"
        )
    ideal = np.sqrt(np.sum((errors**2 * draws / np.maximum(best, 1))[1:]))
    print(f"the same number of draws, spread as in the last column: error {ideal:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--true-rank", type=int, default=5)
    parser.add_argument("--papers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    V = made_up(args.true_rank)
    contenders = CONTENDERS | (PAPERS if args.papers else {})
    for one in contenders.values():  # compile
        method = type(one.method)(**(vars(one.method) | QUICK[type(one.method)]))
        estimate(V, 2, one._replace(method=method), 0)
    found = race(V, args.ranks, contenders, args.repeats)
    truth = race(V, args.ranks, {"reference": Contender(REFERENCE)}, 1)["reference"]
    if args.json:
        print(json.dumps({n: [a.tolist() for a in one] for n, one in found.items()}))
        return
    print(f"{SHAPE[0]} x {SHAPE[1]} counts, mean {V.mean():.3f}, true rank {args.true_rank}")
    show(args.ranks, truth, found)
    ratios(truth, found)
    if args.profile:
        profile(V, args.true_rank)


if __name__ == "__main__":
    main()
