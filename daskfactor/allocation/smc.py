"""Sequential Monte Carlo by Pólya urns: p(X) of an allocation model, without bias.

    p̂(X) = NB(T) T! / Π X! · mean of Π_t p(cell of token t | allocation of the tokens before)

over particles that take the tokens of X in a random order and draw their hidden parts from
the urns. Time is proportional to tokens times particles times states, whatever the size
of X; every sweep of moves takes up to 26 times that.

Particles come in *batches* (``batches.py``): each has P of them, one order of the tokens,
its own resampling, and an unbiased estimate of p(X). log p(X) is the log of their mean and
its error comes from their spread. Numbers grow in two ways:

1. while log estimates of batches differ by more than `TRUSTED` (one standard deviation), P
   doubles and all batches start again, with other random numbers: a mean of such estimates
   rests on the luckiest batch, and so does its error. Particles that move give up before
   if they are far from it: their variance falls as 1 / P;
2. then batches are added, twice as many as before, until the standard error is down to
   ``target``.

Source: Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
simulating Pólya urns", procedure BAM-SIS.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.batches import Batch, BatchPlan, run_batch
from daskfactor.checks import warn
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.progress import OnEvent, RunEvent

Vector = NDArray[np.float64]
Map = Callable[[Callable[[Any, Any], Any], Any], list[Any]]

TRUSTED = 1.0
"""Standard deviation of the batches' log estimates up to which their mean is believed."""
HOPELESS = 8
"""Particles that move stop growing if they need more than this times what is allowed."""
TOGETHER = 16
"""Batches between two messages; their results are in memory together."""
LONG = 3600.0
"""Seconds beyond which a warning comes first."""
KEPT_BYTES = 2**32
"""Most that ``keep="particles"`` may take."""
BATCH_BYTES = 2**30
"""Most that a batch of particles that move may take."""


class SMCResult(NamedTuple):
    """An estimate of log p(X) and what it was made from.

    Attributes
    ----------
    log_evidence, standard_error
        In nats.
    batch_log_z : (N,)
        Log of each batch's estimate of p(X).
    best
        The batch with the largest one.
    mean_counts : (cells,)
        Posterior mean of the flat counts of the `CompiledModel`, over that batch.
    edges : (E,)
        Tokens after which the weights were looked at.
    ess, resampled : (N, E)
        Effective number of particles there, and whether they were resampled.
    log_weights : (N, P)
        Of the final particles; the mean of their exponentials is the estimate of p(X).
    counts : (N, P, cells) or None
        Flat counts of the final particles.
    spread
        Standard deviation of ``batch_log_z``.
    plan
        Of the last round, which counts.
    rounds
        Numbers of particles per batch that were tried.
    reached
        Whether the standard error is down to the target.
    """

    log_evidence: float
    standard_error: float
    batch_log_z: Vector
    best: int
    mean_counts: Vector
    edges: NDArray[np.int64]
    ess: Vector
    resampled: NDArray[np.bool_]
    log_weights: Vector
    counts: NDArray[np.int32] | None
    spread: float
    plan: BatchPlan
    rounds: tuple[int, ...]
    reached: bool

    @property
    def particles(self) -> int:
        """Particles per batch, in the end."""
        return self.plan.particles


def run_smc(
    plan: BatchPlan,
    count: int,
    target: float,
    max_particles: int,
    map_function: Map,
    on_event: OnEvent,
) -> SMCResult:
    """Estimate log p(X).

    Parameters
    ----------
    plan
        The batches of the first round.
    count
        How many there are at first.
    target
        Standard error of log p(X), in nats, at which to stop.
    max_particles
        In all batches together.
    map_function
        ``map_function(function, items)`` is the list of ``function(item, workspace)``:
        `Executor.map`; the result does not depend on where batches run.
    on_event
        Told how many tokens times particles have been through, and of how many.

    Notes
    -----
    A lane's memory is one batch: `Placement.particle_bytes` times P. How many batches are
    enough is decided by looking at them, so the estimate of p(X) is unbiased only when no
    batch was added after the first ones.
    """
    _warn_if_slow(plan, count)
    rounds = [plan.particles]
    while True:
        found = _run([], plan, count, map_function, on_event)
        growth = _growth(_spread(found), count, plan, max_particles)
        if growth == 1:
            break
        plan = plan._replace(particles=growth * plan.particles, round=plan.round + 1)
        rounds.append(plan.particles)
    trusted = _spread(found) <= TRUSTED
    while trusted and pooled(_log_z(found))[1] > target:
        if 2 * count * plan.particles > max_particles:
            break
        count *= 2
        found = _run(found, plan, count, map_function, on_event)
    result = _result(found, plan, tuple(rounds), target)
    _warn_of_error(result, target, max_particles)
    return result


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


def estimated_seconds(plan: BatchPlan, particles: int) -> float:
    """Estimate the time on one core from what a token costs a particle (measured)."""
    placement = plan.placement
    network = placement.network
    registers = len(network.alpha)
    each = 10 + 0.6 * network.states + 3 * registers
    if not network.simple:
        each = 20 + 1.5 * network.states * registers
    again = plan.moves * float(plan.edges[1:] @ plan.moved) / placement.tokens
    return 1e-9 * each * placement.tokens * particles * (1.0 + 1.4 * again)


def _log_z(batches: list[Batch]) -> Vector:
    return np.array([batch.log_z for batch in batches])


def _spread(batches: list[Batch]) -> float:
    return float(np.std(_log_z(batches), ddof=1))


def _needed(spread: float, particles: int) -> float:
    """Particles in all batches for a spread of one nat, if the variance falls as 1 / P."""
    return particles * spread**2


def _growth(spread: float, count: int, plan: BatchPlan, max_particles: int) -> int:
    """How many times the particles to start again with; 1 to leave it at that.

    Twice as many; or, if they move, up to eight times, by the spread.
    """
    size = plan.particles * count
    room = max_particles // size
    if plan.moves:
        room = min(room, BATCH_BYTES // plan.moving_bytes)
        if _needed(spread, size) > HOPELESS * max_particles:
            return 1
    if spread <= TRUSTED or room < 2:
        return 1
    times = min(spread**2, 8.0, room) if plan.moves else 2.0
    return max(2, 1 << int(math.log2(times)))


def _run(
    found: list[Batch], plan: BatchPlan, count: int, map_function: Map, on_event: OnEvent
) -> list[Batch]:
    """Add batches up to a number of them; the mean counts of the best one alone are kept."""
    _check_memory(plan, count)
    work = float(plan.placement.tokens) * plan.particles
    told = f"{count} batches of {plan.particles} particles"
    while len(found) < count:
        on_event(RunEvent("draw", work * len(found), work * count, message=told))
        numbers = list(range(len(found), min(len(found) + TOGETHER, count)))
        found = found + map_function(partial(run_batch, plan), numbers)
        best = int(np.argmax(_log_z(found)))
        found = [
            own if number == best else own._replace(mean_counts=np.empty(0))
            for number, own in enumerate(found)
        ]
    on_event(RunEvent("draw", work * count, work * count))
    return found


def _result(
    batches: list[Batch], plan: BatchPlan, rounds: tuple[int, ...], target: float
) -> SMCResult:
    log_z, constant = _log_z(batches), plan.placement.constant
    (value, error), best = pooled(log_z), int(np.argmax(log_z))
    kept = [batch.counts for batch in batches if batch.counts is not None]
    return SMCResult(
        log_evidence=value + constant,
        standard_error=error,
        batch_log_z=log_z + constant,
        best=best,
        mean_counts=batches[best].mean_counts,
        edges=plan.edges[1:],
        ess=np.stack([batch.ess for batch in batches]),
        resampled=np.stack([batch.resampled for batch in batches]) == 1,
        log_weights=np.stack([batch.log_weights for batch in batches]) + constant,
        counts=np.stack(kept) if kept else None,
        spread=_spread(batches),
        plan=plan,
        rounds=rounds,
        reached=error <= target,
    )


def _warn_if_slow(plan: BatchPlan, count: int) -> None:
    particles = plan.particles * count
    seconds = estimated_seconds(plan, particles)
    if seconds > LONG:
        share, more = LONG / seconds, ""
        if plan.moves:
            more = "moves=0 takes less and is less exact; "
        warn(
            f"{plan.placement.tokens} tokens times {particles} particles "
            f"take about {seconds / 3600:.1f} hours on one core, and more if particles have to be "
            f"added; {more}thin={share:.2g} would keep that share of the tokens and take an hour "
            "at most, but its evidence is that of the kept tokens alone",
            SamplingWarning,
        )


def _check_memory(plan: BatchPlan, count: int) -> None:
    """Refuse batches that take too much memory."""
    size = 4 * plan.cells * plan.particles * count
    if plan.keep and size > KEPT_BYTES:
        raise OptionError(
            f'keep="particles" would hold {size / 2**30:.1f} GiB of counts for {count} batches of '
            f"{plan.particles} particles, and {KEPT_BYTES / 2**30:.0f} GiB are allowed: "
            'use keep="means", or fewer particles'
        )
    size = plan.moving_bytes
    if plan.moves and size > BATCH_BYTES:
        raise OptionError(
            f"{plan.particles} particles that move would hold {size / 2**30:.1f} GiB of counts, "
            f"and {BATCH_BYTES / 2**30:.0f} GiB are allowed a batch: use moves=0, which needs "
            "less, or fewer particles, or thin the counts"
        )


def _warn_of_error(result: SMCResult, target: float, max_particles: int) -> None:
    """Warn if an estimate cannot be trusted, or is not as exact as it should be."""
    if result.spread > TRUSTED:
        text = (
            f"batches of {result.particles} particles give estimates of log p(X) that differ by "
            f"{result.spread:.1f} nats (standard deviation): the value is likely too low and its "
            "standard error too small"
        )
        if result.plan.moves:
            needed = _needed(result.spread, result.particles * len(result.batch_log_z))
            text += f"; it may take {float(f'{needed:.1g}'):.0f} particles to change that"
    elif not result.reached:
        text = f"the standard error is {result.standard_error:.2g} nats, not {target:.2g}"
    else:
        return
    text += f"; raise max_particles beyond {max_particles}, or thin the counts"
    warn(text, SamplingWarning)
