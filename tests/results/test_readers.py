"""Plain xarray, zarr and ArviZ read a store as it stands, without us."""

import json
import subprocess
import sys
import warnings
from unittest.mock import Mock

import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError, StoreFormatError
from daskfactor.runs import opening
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import CHUNK_BYTES, MOMENTS, RunSpec, factor_dims, layouts
from daskfactor.runs.store import RunStore
from daskfactor.runs.trace import expectation, open_run
from tests.pairwise import pairwise
from tests.refusals import refused
from tests.results import runs
from tests.results.runs import (
    CHAINS,
    DRAWS,
    I,
    J,
    K,
    create_store,
    factors,
    make_spec,
    memory_tree,
    store_run,
)

pytestmark = pytest.mark.libraries

with warnings.catch_warnings(action="ignore"):  # ArviZ announces its next version on import
    import arviz as az


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    spec = make_spec(has_coarse=True, observed=np.arange(35.0).reshape(7, 5))
    path = store_run(tmp_path_factory.mktemp("readers") / "run.zarr", spec)
    with RunStore.open(path) as store:
        store.finish({"sampling_time": 1.0})
    return path


@pytest.mark.parametrize("chunks", [None, {}])
def test_plain_xarray_opens_the_store_without_a_warning(path, chunks):
    tree, ours = xr.open_datatree(path, engine="zarr", chunks=chunks), open_run(path)
    assert set(tree.children) == set(ours.children)
    assert "checkpoint" not in tree.children
    xr.testing.assert_identical(tree.load(), ours.load())
    posterior = tree["posterior"]
    assert posterior["gene"].values.tolist()[-1] == "Ångström"
    assert (posterior["day"].dtype.kind, posterior["weight"].dims) == ("M", ("gene",))
    assert tree["monitor"]["gene"].values.tolist() == ["g0", "g3", "g3"]


def test_xarray_and_zarr_open_groups_and_ignore_consolidation(path):
    assert xr.open_zarr(path, group="posterior")["W"].shape[:2] == (CHAINS, DRAWS)
    tree = xr.open_datatree(path, engine="zarr", consolidated=False)
    one, other = (own["posterior"].to_dataset().load() for own in (tree, open_run(path)))
    xr.testing.assert_identical(one, other)
    assert set(tree["checkpoint"].to_dataset().dims) == {"checkpoint_slot", "checkpoint_byte"}
    for name, options in (("posterior/W", {}), ("checkpoint/state", {"use_consolidated": False})):
        group = zarr.open_group(path, mode="r", **options)
        assert name in [own for own, _ in group.members(max_depth=None)]


@pytest.mark.parametrize("source", ["store", "memory"])
def test_arviz_summarizes_the_statistics(path, source):
    tree = xr.open_datatree(path, engine="zarr") if source == "store" else memory_tree(make_spec())
    if hasattr(az, "from_datatree"):  # arviz < 1 has a container of its own
        data = az.from_datatree(tree)
        stats, posterior = data.sample_stats, data.posterior
    else:
        stats, posterior = tree["sample_stats"].to_dataset(), tree["posterior"].to_dataset()
        assert float(az.ess(tree, group="sample_stats", var_names=["lp"])["lp"]) > 0
    summary, lp = az.summary(stats, var_names=["lp"]), tree["sample_stats"]["lp"].values
    assert float(summary.loc["lp", "mean"]) == pytest.approx(lp.mean(), rel=1e-2)
    assert float(az.ess(stats, var_names=["lp"])["lp"]) > 0
    assert np.isfinite(az.rhat(posterior, var_names=["W"])["W"]).all()
    assert az.extract(posterior)["W"].sizes["sample"] == CHAINS * DRAWS


def test_a_running_store_opens_in_another_process_with_warnings_as_errors(tmp_path):
    path = tmp_path / "run.zarr"
    with RunStore.open(store_run(path, draws=3)) as store:
        store.write_draws(0, 3, np.ones((1, 7, 3)), np.ones((1, 5, 3)))
        code = f"""
import xarray, sys
tree = xarray.open_datatree({str(path)!r}, engine="zarr")
print(int(tree["posterior"]["W"].notnull().all(["chain", "gene", "component"]).sum()))
"""
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr


def test_every_array_is_plain_zarr_v3_and_nothing_a_pickle(path):
    nodes = sorted(path.rglob("zarr.json"))
    assert len(nodes) > 40
    for node in nodes:
        document = json.loads(node.read_text())
        assert document["zarr_format"] == 3
        if document["node_type"] == "array":
            dtypes = {"string", "bool", "float32", "float64", "int64", "uint8"}
            assert document["data_type"] in dtypes
            names = {codec["name"] for codec in document["codecs"]}
            assert names <= {"bytes", "vlen-utf8", "zstd", "crc32c"}
            assert "crc32c" in names or node.parent.name == "state"
            assert document.get("dimension_names") or document["shape"] == []
    files = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert len(files) > 60
    for raw in files:
        # Protocol 2 and later start with the opcode PROTO and end with STOP.
        assert not (raw[:1] == b"\x80" and raw[1:2] in b"\x02\x03\x04\x05" and raw[-1:] == b".")
        words = (b"numpy.core", b"_reconstruct", b'"object"', b"pickle")
        assert not any(word in raw for word in words)


def test_labels_survive_the_store(tmp_path):
    days, instants = ["2024-01-01", "NaT", "2025-01-01"], ["2024-01-01T00:00:00.000000001"] * 3
    hours = np.array([1, 2, 3], "timedelta64[h]").astype("timedelta64[ns]")
    kinds = [["é", "漢字", ""], [3, 1, 2], [0.5, np.nan, 2.0], [True, False, True], hours]
    kinds += [np.array(days, "datetime64[s]"), np.array(instants, "datetime64[ns]")]
    for number, labels in enumerate(kinds):
        spec = RunSpec(shape=(3, 2, 1), chains=1, draws=1, coords={"row": labels})
        create_store(path := tmp_path / f"{number}.zarr", spec).close()
        found = xr.open_datatree(path, engine="zarr")["posterior"]["row"].values
        assert_array_equal(found.astype(spec.labels["row"].dtype), spec.labels["row"])


def test_an_opened_run_is_lazy(tmp_path):
    fail = Mock(side_effect=AssertionError("something was computed"))
    path = store_run(tmp_path / "run.zarr", make_spec(has_coarse=True))
    with dask.config.set(scheduler=fail):
        tree = open_run(path)
    for group in ("posterior", "posterior_coarse", "posterior_moments"):
        for array in tree[group].data_vars.values():
            assert dask.is_dask_collection(array.data) or array.name == "count"


def test_a_tree_in_memory_shares_the_arrays():
    sink = Sink(make_spec())
    runs.fill(sink, make_spec())
    tree, again = sink.tree(), sink.tree()
    runs.validate(tree)
    assert factor_dims(tree) == ("gene", "day")
    for name in "WH":
        assert np.shares_memory(tree["posterior"][name].values, again["posterior"][name].values)
    assert tree["posterior"]["H"].dims == ("chain", "draw", "component", "day")
    short = {"W": np.ones((CHAINS, 4, I, K), "f4"), "H": np.ones((CHAINS, 4, J, K), "f4")}
    broken_off = runs.tree_of(make_spec(), {"posterior": short})
    assert broken_off["posterior"]["draw"].values.tolist() == [1, 3, 5, 7]
    none = xr.DataTree.from_dict({"a": xr.Dataset()})
    refused(StoreFormatError, "no factors", factor_dims, none)


def _naive(spec, function, chains=range(CHAINS)):
    def mean(n, salt):
        pairs = (zip(*factors(chain, 0, n, salt=salt), strict=True) for chain in chains)
        values = [function(W, Ht.T) for own in pairs for W, Ht in own]
        return np.mean(np.array(values, dtype="f8"), axis=0)

    fine = mean(DRAWS, 0)
    return 2 * fine - mean(DRAWS // 2, 1) if spec.has_coarse else fine


FUNCTIONS = {
    "matrix": lambda W, H: W @ H,
    "scalar": lambda W, H: float(np.sum(W) ** 2),
    "vector": lambda W, H: H.max(axis=1),
}


@pairwise(name=[*FUNCTIONS], coarse=[True, False], chain=[None, 1])
def test_expectation_is_an_extrapolated_mean(tmp_path, name, coarse, chain, monkeypatch):
    spec, function = make_spec(has_coarse=coarse), FUNCTIONS[name]
    expected = _naive(spec, function, range(CHAINS) if chain is None else [chain])
    # Three draws at a time, so that the blocks do not divide the run.
    monkeypatch.setattr("daskfactor.runs.trace._READ_BYTES", 3 * (I + J) * K * 4)
    for trace in (memory_tree(spec), store_run(tmp_path / "run.zarr", spec)):
        assert_allclose(expectation(trace, function, chain=chain), expected, rtol=1e-5)


def test_expectation_says_what_is_missing(tmp_path):
    create_store(path := tmp_path / "run.zarr", make_spec()).close()
    for match, trace, options in (
        ("no chain 5", memory_tree(make_spec()), {"chain": 5}),
        ("only moments", memory_tree(make_spec(keep="moments")), {}),
        ("no draws yet", path, {}),
    ):
        refused(OptionError, match, expectation, trace, lambda W, H: W, **options)


def test_any_common_labels_are_taken():
    letters = list("abcdefg")
    for labels in (
        *(letters, np.array(letters, dtype=object), pd.Index(letters)),
        *(pd.Categorical(list("abcabca")), pd.date_range("2024-01-01", periods=I)),
        *(np.arange(I), np.linspace(0, 1, I), np.arange(I) % 2 == 0),
    ):
        spec = make_spec(coords={"gene": np.asarray(labels)})
        assert spec.labels["gene"].dtype.kind in "UifMb"
        assert spec.labels["gene"].values.tolist() == pd.Index(np.asarray(labels)).values.tolist()
    for first in ({}, 1):
        wrong = np.array([first, *"bcdefg"], dtype=object)
        refused(DataError, "labels of dtype object", make_spec, coords={"gene": wrong})


@given(
    shape=st.tuples(st.integers(1, 10**7), st.integers(1, 10**5), st.integers(1, 500)),
    draws=st.integers(0, 10**5),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_chunks_are_neither_large_nor_many(shape, draws, dtype):
    spec = RunSpec(shape=shape, chains=2, draws=draws, dtype=dtype, has_coarse=True)
    for layout in layouts(spec).values():
        assert int(np.prod(layout.chunks)) * layout.dtype.itemsize <= CHUNK_BYTES
        if "chain" in layout.dims and 0 not in layout.shape:
            whole = int(np.prod(layout.shape[1:])) * layout.dtype.itemsize
            pieces = np.prod([-(-n // c) for n, c in zip(layout.shape, layout.chunks, strict=True)])
            assert pieces <= 2 * (1 + 4 * whole / CHUNK_BYTES)
    for layout in layouts(make_spec()).values():  # a small run is one chunk per chain
        sizes = zip(layout.dims, layout.shape, strict=True)
        assert layout.chunks == tuple(1 if dim == "chain" else size for dim, size in sizes)


def test_the_registry_names_each_variable_once():
    names = [(variable.group, variable.name) for variable in runs.REGISTRY]
    assert len(names) == len(set(names))
    assert all(variable.doc for variable in runs.REGISTRY)


def test_draws_and_moments_are_of_one_checkpoint_though_another_is_committed(tmp_path, monkeypatch):
    store = tmp_path / "run.zarr"
    V = np.random.default_rng(0).poisson(3.0, (12, 8))
    run = {"tune": 5, "random_seed": 0, "progressbar": False, "store": store}
    dfac.sample(V, dfac.TweedieNMF(2), draws=10, keep="moments", **run)
    read, calls = opening.committed_tree, []

    def read_and_commit(view, counts):
        tree = read(view, counts)
        calls.append(tree[MOMENTS]["count"].values.max())
        if len(calls) == 1:
            dfac.resume(store, draws=7, progressbar=False)
        return tree

    monkeypatch.setattr(opening, "committed_tree", read_and_commit)
    tree = dfac.open_run(store)
    assert len(calls) >= 2
    assert tree[MOMENTS]["count"].values.max() == 17
