import itertools
import time
import tracemalloc

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import chisquare, nbinom

from daskfactor.allocation.compiled_model import compile_model
from daskfactor.allocation.counts import as_counts, simulate
from daskfactor.errors import ModelError, OptionError
from daskfactor.models.allocation import AllocationModel
from daskfactor.models.tweedie import TweedieNMF
from tests.allocation.cases import enumerate_evidence
from tests.refusals import refused

NMF = AllocationModel.nmf(3, concentration=20.0)


def test_what_comes_back_fits_together():
    made = simulate(NMF, (30, 40), total=5000, random_seed=1)
    assert made.dims == ("i", "j", "r")
    assert made.allocation.shape == (30, 40, 3)
    assert made.counts.dtype == made.allocation.dtype == np.int64
    assert_array_equal(made.allocation.sum(axis=2).todense(), made.counts.todense())
    assert made.counts.sum() == 5000
    shapes = {name: table.shape for name, table in made.tables.items()}
    assert shapes == {"r": (3,), "i": (3, 30), "j": (3, 40)}
    for table in made.tables.values():
        assert_allclose(table.sum(axis=-1), 1.0)
    # With so many tokens, tables are near the shares that were drawn from them.
    shares = made.allocation.sum(axis=(0, 1)).todense() / 5000
    assert_allclose(made.tables["r"], shares, atol=0.05)
    assert as_counts(made.counts, NMF).total == 5000
    same, other = (simulate(NMF, (30, 40), total=5000, random_seed=seed) for seed in (1, 2))
    assert (made.allocation != same.allocation).nnz == 0
    assert_array_equal(made.tables["i"], same.tables["i"])
    assert (made.counts != other.counts).nnz
    none = simulate(NMF, (3, 4), total=0, random_seed=0)
    assert none.counts.nnz == none.allocation.nnz == 0
    assert none.counts.shape == (3, 4)


def test_sizes_may_be_the_models_own():
    model = AllocationModel("r -> i, r -> j", {"r": 2}, {"j": 4, "i": 3})
    assert simulate(model, total=5, random_seed=0).counts.shape == (4, 3)
    match = "size 5 along 'j', but the model says 4"
    refused(ModelError, match, simulate, model, (5, 3))


def test_what_cannot_be_drawn():
    for model, shape, options, match in (
        (TweedieNMF(2), (3, 4), {}, r"model must be an AllocationModel\(\.\.\.\), got"),
        (NMF, None, {}, "sizes of the observed variables i, j are not known"),
        (NMF, 5, {}, "shape must be a list of sizes such as"),
        (NMF, (10**10, 10**10), {}, "choose a smaller shape"),
        (NMF, (10**200, 10**200), {}, r"would have 10\^400 cells"),
        (NMF, (3, 4), {"total": -1}, "total must be a whole number of at least 0, got -1"),
        (NMF, (3, 4), {"total": 10**13}, r"1e\+13 tokens are more than can be drawn"),
        (AllocationModel.nmf(2, rate=1e-30), (3, 4), {}, "more than can be drawn one by one"),
    ):
        refused(OptionError, match, simulate, model, shape, random_seed=0, **options)


def test_the_total_is_negative_binomial():
    model = AllocationModel.nmf(1, rate=0.2, concentration=3.0)
    totals = [simulate(model, (1, 1), random_seed=seed).counts.data.sum() for seed in range(1000)]
    law = nbinom(3.0, 0.2 / 1.2)
    assert abs(np.mean(totals) - law.mean()) < 5 * law.std() / np.sqrt(1000)
    assert np.var(totals) == pytest.approx(law.var(), rel=0.25)


def test_cost_follows_the_tokens_and_not_the_shape():
    model = AllocationModel.nmf(5, concentration=1e5)
    simulate(model, (100, 100), total=100, random_seed=0)
    tracemalloc.start()
    start = time.perf_counter()
    made = simulate(model, (10**6, 10**6), total=10_000, random_seed=0)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.counts.sum() == 10_000
    assert made.counts.nnz > 5000
    assert list(made.tables) == ["r"]
    assert seconds < 2.0
    assert peak < 20e6


MODELS = {
    "nmf": (AllocationModel.nmf(2, concentration=2.0), (2, 2)),
    "symmetric": (AllocationModel.symmetric_nmf(2, concentration_shared=0.3), (2, 2)),
    "collider": (AllocationModel("r -> i, s -> i, s -> j", {"r": 2, "s": 2}), (2, 2)),
    "tied chain": (AllocationModel("s -> i -> j", {"s": 2}, tied={("i", "j"): 0.4}), (2, 2)),
}


@pytest.mark.statistical
@pytest.mark.parametrize("name", MODELS)
def test_the_law_of_the_counts(name):
    """Frequencies of every X of three tokens beside its exact probability."""
    model, shape = MODELS[name]
    draws, total, found = 2000, 3, {}
    for seed in range(draws):
        X = simulate(model, shape, total=total, random_seed=seed).counts.todense()
        found[X.tobytes()] = found.get(X.tobytes(), 0) + 1
    law = nbinom(model.total_shape, model.rate / (model.rate + 1)).logpmf(total)
    expected, seen = [], []
    for cells in itertools.combinations_with_replacement(range(4), total):
        X = np.bincount(cells, minlength=4).reshape(shape)
        exact = enumerate_evidence(compile_model(model, as_counts(X, model)))
        expected.append(draws * np.exp(exact - law))
        seen.append(found.get(X.tobytes(), 0))
    assert sum(expected) == pytest.approx(draws)
    assert chisquare(seen, expected).pvalue > 1e-4


@pytest.mark.statistical
def test_the_joint_law_of_tables_and_tokens():
    """θ is Dirichlet, and a token is a draw from it: E θ = E C/T and E θ C/T = E θ²."""
    a, R, draws, total = 1.5, 3, 3000, 4
    model, (theta, share) = AllocationModel.nmf(R, concentration=a), np.empty((2, draws))
    for seed in range(draws):
        made = simulate(model, (2, 2), total=total, random_seed=seed)
        theta[seed] = made.tables["r"][0]
        share[seed] = made.allocation[:, :, 0].data.sum() / total
    for power, exact in ((1, 1 / R), (2, (1 / R) * (a / R + 1) / (a + 1))):
        for values in (theta**power, share * theta ** (power - 1)):
            assert abs(values.mean() - exact) < 5 * values.std() / np.sqrt(draws)
