"""Particles that move: unbiased estimates of p(X) and posterior means, against exact values."""

import math

import numpy as np
import pytest

from daskfactor.allocation.batches import run_batch
from daskfactor.allocation.exact import enumerate_allocations
from daskfactor.kernels.resampling import SCHEMES
from daskfactor.kernels.views import Workspace
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import CASES, NAMES, TOY, enumerate_evidence
from tests.allocation.particles import compiled_of, plan_of, score
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

PARTICLES = 8
BATCHES_RUN = 4000
"""Estimates have standard errors of 0.1 to 0.6 % then, 1.1 % with an order for each particle."""
OF_FEW = 16_000
"""Where particles are few, or hidden states rarely mix: 0.4 to 1.1 %."""
MATRIX = AllocationModel.nmf(2)
ALIKE = {"tucker", "tables without hidden variables"}  # while tokens are few


def batches_of(compiled, seed=11, moves=1, count=BATCHES_RUN, **changes):
    settings = {"particles": PARTICLES, "moves": moves, "seed": seed, "least": 1 - 1e-6} | changes
    plan = plan_of(compiled, settings.pop("particles"), 0, **settings)
    workspace = Workspace()
    return [run_batch(plan, n, workspace) for n in range(count)], plan


def ratios(compiled, **changes):
    """p̂ / p of many batches."""
    found, plan = batches_of(compiled, **changes)
    exact = enumerate_evidence(compiled) - plan.placement.constant
    assert sum(batch.resampled.sum() for batch in found) > len(found) // 20
    return np.exp([batch.log_z - exact for batch in found])


@pytest.mark.parametrize(
    ("scheme", "own"),
    tiered(
        [*((scheme, False) for scheme in SCHEMES), ("systematic", True)],
        lambda own: own[0] in ("systematic", "multinomial"),
    ),
)
def test_every_scheme_is_unbiased(scheme, own):
    assert abs(score(ratios(compiled_of(TOY, MATRIX), resampling=scheme, own=own))) < 4


@pytest.mark.parametrize(("name", "model", "X"), [(n, m, X) for n, m, _, X in CASES], ids=NAMES)
def test_every_kind_of_model_is_unbiased(name, model, X):
    assert abs(score(ratios(compiled_of(X, model), own=name in ALIKE))) < 4


def test_many_sweeps_are_unbiased():
    assert abs(score(ratios(compiled_of(TOY, MATRIX), moves=4, seed=12))) < 4


@pytest.mark.parametrize(
    ("R", "a", "particles", "least", "scheme"),
    [
        (3, 0.1, 8, 0.5, "systematic"),
        (3, 1.0, 2, 1.0, "multinomial"),
        *tiered(
            [
                (2, 0.1, 8, 1.0, "multinomial"),
                (2, 0.1, 4, 1.0, "systematic"),
                (2, 1.0, 4, 1.0, "multinomial"),
                (3, 1.0, 2, 1.0, "systematic"),
            ],
            lambda own: False,
        ),
    ],
)
def test_few_particles_are_unbiased(R, a, particles, least, scheme):
    """Where the weights had a say in when particles move, these would be up to 8 % too small.

    Few particles show it: the error of one that is taken for another falls with their number.
    """
    compiled = compiled_of(TOY, AllocationModel.nmf(R, concentration=a))
    values = ratios(compiled, particles=particles, least=least, resampling=scheme, count=OF_FEW)
    assert abs(score(values)) < 4


CHAIN, LETTERS = AllocationModel("r -> s -> i, r -> j", {"r": 1, "s": 2}), TOY[:, :3]
TIED = AllocationModel.symmetric_nmf(2, concentration_shared=0.3)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize(("model", "X"), [(MATRIX, TOY), (TIED, LETTERS), (CHAIN, TOY[:, 1:])])
def test_posterior_means(model, X, own):
    """Weighted by the batches' estimates, counts have their exact means."""
    compiled = compiled_of(X, model)
    exact = enumerate_allocations(compiled).mean_counts
    found, _ = batches_of(compiled, own=own)
    weights = np.exp([batch.log_z for batch in found])
    weights /= weights.mean()
    counts = np.array([batch.mean_counts for batch in found])
    means = (weights[:, None] * counts).mean(axis=0)
    error = (weights[:, None] * (counts - means)).std(axis=0) / math.sqrt(BATCHES_RUN)
    assert (np.abs(means - exact) < 5 * error + 1e-9).all()
