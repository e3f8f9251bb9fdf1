"""The estimate of a run's cost, against what runs take, and the sampler that is chosen."""

import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor import PSGLD, SGHMC, GaussianMF, Gibbs, TweedieNMF, as_blocks, estimate_cost
from daskfactor.errors import DataError, OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.inference.base import Sampler, choose_kernel
from daskfactor.inference.chain import Chain
from daskfactor.inference.gibbs import RowGibbsKernel
from daskfactor.inference.passes import Pass
from daskfactor.inference.program import relative_size
from daskfactor.inference.registry import algorithms
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.timing import HOP
from tests.inference.measuring import CASES
from tests.random_sparse import random_array
from tests.refusals import refused
from tests.tiers import FULL

SLACK = 64 * 2**20
"""What the interpreter, numba and the C library may take besides."""
POISSON = {"beta": 1.0, "dispersion": 1.0}
COLUMNS = dfac.NegativeBinomialNMF(3, dispersion="column")
MADE = {"executor": "serial", "draws": 6, "tune": 6, "random_seed": 3, "progressbar": False}
QUICK = ("scratch, store",)
LESS = ("scratch", "sparse", "small")
KINDS = [name for name in CASES if name not in (*QUICK, *LESS)]
SLOW = KINDS if FULL else KINDS[2::5]
CACHES = {"DASKFACTOR_JIT_CACHE", "NUMBA_CACHE_DIR"}
KERNELS = {name: os.environ[name] for name in CACHES & os.environ.keys()}
PROCFS = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured through /proc"
)


def matrix(rows=60, cols=40, missing=0.0):
    V = np.random.default_rng(0).random((rows, cols), dtype=np.float32) + 0.5
    V[np.random.default_rng(1).random(V.shape) < missing] = np.nan
    return V


def measure(names, timeout):
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("measuring.py")), *names],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", **KERNELS},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    results = (json.loads(line) for line in found.stdout.splitlines())
    return {result["name"]: result for result in results}


@pytest.fixture(scope="module")
def quick():
    return measure(QUICK, 200)


@pytest.fixture(scope="module")
def slow():
    return measure(SLOW, 1500)


def check(result):
    assert result["peak"] <= result["estimate"] + SLACK, result
    assert result["estimate"] <= 3 * result["peak"], result
    assert result["peak"] > SLACK, f"too small to tell anything: {result}"


@PROCFS
@pytest.mark.parametrize("name", QUICK)
def test_a_run_stays_below_its_estimate_and_not_far(quick, name):
    check(quick[name])


@pytest.mark.full
@PROCFS
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", SLOW)
def test_so_do_runs_of_other_kinds(slow, name):
    check(slow[name])


class Counting(SerialExecutor):
    """Counts operations and plans of cycles; passes, as of a warm start, are none."""

    operations = plans = 0

    def run(self, plan, program, *rest):
        if not isinstance(program, Pass):
            self.operations += sum(len(part.ops) for part in plan)
            self.plans += 1
        return super().run(plan, program, *rest)


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("model", "sampler", "thin"),
    [
        (TweedieNMF(2), PSGLD(warm_start=1), 1),
        (TweedieNMF(2), PSGLD(1e-3, preconditioner="identity", warm_start=1), 3),
        (TweedieNMF(2), dfac.PSGRRLD(warm_start=1), 1),
        (TweedieNMF(2), dfac.BlockHMC(steps=2, warm_start=1), 1),
        (TweedieNMF(2), SGHMC(warm_start=1), 1),
        (TweedieNMF(2), Gibbs(warm_start=1), 1),
        (GaussianMF(2), SGHMC(), 2),
        (GaussianMF(2), Gibbs(), 2),
    ],
)
def test_operations_plans_and_state_are_those_of_a_run(model, sampler, thin, chains):
    options = {"draws": 8, "tune": 12, "chains": chains, "blocks": 2, "thin": thin}
    executor, V = Counting(), counts(60, 40, 3) if sampler == Gibbs(1) else matrix()
    dfac.sample(V, model, sampler, executor=executor, progressbar=False, **options)
    cost = estimate_cost(V, model, sampler, **options)
    assert executor.operations == cost.updates == cost.tasks["tasks"]
    assert executor.plans == cost.tasks["ring"]
    assert cost.tasks["lanes"] == 0
    if isinstance(sampler, dfac.PSGRRLD):
        return  # two tracks
    with as_blocks(V, 2) as data:
        options = RunOptions(4, 4, 1, 1, 0, "draws", 1, "float32")
        kernel = sampler.kernel(model, data)
        chain = Chain(Setting(data, model, kernel, options, SerialExecutor()), 0)
        chain.start()
        bands = chain.tracks[0].state.bands()
    carried = sum(b.values.nbytes + sum(a.nbytes for a in b.arrays.values()) for b in bands)
    cost = estimate_cost(V, model, sampler, 4, 4, blocks=2)
    assert cost.state == cost.rollback == carried


@pytest.mark.parametrize("K", [2, 5])
def test_gathered_is_what_bands_gather(K, monkeypatch):
    found = []

    def look(self, program, band, factor, cycle):
        found.append(sum(band.arrays[name].nbytes for name in ("grams", "targets")))
        move(self, program, band, factor, cycle)

    move = RowGibbsKernel._move
    monkeypatch.setattr(RowGibbsKernel, "_move", look)
    V, model, options = matrix(missing=0.5), GaussianMF(K), {"draws": 1, "tune": 0, "blocks": 2}
    dfac.sample(V, model, Gibbs(), executor="serial", progressbar=False, **options)
    sizes = model.width * sum(V.shape) * 4
    # The last run of four bands is this one's, not the one that compiles.
    assert (
        sum(found[-4:]) == relative_size(Gibbs().kernel(model).arrays, model.width, "cycle") * sizes
    )
    more = estimate_cost(V, model, Gibbs(), **options).bands
    assert more > estimate_cost(V, model, SGHMC(), **options).bands


def test_results_are_as_large_as_said(tmp_path):
    options = {"draws": 50, "tune": 4, "chains": 2, "blocks": 2}
    V, model = matrix(600, 400), TweedieNMF(8, dispersion=0.9)
    store = tmp_path / "run.zarr"
    trace = dfac.sample(V, model, progressbar=False, store=store, **options)
    cost = estimate_cost(V, model, store=store, **options)
    posterior = trace["posterior"]
    held = sum(variable.nbytes for variable in posterior.data_vars.values())
    moments = trace["posterior_moments"]
    held += sum(variable.nbytes for variable in moments.data_vars.values())
    assert cost.result == pytest.approx(held + V.nbytes, rel=0.01)
    on_disk = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert 0.9 * on_disk < cost.store < 1.2 * on_disk
    assert cost.draws_kept == posterior.sizes["draw"]


def test_nothing_large_is_made_and_the_text_is_a_table():
    shape = (2_000_000, 1_000_000)
    huge = zarr.create_array(store={}, shape=shape, chunks=(10_000, 10_000), dtype="f4")
    text = str(estimate_cost(matrix(), TweedieNMF(2)))
    assert all(word in text for word in ("peak", "KiB", "blocks", "tasks (ring)", "segments"))
    assert max(map(len, text.splitlines())) < 90
    tracemalloc.start()
    try:
        cost = estimate_cost(huge, TweedieNMF(100), memory_limit="1 GiB", blocks=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**24
    assert (cost.data, cost.data_memory, cost.factors) == (8 * 10**12, 0, 3_000_000 * 400)
    assert cost.peak > 12 * cost.factors


def test_blocks_and_sources_agree_and_scratch_is_not_memory():
    V = random_array((300, 200), density=0.1, rng=np.random.default_rng(0), format="csr")
    V = (V * 10).astype(np.float32)
    options = {"blocks": 2, "unstored": "missing"}
    with as_blocks(V, allow_empty=True, **options) as data:
        known = estimate_cost(data, TweedieNMF(3))
        assert known.data == data.nbytes
        assert known.block < known.data
        assert estimate_cost(V, TweedieNMF(3), allow_empty=True, **options) == known
    guessed = estimate_cost(V.shape, TweedieNMF(3), entries=V.nnz, **options)
    assert guessed.data == pytest.approx(known.data, rel=0.02)
    assert guessed.block == pytest.approx(known.block, rel=0.1)
    assert (guessed.data_memory, known.data_memory) == (guessed.data, known.data)
    V = np.ones((2000, 1000))
    limits = "1 GiB", "1 MiB"
    inside, outside = (estimate_cost(V, TweedieNMF(2), memory_limit=own) for own in limits)
    assert (inside.data_memory, outside.data_memory) == (V.nbytes // 2, 0)
    assert outside.task > inside.task
    assert estimate_cost(V.astype("f4"), TweedieNMF(2)).data_memory == 0
    dense = estimate_cost(V.shape, TweedieNMF(2), memory_limit="1 GiB")
    assert (dense.data, dense.data_memory, dense.peak) == (inside.data, inside.data, inside.peak)
    weighed = estimate_cost(V.shape, TweedieNMF(2), memory_limit="1 GiB", weights=0.5)
    assert weighed.data == weighed.data_memory == 2 * dense.data


def test_what_moves_what():
    V, model = matrix(400, 300, 0.3), TweedieNMF(5)
    base = estimate_cost(V, model, draws=40, tune=40)
    two = estimate_cost(V, model, draws=40, tune=40, chains=2)
    assert two.state == 2 * base.state
    assert two.rollback == base.rollback
    assert estimate_cost(V, model, keep="moments").draws_kept == 0
    real = estimate_cost(V, GaussianMF(4))
    assert real.factors == 700 * 6 * 4
    assert 4 * real.factors < real.state < 5 * real.factors
    assert estimate_cost(V, model, dtype="float64").factors == 2 * base.factors
    nested = PSGLD(schedule=dfac.NestedReshuffled(2))
    fewer = estimate_cost(V, model, nested, draws=40, tune=40, blocks=4)
    assert fewer.tasks["tasks"] * 4 == fewer.updates
    watched = estimate_cost(V, model, draws=40, tune=40, monitor="missing")
    assert watched.peak > base.peak
    wide = estimate_cost(V, model, executor="ring", workers=4, lanes=2)
    assert wide.worker != wide.client
    assert wide.seconds > base.seconds  # messages take longer than blocks of this size


def test_time_is_that_of_one_thread_and_of_the_messages_between_rounds():
    V, model, options = matrix(400, 300, 0.3), TweedieNMF(5), {"draws": 40, "tune": 40, "blocks": 8}
    one = estimate_cost(V, model, executor="serial", **options)
    taller = estimate_cost(np.vstack([V, V, V]), model, executor="serial", **options)
    assert taller.seconds == pytest.approx(3 * one.seconds, rel=0.02)
    two = estimate_cost(V, model, executor="threads", lanes=2, **options)
    assert two.seconds == pytest.approx(one.seconds / 2)
    ring = {"executor": "ring", "workers": 4, "lanes": 2, "blocks": 8, "draws": 40, "tune": 40}
    messages = 8 * HOP  # of a cycle, if every band left its worker after every update
    quick = estimate_cost(V, model, **ring)
    assert 0.5 * messages < quick.cycle_seconds < one.cycle_seconds + messages
    slow = estimate_cost(V, model, block_seconds=1.0, **ring)
    assert 0.9 * 64 / 8 < slow.cycle_seconds < 64 / 4


def test_bad_arguments():
    bad = {"draws": 0, "chains": 1.5, "executor": "fast", "keep": "all", "monitor": "all"}
    for name, value in (bad | {"blocks": 100, "workers": 0}).items():
        refused(OptionError, name, estimate_cost, matrix(), TweedieNMF(2), **{name: value})
    refused(OptionError, "model", estimate_cost, matrix(), "nmf")
    refused(DataError, "list", estimate_cost, [1, 2], TweedieNMF(2))
    words = "unexpected keyword argument 'draw'"
    refused(TypeError, words, estimate_cost, matrix(), TweedieNMF(2), draw=5)
    blocks = da.from_array(np.eye(40, dtype="f4"), chunks=20).map_blocks(sp.csr_array)
    refused(OptionError, "entries=", estimate_cost, blocks, TweedieNMF(2))
    assert estimate_cost(blocks, TweedieNMF(2), entries=40).data > 0
    words = "not known before the data are read"
    refused(OptionError, words, estimate_cost, (40, 30), TweedieNMF(2), monitor="missing")
    refused(DataError, "3 dimensions", estimate_cost, (40, 30, 20), TweedieNMF(2))


def counts(rows, columns, mean):
    return np.random.default_rng(rows).poisson(mean, (rows, columns)).astype(np.float32)


def chosen(model, V, **options):
    with dfac.as_blocks(V, allow_empty=True, **options) as data:
        return choose_kernel(None, model.sized(data.shape), data).options.name


TABLE = [
    ("quick and informed", dfac.TweedieNMF(3), counts(30, 40, 5), "BlockHMC"),
    ("another law", dfac.TweedieNMF(3, beta=0.0), 1 + counts(30, 40, 5), "BlockHMC"),
    ("large", dfac.TweedieNMF(3), counts(400, 300, 5), "SGHMC"),
    ("few counts that may vary more", dfac.TweedieNMF(3), counts(60, 40, 0.05), "SGHMC"),
    ("few Poisson counts", dfac.TweedieNMF(3, **POISSON), counts(60, 40, 0.05), "Gibbs"),
    ("many Poisson counts", dfac.TweedieNMF(3, **POISSON), counts(60, 40, 5), "BlockHMC"),
    ("few cells a row", dfac.TweedieNMF(6), counts(9, 8, 0.05), "BlockHMC"),
    ("large and spiky", dfac.TweedieNMF(3, shape_w=0.3), counts(400, 300, 5), "BlockHMC"),
    ("learnt shapes", dfac.TweedieNMF(3, shape_h="auto"), counts(400, 300, 5), "BlockHMC"),
    ("huge and spiky", dfac.TweedieNMF(100, shape_w=0.3), counts(400, 300, 5), "PSGLD"),
    ("relevance", dfac.TweedieNMF("auto"), counts(400, 300, 5), "SGHMC"),
    ("overdispersed", dfac.NegativeBinomialNMF(3), counts(400, 300, 5), "SGHMC"),
    ("few overdispersed counts", dfac.NegativeBinomialNMF(3), counts(60, 40, 0.05), "SGHMC"),
    ("columns that vary", COLUMNS, counts(60, 40, 0.05), "SGHMC"),
    ("many overdispersed counts", dfac.NegativeBinomialNMF(3), counts(60, 40, 5), "BlockHMC"),
    ("real-valued", dfac.GaussianMF(3), counts(30, 40, 5), "SGHMC"),
]


@pytest.mark.parametrize(
    ("model", "V", "name"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_what_is_chosen(model, V, name):
    """On every grid and in every type."""
    assert chosen(model, V) == name
    assert chosen(model, V, blocks=1, dtype="float64") == name


@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5, 0.0, -1.0])
def test_tiny_data_are_drawn_exactly(beta):
    """Whatever has a finite step is off there, if by little."""
    for shape, K in itertools.product([(2, 2), (4, 4), (10, 8)], [1, 2, 3]):
        model = dfac.TweedieNMF(K, beta=beta, dispersion=1.0)
        assert chosen(model, 1 + counts(*shape, 2)) in ("BlockHMC", "Gibbs")


def test_sparse_data_count_by_what_a_pass_visits():
    """And rows have a price of their own."""
    V = random_array((300, 400), density=0.05, rng=0, dtype=np.float32).tocsr()
    assert chosen(dfac.TweedieNMF(5, beta=2.0), V, unstored="zero") == "BlockHMC"
    assert chosen(dfac.NegativeBinomialNMF(5), V.ceil(), unstored="zero") == "SGHMC"
    tall = random_array((30_000, 40), density=0.001, rng=0, dtype=np.float32).tocsr()
    assert chosen(dfac.TweedieNMF(3, beta=2.0), tall, unstored="zero") == "SGHMC"
    V = counts(60, 40, 0.05)  # Gibbs takes no weights of cells
    assert chosen(dfac.TweedieNMF(3, **POISSON), V, weights=np.full(V.shape, 0.5)) != "Gibbs"


def test_whatever_may_be_chosen_says_why():
    claims = {
        name: kind
        for name, kind in algorithms(Sampler).items()
        if kind.efficiency is not Sampler.efficiency
    }
    assert {"PSGLD", "SGHMC", "BlockHMC", "Gibbs"} <= set(claims)
    assert not {"dfac.PSGRRLD", "SGLD", "LangevinDynamics"} & set(claims)
    assert all(own.reason for own in claims.values())


@pytest.mark.parametrize("sampler", [{}, {"sampler": "auto"}, {"sampler": None}])
def test_a_run_is_the_chosen_sampler_s_own_and_says_so(sampler):
    V, model, told = counts(12, 10, 4), dfac.TweedieNMF(2), []
    tree = dfac.sample(V, model, callback=told.append, **MADE, **sampler)
    same = dfac.sample(V, model, dfac.BlockHMC(), **MADE)
    xr.testing.assert_equal(tree["posterior"].to_dataset(), same["posterior"].to_dataset())
    assert json.loads(tree.attrs["sampler"])["type"] == "BlockHMC"
    assert tree.attrs["sampler_reason"] == dfac.BlockHMC.reason
    assert same.attrs["sampler_reason"] == "as asked for"
    assert f"BlockHMC: {dfac.BlockHMC.reason}" in [event.message for event in told]


def test_resume_keeps_it(tmp_path, monkeypatch):
    """Even where another would be chosen by then."""
    V, model, path = counts(12, 10, 4), dfac.TweedieNMF(2), tmp_path / "run.zarr"
    whole = dfac.sample(V, model, **MADE | {"draws": 12})
    dfac.sample(V, model, store=path, **MADE)
    monkeypatch.setattr(dfac.PSGLD, "efficiency", lambda *_: 1e9)
    assert chosen(model, V) == "PSGLD"
    more = dfac.resume(path, draws=6, progressbar=False)
    for name in ("W", "H"):
        np.testing.assert_array_equal(more["posterior"][name], whole["posterior"][name])


def test_what_a_run_would_cost_is_the_chosen_sampler_s():
    V, model = counts(400, 300, 5), dfac.TweedieNMF(3)
    cost = dfac.estimate_cost(V, model)
    assert cost == dfac.estimate_cost(V, model, dfac.SGHMC())
    assert cost.state != dfac.estimate_cost(V, model, dfac.PSGLD()).state
    model = dfac.TweedieNMF(3, **POISSON)
    for scale, name in ((1, "Gibbs"), (0.5, "SGHMC")):  # of blocks, too
        with dfac.as_blocks(counts(60, 40, 0.05) * scale, allow_empty=True) as data:
            own = choose_kernel(None, model, data).options
            assert own.name == name
            assert dfac.estimate_cost(data, model) == dfac.estimate_cost(data, model, own)
    words = '"auto" or one of BlockHMC'
    refused(OptionError, words, dfac.sample, counts(4, 3, 4), dfac.TweedieNMF(1), "psgld")
