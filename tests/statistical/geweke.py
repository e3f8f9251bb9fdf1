"""Geweke's joint test of a program of block operations on many tiny problems at once.

If θ is drawn from its prior and V from its law given θ, then sweeps at V and new
data at the θ they lead to, in turn, leave θ on its prior. The problems are
independent, so the mean of any function of θ over rounds and problems has an
honest standard error, and any error in a conditional grows from round to round.

Source: J. Geweke, "Getting it right", JASA 99, 2004.
"""

from typing import Any, NamedTuple

import numpy as np

from daskfactor.data.sources import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.executors.plan import CycleOptions, build_plan
from daskfactor.executors.state import make_state
from daskfactor.inference.calibration import block_diagonal
from daskfactor.inference.program import prepare_state


class Problem(NamedTuple):
    """Independent problems of one shape: how many, I, J, K, and which cells are missing."""

    copies: int
    rows: int
    cols: int
    K: int
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def seen(self):
        seen = np.ones((self.rows, self.cols), bool)
        for cell in self.gaps:
            seen[cell] = False
        return seen


def draw_prior(problem, hyper, rng):
    """W (copies, I, K) and H (copies, J, K)."""
    made = []
    for factor, length in enumerate((problem.rows, problem.cols)):
        rate, shape = hyper.prior(factor)
        made.append(rng.gamma(shape, 1 / rate, (problem.copies, length, problem.K)))
    return made[0], made[1]


def stacked(factor):
    """(copies, n, K) to (n copies, K), row r of every copy before row r + 1 of any."""
    return np.ascontiguousarray(factor.transpose(1, 0, 2).reshape(-1, factor.shape[2]))


def unstacked(factor, copies):
    return factor.reshape(-1, copies, factor.shape[1]).transpose(1, 0, 2)


def draw_counts(mu, hyper, rng):
    del hyper
    return rng.poisson(mu).astype(np.float64)


def as_one_matrix(problem, V):
    """Data of all problems (copies, I, J) as one sparse matrix; what is not stored is missing."""
    return block_diagonal(np.where(problem.seen, V, np.nan))


def functions(W, H):
    """What is compared, (functions, copies)."""
    mu = np.einsum("cik,cjk->cij", W, H)
    parts = [W, H, W**2, H**2, np.log(W), np.log(H), mu, np.log(mu), np.sqrt(mu)]
    each = [own.mean(axis=(1, 2)) for own in parts]
    each += [W.sum(axis=(1, 2)) * H.sum(axis=(1, 2)), W[:, 0, 0] - H[:, 0, 0]]
    return np.array([*each, np.exp(-mu[:, 0, 0])])


class World(NamedTuple):
    """What a model is made of: its prior, the law of data given means, and what is compared."""

    draw_prior: Any
    draw_data: Any
    functions: Any


POISSON = World(draw_prior, draw_counts, functions)


def scores(problem, sampler, program, hyper, rounds, seed=0, world=POISSON):
    """z of every function: rounds of sweep and new data against draws of the prior."""
    rng = np.random.default_rng(seed)
    draw_prior, draw_data, functions = world
    W, H = draw_prior(problem, hyper, rng)
    totals = np.zeros(0)
    executor = SerialExecutor()
    for cycle in range(rounds):
        mu = np.einsum("cik,cjk->cij", W, H)
        V = as_one_matrix(problem, draw_data(mu, hyper, rng))
        with as_blocks(V, 2, dtype="float64", unstored="missing", allow_empty=True) as data:
            state = make_state(data.grid, stacked(W), stacked(H))
            prepare_state(state)
            plan = build_plan(
                sampler.schedule,
                data.n_observed,
                range(cycle, cycle + 1),
                np.random.default_rng,
                lambda _: CycleOptions(),
            )
            state = executor.run(plan, program, state, data)
        W, H = (unstacked(state.gather(side), problem.copies) for side in ("rows", "cols"))
        found = functions(W, H)
        totals = found if not totals.size else totals + found
    after = totals / rounds
    fresh = np.concatenate([functions(*draw_prior(problem, hyper, rng)) for _ in range(4)], axis=1)
    error = np.sqrt(after.var(axis=1) / after.shape[1] + fresh.var(axis=1) / fresh.shape[1])
    return np.asarray((after.mean(axis=1) - fresh.mean(axis=1)) / error)
