import numpy as np
import pytest
import scipy.sparse as sp
import sparse
from scipy import stats
from scipy.special import logsumexp

import daskfactor as dfac
from daskfactor.errors import DataError, ModelError

MODEL = dfac.GaussianAdditive(3, mean=0.5, scale=0.8, noise=1.5)


def test_evidence_is_the_integral_over_the_sum():
    x = MODEL.generate(np.random.default_rng(0), 40)
    total = np.linspace(-20, 20, 200001)
    prior = stats.norm(1.5, 0.8 * np.sqrt(3)).logpdf(total)
    integral = logsumexp(prior + MODEL.log_likelihood(x, total)) + np.log(total[1] - total[0])
    assert MODEL.log_evidence(x) == pytest.approx(integral, abs=1e-8)


def test_likelihood_is_a_product():
    x = np.array([0.3, -1.0, 2.0])
    expected = stats.norm(1.1, 1.5).logpdf(x).sum()
    np.testing.assert_allclose(MODEL.log_likelihood(x, [1.1]), [expected])


def test_it_is_stored_and_checked():
    assert dfac.GaussianAdditive.from_dict(MODEL.to_dict()) == MODEL
    with pytest.raises(ModelError, match="scale must be"):
        dfac.GaussianAdditive(2, scale=-1)
    with pytest.raises(DataError, match="vector"):
        MODEL.log_evidence(np.ones((2, 2)))
    with pytest.raises(DataError, match="finite"):
        MODEL.log_evidence([1.0, np.nan])


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (sparse.COO(np.arange(3.0)), "real numbers, got COO of dtype float64; .* with .todense()"),
        (sp.csr_matrix(np.eye(3)), "real numbers, got csr_matrix of dtype float64; .* .toarray()"),
        (np.array([1 + 2j]), "real numbers, got ndarray of dtype complex128"),
        (np.array(["a"]), "real numbers, got ndarray of dtype <U1"),
        (np.array(["2020-01-01"], "M8[D]"), r"got ndarray of dtype datetime64\[D\]"),
        ([[1.0], [1.0, 2.0]], "real numbers, got list"),
        (None, "real numbers, got NoneType"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "1 of 2 are masked or not finite"),
        ([], r"at least one observation, got shape \(0,\)"),
    ],
)
def test_what_is_no_vector_of_numbers(x, said):
    for verb in (dfac.log_evidence, dfac.select_rank):
        with pytest.raises(DataError, match=said):
            verb(x, MODEL, progressbar=False)
