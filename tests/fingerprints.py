"""Fingerprints of many short runs: whether a change of the code left every draw the same bits.

Every case is one small problem through the public verbs: samplers, models, kinds of data,
evidences, particles, files and readers of results, with fixed seeds, on one thread.

    python -m tests.fingerprints write OLD.json [--only TEXT]
    python -m tests.fingerprints compare OLD.json NEW.json

``write`` records, for every case, a hash of each array (values, dtype, shape, dims; coordinates are
arrays of their own) and three sums of it, and what results say of themselves: settings,
hyperparameters, divergences, kinds of warnings.

``compare`` says which cases have equal bits, which agree to rounding (every sum within 1e-4 of the
sum of absolute values, 1e-9 in double precision), and which are different, missing or new.

Bits depend on the machine and on the versions of NumPy, numba and BLAS: compare files that were
written under the same ones. A case that raises is a difference even if it raised the same before;
only a case that is named a refusal must raise, and the same as before.
"""

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import is_dataclass
from functools import cache, partial
from importlib.metadata import version
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse
from threadpoolctl import threadpool_limits

import daskfactor as dfac

Array = NDArray[Any]
Cases = Iterator[tuple[str, Callable[[], Any]]]
"""Names of runs, and functions that make them."""
SINGLE, DOUBLE = 1e-4, 1e-9
"""Relative deviations that are rounding where arithmetic is in single and double precision."""
PRECISE = ("float64", "evidence/SMC", "evidence/VB", "evidence/residual", "hold_out")
"""Parts of names of cases in double precision."""
REFUSAL = "/refused"
"""The end of names of cases that must raise."""
VOLATILE = {"blas", "cpu", "created_at", "executor", "executor_reason", "location", "nbytes"}
VOLATILE |= {"inference_library_version", "sampling_time", "seconds", "trace_id", "utilisation"}
"""Names of variables and attributes that depend on time, place or machine."""
ROWS, COLUMNS, K = 40, 30, 3


# -- from a result to fingerprints ---------------------------------------------------------------


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names with arrays and plain settings; names of coordinates have an ``@``."""
    if name.rsplit("/", 1)[-1].lstrip(":@") in VOLATILE:
        return
    parts: Any = None
    if isinstance(value, xr.DataArray):
        value = value.to_dataset(name=value.name or "values")
    if isinstance(value, xr.DataTree):
        parts = {node.path.strip("/"): node.to_dataset(inherit=False) for node in value.subtree}
    elif sparse.issparse(value):
        found = sparse.coo_array(value)
        order = np.lexsort(found.coords[::-1])
        parts = {"coords": np.stack(found.coords).astype(np.int64)[:, order]}
        parts |= {"data": found.data[order], "shape": np.array(value.shape)}
    elif hasattr(value, "_asdict"):
        parts = value._asdict()
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {key: getattr(value, key) for key in value.__dataclass_fields__}
    elif isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            parts = json.loads(value)
    elif isinstance(value, tuple | list) and not all(map(is_simple, value)):
        parts = dict(enumerate(value))
    elif isinstance(value, Mapping) and not isinstance(value, xr.Dataset):
        parts = value
    if isinstance(value, xr.Dataset):
        for key, variable in value.variables.items():
            where = joined(name, f"{'@' if key in value.coords else ''}{key}")
            yield from leaves(where, variable)
        parts = {f":{key}": one for key, one in value.attrs.items()}
    elif isinstance(value, xr.Variable):
        yield name, xr.DataArray(value.values, dims=value.dims)
        kept = {key: one for key, one in value.attrs.items() if key != "description"}
        parts = {f":{key}": one for key, one in kept.items()}
    if parts is not None:
        for key, one in parts.items():
            yield from leaves(joined(name, str(key)), one)
    elif isinstance(value, np.ndarray):
        yield name or "values", xr.DataArray(value, dims=[f"axis_{n}" for n in range(value.ndim)])
    elif isinstance(value, float | np.floating) and ":" not in name:
        yield name or "value", xr.DataArray(np.asarray(value))
    else:
        plain = value.tolist() if isinstance(value, np.generic) else value
        yield name, plain if is_simple(plain) or isinstance(plain, list) else repr(plain)


def joined(name: str, key: str) -> str:
    return f"{name}/{key}" if name and key else name or key


def is_simple(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


def fingerprint(value: Any) -> dict[str, Any]:
    """Return a hash of an array or a setting and, of numbers, sums that tell rounding."""
    if not isinstance(value, xr.DataArray):
        found = {"hash": json.dumps(value), "setting": True}
        number = isinstance(value, Number) and not isinstance(value, bool)
        return found | (dict.fromkeys(("sum", "absolute", "weighted"), value) if number else {})
    values, dims = np.asarray(value.values), [str(dim) for dim in value.dims]
    if values.dtype.kind in "OUST":
        payload, kind = json.dumps([str(one) for one in values.ravel().tolist()]).encode(), "text"
    else:
        payload, kind = np.ascontiguousarray(values).tobytes(), values.dtype.str
    head = json.dumps([kind, list(values.shape), dims])
    found = {"hash": hashlib.sha256(head.encode() + payload).hexdigest(), "dtype": kind}
    found |= {"shape": list(values.shape), "dims": dims}
    if values.dtype.kind in "biuf":
        flat = values.ravel().astype(np.float64)
        found |= {"finite": int(np.isfinite(flat).sum())}
        flat = np.where(np.isfinite(flat), flat, 0.0)
        found |= {"sum": float(flat.sum()), "absolute": float(np.abs(flat).sum())}
        found |= {"weighted": float(flat @ np.sin(1.0 + np.arange(flat.size)))}
    return found


# -- data and runs -------------------------------------------------------------------------------

STACK = ExitStack()
"""Closes the folder of the cases."""


@cache
def root() -> str:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # stores are flushed again and again
    return STACK.enter_context(tempfile.TemporaryDirectory(dir=memory))


def folder() -> Path:
    """Make a folder of its own for a case."""
    return Path(tempfile.mkdtemp(dir=root()))


@cache
def counts() -> Array:
    """Return Poisson counts of rank 3; every row and column has some."""
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.gamma(1.0, 1.0, (ROWS, K)) @ rng.gamma(1.0, 1.0, (K, COLUMNS)))
    V[:, 0] += 1
    V[0] += 1
    return V.astype(np.float32)


@cache
def positive() -> Array:
    rng = np.random.default_rng(2)
    mean = rng.gamma(2.0, 1.0, (ROWS, K)) @ rng.gamma(2.0, 1.0, (K, COLUMNS))
    return (0.1 + mean * rng.gamma(5.0, 0.2, mean.shape)).astype(np.float32)


@cache
def signed() -> Array:
    rng = np.random.default_rng(3)
    mean = rng.standard_normal((ROWS, K)) @ rng.standard_normal((K, COLUMNS))
    return (2.0 + mean + 0.5 * rng.standard_normal(mean.shape)).astype(np.float32)


def law_data(beta: float) -> Array:
    """Return data that a Tweedie law of this power may have made."""
    V = counts() if beta == 1.0 else positive()
    return np.where(counts() > 1, V, 0).astype(np.float32) if beta == 0.5 else V


def with_gaps(V: Array) -> Array:
    missing = np.random.default_rng(1).random(V.shape) < 0.2
    missing[:, 0] = missing[0] = False
    return np.where(missing, np.nan, V)


def few_stored(V: Array) -> sparse.csr_array:
    """Return about a third of the cells, unevenly, as a sparse matrix."""
    kept = np.random.default_rng(5).random(V.shape) < np.linspace(0.05, 0.6, len(V))[:, None]
    kept[:, 0] = kept[0] = True
    rows, columns = np.nonzero(kept & (V != 0))
    return sparse.csr_array((V[rows, columns], (rows, columns)), V.shape)


def labelled() -> xr.DataArray:
    genes = [f"g{number}" for number in range(ROWS)]
    coords = {"gene": genes, "group": ("gene", np.arange(ROWS) % 3)}
    return xr.DataArray(with_gaps(counts()), dims=("gene", "sample"), coords=coords)


INPUTS: dict[str, tuple[Callable[[Array], Any], dict[str, Any]]] = {
    "dense": (lambda V: V, {}),
    "gaps": (with_gaps, {"monitor": "missing"}),
    "zeros": (few_stored, {"unstored": "zero"}),
    "ratings": (few_stored, {"unstored": "missing"}),
    "zeros balanced": (few_stored, {"unstored": "zero", "balance": True}),
    "ratings balanced": (few_stored, {"unstored": "missing", "balance": True}),
    "gaps float64": (with_gaps, {"monitor": "missing", "dtype": "float64"}),
    "ratings float64": (few_stored, {"unstored": "missing", "dtype": "float64"}),
}
POISSON, GAUSSIAN = dfac.TweedieNMF(K, dispersion=1.0), dfac.GaussianMF(K)
SILF, TWO = dfac.SILFNMF(K), dfac.TweedieNMF(2)
WARM: dict[str, Any] = {"warm_start": 3}
PLAIN: dict[str, Any] = {"step": 1e-3, "preconditioner": "identity"} | WARM
KINDS = (dfac.PSGLD, dfac.PSGRRLD, dfac.LangevinDynamics, dfac.SGLD)
SAMPLERS: dict[str, Any] = {kind.__name__: kind(**WARM) for kind in KINDS}
SAMPLERS |= {f"{kind.__name__} plain": kind(**PLAIN) for kind in KINDS}
SAMPLERS["PSGLD euler"] = dfac.PSGLD(transition="euler", **WARM)
SAMPLERS |= {"Gibbs": dfac.Gibbs(**WARM), "BlockHMC": dfac.BlockHMC(steps=2)}
SAMPLERS |= {"SGHMC": dfac.SGHMC(), "Gibbs real": dfac.Gibbs()}
REAL = ("SGHMC", "Gibbs real")
FIXED: dict[str, Any] = {"random_seed": 5, "executor": "serial", "progressbar": False}
METHODS = {"updates": dfac.MultiplicativeUpdates(max_iter=70), "descent": dfac.DSGD(max_iter=15)}
TOY = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])


def call(verb: Any, V: Any, *rest: Any, **options: Any) -> Any:
    """Call a verb on data that are read with the options of ``as_blocks``, if there are any."""
    names = ("allow_empty", "balance", "dtype", "memory_limit")
    if reading := {name: options.pop(name) for name in names if name in options}:
        blocks, unstored = options.pop("blocks", None), options.pop("unstored", None)
        V = dfac.as_blocks(V, blocks, unstored=unstored, **reading)
    return verb(V, *rest, **options)


def draw(V: Any, model: Any, sampler: Any = None, **options: Any) -> Any:
    usual = {"draws": 6, "tune": 12, "blocks": 3} | FIXED
    return call(dfac.sample, V, model, sampler, **(usual | options))


def drawn_by(name: str, given: str = "gaps", **options: Any) -> Any:
    """Draw by a named sampler from a named input."""
    model, V = (GAUSSIAN, signed()) if name in REAL else (POISSON, counts())
    wrap, reading = INPUTS[given]
    return draw(wrap(V), model, SAMPLERS[name], **(reading | options))


def point(V: Any, model: Any, method: Any = None, **options: Any) -> Any:
    options.pop("monitor", None)
    return call(dfac.optimize, V, model, method, **({"blocks": 3} | FIXED | options))


def evidence(V: Any, model: Any, method: Any, **options: Any) -> Any:
    return dfac.log_evidence(V, model, method, **(FIXED | options))


def modes(V: Any, model: Any, method: Any = None, **options: Any) -> Any:
    options.pop("monitor", None)
    usual = FIXED | {"particles": 3, "pilot": 2, "blocks": 2}
    method = method or dfac.Ensemble(max_iter=40)
    return call(dfac.stein_posterior, V, model, method, **(usual | options))


def discrepancy(V: Any, model: Any, **options: Any) -> Any:
    rng, usual = np.random.default_rng(9), {"blocks": 2, "executor": "serial", "progressbar": False}
    pair = rng.gamma(1.0, 1.0, (5, ROWS, K)), rng.gamma(1.0, 1.0, (5, K, COLUMNS))
    return dfac.stein_discrepancy(pair, V, model, **(usual | options))


def converted(kind: str, unstored: str, export: bool) -> Any:
    """Make a blocked store of a file; return what it holds, or draws from it."""
    place, table = folder(), sparse.coo_array(few_stored(counts()))
    source, store, (rows, columns) = place / f"table.{kind}", place / "data.zarr", table.coords
    frame = pd.DataFrame({"row": rows, "column": columns, "value": table.data})
    if kind == "npz":
        sparse.save_npz(source, table)
    else:
        frame.to_csv(source, index=False) if kind == "csv" else frame.to_parquet(source)
    dfac.convert(source, store, unstored=unstored, balance=True, blocks=3, progressbar=False)
    if not export:
        return draw(store, POISSON)
    dfac.export(store, place / "again.npz")
    return sparse.load_npz(place / "again.npz")


@cache
def trace_of(name: str) -> Any:
    """Return a result that the readers share."""
    if name == "particles":
        return modes(with_gaps(positive()), SILF, particles=5)
    options: dict[str, Any] = {"monitor": "missing", "draws": 12, "chains": 2}
    if name == "labels":
        return draw(labelled(), POISSON, **options)
    if name in SAMPLERS:
        return drawn_by(name, **options)
    return draw(with_gaps(law_data(float(name))), dfac.TweedieNMF(K, beta=float(name)), **options)


def corner(W: Array, H: Array) -> Array:
    return (W[:4] @ H[:, :3]).astype(np.float64)


# -- cases ---------------------------------------------------------------------------------------


def sampler_cases() -> Cases:
    """Every sampler on every kind of data, law, model, order and step."""
    for name in SAMPLERS:
        for given in INPUTS:
            if name not in ("SGHMC", "BlockHMC") or "zeros" not in given:
                yield f"sampler/{name}/{given}", partial(drawn_by, name, given)
    for beta in (2.0, 1.0, 0.5, 0.0, -1.0):
        V, law = law_data(beta), dfac.TweedieNMF(K, beta=beta, dispersion=0.5)
        yield f"beta/{beta:g}/auto", partial(draw, V, dfac.TweedieNMF(K, beta=beta))
        for name in ("PSGLD", "PSGRRLD", "SGLD") if beta != 1.0 else ():
            for given in ("gaps", "ratings"):
                wrap, reading = INPUTS[given]
                made = partial(draw, wrap(V), law, SAMPLERS[name], **reading)
                yield f"beta/{beta:g}/{name}/{given}", made
    W = np.random.default_rng(6).gamma(2.0, 1.0, (ROWS, 2))
    cube = np.random.default_rng(8).poisson(2.0, (9, 8, 7)).astype(np.float32)
    both = {name: dfac.Relation("row", name, law="poisson") for name in "ab"}
    models: dict[str, tuple[Any, Any]] = {
        "gamma": (counts(), dfac.TweedieNMF(K, dispersion=1.0, shape_w=2.5, shape_h=0.8)),
        "fixed w": (counts(), dfac.TweedieNMF(K, dispersion=1.0, fixed_w=W)),
        "rates learnt": (counts(), dfac.TweedieNMF(K, rate_w="row", rate_h="component")),
        "negative binomial": (counts(), dfac.NegativeBinomialNMF(K)),
        "CP": (cube, dfac.CP(K, dispersion=1.0)),
        "Coupled": ({"a": counts(), "b": 2 * counts()}, dfac.Coupled(K, relations=both)),
        "no biases": (with_gaps(signed()), dfac.GaussianMF(K, biases=False)),
        "fixed noise": (with_gaps(signed()), dfac.GaussianMF(K, noise=0.3, precision_w=1.0)),
    }
    for label, (data, model) in models.items():
        others = ("PSGLD", "PSGRRLD", "SGLD", "Gibbs")
        for name in ("auto", *(others if label in ("gamma", "fixed w") else ())):
            yield f"model/{label}/{name}", partial(draw, data, model, SAMPLERS.get(name))
    for order in (dfac.Cyclic(), dfac.NestedReshuffled(2), dfac.Proportional()):
        for kind in (dfac.PSGLD, dfac.PSGRRLD):
            sampler, name = kind(schedule=order, **WARM), f"{type(order).__name__}/{kind.__name__}"
            yield f"schedule/{name}", partial(draw, counts(), POISSON, sampler, blocks=4)
    for step in (0.05, dfac.PolynomialStep(0.1, 0.6), 1e5):
        for kind in KINDS:
            options = {"preconditioner": "identity"} if step == 1e5 else WARM  # rolled back
            sampler = kind(step=step, **options)
            yield f"step/{step}/{kind.__name__}", partial(draw, counts(), POISSON, sampler)


def input_cases() -> Cases:
    """Kinds of objects and files, and options of runs."""
    import dask.array as da

    V, stored, empty = with_gaps(counts()), few_stored(counts()), counts().copy()
    empty[4] = np.nan
    dense: dict[str, Any] = {"numpy": V, "float64": V.astype(np.float64), "pandas": pd.DataFrame(V)}
    dense |= {"fortran": np.asfortranarray(V), "masked": np.ma.masked_invalid(V)}
    dense |= {"xarray": xr.DataArray(V, dims=("row", "column"))}
    dense |= {"dask": da.from_array(V, chunks=(17, 11)), "labels": labelled()}
    for label, data in dense.items():
        yield f"input/dense/{label}", partial(draw, data, POISSON, monitor="missing")
    scratch = partial(draw, V, POISSON, memory_limit=1000, monitor="missing")
    yield "input/dense/scratch file", scratch
    yield "input/empty row", partial(draw, empty, POISSON, allow_empty=True)
    yield "input/grid chosen", partial(draw, counts(), POISSON, blocks=None)
    for unstored in ("zero", "missing"):
        for kind in (sparse.csr_array, sparse.csc_array, sparse.coo_array, sparse.csr_matrix):
            made = partial(draw, kind(stored), POISSON, unstored=unstored)
            yield f"input/{unstored}/{kind.__name__}", made
        for file in ("csv", "npz", "parquet"):
            for export in (True, False):
                made = partial(converted, file, unstored, export)
                yield f"convert/{file}/{unstored}/{export}", made
    variations: dict[str, dict[str, Any]] = {
        "chains": {"chains": 2},
        "no tuning": {"tune": 0},
        "all": {"chains": 2, "thin": 2, "monitor": ([0, 39], [1, 29]), "keep": "moments"},
        "one block": {"blocks": 1},
        "many segments": {"draws": 520, "tune": 520, "keep": "moments"},
        "seed": {"random_seed": 2**40 + 1},
    }
    for name in ("PSGLD", "PSGRRLD", "Gibbs", "SGHMC"):
        for label, options in variations.items():
            yield f"option/{label}/{name}", partial(drawn_by, name, **options)


def other_cases() -> Cases:
    """Point estimates, particles, evidences, and what reads results."""
    for given, (wrap, reading) in INPUTS.items():
        for beta in (2.0, 1.0, 0.5, 0.0, -1.0):
            for label, method in METHODS.items():
                if "zeros" not in given or beta >= 1.0:
                    V, law = wrap(law_data(beta)), dfac.TweedieNMF(K, beta=beta)
                    made = partial(point, V, law, method, **reading)
                    yield f"optimize/{label}/{beta:g}/{given}", made
        for label, model in {"silf": SILF, "Tweedie": dfac.TweedieNMF(K)}.items():
            yield f"particles/{label}/{given}", partial(modes, wrap(counts()), model, **reading)
    descend = partial(point, method=METHODS["descent"])
    gamma = dfac.TweedieNMF(K, shape_w=2.0)
    yield f"optimize{REFUSAL}", partial(point, counts(), gamma, METHODS["descent"])
    yield "optimize/Gaussian", partial(descend, with_gaps(signed()), GAUSSIAN)
    for start in ("q_transform", "random", "nndsvdar"):
        ensemble = dfac.Ensemble(start=start, optimizer="multiplicative", max_iter=40)
        yield f"particles/{start}", partial(modes, positive(), SILF, ensemble)
    for mover in (dfac.SVGD(steps=4), dfac.SteinDescent(steps=4), dfac.SimplexHMC(6, 5, steps=2)):
        for label, model in {"silf": SILF, "Tweedie": dfac.TweedieNMF(K, beta=2.0)}.items():
            name = f"particles/{type(mover).__name__}/{label}"
            yield name, partial(modes, positive(), model, mover)
    yield "discrepancy", partial(discrepancy, positive(), dfac.SILFNMF(K, threshold=100.0))
    few = counts()[:12, :9]
    ladder = partial(dfac.ThermodynamicIntegration, temperatures=4, draws=20, tune=10)
    samplers = {"exact": {}, "PSGLD": {"sampler": SAMPLERS["PSGLD"]}, "rule": {"rule": "trapezoid"}}
    for label, options in samplers.items():
        yield f"evidence/TI/{label}", partial(evidence, few, TWO, ladder(**options))
    gamma = dfac.TweedieNMF(2, dispersion=1.0, shape_w=1.5)
    yield "evidence/Chib", partial(evidence, few, gamma, dfac.Chib(draws=60, tune=40))
    cube = np.random.default_rng(7).poisson(0.7, (4, 3, 3))
    urns = {
        "nmf": (TOY, dfac.AllocationModel.nmf(2)),
        "cp": (cube, dfac.AllocationModel.cp(2)),
        "topics": (TOY, dfac.AllocationModel.topics(2)),
    }
    smc = partial(dfac.SequentialMonteCarlo, particles=16, islands=4, target=1e9)
    methods = {"SMC": smc(), "residual": smc(resampling="residual")}
    methods |= {"VB": dfac.VariationalBayes(starts=3)}
    for label, (X, model) in urns.items():
        for name, method in methods.items():
            yield f"evidence/{name}/{label}", partial(evidence, X, model, method)
        size, shape = {"total": 60, "random_seed": 0}, (6, 5, 4)[: 3 if label == "cp" else 2]
        yield f"simulate/{label}", partial(dfac.simulate, model, shape, **size)
    quiet: dict[str, Any] = {"executor": "serial", "progressbar": False}
    yield "select_rank", partial(dfac.select_rank, few, TWO, [1, 2], ladder(), **quiet)
    readers: dict[str, Callable[[Any], Any]] = {
        "predict": partial(dfac.predict, interval=0.8, of="mean"),
        "align": dfac.align,
        "summarize": partial(dfac.summarize, cells=6),
        "component_variability": dfac.component_variability,
        "pairwise_distances": dfac.pairwise_distances,
        "top_entries": lambda trace: dfac.top_entries(trace, 4),
        "expectation": lambda trace: dfac.expectation(trace, corner),
        "monitored": partial(dfac.monitored, interval=0.8),
        "observations": partial(dfac.predict, interval=0.8, of="observation"),
    }
    for name in ("PSGLD", "PSGRRLD", "SGHMC", "labels", "0", "0.5", "2", "particles"):
        for label, read in readers.items():
            if name != "particles" or label not in ("monitored", "observations"):
                yield f"{label}/{name}", lambda read=read, name=name: read(trace_of(name))
    for unstored in ("missing", "zero"):
        options = {"unstored": unstored, "random_seed": 3}
        yield f"hold_out/{unstored}", partial(dfac.hold_out, few_stored(counts()), 0.2, **options)


def all_cases() -> dict[str, Callable[[], Any]]:
    """Return every case by name, in the order in which they run."""
    cases = [*sampler_cases(), *input_cases(), *other_cases()]
    assert len(dict(cases)) == len(cases), "names of cases must differ"
    return dict(cases)


# -- write ---------------------------------------------------------------------------------


def run_case(name: str, make: Callable[[], Any]) -> dict[str, Any]:
    """Return the fingerprints of a case by name, or the error that it ended with."""
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            found = dict(leaves("", make()))
    except Exception as error:  # whatever it is, the others go on
        return {"error": f"{type(error).__name__}: {error}", "refusal": name.endswith(REFUSAL)}
    kinds = {one.category for one in caught if one.category.__module__.startswith("daskfactor")}
    found["warnings"] = sorted(kind.__name__ for kind in kinds)
    entries = {key: fingerprint(found[key]) for key in sorted(found)}
    tolerance = DOUBLE if any(part in name for part in PRECISE) else SINGLE
    return {"tolerance": tolerance, "entries": entries}


def failed(entry: Mapping[str, Any]) -> bool:
    """Return whether a case ended with an error that it was not to end with."""
    return "error" in entry and not entry.get("refusal", False)


def write(path: Path, only: str) -> int:
    """Run the cases that were asked for and write their fingerprints."""
    cases = {name: make for name, make in all_cases().items() if only in name}
    found: dict[str, Any] = {}
    print(f"{len(cases)} cases of the daskfactor in {Path(dfac.__file__).parent}", file=sys.stderr)
    with STACK, threadpool_limits(1):
        for number, (name, make) in enumerate(cases.items(), 1):
            found[name] = run_case(name, make)
            if failed(found[name]) or number % 50 == 0:
                error = found[name].get("error", "")[:200]
                print(f"[{number}/{len(cases)}] {name} {error}", file=sys.stderr, flush=True)
    errors = sum(map(failed, found.values()))
    libraries = ("numpy", "scipy", "numba", "scikit-learn", "xarray", "dask")
    machine = {"processor": platform.machine(), "python": platform.python_version()}
    machine |= {name: version(name) for name in libraries}
    record = {"only": only, "machine": machine, "cases": found}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {errors} failed")
    return 1 if errors else 0


# -- compare -------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What became of a case: ``kind`` is one of `ORDER`, ``deviation`` is relative."""

    kind: str
    deviation: float = 0.0
    detail: str = ""


ORDER = ("equal", "rounding", "different", "settings", "missing", "new")


def judge_entry(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Verdict:
    """Tell whether an array or a setting is the same, the same but for rounding, or another."""
    if old["hash"] == new["hash"]:
        return Verdict("equal")
    other = "settings" if "setting" in new or "setting" in old else "different"
    for name in ("dtype", "shape", "dims", "finite", "setting"):
        if old.get(name) != new.get(name):
            return Verdict(other, detail=f"{name} was {old.get(name)}, is {new.get(name)}")
    if "absolute" not in old or "absolute" not in new:
        return Verdict(other, detail=f"was {old['hash'][:60]}, is {new['hash'][:60]}")
    scale = max(abs(old["absolute"]), abs(new["absolute"]))
    largest = max(abs(old[name] - new[name]) for name in ("sum", "absolute", "weighted"))
    found = largest / scale if scale else 0.0
    exact = np.dtype(old.get("dtype", "f8")).kind != "f" or found > tolerance
    return Verdict(other if exact else "rounding", found)


def judge(old: Mapping[str, Any], new: Mapping[str, Any]) -> Verdict:
    """Tell what became of one case."""
    if "error" in old or "error" in new:
        one, other = old.get("error", "no error"), new.get("error", "no error")
        if one == other and not failed(new):
            return Verdict("equal")
        return Verdict("different", detail=f"was {one[:200]!r}, is {other[:200]!r}")
    before, after, verdicts = old["entries"], new["entries"], {}
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            setting = "setting" in (before.get(name) or after[name])
            lost = "is not there any more" if name in before else "is new"
            verdicts[name] = Verdict("settings" if setting else "different", detail=lost)
        else:
            verdicts[name] = judge_entry(before[name], after[name], old["tolerance"])
    for kind in ("different", "settings", "rounding"):
        if chosen := {name: one for name, one in verdicts.items() if one.kind == kind}:
            largest = max(one.deviation for one in chosen.values())
            said = (f"{key} {one.detail or f'{one.deviation:.1e}'}" for key, one in chosen.items())
            return Verdict(kind, largest, "; ".join(said))
    return Verdict("equal")


def compare(old_path: Path, new_path: Path) -> int:
    """Print what became of every case; return 1 if one is different or missing."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (old_path, new_path))
    for name, value in old["machine"].items():
        if new["machine"].get(name) != value:
            print(f"note: {name} was {value}, is {new['machine'].get(name)}")
    before = {name: one for name, one in old["cases"].items() if new["only"] in name}
    verdicts = {}
    for name in sorted(before.keys() | new["cases"].keys()):
        if name in before and name in new["cases"]:
            verdicts[name] = judge(before[name], new["cases"][name])
        else:
            verdicts[name] = Verdict("missing" if name in before else "new")
    for kind in ORDER[1:]:
        for name, one in verdicts.items():
            if one.kind == kind:
                size = f" {one.deviation:.1e}" if one.deviation else ""
                print(f"{kind:<10} {name}{size}  {one.detail[:400]}".rstrip())
    numbers = {kind: sum(one.kind == kind for one in verdicts.values()) for kind in ORDER}
    print(", ".join(f"{count} {kind}" for kind, count in numbers.items()))
    print(f"{sum(map(failed, new['cases'].values()))} cases failed")
    return int(any(one.kind in ("different", "settings", "missing") for one in verdicts.values()))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write", help="run the cases")
    writing.add_argument("file", type=Path)
    writing.add_argument("--only", default="", help="part of the names of the cases to run")
    comparing = verbs.add_parser("compare", help="compare two files")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.verb == "write":
        return write(given.file, given.only)
    return compare(given.old, given.new)


if __name__ == "__main__":
    sys.exit(main())
