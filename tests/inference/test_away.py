"""What is asked of bands could be asked of bands in other processes: of all samplers and models."""

import pickle

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.executors.state import ChainState

LARGEST = 4096
"""Bytes of a function, with what it is told, that goes to every worker."""
RNG = np.random.default_rng(0)
COUNTS = RNG.poisson(2.0, (24, 18)).astype(np.float64)
TALL = np.concatenate([COUNTS] * 20)
X = RNG.normal(size=(24, 2))
CASES = {
    "PSGLD": (dfac.TweedieNMF(2, beta=0.5), dfac.PSGLD()),
    "SGHMC": (dfac.TweedieNMF(2, beta=1.0), dfac.SGHMC()),
    "BlockHMC": (dfac.TweedieNMF(2, beta=1.0, shape_w="auto"), dfac.BlockHMC()),
    "shared rates": (dfac.TweedieNMF("auto", beta=1.0), dfac.PSGLD()),
    "columns": (dfac.NegativeBinomialNMF(2, dispersion="column"), dfac.PSGLD()),
    "covariates": (dfac.TweedieNMF(2, beta=1.0, covariates_w=X), dfac.PSGLD()),
    "frozen": (dfac.TweedieNMF(2, beta=1.0, fixed_h=np.ones((1, 18))), dfac.PSGLD()),
    "Gaussian": (dfac.GaussianMF(2, biases=True), dfac.SGHMC()),
    "Gaussian covariates": (dfac.GaussianMF(2, covariates_w=X), dfac.SGHMC()),
}


@pytest.fixture
def returned(monkeypatch):
    """Have functions, their arguments and what they return go as bytes; count the latter."""
    here, sizes = ChainState.each, dict[str, int]()

    def each(state, function, factor=None, *given):
        packed = pickle.dumps(function)
        sent = pickle.loads(packed)
        found = here(state, sent, factor, *pickle.loads(pickle.dumps(given)))
        name = getattr(function, "func", function).__name__
        assert len(packed) < LARGEST, name
        sizes[name] = max([sizes.get(name, 0), *(len(pickle.dumps(own)) for own in found)])
        return list(map(pickle.loads, map(pickle.dumps, found)))

    monkeypatch.setattr(ChainState, "each", each)
    return sizes


def draws(V, case):
    model, sampler = CASES[case]
    options = {"draws": 4, "tune": 20, "random_seed": 1, "progressbar": False}
    trace = dfac.sample(dfac.as_blocks(V, 2), model, sampler, **options)
    return {name: own.values for name, own in trace["posterior"].data_vars.items()}


@pytest.mark.filterwarnings("ignore::daskfactor.errors.DaskfactorWarning")
@pytest.mark.parametrize("case", CASES)
def test_functions_of_bands_can_go_elsewhere_and_what_they_return_does_not_grow(case, request):
    expected = draws(COUNTS, case)
    sizes = request.getfixturevalue("returned")
    found = draws(COUNTS, case)
    assert sizes
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    if "covariates" not in case:  # which have a row for each of COUNTS
        before = dict(sizes)
        draws(TALL, case)
        assert {name: own for name, own in sizes.items() if own > before[name] + 8} == {}
