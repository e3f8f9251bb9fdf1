import json
from contextlib import contextmanager

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results import predictive_moments
from daskfactor.results.predict import monitored, predict
from daskfactor.runs.schema import RunSpec
from tests.models.laws import observation_interval
from tests.refusals import refused
from tests.results import runs
from tests.results.runs import ATTRS, CHAINS, DRAWS, I, factors, make_spec, memory_tree
from tests.tiers import FULL


def all_mu(n=DRAWS, salt=0):
    """mu of every draw of every chain, (chains * n, I, J), by the plainest loop."""
    pairs = (zip(*factors(chain, 0, n, salt=salt), strict=True) for chain in range(CHAINS))
    return np.array([w.astype("f8") @ h.T.astype("f8") for pair in pairs for w, h in pair])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return runs.store_run(tmp_path_factory.mktemp("prediction") / "run.zarr")


@pytest.fixture(params=["memory", "path"])
def trace(request, stored):
    return memory_tree(make_spec()) if request.param == "memory" else stored


@pytest.mark.parametrize("block", [2_000, 64 * 2**20])
def test_mean_and_quantiles_of_mu(trace, block, monkeypatch):
    monkeypatch.setattr(predictive_moments, "BLOCK_BYTES", block)
    found, mu = predict(trace, of="mean", interval=0.8), all_mu()
    assert found["mean"].dims == ("gene", "day")
    assert_allclose(found["mean"], mu.mean(0), rtol=1e-5)
    assert_allclose(found["sd"], mu.std(0), rtol=1e-4)
    for name, level in (("lower", 0.1), ("upper", 0.9)):
        assert_allclose(found[name], np.quantile(mu, level, axis=0), rtol=1e-5)
    assert found["gene"].values.tolist() == make_spec().labels["gene"].values.tolist()
    assert found["weight"].dims == ("gene",)
    assert found.attrs == {"of": "mean", "interval": 0.8}


def test_observations_add_the_noise(trace):
    found, mu = predict(trace, interval=0.9), all_mu()
    assert_allclose(found["sd"], np.sqrt(mu.var(0) + mu.mean(0)), rtol=1e-5)
    lower, upper = observation_interval(mu.mean(0), mu.var(0), 1.0, 1.0, 0.9)
    assert_allclose(found["lower"], lower)
    assert_allclose(found["upper"], upper)


@pytest.mark.parametrize("beta", [2.0, 0.5, 0.0])
def test_observations_follow_the_law_of_the_model(beta):
    model = json.dumps({"type": "TweedieNMF", "n_components": 2, "beta": beta})
    tree = memory_tree(make_spec(attrs={**ATTRS, "model": model, "dispersion": 0.3}))
    found, mu = predict(tree, interval=0.5).load(), all_mu()
    variance = mu.var(0) + 0.3 * mu.mean(0) ** (2 - beta)
    assert_allclose(found["sd"], np.sqrt(variance), rtol=1e-5)
    assert (found["lower"] < found["mean"]).all()
    assert (found["upper"] > found["lower"]).all()


def test_predictions_are_those_of_the_fine_chain():
    tree = memory_tree(make_spec(has_coarse=True))
    assert_allclose(predict(tree, of="mean").load()["mean"], all_mu().mean(0), rtol=1e-5)


def along(values, dims="p"):
    return xr.DataArray(values, dims=dims)


UNLABELLED = memory_tree(make_spec(dims=("row", "column"), coords={}))
SELECTIONS = {
    "label": ("g2", slice(None)),
    "labels": (["g4", "g0"], slice(None)),
    "slice": (slice("g1", "g3"), slice("2024-01-02", "2024-01-03")),
    "dates": (None, ["2024-01-05", "2024-01-01"]),
    "mask": (np.array([1, 0, 0, 0, 1, 0, 1], dtype=bool), None),
    "array": (np.array(["g5", "g5"]), np.array(["2024-01-04"], dtype="datetime64[D]")),
    "empty": ([], None),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_is_a_part_of_the_whole(trace, name):
    rows, columns = SELECTIONS[name]
    of = ("mean", "observation")[[*SELECTIONS].index(name) % 2]
    whole, part = predict(trace, of=of).load(), predict(trace, rows, columns, of=of)
    at = {dim: own for dim, own in (("gene", rows), ("day", columns)) if own is not None}
    expected = whole.isel(gene=rows) if name == "mask" else whole.sel(at)
    xr.testing.assert_allclose(part.load(), expected)


def test_unlabelled_data_are_selected_by_position():
    whole = predict(UNLABELLED, of="mean").load()
    assert not whole.coords
    for rows, columns in ((3, None), ([6, 0], slice(1, 3)), (slice(None, None, 2), -1)):
        part = predict(UNLABELLED, rows, columns, of="mean")
        expected = whole.isel(row=rows, column=slice(None) if columns is None else columns)
        xr.testing.assert_allclose(part.load(), expected)
    found = predict(UNLABELLED, along([0, 6, 0]), along([4, 1, 4]), of="mean").load()
    assert_allclose(found["upper"], whole["upper"].values[[0, 6, 0], [4, 1, 4]])
    assert found["row"].values.tolist() == [0, 6, 0]
    found = predict(UNLABELLED, along(np.isin(np.arange(I), [1, 4])), along([2, 0]), of="mean")
    assert_allclose(found["mean"], whole["mean"].values[[1, 4], [2, 0]], rtol=1e-6)
    assert predict(UNLABELLED, along([]), along([])).load().sizes == {"p": 0}


@pytest.mark.parametrize("of", ["mean", "observation"])
@pytest.mark.parametrize("block", [200, 64 * 2**20])
def test_two_arrays_with_one_dim_name_single_cells(trace, of, block, monkeypatch):
    whole, rng = predict(trace, of=of).load(), np.random.default_rng(0)
    monkeypatch.setattr(predictive_moments, "BLOCK_BYTES", block)
    genes, days = (rng.choice(whole[dim].values, 23) for dim in ("gene", "day"))
    rows = xr.DataArray(genes, {"held_out": range(23)}, "held_out")
    columns = along(days, "held_out")
    found = predict(trace, rows, columns, of=of)
    assert found["mean"].dims == ("held_out",)
    assert found["gene"].values.tolist() == rows.values.tolist()
    xr.testing.assert_allclose(found.load(), whole.sel(gene=rows, day=columns))


def test_unknown_cells_are_refused(trace):
    for rows, columns, match in (
        ("g9", None, "no 'g9' among the 7 labels of 'gene'"),
        (["g1", "g9", "x"], None, "no 'g9', 'x'"),
        (3, None, "no 3 among"),
        (None, "2030-01-01", "2030"),
        (np.ones(3, dtype=bool), None, "does not fit"),
        (np.zeros((2, 2)), None, "one-dimensional"),
        (along(["g1"]), along(["a", "b"]), "no 'a'"),
        (along(["g1"]), along(np.array(["2024-01-01"] * 2, "M8[ns]")), "equally long"),
        (along(["g1"]), along([["a"]], ("p", "q")), "same single"),
    ):
        refused(OptionError, match, predict, trace, rows, columns)


def test_options_positions_and_traces_that_do_not_serve_are_refused():
    tree, moments = (memory_tree(make_spec(keep=keep)) for keep in ("draws", "moments"))
    none = memory_tree(make_spec(monitor_rows=None, monitor_columns=None))
    refused(OptionError, '"observation" or "mean"', predict, tree, of="median")
    refused(OptionError, r"only moments.*keep=.draws", predict, moments)
    refused(
        StoreFormatError, "does not record its model", predict, memory_tree(make_spec(attrs={}))
    )
    for interval in (0, 1, -0.1, 90):
        refused(OptionError, "between 0 and 1", predict, tree, interval=interval)
    refused(OptionError, "monitored no cells", monitored, none)
    for rows, match in ((7, "0 to 6"), (-8, "0 to 6"), ("a", "no labels"), ([0.5], "no labels")):
        refused(OptionError, match, predict, UNLABELLED, rows)
    twice = memory_tree(make_spec(coords={"gene": list("aabcdef")}))
    refused(OptionError, "not unique", predict, twice, ["a", "b"])
    point = xr.Dataset({"W": (("x", "component"), np.ones((2, 1)))})
    point["H"] = (("component", "y"), np.ones((1, 3)))
    for verb in (predict, dfac.align, dfac.summarize, dfac.monitored):
        refused(OptionError, "point estimate of", verb, point)
        for wrong, name in ((None, "None"), (3, "int"), (np.ones(3), "ndarray")):
            refused(OptionError, f"path of its store, got {name}", verb, wrong)


@contextmanager
def counted():
    """Give the numbers of tasks of all that is computed meanwhile."""
    tasks = []

    def scheduler(dsk, keys, **kwargs):
        tasks.append(len(dsk.__dask_graph__()))
        return dask.get(dsk, keys, **kwargs)

    with dask.config.set(scheduler=scheduler):
        yield tasks


@pytest.mark.parametrize("of", ["mean", "observation"])
def test_nothing_is_computed_until_asked(trace, of):
    with counted() as tasks:
        found = predict(trace, of=of)
        single = found.isel(gene=0, day=slice(2))
        assert not tasks
        for name in ("mean", "sd", "lower", "upper"):
            assert isinstance(found[name].data, da.Array)
        single.compute()
        assert len(tasks) == 1


def test_blocks_are_small_and_cells_not_asked_for_cost_nothing():
    W, Ht = (np.ones((1, 40, size, 2), dtype="f4") for size in (3_000, 2_000))
    spec = RunSpec(shape=(3_000, 2_000, 2), chains=1, draws=40, attrs=ATTRS)
    mean = predict(runs.tree_of(spec, {"posterior": {"W": W, "H": Ht}}), of="mean")["mean"]
    assert max(mean.chunks[0]) * max(mean.chunks[1]) * 40 * 4 <= 64 * 2**20
    assert mean.data.npartitions <= 40
    with counted() as tasks:
        for part in (mean[:2, :2], mean):
            part.compute()
    assert tasks[0] < tasks[1] / 5


SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 20))


@settings(max_examples=30 if FULL else 15)
@given(shape=SHAPES, block=st.integers(1, 4_000), draws=st.integers(1, 12))
def test_any_blocking_gives_the_same_numbers(shape, block, draws):
    rng = np.random.default_rng(0)
    W, Ht = (rng.random((2, draws, size, 2)) for size in shape)
    spec = RunSpec(shape=(*shape, 2), chains=2, draws=draws, dtype="float64", attrs=ATTRS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictive_moments, "BLOCK_BYTES", block)
        found = predict(runs.tree_of(spec, {"posterior": {"W": W, "H": Ht}}), of="mean")
        chunks = found["mean"].chunks
        assert max(chunks[0]) * max(chunks[1]) <= max(1, block // (2 * draws * 8))
        corner = found.isel(row=slice(-3, None), column=slice(-3, None)).load(scheduler="sync")
    mu = np.einsum("sdik,sdjk->sdij", W[:, :, -3:], Ht[:, :, -3:]).reshape(2 * draws, -1)
    assert_allclose(corner["mean"].values.ravel(), mu.mean(0))
    assert_allclose(corner["sd"].values.ravel(), mu.std(0), atol=1e-12)
    assert_allclose(corner["upper"].values.ravel(), np.quantile(mu, 0.95, axis=0))


def test_single_cells_by_a_mask_and_none_at_all(trace):
    rows, columns = along(["g1", "g4"]), along(predict(trace)["day"].values[[2, 0]])
    mask = xr.DataArray(np.isin(np.arange(I), [1, 4]), {"p": np.arange(I)}, "p")
    expected, found = (predict(trace, at, columns) for at in (rows, mask))
    assert_array_equal(found["mean"], expected["mean"])
    assert (found.sizes, found["gene"].values.tolist()) == ({"p": 2}, ["g1", "g4"])
    assert found["p"].values.tolist() == [1, 4]
    none = predict(trace, along([]), along([])).load()
    assert (none.sizes, none["mean"].dims) == ({"p": 0}, ("p",))
    refused(OptionError, "does not fit", predict, trace, mask[:-1], columns)


def test_monitored_cells_pool_within_and_between_chains(trace):
    spec = make_spec()
    mu = all_mu()[:, spec.monitor_rows, spec.monitor_columns]
    found, noisy = monitored(trace, of="mean"), monitored(trace)
    assert_allclose(found["mean"], mu.mean(0), rtol=1e-5)
    assert_allclose(found["sd"], mu.std(0), rtol=1e-5)
    assert found["gene"].values.tolist() == ["g0", "g3", "g3"]
    assert found["row_index"].values.tolist() == [0, 3, 3]
    assert (found["lower"] < found["mean"]).all()
    assert_allclose(noisy["sd"], np.sqrt(mu.var(0) + mu.mean(0)), rtol=1e-5)
    pointwise = predict(trace, *(along(found[dim].values, "cell") for dim in ("gene", "day")))
    for name in ("mean", "sd", "lower", "upper"):
        assert_allclose(noisy[name], pointwise[name], rtol=1e-4)


def test_monitored_chains_of_unequal_length_are_weighted():
    spec = make_spec(chains=3)
    columns = np.array([[1.0, 4.0, np.nan], [2.0, 3.0, np.nan]])[:, :, None]
    mean, var = np.tile(columns, spec.n_monitor)
    values = {"mean": mean, "var": var, "count": np.array([1, 3, 0])}
    found = monitored(runs.tree_of(spec, {"monitor": values}), of="mean")
    assert_allclose(found["mean"], 13 / 4)
    between = (1 - 13 / 4) ** 2 / 4 + 3 * (4 - 13 / 4) ** 2 / 4
    assert_allclose(found["sd"] ** 2, (2 + 9) / 4 + between)


def test_monitored_interval_of_the_mean_is_gamma_or_normal():
    values = {"mean": np.full((CHAINS, 3), 2.0), "var": np.tile([0.0, 4.0, 4.0], (CHAINS, 1))}
    values["count"] = np.full(CHAINS, 9)
    real = {**ATTRS, "model": json.dumps({"type": "GaussianMF", "n_components": 2})}
    trees = (runs.tree_of(make_spec(attrs=own), {"monitor": values}) for own in (ATTRS, real))
    positive, normal = (monitored(tree, of="mean", interval=0.9) for tree in trees)
    # Gamma with shape 1 is exponential: quantiles -m log(1 - p).
    for name, tail in (("lower", 0.95), ("upper", 0.05)):
        assert_allclose(positive[name], [2, *[-2 * np.log(tail)] * 2])
    assert_allclose(normal["lower"][1:], 2 - 2 * 1.6448536269514722)


def test_a_label_of_many_rows_names_all_of_them():
    labels = ["a", "b", "a", "c", "a", "d", "e"]
    specs = (make_spec(coords={"gene": own}) for own in (labels, sorted(labels)))
    tree, in_order = map(memory_tree, specs)
    found = predict(tree, rows="a", of="mean")
    assert found["mean"].dims == ("gene", "day")
    assert_allclose(found["mean"], predict(tree, of="mean")["mean"].values[[0, 2, 4]], rtol=1e-6)
    assert predict(tree, rows="b", of="mean")["mean"].dims == ("day",)
    for one in (found, predict(in_order, rows="a", of="mean")):
        assert one["gene"].values.tolist() == ["a", "a", "a"]
