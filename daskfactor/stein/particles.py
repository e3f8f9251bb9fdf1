"""A set of pairs of factors, read band by band from wherever it is."""

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Bands
from daskfactor.data.storage import FloatType
from daskfactor.errors import OptionError
from daskfactor.executors.base import Executor
from daskfactor.kernels.workspace import Workspace
from daskfactor.machine import memory_budget

Array = NDArray[Any]
Side = Literal["rows", "columns"]

SIDES: Final[tuple[Side, Side]] = ("rows", "columns")
NAMES: Final = {"rows": "W", "columns": "H"}
LOAD_SHARE: Final = 4
"""Lazy particles are read into memory if they take no more than one part in so many of it."""


def read(source: Any, index: Any) -> Array:
    """A part of an array; of a lazy one in this thread, which may be one of a worker's."""
    part = source[index]
    if hasattr(part, "compute"):
        part = part.compute(scheduler="synchronous")
    return np.asarray(part)


class Survey(NamedTuple):
    """What one look at a band of all particles finds, (M,) each, and the column sums (M, K)."""

    least: Array
    finite: Array
    sums: Array


@dataclass(frozen=True)
class Particles:
    """M pairs of factors on the grid of some data.

    Attributes
    ----------
    W, H
        Arrays (M, I, K) and (M, K, J) that can be sliced: NumPy, memory-mapped, zarr, dask,
        xarray; in the caller's order of rows and columns.
    rows, columns
        The bands of the grid.
    row_order, col_order
        The caller's row and column at each position of the grid; None: the same.
    dtype
        Of what is read.
    shrink
        (M, K): what columns of W are divided by, and rows of H multiplied with; None: one.
    """

    W: Any
    H: Any
    rows: Bands
    columns: Bands
    row_order: NDArray[np.int64] | None
    col_order: NDArray[np.int64] | None
    dtype: FloatType
    shrink: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, W: Any, H: Any, data: BlockedData) -> Self:
        """Particles for some data.

        Raises
        ------
        OptionError
            If the shapes do not go together.
        """
        shapes = tuple(getattr(one, "shape", None) for one in (W, H))
        if any(shape is None or len(shape) != 3 for shape in shapes):
            raise OptionError(
                "particles must be a pair of arrays, W (particle, row, component) and H "
                f"(particle, component, column), got shapes {shapes[0]} and {shapes[1]}; stack the "
                "factors along a first axis"
            )
        (count, n_rows, width), (count_h, width_h, n_columns) = shapes  # type: ignore[misc]
        if (count, width) != (count_h, width_h) or 0 in (count, width):
            raise OptionError(
                f"W {shapes[0]} and H {shapes[1]} must have equally many particles and components, "
                "at least one: W is (particle, row, component), H (particle, component, column)"
            )
        if (n_rows, n_columns) != data.shape:
            raise OptionError(
                f"the particles are factors of a matrix of {n_rows} x {n_columns}, the data have "
                f"shape {data.shape[0]} x {data.shape[1]}; pass the data that they were fitted to"
            )
        grid = data.grid
        order = data.row_order, data.col_order
        return cls(W, H, grid.rows, grid.cols, *order, data.dtype)

    @property
    def count(self) -> int:
        """M."""
        return int(self.W.shape[0])

    @property
    def width(self) -> int:
        """K."""
        return int(self.W.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all particles in the type in which they are read."""
        return self.count * self.width * (self.rows.size + self.columns.size) * self.dtype.itemsize

    def loaded(self) -> Self:
        """The same in memory, if they are not there and take little of it."""
        lazy = [not isinstance(one, np.ndarray) for one in (self.W, self.H)]
        if not any(lazy) or self.nbytes > memory_budget(None) // LOAD_SHARE:
            return self
        return replace(self, W=read(self.W, slice(None)), H=read(self.H, slice(None)))

    def band(self, side: Side, number: int) -> Array:
        """One band of all particles: (M, rows of the band, K), each C-contiguous."""
        bands, order = (
            (self.rows, self.row_order) if side == "rows" else (self.columns, self.col_order)
        )
        low, high = bands.offsets[number], bands.offsets[number + 1]
        at: Any = slice(low, high) if order is None else order[low:high]
        if side == "rows":
            values = read(self.W, (slice(None), at))
        else:
            values = read(self.H, (slice(None), slice(None), at)).swapaxes(1, 2)
        if self.shrink is None:
            return contiguous(values, self.dtype)
        values = np.array(values, self.dtype, order="C")
        factor = 1.0 / self.shrink if side == "rows" else self.shrink
        values *= factor[:, None].astype(self.dtype)
        return values

    def on_simplex(self, sums: NDArray[np.float64]) -> Self:
        """The same with columns of W divided by their sums (M, K); every WH stays.

        Raises
        ------
        OptionError
            If a column of W is all zero.
        """
        bad = np.argwhere(~(sums > 0))
        if bad.size:
            particle, component = bad[0]
            raise OptionError(
                f"component {component} of particle {particle} is zero in all of W, so that no "
                "scale puts it on the simplex; leave that particle out"
            )
        return replace(self, shrink=sums)


def contiguous(values: Array, dtype: FloatType) -> Array:
    """(M, m, K) in a type, every particle's part C-contiguous; no copy where it is so already."""
    values = values.astype(dtype, copy=False)
    return values if values[0].flags.c_contiguous else np.ascontiguousarray(values)


def survey(executor: Executor, particles: Particles) -> dict[Side, Survey]:
    """Smallest entries, whether all are finite, and column sums of both factors."""

    def look(item: tuple[Side, int], work: Workspace) -> Survey:
        del work
        values = particles.band(*item)
        return Survey(
            values.min(axis=(1, 2)),
            np.asarray(np.isfinite(values).all(axis=(1, 2))),
            values.sum(axis=1, dtype=np.float64),
        )

    blocks = len(particles.rows.sizes)
    items: list[tuple[Side, int]] = [(side, number) for side in SIDES for number in range(blocks)]
    found = executor.map(look, items, "check-particles")
    return {"rows": _together(found[:blocks]), "columns": _together(found[blocks:])}


def _together(parts: list[Survey]) -> Survey:
    return Survey(
        np.min([one.least for one in parts], axis=0),
        np.all([one.finite for one in parts], axis=0),
        np.sum([one.sums for one in parts], axis=0),
    )


def check_values(found: dict[Side, Survey]) -> None:
    """Refuse particles that are not finite or not non-negative.

    Raises
    ------
    OptionError
        With the number of the first of them.
    """
    for side, one in found.items():
        with np.errstate(invalid="ignore"):
            bad = np.flatnonzero(~(one.finite & (one.least >= 0)))
        if bad.size:
            raise OptionError(
                f"{NAMES[side]} of particle {bad[0]} goes down to {one.least[bad[0]]:g} or holds "
                "values that are not finite; factors must be finite and at least 0: leave out "
                "particles that diverged"
            )
