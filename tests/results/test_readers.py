"""Plain xarray, zarr and ArviZ read a store as it stands, without us."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import xarray as xr
import zarr
from numpy.testing import assert_array_equal

from daskfactor.results.schema import RunSpec
from daskfactor.results.store import RunStore
from daskfactor.results.trace import open_run
from tests.results.runs import CHAINS, DRAWS, fill, make_spec, memory_tree, store_run

pytestmark = pytest.mark.libraries

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version on import
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
    assert tree["posterior"]["gene"].values.tolist()[-1] == "Ångström"
    assert tree["posterior"]["day"].dtype.kind == "M"
    assert tree["posterior"]["weight"].dims == ("gene",)
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
    path, spec = tmp_path / "run.zarr", make_spec()
    with RunStore.create(path, spec) as store:
        fill(store, spec, draws=3)
        store.write_draws(0, 3, np.ones((1, 7, 3)), np.ones((1, 5, 3)))
        code = f"""
import xarray, sys
tree = xarray.open_datatree({str(path)!r}, engine="zarr")
print(int(tree["posterior"]["W"].notnull().all(["chain", "gene", "component"]).sum()))
"""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
        )
    assert done.stdout.strip() == "3", done.stderr


def test_every_array_is_plain_zarr_v3(path):
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


def test_nothing_in_the_store_is_a_pickle(path):
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) > 60
    for raw in (file.read_bytes() for file in files):
        # Protocol 2 and later start with the opcode PROTO and end with STOP.
        assert not (raw[:1] == b"\x80" and raw[1:2] in b"\x02\x03\x04\x05" and raw[-1:] == b".")
        words = (b"numpy.core", b"_reconstruct", b'"object"', b"pickle")
        assert not any(word in raw for word in words)


@pytest.mark.parametrize(
    "labels",
    [
        ["é", "漢字", ""],
        np.array([3, 1, 2]),
        np.array([0.5, np.nan, 2.0]),
        np.array(["2024-01-01", "NaT", "2025-01-01"], dtype="datetime64[s]"),
        np.array(["2024-01-01T00:00:00.000000001"] * 3, dtype="datetime64[ns]"),
        np.array([1, 2, 3], dtype="timedelta64[h]").astype("timedelta64[ns]"),
        np.array([True, False, True]),
    ],
)
def test_labels_survive_the_store(tmp_path, labels):
    spec = RunSpec(shape=(3, 2, 1), chains=1, draws=1, coords={"row": labels})
    RunStore.create(tmp_path / "run.zarr", spec).close()
    found = xr.open_datatree(tmp_path / "run.zarr", engine="zarr")["posterior"]["row"].values
    assert_array_equal(found.astype(spec.labels["row"].dtype), spec.labels["row"])
