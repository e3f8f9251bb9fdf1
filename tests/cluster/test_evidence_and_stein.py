"""Evidence and particles on the workers of a cluster give the numbers of one machine."""

import warnings

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import SamplingWarning
from tests.cluster.support import KillOnce

pytestmark = pytest.mark.cluster

CELLS = np.array([[2.0, 1, 0, 4], [0, 3, 1, 1], [5, 0, 2, 0]])
COUNTS = np.array([[2, 1, 1, 0], [0, 0, 1, 2], [0, 0, 1, 1]])
LENGTHS = {"temperatures": 2, "draws": 100, "tune": 20, "every": 2}
SAMPLED = dfac.ThermodynamicIntegration(**LENGTHS, sampler=dfac.PSGLD(warm_start=3))
EXACT = dfac.ThermodynamicIntegration(temperatures=4, draws=200, tune=20)
ISLANDS = dfac.SequentialMonteCarlo(particles=32, islands=4)
STARTS = dfac.VariationalBayes(starts=3)
IN_TASKS = {"blocks": 2}, {"executor": "tasks"}


@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")  # short chains
@pytest.mark.parametrize(
    ("V", "model", "methods", "options", "there"),
    [
        (CELLS, dfac.TweedieNMF(2), (EXACT, SAMPLED), *IN_TASKS),
        (COUNTS, dfac.AllocationModel.nmf(2), (ISLANDS, STARTS, dfac.Enumeration()), {}, {}),
    ],
    ids=["temperatures", "islands and starts"],
)
def test_evidence(V, model, methods, options, there, here):
    options = {"random_seed": 1, "progressbar": False} | options
    there = options | there | {"client": here}
    for method in methods:
        one, other = (dfac.log_evidence(V, model, method, **own) for own in (options, there))
        assert one.value == other.value
        assert one.trace.identical(other.trace)


def test_discrepancies(here):
    rng = np.random.default_rng(0)
    V = rng.gamma(2.0, size=(30, 24))
    W, H = rng.gamma(1.0, size=(5, 30, 2)), rng.gamma(1.0, size=(5, 2, 24))
    model = dfac.SILFNMF(2, threshold=100.0)
    options = {"blocks": 3, "progressbar": False}
    wanted = dfac.stein_discrepancy((W, H), V, model, **options)
    for chosen in ({"executor": "tasks"}, {}):
        found = dfac.stein_discrepancy((W, H), V, model, client=here, **chosen, **options)
        assert found.identical(wanted)


@pytest.mark.slow
def test_particles_in_a_store_are_read_by_workers(client, tmp_path, monkeypatch):
    monkeypatch.setattr("daskfactor.stein.particles.memory_budget", lambda limit: 0)
    V = np.random.default_rng(0).poisson(3.0, (20, 16)).astype(float)
    model, options = dfac.TweedieNMF(2), {"blocks": 2, "progressbar": False}
    run = {"draws": 6, "tune": 4, "random_seed": 0, "store": tmp_path / "run.zarr"} | options
    trace = dfac.sample(V, model, **run)
    here = dfac.stein_discrepancy(trace, V, model, **options)
    there = dfac.stein_discrepancy(trace, V, model, client=client, executor="tasks", **options)
    assert there.identical(here)


@pytest.mark.full
def test_particles_made_by_workers_are_those_made_here(client):
    V = np.random.default_rng(0).gamma(2.0, size=(24, 20))
    gaps = np.where(V > 5.0, np.nan, V)
    counts = sparse.csr_array(np.floor(V))
    ensemble = dfac.Ensemble(max_iter=10)
    cases = [
        (gaps, dfac.SILFNMF(4), ensemble, {}),
        (counts, dfac.TweedieNMF(2), ensemble, {"unstored": "missing"}),
        (V, dfac.SILFNMF(2), dfac.SimplexHMC(draws=4, tune=3, steps=2), {}),
        (gaps, dfac.SILFNMF(2), dfac.SVGD(steps=2), {}),
    ]
    settings = {"blocks": 2, "progressbar": False, "random_seed": 1, "particles": 3, "pilot": 1}

    def made(case, **more):
        data, model, method, options = case
        # So few steps do not get far.
        with warnings.catch_warnings(action="ignore", category=SamplingWarning):
            return dfac.stein_posterior(data, model, method, **settings, **options, **more)

    here = [made(case) for case in cases]
    for number, (case, expected) in enumerate(zip(cases, here, strict=True)):
        name = ("tasks", "ring", "auto")[number % 3]
        there = made(case, client=client, executor=name)
        for group in ("posterior", "stein", "constant_data"):
            assert there[group].to_dataset().equals(expected[group].to_dataset())
        np.testing.assert_array_equal(there["sample_stats/weight"], expected["sample_stats/weight"])


@pytest.mark.full
def test_a_worker_that_dies_in_a_warm_start_costs_one_start(client, monkeypatch):
    """Starts whose bands are in the workers, as those of large data are."""
    monkeypatch.setattr("daskfactor.stein.ensemble.SINGLE", 0)
    V = np.random.default_rng(0).poisson(3.0, (24, 20)).astype(float)
    V[3, 4] = np.nan
    settings = {"blocks": 2, "progressbar": False, "random_seed": 1, "particles": 3, "pilot": 1}
    ensemble = dfac.Ensemble(max_iter=60, tol=0.0)
    here = dfac.stein_posterior(V, dfac.TweedieNMF(2), ensemble, **settings)
    kill = KillOnce(client, lambda event: 0 < event.done % 1 < 1)  # within a start
    run = {"client": client, "executor": "ring", "callback": kill} | settings
    there = dfac.stein_posterior(V, dfac.TweedieNMF(2), ensemble, **run)
    assert kill.killed
    assert there["posterior"].to_dataset().equals(here["posterior"].to_dataset())


@pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")  # short chains
def test_a_worker_that_dies_costs_an_evidence_one_round(client, monkeypatch):
    """Every temperature is a task; the states of all are here after each round."""
    monkeypatch.setattr("daskfactor.evidence.thermodynamic.FIRST_ROUND", 0.2)
    settings, rounds = {"random_seed": 1, "progressbar": False}, []
    here = dfac.log_evidence(CELLS, dfac.TweedieNMF(2), EXACT, **settings)
    kill = KillOnce(client, lambda event: event.phase == "draw")

    def callback(event):
        rounds.extend([event.done] if event.phase == "draw" else [])
        kill(event)

    run = {"client": client, "executor": "tasks", "callback": callback} | settings
    there = dfac.log_evidence(CELLS, dfac.TweedieNMF(2), EXACT, **run)
    assert kill.killed
    assert there.value == here.value
    assert rounds == [20, 60, 100]
