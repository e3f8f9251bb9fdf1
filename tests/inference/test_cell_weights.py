"""Weights of cells in whole runs: the same bits wherever they run, nothing silently left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import daskfactor as dfac
from daskfactor.data.convert import convert
from daskfactor.errors import DataError, ModelError, OptionError

RNG = np.random.default_rng(6)
V = RNG.gamma(2.0, 1.0, (24, 18)) @ np.eye(18)
V[RNG.random(V.shape) < 0.2] = np.nan
SIGMA = RNG.uniform(0.2, 2.0, V.shape)
NMF, REAL = dfac.TweedieNMF(2, beta=2), dfac.GaussianMF(2)
QUICK: dict[str, Any] = {"draws": 6, "tune": 10, "random_seed": 3, "progressbar": False}
SAMPLERS = [
    (NMF, dfac.PSGLD(warm_start=3)),
    (NMF, dfac.PSGRRLD(warm_start=3)),
    (NMF, dfac.LangevinDynamics(warm_start=3)),
    (NMF, dfac.SGLD(warm_start=3)),
    (NMF, dfac.BlockHMC(warm_start=3, steps=2)),
    (NMF, dfac.HMC(warm_start=3, steps=2)),
    (REAL, dfac.SGHMC()),
    (REAL, dfac.Gibbs()),
]
EACH = pytest.mark.parametrize(
    ("model", "sampler"), SAMPLERS, ids=[sampler.name for _, sampler in SAMPLERS]
)


def same(first: Any, second: Any) -> None:
    for name in ("W", "H"):
        one, other = (trace["posterior"][name].values for trace in (first, second))
        np.testing.assert_array_equal(one, other)
    lp = [trace["sample_stats"]["lp"].values for trace in (first, second)]
    np.testing.assert_array_equal(*lp)


def stored(values: np.ndarray) -> sp.csr_array:
    rows, cols = np.nonzero(~np.isnan(V))
    return sp.csr_array((values[rows, cols], (rows, cols)), shape=V.shape)


@EACH
def test_the_same_bits_from_threads_and_from_scratch_files(model: Any, sampler: Any) -> None:
    data = dfac.as_blocks(V, 3, uncertainty=SIGMA)
    other = dfac.as_blocks(V, 3, uncertainty=SIGMA, memory_limit=0)
    first = dfac.sample(data, model, sampler, executor="serial", **QUICK)
    second = dfac.sample(other, model, sampler, executor="threads", **QUICK)
    same(first, second)
    assert first.attrs["dispersion"] == 1
    plain = dfac.sample(V, model, sampler, executor="serial", blocks=3, **QUICK)
    assert not np.array_equal(plain["posterior"]["W"], first["posterior"]["W"])


@EACH
def test_stored_entries_with_theirs_make_the_posterior_that_cells_make(
    model: Any, sampler: Any
) -> None:
    options: dict[str, Any] = QUICK | {"draws": 1, "tune": 2, "thin": 1, "keep": "draws"}
    if sampler.coarseness > 1:
        options["draws"] = 2
    made = [
        dfac.as_blocks(V, 3, dtype="float64", uncertainty=SIGMA),
        dfac.as_blocks(
            stored(V), 3, dtype="float64", unstored="missing", uncertainty=stored(SIGMA)
        ),
    ]
    if sampler.name == "SGLD":
        return  # draws cells of other kinds of block
    first, second = (dfac.sample(data, model, sampler, **options) for data in made)
    one, other = (trace["posterior"]["W"].values for trace in (first, second))
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def forms(folder: Path, form: str) -> tuple[Any, dict[str, Any]]:
    """The same data and uncertainties, in memory or where they are read from again."""
    if form == "array beside path":
        zarr.create_array(str(folder / "v"), data=V, chunks=(8, 6))
        return str(folder / "v"), {"uncertainty": SIGMA}
    if form == "paths":
        for name, values in (("v", V), ("sigma", SIGMA)):
            zarr.create_array(str(folder / name), data=values, chunks=(8, 6))
        return str(folder / "v"), {"uncertainty": str(folder / "sigma")}
    if form == "stores":
        for name, values in (("v", V), ("sigma", SIGMA)):
            convert(stored(values), folder / name, unstored="missing", blocks=3, progressbar=False)
        return str(folder / "v"), {"uncertainty": str(folder / "sigma")}
    if form == "sparse":
        return stored(V), {"uncertainty": stored(SIGMA), "unstored": "missing"}
    return V, {"uncertainty": SIGMA}


@pytest.mark.parametrize("form", ["memory", "array beside path", "paths", "stores"])
def test_a_run_finds_its_weights_again(form: str, tmp_path: Path) -> None:
    values, options = forms(tmp_path, form)
    options |= QUICK | {"blocks": 3, "sampler": dfac.PSGLD(warm_start=3)}
    dfac.sample(values, NMF, store=tmp_path / "run.zarr", **options | {"draws": 2})
    found = dfac.resume(tmp_path / "run.zarr", 4, progressbar=False)
    same(found, dfac.sample(values, NMF, **options))
    if form != "stores":
        same(found, dfac.sample(V, NMF, **options | {"uncertainty": SIGMA}))


def test_a_run_whose_weights_are_nowhere_says_what_to_pass(tmp_path: Path) -> None:
    values, options = forms(tmp_path, "sparse")
    store, short = tmp_path / "run.zarr", QUICK | {"draws": 2, "blocks": 3}
    dfac.sample(values, NMF, store=store, **short, **options)
    for given in (None, values):
        with pytest.raises(DataError, match=r"as_blocks\(V, blocks=3, unstored=\"missing\", unc"):
            dfac.resume(store, 4, V=given, progressbar=False)
    other = dfac.as_blocks(values, 3, unstored="missing", uncertainty=stored(2 * SIGMA))
    with pytest.raises(DataError, match="not those"):
        dfac.resume(store, 4, V=other, progressbar=False)
    data = dfac.as_blocks(values, 3, **options)
    found = dfac.resume(store, 4, V=data, progressbar=False)
    same(found, dfac.sample(data, NMF, **QUICK))


def test_optimizers_come_closer_by_uncertainty() -> None:
    Q = {}
    for name, options in (("with", {"uncertainty": SIGMA}), ("without", {})):
        point = dfac.optimize(V, NMF, random_seed=1, progressbar=False, **options)
        mu = point["W"].values @ point["H"].values
        Q[name] = np.nansum(((V - mu) / SIGMA) ** 2)
    assert Q["with"] < 0.9 * Q["without"]
    descent = dfac.DSGD(max_iter=20)
    point = dfac.optimize(V, REAL, descent, uncertainty=SIGMA, random_seed=1, progressbar=False)
    assert point.attrs["dispersion"] == 1
    assert np.all(np.diff(point["objective"].values[5:]) < 0)


def test_what_takes_no_weights_says_so() -> None:
    counts = RNG.poisson(3.0, (12, 10))
    data = dfac.as_blocks(counts, 2, weights=np.full(counts.shape, 2.0))
    poisson = dfac.TweedieNMF(2)
    with pytest.raises(OptionError, match="no weights of cells"):
        dfac.sample(data, poisson, dfac.Gibbs(), **QUICK)
    with pytest.raises(OptionError, match="no weights of cells"):
        dfac.log_evidence(data, poisson, progressbar=False)
    with pytest.raises(ModelError, match="take beta=2"):
        dfac.sample(counts, poisson, uncertainty=1.0, **QUICK)
    trace = dfac.sample(V, NMF, uncertainty=SIGMA, monitor="missing", **QUICK)
    with pytest.raises(OptionError, match="needs the uncertainty"):
        dfac.predict(trace, of="observation")
    assert dfac.predict(trace).attrs["of"] == dfac.monitored(trace).attrs["of"] == "mean"


def test_weights_count_observations_in_the_dispersion() -> None:
    twice = dfac.as_blocks(np.repeat(V, 2, axis=0), 1, dtype="float64")
    data = dfac.as_blocks(V, 1, dtype="float64", weights=2.0)
    assert data.effective == twice.effective == twice.total_observed
    assert dfac.estimate_cost(V, NMF, uncertainty=SIGMA).data == 2 * dfac.estimate_cost(V, NMF).data
