"""What the methods that make particles are given, and what they give back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import positive_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.random import Stream, generator
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.particles import SIDES, Particles, Side
from daskfactor.stein.scores import ScoreTarget

Array = NDArray[np.float64]
Pair = tuple[Array, Array]
OnProgress = Callable[[int, int], None]
History = list[tuple[float, float]]
"""Seconds since the start, and the discrepancy of equally weighted particles then."""

SPREAD: Final = 0.1
"""Of the logarithms of entries, where one start is made into several."""


class Problem(NamedTuple):
    """A posterior of some data, and factorizations to begin with.

    Attributes
    ----------
    executor, data, target
        Where passes over the data run, the data, and the posterior density.
    model
        The target's model; under a `SILFNMF` columns of W add up to 1.
    kernel, tangent
        Of the Stein discrepancy, see :func:`stein_discrepancy`.
    starts
        W (M or 1, I, K) and H (M or 1, K, J) in the order of the grid, non-negative.
    """

    executor: Executor
    data: BlockedData
    target: ScoreTarget
    model: Any
    kernel: IMQ
    tangent: bool
    starts: tuple[Any, Any]

    @property
    def simplex(self) -> bool:
        """Tell whether columns of W add up to 1."""
        return bool(self.model.simplex)

    def particles(self, W: Any, H: Any) -> Particles:
        """Arrays (M, I, K) and (M, K, J) in the grid's order, of any float type, as particles."""
        grid = self.data.grid
        return Particles(W, H, grid.rows, grid.cols, None, None, self.data.dtype)

    def made(self, values: Pair, seconds: Array, iterations: NDArray[np.int64]) -> "Made":
        """The particles in the type of the data."""
        W, H = (np.ascontiguousarray(one, self.data.dtype) for one in values)
        return Made(W, H, seconds, iterations)


class Made(NamedTuple):
    """Particles in the order of the grid.

    Attributes
    ----------
    W, H
        (M, I, K) and (M, K, J), in the type of the data.
    seconds
        (M,), what each took; they add up to the whole run.
    n_iter
        (M,), steps of the method that each took.
    """

    W: NDArray[Any]
    H: NDArray[Any]
    seconds: Array
    n_iter: NDArray[np.int64]


class Options:
    """What the options of methods have in common."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """The options, with ``"type"`` the name."""
        return {"type": self.name, **asdict(self)}  # type: ignore[call-overload]


def checked_step(step: Any) -> Any:
    """A step that is ``"auto"`` or a positive number.

    Raises
    ------
    OptionError
        If it is neither.
    """
    if isinstance(step, str):
        if step != "auto":
            raise OptionError(f'step must be "auto" or a positive number, got {step!r}')
        return step
    return positive_number("step", step)


def given(problem: Problem, count: int, seed: int) -> Pair:
    """``count`` starts in double precision, on the simplex where the model wants it.

    A single start is copied, and each entry of the second to last copy multiplied with
    e^(0.1 z), z standard normal; constants of the model stay.

    Raises
    ------
    OptionError
        If there are neither ``count`` starts nor one.
    """
    W, H = (np.array(one, dtype=np.float64) for one in problem.starts)
    if len(W) != len(H) or len(W) not in (1, count):
        raise OptionError(
            f"{count} particles need one start or {count} of them, got {len(W)} of W and {len(H)} "
            "of H; pass one of these"
        )
    if len(W) < count:
        (rows, width), columns = W.shape[1:], H.shape[2]
        W = W * _factors(problem, "rows", (count, rows, width), seed)
        H = H * _factors(problem, "columns", (count, columns, width), seed).swapaxes(1, 2)
    if problem.simplex:
        sums = W.sum(axis=1)
        if not sums.min() > 0:
            particle, component = np.argwhere(~(sums > 0))[0]
            raise OptionError(
                f"component {component} of start {particle} is zero in all of W, so that no scale "
                "puts it on the simplex; pass a start that has some of it"
            )
        W /= sums[:, None]
        H *= sums[:, :, None]
    return W, H


def _factors(problem: Problem, side: Side, shape: tuple[int, ...], seed: int) -> Array:
    """What copies of one start are multiplied with, (M, I or J, K)."""
    rng = generator(seed, 0, Stream.START, SIDES.index(side))
    factor = np.exp(SPREAD * rng.standard_normal(shape))
    factor[0] = 1.0
    mask = problem.target.frozen(side)
    if mask is not None:
        factor[:, :, mask] = 1.0
    return factor
