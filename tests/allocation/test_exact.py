import numpy as np
import pytest
from scipy.special import logsumexp

from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import as_counts, coded
from daskfactor.allocation.exact import count_allocations, enumerate_allocations
from daskfactor.errors import DataError
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import CASES, NAMES, TOY, TOY_EVIDENCE, enumerate_evidence, toy
from tests.allocation.sequences import evidence


def compiled_of(X, model):
    return compile_model(model, as_counts(X, model))


@pytest.mark.parametrize("R", [1, 2, 3, 4])
def test_toy(R):
    found = enumerate_evidence(compiled_of(TOY, AllocationModel.nmf(R)))
    assert found == pytest.approx(evidence(toy(R), TOY)[0], abs=1e-9)
    if R in TOY_EVIDENCE:
        assert found == pytest.approx(TOY_EVIDENCE[R], abs=1e-10)


@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_every_kind_of_model(_, model, network, X):
    found = enumerate_evidence(compiled_of(X, model))
    assert found == pytest.approx(evidence(network, X)[0], abs=1e-9)


@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_posterior_means(_, model, network, X):
    """Fewer tokens, of which the brute force keeps its counts too."""
    keep = 3
    cells = np.repeat(np.arange(X.size), X.ravel())[:: max(1, X.sum() // keep)][:keep]
    X = np.bincount(cells, minlength=X.size).reshape(X.shape)
    compiled = compiled_of(X, model)
    log_evidence, means = evidence(network, X)
    found = enumerate_allocations(compiled)
    assert found.log_evidence == pytest.approx(log_evidence, abs=1e-9)
    assert means, "the brute force kept no counts"
    tables = compiled.tables(found.mean_counts)
    for name, table in tables.items():
        shared = network.table.get(name, name)
        alpha = network.alpha[shared]
        for *parents, value in np.ndindex(table.shape):
            counts = [means.get((shared, tuple(parents), v), 0.0) for v in range(table.shape[-1])]
            expected = (alpha + counts[value]) / (alpha * len(counts) + sum(counts))
            assert table.values[(*parents, value)] == pytest.approx(expected, abs=1e-9)


def test_thinned_models_have_the_evidence_of_thinned_counts():
    """Σ_X p(X) Binomial(X'; X, p) = p'(X'), with all X of at most so many tokens."""
    model, share = AllocationModel.nmf(2, rate=9.0), 0.5
    kept = np.array([[1, 1], [0, 0]])
    logs = []
    for extra in np.ndindex(6, 6, 6, 6):
        if sum(extra) > 7:
            continue
        X = kept + np.reshape(extra, (2, 2))
        weight = kept.sum() * np.log(share) + sum(extra) * np.log(1 - share)
        weight += sum(np.log([1, 1 + e][k]) for k, e in zip(kept.ravel(), extra, strict=True))
        logs.append(enumerate_evidence(compiled_of(X, model)) + weight)
    thinned = enumerate_evidence(compiled_of(kept, model.with_thinning(share)))
    assert logsumexp(logs) == pytest.approx(thinned, abs=1e-6)


def test_a_sum_that_is_too_large_is_refused_before_it_is_begun():
    large = compiled_of(TOY * 1000, AllocationModel.nmf(3))
    with pytest.raises(DataError, match=r"9000 tokens.*10\^41.1 ways.*at least|SequentialMonte"):
        enumerate_evidence(large)
    with pytest.raises(DataError, match="above the limit of 100;"):
        enumerate_evidence(compiled_of(TOY, AllocationModel.nmf(3)), limit=100)
    assert count_allocations(compiled_of(TOY, AllocationModel.nmf(2))) == pytest.approx(
        np.log10(3 * 2**2 * 2 * 3 * 2 * 2)
    )


def test_states_are_merged():
    """Far fewer states than allocations, and as many as one component needs: one."""
    X = np.eye(12, dtype=int) * 2
    assert enumerate_allocations(compiled_of(X, AllocationModel.nmf(1))).states == 1
    two = compiled_of(X, AllocationModel.nmf(2))
    assert enumerate_allocations(two).states < 100 < 10 ** count_allocations(two)


def test_states_are_told_apart_by_every_count_however_many_there_are():
    """More counts than fit into one number of 64 bits, and rows that differ in one of them."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 4, (300, 200)).astype(np.int32)
    rows = np.concatenate([rows, rows, rows])
    rows[300:600, 0] += 1
    rows[600:, 150] += 5
    rows = np.concatenate([rows, rows[::7]])
    _, expected = np.unique(rows, axis=0, return_inverse=True)
    _, found = np.unique(coded(rows.T), return_inverse=True)
    assert len(set(zip(expected, found, strict=True))) == len(set(expected)) == len(set(found))


def test_a_number_of_allocations_that_is_beyond_counting():
    X = np.array([[10**6, 1], [1, 3]])
    model = AllocationModel.nmf(2000)
    with pytest.raises(DataError, match=r"need 10\^300 states at a time or more"):
        enumerate_evidence(compile_model(model, as_counts(X, model)))
