"""Real-valued matrix factorization with Gaussian priors and biases."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import ModelError
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.settings import Auto, FactorModel, checked_count, checked_positive
from daskfactor.models.tweedie_law import NORMAL

Array = NDArray[Any]

FACTOR_SHARE = 0.3
"""Share of the data's variance that the factors have under the prior they start from."""
BIAS_SHARE = 0.15
"""The same for the biases of the rows, and for those of the columns."""
NOISE_SHARE = 0.7
"""Share of the data's variance that the noise starts from."""


class GaussianHyper(NamedTuple):
    """Hyperparameters at one time of a run; they are sampled with the factors.

    Attributes
    ----------
    noise
        Variance of an observation around ``mu``, in the data's unit squared.
    mean
        Prior mean of the column biases: the overall level, in the data's unit.
    row_bias_precision, column_bias_precision
        One over the prior variance of the biases.
    precision_w, precision_h
        One over the prior variance of each component's entries in W and in H.
    ratio_w, ratio_h
        Part of the sampler's metric, not of the model: the mean square of an entry of
        H (for ``ratio_w``; of W for ``ratio_h``) over the observations, in units of
        its prior variance.
    """

    noise: float
    mean: float
    row_bias_precision: float
    column_bias_precision: float
    precision_w: tuple[float, ...]
    precision_h: tuple[float, ...]
    ratio_w: float = 1.0
    ratio_h: float = 1.0

    @property
    def dispersion(self) -> float:
        """The noise under the name that it has as a Tweedie law with beta = 2."""
        return self.noise

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self._asdict().items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild from :meth:`to_dict`."""
        plain: dict[str, Any] = {
            name: tuple(float(entry) for entry in value)
            if isinstance(value, list | tuple)
            else float(value)
            for name, value in values.items()
        }
        return cls(**plain)


@dataclass(frozen=True)
class GaussianMF(FactorModel):
    r"""Real-valued matrix factorization with Gaussian priors, for ratings and the like.

    .. math:: v_{ij} \sim \mathcal N(\mu_{ij}, \phi), \quad
        \mu_{ij} = a_i + b_j + \sum_k w_{ik} h_{kj}, \quad
        w_{ik} \sim \mathcal N(0, 1/\lambda_k), \quad h_{kj} \sim \mathcal N(0, 1/\lambda_k)

    with :math:`a_i \sim \mathcal N(0, 1/\lambda_a)` and
    :math:`b_j \sim \mathcal N(m, 1/\lambda_b)`. Everything that is ``"auto"`` is sampled
    with the factors, under gamma priors of shape 1 whose mean fits the data's variance;
    ``m`` has a flat prior, the noise an almost flat one on its logarithm.

    Only the product of the two precisions of a component bears on ``mu``. With both
    ``"auto"``, W and H therefore share them; with one fixed, the other has its own.

    Parameters
    ----------
    n_components
        Number of components K, at least 1.
    noise
        Variance phi of an observation; ``"auto"`` samples it.
    precision_w, precision_h
        One over the prior variance of an entry of W and of H, the same for all
        components; ``"auto"`` samples one for each component, so that components
        that the data do not need fade.
    biases
        Whether rows and columns have a level of their own. Without them ``mu`` is the
        mean of the data plus W H.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    Notes
    -----
    Salakhutdinov and Mnih 2008, "Bayesian probabilistic matrix factorization using
    Markov chain Monte Carlo", equations 1 to 3, with diagonal precisions in place of
    the Wishart law and with biases.
    """

    nonnegative: ClassVar[bool] = False
    default_sampler: ClassVar[str] = "SGHMC"
    default_optimizer: ClassVar[str] = "DSGD"

    n_components: int
    _: KW_ONLY
    noise: float | Auto = "auto"
    precision_w: float | Auto = "auto"
    precision_h: float | Auto = "auto"
    biases: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_components", checked_count(self.n_components))
        for name in ("noise", "precision_w", "precision_h"):
            object.__setattr__(self, name, checked_positive(name, getattr(self, name)))
        if not isinstance(self.biases, bool | np.bool_):
            raise ModelError(f"biases must be True or False, got {self.biases!r}")
        object.__setattr__(self, "biases", bool(self.biases))

    @property
    def likelihood(self) -> Likelihood:
        """The normal law."""
        return NORMAL

    @property
    def width(self) -> int:
        """Columns of the packed factors: ``[W, a, 1]`` and ``[H, 1, b]``, or one less."""
        return self.n_components + (2 if self.biases else 1)

    def component_names(self) -> tuple[str, ...]:
        extra = ("row_bias", "column_bias") if self.biases else ("level",)
        return (*map(str, range(self.n_components)), *extra)

    def for_compilation(self) -> Self:
        return type(self)(2)

    def start(self, mean: float, variance: float) -> GaussianHyper:
        """Hyperparameters to start from; fixed ones are what they are fixed at.

        Parameters
        ----------
        mean, variance
            Of the observed entries; a variance of zero counts as one.
        """
        variance = variance if variance > 0 else 1.0
        K = self.n_components
        # Whatever the two precisions are, the components together have their share of variance.
        product = K / (FACTOR_SHARE * variance)
        w, h = self.precision_w, self.precision_h
        if w == "auto" and h == "auto":
            w = h = math.sqrt(product)
        elif w == "auto":
            w = product / float(h)
        elif h == "auto":
            h = product / float(w)
        bias = 1.0 / (BIAS_SHARE * variance)
        noise = NOISE_SHARE * variance if self.noise == "auto" else float(self.noise)
        return GaussianHyper(noise, mean, bias, bias, (float(w),) * K, (float(h),) * K)

    def pack(self, side: str, factor: Array, bias: Array | None, mean: float) -> Array:
        """A packed factor, (n, width), from (n, K) and the biases (n,).

        ``side`` is ``"rows"`` or ``"columns"``. Column biases hold the overall level;
        without biases in the model, ``mean`` stands in their place.
        """
        ones = np.ones((len(factor), 1), factor.dtype)
        level = mean * ones
        if not self.biases:
            return np.hstack([factor, ones if side == "rows" else level])
        own = level if bias is None else np.asarray(bias, factor.dtype)[:, None]
        return np.hstack([factor, own, ones] if side == "rows" else [factor, ones, own])

    def unpack(self, side: str, packed: Array) -> dict[str, Array]:
        """Named parts of a packed factor, along the last axis; views.

        Works for draws, means and variances alike.

        Returns
        -------
        dict
            ``W`` and ``row_bias``, or ``H`` (component last) and ``column_bias``;
            the column biases hold the overall level. No biases if the model has none.
        """
        K = self.n_components
        rows = side == "rows"
        parts = {"W" if rows else "H": packed[..., :K]}
        if self.biases:
            parts["row_bias" if rows else "column_bias"] = packed[..., K if rows else K + 1]
        return parts
