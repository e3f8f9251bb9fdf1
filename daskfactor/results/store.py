"""The store of a run: a zarr group that grows while the run goes on and survives its end.

Any zarr reader sees the tree of the results at every moment, at its full planned
size; draws that do not exist yet read as NaN. A draw exists once a checkpoint says
so, and a checkpoint is there wholly or not at all.
"""

import contextlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import numpy as np
import xarray as xr
import zarr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError, StoreError
from daskfactor.results.buffers import DrawBuffer
from daskfactor.results.files import (
    DurableStore,
    WriterLock,
    disk_errors,
    remove_leftovers,
    replace_json,
)
from daskfactor.results.lock import claim, local_path, lock_of
from daskfactor.results.schema import STEIN, own_names
from daskfactor.results.skeleton import (
    NODE,
    describe_group,
    extend_skeleton,
    plain,
    read_root,
    repair,
    scratch_folder,
    write_constants,
    write_skeleton,
)
from daskfactor.results.slots import Arrays, Counts, Slots, per_chain
from daskfactor.results.spec import RunSpec
from daskfactor.results.trace import committed_tree
from daskfactor.results.weights import weighted_values

Mode = Literal["r", "r+"]


class RunStore:
    """A run on disk. Made by `create` or `open`; one writer at a time, any number of readers.

    Not for several threads at once. Use as a context manager, or call `close`.
    """

    keeps_checkpoints: ClassVar[bool] = True

    def __init__(self, path: Path, mode: Mode, lock: WriterLock | None) -> None:
        self.path = path
        self.mode: Mode = mode
        self._lock = lock
        document = read_root(path)
        self._read_plan(document)
        self._slots = Slots(path, self.chains, self.warmup_draws)
        self._buffer = DrawBuffer(self._write_region)
        self._arrays: dict[str, Any] = {}
        self._store: DurableStore | None = None
        if mode == "r+":
            remove_leftovers(path)
            repair(path, document)
            self._store = DurableStore(path, scratch=scratch_folder(path))

    @classmethod
    def create(cls, path: str | Path, spec: RunSpec, *, overwrite: bool = False) -> Self:
        """Make an empty run store and open it for writing.

        It appears at ``path`` complete or not at all.

        Parameters
        ----------
        path
            Local path.
        spec
            What the run will hold.
        overwrite
            Replace an earlier run store at ``path``. Nothing else is ever removed.

        Raises
        ------
        StoreError
            If something is there already, another process writes it, or the disk refuses.
        """
        target = local_path(path)
        old = claim(target, overwrite)
        making = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with disk_errors("a new run store", target, "nothing was changed"):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_skeleton(making, spec)
                _take_place(making, target, making.with_suffix(".old"))
        finally:
            shutil.rmtree(making, ignore_errors=True)
            if old is not None:
                old.release()
        shutil.rmtree(making.with_suffix(".old"), ignore_errors=True)
        return cls.open(target, mode="r+")

    @classmethod
    def open(cls, path: str | Path, mode: Mode = "r") -> Self:
        """Open a run store to read it, or (``"r+"``) to go on writing it.

        Raises
        ------
        StoreError
            If there is nothing at ``path``, or another process is writing it.
        StoreFormatError
            If what is there is not a run store, is damaged or of a newer version.
        """
        if mode not in ("r", "r+"):
            raise OptionError(f"mode must be 'r' or 'r+', got {mode!r}")
        target = local_path(path)
        if not target.exists():
            raise StoreError(f"there is no run store at {target}; check the path")
        read_root(target)
        if mode == "r":
            return cls(target, mode, None)
        lock = lock_of(target)
        try:
            return cls(target, mode, lock)
        except BaseException:
            lock.release()
            raise

    def _read_plan(self, document: Mapping[str, Any]) -> None:
        nodes = document["consolidated_metadata"]["metadata"]
        self.chains, self.draws = (int(n) for n in nodes["sample_stats/lp"]["shape"])
        warmup = nodes.get("warmup_sample_stats/lp", {"shape": (self.chains, 0)})
        self.warmup_draws = int(warmup["shape"][1])
        self._nodes: dict[str, Any] = {
            name: node for name, node in nodes.items() if node["node_type"] == "array"
        }

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the run, as they are on disk."""
        return dict(read_root(self.path)["attributes"])

    @property
    def committed(self) -> Counts:
        """Draws and warm-up draws that exist, per chain."""
        return self._slots.counts

    @property
    def spec(self) -> RunSpec:
        """What the run holds, read back from the store; without the observed data."""
        layout = self._slots.layout
        with xr.open_datatree(str(self.path), engine="zarr", consolidated=True) as tree:
            held = "posterior_moments" if "posterior_moments" in tree.children else "posterior"
            moments = tree[held].to_dataset()
            own, given = ("chain", "draw", "component"), own_names(tree)
            coords = {
                given.get(str(n), str(n)): ([given.get(str(d), str(d)) for d in c.dims], c.values)
                for n, c in moments.coords.items()
                if n not in own
            }
            cells = tree["monitor"].to_dataset() if "monitor" in tree.children else None
            cycles = tree["sample_stats"].to_dataset()["draw"].values
        return RunSpec(
            shape=tuple(layout["shape"]),
            chains=self.chains,
            draws=self.draws,
            warmup_draws=self.warmup_draws,
            dims=tuple(layout["dims"]),
            coords=coords,
            dtype=layout["dtype"],
            keep=layout["keep"],
            has_coarse=layout["has_coarse"],
            has_acceptance=layout.get("has_acceptance", False),
            has_weights=layout.get("has_weights", False),
            has_objective=layout.get("has_objective", False),
            monitor_rows=None if cells is None else cells["row_index"].values,
            monitor_columns=None if cells is None else cells["column_index"].values,
            draw_index=cycles,
            attrs=self.attrs,
        )

    def write_draws(
        self,
        chain: int,
        start: int,
        W: NDArray[Any],
        Ht: NDArray[Any],
        group: str = "posterior",
    ) -> None:
        """Write draws ``start, start + 1, ...`` of one chain; they exist after the next checkpoint.

        Parameters
        ----------
        chain, start
            Where they go.
        W, Ht
            (n, I, K) and (n, J, K); copied. H is stored as (component, column).
        group
            ``"posterior"`` or ``"posterior_coarse"``.

        Raises
        ------
        StoreError
            If the store was opened for reading, has no such group or no room, or
            the disk refuses.
        """
        self._append(f"{group}/W", chain, start, W)
        self._append(f"{group}/H", chain, start, np.swapaxes(Ht, 1, 2))

    def write_stats(
        self,
        chain: int,
        start: int,
        stats: Mapping[str, ArrayLike],
        group: str = "sample_stats",
    ) -> None:
        """Write statistics (n,) by name, of the draws ``start, start + 1, ...`` of one chain.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        for name, values in stats.items():
            self._append(f"{group}/{name}", chain, start, np.atleast_1d(np.asarray(values)))

    def write_moments(
        self,
        chain: int,
        *,
        W_mean: NDArray[Any],
        W_var: NDArray[Any],
        Ht_mean: NDArray[Any],
        Ht_var: NDArray[Any],
        count: int,
    ) -> None:
        """Replace one chain's streamed moments: W (I, K), H (J, K), number of cycles.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        values = {"W_mean": W_mean, "W_var": W_var, "H_mean": Ht_mean.T, "H_var": Ht_var.T}
        self._replace("posterior_moments", chain, values, count)

    def write_monitor(
        self, chain: int, *, mean: NDArray[Any], var: NDArray[Any], count: int
    ) -> None:
        """Replace one chain's streamed mean and variance (n_monitor,) at the monitored cells.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        self._replace("monitor", chain, {"mean": mean, "var": var}, count)

    def write_weights(
        self,
        *,
        weight: NDArray[Any],
        lp: NDArray[Any],
        stein_matrix: NDArray[Any],
        discrepancy: float,
        discrepancy_equal: float,
        attrs: Mapping[str, Any],
    ) -> None:
        """Write what is known of particles when all of them are there; last before `finish`.

        Readers see all of it once this has returned, and nothing before.

        Parameters
        ----------
        weight, lp
            (M,), of all particles: probability mass, log density up to a constant.
        stein_matrix
            (M, M).
        discrepancy, discrepancy_equal
            Under the weights, and under equal ones.
        attrs
            Of the group ``stein``, such as the scales of the kernel; not empty, JSON-able.

        Raises
        ------
        OptionError
            If shapes do not fit, or particles are not yet committed.
        StoreFormatError
            If the weights are no probability masses.
        StoreError
            As `write_draws`; after a crash the particles are as if never weighed.
        """
        done = self.committed.draws[0]
        values = weighted_values(
            self.draws, done, weight, lp, stein_matrix, (discrepancy, discrepancy_equal), attrs
        )
        self._array(f"{STEIN}/stein_matrix")  # refuses a run without weights
        with self._disk("the weights of particles"):
            describe_group(self.path, STEIN, {})
            for group, members in values.items():
                for name, value in members.items():
                    self._array(f"{group}/{name}")[...] = value
            self._writable().flush()
            describe_group(self.path, STEIN, attrs)

    def _replace(
        self, group: str, chain: int, values: Mapping[str, NDArray[Any]], count: int
    ) -> None:
        # A count of 0 marks values that are being replaced, should we be killed here.
        with self._disk(f"{group} of chain {chain}"):
            self._array(f"{group}/count")[chain] = 0
            for name, value in values.items():
                self._array(f"{group}/{name}")[chain] = value
            self._array(f"{group}/count")[chain] = count

    def checkpoint(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """Commit what was written so far, with the state from which the run can go on.

        Parameters
        ----------
        arrays
            Numeric arrays by name, any shapes.
        meta
            JSON-able; ``meta["draws"]`` is the number of draws that exist from now
            on (one number, or one per chain), ``meta["warmup_draws"]`` likewise
            (all, when left out). Everything up to there must have been written.

        Raises
        ------
        StoreError
            If the disk refuses; the previous checkpoint still counts.
        OptionError
            If ``meta`` or ``arrays`` cannot be kept.
        """
        if max(per_chain("draws", meta.get("draws"), self.chains)) > self.draws:
            raise OptionError(
                f"meta['draws'] is {meta['draws']}, but {self.path} has room for {self.draws} "
                "draws; call extend first"
            )
        with self._disk("a checkpoint"):
            self._buffer.flush()
            self._slots.commit(self._writable(), arrays, meta)

    def load_checkpoint(self) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and meta of the newest whole checkpoint; the draws it vouches for exist.

        Raises
        ------
        StoreFormatError
            If there is none, or none is whole.
        """
        return self._slots.load()

    def extend(self, draws: int, draw_index: ArrayLike | None = None) -> None:
        """Make room for ``draws`` draws in all.

        Parameters
        ----------
        draws
            At least as many as there is room for now.
        draw_index
            Cycle numbers of all of them (draws,); when not given the present ones
            are continued at their last spacing.

        Raises
        ------
        OptionError
            If that would shorten the run, if the cycle numbers do not fit, or if it is a run
            of particles, whose weights are those of a whole set.
        StoreError
            If the disk refuses; the store is as it was.
        """
        if draws < self.draws:
            raise OptionError(f"cannot shorten {self.path} from {self.draws} to {draws} draws")
        if f"{STEIN}/stein_matrix" in self._nodes and draws > self.draws:
            raise OptionError(
                f"{self.path} is a set of {self.draws} particles, weighted as a whole; to have "
                f"{draws}, start another run"
            )
        store = self._writable()
        index = self._continued(draws) if draw_index is None else np.asarray(draw_index)
        if index.shape != (draws,):
            raise OptionError(f"draw_index must have shape ({draws},), got {index.shape}")
        with self._disk("room for more draws"):
            self._buffer.flush()
            extend_skeleton(self.path, store, draws, index.astype(np.int64))
        self._arrays.clear()
        self._read_plan(read_root(self.path))

    def _continued(self, draws: int) -> NDArray[np.int64]:
        old = np.asarray(self._array("sample_stats/draw")[...], dtype=np.int64)
        step = int(old[-1] - old[-2]) if len(old) > 1 else 1
        first = int(old[-1]) + step if len(old) else 0
        return np.concatenate([old, first + step * np.arange(draws - len(old))])

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Merge attributes into the root's; hyperparameters among them go to ``constant_data``.

        Raises
        ------
        StoreError
            If the disk refuses; the attributes are as they were.
        """
        store = self._writable()
        document = read_root(self.path)
        document["attributes"] |= plain(attrs)
        with self._disk("attributes"):
            write_constants(zarr.open_group(store, mode="r+", use_consolidated=False), attrs)
            replace_json(self.path / NODE, document, scratch_folder(self.path))

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the last attributes, flush everything to disk and close."""
        self.update_attrs(attrs)
        with self._disk("the end of the run"):
            self._buffer.flush()
            self._writable().flush()
        self.close()

    def tree(self) -> xr.DataTree:
        """The draws that exist, lazily; see `daskfactor.results.trace.open_run`."""
        return committed_tree(self.path, self.committed)

    def close(self) -> None:
        """Let go of the store. What no checkpoint has committed is lost."""
        self.mode = "r"
        self._store = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _writable(self) -> DurableStore:
        if self._store is None:
            raise StoreError(f"{self.path} is open for reading only; open it with mode='r+'")
        return self._store

    def _array(self, path: str) -> Any:
        store = self._writable()
        if path not in self._nodes:
            raise StoreError(f"{self.path} has no {path}; this run was not planned with it")
        if path not in self._arrays:
            self._arrays[path] = zarr.open_array(store, path=path, mode="r+")
        return self._arrays[path]

    def _append(self, path: str, chain: int, start: int, block: NDArray[Any]) -> None:
        array = self._array(path)
        expected = (len(block), *array.shape[2:])
        if block.shape != expected:
            raise OptionError(f"{path} takes draws of shape {expected}, got {block.shape}")
        stop = start + len(block)
        if not (start >= 0 and stop <= array.shape[1] and 0 <= chain < self.chains):
            raise StoreError(
                f"{self.path} has room for {array.shape[1]} draws of {self.chains} chains in "
                f"{path}, got draws {start}..{stop - 1} of chain {chain}; call extend first"
            )
        with self._disk(path):
            self._buffer.append(path, chain, start, block, array.chunks[1])

    def _write_region(self, path: str, chain: int, start: int, block: NDArray[Any]) -> None:
        self._array(path)[chain, start : start + len(block)] = block

    def _disk(self, what: str) -> contextlib.AbstractContextManager[None]:
        draws = ", ".join(str(n) for n in self.committed.draws)
        safe = f"the last checkpoint is safe (draws per chain: {draws})"
        return disk_errors(what, self.path, safe)


def _take_place(new: Path, target: Path, aside: Path) -> None:
    """Put ``new`` where ``target`` is; what was there comes back if that fails."""
    if not target.exists():
        new.rename(target)
        return
    target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        aside.rename(target)
        raise
