"""Estimate what a run takes in memory, on disk and in tasks, before it is begun."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_type_hints

import numpy as np
from dask.system import cpu_count
from dask.utils import format_bytes, format_time
from numpy.typing import DTypeLike

from daskfactor.checks import whole_number
from daskfactor.data.grid import Grid
from daskfactor.data.sources import Outline, outline
from daskfactor.errors import OptionError
from daskfactor.executors import choose_executor
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Setting
from daskfactor.inference.description import SMALL_DATA
from daskfactor.inference.options import checked_lengths, plan_run
from daskfactor.inference.samplers import checked_sampler
from daskfactor.inference.session import verb
from daskfactor.kernels.blockwise import SLAB
from daskfactor.kernels.views import tile_rows
from daskfactor.models.settings import FactorModel
from daskfactor.progress import OnEvent

if TYPE_CHECKING:
    from daskfactor.data.blocks import BlockedData
    from daskfactor.data.storage import FloatType
    from daskfactor.executors.base import Executor


MARGIN = 1.3
"""What runs take at most, in units of what their states, draws and buffers add up to.

Measured (tests/inference/measuring.py): copies on their way to results and checkpoints, and
what the C library keeps of memory that was given back in small pieces.
"""
WRITING_BYTES = 112 * 2**20
"""Chunks that are on their way to a store at one time; measured."""
COPIES = 3
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

    data: Annotated[int, "all decoded blocks"]
    data_memory: Annotated[int, "of them in memory, input not counted"]
    block: Annotated[int, "largest block"]
    bands: Annotated[int, "its two bands with all that travels with them"]
    task: Annotated[int, "block, bands and buffers of one update"]
    factors: Annotated[int, "one W and one H"]
    state: Annotated[int, "all arrays of all chains"]
    rollback: Annotated[int, "a chain's copy to go back to"]
    checkpoint: Annotated[int, "gathered after each segment"]
    segment_draws: Annotated[int, "draws waiting for a segment's end"]
    result: Annotated[int, "without a store, in memory"]
    store: Annotated[int, "with a store, on disk"]
    worker: Annotated[int, "peak of each worker"]
    client: Annotated[int, "peak of the process that runs it"]
    peak: Annotated[int, "largest of these two, beside input and interpreter"]
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
        rows = [
            (
                name.replace("_", " "),
                format_bytes(getattr(self, name)).replace("k", "K"),
                hint.__metadata__[0],
            )
            for name, hint in get_type_hints(type(self), include_extras=True).items()
            if hasattr(hint, "__metadata__")
        ]
        every = f", every {self.keep_every}th" if self.keep_every > 1 else ""
        kept = f"{self.draws_kept} a chain{every}" if self.keep_every else "none, moments only"
        rows += [
            ("peak while", self.phase, ""),
            ("grid", f"{self.blocks} x {self.blocks} blocks", ""),
            ("cycles", f"{self.cycles} in {self.segments} segments", ""),
            ("draws kept", kept, ""),
            ("block updates", f"{self.updates:,}", ""),
        ]
        for name, count in self.tasks.items():
            each = f"{self.tasks_per_cycle[name]:.3g} a cycle"
            rows.append((f"tasks ({name})", f"{count:,}, {each}" if count else "none", ""))
        speed = f"at {FLOPS / 1e9:.0f} GF/s a thread"
        rows.append(("time", f"roughly {format_time(self.seconds)} {speed}", ""))
        width = max(len(name) for name, _, _ in rows)
        lines = (f"{name:<{width}}  {text:>10}  {note}".rstrip() for name, text, note in rows)
        return "\n".join(lines)


@verb
def estimate_cost(
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
    """Estimate what :func:`sample` with the same arguments would take, from metadata alone.

    peak = max(reading, blocks + 1.3 (states + draws + results + buffers))

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
    data = outline(
        V,
        blocks=blocks,
        dtype=kind,
        unstored=unstored,
        balance=balance,
        memory_limit=memory_limit,
        entries=entries,
    )
    plain = cast("BlockedData", data)
    options = plan_run(plain, model.width, sampler, keep, seed=0, **lengths)
    setting = Setting(plain, model, sampler, options, cast("Executor", None))
    if executor == "auto":
        executor = "threads" if client is None else choose_executor(client, plain, model.width).name
    place = _place_of(executor, client, workers, lanes, store is not None)
    cells = _count_cells(monitor, data)
    sizes = _sizes(setting, data, cells, place)
    counts, longest = _operations(setting, place)
    return Cost(**_peaks(setting, data, sizes, cells, place, longest), **sizes, **counts)


def _place_of(
    executor: str, client: Any, workers: int | None, lanes: int | None, stored: bool
) -> _Place:
    """Decide where the run is to happen, with as many threads as it has there."""
    if executor not in ("lanes", "threads", "serial", "tasks", "ring"):
        raise OptionError(
            f'executor must be "auto", "threads", "serial", "tasks" or "ring", got {executor!r}'
        )
    threads = {} if client is None else client.nthreads()
    workers = len(threads) or 1 if workers is None else whole_number("workers", workers, 1)
    usual = max(threads.values(), default=cpu_count())
    lanes = usual if lanes is None else whole_number("lanes", lanes, 1)
    return _Place(executor, workers, 1 if executor == "serial" else lanes, stored)


def _sizes(setting: Setting, data: Outline, cells: int, place: _Place) -> dict[str, Any]:
    """Add up what there is: blocks, states, draws, results, and what one update works on."""
    options, sampler, width = setting.options, setting.sampler, setting.model.width
    itemsize, chains, tracks = data.dtype.itemsize, options.chains, len(sampler.tracks)
    factors = sum(data.shape) * width * itemsize
    tuning, drawing = (tracks * n * factors for n in sampler.carried(width))
    several = int(chains * sum(factors / track.coarseness for track in sampler.tracks))
    size = data.shape[0] * data.shape[1] * itemsize
    observed = size if data.keeps_copy and (place.stored or size <= SMALL_DATA) else 0
    moments = chains * (2 * factors + 16 * cells)
    rows, cols = max(data.grid.rows.sizes), max(data.grid.cols.sizes)
    bands = int((rows + cols) * width * itemsize * tuning / (tracks * factors))
    # Gradient, curvature and its weighted copy, in double precision where sums are taken so.
    buffers = 3 * (rows + cols) * width * 8 + (data.largest if data.buffered else 0)
    if not data.is_sparse:
        buffers += 2 * tile_rows(rows, cols, width, itemsize) * cols * itemsize
    checkpoint = int(chains * (tuning if options.tune else drawing))
    result = options.kept * several + moments + observed
    return {
        "data": data.decoded,
        "data_memory": data.held,
        "block": data.largest,
        "bands": bands,
        "task": buffers + bands * (2 if place.executor == "tasks" else 1),
        "factors": factors,
        "state": int(chains * tuning),
        "rollback": int(tuning),
        "checkpoint": checkpoint,
        "segment_draws": _most_waiting(setting) * several,
        "result": result,
        "store": result + 2 * checkpoint,
        "observed": observed,
    }


def _peaks(
    setting: Setting, data: Outline, sizes: dict[str, int], cells: int, place: _Place, longest: int
) -> dict[str, Any]:
    """Say when most of what there is exists at once, and how much that is."""
    options, waiting, observed = setting.options, sizes["segment_draws"], sizes.pop("observed")
    tasks = place.executor == "tasks"
    slab = DENSITY_BYTES * min(SLAB, int(data.n_stored.max()))
    threads = place.lanes * (sizes["task"] + slab)
    usual = data.grid.blocks**2 * longest * (TASK_BYTES if tasks else OPERATION_BYTES)
    usual += cells * CELL_BYTES * (options.chains + 1) * len(setting.sampler.tracks)
    usual += 0 if place.elsewhere else threads
    states = options.chains + 1 + (COPIES if place.elsewhere or tasks else 0)
    drawn = 3 * waiting + WRITING_BYTES if place.stored else waiting + sizes["result"] - observed
    tuning, drawing = setting.sampler.carried(setting.model.width)
    after = int(sizes["rollback"] * drawing / tuning) if options.tune else sizes["rollback"]
    phases = {
        "reading the data": data.loading,
        "tuning": usual + states * sizes["rollback"],
        "drawing": usual + states * after + drawn,
    }
    for name in ("tuning", "drawing"):
        phases[name] = data.held + observed + int(MARGIN * phases[name])
    phase = max(phases, key=lambda name: phases[name])
    client = worker = phases[phase]
    if place.elsewhere:
        moving = COPIES * sizes["rollback"] + waiting
        worker = (data.decoded + int(MARGIN * moving)) // place.workers + int(MARGIN * threads)
        phase = phase if client >= worker else "updating blocks on a worker"
    return {"client": client, "worker": worker, "peak": max(client, worker), "phase": phase}


def _operations(setting: Setting, place: _Place) -> tuple[dict[str, Any], int]:
    """Count what a run does, as its chains do it; the second is the cycles of the longest plan."""
    options, sampler, blocks = setting.options, setting.sampler, setting.data.grid.blocks
    # Plans end where segments do, and where hyperparameters are drawn.
    every = sampler.learns_every or options.cycles
    stops = sorted({*setting.ends, *range(every, options.cycles, every)})
    between = [n for n in stops if n <= options.tune or (n - options.tune) % options.thin]
    cycles = evaluations = plans = 0
    for coarseness in (track.coarseness for track in sampler.tracks):
        start = 0 if coarseness == 1 else setting.split
        cycles += (options.cycles - start) // coarseness
        evaluations += sum(stop > start for stop in between) + options.draws // coarseness
        plans += sum(stop > start for stop in stops)
    updates = blocks**2 * (sampler.work(blocks).visits * cycles + evaluations) * options.chains
    side = getattr(sampler.schedule, "groups", blocks)
    tasks = {
        "tasks": updates * side**2 // blocks**2,
        "ring": plans * options.chains * place.workers,
        "lanes": 0,
    }
    passes = cycles + EVALUATION * evaluations + 1.5 * setting.warm_passes
    flops = setting.work * options.chains * passes
    longest = max(stop - start for start, stop in itertools.pairwise([0, *stops]))
    return {
        "blocks": blocks,
        "cycles": options.cycles,
        "segments": len(setting.ends),
        "draws_kept": options.kept,
        "keep_every": options.keep_every,
        "updates": updates,
        "tasks_per_cycle": {name: count / options.cycles for name, count in tasks.items()},
        "tasks": tasks,
        "flops": flops,
        "seconds": flops / (FLOPS * place.workers * place.lanes),
    }, longest


def _most_waiting(setting: Setting) -> int:
    """Count the draws of one fine track that wait for the end of a segment, at most."""
    options = setting.options
    done = [max(0, end - options.tune) // options.thin for end in (0, *setting.ends)]
    kept = [count // options.keep_every if options.keep_every else 0 for count in done]
    return max(end - start for start, end in itertools.pairwise(kept))


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
