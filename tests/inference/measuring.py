"""A process of its own that runs cases and prints the memory that each took, as JSON lines.

``VmHWM``, the high-water mark of resident memory, is set back before each case.
"""

import ctypes
import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from daskfactor import PSGLD, PSGRRLD, GaussianMF, TweedieNMF, as_blocks, estimate_cost, sample

LANES = 2


def dense(rows, cols, dtype="float32", missing=0.0):
    V = np.random.default_rng(0).random((rows, cols), dtype=dtype)
    V += 0.5
    if missing:
        rng = np.random.default_rng(1)
        for row in V:
            row[rng.random(cols) < missing] = np.nan
    return V


def sparse(rows, cols, entries, form="csr"):
    rng = np.random.default_rng(0)
    at = rng.integers(0, rows, entries), rng.integers(0, cols, entries)
    matrix = sp.csr_array((np.ones(entries, np.float32), at), (rows, cols))
    matrix.data += 1
    return matrix.asformat(form)


def cheap(**options):
    return PSGLD(warm_start=2, **options)


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def settle():
    """Give back what is free, and forget the high-water mark."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def measured(make, model, sampler, options):
    """Estimate and peak of one run on blocks that are there, in bytes."""
    V, reading = make()
    with tempfile.TemporaryDirectory() as folder, as_blocks(V, **reading) as data:
        del V
        cost = estimate_cost(data, model, sampler, **options, lanes=LANES)
        options = dict(options)
        if options.get("store"):
            options["store"] = Path(folder) / "run.zarr"
        before = settle()
        trace = sample(data, model, sampler, random_seed=0, progressbar=False, **options)
        peak = status("VmHWM") - before
        del trace
    return {"peak": peak, "estimate": cost.peak - cost.data_memory, "phase": cost.phase}


def numpy_case(*shape, **options):
    return lambda: (dense(*shape, **options), {"blocks": 4})


def copied_case(*shape, **options):
    return lambda: (dense(*shape, dtype="float64"), {"blocks": 4} | options)


def sparse_case(*shape, unstored="missing", form="csr", **options):
    """A sparse matrix; its options say what is not stored."""
    own = {"unstored": unstored, "allow_empty": True, "blocks": 4} | options
    return lambda: (sparse(*shape, form=form), own)


SHORT, MOMENTS = {"draws": 8, "tune": 8}, {"keep": "moments"}
MANY = {"draws": 150, "tune": 4}
SHORTEST = {"draws": 2, "tune": 2}
ONE = {"dispersion": 1.0}
LARGE, COPIED = numpy_case(20_000, 1_000), (6_000, 4_000)
SELDOM = numpy_case(4_900, 100)  # of the same size when drawn, and seldom visited
COVARIATES = np.random.default_rng(2).normal(size=(100_000, 20))
ENTRIES = sparse_case(60_000, 20_000, 3_000_000)
LINKED = TweedieNMF(32, covariates_w=COVARIATES, **ONE)
IN_SCRATCH = copied_case(*COPIED, memory_limit="32 MiB")
AS_ZEROS = sparse_case(60_000, 20_000, 3_000_000, unstored="zero", form="csc")
TALL, WIDE = sparse_case(100_000, 20_000, 1_000_000), numpy_case(500, 8_000)
GAPS, FOUR = numpy_case(3_000, 2_000, missing=0.4), numpy_case(4_000, 1_000)
CASES = {
    "dense, few draws": (LARGE, TweedieNMF(64, **ONE), cheap(), SHORT | MOMENTS),
    "covariates": (sparse_case(100_000, 300, 400_000), LINKED, cheap(), SHORT | MOMENTS),
    "dense, many draws": (SELDOM, TweedieNMF(64), cheap(), MANY),
    "dense, many draws, store": (SELDOM, TweedieNMF(64), cheap(), MANY | {"store": True}),
    "dense, wide, draws": (WIDE, TweedieNMF(64), cheap(), MANY | {"draws": 100}),
    "copied into memory": (copied_case(*COPIED), TweedieNMF(8), cheap(), SHORTEST | MOMENTS),
    "scratch": (IN_SCRATCH, TweedieNMF(8), cheap(), SHORTEST | MOMENTS),
    "scratch, store": (IN_SCRATCH, TweedieNMF(8), cheap(), SHORTEST | {"store": True}),
    "sparse": (ENTRIES, TweedieNMF(32), cheap(), SHORT | MOMENTS),
    "sparse columns, zeros": (AS_ZEROS, TweedieNMF(8), cheap(), SHORT),
    "two chains": (LARGE, TweedieNMF(64, **ONE), cheap(), SHORT | MOMENTS | {"chains": 2}),
    "store, moments": (LARGE, TweedieNMF(64, **ONE), cheap(), SHORT | MOMENTS | {"store": True}),
    "Richardson-Romberg": (LARGE, TweedieNMF(32, **ONE), PSGRRLD(warm_start=2), SHORT),
    "real-valued": (TALL, GaussianMF(32), None, SHORT | MOMENTS),
    "tasks": (LARGE, TweedieNMF(64, **ONE), cheap(), SHORT | MOMENTS | {"executor": "tasks"}),
    "monitored": (GAPS, TweedieNMF(8), cheap(), SHORT | {"monitor": "missing"}),
    "four chains, draws": (FOUR, TweedieNMF(32), cheap(), MANY | {"draws": 60, "chains": 4}),
    "small": (numpy_case(200, 100), TweedieNMF(4), cheap(), {"draws": 100, "tune": 100}),
}


def compile_kernels(case):
    """Run a case on tiny data, so that kernels and imports are not counted."""
    make, model, sampler, options = case
    model = type(model)(2)
    options = options | {"draws": 2, "tune": 2}
    if sp.issparse(make()[0]):
        for unstored in ("zero", "missing"):
            measured(sparse_case(30, 20, 300, unstored=unstored), model, sampler, options)
        return
    tiny = dense(24, 24, missing=0.2)
    tiny[0], tiny[:, 0] = 1, 1
    measured(lambda: (tiny, {}), model, sampler, options)


def main(names):
    warnings.simplefilter("ignore")
    for name in names or CASES:
        compile_kernels(CASES[name])
        print(json.dumps({"name": name, **measured(*CASES[name])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
