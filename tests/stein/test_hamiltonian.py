"""Hamiltonian dynamics on simplex and orthant: gradients, reversibility, order, and chains."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.models.silf import SILFNMF
from daskfactor.stein import simplex_hmc
from daskfactor.stein.simplex_hmc import SimplexHMC
from tests.refusals import refused
from tests.stein.posed import posed, stacked, starts
from tests.stein.problems import BY_NAME
from tests.stein.problems import Problem as Case

SMALL = Case("small", SILFNMF(1, threshold=1.0), *2 * (np.array([[1.0, 0.3], [2.0, 0.1]]),))


ABOVE = BY_NAME["silf, above"]


def begun(case, data):
    """A posterior, a place, and momenta that would take some entries past zero."""
    rng, own = np.random.default_rng(3), posed(case, data)
    W, H = starts(case, data, 1)
    spot = simplex_hmc.look(own, simplex_hmc.coordinates(own, W[0], H[0]))
    first, second = (rng.standard_normal(one.shape) for one in spot.place)
    return own, spot, (first, second)


@pytest.mark.parametrize("name", ["silf, in the transition", "silf, counts", "gamma priors"])
def test_gradients_in_the_coordinates(name):
    with BY_NAME[name].open() as data:
        own, spot, direction = begun(BY_NAME[name], data)
        places = (
            [x + h * d for x, d in zip(spot.place, direction, strict=True)] for h in (1e-6, -1e-6)
        )
        ends = [simplex_hmc.look(own, tuple(place)).log_density for place in places]
        slope = sum((g * d).sum() for g, d in zip(spot.gradient, direction, strict=True))
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_coordinates_are_those_of_the_factors():
    with ABOVE.open() as data:
        (W, H), own = (one[0] for one in starts(ABOVE, data, 1)), posed(ABOVE, data)

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
    with BY_NAME[name].open() as data:
        own, spot, momentum = begun(BY_NAME[name], data)
        spread = simplex_hmc.widths(own, spot.place)
        end, there, looks = simplex_hmc.leapfrog(own, spot, momentum, spread, 0.3, 40)
        assert looks == 40
        turned = [np.sign(a) != np.sign(b) for a, b in zip(momentum, there, strict=True)]
        assert any(one.any() for one in turned)
        assert not np.allclose(end.place[1], spot.place[1], rtol=0.1)
        back, _, _ = simplex_hmc.leapfrog(own, end, (-there[0], -there[1]), spread, 0.3, 40)
    for one, other in zip(back.place, spot.place, strict=True):
        assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_volumes_stay_as_they_are():
    """The determinant of the map of positions and momenta is ±1, with reflections too."""
    with SMALL.open(1) as data:
        own, spot, momentum = begun(SMALL, data)
        spread, reflections = simplex_hmc.widths(own, spot.place), 0

        def end(x):
            place = x[:2].reshape(2, 1), x[2:4].reshape(1, 2)
            u = x[4:6].reshape(2, 1), x[6:].reshape(1, 2)
            begun_at = simplex_hmc.look(own, place)
            found, there, _ = simplex_hmc.leapfrog(own, begun_at, u, spread, 0.4, 6)
            return np.concatenate([one.ravel() for one in (*found.place, *there)])

        for scale in (0.3, 3.0):
            x = np.concatenate(
                [one.ravel() for one in (*spot.place, *(scale * u for u in momentum))]
            )
            columns = [(end(x + h) - end(x - h)) / 2e-6 for h in 1e-6 * np.eye(8)]
            assert abs(np.linalg.det(np.array(columns))) == pytest.approx(1.0, rel=1e-5)
            reflections += int((np.sign(end(x)[4:]) != np.sign(x[4:])).any())
        assert reflections


def test_energy_is_kept_to_second_order():
    with ABOVE.open() as data:
        own, spot, momentum = begun(ABOVE, data)
        spread, errors = simplex_hmc.widths(own, spot.place), []
        for steps in (16, 32, 64):
            end, there, _ = simplex_hmc.leapfrog(own, spot, momentum, spread, 0.5 / steps, steps)
            errors.append(simplex_hmc.energy(end, there) - simplex_hmc.energy(spot, momentum))
    assert abs(errors[0]) > 1e-6
    assert np.divide(errors[:2], errors[1:]) == pytest.approx(4, rel=0.05)


def test_the_slope_where_the_mass_is():
    def slope_of(name, level):
        with BY_NAME[name].open() as data:
            own = posed(BY_NAME[name], data)
            return simplex_hmc.typical_slope(own, level, 26), own

    for name, expected in (("gaussian", 1 / 0.7), ("silf, above", 4.0)):
        assert slope_of(name, 3.0)[0] == pytest.approx(expected)
    slope, posterior = slope_of("silf, in the transition", 10.0)
    d = 13 / slope + 10.0  # where it is that steep, if it is right
    assert -posterior.model.of_divergence(np.array([d])).slope[0] == pytest.approx(slope, rel=1e-6)


def test_what_is_made():
    """Every third of 12 draws, in the type of the data; the same again from the same seed."""
    case, told = BY_NAME["silf, in the transition"], []
    options = SimplexHMC(draws=12, tune=5, steps=3)
    with case.open(dtype="float32") as data:
        given = posed(case, data), starts(case, data, 1)
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
    with case.open() as data:
        start = starts(case, data, 1)
        made = stacked(SimplexHMC(5, 5, 3).chain(posed(case, data), start, 5, 0))
    frozen = case.model.frozen[0]
    assert_array_equal(made.W[:, :, frozen], np.repeat(start[0], 5, 0)[:, :, frozen])
    assert made.W[:, :, ~frozen].std(axis=0).min() > 0


def test_tuning_finds_the_acceptance_that_is_wanted():
    case = BY_NAME["gaussian, missing, permuted"]
    with case.open() as data:
        start = starts(case, data, 1)
        walk = SimplexHMC(150, 150, 5).walk(posed(case, data), start, 0)
        rates = [probability for _, probability, _ in walk]
    assert 0.65 < np.mean(rates[150:]) < 0.95


def test_proposals_beyond_all_numbers_are_not_taken():
    with ABOVE.open() as data:
        start, method = starts(ABOVE, data, 1), SimplexHMC(3, 0, 4, step=1e300)
        with pytest.warns(SamplingWarning, match=r"only 0\.0% of the proposals were taken"):
            made = stacked(method.chain(posed(ABOVE, data), start, 3, 0))
    assert_allclose(made.W, np.repeat(start[0], 3, axis=0))


def test_more_particles_than_draws_and_bad_starts():
    match = "5 particles are more than draws=4 of the chain"
    refused(OptionError, match, SimplexHMC(4).check_count, 5)
    with ABOVE.open() as data:
        W, H = starts(ABOVE, data, 1)
        chain = SimplexHMC(4).chain(posed(ABOVE, data), (W, H * np.nan), 4, 0)
        refused(OptionError, "no finite log density", next, chain)
