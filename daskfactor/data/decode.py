"""Decode: turn a piece of a source into floats with NaN where missing, losing nothing unsaid."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.checks import warn
from daskfactor.data.labels import Labels
from daskfactor.data.statistics import infinite
from daskfactor.data.storage import FloatArray, FloatType
from daskfactor.errors import DataError, DataWarning

KINDS = "biuf"

Locate = Callable[[int], tuple[int, int]]
"""From the position of an entry, counted row by row, to its row and column in the matrix."""


_ADVICE = {
    "c": "take their modulus (numpy.abs) or their real part (numpy.real)",
    "M": "turn times into numbers, for example (V - V.min()) / numpy.timedelta64(1, 's')",
    "m": "turn times into numbers, for example V / numpy.timedelta64(1, 's')",
}


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Refuse what is not a real number."""
    if dtype.kind not in KINDS:
        advice = _ADVICE.get(dtype.kind, "convert them, for example with .astype('float64')")
        raise DataError(
            f"the entries have dtype {dtype}; they must be real numbers (bool, integer or float, "
            f"NaN where missing); {advice}"
        )


def check_shape(piece: Any, wanted: tuple[int, int], row0: int, col0: int) -> None:
    """Refuse a piece of another shape than its source had said."""
    if tuple(np.shape(piece)) != wanted:
        raise DataError(
            f"the data say that their piece at row {row0}, column {col0} is {wanted[0]} x "
            f"{wanted[1]}, but reading it gave shape {tuple(np.shape(piece))}; if they are a dask "
            "array, name the true chunks where you make it (map_blocks(..., chunks=...)), or call "
            "its compute_chunk_sizes()"
        )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The two sides of a matrix that has any entries."""
    if len(shape) != 2:
        raise DataError(
            f"the data have {len(shape)} dimensions, shape {tuple(shape)}; a matrix with rows and "
            "columns is needed, so select or reshape to two dimensions"
        )
    rows, cols = (int(side) for side in shape)
    if not rows or not cols:
        raise DataError(
            f"the data are empty, shape {rows} x {cols}; pass at least one row and one column"
        )
    return rows, cols


class Decoder:
    """Converts pieces of one source and remembers what was lost in doing so."""

    def __init__(self, dtype: FloatType, labels: Labels) -> None:
        self._dtype = dtype
        self._labels = labels
        self._digits = np.finfo(dtype).nmant + 1
        self._rounded = 0
        self._vanished = 0

    def decode(self, raw: Any, row0: int, col0: int) -> FloatArray:
        """A piece whose first cell is (row0, col0) as floats, copied only if it has to be."""
        refuse_sparse(raw)

        def locate(position: int) -> tuple[int, int]:
            row, col = divmod(position, given.shape[1])
            return row0 + row, col0 + col

        mask = np.ma.getmaskarray(raw) if isinstance(raw, np.ma.MaskedArray) else None
        given: NDArray[Any] = np.asarray(raw)
        return self.convert(given, mask, locate)

    def convert(
        self, given: NDArray[Any], mask: NDArray[np.bool_] | None, locate: Locate
    ) -> FloatArray:
        """Entries as floats, those under ``mask`` as NaN; ``locate`` finds an entry's cell."""
        check_dtype(given.dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            out: FloatArray = given.astype(self._dtype, order="C", copy=mask is not None)
        if mask is not None:
            out[mask] = np.nan
        if given.dtype.kind in "iu":
            self._count_rounded(given, mask)
        elif given.dtype.kind == "f" and given.dtype.itemsize > self._dtype.itemsize:
            self._check_narrowing(given, out, locate)
        return out

    def warn(self) -> None:
        """Say once, after the pass, what did not survive the conversion."""
        if self._rounded:
            warn(
                f"{self._rounded} integer entries above 2**{self._digits} were rounded, because "
                f"{self._dtype} cannot hold them exactly; {self._advice()}",
                DataWarning,
            )
        if self._vanished:
            warn(
                f"{self._vanished} entries other than zero became zero, because they are too small "
                f"for {self._dtype}; {self._advice()}",
                DataWarning,
            )

    def _count_rounded(self, given: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
        """An integer is exact if, without its trailing zero bits, it has few enough digits."""
        if given.dtype.itemsize * 8 <= self._digits:
            return
        if max(int(given.max()), -int(given.min())) <= 2**self._digits:
            return
        size = np.abs(given).astype(np.uint64)  # abs(int64 minimum) wraps to the right bits
        lowest_bit = size & (~size + np.uint64(1))
        inexact = (size >> np.uint64(self._digits)) >= lowest_bit
        inexact &= size > 0
        if mask is not None:
            inexact &= ~mask
        self._rounded += int(np.count_nonzero(inexact))

    def _check_narrowing(self, given: NDArray[Any], out: FloatArray, locate: Locate) -> None:
        overflown = np.isinf(out)
        if overflown.any():
            position = int(np.argmax(overflown))
            row, col = locate(position)
            value = given.flat[position]
            if np.isinf(value):
                raise infinite(self._labels, row, col, float(value))
            raise DataError(
                f"the entry at {self._labels.cell(row, col)} is {value}, outside "
                f"the range of {self._dtype} (up to {np.finfo(self._dtype).max:.3g}); "
                'pass dtype="float64", or rescale the data'
            )
        self._vanished += int(np.count_nonzero((out == 0) & (given != 0)))

    def _advice(self) -> str:
        if self._dtype.itemsize < 8:
            return 'pass dtype="float64" if that matters'
        return "rescale the data if that matters"


def refuse_sparse(data: object) -> None:
    """Refuse a sparse matrix where dense pieces were announced."""
    root = type(data).__module__.partition(".")[0]
    if root == "sparse" or (root == "scipy" and hasattr(data, "toarray")):
        raise DataError(
            f"a piece of the data is sparse ({type(data).__module__}.{type(data).__name__}), but "
            "the array says that it is dense; name the kind of its pieces where you make it, for "
            "example map_blocks(..., meta=scipy.sparse.csr_array((0, 0)))"
        )
