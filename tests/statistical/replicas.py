"""Many independent copies of a tiny problem in one matrix, and how far they are from exact.

A matrix with the copies on its diagonal and nothing observed elsewhere has a posterior that is the
product of the copies' own. Row r of every copy comes before row r + 1 of any, and columns likewise,
so that the grid's bands cut through every copy as they would through a single one. One run of the
real sampler then gives as many chains as there are copies. A cycle costs the same Python whatever
the copies, so many of them and few draws are cheapest: thousands in a sparse matrix, and in a dense
one, whose work grows with the square, a few hundred.
"""

from typing import NamedTuple

import numpy as np

from daskfactor.data.sources import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.inference.calibration import block_diagonal
from daskfactor.inference.chain import Chain
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.models.negative_binomial import NegativeBinomialNMF
from daskfactor.models.tweedie import TweedieNMF
from tests.statistical.allocations import Priors, posterior
from tests.statistical.exact import CASES, NEGATIVE_BINOMIAL, reference_posterior


class Draws(NamedTuple):
    """Averages over the draws of one track, of μ and of μ² (copy, row, col), and E ΣW."""

    mean: np.ndarray
    square: np.ndarray
    sum_w: float


class Moments(NamedTuple):
    """Over draws and copies: E μ and Var μ per cell (NaN where missing), E ΣW; with errors."""

    mean: np.ndarray
    mean_error: np.ndarray
    variance: np.ndarray
    sum_w: float


def replicate(V, copies):
    """The block-diagonal matrix of ``copies`` copies, rows and columns interleaved."""
    rows, cols = V.shape
    out = np.full((rows, copies, cols, copies), np.nan)
    each = np.arange(copies)
    out[:, each, :, each] = V
    return out.reshape(rows * copies, cols * copies)


def replicate_sparse(V, copies):
    """The same with what is observed stored, zeros too."""
    return block_diagonal(np.broadcast_to(V, (copies, *V.shape)))


def cells_of(shape, copies):
    """Positions of all cells of all copies, shape (copies, rows, cols) flattened."""
    rows, cols = shape
    each, row, col = np.meshgrid(np.arange(copies), np.arange(rows), np.arange(cols), indexing="ij")
    return (row * copies + each).ravel(), (col * copies + each).ravel()


def model_of(case):
    settings = case._asdict()
    K, beta, *_ = (settings.pop(name) for name in ("K", "beta", "V", "name"))
    if beta == NEGATIVE_BINOMIAL:
        return NegativeBinomialNMF(K, **settings)
    return TweedieNMF(K, beta=beta, **settings)


def run_tracks(
    case,
    sampler,
    *,
    copies,
    tune,
    draws,
    seed=0,
    blocks=None,
    dense=False,
    executor=None,
    model=None,
    **cells,
):
    """What every copy gave, for each of the sampler's tracks (fine, coarse). ``blocks`` are bands a
    side, by default as many as cut through every row or column; ``draws`` count the fine track's;
    ``model`` is another one than the case's; ``cells`` are the ``uncertainty`` or the ``weights``
    of the cells of a copy."""
    copied = replicate if dense else replicate_sparse
    V = copied(case.V, copies)
    options = {"unstored": None if dense else "missing", "dtype": "float64"}
    for kind, given in cells.items():
        options[kind] = copied(np.where(np.isnan(case.V), np.nan, given), copies)
    executor = executor or SerialExecutor()
    with as_blocks(V, blocks or min(case.V.shape), **options) as data:
        model = model or model_of(case)
        plan = RunOptions(draws, tune, 1, 1, seed, "moments", 0, "float64")
        watched = cells_of(case.V.shape, copies)
        kernel = sampler.kernel(model, data)
        chain = Chain(Setting(data, model, kernel, plan, executor, watched), 0)
        chain.start()
        for end in chain.setting.ends:
            chain.advance(end)
            chain.forget()
        executor.close()
        assert not chain.divergences
        return [_draws(run, (copies, *case.V.shape)) for run in chain.tracks]


def _draws(run, shape):
    mean = run.gather_cells("mean").reshape(shape)
    square = mean**2 + run.gather_cells("m2").reshape(shape) / run.cell_count
    return Draws(mean, square, float(run.state.gather("rows", "mean").sum() / shape[0]))


def run_copies(case, sampler, **settings):
    """Moments over all copies, for each of the tracks; settings as for `run_tracks`."""
    return [moments(draws) for draws in run_tracks(case, sampler, **settings)]


def moments(draws):
    """Of the copies together; their spread is the error."""
    mean = draws.mean.mean(axis=0)
    error = draws.mean.std(axis=0) / np.sqrt(len(draws.mean))
    return Moments(mean, error, draws.square.mean(axis=0) - mean**2, draws.sum_w)


BY_NAME = {case.name: case for case in CASES}
BY_NAME["spikes"] = BY_NAME["poisson-small"]._replace(name="spikes", shape_w=0.5, shape_h=0.5)


class Distance:
    """Differences in posterior standard deviations, and ratios to what is exact."""

    # The tolerances of an exact sampler: there is no step to blame.
    most_off, ratios_between, most_sum, most_error = 0.05, (0.93, 1.07), 0.02, 0.02

    def __init__(self, got, exact):
        sd = np.sqrt(exact["var_mu"])
        self.rms = float(np.sqrt(np.mean(((got.mean - exact["mean_mu"]) / sd) ** 2)))
        self.error = float(np.max(got.mean_error / sd))
        self.ratios = got.variance / exact["var_mu"]
        self.sum_w = got.sum_w / exact["sum_w"]

    @property
    def passes(self):
        low, high = self.ratios_between
        return (
            self.rms < self.most_off
            and bool(np.all((self.ratios >= low) & (self.ratios <= high)))
            and abs(self.sum_w - 1) < self.most_sum
        )

    def __str__(self):
        return (
            f"rms {self.rms:.4f} sd (Monte Carlo {self.error:.4f}), variance ratios "
            f"{np.round(self.ratios, 3).ravel()}, ΣW {self.sum_w:.4f}"
        )


class Biased(Distance):
    """With the tolerances of a sampler that takes steps, on one or two components."""

    most_off, ratios_between, most_sum, most_error = 0.10, (0.90, 1.12), 0.03, 0.03


def distance(case, sampler, kind=Distance, exact=None, **settings):
    """The distance of a run; counts under gamma priors are quickest by allocations."""
    priors = Priors(case.rate_w, case.rate_h, case.shape_w, case.shape_h)
    if exact is None:
        by_allocations = case.beta == 1 and priors[2:] != (1, 1)
        exact = posterior(case.V, case.K, priors) if by_allocations else reference_posterior(case)
    return kind(run_copies(case, sampler, **settings)[0], exact)
