"""Bands of particles on the workers of a cluster give the numbers of one machine."""

import numpy as np
import pytest

import daskfactor as dfac
from tests.cluster.support import cluster

pytestmark = pytest.mark.cluster


def test_same_numbers_as_without_a_cluster():
    rng = np.random.default_rng(0)
    V = rng.gamma(2.0, size=(30, 24))
    W, H = rng.gamma(1.0, size=(5, 30, 2)), rng.gamma(1.0, size=(5, 2, 24))
    model = dfac.SILFNMF(2, threshold=100.0)
    options = {"blocks": 3, "progressbar": False}
    here = dfac.stein_discrepancy((W, H), V, model, **options)
    with cluster(2, processes=False) as client:
        there = dfac.stein_discrepancy((W, H), V, model, client=client, executor="tasks", **options)
        chosen = dfac.stein_discrepancy((W, H), V, model, client=client, **options)
    for one in (there, chosen):
        assert one.identical(here)


@pytest.mark.slow
def test_particles_in_a_store_are_read_by_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("daskfactor.particles.source.memory_budget", lambda limit: 0)
    V = np.random.default_rng(0).poisson(3.0, (20, 16)).astype(float)
    model, options = dfac.TweedieNMF(2), {"blocks": 2, "progressbar": False}
    trace = dfac.sample(
        V, model, draws=6, tune=4, random_seed=0, store=tmp_path / "run.zarr", **options
    )
    here = dfac.stein_discrepancy(trace, V, model, **options)
    with cluster(2, processes=True) as client:
        there = dfac.stein_discrepancy(trace, V, model, client=client, executor="tasks", **options)
    assert there.identical(here)


def test_particles_made_by_workers_are_those_made_here(monkeypatch):
    V = np.random.default_rng(0).gamma(2.0, size=(24, 20))
    gaps = np.where(V > 5.0, np.nan, V)
    model, options = dfac.SILFNMF(2), {"blocks": 2, "progressbar": False, "random_seed": 1}
    settings = options | {"particles": 3, "pilot": 1}
    method = dfac.Ensemble(max_iter=10)
    here = [dfac.stein_posterior(one, model, method, **settings) for one in (V, gaps)]
    with cluster(2, processes=False) as client:
        more = {"client": client, "executor": "tasks"}
        for one, expected in zip((V, gaps), here, strict=True):
            there = dfac.stein_posterior(one, model, method, **settings, **more)
            for group in ("posterior", "stein", "constant_data"):
                assert there[group].to_dataset().identical(expected[group].to_dataset())
            np.testing.assert_array_equal(
                there["sample_stats/weight"], expected["sample_stats/weight"]
            )
