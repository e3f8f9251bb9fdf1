"""Predict held-out ratings with error bars, and compare two models.

Reads the ratings.csv of any MovieLens release (columns userId, movieId, rating), which you
download from GroupLens, or simulates ratings if no file is passed. A tenth of the ratings is held
out; the others are fitted by GaussianMF (real-valued, with biases, noise and precisions sampled)
and by TweedieNMF (non-negative), and both predict the held-out ones.

    python examples/ratings.py [ratings.csv] [--components 32] [--draws 400] [--picture r.png]

Prints root mean squared errors, and the share of held-out ratings inside the 90 % intervals of
GaussianMF.
"""

import argparse
import time

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse

import daskfactor as dfac


def made_up(users: int = 400, items: int = 300, seed: int = 0) -> pd.DataFrame:
    """Half-star ratings of a matrix of rank 4 with biases, a fifth of it seen."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, 0.4, (users, 4)) @ rng.normal(0, 1, (4, items))
    mean = 3.4 + taste + rng.normal(0, 0.4, (users, 1)) + rng.normal(0, 0.4, items)
    user, item = np.nonzero(rng.random((users, items)) < 0.2)
    rating = np.clip(np.round(2 * (mean + rng.normal(0, 0.7, mean.shape))) / 2, 0.5, 5)
    return pd.DataFrame({"userId": user, "movieId": item, "rating": rating[user, item]})


def matrix(table: pd.DataFrame) -> sparse.csr_array:
    """Users x films; what nobody rated is not stored."""
    users, films = (pd.factorize(table[name], sort=True)[0] for name in ("userId", "movieId"))
    return sparse.coo_array((table["rating"].to_numpy(np.float32), (users, films))).tocsr()


def fit(held: object, model: object, draws: int) -> tuple[xr.Dataset, float]:
    """Predictions of the held-out ratings, and the seconds they took."""
    started = time.perf_counter()
    trace = dfac.sample(
        dfac.as_blocks(held.train, 2, unstored="missing", balance=True, allow_empty=True),
        model,
        draws=draws,
        tune=max(100, draws // 4),
        random_seed=0,
        monitor=held.cells,
        keep="moments",
        progressbar=False,
    )
    return dfac.monitored(trace, interval=0.9), time.perf_counter() - started


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ratings", nargs="?", help="ratings.csv of a MovieLens release")
    parser.add_argument("--components", type=int, default=32, help="number of components")
    parser.add_argument("--draws", type=int, default=400, help="number of draws")
    parser.add_argument("--picture", help="image file to write")
    arguments = parser.parse_args()

    table = pd.read_csv(arguments.ratings) if arguments.ratings else made_up()
    V = matrix(table)
    held = dfac.hold_out(V, 0.1, unstored="missing", keep_one=False, random_seed=0)
    print(f"{V.shape[0]} users, {V.shape[1]} films, {V.nnz} ratings, {held.values.size} held out")
    print(f"mean rating for all: RMSE {np.std(held.values - held.train.data.mean()):.4f}")
    for model in (
        dfac.TweedieNMF(arguments.components, beta=2.0),
        dfac.GaussianMF(arguments.components),
    ):
        found, seconds = fit(held, model, arguments.draws)
        error = np.sqrt(np.mean((found["mean"].values - held.values) ** 2))
        print(f"{type(model).__name__}: RMSE {error:.4f} in {seconds:.1f} s")
    inside = (held.values >= found["lower"].values) & (held.values <= found["upper"].values)
    print(f"share of held-out ratings in their 90 % intervals: {inside.mean():.3f}")
    if arguments.picture:
        draw(found, held.values, arguments.picture)


def draw(found: xr.Dataset, values: NDArray[np.float32], path: str) -> None:
    """Draw predictions by rating, and errors over the predicted standard deviation."""
    import matplotlib.pyplot as plt

    mean, sd = found["mean"].values.ravel(), found["sd"].values.ravel()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    stars = np.unique(values)
    left.boxplot([mean[values == star] for star in stars], showfliers=False)
    left.set_xticks(range(1, stars.size + 1), [f"{star:g}" for star in stars])
    left.set(xlabel="held-out rating", ylabel="predicted mean")
    order = np.array_split(np.argsort(sd), 12)
    right.plot(
        [sd[part].mean() for part in order],
        [np.sqrt(np.mean((mean[part] - values[part]) ** 2)) for part in order],
        "o",
    )
    ends = [sd.min(), sd.max()]
    right.plot(ends, ends, "k:", label="ideal")
    right.set(xlabel="predicted standard deviation", ylabel="root mean squared error")
    right.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
