"""Methods that make particles, and the default: optimisation from many diverse starts.

The optimiser is scikit-learn's coordinate descent, or multiplicative updates.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import one_of, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import Executor
from daskfactor.executors.state import make_state
from daskfactor.inference.base import Algorithm
from daskfactor.inference.dispersion import DispersionRule
from daskfactor.inference.inits import KINDS
from daskfactor.inference.multiplicative import Descent, run_updates
from daskfactor.inference.run_loop import Values
from daskfactor.inference.singular import prepare_starts, silent
from daskfactor.kernels.views import Workspace
from daskfactor.machine import memory_budget
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.particles import SIDES, Posterior

Array = NDArray[Any]
Optimizer = Literal["coordinate_descent", "multiplicative"]
OnDone = Callable[[float], None]
"""Called with the number of finished particles, which may be a fraction."""

STARTS: Final = tuple(name for name, kind in KINDS.items() if kind.numbered)
OPTIMIZERS: Final = ("coordinate_descent", "multiplicative")
MAX_ASSEMBLED: Final = 2**30
"""Bytes of data up to which ``"auto"`` assembles the matrix in memory."""
SINGLE: Final = 2**26
"""Bytes of data up to which every start is one task; beyond, starts run one by one."""
AWAY: Final = 32
"""Starts that are sent to a cluster together; in this process they are two for every lane."""


def ignore(done: float) -> None:
    """Ignore progress."""


class Particle(NamedTuple):
    """A factorization in the order of the grid, W (I, K) and H (K, J), with its cost."""

    number: int
    W: Array
    H: Array
    seconds: float
    n_iter: int


class Step(NamedTuple):
    """One step of a method: the particles that it finished, and the state to resume from."""

    particles: list[Particle]
    state: Values | None = None


class ParticleMethod(Algorithm, ABC):
    """Method to make particles."""

    def check_count(self, count: int) -> None:
        """Raise OptionError if it cannot make so many particles."""
        del count

    def for_data(self, data: BlockedData, law: TweedieNMF) -> Self:
        """Return the method with a choice for every ``"auto"``; refuse data and likelihoods."""
        del data, law
        return self

    @abstractmethod
    def run(
        self,
        posterior: Posterior,
        numbers: range,
        seed: int,
        on_done: OnDone = ignore,
        state: Values | None = None,
    ) -> Iterator[Step]:
        """Make particles of these numbers, in order; ``numbers.stop`` is their total.

        With the ``state`` of an earlier step the method goes on from there, with the same bits.
        """

    def particles(
        self, posterior: Posterior, numbers: range, seed: int, on_done: OnDone = ignore
    ) -> Iterator[Particle]:
        """Yield the particles of all steps."""
        for step in self.run(posterior, numbers, seed, on_done):
            yield from step.particles


def assemble_matrix(data: BlockedData) -> Any:
    """Return all of the data in the order of the grid, an array or compressed rows."""
    X: Any = data.observed_sparse() if data.is_sparse else data.to_numpy()
    if data.row_order is not None:
        X = X[data.row_order][:, data.col_order]
        if data.is_sparse:
            X.sort_indices()
    return X


def by_coordinates(
    X: Any, W: Array, H: Array, law: TweedieNMF, max_iter: int, tol: float
) -> tuple[Array, Array, int]:
    """Run coordinate descent on ‖X - WH‖²/2 and the penalties; return factors, iterations."""
    from sklearn.decomposition import non_negative_factorization

    W, H, n_iter = non_negative_factorization(
        X,
        W.copy(),
        H.copy(),
        n_components=W.shape[1],
        init="custom",
        solver="cd",
        tol=tol,
        max_iter=max_iter,
        # scikit-learn multiplies these by J and by I.
        alpha_W=float(law.dispersion) * float(law.rate_w) / X.shape[1],
        alpha_H=float(law.dispersion) * float(law.rate_h) / X.shape[0],
        l1_ratio=1.0,
    )
    return W, H, int(n_iter)


@dataclass(frozen=True)
class Ensemble(ParticleMethod):
    r"""Particles by optimisation from many starts: diverse local optima of the objective.

    Parameters
    ----------
    start
        ``"q_transform"``, the default: leading singular vectors times matrices that were
        learnt on small synthetic problems. ``"random"``, ``"nndsvdar"`` (little diverse), or
        ``"nndsvd"``, which gives one particle.
    optimizer
        ``"coordinate_descent"`` (scikit-learn's; beta = 2, no missing and no negative
        entries) or ``"multiplicative"`` (for any data and beta). ``"auto"``: the first
        where it is possible and the data, of at most 1 GiB, are in memory.
    max_iter, tol
        Limits of iterations and of relative change; None: 200 and 1e-4 for coordinate descent,
        scikit-learn's defaults, and 300 and 1e-4 for multiplicative updates (see
        :class:`MultiplicativeUpdates`).
    transfer_rank
        Rank of the transfer matrices.

    Raises
    ------
    OptionError
        If one of them is not allowed.

    Notes
    -----
    Components beyond the transfer rank start with small random entries, as in the paper; for
    multiplicative updates, which let them grow in hundreds of iterations only, with those of
    other transfer matrices instead.

    Masood and Doshi-Velez, algorithms 1 to 4; transfer rank 3 in section 6.1.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"particles": 4, "pilot": 2, "random_seed": 0, "progressbar": False}
    >>> modes = dfac.stein_posterior(V, dfac.SILFNMF(2), dfac.Ensemble(start="random"), **run)
    >>> modes["posterior"]["W"].shape
    (1, 4, 20, 2)
    """

    start: str = "q_transform"
    optimizer: Optimizer | Literal["auto"] = "auto"
    max_iter: int | None = None
    tol: float | None = None
    transfer_rank: int = 3

    def __post_init__(self) -> None:
        one_of("start", self.start, [*STARTS])
        one_of("optimizer", self.optimizer, ("auto", *OPTIMIZERS))
        if self.max_iter is not None:
            whole_number("max_iter", self.max_iter, 1)
        if self.tol is not None and not 0 <= self.tol < 1:
            raise OptionError(f"tol must be zero or a small positive number, got {self.tol!r}")
        whole_number("transfer_rank", self.transfer_rank, 1)

    def check_count(self, count: int) -> None:
        """Refuse many particles of a start that is always the same."""
        if not KINDS[self.start].varies and count > 1:
            raise OptionError(
                f'start="{self.start}" gives one start only, got particles={count}; '
                'pass start="nndsvdar" or "q_transform", or particles=1'
            )

    def for_data(self, data: BlockedData, law: TweedieNMF) -> Self:
        """Return the method with an optimiser by name; refuse coordinate descent if impossible.

        The choice depends on the data, not on the executor, so that particles do not.

        Raises
        ------
        OptionError
            With the reason.
        """
        if self.optimizer == "multiplicative":
            return self
        reason = None
        if not law.likelihood.normal:
            reason = f"it minimises ‖V - WH‖², and the model has {law.likelihood}"
        elif (law.shape_w, law.shape_h) != (1.0, 1.0):
            reason = "its penalties are linear, and the model has gamma priors"
        elif data.n_missing:
            reason = f"it takes no missing entries, and the data have {data.n_missing}"
        elif data.minimum < 0:
            reason = f"it takes no negative entries, and the data go down to {data.minimum:g}"
        large = not data.in_memory or data.nbytes > MAX_ASSEMBLED
        if reason is None and not (self.optimizer == "auto" and large):
            return replace(self, optimizer="coordinate_descent")
        if self.optimizer == "auto":
            return replace(self, optimizer="multiplicative")
        raise OptionError(
            f'optimizer="coordinate_descent" cannot be used: {reason}; use "multiplicative"'
        )

    def run(
        self,
        posterior: Posterior,
        numbers: range,
        seed: int,
        on_done: OnDone = ignore,
        state: Values | None = None,
    ) -> Iterator[Step]:
        """Optimise every start as one task, as many at a time as lanes and memory allow.

        Multiplicative updates of large data run one start after the other on all lanes.
        """
        executor, data, law = posterior.executor, posterior.data, posterior.model.for_optimizers()
        method = self.for_data(data, law)
        updates = method.optimizer == "multiplicative"
        start = prepare_starts(
            executor, data, law, method.start, numbers.stop, seed, method.transfer_rank, updates
        )
        tol = 1e-4 if method.tol is None else method.tol

        def one(number: int, runner: Executor, on_done: OnDone = ignore) -> Particle:
            start_time = time.perf_counter()
            W, H = start(number)
            if updates:
                state = runner.distribute(make_state(data.grid, W, H.T.copy()))
                rule = DispersionRule(law, data)
                limits = method.max_iter or 300, tol
                descent = Descent(data, law, runner, state, rule)
                fit = run_updates(descent, *limits, lambda n, of: on_done(number + n / of))
                W, Ht = (fit.state.gather(side) for side in SIDES)
                H, n_iter = np.ascontiguousarray(Ht.T), fit.objective[-1][0]
            else:
                X = assemble_matrix(data)
                W, H, n_iter = by_coordinates(X, W, H, law, method.max_iter or 200, tol)
            return Particle(number, W, H, time.perf_counter() - start_time, n_iter)

        def alone(number: int, work: Workspace) -> Particle:
            del work
            return one(number, SerialExecutor())

        if updates and data.nbytes > SINGLE:
            for number in numbers:
                yield Step([executor.retry_on_loss(partial(one, number, executor, on_done))])
            return
        lanes = max(1, executor.report.lanes * executor.report.workers)
        step = 2 * lanes if executor.in_process else AWAY
        step = max(1, min(step, memory_budget(None) // (2 * data.nbytes)))
        for at in range(0, len(numbers), step):
            with silent():
                particles = executor.map(alone, numbers[at : at + step], "warm-start")
            yield from (Step([particle]) for particle in particles)
