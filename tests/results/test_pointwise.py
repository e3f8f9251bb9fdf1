"""Densities and new observations of single cells, against SciPy and against predictions."""

import json
import warnings

import dask
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less
from scipy import stats

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.results import pointwise
from daskfactor.results.schema import MOMENTS, Variable
from daskfactor.results.store import RunStore
from tests.fake_run import drawn_tree
from tests.refusals import refused
from tests.results.particle_tree import particle_tree
from tests.results.runs import ATTRS, CHAINS, DRAWS, I, J, K, factors, fill, make_spec, memory_tree

pytestmark = pytest.mark.libraries

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version on import
    import arviz as az

ROWS, COLUMNS = np.array([0, 3, 6, 3]), np.array([1, 1, 4, 0])
VALUES = np.array([2.0, 0.0, 14.0, 7.0])
POSITIVE = np.array([2.0, 0.5, 14.0, 7.0])


def attrs(model, **changes):
    return {**ATTRS, "model": json.dumps({"n_components": K} | model), **changes}


def run(model, **changes):
    return memory_tree(make_spec(attrs=attrs(model, **changes)))


def mu():
    """(chain, draw, cell), by the plainest loop."""
    found = np.empty((CHAINS, DRAWS, ROWS.size))
    for chain in range(CHAINS):
        W, Ht = factors(chain, 0, DRAWS)
        for draw in range(DRAWS):
            found[chain, draw] = [
                W[draw, i].astype("f8") @ Ht[draw, j].astype("f8")
                for i, j in zip(ROWS, COLUMNS, strict=True)
            ]
    return found


def compound_poisson(v, mean, phi, beta):
    """Log density by the series of its jumps."""
    rate, shape = mean**beta / (phi * beta), beta / (1 - beta)
    scale = phi * (1 - beta) * mean ** (1 - beta)
    if v == 0:
        return -rate
    jumps = np.arange(1, 400)
    terms = stats.poisson.logpmf(jumps, rate) + stats.gamma.logpdf(v, jumps * shape, scale=scale)
    return float(np.logaddexp.reduce(terms))


def tweedie(beta):
    return {"type": "TweedieNMF", "beta": beta}


def compound(beta):
    return np.vectorize(lambda v, m: compound_poisson(v, m, 0.8, beta))


LAWS = {
    "normal": (tweedie(2.0), 0.7, VALUES, lambda v, m: stats.norm.logpdf(v, m, np.sqrt(0.7))),
    "Poisson": (tweedie(1.0), 1.0, VALUES, stats.poisson.logpmf),
    "lattice": (  # for each unit of v
        tweedie(1.0),
        0.5,
        VALUES,
        lambda v, m: stats.poisson.logpmf(v / 0.5, m / 0.5) - np.log(0.5),
    ),
    "half": (tweedie(0.5), 0.8, VALUES, compound(0.5)),
    "compound": (tweedie(0.3), 0.8, VALUES, compound(0.3)),
    "gamma": (tweedie(0.0), 0.4, POSITIVE, lambda v, m: stats.gamma.logpdf(v, 2.5, scale=0.4 * m)),
    "inverse Gaussian": (
        tweedie(-1.0),
        0.4,
        POSITIVE,
        lambda v, m: stats.invgauss.logpdf(v, 0.4 * m, scale=2.5),
    ),
    "negative binomial": (
        {"type": "NegativeBinomialNMF", "dispersion": 0.6},
        0.6,
        VALUES,
        lambda v, m: stats.nbinom.logpmf(v, 1 / 0.6, 1 / (1 + 0.6 * m)),
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("block", [64 * 2**20, 100])
def test_log_densities_are_scipys(law, block, monkeypatch):
    monkeypatch.setattr(pointwise, "BLOCK_BYTES", block)
    model, dispersion, values, density = LAWS[law]
    tree = run(model, dispersion=dispersion)
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS), values)
    assert dask.is_dask_collection(found["log_likelihood"]["V"].data)
    assert found["log_likelihood"]["V"].dims == ("chain", "draw", "cell")
    assert_allclose(found["posterior"]["mu"], mu(), rtol=1e-13)
    assert_allclose(found["log_likelihood"]["V"], density(values, mu()), rtol=1e-9)
    assert found["observed_data"]["V"].values.tolist() == values.tolist()


def gaussian(**changes):
    """Draws of a run that has drawn its noise."""
    noise = Variable("posterior", "noise", ("chain", "draw"), "real", "variance")
    tree = memory_tree(make_spec(attrs=attrs({"type": "GaussianMF"}, **changes)))
    drawn = 0.5 + np.arange(CHAINS * DRAWS).reshape(CHAINS, DRAWS) / 10
    posterior = tree["posterior"].to_dataset().assign({noise.name: (("chain", "draw"), drawn)})
    tree["posterior"] = xr.DataTree(posterior)
    return tree


def test_noise_of_every_draw():
    tree = gaussian()
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS), VALUES)["log_likelihood"]["V"]
    sd = np.sqrt(tree["posterior"]["noise"].values)[:, :, None]
    assert_allclose(found, stats.norm.logpdf(VALUES, mu(), sd), rtol=1e-12)
    drawn = dfac.posterior_predictive(tree, (ROWS, COLUMNS))["posterior_predictive"]["V"]
    quiet = gaussian()
    quiet["posterior"]["noise"][:] = 1e-20
    means = dfac.posterior_predictive(quiet, (ROWS, COLUMNS))["posterior_predictive"]["V"]
    assert_allclose(means, mu(), rtol=1e-6)
    assert 0.7 < float(((drawn - means) / sd).std()) < 1.4


def test_dispersions_of_columns():
    tree = run({"type": "NegativeBinomialNMF", "dispersion": "column"})
    own = np.linspace(0.2, 1.0, J)
    means = tree[MOMENTS].to_dataset()
    column = means["H_mean"].dims[-1]
    given = (("chain", column), np.stack([own - 0.1, own + 0.1]))
    tree[MOMENTS] = xr.DataTree(means.assign(dispersion_mean=given))
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS), VALUES)["log_likelihood"]["V"]
    alpha = own[COLUMNS]
    expected = stats.nbinom.logpmf(VALUES, 1 / alpha, 1 / (1 + alpha * mu()))
    assert_allclose(found, expected, rtol=1e-10)
    drawn = dfac.posterior_predictive(tree, (ROWS, COLUMNS))["posterior_predictive"]["V"]
    assert (drawn.values == np.round(drawn.values)).all()


def test_dispersions_of_columns_in_every_draw():
    tree = run({"type": "NegativeBinomialNMF", "dispersion": "column"})
    alpha = np.random.default_rng(0).uniform(0.2, 1.0, (CHAINS, DRAWS, J))
    posterior = tree["posterior"].to_dataset()
    column = posterior["H"].dims[-1]
    drawn = posterior.assign(dispersion=(("chain", "draw", column), alpha))
    tree["posterior"] = xr.DataTree(drawn)
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS), VALUES)["log_likelihood"]["V"]
    own = alpha[:, :, COLUMNS]
    expected = stats.nbinom.logpmf(VALUES, 1 / own, 1 / (1 + own * mu()))
    assert_allclose(found, expected, rtol=1e-10)


SIGMA = np.linspace(0.5, 2.5, I * J).reshape(I, J)


def with_cells(kind, weights):
    model = attrs(tweedie(2.0), data=json.dumps({"weighting": kind}))
    V = np.arange(float(I * J)).reshape(I, J)
    return memory_tree(make_spec(attrs=model, observed=V, weights=weights))


def test_cells_with_uncertainties():
    tree = with_cells("uncertainty", 1 / SIGMA**2)
    V = tree["observed_data"]["V"].values[ROWS, COLUMNS]
    sd = SIGMA[ROWS, COLUMNS]
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS))["log_likelihood"]["V"]
    assert_allclose(found, stats.norm.logpdf(V, mu(), sd), rtol=1e-12)
    given = dfac.log_likelihood(with_cells("uncertainty", None), (ROWS, COLUMNS), uncertainty=sd)[
        "log_likelihood"
    ]["V"]
    assert_allclose(given, found, rtol=1e-12)
    with pytest.raises(OptionError, match="pass them as uncertainty="):
        dfac.log_likelihood(with_cells("uncertainty", None), (ROWS, COLUMNS))
    nothing = np.where(sd[2] == SIGMA, 0.0, 1 / SIGMA**2)
    with pytest.raises(DataError, match="the first at row 6, column 4"):
        dfac.log_likelihood(with_cells("uncertainty", nothing), (ROWS, COLUMNS))


def test_a_cell_of_weight_w_is_w_observations():
    tree = with_cells("weights", SIGMA)
    V = tree["observed_data"]["V"].values[ROWS, COLUMNS]
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS))["log_likelihood"]["V"]
    one = stats.norm.logpdf(V, mu(), 1.0)
    assert_allclose(found, SIGMA[ROWS, COLUMNS] * one, rtol=1e-12)
    bare = with_cells("weights", None)
    assert_allclose(
        dfac.log_likelihood(bare, (ROWS, COLUMNS), weights=2.0)["log_likelihood"]["V"], 2 * one
    )
    refused(OptionError, "pass them as weights=", dfac.log_likelihood, bare, (ROWS, COLUMNS))
    with pytest.raises(DataError, match="one for each of the 4 cells"):
        dfac.log_likelihood(bare, (ROWS, COLUMNS), weights=-1.0)
    with pytest.raises(OptionError, match="weights are for runs"):
        dfac.log_likelihood(run(tweedie(2.0)), (ROWS, COLUMNS), VALUES, weights=2.0)


@pytest.fixture(scope="module")
def counts():
    """Many draws that are alike, so that moments of observations are known."""
    rng = np.random.default_rng(3)
    tree = memory_tree(make_spec())
    W = rng.gamma(20.0, 0.1, (2, 4000, I, K)).astype("f4")
    H = rng.gamma(20.0, 0.1, (2, 4000, K, J)).astype("f4")
    labels = tree["posterior"].to_dataset().drop_vars(["draw", "chain"]).coords
    found = drawn_tree(W, H, ("gene", "day"), **labels)
    found.attrs = dict(tree.attrs)
    return found


@pytest.mark.parametrize("law", LAWS)
def test_new_observations_have_the_moments_of_predictions(law, counts):
    model, dispersion, _, _ = LAWS[law]
    tree = counts.copy()
    tree.attrs = attrs(model, dispersion=dispersion)
    drawn = dfac.posterior_predictive(tree, (ROWS, COLUMNS), random_seed=1)
    drawn = drawn["posterior_predictive"]["V"].values.reshape(-1, ROWS.size)
    told = dfac.predict(tree, *(xr.DataArray(at, dims="cell") for at in labels()), interval=0.8)
    told = told.load()
    n = len(drawn)
    assert_array_less(abs(drawn.mean(0) - told["mean"].values), 5 * drawn.std(0) / np.sqrt(n))
    # The law of total variance; each side by draws of its own.
    means = counts["posterior"].to_dataset()
    mu = np.einsum(
        "sdpk,sdkp->sdp", means["W"].values[:, :, ROWS], means["H"].values[..., COLUMNS]
    ).reshape(-1, ROWS.size)
    beta = model.get("beta")
    own = mu + dispersion * mu**2 if beta is None else dispersion * mu ** (2 - beta)
    fourth = ((drawn - drawn.mean(0)) ** 4).mean(0)
    error = np.sqrt((fourth - drawn.var(0) ** 2) / n)
    assert_array_less(abs(drawn.var(0) - mu.var(0) - own.mean(0)), 5 * error)
    if beta in (None, 1.0, 2.0):  # predictions leave out what the curvature of others adds
        assert_array_less(abs(drawn.var(0) - told["sd"].values ** 2), 5 * error)
    inside = ((drawn >= told["lower"].values) & (drawn <= told["upper"].values)).mean(0)
    assert (inside > 0.77).all()
    assert (inside < 0.95).all()


def labels():
    coords = make_spec().labels
    return coords["gene"].values[ROWS], coords["day"].values[COLUMNS]


def test_the_same_bits_for_any_cells_and_chunks(monkeypatch):
    tree = memory_tree(make_spec())
    found = dfac.posterior_predictive(tree, (ROWS, COLUMNS), random_seed=5)
    drawn = found["posterior_predictive"]["V"].values
    monkeypatch.setattr(pointwise, "BLOCK_BYTES", 8)
    monkeypatch.setattr(pointwise, "GATHERED", 1)
    cut = dfac.posterior_predictive(tree, (ROWS[::-1], COLUMNS[::-1]), random_seed=5)
    assert len(cut["posterior_predictive"]["V"].chunks[2]) == 4
    assert_array_equal(cut["posterior_predictive"]["V"].values[..., ::-1], drawn)
    one = dfac.posterior_predictive(tree.isel(chain=[1]), (ROWS, COLUMNS), random_seed=5)
    assert_array_equal(one["posterior_predictive"]["V"].values[0], drawn[1])
    other = dfac.posterior_predictive(tree, (ROWS, COLUMNS), random_seed=6)
    assert (other["posterior_predictive"]["V"].values != drawn).any()


@pytest.mark.parametrize("how", ["positions", "labels", "mask", "list"])
def test_cells_by_position_label_and_mask(how):
    mask = np.zeros((I, J), bool)
    mask[ROWS, COLUMNS] = True
    cells = {
        "positions": (ROWS, COLUMNS),
        "labels": labels(),
        "mask": mask,
        "list": [list(ROWS), list(COLUMNS)],
    }[how]
    tree = memory_tree(make_spec(observed=np.arange(35.0).reshape(I, J)))
    found = dfac.log_likelihood(tree, cells)
    group = found["log_likelihood"]
    order = np.lexsort((COLUMNS, ROWS)) if how == "mask" else np.arange(4)
    assert group["row_index"].values.tolist() == ROWS[order].tolist()
    assert group["column_index"].values.tolist() == COLUMNS[order].tolist()
    assert group["gene"].values.tolist() == labels()[0][order].tolist()
    assert group["weight"].dims == ("cell",)
    assert found["observed_data"]["V"].values.tolist() == (5 * ROWS + COLUMNS)[order].tolist()


def test_a_dimension_of_the_user_may_be_called_cell():
    spec = make_spec(dims=("cell", "draw"), coords={"cell": [f"c{i}" for i in range(I)]})
    found = dfac.log_likelihood(memory_tree(spec), (ROWS, COLUMNS), VALUES)
    group = found["log_likelihood"]
    assert group["V"].dims == ("chain", "draw", "cell")
    assert group["cell_"].values.tolist() == ["c0", "c3", "c6", "c3"]


@pytest.mark.parametrize("form", ["array", "labelled", "sparse"])
def test_values_come_from_a_matrix(form):
    V = np.arange(35.0).reshape(I, J)
    given = {"array": V, "labelled": xr.DataArray(V, dims=("gene", "day"))}.get(form)
    if form == "sparse":
        from scipy import sparse

        given = sparse.csr_array(V)
    model = attrs(tweedie(1.0), data=json.dumps({"unstored": "zero"}))
    if form != "sparse":
        model = ATTRS
    found = dfac.log_likelihood(memory_tree(make_spec(attrs=model)), (ROWS, COLUMNS), given)
    assert found["observed_data"]["V"].values.tolist() == (5 * ROWS + COLUMNS).tolist()


def seeing(observed, **about):
    """A run of a 7 x 5 matrix, with its data or without."""
    data = {"shape": [I, J], "n_observed": 35} | about
    return memory_tree(make_spec(observed=observed, attrs={**ATTRS, "data": json.dumps(data)}))


def test_cells_that_the_run_has_not_seen_do_not_pass_for_observed():
    V, cells = np.arange(35.0).reshape(I, J), (ROWS, COLUMNS)
    train = V.copy()
    train[cells] = np.nan
    tree, values = seeing(train, n_observed=31), V[cells]
    for told in (None, True):
        found = dfac.log_likelihood(tree, cells, values, held_out=told)
        assert set(found.children) == {"posterior", "held_out_log_likelihood", "held_out_data"}
        assert found["held_out_data"]["V"].values.tolist() == values.tolist()
    with pytest.raises((TypeError, AttributeError, ValueError, KeyError), match="log"):
        az.loo(as_arviz(found.load()))
    seen = dfac.log_likelihood(seeing(V), cells)
    assert_array_equal(found["held_out_log_likelihood"]["V"], seen["log_likelihood"]["V"])
    with pytest.raises(OptionError, match=r"has seen 1 of these 5 cells.* ask for them apart"):
        dfac.log_likelihood(tree, (np.r_[ROWS, 1], np.r_[COLUMNS, 1]), V)
    with pytest.raises(OptionError, match="held_out=False, but the run has not seen"):
        dfac.log_likelihood(tree, cells, values, held_out=False)
    with pytest.raises(OptionError, match="held_out=True, but the run has seen"):
        dfac.log_likelihood(seeing(V), cells, held_out=True)


def test_what_nothing_tells_is_asked_for():
    V, cells = np.arange(35.0).reshape(I, J), (ROWS, COLUMNS)
    bare, whole = seeing(None, n_observed=31), seeing(None)
    with pytest.raises(OptionError, match=r"pass held_out=True if they were left out"):
        dfac.log_likelihood(bare, cells, V[cells])
    with pytest.raises(OptionError, match=r"pass held_out=True"):
        dfac.log_likelihood(bare, cells, V)  # more entries than the run had
    refused(OptionError, "True or False", dfac.log_likelihood, bare, cells, V[cells], held_out=1)
    assert "log_likelihood" in dfac.log_likelihood(bare, cells, V[cells], held_out=False)
    assert "held_out_data" in dfac.log_likelihood(bare, cells, V[cells], held_out=True)
    some = V.copy()
    some[6, 1:] = np.nan  # 31 are left, (6, 4) is not
    assert "log_likelihood" in dfac.log_likelihood(bare, (ROWS[:2], COLUMNS[:2]), some)
    assert "log_likelihood" in dfac.log_likelihood(whole, cells, V[cells])  # it saw every cell


def test_a_store_gives_what_memory_gives(tmp_path):
    spec = make_spec()
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    own = dfac.log_likelihood(memory_tree(spec), (ROWS, COLUMNS), VALUES).load()
    read = dfac.log_likelihood(tmp_path / "run.zarr", (ROWS, COLUMNS), VALUES).load()
    xr.testing.assert_identical(own, read)


def test_mistakes_are_told_in_a_sentence():
    tree = memory_tree(make_spec())
    cells = ROWS, COLUMNS

    def refuse(kind, match, trace, *args, **options):
        refused(kind, match, dfac.log_likelihood, trace, *args, **options)

    refuse(OptionError, "pass the matrix or the values", tree, cells)
    refuse(DataError, "3 values for 4 cells", tree, cells, VALUES[:3])
    gone = VALUES * [1, 1, np.nan, 1]
    refuse(DataError, "no value at 1 of 4 cells, the first at row 6", tree, cells, gone)
    refuse(DataError, "negative", tree, cells, -VALUES)
    refuse(DataError, r"shape of the run's data, \(7, 5\)", tree, cells, np.ones((3, 3)))
    refuse(OptionError, "between 0 and 6, got 0 to 7", tree, ([0, 7], [0, 0]), [1.0, 1.0])
    refuse(OptionError, "must be equally many, got 2 and 1", tree, ([0, 1], [0]), [1.0])
    refuse(OptionError, "cells are a pair", tree, np.arange(4), VALUES)
    refuse(OptionError, "no cells at all", tree, ([], []), [])
    refuse(OptionError, "there is no 'nobody'", tree, (["nobody"], labels()[1][:1]), [1.0])
    refuse(OptionError, "kept moments only", memory_tree(make_spec(keep="moments")), cells, VALUES)
    refuse(OptionError, "these draws have weights", particle_tree(silf=False), cells, VALUES)
    refuse(ModelError, "neither a closed form", run(tweedie(3.0)), cells, VALUES)
    refuse(OptionError, "leave uncertainty out", tree, cells, VALUES, uncertainty=1.0)
    hidden = memory_tree(make_spec(observed=np.full((I, J), np.nan)))
    refuse(DataError, r"hold_out\(...\).values", hidden, cells)
    found = dfac.posterior_predictive(hidden, cells)
    assert "observed_data" not in found.children


def as_arviz(tree):
    """The tree as the ArviZ that is there takes it."""
    return az.from_datatree(tree) if hasattr(az, "from_datatree") else tree


def test_attributes_of_groups():
    tree = memory_tree(make_spec(attrs={**ATTRS, "created_at": "2026-01-01T00:00:00+00:00"}))
    found = dfac.log_likelihood(tree, (ROWS, COLUMNS), VALUES)
    for group in (*tree.children.values(), *found.children.values()):
        assert group.attrs["inference_library"] == "daskfactor"
        assert group.attrs["creation_library"] == "daskfactor"
        assert group.attrs["creation_library_version"] == dfac.__version__
        assert group.attrs["created_at"] == "2026-01-01T00:00:00+00:00"
    assert tree["posterior"].attrs["sample_dims"] == ["chain", "draw"]
    assert found["log_likelihood"].attrs["sample_dims"] == ["chain", "draw"]
    assert "sample_dims" not in found["observed_data"].attrs


def test_arviz_takes_the_groups(counts):
    short = counts.isel(draw=slice(500))
    # Alike enough that no cell alone would move them.
    for factor in "WH":
        short["posterior"][factor] = short["posterior"][factor] ** 0.25
    cells, values = (ROWS, COLUMNS), np.full(4, 4.0)
    found = dfac.log_likelihood(short, cells, values).load()
    drawn = dfac.posterior_predictive(short, cells, values)
    data = as_arviz(found)
    result = az.loo(data, pointwise=True)
    score = float(getattr(result, "elpd_loo", None) or result.elpd)
    each = getattr(result, "loo_i", None) if hasattr(result, "loo_i") else result.elpd_i
    assert score == pytest.approx(float(np.sum(each)))
    assert (np.asarray(result.pareto_k) < 0.7).all()
    table = az.summary(data)
    assert len(table) == 4
    for check in (az.rhat, az.ess):
        assert np.isfinite(np.asarray(check(data)["mu"])).all()
    shown = as_arviz(drawn.load())
    plot = getattr(az, "plot_ppc", None) or az.plot_ppc_dist
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the plots' own making
        import matplotlib as mpl

        mpl.use("Agg")
        plot(shown, num_pp_samples=5) if hasattr(az, "plot_ppc") else plot(shown, num_samples=5)
        mpl.pyplot.close("all")


def test_masks_and_values_are_matched_by_their_labels():
    rng = np.random.default_rng(3)
    coords = {"user": [f"u{i}" for i in range(4)], "item": list("abcd")}
    V = xr.DataArray(rng.normal(size=(4, 4)), coords, ("user", "item"))
    mask = xr.zeros_like(V, bool)
    mask.loc["u3", "a"] = True
    options = {"draws": 4, "tune": 3, "random_seed": 0, "progressbar": False}
    trace = dfac.sample(V, dfac.GaussianMF(2), **options)
    cells = np.array([3, 1]), np.array([0, 2])
    right = dfac.log_likelihood(trace, cells)["log_likelihood/V"].values
    for turned in (mask[:, ::-1], mask[::-1].T):
        found = dfac.log_likelihood(trace, turned)["log_likelihood/V"]
        assert (found["row_index"].item(), found["column_index"].item()) == (3, 0)
        held = dfac.hold_out(V, cells=turned)
        assert [own.tolist() for own in held.cells] == [[3], [0]]
        held = dfac.hold_out(dfac.as_blocks(V), cells=turned)
        assert [own.tolist() for own in held.cells] == [[3], [0]]
        watched = dfac.sample(V, dfac.GaussianMF(2), monitor=turned, **options)["monitor"]
        assert (watched["row_index"].item(), watched["column_index"].item()) == (3, 0)
    for turned in (V[:, ::-1], V.T, V[::-1].T):
        found = dfac.log_likelihood(trace, cells, turned)["log_likelihood/V"].values
        assert_allclose(found, right, rtol=1e-6)
    other = mask.assign_coords(item=list("efgh"))
    for ask in (
        lambda: dfac.log_likelihood(trace, other),
        lambda: dfac.hold_out(V, cells=other),
        lambda: dfac.sample(V, dfac.GaussianMF(2), monitor=other, **options),
    ):
        refused(OptionError, "labels of item are not those of V", ask)
    with pytest.raises(DataError, match="no value at 1 of 2 cells"):
        dfac.log_likelihood(trace, cells, V.assign_coords(item=list("bcde")))
    with pytest.raises(DataError, match="not unique"):
        dfac.log_likelihood(trace, cells, V.assign_coords(item=list("bbca")))
