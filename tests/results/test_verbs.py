"""Every verb and every kind of run: a right result, or one sentence that says what the verb takes.

A cell of the table is a check of the result or the words of a refusal. What a verb gives is
compared with plain NumPy on the factors wherever that is a line or two.
"""

import warnings
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import daskfactor as dfac
from daskfactor.errors import DaskfactorError, SamplingWarning
from daskfactor.results.verdict import LIGHTS
from tests.refusals import refused
from tests.tiers import tiered

QUIET = {"progressbar": False, "random_seed": 0}
RUN = {"draws": 12, "tune": 8, "chains": 2, **QUIET}
LANGEVIN = dfac.PSGLD(warm_start=3)
PAIR = dfac.PSGRRLD(warm_start=3)
NMF = dfac.TweedieNMF(2, dispersion=1.0)
CP = dfac.CP(2, dispersion=1.0)
RELATIONS = {
    "a": dfac.Relation("rows", "x", law="poisson", dispersion=1.0),
    "b": dfac.Relation("rows", "y", law="normal"),
}
COUPLED = dfac.Coupled(2, relations=RELATIONS)


class Case(NamedTuple):
    """A run, the data that it was made from, and what it is for most verbs."""

    trace: Any
    data: Any
    group: str

    @property
    def tree(self):
        return dfac.open_run(self.trace) if isinstance(self.trace, Path) else self.trace

    def draws(self, group="posterior"):
        """Factors (chain, draw, rows, component), of a tensor one for each axis."""
        found = self.tree[group].to_dataset()
        found = found if "chain" in found.dims else found.expand_dims("chain")
        found = found.transpose("chain", "draw", ..., "component")
        W, H = (found[name].values.astype(float) for name in "WH")
        if "tensor" not in self.group:
            return [W, H]
        return [W, *np.split(H, np.cumsum(np.shape(self.data)[1:])[:-1], axis=2)]

    def means(self, group="posterior"):
        """Mean of every cell under every draw, (chain, draw, ...)."""

        def times(product, factor):
            wide = factor.reshape(*factor.shape[:2], *(1,) * (product.ndim - 3), *factor.shape[2:])
            return product[..., None, :] * wide

        return reduce(times, self.draws(group)).sum(axis=-1)

    @property
    def expected(self):
        """Posterior mean of every cell; of two coupled chains that of the fine one."""
        weight = self.tree["sample_stats"].to_dataset().get("weight")
        if weight is not None:
            return np.tensordot(weight.values, self.means(), axes=2)
        return self.means().mean(axis=(0, 1))

    @property
    def extrapolated(self):
        """The same, of two coupled chains extrapolated."""
        if "posterior_coarse" not in self.tree.children:
            return self.expected
        return 2 * self.expected - self.means("posterior_coarse").mean(axis=(0, 1))


def made_runs(folder):
    rng = np.random.default_rng(0)
    V = rng.poisson(5.0, (8, 6)).astype(float)
    T, T4 = (rng.poisson(5.0, shape).astype(float) for shape in ((5, 4, 3), (4, 3, 3, 2)))
    R = np.log1p(V) - 1.5
    both = {"a": rng.poisson(5.0, (8, 6)).astype(float), "b": rng.normal(5.0, 1.0, (8, 5))}
    watched = {"keep": "moments", "monitor": ([0, 3, 5], [1, 1, 4])}
    negative_binomial = dfac.NegativeBinomialNMF(2, dispersion=0.2)

    def run(data, model, sampler=LANGEVIN, **options):
        return dfac.sample(data, model, sampler, **options, **RUN)

    def stored(name, *given):
        if not (folder / name).exists():
            run(*given, store=folder / name)
        return folder / name

    point, modes = (partial(verb, **QUIET) for verb in (dfac.optimize, dfac.stein_posterior))
    matrix, tensor = cache(lambda: run(V, NMF)), cache(lambda: run(T, CP))
    one, pair, cube = ("run", V, NMF), ("pair", V, NMF, PAIR), ("tensor", T, CP)
    return {
        "matrix": lambda: Case(matrix(), V, "draws"),
        "exact": lambda: Case(run(V, NMF, dfac.Gibbs(warm_start=3)), V, "draws"),
        "gaussian": lambda: Case(run(R, dfac.GaussianMF(2), dfac.SGHMC()), R, "draws"),
        "negative binomial": lambda: Case(run(V, negative_binomial), V, "draws"),
        "pair": lambda: Case(run(V, NMF, PAIR), V, "draws"),
        "one chain": lambda: Case(matrix().sel(chain=1), V, "draws"),
        "aligned": lambda: Case(dfac.align(matrix()), V, "draws"),
        "store": lambda: Case(stored(*one), V, "draws"),
        "store of a pair": lambda: Case(stored(*pair), V, "draws"),
        "reopened": lambda: Case(dfac.open_run(stored(*one)), V, "draws"),
        "CP": lambda: Case(tensor(), T, "tensor"),
        "CP of four axes": lambda: Case(run(T4, CP), T4, "tensor"),
        "CP, a pair": lambda: Case(run(T, CP, PAIR), T, "tensor"),
        "CP, one chain": lambda: Case(tensor().sel(chain=0), T, "tensor"),
        "CP, a store": lambda: Case(stored(*cube), T, "tensor"),
        "coupled": lambda: Case(run(both, COUPLED), both, "coupled"),
        "particles": lambda: Case(modes(V, NMF, particles=5), V, "particles"),
        "point": lambda: Case(point(V, NMF), V, "point"),
        "point of a tensor": lambda: Case(point(T, CP), T, "point tensor"),
        "point of several": lambda: Case(point(both, COUPLED), both, "point coupled"),
        "moments": lambda: Case(run(V, NMF, **watched), V, "moments"),
        "CP, moments": lambda: Case(run(T, CP, keep="moments"), T, "moments tensor"),
    }


KINDS = tuple(made_runs(Path()))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    """Give a case by the kind of its run, which is made when it is first asked for."""
    make = made_runs(tmp_path_factory.mktemp("runs"))

    @cache
    def case_of(kind):
        with warnings.catch_warnings(action="ignore", category=SamplingWarning):
            return make[kind]()

    return case_of


# -- what results are compared with -----------------------------------------------------------


def close(found, expected, rtol=1e-4):
    assert_allclose(np.asarray(found), expected, rtol=rtol, atol=1e-6)


def compared(wanted, rtol=1e-4, of=lambda found: found):
    """Compare what a verb gives with plain NumPy on the factors."""
    return lambda found, case: close(of(found), wanted(case), rtol)


def mean_of(trace, case):
    return Case(trace, case.data, "draws").means()


def best(of):
    """Compare the best column of each row."""
    return compared(lambda case: of(case).max(axis=1), 1e-3, lambda found: found["mean"][:, 0])


def is_aligned(found, case):
    assert "alignment" in found.children
    close(Case(found, case.data, case.group).means(), case.means(), 1e-3)


def predicts_all(found, case):
    close(found["mean"], case.expected)
    assert bool((found["lower"] <= found["upper"]).all())


expects_mean = compared(lambda case: case.extrapolated)
scores_draws = compared(
    lambda c: c.means().sum(axis=(2, 3)), of=lambda found: found["value"][..., 0]
)
recommends_best = best(lambda case: case.means().mean(axis=(0, 1)))
recommends_of_point = best(lambda case: case.trace["W"].values @ case.trace["H"].values)
recommends_by_weight = best(lambda case: case.expected)


def covers(found, case):
    error = case.expected[cells_of(case)] - case.data[cells_of(case)]
    close(found["rmse"], np.sqrt(np.mean(error**2)))


def has_densities(found, case):
    at = cells_of(case)
    mu, model = case.means()[(slice(None), slice(None), *at)], case.tree.attrs["model"]
    close(found["posterior"]["mu"], mu)
    if '"TweedieNMF"' in model or '"CP"' in model:
        close(found["log_likelihood"]["V"], stats.poisson.logpmf(case.data[at], mu), 1e-3)


def draws_observations(found, case):
    assert found["posterior_predictive"]["V"].shape == (*case.means().shape[:2], 2)


def explains(found, case):
    assert found.dims == ("chain", "draw", "view", "component")
    assert bool((found.sum("component") < 1).all())


def is_view(found, case):
    assert next(iter(dfac.factors(case.trace))) in found["posterior/W"].dims
    whole = case.means().reshape(*case.means().shape[:3], -1)  # along the first axis
    close(mean_of(found, case), whole)


def is_view_of_one(found, case):
    close(mean_of(found, case), case.data["a"].mean() * case.means()[..., :6])


def has_factors(found, case):
    for factor, values in zip(found.values(), case.draws(), strict=True):
        close(factor, values)


def has_joint_factors(found, case):
    assert {name: own.shape[2] for name, own in found.items()} == {"rows": 8, "x": 6, "y": 5}


def is_judged(found, case):
    assert set(found.lights) == set(LIGHTS)
    named = [name for name in found["functional"].values if name.startswith("mu[")]
    assert bool(named) is ("posterior" in case.tree.children)
    for name in named[:3] if case.group in ("draws", "tensor") else []:
        at = tuple(map(int, name[3:-1].split(",")))
        close(found["mean"].sel(functional=name), case.means()[(..., *at)].mean(), 1e-3)


def has_bias(found, case):
    assert np.isfinite(found["bias"]).all()
    assert {"lp", "mu_mean", "mu_norm"} < set(found["functional"].values)


def carries_shares(found, case):
    """Of a tensor, by the product of the sums over all axes."""
    sums = reduce(np.multiply, (own.sum(axis=2) for own in case.draws()))
    if '"GaussianMF"' not in case.tree.attrs["model"]:
        shares = np.sort((sums / sums.sum(axis=-1, keepdims=True)).reshape(-1, 2), axis=1)
        close(found["intensity"].sum(), 1.0)
        assert shares[:, 1].mean() >= float(found["intensity"].max()) - 1e-4


def is_new(found, case):
    assert found.sizes[found.dims[2]] == 3
    assert {"chain", "draw", "component"} < set(found.dims)


def is_any(found, case):
    assert found is not None


def plotted(case, name):
    pytest.importorskip("matplotlib")
    return dfac.plots.draw(case.trace, name)


def cells_of(case):
    return (np.array([0, 3]), *(np.array([1, 0]) for _ in range(np.ndim(case.data) - 1)))


def seen(case):
    return ([0, 3], [1, 0]) if isinstance(case.data, dict) else cells_of(case)


def values_of(case):
    return [3.0, 4.0] if isinstance(case.data, dict) else case.data[cells_of(case)]


def new_rows(case):
    return (case.data["a"] if isinstance(case.data, dict) else case.data)[:3]


def annotated(case):
    anndata = pytest.importorskip("anndata")
    V = np.zeros((8, 6)) if np.ndim(case.data) != 2 else case.data
    adata = anndata.AnnData(V.astype(np.float32))
    dfac.to_anndata(case.trace, adata)
    return adata.obsm["dfac"]


# -- the table --------------------------------------------------------------------------------

ONE = "one matrix, got"
POINT = "point estimate"
DRAWS = "stored only moments|stored none"
OF_TENSOR, OF_SEVERAL = f"{ONE} a run of a tensor", f"{ONE} a run of several matrices"
NO_DRAWS = f"a trace has draws, but this is a {POINT}"
REFUSED = {"tensor": f"{OF_TENSOR}; pass view", "coupled": f"{OF_SEVERAL}; pass view"}
REFUSED |= {"point": NO_DRAWS, "point tensor": f"{NO_DRAWS}.* and is of a tensor"}
REFUSED |= {"point coupled": f"{NO_DRAWS}.* and is of several matrices"}
REFUSED |= {"moments": DRAWS, "moments tensor": DRAWS}


def every(check, *groups):
    """The same for all runs with draws, or for groups that are named."""
    return dict.fromkeys(groups or ("draws", "tensor", "coupled", "particles"), check)


WEIGHTED = "these draws have weights|draws of equal weight"
SINGLE = "the run has a single matrix; views need"
OF_POINT = f"result of one matrix, got a {POINT} of"
POINTS = {"point tensor": f"{OF_POINT} a tensor", "point coupled": f"{OF_POINT} several matrices"}
NEITHER = {"moments tensor": OF_TENSOR} | POINTS
NO_CELLS, OTHER_CELLS = "monitored no cells", "did not monitor these cells"
VIEWS = {"tensor": is_view, "coupled": is_view_of_one}
VIEWS |= {"moments tensor": "the unfolding of a tensor needs draws"}
BEST = {"draws": recommends_best, "particles": recommends_by_weight, "point": recommends_of_point}
BIAS = {"draws": 50, "tune": 10, "cells": 3, "executor": "serial", **QUIET}
STEIN = "model must be a SILFNMF"
AGAIN = "made from a tensor that is not kept with it; pass the data again"
ALL = (*every(""), *REFUSED)
MATRIX, MOMENTS = ("draws", "particles", "moments"), ("moments", "moments tensor")
STORES = ("store", "store of a pair")
VERBS = {
    "align": every(is_aligned),
    "component_swaps": every(is_any),
    "component_variability": every(is_any) | every(carries_shares, "draws", "tensor"),
    "discretization_bias": every(has_bias)
    | every("no bias of a finite step", "exact", "particles"),
    "downstream": every(scores_draws, "draws", "particles"),
    "expectation": every(expects_mean, "draws", "particles"),
    "explained_variance": every(explains) | {"particles": WEIGHTED},
    "factors": every(SINGLE, *MATRIX) | {"tensor": has_factors, "coupled": has_joint_factors},
    "held_out_coverage": every(covers, "draws", "tensor", "particles")
    | every(OTHER_CELLS, *MOMENTS),
    "log_likelihood": every(has_densities, "draws", "tensor") | {"particles": WEIGHTED},
    "posterior_predictive": every(draws_observations, "draws", "tensor") | {"particles": WEIGHTED},
    "monitored": every(NO_CELLS) | {"moments": is_any, "moments tensor": NO_CELLS},
    "pairwise_distances": every(is_any),
    "predict": every(predicts_all, "draws", "tensor", "particles"),
    "recommend": BEST | POINTS,
    "summarize": every(is_judged) | every(is_judged, *MOMENTS),
    "top_entries": every(is_any),
    "top_entries of H": every(is_any, "draws", "particles"),
    "to_anndata": every(is_any, *MATRIX, "point") | NEITHER,
    "transform": every(is_new, "draws", "particles", "point") | NEITHER,
    "stein_discrepancy": every(STEIN, *ALL),
    "view": every(SINGLE, *MATRIX) | VIEWS,
    "open_run": every("open_run needs the path of a run store", *ALL)
    | every(is_any, *STORES, "CP, a store"),
    "resume": every("must be the path of a store", *ALL)
    | every(is_any, *STORES)
    | {"CP, a store": AGAIN},
    "plots: shares": every(is_any, *ALL),
    "plots: trace": every(is_any) | every(is_any, *MOMENTS),
}
"""What comes of a verb for each group, or kind, of runs; else what `REFUSED` has."""
CALLS = {
    "discretization_bias": lambda c: dfac.discretization_bias(c.trace, c.data, **BIAS),
    "downstream": lambda c: dfac.downstream(c.trace, lambda W, H: float((W @ H).sum())),
    "expectation": lambda c: dfac.expectation(c.trace, lambda W, H: W @ H),
    "held_out_coverage": lambda c: dfac.held_out_coverage(c.trace, seen(c), values_of(c)),
    "log_likelihood": lambda c: dfac.log_likelihood(c.trace, seen(c), c.data),
    "posterior_predictive": lambda c: dfac.posterior_predictive(c.trace, seen(c)).load(),
    "predict": lambda c: dfac.predict(c.trace).load(),
    "recommend": lambda c: dfac.recommend(c.trace, n=2),
    "top_entries of H": lambda c: dfac.top_entries(c.trace, factor="H"),
    "to_anndata": annotated,
    "transform": lambda c: dfac.transform(c.trace, new_rows(c), **QUIET),
    "stein_discrepancy": lambda c: dfac.stein_discrepancy(c.trace, new_rows(c) * 0 + 1, CP),
    "view": lambda c: dfac.view(c.trace, "a" if "coupled" in c.group else "axis_0"),
    "resume": lambda c: dfac.resume(c.trace, progressbar=False),
    "plots: shares": lambda c: plotted(c, "shares"),
    "plots: trace": lambda c: plotted(c, "trace"),
}
"""How verbs are called that take more than a result."""


RARE = {"CP of four axes", "CP, a pair", "CP, one chain", "store of a pair", "CP, a store"}
RARE |= {"exact", "negative binomial", "reopened"}
CASES = [(name, kind) for name in VERBS for kind in KINDS]


@pytest.mark.parametrize(
    ("name", "kind"), tiered(CASES, lambda case: case[1] not in RARE or case[1] in VERBS[case[0]])
)
@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
def test_a_verb_is_right_or_says_what_it_takes(name, kind, case_of):
    case, cells = case_of(kind), VERBS[name]
    cell = cells.get(kind) or cells.get(case.group) or REFUSED[case.group]
    call = CALLS.get(name) or (lambda case: getattr(dfac, name)(case.trace))
    if callable(cell):
        cell(call(case), case)
    else:
        assert "\n" not in refused(DaskfactorError, cell, call, case)
