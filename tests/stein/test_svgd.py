"""Stein variational gradient descent: its direction, its constraints, and where it leads."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.errors import OptionError
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein import descent
from daskfactor.stein.descent import SVGD
from daskfactor.stein.kernel import IMQ, discrepancy
from daskfactor.stein.posterior import stein_discrepancy
from tests.refusals import refused
from tests.stein.posed import KERNEL, posed, stacked, starts
from tests.stein.problems import BY_NAME
from tests.stein.problems import Problem as Case

COUNTS = np.array([[4.0, 7.0], [2.0, 5.0]])
POISSON = Case("two by two", TweedieNMF(1, dispersion=1.0, rate_w=1.0, rate_h=1.0), COUNTS, COUNTS)


def measured(pair, data, model, kernel):
    found = stein_discrepancy(pair, data, model, kernel=kernel, progressbar=False)
    return float(found["discrepancy"])


def kernel_value(theta, other):
    """Equation 7, written out."""
    total = 0.0
    settings = (KERNEL.scale_w, KERNEL.power_w), (KERNEL.scale_h, KERNEL.power_h)
    for x, y, (c, b) in zip(theta, other, settings, strict=True):
        total += (c**2 + ((x - y) ** 2).sum()) ** b / (2 * c ** (2 * b))
    return total


@pytest.mark.parametrize(
    ("name", "tangent"), [("silf, in the transition", True), ("gaussian", False), ("frozen", False)]
)
def test_direction_is_that_of_liu_and_wang(name, tangent):
    """Mean of k s + ∇k over pairs, the gradient of the kernel by finite differences."""
    case = BY_NAME[name]
    with case.open() as data:
        posterior, begun = posed(case, data, tangent=tangent), starts(case, data, 3)
        cloud = descent.Cloud.at(posterior, begun)
        found = SVGD().direction(cloud, KERNEL)
    pairs = list(zip(*begun, strict=True))
    for m in range(3):
        expected = [np.zeros_like(one) for one in pairs[m]]
        for n in range(3):
            k = kernel_value(pairs[n], pairs[m])
            for block in range(2):
                expected[block] += k * cloud.scores[block][n] / 3
                for at in np.ndindex(expected[block].shape):
                    step = [np.zeros_like(one) for one in pairs[n]]
                    step[block][at] = 1e-5
                    up, down = (
                        tuple(x + sign * e for x, e in zip(pairs[n], step, strict=True))
                        for sign in (1, -1)
                    )
                    slope = kernel_value(up, pairs[m]) - kernel_value(down, pairs[m])
                    expected[block][at] += slope / 2e-5 / 3
        if name == "frozen":
            expected[0][:, case.model.frozen[0]] = 0
        for own, other in zip(found, expected, strict=True):
            assert_allclose(own[m], other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "tangent"), [("silf, in the transition", True), ("frozen", False)]
)
def test_discrepancies_are_those_of_the_stein_matrix(name, tangent):
    case = BY_NAME[name]
    with case.open() as data:
        posterior, begun = posed(case, data, tangent=tangent), starts(case, data, 4)
        found = descent.equal_discrepancy(descent.Cloud.at(posterior, begun), KERNEL)
        matrix = posterior.stein_matrix(posterior.particles(*begun)).matrix
    assert found == pytest.approx(discrepancy(matrix), rel=1e-12)


def test_components_that_are_constants_stay():
    case = BY_NAME["frozen"]
    with case.open() as data:
        begun = starts(case, data, 4)
        (W, _), _ = SVGD(20).move(posed(case, data), begun)
    frozen = case.model.frozen[0]
    assert_array_equal(W[:, :, frozen], begun[0][:, :, frozen])
    assert np.all(W[:, :, ~frozen] != begun[0][:, :, ~frozen])


def test_the_nearest_point_of_the_simplex():
    """Every column less one number, cut off at zero, adds up to 1."""
    x = np.random.default_rng(0).standard_normal((3, 6, 4)) * np.array([0.1, 0.5, 2.0, 50.0])
    found = descent.onto_simplex(x)
    assert_allclose(found.sum(axis=1), 1.0, rtol=1e-12)
    assert found.min() == 0.0
    shift = np.where(found > 0, x - found, -np.inf).max(axis=1, keepdims=True)
    assert_allclose(found, np.maximum(x - shift, 0), atol=1e-12)
    assert_allclose(descent.onto_simplex(found), found, atol=1e-12)


def test_one_particle_climbs_to_the_mode():
    """w_i = r_i / (1 + Σh) and h_j = c_j / (1 + Σw), so that Σw = Σh = (√(4n + 1) - 1) / 2."""
    with POISSON.open(1) as data:
        begun = starts(POISSON, data, 1)
        (W, H), _ = SVGD(400, 0.01).move(posed(POISSON, data), begun)
    total = (np.sqrt(4 * COUNTS.sum() + 1) - 1) / 2
    assert_allclose(W[0, :, 0], COUNTS.sum(axis=1) / (1 + total), rtol=0.02)
    assert_allclose(H[0, 0], COUNTS.sum(axis=0) / (1 + total), rtol=0.02)


def test_particles_move_to_the_posterior():
    """From far away, to its mean of μ, and with most of its spread."""
    rng = np.random.default_rng(0)
    begun = 6 * rng.gamma(5, 0.2, (40, 2, 1)), 0.2 * rng.gamma(5, 0.2, (40, 1, 2))
    kernel = IMQ(1.0, 1.0)
    with POISSON.open(1) as data:
        made, _ = SVGD(400, 0.1).move(posed(POISSON, data, kernel=kernel), begun)
        before, after = (measured(own, data, POISSON.model, kernel) for own in (begun, made))
    mean = np.array([[3.3199, 6.1655], [2.2132, 4.1103]])
    variance = np.array([[2.0515, 4.4742], [1.1352, 2.7148]])
    mu = made[0] @ made[1]
    assert np.abs((mu.mean(axis=0) - mean) / np.sqrt(variance)).max() < 0.2
    assert np.abs(((begun[0] @ begun[1]).mean(axis=0) - mean) / np.sqrt(variance)).max() > 0.5
    ratio = mu.var(axis=0) / variance
    assert 0.45 < ratio.min() < ratio.max() < 1.2
    assert after < 0.02 * before


def test_what_is_made():
    case, told = BY_NAME["silf, in the transition"], []
    with case.open(dtype="float32") as data:
        made = stacked(SVGD(10).particles(posed(case, data), range(4), 0, told.append))
    assert told == pytest.approx([4 * done / 10 for done in range(1, 11)])
    assert made.W.dtype == np.float32
    assert made.W.shape == (4, 7, 2)
    assert made.H.shape == (4, 2, 6)
    assert_allclose(made.W.sum(axis=1), 1.0, rtol=1e-6)
    assert min(made.W.min(), made.H.min()) >= 0
    assert made.n_iter.tolist() == [10] * 4
    assert made.seconds.min() > 0


def test_particles_of_a_seed():
    """The same from the same seed, from whichever on; others from another."""
    case = BY_NAME["silf, above"]
    with case.open() as data:
        one, again, other = (
            list(SVGD(3).particles(posed(case, data), numbers, seed))
            for numbers, seed in ((range(4), 0), (range(2, 4), 0), (range(4), 1))
        )
    assert [own.number for own in again] == [2, 3]
    for mine, its in zip(one[2:], again, strict=True):
        assert_array_equal(mine.H, its.H)
    assert not np.array_equal(one[1].H, other[1].H)
    assert not np.allclose(one[0].H, one[1].H)


@pytest.mark.parametrize("name", ["silf, above", "gaussian"])
def test_steps_beyond_all_numbers_are_taken_back(name):
    case = BY_NAME[name]
    with case.open(dtype="float32") as data:
        W, H = starts(case, data, 3)
        stuck, _ = SVGD(3, 1e300).move(posed(case, data), (W, H))
        later, _ = SVGD(160, 1e40).move(posed(case, data), (W, H))
    assert_array_equal(stuck[1], H.astype(np.float32))
    assert_allclose(stuck[0], W, rtol=1e-6)
    assert all(np.isfinite(one).all() for one in later)
    assert not np.array_equal(later[1], stuck[1])


def test_starts_are_put_on_the_simplex():
    """Columns of W divided by their sums, rows of H multiplied with them; WH stays."""
    case = BY_NAME["silf, above"]
    with case.open() as data:
        W, H = starts(case, data, 3)
        found = posed(case, data).in_double(W * 3.0, H)
    assert_allclose(found[0], W, rtol=1e-12)
    assert_allclose(found[1], 3.0 * H, rtol=1e-12)


def test_starts_without_a_density_are_refused():
    case = BY_NAME["silf, above"]
    with case.open() as data:
        W, H = starts(case, data, 3)
        H[1, 0, 0] = np.inf
        with pytest.raises(OptionError, match="start 1 has no finite density"):
            SVGD(1).move(posed(case, data), (W, H))
        W[2, :, 1] = 0
        with pytest.raises(OptionError, match="component 1 of start 2 is zero in all of W"):
            SVGD(1).move(posed(case, data), (W, H))


def test_options():
    assert SVGD(7).to_dict() == {"type": "SVGD", "steps": 7, "step": "auto"}
    assert isinstance(BY_NAME["silf, above"].model, SILFNMF)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"step": 0}, "step must be a positive"),
        ({"step": "fast"}, "step must be \"auto\" or a positive number, got 'fast'"),
    ],
)
def test_bad_options(settings, message):
    refused(OptionError, message, SVGD, **settings)
