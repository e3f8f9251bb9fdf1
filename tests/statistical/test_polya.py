"""Unbiased estimates of p(X), and how far one particle is off, against exact values."""

import math
from itertools import product

import numpy as np
import pytest

from daskfactor.allocation.exact import enumerate_allocations
from daskfactor.kernels.resampling import SCHEMES
from daskfactor.models.allocation import AllocationModel
from tests.allocation.cases import CASES, NAMES, TOY, enumerate_evidence
from tests.allocation.particles import batch_of, compiled_of, plan_of, relative_variance, score
from tests.tiers import tiered

pytestmark = pytest.mark.statistical

PARTICLES = 64
BATCHES_RUN = 1600  # 102,400 particles
MATRIX = AllocationModel.nmf(2)


def ratios(compiled, seed=11, batches=BATCHES_RUN, **changes):
    """p̂ / p of many batches."""
    plan = plan_of(compiled, PARTICLES, seed=seed, least=1.0, **changes)
    exact = enumerate_evidence(compiled) - plan.placement.constant
    found = [batch_of(plan, n) for n in range(batches)]
    values = np.exp([batch.log_z - exact for batch in found])
    if changes.get("resampling", "systematic") is not None and values.std() > 1e-9:
        assert sum(batch.resampled.sum() for batch in found) > batches // 20
    return values


@pytest.mark.parametrize(
    ("scheme", "own"),
    tiered(
        product((None, *SCHEMES), (False, True)),
        lambda case: (
            case in ((None, False), (None, True), ("systematic", True), ("residual", False))
        ),
    ),
)
def test_every_variant_is_unbiased(scheme, own):
    assert abs(score(ratios(compiled_of(TOY, MATRIX), resampling=scheme, own=own))) < 4


@pytest.mark.parametrize("scheme", tiered([None, "systematic"], bool))
@pytest.mark.parametrize(("_", "model", "X"), [(n, m, X) for n, m, _, X in CASES], ids=NAMES)
def test_every_kind_of_model_is_unbiased(_, model, X, scheme):
    assert abs(score(ratios(compiled_of(X, model), resampling=scheme))) < 4


@pytest.mark.parametrize("R", [1, 2, 3])
def test_variance_of_one_particle(R):
    """On a part of the toy for which the sum over orders is short."""
    X = TOY[:, 1:] if R == 3 else TOY
    compiled = compiled_of(X, AllocationModel.nmf(R))
    exact = relative_variance(compiled)
    plan = plan_of(compiled, 400_000, resampling=None, own=True)
    logs = batch_of(plan).log_weights
    log_p = enumerate_evidence(compiled) - plan.placement.constant
    found = float(np.var(np.exp(logs - log_p)))
    assert found == pytest.approx(exact, rel=0.1, abs=1e-12)


CHAIN, LETTERS = AllocationModel("r -> s -> i, r -> j", {"r": 1, "s": 2}), TOY[:, :3]
TIED = AllocationModel.symmetric_nmf(2, concentration_shared=0.3)


@pytest.mark.parametrize(
    "scheme", tiered([None, "systematic", "residual"], lambda own: own == "systematic")
)
@pytest.mark.parametrize(("model", "X"), [(MATRIX, TOY), (TIED, LETTERS), (CHAIN, TOY[:, 1:])])
def test_posterior_means(model, X, scheme):
    """Weighted by the batches' estimates, counts have their exact means."""
    compiled = compiled_of(X, model)
    exact = enumerate_allocations(compiled).mean_counts
    plan = plan_of(compiled, PARTICLES, resampling=scheme, least=0.9)
    found = [batch_of(plan, n) for n in range(BATCHES_RUN)]
    weights = np.exp([batch.log_z for batch in found])
    weights /= weights.mean()
    counts = np.array([batch.mean_counts for batch in found])
    means = (weights[:, None] * counts).mean(axis=0)
    error = (weights[:, None] * (counts - means)).std(axis=0) / math.sqrt(BATCHES_RUN)
    assert (np.abs(means - exact) < 5 * error + 1e-9).all()
