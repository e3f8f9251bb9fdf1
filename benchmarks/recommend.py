"""The ten best of very many columns for very many rows, exactly; and how good they are on ratings.

    python benchmarks/recommend.py [ratings.npz] [--rows 100000] [--columns 100000]
        [--components 32] [--draws 100] [-n 10] [--by mean] [--law gamma|normal] [--checked 50]
        [--threads 2] [--splits 3] [--json]

Draws as a run of ratings leaves them are made up and written to a zarr store: factors whose
relative spread differs from row to row (0.05 to 0.5). A child process opens the store and calls
`recommend` with the columns that each row has seen excluded. Its line has wall-clock seconds
(the first half minute of compiling included), processor seconds, the most memory that the process
ever held (``ru_maxrss``, everything in it), how many cells were looked at with all draws, and
whether the result of some rows, with their order, is that of computing every cell of them.

With a file of ratings (arrays ``user``, ``item`` and ``half_stars``), a second table: precision
at n of held-out ratings of four stars and more, for users that have any, of `recommend` by mean
and by the lower and upper end of the interval, and of the films that most users rated. Films that a
user rated in the training data are excluded.

Measured (gamma, by mean, default sizes) on two cores of an EPYC that a dozen other processes
shared: 154 processor seconds, 1.63 GiB, 1.35e-3 of the cells looked at, equal to brute force.

Physical limit: looking at every cell with every draw takes 2 I J K D flops, 6.4e13 at the
default size, 3 to 6 minutes of two cores; a bound of 133 numbers per row takes 2.7e12.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse

import daskfactor as dfac

Array = NDArray[Any]
GOOD = 4.0


def write_draws(folder: Path, options: argparse.Namespace) -> None:
    """Write draws of factors whose spread differs from row to row, a draw at a time."""
    import zarr

    rng = np.random.default_rng(0)
    for name, size in (("W", options.rows), ("H", options.columns)):
        shape = size, options.components
        centre = rng.standard_normal(shape) if options.law == "normal" else rng.gamma(0.5, 1, shape)
        centre = centre.astype("f4")
        spread = rng.uniform(0.05, 0.5, (size, 1)).astype("f4")
        chunks = (1, min(size, 2**16), options.components)
        array = zarr.create_array(
            str(folder / name), shape=(options.draws, *shape), chunks=chunks, dtype="f4"
        )
        for draw in range(options.draws):
            noise = spread * rng.standard_normal(shape, "f4")
            array[draw] = centre * np.exp(noise) if options.law == "gamma" else centre + noise


def opened(folder: Path) -> xr.DataTree:
    """The draws as a trace."""
    import dask.array as da

    W, H = (da.from_zarr(str(folder / name))[None] for name in ("W", "H"))
    dims = ("chain", "draw", "component")
    values = {
        "W": ((*dims[:2], "user", "component"), W),
        "H": ((*dims, "item"), H.transpose(0, 1, 3, 2)),
    }
    coords = {"chain": [0], "draw": range(W.shape[1]), "component": range(W.shape[3])}
    return xr.DataTree.from_dict({"posterior": xr.Dataset(values, coords)})


def seen(rows: int, columns: int) -> Any:
    """About 20 columns of each row, popular ones more often."""
    rng = np.random.default_rng(1)
    at = np.repeat(np.arange(rows), 20)
    popular = (columns * rng.random(at.size) ** 2).astype(int)
    ones = np.ones(at.size, "f4")
    matrix = sparse.coo_array((ones, (at, popular)), shape=(rows, columns)).tocsr()
    matrix.data[:] = 1
    return matrix


def brute(trace: xr.DataTree, rows: Array, excluded: Any, by: str, n: int) -> tuple[Array, Array]:
    """The best columns of some rows, from every cell of them, in double precision."""
    posterior = trace["posterior"]
    W = posterior["W"][0].isel(user=rows).values.astype("f8")
    step = max(1, 2**27 // (rows.size * W.shape[0] * 8))
    parts = []
    for start in range(0, posterior.sizes["item"], step):
        H = posterior["H"][0, :, :, start : start + step].values.astype("f8")
        mu = W @ H
        level = {"lower": 0.05, "upper": 0.95}.get(by)
        parts.append(mu.mean(axis=0) if level is None else np.quantile(mu, level, axis=0))
    score = np.concatenate(parts, axis=1)
    score[excluded[rows].toarray() > 0] = -np.inf
    best = np.argsort(-score, axis=1, kind="stable")[:, :n]
    return best, np.take_along_axis(score, best, axis=1)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What one call takes, in this process, and whether it is right."""
    trace, excluded = opened(folder), seen(options.rows, options.columns)
    started, before = time.perf_counter(), os.times()
    found = dfac.recommend(
        trace, n=options.n, exclude=excluded, by=options.by, progressbar=options.progress
    )
    seconds, after = time.perf_counter() - started, os.times()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rng = np.random.default_rng(2)
    checked = np.sort(rng.permutation(options.rows)[: options.checked])
    best, score = brute(trace, checked, excluded, options.by, options.n)
    own = found.isel(user=checked)
    return {
        "seconds": seconds,
        "processor_seconds": after.user + after.system - before.user - before.system,
        "peak_gib": peak,
        "looked_at": found.attrs["looked_at"] / (options.rows * options.columns),
        "rows_checked": int(checked.size),
        "equal": bool((own["position"].values == best).all()),
        "largest_difference": float(np.abs(own[options.by].values - score).max()),
    }


def precision(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Precision at n on held-out ratings, mean over splits."""
    with np.load(path) as file:
        users, rows = np.unique(file["user"], return_inverse=True)
        films, columns = np.unique(file["item"], return_inverse=True)
        stars = file["half_stars"] / 2
    V = sparse.coo_array((stars, (rows, columns)), shape=(users.size, films.size)).tocsr()
    totals: dict[str, list[float]] = {}
    for split in range(options.splits):
        held = dfac.hold_out(V, 0.1, unstored="missing", random_seed=split)
        trace = dfac.sample(
            dfac.as_blocks(held.train, unstored="missing"),
            dfac.GaussianMF(options.components),
            draws=options.draws,
            tune=options.draws,
            random_seed=split,
            progressbar=False,
        )
        good = held.values >= GOOD
        wanted = sparse.coo_array(
            (np.ones(good.sum()), (held.cells[0][good], held.cells[1][good])), shape=V.shape
        ).tocsr()
        asked = np.flatnonzero(np.diff(wanted.indptr) > 0)
        lists = {
            f"by {by}": dfac.recommend(trace, n=options.n, exclude=held.train, by=by)[
                "position"
            ].values[asked]
            for by in ("mean", "lower", "upper")
        }
        count = np.diff(held.train.tocsc().indptr)
        popular = np.where(held.train[asked].toarray() > 0, -1, count)
        lists["most rated"] = np.argsort(-popular, axis=1, kind="stable")[:, : options.n]
        for name, best in lists.items():
            hits = wanted[np.repeat(asked, options.n), best.reshape(-1)].sum() / asked.size
            totals.setdefault(name, []).append(float(hits) / options.n)
    return [
        {"list": name, "precision": float(np.mean(all_)), "splits": len(all_)}
        for name, all_ in totals.items()
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ratings", nargs="?", type=Path)
    for name, default in (
        ("rows", 100_000), ("columns", 100_000), ("components", 32), ("draws", 100),
        ("checked", 50), ("threads", 2), ("splits", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("-n", type=int, default=10)
    parser.add_argument("--by", default="mean", choices=("mean", "lower", "upper"))
    parser.add_argument("--law", default="gamma", choices=("gamma", "normal"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Print what was asked for."""
    options = arguments()
    if options.child is not None:
        print(json.dumps(measure(options.child, options)))
        return
    if options.ratings is not None:
        found: Any = precision(options.ratings, options)
        for line in found:
            print(f"{line['list']:>12}  precision at {options.n}: {line['precision']:.4f}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_draws(Path(folder), options)
            cores = sorted(os.sched_getaffinity(0))[: options.threads]
            command = [sys.executable, __file__, *sys.argv[1:], "--child", folder]
            child = subprocess.run(
                command, stdout=subprocess.PIPE, check=True, text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
        found = json.loads(child.stdout.splitlines()[-1])
        print(
            f"{options.rows} x {options.columns}, K={options.components}, {options.draws} draws, "
            f"{options.law}, by {options.by}: {found['seconds']:.0f} s, "
            f"{found['processor_seconds']:.0f} processor s, {found['peak_gib']:.2f} GiB, "
            f"{found['looked_at']:.2e} of the cells looked at; "
            f"{'equal to' if found['equal'] else 'UNLIKE'} every cell of {found['rows_checked']} "
            f"rows (scores within {found['largest_difference']:.1e})"
        )
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
