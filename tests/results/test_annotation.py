"""Results in an AnnData: the right numbers at the right names, and files that can be read again."""

import json
from unittest.mock import Mock

import anndata
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, OptionError
from daskfactor.results.annotation import annotate_file
from daskfactor.results.verdict import LIGHTS
from tests.cli.shell import fails, succeed
from tests.refusals import refused

pytestmark = pytest.mark.libraries

RNG = np.random.default_rng(5)
COUNTS = RNG.poisson(RNG.gamma(1, 2, (24, 3)) @ RNG.gamma(1, 2, (3, 16))).astype("f4")
CELLS, GENES = [f"cell {i}" for i in range(24)], [f"gene {j}" for j in range(16)]
MASK = np.arange(16) % 3 > 0
POISSON = dfac.TweedieNMF(2, dispersion=1.0)
QUIET = {"random_seed": 0, "progressbar": False}
QUICK = QUIET | {"tune": 20}


def annotated():
    var = pd.DataFrame({"chosen": MASK}, index=GENES)
    made = anndata.AnnData(COUNTS * 0, pd.DataFrame(index=CELLS), var)
    made.layers["counts"] = COUNTS
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("annotation") / "run.zarr"
    data = dfac.as_blocks(annotated(), 2, layer="counts", mask_var="chosen")
    model = dfac.TweedieNMF(3, dispersion=1.0)
    dfac.sample(data, model, dfac.Gibbs(), draws=12, chains=2, store=path, **QUICK)
    return path


@pytest.fixture(scope="module")
def trace(store):
    return dfac.open_run(store).load()


def wanted(trace):
    """Mean and sd over all draws of all chains, one after the other."""
    draws = dfac.align(trace)["posterior"].to_dataset().load()
    W = draws["W"].values.reshape(-1, 24, 3).astype(float)
    H = draws["H"].values.reshape(-1, 3, MASK.sum()).astype(float).transpose(0, 2, 1)
    sides = {"obsm": W, "varm": H}
    return {side: {"dfac": own.mean(0), "dfac_sd": own.std(0)} for side, own in sides.items()}


def check(found, expected, obs=range(24), var=range(16)):
    """Compare the rows of cells ``obs`` and the chosen ones among the genes ``var``."""
    obs, var, at = np.array(obs), np.array(var), np.cumsum(MASK) - 1
    for name, values in expected["obsm"].items():
        assert_allclose(found.obsm[name], values[obs], rtol=1e-4, atol=1e-6)
    for name, values in expected["varm"].items():
        rows = np.where(MASK[var][:, None], values[at[var]], 0.0 if name == "dfac" else np.nan)
        assert_allclose(found.varm[name], rows, rtol=1e-4, atol=1e-6)


def test_means_and_sds_of_aligned_draws_are_written(store, trace):
    adata = annotated()
    assert dfac.to_anndata(str(store), adata) is None
    check(adata, wanted(trace))
    assert adata.obsm["dfac"].dtype == np.float32
    noted = adata.uns["dfac"]
    params = {"model": "TweedieNMF", "sampler": "Gibbs", "layer": "counts", "mask_var": "chosen"}
    params |= {"draws": 12, "chains": 2, "random_seed": "0", "n_components": 3}
    assert params.items() <= noted["params"].items()
    assert json.loads(noted["params"]["model_settings"])["beta"] == 1.0
    assert "None" not in repr(noted)
    assert_allclose(noted["weight"].sum(), 1.0)
    assert noted["share"].shape == (3,)
    assert set(noted["convergence"]) == {*LIGHTS, "verdict"}


def test_entries_are_matched_by_name(trace):
    expected, adata = wanted(trace), annotated()
    order = RNG.permutation(24), RNG.permutation(16)
    for at in (order, (order[0][:7], order[1][:9])):
        check(dfac.to_anndata(trace, adata[at].copy(), copy=True), expected, *at)
    more = anndata.concat([adata, anndata.AnnData(COUNTS[:2], var=adata.var)])
    more.obs_names = [*CELLS, "new 0", "new 1"]
    more.var["chosen"] = MASK
    with pytest.warns(DataWarning, match="2 of the 26 observations .* rows of obsm are NaN"):
        dfac.to_anndata(trace, more)
    check(more[:24], expected)
    assert np.isnan([more.obsm[name][24:] for name in ("dfac", "dfac_sd")]).all()


def test_copies_views_keys_and_backed_objects(trace, tmp_path):
    adata, expected = annotated(), wanted(trace)
    copy = dfac.to_anndata(trace, adata, "other", copy=True)
    assert not any(map(len, (adata.obsm, adata.varm, adata.uns)))
    assert set(copy.obsm) == set(copy.varm) == {"other", "other_sd"}
    view = adata[5:15]
    with pytest.warns(anndata.ImplicitModificationWarning):
        dfac.to_anndata(trace, view)
    check(view, expected, range(5, 15))
    assert not adata.obsm
    assert np.array_equal(view.layers["counts"], COUNTS[5:15])
    annotated().write_h5ad(tmp_path / "a.h5ad")
    backed = anndata.read_h5ad(tmp_path / "a.h5ad", backed="r")
    copy = dfac.to_anndata(trace, backed, copy=True)
    dfac.to_anndata(trace, backed)
    for found in (copy, backed):
        check(found, expected)
    backed.file.close()


@pytest.mark.quick("memory-zarr 2", "file-h5ad", "file-zarr 3")
@pytest.mark.parametrize("kind", ["h5ad", "zarr 2", "zarr 3"])
@pytest.mark.parametrize("by", ["memory", "file"])
@pytest.mark.filterwarnings("ignore")  # of the format of zarr that is the default
def test_files_hold_what_was_written(store, trace, tmp_path, kind, by):
    ending, _, version = kind.partition(" ")
    adata, whole = annotated(), annotated()
    adata.uns["dfac"], adata.obsm["dfac"] = {"old": 1}, np.ones((24, 7))
    dfac.to_anndata(trace, whole, evidence=dfac.Evidence(-1.5, 0.25, 0.5, xr.DataTree()))
    path, out = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    options = {} if ending == "h5ad" else {"zarr_write_format": int(version)}
    with anndata.settings.override(**options):
        getattr(whole if by == "memory" else adata, f"write_{ending}")(path)
    if by == "file":
        for target in (["--output", out], ["--output", path, "--overwrite"]):
            succeed("annotate", store, path, *target)
        assert sorted(tmp_path.iterdir()) == [path, out]
    for written in [path] + [out] * (by == "file"):
        found = getattr(anndata, f"read_{ending}")(written)
        for where in ("obsm", "varm"):
            np.testing.assert_equal(dict(getattr(found, where)), dict(getattr(whole, where)))
        expected = dict(whole.uns["dfac"])
        evidence = expected.pop("evidence")
        if by == "memory":
            assert (found.uns["dfac"].pop("evidence"), evidence["value"]) == (evidence, -1.5)
        np.testing.assert_equal(found.uns["dfac"], expected)
        assert found.obs_names.tolist() == CELLS
        assert_array_equal(found.layers["counts"], COUNTS)


def test_what_a_command_refuses(store, tmp_path):
    annotated().write_h5ad(tmp_path / "a.h5ad")
    for target, code, message in (
        ("a.h5ad", 4, "a.h5ad exists already; give another name, or allow --overwrite"),
        ("b.zarr", 3, "b.zarr must end in .h5ad, as a.h5ad does"),
        ("no/b.h5ad", 4, "No such file or directory"),
    ):
        fails(code, message, "annotate", store, tmp_path / "a.h5ad", "-o", tmp_path / target)
    match = "is no AnnData: give an .h5ad"
    fails(3, match, "annotate", store, store, "-o", tmp_path / "c.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5ad"]


def test_a_shell_fits_and_annotates(tmp_path):
    file, run = tmp_path / "a.h5ad", tmp_path / "run.zarr"
    annotated().write_h5ad(file)
    options = ("--mask-var", "chosen", "--draws", 4, "--tune", 4, "--dispersion", 1, "--quiet")
    succeed("fit", f"{file}:counts", "--store", run, "-k", 2, *options)
    succeed("annotate", run, file, "-o", file, "--overwrite", "--key", "nmf")
    found = anndata.read_h5ad(file)
    assert found.obsm["nmf"].shape == (24, 2)
    assert (found.varm["nmf"][:, 0] == 0).tolist() == (~MASK).tolist()


@pytest.mark.filterwarnings("ignore")  # anndata says that names are not unique
def test_repeated_names_are_matched_where_their_order_says_it():
    adata, names = annotated(), np.array(GENES)
    names[[1, 2, 3]] = "twice"
    adata.var_names = names
    data = dfac.as_blocks(adata, 2, layer="counts", mask_var="chosen")
    trace = dfac.sample(data, POISSON, draws=3, **QUICK)
    found = dfac.to_anndata(trace, adata, copy=True)
    assert ((found.varm["dfac"] == 0).all(axis=1) == ~MASK).all()
    match = r"'twice' more than once.*var_names_make_unique\(\)"
    refused(DataError, match, dfac.to_anndata, trace, adata[:, ::-1].copy())


def test_names_that_do_not_match_are_refused(trace):
    other = anndata.AnnData(COUNTS, pd.DataFrame(index=[f"x{i}" for i in range(24)]))
    match = r"none of the 24 names .* for obs \('cell 0', ...\) is"
    refused(DataError, match, dfac.to_anndata, trace, other)
    refused(DataError, "with observations as rows", dfac.to_anndata, trace, annotated().T)
    match = "to_anndata writes into an AnnData object, got"
    for wrong in (COUNTS, "a.h5ad", annotated().raw):
        refused(OptionError, match, dfac.to_anndata, trace, wrong)
    refused(OptionError, "trace is the result of", dfac.to_anndata, None, annotated())


def test_results_of_every_kind():
    adata = annotated()
    data = dfac.as_blocks(adata, 2, layer="counts")
    point = dfac.optimize(data, POISSON, **QUIET)
    dfac.to_anndata(point, adata, "point")
    assert_array_equal(adata.obsm["point"], point["W"].values)
    assert_array_equal(adata.varm["point"], point["H"].values.T)
    assert "point_sd" not in adata.obsm
    assert adata.uns["point"]["params"]["layer"] == "counts"

    moments = dfac.sample(data, POISSON, dfac.Gibbs(), draws=12, keep="moments", **QUICK)
    dfac.to_anndata(moments, adata, "moments")
    found = moments["posterior_moments"].to_dataset().isel(chain=0)
    assert_allclose(adata.obsm["moments"], found["W_mean"], rtol=1e-5)
    assert_allclose(adata.varm["moments_sd"] ** 2, found["H_var"].T, rtol=1e-4)
    assert "share" not in adata.uns["moments"]

    modes = dfac.stein_posterior(COUNTS, dfac.SILFNMF(2, beta=1.0), particles=5, **QUIET)
    dfac.to_anndata(modes, adata, "modes")  # without names: by position
    mass = modes["sample_stats"]["weight"].values[0]
    each = dfac.align(modes)["posterior"]["W"].values[0].astype(float)
    mean = np.tensordot(mass, each, 1)
    sd = np.sqrt(np.tensordot(mass, (each - mean) ** 2, 1))
    assert_allclose(adata.obsm["modes"], mean, rtol=1e-4, atol=1e-7)
    assert_allclose(adata.obsm["modes_sd"], sd, rtol=1e-3, atol=1e-7)
    match = "24 rows for obs without names, but the AnnData has 20"
    refused(DataError, match, dfac.to_anndata, modes, adata[:20])

    gauss = dfac.sample(data, dfac.GaussianMF(2), dfac.Gibbs(), draws=3, **QUICK)
    dfac.to_anndata(gauss, adata, "gauss")
    assert (adata.obsm["gauss"].shape, adata.uns["gauss"]["share"].shape) == ((24, 2), (2,))


def test_new_observations_go_where_the_old_ones_are(trace):
    adata, new = annotated(), annotated()[::2].copy()
    dfac.to_anndata(trace, adata)
    V = dfac.as_blocks(new, layer="counts", mask_var="chosen")
    for options in ({}, {"point": True}):
        dfac.to_anndata(dfac.transform(dfac.align(trace), V, **QUIET, **options), new)
        apart = (new.obsm["dfac"] - adata.obsm["dfac"][::2]) / adata.obsm["dfac_sd"][::2]
        assert np.sqrt(np.mean(apart**2)) < 1.0
    rows = dfac.sample(V, dfac.GaussianMF(2), dfac.Gibbs(), draws=3, **QUICK)
    dfac.to_anndata(dfac.transform(dfac.align(rows), V, **QUIET), new)
    assert new.obsm["dfac"].shape == (12, 2)


def test_factors_of_new_observations_are_written_on_their_side():
    draws, weight = RNG.gamma(1, 1, (2, 5, 24, 3)), RNG.random((2, 5))
    dims = ("chain", "draw", "obs", "component")
    new = xr.DataArray(draws, {"obs": CELLS, "component": range(3)}, dims, name="W")
    adata = annotated()
    dfac.to_anndata(new, adata)
    assert_allclose(adata.obsm["dfac"], draws.mean((0, 1)))
    assert_allclose(adata.obsm["dfac_sd"], draws.std((0, 1)))
    assert not adata.varm
    weighed = new.assign_coords(weight=(dims[:2], weight))
    dfac.to_anndata(weighed.transpose("obs", ...), adata)
    assert_allclose(adata.obsm["dfac"], np.tensordot(weight / weight.sum(), draws, 2))
    dfac.to_anndata(new.mean(("chain", "draw")).rename("W"), adata, "point")
    assert_allclose(adata.obsm["point"], draws.mean((0, 1)))
    assert "point_sd" not in adata.obsm
    match = r"an unaligned trace, .* pass transform\(align\("
    refused(OptionError, match, dfac.to_anndata, new.assign_attrs(aligned=0), adata)
    match = "has no factors; pass the result of transform"
    refused(OptionError, match, dfac.to_anndata, new.rename("mean"), adata)


def test_draws_are_aligned_once(trace, monkeypatch):
    fresh, adata, counted = trace.copy(), annotated(), Mock(side_effect=dfac.align)
    del fresh.attrs["verdict"]
    for module in ("annotation", "diagnose"):
        monkeypatch.setattr(f"daskfactor.results.{module}.align", counted)
    dfac.to_anndata(fresh, adata)
    assert counted.call_count == 1
    assert adata.uns["dfac"]["convergence"]["verdict"] == dfac.summarize(trace).verdict


@pytest.mark.filterwarnings("ignore")
def test_an_interruption_or_another_folder_leaves_what_was_there(store, tmp_path, monkeypatch):
    path, thesis = tmp_path / "a.zarr", tmp_path / "thesis.zarr"
    annotated().write_zarr(path)
    for what in ("daskfactor.results.annotation._write_elements", "shutil.rmtree"):
        with monkeypatch.context() as patch:
            patch.setattr(what, Mock(side_effect=KeyboardInterrupt))
            refused(KeyboardInterrupt, None, annotate_file, store, path, path, overwrite=True)
        assert_array_equal(anndata.read_zarr(path).layers["counts"], COUNTS)
    succeed("annotate", store, path, "-o", path, "--overwrite")
    assert [own.name for own in tmp_path.iterdir()] == ["a.zarr"]
    thesis.mkdir()
    (thesis / "text").write_text("precious")
    match = "is a folder that is not replaced"
    fails(4, match, "annotate", store, path, "-o", thesis, "--overwrite")
    assert (thesis / "text").read_text() == "precious"
