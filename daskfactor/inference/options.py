"""Check the arguments of a run, and make the timetable that follows from them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataWarning, OptionError
from daskfactor.inference.base import Sampler

Keep = Literal["auto", "draws", "moments"]
Cells = tuple[NDArray[np.int64], NDArray[np.int64]]

MONITOR = (
    'monitor takes None, "missing", a boolean mask of the shape of V, or a pair (rows, columns) '
    "of integer positions"
)

DRAWS_BUDGET = 2**30
"""Bytes that draws may take under ``keep="auto"``."""
SEGMENT_BYTES = 2**28
SEGMENT_FLOPS = 2e11
LONGEST_SEGMENT = 500
ADAPT_EVERY = 5
TUNE_SEGMENTS = 10
FROZEN_FROM = 0.8
"""Share of tuning after which a single chain's metric and dispersion stay as they are."""


@dataclass(frozen=True)
class RunOptions:
    """Say how long a run is and what it keeps; plain values, written into the results.

    ``keep_every`` is the number of draws between kept ones; 0 keeps none.
    """

    draws: int
    tune: int
    chains: int
    thin: int
    seed: int
    keep: Keep
    keep_every: int
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def cycles(self) -> int:
        """Count cycles of the finest track of each chain, tuning included."""
        return self.tune + self.draws * self.thin

    @property
    def kept(self) -> int:
        """Count the draws that are kept."""
        return self.draws // self.keep_every if self.keep_every else 0

    def draw_index(self, cycle: int) -> int | None:
        """Return the number of the draw that a cycle ends with, or None."""
        after = cycle - self.tune + 1
        return after // self.thin - 1 if after > 0 and after % self.thin == 0 else None

    def is_kept(self, draw: int) -> bool:
        return bool(self.keep_every) and draw % self.keep_every == self.keep_every - 1

    def draw_cycles(self) -> list[int]:
        """List the cycles at whose ends draws are taken."""
        return [self.tune + (draw + 1) * self.thin - 1 for draw in range(self.draws)]

    def kept_cycles(self) -> list[int]:
        return [c for draw, c in enumerate(self.draw_cycles()) if self.is_kept(draw)]


def checked_lengths(sampler: Sampler, lengths: dict[str, Any]) -> dict[str, int]:
    """Give ``draws``, ``tune``, ``chains`` and ``thin`` as whole numbers that a run can have."""
    found = {
        name: whole_number(name, value, 0 if name == "tune" else 1)
        for name, value in lengths.items()
    }
    sampler.check_lengths(found["draws"], found["tune"])
    return found


def plan_run(
    data: BlockedData, width: int, sampler: Sampler, keep: str, seed: int, **lengths: int
) -> RunOptions:
    """Decide how many draws are kept, from what one takes of the memory for all."""
    shares = [1 / track.coarseness for track in sampler.tracks]
    each = sum(data.shape) * width * data.dtype.itemsize * lengths["chains"] * sum(shares)
    every = choose_keep(keep, lengths["draws"], each, round(1 / min(shares)))
    return RunOptions(
        **lengths,
        seed=seed,
        keep=keep,  # type: ignore[arg-type]  # checked by choose_keep
        keep_every=every,
        dtype=str(data.dtype),
    )


def choose_keep(keep: str, draws: int, bytes_per_draw: float, coarseness: int = 1) -> int:
    """Choose how many draws lie between kept ones: 1 keeps all, 0 none.

    Parameters
    ----------
    keep
        The user's choice.
    draws
        Draws of every chain.
    bytes_per_draw
        Of all chains together, coarse ones counted by their share.
    coarseness
        Fine draws for each coarse one; if no coarse draw could be kept, none is.
    """
    if keep not in ("auto", "draws", "moments"):
        raise OptionError(f'keep must be "auto", "draws" or "moments", got {keep!r}')
    if keep == "moments":
        return 0
    if keep == "draws":
        return 1
    affordable = int(DRAWS_BUDGET / max(bytes_per_draw, 1))
    if affordable == 0:
        return 0
    every = -(-draws // min(affordable, draws))
    return every if every <= draws // coarseness else 0


def segment_length(work_per_cycle: float, kept_bytes_per_cycle: float, coarseness: int) -> int:
    """Choose the cycles between checkpoints: about a second's work, bounded in memory.

    It depends on sizes only, never on a clock, so that every machine checks for
    divergence at the same cycles.
    """
    cycles = min(SEGMENT_FLOPS / max(work_per_cycle, 1.0), LONGEST_SEGMENT)
    if kept_bytes_per_cycle > 0:
        cycles = min(cycles, SEGMENT_BYTES / kept_bytes_per_cycle)
    return max(1, int(cycles) // coarseness) * coarseness


def boundaries(options: RunOptions, length: int, split: int, coarseness: int) -> Iterator[int]:
    """Yield the cycles at which segments end, in order; the last is the end of the run.

    ``split`` is the cycle at which coarse tracks start; all are multiples of
    ``coarseness``.
    """
    ends = {options.tune, split}
    for number in range(1, TUNE_SEGMENTS):
        ends.add(options.tune * number // TUNE_SEGMENTS // coarseness * coarseness)
    ends |= set(range(length, options.tune, length))
    ends |= set(range(options.tune + length, options.cycles, length))
    ends.add(options.cycles)
    yield from sorted(end for end in ends if 0 < end <= options.cycles)


def monitored_cells(monitor: Any, data: BlockedData) -> Cells | None:
    """Find row and column positions of the cells to watch, in the caller's order.

    Parameters
    ----------
    monitor
        None, ``"missing"`` for every missing cell, a boolean mask (I, J), or a
        pair of integer arrays of equal length.

    Raises
    ------
    OptionError
        For anything else, and for positions outside the matrix.
    """
    if monitor is None:
        return None
    if isinstance(monitor, str):
        if monitor != "missing":
            raise OptionError(f"{MONITOR}; got {monitor!r}")
        if data.n_missing == 0:
            warn(
                'monitor="missing", but no cell is missing: nothing is monitored',
                DataWarning,
            )
        return _or_none(data.missing_cells())
    if isinstance(monitor, xr.DataArray):
        monitor = monitor.transpose(data.labels.row_dim, data.labels.col_dim).values
    if isinstance(monitor, tuple) and len(monitor) == 2:
        return _or_none(_positions(monitor, data.shape))
    mask = np.asarray(monitor)
    if mask.dtype != np.bool_ or mask.shape != data.shape:
        raise OptionError(
            f"{MONITOR}; got an array of dtype {mask.dtype} and shape {mask.shape}, "
            f"V has shape {data.shape}"
        )
    rows, cols = np.nonzero(mask)
    return _or_none((rows.astype(np.int64), cols.astype(np.int64)))


def _positions(pair: tuple[Any, Any], shape: tuple[int, int]) -> Cells:
    arrays = []
    for name, values, size in zip(("rows", "columns"), pair, shape, strict=True):
        index = np.atleast_1d(np.asarray(values))
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise OptionError(f"{MONITOR}; got {name} of dtype {index.dtype}, shape {index.shape}")
        if index.size and not (index.min() >= 0 and index.max() < size):
            raise OptionError(
                f"monitored {name} must lie between 0 and {size - 1}, got {index.min()} to "
                f"{index.max()}"
            )
        arrays.append(index.astype(np.int64))
    if arrays[0].size != arrays[1].size:
        raise OptionError(
            f"monitored rows and columns must be of equal length, got {arrays[0].size} and "
            f"{arrays[1].size}"
        )
    return arrays[0], arrays[1]


def _or_none(cells: Cells) -> Cells | None:
    return cells if cells[0].size else None
