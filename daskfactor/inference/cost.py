"""`estimate_cost`: what a run takes in memory, on disk and in tasks, before it is begun."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import DTypeLike

from daskfactor.checks import whole_number
from daskfactor.data.grid import Grid
from daskfactor.data.outline import Outline, Wanted, outline
from daskfactor.errors import OptionError
from daskfactor.executors.choice import choose_executor
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Setting
from daskfactor.inference.description import SMALL_DATA
from daskfactor.inference.options import checked_lengths, plan_run
from daskfactor.inference.sampling import checked_sampler
from daskfactor.inference.session import verb
from daskfactor.kernels.blockwise import SLAB
from daskfactor.kernels.workspace import tile_rows
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.progress import OnEvent
from daskfactor.threads import available_cores

if TYPE_CHECKING:
    from daskfactor.data.blocks import BlockedData
    from daskfactor.data.storage import FloatType
    from daskfactor.executors.base import Executor


MARGIN = 1.35
"""What runs take at most, in units of what their states, draws and buffers add up to.

Measured (tests/inference/measuring.py): copies on their way to results and checkpoints, and
what the C library keeps of memory that was given back in small pieces.
"""
WRITING_BYTES = 72 * 2**20
"""Chunks that are on their way to a store at one time; measured."""
COPIES = 4
"""States beside the chain's own where blocks are updated by tasks or in other processes."""
OPERATION_BYTES = 512
"""A planned block update with its address and its share of the evaluations."""
TASK_BYTES = 4096
"""A task in a Dask graph."""
DENSITY_BYTES = 128
"""What a thread takes for log-densities, for each entry of a slab."""
CELL_BYTES = 48
"""A monitored cell: its positions and its moments."""
FLOPS = 4e10
"""Floating-point operations per second and thread that the kernels reach on usual machines."""
EVALUATION = 0.33
"""Work of an evaluation, in updates."""


class _Place(NamedTuple):
    """Where a run is to happen: its executor, processes, threads of each, store or not."""

    executor: str
    workers: int
    lanes: int
    stored: bool

    @property
    def elsewhere(self) -> bool:
        """Whether blocks are updated in other processes than the caller's."""
        return self.executor == "ring" or (self.executor == "tasks" and self.workers > 1)


@dataclass(frozen=True)
class Cost:
    """What a run takes; bytes unless something else is said.

    Attributes
    ----------
    data
        All decoded blocks, wherever they are.
    data_memory
        The part of them that the run holds in memory, the caller's arrays not counted.
    block, bands
        The largest block; the largest band of rows and of columns with all that
        travels with them.
    task
        What one block update works on: the block if it is not in memory, its two
        bands, and the thread's buffers.
    factors
        One W and one H.
    state
        All arrays that all chains carry while they tune.
    rollback
        The copy that a chain keeps to go back to.
    checkpoint
        What is gathered at the end of a segment.
    segment_draws
        Draws that wait for the end of the longest segment.
    result, store
        Kept draws, moments and copies of the data: in memory without a store, and
        on disk with one.
    client, worker
        Peak of the process that runs everything (on a cluster: of the client), and
        of each worker.
    peak
        Largest of the two: what must fit beside the input and the interpreter, with
        its compiled kernels some 300 MB.
    phase
        What the run does at its peak.
    blocks, cycles, segments
        B; passes over the data per chain; checkpoints.
    draws_kept, keep_every
        Draws of each chain that the results hold, and draws between two of them.
    updates
        Block updates and evaluations of the whole run.
    tasks_per_cycle, tasks
        Dask tasks, if the run went by ``"tasks"``, ``"ring"`` or ``"threads"``.
    flops, seconds
        Floating-point operations, and a rough guess of the time they take.
    """

    data: int
    data_memory: int
    block: int
    bands: int
    task: int
    factors: int
    state: int
    rollback: int
    checkpoint: int
    segment_draws: int
    result: int
    store: int
    worker: int
    client: int
    peak: int
    phase: str
    blocks: int
    cycles: int
    segments: int
    draws_kept: int
    keep_every: int
    updates: int
    tasks_per_cycle: dict[str, float]
    tasks: dict[str, int]
    flops: float
    seconds: float

    def __str__(self) -> str:
        """Table in readable units."""
        every = f", every {self.keep_every}th" if self.keep_every > 1 else ""
        kept = f"{self.draws_kept} a chain{every}" if self.keep_every else "none, moments only"
        rows = [(name, _size_text(getattr(self, name))) for name, _ in BYTES]
        rows += [("peak while", self.phase), ("grid", f"{self.blocks} x {self.blocks} blocks")]
        rows += [
            ("cycles", f"{self.cycles} in {self.segments} segments"),
            ("draws kept", kept),
            ("block updates", f"{self.updates:,}"),
        ]
        for name, count in self.tasks.items():
            each = f"{self.tasks_per_cycle[name]:.3g} a cycle"
            rows.append((f"tasks ({name})", f"{count:,}, {each}" if count else "none"))
        rows.append(
            ("time", f"roughly {_time_text(self.seconds)} at {FLOPS / 1e9:.0f} GF/s a thread")
        )
        notes = dict(BYTES)
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{name.replace('_', ' '):<{width}}  {text:>10}  {notes.get(name, '')}".rstrip()
            for name, text in rows
        ]
        return "\n".join(lines)


BYTES = (
    ("data", "all decoded blocks"),
    ("data_memory", "of them in memory, input not counted"),
    ("block", "largest block"),
    ("bands", "its two bands with all that travels with them"),
    ("task", "block, bands and buffers of one update"),
    ("factors", "one W and one H"),
    ("state", "all arrays of all chains"),
    ("rollback", "a chain's copy to go back to"),
    ("checkpoint", "gathered after each segment"),
    ("segment_draws", "draws waiting for a segment's end"),
    ("result", "without a store, in memory"),
    ("store", "with a store, on disk"),
    ("worker", "peak of each worker"),
    ("client", "peak of the process that runs it"),
    ("peak", "largest of these two, beside input and interpreter"),
)


@verb
def estimate_cost(
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
    store: Any = None,
    overwrite: bool = False,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | Grid | None = None,
    unstored: str | None = None,
    executor: str = "auto",
    callback: OnEvent | None = None,
    workers: int | None = None,
    lanes: int | None = None,
    entries: int | None = None,
    dtype: DTypeLike = "float32",
    balance: bool = False,
    memory_limit: int | str | None = None,
) -> Cost:
    """What :func:`sample` with the same arguments would take, from metadata alone.

    peak = max over phases of (blocks + states + copies + draws + results)

    Nothing is read but metadata, except to count the NaN of an array in memory, and
    no array of the size of the data or the factors is made.

    Parameters
    ----------
    V, model, sampler, draws, tune, chains, thin, keep, monitor, store, blocks, unstored
        As for :func:`sample`; of ``store`` only whether there is one counts. Sparse
        entries are taken to lie evenly; with the result of :func:`as_blocks` they are
        counted.
    client, executor
        As for :func:`sample`; ``"ring"`` and ``"tasks"`` need no client here. ``"auto"``
        with a client takes the time of a block from its size.
    random_seed, overwrite, progressbar, callback
        Cost nothing; they are there so that the arguments of :func:`sample` can be passed.
    workers, lanes
        Processes that share the work, and threads of each of them: those of the client,
        or one process with this machine's cores.
    entries
        Stored entries of a sparse input that does not say how many it has.
    dtype, balance, memory_limit
        As :func:`as_blocks` would be told.

    Returns
    -------
    Cost
        Bytes, tasks and a rough time; ``print`` shows a table.

    Raises
    ------
    DataError, ModelError, OptionError, GridError
        If data, model or options cannot be used.

    Notes
    -----
    The estimate is an upper one: tests hold it against the memory that runs take.
    """
    del random_seed, overwrite, progressbar, callback
    sampler = checked_sampler(model, sampler)
    lengths = {"draws": draws, "tune": tune, "chains": chains, "thin": thin}
    lengths = checked_lengths(sampler, lengths)
    kind = cast("FloatType", np.dtype(dtype))
    data = outline(V, Wanted(blocks, kind, unstored, balance, memory_limit, None, entries))
    plain = cast("BlockedData", data)
    options = plan_run(plain, model.width, sampler, keep, seed=0, **lengths)
    setting = Setting(plain, model, sampler, options, cast("Executor", None))
    if executor == "auto":
        executor = "threads" if client is None else choose_executor(client, plain, model.width).name
    place = _place_of(executor, client, workers, lanes, store is not None)
    return _cost(setting, data, _count_cells(monitor, data), place)


def _place_of(
    executor: str, client: Any, workers: int | None, lanes: int | None, stored: bool
) -> _Place:
    """Where the run is to happen, with as many threads as it has there."""
    if executor not in ("lanes", "threads", "serial", "tasks", "ring"):
        raise OptionError(
            f'executor must be "auto", "threads", "serial", "tasks" or "ring", got {executor!r}'
        )
    threads = {} if client is None else client.nthreads()
    workers = len(threads) or 1 if workers is None else whole_number("workers", workers, 1)
    usual = max(threads.values(), default=available_cores())
    lanes = usual if lanes is None else whole_number("lanes", lanes, 1)
    return _Place(executor, workers, 1 if executor == "serial" else lanes, stored)


def _cost(setting: Setting, data: Outline, cells: int, place: _Place) -> Cost:
    """Put together the sizes of what there is; only the peak is more than their sum."""
    options, sampler, grid = setting.options, setting.sampler, data.grid
    cycles, chains, blocks = options.cycles, options.chains, grid.blocks**2
    tracks, shares = len(sampler.tracks), sum(1 / own.coarseness for own in sampler.tracks)
    counts = _operations(setting, place.workers)

    each = setting.model.width * data.dtype.itemsize
    factors = sum(data.shape) * each
    tuning, drawing = (int(tracks * n * factors) for n in sampler.carried(setting.model.width))
    state = tuning if options.tune else drawing
    waiting = int(_most_waiting(setting) * chains * shares * factors)
    draws = int(options.kept * chains * shares * factors)
    size = data.shape[0] * data.shape[1] * data.dtype.itemsize
    observed = size if data.keeps_copy and (place.stored or size <= SMALL_DATA) else 0
    result = draws + chains * (2 * factors + 16 * cells) + observed

    rows, cols = max(grid.rows.sizes), max(grid.cols.sizes)
    bands = int((rows + cols) * each * tuning / max(1, tracks * factors))
    tile = 0 if data.is_sparse else tile_rows(rows, cols, setting.model.width, 4) * cols
    # Gradient, curvature and its weighted copy, in double precision where sums are taken so.
    buffers = 3 * (rows + cols) * setting.model.width * 8 + 2 * tile * data.dtype.itemsize
    buffers += data.largest if data.buffered else 0
    task = buffers + bands * (2 if place.executor == "tasks" else 1)
    threads = place.lanes * (task + DENSITY_BYTES * min(SLAB, int(data.n_stored.max())))

    # What there is at once besides blocks, by what the run does.
    plan = blocks * counts.longest * (TASK_BYTES if place.executor == "tasks" else OPERATION_BYTES)
    usual = plan + cells * CELL_BYTES * (chains + 1) * tracks + (0 if place.elsewhere else threads)
    states = chains + 1 + (COPIES if place.elsewhere or place.executor == "tasks" else 0)
    stored = 2 * waiting + WRITING_BYTES
    phases = {
        "reading the data": data.loading,
        "tuning": usual + states * state,
        "drawing": usual + states * (drawing if options.tune else state),
    }
    phases["drawing"] += stored if place.stored else result - observed + waiting
    for phase in ("tuning", "drawing"):
        phases[phase] = data.held + observed + int(MARGIN * phases[phase])
    client = max(phases.values())
    worker = client
    if place.elsewhere:
        share = data.decoded + int(MARGIN * (COPIES * state + waiting))
        worker = share // place.workers + int(MARGIN * threads)
    phase = max(phases, key=lambda name: phases[name])

    passes = 1.5 * setting.warm_passes * chains
    work = counts.cycles + EVALUATION * counts.evaluations + passes
    return Cost(
        data=data.decoded,
        data_memory=data.held,
        block=data.largest,
        bands=bands,
        task=task,
        factors=factors,
        state=chains * tuning,
        rollback=tuning,
        checkpoint=chains * state,
        segment_draws=waiting,
        result=result,
        store=result + 2 * chains * state,
        worker=worker,
        client=client,
        peak=max(worker, client),
        phase=phase if client >= worker else "updating blocks on a worker",
        blocks=grid.blocks,
        cycles=cycles,
        segments=len(setting.ends),
        draws_kept=options.kept,
        keep_every=options.keep_every,
        updates=counts.updates,
        tasks_per_cycle={name: count / cycles for name, count in counts.tasks.items()},
        tasks=counts.tasks,
        flops=setting.work * work,
        seconds=setting.work * work / (FLOPS * place.workers * place.lanes),
    )


def _most_waiting(setting: Setting) -> int:
    """Count the draws of one fine track that wait for the end of a segment, at most."""
    options = setting.options
    done = [max(0, end - options.tune) // options.thin for end in (0, *setting.ends)]
    kept = [count // options.keep_every if options.keep_every else 0 for count in done]
    return max(end - start for start, end in itertools.pairwise(kept))


class _Operations(NamedTuple):
    """Cycles and evaluations of all chains and tracks, what they come to, the longest plan."""

    cycles: int
    evaluations: int
    updates: int
    tasks: dict[str, int]
    longest: int


def _operations(setting: Setting, workers: int) -> _Operations:
    """Count what a run does, as its chains do it."""
    options, sampler, blocks = setting.options, setting.sampler, setting.data.grid.blocks
    # Plans end where segments do, and where hyperparameters are drawn.
    every = sampler.learns_every or options.cycles
    stops = sorted({*setting.ends, *range(every, options.cycles, every)})
    between = [n for n in stops if n <= options.tune or (n - options.tune) % options.thin]
    cycles = evaluations = plans = 0
    for coarseness in (track.coarseness for track in sampler.tracks):
        start = 0 if coarseness == 1 else setting.split
        cycles += options.chains * ((options.cycles - start) // coarseness)
        extra = sum(stop > start for stop in between)
        evaluations += options.chains * (extra + options.draws // coarseness)
        plans += options.chains * sum(stop > start for stop in stops)
    updates = blocks**2 * (sampler.work(blocks).visits * cycles + evaluations)
    side = getattr(sampler.schedule, "groups", blocks)
    tasks = {"tasks": updates * side**2 // blocks**2, "ring": plans * workers, "lanes": 0}
    longest = max(stop - start for start, stop in itertools.pairwise([0, *stops]))
    return _Operations(cycles, evaluations, updates, tasks, longest)


def _count_cells(monitor: Any, data: Outline) -> int:
    """Count the cells that ``monitor`` names.

    Raises
    ------
    OptionError
        If that is not known without reading the data.
    """
    if monitor is None:
        return 0
    if isinstance(monitor, tuple) and len(monitor) == 2:
        return int(np.size(monitor[0]))
    if not isinstance(monitor, str):
        return int(np.count_nonzero(getattr(monitor, "values", monitor)))
    if monitor == "missing" and data.n_missing is not None:
        return data.n_missing
    raise OptionError(
        'how many cells monitor="missing" names is not known before the data are read; pass '
        "the result of as_blocks"
        if monitor == "missing"
        else f'monitor takes "missing", a mask or (rows, columns), got {monitor!r}'
    )


def _size_text(count: float) -> str:
    """Write bytes in the largest unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def _time_text(seconds: float) -> str:
    """Write seconds, minutes, hours or days, whichever reads best."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1g} s"
