"""The public verbs that run something: ``sample``, ``resume``, ``optimize``."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import Any

import numpy as np
import xarray as xr

import daskfactor
from daskfactor.engine import Executor, make_executor
from daskfactor.engine.machine import machine_attrs
from daskfactor.engine.progress import OnEvent, RunEvent, ignore, progress_bar
from daskfactor.errors import DataError, OptionError
from daskfactor.grid.bands import Bands, Grid
from daskfactor.io.blocks import BlockedData
from daskfactor.io.sources import as_blocks
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.optimizers.multiplicative import (
    DispersionRule,
    MultiplicativeUpdates,
    initial_state,
    run_updates,
    typical_value,
)
from daskfactor.random import resolve_seed
from daskfactor.results.schema import FORMAT_VERSION
from daskfactor.results.spec import RunSpec
from daskfactor.results.store import RunStore
from daskfactor.results.trace import open_run
from daskfactor.runs.chain import ChainRun, Setting
from daskfactor.runs.compilation import compile_kernels
from daskfactor.runs.driver import Driver, RunState
from daskfactor.runs.monitor import Cells, monitored_cells
from daskfactor.runs.options import RunOptions, choose_keep, whole_number
from daskfactor.runs.sinks import MemorySink
from daskfactor.runs.snapshot import restore
from daskfactor.samplers import PSGLD, sampler_from_dict

PathText = str | PathLike[str]


def sample(
    V: Any,
    model: TweedieNMF,
    sampler: PSGLD | None = None,
    draws: int = 500,
    tune: int = 500,
    chains: int = 1,
    thin: int = 1,
    *,
    random_seed: int | None = None,
    keep: str = "auto",
    monitor: Any = None,
    store: PathText | None = None,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | None = None,
    unstored: str | None = None,
    dtype: str = "float32",
    executor: str | Executor = "lanes",
    memory_limit: int | str | None = None,
    callback: OnEvent | None = None,
) -> xr.DataTree:
    """Draw factors from the posterior of a matrix: W, H ~ p(W, H | V).

    One draw is taken per cycle, and one cycle is one pass over the data: B parts
    of B blocks each.

    Parameters
    ----------
    V : array (I, J)
        NumPy array (NaN = missing), masked array, dask array, zarr array, path
        or URL of one, xarray.DataArray, or the result of :func:`as_blocks`.
    model
        What the data are taken to be.
    sampler
        :class:`PSGLD` (the default) or :class:`PSGRRLD`.
    draws, tune
        Cycles to draw from (times ``thin``) and cycles to tune and burn in before.
    chains
        Independent chains, each from a start of its own.
    thin
        Cycles per draw.
    random_seed
        Any whole number; the same seed gives the same draws on every executor.
    keep
        ``"draws"`` keeps all, ``"moments"`` only running means and variances,
        ``"auto"`` as many evenly spaced draws as fit 1 GiB. Moments are always kept.
    monitor
        Cells whose predicted mean and variance are gathered at every draw:
        ``"missing"``, a boolean mask, or (rows, columns) positions.
    store
        Directory to write the run to while it goes on; :func:`resume` and
        :func:`open_run` take it.
    progressbar
        Whether to show a progress bar on standard error.
    client
        Reserved for a ``distributed`` cluster; must be None in this version.
    blocks
        B, the number of row and of column bands; from chunks or shape by default.
    unstored
        What an entry that sparse input does not store means.
    dtype
        ``"float32"`` or ``"float64"`` for factors and arithmetic.
    executor
        ``"lanes"`` (threads), ``"tasks"`` (a Dask graph), ``"serial"``, or an
        executor object. All give the same draws.
    memory_limit
        Bytes of decoded data to hold in memory; beyond it, a scratch file.
    callback
        Called with a :class:`RunEvent` as the run goes on.

    Returns
    -------
    xarray.DataTree
        Groups and names as ArviZ has them; ``posterior/W`` (chain, draw, row,
        component) and ``posterior/H`` (chain, draw, component, column) under the
        data's own names and labels.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or options cannot be used, before anything is written.
    DivergenceError
        If a chain diverges again and again.
    StoreError
        If the store exists already or cannot be written.

    Notes
    -----
    Şimşekli et al. 2017 (P-SGLD, P-SGRRLD); Şimşekli et al. 2015.
    """
    sampler = PSGLD() if sampler is None else sampler
    _check_kinds(model, sampler, client)
    seed = resolve_seed(random_seed)
    counts = {
        "draws": whole_number("draws", draws, 1),
        "tune": whole_number("tune", tune, 0),
        "chains": whole_number("chains", chains, 1),
        "thin": whole_number("thin", thin, 1),
    }
    sampler.check_lengths(counts["draws"], counts["tune"])
    with ExitStack() as stack:
        on_event = stack.enter_context(_listener(progressbar, callback))
        on_event(RunEvent("load", 0, 1))
        data = stack.enter_context(_opened(V, blocks, dtype, unstored, memory_limit))
        model.check_values(data.minimum, data.maximum)
        on_event(RunEvent("load", 1, 1, message=data.describe()))
        bytes_per_draw = sum(data.shape) * model.n_components * data.dtype.itemsize
        options = RunOptions(
            **counts,
            seed=seed,
            keep=keep,  # type: ignore[arg-type]  # checked by choose_keep
            keep_every=choose_keep(
                keep, counts["draws"] * counts["chains"], bytes_per_draw * counts["chains"]
            ),
            dtype=str(data.dtype),
        )
        cells = monitored_cells(monitor, data)
        runner = stack.enter_context(_executor(executor))
        setting = Setting(data, model, sampler, options, runner, cells)
        return _run(setting, store, on_event)


def resume(
    store: PathText,
    draws: int | None = None,
    *,
    V: Any = None,
    progressbar: bool = True,
    executor: str | Executor = "lanes",
    memory_limit: int | str | None = None,
    callback: OnEvent | None = None,
) -> xr.DataTree:
    """Go on with a run where its store stopped: the same draws as an unbroken run.

    Parameters
    ----------
    store
        The directory that ``sample(store=...)`` wrote.
    draws
        Draws to add to those the store holds; None finishes what was planned.
    V
        The data again, needed if they were neither in memory nor read from a
        path when the run began.
    progressbar, executor, memory_limit, callback
        As for :func:`sample`.

    Raises
    ------
    StoreError, StoreFormatError
        If there is no run there, or it is damaged or of a newer version.
    DataError
        If ``V`` is needed, or is not the data that the run began with.
    """
    with ExitStack() as stack:
        on_event = stack.enter_context(_listener(progressbar, callback))
        run = stack.enter_context(RunStore.open(fspath(store), mode="r+"))
        arrays, meta = run.load_checkpoint()
        described = json.loads(run.attrs["run"])
        options = RunOptions(**described["options"])
        if draws is not None:
            options = _extended(options, meta, whole_number("draws", draws, 1))
        model = TweedieNMF.from_dict(described["model"])
        sampler = sampler_from_dict(described["sampler"])
        sampler.check_lengths(options.draws, options.tune)
        data = stack.enter_context(_data_again(run, V, described, options, memory_limit))
        cells = _cells_of(run.spec)
        runner = stack.enter_context(_executor(executor))
        setting = Setting(data, model, sampler, options, runner, cells)
        if draws is not None:
            described["options"] = options.to_dict()
            index = _kept(options)
            run.extend(len(index), index)
            run.update_attrs({"run": json.dumps(described), "draws": options.draws})
        state = RunState([ChainRun(setting, number) for number in range(options.chains)])
        for chain in state.chains:
            prefix = f"{chain.number}/"
            own = {
                name.removeprefix(prefix): value
                for name, value in arrays.items()
                if name.startswith(prefix)
            }
            restore(chain, own, meta["chains"][chain.number])
        state.cycle, state.warmups = meta["cycle"], meta["warmup_draws"]
        state.seconds = meta["seconds"]
        compile_kernels(setting, on_event)
        Driver(setting, run, on_event).run(state)
        run.finish(_closing(state))
    return open_run(fspath(store))


def optimize(
    V: Any,
    model: TweedieNMF,
    method: MultiplicativeUpdates | None = None,
    *,
    random_seed: int | None = None,
    progressbar: bool = True,
    blocks: int | None = None,
    unstored: str | None = None,
    dtype: str = "float32",
    executor: str | Executor = "lanes",
    memory_limit: int | str | None = None,
    callback: OnEvent | None = None,
) -> xr.Dataset:
    """One point estimate of the factors: the fit that the samplers start from.

    Parameters
    ----------
    V, blocks, unstored, dtype, executor, memory_limit, progressbar, callback
        As for :func:`sample`.
    model
        What the data are taken to be; its priors count as penalties.
    method
        :class:`MultiplicativeUpdates`.
    random_seed
        Seed of the random start.

    Returns
    -------
    xarray.Dataset
        ``W`` (row, component), ``H`` (component, column), ``objective``
        (iteration): Σ d_β(v|μ) + φ(λ_w ΣW + λ_h ΣH).

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or options cannot be used.

    Notes
    -----
    Févotte and Idier 2011.
    """
    method = MultiplicativeUpdates() if method is None else method
    if not isinstance(method, MultiplicativeUpdates):
        raise OptionError(f"method must be MultiplicativeUpdates(...), got {method!r}")
    _check_model(model)
    seed = resolve_seed(random_seed)
    with ExitStack() as stack:
        on_event = stack.enter_context(_listener(progressbar, callback))
        data = stack.enter_context(_opened(V, blocks, dtype, unstored, memory_limit))
        model.check_values(data.minimum, data.maximum)
        runner = stack.enter_context(_executor(executor))
        rule = DispersionRule(model, data)
        started = time.perf_counter()
        point = run_updates(
            data,
            model,
            initial_state(data, model.n_components, seed, 0),
            runner,
            rule,
            method.max_iter,
            method.tol,
            lambda done, value: on_event(RunEvent("warm start", done, method.max_iter)),
        )
    row, col = data.labels.row_dim, data.labels.col_dim
    iterations, objective = zip(*point.objective, strict=True)
    return xr.Dataset(
        {
            "W": ((row, "component"), point.state.gather("rows")),
            "H": (("component", col), np.ascontiguousarray(point.state.gather("columns").T)),
            "objective": ("iteration", np.array(objective)),
        },
        coords={
            "component": np.arange(model.n_components),
            "iteration": list(iterations),
            **{name: (row, values) for name, values in data.labels.row_coords.items()},
            **{name: (col, values) for name, values in data.labels.col_coords.items()},
        },
        attrs={
            "method": method.name,
            "model": json.dumps(model.to_dict()),
            "dispersion": point.hyper.dispersion,
            "rate_w": point.hyper.rate_w,
            "rate_h": point.hyper.rate_h,
            "n_iter": int(iterations[-1]),
            "random_seed": str(seed),
            "seconds": time.perf_counter() - started,
        },
    )


# -- what the verbs share ---------------------------------------------------------


def _check_model(model: object) -> None:
    if not isinstance(model, TweedieNMF):
        raise OptionError(
            f"model must be a model such as TweedieNMF(n_components=20), got {model!r}"
        )


def _check_kinds(model: object, sampler: object, client: object) -> None:
    _check_model(model)
    if not isinstance(sampler, PSGLD):
        raise OptionError(f"sampler must be PSGLD(...) or PSGRRLD(...), got {sampler!r}")
    if client is not None:
        raise OptionError(
            "client= is reserved: this version runs on the cores of one machine; leave client "
            "out, or pass executor=TasksExecutor(scheduler) for a Dask scheduler in this process"
        )


@contextmanager
def _listener(progressbar: bool, callback: OnEvent | None) -> Iterator[OnEvent]:
    with progress_bar(progressbar) as show:

        def listen(event: RunEvent) -> None:
            show(event)
            (callback or ignore)(event)

        yield listen


@contextmanager
def _opened(
    V: Any, blocks: int | None, dtype: str, unstored: str | None, memory_limit: int | str | None
) -> Iterator[BlockedData]:
    data = as_blocks(V, blocks, dtype=dtype, unstored=unstored, memory_limit=memory_limit)
    try:
        yield data
    finally:
        if data is not V:
            data.close()


@contextmanager
def _executor(executor: str | Executor) -> Iterator[Executor]:
    made = make_executor(executor)
    try:
        yield made
    finally:
        if made is not executor:
            made.close()


def _run(setting: Setting, store: PathText | None, on_event: OnEvent) -> xr.DataTree:
    """Everything after the checks: compile, warm start, segments, results."""
    spec = _spec(setting)
    if store is not None:
        sink: RunStore | MemorySink = RunStore.create(fspath(store), spec)
    else:
        sink = MemorySink()
    try:
        compile_kernels(setting, on_event)
        driver = Driver(setting, sink, on_event)
        state = driver.start()
        driver.run(state)
        closing = _closing(state)
        if isinstance(sink, MemorySink):
            return sink.tree(spec, closing)
        sink.finish(closing)
    finally:
        if isinstance(sink, RunStore):
            sink.close()
    assert store is not None
    return open_run(fspath(store))


def _extended(options: RunOptions, meta: dict[str, Any], more: int) -> RunOptions:
    """The options of a run with ``more`` draws than its checkpoint holds."""
    done = max(0, meta["cycle"] - options.tune) // options.thin
    return replace(options, draws=max(done + more, done))


def _cells_of(spec: RunSpec) -> Cells | None:
    if spec.monitor_rows is None or spec.monitor_columns is None:
        return None
    return spec.monitor_rows.astype(np.int64), spec.monitor_columns.astype(np.int64)


@contextmanager
def _data_again(
    run: RunStore,
    V: Any,
    described: dict[str, Any],
    options: RunOptions,
    memory_limit: int | str | None,
) -> Iterator[BlockedData]:
    """The data the run began with: given again, kept in the run, or read from where they were."""
    saved = json.loads(run.attrs["data"])
    source = V
    if source is None:
        tree = open_run(run.path)
        if "observed_data" in tree.children:
            source = tree["observed_data"]["V"].load()
        elif described["source"]["location"] is not None:
            source = described["source"]["location"]
        else:
            raise DataError(
                f"the run at {run.path} was made from a {described['source']['kind']} object that "
                "is not kept with it; pass the data again: resume(path, V=...)"
            )
    grid = Grid(Bands(tuple(saved["row_offsets"])), Bands(tuple(saved["column_offsets"])))
    data = as_blocks(source, grid, dtype=options.dtype, memory_limit=memory_limit)
    try:
        if data.fingerprint != saved["fingerprint"]:
            raise DataError(
                f"the data are not those that the run at {run.path} began with: "
                f"got {data.fingerprint}, the run has {saved['fingerprint']}"
            )
        yield data
    finally:
        if data is not V:
            data.close()


def _kept(options: RunOptions) -> np.ndarray[Any, np.dtype[np.int64]]:
    cycles = options.kept_cycles() if options.keep_every else options.draw_cycles()
    return np.array(cycles, dtype=np.int64)


def _spec(setting: Setting) -> RunSpec:
    """What the run's results will hold, written down before the first draw."""
    data, model, options = setting.data, setting.model, setting.options
    index = _kept(options)
    cells: tuple[Any, Any] = setting.cells or (None, None)
    return RunSpec(
        shape=(*data.shape, model.n_components),
        chains=options.chains,
        draws=len(index),
        warmup_draws=Driver(setting, MemorySink(), ignore).warmup_count(),
        dims=(data.labels.row_dim, data.labels.col_dim),
        coords={
            **{name: (data.labels.row_dim, c) for name, c in data.labels.row_coords.items()},
            **{name: (data.labels.col_dim, c) for name, c in data.labels.col_coords.items()},
        },
        dtype=options.dtype,
        keep="draws" if options.keep_every else "moments",
        has_coarse=len(setting.sampler.tracks) > 1,
        monitor_rows=cells[0],
        monitor_columns=cells[1],
        draw_index=index,
        observed=data.to_numpy() if not data.source.lazy else None,
        attrs=_attrs(setting),
    )


def _attrs(setting: Setting) -> dict[str, Any]:
    data, options = setting.data, setting.options
    described = {
        "options": options.to_dict(),
        "model": setting.model.to_dict(),
        "sampler": setting.sampler.to_dict(),
        "source": {"kind": data.source.kind, "location": data.source.location},
    }
    return {
        "inference_library": "daskfactor",
        "inference_library_version": daskfactor.__version__,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "format_version": FORMAT_VERSION,
        "random_seed": str(options.seed),
        "model": json.dumps(setting.model.to_dict()),
        "sampler": json.dumps(setting.sampler.to_dict()),
        "data": json.dumps(
            {
                "shape": list(data.shape),
                "row_offsets": list(data.grid.rows.offsets),
                "column_offsets": list(data.grid.cols.offsets),
                "n_observed": data.total_observed,
                "mean": data.mean,
                "fingerprint": data.fingerprint,
            }
        ),
        "run": json.dumps(described),
        "keep": options.keep,
        "keep_every": options.keep_every,
        "draws": options.draws,
        "tune": options.tune,
        "thin": options.thin,
        "chains": options.chains,
        "dtype": options.dtype,
        "executor": setting.executor.name,
        **machine_attrs(),
    }


def _closing(state: RunState) -> dict[str, Any]:
    """Attributes that are known at the end: hyperparameters, seconds, roll-backs."""
    chains = state.chains
    hyper = chains[0].hyper
    return {
        "dispersion": float(np.mean([chain.hyper.dispersion for chain in chains])),
        "rate_w": hyper.rate_w,
        "rate_h": hyper.rate_h,
        "sampling_time": state.seconds + time.perf_counter() - state.started,
        "divergences": sum(len(chain.divergences) for chain in chains),
        "utilisation": chains[0].setting.executor.report.utilisation,
    }
