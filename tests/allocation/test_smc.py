"""Runs of particles, with moves and without; what these do is in `tests/kernels`."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.allocation import batches, smc
from daskfactor.allocation.batches import (
    GROWTH,
    LOOKS,
    exchangeable,
    matched_mean,
    move_schedule,
    run_batch,
    stretch_edges,
)
from daskfactor.allocation.model import AllocationModel
from daskfactor.allocation.smc import SequentialMonteCarlo, estimated_seconds, pooled
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.kernels.views import Workspace
from tests.allocation.cases import TOY, enumerate_evidence, log_f
from tests.allocation.particles import blocks, compiled_of, in_turn, plan_of, quiet, run_smc
from tests.refusals import refused

MATRIX, THREE = AllocationModel.nmf(2), AllocationModel.nmf(3)
TIED = AllocationModel.symmetric_nmf(3, concentration_shared=0.1)
CROWDED = AllocationModel.nmf(4, concentration={"r": 1.0, "i": 0.1, "j": 0.1})
FAR = SequentialMonteCarlo(particles=16, islands=4, target=10.0, max_particles=64, moves=0)
MOVED = replace(FAR, moves=2)


def mean_counts(found):
    """Mean counts of the best batch."""
    return run_batch(replace(found.plan, average=True), found.best, Workspace()).mean_counts


@pytest.fixture(scope="module")
def toy():
    return compiled_of(TOY, MATRIX)


@pytest.mark.full
def test_one_component_or_one_token_has_no_error():
    compiled = compiled_of(blocks(400), AllocationModel.nmf(1))
    found = run_smc(compiled, FAR, 0, in_turn)
    assert found.standard_error < 1e-12
    counts = np.zeros(compiled.cells)
    for n in range(len(compiled.alpha)):
        np.add.at(counts, compiled.row[:, n] + compiled.column[n, 0], compiled.values)
    assert_allclose(mean_counts(found), counts)
    exact = compiled.log_factor + compiled.constant + log_f(compiled, counts)
    assert found.log_evidence == pytest.approx(exact, abs=1e-8)
    compiled = compiled_of(np.array([[0, 1], [0, 0]]), MATRIX)
    found = run_smc(compiled, FAR, 0, in_turn)
    assert found.log_evidence == pytest.approx(enumerate_evidence(compiled), abs=1e-10)


@pytest.mark.quick("nmf-own", "still")
@pytest.mark.parametrize(
    ("model", "method", "order"),
    [(THREE, FAR, "shared"), (THREE, MOVED, "own"), (TIED, MOVED, "shared")],
    ids=["still", "nmf-own", "symmetric-shared"],
)
def test_same_bits_everywhere(model, method, order):
    compiled = compiled_of(blocks(300), model)
    settings = replace(method, islands=5, max_particles=80, order=order, keep="particles")
    executors = [SerialExecutor(), LanesExecutor(1), LanesExecutor(2), LanesExecutor(3)]
    first, *others = [quiet(compiled, settings, 7, executor.map) for executor in executors]
    for executor in executors:
        executor.close()
    assert first.resampled.any(axis=1).all()
    for other, name in itertools.product(others, set(first._fields) - {"plan"}):
        assert_array_equal(getattr(first, name), getattr(other, name))
    assert quiet(compiled, settings, 8, in_turn).log_evidence != first.log_evidence
    if method.moves:
        still = quiet(compiled, replace(settings, moves=0), 7, in_turn)
        assert still.log_evidence != first.log_evidence


@pytest.mark.parametrize("method", [FAR, MOVED], ids=["still", "moved"])
def test_what_comes_back(method):
    compiled = compiled_of(blocks(300), THREE)
    found = quiet(compiled, replace(method, keep="particles"), 7, in_turn)
    assert found.counts.shape == (4, 16, compiled.cells)
    assert_array_equal(found.counts.sum(axis=2), 300 * 3)  # three draws a token: r, i and j
    assert found.ess.shape == found.resampled.shape == (4, len(found.plan.edges[1:]))
    assert ((found.ess >= 1 - 1e-9) & (found.ess <= 16 + 1e-9)).all()
    looks = () if method is FAR else (LOOKS,)
    assert_array_equal(found.plan.edges[1:], stretch_edges(300, *looks)[1:])
    assert not found.resampled[:, -1].any()
    weights = np.exp(found.log_weights - found.log_weights.max())
    value = found.log_weights.max() + np.log(weights.mean())
    assert value == pytest.approx(found.log_evidence, abs=1e-9)
    shares = weights[found.best] / weights[found.best].sum()
    assert found.best == found.batch_log_z.argmax()
    assert_allclose(mean_counts(found), shares @ found.counts[found.best], atol=1e-8)


@pytest.mark.parametrize("tokens", [1, 2, 3, 9, 256, 300, 513, 10_001])
def test_edges_and_the_schedule_of_moves(tokens):
    """Particles move whenever their tokens have grown by a share, and not after the last one."""
    edges = stretch_edges(tokens)
    assert (edges[0], edges[-1]) == (0, tokens)
    assert (np.diff(edges) > 0).all()
    assert len(edges) <= 258
    edges = stretch_edges(tokens, LOOKS)
    ends = edges[1:][move_schedule(edges) == 1]
    assert tokens not in ends
    for end, following in itertools.pairwise(ends):
        assert following >= (1 + GROWTH) * end
        assert following == end + edges[1] or following - edges[1] < (1 + GROWTH) * end
    assert ends.sum() <= tokens * (1 + 1 / GROWTH)
    if tokens > edges[1]:
        assert ends[0] == edges[1]


def test_particles_double_while_batches_disagree():
    compiled = compiled_of(blocks(60, size=6), AllocationModel.nmf(2, concentration=8.0))
    start = replace(FAR, particles=1, target=1e9, max_particles=2**13)
    found = quiet(compiled, start, 1, in_turn)
    assert found.rounds == tuple(2**n for n in range(len(found.rounds)))
    assert len(found.rounds) > 1
    assert found.plan.particles == found.rounds[-1]
    assert found.spread <= smc.TRUSTED
    assert len(found.batch_log_z) == 4


def test_particles_that_move_grow_by_the_spread_of_batches(toy):
    """And not at all where that leads nowhere."""
    for spread, particles, grows in (
        (0.9, 64, 1),  # trusted
        (1.1, 64, 2),
        (2.3, 64, 4),
        (6.0, 64, 8),
        (3.0, 1024, 2),  # no room for more
        (6.0, 2048, 1),
        (17.0, 64, 1),  # would need ten times too many
    ):
        plan = plan_of(toy, particles, moves=1)
        batch = run_batch(plan, 0, Workspace())
        offsets = np.array([1, -1] * 4) * spread * np.sqrt(7 / 8)
        found = smc._spread([batch._replace(log_z=own) for own in offsets])
        assert found == pytest.approx(spread)
        assert smc._growth(found, 8, plan, SequentialMonteCarlo().max_particles) == grows


def test_moves_are_better_than_none_and_rounds_grow():
    """At the same number of particles, batches agree better and higher up."""
    compiled = compiled_of(blocks(300), CROWDED)
    settings = replace(FAR, particles=64, islands=8, target=1e9, max_particles=512)
    still, moved = (quiet(compiled, replace(settings, moves=n), 1, in_turn) for n in (0, 1))
    assert moved.batch_log_z.mean() > still.batch_log_z.mean() + 5
    assert moved.spread < 0.6 * still.spread
    start = SequentialMonteCarlo(particles=8, islands=4, target=1e9, max_particles=2**12)
    found = quiet(compiled, start, 1, in_turn)
    assert found.rounds[0] == 8
    assert len(found.rounds) > 2
    assert found.plan.particles == found.rounds[-1]


def test_never_resampled_never_moved():
    compiled = compiled_of(blocks(300), MATRIX)
    methods = (replace(FAR, resampling=None, moves=n) for n in (0, 3))
    one, two = (quiet(compiled, method, 1, in_turn) for method in methods)
    assert_array_equal(one.batch_log_z, two.batch_log_z)
    assert_array_equal(one.plan.edges, two.plan.edges)


def test_batches_are_added_to_earlier_ones(toy):
    few = replace(FAR, particles=8, target=1e9, max_particles=32)
    many = replace(few, target=0.02, max_particles=2**14)
    one, two = (run_smc(toy, settings, 1, in_turn) for settings in (few, many))
    assert one.rounds == two.rounds == (8,)
    assert len(two.batch_log_z) > 16
    assert two.standard_error <= 0.02
    assert_array_equal(two.batch_log_z[:4], one.batch_log_z)
    half = replace(many, islands=len(two.batch_log_z), target=1e9)
    assert_array_equal(mean_counts(run_smc(toy, half, 1, in_turn)), mean_counts(two))


def test_warnings_of_batches_that_disagree(toy):
    compiled = compiled_of(blocks(2000), AllocationModel.nmf(5))
    few = {"particles": 2, "islands": 8, "max_particles": 16}
    with pytest.warns(SamplingWarning, match="differ by .* max_particles beyond 16"):
        run_smc(compiled, replace(FAR, **few), 1, in_turn)
    compiled = compiled_of(blocks(300), AllocationModel.nmf(5))
    said = r"differ by .*; it may take \d+0 particles to change that; raise max_particles beyond 16"
    with pytest.warns(SamplingWarning, match=said):
        run_smc(compiled, replace(MOVED, **few), 1, in_turn)
    still, moved = plan_of(compiled, 16), plan_of(compiled, 16, moves=2)
    assert estimated_seconds(moved, 64) > 20 * estimated_seconds(still, 64)
    with pytest.warns(SamplingWarning, match="standard error is .*, not 1e-06; raise"):
        run_smc(toy, replace(FAR, target=1e-6), 1, in_turn)


def test_long_runs_are_foretold(toy, monkeypatch):
    for method, plan, said in (
        (FAR, {}, r"9 tokens times 64 particles .* thin=0.095 would keep"),
        (MOVED, {"moves": 2}, r"moves=0 takes less and is less exact; thin=0.095 "),
    ):
        monkeypatch.setattr(smc, "LONG", estimated_seconds(plan_of(toy, 16, **plan), 64) / 10)
        with pytest.warns(SamplingWarning, match=said):
            run_smc(toy, replace(method, target=1e9), 1, in_turn)


def test_what_memory_cannot_hold_is_refused(toy, monkeypatch):
    monkeypatch.setattr(smc, "MAX_UNFOLDED_BYTES", 1000)
    keep = replace(FAR, keep="particles")
    refused(OptionError, 'use keep="means", or fewer', run_smc, toy, keep, 1, in_turn)
    monkeypatch.setattr(smc, "BATCH_BYTES", 1000)
    match = r"16 particles that move would hold .* use moves=0"
    refused(OptionError, match, run_smc, toy, MOVED, 1, in_turn)
    quiet(toy, FAR, 1, in_turn)


def test_pooled():
    logs = np.random.default_rng(0).normal(scale=0.1, size=400) - 1e4
    value, error = pooled(logs)
    assert value == pytest.approx(-1e4 + 0.005, abs=4 * error)
    assert error == pytest.approx(0.1 / 20, rel=0.15)
    assert pooled(np.array([-10.0, -5.0, 0.0]))[1] > 0.9  # one batch has it all
    assert pooled(np.array([-3.0, -3.0])) == (-3.0, 0.0)


def test_settings_are_checked():
    for changes, match in (
        ({"particles": 0}, "particles must be a whole number of at least 1, got 0"),
        ({"islands": 1}, "islands must be a whole number of at least 2"),
        ({"target": 0.0}, "target must be a positive finite number"),
        ({"max_particles": 63}, "at least particles times islands, 64, got 63"),
        ({"resampling": "best"}, 'resampling must be "systematic"'),
        ({"threshold": 1.5}, "threshold must be between 0 and 1, got 1.5"),
        ({"threshold": "0.5"}, "threshold must be between 0 and 1, got '0.5'"),
        ({"thin": "0.1"}, r"thin must be None or in \(0, 1\], got '0.1'"),
        ({"thin": True}, r"thin must be None or in \(0, 1\], got True"),
        ({"thin": 0.0}, "thin must be None or in"),
        ({"order": "none"}, 'order must be "shared" or "own", got '),
        ({"keep": "all"}, 'keep must be "means" or "particles"'),
        ({"moves": -1}, "moves must be a whole number of at least 0, got -1"),
        ({"moves": 0.5}, "moves must be a whole number of at least 0"),
        ({"moves": 1001}, "moves must be at most 1000, got 1001"),
    ):
        refused(OptionError, match, replace, FAR, **changes)


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


MODELS = [THREE, TIED, AllocationModel.topics(3), AllocationModel.tucker((2, 3))]


@pytest.mark.parametrize("model", MODELS)
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
