import itertools
import pickle
from math import prod

import numpy as np
import pytest
import sparse
import xarray as xr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import gammaln, logsumexp
from scipy.stats import nbinom

from daskfactor.allocation import tables as tables_module
from daskfactor.allocation.compiled_model import compile_urns
from daskfactor.allocation.counts import as_counts
from daskfactor.allocation.exact import enumerate_evidence
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import CASES, NAMES, TOY
from tests.allocation.sequences import Network, evidence


def urns_of(X, model):
    return compile_urns(model, as_counts(X, model))


def cells_of(urns, m, h):
    return urns.row[m] + urns.column[:, h]


def totals_of(urns, m, h):
    return urns.total_row[m] + urns.total_column[:, h]


def predictive(urns, C, D, m, h):
    """Probability of a token at observed cell m with hidden state h, and its additions."""
    cells, totals = cells_of(urns, m, h), totals_of(urns, m, h)
    p = 1.0
    for n in range(len(cells)):
        before = urns.group[:n] == urns.group[n]
        own = C[cells[n]] + np.sum(before & (cells[:n] == cells[n]))
        all_ = D[totals[n]] + np.sum(before & (totals[:n] == totals[n]))
        p *= (urns.alpha[n] + own) / (urns.alpha_total[n] + all_)
    np.add.at(C, cells, 1)
    np.add.at(D, totals, 1)
    return p


@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_predictives_multiply_to_f(_, model, network, X):
    urns = urns_of(X, model)
    rng = np.random.default_rng(1)
    tokens = rng.permutation(np.repeat(np.arange(len(urns.values)), urns.values))
    C, D = np.zeros(urns.cells), np.zeros(urns.totals)
    logs = 0.0
    for m in tokens:
        logs += np.log(predictive(urns, C, D, m, rng.integers(urns.states)))
    assert urns.log_f(C) == pytest.approx(logs, abs=1e-10)
    np.testing.assert_array_equal(np.bincount(urns.owner, C, urns.totals), D)
    assert C.sum() == X.sum() * len(urns.draws)
    np.testing.assert_allclose(urns.log_f(np.stack([C, 0 * C])), [logs, 0.0], atol=1e-10)
    for n in range(len(urns.draws)):
        assert set(urns.cell_alpha[urns.row[:, n]]) == {urns.alpha[n]}
        assert set(urns.total_alpha[urns.total_row[:, n]]) == {urns.alpha_total[n]}


def test_columns_are_contiguous_where_all_hidden_variables_are_axes():
    for model in (AllocationModel.nmf(5), AllocationModel.topics(5)):
        urns = urns_of(TOY, model)
        np.testing.assert_array_equal(urns.column, np.tile(np.arange(5), (len(urns.draws), 1)))
        assert not (urns.row % 5).any()
    urns = urns_of(np.ones((2, 2, 2), int), AllocationModel.tucker((2, 3, 2)))
    assert urns.draws == ("r1", "r2", "r3", "i", "j", "k")
    np.testing.assert_array_equal(urns.column[2], np.arange(12))
    np.testing.assert_array_equal(urns.column[0], np.repeat([0, 1], 6))
    np.testing.assert_array_equal(urns.total_column[2], np.repeat(np.arange(6), 2))
    np.testing.assert_array_equal(urns.total_column[0], np.zeros(12))


def test_only_what_occurs_takes_room():
    model = AllocationModel.nmf(3, concentration=2.0)
    small = urns_of(TOY, model)
    coords = np.stack(np.nonzero(TOY)) * 250_000
    large = urns_of(sparse.COO(coords, TOY[TOY > 0], shape=(10**6, 10**6)), model)
    assert (large.cells, large.totals) == (small.cells, small.totals) == (3 * 8, 1 + 3 + 3)
    np.testing.assert_array_equal(large.row, small.row)
    np.testing.assert_allclose(large.alpha, [2 / 3, 2 / 3e6, 2 / 3e6])
    np.testing.assert_allclose(large.alpha_total, [2.0, 2 / 3, 2 / 3])
    assert large.row.shape == (len(large.values), 3)


def test_tables_without_hidden_variables_are_a_constant():
    urns = urns_of(TOY, AllocationModel.topics(2, length=0.5))
    assert urns.draws == ("r", "w")
    rows = TOY.sum(axis=1)
    expected = (gammaln(0.5 + rows) - gammaln(0.5)).sum() + gammaln(1.5) - gammaln(1.5 + 9)
    assert urns.constant == pytest.approx(expected)
    T, a, b = 9, 1.0, 1.0
    factor = nbinom(a, b / (b + 1)).logpmf(T) + gammaln(T + 1) - gammaln(TOY + 1).sum()
    assert urns.log_factor == pytest.approx(factor)


def test_tables_have_names_and_labels():
    X = xr.DataArray(TOY, dims=("from", "to"), coords={"to": list("wxyz")})
    model = AllocationModel.nmf(2)
    urns = urns_of(X, model)
    C = np.random.default_rng(0).random(urns.cells)
    tables = urns.tables(C)
    assert list(tables) == ["r", "i", "j"]
    assert tables["j"].dims == ("r", "to")
    assert tables["i"].attrs["cells"] == "all"
    assert "from" not in tables["i"].coords
    np.testing.assert_array_equal(tables["j"]["to"], list("wxyz"))
    for table in tables.values():
        np.testing.assert_allclose(table.sum(table.dims[-1]), 1.0)
    shared = urns_of(np.eye(3, dtype=int), AllocationModel.symmetric_nmf(2, concentration_shared=1))
    tables = shared.tables(np.zeros(shared.cells))
    assert list(tables) == ["r", "i"]
    assert tables["i"].attrs["drawn_by"] == "i, j"


@pytest.mark.parametrize(
    "model", [AllocationModel.nmf(2), AllocationModel("r->i,r->j,i->j", {"r": 2})]
)
def test_large_tables_hold_what_is_occupied(model, monkeypatch):
    X = xr.DataArray(TOY[:2], dims=("from", "to"), coords={"to": list("wxyz")})
    urns = urns_of(X, model)
    C = np.random.default_rng(0).random(urns.cells)
    whole = urns.tables(C)
    monkeypatch.setattr(tables_module, "LARGEST_TABLE", 0)
    part = urns.tables(C)["j"]
    assert part.attrs["cells"] == "occupied"
    if part.dims == ("r", "to"):
        xr.testing.assert_allclose(part, whole["j"])
        return
    assert part.dims == ("cell_j", "r")
    assert part.sizes["cell_j"] == np.count_nonzero(TOY[:2])
    for cell in part:
        i, j = int(cell["from_of_cell_j"]), cell["to_of_cell_j"].item()
        np.testing.assert_allclose(cell, whole["j"].isel({"from": i}).sel(to=j))


@pytest.mark.parametrize("limit", [0, 10**6])
@pytest.mark.parametrize(("_", "model", "network", "X"), CASES, ids=NAMES)
def test_tables_fit_into_one_dataset(_, model, network, X, limit, monkeypatch):
    monkeypatch.setattr(tables_module, "LARGEST_TABLE", limit)
    X = X.copy()
    X[0] = 0  # an index that does not occur
    urns = urns_of(X, model)
    tables = urns.tables(np.random.default_rng(0).random(urns.cells))
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
    monkeypatch.setattr(tables_module, "LARGEST_TABLE", 0)
    tables = (urns := urns_of(X, model)).tables(np.zeros(urns.cells))
    assert tables["i"].dims == ("r", "i")
    np.testing.assert_array_equal(tables["i"]["i"], [0, 2, 3])
    assert tables["s"].dims == ("cell_s", "s")
    np.testing.assert_array_equal(tables["s"]["i_of_cell_s"], [0, 3])


def test_urns_travel():
    urns = urns_of(TOY, AllocationModel.nmf(2))
    again = pickle.loads(pickle.dumps(urns))
    assert enumerate_evidence(again) == enumerate_evidence(urns)


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
    assert enumerate_evidence(urns_of(X, model)) == pytest.approx(expected, abs=1e-9)


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
            logs.append(enumerate_evidence(urns_of(X, model)))
    assert logsumexp(logs) == pytest.approx(law.logcdf(most), abs=1e-9)
