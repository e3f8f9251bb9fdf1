"""A chain as plain arrays and JSON values, and back: what a checkpoint holds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.executors.state import make_state, place_cells, split_factor
from daskfactor.inference.chain import ChainRun, TrackRun

Arrays = dict[str, NDArray[Any]]
SIDES = ("rows", "columns")


def snapshot(chain: ChainRun) -> tuple[Arrays, dict[str, Any]]:
    """Everything a chain needs to go on with the same bits."""
    arrays: Arrays = {}
    tracks = []
    for run in chain.tracks:
        state = run.state
        names = [None, *sorted(state.rows[0].arrays)]
        for side in SIDES:
            for name in names:
                arrays[f"{run.track.name}/{side}/{name or 'values'}"] = state.gather(side, name)
        if state.cells:
            arrays[f"{run.track.name}/cells/mean"] = gather_cells(run, "mean")
            arrays[f"{run.track.name}/cells/m2"] = gather_cells(run, "m2")
        tracks.append(
            {
                "name": run.track.name,
                "cycle": run.cycle,
                "counts": dict(state.rows[0].counts),
                "cell_count": cell_count(run),
                "arrays": [name for name in names if name is not None],
            }
        )
    meta = {
        "tracks": tracks,
        "memory": chain.memory(),
        "shrink": chain.shrink,
        "divergences": chain.divergences,
    }
    return arrays, meta


def restore(chain: ChainRun, arrays: Arrays, meta: dict[str, Any]) -> None:
    """Put a fresh chain into the state that a snapshot holds."""
    setting = chain.setting
    by_name = {track.name: track for track in setting.sampler.tracks}
    chain.recall(meta.get("memory", meta))
    chain.shrink = meta["shrink"]
    chain.divergences = list(meta["divergences"])
    chain.tracks = []
    for values in meta["tracks"]:
        name = values["name"]
        grid = setting.data.grid
        state = make_state(grid, arrays[f"{name}/rows/values"], arrays[f"{name}/columns/values"])
        for side, bands, offsets in (
            ("rows", state.rows, grid.rows.offsets),
            ("columns", state.cols, grid.cols.offsets),
        ):
            for key in values["arrays"]:
                pieces = split_factor(arrays[f"{name}/{side}/{key}"], offsets)
                for band, piece in zip(bands, pieces, strict=True):
                    band.arrays[key] = piece
            for band in bands:
                band.counts = dict(values["counts"])
        run = TrackRun(by_name[name], state, values["cycle"])
        if setting.cells is not None and values["cell_count"] is not None:
            _restore_cells(run, setting.placed_cells, chain, arrays, values["cell_count"])
        chain.tracks.append(run)


def _restore_cells(run: TrackRun, cells: Any, chain: ChainRun, arrays: Arrays, count: int) -> None:
    data = chain.setting.data
    rows, cols = cells
    run.state.cells = place_cells(data.grid, rows, cols, data.dtype)
    for own in run.state.cells.values():
        own.mean[:] = arrays[f"{run.track.name}/cells/mean"][own.where]
        own.m2[:] = arrays[f"{run.track.name}/cells/m2"][own.where]
        own.count = count


def gather_cells(run: TrackRun, name: str) -> NDArray[Any]:
    """Means or sums of squares of the monitored cells, in the caller's order."""
    size = sum(own.where.size for own in run.state.cells.values())
    first = next(iter(run.state.cells.values()))
    out = np.empty(size, first.mean.dtype)
    for own in run.state.cells.values():
        out[own.where] = getattr(own, name)
    return out


def cell_count(run: TrackRun) -> int | None:
    """Draws in the monitored cells' moments; None before they are watched."""
    for own in run.state.cells.values():
        return own.count
    return None
