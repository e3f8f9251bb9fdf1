"""Equal weight for all good factorizations: the soft insensitive loss over an objective.

The paper's letters are X for V, A (D x R) for W and W (R x N) for H; its smoothness β is
``smoothness`` here, where ``beta`` is the power of the divergence.

Source: Masood and Doshi-Velez, "A particle-based variational approach to Bayesian
non-negative matrix factorization", section 5.
"""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import ModelError
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.settings import COUNT, POSITIVE_OR_AUTO, Auto, FactorModel, positive
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.models.tweedie_law import POWER, Tweedie

Array = NDArray[np.float64]

MARGIN: Final = 1.2
"""Ratio of the threshold to the worst objective of the pilot runs (section 6.1)."""
NO_RATE: Final = 1e-30
"""Rate of a flat prior."""


def silf(y: ArrayLike, eps: float, smoothness: float) -> Array:
    r"""Return the soft insensitive loss: 0 up to a threshold, then the excess above it.

    .. math:: \mathrm{SILF}(y) = 0, \quad
        \frac{(y - (1-\beta)\epsilon)^2}{4 \beta \epsilon}, \quad y - \epsilon

    for y up to :math:`(1-\beta)\epsilon`, between, and from :math:`(1+\beta)\epsilon` on.

    Parameters
    ----------
    y
        Objectives, any shape, at least 0.
    eps
        Threshold ε, positive, in the unit of ``y``.
    smoothness
        β, half the width of the transition in units of ε, in (0, 1].

    Returns
    -------
    ndarray of float64
        Of the shape of ``y`` and in its unit.

    Notes
    -----
    Masood and Doshi-Velez, section 5.1, after Chu et al. 2004. The paper prints
    :math:`(y - (1-\beta))^2` in the middle, which is discontinuous unless ε = 1.
    """
    y = np.asarray(y, dtype=np.float64)
    low, high = (1.0 - smoothness) * eps, (1.0 + smoothness) * eps
    middle = (y - low) ** 2 / (4.0 * smoothness * eps)
    return np.where(y <= low, 0.0, np.where(y >= high, y - eps, middle))


def silf_slope(y: ArrayLike, eps: float, smoothness: float) -> Array:
    r"""Return the slope of :func:`silf`: 0, :math:`(y-(1-\beta)\epsilon)/(2\beta\epsilon)`, 1.

    Parameters
    ----------
    y, eps, smoothness
        As for :func:`silf`.

    Returns
    -------
    ndarray of float64
        Between 0 and 1, continuous in ``y``.
    """
    y = np.asarray(y, dtype=np.float64)
    return np.clip((y - (1.0 - smoothness) * eps) / (2.0 * smoothness * eps), 0.0, 1.0)


POSITIVE = positive(advice="leave it out for the paper's value")


def _at_most_one(name: str, value: float) -> float:
    value = POSITIVE["check"](name, value)
    if value > 1.0:
        raise ModelError(
            f"{name} must be above 0 and at most 1, got {value:g}; leave it at 0.1 if unsure"
        )
    return value


@dataclass(frozen=True)
class SILFNMF(FactorModel):
    r"""Non-negative factorization under which all good factorizations are equally likely.

    .. math:: p(V | W, H) \propto e^{-C\,\mathrm{SILF}_{\epsilon,\beta}(f_V(W, H))}, \quad
        W_{\cdot k} \sim \mathrm{Dirichlet}(1), \quad h_{kj} \sim \mathrm{Exponential}(\lambda)

    The likelihood is flat where the objective f is below about ε and falls off beyond; the
    columns of W add up to 1, so that no scale is left undetermined. It is a model to weigh
    given factorizations under, not to sample: see :func:`stein_discrepancy`.

    Parameters
    ----------
    n_components
        Number of components K, at least 1.
    beta
        The objective f: with 2, the default, the squared Frobenius norm ‖V - WH‖² (without
        a half, as in the paper); else the sum of β-divergences, for any β outside the open
        interval (1, 2). Both over the observed entries.
    threshold
        ε, in the unit of f. ``"auto"`` is 1.2 times the worst objective of some pilot runs,
        which :meth:`resolve` takes.
    smoothness
        β of the loss, in (0, 1]: it bends between (1 - β)ε and (1 + β)ε.
    sharpness
        C, in one over the unit of f: how fast the likelihood falls off.
    rate
        λ of the prior on H, in one over the unit of V.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    References
    ----------
    Masood and Doshi-Velez, section 5 and, for the defaults, section 6.1.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> modes = dfac.stein_posterior(
    ...     V, dfac.SILFNMF(2), particles=4, pilot=2, random_seed=0, progressbar=False
    ... )
    >>> modes["posterior"]["W"].sizes["draw"]
    4
    """

    has_observations: ClassVar[bool] = False
    has_scores: ClassVar[bool] = True
    simplex: ClassVar[bool] = True
    from_data: ClassVar[tuple[str, ...]] = ("threshold",)

    n_components: int = field(metadata=COUNT)
    _: KW_ONLY
    beta: float = field(default=2.0, metadata=POWER)
    threshold: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    smoothness: float = field(default=0.1, metadata={"check": _at_most_one})
    sharpness: float = field(default=2.0, metadata=POSITIVE)
    rate: float = field(default=1.0, metadata=POSITIVE)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood whose divergence the objective sums."""
        return Tweedie(self.beta)

    @property
    def factor(self) -> float:
        """Ratio of f to the sum of β-divergences: 2 for ‖V - WH‖², else 1."""
        return 2.0 if self.likelihood.normal else 1.0

    @property
    def eps(self) -> float:
        """Threshold as a number.

        Raises
        ------
        ModelError
            If it is still ``"auto"``.
        """
        if self.threshold == "auto":
            raise ModelError(
                'threshold="auto" has to be resolved first; use model.resolve(objectives) with the '
                "objectives of some good factorizations, or pass threshold as a number"
            )
        return float(self.threshold)

    def resolve(self, objectives: ArrayLike) -> Self:
        r"""Return the model with :math:`\epsilon = 1.2 \max_m f_m` for an ``"auto"`` threshold.

        Parameters
        ----------
        objectives
            f of the factorizations that count as good, such as those of 50 default runs.
            Ignored if the threshold is a number.

        Raises
        ------
        ModelError
            If there are none, or if they are not finite or all zero.

        References
        ----------
        Masood and Doshi-Velez, section 6.1.
        """
        if self.threshold != "auto":
            return self
        f = np.atleast_1d(np.asarray(objectives, dtype=np.float64))
        if not (f.size and np.isfinite(f).all() and f.min() >= 0 and f.max() > 0):
            raise ModelError(
                "the threshold is 1.2 times the largest of the objectives, which must be finite, "
                f"at least 0 and not all 0, got {f.tolist()[:5]}; pass threshold as a number"
            )
        return replace(self, threshold=MARGIN * float(f.max()))

    def objective(self, V: ArrayLike, W: ArrayLike, H: ArrayLike) -> float:
        """Return the objective f at one pair of factors, over an array in memory.

        Parameters
        ----------
        V
            (I, J), NaN where missing.
        W, H
            (I, K) and (K, J).

        Returns
        -------
        float
            ‖V - WH‖² for ``beta=2``, else Σ d_β(v|μ).
        """
        mu = np.asarray(W, dtype=np.float64) @ np.asarray(H, dtype=np.float64)
        return self.factor * float(np.nansum(self.likelihood.deviance(V, mu)))

    def log_likelihood(self, objective: ArrayLike) -> Array:
        """Return -C SILF(f), the normalising constant left out; of the shape of ``objective``."""
        return -self.sharpness * silf(objective, self.eps, self.smoothness)

    def slope(self, objective: ArrayLike) -> Array:
        """Return the derivative of :meth:`log_likelihood` in f: -C SILF'(f), from -C to 0."""
        return -self.sharpness * silf_slope(objective, self.eps, self.smoothness)

    def of_divergence(self, divergence: Array) -> tuple[Array, Array, Array]:
        """Return ℓ(d) = -C SILF(f) and its first two derivatives, f being `factor` times d."""
        f = self.factor * divergence
        inside = np.abs(f - self.eps) < self.smoothness * self.eps
        bend = -self.sharpness * self.factor**2 / (2.0 * self.smoothness * self.eps)
        return self.log_likelihood(f), self.factor * self.slope(f), np.where(inside, bend, 0.0)

    @property
    def priors(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Rate and shape of the priors on W, flat on the simplex, and on H."""
        return (0.0, 1.0), (self.rate, 1.0)

    def with_numbers(self, mean: float, dispersion: float) -> Self:
        """Return the model itself, which takes only its threshold from data."""
        del mean, dispersion
        return self

    def for_optimizers(self) -> TweedieNMF:
        """Return a model of the divergence alone, for optimisers."""
        rates = {"rate_w": NO_RATE, "rate_h": NO_RATE}
        return TweedieNMF(self.n_components, beta=self.beta, dispersion=1.0, **rates)

    def log_density(self, objective: float, H: ArrayLike) -> float:
        """Return the log of the posterior density but for a constant: -C SILF(f) - λ ΣH.

        Parameters
        ----------
        objective
            f of the factors.
        H
            The weights, either way up; minus infinity if an entry is negative. W is taken
            to be on the simplex, where its prior is constant.
        """
        weights = np.asarray(H)
        if np.any(weights < 0):
            return -np.inf
        total = float(np.sum(weights, dtype=np.float64))
        return float(self.log_likelihood(objective)) - self.rate * total

    def score(
        self, objective: float, gradient_w: ArrayLike, gradient_h: ArrayLike
    ) -> tuple[Array, Array]:
        r"""Return the gradient of :meth:`log_density`: :math:`-C\mathrm{SILF}'(f)\nabla f`, less λ.

        Parameters
        ----------
        objective
            f of the factors.
        gradient_w, gradient_h
            ∇f in W and in H, any shapes.

        Returns
        -------
        tuple of ndarray
            The score in W and in H, of the shapes of the gradients; that of W in all of
            space, not only along the simplex.

        References
        ----------
        Masood and Doshi-Velez, equations 3 and 5.
        """
        slope = self.slope(objective)
        score_w = slope * np.asarray(gradient_w, dtype=np.float64)
        return score_w, slope * np.asarray(gradient_h, dtype=np.float64) - self.rate
