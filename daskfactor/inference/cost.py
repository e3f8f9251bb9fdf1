"""Estimate what a run takes in memory, on disk and in tasks, before it is begun."""

import itertools
import math
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

from dask.utils import format_bytes, format_time

from daskfactor import markup
from daskfactor.checks import whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.sources import unread_blocks, unread_source
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import OptionError
from daskfactor.inference.base import Sampler, choose_kernel, is_dense_pass, requested_sampler
from daskfactor.inference.inits import Init
from daskfactor.inference.program import relative_size
from daskfactor.inference.sampling import sample
from daskfactor.inference.session import blocks_for, component_count
from daskfactor.inference.setting import (
    Setting,
    checked_lengths,
    copies_in_memory,
    draw_bytes,
    learnt_bytes,
    monitored_cells,
    plan_run,
)
from daskfactor.inference.timing import EVALUATION, Place, chains_together, place_of, time_of
from daskfactor.kernels.blockwise import SLAB
from daskfactor.kernels.views import tile_rows
from daskfactor.models.settings import FactorModel
from daskfactor.options import BLOCKS_ONLY, Weighing

if TYPE_CHECKING:
    from daskfactor.executors.base import Executor


MARGIN = 1.3
"""Largest memory of runs, in units of the sum of their states, draws and buffers.

Measured (tests/inference/measuring.py): copies on their way to results and checkpoints, and
what the C library keeps of memory that was given back in small pieces.
"""
WRITING_BYTES = 112 * 2**20
"""Chunks that are on their way to a store at one time, at most; measured."""
WRITING_COPIES = 4
"""Copies that there are at most of what is written: as drawn, in chunks, and compressed."""
HANDED_ON = 2**27
"""Largest size of the pieces of bands that a client hands on or reads again."""
READ_COPIES = 6
"""Blocks' worth of memory that a thread takes to read one from a store: compressed, decompressed,
decoded, and what zarr holds of them at once; measured."""
COPIES = 3
"""States beside the chain's own where blocks are updated by tasks of this process."""
OPERATION_BYTES = 512
"""A planned block update with its address and its share of the evaluations."""
TASK_BYTES = 4096
"""A task in a Dask graph."""
LINK_BYTES = (3 * 8, 9 * 8)
"""Bytes for each entry of a factor while its link is drawn: real-valued, and with gamma priors."""
DENSITY_BYTES = 128
"""Memory of a thread for log-densities, for each entry of a slab."""
CELL_BYTES = 48
"""A monitored cell: its positions and its moments."""


@dataclass(frozen=True)
class Cost:
    """Estimated memory of a run in bytes, with notes that `print` shows, and its seconds.

    Attributes
    ----------
    data, data_memory
        All decoded blocks, and what of them is in memory beside arrays of the caller's own.
    block, bands, task
        The largest block, its two bands with all that travels with them, and what one update
        holds: block, bands and buffers.
    factors, state, rollback
        One W and one H, all arrays of all chains, and a chain's copy to go back to.
    checkpoint, segment_draws
        What is gathered after each segment, and draws that wait for its end.
    result, store
        The results, in memory without a store, and on disk with one.
    worker, client
        Peak of each worker, and of the process that runs it.
    sent
        From worker to worker in a cycle.
    peak
        What must fit beside the input and the interpreter, with its compiled kernels some
        300 MB.
    phase
        What the run does at its peak.
    blocks, cycles, segments
        B; passes over the data per chain; checkpoints.
    draws_kept, keep_every
        Draws of each chain that the results hold, and draws between two of them.
    updates
        Block updates and evaluations of all cycles; passes before these, as of a warm start,
        are not among them.
    tasks_per_cycle, tasks
        Dask tasks, if the run went by ``"tasks"``, ``"ring"`` or ``"threads"``.
    flops, cycle_seconds, seconds
        Floating-point operations, and a rough guess of the time of a cycle and of all.
    network_workers, network_data
        From how many workers on the network would be the limit, with two bands for each thread
        at least; and decoded data, of as many columns, below which it is with the workers that
        there are. None without a network.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> cost = dfac.estimate_cost(np.ones((200, 100)), dfac.TweedieNMF(3), draws=100, tune=50)
    >>> cost.cycles, cost.draws_kept, cost.peak < 2**30
    (150, 100, True)
    """

    data: Annotated[int, "all decoded blocks"]
    data_memory: Annotated[int, "of them in memory, the caller's array not counted"]
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
    sent: Annotated[int, "from worker to worker in a cycle"]
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
    cycle_seconds: float
    seconds: float
    network_workers: int | None = None
    network_data: int | None = None

    def __str__(self) -> str:
        """Return a table in readable units."""
        rows = self._rows()
        width = max(len(name) for name, _, _ in rows)
        lines = (f"{name:<{width}}  {text:>10}  {note}".rstrip() for name, text, note in rows)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return markup.titled("Cost of the run", markup.table(self._rows(), numbers=(1,)))

    def _rows(self) -> list[tuple[str, str, str]]:
        """Name, size in readable units, and what it is."""
        rows = [
            (name.replace("_", " "), _size(getattr(self, name)), hint.__metadata__[0])
            for name, hint in get_type_hints(type(self), include_extras=True).items()
            if hasattr(hint, "__metadata__")
        ]
        every = f", every {self.keep_every}th" if self.keep_every > 1 else ""
        draws = f"{self.draws_kept} a chain{every}" if self.keep_every else "none, moments only"
        rows += [
            ("peak while", self.phase, ""),
            ("grid", f"{self.blocks} x {self.blocks} blocks", ""),
            ("cycles", f"{self.cycles} in {self.segments} segments", ""),
            ("draws kept", draws, ""),
            ("block updates", f"{self.updates:,}", ""),
        ]
        for name, count in self.tasks.items():
            each = f"{self.tasks_per_cycle[name]:.3g} a cycle"
            rows.append((f"tasks ({name})", f"{count:,}, {each}" if count else "none", ""))
        each = format_time(self.cycle_seconds)
        rows.append(("time", f"roughly {format_time(self.seconds)}, {each} a cycle", ""))
        if self.network_workers is not None and self.network_data is not None:
            few, small = (
                f"{self.network_workers:,} workers on",
                f"{_size(self.network_data)} of data",
            )
            rows.append(("network", f"the limit from {few}, and below {small}", ""))
        return rows


def _size(count: int) -> str:
    return str(format_bytes(count).replace("k", "K"))


def estimate_cost(
    V: Any,
    model: FactorModel,
    sampler: Sampler | Literal["auto"] | None = "auto",
    draws: int | None = None,
    tune: int | None = None,
    chains: int | None = None,
    thin: int = 1,
    **options: Any,
) -> Cost:
    """Estimate what :func:`sample` with the same arguments would take.

    peak = blocks + 1.3 (states + draws + results + buffers)

    Parameters
    ----------
    V
        What :func:`as_blocks` returns or takes, or the shape (I, J) of a matrix. What is in memory
        is put on blocks as :func:`sample` does it, and so is a table with a line for each entry.
        Of a dask array, a file or a store only the size is used: its entries are taken to lie
        evenly and to be whole numbers, on which the choice of ``sampler="auto"`` can depend.
    model, sampler, draws, tune, chains, thin
        As for :func:`sample`.
    options
        All that :func:`sample` takes by name: ``keep``, ``monitor``, ``blocks`` and ``unstored``
        as there; of ``store`` only whether there is one counts; ``client`` and ``executor``,
        where ``"ring"`` and ``"tasks"`` need no client, and ``"auto"`` with a client takes the
        time of a block from its size; the others cost nothing.

        ``workers`` and ``lanes``: processes that share the work, and threads of each of them;
        those of the client, or one process with this machine's cores. ``network``: what a
        worker sends and takes in at once, as ``"10 Gbit/s"`` or in bytes a second; without it
        bands arrive as soon as they are sent. ``block_seconds``: what an update of the largest
        block takes on one thread, as a run on a cluster tells when it begins; from sizes
        if left out.

        ``dtype``, ``balance``, ``memory_limit`` and ``allow_empty`` as for :func:`as_blocks`.
        ``entries``: number of stored entries, where V is the shape of a sparse matrix, or a sparse
        input that does not say how many it has.

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
    The estimate is an upper one: tests compare it with the memory that runs take. Reading the
    input for the first time is not part of it. Of the network it is a rough one: every column band
    moves on after every round, in messages of 1.5 ms and the time of their bytes.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> cost = dfac.estimate_cost(np.ones((2000, 1000)), dfac.TweedieNMF(10), draws=100)
    >>> cost.blocks, cost.cycles
    (1, 600)
    >>> dfac.estimate_cost((2_000_000, 50_000), dfac.TweedieNMF(10), entries=10**9).data
    6064000256
    """
    bound = signature(estimate_cost).bind(V, model, sampler, draws, tune, chains, thin, **options)
    bound.apply_defaults()  # a TypeError has named what nobody takes
    args = SimpleNamespace(**bound.arguments)
    requested = requested_sampler(model, sampler)
    lengths = checked_lengths(requested, draws=draws, tune=tune, chains=chains, thin=thin)
    data = V if isinstance(V, BlockedData) else _opened(V, model, args, options)
    with nullcontext() if data is V else closing(data):
        model = model.placed(data.placed).sized(data.shape)
        kernel = choose_kernel(requested, model, data)
        on_device = args.device is not None
        plan = plan_run(data, model, kernel.options, args.keep, 0, on_device, **lengths)
        init = Init(starts=whole_number("starts", args.starts, 1))
        setting = Setting(data, model, kernel, plan, cast("Executor", None), init=init)
        place = place_of(args, data, model.width)
        counts, longest = _operations(setting, place)
        memory = _memory(setting, place, _count_cells(args.monitor, data), longest)
        return Cost(**memory, **counts, **time_of(setting, place, counts["flops"]))


def _opened(
    V: Any, model: FactorModel, args: SimpleNamespace, options: dict[str, Any]
) -> BlockedData:
    """Return blocks of the size that the data have, read only where nothing else tells it."""
    weighting = [name for name in ("uncertainty", "weights") if getattr(args, name) is not None]
    if len(weighting) > 1:
        raise OptionError("cells have uncertainty or weights, not both; pass one of them")
    if args.entries is not None:
        cells = math.prod(map(int, V)) if isinstance(V, tuple) else math.inf
        if whole_number("entries", args.entries, 0) > cells:
            raise OptionError(f"entries={args.entries} are more than there are cells, {cells}")
    source = None
    if not (model.joins or model.tensor):
        source = unread_source(V, ReadOptions.of(vars(args)), args.blocks, args.entries)
    if source is None:
        reading = {k: v for k, v in options.items() if k in READING and v is not None}
        return blocks_for(model, V, **reading)
    if not model.nonnegative:
        source = replace(source, usual="missing")
    layout = args.blocks, args.dtype or "float32", args.unstored, args.memory_limit
    return unread_blocks(source, *layout, component_count(model), *weighting)


OTHERS = "workers", "lanes", "network", "block_seconds", "entries", *BLOCKS_ONLY
"""Arguments of `estimate_cost` beside those of `sample`: of the place, and of `as_blocks`."""
READING = {"blocks", *BLOCKS_ONLY, *Weighing.__annotations__}
"""Arguments that `as_blocks` has, too."""
estimate_cost.__signature__ = Signature(  # type: ignore[attr-defined]  # for help(), too
    [
        *signature(sample).parameters.values(),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in OTHERS),
    ],
    return_annotation=Cost,
)


def _memory(setting: Setting, place: Place, cells: int, longest: int) -> dict[str, Any]:
    """Add up what there is, and say when most of it exists at once, and how much that is."""
    options, sampler, width = setting.options, setting.sampler, setting.model.width
    arrays = setting.kernel.arrays
    data, model = setting.data, setting.model
    itemsize, chains, tracks = data.dtype.itemsize, options.chains, len(sampler.tracks)
    tasks = place.executor == "tasks"
    # What there is.
    factors = sum(data.shape) * width * itemsize
    linked = [n for n, table in zip(data.shape, model.covariates, strict=True) if table is not None]
    sizes = {life: relative_size(arrays, width, life) for life in ("chain", "tune", "cycle")}
    always, gathered = 1 + sizes["chain"], sizes["cycle"]
    shifts = sum(linked) * width * itemsize + learnt_bytes(data, model, banded=True)
    tuning = int(tracks * (always + sizes["tune"]) * factors) + shifts
    drawing = int(tracks * always * factors) + shifts
    if model.learnt and "curvature" in arrays:
        drawing += tracks * factors  # rates that move take the metric with them
    checkpoint = chains * (tuning if options.tune else drawing)
    shares = sum(1 / track.stride for track in sampler.tracks)
    draw = int(chains * draw_bytes(data, model, shares))
    observed = data.shape[0] * data.shape[1] * itemsize * sum(copies_in_memory(data, place.stored))
    moments = chains * (2 * factors + 16 * cells)
    result = (len(options.index) * draw if options.keep_every else 0) + moments + observed
    waiting = _most_waiting(setting) * draw
    # What an update works on: gradient, curvature and its weighted copy, in double precision
    # where sums are taken so.
    rows, cols = max(data.grid.rows.sizes), max(data.grid.cols.sizes)
    bands = int((rows + cols) * width * itemsize * (always + sizes["tune"] + gathered))
    task = 3 * (rows + cols) * width * 8 + bands * (2 if tasks else 1)
    block, resident = int(data.sizes.max()), data.resident
    task += 0 if data.in_memory else block
    if data.source.kind == "blocks":
        resident += READ_COPIES * block * min(place.lanes, data.grid.blocks)
    if is_dense_pass(model, data):
        task += (2 * tile_rows(rows, cols, width, itemsize) + 1) * cols * itemsize
    # What exists at once.
    together = chains_together(setting, place)
    threads = max(together, min(place.lanes, data.grid.blocks)) * (
        task + DENSITY_BYTES * min(SLAB, int(data.n_stored.max()))
    )
    usual = data.grid.areas.size * longest * (TASK_BYTES if tasks else OPERATION_BYTES)
    usual += cells * CELL_BYTES * (chains + 1) * tracks
    # The settings that are arrays, those of rows with data, and a link's draw.
    usual += 2 * sum(array.nbytes for array in model.arrays().values())
    usual += LINK_BYTES[model.nonnegative] * width * max(linked, default=0)
    copies = COPIES if tasks else 0
    states = chains + together + copies
    inside = together * int(gathered * factors)  # of the chains that are in a cycle
    moving = states * tuning + inside + waiting
    if place.elsewhere:  # workers make and save their bands, but for first states of some kinds
        states = int(not (model.nonnegative and setting.init.made_by_bands))
        usual += HANDED_ON
    else:
        usual += threads + (1 + copies) * inside
    written = min(WRITING_BYTES, WRITING_COPIES * (result + checkpoint))
    draws = waiting + (written if place.stored else result - observed)
    phases = {
        "tuning": usual + states * tuning,
        "drawing": usual + states * (drawing if options.tune else tuning) + draws,
    }
    phase = max(phases, key=lambda name: phases[name])
    client = worker = resident + observed + int(MARGIN * phases[phase])
    if place.elsewhere:
        worker = (data.nbytes + int(MARGIN * moving)) // place.workers + int(MARGIN * threads)
        phase = phase if client >= worker else "updating blocks on a worker"
    return {
        "data": data.nbytes,
        "data_memory": resident,
        "block": block,
        "bands": bands,
        "task": task,
        "factors": factors,
        "state": chains * tuning,
        "rollback": tuning,
        "checkpoint": checkpoint,
        "segment_draws": waiting,
        "result": result,
        "store": result + 2 * checkpoint,
        "client": client,
        "worker": worker,
        "peak": max(client, worker),
        "phase": phase,
    }


def _operations(setting: Setting, place: Place) -> tuple[dict[str, Any], int]:
    """Count what a run does, as its chains do it; the second is the cycles of the longest plan."""
    options, sampler, blocks = setting.options, setting.sampler, setting.data.grid.blocks
    # Plans end where segments do, and where hyperparameters are drawn.
    every = setting.learns_every
    stops = sorted({*setting.ends, *range(every, options.cycles, every)})
    between = [n for n in stops if n <= options.tune or (n - options.tune) % options.thin]
    cycles = evaluations = plans = 0
    for stride in (track.stride for track in sampler.tracks):
        start = 0 if stride == 1 else setting.split
        cycles += (options.cycles - start) // stride
        evaluations += sum(stop > start for stop in between) + options.draws // stride
        plans += sum(stop > start for stop in stops)
    updates = blocks**2 * (setting.kernel.work.visits * cycles + evaluations) * options.chains
    side = getattr(setting.kernel.schedule, "groups", blocks)
    tasks = {
        "tasks": updates * side**2 // blocks**2,
        "ring": plans * options.chains * place.workers,
        "lanes": 0,
    }
    drawn = options.cycles // every * sum(variable.passes for variable in setting.model.learnt)
    drawn /= max(1.0, setting.kernel.work.passes)
    passes = (
        cycles
        + EVALUATION * (evaluations + drawn)
        + 1.5 * (setting.warm_passes[0] + setting.init.iterations)
    )
    flops = setting.work * options.chains * passes
    longest = max(stop - start for start, stop in itertools.pairwise([0, *stops]))
    return {
        "blocks": blocks,
        "cycles": options.cycles,
        "segments": len(setting.ends),
        "draws_kept": len(options.index) if options.keep_every else 0,
        "keep_every": options.keep_every,
        "updates": updates,
        "tasks_per_cycle": {name: count / options.cycles for name, count in tasks.items()},
        "tasks": tasks,
        "flops": flops,
    }, longest


def _most_waiting(setting: Setting) -> int:
    """Count the draws of one fine track that wait for the end of a segment, at most."""
    options = setting.options
    if not options.keep_every:
        return 0
    counts = [options.draws_after(end) // options.keep_every for end in (0, *setting.ends)]
    return max(end - start for start, end in itertools.pairwise(counts))


def _count_cells(monitor: Any, data: BlockedData) -> int:
    """Count the cells that ``monitor`` names."""
    if isinstance(monitor, str) and monitor == "missing":
        if data.fingerprint or data.is_sparse:
            return data.n_missing
        raise OptionError(
            'how many cells monitor="missing" names is not known before the data are read; pass '
            "the result of as_blocks"
        )
    cells = monitored_cells(monitor, data)
    return 0 if cells is None else len(cells[0])
