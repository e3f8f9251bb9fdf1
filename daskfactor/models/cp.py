"""Non-negative CP (canonical polyadic) factorization of tensors.

Source: Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import ModelError
from daskfactor.models.settings import FactorModel, Mask, PriorDraw, Scales
from daskfactor.models.tweedie import TweedieNMF


@dataclass(frozen=True)
class CP(TweedieNMF):
    r"""Non-negative CP factorization of a tensor under a Tweedie law, with gamma priors.

    .. math:: v_{i_1 \dots i_N} \sim \mathrm{Tweedie}_\beta(\mu_{i_1 \dots i_N}, \phi), \quad
        \mu_{i_1 \dots i_N} = \sum_k \prod_n f^{(n)}_{i_n k}, \quad
        f^{(n)}_{i_n k} \sim \mathrm{Gamma}(a, \lambda)

    ``sample(V, CP(10))`` takes arrays of three or more axes, sparse or dense with NaN where
    missing. :func:`factors` gives the factors of a run by the names of the axes, and
    :func:`predict` takes cells as one array of places for each axis.

    Parameters
    ----------
    n_components
        Number of components K, at least 1.
    beta, dispersion
        The law, as for :class:`TweedieNMF`.
    rate_w, rate_h
        Rates of the priors, of the first factor and of all others. ``"auto"`` makes the prior
        mean of an entry equal to the mean of the data.
    shape_w, shape_h
        Shapes of the priors, of the first factor and of all others.
    fixed_w, fixed_h, covariates_w, covariates_h, link_precision_w, link_precision_h
        Are refused: a CP model takes neither covariates nor frozen components yet.
    factors
        Names of the factors, one for each axis; left out, those of an xarray.DataArray's
        dimensions, or ``axis_0`` and so on.

    Raises
    ------
    ModelError
        If one of them is not allowed: rates and shapes are numbers or, of rates, ``"auto"``.

    References
    ----------
    Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(2.0, (8, 6, 5))
    >>> model = dfac.CP(2, factors=("user", "item", "week"))
    >>> trace = dfac.sample(V, model, draws=20, tune=20, random_seed=0, progressbar=False)
    >>> {name: own.shape for name, own in dfac.factors(trace).items()}
    {'user': (1, 20, 8, 2), 'item': (1, 20, 6, 2), 'week': (1, 20, 5, 2)}
    """

    tensor: ClassVar[bool] = True
    has_scores: ClassVar[bool] = False
    conditional_sampler: ClassVar[str | None] = None
    inits: ClassVar[tuple[str, ...]] = ("multiplicative",)

    _: KW_ONLY
    factors: Sequence[str] | None = None
    n_axes: int = field(default=3, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.covariates != (None, None) or self.fixed != (None, None):
            raise ModelError("a CP model takes neither covariates nor frozen components yet")
        if self.n_components == "auto" or self.learnt:
            raise ModelError(
                "a CP model takes a number of components, numbers as shapes, and numbers or "
                f'"auto" as rates, got n_components={self.n_components!r}, '
                f"shapes {self.shape_w!r} and {self.shape_h!r}, rates {self.rate_w!r} and "
                f"{self.rate_h!r}; compare several runs for what is best"
            )
        if self.factors is not None:
            given: Any = self.factors
            if isinstance(given, str) or not all(isinstance(name, str) and name for name in given):
                raise ModelError(
                    f"factors are names, one for each axis, such as "
                    f'("users", "items", "weeks"), got {given!r}'
                )
            object.__setattr__(self, "factors", tuple(given))

    @property
    def frozen(self) -> tuple[Mask, ...]:  # type: ignore[override]
        """No component is frozen in any of the factors."""
        return (None,) * self.n_axes

    def placed(self, places: Mapping[str, Any] | None) -> Any:
        """Give the model of a tensor with as many axes as the data have."""
        if places is None or "offsets" not in places:
            raise ModelError(
                "a CP model goes with an array of three or more axes; use TweedieNMF for a matrix"
            )
        return replace(self, n_axes=len(places["offsets"]))

    def rates_under(self, mean: float, shapes: tuple[float, float]) -> tuple[float, float]:
        """Return the rates of the first factor and of the others under these shapes."""
        first, others = self.rate_w, self.rate_h
        more, (a, b) = self.n_axes - 1, shapes
        whole = self.auto_rate(mean) ** 2  # K over the mean
        if isinstance(first, str) and isinstance(others, str):
            each = whole ** (1.0 / self.n_axes)
            return a * each, b * each
        if isinstance(first, str):
            return float(a * whole * (b / float(others)) ** more), float(others)
        if isinstance(others, str):
            return float(first), float(b * (a * whole / float(first)) ** (1.0 / more))
        return float(first), float(others)

    def scale_density(
        self, size_w: NDArray[Any], size_h: NDArray[Any], scales: Scales
    ) -> NDArray[np.float64]:
        """Give zeros: how three and more factors share a scale is not taken off a density."""
        return FactorModel.scale_density(self, size_w, size_h, scales)

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        """Refuse: calibration is of models of a matrix."""
        raise ModelError("calibration is of a model of a matrix; a tensor has more than two axes")

    def to_dict(self) -> dict[str, Any]:
        """The model as plain JSON values; how many axes there are, the data tell."""
        told = super().to_dict()
        del told["n_axes"]
        return told | {"factors": None if self.factors is None else list(self.factors)}
