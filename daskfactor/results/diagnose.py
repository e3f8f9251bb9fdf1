"""R-hat and effective sample sizes, and the series of quantities that they diagnose.

These are the rank-normalised split versions, for any number of chains. The tests compare them
with ArviZ, which would be a large dependency for a few lines.

Quantities that do not depend on order, scale or sign of components come from sums of columns and
from the K x K Gram matrices A = WᵀW and B = HHᵀ: the norm of WH is √tr(AB), its singular values
are the roots of the eigenvalues of LᵀBL with A = LLᵀ. A draw takes (I + J) K² operations, and WH
is never formed.

Notes
-----
Vehtari, Gelman, Simpson, Carpenter and Bürkner 2021, "Rank-normalization, folding,
and localization: an improved R-hat for assessing convergence of MCMC".
"""

import math
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import special

from daskfactor.results.align import align, as_drawn, reference_from, sizes
from daskfactor.results.series import (
    Series,
    balanced_density,
    component_names,
    density_series,
    factor_sums,
    in_place,
    learnt_series,
    order_of,
)
from daskfactor.results.tensors import PLACES, compared
from daskfactor.runs.schema import CELL_INDICES, MONITOR
from daskfactor.runs.trace import Run, Symmetries, Weights, each_draw

Array = NDArray[np.float64]

MIN_DRAWS: Final = 4
"""Least number of draws per chain for diagnostics."""
TREND_DRAWS, TREND_ESS, TREND_ERRORS, TREND_SDS = 100, 30, 5.0, 6.0
"""Thresholds of `trend`: draws, effective draws, standard errors, standard deviations."""
ROUNDING: Final = 1e-12
"""Largest relative variation that counts as rounding."""
TAILS: Final = (0.05, 0.95)
LARGER_OF_TWO: Final = 0.56
"""Mean of the larger of two standard normal numbers."""


class Convergence(NamedTuple):
    """R-hat, and effective sample sizes of centre and tails."""

    rhat: float
    ess_bulk: float
    ess_tail: float


NO_DIAGNOSTICS: Final = Convergence(float("nan"), float("nan"), float("nan"))


def convergence(draws: NDArray[np.floating]) -> Convergence:
    r"""Return the diagnostics of one quantity.

    .. math:: \hat R = \max(\hat R_{\rm bulk}, \hat R_{\rm folded}), \qquad
        {\rm ESS} = \frac{MN}{-1 + 2 \sum_t \hat\rho_t}

    Parameters
    ----------
    draws
        (chain, draw), in any unit.

    Returns
    -------
    Convergence
        NaN for fewer than four draws per chain, if a draw is not finite, or if the quantity is
        constant.

    Notes
    -----
    Vehtari et al. 2021, sections 3 and 4.
    """
    drawn: Array = np.asarray(draws, dtype=np.float64)
    ranks = _ranks(drawn)
    if ranks is None:
        return NO_DIAGNOSTICS
    ranked, folded = ranks
    ends = np.quantile(drawn, TAILS)
    return Convergence(
        max(_rhat(ranked), _rhat(folded)),
        effective_size(ranked),
        min(effective_size(split_chains((drawn <= end).astype(np.float64))) for end in ends),
    )


def rhat_beyond_autocorrelation(draws: NDArray[np.floating], errors: float = 0.0) -> float:
    r"""Return R-hat corrected for the autocorrelation of the draws.

    .. math:: \hat R^2 = \frac{N-1}{N} + \frac BW - \frac{\tau - 1}{N}
        - (0.56 + z) \frac \tau N \sqrt{\frac 2 {M-1}}

    In a stationary chain, means of N draws have the variance :math:`\tau W / N`, with the
    autocorrelation time τ; R-hat counts this as a difference between chains, especially for short
    chains. M is the number of halves of all chains.

    Parameters
    ----------
    draws
        (chain, draw), in any unit; the result is NaN if that of `convergence` is.
    errors
        z: standard errors of the remaining chance to subtract, in addition to 0.56, the bias of
        the larger of two R-hats (of ranks and of folded ranks).
    """
    drawn: Array = np.asarray(draws, dtype=np.float64)
    ranks = _ranks(drawn)
    if ranks is None:
        return math.nan
    rhats, corrected = [_rhat(ranked) for ranked in ranks], []
    if math.isnan(max(rhats)):
        return math.nan
    for ranked, rhat in zip(ranks, rhats, strict=True):
        length = ranked.shape[1]
        centred = ranked - ranked.mean(axis=1, keepdims=True)
        tau = max(ranked.size / effective_size(centred), 1.0) if math.isfinite(rhat) else 1.0
        chance = (LARGER_OF_TWO + errors) * tau * math.sqrt(2.0 / (len(ranked) - 1))
        corrected.append(rhat**2 - (tau - 1.0 + chance) / length)
    return math.sqrt(max(*corrected, 0.0))


def _ranks(drawn: Array) -> tuple[Array, Array] | None:
    """Return normal scores of the halves of chains, and of their distances from the median.

    None for draws that are too few, not finite, or constant.
    """
    if drawn.shape[1] < MIN_DRAWS or not np.isfinite(drawn).all():
        return None
    if np.ptp(drawn) <= ROUNDING * np.abs(drawn).max():
        return None
    halves = split_chains(drawn)
    return rank_normalised(halves), rank_normalised(np.abs(halves - np.median(halves)))


def split_chains(draws: Array) -> Array:
    """Split every chain into two halves, (2 chains, draws // 2)."""
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def rank_normalised(draws: Array) -> Array:
    """Return normal scores of the ranks over all chains (Vehtari et al. 2021, section 4.1)."""
    # As scipy.stats.rankdata, which takes a second to import.
    _, place, counts = np.unique(draws, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - 0.5 * (counts - 1))[place].reshape(draws.shape)
    return np.asarray(special.ndtri((ranks - 0.375) / (draws.size + 0.25)))


def _rhat(draws: Array) -> float:
    """Return R-hat of split chains (Vehtari et al. 2021, section 3.1)."""
    length = draws.shape[1]
    within = draws.var(axis=1, ddof=1).mean()
    between = draws.mean(axis=1).var(ddof=1)
    if within == 0:
        return float("inf") if between > 0 else float("nan")
    return float(np.sqrt((length - 1) / length + between / within))


def effective_size(draws: Array) -> float:
    """Return the effective sample size of the mean.

    Autocorrelations are summed in pairs of neighbouring lags while these are positive, and made
    monotone (Geyer 1992, section 3.3).

    Parameters
    ----------
    draws
        (chain, draw), with at least two draws per chain. The result for constant draws is their
        number.
    """
    if np.ptp(draws) == 0:
        return float(draws.size)
    rho = _autocorrelation(draws)
    length = draws.shape[1]
    count = 1 + len(range(1, length - 3, 2))
    pairs = rho[: 2 * count].reshape(count, 2).sum(axis=1)
    ended = np.flatnonzero(pairs <= 0)
    last = int(ended[0]) if ended.size else count - 1
    edge = float(rho[2 * last])
    monotone = np.minimum.accumulate(pairs[:last])
    tau = -1.0 + 2.0 * float(monotone.sum()) + (edge if pairs[last] >= 0 else max(edge, 0.0))
    # Antithetic draws have a larger ESS than independent ones; limit it.
    return float(draws.size / max(tau, 1.0 / np.log10(draws.size)))


class Trend(NamedTuple):
    """Change of a quantity from the first to the last quarter of a chain's draws.

    ``sd`` is the standard deviation of the draws about a straight line.
    """

    change: float
    sd: float


def trend(draws: Array, spread: float = math.inf) -> Trend | None:
    r"""Return the largest significant trend of a chain, or None.

    With the change s along a fitted line, and effective number m and standard deviation σ of the
    residuals, a trend is significant if :math:`|s| > 5 \sigma \sqrt{12/m}` and m is at least 30;
    smaller m are too uncertain, since slow stationary series have trends of any size. A change
    of more than six times ``spread``, the largest standard deviation of stationary draws, is
    always significant.

    Parameters
    ----------
    draws
        (chain, draw); fewer than 100 draws show no trend.

    Returns
    -------
    Trend or None
        False positives are at most one in a thousand stationary series, including AR(1) up to
        ρ = .997.
    """
    length = draws.shape[1]
    if length < TREND_DRAWS:
        return None
    at = (np.arange(length) + 0.5) / length - 0.5
    trends = []
    for chain in draws:
        # A constant chain has no trend.
        if not np.isfinite(chain).all() or np.ptp(chain) <= ROUNDING * np.abs(chain).max():
            continue
        slope = float(at @ (chain - chain.mean())) / float(at @ at)
        residual = chain - chain.mean() - slope * at
        sd, ess = float(residual.std()), effective_size(residual[None])
        quarter = length // 4
        change = float(chain[-quarter:].mean() - chain[:quarter].mean())
        significant = ess >= TREND_ESS and abs(slope) > TREND_ERRORS * sd * math.sqrt(12 / ess)
        if significant or abs(change) > TREND_SDS * spread:
            trends.append(Trend(change, sd))
    return max(trends, key=lambda one: abs(one.change), default=None)


def _autocorrelation(draws: Array) -> Array:
    """Return autocorrelations by lag from all chains (Vehtari et al. 2021, section 3.2)."""
    chains, length = draws.shape
    centred = draws - draws.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(centred, 2 * length)) ** 2
    covariance = np.fft.irfft(power, axis=1)[:, :length].mean(axis=0) / length
    within = covariance[0] * length / (length - 1)
    pooled = covariance[0] + (draws.mean(axis=1).var(ddof=1) if chains > 1 else 0.0)
    rho = np.asarray(1.0 - (within - covariance) / pooled)
    rho[0] = 1.0
    return rho


Cells = tuple[NDArray[np.int64], NDArray[np.int64]]

SPECTRUM: Final = 5
"""Number of largest singular values in the summary."""


def addressed_cells(shape: tuple[int, int], count: int, seed: int) -> Cells:
    """Return positions of distinct random cells; the first n do not depend on ``count``.

    A small matrix may give fewer than ``count``.
    """
    places = (np.random.default_rng(seed).random((count, 2)) * shape).astype(np.int64)
    _, first = np.unique(places, axis=0, return_index=True)
    chosen = places[np.sort(first)]
    return chosen[:, 0], chosen[:, 1]


def factor_series(
    group: xr.Dataset, symmetries: Symmetries, cells: Cells, weights: Weights | None = None
) -> list[Series]:
    """Return all series of the factors in a group, (chain, draw), read a few draws at a time.

    With weights, series are flat and have only draws with positive weight.
    """
    labels = _labels(group, symmetries, cells)
    drawn = each_draw(group, weights)
    values = np.stack([_quantities(W, H, symmetries, cells) for W, H, _ in drawn], axis=1)
    if weights is None:
        values = values.reshape(-1, group.sizes["chain"], group.sizes["draw"])
    return [Series(*label, one) for label, one in zip(labels, values, strict=True)]


def _labels(group: xr.Dataset, symmetries: Symmetries, cells: Cells) -> list[tuple[str, str]]:
    """Return name and kind of every number of `_quantities`."""
    size, width = "norm" if symmetries.signed else "sum", group.sizes["component"]
    names = dict(enumerate(group[PLACES].values)) if PLACES in group.coords else {}
    return [
        ("mu_mean", "product"),
        ("mu_norm", "product"),
        *((f"singular_value[{k}]", "product") for k in range(min(width, SPECTRUM))),
        *((f"mu[{i},{names.get(j, j)}]", "product") for i, j in zip(*cells, strict=True)),
        (f"w_{size}", "scale"),
        (f"h_{size}", "scale"),
        *((f"component[{name}]", "component") for name in component_names(group, symmetries)),
    ]


def _quantities(W: NDArray[Any], H: NDArray[Any], symmetries: Symmetries, cells: Cells) -> Array:
    W, H = W.astype(np.float64), H.astype(np.float64)
    gram_w, gram_h = W.T @ W, H @ H.T
    cell_count = W.shape[0] * H.shape[1]
    of_w, of_h = (size[: symmetries.components] for size in sizes(W, H, symmetries.signed))
    rows, columns = cells
    return np.concatenate(
        [
            [W.sum(axis=0) @ H.sum(axis=1) / cell_count],
            [np.sqrt(max(0.0, float(np.sum(gram_w * gram_h))))],
            _singular_values(gram_w, gram_h),
            np.einsum("pk,kp->p", W[rows], H[:, columns]),
            [np.linalg.norm(of_w), np.linalg.norm(of_h)]
            if symmetries.signed
            else [of_w.sum(), of_h.sum()],
            of_w * of_h / (np.sqrt(cell_count) if symmetries.signed else cell_count),
        ]
    )


def _singular_values(gram_w: Array, gram_h: Array) -> Array:
    """Return the largest singular values of WH in descending order; NaN if not finite."""
    if not (np.isfinite(gram_w).all() and np.isfinite(gram_h).all()):
        return np.full(min(len(gram_w), SPECTRUM), math.nan)
    # Negligible, but makes the matrix positive definite for components of zeros.
    jitter = 1e-13 * float(np.trace(gram_w)) + np.finfo(np.float64).tiny
    root = np.linalg.cholesky(gram_w + jitter * np.eye(len(gram_w)))
    squares = np.linalg.eigvalsh(root.T @ gram_h @ root)
    return np.sqrt(np.maximum(squares[::-1][:SPECTRUM], 0.0))


def all_series(
    tree: xr.DataTree,
    cells: int,
    seed: int,
    weights: Weights | None,
    aligned: xr.DataTree | None = None,
) -> tuple[list[Series], bool]:
    """Return series of quantities that are comparable between draws, and True if components swap.

    They describe the original draws, also if the tree is aligned, which only names the components.
    ``aligned`` is the tree after `align`, if available. Cells are monitored ones, or any.
    Components are omitted if they are not identified; unaligned ones are omitted for particles.
    """
    selection: Any = ... if weights is None else weights > 0
    named, run = Run(tree), Run(as_drawn(tree))
    series = list(density_series(run, selection))
    if not run.has_draws or run.posterior.sizes["draw"] == 0:
        return [*series, *learnt_series(run, selection, None)], False
    sums = factor_sums(run) if weights is None else {}
    if sums and (balanced := balanced_density(run.tree, sums)) is not None:
        series.insert(1, Series("lp_balanced", "balanced", balanced))
    if run.axes is not None:
        run, aligned = compared(run, run.axes), None
    group, symmetries, model = run.posterior, run.symmetries, run.model
    drawn = factor_series(group, symmetries, _cells(run, cells, seed), weights)
    of_components = [one for one in drawn if one.kind == "component"]
    others = [one for one in drawn if one.kind != "component"]
    if model is not None and model.rotates:
        return [*series, *learnt_series(run, selection, None), *others], False
    movable = symmetries.free.size > 1
    ordered = run
    if movable:
        use_aligned = aligned is not None and not named.is_aligned
        ordered = Run(aligned if use_aligned else align(run.tree))
    alike = np.full(group.sizes["component"], math.nan)
    if weights is None:
        alike = agreement(ordered.posterior)
    order = order_of(ordered, named, alike) if movable else in_place(group, symmetries, alike)
    sizes_of = np.stack([one.values for one in of_components], axis=-1)
    several = (
        sums if symmetries.components > 1 else {}
    )  # the sums of a single component are among the others
    parts = [one for name, totals in several.items() for one in order.series(name, "part", totals)]
    series += [*learnt_series(run, selection, order), *others, *parts]
    if not movable:
        return series + order.series("component", "component", sizes_of, selection), False
    series += of_components if weights is None else []
    moved = bool((order.permutation != order.permutation[0, 0]).any())
    return series + order.series("aligned", "aligned", sizes_of, selection), moved


def _cells(run: Run, count: int, seed: int) -> Cells:
    """Return positions of some monitored cells, or of any if none were monitored."""
    monitored = run.group(MONITOR)
    if monitored.sizes.get("cell"):
        rows, columns = (monitored[name].values for name in CELL_INDICES)
        among = np.arange(len(rows))
        if len(rows) > count:
            among, _ = addressed_cells((len(rows), 1), count, seed)
        return rows[among].astype(np.int64), columns[among].astype(np.int64)
    row, column = (run.posterior.sizes[dim] for dim in run.dims)
    return addressed_cells((row, column), count, seed)


def agreement(group: xr.Dataset) -> Array:
    """Return the least cosine similarity of component means in the halves of all chains.

    Parameters
    ----------
    group
        Aligned draws. The result is 1 for fewer than two draws.
    """
    half = group.sizes["draw"] // 2
    parts = [group.isel(draw=slice(half)), group.isel(draw=slice(-half, None))] if half else [group]
    means = []
    for at in range(group.sizes["chain"]):
        for part in parts:
            W = H = np.zeros(())
            for of_w, of_h, _ in each_draw(part.isel(chain=[at])):
                W, H = W + of_w, H + of_h
            # Fix the memory layout, so that sums do not depend on that of the draws.
            W, H = (np.ascontiguousarray(total / part.sizes["draw"]) for total in (W, H))
            means.append(reference_from(W, H))
    least = np.ones(group.sizes["component"])
    for one, other in combinations(means, 2):
        alike = (one.W * other.W).sum(axis=0), (one.H * other.H).sum(axis=1)
        least = np.minimum(least, np.minimum(*alike))
    return np.asarray(least, dtype=np.float64)
