"""Weights of cells in whole runs: the same bits wherever they run, nothing silently left out."""

from contextlib import nullcontext

import numpy as np
import pytest
import scipy.sparse as sp
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, ModelError, OptionError
from tests.refusals import refused

RNG = np.random.default_rng(6)
V = RNG.gamma(2.0, 1.0, (24, 18)) @ np.eye(18)
V[RNG.random(V.shape) < 0.2] = np.nan
SIGMA = RNG.uniform(0.2, 2.0, V.shape)
NMF, REAL = dfac.TweedieNMF(2, beta=2), dfac.GaussianMF(2)
QUICK = {"draws": 6, "tune": 10, "random_seed": 3, "progressbar": False}
KINDS = dfac.PSGLD, dfac.PSGRRLD, dfac.LangevinDynamics, dfac.SGLD
SAMPLERS = [(NMF, kind(warm_start=3)) for kind in KINDS]
SAMPLERS += [
    (NMF, dfac.BlockHMC(warm_start=3, steps=2)),
    (REAL, dfac.SGHMC()),
    (REAL, dfac.Gibbs()),
]
EACH = pytest.mark.parametrize(
    ("model", "sampler"), SAMPLERS, ids=[sampler.name for _, sampler in SAMPLERS]
)


def same(one, other):
    """Whether draws are the same; what else is kept depends on where the data lie."""
    names = ("posterior", "W"), ("posterior", "H"), ("sample_stats", "lp")
    return all(np.array_equal(one[group][name], other[group][name]) for group, name in names)


def stored(values):
    rows, cols = np.nonzero(~np.isnan(V))
    return sp.csr_array((values[rows, cols], (rows, cols)), shape=V.shape)


@pytest.mark.full
@EACH
def test_scratch_files_have_the_same_bits_and_stored_entries_the_same_posterior(model, sampler):
    data = dfac.as_blocks(V, 3, uncertainty=SIGMA)
    other = dfac.as_blocks(V, 3, uncertainty=SIGMA, memory_limit=0)
    first = dfac.sample(data, model, sampler, executor="serial", **QUICK)
    assert same(first, dfac.sample(other, model, sampler, executor="threads", **QUICK))
    assert first.attrs["dispersion"] == 1
    plain = dfac.sample(V, model, sampler, executor="serial", blocks=3, **QUICK)
    assert not np.array_equal(plain["posterior"]["W"], first["posterior"]["W"])
    if sampler.name == "SGLD":
        return  # draws cells of other kinds of block
    few = {"draws": len(sampler.tracks), "tune": 2, "thin": 1, "keep": "draws"}
    reading = {"blocks": 3, "dtype": "float64"}
    one, other = (
        dfac.sample(data, model, sampler, **QUICK | few)["posterior"]["W"].values
        for data in (
            dfac.as_blocks(V, uncertainty=SIGMA, **reading),
            dfac.as_blocks(stored(V), unstored="missing", uncertainty=stored(SIGMA), **reading),
        )
    )
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def forms(folder, form):
    """The same data and uncertainties, in memory or where they are read from again."""
    if form == "sparse":
        return stored(V), {"uncertainty": stored(SIGMA), "unstored": "missing"}
    if form == "memory":
        return V, {"uncertainty": SIGMA}
    for name, values in (("v", V), ("sigma", SIGMA)):
        zarr.create_array(str(folder / name), data=values, chunks=(8, 6))
    beside = form == "array beside path"
    return str(folder / "v"), {"uncertainty": SIGMA if beside else str(folder / "sigma")}


@pytest.mark.quick("paths")
@pytest.mark.parametrize("form", ["memory", "array beside path", "paths"])
def test_a_run_finds_its_weights_again(form, tmp_path):
    values, options = forms(tmp_path, form)
    options |= QUICK | {"blocks": 3, "sampler": dfac.PSGLD(warm_start=3)}
    dfac.sample(values, NMF, store=tmp_path / "run.zarr", **options | {"draws": 2})
    found = dfac.resume(tmp_path / "run.zarr", 4, progressbar=False)
    assert same(found, dfac.sample(values, NMF, **options))
    assert same(found, dfac.sample(V, NMF, **options | {"uncertainty": SIGMA}))


def test_a_run_whose_weights_are_nowhere_says_what_to_pass(tmp_path):
    values, options = forms(tmp_path, "sparse")
    store, short = tmp_path / "run.zarr", QUICK | {"draws": 2, "blocks": 3}
    dfac.sample(values, NMF, store=store, **short, **options)
    for given in (None, values):
        with pytest.raises(DataError, match=r"as_blocks\(V, blocks=3, unstored=\"missing\", unc"):
            dfac.resume(store, 4, V=given, progressbar=False)
    other = dfac.as_blocks(values, 3, unstored="missing", uncertainty=stored(2 * SIGMA))
    refused(DataError, "not those", dfac.resume, store, 4, V=other, progressbar=False)
    data = dfac.as_blocks(values, 3, **options)
    found = dfac.resume(store, 4, V=data, progressbar=False)
    assert same(found, dfac.sample(data, NMF, **QUICK))


def test_optimizers_come_closer_by_uncertainty():
    Q = {}
    for name, options in (("with", {"uncertainty": SIGMA}), ("without", {})):
        point = dfac.optimize(V, NMF, random_seed=1, progressbar=False, **options)
        mu = point["W"].values @ point["H"].values
        Q[name] = np.nansum(((V - mu) / SIGMA) ** 2)
    assert Q["with"] < 0.9 * Q["without"]
    descent = dfac.DSGD(max_iter=20)
    point = dfac.optimize(V, REAL, descent, uncertainty=SIGMA, random_seed=1, progressbar=False)
    assert point.attrs["dispersion"] == 1
    assert np.all(np.diff(point["objective"].values[5:]) < 0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_descents_reach_their_end_under_uneven_uncertainties_or_warn(spread):
    rng = np.random.default_rng(0)
    mu = rng.gamma(1, 1, (120, 4)) @ rng.gamma(1, 1, (4, 90))
    sigma = 0.3 * np.exp(spread * rng.normal(size=mu.shape))
    values = mu + sigma * rng.normal(size=mu.shape)
    model = dfac.TweedieNMF(4, beta=2, rate_w=1e-3, rate_h=1e-3)
    options = {"uncertainty": sigma, "random_seed": 1, "progressbar": False}
    warned = (
        pytest.warns(DataWarning, match="count as .* many more iterations")
        if spread
        else nullcontext()
    )
    with warned:
        point = dfac.optimize(values, model, dfac.DSGD(1000, tol=0), blocks=2, **options)
    if spread < 2:
        updates = dfac.MultiplicativeUpdates(2000, 1e-7)
        best = dfac.optimize(values, model, updates, blocks=2, **options)
        assert point["objective"][-1] < 1.25 * best["objective"][-1]


def test_what_takes_no_weights_says_so():
    counts = RNG.poisson(3.0, (12, 10))
    weights, poisson = np.full(counts.shape, 2.0), dfac.TweedieNMF(2)
    data = dfac.as_blocks(counts, 2, weights=weights)
    refused(OptionError, "no weights of cells", dfac.sample, data, poisson, dfac.Gibbs(), **QUICK)
    quiet = {"progressbar": False}
    refused(OptionError, "no weights of cells", dfac.log_evidence, data, poisson, **quiet)
    refused(ModelError, "take beta=2", dfac.sample, counts, poisson, uncertainty=1.0, **QUICK)


@pytest.mark.parametrize("model", [NMF, REAL], ids=["non-negative", "real"])
def test_a_new_observation_has_the_uncertainty_of_its_cell(model):
    """Held-out observations with uneven, known sigma lie in 90 % of the intervals."""
    rng = np.random.default_rng(4)
    mu = rng.gamma(2, 1, (90, 2)) @ rng.gamma(2, 1, (2, 80))
    sigma = np.exp(rng.normal(0.5, 1.0, mu.shape))
    truth = xr.DataArray(mu + sigma * rng.normal(size=mu.shape), dims=("day", "species"))
    hidden = rng.random(mu.shape) < 0.3
    sampler = dfac.BlockHMC() if model is NMF else dfac.SGHMC()
    options = {"random_seed": 1, "progressbar": False, "monitor": "missing"}
    tune = 150 if model is NMF else 500
    V = truth.where(~hidden)
    trace = dfac.sample(V, model, sampler, 150, tune, uncertainty=sigma, **options)
    whole, cells = dfac.predict(trace).load(), dfac.monitored(trace)
    assert whole.attrs["of"] == cells.attrs["of"] == "observation"
    inside = (truth >= whole["lower"]) & (truth <= whole["upper"])
    large = sigma > np.median(sigma)
    for part in (hidden & large, hidden & ~large):
        assert 0.87 < inside.values[part].mean() < 0.93
    at = cells["row_index"].values, cells["column_index"].values
    for name, share in (("mean", 0.02), ("lower", 0.05), ("upper", 0.05)):
        assert np.abs(cells[name] - whole[name].values[at]).max() < share * sigma[at].max()
    inside_there = (truth.values[at] >= cells["lower"]) & (truth.values[at] <= cells["upper"])
    assert 0.88 < inside_there.mean() < 0.92


def test_uncertainties_of_predicted_cells_are_the_runs_own_or_given(tmp_path):
    days, species = np.arange(24) * 3, [f"s{j}" for j in range(18)]
    labelled = xr.DataArray(V, {"day": days, "species": species}, ("day", "species"))
    sigma = labelled.copy(data=SIGMA)
    run = tmp_path / "run.zarr"
    options = QUICK | {"monitor": "missing", "store": run}
    trace = dfac.sample(labelled, NMF, uncertainty=sigma, **options)
    own, mean = dfac.predict(trace).load(), dfac.predict(trace, of="mean").load()
    np.testing.assert_allclose(own["sd"] ** 2, mean["sd"] ** 2 + SIGMA**2, rtol=1e-4)
    some = {"rows": days[[5, 2]], "columns": ["s7", "s1", "s4"]}
    points = [xr.DataArray(own_labels, dims="cell") for own_labels in (days[[5, 2]], ["s7", "s1"])]
    for wanted, given in (
        ({}, sigma[::-1, ::-1]),
        (some, None),
        (some, sigma),
        (some, SIGMA[np.ix_([5, 2], [7, 1, 4])]),
        (some | {"rows": 15}, SIGMA[5, [7, 1, 4]]),
        (some | {"rows": 15}, None),
        ({"rows": points[0], "columns": points[1]}, SIGMA[[5, 2], [7, 1]]),
        ({"rows": points[0], "columns": points[1]}, None),
    ):
        found = dfac.predict(run, **wanted, uncertainty=given)
        selected = own.sel(day=wanted.get("rows", days), species=wanted.get("columns", species))
        assert found["sd"].dims == selected["sd"].dims
        np.testing.assert_allclose(found["sd"], selected["sd"], rtol=1e-5)
    twice = dfac.predict(trace, uncertainty=2 * sigma)
    np.testing.assert_allclose(twice["sd"] ** 2 - own["sd"] ** 2, 3 * SIGMA**2, rtol=1e-4)
    cells = dfac.monitored(trace)
    given = SIGMA[cells["row_index"], cells["column_index"]]
    np.testing.assert_allclose(dfac.monitored(run, uncertainty=given)["sd"], cells["sd"], rtol=1e-5)
    refused(DataError, r"of their shape, \(2, 3\)", dfac.predict, run, **some, uncertainty=SIGMA)
    with pytest.raises(OptionError, match="has a common dispersion"):
        dfac.predict(dfac.sample(V, NMF, **QUICK), uncertainty=SIGMA)


def test_cells_without_weight_are_predicted_without_a_bound_and_weights_are_counted():
    sigma = SIGMA.copy()
    sigma[2, 3] = np.inf
    trace = dfac.sample(V, NMF, uncertainty=sigma, **QUICK)
    found = dfac.predict(trace)["sd"].values
    assert np.argwhere(np.isinf(found)).tolist() == [[2, 3]]
    assert np.isfinite(dfac.predict(trace, 2, 3, of="mean")["sd"])
    assert np.isfinite(dfac.predict(trace, 2, 3, uncertainty=1.0)["sd"])
    twice = dfac.as_blocks(np.repeat(V, 2, axis=0), 1, dtype="float64")
    data = dfac.as_blocks(V, 1, dtype="float64", weights=2.0)
    assert data.effective == twice.effective == twice.total_observed  # in a dispersion
    assert dfac.estimate_cost(V, NMF, uncertainty=SIGMA).data == 2 * dfac.estimate_cost(V, NMF).data


def test_uncertainties_that_a_run_did_not_keep_are_asked_for():
    data = dfac.as_blocks(stored(V), 3, unstored="missing", uncertainty=stored(SIGMA))
    trace = dfac.sample(data, NMF, monitor=(np.arange(3), np.arange(3)), **QUICK)
    for verb in (dfac.predict, dfac.monitored):
        refused(OptionError, "pass them as uncertainty=", verb, trace, of="observation")
        assert verb(trace).attrs["of"] == "mean"
        assert verb(trace, uncertainty=2.0).attrs["of"] == "observation"
