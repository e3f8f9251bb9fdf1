"""One temperature by a sampler of the package: a whole chain of a run, on one worker."""

from dataclasses import replace

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.evidence.exact import prior_draw
from daskfactor.evidence.series import Series
from daskfactor.executors import SerialExecutor
from daskfactor.executors.state import make_state
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.options import RunOptions
from daskfactor.inference.passes import evaluate
from daskfactor.models.tweedie import TweedieNMF

SMALLEST_MEAN = 1e-30
"""Floor of μ for likelihoods under the prior, which no gradient is taken of."""


def prior_fits(
    model: TweedieNMF, data: BlockedData, rng: np.random.Generator, draws: int
) -> Series:
    """-Σ d_β at independent draws from the prior."""
    executor = SerialExecutor()
    fits = np.empty(draws)
    for draw in range(draws):
        W, H = (factor.astype(data.dtype) for factor in prior_draw(model, data, rng))
        state = make_state(data.grid, W, H)
        fit = evaluate(executor, data, state, model.likelihood, SMALLEST_MEAN)
        fits[draw] = fit.negative_divergence
    return Series(fits)


def sampled_fits(
    model: TweedieNMF,
    data: BlockedData,
    sampler: Sampler,
    address: tuple[int, int],
    t: float,
    lengths: tuple[int, int, int],
) -> Series:
    """-Σ d_β at the draws of a chain at temperature t, addressed (seed, number)."""
    seed, number = address
    options = _options(sampler, lengths, seed, str(data.dtype))
    setting = Setting(data, model, sampler, options, SerialExecutor(), temperature=t)
    chain = setting.chain(number)
    chain.start()
    found: list[list[float]] = [[] for _ in sampler.tracks]
    for end in setting.ends:
        chain.advance(end)
        if end > options.tune:
            _collect(chain, found)
        chain.forget()
    series = [np.array(values) for values in found]
    return Series(series[0], series[1] if len(series) > 1 else None)


def _options(sampler: Sampler, lengths: tuple[int, int, int], seed: int, dtype: str) -> RunOptions:
    """Counts of draws and of tuning cycles that every track of the sampler divides."""
    draws, tune, every = lengths
    coarseness = max(track.coarseness for track in sampler.tracks)
    draws, tune = (-(-count // coarseness) * coarseness for count in (draws, tune))
    sampler.check_lengths(draws, tune)
    return RunOptions(draws, tune, 1, every, seed, "moments", 0, dtype)


def _collect(chain: Chain, found: list[list[float]]) -> None:
    for run, values in zip(chain.tracks, found, strict=True):
        options = chain.track_options(run.track)
        values.extend(
            run.fits[cycle].negative_divergence
            for cycle in sorted(run.fits)
            if options.draw_index(cycle) is not None
        )


def without_choices(model: TweedieNMF, data: BlockedData, dispersion: float) -> TweedieNMF:
    """The model with every setting a number."""
    hyper = model.resolve(data.mean, dispersion)
    return replace(model, dispersion=hyper.dispersion, rate_w=hyper.rate_w, rate_h=hyper.rate_h)
