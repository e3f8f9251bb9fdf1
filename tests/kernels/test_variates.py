import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from daskfactor.kernels import variates
from daskfactor.kernels.jit import jit_exact, stack_array
from daskfactor.kernels.variates import (
    STREAM,
    binomial,
    fill_gamma,
    gamma,
    normal,
    poisson,
    start_cell,
    start_entry,
    uniform,
)

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
N = 20_000
UNSEEN = 1e-4
"""Smallest p-value of a right generator here; about one such test in 10**4 would go below."""


@jit_exact
def uniforms(out):
    stream = stack_array(STREAM, np.uint64)
    start_cell(stream, KEY, 0, 0, 0)
    for i in range(out.size):
        out[i] = uniform(stream)


@jit_exact
def normals(out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_entry(stream, KEY, 3, 1, i, 0)
        out[i] = normal(stream)


@jit_exact
def gammas(shape, rate, out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_entry(stream, KEY, 0, 0, i, 0)
        out[i] = gamma(shape, rate, stream)


@jit_exact
def poissons(mean, out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_cell(stream, KEY, 1, i, 0)
        out[i] = poisson(mean, stream)


@jit_exact
def binomials(n, p, out):
    stream = stack_array(STREAM, np.uint64)
    for i in range(out.size):
        start_cell(stream, KEY, 2, i, 7)
        out[i] = binomial(n, p, stream)


def drawn(draw, *parameters, dtype=np.float64):
    out = np.empty(N, dtype)
    draw(*parameters, out)
    return out


def check_continuous(values, law):
    assert stats.kstest(values, law.cdf).pvalue > UNSEEN
    mean, variance, kurtosis = law.stats("mvk")
    assert abs(values.mean() - mean) < 5 * np.sqrt(variance / values.size)
    spread = np.sqrt((kurtosis + 2) / values.size)
    assert abs(values.var() / variance - 1) < 5 * spread


def check_discrete(values, law):
    """Chi-square over cells that hold at least 20 expected counts each, and moments."""
    edges = np.unique(law.ppf(np.linspace(0, 1, 41)[1:-1]))
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * values.size
    found = np.bincount(np.searchsorted(edges, values), minlength=edges.size + 1)
    keep = expected > 20
    rest = values.size - expected[keep].sum()
    expected = np.append(expected[keep], max(rest, 1e-9))
    found = np.append(found[keep], values.size - found[keep].sum())
    if expected[-1] < 20:
        expected, found = expected[:-1], found[:-1]
    statistic = ((found - expected) ** 2 / expected).sum()
    assert stats.chi2(max(expected.size - 1, 1)).sf(statistic) > UNSEEN
    mean, variance, kurtosis = law.stats("mvk")
    assert abs(values.mean() - mean) < 5 * np.sqrt(variance / values.size)
    assert abs(values.var() / variance - 1) < 5 * np.sqrt((kurtosis + 2) / values.size)


def test_uniforms_and_normals():
    values = drawn(uniforms)
    check_continuous(values, stats.uniform())
    assert values.min() > 0
    assert values.max() < 1
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / np.sqrt(N)
    check_continuous(drawn(normals), stats.norm())


GAMMAS = [(0.05, 1.0), (0.3, 2.0), (0.999, 1.0), (1.0, 0.5), (1.7, 3.0), (12.0, 1e-3)]


@pytest.mark.parametrize(("shape", "rate"), [*GAMMAS, (1e4, 5.0), (1e9, 1.0), (1e13, 1e6)])
def test_gamma(shape, rate):
    check_continuous(drawn(gammas, shape, rate), stats.gamma(shape, scale=1 / rate))


def test_gamma_of_a_tiny_shape_is_log_exact():
    """At shape a, log(x) * a is nearly -Exponential(1): x = u**(1 / a) times a number near 1."""
    values = drawn(gammas, 0.02, 1.0)
    seen = values[values > 0]
    law = stats.gamma(0.02)
    assert stats.kstest(law.cdf(seen), stats.uniform(loc=0, scale=1).cdf).pvalue > UNSEEN


MEANS = [1e-3, 0.2, 1.0, 5.5, 9.99, 10.0, 14.3, 100.0, 5e3, 1e6, 1e9]


@pytest.mark.parametrize("mean", MEANS)
def test_poisson(mean):
    check_discrete(drawn(poissons, mean, dtype=np.int64), stats.poisson(mean))


def test_poisson_of_nothing():
    assert not drawn(poissons, 0.0, dtype=np.int64).any()


FEW = [(1, 0.3), (1, 0.8), (3, 0.5), (7, 0.02), (19, 0.5), (20, 0.5), (25, 0.9), (40, 0.26)]
MANY = [(1000, 0.004), (1000, 0.03), (1000, 0.97), (10**6, 0.5)]
HUGE = [(2**31, p) for p in (1e-9, 1e-4, 0.4, 1 - 3e-9)]


@pytest.mark.parametrize(("n", "p"), [*FEW, *MANY, *HUGE])
def test_binomial(n, p):
    values = drawn(binomials, n, p, dtype=np.int64)
    assert values.min() >= 0
    assert values.max() <= n
    check_discrete(values, stats.binom(n, p))


def test_certain_binomials():
    for n, p, result in ((0, 0.5, 0), (5, 0.0, 0), (5, -1e-17, 0), (5, 1.0, 5), (5, 1.1, 5)):
        assert set(drawn(binomials, n, p, dtype=np.int64)) == {result}


def band(n, K, row0=0, **address):
    where = {"key": KEY, "iteration": 4, "factor": 1, **address}
    shape = 0.2 + (np.arange(row0, row0 + n)[:, None] % 5) * np.arange(1, K + 1)
    out = np.empty((n, K))
    fill_gamma(shape, np.full((n, K), 2.0), row0=row0, out=out, **where)
    return out


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 40), K=st.integers(1, 9), cut=st.integers(0, 40))
def test_bands_and_width_do_not_matter(n, K, cut):
    cut = min(cut, n)
    whole = band(n, K, 11)
    parts = [band(cut, K, 11), band(n - cut, K, 11 + cut)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(band(n, K + 1, 11)[:, :K], whole)


@pytest.mark.parametrize("change", ["iteration", "factor", "key0", "key1", "row0", "component"])
def test_every_part_of_the_address_counts(change):
    base = np.empty((2000, 4))
    fill_gamma(np.ones((2000, 4)), np.ones((2000, 4)), KEY, 4, 1, 0, base)
    where = {"key": KEY.copy(), "iteration": 4, "factor": 1, "row0": 0}
    other = np.empty_like(base)
    if change.startswith("key"):
        where["key"][int(change[-1])] ^= np.uint32(1)
    elif change == "component":
        other = np.empty((2000, 5))
    else:
        where[change] += 2000 if change == "row0" else 1
    fill_gamma(np.ones(other.shape), np.ones(other.shape), out=other, **where)
    other = other[:, -4:]
    assert not np.any(base == other)
    assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(base.size)


def test_entries_and_cells_have_streams_of_their_own():
    @jit_exact
    def both(out):
        stream = stack_array(STREAM, np.uint64)
        start_entry(stream, KEY, 5, 3, 9, 0)
        out[0] = uniform(stream)
        start_cell(stream, KEY, 5, 9, 3)
        out[1] = uniform(stream)

    out = np.empty(2)
    both(out)
    assert out[0] != out[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_component_is_lost_to_underflow(dtype):
    out = np.empty((500, 2), dtype)
    fill_gamma(np.full(out.shape, 1e-3), np.ones(out.shape), KEY, 0, 0, 0, out)
    assert (out > 0).all()
    assert np.float64(out.min()) ** 2 > 0


def test_rates_may_be_shared_by_all_rows():
    rates, shape = np.array([0.5, 3.0]), np.full((6, 2), 1.5)
    one, other = np.empty((6, 2)), np.empty((6, 2))
    fill_gamma(shape, np.broadcast_to(rates, shape.shape), KEY, 0, 0, 0, one)
    fill_gamma(shape, np.tile(rates, (6, 1)), KEY, 0, 0, 0, other)
    np.testing.assert_array_equal(one, other)


def broken_gamma(shape, rate, out):
    """Without the boost: a shape below 1 as if it were one higher."""
    gammas(shape + 1.0 if shape < 1 else shape, rate, out)


def broken_poisson(mean, out):
    poissons(mean, out)
    out += 1


def broken_binomial(n, p, out):
    binomials(n, 1.03 * p, out)


def test_broken_copies_are_seen():
    with pytest.raises(AssertionError):
        check_continuous(drawn(broken_gamma, 0.3, 1.0), stats.gamma(0.3))
    with pytest.raises(AssertionError):
        check_discrete(drawn(broken_poisson, 1e3, dtype=np.int64), stats.poisson(1e3))
    with pytest.raises(AssertionError):
        check_discrete(drawn(broken_binomial, 40, 0.3, dtype=np.int64), stats.binom(40, 0.3))


def test_the_tail_of_stirlings_formula():
    @jit_exact
    def tails(k, out):
        for i in range(k.size):
            out[i] = variates._stirling_tail(k[i])

    k = np.array([0, 1, 2, 5, 9, 10, 11, 40, 1000], dtype=np.float64)
    out = np.empty(k.size)
    tails(k, out)
    from scipy.special import gammaln

    exact = gammaln(k + 1) - (np.log(2 * np.pi) / 2 + (k + 0.5) * np.log(k + 1) - (k + 1))
    np.testing.assert_allclose(out, exact, atol=2e-12)
