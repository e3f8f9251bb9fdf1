"""Real-valued models: conditionals, exact posteriors, symmetries, links; planted bugs."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from daskfactor import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import FactorBand, make_state
from daskfactor.inference import symmetries
from daskfactor.inference.gibbs import Gibbs, RowGibbsKernel
from daskfactor.inference.normal_parameters import NO_FLOOR, NormalParameter, column_table
from daskfactor.inference.program import COLUMNS, ROWS, SHIFT, Program, prepare_state
from daskfactor.inference.sghmc import SGHMC
from daskfactor.inference.symmetries import Prior, draw_level, draw_symmetries
from daskfactor.models.gaussian import GaussianHyper, GaussianMF
from daskfactor.models.rates import draw_scales
from daskfactor.models.tweedie_law import NORMAL
from tests.inference.gaussian_reference import chain_of, exact_one_component, gibbs
from tests.planted import planted
from tests.statistical.exact import Case
from tests.statistical.replicas import moments, run_tracks
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

NAN = float("nan")
HYPER = GaussianHyper(0.4, 1.3, 2.0, 1.5, (1.2, 0.6), (0.8, 1.7))


class WrongNoise(RowGibbsKernel):
    """Standard deviation in place of variance."""

    def _move(self, program, band, factor, cycle):
        hyper = program.hyper._replace(noise=program.hyper.noise**0.5)
        super()._move(replace(program, hyper=hyper), band, factor, cycle)


class NoPriorMean(RowGibbsKernel):
    def _columns(self, program, values, factor):
        columns = super()._columns(program, values, factor).copy()
        columns[0] = 0
        return columns


class NoBiasTakenOff(RowGibbsKernel):
    """What does not move is left in the data."""

    def _move(self, program, band, factor, cycle):
        held = band.values.copy()
        still = super()._columns(program, held, factor)[3] == 0
        band.values[:, still] = 0
        super()._move(program, band, factor, cycle)
        band.values[:, still] = held[:, still]


class OldNormalW:
    """H drawn given the W that W was drawn beside."""

    def step(self, program, visit):
        op, data, bands, _ = visit
        if op.iteration % (2 * data.grid.blocks) == 0 and op.block.row == op.block.col:
            bands[ROWS].arrays["old"] = bands[ROWS].values.copy()
        super().step(program, visit)

    def _gather(self, program, op, view, bands, factor):
        rows, cols = bands
        if factor == COLUMNS:
            rows = FactorBand(rows.offset, rows.arrays["old"])
        super()._gather(program, op, view, (rows, cols), factor)


ROW = np.array([1.2, NAN, -0.7, 0.4, 2.0])
EACH_SIDE = 20_000


def conditional(factor):
    """The other factor, packed, what a row begins with, and its exact mean and covariance."""
    own, partner = column_table(HYPER, 4)[factor], column_table(HYPER, 4)[1 - factor]
    rng = np.random.default_rng(2)
    other = np.where(partner[3] > 0, rng.normal(partner[0], 1.0, (5, 4)), 1.0)
    start, free = np.where(own[3] > 0, 9.0, 1.0), own[3] > 0
    seen = ~np.isnan(ROW)
    X = other[seen][:, free]
    residual = ROW[seen] - other[seen][:, ~free] @ start[~free]
    covariance = np.linalg.inv(X.T @ X / HYPER.noise + np.diag(own[1, free]))
    mean = covariance @ (X.T @ residual / HYPER.noise + (own[0] * own[1])[free])
    return other, start, mean, covariance


def one_side(kind, factor):
    """The largest z of means and covariances of rows (columns) that all have the same data."""
    other, start, mean, covariance = conditional(factor)
    own, V = np.tile(start, (EACH_SIDE, 1)), np.tile(ROW, (EACH_SIDE, 1))
    factors = (own, other) if factor == ROWS else (other, own)
    frozen = [None, None]
    frozen[1 - factor] = np.ones(4, bool)
    kernel = kind(**vars(Gibbs().kernel(GaussianMF(2))))
    program = Program(kernel, NORMAL, NO_FLOOR, HYPER, (3, 5), tuple(frozen))
    data = V if factor == ROWS else V.T.copy()
    with as_blocks(data, 2, dtype="float64", allow_empty=True) as data:
        state = make_state(data.grid, *(each.copy() for each in factors))
        prepare_state(state)
        options = np.random.default_rng, lambda _: CycleOptions()
        plan = build_plan(kernel.schedule, data.n_observed, range(1), *options)
        state = SerialExecutor().run(plan, program, state, data)
    sides = state.gather("rows"), state.gather("columns")
    np.testing.assert_array_equal(sides[1 - factor], other)
    free = column_table(HYPER, 4)[factor][3] > 0
    np.testing.assert_array_equal(sides[factor][:, ~free], 1.0)
    drawn, variances = sides[factor][:, free], np.diag(covariance)
    z_mean = (drawn.mean(axis=0) - mean) / np.sqrt(variances / EACH_SIDE)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / EACH_SIDE)
    z_covariance = (np.cov(drawn.T) - covariance) / error
    return float(max(np.abs(z_mean).max(), np.abs(z_covariance).max()))


@pytest.mark.parametrize("factor", [ROWS, COLUMNS])
def test_a_frozen_factor_leaves_normal_posteriors(factor):
    assert one_side(RowGibbsKernel, factor) < 4.5


@pytest.mark.full
@pytest.mark.parametrize("bug", [WrongNoise, NoPriorMean, NoBiasTakenOff])
def test_one_side_sees_every_planted_bug(bug):
    assert one_side(bug, COLUMNS) > 4.5


SMALL = Case("small", np.array([[1.2, NAN], [0.3, -0.9], [NAN, 0.8]]), 2.0)


def errors_of(noise, sampler, draws=2000):
    """Error of the means in posterior standard deviations, and the ratios of variances."""
    model = GaussianMF(1, noise=noise, precision_w=1.0, precision_h=1.2, biases=False)
    run = {"copies": 100, "tune": 200, "draws": draws, "dense": True, "model": model}
    found = moments(*run_tracks(SMALL, sampler, **run))
    mean, variance = exact_one_component(SMALL.V, noise, 1.0, 1.2, np.nanmean(SMALL.V))
    away = (found.mean - mean) / np.sqrt(variance)
    return float(np.sqrt(np.mean(away**2))), found.variance / variance


def passes(away, ratios):
    return away < 0.10 and bool(np.all((ratios > 0.90) & (ratios < 1.12)))


@pytest.mark.parametrize("noise", tiered([1.0, 0.3], lambda noise: noise == 0.3))
def test_momentum_against_quadrature(noise):
    away, ratios = errors_of(noise, SGHMC())
    assert passes(away, ratios), f"{away:.3f} {ratios.round(3)}"


class NoScale:
    def step(self, program, visit):
        super().step(program, visit._replace(op=visit.op._replace(scale=1.0)))


class HotMomentum:
    """The momentum a fiftieth too large after every cycle."""

    def step(self, program, visit):
        super().step(program, visit)
        if visit.op.last:
            for band in visit.bands:
                band.arrays["momentum"] *= 1.02


class NoPriorOnColumns:
    def _move(self, program, op, band, gradient, factor):
        if factor == COLUMNS:
            table = column_table(program.hyper, band.values.shape[1])[factor]
            columns = table.astype(band.values.dtype)
            gradient = gradient + columns[1] * (band.values - columns[0])
        super()._move(program, op, band, gradient, factor)


@pytest.mark.full
@pytest.mark.parametrize("bug", [NoScale, HotMomentum, NoPriorOnColumns])
def test_quadrature_sees_every_planted_bug(bug):
    away, ratios = errors_of(0.3, planted(SGHMC(), bug), 1000)
    assert not passes(away, ratios), f"{away:.3f} {ratios.round(3)}"


COPIES, ROWS_OF_W, ROWS_OF_H, RANK = 1500, 7, 3, 2
MEAN, RIDGE = 1.5, 0.7
LINKED = np.random.default_rng(1).normal(size=(ROWS_OF_W, 2))
TABLES = (
    np.array([[0.0, 0.0, 0.0, 0.0], [1.3, 0.6, 2.0, 1.0], [0, 0, 0, 0], [1, 1, 1, 0]]),
    np.array([[0.0, 0.0, 0.0, MEAN], [0.8, 1.7, 1.0, 1.5], [0, 0, 0, 0], [1, 1, 0, 1]]),
)
"""Prior means and precisions of W, biases of rows and ones, and of H, ones and biases."""


def prior_draw(rng):
    """W, with a link to LINKED in its first RANK columns, H as rows, and the link."""
    W, H = (
        rng.normal(table[0], 1 / np.sqrt(table[1]), (n, RANK + 2))
        for table, n in zip(TABLES, (ROWS_OF_W, ROWS_OF_H), strict=True)
    )
    link = np.zeros((2, RANK + 2))
    link[:, :RANK] = rng.normal(size=(2, RANK)) / np.sqrt(RIDGE * TABLES[ROWS][1, :RANK])
    W += LINKED @ link
    W[:, RANK + 1], H[:, RANK] = 1.0, 1.0
    return W, H, link


def sizes_and_levels(W, H, link, mean):
    """Sizes and levels of what the prior is known of."""
    rest = W - LINKED @ link
    biases = W[:, RANK].mean(), (H[:, RANK + 1] - mean).mean()
    levels = *rest[:, :RANK].mean(axis=0), *H[:, :RANK].mean(axis=0), *biases
    squares = [np.square(own[:, :RANK]).sum(axis=0) for own in (rest, H, link)]
    return np.concatenate([levels, np.square(levels), *np.log(squares)])


def moved(grid, rng):
    """Functions of a draw of the prior, and of where the draws along symmetries take it."""
    W, H, link = prior_draw(rng)
    state = make_state(grid, W.copy(), H.copy())
    (first,), (second,) = state.factors
    first.arrays[SHIFT] = LINKED @ link
    both = (TABLES[ROWS], RANK, (link, RIDGE)), (TABLES[COLUMNS], RANK + 1, None)
    priors = tuple(Prior([slice(None)], *own) for own in both)
    scale, shift = draw_symmetries(state, priors, RANK, rng)
    sizes = np.concatenate([scale, np.ones(2)])
    np.testing.assert_allclose(first.values @ second.values.T, W @ H.T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(first.arrays[SHIFT], LINKED @ (link * sizes))
    assert (np.abs(first.values[:, : RANK + 1] - W[:, : RANK + 1]) > 1e-9).all()
    after = sizes_and_levels(first.values, second.values, link * sizes, MEAN - shift)
    return sizes_and_levels(W, H, link, MEAN), after


def worst_shift():
    """The largest z of any mean, of draws that were moved against draws that were not."""
    rng = np.random.default_rng(3)
    with as_blocks(np.ones((ROWS_OF_W, ROWS_OF_H)), 1, dtype="float64") as data:
        pairs = [moved(data.grid, rng) for _ in range(COPIES)]
    before, after = (np.array(own) for own in zip(*pairs, strict=True))
    assert np.corrcoef(before[:, 0], after[:, 0])[0, 1] < 0.9, "hardly moved"
    change = after - before
    return float(np.abs(change.mean(axis=0) / change.std(axis=0)).max() * np.sqrt(COPIES))


def test_symmetries_leave_the_prior_as_it_is():
    assert worst_shift() < 4.5


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bug"),
    [
        # Left out: the volume, entries of the link, what the other factor's biases say.
        ("draw_scales", lambda power, *rest: draw_scales(0.0 * power, *rest)),
        ("draw_scales", lambda power, *rest: draw_scales(power - 1.0, *rest)),
        ("draw_level", lambda a, b, *rest: draw_level(a, b._replace(cross=0 * b.cross), *rest)),
    ],
    ids=["volume", "link", "biases"],
)
def test_symmetries_see_every_planted_bug(name, bug, monkeypatch):
    monkeypatch.setattr(symmetries, name, bug)
    assert worst_shift() > 4.5


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


def away_from_gibbs(sampler):
    """Differences of the means of all that is sampled from those of another Gibbs sampler, in
    standard errors."""
    V, X = rows_and_covariates()
    model = GaussianMF(1, covariates_w=X)
    every = sampler.kernel(model).learns_every
    tune, draws = 100 * every, 1500 * every
    with as_blocks(V, 1, dtype="float64", allow_empty=True) as data:
        chain = chain_of(data, model, sampler, tune=tune)
        chain.start()
        found = []
        for cycle in range(every, tune + draws, every):
            chain.advance(cycle)
            if cycle >= tune:
                W, H = (chain.tracks[0].state.gather(side) for side in ("rows", "columns"))
                mu, hyper = W @ H.T, chain.hyper
                level = X @ chain.values["link_w"][:, 1]
                precisions = *hyper.precision_w, hyper.column_bias_precision, hyper.link_precision_w
                numbers = [*np.log([hyper.noise, *precisions]), hyper.mean]
                found.append([*mu[5], *mu[5] ** 2, *mu[0, :2], *level[:4], *numbers])
            chain.forget()
        exact = gibbs(V, model, GaussianHyper(**chain.values["priors"]), 4000, 1)
    precisions = exact.precision, exact.column_bias_precision, exact.ridge
    numbers = np.c_[np.log(np.c_[exact.noise, *precisions]), exact.mean]
    cold = exact.mu[:, 5]
    wanted = np.c_[cold, cold**2, exact.mu[:, 0, :2], exact.predicted[:, :4], numbers]
    return z_of_means(np.array(found), wanted)


@pytest.mark.parametrize(
    "sampler",
    tiered([Gibbs(), SGHMC()], lambda own: own.name == "Gibbs"),
    ids=lambda own: own.name,
)
def test_everything_sampled_against_another_gibbs_sampler(sampler):
    z = away_from_gibbs(sampler)
    assert np.abs(z).max() < 5.0, np.round(z, 1)


squares = NormalParameter.sums


def link_forgotten(parameter, *given):
    """Precisions as if the link's prior did not have them."""
    with mock.patch.object(parameter, "linked", []):
        return squares(parameter, *given)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bug"),
    [("NormalParameter.sums", link_forgotten), ("unshifted", lambda band: band.values)],
    ids=["precisions forget the link", "squares around the mean of all rows"],
)
def test_bugs_of_links_are_seen(name, bug, monkeypatch):
    monkeypatch.setattr(f"daskfactor.inference.normal_parameters.{name}", bug)
    assert np.abs(away_from_gibbs(Gibbs())).max() > 5.0
