"""What the Richardson–Romberg pair takes off P-SGLD's bias, on posteriors known exactly.

For each case of the statistical tests with one component, and for steps that halve,
this prints the bias of E μ (root mean square over cells, in posterior standard
deviations) and of Var μ (mean over cells, as a share of it) with their standard
errors: of P-SGLD at step ε, of P-SGLD at ε / 2 (the pair's fine track, which has
twice the iterations) and of P-SGRRLD, which is 2 fine - coarse. The last columns
are the variance of P-SGRRLD's estimate of E μ over the fine track's, with coupled
noise and with noise of two seeds. Run it from the root of the repository with

    python -m benchmarks.richardson [--cases poisson gamma] [--steps 0.2 0.1 0.05]
                                    [--copies 3000] [--draws 3000] [--plain]

First order cancels where P-SGLD's column halves from line to line and P-SGRRLD's falls
to a quarter. ``--plain`` takes the papers' step, whose ε has the unit of θ squared.
"""

import argparse

import numpy as np

from daskfactor.inference.langevin import PSGRRLD
from tests.statistical.exact import CASES, Case
from tests.statistical.pairs import bias, noise_ratio, romberg, run_pair

SINGLE = {case.name: case for case in CASES if case.K == 1}


def lines(case: Case, step: float, settings: argparse.Namespace) -> str:
    """One line of the table."""
    sampler = PSGRRLD(step=step, preconditioner="identity" if settings.plain else "majorizer")
    pair, other = (run_pair(case, sampler, settings.copies, settings.draws, s) for s in (0, 1))
    text = f"{case.name:21} {step:<6g}"
    combinations = ([(1.0, pair.coarse)], [(1.0, pair.fine)], romberg(*pair))
    found = [bias(parts, case) for parts in combinations]
    for one in found:
        text += f"{one.mean_size:8.4f}"
    text += f" ±{np.max(found[-1].mean_error):.4f}  "
    for one in found:
        text += f"{one.variance.mean():+8.3f}"
    text += f" ±{np.mean(found[-1].variance_error):.3f}  "
    return text + f"{noise_ratio(*pair):8.2f}{noise_ratio(pair.fine, other.coarse):10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=SINGLE, default=list(SINGLE))
    parser.add_argument("--steps", nargs="+", type=float)
    parser.add_argument("--copies", type=int, default=3000)
    parser.add_argument("--draws", type=int, default=3000)
    parser.add_argument("--plain", action="store_true")
    settings = parser.parse_args()
    steps = settings.steps or ([0.08, 0.04, 0.02] if settings.plain else [0.2, 0.1, 0.05])
    print(f"{'':28}{'bias of E μ, sd':^34}{'bias of Var μ':^36}  Var of 2 fine - coarse")
    head = f"{'P-SGLD':>8}{'at ε/2':>8}{'P-SGRRLD':>10}"
    print(f"{'case':21} {'ε':6}{head:32}  {head:36}coupled uncoupled")
    for name in settings.cases:
        for step in steps:
            print(lines(SINGLE[name], step, settings), flush=True)


if __name__ == "__main__":
    main()
