"""Foresee how long a run takes where it is to happen, and what its workers send each other."""

import math
import re
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from dask.system import cpu_count
from numpy.typing import NDArray

from daskfactor.checks import is_number, one_of, positive_number, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Cyclic, Passes
from daskfactor.errors import OptionError
from daskfactor.executors import choose_executor
from daskfactor.executors.threads import share_bands
from daskfactor.inference.base import is_dense_pass
from daskfactor.inference.program import relative_size
from daskfactor.inference.setting import Setting

FLOPS = 4e10
"""Floating-point operations per second and thread that the kernels reach on usual machines."""
EVALUATION = 0.33
"""Work of an evaluation, in updates."""
HOP = 1.5e-3
"""Seconds that a message takes from worker to worker, however short it is."""
ON_WIRE = 1538 / 1448
"""Bytes that Ethernet and TCP send for one of data: a frame with the gap behind it."""
RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(bits?|bytes?|b)(?:/s|ps)?", re.IGNORECASE)
PREFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


class Place(NamedTuple):
    """The place of a run: its executor, processes, threads of each, store or not.

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
        """True if blocks are updated in other processes than the caller's."""
        return self.executor == "ring" or (self.executor == "tasks" and self.workers > 1)


def place_of(args: Any, data: BlockedData, width: int) -> Place:
    """Decide where the run is to happen, with as many threads as it has there."""
    executor, client = args.executor, args.client
    executor = "threads" if executor == "lanes" else executor  # its name in earlier versions
    one_of("executor", executor, ("auto", "threads", "serial", "tasks", "ring"))
    threads = {} if client is None else client.nthreads()
    counts = {"workers": len(threads) or 1, "lanes": max(threads.values(), default=cpu_count())}
    workers, lanes = (
        usual if getattr(args, name) is None else whole_number(name, getattr(args, name), 1)
        for name, usual in counts.items()
    )
    if executor == "auto":
        target: Any = client or SimpleNamespace(  # of a cluster that stays as it is
            nthreads=lambda: dict.fromkeys(range(workers), lanes), cluster=SimpleNamespace()
        )
        alone = client is None and workers == 1
        executor = "threads" if alone else choose_executor(target, data, width).name
    network, block = args.network, args.block_seconds
    return Place(
        executor,
        workers,
        1 if executor == "serial" else lanes,
        args.store is not None,
        None if network is None else network_rate(network),
        None if block is None else positive_number("block_seconds", block),
    )


def network_rate(network: float | str) -> float:
    """Return bytes a second of a network: a number of them, or a text such as ``"10 Gbit/s"``.

    ``"1 Gb/s"`` are bits, ``"1 GB/s"`` bytes.
    """
    rate, match = network, RATE.fullmatch(network.strip()) if isinstance(network, str) else None
    if match is not None:
        bits = match[3] == "b" or match[3].lower().startswith("bit")
        rate = float(match[1]) * PREFIXES[match[2].lower()] / (8 if bits else 1)
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


def time_of(setting: Setting, place: Place, flops: float) -> dict[str, Any]:
    """Estimate the time of a run and, for several processes, the bytes sent in a cycle.

    ``flops`` are those of the whole run.
    """
    data, blocks = setting.data, setting.data.grid.blocks
    is_dense = is_dense_pass(setting.model, data)
    share = np.maximum(data.grid.areas if is_dense else data.n_stored, 1.0)
    share /= share.sum()
    alone = setting.work / FLOPS  # a cycle on one thread
    if place.block is not None:
        alone = place.block * setting.kernel.work.visits / float(share.max())
    parallel, network = float(min(place.workers * place.lanes, blocks)), {"sent": 0}
    if place.elsewhere:
        parallel, network = _over_workers(setting, place, alone, share.reshape(blocks, -1).sum(1))
    seconds = flops / setting.work * alone / (parallel * chains_together(setting, place))
    return {"cycle_seconds": alone / parallel, "seconds": seconds, **network}


def _over_workers(
    setting: Setting, place: Place, alone: float, share: NDArray[np.float64]
) -> tuple[float, dict[str, int]]:
    """Return by how much workers are faster than a thread, what they send, and limits of that.

    A worker has b of the B row bands. All column bands move on after every round, also of
    evaluations: in the order of the diagonals one of b leaves its worker, in a random order all
    but b - 1 of B - 1. A cycle
    takes as long as the longest of the work of the busiest worker, the bytes through its network
    card, and the way of one band through all rounds.

    ``alone`` are the seconds of a cycle on one thread, ``share`` is every row band's in the work.
    """
    data, kernel, blocks = setting.data, setting.kernel, setting.data.grid.blocks
    drawn = 1 / setting.options.thin
    alone *= 1 + EVALUATION * drawn
    bands = [n for n in share_bands(blocks, [place.lanes] * place.workers, None) if n]
    most, starts = max(bands), np.cumsum([0, *bands[:-1]])
    ordered = isinstance(kernel.schedule, Cyclic | Passes)
    leaves = (len(bands) > 1) / most if ordered else (blocks - most) / max(1, blocks - 1)
    updates = blocks * kernel.work.visits
    rounds = updates + blocks * drawn
    always, written, moments = _travelling(setting)
    moved = data.shape[1] * (rounds * always + updates * written + drawn * moments)
    card, sent = (place.network or math.inf) / ON_WIRE, moved * leaves
    hops = rounds * (leaves if ordered else leaves > 0)
    seconds = max(
        alone * (np.add.reduceat(share, starts) / np.minimum(bands, place.lanes)).max(),
        sent * most / blocks / card,
        alone / blocks + hops * (HOP + moved / rounds / blocks / card),
    )
    limits = {}
    if place.network is not None and moved:
        limits = _limits(alone * place.network / moved, place, blocks, data)
    return float(alone / seconds), {"sent": int(sent), **limits}


def _limits(work: float, place: Place, blocks: int, data: BlockedData) -> dict[str, int]:
    """Describe for how many workers, and for what size of data, the network is the limit.

    A worker of T threads does w / (P T) of the work, in units of the time that one card has for
    all hops, and sends (1 - 1/P) / P of them; hops grow with the bands, of which there are 2 P T
    at least.
    """
    work, busy_workers = work / place.lanes, blocks / (2 * place.lanes)
    fewest = math.inf if work >= 1 else 1 / (1 - work)
    if fewest > busy_workers:
        fewest = busy_workers * work + 1
    hops = (1 - 1 / place.workers) * max(1.0, place.workers / busy_workers)
    return {
        "network_workers": max(2, math.ceil(fewest)),
        "network_data": int(data.nbytes * hops / work),
    }


def _travelling(setting: Setting) -> tuple[float, float, float]:
    """Return the bytes that travel with a column: always, after updates, and of its moments.

    What a cycle gathers and uses up is taken to be there all the time.
    """
    width, arrays = setting.model.width, setting.kernel.arrays
    unit = width * setting.data.dtype.itemsize

    def size(changes: str) -> float:
        chosen = (x for x in arrays.values() if (x.life, x.changes) == ("chain", changes))
        return unit * sum(spec.size(width) for spec in chosen)

    return unit * (1 + relative_size(arrays, width, "cycle")), size("always"), size("record")
