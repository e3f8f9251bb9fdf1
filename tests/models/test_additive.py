import numpy as np
import pytest
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
