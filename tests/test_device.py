"""Runs on a device are those of processors, but for rounding; and what has no place there."""

import json
import sys
from collections import Counter
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import EngineError, OptionError, SamplingWarning
from daskfactor.executors import SerialExecutor
from daskfactor.executors.device import CUDA, DeviceExecutor
from daskfactor.inference import fold_in, transform
from daskfactor.inference.base import choose_kernel
from daskfactor.inference.setting import DEVICE_PACE, Setting, plan_run
from daskfactor.kernels import langevin, steps
from daskfactor.kernels.cuda import device as module
from daskfactor.kernels.cuda.device import Device
from tests.random_sparse import random_array
from tests.refusals import refused
from tests.statistical.exact import CASES, reference_posterior
from tests.statistical.replicas import run_copies

CELLS = np.array([1, 30, 30, 59]), np.array([3, 0, 20, 40])
RUN = {"draws": 6, "tune": 4, "random_seed": 1, "progressbar": False}
TOLERANCE = {"float32": 5e-3, "float64": 1e-9}
"""Of draws beside the largest: cycles of float32 multiply rounding by some hundreds."""


def counts(rows=60, columns=41, K=3, missing=0.1):
    rng = np.random.default_rng(0)
    W, H = rng.gamma(0.5, 1, (rows, K)), rng.gamma(0.5, 1, (K, columns))
    V = rng.poisson(2 * W @ H).astype(np.float32)
    V[rng.random(V.shape) < missing] = np.nan
    return V


def full():
    return np.nan_to_num(counts())


def blocks(V, dtype="float32", **options):
    """Data on three bands a side; what is not stored are zeros, unless something is said."""
    if sparse.issparse(V):
        options = {"unstored": "zero"} | options
    return dfac.as_blocks(V, 3, dtype=dtype, **options)


MODELS = {
    "counts": (counts, lambda: dfac.TweedieNMF(3)),
    "rates": (counts, lambda: dfac.TweedieNMF(3, rate_w="component", rate_h="component")),
    "rows": (counts, lambda: dfac.TweedieNMF(3, rate_w="row")),
    "sparse prior": (counts, lambda: dfac.TweedieNMF(3, shape_w=0.3)),
    "compound": (lambda: counts() + 1, lambda: dfac.TweedieNMF(3, beta=0.5)),
    "normal": (lambda: full().astype("uint8"), lambda: dfac.TweedieNMF(3, beta=2.0)),
    "overdispersed": (counts, lambda: dfac.NegativeBinomialNMF(3)),
    "sparse": (lambda: sparse.csr_array(full()), lambda: dfac.TweedieNMF(3)),
    "sparse normal": (lambda: sparse.csr_array(full()), lambda: dfac.TweedieNMF(3, beta=2.0)),
    "signed": (lambda: counts() - 1, lambda: dfac.GaussianMF(3)),
}
RUNS = [(name, dfac.PSGLD()) for name in MODELS if name != "signed"]
RUNS += [("counts", dfac.PSGLD(transition="euler"))]
RUNS += [("counts", dfac.PSGLD(1e-5, preconditioner="identity"))]
RUNS += [("counts", dfac.PSGRRLD()), ("sparse", dfac.PSGRRLD())]
RUNS += [("counts", dfac.SGHMC()), ("sparse", dfac.SGHMC()), ("signed", dfac.SGHMC())]
RUNS += [("counts", dfac.LangevinDynamics())]


def spelled(own):
    """Name a case: samplers by their type and what is not usual of them."""
    if isinstance(own, str):
        return own
    usual = vars(type(own)())
    return "-".join([type(own).__name__, *(f"{v}" for k, v in vars(own).items() if v != usual[k])])


def assert_same(found, wanted, tolerance=TOLERANCE["float64"]):
    """All that a run has to say is the same, beside the largest number of its kind."""
    assert set(found.children) == set(wanted.children)
    for group in {"posterior", "posterior_moments", "sample_stats"} & set(wanted.children):
        for name, values in wanted[group].data_vars.items():
            if values.dtype.kind != "f" or "seconds" in str(name):
                continue
            own, exact, told = found[group][name].values, values.values, {"err_msg": str(name)}
            assert own.shape == exact.shape
            assert own.dtype == exact.dtype
            np.testing.assert_array_equal(np.isnan(own), np.isnan(exact), **told)
            largest = np.nanmax(np.abs(exact), initial=1e-30)
            np.testing.assert_allclose(own, exact, atol=tolerance * largest, rtol=0, **told)


def both(data, model, sampler="auto", **options):
    run = RUN | options
    found = dfac.sample(data, model, sampler, device="cuda", **run)
    return found, dfac.sample(data, model, sampler, **run)


DRAWN = [*((*run, "float64") for run in RUNS), *((*run, "float32") for run in RUNS[::3])]


@pytest.mark.quick(
    *(f"{name}-PSGLD-float64" for name in ("counts", "rates", "normal", "overdispersed")),
    *(f"{name}-PSGLD-float32" for name in ("counts", "sparse prior")),
    "counts-PSGLD-euler-float64",
    *("sparse-PSGRRLD-float64", "signed-SGHMC-float64", "counts-LangevinDynamics-float64"),
    "counts-PSGLD-ConstantStep(size=1e-05)-identity-float64",
)
@pytest.mark.parametrize(("name", "sampler", "dtype"), DRAWN, ids=spelled)
def test_draws_are_those_of_processors(stand_in, name, sampler, dtype):
    values, model = MODELS[name]
    data = blocks(values(), dtype)
    found, wanted = both(data, model(), sampler, monitor=CELLS)
    assert_same(found, wanted, TOLERANCE[dtype])
    moments = dfac.monitored(found), dfac.monitored(wanted)
    for own in set(moments[1]) & {"mean", "sd"}:
        values, exact = (each[own].values for each in moments)
        np.testing.assert_allclose(values, exact, atol=TOLERANCE[dtype] * np.abs(exact).max())
    W = found["posterior"]["W"].values
    assert W.dtype == dtype
    assert (np.abs(W[0, 1] - W[0, 0]) > 1e-6).mean() > 0.7  # and it moves


def test_states_stay_longer_on_a_device(stand_in):
    data, model = blocks(counts()), dfac.TweedieNMF(3)
    traces = [dfac.sample(data, model, dfac.PSGLD(), device=own, **RUN) for own in (None, "cuda")]
    paces = [json.loads(trace.attrs["run"])["options"]["pace"] for trace in traces]
    assert paces == [1.0, DEVICE_PACE]

    def segments(on_device):
        lengths = {"draws": 400, "tune": 100, "chains": 1, "thin": 1}
        planned = plan_run(data, model, dfac.PSGLD(), "moments", 0, on_device, **lengths)
        return len(
            Setting(data, model, dfac.PSGLD().kernel(model, data), planned, SerialExecutor()).ends
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setting, "work", 1e10)  # floating-point operations of a cycle
        assert segments(on_device=True) < segments(on_device=False) / 2


FREEZING = [dfac.PSGLD(), dfac.PSGLD(1e-5, preconditioner="identity"), dfac.SGHMC()]
FREEZING += [dfac.BlockHMC(), dfac.LangevinDynamics()]


@pytest.mark.quick("PSGLD", "SGHMC", "BlockHMC")
@pytest.mark.parametrize("sampler", FREEZING, ids=spelled)
def test_frozen_components_stay_there(stand_in, sampler):
    given = np.random.default_rng(0).gamma(1.0, size=(60, 2))
    model = dfac.TweedieNMF(3, fixed_w=given, shape_w=2.0, dispersion=1.0)
    found, wanted = both(blocks(counts(), "float64"), model, sampler)
    assert_same(found, wanted)
    assert (found["posterior"]["W"].values[..., :2] == given).all()


def test_entries_that_are_not_stored_may_be_missing_and_chains_run_after_each_other(stand_in):
    data = blocks(sparse.csr_array(full()), "float64", unstored="missing")
    assert_same(*both(data, dfac.TweedieNMF(3), dfac.PSGLD()))
    data = blocks(counts(), "float64")
    assert_same(*both(data, dfac.TweedieNMF(3), dfac.PSGLD(), chains=2))


@pytest.mark.quick("csr_array")
@pytest.mark.parametrize("form", [np.array, sparse.csr_array])
def test_cells_may_have_weights(stand_in, form):
    weights = np.random.default_rng(2).gamma(2.0, size=(60, 41))
    V = full()
    weights = weights if form is np.array else form(np.where(V > 0, weights, 0.0))
    data = blocks(form(V), "float64", weights=weights)
    assert data.weights is not None
    assert_same(*both(data, dfac.TweedieNMF(3), dfac.PSGLD()))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_data_that_do_not_fit_give_the_same_draws(stand_in, form):
    data = blocks(counts() if form == "dense" else sparse.csr_array(full()))
    one, other = (
        dfac.sample(data, dfac.TweedieNMF(3), dfac.PSGLD(), device=CUDA(memory_limit=limit), **RUN)
        for limit in ("1 GiB", 1)
    )
    for name in ("W", "H"):
        np.testing.assert_array_equal(one["posterior"][name], other["posterior"][name])


def test_data_in_a_scratch_file_give_the_same_draws(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    V = da.from_array(counts(), chunks=(20, 41))
    draws = []
    for limit in (None, 1):
        with blocks(V, memory_limit=limit) as data:
            assert data.in_memory == (limit is None)
            run = dfac.sample(data, dfac.TweedieNMF(3), dfac.PSGLD(), device="cuda", **RUN)
            draws.append(run["posterior"]["W"].values)
    np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize("name", ["counts", "sparse", "normal", "compound"])
def test_point_estimates_are_those_of_processors(stand_in, name):
    values, model = MODELS[name]
    method, data = dfac.MultiplicativeUpdates(max_iter=30), blocks(values(), "float64")
    given, run = (data, model(), method), {"random_seed": 0, "progressbar": False}
    found, wanted = (dfac.optimize(*given, device=own, **run) for own in ("cuda", None))
    for own in ("W", "H"):
        exact = wanted[own].values
        np.testing.assert_allclose(found[own].values, exact, atol=1e-9 * exact.max())


def test_a_stored_run_goes_on_there_and_here(stand_in, tmp_path):
    data, model, sampler = blocks(counts(), "float64"), dfac.TweedieNMF(3), dfac.PSGLD()
    options = {"progressbar": False}
    short = RUN | {"draws": 3}
    for name in ("there", "here"):
        dfac.sample(data, model, sampler, device="cuda", store=tmp_path / name, **short)
    there = dfac.resume(tmp_path / "there", draws=3, V=data, device="cuda", **options)
    with pytest.warns(SamplingWarning, match="began on cuda: no GPU and goes on with processors"):
        here = dfac.resume(tmp_path / "here", draws=3, V=data, **options)
    whole = dfac.sample(data, model, sampler, **RUN)
    assert there["posterior"]["W"].shape == (1, 6, 60, 3)
    for name in ("W", "H"):
        exact = whole["posterior"][name].values
        for own in (there, here):
            np.testing.assert_allclose(own["posterior"][name], exact, atol=1e-9 * exact.max())


@pytest.mark.parametrize("name", ["counts", "signed", "sparse prior", "overdispersed", "normal"])
def test_an_automatic_sampler_is_one_that_runs_there(stand_in, name):
    values, model = MODELS[name]
    data = blocks(values())
    assert choose_kernel(None, model(), data, on_device=True).options.on_device
    found = dfac.sample(data, model(), device="cuda", **(RUN | {"draws": 2, "tune": 2}))
    assert np.isfinite(found["posterior"]["W"].values).all()


def test_an_automatic_sampler_may_be_another_one_there():
    """The test above would say nothing otherwise: few counts are for Gibbs on processors."""
    few = random_array((3000, 2000), density=0.002, rng=np.random.default_rng(0)).tocsr()
    few.data[:] = 1
    data = dfac.as_blocks(few, unstored="zero", allow_empty=True)
    model = dfac.TweedieNMF(3, dispersion=1.0)
    best = [choose_kernel(None, model, data, device).options.name for device in (False, True)]
    assert best == ["Gibbs", "SGHMC"]


# -- kernels of samplers -------------------------------------------------------------------


@pytest.fixture
def launched(stand_in, monkeypatch):
    """How often each kernel ran on the device."""
    counted, launch = Counter(), Device.launch

    def noted(self, source, name, *rest):
        counted[name] += 1
        launch(self, source, name, *rest)

    monkeypatch.setattr(Device, "launch", noted)
    return counted


def check_there(launched, case, sampler, tolerance, dtype="float64", **options):
    """Draws there are those of processors, which run no kernel of the device."""
    V, model, reading = case
    data = dfac.as_blocks(V, 4, dtype=dtype, **reading)
    wanted = dfac.sample(data, model, sampler, **RUN | options)
    assert not launched
    found = dfac.sample(data, model, sampler, device="cuda", **RUN | options)
    assert_same(found, wanted, tolerance)


LONGER = {"tune": 10, "draws": 10}
STORED = sparse.csr_array(counts(missing=0))
ZERO, MISSING = {"unstored": "zero"}, {"unstored": "missing"}
PATHS = {
    "counts": (counts(), dfac.TweedieNMF(3), {}),
    "shapes below 1": (counts(), dfac.TweedieNMF(3, shape_w=0.3, shape_h=0.5), {}),
    "shapes above 1": (counts(), dfac.TweedieNMF(3, shape_w=1.5), {}),
    "a shape to learn": (counts(), dfac.TweedieNMF(3, shape_w="auto"), {}),
    "rates": (counts() + 1, dfac.TweedieNMF(3, beta=0.5, rate_w="row", rate_h="component"), {}),
    "dispersions": (counts(), dfac.NegativeBinomialNMF(3, dispersion="column"), {}),
    "sparse": (STORED, dfac.TweedieNMF(3), ZERO),
    "sparse, linear": (STORED, dfac.TweedieNMF(3, beta=2.0, dispersion=1.0), ZERO),
    "ratings": (STORED, dfac.TweedieNMF(3, dispersion=1.0), MISSING),
}


@pytest.mark.quick("dense")
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_dispersions_of_columns(launched, kind):
    given = (counts(), {}) if kind == "dense" else (STORED, MISSING)
    case = given[0], dfac.NegativeBinomialNMF(3, dispersion="column"), given[1]
    check_there(launched, case, dfac.PSGLD(), 2e-5, "float32", **LONGER)
    assert launched[f"{kind}_col_fits"]


MOVES = "kick", "drift"


@pytest.mark.quick("counts", "shapes below 1", "a shape to learn", "rates", "dispersions", "sparse")
@pytest.mark.parametrize("name", PATHS)
def test_paths_of_rows(launched, name):
    """Decisions are those of processors: one that was not would move a whole row.

    Few cycles, as rounding grows by a factor in each while steps are learnt.
    """
    check_there(launched, PATHS[name], dfac.BlockHMC(), 1e-7, tune=3, draws=4)
    # Both factors at the ends and between them: kicks of every round's last visit alone.
    kicks, drifts = (launched[f"leapfrog_{own}"] + launched[f"warped_{own}"] for own in MOVES)
    assert kicks > drifts == 7 * 2 * 4


@pytest.mark.quick("counts", "sparse", "ratings")
@pytest.mark.parametrize("name", ["counts", "rates", "sparse", "sparse, linear", "ratings"])
def test_entries_that_are_drawn(launched, name):
    check_there(launched, PATHS[name], dfac.SGLD(), 1e-6, **LONGER)
    assert launched["draw_entries"]


def test_kernels_of_samplers_in_single_precision(launched):
    case = counts(), dfac.TweedieNMF(3, dispersion=1.0), {}
    check_there(launched, case, dfac.BlockHMC(), 1e-4, "float32", tune=2, draws=2)
    launched.clear()
    sampler = dfac.SGLD(subsample=0.3, transition="moments")
    check_there(launched, PATHS["counts"], sampler, 1e-4, "float32", tune=4, draws=4)


# -- new rows ------------------------------------------------------------------------------


def transformed(V, model, axis="row", dtype="float64", weighting=None, **options):
    """New rows of a run on processors, there and here.

    Each step makes rounding a few times as large, so that only few may be taken.
    """
    cells = {} if weighting is None else {weighting: np.full((60, 41), 0.5)}
    trace = dfac.sample(blocks(full(), dtype, **cells), model, dfac.PSGLD(), **RUN)
    run = {"random_seed": 3, "progressbar": False, "draws": 2} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_in, "TUNE", 4)
        patch.setattr(transform, "POINT_DRAWS", 2)
        return tuple(dfac.transform(trace, V, axis, device=own, **run) for own in ("cuda", None))


def some():
    V = counts()[:20]
    V[3] = np.nan
    return V


def stored():
    return sparse.csr_array(full()[:20])


FIXED = np.random.default_rng(0).gamma(1.0, size=(60, 1))
FROZEN = dfac.TweedieNMF(3, fixed_w=FIXED, dispersion=1.0)
EACH = np.random.default_rng(1).gamma(2.0, size=(20, 41))
SIGMA, WEIGHT = {"uncertainty": EACH}, {"weights": EACH}
NEW = {
    "counts": (some, lambda: dfac.TweedieNMF(3, dispersion=1.0), {}),
    "normal": (some, lambda: dfac.TweedieNMF(3, beta=2.0), {}),
    "compound": (some, lambda: dfac.TweedieNMF(3, beta=0.5), {}),
    "sparse prior": (some, lambda: dfac.TweedieNMF(3, shape_w=0.4), {}),
    "peaked prior": (some, lambda: dfac.TweedieNMF(3, shape_w=2.0), {}),
    "rates": (some, lambda: dfac.TweedieNMF(3, rate_w="row"), {}),
    "peaked rates": (some, lambda: dfac.TweedieNMF(3, rate_w="row", shape_w=2.0), {}),
    "frozen": (some, lambda: FROZEN, {"fixed": FIXED[:20]}),
    "overdispersed": (some, lambda: dfac.NegativeBinomialNMF(3), {}),
    "of columns": (some, lambda: dfac.NegativeBinomialNMF(3, dispersion="column"), {}),
    "uncertain": (some, lambda: dfac.TweedieNMF(3, beta=2.0), SIGMA),
    "weighed": (some, lambda: dfac.TweedieNMF(3, dispersion=1.0), WEIGHT),
    "zeros": (stored, lambda: dfac.TweedieNMF(3), {"unstored": "zero"}),
    "visited zeros": (stored, lambda: dfac.TweedieNMF(3, beta=0.5), {"unstored": "zero"}),
    "missing": (stored, lambda: dfac.TweedieNMF(3), {"unstored": "missing"}),
}


def assert_new_rows(name, point, tolerance=1e-7, **settings):
    values, model, options = NEW[name]
    weighting = next((own for own in ("uncertainty", "weights") if own in options), None)
    settings |= {"weighting": weighting, "point": point}
    found, wanted = transformed(values(), model(), **options, **settings)
    assert "cuda" in found.attrs["device"]
    assert "device" not in wanted.attrs
    exact = wanted.values
    np.testing.assert_allclose(found.values, exact, atol=tolerance * exact.max())
    assert point or (np.abs(np.diff(found.values, axis=1)) > 1e-6).mean() > 0.6


ONCE = [("counts", False), *((name, n % 2 == 0) for n, name in enumerate(NEW))]
"""Each kind of new rows with draws or a point, in turn."""


@pytest.mark.quick(
    *("counts-False", "counts-True", "sparse prior-False", "rates-False", "frozen-False"),
    *("of columns-False", "weighed-False", "zeros-True", "visited zeros-False"),
)
@pytest.mark.parametrize(("name", "point"), ONCE)
def test_new_rows_are_those_of_processors(stand_in, name, point):
    assert_new_rows(name, point)


def test_new_rows_in_single_precision_and_new_columns(stand_in):
    assert_new_rows("counts", point=False, tolerance=1e-3, dtype="float32")
    found, wanted = transformed(counts()[:, :15], dfac.TweedieNMF(3), "column")
    np.testing.assert_allclose(found.values, wanted.values, atol=1e-7 * wanted.values.max())


def test_new_rows_and_optimizers_that_do_not_run_there_are_refused(stand_in):
    for model, what in (
        (dfac.GaussianMF(3), "of a GaussianMF are drawn by Gibbs, which does not run on a GPU"),
        (dfac.TweedieNMF(3, covariates_w=np.ones((60, 1))), "models with covariates"),
    ):
        trace = dfac.sample(full(), model, **RUN)
        given = None if model.covariates[0] is None else np.ones((20, 1))
        options = {"covariates": given, "device": "cuda", "progressbar": False}
        refused(OptionError, what, dfac.transform, trace, some(), **options)
    given, match = (full(), dfac.TweedieNMF(3), dfac.DSGD()), "DSGD does not run on a GPU"
    refused(OptionError, match, dfac.optimize, *given, device="cuda", progressbar=False)


def test_new_rows_on_a_full_device_are_one_sentence(stand_in, monkeypatch):
    class OutOfMemoryError(MemoryError):
        __module__ = "cupy.cuda.memory"

    def full_up(*given):
        raise OutOfMemoryError("no more")

    trace = dfac.sample(full(), dfac.TweedieNMF(3), **RUN)
    monkeypatch.setattr(fold_in, "entries_on_device", full_up)
    match, options = r"the GPU is full \(no more\); pass blocks=1", {"progressbar": False}
    refused(EngineError, match, dfac.transform, trace, some(), device="cuda", **options)


EXACT = ("poisson-gaps", "gaussian-gaps", "compound")


def assert_exact(name):
    """Moments are within the tolerances that samplers on processors are held to."""
    case = next(case for case in CASES if case.name == name)
    settings = {"copies": 1024, "tune": 500, "draws": 200, "executor": DeviceExecutor()}
    got, exact = run_copies(case, dfac.PSGLD(), **settings)[0], reference_posterior(case)
    sd = np.sqrt(exact["var_mu"])
    assert np.sqrt(np.mean(((got.mean - exact["mean_mu"]) / sd) ** 2)) < 0.1
    np.testing.assert_allclose(got.variance / exact["var_mu"], 1.0, atol=0.12)
    assert abs(got.sum_w / exact["sum_w"] - 1) < 0.03


@pytest.mark.statistical
@pytest.mark.quick("poisson-gaps")
@pytest.mark.parametrize("name", EXACT)
def test_draws_are_from_the_exact_posterior(stand_in, name):
    assert_exact(name)


# -- refusals ------------------------------------------------------------------------------


RELATIONS = {"a": dfac.Relation("cells", "genes"), "b": dfac.Relation("cells", "places")}


def refused_there(match, V=None, model=None, sampler="auto", **options):
    given = (blocks(counts()) if V is None else V, model or dfac.TweedieNMF(3), sampler)
    options = RUN | {"device": "cuda"} | options
    assert "\n" not in refused(OptionError, match, dfac.sample, *given, **options)


def test_no_cupy_is_one_sentence(monkeypatch):
    module._opened.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    refused_there(r'needs CuPy, which cannot be imported here \(.*pip install "daskfactor\[cuda\]"')


class CUDARuntimeError(RuntimeError):
    """As CuPy names it."""


@pytest.mark.parametrize("raises", [True, False])
def test_no_gpu_is_one_sentence(monkeypatch, raises):
    def count():
        if raises:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return 0

    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=CUDARuntimeError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    module._opened.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    match = "needs an NVIDIA GPU with its driver, and CUDA says: (cudaErrorNo|there is none)"
    refused_there(match)


DEVICES = 'device takes None for processors, "cuda" for an NVIDIA GPU'
TABLES = {"a": full(), "b": full()}
COVARIATES = dfac.TweedieNMF(3, covariates_w=np.eye(60, 2))
VISITED = blocks(sparse.csr_array(full())), dfac.TweedieNMF(3, beta=0.5), dfac.PSGLD()
REFUSED = [
    *((DEVICES, (), {"device": device}) for device in ("gpu", "cuda:0", 0, True)),
    *(("executor of its own", (), {"executor": own}) for own in ("threads", "serial", "tasks")),
    ("CP does not run on a GPU; leave", (full().reshape(6, 10, 41), dfac.CP(2)), {}),
    ("Coupled does not run", (TABLES, dfac.Coupled(2, relations=RELATIONS)), {}),
    ("models with covariates do not run on a GPU", (None, COVARIATES), {}),
    ("zeros that sparse data do not store do not run on a GPU", VISITED, {}),
    (r"Gibbs does not run on a GPU \(PSGLD", (full(), None, dfac.Gibbs()), {}),
]


@pytest.mark.parametrize(("message", "given", "options"), REFUSED)
def test_what_does_not_run_there_is_refused(stand_in, message, given, options):
    refused_there(message, *given, **options)


# -- a real one ----------------------------------------------------------------------------


@pytest.mark.device
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normal_numbers_of_a_gpu_have_the_bits_of_processors(gpu, dtype):
    key, wanted = np.array([5, 8], np.uint32), np.empty((10_000, 100), dtype)
    langevin.fill_normals(wanted, key, 11, 1, 2**32 - 10_000)
    found = gpu.empty(wanted.shape, dtype)
    steps.fill_normals(found, key, 11, 1, 2**32 - 10_000)
    assert gpu.take(found).tobytes() == wanted.tobytes()


@pytest.mark.device
@pytest.mark.parametrize(("name", "sampler"), RUNS, ids=spelled)
def test_draws_of_a_gpu_are_those_of_processors(gpu, name, sampler):
    values, model = MODELS[name]
    data = blocks(values(), "float64")
    assert_same(*both(data, model(), sampler, monitor=CELLS), tolerance=1e-7)


@pytest.mark.device
@pytest.mark.statistical
@pytest.mark.parametrize("name", EXACT)
def test_a_gpu_draws_from_the_exact_posterior(gpu, name):
    assert_exact(name)


@pytest.mark.device
@pytest.mark.parametrize("point", [False, True])
@pytest.mark.parametrize("name", NEW)
def test_new_rows_of_a_gpu_are_those_of_processors(gpu, name, point):
    assert_new_rows(name, point, tolerance=1e-5)
