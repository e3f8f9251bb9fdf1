"""Particles that move, as a run uses them; what they do is in tests/kernels/test_moving.py."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor.allocation import smc
from daskfactor.allocation.batches import GROWTH, LOOKS, move_schedule, run_batch, stretch_edges
from daskfactor.allocation.smc import SequentialMonteCarlo, estimated_seconds
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.kernels.views import Workspace
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import ignore
from tests.allocation.cases import TOY
from tests.allocation.particles import blocks, compiled_of, in_turn, plan_of, quiet, run_smc
from tests.refusals import refused

FAR = SequentialMonteCarlo(particles=16, islands=4, target=10.0, max_particles=64, moves=2)
TIED = AllocationModel.symmetric_nmf(3, concentration_shared=0.1)


@pytest.mark.parametrize(
    ("model", "order"),
    [(AllocationModel.nmf(3), "own"), (TIED, "shared")],
    ids=["nmf-own", "symmetric-shared"],
)
def test_same_bits_everywhere(model, order):
    compiled = compiled_of(blocks(300), model)
    settings = replace(FAR, islands=5, max_particles=80, order=order, keep="particles")
    executors = [SerialExecutor(), LanesExecutor(2), LanesExecutor(3)]
    first, *others = [quiet(compiled, settings, 7, executor.map, ignore) for executor in executors]
    for executor in executors:
        executor.close()
    assert first.resampled.any(axis=1).all()
    for other in others:
        for name in set(first._fields) - {"plan"}:
            assert_array_equal(getattr(first, name), getattr(other, name))
    assert quiet(compiled, settings, 8, in_turn, ignore).log_evidence != first.log_evidence
    unmoved = quiet(compiled, replace(settings, moves=0), 7, in_turn, ignore)
    assert unmoved.log_evidence != first.log_evidence


def test_what_comes_back():
    compiled = compiled_of(blocks(300), AllocationModel.nmf(3))
    found = quiet(compiled, replace(FAR, keep="particles"), 7, in_turn, ignore)
    assert found.counts is not None
    assert found.counts.shape == (4, 16, compiled.cells)
    assert_array_equal(found.counts.sum(axis=2), 300 * 3)
    assert_array_equal(found.edges, stretch_edges(300, LOOKS)[1:])
    assert found.ess.shape == found.resampled.shape == (4, len(found.edges))
    weights = np.exp(found.log_weights - found.log_weights.max())
    value = found.log_weights.max() + np.log(weights.mean())
    assert value == pytest.approx(found.log_evidence, abs=1e-9)
    own = weights[found.best] / weights[found.best].sum()
    assert found.best == found.batch_log_z.argmax()
    means = own @ found.counts[found.best]
    assert_allclose(found.mean_counts, means, atol=1e-8)


def test_better_than_without():
    """At the same number of particles, batches agree better and higher up."""
    compiled = compiled_of(
        blocks(300), AllocationModel.nmf(4, concentration={"r": 1.0, "i": 0.1, "j": 0.1})
    )
    settings = SequentialMonteCarlo(particles=64, islands=8, target=1e9, max_particles=512)
    without, moved = (
        quiet(compiled, replace(settings, moves=n), 1, in_turn, ignore) for n in (0, 1)
    )
    assert moved.batch_log_z.mean() > without.batch_log_z.mean() + 5
    assert moved.spread < 0.6 * without.spread


def test_never_resampled_never_moved():
    compiled = compiled_of(blocks(300), AllocationModel.nmf(2))
    one, two = (
        quiet(compiled, replace(FAR, resampling=None, moves=n), 1, in_turn, ignore) for n in (0, 3)
    )
    assert_array_equal(one.batch_log_z, two.batch_log_z)
    assert_array_equal(one.edges, two.edges)


@pytest.mark.parametrize("tokens", [1, 2, 9, 300, 10_001])
def test_schedule(tokens):
    """Particles move whenever their tokens have grown by a share, and not after the last one."""
    edges = stretch_edges(tokens, LOOKS)
    ends = edges[1:][move_schedule(edges) == 1]
    assert tokens not in ends
    for end, following in itertools.pairwise(ends):
        assert following >= (1 + GROWTH) * end
        assert following == end + edges[1] or following - edges[1] < (1 + GROWTH) * end
    assert ends.sum() <= tokens * (1 + 1 / GROWTH)
    if tokens > edges[1]:
        assert ends[0] == edges[1]


@pytest.mark.parametrize(
    ("spread", "particles", "grows"),
    [
        (0.9, 64, 1),  # trusted
        (1.1, 64, 2),
        (2.3, 64, 4),
        (6.0, 64, 8),
        (3.0, 1024, 2),  # no room for more
        (6.0, 2048, 1),
        (17.0, 64, 1),  # would need ten times too many
    ],
)
def test_growth(spread, particles, grows):
    """By the spread of the batches, and not at all where that leads nowhere."""
    plan = plan_of(compiled_of(TOY, AllocationModel.nmf(2)), particles, 0, moves=1)
    batch = run_batch(plan, 0, Workspace())
    offsets = np.array([1, -1] * 4) * spread * np.sqrt(7 / 8)
    found = smc._spread([batch._replace(log_z=own) for own in offsets])
    assert found == pytest.approx(spread)
    assert smc._growth(found, 8, plan, SequentialMonteCarlo().max_particles) == grows


def test_rounds_grow():
    model = AllocationModel.nmf(4, concentration={"r": 1.0, "i": 0.1, "j": 0.1})
    start = SequentialMonteCarlo(particles=8, islands=4, target=1e9, max_particles=2**12)
    compiled = compiled_of(blocks(300), model)
    found = quiet(compiled, start, 1, in_turn, ignore)
    assert found.rounds[0] == 8
    assert len(found.rounds) > 2
    assert found.particles == found.rounds[-1]


def test_warnings(monkeypatch):
    compiled = compiled_of(blocks(300), AllocationModel.nmf(5))
    said = r"differ by .*; it may take \d+0 particles to change that; raise max_particles beyond 16"
    with pytest.warns(SamplingWarning, match=said):
        run_smc(
            compiled, replace(FAR, particles=2, islands=8, max_particles=16), 1, in_turn, ignore
        )
    seconds = estimated_seconds(plan_of(compiled, 16, 0, moves=2), 64)
    assert seconds > 20 * estimated_seconds(plan_of(compiled, 16), 64)
    compiled = compiled_of(TOY, AllocationModel.nmf(2))
    seconds = estimated_seconds(plan_of(compiled, 16, 0, moves=2), 64)
    monkeypatch.setattr(smc, "LONG", seconds / 10)
    with pytest.warns(SamplingWarning, match=r"moves=0 takes less and is less exact; thin=0.1 "):
        run_smc(compiled, replace(FAR, target=1e9), 1, in_turn, ignore)


def test_tables_must_fit(monkeypatch):
    compiled = compiled_of(TOY, AllocationModel.nmf(2))
    monkeypatch.setattr(smc, "BATCH_BYTES", 1000)
    with pytest.raises(OptionError, match=r"16 particles that move would hold .* use moves=0"):
        run_smc(compiled, FAR, 1, in_turn, ignore)
    quiet(compiled, replace(FAR, moves=0), 1, in_turn, ignore)


@pytest.mark.parametrize(
    ("moves", "match"),
    [
        (-1, "moves must be a whole number of at least 0, got -1"),
        (0.5, "moves must be a whole number of at least 0"),
        (1001, "moves must be at most 1000, got 1001"),
    ],
)
def test_settings_are_checked(moves, match):
    refused(OptionError, match, SequentialMonteCarlo, moves=moves)


def test_trace():
    method = dfac.SequentialMonteCarlo(particles=32, islands=4, target=1.0, max_particles=128)
    options = {"random_seed": 1, "progressbar": False, "executor": "serial"}
    X = np.kron(np.eye(2, dtype=int), np.full((2, 2), 12))
    trace = dfac.log_evidence(X, AllocationModel.nmf(2), method, **options).trace
    assert trace.attrs["moves"] == 1
    assert bool(trace["resampled"].any())
    assert_array_equal(trace["token"], stretch_edges(96, LOOKS)[1:])
