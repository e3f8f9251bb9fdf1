"""Draw from a posterior: the verb ``sample``, and how a stored run goes on."""

import json
from dataclasses import replace
from os import PathLike, fspath
from typing import Any, Unpack

import numpy as np
import xarray as xr
from scipy import sparse

from daskfactor.checks import warn, whole_number
from daskfactor.data.grid import diagonal_sizes
from daskfactor.data.sources import as_blocks
from daskfactor.errors import DataWarning, SamplingWarning
from daskfactor.executors import Executor, SerialExecutor
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.description import closing_attrs, kept_index, run_spec
from daskfactor.inference.options import (
    RunOptions,
    checked_lengths,
    monitored_cells,
    plan_run,
)
from daskfactor.inference.run import Run
from daskfactor.inference.samplers import checked_sampler, sampler_from_dict
from daskfactor.inference.session import Options, as_begun, session, session_again, verb
from daskfactor.models import model_from_dict
from daskfactor.models.settings import FactorModel
from daskfactor.progress import OnEvent, RunEvent
from daskfactor.results.sink import MemorySink, Sink
from daskfactor.results.store import RunStore

PathText = str | PathLike[str]

NOT_STARTED: dict[str, Any] = {
    "cycle": 0,
    "draws": 0,
    "warmup_draws": 0,
    "chains": [],
    "seconds": 0.0,
}
"""The checkpoint of a run whose warm start has not ended: resuming begins it again."""


@verb
def sample(
    V: Any,
    model: FactorModel,
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
        ``"auto"``: threads of this process (``"threads"``), or with a client whatever
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
    sampler = checked_sampler(model, sampler)
    lengths = {"draws": draws, "tune": tune, "chains": chains, "thin": thin}
    lengths = checked_lengths(sampler, lengths)
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
        options = plan_run(data, model.width, sampler, keep, seed=run.seed, **lengths)
        # Refuses a schedule that this grid cannot have, before anything is written.
        sampler.schedule.cycle(
            data.grid.blocks, diagonal_sizes(data.n_observed), np.random.default_rng(0)
        )
        cells = monitored_cells(monitor, data)
        setting = Setting(data, model, sampler, options, run.executor, cells)
        return _from_start(setting, store, overwrite, run.on_event)


def _from_start(
    setting: Setting, store: PathText | None, overwrite: bool, on_event: OnEvent
) -> xr.DataTree:
    """Do everything after the checks: compile, warm start, segments, results."""
    spec = run_spec(setting, store is not None)
    sink: Sink = MemorySink(spec)
    if store is not None:
        state = setting.model.fixed_arrays(), NOT_STARTED
        sink = RunStore.create(fspath(store), spec, overwrite=overwrite, state=state)
    with sink:
        _compile_kernels(setting, on_event)
        run = setting.run(sink, on_event)
        run.start()
        run.go()
        _report_trouble(run)
        sink.finish(closing_attrs(run))
    return sink.tree()


def go_on(
    held: RunStore,
    described: dict[str, Any],
    draws: int | None,
    V: Any,
    memory_limit: int | str | None,
    **options: Unpack[Options],
) -> None:
    """Finish a stored run of chains, with ``draws`` more; what `daskfactor.resume` calls."""
    arrays, meta = held.load_checkpoint()
    with as_begun(held):
        planned = RunOptions(**described["options"])
        model = model_from_dict(described["model"]).with_fixed_values(arrays)
        sampler = sampler_from_dict(described["sampler"])
    if draws is not None:
        planned = extended(planned, meta, whole_number("draws", draws, 1))
    sampler.check_lengths(planned.draws, planned.tune)
    with session_again(held, V, model, memory_limit, **options) as run:
        setting = Setting(run.data, model, sampler, planned, run.executor, held.cells)
        if draws is not None:
            text = json.dumps(described | {"options": planned.to_dict()})
            held.update_attrs({"run": text, "draws": planned.draws})
        index = kept_index(planned)
        if len(index) > held.draws:  # also after a kill between the two
            held.extend(len(index), index)
        complete = meta["chains"] and meta["cycle"] >= planned.cycles
        if not complete:
            _compile_kernels(setting, run.on_event)
        going = setting.run(held, run.on_event)
        going.restore(arrays, meta)
        going.go()
        if not complete:
            _report_trouble(going)
        # Also of a complete run, which may have been killed before it was closed.
        held.finish(closing_attrs(going, held.attrs if complete else None))


def _report_trouble(run: Run[Chain]) -> None:
    """Warn of roll-backs, and of what the chains found of model and sampler; once per run."""
    rolled_back = sum(len(chain.divergences) for chain in run.members)
    if rolled_back:
        smallest = min(chain.shrink for chain in run.members)
        warn(
            f"{rolled_back} segments diverged and were run again with a smaller step (down to "
            f"{smallest:.2g} of the one asked for); draws after that are marked in "
            "sample_stats/diverging; choose a smaller step to avoid this",
            SamplingWarning,
        )
    of_model = run.members[0].model_warning()
    if of_model is not None:
        warn(of_model, DataWarning)
    of_sampler = next(filter(None, (chain.sampler_warning() for chain in run.members)), None)
    if of_sampler is not None and not rolled_back:
        warn(of_sampler, SamplingWarning)


def extended(options: RunOptions, meta: dict[str, Any], more: int) -> RunOptions:
    """Give the options of a run with ``more`` draws than its checkpoint holds."""
    done = max(0, meta["cycle"] - options.tune) // options.thin
    return replace(options, draws=max(done + more, options.draws))


_compiled: set[tuple[object, ...]] = set()

TINY = np.array([[1.0, 2.0, np.nan], [3.0, 1.0, 2.0], [2.0, 2.0, 1.0]])


def _compile_kernels(setting: Setting, on_event: OnEvent) -> None:
    """Run a 3 x 3 matrix through the same kernels, once per kind of run and process."""
    dtype, data = setting.options.dtype, setting.data
    kind = (
        type(setting.model),
        setting.model.likelihood,
        dtype,
        data.is_sparse and data.unstored,
        setting.sampler.for_compilation(),
    )
    if kind in _compiled:
        return
    on_event(RunEvent("compile", 0, 1, message="once per process"))
    options = RunOptions(2, 2, 1, 1, 0, "draws", 1, dtype)
    matrix = sparse.csr_array(TINY) if data.is_sparse else TINY
    with as_blocks(matrix, 1, dtype=dtype, unstored=data.unstored) as tiny:
        cells = (np.zeros(1, np.int64), np.full(1, 2, np.int64))
        small = Setting(
            tiny,
            setting.model.for_compilation(),
            setting.sampler.for_compilation(),
            options,
            SerialExecutor(),
            cells,
        )
        chain = small.chain(0)
        chain.start()
        for end in (2, 4):
            chain.advance(end)
    _compiled.add(kind)
    on_event(RunEvent("compile", 1, 1))
