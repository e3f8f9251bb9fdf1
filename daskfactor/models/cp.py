"""Non-negative CP (canonical polyadic) factorization of tensors.

Source: Şimşekli et al. 2015, section 6; Kolda and Bader 2009, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

from daskfactor.errors import ModelError
from daskfactor.models.settings import Mask
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
        if self.n_components == "auto" or self.learnt:
            raise ModelError(
                "a CP model takes a number of components, numbers as shapes, and numbers or "
                f'"auto" as rates, got {self}; compare several runs for what is best'
            )
        names: Any = self.factors
        if names is not None:
            if isinstance(names, str) or not all(isinstance(one, str) and one for one in names):
                raise ModelError(
                    f"factors are names, one for each axis, such as "
                    f'("users", "items", "weeks"), got {names!r}'
                )
            self._put(factors=tuple(names))

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
        (a, b), first, others = shapes, self.rate_w, self.rate_h
        product, more = self.auto_rate(mean) ** 2, self.n_axes - 1  # K over the mean
        if isinstance(first, str) and isinstance(others, str):
            each = product ** (1.0 / self.n_axes)
            first, others = a * each, b * each
        elif isinstance(first, str):
            first = a * product * (b / float(others)) ** more
        elif isinstance(others, str):
            others = b * (a * product / float(first)) ** (1.0 / more)
        return float(first), float(others)
