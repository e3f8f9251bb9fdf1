"""Allocation models as urns, and their evidence by enumeration, against brute force."""

import itertools
import pickle
from math import prod

import numpy as np
import pytest
import sparse
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp
from scipy.stats import nbinom

from daskfactor.allocation import compiled_model
from daskfactor.allocation.counts import coded
from daskfactor.allocation.exact import count_allocations, enumerate_allocations
from daskfactor.allocation.model import AllocationModel
from daskfactor.errors import DataError
from tests.allocation.cases import (
    CASES,
    NAMES,
    TOY,
    TOY_EVIDENCE,
    enumerate_evidence,
    evidence,
    graphs,
    tokens,
    toy,
)
from tests.allocation.particles import compiled_of
from tests.refusals import refused
from tests.tiers import tiered


def test_columns_are_contiguous_where_all_hidden_variables_are_axes():
    for model in (AllocationModel.nmf(5), AllocationModel.topics(5)):
        compiled = compiled_of(TOY, model)
        assert_array_equal(compiled.column, np.tile(np.arange(5), (len(compiled.draws), 1)))
        assert not (compiled.row % 5).any()
    compiled = compiled_of(np.ones((2, 2, 2), int), AllocationModel.tucker((2, 3, 2)))
    assert compiled.draws == ("r1", "r2", "r3", "i", "j", "k")
    assert_array_equal(compiled.column[[2, 0]], [np.arange(12), np.repeat([0, 1], 6)])
    assert_array_equal(compiled.total_column[[2, 0]], [np.repeat(np.arange(6), 2), np.zeros(12)])


def test_only_what_occurs_takes_room():
    model = AllocationModel.nmf(3, concentration=2.0)
    small, coords = compiled_of(TOY, model), np.stack(np.nonzero(TOY)) * 250_000
    large = compiled_of(sparse.COO(coords, TOY[TOY > 0], shape=(10**6, 10**6)), model)
    assert (large.cells, large.totals) == (small.cells, small.totals) == (3 * 8, 1 + 3 + 3)
    assert_array_equal(large.row, small.row)
    assert_allclose(large.alpha, [2 / 3, 2 / 3e6, 2 / 3e6])
    assert_allclose(large.alpha_total, [2.0, 2 / 3, 2 / 3])
    assert large.row.shape == (len(large.values), 3)


def test_tables_have_names_and_labels():
    X = xr.DataArray(TOY, dims=("from", "to"), coords={"to": list("wxyz")})
    compiled = compiled_of(X, AllocationModel.nmf(2))
    tables = compiled.tables(np.random.default_rng(0).random(compiled.cells))
    assert list(tables) == ["r", "i", "j"]
    assert tables["j"].dims == ("r", "to")
    assert tables["i"].attrs["cells"] == "all"
    assert "from" not in tables["i"].coords
    assert_array_equal(tables["j"]["to"], list("wxyz"))
    for table in tables.values():
        assert_allclose(table.sum(table.dims[-1]), 1.0)
    symmetric = AllocationModel.symmetric_nmf(2, concentration_shared=1)
    shared = compiled_of(np.eye(3, dtype=int), symmetric)
    tables = shared.tables(np.zeros(shared.cells))
    assert (list(tables), tables["i"].attrs["drawn_by"]) == (["r", "i"], "i, j")


@pytest.mark.parametrize("graph", ["r->i,r->j", "r->i,r->j,i->j"])
def test_large_tables_hold_what_is_occupied(graph, monkeypatch):
    model = AllocationModel(graph, {"r": 2})
    X = xr.DataArray(TOY[:2], dims=("from", "to"), coords={"to": list("wxyz")})
    compiled = compiled_of(X, model)
    C = np.random.default_rng(0).random(compiled.cells)
    whole = compiled.tables(C)
    monkeypatch.setattr(compiled_model, "LARGEST_TABLE", 0)
    part = compiled.tables(C)["j"]
    assert part.attrs["cells"] == "occupied"
    if part.dims == ("r", "to"):
        xr.testing.assert_allclose(part, whole["j"])
        return
    assert part.dims == ("cell_j", "r")
    assert part.sizes["cell_j"] == np.count_nonzero(TOY[:2])
    for cell in part:
        i, j = int(cell["from_of_cell_j"]), cell["to_of_cell_j"].item()
        assert_allclose(cell, whole["j"].isel({"from": i}).sel(to=j))


@pytest.mark.parametrize("limit", [0, 10**6])
@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_tables_fit_into_one_dataset(_, model, network, X, limit, monkeypatch):
    monkeypatch.setattr(compiled_model, "LARGEST_TABLE", limit)
    X = X.copy()
    X[0] = 0  # an index that does not occur
    compiled = compiled_of(X, model)
    tables = compiled.tables(np.random.default_rng(0).random(compiled.cells))
    sets = [table.to_dataset(name=f"table_{name}") for name, table in tables.items()]
    together = xr.merge(sets, join="exact", compat="no_conflicts")
    for name, table in tables.items():
        assert together[f"table_{name}"].sizes == table.sizes
        assert table.attrs["pseudo_count"] == network.alpha[network.table.get(name, name)]


def test_tied_tables_reach_more_than_others_along_the_same_dim(monkeypatch):
    """The shared table of i and j has other indices than the table of s given i."""
    graph, tied = "r -> i, r -> j, i -> s, s -> k", {("i", "j"): 0.5}
    model = AllocationModel(graph, {"r": 2, "s": 2}, tied=tied)
    X = np.zeros((4, 4, 2), int)
    X[0, 2, 0] = X[3, 0, 1] = 1
    monkeypatch.setattr(compiled_model, "LARGEST_TABLE", 0)
    tables = (compiled := compiled_of(X, model)).tables(np.zeros(compiled.cells))
    assert tables["i"].dims == ("r", "i")
    assert_array_equal(tables["i"]["i"], [0, 2, 3])
    assert tables["s"].dims == ("cell_s", "s")
    assert_array_equal(tables["s"]["i_of_cell_s"], [0, 3])


def test_urns_travel():
    compiled = compiled_of(TOY, AllocationModel.nmf(2))
    again = pickle.loads(pickle.dumps(compiled))
    assert enumerate_evidence(again) == enumerate_evidence(compiled)


@settings(max_examples=60)
@given(graphs(), st.data())
def test_evidence_of_any_graph(problem, data):
    model, network = problem
    X = data.draw(tokens(network))
    expected, _ = evidence(network, X)
    assert enumerate_evidence(compiled_of(X, model)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25)
@given(graphs())
def test_evidences_of_all_data_sum_to_the_law_of_the_total(problem):
    """Σ_X p(X) over all X of at most n tokens is the negative binomial's law up to n."""
    model, network = problem
    shape = tuple(network.sizes[name] for name in network.observed)
    law = nbinom(network.a, network.b / (network.b + 1))
    most = 3 if prod(shape) <= 4 else 2
    logs = [law.logpmf(0)]
    for total in range(1, most + 1):
        for cells in itertools.combinations_with_replacement(range(prod(shape)), total):
            X = np.bincount(cells, minlength=prod(shape)).reshape(shape)
            logs.append(enumerate_evidence(compiled_of(X, model)))
    assert logsumexp(logs) == pytest.approx(law.logcdf(most), abs=1e-9)


@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_every_kind_of_model(_, model, network, X):
    found = enumerate_evidence(compiled_of(X, model))
    assert found == pytest.approx(evidence(network, X)[0], abs=1e-9)


@pytest.mark.parametrize("R", tiered([1, 2, 3, 4], lambda R: R < 4))
def test_toys(R):
    found = enumerate_evidence(compiled_of(TOY, AllocationModel.nmf(R)))
    assert found == pytest.approx(evidence(toy(R), TOY)[0], abs=1e-9)
    if R < 4:
        assert found == pytest.approx(TOY_EVIDENCE[R], abs=1e-10)


@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_posterior_means(_, model, network, X):
    """Fewer tokens, of which the brute force keeps its counts too."""
    cells = np.repeat(np.arange(X.size), X.ravel())[:: max(1, X.sum() // 3)][:3]
    X = np.bincount(cells, minlength=X.size).reshape(X.shape)
    compiled = compiled_of(X, model)
    log_evidence, means = evidence(network, X)
    found = enumerate_allocations(compiled)
    assert found.log_evidence == pytest.approx(log_evidence, abs=1e-9)
    assert means, "the brute force kept no counts"
    for name, table in compiled.tables(found.mean_counts).items():
        shared = network.table.get(name, name)
        alpha = network.alpha[shared]
        for *parents, value in np.ndindex(table.shape):
            counts = [means.get((shared, tuple(parents), v), 0.0) for v in range(table.shape[-1])]
            expected = (alpha + counts[value]) / (alpha * len(counts) + sum(counts))
            assert table.values[(*parents, value)] == pytest.approx(expected, abs=1e-9)


def test_thinned_models_have_the_evidence_of_thinned_counts():
    """Σ_X p(X) Binomial(X'; X, p) = p'(X'), with all X of at most so many tokens."""
    model, share, kept = AllocationModel.nmf(2, rate=9.0), 0.5, np.array([[1, 1], [0, 0]])
    logs = []
    for extra in (own for own in np.ndindex(6, 6, 6, 6) if sum(own) <= 7):
        X = kept + np.reshape(extra, (2, 2))
        weight = kept.sum() * np.log(share) + sum(extra) * np.log(1 - share)
        weight += sum(np.log([1, 1 + e][k]) for k, e in zip(kept.ravel(), extra, strict=True))
        logs.append(enumerate_evidence(compiled_of(X, model)) + weight)
    thinned = enumerate_evidence(compiled_of(kept, model.with_thinning(share)))
    assert logsumexp(logs) == pytest.approx(thinned, abs=1e-6)


def test_a_sum_that_is_too_large_is_refused_before_it_is_begun():
    large, three = (compiled_of(TOY * n, AllocationModel.nmf(3)) for n in (1000, 1))
    match = r"9000 tokens.*10\^41.1 ways.*at least|SequentialMonte"
    refused(DataError, match, enumerate_evidence, large)
    refused(DataError, "above the limit of 100;", enumerate_evidence, three, limit=100)
    beyond = compiled_of(np.array([[10**6, 1], [1, 3]]), AllocationModel.nmf(2000))
    refused(DataError, r"need 10\^300 states at a time or more", enumerate_evidence, beyond)
    count = count_allocations(compiled_of(TOY, AllocationModel.nmf(2)))
    assert count == pytest.approx(np.log10(3 * 2**2 * 2 * 3 * 2 * 2))


def test_states_are_merged():
    """Far fewer states than allocations, and as many as one component needs: one."""
    X = np.eye(12, dtype=int) * 2
    assert enumerate_allocations(compiled_of(X, AllocationModel.nmf(1))).states == 1
    two = compiled_of(X, AllocationModel.nmf(2))
    assert enumerate_allocations(two).states < 100 < 10 ** count_allocations(two)


def test_states_are_told_apart_by_every_count_however_many_there_are():
    """More counts than fit into one number of 64 bits, and rows that differ in one of them."""
    rows = np.random.default_rng(0).integers(0, 4, (300, 200)).astype(np.int32)
    rows = np.concatenate([rows, rows, rows])
    rows[300:600, 0] += 1
    rows[600:, 150] += 5
    rows = np.concatenate([rows, rows[::7]])
    _, expected = np.unique(rows, axis=0, return_inverse=True)
    _, found = np.unique(coded(rows.T), return_inverse=True)
    assert len(set(zip(expected, found, strict=True))) == len(set(expected)) == len(set(found))
