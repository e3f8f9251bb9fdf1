"""Kernels of sparse tensors against their definition in NumPy."""

import numpy as np
import pytest

from daskfactor.kernels import tensorwise
from daskfactor.kernels.views import TensorBlock, Workspace
from daskfactor.models.tweedie_law import Tweedie

SHAPE, K, FLOOR = (5, 6, 7, 4), 5, 1e-6


@pytest.mark.parametrize(("beta", "zeros"), [(1.0, False), (1.0, True), (2.0, True), (0.5, False)])
@pytest.mark.parametrize("N", [2, 3])
def test_gradients_and_updates_are_their_definitions(N, beta, zeros):
    rng, shape, letters, law = np.random.default_rng(0), SHAPE[:N], "abcd"[:N], Tweedie(beta)
    factors = tuple(rng.gamma(2.0, size=(size, K)) for size in shape)
    stored = rng.random(shape) < 0.3
    places, values = np.nonzero(stored), rng.gamma(2.0, size=stored.sum())
    values[::7] = np.nan
    indptr = np.searchsorted(places[0], np.arange(shape[0] + 1)).astype(np.int32)
    indices = tuple(each.astype(np.uint16) for each in places[1:])
    block, work = TensorBlock(indptr, indices, values, shape, zeros), Workspace(np.float64)
    V = np.full(shape, 0.0 if zeros else np.nan)
    V[stored] = values
    seen, V = ~np.isnan(V), np.nan_to_num(V)
    mu = np.einsum(",".join(f"{c}k" for c in letters) + f"->{letters}", *factors)
    curvatures = tuple(np.zeros_like(factor) for factor in factors)
    found = tensorwise.gradient(block, law, factors, 1.0, FLOOR, work, curvatures)
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
        tensorwise.multiplicative(block, law, n, factors, FLOOR, out, work)
        np.testing.assert_allclose(out[0], above, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(out[1], below, rtol=1e-11, atol=1e-11)
