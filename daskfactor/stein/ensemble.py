"""What brings a particle down: scikit-learn's coordinate descent, or updates on the engine."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.checks import whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors import SerialExecutor
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, make_state
from daskfactor.inference.multiplicative import DispersionRule, initial_state, run_updates
from daskfactor.kernels.views import BlockView, SparseBlock
from daskfactor.kernels.workspace import Workspace
from daskfactor.machine import memory_budget
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.singular import compressed
from daskfactor.stein.starts import STARTS, Start, Starts, prepare_starts
from daskfactor.stein.state import Options

Array = NDArray[Any]
Optimizer = Literal["coordinate_descent", "multiplicative"]
OnShare = Callable[[float], None]
"""Told what share of a particle's iterations is done."""

OPTIMIZERS: Final = ("coordinate_descent", "multiplicative")
WHOLE: Final = 2**30
"""Bytes of data up to which whole matrices are put together unasked."""
NO_RATE: Final = 1e-30
"""A prior that is none."""


class Objective(NamedTuple):
    """What is brought down: Σ d_β + φ (λ_w ΣW + λ_h ΣH); rates are 0 under a `SILFNMF`.

    Under gamma priors of shapes a, φ (a - 1) times the sums of logarithms come off.
    """

    n_components: int
    beta: float
    dispersion: float = 1.0
    rate_w: float = 0.0
    rate_h: float = 0.0
    shape_w: float = 1.0
    shape_h: float = 1.0

    @property
    def law(self) -> TweedieNMF:
        """The model whose maximum a posteriori this is the minimum of."""
        rates = {"rate_w": self.rate_w or NO_RATE, "rate_h": self.rate_h or NO_RATE}
        return TweedieNMF(
            self.n_components,
            beta=self.beta,
            dispersion=self.dispersion,
            shape_w=self.shape_w,
            shape_h=self.shape_h,
            **rates,
        )


def choose_optimizer(
    wanted: Optimizer | Literal["auto"], data: BlockedData, objective: Objective
) -> Optimizer:
    """The optimiser by name; refuses coordinate descent where it cannot be had.

    The choice depends on the data, and on nothing of the executor: particles would differ.

    Raises
    ------
    OptionError
        With what is in the way.
    """
    if wanted == "multiplicative":
        return wanted
    hindrance = None
    if objective.beta != 2.0:
        hindrance = f"it brings down ‖V - WH‖², and the model has beta={objective.beta:g}"
    elif (objective.shape_w, objective.shape_h) != (1.0, 1.0):
        hindrance = "its penalties are linear, and the model has gamma priors"
    elif data.n_missing:
        hindrance = f"it knows no missing entries, of which there are {data.n_missing}"
    elif data.minimum < 0:
        hindrance = f"it takes no negative entries, and the data go down to {data.minimum:g}"
    large = not data.in_memory or data.nbytes > WHOLE
    if hindrance is None and not (wanted == "auto" and large):
        return "coordinate_descent"
    if wanted == "auto":
        return "multiplicative"
    raise OptionError(
        f'optimizer="coordinate_descent" cannot be used: {hindrance}; use "multiplicative"'
    )


def lanes_of(executor: Executor) -> int:
    """How many starts an executor works on at a time."""
    return max(1, executor.report.lanes * executor.report.workers)


def whole_matrix(data: BlockedData) -> Any:
    """All of the data in the order of the grid, an array or compressed rows."""
    bands = range(data.grid.blocks)
    if isinstance(data.view(0, 0), BlockView):
        out = np.empty(data.grid.shape, data.dtype)
        for block in data.grid.all_blocks():
            view: Any = data.view(*block)
            out[data.grid.slices(block)] = view.block
        return out
    rows = [sparse.hstack([compressed(_sparse(data, row, col)) for col in bands]) for row in bands]
    whole: Any = sparse.vstack(rows)
    return whole.tocsr()


def _sparse(data: BlockedData, row: int, col: int) -> SparseBlock:
    view = data.view(row, col)
    assert isinstance(view, SparseBlock)
    return view


def by_coordinates(
    X: Any, W: Array, H: Array, objective: Objective, max_iter: int, tol: float
) -> tuple[Array, Array, int]:
    """Coordinate descent on ‖X - WH‖²/2 and the penalties; factors and iterations."""
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
        alpha_W=objective.dispersion * objective.rate_w / X.shape[1],
        alpha_H=objective.dispersion * objective.rate_h / X.shape[0],
        l1_ratio=1.0,
    )
    return W, H, int(n_iter)


@contextmanager
def silent() -> Iterator[None]:
    """Without scikit-learn's word that a descent was stopped: ``n_iter`` tells.

    Around calls of all lanes, not inside one: filters belong to the whole process.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def by_updates(
    executor: Executor,
    data: BlockedData,
    W: Array,
    H: Array,
    objective: Objective,
    max_iter: int,
    tol: float,
    on_share: OnShare | None = None,
) -> tuple[Array, Array, int]:
    """Multiplicative updates on the engine; factors and iterations."""
    law = objective.law
    rule = DispersionRule(law, data)
    state = make_state(data.grid, W, np.ascontiguousarray(H.T))

    def tell(done: int, total: int) -> None:
        if on_share is not None:
            on_share(done / total)

    fit = run_updates(data, law, state, executor, rule, max_iter, tol, tell)
    Ht = fit.state.gather("columns")
    return fit.state.gather("rows"), np.ascontiguousarray(Ht.T), fit.objective[-1][0]


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
