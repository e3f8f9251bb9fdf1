"""Components of a factor whose values are known: frozen where they are given."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.errors import ModelError

Array = NDArray[Any]
Mask = NDArray[np.bool_] | None
"""Which components of a factor are frozen, (K,); None: none."""


@dataclass(frozen=True, eq=False)
class FixedComponents:
    """The frozen components of one factor.

    Attributes
    ----------
    frozen
        Their numbers, ascending.
    values
        Their values, (len(frozen), length), read-only; None for the model of a stored
        run, whose values are in the run's state.
    """

    frozen: tuple[int, ...]
    values: NDArray[np.float64] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FixedComponents):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        length = "?" if self.values is None else self.values.shape[1]
        return f"FixedComponents({list(self.frozen)}, length={length})"

    def _key(self) -> tuple[Any, ...]:
        values = self.values
        return (self.frozen, None if values is None else (values.shape, values.tobytes()))

    def mask(self, n_components: int) -> NDArray[np.bool_]:
        """Which of K components are frozen."""
        mask = np.zeros(n_components, dtype=bool)
        mask[list(self.frozen)] = True
        return mask

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return 0.0 if self.values is None else float(self.values.mean())

    def put(self, factor: Array, rows: slice | NDArray[np.int64]) -> None:
        """Write the values of some of the caller's rows into a part (rows, K) of the factor."""
        if self.values is None:
            raise ModelError(
                "the values of the frozen components are not stored with the model, but with "
                "the state of its run; pass them again as fixed_w or fixed_h"
            )
        factor[:, list(self.frozen)] = self.values[:, rows].T


def checked_fixed(
    name: str, given: Any, n_components: int, components_last: bool
) -> FixedComponents | None:
    """Frozen components from what the user passed: an array (I, F) for W, (F, J) for H.

    Raises
    ------
    ModelError
        If it cannot be a part of a factor with K components.
    """
    if given is None:
        return None
    if isinstance(given, FixedComponents):
        _check_count(name, 1 + max(given.frozen), n_components)
        return given
    try:
        array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{name} must be an array of non-negative numbers, {_layout(name)}, got "
            f"{type(given).__name__}"
        ) from error
    if array.ndim != 2 or 0 in array.shape:
        raise ModelError(
            f"{name} must be an array of two dimensions, {_layout(name)}, got shape {array.shape}"
        )
    components = array.T if components_last else array
    _check_count(name, len(components), n_components)
    return _from_components(name, components)


def _from_components(name: str, components: Array) -> FixedComponents:
    """From (F, length), a component of NaN alone being free."""
    missing = np.isnan(components)
    free = missing.all(axis=1)
    torn = np.flatnonzero(missing.any(axis=1) & ~free)
    if torn.size:
        raise ModelError(
            f"component {torn[0]} of {name} has {missing[torn[0]].sum()} NaN among its "
            f"{components.shape[1]} entries; a component is given whole, or is all NaN and free"
        )
    if free.all():
        raise ModelError(f"{name} is all NaN, so it freezes nothing; leave it out")
    values = np.ascontiguousarray(components[~free])
    if not (np.isfinite(values).all() and values.min() >= 0.0):
        bad = values[~(np.isfinite(values) & (values >= 0))][0]
        raise ModelError(f"{name} must hold finite values of at least 0, got {bad:g}")
    values.setflags(write=False)
    return FixedComponents(tuple(int(k) for k in np.flatnonzero(~free)), values)


def _layout(name: str) -> str:
    return "(rows, F)" if name == "fixed_w" else "(F, columns)"


def _check_count(name: str, count: int, n_components: int) -> None:
    if count > n_components:
        raise ModelError(
            f"{name} has {count} components {_layout(name)}, the model {n_components}; pass at "
            "most that many, or a larger n_components"
        )


def check_length(name: str, fixed: FixedComponents | None, shape: Sequence[int]) -> None:
    """Refuse values that are not one for each row or column of the data.

    Raises
    ------
    ModelError
        If they are not.
    """
    if fixed is None or fixed.values is None:
        return
    length, axis = fixed.values.shape[1], 0 if name == "fixed_w" else 1
    if length != shape[axis]:
        raise ModelError(
            f"{name} must have one entry for each of the data's {shape[axis]} "
            f"{('rows', 'columns')[axis]}, {_layout(name)}, got {length} for data of "
            f"{shape[0]} x {shape[1]}"
        )


@contextmanager
def held(values: Array, frozen: Mask) -> Iterator[None]:
    """Put the frozen columns of a band back after what is done inside."""
    if frozen is None:
        yield
        return
    before = values[:, frozen]
    yield
    values[:, frozen] = before
