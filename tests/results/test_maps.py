"""Results of arrays of many dimensions are maps again, under the labels of the data."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError
from daskfactor.results.schema import factor_dims
from tests.data.test_folding import cube
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:.*have no observed entry and are left out")
QUICK = {"draws": 6, "tune": 4, "random_seed": 0, "progressbar": False}
MODEL = dfac.TweedieNMF(2)


@pytest.fixture(scope="module")
def V():
    found = cube(land=0.4)
    found[:, 2, :] = np.nan  # a line of nothing but land
    names = {"region": ("lat", list("abcd")), "zone": (("lon", "lat"), np.arange(20).reshape(5, 4))}
    found["area"].attrs["units"] = "km2"
    return found.assign_coords(names)


@pytest.fixture(scope="module")
def run(tmp_path_factory, V):
    path = tmp_path_factory.mktemp("maps") / "run.zarr"
    dfac.sample(V, MODEL, rows="time", monitor="missing", store=path, **QUICK)
    return path


def test_components_are_maps_with_all_labels_in_their_order(run, V):
    trace = dfac.open_run(run)
    H = trace["posterior"]["H"]
    assert H.dims == ("chain", "draw", "component", "lat_lon")
    for maps in (
        dfac.unstack(trace)["posterior"]["H"],
        dfac.unstack(H),
        dfac.unstack(run)["posterior"]["H"],
    ):
        assert maps.dims == ("chain", "draw", "component", "lat", "lon")
        assert maps.chunks is not None
        assert_array_equal(maps["lat"], V["lat"])
        assert_array_equal(maps["lon"], V["lon"])
        seen = V.notnull().any("time")
        assert (maps.notnull() == seen).all()
        for name in ("area", "region", "zone"):  # of land, too, and on their own dimensions
            xr.testing.assert_identical(maps[name].variable, V[name].variable)
        for position in range(H.sizes["lat_lon"]):
            one = H.isel(lat_lon=position)
            there = maps.sel(lat=float(one["lat"]), lon=float(one["lon"]))
            assert_array_equal(there.values, one.values)
    own = H.unstack("lat_lon")  # xarray's own way, without the line of land
    assert_array_equal(own, dfac.unstack(H).sel(lat=own["lat"], lon=own["lon"]))
    mean = dfac.unstack(H.mean(("chain", "draw")))
    assert mean.sizes == {"component": 2, "lat": 4, "lon": 5}


def test_a_run_in_memory_and_a_point_have_maps_too(run, V):
    trace = dfac.sample(V, MODEL, rows="time", **QUICK)
    stored = dfac.unstack(run)["posterior"].to_dataset().load()
    kept = dfac.unstack(trace)["posterior"].to_dataset()
    assert_array_equal(kept["H"], stored["H"])
    assert_array_equal(kept["lat"], stored["lat"])
    point = dfac.optimize(V, MODEL, rows="time", random_seed=0, progressbar=False)
    assert dfac.unstack(point)["H"].sizes == {"component": 2, "lat": 4, "lon": 5}
    dfac.align(trace, point)


def test_uncertainties_of_predicted_cells_may_be_maps(V):
    sigma = xr.full_like(V, 0.5) + xr.DataArray(np.arange(V.sizes["lat"]), dims="lat")
    model = dfac.TweedieNMF(2, beta=2.0)
    trace = dfac.sample(V, model, rows="time", uncertainty=sigma, **QUICK)
    own = dfac.predict(trace)
    shuffled = sigma.transpose().isel(lat=slice(None, None, -1)).assign_coords(lat=sigma.lat[::-1])
    xr.testing.assert_allclose(dfac.predict(trace, uncertainty=shuffled)["sd"], own["sd"])
    twice = dfac.predict(trace, uncertainty=2 * sigma)["sd"]
    assert (twice > own["sd"]).sum() == own["sd"].notnull().sum() > 0
    with pytest.raises(DataError, match="or a DataArray with their dimensions"):
        dfac.predict(trace, uncertainty=sigma.values)


def test_predictions_are_maps(run, V):
    found = dfac.predict(run)
    assert found["mean"].dims == ("time", "lat", "lon")
    assert (found["sd"].notnull().any("time") == V.notnull().any("time")).all()
    part = dfac.predict(run, columns={"lat": slice(60, 20), "lon": 20.0})["mean"]
    assert part.dims == ("time", "lat")
    assert_array_equal(part, found["mean"].sel(lat=slice(60, 20), lon=20.0))
    assert dfac.predict(run, columns={"lat": 20.0})["mean"].isnull().all()
    day = dfac.predict(run, rows={"time": "2001-01-02"}, columns={"lon": [20.0, 10.0]})["mean"]
    assert day["lon"].values.tolist() == [20.0, 10.0]
    for wrong, told in (({"lat": 41.0}, "no 41.0 among"), ({"la": 40.0}, "'lat', 'lon'")):
        refused(OptionError, told, dfac.predict, run, columns=wrong)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_cell_by_label_is_the_cell_by_position(run, V, data):
    kept = dfac.open_run(run)["posterior"].indexes["lat_lon"]
    j = data.draw(st.integers(0, len(kept) - 1))
    i = data.draw(st.integers(0, 6))
    lat, lon = kept[j]
    by_label = dfac.predict(run, V["time"].values[i], {"lat": lat, "lon": lon}).load()
    by_position = dfac.predict(run, V["time"].values[i], [j]).load()
    for name in ("mean", "sd", "lower", "upper"):
        assert by_label[name].item() == by_position[name].item()


def test_everything_after_takes_the_run(run, V):
    longer = dfac.resume(run, V=V, draws=2, progressbar=False)
    assert "lat_lon" in longer["posterior"].indexes
    aligned = dfac.align(run)
    assert factor_dims(aligned) == ("time", "lat_lon")
    assert dfac.unstack(aligned)["posterior_moments"]["H_mean"].dims[-2:] == ("lat", "lon")
    assert dfac.predict(aligned)["mean"].dims == ("time", "lat", "lon")
    dfac.summarize(run, cells=2)
    assert {"lat", "lon", "time"} <= set(dfac.monitored(run).coords)
    refused(OptionError, "pass the run as it was before", dfac.predict, dfac.unstack(run))
    refused(OptionError, "got ndarray", dfac.unstack, V.values)


def test_an_array_that_was_stacked_comes_back_as_it_was(tmp_path, V):
    stacked = V.stack(cell=("lat", "lon")).dropna("cell", how="all")
    path, grid = tmp_path / "run.zarr", stacked.unstack("cell").sizes
    trace = dfac.sample(stacked, MODEL, store=path, **QUICK)
    again = dfac.resume(path, draws=2, progressbar=False)
    for tree in (
        trace,
        again,
        dfac.open_run(path),
        dfac.align(path),
        dfac.sample(stacked, MODEL, **QUICK),
    ):
        assert tree["posterior"].indexes["cell"].equals(stacked.indexes["cell"])
        assert tree["posterior"]["H"].unstack("cell").sizes["lon"] == grid["lon"]
    found = dfac.predict(path)["mean"]
    assert found.dims == ("time", "cell")
    assert found.indexes["cell"].equals(stacked.indexes["cell"])
    assert found.unstack("cell").sizes == grid


def test_rows_may_be_stacked_as_well(V):
    trace = dfac.sample(V.fillna(1.0), MODEL, rows=("lat", "time"), **QUICK)
    maps = dfac.unstack(trace)["posterior"]["W"]
    assert maps.dims == ("chain", "draw", "lat", "time", "component")
    assert dfac.predict(trace)["mean"].dims == ("lat", "time", "lon")


def test_cells_and_values_go_by_the_labels_of_maps(run, V):
    turned = V[:, ::-1, ::-1].transpose("lon", "time", "lat")
    own = dfac.log_likelihood(run, V.notnull(), V)
    other = dfac.log_likelihood(run, turned.notnull(), turned)
    for group in ("log_likelihood", "observed_data"):
        xr.testing.assert_equal(own[group].to_dataset(), other[group].to_dataset())
    seen = own["observed_data"]
    for cell in (0, 7, -1):
        one = seen["V"][cell]
        assert float(V.sel({d: one[d].values for d in ("time", "lat", "lon")})) == float(one)
    with pytest.raises(OptionError, match="cells lack some of the run's labels of 'lat', 'lon'"):
        dfac.log_likelihood(run, V.notnull()[:, 1:], V)
    refused(DataError, "V has no value at", dfac.log_likelihood, run, V.notnull(), V[:, 1:])


def test_places_are_recommended_and_asked_for_by_their_labels(run, V):
    best = dfac.recommend(run, n=2)
    H = dfac.open_run(run)["posterior"]["H"]
    for name in ("lat", "lon"):
        assert_array_equal(best[name], H[name].values[best["position"]])
    label = H["lat_lon"].values[3]
    wanted = dfac.predict(run).sel({"lat": label[0], "lon": label[1]})["mean"]
    for key in (label, [label], [label, H["lat_lon"].values[0]]):
        found = dfac.predict(run, columns=key)["mean"]
        assert_allclose(found.values.reshape(len(wanted), -1)[:, 0], wanted, 1e-6)
    with pytest.raises(OptionError, match=r"there is no \(99\.0, 0\.0\) among .* lat, lon, such"):
        dfac.predict(run, columns=[(99.0, 0.0)])
