"""The kernel and its closed forms against finite differences."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from daskfactor.errors import OptionError
from daskfactor.stein.kernel import IMQ, Multiquadric
from tests.refusals import refused


def direct(x, y, c, b):
    """Equation 7, one block."""
    return float((((x - y) ** 2).sum() + c**2) ** b / (2 * (c**2) ** b))


@pytest.mark.parametrize(("c", "b"), [(0.4, -0.5), (1.7, -0.2), (30.0, -0.9)])
def test_gradient_and_trace_are_derivatives(c, b):
    rng = np.random.default_rng(0)
    x, y = c * rng.standard_normal((2, 5))
    kernel, r2 = Multiquadric(c, b), float(((x - y) ** 2).sum())
    assert kernel.value(r2) == pytest.approx(direct(x, y, c, b), rel=1e-12)
    h = 1e-4 * c
    steps = h * np.eye(5)
    gradient = [(direct(x + e, y, c, b) - direct(x - e, y, c, b)) / (2 * h) for e in steps]
    assert_allclose(2 * kernel.slope(r2) * (x - y), gradient, rtol=1e-6, atol=1e-9 / c)
    trace = sum(
        direct(x + e, y + e, c, b)
        - direct(x + e, y - e, c, b)
        - direct(x - e, y + e, c, b)
        + direct(x - e, y - e, c, b)
        for e in steps
    ) / (4 * h**2)
    assert kernel.trace(r2, 5) == pytest.approx(trace, rel=1e-5)


def test_is_half_at_distance_zero():
    for block in IMQ().blocks:
        assert block.value(0.0) == 0.5
        assert block.value(block.scale**2) == pytest.approx(0.5 / np.sqrt(2))


def test_median_scales():
    points = np.array([0.0, 1.0, 4.0])
    r2 = (points[:, None] - points) ** 2
    kernel = IMQ("median", 5.0).resolve(r2, 100 * r2)
    assert (kernel.scale_w, kernel.scale_h) == (3.0, 5.0)
    assert IMQ(2.0, "median").resolve(r2, 100 * r2).scale_h == 30.0
    with pytest.raises(OptionError, match="resolved"):
        _ = IMQ("median").blocks
    assert IMQ("median", 5.0).resolve(np.zeros((3, 3)), r2).scale_w == 1.0
    assert IMQ(5.0, "median").resolve(np.zeros((1, 1)), np.zeros((1, 1))).scale_h == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_w": 0.0},
        {"scale_h": "mean"},
        {"scale_h": -1},
        {"scale_w": True},
        {"power_w": 0.5},
        {"power_h": -1.0},
    ],
)
def test_settings_that_are_refused(settings):
    refused(OptionError, next(iter(settings)), IMQ, **settings)
