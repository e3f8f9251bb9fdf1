"""Mean-field bounds against enumeration over labelled allocations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import digamma, gammaln

from daskfactor.allocation import mean_field, variational
from daskfactor.allocation.model import AllocationModel
from daskfactor.allocation.variational import VariationalBayes
from daskfactor.errors import OptionError
from daskfactor.evidence.base import EvidenceProblem
from daskfactor.executors import SerialExecutor
from tests.allocation.cases import (
    CASES,
    NAMES,
    TOY,
    enumerate_evidence,
    evidence,
    graphs,
    log_f,
    tokens,
)
from tests.allocation.particles import compiled_of
from tests.refusals import refused

FEW = VariationalBayes(starts=5, max_iterations=300)
BY_NAME = {name: (model, X) for name, model, _, X in CASES} | {"nmf": (AllocationModel.nmf(2), TOY)}


def serial(function, items):
    return [function(item, None) for item in items]


def bound(model, X, options=FEW, seed=0):
    return options.run(compiled_of(X, model), seed, serial)


def check(found, exact):
    """Never above the evidence, and monotone."""
    assert np.nanmax(found.elbos) <= exact + 1e-9
    rises = np.diff(found.elbos, axis=1)
    assert rises[np.isfinite(rises)].min(initial=0.0) > -1e-10


@given(graphs(), st.data())
@settings(deadline=None, max_examples=60)
def test_never_above_the_evidence_of_any_graph(problem, data):
    model, network = problem
    X = data.draw(tokens(network))
    exact, found = evidence(network, X)[0], bound(model, X)
    check(found, exact)
    if compiled_of(X, model).states == 1:
        assert found.elbo == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("concentration", [0.05, 8.0, 200.0])
def test_never_above_the_evidence_whatever_the_concentration(concentration):
    model = AllocationModel.nmf(2, concentration=concentration, rate=0.1)
    check(bound(model, TOY), enumerate_evidence(compiled_of(TOY, model)))


@pytest.mark.parametrize(("name", "model", "net", "X"), CASES, ids=NAMES)
def test_below_an_enumeration_of_sequences(name, model, net, X):
    """Against sums over sequences of tokens that know nothing of the package."""
    exact, found = evidence(net, X)[0], bound(model, X)
    assert found.elbo > exact - 5, name
    check(found, exact)


@pytest.mark.parametrize("total", [100, 10_000])
def test_rank_one_is_exact_for_large_counts(total):
    X = np.random.default_rng(1).multinomial(total, np.full(12, 1 / 12)).reshape(3, 4)
    model = AllocationModel.nmf(1, concentration=0.3)
    exact, _ = direct_elbo(compiled := compiled_of(X, model), np.ones((compiled.values.size, 1)))
    assert bound(model, X).elbo == pytest.approx(exact, rel=1e-13, abs=1e-9)


def direct_elbo(compiled, q):
    """The bound of any q (M, H), from its definition, and the counts that it expects."""
    expected = np.zeros(compiled.cells)
    for m, h in np.ndindex(q.shape):
        at = compiled.row[m] + compiled.column[:, h]
        np.add.at(expected, at, compiled.values[m] * q[m, h])
    entropy = -float((compiled.values[:, None] * q * np.log(q)).sum())
    log = float(log_f(compiled, expected)) + entropy
    return compiled.log_factor + compiled.constant + log, expected


@pytest.mark.parametrize("name", ["nmf", "symmetric", "collider"])
def test_the_bound_is_the_one_of_its_own_q(name):
    model, X = BY_NAME[name]
    compiled = compiled_of(X, model)
    found = VariationalBayes(1, 2000, 1e-15).run(compiled, 0, serial)
    C = found.mean_counts
    totals = np.bincount(compiled.owner, C, compiled.totals)
    level = digamma(compiled.cell_alpha + C)
    level -= digamma(compiled.total_alpha + totals)[compiled.owner]
    q = np.exp(level[compiled.row[:, :, None] + compiled.column].sum(axis=1))
    value, expected = direct_elbo(compiled, q / q.sum(axis=1, keepdims=True))
    assert_allclose(expected, C, atol=1e-5)
    assert value == pytest.approx(found.elbo, abs=1e-8)


def test_mean_counts_keep_the_data():
    compiled = compiled_of(TOY, AllocationModel.nmf(3))
    found = FEW.run(compiled, 0, serial)
    for name, table in compiled.tables(found.mean_counts).items():
        assert_allclose(table.sum(name), 1.0)
    assert found.mean_counts.sum() == pytest.approx(3 * TOY.sum())


def test_faint_products_are_done_with_logarithms():
    """Tables whose expectations underflow: a thousand states for a handful of tokens."""
    model = AllocationModel.nmf(1500, concentration={"r": 1e-3, "i": 1e-3, "j": 1e-3})
    found = bound(model, TOY, VariationalBayes(starts=2, max_iterations=30))
    assert np.isfinite(found.elbos[:, 0]).all()
    assert np.nanmin(np.diff(found.elbos, axis=1)) > -1e-9


def test_logarithms_give_the_same_shares():
    compiled = compiled_of(TOY, AllocationModel.nmf(3))
    weight = np.random.default_rng(0).gamma(1.0, size=compiled.cells)
    straight, outcomes = np.array([True, False, True]), []
    for scale in (1.0, 1e-100):
        counts, scaled = np.empty(compiled.cells), weight * scale
        places = (compiled.row, compiled.column, straight, compiled.values)
        norms = mean_field.share_out(*places, scaled, np.log(scaled), np.empty(3), counts)
        outcomes.append((norms - 3 * TOY.sum() * np.log(scale), counts))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-12)
    assert_allclose(outcomes[0][1], outcomes[1][1], rtol=1e-12)


def test_gamma_functions():
    rng = np.random.default_rng(0)
    x = np.concatenate([10 ** rng.uniform(-300, 18, 400), np.arange(1.0, 50.0), [0.5, 1e-12]])
    out, none = np.empty_like(x), np.zeros_like(x)
    total = mean_field.gamma_functions(x, none, out)
    assert_allclose(out, digamma(x), rtol=1e-13, atol=2e-15)
    assert total == pytest.approx(gammaln(x).sum(), rel=1e-13)
    one = [mean_field.gamma_functions(x[n : n + 1], none[:1], out[:1]) for n in range(x.size)]
    assert_allclose(one, gammaln(x), rtol=1e-13, atol=1e-13)


def test_more_starts_never_lower_the_bound_and_repeat_the_first():
    few, many = (bound(AllocationModel.nmf(3), TOY, VariationalBayes(starts=n)) for n in (2, 8))
    assert many.elbo >= few.elbo
    assert_array_equal(many.elbos[:2, : few.elbos.shape[1]], few.elbos)
    other = bound(AllocationModel.nmf(3), TOY, VariationalBayes(starts=2), seed=1)
    assert not np.array_equal(other.mean_counts, few.mean_counts)


def test_counts_that_are_not_kept_are_made_again(monkeypatch):
    model, options = AllocationModel.nmf(3), replace(FEW, starts=6)
    kept = bound(model, TOY, options)
    monkeypatch.setattr(variational, "MAX_COUNT_BYTES", 0)
    assert_array_equal(bound(model, TOY, options).mean_counts, kept.mean_counts)


def test_events_and_ends():
    events, compiled = [], compiled_of(TOY, AllocationModel.nmf(2))
    problem = EvidenceProblem(None, None, 0, SerialExecutor(), events.append)
    found = VariationalBayes(3, 2, 1e-15).run(compiled, 0, problem.map)
    assert [event.done for event in events] == [1, 2, 3]
    assert found.elbos.shape[1] <= 2
    cut = VariationalBayes(4, 1).run(compiled, 0, serial)
    assert not cut.converged.any()
    assert list(cut.iterations) == [1] * 4


def test_bad_settings():
    wrong = ("starts", 0), ("max_iterations", 1.5), ("tolerance", 0), ("tolerance", "small")
    for name, value in wrong:
        refused(OptionError, name, VariationalBayes, **{name: value})
