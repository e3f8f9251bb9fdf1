"""The best columns of rows are those of looking at every cell, whatever the blocks."""

import itertools
import json
from contextlib import closing

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse

import daskfactor as dfac
from daskfactor.data.storage import ArrayFile
from daskfactor.errors import DataError, OptionError
from daskfactor.recommender import ranking
from daskfactor.recommender.ranking import Search, Stack, score_of
from daskfactor.results.predictive_moments import weighted_quantiles
from tests.fake_run import drawn_tree
from tests.pairwise import pairwise
from tests.random_sparse import random_array
from tests.refusals import refused

I, J, K, CHAINS, DRAWS = 60, 90, 3, 2, 14  # noqa: E741, the papers' own letters
ITEMS = [f"film {j}" for j in range(J)]


def made(signed=False, weights=None, dtype="f4"):
    """A trace whose draws are about their means, or have weights as particles do."""
    rng, dims = np.random.default_rng(5), ("chain", "draw")
    W, H = rng.gamma(1, 1, (I, K)) - signed, rng.gamma(1, 1, (J, K)) - signed

    def spread(F):
        shape = CHAINS, DRAWS, *F.shape
        by = 1 + 0.4 * rng.standard_normal(shape) if signed else rng.gamma(4, 0.25, shape)
        return (F * by).astype(dtype)

    W, H = spread(W), spread(H).transpose(0, 1, 3, 2)
    tree = drawn_tree(W, H, ("user", "item"), component=range(K), item=ITEMS)
    if weights is not None:
        at = {name: tree["posterior"][name] for name in dims}
        tree["sample_stats"] = xr.DataTree(xr.Dataset({"weight": (dims, weights)}, at))
    tree.attrs = {"model": json.dumps(dfac.GaussianMF(K).to_dict()), "dispersion": 1.0}
    return tree


def masses():
    found = np.random.default_rng(8).gamma(0.3, 1, (CHAINS, DRAWS))
    found[found < 0.1] = 0
    return found / found.sum()


def brute(trace, by, weights=None):
    """Scores of all cells, (I, J), in double precision."""
    W, H = (trace["posterior"][name].values.astype("f8") for name in "WH")
    mu = (W @ H).reshape(-1, W.shape[2], H.shape[3])
    w = np.full(len(mu), 1 / len(mu)) if weights is None else weights.reshape(-1)
    if by == "mean":
        return np.tensordot(w, mu, 1)
    level = {"lower": 0.05, "upper": 0.95}[by]
    if weights is None:
        return np.quantile(mu, level, axis=0)
    return weighted_quantiles(mu[w > 0], w[w > 0], (level,))[0]


def best_of(score, n):
    return np.argsort(-score, axis=1, kind="stable")[:, :n]


@pairwise(by=["mean", "lower", "upper"], signed=[False, True], weighted=[False, True])
def test_the_best_are_those_of_all_cells_and_of_a_few_rows_the_same(by, signed, weighted):
    weights = masses() if weighted else None
    trace = made(signed, weights)
    score, found = brute(trace, by, weights), dfac.recommend(trace, n=7, by=by)
    best = best_of(score, 7)
    assert_array_equal(found["position"], best)
    assert_array_equal(found["item"], np.array(ITEMS)[best])
    assert_allclose(found[by], np.take_along_axis(score, best, 1), rtol=1e-12)
    assert found.sizes == {"user": I, "rank": 7}
    assert found.attrs["looked_at"] < I * J or by != "mean"
    some, few = dfac.recommend(trace, [9, 3, 59], n=7, by=by), found.isel(user=[9, 3, 59])
    assert_array_equal(some["position"], few["position"])
    for name in ("mean", "sd", "lower", "upper"):
        assert_allclose(some[name], few[name], rtol=1e-12)


@pytest.mark.parametrize("weights", [None, masses()], ids=["equal", "weighted"])
def test_figures_are_those_of_predict(weights):
    trace = made(weights=weights)
    found = dfac.recommend(trace, [3, 8], n=4, interval=0.8)
    for at, user in enumerate((3, 8)):
        cells = dfac.predict(trace, [user], found["item"].values[at], of="mean", interval=0.8)
        for name in ("mean", "sd", "lower", "upper"):
            assert_allclose(found[name][at], cells[name][0], rtol=2e-5)


def stack_of(values, file, step=10**6):
    """Draws of a factor (rows, draws, K), given a few draws at a time."""
    rows, draws, width = values.shape
    parts = (slice(at, min(at + step, draws)) for at in range(0, draws, step))
    given = ((own, values[:, own].transpose(1, 0, 2)) for own in parts)
    return Stack.filled((rows, draws, width), values.dtype, given, file)


@pytest.fixture
def searched():
    """The search under other sizes of blocks, groups of draws and rooms in memory."""
    W, H = np.random.default_rng(3).gamma(1, 1, (2, 12, 70, 2)).astype("f4")
    H[:, 11] = H[:, 4]  # equal scores: the first one is better
    weights, levels = np.full(12, 1 / 12), (0.05, 0.95)
    none = np.zeros(71, np.int64), np.zeros(0, np.int64)

    def search(step, budget, sizes):
        file = ArrayFile(budget=budget)
        stacks = [stack_of(F.transpose(1, 0, 2), file, step) for F in (W, H)]
        score = score_of("mean", levels, weights, True)
        given = score, 5, levels, weights, *none, 2, lambda done: None, sizes, sizes
        with closing(file):
            return Search(*given).run(stacks[0], stacks[1], file)

    return search


def test_blocks_do_not_matter(searched, monkeypatch):
    whole = searched(12, 2**30, 2**30)
    pairs = {(row, 4) for row, own in enumerate(whole.columns) if 4 in own}
    assert pairs
    for row, _ in pairs:  # of two equal columns the first is the better
        own = whole.columns[row].tolist()
        assert 11 not in own or own.index(11) == own.index(4) + 1
    monkeypatch.setattr(ranking, "LEAST", 8)
    monkeypatch.setattr(ranking, "TILE", 5)
    for step, budget, sizes in itertools.product((1, 5), (0, 3000), (1, 2000)):
        found = searched(step, budget, sizes)
        assert_array_equal(found.columns, whole.columns)
        assert_array_equal(found.figures, whole.figures)


@pytest.mark.parametrize("by", ["mean", "lower", "upper"])
@pytest.mark.parametrize("signed", [False, True])
def test_no_score_is_above_its_bound(by, signed):
    trace, n = made(signed), CHAINS * DRAWS
    W, H = trace["posterior"]["W"].values, trace["posterior"]["H"].values.transpose(0, 1, 3, 2)
    flat = (F.reshape(-1, *F.shape[2:]).transpose(1, 0, 2) for F in (W, H))
    sides, weights = tuple(stack_of(F, ArrayFile(budget=2**30)) for F in flat), np.full(n, 1 / n)
    score = score_of(by, (0.05, 0.95), weights, not signed)
    P = np.linalg.qr(np.random.default_rng(0).standard_normal((K * n, 4)))[0]
    for directions in (ranking.basis(sides, np.sqrt(weights)), P):
        given = directions, weights, score.sd_factor > 0
        row, column = (ranking.shortened(side, *given) for side in sides)
        of_rows, of_columns = ranking.bounding(row, column, score)
        assert (of_rows @ of_columns.T >= brute(trace, by)).all()


def test_quantiles_are_bounded_by_means_and_spreads_of_any_draws():
    weights = np.full(100, 0.01)
    lower, upper = (score_of(by, (0.05, 0.95), weights, True) for by in ("lower", "upper"))
    for low in range(101):  # draws of two values only are the worst there are
        mu = np.sort(np.where(np.arange(100) < low, 0.0, 1.0))
        for score in (lower, upper):
            bound = score.mean_factor * mu.mean() + score.sd_factor * mu.std()
            assert np.quantile(mu, score.level) <= bound + 1e-12


SEEN = random_array((I, J), density=0.3, rng=np.random.default_rng(1), format="csr")


def excluded(kind, tmp_path):
    (rows, columns), stars = SEEN.tocoo().coords, SEEN.tocoo().data
    if kind == "dense":
        dense = np.full(SEEN.shape, np.nan)
        dense[rows, columns] = 0.0
        return dense
    if kind == "blocks":
        return dfac.as_blocks(SEEN, 3, unstored="zero", balance=True, allow_empty=True)
    table = pd.DataFrame({"user": rows, "item": np.array(ITEMS)[columns], "stars": stars})
    table = table.sample(frac=1, random_state=0)
    table = pd.concat([table, table.head(1).assign(item="unheard of")])
    table.to_csv(tmp_path / "seen.csv", index=False)
    return {"sparse": SEEN, "table": table, "file": str(tmp_path / "seen.csv")}[kind]


@pytest.mark.parametrize("kind", ["sparse", "dense", "blocks", "table", "file"])
def test_what_was_seen_is_left_out(kind, tmp_path):
    trace = made()
    score = brute(trace, "mean")
    score[SEEN.toarray() > 0] = -np.inf
    found = dfac.recommend(trace, n=6, exclude=excluded(kind, tmp_path))
    assert_array_equal(found["position"], best_of(score, 6))
    some = dfac.recommend(trace, [40, 7], 6, columns=ITEMS[10:70], exclude=excluded(kind, tmp_path))
    assert_array_equal(some["position"], best_of(score[[40, 7], 10:70], 6) + 10)


def test_a_row_with_few_columns_left():
    left = np.zeros((I, J))
    left[0, 2:], left[1] = 1, 1
    found = dfac.recommend(made(), slice(0, 3), 4, exclude=sparse.csr_array(left))
    assert (found["position"].values[0, 2:] == -1).all()
    assert (found["item"].values[1] == "").all()
    assert np.isnan(found["mean"].values[1]).all()
    assert (found["position"].values[2] >= 0).all()


def test_points_new_rows_and_stores(tmp_path):
    V = np.random.default_rng(0).poisson(3, (20, 15)).astype("f4")
    V[np.random.default_rng(1).random(V.shape) < 0.3] = np.nan
    quiet, store = {"random_seed": 0, "progressbar": False}, str(tmp_path / "run.zarr")
    trace = dfac.sample(V, dfac.GaussianMF(2), store=store, draws=4, tune=4, **quiet)
    score = brute(trace, "mean")
    assert_array_equal(dfac.recommend(store, n=3)["position"], best_of(score, 3))
    score[~np.isnan(V)] = -np.inf
    unseen = dfac.recommend(store, 4, 3, exclude="seen")
    assert_array_equal(unseen["position"], best_of(score[4:5], 3))

    point = dfac.optimize(V, dfac.TweedieNMF(2), **quiet)
    found, mean = dfac.recommend(point, n=3), (point["W"] @ point["H"]).values.astype("f8")
    assert_allclose(found["mean"], -np.sort(-mean)[:, :3], rtol=1e-6)
    assert (found["sd"].values < 1e-6).all()

    new = trace["posterior"]["W"].isel(row=[3, 5], draw=[1, 3]).assign_coords(row=["x", "y"])
    found = dfac.recommend(trace, new, 3)
    mu = new.values.astype("f8") @ trace["posterior"]["H"].values[:, [1, 3]].astype("f8")
    assert_array_equal(found["position"], best_of(mu.mean(axis=(0, 1)), 3))
    assert found["row"].values.tolist() == ["x", "y"]
    drawn = dfac.transform(point, V[:2], draws=3, **quiet)
    mean = drawn.mean(("chain", "draw")).values @ point["H"].values
    assert_array_equal(dfac.recommend(point, drawn, 2)["position"], best_of(mean, 2))


def test_bad_options():
    for options, message in (
        ({"n": 0}, "n must be a whole number of at least 1"),
        ({"by": "sd"}, 'by must be "mean", "lower" or "upper", got .sd'),
        ({"interval": 1}, "interval must lie strictly between"),
        ({"columns": ["film 77", "fulm 3"]}, "no 'fulm 3' among .* did you mean 'film 3'"),
        ({"exclude": "seen"}, "needs the data of the run, which it does not store"),
        ({"exclude": np.ones((I, J))}, "exclude observes every cell"),
        ({"exclude": sparse.csr_array(np.eye(3))}, "exclude has shape 3 x 3, but the run 60 x 90"),
        ({"rows": xr.DataArray(np.ones((2, K)), dims=("user", "component"))}, "are a point"),
    ):
        refused((OptionError, DataError), message, dfac.recommend, made(), **options)


def test_cells_of_stacked_dimensions_are_left_out_by_their_labels():
    coords = {"lat": [10, 20, 30, 40], "lon": [1.0, 2.0, 3.0]}
    values = np.random.default_rng(4).normal(size=(6, 4, 3))
    maps = xr.DataArray(values, coords, ("time", "lat", "lon"))
    options = {"draws": 3, "tune": 3, "random_seed": 0, "progressbar": False}
    seen = maps.where((maps["lat"] == 10) & (maps["lon"] == 1.0))
    stacked = seen.stack(place=("lat", "lon"))
    other = stacked.reset_index("place").assign_coords(place=range(12))
    for data, rows in ((maps, "time"), (maps.stack(place=("lat", "lon")), None)):
        trace = dfac.sample(data, dfac.GaussianMF(2), rows=rows, **options)
        for exclude in (stacked, stacked[:, ::-1], seen.stack(place=("lon", "lat"))):
            found = dfac.recommend(trace, n=12, exclude=exclude)["position"].values
            assert 0 not in found
            assert 11 in found
            one = dfac.recommend(trace, rows=[2], columns=[0, 11], n=2, exclude=exclude)
            assert_array_equal(one["position"].values, [[11, -1]])
        refused(DataError, "none of the columns of exclude", dfac.recommend, trace, exclude=other)
    table = pd.DataFrame({"user": [0, 1], "item": ["a", "b"], "stars": [1.0, 2.0]})
    table = dfac.as_blocks(table, table=True, unstored="missing")
    match = r"none of the columns of exclude .* exclude has 'a', ..., the"
    refused(DataError, match, dfac.recommend, made(), exclude=table)
