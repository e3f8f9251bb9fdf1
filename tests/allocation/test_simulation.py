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
    assert {name: table.shape for name, table in made.tables.items()} == {
        "r": (3,),
        "i": (3, 30),
        "j": (3, 40),
    }
    for table in made.tables.values():
        assert_allclose(table.sum(axis=-1), 1.0)
    # With so many tokens, tables are near the shares that were drawn from them.
    shares = made.allocation.sum(axis=(0, 1)).todense() / 5000
    assert_allclose(made.tables["r"], shares, atol=0.05)
    assert as_counts(made.counts, NMF).total == 5000


def test_the_same_seed_gives_the_same_data():
    one, same, other = (simulate(NMF, (30, 40), total=50, random_seed=seed) for seed in (3, 3, 4))
    assert (one.allocation != same.allocation).nnz == 0
    assert_array_equal(one.tables["i"], same.tables["i"])
    assert (one.counts != other.counts).nnz


def test_sizes_may_be_the_models_own():
    model = AllocationModel("r -> i, r -> j", {"r": 2}, {"j": 4, "i": 3})
    assert simulate(model, total=5, random_seed=0).counts.shape == (4, 3)
    refused(OptionError, "sizes of the observed variables i, j are not known", simulate, NMF)
    refused(ModelError, "size 5 along 'j', but the model says 4", simulate, model, (5, 3))
    with pytest.raises(OptionError, match="total must be a whole number of at least 0, got -1"):
        simulate(model, total=-1)
    refused(OptionError, "choose a smaller shape", simulate, NMF, (10**10, 10**10))


def test_no_tokens_at_all():
    made = simulate(NMF, (3, 4), total=0, random_seed=0)
    assert made.counts.nnz == made.allocation.nnz == 0
    assert made.counts.shape == (3, 4)


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
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
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
    draws, total = 2000, 3
    found = {}
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
    model = AllocationModel.nmf(R, concentration=a)
    theta, share = np.empty((2, draws))
    for seed in range(draws):
        made = simulate(model, (2, 2), total=total, random_seed=seed)
        theta[seed] = made.tables["r"][0]
        share[seed] = made.allocation[:, :, 0].data.sum() / total
    mean, second = 1 / R, (1 / R) * (a / R + 1) / (a + 1)
    for values, exact in (
        (theta, mean),
        (share, mean),
        (theta**2, second),
        (theta * share, second),
    ):
        assert abs(values.mean() - exact) < 5 * values.std() / np.sqrt(draws)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TweedieNMF(2), (3, 4)), r"model must be an AllocationModel\(\.\.\.\), got"),
        ((AllocationModel.nmf(2), 5), "shape must be a list of sizes such as"),
        ((AllocationModel.nmf(2), (10**200, 10**200)), r"would have 10\^400 cells"),
        ((AllocationModel.nmf(2, rate=1e-30), (3, 4)), "more than can be drawn one by one"),
    ],
)
def test_what_cannot_be_drawn(arguments, message):
    refused(OptionError, message, simulate, *arguments, random_seed=0)
    with pytest.raises(OptionError, match="1e\\+13 tokens are more than can be drawn"):
        simulate(AllocationModel.nmf(2), (3, 4), total=10**13)
