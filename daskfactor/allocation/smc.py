"""Sequential Monte Carlo by Pólya urns: p(X) of an allocation model, without bias.

    p̂(X) = NB(T) T! / Π X! · mean of Π_t p(cell of token t | allocation of the tokens before)

over particles that take the tokens of X in a random order and draw their hidden parts from
the urns. Time is proportional to tokens times particles times states, whatever the size
of X; moves (``moving.py``) take up to 26 times that each.

Particles live on *islands* (``batches.py``): each has P of them, one order of the tokens,
its own resampling, and an unbiased estimate of p(X). log p(X) is the log of their mean and
its error comes from their spread. Numbers grow in two ways:

1. while log estimates of islands differ by more than `TRUSTED` (one standard deviation), P
   doubles and all islands start again, with other random numbers: a mean of such estimates
   rests on the luckiest island, and so does its error. Particles that move give up before
   if they are far from it: their variance falls as 1 / P;
2. then islands are added, twice as many as before, until the standard error is down to
   ``target``.

Source: Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
simulating Pólya urns", procedure BAM-SIS.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.batches import Island, Journey, run_island
from daskfactor.allocation.compiled_model import Urns
from daskfactor.allocation.limits import (
    ISLAND_BYTES,
    TRUSTED,
    check_memory,
    foretell,
    island_bytes,
    needed_particles,
    warn_of_error,
)
from daskfactor.allocation.moving import run_moving_island
from daskfactor.allocation.placement import place_counts
from daskfactor.checks import is_number, positive_number, whole_number
from daskfactor.errors import OptionError
from daskfactor.kernels.resampling import SCHEMES
from daskfactor.progress import OnEvent, RunEvent

Vector = NDArray[np.float64]
Map = Callable[[Callable[[Any, Any], Any], Any], list[Any]]

MOST_MOVES = 1000
"""Sweeps that the addresses of random numbers can tell apart."""
HOPELESS = 8
"""Particles that move stop growing if they need more than this times what is allowed."""
BATCH = 16
"""Islands between two messages; their results are in memory together."""


@dataclass(frozen=True)
class Settings:
    """How particles are run.

    Parameters
    ----------
    particles
        Per island, at first.
    islands
        Independent groups of particles, at first; at least 2.
    target
        Standard error of log p(X), in nats, at which to stop.
    max_particles
        On all islands together; with fewer than the target asks for, a SamplingWarning.
    moves
        Gibbs sweeps over a particle's past tokens, on a fixed schedule; 0 for none.
    resampling
        "systematic", "stratified", "residual", "multinomial", or None: never.
    threshold
        Share of P: below it, the effective number of particles makes an island resample.
    order
        "shared": the particles of an island take the tokens in one order; "own": each in
        one of its own, at 4 bytes a token and particle.
    thin
        Share of the tokens to keep; whoever compiles the data sees to it.
    keep
        "means" of the tables' counts, or the counts of all "particles" too.

    Raises
    ------
    OptionError
        If one of them is not allowed.
    """

    particles: int = 64
    islands: int = 8
    target: float = 0.1
    max_particles: int = 2**14
    moves: int = 1
    resampling: Literal["systematic", "stratified", "residual", "multinomial"] | None = "systematic"
    threshold: float = 0.5
    order: Literal["shared", "own"] = "shared"
    thin: float | None = None
    keep: Literal["means", "particles"] = "means"

    def __post_init__(self) -> None:
        whole_number("particles", self.particles, 1)
        whole_number("islands", self.islands, 2)
        positive_number("target", self.target)
        whole_number("max_particles", self.max_particles, 2)
        whole_number("moves", self.moves, 0)
        if self.moves > MOST_MOVES:
            raise OptionError(f"moves must be at most {MOST_MOVES}, got {self.moves}")
        _one_of("resampling", self.resampling, (*SCHEMES, None))
        _one_of("order", self.order, ("shared", "own"))
        _one_of("keep", self.keep, ("means", "particles"))
        if not (is_number(self.threshold) and 0 <= self.threshold <= 1):
            raise OptionError(f"threshold must be between 0 and 1, got {self.threshold!r}")
        if not (self.thin is None or (is_number(self.thin) and 0 < self.thin <= 1)):
            raise OptionError(f"thin must be None or in (0, 1], got {self.thin!r}")
        if self.particles * self.islands > self.max_particles:
            raise OptionError(
                f"max_particles must be at least particles times islands, "
                f"{self.particles * self.islands}, got {self.max_particles}"
            )


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join(repr(item) for item in allowed)
        raise OptionError(f"{name} must be one of {names}, got {value!r}")


class SMCResult(NamedTuple):
    """An estimate of log p(X) and what it was made from.

    Attributes
    ----------
    log_evidence, standard_error
        In nats.
    island_log_z : (N,)
        Log of each island's estimate of p(X).
    particles
        Per island, in the end.
    mean_counts : (cells,)
        Posterior mean of the flat counts of the `Urns`.
    edges : (E,)
        Tokens after which the weights were looked at.
    ess, resampled : (N, E)
        Effective number of particles there, and whether they were resampled.
    log_weights : (N, P)
        Of the final particles; the mean of their exponentials is the estimate of p(X).
    counts : (N, P, cells) or None
        Flat counts of the final particles.
    spread
        Standard deviation of ``island_log_z``.
    rounds
        Numbers of particles per island that were tried, the last one counting.
    reached
        Whether the standard error is down to the target.
    """

    log_evidence: float
    standard_error: float
    island_log_z: Vector
    particles: int
    mean_counts: Vector
    edges: NDArray[np.int64]
    ess: Vector
    resampled: NDArray[np.bool_]
    log_weights: Vector
    counts: NDArray[np.int32] | None
    spread: float
    rounds: tuple[int, ...]
    reached: bool


class _Sum:
    """Islands added up one by one, in their order."""

    def __init__(self, cells: int) -> None:
        self.level = -math.inf
        self.total = 0.0
        self.counts = np.zeros(cells)
        self.islands: list[Island] = []

    def add(self, island: Island) -> None:
        level = max(self.level, island.log_z)
        old = math.exp(self.level - level) if self.islands else 0.0
        new = math.exp(island.log_z - level)
        self.total = self.total * old + new
        self.counts = self.counts * old + island.mean_counts * new
        self.level = level
        self.islands.append(island._replace(mean_counts=np.empty(0)))

    @property
    def log_z(self) -> Vector:
        return np.array([island.log_z for island in self.islands])

    @property
    def spread(self) -> float:
        return float(np.std(self.log_z, ddof=1))

    @property
    def mean_counts(self) -> Vector:
        return np.asarray(self.counts / self.total)


def pooled(log_z: Vector) -> tuple[float, float]:
    """Log of the mean of exp(log_z), and its standard error.

    The error is the larger of the delta method's and the jackknife's.
    """
    size = len(log_z)
    top = log_z.max()
    scaled = np.exp(log_z - top)
    mean = scaled.mean()
    delta = float(scaled.std(ddof=1) / (math.sqrt(size) * mean))
    best = int(log_z.argmax())
    without = np.log1p(-np.delete(scaled, best) / scaled.sum())
    others = float(np.logaddexp.reduce(np.delete(log_z, best)) - top - math.log(scaled.sum()))
    left = np.insert(without, best, others)
    jackknife = math.sqrt((size - 1) * float(np.mean((left - left.mean()) ** 2)))
    return float(top + math.log(mean)), max(delta, jackknife)


def run_smc(
    urns: Urns,
    settings: Settings,
    seed: int,
    map_function: Map,
    on_event: OnEvent,
) -> SMCResult:
    """Estimate log p(X).

    Parameters
    ----------
    urns
        The model at its data.
    settings
        How many particles, and how they resample. ``thin`` has no effect here.
    seed
        Root of all random numbers; the result does not depend on where islands run.
    map_function
        ``map_function(function, items)`` is the list of ``function(item, workspace)``:
        `Executor.map`.
    on_event
        Told how many tokens times particles have been through, and of how many.

    Notes
    -----
    A lane's memory is one island: `Placement.particle_bytes` times P. How many islands are
    enough is decided by looking at them, so the estimate of p(X) is unbiased only when no
    island was added after the first ones.
    """
    moves = settings.moves if settings.resampling is not None else 0
    journey = Journey(
        placement=place_counts(urns, 0 if moves else None),
        values=urns.values,
        cells=urns.cells,
        particles=settings.particles,
        resampling=settings.resampling,
        least=settings.threshold,
        own=settings.order == "own",
        keep=settings.keep == "particles",
        seed=seed,
        round=0,
        moves=moves,
    )
    foretell(journey, settings.islands)
    rounds = [settings.particles]
    count = settings.islands
    while True:
        found = _Sum(urns.cells)
        _run(found, journey, count, map_function, on_event)
        growth = _growth(found, journey, settings)
        if growth == 1:
            break
        size = growth * journey.particles
        journey = journey._replace(particles=size, round=journey.round + 1)
        rounds.append(size)
    trusted = found.spread <= TRUSTED
    while trusted and pooled(found.log_z)[1] > settings.target:
        if 2 * count * journey.particles > settings.max_particles:
            break
        count *= 2
        _run(found, journey, count, map_function, on_event)
    result = _result(found, journey, tuple(rounds), settings)
    warn_of_error(result, journey, settings.target, settings.max_particles)
    return result


def _growth(found: _Sum, journey: Journey, settings: Settings) -> int:
    """How many times the particles to start again with; 1 to leave it at that.

    Twice as many; or, if they move, up to eight times, by the spread.
    """
    size = journey.particles * len(found.islands)
    room = settings.max_particles // size
    if journey.moves:
        room = min(room, ISLAND_BYTES // island_bytes(journey))
        if needed_particles(found.spread, size) > HOPELESS * settings.max_particles:
            return 1
    if found.spread <= TRUSTED or room < 2:
        return 1
    times = min(found.spread**2, 8.0, room) if journey.moves else 2.0
    return max(2, 1 << int(math.log2(times)))


def _run(found: _Sum, journey: Journey, count: int, map_function: Map, on_event: OnEvent) -> None:
    """Add islands up to a number of them."""
    check_memory(journey, count)
    work = float(journey.placement.tokens) * journey.particles
    runner = run_moving_island if journey.moves else run_island
    for batch in _batches(range(len(found.islands), count)):
        told = f"{count} islands of {journey.particles} particles"
        on_event(RunEvent("draw", work * len(found.islands), work * count, message=told))
        for island in map_function(partial(runner, journey), batch):
            found.add(island)
    on_event(RunEvent("draw", work * count, work * count))


def _batches(islands: Iterable[int]) -> Iterator[list[int]]:
    every = list(islands)
    for start in range(0, len(every), BATCH):
        yield every[start : start + BATCH]


def _result(
    found: _Sum, journey: Journey, rounds: tuple[int, ...], settings: Settings
) -> SMCResult:
    value, error = pooled(found.log_z)
    constant, islands = journey.placement.constant, found.islands
    kept = [island.counts for island in islands if island.counts is not None]
    return SMCResult(
        log_evidence=value + constant,
        standard_error=error,
        island_log_z=found.log_z + constant,
        particles=journey.particles,
        mean_counts=found.mean_counts,
        edges=journey.edges[1:],
        ess=np.stack([island.ess for island in islands]),
        resampled=np.stack([island.resampled for island in islands]) == 1,
        log_weights=np.stack([island.log_weights for island in islands]) + constant,
        counts=np.stack(kept) if kept else None,
        spread=found.spread,
        rounds=rounds,
        reached=error <= settings.target,
    )
