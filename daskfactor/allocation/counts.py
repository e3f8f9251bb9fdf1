"""Counts of tokens: the data of an `AllocationModel`, whatever they come in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.entries import Entries, Part, open_entries
from daskfactor.errors import DataError, OptionError
from daskfactor.models.allocation import AllocationModel
from daskfactor.random import Stream, generator

LARGEST_TOTAL = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Counts:
    """The cells of a tensor that hold tokens, in row-major order.

    Attributes
    ----------
    indices : array (M, D) of int64
        Where they are, each cell once.
    values : array (M,) of int64
        Tokens in each of them, at least 1.
    shape
        Sizes of the tensor, one for each observed variable of the model.
    dims
        Names of its dimensions: the data's own, or else the model's.
    labels
        Labels along dims, for those that have any.

    Notes
    -----
    Memory is D + 1 numbers for each cell that holds a token; the shape costs nothing.
    """

    indices: NDArray[np.int64]
    values: NDArray[np.int64]
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())

    def thinned(self, share: float, seed: int) -> "Counts":
        r"""Counts of which each token is kept with probability p.

        .. math:: X'(i_V) \sim \mathrm{Binomial}(X(i_V), p)

        They follow the model with :meth:`AllocationModel.with_thinning`. The same seed
        keeps the same tokens of the same counts.

        Raises
        ------
        OptionError
            If the share is not in (0, 1].
        DataError
            If no token is left.
        """
        if not 0.0 < share <= 1.0:
            raise OptionError(f"the share of tokens to keep must be in (0, 1], got {share!r}")
        kept = generator(seed, 0, Stream.THINNING).binomial(self.values, share)
        held = kept > 0
        if not held.any():
            raise DataError(
                f"thinning by {share:g} leaves none of the {self.total} tokens; keep more of them"
            )
        return replace(self, indices=self.indices[held], values=kept[held].astype(np.int64))


def as_counts(X: Any, model: AllocationModel) -> Counts:
    """Read the counts of a model from data of any kind.

    Parameters
    ----------
    X
        Whole numbers of at least 0 with one dimension for each observed variable of the
        model: a NumPy array; scipy sparse matrix or array (duplicates are summed); array
        of the sparse package; dask array of any of these, read chunk by chunk;
        xarray.DataArray (its dims are matched by name if they are the model's variables,
        else by their order; labels are kept); zarr array or path or URL of one; path of a
        blocked sparse store; AnnData object or pandas.DataFrame; `BlockedData`; or
        `Counts`, which are returned as they are.
    model
        Says how many dimensions there are, and perhaps their sizes.

    Raises
    ------
    DataError
        If an entry is negative, a fraction, missing or infinite (it names the first), if
        there is no token at all, or more than an int64 can hold.
    ModelError
        If the model does not fit the shape.
    """
    if isinstance(X, Counts):
        model.check_shape(X.shape)
        return X
    source = open_entries(X, model.dims)
    model.check_shape(source.shape)
    dims = _usable(source.dims, model)
    parts = [_checked(part, dims, source) for part in source.parts()]
    indices = np.concatenate([part.indices for part in parts] or [_nowhere(source)])
    values = np.concatenate([part.values for part in parts] or [np.zeros(0, np.int64)])
    order = np.lexsort(indices.T[::-1])
    _check_total(values)
    labels = {
        dim: source.labels[own]
        for dim, own in zip(dims, source.dims, strict=True)
        if own is not None and own in source.labels
    }
    return Counts(indices[order], values[order], source.shape, dims, labels)


def _nowhere(source: Entries) -> NDArray[np.int64]:
    return np.zeros((0, len(source.shape)), np.int64)


def _usable(given: tuple[str | None, ...], model: AllocationModel) -> tuple[str, ...]:
    """The data's names of dims, or the model's where they would clash with other names."""
    names = [own or name for own, name in zip(given, model.dims, strict=True)]
    if len(set(names)) < len(names) or set(model.hidden) & set(names):
        return model.dims
    return tuple(names)


def _checked(part: Part, dims: tuple[str, ...], source: Entries) -> Part:
    """The entries that hold tokens, as whole numbers."""
    values = np.asarray(part.values)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"the counts have dtype {values.dtype}; they must be whole numbers of at least 0, so "
            "convert them, for example with .astype('int64')"
        )
    wrong = values < 0
    if values.dtype.kind == "f":
        values = values.astype(np.promote_types(values.dtype, np.float64), copy=False)
        wrong |= ~np.isfinite(values) | (values != np.floor(values)) | (values >= 2.0**63)
    elif values.dtype.kind == "u":
        wrong |= values > np.uint64(LARGEST_TOTAL)
    if wrong.any():
        _refuse(part, wrong, dims, source)
    held = values != 0
    return Part(part.indices[held], values[held].astype(np.int64))


def _refuse(part: Part, wrong: NDArray[np.bool_], dims: tuple[str, ...], source: Entries) -> None:
    """Name the first offender in row-major order."""
    places = np.flatnonzero(wrong)
    first = places[np.lexsort(part.indices[places].T[::-1])[0]]
    cell, value = part.indices[first], part.values[first]
    told = []
    for dim, own, index in zip(dims, source.dims, cell, strict=True):
        label = source.labels.get(own or "")
        told.append(f"{dim} {index}" + ("" if label is None else f" ({label[index]!s})"))
    if value < 0:
        advice = "a count cannot be negative"
    elif np.isnan(value):
        advice = "this model has no missing cells; fill them, or drop their rows or columns"
    elif not np.isfinite(value):
        advice = "a count must be finite"
    elif value >= 2**63:
        advice = "it must be below 2**63"
    else:
        advice = "counts are whole numbers; rescale and round the data if they stand for counts"
    raise DataError(f"the count at {', '.join(told)} is {value}; {advice}")


def _check_total(values: NDArray[np.int64]) -> None:
    low, high = values & 0xFFFFFFFF, values >> 32
    total = (int(high.sum()) << 32) + int(low.sum())
    if total > LARGEST_TOTAL:
        raise DataError(
            f"the counts sum to {total}, more than 2**63 - 1; rescale them, or thin them first"
        )
    if not total:
        raise DataError("the data hold no tokens: every count is 0; pass at least one count above")
