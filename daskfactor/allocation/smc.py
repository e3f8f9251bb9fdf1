"""Sequential Monte Carlo by Pólya urns: p(X) of an allocation model, without bias.

    p̂(X) = NB(T) T! / Π X! · mean of Π_t p(cell of token t | allocation of the tokens before)

over particles that take the tokens of X in a random order and draw their hidden parts from
the urns. Time is proportional to tokens times particles times states, whatever the size
of X.

Particles live on *islands* (``islands.py``): each has P of them, one order of the tokens,
its own resampling, and an unbiased estimate of p(X). log p(X) is the log of their mean and
its error comes from their spread. Numbers grow in two ways:

1. while log estimates of islands differ by more than `TRUSTED` (one standard deviation), P
   doubles and all islands start again, with other random numbers: a mean of such estimates
   rests on the luckiest island, and so does its error;
2. then islands are added, twice as many as before, until the standard error is down to
   ``target``.

Source: Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
simulating Pólya urns", procedure BAM-SIS.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.islands import Island, Journey, run_island, stretch_edges
from daskfactor.allocation.placement import Placement, place_counts
from daskfactor.allocation.urns import Urns
from daskfactor.checks import positive_number, whole_number
from daskfactor.engine.progress import OnEvent, RunEvent
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.kernels.resampling import SCHEMES

Vector = NDArray[np.float64]
Map = Callable[[Callable[[Any, Any], Any], Any], list[Any]]

TRUSTED = 1.0
"""Standard deviation of the islands' log estimates up to which their mean is believed."""
BATCH = 16
"""Islands between two messages; their results are in memory together."""
LONG = 3600.0
"""Seconds beyond which a warning comes first."""
KEPT_BYTES = 2**32
"""Most that ``keep="particles"`` may take."""


@dataclass(frozen=True)
class SequentialMonteCarlo:
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

    particles: int = 256
    islands: int = 8
    target: float = 0.1
    max_particles: int = 2**17
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
        _one_of("resampling", self.resampling, (*SCHEMES, None))
        _one_of("order", self.order, ("shared", "own"))
        _one_of("keep", self.keep, ("means", "particles"))
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold must be between 0 and 1, got {self.threshold!r}")
        if self.thin is not None and not 0 < self.thin <= 1:
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
    settings: SequentialMonteCarlo,
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
    placement = place_counts(urns)
    journey = Journey(
        placement=placement,
        values=urns.values,
        cells=urns.cells,
        particles=settings.particles,
        resampling=settings.resampling,
        least=settings.threshold,
        own=settings.order == "own",
        keep=settings.keep == "particles",
        seed=seed,
        round=0,
    )
    _foretell(placement, settings)
    rounds = [settings.particles]
    count = settings.islands
    while True:
        found = _Sum(urns.cells)
        _run(found, journey, count, map_function, on_event)
        more = 2 * journey.particles * count <= settings.max_particles
        if found.spread <= TRUSTED or not more:
            break
        journey = journey._replace(particles=2 * journey.particles, round=journey.round + 1)
        rounds.append(journey.particles)
    while pooled(found.log_z)[1] > settings.target:
        if 2 * count * journey.particles > settings.max_particles:
            break
        count *= 2
        _run(found, journey, count, map_function, on_event)
    result = _result(found, journey, tuple(rounds), settings)
    _warn_of_error(result, settings)
    return result


def _run(found: _Sum, journey: Journey, count: int, map_function: Map, on_event: OnEvent) -> None:
    """Add islands up to a number of them."""
    _check_memory(journey, count)
    work = float(journey.placement.tokens) * journey.particles
    for batch in _batches(range(len(found.islands), count)):
        told = f"{count} islands of {journey.particles} particles"
        on_event(RunEvent("draw", work * len(found.islands), work * count, message=told))
        for island in map_function(partial(run_island, journey), batch):
            found.add(island)
    on_event(RunEvent("draw", work * count, work * count))


def _batches(islands: Iterable[int]) -> Iterator[list[int]]:
    every = list(islands)
    for start in range(0, len(every), BATCH):
        yield every[start : start + BATCH]


def _result(
    found: _Sum, journey: Journey, rounds: tuple[int, ...], settings: SequentialMonteCarlo
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
        edges=stretch_edges(journey.placement.tokens)[1:],
        ess=np.stack([island.ess for island in islands]),
        resampled=np.stack([island.resampled for island in islands]) == 1,
        log_weights=np.stack([island.log_weights for island in islands]) + constant,
        counts=np.stack(kept) if kept else None,
        spread=found.spread,
        rounds=rounds,
        reached=error <= settings.target,
    )


def estimated_seconds(placement: Placement, particles: int) -> float:
    """Rough time on one core: what a token costs a particle, in nanoseconds (measured)."""
    network = placement.network
    registers = len(network.alpha)
    each = 10 + 0.6 * network.states + 3 * registers
    if not network.simple:
        each = 20 + 1.5 * network.states * registers
    return 1e-9 * each * placement.tokens * particles


def _foretell(placement: Placement, settings: SequentialMonteCarlo) -> None:
    seconds = estimated_seconds(placement, settings.particles * settings.islands)
    if seconds > LONG:
        share = LONG / seconds
        warnings.warn(
            f"{placement.tokens} tokens times {settings.particles * settings.islands} particles "
            f"take about {seconds / 3600:.1f} hours on one core, and more if particles have to be "
            f"added; thin={share:.2g} would keep that share of the tokens and take one hour, but "
            "its evidence is that of the kept tokens alone",
            SamplingWarning,
            stacklevel=3,
        )


def _check_memory(journey: Journey, count: int) -> None:
    size = 4 * journey.cells * journey.particles * count
    if journey.keep and size > KEPT_BYTES:
        raise OptionError(
            f'keep="particles" would hold {size / 2**30:.1f} GiB of counts for {count} islands of '
            f"{journey.particles} particles, and {KEPT_BYTES / 2**30:.0f} GiB are allowed: "
            'use keep="means", or fewer particles'
        )


def _warn_of_error(result: SMCResult, settings: SequentialMonteCarlo) -> None:
    if result.spread > TRUSTED:
        text = (
            f"islands of {result.particles} particles give estimates of log p(X) that differ by "
            f"{result.spread:.1f} nats (standard deviation): the value is likely too low and its "
            "standard error too small"
        )
    elif not result.reached:
        text = f"the standard error is {result.standard_error:.2g} nats, not {settings.target:.2g}"
    else:
        return
    text += f"; raise max_particles beyond {settings.max_particles}, or thin the counts"
    warnings.warn(text, SamplingWarning, stacklevel=3)
