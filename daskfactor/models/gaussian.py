"""Gaussian matrix factorization: real values, biases, covariates."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import ModelError
from daskfactor.models.covariates import COVARIATES, SideInformation
from daskfactor.models.rates import relevant
from daskfactor.models.settings import COUNT, EFFECTIVE, POSITIVE_OR_AUTO, Auto, Learnt, PriorDraw
from daskfactor.models.tweedie_law import NORMAL

Array = NDArray[Any]

FACTOR_SHARE, BIAS_SHARE, NOISE_SHARE = 0.3, 0.15, 0.7
"""Shares of the data's variance that priors start from, biases of rows and of columns each."""

SIDES = ("rows", "columns")

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
    likelihood = NORMAL
    hyper_type = GaussianHyper

    @property
    def learnt(self) -> tuple[Learnt, ...]:
        """Noise, precisions, and links with their own."""
        effect, unit = "covariates times it are prior means", ", times that of its component"
        return (
            Learnt("noise", (), "variance of an observation"),
            Learnt("precision_w", ("component",), "precision of the prior on a column of W"),
            Learnt("precision_h", ("component",), "precision of the prior on a column of H"),
            EFFECTIVE,
            *(one for prior in self.factor_priors for one in prior.learnt_link(effect, unit)),
            *self.extra_variables,
        )

    @property
    def width(self) -> int:
        """Columns of the packed factors: ``[W, a, 1]`` and ``[H, 1, b]``, or one less."""
        return self.n_components + (2 if self.biases else 1)

    def moving(self, factor: int) -> list[int]:
        """Return the columns of packed W (``factor`` 0) or H (1) that are not constant."""
        K = self.n_components
        return [*range(K), K + factor] if self.biases else list(range(K))

    def component_names(self) -> tuple[str, ...]:
        extra = ("row_bias", "column_bias") if self.biases else ("level",)
        return (*map(str, range(self.n_components)), *extra)

    def with_constants(self, side: str, factor: Array, mean: float) -> Array:
        bias = factor[:, self.moving(SIDES.index(side))[-1]]
        return self.pack(side, factor[:, : self.n_components], bias, mean)

    def with_uncertainty(self) -> Self:
        return replace(self, noise=1.0) if self.noise == "auto" else self

    def start(self, mean: float, variance: float) -> GaussianHyper:
        """Return initial hyperparameters; fixed ones have their fixed values.

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

    def hyper_of_draw(self, values: Mapping[str, Any], mean: float) -> GaussianHyper:
        """Give the hyperparameters of a draw; ``level`` is the level that column biases are around.

        A point estimate tells precisions of biases, and factors have those of the start.
        """
        K, bias = self.n_components, 1.0 / BIAS_SHARE
        variance = 1.0 / (BIAS_SHARE * float(values.get("row_bias_precision") or bias))
        plain = self
        if (self.covariates_w, self.covariates_h) != (None, None):
            plain = replace(self, covariates_w=None, covariates_h=None)  # which have no values
        start = plain.start(mean, variance)
        changed: dict[str, Any] = {"noise": float(values.get("noise", values["dispersion"]))}
        changed["mean"] = float(values.get("level", mean))
        for factor, name in enumerate(("precision_w", "precision_h")):
            of_bias = f"{('row', 'column')[factor]}_bias_precision"
            precision = np.asarray(values.get(name, np.nan), np.float64)
            if precision.ndim:
                changed[name] = tuple(precision[:K].tolist())
                if self.biases:
                    changed[of_bias] = float(precision[K + factor])
            elif values.get(of_bias):
                changed[of_bias] = values[of_bias]
        return start._replace(**changed)

    def linked_prior(self, covariates: Any, link: Any, rate: Any) -> dict[str, Any]:
        return {"shift": covariates.predicted(link)}

    def draw_prior(
        self, rng: np.random.Generator, shape: tuple[int, int], mean: float, variance: float
    ) -> PriorDraw:
        """Draw noise, precisions, links, factors and biases.

        The level, whose prior is flat, is the mean: ranks under shifts of all data are the same.
        """
        self.check_shape(shape)
        start, K, learnt = self.start(mean, variance), self.n_components, dict[str, Any]()
        noise, packed = start.noise, []
        if self.noise == "auto":
            noise *= NOISE_RATE / rng.exponential()
            learnt["noise"] = noise
        start = self.draw_parameters(rng, start._replace(noise=noise), learnt)
        noise = start.noise
        auto = [self.precision_w == "auto", self.precision_h == "auto"]
        shared = rng.exponential(size=K)
        for factor, prior in enumerate(self.factor_priors):
            around = np.asarray((start.precision_w, start.precision_h)[factor])
            if auto[factor]:
                around = around * (shared if all(auto) else rng.exponential(size=K))
            around = np.append(around, rng.exponential() * start.row_bias_precision)  # as columns'
            values = np.empty((shape[factor], K + 1))
            values[:, K] = rng.normal(size=len(values)) / math.sqrt(around[K]) + factor * mean
            values[:, :K] = rng.normal(size=(len(values), K)) / np.sqrt(around[:K])
            moving, table = self.moving(factor), np.full(self.width, math.nan)
            if prior.covariates is not None:
                link = prior.draw_link(rng, around, learnt)
                values += prior.covariates.predicted(link)
                learnt[f"link_{prior.side}"] = np.zeros((len(link), self.width))
                learnt[f"link_{prior.side}"][:, moving] = link[:, : len(moving)]
            table[moving] = around[: len(moving)]
            learnt[f"precision_{prior.side}"] = table
            packed.append(self.pack(SIDES[factor], values[:, :K], values[:, K], mean))
        settled = not (self.biases or self.noise == "auto" or any(auto))
        return PriorDraw(packed[0], packed[1].T, noise, {} if settled else learnt)

    def effective_components(
        self, hyper: GaussianHyper, observed: float, shape: tuple[int, int]
    ) -> float:
        """Count the components that data of this shape support, by variances 1 / (λ_w λ_h)."""
        variances = 1.0 / np.multiply(hyper.precision_w, hyper.precision_h)
        return relevant(variances, observed / hyper.noise, sum(shape))

    def pack(self, side: str, factor: Array, bias: Array | None, mean: float) -> Array:
        """Return a packed factor (n, width) from (n, K) and the biases (n,).

        ``side`` is ``"rows"`` or ``"columns"``. Column biases hold the overall level;
        without biases in the model, ``mean`` stands in their place.
        """
        ones = np.ones((len(factor), 1), factor.dtype)
        level = mean * ones
        if not self.biases:
            return np.hstack([factor, ones if side == "rows" else level])
        column = level if bias is None else np.asarray(bias, factor.dtype)[:, None]
        return np.hstack([factor, column, ones] if side == "rows" else [factor, ones, column])

    def unpack(self, side: str, packed: Array) -> dict[str, Array]:
        """Return views of the named parts of a packed factor, along the last axis.

        Works for draws, means and variances alike.

        Returns
        -------
        dict
            ``W`` and ``row_bias``, or ``H`` (component last) and ``column_bias``;
            the column biases hold the overall level. No biases if the model has none.
        """
        K, factor = self.n_components, SIDES.index(side)
        parts = {"WH"[factor]: packed[..., :K]}
        if self.biases:
            parts[("row_bias", "column_bias")[factor]] = packed[..., K + factor]
        return parts
