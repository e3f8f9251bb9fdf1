"""Richardson–Romberg pairs on thousands of independent copies of a tiny problem.

As `replicas`, with the copies in a sparse matrix, so that the work grows with their
number and not with its square, and with what every copy gave kept apart: the spread
over copies is the standard error of whatever is made of them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.executors import LanesExecutor
from daskfactor.inference.base import RunOptions, Setting
from daskfactor.inference.langevin import PSGRRLD
from daskfactor.models.tweedie import TweedieNMF
from tests.statistical.exact import Case, reference_posterior
from tests.statistical.replicas import cells_of

Array = NDArray[np.float64]


class Draws(NamedTuple):
    """Averages over the draws of one track, (copy, row, col): of μ and of μ²."""

    mean: Array
    square: Array


class Pair(NamedTuple):
    """The two tracks of P-SGRRLD: with ε / 2, and with ε."""

    fine: Draws
    coarse: Draws


class Bias(NamedTuple):
    """Distance from the exact posterior with its standard error, (row, col).

    Of E μ in posterior standard deviations; of Var μ as a share of it.
    """

    mean: Array
    mean_error: Array
    variance: Array
    variance_error: Array

    @property
    def mean_size(self) -> float:
        """Root mean square over the cells."""
        return float(np.sqrt(np.mean(self.mean**2)))


def run_pair(case: Case, sampler: PSGRRLD, copies: int, draws: int, seed: int = 0) -> Pair:
    """Both tracks of P-SGRRLD on every copy; ``draws`` count the fine track's."""
    rows, cols = cells_of(case.V.shape, copies)
    values = np.broadcast_to(case.V, (copies, *case.V.shape)).ravel()
    seen = ~np.isnan(values)
    shape = (case.V.shape[0] * copies, case.V.shape[1] * copies)
    V = sparse.coo_array((values[seen], (rows[seen], cols[seen])), shape=shape).tocsr()
    with as_blocks(V, min(case.V.shape), dtype="float64", unstored="missing") as data:
        model = TweedieNMF(
            case.K,
            beta=case.beta,
            dispersion=case.dispersion,
            rate_w=case.rate_w,
            rate_h=case.rate_h,
        )
        options = RunOptions(draws, 200, 1, 1, seed, "moments", 0, "float64")
        executor = LanesExecutor(2)
        setting = Setting(data, model, sampler, options, executor, (rows, cols))
        chain = sampler.chain(setting, 0)
        chain.start()
        for end in setting.ends:
            chain.advance(end)
            chain.forget()
        executor.close()
        assert not chain.divergences
        fine, coarse = (_draws(run, (copies, *case.V.shape)) for run in chain.tracks)
        return Pair(fine, coarse)


def _draws(run: Any, shape: tuple[int, ...]) -> Draws:
    mean = run.gather_cells("mean").reshape(shape)
    return Draws(mean, mean**2 + run.gather_cells("m2").reshape(shape) / run.cell_count)


def together(first: Pair, second: Pair) -> Pair:
    """The copies of two runs as one."""
    return Pair(
        *(
            Draws(*(np.concatenate(both) for both in zip(one, other, strict=True)))
            for one, other in zip(first, second, strict=True)
        )
    )


def bias(parts: list[tuple[float, Draws]], case: Case) -> Bias:
    """Bias of a combination of tracks, such as [(2, fine), (-1, coarse)].

    Variances are combined as moments are; their error is that of E (μ - m)² about
    the exact mean m.
    """
    exact = reference_posterior(case)
    m, v = exact["mean_mu"], exact["var_mu"]
    mean = sum(weight * draws.mean for weight, draws in parts)
    spread = sum(weight * (draws.square - 2 * m * draws.mean) for weight, draws in parts)
    variance = sum(
        weight * (draws.square.mean(axis=0) - draws.mean.mean(axis=0) ** 2)
        for weight, draws in parts
    )
    root = np.sqrt(len(np.asarray(mean)))
    return Bias(
        (np.mean(mean, axis=0) - m) / np.sqrt(v),
        np.std(mean, axis=0) / root / np.sqrt(v),
        variance / v - 1.0,
        np.std(spread, axis=0) / root / v,
    )


def romberg(fine: Draws, coarse: Draws) -> list[tuple[float, Draws]]:
    """2 fine - coarse."""
    return [(2.0, fine), (-1.0, coarse)]


def noise_ratio(fine: Draws, coarse: Draws) -> float:
    """Variance of the estimate 2 fine - coarse of E μ over that of the fine track alone."""
    extrapolated = (2 * fine.mean - coarse.mean).var(axis=0)
    return float(np.mean(extrapolated / fine.mean.var(axis=0)))
