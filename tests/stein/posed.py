"""The tiny problems as methods that make particles are given them."""

from typing import Any

from daskfactor.data.blocks import BlockedData
from daskfactor.executors import SerialExecutor
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.scores import make_target
from daskfactor.stein.state import Problem
from tests.stein.problems import Problem as Case

KERNEL = IMQ(0.7, 2.5, -0.5, -0.3)


def posed(case: Case, data: BlockedData, count: int, **settings: Any) -> Problem:
    """With `count` starts, in the order of the grid."""
    W, H = case.particles(count)
    if data.row_order is not None and data.col_order is not None:
        W, H = W[:, data.row_order], H[:, :, data.col_order]
    target = make_target(data, case.model)
    usual = {"executor": SerialExecutor(), "kernel": KERNEL, "tangent": False, "starts": (W, H)}
    return Problem(data=data, target=target, model=case.model, **(usual | settings))


def quiet(done: int, total: int) -> None:
    """Progress that nobody looks at."""
