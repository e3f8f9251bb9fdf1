"""Draw from a posterior: the verb ``sample``, its one loop, and how a stored run goes on."""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack
from uuid import uuid4

import numpy as np
import xarray as xr

import daskfactor
from daskfactor.checks import warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import diagonal_sizes
from daskfactor.data.loading import UNCERTAINTY
from daskfactor.data.statistics import has_zeros
from daskfactor.errors import DataWarning, SamplingWarning
from daskfactor.executors import Executor
from daskfactor.inference.base import Sampler, checked_sampler, choose_kernel, requested_sampler
from daskfactor.inference.chain import Chain, OnShare, check_saved, learnt_variables
from daskfactor.inference.inits import Init, checked_init
from daskfactor.inference.registry import algorithm_from_dict
from daskfactor.inference.run_loop import RunLoop
from daskfactor.inference.session import device_attrs, session, session_again, version_errors
from daskfactor.inference.setting import (
    RunOptions,
    Setting,
    check_stride,
    checked_lengths,
    copies_in_memory,
    monitored_cells,
    plan_run,
)
from daskfactor.machine import machine_attrs, single_threaded_blas
from daskfactor.models import model_from_dict
from daskfactor.models.settings import FactorModel
from daskfactor.options import OnDevice, OnSampled, verb
from daskfactor.progress import OnEvent, RunEvent
from daskfactor.results.finalize import close_run
from daskfactor.results.summary import describe_trend
from daskfactor.runs.files import Checkpoints, Late
from daskfactor.runs.metadata import FORMAT_VERSION
from daskfactor.runs.run_writer import Sink, reserved, sink_of
from daskfactor.runs.schema import BIASED, FEATURES, STEPS, RunSpec

if TYPE_CHECKING:
    from daskfactor.runs.store import RunStore

PathText = str | PathLike[str]

NOT_STARTED: dict[str, Any] = {
    "cycle": 0,
    "draws": 0,
    "warmup_draws": 0,
    "chains": [],
    "seconds": 0.0,
}
"""The checkpoint of a run whose warm start has not ended: resuming begins it again."""
PROCESSORS, NEXT = "processors", "; "
"""Name of the device of a run without a GPU, and separator of the devices of a run."""


@verb
def sample(
    V: Any,
    model: FactorModel,
    sampler: Sampler | Literal["auto"] | None = "auto",
    draws: int | None = None,
    tune: int | None = None,
    chains: int | None = None,
    thin: int = 1,
    *,
    init: Any = "auto",
    starts: int = 1,
    random_seed: int | None = None,
    keep: str = "auto",
    monitor: Any = None,
    store: PathText | None = None,
    overwrite: bool = False,
    **options: Unpack[OnSampled],
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
        ``"auto"`` chooses by model, size and counts, the same on every machine:
        :class:`BlockHMC`, which is exact, where a pass over the data is quick; :class:`Gibbs`,
        exact too, for Poisson counts (``dispersion=1``) that are few; else :class:`SGHMC`,
        whose passes are worth most. Where this takes short steps only, or none (priors of
        shapes below ½ or learnt), :class:`BlockHMC` goes on up to 50 ms a pass, and beyond
        :class:`PSGLD`. A pass over sparse data visits what is stored: it is quick, where one
        over the same data as a dense array is not. The results say which, and why. Or a
        sampler, such as ``PSGLD(step=0.1)``.
    draws
        Number of draws per chain, one every ``thin`` cycles; by default 500 from one chain, or
        125 from each of four chains if the data form one block (below four million entries) and
        none of ``draws``, ``tune`` and ``chains`` is passed.
    tune
        Number of cycles per chain before the first draw, for tuning and burn-in; by default
        500, or 250 for each of four chains.
    chains
        Number of independent chains; several are needed to judge convergence, and together
        predict better than one. Those of data of one block run side by side on threads, unless
        the data are so small that threads gain nothing.
    thin
        Number of cycles per draw.
    init
        Starting point of the chains: ``"multiplicative"``, ``"random"``, ``"q-transform"``,
        ``"nndsvd"``, ``"nndsvdar"``, or the store of a run, whose last draws are used. From factors
        that are made for the data the sampler's warm start goes on: ``"multiplicative"``, the
        default, random ones of about equal size;
        ``"random"``, absolute values of normal numbers; ``"q-transform"``, leading singular
        vectors times matrices that were learnt on small synthetic problems; ``"nndsvd"``,
        non-negative parts of singular vectors; ``"nndsvdar"``, with random numbers where these
        are zero. Singular vectors take some tens of passes over the data, and as many as
        a fit where cells are missing. A result is taken as it is, unless the sampler is told a
        number of passes: of :func:`optimize` its point; of :func:`sample`, or the path of its
        store, the last draw of the chain of the same number and, for further chains, draws
        evenly back; of particles the heaviest. Hyperparameters are found anew. A
        :class:`GaussianMF` begins with ``"prior"``, draws of it, or a result.
    starts
        Number of short starts per chain; the chain continues from the one with the highest log
        density after 40 multiplicative updates of each (80 passes over the data).
    random_seed
        Any whole number; the same seed gives the same draws on every executor.
    keep : {"auto", "draws", "moments"}
        Draws to keep: ``"draws"`` keeps all, ``"moments"`` only running means and variances,
        ``"auto"`` as many evenly spaced draws as fit in 1 GiB. Moments are always kept.
    monitor
        Cells whose predicted mean and variance are accumulated over all draws: ``"missing"`` for
        all missing cells. Or a boolean mask, or (rows, columns) positions.
    store
        Directory, or URL in an object store (``s3://``, ``gs://``, ``az://``, ``memory://``; needs
        the extra ``cloud``), to write the run to while it goes on; :func:`resume` and
        :func:`open_run` take it. Credentials are taken from the environment. A directory has a
        checkpoint after every segment, an object store one every ten seconds or more.
    overwrite
        Whether to replace a run that the store holds; nothing else is ever replaced. It stays as
        it is until the new run has its first checkpoint; in an object store it is replaced at
        once, and earlier snapshots of the store hold it until they expire.
    progressbar
        Whether to show a progress bar on standard error.
    client
        A ``distributed.Client``: the run's operations go to its workers. The draws
        are the same bits as without one (on CPUs of one type).
    blocks
        B, the number of row and of column bands. By default 1 below four million entries (at
        10 components; fewer at more), where blocks cost more than they save, and else from chunks
        or shape: never from the machine. A store keeps it; draws depend on it.
    unstored
        What an entry that sparse input does not store means: ``"zero"`` or
        ``"missing"``.
    uncertainty
        Standard deviation of every cell, for a model with a normal law (a
        :class:`TweedieNMF` with ``beta=2``, a :class:`GaussianMF`); infinite makes a cell
        missing. Forms as for :func:`as_blocks`, which takes ``weights`` for other laws, too.
        The dispersion of the model, 1 if it is ``"auto"``, scales the variances. Means and
        variances of the data, from which ``"auto"`` rates are chosen, stay unweighted.
    executor
        Executor that updates the blocks: ``"auto"`` uses threads of this process
        (``"threads"``) or, on a cluster, the one that suits its workers and the time per block
        (``"ring"`` or ``"tasks"``); ``"serial"`` uses one thread. Or an executor object. All give
        the same draws.
    callback
        Called with a :class:`RunEvent` as the run goes on.
    device : {"cuda"} or CUDA, optional
        Device that updates the blocks: ``"cuda"`` is an NVIDIA GPU (extra ``cuda``), for
        :class:`PSGLD`, :class:`PSGRRLD`, :class:`SGHMC`, :class:`SGLD`,
        :class:`LangevinDynamics` and :class:`BlockHMC`. Or a :class:`CUDA` with options. Draws
        are the same on GPUs of one type, and have the law of those of processors, not their bits.
    rows, columns : str or tuple of str, optional
        Dimensions of an xarray.DataArray that are the rows, or the columns; the others, if one
        of the two is left out. Several lie behind one another, without places that have no
        observed entry at all (land, in a map of the sea), and :func:`predict` and
        :func:`unstack` give maps again. Of a table with a line for each entry its columns, as
        for :func:`as_blocks`.
    weights, values, header, table, layer, mask_var, storage_options
        What cells count for, and how V is read, as for :func:`as_blocks`.

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
    Şimşekli et al. 2017 (P-SGLD, P-SGRRLD); Şimşekli et al. 2015. All samplers but
    :class:`PSGRRLD` also draw the scale that W and H of a component share, W_k → c W_k and
    H_k → H_k / c, from its conditional: every 10 or 20 cycles, or as often as they draw learnt
    hyperparameters. Of a :class:`GaussianMF` with biases they draw the levels that biases and
    factors share, too. Intervals of W and of H cover for this reason.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15)).astype("float32")
    >>> V[3, 5] = np.nan  # a missing cell
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), monitor="missing", **run)
    >>> trace["posterior"]["W"].shape
    (1, 20, 20, 2)
    >>> dfac.monitored(trace)["mean"].shape
    (1,)
    """
    requested = requested_sampler(model, sampler)
    lengths = checked_lengths(requested, draws=draws, tune=tune, chains=chains, thin=thin)
    with (
        reserved(store, overwrite) as name,
        session(V, model, weighed=True, random_seed=random_seed, **options) as run,
    ):
        data = run.data
        model = model.placed(data.placed).sized(data.shape, data.labels.keys)
        kernel = choose_kernel(requested, model, data, run.on_device)
        selected: Sampler = kernel.options
        if requested is None:
            run.on_event(RunEvent("load", 1, 1, message=f"{selected.name}: {selected.reason}"))
        if data.weighting == UNCERTAINTY:
            model = model.with_uncertainty()
        planned = plan_run(data, model, selected, keep, run.seed, run.on_device, **lengths)
        origin = checked_init(init, starts, model, data, planned.chains)
        # Refuses a schedule that this grid cannot have, before anything is written.
        kernel.schedule.cycle(
            data.grid.blocks, diagonal_sizes(data.n_observed), np.random.default_rng(0)
        )
        cells = monitored_cells(monitor, data)
        setting = Setting(data, model, kernel, planned, run.executor, cells, init=origin)
        reason = "as asked for" if requested else selected.reason
        state = model.arrays() | origin.arrays(), NOT_STARTED
        # What is planned goes with this line: all labels are in it.
        with sink_of(run_spec(setting, store is not None, reason), name, state) as sink:
            return _carry_out(setting, sink, run.on_event, {}, NOT_STARTED)


def resume_run(
    store: "RunStore",
    described: dict[str, Any],
    draws: int | None,
    V: Any,
    memory_limit: int | str | None,
    **options: Unpack[OnDevice],
) -> None:
    """Finish a stored run of chains and add ``draws``; `daskfactor.resume` calls this."""
    arrays, meta = store.load_checkpoint()
    with version_errors(store):
        planned = RunOptions.from_dict(described["options"])
        model = model_from_dict(described["model"]).with_arrays(arrays)
        values = described["sampler"]
        stored = algorithm_from_dict(Sampler, values, "the run was made by a sampler")
        sampler = checked_sampler(model, stored)
        check_saved(arrays, meta["chains"], sampler.tracks)
        init = Init.from_dict(json.loads(store.attrs.get("init", "{}")), arrays)
        store.check_plan(planned.chains, planned.dtype, model.width, planned.index, longer=True)
    if draws is not None:
        more = planned.draws_after(meta["cycle"]) + whole_number("draws", draws, 1)
        planned = replace(planned, draws=max(more, planned.draws))
    check_stride(sampler, planned.draws, planned.tune)
    with session_again(store, V, model, memory_limit, **options) as run:
        model = model.placed(run.data.placed)
        kernel = sampler.kernel(model, run.data, run.on_device)
        setting = Setting(run.data, model, kernel, planned, run.executor, store.cells, init=init)
        if meta["cycle"] < planned.cycles:
            _note_device(store, run.executor)
        if draws is not None:
            text = json.dumps(described | {"options": planned.to_dict()})
            store.update_attrs({"run": text, "draws": planned.draws})
        if len(planned.index) > store.draws:  # also after a kill between the two
            store.extend(planned.index)
        _carry_out(setting, store, run.on_event, arrays, meta)


def _note_device(store: "RunStore", executor: Executor) -> None:
    """Note what a run goes on with, and warn if that is not what its last draws came from."""
    devices = store.attrs.get("device", PROCESSORS).split(NEXT)
    now = device_attrs(executor).get("device", PROCESSORS)
    if now != devices[-1]:
        store.update_attrs({"device": NEXT.join([*devices, now])})
        text = f"the run began on {devices[-1]} and goes on with {now}"
        warn(f"{text}: draws have the same law, and other bits than there", SamplingWarning)


# -- the loop ------------------------------------------------------------------------------


class ChainsRun(RunLoop):
    """The chains of a run on their way through its segments, and results as they come.

    Attributes
    ----------
    cycle
        Cycles that every chain has done and the sink has.
    """

    def __init__(self, setting: Setting, sink: Sink, on_event: OnEvent) -> None:
        super().__init__(setting.executor, None if sink.checkpoints is None else sink)
        self.setting, self.options = setting, setting.options
        self.sink, self.on_event = sink, on_event
        self.chains: list[Chain] = []
        self.cycle, self._before = 0, 0
        self._shown, self._passes = math.nan, 0

    @property
    def finished(self) -> bool:
        return self.cycle >= self.options.cycles

    def load(self, arrays: Mapping[str, Any], meta: dict[str, Any]) -> None:
        self.cycle = meta["cycle"]
        self.chains = [Chain(self.setting, number) for number in range(self.options.chains)]
        if meta["chains"]:
            for chain, chain_meta in zip(self.chains, meta["chains"], strict=True):
                chain.restore(arrays, chain_meta)
            return
        first, count = self.chains[0], len(self.chains)

        def start(number: int, on_share: OnShare) -> None:
            def report(done: int, total: int) -> None:
                self._passes = total
                on_share(done / max(total, 1))

            self.chains[number].start(report, first)

        def tell(done: float) -> None:
            if passes := self._passes:
                self.on_event(RunEvent("warm start", round(done * passes), passes * count))

        # The first chain decides for all whether counts are Poisson.
        self._side_by_side(range(1), start, tell)
        self._side_by_side(range(1, count), start, lambda done: tell(1 + done))
        self._agree()

    def advance(self) -> None:
        end = next(end for end in self.setting.ends if end > self.cycle)

        def advance(number: int, on_share: OnShare) -> None:
            self.chains[number].advance(end, on_share)

        self._side_by_side(
            range(len(self.chains)), advance, lambda done: self._tell_progress(end, done)
        )
        self._shown = self.chains[-1].log_likelihood()
        self._agree()
        self._before, self.cycle = self.cycle, end

    def _segment(self) -> None:
        super()._segment()
        for chain in self.chains:
            chain.forget()

    def _side_by_side(
        self,
        numbers: Sequence[int],
        work: Callable[[int, OnShare], None],
        tell: Callable[[float], None],
    ) -> None:
        """Run a function on some chains, in parallel where the executor can, and report progress.

        ``work`` is given the number of a chain, and what hears its share as it goes on.
        """
        shares, caller = dict.fromkeys(numbers, 0.0), threading.get_ident()
        stop = threading.Event()

        def do(number: int) -> None:
            def on_share(share: float) -> None:
                shares[number] = share
                if threading.get_ident() == caller:
                    tell(sum(shares.values()))
                elif stop.is_set():
                    raise InterruptedError("another chain, or the caller, ended the run")

            work(number, on_share)
            shares[number] = 1.0

        calls = [partial(do, number) for number in numbers]
        with single_threaded_blas():  # held for long: each change of it takes 30 µs
            self.setting.executor.run_chains(
                calls, self.setting.at_once, lambda: tell(sum(shares.values())), stop
            )

    def _agree(self) -> None:
        """Give all chains one dispersion, of all their estimates: densities then compare."""
        estimates = [chain.dispersion.latest for chain in self.chains]
        if all(estimate is not None for estimate in estimates):
            for chain in self.chains:
                chain.take_dispersion(estimates)

    def _tell_progress(self, end: int, done: float) -> None:
        """Tell that ``done`` of the chains have reached cycle ``end``, shares of one counted."""
        options, count = self.options, len(self.chains)
        tuning = end <= options.tune
        offset = 0 if tuning else options.tune
        total = (options.tune if tuning else options.cycles - options.tune) * count
        cycles = count * (self.cycle - offset) + done * (end - self.cycle)
        self.on_event(RunEvent("tune" if tuning else "draw", cycles, total, self._shown))

    def write(self, due: bool) -> None:
        for chain in self.chains:
            chain.write(self.sink, self.cycle, moments=due)
        if self._before <= self.options.tune < self.cycle:
            # With these a run that is cut short can be predicted from, too.
            self.sink.update_attrs(self.attrs())

    def snapshot(self, checkpoints: Checkpoints) -> tuple[Late, dict[str, Any]]:
        options = self.options
        snapshots = [chain.snapshot(checkpoints) for chain in self.chains]
        arrays = {name: value for arrays, _ in snapshots for name, value in arrays.items()}
        return arrays, {
            "cycle": self.cycle,
            "warmup_draws": sum(end <= min(self.cycle, options.tune) for end in self.setting.ends),
            "draws": options.draws_after(self.cycle) // options.spacing,
            "chains": [meta for _, meta in snapshots],
        }

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters as results name them; sampled noise is the mean over chains."""
        attrs = [chain.attrs() for chain in self.chains]
        return attrs[0] | {"dispersion": float(np.mean([each["dispersion"] for each in attrs]))}


def _carry_out(
    setting: Setting, sink: Sink, on_event: OnEvent, arrays: Mapping[str, Any], meta: dict[str, Any]
) -> xr.DataTree:
    """Run the warm start and the segments, and return results."""
    complete = meta["chains"] and meta["cycle"] >= setting.options.cycles
    if not complete:
        _announce_compilation(setting, on_event)
    with closing(ChainsRun(setting, sink, on_event)) as run:
        run.restore(arrays, meta)
        run.go()
    if not complete:
        _report_trouble(run)
    # Also of a complete run, which may have been killed before it was closed.
    stored_attrs = sink.attrs if complete else {}
    seconds = run.seconds if complete else run.elapsed
    busy = setting.executor.report.utilisation
    attrs = {
        **run.attrs(),
        "sampling_time": max(seconds, stored_attrs.get("sampling_time", 0.0)),
        "divergences": sum(len(chain.divergences) for chain in run.chains),
        "utilisation": stored_attrs.get("utilisation", busy),
    }
    close_run(sink, attrs)
    tree = sink.tree()
    moving = None if complete else describe_trend(tree)
    if moving is not None:
        warn(f"{moving}: tune longer", SamplingWarning)
    return tree


def _report_trouble(run: ChainsRun) -> None:
    """Warn of roll-backs, and of what the chains found of model and sampler; once per run."""
    rolled_back = sum(len(chain.divergences) for chain in run.chains)
    if rolled_back:
        smallest = min(chain.shrink for chain in run.chains)
        warn(
            f"{rolled_back} segments diverged and were run again with a smaller step (down to "
            f"{smallest:.2g} of the one asked for); draws after that are marked in "
            "sample_stats/diverging; choose a smaller step to avoid this",
            SamplingWarning,
        )
    of_model, of_sampler = zip(*(chain.warnings() for chain in run.chains), strict=True)
    if of_model[0]:
        warn(of_model[0], DataWarning)
    if not rolled_back and (texts := list(filter(None, of_sampler))):
        warn(texts[0], SamplingWarning)


_compiled: set[tuple[object, ...]] = set()
"""Kinds of runs that this process has begun, whose kernels it has by now."""


def _announce_compilation(setting: Setting, on_event: OnEvent) -> None:
    """Tell that the first steps of a new kind of run wait for kernels, on processors."""
    data, model, options = setting.data, setting.model, setting.options
    axes = len(data.grid.sides)
    kind = model.likelihood, model.width, options.dtype, data.unstored, axes, setting.sampler
    if kind not in _compiled and not setting.executor.on_device:
        on_event(RunEvent("compile", message="in the first cycles, then kept on disk"))
        _compiled.add(kind)


# -- what results tell of a run ------------------------------------------------------------


def run_spec(setting: Setting, stored: bool, reason: str = "as asked for") -> RunSpec:
    """Write down before the first draw what the results will hold, and why by this sampler."""
    data, model, sampler, options = setting.data, setting.model, setting.sampler, setting.options
    cells: tuple[Any, Any] = setting.cells or (None, None)
    parts = model.to_dict(), sampler.to_dict(), options.to_dict()
    lengths = ("keep", "keep_every", "draws", "tune", "thin", "chains")
    attrs = {name: getattr(options, name) for name in lengths} | {BIASED: int(sampler.biased)}
    attrs |= {"init": json.dumps(setting.init.to_dict()), "sampler_reason": reason}
    return RunSpec(
        shape=(*data.shape, model.width),
        chains=options.chains,
        draws=len(options.index),
        warmup_draws=sum(end <= options.tune for end in setting.ends),
        components=model.component_names(),
        keep="draws" if options.keep_every else "moments",
        has_coarse=len(sampler.tracks) > 1,
        statistics=(*STEPS, *setting.kernel.statistics),
        learnt=learnt_variables(setting),
        features={
            dim: covariates.names or range(covariates.shape[1])
            for dim, covariates in zip(FEATURES, model.covariates, strict=True)
            if covariates is not None
        },
        monitor_rows=cells[0],
        monitor_columns=cells[1],
        unfolds=model.tensor,
        draw_index=options.index,
        **described(data, *parts, setting.executor, stored, **attrs),
    )


def described(
    data: BlockedData,
    model: dict[str, Any],
    sampler: dict[str, Any],
    options: dict[str, Any],
    executor: Executor,
    stored: bool,
    **attrs: Any,
) -> dict[str, Any]:
    """Give the part of a `RunSpec` that tells of data and origin; ``attrs`` go in as well.

    ``options`` has ``seed`` and ``dtype``.
    """
    labels, weights, place = data.labels, data.weights, data.source.to_dict()
    copies_data, copies_weights = copies_in_memory(data, stored)
    if weights is not None:
        place["weights"] = weights.source.location
    run = {"options": options, "model": model, "sampler": sampler, "source": place}
    # Results tell where factors are of several matrices, and of a tensor.
    places = data.placed if data.placed and len(data.placed["factors"]) > 2 else None
    optional = {"weighting": data.weighting, "name": labels.name, "placed": places}
    about = {
        "shape": list(data.shape),
        "row_offsets": list(data.grid.rows.offsets),
        "column_offsets": list(data.grid.cols.offsets),
        "n_observed": data.total_observed,
        "mean": data.mean,
        "level": data.level,
        "fingerprint": data.fingerprint,
        "unstored": data.unstored,
        "balance": data.is_balanced,
        "allow_empty": any(has_zeros(data.counts(factor)) for factor in (0, 1)),
        **{name: value for name, value in optional.items() if value is not None},
        **labels.about,
        **labels.folded,
    }
    return {
        "dims": (labels.row_dim, labels.col_dim),
        "coords": labels.coords,
        "dtype": options["dtype"],
        "observed": data.to_numpy() if copies_data else None,
        "weights": weights.to_numpy() if weights is not None and copies_weights else None,
        "attrs": {
            "inference_library": "daskfactor",
            "inference_library_version": daskfactor.__version__,
            "trace_id": uuid4().hex,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "format_version": FORMAT_VERSION,
            "random_seed": str(options["seed"]),
            "model": json.dumps(model),
            "sampler": json.dumps(sampler),
            "data": json.dumps(about),
            "run": json.dumps(run),
            "dtype": options["dtype"],
            **labels.stacked,
            "executor": executor.name,
            "executor_reason": getattr(executor, "reason", "as asked for"),
            **machine_attrs(),
            **device_attrs(executor),
            **attrs,
        },
    }
