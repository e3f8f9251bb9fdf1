"""Whatever happens to a file of a store or to who writes it: the same results, or one sentence."""

import json
import shutil
import time
import zlib
from functools import partial
from unittest.mock import Mock

import dask
import numpy as np
import pytest
import xarray as xr
import zarr
from numpy.testing import assert_array_equal

import daskfactor as dfac
from daskfactor.errors import ModelError, StoreError, StoreFormatError
from daskfactor.inference.base import Sampler
from daskfactor.inference.inits import Init
from daskfactor.inference.langevin import coupled
from daskfactor.inference.parameters import stored_hyper
from daskfactor.inference.registry import algorithm_from_dict
from daskfactor.inference.setting import RunOptions
from daskfactor.runs.files import seal
from daskfactor.runs.metadata import INDEX
from daskfactor.runs.schema import RunSpec
from daskfactor.runs.store import RunStore
from daskfactor.runs.trace import open_run
from daskfactor.stein.ensemble import ParticleMethod
from tests.refusals import refused
from tests.results.runs import I, J, K, create_store, factors, fill, make_spec, store_run
from tests.results.writer import killed_at, start, state_of, write_until_killed
from tests.tiers import FULL


def whole_store(path):
    spec = make_spec(chains=1, warmup_draws=2, observed=np.arange(35.0).reshape(7, 5))
    state = {"lasting": np.arange(7.0)}, {"draws": 0, "warmup_draws": 0}
    with create_store(path, spec, state=state) as store:
        fill(store, spec, draws=4)
        for meta in ({"draws": 9}, {"draws": 10, "warmup_draws": 2}):
            store.checkpoint({"state": np.arange(5)}, meta)
        fill(store, spec)
        for _ in range(2):
            store.checkpoint({"state": np.arange(5)}, {"draws": 10, "from": 4})
        store.finish({"sampling_time": 1.0})
    return path


def everything(path):
    with dask.config.set(scheduler="synchronous"):
        tree = open_run(path).load()
    with RunStore.open(path) as held:
        arrays, meta = held.load_checkpoint()
        return tree, dict(arrays), meta


def flipped(raw, number):
    at = zlib.crc32(raw) % len(raw)
    return raw[:at] + bytes([raw[at] ^ (1 << number % 8)]) + raw[at + 1 :]


def cut(raw, number):
    """Without the last byte, half of it, or no file at all."""
    return (raw[:-1], raw[: len(raw) // 2], None)[number % 3]


@pytest.mark.slow
def test_damage_anywhere_is_told_or_does_nothing(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    expected, arrays, meta = everything(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())

    def told(changes):
        before = {file: file.read_bytes() for file in changes}
        for file, changed in changes.items():
            file.unlink() if changed is None else file.write_bytes(changed)
        try:
            tree, found, state = everything(path)
        except StoreError as error:
            return str(path) in str(error)
        else:
            xr.testing.assert_identical(tree, expected)
            assert state == meta
            assert all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)
            return False
        finally:
            for file, raw in before.items():
                file.write_bytes(raw)

    chunks = [file for file in files if "/c/" in str(file) or file.name == "c"]
    # What the root has a copy of: no reader opens these, so all are damaged at once.
    copied = [file for file in files if file.name == "zarr.json" and file.parent != path]
    copied.remove(path / "checkpoint" / "zarr.json")
    for damage in (flipped, cut):
        changes = {file: damage(file.read_bytes(), at) for at, file in enumerate(copied)}
        if told(changes):
            for file, changed in changes.items():
                told({file: changed})
    others = [file for file in files if file not in copied]
    for number, file in enumerate(others[:: 1 if FULL else 2]):
        raw = file.read_bytes()
        if raw:
            assert told({file: flipped(raw, number)}) or file not in chunks
            # One check finds a change and a cut: a third of the files is enough of these.
            if number % 3 == 0 or file not in chunks:
                assert told({file: cut(raw, number // 3)}) or file not in chunks
    assert len(chunks) > 25


def test_damage_is_told_by_lazy_readings_too(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    zarr.open_group(path, mode="r+").attrs["note"] = "mine"
    tree = open_run(path)
    assert tree.attrs["note"] == "mine"  # what others write into the root is taken
    chunk = path / "posterior" / "W" / "c" / "0" / "0" / "0" / "0"
    chunk.write_bytes(flipped(chunk.read_bytes(), 2))
    match = r"run\.zarr is a damaged run store: posterior/W/c/0/0/0/0 is not what was written"
    for read, *given in (
        (dfac.predict(tree).load,),
        (dfac.expectation, path, lambda W, H: W),
        (dfac.align, tree),
        (dfac.summarize, path),
    ):
        refused(StoreFormatError, match, read, *given)
    chunk.unlink()
    refused(StoreFormatError, "posterior/W/c/0/0/0/0 is missing", dfac.predict(path).load)


def as_of_version_one(path):
    """Make a store what 0.1.0 wrote: no checksums, a marker and a state of its own."""
    for file in path.rglob("zarr.json"):
        document = json.loads(file.read_text())
        nodes = (document.get("consolidated_metadata") or {}).get("metadata", {})
        for node in (document, *nodes.values()):
            if "codecs" in node:
                node["codecs"] = [c for c in node["codecs"] if c["name"] != "crc32c"]
        (document.get("consolidated_metadata") or {}).pop("crc32", None)
        document["attributes"].pop("crc32", None)
        if "format_version" in document["attributes"]:
            document["attributes"]["format_version"] = 1
        file.write_text(json.dumps(document))
    for file in path.rglob("*"):
        if file.is_file() and ("/c/" in str(file) or file.name == "c"):
            file.write_bytes(file.read_bytes()[:-4])
    for file in (path / "checkpoint" / "state").glob("*.npz"):
        file.unlink()
    # Chunks of nothing but fill values were not written.
    (path / "monitor" / "chain" / "c" / "0").unlink()


def test_stores_of_the_first_version_are_read_and_not_resumed(tmp_path):
    path = whole_store(tmp_path / "run.zarr")
    expected = open_run(path).load()
    as_of_version_one(path)
    found = open_run(path).load()
    assert found.attrs.pop("format_version") == 1
    del expected.attrs["format_version"]
    xr.testing.assert_identical(found, expected)
    with pytest.raises(StoreFormatError, match=r"written by daskfactor 0\.1\.0.*can be read"):
        dfac.resume(path, progressbar=False)


def test_stores_of_earlier_development_versions_are_read_and_resumed(tmp_path):
    """They had one archive for each slot, and moments only in their arrays."""
    path, state = whole_store(tmp_path / "run.zarr"), tmp_path / "run.zarr/checkpoint/state"
    expected, arrays, meta = everything(path)
    marker = path / "checkpoint" / "zarr.json"
    document = json.loads(marker.read_text())
    for name in ("version", "moments"):
        del document["attributes"][name]
    for number, slot in enumerate(document["attributes"]["slots"]):
        (state / f"{slot.pop('archive')}.npz").rename(state / f"{number}.npz")
    marker.write_text(json.dumps(seal(document, "attributes")))
    found, kept, told = everything(path)
    xr.testing.assert_identical(found, expected)
    assert told == meta
    assert all(kept[name].tobytes() == arrays[name].tobytes() for name in arrays)
    with RunStore.open(path) as store:
        store.load_checkpoint()
        store.checkpoint({"state": np.arange(5)}, {"draws": 10, "from": 5})
        assert set(store.load_checkpoint()[0]) == {"state", "lasting"}
    newest = f"{document['attributes']['newest']}.npz"
    assert [one.name for one in state.glob("?.npz")] == [newest]
    assert len(list(state.glob("*.npz"))) == 3


PICKLE = {"codecs": [{"name": "numcodecs.pickle"}]}


@pytest.mark.parametrize(
    ("node", "changed", "says"),
    [
        ("posterior/gene", PICKLE, "decoded by numcodecs.pickle"),
        ("posterior/W", PICKLE, "decoded by numcodecs.pickle"),
        ("posterior/gene", {"storage_transformers": [{"name": "any"}]}, "a storage transformer"),
        ("posterior/day", {"shape": [2**40]}, "GiB of labels of .* takes .* GiB of memory"),
        ("posterior/W", {"shape": [2, 2**40, 7, 3]}, "chunks and .* takes .* GiB of memory"),
    ],
)
def test_a_store_of_somebody_else_does_nothing_and_takes_little(tmp_path, node, changed, says):
    create_store(tmp_path / "run.zarr", make_spec()).close()
    rewrite(tmp_path / "run.zarr", lambda own: own[INDEX]["metadata"][node].update(changed))
    for opener in (open_run, RunStore.open):
        refused(StoreFormatError, says, opener, tmp_path / "run.zarr")


V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype(np.float32)
QUIET = {"random_seed": 1, "progressbar": False}
SAMPLER, LENGTHS = dfac.PSGLD(warm_start=2), {"draws": 400, "tune": 6, "chains": 1}
NEWER = "the stored PSGLD has 'warmth', which .*know .*a newer version probably wrote it"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Runs that have more to do."""
    folder = tmp_path_factory.mktemp("stores")
    found = {kind: folder / f"{kind}.zarr" for kind in ("chains", "particles")}

    def stop(event):
        if event.done >= {"draw": 8, "particles": 1}.get(event.phase, np.inf):
            raise KeyboardInterrupt

    chains = partial(dfac.sample, V, dfac.TweedieNMF(2), SAMPLER, **LENGTHS)
    modes = partial(dfac.stein_posterior, V, dfac.TweedieNMF(2, dispersion=1.0), particles=3)
    for run, path in zip((chains, modes), found.values(), strict=True):
        refused(KeyboardInterrupt, None, run, store=path, callback=stop, **QUIET)
    return found


def rewrite(path, change):
    """Change the document of a root, and make its checksum right."""
    document = json.loads((path / "zarr.json").read_text())
    change(document)
    (path / "zarr.json").write_text(json.dumps(seal(document, INDEX)))


def edited(source, target, change, everywhere=False):
    """Copy a run and change what it says of itself, as JSON values; its checksum is right."""

    def rewritten(document):
        attrs = document["attributes"]
        values = {name: json.loads(attrs[name]) for name in attrs.keys() & {"run", "data", "init"}}
        change(values)
        attrs |= {name: json.dumps(own) for name, own in values.items()}
        if everywhere:  # nothing contradicts it
            attrs |= {name: json.dumps(values["run"][name]) for name in ("model", "sampler")}
            options = values["run"]["options"]
            attrs |= {name: options[name] for name in options if name in attrs}
            attrs["random_seed"] = str(options["seed"])

    shutil.copytree(source, target)
    rewrite(target, rewritten)
    return target


GONE = object()


def put(*keys, value=GONE):
    """Change an entry of nested documents, or remove it."""

    def change(values):
        *ahead, last = keys
        for key in ahead:
            values = values[key]
        if value is GONE:
            del values[last]
        else:
            values[last] = value

    return change


STEP = {"type": "ConstantStep", "size": 0.1, "unit": 2}
UNKNOWN = {
    "momentum": put("run", "sampler", "momentum", value=0.5),
    "tilt": put("run", "model", "tilt", value=1),
    "stride": put("run", "options", "stride", value=2),
    "extra": put("run", "extra", value=2),
    "groups": put("run", "sampler", "schedule", "groups", value=2),
    "Spiral": put("run", "sampler", "schedule", value={"type": "Spiral"}),
    "unit": put("run", "sampler", "step", value=STEP),
    "spread": put("init", "spread", value=2),
    "tropical": put("init", "kind", value="tropical"),
}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_options_are_refused_by_name(stores, tmp_path, name, everywhere):
    path = edited(stores["chains"], tmp_path / "run.zarr", UNKNOWN[name], everywhere)
    told = everywhere or name in ("stride", "extra", "spread", "tropical")
    match = f"(?s){name}.*newer version" if told else None
    refused(StoreFormatError, match, dfac.resume, path, progressbar=False)


OF_OPTIONS = [("thin", 0), ("thin", 2), ("draws", 20), ("draws", "many"), ("tune", -6), ("pace", 0)]
OF_OPTIONS += [("chains", True), ("chains", 2), ("seed", -1), ("keep", "some")]
OF_OPTIONS += [("dtype", "int8"), ("dtype", "float64")]
OF_CHAINS = {
    **{f"{name} {own}": put("run", "options", name, value=own) for name, own in OF_OPTIONS},
    "missing": put("run", "options", "tune"),
    "options": put("run", "options", value=[1, 2]),
    "model": put("run", "model", value=None),
    "components": put("run", "model", "n_components", value=3),
    "no components": put("run", "model", "n_components", value="two"),
    "sampler": put("run", "sampler", value=7),
    "step": put("run", "sampler", "step", value=[1]),
    "warm start": put("run", "sampler", "warm_start", value={}),
    "schedule": put("run", "sampler", "schedule", value={"type": ["Cyclic"]}),
    "other sampler": put("run", "sampler", value={"type": "PSGRRLD"}),
    "run": put("run", value=[]),
    "data": put("data", value=3),
    "offsets": put("data", "row_offsets", value=[0, 5, 3, 12]),
    "no offsets": put("data", "row_offsets", value="0"),
    "init": put("init", value=[]),
    "starts": put("init", "starts", value="one"),
    "drawn": put("init", "drawn", value=[1]),
}
OF_PARTICLES = {
    "unknown": put("run", "options", "stride", value=2),
    "method": put("run", "sampler", "stride", value=2),
    "kernel": put("run", "options", "kernel", "stride", value=2),
    "number": put("run", "options", "particles", value=4),
    "none": put("run", "options", "particles", value=0),
    "flag": put("run", "options", "tangent", value="no"),
    "components": put("run", "model", "n_components", value=3),
}
IMPOSSIBLE = {f"chains: {name}": own for name, own in OF_CHAINS.items()}
IMPOSSIBLE |= {f"particles: {name}": own for name, own in OF_PARTICLES.items()}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_documents_are_refused(stores, tmp_path, name, everywhere):
    if everywhere and name in ("chains: options", "chains: run"):
        pytest.skip("there is nothing to repeat")
    source = stores[name.partition(":")[0]]
    path = edited(source, tmp_path / "run.zarr", IMPOSSIBLE[name], everywhere)
    refused(StoreFormatError, None, dfac.resume, path, progressbar=False)


@pytest.mark.parametrize("name", ["run", "data", "model", "sampler", "init", "draws"])
@pytest.mark.parametrize("value", [3.5, None, "[]", "null", "{", "words"])
def test_readers_refuse_descriptions_that_are_none(stores, tmp_path, name, value):
    path = shutil.copytree(stores["chains"], tmp_path / "run.zarr")
    rewrite(path, lambda document: document["attributes"].update({name: value}))
    match = r"run\.zarr is a damaged run store"
    for read in (dfac.open_run, dfac.summarize, dfac.predict, partial(dfac.resume, V=V)):
        refused(StoreFormatError, match, read, path)


def test_what_nobody_changed_goes_on(stores, tmp_path):
    path = edited(stores["chains"], tmp_path / "run.zarr", put("run", "options", "pace"))
    whole = dfac.sample(V, dfac.TweedieNMF(2), SAMPLER, **QUIET, **LENGTHS)
    found = dfac.resume(path, progressbar=False)
    xr.testing.assert_equal(found["posterior"].to_dataset(), whole["posterior"].to_dataset())
    path = edited(stores["particles"], tmp_path / "particles.zarr", lambda values: None)
    assert dfac.resume(path, progressbar=False)["posterior"].sizes["draw"] == 3


HMC = {"type": "HMC", "step": "auto", "steps": 10, "target_accept": 0.8, "warm_start": "auto"}


def test_runs_of_a_sampler_that_is_gone_are_read_and_not_resumed(tmp_path):
    dfac.sample(V, dfac.TweedieNMF(2), SAMPLER, store=tmp_path / "made.zarr", **QUIET, **LENGTHS)
    change = put("run", "sampler", value=HMC)
    path = edited(tmp_path / "made.zarr", tmp_path / "run.zarr", change, everywhere=True)
    assert dfac.summarize(path).verdict
    assert dfac.predict(path, rows=[0], columns=[0])["mean"].size == 1
    match = r"called 'HMC', which .* use BlockHMC\(\), .* 0\.1\.0 is the last"
    refused(StoreFormatError, match, dfac.resume, path, progressbar=False)
    match = r"no longer has HMC: use BlockHMC\(\), .* 0\.1\.0"
    refused(AttributeError, match, getattr, dfac, "HMC")


def test_readers_of_stored_values_refuse_what_they_do_not_know():
    plain = {"type": "PSGLD", "transition": "euler", "warmth": 1}
    coupled = {"relations": {"rna": {"rows": "a", "columns": "b", "tilt": 1}}}
    for error, match, read, *given in (
        (StoreFormatError, NEWER, algorithm_from_dict, Sampler, plain, "it"),
        (StoreFormatError, "'tilt', which this", stored_hyper, dfac.GaussianMF(2), {"tilt": 1.0}),
        (StoreFormatError, "'W', which this version", Init.from_dict, {"W": 1}, {}),
        (StoreFormatError, "must be a dict of options, got 3", RunOptions.from_dict, 3),
        (ModelError, "relation 'rna' has 'tilt', which this", partial(dfac.Coupled, **coupled), 2),
    ):
        refused(error, match, read, *given)


@pytest.mark.parametrize("sampler", [dfac.PSGLD(), dfac.LangevinDynamics(), dfac.SGLD()])
def test_samplers_make_their_pairs(sampler):
    pair = coupled(sampler)
    for name in sampler.to_dict().keys() - {"type"}:
        assert getattr(pair, name) == getattr(sampler, name)


ORDER = {"type": "Reshuffled"}
PLAIN = {"step": "auto", "preconditioner": "majorizer"}
RANDOM = PLAIN | {"schedule": ORDER, "warm_start": "auto", "transition": "euler"}
ENSEMBLE = {"start": "q_transform", "optimizer": "auto", "max_iter": None, "tol": None}
STEIN = {"steps": 1000, "step": "auto"}
FIRST = [
    (Sampler, {"type": "Gibbs", "warm_start": "auto"}, {}),
    (Sampler, {"type": "LangevinDynamics"} | PLAIN, {"transition": "euler"}),
    (Sampler, {"type": "PSGLD"} | RANDOM, {}),
    (Sampler, {"type": "PSGRRLD"} | RANDOM, {}),
    (Sampler, {"type": "SGHMC", "step": "auto", "friction": 0.05, "schedule": ORDER}, {}),
    (Sampler, {"type": "SGLD", "subsample": "auto"} | PLAIN, {"transition": "euler"}),
    (ParticleMethod, {"type": "Ensemble", "transfer_rank": 3} | ENSEMBLE, {}),
    (ParticleMethod, {"type": "SVGD"} | STEIN, {}),
    (ParticleMethod, {"type": "SteinDescent"} | STEIN, {}),
]


@pytest.mark.parametrize(("base", "stored", "then"), FIRST, ids=lambda own: str(own)[:40])
def test_what_the_first_version_wrote_is_known(base, stored, then):
    """No option was renamed or removed since; what is new does as 0.1.0 did where it is lacking."""
    found = algorithm_from_dict(base, stored, "it").to_dict()
    assert {name: found[name] for name in stored | then} == stored | then


# -- processes that are killed while they write ----------------------------------------------

KILLS = 10 if FULL else 4


def check(path):
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
    create_store(path, RunSpec(shape=(I, J, K), chains=1, draws=9)).close()
    rng, seen = np.random.default_rng(0), [0]
    while len(seen) <= KILLS or seen[-1] <= 9:
        # Longer and longer, so that a loaded machine gets through nine draws as well.
        longest = 0.3 * max(1.0, len(seen) / KILLS)
        process, pipe = start(write_until_killed, str(path))
        assert pipe.recv() == "ready"
        time.sleep(rng.uniform(0.0, longest))  # not a wait: the instant of death
        process.kill()
        process.join()
        assert process.exitcode == -9
        seen.append(check(path))
        assert seen == sorted(seen)
        assert len(seen) < 10 * KILLS, f"nothing is ever committed: {seen}"
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


RUNS = {
    "tweedie": (dfac.TweedieNMF(2), dfac.PSGLD(step=dfac.ConstantStep(0.001))),
    "gaussian": (dfac.GaussianMF(2), None),
}
OF_THE_MOMENT = {"sampling_time", "utilisation", "created_at", "trace_id"}


@pytest.mark.quick("tweedie")
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_killed_before_it_was_closed_is_closed_by_resume(tmp_path, monkeypatch, kind):
    options = QUIET | {"draws": 6, "tune": 4}
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
    dfac.sample(V, dfac.TweedieNMF(2), store=path, monitor=cells, draws=3, tune=2, **QUIET)
    none = {"n_workers": 0, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**none) as cluster, distributed.Client(cluster):
        assert dfac.open_run(path)["posterior"].sizes["draw"] == 3
        assert dfac.resume(path, draws=2, progressbar=False)["posterior"].sizes["draw"] == 5
        assert dfac.align(path)["alignment/permutation"].sizes["draw"] == 5
        assert dfac.summarize(path, cells=2).attrs["draws"] == 5
        assert dfac.expectation(path, lambda W, H: W).shape == (12, 2)
        assert dfac.top_entries(path, 2)["label"].sizes["rank"] == 2
        assert dfac.monitored(path)["mean"].sizes["cell"] == 2
