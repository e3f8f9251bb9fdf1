"""Temperatures on the workers of a cluster give the numbers of one machine."""

import numpy as np
import pytest

import daskfactor as dfac
from tests.cluster.support import cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning"),  # short chains
]

CELLS = np.array([[2.0, 1, 0, 4], [0, 3, 1, 1], [5, 0, 2, 0]])
COUNTS = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
LENGTHS = {"temperatures": 2, "draws": 100, "tune": 20, "every": 2}
SAMPLED = dfac.ThermodynamicIntegration(**LENGTHS, sampler=dfac.PSGLD(warm_start=3))
EXACT = dfac.ThermodynamicIntegration(temperatures=4, draws=200, tune=20)
ISLANDS = dfac.SequentialMonteCarlo(particles=32, islands=4)
STARTS = dfac.VariationalBayes(starts=3)
IN_TASKS = {"blocks": 2}, {"executor": "tasks"}


@pytest.mark.parametrize(
    ("V", "model", "methods", "options", "there"),
    [
        (CELLS, dfac.TweedieNMF(2), (EXACT, SAMPLED), *IN_TASKS),
        (COUNTS, dfac.AllocationModel.nmf(2), (ISLANDS, STARTS, dfac.Enumeration()), {}, {}),
    ],
    ids=["temperatures", "islands and starts"],
)
def test_same_numbers_as_without_a_cluster(V, model, methods, options, there):
    options = {"random_seed": 1, "progressbar": False} | options
    here = [dfac.log_evidence(V, model, method, **options) for method in methods]
    with cluster(2, processes=False) as client:
        there = options | there | {"client": client}
        found = [dfac.log_evidence(V, model, method, **there) for method in methods]
    for one, other in zip(here, found, strict=True):
        assert one.value == other.value
        assert one.trace.identical(other.trace)
