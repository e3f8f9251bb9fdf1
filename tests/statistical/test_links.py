"""Links from covariates: conditionals of all that is drawn, and whole posteriors, another way."""

from functools import partial

import numpy as np
import pytest

from daskfactor import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.executors.state import make_state
from daskfactor.inference.gaussian_chain import GaussianChain, column_table
from daskfactor.inference.gibbs import GaussianGibbs
from daskfactor.inference.links import LINKS, telling
from daskfactor.inference.program import Fit, prepare_state, unshifted
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.sghmc import SGHMC
from daskfactor.kernels.langevin import sums_of_squares
from daskfactor.models.gaussian import GaussianHyper, GaussianMF
from tests.inference.gaussian_reference import gibbs
from tests.tiers import tiered

pytestmark = pytest.mark.statistical
NAN = float("nan")


def chain_at(kind, data, model, sampler, tune=0):
    options = RunOptions(1, tune, 1, 1, 0, "moments", 0, str(data.dtype))
    return kind(Setting(data, model, sampler, options, SerialExecutor()), 0)


# -- hyperparameters and factors in turn, without any data: they stay on their prior --------

ROWS_X = np.random.default_rng(0).normal(size=(9, 2))
COLUMNS_X = np.eye(7)[:, :3]
MODEL = GaussianMF(2, noise=1.0, covariates_w=ROWS_X, covariates_h=COLUMNS_X)
PRIORS = GaussianHyper(1.0, 0.0, 2.0, 0.5, (1.5, 1.5), (1.5, 1.5), 1, 1, 1.4, 0.6)
NAMES = ("link_precision_w", "link_precision_h")


class ResidualsForgotten(GaussianChain):
    """Precisions from the squares of entries around the means of all rows."""

    def _sums(self, hyper, state, factor, centre):
        total, count = super()._sums(hyper, state, factor, centre)
        told = telling(self.setting, factor)
        return total + sum(state.each(partial(forgotten, centre=centre), factor, told)), count


def forgotten(band, rows, centre):
    away = np.zeros((2, len(centre)))
    sums_of_squares(np.ascontiguousarray(band.values[rows]), centre, away[0])
    sums_of_squares(unshifted(band)[rows], centre, away[1])
    return np.asarray(away[0] - away[1])


class LinkForgotten(GaussianChain):
    """Precisions as if the link's prior did not have them."""

    def _sums(self, hyper, state, factor, centre):
        linked, self.linked = self.linked, []
        found = super()._sums(hyper, state, factor, centre)
        self.linked = linked
        return found


class EmptyRowsStay(GaussianChain):
    """Rows without data left where the former link had put them."""

    def _draw_unobserved(self, *_):
        pass


def hyper_of_prior(rng):
    names = ("row_bias_precision", "column_bias_precision", *NAMES)
    drawn = {name: rng.exponential(getattr(PRIORS, name)) for name in names}
    both = tuple(rng.exponential(PRIORS.precision_w))
    return PRIORS._replace(precision_w=both, precision_h=both, **drawn)


def prior_of(hyper, links, rng):
    """Packed factors, given the links."""
    made = []
    for factor, covariates in enumerate((ROWS_X, COLUMNS_X)):
        mean, precision, _, free = column_table(hyper, MODEL.width)[factor]
        drawn = rng.normal(mean + covariates @ links[factor], 1 / np.sqrt(precision))
        made.append(np.where(free > 0, drawn, 1.0))
    return made


def told(hyper, links, factors):
    """Functions of one state, each of finite variance under the prior."""
    found = [np.log(getattr(hyper, name)) for name in NAMES]
    found += [np.log(hyper.precision_w[0]), np.log(hyper.row_bias_precision)]
    found += [np.log(hyper.column_bias_precision)]
    for factor, covariates in enumerate((ROWS_X, COLUMNS_X)):
        mean, precision, _, free = column_table(hyper, MODEL.width)[factor]
        free = free > 0
        scaled = links[factor] * np.sqrt(precision * getattr(hyper, NAMES[factor]))
        away = (factors[factor] - mean - covariates @ links[factor]) * np.sqrt(precision)
        found += [scaled[0, 0], (scaled[:, free] ** 2).mean(), (away[:, free] ** 2).mean()]
        found += [away[-1, 0] ** 2, away[-1, 2 + factor], np.tanh(scaled[0, 0]) * away[0, 0]]
    return [float(value) for value in found]


def joint(kind, rounds=4000):
    """Largest z: hyperparameters given factors and factors given these in turn, and the prior.

    The level, whose prior is flat, wanders about, and nothing that is told depends on it.
    """
    rng = np.random.default_rng(4)
    V = np.ones((9, 7))
    V[-2:], V[:, -1] = NAN, NAN
    found = []
    with as_blocks(V, 2, dtype="float64", allow_empty=True) as data:
        chain = chain_at(kind, data, MODEL, GaussianGibbs())
        chain.priors = PRIORS
        hyper = hyper_of_prior(rng)
        links = [np.zeros((2, 4)), np.zeros((3, 4))]
        for cycle in range(rounds):
            state = make_state(data.grid, *prior_of(hyper, links, rng))
            prepare_state(state)
            hyper = chain.draw_hyper(hyper, state, Fit(0.0, 0.0), cycle, False)
            links = [chain.links[name] for name in LINKS]
            factors = [state.gather(side) for side in ("rows", "columns")]
            found.append(told(hyper, links, factors))
    after = np.array(found)[rounds // 10 :]
    fresh = []
    for _ in range(rounds):
        hyper = hyper_of_prior(rng)
        links = []
        for factor, count in enumerate((2, 3)):
            _, precision, _, free = column_table(hyper, MODEL.width)[factor]
            scale = free / np.sqrt(precision * getattr(hyper, NAMES[factor]))
            links.append(rng.normal(size=(count, 4)) * scale)
        fresh.append(told(hyper, links, prior_of(hyper, links, rng)))
    before = np.array(fresh)
    batches = np.array([part.mean(axis=0) for part in np.array_split(after, 30)])
    error = np.sqrt(batches.var(axis=0, ddof=1) / 30 + before.var(axis=0) / rounds)
    return float(np.abs((after.mean(axis=0) - before.mean(axis=0)) / error).max())


def test_hyperparameters_and_factors_in_turn_stay_on_their_prior():
    assert joint(GaussianChain) < 5.0


@pytest.mark.parametrize("bug", [ResidualsForgotten, LinkForgotten, EmptyRowsStay])
def test_every_planted_bug_is_seen(bug):
    assert joint(bug, 1500) > 5.0


# -- whole posteriors, against another Gibbs sampler -----------------------------------------


def rows_and_covariates():
    """Data whose rows follow from two covariates in part; two rows have none."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(12, 2))
    W = X @ rng.normal(size=(2, 2)) + 0.4 * rng.normal(size=(12, 2))
    V = 1 + 0.7 * rng.normal(size=9) + W[:, :1] @ rng.normal(size=(1, 9)) + W[:, 1:]
    V += 0.5 * rng.normal(size=V.shape)
    V[rng.random(V.shape) < 0.3] = NAN
    V[5], V[11] = NAN, NAN
    return V, X


def z_of_means(one, other):
    """Difference of the means of two chains' columns over its standard error, from batches."""
    parts = [np.array([p.mean(axis=0) for p in np.array_split(own, 20)]) for own in (one, other)]
    error = np.sqrt(sum(part.var(axis=0, ddof=1) for part in parts) / 20)
    return np.asarray((parts[0].mean(axis=0) - parts[1].mean(axis=0)) / error)


@pytest.mark.parametrize(
    "sampler",
    tiered([GaussianGibbs(), SGHMC()], lambda own: own == GaussianGibbs()),
    ids=lambda own: own.name,
)
def test_everything_sampled_against_another_gibbs_sampler(sampler):
    V, X = rows_and_covariates()
    model, every = GaussianMF(1, covariates_w=X), sampler.learns_every or 1
    sampler = sampler.suited(model) or sampler
    tune, draws = 100 * every, 1500 * every
    with as_blocks(V, 1, dtype="float64", allow_empty=True) as data:
        chain = chain_at(GaussianChain, data, model, sampler, tune)
        chain.start()
        found = []
        for cycle in range(every, tune + draws, every):
            chain.advance(cycle)
            if cycle >= tune:
                W, H = (chain.tracks[0].state.gather(side) for side in ("rows", "columns"))
                mu, hyper = W @ H.T, chain.hyper
                level = X @ chain.links["link_w"][:, 1]
                numbers = np.log([hyper.noise, *hyper.precision_w, hyper.link_precision_w])
                found.append([*mu[5], *mu[5] ** 2, *mu[0, :2], *level[:4], *numbers])
            chain.forget()
        exact = gibbs(V, model, chain.priors, 4000, 1)
    numbers = np.log(np.c_[exact.noise, exact.precision, exact.ridge])
    cold = exact.mu[:, 5]
    wanted = np.c_[cold, cold**2, exact.mu[:, 0, :2], exact.predicted[:, :4], numbers]
    z = z_of_means(np.array(found), wanted)
    assert np.abs(z).max() < 5.0, np.round(z, 1)
