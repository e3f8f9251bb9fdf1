"""Where chains start: the best of short fits, and updates for as long as they lead anywhere.

A start is asked for by an `Init`. Its random numbers have the address of chain and attempt, so
that it is the same whatever the number of chains.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import TensorGrid
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState, FactorBand, make_state
from daskfactor.inference.bands import drop_arrays
from daskfactor.inference.dispersion import DispersionRule, dispersion_rule
from daskfactor.inference.inits import SHORT, Init
from daskfactor.inference.multiplicative import (
    FIT_EVERY,
    LAST_LOOK,
    OnStep,
    PointFit,
    balance,
    mean_floor,
    objective,
    relevance,
    run_updates,
    start_state,
    update,
    with_fixed,
)
from daskfactor.inference.passes import evaluate
from daskfactor.inference.program import Fit
from daskfactor.inference.setting import Setting
from daskfactor.inference.singular import prepare_starts
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters

Array = NDArray[Any]

BEHIND, ENOUGH = 0.1, 0.003
"""Rise of the log posterior density, in nats per parameter over `FIT_EVERY` iterations, above
which a warm start goes on, and below which it then ends.

The draws of a posterior lie half a nat per parameter below its mode.
"""
FAR = 1.0
"""Rise at which a warm start that had to end is told: tuning makes up for smaller ones."""
FADED = 1e-4
"""The same where components fade: what two of them share goes over to one ever so slowly."""
TRIO = 3
"""Iterations of an extrapolated step."""
POINTS = ("start", "first", "second")
"""Arrays of a band: where it began, and where the first update and the second one led."""
SHRINK = 1e-3
"""What an extrapolated step leaves of an entry, at least."""

Make = Callable[[int, int], ChainState]
"""Makes the first state of a chain's attempt, both by number."""


def state_maker(
    data: BlockedData, model: Any, executor: Executor, init: Init, seed: int, chains: int = 1
) -> Make:
    """Prepare first states of a kind: what all chains and attempts share is made once, here."""
    if init.W is not None:
        return lambda chain, attempt: executor.hold(given_state(data, model, init, chain))
    if init.made_by_bands:
        return lambda chain, attempt: start_state(data, model, seed, chain, attempt, executor)
    law, count = model.without_spikes(), chains * init.starts
    made = prepare_starts(executor, data, law, init.kind, count, seed, stacked=True)

    def make(chain: int, attempt: int) -> ChainState:
        W, H = made(chain * init.starts + attempt)
        state = with_fixed(make_state(data.grid, W, np.ascontiguousarray(H.T)), data, model)
        balance(state, model.frozen)  # no update leaves zero
        return executor.hold(state)

    return make


def given_state(data: BlockedData, model: Any, init: Init, chain: int) -> ChainState:
    """Make the state of the factors of a result that a chain begins with."""
    parts = []
    sides = ("rows", data.row_order), ("columns", data.col_order)
    for (side, order), values in zip(sides, init.factors(chain), strict=True):
        placed = model.with_constants(side, values if order is None else values[order], data.mean)
        parts.append(np.array(placed, data.dtype, order="C"))
    if isinstance(data.grid, TensorGrid):
        parts = [parts[0], *np.split(parts[1], data.grid.starts[1:-1])]
    return with_fixed(make_state(data.grid, *parts), data, model, rescale=False)


def first_state(
    setting: Setting, make: Make, chain: int, on_step: OnStep | None
) -> tuple[ChainState, OnStep | None]:
    """Give the state that a chain's warm start goes on from, and what to tell of the latter."""
    init, data = setting.init, setting.data
    if init.starts == 1:
        return make(chain, 0), on_step
    ahead, most = init.iterations, setting.warm_passes[1]

    def tell(done: int, total: int = most) -> None:
        if on_step is not None:
            on_step(ahead + done, ahead + total)

    states = (make(chain, attempt) for attempt in range(init.starts))
    law: Any = setting.model
    given = data, law.without_spikes(), setting.executor, setting.sampler.dispersion
    return best_of(states, *given, lambda done: tell(done - ahead)), tell


def best_of(
    states: Iterable[ChainState],
    data: BlockedData,
    model: GammaFactors,
    executor: Executor,
    assumed: float | None = None,
    on_step: Callable[[int], None] | None = None,
) -> ChainState:
    """Give the state from which a few updates lead to the highest log density, after these.

    Densities are compared two by two at the smaller of both dispersions. ``assumed`` is what a
    sampler takes the dispersion to be; ``on_step`` is told how many iterations are done in all.
    """
    best: PointFit | None = None
    for number, state in enumerate(states):

        def tell(done: int, total: int, before: int = number * SHORT) -> None:
            del total
            if on_step is not None:
                on_step(before + done)

        rule = dispersion_rule(model, data, assumed)
        found = run_updates(data, model, state, executor, rule, SHORT, on_step=tell)
        if best is not None:
            phi = smaller(*(one.hyper.dispersion for one in (best, found)))
            values = [_value(one, phi, data, model, executor) for one in (best, found)]
            found = found if values[1] < values[0] else best
        best = found
    assert best is not None, "there is no start without a state"
    return best.state


def _value(
    point: PointFit, phi: float, data: BlockedData, model: GammaFactors, executor: Executor
) -> float:
    """Return the objective of a point at a dispersion, which the law itself may depend on."""
    hyper = relevance(data, model, point.state, point.hyper._replace(dispersion=phi))
    law, fit = model.at(hyper)[0], point.fit
    if law.numbers or model.joins:
        fit = evaluate(executor, data, point.state, law, mean_floor(data, law))
    return objective(model, point.state, hyper, fit)


def smaller(one: Any, other: Any) -> Any:
    """Return the smaller of two dispersions; of several matrices, of each."""
    if isinstance(one, tuple):
        return tuple(map(min, one, other))
    return min(one, other)


class Climb(NamedTuple):
    """Where a warm start has arrived: after how many iterations, and how fast it still rose.

    ``rise`` is in nats per parameter over the last `FIT_EVERY` iterations, or about as many;
    0 where it was not looked at.
    """

    point: PointFit
    iterations: int
    rise: float


def climb(
    data: BlockedData,
    model: GammaFactors,
    state: ChainState,
    executor: Executor,
    rule: DispersionRule,
    passes: tuple[int, int],
    on_step: OnStep | None = None,
) -> Climb:
    """Update W and H from a state, in place, until the log density hardly rises any more.

    ``passes`` are the least and the largest number of iterations. The first ones are plain
    updates; what comes after the least is extrapolated, because updates creep along what
    large counts determine well in combination only.
    """
    (least, most), floor = passes, mean_floor(data, model.likelihood)

    def tell(done: int, total: int = most) -> None:
        if on_step is not None:
            on_step(done, most)

    point = run_updates(data, model, state, executor, rule, least, on_step=tell)
    if least < LAST_LOOK + FIT_EVERY:
        return Climb(point, least, 0.0)
    (_, before), (_, now) = point.objective[-2:]
    done, phi = least, rule.estimate(point.fit)
    rise = (before - now) / model.likelihood.at(phi)[1] / max(rule.parameters, 1)
    enough = ENOUGH if rise > BEHIND else BEHIND
    enough = FADED if model.shares_rates else enough
    while rise > enough and done + FIT_EVERY <= most:
        phi = rule.settle(executor, state, floor, phi, last=False)
        hyper = relevance(data, model, state, point.hyper._replace(dispersion=phi))
        fit = point.fit
        before = now = objective(model, state, hyper, fit)
        for _ in range(FIT_EVERY // TRIO):
            fit, now = _extrapolate(data, model, state, executor, hyper, now)
        done += FIT_EVERY // TRIO * TRIO
        rule.fade(model, state)
        # What fading components leave unexplained must not make the others fade.
        phi = smaller(phi, rule.estimate(fit)) if model.shares_rates else rule.estimate(fit)
        rise = (before - now) / model.likelihood.at(phi)[1] / max(rule.parameters, 1)
        point = PointFit(state, hyper, fit, [*point.objective, (done, now)])
        tell(done)
    return Climb(point, done, rise)


def _extrapolate(
    data: BlockedData,
    model: GammaFactors,
    state: ChainState,
    executor: Executor,
    hyper: Hyperparameters,
    best: float,
) -> tuple[Fit, float]:
    """Take three updates for a step along where two of them lead: θ + 2 α r + α² v, updated.

    With r the first update's change, r + v the second's, and α = |r| / |v|, at least 1. If the
    objective is above ``best`` there, the step is undone and the two updates stay.

    Source: Varadhan and Roland 2008, "Simple and globally convergent methods for accelerating
    the convergence of any EM algorithm", scheme S3.
    """

    def step(name: str = "") -> None:
        update(data, model, state, executor, relevance(data, model, state, hyper))
        if name:
            state.each(partial(keep_values, name=name))

    def look() -> tuple[Fit, float]:
        law, _ = model.at(hyper)
        fit = evaluate(executor, data, state, law, mean_floor(data, law))
        return fit, objective(model, state, relevance(data, model, state, hyper), fit)

    state.each(partial(keep_values, name=POINTS[0]))
    for name in POINTS[1:]:
        step(name)
    change, bend = (sum(sizes) for sizes in zip(*state.each(measure_way), strict=True))
    reach = max(1.0, (change / bend) ** 0.5) if bend > 0 else 1.0
    state.each(partial(go_along, reach=reach))
    step()
    fit, value = look()
    if value > best:
        state.each(go_back)
        fit, value = look()
    state.each(partial(drop_arrays, names=POINTS))
    return fit, value


def keep_values(band: FactorBand, name: str) -> None:
    """Keep what a band's values are now."""
    band.arrays[name] = band.values.copy()


def _way(band: FactorBand) -> tuple[Array, Array, Array]:
    """Return the change r by the first update, that of the change v, and where both began."""
    zero, one, two = (band.arrays[name].astype(np.float64) for name in POINTS)
    change = one - zero
    return change, two - one - change, zero


def measure_way(band: FactorBand) -> tuple[float, float]:
    """Return |r|² and |v|² of a band's entries."""
    change, bend, _ = _way(band)
    return float(np.vdot(change, change)), float(np.vdot(bend, bend))


def go_along(band: FactorBand, reach: float) -> None:
    """Go to θ + 2 α r + α² v, and no nearer to zero than to a share of where updates led."""
    change, bend, start = _way(band)
    least = SHRINK * band.arrays[POINTS[-1]].astype(np.float64)
    band.values[:] = np.maximum(start + 2 * reach * change + reach**2 * bend, least)


def go_back(band: FactorBand) -> None:
    """Go back to where both updates led."""
    band.values[:] = band.arrays[POINTS[-1]]
