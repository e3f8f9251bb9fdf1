"""Non-negative matrix factorization under a Tweedie law.

Source: Şimşekli et al. 2017, section 2.
"""

from dataclasses import KW_ONLY, dataclass, field

from daskfactor.models.gamma_factors import GammaFactors
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.tweedie_law import POWER, Tweedie


@dataclass(frozen=True)
class TweedieNMF(GammaFactors):
    r"""Tweedie non-negative matrix factorization with gamma priors.

    .. math:: v_{ij} \sim \mathrm{Tweedie}_\beta(\mu_{ij}, \phi), \quad \mu = W H, \quad
        w_{ik} \sim \mathrm{Gamma}(a_w, \lambda_w), \quad
        h_{kj} \sim \mathrm{Gamma}(a_h, \lambda_h)

    Parameters
    ----------
    n_components
        Number of components K, at least 1. ``"auto"`` begins with 3 √n of the data's shorter
        side n, at most 100, under rates by ``"component"``, of which those fade that the data
        do not need: ``effective_components`` in the results is how many they support. To be
        used with :func:`sample` (and :func:`estimate_cost`).
    beta
        Power of the law: 2 Gaussian, 1 Poisson, 0 gamma, between 0 and 1 compound
        Poisson; anything outside the open interval (1, 2).
    dispersion
        Dispersion phi: the variance of an observation is ``phi * mu**(2 - beta)``.
        ``"auto"`` estimates it from draws while a run tunes: their mean, fixed from then on.
        Whole numbers under beta = 1 have 1, unless they surely vary more than Poisson counts
        in every chain; 1.05 to 1.25 times as much is not noticed, and harmless.
    rate_w, rate_h
        Rates :math:`\lambda` of the priors on W and H. ``"auto"`` makes the prior mean
        of ``mu``, ``K shape_w shape_h / (rate_w rate_h)``, equal to the mean of the data.
        ``"component"`` gives every component a rate, ``"row"`` (of ``rate_w``) every row and
        ``"column"`` (of ``rate_h``) every column, which are sampled with the factors; with
        both ``"component"`` W and H share them, so that components that the data do not need
        fade (see :mod:`daskfactor.models.rates` for their own priors).
    shape_w, shape_h
        Shapes :math:`a` of the priors; 1, the default, makes them exponential. A larger
        shape keeps entries away from zero, a smaller one draws most of them to it (the
        density is then unbounded at zero, see :class:`MultiplicativeUpdates`). ``"auto"``
        samples them with the factors: by :class:`Gibbs` and :class:`BlockHMC` without bias, by
        :class:`PSGLD` to one or two standard deviations; Euler's steps, which hardly come near
        zero, put a shape of .3 some .05 too high. A learnt shape stays between 0.02 and 50.
        Entries below 1e-37, which are a sixth of all under a shape of 0.02, count as that
        small and no more, so that single precision learns the same shapes as double.
    fixed_w, fixed_h
        Components that are known and never move: an array (I, F) for W, (F, J) for H,
        with the values of the first F <= K components for the data's rows or columns; a
        component of NaN alone is free. They have no prior. A component may be frozen
        on one side or on both. ``"auto"`` rates then put the free entries on the scale
        of the frozen ones: the prior mean of W is the mean of ``fixed_w``, or else that
        of H the mean of ``fixed_h``.
    covariates_w, covariates_h
        Covariates :math:`x_i` of the rows, (I, F), and of the columns, (J, F), as for
        :class:`GaussianMF`. They multiply prior means by :math:`\exp(x_i \cdot \gamma_k)`:

        .. math:: w_{ik} \sim \mathrm{Gamma}(a_w, \lambda_k e^{-x_i \cdot \gamma_k}), \quad
            \gamma_k \sim \mathcal N(0, I / \tau)

        with links :math:`\gamma` that are sampled with the factors, so that a row (column)
        without any data is predicted from its covariates. ``"auto"`` rates are then those of
        components, each factor's own. How far rows scatter around what covariates say is
        the shape: ``shape_w="auto"`` learns it.
    link_precision_w, link_precision_h
        :math:`\tau` of the links; ``"auto"`` samples it under an exponential prior, by whose
        mean covariates change prior means by a factor of about e.

    Raises
    ------
    ModelError
        If one of them is not allowed.

    References
    ----------
    Şimşekli et al. 2017, section 2; Şimşekli et al. 2015, section 4. Learnt rates: Gopalan,
    Hofman and Blei 2015; Tan and Févotte 2013. Log-linear rates:
    :mod:`daskfactor.models.log_linear`.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> V = np.where(V > 7, np.nan, V)  # missing cells
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2, beta=1.0), **run)
    >>> trace["posterior"]["W"].shape
    (1, 20, 20, 2)
    """

    _: KW_ONLY
    beta: float = field(default=1.0, metadata=POWER)

    @property
    def likelihood(self) -> Likelihood:
        """The Tweedie law of this beta.

        With beta = 2 the fit itself stays non-negative: structure below zero ends up in the
        residual.
        """
        return Tweedie(self.beta)
