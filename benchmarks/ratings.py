"""Ratings side by side: GaussianMF, and SMURFF, cmfrec and LIBMF where they can be imported.

Every method is given the same 90 % of the ratings and the same number of cores, and
is judged by the other 10 %, over several random splits. Run it with

    python benchmarks/ratings.py [ratings.csv] [--splits 5] [--components 32] [--cores 2]
        [--draws 800] [--tune 200] [--sweeps 80] [--chains 1] [--methods gaussian,gibbs,...]
        [--json]

The file is GroupLens' ``ratings.csv`` (columns userId, movieId, rating) or an .npz with
arrays ``user``, ``item`` and ``half_stars``; without one, ratings of 6040 users for 3706
films are made up: a million of them, skewed as such data are, whole stars from 1 to 5.

- ``gaussian``: ``sample(V, GaussianMF(K))``, everything at its default; its seconds are
  the whole call's, reading and warm start included, after one short call that compiles.
  RMSE of the posterior mean; share of the held-out ratings in their 90 % intervals.
- ``gibbs``: the same with ``Gibbs()``, ``--sweeps`` draws after a quarter as many. With several
  ``--chains`` both lines have effective draws a second of held-out cells' means, sampling and
  tuning together: the variance within chains over that of their means, summed over cells.
- ``tweedie-1`` and ``tweedie-2``: the same with ``TweedieNMF`` and its sampler (beta = 1
  with its dispersion estimated, beta = 2), for comparison.
- ``smurff``: Gibbs sampling of BPMF on centred ratings, 20 sweeps of burn-in and 80
  samples, at SMURFF's default of a fixed noise precision of 5; ``smurff-adaptive`` lets
  it estimate the noise; ``smurff-1.5`` fixes the precision at 1.5, about the best that
  can be had by trying on the test ratings, which is more than a user can do.
- ``cmfrec``: alternating least squares with biases at its defaults, a point estimate.
- ``libmf``: stochastic gradient descent at the defaults of its program, a point estimate.

Methods are interleaved split by split, so that a busy machine hits all of them. SMURFF's
line also says when its running mean was first as good as ``gaussian`` was at the end
("never" if it was not), and ``gaussian``'s RMSE less SMURFF's with its standard error
over the splits.
"""

import argparse
import csv
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Array = NDArray[Any]
LEVEL, WIDTH = 0.9, 1.6448536


class Ratings(NamedTuple):
    """Ratings as triples, and the shape of the matrix they belong to."""

    rows: Array
    cols: Array
    values: Array
    shape: tuple[int, int]

    def take(self, index: Array) -> "Ratings":
        return Ratings(self.rows[index], self.cols[index], self.values[index], self.shape)

    def matrix(self) -> sparse.csr_array:
        return sparse.csr_array((self.values, (self.rows, self.cols)), shape=self.shape)


class Outcome(NamedTuple):
    """What a method gave on one split; ``path`` is (seconds, RMSE) as it went on."""

    seconds: float
    rmse: float
    coverage: float = float("nan")
    effective: float = float("nan")
    path: tuple[tuple[float, float], ...] = ()


class Task(NamedTuple):
    """One split, and how much may be spent on it."""

    train: Ratings
    test: Ratings
    components: int
    cores: int
    tune: int
    draws: int
    seed: int
    sweeps: int = 80
    chains: int = 1
    device: str | None = None


def read_ratings(path: Path) -> Ratings:
    """Ratings of a file, users and films numbered without gaps."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            user, item, value = file["user"], file["item"], file["half_stars"] / 2
    else:
        with path.open(newline="") as text:
            lines = list(csv.DictReader(text))
        user = np.array([int(line["userId"]) for line in lines])
        item = np.array([int(line["movieId"]) for line in lines])
        value = np.array([float(line["rating"]) for line in lines])
    users, rows = np.unique(user, return_inverse=True)
    items, cols = np.unique(item, return_inverse=True)
    return Ratings(rows, cols, value.astype(np.float32), (len(users), len(items)))


def made_up_ratings(count: int = 1_000_000, seed: int = 0) -> Ratings:
    """Ratings from ten tastes, biases and noise, for films and by users of unequal zeal."""
    rng = np.random.default_rng(seed)
    shape = users, items = 6040, 3706
    zeal, fame = rng.lognormal(0, 1.0, users), rng.lognormal(0, 1.3, items)
    drawn = rng.choice(users, 8 * count // 5, p=zeal / zeal.sum()) * items
    drawn += rng.choice(items, 8 * count // 5, p=fame / fame.sum())
    cells = rng.permutation(np.unique(drawn))[:count]
    rows, cols = cells // items, cells % items
    W, H = 0.45 * rng.normal(size=(users, 10)), 0.45 * rng.normal(size=(items, 10))
    mean = 3.6 + 0.4 * rng.normal(size=users)[rows] + 0.5 * rng.normal(size=items)[cols]
    mean += np.einsum("nk,nk->n", W[rows], H[cols])
    stars = np.clip(np.round(mean + 0.8 * rng.normal(size=len(rows))), 1, 5)
    return Ratings(rows, cols, stars.astype(np.float32), shape)


def split(ratings: Ratings, seed: int) -> tuple[Ratings, Ratings]:
    """90 % and 10 % of the ratings at random; some users or films may be left without any."""
    order = np.random.default_rng(seed).permutation(len(ratings.values))
    held = len(order) // 10
    return ratings.take(order[held:]), ratings.take(order[:held])


def root_mean_square(errors: Array) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


# -- this package ------------------------------------------------------------------------


def ours(task: Task, model: Any, sampler: Any = None) -> Outcome:
    """The public way: blocks, sample, and the moments of the held-out cells.

    Of several chains, RMSE, coverage and seconds are those of one.
    """
    import daskfactor as dfac

    V = task.train.matrix()
    started = time.perf_counter()
    with dfac.as_blocks(V, task.cores, unstored="missing", allow_empty=True, balance=True) as data:
        trace = dfac.sample(
            data,
            model,
            sampler,
            draws=task.draws,
            tune=task.tune,
            chains=task.chains,
            random_seed=task.seed,
            keep="moments",
            monitor=(task.test.rows, task.test.cols),
            progressbar=False,
            device=task.device,
        )
    seconds = (time.perf_counter() - started) / task.chains
    means, variances = (trace["monitor"][name].values for name in ("mean", "var"))
    between = float(means.var(axis=0, ddof=1).sum()) if task.chains > 1 else float("nan")
    mean, variance = means[0], variances[0]
    low, high = model.likelihood.interval(mean, variance, float(trace.attrs["dispersion"]), LEVEL)
    truth = task.test.values
    inside = float(np.mean((truth >= low) & (truth <= high)))
    effective = float(variances.mean(axis=0).sum()) / between / seconds
    return Outcome(seconds, root_mean_square(mean - truth), inside, effective)


def gaussian(task: Task) -> Outcome:
    from daskfactor.models.gaussian import GaussianMF

    return ours(task, GaussianMF(task.components))


def gibbs(task: Task) -> Outcome:
    import daskfactor as dfac

    task = task._replace(draws=task.sweeps, tune=task.sweeps // 4)
    return ours(task, dfac.GaussianMF(task.components), dfac.Gibbs())


def tweedie(task: Task, beta: float) -> Outcome:
    import daskfactor as dfac

    return ours(task, dfac.TweedieNMF(task.components, beta=beta))


# -- peers -------------------------------------------------------------------------------


def smurff(task: Task, noise: str = "fixed") -> Outcome:
    """BPMF by Gibbs sampling; its running posterior mean is looked at after every sweep."""
    import smurff as peer

    mean = float(task.train.values.mean())
    train, test = (
        sparse.csr_matrix(part._replace(values=part.values.astype(float) - mean).matrix())
        for part in (task.train, task.test)
    )
    model = peer.AdaptiveNoise(5.0, 10.0) if noise == "adaptive" else None
    precision = 5.0 if noise in ("fixed", "adaptive") else float(noise)
    session = peer.TrainSession(
        priors=["normal", "normal"],
        num_latent=task.components,
        burnin=20,
        nsamples=80,
        seed=task.seed + 1,
        num_threads=task.cores,
        verbose=0,
    )
    session.addTrainAndTest(train, test, model or peer.FixedNoise(precision), is_scarce=True)
    started = time.perf_counter()
    session.init()
    path = []
    while (status := session.step()) is not None:
        path.append((time.perf_counter() - started, float(status.rmse_avg)))
    inside = float("nan")
    if noise != "adaptive":
        cells = session.getTestPredictions()
        away = np.array([cell.pred_avg - cell.val for cell in cells])
        spread = np.array([np.var(cell.pred_all) for cell in cells]) + 1 / precision
        inside = float(np.mean(np.abs(away) <= WIDTH * np.sqrt(spread)))
    return Outcome(path[-1][0], path[-1][1], inside, path=tuple(path))


def cmfrec(task: Task) -> Outcome:
    from cmfrec import CMF

    train = task.train
    started = time.perf_counter()
    model = CMF(k=task.components, nthreads=task.cores, verbose=False)
    model.fit(sparse.coo_matrix((train.values, (train.rows, train.cols)), shape=train.shape))
    seconds = time.perf_counter() - started
    found = model.predict(task.test.rows, task.test.cols)
    fallback = np.where(np.isfinite(found), found, train.values.mean())
    return Outcome(seconds, root_mean_square(fallback - task.test.values))


def libmf(task: Task) -> Outcome:
    from libmf import mf

    train = task.train
    triples = np.column_stack([train.rows, train.cols, train.values]).astype(np.float64)
    # Its Python wrapper's own defaults are no ridge and some lasso, not what LIBMF's are.
    penalty = {"lambda_p1": 0.0, "lambda_q1": 0.0, "lambda_p2": 0.1, "lambda_q2": 0.1}
    started = time.perf_counter()
    model = mf.MF(fun=0, k=task.components, nr_threads=task.cores, quiet=True, **penalty)
    model.fit(triples)
    seconds = time.perf_counter() - started
    # From its factors: the wrapper's own predict gives the mean for every other cell asked.
    shape, K = task.train.shape, task.components
    P, Q = np.full((shape[0], K), np.nan), np.full((shape[1], K), np.nan)
    P[: model.model.m], Q[: model.model.n] = model.p_factors(), model.q_factors()
    found = np.einsum("nk,nk->n", P[task.test.rows], Q[task.test.cols])
    fallback = np.where(np.isfinite(found), found, train.values.mean())
    return Outcome(seconds, root_mean_square(fallback - task.test.values))


METHODS: dict[str, tuple[str, Callable[[Task], Outcome]]] = {
    "gaussian": ("daskfactor", gaussian),
    "gibbs": ("daskfactor", gibbs),
    "tweedie-1": ("daskfactor", lambda task: tweedie(task, 1.0)),
    "tweedie-2": ("daskfactor", lambda task: tweedie(task, 2.0)),
    "smurff": ("smurff", smurff),
    "smurff-adaptive": ("smurff", lambda task: smurff(task, "adaptive")),
    "smurff-1.5": ("smurff", lambda task: smurff(task, "1.5")),
    "cmfrec": ("cmfrec", cmfrec),
    "libmf": ("libmf", libmf),
}
"""Name, the package it needs, and how it is run."""


def run_all(ratings: Ratings, options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """All methods on all splits, interleaved."""
    wanted = options.methods.split(",") if options.methods else list(METHODS)
    wanted = [name for name in wanted if importlib.util.find_spec(METHODS[name][0])]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in wanted}
    for number in range(options.splits):
        train, test = split(ratings, number)
        lengths = {name: getattr(options, name) for name in ("tune", "draws", "sweeps", "chains")}
        task = Task(train, test, options.components, options.cores, seed=number, **lengths)
        for name in wanted:
            method = METHODS[name][1]
            if number == 0 and METHODS[name][0] == "daskfactor":
                method(task._replace(tune=20, draws=20, sweeps=20, chains=1))  # compiles
            outcomes[name].append(method(task))
            print(f"split {number} {name}: {outcomes[name][-1][:4]}", flush=True)
    return outcomes


def first_as_good(path: tuple[tuple[float, float], ...], target: float) -> float:
    """Seconds until the running RMSE was at most ``target``; infinity if never."""
    return next((seconds for seconds, rmse in path if rmse <= target), float("inf"))


def table(outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """One line for each method: means over the splits, and the comparison with ``gaussian``."""
    lines = []
    own = outcomes.get("gaussian")
    for name, found in outcomes.items():
        rmse = np.array([outcome.rmse for outcome in found])
        line: dict[str, Any] = {
            "method": name,
            "seconds": float(np.mean([outcome.seconds for outcome in found])),
            "rmse": float(rmse.mean()),
            "coverage": float(np.mean([outcome.coverage for outcome in found])),
            "effective_per_second": float(np.mean([outcome.effective for outcome in found])),
        }
        if own is not None and name != "gaussian":
            ahead = rmse - np.array([outcome.rmse for outcome in own])
            line["behind_gaussian"] = float(ahead.mean())
            line["standard_error"] = (
                float(ahead.std(ddof=1) / np.sqrt(len(ahead))) if (len(ahead) > 1) else float("nan")
            )
            if found[0].path:
                times = [
                    first_as_good(outcome.path, mine.rmse)
                    for outcome, mine in zip(found, own, strict=True)
                ]
                line["seconds_to_same_rmse"] = float(np.median(times))
        lines.append(line)
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    print(
        f"{'method':16}{'seconds':>9}{'RMSE':>8}{'in 90 %':>9}{'ESS/s':>8}{'RMSE - ours':>18}"
        "  same RMSE at"
    )
    for line in lines:
        behind = ""
        if "behind_gaussian" in line:
            behind = f"{line['behind_gaussian']:+.4f} ± {line['standard_error']:.4f}"
        same = line.get("seconds_to_same_rmse")
        when = "" if same is None else "never" if np.isinf(same) else f"{same:.1f} s"
        print(
            f"{line['method']:16}{line['seconds']:9.2f}{line['rmse']:8.4f}"
            f"{line['coverage']:9.3f}{line['effective_per_second']:8.1f}{behind:>18}  {when}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("ratings", nargs="?", type=Path)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--components", type=int, default=32)
    parser.add_argument("--cores", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--tune", type=int, default=200)
    parser.add_argument("--draws", type=int, default=800)
    parser.add_argument("--sweeps", type=int, default=80)
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--methods", help=f"some of {','.join(METHODS)}; default all there are")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ratings = made_up_ratings() if options.ratings is None else read_ratings(options.ratings)
    lines = table(run_all(ratings, options))
    print(json.dumps(lines, indent=2)) if options.json else show(lines)


if __name__ == "__main__":
    main()
