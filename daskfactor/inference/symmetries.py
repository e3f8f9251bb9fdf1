"""Draws along the symmetries of a `GaussianMF`: the sizes and levels that factors share.

The likelihood does not change under

    W_k → c W_k, H_k → H_k / c                 (the scale of a component)
    w_i → w_i + u, b_j → b_j - u·h_j           (the level of W, where there are biases)
    h_j → h_j + u, a_i → a_i - u·w_i           (the level of H)
    a_i → a_i + s, b_j → b_j - s, m → m - s    (the level of the biases)

Given the data, a sampler that moves one factor after the other hardly moves along these, so each
is drawn from its conditional: what the priors leave of it. Rotations are not drawn: components
would change their meaning from draw to draw.

Source: Liu and Sabatti 2000, "Generalised Gibbs sampler and multigrid Monte Carlo for Bayesian
computation", theorem 1.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from daskfactor.executors.state import Array, ChainState, FactorBand
from daskfactor.inference.program import COLUMNS, ROWS, SHIFT, unshifted
from daskfactor.models.rates import draw_scales


class Prior(NamedTuple):
    """The prior of a factor.

    Attributes
    ----------
    selection
        Rows of every band that priors are learnt from, of `Parameter.informative_rows`.
    table
        Means and precisions of the columns, as `column_table` has them.
    bias
        Column of the factor's own biases; None: there are none.
    link
        The link B, (F, K'), and its precision; None where there are no covariates.
    """

    selection: list[Any]
    table: Array
    bias: int | None
    link: tuple[Array, float] | None


class Sums(NamedTuple):
    """Sums over the n rows of a factor, of entries x and of residuals r = x - prior mean.

    They are n, Σ r (K',), Σ r² (K',), and of the first K columns Σ x xᵀ and Σ x r_b, with b the
    column of the biases; these two are zero where there are none.
    """

    n: int
    total: Array
    squares: Array
    gram: Array
    cross: Array


def band_sums(band: FactorBand, rows: Any, table: Array, bias: int | None, K: int) -> Sums:
    """Return the sums over some rows of a band."""
    x = band.values[rows, :K].astype(np.float64)
    r = unshifted(band)[rows].astype(np.float64) - table[0]
    none = np.zeros((K, K)), np.zeros(K)
    products = none if bias is None else (x.T @ x, x.T @ r[:, bias])
    return Sums(len(x), r.sum(axis=0), np.square(r).sum(axis=0), *products)


def move_band(band: FactorBand, bias: int | None, slope: Array, level: Array, scale: Array) -> None:
    """Add slope·x to the bias of every row, then the level to the row; then scale its x."""
    values, K = band.values, len(scale)
    if bias is not None:
        values[:, bias] += (values[:, :K] @ slope).astype(values.dtype)
        values += level.astype(values.dtype)
    for array in (values, band.arrays.get(SHIFT)):
        if array is not None:
            array[:, :K] *= scale.astype(values.dtype)


def draw_symmetries(
    state: ChainState, priors: tuple[Prior, Prior], K: int, rng: np.random.Generator
) -> tuple[Array, float]:
    """Draw sizes and levels, and move the bands of W and H there.

    Parameters
    ----------
    state
        W and H, whose bands are moved, and the prior means of rows with them.
    priors
        Those of W and H.
    K
        How many columns of both are components.
    rng
        A generator of this chain's and cycle's.

    Returns
    -------
    scale
        c, (K,), by which links of W are to be multiplied, and those of H divided.
    shift
        s, by which the mean of the biases of the columns is to be lowered.
    """
    width = priors[ROWS].table.shape[1]
    still, zero, one, shift = np.zeros(width), np.zeros(K), np.ones(K), 0.0

    def sums() -> list[Sums]:
        result = []
        for factor, prior in enumerate(priors):
            how: Any = {"table": prior.table, "bias": prior.bias, "K": K}
            parts = state.each(partial(band_sums, **how), factor, prior.selection)
            result.append(Sums(*(sum(terms) for terms in zip(*parts, strict=True))))
        return result

    def move(factor: int, slope: Array, level: Array, scale: Array) -> None:
        how: Any = {"slope": slope, "level": level, "scale": scale, "bias": priors[factor].bias}
        state.each(partial(move_band, **how), factor)

    of_w, of_h = sums()
    level = still.copy()
    a, b = (prior.bias for prior in priors)
    if a is not None:
        precision = of_w.n * priors[ROWS].table[1, a]
        shift = -of_w.total[a] / of_w.n + rng.standard_normal() / math.sqrt(precision)
        rise = draw_level(of_w, of_h, priors, K, rng)
        level[:K], level[a] = rise, shift
        move(ROWS, zero, level, one)
        move(COLUMNS, -rise, -shift * (np.arange(width) == b), one)
        of_w, of_h = sums()
        level = still.copy()
        level[:K] = draw_level(of_h, of_w, priors[::-1], K, rng)
        lifted = of_h.squares[:K] + level[:K] * (2.0 * of_h.total[:K] + of_h.n * level[:K])
        of_h.squares[:K] = lifted  # those of H once it is moved, with its scale
    halves, counts = [], []
    for prior, factor_sums in zip(priors, (of_w, of_h), strict=True):
        squares, count = factor_sums.squares[:K], factor_sums.n
        if prior.link is not None:
            link, ridge = prior.link
            squares, count = squares + ridge * np.square(link[:, :K]).sum(axis=0), count + len(link)
        halves.append(0.5 * prior.table[1, :K] * squares)
        counts.append(count)
    moving = (halves[ROWS] > 0) & (halves[COLUMNS] > 0)
    scale_arguments = halves[ROWS][moving], halves[COLUMNS][moving], rng.random(K)[moving]
    scale = one.copy()
    scale[moving] = np.sqrt(draw_scales(0.5 * (counts[ROWS] - counts[COLUMNS]), *scale_arguments))
    move(ROWS, -level[:K], still, scale)
    move(COLUMNS, zero, level, 1.0 / scale)
    return scale, shift


def draw_level(
    sums: Sums, other: Sums, priors: tuple[Prior, ...], K: int, rng: np.random.Generator
) -> Array:
    """Draw u of x → x + u of one factor, which the other one's biases take up.

    u ~ N(P⁻¹ g, P⁻¹), P = n Λ + λ_b Σ y yᵀ, g = λ_b Σ y r_b - Λ Σ r, with rows y and biases of
    the other factor.
    """
    prior, against = priors
    precision, of_bias = prior.table[1, :K], against.table[1, against.bias]
    P = np.diag(sums.n * precision) + of_bias * other.gram
    g = of_bias * other.cross - precision * sums.total[:K]
    root = np.linalg.cholesky(P)
    return np.asarray(np.linalg.solve(root.T, np.linalg.solve(root, g) + rng.standard_normal(K)))
