"""What workers write by themselves: results and checkpoints, without the client in between."""

import json
import shutil
import threading
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pytest
import zarr
from distributed import get_worker

import daskfactor as dfac
from daskfactor.errors import StoreError
from daskfactor.executors.cluster import ClusterExecutor
from daskfactor.executors.remote_state import WorkerStateClient
from daskfactor.executors.store import read_errors
from daskfactor.runs import schema
from daskfactor.runs.backends import LocalBackend
from daskfactor.runs.store import RunStore
from daskfactor.runs.writer import Writer
from daskfactor.runs.zarr_stores import DurableStore
from tests.cluster import dying
from tests.cluster.support import cluster, same
from tests.refusals import refused
from tests.results.runs import create_store, make_spec

pytestmark = pytest.mark.cluster

SAMPLERS = {"one track": dfac.PSGLD(warm_start=4), "two": dfac.PSGRRLD(warm_start=4)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks to a draw, of no whole number of bands."""
    monkeypatch.setattr(schema, "CHUNK_BYTES", 17 * 2 * 4)


def sampled(V=None, **options):
    """A run, of one process if no executor is named."""
    usual = {"draws": 4, "monitor": (np.arange(3), np.arange(3))}
    return dying.sampled(V, **usual | options)


@pytest.mark.quick("ring-True")
@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("name", ["ring", "tasks"])
def test_workers_write_what_the_client_never_sees(name, balance, client, tmp_path, monkeypatch):
    settings = {"monitor": None, "keep": "draws", "blocks": None, "unstored": None}

    def refuse(_, refs, *rest):
        assert not list(refs), "bands went through the client"
        return iter(())

    with dfac.as_blocks(dying.data(), 3, unstored="zero", balance=balance) as data:
        wanted = sampled(data, **settings)
        store = str(tmp_path / "run.zarr")
        with monkeypatch.context() as patch:
            patch.setattr(WorkerStateClient, "fetch", refuse)
            found = sampled(data, executor=name, client=client, store=store, **settings)
        assert found["posterior"]["W"].data.numblocks[2] > 1
        assert same(wanted, found)
        with monkeypatch.context() as patch:
            patch.setattr(WorkerStateClient, "send_part", refuse)  # every worker reads its own
            more = dfac.resume(store, 3, V=data, executor=name, client=client, progressbar=False)
        assert same(sampled(data, **settings | {"draws": 7}), more)


@pytest.mark.full
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_client_writes_where_workers_cannot(kind, here, tmp_path, monkeypatch):
    sampler, runs = SAMPLERS[kind], {}
    for shared in (True, False):
        with monkeypatch.context() as patch:
            if not shared:
                patch.setattr(ClusterExecutor, "can_write", lambda *_: False)
            store = str(tmp_path / f"{shared}.zarr")
            sampled(sampler=sampler, executor="ring", client=here, store=store)
            parts = list((Path(store) / "checkpoint/state").glob("*-*.npz"))
            assert bool(parts) == shared
            place = {"executor": "ring", "client": here, "progressbar": False}
            runs[shared] = dfac.resume(store, 2, V=dying.data(), **place)
    assert same(runs[True], runs[False])
    assert same(sampled(sampler=sampler, draws=6), runs[True])


@pytest.mark.full
def test_a_run_of_workers_goes_on_in_threads(here, tmp_path):
    """Also one that is renamed at its first checkpoint, when it takes the place of another."""
    store = str(tmp_path / "run.zarr")
    sampled(model=dfac.TweedieNMF(1), sampler=None, store=store)
    sampled(executor="ring", client=here, store=store, overwrite=True)
    found = dfac.resume(store, 2, V=dying.data(), executor="threads", progressbar=False)
    assert same(sampled(draws=6), found)


def test_workers_write_chunks_of_one_factor_beside_whole_draws_of_the_other(
    client, tmp_path, monkeypatch
):
    """A draw of W has two chunks, and a chunk of H four draws, which only one may write."""
    monkeypatch.setattr(schema, "CHUNK_BYTES", 400)
    store = str(tmp_path / "run.zarr")
    tall, settings = dying.data()[:, :12], {"monitor": None, "draws": 12}
    writers = {}

    def watched(self, checkpoints, jobs):
        for address, own in jobs.items():
            for piece, *_ in own.get("pieces", ()):
                chunk = zarr.open_array(f"{store}/{piece.path}", mode="r").chunks[1]
                if piece.path.startswith("posterior/"):
                    chain, draw, *rest = piece.region
                    key = piece.path, chain, draw.start // chunk, str(rest)
                    writers.setdefault(key, set()).add(address)
        write_results(self, checkpoints, jobs)

    write_results = WorkerStateClient.write_results
    monkeypatch.setattr(WorkerStateClient, "write_results", watched)
    wanted = sampled(tall, **settings)
    found = sampled(tall, executor="ring", client=client, store=store, **settings)
    assert {len(own) for own in writers.values()} == {1}
    assert found["posterior"]["W"].data.numblocks[1:3] == (12, 2)
    assert found["posterior"]["H"].data.numblocks[1:3] == (3, 1)
    assert same(wanted, found)


def test_parts_of_different_checkpoints_are_never_mixed(here, tmp_path):
    """As a client leaves them that dies between its workers' parts and its own."""
    store, folder = str(tmp_path / "run.zarr"), tmp_path / "run.zarr/checkpoint/state"
    options = {"executor": "ring", "client": here, "progressbar": False}
    sampled(store=store, **options)
    with RunStore.open(store) as held:
        newest = held.load_checkpoint()[1]["cycle"]
    marker = json.loads((folder.parent / "zarr.json").read_text())["attributes"]
    own, others = (marker["slots"][n]["parts"] for n in (marker["newest"], 1 - marker["newest"]))
    assert own
    assert not set(own) & set(others)
    for part, other in zip(own, others, strict=True):
        shutil.copy(folder / f"{other}.npz", folder / f"{part}.npz")
    with RunStore.open(store) as held:
        assert held.load_checkpoint()[1]["cycle"] < newest
    assert same(sampled(), dfac.resume(store, V=dying.data(), **options))


def test_a_full_disk_under_a_worker_is_told(here, tmp_path, monkeypatch):
    store = str(tmp_path / "run.zarr")

    def full(self, name, write):
        if "-" in name:
            raise OSError(28, "No space left on device")
        save(self, name, write)

    save = DurableStore.write_new
    monkeypatch.setattr(DurableStore, "write_new", full)
    with pytest.raises(StoreError, match=r"from the worker \S+ to .*run\.zarr, the disk is full"):
        sampled(executor="ring", client=here, store=store)


@pytest.mark.quick("ring")
@pytest.mark.parametrize("name", ["ring", "tasks"])
def test_a_worker_that_was_given_up_writes_nothing_more(name, tmp_path, monkeypatch):
    """Stopped before it writes moments, it continues when the run without it has written all."""
    gate, late, finish, write = threading.Event(), [], RunStore.finish, Writer.write
    continued = threading.Event()

    def stopped(self, path, region, values):
        mine = path.startswith("posterior_moments/") and not late and is_worker()
        if mine:
            late.append(get_worker().address)
            remove = client.cluster.scheduler.remove_worker
            client.sync(remove, late[0], stimulus_id="given up", close=False, expected=True)
            assert gate.wait(60)
        try:
            return write(self, path, region, values)
        finally:
            if mine:
                continued.set()

    def finished(self, *args):
        gate.set()
        assert continued.wait(60)
        finish(self, *args)

    with cluster(2, processes=False) as client:
        monkeypatch.setattr(Writer, "write", stopped)
        monkeypatch.setattr(RunStore, "finish", finished)
        store = str(tmp_path / "run.zarr")
        found = sampled(executor=name, client=client, store=store, draws=12)
        gate.set()
    assert late
    assert "posterior_moments" in found.children
    assert same(sampled(draws=12), found)


def test_a_worker_of_a_client_that_died_writes_nothing_more(tmp_path):
    store, moments = str(tmp_path / "run.zarr"), "posterior_moments/W_mean"
    sampled(store=store)
    # As a client leaves it that is killed: not closed.
    late = Writer(LocalBackend(Path(store)).fork())
    late.write(moments, 0, dfac.open_run(store)[moments].values[0])
    found = dfac.resume(store, 2, V=dying.data(), executor="serial", progressbar=False)
    refused(FileNotFoundError, None, late.write, moments, 0, 0)
    assert same(sampled(draws=6), found)
    assert not list(Path(store).rglob("*.partial"))


def is_worker():
    try:
        get_worker()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), BadZipFile("cut short")])
def test_a_worker_that_cannot_read_a_checkpoint_is_named_and_is_not_taken_for_lost(error):
    told = r"worker tcp://here .* checkpoint .*; see that it can"
    with pytest.raises(StoreError, match=told), read_errors("tcp://here"):
        raise error


def test_a_place_that_cannot_be_tidied_is_given_free(tmp_path, monkeypatch):
    store = create_store(tmp_path / "run", make_spec())
    place = store.checkpoints._backend
    monkeypatch.setattr(
        place, "discard_forks", lambda: (_ for _ in ()).throw(OSError(30, "read-only"))
    )
    refused(OSError, "read-only", place.close)
    monkeypatch.undo()
    assert not place._lock.is_locked
