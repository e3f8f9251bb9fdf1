"""Foresee how long a run takes where it is to happen, and what its workers send each other."""

import math
import re
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from dask.system import cpu_count

from daskfactor.checks import is_number, one_of, positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors import choose_executor
from daskfactor.executors.plan import Action, CycleOptions, Round, build_plan
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import TUNING
from daskfactor.inference.program import Program
from daskfactor.inference.setting import Setting
from daskfactor.random import Stream, generator

FLOPS = 4e10
"""Floating-point operations per second and thread that the kernels reach on usual machines."""
EVALUATION = 0.33
"""Work of an evaluation, in updates."""
MOST_FORESEEN = 16_384
"""Block updates of a ring that is foreseen."""
RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bits?|bytes?|b)(?:/s|ps)?", re.IGNORECASE)
PREFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


class Place(NamedTuple):
    """Where a run is to happen: its executor, processes, threads of each, store or not.

    ``network`` are bytes a second, ``block`` seconds of the largest block's update.
    """

    executor: str
    workers: int
    lanes: int
    stored: bool
    network: float | None = None
    block: float | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether blocks are updated in other processes than the caller's."""
        return self.executor == "ring" or (self.executor == "tasks" and self.workers > 1)


def place_of(given: Any, data: BlockedData, width: int) -> Place:
    """Decide where the run is to happen, with as many threads as it has there."""
    executor, client, network, block = (
        given.executor,
        given.client,
        given.network,
        given.block_seconds,
    )
    if executor != "lanes":
        one_of("executor", executor, ("auto", "threads", "serial", "tasks", "ring"))
    threads = {} if client is None else client.nthreads()
    workers = (
        len(threads) or 1 if given.workers is None else whole_number("workers", given.workers, 1)
    )
    lanes = max(threads.values(), default=cpu_count())
    lanes = lanes if given.lanes is None else whole_number("lanes", given.lanes, 1)
    if executor == "auto":
        there: Any = client or SimpleNamespace(  # of a cluster that stays as it is
            nthreads=lambda: dict.fromkeys(range(workers), lanes), cluster=SimpleNamespace()
        )
        alone = client is None and workers == 1
        executor = "threads" if alone else choose_executor(there, data, width).name
    return Place(
        executor,
        workers,
        1 if executor == "serial" else lanes,
        given.store is not None,
        None if network is None else network_rate(network),
        None if block is None else positive_number("block_seconds", block),
    )


def network_rate(network: float | str) -> float:
    """Return bytes a second of a network: a number of them, or a text such as ``"10 Gbit/s"``.

    ``"1 Gb/s"`` are bits, ``"1 GB/s"`` bytes.
    """
    rate, found = network, RATE.fullmatch(network.strip()) if isinstance(network, str) else None
    if found is not None:
        bits = found[3] == "b" or found[3].lower().startswith("bit")
        rate = float(found[1]) * PREFIXES[found[2].lower()] / (8 if bits else 1)
    if not (is_number(rate) and 0 < rate < math.inf):  # type: ignore[operator]
        raise OptionError(
            'network is bytes a second, or a text such as "1 Gbit/s", "10 Gbit/s" or "1.2 GB/s", '
            f"got {network!r}"
        )
    return float(rate)


def chains_together(setting: Setting, place: Place) -> int:
    """Return how many chains are worked on at once: several where each has one block."""
    alone = place.executor != "threads" or not setting.at_once
    return 1 if alone else min(place.lanes, setting.options.chains)


def time_of(setting: Setting, place: Place, flops: float, longest: int) -> dict[str, Any]:
    """Say how long a run takes and, in other processes, what these send each other in a cycle.

    ``flops`` are those of the whole run, ``longest`` cycles those of its longest plan.
    """
    data, blocks = setting.data, setting.data.grid.blocks
    share = np.maximum(data.grid.areas if setting.visits_all else data.n_stored, 1.0)
    share /= share.sum()
    alone, speed = setting.work / FLOPS, 1.0  # a cycle on one thread
    if place.block is not None:
        updates = alone / setting.sampler.work(blocks).visits
        speed = place.block / (updates * float(share.max()))
    parallel, sent, limits = float(min(place.workers * place.lanes, blocks)), 0, {}
    if place.elsewhere:
        from daskfactor.executors.traffic import RingClock  # `distributed` takes long to import

        options = setting.options
        cycles = max(1, min(longest, options.draws * options.thin, MOST_FORESEEN // blocks**2))
        plan = _drawing_plan(setting, cycles)
        evaluations = sum(part.ops[0].action == Action.EVALUATE for part in plan) / blocks
        whole = alone * speed * (cycles + EVALUATION * evaluations)
        program = Program(setting.sampler, setting.model.likelihood, 0.0, None, (0, 0))
        threads, each = [place.lanes] * place.workers, share * whole * blocks / len(plan)
        ring = plan, program, _column(setting), data.grid.cols.sizes, threads, each
        clock = RingClock(*ring, place.network or math.inf).run()
        parallel, sent = float(whole / clock.seconds), int(clock.sent.sum() / cycles)
        if place.network is not None and clock.hops:
            limits = _limits(whole * place.network / clock.hops, place, blocks, data)
    return {
        "sent": sent,
        "cycle_seconds": alone * speed / parallel,
        "seconds": flops * speed / (FLOPS * parallel * chains_together(setting, place)),
        **limits,
    }


def _limits(work: float, place: Place, blocks: int, data: Any) -> dict[str, int]:
    """Say from how many workers on, and below which size of data, the network is the limit.

    A worker of T threads does w / (P T) of the work, in units of the time that one card has for
    all hops, and sends (1 - 1/P) / P of them; hops grow with the bands, of which there are 2 P T
    at least.
    """
    work, kept_busy = work / place.lanes, blocks / (2 * place.lanes)
    fewest = math.inf if work >= 1 else 1 / (1 - work)
    if fewest > kept_busy:
        fewest = kept_busy * work + 1
    hops = (1 - 1 / place.workers) * max(1.0, place.workers / kept_busy)
    return {
        "network_workers": max(2, math.ceil(fewest)),
        "network_data": int(data.sizes.sum() * hops / work),
    }


def _column(setting: Setting) -> FactorBand:
    """Make a column band of one row, with arrays of the sizes that those of a chain have.

    What a cycle gathers and uses up is taken to be there all the time.
    """
    width, sampler = setting.model.width, setting.sampler
    band = FactorBand(0, np.zeros((1, width), setting.data.dtype))
    sizes = sampler.sizes(width) | {"gathered in a cycle": sampler.gathered(width)}
    for name, size in sizes.items():
        if name not in TUNING:
            band.arrays[name] = np.zeros(round(size * band.values.nbytes), np.uint8)
    return band


def _drawing_plan(setting: Setting, cycles: int) -> tuple[Round, ...]:
    """Plan some cycles as a chain does that draws."""
    options = setting.options

    def wanted(cycle: int) -> CycleOptions:
        drawn = options.draw_index(cycle) is not None
        return CycleOptions(record=drawn, keep=drawn, evaluate=drawn)

    return build_plan(
        setting.sampler.schedule,
        setting.data.n_observed,
        range(options.tune, options.tune + cycles),
        lambda cycle: generator(options.seed, 0, Stream.SCHEDULE, cycle),
        wanted,
    )
