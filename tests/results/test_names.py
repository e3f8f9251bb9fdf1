"""The user's names of dimensions and coordinates go in and out whatever they are."""

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.runs.schema import factor_dims
from tests.data.test_stacking import cube
from tests.refusals import refused
from tests.results.runs import I, J

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*have no observed entry and are left out"),
]
TWO = dfac.TweedieNMF(2)
QUICK = {"draws": 3, "tune": 2, "random_seed": 0, "progressbar": False}


def named(row, column):
    return {row: [f"g{i}" for i in range(I)], column: np.arange(J) * 10}


def matrix(row, column, **coords):
    V = np.random.default_rng(0).poisson(3.0, (I, J)) + 1.0
    return xr.DataArray(V, named(row, column) | coords, (row, column))


def with_a_gap(row, column):
    return matrix(row, column).where(np.arange(I * J).reshape(I, J) != 2 * J + 3)


@pytest.mark.quick("mean")
@pytest.mark.parametrize("name", ["component", "mean", "a/b", "..", "", "x" * 300])
def test_names_of_results_are_refused_with_the_call_that_renames(name):
    refused(DataError, r"dimension of the name .*V\.rename", dfac.sample, matrix(name, "day"), TWO)
    stacked = matrix("a", "day").expand_dims({name: 2})
    refused(DataError, "rename", dfac.sample, stacked, TWO, rows="a")
    with pytest.warns(DataWarning, match=r"the coordinate .* is left out"):
        data = dfac.as_blocks(matrix("a", "b", **{name: ("a", np.arange(I))}))
    assert name not in data.labels.coords


def test_tables_with_such_names_have_the_usual_ones():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(np.ones((3, 2)), pandas.Index(list("abc"), name="position"))
    assert dfac.as_blocks(table).labels.row_dim == "row"
    table.index.name = "date/time"
    assert dfac.as_blocks(table).labels.coords["row"][1].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("names", [("obs", "var"), ("cell", "var")])
def test_names_of_annotated_data_are_possible(tmp_path, names):
    V, path = with_a_gap(*names), tmp_path / "run.zarr"
    trace = dfac.sample(V, TWO, monitor="missing", store=path, **QUICK)
    assert trace["posterior"]["W"].dims == ("chain", "draw", names[0], "component")
    assert dfac.resume(path, draws=2, progressbar=False)["posterior"].sizes["draw"] == 5
    for tree in (path, dfac.sample(V, TWO, monitor="missing", **QUICK)):
        told = dfac.monitored(tree)
        assert (told[names[0]].item(), told["var"].item()) == ("g2", 30)
        assert (told["row_index"].item(), told["column_index"].item()) == (2, 3)
        assert dfac.predict(tree, rows=["g1"])["mean"].dims == names
        cells = dfac.log_likelihood(tree, ([0, 2], [1, 1]), [1.0, 2.0])["log_likelihood"]
        assert cells[names[0]].values.tolist() == ["g0", "g2"]


@pytest.mark.filterwarnings("ignore:Duplicate dimension names:UserWarning")
def test_rows_and_columns_of_one_name():
    pandas = pytest.importorskip("pandas")
    index = pandas.MultiIndex.from_product([["a", "b"], range(3)], names=["block", "part"])
    V = pandas.DataFrame(matrix("a", "b").values[:6, :4] @ np.ones((4, 6)), index, index)
    with pytest.warns(DataWarning, match="'block' of one is 'block_', 'part' of one is 'part_'"):
        trace = dfac.sample(V, TWO, **QUICK)
    assert {"block", "part", "block_", "part_"} <= set(trace["posterior"].coords)
    twice = xr.DataArray(V.values, {"x": np.arange(6) * 2}, ("x", "x"))
    with pytest.warns(DataWarning, match="'x' of one is 'x_'"):
        trace = dfac.sample(twice, TWO, **QUICK)
    assert dfac.predict(trace, rows=4, columns=[0, 2])["mean"].dims == ("x_",)


def test_new_columns_and_single_cells_have_their_names():
    V = matrix("a b", "c.d", **{"e f": ("a b", np.arange(I))})
    trace, quiet = dfac.sample(V, TWO, **QUICK), {"progressbar": False}
    cells = dfac.log_likelihood(trace, ([0, 2], [1, 1]))["log_likelihood"]
    assert (cells["c.d"].values.tolist(), cells["e f"].values.tolist()) == ([10, 10], [0, 2])
    new = dfac.transform(trace, V[:, :2], axis="column", random_seed=0, **quiet)
    found = dfac.predict(trace, columns=new)
    assert (found["mean"].dims, found["c.d"].values.tolist()) == (("a b", "c.d"), [0, 10])
    match, one = r"new\.isel\(\{'c\.d': \[0\]\}\)", new.isel({"c.d": 0})
    refused(OptionError, match, dfac.predict, trace, columns=one)
    points = [xr.DataArray([0], dims="mean")] * 2
    refused(OptionError, "with a name that results do not use", dfac.predict, trace, *points)
    part, match = trace["posterior"].to_dataset(), "has draws; pass the complete trace"
    refused(OptionError, match, dfac.transform, part, V, **quiet)
    refused(OptionError, match, dfac.recommend, part)
    refused(OptionError, r"a trace is the result of .* got DataArray", dfac.report, V, "page.html")


MAPPED = QUICK | {"draws": 6, "tune": 4}


@pytest.fixture(scope="module")
def V():
    found = cube(land=0.4)
    found[:, 2, :] = np.nan  # a line of nothing but land
    names = {"region": ("lat", list("abcd")), "zone": (("lon", "lat"), np.arange(20).reshape(5, 4))}
    found["area"].attrs["units"] = "km2"
    return found.assign_coords(names)


@pytest.fixture(scope="module")
def mapped(tmp_path_factory, V):
    path = tmp_path_factory.mktemp("maps") / "run.zarr"
    dfac.sample(V, TWO, rows="time", monitor="missing", store=path, **MAPPED)
    return path


def test_components_are_maps_with_all_labels_in_their_order(mapped, V):
    trace, seen = dfac.open_run(mapped), V.notnull().any("time")
    H = trace["posterior"]["H"]
    assert H.dims == ("chain", "draw", "component", "lat_lon")
    whole = (dfac.unstack(own)["posterior"]["H"] for own in (trace, mapped))
    for maps in (dfac.unstack(H), *whole):
        assert maps.dims == ("chain", "draw", "component", "lat", "lon")
        assert maps.chunks is not None
        assert_array_equal(maps["lat"], V["lat"])
        assert_array_equal(maps["lon"], V["lon"])
        assert (maps.notnull() == seen).all()
        area = V["area"].where(seen)
        xr.testing.assert_equal(maps["area"].variable, area.transpose("lat", "lon").variable)
        for position in range(H.sizes["lat_lon"]):
            one = H.isel(lat_lon=position)
            there = maps.sel(lat=float(one["lat"]), lon=float(one["lon"]))
            assert_array_equal(there.values, one.values)
    own = H.unstack("lat_lon")  # xarray's own way, without the line of land
    assert_array_equal(own, dfac.unstack(H).sel(lat=own["lat"], lon=own["lon"]))
    mean = dfac.unstack(H.mean(("chain", "draw")))
    assert mean.sizes == {"component": 2, "lat": 4, "lon": 5}


def test_runs_in_memory_points_and_stacked_rows_have_maps_too(mapped, V):
    trace = dfac.sample(V, TWO, rows="time", **MAPPED)
    stored, kept = (dfac.unstack(own)["posterior"].to_dataset().load() for own in (mapped, trace))
    for name in ("H", "lat"):
        assert_array_equal(kept[name], stored[name])
    point = dfac.optimize(V, TWO, rows="time", random_seed=0, progressbar=False)
    assert dfac.unstack(point)["H"].sizes == {"component": 2, "lat": 4, "lon": 5}
    dfac.align(trace, point)
    turned = dfac.sample(V.fillna(1.0), TWO, rows=("lat", "time"), **MAPPED)
    maps = dfac.unstack(turned)["posterior"]["W"]
    assert maps.dims == ("chain", "draw", "lat", "time", "component")
    assert dfac.predict(turned)["mean"].dims == ("lat", "time", "lon")


def test_uncertainties_of_predicted_cells_may_be_maps(V):
    sigma = xr.full_like(V, 0.5) + xr.DataArray(np.arange(V.sizes["lat"]), dims="lat")
    model = dfac.TweedieNMF(2, beta=2.0)
    trace = dfac.sample(V, model, rows="time", uncertainty=sigma, **MAPPED)
    own = dfac.predict(trace)
    shuffled = sigma.transpose().isel(lat=slice(None, None, -1)).assign_coords(lat=sigma.lat[::-1])
    xr.testing.assert_allclose(dfac.predict(trace, uncertainty=shuffled)["sd"], own["sd"])
    twice = dfac.predict(trace, uncertainty=2 * sigma)["sd"]
    assert (twice > own["sd"]).sum() == own["sd"].notnull().sum() > 0
    with pytest.raises(DataError, match="or a DataArray with their dimensions"):
        dfac.predict(trace, uncertainty=sigma.values)


def test_predictions_are_maps(mapped, V):
    found = dfac.predict(mapped)
    assert found["mean"].dims == ("time", "lat", "lon")
    assert (found["sd"].notnull().any("time") == V.notnull().any("time")).all()

    def mean(**cells):
        return dfac.predict(mapped, **cells)["mean"]

    part = mean(columns={"lat": slice(60, 20), "lon": 20.0})
    assert part.dims == ("time", "lat")
    assert_array_equal(part, found["mean"].sel(lat=slice(60, 20), lon=20.0))
    assert mean(columns={"lat": 20.0}).isnull().all()
    day = mean(rows={"time": "2001-01-02"}, columns={"lon": [20.0, 10.0]})
    assert day["lon"].values.tolist() == [20.0, 10.0]
    for wrong, told in (({"lat": 41.0}, "no 41.0 among"), ({"la": 40.0}, "'lat', 'lon'")):
        refused(OptionError, told, dfac.predict, mapped, columns=wrong)


def test_everything_after_takes_the_run(mapped, V):
    longer = dfac.resume(mapped, V=V, draws=2, progressbar=False)
    assert "lat_lon" in longer["posterior"].indexes
    aligned = dfac.align(mapped)
    assert factor_dims(aligned) == ("time", "lat_lon")
    assert dfac.unstack(aligned)["posterior_moments"]["H_mean"].dims[-2:] == ("lat", "lon")
    assert dfac.predict(aligned)["mean"].dims == ("time", "lat", "lon")
    dfac.summarize(mapped, cells=2)
    assert {"lat", "lon", "time"} <= set(dfac.monitored(mapped).coords)
    refused(OptionError, "pass the run before unstack", dfac.predict, dfac.unstack(mapped))
    refused(OptionError, "got ndarray", dfac.unstack, V.values)


def test_an_array_that_was_stacked_comes_back_as_it_was(tmp_path, V):
    stacked = V.stack(cell=("lat", "lon")).dropna("cell", how="all")
    path, grid = tmp_path / "run.zarr", stacked.unstack("cell").sizes
    trace = dfac.sample(stacked, TWO, store=path, **MAPPED)
    again = dfac.resume(path, draws=2, progressbar=False)
    kept = dfac.sample(stacked, TWO, **MAPPED)
    for tree in (trace, again, dfac.open_run(path), dfac.align(path), kept):
        assert tree["posterior"].indexes["cell"].equals(stacked.indexes["cell"])
        assert tree["posterior"]["H"].unstack("cell").sizes["lon"] == grid["lon"]
    found = dfac.predict(path)["mean"]
    assert found.dims == ("time", "cell")
    assert found.indexes["cell"].equals(stacked.indexes["cell"])
    assert found.unstack("cell").sizes == grid


def test_cells_and_values_go_by_the_labels_of_maps(mapped, V):
    turned = V[:, ::-1, ::-1].transpose("lon", "time", "lat")
    own, other = (dfac.log_likelihood(mapped, one.notnull(), one) for one in (V, turned))
    for group in ("log_likelihood", "observed_data"):
        xr.testing.assert_equal(own[group].to_dataset(), other[group].to_dataset())
    for cell in (0, 7, -1):
        one = own["observed_data"]["V"][cell]
        assert float(V.sel({d: one[d].values for d in ("time", "lat", "lon")})) == float(one)
    match = "cells lack some labels of the run along 'lat', 'lon'"
    refused(OptionError, match, dfac.log_likelihood, mapped, V.notnull()[:, 1:], V)
    refused(DataError, "V has no value at", dfac.log_likelihood, mapped, V.notnull(), V[:, 1:])


def test_places_are_recommended_and_asked_for_by_their_labels(mapped, V):
    best, H = dfac.recommend(mapped, n=2), dfac.open_run(mapped)["posterior"]["H"]
    for name in ("lat", "lon"):
        assert_array_equal(best[name], H[name].values[best["position"]])
    label = H["lat_lon"].values[3]
    wanted = dfac.predict(mapped).sel({"lat": label[0], "lon": label[1]})["mean"]
    for key in (label, [label], [label, H["lat_lon"].values[0]]):
        found = dfac.predict(mapped, columns=key)["mean"]
        assert_allclose(found.values.reshape(len(wanted), -1)[:, 0], wanted, 1e-6)
    with pytest.raises(OptionError, match=r"there is no \(99\.0, 0\.0\) among .* lat, lon, such"):
        dfac.predict(mapped, columns=[(99.0, 0.0)])
