"""One track of a chain: its state on the grid, and that state as plain arrays and back."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Grid
from daskfactor.executors.state import ChainState, make_state, place_cells, split_factor
from daskfactor.inference.base import Track
from daskfactor.inference.passes import Fit
from daskfactor.inference.run import Arrays
from daskfactor.results.trace import extrapolated_moments

Array = NDArray[Any]
Cells = tuple[NDArray[np.int64], NDArray[np.int64]]


def positions(order: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """Tell where on the grid each of the caller's rows lies; None if they are not permuted."""
    if order is None:
        return None
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return position


def in_callers_order(data: BlockedData, side: str, values: Array, axis: int = 0) -> Array:
    """Put rows (or columns) of a factor in the order in which the caller numbers them."""
    position = positions(data.row_order if side == "rows" else data.col_order)
    return values if position is None else np.take(values, position, axis=axis)


@dataclass
class TrackRun:
    """One track's state and what it has produced in the running segment."""

    track: Track
    state: ChainState
    cycle: int = 0
    fits: dict[int, Fit] = field(default_factory=dict)
    densities: dict[int, float] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop the segment's draws and fits, once they are written."""
        self.state.forget()
        self.fits.clear()
        self.densities.clear()

    # -- monitored cells -------------------------------------------------------

    def watch(self, grid: Grid, cells: Cells, dtype: np.dtype[Any]) -> None:
        """Begin to gather the moments of cells by their positions on the grid."""
        self.state.cells = place_cells(grid, *cells, dtype)

    def gather_cells(self, name: str) -> Array:
        """Return means or sums of squares of the monitored cells, in the caller's order."""
        size = sum(own.where.size for own in self.state.cells.values())
        first = next(iter(self.state.cells.values()))
        out = np.empty(size, first.mean.dtype)
        for own in self.state.cells.values():
            out[own.where] = getattr(own, name)
        return out

    @property
    def cell_count(self) -> int | None:
        """Draws in the monitored cells' moments; None before they are watched."""
        return next((own.count for own in self.state.cells.values()), None)

    # -- as plain arrays -------------------------------------------------------

    def snapshot(self) -> tuple[Arrays, dict[str, Any]]:
        """Return everything that the track needs to go on: arrays and JSON values."""
        own, state = self.track.name, self.state
        names = sorted(state.rows[0].arrays)
        arrays = {
            f"{own}/{side}/{name or 'values'}": state.gather(side, name)
            for side in ("rows", "columns")
            for name in (None, *names)
        }
        if state.cells:
            arrays |= {f"{own}/cells/{name}": self.gather_cells(name) for name in ("mean", "m2")}
        meta = {
            "name": own,
            "cycle": self.cycle,
            "counts": dict(state.rows[0].counts),
            "cell_count": self.cell_count,
            "arrays": names,
        }
        return arrays, meta

    @classmethod
    def restore(
        cls,
        track: Track,
        data: BlockedData,
        cells: Cells | None,
        arrays: Arrays,
        meta: dict[str, Any],
    ) -> "TrackRun":
        """Make the track that a snapshot holds."""
        grid, name = data.grid, track.name
        state = make_state(grid, arrays[f"{name}/rows/values"], arrays[f"{name}/columns/values"])
        for side, bands, offsets in (
            ("rows", state.rows, grid.rows.offsets),
            ("columns", state.cols, grid.cols.offsets),
        ):
            for key in meta["arrays"]:
                pieces = split_factor(arrays[f"{name}/{side}/{key}"], offsets)
                for band, piece in zip(bands, pieces, strict=True):
                    band.arrays[key] = piece
            for band in bands:
                band.counts = dict(meta["counts"])
        run = cls(track, state, meta["cycle"])
        if cells is not None and meta["cell_count"] is not None:
            run.watch(grid, cells, data.dtype)
            for own in state.cells.values():
                own.mean[:] = arrays[f"{name}/cells/mean"][own.where]
                own.m2[:] = arrays[f"{name}/cells/m2"][own.where]
                own.count = meta["cell_count"]
        return run


def monitored(tracks: list[TrackRun]) -> tuple[Array, Array, int]:
    """Return mean and variance of the monitored cells, extrapolated with a coarse track."""
    found = []
    for run in tracks:
        variance = run.gather_cells("m2").astype(np.float64) / (run.cell_count or 1)
        found.append((run.gather_cells("mean").astype(np.float64), variance))
    count = tracks[0].cell_count or 0
    if len(found) == 1:
        return (*found[0], count)
    return (*extrapolated_moments(found[0], found[1], nonnegative=True), count)
