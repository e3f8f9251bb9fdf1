"""Ensembles: many factorizations from many starts, each the end of an optimisation."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from numpy.typing import NDArray

from daskfactor.checks import whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.memory import memory_budget
from daskfactor.errors import OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState
from daskfactor.inference.multiplicative import DispersionRule, initial_state, run_updates
from daskfactor.kernels.workspace import Workspace
from daskfactor.stein.optimizers import (
    OPTIMIZERS,
    Objective,
    OnShare,
    Optimizer,
    by_coordinates,
    by_updates,
    choose_optimizer,
    lanes_of,
    silent,
    whole_matrix,
)
from daskfactor.stein.starts import STARTS, Start, Starts, prepare_starts
from daskfactor.stein.state import Options

Array = NDArray[Any]
SINGLE: Final = 2**26
"""Bytes of data up to which every start is a task of its own; beyond, starts take turns."""
AWAY: Final = 32
"""Starts that are sent to a cluster together; here they are two for every lane."""
FILL_ITERATIONS: Final = 100
"""Of the masked fit that fills in missing entries before a singular value decomposition."""


@dataclass(frozen=True)
class Ensemble(Options):
    r"""Particles by optimisation from many starts: diverse local optima of the objective.

    Parameters
    ----------
    start
        ``"q_transform"``, the default: leading singular vectors times matrices that were
        learnt on small synthetic problems. ``"random"``, ``"nndsvdar"`` (little diverse), or
        ``"nndsvd"``, which gives one particle.
    optimizer
        ``"coordinate_descent"`` (scikit-learn's; beta = 2, no missing and no negative
        entries) or ``"multiplicative"`` (ours, for any data and beta). ``"auto"``: the first
        where it can be had and the data, of at most 1 GiB, are held in memory.
    max_iter, tol
        When to stop; None: 200 and 1e-4 for coordinate descent, scikit-learn's defaults, and
        300 and 1e-4 for multiplicative updates (see :class:`MultiplicativeUpdates`).
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
    """

    start: Start = "q_transform"
    optimizer: Optimizer | Literal["auto"] = "auto"
    max_iter: int | None = None
    tol: float | None = None
    transfer_rank: int = 3

    def __post_init__(self) -> None:
        for name, allowed in (("start", STARTS), ("optimizer", ("auto", *OPTIMIZERS))):
            if getattr(self, name) not in allowed:
                raise OptionError(
                    f"{name} must be one of {', '.join(map(repr, allowed))}, "
                    f"got {getattr(self, name)!r}"
                )
        if self.max_iter is not None:
            whole_number("max_iter", self.max_iter, 1)
        if self.tol is not None and not 0 <= self.tol < 1:
            raise OptionError(f"tol must be zero or a small positive number, got {self.tol!r}")
        whole_number("transfer_rank", self.transfer_rank, 1)

    def check_count(self, count: int) -> None:
        """Refuse many particles of a start that is always the same."""
        if self.start == "nndsvd" and count > 1:
            raise OptionError(
                f'start="nndsvd" gives one and the same start, {count} particles were asked for; '
                'take start="nndsvdar" or "q_transform", or particles=1'
            )


class Particle(NamedTuple):
    """A factorization in the order of the grid, W (I, K) and H (K, J), and what it took."""

    number: int
    W: Array
    H: Array
    seconds: float
    n_iter: int


def fill_missing(
    executor: Executor, data: BlockedData, objective: Objective, seed: int
) -> ChainState | None:
    """Factors of a masked fit, whose product fills in missing entries; None if there are none.

    Source: Masood and Doshi-Velez, section 7.3.
    """
    if not data.n_missing:
        return None
    law = objective.law
    start = initial_state(data, law.n_components, seed, 0)
    rule = DispersionRule(law, data)
    return run_updates(data, law, start, executor, rule, FILL_ITERATIONS, 1e-3).state


def optimise(
    executor: Executor,
    data: BlockedData,
    objective: Objective,
    method: Ensemble,
    starts: Callable[[int], tuple[Array, Array]],
    numbers: list[int],
    on_share: OnShare = lambda share: None,
) -> Iterator[Particle]:
    """Particles one after the other as they are finished, in the order of their numbers.

    Small data, and wherever coordinates descend: a task for every start, as many at a time
    as there are lanes and whole matrices have room. Larger data: the blocks of one start
    after the other on all lanes, and ``on_share`` is told of each.
    """
    optimizer = choose_optimizer(method.optimizer, data, objective)
    tol = 1e-4 if method.tol is None else method.tol

    def one(number: int, runner: Executor, tell: OnShare | None = None) -> Particle:
        begun = time.perf_counter()
        W, H = starts(number)
        if optimizer == "coordinate_descent":
            iterations = method.max_iter or 200
            X = whole_matrix(data)
            W, H, n_iter = by_coordinates(X, W, H, objective, iterations, tol)
        else:
            iterations = method.max_iter or 300
            W, H, n_iter = by_updates(runner, data, W, H, objective, iterations, tol, tell)
        return Particle(number, W, H, time.perf_counter() - begun, n_iter)

    def alone(number: int, work: Workspace) -> Particle:
        del work
        return one(number, SerialExecutor())

    if optimizer == "coordinate_descent" or data.nbytes <= SINGLE:
        step = 2 * lanes_of(executor) if executor.in_process else AWAY
        step = max(1, min(step, memory_budget(None) // (2 * data.nbytes)))
        for at in range(0, len(numbers), step):
            with silent():
                found = executor.map(alone, numbers[at : at + step], "warm-start")
            yield from found
    else:
        for number in numbers:
            yield one(number, executor, on_share)


def prepared(
    executor: Executor,
    data: BlockedData,
    objective: Objective,
    method: Ensemble,
    count: int,
    seed: int,
) -> Starts:
    """Starts of an ensemble; whatever they share is made here."""
    method.check_count(count)
    optimizer = choose_optimizer(method.optimizer, data, objective)
    fill = None if method.start == "random" else fill_missing(executor, data, objective, seed)
    return prepare_starts(
        executor,
        data,
        objective.n_components,
        method.start,
        count,
        seed,
        method.transfer_rank,
        fill,
        stacked=optimizer == "multiplicative",
    )
