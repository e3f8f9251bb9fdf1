"""What a run says by itself of counts: seldom false of those that its own model makes.

A draw of a posterior and the means that the data were drawn with have one law, given the data, if
the model is right. So a test that is right at the latter is right at draws.
"""

import warnings

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.coupled.source import CoupledData, join
from daskfactor.data.sources import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.inference.chain import Chain
from daskfactor.inference.dispersion import (
    DispersionRule,
    dispersion_rule,
    poisson_limit,
    still_falls,
)
from daskfactor.inference.multiplicative import mean_floor, start_state
from daskfactor.inference.passes import Place
from daskfactor.inference.program import Tally, tally
from daskfactor.runs.files import Checkpoints
from tests.statistical.made_counts import counts, means

pytestmark = pytest.mark.statistical

QUICK = {"draws": 20, "tune": 60, "random_seed": 0, "progressbar": False}
REPLICATIONS = 200
RATIOS = "times as much as Poisson"


def departs(V, mu, weights=None):
    """Tell whether counts are found to vary more, or less, than Poisson counts with these means."""
    w = np.ones(V.shape) if weights is None else weights
    values, at = np.unique(V, return_inverse=True)
    sums = (np.bincount(at.ravel(), power.ravel()) for power in (w, w**2))
    total, limit = poisson_limit(Tally(values, *sums), w.sum(), 0)
    return abs((w * (V - mu) ** 2).sum() / total - 1) > limit - 1


def pearson_departs(V, mu):
    """Tell the same by Pearson's statistic, as if all means were the same."""
    excess = ((V - mu) ** 2 / mu).mean() - 1
    return abs(excess) > 0.1 + 5 * np.sqrt((2 + 1 / V.mean()) / V.size)


def alarms(test, shape, mean, ratio=1.0):
    """Give the share of data sets that a test finds to be no Poisson counts."""
    found = 0
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        mu = means(rng, shape, mean)
        found += test(counts(rng, mu, ratio), mu)
    return found / REPLICATIONS


@pytest.mark.parametrize("shape", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("mean", [0.01, 1.0, 100.0, 1e6])
def test_poisson_counts_are_seldom_said_to_be_none(shape, mean):
    assert alarms(departs, shape, mean) <= 0.02


@pytest.mark.parametrize(("shape", "mean"), [(0.3, 0.1), (1.0, 1.0), (3.0, 1e4)])
def test_uneven_weights_raise_no_alarm(shape, mean):
    def departs_by_weight(V, mu):
        return departs(V, mu, np.random.default_rng(int(V.sum())).lognormal(0, 1.5, V.shape))

    assert alarms(departs_by_weight, shape, mean) <= 0.02
    V = np.array([[0.0, 2.0, 2.0], [1.0, np.nan, 2.0]])
    weights = np.array([[0.5, 2.0, 3.0], [4.0, 1.0, 1.0]])
    found = tally(as_blocks(V, weights=weights), SerialExecutor())
    np.testing.assert_array_equal(found, [[0, 1, 2], [0.5, 4, 6], [0.25, 16, 14]])


@pytest.mark.parametrize(("shape", "mean"), [(0.3, 0.1), (0.3, 100.0), (1.0, 1.0), (3.0, 1e4)])
def test_counts_that_vary_twice_as_much_are_found(shape, mean):
    assert alarms(departs, shape, mean, ratio=2.0) > 0.9
    assert alarms(departs, shape, mean, ratio=1.05) < 0.05
    # The test of Poisson counts can fail: cells of tiny means rule Pearson's statistic.
    assert alarms(pearson_departs, 0.1, 1.0) > 0.5


def scaled_counts():
    rng = np.random.default_rng(2)
    mu = rng.gamma(1, 1, (100, 3)) @ rng.gamma(1, 1, (3, 160))
    return rng.poisson(mu * 10.0 ** rng.uniform(-4, 0.5, 160)).astype(float)


def sparse_counts(shape=0.1, mean=1.0, seed=0):
    rng = np.random.default_rng(seed)
    mu = rng.gamma(shape, 1, (100, 4)) @ rng.gamma(shape, 1, (4, 70))
    return rng.poisson(mu * mean / mu.mean()).astype(float)


@pytest.mark.parametrize(
    ("V", "model"),
    [
        (scaled_counts(), dfac.TweedieNMF(3)),
        pytest.param(
            sparse_counts(), dfac.TweedieNMF(4, shape_w=0.1, shape_h=0.1), marks=pytest.mark.full
        ),
        pytest.param(sparse_counts(), dfac.TweedieNMF(8), marks=pytest.mark.full),
        (sparse.csr_array(sparse_counts(0.05)), dfac.TweedieNMF(4, shape_w=0.05, shape_h=0.05)),
    ],
    ids=["columns of all sizes", "sparse factors", "too many components", "stored sparsely"],
)
def test_runs_leave_poisson_counts_their_dispersion(V, model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tree = dfac.sample(V, model, unstored="zero" if sparse.issparse(V) else None, **QUICK)
    assert tree.attrs["dispersion"] == 1.0
    assert not [one for one in caught if RATIOS in str(one.message)]


def test_a_chain_that_is_stuck_leaves_the_others_their_dispersion():
    """R-hat then shows it, which it would not where all spread as widely."""
    rng = np.random.default_rng((5, 5))
    V, model = counts(rng, means(rng, 0.05, 100.0)), dfac.TweedieNMF(3, shape_w=0.05, shape_h=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dfac.errors.SamplingWarning)
        warnings.filterwarnings("error", RATIOS)
        tree = dfac.sample(V, model, chains=4, **QUICK | {"random_seed": 5})
    assert tree.attrs["dispersion"] == 1.0
    levels = tree["sample_stats"]["lp"].values.mean(axis=1)
    assert np.ptp(levels) > 1000, "no chain is stuck"


@pytest.mark.parametrize("stored", [np.asarray, sparse.csr_array])
def test_runs_find_counts_that_are_not_poisson(stored):
    rng = np.random.default_rng(0)
    V = counts(rng, means(rng, 0.5, 3.0), ratio=3.0)
    options = QUICK | {"unstored": "zero" if stored is not np.asarray else None}
    with pytest.warns(dfac.errors.DataWarning, match=RATIOS):
        tree = dfac.sample(stored(V), dfac.TweedieNMF(3), **options)
    assert 2 < tree.attrs["dispersion"] < 4


def test_matrices_that_share_factors_have_a_verdict_each():
    rng = np.random.default_rng(1)
    rows = rng.gamma(0.3, 1, (60, 3))
    plain, wild = (rows @ rng.gamma(0.3, 10, (3, 40)) for _ in range(2))
    V = {"plain": counts(rng, plain), "wild": counts(rng, wild + 1e-9, ratio=4.0)}
    relation = {name: dfac.Relation("row", name, law="poisson") for name in V}
    with pytest.warns(dfac.errors.DataWarning, match=f"the counts of 'wild' vary [34].* {RATIOS}"):
        tree = dfac.sample(V, dfac.Coupled(3, relations=relation), **QUICK)
    assert tree.attrs["dispersion_plain"] == 1.0
    assert 2.5 < tree.attrs["dispersion_wild"] < 5.5


@pytest.mark.parametrize(("whole", "least", "most"), [(True, 1.0, 1.0), (False, 0.3, 0.7)])
@pytest.mark.filterwarnings("ignore:with shape_")
def test_points_under_peaked_priors_fit_the_data(whole, least, most):
    rng = np.random.default_rng(0)
    mu = rng.gamma(0.3, 1, (60, 3)) @ rng.gamma(0.3, 10, (3, 50)) + 0.01
    V = rng.poisson(mu).astype(float) if whole else rng.gamma(2 * mu, 0.5).round(3)
    model = dfac.TweedieNMF(3, shape_w=0.1, shape_h=0.1)
    point = dfac.optimize(V, model, random_seed=0, progressbar=False)
    assert least <= point.attrs["dispersion"] <= most
    assert (point["W"].values @ point["H"].values).mean() == pytest.approx(V.mean(), rel=0.05)


@pytest.mark.parametrize("kind", ["dense", "sparse", "masked"])
def test_counts_vary_as_their_squares_say(kind):
    V = sparse_counts(0.5, 2.0)
    if kind == "masked":
        V[np.random.default_rng(1).random(V.shape) < 0.2] = np.nan
    model = dfac.TweedieNMF(3)
    given = (sparse.csr_array(V), 2) if kind == "sparse" else (V, 2)
    with dfac.as_blocks(*given, dtype="float64", unstored="zero") as data:
        state, rule = start_state(data, model, 0, 0), DispersionRule(model, data)
        mu = state.gather("rows") @ state.gather("columns").T
        floor = mean_floor(data, model.likelihood)
        place = Place(SerialExecutor(), data, state, floor)
        (varied,) = rule.variation(place, np.ones(1))
    assert varied == pytest.approx(np.nansum((V - mu) ** 2) / np.nansum(V))
    seen = V[~np.isnan(V)]
    pairs = np.sum(seen * (seen - 1))
    limit = 1.1 + 4 * np.sqrt(2 * (pairs + 4)) / seen.sum() + 1e-6 * pairs / seen.sum()
    assert rule.limit[0] == pytest.approx(limit)


BOTH = {name: dfac.Relation("row", name, law="poisson") for name in "ab"}


def data_of(V, several):
    """Counts alone, or beside others that have the same rows."""
    if several:
        return join({"a": V, "b": 2.0 * V}, BOTH, dtype="float64")
    return dfac.as_blocks(V, 1, dtype="float64")


def model_of(data):
    several = isinstance(data, CoupledData)
    return (dfac.Coupled(3, relations=BOTH) if several else dfac.TweedieNMF(3)).placed(data.placed)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_all_chains_start_by_the_same_estimate(several):
    """The first decides whether counts are Poisson; others estimate how much theirs vary."""
    rng = np.random.default_rng(1)
    V = counts(rng, means(rng, 0.1, 3.0), ratio=4.0)
    found = []
    with data_of(V, several) as data:
        model = model_of(data)
        state = start_state(data, model, 0, 0)
        floor, executor = mean_floor(data, model.likelihood), SerialExecutor()
        first, second = (dispersion_rule(model, data) for _ in range(2))
        for rule in (first, second):
            _, pearson = rule.estimate_at(Place(executor, data, state, floor))
            found.append(rule.test_poisson(Place(executor, data, state, floor), pearson))
            second.memory, second.settled = rule.memory, rule.settled
    assert second.fixed is None
    assert found[0] == found[1] != pearson


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_counts_go_by_the_chain_that_fits_them_best(several):
    """And that is waited for, other chains are not."""
    with data_of(sparse_counts(), several) as data:
        rule = dispersion_rule(model_of(data), data)
    one = rule.matrices[-1].scale

    def pool(*estimates):
        given = [(phi * one, waits) for phi, waits in estimates]
        pairs = [((one, phi), [True, waits]) for phi, waits in given]
        found = rule.pool(pairs if several else [(phi, [waits]) for phi, waits in given])
        return float(found[-1] / one)

    assert pool((3.0, False), (900.0, False)) == pytest.approx(3.0)
    assert pool((3.0, False), (4.0, True)) == pytest.approx(3.0)
    assert pool((3.0, False), (2.0, True)) == pytest.approx(1.0)
    # A chain on its way is waited for.
    assert still_falls([2.0, 2.0], 1.2)  # who knows after two looks
    assert still_falls([9.0, 7.0, 5.0, 4.0, 3.0, 2.5, 2.0, 1.6], 1.2)
    assert not still_falls([9.0, 7.0, 5.0, 2.0, 2.02, 1.97, 2.03, 1.96], 1.2)
    assert not still_falls([0.5, 0.3, 0.21, 0.2, 0.19, 0.2], 1.2)


def test_the_dispersion_of_a_run_is_the_mean_of_its_later_estimates(monkeypatch):
    looks, plain = [], DispersionRule.at_draw

    def noted(*given):
        looks.append(plain(*given))
        return looks[-1]

    monkeypatch.setattr(DispersionRule, "at_draw", noted)
    rng = np.random.default_rng(3)
    V = rng.gamma(2.0, rng.gamma(1, 1, (12, 2)) @ rng.gamma(1, 1, (2, 9)))
    tree = dfac.sample(V, dfac.TweedieNMF(2, beta=0.0), chains=2, **QUICK)
    each = np.array(looks).reshape(-1, 2)  # chains take turns
    assert len(each) == 8
    assert tree.attrs["dispersion"] == pytest.approx(each[4:].mean(), rel=1e-6)


@pytest.mark.parametrize("n_components", [3, "auto"])  # of many at first some fade
def test_a_run_that_stops_while_it_estimates_goes_on_with_the_same_estimates(
    n_components, tmp_path, monkeypatch
):
    rng = np.random.default_rng(0)
    V = counts(rng, means(rng, 0.5, 3.0), ratio=3.0)
    V, model = V[:22, :16] if n_components == "auto" else V, dfac.TweedieNMF(n_components)
    adapt, looked = Chain._adapt, []

    def stopping(chain, end):
        if end == 30:
            raise KeyboardInterrupt
        adapt(chain, end)

    def noted(chain, end):
        looked.append(end)
        adapt(chain, end)

    with pytest.warns(dfac.errors.DataWarning, match=RATIOS):
        whole = dfac.sample(V, model, **QUICK)
    monkeypatch.setattr(Checkpoints, "is_due", lambda kept: True)
    monkeypatch.setattr(Chain, "_adapt", stopping)
    with pytest.raises(KeyboardInterrupt):
        dfac.sample(V, model, store=tmp_path / "run.zarr", **QUICK)
    monkeypatch.setattr(Chain, "_adapt", noted)
    with pytest.warns(dfac.errors.DataWarning, match=RATIOS):
        rest = dfac.resume(tmp_path / "run.zarr", V=V, progressbar=False)
    assert looked[0] == 30
    assert rest.attrs["dispersion"] == whole.attrs["dispersion"]
    np.testing.assert_array_equal(rest["posterior"]["W"], whole["posterior"]["W"])
