"""Mean-field variational Bayes for allocation models: a lower bound of the log evidence.

Hidden parts of the tokens of one observed cell are multinomial under q, tables are
Dirichlet, the intensity is gamma, all independent of one another. With

    log q(h | m) = sum_n [psi(beta(cell_n)) - psi(sum beta(total_n))] + const
    beta = alpha + <C>

the bound at the beta that belongs to q is

    ELBO = log_factor + constant + log f(<C>) - sum_m X_m sum_h q(h | m) log q(h | m)

where log f is the law of the urns' counts, continued to real counts. Draws from one
shared table need nothing of their own: log theta enters the joint density linearly, so
<C> is the sum of the expected counts of all draws, and the formulas stay as they are.

Source: M. B. Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor
factorizations by simulating Pólya urns".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.compiled_model import (
    AllocationMethod,
    Columns,
    CompiledModel,
    compile_model,
)
from daskfactor.allocation.mean_field import add_up, gamma_functions, inner, share_out
from daskfactor.checks import positive_number, warn, whole_number
from daskfactor.errors import SamplingWarning
from daskfactor.evidence.base import Evidence, EvidenceProblem
from daskfactor.random import Stream, generator

Vector = NDArray[np.float64]
Map = Callable[[Callable[[int, Any], "Start"], Sequence[int]], "list[Start]"]

ANNEAL_COUNTS = (1.0, 0.3, 3.0, 0.1, 0.6)
"""Pseudo-counts that starts begin with, in turn: large ones find what is coarse, small ones fine
structure; which bound is the largest depends on how much is counted a cell."""
ANNEALED_SWEEPS = 100
SPREAD = 10.0
"""Shape of the gamma numbers that tables are made of at first, and perturbed by later."""
MAX_COUNT_BYTES = 2**27
"""Bytes of counts that all starts may send back; beyond it the best one is run again."""


class VBResult(NamedTuple):
    """Result of many starts.

    Attributes
    ----------
    elbo
        The largest bound, in nats.
    elbos
        Bounds of every start, (starts, iterations), NaN where a start had ended.
    iterations, converged
        Of every start: sweeps, and whether the bound had stopped to rise.
    best
        The start with the largest bound.
    mean_counts
        Expected counts of all urns under the best q, (cells,).
    """

    elbo: float
    elbos: Vector
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    best: int
    mean_counts: Vector


class Start(NamedTuple):
    """Result of one start; ``counts`` may be left out."""

    elbos: Vector
    converged: bool
    counts: Vector | None


def coordinate_ascent(
    compiled: CompiledModel, rng: np.random.Generator, pseudo: float, counts: Vector
) -> Iterator[float]:
    """Yield the bound after every sweep from random tables, with the ``counts`` (cells,) then.

    First come `ANNEALED_SWEEPS` sweeps with posterior mean tables under larger pseudo-counts,
    then a small perturbation. Expectations of logarithms under small pseudo-counts hold on to
    whatever the first sweep happened to share out. The perturbation is for few tokens, where these
    sweeps end with hidden states that are all alike: no maximum under the model's own
    pseudo-counts.
    """
    owner, alpha = compiled.owner, compiled.cell_alpha
    annealed = np.maximum(alpha, pseudo)
    straight = (compiled.column == np.arange(compiled.states)).all(axis=1)
    places = (compiled.row, compiled.column, straight, compiled.values)
    share, totals = np.empty(compiled.states), np.zeros(compiled.totals)
    digamma, total_digamma = np.empty_like(counts), np.empty_like(totals)
    weight, level = np.ones_like(counts), np.zeros_like(counts)

    def log_f() -> float:
        """Return log f of the counts but for a constant; compute digamma of its shapes."""
        value: float = gamma_functions(alpha, counts, digamma)
        return value - gamma_functions(compiled.total_alpha, totals, total_digamma)

    def perturb() -> None:
        np.multiply(weight, rng.standard_gamma(SPREAD, weight.size), out=weight)
        np.log(weight, out=level)

    counts[:] = 0.0
    # The bound's part that no q changes.
    fixed = compiled.log_factor + compiled.constant - log_f()
    perturb()
    for _ in range(ANNEALED_SWEEPS):
        share_out(*places, weight, level, share, counts)
        np.add(annealed, counts, out=weight)
        add_up(owner, weight, totals)
        weight /= totals[owner]
        np.log(weight, out=level)
    perturb()
    while True:
        entropy = share_out(*places, weight, level, share, counts) - inner(counts, level)
        add_up(owner, counts, totals)
        yield fixed + log_f() + entropy
        np.subtract(digamma, total_digamma[owner], out=level)
        np.exp(level, out=weight)


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

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.AllocationModel.nmf(2)
    >>> X = dfac.simulate(model, (3, 4), total=9, random_seed=0).counts
    >>> run = {"random_seed": 0, "progressbar": False}
    >>> dfac.log_evidence(X, model, dfac.VariationalBayes(starts=3), **run).bound
    True
    """

    starts: int = 10
    max_iterations: int = 1000
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        whole_number("starts", self.starts, 1)
        whole_number("max_iterations", self.max_iterations, 1)
        object.__setattr__(self, "tolerance", positive_number("tolerance", self.tolerance))

    def run(self, compiled: CompiledModel, seed: int, map_function: Map) -> VBResult:
        """Ascend from random tables many times, and take the best ascent.

        Random numbers depend on the number of the start alone; ``map_function`` calls
        ``function(item, workspace)`` for all items.
        """
        limits = (self.max_iterations, self.tolerance)
        one = partial(_one_start, compiled, limits, seed)
        light = self.starts * compiled.cells * 8 <= MAX_COUNT_BYTES
        starts = map_function(partial(one, light), range(self.starts))
        finals = np.array([start.elbos[-1] for start in starts])
        best = int(finals.argmax())
        counts = starts[best].counts
        if counts is None:
            counts = one(True, best).counts
        assert counts is not None
        iterations = np.array([start.elbos.size for start in starts])
        elbos = np.full((self.starts, iterations.max()), np.nan)
        for row, start in zip(elbos, starts, strict=True):
            row[: start.elbos.size] = start.elbos
        converged = np.array([start.converged for start in starts])
        return VBResult(float(finals[best]), elbos, iterations, converged, best, counts)

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        compiled = compile_model(problem.model, problem.data)
        mapped = partial(problem.map, name="variational", message=_message)
        result = self.run(compiled, problem.seed, mapped)
        if not result.converged[result.best]:
            warn(
                f"the best of {self.starts} starts was still rising after {self.max_iterations} "
                "iterations: its bound holds, but is not the best there is; raise max_iterations "
                "or tolerance",
                SamplingWarning,
            )
        columns: Columns = {
            "elbo": (("start", "iteration"), result.elbos),
            "iterations": (("start",), result.iterations),
            "converged": (("start",), result.converged),
        }
        trace = self._trace(compiled, result.mean_counts, columns)
        trace = trace.assign_attrs(best_start=result.best, random_seed=str(problem.seed))
        return Evidence(result.elbo, 0.0, 0.0, trace, bound=True)


def _message(start: Start) -> str:
    return f"bound {start.elbos[-1]:.6g}"


def _one_start(
    compiled: CompiledModel,
    limits: tuple[int, float],
    seed: int,
    keep: bool,
    number: int,
    work: Any = None,
) -> Start:
    """Ascend from one start; an executor maps this, on any machine."""
    del work
    max_iterations, tolerance = limits
    rng = generator(seed, number, Stream.START, compiled.states)
    counts, elbos, converged = np.empty(compiled.cells), [-np.inf], False
    for elbo in coordinate_ascent(
        compiled, rng, ANNEAL_COUNTS[number % len(ANNEAL_COUNTS)], counts
    ):
        converged = elbo - elbos[-1] <= tolerance * abs(elbo)
        elbos.append(elbo)
        if converged or len(elbos) > max_iterations:
            break
    return Start(np.array(elbos[1:]), converged, counts if keep else None)
