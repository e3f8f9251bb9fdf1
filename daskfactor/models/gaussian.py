"""Gaussian matrix factorization: real values, biases, covariates."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import refuse_unknown
from daskfactor.errors import ModelError
from daskfactor.models.covariates import COVARIATES, SideInformation
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.rates import relevant
from daskfactor.models.settings import (
    COUNT,
    EFFECTIVE,
    POSITIVE_OR_AUTO,
    Auto,
    Learnt,
    PriorDraw,
)
from daskfactor.models.tweedie_law import NORMAL

Array = NDArray[Any]

FACTOR_SHARE = 0.3
"""Share of the data's variance that the factors have under the prior they start from."""
BIAS_SHARE = 0.15
"""The same for the biases of the rows, and for those of the columns."""
NOISE_SHARE = 0.7
"""Share of the data's variance that the noise starts from."""

RANKS = ("row", "column")

NOISE_RATE = 0.01
"""Rate of the gamma prior on one over the noise, in units of the noise it starts from."""


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
    link_precision_w, link_precision_h
        One over the prior variance of an entry of a link, times its component's precision,
        in units of one over the covariates' squared.
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
    link_precision_w: float = 1.0
    link_precision_h: float = 1.0

    @property
    def dispersion(self) -> float:
        """The noise under the name that it has as a Tweedie law with beta = 2."""
        return self.noise

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which JSON makes lists of where they are tuples."""
        return self._asdict()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild from :meth:`to_dict`."""
        refuse_unknown("the stored hyperparameters", values, cls._fields)
        listed = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **listed})


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ModelError(f"{name} must be True or False, got {value!r}")
    return bool(value)


@dataclass(frozen=True)
class GaussianMF(SideInformation):
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

    Covariates :math:`x_i` of rows, and likewise of columns, shift the prior means of
    factors and biases through a link B, which is sampled:

    .. math:: w_i \sim \mathcal N(B^\top x_i, \operatorname{diag}(1/\lambda)), \quad
        a_i \sim \mathcal N(b^\top x_i, 1/\lambda_a), \quad
        B_{fk} \sim \mathcal N(0, 1/(\lambda_\beta \lambda_k))

    so that a row (column) without any data is predicted from its covariates.

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
    covariates_w, covariates_h
        Covariates of the rows, (I, F), and of the columns, (J, F), in the order of the data:
        a NumPy array, a scipy sparse matrix, a DataFrame, or a DataArray with the dimension
        of the rows (columns) first; labels of F are kept. Where both the data and the last
        two have labels of rows (columns), these are matched, in any order, and what the data
        have no row of is left out. They are taken as they are: one
        prior goes for all, so bring them to one scale, such as standard deviations, and take
        means off those that are not one-hot.
    link_precision_w, link_precision_h
        :math:`\lambda_\beta` of the links; ``"auto"`` samples them under a gamma prior of shape
        1, by which covariates explain as much variance of a factor as they leave.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    Notes
    -----
    Salakhutdinov and Mnih 2008, "Bayesian probabilistic matrix factorization using
    Markov chain Monte Carlo", equations 1 to 3, with diagonal precisions in place of
    the Wishart law and with biases. Simm et al. 2017, "Macau: scalable Bayesian factorization
    with high-dimensional side information using MCMC", for covariates.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).normal(size=(20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.GaussianMF(2), **run)
    >>> trace["posterior"]["noise"].dims
    ('chain', 'draw')
    """

    nonnegative: ClassVar[bool] = False
    rotates: ClassVar[bool] = True
    default_optimizer: ClassVar[str] = "DSGD"
    conditional_sampler: ClassVar[str | None] = "Gibbs"
    inits: ClassVar[tuple[str, ...]] = ("prior",)

    n_components: int = field(metadata=COUNT)
    _: KW_ONLY
    noise: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    precision_w: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    precision_h: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    biases: bool = field(default=True, metadata={"check": _checked_flag})
    covariates_w: Any = field(default=None, metadata=COVARIATES)
    covariates_h: Any = field(default=None, metadata=COVARIATES)
    link_precision_w: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)
    link_precision_h: float | Auto = field(default="auto", metadata=POSITIVE_OR_AUTO)

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """Noise, precisions, and links with their own."""
        found = [
            Learnt("noise", (), "variance of an observation"),
            Learnt("precision_w", ("component",), "precision of the prior on a column of W"),
            Learnt("precision_h", ("component",), "precision of the prior on a column of H"),
            EFFECTIVE,
        ]
        effect = "covariates times it are prior means"
        found += self.learnt_links(effect, ", times that of its component")
        return tuple(found)

    @property
    def likelihood(self) -> Likelihood:
        """The normal law."""
        return NORMAL

    @property
    def width(self) -> int:
        """Columns of the packed factors: ``[W, a, 1]`` and ``[H, 1, b]``, or one less."""
        return self.n_components + (2 if self.biases else 1)

    def moving(self, factor: int) -> list[int]:
        """Columns of packed W (``factor`` 0) or H (1) that are no constants."""
        K = self.n_components
        return [*range(K), K + factor] if self.biases else list(range(K))

    def component_names(self) -> tuple[str, ...]:
        extra = ("row_bias", "column_bias") if self.biases else ("level",)
        return (*map(str, range(self.n_components)), *extra)

    def with_constants(self, side: str, factor: Array, mean: float) -> Array:
        K, bias = self.n_components, self.moving(int(side == "columns"))[-1]
        return self.pack(side, factor[:, :K], factor[:, bias], mean)

    def with_uncertainty(self) -> Self:
        return replace(self, noise=1.0) if self.noise == "auto" else self

    def for_compilation(self, n_components: int = 2) -> Self:
        return type(self)(n_components, biases=self.biases)

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
        precisions = (float(w),) * K, (float(h),) * K
        return GaussianHyper(noise, mean, bias, bias, *precisions, 1.0, 1.0, *self.starting_ridges)

    def hyper_told(self, told: Mapping[str, Any], mean: float) -> GaussianHyper:
        """Give the hyperparameters of a draw; ``level`` is the level that column biases are around.

        A point estimate tells precisions of biases, and factors have those of the start.
        """
        K, biases = self.n_components, [told.get(f"{side}_bias_precision") for side in RANKS]
        variance = 1.0 / (BIAS_SHARE * float(biases[0] or 1.0 / BIAS_SHARE))
        start = replace(self, covariates_w=None, covariates_h=None).start(mean, variance)
        precisions: list[Any] = [start.precision_w, start.precision_h]
        for factor, name in enumerate(("precision_w", "precision_h")):
            own = np.asarray(told.get(name, np.nan), np.float64)
            if own.ndim:
                precisions[factor] = tuple(own[:K].tolist())
                biases[factor] = float(own[K + factor]) if self.biases else None
        a, b = (own or start.row_bias_precision for own in biases)
        noise = float(told.get("noise", told["dispersion"]))
        level = float(told.get("level", mean))
        return start._replace(
            noise=noise, mean=level, row_bias_precision=a, column_bias_precision=b,
            precision_w=precisions[0], precision_h=precisions[1],
        )  # fmt: skip

    def linked_prior(self, covariates: Any, link: Any, rate: Any) -> dict[str, Any]:
        del rate
        return {"shift": covariates.predicted(link)}

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        """Draw noise, precisions, links, factors and biases.

        The level, whose prior is flat, is the mean: ranks under shifts of all data are the same.
        """
        self.check_shape(shape)
        prior, K = self.start(mean, variance), self.n_components
        noise = prior.noise
        if self.noise == "auto":
            noise *= NOISE_RATE / rng.exponential()
        given = {side: getattr(self, f"precision_{side}") == "auto" for side in "wh"}
        shared = rng.exponential(size=K)
        learnt: dict[str, Any] = {"noise": noise} if self.noise == "auto" else {}
        packed = []
        for side, length, own in zip(("rows", "columns"), shape, "wh", strict=True):
            around = np.asarray(getattr(prior, f"precision_{own}"))
            if given[own]:
                around = around * (shared if all(given.values()) else rng.exponential(size=K))
            of_bias = rng.exponential() * prior.row_bias_precision  # as that of columns
            bias = rng.normal(size=length) / math.sqrt(of_bias) + (mean if own == "h" else 0.0)
            factor = rng.normal(size=(length, K)) / np.sqrt(around)
            if (covariates := getattr(self, f"covariates_{own}")) is not None:
                name = f"link_precision_{own}"
                ridge = getattr(prior, name)
                if getattr(self, name) == "auto":
                    ridge = learnt[name] = ridge * rng.exponential()
                link = rng.normal(size=(covariates.shape[1], K + 1))
                link /= np.sqrt(ridge * np.append(around, of_bias))
                shift = covariates.predicted(link)
                factor, bias = factor + shift[:, :K], bias + shift[:, K]
                learnt[f"link_{own}"] = np.zeros((len(link), self.width))
                learnt[f"link_{own}"][:, self.moving(own == "h")] = link[:, : K + self.biases]
            packed.append(self.pack(side, factor, bias, mean))
            learnt[f"precision_{own}"] = np.full(self.width, math.nan)
            learnt[f"precision_{own}"][:K] = around
            if self.biases:
                learnt[f"precision_{own}"][K + (own == "h")] = of_bias
        settled = not (self.biases or self.noise == "auto" or any(given.values()))
        return PriorDraw(packed[0], packed[1].T, noise, {} if settled else learnt)

    def effective_components(
        self, hyper: GaussianHyper, observed: float, shape: tuple[int, int]
    ) -> float:
        """Count the components that data of this shape support, by variances 1 / (λ_w λ_h)."""
        variances = 1.0 / np.multiply(hyper.precision_w, hyper.precision_h)
        return relevant(variances, observed / hyper.noise, sum(shape))

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
