"""Evidences of allocation models: sequential Monte Carlo, a variational bound, enumeration."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.allocation import smc, variational
from daskfactor.allocation.batches import Island, Journey
from daskfactor.allocation.compiled_model import Urns, compile_urns
from daskfactor.allocation.counts import Counts
from daskfactor.allocation.exact import LIMIT, enumerate_allocations
from daskfactor.allocation.numbering import exchangeable, matched_mean
from daskfactor.checks import whole_number
from daskfactor.errors import SamplingWarning
from daskfactor.evidence.base import Evidence, Method, Problem
from daskfactor.executors import Executor
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import OnEvent

Vector = NDArray[np.float64]
Columns = Mapping[str, tuple[Sequence[str], Any]]

ROOM = 2**28
"""Bytes of particles that tables are averaged over."""


@dataclass(frozen=True)
class AllocationProblem:
    """Counts under an allocation model, with nothing left to choose.

    Attributes
    ----------
    model, urns
        The model, and it compiled with the counts.
    seed
        Root of all random numbers.
    executor
        Where independent pieces of work are mapped to.
    on_event
        Told how far the work is.
    """

    model: AllocationModel
    urns: Urns
    seed: int
    executor: Executor
    on_event: OnEvent


class AllocationMethod(Method):
    """A way to compute the evidence of an `AllocationModel`."""

    def prepared(self, counts: Counts, model: AllocationModel, seed: int) -> Urns:
        """What the method works on."""
        del seed
        return compile_urns(model, counts)

    def brief(self) -> Self:
        """The same with as little work as there can be: it is run to compile the kernels."""
        return self

    @abstractmethod
    def estimate_counts(self, problem: AllocationProblem) -> Evidence:
        """Log p(X) of counts."""

    def estimate(self, problem: Problem) -> Evidence:
        raise NotImplementedError

    def _trace(self, urns: Urns, mean_counts: Vector, columns: Columns) -> xr.Dataset:
        """The tables, and what else the method found, under names that do not clash."""
        data = _named(urns.tables(mean_counts), "table")
        free = {name: _free(name, data) for dims, _ in columns.values() for name in dims}
        found = {
            name: (tuple(free[dim] for dim in dims), values)
            for name, (dims, values) in columns.items()
        }
        data = data.assign(found)
        return data.assign_attrs(method=self.name, tokens=urns.total, unit="nats", **self._told())

    def _told(self) -> dict[str, Any]:
        """The settings, as attributes that any file format can hold."""
        this: Any = self
        settings = asdict(this)
        return {name: "none" if own is None else own for name, own in settings.items()}


def _named(tables: Mapping[str, xr.DataArray], prefix: str) -> xr.Dataset:
    return xr.Dataset({f"{prefix}_{name}": table for name, table in tables.items()})


def _free(name: str, data: xr.Dataset) -> str:
    """A name that no dim and no coordinate of the data has."""
    while name in data.dims or name in data.coords:
        name += "_"
    return name


@dataclass(frozen=True)
class SequentialMonteCarlo(smc.Settings, AllocationMethod):
    r"""Log evidence of counts by particles that simulate Pólya urns.

    .. math:: \hat p(X) = \mathrm{NB}(T) \frac{T!}{\prod X!} \;
        \mathrm{mean} \prod_\tau p(i_V^\tau \mid S^{\tau - 1})

    The T tokens of X come in a random order; each particle draws the hidden part of every
    token from urns that hold what it has drawn before. Time follows the number of tokens
    and not the size of X. The mean of the estimate is p(X), as long as the islands that
    it begins with are enough.

    Particles live on islands, which are independent, run in parallel, and give the
    standard error. Particles per island grow while islands disagree by more than a nat,
    then islands double until the standard error is below ``target``.

    Parameters
    ----------
    particles
        Per island, at first.
    islands
        Independent groups of particles, at first; at least 2.
    target
        Standard error of log p(X), in nats, at which to stop.
    max_particles
        On all islands together; if the target needs more, a SamplingWarning says so. With
        moves they stop growing before, if the islands' spread says that many times as many
        would be needed.
    moves
        Collapsed Gibbs sweeps over a particle's earlier tokens, whenever these have grown by
        4 % (a schedule that does not look at the weights, which keeps the estimate
        unbiased). Without them (0, the paper's procedure) particles soon descend from a few
        ancestors, and estimates for hundreds of tokens with structure miss by tens of nats.
        A particle takes the time of up to T (1 + 26 moves) tokens, and keeps whole tables;
        without moves an island needs far more particles for the same error. Particles that
        are never resampled do not move.
    resampling
        ``"systematic"``, ``"stratified"``, ``"residual"``, ``"multinomial"``, or None:
        never (plain importance sampling).
    threshold
        An island resamples when its effective number of particles falls below this
        share of them.
    order
        ``"shared"``: the particles of an island take the tokens in one order; ``"own"``:
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

    The logarithm of an unbiased estimate is too low on average: by little where islands
    agree, by many nats, and more than the standard error knows of, where a SamplingWarning
    says that they do not. :class:`VariationalBayes` is a check then: log p(X) cannot be
    below its bound.

    ``trace`` holds ``island_log_evidence`` (island), ``ess`` and ``resampled`` (island,
    token), ``log_weight`` (island, particle), and tables such as ``table_r``: their mean
    over the particles of the island with the largest estimate. Hidden states have no
    names of their own, and a plain mean would make all of them alike; so the states of a
    particle are numbered anew, to agree best with the others.
    """

    def prepared(self, counts: Counts, model: AllocationModel, seed: int) -> Urns:
        if self.thin is None or self.thin == 1.0:
            return compile_urns(model, counts)
        kept = counts.thinned(self.thin, seed)
        warnings.warn(
            f"thin={self.thin:g} kept {kept.total} of {counts.total} tokens: this is the evidence "
            "of those alone, and differences between models are smaller about in that "
            "proportion; compare it only with evidences of the same data under the same thin "
            "and random_seed",
            SamplingWarning,
            stacklevel=4,
        )
        return compile_urns(model.with_thinning(self.thin), kept)

    def remedy(self, discretization: bool) -> str:
        """Say what makes an error smaller."""
        del discretization
        return f"raise max_particles above {self.max_particles}, or thin the counts"

    def brief(self) -> Self:
        few: dict[str, Any] = {"particles": 2, "islands": 2, "max_particles": 4, "target": 1e9}
        return replace(self, **few, thin=None, keep="means")

    def estimate_counts(self, problem: AllocationProblem) -> Evidence:
        urns = problem.urns
        watch = _Watch(problem.executor)
        found = smc.run_smc(urns, self, problem.seed, watch.map, problem.on_event)
        columns: dict[str, tuple[Sequence[str], Any]] = {
            "island_log_evidence": (("island",), found.island_log_z),
            "ess": (("island", "token"), found.ess),
            "resampled": (("island", "token"), found.resampled),
            "token": (("token",), found.edges),
            "log_weight": (("island", "particle"), found.log_weights),
        }
        free = exchangeable(problem.model)
        trace = self._trace(urns, watch.means(urns, free, found), columns)
        if found.counts is not None:
            trace = trace.merge(_particle_tables(urns, found.counts))
        rounds = {"particles_per_island": found.particles, "tried": list(found.rounds)}
        trace = trace.assign_attrs(rounds, random_seed=str(problem.seed))
        return Evidence(found.log_evidence, found.standard_error, 0.0, trace)


class _Watch:
    """Maps islands, and remembers the one with the largest estimate and how it was run."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.journey: Journey | None = None
        self.run: Callable[[Journey, int, Workspace], Island] | None = None
        self.log_z, self.mean_counts, self.best = -np.inf, np.empty(0), 0

    def map(self, function: Any, items: Sequence[int]) -> list[Island]:
        (journey,), self.run = function.args, function.func  # of a partial
        if self.journey is not journey:  # a new start with more particles
            self.journey, self.log_z = journey, -np.inf
        found: list[Island] = self.executor.map(function, items)
        for number, island in zip(items, found, strict=True):
            if island.log_z > self.log_z:
                self.log_z, self.mean_counts, self.best = island.log_z, island.mean_counts, number
        return found

    def means(self, urns: Urns, free: tuple[str, ...], found: smc.SMCResult) -> Vector:
        """Mean counts of the best island, its particles numbered alike if there is room.

        Where there is none, there are many tokens: resampling has left particles of few
        ancestors, whose states have the same numbers anyway.
        """
        if found.counts is not None:
            return matched_mean(urns, free, found.counts[self.best], found.log_weights[self.best])
        assert self.journey is not None
        assert self.run is not None
        if 4 * urns.cells * self.journey.particles > ROOM:
            return self.mean_counts
        island = self.run(self.journey._replace(keep=True), self.best, Workspace())
        assert island.counts is not None
        return matched_mean(urns, free, island.counts, island.log_weights)


def _particle_tables(urns: Urns, counts: NDArray[np.int32]) -> xr.Dataset:
    """Posterior mean tables given the allocation of every particle."""
    first = _named(urns.tables(counts[0][0]), "particle")
    inner, outer = _free("particle", first), _free("island", first)
    rows = []
    for island in counts:
        tables = [_named(urns.tables(own), "particle") for own in island]
        rows.append(xr.concat(tables, inner, join="exact"))
    return xr.concat(rows, outer, join="exact")


@dataclass(frozen=True)
class VariationalBayes(variational.MeanField, AllocationMethod):
    r"""A lower bound of the log evidence of counts: mean-field variational Bayes.

    .. math:: q = \prod_{i_V} \mathrm{Multinomial}(S(:, i_V); X(i_V), \pi(: \mid i_V)) \;
        \prod_n \mathrm{Dirichlet}(\theta_n; \beta_n) \; \mathrm{Gamma}(\lambda; c, d)

    The bound is exact for one component, tight where there are many tokens a cell, and
    loose where there are few: by several nats on a matrix of nine tokens, more the more
    components there are. Then it speaks for too few of them. Time is proportional to the
    occupied cells of X, whatever the tokens in them.

    Parameters
    ----------
    starts
        Ascents from random tables, the best of which counts; they run in parallel.
    max_iterations
        Sweeps of a start, if it does not end before.
    tolerance
        A start ends when a sweep raises the bound by less than this share of its size.

    Notes
    -----
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", evidence lower bound.

    Starts begin with 100 cheap sweeps under larger pseudo-counts, different from start to
    start, and a small random change: ascents under small ones, which sparse tables have,
    stay where they begin, and end tens to thousands of nats lower on sparse data.

    ``trace`` holds ``elbo`` (start, iteration), NaN after a start's end, ``iterations``
    and ``converged`` (start), and the posterior mean tables of the best start, such as
    ``table_r``.
    """

    def brief(self) -> Self:
        return replace(self, starts=1, max_iterations=5, tolerance=1.0)

    def estimate_counts(self, problem: AllocationProblem) -> Evidence:
        urns, executor = problem.urns, problem.executor
        heard = problem.on_event if executor.in_process else None
        found = variational.run_vb(urns, self, problem.seed, executor.map, heard)
        if not found.converged[found.best]:
            warnings.warn(
                f"the best of {self.starts} starts was still rising after {self.max_iterations} "
                "iterations: its bound holds, but is not the best there is; raise max_iterations "
                "or tolerance",
                SamplingWarning,
                stacklevel=4,
            )
        columns: Columns = {
            "elbo": (("start", "iteration"), found.elbos),
            "iterations": (("start",), found.iterations),
            "converged": (("start",), found.converged),
        }
        trace = self._trace(urns, found.mean_counts, columns)
        trace = trace.assign_attrs(best_start=found.best, random_seed=str(problem.seed))
        return Evidence(found.elbo, 0.0, 0.0, trace, bound=True)


@dataclass(frozen=True)
class Enumeration(AllocationMethod):
    """The exact log evidence of few tokens: a sum over all allocations.

    Parameters
    ----------
    limit
        Intermediate states that may be held at a time; a state takes some hundred bytes.

    Notes
    -----
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", marginal distribution of the allocation tensor.

    ``trace`` holds the exact posterior mean tables, such as ``table_r``. All numberings
    of hidden states are equally probable, so that the states look alike there.
    """

    limit: int = LIMIT

    def __post_init__(self) -> None:
        whole_number("limit", self.limit, 1)

    def estimate_counts(self, problem: AllocationProblem) -> Evidence:
        found = enumerate_allocations(problem.urns, self.limit)
        trace = self._trace(problem.urns, found.mean_counts, {})
        trace = trace.assign_attrs(states=found.states)
        return Evidence(found.log_evidence, 0.0, 0.0, trace)
