"""Gibbs sampling of real-valued models: closed posteriors, quadrature, Geweke, planted bugs."""

from dataclasses import replace

import numpy as np
import pytest

from daskfactor import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import FactorBand, make_state
from daskfactor.inference.gaussian_chain import NO_FLOOR, column_table
from daskfactor.inference.gibbs import GRAMS, GaussianGibbs
from daskfactor.inference.program import COLUMNS, ROWS, Program, prepare_state
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.kernels.philox import fill_normals
from daskfactor.models.gaussian import GaussianHyper, GaussianMF
from daskfactor.models.tweedie_law import NORMAL
from tests.inference.gaussian_reference import gibbs, moments_of_copies
from tests.statistical.geweke import Problem, World, scores

pytestmark = pytest.mark.statistical
NAN = float("nan")
HYPER = GaussianHyper(0.4, 1.3, 2.0, 1.5, (1.2, 0.6), (0.8, 1.7))


class WrongNoise(GaussianGibbs):
    """Standard deviation in place of variance."""

    def _move(self, program, band, factor, cycle):
        hyper = program.hyper._replace(noise=program.hyper.noise**0.5)
        super()._move(replace(program, hyper=hyper), band, factor, cycle)


class NoPriorMean(GaussianGibbs):
    def _columns(self, program, values, factor):
        columns = super()._columns(program, values, factor).copy()
        columns[0] = 0
        return columns


class NoBiasTakenOff(GaussianGibbs):
    """What does not move is left in the data."""

    def _move(self, program, band, factor, cycle):
        held = band.values.copy()
        still = super()._columns(program, held, factor)[3] == 0
        band.values[:, still] = 0
        super()._move(program, band, factor, cycle)
        band.values[:, still] = held[:, still]


class TransposedSolve(GaussianGibbs):
    """x = mean + L^-1 z in place of L'^-1 z."""

    def _move(self, program, band, factor, cycle):
        K = band.values.shape[1]
        grams = np.broadcast_to(band.arrays[GRAMS], (len(band.values), K * (K + 1) // 2))
        A = np.zeros((len(grams), K, K))
        A[:, *np.triu_indices(K)] = grams / program.hyper.noise
        columns = self._columns(program, band.values, factor)
        free = columns[3] > 0
        A = (A + np.swapaxes(A, 1, 2) - A * np.eye(K))[:, free][:, :, free]
        lower = np.linalg.cholesky(A + np.diag(columns[1, free]))
        z = np.empty(band.values.shape)
        fill_normals(z, *program.address(band, cycle, factor))
        super()._move(program, band, factor, cycle)
        right = np.linalg.solve(np.swapaxes(lower, 1, 2), z[:, free, None])
        band.values[:, free] += (np.linalg.solve(lower, z[:, free, None]) - right)[..., 0]


class OldW(GaussianGibbs):
    """H drawn given the W that W was drawn beside."""

    def block_step(self, program, op, data, bands, work):
        if op.iteration % (2 * data.grid.blocks) == 0 and op.block.row == op.block.col:
            bands[ROWS].arrays["old"] = bands[ROWS].values.copy()
        super().block_step(program, op, data, bands, work)

    def _gather(self, program, op, view, bands, factor):
        rows, cols = bands
        if factor == COLUMNS:
            rows = FactorBand(rows.offset, rows.arrays["old"])
        super()._gather(program, op, view, (rows, cols), factor)


class SameNumbers(GaussianGibbs):
    """W and H from the same random numbers."""

    def _move(self, program, band, factor, cycle):
        same = _SameAddress(**vars(program))
        super()._move(same, band, factor, cycle)


class _SameAddress(Program):
    def address(self, band, iteration, factor):
        del factor
        return super().address(band, iteration, ROWS)


# -- one factor frozen: every row has the same normal posterior ----------------------------

ROW = np.array([1.2, NAN, -0.7, 0.4, 2.0])
COPIES = 20_000


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
    own, V = np.tile(start, (COPIES, 1)), np.tile(ROW, (COPIES, 1))
    factors = (own, other) if factor == ROWS else (other, own)
    frozen = [None, None]
    frozen[1 - factor] = np.ones(4, bool)
    sampler = kind()
    program = Program(sampler, NORMAL, NO_FLOOR, HYPER, (3, 5), tuple(frozen))
    with as_blocks(
        V if factor == ROWS else V.T.copy(), 2, dtype="float64", allow_empty=True
    ) as data:
        state = make_state(data.grid, *(each.copy() for each in factors))
        prepare_state(state)
        plan = build_plan(
            sampler.schedule,
            data.n_observed,
            range(1),
            np.random.default_rng,
            lambda _: CycleOptions(),
        )
        state = SerialExecutor().run(plan, program, state, data)
    sides = state.gather("rows"), state.gather("columns")
    np.testing.assert_array_equal(sides[1 - factor], other)
    free = column_table(HYPER, 4)[factor][3] > 0
    np.testing.assert_array_equal(sides[factor][:, ~free], 1.0)
    drawn, variances = sides[factor][:, free], np.diag(covariance)
    z_mean = (drawn.mean(axis=0) - mean) / np.sqrt(variances / COPIES)
    error = np.sqrt((np.outer(variances, variances) + covariance**2) / COPIES)
    z_covariance = (np.cov(drawn.T) - covariance) / error
    return float(max(np.abs(z_mean).max(), np.abs(z_covariance).max()))


@pytest.mark.parametrize("factor", [ROWS, COLUMNS])
def test_a_frozen_factor_leaves_normal_posteriors(factor):
    assert one_side(GaussianGibbs, factor) < 4.5


@pytest.mark.parametrize("bug", [WrongNoise, NoPriorMean, NoBiasTakenOff, TransposedSolve])
def test_it_sees_every_planted_bug(bug):
    assert one_side(bug, COLUMNS) > 4.5


# -- both factors: quadrature, and Geweke's joint test -------------------------------------


def test_one_component_against_quadrature():
    away, ratios = moments_of_copies(0.3, GaussianGibbs(), tune=50, draws=500)
    error = away.std(axis=0) / np.sqrt(len(away))
    assert error.max() < 0.02
    assert np.abs(away.mean(axis=0) / error).max() < 4.5
    assert np.abs(ratios - 1).max() < 0.05


PROBLEM = Problem(copies=4000, rows=2, cols=3, K=2, gaps=((0, 2),))


def draw_prior(problem, hyper, rng):
    """Packed factors, with biases and the ones that they meet."""
    made = []
    for length, table in zip((problem.rows, problem.cols), column_table(hyper, 4), strict=True):
        mean, precision, _, moves = table
        drawn = rng.normal(mean, 1 / np.sqrt(precision), (problem.copies, length, 4))
        made.append(np.where(moves > 0, drawn, 1.0))
    return made[0], made[1]


def draw_data(mu, hyper, rng):
    return rng.normal(mu, np.sqrt(hyper.noise))


def functions(W, H):
    """What is compared, (functions, copies)."""
    mu, (w, a), (h, b) = W @ H.swapaxes(1, 2), (W[..., :2], W[..., 2]), (H[..., :2], H[..., 3])
    each = [own.mean(axis=1) for own in (a, b, a**2, (b - 1.3) ** 2)]
    each += [(own[..., k] ** 2).mean(axis=1) for own in (w, h) for k in (0, 1)]
    each += [mu.mean(axis=(1, 2)), (mu**2).mean(axis=(1, 2)), (w[:, 0] * h[:, 0]).sum(axis=1)]
    each += [a[:, 0] * b[:, 0], np.tanh(mu[:, 0, 0]) * w[:, 0, 0] * h[:, 0, 0]]
    return np.array([*each, np.cos(mu[:, 1, 2])])


def joint(kind):
    program = Program(kind(), NORMAL, NO_FLOOR, HYPER, (3, 5))
    world = World(draw_prior, draw_data, functions)
    return float(np.abs(scores(PROBLEM, kind(), program, HYPER, 12, world=world)).max())


def test_gewekes_joint_test():
    assert joint(GaussianGibbs) < 4.5


@pytest.mark.parametrize("bug", [WrongNoise, NoPriorMean, TransposedSolve, OldW, SameNumbers])
def test_gewekes_joint_test_sees_every_planted_bug(bug):
    assert joint(bug) > 4.5


# -- hyperparameters, too ------------------------------------------------------------------


def distance(one, other):
    """Difference of two chains' means over its standard error, from 20 batches of each."""
    parts = [np.array([part.mean() for part in np.array_split(own, 20)]) for own in (one, other)]
    return float(
        (parts[0].mean() - parts[1].mean()) / np.sqrt(sum(part.var() / 19 for part in parts))
    )


def test_everything_sampled_against_another_gibbs_sampler():
    """Noise, precisions and level after every sweep, with a row without data."""
    rng = np.random.default_rng(3)
    V = 1 + 0.7 * rng.normal(size=9) + rng.normal(size=(12, 1)) @ rng.normal(size=(1, 9))
    V += 0.5 * rng.normal(size=V.shape)
    V[rng.random(V.shape) < 0.3] = NAN
    V[5] = NAN
    model, tune, draws = GaussianMF(2), 100, 1200
    with as_blocks(V, 1, dtype="float64", allow_empty=True) as data:
        options = RunOptions(draws, tune, 1, 1, 0, "draws", 1, "float64")
        chain = GaussianGibbs.chain(
            Setting(data, model, GaussianGibbs(), options, SerialExecutor()), 0
        )
        chain.start()
        found = []
        for cycle in range(tune + draws):
            chain.advance(cycle + 1)
            if cycle >= tune:
                W, H = (chain.tracks[0].state.gather(side) for side in ("rows", "columns"))
                mu, hyper = W @ H.T, chain.hyper
                found.append((*mu[5, :2], mu[0, 0], mu[0, 0] ** 2, *_told(hyper)))
            chain.forget()
        exact = gibbs(V, model, chain.priors, 1500, 1)
    wanted = [
        *exact.mu[:, 5, :2].T,
        exact.mu[:, 0, 0],
        exact.mu[:, 0, 0] ** 2,
        np.log(exact.noise),
        *np.log(exact.precision).T,
        np.log(exact.column_bias_precision),
        exact.mean,
    ]
    away = [
        distance(np.array(own), other)
        for own, other in zip(zip(*found, strict=True), wanted, strict=True)
    ]
    assert np.abs(away).max() < 4.5, np.round(away, 1)


def _told(hyper):
    precisions = np.log(np.sort(hyper.precision_w))
    return (
        float(np.log(hyper.noise)),
        *map(float, precisions),
        float(np.log(hyper.column_bias_precision)),
        hyper.mean,
    )
