"""What a killed run lacks is made up for by `resume`, whatever else is about."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import daskfactor as dfac
from daskfactor.results.store import RunStore

V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype("f4")
RUNS = {
    "tweedie": (dfac.TweedieNMF(2), dfac.PSGLD(step=dfac.ConstantStep(0.001))),
    "gaussian": (dfac.GaussianMF(2), None),
}
OF_THE_MOMENT = {"sampling_time", "utilisation", "created_at", "trace_id"}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_killed_before_it_was_closed_is_closed_by_resume(tmp_path, monkeypatch, kind):
    model, sampler = RUNS[kind]
    options = {"draws": 6, "tune": 4, "random_seed": 1, "progressbar": False}
    whole = dfac.sample(V, model, sampler, store=tmp_path / "whole.zarr", **options)

    def die(self, attrs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "finish", die)
        with pytest.raises(Killed):
            dfac.sample(V, model, sampler, store=tmp_path / "run.zarr", **options)
    assert "divergences" not in dfac.open_run(tmp_path / "run.zarr").attrs
    found = dfac.resume(tmp_path / "run.zarr", progressbar=False)
    assert found.attrs.keys() == whole.attrs.keys()
    for name in whole.attrs.keys() - OF_THE_MOMENT:
        assert found.attrs[name] == whole.attrs[name], name
    for name, values in whole["constant_data"].data_vars.items():
        assert_array_equal(found["constant_data"][name], values)
    again = dfac.resume(tmp_path / "run.zarr", progressbar=False)
    assert again.attrs == found.attrs


def test_reading_and_resuming_do_not_wait_for_a_cluster_without_workers(tmp_path):
    distributed = pytest.importorskip("distributed")
    path = tmp_path / "run.zarr"
    cells = (np.array([1, 2]), np.array([0, 3]))
    options = {"draws": 3, "tune": 2, "random_seed": 1, "progressbar": False}
    dfac.sample(V, dfac.TweedieNMF(2), store=path, monitor=cells, **options)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster),
    ):
        assert dfac.open_run(path)["posterior"].sizes["draw"] == 3
        assert dfac.resume(path, draws=2, progressbar=False)["posterior"].sizes["draw"] == 5
        aligned = dfac.align(path)["alignment"]
        assert aligned["permutation"].sizes["draw"] == 5
        assert dfac.summarize(path, cells=2).attrs["draws"] == 5
        assert dfac.expectation(path, lambda W, H: W).shape == (12, 2)
        assert dfac.top_entries(path, 2)["label"].sizes["rank"] == 2
        assert dfac.monitored(path)["mean"].sizes["cell"] == 2
