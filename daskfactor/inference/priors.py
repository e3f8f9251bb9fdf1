"""Draw hyperparameters of gamma priors between segments: links to covariates, shapes and rates.

One after the other: the link of every factor that has covariates, given rates and shapes; its
precision; shapes, with learnt rates integrated out; rates. Rows without any data are integrated
out of all that wherever there are covariates, as in `daskfactor.inference.links`, and drawn from
their prior after it.
"""

import math
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.state import FactorBand
from daskfactor.inference.bands import pieces_of, take_array
from daskfactor.inference.links import (
    LINK_PRECISIONS,
    LINKS,
    Draw,
    observed_pieces,
    place,
    telling_rows,
)
from daskfactor.inference.multiplicative import totals_of
from daskfactor.inference.program import RATE
from daskfactor.machine import single_threaded_blas
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters
from daskfactor.models.log_linear import LinkLaw, multiples
from daskfactor.models.settings import Mask, held

Array = NDArray[Any]
Links = dict[str, Array]
"""Links by their names in results, (F, K), and precisions of links."""


class Drawn(NamedTuple):
    """Hyperparameters, links, and the log prior density of what of these is learnt."""

    hyper: Hyperparameters
    links: Links
    log_density: float


def draw_priors(context: Draw, hyper: Hyperparameters, links: Links) -> Drawn:
    """Draw what the priors learn, given a state, in whose bands what belongs there is put.

    These are rates that entries do not share with their component, and rows without data.
    ``links`` are the present ones; none: they start where their density is largest.
    """
    setting, state, rng = context
    model, mean = cast("GammaFactors", setting.model), setting.data.level
    apart, log_density, links = {}, 0.0, dict(links)
    linked = [factor for factor, table in enumerate(model.covariates) if table is not None]
    for factor in linked:
        new_links, apart[factor] = _draw_link(context, factor, hyper, links)
        links |= new_links
        log_density += _log_prior(model, factor, links)
    shapes = hyper.shape_w, hyper.shape_h
    totals = totals_of(model, state, apart)
    shapes = model.draw_shapes(mean, shapes, totals, rng)
    drawn = model.draw_rates(mean, shapes, totals, rng)
    rates: list[Any] = list(model.rates_under(mean, shapes))
    for factor, rate in enumerate(drawn):
        if rate is not None and model.rates_of[factor] == "component":
            rates[factor] = tuple(map(float, rate))
        elif rate is not None:
            pieces = pieces_of(setting.data.grid, factor, rate[:, None].copy())
            state.each(partial(take_array, name=RATE), factor, pieces)
    hyper = Hyperparameters(hyper.dispersion, rates[0], rates[1], *shapes)
    for factor in linked:
        _tell_rows(context, factor, hyper, links)
    return Drawn(hyper, links, log_density + model.log_hyperprior(mean, shapes, drawn))


def _free(model: GammaFactors, factor: int) -> NDArray[np.bool_]:
    """Return a mask of the components that have a prior."""
    mask = model.frozen[factor]
    return np.ones(model.n_components, bool) if mask is None else ~mask


def _draw_link(
    context: Draw, factor: int, hyper: Hyperparameters, links: Links
) -> tuple[Links, Array]:
    """Draw a link and its precision; with the entries of rows that have data, less its effect.

    τ ~ Gamma(1 + n / 2, 1 / τ⁰ + ½ Σ γ²) for n numbers γ. Where both factors share rates, these
    are held, and elsewhere drawn along.
    """
    setting, state, rng = context
    model, observed_covariates = cast("GammaFactors", setting.model), setting.told[factor]
    free, start = _free(model, factor), model.starting_ridges[factor]
    rate, shape = hyper.prior(factor)
    rate = np.broadcast_to(np.asarray(rate, np.float64), free.shape)[free]
    level = None
    if not model.shares_rates:
        level = model.hyperpriors(setting.data.level, (hyper.shape_w, hyper.shape_h))[factor]
    name, of_name = LINKS[factor], LINK_PRECISIONS[factor]
    ridge = float(links.get(of_name, start))
    theta = telling_rows(setting, state, factor)
    with single_threaded_blas():  # the same bits whatever the machine does meanwhile
        law = LinkLaw.of(observed_covariates, theta[:, free], (shape, ridge), rate, level)
        if name in links:
            now = links[name][:, free]
            now = now if level is None else np.vstack([now, -np.log(rate)])
        else:
            now = law.centre()
        link = np.zeros((observed_covariates.shape[1], free.size))
        link[:, free] = law.draw(now, rng)[: len(link)]
        theta = theta / multiples(observed_covariates, link)
    if getattr(model, of_name) == "auto":
        squares = 1.0 / start + 0.5 * float(np.square(link).sum())
        ridge = rng.gamma(1.0 + 0.5 * len(link) * free.sum()) / squares
    return {name: link, of_name: np.asarray(ridge)}, theta


def _log_prior(model: GammaFactors, factor: int, links: Links) -> float:
    """Return the log prior density of a link, and of its precision where that is drawn."""
    link, ridge = links[LINKS[factor]], float(links[LINK_PRECISIONS[factor]])
    count, start = len(link) * int(_free(model, factor).sum()), model.starting_ridges[factor]
    result = 0.5 * count * math.log(ridge / (2 * math.pi))
    result -= 0.5 * ridge * float(np.square(link).sum())
    if getattr(model, LINK_PRECISIONS[factor]) == "auto":
        result -= math.log(start) + ridge / start
    return result


def _tell_rows(context: Draw, factor: int, hyper: Hyperparameters, links: Links) -> None:
    """Give every row its rates, and draw rows without data under these."""
    setting, state, rng = context
    model, (rate, shape) = setting.model, hyper.prior(factor)
    covariates: Any = model.covariates[factor]
    with single_threaded_blas():
        rates = rate / multiples(covariates, links[LINKS[factor]])
    place(setting, state, factor, RATE, rates)
    rows = [np.flatnonzero(~seen) for seen in observed_pieces(setting, factor)]
    drawn = [rng.standard_gamma(shape, (indices.size, model.n_components)) for indices in rows]
    state.each(partial(take_unit_draws, frozen=model.frozen[factor]), factor, rows, drawn)


def take_unit_draws(band: FactorBand, rows: Array, drawn: Array, frozen: Mask) -> None:
    """Put draws at rate 1 into some rows, divided by the rates of these."""
    tiny = np.finfo(band.values.dtype).tiny
    with held(band.values, frozen):
        band.values[rows] = np.maximum(drawn / band.arrays[RATE][rows], tiny)
