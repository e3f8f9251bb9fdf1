from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from daskfactor.allocation import smc
from daskfactor.allocation.batches import stretch_edges
from daskfactor.allocation.smc import SequentialMonteCarlo, estimated_seconds, pooled
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import LanesExecutor, SerialExecutor
from daskfactor.models.allocation import AllocationModel
from daskfactor.progress import ignore
from tests.allocation.cases import TOY, enumerate_evidence, log_f
from tests.allocation.particles import blocks, compiled_of, in_turn, plan_of, quiet, run_smc
from tests.refusals import refused

MATRIX = AllocationModel.nmf(2)
FAR = SequentialMonteCarlo(particles=16, islands=4, target=10.0, max_particles=64, moves=0)


def test_default_finds_the_toy():
    method = SequentialMonteCarlo()
    for R in (1, 2, 3):
        compiled = compiled_of(TOY, AllocationModel.nmf(R))
        found = run_smc(compiled, method, 3, in_turn, ignore)
        assert found.standard_error <= method.target == 0.1
        assert found.spread <= smc.TRUSTED
        error = abs(found.log_evidence - enumerate_evidence(compiled))
        assert error <= 4 * found.standard_error + 1e-9


def test_one_component_has_no_error():
    compiled = compiled_of(blocks(400), AllocationModel.nmf(1))
    found = run_smc(compiled, FAR, 0, in_turn, ignore)
    assert found.standard_error < 1e-12
    counts = np.zeros(compiled.cells)
    for n in range(len(compiled.alpha)):
        np.add.at(counts, compiled.row[:, n] + compiled.column[n, 0], compiled.values)
    assert_allclose(found.mean_counts, counts)
    exact = compiled.log_factor + compiled.constant + log_f(compiled, counts)
    assert found.log_evidence == pytest.approx(exact, abs=1e-8)


@pytest.mark.parametrize("order", ["shared", "own"])
def test_same_bits_everywhere(order):
    compiled = compiled_of(blocks(400), AllocationModel.nmf(3))
    settings = replace(FAR, islands=5, max_particles=80, order=order, keep="particles")
    executors = [SerialExecutor(), LanesExecutor(1), LanesExecutor(2), LanesExecutor(3)]
    first, *others = [quiet(compiled, settings, 7, executor.map, ignore) for executor in executors]
    for executor in executors:
        executor.close()
    assert first.resampled.any()
    for other in others:
        for name in set(first._fields) - {"plan"}:
            assert_array_equal(getattr(first, name), getattr(other, name))
    assert quiet(compiled, settings, 8, in_turn, ignore).log_evidence != first.log_evidence


def test_what_comes_back():
    compiled = compiled_of(blocks(400), AllocationModel.nmf(3))
    found = quiet(compiled, replace(FAR, keep="particles"), 7, in_turn, ignore)
    assert found.counts is not None
    assert found.counts.shape == (4, 16, compiled.cells)
    assert found.ess.shape == found.resampled.shape == (4, len(found.edges))
    assert found.edges[-1] == 400
    assert ((found.ess >= 1 - 1e-9) & (found.ess <= 16 + 1e-9)).all()
    assert not found.resampled[:, -1].any()
    weights = np.exp(found.log_weights - found.log_weights.max())
    value = found.log_weights.max() + np.log(weights.mean())
    assert value == pytest.approx(found.log_evidence, abs=1e-9)
    assert_allclose(found.batch_log_z.shape, 4)
    own = weights[found.best] / weights[found.best].sum()
    assert found.best == found.batch_log_z.argmax()
    means = own @ found.counts[found.best]
    assert_allclose(found.mean_counts, means, atol=1e-8)
    assert_array_equal(found.counts.sum(axis=2), 400 * 3)  # three draws a token: r, i and j


def test_edges():
    for tokens in (1, 2, 3, 9, 256, 513, 10_001):
        edges = stretch_edges(tokens)
        assert edges[0] == 0
        assert edges[-1] == tokens
        assert (np.diff(edges) > 0).all()
        assert len(edges) <= 258


def test_one_token():
    compiled = compiled_of(np.array([[0, 1], [0, 0]]), MATRIX)
    found = run_smc(compiled, FAR, 0, in_turn, ignore)
    assert found.log_evidence == pytest.approx(enumerate_evidence(compiled), abs=1e-10)


def test_growth():
    """Particles double while batches disagree; the last number counts."""
    model = AllocationModel.nmf(2, concentration=8.0)
    compiled = compiled_of(blocks(60, size=6), model)
    start = SequentialMonteCarlo(particles=1, islands=4, target=1e9, max_particles=2**13, moves=0)
    found = quiet(compiled, start, 1, in_turn, ignore)
    assert found.rounds == tuple(2**n for n in range(len(found.rounds)))
    assert len(found.rounds) > 1
    assert found.particles == found.rounds[-1]
    assert found.spread <= smc.TRUSTED
    assert len(found.batch_log_z) == 4


def test_batches_are_added():
    """Earlier batches stay what they were."""
    compiled = compiled_of(TOY, MATRIX)
    few = SequentialMonteCarlo(particles=8, islands=4, target=1e9, max_particles=32)
    many = replace(few, target=0.02, max_particles=2**14)
    one, two = (run_smc(compiled, settings, 1, in_turn, ignore) for settings in (few, many))
    assert one.rounds == two.rounds == (8,)
    assert len(two.batch_log_z) > 16
    assert two.standard_error <= 0.02
    assert_array_equal(two.batch_log_z[:4], one.batch_log_z)
    half = replace(many, islands=len(two.batch_log_z), target=1e9)
    assert_array_equal(run_smc(compiled, half, 1, in_turn, ignore).mean_counts, two.mean_counts)


def test_warnings():
    compiled = compiled_of(blocks(2000), AllocationModel.nmf(5))
    with pytest.warns(SamplingWarning, match="differ by .* max_particles beyond 16"):
        run_smc(
            compiled, replace(FAR, particles=2, islands=8, max_particles=16), 1, in_turn, ignore
        )
    tight = replace(FAR, target=1e-6)
    with pytest.warns(SamplingWarning, match="standard error is .*, not 1e-06; raise"):
        run_smc(compiled_of(TOY, MATRIX), tight, 1, in_turn, ignore)


def test_long_runs_are_foretold(monkeypatch):
    compiled = compiled_of(TOY, MATRIX)
    seconds = estimated_seconds(plan_of(compiled, 16), 64)
    monkeypatch.setattr(smc, "LONG", seconds / 10)
    with pytest.warns(SamplingWarning, match=r"9 tokens times 64 particles .* thin=0.1 would keep"):
        run_smc(compiled, FAR, 1, in_turn, ignore)


def test_events():
    told = []
    quiet(
        compiled_of(TOY, MATRIX),
        replace(FAR, islands=20, max_particles=320),
        1,
        in_turn,
        told.append,
    )
    assert [event.phase for event in told] == ["draw"] * 3
    assert [event.done for event in told] == [0, 16 * 16 * 9, 20 * 16 * 9]
    assert told[-1].done == told[-1].total


def test_kept_particles_must_fit(monkeypatch):
    monkeypatch.setattr(smc, "KEPT_BYTES", 1000)
    with pytest.raises(OptionError, match='use keep="means", or fewer particles'):
        run_smc(compiled_of(TOY, MATRIX), replace(FAR, keep="particles"), 1, in_turn, ignore)


def test_pooled():
    rng = np.random.default_rng(0)
    logs = rng.normal(scale=0.1, size=400) - 1e4
    value, error = pooled(logs)
    assert value == pytest.approx(-1e4 + 0.005, abs=4 * error)
    assert error == pytest.approx(0.1 / 20, rel=0.15)
    wide = np.array([-10.0, -5.0, 0.0])
    assert pooled(wide)[1] > 0.9  # one batch has it all
    assert pooled(np.array([-3.0, -3.0])) == (-3.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"particles": 0}, "particles must be a whole number of at least 1, got 0"),
        ({"islands": 1}, "islands must be a whole number of at least 2"),
        ({"target": 0.0}, "target must be a positive finite number"),
        ({"max_particles": 63}, "at least particles times islands, 64, got 63"),
        ({"resampling": "best"}, 'resampling must be "systematic"'),
        ({"threshold": 1.5}, "threshold must be between 0 and 1, got 1.5"),
        ({"threshold": "0.5"}, "threshold must be between 0 and 1, got '0.5'"),
        ({"thin": "0.1"}, r"thin must be None or in \(0, 1\], got '0.1'"),
        ({"thin": True}, r"thin must be None or in \(0, 1\], got True"),
        ({"order": "none"}, 'order must be "shared" or "own", got '),
        ({"keep": "all"}, 'keep must be "means" or "particles"'),
        ({"thin": 0.0}, "thin must be None or in"),
    ],
)
def test_settings_are_checked(changes, match):
    refused(OptionError, match, replace, FAR, **changes)
