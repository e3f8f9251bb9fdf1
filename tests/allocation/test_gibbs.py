"""Collapsed Gibbs sweeps against enumeration, and particles against Gibbs sweeps."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import daskfactor as dfac
from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import as_counts
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import log_f
from tests.allocation.collapsed_gibbs import gibbs_sweep, run_gibbs, urns_of

X = np.array([[2, 1, 0], [0, 1, 0], [1, 0, 2]])
MODELS = {
    "nmf": AllocationModel.nmf(2, concentration=2.0),
    "symmetric": AllocationModel.symmetric_nmf(2, concentration_shared=0.3),
    "collider": AllocationModel("r -> i, s -> i, r -> j", {"r": 2, "s": 2}, ("i", "j")),
    "chain": AllocationModel("i -> r -> j", {"r": 3}, ("i", "j")),
}
BATCHES = 40


def compiled_of(model, data=X):
    return compile_model(model, as_counts(data, model))


def enumerated(compiled):
    """Posterior mean of log f over all labelled hidden assignments."""
    place = compiled.row[:, :, None] + compiled.column
    cell = np.repeat(np.arange(compiled.values.size), compiled.values)
    counts = []
    for hidden in itertools.product(range(compiled.states), repeat=cell.size):
        drawn = place[cell, :, list(hidden)]
        counts.append(np.bincount(drawn.ravel(), minlength=compiled.cells))
    logs = log_f(compiled, np.array(counts))
    weights = np.exp(logs - logs.max())
    return float((weights * logs).sum() / weights.sum())


@pytest.mark.statistical
@pytest.mark.parametrize("name", MODELS)
def test_mean_of_log_f(name):
    compiled = compiled_of(MODELS[name])
    found = run_gibbs(compiled, 8000, 100, 1).log_f.reshape(BATCHES, -1).mean(axis=1)
    error = found.std(ddof=1) / np.sqrt(BATCHES)
    assert error < 0.06
    assert abs(found.mean() - enumerated(compiled)) < 5 * error


def test_counts_are_those_of_the_states():
    compiled = compiled_of(MODELS["symmetric"])
    cell = np.repeat(np.arange(compiled.values.size), compiled.values)
    state = np.full(cell.size, -1, np.int64)
    counts, totals = np.zeros(compiled.cells, np.int64), np.zeros(compiled.totals, np.int64)
    for sweep in range(5):
        scratch, key = np.empty(2), np.array([3, 4], np.uint32)
        gibbs_sweep(urns_of(compiled), cell, state, counts, totals, scratch, key, sweep)
        place = compiled.row[:, :, None] + compiled.column
        drawn = place[cell, :, state]
        assert_array_equal(counts, np.bincount(drawn.ravel(), minlength=compiled.cells))
        assert_array_equal(totals, np.bincount(compiled.owner, counts, compiled.totals))


@pytest.mark.statistical
def test_particles_agree_with_gibbs_sweeps():
    """Mean squared size of a state, which no renumbering changes."""
    data = np.array([[6, 1, 0, 0], [1, 5, 0, 1], [0, 0, 4, 2]])
    model = AllocationModel.nmf(2, concentration={"r": 1.5, "i": 0.3, "j": 0.3})
    compiled = compiled_of(model, data)
    place = compiled.row[0, compiled.draws.index("r")] + np.arange(2)
    seen = []
    for chain in range(200):
        counts = run_gibbs(compiled, 1, 60, 1, chain).mean_counts[place]
        seen.append((counts**2).sum())
    method = dfac.SequentialMonteCarlo(particles=128, islands=32, keep="particles", target=0.05)
    trace = dfac.log_evidence(data, model, method, random_seed=0, progressbar=False).trace
    table = trace["particle_r"].values
    total = data.sum()
    sizes = table * (total + 2 * 1.5) - 1.5
    weights = np.exp(trace["log_weight"].values - float(trace["log_weight"].max()))
    mine = ((sizes**2).sum(axis=-1) * weights).sum(axis=1)
    level = weights.sum(axis=1)
    ratio = mine.sum() / level.sum()
    spread = np.std(mine - ratio * level, ddof=1) * np.sqrt(len(level)) / level.sum()
    error = np.hypot(spread, np.std(seen) / np.sqrt(len(seen)))
    assert abs(ratio - np.mean(seen)) < 5 * error
    assert error < 0.05 * ratio
