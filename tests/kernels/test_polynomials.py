import numpy as np
import pytest

from daskfactor.kernels import polynomials
from daskfactor.kernels.jit import jit_exact


@jit_exact
def evaluate_all(x, log, power):
    for i in range(x.size):
        log[i] = polynomials.log(x[i])
        power[i] = polynomials.power(x[i], -1.7)


@jit_exact
def evaluate_expm1(x, out):
    for i in range(x.size):
        out[i] = polynomials.expm1(x[i])


@jit_exact
def evaluate_sincos(x, sine, cosine):
    for i in range(x.size):
        sine[i], cosine[i] = polynomials.sincos(x[i])


@pytest.mark.parametrize(("dtype", "ulps"), [(np.float32, 3), (np.float64, 3)])
def test_log_and_power(dtype, ulps):
    x = np.concatenate([np.geomspace(1e-30, 1e30, 20_001), np.linspace(0.6, 1.6, 20_001)])
    x = x.astype(dtype)
    x = np.abs(x[np.abs(np.log(x)) < 50])
    log, power = np.empty_like(x), np.empty_like(x)
    evaluate_all(x, log, power)
    wide = x.astype(np.longdouble)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(log, np.log(wide).astype(dtype), rtol=ulps * eps, atol=1e-40)
    rtol = 2 * eps if dtype == np.float32 else 300 * eps  # |1.7 log x| ulps
    np.testing.assert_allclose(power, (wide ** np.longdouble(-1.7)).astype(dtype), rtol=rtol)


def test_expm1():
    x = np.concatenate([np.linspace(-700, 700, 10_001), np.geomspace(1e-300, 1, 1_001)])
    out = np.empty_like(x)
    evaluate_expm1(x, out)
    np.testing.assert_allclose(out, np.expm1(x), rtol=2e-15)
    np.testing.assert_array_less(out[:100], -0.999)


def test_expm1_is_held_within_the_range_of_doubles():
    x = np.array([-1e300, 1e300])
    out = np.empty_like(x)
    evaluate_expm1(x, out)
    np.testing.assert_allclose(out, np.expm1([-708.0, 708.0]), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sincos(dtype):
    x = np.linspace(-np.pi / 4, np.pi / 4, 30_001).astype(dtype)
    sine, cosine = np.empty_like(x), np.empty_like(x)
    evaluate_sincos(x, sine, cosine)
    rtol = 2 * np.finfo(dtype).eps
    np.testing.assert_allclose(sine, np.sin(x.astype(np.longdouble)).astype(dtype), rtol=rtol)
    np.testing.assert_allclose(cosine, np.cos(x.astype(np.longdouble)).astype(dtype), rtol=rtol)


def test_python_forms_equal_the_compiled_ones():
    for x in (np.float32(0.3), np.float64(7.7)):
        log, power = np.empty(1, x.dtype), np.empty(1, x.dtype)
        evaluate_all(np.array([x]), log, power)
        f, exponent = polynomials.split(x)
        assert (1 + f) * 2.0**exponent == x
        np.testing.assert_allclose(
            f + polynomials.log_tail(f) + exponent * np.log(2), log[0], rtol=1e-6
        )
        sine, cosine = polynomials.sincos(x / 10)
        np.testing.assert_allclose([sine, cosine], [np.sin(x / 10), np.cos(x / 10)], rtol=1e-6)
