import time
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

import daskfactor as dfac
from daskfactor.results.schema import RunSpec
from daskfactor.results.store import RunStore
from daskfactor.results.trace import open_run
from tests.refusals import refused
from tests.results.runs import I, J, K, factors, make_spec, store_run
from tests.results.writer import killed_at, start, state_of, write_until_killed
from tests.tiers import FULL

KILLS = 10 if FULL else 4


def _check(path):
    """Everything that the store vouches for is there, bit for bit; returns how many draws."""
    plain, tree = xr.open_datatree(path, engine="zarr"), open_run(path)
    with RunStore.open(path) as store:
        (draws,) = store.committed.draws
        if draws:
            arrays, meta = store.load_checkpoint()
            assert meta["draws"] == draws
            for name, expected in state_of(draws).items():
                assert arrays[name].tobytes() == expected.tobytes()
    W, Ht = factors(0, 0, draws)
    for found in (tree["posterior"], plain["posterior"].isel(draw=slice(draws))):
        assert found["W"].values.tobytes() == W[None].tobytes()
        assert_array_equal(found["H"][0], Ht.transpose(0, 2, 1))
        assert found["draw"].values.tolist() == list(range(draws))
    assert_array_equal(tree["sample_stats"]["lp"][0], np.arange(draws) + 0.5)
    if "posterior_moments" in tree.children:
        count = int(tree["posterior_moments"]["count"][0])
        assert count in (draws, draws + 3)
        assert_array_equal(tree["posterior_moments"]["W_mean"], factors(1, count, 1)[0])
    return draws


def test_a_run_killed_at_random_instants_loses_no_committed_draw(tmp_path):
    path = tmp_path / "run.zarr"
    RunStore.create(path, RunSpec(shape=(I, J, K), chains=1, draws=9)).close()
    rng, seen = np.random.default_rng(0), [0]
    for _ in range(KILLS):
        process, pipe = start(write_until_killed, str(path))
        assert pipe.recv() == "ready"
        time.sleep(rng.uniform(0.0, 0.3))  # not a wait: the instant of death
        process.kill()
        process.join()
        assert process.exitcode == -9
        seen.append(_check(path))
    assert seen == sorted(seen)
    assert seen[-1] > 9
    assert not list(path.rglob("*.partial"))


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_cut_short_at_any_file_is_the_old_one_or_the_new_one(tmp_path, before):
    path, outcomes = store_run(tmp_path / "run.zarr", make_spec(chains=1), draws=2), []
    with RunStore.open(path) as store:
        store.checkpoint({"a": np.full(3, 2.0)}, {"draws": 2, "turn": 0})
    while 1 not in outcomes:
        with RunStore.open(path) as store, killed_at(len(outcomes), before):
            store.write_draws(0, 2, *factors(0, 2, 2))
            store.checkpoint({"a": np.full(5_000, 4.0)}, {"draws": 4, "turn": 1})
        with RunStore.open(path) as store:
            kept, meta = store.load_checkpoint()
            arrays, (draws,) = dict(kept), store.committed.draws
        turn = meta["turn"]
        assert draws == (2, 4)[turn]
        assert_array_equal(arrays["a"], np.full((3, 5_000)[turn], 2.0 + 2 * turn))
        assert_array_equal(open_run(path)["posterior"]["W"][0], factors(0, 0, draws)[0])
        outcomes.append(turn)
    assert 3 < len(outcomes) < 40


V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype("f4")
RUNS = {
    "tweedie": (dfac.TweedieNMF(2), dfac.PSGLD(step=dfac.ConstantStep(0.001))),
    "gaussian": (dfac.GaussianMF(2), None),
}
OF_THE_MOMENT = {"sampling_time", "utilisation", "created_at", "trace_id"}


@pytest.mark.quick("tweedie")
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_killed_before_it_was_closed_is_closed_by_resume(tmp_path, monkeypatch, kind):
    options = {"draws": 6, "tune": 4, "random_seed": 1, "progressbar": False}
    whole = dfac.sample(V, *RUNS[kind], store=tmp_path / "whole.zarr", **options)
    path = tmp_path / "run.zarr"

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "finish", Mock(side_effect=KeyboardInterrupt))
        refused(KeyboardInterrupt, None, dfac.sample, V, *RUNS[kind], store=path, **options)
    assert "divergences" not in dfac.open_run(path).attrs
    found = dfac.resume(path, progressbar=False)
    assert found.attrs.keys() == whole.attrs.keys()
    for name in whole.attrs.keys() - OF_THE_MOMENT:
        assert found.attrs[name] == whole.attrs[name], name
    for name, values in whole["constant_data"].data_vars.items():
        assert_array_equal(found["constant_data"][name], values)
    assert dfac.resume(path, progressbar=False).attrs == found.attrs


def test_reading_and_resuming_do_not_wait_for_a_cluster_without_workers(tmp_path):
    distributed = pytest.importorskip("distributed")
    path, cells = tmp_path / "run.zarr", (np.array([1, 2]), np.array([0, 3]))
    options = {"draws": 3, "tune": 2, "random_seed": 1, "progressbar": False}
    dfac.sample(V, dfac.TweedieNMF(2), store=path, monitor=cells, **options)
    none = {"n_workers": 0, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**none) as cluster, distributed.Client(cluster):
        assert dfac.open_run(path)["posterior"].sizes["draw"] == 3
        assert dfac.resume(path, draws=2, progressbar=False)["posterior"].sizes["draw"] == 5
        assert dfac.align(path)["alignment/permutation"].sizes["draw"] == 5
        assert dfac.summarize(path, cells=2).attrs["draws"] == 5
        assert dfac.expectation(path, lambda W, H: W).shape == (12, 2)
        assert dfac.top_entries(path, 2)["label"].sizes["rank"] == 2
        assert dfac.monitored(path)["mean"].sizes["cell"] == 2
