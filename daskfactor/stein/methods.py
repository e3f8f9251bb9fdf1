"""How particles can be made: the methods that ``stein_posterior`` takes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.executors.base import Executor
from daskfactor.stein.direct import SteinDescent
from daskfactor.stein.ensembles import Ensemble, Particle, optimise, prepared
from daskfactor.stein.hamiltonian import SimplexHMC
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.measure import AnyModel
from daskfactor.stein.optimizers import Objective, OnShare
from daskfactor.stein.state import Problem
from daskfactor.stein.svgd import SVGD
from daskfactor.stein.targets import make_target

Baseline = SimplexHMC | SVGD | SteinDescent
Method = Ensemble | Baseline

METHODS: dict[str, type[Method]] = {
    kind.__name__: kind for kind in (Ensemble, SimplexHMC, SVGD, SteinDescent)
}
"""All methods by name."""


class Task(NamedTuple):
    """What particles are made from: data, a model of numbers, and how."""

    executor: Executor
    data: BlockedData
    model: AnyModel
    objective: Objective
    method: Method
    kernel: IMQ
    tangent: bool
    seed: int


def checked_method(method: object) -> Method:
    """The method itself, or the usual one where none is named."""
    if method is None:
        return Ensemble()
    if not isinstance(method, Method):
        names = ", ".join(f"{name}()" for name in METHODS)
        raise OptionError(
            f"method must be one of {names}, got {method!r}; leave it out for Ensemble()"
        )
    return method


def check_count(method: Method, count: int) -> None:
    """Refuse more particles than a method can make."""
    if isinstance(method, Ensemble | SimplexHMC):
        method.check_count(count)


def method_from_dict(values: dict[str, Any]) -> Method:
    """The method that ``to_dict`` described."""
    kind = METHODS.get(values.get("type", ""))
    if kind is None:
        raise StoreFormatError(
            f"the particles were made by a method called {values.get('type')!r}, which this "
            f"version does not have; it knows {', '.join(METHODS)}"
        )
    return kind(**{name: value for name, value in values.items() if name != "type"})


def make_particles(
    task: Task, count: int, first: int = 0, on_share: OnShare = lambda share: None
) -> Iterator[Particle]:
    """Particles ``first`` to ``count - 1``, in the order of their numbers."""
    if isinstance(task.method, Ensemble):
        yield from _by_optimisation(task, task.method, count, first, on_share)
        return
    for number, one in enumerate(_moved(task, task.method, count, on_share)):
        if number >= first:
            yield one


def _by_optimisation(
    task: Task, method: Ensemble, count: int, first: int, on_share: OnShare
) -> Iterator[Particle]:
    parts = task.executor, task.data, task.objective, method
    starts = prepared(*parts, count, task.seed)
    yield from optimise(*parts, starts, list(range(first, count)), on_share)


def _moved(task: Task, method: Baseline, count: int, on_share: OnShare) -> Iterator[Particle]:
    """Particles that are there together, once a method has moved them for long enough.

    A chain begins at the end of an optimisation, descents at random starts, as in Masood
    and Doshi-Velez, section 6.2.
    """
    if isinstance(method, SimplexHMC):
        begun = list(_by_optimisation(task, Ensemble(start="random"), 1, 0, lambda share: None))
        pairs = [(one.W, one.H) for one in begun]
    else:
        random = Ensemble(start="random")
        starts = prepared(task.executor, task.data, task.objective, random, count, task.seed)
        pairs = [starts(number) for number in range(count)]
    W, H = (np.stack(side) for side in zip(*pairs, strict=True))
    target = make_target(task.data, task.model, task.objective.dispersion)
    problem = Problem(
        task.executor, task.data, target, task.model, task.kernel, task.tangent, (W, H)
    )
    made = method.make(
        problem, count, task.seed, lambda done, total: on_share(count * done / total)
    )
    for number, (W, H, seconds, n_iter) in enumerate(zip(*made, strict=True)):
        yield Particle(number, W, H, float(seconds), int(n_iter))
