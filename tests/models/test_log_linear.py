"""Links of covariates: of log-linear rates against quadrature, of real entries in closed form."""

import numpy as np
import pytest
from scipy import sparse, stats

from daskfactor.models import covariates as module
from daskfactor.models import log_linear
from daskfactor.models.covariates import Covariates
from daskfactor.models.log_linear import FARTHEST, LinkLaw, multiples
from daskfactor.models.rates import Gamma

RNG = np.random.default_rng(5)
X = np.array([[0.5], [-1.0], [2.0], [0.1]])
THETA = np.array([[0.8], [0.1], [9.0], [0.05]])
SHAPE, RIDGE, LEVEL = 0.7, 0.4, Gamma(2.0, 0.5)
COPIES = 3000


def law(kind=LinkLaw, level=None, copies=1):
    entries = np.repeat(THETA, copies, axis=1)
    return kind.of(Covariates(X.shape, X), entries, (SHAPE, RIDGE), 1.3, level)


def log_density(link, rate):
    """Of one component's entries and its link, by SciPy's gamma law."""
    rows = zip(X[:, 0], THETA[:, 0], strict=True)
    parts = [stats.gamma(SHAPE, scale=np.exp(x * link) / rate).logpdf(own) for x, own in rows]
    return sum(parts) + stats.norm(0, RIDGE**-0.5).logpdf(link)


def exact(level):
    """Mean and variance of the link, on a grid; a drawn rate is summed over."""
    link = np.linspace(-8, 8, 1601)
    if level is None:
        log_p = log_density(link, 1.3)
    else:
        rate = np.exp(np.linspace(-7, 5, 801))[:, None]
        prior = stats.gamma(level.shape, scale=1 / level.rate).logpdf(rate) + np.log(rate)
        log_p = np.logaddexp.reduce(log_density(link, rate) + prior, axis=0)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = float(p @ link)
    return mean, float(p @ (link - mean) ** 2)


def away(kind, level):
    """Largest z of mean and variance over chains from the same start, after 40 draws.

    Infinite where one of them has run away.
    """
    own, rng = law(kind, level, COPIES), np.random.default_rng(1)
    found = own.centre()
    for _ in range(40):
        found = own.draw(found, rng)
    link, (mean, variance) = found[0], exact(level)
    if not np.abs(link).max() < 1e3:
        return np.inf
    squares = (link - mean) ** 2
    z = (link.mean() - mean) / np.sqrt(variance / COPIES)
    return float(max(abs(z), abs(squares.mean() - variance) / (squares.std() / np.sqrt(COPIES))))


@pytest.mark.parametrize("level", [None, LEVEL], ids=["fixed", "drawn"])
def test_draws_follow_the_conditional(level):
    assert away(LinkLaw, level) < 5.0


class NoJacobian(LinkLaw):
    """The rates' own part of the density of the entries left out: a Σ x γ."""

    def evaluate(self, found):
        value, slope = super().evaluate(found)
        field = self.covariates.predicted(found)
        push = self.covariates.values.sum(axis=0)[:, None]
        return value + self.shape * field.sum(axis=0), slope + self.shape * push


class LevelByRate(LinkLaw):
    """The density of λ taken for that of log λ."""

    def evaluate(self, found):
        value, slope = super().evaluate(found)
        slope[-1] += 1.0
        return value + found[-1], slope


class NoTest(LinkLaw):
    """Every path is accepted."""

    def energy(self, value, velocity):
        return np.zeros_like(value)


class AtRest(LinkLaw):
    """The energy of motion left out."""

    def energy(self, value, velocity):
        return -value


def test_steps_that_are_often_refused(monkeypatch):
    for end in ("SHORTEST", "LONGEST"):
        monkeypatch.setattr(log_linear, end, 0.8)
    assert away(LinkLaw, LEVEL) < 5.0
    assert away(NoTest, LEVEL) > 5.0
    assert away(AtRest, LEVEL) > 5.0


@pytest.mark.parametrize(("bug", "level"), [(NoJacobian, None), (LevelByRate, LEVEL)])
def test_planted_bugs_are_seen(bug, level):
    assert away(bug, level) > 5.0


@pytest.mark.parametrize("level", [None, LEVEL], ids=["fixed", "drawn"])
def test_values_and_slopes(level):
    own = law(level=level)
    points = [np.array([[0.3], [-0.4]]), np.array([[-1.0], [0.9]])]
    points = [point[: own.covariates.shape[1]] for point in points]
    told = []
    for x in points:
        rate = 1.3 if level is None else np.exp(-x[-1])
        told.append(float(np.sum(log_density(x[0], rate))))
        if level is not None:
            prior = stats.gamma(level.shape, scale=1 / level.rate).logpdf(rate) + np.log(rate)
            told[-1] += float(np.sum(prior))
        slope = own.evaluate(x)[1]
        for at in range(len(x)):
            step = np.zeros_like(x)
            step[at] = 1e-5
            change = (own.evaluate(x + step)[0] - own.evaluate(x - step)[0]) / 2e-5
            np.testing.assert_allclose(change, slope[at], rtol=1e-6)
    values = [float(own.evaluate(x)[0][0]) for x in points]
    assert values[0] - values[1] == pytest.approx(told[0] - told[1])
    gain = own.evaluate(own.centre())[1]
    assert (gain * own.scaled(gain)).sum() < 0.02


WIDE = RNG.normal(size=(30, 4)) * [1.0, 3.0, 0.2, 1.0]


@pytest.mark.parametrize("most", [1000, 3], ids=["decomposed", "solved"])
def test_dense_and_sparse_covariates_draw_the_same(most, monkeypatch):
    monkeypatch.setattr(module, "MOST_DIRECT", most)
    rng = np.random.default_rng(8)  # a step is taken or not, which rounding may decide
    theta = rng.gamma(1.0, np.exp(WIDE @ rng.normal(size=(4, 2)) / 3))
    found = []
    for values in (WIDE, sparse.csr_array(WIDE)):
        own = LinkLaw.of(Covariates(WIDE.shape, values), theta, (1.0, 2.0), 1.0, LEVEL)
        rng, link = np.random.default_rng(3), own.centre()
        for _ in range(20):
            link = own.draw(link, rng)
        found.append(link)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
    assert (found[0] != own.centre()).all()


def test_a_start_far_off_comes_down():
    link = np.array([[4.0, -6.0], [5.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
    theta = RNG.gamma(1.0, np.exp(WIDE @ link / 2))
    assert np.ptp(np.log10(theta)) > 10
    own = LinkLaw.of(Covariates(WIDE.shape, WIDE), theta, (1.0, 1.0), 1.0, LEVEL)
    slope = own.evaluate(own.centre())[1]
    assert ((slope * own.scaled(slope)).sum(axis=0) < 0.02).all()


def test_what_is_not_finite_does_not_move():
    own = law(copies=3)
    own.factor[0, 1] = np.nan
    found = own.draw(np.ones((1, 3)), np.random.default_rng(0))
    assert found[0, 1] == 1.0
    assert (found[0, [0, 2]] != 1.0).any()


def test_prior_means_are_finite():
    found = multiples(Covariates(X.shape, X), np.array([[1e9, 0.5]]))
    assert found[2, 0] == np.exp(FARTHEST)
    np.testing.assert_allclose(found[:, 1], np.exp(0.5 * X[:, 0]))


# -- links of real-valued entries ----------------------------------------------------------

DRAWN = np.random.default_rng(1)
TALL = DRAWN.normal(size=(9, 4)) * [1.0, 3.0, 0.2, 1.0]
FACTOR, PRECISION, PULL = DRAWN.normal(size=(9, 2)), np.array([0.5, 4.0]), 0.7
COUNT = 1000


class Mute:
    """Random numbers without any noise, but of the prior."""

    def __init__(self, seed, silent):
        self.rng, self.silent = np.random.default_rng(seed), silent

    def normal(self, size):
        return self.rng.normal(size=size) * (size not in self.silent)


def gaussian_away(covariates, silent=()):
    """Largest z of mean and covariance of drawn links."""
    # All copies at once: as many columns of the factor.
    factor, precision = np.tile(FACTOR, COUNT), np.tile(PRECISION, COUNT)
    rng = Mute(3, silent)
    drawn = covariates.draw_link(factor, precision, PULL, rng).reshape(4, COUNT, 2)
    worst = 0.0
    A = TALL.T @ TALL + PULL * np.eye(4)
    for k in range(2):
        covariance = np.linalg.inv(A) / PRECISION[k]
        variances = np.diag(covariance)
        mean = np.linalg.solve(A, TALL.T @ FACTOR[:, k])
        z = (drawn[..., k].mean(axis=1) - mean) / np.sqrt(variances / COUNT)
        error = np.sqrt((np.outer(variances, variances) + covariance**2) / COUNT)
        spread = (np.cov(drawn[..., k]) - covariance) / error
        worst = max(worst, np.abs(z).max(), np.abs(spread).max())
    return float(worst)


@pytest.mark.parametrize("most", [1000, 3], ids=["decomposed", "solved"])
@pytest.mark.parametrize("kind", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
def test_links_follow_their_conditional(most, kind, monkeypatch):
    monkeypatch.setattr(module, "MOST_DIRECT", most)
    assert gaussian_away(Covariates(TALL.shape, kind(TALL))) < 5.0


@pytest.mark.parametrize("silent", [(9, 2 * COUNT), (4, 2 * COUNT)], ids=["factor", "prior"])
def test_a_solution_without_one_of_its_noises_is_seen(silent, monkeypatch):
    monkeypatch.setattr(module, "MOST_DIRECT", 3)
    assert gaussian_away(Covariates(TALL.shape, TALL), (silent,)) > 5.0
