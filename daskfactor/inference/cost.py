"""`estimate_cost`: what a run takes in memory, on disk and in tasks, before it is begun."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import DTypeLike

from daskfactor.checks import whole_number
from daskfactor.data.grid import Grid
from daskfactor.data.outline import Wanted, outline
from daskfactor.errors import OptionError
from daskfactor.executors.choice import choose_executor
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Setting
from daskfactor.inference.footprint import FLOPS, Footprint, Place, count_cells
from daskfactor.inference.options import checked_lengths, plan_run
from daskfactor.inference.sampling import checked_sampler
from daskfactor.inference.session import verb
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.progress import OnEvent
from daskfactor.threads import available_cores

if TYPE_CHECKING:
    from daskfactor.data.blocks import BlockedData
    from daskfactor.data.storage import FloatType
    from daskfactor.executors.base import Executor


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
        rows = [(name, size_text(getattr(self, name))) for name, _ in BYTES]
        rows += [("peak while", self.phase), ("grid", f"{self.blocks} x {self.blocks} blocks")]
        rows += [
            ("cycles", f"{self.cycles} in {self.segments} segments"),
            ("draws kept", kept_text(self.draws_kept, self.keep_every)),
            ("block updates", f"{self.updates:,}"),
        ]
        for name, count in self.tasks.items():
            each = f"{self.tasks_per_cycle[name]:.3g} a cycle"
            rows.append((f"tasks ({name})", f"{count:,}, {each}" if count else "none"))
        rows.append(
            ("time", f"roughly {time_text(self.seconds)} at {FLOPS / 1e9:.0f} GF/s a thread")
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
    place = _place(executor, client, workers, lanes, store is not None)
    return cost_of(Footprint(setting, data, count_cells(monitor, data), place))


def _place(
    executor: str, client: Any, workers: int | None, lanes: int | None, stored: bool
) -> Place:
    """Where the run is to happen, with as many threads as it has there."""
    if executor not in ("lanes", "threads", "serial", "tasks", "ring"):
        raise OptionError(
            f'executor must be "auto", "threads", "serial", "tasks" or "ring", got {executor!r}'
        )
    threads = {} if client is None else client.nthreads()
    workers = len(threads) or 1 if workers is None else whole_number("workers", workers, 1)
    usual = max(threads.values(), default=available_cores())
    lanes = usual if lanes is None else whole_number("lanes", lanes, 1)
    return Place(executor, workers, 1 if executor == "serial" else lanes, stored)


def cost_of(footprint: Footprint) -> Cost:
    """The cost that a footprint comes to."""
    phases, place = footprint.phases, footprint.place
    phase = max(phases, key=lambda name: phases[name])
    worker, client = footprint.worker, phases[phase]
    cycles = footprint.options.cycles
    return Cost(
        data=footprint.data.decoded,
        data_memory=footprint.data.held,
        block=footprint.data.largest,
        bands=footprint.band,
        task=footprint.task,
        factors=footprint.factors,
        state=footprint.options.chains * footprint.state(footprint.arrays[0]),
        rollback=footprint.state(footprint.arrays[0]),
        checkpoint=footprint.checkpoint,
        segment_draws=footprint.segment_draws,
        result=footprint.result,
        store=footprint.store,
        worker=worker,
        client=client,
        peak=max(worker, client),
        phase=phase if client >= worker else "updating blocks on a worker",
        blocks=footprint.data.grid.blocks,
        cycles=cycles,
        segments=len(footprint.ends),
        draws_kept=footprint.options.kept,
        keep_every=footprint.options.keep_every,
        updates=footprint.updates,
        tasks_per_cycle={name: count / cycles for name, count in footprint.tasks.items()},
        tasks=footprint.tasks,
        flops=footprint.flops,
        seconds=footprint.flops / (FLOPS * place.workers * place.lanes),
    )


def size_text(count: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def kept_text(draws: int, every: int) -> str:
    """How many draws results hold, and which."""
    if not every:
        return "none, moments only"
    return f"{draws} a chain" + (f", every {every}th" if every > 1 else "")


def time_text(seconds: float) -> str:
    """Seconds, minutes, hours or days, whichever reads best."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1g} s"
