"""Runs of several matrices: the bits of one alone, of every executor and of a resumed run, what is
learnt of missing rows and dispersions, and what results of them go into."""

import json
from types import SimpleNamespace

import anndata
import mudata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import xarray as xr

import daskfactor as dfac
from daskfactor.errors import DaskfactorError, ModelError, OptionError
from daskfactor.inference import setting
from tests.executors.audit import AuditExecutor
from tests.inference.test_conformance import same
from tests.refusals import refused

# Runs of a few cycles, of counts that share a factor with what does not go with them.
pytestmark = pytest.mark.filterwarnings("ignore:around the means that")

RUN = {"draws": 6, "tune": 4, "random_seed": 7, "progressbar": False}
SHORT = {"warm_start": 3}
RNG = np.random.default_rng(21)


def _counts(rows, columns, seed):
    rng = np.random.default_rng(seed)
    mean = rng.gamma(1, 1, (rows, 2)) @ rng.gamma(1, 1.5, (2, columns))
    return np.asarray(rng.poisson(mean), np.float32)


COUNTS = _counts(24, 18, 3)
LABELS = np.array([f"c{number}" for number in range(24)])
NOISE, ALPHA = 2.25, 0.2


def mixed():
    """Dense values with gaps, some rows in another order, observed zeros, and ratings."""
    rng = np.random.default_rng(5)
    values = rng.normal(4, 1, (15, 6)).astype(np.float32)
    values[rng.random(values.shape) < 0.2] = np.nan
    rated = np.where(rng.random((24, 7)) < 0.5, rng.integers(1, 6, (24, 7)), 0)
    return {
        "rna": anndata.AnnData(sp.csr_matrix(COUNTS), pd.DataFrame(index=LABELS)),
        "adt": xr.DataArray(values, {"cell": rng.permutation(LABELS)[:15]}, ["cell", "protein"]),
        "rated": anndata.AnnData(sp.csr_matrix(rated, dtype="f4"), pd.DataFrame(index=LABELS)),
        "features": np.abs(rng.normal(2, 1, (7, 5))).astype(np.float32),
    }


def annotated(values, labels, column):
    names = [f"{column}{number}" for number in range(values.shape[1])]
    return anndata.AnnData(values, pd.DataFrame(index=labels), pd.DataFrame(index=names))


RELATIONS = {
    "rna": dfac.Relation("cell", "gene", law="poisson"),
    "adt": dfac.Relation("cell", "protein", law="normal"),
    "rated": dfac.Relation("cell", "item", law="negative binomial", weight=0.7),
    "features": dfac.Relation("item", "feature", law="gamma", dispersion=0.5),
}
MIXED = dfac.Coupled(2, relations=RELATIONS)
READ = {"unstored": {"rna": "zero", "rated": "missing"}, "blocks": 5}
WATCHED = {"adt": ([0, 3, 14], [5, 0, 2]), "features": ([6, 0], [4, 4])}
KINDS = dfac.PSGRRLD, dfac.SGLD, dfac.LangevinDynamics, dfac.SGHMC
SAMPLERS = [dfac.PSGLD(transition="euler", **SHORT), *(kind(**SHORT) for kind in KINDS)]
SAMPLERS += [dfac.BlockHMC(steps=2, **SHORT)]


def equal_bits(one, other):
    for name in "WH":
        first, second = (run["posterior"][name].values for run in (one, other))
        assert first.tobytes() == second.tobytes(), name


@pytest.mark.parametrize("zeros", ["dense", "sparse"])
@pytest.mark.parametrize(
    "sampler",
    [dfac.PSGLD(**SHORT), dfac.SGHMC(**SHORT), dfac.BlockHMC(steps=2, **SHORT)],
    ids=lambda own: own.name,
)
def test_one_relation_is_a_matrix_alone_bit_for_bit(sampler, zeros):
    V = COUNTS if zeros == "dense" else sp.csr_array(COUNTS)
    settings = RUN | {"blocks": 3, "unstored": None if zeros == "dense" else "zero"}
    relation = dfac.Relation("cell", "gene", law="poisson", dispersion=1.0)
    coupled = dfac.sample({"a": V}, dfac.Coupled(2, relations={"a": relation}), sampler, **settings)
    alone = dfac.sample(V, dfac.TweedieNMF(2, dispersion=1.0), sampler, **settings)
    equal_bits(coupled, alone)
    lp = [run["sample_stats"]["lp"].values for run in (coupled, alone)]
    np.testing.assert_allclose(*lp, rtol=1e-6)
    own = dfac.view(coupled, "a")
    equal_bits(own, alone)
    for name in ("dispersion", "rate_w", "rate_h"):
        assert own.attrs[name] == alone.attrs[name]


def test_the_audit_finds_nothing_and_the_same_bits(serial):
    options = RUN | READ | {"monitor": WATCHED, "executor": AuditExecutor()}
    assert same(dfac.sample(mixed(), MIXED, dfac.PSGLD(**SHORT), **options), serial)


@pytest.fixture(scope="module")
def serial():
    options = RUN | READ | {"monitor": WATCHED, "executor": "serial"}
    return dfac.sample(mixed(), MIXED, dfac.PSGLD(**SHORT), **options)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda own: own.name)
def test_every_sampler_takes_them(sampler):
    trace = dfac.sample(mixed(), MIXED, sampler, **RUN | READ)
    assert trace["posterior"]["W"].shape[-2:] == (24 + 5, 2)
    for name in ("W", "H"):
        assert (trace["posterior"][name] >= 0).all()
        assert np.isfinite(trace["posterior"][name]).all()
    assert np.isfinite(trace["sample_stats"]["lp"]).all()


def test_gibbs_and_dsgd_refuse_and_multiplicative_updates_fit():
    words = "counts of one matrix, not several"
    refused(ModelError, words, dfac.sample, mixed(), MIXED, dfac.Gibbs(), **RUN | READ)
    options = {"random_seed": 1, "progressbar": False} | READ
    words = "DSGD fits one matrix, not several"
    refused(OptionError, words, dfac.optimize, mixed(), MIXED, dfac.DSGD(), **options)
    cost = dfac.estimate_cost(mixed(), MIXED, dfac.PSGLD(), **READ)
    assert "5 x 5 blocks" in str(cost)
    assert cost.data < 4 * (24 * 18 + 15 * 6 + 7 * 5) + 12 * 24 * 7
    point = dfac.optimize(mixed(), MIXED, **options)
    assert np.isfinite(point["W"]).all()
    told = {name: point.attrs[f"dispersion_{name}"] for name in RELATIONS}
    assert told["features"] == pytest.approx(0.5)
    assert 0 < told["rated"] < 1
    assert 0.5 < told["adt"] < 10  # in units of the data; in those of their mean it is a tenth
    begun = dfac.sample(mixed(), MIXED, dfac.PSGLD(), init=point, **RUN | READ)
    assert np.isfinite(begun["sample_stats"]["lp"]).all()


@pytest.mark.quick("PSGLD")
@pytest.mark.parametrize(
    "sampler", [dfac.PSGLD(**SHORT), dfac.BlockHMC(steps=2, **SHORT)], ids=lambda own: own.name
)
def test_a_resumed_run_is_an_unbroken_one_bit_for_bit_and_needs_the_data(sampler, tmp_path):
    options, half = RUN | READ | {"monitor": WATCHED}, tmp_path / "half.zarr"
    whole = dfac.sample(mixed(), MIXED, sampler, store=tmp_path / "whole.zarr", **options)
    dfac.sample(mixed(), MIXED, sampler, store=half, **options | {"draws": 3})
    other = mixed()
    other["features"] = other["features"] + 1
    lacking = {name: own for name, own in mixed().items() if name != "features"}
    for V, words in (
        (None, "made from several matrices that are not kept"),
        (other, None),
        (lacking, "features is in one only"),
    ):
        refused(DaskfactorError, words, dfac.resume, half, draws=2, V=V, progressbar=False)
    again = dfac.resume(half, draws=3, V=mixed(), progressbar=False)
    assert same(again, whole)
    for name, own in whole.attrs.items():
        if name.startswith("dispersion"):
            assert again.attrs[name] == own, name
    assert same(*(dfac.view(tmp_path / name, "adt") for name in ("whole.zarr", "half.zarr")))


class Stopped(Exception):
    """A run that is broken off."""


@pytest.mark.parametrize("phase", ["tune", "draw"])
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(phase, tmp_path, monkeypatch):
    monkeypatch.setattr(setting, "LONGEST_SEGMENT", 3)
    monkeypatch.setattr("daskfactor.inference.sampling.CHECKPOINT_SECONDS", 0, raising=False)
    options = RUN | READ | {"draws": 20, "tune": 10, "monitor": WATCHED}
    arguments = mixed(), MIXED, dfac.SGHMC(**SHORT)
    whole = dfac.sample(*arguments, **options)

    def stop(event):
        if event.phase == phase and event.done > event.total // 2:
            raise Stopped

    with pytest.raises(Stopped):
        dfac.sample(*arguments, store=tmp_path / "run.zarr", callback=stop, **options)
    again = dfac.resume(tmp_path / "run.zarr", V=mixed(), progressbar=False)
    assert same(again, whole)


def test_monitored_cells_are_named_by_matrix_and_come_back_so(serial):
    for name, (rows, cols) in WATCHED.items():
        run = dfac.view(serial, name)
        watched = dfac.monitored(run)
        cells = watched["row_index"].values, watched["column_index"].values
        group = run["posterior"]
        mu = (group["W"].values[0].astype("f8") @ group["H"].values[0])[:, cells[0], cells[1]]
        np.testing.assert_allclose(watched["mean"], mu.mean(axis=0), rtol=1e-5)
        axis = RELATIONS[name].rows
        given = mixed()[name]
        if axis == "cell":  # its rows are in an order of their own
            labels = given["cell"].values[rows]
            np.testing.assert_array_equal(group["cell"].values[cells[0]], labels)
        else:
            np.testing.assert_array_equal(cells[0], rows)
        np.testing.assert_array_equal(cells[1], cols)


@pytest.fixture(scope="module")
def problem():
    """Three views; the second lacks half of the rows, and one component is of the first only."""
    rng = np.random.default_rng(4)
    rows = np.array([f"r{number}" for number in range(120)])
    W = rng.gamma(1, 1, (120, 4))
    sizes = {"counts": 40, "normal": 25, "over": 30}
    H = {name: rng.gamma(1, 1, (4, size)) for name, size in sizes.items()}
    H["normal"][3] = H["over"][3] = 0
    mean = {name: 3 * W @ own for name, own in H.items()}
    full = {
        "counts": rng.poisson(mean["counts"]),
        "normal": rng.normal(mean["normal"], NOISE**0.5),
        "over": rng.negative_binomial(1 / ALPHA, 1 / (1 + ALPHA * mean["over"])),
    }
    seen = np.arange(120) % 2 == 0
    full_arrays = {name: own.astype(np.float32) for name, own in full.items()}
    given = {n: xr.DataArray(own, {"row": rows}, ["row", n]) for n, own in full_arrays.items()}
    given["normal"] = given["normal"][seen]
    relations = {name: dfac.Relation() for name in full}
    relations["over"] = dfac.Relation(law="negative binomial")
    options = {"draws": 200, "tune": 200, "random_seed": 1, "progressbar": False}
    trace = dfac.sample(given, dfac.Coupled(4, relations=relations), dfac.BlockHMC(), **options)
    return SimpleNamespace(full=full, W=W, seen=seen, rows=rows, trace=trace)


def error(found, truth):
    return float(np.sqrt(np.mean((np.asarray(found) - truth) ** 2)))


@pytest.mark.full
def test_missing_rows_are_predicted_from_the_other_views(problem):
    cold, truth = problem.rows[~problem.seen], problem.full["normal"][~problem.seen]
    found = dfac.predict(dfac.view(problem.trace, "normal"), rows=cold).compute()
    np.testing.assert_array_equal(found["row"], cold)
    inside = (found["lower"].values <= truth) & (truth <= found["upper"].values)
    assert 0.85 < inside.mean() < 0.95
    own = error(found["mean"], truth)
    assert own < 0.5 * error(problem.full["normal"][problem.seen].mean(axis=0), truth)
    assert own < 1.6 * NOISE**0.5  # what nobody could know


def test_dispersions_and_factors_are_found(problem):
    attrs = problem.trace.attrs
    assert attrs["dispersion_counts"] == 1.0
    for name, true in (("normal", NOISE), ("over", ALPHA)):
        assert attrs[f"dispersion_{name}"] == pytest.approx(true, rel=0.15)
        own = dfac.view(problem.trace, name)
        assert own.attrs["dispersion"] == attrs[f"dispersion_{name}"]
    found = dfac.factors(problem.trace)
    assert set(found) == {"row", "counts", "normal", "over"}
    np.testing.assert_array_equal(found["row"]["row"], problem.rows)
    assert found["over"].dims == ("chain", "draw", "over", "component")
    words = "no matrix 'count', did you mean 'counts'"
    refused(OptionError, words, dfac.view, problem.trace, "count")


def test_shares_of_variance_add_up_and_tell_what_only_one_view_has(problem):
    shares = dfac.explained_variance(problem.trace)
    assert shares.dims == ("chain", "draw", "view", "component")
    assert shares["view"].values.tolist() == list(problem.full)
    naive = {name: naive_shares(problem.trace, name) for name in problem.full}
    for name, own in naive.items():
        np.testing.assert_allclose(shares.sel(view=name)[0], own, rtol=1e-4, atol=1e-5)
    W = dfac.factors(problem.trace)["row"].mean(("chain", "draw")).values
    (apart,) = [int(np.argmax(np.corrcoef(problem.W[:, 3], W.T)[0, 1:]))]
    means = shares.mean(("chain", "draw"))
    assert means.sel(view="counts")[apart] > 0.1
    for name in ("normal", "over"):
        assert abs(means.sel(view=name)[apart]) < 0.05


def naive_shares(trace, name):
    """Shares of every draw from all cells."""
    run, found = dfac.view(trace, name), []
    for W, H in zip(run["posterior"]["W"].values[0], run["posterior"]["H"].values[0], strict=True):
        parts = W.T[:, :, None].astype(np.float64) * H[:, None, :]
        mu = parts.sum(axis=0)
        phi = run.attrs["dispersion"]
        law = {"counts": phi * mu, "normal": np.full_like(mu, phi), "over": mu + phi * mu**2}[name]
        covariances = [np.mean(own * mu) - own.mean() * mu.mean() for own in parts]
        found.append(np.array(covariances) / (mu.var() + law.mean()))
    return np.array(found)


def test_a_run_of_one_matrix_has_shares_too_and_no_views():
    trace = dfac.sample(COUNTS, dfac.TweedieNMF(2), dfac.PSGLD(**SHORT), **RUN)
    assert dfac.explained_variance(trace)["view"].values.tolist() == ["data"]
    refused(OptionError, "the run has a single matrix", dfac.view, trace, "a")
    refused(OptionError, "the run has a single matrix", dfac.factors, trace)


def test_of_a_run_that_kept_no_draws_a_view_has_moments():
    given = {"a": COUNTS, "b": 2 * COUNTS}
    trace = dfac.sample(given, dfac.Coupled(2), dfac.PSGLD(**SHORT), keep="moments", **RUN)
    draws = dfac.sample(given, dfac.Coupled(2), dfac.PSGLD(**SHORT), **RUN)
    found = dfac.view(trace, "b")["posterior_moments"]
    whole = dfac.view(draws, "b")["posterior"]["H"]
    np.testing.assert_allclose(found["H_mean"][0], whole[0].mean("draw"), rtol=1e-4)
    np.testing.assert_allclose(found["H_var"][0], whole[0].var("draw"), rtol=1e-3)
    refused(OptionError, "factors needs draws, but the run stored none", dfac.factors, trace)
    refused(OptionError, "a share of variance needs draws", dfac.explained_variance, trace)


def test_a_view_is_a_run_of_its_matrix(problem, tmp_path):
    run, rows = dfac.view(problem.trace, "normal"), problem.rows
    group = run["posterior"]
    assert group["W"].dims == ("chain", "draw", "row", "component")
    assert group["H"].dims == ("chain", "draw", "component", "normal")
    mu = np.einsum("dik,dkj->ij", group["W"].values[0], group["H"].values[0], dtype=np.float64)
    found = dfac.predict(run, rows=list(rows[[3, 4]]))
    np.testing.assert_allclose(found["mean"], mu[[3, 4]] / 200, rtol=1e-4)
    assert "R-hat" in str(dfac.summarize(run))
    best = dfac.recommend(run, rows=[rows[1]], n=3)
    np.testing.assert_array_equal(best["normal"][0], np.argsort(-mu[1])[:3])
    place = anndata.AnnData(np.zeros((120, 25), np.float32), pd.DataFrame(index=rows))
    placed = dfac.to_anndata(run, place, copy=True)
    assert placed.obsm["dfac"].shape == (120, 4)
    assert placed.varm["dfac"].shape == (25, 4)
    page = tmp_path / "page.html"
    dfac.report(run, page)
    assert page.stat().st_size > 10_000


def test_new_rows_of_a_view_and_not_of_several(problem):
    run, new = dfac.view(problem.trace, "counts"), problem.full["counts"][:6].astype(np.float32)
    found = dfac.transform(run, new, draws=30, random_seed=1, progressbar=False)
    known = run["posterior"]["W"][0, :, :6].mean("draw").values
    assert np.corrcoef(found.mean(("chain", "draw")).values.ravel(), known.ravel())[0, 1] > 0.95
    with pytest.raises(OptionError, match=r"pass view\(run, name\)"):
        dfac.transform(problem.trace, new, progressbar=False)


def test_a_chain_is_seen_as_it_was_given(serial):
    """The items' features lie turned in the joint matrix."""
    run = dfac.view(serial, "features")
    factors = dfac.factors(serial)
    assert run["posterior"]["W"].dims[-2:] == ("item", "component")
    np.testing.assert_array_equal(run["posterior"]["W"], factors["item"])
    unit = json.loads(run.attrs["data"])["mean"]
    H = run["posterior"]["H"].values.swapaxes(-1, -2)
    np.testing.assert_allclose(H, unit * factors["feature"].values, rtol=1e-5)


def test_priors_of_a_turned_matrix_are_those_of_its_own_sides():
    between = {"a": dfac.Relation("user", "item"), "b": dfac.Relation("item", "feature")}
    priors = {"rate_w": 2.0, "rate_h": 0.5, "shape_w": 1.5, "shape_h": 3.0}
    model = dfac.Coupled(2, relations=between, **priors)
    trace = dfac.sample({"a": COUNTS, "b": COUNTS[:18]}, model, dfac.PSGLD(**SHORT), **RUN)
    for name, (rows, columns) in (("a", "wh"), ("b", "hw")):
        run = dfac.view(trace, name)
        own = json.loads(run.attrs["model"])
        unit = json.loads(run.attrs["data"])["mean"]
        assert own["shape_w"] == run.attrs["shape_w"] == priors[f"shape_{rows}"]
        assert own["shape_h"] == run.attrs["shape_h"] == priors[f"shape_{columns}"]
        assert run.attrs["rate_w"] == priors[f"rate_{rows}"]
        assert run.attrs["rate_h"] == pytest.approx(priors[f"rate_{columns}"] / unit)


def test_relations_are_written_in_several_ways():
    given = {"a": ("cell", "gene"), "b": {"law": "gamma"}}
    found = dfac.Coupled(2, relations=given).relations
    assert found == {"a": dfac.Relation("cell", "gene"), "b": dfac.Relation(law="gamma")}
    words = "relation 'a' must be a Relation"
    refused(ModelError, words, dfac.Coupled, 2, relations={"a": "cell"})
    for own, words in (
        ({"law": "binomial"}, 'law must be one of "auto"'),
        ({"law": 1.5}, "1.5"),
        ({"dispersion": -1.0}, "dispersion"),
        ({"weight": 0.0}, "weight"),
        ({"rows": 3}, "rows of a relation is the name of a factor, got 3"),
    ):
        refused(ModelError, words, dfac.Relation, **own)
        refused(ModelError, None, dfac.Coupled, 2, relations={"a": own})


def test_what_works_on_one_matrix_says_so():
    data, model = {"a": COUNTS, "b": COUNTS}, dfac.Coupled(2)
    for asked in (dfac.log_evidence, dfac.stein_posterior):
        refused(OptionError, "got Coupled", asked, data, model)
    words = "several matrices have no shape of their own"
    refused(ModelError, words, dfac.calibrate, model, (10, 10))
    covariates = {"covariates_w": np.ones((24, 1))}
    refused(ModelError, "takes neither covariates", dfac.Coupled, 2, **covariates)
    words = "dispersion of a matrix is that of its Relation"
    refused(ModelError, words, dfac.Coupled, 2, dispersion=1.0)
    relations = {"a": dfac.Relation(law="poisson"), "b": dfac.Relation()}
    counted, negative = dfac.Coupled(2, relations=relations), data | {"a": COUNTS - 1}
    words = "a: beta=1 allows no negative data"
    refused(DaskfactorError, words, dfac.sample, negative, counted, **RUN)
    options = RUN | {"draws": 1, "tune": 1}
    words = "monitor names 'c', and the matrices are a, b"
    refused(OptionError, words, dfac.sample, data, model, monitor={"c": ([0], [0])}, **options)
    refused(OptionError, None, dfac.sample, data, model, monitor={"a": ([24], [0])}, **options)
    assert "monitor" not in dfac.sample(data, model, monitor={}, **options).children


def test_a_dataset_and_mudata_are_what_a_dict_is():
    first, second = COUNTS, RNG.normal(4, 1, (24, 5)).astype(np.float32)
    arrays = {
        "rna": xr.DataArray(first, {"cell": LABELS}, ["cell", "gene"]),
        "adt": xr.DataArray(second, {"cell": LABELS}, ["cell", "protein"]),
    }
    options = RUN | {"blocks": 4}
    wanted = dfac.sample(arrays, dfac.Coupled(2), dfac.PSGLD(**SHORT), **options)
    found = dfac.sample(xr.Dataset(arrays), dfac.Coupled(2), dfac.PSGLD(**SHORT), **options)
    assert same(found, wanted)
    order = np.random.default_rng(0).permutation(24)[:20]
    with mudata.set_options(pull_on_update=False):
        made = mudata.MuData(
            {
                "rna": annotated(sp.csr_matrix(first), LABELS, "gene"),
                "adt": annotated(second[order], LABELS[order], "protein"),
            }
        )
    arrays["adt"] = arrays["adt"][order]
    dense = dfac.sample(arrays, dfac.Coupled(2), dfac.PSGLD(**SHORT), **options)
    found = dfac.sample(made, dfac.Coupled(2), dfac.PSGLD(**SHORT), unstored="zero", **options)
    assert dfac.view(found, "adt")["posterior"]["W"].dims[-2] == "obs"
    np.testing.assert_array_equal(found["posterior"]["obs"], LABELS)
    one, other = (run["posterior"]["W"].values for run in (found, dense))
    np.testing.assert_allclose(one, other, rtol=0.02, atol=0.01)
