"""ArviZ's cross-validation of single cells, against refits by hand."""

import warnings
from functools import cache

import numpy as np
import pytest
import xarray as xr
from scipy import sparse, stats

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.refusals import refused

pytestmark = pytest.mark.libraries

with warnings.catch_warnings(action="ignore"):  # ArviZ announces its next version on import
    import arviz as az

MODEL = dfac.TweedieNMF(1, dispersion=1.0, rate_w=0.5, rate_h=0.5)
OPTIONS = {"draws": 600, "tune": 100, "chains": 2, "random_seed": 4}
CELLS = np.array([0, 7, 11, 19]), np.array([0, 14, 3, 8])
KNOWN = {"k_thresh": 0.7} if hasattr(az, "from_datatree") else {"k_threshold": 0.7}


@pytest.fixture(scope="module")
def V():
    rng = np.random.default_rng(2)
    return rng.poisson(np.outer(rng.gamma(9, 1 / 3, 20), rng.gamma(9, 1 / 3, 15))).astype(float)


@pytest.fixture(scope="module")
def tree(V):
    trace = dfac.sample(V, MODEL, dfac.Gibbs(), progressbar=False, **OPTIONS)
    return dfac.log_likelihood(trace, CELLS).load()


@pytest.fixture(scope="module")
def refit(V):
    """Log predictive density of a cell by a run of its own that has not seen it."""

    @cache
    def density(number):
        row, column = (own[number] for own in CELLS)
        train = V.copy()
        train[row, column] = np.nan
        trace = dfac.sample(train, MODEL, dfac.Gibbs(), progressbar=False, **OPTIONS)
        W, H = (trace["posterior"][name].values for name in "WH")
        mu = W[:, :, row, 0] * H[:, :, 0, column]
        terms = stats.poisson.logpmf(V[row, column], mu.ravel().astype("f8"))
        return np.logaddexp.reduce(terms) - np.log(terms.size)

    return density


@pytest.fixture(scope="module")
def refitted(refit):
    return np.array([refit(number) for number in range(4)])


def pointwise(result):
    return np.asarray(result.loo_i if hasattr(result, "loo_i") else result.elpd_i)


def given(tree):
    return az.from_datatree(tree) if hasattr(az, "from_datatree") else tree


@pytest.mark.full
def test_loo_is_that_of_refits_where_pareto_k_is_small(tree, refitted):
    with warnings.catch_warnings(action="ignore"):  # it tells of large Pareto k
        result = az.loo(given(tree), pointwise=True)
    k = np.asarray(result.pareto_k)
    assert (k < 0.5).sum() >= 3
    np.testing.assert_allclose(pointwise(result)[k < 0.5], refitted[k < 0.5], atol=0.08)


def test_reloo_refits_without_the_cell(V, tree, refit):
    wrapper = dfac.sampling_wrapper(tree, V, MODEL, dfac.Gibbs(), **OPTIONS)
    with warnings.catch_warnings(action="ignore"):  # of ArviZ 0.2x: untested
        first = az.loo(given(tree), pointwise=True)
        first.pareto_k[:] = [0.1, 0.9, 0.1, 0.1]
        result = az.reloo(wrapper, loo_orig=first, **KNOWN)
    assert pointwise(result)[1] == pytest.approx(refit(1), abs=1e-9)


@pytest.mark.skipif(not hasattr(az, "loo_kfold"), reason="ArviZ 1.x has it")
def test_kfold_of_single_cells_is_that_of_refits(V, tree, refitted):
    wrapper = dfac.sampling_wrapper(tree, V, MODEL, dfac.Gibbs(), **OPTIONS)
    result = az.loo_kfold(tree, wrapper, folds=np.arange(1, 5), pointwise=True)
    np.testing.assert_allclose(np.asarray(result.elpd_i), refitted, atol=1e-9)
    halves = az.loo_kfold(tree, wrapper, folds=[1, 1, 2, 2], pointwise=True)
    assert halves.elpd == pytest.approx(refitted.sum(), abs=0.3)


def test_folds_of_a_sparse_matrix_and_of_an_array_of_many_dimensions(V, tree):
    words = 'pass unstored="zero"'
    refused(OptionError, words, dfac.sampling_wrapper, tree, sparse.csr_array(V), MODEL, **OPTIONS)
    wrapper = dfac.sampling_wrapper(tree, sparse.csr_array(V), MODEL, unstored="zero", **OPTIONS)
    train, held = wrapper.sel_observations([1, 3])
    assert held.values.tolist() == V[CELLS][[1, 3]].tolist()
    assert np.isnan(train.toarray()).sum() == 2
    words = r"result of daskfactor\.log_likelihood"
    refused(OptionError, words, dfac.sampling_wrapper, None, V, MODEL)
    cube = xr.DataArray(np.arange(1.0, 301.0).reshape(20, 5, 3), dims=("time", "lat", "lon"))
    run = {"draws": 2, "tune": 2, "rows": "time", "blocks": 1}
    wrapper = dfac.sampling_wrapper(tree, cube, MODEL, dfac.Gibbs(), **run)
    train, held = wrapper.sel_observations([1])
    assert train.dims == ("time", "lat_lon")
    assert held.values == cube.values.reshape(20, 15)[CELLS[0][1], CELLS[1][1]]
    assert wrapper.sample(train)["posterior"].sizes["lat_lon"] == 15
