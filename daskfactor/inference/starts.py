"""Where chains start: multiplicative updates that go on for as long as they lead anywhere."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.executors.base import Executor
from daskfactor.executors.state import ChainState
from daskfactor.inference.dispersion import DispersionRule
from daskfactor.inference.multiplicative import (
    FIT_EVERY,
    LAST_LOOK,
    OnStep,
    PointFit,
    mean_floor,
    objective,
    relevance,
    run_updates,
    update,
)
from daskfactor.inference.program import Fit, evaluate
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
SHRINK = 1e-3
"""What an extrapolated step leaves of an entry, at least."""


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
    least, most = passes

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
        rule.settle(phi, last=False)
        phi = rule.fixed or phi
        hyper = relevance(data, model, state, point.hyper._replace(dispersion=phi))
        fit = point.fit
        before = now = objective(model, state, hyper, fit)
        for _ in range(FIT_EVERY // TRIO):
            fit, now = _extrapolate(data, model, state, executor, hyper, now)
        done += FIT_EVERY // TRIO * TRIO
        rule.fade(model, state)
        # What fading components leave unexplained must not make the others fade.
        phi = min(phi, rule.estimate(fit)) if model.shares_rates else rule.estimate(fit)
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
    bands = state.bands()

    def step() -> list[Array]:
        rates = relevance(data, model, state, hyper)
        for factor in (0, 1):
            update(data, model, state, executor, rates, factor)
        return [band.values.astype(np.float64) for band in bands]

    def look() -> tuple[Fit, float]:
        law, _ = model.at(hyper)
        fit = evaluate(executor, data, state, law, mean_floor(data, law))
        return fit, objective(model, state, relevance(data, model, state, hyper), fit)

    start, first, second = [band.values.astype(np.float64) for band in bands], step(), step()
    change = [one - zero for zero, one in zip(start, first, strict=True)]
    bend = [two - one - r for one, two, r in zip(first, second, change, strict=True)]
    sizes = [sum(float(np.vdot(part, part)) for part in parts) for parts in (change, bend)]
    reach = max(1.0, (sizes[0] / sizes[1]) ** 0.5) if sizes[1] > 0 else 1.0
    for band, zero, two, r, v in zip(bands, start, second, change, bend, strict=True):
        band.values[:] = np.maximum(zero + 2 * reach * r + reach**2 * v, SHRINK * two)
    step()
    fit, value = look()
    if value <= best:
        return fit, value
    for band, two in zip(bands, second, strict=True):
        band.values[:] = two
    return look()
