"""What `discretization_bias` takes, refuses and leaves alone."""

import warnings

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError
from daskfactor.inference import bias as bias_module
from tests.refusals import refused

QUIET = {"progressbar": False, "random_seed": 0}
POISSON = dfac.TweedieNMF(2, dispersion=1.0)


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
    "cir": (POISSON, dfac.PSGLD(transition="cir", **WARM), "exact"),
    "Langevin": (POISSON, dfac.LangevinDynamics(**WARM), "coupled"),
    "SGLD": (POISSON, dfac.SGLD(**WARM), "coupled"),
    "SGHMC": (dfac.GaussianMF(2), dfac.SGHMC(), "exact"),
    "learnt": (dfac.TweedieNMF(2, dispersion=1.0, rate_w="row"), dfac.PSGLD(**WARM), "exact"),
    "auto": (dfac.TweedieNMF(2, beta=2.0), dfac.PSGLD(**WARM), "coupled"),
    "frozen": (dfac.TweedieNMF(2, dispersion=1.0, fixed_w=W), dfac.PSGLD(**WARM), "coupled"),
}


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


def test_the_same_on_every_executor_and_from_a_store(tmp_path):
    tree = sample(counts(), POISSON, dfac.PSGLD(**WARM), store=tmp_path / "run.zarr")
    found = bias(tree)
    assert found.equals(bias(tmp_path / "run.zarr", executor=dfac.LanesExecutor(2)))
    assert not found.equals(bias(tree, random_seed=1))


def test_what_it_refuses():
    exact = sample(counts(), POISSON, dfac.Gibbs(**WARM))
    refused(OptionError, "no bias of a finite step", bias, exact)
    moments = sample(counts(), POISSON, dfac.PSGLD(**WARM), keep="moments")
    refused(OptionError, "kept moments only, but an estimate of its bias", bias, moments)
    V = sparse.csr_array(counts())
    tree = sample(V, POISSON, dfac.PSGLD(**WARM), unstored="zero")
    refused(DataError, "pass the data again", bias, tree)
    refused(DataError, "not those that the run at this trace began with", bias, tree, 2 * V)
    assert np.isfinite(bias(tree, V)["bias"]).all()
    refused(OptionError, "draws must be a whole number of at least 50", bias, tree, V, draws=3)


REAL = np.random.default_rng(1).normal(5.0, 1.0, (9, 5))
TENSOR = np.random.default_rng(2).poisson(4.0, (5, 4, 3)).astype(float)
BOTH = {"a": counts(), "b": REAL}
BETWEEN = {
    "a": dfac.Relation("rows", "x", law="poisson"),
    "b": dfac.Relation("rows", "y", law="normal"),
}
STILL = {"step": 1e-9, "transition": "euler", **WARM}
OTHERS = {
    "matrix": (counts(), dfac.TweedieNMF(2), dfac.PSGLD(**STILL)),
    "tensor": (TENSOR, dfac.CP(2, dispersion=1.0), dfac.PSGLD(**STILL)),
    "four axes": (TENSOR.reshape(5, 2, 2, 3), dfac.CP(2), dfac.PSGLD(**STILL)),
    "several": (BOTH, dfac.Coupled(2, relations=BETWEEN), dfac.PSGLD(**STILL)),
    "pair": (counts(), POISSON, dfac.PSGRRLD(**STILL)),
}


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


def test_cells_are_those_of_both_runs_whatever_was_monitored():
    monitored = ([1, 2], [3, 3])
    tree = sample(counts(), POISSON, dfac.PSGLD(**WARM), monitor=monitored)
    assert sum(name.startswith("mu[") for name in bias(tree)["functional"].values) == 3
    tree = sample(TENSOR, dfac.CP(2), dfac.PSGLD(**WARM))
    cells = [name for name in bias(tree, TENSOR)["functional"].values if name.startswith("mu[")]
    assert len(cells) == 3
    assert all(name.count(",") == 2 for name in cells)
