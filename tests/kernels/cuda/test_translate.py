"""Functions of numbers, translated to C++ and compiled there, against what numba makes of them."""

from runpy import run_path
from textwrap import indent

import numba
import numpy as np
import pytest

from daskfactor.kernels import langevin, philox, polynomials, squares, variates
from daskfactor.kernels.cuda import source
from daskfactor.kernels.cuda.source import Source
from daskfactor.kernels.cuda.translate import TYPES, Translation, Untranslatable
from daskfactor.kernels.entries import entry_rules
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.models.tweedie_law import Tweedie
from tests.refusals import refused

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def apply(device, scalars, text, count, *arguments):
    """Launch a kernel that calls translated functions."""
    whole = "\n".join((source._file("prelude.h"), scalars.text, text))
    device.launch(Source(whole, ()), "apply", 7, np.int64(count), *arguments)


def translated(device, function, *columns, out, numbers=0):
    """Return ``function`` of each row of columns, by a kernel."""
    scalars = Translation(numbers)
    name = scalars.add(function)
    given = "".join(f"const {TYPES[own.dtype.type]} *a{n}, " for n, own in enumerate(columns))
    places = ", ".join(f"a{n}[p]" for n in range(len(columns)))
    text = f"""
extern "C" __global__ void apply(Size n, {given}{TYPES[np.dtype(out).type]} *out) {{
  for (Size p = THREAD; p < n; p += THREADS) out[p] = {name}({places});
}}
"""
    made = device.empty(columns[0].shape, out)
    apply(device, scalars, text, columns[0].size, *map(device.put, columns), made)
    return device.take(made)


def by_numba(function, *columns, out):
    made = np.empty(columns[0].shape, out)
    compiled = numba.njit(getattr(function, "py_func", function))
    for p, own in enumerate(zip(*columns, strict=True)):
        made[p] = compiled(*own)
    return made


def assert_bits(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    seen = ~np.isnan(wanted)
    assert found[seen].tobytes() == wanted[seen].tobytes()


def assert_same(device, function, *columns, out):
    """A function has the same bits by a kernel and by numba."""
    wanted = by_numba(function, *columns, out=out)
    assert_bits(translated(device, function, *columns, out=out), wanted)


def positive(dtype, n=300, seed=0):
    found = np.exp(np.random.default_rng(seed).normal(0, 8, n)).astype(dtype)
    found[:3] = 1.0, np.finfo(dtype).tiny, 1e30
    return found


def sine(x):
    s, c = polynomials.sincos(x)
    return s + c


def tail(x):
    return polynomials.log_tail(x)


@DTYPES
def test_elementary_functions_are_those_of_numba(stand_in, dtype):
    x, angles = positive(dtype), np.linspace(-0.29, 0.41, 301).astype(dtype)
    assert_same(stand_in, polynomials.log, x, out=dtype)
    for exponent in (-1.3, 0.0, 0.5, 2.0):
        assert_same(stand_in, polynomials.power, x, np.full(x.size, exponent), out=dtype)
    for function in (sine, tail):
        assert_same(stand_in, function, angles, out=dtype)


def test_exponentials_are_those_of_numba_and_held_where_they_end(stand_in):
    x = np.random.default_rng(1).normal(0, 30, 300)
    x[:4] = 0.0, -1e300, 1e300, 1e-300
    assert_same(stand_in, polynomials.expm1, x, out=np.float64)


def words_of(w, key):
    first, second, third, fourth = philox.rounds((w, w, w, w), key, key)
    return first ^ (second << np.uint64(1)) ^ (third << np.uint64(2)) ^ (fourth << np.uint64(3))


def test_rounds_of_philox_are_those_of_numba(stand_in):
    words = np.random.default_rng(2).integers(0, 2**32, (2, 200), np.uint64)
    assert_same(stand_in, words_of, *words, out=np.uint64)


DRAWS = 6


@numba.njit
def _drawn(draw, numbers, out):
    key, stream = np.array([3, 5], np.uint32), np.empty(variates.STREAM, np.uint64)
    for p in range(numbers.size):
        variates.start_entry(stream, key, 11, 1, 2**32 - 1 - p, 7)
        for k in range(DRAWS):
            out[p, k] = draw(numbers[p], stream)


@numba.njit
def a_gamma(shape, stream):
    return variates.gamma(shape, 1.5, stream)


@numba.njit
def a_count(mean, stream):
    return np.float64(variates.poisson(mean, stream))


@numba.njit
def a_normal(mean, stream):
    return mean + variates.normal(stream)


@pytest.mark.parametrize("draw", [a_gamma, a_count, a_normal], ids=lambda own: own.__name__)
def test_streams_of_numbers_are_those_of_numba(stand_in, draw):
    """Among them shapes below 1, counts by search and by rejection, and both words of a block."""
    numbers = np.geomspace(1e-3, 3e3, 150)
    wanted = np.empty((numbers.size, DRAWS))
    _drawn(draw, numbers, wanted)
    scalars = Translation()
    start, name = scalars.add(variates.start_entry), scalars.add(draw)
    text = f"""
extern "C" __global__ void apply(Size n, const double *numbers, double *out) {{
  for (Size p = THREAD; p < n; p += THREADS) {{
    Word stream[{variates.STREAM}];
    unsigned int key[2] = {{3, 5}};
    {start}((Word *)stream, (unsigned int *)key, (Word)11, (Word)1, (Word)(4294967295ll - p), 7);
    for (int k = 0; k < {DRAWS}; ++k) out[p * {DRAWS} + k] = {name}(numbers[p], (Word *)stream);
  }}
}}
"""
    out = stand_in.empty(wanted.shape, np.float64)
    apply(stand_in, scalars, text, numbers.size, stand_in.put(numbers), out)
    assert_bits(stand_in.take(out), wanted)


def entries(law, dtype):
    """Observations that a law may have, and means; some are missing, some means are tiny."""
    rng = np.random.default_rng(3)
    mu = rng.gamma(1.0, 4.0, 200).astype(dtype)
    v = rng.poisson(mu).astype(dtype) + dtype(1 if law.numbers == () and law.beta <= 0 else 0)
    v[5], mu[7] = np.nan, 1e-20
    return v, mu


KERNEL = """
#define REAL {real}
DEVICE auto told(const double *numbers) {{ return pack(1e-6, pack({places})); }}
extern "C" __global__ void apply(Size n, const REAL *v, const REAL *mu, const double *numbers,
                                 REAL *step, REAL *ratio, double *fit) {{
  for (Size p = THREAD; p < n; p += THREADS) {{
    auto law = told(numbers);
    auto a = {step}(v[p], mu[p], law, (REAL)2.5);
    auto b = {ratio}(v[p], mu[p], law);
    auto c = {fit}(v[p], mu[p], law);
    step[2 * p] = at<0>(a), step[2 * p + 1] = at<1>(a);
    ratio[2 * p] = at<0>(b), ratio[2 * p + 1] = at<1>(b);
    fit[2 * p] = at<0>(c), fit[2 * p + 1] = at<1>(c);
  }}
}}
"""


def assert_rules(device, law, zeros, dtype):
    v, mu = entries(law, dtype)
    rules, numbers = entry_rules(law, zeros, False), tuple(map(float, law.numbers))
    scalars = Translation(len(numbers))
    names = {name: scalars.add(rule) for name, rule in rules._asdict().items()}
    places = ", ".join(f"numbers[{n}]" for n in range(len(numbers)))
    text = KERNEL.format(real=TYPES[dtype], places=places, **names)
    out = [device.empty((v.size, 2), kind) for kind in (dtype, dtype, np.float64)]
    given = map(device.put, (v, mu, np.array([*numbers, 0.0])))
    apply(device, scalars, text, v.size, *given, *out)
    told = 1e-6, numbers

    @numba.njit
    def all_of(v, mu, scale, step, ratio, fit):
        for p in range(v.size):
            step[p] = rules_step(v[p], mu[p], told, scale)
            ratio[p] = rules_ratio(v[p], mu[p], told)
            fit[p] = rules_fit(v[p], mu[p], told)

    rules_step, rules_ratio, rules_fit = rules
    wanted = [np.empty((v.size, 2), kind) for kind in (dtype, dtype, np.float64)]
    all_of(v, mu, dtype(2.5), *wanted)
    for found, exact in zip(out, wanted, strict=True):
        assert_bits(device.take(found), exact)


RULES = [(Tweedie(beta), False) for beta in (2.0, 1.0, 0.5, 0.0, -1.0, 0.3, 2.5)]
RULES += [(Tweedie(2.0), True), (Tweedie(1.0), True), (NegativeBinomial(0.7), False)]


@pytest.mark.quick(
    "law1-False-float64",
    "law2-False-float32",
    "law5-False-float32",
    "law7-True-float32",
    "law9-False-float64",
)
@DTYPES
@pytest.mark.parametrize(("law", "zeros"), RULES)
def test_rules_of_entries_are_those_of_numba(stand_in, dtype, law, zeros):
    assert_rules(stand_in, law, zeros, dtype)


# -- what Python means ---------------------------------------------------------------------


def quotient(a, b):
    return a / b


def by_branch(x):
    if x > 1.0:
        y = 2
        z = x
    else:
        z = x * 0.5
        y = 0.25
    return y + z


def swapped(a, b):
    a, b = b, a + b
    return a * 10.0 + b


def summed(n, by):
    total = by * 0.0
    for i in range(2, n):
        if i == 5:
            continue
        if total > 100.0:
            break
        total += i * by
    while True:
        total -= 1.0
        if total < 3.0:
            return total


def between(x):
    return 1.0 if -0.5 < x <= 2.0 and not (x > 0.5 and x < 1.5) else -0.0


def larger(a, b):
    return max(a, b)


def smaller(a, b):
    return min(a, b)


INFINITE, MINUS = np.inf, -np.inf


def ends(x):
    return INFINITE if x > 1.0 else (MINUS if x < -1.0 else np.nan)


ONE_NAN = np.array([1.0, 2.0, np.nan, 1.0, np.nan, 0.0, -0.0])
OTHER_NAN = np.array([2.0, 1.0, 1.0, np.nan, np.nan, -0.0, 0.0])
MEANT = [
    (quotient, np.array([7, 1, -9]), np.array([2, 3, 4])),
    (by_branch, [0.5, 1.0, 3.0]),
    (swapped, [1.0, 2.0], [5.0, -3.0]),
    (summed, np.array([0, 3, 7, 40]), np.full(4, 1.5)),
    (between, [-0.5, 0.0, 1.0, 2.0, 2.5, np.nan]),
    (larger, ONE_NAN, OTHER_NAN),
    (smaller, ONE_NAN, OTHER_NAN),
    (ends, [2.0, 0.0, -2.0]),
]


@pytest.mark.parametrize("case", MEANT, ids=lambda case: case[0].__name__)
def test_branches_loops_and_comparisons_mean_what_they_do_in_python(stand_in, case):
    assert_same(stand_in, case[0], *map(np.asarray, case[1:]), out=np.float64)


# -- refusals ------------------------------------------------------------------------------


REFUSED = {
    "powered": "return x**2",
    "floored": "return x // 2",
    "left over": "return x % 2",
    "divided": "x /= 2\nreturn x",
    "while else": "while x > 1:\n    x -= 1\nelse:\n    x = 0\nreturn x",
    "for else": "for _ in range(3):\n    x -= 1\nelse:\n    x = 0\nreturn x",
    "in steps": "for i in range(0, 9, 3):\n    x += i\nreturn x",
    "rounded": "return round(x)",
    "printed": "print(x)\nreturn x",
    "by name": "return larger(a=x, b=x)",
    "identical": "return 1.0 if x is None else x",
    "of one branch": "if x > 0:\n    y = x\nreturn y",
    "listed": "return [x][0]",
    "inner": "def own(y):\n    return y\nreturn own(x)",
    "tried": "try:\n    return x\nfinally:\n    pass",
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_an_error_when_a_kernel_is_made(body, tmp_path):
    file = tmp_path / "refused.py"
    file.write_text("def refused(x):\n" + indent(body, "    "))
    function = run_path(str(file), {"larger": larger})["refused"]
    refused(Untranslatable, "form in C", Translation().add, function)


def test_functions_are_written_once_and_before_those_that_call_them():
    scalars = Translation()
    name = scalars.add(variates.gamma)
    assert scalars.add(variates.gamma) == name
    lines = [line for line in scalars.text.splitlines() if line.startswith("DEVICE auto")]
    names = [line.split()[2].split("(")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert names[-1] == name


@pytest.mark.parametrize(
    "function",
    [langevin.spiked_step.move.entry, squares.refresh_length.move.entry],
    ids=lambda own: own.py_func.__name__,
)
def test_no_translation_depends_on_what_was_translated_before(function):
    alone, again = Translation(), Translation()
    for translation in (alone, again):
        translation.add(function)
    assert alone.text == again.text
