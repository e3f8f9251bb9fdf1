"""Runs of particles: what is written, when it exists, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.store import RunStore
from daskfactor.runs.trace import open_run
from tests.refusals import refused
from tests.results import particle_tree as particles
from tests.results.particle_tree import KERNEL, WEIGHTS, M, particle_factors
from tests.results.runs import create_store, make_spec, store_run, validate


def weighing(count=M, **changes):
    values = {"weight": WEIGHTS, "lp": np.zeros(count), "stein_matrix": np.eye(count)}
    return values | {"discrepancy": 1.0, "discrepancy_equal": 2.0, "attrs": KERNEL} | changes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.zarr"


def create(path, done, **changes):
    """A store, or a run in memory, with some finished particles."""
    W, H = particle_factors()
    spec = particles.particle_spec(W, H)
    spec = replace(spec, attrs=spec.attrs | changes)
    store = Sink(spec) if path is None else create_store(path, spec)
    particles.fill_particles(store, W, H, done=done)
    return store


@pytest.mark.parametrize("silf", [True, False])
def test_a_finished_store_is_the_tree_in_memory(path, silf):
    found = particles.particle_store(path, silf=silf, at_once=1)
    expected = particles.particle_tree(silf=silf)
    for tree in (found, expected):
        validate(tree)
    xr.testing.assert_identical(found.load(), expected)
    assert KERNEL.items() <= found["stein"].attrs.items()
    statistics = {"lp", "weight", "seconds", "n_iter"} | ({"objective"} if silf else set())
    assert set(found["sample_stats"].data_vars) == statistics
    constants = {"threshold"} if silf else {"dispersion", "rate_w", "rate_h"}
    assert set(found["constant_data"].data_vars) == constants
    assert "posterior_moments" not in found.children
    assert not (path / "posterior_moments").exists()
    assert "dispersion" not in found.attrs or not silf


def test_an_unfinished_store_has_the_finished_particles_without_weights(path):
    found = particles.particle_store(path, done=4, at_once=1)
    validate(found)
    W, H = particle_factors()
    assert_array_equal(found["posterior/W"].values[0], W[:4])
    assert_array_equal(found["posterior/H"].values[0], H[:4])
    assert set(found["sample_stats"].data_vars) == {"objective", "seconds", "n_iter"}
    assert found["sample_stats/n_iter"].values.tolist() == [[100, 101, 102, 103]]
    assert "stein" not in found.children


@pytest.mark.parametrize(("again", "dies_at"), [(False, 1), (True, 0), (True, 1)])
def test_a_kill_while_weights_are_written_leaves_all_or_none(path, monkeypatch, again, dies_at):
    calls, whole = [], RunStore._describe_group

    def describe(self, group, attrs):
        if len(calls) == dies_at:
            raise OSError(28, "No space left on device")
        calls.append(attrs)
        whole(self, group, attrs)

    with create(path, M) as store:
        if again:
            store.write_weights(**weighing())
        with monkeypatch.context() as patch:
            patch.setattr(RunStore, "_describe_group", describe)
            other = weighing(weight=np.eye(M)[1], discrepancy=3.0)
            refused(StoreError, "weights of particles", store.write_weights, **other)
    # Before anything was marked as unfinished, what was there still counts.
    kept, found = again and dies_at == 0, open_run(path)
    validate(found)
    assert ("stein" in found.children) is kept
    assert ("weight" in found["sample_stats"].data_vars) is kept
    if kept:
        assert float(found["stein/discrepancy"]) == 1.0
        assert_array_equal(found["sample_stats/weight"].values[0], WEIGHTS)
    with RunStore.open(path) as store:
        store.write_weights(**weighing(discrepancy=4.0))
    assert float(open_run(path)["stein/discrepancy"]) == 4.0


def test_a_run_of_particles_goes_on_after_a_kill(path):
    create(path, 3).close()
    with RunStore.open(path) as store:
        assert store.committed.draws == (3,)
        assert (store.chains, store.draws, store.cells) == (1, M, None)
        particles.fill_particles(store, *particle_factors())
        store.finish({"threshold": 8.0})
    found = open_run(path)
    assert float(found["constant_data/threshold"]) == found.attrs["threshold"] == 8.0
    assert_array_equal(found["posterior/W"].values[0], particle_factors()[0])


def test_weights_come_after_all_particles_and_are_masses(path):
    memory, nothing = create(None, M), np.zeros(M - 2)
    with create(path, 4) as store:
        refused(OptionError, "only 4 of 6 particles", store.write_weights, **weighing())
        particles.fill_particles(store, *particle_factors(), done=M)
        for weight, match in (
            (np.full(M, 0.5), "add up to 1"),
            (np.r_[1.5, -0.5, nothing], "at least 0"),
            (np.r_[np.nan, 1.0, nothing], "at least 0"),
        ):
            for own in (store, memory):
                refused(StoreFormatError, match, own.write_weights, **weighing(weight=weight))
    for found in (open_run(path), memory.tree()):
        assert "stein" not in found.children


def test_constants_that_are_not_the_models_stay_attributes_and_other_runs_have_no_weights(path):
    create(path, None, dispersion=1.0).close()
    for found in (open_run(path), create(None, None, dispersion=1.0).tree()):
        assert set(found["constant_data"].data_vars) == {"threshold"}
        assert found.attrs["dispersion"] == 1.0
    path, spec = path.with_name("other.zarr"), make_spec(chains=1)
    with RunStore.open(store_run(path, spec)) as store:
        ten, match = weighing(10, weight=np.full(10, 0.1)), "has no stein/stein_matrix"
        refused(StoreError, match, store.write_weights, **ten)
    assert "weight" not in open_run(path)["sample_stats"].data_vars
    assert "threshold" not in open_run(path)["constant_data"].data_vars
    match, write = "has no sample_stats/weight", Sink(spec).write_stats
    refused(StoreError, match, write, 0, 0, {"weight": [0.1]})
