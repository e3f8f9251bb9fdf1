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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.allocation.batches import Batch, BatchPlan, exchangeable, matched_mean, run_batch
from daskfactor.allocation.compiled_model import (
    AllocationMethod,
    Columns,
    CompiledModel,
    compile_model,
    free_names,
    named_tables,
)
from daskfactor.allocation.placement import place_counts
from daskfactor.allocation.resampling import SCHEMES
from daskfactor.checks import is_number, one_of, positive_number, warn, whole_number
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.evidence.base import Evidence, EvidenceProblem
from daskfactor.kernels.views import Workspace

Vector = NDArray[np.float64]
Map = Callable[[Callable[[int, Workspace], Batch], Sequence[int]], list[Batch]]

TRUSTED = 1.0
"""Standard deviation of the batches' log estimates up to which their mean is trusted."""
HOPELESS = 8
"""Particles that move stop growing if they need more than this times what is allowed."""
LONG = 3600.0
"""Seconds beyond which a warning comes first."""
MAX_UNFOLDED_BYTES = 2**32
"""Limit of ``keep="particles"``."""
ROOM = 2**28
"""Bytes of particles that tables are averaged over."""
MAX_MOVES = 1000
"""Sweeps that the addresses of random numbers can tell apart."""
BATCH_BYTES = 2**30
"""Limit of a batch of particles that move."""


class SMCResult(NamedTuple):
    """An estimate of log p(X) and the batches that it was made from.

    Attributes
    ----------
    log_evidence, standard_error
        In nats.
    batch_log_z : (N,)
        Log of each batch's estimate of p(X).
    best
        The batch with the largest one.
    ess, resampled : (N, E)
        Effective number of particles at each check of the weights, and whether they were resampled.
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
    """

    log_evidence: float
    standard_error: float
    batch_log_z: Vector
    best: int
    ess: Vector
    resampled: NDArray[np.bool_]
    log_weights: Vector
    counts: NDArray[np.int32] | None
    spread: float
    plan: BatchPlan
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class SequentialMonteCarlo(AllocationMethod):
    r"""Log evidence of counts by particles that simulate Pólya urns.

    .. math:: \hat p(X) = \mathrm{NB}(T) \frac{T!}{\prod X!} \;
        \mathrm{mean} \prod_\tau p(i_V^\tau \mid S^{\tau - 1})

    The T tokens of X come in a random order; each particle draws the hidden part of every
    token from urns that hold what it has drawn before. Time follows the number of tokens
    and not the size of X. The mean of the estimate is p(X), as long as the batches that
    it begins with are enough.

    Particles come in batches, which are independent, run in parallel, and give the
    standard error. Particles per batch grow while batches disagree by more than a nat,
    then batches double until the standard error is below ``target``.

    Parameters
    ----------
    particles
        Per batch, at first.
    islands
        Number of batches at first, at least 2; ``island`` is their name in the trace too.
    target
        Standard error of log p(X), in nats, at which to stop.
    max_particles
        In all batches together; if the target needs more, a SamplingWarning says so. With
        moves they stop growing before, if the batches' spread says that many times as many
        would be needed.
    moves
        Collapsed Gibbs sweeps over a particle's earlier tokens, whenever these have grown by
        4 % (a schedule that does not look at the weights, which keeps the estimate
        unbiased). Without them (0, the paper's procedure) particles soon descend from a few
        ancestors, and estimates for hundreds of tokens with structure miss by tens of nats.
        A particle takes the time of up to T (1 + 26 moves) tokens, and keeps whole tables;
        without moves a batch needs far more particles for the same error. Particles that
        are never resampled do not move.
    resampling
        ``"systematic"``, ``"stratified"``, ``"residual"``, ``"multinomial"``, or None:
        never (plain importance sampling).
    threshold
        A batch resamples when its effective number of particles falls below this
        share of them.
    order
        ``"shared"``: the particles of a batch take the tokens in one order; ``"own"``:
        each in an order of its own, which is noisier.
    thin
        Keep every token with this probability only, for counts too large for one pass.
        Thinned counts follow the same model with the rate b / thin, so the evidence is
        exact, but it is that of the tokens that were kept: differences between models
        shrink about in proportion. The same seed keeps the same tokens of the same data,
        and only evidences of the same tokens can be compared.
    keep
        ``"means"``; or ``"particles"`` for the tables given every particle too
        (``particle_r`` and so on, along ``island`` and ``particle``).

    Notes
    -----
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", procedure BAM-SIS. Moves: Gilks and Berzuini, "Following a
    moving target: Monte Carlo inference for dynamic Bayesian models", 2001.

    The logarithm of an unbiased estimate is too low on average: by little where batches
    agree, by many nats, and more than the standard error knows of, where a SamplingWarning
    says that they do not. :class:`VariationalBayes` is a check then: log p(X) cannot be
    below its bound.

    ``trace`` holds ``island_log_evidence`` (island), ``ess`` and ``resampled`` (island,
    token), ``log_weight`` (island, particle), and tables such as ``table_r``: their mean
    over the particles of the batch with the largest estimate. Hidden states have no
    names of their own, and a plain mean would make all of them alike; so the states of a
    particle are numbered anew, to agree best with the others.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.AllocationModel.nmf(2)
    >>> X = dfac.simulate(model, (3, 4), total=9, random_seed=0).counts
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> evidence = dfac.log_evidence(X, model, dfac.SequentialMonteCarlo(target=0.3), **run)
    >>> evidence.value < 0, evidence.total_error < 1
    (True, True)
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
        if self.moves > MAX_MOVES:
            raise OptionError(f"moves must be at most {MAX_MOVES}, got {self.moves}")
        for name, allowed in (
            ("resampling", (*SCHEMES, None)),
            ("order", ("shared", "own")),
            ("keep", ("means", "particles")),
        ):
            one_of(name, getattr(self, name), allowed)
        if not (is_number(self.threshold) and 0 <= self.threshold <= 1):
            raise OptionError(f"threshold must be between 0 and 1, got {self.threshold!r}")
        if not (self.thin is None or (is_number(self.thin) and 0 < self.thin <= 1)):
            raise OptionError(f"thin must be None or in (0, 1], got {self.thin!r}")
        if self.particles * self.islands > self.max_particles:
            raise OptionError(
                f"max_particles must be at least particles times islands, "
                f"{self.particles * self.islands}, got {self.max_particles}"
            )

    def _compile(self, problem: EvidenceProblem) -> CompiledModel:
        """Compile the model with its counts, or with thinned ones."""
        counts = problem.data
        if self.thin is None or self.thin == 1.0:
            return compile_model(problem.model, counts)
        thinned = counts.thinned(self.thin, problem.seed)
        warn(
            f"thin={self.thin:g} kept {thinned.total} of {counts.total} tokens: this is the "
            "evidence of those alone, and differences between models are smaller about in that "
            "proportion; compare it only with evidences of the same data under the same thin "
            "and random_seed",
            SamplingWarning,
        )
        return compile_model(problem.model.with_thinning(self.thin), thinned)

    def remedy(self, discretization: bool) -> str:
        """Return advice that makes the error smaller."""
        del discretization
        return f"raise max_particles above {self.max_particles}, or thin the counts"

    def run(self, compiled: CompiledModel, seed: int, map_function: Map) -> SMCResult:
        """Estimate log p(X).

        Parameters
        ----------
        compiled
            The compiled problem.
        seed
            Root of all random numbers.
        map_function
            ``map_function(function, items)`` is the list of ``function(item, workspace)``; the
            result does not depend on where batches run.

        Notes
        -----
        A lane's memory is one batch. The number of batches depends on their estimates, so the
        estimate of p(X) is unbiased only when no batch was added after the first ones.
        """
        count = self.islands
        plan = BatchPlan(
            placement=place_counts(compiled),
            particles=self.particles,
            resampling=self.resampling,
            least=self.threshold,
            separate_orders=self.order == "own",
            unfold=self.keep == "particles",
            seed=seed,
            round=0,
            moves=self.moves if self.resampling is not None else 0,
            average=False,
        )
        _warn_if_slow(plan, count)
        rounds = [plan.particles]
        while True:
            batches = _run([], plan, count, map_function)
            growth = _growth(_spread(batches), count, plan, self.max_particles)
            if growth == 1:
                break
            plan = replace(plan, particles=growth * plan.particles, round=plan.round + 1)
            rounds.append(plan.particles)
        trusted = _spread(batches) <= TRUSTED
        while trusted and pooled(_log_z(batches))[1] > self.target:
            if 2 * count * plan.particles > self.max_particles:
                break
            count *= 2
            batches = _run(batches, plan, count, map_function)
        log_z, constant = _log_z(batches), plan.placement.constant
        value, error = pooled(log_z)
        unfolded = [batch.counts for batch in batches if batch.counts is not None]
        result = SMCResult(
            log_evidence=value + constant,
            standard_error=error,
            batch_log_z=log_z + constant,
            best=int(np.argmax(log_z)),
            ess=np.stack([batch.ess for batch in batches]),
            resampled=np.stack([batch.resampled for batch in batches]) == 1,
            log_weights=np.stack([batch.log_weights for batch in batches]) + constant,
            counts=np.stack(unfolded) if unfolded else None,
            spread=_spread(batches),
            plan=plan,
            rounds=tuple(rounds),
        )
        self._warn_of_error(result)
        return result

    def _warn_of_error(self, result: SMCResult) -> None:
        """Warn if an estimate cannot be trusted, or is not as exact as it should be."""
        particles = result.plan.particles
        if result.spread > TRUSTED:
            text = (
                f"batches of {particles} particles give estimates of log p(X) that differ "
                f"by {result.spread:.1f} nats (standard deviation): the value is likely too low "
                "and its standard error too small"
            )
            if result.plan.moves:
                needed = _needed(result.spread, particles * len(result.batch_log_z))
                text += f"; it may take {float(f'{needed:.1g}'):.0f} particles to change that"
        elif result.standard_error > self.target:
            text = f"the standard error is {result.standard_error:.2g} nats, not {self.target:.2g}"
        else:
            return
        text += f"; raise max_particles beyond {self.max_particles}, or thin the counts"
        warn(text, SamplingWarning)

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        compiled = self._compile(problem)
        mapped = partial(problem.map, name="particles", message=_message)
        result = self.run(compiled, problem.seed, mapped)
        columns: Columns = {
            "island_log_evidence": (("island",), result.batch_log_z),
            "ess": (("island", "token"), result.ess),
            "resampled": (("island", "token"), result.resampled),
            "token": (("token",), result.plan.edges[1:]),
            "log_weight": (("island", "particle"), result.log_weights),
        }
        means = _mean_counts(compiled, exchangeable(problem.model), result)
        trace = self._trace(compiled, means, columns)
        if result.counts is not None:
            trace = trace.merge(_particle_tables(compiled, result.counts))
        rounds = {"particles_per_island": result.plan.particles, "tried": list(result.rounds)}
        trace = trace.assign_attrs(rounds, random_seed=str(problem.seed))
        return Evidence(result.log_evidence, result.standard_error, 0.0, trace)


def _message(batch: Batch) -> str:
    return f"batches of {len(batch.log_weights)} particles"


def _mean_counts(compiled: CompiledModel, free: tuple[str, ...], result: SMCResult) -> Vector:
    """Return the mean counts of the best batch, its particles numbered alike if there is room.

    Where there is none, there are many tokens: resampling has left particles of few
    ancestors, whose states have the same numbers anyway.
    """
    best = result.best
    if result.counts is not None:
        return matched_mean(compiled, free, result.counts[best], result.log_weights[best])
    room = 4 * compiled.cells * result.plan.particles <= ROOM
    batch = run_batch(replace(result.plan, unfold=room, average=not room), best, Workspace())
    if batch.counts is not None:
        return matched_mean(compiled, free, batch.counts, batch.log_weights)
    assert batch.mean_counts is not None
    return batch.mean_counts


def _particle_tables(compiled: CompiledModel, counts: NDArray[np.int32]) -> xr.Dataset:
    """Return posterior mean tables given the allocation of every particle."""
    batches = [[named_tables(compiled, each, "particle") for each in batch] for batch in counts]
    inner, outer = free_names(batches[0][0], ("particle", "island")).values()
    rows = [xr.concat(tables, inner, join="exact") for tables in batches]
    return xr.concat(rows, outer, join="exact")


def pooled(log_z: Vector) -> tuple[float, float]:
    """Return the log of the mean of exp(log_z), and its standard error.

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
    states, registers = placement.network.states, int(placement.network.place.shape[1])
    each = 10 + 0.6 * states + 3 * registers
    if placement.network.value.size == 0:
        each = 20 + 1.5 * states * registers
    again = plan.moves * float(plan.edges[1:] @ plan.moved) / placement.tokens
    return 1e-9 * each * placement.tokens * particles * (1.0 + 1.4 * again)


def _log_z(batches: list[Batch]) -> Vector:
    return np.array([batch.log_z for batch in batches])


def _spread(batches: list[Batch]) -> float:
    return float(np.std(_log_z(batches), ddof=1))


def _needed(spread: float, particles: int) -> float:
    """Return the particles for a spread of one nat, if the variance falls as 1 / P."""
    return particles * spread**2


def _growth(spread: float, count: int, plan: BatchPlan, max_particles: int) -> int:
    """Return the factor by which to raise the number of particles; 1 to leave it at that.

    Two; or, for particles that move, up to eight, by the spread.
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


def _run(batches: list[Batch], plan: BatchPlan, count: int, map_function: Map) -> list[Batch]:
    """Add batches up to a number of them."""
    _check_memory(plan, count)
    return batches + map_function(partial(run_batch, plan), range(len(batches), count))


def _warn_if_slow(plan: BatchPlan, count: int) -> None:
    particles = plan.particles * count
    seconds = estimated_seconds(plan, particles)
    if seconds > LONG:
        share = 0.95 * LONG / seconds
        more = "moves=0 takes less and is less exact; " if plan.moves else ""
        warn(
            f"{plan.placement.tokens} tokens times {particles} particles "
            f"take about {seconds / 3600:.1f} hours on one core, and more if particles have to be "
            f"added; {more}thin={share:.2g} would keep that share of the tokens and take an hour "
            "at most, but its evidence is that of these tokens alone",
            SamplingWarning,
        )


def _check_memory(plan: BatchPlan, count: int) -> None:
    """Refuse batches that take too much memory."""
    size = 4 * plan.placement.cells * plan.particles * count
    if plan.unfold and size > MAX_UNFOLDED_BYTES:
        raise OptionError(
            f'keep="particles" would hold {size / 2**30:.1f} GiB of counts for {count} batches of '
            f"{plan.particles} particles, and {MAX_UNFOLDED_BYTES / 2**30:.0f} GiB are allowed: "
            'use keep="means", or fewer particles'
        )
    size = plan.moving_bytes
    if plan.moves and size > BATCH_BYTES:
        raise OptionError(
            f"{plan.particles} particles that move would hold {size / 2**30:.1f} GiB of counts, "
            f"and {BATCH_BYTES / 2**30:.0f} GiB are allowed a batch: use moves=0, which needs "
            "less, or fewer particles, or thin the counts"
        )
