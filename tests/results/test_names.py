"""The user's names of dimensions and coordinates go in and out whatever they are."""

import itertools

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import DataWarning, OptionError
from daskfactor.results.schema import beside, factor_dims, own_names
from daskfactor.results.store import RunStore
from daskfactor.results.trace import as_tree
from tests.refusals import refused
from tests.results.runs import I, J, fill, make_spec, memory_tree
from tests.results.validation import REGISTRY

OURS = sorted(
    {variable.name for variable in REGISTRY}
    | {dim for variable in REGISTRY for dim in variable.dims if "{" not in dim}
    | {variable.group for variable in REGISTRY}
    | {"row_index", "column_index", "mean", "sd", "lower", "upper", "iteration"}
    | {"permutation", "factor", "similarity", "share", "share_by_chain", "alignment"}
    | {"functional", "kind", "rhat", "rank", "label", "value", "score", "particle", "distance"}
    | {"obs", "var", "row", "column", "x", "x_", "chain_", "var_", "mean_"}
    | {"", "a/b", "a\\b", "a_b", "..", "zarr.json", "x" * 300, "mean/"}
)
PAIRS = [*itertools.pairwise(OURS), (OURS[-1], OURS[0])]
pytestmark = [
    pytest.mark.libraries,
    pytest.mark.filterwarnings("ignore:the results have names of their own:UserWarning"),
]
QUICK = {"draws": 3, "tune": 2, "random_seed": 0, "progressbar": False}


def matrix(row, column, **coords):
    V = np.random.default_rng(0).poisson(3.0, (I, J)) + 1.0
    labels = {row: [f"g{i}" for i in range(I)], column: np.arange(J) * 10} | coords
    return xr.DataArray(V, labels, (row, column))


def spec_of(row, column, extra=None):
    coords = {row: [f"g{i}" for i in range(I)], column: np.arange(J) * 10}
    coords |= {} if extra is None else {extra: (row, np.linspace(0, 1, I))}
    V = np.arange(35.0).reshape(I, J)
    return make_spec(dims=(row, column), coords=coords, observed=V, has_coarse=True)


def check_tree(tree, spec, ordinary):
    """Its values are those of the same run with ordinary names, and its labels the user's."""
    for group, node in ordinary.children.items():
        assert set(tree[group].data_vars) == set(node.data_vars)
        for name, array in node.data_vars.items():
            assert_array_equal(tree[group][name].values, array.values)
    inner = factor_dims(tree)
    names = own_names(tree)
    assert tuple(names.get(dim, dim) for dim in inner) == spec.dims
    for dim in inner:
        assert_array_equal(tree["posterior"][dim].values, spec.labels[names.get(dim, dim)].values)


def check_readings(trace, spec):
    row, column = spec.dims
    predicted = dfac.predict(trace, rows=["g3", "g1"], of="mean")
    shown = beside([row, column], {"mean", "sd", "lower", "upper"})
    assert predicted["mean"].dims == (shown[row], shown[column])
    assert predicted[shown[row]].values.tolist() == ["g3", "g1"]
    assert predicted[shown[column]].values.tolist() == list(range(0, 10 * J, 10))
    points = {
        "rows": xr.DataArray(["g3", "g1"], dims="mean"),
        "columns": xr.DataArray([20, 0], dims="mean"),
    }
    cells = dfac.predict(trace, **points, of="mean")
    expected = predicted["mean"].values[[0, 1], [2, 0]]
    assert_allclose(cells["mean"].values, expected, rtol=1e-6)
    told = dfac.monitored(trace, of="mean")
    assert told["mean"].dims == ("cell",)
    inside = beside(
        [row, column], {"mean", "sd", "lower", "upper", "cell"} | {"row_index", "column_index"}
    )
    assert_array_equal(told[inside[row]].values, ["g0", "g3", "g3"])
    assert_array_equal(told[inside[column]].values, [10, 10, 40])
    aligned = dfac.align(trace)
    assert factor_dims(aligned) == factor_dims(as_tree(trace))
    again = dfac.align(trace, aligned)
    assert np.isfinite(again["posterior_moments"]["W_mean"].values).all()
    assert_allclose(
        dfac.predict(aligned, of="mean")["mean"].values,
        dfac.predict(trace, of="mean")["mean"].values,
        rtol=1e-5,
    )
    assert np.isfinite(dfac.summarize(trace, cells=2)["mean"].values).all()
    assert dfac.top_entries(trace, 2)["label"].values[0, 0, 0, 0].startswith("g")


@pytest.fixture(scope="module")
def ordinary():
    return memory_tree(spec_of("gene", "day"))


@pytest.mark.parametrize(("row", "column"), [("chain", "W"), ("cell", "mean"), ("row_index", "")])
def test_no_name_is_in_the_way_of_readings(tmp_path, row, column, ordinary):
    spec = spec_of(row, column)
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    stored, kept = dfac.open_run(tmp_path / "run.zarr"), memory_tree(spec)
    xr.testing.assert_identical(stored.load(), kept)
    check_tree(stored, spec, ordinary)
    check_readings(tmp_path / "run.zarr", spec)


def test_no_name_is_in_the_way_of_a_tree(ordinary):
    for row, column in PAIRS:
        spec = spec_of(row, column)
        check_tree(memory_tree(spec), spec, ordinary)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(OURS), min_size=3, max_size=3, unique=True))
def test_no_further_coordinate_is_in_the_way(ordinary, names):
    row, column, extra = names
    spec = spec_of(row, column, extra)
    tree = memory_tree(spec)
    check_tree(tree, spec, ordinary)
    shown = beside(names, {"mean", "sd", "lower", "upper"})
    picked = dfac.predict(tree, rows="g3", of="mean")
    assert picked["mean"].dims == (shown[column],)
    assert float(picked[shown[extra]]) == pytest.approx(0.5)


def with_a_gap(row, column):
    V = matrix(row, column)
    V[2, 3] = np.nan
    return V


@pytest.fixture(scope="module")
def usual():
    return dfac.sample(with_a_gap("a", "b"), dfac.TweedieNMF(2), **QUICK)


@pytest.mark.parametrize("name", ["mean", "..", "x" * 300])
def test_runs_take_any_name(tmp_path, name, usual):
    V = with_a_gap(name, "day")
    path = tmp_path / "run.zarr"
    trace = dfac.sample(V, dfac.TweedieNMF(2), monitor="missing", store=path, **QUICK)
    assert_array_equal(trace["posterior"]["W"], usual["posterior"]["W"])
    longer = dfac.resume(path, draws=2, progressbar=False)
    assert longer["posterior"].sizes["draw"] == 5
    assert dfac.monitored(path)["row_index"].values.tolist() == [2]
    point = dfac.optimize(V, dfac.TweedieNMF(2), random_seed=0, progressbar=False)
    assert point["W"].shape == (I, 2)
    dfac.align(trace, point)
    shown = beside([name], {"mean"})[name]
    assert dfac.predict(path, rows=["g1"])["mean"].dims == (shown, "day")
    dfac.summarize(path, cells=2)
    assert dfac.hold_out(V, 0.2, random_seed=0)[0].shape == V.shape


def test_one_note_says_what_is_called_otherwise():
    with pytest.warns(DataWarning, match="'component' is 'component_'.*gives it back") as all_:
        trace = dfac.sample(matrix("component", "a/b"), dfac.TweedieNMF(2), **QUICK)
    assert [str(one.message).count("is 'a_b'") for one in all_] == [1]
    assert trace["posterior"]["W"].dims == ("chain", "draw", "component_", "component")
    assert dfac.predict(trace)["mean"].dims == ("component", "a/b")


@pytest.mark.filterwarnings("ignore:Duplicate dimension names:UserWarning")
def test_rows_and_columns_of_one_name():
    pandas = pytest.importorskip("pandas")
    index = pandas.MultiIndex.from_product([["a", "b"], range(3)], names=["block", "part"])
    V = pandas.DataFrame(matrix("a", "b").values[:6, :4] @ np.ones((4, 6)), index, index)
    with pytest.warns(DataWarning, match="'block' of one is 'block_', 'part' of one is 'part_'"):
        trace = dfac.sample(V, dfac.TweedieNMF(2), **QUICK)
    assert {"block", "part", "block_", "part_"} <= set(trace["posterior"].coords)
    twice = xr.DataArray(V.values, {"x": np.arange(6) * 2}, ("x", "x"))
    with pytest.warns(DataWarning, match="'x' of one is 'x_'"):
        trace = dfac.sample(twice, dfac.TweedieNMF(2), **QUICK)
    assert dfac.predict(trace, rows=4, columns=[0, 2])["mean"].dims == ("x_",)


def test_new_columns_and_single_cells_may_have_slashes_in_their_names():
    V = matrix("a b", "c/d", **{"e/f": ("a b", np.arange(I))})
    trace = dfac.sample(V, dfac.TweedieNMF(2), **QUICK)
    cells = dfac.log_likelihood(trace, ([0, 2], [1, 1]))["log_likelihood"]
    assert cells["c_d"].values.tolist() == [10, 10]
    assert cells["e_f"].values.tolist() == [0, 2]
    new = dfac.transform(trace, V[:, :2], axis="column", random_seed=0, progressbar=False)
    found = dfac.predict(trace, columns=new)
    assert found["mean"].dims == ("a b", "c/d")
    assert found["c/d"].values.tolist() == [0, 10]
    with pytest.raises(OptionError, match=r"new\.isel\(\{'c/d': \[0\]\}\)"):
        dfac.predict(trace, columns=new.isel({"c/d": 0}))
    with pytest.raises(OptionError, match="has draws; pass the whole trace"):
        dfac.transform(trace["posterior"].to_dataset(), V, progressbar=False)
    with pytest.raises(OptionError, match="has draws; pass the whole trace"):
        dfac.recommend(trace["posterior"].to_dataset())
    refused(OptionError, r"a trace is the result of .* got DataArray", dfac.report, V, "page.html")
