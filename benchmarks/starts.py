"""Starts of non-negative factorizations: the Q-Transform and NNDSVDar beside random ones.

All kinds of start are brought down by the same coordinate descent (scikit-learn's), a few
iterations of each in turn. The goal is the worst objective at which random starts end under
scikit-learn's own stopping rule. Times are medians over starts; to those of the Q-Transform a
fiftieth of what its starts share (singular vectors) is added, as for an ensemble of 50. Transfer
matrices, which all data share, are made before.

Masood and Doshi-Velez, sections 7.1, 8.1 and 8.2. The last line samples made-up rain.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import daskfactor as dfac
from benchmarks.harness import QUIET, Array, Figure, Run, Skip, line, timed
from daskfactor.errors import DaskfactorError
from daskfactor.executors import ThreadsExecutor
from daskfactor.inference import singular
from daskfactor.machine import single_threaded_blas
from daskfactor.stein.ensemble import assemble_matrix, by_coordinates
from tests.inference.rainfall import rainfall

STEP = 2
KINDS: tuple[Any, ...] = ("random", "q_transform", "nndsvdar")


def relative_error(X: Array, size: float, W: Array, H: Array) -> float:
    """Return ‖X - WH‖² / ‖X‖² without an array of the size of X."""
    cross = float((W * (X @ H.T)).sum(dtype=np.float64))
    return 1.0 + (float(((W.T @ W) * (H @ H.T)).sum(dtype=np.float64)) - 2.0 * cross) / size


def times_to_goal(V: Array, rank: int, starts: int, most: int) -> dict[str, tuple[float, float]]:
    """Return, by kind of start, median seconds to the goal and median errors of the starts."""
    executor, objective = ThreadsExecutor(1), dfac.SILFNMF(rank).for_optimizers()
    singular.learn_transfer(3, starts)
    found: dict[str, tuple[float, float]] = {}
    with dfac.as_blocks(V, dtype="float32") as data, single_threaded_blas():
        X = assemble_matrix(data)
        size = float(X.ravel().astype(np.float64) @ X.ravel())

        def descend(make: Callable[[int], Any], number: int, goal: float) -> tuple[float, float]:
            (W, H), spent = timed(make, number)
            first = error = relative_error(X, size, W, H)
            for _ in range(most // STEP):
                if error <= goal:
                    return spent, first
                (W, H, _), more = timed(by_coordinates, X, W, H, objective, STEP, 0.0)
                spent += more
                error = relative_error(X, size, W, H)
            return np.inf, first

        random = singular.prepare_starts(executor, data, objective, "random", starts, 0)
        ends = [by_coordinates(X, *random(n), objective, most, 1e-4)[:2] for n in range(starts)]
        goal = max(relative_error(X, size, *pair) for pair in ends)
        for kind in KINDS:
            given = executor, data, objective, kind, starts, 0, 3
            make, shared = timed(singular.prepare_starts, *given)
            each = np.array([descend(make, number, goal) for number in range(starts)])
            extra = shared / 50 if kind == "q_transform" else 0.0
            found[kind] = float(np.median(each[:, 0]) + extra), float(np.median(each[:, 1]))
    return found


def compared(name: str, V: Array, rank: int, run: Run) -> Iterator[Figure]:
    found = times_to_goal(V, rank, run.pick(2, 5, 20), run.pick(20, 200))
    for other in ("random", "nndsvdar"):
        yield Figure(found["q_transform"][0], "s", found[other][0], name, beside=other)
    errors = [found[kind][1] for kind in ("q_transform", "random")]
    yield Figure(errors[0], "", errors[1], f"{name}, error of the start", beside="random")


@line("Q-Transform starts of data, seconds to the same objective", minutes=0.4)
def data(run: Run) -> Iterator[Figure]:
    from daskfactor.demos import faces_folder, load_digits, load_faces

    yield from compared("digits", load_digits().truth, 10, run)
    if run.size == "quick":
        return
    try:
        leukemia = faces_folder().parent / "ALL_AML" / "ALL_AML_data.txt"
        if run.size == "long":
            yield from compared("faces", load_faces().truth, 10, run)
    except DaskfactorError as reason:
        raise Skip(str(reason)) from None
    yield from compared("leukemia", np.loadtxt(leukemia, dtype=np.float32), 3, run)


@line("Q-Transform starts, rank 20 of 500 × 500, by noise", minutes=0.7, long=True)
def noise(run: Run) -> Iterator[Figure]:
    rng, (size, rank) = np.random.default_rng(0), run.pick((60, 5), (500, 20))
    signal = rng.random((size, rank)) @ rng.random((rank, size))
    dirt = np.abs(rng.standard_normal(signal.shape))
    dirt *= np.linalg.norm(signal) / np.linalg.norm(dirt)
    for share in run.pick((0.1,), (0.01, 0.1, 1.0), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)):
        yield from compared(f"noise {share:g} of the signal", signal + share * dirt, rank, run)


@line(
    "error of starts by transfer rank, rank 10 of 500 × 500",
    "the best of 100 random starts",
    minutes=0.4,
    long=True,
)
def transfer(run: Run) -> Iterator[Figure]:
    rng, count = np.random.default_rng(0), run.pick(5, 100)
    X = rng.random((500, 10)) @ rng.random((10, 500))
    X = np.maximum(X + 0.05 * X.mean() * rng.standard_normal(X.shape), 0.0)
    size, found = np.linalg.norm(X), singular.consistent_signs(singular.dense_svd(X, 10))

    def errors(pairs: Any) -> Array:
        return np.array([np.linalg.norm(X - W @ H) / size for W, H in pairs])

    best = errors(singular.random_start(X.shape, 10, X.mean(), rng) for _ in range(count)).min()
    for rank in run.pick((3,), (1, 3, 10)):
        made = zip(*singular.learn_transfer(rank, count), strict=True)
        each = errors(singular.q_transform(found, [pair], 10, rng) for pair in made)
        yield Figure(float(np.median(each)), "", float(best), f"transfer rank {rank}, median")


@line("rain, β = .5, six seeds: the worst error of WH", "the best seed", minutes=0.6)
def rain(run: Run) -> Iterator[Figure]:
    V, mu = rainfall()
    lengths = dict.fromkeys(("draws", "tune"), run.pick(10, 200))
    dfac.sample(V, dfac.TweedieNMF(6, beta=0.5), draws=2, tune=2, executor="serial", **QUIET)
    for starts in (1, 4):
        errors, begun = [], time.perf_counter()
        for seed in range(run.pick(1, 6)):
            options = QUIET | {"random_seed": seed, "executor": "serial", "starts": starts}
            watch = {"keep": "moments", "monitor": np.ones(V.shape, bool)}
            tree = dfac.sample(V, dfac.TweedieNMF(6, beta=0.5), **lengths, **watch, **options)
            mean = tree["monitor"]["mean"].values[0].reshape(mu.shape)
            errors.append(float(np.linalg.norm(mean - mu) / np.linalg.norm(mu)))
        seconds = (time.perf_counter() - begun) / len(errors)
        bad = sum(error > 1.5 * min(errors) for error in errors)
        note = f"{bad} seeds beyond 1.5 times the best; {seconds:.1f} s a run"
        yield Figure(max(errors), "", min(errors), f"starts={starts}", note=note)
