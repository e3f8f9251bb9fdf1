"""The tiny problems as methods that make particles are given them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors import SerialExecutor
from daskfactor.stein.descent import Motion
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.particles import Posterior

KERNEL = IMQ(0.7, 2.5, -0.5, -0.3)


def posed(case, data, **settings):
    """The posterior of a problem."""
    usual = {"executor": SerialExecutor(), "kernel": KERNEL}
    return Posterior(data=data, model=case.model, **(usual | settings))


def starts(case, data, count):
    """Some particles of a problem, in the order of the grid."""
    W, H = case.particles(count)
    if data.row_order is not None and data.col_order is not None:
        W, H = W[:, data.row_order], H[:, :, data.col_order]
    return W, H


def placed(case, count, blocks=2, dtype="float64", **settings):
    """The posterior of a problem that is kept in memory, and some of its particles."""
    data = case.open(blocks, dtype)
    return posed(case, data, **settings), starts(case, data, count)


class Made(NamedTuple):
    """Particles one after the other, (M, I, K) and (M, K, J), and what each took, (M,)."""

    W: NDArray[Any]
    H: NDArray[Any]
    seconds: NDArray[np.float64]
    n_iter: NDArray[np.int64]


def stacked(made):
    """All particles together, or those of all steps; they are numbered from 0 on."""
    particles = [one for step in made for one in getattr(step, "particles", [step])]
    numbers, *rest = zip(*particles, strict=True)
    assert list(numbers) == list(range(len(numbers)))
    return Made(*map(np.array, rest))


def moved(method, posterior, starts, on_share=lambda share: None):
    """Ends of a descent from starts, and its number of steps."""
    motion = Motion.start(posterior, starts, method.auto)
    while method.goes_on(motion):
        motion = method.step_from(motion)
        on_share(method.share(motion))
    return method.ends(motion), motion.number
