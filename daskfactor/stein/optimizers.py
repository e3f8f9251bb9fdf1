"""What brings a particle down: scikit-learn's coordinate descent, or updates on the engine."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.executors.state import make_state
from daskfactor.inference.multiplicative import DispersionRule, run_updates
from daskfactor.kernels.views import BlockView, SparseBlock
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF
from daskfactor.stein.singular import compressed

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

    @classmethod
    def of(cls, model: TweedieNMF, hyper: Hyperparameters) -> "Objective":
        """The negative log posterior density of a model, times φ."""
        (rate_w, shape_w), (rate_h, shape_h) = hyper.prior(0), hyper.prior(1)
        numbers = (hyper.dispersion, rate_w, rate_h, shape_w, shape_h)
        return cls(model.n_components, model.beta, *numbers)

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

    def tell(iteration: int, value: float) -> None:
        del value
        if on_share is not None:
            on_share(iteration / max_iter)

    fit = run_updates(
        data,
        law,
        state,
        executor,
        rule,
        max_iter,
        tol,
        tell,
    )
    Ht = fit.state.gather("columns")
    return fit.state.gather("rows"), np.ascontiguousarray(Ht.T), fit.objective[-1][0]
