"""What `discretization_bias` takes, refuses and leaves alone."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError

QUIET: dict[str, Any] = {"progressbar": False, "random_seed": 0}
POISSON = dfac.TweedieNMF(2, dispersion=1.0)


def counts() -> Any:
    rng = np.random.default_rng(0)
    return rng.poisson(3 * rng.gamma(1, 1, (9, 2)) @ rng.gamma(1, 1, (2, 8))).astype(float)


def sample(V: Any, model: Any, sampler: Any, **options: Any) -> Any:
    settings = {"draws": 60, "tune": 20, "blocks": 2, "executor": "serial"}
    return dfac.sample(V, model, sampler, **settings | QUIET | options)


def bias(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"draws": 50, "tune": 10, "executor": "serial", "cells": 3}
        return dfac.discretization_bias(*args, **settings | QUIET | options)


WARM = {"warm_start": 3}
W = np.arange(1.0, 10)[:, None]
RUNS: dict[str, tuple[Any, Any, str]] = {
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
def test_every_biased_sampler(name: str) -> None:
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


def test_the_same_on_every_executor_and_from_a_store(tmp_path: Any) -> None:
    tree = sample(counts(), POISSON, dfac.PSGLD(**WARM), store=tmp_path / "run.zarr")
    found = bias(tree)
    assert found.equals(bias(tmp_path / "run.zarr", executor=dfac.LanesExecutor(2)))
    assert not found.equals(bias(tree, random_seed=1))


def test_what_it_refuses() -> None:
    exact = sample(counts(), POISSON, dfac.Gibbs(**WARM))
    with pytest.raises(OptionError, match="no bias of a finite step"):
        bias(exact)
    moments = sample(counts(), POISSON, dfac.PSGLD(**WARM), keep="moments")
    with pytest.raises(OptionError, match="kept moments only, but an estimate of its bias"):
        bias(moments)
    V = sparse.csr_array(counts())
    tree = sample(V, POISSON, dfac.PSGLD(**WARM), unstored="zero")
    with pytest.raises(DataError, match="pass the data again"):
        bias(tree)
    with pytest.raises(DataError, match="not those that the run at this trace began with"):
        bias(tree, 2 * V)
    assert np.isfinite(bias(tree, V)["bias"]).all()
    with pytest.raises(OptionError, match="draws must be a whole number of at least 50"):
        bias(tree, V, draws=3)
