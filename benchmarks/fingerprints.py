"""Fingerprints of many short runs: whether a change of the code left every draw the same bits.

Every case is one small problem through the public verbs: each sampler, model, kind of data,
executor, evidence, set of particles and reader of results, with fixed seeds.

    python benchmarks/fingerprints.py write OLD.json [--only PATTERN]
    python benchmarks/fingerprints.py compare OLD.json NEW.json [--ignore-attributes]
    python benchmarks/fingerprints.py list

``write`` records, for every case, a hash of each array (values, dtype, shape, dims;
coordinates are arrays of their own) and three sums of it, and beside them the attributes that
are the same in every run: settings, hyperparameters, divergences, kinds of warnings. Runs that
must agree with one another whatever executor or store they went through, or whether they were
resumed, are compared at once.

``compare`` tells which cases have equal bits, which agree to rounding (every sum within 1e-4
of the sum of absolute values, 1e-9 where all arithmetic is in double precision), and which
are different, missing or new. Cases whose name begins with ``may change`` are shown only.

Bits depend on the machine and on the versions of NumPy, numba and BLAS: compare files that
were written under the same ones. A case that raises is recorded with its error. That is a
difference even if it raised the same before, since nothing was drawn that could be compared;
only a case that is declared as a refusal must raise, and the same as before.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache, partial
from importlib.metadata import version
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from scipy import io as scipy_io
from scipy import sparse
from threadpoolctl import threadpool_limits

import daskfactor as dfac

Array = NDArray[Any]
Make = Callable[[], Any]

SINGLE, DOUBLE = 1e-4, 1e-9
"""Relative deviations that are rounding where arithmetic is in single and double precision."""
SHOWN_ONLY = "may change"
VOLATILE = frozenset(
    {
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
    }
)
"""Names of variables and attributes that tell of time, place or machine."""
APART = ("observed_data/", "constant_data/")
"""Groups that a store has more of than a result in memory."""
ROWS, COLUMNS, K = 40, 30, 3


# -- from a result to named arrays and attributes ------------------------------------------


class Flat(NamedTuple):
    """A result as arrays and plain attributes by name; coordinates' names have an ``@``."""

    arrays: dict[str, xr.DataArray]
    attrs: dict[str, Any]


def flatten(result: Any) -> Flat:
    """Take a result of any kind apart."""
    flat = Flat({}, {})
    _add(flat, "", result)
    return flat


def _add(flat: Flat, name: str, value: Any) -> None:
    """Add a value under a name, whatever it is."""
    if name.rsplit("/", 1)[-1] in VOLATILE:
        return
    if isinstance(value, xr.DataTree):
        for node in value.subtree:
            _add(flat, _joined(name, node.path.strip("/")), node.to_dataset(inherit=False))
    elif isinstance(value, xr.Dataset):
        _add_dataset(flat, name, value)
    elif isinstance(value, xr.DataArray):
        _add_dataset(flat, name, value.to_dataset(name=value.name or "values"))
    elif sparse.issparse(value):
        _add_sparse(flat, name, sparse.coo_array(value))
    elif type(value).__module__.startswith("sparse"):
        found = {"shape": np.array(value.shape), "coords": value.coords, "data": value.data}
        _add(flat, name, found)
    elif isinstance(value, np.ndarray):
        dims = [f"axis_{axis}" for axis in range(value.ndim)]
        flat.arrays[name or "values"] = xr.DataArray(value, dims=dims)
    elif hasattr(value, "_asdict"):
        _add(flat, name, value._asdict())
    elif is_dataclass(value) and not isinstance(value, type):
        _add(flat, name, {key: getattr(value, key) for key in value.__dataclass_fields__})
    elif isinstance(value, Mapping):
        for key, own in value.items():
            _add(flat, _joined(name, str(key)), own)
    elif isinstance(value, tuple | list) and not _is_plain(value):
        for key, own in enumerate(value):
            _add(flat, _joined(name, str(key)), own)
    elif isinstance(value, float | np.floating) and not isinstance(value, bool):
        flat.arrays[name or "value"] = xr.DataArray(np.asarray(value))
    else:
        _add_attribute(flat, name, value)


def _add_dataset(flat: Flat, name: str, data: xr.Dataset) -> None:
    for key, variable in data.variables.items():
        if str(key) in VOLATILE:
            continue
        mark = "@" if key in data.coords else ""
        flat.arrays[_joined(name, f"{mark}{key}")] = xr.DataArray(
            variable.values, dims=variable.dims
        )
        for label, own in variable.attrs.items():
            if label != "description":
                _add_attribute(flat, _joined(name, f"{mark}{key}:{label}"), own)
    for label, own in data.attrs.items():
        _add_attribute(flat, _joined(name, f":{label}"), own)


def _add_sparse(flat: Flat, name: str, matrix: sparse.coo_array) -> None:
    order = np.lexsort(matrix.coords[::-1])
    found = {
        "shape": np.array(matrix.shape),
        "coords": np.stack(matrix.coords).astype(np.int64)[:, order],
        "data": matrix.data[order],
    }
    _add(flat, name, found)


def _add_attribute(flat: Flat, name: str, value: Any) -> None:
    """Add a setting; text that is JSON is taken apart."""
    if name.rsplit("/", 1)[-1].lstrip(":") in VOLATILE:
        return
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, own in value.items():
            _add_attribute(flat, _joined(name, str(key)), own)
    elif isinstance(value, np.ndarray | np.generic):
        flat.attrs[name] = value.tolist()
    elif isinstance(value, tuple | list):
        flat.attrs[name] = [own if _is_simple(own) else repr(own) for own in value]
    else:
        flat.attrs[name] = value if _is_simple(value) else repr(value)


def _joined(name: str, key: str) -> str:
    return f"{name}/{key}" if name and key else name or key


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


def _is_plain(values: Sequence[Any]) -> bool:
    return all(_is_simple(own) and not isinstance(own, float) for own in values)


# -- from arrays to fingerprints -----------------------------------------------------------


def fingerprint(array: xr.DataArray) -> dict[str, Any]:
    """Hash of an array and, of numbers, three sums that tell rounding from change."""
    values = np.asarray(array.values)
    if values.dtype.kind in "OUST":
        payload = json.dumps([str(own) for own in values.ravel().tolist()]).encode()
        kind = "text"
    else:
        payload, kind = np.ascontiguousarray(values).tobytes(), values.dtype.str
    head = json.dumps([kind, list(values.shape), [str(dim) for dim in array.dims]])
    found = {
        "hash": hashlib.sha256(head.encode() + payload).hexdigest(),
        "dtype": kind,
        "shape": list(values.shape),
        "dims": [str(dim) for dim in array.dims],
    }
    return found | (sums(values) if values.dtype.kind in "biuf" else {})


def sums(values: Array) -> dict[str, Any]:
    """Sums over the finite entries in double precision: plain, absolute, with uneven weights."""
    flat = values.ravel().astype(np.float64)
    finite = np.isfinite(flat)
    kept = np.where(finite, flat, 0.0)
    return {
        "finite": int(finite.sum()),
        "sum": float(kept.sum()),
        "absolute": float(np.abs(kept).sum()),
        "weighted": float(kept @ np.sin(1.0 + np.arange(kept.size))),
    }


def describe(result: Any, tolerance: float) -> dict[str, Any]:
    """The fingerprint of a whole result."""
    flat = flatten(result)
    arrays = {name: fingerprint(flat.arrays[name]) for name in sorted(flat.arrays)}
    hashes = json.dumps({name: own["hash"] for name, own in arrays.items()})
    return {
        "hash": hashlib.sha256(hashes.encode()).hexdigest(),
        "tolerance": tolerance,
        "arrays": arrays,
        "attributes": {name: flat.attrs[name] for name in sorted(flat.attrs)},
    }


# -- cases ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run by name; cases with one ``twin`` must have equal arrays.

    ``refusal``: it is to raise an error, whose sentence is what is compared.
    """

    name: str
    make: Make
    twin: str = ""
    tolerance: float = SINGLE
    refusal: bool = False


class Place:
    """Where cases write, and the cluster that some run on; made when first asked for."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.number = 0

    def folder(self) -> Path:
        """A fresh folder."""
        self.number += 1
        made = Path(self._root()) / str(self.number)
        made.mkdir()
        return made

    @cache  # noqa: B019 - there is one place only
    def _root(self) -> str:
        # Stores are flushed to disk again and again, which costs nothing where there is none.
        memory = Path("/dev/shm")
        folder = str(memory) if memory.is_dir() and os.access(memory, os.W_OK) else None
        return self.stack.enter_context(tempfile.TemporaryDirectory(dir=folder))

    @cache  # noqa: B019
    def client(self) -> Any:
        """A client of two workers in this process."""
        import dask
        from distributed import Client, LocalCluster

        quiet = {f"distributed.worker.memory.{name}": False for name in ("target", "spill")}
        self.stack.enter_context(dask.config.set(quiet))
        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=None,
            silence_logs=50,
            memory_limit=0,
        )
        self.stack.enter_context(cluster)
        return self.stack.enter_context(Client(cluster, set_as_default=False))


PLACE = Place()


# -- data ----------------------------------------------------------------------------------


@cache
def counts() -> Array:
    """Poisson counts (40, 30) of rank 3, every row and column with some."""
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.gamma(1.0, 1.0, (ROWS, K)) @ rng.gamma(1.0, 1.0, (K, COLUMNS)))
    V[:, 0] += 1
    V[0] += 1
    return V.astype(np.float32)


def with_gaps(V: Array) -> Array:
    """The same with a fifth of the cells missing."""
    missing = np.random.default_rng(1).random(V.shape) < 0.2
    missing[:, 0] = missing[0] = False
    return np.where(missing, np.nan, V)


@cache
def intensities(dtype: str = "float32") -> Array:
    """Positive numbers around a product of rank 3."""
    rng = np.random.default_rng(2)
    mean = rng.gamma(2.0, 1.0, (ROWS, K)) @ rng.gamma(2.0, 1.0, (K, COLUMNS))
    return (0.1 + mean * rng.gamma(5.0, 0.2, mean.shape)).astype(dtype)


@cache
def signed() -> Array:
    """Real numbers of rank 3 with biases and noise."""
    rng = np.random.default_rng(3)
    mean = rng.standard_normal((ROWS, K)) @ rng.standard_normal((K, COLUMNS))
    mean += 2.0 + rng.standard_normal((ROWS, 1)) + rng.standard_normal(COLUMNS)
    return (mean + 0.5 * rng.standard_normal(mean.shape)).astype(np.float32)


def law_data(beta: float) -> Array:
    """Data that a Tweedie law of this power may have made."""
    if beta == 1.0:
        return counts()
    if 0.0 < beta < 1.0:
        rare = np.random.default_rng(4).random((ROWS, COLUMNS)) < 0.2
        rare[:, 0] = rare[0] = False
        return np.where(rare, 0.0, intensities()).astype(np.float32)
    return intensities()


def few_stored(V: Array) -> sparse.csr_array:
    """About a third of the cells, unevenly, as a sparse matrix."""
    rng = np.random.default_rng(5)
    share = np.linspace(0.05, 0.6, len(V))[:, None]
    kept = rng.random(V.shape) < share
    kept[:, 0] = kept[0] = True
    rows, columns = np.nonzero(kept & (V != 0))
    return sparse.csr_array((V[rows, columns], (rows, columns)), V.shape)


class Input(NamedTuple):
    """How data of a model are passed, and with what options."""

    wrap: Callable[[Array], Any]
    options: dict[str, Any]

    @property
    def meaning(self) -> dict[str, Any]:
        """The options that every verb takes."""
        return {name: value for name, value in self.options.items() if name != "monitor"}

    @property
    def tolerance(self) -> float:
        """The relative deviation that is rounding."""
        return DOUBLE if self.options.get("dtype") == "float64" else SINGLE


INPUTS: dict[str, Input] = {
    "dense": Input(lambda V: V, {}),
    "gaps": Input(with_gaps, {"monitor": "missing"}),
    "zeros": Input(few_stored, {"unstored": "zero"}),
    "ratings": Input(few_stored, {"unstored": "missing"}),
    "zeros balanced": Input(few_stored, {"unstored": "zero", "balance": True}),
    "ratings balanced": Input(few_stored, {"unstored": "missing", "balance": True}),
    "gaps float64": Input(with_gaps, {"monitor": "missing", "dtype": "float64"}),
    "zeros float64": Input(few_stored, {"unstored": "zero", "dtype": "float64"}),
    "ratings float64": Input(few_stored, {"unstored": "missing", "dtype": "float64"}),
}


# -- samplers ------------------------------------------------------------------------------

POISSON = dfac.TweedieNMF(K, dispersion=1.0)
GAUSSIAN = dfac.GaussianMF(K)
WARM: dict[str, Any] = {"warm_start": 3}
PLAIN: dict[str, Any] = {"step": 1e-3, "preconditioner": "identity"} | WARM

SAMPLERS: dict[str, Any] = {
    "PSGLD": dfac.PSGLD(**WARM),
    "PSGLD euler": dfac.PSGLD(transition="euler", **WARM),
    "PSGLD plain": dfac.PSGLD(**PLAIN),
    "PSGLD cir": dfac.PSGLD(transition="cir", **WARM),
    "PSGRRLD": dfac.PSGRRLD(**WARM),
    "PSGRRLD plain": dfac.PSGRRLD(**PLAIN),
    "LangevinDynamics": dfac.LangevinDynamics(**WARM),
    "LangevinDynamics plain": dfac.LangevinDynamics(**PLAIN),
    "SGLD": dfac.SGLD(**WARM),
    "SGLD plain": dfac.SGLD(subsample=0.3, **PLAIN),
    "Gibbs": dfac.Gibbs(**WARM),
    "HMC": dfac.HMC(steps=3, **WARM),
    "SGHMC": dfac.SGHMC(),
    "Gibbs real-valued": dfac.Gibbs(),
}
REAL = ("SGHMC", "Gibbs real-valued")
MAIN = ("PSGLD", "PSGLD cir", "PSGRRLD", "LangevinDynamics", "SGLD", "Gibbs", "HMC", *REAL)


def of_sampler(name: str) -> tuple[Any, Array]:
    """A model that a sampler draws from, and data of it."""
    return (GAUSSIAN, signed()) if name in REAL else (POISSON, counts())


READING = ("allow_empty", "balance", "dtype", "memory_limit")


def through_blocks(verb: Any, V: Any, *rest: Any, **options: Any) -> Any:
    """Call a verb on data that are read with options of ``as_blocks`` alone, if there are any."""
    reading = {name: options.pop(name) for name in READING if name in options}
    if reading:
        blocks, unstored = options.pop("blocks", None), options.pop("unstored", None)
        V = dfac.as_blocks(V, blocks, unstored=unstored, **reading)
    return verb(V, *rest, **options)


def draw(V: Any, model: Any, sampler: Any = None, **options: Any) -> xr.DataTree:
    """A short run."""
    settings: dict[str, Any] = {
        "draws": 6,
        "tune": 12,
        "blocks": 3,
        "random_seed": 5,
        "executor": "serial",
        "progressbar": False,
    }
    return through_blocks(dfac.sample, V, model, sampler, **(settings | options))


def drawn_by(name: str, given: str = "gaps", **options: Any) -> xr.DataTree:
    """A short run of a named sampler on a named input."""
    model, V = of_sampler(name)
    wrap, own = INPUTS[given]
    return draw(wrap(V), model, SAMPLERS[name], **(own | options))


def sampler_cases() -> Iterator[Case]:
    """Every sampler on every kind of data."""
    for name in SAMPLERS:
        for given, how in INPUTS.items():
            if name == "SGHMC" and "zeros" in given:
                continue
            make = partial(drawn_by, name, given)
            yield Case(f"sampler/{name}/{given}", make, tolerance=how.tolerance)


def beta_cases() -> Iterator[Case]:
    """Every law, its dispersion fixed or estimated, on dense and sparse data."""
    names = ("PSGLD", "PSGLD plain", "PSGLD cir", "PSGRRLD", "LangevinDynamics", "SGLD", "HMC")
    for beta in (2.0, 0.5, 0.0, -1.0):
        V = law_data(beta)
        for name in names:
            sampler = SAMPLERS[name]
            if "plain" in name:
                sampler = dfac.PSGLD(step=1e-5, preconditioner="identity", **WARM)
            fixed = dfac.TweedieNMF(K, beta=beta, dispersion=0.5)
            for given in ("gaps", "ratings"):
                wrap, own = INPUTS[given]
                make = partial(draw, wrap(V), fixed, sampler, **own)
                yield Case(f"beta/{beta:g}/{name}/{given}", make)
    for beta in (2.0, 1.0, 0.5, 0.0, -1.0):
        V = law_data(beta)
        model = dfac.TweedieNMF(K, beta=beta)
        yield Case(f"beta/{beta:g}/auto", partial(draw, V, model))
        if beta not in (2.0, 0.5):
            continue
        wide = partial(draw, with_gaps(V), model, dtype="float64")
        yield Case(f"beta/{beta:g}/auto float64", wide, tolerance=DOUBLE)
    squares = dfac.TweedieNMF(K, beta=2.0)
    wrap, own = INPUTS["zeros balanced"]
    for name in ("PSGLD", "PSGRRLD", "SGLD", "HMC"):
        make = partial(draw, wrap(intensities()), squares, SAMPLERS[name], **own)
        yield Case(f"beta/2/{name}/zeros balanced", make)


def prior_cases() -> Iterator[Case]:
    """Gamma priors and frozen components under every sampler."""
    rng = np.random.default_rng(6)
    W, H = rng.gamma(2.0, 1.0, (ROWS, 2)), rng.gamma(2.0, 1.0, (1, COLUMNS))
    free_first = np.where(np.arange(2) == 1, W, np.nan)
    models = {
        "gamma": dfac.TweedieNMF(K, dispersion=1.0, shape_w=2.5, shape_h=0.8, rate_w=0.7),
        "exponential rates": dfac.TweedieNMF(K, dispersion=1.0, rate_w=0.7, rate_h=0.4),
        "fixed w": dfac.TweedieNMF(K, dispersion=1.0, fixed_w=W),
        "fixed both": dfac.TweedieNMF(K, dispersion=1.0, fixed_w=free_first, fixed_h=H),
    }
    for label, model in models.items():
        for name in (*(name for name in MAIN if name not in REAL), "PSGLD plain"):
            yield Case(f"prior/{label}/{name}", partial(draw, counts(), model, SAMPLERS[name]))
        wrap, own = INPUTS["ratings balanced"]
        yield Case(f"prior/{label}/balanced", partial(draw, wrap(counts()), model, **own))
    for label, law in {
        "no biases": dfac.GaussianMF(K, biases=False),
        "fixed noise": dfac.GaussianMF(K, noise=0.3, precision_w=1.0, precision_h=2.0),
    }.items():
        for given in ("gaps", "ratings"):
            wrap, own = INPUTS[given]
            yield Case(f"prior/{label}/{given}", partial(draw, wrap(signed()), law, **own))


def schedule_cases() -> Iterator[Case]:
    """Orders of the parts, and sizes of steps."""
    schedules = {
        "Cyclic": dfac.Cyclic(),
        "Reshuffled": dfac.Reshuffled(),
        "NestedReshuffled": dfac.NestedReshuffled(2),
        "Proportional": dfac.Proportional(),
    }
    for label, schedule in schedules.items():
        runs = {
            "PSGLD": (POISSON, counts(), dfac.PSGLD(schedule=schedule, **WARM)),
            "PSGRRLD": (POISSON, counts(), dfac.PSGRRLD(schedule=schedule, **WARM)),
            "SGHMC": (GAUSSIAN, signed(), dfac.SGHMC(schedule=schedule)),
        }
        for name, (model, V, sampler) in runs.items():
            for given in ("gaps", "ratings"):
                wrap, own = INPUTS[given]
                make = partial(draw, wrap(V), model, sampler, blocks=4, **own)
                yield Case(f"schedule/{label}/{name}/{given}", make)
    steps = {
        "number": 0.05,
        "ConstantStep": dfac.ConstantStep(0.05),
        "PolynomialStep": dfac.PolynomialStep(0.1, 0.6),
    }
    for label, step in steps.items():
        for kind in (dfac.PSGLD, dfac.PSGRRLD, dfac.LangevinDynamics, dfac.SGLD):
            make = partial(draw, counts(), POISSON, kind(step=step, **WARM))
            yield Case(f"step/{label}/{kind.__name__}", make)
        yield Case(f"step/{label}/SGHMC", partial(draw, signed(), GAUSSIAN, dfac.SGHMC(step=step)))
    more = {
        "HMC step": dfac.HMC(step=0.01, steps=2, target_accept=0.7, **WARM),
        "SGLD share": dfac.SGLD(subsample=0.5, **WARM),
        "warm start auto": dfac.PSGLD(),
        "no warm start": dfac.PSGLD(warm_start=0),
        "step too large": dfac.PSGLD(step=3.0, preconditioner="identity"),
        "rolled back/PSGLD": dfac.PSGLD(step=1e5, preconditioner="identity"),
        "rolled back/PSGRRLD": dfac.PSGRRLD(step=1e5, preconditioner="identity"),
    }
    for label, sampler in more.items():
        yield Case(f"step/{label}", partial(draw, counts(), POISSON, sampler))
    for label, sampler in {
        "SGHMC friction": dfac.SGHMC(friction=0.5),
        "rolled back/SGHMC": dfac.SGHMC(step=3.0),
    }.items():
        yield Case(f"step/{label}", partial(draw, signed(), GAUSSIAN, sampler))


# -- kinds of input, options, executors, stores --------------------------------------------


def kinds_of_input() -> dict[str, Make]:
    """One matrix with gaps in all clothes that `sample` takes."""
    V = with_gaps(counts())

    def as_dask() -> Any:
        import dask.array as da

        return da.from_array(V, chunks=(17, 11))

    def as_zarr() -> Any:
        import zarr

        path = PLACE.folder() / "V.zarr"
        stored = zarr.create_array(store=str(path), shape=V.shape, dtype=V.dtype, chunks=(17, 11))
        stored[...] = V
        return stored

    return {
        "numpy": lambda: V,
        "numpy float64": lambda: V.astype(np.float64),
        "fortran": lambda: np.asfortranarray(V),
        "masked": lambda: np.ma.masked_invalid(V),
        "pandas": lambda: pd.DataFrame(V),
        "xarray": lambda: xr.DataArray(V, dims=("row", "column")),
        "dask": as_dask,
        "zarr": as_zarr,
        "blocks": lambda: dfac.as_blocks(V, 3),
    }


def labelled() -> xr.DataArray:
    """Counts with gaps under names and labels of their own."""
    coords = {
        "gene": [f"g{number}" for number in range(ROWS)],
        "group": ("gene", np.arange(ROWS) % 3),
        "sample": np.arange(COLUMNS) * 10,
    }
    return xr.DataArray(with_gaps(counts()), dims=("gene", "sample"), coords=coords)


def input_cases() -> Iterator[Case]:
    """Kinds of objects, and options of reading."""
    for label, made in kinds_of_input().items():

        def make(made: Make = made) -> Any:
            return draw(made(), POISSON, monitor="missing")

        # Chunks lead to a grid of their own.
        twin = "input chunked" if label in ("dask", "zarr") else "input dense"
        yield Case(f"input/dense/{label}", make, twin=twin)
    stored = few_stored(counts())

    def as_pydata() -> Any:
        import sparse as pydata

        return pydata.COO.from_scipy_sparse(stored)

    kinds: dict[str, Make] = {
        "csr": lambda: stored,
        "csc": lambda: sparse.csc_array(stored),
        "coo": lambda: sparse.coo_array(stored),
        "matrix": lambda: sparse.csr_matrix(stored),
        "pydata": as_pydata,
    }
    for label, made in kinds.items():
        for unstored in ("zero", "missing"):

            def make_sparse(made: Make = made, unstored: str = unstored) -> Any:
                return draw(made(), POISSON, unstored=unstored)

            yield Case(f"input/{unstored}/{label}", make_sparse, twin=f"input {unstored}")
    empty = counts().copy()
    empty[4] = np.nan
    yield Case("input/labels", lambda: draw(labelled(), POISSON, monitor="missing"))
    yield Case("input/empty row", lambda: draw(empty, POISSON, allow_empty=True))
    yield Case("input/grid chosen", lambda: draw(counts(), POISSON, blocks=None))
    yield Case(
        "input/sparse grid chosen",
        lambda: draw(stored, POISSON, blocks=None, unstored="zero", balance=True),
    )
    small = partial(draw, with_gaps(counts()), POISSON, memory_limit=1000, monitor="missing")
    yield Case("input/dense/scratch file", small, twin="input dense")


def option_cases() -> Iterator[Case]:
    """Chains, thinning, what is kept, what is watched."""
    mask = np.zeros((ROWS, COLUMNS), bool)
    mask[3, 4:9] = mask[20, ::5] = True
    positions = (np.array([0, 39, 7]), np.array([1, 29, 7]))
    variations: dict[str, dict[str, Any]] = {
        "chains": {"chains": 2},
        "thin": {"thin": 3},
        "moments": {"keep": "moments"},
        "draws": {"keep": "draws"},
        "mask": {"monitor": mask},
        "positions": {"monitor": positions},
        "no tuning": {"tune": 0},
        "all": {"chains": 2, "thin": 2, "monitor": positions, "keep": "moments"},
        "one block": {"blocks": 1},
        "seed": {"random_seed": 2**40 + 1},
    }
    for name in ("PSGLD", "PSGRRLD", "Gibbs", "HMC", "SGHMC"):
        for label, options in variations.items():
            yield Case(f"option/{label}/{name}", partial(drawn_by, name, **options))
    few = counts()[:10, :8]
    long: dict[str, Any] = {"draws": 520, "tune": 520, "blocks": 2, "keep": "moments"}
    for name in ("PSGLD", "Gibbs"):
        make = partial(draw, few, POISSON, SAMPLERS[name], **long)
        yield Case(f"option/many segments/{name}", make)
    make = partial(draw, signed()[:10, :8], GAUSSIAN, dfac.SGHMC(), **long)
    yield Case("option/many segments/SGHMC", make)


EXECUTORS: dict[str, Callable[[], dict[str, Any]]] = {
    "serial": lambda: {"executor": "serial"},
    "auto": lambda: {"executor": "auto"},
    "lanes": lambda: {"executor": "lanes"},
    "three lanes": lambda: {"executor": dfac.LanesExecutor(3)},
    "serial object": lambda: {"executor": dfac.SerialExecutor()},
    "tasks": lambda: {"executor": "tasks"},
    "tasks synchronous": lambda: {"executor": dfac.TasksExecutor("synchronous")},
    "cluster tasks": lambda: {"executor": "tasks", "client": PLACE.client()},
    "cluster ring": lambda: {"executor": "ring", "client": PLACE.client()},
}

USUAL = ("serial", "three lanes", "tasks", "cluster tasks", "cluster ring")
AWAY = ("serial", "cluster tasks", "cluster ring")


def on_each_executor(
    name: str, run: Callable[..., Any], names: Sequence[str], tolerance: float = SINGLE
) -> Iterator[Case]:
    """One run on several executors, whose arrays must be equal."""
    for label in names:

        def make(label: str = label) -> Any:
            return run(**EXECUTORS[label]())

        yield Case(f"executor/{name}/{label}", make, twin=f"executor/{name}", tolerance=tolerance)


def executor_cases() -> Iterator[Case]:
    """Every sampler, and everything else that runs on executors, on several of them."""
    for name in MAIN:
        run = partial(drawn_by, name, chains=2 if name == "PSGLD" else 1)
        names = list(EXECUTORS) if name == "PSGLD" else USUAL
        yield from on_each_executor(f"{name}/gaps", run, names)
    for name in ("PSGLD", "PSGRRLD", "Gibbs", "SGLD", "SGHMC"):
        given = "ratings balanced" if name == "SGHMC" else "zeros balanced"
        run = partial(drawn_by, name, given)
        yield from on_each_executor(f"{name}/{given}", run, AWAY)
    nested = dfac.PSGLD(schedule=dfac.NestedReshuffled(2), **WARM)
    run = partial(draw, counts(), POISSON, nested, blocks=4)
    yield from on_each_executor("nested", run, USUAL)
    for label, method in METHODS.items():
        model, V = (GAUSSIAN, signed()) if "Gaussian" in label else (POISSON, with_gaps(counts()))
        yield from on_each_executor(label, partial(point, V, model, method), AWAY)
    few, two, silf = counts()[:12, :9], dfac.TweedieNMF(2), dfac.SILFNMF(K)
    ladder = dfac.ThermodynamicIntegration(temperatures=4, draws=20, tune=10)
    urns, bound = dfac.AllocationModel.nmf(2), dfac.VariationalBayes(starts=4)
    chain = dfac.SimplexHMC(draws=6, tune=4, steps=2)
    others = {
        "TI": partial(evidence, few, two, ladder),
        "SMC": partial(evidence, TOY, urns, FILTER),
        "VB": partial(evidence, TOY, urns, bound),
        "Ensemble": partial(modes, with_gaps(intensities()), silf),
        "SimplexHMC": partial(modes, intensities(), silf, chain),
        "stein_discrepancy": partial(discrepancy, random_pair(), intensities(), silf),
    }
    for label, run in others.items():
        yield from on_each_executor(label, run, USUAL)
    chib = partial(evidence, few, POISSON, dfac.Chib(draws=50, tune=5))
    yield from on_each_executor("Chib", chib, ("serial", "three lanes", "cluster ring"))


def stop_at(phase: str, done: float) -> Callable[[dfac.RunEvent], None]:
    """A listener that interrupts a run."""

    def listen(event: dfac.RunEvent) -> None:
        if event.phase == phase and event.done > done:
            raise KeyboardInterrupt

    return listen


def stored(name: str, given: str, **options: Any) -> xr.DataTree:
    """A run that went to a store, read from there."""
    path = PLACE.folder() / "run.zarr"
    drawn_by(name, given, store=path, **options)
    return dfac.open_run(path).load()


def extended(name: str, given: str, again: Mapping[str, Any], **options: Any) -> xr.DataTree:
    """A run of half the draws that was gone on with, read from its store."""
    path = PLACE.folder() / "run.zarr"
    drawn_by(name, given, store=path, **(options | {"draws": 4}))
    dfac.resume(path, draws=4, **_again(name, given, again))
    return dfac.open_run(path).load()


def interrupted(
    name: str, given: str, again: Mapping[str, Any], phase: str, done: float, **options: Any
) -> xr.DataTree:
    """A run that was interrupted and finished, read from its store."""
    path = PLACE.folder() / "run.zarr"
    with suppress(KeyboardInterrupt):
        drawn_by(name, given, store=path, callback=stop_at(phase, done), **options)
        raise RuntimeError("the run ended before it was interrupted")
    dfac.resume(path, **_again(name, given, again))
    return dfac.open_run(path).load()


def _again(name: str, given: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `resume`: sparse data are not kept with a run."""
    own: dict[str, Any] = {"executor": "serial", "progressbar": False}
    if not given.startswith(("dense", "gaps")):
        own["V"] = INPUTS[given].wrap(of_sampler(name)[1])
    return own | options


def store_cases() -> Iterator[Case]:
    """Stores, and runs that were extended or interrupted: equal to those that were not."""
    for name in MAIN:
        given = "ratings balanced" if name == "SGHMC" else "zeros balanced"
        own: dict[str, Any] = {"draws": 8, "tune": 20}
        for kind in ("gaps", given):
            twin = f"store/{name}/{kind}"
            yield Case(f"{twin}/memory", partial(drawn_by, name, kind, **own), twin)
            yield Case(f"{twin}/extended", partial(extended, name, kind, {}, **own), twin)
        twin = f"store/{name}/gaps"
        yield Case(f"{twin}/stored", partial(stored, name, "gaps", **own), twin)
        halfway = partial(interrupted, name, "gaps", {}, "tune", 10, **own)
        yield Case(f"{twin}/interrupted", halfway, twin)
    twin = "store/variations"
    own = {"draws": 8, "tune": 20, "chains": 2, "thin": 2, "keep": "moments"}
    yield Case(f"{twin}/memory", partial(drawn_by, "PSGLD", "gaps", **own), twin)
    yield Case(f"{twin}/extended", partial(extended, "PSGLD", "gaps", {}, **own), twin)
    warm = partial(interrupted, "PSGLD", "gaps", {}, "warm start", 0, **own)
    yield Case(f"{twin}/interrupted in the warm start", warm, twin)
    for label in ("lanes", "cluster ring", "cluster tasks"):

        def elsewhere(label: str = label) -> Any:
            return extended("PSGLD", "gaps", EXECUTORS[label](), **own)

        yield Case(f"{twin}/extended by {label}", elsewhere, twin)


# -- point estimates -----------------------------------------------------------------------

METHODS: dict[str, Any] = {
    "MultiplicativeUpdates": dfac.MultiplicativeUpdates(max_iter=70),
    "DSGD": dfac.DSGD(max_iter=20),
    "DSGD Gaussian": dfac.DSGD(max_iter=20, schedule=dfac.Cyclic()),
}


def point(V: Any, model: Any, method: Any = None, **options: Any) -> xr.Dataset:
    """A point estimate."""
    settings = {"blocks": 3, "random_seed": 5, "executor": "serial", "progressbar": False}
    return through_blocks(dfac.optimize, V, model, method, **(settings | options))


def optimize_cases() -> Iterator[Case]:
    """Both optimisers under all laws, priors and inputs."""
    updates, descent = dfac.MultiplicativeUpdates(max_iter=70), dfac.DSGD(max_iter=15)
    for label, method in {"updates": updates, "descent": descent}.items():
        for beta in (2.0, 1.0, 0.5, 0.0, -1.0):
            V, model = law_data(beta), dfac.TweedieNMF(K, beta=beta)
            for given, how in INPUTS.items():
                dear = "float64" in given and beta not in (2.0, 0.5)
                if dear or ("zeros" in given and (beta not in (1.0, 2.0) or method is descent)):
                    continue
                make = partial(point, how.wrap(V), model, method, **how.meaning)
                yield Case(f"optimize/{label}/{beta:g}/{given}", make, tolerance=how.tolerance)
    refused = partial(point, few_stored(counts()), POISSON, descent, unstored="zero")
    yield Case("optimize/descent/refused", refused, refusal=True)
    gamma = dfac.TweedieNMF(K, shape_w=2.0, shape_h=1.5, rate_w=0.5)
    frozen = dfac.TweedieNMF(K, fixed_w=np.random.default_rng(6).gamma(2.0, 1.0, (ROWS, 1)))
    yield Case("optimize/updates/gamma", partial(point, counts(), gamma, updates))
    for label, method in {"updates": updates, "descent": descent}.items():
        yield Case(f"optimize/{label}/fixed w", partial(point, counts(), frozen, method))
    yield Case("optimize/default", partial(point, counts(), dfac.TweedieNMF(K)))
    yield Case("optimize/stops", partial(point, counts(), POISSON, dfac.DSGD(60, 0.01, 1e-2)))
    for given in ("gaps", "ratings", "ratings balanced", "gaps float64"):
        how = INPUTS[given]
        make = partial(point, how.wrap(signed()), GAUSSIAN, descent, **how.meaning)
        yield Case(f"optimize/Gaussian/{given}", make, tolerance=how.tolerance)


# -- what reads results --------------------------------------------------------------------


@cache
def trace_of(name: str) -> xr.DataTree:
    """Results that the readers below share."""
    longer: dict[str, Any] = {"draws": 12, "chains": 2}
    if name == "labels":
        return draw(labelled(), POISSON, monitor="missing", **longer)
    if name == "gamma law":
        law = dfac.TweedieNMF(K, beta=0.0)
        return draw(with_gaps(intensities()), law, monitor="missing", **longer)
    if name == "compound":
        law = dfac.TweedieNMF(K, beta=0.5)
        return draw(with_gaps(law_data(0.5)), law, monitor="missing", **longer)
    if name == "squares":
        law = dfac.TweedieNMF(K, beta=2.0)
        return draw(with_gaps(intensities()), law, monitor="missing", **longer)
    if name == "particles":
        return modes(with_gaps(intensities()), dfac.SILFNMF(K), particles=5)
    if name == "Tweedie particles":
        return modes(counts(), POISSON, particles=5)
    return drawn_by(name, **longer)


TRACES = (
    "PSGLD",
    "PSGRRLD",
    "SGHMC",
    "labels",
    "gamma law",
    "compound",
    "squares",
    "particles",
    "Tweedie particles",
)


def in_store(name: str) -> Path:
    """A run of two chains in a store."""
    path = PLACE.folder() / "run.zarr"
    drawn_by(name, draws=12, chains=2, store=path)
    return path


def reader_cases() -> Iterator[Case]:
    """Predictions, alignments, summaries and the rest, of several kinds of results."""

    def of(name: str, read: Callable[..., Any], *given: Any, **options: Any) -> Make:
        return lambda: read(trace_of(name), *given, **options)

    for name in TRACES:
        kinds = ("mean",) if name == "particles" else ("mean", "observation")
        for kind in kinds:
            yield Case(f"predict/{name}/{kind}", of(name, dfac.predict, interval=0.8, of=kind))
            if "particles" not in name:
                watched = of(name, dfac.monitored, interval=0.8, of=kind)
                yield Case(f"monitored/{name}/{kind}", watched)
        some = {"rows": [0, 5, 39], "columns": [1, 2]}
        if name == "labels":
            some = {"rows": ["g0", "g5", "g39"], "columns": slice(10, 40)}
        yield Case(f"predict/{name}/some", of(name, dfac.predict, **some))
        yield Case(f"align/{name}", of(name, dfac.align))
        yield Case(f"align/{name}/by w", of(name, dfac.align, by="w", threshold=0.5))
        yield Case(f"summarize/{name}", of(name, dfac.summarize, cells=6))
        yield Case(f"component_variability/{name}", of(name, dfac.component_variability))
        for of_what, metric in (("W", "angle"), ("H", "euclidean"), ("both", "angle")):
            pairs = of(name, dfac.pairwise_distances, of_what, metric=metric)
            yield Case(f"pairwise_distances/{name}/{of_what}", pairs)
        top = of(name, dfac.top_entries, 4)
        yield Case(f"top_entries/{name}", top)
        component = "1" if name == "SGHMC" else 1
        hs = of(name, dfac.top_entries, 3, "H", component=component)
        yield Case(f"top_entries/{name}/H", hs)
        yield Case(f"downstream/{name}", of(name, dfac.downstream, total_of_factors))
        yield Case(f"expectation/{name}", of(name, dfac.expectation, product_of_factors))
    fit = partial(point, counts(), POISSON)
    yield Case("align/reference", lambda: dfac.align(trace_of("PSGLD"), fit()))
    yield Case("predict/cells", lambda: dfac.predict(trace_of("PSGLD"), *some_cells()))
    for label, read in {
        "predict": partial(dfac.predict, rows=[3, 4], interval=0.5),
        "align": dfac.align,
        "summarize": dfac.summarize,
    }.items():
        yield Case(f"from store/{label}", lambda read=read: read(in_store("PSGRRLD")))


def some_cells() -> tuple[xr.DataArray, xr.DataArray]:
    """Single cells, as `predict` takes them."""
    return (xr.DataArray([0, 7, 39], dims="cell"), xr.DataArray([3, 3, 29], dims="cell"))


def total_of_factors(W: Array, H: Array) -> float:
    """A score of a factorization."""
    return float(W.sum() * H.sum())


def product_of_factors(W: Array, H: Array) -> Array:
    """A corner of WH."""
    return (W[:4] @ H[:, :3]).astype(np.float64)


def hold_out_cases() -> Iterator[Case]:
    """Cells set aside, and a run that predicts them."""
    V, table = with_gaps(counts()), few_stored(counts())
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "dense": (V, {}),
        "labels": (labelled(), {}),
        "ratings": (table, {"unstored": "missing"}),
        "zeros": (table, {"unstored": "zero"}),
        "not one kept": (table, {"unstored": "missing", "keep_one": False}),
    }
    for label, (data, options) in given.items():
        make = partial(dfac.hold_out, data, 0.2, random_seed=3, **options)
        yield Case(f"hold_out/{label}", make, tolerance=DOUBLE)

    def predicted() -> xr.Dataset:
        held = dfac.hold_out(table, 0.2, random_seed=3)
        tree = draw(held.train, GAUSSIAN, unstored="missing", balance=True, monitor=held.cells)
        return dfac.monitored(tree, interval=0.8)

    yield Case("hold_out/predicted", predicted)


# -- evidences -----------------------------------------------------------------------------

TOY = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
TENSOR = np.random.default_rng(7).poisson(0.7, (4, 3, 3))
FILTER = dfac.SequentialMonteCarlo(particles=16, islands=4, target=1e9, moves=0)


def evidence(V: Any, model: Any, method: Any = None, **options: Any) -> Any:
    """A log evidence."""
    settings = {"random_seed": 1, "executor": "serial", "progressbar": False}
    return dfac.log_evidence(V, model, method, **(settings | options))


def evidence_cases() -> Iterator[Case]:
    """All ways to an evidence, on problems of a few cells."""
    few, positive = counts()[:12, :9], intensities()[:12, :9]
    ladder = partial(dfac.ThermodynamicIntegration, temperatures=4, draws=20, tune=10)
    two = dfac.TweedieNMF(2)
    for label, method in {
        "exact": ladder(),
        "PSGLD": ladder(sampler=dfac.PSGLD(**WARM)),
        "PSGRRLD": ladder(sampler=dfac.PSGRRLD(**WARM)),
        "HMC": ladder(sampler=dfac.HMC(steps=2, **WARM)),
        "variance": ladder(rule="variance"),
        "trapezoid": ladder(rule="trapezoid", power=1),
    }.items():
        yield Case(f"evidence/TI/{label}", partial(evidence, few, two, method))
    for beta in (2.0, 0.5, 0.0, -1.0):
        model = dfac.TweedieNMF(2, beta=beta)
        for label, V in {"dense": positive, "gaps": with_gaps(positive)}.items():
            yield Case(f"evidence/TI/{beta:g}/{label}", partial(evidence, V, model, ladder()))
    for unstored in ("zero", "missing"):
        make = partial(evidence, few_stored(few), two, ladder(), unstored=unstored, blocks=2)
        yield Case(f"evidence/TI/{unstored}", make)
    additive = dfac.GaussianAdditive(3, mean=0.5, scale=2.0)
    x = additive.generate(np.random.default_rng(8), 100)
    short = dfac.ThermodynamicIntegration(temperatures=4, draws=200, tune=50)
    yield Case("evidence/TI/additive", partial(evidence, x, additive, short), tolerance=DOUBLE)
    chib = dfac.Chib(draws=60, tune=40)
    one = dfac.TweedieNMF(2, dispersion=1.0, shape_w=1.5)
    for label, V in {"dense": few, "gaps": with_gaps(few), "sparse": few_stored(few)}.items():
        unstored = {"unstored": "zero"} if label == "sparse" else {}
        yield Case(f"evidence/Chib/{label}", partial(evidence, V, one, chib, **unstored))
    some = dfac.Chib(draws=60, tune=40, permutations=1)
    yield Case("evidence/Chib/permutations", partial(evidence, few, one, some))
    yield from allocation_cases()
    yield from rank_cases(ladder())


def allocation_models() -> dict[str, tuple[Any, Any]]:
    """Models of counts by name, with data."""
    symmetric = dfac.AllocationModel.symmetric_nmf(2, concentration_shared=0.5)
    return {
        "nmf": (TOY, dfac.AllocationModel.nmf(2)),
        "cp": (TENSOR, dfac.AllocationModel.cp(2)),
        "tucker": (TENSOR, dfac.AllocationModel.tucker((2, 2, 2))),
        "symmetric": (TOY[:, :3], symmetric),
        "topics": (TOY, dfac.AllocationModel.topics(2)),
        "sparse": (sparse.coo_array(TOY), dfac.AllocationModel.nmf(3, concentration=0.5)),
    }


def allocation_cases() -> Iterator[Case]:
    """Evidences of allocation models; the default moves of particles have cases of their own."""
    moving = partial(dfac.SequentialMonteCarlo, particles=16, islands=4, target=1e9)
    bound = dfac.VariationalBayes(starts=3, max_iterations=60)
    for label, (X, model) in allocation_models().items():
        for name, method in {"no moves": FILTER, "VB": bound}.items():
            make = partial(evidence, X, model, method)
            yield Case(f"evidence/{name}/{label}", make, tolerance=DOUBLE)
        make = partial(evidence, X, model, moving())
        yield Case(f"evidence/SMC default moves/{label}", make, tolerance=DOUBLE)
    model = dfac.AllocationModel.nmf(2)
    for label in ("nmf", "topics", "symmetric"):
        X, own = allocation_models()[label]
        make = partial(evidence, X, own, dfac.Enumeration())
        yield Case(f"evidence/Enumeration/{label}", make, tolerance=DOUBLE)
    variations: dict[str, dict[str, Any]] = {
        "stratified": {"resampling": "stratified"},
        "residual": {"resampling": "residual", "threshold": 0.9},
        "multinomial": {"resampling": "multinomial"},
        "never": {"resampling": None},
        "own order": {"order": "own"},
        "thin": {"thin": 0.7},
        "particles": {"keep": "particles"},
        "growing": {"target": 0.2, "max_particles": 512},
    }
    for label, options in variations.items():
        for name, moves in (("no moves", {"moves": 0}), ("SMC default moves", {})):
            method = moving(**(moves | options))
            make = partial(evidence, 2 * TOY, model, method)
            yield Case(f"evidence/{name}/{label}", make, tolerance=DOUBLE)
    yield Case(
        "evidence/SMC default moves/default",
        partial(evidence, TOY, model, dfac.SequentialMonteCarlo()),
        tolerance=DOUBLE,
    )
    labels = xr.DataArray(TOY, dims=("gene", "cell"), coords={"gene": ["a", "b", "c"]})
    yield Case("evidence/VB/labels", partial(evidence, labels, model, bound), tolerance=DOUBLE)


def rank_cases(ladder: Any) -> Iterator[Case]:
    """Tables of ranks."""
    few = counts()[:12, :9]
    settings: dict[str, Any] = {"executor": "serial", "progressbar": False}

    def table(V: Any, model: Any, method: Any, **options: Any) -> xr.Dataset:
        return dfac.select_rank(V, model, [1, 2], method, **(settings | options))

    yield Case("select_rank/held out", partial(table, few, dfac.TweedieNMF(1), ladder))
    make = partial(table, few, dfac.TweedieNMF(1), ladder, held_out=None)
    yield Case("select_rank/evidence", make)
    squares = dfac.TweedieNMF(1, beta=2.0)
    make = partial(table, intensities()[:12, :9], squares, ladder, held_out=None)
    yield Case("select_rank/squares", make)
    chib = partial(table, few, dfac.TweedieNMF(1), dfac.Chib(draws=50, tune=30), held_out=None)
    yield Case("select_rank/Chib", chib)
    bound = dfac.VariationalBayes(starts=2)
    for label, method in {"VB": bound, "no moves": FILTER}.items():
        make = partial(table, TOY, dfac.AllocationModel.nmf(1), method)
        yield Case(f"select_rank/{label}", make, tolerance=DOUBLE)


def simulate_cases() -> Iterator[Case]:
    """Counts drawn from allocation models."""
    shapes = {
        "nmf": ((6, 5), 60),
        "cp": ((6, 5, 4), 60),
        "tucker": ((6, 5, 4), 60),
        "symmetric": ((5, 5), 40),
        "topics": ((6, 5), 60),
    }
    for label, (shape, total) in shapes.items():
        model = allocation_models()[label][1]
        make = partial(dfac.simulate, model, shape, total=total, random_seed=0)
        yield Case(f"simulate/{label}", make, tolerance=DOUBLE)
    sized = dfac.AllocationModel.cp(2, observed={"i": 4, "j": 3}, rate=0.05)
    yield Case("simulate/total drawn", partial(dfac.simulate, sized, random_seed=4))


# -- particles -----------------------------------------------------------------------------


def modes(V: Any, model: Any, method: Any = None, **options: Any) -> xr.DataTree:
    """A small posterior of particles."""
    settings: dict[str, Any] = {
        "particles": 3,
        "pilot": 2,
        "random_seed": 4,
        "blocks": 2,
        "executor": "serial",
        "progressbar": False,
    }
    method = dfac.Ensemble(max_iter=40) if method is None else method
    return through_blocks(dfac.stein_posterior, V, model, method, **(settings | options))


def random_pair() -> tuple[Array, Array]:
    """Five factorizations at random."""
    rng = np.random.default_rng(9)
    return rng.gamma(1.0, 1.0, (5, ROWS, K)), rng.gamma(1.0, 1.0, (5, K, COLUMNS))


def discrepancy(particles: Any, V: Any, model: Any, **options: Any) -> xr.Dataset:
    """A Stein discrepancy; the threshold of a model without one is 100."""
    if isinstance(model, dfac.SILFNMF):
        model = dfac.SILFNMF(model.n_components, beta=model.beta, threshold=100.0)
    settings = {"blocks": 2, "executor": "serial", "progressbar": False}
    return dfac.stein_discrepancy(particles, V, model, **(settings | options))


def particle_cases() -> Iterator[Case]:
    """Ensembles from all starts, descents and chains; discrepancies."""
    V = intensities()
    silf = dfac.SILFNMF(K)
    for start in ("q_transform", "random", "nndsvdar", "nndsvd"):
        for optimizer in ("coordinate_descent", "multiplicative"):
            ensemble = dfac.Ensemble(start=start, optimizer=optimizer, max_iter=40)
            count = {"particles": 1} if start == "nndsvd" else {}
            name = f"particles/Ensemble/{start}/{optimizer}"
            yield Case(name, partial(modes, V, silf, ensemble, **count))
    yield Case("particles/Ensemble/default", partial(modes, V, silf, dfac.Ensemble()))
    wide = dfac.SILFNMF(5)
    slim = dfac.Ensemble(max_iter=40, transfer_rank=2, tol=1e-3)
    for given, how in INPUTS.items():
        if given == "dense":
            continue
        for label, model in {"silf": wide, "Tweedie": dfac.TweedieNMF(K)}.items():
            make = partial(modes, how.wrap(counts()), model, slim, **how.meaning)
            yield Case(f"particles/Ensemble/{label}/{given}", make, tolerance=how.tolerance)
    for beta in (1.0, 0.5, 0.0):
        make = partial(modes, law_data(beta), dfac.SILFNMF(K, beta=beta, threshold=500.0))
        yield Case(f"particles/Ensemble/beta {beta:g}", make)
    movers = {
        "SVGD": dfac.SVGD(steps=4),
        "SteinDescent": dfac.SteinDescent(steps=4),
        "SimplexHMC": dfac.SimplexHMC(draws=6, tune=5, steps=2),
    }
    for label, method in movers.items():
        for given, model in {"silf": silf, "Tweedie": dfac.TweedieNMF(K, beta=2.0)}.items():
            yield Case(f"particles/{label}/{given}", partial(modes, V, model, method))
        yield Case(f"particles/{label}/gaps", partial(modes, with_gaps(V), silf, method))
        tangent = partial(modes, V, silf, method, tangent=True)
        yield Case(f"particles/{label}/tangent", tangent)
    for label, options in {
        "tangent": {"tangent": True},
        "not aligned": {"align": False},
        "kernel": {"kernel": dfac.IMQ(0.1, 10.0, -0.4, -0.6)},
        "labels": {},
        "float64": {"dtype": "float64"},
    }.items():
        data = labelled() if label == "labels" else V
        tolerance = DOUBLE if label == "float64" else SINGLE
        make = partial(modes, data, silf, **options)
        yield Case(f"particles/option/{label}", make, tolerance=tolerance)
    yield from particle_store_cases()
    yield from discrepancy_cases()


def particle_store_cases() -> Iterator[Case]:
    """Particles in stores, finished or interrupted."""
    V, silf = with_gaps(intensities()), dfac.SILFNMF(K)

    def whole() -> xr.DataTree:
        path = PLACE.folder() / "modes.zarr"
        modes(V, silf, particles=4, store=path)
        return dfac.open_run(path).load()

    def stopped() -> xr.DataTree:
        path = PLACE.folder() / "modes.zarr"
        with suppress(KeyboardInterrupt):
            modes(V, silf, particles=4, store=path, callback=stop_at("particles", 1))
            raise RuntimeError("the run ended before it was interrupted")
        dfac.resume(path, executor="serial", progressbar=False)
        return dfac.open_run(path).load()

    yield Case("particles/store/memory", partial(modes, V, silf, particles=4), "particle store")
    yield Case("particles/store/stored", whole, "particle store")
    yield Case("particles/store/interrupted", stopped, "particle store")


def discrepancy_cases() -> Iterator[Case]:
    """Stein discrepancies of arrays, draws and particles."""
    pair, silf = random_pair(), dfac.SILFNMF(K)
    models = {
        "silf": (intensities(), silf),
        "Tweedie": (counts(), dfac.TweedieNMF(K, dispersion=1.0, rate_w=1.0, rate_h=1.0)),
        "gamma": (
            intensities(),
            dfac.TweedieNMF(K, beta=0.0, dispersion=0.2, rate_w=1.0, rate_h=1.0, shape_w=2.0),
        ),
        "silf beta 1": (counts(), dfac.SILFNMF(K, beta=1.0)),
    }
    for label, (V, model) in models.items():
        for kind, data in {"dense": V, "gaps": with_gaps(V)}.items():
            yield Case(f"discrepancy/{label}/{kind}", partial(discrepancy, pair, data, model))
    sized = {"weights": np.array([0.4, 0.3, 0.1, 0.1, 0.1]), "tangent": True}
    yield Case("discrepancy/weights", partial(discrepancy, pair, intensities(), silf, **sized))
    fixed = partial(discrepancy, pair, intensities(), silf, kernel=dfac.IMQ(0.02, 5.0))
    yield Case("discrepancy/kernel", fixed)
    for unstored in ("zero", "missing"):
        make = partial(discrepancy, pair, few_stored(counts()), silf, unstored=unstored)
        yield Case(f"discrepancy/{unstored}", make)
    single = tuple(one.astype(np.float32) for one in pair)
    yield Case("discrepancy/single", partial(discrepancy, single, intensities(), silf))
    yield Case(
        "discrepancy/trace",
        lambda: discrepancy(trace_of("PSGLD"), with_gaps(counts()), POISSON, most=10),
    )


# -- files, costs --------------------------------------------------------------------------


def write_csv(path: Path) -> Path:
    """Counts as a table of keys and values."""
    table = sparse.coo_array(few_stored(counts()))
    lines = ["user,item,count"]
    for row, column, value in zip(*table.coords, table.data, strict=True):
        lines.append(f"u{row:02d},i{column:02d},{int(value)}")
    made = path / "table.csv"
    made.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made


def write_mtx(path: Path) -> Path:
    """The same in Matrix Market's form."""
    made = path / "table.mtx"
    scipy_io.mmwrite(made, sparse.coo_matrix(few_stored(counts()).astype(np.int64)))
    return made


def write_npz(path: Path) -> Path:
    """The same as scipy saves it."""
    made = path / "table.npz"
    sparse.save_npz(made, few_stored(counts()))
    return made


def write_parquet(path: Path) -> Path:
    """The same as columns with numbers as keys."""
    table = sparse.coo_array(few_stored(counts()))
    made = path / "table.parquet"
    rows, columns = table.coords
    pd.DataFrame({"row": rows, "column": columns, "value": table.data}).to_parquet(made)
    return made


WRITERS: dict[str, Callable[[Path], Path]] = {
    "csv": write_csv,
    "mtx": write_mtx,
    "npz": write_npz,
    "parquet": write_parquet,
}


def converted(kind: str, unstored: str, balance: bool = False, **options: Any) -> Path:
    """A blocked store made of a file."""
    folder = PLACE.folder()
    store = folder / "data.zarr"
    settings: dict[str, Any] = {"blocks": 3, "progressbar": False, "unstored": unstored}
    source = WRITERS[kind](folder)
    dfac.convert(source, store, balance=balance, **(settings | options))
    return store


def file_cases() -> Iterator[Case]:
    """Files that were converted, what they hold, and draws from their stores."""
    for kind in WRITERS:
        for unstored in ("zero", "missing"):
            for balance in (False, True):
                word = " balanced" if balance else ""
                name = f"convert/{kind}/{unstored}{word}"
                given = (kind, unstored, balance)
                yield Case(f"{name}/report", partial(reported, *given))
                yield Case(f"{name}/export", partial(exported, *given))
                # A table with a header names the dimensions.
                twin = f"convert/{unstored}{word}" if kind != "csv" else ""
                yield Case(f"{name}/draws", partial(drawn_from, *given), twin)
    yield Case("convert/npz/float64", partial(exported, "npz", "zero", dtype="float64"))
    yield Case("convert/npz/zstd", partial(exported, "npz", "zero", compression="zstd"))
    yield Case("convert/npz/grid chosen", partial(reported, "npz", "zero", blocks=None))
    yield Case("convert/csv/small memory", partial(exported, "csv", "zero", memory_limit=2000))
    yield Case("convert/csv/lines counted", partial(exported, "csv", "zero", values=False))


def reported(kind: str, unstored: str, balance: bool = False, **options: Any) -> Any:
    """What `convert` says."""
    folder = PLACE.folder()
    settings: dict[str, Any] = {"blocks": 3, "progressbar": False, "unstored": unstored}
    source = WRITERS[kind](folder)
    return dfac.convert(source, folder / "data.zarr", balance=balance, **(settings | options))


def exported(kind: str, unstored: str, balance: bool = False, **options: Any) -> Any:
    """What a store holds, as scipy reads it."""
    store = converted(kind, unstored, balance, **options)
    path = store.with_name("again.npz")
    dfac.export(store, path)
    return sparse.load_npz(path)


def drawn_from(kind: str, unstored: str, balance: bool) -> xr.DataTree:
    """Draws from a store that was converted."""
    return draw(converted(kind, unstored, balance), POISSON)


def cost_cases() -> Iterator[Case]:
    """Estimated costs; a change is no mistake by itself."""
    settings: dict[str, Any] = {"lanes": 2, "memory_limit": "1 GiB", "blocks": 3}
    for name in MAIN:
        for given in ("gaps", "zeros", "ratings balanced"):
            if name == "SGHMC" and given == "zeros":
                continue
            for executor in ("lanes", "ring"):
                model, V = of_sampler(name)
                wrap, own = INPUTS[given]
                options = settings | own | {"executor": executor}
                make = partial(cost, wrap(V), model, SAMPLERS[name], **options)
                yield Case(f"{SHOWN_ONLY}/cost/{name}/{given}/{executor}", make)


def cost(*given: Any, **options: Any) -> dict[str, Any]:
    """An estimate, its time under another name than times that were measured."""
    found = asdict(dfac.estimate_cost(*given, **options))
    return {"estimated" if key == "seconds" else key: own for key, own in found.items()}


GROUPS: tuple[Callable[[], Iterator[Case]], ...] = (
    sampler_cases,
    beta_cases,
    prior_cases,
    schedule_cases,
    input_cases,
    option_cases,
    optimize_cases,
    store_cases,
    reader_cases,
    hold_out_cases,
    evidence_cases,
    simulate_cases,
    particle_cases,
    file_cases,
    executor_cases,
    cost_cases,
)


def all_cases() -> list[Case]:
    """Every case, in the order in which they run."""
    cases = [case for group in GROUPS for case in group()]
    names = [case.name for case in cases]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names of cases must differ, got twice: {sorted(doubles)}")
    return cases


# -- write ---------------------------------------------------------------------------------


def say(text: str) -> None:
    """Tell on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def quietly(kinds: list[str]) -> Iterator[None]:
    """Gather the kinds of the package's own warnings and show none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = (one.category for one in caught)
    kinds.extend(kind.__name__ for kind in own if kind.__module__.startswith("daskfactor"))


def run_case(case: Case) -> dict[str, Any]:
    """The fingerprint of a case, or the error that it ended with."""
    kinds: list[str] = []
    try:
        with quietly(kinds):
            found = describe(case.make(), case.tolerance)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
        return {"error": f"{type(error).__name__}: {error}", "refusal": case.refusal}
    found["attributes"]["warnings"] = sorted(set(kinds))
    return found


def unlike_twins(cases: Sequence[Case], found: Mapping[str, Any]) -> list[str]:
    """Sentences about cases that should have had equal arrays and have not."""
    first: dict[str, str] = {}
    said = []
    for case in cases:
        if not case.twin or "error" in found[case.name]:
            continue
        leader = first.setdefault(case.twin, case.name)
        one, other = (_own_arrays(found[name]) for name in (leader, case.name))
        differing = sorted(
            name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
        )
        if differing:
            said.append(f"{case.name} is not {leader}: {', '.join(differing)}")
    return said


def _own_arrays(entry: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of what a run has found: neither coordinates nor copies of what it was given."""
    return {
        name: own["hash"]
        for name, own in entry["arrays"].items()
        if "@" not in name and not name.startswith(APART)
    }


def machine() -> dict[str, str]:
    """What bits depend on besides the code."""
    libraries = ("numpy", "scipy", "numba", "scikit-learn", "xarray", "dask")
    return {"processor": platform.machine(), "python": platform.python_version()} | {
        name: version(name) for name in libraries
    }


def write(path: Path, only: str) -> int:
    """Run all cases that were asked for and write their fingerprints."""
    cases = [case for case in all_cases() if only in case.name]
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    say(f"{len(cases)} cases of the daskfactor in {Path(dfac.__file__).parent}")
    with PLACE.stack, threadpool_limits(1):
        for number, case in enumerate(cases, 1):
            started = time.process_time()
            found[case.name] = run_case(case)
            spent = time.process_time() - started
            error = found[case.name].get("error", "")[:200]
            head = f"[{number}/{len(cases)}] {spent:6.2f} s of CPU"
            say(f"{head}  {case.name}  {error}".rstrip())
    unlike = unlike_twins(cases, found)
    for line in unlike:
        say(f"NOT ALIKE: {line}")
    errors = sum(map(failed, found.values()))
    record = {"only": only, "machine": machine(), "unlike": unlike, "cases": found}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    spent = time.perf_counter() - begun
    say(f"{len(cases)} cases, {errors} failed, {len(unlike)} not alike, {spent:.0f} s")
    return 1 if unlike or errors else 0


def failed(entry: Mapping[str, Any]) -> bool:
    """Whether a case ended with an error that it was not to end with."""
    return "error" in entry and not entry.get("refusal", False)


# -- compare -------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What became of a case: ``kind`` is one of `ORDER`, ``deviation`` is relative."""

    kind: str
    deviation: float = 0.0
    detail: str = ""


ORDER = ("equal", "rounding", "different", "attributes", "missing", "new")


def deviation(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """Largest difference of two arrays' sums over the sum of absolute values."""
    scale = max(old["absolute"], new["absolute"])
    largest = max(abs(old[name] - new[name]) for name in ("sum", "absolute", "weighted"))
    return largest / scale if scale else 0.0


def judge_array(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Verdict:
    """Whether an array is the same, the same but for rounding, or another."""
    if old["hash"] == new["hash"]:
        return Verdict("equal")
    for name in ("dtype", "shape", "dims", "finite"):
        if old.get(name) != new.get(name):
            return Verdict("different", detail=f"{name} was {old.get(name)}, is {new.get(name)}")
    if "absolute" not in old:
        return Verdict("different", detail="other texts")
    found = deviation(old, new)
    rounding = np.dtype(old["dtype"]).kind == "f" and found <= tolerance
    return Verdict("rounding" if rounding else "different", found)


def judge_attributes(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Verdict:
    """Whether settings and hyperparameters are the same."""
    said, largest = [], 0.0
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name, "nothing"), new.get(name, "nothing")
        if one == other or (one != one and other != other):
            continue
        if _is_number(one) and _is_number(other):
            found = abs(one - other) / max(abs(one), abs(other))
            if found <= tolerance:
                largest = max(largest, found)
                continue
        said.append(f"{name} was {one!r}, is {other!r}")
    if said:
        return Verdict("attributes", detail="; ".join(said))
    return Verdict("rounding", largest) if largest else Verdict("equal")


def _is_number(value: Hashable) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool)


def judge(old: Mapping[str, Any], new: Mapping[str, Any], attributes: bool) -> Verdict:
    """What became of one case."""
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
        chosen = {name: own for name, own in verdicts.items() if own.kind == kind}
        if chosen:
            largest = max(own.deviation for own in chosen.values())
            said = "; ".join(_told(name, own) for name, own in chosen.items())
            return Verdict(kind, largest, said)
    if attributes:
        return judge_attributes(old["attributes"], new["attributes"], tolerance)
    return Verdict("equal")


def _told(name: str, verdict: Verdict) -> str:
    return f"{name} {verdict.detail or f'{verdict.deviation:.1e}'}"


def compare(old_path: Path, new_path: Path, attributes: bool) -> int:
    """Print what became of every case; 1 if one is different or missing."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (old_path, new_path))
    for name, value in old["machine"].items():
        if new["machine"].get(name) != value:
            print(f"note: {name} was {value}, is {new['machine'].get(name)}")
    pattern = new["only"]
    before = {name: own for name, own in old["cases"].items() if pattern in name}
    verdicts = {}
    for name in sorted(before.keys() | new["cases"].keys()):
        if name not in new["cases"]:
            verdicts[name] = Verdict("missing")
        elif name not in before:
            verdicts[name] = Verdict("new")
        else:
            verdicts[name] = judge(before[name], new["cases"][name], attributes)
    for kind in ORDER[1:]:
        for name, verdict in verdicts.items():
            if verdict.kind == kind:
                size = f" {verdict.deviation:.1e}" if verdict.deviation else ""
                print(f"{kind:<10} {name}{size}  {verdict.detail[:400]}".rstrip())
    for line in new["unlike"]:
        print(f"not alike  {line[:400]}")
    numbers = {kind: sum(own.kind == kind for own in verdicts.values()) for kind in ORDER}
    print(", ".join(f"{count} {kind}" for kind, count in numbers.items()))
    errors = sum(map(failed, new["cases"].values()))
    print(f"{errors} cases failed")
    bad = ("different", "attributes", "missing")
    fatal = any(
        own.kind in bad and not name.startswith(SHOWN_ONLY) for name, own in verdicts.items()
    )
    return 1 if fatal else 0


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
    for case in all_cases():
        print(case.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
