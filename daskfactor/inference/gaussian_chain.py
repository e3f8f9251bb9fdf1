"""Chains of real-valued factorizations: hyperparameters are drawn as the run goes on."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from daskfactor.executors.state import ChainState
from daskfactor.inference.chain import ChainRun, Setting, TrackRun
from daskfactor.inference.gaussian_hyper import (
    HYPER_EVERY,
    HyperSampler,
    log_likelihood,
    log_prior_constant,
    warm_start,
)
from daskfactor.inference.gaussian_program import GaussianProgram
from daskfactor.inference.multiplicative import OnIteration
from daskfactor.inference.passes import Fit
from daskfactor.inference.samplers import SGHMC, Track
from daskfactor.models.gaussian import BIAS_SHARE, GaussianHyper, GaussianMF
from daskfactor.random import noise_key

RUNAWAY = 1e3
"""A chain whose mean squared residual is this many times the data's variance has diverged."""


class GaussianChain(ChainRun):
    """A chain of a `GaussianMF`."""

    hyper: GaussianHyper
    priors: GaussianHyper
    model: GaussianMF

    def __init__(self, setting: Setting, number: int) -> None:
        super().__init__(setting, number)
        assert isinstance(setting.model, GaussianMF)
        self.model = setting.model
        self.noise_sum = 0.0
        self.noise_draws = 0

    def warm_start(
        self, on_iteration: OnIteration | None = None, like: ChainRun | None = None
    ) -> None:
        """A draw from the prior, whose scales fit mean and variance of the data."""
        del on_iteration, like
        setting = self.setting
        state, self.hyper = warm_start(
            setting.data, self.model, setting.options.seed, self.number, setting.executor
        )
        self.priors = self.hyper
        for band in state.bands():
            band.arrays |= {name: np.zeros_like(band.values) for name in ("mean", "m2")}
            band.counts["moments"] = 0
        self.tracks = [TrackRun(setting.sampler.tracks[0], state)]

    def attrs(self) -> dict[str, float]:
        """The noise is the mean over the draws so far, which predictions are made with."""
        noise = self.noise_sum / self.noise_draws if self.noise_draws else self.hyper.noise
        values = {
            "dispersion": noise,
            "precision_w": float(np.mean(self.hyper.precision_w)),
            "precision_h": float(np.mean(self.hyper.precision_h)),
        }
        if self.model.biases:
            values["row_bias_precision"] = self.hyper.row_bias_precision
            values["column_bias_precision"] = self.hyper.column_bias_precision
        return values

    def memory(self) -> dict[str, Any]:
        return {
            "hyper": self.hyper.to_dict(),
            "priors": self.priors.to_dict(),
            "noise": [self.noise_sum, self.noise_draws],
        }

    def recall(self, memory: dict[str, Any]) -> None:
        self.hyper = GaussianHyper.from_dict(memory["hyper"])
        self.priors = GaussianHyper.from_dict(memory["priors"])
        self.noise_sum, self.noise_draws = memory["noise"]

    def _stops(self, start: int, end: int) -> Iterator[int]:
        """Every few cycles, at multiples of that, so that segments do not matter."""
        yield from range(start - start % HYPER_EVERY + HYPER_EVERY, end, HYPER_EVERY)
        yield end

    def _between(self, run: TrackRun, start: int, stop: int) -> None:
        setting = self.setting
        draws = sum(setting.options.draw_index(cycle) is not None for cycle in range(start, stop))
        self.noise_sum += draws * self.hyper.noise
        self.noise_draws += draws
        if stop % HYPER_EVERY:
            return  # a segment's end must leave no trace in the draws
        sampler = HyperSampler(
            self.model, setting.data, self.priors, setting.options.seed, self.number
        )
        self.hyper = sampler.adapt(
            self.hyper, run.state, run.fits[stop - 1], stop, stop <= setting.frozen_from
        )

    def _program(self, track: Track) -> GaussianProgram:
        setting, sampler = self.setting, self.setting.sampler
        assert isinstance(sampler, SGHMC)  # checked where a run starts
        key = noise_key(setting.options.seed, self.number)
        return GaussianProgram(
            hyper=self.hyper,
            biases=self.model.biases,
            key=(int(key[0]), int(key[1])),
            step=self.step_for(track),
            shrink=self.shrink,
            friction=sampler.friction,
        )

    def _log_prior(self, state: ChainState, cycle: int) -> float:
        constant = log_prior_constant(self.model, self.hyper, self.setting.data.shape)
        return constant + math.fsum(band.sums[cycle] for band in state.bands())

    def _ran_away(self, run: TrackRun) -> bool:
        count = self.setting.data.total_observed
        variance = 1.0 / (BIAS_SHARE * self.priors.row_bias_precision)  # of the data
        limit = RUNAWAY * variance * count
        return any(fit.pearson > limit for fit in run.fits.values())

    def _adapt(self, end: int) -> None:
        """Nothing more: hyperparameters are drawn inside the segment."""

    def _lp(self, fit: Fit) -> float:
        return log_likelihood(fit, self.setting.data.total_observed, self.hyper.noise)
