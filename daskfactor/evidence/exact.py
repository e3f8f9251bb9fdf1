"""One temperature without any bias of step size: rows moved one by one, and accepted or not."""

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.evidence.entries import Sides
from daskfactor.evidence.series import Series
from daskfactor.kernels.rowwise import LONGEST, SMALLEST, Entries, Prior, climb, log_fit, run_sweeps
from daskfactor.models.fixed import FixedComponents
from daskfactor.models.tweedie import TweedieNMF

Factor = NDArray[np.float64]

BATCHES = 12
"""Parts of tuning, after each of which the proposal's length is looked at."""
LEAST_ACCEPTED = 0.25
CLIMB = 300
"""Multiplicative updates before the first sweep."""


def prior_draw(
    model: TweedieNMF, data: BlockedData, rng: np.random.Generator
) -> tuple[Factor, Factor]:
    """W (I, K) and Hᵀ (J, K) from their prior, frozen components as they are."""
    hyper = model.resolve(data.mean, 1.0)
    drawn = []
    for side, (length, fixed, order) in enumerate(
        zip(data.shape, model.fixed, (data.row_order, data.col_order), strict=True)
    ):
        rate, shape = hyper.prior(side)
        factor = rng.standard_gamma(shape, (length, model.n_components)) / rate
        _put(fixed, factor, order)
        drawn.append(np.maximum(factor, SMALLEST))
    return drawn[0], drawn[1]


def _put(fixed: FixedComponents | None, factor: Factor, order: NDArray[np.int64] | None) -> None:
    if fixed is not None:
        fixed.put(factor, slice(None) if order is None else order)


def priors(model: TweedieNMF, data: BlockedData) -> tuple[Prior, Prior]:
    """Both priors as the kernels take them."""
    hyper = model.resolve(data.mean, 1.0)
    masks = [
        np.zeros(model.n_components, dtype=bool) if mask is None else mask for mask in model.frozen
    ]
    return Prior(*hyper.prior(0), masks[0]), Prior(*hyper.prior(1), masks[1])


def prior_series(
    model: TweedieNMF, data: BlockedData, sides: Sides, rng: np.random.Generator, draws: int
) -> Series:
    """Fits at independent draws from the prior: t = 0 without a chain."""
    fits = np.empty(draws)
    for draw in range(draws):
        W, H = prior_draw(model, data, rng)
        fits[draw] = log_fit(W, H, sides.by_rows, model.beta)
    return Series(fits)


class TemperedChain:
    """Draws from p(V | W, H)^t p(W, H) at one t; ``W`` and ``H`` (Hᵀ) are its state."""

    def __init__(
        self, model: TweedieNMF, data: BlockedData, sides: Sides, rng: np.random.Generator
    ) -> None:
        self.model, self.sides, self.rng = model, sides, rng
        self.W, self.H = prior_draw(model, data, rng)
        self.priors = priors(model, data)
        self.tau = LONGEST

    def _target(self, t: float) -> tuple[Entries, Entries, float, float, Prior, Prior]:
        """What the kernels are told of p(V | W, H)^t p(W, H)."""
        s = t / float(self.model.dispersion)
        return self.sides.by_rows, self.sides.by_cols, self.model.beta, s, *self.priors

    def sweep(self, t: float, count: int) -> tuple[NDArray[np.float64], float]:
        """Fits after ``count`` sweeps at temperature t, and the share of accepted rows."""
        fits = np.empty(count)
        accepted = run_sweeps(self.W, self.H, *self._target(t), self.tau, self.rng, fits)
        return fits, accepted / max(1, count * (len(self.W) + len(self.H)))

    def climb(self, t: float, count: int) -> None:
        """Go where sweeps without noise lead: among the bulk of the posterior at t."""
        climb(self.W, self.H, *self._target(t), count)

    def tune(self, t: float, count: int) -> None:
        """Sweeps that are not looked at; the proposal is shortened while it is too bold."""
        for batch in range(BATCHES):
            size = count * (batch + 1) // BATCHES - count * batch // BATCHES
            _, accepted = self.sweep(t, size)
            if size and accepted < LEAST_ACCEPTED:
                self.tau = min(self.tau, 2.0) / 2.0


def tempered_series(
    model: TweedieNMF,
    data: BlockedData,
    sides: Sides,
    rng: np.random.Generator,
    t: float,
    lengths: tuple[int, int, int],
) -> Series:
    """Fits of one chain at one temperature; ``lengths`` are draws, tuning sweeps, thinning."""
    draws, tune, every = lengths
    chain = TemperedChain(model, data, sides, rng)
    chain.climb(t, CLIMB)
    chain.tune(t, tune)
    fits, accepted = chain.sweep(t, draws * every)
    return Series(fits[every - 1 :: every], acceptance=accepted)
