"""Plans of a set of particles: the methods that make them, settings decided, results planned."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.executors import Executor
from daskfactor.inference.description import coords_of, first_attrs, observed_with
from daskfactor.progress import OnEvent, Phase, RunEvent
from daskfactor.results.schema import OBJECTIVE, PARTICLES, RATES, THRESHOLD
from daskfactor.results.spec import RunSpec
from daskfactor.stein.ensemble import (
    Ensemble,
    Objective,
    OnShare,
    Particle,
    choose_optimizer,
    optimise,
    prepared,
)
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.measure import dispersion_of
from daskfactor.stein.particles import Particles
from daskfactor.stein.scores import divergences, make_target
from daskfactor.stein.simplex_hmc import SimplexHMC
from daskfactor.stein.starts import PILOTS
from daskfactor.stein.state import Problem
from daskfactor.stein.stein_descent import SteinDescent
from daskfactor.stein.svgd import SVGD

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
    model: Any
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


Array = NDArray[Any]


@dataclass(frozen=True)
class Settings:
    """What was asked for; plain values, written into the results."""

    particles: int
    pilot: int
    kernel: dict[str, Any]
    tangent: bool
    align: bool
    seed: int
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Job(NamedTuple):
    """A model whose settings are numbers, its data, and how particles are made."""

    data: BlockedData
    model: Any
    method: Method
    options: Settings
    runner: Executor
    on_event: OnEvent
    objective: Objective

    @classmethod
    def of(
        cls,
        data: BlockedData,
        model: Any,
        method: Method,
        options: Settings,
        runner: Executor,
        on_event: OnEvent,
    ) -> "Job":
        """Decide what is left ``"auto"``: threshold or dispersion and rates, the optimiser."""
        phi = dispersion_of(runner, data, model, options.seed)
        model, hyper = model.with_numbers(data.mean, phi)
        objective = Objective(model.n_components, model.beta, *hyper)
        if isinstance(method, Ensemble):
            optimizer = choose_optimizer(method.optimizer, data, objective)
            method = replace(method, optimizer=optimizer)
        job = cls(data, model, method, options, runner, on_event, objective)
        if model.has_threshold and model.threshold == "auto":
            return job._replace(model=pilot(job))
        return job

    @property
    def constants(self) -> dict[str, float]:
        """Return what was decided, by name."""
        return {name: float(getattr(self.model, name)) for name in self.model.from_data}

    def spec(self, stored: bool) -> RunSpec:
        """Plan what the results will hold."""
        data, silf = self.data, self.model.has_threshold
        parts = self.model.to_dict(), self.method.to_dict(), self.options.to_dict()
        return RunSpec(
            shape=(*data.shape, self.model.n_components),
            chains=1,
            draws=self.options.particles,
            dims=(data.labels.row_dim, data.labels.col_dim),
            coords=coords_of(data),
            dtype=self.options.dtype,
            statistics=(*PARTICLES, OBJECTIVE) if silf else PARTICLES,
            constants=THRESHOLD if silf else RATES,
            observed=observed_with(data, stored),
            attrs={
                **first_attrs(data, *parts, self.runner),
                "particles": self.options.particles,
                **self.constants,
            },
        )

    def particles(self, count: int, first: int, phase: Phase) -> Iterator[Particle]:
        """Particles from number ``first`` on; ``count`` in all, or beyond `PILOTS`."""
        made, end = first % PILOTS, count if first < PILOTS else PILOTS + count

        def tell(share: float) -> None:
            self.on_event(RunEvent(phase, made + share, count))

        kernel, tangent = IMQ(**self.options.kernel), self.options.tangent
        of = self.runner, self.data, self.model, self.objective, self.method, kernel, tangent
        for one in make_particles(Task(*of, self.options.seed), end, first, tell):
            yield one
            made += 1

    def objectives(self, W: Array, H: Array) -> NDArray[np.float64]:
        """F of particles (M, I, K) and (M, K, J) in the order of the grid."""
        grid = self.data.grid
        held = Particles(W, H, grid.rows, grid.cols, None, None, self.data.dtype)
        target = make_target(self.data, self.model, 1.0)
        return divergences(self.runner, self.data, target, held)


def pilot(job: Job) -> Any:
    """Give the model its threshold, by runs from random starts at default settings.

    Source: Masood and Doshi-Velez, section 6.1.
    """
    model, count = job.model, job.options.pilot
    known = replace(model, threshold=1.0)  # any number: objectives do not depend on it
    method = Ensemble(start="random")
    if isinstance(job.method, Ensemble):
        method = replace(method, optimizer=job.method.optimizer)
    runs, objectives = job._replace(model=known, method=method), []
    for done, one in enumerate(runs.particles(count, PILOTS, "pilot"), 1):
        objectives.append(model.factor * float(runs.objectives(one.W[None], one.H[None])[0]))
        job.on_event(RunEvent("pilot", done, count))
    return model.resolve(objectives)
