import itertools
import pickle
from math import prod

import numpy as np
import pytest
import sparse
import xarray as xr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import gammaln, logsumexp
from scipy.stats import nbinom

from daskfactor.allocation import compiled_model
from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import as_counts
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import CASES, NAMES, TOY, enumerate_evidence, log_f
from tests.allocation.sequences import Network, evidence


def compiled_of(X, model):
    return compile_model(model, as_counts(X, model))


def cells_of(compiled, m, h):
    return compiled.row[m] + compiled.column[:, h]


def totals_of(compiled, m, h):
    return compiled.total_row[m] + compiled.total_column[:, h]


def predictive(compiled, C, D, m, h):
    """Probability of a token at observed cell m with hidden state h, and its additions."""
    cells, totals = cells_of(compiled, m, h), totals_of(compiled, m, h)
    p = 1.0
    for n in range(len(cells)):
        before = compiled.group[:n] == compiled.group[n]
        own = C[cells[n]] + np.sum(before & (cells[:n] == cells[n]))
        all_ = D[totals[n]] + np.sum(before & (totals[:n] == totals[n]))
        p *= (compiled.alpha[n] + own) / (compiled.alpha_total[n] + all_)
    np.add.at(C, cells, 1)
    np.add.at(D, totals, 1)
    return p


@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_predictives_multiply_to_f(_, model, network, X):
    compiled = compiled_of(X, model)
    rng = np.random.default_rng(1)
    tokens = rng.permutation(np.repeat(np.arange(len(compiled.values)), compiled.values))
    C, D = np.zeros(compiled.cells), np.zeros(compiled.totals)
    logs = 0.0
    for m in tokens:
        logs += np.log(predictive(compiled, C, D, m, rng.integers(compiled.states)))
    assert log_f(compiled, C) == pytest.approx(logs, abs=1e-10)
    assert_array_equal(np.bincount(compiled.owner, C, compiled.totals), D)
    assert C.sum() == X.sum() * len(compiled.draws)
    assert_allclose(log_f(compiled, np.stack([C, 0 * C])), [logs, 0.0], atol=1e-10)
    for n in range(len(compiled.draws)):
        assert set(compiled.cell_alpha[compiled.row[:, n]]) == {compiled.alpha[n]}
        assert set(compiled.total_alpha[compiled.total_row[:, n]]) == {compiled.alpha_total[n]}


def test_columns_are_contiguous_where_all_hidden_variables_are_axes():
    for model in (AllocationModel.nmf(5), AllocationModel.topics(5)):
        compiled = compiled_of(TOY, model)
        assert_array_equal(compiled.column, np.tile(np.arange(5), (len(compiled.draws), 1)))
        assert not (compiled.row % 5).any()
    compiled = compiled_of(np.ones((2, 2, 2), int), AllocationModel.tucker((2, 3, 2)))
    assert compiled.draws == ("r1", "r2", "r3", "i", "j", "k")
    assert_array_equal(compiled.column[2], np.arange(12))
    assert_array_equal(compiled.column[0], np.repeat([0, 1], 6))
    assert_array_equal(compiled.total_column[2], np.repeat(np.arange(6), 2))
    assert_array_equal(compiled.total_column[0], np.zeros(12))


def test_only_what_occurs_takes_room():
    model = AllocationModel.nmf(3, concentration=2.0)
    small = compiled_of(TOY, model)
    coords = np.stack(np.nonzero(TOY)) * 250_000
    large = compiled_of(sparse.COO(coords, TOY[TOY > 0], shape=(10**6, 10**6)), model)
    assert (large.cells, large.totals) == (small.cells, small.totals) == (3 * 8, 1 + 3 + 3)
    assert_array_equal(large.row, small.row)
    assert_allclose(large.alpha, [2 / 3, 2 / 3e6, 2 / 3e6])
    assert_allclose(large.alpha_total, [2.0, 2 / 3, 2 / 3])
    assert large.row.shape == (len(large.values), 3)


def test_tables_without_hidden_variables_are_a_constant():
    compiled = compiled_of(TOY, AllocationModel.topics(2, length=0.5))
    assert compiled.draws == ("r", "w")
    rows = TOY.sum(axis=1)
    expected = (gammaln(0.5 + rows) - gammaln(0.5)).sum() + gammaln(1.5) - gammaln(1.5 + 9)
    assert compiled.constant == pytest.approx(expected)
    T, a, b = 9, 1.0, 1.0
    factor = nbinom(a, b / (b + 1)).logpmf(T) + gammaln(T + 1) - gammaln(TOY + 1).sum()
    assert compiled.log_factor == pytest.approx(factor)


def test_tables_have_names_and_labels():
    X = xr.DataArray(TOY, dims=("from", "to"), coords={"to": list("wxyz")})
    model = AllocationModel.nmf(2)
    compiled = compiled_of(X, model)
    C = np.random.default_rng(0).random(compiled.cells)
    tables = compiled.tables(C)
    assert list(tables) == ["r", "i", "j"]
    assert tables["j"].dims == ("r", "to")
    assert tables["i"].attrs["cells"] == "all"
    assert "from" not in tables["i"].coords
    assert_array_equal(tables["j"]["to"], list("wxyz"))
    for table in tables.values():
        assert_allclose(table.sum(table.dims[-1]), 1.0)
    shared = compiled_of(
        np.eye(3, dtype=int), AllocationModel.symmetric_nmf(2, concentration_shared=1)
    )
    tables = shared.tables(np.zeros(shared.cells))
    assert list(tables) == ["r", "i"]
    assert tables["i"].attrs["drawn_by"] == "i, j"


@pytest.mark.parametrize(
    "model", [AllocationModel.nmf(2), AllocationModel("r->i,r->j,i->j", {"r": 2})]
)
def test_large_tables_hold_what_is_occupied(model, monkeypatch):
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
    together = xr.merge(
        [table.to_dataset(name=f"table_{name}") for name, table in tables.items()],
        join="exact",
        compat="no_conflicts",
    )
    for name, table in tables.items():
        assert together[f"table_{name}"].sizes == table.sizes
        assert table.attrs["pseudo_count"] == network.alpha[network.table.get(name, name)]


def test_tied_tables_reach_more_than_others_along_the_same_dim(monkeypatch):
    """The shared table of i and j has other indices than the table of s given i."""
    model = AllocationModel(
        "r -> i, r -> j, i -> s, s -> k", {"r": 2, "s": 2}, tied={("i", "j"): 0.5}
    )
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


LETTERS = "abcd"


@st.composite
def problems(draw):
    """A random graph of up to four variables, some of them tied, and both descriptions of it."""
    names = LETTERS[: draw(st.integers(2, 4))]
    pairs = list(itertools.combinations(names, 2))
    edges = [pair for pair in pairs if draw(st.booleans())]
    sizes = {name: draw(st.integers(1, 3)) for name in names}
    hidden = [name for name in names if draw(st.booleans())]
    assume(0 < len(hidden) < len(names))
    observed = draw(st.permutations([name for name in names if name not in hidden]))
    parents = {name: tuple(p for p, child in edges if child == name) for name in names}
    a, b = draw(st.sampled_from([0.3, 1.0, 4.0])), draw(st.sampled_from([0.5, 1.0, 3.0]))

    def sides(name):
        return [sizes[axis] for axis in (*parents[name], name)]

    alike = [pair for pair in pairs if sides(pair[0]) == sides(pair[1])]
    tied = draw(st.sampled_from([*alike, None])) if alike else None
    alpha = {name: a / prod(sides(name)) for name in names}
    table = {}
    if tied is not None:
        alpha |= {"t": 0.6}
        table = dict.fromkeys(tied, "t")
    text = ", ".join([*names, *(" -> ".join(edge) for edge in edges)])
    model = AllocationModel(
        text,
        {name: sizes[name] for name in hidden},
        observed,
        a,
        rate=b,
        tied={} if tied is None else {tied: 0.6},
    )
    network = Network(parents, sizes, alpha, hidden, observed, a, b, table)
    return model, network


@settings(max_examples=60)
@given(problems(), st.data())
def test_evidence_of_any_graph(problem, data):
    model, network = problem
    shape = tuple(network.sizes[name] for name in network.observed)
    cells = data.draw(st.lists(st.integers(0, prod(shape) - 1), min_size=1, max_size=4))
    X = np.bincount(cells, minlength=prod(shape)).reshape(shape)
    expected, _ = evidence(network, X)
    assert enumerate_evidence(compiled_of(X, model)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25)
@given(problems())
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
