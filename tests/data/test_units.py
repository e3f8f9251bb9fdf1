"""Units and long names go with labels and values wherever these go."""

import json

import numpy as np
import pytest
import sparse
import xarray as xr

import daskfactor as dfac

WAVE = {"units": "nm", "long_name": "wavelength"}
SITE = {"long_name": "name of the site"}
OWN = {"units": "W m-2", "long_name": "radiance"}
MODEL = dfac.TweedieNMF(2)


@pytest.fixture
def cube():
    values = np.random.default_rng(0).poisson(3.0, (12, 9)).astype(float)
    wave = xr.Variable("band", np.linspace(400.0, 2500.0, 12), WAVE | {"resolution": 3})
    site = xr.Variable("pixel", [f"s{i}" for i in range(9)], SITE)
    return xr.DataArray(
        values, {"band": wave, "site": site}, ("band", "pixel"), "L", OWN | {"history": "none"}
    )


def told(labelled):
    return dict(labelled["band"].attrs), dict(labelled["site"].attrs)


def test_a_run_has_them_in_memory_and_in_its_store(cube, tmp_path):
    path = tmp_path / "run.zarr"
    options = {"draws": 3, "tune": 2, "progressbar": False}
    for trace in (
        dfac.sample(cube, MODEL, **options),
        dfac.sample(cube, MODEL, store=path, **options),
        dfac.open_run(path),
    ):
        for group in ("posterior", "posterior_moments"):
            assert told(trace[group]) == (WAVE, SITE)
        about = json.loads(trace.attrs["data"])
        assert {name: about[name] for name in (*OWN, "name")} == OWN | {"name": "L"}
    assert told(dfac.align(trace)["posterior"]) == told(dfac.predict(trace)) == (WAVE, SITE)


def test_a_point_and_data_with_cells_held_out_have_them(cube):
    point = dfac.optimize(cube, MODEL, dfac.MultiplicativeUpdates(), progressbar=False)
    assert told(point) == (WAVE, SITE)
    with dfac.as_blocks(cube) as data:
        held = dfac.hold_out(data).train.labels
    assert (held.attrs, held.about) == ({"band": WAVE, "site": SITE}, OWN)


def test_a_converted_store_has_them(cube, tmp_path):
    dfac.convert(cube.copy(data=sparse.COO(cube.values)), tmp_path / "cube.zarr")
    labels = dfac.as_blocks(tmp_path / "cube.zarr").labels
    assert (labels.attrs, labels.about) == ({"band": WAVE, "site": SITE}, OWN)
    assert told(xr.Dataset(coords=labels.coords)) == (WAVE, SITE)
