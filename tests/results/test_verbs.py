"""Every verb and every kind of run: a right result, or one sentence that says what the verb takes.

A cell of the table is a check of the result or the words of a refusal. What a verb gives is
compared with plain NumPy on the factors wherever that is a line or two.
"""

import warnings
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from scipy import stats

import daskfactor as dfac
from daskfactor.errors import DaskfactorError, ModelError, OptionError, SamplingWarning

QUIET: dict[str, Any] = {"progressbar": False, "random_seed": 0}
RUN = {"draws": 12, "tune": 8, "chains": 2, **QUIET}
LANGEVIN = dfac.PSGLD(warm_start=3)
PAIR = dfac.PSGRRLD(warm_start=3)
NMF = dfac.TweedieNMF(2, dispersion=1.0)
CP = dfac.CP(2, dispersion=1.0)
COUPLED = dfac.Coupled(
    2,
    relations={
        "a": dfac.Relation("rows", "x", law="poisson", dispersion=1.0),
        "b": dfac.Relation("rows", "y", law="normal"),
    },
)


class Case(NamedTuple):
    """A run, the data that it was made from, and what it is for most verbs."""

    trace: Any
    data: Any
    group: str

    @property
    def tree(self) -> xr.DataTree:
        return dfac.open_run(self.trace) if isinstance(self.trace, Path) else self.trace

    def draws(self, group: str = "posterior") -> list[Any]:
        """Factors (chain, draw, rows, component), of a tensor one for each axis."""
        found = self.tree[group].to_dataset()
        if "chain" not in found.dims:
            found = found.expand_dims("chain")
        row = next(d for d in found["W"].dims if d not in ("chain", "draw", "component"))
        column = next(d for d in found["H"].dims if d not in ("chain", "draw", "component"))
        W = found["W"].transpose("chain", "draw", row, "component").values.astype(float)
        H = found["H"].transpose("chain", "draw", column, "component").values.astype(float)
        if "tensor" not in self.group:
            return [W, H]
        ends = np.cumsum(np.shape(self.data)[1:])[:-1]
        return [W, *np.split(H, ends, axis=2)]

    def means(self, group: str = "posterior") -> Any:
        """Mean of every cell under every draw, (chain, draw, ...)."""

        def times(product: Any, factor: Any) -> Any:
            wide = factor.reshape(*factor.shape[:2], *(1,) * (product.ndim - 3), *factor.shape[2:])
            return product[..., None, :] * wide

        return reduce(times, self.draws(group)).sum(axis=-1)

    @property
    def expected(self) -> Any:
        """Posterior mean of every cell; of two coupled chains the extrapolated one."""
        axes = (0, 1)
        fine = self.means().mean(axis=axes)
        if "posterior_coarse" not in self.tree.children:
            weight = self.tree["sample_stats"].to_dataset().get("weight")
            return (
                fine
                if weight is None
                else np.tensordot(weight.values, self.means(), axes=((0, 1), (0, 1)))
            )
        return 2 * fine - self.means("posterior_coarse").mean(axis=axes)


def made_runs(folder: Path) -> dict[str, Case]:
    rng = np.random.default_rng(0)
    V = rng.poisson(5.0, (8, 6)).astype(float)
    T, T4 = (rng.poisson(5.0, shape).astype(float) for shape in ((5, 4, 3), (4, 3, 3, 2)))
    R = np.log1p(V) - 1.5
    both = {"a": rng.poisson(5.0, (8, 6)).astype(float), "b": rng.normal(5.0, 1.0, (8, 5))}
    watched = {"keep": "moments", "monitor": ([0, 3, 5], [1, 1, 4])}
    matrix, tensor = dfac.sample(V, NMF, LANGEVIN, **RUN), dfac.sample(T, CP, LANGEVIN, **RUN)
    negative_binomial = dfac.NegativeBinomialNMF(2, dispersion=0.2)
    exact = dfac.Gibbs(warm_start=3)
    for name, given in {"run": (V, NMF, LANGEVIN), "pair": (V, NMF, PAIR)}.items():
        dfac.sample(*given, store=folder / name, **RUN)
    dfac.sample(T, CP, LANGEVIN, store=folder / "tensor", **RUN)
    return {
        "matrix": Case(matrix, V, "draws"),
        "exact": Case(dfac.sample(V, NMF, exact, **RUN), V, "draws"),
        "gaussian": Case(dfac.sample(R, dfac.GaussianMF(2), dfac.SGHMC(), **RUN), R, "draws"),
        "negative binomial": Case(dfac.sample(V, negative_binomial, LANGEVIN, **RUN), V, "draws"),
        "pair": Case(dfac.sample(V, NMF, PAIR, **RUN), V, "draws"),
        "one chain": Case(matrix.sel(chain=1), V, "draws"),
        "aligned": Case(dfac.align(matrix), V, "draws"),
        "store": Case(folder / "run", V, "draws"),
        "store of a pair": Case(folder / "pair", V, "draws"),
        "reopened": Case(dfac.open_run(folder / "run"), V, "draws"),
        "CP": Case(tensor, T, "tensor"),
        "CP of four axes": Case(dfac.sample(T4, CP, LANGEVIN, **RUN), T4, "tensor"),
        "CP, a pair": Case(dfac.sample(T, CP, PAIR, **RUN), T, "tensor"),
        "CP, one chain": Case(tensor.sel(chain=0), T, "tensor"),
        "CP, a store": Case(folder / "tensor", T, "tensor"),
        "coupled": Case(dfac.sample(both, COUPLED, LANGEVIN, **RUN), both, "coupled"),
        "particles": Case(dfac.stein_posterior(V, NMF, particles=5, **QUIET), V, "particles"),
        "point": Case(dfac.optimize(V, NMF, **QUIET), V, "point"),
        "point of a tensor": Case(dfac.optimize(T, CP, **QUIET), T, "point tensor"),
        "point of several": Case(dfac.optimize(both, COUPLED, **QUIET), both, "point coupled"),
        "moments": Case(dfac.sample(V, NMF, LANGEVIN, **watched, **RUN), V, "moments"),
        "CP, moments": Case(
            dfac.sample(T, CP, LANGEVIN, keep="moments", **RUN), T, "moments tensor"
        ),
    }


KINDS = (
    *("matrix", "exact", "gaussian", "negative binomial", "pair", "one chain", "aligned"),
    *("store", "store of a pair", "reopened", "CP", "CP of four axes", "CP, a pair"),
    *("CP, one chain", "CP, a store", "coupled", "particles", "point", "point of a tensor"),
    *("point of several", "moments", "CP, moments"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        return made_runs(tmp_path_factory.mktemp("runs"))


# -- what results are compared with -----------------------------------------------------------


def close(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    assert_allclose(np.asarray(found), expected, rtol=rtol, atol=1e-6)


def is_aligned(found: Any, case: Case) -> None:
    assert "alignment" in found.children
    close(Case(found, case.data, case.group).means(), case.means(), 1e-3)


def predicts_all(found: Any, case: Case) -> None:
    close(found["mean"], case.expected)
    assert bool((found["lower"] <= found["upper"]).all())


def expects_mean(found: Any, case: Case) -> None:
    close(found, case.expected)


def scores_draws(found: Any, case: Case) -> None:
    close(found["value"].values[..., 0], case.means().sum(axis=(2, 3)))


def recommends_best(found: Any, case: Case) -> None:
    close(found["mean"].values[:, 0], case.means().mean(axis=(0, 1)).max(axis=1), 1e-3)


def recommends_of_point(found: Any, case: Case) -> None:
    mu = case.trace["W"].values @ case.trace["H"].values
    close(found["mean"].values[:, 0], mu.max(axis=1), 1e-3)


def recommends_by_weight(found: Any, case: Case) -> None:
    close(found["mean"].values[:, 0], case.expected.max(axis=1), 1e-3)


def covers(found: Any, case: Case) -> None:
    error = case.expected[cells_of(case)] - case.data[cells_of(case)]
    close(found["rmse"], np.sqrt(np.mean(error**2)))


def has_densities(found: Any, case: Case) -> None:
    mu = case.means()[(slice(None), slice(None), *cells_of(case))]
    close(found["posterior"]["mu"], mu)
    v, model = case.data[cells_of(case)], case.tree.attrs["model"]
    if '"TweedieNMF"' in model or '"CP"' in model:
        close(found["log_likelihood"]["V"], stats.poisson.logpmf(v, mu), 1e-3)


def draws_observations(found: Any, case: Case) -> None:
    assert found["posterior_predictive"]["V"].shape == (*case.means().shape[:2], 2)


def explains(found: Any, case: Case) -> None:
    assert found.dims == ("chain", "draw", "view", "component")
    assert bool((found.sum("component") < 1).all())


def is_view(found: Any, case: Case) -> None:
    name = next(iter(dfac.factors(case.trace)))
    whole = case.means().reshape(*case.means().shape[:3], -1)  # along the first axis
    posterior = found["posterior"].to_dataset()
    assert name in posterior["W"].dims
    close(Case(found, None, "draws").means(), whole)


def is_view_of_one(found: Any, case: Case) -> None:
    unit = case.data["a"].mean()
    close(Case(found, None, "draws").means(), unit * case.means()[..., :6])


def has_factors(found: Any, case: Case) -> None:
    for factor, values in zip(found.values(), case.draws(), strict=True):
        close(factor, values)


def has_joint_factors(found: Any, case: Case) -> None:
    assert {name: own.shape[2] for name, own in found.items()} == {"rows": 8, "x": 6, "y": 5}


def is_judged(found: Any, case: Case) -> None:
    assert set(found.lights) == {"predictions", "components", "log_density"}
    named = [name for name in found["functional"].values if name.startswith("mu[")]
    draws = "posterior" in case.tree.children
    assert bool(named) is draws
    for name in named[:3] if case.group in ("draws", "tensor") else []:
        at = tuple(map(int, name[3:-1].split(",")))
        close(found["mean"].sel(functional=name), case.means()[(..., *at)].mean(), 1e-3)


def has_bias(found: Any, case: Case) -> None:
    assert np.isfinite(found["bias"]).all()
    assert {"lp", "mu_mean", "mu_norm"} < set(found["functional"].values)


def carries_shares(found: Any, case: Case) -> None:
    """Of a tensor, by the product of the sums over all axes."""
    sums = reduce(np.multiply, (own.sum(axis=2) for own in case.draws()))
    if '"GaussianMF"' not in case.tree.attrs["model"]:
        shares = np.sort((sums / sums.sum(axis=-1, keepdims=True)).reshape(-1, 2), axis=1)
        close(found["intensity"].sum(), 1.0)
        assert shares[:, 1].mean() >= float(found["intensity"].max()) - 1e-4


def is_new(found: Any, case: Case) -> None:
    assert found.sizes[found.dims[2]] == 3
    assert {"chain", "draw", "component"} < set(found.dims)


def is_any(found: Any, case: Case) -> None:
    assert found is not None


def cells_of(case: Case) -> tuple[Any, ...]:
    return (np.array([0, 3]), *(np.array([1, 0]) for _ in range(np.ndim(case.data) - 1)))


def seen(case: Case) -> Any:
    return ([0, 3], [1, 0]) if isinstance(case.data, dict) else cells_of(case)


def values_of(case: Case) -> Any:
    return [3.0, 4.0] if isinstance(case.data, dict) else case.data[cells_of(case)]


def new_rows(case: Case) -> Any:
    return (case.data["a"] if isinstance(case.data, dict) else case.data)[:3]


def annotated(case: Case) -> Any:
    anndata = pytest.importorskip("anndata")
    V = np.zeros((8, 6)) if np.ndim(case.data) != 2 else case.data
    adata = anndata.AnnData(V.astype(np.float32))
    dfac.to_anndata(case.trace, adata)
    return adata.obsm["dfac"]


def first_name(case: Case) -> str:
    return "a" if "coupled" in case.group else "axis_0"


def drawn(case: Case, name: str) -> Any:
    pytest.importorskip("matplotlib")
    return dfac.plots.draw(case.trace, name)


# -- the table --------------------------------------------------------------------------------

Cell = Callable[[Any, Case], None] | str
MATRIX = "one matrix, and this is"
POINT = "point estimate"
DRAWS = "kept moments only|kept none"
REFUSED: dict[str, Cell] = {
    "tensor": f"{MATRIX} a run of a tensor: pass view",
    "coupled": f"{MATRIX} a run of several matrices: pass view",
    "point": f"a trace has draws, and this is the {POINT}",
    "point tensor": f"a trace has draws, and this is the {POINT}.* and is of a tensor",
    "point coupled": f"a trace has draws, and this is the {POINT}.* and is of several matrices",
    "moments": DRAWS,
    "moments tensor": DRAWS,
}


class Verb(NamedTuple):
    """A verb: how it is called, and what comes of it for each group, or kind, of runs."""

    call: Callable[[Case], Any]
    cells: dict[str, Cell]

    def cell(self, kind: str, group: str) -> Cell:
        return self.cells.get(kind) or self.cells.get(group) or REFUSED[group]


def every(check: Cell) -> dict[str, Cell]:
    return dict.fromkeys(("draws", "tensor", "coupled", "particles"), check)


WEIGHTED = "these draws have weights|draws of equal weight"
NO_STEP = "no bias of a finite step"
SINGLE = "a run of one matrix; one of several"
OF_POINT = f"result of one matrix, and this is the {POINT} of"
VERBS = {
    "align": Verb(lambda c: dfac.align(c.trace), every(is_aligned)),
    "component_swaps": Verb(lambda c: dfac.component_swaps(c.trace), every(is_any)),
    "component_variability": Verb(
        lambda c: dfac.component_variability(c.trace),
        every(is_any) | {"draws": carries_shares, "tensor": carries_shares},
    ),
    "discretization_bias": Verb(
        lambda c: dfac.discretization_bias(
            c.trace, c.data, draws=50, tune=10, cells=3, executor="serial", **QUIET
        ),
        every(has_bias) | {"exact": NO_STEP, "particles": NO_STEP},
    ),
    "downstream": Verb(
        lambda c: dfac.downstream(c.trace, lambda W, H: float((W @ H).sum())),
        {"draws": scores_draws, "particles": scores_draws},
    ),
    "expectation": Verb(
        lambda c: dfac.expectation(c.trace, lambda W, H: W @ H),
        {"draws": expects_mean, "particles": expects_mean},
    ),
    "explained_variance": Verb(
        lambda c: dfac.explained_variance(c.trace), every(explains) | {"particles": WEIGHTED}
    ),
    "factors": Verb(
        lambda c: dfac.factors(c.trace),
        {
            "tensor": has_factors,
            "coupled": has_joint_factors,
            **dict.fromkeys(("draws", "particles", "moments"), SINGLE),
        },
    ),
    "held_out_coverage": Verb(
        lambda c: dfac.held_out_coverage(c.trace, seen(c), values_of(c)),
        {
            "draws": covers,
            "tensor": covers,
            "particles": covers,
            **dict.fromkeys(("moments", "moments tensor"), "did not monitor these cells"),
        },
    ),
    "log_likelihood": Verb(
        lambda c: dfac.log_likelihood(c.trace, seen(c), c.data),
        {"draws": has_densities, "tensor": has_densities, "particles": WEIGHTED},
    ),
    "posterior_predictive": Verb(
        lambda c: dfac.posterior_predictive(c.trace, seen(c)).load(),
        {"draws": draws_observations, "tensor": draws_observations, "particles": WEIGHTED},
    ),
    "monitored": Verb(
        lambda c: dfac.monitored(c.trace),
        every("monitored no cells") | {"moments": is_any, "moments tensor": "monitored no cells"},
    ),
    "pairwise_distances": Verb(lambda c: dfac.pairwise_distances(c.trace), every(is_any)),
    "predict": Verb(
        lambda c: dfac.predict(c.trace).load(),
        {"draws": predicts_all, "tensor": predicts_all, "particles": predicts_all},
    ),
    "recommend": Verb(
        lambda c: dfac.recommend(c.trace, n=2),
        {
            "draws": recommends_best,
            "particles": recommends_by_weight,
            "point": recommends_of_point,
            "point tensor": f"{OF_POINT} a tensor",
            "point coupled": f"{OF_POINT} several matrices",
        },
    ),
    "summarize": Verb(
        lambda c: dfac.summarize(c.trace),
        {**every(is_judged), "moments": is_judged, "moments tensor": is_judged},
    ),
    "top_entries": Verb(lambda c: dfac.top_entries(c.trace), every(is_any)),
    "top_entries of H": Verb(
        lambda c: dfac.top_entries(c.trace, factor="H"), {"draws": is_any, "particles": is_any}
    ),
    "to_anndata": Verb(
        annotated,
        {
            **dict.fromkeys(("draws", "particles", "point", "moments"), is_any),
            "moments tensor": f"{MATRIX} a run of a tensor",
            "point tensor": f"{OF_POINT} a tensor",
            "point coupled": f"{OF_POINT} several matrices",
        },
    ),
    "transform": Verb(
        lambda c: dfac.transform(c.trace, new_rows(c), **QUIET),
        {
            **dict.fromkeys(("draws", "particles", "point"), is_new),
            "moments tensor": f"{MATRIX} a run of a tensor",
            "point tensor": f"{OF_POINT} a tensor",
            "point coupled": f"{OF_POINT} several matrices",
        },
    ),
    "stein_discrepancy": Verb(
        lambda c: dfac.stein_discrepancy(c.trace, new_rows(c) * 0 + 1, CP, progressbar=False),
        dict.fromkeys(
            (*every(""), *REFUSED), "a Stein discrepancy is known from the posterior of a SILFNMF"
        ),
    ),
    "view": Verb(
        lambda c: dfac.view(c.trace, first_name(c)),
        {
            "tensor": is_view,
            "coupled": is_view_of_one,
            "moments tensor": "an unfolding of a tensor is of draws",
            **dict.fromkeys(("draws", "particles", "moments"), SINGLE),
        },
    ),
    "open_run": Verb(
        lambda c: dfac.open_run(c.trace),
        {
            **dict.fromkeys((*every(""), *REFUSED), "open_run takes the path of a run store"),
            **dict.fromkeys(("store", "store of a pair", "CP, a store"), is_any),
        },
    ),
    "resume": Verb(
        lambda c: dfac.resume(c.trace, progressbar=False),
        {
            **dict.fromkeys((*every(""), *REFUSED), "resume takes the path of the store"),
            **dict.fromkeys(("store", "store of a pair"), is_any),
            "CP, a store": "made from a tensor that is not kept with it; pass the data again",
        },
    ),
    "plots: shares": Verb(
        lambda c: drawn(c, "shares"), dict.fromkeys((*every(""), *REFUSED), is_any)
    ),
    "plots: trace": Verb(
        lambda c: drawn(c, "trace"), {**every(is_any), "moments": is_any, "moments tensor": is_any}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
def test_a_verb_is_right_or_says_what_it_takes(name: str, kind: str, runs: dict[str, Case]) -> None:
    case, verb = runs[kind], VERBS[name]
    cell = verb.cell(kind, case.group)
    if callable(cell):
        cell(verb.call(case), case)
        return
    with pytest.raises((OptionError, ModelError, DaskfactorError), match=cell) as refused:
        verb.call(case)
    assert "\n" not in str(refused.value)


def test_the_table_has_all_kinds(runs: dict[str, Case]) -> None:
    assert set(KINDS) == set(runs)
