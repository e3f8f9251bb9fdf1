"""The inverse multiquadric kernel over pairs of factors, and its derivatives.

Everything is a function of squared distances: with r² = |x - y|² and κ(r²) = k(x, y),

    ∇_x k = 2 κ' (x - y) = -∇_y k        tr ∇_x ∇_yᵀ k = -2 d κ' - 4 r² κ''

so that no difference of two particles is ever formed.

Source: Masood and Doshi-Velez, section 6.1 and equation 7; Gorham and Mackey 2017.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from daskfactor.checks import is_number, positive_number
from daskfactor.errors import OptionError

Array = NDArray[np.float64]
Scale = float | Literal["median"]


@dataclass(frozen=True)
class Multiquadric:
    r"""One block of the kernel: :math:`\kappa(r^2) = (c^2 + r^2)^b / (2 (c^2)^b)`.

    Half at distance zero and falling from there. All methods take squared distances of any
    shape, in the unit of c².
    """

    scale: float
    power: float

    def _part(self, r2: ArrayLike) -> Array:
        return 1.0 + np.asarray(r2, dtype=np.float64) / self.scale**2

    def value(self, r2: ArrayLike) -> Array:
        """κ."""
        return np.asarray(0.5 * self._part(r2) ** self.power)

    def slope(self, r2: ArrayLike) -> Array:
        """κ', the derivative in r²: ∇_x k = 2 κ' (x - y)."""
        factor = 0.5 * self.power / self.scale**2
        return np.asarray(factor * self._part(r2) ** (self.power - 1.0))

    def bend(self, r2: ArrayLike) -> Array:
        """κ'', the second derivative in r²."""
        factor = 0.5 * self.power * (self.power - 1.0) / self.scale**4
        return np.asarray(factor * self._part(r2) ** (self.power - 2.0))

    def trace(self, r2: ArrayLike, dimension: int) -> Array:
        """Σ_i ∂²k / ∂x_i ∂y_i = -2 d κ' - 4 r² κ'', d the number of coordinates."""
        r2 = np.asarray(r2, dtype=np.float64)
        return np.asarray(-2.0 * dimension * self.slope(r2) - 4.0 * r2 * self.bend(r2))


@dataclass(frozen=True)
class IMQ:
    r"""Inverse multiquadric kernel of two pairs of factors, a sum over W and H.

    .. math:: k = \frac{(c_W^2 + \|W - W'\|^2)^{b_W}}{2 (c_W^2)^{b_W}}
        + \frac{(c_H^2 + \|H - H'\|^2)^{b_H}}{2 (c_H^2)^{b_H}}

    Between 0 and 1, and 1 for equal pairs.

    Parameters
    ----------
    scale_w, scale_h
        :math:`c_W` and :math:`c_H`, the distances over which the kernel falls off, in the
        units of W and of H; or ``"median"``: the median distance between the particles at
        hand (1 if they are all the same). Two sets of particles can be compared only under
        the same numbers.
    power_w, power_h
        :math:`b_W` and :math:`b_H`, between -1 and 0.

    Raises
    ------
    OptionError
        If one of them is not allowed.

    References
    ----------
    Masood and Doshi-Velez, equation 7; the defaults are those of section 6.1.
    """

    scale_w: Scale = 1e-2
    scale_h: Scale = 1e3
    power_w: float = -0.5
    power_h: float = -0.5

    def __post_init__(self) -> None:
        for name in ("scale_w", "scale_h"):
            value = getattr(self, name)
            if isinstance(value, str):
                if value != "median":
                    raise OptionError(
                        f'{name} must be a positive number or "median", got {value!r}'
                    )
                continue
            object.__setattr__(self, name, positive_number(name, value))
        for name in ("power_w", "power_h"):
            value = getattr(self, name)
            if not (is_number(value) and -1.0 < value < 0.0):
                raise OptionError(
                    f"{name} must be a number between -1 and 0, got {value!r}; -0.5 is usual"
                )
            object.__setattr__(self, name, float(value))

    def resolve(self, r2_w: ArrayLike, r2_h: ArrayLike) -> Self:
        """The same with every ``"median"`` a number.

        Parameters
        ----------
        r2_w, r2_h
            Squared distances between particles in W and in H, (M, M).
        """
        scale_w = self.scale_w if is_number(self.scale_w) else median_distance(r2_w)
        scale_h = self.scale_h if is_number(self.scale_h) else median_distance(r2_h)
        return replace(self, scale_w=scale_w, scale_h=scale_h)

    @property
    def blocks(self) -> tuple[Multiquadric, Multiquadric]:
        """The kernels of W and of H; scales must be numbers."""
        scales = self.scale_w, self.scale_h
        if isinstance(scales[0], str) or isinstance(scales[1], str):
            raise OptionError(
                'a "median" scale must be resolved from distances first; use kernel.resolve(...)'
            )
        return Multiquadric(scales[0], self.power_w), Multiquadric(scales[1], self.power_h)


def median_distance(r2: ArrayLike) -> float:
    """Median distance between two different particles, from squared distances (M, M).

    1 where there is none: of a single particle, or of particles that are all the same.
    """
    table = np.asarray(r2, dtype=np.float64)
    pairs = table[np.triu_indices(len(table), 1)]
    median = float(np.median(np.sqrt(pairs))) if pairs.size else 0.0
    return median if median > 0.0 else 1.0
