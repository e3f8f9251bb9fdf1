"""Several matrices on a cluster: the draws of one process, with a store, also when resumed."""

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import xarray as xr

import daskfactor as dfac
from tests.cluster.support import alike, same

pytestmark = [
    pytest.mark.cluster,
    # The features of genes go with no counts of them.
    pytest.mark.filterwarnings("ignore:around the means that"),
]

MODEL = dfac.Coupled(
    3,
    relations={
        "counts": dfac.Relation("row", "gene", law="poisson"),
        "values": dfac.Relation("row", "protein", law="normal"),
        "over": dfac.Relation("row", "peak", law="negative binomial"),
        "features": dfac.Relation("gene", "feature", law="gamma"),
    },
)
SETTINGS = {"random_seed": 3, "progressbar": False, "blocks": 5}
SETTINGS |= {"unstored": {"counts": "zero", "over": "missing"}}
SETTINGS |= {"monitor": {"values": ([0, 7], [3, 1]), "counts": ([2], [19])}}

ROWS = np.array([f"r{number}" for number in range(40)])


def sparse(values):
    return anndata.AnnData(sp.csr_matrix(values, dtype=np.float32), pd.DataFrame(index=ROWS))


def mixed():
    """Observed zeros, values with gaps of some rows only, missing cells, and a chain."""
    rng = np.random.default_rng(5)
    W = rng.gamma(1, 1, (40, 3))
    values = (W @ rng.gamma(1, 1, (3, 9)) + rng.normal(0, 0.5, (40, 9)))[5:31].astype(np.float32)
    values[rng.random(values.shape) < 0.2] = np.nan
    return {
        "counts": sparse(rng.poisson(W @ rng.gamma(1, 1, (3, 20)))),
        "values": xr.DataArray(values, {"row": ROWS[5:31]}, ["row", "protein"]),
        "over": sparse(rng.negative_binomial(3, 0.5, (40, 11))),
        "features": rng.gamma(2, 1, (20, 6)).astype(np.float32),
    }


@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_the_draws_of_one_process(executor, client, tmp_path):
    """With a store; and half of them from a run that is resumed there."""
    draws, tune = (8, 6) if executor == "ring" else (4, 3)  # each operation is a task of dask
    arguments = mixed(), MODEL, dfac.PSGLD(warm_start=3)
    place = {"executor": executor, "client": client}
    here = dfac.sample(*arguments, draws, tune, executor="serial", **SETTINGS)
    half = dfac.sample(*arguments, draws // 2, tune, store=tmp_path / "v", **place, **SETTINGS)
    assert half["posterior"].sizes["draw"] == draws // 2
    more = {"draws": draws // 2, "progressbar": False}
    again = dfac.resume(tmp_path / "v", V=mixed(), **more, **place)
    assert same(again, here)
    assert same(dfac.view(tmp_path / "v", "features"), dfac.view(here, "features"))
    for name in ("values", "over"):
        assert again.attrs[f"dispersion_{name}"] == here.attrs[f"dispersion_{name}"]


@pytest.mark.parametrize(
    "sampler",
    [dfac.SGHMC(warm_start=3), dfac.BlockHMC(steps=2, warm_start=3)],
    ids=lambda own: own.name,
)
def test_what_bands_gather_travels_with_them(sampler, client):
    assert alike(client, "ring", mixed(), MODEL, sampler, 5, 4, **SETTINGS)
