"""The estimate of a run's cost, against what runs take."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from daskfactor.data.grid import NestedReshuffled
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.traffic import HOP
from daskfactor.inference.base import checked_sampler
from daskfactor.inference.block_hmc import BlockHMC
from daskfactor.inference.cost import estimate_cost
from daskfactor.inference.gibbs import GaussianGibbs, Gibbs
from daskfactor.inference.langevin import PSGLD, PSGRRLD
from daskfactor.inference.passes import Pass
from daskfactor.inference.sampling import sample
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.sghmc import SGHMC
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from tests.random_sparse import random_array
from tests.refusals import refused
from tests.tiers import FULL

SLACK = 64 * 2**20
"""What the interpreter, numba and the C library may take besides."""
QUICK = ("copied into memory", "scratch, store", "covariates")
KINDS = (
    "dense, few draws",
    "dense, many draws",
    "dense, many draws, store",
    "dense, wide, draws",
    "two chains",
    "store, moments",
    "Richardson-Romberg",
    "monitored",
    "tasks",
    "four chains, draws",
    "sparse columns, zeros",
    "sparse coo",
    "reading csr",
    "reading csc",
    "reading coo",
    "reading, balanced",
    "reading into scratch",
    "real-valued",
)
SLOW = KINDS if FULL else KINDS[2::5]
KERNELS = {
    name: os.environ[name]
    for name in ("DASKFACTOR_JIT_CACHE", "NUMBA_CACHE_DIR")
    if name in os.environ
}
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
        (TweedieNMF(2), PSGLD(warm_start=1), 3),
        (TweedieNMF(2), PSGRRLD(warm_start=1), 1),
        (TweedieNMF(2), BlockHMC(steps=2, warm_start=1), 1),
        (GaussianMF(2), None, 2),
        (GaussianMF(2), Gibbs(), 2),
    ],
)
def test_operations_and_plans_are_those_of_a_run(model, sampler, thin, chains):
    options = {"draws": 8, "tune": 12, "chains": chains, "blocks": 2, "thin": thin}
    executor = Counting()
    sample(matrix(), model, sampler, executor=executor, progressbar=False, **options)
    cost = estimate_cost(matrix(), model, sampler, **options)
    assert executor.operations == cost.updates == cost.tasks["tasks"]
    assert executor.plans == cost.tasks["ring"]
    assert cost.tasks["lanes"] == 0


@pytest.mark.parametrize(
    ("model", "sampler"),
    [
        (TweedieNMF(2), PSGLD(warm_start=1)),
        (TweedieNMF(2), PSGLD(1e-3, preconditioner="identity", warm_start=1)),
        (GaussianMF(2), SGHMC()),
        (TweedieNMF(2), SGHMC(warm_start=1)),
        (TweedieNMF(2), Gibbs(warm_start=1)),
        (TweedieNMF(2), BlockHMC(warm_start=1)),
        (GaussianMF(2), Gibbs()),
    ],
)
def test_state_is_what_a_chain_carries(model, sampler):
    V, sampler = matrix(), checked_sampler(model, sampler)
    with as_blocks(V, 2) as data:
        options = RunOptions(4, 4, 1, 1, 0, "draws", 1, "float32")
        chain = sampler.chain(Setting(data, model, sampler, options, SerialExecutor()), 0)
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

    move = GaussianGibbs._move
    monkeypatch.setattr(GaussianGibbs, "_move", look)
    V, model, options = matrix(missing=0.5), GaussianMF(K), {"draws": 1, "tune": 0, "blocks": 2}
    sample(V, model, Gibbs(), executor="serial", progressbar=False, **options)
    sizes = model.width * sum(V.shape) * 4
    # The last run of four bands is this one's, not the one that compiles.
    assert sum(found[-4:]) == GaussianGibbs().gathered(model.width) * sizes
    more = estimate_cost(V, model, Gibbs(), **options).bands
    assert more > estimate_cost(V, model, SGHMC(), **options).bands


def test_results_are_as_large_as_said(tmp_path):
    options = {"draws": 50, "tune": 4, "chains": 2, "blocks": 2}
    V, model = matrix(600, 400), TweedieNMF(8, dispersion=1.0)
    store = tmp_path / "run.zarr"
    trace = sample(V, model, progressbar=False, store=store, **options)
    cost = estimate_cost(V, model, store=store, **options)
    posterior = trace["posterior"]
    held = sum(variable.nbytes for variable in posterior.data_vars.values())
    moments = trace["posterior_moments"]
    held += sum(variable.nbytes for variable in moments.data_vars.values())
    assert cost.result == pytest.approx(held + V.nbytes, rel=0.01)
    on_disk = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert 0.9 * on_disk < cost.store < 1.2 * on_disk
    assert cost.draws_kept == posterior.sizes["draw"]


def test_nothing_large_is_made():
    huge = zarr.create_array(
        store={}, shape=(2_000_000, 1_000_000), chunks=(10_000, 10_000), dtype="f4"
    )
    estimate_cost(matrix(), TweedieNMF(2))
    tracemalloc.start()
    try:
        cost = estimate_cost(huge, TweedieNMF(100), memory_limit="1 GiB", blocks=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**24
    assert cost.data == 8 * 10**12
    assert cost.data_memory == 0
    assert cost.factors == 3_000_000 * 400
    assert cost.peak > 12 * cost.factors


def test_blocks_sources_and_stores_agree(tmp_path):
    V = random_array((300, 200), density=0.1, rng=np.random.default_rng(0), format="csr")
    V = (V * 10).astype(np.float32)
    options = {"blocks": 2, "unstored": "missing"}
    with as_blocks(V, allow_empty=True, **options) as data:
        known = estimate_cost(data, TweedieNMF(3))
        assert known.data == data.nbytes
        assert known.block < known.data
        guessed = estimate_cost(V, TweedieNMF(3), **options)
    assert guessed.data == pytest.approx(known.data, rel=0.02)
    assert guessed.block == pytest.approx(known.block, rel=0.1)
    assert (guessed.data_memory, known.data_memory) == (guessed.data, 0)


def test_scratch_is_not_counted_as_memory():
    V = np.ones((2000, 1000))
    inside = estimate_cost(V, TweedieNMF(2), memory_limit="1 GiB")
    outside = estimate_cost(V, TweedieNMF(2), memory_limit="1 MiB")
    assert (inside.data_memory, outside.data_memory) == (V.nbytes // 2, 0)
    assert outside.task > inside.task
    assert estimate_cost(V.astype("f4"), TweedieNMF(2)).data_memory == 0


def test_what_moves_what():
    V, model = matrix(400, 300, 0.3), TweedieNMF(5)
    base = estimate_cost(V, model, draws=40, tune=40)
    two = estimate_cost(V, model, draws=40, tune=40, chains=2)
    assert two.state == 2 * base.state
    assert two.rollback == base.rollback
    assert estimate_cost(V, model, keep="moments").draws_kept == 0
    assert estimate_cost(V, model, dtype="float64").factors == 2 * base.factors
    nested = PSGLD(schedule=NestedReshuffled(2))
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


def test_real_valued_models():
    cost = estimate_cost(matrix(), GaussianMF(4))
    assert cost.factors == 100 * 6 * 4
    assert 4 * cost.factors < cost.state < 5 * cost.factors


def test_reads_like_a_table():
    text = str(estimate_cost(matrix(), TweedieNMF(2)))
    assert all(word in text for word in ("peak", "KiB", "blocks", "tasks (ring)", "segments"))
    assert max(map(len, text.splitlines())) < 90


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"draws": 0}, OptionError, "draws"),
        ({"chains": 1.5}, OptionError, "chains"),
        ({"executor": "fast"}, OptionError, "executor"),
        ({"keep": "all"}, OptionError, "keep"),
        ({"monitor": "all"}, OptionError, "monitor"),
        ({"blocks": 100}, OptionError, "blocks"),
        ({"workers": 0}, OptionError, "workers"),
        ({"model": "nmf"}, OptionError, "model"),
        ({"V": [1, 2]}, DataError, "list"),
    ],
)
def test_bad_arguments(arguments, error, match):
    refused(error, match, estimate_cost, **{"V": matrix(), "model": TweedieNMF(2)} | arguments)
    assert issubclass(ModelError, ValueError)


def test_a_sparse_input_that_does_not_count_its_entries():
    import dask.array as da

    blocks = da.from_array(np.eye(40, dtype="f4"), chunks=20).map_blocks(sp.csr_array)
    refused(OptionError, "entries=", estimate_cost, blocks, TweedieNMF(2))
    assert estimate_cost(blocks, TweedieNMF(2), entries=40).data > 0


def test_options_that_nobody_takes_are_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'draw'"):
        estimate_cost(matrix(), TweedieNMF(2), draw=5)
