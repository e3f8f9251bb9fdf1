"""The public verbs that run something: ``sample``, ``resume``, ``optimize``."""

import json
import time
from os import fspath
from typing import Any

import xarray as xr

from daskfactor.checks import whole_number
from daskfactor.executors import Executor
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Setting
from daskfactor.inference.compilation import compile_kernels
from daskfactor.inference.monitor import monitored_cells
from daskfactor.inference.options import RunOptions, choose_keep
from daskfactor.inference.point import Method, check_method, fit_point, point_dataset
from daskfactor.inference.run import Driver
from daskfactor.inference.samplers import sampler_from_dict
from daskfactor.inference.session import session, session_again, verb
from daskfactor.inference.setup import (
    PathText,
    cells_of,
    check_kinds,
    check_model,
    check_schedule,
    closing_attrs,
    default_sampler,
    extended,
    kept_index,
    model_from_dict,
    report_trouble,
    run_from_start,
    with_fixed_values,
)
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.progress import OnEvent, RunEvent
from daskfactor.results.store import RunStore
from daskfactor.results.trace import open_run


@verb
def sample(
    V: Any,
    model: TweedieNMF | GaussianMF,
    sampler: Sampler | None = None,
    draws: int = 500,
    tune: int = 500,
    chains: int = 1,
    thin: int = 1,
    *,
    random_seed: int | None = None,
    keep: str = "auto",
    monitor: Any = None,
    store: PathText | None = None,
    overwrite: bool = False,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | None = None,
    unstored: str | None = None,
    executor: str | Executor = "auto",
    callback: OnEvent | None = None,
) -> xr.DataTree:
    """Draw factors from the posterior of a matrix: W, H ~ p(W, H | V).

    One draw is taken per cycle, and one cycle is one pass over the data: B parts
    of B blocks each.

    Parameters
    ----------
    V : array (I, J)
        NumPy array (NaN = missing), masked array, scipy or pydata/sparse matrix, dask
        array of any of these, zarr array, path or URL of one or of a store that
        :func:`convert` wrote, AnnData, xarray.DataArray, pandas.DataFrame, or the
        result of :func:`as_blocks`, which has further options: double precision, a
        limit of memory, even blocks, rows and columns without entries.
    model
        What the data are taken to be.
    sampler
        :class:`PSGLD` (the default) or :class:`PSGRRLD`; :class:`SGHMC` for a
        :class:`GaussianMF`.
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
    overwrite
        Whether to replace a run that the store holds; nothing else is ever replaced.
    progressbar
        Whether to show a progress bar on standard error.
    client
        A ``distributed.Client``: the run's operations go to its workers. The draws
        are the same bits as without one (on CPUs of one type).
    blocks
        B, the number of row and of column bands; from chunks or shape by default.
    unstored
        What an entry that sparse input does not store means: ``"zero"`` or
        ``"missing"``.
    executor
        ``"auto"``: threads of this process (``"lanes"``), or with a client whatever
        suits its workers and the time a block takes (``"ring"`` or ``"tasks"``);
        ``"serial"``, or an executor object. All give the same draws.
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
    DataError, ModelError, OptionError, GridError
        If data, model or options cannot be used, before anything is written.
    DivergenceError
        If a chain diverges again and again.
    StoreError
        If the store exists already or cannot be written.

    Notes
    -----
    Şimşekli et al. 2017 (P-SGLD, P-SGRRLD); Şimşekli et al. 2015.
    """
    check_model(model)
    sampler = default_sampler(model) if sampler is None else sampler
    check_kinds(model, sampler)
    counts = {
        "draws": whole_number("draws", draws, 1),
        "tune": whole_number("tune", tune, 0),
        "chains": whole_number("chains", chains, 1),
        "thin": whole_number("thin", thin, 1),
    }
    sampler.check_lengths(counts["draws"], counts["tune"])
    with session(
        V,
        model,
        blocks,
        unstored,
        random_seed=random_seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as run:
        data = run.data
        sampler.check_data(data)
        bytes_per_draw = sum(data.shape) * model.width * data.dtype.itemsize
        shares = [1 / track.coarseness for track in sampler.tracks]
        options = RunOptions(
            **counts,
            seed=run.seed,
            keep=keep,  # type: ignore[arg-type]  # checked by choose_keep
            keep_every=choose_keep(
                keep,
                counts["draws"],
                bytes_per_draw * counts["chains"] * sum(shares),
                round(1 / min(shares)),
            ),
            dtype=str(data.dtype),
        )
        check_schedule(sampler, data)
        cells = monitored_cells(monitor, data)
        setting = Setting(data, model, sampler, options, run.executor, cells)
        return run_from_start(setting, store, overwrite, run.on_event)


def resume(
    store: PathText,
    draws: int | None = None,
    *,
    V: Any = None,
    progressbar: bool = True,
    client: Any = None,
    executor: str | Executor = "auto",
    memory_limit: int | str | None = None,
    callback: OnEvent | None = None,
) -> xr.DataTree:
    """Go on with chains where their store stopped; arguments as for :func:`daskfactor.resume`.

    Raises
    ------
    StoreError, StoreFormatError
        If there is no run there, or it is damaged or of a newer version.
    DataError
        If ``V`` is needed, or is not the data that the run began with.
    """
    with RunStore.open(fspath(store), mode="r+") as held:
        arrays, meta = held.load_checkpoint()
        described = json.loads(held.attrs["run"])
        options = RunOptions(**described["options"])
        if draws is not None:
            options = extended(options, meta, whole_number("draws", draws, 1))
        model = with_fixed_values(model_from_dict(described["model"]), arrays)
        sampler = sampler_from_dict(described["sampler"])
        sampler.check_lengths(options.draws, options.tune)
        with session_again(
            held,
            V,
            model,
            memory_limit,
            progressbar=progressbar,
            client=client,
            executor=executor,
            callback=callback,
        ) as run:
            cells = cells_of(held.spec)
            setting = Setting(run.data, model, sampler, options, run.executor, cells)
            if draws is not None:
                described["options"] = options.to_dict()
                held.update_attrs({"run": json.dumps(described), "draws": options.draws})
            index = kept_index(options)
            if len(index) > held.draws:  # also after a kill between the two
                held.extend(len(index), index)
            complete = meta["chains"] and meta["cycle"] >= options.cycles
            driver = Driver(setting, held, run.on_event)
            if not complete:
                compile_kernels(setting, run.on_event)
            state = driver.restart(arrays, meta)
            driver.run(state)
            if not complete:
                report_trouble(state)
            # Also of a complete run, which may have been killed before it was closed.
            held.finish(closing_attrs(state, held.attrs if complete else {}))
    return open_run(fspath(store))


@verb
def optimize(
    V: Any,
    model: TweedieNMF | GaussianMF,
    method: Method | None = None,
    *,
    random_seed: int | None = None,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | None = None,
    unstored: str | None = None,
    executor: str | Executor = "auto",
    callback: OnEvent | None = None,
) -> xr.Dataset:
    """One point estimate of the factors: the fit that the samplers start from.

    Parameters
    ----------
    V
        The data, as for :func:`sample`.
    model
        What the data are taken to be; its priors count as penalties.
    method
        :class:`MultiplicativeUpdates` or :class:`DSGD`; by default the former for a
        :class:`TweedieNMF`, the latter for a :class:`GaussianMF`.
    random_seed
        Seed of the random start.
    progressbar, client, blocks, unstored, executor, callback
        As for :func:`sample`.

    Returns
    -------
    xarray.Dataset
        ``W`` (row, component), ``H`` (component, column), ``objective``
        (iteration): Σ d_β(v|μ) + φ(λ_w ΣW + λ_h ΣH) with -φ(a - 1) Σ log for gamma
        priors of shape a, or φ times the Gaussian penalties.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or options cannot be used.

    Notes
    -----
    Févotte and Idier 2011; Gemulla et al. 2011.
    """
    check_model(model)
    method = check_method(method, model)
    with session(
        V,
        model,
        blocks,
        unstored,
        random_seed=random_seed,
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as run:
        started = time.perf_counter()
        point = fit_point(
            run.data,
            model,
            method,
            run.executor,
            run.seed,
            lambda done, value: run.on_event(RunEvent("warm start", done, method.max_iter)),
        )
        made = {"random_seed": str(run.seed), "seconds": time.perf_counter() - started}
        return point_dataset(run.data, model, method, point, made)
