"""Parameters of models with gamma priors: links, rates, shapes, scales; and where chains start.

One after the other: the link of every factor that has covariates, given rates and shapes; its
precision; shapes, with learnt rates integrated out; rates. Rows without any data are integrated
out of all that wherever there are covariates, as in `daskfactor.inference.parameters`, and drawn
from their prior after it. The dispersion and the scales follow.
"""

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from daskfactor.executors.state import Array, ChainState, FactorBand
from daskfactor.inference.bands import column_sums, multiply, put_array
from daskfactor.inference.dispersion import dispersion_rule, typical_value
from daskfactor.inference.inits import DRAWS
from daskfactor.inference.multiplicative import (
    Descent,
    OnStep,
    balance,
    even_out,
    mean_floor,
    totals_of,
)
from daskfactor.inference.parameters import (
    LINKS,
    LikelihoodParameter,
    Link,
    Parameter,
    Start,
    Values,
    View,
)
from daskfactor.inference.passes import Gathered, Place, SharePass, every, run_pass
from daskfactor.inference.program import (
    COLUMNS,
    DISPERSION,
    RATE,
    ROWS,
    Fit,
    band_prior,
    factor_word,
    prepare_state,
)
from daskfactor.inference.setting import Setting, in_callers_order
from daskfactor.inference.starts import Make, climb, first_state, state_maker
from daskfactor.kernels.philox import Address
from daskfactor.kernels.variates import fill_gamma
from daskfactor.machine import single_threaded_blas
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.log_linear import LinkLaw, multiples
from daskfactor.models.rates import draw_scales
from daskfactor.models.settings import EFFECTIVE, Mask, preserve_columns
from daskfactor.random import Stream, noise_key

HEATING = 10
"""Sweeps from the mode of a posterior to the bulk of one of its powers."""
RUNAWAY = 1e3
"""A chain whose average μ is this many times the data's is taken to have diverged."""


def sum_penalties(band: FactorBand, hyper: Hyperparameters, factor: int) -> Array:
    """Add up every column, times the rates of its prior, (K,)."""
    penalties = band_prior(band, hyper, factor)[0] * band.values
    return np.asarray(penalties.sum(axis=0, dtype=np.float64))


def draw_by_share(
    gathered: Gathered, hyper: Hyperparameters, frozen: tuple[Mask, ...], key: Array
) -> None:
    """Draw from Gamma(θ num / φ + a, den / φ + λ)."""
    band, share, factor, cycle = gathered
    num, den = (np.maximum(part.astype(np.float64), 0.0) / hyper.dispersion for part in share)
    rate, shape = hyper.prior(factor)
    with preserve_columns(band.values, frozen[factor]):
        address = Address(key, cycle, factor_word(factor), band.offset)
        fill_gamma(band.values * num + shape, den + rate, *address, band.values)


def take_unit_draws(band: FactorBand, rows: Array, drawn: Array, frozen: Mask) -> None:
    """Put draws at rate 1 into some rows, divided by the rates of these."""
    tiny = np.finfo(band.values.dtype).tiny
    with preserve_columns(band.values, frozen):
        band.values[rows] = np.maximum(drawn / band.arrays[RATE][rows], tiny)


class GammaLink(Link):
    """The link γ of a factor, and its precision: τ ~ Gamma(1 + n / 2, 1 / τ⁰ + ½ Σ γ²).

    A link starts where its density is largest. Where both factors share rates, these are fixed,
    and elsewhere drawn along.
    """

    def __init__(self, setting: Setting, factor: int) -> None:
        super().__init__(setting, factor)
        self.free = self.model.free(factor)
        self.entries: Array = np.empty(0)
        """Entries of rows that have data, brought together by `update` for `unlinked`."""

    def update(self, view: View, values: Values) -> Values:
        model, observed_covariates = self.model, self.setting.observed_covariates[self.factor]
        free, start = self.free, model.starting_ridges[self.factor]
        hyper = self.hyper(values)
        rate, shape = hyper.prior(self.factor)
        rate = np.broadcast_to(np.asarray(rate, np.float64), free.shape)[free]
        level = None
        if not model.shares_rates:
            shapes = hyper.shape_w, hyper.shape_h
            level = model.hyperpriors(self.data.level, shapes)[self.factor]
        ridge = float(values.get(self.of_name, start))
        self.entries = self.observed_rows(view.state, self.factor)
        theta = self.entries[:, free]
        with single_threaded_blas():  # the same bits whatever the machine does meanwhile
            law = LinkLaw.of(observed_covariates, theta, (shape, ridge), rate, level)
            if self.name in values:
                now = values[self.name][:, free]
                now = now if level is None else np.vstack([now, -np.log(rate)])
            else:
                now = law.centre()
            link = np.zeros((observed_covariates.shape[1], free.size))
            link[:, free] = law.draw(now, view.rng)[: len(link)]
        if getattr(model, self.of_name) == "auto":
            squares = 1.0 / start + 0.5 * float(np.square(link).sum())
            ridge = view.rng.gamma(1.0 + 0.5 * len(link) * free.sum()) / squares
        return {self.name: link, self.of_name: np.asarray(ridge)}

    def density(self, values: Values) -> float:
        """Return the log prior density of the link, and of its precision where that is drawn."""
        link, ridge = values[self.name], float(values[self.of_name])
        count, start = len(link) * int(self.free.sum()), self.model.starting_ridges[self.factor]
        result = 0.5 * count * math.log(ridge / (2 * math.pi))
        result -= 0.5 * ridge * float(np.square(link).sum())
        if getattr(self.model, self.of_name) == "auto":
            result -= math.log(start) + ridge / start
        return result

    def unlinked(self, values: Values) -> Array:
        """Return the entries of rows that have data, less the effect of the link, once."""
        theta, self.entries = self.entries, np.empty(0)
        with single_threaded_blas():
            observed = self.setting.observed_covariates[self.factor]
            return theta / multiples(observed, values[self.name])


class Rates(Parameter):
    """Shapes and rates of the priors."""

    def __init__(self, setting: Setting, links: Sequence[GammaLink]) -> None:
        super().__init__(setting)
        self.of_links = links

    def due(self, view: View) -> bool:
        return bool(self.variables)

    def update(self, view: View, values: Values) -> Values:
        """Draw them; rates that entries do not share with their component go into the bands."""
        model, mean, data = self.model, self.data.level, self.data
        unlinked = {link.factor: link.unlinked(values) for link in self.of_links}
        totals = totals_of(model, view.state, unlinked)
        shapes = model.draw_shapes(mean, (values["shape_w"], values["shape_h"]), totals, view.rng)
        drawn = model.draw_rates(mean, shapes, totals, view.rng)
        rates: list[Any] = list(model.rates_under(mean, shapes))
        for factor, rate in enumerate(drawn):
            if rate is not None and model.rates_of[factor] == "component":
                rates[factor] = tuple(map(float, rate))
            elif rate is not None:
                put_array(view.state, data.grid, factor, RATE, rate[:, None].copy())
        density = sum(link.density(values) for link in self.of_links)
        density += model.log_hyperprior(mean, shapes, drawn)
        names = (*Hyperparameters._fields[1:], "log_hyper")
        return dict(zip(names, (*rates, *shapes, density), strict=True))

    def log_prior(self, state: ChainState, values: Values) -> float:
        return float(values["log_hyper"])

    def results(self, state: ChainState, values: Values) -> Values:
        results = {"rate": values["rate_w"], EFFECTIVE.name: values["effective"]}
        for variable in self.variables:
            if variable.dims in (("row",), ("column",)):
                side = f"{variable.dims[0]}s"
                name = DISPERSION if variable.name == "dispersion" else RATE
                gathered = state.gather(side, name)[:, 0]
                results[variable.name] = in_callers_order(self.data, side, gathered)
        return results

    def attrs(self, values: Values) -> Values:
        """Return those that are not learnt, which the draws tell."""
        names = {one.name for one in self.variables if not one.name.startswith("dispersion")}
        if names:  # rates that are chosen may follow shapes that are learnt
            rates = ("rate_w", "rate_h")
            names |= {name for name in rates if isinstance(getattr(self.model, name), str)}
        fields = Hyperparameters._fields[1:]
        return {name: values[name] for name in fields if name not in names}


class GammaRows(Parameter):
    """The rates of rows of factors that have covariates, and their rows without any data."""

    def update(self, view: View, values: Values) -> Values:
        """Give every row its rates, and draw rows without data under these."""
        model, K = self.model, self.model.n_components
        for factor in self.linked:
            rate, shape = self.hyper(values).prior(factor)
            with single_threaded_blas():
                rates = rate / multiples(self.covariates[factor], values[LINKS[factor]])
            self.put(view.state, factor, RATE, rates)
            rows = self.without_data(factor)
            drawn = [view.rng.standard_gamma(shape, (indices.size, K)) for indices in rows]
            move = partial(take_unit_draws, frozen=model.frozen[factor])
            view.state.each(move, factor, rows, drawn)
        return {}


class Effective(Parameter):
    """Number of components that the data support, where both factors share rates."""

    def update(self, view: View, values: Values) -> Values:
        totals, data = totals_of(self.model, view.state), self.data
        about = values["dispersion"], data.level, data.total_mass
        return {"effective": self.model.effective_components(totals, *about)}


class Dispersion(LikelihoodParameter):
    """The dispersion, which is estimated or drawn; with it the likelihood and the warm start."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.rule: Any = dispersion_rule(self.model, self.data, setting.sampler.dispersion)
        self.floor = mean_floor(self.data, self.model.likelihood)
        self.after_warm_start = self.rule.memory, self.rule.settled
        """Fixed dispersions after the warm start, and whether the rule was settled."""

    @cached_property
    def maker(self) -> Make:
        """Return the maker of the first states of all chains of the run."""
        setting, options = self.setting, self.setting.options
        arguments = self.data, self.model, setting.executor, setting.init
        return state_maker(*arguments, options.seed, options.chains)

    def place(self, state: ChainState) -> Place:
        """Return a state as passes look at it."""
        return Place(self.setting.executor, self.data, state, self.floor)

    def start(self, number: int, lead: Any, on_step: OnStep | None) -> Start:
        """Return a first state, by multiplicative updates or of a result, and its values.

        A point is balanced; a draw stays what it is. The run's first chain decides for all
        warm starts whether counts are Poisson, and draws decide for the chains.
        """
        setting, data, model, rule = self.setting, self.data, self.model, self.rule
        passes, climbed = setting.warm_passes, (0, 0.0)
        rule.memory, rule.settled = lead.after_warm_start
        state, on_step = first_state(setting, lead.maker, number, on_step)
        if passes[1]:
            free = model.without_spikes()
            descent = Descent(data, free, setting.executor, state, rule)
            end = climb(descent, passes, on_step)
            fit = descent.fit
            if setting.sampler.warm_start == "auto":
                climbed = end
        else:
            fit, _ = rule.estimate_at(self.place(state))
        drawn = starts_from_draws(setting)
        estimate = rule.estimate(fit, at_point=not drawn)
        estimate = rule.test_poisson(self.place(state), estimate)
        self.after_warm_start = rule.memory, rule.settled
        if setting.frozen_from:
            estimate = rule.reopen(estimate)
        rule.begin(state, estimate)
        hyper = model.resolve(data.level, estimate)
        if rule.estimates:
            self.latest = hyper.dispersion, [False] * len(rule.matrices)
        if not drawn:  # share scales out between both factors
            balance(state, model.frozen)
            if model.shares_rates and model.fixed == (None, None):
                even_out(state)
        if setting.temperature is not None:
            heat(setting, number, self.place(state), hyper)
        prepare_state(state, setting.kernel.arrays)
        if drawn:
            shapes = tuple(hyper.prior(n)[1] for n in every(state))
            self.refresh(number, state, shapes)
        ends = fit.negative_divergence, fit.negative_divergence
        fixed = [None if math.isnan(phi) else phi for phi in rule.memory.tolist()]
        values = {"fits": ends, "climb": climbed, "fixed": fixed}
        values["n_parameters"] = rule.n_parameters.tolist()
        return Start(state, values | hyper._asdict())

    def recall(self, values: Values) -> None:
        fixed = values.get("fixed", self.rule.memory)  # older versions have one
        self.rule.memory = np.array(fixed, np.float64, ndmin=1)
        self.rule.n_parameters = np.array(values.get("n_parameters", self.rule.n_parameters))

    def due(self, view: View) -> bool:
        return view.cycle > 0 and self.rule.drawn and view.alone

    def update(self, view: View, values: Values) -> Values:
        rng = view.generator(Stream.HYPER, 1)
        drawn = self.rule.draw(self.place(view.state), values["dispersion"], rng)
        return self.normalized({"dispersion": drawn})

    def normalized(self, values: Values) -> Values:
        """Add what the fit leaves out of the log-likelihood; 0 where it takes a series."""
        normalizer = self.rule.normalizer(self.setting.executor, values["dispersion"])
        return values | {"normalizer": normalizer}

    def log_likelihood(self, fit: Fit, values: Values) -> float:
        """Return the log-likelihood, from a fit's sums; a relative one without a normalizer."""
        _, divided = self.model.at(self.hyper(values))
        return float(fit.negative_divergence / divided.dispersion + values["normalizer"])

    def has_diverged(self, fits: Any, state: ChainState, values: Values) -> bool:
        """Tell whether finite factors are beyond anything the data could mean."""
        data, (*sums, last) = self.data, column_sums(state)
        average = float(np.prod(sums, axis=0) @ last) / data.grid.cells
        size = max(typical_value(data), abs(data.maximum), abs(data.minimum))
        return bool(average > RUNAWAY * size)

    def look(self, state: ChainState, fit: Fit, end: int, values: Values) -> Values:
        """Estimate the dispersion anew while tuning, at a segment's end."""
        self.latest = None
        # Counts take a pass of their own.
        due = end in self.setting.tenths or not self.rule.undecided.any()
        if not (due and end <= self.setting.frozen_from and self.rule.estimates):
            return {}
        looks = [*values["looks"], self.rule.at_draw(self.place(state), fit)]
        self.latest = self.rule.mean_estimate(looks)
        return {"looks": looks}

    def take(self, estimates: Sequence[Any], values: Values) -> Values:
        """Take what the estimates of all chains of a run say, in place of the chain's own."""
        dispersion, variations = self.rule.agree(estimates, values["dispersion"])
        changes = {"variations": variations, "dispersion": dispersion}
        return changes if dispersion == values["dispersion"] else self.normalized(changes)

    def log_prior(self, state: ChainState, values: Values) -> float:
        return float(self.rule.log_prior(state, values["dispersion"]))

    def results(self, state: ChainState, values: Values) -> Values:
        names = {one.name for one in self.variables if not one.dims}
        attrs = self.rule.attrs(values["dispersion"])
        return {name: value for name, value in attrs.items() if name in names}

    def attrs(self, values: Values) -> Values:
        """Return the dispersion, or its mean where it is drawn, as predictions take it."""
        dispersion = values["mean_dispersion" if self.rule.drawn else "dispersion"]
        return {"dispersion": dispersion, **self.rule.attrs(dispersion)}


class Scales(Parameter):
    """The scale that W and H share, of every component that moves in both.

    W_k → c_k W_k and H_k → H_k / c_k with c_k from its conditional. Draws that were recorded
    stay as they are, and so does the metric: steps in one that follows the state would leave
    another law than the posterior invariant.
    """

    def due(self, view: View) -> bool:
        """Leave draws that a chain starts from as they are."""
        return view.cycle > 0 or not starts_from_draws(self.setting)

    def update(self, view: View, values: Values) -> Values:
        """Draw how W and every other factor share scales."""
        state, hyper, sides = view.state, self.hyper(values), self.data.grid.sides
        for other in range(1, state.n_factors):
            totals = []
            for factor in (ROWS, other):
                add = partial(sum_penalties, hyper=hyper, factor=factor)
                totals.append(np.sum(state.each(add, factor), 0))
            free = (totals[0] > 0) & (totals[1] > 0)
            free &= self.model.free(ROWS) & self.model.free(other)
            power = hyper.shape_w * sides[ROWS].size - hyper.shape_h * sides[other].size
            words = () if other == COLUMNS else (other,)
            uniform = view.generator(Stream.SCALE, *words).random(self.model.n_components)
            scale = np.ones(self.model.n_components)
            scale[free] = draw_scales(power, totals[0][free], totals[1][free], uniform[free])
            state.each(partial(multiply, by=scale), ROWS)
            state.each(partial(multiply, by=1.0 / scale), other)
        return {}


def starts_from_draws(setting: Setting) -> bool:
    """Tell whether chains start from draws of a result, which stay what they are."""
    return setting.init.kind == DRAWS and not setting.warm_passes[1]


def heat(setting: Setting, number: int, place: Place, hyper: Hyperparameters) -> None:
    """Take a state from the mode of the posterior to the bulk of p(V | W, H)^t p(W, H).

    Entries are drawn from Gamma(t θ num / φ + a, t den / φ + λ), in which numerator and
    denominator are those of the multiplicative update: the prior at t = 0, and with one
    component and β = 1 the full conditional at every t.
    """
    model: Any = setting.model
    key = noise_key(setting.options.seed, number, Stream.TEMPERATURE)
    draw = partial(draw_by_share, hyper=setting.tempered(hyper), frozen=model.frozen, key=key)
    program = SharePass(model.at(hyper)[0], place.floor, every(place.state), finish=draw)
    run_pass(place, program, HEATING)


def gamma_parameters(setting: Setting) -> tuple[Dispersion, list[Parameter]]:
    """Return the dispersion, and all parameters of gamma priors in the order of their draws."""
    dispersion = Dispersion(setting)
    links = [GammaLink(setting, factor) for factor in dispersion.linked]
    others = [Effective(setting)] if dispersion.model.shares_rates else []
    scales = [Scales(setting)] if setting.rescales_every else []
    first = [*links, Rates(setting, links), GammaRows(setting), *others]
    extra = [kind(setting) for kind in dispersion.model.parameter_classes]
    return dispersion, [*first, dispersion, *extra, *scales]
