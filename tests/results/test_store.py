import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.sparse
import xarray as xr
import zarr
from numpy.testing import assert_array_equal

from daskfactor import convert
from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.runs.files import seal
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import MOMENTS, RunSpec
from daskfactor.runs.store import RunStore
from daskfactor.runs.trace import open_run
from daskfactor.runs.zarr_stores import DurableStore
from tests.refusals import refused
from tests.results import runs
from tests.results.runs import (
    CHAINS,
    DRAWS,
    I,
    K,
    create_store,
    factors,
    fill,
    make_spec,
    store_run,
)
from tests.results.writer import killed_at, open_and_wait, start

pytestmark = pytest.mark.libraries


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.zarr"


def plain(path):
    """The store as xarray opens it."""
    return xr.open_datatree(path, engine="zarr")


@pytest.mark.quick("True-draws", "False-moments")
@pytest.mark.parametrize("keep", ["draws", "moments"])
@pytest.mark.parametrize("observed", [True, False])
def test_a_store_gives_back_the_tree_of_the_same_run_in_memory(path, keep, observed):
    V = np.arange(35.0).reshape(7, 5)
    V[2, 3] = np.nan
    spec = make_spec(keep=keep, has_coarse=keep == "draws", observed=V if observed else None)
    tree = open_run(store_run(path, spec))
    runs.validate(tree)
    runs.assert_same_tree(tree, runs.memory_tree(spec))
    assert (tree.attrs, tree["constant_data"]["dispersion"]) == (runs.memory_tree(spec).attrs, 1.0)


def test_an_empty_store_has_its_plan_nan_and_no_draws(path):
    spec = make_spec(has_coarse=True)
    with create_store(path, spec) as store:
        assert store.committed.draws == (0, 0)
        assert store.tree()["posterior"].sizes["draw"] == 0
    with RunStore.open(path) as found:
        for name in ("chains", "draws", "warmup_draws"):
            assert getattr(found, name) == getattr(spec, name)
        assert_array_equal(found.cells, [spec.monitor_rows, spec.monitor_columns])
        assert {name: found.attrs[name] for name in spec.attrs} == spec.attrs
    posterior = plain(path)["posterior"].to_dataset()
    assert posterior["W"].shape == (CHAINS, DRAWS, I, K)
    assert bool(posterior["W"].isnull().all())
    assert posterior["draw"].values.tolist() == spec.cycles.tolist()
    labels = spec.labels.reset_coords("weight").set_coords("weight")
    xr.testing.assert_equal(posterior[["gene", "day", "weight"]], labels)
    assert "posterior_moments" not in open_run(path).children


def test_draws_exist_only_once_committed(path):
    with RunStore.open(store_run(path, draws=4)) as store:
        for chain in range(CHAINS):
            store.write_draws(chain, 4, *factors(chain, 4, 3))
            store.write_stats(chain, 4, runs.stats(chain, 4, 3))
        assert open_run(path)["posterior"].sizes["draw"] == 4
        store.checkpoint({}, {"draws": 7})
    tree = open_run(path)
    assert tree["posterior"].sizes["draw"] == 7
    for chain in range(CHAINS):
        assert_array_equal(tree["posterior"]["W"][chain], factors(chain, 0, 7)[0])
        assert_array_equal(tree["sample_stats"]["lp"][chain], runs.stats(chain, 0, 7)["lp"])
    assert np.isnan(plain(path)["posterior"]["W"][:, 7:]).all()


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_chunks_that_do_not_match_the_writes_change_nothing(path, size, monkeypatch):
    """And the writer may reuse its arrays."""
    monkeypatch.setattr("daskfactor.runs.schema.CHUNK_BYTES", 4 * I * K * 4)
    with create_store(path, make_spec()) as store:
        assert zarr.open_array(path, path="posterior/W", mode="r").chunks[1] == 4
        for start in range(0, DRAWS, size):
            n = min(size, DRAWS - start)
            W, Ht = factors(1, start, n)
            store.write_draws(1, start, W, Ht)
            W[:], Ht[:] = -1, -1
            store.checkpoint({}, {"draws": [0, start + n]})
    posterior = open_run(path)["posterior"]
    assert posterior["chain"].values.tolist() == [1]
    W, Ht = factors(1, 0, DRAWS)
    assert_array_equal(posterior["W"][0], W)
    assert_array_equal(posterior["H"][0], Ht.transpose(0, 2, 1))


def test_chains_of_different_lengths_give_the_largest_rectangle(tmp_path):
    cases = ([10, 10], 10, [0, 1]), ([10, 3], 10, [0]), ([6, 4], 4, [0, 1]), ([0, 7], 7, [1])
    for draws, length, chains in cases:
        with RunStore.open(store_run(tmp_path / f"{draws}.zarr")) as store:
            store.checkpoint({}, {"draws": draws})
            tree = store.tree()
        assert tree["posterior"].sizes["draw"] == length
        for group in ("posterior", "sample_stats", "monitor"):
            assert tree[group]["chain"].values.tolist() == chains


def test_checkpoints_come_back_bit_for_bit_and_may_grow_and_shrink(path):
    rng = np.random.default_rng(0)
    arrays = {
        "W": np.array([[np.nan, -0.0], [np.inf, 1e-40]], dtype="f4"),
        "empty": np.zeros((0, 3)),
        "scalar": np.array(7, dtype="u8"),
        "strided": np.arange(12.0).reshape(3, 4).T,
        "flags": np.array([True, False]),
    }
    meta = {"draws": 0, "cycle": np.int64(12), "key": [1, 2**63], "step": 0.1, "none": None}
    with create_store(path, make_spec()) as store:
        for size in (10, 5_000, 40_000, 7):
            more = {"a": rng.random(size), "b": rng.random(size // 2)}
            store.checkpoint(more, {"draws": 0, "size": size})
            found, told = store.load_checkpoint()
            assert told["size"] == size
            assert all(found[name].tobytes() == own.tobytes() for name, own in more.items())
        store.checkpoint(arrays, meta)
    with RunStore.open(path) as store:
        kept, told = store.load_checkpoint()
        found = dict(kept)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    assert told == {**meta, "cycle": 12}


def test_attributes_are_what_json_makes_of_them(path, tmp_path):
    given = {"number": np.float32(0.5), "array": np.arange(2), "tuple": (1, np.bool_(True))}
    kept = {"number": 0.5, "array": [0, 1], "tuple": [1, True]}
    given |= {"dict": {"c": None}, "keys": {1: "a", None: "b", False: "c"}}
    kept |= {"dict": {"c": None}, "keys": {"1": "a", "null": "b", "false": "c"}}
    spec = make_spec(attrs=given)
    for found in (open_run(store_run(path, spec)), runs.memory_tree(spec)):
        assert {name: found.attrs[name] for name in kept} == kept
    other, keys = tmp_path / "other.zarr", "keys must be"
    with create_store(other, make_spec()) as store:
        for value, match in (({(1, 2): 3}, keys), ({np.int64(1): 3}, keys), ({1}, "holds a set")):
            text = f"must be text, numbers.*{match}"
            refused(OptionError, text, store.update_attrs, {"more": value})
            refused(OptionError, match, store.checkpoint, {}, {"draws": 0, "more": value})
    assert "more" not in open_run(other).attrs


def flip(file, at):
    """Change one bit of a file, and return what is there now."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 4
    file.write_bytes(raw)
    return bytes(raw)


def cut(file, at):
    file.write_bytes(file.read_bytes()[:at])


def remove(file, _):
    file.unlink()


def archives(path):
    """The archives of the two slots of the marker."""
    marker = json.loads((path / "checkpoint" / "zarr.json").read_text())["attributes"]
    return [path / "checkpoint/state" / f"{slot['archive']}.npz" for slot in marker["slots"]]


@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_damage_in_the_newest_checkpoint_falls_back_to_the_older(path, damage):
    with create_store(path, make_spec()) as store:
        fill(store, make_spec(), draws=2)
        store.checkpoint({"a": np.arange(9)}, {"draws": 2, "turn": 0})
        store.checkpoint({"a": np.arange(9) + 1}, {"draws": 3, "turn": 1})
    files = archives(path)
    damage(files[0], 150)  # inside the first array
    with RunStore.open(path) as store:
        arrays, meta = store.load_checkpoint()
        assert meta["turn"] == 0
        assert_array_equal(arrays["a"], np.arange(9))
        assert store.committed.draws == (2, 2)
        # The next checkpoint replaces the damaged one, not the one that is left.
        store.checkpoint({"a": np.arange(3)}, {"draws": 3, "turn": 2})
        assert store.load_checkpoint()[1]["turn"] == 2
    assert files[1] == archives(path)[1]
    files = archives(path)
    assert sorted(files) == sorted((path / "checkpoint/state").glob("*.npz"))
    damage(files[0], 150)
    with RunStore.open(path) as store:
        assert store.load_checkpoint()[1]["turn"] == 0
    damage(files[1], 150)
    with RunStore.open(path) as store:
        match = rf"no checkpoint .* is whole .*{files[0].name}.*{files[1].name}"
        refused(StoreFormatError, match, store.load_checkpoint)


def test_checkpoints_that_cannot_be_kept_are_refused(path):
    bad = [({}, {"draws": DRAWS + 1})]
    bad += [({"a": np.array([one])}, {"draws": 0}) for one in (None, "text")]
    with create_store(path, make_spec()) as store:
        for arrays, meta in bad:
            refused(OptionError, None, store.checkpoint, arrays, meta)
            assert store.committed.draws == (0, 0)
            refused(StoreFormatError, "holds no checkpoint", store.load_checkpoint)


def test_archives_and_chunks_are_on_the_disk_before_the_marker_names_them(path, monkeypatch):
    """A power failure at the replacement of the marker leaves nothing that it names unwritten."""
    flushed, marked, replace, fsync = set(), [], Path.replace, os.fsync

    def note(handle):
        fsync(handle)
        flushed.add(os.fstat(handle).st_ino)

    def follow(self, target):
        if target == path / "checkpoint" / "zarr.json":
            document = json.loads(self.read_bytes())["attributes"]
            slot, state = document["slots"][document["newest"]], path / "checkpoint/state"
            named = [state / f"{slot['archive']}.npz", *(state / document["moments"]).iterdir()]
            chunks = [file for file in (path / "posterior").glob("[WH]/c/**/*") if file.is_file()]
            for file in (self, *named, *chunks):
                marked.append(file)
                assert file.stat().st_ino in flushed, file
            assert {state.stat().st_ino, (state / document["moments"]).stat().st_ino} <= flushed
        return replace(self, target)

    with create_store(path, make_spec()) as store:
        monkeypatch.setattr(os, "fsync", note)
        monkeypatch.setattr(Path, "replace", follow)
        fill(store, make_spec(), draws=3)
        fill(store, make_spec())
    assert len(marked) > 30


@pytest.mark.parametrize("before", [True, False])
def test_moments_are_of_one_checkpoint_whenever_the_writer_is_killed(path, before):
    """Moments of both chains and of cells, some of which have been written before."""
    spec, turns = make_spec(), []

    def put(store, turn):
        W, Ht = factors(0, turn, 1)
        found = {"W_mean": W[0], "W_var": W[0] + 1, "H_mean": Ht[0].T, "H_var": Ht[0].T + 1}
        for chain in range(CHAINS):
            runs.put_moments(store, MOMENTS, chain, found, 5 + turn)
            runs.put_moments(store, "monitor", chain, {"mean": W[0, :3, 0], "var": 1.0}, 5 + turn)
        store.checkpoint({}, {"draws": 0})

    with create_store(path, spec) as store:
        put(store, 0)
        put(store, 1)
    while 2 not in turns:
        with RunStore.open(path) as store, killed_at(len(turns), before):
            put(store, 2)
        found = open_run(path)
        (turn,) = {int(count) - 5 for count in found["posterior_moments"]["count"]}
        W, Ht = factors(0, turn, 1)
        for chain in range(CHAINS):
            assert_array_equal(found["posterior_moments"]["W_var"][chain], W[0] + 1)
            assert_array_equal(found["posterior_moments"]["H_mean"][chain], Ht[0].T)
            assert_array_equal(found["monitor"]["mean"][chain], W[0, :3, 0])
        turns.append(turn)
    assert set(turns) == {1, 2}
    assert_array_equal(open_run(f"file://{path}")["monitor"]["mean"], found["monitor"]["mean"])
    with RunStore.open(path) as store:
        store.finish({})
    assert_array_equal(plain(path)["posterior_moments"]["W_mean"][1], factors(0, 2, 1)[0][0])
    assert not list((path / "checkpoint/state").glob("moments-*"))


def test_extension_keeps_draws_and_makes_room(path):
    with RunStore.open(store_run(path, make_spec(has_coarse=True))) as store:
        refused(OptionError, "cannot shorten", store.extend, np.arange(DRAWS - 1))
        store.extend(np.arange(1, 4 * DRAWS + 2, 2))
    with RunStore.open(path) as store:
        assert store.draws == 2 * DRAWS + 1
        store.write_draws(0, DRAWS, *factors(0, DRAWS, 3))
        store.write_draws(0, DRAWS // 2, *factors(0, 5, 1, salt=1), group="posterior_coarse")
        store.checkpoint({}, {"draws": [DRAWS + 3, 0]})
        tree = store.tree()
    assert_array_equal(tree["posterior"]["W"][0], factors(0, 0, DRAWS + 3)[0])
    assert_array_equal(tree["posterior_coarse"]["W"][0], factors(0, 0, 6, salt=1)[0])
    found = plain(path)
    assert found["posterior"]["draw"].values.tolist() == list(range(1, 43, 2))
    assert found["posterior_coarse"]["draw"].values.tolist() == list(range(3, 43, 4))
    assert found["sample_stats"]["lp"].shape == (CHAINS, 2 * DRAWS + 1)
    assert found["posterior_moments"]["W_mean"].shape == (CHAINS, I, K)


def test_an_extension_cut_short_anywhere_leaves_a_whole_store(path):
    store_run(path, make_spec(has_coarse=True))
    for fatal in range(60):
        with RunStore.open(path) as store, killed_at(fatal) as died:
            store.extend(np.arange(DRAWS + 5))
        if not died:
            break
        found = plain(path)["posterior"]
        assert found.sizes["draw"] == DRAWS
        assert_array_equal(found["W"][1], factors(1, 0, DRAWS)[0])
        with RunStore.open(path) as store:
            assert store.draws == DRAWS
        assert zarr.open_array(path, path="posterior/W", mode="r").shape[1] == DRAWS
    assert fatal > 10
    assert not died
    assert plain(path)["posterior"].sizes["draw"] == DRAWS + 5


def test_attributes_and_constants_are_updated_atomically(path):
    with create_store(path, make_spec()) as store:
        store.update_attrs({"dispersion": np.float32(0.5), "shape": (1, 2)})
        fill(store, make_spec())
        store.finish({"sampling_time": 1.5})
        refused(StoreError, "is closed", store.write_draws, 0, 0, *factors(0, 0, 1))
    tree, kept = open_run(path), {"dispersion": 0.5, "shape": [1, 2], "sampling_time": 1.5}
    assert kept.items() <= tree.attrs.items()
    assert tree["constant_data"]["dispersion"] == 0.5


@pytest.fixture(params=["store", "memory"])
def sink(request, path):
    if request.param == "memory":
        yield Sink(make_spec())
        return
    with create_store(path, make_spec()) as store:
        yield store


def test_draws_outside_the_plan_are_refused(sink):
    for chain, first, n in ((0, DRAWS, 1), (0, 8, 3), (CHAINS, 0, 1), (-1, 0, 1), (0, -1, 1)):
        refused(StoreError, "room for", sink.write_draws, chain, first, *factors(0, 0, n))
    W, Ht = factors(0, 0, 1)
    refused(OptionError, "takes draws of shape", sink.write_draws, 0, 0, Ht, W)
    match, group = "no posterior_coarse/W", "posterior_coarse"
    refused(StoreError, match, sink.write_draws, 0, 0, W, Ht, group=group)
    refused(StoreError, "no sample_stats/energy", sink.write_stats, 0, 0, {"energy": [1.0]})


def test_what_is_in_the_way_is_kept(path, tmp_path):
    spec = make_spec()
    path.mkdir()  # an empty folder is no obstacle
    store_run(path, spec, draws=3)
    match = r"draws per chain: 3, 3 of 10.*overwrite.*resume"
    refused(StoreError, match, create_store, path, spec)
    other = tmp_path / "thesis"
    other.mkdir()
    file, match = other / "chapter.txt", r"chapter\.txt.*pass another path"
    file.write_text("precious")
    for over in (False, True):
        refused(StoreError, match, create_store, other, spec, overwrite=over)
        refused(StoreError, "is a file", create_store, file, spec, overwrite=over)
    assert file.read_text() == "precious"
    with create_store(path, spec, overwrite=True) as store:
        assert store.committed.draws == (0, 0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.zarr", "thesis"]


async def full(self, key, value):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_says_what_is_safe(path, monkeypatch):
    with create_store(path, make_spec()) as store:
        fill(store, make_spec(), draws=4)
        with monkeypatch.context() as patch:
            patch.setattr(DurableStore, "set", full)
            with pytest.raises(StoreError, match=r"run\.zarr.*disk is full.*chain: 4, 4") as caught:
                runs.put_moments(store, MOMENTS, 0, runs.moments(0), 9)
            assert caught.value.errno == errno.ENOSPC
            store.write_draws(0, 4, *factors(0, 4, 1))
            match, state = r"a checkpoint.*disk is full", {"a": np.ones(3)}
            refused(StoreError, match, store.checkpoint, state, {"draws": 5})
        assert store.committed.draws == (4, 4)
        # Once there is room again, the draw that could not be written still is there.
        store.checkpoint({"a": np.ones(3)}, {"draws": [5, 4]})
    assert_array_equal(plain(path)["posterior"]["W"][0, :5], factors(0, 0, 5)[0])


def test_a_disk_that_is_full_before_anything_was_drawn_keeps_nothing(path, monkeypatch):
    store = create_store(path, make_spec(), state=({}, {"draws": 0}))
    monkeypatch.setattr(DurableStore, "set", full)
    match = r"disk is full; nothing of this run is stored; .*begin again"
    with pytest.raises(StoreError, match=match), store:
        runs.put_moments(store, MOMENTS, 0, runs.moments(0), 9)
    match = r"disk is full.*nothing was changed.*begin again"
    refused(StoreError, match, create_store, path, make_spec())
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("where", ["fcntl.flock", "pathlib.Path.write_text"])
def test_a_store_that_cannot_be_locked_is_told(path, monkeypatch, number, where):
    def contents():
        return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    create_store(path, make_spec()).close()
    before, why = contents(), os.strerror(number)
    cause = "the disk is full" if number == errno.ENOSPC else f"the system says: {why}"
    cause = "the disk is full" if number == errno.ENOSPC else f"the system says: {why}"
    with monkeypatch.context() as patch:
        patch.setattr(where, Mock(side_effect=OSError(number, why, "lock")))
        refused(StoreError, rf"run\.zarr cannot be written: {why}; fix this", RunStore.open, path)
        match = rf"run\.zarr, {cause}; nothing was changed; .*begin"
        refused(StoreError, match, create_store, path, make_spec(), overwrite=True)
    after = contents()
    assert {file.name for file in set(after) ^ set(before)} <= {"lock"}
    assert all(after[file] == raw for file, raw in before.items() if file.name != "lock")
    RunStore.open(path).close()


def finish_a_chunk(store):
    for draw in range(4, DRAWS):  # some of them wait for more
        store.write_draws(0, draw, *factors(0, draw, 1))
    store.checkpoint({}, {"draws": [DRAWS, 4]})


WRITES = {
    "draws": finish_a_chunk,
    "checkpoint": lambda store: store.checkpoint({"a": np.ones(3)}, {"draws": 4}),
    "moments": lambda store: runs.put_moments(store, MOMENTS, 0, runs.moments(0), 9),
    "end": lambda store: store.finish({}),
}


@pytest.mark.quick("draws-True", "checkpoint-False", "moments-True", "end-True")
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_store_that_is_removed_while_it_is_written_is_told(path, write, reopened):
    store = create_store(path, make_spec())
    fill(store, make_spec(), draws=4)
    if reopened:
        store.close()
        store = RunStore.open(path)
    shutil.rmtree(path)
    with pytest.raises(StoreError, match=r"run\.zarr was removed or moved") as caught, store:
        WRITES[write](store)
    assert "is safe" not in str(caught.value)
    assert not path.exists()


def test_a_damaged_chunk_is_told_where_it_is_written_in_part(path):
    store_run(path, draws=4)
    (chunk,) = (path / "posterior" / "W" / "c" / "0").rglob("0/0/0")
    raw = flip(chunk, 9)
    with RunStore.open(path) as store:
        store.write_draws(0, 4, *factors(0, 4, 1))
        match = r"run\.zarr is a damaged run store: posterior/W/c/0/0/0/0 is not what was written"
        refused(StoreFormatError, match, store.checkpoint, {}, {"draws": [5, 4]})
        assert store.committed.draws == (4, 4)
    assert chunk.read_bytes() == raw


WARMED = {"warmup_draws": [0, 0]}
IMPOSSIBLE = [
    *({"newest": 7}, {"newest": "first"}, {"newest": 1, "slots": None}),
    *({"newest": 0, "slots": []}, {"slots": 3}),
    *({"slots": [{"draws": draws, **WARMED}, None]} for draws in (["many", 0], [-1, 0])),
    {"slots": [{"draws": [1, 0]}, None]},
]


def test_an_impossible_marker_is_reported(path):
    with create_store(path, make_spec()) as store:
        store.checkpoint({}, {"draws": 0})
    marker = path / "checkpoint" / "zarr.json"
    whole = json.loads(marker.read_text())
    attributes = (whole["attributes"] | own for own in IMPOSSIBLE)
    sealed = (seal(whole | {"attributes": own}, "attributes") for own in attributes)
    for text in (*map(json.dumps, sealed), "{"):
        marker.write_text(text)
        for opener in (RunStore.open, open_run):
            refused(StoreFormatError, "damaged run store: checkpoint", opener, path)


def test_missing_and_foreign_paths_are_told_apart(tmp_path):
    for opener in (RunStore.open, open_run):
        with pytest.raises(StoreError, match="there is no run store") as caught:
            opener(tmp_path / "nowhere")
        assert caught.type is StoreError
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    zarr.create_group(tmp_path / "group.zarr")
    xr.Dataset({"a": ("x", [1])}).to_zarr(tmp_path / "set.zarr", zarr_format=2, consolidated=True)
    for name, version in (("newer", 99), ("older", 0), ("broken", 1)):
        create_store(tmp_path / name, make_spec()).close()
        root = tmp_path / name / "zarr.json"
        document = json.loads(root.read_text())
        document["attributes"]["format_version"] = version
        root.write_text(json.dumps(document))
    root.write_text('{"attributes": {"inference_library": "dask')
    matrix = scipy.sparse.csr_array(np.eye(3))
    convert(matrix, tmp_path / "matrix.zarr", unstored="zero", progressbar=False)
    for name, match in {
        **dict.fromkeys(("folder", "file", "group.zarr", "set.zarr"), "not a run store"),
        "broken": "has lost its zarr.json",
        "older": "format version is 0, but versions start at 1",
        "matrix.zarr": r"a matrix from daskfactor.convert.*as V to daskfactor.sample",
        "newer": "format version 99.*upgrade",
    }.items():
        for opener in (RunStore.open, open_run):
            refused(StoreFormatError, match, opener, tmp_path / name)


def test_one_writer_at_a_time(path):
    with create_store(path, make_spec()) as store:
        _, pipe = start(open_and_wait, str(path))
        assert f"is being written by process {os.getpid()} on" in pipe.recv()
        refused(StoreError, "being written by this process", RunStore.open, path)
        refused(StoreError, "being written", create_store, path, make_spec(), overwrite=True)
        open_run(path)
        store.checkpoint({}, {"draws": 0})
    process, pipe = start(open_and_wait, str(path))
    assert pipe.recv() == "open"
    pipe.send("enough")
    process.join()
    assert process.exitcode == 0


def test_without_locks_the_first_commit_wins_and_the_other_harms_nobody(path, monkeypatch):
    """On a file system without locks, as some network ones."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    match = r"run\.zarr: another process has taken this run over"
    with create_store(path, make_spec()) as first:
        fill(first, make_spec(), draws=2)
        with RunStore.open(path) as second:
            fill(second, make_spec(), draws=4)
            first.write_draws(0, 2, *factors(0, 2, 1))
            refused(StoreError, match, first.checkpoint, {}, {"draws": 3})
            refused(StoreError, match, first.extend, np.arange(DRAWS + 1))
            fill(second, make_spec(), draws=5)
    found = open_run(path)
    assert_array_equal(found["posterior"]["W"][1], factors(1, 0, 5)[0])
    assert_array_equal(found["posterior_moments"]["W_mean"][1], runs.moments(1)["W_mean"])
    with RunStore.open(path) as store:
        assert (store.committed.draws, store.draws) == ((5, 5), DRAWS)


def test_a_run_of_one_draw_without_extras(path):
    spec = RunSpec(shape=(1, 1, 1), chains=1, draws=1, has_coarse=True)
    with create_store(path, spec) as store:
        store.write_draws(0, 0, np.ones((1, 1, 1)), np.ones((1, 1, 1)))
        store.checkpoint({}, {"draws": 1})
        store.extend(np.arange(5))
        posterior = store.tree()["posterior"]
        assert store.tree()["posterior_coarse"].sizes["draw"] == 0
    assert posterior["W"].dims == ("chain", "draw", "row", "component")
    assert posterior["H"].dims == ("chain", "draw", "component", "column")
    assert set(posterior.coords) == {"chain", "draw", "component"}
