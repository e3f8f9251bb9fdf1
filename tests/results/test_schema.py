import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.errors import DataError, StoreFormatError
from daskfactor.results.schema import CHUNK_BYTES, RunSpec, factor_dims, layouts, storable_names
from tests.refusals import refused
from tests.results.runs import I, make_spec, memory_tree
from tests.results.validation import REGISTRY, validate

pytestmark = pytest.mark.libraries


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
