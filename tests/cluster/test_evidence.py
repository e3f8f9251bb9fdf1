"""Temperatures on the workers of a cluster give the numbers of one machine."""

import numpy as np
import pytest

import daskfactor as dfac
from tests.cluster.support import cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning"),  # short chains
]

X = np.array([[2.0, 1, 0, 4], [0, 3, 1, 1], [5, 0, 2, 0]])
SAMPLED = dfac.ThermodynamicIntegration(
    temperatures=2, draws=100, tune=20, every=2, sampler=dfac.PSGLD(warm_start=3)
)
EXACT = dfac.ThermodynamicIntegration(temperatures=4, draws=200, tune=20)


def test_same_numbers_as_without_a_cluster():
    options = {"random_seed": 1, "progressbar": False, "blocks": 2}
    model = dfac.TweedieNMF(2)
    here = [dfac.log_evidence(X, model, method, **options) for method in (EXACT, SAMPLED)]
    with cluster(2, processes=False) as client:
        there = [
            dfac.log_evidence(X, model, method, client=client, executor="tasks", **options)
            for method in (EXACT, SAMPLED)
        ]
    for one, other in zip(here, there, strict=True):
        assert one.value == other.value
        np.testing.assert_array_equal(one.trace["mean"], other.trace["mean"])


def test_islands_and_starts_on_a_cluster():
    options = {"random_seed": 1, "progressbar": False}
    model = dfac.AllocationModel.nmf(2)
    methods = (
        dfac.SequentialMonteCarlo(particles=32, islands=4),
        dfac.VariationalBayes(starts=3),
        dfac.Enumeration(),
    )
    counts = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
    here = [dfac.log_evidence(counts, model, method, **options) for method in methods]
    with cluster(2, processes=False) as client:
        there = [
            dfac.log_evidence(counts, model, method, client=client, **options) for method in methods
        ]
    for one, other in zip(here, there, strict=True):
        assert one.value == other.value
        assert one.trace.identical(other.trace)
