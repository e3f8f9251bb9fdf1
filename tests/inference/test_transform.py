"""New rows given the draws of a run: against quadrature, closed forms and priors; their labels."""

import json
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, ModelError, OptionError
from tests.refusals import refused

QUIET = {"progressbar": False, "random_seed": 5}
ROWS, DRAWS = 80, 20
LAWS = [(2.0, 1.0), (2.0, 0.6), (1.0, 3.0), (0.5, 1.0), (0.0, 0.6), (0.0, 1.0)]


def point(model, H, **attrs):
    """What `optimize` gives, with factors of one's own."""
    W = np.ones((3, len(H)))
    told = {"model": json.dumps(model.to_dict()), "mean": 2.0, "dispersion": 1.0}
    return xr.Dataset(
        {"W": (("row", "component"), W), "H": (("component", "column"), np.asarray(H, float))},
        coords={"component": range(len(H))},
        attrs=told | {"rate_w": 0.7, "rate_h": 1.0} | attrs,
    )


def compare(found, wanted):
    """Hold mean and sd of equal rows to the exact ones; rows are independent."""
    values = found.values.astype(float)[0]
    mean, sd = values.mean(axis=0), values.std(axis=0)
    of_mean, of_sd = (own.std(axis=0) / len(own) ** 0.5 for own in (mean, sd))
    assert np.all(np.abs(mean.mean(axis=0) - wanted[0]) < 5 * of_mean)
    # The sd of few draws is smaller by as much as their mean varies.
    lost = np.sqrt(wanted[1] ** 2 - values.mean(axis=0).var(axis=0))
    assert np.all(np.abs(sd.mean(axis=0) - lost) < 5 * of_sd)


def by_quadrature(model, H, v, shape, phi=1.0):
    """Mean and sd of a row's entries, on the quantiles of a wide gamma law."""
    K = len(H)
    ends = (np.arange(400) + 0.5) / 400
    # Under u = θ^a an infinite density at zero is level.
    one = (ends * 12.0 ** min(shape, 1.0)) ** (1.0 / min(shape, 1.0))
    measure = one ** (1.0 - min(shape, 1.0))
    grid = np.stack(np.meshgrid(*[one] * K, indexing="ij"), axis=-1)
    log = np.log(np.stack(np.meshgrid(*[measure] * K, indexing="ij"), axis=-1)).sum(-1)
    log += ((shape - 1) * np.log(grid) - 0.7 * grid).sum(-1)
    log -= model.likelihood.deviance(v, grid @ np.asarray(H, float)).sum(-1) / phi
    mass = np.exp(log - log.max())
    mass /= mass.sum()
    axes = tuple(range(K))
    mean = (mass[..., None] * grid).sum(axes)
    return mean, np.sqrt((mass[..., None] * (grid - mean) ** 2).sum(axes))


@pytest.mark.quick("2.0-0.6-None", "1.0-3.0-None", "0.5-1.0-None", "0.0-1.0-None", "2.0-0.6-cuda")
@pytest.mark.parametrize(
    ("beta", "shape", "device"),
    [*((*law, None) for law in LAWS), *((*law, "cuda") for law in LAWS[1:4])],
)
def test_a_row_is_drawn_from_its_conditional(beta, shape, device, request):
    if device:
        request.getfixturevalue("stand_in")
    model = dfac.TweedieNMF(1, beta=beta, shape_w=shape)
    H, v = [[1.0, 0.5, 2.0]], np.array([1.0, 2.0, 3.0])
    given = point(model, H, shape_w=shape, dispersion=0.5)
    found = dfac.transform(given, np.tile(v, (ROWS, 1)), draws=DRAWS, device=device, **QUIET)
    compare(found, by_quadrature(model, H, v, shape, 0.5))


@pytest.mark.parametrize("name", ["w", "h"])
def test_two_components_and_columns_too(name):
    model = dfac.TweedieNMF(2, rate_h="auto")
    H, v = np.array([[1.0, 0.2, 2.0], [0.3, 1.5, 1.8]]), np.array([0.0, 4.0, 3.0])
    given, V = point(model, H), np.tile(v, (ROWS, 1))
    if name == "h":  # the same, turned
        W = (("row", "component"), H.T)
        given = given.drop_vars("H").assign(W=W, H=(("component", "column"), H[:, :1]))
        given = given.assign_attrs(rate_h=0.7)
        found = dfac.transform(given, V.T, "column", DRAWS, **QUIET)
        assert found.dims == ("chain", "draw", "component", "column")
        found = found.transpose("chain", "draw", "column", "component")
    else:
        found = dfac.transform(given, V, draws=DRAWS, **QUIET)
    compare(found, by_quadrature(model, H, v, 1.0))


def test_empty_rows_are_drawn_from_the_prior():
    model = dfac.TweedieNMF(2, shape_w=0.5)
    V = np.full((ROWS, 3), np.nan)
    V[0] = 1.0
    given = point(model, np.ones((2, 3)), shape_w=0.5)
    found = dfac.transform(given, V, draws=5, **QUIET).values[0, -1, 1:].astype(float)
    assert stats.kstest(stats.gamma.cdf(found.ravel(), 0.5, scale=1 / 0.7), "uniform").pvalue > 1e-3


def with_factors(tree, **factors):
    """The trace with other draws, and a rate of W that is known."""
    groups = {"posterior": tree["posterior"].to_dataset().assign(factors)}
    groups["sample_stats"] = tree["sample_stats"].to_dataset()
    changed = xr.DataTree.from_dict(groups)
    changed.attrs = tree.attrs | {"rate_w": 0.7}
    return changed


@pytest.fixture(scope="module")
def counts():
    """Counts of 30 rows with labelled columns, of which the last 6 are new."""
    rng = np.random.default_rng(1)
    V = rng.poisson(2 * rng.gamma(1, 1, (30, 2)) @ rng.gamma(1, 1, (2, 7))).astype(float)
    dims = {"cell": np.arange(30) + 100, "gene": list("abcdefg")}
    return xr.DataArray(V, dims, name="counts")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("transform") / "run.zarr"


@pytest.fixture(scope="module")
def trace(counts, path):
    lengths = {"draws": 20, "tune": 60, "chains": 2}
    sampler = dfac.BlockHMC()
    return dfac.sample(counts[:24], dfac.TweedieNMF(2), sampler, store=path, **lengths, **QUIET)


def test_every_draw_is_of_its_own_conditional_however_the_other_factor_jumps(trace):
    """H is three times as large in every second draw: nothing may be left of the draw before."""
    large = xr.DataArray(np.where(np.arange(20) % 2, 3.0, 1.0), dims="draw")
    H = xr.ones_like(trace["posterior"]["H"]) * large
    H = H.where(H["component"] == 0, 0.0).astype(np.float32)
    jumping = with_factors(trace, H=H)
    found = dfac.transform(jumping, np.full((ROWS, 7), 5.0), steps=8, **QUIET)
    for size, at in ((1.0, slice(2, None, 2)), (3.0, slice(1, None, 2))):
        own = found.values[:, at, :, 0].astype(float)
        law, means = stats.gamma(36.0, scale=1 / (7 * size + 0.7)), own.mean(axis=(0, 1))
        assert abs(means.mean() - law.mean()) < 5 * means.std() / ROWS**0.5
        assert own.std() == pytest.approx(law.std(), rel=0.03)


def test_new_rows_have_their_labels_and_those_of_the_draws(counts, trace):
    found = dfac.transform(trace, counts[24:], draws=5, **QUIET)
    assert found.dims == ("chain", "draw", "cell", "component")
    assert found["cell"].values.tolist() == list(range(124, 130))
    drawn = trace["posterior"]["draw"].values
    assert found["draw"].values.tolist() == drawn[3::4].tolist()
    own = dfac.predict(trace, rows=found)
    assert own["mean"].dims == ("cell", "gene")
    H = trace["posterior"]["H"].sel(draw=found["draw"])
    np.testing.assert_allclose(
        own["mean"], xr.dot(found, H, dim="component").mean(("chain", "draw")), rtol=1e-4
    )
    assert (own["upper"] > own["lower"]).all()
    one = dfac.predict(trace, rows=found, columns=["c", "a"], of="mean")
    np.testing.assert_allclose(one["mean"], own["mean"].sel(gene=["c", "a"]), rtol=1e-6)


def test_as_many_draws_are_taken_as_there_is_room_for(counts, trace, monkeypatch):
    new, W = counts[24:], trace["posterior"]["W"]
    a_draw = W.sizes["chain"] * len(new) * W.sizes["component"] * W.dtype.itemsize
    for room, draws in ((a_draw * 5, 5), (a_draw * 6 - 1, 5), (1, 1), (a_draw * DRAWS, DRAWS)):
        monkeypatch.setattr("daskfactor.inference.transform.DRAWS_BUDGET", room)
        assert dfac.transform(trace, new, **QUIET).sizes["draw"] == draws


def test_columns_are_matched_by_label(counts, trace):
    new = counts[24:]
    found = dfac.transform(trace, new, draws=2, **QUIET)
    bare = dfac.transform(trace, new.values, draws=2, **QUIET)
    np.testing.assert_array_equal(found.values, bare.values)
    np.testing.assert_array_equal(found, dfac.transform(trace, new.T, draws=2, **QUIET))
    assert bare.dims[2] == "cell"
    means = [dfac.transform(trace, own, point=True, **QUIET) for own in (new, new[:, ::-1])]
    np.testing.assert_allclose(means[0], means[1], rtol=0.1, atol=0.05)  # rounding parts paths
    for other, words in (
        (new.assign_coords(gene=list("abcdefx")), r"1 of the 7 columns .* not among .*'x'"),
        (new[:, 2:], r"lack 2 of the run's 7 columns, the first of them 'a'"),
        (new.values[:, 2:], "the run has 7 columns, and the new rows have 5"),
    ):
        refused(DataError, words, dfac.transform, trace, other, **QUIET)
    words = "the run has 24 rows, and the new columns have 6"
    refused(DataError, words, dfac.transform, trace, new.values, "column", **QUIET)


def test_executors_stores_sparse_data_and_pieces_draw_the_same(counts, trace, path, monkeypatch):
    V = counts[24:].values.copy()
    V[1, 2] = V[4] = np.nan
    options = {"draws": 3, "blocks": 3, **QUIET}
    usual = dfac.transform(trace, V, **options)
    rows, columns = np.nonzero(~np.isnan(V))
    stored = sparse.csr_array((V[rows, columns], (rows, columns)), shape=V.shape)
    parts = [dfac.transform(trace, V[at : at + 3], first=at, **options) for at in (0, 3)]
    for other in (
        *(dfac.transform(trace, V, executor=own, **options) for own in ("serial", "tasks")),
        dfac.transform(path, V, **options),
        dfac.transform(trace, stored, unstored="missing", **options),
        np.concatenate(parts, axis=2),
    ):
        np.testing.assert_array_equal(usual, other)
    monkeypatch.setattr("daskfactor.inference.fold_in.PART", 14)  # of a band
    np.testing.assert_array_equal(usual, dfac.transform(trace, V, **options))


def test_a_mean_depends_on_nothing_but_its_row(counts, trace):
    new = counts[24:]
    mean = dfac.transform(trace, new, point=True, progressbar=False)
    assert mean.dims == ("cell", "component")
    order = [3, 1, 5, 0, 2, 4]
    turned = dfac.transform(trace, new[order], point=True, progressbar=False)
    np.testing.assert_allclose(turned, mean[order], rtol=0, atol=1e-9)
    alone = dfac.transform(trace, new[2:3], point=True, progressbar=False)
    np.testing.assert_allclose(alone, mean[2:3], rtol=0, atol=1e-9)
    drawn = dfac.transform(dfac.align(trace), new, steps=20, **QUIET)
    sd = drawn.std(("chain", "draw"))
    assert float((abs(mean - drawn.mean(("chain", "draw"))) / sd).max()) < 5 / 40**0.5


def test_what_cannot_be_is_told_in_a_sentence(counts, trace, monkeypatch):
    new = counts[24:]
    moments = dfac.sample(counts[:24], dfac.TweedieNMF(2), draws=2, tune=2, keep="moments", **QUIET)
    ones, empty = np.ones((6, 1)), np.full((2, 3), np.nan)
    alone = point(dfac.TweedieNMF(1), [[1.0, 0.5, 2.0]])
    for error, words, given, options in (
        (OptionError, 'axis must be "row" or "column"', (trace, new, "rows"), {}),
        (OptionError, "20 draws in each chain, got draws=50", (trace, new), {"draws": 50}),
        (DataError, "negative", (trace, -new), {}),
        (OptionError, "a trace is the result of daskfactor.sample", (new, trace), {}),
        (ModelError, "has no covariates_w", (trace, new), {"covariates": ones}),
        (ModelError, "has no fixed_w", (trace, new), {"fixed": ones}),
        (OptionError, "only moments, but a new row needs draws", (moments, new), {}),
        (DataError, "all 2 x 3 entries are missing", (alone, empty), {}),
    ):
        refused(error, words, dfac.transform, *given, **QUIET | options)
    found = dfac.transform(trace, new, draws=2, **QUIET)
    mean = dfac.transform(trace, new, draws=2, point=True, **QUIET)
    refused(OptionError, "must be draws of new rows", dfac.predict, trace, rows=mean)
    other = found.assign_coords(draw=[1, 2])
    refused(OptionError, "for another trace", dfac.predict, trace, rows=other)
    monkeypatch.setattr("daskfactor.machine.available_memory", lambda: 1000)
    words = r"40 draws of 9 new rows take .*first= says where"
    refused(OptionError, words, dfac.transform, trace, np.ones((9, 7)), **QUIET)
    assert dfac.transform(trace, np.ones((9, 7)), point=True, **QUIET).shape == (9, 2)


def test_rows_of_a_gaussian_model_are_drawn_from_their_normal_conditional():
    rng = np.random.default_rng(2)
    V = 3 + rng.normal(size=(30, 2)) @ rng.normal(size=(2, 9)) + 0.5 * rng.normal(size=(30, 9))
    V[rng.random(V.shape) < 0.2] = np.nan
    run = dfac.sample(V[:25], dfac.GaussianMF(2), dfac.Gibbs(), draws=60, tune=60, **QUIET)
    found = dfac.transform(run, V[25:], **QUIET)
    group, scores, means = run["posterior"].to_dataset(), [], []
    for d in range(60):
        H, own = group["H"].values[0, d].astype(float), group["precision_w"].values[0, d]
        noise = float(group["noise"][0, d])
        free = ~np.isnan(own)
        for row, v in enumerate(V[25:]):
            seen = ~np.isnan(v)
            A, rest = H[free][:, seen], v[seen] - H[~free][:, seen].sum(axis=0)
            inverse = np.linalg.inv(np.diag(own[free]) + A @ A.T / noise)
            mean, root = inverse @ (A @ rest) / noise, np.linalg.cholesky(np.linalg.inv(inverse))
            scores.append(root.T @ (found.values[0, d, row, free] - mean))
            means.append(mean)
    assert stats.kstest(np.ravel(scores), "norm").pvalue > 1e-3
    aligned = dfac.align(run)
    mean = dfac.transform(aligned, V[25:], draws=60, point=True, progressbar=False)
    permutation = aligned["alignment"]["permutation"].values[0][:, :3]
    factor = aligned["alignment"]["factor"].values[0][:, :3]
    exact = np.reshape(means, (60, 5, 3))
    exact = np.take_along_axis(exact, permutation[:, None], 2) * factor[:, None]
    np.testing.assert_allclose(mean.values[:, :3], exact.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_rows_of_a_store_take_the_room_of_their_draws_and_little_more(tmp_path):
    """A store of 10 MiB in bands of half a MiB, whose draws take 8 MiB."""
    rng = np.random.default_rng(6)
    V = rng.normal(size=(40_000, 64)).astype(np.float32)
    run = dfac.sample(V[:50], dfac.GaussianMF(2), dfac.Gibbs(), draws=13, tune=5, **QUIET)
    store = zarr.create_array(tmp_path / "V.zarr", shape=V.shape, chunks=(2000, 64), dtype="f4")
    store[:] = V
    del V
    with dfac.as_blocks(str(tmp_path / "V.zarr"), blocks=20, memory_limit="1 MiB") as data:
        tracemalloc.start()
        found = dfac.transform(run, data, executor="serial", **QUIET)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found.nbytes > 6 * 2**20
    assert most < found.nbytes + 3 * 2**20


def prior_of(model, row=np.nan, **options):
    """Draws of rows of which nothing is known but that they are rows, and the run."""
    V = np.random.default_rng(3).poisson(4.0, (12, 5)).astype(float)
    run = dfac.sample(V, model, dfac.BlockHMC(), draws=10, tune=30, **QUIET)
    new = np.full((ROWS, 5), row)
    new[0] = 1.0
    return dfac.transform(run, new, steps=8, **QUIET | options).values[0, :, 1:].astype(float), run


def test_covariates_of_new_rows_say_what_their_prior_is():
    rng = np.random.default_rng(4)
    X, new = rng.normal(size=(12, 2)), rng.normal(size=(ROWS, 2))
    model = dfac.TweedieNMF(2, covariates_w=X, shape_w=2.0)
    found, run = prior_of(model, covariates=new)
    group = run["posterior"].to_dataset()
    rate, link = group["rate_w"].values[0, -1], group["link_w"].values[0, -1]
    own = stats.gamma.cdf(found[-1], 2.0, scale=np.exp(new[1:] @ link) / rate)
    assert stats.kstest(own.ravel(), "uniform").pvalue > 1e-3
    for wrong, told in (
        (None, "need theirs"),
        (new[:, :1], "2 covariates_w"),
        (X, "got 12 for"),
    ):
        with pytest.raises(ModelError, match=told):
            dfac.transform(run, np.ones((ROWS, 5)), covariates=wrong, **QUIET)


def test_a_row_with_a_rate_of_its_own_has_that_of_the_prior():
    """θ | λ ~ Exponential(λ) and λ ~ Gamma(2, b): P(θ > x) = (b / (b + x))²."""
    found, run = prior_of(dfac.TweedieNMF(1, rate_w="row", rate_h=1.0))
    b = json.loads(run.attrs["data"])["mean"]  # such that the prior mean of the data is theirs
    own = found[-1, :, 0]
    assert stats.kstest((b / (b + own)) ** 2, "uniform").pvalue > 1e-3


def test_frozen_components_of_new_rows_are_what_they_are_given_as():
    fixed, new = np.linspace(0.5, 1, 12)[:, None], np.linspace(1, 2, ROWS)[:, None]
    found, run = prior_of(dfac.TweedieNMF(2, fixed_w=fixed), fixed=new)
    np.testing.assert_allclose(found[:, :, 0], np.broadcast_to(new[1:, 0], found.shape[:2]))
    assert found[:, :, 1].std() > 0
    with pytest.raises(ModelError, match=r"pass fixed= with the frozen .* \(rows, 1\)"):
        dfac.transform(run, np.ones((2, 5)), **QUIET)


def test_new_columns_of_a_model_with_dispersions_of_columns_are_refused(trace):
    each = xr.DataArray(np.full((2, 20, 7), 1.5), dims=("chain", "draw", "gene"))
    run = with_factors(trace, dispersion=each)
    run.attrs["model"] = json.dumps(dfac.NegativeBinomialNMF(2, dispersion="column").to_dict())
    found = dfac.transform(run, np.full((ROWS, 7), 3.0), draws=5, **QUIET)
    assert found.shape == (2, 5, ROWS, 2)
    with pytest.raises(ModelError, match="every column of this model has a dispersion"):
        dfac.transform(run, np.ones((24, 2)), "column", **QUIET)


def test_points_and_particles_are_taken_too(counts):
    V, new = counts.values[:24], counts.values[24:]
    model = dfac.TweedieNMF(2, dispersion=1.0)
    best = dfac.optimize(V, model, **QUIET)
    found = dfac.transform(best, new, draws=30, **QUIET)
    assert found.dims == ("chain", "draw", "row", "component")
    mean = dfac.transform(best, new, point=True, progressbar=False)
    assert float(abs(mean - found.mean(("chain", "draw"))).max()) < 5 * float(found.std().max()) / 5
    many = dfac.stein_posterior(V, model, particles=4, **QUIET)
    drawn = dfac.transform(many, new, **QUIET)
    weight = many["sample_stats"]["weight"]
    np.testing.assert_allclose(drawn["weight"], weight.sel(draw=drawn["draw"]), rtol=1e-12)
    predicted = dfac.predict(many, rows=drawn, of="mean")["mean"]
    H = many["posterior"]["H"].sel(draw=drawn["draw"])
    wanted = (xr.dot(drawn, H, dim="component") * drawn["weight"]).sum(("chain", "draw"))
    np.testing.assert_allclose(predicted, wanted, rtol=1e-5)
    refused(OptionError, "particles have weights", dfac.transform, many, new, draws=2, **QUIET)
    aligned, means = dfac.align(many), []
    for own in ([1.0, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 1.0], [0.55, 0.1, 0.1, 0.55]):
        masses = weight.copy(data=np.reshape(own, weight.shape))
        aligned["sample_stats"] = many["sample_stats"].to_dataset().assign(weight=masses)
        means.append(dfac.transform(aligned, new, point=True, progressbar=False).values)
    np.testing.assert_allclose((means[0] + means[1]) / 2, means[2], rtol=1e-9)
    assert abs(means[0] - means[1]).max() > 0.01


def test_a_table_of_ratings_may_lack_columns(trace, counts):
    """What has no entry is missing, whether or not the table has its column."""
    new = counts[24:27, 2:]
    rows, columns = np.nonzero(new.values >= 0)
    table = {"cell": rows, "gene": new["gene"].values[columns], "value": new.values[rows, columns]}
    named = {"rows": "cell", "unstored": "missing"}
    found = dfac.transform(trace, pd.DataFrame(table), point=True, **named, **QUIET)
    whole = counts[24:27].where(counts["gene"] >= "c")
    drawn = dfac.transform(dfac.align(trace), whole, **QUIET)
    off = abs(found.values - drawn.mean(("chain", "draw")).values)
    assert np.all(off < 5 * drawn.std(("chain", "draw")).values / 40**0.5)


@pytest.fixture(scope="module")
def maps():
    """A run on maps, a function of new ones, and these."""
    rng = np.random.default_rng(11)
    coords = {"lat": [10, 20, 30, 40], "lon": [1.0, 2.0, 3.0]}
    given = xr.DataArray(rng.normal(size=(12, 4, 3)), coords, ("time", "lat", "lon"))
    options = {**QUIET, "rows": "time"}
    found = dfac.sample(given, dfac.GaussianMF(2), rows="time", draws=8, tune=4, **QUIET)
    return lambda new: dfac.transform(found, new, point=True, **options), given[:3]


def test_places_of_maps_are_matched_by_the_labels_of_every_dimension(maps):
    of, new = maps
    right = of(new).values
    for turned in (new[:, ::-1], new.transpose("time", "lon", "lat"), new[..., [1, 2, 0]]):
        np.testing.assert_allclose(of(turned).values, right, atol=1e-12)
    with pytest.warns(DataWarning, match="3 of 12 places"):
        less = of(new.where(new["lat"] != 20))
    np.testing.assert_allclose(of(new.sel(lat=[40, 10, 30])).values, less.values, atol=1e-12)
    for other, told in (
        (new.assign_coords(lat=[100, 110, 120, 130]), "12 of the 12 columns.*lat 100, lon 1.0"),
        (new.rename(lat="y"), "lon 1.0, y 10"),
        (new.drop_vars("lat"), "lat 0, lon 1.0"),
    ):
        refused(DataError, told, of, other)


def test_a_value_where_the_run_left_a_place_out_is_refused():
    rng = np.random.default_rng(2)
    coords = {"lat": [10, 20, 30], "lon": [1.0, 2.0]}
    new = xr.DataArray(rng.normal(size=(8, 3, 2)), coords, ("time", "lat", "lon"))
    sea = new.where((new["lat"] > 10) | (new["lon"] > 1))
    options = {**QUIET, "rows": "time"}
    with pytest.warns(DataWarning, match="1 of 6 places"):
        trace = dfac.sample(sea, dfac.GaussianMF(2), rows="time", draws=4, tune=4, **QUIET)
    with pytest.raises(DataError, match=r"1 of the 6 columns.*lat 10, lon 1.0.*must be NaN, too"):
        dfac.transform(trace, new, **options)
    with pytest.warns(DataWarning, match="2 of 6 places"):  # one more than the run
        found = dfac.transform(trace, sea.where(new["lat"] + new["lon"] != 32), **options)
    assert np.isfinite(found.values).all()


def test_a_multiindex_is_matched_by_its_tuples(maps):
    one = maps[1].stack(place=("lat", "lon"))
    given = xr.concat([one] * 4, "time") + np.arange(12)[:, None]
    trace = dfac.sample(given, dfac.GaussianMF(2), draws=4, tune=4, **QUIET)
    best = dfac.optimize(given, dfac.GaussianMF(2), **QUIET)
    for known in (trace, best):
        right = dfac.transform(known, one, point=True, **QUIET)
        for turned in (one[:, ::-1], maps[1].stack(place=("lon", "lat"))):
            found = dfac.transform(known, turned, point=True, **QUIET)
            np.testing.assert_allclose(found.values, right.values, atol=1e-12)


def ratings(items, users=8):
    """A table with a line for every user and item."""
    keys = {"user": np.repeat(np.arange(users), len(items)), "item": np.tile(items, users)}
    values = np.random.default_rng(users).normal(size=users * len(items))
    return pd.DataFrame(keys | {"rating": values})


def test_keys_that_count_from_zero_are_matched_as_others_are():
    some = {"draws": 4, "tune": 4, "table": True, "unstored": "missing", **QUIET}
    of, new = {"point": True, "rows": "user", "unstored": "missing", **QUIET}, ratings([1, 3], 1)
    values = ratings(range(6))["rating"].to_numpy().reshape(8, 6)
    row = np.full((1, 6), np.nan)
    row[0, [1, 3]] = new["rating"]
    table = dfac.sample(ratings(range(6)), dfac.GaussianMF(2), **some)
    matrix = dfac.sample(values, dfac.GaussianMF(2), draws=4, tune=4, **QUIET)
    for trace in (table, matrix):
        right = dfac.transform(trace, row, point=True, **QUIET).values
        np.testing.assert_allclose(dfac.transform(trace, new, **of).values, right, atol=1e-12)
        with pytest.raises(DataError, match="6 of the 6 columns"):
            dfac.transform(trace, ratings(range(10, 16)), **of)
        with pytest.raises(DataError, match="first of them 'a'"):
            dfac.transform(trace, ratings(list("abcdef")), **of)
        found = dfac.recommend(trace, rows=[2], n=6, exclude=new)
        assert np.all(found["position"].values >= 0)
    others = dfac.sample(ratings([0, 2, 5]), dfac.GaussianMF(2), **some)
    with pytest.raises(DataError, match=r"1 of the 3 columns.*first of them 1 "):
        dfac.transform(others, ratings([0, 1, 2]), **of)


def test_columns_of_a_frame_are_matched_by_all_levels_of_their_labels():
    columns = pd.MultiIndex.from_product([["a", "b"], [1, 2, 3]], names=["site", "year"])
    frame = pd.DataFrame(np.random.default_rng(3).normal(4, 1, (12, 6)), columns=columns)
    trace, of = dfac.sample(frame, dfac.GaussianMF(2), draws=4, tune=4, **QUIET), {"point": True}
    right = dfac.transform(trace, frame[:3], **of, **QUIET).values
    found = dfac.transform(trace, frame.iloc[:3, ::-1], **of, **QUIET).values
    np.testing.assert_allclose(found, right, atol=1e-10)
    other = frame.rename(columns={"b": "c"})[:3]
    refused(DataError, "first of them site c, year 1", dfac.transform, trace, other, **QUIET)
    words = "the column labels of weights are not those of V"
    refused(DataError, words, dfac.as_blocks, frame, weights=(frame**2).iloc[:, ::-1])


@pytest.mark.filterwarnings("ignore::daskfactor.errors.DaskfactorWarning")
def test_new_rows_of_another_run_of_the_same_second_or_point_are_refused():
    V, words = np.random.default_rng(1).normal(4, 1, (12, 6)), "for another trace"
    traces = [dfac.sample(own, dfac.GaussianMF(2), draws=6, tune=4, **QUIET) for own in (V, 10 * V)]
    for trace in traces:
        trace.attrs["created_at"] = traces[0].attrs["created_at"]
    own, other = (dfac.transform(trace, V[:2], **QUIET) for trace in traces)
    turned = dfac.transform(dfac.align(traces[0]), V[:2], **QUIET)
    assert dfac.predict(traces[0], rows=own).sizes["row"] == 2
    assert dfac.recommend(traces[0], own, 2, progressbar=False).sizes["row"] == 2
    for bad, told in ((other, words), (turned, "only one of new")):
        refused(OptionError, told, dfac.predict, traces[0], rows=bad)
        refused(OptionError, told, dfac.recommend, traces[0], bad, 2, progressbar=False)
    one, again, other = (dfac.optimize(own, dfac.GaussianMF(2), **QUIET) for own in (V, V, 1 - V))
    new = dfac.transform(one, V[:2], draws=3, **QUIET)
    assert dfac.recommend(again, new, 2).identical(dfac.recommend(one, new, 2))
    refused(OptionError, words, dfac.recommend, other, new, 2)


@pytest.mark.filterwarnings("ignore::daskfactor.errors.DaskfactorWarning")
@pytest.mark.parametrize("kind", ["uncertainty", "weights"])
def test_rows_need_uncertainties_or_weights_where_the_run_had_some(kind):
    V = np.random.default_rng(1).normal(4, 1, (12, 6))
    told = {kind: np.full(V.shape, 5.0)}
    trace = dfac.sample(V, dfac.GaussianMF(2), draws=6, tune=4, **told, **QUIET)
    with pytest.raises(OptionError, match=f"new rows need theirs: pass {kind}="):
        dfac.transform(trace, V[:2], **QUIET)
    found = dfac.transform(trace, V[:2], **{kind: told[kind][:2]}, **QUIET)
    assert found.sizes["row"] == 2


def test_empty_new_columns_are_around_the_level_of_the_others():
    rng = np.random.default_rng(0)
    V = 100.0 + rng.normal(size=(40, 12)) + rng.normal(size=12)
    trace = dfac.sample(V, dfac.GaussianMF(2, biases=True), draws=40, tune=100, **QUIET)
    V_new = np.full((40, 3), np.nan)
    V_new[:, 0] = V[:, 0]
    new = dfac.transform(trace, dfac.as_blocks(V_new, allow_empty=True), axis="column", **QUIET)
    biases = new.sel(component=3).mean(("chain", "draw"))
    np.testing.assert_allclose(biases, 100.0, atol=2.0)


@pytest.mark.parametrize("fixed", [np.nan, -1.0])
def test_frozen_components_of_new_rows_are_finite_and_not_negative(counts, fixed):
    model = dfac.TweedieNMF(2, dispersion=1.0, fixed_w=np.ones((len(counts), 1)))
    trace = dfac.sample(counts, model, draws=5, tune=5, **QUIET)
    values = np.full((2, 1), fixed)
    refused(ModelError, "finite numbers", dfac.transform, trace, counts[:2], fixed=values, **QUIET)
