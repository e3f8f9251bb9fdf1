"""What `discretization_bias` and `calibrate` take, refuse, return and leave alone."""

import json
import warnings

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import DaskfactorError, DataError, OptionError
from daskfactor.inference import bias as bias_module
from tests.refusals import refused

QUIET = {"progressbar": False, "random_seed": 0}
POISSON = dfac.TweedieNMF(2, dispersion=1.0)
REAL = np.random.default_rng(1).normal(5.0, 1.0, (9, 5))
TENSOR = np.random.default_rng(2).poisson(4.0, (5, 4, 3)).astype(float)


def counts():
    rng = np.random.default_rng(0)
    return rng.poisson(3 * rng.gamma(1, 1, (9, 2)) @ rng.gamma(1, 1, (2, 8))).astype(float)


def sample(V, model, sampler, **options):
    settings = {"draws": 60, "tune": 20, "blocks": 2, "executor": "serial"}
    return dfac.sample(V, model, sampler, **settings | QUIET | options)


def bias(*args, **options):
    with warnings.catch_warnings(action="ignore"):
        settings = {"draws": 50, "tune": 10, "executor": "serial", "cells": 3}
        return dfac.discretization_bias(*args, **settings | QUIET | options)


WARM = {"warm_start": 3}
W = np.arange(1.0, 10)[:, None]
RUNS = {
    "PSGLD": (POISSON, dfac.PSGLD(**WARM), "coupled"),
    "Langevin": (POISSON, dfac.LangevinDynamics(**WARM), "coupled"),
    "SGLD": (POISSON, dfac.SGLD(**WARM), "coupled"),
    "SGHMC": (dfac.GaussianMF(2), dfac.SGHMC(), "exact"),
    "learnt": (dfac.TweedieNMF(2, dispersion=1.0, rate_w="row"), dfac.PSGLD(**WARM), "exact"),
    "auto": (dfac.TweedieNMF(2, beta=2.0), dfac.PSGLD(**WARM), "coupled"),
    "frozen": (dfac.TweedieNMF(2, dispersion=1.0, fixed_w=W), dfac.PSGLD(**WARM), "coupled"),
}


@pytest.mark.quick("PSGLD", "SGLD", "SGHMC", "learnt", "auto")
@pytest.mark.parametrize("name", RUNS)
def test_every_biased_sampler(name):
    model, sampler, method = RUNS[name]
    tree = sample(counts(), model, sampler, chains=2)
    before = tree.copy(deep=True)
    found = bias(tree)
    assert found.attrs["method"] == method
    assert {"lp", "mu_mean", "mu_norm", "singular_value[0]"} < set(found["functional"].values)
    assert np.isfinite(found["bias"]).all()
    assert (found["error"] > 0).sum() >= found.sizes["functional"] - 1  # a frozen W has none
    assert found.verdict in " ".join(str(found).split())  # lines are broken
    assert tree.identical(before)


def test_the_same_on_every_executor_and_from_a_store_of_any_cells(tmp_path):
    options = {"store": tmp_path / "run.zarr", "monitor": ([1, 2], [3, 3])}
    tree = sample(counts(), POISSON, dfac.PSGLD(**WARM), **options)
    found = bias(tree)
    assert found.equals(bias(tmp_path / "run.zarr", executor=dfac.LanesExecutor(2)))
    assert not found.equals(bias(tree, random_seed=1))
    tree = sample(TENSOR, dfac.CP(2), dfac.PSGLD(**WARM))
    for each, axes in ((found, 2), (bias(tree, TENSOR), 3)):
        cells = [name for name in each["functional"].values if name.startswith("mu[")]
        assert [name.count(",") for name in cells] == [axes - 1] * 3


def test_what_it_refuses():
    exact = sample(counts(), POISSON, dfac.Gibbs(**WARM))
    refused(OptionError, "no bias of a finite step", bias, exact)
    moments = sample(counts(), POISSON, dfac.PSGLD(**WARM), keep="moments")
    refused(OptionError, "stored only moments, but an estimate of its bias", bias, moments)
    V = sparse.csr_array(counts())
    tree = sample(V, POISSON, dfac.PSGLD(**WARM), unstored="zero")
    refused(DataError, "pass the data again", bias, tree)
    refused(DataError, "not those that the run at this trace began with", bias, tree, 2 * V)
    assert np.isfinite(bias(tree, V)["bias"]).all()
    refused(OptionError, "draws must be a whole number of at least 50", bias, tree, V, draws=3)


BOTH = {"a": counts(), "b": REAL}
LAWS = {"a": ("x", "poisson"), "b": ("y", "normal")}
BETWEEN = {name: dfac.Relation("rows", own, law=law) for name, (own, law) in LAWS.items()}
STILL = {"step": 1e-9, "transition": "euler", **WARM}
OTHERS = {
    "matrix": (counts(), dfac.TweedieNMF(2), dfac.PSGLD(**STILL)),
    "tensor": (TENSOR, dfac.CP(2, dispersion=1.0), dfac.PSGLD(**STILL)),
    "four axes": (TENSOR.reshape(5, 2, 2, 3), dfac.CP(2), dfac.PSGLD(**STILL)),
    "several": (BOTH, dfac.Coupled(2, relations=BETWEEN), dfac.PSGLD(**STILL)),
    "pair": (counts(), POISSON, dfac.PSGRRLD(**STILL)),
}


@pytest.mark.quick(
    "chains0-tensor", "chains0-pair", "chains0-several", "chains1-matrix", "chains1-pair"
)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("chains", [[0, 1], [1]])
def test_the_run_goes_on_from_its_last_draws(name, chains, monkeypatch):
    """A step of next to nothing stays there: densities show factors, units and dispersions."""
    V, model, sampler = OTHERS[name]
    tree = sample(V, model, sampler, chains=2, store=None)
    found = {}

    def see(after, group, densities):
        found[group] = np.array(densities)
        return track(after, group, densities)

    track = bias_module._track
    monkeypatch.setattr(bias_module, "_track", see)
    bias(tree.sel(chain=chains), V)
    last = tree["sample_stats"]["lp"].sel(chain=chains).values[:, -1:]
    for densities in found.values():
        np.testing.assert_allclose(densities[:, :1], last, rtol=1e-5)
    assert set(found) == {"posterior", "posterior_coarse"}


MODEL = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
SAMPLER = dfac.Gibbs(warm_start=2)
FROZEN = dfac.TweedieNMF(2, dispersion=1.0, fixed_w=np.array([[1.0], [2.0], [3.0]]))
BY_COLUMN = dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=1.0, dispersion="column")
ROWS = dfac.TweedieNMF(1, dispersion=1.0, rate_w="row", shape_h="auto")
LINKS = dfac.GaussianMF(1, covariates_h=np.eye(4)[:, :2])
ESTIMATED = {"model": dfac.TweedieNMF(2), "sampler": dfac.BlockHMC()}


def calibrate(model=MODEL, **options):
    settings = {"replications": 12, "draws": 60, "tune": 10, "random_seed": 1}
    quiet = {"progressbar": False, "executor": "serial"}
    usual = {"shape": (3, 4), "sampler": SAMPLER}
    return dfac.calibrate(model, **usual | quiet | settings | options)


def test_what_calibrate_returns():
    found = calibrate(cells=2, missing=0.3)
    names = set(found["quantity"].values)
    cells = [name[3:-1].split(",") for name in names if name.startswith("mu[")]
    assert len(cells) == 2
    sizes = {f"w[{row}]" for row, _ in cells} | {f"h[{column}]" for _, column in cells}
    others = {"log_likelihood", "w_sum", "h_sum", *(f"mu[{i},{j}]" for i, j in cells)}
    assert names == sizes | others
    assert found["rank"].sizes["replication"] == 12
    known = found["p"].dropna("quantity")
    assert (np.diff(known) >= 0).all()
    assert (found["rank"].max("replication") <= found["levels"]).all()
    assert json.loads(found.attrs["sampler"])["type"] == "Gibbs"
    assert found.verdict in " ".join(str(found).split())  # lines are broken
    assert found.identical(calibrate(cells=2, missing=0.3))
    assert not found["rank"].equals(calibrate(cells=2, missing=0.3, random_seed=2)["rank"])


def test_replications_may_share_runs_or_have_their_own_by_any_executor():
    events = []
    alone = calibrate(together=1, callback=events.append)
    assert [event.done for event in events if event.phase == "replications"] == list(range(1, 13))
    for found in (alone, calibrate(together=5)):
        assert found.sizes["replication"] == 12
        assert found["ess"].sel(quantity="mu[0,1]" if "mu[0,1]" in found else "w_sum") > 0
    assert calibrate(blocks=2).equals(calibrate(blocks=2, executor=dfac.LanesExecutor(2)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ESTIMATED, 'dispersion="auto" is estimated from the data and has no prior'),
        ({"shape": 5}, "shape must be two whole numbers.*got 5"),
        ({"shape": (3, 0)}, "at least 1, got 0"),
        ({"missing": 1.0}, "below 1, got 1.0"),
        ({"missing": "half"}, "below 1, got 'half'"),
        ({"replications": 3}, "at least 10, got 3"),
        ({"draws": 0}, "draws must be a whole number of at least 1, got 0"),
        ({"moments": (1.0,)}, "moments must be a mean and a positive variance"),
        ({"moments": (1.0, -1.0)}, "moments must be a mean and a positive variance"),
        ({"model": FROZEN, "together": 2}, "together=2 puts replications into one matrix"),
        ({"model": BY_COLUMN, "together": 2, "sampler": dfac.BlockHMC()}, "together=2 puts"),
    ],
)
def test_what_calibrate_refuses(options, said):
    with pytest.raises(DaskfactorError, match=said) as caught:
        calibrate(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "sampler", "names"),
    [
        (dfac.TweedieNMF(2), dfac.Gibbs(2), ()),
        (FROZEN, dfac.Gibbs(2), ()),
        (dfac.TweedieNMF("auto", dispersion=1.0), dfac.Gibbs(2), ("rate",)),
        (dfac.NegativeBinomialNMF(1), dfac.BlockHMC(warm_start=2), ("dispersion",)),
        (ROWS, dfac.BlockHMC(warm_start=2), ("rate_w", "shape_h")),
        (LINKS, dfac.Gibbs(), ("noise", "precision_w", "link_h", "link_precision_h")),
    ],
    ids=["nothing", "frozen", "components", "dispersion", "rows", "links"],
)
def test_what_a_model_learns_is_ranked(model, sampler, names):
    found = calibrate(model, sampler=sampler, replications=10, draws=30, tune=5)
    assert set(names) <= set(found["quantity"].values)
    assert np.isfinite(found["ess"]).all()


def test_the_plot_has_two_axes_for_each_quantity_of_which_something_can_be_said(tmp_path):
    found = calibrate(replications=40, cells=1)
    figure = plots.calibration_plot(found, most=3, path=tmp_path / "ranks.png")
    known = min(3, int((found["levels"] > 0).sum()))
    assert len(figure.axes) == 2 * known
    assert figure.axes[0].get_title(loc="left").startswith(str(found["quantity"].values[0]))
    assert (tmp_path / "ranks.png").stat().st_size > 1000
    refused(OptionError, "takes the result of calibrate", plots.calibration_plot, found[["ess"]])
    found = calibrate(draws=10)  # too few to say anything
    assert found["p"].isnull().all()
    assert found.verdict.startswith("Nothing can be said of")
    assert not found.attrs["calibrated"]
    refused(OptionError, "pass more draws to calibrate", plots.calibration_plot, found)
