"""Tensors and several matrices on a cluster: the draws of one process, also when resumed."""

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import sparse
import xarray as xr

import daskfactor as dfac
from tests.cluster.support import alike, same

pytestmark = [
    pytest.mark.cluster,
    # The features of genes go with no counts of them.
    pytest.mark.filterwarnings("ignore:around the means that"),
]

RELATIONS = {
    "counts": dfac.Relation("row", "gene", law="poisson"),
    "values": dfac.Relation("row", "protein", law="normal"),
    "over": dfac.Relation("row", "peak", law="negative binomial"),
    "features": dfac.Relation("gene", "feature", law="normal"),
}
WATCHED = {"values": ([0, 7], [3, 1]), "counts": ([2], [19])}
ROWS = np.array([f"r{number}" for number in range(40)])


def annotated(values):
    return anndata.AnnData(sp.csr_matrix(values, dtype=np.float32), pd.DataFrame(index=ROWS))


def mixed():
    """Observed zeros, values with gaps of some rows only, missing cells, and a chain."""
    rng = np.random.default_rng(5)
    W = rng.gamma(1, 1, (40, 3))
    values = (W @ rng.gamma(1, 1, (3, 9)) + rng.normal(0, 0.5, (40, 9)))[5:31].astype(np.float32)
    values[rng.random(values.shape) < 0.2] = np.nan
    return {
        "counts": annotated(rng.poisson(W @ rng.gamma(1, 1, (3, 20)))),
        "values": xr.DataArray(values, {"row": ROWS[5:31]}, ["row", "protein"]),
        "over": annotated(rng.negative_binomial(3, 0.5, (40, 11))),
        "features": rng.gamma(2, 1, (20, 6)).astype(np.float32),
    }


def tensor():
    """Skewed counts, so that indices are dealt out evenly."""
    rng = np.random.default_rng(5)
    heavy = rng.lognormal(0, 1.5, 31)[:, None, None]
    return sparse.COO(rng.poisson(heavy * rng.gamma(0.5, 0.5, (31, 14, 11))))


QUIET = {"random_seed": 3, "progressbar": False}
OF_MATRICES = {"blocks": 5, "unstored": {"counts": "zero", "over": "missing"}, "monitor": WATCHED}
CELLS = [0, 7, 30], [3, 1, 2], [5, 5, 0]
KINDS = {
    "several": (mixed, dfac.Coupled(3, relations=RELATIONS), OF_MATRICES | QUIET),
    "tensor": (tensor, dfac.CP(3, dispersion=1.0), {"blocks": 3, "monitor": CELLS} | QUIET),
}
# Draws and cycles to tune; of tasks each operation is one of dask.
LENGTHS = {
    "several": {"ring": (8, 6), "tasks": (4, 3)},
    "tensor": {"ring": (6, 4), "tasks": (2, 1)},
}


@pytest.mark.quick("several-ring")
@pytest.mark.parametrize("executor", ["ring", "tasks"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_draws_of_one_process(kind, executor, client, tmp_path):
    """With a store; and half of them from a run that is resumed there."""
    make, model, settings = KINDS[kind]
    draws, tune = LENGTHS[kind][executor]
    settings = {"unstored": "zero"} | settings
    arguments = make(), model, dfac.PSGLD(warm_start=3)
    place = {"executor": executor, "client": client}
    here = dfac.sample(*arguments, draws, tune, executor="serial", **settings)
    half = dfac.sample(*arguments, draws // 2, tune, store=tmp_path / "v", **place, **settings)
    assert half["posterior"].sizes["draw"] == draws // 2
    more = {"draws": draws // 2, "progressbar": False}
    again = dfac.resume(tmp_path / "v", V=make(), **more, **place)
    assert same(again, here)
    if kind == "several":
        assert same(dfac.view(tmp_path / "v", "features"), dfac.view(here, "features"))
        for name in ("values", "over"):
            assert again.attrs[f"dispersion_{name}"] == here.attrs[f"dispersion_{name}"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        *((kind, dfac.SGHMC(warm_start=3)) for kind in KINDS),
        *((kind, dfac.BlockHMC(steps=2, warm_start=3)) for kind in KINDS),
        ("tensor", dfac.PSGRRLD(warm_start=2)),
    ],
    ids=lambda own: getattr(own, "name", own),
)
def test_what_bands_gather_travels_with_them(kind, sampler, client):
    make, model, settings = KINDS[kind]
    assert alike(client, "ring", make(), model, sampler, 6, 4, **settings)


@pytest.mark.full
def test_the_executor_is_chosen_for_tensors_too(client):
    """By the time of a block's update, of an array in the client's memory."""
    V = np.random.default_rng(0).poisson(3.0, (10, 6, 8)).astype(float)
    arguments = V, dfac.CP(3, dispersion=1.0), dfac.PSGLD(warm_start=2), 4, 4
    assert alike(client, "auto", *arguments, blocks=2, **QUIET)
