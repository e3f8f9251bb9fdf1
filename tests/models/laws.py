"""The Tweedie laws as functions of beta, as tests like to call them."""

import numpy as np
from scipy import special, stats

from daskfactor.models.tweedie_law import Tweedie


def divergence(v, mu, beta):
    return Tweedie(beta).deviance(v, mu)


def log_density(v, mu, dispersion, beta):
    return Tweedie(beta).log_density(v, mu, dispersion)


def log_normalizer(v, dispersion, beta):
    return Tweedie(beta).log_normalizer(v, dispersion)


def compound_density(v, mu, phi, beta):
    """Log density by the mixture over the number of jumps, summed term by term."""
    n = np.arange(1, 3000)
    rate, scale = mu**beta / (phi * beta), phi * (1 - beta) * mu ** (1 - beta)
    if v == 0:
        return -rate
    terms = stats.poisson.logpmf(n, rate)
    terms += stats.gamma.logpdf(v, n * beta / (1 - beta), scale=scale)
    return float(special.logsumexp(terms))


def sample(rng, mu, dispersion, beta):
    return Tweedie(beta).sample(rng, mu, dispersion)


def observation_interval(mean, variance_of_mean, dispersion, beta, level=0.9):
    return Tweedie(beta).interval(mean, variance_of_mean, dispersion, level)
