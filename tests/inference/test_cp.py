"""CP models: one seed gives the same bits everywhere, and results by axis, cell and unfolding."""

from itertools import combinations

import numpy as np
import pytest
import sparse
import xarray as xr
from scipy import stats

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.inference.setting import Setting
from daskfactor.tensor.source import as_tensor
from tests.executors.audit import AuditExecutor
from tests.inference.test_conformance import same
from tests.refusals import refused

SETTINGS = {"draws": 12, "tune": 12, "random_seed": 3, "progressbar": False}
KINDS = dfac.PSGRRLD, dfac.SGHMC, dfac.BlockHMC, dfac.LangevinDynamics
SAMPLERS = [dfac.PSGLD(warm_start=5), dfac.PSGLD(transition="euler", warm_start=5)]
SAMPLERS += [kind(warm_start=5) for kind in KINDS]
NAMES = ("person", "place", "week")


def truth(shape=(14, 12, 9), seed=0):
    rng = np.random.default_rng(seed)
    factors = [rng.gamma(1.0, size=(size, 2)) for size in shape]
    letters = "ijlm"[: len(shape)]
    rule = ",".join(f"{own}k" for own in letters) + f"->{letters}"
    return rng.poisson(np.einsum(rule, *factors)).astype(np.float64)


@pytest.mark.quick("PSGLD-moments-3", "BlockHMC--3")
@pytest.mark.parametrize(
    ("sampler", "axes"),
    [(sampler, 3 + number % 2) for number, sampler in enumerate(SAMPLERS)],
    ids=lambda own: f"{own.name}-{getattr(own, 'transition', '')}" if hasattr(own, "name") else own,
)
def test_the_audit_finds_nothing_and_the_same_bits(sampler, axes):
    V = truth((8, 7, 6, 5)[:axes])
    cells = tuple(np.arange(4) for _ in range(axes))
    given = V, dfac.CP(2, dispersion=1.0), sampler
    options = {**SETTINGS, "blocks": 2, "monitor": cells}
    here = dfac.sample(*given, executor="serial", **options)
    assert same(dfac.sample(*given, executor=AuditExecutor(axes), **options), here)
    assert here["posterior"]["W"].values.min() >= 0


@pytest.mark.quick("PSGLD")
@pytest.mark.parametrize("sampler", SAMPLERS[:1] + SAMPLERS[3:5], ids=lambda own: own.name)
def test_a_resumed_run_is_the_run(sampler, tmp_path):
    V, model = truth(), dfac.CP(2, factors=NAMES, dispersion=1.0)
    cells = tuple(np.arange(4) for _ in range(3))
    options = {**SETTINGS, "monitor": cells}
    whole = dfac.sample(V, model, sampler, **options)
    dfac.sample(V, model, sampler, store=tmp_path / "run", **{**options, "draws": 5})
    with pytest.raises(dfac.errors.DataError, match="pass the data again"):
        dfac.resume(tmp_path / "run", draws=7, progressbar=False)
    with pytest.raises(dfac.errors.DataError, match="not those"):
        dfac.resume(tmp_path / "run", draws=7, V=V + 1, progressbar=False)
    assert same(dfac.resume(tmp_path / "run", draws=7, V=V, progressbar=False), whole)


@pytest.mark.full
def test_dense_and_sparse_zeros_sample_the_same_posterior():
    """Zeros that are stored and zeros in a closed form differ by rounding alone."""
    V, settings = truth(), {**SETTINGS, "draws": 3, "tune": 2}
    for beta in (1.0, 2.0):
        model = dfac.CP(2, beta=beta, dispersion=1.0)
        sampler = dfac.PSGLD(warm_start=5)
        every = as_tensor(V, 2, dtype="float64")
        few = as_tensor(sparse.COO(V), every.grid, dtype="float64", unstored="zero")
        assert few.row_order is None
        one, other = (dfac.sample(data, model, sampler, **settings) for data in (every, few))
        for name in "WH":
            np.testing.assert_allclose(
                one["posterior"][name].values, other["posterior"][name].values, rtol=1e-7
            )


def means(trace):
    """Return the mean of every cell at every draw."""
    factors = (own.values for own in dfac.factors(trace).values())
    return np.einsum("cdik,cdjk,cdlk->cdijl", *factors)


LABELLED = xr.DataArray(truth(), dims=NAMES, coords={"week": np.arange(9) * 7})
AT = np.array([0, 3, 13]), np.array([1, 1, 11]), np.array([8, 0, 2])


@pytest.fixture(scope="module")
def trace():
    model, options = dfac.CP(3, dispersion=1.0), SETTINGS | {"monitor": AT, "chains": 2}
    return dfac.sample(LABELLED, model, dfac.PSGLD(warm_start=5), **options)


def test_what_is_predicted_is_what_draws_make(trace):
    V, at, factors, mu = LABELLED, AT, dfac.factors(trace), means(trace)
    assert tuple(factors) == NAMES
    assert [own.dims[2] for own in factors.values()] == list(NAMES)
    np.testing.assert_array_equal(factors["week"]["week"], np.arange(9) * 7)
    seen = mu[:, :, at[0], at[1], at[2]]
    points = dfac.predict(trace, at, of="mean")
    np.testing.assert_allclose(points["mean"], seen.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(points["sd"], seen.std((0, 1)), rtol=1e-4)
    np.testing.assert_array_equal(points["week"], at[2])
    whole = dfac.predict(trace, of="mean")
    assert whole["mean"].dims == NAMES
    np.testing.assert_allclose(whole["mean"].values[at], points["mean"], rtol=1e-6)
    np.testing.assert_array_equal(whole["week"], np.arange(9) * 7)
    watched = dfac.monitored(trace, of="mean")
    np.testing.assert_allclose(watched["mean"], points["mean"], rtol=1e-4)
    np.testing.assert_array_equal(watched["place"], at[1])
    densities = dfac.log_likelihood(trace, at, V=V.values[at], held_out=False)
    assert trace.attrs["dispersion"] == 1.0
    np.testing.assert_allclose(
        densities["log_likelihood"]["V"].values, stats.poisson.logpmf(V.values[at], seen), rtol=1e-4
    )
    shares = dfac.explained_variance(trace)
    level = mu.mean((2, 3, 4), keepdims=True)
    parts = np.einsum("cdik,cdjk,cdlk->cdkijl", *(own.values for own in factors.values()))
    away = parts - parts.mean((3, 4, 5), keepdims=True)
    own = (away * (mu - level)[:, :, None]).mean((3, 4, 5))
    noise = level.reshape(2, -1)  # of Poisson counts
    expected = own / (mu.var((2, 3, 4)) + noise)[..., None]
    np.testing.assert_allclose(shares.values[:, :, 0], expected, rtol=1e-3, atol=1e-5)


def test_alignment_changes_no_mean_and_chains_begin_with_a_result(trace):
    aligned = dfac.align(trace)
    np.testing.assert_allclose(means(aligned), means(trace), rtol=1e-4)
    sums = [own.values.sum(2) for own in dfac.factors(aligned).values()]
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-4)
    np.testing.assert_allclose(sums[0], sums[2], rtol=1e-4)
    V, model, options = LABELLED, dfac.CP(3, dispersion=1.0), SETTINGS | {"tune": 0}
    again = dfac.sample(V, model, dfac.PSGLD(warm_start=0), init=trace, **options)
    last, first = (run["posterior"]["H"].values[0, at] for run, at in ((trace, -1), (again, 0)))
    assert np.corrcoef(last.ravel(), first.ravel())[0, 1] > 0.9
    point = dfac.optimize(V, model, random_seed=1, progressbar=False)
    assert point["H"].shape == (3, 21)
    assert "data" in str(dfac.estimate_cost(V, model, dfac.PSGLD()))
    dfac.sample(V, model, dfac.PSGLD(), init=point, **SETTINGS)


def test_an_unfolding_takes_new_indices_of_its_axis():
    V = truth((40, 12, 9))
    options = {**SETTINGS, "draws": 100, "tune": 100}
    model = dfac.CP(2, factors=NAMES, dispersion=1.0)
    trace = dfac.sample(V[:34], model, dfac.BlockHMC(), **options)
    matrix = dfac.view(trace, "person")
    mu = means(trace)
    drawn = matrix["posterior"]
    np.testing.assert_allclose(
        drawn["W"].values @ drawn["H"].values, mu.reshape(*mu.shape[:3], -1), rtol=1e-4
    )
    new = dfac.transform(matrix, V[34:].reshape(6, -1), random_seed=1, progressbar=False)
    found = np.einsum("cdik,cdkf->if", new.values, drawn["H"].values) / 100
    error = np.mean((found - V[34:].reshape(6, -1)) ** 2)
    assert error < 1.3 * V[34:].mean(), "Poisson counts are off by their mean"
    refused(OptionError, "no axis 'month'", dfac.view, trace, "month")
    refused(OptionError, r"pass view\(run, axis\)", dfac.transform, trace, V[34:].reshape(6, -1))


ZEROS = {"V": sparse.COO(truth()), "settings": {"beta": 0.5}, "unstored": "zero"}


def run(V=None, settings=None, sampler=None, **options):
    model = dfac.CP(2, **settings or {"dispersion": 1.0})
    return dfac.sample(truth() if V is None else V, model, sampler, **SETTINGS | options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *(
            ({"sampler": own}, OptionError, "samples matrices")
            for own in (dfac.Gibbs(), dfac.SGLD())
        ),
        ({"settings": {"rate_w": "component"}}, ModelError, None),
        ({"settings": {"shape_w": "auto"}}, ModelError, None),
        ({"settings": {"factors": "abc"}}, ModelError, None),
        ({"settings": {"factors": ("a", 1, "b")}}, ModelError, None),
        ({"monitor": "missing"}, OptionError, "tuple of 3"),
        ({"monitor": ([0], [1])}, OptionError, "tuple of 3"),
        ({"monitor": ([0], [1], [99])}, OptionError, "between 0 and 8"),
        (
            {"monitor": ([0], [1], [1, 2])},
            OptionError,
            "have equal lengths, got 1 and 1 and 2",
        ),
        ({"init": "random"}, OptionError, "init of a CP"),
        ({"blocks": 99}, OptionError, "shortest side"),
        (ZEROS, ModelError, "closed form"),
    ],
    ids=str,
)
def test_what_is_refused(options, error, words):
    refused(error, words, run, **options)


def test_more_than_has_addresses_is_refused():
    words = r"n_components must be below 16777216, got 16777216"
    refused(ModelError, words, Setting, None, dfac.CP(2**24), *[None] * 3)
    Setting(None, dfac.CP(2**24 - 1), *[None] * 3)
    V = sparse.COO(np.zeros((33, 1), np.int64), np.ones(1), shape=(2,) * 33)
    words = r"33 axes, and a CP model takes at most 32; stack"
    refused(DataError, words, dfac.optimize, V, dfac.CP(1, dispersion=1.0), progressbar=False)


def test_noise_of_factors_is_independent():
    """Data that say next to nothing leave the prior, under which entries are independent."""
    V, model = truth((8, 8, 8)), dfac.CP(3, shape_w=2, shape_h=2, dispersion=30.0)
    run = {"draws": 400, "tune": 100, "chains": 1, "random_seed": 1, "progressbar": False}
    trace = dfac.sample(V, model, dfac.SGHMC(warm_start=5), **run)
    logs = [np.log(own.values[0]) for own in dfac.factors(trace).values()]
    for a, b in combinations(logs, 2):
        pairs = [np.corrcoef(a[:, i].T, b[:, i].T)[:3, 3:] for i in range(8)]
        assert np.abs(np.mean(pairs, axis=0)).max() < 0.1


def test_intervals_of_cells_left_out_are_scored():
    held = dfac.hold_out(truth(), 0.1, random_seed=0)
    watching = dfac.sample(held.train, dfac.CP(3), monitor=held.cells, **SETTINGS)
    plain = dfac.sample(held.train, dfac.CP(3), **SETTINGS)
    given = held.cells, held.values
    runs = watching, plain
    one, other = (dfac.held_out_coverage(run, *given, levels=(0.5, 0.9)) for run in runs)
    found = dfac.predict(plain, held.cells, interval=0.9)
    within = (held.values >= found["lower"].values) & (held.values <= found["upper"].values)
    assert other["inside"].values[1] == pytest.approx(within.mean())
    np.testing.assert_allclose(one["rmse"], other["rmse"], rtol=1e-4)
    np.testing.assert_allclose(one["inside"], other["inside"], atol=0.02)
    with pytest.raises(OptionError, match="a tuple of 3 integer arrays"):
        dfac.held_out_coverage(plain, held.cells[:2], held.values)
