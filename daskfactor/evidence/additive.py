"""`GaussianAdditive` by stochastic-gradient Langevin dynamics, all temperatures side by side."""

from typing import Any

import numpy as np

from daskfactor.evidence.base import EvidenceProblem
from daskfactor.evidence.quadrature import FitSeries, Vector
from daskfactor.random import Stream, generator

STEP = 0.05
"""ε in units of the inverse curvature along Σ θ_r, the one direction that the data see."""
BATCH = 0.05
"""Share of the observations that a step looks at (250 of 5000 in the paper)."""


def additive_series(
    problem: EvidenceProblem, temperatures: Vector, lengths: tuple[int, int, int]
) -> tuple[list[FitSeries], dict[str, Any]]:
    """Log-likelihoods of all data at draws from every power posterior, and how they were made.

    One step on a batch S of n of the N observations, at temperature t:

        θ ← θ + ε (t (N/n) Σ_S (x_n - Σ θ) / σ_x² - (θ - μ_θ) / σ_θ²) + √(2ε) z

    with ε = 0.05 / (t N R / σ_x² + 1 / σ_θ²). Batches are the parts of a permutation of
    the observations, drawn anew for every pass, which takes most of their noise away. What
    is left, and the finite step, lower the mean log-likelihood by about 0.1 nats, which no
    error bar knows of. At t = 0 draws come from the prior. Şimşekli et al. 2016, equation
    10, with the factor t that is missing there.
    """
    x, model = problem.data, problem.model
    draws, tune, every = lengths
    rng = generator(problem.seed, 0, Stream.TEMPERATURE)
    hot = temperatures[1:, None]
    noise, prior = model.noise**2, model.scale**2
    curvature = hot * x.size * model.n_components / noise + 1 / prior
    step = STEP / curvature
    theta = model.draw_prior(rng, len(hot))
    # The data say where Σ θ is; a chain that starts there needs no way to it.
    theta += (hot * x.size / noise) * (x.mean() - theta.sum(axis=1, keepdims=True)) / curvature
    size = max(1, round(BATCH * x.size))
    centres = np.empty(0)
    totals = np.empty((draws, len(hot)))
    for number in range(tune + draws * every):
        if not centres.size:
            shuffled = rng.permutation(x)[: x.size // size * size]
            centres = shuffled.reshape(-1, size).mean(axis=1)
        centre, centres = centres[-1], centres[:-1]
        pull = hot * x.size * (centre - theta.sum(axis=1, keepdims=True)) / noise
        pull = pull - (theta - model.mean) / prior
        theta = theta + step * pull + np.sqrt(2 * step) * rng.standard_normal(theta.shape)
        if number >= tune and (number - tune + 1) % every == 0:
            totals[(number - tune) // every] = theta.sum(axis=1)
    cold = model.draw_prior(rng, draws).sum(axis=1)
    fits = model.log_likelihood(x, np.column_stack([cold, totals]))
    series = [FitSeries(np.ascontiguousarray(column)) for column in fits.T]
    return series, {"sampler": "SGLD"}
