"""A chain of a model with gamma priors: its start, its metric, its priors and its warnings."""

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.state import ChainState, FactorBand
from daskfactor.inference.bands import column_sums, drop_arrays, multiply
from daskfactor.inference.chain import Arrays, Chain, TrackRun
from daskfactor.inference.dispersion import dispersion_rule, typical_value
from daskfactor.inference.inits import DRAWS
from daskfactor.inference.links import Draw
from daskfactor.inference.multiplicative import (
    Descent,
    OnStep,
    balance,
    even_out,
    mean_floor,
    totals_of,
)
from daskfactor.inference.passes import Gathered, SharePass, every, init_band, run_pass
from daskfactor.inference.priors import draw_priors
from daskfactor.inference.program import (
    COLUMNS,
    DISPERSION,
    RATE,
    ROWS,
    STEPS,
    Fit,
    band_prior,
    factor_word,
    prepare_state,
    refresh_metric,
)
from daskfactor.inference.setting import Setting, in_callers_order
from daskfactor.inference.starts import FAR, Make, climb, first_state, state_maker
from daskfactor.kernels.philox import Address
from daskfactor.kernels.variates import fill_gamma
from daskfactor.models.gamma_factors import GammaFactors, Hyperparameters
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.rates import draw_scales
from daskfactor.models.settings import EFFECTIVE, Mask, held
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator, noise_key

Array = NDArray[Any]
HEATING = 10
"""Sweeps from the mode of a posterior to the bulk of one of its powers."""
RUNAWAY = 1e3
"""A chain whose average μ is this many times the data's is taken to have diverged."""
REMEMBERED = "climb", "effective", "fits", "log_hyper", "looks", "normalizer", "variations"
"""Attributes of a chain that a checkpoint keeps as they are."""
FALL = 3.0
"""Nats per parameter below its start at which a chain no longer samples the posterior.

A posterior lies about half a nat per parameter below its mode.
"""


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
    with held(band.values, frozen[factor]):
        address = Address(key, cycle, factor_word(factor), band.offset)
        fill_gamma(band.values * num + shape, den + rate, *address, band.values)


def sum_log_steps(band: FactorBand) -> tuple[float, int]:
    """Add up the logarithms of the steps of a band's rows; with how many these are."""
    return float(band.arrays[STEPS][:, 1].sum()), len(band.values)


class TweedieChain(Chain):
    """A chain of a `TweedieNMF`: multiplicative warm start, the majoriser's metric, φ."""

    hyper: Hyperparameters
    model: TweedieNMF

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.model = cast("TweedieNMF", setting.model)
        self.rule: Any = dispersion_rule(self.model, setting.data, setting.sampler.dispersion)
        self.after_warm_start = self.rule.memory, self.rule.settled
        """Fixed dispersions after the warm start, and whether the rule was settled."""
        self.hyper = Hyperparameters(1.0, 1.0, 1.0)
        self.normalizer = 0.0
        self.log_hyper = self.effective = 0.0
        self.floor = mean_floor(setting.data, setting.model.likelihood)
        self.fits: tuple[float, float] | None = None
        """Minus the divergence at the start, and where the chain is now."""
        self.climb = (0, 0.0)
        """Iterations of an automatic warm start, and how fast the density rose at its end."""
        self.looks: list[Any] = []
        """Estimates of the dispersion from draws while tuning."""
        self.latest: Any = None
        """Their mean, and whether to wait; None unless the last segment added an estimate."""
        self.variations: dict[str, float] = {}
        """Variation of counts as a multiple of that of Poisson counts, where not once."""

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Start from multiplicative updates or from a result, with the metric there.

        A point is balanced; a draw stays what it is. The run's first chain decides for all
        warm starts whether counts are Poisson, and draws decide for the chains.
        """
        setting = self.setting
        data, model, executor = setting.data, self.model, setting.executor
        if isinstance(first, TweedieChain):
            self.rule.memory, self.rule.settled = first.after_warm_start
        lead, passes = first if isinstance(first, TweedieChain) else self, setting.warm_passes
        state, on_step = first_state(setting, lead.maker, self.number, on_step)
        drawn = setting.init.kind == DRAWS and not passes[1]
        if passes[1]:
            free = model.without_spikes()
            descent = Descent.start(data, free, executor, state, self.rule)
            climbed = climb(descent, passes, on_step)
            fit = climbed.point.fit
            if setting.sampler.warm_start == "auto":
                self.climb = climbed.iterations, climbed.rise
        else:
            fit, _ = self.rule.estimate_at(self._place(state))
        self.fits = fit.negative_divergence, fit.negative_divergence
        estimate = self.rule.estimate(fit, at_point=not drawn)
        estimate = self.rule.test_poisson(self._place(state), estimate)
        self.after_warm_start = self.rule.memory, self.rule.settled
        if setting.frozen_from:
            estimate = self.rule.reopen(estimate)
        self.rule.begin(state, estimate)
        self.hyper = model.resolve(data.level, estimate)
        if self.rule.estimates:
            self.latest = self.hyper.dispersion, [False] * len(self.rule.matrices)
        if not drawn:
            self._level(state)
        if setting.temperature is not None:
            self._heat(state)
        prepare_state(state, setting.kernel.arrays)
        if drawn:
            self._refresh(state, tuple(self.hyper.prior(n)[1] for n in every(state)))
        self.tracks = [TrackRun.of(setting.sampler.tracks[0], setting, state)]
        if model.learnt:
            self._draw_priors(self.tracks[0], 0)
        if setting.rescales_every and not drawn:
            self._rescale(self.tracks[0])
        self._init_bands(state)
        self._follow_dispersion()

    def _level(self, state: ChainState) -> None:
        """Share the scale of the components of a point out between both factors."""
        balance(state, self.model.frozen)
        if self.model.shares_rates and self.model.fixed == (None, None):
            even_out(state)

    @cached_property
    def maker(self) -> Make:
        """Return the maker of the first states of all chains of the run."""
        setting, options = self.setting, self.setting.options
        arguments = setting.data, self.model, setting.executor, setting.init
        return state_maker(*arguments, options.seed, options.chains)

    def _heat(self, state: ChainState) -> None:
        """Take a state from the mode of the posterior to the bulk of p(V | W, H)^t p(W, H).

        Entries are drawn from Gamma(t θ num / φ + a, t den / φ + λ), in which numerator and
        denominator are those of the multiplicative update: the prior at t = 0, and with one
        component and β = 1 the full conditional at every t.
        """
        setting = self.setting
        key = noise_key(setting.options.seed, self.number, Stream.TEMPERATURE)
        draw = partial(draw_by_share, hyper=self.tempered, frozen=self.model.frozen, key=key)
        program = SharePass(self.law, self.floor, every(state), finish=draw)
        run_pass(self._place(state), program, HEATING)

    def _init_bands(self, state: ChainState) -> None:
        """Begin what the kernel learns, by the denominators of the multiplicative update."""
        setting, kernel = self.setting, self.setting.kernel
        adapted = ("adapt", "adapted")
        names = tuple(name for name, spec in kernel.arrays.items() if spec.changes in adapted)
        if names:
            tempered = setting.temperature is not None
            how: Any = {"kernel": kernel, "hyper": self.tempered, "tempered": tempered}
            finish = partial(init_band, **how)
            program = SharePass(self.law, self.floor, every(state), (), names, finish)
            run_pass(self._place(state), program)

    def step_sizes(self, run: TrackRun, cycles: list[int]) -> Array:
        """Return the steps of cycles; the geometric mean, where rows have steps of their own."""
        kernel = self.setting.kernel
        if STEPS not in kernel.arrays:
            return super().step_sizes(run, cycles)
        step = kernel.options.step
        if step == "auto":
            bands = run.state.each(sum_log_steps)
            total, rows = math.fsum(logs for logs, _ in bands), sum(count for _, count in bands)
            step = math.exp(total / rows)
        return np.full(len(cycles), float(step * self.shrink))

    def _follow_dispersion(self) -> None:
        """Recompute what depends on the dispersion: the metric, and the normaliser if it is known.

        Where it would cost a series per entry log-likelihoods are relative ones.
        """
        self._refresh_metrics()
        self.normalizer = self.rule.normalizer(self.setting.executor, self.hyper.dispersion)

    def _refresh_metrics(self) -> None:
        if "metric" in self.setting.kernel.arrays:
            for run in self.tracks:
                refresh_metric(run.state, self.tempered, self.model.frozen)

    # -- what is drawn of scales and priors ------------------------------------

    def _between(self, run: TrackRun, start: int) -> None:
        super()._between(run, start)
        if self.setting.rescales_every and run.cycle % self.setting.learns_every == 0:
            self._rescale(run)

    def _rescale(self, run: TrackRun) -> None:
        """Draw how W and H share the scale of every component that moves in both.

        W_k → c_k W_k and H_k → H_k / c_k with c_k from its conditional. Draws that were recorded
        stay as they are, and so does the metric: steps in one that follows the state would leave
        another law than the posterior invariant.
        """
        for other in range(1, run.state.n_factors):
            self._share(run, other)

    def _share(self, run: TrackRun, other: int) -> None:
        """Draw how W and another factor share scales."""
        K, state = self.model.n_components, run.state
        totals = [
            np.sum(state.each(partial(sum_penalties, hyper=self.hyper, factor=factor), factor), 0)
            for factor in (ROWS, other)
        ]
        free = (totals[0] > 0) & (totals[1] > 0)
        for mask in self.model.frozen:
            free &= True if mask is None else ~mask
        shapes = self.hyper.shape_w, self.hyper.shape_h
        sides = self.setting.data.grid.sides
        rows, columns = sides[0].size, sides[other].size
        address: Any = self.setting.options.seed, self.number, Stream.SCALE, run.cycle
        address = address if other == COLUMNS else (*address, other)
        uniform = generator(*address).random(K)
        scale = np.ones(K)
        arguments = totals[0][free], totals[1][free], uniform[free]
        scale[free] = draw_scales(shapes[0] * rows - shapes[1] * columns, *arguments)
        state.each(partial(multiply, by=scale), ROWS)
        state.each(partial(multiply, by=1.0 / scale), other)

    def _learn(self, run: TrackRun) -> None:
        self._draw_priors(run, run.cycle)
        if self.rule.drawn and len(self.tracks) == 1:
            address = self.setting.options.seed, self.number, Stream.HYPER, run.cycle, 1
            place, rng = self._place(run.state), generator(*address)
            drawn = self.rule.draw(place, self.hyper.dispersion, rng)
            self.hyper = self.hyper._replace(dispersion=drawn)
            self._follow_dispersion()
        else:
            self._refresh_metrics()

    def _draw_priors(self, run: TrackRun, cycle: int) -> None:
        """Draw shapes and rates of the priors from their conditionals, given a state."""
        setting, model = self.setting, self.model
        rng = generator(setting.options.seed, self.number, Stream.HYPER, cycle)
        drawn = draw_priors(Draw(setting, run.state, rng), self.hyper, self.links)
        self.hyper, self.links, self.log_hyper = drawn
        if model.shares_rates:
            totals, data = totals_of(model, run.state), setting.data
            about = self.hyper.dispersion, data.level, data.total_mass
            self.effective = model.effective_components(totals, *about)

    def learnt(self, run: TrackRun) -> Arrays:
        drawn: Arrays = {}
        told = self.rule.attrs(self.hyper.dispersion)
        for variable in self.model.learnt:
            if variable.dims in (("row",), ("column",)):
                side = "rows" if variable.dims == ("row",) else "columns"
                name = DISPERSION if variable.name == "dispersion" else RATE
                values = run.state.gather(side, name)[:, 0]
                drawn[variable.name] = in_callers_order(self.setting.data, side, values)
            elif variable.name in self.links:
                drawn[variable.name] = self.links[variable.name]
            elif variable is EFFECTIVE:
                drawn[variable.name] = np.asarray(self.effective)
            elif variable.name in told:
                drawn[variable.name] = np.asarray(told[variable.name])
            else:
                name = "rate_w" if variable.name == "rate" else variable.name
                drawn[variable.name] = np.asarray(getattr(self.hyper, name))
        return drawn

    def _prior_constant(self) -> float:
        log_prior = self.rule.log_prior(self.tracks[0].state, self.hyper.dispersion)
        return float(self.log_hyper + log_prior)

    def attrs(self) -> dict[str, float]:
        """Return hyperparameters; of those that are learnt the draws tell."""
        given = self.hyper._asdict()
        learnt = {own.name for own in self.model.learnt if not own.name.startswith("dispersion")}
        if self.rule.drawn:
            given["dispersion"] = self.mean_dispersion
        given |= self.rule.attrs(given["dispersion"])
        if learnt:  # rates that are chosen may follow shapes that are learnt
            names = ("rate_w", "rate_h")
            learnt |= {name for name in names if isinstance(getattr(self.model, name), str)}
        return {name: value for name, value in given.items() if name not in learnt}

    def memory(self) -> dict[str, Any]:
        given = {"hyper": list(self.hyper), "fixed": self.rule.memory}
        return super().memory() | given | {name: copy(getattr(self, name)) for name in REMEMBERED}

    def recall(self, memory: dict[str, Any]) -> None:
        hyper: Any = [tuple(own) if isinstance(own, list) else own for own in memory["hyper"]]
        self.hyper = Hyperparameters(*hyper)
        fixed = memory["fixed"]
        self.rule.memory = fixed if isinstance(fixed, list) else [fixed]  # older runs have one
        for name in REMEMBERED:
            if name in memory:  # runs of older versions have fewer
                setattr(self, name, copy(memory[name]))
        super().recall(memory)

    def warnings(self) -> tuple[str | None, str | None]:
        of_model = of_sampler = None
        phi, K = self.hyper.dispersion, self.model.n_components
        behind = self.climb[1] > FAR  # and then the dispersion may yet come down
        if self.variations and not behind:
            of_model = variation_text(self.variations, self.model)
        begun, now = self.fits or (0.0, 0.0)
        phi = self.model.at(self.hyper)[1].dispersion
        fall = (begun - now) / phi / (sum(self.setting.data.shape) * K)
        sampler = self.setting.sampler
        # Exact draws take no step too far, and fits under different laws say nothing.
        steps = self.rule.divides and sampler.biased
        if fall > FALL and self.setting.warm_passes[1] and steps:
            of_sampler = (
                f"the log-likelihood is {fall:.1f} nats per parameter below that of the start, "
                "where a posterior would be less than one: the step is too large for data as "
                "informative as these, and the draws are spread too widely; choose a smaller step "
                "or fewer blocks, or use BlockHMC() or LangevinDynamics()"
            )
        elif behind:
            of_sampler = (
                f"the warm start ended after {self.climb[0]} passes, its limit for data of this "
                f"size, while the log density still rose by {self.climb[1]:.2g} nats per parameter "
                "in 20 of them: draws may not have come as far as the posterior; pass "
                f"{sampler.name}(warm_start={10 * self.climb[0]}) as sampler, or a larger tune"
            )
        return of_model, of_sampler

    @property
    def law(self) -> Likelihood:
        return self.model.at(self.hyper)[0]

    @property
    def tempered(self) -> Hyperparameters:
        """Return hyperparameters of p(V | W, H)^t p(W, H), φ / t for the dispersion."""
        power = 1.0 if self.setting.temperature is None else self.setting.temperature
        _, divided = self.model.at(self.hyper)
        return divided._replace(dispersion=divided.dispersion / power)

    def _ran_away(self, run: TrackRun) -> bool:
        data, (*sums, last) = self.setting.data, column_sums(run.state)
        average = float(np.prod(sums, axis=0) @ last) / data.grid.cells
        size = max(typical_value(data), abs(data.maximum), abs(data.minimum))
        return bool(average > RUNAWAY * size)

    def _adapt(self, end: int) -> None:
        """Estimate the dispersion anew while tuning; free what is for tuning alone after it."""
        fine = self.tracks[0]
        if self.fits is not None and fine.fits:
            latest = fine.fits[max(fine.fits)].negative_divergence
            self.fits = self.fits[0], latest
        self.latest = None
        # Counts take a pass of their own.
        due = end in self.setting.tenths if self.rule.looks_again else True
        if end <= self.setting.frozen_from and self.rule.estimates and due:
            place = self._place(fine.state)
            self.looks.append(self.rule.at_draw(place, fine.fits[fine.cycle - 1]))
            self.latest = self.rule.mean_estimate(self.looks)
        if end >= self.setting.options.tune:
            # Rates that move take the metric with them.
            arrays = self.setting.kernel.arrays.items()
            kept = {"curvature"} if self.model.learnt else set()
            names = [n for n, spec in arrays if spec.life == "tune" and n not in kept]
            for run in self.tracks:
                run.state.each(partial(drop_arrays, names=names))

    @property
    def estimate(self) -> Any:
        return self.latest

    def take_dispersion(self, estimates: Sequence[Any]) -> None:
        estimate = self.rule.pool(estimates)
        dispersion = self.rule.snap_to_poisson(estimate)
        self.variations = self.rule.variations(estimate, dispersion)
        dispersion = self.rule.merge(self.hyper.dispersion, dispersion)
        if dispersion != self.hyper.dispersion:
            self.hyper = self.hyper._replace(dispersion=dispersion)
            self._follow_dispersion()

    def _lp(self, fit: Fit) -> float:
        _, divided = self.model.at(self.hyper)
        return float(fit.negative_divergence / divided.dispersion + self.normalizer)


def variation_text(variations: dict[str, float], model: GammaFactors) -> str:
    """Say that counts vary more, or less, than Poisson counts, and what to do."""
    above = {name: ratio for name, ratio in variations.items() if ratio > 1}
    listed = ", ".join(
        (f"the counts of {name!r} vary" if name else "the counts vary") + f" {ratio:.3g}"
        for name, ratio in (above or variations).items()
    )
    other = 'law="negative binomial"' if model.joins else "NegativeBinomialNMF"
    K = model.n_components
    components = "1 component gives" if K == 1 else f"{K} components give"
    cause = (
        "the dispersion was set to that: they need more components, or are no Poisson counts, or "
        f"would fit better from another start; compare with a larger n_components, with {other} "
        "and with starts=5, or pass dispersion=1.0 for Poisson counts all the same"
        if above
        # More components could only fit them more closely.
        else "the dispersion is 1 all the same: they are no Poisson counts, as counts without "
        "their zeros are not, or have too many components; compare with a smaller n_components"
    )
    return (
        f"around the means that {components} them, {listed} times as much as Poisson counts, "
        f"and {cause}"
    )
