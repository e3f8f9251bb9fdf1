"""The Tweedie laws as functions of beta, as tests like to call them."""

from daskfactor.models.tweedie_law import Tweedie


def divergence(v, mu, beta):
    return Tweedie(beta).deviance(v, mu)


def variance(mu, dispersion, beta):
    return Tweedie(beta).variance(mu, dispersion)


def log_density(v, mu, dispersion, beta):
    return Tweedie(beta).log_density(v, mu, dispersion)


def log_normalizer(v, dispersion, beta):
    return Tweedie(beta).log_normalizer(v, dispersion)


def sample(rng, mu, dispersion, beta):
    return Tweedie(beta).sample(rng, mu, dispersion)


def has_density(beta):
    return Tweedie(beta).has_density


def check_beta(beta):
    return Tweedie(beta).beta


def observation_variance(mean, variance_of_mean, dispersion, beta):
    return Tweedie(beta).observation_variance(mean, variance_of_mean, dispersion)


def observation_interval(mean, variance_of_mean, dispersion, beta, level=0.9):
    return Tweedie(beta).interval(mean, variance_of_mean, dispersion, level)
