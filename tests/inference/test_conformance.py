"""One contract for all samplers: every entry of the registry has a case here."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DaskfactorError, ModelError, OptionError
from daskfactor.inference import normal_parameters
from daskfactor.inference.base import Sampler, checked_sampler
from daskfactor.inference.block_hmc import BlockHMCKernel
from daskfactor.inference.gibbs import GibbsKernel
from daskfactor.inference.langevin import LangevinKernel
from daskfactor.inference.registry import ALGORITHMS, algorithm_from_dict
from daskfactor.inference.sghmc import SquaresKernel
from tests.executors.audit import AuditExecutor
from tests.refusals import refused
from tests.tiers import tiered


class Case(NamedTuple):
    """A sampler and its model; weights of cells."""

    sampler: Sampler
    model: Any
    weights: tuple[Any, Any] | None = None


WARM = {"warm_start": 3}
POISSON = dfac.TweedieNMF(2, dispersion=1.0)
OVERDISPERSED = dfac.NegativeBinomialNMF(2)
BY_COLUMN = dfac.NegativeBinomialNMF(2, dispersion="column")
BOTH_BY_COLUMN = dfac.NegativeBinomialNMF(2, dispersion="column", rate_h="column")
LEARNT = dfac.TweedieNMF(2, dispersion=1.0, rate_w="row", rate_h="component", shape_w="auto")
SHARED = dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", rate_h="component")
NORMAL = dfac.TweedieNMF(2, beta=2.0, dispersion=1.0)
UNEVEN = np.linspace(0.2, 3.0, 7), np.array([1.0, 4.0, 0.5, 2.0, 0.1, 1.5])
EACH_COLUMN = sparse.eye_array(6, format="csr")
LINKED = dfac.GaussianMF(2, covariates_w=np.arange(14.0).reshape(7, 2), covariates_h=EACH_COLUMN)
COSINES = np.cos(np.arange(14.0)).reshape(7, 2)
LOG_LINEAR = replace(POISSON, covariates_w=COSINES, covariates_h=EACH_COLUMN)


@pytest.fixture(autouse=True)
def scales_are_drawn(monkeypatch):
    """Short runs draw them, too."""
    for kind in (LangevinKernel, BlockHMCKernel, GibbsKernel, SquaresKernel):
        monkeypatch.setattr(kind, "rescales_every", 4)
    monkeypatch.setattr(normal_parameters, "SYMMETRIES_EVERY", 2)


class OwnStep:
    def __call__(self, iteration):
        return 0.1

    def to_dict(self):
        return {"type": "OwnStep"}


STEPS = (0.0, "large", -1, lambda t: 0.1, OwnStep())
WARM_STARTS, METRICS = {"warm_start": (-1, 2.5)}, {"preconditioner": ("newton", "identity")}
SUBSAMPLES, RATES = (0, -0.5, 1.5, True, "all", float("nan")), (0, 1, 1.5, "high", float("nan"))
LANGEVIN = {"step": STEPS} | WARM_STARTS | METRICS
REFUSED = {
    dfac.PSGLD: LANGEVIN | {"schedule": ("cyclic",), "transition": ("exact",)},
    dfac.PSGRRLD: {"step": STEPS, "transition": ("exact",)},
    dfac.Gibbs: WARM_STARTS,
    dfac.LangevinDynamics: LANGEVIN | {"transition": ("exact",)},
    dfac.SGLD: LANGEVIN | {"subsample": SUBSAMPLES},
    dfac.BlockHMC: {"step": STEPS, "steps": (0, 2.5), "target_accept": RATES} | WARM_STARTS,
    dfac.SGHMC: {"step": STEPS[:3], "friction": (0,), "schedule": ("cyclic",)} | WARM_STARTS,
}
"""Values of options that a sampler must refuse."""
TWO = {"steps": 2, **WARM}
CASES = {
    "PSGLD": Case(dfac.PSGLD(**WARM), POISSON),
    "PSGLD plain": Case(dfac.PSGLD(step=1e-3, preconditioner="identity", **WARM), POISSON),
    "PSGLD euler": Case(dfac.PSGLD(transition="euler", **WARM), POISSON),
    "PSGRRLD": Case(dfac.PSGRRLD(**WARM), POISSON),
    "PSGRRLD moments": Case(dfac.PSGRRLD(transition="moments", **WARM), POISSON),
    "Gibbs": Case(dfac.Gibbs(**WARM), POISSON),
    "Gibbs real-valued": Case(dfac.Gibbs(), dfac.GaussianMF(2)),
    "Gibbs covariates": Case(dfac.Gibbs(), LINKED),
    "LangevinDynamics": Case(dfac.LangevinDynamics(**WARM), POISSON),
    "LangevinDynamics moments": Case(dfac.LangevinDynamics(transition="moments", **WARM), POISSON),
    "SGLD moments": Case(dfac.SGLD(transition="moments", **WARM), POISSON),
    "LangevinDynamics plain": Case(
        dfac.LangevinDynamics(dfac.PolynomialStep(0.01, 0.6), "identity", **WARM), POISSON
    ),
    "SGLD": Case(dfac.SGLD(**WARM), POISSON),
    "SGLD of a third": Case(dfac.SGLD(0.01, subsample=0.3, **WARM), POISSON),
    "BlockHMC": Case(dfac.BlockHMC(**TWO), POISSON),
    "PSGLD negative binomial": Case(dfac.PSGLD(**WARM), OVERDISPERSED),
    "PSGRRLD negative binomial": Case(dfac.PSGRRLD(**WARM), OVERDISPERSED),
    "BlockHMC negative binomial": Case(dfac.BlockHMC(**TWO), OVERDISPERSED),
    "PSGLD columns": Case(dfac.PSGLD(**WARM), BOTH_BY_COLUMN),
    "BlockHMC columns": Case(dfac.BlockHMC(**TWO), BY_COLUMN),
    "PSGLD learnt": Case(dfac.PSGLD(**WARM), LEARNT),
    "Gibbs learnt": Case(dfac.Gibbs(**WARM), LEARNT),
    "BlockHMC learnt": Case(dfac.BlockHMC(**TWO), SHARED),
    "SGHMC covariates": Case(dfac.SGHMC(), LINKED),
    "PSGLD log-linear": Case(dfac.PSGLD(**WARM), LOG_LINEAR),
    "Gibbs log-linear": Case(dfac.Gibbs(**WARM), LOG_LINEAR),
    "BlockHMC log-linear": Case(dfac.BlockHMC(**TWO), LOG_LINEAR),
    "SGHMC": Case(dfac.SGHMC(), dfac.GaussianMF(2)),
    "SGHMC squares": Case(dfac.SGHMC(friction=0.5, **WARM), POISSON),
    "SGHMC learnt": Case(dfac.SGHMC(**WARM), SHARED),
    "PSGLD weights": Case(dfac.PSGLD(**WARM), POISSON, UNEVEN),
    "PSGLD negative binomial weights": Case(dfac.PSGLD(**WARM), OVERDISPERSED, UNEVEN),
    "SGLD weights": Case(dfac.SGLD(**WARM), NORMAL, UNEVEN),
    "BlockHMC weights": Case(dfac.BlockHMC(**TWO), NORMAL, UNEVEN),
    "Gibbs weights": Case(dfac.Gibbs(), dfac.GaussianMF(2), UNEVEN),
    "SGHMC weights": Case(dfac.SGHMC(), dfac.GaussianMF(2), UNEVEN),
    "SGHMC negative binomial": Case(dfac.SGHMC(**WARM), OVERDISPERSED),
}

DRAWS, STOPPED, TUNE = 12, 8, 10


def test_every_kind_of_sampler_has_a_case():
    names = {type(case.sampler).__name__ for case in CASES.values()}
    assert names == set(ALGORITHMS["Sampler"]) == {kind.__name__ for kind in REFUSED}


def counts():
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.gamma(2, 1, (7, 2)) @ rng.gamma(2, 1, (2, 6))).astype(np.float32)
    V[rng.random(V.shape) < 0.2] = np.nan
    V[:, 0] = V[0] = 2.0
    V[-1, -1] = np.nan
    return V


def draw(name, V=None, **options):
    case = CASES[name]
    settings = {"draws": DRAWS, "tune": TUNE, "blocks": 2, "random_seed": 5, "monitor": "missing"}
    settings |= {"executor": "serial", "progressbar": False}
    model = options.pop("model", case.model)
    V = counts() if V is None else V
    if case.weights is not None:
        V = dfac.as_blocks(V, 2, unstored=options.get("unstored"), weights=case.weights)
    return dfac.sample(V, model, case.sampler, **settings | options)


@cache
def serial(name):
    """Return the run that all tests of a case share."""
    return draw(name)


def same(one, other):
    """Whether all groups hold the same bits."""
    assert set(one.children) == set(other.children)
    return all(plain(one[group]).identical(plain(other[group])) for group in one.children)


def plain(group):
    """Values alone; a store also has the constants that a model does not use, as NaN."""
    values = group.to_dataset().drop_attrs().compute()
    if group.name != "constant_data":
        return values
    return values[[name for name, value in values.data_vars.items() if np.isfinite(value)]]


each = pytest.mark.parametrize("name", CASES)
FIRST = {type(case.sampler): name for name, case in reversed(CASES.items())}.values()
# With these every sampler, and every kind of model.
BRIEF = {*FIRST, "PSGLD columns", "Gibbs real-valued", "Gibbs learnt", "BlockHMC learnt", "SGHMC"}
BRIEF |= {"BlockHMC log-linear", "SGHMC negative binomial"}
AUDITED = BRIEF | {"PSGLD negative binomial", "BlockHMC columns", "SGHMC squares"}
AUDITED |= {"PSGLD weights", "BlockHMC weights", "Gibbs weights", "SGHMC weights"}
# Every sampler and every kind of model is stored with one of the others here.
OF_PAIRS = {
    *("PSGLD euler", "SGLD moments", "SGLD of a third", "BlockHMC learnt", "SGHMC squares"),
    *("PSGRRLD negative binomial", "BlockHMC negative binomial", "SGHMC negative binomial"),
    "Gibbs log-linear",
    *("PSGLD negative binomial weights", "SGLD weights", "BlockHMC weights", "SGHMC weights"),
}
stored = pytest.mark.parametrize(
    "name", [name for name in CASES if "plain" not in name and name not in OF_PAIRS]
)


@pytest.mark.parametrize("name", tiered(CASES, BRIEF.__contains__))
def test_names_dims_and_types(name):
    V = xr.DataArray(counts(), dims=("gene", "sample"))
    tree = draw(name, V, chains=2, draws=4)
    width = CASES[name].model.width
    dims = {"chain": 2, "draw": 4, "gene": 7, "component": width}
    assert dict(tree["posterior"]["W"].sizes) == dims
    assert tree["posterior"]["H"].dims == ("chain", "draw", "component", "sample")
    assert tree["posterior"]["H"].dtype == np.float32
    learnt = {own.name for own in CASES[name].model.learnt}
    assert set(tree["posterior"].data_vars) == {"W", "H"} | learnt
    assert tree["posterior"]["draw"].values.tolist() == list(range(TUNE, TUNE + 4))
    stats = tree["sample_stats"]
    assert {"lp", "step_size", "diverging"} <= set(stats.data_vars)
    declared = {own.name for own in CASES[name].sampler.kernel(CASES[name].model).statistics}
    assert set(stats.data_vars) == {"lp", "step_size", "diverging"} | declared
    for variable in stats.data_vars.values():
        assert variable.sizes == {"chain": 2, "draw": 4}
        assert np.all(np.isfinite(variable))
    assert not np.any(stats["diverging"])
    assert np.all(tree["warmup_sample_stats"]["step_size"] > 0)
    assert json.loads(tree.attrs["sampler"])["type"] == type(CASES[name].sampler).__name__
    first, second = tree["posterior"]["W"].values
    assert not np.any(first[-1, :, :2] == second[-1, :, :2])


@each
def test_signs_moments_and_monitored_cells(name):
    tree = serial(name)
    names = "posterior", "posterior_moments", "monitor"
    posterior, moments, watched = (tree[group] for group in names)
    W, H = posterior["W"].values, posterior["H"].values
    if CASES[name].model.nonnegative:
        assert W.min() >= 0
        assert H.min() >= 0
    assert np.all(np.isfinite(W))
    np.testing.assert_allclose(moments["W_mean"], W.mean(axis=1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moments["H_var"], H.var(axis=1), rtol=1e-2, atol=1e-6)
    assert watched["mean"].sizes["cell"] == np.count_nonzero(np.isnan(counts()))
    if len(CASES[name].sampler.tracks) == 1:
        mu = (W @ H)[:, :, watched["row_index"].values, watched["column_index"].values]
        np.testing.assert_allclose(watched["mean"], mu.mean(axis=1), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(watched["var"], mu.var(axis=1), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.model is POISSON])
def test_lp_is_the_log_posterior_density_of_the_draw(name):
    from tests.models.laws import log_density

    V = counts()
    model = dfac.TweedieNMF(2, dispersion=1.0, rate_w=0.7, rate_h=0.4)
    tree = draw(name, model=model)
    seen = ~np.isnan(V)
    for at in (0, DRAWS - 1):
        W, H = (tree["posterior"][factor].values[0, at] for factor in ("W", "H"))
        each = log_density(V[seen], (W @ H)[seen], 1.0, 1.0)
        if (weights := CASES[name].weights) is not None:
            each = each * np.outer(*weights)[seen]
        wanted = each.sum() + model.log_prior(W, H, 0.7, 0.4)
        assert tree["sample_stats"]["lp"].values[0, at] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", tiered(CASES, AUDITED.__contains__))
def test_the_audit_finds_nothing_and_the_same_bits(name):
    """So does whatever executor: `tests/executors/test_audit.py` shows what the audit finds."""
    assert same(draw(name, executor=AuditExecutor(len(name))), serial(name))


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        ("PSGLD learnt", dfac.ThreadsExecutor(2)),
        ("BlockHMC columns", dfac.TasksExecutor("threads", 2)),
        ("Gibbs log-linear", dfac.TasksExecutor("synchronous")),
    ],
)
def test_real_executors_give_the_same_bits(name, executor):
    assert same(draw(name, executor=executor), serial(name))
    executor.close()


@pytest.mark.parametrize("name", FIRST)
def test_another_seed_gives_other_draws(name):
    one, other = (run["posterior"]["W"].values for run in (serial(name), draw(name, random_seed=6)))
    assert not np.any(one[..., :2] == other[..., :2])


@pytest.mark.quick("PSGLD", "PSGRRLD", "BlockHMC columns", "Gibbs learnt", "SGHMC covariates")
@stored
def test_stopped_and_extended_runs_draw_what_unbroken_ones_do(name, tmp_path, monkeypatch):
    """The unbroken run has one segment where these have many."""
    monkeypatch.setattr("daskfactor.inference.setting.LONGEST_SEGMENT", 4)
    monkeypatch.setattr("daskfactor.runs.files.CHEAP_SECONDS", np.inf)  # save on slow machines, too

    def press(event):
        if event.phase == "draw" and event.done > 5:
            raise KeyboardInterrupt

    unbroken, store = serial(name), tmp_path / "run.zarr"
    refused(KeyboardInterrupt, None, draw, name, store=store, draws=STOPPED, callback=press)
    assert dfac.open_run(store)["posterior"].sizes["draw"] == 4
    again = plain(dfac.resume(store, executor="serial", progressbar=False)["posterior"])
    assert again.identical(plain(unbroken["posterior"]).isel(draw=slice(STOPPED)))
    more = DRAWS - STOPPED
    assert same(dfac.resume(store, draws=more, executor="serial", progressbar=False), unbroken)


@pytest.mark.parametrize(
    # The negative binomial law with weights is compiled for tests/kernels/test_cell_weights.py.
    "name",
    tiered(
        (name for name in CASES if "plain" not in name and "binomial weights" not in name),
        lambda name: name in BRIEF and "columns" not in name,
    ),
)
def test_sparse_input_whatever_is_not_stored(name):
    """What is stored where the rest is missing gives the posterior of the dense matrix."""
    V = counts()
    seen = ~np.isnan(V)
    rows, cols = np.nonzero(seen)
    table = sparse.coo_array((V[seen], (rows, cols)), V.shape)
    means = []
    for unstored in ("missing", "zero"):
        tree = draw(name, table, unstored=unstored, draws=60, monitor=None)
        assert np.all(np.isfinite(tree["posterior"]["W"]))
        mu = xr.dot(tree["posterior"]["W"], tree["posterior"]["H"], dim="component")
        means.append(float(mu.median(("chain", "draw")).mean()))  # of heavy tails where rates vary
    assert means[0] > 1.05 * means[1]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_bad_options_are_refused_in_one_sentence(kind):
    for option, value in ((name, one) for name, own in REFUSED[kind].items() for one in own):
        with pytest.raises(OptionError, match=r"got .|pass a number") as caught:
            kind(**{option: value})
        assert "\n" not in str(caught.value)
        assert option in str(caught.value) or "step" in str(caught.value)


@each
def test_the_other_kind_of_model_is_refused(name):
    case = CASES[name]
    with pytest.raises((OptionError, ModelError)):
        checked_sampler(case.model, type(case.sampler))
    if isinstance(case.sampler, dfac.Gibbs | dfac.SGHMC):
        return  # they sample both kinds
    other = dfac.GaussianMF(2) if case.model.nonnegative else POISSON
    with pytest.raises(DaskfactorError, match=f"cannot be sampled by {case.sampler.name}") as error:
        checked_sampler(other, case.sampler)
    right = set(re.findall(r"(\w+)\(\)", str(error.value)))
    gaussian = {"SGHMC", "Gibbs"}
    assert right == gaussian if other is not POISSON else right > {*gaussian, "PSGLD"}


@each
def test_a_sampler_is_stored_and_read_back_and_what_a_cycle_takes_is_known(name):
    sampler = CASES[name].sampler
    values = json.loads(json.dumps(sampler.to_dict()))
    again = algorithm_from_dict(Sampler, values, "a run was made by a sampler")
    assert again == sampler
    assert type(again) is type(sampler)
    assert hash(sampler) == hash(again)
    with dfac.as_blocks(counts(), 2, allow_empty=True) as data:
        work = sampler.kernel(CASES[name].model, data).work
    assert min(work.moves, work.visits) >= 1
    assert work.passes > 0
    cost = dfac.estimate_cost(counts(), CASES[name].model, sampler, 10, 10)
    assert min(cost.updates, cost.peak) > 0
