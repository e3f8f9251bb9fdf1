"""Posteriors as functions of the summed divergence and of single entries: what scores need.

Both models have a log density of the form ℓ(d) + Σ log p(W) + Σ log p(H), d = Σ d_β(v|μ)
over the observed entries, so that the score is ℓ'(d) ∇d and a slope of the prior.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.inference.multiplicative import mean_floor
from daskfactor.models.fixed import Mask
from daskfactor.models.likelihood import Likelihood
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import Hyperparameters, TweedieNMF
from daskfactor.stein.source import Side

Array = NDArray[np.float64]

TINY: Final = 1e-30
"""Where the slope of a gamma prior, (shape - 1)/θ, stops growing."""


class Target(Protocol):
    """A posterior density, up to a constant.

    ``likelihood`` has the divergence, ``floor`` the smallest μ that it is taken at.
    """

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def floor(self) -> float: ...

    def log_likelihood(self, divergence: Array) -> Array:
        """ℓ(d) of summed divergences d (M,)."""
        ...

    def slope(self, divergence: Array) -> Array:
        """ℓ'(d), at most 0."""
        ...

    def prior(self, side: Side) -> tuple[float, float]:
        """λ and a - 1 of a prior whose log density is (a - 1) log θ - λ θ."""
        ...

    def frozen(self, side: Side) -> Mask:
        """Components that are constants, (K,); None: none."""
        ...


@dataclass(frozen=True)
class ThresholdTarget:
    """A `SILFNMF`: ℓ = -C SILF(f), f the divergence times one or, for ‖V - WH‖², two."""

    model: SILFNMF
    floor: float

    @property
    def likelihood(self) -> Likelihood:
        return self.model.likelihood

    def log_likelihood(self, divergence: Array) -> Array:
        return self.model.log_likelihood(self.model.factor * divergence)

    def slope(self, divergence: Array) -> Array:
        return self.model.factor * self.model.slope(self.model.factor * divergence)

    def prior(self, side: Side) -> tuple[float, float]:
        return (0.0 if side == "rows" else self.model.rate), 0.0

    def frozen(self, side: Side) -> Mask:
        del side
        return None


@dataclass(frozen=True)
class TweedieTarget:
    """A `TweedieNMF` whose hyperparameters are numbers: ℓ = -d / φ."""

    model: TweedieNMF
    hyper: Hyperparameters
    floor: float

    @property
    def likelihood(self) -> Likelihood:
        return self.model.likelihood

    def log_likelihood(self, divergence: Array) -> Array:
        return -divergence / self.hyper.dispersion

    def slope(self, divergence: Array) -> Array:
        return np.full(len(divergence), -1.0 / self.hyper.dispersion)

    def prior(self, side: Side) -> tuple[float, float]:
        rate, shape = self.hyper.prior(0 if side == "rows" else 1)
        return rate, shape - 1.0

    def frozen(self, side: Side) -> Mask:
        return self.model.frozen[0 if side == "rows" else 1]


def make_target(
    data: BlockedData, model: SILFNMF | TweedieNMF, dispersion: float = math.nan
) -> Target:
    """The posterior of some data.

    Parameters
    ----------
    data
        Their mean sets the floor of μ, below which no gradient is taken (see
        `mean_floor`; none for real-valued means), and prior rates that are ``"auto"``.
    model
        Its threshold must be a number.
    dispersion
        φ of a `TweedieNMF` whose dispersion is ``"auto"``.
    """
    law = model.likelihood
    floor = -math.inf if law.real_valued else mean_floor(data, law)
    if isinstance(model, SILFNMF):
        assert model.eps > 0
        return ThresholdTarget(model, floor)
    return TweedieTarget(model, model.resolve(data.mean, dispersion), floor)
