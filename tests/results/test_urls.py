"""Runs at URLs: the same store in an object store, which may fail in every way it likes."""

import logging
import os
import pickle
import random
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from numpy.testing import assert_array_equal

from daskfactor import urls
from daskfactor.data import icechunks
from daskfactor.data.icechunks import icechunk_storage
from daskfactor.errors import OptionError, StoreError
from daskfactor.runs import repository, zarr_stores
from daskfactor.runs import store as store_module
from daskfactor.runs.backends import ZarrView
from daskfactor.runs.store import RunStore
from daskfactor.runs.trace import open_run
from tests.object_store import SECRETS, slow
from tests.refusals import refused
from tests.results.runs import (
    DRAWS,
    assert_same_tree,
    create_store,
    factors,
    fill,
    make_spec,
    memory_tree,
    stats,
)
from tests.results.writer import SERVER, start, take
from tests.tiers import tiered

pytest.importorskip("icechunk", reason="runs at URLs need the extra cloud")


@pytest.fixture
def place(s3, tmp_path):
    return s3.url(tmp_path.name)


@pytest.fixture(params=tiered(["memory", "s3"], "memory".__eq__))
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    return request.getfixturevalue("place")


TAKEN_OVER = "another process has taken this run over"


def write(store, start, n, chains=(0, 1)):
    for chain in chains:
        store.write_draws(chain, start, *factors(chain, start, n))
        store.write_stats(chain, start, stats(chain, start, n))


def put(store, start, n):
    """Write draws and commit them."""
    write(store, start, n)
    store.checkpoint({}, {"draws": start + n})


def holds(url, draws):
    """Check that a run has so many draws, and the right ones."""
    for chain in (0, 1):
        assert_array_equal(open_run(url)["posterior"]["W"][chain], factors(chain, 0, draws)[0])


@pytest.mark.parametrize("url", ["s3", "memory"], indirect=True)
def test_a_url_gives_back_the_tree_of_the_same_run_in_memory(url):
    spec = make_spec(has_coarse=True, observed=np.arange(35.0).reshape(7, 5))
    with create_store(url, spec) as store:
        fill(store, spec)
        store.finish({"sampling_time": 1.5})
    tree, expected = open_run(url), memory_tree(spec)
    assert_same_tree(tree, expected)
    assert tree.attrs == expected.attrs | {"sampling_time": 1.5}


def test_a_checkpoint_comes_back_bit_for_bit_in_pieces(url, monkeypatch):
    monkeypatch.setattr(zarr_stores, "PIECE", 1000)
    lasting = {"kept": np.arange(3.0)}
    arrays = {"a/b": np.random.default_rng(0).random((40, 30)), "none": np.zeros((0, 3))}
    arrays["n"] = np.array(7, "u8")
    with create_store(url, make_spec(), state=(lasting, {"draws": 0})) as store:
        for turn in range(3):
            store.checkpoint(arrays, {"draws": 0, "turn": turn})
    with RunStore.open(url) as store:
        opened, meta = store.load_checkpoint()
        found = dict(opened)
    assert (meta["turn"], found.keys()) == (2, (arrays | lasting).keys())
    assert all(found[name].tobytes() == own.tobytes() for name, own in (arrays | lasting).items())


def test_every_checkpoint_can_be_opened_and_nothing_between_them_is_seen(url, tmp_path):
    ids = []
    with create_store(url, make_spec()) as store:
        for start in (0, 4):
            write(store, start, 4)
            assert open_run(url)["posterior"].sizes["draw"] == start
            store.checkpoint({}, {"draws": start + 4})
            ids.append(store._place._session.snapshot_id)
        write(store, 8, 2)
        store.extend(np.arange(DRAWS + 5))
        for draws, snapshot in zip((4, 8), ids, strict=True):
            tree = open_run(url, snapshot=snapshot)
            assert_array_equal(tree["posterior"]["W"][1], factors(1, 0, draws)[0])
    match = rf"no snapshot 'nine'; its latest .*{ids[1]} \(draws"
    refused(OptionError, match, open_run, url, snapshot="nine")
    local, match = tmp_path / "run.zarr", "snapshots are kept of runs in object stores"
    refused(OptionError, match, open_run, local, snapshot="one")
    with RunStore.open(url) as store:
        assert (store.draws, store.committed.draws) == (DRAWS + 5, (8, 8))
        put(store, 8, 6)
    holds(url, 14)


def test_a_run_is_replaced_by_the_first_commit_of_the_new_one(url):
    with create_store(url, make_spec()) as store:
        put(store, 0, 3)
    match = r"draws per chain: 3, 3 of 10.*overwrite.*resume"
    refused(StoreError, match, create_store, url, make_spec())
    new = make_spec(chains=1)
    state = {"kept": np.arange(3.0)}, {"draws": 0}
    store = create_store(url, new, overwrite=True, state=state)
    write(store, 0, 2, chains=(0,))
    store.__exit__(ValueError, ValueError("broken"), None)
    holds(url, 3)
    with create_store(url, new, overwrite=True, state=state) as store:
        write(store, 0, 2, chains=(0,))
        assert not store.checkpoints.shared  # others would write into the old run
        assert store.tree()["sample_stats"].sizes["chain"] == 1
        holds(url, 3)
        store.checkpoint({}, {"draws": 2})
        assert open_run(url)["posterior"].sizes == {**open_run(url)["posterior"].sizes, "draw": 2}
        assert store.load_checkpoint()[0]["kept"].tolist() == [0, 1, 2]
    tree = open_run(url)
    assert tree["sample_stats"].sizes["chain"] == 1
    assert_array_equal(tree["posterior"]["W"][0], factors(0, 0, 2)[0])


def test_a_run_that_fails_leaves_its_place_free_or_to_one_that_went_on_meanwhile(url):
    with pytest.raises(ValueError, match="broken"), create_store(url, make_spec()):
        raise ValueError("broken")
    refused(StoreError, "there is no run store", open_run, url)
    store = create_store(url, make_spec())
    with RunStore.open(url) as other:
        put(other, 0, 2)
    store.__exit__(ValueError, ValueError("broken"), None)
    holds(url, 2)


def test_of_two_runs_that_begin_at_one_url_the_first_commit_wins(url):
    skeleton = store_module.write_skeleton

    def late(place, spec):
        patch.undo()
        create_store(url, make_spec(chains=1)).close()
        skeleton(place, spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "write_skeleton", late)
        refused(StoreError, TAKEN_OVER, create_store, url, make_spec())
    assert open_run(url)["sample_stats"].sizes["chain"] == 1


def create_and_wait(url, pipe):
    create_store(url, make_spec())
    pipe.send("open")
    pipe.recv()


def test_a_writer_that_was_killed_is_followed_at_once(place):
    process, pipe = start(create_and_wait, place)
    assert pipe.recv() == "open"
    process.kill()
    process.join()
    with RunStore.open(place) as store:
        put(store, 0, 2)
    holds(place, 2)


@pytest.mark.parametrize("commit", ["checkpoint", "extend", "finish"])
def test_of_two_writers_the_first_commit_wins_and_the_other_harms_nobody(url, commit):
    with create_store(url, make_spec()) as first, RunStore.open(url) as second:
        write(first, 0, 4)
        put(second, 0, 1)
        late = {
            "checkpoint": lambda: first.checkpoint({"a": np.ones(3)}, {"draws": 4}),
            "extend": lambda: first.extend(np.arange(DRAWS + 1)),
            "finish": lambda: first.finish({"winner": 1}),
        }
        refused(StoreError, TAKEN_OVER, late[commit])
        holds(url, 1)
        put(second, 1, 1)
        first.close()
        put(second, 2, 1)
    holds(url, 3)
    tree = open_run(url)
    assert ("winner" in tree.attrs, tree["posterior"]["W"].shape[1]) == (False, 3)
    with RunStore.open(url) as store:
        assert store.draws == DRAWS


@pytest.mark.full
def test_errors_at_random_and_slowness_change_nothing(s3, place):
    rng, spec = random.Random(0), make_spec()
    answers = [None] * 8 + [(500, "InternalError"), (503, "SlowDown")]
    with s3.failing(lambda environ: rng.choice(answers)):
        with create_store(place, spec) as store:
            fill(store, spec, draws=6)
        holds(place, 6)
    with s3.failing(slow(0.02)), RunStore.open(place) as store:
        put(store, 6, 1)
    holds(place, 7)


def test_a_server_that_goes_and_comes_back_is_waited_for(s3, place, caplog, monkeypatch):
    monkeypatch.setattr(urls, "FIRST_WARNING", 0.2)
    with create_store(place, make_spec()) as store, caplog.at_level(logging.WARNING):
        write(store, 0, 2)
        back = s3.away(0.7)
        store.checkpoint({}, {"draws": 2})
        back.join()
    assert "no answer yet; waiting up to" in caplog.text
    holds(place, 2)


class Blind(zarr.storage.MemoryStore):
    """Gives none of what it could not look for, as Icechunk does, and then fails or finds it."""

    sees = False

    async def get(self, key, prototype, byte_range=None):
        return await super().get(key, prototype, byte_range) if self.sees else None

    async def exists(self, key):
        if self.refused:
            raise PermissionError("Forbidden")
        self.sees = True
        return await super().exists(key)


@pytest.mark.parametrize("denied", [True, False])
def test_a_document_that_could_not_be_looked_for_is_not_taken_for_none(denied):
    store = Blind()
    store.refused = denied
    zarr.create_group(store)
    store.sees = False
    view = ZarrView("s3://bucket/run", zarr_stores.PatientStore(store, "s3://bucket/run"))
    if denied:
        refused(StoreError, "the credentials are refused", view.exists)
    else:
        assert view.exists()


FAULTS = {
    (400, "ExpiredToken"): "the credentials have expired; renew them",
    (403, "AccessDenied"): "the credentials are refused; check",
    (500, "InternalError"): "cannot be used for [0-9] seconds",
    (404, "NoSuchBucket"): "no such bucket; create it",
}


@pytest.mark.parametrize(
    ("fault", "says"), tiered(FAULTS.items(), lambda own: own[0][0] in (400, 500))
)
def test_a_store_that_keeps_refusing_stops_the_run(s3, place, monkeypatch, caplog, fault, says):
    monkeypatch.setenv("DASKFACTOR_STORE_PATIENCE", "0.4")
    with create_store(place, make_spec()) as store:
        put(store, 0, 2)
        with s3.failing(lambda environ: fault):
            with pytest.raises(StoreError, match=says) as caught:
                put(store, 2, 2)
            told = str(caught.value)
            assert "the last checkpoint is safe (draws per chain: 2, 2)" in told
            assert "resume the run" in told
            assert not any(secret in told + caplog.text for secret in SECRETS.values())
            assert caught.value.__suppress_context__
            store.close()
            refused(StoreError, says, open_run, place)
    holds(place, 2)
    with RunStore.open(place) as store:
        put(store, 2, 1)
    holds(place, 3)


def test_a_commit_whose_answer_was_lost_counts_once(s3, place):
    lost = []

    def fault(environ):
        """Do what is asked of the branch, and say that it failed."""
        if environ["REQUEST_METHOD"] == "PUT" and "ref.json" in environ["PATH_INFO"] and not lost:
            lost.append(environ["PATH_INFO"])
            list(s3._app(environ, lambda *answer: None))
            environ["CONTENT_LENGTH"] = "0"  # it has been read
            return 500, "InternalError"
        return None

    with create_store(place, make_spec()) as store:
        with s3.failing(fault):
            put(store, 0, 2)
        put(store, 2, 2)
    assert lost
    holds(place, 4)


def test_what_is_missing_is_said_at_once(place, monkeypatch):
    create, match = partial(create_store, spec=make_spec()), "there is no such bucket; create it"
    for opener in (open_run, create):
        refused(StoreError, f"{match} or check the URL", opener, "s3://nowhere/run")
    with monkeypatch.context() as patch:
        for name in SECRETS:
            patch.delenv(name)
        refused(StoreError, "no credentials in the environment; set them", open_run, place)
    monkeypatch.setitem(sys.modules, "icechunk", None)
    for opener in (open_run, RunStore.open, create):
        refused(StoreError, r"pip install 'daskfactor\[cloud\]'", opener, place)


def test_urls_that_cannot_be_used_are_refused(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for url, says in (
        ("ftp://host/run", "written to a local path or to s3://"),
        ("s3://key:secret@bucket/run", "leave them out"),
        ("az://box/run?sig=secret", "with a query"),
        ("s3:/bucket/run", "pass a URL as text"),
        ("az://box/run", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3:///run", "names no bucket"),
    ):
        assert "secret" not in refused(StoreError, says, create_store, url, make_spec())
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "ours")
    for other in ("gs://box/run", "az://box/run", "abfs://box@theirs.dfs.core.windows.net/run"):
        assert "run" in repr(icechunk_storage(other))


def test_nothing_secret_is_stored_or_pickled(s3, place):
    diagnosis = urls.classify_error(RuntimeError("x broken\n  |-> first\n  `-> no such key"))
    assert (diagnosis.reason, diagnosis.is_permanent) == ("it says: no such key", False)
    spec = make_spec()
    with create_store(place, spec) as store:
        fill(store, spec)
        sent = pickle.dumps(store.checkpoints.writer())
    sent += pickle.dumps(open_run(place)["posterior"]["W"].data)
    stored = b"".join(name.encode() + own for name, own in s3.objects(place).items())
    assert len(stored) > 10_000
    assert not any(secret.encode() in stored + sent for secret in SECRETS.values())


def write_half(part, chain):
    W, Ht = factors(chain, 0, 4)
    part.write("posterior/W", (chain, slice(0, 4)), W)
    return part.write("posterior/H", (chain, slice(0, 4)), np.swapaxes(Ht, 1, 2))


def test_a_checkpoint_sends_what_there_is_and_memory_sends_nothing(s3, place):
    with create_store(place, make_spec()) as store:
        before = sum(map(len, s3.objects(place).values()))
        store.checkpoint({"a": np.arange(1000.0)}, {"draws": 0})
        assert 8000 < sum(map(len, s3.objects(place).values())) - before < 30_000
    with create_store("memory://alone", make_spec()) as store:
        refused(StoreError, "memory of this process", store.checkpoints.writer)


@pytest.mark.parametrize("kind", ["path", "s3"])
def test_two_processes_write_disjoint_chunks_of_one_checkpoint(s3, tmp_path, kind):
    where = str(tmp_path / "run.zarr") if kind == "path" else s3.url(tmp_path.name)
    environment = (dict(os.environ),)
    with create_store(where, make_spec()) as store, SERVER.Pool(2, take, environment) as pool:
        for chain in (0, 1):
            store.write_stats(chain, 0, stats(chain, 0, 4))
        parts = pool.starmap(write_half, [(store.checkpoints.writer(), chain) for chain in (0, 1)])
        assert len(pickle.dumps(parts[0])) < 4096
        assert open_run(where)["posterior"].sizes["draw"] == 0
        store.checkpoints.add_parts(parts)
        store.checkpoint({"a": np.arange(3)}, {"draws": 4})
        put(store, 4, 2)
    holds(where, 6)
    for chain, lp in enumerate(open_run(where)["sample_stats"]["lp"]):
        assert_array_equal(lp, stats(chain, 0, 6)["lp"])


WAITS = {
    "memory://clock": [(10, 0.1), (10, 1.2), (10, 1.2), (40, 0.0), (10, 0.0)],
    "run.zarr": [(0, 0.6), (0, 0.6), (20, 0.05), (0, 0.05)],
}


@pytest.mark.parametrize("where", WAITS)
def test_checkpoints_are_due_by_time_and_by_what_they_cost(tmp_path, monkeypatch, where):
    now = 0.0
    monkeypatch.setattr("daskfactor.runs.files.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.chdir(tmp_path)
    with create_store(where, make_spec()) as store:
        for wait, cost in WAITS[where]:
            if wait:
                now += wait - 0.1
                assert not store.checkpoints.is_due()
                now += 0.2
            assert store.checkpoints.is_due()
            assert store.checkpoints.is_due()
            now += cost  # until all is written
            store.checkpoint({}, {"draws": 0})


def commit_draws(store, start, stop):
    """Write draws one by one, each with a checkpoint of the same size."""
    for draw in range(start, stop):
        write(store, draw, 1, chains=(0,))
        state = {"state": np.random.default_rng(draw).random(2000)}
        store.checkpoint(state, {"draws": draw + 1})


def growing_spec(draws):
    return make_spec(chains=1, draws=draws, draw_index=np.arange(draws))


def test_what_old_commits_hold_does_not_pile_up(tmp_path, monkeypatch):
    """40 checkpoints, each with a state of 16 kB, take what one takes and some 10 kB of history."""
    url, folder = f"memory://{tmp_path.name}", tmp_path / "repository"
    storage = pytest.importorskip("icechunk").local_filesystem_storage(str(folder))
    monkeypatch.setitem(icechunks._IN_MEMORY, url, storage)
    monkeypatch.setattr(repository, "GRACE", 0.0)
    most = repository.KEEP_COMMITS + repository.EXPIRES_EVERY

    def size():
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    with create_store(url, growing_spec(40)) as store:
        write(store, 0, 40, chains=(0,))
        commit_draws(store, 0, 1)
        of_one = size()
        for start in range(0, 40, 5):
            commit_draws(store, start, start + 5)
            assert size() < (most + 2) * 30_000
    assert size() < 2 * of_one
    commits = list(icechunks.repository_at(url).ancestry(branch="main"))
    assert len(commits) == repository.KEEP_COMMITS + 1  # with the repository's own first
    assert_array_equal(open_run(url)["posterior"]["W"].values[0], factors(0, 0, 40)[0])


@pytest.mark.full
def test_readers_have_a_while_before_what_they_opened_expires(place, monkeypatch):
    monkeypatch.setenv(urls.PATIENCE, "60")
    with create_store(place, growing_spec(20)) as store:
        commit_draws(store, 0, 3)
        early = open_run(place)
        commit_draws(store, 3, 20)
        assert_array_equal(early["posterior"]["W"].values[0], factors(0, 0, 3)[0])
        late = open_run(place)
    assert_array_equal(late["sample_stats"]["lp"].values[0], stats(0, 0, 20)["lp"])
    begun, match = time.monotonic(), "earlier commit, which has expired; open the run again"
    refused(StoreError, match, early["sample_stats"]["lp"].load)
    assert time.monotonic() - begun < 30  # nothing comes back, so that nobody waits for it
    assert open_run(place)["posterior"].sizes["draw"] == 20


def test_a_run_goes_on_where_old_commits_cannot_be_expired(monkeypatch, tmp_path, caplog):
    async def refuse(self, grace):
        raise StoreError("not today")

    monkeypatch.setattr(repository.RepositoryBackend, "_drop_old", refuse)
    url = f"memory://{tmp_path.name}"
    with create_store(url, growing_spec(10)) as store:
        commit_draws(store, 0, 10)
    assert "could not expire old commits: not today" in caplog.text
    assert open_run(url)["posterior"].sizes["draw"] == 10
