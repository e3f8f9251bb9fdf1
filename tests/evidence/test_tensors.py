"""Evidence of tensors: what is asked, refused, and told; `tests/statistical` has its value."""

import numpy as np
import pytest
import sparse

import daskfactor as dfac
from daskfactor.errors import ModelError
from tests.refusals import refused

# So few draws are guessed from, and a warning says so.
pytestmark = pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
QUIET = {"progressbar": False, "random_seed": 0}
QUICK = dfac.ThermodynamicIntegration(temperatures=3, draws=120, tune=60)


@pytest.fixture(scope="module")
def counts():
    rng = np.random.default_rng(0)
    sizes = (rng.gamma(0.5, 1.0, (n, 2)) for n in (9, 7, 5))
    return rng.poisson(3 * np.einsum("ik,jk,lk->ijl", *sizes))


def test_sparse_and_dense_counts_have_one_evidence(counts):
    """Zeros that are not stored are summed, those that are stored are looked at."""
    dense, thin = (
        dfac.log_evidence(V, dfac.CP(2), QUICK, **QUIET)
        for V in (counts.astype(float), sparse.COO(counts))
    )
    errors = np.hypot(dense.standard_error, thin.standard_error)
    assert abs(dense.value - thin.value) < 4 * errors
    assert errors < 10.0  # of 225 nats


def test_every_executor_gives_the_same_evidence(counts):
    one, two = (
        dfac.log_evidence(counts, dfac.CP(2), QUICK, executor=executor, **QUIET).value
        for executor in ("serial", "threads")
    )
    assert one == two


def test_ranks_are_compared(counts):
    ranks = dfac.select_rank(counts, dfac.CP(1), [1, 2], QUICK, **QUIET)
    assert ranks.attrs["best"] == 2
    assert ranks["log_evidence"].diff("rank").item() > 20
    assert np.isfinite(ranks["held_out_log_score"]).all()


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (dfac.Chib(), "evidence of a matrix"),
        (dfac.ThermodynamicIntegration(sampler="exact"), "leave sampler out for BlockHMC"),
        (dfac.ThermodynamicIntegration(sampler=dfac.Gibbs()), "BlockHMC"),
    ],
)
def test_what_is_of_a_matrix_is_refused(method, sentence, counts):
    refused(ModelError, sentence, dfac.log_evidence, counts, dfac.CP(2), method, **QUIET)


def test_a_matrix_is_no_tensor():
    with pytest.raises(dfac.errors.DaskfactorError, match="takes three or more; use TweedieNMF"):
        dfac.log_evidence(np.ones((3, 4)), dfac.CP(2), **QUIET)
