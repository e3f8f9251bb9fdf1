"""Densities and new observations of single cells, against SciPy and against predictions."""

import json
import warnings

import dask
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
from scipy import stats
from scipy.sparse import csr_array

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.results import pointwise, predictive_moments
from daskfactor.runs.schema import MOMENTS
from tests.fake_run import drawn_tree
from tests.models.laws import compound_density
from tests.refusals import refused
from tests.results.particle_tree import particle_tree
from tests.results.runs import ATTRS, CHAINS, DRAWS, I, J, K, factors, make_spec, memory_tree

with warnings.catch_warnings(action="ignore"):  # ArviZ announces its next version on import
    import arviz as az

ROWS, COLUMNS = CELLS = np.array([0, 3, 6, 3]), np.array([1, 1, 4, 0])
VALUES = np.array([2.0, 0.0, 14.0, 7.0])
V = np.arange(float(I * J)).reshape(I, J)
DIMS = ("gene", "day")
POSITIVE = np.array([2.0, 0.5, 14.0, 7.0])


def attrs(model, **changes):
    return {**ATTRS, "model": json.dumps({"n_components": K} | model), **changes}


def run(model, **changes):
    return memory_tree(make_spec(attrs=attrs(model, **changes)))


def density(tree, *args, cells=CELLS, **options):
    """Log density of cells, (chain, draw, cell)."""
    return dfac.log_likelihood(tree, cells, *args, **options)["log_likelihood"]["V"]


def drawn(tree, cells=CELLS, **options):
    return dfac.posterior_predictive(tree, cells, **options)["posterior_predictive"]["V"]


def mu():
    """(chain, draw, cell), by the plainest loop."""
    pairs = [factors(chain, 0, DRAWS) for chain in range(CHAINS)]
    return np.stack([(W[:, ROWS].astype("f8") * Ht[:, COLUMNS]).sum(axis=2) for W, Ht in pairs])


def tweedie(beta):
    return {"type": "TweedieNMF", "beta": beta}


def compound(beta):
    return np.vectorize(lambda v, m: compound_density(v, m, 0.8, beta))


LAWS = {
    "normal": (tweedie(2.0), 0.7, VALUES, lambda v, m: stats.norm.logpdf(v, m, np.sqrt(0.7))),
    "Poisson": (tweedie(1.0), 1.0, VALUES, stats.poisson.logpmf),
    "lattice": (  # for each unit of v
        *(tweedie(1.0), 0.5, VALUES),
        lambda v, m: stats.poisson.logpmf(v / 0.5, m / 0.5) - np.log(0.5),
    ),
    "half": (tweedie(0.5), 0.8, VALUES, compound(0.5)),
    "compound": (tweedie(0.3), 0.8, VALUES, compound(0.3)),
    "gamma": (tweedie(0.0), 0.4, POSITIVE, lambda v, m: stats.gamma.logpdf(v, 2.5, scale=0.4 * m)),
    "inverse Gaussian": (
        *(tweedie(-1.0), 0.4, POSITIVE),
        lambda v, m: stats.invgauss.logpdf(v, 0.4 * m, scale=2.5),
    ),
    "negative binomial": (
        *({"type": "NegativeBinomialNMF", "dispersion": 0.6}, 0.6, VALUES),
        lambda v, m: stats.nbinom.logpmf(v, 1 / 0.6, 1 / (1 + 0.6 * m)),
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("block", [64 * 2**20, 100])
def test_log_densities_are_scipys(law, block, monkeypatch):
    monkeypatch.setattr(predictive_moments, "BLOCK_BYTES", block)
    model, dispersion, values, exact = LAWS[law]
    found = dfac.log_likelihood(run(model, dispersion=dispersion), CELLS, values)
    logs = found["log_likelihood"]["V"]
    assert dask.is_dask_collection(logs.data)
    assert logs.dims == ("chain", "draw", "cell")
    assert_allclose(found["posterior"]["mu"], mu(), rtol=1e-13)
    assert_allclose(logs, exact(values, mu()), rtol=1e-9)
    assert found["observed_data"]["V"].values.tolist() == values.tolist()


def test_noise_of_every_draw():
    tree, quiet = (run({"type": "GaussianMF"}) for _ in range(2))
    noise = 0.5 + np.arange(CHAINS * DRAWS).reshape(CHAINS, DRAWS) / 10
    for own, values in ((tree, noise), (quiet, np.full_like(noise, 1e-20))):
        own["posterior/noise"] = xr.DataArray(values, dims=("chain", "draw"))
    sd, means = np.sqrt(noise)[:, :, None], drawn(quiet)
    assert_allclose(density(tree, VALUES), stats.norm.logpdf(VALUES, mu(), sd), rtol=1e-12)
    assert_allclose(means, mu(), rtol=1e-6)
    assert 0.7 < float(((drawn(tree) - means) / sd).std()) < 1.4


@pytest.mark.parametrize("every", [False, True], ids=["means", "every draw"])
def test_dispersions_of_columns(every):
    tree = run({"type": "NegativeBinomialNMF", "dispersion": "column"})
    column = tree["posterior"]["H"].dims[-1]
    if every:
        own = np.random.default_rng(0).uniform(0.2, 1.0, (CHAINS, DRAWS, J))
        tree["posterior/dispersion"] = xr.DataArray(own, dims=("chain", "draw", column))
    else:
        own = np.linspace(0.2, 1.0, J)
        given = (("chain", column), np.stack([own - 0.1, own + 0.1]))
        tree[MOMENTS] = xr.DataTree(tree[MOMENTS].to_dataset().assign(dispersion_mean=given))
    alpha = own[..., COLUMNS]
    expected = stats.nbinom.logpmf(VALUES, 1 / alpha, 1 / (1 + alpha * mu()))
    assert_allclose(density(tree, VALUES), expected, rtol=1e-10)
    values = drawn(tree).values
    assert (values == np.round(values)).all()


SIGMA = np.linspace(0.5, 2.5, I * J).reshape(I, J)


def with_cells(kind, weights):
    model = attrs(tweedie(2.0), data=json.dumps({"weighting": kind}))
    return memory_tree(make_spec(attrs=model, observed=V, weights=weights))


def test_cells_with_uncertainties():
    sd, bare = SIGMA[CELLS], with_cells("uncertainty", None)
    found = density(with_cells("uncertainty", 1 / SIGMA**2))
    assert_allclose(found, stats.norm.logpdf(V[CELLS], mu(), sd), rtol=1e-12)
    assert_allclose(density(bare, uncertainty=sd), found, rtol=1e-12)
    refused(OptionError, "pass them as uncertainty=", density, bare)
    nothing, match = np.where(sd[2] == SIGMA, 0.0, 1 / SIGMA**2), "the first at row 6, column 4"
    refused(DataError, match, density, with_cells("uncertainty", nothing))


def test_a_cell_of_weight_w_is_w_observations():
    one, bare = stats.norm.logpdf(V[CELLS], mu(), 1.0), with_cells("weights", None)
    assert_allclose(density(with_cells("weights", SIGMA)), SIGMA[CELLS] * one, rtol=1e-12)
    assert_allclose(density(bare, weights=2.0), 2 * one)
    refused(OptionError, "pass them as weights=", density, bare)
    refused(DataError, "one for each of the 4 cells", density, bare, weights=-1.0)
    refused(
        OptionError,
        "the run has no weights of cells",
        density,
        run(tweedie(2.0)),
        VALUES,
        weights=2.0,
    )


@pytest.fixture(scope="module")
def counts():
    """Many draws that are alike, so that moments of observations are known."""
    rng, tree = np.random.default_rng(3), memory_tree(make_spec())
    W, H = (rng.gamma(20.0, 0.1, (2, 4000, *own)).astype("f4") for own in ((I, K), (K, J)))
    names = tree["posterior"].to_dataset().drop_vars(["draw", "chain"]).coords
    found = drawn_tree(W, H, ("gene", "day"), **names)
    found.attrs = dict(tree.attrs)
    return found


@pytest.mark.parametrize("law", LAWS)
def test_new_observations_have_the_moments_of_predictions(law, counts):
    model, dispersion, _, _ = LAWS[law]
    tree = counts.copy()
    tree.attrs = attrs(model, dispersion=dispersion)
    found = drawn(tree, random_seed=1).values.reshape(-1, ROWS.size)
    at = (xr.DataArray(own, dims="cell") for own in labels())
    told = dfac.predict(tree, *at, interval=0.8).load()
    n, mean, variance = len(found), found.mean(0), found.var(0)
    assert_array_less(abs(mean - told["mean"].values), 5 * found.std(0) / np.sqrt(n))
    # The law of total variance; each side by draws of its own.
    W, H = counts["posterior/W"].values[:, :, ROWS], counts["posterior/H"].values[..., COLUMNS]
    mu, beta = np.einsum("sdpk,sdkp->sdp", W, H).reshape(-1, ROWS.size), model.get("beta")
    own = mu + dispersion * mu**2 if beta is None else dispersion * mu ** (2 - beta)
    error = np.sqrt((((found - mean) ** 4).mean(0) - variance**2) / n)
    assert_array_less(abs(variance - mu.var(0) - own.mean(0)), 5 * error)
    if beta in (None, 1.0, 2.0):  # predictions leave out what the curvature of others adds
        assert_array_less(abs(variance - told["sd"].values ** 2), 5 * error)
    inside = ((found >= told["lower"].values) & (found <= told["upper"].values)).mean(0)
    assert (inside > 0.77).all()
    assert (inside < 0.95).all()


def labels():
    coords = make_spec().labels
    return coords["gene"].values[ROWS], coords["day"].values[COLUMNS]


def test_the_same_bits_for_any_cells_and_chunks(monkeypatch):
    tree = memory_tree(make_spec())
    whole = drawn(tree, random_seed=5).values
    monkeypatch.setattr(pointwise, "BLOCK_BYTES", 8)
    monkeypatch.setattr(predictive_moments, "BLOCK_BYTES", 8)
    cut = drawn(tree, (ROWS[::-1], COLUMNS[::-1]), random_seed=5)
    assert len(cut.chunks[2]) == 4
    assert_array_equal(cut.values[..., ::-1], whole)
    assert_array_equal(drawn(tree.isel(chain=[1]), random_seed=5).values[0], whole[1])
    assert (drawn(tree, random_seed=6).values != whole).any()


@pytest.mark.parametrize("how", ["positions", "labels", "mask", "list"])
def test_cells_by_position_label_and_mask(how):
    mask = np.zeros((I, J), bool)
    mask[CELLS] = True
    forms = {"labels": labels(), "mask": mask, "list": [list(ROWS), list(COLUMNS)]}
    found = dfac.log_likelihood(memory_tree(make_spec(observed=V)), forms.get(how, CELLS))
    group = found["log_likelihood"]
    order = np.lexsort((COLUMNS, ROWS)) if how == "mask" else np.arange(4)
    for name, values in {"row_index": ROWS, "column_index": COLUMNS, "gene": labels()[0]}.items():
        assert group[name].values.tolist() == values[order].tolist()
    assert group["weight"].dims == ("cell",)
    assert found["observed_data"]["V"].values.tolist() == V[CELLS][order].tolist()


def test_a_dimension_of_the_user_may_be_called_cell():
    spec = make_spec(dims=("cell", "gene"), coords={"cell": [f"c{i}" for i in range(I)]})
    group = dfac.log_likelihood(memory_tree(spec), (ROWS, COLUMNS), VALUES)["log_likelihood"]
    assert group["V"].dims == ("chain", "draw", "cell")
    assert group["cell"].values.tolist() == ["c0", "c3", "c6", "c3"]


@pytest.mark.parametrize("form", [np.asarray, csr_array, lambda V: xr.DataArray(V, dims=DIMS)])
def test_values_come_from_a_matrix(form):
    model = ATTRS
    if form is csr_array:
        model = attrs(tweedie(1.0), data=json.dumps({"unstored": "zero"}))
    found = dfac.log_likelihood(memory_tree(make_spec(attrs=model)), CELLS, form(V))
    assert found["observed_data"]["V"].values.tolist() == V[CELLS].tolist()


def seeing(observed, **about):
    """A run of a 7 x 5 matrix, with its data or without."""
    data = {"shape": [I, J], "n_observed": 35} | about
    return memory_tree(make_spec(observed=observed, attrs={**ATTRS, "data": json.dumps(data)}))


def test_cells_that_the_run_has_not_seen_do_not_pass_for_observed():
    train = V.copy()
    train[CELLS] = np.nan
    tree, values = seeing(train, n_observed=31), V[CELLS]
    for told in (None, True):
        found = dfac.log_likelihood(tree, CELLS, values, held_out=told)
        assert set(found.children) == {"posterior", "held_out_log_likelihood", "held_out_data"}
        assert found["held_out_data"]["V"].values.tolist() == values.tolist()
    with pytest.raises((TypeError, AttributeError, ValueError, KeyError), match="log"):
        az.loo(as_arviz(found.load()))
    assert_array_equal(found["held_out_log_likelihood"]["V"], density(seeing(V)))
    match = r"used 1 of these 5 cells.* pass them separately"
    refused(OptionError, match, density, tree, V, cells=(np.r_[ROWS, 1], np.r_[COLUMNS, 1]))
    match = "held_out=False, but the run did not use"
    refused(OptionError, match, density, tree, values, held_out=False)
    refused(OptionError, "held_out=True, but the run used", density, seeing(V), held_out=True)


def test_what_nothing_tells_is_asked_for():
    bare, values = seeing(None, n_observed=31), V[CELLS]
    refused(OptionError, r"pass held_out=True if they were held out", density, bare, values)
    refused(OptionError, r"pass held_out=True", density, bare, V)  # more entries than the run had
    refused(OptionError, "True or False", density, bare, values, held_out=1)
    density(bare, values, held_out=False)
    assert "held_out_data" in dfac.log_likelihood(bare, CELLS, values, held_out=True)
    some = V.copy()
    some[6, 1:] = np.nan  # 31 are left, (6, 4) is not
    density(bare, some, cells=(ROWS[:2], COLUMNS[:2]))
    density(seeing(None), values)  # it saw every cell


def test_mistakes_are_told_in_a_sentence():
    plain, one_gap = memory_tree(make_spec()), VALUES * [1, 1, np.nan, 1]
    hidden = memory_tree(make_spec(observed=np.full((I, J), np.nan)))
    moments_only = memory_tree(make_spec(keep="moments"))
    for kind, match, trace, cells, values in (
        (OptionError, "pass the matrix or the values", plain, CELLS, None),
        (DataError, "3 values for 4 cells", plain, CELLS, VALUES[:3]),
        (DataError, "no value at 1 of 4 cells, the first at row 6", plain, CELLS, one_gap),
        (DataError, "negative", plain, CELLS, -VALUES),
        (DataError, r"shape of the run's data, \(7, 5\)", plain, CELLS, np.ones((3, 3))),
        (OptionError, "between 0 and 6, got 0 to 7", plain, ([0, 7], [0, 0]), [1.0, 1.0]),
        (OptionError, "must have equal lengths, got 2 and 1", plain, ([0, 1], [0]), [1.0]),
        (OptionError, "cells are a pair", plain, np.arange(4), VALUES),
        (OptionError, "got no cells", plain, ([], []), []),
        (OptionError, "there is no 'nobody'", plain, (["nobody"], labels()[1][:1]), [1.0]),
        (OptionError, "stored only moments", moments_only, CELLS, VALUES),
        (OptionError, "draws have weights", particle_tree(silf=False), CELLS, VALUES),
        (ModelError, "neither a closed form", run(tweedie(3.0)), CELLS, VALUES),
        (DataError, r"hold_out\(...\).values", hidden, CELLS, None),
    ):
        refused(kind, match, dfac.log_likelihood, trace, cells, values)
    refused(OptionError, "leave uncertainty out", density, plain, VALUES, uncertainty=1.0)
    assert "observed_data" not in dfac.posterior_predictive(hidden, CELLS).children


def as_arviz(tree):
    """The tree as the ArviZ that is there takes it."""
    return az.from_datatree(tree) if hasattr(az, "from_datatree") else tree


def test_attributes_of_groups():
    made = {"created_at": "2026-01-01T00:00:00+00:00"}
    tree = memory_tree(make_spec(attrs=ATTRS | made))
    found = dfac.log_likelihood(tree, CELLS, VALUES)
    library = dict.fromkeys(("inference_library", "creation_library"), "daskfactor")
    library |= made | {"creation_library_version": dfac.__version__}
    for group in (*tree.children.values(), *found.children.values()):
        assert library.items() <= group.attrs.items()
    for group in (tree["posterior"], found["log_likelihood"]):
        assert group.attrs["sample_dims"] == ["chain", "draw"]
    assert "sample_dims" not in found["observed_data"].attrs


@pytest.mark.libraries
def test_arviz_takes_the_groups(counts):
    short = counts.isel(draw=slice(500))
    # Alike enough that no cell alone would move them.
    for factor in "WH":
        short["posterior"][factor] = short["posterior"][factor] ** 0.25
    values = np.full(4, 4.0)
    data = as_arviz(dfac.log_likelihood(short, CELLS, values).load())
    result = az.loo(data, pointwise=True)
    score = float(getattr(result, "elpd_loo", None) or result.elpd)
    each = result.loo_i if hasattr(result, "loo_i") else result.elpd_i
    assert score == pytest.approx(float(np.sum(each)))
    assert (np.asarray(result.pareto_k) < 0.7).all()
    assert len(az.summary(data)) == 4
    for check in (az.rhat, az.ess):
        assert np.isfinite(np.asarray(check(data)["mu"])).all()
    shown = as_arviz(dfac.posterior_predictive(short, CELLS, values).load())
    old = hasattr(az, "plot_ppc")
    with warnings.catch_warnings(action="ignore"):  # of the plots' own making
        import matplotlib as mpl

        mpl.use("Agg")
        # Without a seed it may choose a draw of four equal counts, which ArviZ cannot show.
        options = {"num_pp_samples": 5, "random_seed": 0} if old else {"num_samples": 5}
        (az.plot_ppc if old else az.plot_ppc_dist)(shown, **options)
        mpl.pyplot.close("all")


def test_masks_and_values_are_matched_by_their_labels():
    coords = {"user": [f"u{i}" for i in range(4)], "item": list("abcd")}
    V = xr.DataArray(np.random.default_rng(3).normal(size=(4, 4)), coords, ("user", "item"))
    mask = xr.zeros_like(V, bool)
    mask.loc["u3", "a"] = True
    model = dfac.GaussianMF(2)
    options = {"draws": 4, "tune": 3, "random_seed": 0, "progressbar": False}
    trace = dfac.sample(V, model, **options)
    cells = np.array([3, 1]), np.array([0, 2])
    for turned in (mask[:, ::-1], mask[::-1].T):
        watched = dfac.sample(V, model, monitor=turned, **options)["monitor"]
        for found in (density(trace, cells=turned), watched):
            assert (found["row_index"].item(), found["column_index"].item()) == (3, 0)
        for data in (V, dfac.as_blocks(V)):
            held = dfac.hold_out(data, cells=turned)
            assert [own.tolist() for own in held.cells] == [[3], [0]]
    for turned in (V[:, ::-1], V.T, V[::-1].T):
        found = density(trace, turned, cells=cells)
        assert_allclose(found, density(trace, cells=cells), rtol=1e-6)
    other = mask.assign_coords(item=list("efgh"))
    for ask in (
        lambda: density(trace, cells=other),
        lambda: dfac.hold_out(V, cells=other),
        lambda: dfac.sample(V, model, monitor=other, **options),
    ):
        refused(OptionError, "labels of item differ from those of V", ask)
    for items, match in (("bcde", "no value at 1 of 2 cells"), ("bbca", "not unique")):
        named = V.assign_coords(item=list(items))
        refused(DataError, match, density, trace, named, cells=cells)
