"""Particles that move: their directions, their constraints, and where they lead."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein import descent, simplex_hmc
from daskfactor.stein.descent import SVGD, SteinDescent
from daskfactor.stein.kernel import IMQ, discrepancy
from daskfactor.stein.silf import SILFNMF
from daskfactor.stein.simplex_hmc import SimplexHMC
from tests.pairwise import pairwise
from tests.refusals import refused
from tests.stein.posed import KERNEL, moved, placed, stacked
from tests.stein.problems import BY_NAME, Problem

COUNTS = np.array([[4.0, 7.0], [2.0, 5.0]])
ABOVE = BY_NAME["silf, above"]
UNIT = TweedieNMF(1, dispersion=1.0, rate_w=1.0, rate_h=1.0)
POISSON = Problem("two by two", UNIT, COUNTS, COUNTS)


def kernel_value(theta, other):
    """Equation 7, written out."""
    blocks = (KERNEL.scale_w, KERNEL.power_w), (KERNEL.scale_h, KERNEL.power_h)
    parts = zip(theta, other, blocks, strict=True)
    return sum((c**2 + ((x - y) ** 2).sum()) ** b / (2 * c ** (2 * b)) for x, y, (c, b) in parts)


CASES = [("silf, in the transition", True), ("gaussian", False), ("frozen", False)]


@pytest.mark.parametrize(("name", "tangent"), CASES)
def test_direction_is_that_of_liu_and_wang(name, tangent):
    """Mean of k s + ∇k over pairs, the gradient of the kernel by finite differences."""
    case = BY_NAME[name]
    posterior, begun = placed(case, 3, tangent=tangent)
    cloud = descent.Cloud.at(posterior, begun)
    found = SVGD().direction(cloud, KERNEL)
    pairs = list(zip(*begun, strict=True))
    for m, mine in enumerate(pairs):
        expected = [np.zeros_like(one) for one in mine]
        for n, block in itertools.product(range(3), range(2)):
            expected[block] += kernel_value(pairs[n], mine) * cloud.scores[block][n] / 3
            for at in np.ndindex(expected[block].shape):
                ends = []
                for sign in (1e-5, -1e-5):
                    moved = [one.copy() for one in pairs[n]]
                    moved[block][at] += sign
                    ends.append(kernel_value(moved, mine))
                expected[block][at] += (ends[0] - ends[1]) / 2e-5 / 3
        if name == "frozen":
            expected[0][:, case.model.frozen[0]] = 0
        for own, other in zip(found, expected, strict=True):
            assert_allclose(own[m], other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "tangent"), CASES)
def test_discrepancies_are_those_of_the_stein_matrix(name, tangent):
    posterior, begun = placed(BY_NAME[name], 4, tangent=tangent)
    found = descent.equal_discrepancy(descent.Cloud.at(posterior, begun), KERNEL)
    matrix = posterior.stein_matrix(posterior.particles(*begun)).matrix
    assert found == pytest.approx(discrepancy(matrix), rel=1e-12)


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
    (W, H), _ = moved(SVGD(400, 0.01), *placed(POISSON, 1, 1))
    total = (np.sqrt(4 * COUNTS.sum() + 1) - 1) / 2
    assert_allclose(W[0, :, 0], COUNTS.sum(axis=1) / (1 + total), rtol=0.02)
    assert_allclose(H[0, 0], COUNTS.sum(axis=0) / (1 + total), rtol=0.02)


def test_particles_move_to_the_posterior():
    """From far away, to its mean of μ, and with most of its spread."""
    rng, kernel = np.random.default_rng(0), IMQ(1.0, 1.0)
    begun = 6 * rng.gamma(5, 0.2, (40, 2, 1)), 0.2 * rng.gamma(5, 0.2, (40, 1, 2))
    posterior, _ = placed(POISSON, 1, 1, kernel=kernel)
    made, _ = moved(SVGD(400, 0.1), posterior, begun)
    before, after = (square(posterior, *own) for own in (begun, made))
    mean = np.array([[3.3199, 6.1655], [2.2132, 4.1103]])
    variance = np.array([[2.0515, 4.4742], [1.1352, 2.7148]])
    mu, far = made[0] @ made[1], begun[0] @ begun[1]
    assert np.abs((mu.mean(axis=0) - mean) / np.sqrt(variance)).max() < 0.2
    assert np.abs((far.mean(axis=0) - mean) / np.sqrt(variance)).max() > 0.5
    ratio = mu.var(axis=0) / variance
    assert 0.45 < ratio.min() < ratio.max() < 1.2
    assert after < 0.02**2 * before


def test_what_is_made():
    told = []
    posterior, _ = placed(BY_NAME["silf, in the transition"], 1, dtype="float32")
    made = stacked(SVGD(10).particles(posterior, range(4), 0, told.append))
    assert told == pytest.approx([4 * done / 10 for done in range(1, 11)])
    assert made.W.dtype == np.float32
    assert (made.W.shape, made.H.shape) == ((4, 7, 2), (4, 2, 6))
    assert_allclose(made.W.sum(axis=1), 1.0, rtol=1e-6)
    assert min(made.W.min(), made.H.min()) >= 0
    assert made.n_iter.tolist() == [10] * 4
    assert made.seconds.min() > 0


def test_particles_of_a_seed():
    """The same from the same seed, from whichever on; others from another."""
    posterior, asked = placed(ABOVE, 1)[0], ((range(4), 0), (range(2, 4), 0), (range(4), 1))
    one, again, other = (list(SVGD(3).particles(posterior, *own)) for own in asked)
    assert [own.number for own in again] == [2, 3]
    for mine, its in zip(one[2:], again, strict=True):
        assert_array_equal(mine.H, its.H)
    assert not np.array_equal(one[1].H, other[1].H)
    assert not np.allclose(one[0].H, one[1].H)


@pytest.mark.parametrize("name", ["silf, above", "gaussian"])
def test_steps_beyond_all_numbers_are_taken_back(name):
    posterior, (W, H) = placed(BY_NAME[name], 3, dtype="float32")
    stuck, _ = moved(SVGD(3, 1e300), posterior, (W, H))
    later, _ = moved(SVGD(160, 1e40), posterior, (W, H))
    assert_array_equal(stuck[1], H.astype(np.float32))
    assert_allclose(stuck[0], W, rtol=1e-6)
    assert all(np.isfinite(one).all() for one in later)
    assert not np.array_equal(later[1], stuck[1])


def test_starts_are_put_on_the_simplex_or_refused():
    """Columns of W divided by their sums, rows of H multiplied with them; WH stays."""
    posterior, (W, H) = placed(ABOVE, 3)
    found = posterior.in_double(W * 3.0, H)
    assert_allclose(found[0], W, rtol=1e-12)
    assert_allclose(found[1], 3.0 * H, rtol=1e-12)
    H[1, 0, 0] = np.inf
    refused(OptionError, "start 1 has no finite density", moved, SVGD(1), posterior, (W, H))
    W[2, :, 1] = 0
    match = "component 1 of start 2 is zero in all of W"
    refused(OptionError, match, moved, SVGD(1), posterior, (W, H))


def square(posterior, W, H):
    """S², by way of the Stein matrix."""
    return descent.equal_discrepancy(descent.Cloud.at(posterior, (W, H)), posterior.kernel) ** 2


STRAIGHT = ("gaussian, missing, permuted", "gamma priors", "frozen", "compound")
CASES = [("silf, in the transition", False), *((name, False) for name in STRAIGHT)]
CASES += [("silf, in the transition", True), ("silf, counts", True)]


@pytest.mark.parametrize(("name", "tangent"), CASES)
def test_gradient_is_that_of_the_discrepancy(name, tangent):
    """Along random directions of all particles, and of a single entry."""
    case, rng, h = BY_NAME[name], np.random.default_rng(0), 1e-5
    posterior, (W, H) = placed(case, 3, tangent=tangent)
    by_w, by_h = descent.gradient(descent.Cloud.at(posterior, (W, H)), posterior.kernel)
    for trial in range(4):
        a, b = rng.standard_normal(W.shape) * W, rng.standard_normal(H.shape) * H
        if trial == 2:
            b[:] = 0
        if trial == 3:
            a[:], b[:2], b[2, 0, 1:] = 0, 0, 0
        if name == "frozen":
            a[:, :, case.model.frozen[0]] = 0
        ends = [square(posterior, W + s * h * a, H + s * h * b) for s in (1, -1)]
        numeric = (ends[0] - ends[1]) / (2 * h)
        assert (by_w * a).sum() + (by_h * b).sum() == pytest.approx(numeric, rel=1e-4)


def test_second_derivatives_of_squares_are_exact_at_any_distance():
    case, rng = BY_NAME["gaussian"], np.random.default_rng(1)
    V, seen = np.nan_to_num(case.dense), ~np.isnan(case.dense)
    posterior, (W, H) = placed(case, 2)
    a, b = rng.standard_normal(W.shape), rng.standard_normal(H.shape)
    by_w, by_h = descent.second_derivative(posterior, (W, H), (a, b))
    for m in range(2):
        residual, change = seen * (V - W[m] @ H[m]), seen * (a[m] @ H[m] + W[m] @ b[m])
        assert_allclose(by_w[m], change @ H[m].T - residual @ b[m].T, rtol=1e-10)
        assert_allclose(by_h[m], W[m].T @ change - a[m].T @ residual, rtol=1e-10)


@pairwise(
    name=["silf, in the transition", "frozen"], dtype=["float64", "float32"], step=["auto", 0.3]
)
def test_it_never_ends_worse_than_it_starts(name, step, dtype):
    """A run of fewer steps is the beginning of one of more, but for fixed steps, which fall."""
    case, told = BY_NAME[name], []
    posterior, begun = placed(case, 4, dtype=dtype)
    (W, H), taken = moved(SteinDescent(25, step), posterior, begun, told.append)
    levels = [square(posterior, *begun), square(posterior, W, H)]
    if step == "auto":
        ends = (moved(SteinDescent(n), posterior, begun)[0] for n in range(1, 25, 4))
        levels[1:1] = [square(posterior, *end) for end in ends]
    assert (told, taken) == ([done / 25 for done in range(1, 26)], 25)
    rounding = 0.0 if dtype == "float64" else 1e-2
    assert np.all(np.diff(levels) <= rounding * levels[0])
    if step == "auto":
        assert levels[-1] < 0.81 * levels[0]
    assert W.dtype == H.dtype == dtype
    assert min(W.min(), H.min()) >= 0
    if isinstance(case.model, SILFNMF):
        assert_allclose(W.sum(axis=1), 1.0, rtol=1e-6)
    else:
        frozen = case.model.frozen[0]
        assert_array_equal(W[:, :, frozen], begun[0][:, :, frozen].astype(dtype))


def test_the_best_is_kept_where_fixed_steps_lead_up(monkeypatch):
    levels, measure = [], descent.equal_discrepancy

    def heard(*given):
        levels.append(measure(*given))
        return levels[-1]

    monkeypatch.setattr(descent, "equal_discrepancy", heard)
    posterior, begun = placed(BY_NAME["frozen"], 4)
    (W, _), _ = moved(SteinDescent(8, 1.0), posterior, begun)
    assert len(levels) == 9
    assert levels[-1] > levels[0] == min(levels)
    assert_array_equal(W, begun[0])


def test_it_stops_where_nothing_leads_down():
    """One particle where the likelihood is flat: its discrepancy is the same everywhere."""
    case, told = Problem("flat", SILFNMF(2, threshold=1e9), *2 * (BY_NAME["gamma"].V,)), []
    posterior, begun = placed(case, 1)
    (_, H), taken = moved(SteinDescent(500), posterior, begun, told.append)
    assert 20 < taken < 60
    assert told[-1] == 1.0
    assert_allclose(H, begun[1])


SMALL = Problem("small", SILFNMF(1, threshold=1.0), *2 * (np.array([[1.0, 0.3], [2.0, 0.1]]),))


def begun(case, blocks=2):
    """A posterior, a place, and momenta that would take some entries past zero."""
    rng, (own, (W, H)) = np.random.default_rng(3), placed(case, 1, blocks)
    spot = simplex_hmc.evaluate(own, simplex_hmc.coordinates(own, W[0], H[0]))
    first, second = (rng.standard_normal(one.shape) for one in spot.position)
    return own, spot, (first, second)


@pytest.mark.parametrize("name", ["silf, in the transition", "silf, counts", "gamma priors"])
def test_gradients_in_the_coordinates(name):
    own, spot, direction = begun(BY_NAME[name])
    pairs = list(zip(spot.position, direction, strict=True))
    places = (tuple(x + h * d for x, d in pairs) for h in (1e-6, -1e-6))
    ends = [simplex_hmc.evaluate(own, place).log_density for place in places]
    slope = sum((g * d).sum() for g, d in zip(spot.gradient, direction, strict=True))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_coordinates_are_those_of_the_factors():
    own, (W, H) = placed(ABOVE, 1)
    W, H = W[0], H[0]

    def there_and_back(W):
        return simplex_hmc.factors_at(own, simplex_hmc.coordinates(own, W, H))

    back = there_and_back(W)
    assert_allclose(back[0], W, rtol=1e-12)
    assert_array_equal(back[1], H)
    W[0] = 0.0
    lifted = there_and_back(W / W.sum(axis=0))[0]
    assert 0 < lifted[0].min() < 1e-3
    assert_allclose(lifted.sum(axis=0), 1.0)


@pytest.mark.parametrize("name", ["silf, above", "gaussian"])
def test_the_way_back_leads_to_the_start(name):
    own, spot, momentum = begun(BY_NAME[name])
    spread = simplex_hmc.widths(own, spot.position)
    end, there, looks = simplex_hmc.leapfrog(own, spot, momentum, spread, 0.3, 40)
    assert looks == 40
    turned = [np.sign(a) != np.sign(b) for a, b in zip(momentum, there, strict=True)]
    assert any(one.any() for one in turned)
    assert not np.allclose(end.position[1], spot.position[1], rtol=0.1)
    back, _, _ = simplex_hmc.leapfrog(own, end, (-there[0], -there[1]), spread, 0.3, 40)
    for one, other in zip(back.position, spot.position, strict=True):
        assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_volumes_stay_as_they_are():
    """The determinant of the map of positions and momenta is ±1, with reflections too."""
    own, spot, momentum = begun(SMALL, 1)
    spread, reflections = simplex_hmc.widths(own, spot.position), 0

    def end(x):
        place = x[:2].reshape(2, 1), x[2:4].reshape(1, 2)
        u = x[4:6].reshape(2, 1), x[6:].reshape(1, 2)
        begun_at = simplex_hmc.evaluate(own, place)
        found, there, _ = simplex_hmc.leapfrog(own, begun_at, u, spread, 0.4, 6)
        return np.concatenate([one.ravel() for one in (*found.position, *there)])

    for scale in (0.3, 3.0):
        x = np.concatenate(
            [one.ravel() for one in (*spot.position, *(scale * u for u in momentum))]
        )
        columns = [(end(x + h) - end(x - h)) / 2e-6 for h in 1e-6 * np.eye(8)]
        assert abs(np.linalg.det(np.array(columns))) == pytest.approx(1.0, rel=1e-5)
        reflections += int((np.sign(end(x)[4:]) != np.sign(x[4:])).any())
    assert reflections


def test_energy_is_kept_to_second_order():
    own, spot, momentum = begun(ABOVE)
    spread, errors = simplex_hmc.widths(own, spot.position), []
    for steps in (16, 32, 64):
        end, there, _ = simplex_hmc.leapfrog(own, spot, momentum, spread, 0.5 / steps, steps)
        errors.append(simplex_hmc.energy(end, there) - simplex_hmc.energy(spot, momentum))
    assert abs(errors[0]) > 1e-6
    assert np.divide(errors[:2], errors[1:]) == pytest.approx(4, rel=0.05)


def test_the_slope_where_the_mass_is():
    def slope_of(name, level):
        own, _ = placed(BY_NAME[name], 1)
        return simplex_hmc.typical_slope(own, level, 26), own

    for name, expected in (("gaussian", 1 / 0.7), ("silf, above", 4.0)):
        assert slope_of(name, 3.0)[0] == pytest.approx(expected)
    slope, posterior = slope_of("silf, in the transition", 10.0)
    d = 13 / slope + 10.0  # where it is that steep, if it is right
    assert -posterior.model.of_divergence(np.array([d]))[1][0] == pytest.approx(slope, rel=1e-6)


def test_what_is_made_by_a_chain():
    """Every third of 12 draws, in the type of the data; the same again from the same seed."""
    told, options = [], SimplexHMC(draws=12, tune=5, steps=3)
    given = placed(BY_NAME["silf, in the transition"], 1, dtype="float32")
    made = stacked(options.chain(*given, 4, 7, told.append))
    every, other = (stacked(options.chain(*given, *own)) for own in ((12, 7), (4, 8)))
    assert told == [4 * done / 17 for done in range(1, 18)]
    assert made.W.dtype == made.H.dtype == np.float32
    assert_array_equal(made.W, every.W[2::3])
    assert_array_equal(made.H, every.H[2::3])
    assert not np.array_equal(made.H, other.H)
    assert_allclose(made.W.sum(axis=1), 1.0, rtol=1e-6)
    assert min(made.W.min(), made.H.min()) >= 0
    assert made.n_iter.tolist() == [24, 9, 9, 9]
    assert made.seconds.min() > 0


def test_components_that_are_constants_stay():
    case = BY_NAME["frozen"]
    posterior, start = placed(case, 1)
    made = stacked(SimplexHMC(5, 5, 3).chain(posterior, start, 5, 0))
    frozen = case.model.frozen[0]
    assert_array_equal(made.W[:, :, frozen], np.repeat(start[0], 5, 0)[:, :, frozen])
    assert made.W[:, :, ~frozen].std(axis=0).min() > 0


def test_tuning_finds_the_acceptance_that_is_wanted():
    walk = SimplexHMC(150, 150, 5).walk(*placed(BY_NAME["gaussian, missing, permuted"], 1), 0)
    rates = [one.probability for one in walk]
    assert 0.65 < np.mean(rates[150:]) < 0.95


def test_proposals_beyond_all_numbers_are_not_taken():
    (posterior, start), method = placed(ABOVE, 1), SimplexHMC(3, 0, 4, step=1e300)
    with pytest.warns(SamplingWarning, match=r"only 0\.0% of the proposals were taken"):
        made = stacked(method.chain(posterior, start, 3, 0))
    assert_allclose(made.W, np.repeat(start[0], 3, axis=0))


def test_more_particles_than_draws_and_bad_starts():
    match = "5 particles are more than draws=4 of the chain"
    refused(OptionError, match, SimplexHMC(4).check_count, 5)
    posterior, (W, H) = placed(ABOVE, 1)
    chain = SimplexHMC(4).chain(posterior, (W, H * np.nan), 4, 0)
    refused(OptionError, "no finite log density", next, chain)
