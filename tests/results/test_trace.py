import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.errors import DataError, OptionError, StoreFormatError
from daskfactor.results.schema import CHUNK_BYTES, RunSpec, factor_dims, layouts, storable_names
from daskfactor.results.sink import Sink
from daskfactor.results.store import RunStore
from daskfactor.results.trace import expectation, open_run
from tests.refusals import refused
from tests.results.runs import (
    CHAINS,
    DRAWS,
    I,
    J,
    K,
    factors,
    fill,
    make_spec,
    memory_tree,
    moments,
    stats,
    tree_of,
)
from tests.results.validation import REGISTRY, validate

pytestmark = pytest.mark.libraries


def count_computes():
    """A scheduler that fails when asked to compute."""

    def scheduler(dsk, keys, **kwargs):
        raise AssertionError("something was computed")

    return dask.config.set(scheduler=scheduler)


def test_an_opened_run_is_lazy(tmp_path):
    spec = make_spec(has_coarse=True)
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    with count_computes():
        tree = open_run(tmp_path / "run.zarr")
    for group in ("posterior", "posterior_coarse", "posterior_moments"):
        for array in tree[group].data_vars.values():
            assert dask.is_dask_collection(array.data) or array.name == "count"


def test_a_tree_in_memory_shares_the_arrays():
    sink = Sink(make_spec())
    fill(sink, make_spec())
    tree, again = sink.tree(), sink.tree()
    validate(tree)
    for name in "WH":
        assert np.shares_memory(tree["posterior"][name].values, again["posterior"][name].values)
    assert tree["posterior"]["H"].dims == ("chain", "draw", "component", "day")


def test_a_run_broken_off_in_memory_is_shorter():
    W = np.ones((CHAINS, 4, I, K), dtype="f4")
    Ht = np.ones((CHAINS, 4, J, K), dtype="f4")
    tree = tree_of(make_spec(), {"posterior": {"W": W, "H": Ht}})
    assert tree["posterior"]["draw"].values.tolist() == [1, 3, 5, 7]


def test_a_tree_in_memory_is_what_was_written():
    spec = make_spec(has_coarse=True)
    tree = memory_tree(spec)
    for chain in range(CHAINS):
        for group, n, salt in (("posterior", DRAWS, 0), ("posterior_coarse", DRAWS // 2, 1)):
            W, Ht = factors(chain, 0, n, salt=salt)
            assert_array_equal(tree[group]["W"][chain], W)
            assert_array_equal(tree[group]["H"][chain], Ht.swapaxes(1, 2))
        for name, values in stats(chain, 0, DRAWS).items():
            assert_array_equal(tree["sample_stats"][name][chain], values)
        for name, values in moments(chain).items():
            found = tree["posterior_moments"][name.replace("Ht", "H")][chain].values
            assert_array_equal(found, values.T if "Ht" in name else values)
    assert tree["posterior_moments"]["count"].values.tolist() == [DRAWS] * CHAINS


def _naive(spec, function, chains=range(CHAINS)):
    def mean(n, salt):
        values = [
            function(W, Ht.T)
            for chain in chains
            for W, Ht in zip(*factors(chain, 0, n, salt=salt), strict=True)
        ]
        return np.mean(np.array(values, dtype="f8"), axis=0)

    fine = mean(DRAWS, 0)
    return 2 * fine - mean(DRAWS // 2, 1) if spec.has_coarse else fine


FUNCTIONS = {
    "matrix": lambda W, H: W @ H,
    "scalar": lambda W, H: float(np.sum(W) ** 2),
    "vector": lambda W, H: H.max(axis=1),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("chain", [None, 1])
def test_expectation_is_the_mean_over_draws_extrapolated(
    tmp_path, function, coarse, chain, monkeypatch
):
    spec = make_spec(has_coarse=coarse)
    expected = _naive(spec, function, range(CHAINS) if chain is None else [chain])
    found = expectation(memory_tree(spec), function, chain=chain)
    assert_allclose(found, expected, rtol=1e-5)
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    # Three draws at a time, so that the blocks do not divide the run.
    monkeypatch.setattr("daskfactor.results.trace._READ_BYTES", 3 * (I + J) * K * 4)
    streamed = expectation(tmp_path / "run.zarr", function, chain=chain)
    assert_allclose(streamed, expected, rtol=1e-5)


def test_richardson_romberg_removes_a_bias_linear_in_the_step():
    spec = make_spec(has_coarse=True)
    step = 0.1
    truth = np.ones((CHAINS, DRAWS, I, K), dtype="f4")
    H = np.ones((CHAINS, DRAWS, J, K), dtype="f4")
    tree = tree_of(
        spec,
        {
            "posterior": {"W": truth + step / 2, "H": H},
            "posterior_coarse": {"W": (truth + step)[:, : DRAWS // 2], "H": H[:, : DRAWS // 2]},
        },
    )
    assert_allclose(expectation(tree, lambda W, H: W), np.ones((I, K)), rtol=1e-6)


def test_expectation_says_what_is_missing(tmp_path):
    with pytest.raises(OptionError, match="no chain 5"):
        expectation(memory_tree(make_spec()), lambda W, H: W, chain=5)
    with pytest.raises(OptionError, match="moments only"):
        expectation(memory_tree(make_spec(keep="moments")), lambda W, H: W)
    RunStore.create(tmp_path / "run.zarr", make_spec()).close()
    refused(OptionError, "no draws yet", expectation, tmp_path / "run.zarr", lambda W, H: W)


def test_every_name_has_one_that_a_store_takes(tmp_path):
    names = ["a/b", "a_b", "a\\b", "", "_", "..", "zarr.json", "a\0b", "é" * 300, "day [UTC]"]
    found = storable_names(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert [name for name in names if found[name] == name] == ["a_b", "_", "day [UTC]"]
    assert found["a/b"] == "a_b_"
    assert found["a\\b"] == "a_b__"
    for name in found.values():
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("first", [{}, 1])
def test_labels_that_cannot_be_stored_are_refused(first):
    labels = np.array([first, *"bcdefg"], dtype=object)
    refused(DataError, "labels of dtype object", make_spec, coords={"gene": labels})


@pytest.mark.parametrize(
    "labels",
    [
        list("abcdefg"),
        np.array(list("abcdefg"), dtype=object),
        pd.Index(list("abcdefg")),
        pd.Categorical(list("abcabca")),
        np.arange(I),
        np.linspace(0, 1, I),
        pd.date_range("2024-01-01", periods=I),
        np.arange(I) % 2 == 0,
    ],
)
def test_any_common_labels_are_taken(labels):
    spec = make_spec(coords={"gene": np.asarray(labels)})
    assert spec.labels["gene"].dtype.kind in "UifMb"
    assert spec.labels["gene"].values.tolist() == pd.Index(np.asarray(labels)).values.tolist()


@given(
    shape=st.tuples(st.integers(1, 10**7), st.integers(1, 10**5), st.integers(1, 500)),
    draws=st.integers(0, 10**5),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_chunks_are_neither_large_nor_many(shape, draws, dtype):
    spec = RunSpec(shape=shape, chains=2, draws=draws, dtype=dtype, has_coarse=True)
    for layout in layouts(spec).values():
        size = int(np.prod(layout.chunks)) * layout.dtype.itemsize
        assert size <= CHUNK_BYTES
        if "chain" not in layout.dims or 0 in layout.shape:
            continue
        whole = int(np.prod(layout.shape[1:])) * layout.dtype.itemsize
        pieces = np.prod([-(-n // c) for n, c in zip(layout.shape, layout.chunks, strict=True)])
        assert pieces <= 2 * (1 + 4 * whole / CHUNK_BYTES)


def test_a_small_run_is_one_chunk_per_chain():
    for layout in layouts(make_spec()).values():
        assert layout.chunks == tuple(
            1 if dim == "chain" else size
            for dim, size in zip(layout.dims, layout.shape, strict=True)
        )


def test_the_registry_names_each_variable_once():
    names = [(variable.group, variable.name) for variable in REGISTRY]
    assert len(names) == len(set(names))
    assert all(variable.doc for variable in REGISTRY)


def test_a_tree_is_validated():
    tree = memory_tree(make_spec(has_coarse=True))
    validate(tree)
    assert factor_dims(tree) == ("gene", "day")


@pytest.mark.parametrize(
    ("group", "name", "values", "match"),
    [
        ("posterior", "Z", xr.DataArray(np.zeros(2), dims="chain"), "no variable 'Z'"),
        ("sample_stats", "lp", xr.DataArray(np.zeros(2), dims="chain"), "has dimensions"),
        (
            "sample_stats",
            "diverging",
            xr.DataArray(np.zeros((2, 10)), dims=("chain", "draw")),
            "dtype float64",
        ),
    ],
)
def test_a_tree_of_another_kind_is_refused(group, name, values, match):
    tree = memory_tree(make_spec())
    tree[group] = xr.DataTree(tree[group].to_dataset().assign({name: values}))
    refused(StoreFormatError, match, validate, tree)


def test_a_tree_without_factors_is_refused():
    refused(StoreFormatError, "no factors", factor_dims, xr.DataTree.from_dict({"a": xr.Dataset()}))
