"""Mean-field bounds against enumeration over labelled allocations."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp

from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import as_counts
from daskfactor.allocation.variational import VariationalBayes
from daskfactor.errors import OptionError
from daskfactor.evidence.base import EvidenceProblem
from daskfactor.executors import SerialExecutor
from daskfactor.kernels import multinomial as mean_field
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import CASES, NAMES, log_f
from tests.allocation.sequences import evidence
from tests.refusals import refused

TOY = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
FEW = VariationalBayes(starts=5, max_iterations=300)


def serial(function, items):
    return [function(item, None) for item in items]


def compiled_of(model, X):
    return compile_model(model, as_counts(X, model))


def bound(model, X, options=FEW, seed=0):
    return options.run(compiled_of(model, X), seed, serial)


def enumerated(compiled):
    """Log p(X) from all labelled hidden assignments, one after the other."""
    cell = np.repeat(np.arange(compiled.values.size), compiled.values)
    counts = []
    for hidden in itertools.product(range(compiled.states), repeat=cell.size):
        C = np.zeros(compiled.cells)
        for m, h in zip(cell, hidden, strict=True):
            np.add.at(C, compiled.row[m] + compiled.column[:, h], 1)
        counts.append(C)
    return compiled.log_factor + compiled.constant + logsumexp(log_f(compiled, np.array(counts)))


MODELS = {
    "nmf": AllocationModel.nmf,
    "symmetric": lambda k, **more: AllocationModel.symmetric_nmf(
        k, concentration_shared=0.4, **more
    ),
    "chain": lambda k, **more: AllocationModel("i -> r -> j", {"r": k}, ("i", "j"), **more),
    "hidden chain": lambda k, **more: AllocationModel(
        "r -> s -> i, s -> j", {"r": 2, "s": k}, ("i", "j"), **more
    ),
    "collider": lambda k, **more: AllocationModel(
        "r -> i, s -> i, r -> j", {"r": k, "s": 2}, ("i", "j"), **more
    ),
    "observed parents": lambda k, **more: AllocationModel(
        "i -> r, j -> r", {"r": k}, ("i", "j"), **more
    ),
    "tucker": lambda k, **more: AllocationModel.tucker((k, 2), **more),
    "hidden tied to observed": lambda k, **more: AllocationModel(
        "r -> i, j", {"r": k}, {"i": 2, "j": k}, tied={("r", "j"): 0.3}, **more
    ),
}


@st.composite
def problems(draw):
    kind = draw(st.sampled_from(sorted(MODELS)))
    k = draw(st.integers(1, 2 if kind in ("hidden chain", "collider", "tucker") else 3))
    size = k if kind == "hidden tied to observed" else 2
    most = 5 if k == 1 or kind in ("nmf", "symmetric", "chain", "observed parents") else 4
    tokens = draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, size - 1)), min_size=1, max_size=most)
    )
    X = np.zeros((2, size), int)
    for token in tokens:
        X[token] += 1
    a = draw(st.sampled_from([0.05, 0.7, 1.0, 8.0, 200.0]))
    b = draw(st.sampled_from([0.1, 1.0, 5.0]))
    return MODELS[kind](k, concentration=a, rate=b), X


@given(problems())
@settings(deadline=None, max_examples=60)
def test_never_above_the_evidence_and_monotone(problem):
    model, X = problem
    compiled = compiled_of(model, X)
    exact = enumerated(compiled)
    found = FEW.run(compiled, 0, serial)
    assert np.nanmax(found.elbos) <= exact + 1e-9
    rises = np.diff(found.elbos, axis=1)
    assert rises[np.isfinite(rises)].min(initial=0.0) > -1e-10
    if compiled.states == 1:
        assert found.elbo == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(("name", "model", "net", "X"), CASES, ids=NAMES)
def test_below_an_enumeration_of_sequences(name, model, net, X):
    """Against sums over sequences of tokens that know nothing of the package."""
    exact, _ = evidence(net, X)
    found = bound(model, X)
    assert exact - 5 < found.elbo <= exact + 1e-9, name
    rises = np.diff(found.elbos, axis=1)
    assert rises[np.isfinite(rises)].min(initial=0.0) > -1e-10


@pytest.mark.parametrize("total", [100, 10_000])
def test_rank_one_is_exact_for_large_counts(total):
    X = np.random.default_rng(1).multinomial(total, np.full(12, 1 / 12)).reshape(3, 4)
    model = AllocationModel.nmf(1, concentration=0.3)
    compiled = compiled_of(model, X)
    counts = np.zeros(compiled.cells)
    for m, value in enumerate(compiled.values):
        np.add.at(counts, compiled.row[m] + compiled.column[:, 0], value)
    exact = float(compiled.log_factor + compiled.constant + log_f(compiled, counts))
    assert bound(model, X).elbo == pytest.approx(exact, rel=1e-13, abs=1e-9)


def direct_elbo(compiled, q):
    """The bound of any q (M, H), from its definition."""
    expected = np.zeros(compiled.cells)
    for m, value in enumerate(compiled.values):
        for h in range(compiled.states):
            np.add.at(expected, compiled.row[m] + compiled.column[:, h], value * q[m, h])
    entropy = -float((compiled.values[:, None] * q * np.log(q)).sum())
    return compiled.log_factor + compiled.constant + float(
        log_f(compiled, expected)
    ) + entropy, expected


@pytest.mark.parametrize("kind", ["nmf", "symmetric", "collider"])
def test_the_bound_is_the_one_of_its_own_q(kind):
    model = MODELS[kind](2)
    compiled = compiled_of(model, TOY[:, :3])
    found = VariationalBayes(1, 2000, 1e-15).run(compiled, 0, serial)
    from scipy.special import digamma

    C = found.mean_counts
    totals = np.bincount(compiled.owner, C, compiled.totals)
    level = (
        digamma(compiled.cell_alpha + C) - digamma(compiled.total_alpha + totals)[compiled.owner]
    )
    q = np.exp(level[compiled.row[:, :, None] + compiled.column].sum(axis=1))
    value, expected = direct_elbo(compiled, q / q.sum(axis=1, keepdims=True))
    assert_allclose(expected, C, atol=1e-5)
    assert value == pytest.approx(found.elbo, abs=1e-8)


def test_mean_counts_keep_the_data():
    model = AllocationModel.nmf(3)
    compiled = compiled_of(model, TOY)
    found = FEW.run(compiled, 0, serial)
    tables = compiled.tables(found.mean_counts)
    for name, table in tables.items():
        assert_allclose(table.sum(name), 1.0)
    assert found.mean_counts.sum() == pytest.approx(3 * TOY.sum())


def test_faint_products_are_done_with_logarithms():
    """Tables whose expectations underflow: a thousand states for a handful of tokens."""
    model = AllocationModel.nmf(1500, concentration={"r": 1e-3, "i": 1e-3, "j": 1e-3})
    found = bound(model, TOY, VariationalBayes(starts=2, max_iterations=30))
    assert np.isfinite(found.elbos[:, 0]).all()
    assert np.nanmin(np.diff(found.elbos, axis=1)) > -1e-9


def test_logarithms_give_the_same_shares():
    rng = np.random.default_rng(0)
    compiled = compiled_of(AllocationModel.nmf(3), TOY)
    weight = rng.gamma(1.0, size=compiled.cells)
    straight = np.array([True, False, True])
    outcomes = []
    for scale in (1.0, 1e-100):
        counts = np.empty(compiled.cells)
        scaled = weight * scale
        places = (compiled.row, compiled.column, straight, compiled.values)
        norms = mean_field.share_out(*places, scaled, np.log(scaled), np.empty(3), counts)
        outcomes.append((norms - 3 * TOY.sum() * np.log(scale), counts))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-12)
    assert_allclose(outcomes[0][1], outcomes[1][1], rtol=1e-12)


def test_gamma_functions():
    from scipy.special import digamma, gammaln

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
    length = few.elbos.shape[1]
    assert_array_equal(many.elbos[:2, :length], few.elbos)
    other = bound(AllocationModel.nmf(3), TOY, VariationalBayes(starts=2), seed=1)
    assert not np.array_equal(other.mean_counts, few.mean_counts)


def test_counts_that_are_not_kept_are_made_again(monkeypatch):
    from daskfactor.allocation import variational

    model, options = AllocationModel.nmf(3), replace(FEW, starts=6)
    kept = bound(model, TOY, options)
    monkeypatch.setattr(variational, "KEPT", 0)
    again = bound(model, TOY, options)
    assert_array_equal(again.mean_counts, kept.mean_counts)


def test_events_and_ends():
    events = []
    compiled = compiled_of(AllocationModel.nmf(2), TOY)
    problem = EvidenceProblem(None, None, 0, SerialExecutor(), events.append)
    found = VariationalBayes(3, 2, 1e-15).run(compiled, 0, problem.map)
    assert [event.done for event in events] == [1, 2, 3]
    assert found.elbos.shape[1] <= 2
    cut = VariationalBayes(4, 1).run(compiled, 0, serial)
    assert not cut.converged.any()
    assert list(cut.iterations) == [1] * 4


@pytest.mark.parametrize(
    "wrong", [{"starts": 0}, {"max_iterations": 1.5}, {"tolerance": 0}, {"tolerance": "small"}]
)
def test_bad_settings(wrong):
    refused(OptionError, next(iter(wrong)), VariationalBayes, **wrong)
