"""Kernels of sparse tensors against their definition in NumPy."""

import numpy as np
import pytest

from daskfactor.kernels import blockwise
from daskfactor.kernels.views import TensorBlock, Workspace
from daskfactor.models.tweedie_law import Tweedie
from tests.kernels import problems
from tests.tiers import tiered

SHAPE, K, FLOOR = (5, 6, 7, 4), 5, 1e-6


# Every kernel is compiled for its law, width and number of axes: the least that tells them apart.
@pytest.mark.parametrize(
    ("N", "beta", "zeros"),
    tiered(
        [(2, 1.0, True), (3, 1.0, False), (3, 1.0, True), (3, 2.0, True), (3, 0.5, False)],
        {(3, 1.0, False)}.__contains__,
    ),
)
def test_gradients_and_updates_are_their_definitions(N, beta, zeros):
    rng, shape, letters, law = np.random.default_rng(0), SHAPE[:N], "abcd"[:N], Tweedie(beta)
    factors = tuple(rng.gamma(2.0, size=(size, K)) for size in shape)
    (block, V), work = block_of(shape, zeros), Workspace()
    seen, V = ~np.isnan(V), np.nan_to_num(V)
    mu = means(factors, letters)
    curvatures = tuple(np.zeros_like(factor) for factor in factors)
    found = blockwise.gradient((block, law, factors, FLOOR), 1.0, work, curvatures)
    for n in range(N):
        others = [m for m in range(N) if m != n]
        rule = f"{letters}," + ",".join(f"{letters[m]}k" for m in others) + f"->{letters[n]}k"
        rest = [factors[m] for m in others]
        slope = np.einsum(rule, seen * (V - mu) * mu ** (beta - 2), *rest)
        above = np.einsum(rule, seen * V * mu ** (beta - 2), *rest)
        below = np.einsum(rule, seen * mu ** (beta - 1), *rest)
        np.testing.assert_allclose(found[n], slope, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(curvatures[n], below, rtol=1e-11, atol=1e-11)
        out = np.zeros_like(above), np.zeros_like(below)
        problems.multiplicative(block, law, n, factors, FLOOR, out, work)
        np.testing.assert_allclose(out[0], above, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(out[1], below, rtol=1e-11, atol=1e-11)


def block_of(shape, zeros, dtype=np.float64, share=0.3, seed=0):
    """A sparse block, and the array of its cells, NaN where missing."""
    rng = np.random.default_rng(seed)
    stored = rng.random(shape) < share
    places, values = np.nonzero(stored), rng.gamma(2.0, size=stored.sum()).astype(dtype)
    values[::7] = np.nan
    indptr = np.searchsorted(places[0], np.arange(shape[0] + 1)).astype(np.int32)
    indices = tuple(each.astype(np.uint16) for each in places[1:])
    V = np.full(shape, 0.0 if zeros else np.nan)
    V[stored] = values
    return TensorBlock(indptr, indices, values, shape, zeros), V


def means(factors, letters):
    return np.einsum(",".join(f"{c}k" for c in letters) + f"->{letters}", *factors)


@pytest.mark.parametrize("share", [0.3, 0.0])
@pytest.mark.parametrize(
    ("beta", "zeros", "width"),
    tiered(
        [(1.0, True, 1), (1.0, True, 16), (2.0, True, 5), (0.0, False, 5)],
        {(1.0, True, 1)}.__contains__,
    ),
)
def test_slopes_and_fits_are_their_definitions(beta, zeros, width, share):
    rng, shape, law = np.random.default_rng(2), SHAPE[:3], Tweedie(beta)
    factors = tuple(rng.gamma(2.0, size=(size, width)) for size in shape)
    block, V = block_of(shape, zeros, share=share)
    work, mu = Workspace(), means(factors, "abc")
    seen, V = ~np.isnan(V), np.nan_to_num(V, nan=1.0)
    deviance = np.where(seen, law.deviance(V, mu), 0.0)
    for n in range(3):
        others = [m for m in range(3) if m != n]
        rule = "abc," + ",".join(f"{'abc'[m]}k" for m in others) + f"->{'abc'[n]}k"
        slope = np.einsum(rule, seen * (V - mu) * mu ** (beta - 2), *(factors[m] for m in others))
        for fits in (None, np.zeros(shape[n])):
            found = np.zeros_like(factors[n])
            problems.slope(block, law, n, factors, FLOOR, (found, fits), work)
            np.testing.assert_allclose(found, slope, rtol=1e-10, atol=1e-10)
        axes = tuple(others)
        np.testing.assert_allclose(fits, -deviance.sum(axes), atol=1e-9)
    out, cells = np.zeros(2), tuple(np.array([0, 2], np.int32) for _ in range(3))
    mean, m2 = np.zeros(2), np.zeros(2)
    problems.evaluate(block, law, factors, FLOOR, out, (cells, mean, m2, 1), work)
    pearson = (seen * (V - mu) ** 2 * mu ** (beta - 2)).sum()
    np.testing.assert_allclose(out, [-deviance.sum(), pearson])
    np.testing.assert_allclose(mean, mu[cells])
    problems.evaluate(block, law, factors, FLOOR, out, (cells, mean, m2, 2), work)
    np.testing.assert_allclose(m2, 0, atol=1e-20)


def test_a_share_of_a_law_counts_once():
    rng, law = np.random.default_rng(4), Tweedie(1.0)
    factors = tuple(rng.gamma(2.0, size=(size, K)) for size in SHAPE[:3])
    block, _ = block_of(SHAPE[:3], False)
    work = Workspace()
    for part, share in ((law, 1.0), (law.shared(0.25), 0.25)):
        curvatures = tuple(np.zeros_like(own) for own in factors)
        found = blockwise.gradient((block, part, factors, FLOOR), 1.0, work, curvatures)
        kept = [own.copy() / share for own in (*found, *curvatures)]
        if share == 1.0:
            whole = kept
    for one, two in zip(whole, kept, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)
