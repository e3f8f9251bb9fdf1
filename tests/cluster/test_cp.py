"""Tensors on a cluster: the draws of one process, with a store, also when resumed."""

import numpy as np
import pytest
import sparse

import daskfactor as dfac
from tests.cluster.support import alike, same

pytestmark = pytest.mark.cluster

MODEL = dfac.CP(3, dispersion=1.0)
SETTINGS = {"random_seed": 3, "progressbar": False, "blocks": 3}
SETTINGS |= {"monitor": ([0, 7, 30], [3, 1, 2], [5, 5, 0])}


def tensor():
    """Skewed counts, so that indices are dealt out evenly."""
    rng = np.random.default_rng(5)
    heavy = rng.lognormal(0, 1.5, 31)[:, None, None]
    return sparse.COO(rng.poisson(heavy * rng.gamma(0.5, 0.5, (31, 14, 11))))


@pytest.mark.parametrize("executor", ["ring", "tasks"])
def test_the_draws_of_one_process(executor, client, tmp_path):
    """With a store; and half of them from a run that is resumed there."""
    draws, tune = (6, 4) if executor == "ring" else (2, 1)  # each operation is a task of dask
    place = {"executor": executor, "client": client}
    arguments = tensor(), MODEL, dfac.PSGLD(warm_start=2)
    options = {**SETTINGS, "unstored": "zero"}
    here = dfac.sample(*arguments, draws, tune, executor="serial", **options)
    dfac.sample(*arguments, draws // 2, tune, store=tmp_path / "v", **place, **options)
    again = dfac.resume(tmp_path / "v", draws=draws // 2, V=tensor(), progressbar=False, **place)
    assert same(again, here)


@pytest.mark.parametrize(
    "sampler",
    [dfac.SGHMC(warm_start=2), dfac.BlockHMC(steps=2, warm_start=2), dfac.PSGRRLD(warm_start=2)],
    ids=lambda own: own.name,
)
def test_what_bands_gather_travels_with_them(sampler, client):
    assert alike(client, "ring", tensor(), MODEL, sampler, 4, 4, **SETTINGS)


def test_the_executor_is_chosen_for_tensors_too(client):
    """By the time of a block's update, of an array in the client's memory."""
    V = np.random.default_rng(0).poisson(3.0, (10, 6, 8)).astype(float)
    arguments = V, MODEL, dfac.PSGLD(warm_start=2), 4, 4
    options = {"random_seed": 3, "progressbar": False, "blocks": 2}
    assert alike(client, "auto", *arguments, **options)
