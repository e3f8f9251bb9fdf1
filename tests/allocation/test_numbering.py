"""Particles that differ in the numbers of their hidden states alone are brought to agree."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.allocation import batches
from daskfactor.allocation.batches import exchangeable, matched_mean
from daskfactor.models.allocation import AllocationModel
from tests.allocation.particles import compiled_of

X = np.random.default_rng(0).poisson(2.0, (6, 6))


def test_exchangeable():
    assert exchangeable(AllocationModel.nmf(2)) == ("r",)
    assert exchangeable(AllocationModel.symmetric_nmf(2, concentration_shared=1.0)) == ("r",)
    assert exchangeable(AllocationModel.tucker((2, 3))) == ("r1", "r2")
    tied = AllocationModel("r -> i, j", {"r": 3}, ("i", "j"), tied={("r", "j"): 1.0})
    assert exchangeable(tied) == ()
    pair = AllocationModel("r -> i, s -> j", {"r": 2, "s": 2}, ("i", "j"), tied={("i", "j"): 1.0})
    assert exchangeable(pair) == ()


def allocated(compiled, states):
    """Flat counts of observed cells whose tokens all have one hidden state each."""
    counts = np.zeros(compiled.cells, np.int32)
    for m, (state, value) in enumerate(zip(states, compiled.values, strict=True)):
        np.add.at(counts, compiled.row[m] + compiled.column[:, state], value)
    return counts


@pytest.mark.parametrize(
    "model",
    [
        AllocationModel.nmf(3),
        AllocationModel.topics(3),
        AllocationModel.symmetric_nmf(3, concentration_shared=0.5),
        AllocationModel.tucker((2, 3)),
    ],
)
def test_any_renumbering_is_undone(model):
    compiled, sizes = compiled_of(X, model), tuple(model.hidden.values())
    states = np.random.default_rng(1).integers(0, compiled.states, compiled.values.size)
    axes, particles = np.unravel_index(states, sizes), []
    for orders in itertools.product(*(itertools.permutations(range(size)) for size in sizes)):
        own = [np.array(order)[axis] for order, axis in zip(orders, axes, strict=True)]
        particles.append(allocated(compiled, np.ravel_multi_index(own, sizes)))
    given = np.array(particles), np.zeros(len(particles))
    assert_allclose(matched_mean(compiled, exchangeable(model), *given), particles[0])
    plain = np.mean(particles, axis=0)
    assert not np.allclose(plain, particles[0])
    assert_allclose(matched_mean(compiled, (), *given), plain)


def test_weights_count_and_one_particle_stands_where_there_is_no_room(monkeypatch):
    compiled, rng = compiled_of(X, AllocationModel.nmf(2)), np.random.default_rng(2)
    states = rng.integers(0, 2, (4, compiled.values.size))
    particles = np.array([allocated(compiled, own) for own in states])
    log_weights = np.log(np.array([0.02, 0.02, 0.02, 0.94]))
    mean = matched_mean(compiled, (), particles, log_weights - 1000.0)
    shares = np.array([0, 0, 0, 4])  # of four picks at equal steps of the cumulative weights
    assert_allclose(mean, shares @ particles / 4)
    monkeypatch.setattr(batches, "GATHERED", 1)
    mean = matched_mean(compiled, ("r",), particles[:2], np.array([0.0, -3.0]))
    assert_array_equal(mean, particles[0])
