"""Make the first states of chains: the best of short fits, and updates while the density rises.

An `Init` says which. Random numbers have the address of chain and attempt, so that a start is the
same whatever the number of chains.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import Array, ChainState, FactorBand, make_state
from daskfactor.inference.bands import drop_arrays
from daskfactor.inference.dispersion import dispersion_rule
from daskfactor.inference.inits import SHORT, Init
from daskfactor.inference.multiplicative import (
    FIT_EVERY,
    LAST_LOOK,
    Descent,
    OnStep,
    balance,
    report_nothing,
    run_updates,
    start_state,
    update,
    with_fixed,
)
from daskfactor.inference.setting import Setting
from daskfactor.inference.singular import prepare_starts

BEHIND, ENOUGH = 0.1, 0.003
"""Rise of the log posterior density, in nats per parameter over `FIT_EVERY` iterations, above
which a warm start goes on, and below which it then ends.

The draws of a posterior lie half a nat per parameter below its mode.
"""
FAR = 1.0
"""Rise above which a warm start that had to end warns: tuning makes up for smaller ones."""
FADED = 1e-4
"""The same where components fade: what two of them share goes over to one ever so slowly."""
TRIO = 3
"""Iterations of an extrapolated step."""
POINTS = ("start", "first", "second")
"""Arrays of a band: values at the start, after the first update and after the second."""
SHRINK = 1e-3
"""Least share of an entry that an extrapolated step leaves."""

Make = Callable[[int, int], ChainState]
"""Function that makes the first state of a chain's attempt, both by number."""


def state_maker(
    data: BlockedData, model: Any, executor: Executor, init: Init, seed: int, chains: int = 1
) -> Make:
    """Return a function that makes first states; factors that all share are made once, here."""
    if init.W is not None:
        return lambda chain, attempt: executor.distribute(result_state(data, model, init, chain))
    if init.made_by_bands:
        return lambda chain, attempt: start_state(data, model, seed, chain, attempt, executor)
    law, count = model.without_spikes(), chains * init.starts
    made = prepare_starts(executor, data, law, init.kind, count, seed, stacked=True)

    def make(chain: int, attempt: int) -> ChainState:
        W, H = made(chain * init.starts + attempt)
        state = with_fixed(make_state(data.grid, W, np.ascontiguousarray(H.T)), data, model)
        balance(state, model.frozen)  # no update leaves zero
        return executor.distribute(state)

    return make


def result_state(data: BlockedData, model: Any, init: Init, chain: int) -> ChainState:
    """Make the state of the factors of a result that a chain begins with."""
    W, Ht = (
        np.array(model.with_constants(side, values, data.mean), data.dtype, order="C")
        for side, values in zip(("rows", "columns"), init.factors(chain), strict=True)
    )
    state = make_state(data.grid, *factors_on_grid(data, W, Ht))
    return with_fixed(state, data, model, rescale=False)


def factors_on_grid(data: BlockedData, W: Array, Ht: Array) -> list[Array]:
    """Put W and Hᵀ of the caller in the grid's order; of a tensor every further factor apart."""
    ends = np.cumsum([side.size for side in data.grid.sides[1:]])[:-1]
    return [W[data.order(0)], *np.split(Ht[data.order(1)], ends)]


def first_state(
    setting: Setting, make: Make, chain: int, on_step: OnStep | None
) -> tuple[ChainState, OnStep]:
    """Return the state that a chain's warm start goes on from, and how to report on the latter."""
    init, law, report = setting.init, cast("Any", setting.model), on_step or report_nothing
    if init.starts == 1:
        return make(chain, 0), report
    model, ahead, most = law.without_spikes(), init.iterations, setting.warm_passes[1]

    def begin(attempt: int) -> Descent:
        rule = dispersion_rule(model, setting.data, setting.sampler.dispersion)
        state = make(chain, attempt)
        return Descent(setting.data, model, setting.executor, state, rule)

    best = best_of(map(begin, range(init.starts)), lambda done: report(done, ahead + most))
    return best, lambda done, total: report(ahead + done, ahead + total)


def best_of(
    descents: Iterable[Descent], on_step: Callable[[int], None] = lambda done: None
) -> ChainState:
    """Return the state with the highest log density after a few updates of each.

    Densities are compared two by two at the smaller of both dispersions. ``on_step`` receives the
    number of iterations done in all.
    """
    best: Descent | None = None
    for number, descent in enumerate(descents):

        def report(done: int, _: int, before: int = number * SHORT) -> None:
            on_step(before + done)

        latest = run_updates(descent, SHORT, on_step=report)
        if best is not None:
            phi = smaller(best.hyper.dispersion, latest.hyper.dispersion)
            latest = latest if loss_at(latest, phi) < loss_at(best, phi) else best
        best = latest
    assert best is not None, "there is no start without a state"
    return best.state


def loss_at(descent: Descent, dispersion: Any) -> float:
    """Return the objective at a dispersion, which the likelihood itself may depend on."""
    descent = replace(descent)
    descent.set_dispersion(dispersion)
    if descent.likelihood.numbers or descent.model.joins:
        descent.evaluate()
    return descent.loss


def smaller(one: Any, other: Any) -> Any:
    """Return the smaller of two dispersions; of several matrices, of each."""
    return tuple(map(min, one, other)) if isinstance(one, tuple) else min(one, other)


def climb(
    descent: Descent, passes: tuple[int, int], on_step: OnStep = report_nothing
) -> tuple[int, float]:
    """Update W and H, in place, until the log density hardly rises any more.

    ``passes`` are the least and the largest number of iterations. The first ones are plain
    updates; what comes after the least is extrapolated, because updates creep along what
    large counts determine well in combination only.

    Returns
    -------
    iterations
        Their number.
    rise
        How fast the density still rose: in nats per parameter over the last `FIT_EVERY`
        iterations, or about as many; 0 where nothing was measured.
    """
    (least, most), rule, model = passes, descent.rule, descent.model
    run_updates(descent, least, on_step=lambda done, _: on_step(done, most))
    if least < LAST_LOOK + FIT_EVERY:
        return least, 0.0
    (_, before), (_, after) = descent.objective[-2:]
    done, phi = least, rule.estimate(descent.fit)
    rise = per_parameter(before - after, phi, descent)
    enough = ENOUGH if rise > BEHIND else BEHIND
    enough = FADED if model.shares_rates else enough
    while rise > enough and done + FIT_EVERY <= most:
        phi = descent.settle(phi, last=False)
        descent.set_dispersion(phi)
        before = descent.loss
        for _ in range(FIT_EVERY // TRIO):
            extrapolate(descent)
        done += FIT_EVERY // TRIO * TRIO
        rule.fade(model, descent.state)
        # What fading components leave unexplained must not make the others fade.
        estimate = rule.estimate(descent.fit)
        phi = smaller(phi, estimate) if model.shares_rates else estimate
        rise = per_parameter(before - descent.loss, phi, descent)
        descent.objective.append((done, descent.loss))
        on_step(done, most)
    return done, rise


def per_parameter(fall: float, dispersion: Any, descent: Descent) -> float:
    """Turn a fall of the objective into nats per parameter."""
    phi = descent.model.likelihood.at(dispersion)[1]
    return float(fall / phi / max(descent.rule.parameters, 1))


def extrapolate(descent: Descent) -> None:
    """Take three updates for a step along where two of them lead: θ + 2 α r + α² v, updated.

    With r the first update's change, r + v the second's, and α = |r| / |v|, at least 1. If the
    objective is above that before, the step is undone and the two updates stay.

    Source: Varadhan and Roland 2008, "Simple and globally convergent methods for accelerating
    the convergence of any EM algorithm", scheme S3.
    """
    state, before = descent.state, descent.loss
    state.each(partial(save_values, name=POINTS[0]))
    for name in POINTS[1:]:
        descent.follow_rates()
        update(descent)
        state.each(partial(save_values, name=name))
    change, bend = (sum(sizes) for sizes in zip(*state.each(measure_change), strict=True))
    state.each(
        partial(extrapolate_band, reach=max(1.0, (change / bend) ** 0.5) if bend > 0 else 1.0)
    )
    descent.follow_rates()
    update(descent)
    descent.evaluate()
    descent.follow_rates()
    if descent.loss > before:
        state.each(restore_values)
        descent.evaluate()
        descent.follow_rates()
    state.each(partial(drop_arrays, names=POINTS))


def save_values(band: FactorBand, name: str) -> None:
    """Copy a band's values into an array of it."""
    band.arrays[name] = band.values.copy()


def restore_values(band: FactorBand) -> None:
    """Restore the values that both updates led to."""
    band.values[:] = band.arrays[POINTS[-1]]


def changes(band: FactorBand) -> tuple[Array, Array, Array]:
    """Return the start, the change r by the first update, and the change v of the change."""
    zero, one, two = (band.arrays[name].astype(np.float64) for name in POINTS)
    change = one - zero
    return zero, change, two - one - change


def measure_change(band: FactorBand) -> tuple[float, float]:
    """Return |r|² and |v|² of a band's entries."""
    _, change, bend = changes(band)
    return float(np.vdot(change, change)), float(np.vdot(bend, bend))


def extrapolate_band(band: FactorBand, reach: float) -> None:
    """Go to θ + 2 α r + α² v, and no nearer to zero than to a share of where updates led."""
    start, change, bend = changes(band)
    least = SHRINK * band.arrays[POINTS[-1]].astype(np.float64)
    band.values[:] = np.maximum(start + 2 * reach * change + reach**2 * bend, least)
