"""Observations around a sum of Gaussian variables: a model whose evidence has a closed form."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import DataError
from daskfactor.models.settings import COUNT, StoredModel, positive

DEVIATION = positive(advice="leave it out for 1")


@dataclass(frozen=True)
class GaussianAdditive(StoredModel):
    r"""Observations around the sum of R latent Gaussian variables.

    .. math:: \theta_r \sim \mathcal N(\mu_\theta, \sigma_\theta^2), \quad
        x_n \sim \mathcal N(\textstyle\sum_r \theta_r, \sigma_x^2)

    Parameters
    ----------
    n_components
        Number of latent variables R, at least 1.
    mean, scale
        Mean and standard deviation of a latent variable.
    noise
        Standard deviation of an observation around the sum.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    References
    ----------
    Şimşekli et al. 2016, section 4.1.1, equation 12 (which gives the variances).

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> x = np.random.default_rng(0).normal(3.0, 1.0, 50)
    >>> dfac.GaussianAdditive(3).log_evidence(x) > dfac.GaussianAdditive(1).log_evidence(x)
    True
    """

    evidence_data = "vector"

    n_components: int = field(metadata=COUNT)
    _: KW_ONLY
    mean: float = field(default=0.0, metadata={"check": lambda _, value: float(value)})
    scale: float = field(default=1.0, metadata=DEVIATION)
    noise: float = field(default=1.0, metadata=DEVIATION)

    def check_observations(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return observations as a vector.

        Raises
        ------
        DataError
            If they are no vector of numbers, there are none, or one is missing or not finite.
        """
        try:
            array = np.asanyarray(x)  # keeps a mask
        except (RuntimeError, TypeError, ValueError):  # of a sparse array, or of uneven lists
            array = np.empty((), dtype=object)
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"GaussianAdditive takes a vector of real numbers, got {type(x).__name__} of dtype "
                f"{getattr(x, 'dtype', array.dtype)}; make it a NumPy array of these first, sparse "
                "data with .todense() or .toarray()"
            )
        values = np.asarray(array, dtype=np.float64)
        if values.ndim != 1 or not values.size:
            raise DataError(
                "GaussianAdditive takes a vector of at least one observation, got shape "
                f"{values.shape}; pass its entries as one vector, for example with .ravel()"
            )
        gone = int(np.count_nonzero(np.ma.getmaskarray(array) | ~np.isfinite(values)))
        if gone:
            raise DataError(
                f"GaussianAdditive has no missing observations, but {gone} of {values.size} are "
                "masked or not finite; drop these first"
            )
        return values

    def log_likelihood(self, x: ArrayLike, total: ArrayLike) -> NDArray[np.float64]:
        r"""Return log p(x | θ) for every value of Σ θ_r in ``total``, in nats.

        .. math:: -\tfrac N2 \ln 2\pi\sigma_x^2
            - \frac{\sum_n (x_n - \bar x)^2 + N (\bar x - \sum_r\theta_r)^2}{2\sigma_x^2}
        """
        x = self.check_observations(x)
        centre = x.mean()
        squares = np.sum((x - centre) ** 2) + x.size * (centre - np.asarray(total)) ** 2
        constant = -0.5 * x.size * np.log(2 * np.pi * self.noise**2)
        return np.asarray(constant - squares / (2 * self.noise**2), dtype=np.float64)

    def log_evidence(self, x: ArrayLike) -> float:
        r"""Return log p(x), exactly, in nats.

        With m = Rμ_θ, v = Rσ_θ² and e = mean(x) - m:

        .. math:: -\tfrac N2 \ln 2\pi\sigma_x^2 - \tfrac12\ln(1 + N v/\sigma_x^2)
            - \frac{\sum_n (x_n - m)^2}{2\sigma_x^2}
            + \frac{v N^2 e^2}{2\sigma_x^2(\sigma_x^2 + N v)}

        It need not peak at the R that made the data.
        """
        x = self.check_observations(x)
        m, v = self.n_components * self.mean, self.n_components * self.scale**2
        n, noise = x.size, self.noise**2
        result = -0.5 * n * np.log(2 * np.pi * noise) - 0.5 * np.log1p(n * v / noise)
        result -= np.sum((x - m) ** 2) / (2 * noise)
        result += v * (n * (x.mean() - m)) ** 2 / (2 * noise * (noise + n * v))
        return float(result)

    def draw_prior(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Draw θ from the prior, (count, R)."""
        return rng.normal(self.mean, self.scale, (count, self.n_components))

    def generate(self, rng: np.random.Generator, count: int) -> NDArray[Any]:
        """Draw observations of the model, (count,)."""
        return rng.normal(self.draw_prior(rng, 1).sum(), self.noise, count)
