"""Chains of Tweedie factorizations: multiplicative warm start, the majoriser's metric, φ."""

from dataclasses import replace
from typing import Any, Literal, Self, cast

import numpy as np

from daskfactor.checks import whole_number
from daskfactor.executors.state import ChainState
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.multiplicative import (
    DispersionRule,
    balance,
    mean_floor,
    run_updates,
    start_state,
    typical_value,
)
from daskfactor.inference.passes import Fit, evaluate, log_normalizer_sum, shares
from daskfactor.inference.program import drop_adaptation, prepare_state, refresh_metric
from daskfactor.inference.run import OnStep
from daskfactor.inference.track import TrackRun
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF

RUNAWAY = 1e3
"""A chain whose average μ is this many times the data's is taken to have diverged."""


FALL = 3.0
"""Nats per parameter below its start at which a chain no longer samples the posterior.

A posterior lies about half a nat per parameter below its mode.
"""


class TweedieChain(Chain):
    """A chain of a `TweedieNMF`."""

    hyper: Hyperparameters
    model: TweedieNMF

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        self.model = cast("TweedieNMF", setting.model)
        self.rule = DispersionRule(self.model, setting.data)
        if setting.sampler.dispersion is not None:
            self.rule.assume(setting.sampler.dispersion)
        self.hyper = Hyperparameters(1.0, 1.0, 1.0)
        self.normalizer = 0.0
        self.floor = mean_floor(setting.data, setting.model.likelihood)
        self.fits: tuple[float, float] | None = None
        """Minus the divergence at the start, and where the chain is now."""

    def start(self, on_step: OnStep | None = None, first: Chain | None = None) -> None:
        """Start from multiplicative updates, balanced, with the metric there.

        The run's first chain decides for all whether counts are Poisson.
        """
        setting = self.setting
        if isinstance(first, TweedieChain):
            self.rule.follow(first.rule)
        data, model, executor = setting.data, self.model, setting.executor
        state = start_state(data, model, setting.options.seed, self.number)
        passes = setting.warm_passes
        if passes:
            start = model.without_spikes()
            point = run_updates(data, start, state, executor, self.rule, passes, on_step=on_step)
            fit = point.fit
        else:
            fit = evaluate(executor, data, state, model.likelihood, self.floor)
        self.fits = fit.negative_divergence, fit.negative_divergence
        estimate = self.rule.at_point(fit)
        self.rule.settle(estimate)
        self.hyper = model.resolve(data.mean, self.rule.fixed or estimate)
        balance(state, model.frozen)
        prepare_state(state, setting.sampler.arrays)
        if "metric" in setting.sampler.arrays:
            self._first_metric(state)
        self._refresh_normalizer()
        self.tracks = [TrackRun(setting.sampler.tracks[0], state)]

    def _first_metric(self, state: ChainState) -> None:
        setting = self.setting
        likelihood = self.model.likelihood
        for side, bands in (("rows", state.rows), ("columns", state.cols)):
            found = shares(setting.executor, setting.data, state, side, likelihood, self.floor)
            for band, share in zip(bands, found, strict=True):
                band.arrays["curvature"][:] = share.denominator
                band.counts["curvature"] = 1
        refresh_metric(state, self.tempered, self.model.frozen)

    def _refresh_normalizer(self) -> None:
        self.normalizer = log_normalizer_sum(
            self.setting.data,
            self.hyper.dispersion,
            self.model.likelihood,
            self.setting.executor,
        )

    def attrs(self) -> dict[str, float]:
        return dict(self.hyper._asdict())

    def memory(self) -> dict[str, Any]:
        return {
            "hyper": list(self.hyper),
            "fixed": self.rule.fixed,
            "normalizer": self.normalizer,
            "fits": self.fits,
        }

    def recall(self, memory: dict[str, Any]) -> None:
        self.hyper = Hyperparameters(*memory["hyper"])
        self.rule.fixed = memory["fixed"]
        self.normalizer = memory["normalizer"]
        fits = memory.get("fits")  # runs of older versions have none
        self.fits = None if fits is None else (fits[0], fits[1])

    def model_warning(self) -> str | None:
        if not self.rule.counts or self.rule.fixed is not None:
            return None
        K = self.model.n_components
        components = "1 component gives" if K == 1 else f"{K} components give"
        if self.hyper.dispersion > 1:
            cause = "they need more components, or are no Poisson counts; compare with a larger "
            cause += "n_components"
        else:  # more components could only fit them more closely
            cause = "they are no Poisson counts, as counts without their zeros are not, or have "
            cause += "too many components; compare with a smaller n_components"
        return (
            f"around the means that {components} them, the counts "
            f"vary {self.hyper.dispersion:.3g} times as much as Poisson counts, and the dispersion "
            f"was set to that: {cause}, or pass dispersion=1.0 for Poisson counts all the same"
        )

    def sampler_warning(self) -> str | None:
        if self.fits is None or not self.setting.warm_passes:
            return None
        parameters = sum(self.setting.data.shape) * self.model.n_components
        fall = (self.fits[0] - self.fits[1]) / self.hyper.dispersion / parameters
        if fall <= FALL:
            return None
        return (
            f"the log-likelihood is {fall:.1f} nats per parameter below that of the start, where a "
            "posterior would be less than one: the step is too large for data as informative as "
            "these, and the draws are spread too widely; choose a smaller step or fewer blocks, "
            'or use PSGLD(transition="cir") or LangevinDynamics()'
        )

    @property
    def tempered(self) -> Hyperparameters:
        """Return hyperparameters of p(V | W, H)^t p(W, H): the power t divides the dispersion."""
        return self.hyper._replace(dispersion=self.hyper.dispersion / self.setting.temperature)

    def _ran_away(self, run: TrackRun) -> bool:
        data, state = self.setting.data, run.state
        columns = [
            np.sum([band.values.sum(axis=0, dtype=np.float64) for band in bands], axis=0)
            for bands in (state.rows, state.cols)
        ]
        average = float(columns[0] @ columns[1]) / (data.shape[0] * data.shape[1])
        size = max(typical_value(data), abs(data.maximum), abs(data.minimum))
        return bool(average > RUNAWAY * size)

    def _adapt(self, end: int) -> None:
        """Estimate the dispersion anew while tuning; free what is for tuning alone after it."""
        fine = self.tracks[0]
        if self.fits is not None and fine.fits:
            latest = fine.fits[max(fine.fits)].negative_divergence
            self.fits = self.fits[0], latest
        if end <= self.setting.frozen_from and self.rule.fixed is None:
            estimate = self.rule.at_draw(fine.fits[fine.cycle - 1])
            self.hyper = self.hyper._replace(dispersion=estimate)
            if "metric" in self.setting.sampler.arrays:
                for run in self.tracks:
                    refresh_metric(run.state, self.tempered, self.model.frozen)
            self._refresh_normalizer()
        if end >= self.setting.options.tune:
            for run in self.tracks:
                drop_adaptation(run.state)

    def _lp(self, fit: Fit) -> float:
        return fit.negative_divergence / self.hyper.dispersion + self.normalizer


class NonNegativeSampler(Sampler):
    """A sampler of non-negative models, which starts from multiplicative updates.

    A subclass is a frozen dataclass with the field ``warm_start``.
    """

    warm_start: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.warm_start != "auto":
            whole_number("warm_start", self.warm_start, 0)

    def for_compilation(self) -> Self:
        return replace(self, warm_start=2)  # type: ignore[type-var]  # subclasses are dataclasses

    def chain(self, setting: Setting, number: int) -> Chain:
        return TweedieChain(setting, number)
