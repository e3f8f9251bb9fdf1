"""R-hat and effective sample sizes, and the numbers of a draw that they are taken of.

The rank-normalised split versions, for any number of chains, also one. ArviZ has
the same, and the tests compare with it; it brings more with it than these few
lines are worth.

What no order, scale or sign of components changes comes from sums of columns and
from the K x K Gram matrices A = WᵀW and B = HHᵀ: the norm of WH is √tr(AB), its
singular values are the roots of the eigenvalues of LᵀBL with A = LLᵀ. So a draw costs
(I + J) K² operations, and WH is never formed.

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
from daskfactor.results.schema import CELL_INDICES, MONITOR
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
from daskfactor.results.trace import Law, Run, Weights, each_draw, each_weighted_draw

Array = NDArray[np.float64]

LEAST_DRAWS: Final = 4
"""Draws per chain below which nothing can be said."""
FEWEST_OF_TREND, WORTH_OF_TREND, CERTAIN, FAR = 100, 30, 5.0, 6.0
"""What `trend` asks for: draws, effective ones, standard errors, and standard deviations."""
ROUNDING: Final = 1e-12
"""Share of the largest number up to which what varies is what rounding has left over."""
TAILS: Final = (0.05, 0.95)
LARGER_OF_TWO: Final = 0.56
"""Mean of the larger of two standard normal numbers."""


class Convergence(NamedTuple):
    """R-hat, and how many independent draws the draws are worth, for centre and tails."""

    rhat: float
    ess_bulk: float
    ess_tail: float


UNKNOWN: Final = Convergence(float("nan"), float("nan"), float("nan"))


def convergence(draws: NDArray[np.floating]) -> Convergence:
    r"""Diagnostics of one quantity.

    .. math:: \hat R = \max(\hat R_{\rm bulk}, \hat R_{\rm folded}), \qquad
        {\rm ESS} = \frac{MN}{-1 + 2 \sum_t \hat\rho_t}

    Parameters
    ----------
    draws
        (chain, draw), in any unit.

    Returns
    -------
    Convergence
        Without unit; NaN where there are fewer than four draws a chain, where a draw
        is not finite, and where the quantity never changes.

    Notes
    -----
    Vehtari et al. 2021, sections 3 and 4.
    """
    drawn: Array = np.asarray(draws, dtype=np.float64)
    ranks = _ranks(drawn)
    if ranks is None:
        return UNKNOWN
    ranked, folded = ranks
    ends = np.quantile(drawn, TAILS)
    return Convergence(
        max(_rhat(ranked), _rhat(folded)),
        effective_size(ranked),
        min(effective_size(split_chains((drawn <= end).astype(np.float64))) for end in ends),
    )


def rhat_beyond_autocorrelation(draws: NDArray[np.floating], errors: float = 0.0) -> float:
    r"""R-hat, as of draws that do not depend on each other.

    .. math:: \hat R^2 = \frac{N-1}{N} + \frac BW - \frac{\tau - 1}{N}
        - (0.56 + z) \frac \tau N \sqrt{\frac 2 {M-1}}

    Means of N draws of a chain that is right vary as :math:`\tau W / N`, with τ the
    autocorrelation time within chains; R-hat takes that for a sign of chains apart, of short chains
    above all. M are the halves of all chains.

    Parameters
    ----------
    draws
        (chain, draw), in any unit; NaN comes of those that `convergence` knows nothing of.
    errors
        z: how many standard errors of the chance that is left are taken off, too, beside 0.56 by
        which the larger of the two R-hats, of ranks and of folded ranks, is above each.
    """
    drawn: Array = np.asarray(draws, dtype=np.float64)
    ranks = _ranks(drawn)
    if ranks is None:
        return math.nan
    rhats, found = [_rhat(own) for own in ranks], []
    if math.isnan(max(rhats)):
        return math.nan
    for own, rhat in zip(ranks, rhats, strict=True):
        length = own.shape[1]
        centred = own - own.mean(axis=1, keepdims=True)
        tau = max(own.size / effective_size(centred), 1.0) if math.isfinite(rhat) else 1.0
        chance = (LARGER_OF_TWO + errors) * tau * math.sqrt(2.0 / (len(own) - 1))
        found.append(rhat**2 - (tau - 1.0 + chance) / length)
    return math.sqrt(max(*found, 0.0))


def _ranks(drawn: Array) -> tuple[Array, Array] | None:
    """Ranks of the halves of chains, and of their distances from the median, as normal numbers.

    None for draws that are too few, not all finite, or all the same.
    """
    if drawn.shape[1] < LEAST_DRAWS or not np.isfinite(drawn).all():
        return None
    if np.ptp(drawn) <= ROUNDING * np.abs(drawn).max():
        return None
    halves = split_chains(drawn)
    return rank_normalised(halves), rank_normalised(np.abs(halves - np.median(halves)))


def split_chains(draws: Array) -> Array:
    """First and second half of every chain as chains of their own, (2 chains, draws // 2)."""
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def rank_normalised(draws: Array) -> Array:
    """Normal scores of the ranks over all chains (Vehtari et al. 2021, section 4.1)."""
    # As scipy.stats.rankdata, which takes a second to import.
    _, place, counts = np.unique(draws, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - 0.5 * (counts - 1))[place].reshape(draws.shape)
    return np.asarray(special.ndtri((ranks - 0.375) / (draws.size + 0.25)))


def _rhat(draws: Array) -> float:
    """Root of the pooled over the mean variance (Vehtari et al. 2021, section 3.1)."""
    length = draws.shape[1]
    within = draws.var(axis=1, ddof=1).mean()
    between = draws.mean(axis=1).var(ddof=1)
    if within == 0:
        return float("inf") if between > 0 else float("nan")
    return float(np.sqrt((length - 1) / length + between / within))


def effective_size(draws: Array) -> float:
    """Number of independent draws with the same error of the mean.

    Autocorrelations are summed in pairs of neighbouring lags while these are
    positive, made monotone (Geyer 1992, section 3.3).

    Parameters
    ----------
    draws
        (chain, draw), two draws a chain or more; as many as there are if they never
        change.
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
    kept = np.minimum.accumulate(pairs[:last])
    tau = -1.0 + 2.0 * float(kept.sum()) + (edge if pairs[last] >= 0 else max(edge, 0.0))
    # Draws that alternate are worth more than independent ones, but within reason.
    return float(draws.size / max(tau, 1.0 / np.log10(draws.size)))


class Trend(NamedTuple):
    """Change of a quantity from the first to the last quarter of a chain's draws.

    ``sd`` is the standard deviation of the draws about a straight line.
    """

    change: float
    sd: float


def trend(draws: Array, spread: float = math.inf) -> Trend | None:
    r"""Find the largest trend of a chain that no stationary series would have by chance.

    With s the change along a fitted line, m the effective number of the residuals and σ
    their standard deviation, that is :math:`|s| > 5 \sigma \sqrt{12/m}` where m is at least 30;
    below that m is no more than a guess, and slow stationary series have trends of any size.
    A change of six times ``spread``, the largest standard deviation that stationary draws
    could have, is one in any case.

    Parameters
    ----------
    draws
        (chain, draw); fewer than 100 draws show no trend.

    Returns
    -------
    Trend or None
        Of stationary series one in a thousand or fewer, AR(1) up to ρ = .997 among them.
    """
    length = draws.shape[1]
    if length < FEWEST_OF_TREND:
        return None
    at = (np.arange(length) + 0.5) / length - 0.5
    found = []
    for own in draws:
        # A chain that is stuck goes nowhere.
        if not np.isfinite(own).all() or np.ptp(own) <= ROUNDING * np.abs(own).max():
            continue
        slope = float(at @ (own - own.mean())) / float(at @ at)
        residual = own - own.mean() - slope * at
        sd, worth = float(residual.std()), effective_size(residual[None])
        quarter = length // 4
        change = float(own[-quarter:].mean() - own[:quarter].mean())
        sure = worth >= WORTH_OF_TREND and abs(slope) > CERTAIN * sd * math.sqrt(12 / worth)
        if sure or abs(change) > FAR * spread:
            found.append(Trend(change, sd))
    return max(found, key=lambda one: abs(one.change), default=None)


def _autocorrelation(draws: Array) -> Array:
    """Over lags, from all chains together (Vehtari et al. 2021, section 3.2)."""
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
"""Singular values that are followed, the largest ones."""


def addressed_cells(shape: tuple[int, int], count: int, seed: int) -> Cells:
    """Positions of different cells; cell n of a seed does not depend on how many there are.

    In a small matrix there may be fewer than ``count``.
    """
    places = (np.random.default_rng(seed).random((count, 2)) * shape).astype(np.int64)
    _, first = np.unique(places, axis=0, return_index=True)
    chosen = places[np.sort(first)]
    return chosen[:, 0], chosen[:, 1]


def factor_series(
    group: xr.Dataset, law: Law, cells: Cells, weights: Weights | None = None
) -> list[Series]:
    """All series that the draws of a group give, read a few draws at a time.

    (chain, draw); of draws with weights those that have some, chains one after the other.
    """
    labels = _labels(group, law, cells)
    drawn = each_weighted_draw(group, weights)
    values = np.stack([_of_draw(W, H, law, cells) for (W, H), _ in drawn], axis=1)
    if weights is None:
        values = values.reshape(-1, group.sizes["chain"], group.sizes["draw"])
    return [Series(*label, one) for label, one in zip(labels, values, strict=True)]


def _labels(group: xr.Dataset, law: Law, cells: Cells) -> list[tuple[str, str]]:
    """Name and kind of every number of `_of_draw`."""
    size, width = "norm" if law.signed else "sum", group.sizes["component"]
    names = dict(enumerate(group[PLACES].values)) if PLACES in group.coords else {}
    return [
        ("mu_mean", "product"),
        ("mu_norm", "product"),
        *((f"singular_value[{k}]", "product") for k in range(min(width, SPECTRUM))),
        *((f"mu[{i},{names.get(j, j)}]", "product") for i, j in zip(*cells, strict=True)),
        (f"w_{size}", "scale"),
        (f"h_{size}", "scale"),
        *((f"component[{name}]", "component") for name in component_names(group, law)),
    ]


def _of_draw(W: NDArray[Any], H: NDArray[Any], law: Law, cells: Cells) -> Array:
    W, H = W.astype(np.float64), H.astype(np.float64)
    gram_w, gram_h = W.T @ W, H @ H.T
    cell_count = W.shape[0] * H.shape[1]
    of_w, of_h = (size[: law.components] for size in sizes(W, H, law.signed))
    rows, columns = cells
    return np.concatenate(
        [
            [W.sum(axis=0) @ H.sum(axis=1) / cell_count],
            [np.sqrt(max(0.0, float(np.sum(gram_w * gram_h))))],
            _singular_values(gram_w, gram_h),
            np.einsum("pk,kp->p", W[rows], H[:, columns]),
            [np.linalg.norm(of_w), np.linalg.norm(of_h)]
            if law.signed
            else [of_w.sum(), of_h.sum()],
            of_w * of_h / (np.sqrt(cell_count) if law.signed else cell_count),
        ]
    )


def _singular_values(gram_w: Array, gram_h: Array) -> Array:
    """The largest singular values of WH, in descending order; NaN if entries are not finite."""
    if not (np.isfinite(gram_w).all() and np.isfinite(gram_h).all()):
        return np.full(min(len(gram_w), SPECTRUM), math.nan)
    # So little that it does not show, but enough for a component of zeros.
    jitter = 1e-13 * float(np.trace(gram_w)) + np.finfo(np.float64).tiny
    root = np.linalg.cholesky(gram_w + jitter * np.eye(len(gram_w)))
    found = np.linalg.eigvalsh(root.T @ gram_h @ root)
    return np.sqrt(np.maximum(found[::-1][:SPECTRUM], 0.0))


def all_series(
    tree: xr.DataTree,
    cells: int,
    seed: int,
    weights: Weights | None,
    aligned: xr.DataTree | None = None,
) -> tuple[list[Series], bool]:
    """Series of what can be compared between draws, and whether components change places.

    They are of the run as it was drawn, also where the tree has been aligned since: that gives
    components their names. ``aligned`` is the tree aligned by itself, if somebody has done that.
    Cells are those that the run monitored, or else any. Components are left out where they can
    be turned into each other; those as drawn, where the order in which they were drawn says
    nothing: of particles.
    """
    kept: Any = ... if weights is None else weights > 0
    named, run = Run(tree), Run(as_drawn(tree))
    series = list(density_series(run, kept))
    if not run.has_draws or run.posterior.sizes["draw"] == 0:
        return [*series, *learnt_series(run, kept, None)], False
    sums = factor_sums(run) if weights is None else {}
    if sums and (balanced := balanced_density(run.tree, sums)) is not None:
        series.insert(1, Series("lp_balanced", "balanced", balanced))
    if run.axes is not None:
        run, aligned = compared(run, run.axes), None
    group, law, model = run.posterior, run.law, run.model
    drawn = factor_series(group, law, _cells(run, cells, seed), weights)
    of_components = [one for one in drawn if one.kind == "component"]
    others = [one for one in drawn if one.kind != "component"]
    if model is not None and model.rotates:
        return [*series, *learnt_series(run, kept, None), *others], False
    movable = law.free.size > 1
    ordered = run
    if movable:
        known = aligned is not None and not named.is_aligned
        ordered = Run(aligned if known else align(run.tree))
    alike = np.full(group.sizes["component"], math.nan)
    if weights is None:
        alike = agreement(ordered.posterior)
    order = order_of(ordered, named, alike) if movable else in_place(group, law, alike)
    sizes_of = np.stack([one.values for one in of_components], axis=-1)
    several = sums if law.components > 1 else {}  # the whole of one component is followed already
    parts = [one for name, own in several.items() for one in order.series(name, "part", own)]
    series += [*learnt_series(run, kept, order), *others, *parts]
    if not movable:
        return series + order.series("component", "component", sizes_of, kept), False
    series += of_components if weights is None else []
    moved = bool((order.permutation != order.permutation[0, 0]).any())
    return series + order.series("aligned", "aligned", sizes_of, kept), moved


def _cells(run: Run, count: int, seed: int) -> Cells:
    """Positions of some of the cells that were monitored; of any, where none were."""
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
    """Least cosine, in W and in H, of the means of each component in the halves of all chains.

    Parameters
    ----------
    group
        Draws, aligned. Of fewer than two draws nothing differs.
    """
    half = group.sizes["draw"] // 2
    parts = [group.isel(draw=slice(half)), group.isel(draw=slice(-half, None))] if half else [group]
    means = []
    for at in range(group.sizes["chain"]):
        for part in parts:
            W = H = np.zeros(())
            for of_w, of_h in each_draw(part.isel(chain=[at])):
                W, H = W + of_w, H + of_h
            # Sums in one order, whatever the order in memory of draws that are read or held.
            W, H = (np.ascontiguousarray(own / part.sizes["draw"]) for own in (W, H))
            means.append(reference_from(W, H))
    least = np.ones(group.sizes["component"])
    for one, other in combinations(means, 2):
        alike = (one.W * other.W).sum(axis=0), (one.H * other.H).sum(axis=1)
        least = np.minimum(least, np.minimum(*alike))
    return np.asarray(least, dtype=np.float64)
