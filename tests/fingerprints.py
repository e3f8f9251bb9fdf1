"""Fingerprints of many short runs: whether a change of the code left every draw the same bits.

Every case is one small problem through the public verbs: samplers, models, kinds of data,
executors, stores, evidences, particles, files and readers of results, with fixed seeds.

    python -m tests.fingerprints write OLD.json [--only TEXT]
    python -m tests.fingerprints compare OLD.json NEW.json [--ignore-attributes]
    python -m tests.fingerprints list

``write`` records, for every case, a hash of each array (values, dtype, shape, dims; coordinates are
arrays of their own) and three sums of it, and the attributes that are the same in every run:
settings, hyperparameters, divergences, kinds of warnings. Cases with one ``twin`` must have equal
arrays, whatever executor or store they went through, or whether they were resumed.

``compare`` says which cases have equal bits, which agree to rounding (every sum within 1e-4 of the
sum of absolute values, 1e-9 in double precision), and which are different, missing or new.

Bits depend on the machine and on the versions of NumPy, numba and BLAS: compare files that were
written under the same ones. A case that raises is a difference even if it raised the same before;
only a case that is declared as a refusal must raise, and the same as before.
"""

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, is_dataclass
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
Make = Callable[[], Any]
SINGLE, DOUBLE = 1e-4, 1e-9
"""Relative deviations that are rounding where arithmetic is in single and double precision."""
VOLATILE = frozenset(
    [
        "blas",
        "cpu",
        "created_at",
        "executor",
        "executor_reason",
        "inference_library_version",
        "location",
        "nbytes",
        "sampling_time",
        "seconds",
        "utilisation",
    ]
)
"""Names of variables and attributes that depend on time, place or machine."""
APART = ("observed_data/", "constant_data/")
"""Groups that a store has more of than a result in memory."""
ROWS, COLUMNS, K = 40, 30, 3

# -- from a result to named arrays and attributes ------------------------------------------


class Flat:
    """A result as arrays and plain attributes by name; coordinates' names have an ``@``."""

    def __init__(self, result: Any) -> None:
        self.arrays: dict[str, xr.DataArray] = {}
        self.attrs: dict[str, Any] = {}
        self.add("", result)

    def add(self, name: str, value: Any) -> None:
        """Add a value of any kind under a name."""
        if name.rsplit("/", 1)[-1] in VOLATILE:
            return
        if isinstance(value, xr.DataTree):
            for node in value.subtree:
                self.add(joined(name, node.path.strip("/")), node.to_dataset(inherit=False))
        elif isinstance(value, xr.Dataset):
            self.add_dataset(name, value)
        elif isinstance(value, xr.DataArray):
            self.add_dataset(name, value.to_dataset(name=value.name or "values"))
        elif sparse.issparse(value):
            found = sparse.coo_array(value)
            order = np.lexsort(found.coords[::-1])
            coords = np.stack(found.coords).astype(np.int64)[:, order]
            parts = {"shape": np.array(value.shape), "coords": coords, "data": found.data[order]}
            self.add(name, parts)
        elif isinstance(value, np.ndarray):
            dims = [f"axis_{axis}" for axis in range(value.ndim)]
            self.arrays[name or "values"] = xr.DataArray(value, dims=dims)
        elif hasattr(value, "_asdict"):
            self.add(name, value._asdict())
        elif is_dataclass(value) and not isinstance(value, type):
            self.add(name, {key: getattr(value, key) for key in value.__dataclass_fields__})
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self.add(joined(name, str(key)), part)
        elif isinstance(value, float | np.floating):
            self.arrays[name or "value"] = xr.DataArray(np.asarray(value))
        elif isinstance(value, tuple | list) and any(
            isinstance(part, float) or not is_simple(part) for part in value
        ):
            for key, part in enumerate(value):
                self.add(joined(name, str(key)), part)
        else:
            self.add_attribute(name, value)

    def add_dataset(self, name: str, data: xr.Dataset) -> None:
        for key, variable in data.variables.items():
            if str(key) in VOLATILE:
                continue
            here = joined(name, f"{'@' if key in data.coords else ''}{key}")
            self.arrays[here] = xr.DataArray(variable.values, dims=variable.dims)
            for label, value in variable.attrs.items():
                if label != "description":
                    self.add_attribute(f"{here}:{label}", value)
        for label, value in data.attrs.items():
            self.add_attribute(joined(name, f":{label}"), value)

    def add_attribute(self, name: str, value: Any) -> None:
        """Add a setting; text that is JSON is taken apart."""
        if name.rsplit("/", 1)[-1].lstrip(":") in VOLATILE:
            return
        if isinstance(value, str) and value.startswith("{"):
            with suppress(ValueError):
                value = json.loads(value)
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.add_attribute(joined(name, str(key)), part)
        elif isinstance(value, np.ndarray | np.generic):
            self.attrs[name] = value.tolist()
        elif isinstance(value, tuple | list):
            self.attrs[name] = [part if is_simple(part) else repr(part) for part in value]
        else:
            self.attrs[name] = value if is_simple(value) else repr(value)


def joined(name: str, key: str) -> str:
    return f"{name}/{key}" if name and key else name or key


def is_simple(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


def fingerprint(array: xr.DataArray) -> dict[str, Any]:
    """Return a hash of an array and, of numbers, three sums that tell rounding from change."""
    values = np.asarray(array.values)
    if values.dtype.kind in "OUST":
        payload, kind = json.dumps([str(one) for one in values.ravel().tolist()]).encode(), "text"
    else:
        payload, kind = np.ascontiguousarray(values).tobytes(), values.dtype.str
    dims = [str(dim) for dim in array.dims]
    head = json.dumps([kind, list(values.shape), dims])
    found = {"hash": hashlib.sha256(head.encode() + payload).hexdigest(), "dtype": kind}
    found |= {"shape": list(values.shape), "dims": dims}
    if values.dtype.kind in "biuf":
        flat = values.ravel().astype(np.float64)
        finite = np.isfinite(flat)
        flat = np.where(finite, flat, 0.0)
        found |= {"finite": int(finite.sum()), "sum": float(flat.sum())}
        found |= {"absolute": float(np.abs(flat).sum())}
        found |= {"weighted": float(flat @ np.sin(1.0 + np.arange(flat.size)))}
    return found


def describe(result: Any, tolerance: float) -> dict[str, Any]:
    """Return the fingerprint of a whole result."""
    flat = Flat(result)
    arrays = {name: fingerprint(flat.arrays[name]) for name in sorted(flat.arrays)}
    hashes = json.dumps({name: one["hash"] for name, one in arrays.items()})
    whole = hashlib.sha256(hashes.encode()).hexdigest()
    attributes = {name: flat.attrs[name] for name in sorted(flat.attrs)}
    return {"hash": whole, "tolerance": tolerance, "arrays": arrays, "attributes": attributes}


@dataclass(frozen=True)
class Case:
    """A run by name; cases with one ``twin`` must have equal arrays; a ``refusal`` must raise."""

    name: str
    make: Make
    twin: str = ""
    tolerance: float = SINGLE
    refusal: bool = False


# -- data ----------------------------------------------------------------------------------

STACK = ExitStack()
"""Closes the folder and the cluster of the cases."""


def folder() -> Path:
    """Make a folder of its own for a case."""
    return Path(tempfile.mkdtemp(dir=root()))


@cache
def root() -> str:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # stores are flushed again and again
    return STACK.enter_context(tempfile.TemporaryDirectory(dir=memory))


@cache
def client() -> Any:
    """Return a client of two workers in this process."""
    import dask
    from distributed import Client, LocalCluster

    quiet = {f"distributed.worker.memory.{name}": False for name in ("target", "spill")}
    STACK.enter_context(dask.config.set(quiet))
    size: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": 0}
    size |= {"processes": False, "dashboard_address": None, "silence_logs": 50}
    cluster = STACK.enter_context(LocalCluster(**size))
    return STACK.enter_context(Client(cluster, set_as_default=False))


@cache
def counts() -> Array:
    """Return Poisson counts of rank 3; every row and column has some."""
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.gamma(1.0, 1.0, (ROWS, K)) @ rng.gamma(1.0, 1.0, (K, COLUMNS)))
    V[:, 0] += 1
    V[0] += 1
    return V.astype(np.float32)


def with_gaps(V: Array) -> Array:
    missing = np.random.default_rng(1).random(V.shape) < 0.2
    missing[:, 0] = missing[0] = False
    return np.where(missing, np.nan, V)


@cache
def positive() -> Array:
    rng = np.random.default_rng(2)
    mean = rng.gamma(2.0, 1.0, (ROWS, K)) @ rng.gamma(2.0, 1.0, (K, COLUMNS))
    return (0.1 + mean * rng.gamma(5.0, 0.2, mean.shape)).astype(np.float32)


@cache
def signed() -> Array:
    rng = np.random.default_rng(3)
    mean = rng.standard_normal((ROWS, K)) @ rng.standard_normal((K, COLUMNS))
    mean += 2.0 + rng.standard_normal((ROWS, 1)) + rng.standard_normal(COLUMNS)
    return (mean + 0.5 * rng.standard_normal(mean.shape)).astype(np.float32)


def law_data(beta: float) -> Array:
    """Return data that a Tweedie law of this power may have made."""
    if beta == 1.0:
        return counts()
    rare = np.random.default_rng(4).random((ROWS, COLUMNS)) < (0.2 if 0.0 < beta < 1.0 else 0.0)
    rare[:, 0] = rare[0] = False
    return np.where(rare, 0.0, positive()).astype(np.float32)


def few_stored(V: Array) -> sparse.csr_array:
    """Return about a third of the cells, unevenly, as a sparse matrix."""
    kept = np.random.default_rng(5).random(V.shape) < np.linspace(0.05, 0.6, len(V))[:, None]
    kept[:, 0] = kept[0] = True
    rows, columns = np.nonzero(kept & (V != 0))
    return sparse.csr_array((V[rows, columns], (rows, columns)), V.shape)


def labelled() -> xr.DataArray:
    coords = {
        "gene": [f"g{number}" for number in range(ROWS)],
        "group": ("gene", np.arange(ROWS) % 3),
        "sample": np.arange(COLUMNS) * 10,
    }
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
POISSON, GAUSSIAN, SILF = (
    dfac.TweedieNMF(K, dispersion=1.0),
    dfac.GaussianMF(K),
    dfac.SILFNMF(K),
)
WARM: dict[str, Any] = {"warm_start": 3}
PLAIN: dict[str, Any] = {"step": 1e-3, "preconditioner": "identity"} | WARM
LANGEVIN = {
    kind.__name__: kind for kind in (dfac.PSGLD, dfac.PSGRRLD, dfac.LangevinDynamics, dfac.SGLD)
}
SAMPLERS: dict[str, Any] = {
    **{name: kind(**WARM) for name, kind in LANGEVIN.items()},
    **{f"{name} plain": kind(**PLAIN) for name, kind in LANGEVIN.items()},
    "PSGLD euler": dfac.PSGLD(transition="euler", **WARM),
    "PSGLD cir": dfac.PSGLD(transition="cir", **WARM),
    "Gibbs": dfac.Gibbs(**WARM),
    "HMC": dfac.HMC(steps=3, **WARM),
    "BlockHMC": dfac.BlockHMC(steps=2),
    "SGHMC": dfac.SGHMC(),
    "Gibbs real-valued": dfac.Gibbs(),
}
REAL = ("SGHMC", "Gibbs real-valued")
EXECUTORS: dict[str, Callable[[], dict[str, Any]]] = {
    "serial": lambda: {"executor": "serial"},
    "auto": lambda: {"executor": "auto"},
    "three lanes": lambda: {"executor": dfac.ThreadsExecutor(3)},
    "tasks": lambda: {"executor": "tasks"},
    "cluster tasks": lambda: {"executor": "tasks", "client": client()},
    "cluster ring": lambda: {"executor": "ring", "client": client()},
}
FIXED: dict[str, Any] = {"random_seed": 5, "executor": "serial", "progressbar": False}
METHODS: dict[str, Any] = {
    "updates": dfac.MultiplicativeUpdates(max_iter=70),
    "descent": dfac.DSGD(max_iter=15),
}
TOY = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
TENSOR = np.random.default_rng(7).poisson(0.7, (4, 3, 3))


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
    return dfac.log_evidence(V, model, method, **(FIXED | {"random_seed": 1} | options))


def modes(V: Any, model: Any, method: Any = None, **options: Any) -> Any:
    usual = FIXED | {"particles": 3, "pilot": 2, "random_seed": 4, "blocks": 2}
    options.pop("monitor", None)
    method = method or dfac.Ensemble(max_iter=40)
    return call(dfac.stein_posterior, V, model, method, **(usual | options))


def discrepancy(pair: Any, V: Any, model: Any, **options: Any) -> Any:
    usual = {"blocks": 2, "executor": "serial", "progressbar": False}
    return dfac.stein_discrepancy(pair, V, model, **(usual | options))


def random_pair() -> tuple[Array, Array]:
    rng = np.random.default_rng(9)
    return rng.gamma(1.0, 1.0, (5, ROWS, K)), rng.gamma(1.0, 1.0, (5, K, COLUMNS))


def tolerance_of(given: str) -> float:
    return DOUBLE if "float64" in given else SINGLE


# -- cases ---------------------------------------------------------------------------------


def sampler_cases() -> Iterator[Case]:
    """Every sampler on every kind of data, law, prior, order and step."""
    for name in SAMPLERS:
        for given in INPUTS:
            if name in ("SGHMC", "BlockHMC") and "zeros" in given:
                continue
            make = partial(drawn_by, name, given)
            yield Case(f"sampler/{name}/{given}", make, tolerance=tolerance_of(given))
    for beta in (2.0, 1.0, 0.5, 0.0, -1.0):
        V, fixed = law_data(beta), dfac.TweedieNMF(K, beta=beta, dispersion=0.5)
        yield Case(f"beta/{beta:g}/auto", partial(draw, V, dfac.TweedieNMF(K, beta=beta)))
        for name in ("PSGLD", "PSGRRLD", "SGLD", "HMC") if beta != 1.0 else ():
            for given in ("gaps", "ratings"):
                wrap, reading = INPUTS[given]
                make = partial(draw, wrap(V), fixed, SAMPLERS[name], **reading)
                yield Case(f"beta/{beta:g}/{name}/{given}", make)
    rng = np.random.default_rng(6)
    W, H = rng.gamma(2.0, 1.0, (ROWS, 2)), rng.gamma(2.0, 1.0, (1, COLUMNS))
    half = np.where(np.arange(2) == 1, W, np.nan)
    cube = np.random.default_rng(8).poisson(2.0, (9, 8, 7)).astype(np.float32)
    both = {name: dfac.Relation("row", name, law="poisson") for name in "ab"}
    models: dict[str, tuple[Any, Any]] = {
        "gamma": (counts(), dfac.TweedieNMF(K, dispersion=1.0, shape_w=2.5, shape_h=0.8)),
        "rates learnt": (counts(), dfac.TweedieNMF(K, rate_w="row", rate_h="component")),
        "fixed w": (counts(), dfac.TweedieNMF(K, dispersion=1.0, fixed_w=W)),
        "fixed both": (counts(), dfac.TweedieNMF(K, dispersion=1.0, fixed_w=half, fixed_h=H)),
        "negative binomial": (counts(), dfac.NegativeBinomialNMF(K)),
        "CP": (cube, dfac.CP(K, dispersion=1.0)),
        "Coupled": ({"a": counts(), "b": 2 * counts()}, dfac.Coupled(K, relations=both)),
        "no biases": (with_gaps(signed()), dfac.GaussianMF(K, biases=False)),
        "fixed noise": (with_gaps(signed()), dfac.GaussianMF(K, noise=0.3, precision_w=1.0)),
    }
    for label, (V, model) in models.items():
        for name in ("auto", "PSGLD", "PSGRRLD", "SGLD", "HMC", "Gibbs"):
            if name == "auto" or label in ("gamma", "fixed w", "fixed both"):
                sampler = None if name == "auto" else SAMPLERS[name]
                yield Case(f"prior/{label}/{name}", partial(draw, V, model, sampler))
    orders = (dfac.Cyclic(), dfac.Reshuffled(), dfac.NestedReshuffled(2), dfac.Proportional())
    for order in orders:
        for name, kind in {"PSGLD": dfac.PSGLD, "PSGRRLD": dfac.PSGRRLD}.items():
            make = partial(
                draw, with_gaps(counts()), POISSON, kind(schedule=order, **WARM), blocks=4
            )
            yield Case(f"schedule/{type(order).__name__}/{name}", make)
    for step in (0.05, dfac.ConstantStep(0.05), dfac.PolynomialStep(0.1, 0.6), 1e5):
        for name, kind in LANGEVIN.items():
            own = {"preconditioner": "identity"} if step == 1e5 else WARM  # rolled back
            make = partial(draw, counts(), POISSON, kind(step=step, **own))
            yield Case(f"step/{step}/{name}", make)


def input_cases() -> Iterator[Case]:
    """Kinds of objects and files, and options of reading and of runs."""
    V, stored = with_gaps(counts()), few_stored(counts())

    def as_dask() -> Any:
        import dask.array as da

        return da.from_array(V, chunks=(17, 11))

    def as_pydata() -> Any:
        import sparse as pydata

        return pydata.COO.from_scipy_sparse(stored)

    dense: dict[str, Make] = {
        "numpy": lambda: V,
        "float64": lambda: V.astype(np.float64),
        "fortran": lambda: np.asfortranarray(V),
        "masked": lambda: np.ma.masked_invalid(V),
        "pandas": lambda: pd.DataFrame(V),
        "xarray": lambda: xr.DataArray(V, dims=("row", "column")),
        "dask": as_dask,
        "blocks": lambda: dfac.as_blocks(V, 3),
    }
    for label, made in dense.items():
        twin = "" if label == "dask" else "input dense"  # chunks lead to a grid of their own
        make = lambda made=made: draw(made(), POISSON, monitor="missing")  # noqa: E731
        yield Case(f"input/dense/{label}", make, twin)
    scratch = partial(draw, V, POISSON, memory_limit=1000, monitor="missing")
    yield Case("input/dense/scratch file", scratch, "input dense")
    kinds: dict[str, Make] = {
        "csr": lambda: stored,
        "csc": lambda: sparse.csc_array(stored),
        "matrix": lambda: sparse.csr_matrix(stored),
        "pydata": as_pydata,
    }
    for label, made in kinds.items():
        for unstored in ("zero", "missing"):
            make = lambda made=made, u=unstored: draw(made(), POISSON, unstored=u)  # noqa: E731
            yield Case(f"input/{unstored}/{label}", make, f"input {unstored}")
    empty = counts().copy()
    empty[4] = np.nan
    yield Case("input/labels", partial(draw, labelled(), POISSON, monitor="missing"))
    yield Case("input/empty row", partial(draw, empty, POISSON, allow_empty=True))
    yield Case("input/grid chosen", partial(draw, counts(), POISSON, blocks=None))
    for kind in ("csv", "npz", "parquet"):
        for unstored in ("zero", "missing"):
            for balance in (False, True):
                name = f"convert/{kind}/{unstored}{' balanced' * balance}"
                yield Case(f"{name}/export", partial(converted, kind, True, unstored, balance))
                twin = f"convert/{unstored}/{balance}" if kind != "csv" else ""
                yield Case(
                    f"{name}/draws", partial(converted, kind, False, unstored, balance), twin
                )
    mask = np.zeros((ROWS, COLUMNS), bool)
    mask[3, 4:9] = mask[20, ::5] = True
    positions = (np.array([0, 39, 7]), np.array([1, 29, 7]))
    variations: dict[str, dict[str, Any]] = {
        "chains": {"chains": 2},
        "moments": {"keep": "moments"},
        "mask": {"monitor": mask},
        "no tuning": {"tune": 0},
        "all": {"chains": 2, "thin": 2, "monitor": positions, "keep": "moments"},
        "one block": {"blocks": 1},
        "many segments": {"draws": 520, "tune": 520, "keep": "moments"},
        "seed": {"random_seed": 2**40 + 1},
    }
    for name in ("PSGLD", "PSGRRLD", "Gibbs", "HMC", "SGHMC"):
        for label, options in variations.items():
            yield Case(f"option/{label}/{name}", partial(drawn_by, name, **options))


def converted(kind: str, export: bool, unstored: str, balance: bool) -> Any:
    """Make a blocked store of a file; return what it holds, or draws from it."""
    place, table = folder(), sparse.coo_array(few_stored(counts()))
    rows, columns = table.coords
    source, store = place / f"table.{kind}", place / "data.zarr"
    if kind == "npz":
        sparse.save_npz(source, table)
    else:
        names = ["user", "item", "count"] if kind == "csv" else ["row", "column", "value"]
        frame = pd.DataFrame(dict(zip(names, (rows, columns, table.data), strict=True)))
        frame.to_csv(source, index=False) if kind == "csv" else frame.to_parquet(source)
    dfac.convert(source, store, unstored=unstored, balance=balance, blocks=3, progressbar=False)
    if not export:
        return draw(store, POISSON)
    dfac.export(store, place / "again.npz")
    return sparse.load_npz(place / "again.npz")


def executor_cases() -> Iterator[Case]:
    """Everything that runs on executors, on several of them."""
    few, two = counts()[:12, :9], dfac.TweedieNMF(2)
    ladder = dfac.ThermodynamicIntegration(temperatures=4, draws=20, tune=10)
    smc = dfac.SequentialMonteCarlo(particles=16, islands=4, target=1e9, moves=0)
    chain, urns = dfac.SimplexHMC(draws=6, tune=4, steps=2), dfac.AllocationModel.nmf(2)
    nested = dfac.PSGLD(schedule=dfac.NestedReshuffled(2), **WARM)
    runs: dict[str, Callable[..., Any]] = {
        **{f"{name}/gaps": partial(drawn_by, name) for name in SAMPLERS if "plain" not in name},
        **{f"{name}/zeros balanced": partial(drawn_by, name, "zeros balanced")
           for name in ("PSGLD", "PSGRRLD", "Gibbs", "SGLD")},
        "chains": partial(drawn_by, "PSGLD", chains=2),
        "nested": partial(draw, counts(), POISSON, nested, blocks=4),
        **{name: partial(point, counts(), POISSON, method) for name, method in METHODS.items()},
        "TI": partial(evidence, few, two, ladder),
        "SMC": partial(evidence, TOY, urns, smc),
        "VB": partial(evidence, TOY, urns, dfac.VariationalBayes(starts=4)),
        "Ensemble": partial(modes, with_gaps(positive()), SILF),
        "SimplexHMC": partial(modes, positive(), SILF, chain),
        "stein_discrepancy": partial(
            discrepancy, random_pair(), positive(), dfac.SILFNMF(K, threshold=100.0)
        ),
    }  # fmt: skip
    for name, run in runs.items():
        for label, options in EXECUTORS.items():
            make = lambda run=run, options=options: run(**options())  # noqa: E731
            yield Case(f"executor/{name}/{label}", make, f"executor/{name}")


def stop_at(phase: str, done: float) -> Callable[[dfac.RunEvent], None]:
    """Return a listener that interrupts a run."""

    def listen(event: dfac.RunEvent) -> None:
        if event.phase == phase and event.done > done:
            raise KeyboardInterrupt

    return listen


def in_store(name: str, given: str, stop: tuple[str, float] | None, more: bool, by: str) -> Any:
    """Draw into a store, stop the run or extend it, finish it, and read it from there."""
    path, own = folder() / "run.zarr", {"draws": 4 if more else 8, "tune": 20}
    if stop is None:
        drawn_by(name, given, store=path, **own)
    else:
        with suppress(KeyboardInterrupt):
            drawn_by(name, given, store=path, callback=stop_at(*stop), **own)
            raise RuntimeError("the run ended before it was interrupted")
    if stop is not None or more:
        again = EXECUTORS[by]() | {"progressbar": False} | ({"draws": 4} if more else {})
        if given != "gaps":  # sparse data are not kept with a run
            wrap = INPUTS[given][0]
            again["V"] = wrap(signed() if name in REAL else counts())
        dfac.resume(path, **again)
    return dfac.open_run(path).load()


def store_cases() -> Iterator[Case]:
    """Stores, and runs that were extended or interrupted: equal to those that were not."""
    for name in SAMPLERS:
        if "plain" in name:
            continue
        sparse_too = () if name == "BlockHMC" else ("ratings balanced",)
        for given in ("gaps", *sparse_too):
            twin = f"store/{name}/{given}"
            make = partial(drawn_by, name, given, draws=8, tune=20)
            yield Case(f"{twin}/memory", make, twin)
            for label, settings in {
                "stored": (None, False, "serial"),
                "extended": (None, True, "serial"),
                "extended by a ring": (None, True, "cluster ring"),
                "interrupted": (("tune", 10), False, "serial"),
            }.items():
                yield Case(f"{twin}/{label}", partial(in_store, name, given, *settings), twin)


def optimize_cases() -> Iterator[Case]:
    """Both optimisers under all laws, priors and inputs."""
    for label, method in METHODS.items():
        for beta in (2.0, 1.0, 0.5, 0.0, -1.0):
            V, model = law_data(beta), dfac.TweedieNMF(K, beta=beta)
            for given, (wrap, reading) in INPUTS.items():
                dear = "float64" in given and beta not in (2.0, 0.5)
                if dear or ("zeros" in given and (beta not in (1.0, 2.0) or label == "descent")):
                    continue
                make = partial(point, wrap(V), model, method, **reading)
                name = f"optimize/{label}/{beta:g}/{given}"
                yield Case(name, make, tolerance=tolerance_of(given))
    zeros = partial(point, few_stored(counts()), POISSON, METHODS["descent"], unstored="zero")
    yield Case("optimize/descent/refused", zeros, refusal=True)
    yield Case("optimize/default", partial(point, counts(), dfac.TweedieNMF(K)))
    make = partial(point, with_gaps(signed()), GAUSSIAN, METHODS["descent"])
    yield Case("optimize/Gaussian", make)


@cache
def trace_of(name: str) -> Any:
    """Return a result that the readers share."""
    if name == "particles":
        return modes(with_gaps(positive()), SILF, particles=5)
    if name in ("gamma law", "compound", "squares"):
        beta = {"gamma law": 0.0, "compound": 0.5, "squares": 2.0}[name]
        V, model = with_gaps(law_data(beta)), dfac.TweedieNMF(K, beta=beta)
        return draw(V, model, monitor="missing", draws=12, chains=2)
    if name == "labels":
        return draw(labelled(), POISSON, monitor="missing", draws=12, chains=2)
    return drawn_by(name, draws=12, chains=2)


def product_of_factors(W: Array, H: Array) -> Array:
    """Return a corner of WH."""
    return (W[:4] @ H[:, :3]).astype(np.float64)


def reader_cases() -> Iterator[Case]:
    """Predictions, alignments, summaries and the rest, of several kinds of results."""
    readers: dict[str, Callable[[Any], Any]] = {
        "predict": partial(dfac.predict, interval=0.8, of="mean"),
        "align": dfac.align,
        "align by w": partial(dfac.align, by="w", threshold=0.5),
        "summarize": partial(dfac.summarize, cells=6),
        "component_variability": dfac.component_variability,
        "pairwise_distances": dfac.pairwise_distances,
        "top_entries": lambda trace: dfac.top_entries(trace, 4),
        "expectation": lambda trace: dfac.expectation(trace, product_of_factors),
    }
    drawn = {
        "monitored": partial(dfac.monitored, interval=0.8),
        "observations": partial(dfac.predict, interval=0.8, of="observation"),
    }
    for name in ("PSGLD", "PSGRRLD", "SGHMC", "labels", "gamma law", "compound", "squares",
                 "particles"):  # fmt: skip
        for label, read in (readers | (drawn if name != "particles" else {})).items():
            make = lambda read=read, name=name: read(trace_of(name))  # noqa: E731
            yield Case(f"{label}/{name}", make)
    table = few_stored(counts())
    for unstored in ("missing", "zero"):
        make = partial(dfac.hold_out, table, 0.2, random_seed=3, unstored=unstored)
        yield Case(f"hold_out/{unstored}", make, tolerance=DOUBLE)
    yield Case("hold_out/dense", partial(dfac.hold_out, with_gaps(counts()), 0.2, random_seed=3))


def evidence_cases() -> Iterator[Case]:
    """All ways to an evidence, on problems of a few cells."""
    few, two = counts()[:12, :9], dfac.TweedieNMF(2)
    ladder = partial(dfac.ThermodynamicIntegration, temperatures=4, draws=20, tune=10)
    for label, method in {
        "exact": ladder(),
        "PSGLD": ladder(sampler=dfac.PSGLD(**WARM)),
        "HMC": ladder(sampler=dfac.HMC(steps=2, **WARM)),
        "trapezoid": ladder(rule="trapezoid", power=1),
    }.items():
        yield Case(f"evidence/TI/{label}", partial(evidence, few, two, method))
    for beta in (2.0, 0.5, 0.0, -1.0):
        V = with_gaps(positive()[:12, :9])
        make = partial(evidence, V, dfac.TweedieNMF(2, beta=beta), ladder())
        yield Case(f"evidence/TI/{beta:g}", make)
    chib, one = dfac.Chib(draws=60, tune=40), dfac.TweedieNMF(2, dispersion=1.0, shape_w=1.5)
    for label, data in {"dense": few, "gaps": with_gaps(few)}.items():
        yield Case(f"evidence/Chib/{label}", partial(evidence, data, one, chib))
    models: dict[str, tuple[Any, Any]] = {
        "nmf": (TOY, dfac.AllocationModel.nmf(2)),
        "cp": (TENSOR, dfac.AllocationModel.cp(2)),
        "tucker": (TENSOR, dfac.AllocationModel.tucker((2, 2, 2))),
        "topics": (TOY, dfac.AllocationModel.topics(2)),
        "sparse": (sparse.coo_array(TOY), dfac.AllocationModel.nmf(3, concentration=0.5)),
    }
    smc = partial(dfac.SequentialMonteCarlo, particles=16, islands=4, target=1e9)
    for label, (X, urns) in models.items():
        bound = dfac.VariationalBayes(starts=3, max_iterations=60)
        for name, method in {"SMC": smc(), "no moves": smc(moves=0), "VB": bound}.items():
            make = partial(evidence, X, urns, method)
            yield Case(f"evidence/{name}/{label}", make, tolerance=DOUBLE)
    for name in ("stratified", "residual", "multinomial", None):
        make = partial(evidence, 2 * TOY, dfac.AllocationModel.nmf(2), smc(resampling=name))
        yield Case(f"evidence/SMC/{name}", make, tolerance=DOUBLE)
    quiet: dict[str, Any] = {"executor": "serial", "progressbar": False}
    table = partial(dfac.select_rank, few, dfac.TweedieNMF(1), [1, 2], ladder(), **quiet)
    yield Case("select_rank/held out", table)
    yield Case("select_rank/evidence", partial(table, held_out=None))
    yield Case("simulate/nmf", partial(dfac.simulate, models["nmf"][1], (6, 5), total=60,
                                       random_seed=0), tolerance=DOUBLE)  # fmt: skip


def particle_cases() -> Iterator[Case]:
    """Ensembles from all starts, descents and chains; discrepancies."""
    V = positive()
    for start in ("q_transform", "random", "nndsvdar"):
        for optimizer in ("coordinate_descent", "multiplicative"):
            method = dfac.Ensemble(start=start, optimizer=optimizer, max_iter=40)
            yield Case(f"particles/{start}/{optimizer}", partial(modes, V, SILF, method))
    for given, (wrap, reading) in INPUTS.items():
        for label, model in {"silf": SILF, "Tweedie": dfac.TweedieNMF(K)}.items():
            make = partial(modes, wrap(counts()), model, **reading)
            name = f"particles/{label}/{given}"
            yield Case(name, make, tolerance=tolerance_of(given))
    for method in (dfac.SVGD(steps=4), dfac.SteinDescent(steps=4), dfac.SimplexHMC(6, 5, steps=2)):
        for label, model in {"silf": SILF, "Tweedie": dfac.TweedieNMF(K, beta=2.0)}.items():
            yield Case(
                f"particles/{type(method).__name__}/{label}", partial(modes, V, model, method)
            )
    pair, silf = random_pair(), dfac.SILFNMF(K, threshold=100.0)
    rated = dfac.TweedieNMF(K, dispersion=1.0, rate_w=1.0, rate_h=1.0)
    for label, (data, model) in {"silf": (V, silf), "Tweedie": (counts(), rated)}.items():
        yield Case(f"discrepancy/{label}/dense", partial(discrepancy, pair, data, model))
        yield Case(f"discrepancy/{label}/gaps", partial(discrepancy, pair, with_gaps(data), model))


GROUPS = (
    sampler_cases, input_cases, optimize_cases, store_cases, reader_cases, evidence_cases,
    particle_cases, executor_cases,
)  # fmt: skip


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    cases = [case for group in GROUPS for case in group()]
    names = [case.name for case in cases]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names of cases must differ, got twice: {sorted(doubles)}")
    return cases


# -- write ---------------------------------------------------------------------------------


def run_case(case: Case) -> dict[str, Any]:
    """Return the fingerprint of a case, or the error that it ended with."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = describe(case.make(), case.tolerance)
    except Exception as error:  # whatever it is, the others go on
        return {"error": f"{type(error).__name__}: {error}", "refusal": case.refusal}
    kinds = {one.category for one in caught if one.category.__module__.startswith("daskfactor")}
    found["attributes"]["warnings"] = sorted(kind.__name__ for kind in kinds)
    return found


def failed(entry: Mapping[str, Any]) -> bool:
    """Return whether a case ended with an error that it was not to end with."""
    return "error" in entry and not entry.get("refusal", False)


def unlike_twins(cases: Sequence[Case], found: Mapping[str, Any]) -> list[str]:
    """Return sentences about cases that should have had equal arrays and have not."""

    def hashes(name: str) -> dict[str, str]:
        arrays = found[name]["arrays"]
        kept = (one for one in arrays if "@" not in one and not one.startswith(APART))
        return {one: arrays[one]["hash"] for one in kept}

    first: dict[str, str] = {}
    said = []
    for case in cases:
        if case.twin and "error" not in found[case.name]:
            leader = first.setdefault(case.twin, case.name)
            one, other = hashes(leader), hashes(case.name)
            if differing := sorted(n for n in one | other if one.get(n) != other.get(n)):
                said.append(f"{case.name} is not {leader}: {', '.join(differing)}")
    return said


def write(path: Path, only: str) -> int:
    """Run the cases that were asked for and write their fingerprints."""
    cases = [case for case in all_cases() if only in case.name]
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    print(f"{len(cases)} cases of the daskfactor in {Path(dfac.__file__).parent}", file=sys.stderr)
    with STACK, threadpool_limits(1):
        for number, case in enumerate(cases, 1):
            found[case.name] = run_case(case)
            if failed(found[case.name]) or number % 50 == 0:
                error = found[case.name].get("error", "")[:200]
                print(f"[{number}/{len(cases)}] {case.name} {error}", file=sys.stderr, flush=True)
    unlike, errors = unlike_twins(cases, found), sum(map(failed, found.values()))
    for line in unlike:
        print(f"NOT ALIKE: {line}", file=sys.stderr)
    libraries = ("numpy", "scipy", "numba", "scikit-learn", "xarray", "dask")
    machine = {"processor": platform.machine(), "python": platform.python_version()}
    machine |= {name: version(name) for name in libraries}
    record = {"only": only, "machine": machine, "unlike": unlike, "cases": found}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    spent = time.perf_counter() - begun
    print(f"{len(cases)} cases, {errors} failed, {len(unlike)} not alike, {spent:.0f} s")
    return 1 if unlike or errors else 0


# -- compare -------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What became of a case: ``kind`` is one of `ORDER`, ``deviation`` is relative."""

    kind: str
    deviation: float = 0.0
    detail: str = ""


ORDER = ("equal", "rounding", "different", "attributes", "missing", "new")


def judge_array(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Verdict:
    """Tell whether an array is the same, the same but for rounding, or another."""
    if old["hash"] == new["hash"]:
        return Verdict("equal")
    for name in ("dtype", "shape", "dims", "finite"):
        if old.get(name) != new.get(name):
            return Verdict("different", detail=f"{name} was {old.get(name)}, is {new.get(name)}")
    if "absolute" not in old:
        return Verdict("different", detail="other texts")
    scale = max(old["absolute"], new["absolute"])
    largest = max(abs(old[name] - new[name]) for name in ("sum", "absolute", "weighted"))
    found = largest / scale if scale else 0.0
    rounding = np.dtype(old["dtype"]).kind == "f" and found <= tolerance
    return Verdict("rounding" if rounding else "different", found)


def judge_attributes(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Verdict:
    """Tell whether settings and hyperparameters are the same."""
    said, largest = [], 0.0
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name, "nothing"), new.get(name, "nothing")
        if one == other or (one != one and other != other):
            continue
        if all(isinstance(v, Number) and not isinstance(v, bool) for v in (one, other)):
            found = abs(one - other) / max(abs(one), abs(other))
            if found <= tolerance:
                largest = max(largest, found)
                continue
        said.append(f"{name} was {one!r}, is {other!r}")
    if said:
        return Verdict("attributes", detail="; ".join(said))
    return Verdict("rounding", largest) if largest else Verdict("equal")


def judge(old: Mapping[str, Any], new: Mapping[str, Any], attributes: bool) -> Verdict:
    """Tell what became of one case."""
    if "error" in old or "error" in new:
        one, other = old.get("error", "no error"), new.get("error", "no error")
        if one == other and not failed(new):
            return Verdict("equal")
        return Verdict("different", detail=f"was {one[:200]!r}, is {other[:200]!r}")
    before, after, tolerance = old["arrays"], new["arrays"], old["tolerance"]
    verdicts = {}
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            lost = "is not there any more" if name in before else "is new"
            verdicts[name] = Verdict("different", detail=lost)
        else:
            verdicts[name] = judge_array(before[name], after[name], tolerance)
    for kind in ("different", "rounding"):
        if chosen := {name: one for name, one in verdicts.items() if one.kind == kind}:
            largest = max(one.deviation for one in chosen.values())
            said = (
                f"{name} {one.detail or f'{one.deviation:.1e}'}" for name, one in chosen.items()
            )
            return Verdict(kind, largest, "; ".join(said))
    if attributes:
        return judge_attributes(old["attributes"], new["attributes"], tolerance)
    return Verdict("equal")


def compare(old_path: Path, new_path: Path, attributes: bool) -> int:
    """Print what became of every case; return 1 if one is different or missing."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (old_path, new_path))
    for name, value in old["machine"].items():
        if new["machine"].get(name) != value:
            print(f"note: {name} was {value}, is {new['machine'].get(name)}")
    before = {name: one for name, one in old["cases"].items() if new["only"] in name}
    verdicts = {}
    for name in sorted(before.keys() | new["cases"].keys()):
        if name in before and name in new["cases"]:
            verdicts[name] = judge(before[name], new["cases"][name], attributes)
        else:
            verdicts[name] = Verdict("missing" if name in before else "new")
    for kind in ORDER[1:]:
        for name, one in verdicts.items():
            if one.kind == kind:
                size = f" {one.deviation:.1e}" if one.deviation else ""
                print(f"{kind:<10} {name}{size}  {one.detail[:400]}".rstrip())
    for line in new["unlike"]:
        print(f"not alike  {line[:400]}")
    numbers = {kind: sum(one.kind == kind for one in verdicts.values()) for kind in ORDER}
    print(", ".join(f"{count} {kind}" for kind, count in numbers.items()))
    print(f"{sum(map(failed, new['cases'].values()))} cases failed")
    return int(any(one.kind in ("different", "attributes", "missing") for one in verdicts.values()))


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
    comparing.add_argument("--ignore-attributes", action="store_true", help="look at arrays alone")
    verbs.add_parser("list", help="print the names of all cases")
    given = parser.parse_args()
    if given.verb == "write":
        return write(given.file, given.only)
    if given.verb == "compare":
        return compare(given.old, given.new, not given.ignore_attributes)
    print("\n".join(case.name for case in all_cases()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
