"""The rank that one run finds beside the rank that has the largest evidence, and their times.

``TweedieNMF("auto")`` begins with many components, of which those fade that the data do not
need; :func:`select_rank` runs every rank by itself. Synthetic counts have a known rank; of
handwritten digits, gene expression and sounds nobody knows it, and the two are compared.
Counts of mean 1 are there to show where it fails: of 15 components it finds 12, of 20 six.

    python benchmarks/rank.py [--means 20 5] [--ranks 3 6 10 15 20] [--seeds 1] [--evidence]
        [--digits] [--expression leukemia.npz] [--sound piano.wav]

``--evidence`` adds `select_rank` over the ranks around what was found, which takes much longer.
An .npz file has one array of genes x samples.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import daskfactor as dfac

Array = NDArray[Any]
ROWS, COLUMNS = 200, 150
SHAPE = 0.5
"""Of the gamma law of true factors."""
AROUND = 0.5, 0.75, 1.0, 1.33, 2.0
"""Ranks that evidences are taken of, in units of what is looked for."""


class Case(NamedTuple):
    name: str
    V: Array
    truth: int | None
    settings: dict[str, Any]


def synthetic(mean: float, rank: int, seed: int) -> Case:
    rng = np.random.default_rng([seed, rank])
    mu = rng.gamma(SHAPE, 1.0, (ROWS, rank)) @ rng.gamma(SHAPE, 1.0, (rank, COLUMNS))
    V = rng.poisson(mu * (mean / mu.mean())).astype(np.float32)
    return Case(f"mean {mean:g}", V, rank, {"dispersion": 1.0})


def digits() -> Case:
    from sklearn.datasets import load_digits

    return Case("digits", load_digits().data.astype(np.float32), None, {})


def expression(path: str) -> Case:
    with np.load(path) as archive:
        V = next(archive[name] for name in archive.files if archive[name].ndim == 2)
    return Case("expression", V.astype(np.float32), None, {})


def sound(path: str) -> Case:
    """Power spectrogram under the gamma law, of which a small part of the mean is added."""
    from scipy.io import wavfile
    from scipy.signal import stft

    rate, signal = wavfile.read(path)
    signal = signal.astype(np.float64).reshape(len(signal), -1).mean(axis=1)
    _, _, spectrum = stft(signal / np.abs(signal).max(), rate, nperseg=1024)
    power = np.abs(spectrum) ** 2
    return Case("sound", (power + 1e-6 * power.mean()).astype(np.float32), None, {"beta": 0.0})


def cases(arguments: argparse.Namespace, seed: int) -> Iterator[Case]:
    for mean in arguments.means:
        for rank in arguments.ranks:
            yield synthetic(mean, rank, seed)
    if arguments.digits:
        yield digits()
    if arguments.expression:
        yield expression(arguments.expression)
    for path in arguments.sound:
        yield sound(path)


def in_one_run(case: Case, arguments: argparse.Namespace, seed: int) -> tuple[Array, float]:
    """Draws of the number of components, and seconds."""
    started = time.perf_counter()
    tree = dfac.sample(
        case.V,
        dfac.TweedieNMF("auto", **case.settings),
        draws=arguments.draws,
        tune=arguments.draws,
        random_seed=seed,
        keep="moments",
        progressbar=False,
    )
    found = tree["posterior"]["effective_components"].values.ravel()
    return found, time.perf_counter() - started


def by_evidence(case: Case, around: int, seed: int) -> tuple[str, float]:
    """The rank of the largest evidence, with those that are not told from it, and seconds."""
    ranks = sorted({max(1, round(around * part)) for part in AROUND})
    started = time.perf_counter()
    table = dfac.select_rank(
        case.V,
        dfac.TweedieNMF(1, **case.settings),
        ranks,
        held_out=None,
        random_seed=seed,
        progressbar=False,
    )
    seconds = time.perf_counter() - started
    close = table.attrs["not_distinguishable"]
    return f"{table.attrs['best']} of {ranks}" + (f", as good: {close}" if close else ""), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--means", type=float, nargs="*", default=[20.0, 5.0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[3, 6, 10, 15, 20])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--expression")
    parser.add_argument("--sound", nargs="*", default=[])
    parser.add_argument("--evidence", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("data          shape        truth   in one run (5-95 %)  seconds   by evidence")
    for seed in range(arguments.seeds):
        for case in cases(arguments, seed):
            found, seconds = in_one_run(case, arguments, seed)
            middle, (low, high) = int(np.median(found)), np.quantile(found, [0.05, 0.95])
            shape = f"{case.V.shape[0]} x {case.V.shape[1]}"
            line = f"{case.name:12s}  {shape:11s}  {case.truth or '-':>5}   "
            line += f"{middle:5d} ({low:.0f}-{high:.0f}){'':6s} {seconds:9.1f}"
            if arguments.evidence:
                best, longer = by_evidence(case, case.truth or middle, seed)
                line += f"   {best}; {longer:.1f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
