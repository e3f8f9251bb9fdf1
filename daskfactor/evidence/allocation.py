"""Evidences of allocation models: sequential Monte Carlo, a variational bound, enumeration."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.allocation import smc, variational
from daskfactor.allocation.batches import BatchPlan, run_batch
from daskfactor.allocation.compiled_model import CompiledModel, compile_model
from daskfactor.allocation.counts import Counts, as_counts
from daskfactor.allocation.exact import LIMIT, enumerate_allocations
from daskfactor.allocation.numbering import exchangeable, matched_mean
from daskfactor.allocation.placement import place_counts
from daskfactor.checks import is_number, positive_number, warn, whole_number
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.evidence.base import Evidence, EvidenceMethod, EvidenceProblem
from daskfactor.executors import SerialExecutor
from daskfactor.kernels.resampling import SCHEMES
from daskfactor.kernels.workspace import Workspace
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import OnEvent, RunEvent, ignore

Vector = NDArray[np.float64]
Columns = Mapping[str, tuple[Sequence[str], Any]]

ROOM = 2**28
"""Bytes of particles that tables are averaged over."""
MOST_MOVES = 1000
"""Sweeps that the addresses of random numbers can tell apart."""

_compiled: set[str] = set()
"""Methods whose kernels this process has compiled."""


class AllocationMethod(EvidenceMethod):
    """A way to compute the evidence of an `AllocationModel`."""

    suits = ("counts",)

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        """Log p(X) of counts."""
        if problem.executor.in_process and self.name not in _compiled:
            problem.on_event(RunEvent("compile", 0, 1, message="once per process"))
            model = AllocationModel.nmf(2)
            counts = as_counts(np.array([[1, 0], [1, 1]]), model)
            few = EvidenceProblem(counts, model, 0, SerialExecutor(), ignore)
            self._brief().estimate_compiled(few, compile_model(model, counts))
            _compiled.add(self.name)
            problem.on_event(RunEvent("compile", 1, 1))
        return self.estimate_compiled(problem, self.prepared(problem))

    def prepared(self, problem: EvidenceProblem) -> CompiledModel:
        """Compile the model with its counts."""
        return compile_model(problem.model, problem.data)

    def _brief(self) -> Self:
        """The same with as little work as there can be: it is run to compile the kernels."""
        return self

    @abstractmethod
    def estimate_compiled(self, problem: EvidenceProblem, compiled: CompiledModel) -> Evidence:
        """Log p(X) of counts that are compiled with their model."""

    def _trace(self, compiled: CompiledModel, mean_counts: Vector, columns: Columns) -> xr.Dataset:
        """The tables, and what else the method found, under names that do not clash."""
        data = _named(compiled.tables(mean_counts), "table")
        free = {name: _free(name, data) for dims, _ in columns.values() for name in dims}
        found = {
            name: (tuple(free[dim] for dim in dims), values)
            for name, (dims, values) in columns.items()
        }
        this: Any = self
        settings = {n: "none" if own is None else own for n, own in asdict(this).items()}
        return data.assign(found).assign_attrs(
            method=self.name, tokens=compiled.total, unit="nats", **settings
        )


def _named(tables: Mapping[str, xr.DataArray], prefix: str) -> xr.Dataset:
    return xr.Dataset({f"{prefix}_{name}": table for name, table in tables.items()})


def _free(name: str, data: xr.Dataset) -> str:
    """Find a name that no dim and no coordinate of the data has."""
    while name in data.dims or name in data.coords:
        name += "_"
    return name


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

    def prepared(self, problem: EvidenceProblem) -> CompiledModel:
        """Compile the model with its counts, or with those that are kept of them."""
        counts: Counts = problem.data
        if self.thin is None or self.thin == 1.0:
            return compile_model(problem.model, counts)
        kept = counts.thinned(self.thin, problem.seed)
        warn(
            f"thin={self.thin:g} kept {kept.total} of {counts.total} tokens: this is the evidence "
            "of those alone, and differences between models are smaller about in that "
            "proportion; compare it only with evidences of the same data under the same thin "
            "and random_seed",
            SamplingWarning,
        )
        return compile_model(problem.model.with_thinning(self.thin), kept)

    def remedy(self, discretization: bool) -> str:
        """Say what makes an error smaller."""
        del discretization
        return f"raise max_particles above {self.max_particles}, or thin the counts"

    def _brief(self) -> Self:
        few: dict[str, Any] = {"particles": 2, "islands": 2, "max_particles": 4, "target": 1e9}
        return replace(self, **few, thin=None, keep="means")

    def run(
        self, compiled: CompiledModel, seed: int, map_function: smc.Map, on_event: OnEvent
    ) -> smc.SMCResult:
        """Estimate log p(X); `smc.run_smc` says what is mapped and told."""
        moves = self.moves if self.resampling is not None else 0
        plan = BatchPlan(
            placement=place_counts(compiled, 0 if moves else None),
            values=compiled.values,
            cells=compiled.cells,
            particles=self.particles,
            resampling=self.resampling,
            least=self.threshold,
            own=self.order == "own",
            keep=self.keep == "particles",
            seed=seed,
            round=0,
            moves=moves,
        )
        sizes = (self.islands, self.target, self.max_particles)
        return smc.run_smc(plan, *sizes, map_function, on_event)

    def estimate_compiled(self, problem: EvidenceProblem, compiled: CompiledModel) -> Evidence:
        mapped = partial(problem.executor.map, name="particles")
        found = self.run(compiled, problem.seed, mapped, problem.on_event)
        columns: Columns = {
            "island_log_evidence": (("island",), found.batch_log_z),
            "ess": (("island", "token"), found.ess),
            "resampled": (("island", "token"), found.resampled),
            "token": (("token",), found.edges),
            "log_weight": (("island", "particle"), found.log_weights),
        }
        means = _means(compiled, exchangeable(problem.model), found)
        trace = self._trace(compiled, means, columns)
        if found.counts is not None:
            trace = trace.merge(_particle_tables(compiled, found.counts))
        rounds = {"particles_per_island": found.plan.particles, "tried": list(found.rounds)}
        trace = trace.assign_attrs(rounds, random_seed=str(problem.seed))
        return Evidence(found.log_evidence, found.standard_error, 0.0, trace)


def _told(start: variational.Start) -> str:
    return f"bound {start.elbos[-1]:.6g}"


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join(repr(item) for item in allowed)
        raise OptionError(f"{name} must be one of {names}, got {value!r}")


def _means(compiled: CompiledModel, free: tuple[str, ...], found: smc.SMCResult) -> Vector:
    """Mean counts of the best batch, its particles numbered alike if there is room.

    Where there is none, there are many tokens: resampling has left particles of few
    ancestors, whose states have the same numbers anyway.
    """
    if found.counts is not None:
        own, weights = found.counts[found.best], found.log_weights[found.best]
        return matched_mean(compiled, free, own, weights)
    if 4 * compiled.cells * found.plan.particles > ROOM:
        return found.mean_counts
    batch = run_batch(found.plan._replace(keep=True), found.best, Workspace())
    assert batch.counts is not None
    return matched_mean(compiled, free, batch.counts, batch.log_weights)


def _particle_tables(compiled: CompiledModel, counts: NDArray[np.int32]) -> xr.Dataset:
    """Posterior mean tables given the allocation of every particle."""
    first = _named(compiled.tables(counts[0][0]), "particle")
    inner, outer = _free("particle", first), _free("island", first)
    rows = []
    for batch in counts:
        tables = [_named(compiled.tables(own), "particle") for own in batch]
        rows.append(xr.concat(tables, inner, join="exact"))
    return xr.concat(rows, outer, join="exact")


@dataclass(frozen=True)
class VariationalBayes(AllocationMethod):
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

    starts: int = 10
    max_iterations: int = 1000
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        whole_number("starts", self.starts, 1)
        whole_number("max_iterations", self.max_iterations, 1)
        object.__setattr__(self, "tolerance", positive_number("tolerance", self.tolerance))

    def _brief(self) -> Self:
        return replace(self, starts=1, max_iterations=5, tolerance=1.0)

    def run(
        self, compiled: CompiledModel, seed: int, map_function: variational.Map
    ) -> variational.VBResult:
        """Climb from all starts; `variational.run_vb` says what is mapped."""
        limits = (self.max_iterations, self.tolerance)
        return variational.run_vb(compiled, self.starts, limits, seed, map_function)

    def estimate_compiled(self, problem: EvidenceProblem, compiled: CompiledModel) -> Evidence:
        mapped = partial(problem.map, name="variational", told=_told)
        found = self.run(compiled, problem.seed, mapped)
        if not found.converged[found.best]:
            warn(
                f"the best of {self.starts} starts was still rising after {self.max_iterations} "
                "iterations: its bound holds, but is not the best there is; raise max_iterations "
                "or tolerance",
                SamplingWarning,
            )
        columns: Columns = {
            "elbo": (("start", "iteration"), found.elbos),
            "iterations": (("start",), found.iterations),
            "converged": (("start",), found.converged),
        }
        trace = self._trace(compiled, found.mean_counts, columns)
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

    def estimate_compiled(self, problem: EvidenceProblem, compiled: CompiledModel) -> Evidence:
        del problem
        found = enumerate_allocations(compiled, self.limit)
        trace = self._trace(compiled, found.mean_counts, {})
        trace = trace.assign_attrs(states=found.states)
        return Evidence(found.log_evidence, 0.0, 0.0, trace)
