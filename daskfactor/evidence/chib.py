"""Chib's estimate of the marginal likelihood of counts, from Gibbs sweeps.

The conditional of a factor given S and the other factor is a product of gamma
densities. Its density at a point, averaged over sweeps, is the factor's own posterior
density there (Rao and Blackwell). Every sweep records the table

    A[k, l] = Σ_i log Gamma(point_ik; a + s_i.l, λ + rate_il)

of the point's component k under the conditional of the sampler's component l, from
which the density under every permutation of the components follows.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
import xarray as xr
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from daskfactor.checks import warn, whole_number
from daskfactor.errors import ModelError, SamplingWarning
from daskfactor.evidence.base import Evidence, EvidenceMethod, EvidenceProblem
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import ChainState, FactorBand, split_factor
from daskfactor.inference.bands import (
    fill_array,
    moving,
    pieces_of,
    take_array,
    take_counts,
    take_values,
)
from daskfactor.inference.chain import Chain
from daskfactor.inference.gibbs import Gibbs, GibbsKernel
from daskfactor.inference.program import COLUMNS, ROWS, ArraySpec, Program
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.kernels.linalg import log_permanent
from daskfactor.kernels.multinomial import Wide, log_likelihood
from daskfactor.models.gamma_factors import gamma_log_density
from daskfactor.progress import Phase, RunEvent
from daskfactor.random import Stream, generator

Permutations = NDArray[np.int64] | None

BATCHES = 25
"""Batches of sweeps that a standard error is taken over."""
MIN_EFFECTIVE = 10.0
"""Equal sweeps below which an ordinate depends on a few of them."""
POINT = "point"
"""Array of a band: its part of the point, in double precision."""
MAX_ALL = 11
"""Components up to which all permutations are summed over by default."""
SAMPLED = 2000
"""Permutations that are sampled where there are too many."""


@dataclass(frozen=True)
class MeasuringKernel(GibbsKernel):
    """Gibbs sweeps that record densities at a point of one factor, as sums of its bands.

    For W this is the table A; for H, under a frozen W, the log-density of every row.
    """

    measured: int = ROWS

    def _conditional(
        self, program: Program, band: FactorBand, factor: int, cycle: int
    ) -> tuple[Wide, Wide]:
        shapes, rates = super()._conditional(program, band, factor, cycle)
        if factor == self.measured:
            point, frozen = band.arrays[POINT], program.frozen[COLUMNS]
            if factor == ROWS:
                band.sums[cycle, POINT] = table(point, shapes, rates)
            else:
                each = moving(entries(point, shapes, rates), frozen)
                band.sums[cycle, POINT] = each.sum(axis=1)
        return shapes, rates


def entries(point: Wide, shapes: Wide, rates: Wide) -> Wide:
    """Return the log-density of every entry of the point under its gamma law."""
    constant: Wide = shapes * np.log(rates) - gammaln(shapes)
    return constant + ((shapes - 1.0) * _log(point) - rates * point)


def _log(point: Wide) -> Wide:
    """Return the log of a point; frozen components may be zero, and are left out afterwards."""
    return np.log(np.maximum(point, np.finfo(np.float64).tiny))


def table(point: Wide, shapes: Wide, rates: Wide) -> Wide:
    """Return log-densities of the point's columns under every column's gamma laws, (K, K)."""
    constant: Wide = (shapes * np.log(rates) - gammaln(shapes)).sum(axis=0)
    return constant + _log(point).T @ (shapes - 1.0) - point.T @ rates


def sample_permutations(size: int, count: int | str, rng: np.random.Generator) -> Permutations:
    """Sample permutations of so many components to add to the best one; None for all.

    Parameters
    ----------
    count
        ``"auto"``: all permutations up to MAX_ALL components, else SAMPLED of them;
        or a number of them.
    """
    every = math.factorial(size)
    if count == "auto":
        count = every if size <= MAX_ALL else SAMPLED
    if size <= 1 or (int(count) >= every and size <= 2 * MAX_ALL):
        return None
    return rng.permuted(np.tile(np.arange(size), (int(count) - 1, 1)), axis=1)


def permuted_mean(
    A: Wide,
    exchangeable: NDArray[np.int64],
    fixed: NDArray[np.int64],
    permutations: Permutations,
) -> float:
    """Return the log of the mean over permutations of the density of a table A (K, K).

    Fixed components stay where they are. The best permutation is always in the mean, and a
    sample stands for the rest without bias.
    """
    base = float(A[fixed, fixed].sum())
    table = np.ascontiguousarray(A[np.ix_(exchangeable, exchangeable)])
    if not table.size:
        return base
    size = len(table)
    rows, log_count = np.arange(size), math.lgamma(size + 1.0)
    if permutations is None:
        return base + float(log_permanent(table, np.empty(2**size))) - log_count
    _, best = scipy.optimize.linear_sum_assignment(-table)
    top = float(table[rows, best].sum()) - log_count
    others = table[rows, permutations].sum(axis=1)[(permutations != best).any(axis=1)]
    if not others.size:
        return base + top
    rest = float(logsumexp(others)) - math.log(len(permutations))
    return base + float(np.logaddexp(top, rest))


class Ordinate(NamedTuple):
    """Log of a posterior density at a point, from the log-densities of sweeps.

    Attributes
    ----------
    log_ordinate, error
        The estimate, and its standard error by batch means.
    spread
        Standard deviation of the log-densities.
    effective
        Effective number of sweeps in the mean of their exponentials, if sweeps
        are independent.
    parts
        The log-density of every sweep; or the estimates of all rows, which add up to that
        of all (``spread`` and ``effective`` are then those of the worst row).
    """

    log_ordinate: float
    error: float
    spread: float
    effective: float
    parts: Wide


def average(batches: Iterable[Wide]) -> Ordinate:
    """Return logs of means of exponentials, over sweeps of batches (sweeps, columns).

    The value is that of the product of all columns, taken to be independent.
    """
    totals = [
        (
            logsumexp(logs, axis=0),
            logsumexp(2 * logs, axis=0),
            np.stack([logs.sum(axis=0), (logs**2).sum(axis=0)]),
            len(logs),
        )
        for logs in batches
    ]
    sums, squares, moments, sizes = map(np.array, zip(*totals, strict=True))
    total, count = logsumexp(sums, axis=0), int(sizes.sum())
    values = total - math.log(count)
    ratios = np.exp(sums - np.log(sizes)[:, None] - values)  # about 1
    errors = ratios.std(axis=0, ddof=1) / math.sqrt(len(sizes))
    first, second = np.sum(moments, axis=0) / count
    effective = np.exp(2 * total - logsumexp(squares, axis=0))
    return Ordinate(
        math.fsum(values),
        float(np.sqrt((errors**2).sum())),
        float(np.sqrt(np.maximum(second - first**2, 0.0).max())),
        float(effective.min()),
        values,
    )


@dataclass(frozen=True)
class Chib(EvidenceMethod):
    r"""Log evidence of Poisson counts from the densities at one point.

    .. math:: \log p(V) = \log p(V \mid W^*, H^*) + \log p(W^*, H^*)
        - \log p(W^* \mid V) - \log p(H^* \mid W^*, V)

    The two ordinates are averages of full conditionals, which are gamma, over Gibbs
    sweeps: p(W* | V) over sweeps of everything, p(H* | W*, V) over sweeps with W frozen
    at W*, which keeps its labelling, and makes the columns of H independent, so that each
    is averaged by itself. The point is the mean of W over the last
    quarter of tuning, and of H over the last quarter of tuning again with W frozen.

    A sampler that stays in one of the K! labellings sees K! times the density there, and
    one that changes between them sees it part of the time; so the first ordinate is
    averaged over permutations of the components, which is right for either.

    Parameters
    ----------
    draws
        Sweeps that each ordinate is averaged over.
    tune
        Sweeps before the first ordinate; half as many precede the second.
    permutations
        ``"auto"`` sums over all K! (in K 2^K operations) up to K = 11, and takes 2000
        beyond; or a number of them. The best one is always among them.

    Notes
    -----
    Chib 1995; Şimşekli et al. 2016, section 4.2, where it is what thermodynamic
    integration is compared with. With several components the log-densities of W* in
    single sweeps spread over a hundred nats and more on a matrix of 100 x 75; the mean of
    their exponentials then depends on the largest one, comes out too small, and the
    evidence too large by more than ``standard_error`` includes. The trace has
    ``spread_w`` and ``spread_h`` in nats, and ``effective_w`` and ``effective_h``, the
    number of sweeps that count (of H for the worst column). There is a warning where one
    is below 10. For small matrices the estimate is as good as exact.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (4, 3))
    >>> model = dfac.TweedieNMF(1, dispersion=1)
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> evidence = dfac.log_evidence(V, model, dfac.Chib(draws=500, tune=200), **run)
    >>> evidence.standard_error > 0
    True
    """

    draws: int = 2000
    tune: int = 1000
    permutations: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        whole_number("draws", self.draws, 2 * BATCHES)
        whole_number("tune", self.tune, 4)
        if self.permutations != "auto":
            whole_number("permutations", self.permutations, 1)

    def check(self, model: Any) -> None:
        if model.tensor:
            raise ModelError(
                f"{self.name}() gives the evidence of a matrix, and a {type(model).__name__} model "
                f"is of a tensor; use {model.default_evidence}(), or leave method out"
            )
        Gibbs().kernel(model)

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        model = problem.model
        Gibbs().kernel(model, problem.data)
        sweeps = _Sweeps(problem, self.tune + self.tune // 2 + 2 * self.draws)
        sweeps.run(self.tune - self.tune // 4, "tune")
        W, H = sweeps.average(self.tune // 4)
        first = self._first(problem, sweeps, W)
        sweeps.freeze(W, H)
        sweeps.run(self.tune // 2 - self.tune // 4, "tune")
        H = sweeps.average(self.tune // 4)[1]
        second = average(sweeps.densities(H, COLUMNS, self.draws))
        worst = min(first, second, key=lambda ordinate: ordinate.effective)
        if worst.effective < MIN_EFFECTIVE:
            warn(
                f"Chib's estimate depends on {worst.effective:.1f} sweeps: log-densities at the "
                f"point spread over {worst.spread:.1f} nats, and it is too large by an unknown "
                "amount; take more draws, or use ThermodynamicIntegration()",
                SamplingWarning,
            )
        likelihood, prior = _densities(problem, W, H)
        statistics = {
            f"{name}_{side}": getattr(ordinate, name)
            for side, ordinate in (("w", first), ("h", second))
            for name in ("log_ordinate", "error", "spread", "effective")
        }
        trace = xr.Dataset(
            {
                "log_density_w": ("draw", first.parts),
                "log_density_columns": ("column", second.parts),
                "log_likelihood": likelihood,
                "log_prior": prior,
                **statistics,
                "W": (("row", "component"), W),
                "H": (("component", "column"), H.T),
            },
            attrs={
                "sampler": "Gibbs",
                "unit": "nats",
                "rate_w": model.rate_w,
                "rate_h": model.rate_h,
                "n_components": model.n_components,
                "random_seed": str(problem.seed),
            },
        )
        value = likelihood + prior - first.log_ordinate - second.log_ordinate
        return Evidence(value, math.hypot(first.error, second.error), 0.0, trace)

    def _first(self, problem: EvidenceProblem, sweeps: "_Sweeps", W: Wide) -> Ordinate:
        """Return log p(W* | V), averaged over labellings.

        Components with anything frozen are not exchangeable.
        """
        none = np.zeros(W.shape[1], bool)
        frozen, other = (none if mask is None else mask for mask in problem.model.frozen)
        free, fixed = np.flatnonzero(~(frozen | other)), np.flatnonzero(~frozen & other)
        rng = generator(problem.seed, 0, Stream.START, 2)
        permutations = sample_permutations(free.size, self.permutations, rng)
        logs = [
            np.array([[permuted_mean(A, free, fixed, permutations)] for A in tables])
            for tables in sweeps.densities(W, ROWS, self.draws)
        ]
        return average(logs)._replace(parts=np.concatenate(logs)[:, 0])


def _densities(problem: EvidenceProblem, W: Wide, H: Wide) -> tuple[float, float]:
    """Return log p(V | W, H) and log p(W, H), frozen components left out of the latter."""
    data, hyper = problem.data, problem.model.resolve(problem.data.level, 1.0)
    rows, cols = (split_factor(f, b.offsets) for f, b in ((W, data.grid.rows), (H, data.grid.cols)))
    likelihood = math.fsum(
        log_likelihood(data.view(block.row, block.col), rows[block.row], cols[block.col])
        for block in data.grid.all_blocks()
    )
    prior = sum(
        gamma_log_density(moving(factor, mask), *hyper.prior(side))
        for side, (factor, mask) in enumerate(zip((W, H), problem.model.frozen, strict=True))
    )
    return likelihood, prior


class _Sweeps:
    """A Gibbs chain with statistics of its sweeps."""

    def __init__(self, problem: EvidenceProblem, sweeps: int) -> None:
        self.problem, self.sweeps = problem, sweeps
        data, model = problem.data, replace(problem.model, dispersion=1.0)
        options = RunOptions(1, 0, 1, 1, problem.seed, "moments", 0, str(data.dtype))
        kernel = Gibbs().kernel(model, data)
        chain = Chain(Setting(data, model, kernel, options, problem.executor), 0)
        chain.start()
        self.state: ChainState = chain.tracks[0].state
        self.program = chain.program(chain.tracks[0].track)
        self.cycle = 0

    def run(self, count: int, phase: Phase, record: bool = False) -> None:
        """Run some sweeps."""
        if not count:
            return
        options, data = CycleOptions(record=record), self.problem.data
        plan = build_plan(
            self.program.kernel.schedule,
            data.n_observed,
            range(self.cycle, self.cycle + count),
            np.random.default_rng,
            lambda _: options,
        )
        self.state = self.problem.executor.run(plan, self.program, self.state, data)
        self.cycle += count
        self.problem.on_event(RunEvent(phase, self.cycle, self.sweeps))

    def average(self, count: int) -> tuple[Wide, Wide]:
        """Return the mean W (I, K) and Hᵀ (J, K) of the next sweeps, rounded to the data's type."""
        self.state.each(partial(take_counts, counts={"moments": 0}))
        self.state.each(partial(fill_array, name="mean", value=0.0))
        self.run(count, "tune", record=True)
        W, H = (self.state.gather(side, "mean") for side in ("rows", "columns"))
        return W.astype(np.float64), H.astype(np.float64)

    def freeze(self, W: Wide, H: Wide) -> None:
        """Move to a point, and keep W there."""
        for factor, values in ((ROWS, W), (COLUMNS, H)):
            self.state.each(take_values, factor, pieces_of(self.problem.data.grid, factor, values))
        every = np.ones(W.shape[1], bool)
        self.program = replace(self.program, frozen=(every, self.program.frozen[1]))

    def densities(self, point: Wide, factor: int, count: int) -> Iterator[Wide]:
        """Yield the records of `MeasuringKernel` in the next sweeps, in batches of equal size.

        For W these are tables (sweeps, K, K), for H log-densities (sweeps, J).
        """
        plain = self.program
        grid, none = self.problem.data.grid, [np.ones((0, 0))] * self.problem.data.grid.blocks
        for number in (ROWS, COLUMNS):
            pieces = pieces_of(grid, number, point) if number == factor else none
            self.state.each(partial(take_array, name=POINT), number, pieces)
        kernel, point_spec = plain.kernel, {POINT: ArraySpec(changes="never", wide=True)}
        measuring = MeasuringKernel(
            kernel.options, kernel.schedule, kernel.arrays | point_spec, measured=factor
        )
        self.program = replace(plain, kernel=measuring)
        for batch in np.array_split(np.arange(count), BATCHES):
            self.run(len(batch), "draw")
            cycles = range(self.cycle - len(batch), self.cycle)
            drawn = [self.state.sums((cycle, POINT), factor) for cycle in cycles]
            self.state.clear_records()
            bands = [np.stack(records) for records in zip(*drawn, strict=True)]
            yield np.sum(bands, axis=0) if factor == ROWS else np.concatenate(bands, axis=1)
        self.program = plain
