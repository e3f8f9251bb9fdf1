"""What a run writes, into arrays that are as large as the plan; here those of a run in memory."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError, StoreError
from daskfactor.results.files import Checkpoints, Counts, plain
from daskfactor.results.opening import check_weights, trimmed
from daskfactor.results.schema import (
    STEIN,
    RunSpec,
    group_coords,
    layouts,
    tree_of,
)
from daskfactor.results.stacks import indexed

if TYPE_CHECKING:
    from daskfactor.results.backends import Reservation

Array = NDArray[Any]


@contextmanager
def reserved(store: str | PathLike[str] | None, overwrite: bool) -> Iterator["Reservation | None"]:
    """Reserve the name of a run's store for the block; yield None for a run in memory.

    Raises
    ------
    StoreError
        If something is there that may not be replaced, another process writes there, or the disk
        refuses.
    """
    if store is None:
        yield None
        return
    from daskfactor.results.store import reserve  # zarr takes a tenth of a second

    with closing(reserve(fspath(store), overwrite)) as reservation:
        yield reservation


def sink_of(spec: RunSpec, reservation: "Reservation | None", state: tuple[Any, Any]) -> "Sink":
    """Make what a run writes into, in memory or in a store that begins with a checkpoint.

    Raises
    ------
    StoreError
        If the store cannot be written.
    """
    if reservation is None:
        return Sink(spec)
    from daskfactor.results.store import RunStore

    return RunStore.begin(reservation, spec, state)


class Sink:
    """A run's arrays at their full planned size, and the draws that are written into them.

    These are in memory, and they are the arrays that the results will be; those of a
    `RunStore`, which is a sink too, are on disk.

    Parameters
    ----------
    spec
        What the run will hold.

    Attributes
    ----------
    chains, draws
        How many are planned.
    checkpoints
        What a stored run saves; None: there is no store.
    committed
        Draws and warm-up draws that exist, per chain.
    """

    checkpoints: Checkpoints | None = None
    name: str = "this run"
    committed: Counts

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._lay_out(layouts(spec), spec.chains, spec.draws)
        self.committed = Counts((spec.draws,) * spec.chains, (spec.warmup_draws,) * spec.chains)
        self._attrs: dict[str, Any] = {}
        self._group_attrs: dict[str, Any] = {}

    def _lay_out(self, plan: Mapping[str, Any], chains: int, draws: int) -> None:
        """Plan arrays by their paths; each is opened when it is first written."""
        self.chains, self.draws = chains, draws
        self._plan, self._arrays = plan, dict[str, Any]()

    def write_draws(
        self, chain: int, start: int, W: Array, Ht: Array, group: str = "posterior"
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
        self.append(f"{group}/W", chain, start, W)
        self.append(f"{group}/H", chain, start, np.swapaxes(Ht, 1, 2))

    def append(self, path: str, chain: int, start: int, block: Array) -> None:
        """Write ``start, start + 1, ...`` of one chain into an array of draws; see `write_draws`.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        with self._writing(path):
            array = self._array(path)
        expected = (len(block), *array.shape[2:])
        if block.shape != expected:
            raise OptionError(f"{path} takes draws of shape {expected}, got {block.shape}")
        stop = start + len(block)
        if not (start >= 0 and stop <= array.shape[1] and 0 <= chain < self.chains):
            raise StoreError(
                f"{self.name} has room for {array.shape[1]} draws of {self.chains} chains in "
                f"{path}, got draws {start}..{stop - 1} of chain {chain}; call extend first"
            )
        with self._writing(path):
            self._put(path, chain, start, block)

    def write_stats(
        self, chain: int, start: int, stats: Mapping[str, ArrayLike], group: str = "sample_stats"
    ) -> None:
        """Write statistics (n,) by name, of the draws ``start, start + 1, ...`` of one chain.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        for name, values in stats.items():
            self.append(f"{group}/{name}", chain, start, np.atleast_1d(np.asarray(values)))

    def parts(self, path: str, axis: int) -> Iterator[slice]:
        """Say which parts of an axis of an array may be written at the same time."""
        yield slice(0, self._array(path).shape[axis])

    def write(self, path: str, region: Any, values: Any) -> None:
        """Write a region of an array.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        with self._writing(path):
            self._array(path)[region] = values

    @contextmanager
    def replacing(self, group: str, chain: int, count: int) -> Iterator[None]:
        """Have one chain's streamed moments written in the block, those of ``count`` cycles.

        ``group`` is that of the factors' moments, or of the monitored cells'.

        Raises
        ------
        StoreError
            As `write_draws`.
        """
        # A count of 0 marks values that are being replaced, should we be killed here.
        self.write(f"{group}/count", chain, 0)
        yield
        self.write(f"{group}/count", chain, count)

    def write_weights(
        self,
        *,
        weight: Array,
        lp: Array,
        stein_matrix: Array,
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
            If particles are not yet committed.
        StoreFormatError
            If the weights are no probability masses.
        StoreError
            As `write_draws`; after a crash the particles are as if never weighed.
        """
        done = self.committed.draws[0]
        if done < self.draws:
            raise OptionError(
                f"only {done} of {self.draws} particles are there; write and checkpoint them all "
                "before their weights"
            )
        check_weights(weight)
        values: dict[str, Any] = {
            "sample_stats/lp": lp[None],
            "sample_stats/weight": weight[None],
            f"{STEIN}/stein_matrix": stein_matrix,
            f"{STEIN}/discrepancy": discrepancy,
            f"{STEIN}/discrepancy_equal": discrepancy_equal,
        }
        self._array(f"{STEIN}/stein_matrix")  # refuses a run without weights
        with self._writing("the weights of particles"):
            self._describe_group(STEIN, {})
            for path, value in values.items():
                self._array(path)[...] = value
            self._describe_group(STEIN, attrs)

    def checkpoint(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Commit what was written so far, with the state from which a stored run can go on.

        Parameters
        ----------
        arrays
            Numeric arrays by name, any shapes, or functions that make them (see
            `daskfactor.results.files.Late`).
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
        # In memory the state goes with the process.
        self.committed = Counts((int(meta["draws"]),) * self.chains, self.committed.warmup_draws)

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the run that have been added to those of its plan."""
        return dict(self._attrs)

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Merge attributes into the root's; hyperparameters among them go to ``constant_data``.

        Raises
        ------
        StoreError
            If the disk refuses; the attributes are as they were.
        """
        self._attrs |= attrs

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the last attributes and let go of the store."""
        self.update_attrs(attrs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let go of the store; arrays in memory stay with the tree."""

    def tree(self) -> xr.DataTree:
        """Give the draws that exist, as `open_run` would and, in memory, without a copy."""
        spec = replace(self.spec, attrs={**self.spec.attrs, **self._attrs})
        groups: dict[str, Any] = {}
        for path, layout in layouts(spec).items():
            group, name = layout.variable.group, layout.variable.name
            values = self._arrays.get(path, layout.value)
            if values is not None:
                if group not in groups:
                    groups[group] = group_coords(group, spec)
                    groups[group].attrs |= self._group_attrs.get(group, {})
                about = {"description": layout.variable.doc}
                found = layout.dims, np.asarray(values, dtype=layout.dtype), about
                groups[group] = groups[group].assign({name: found})
        tree = tree_of(groups, plain(spec.root_attrs))
        return indexed(trimmed(tree, self.committed))

    def _opened(self, path: str) -> Any:
        """Give a planned array, to be written."""
        variable, _, shape, dtype, _, fill, _ = self._plan[path]
        if variable.kind != "factor":
            return np.full(shape, fill, dtype)
        if not variable.name.startswith("H"):
            return np.empty(shape, dtype)
        # As the engine has them, rows first.
        return np.empty((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2)

    def _array(self, path: str) -> Any:
        if path not in self._plan:
            raise StoreError(f"{self.name} has no {path}; this run was not planned with it")
        if path not in self._arrays:
            self._arrays[path] = self._opened(path)
        return self._arrays[path]

    def _put(self, path: str, chain: int, start: int, block: Array) -> None:
        self._array(path)[chain, start : start + len(block)] = block

    def _describe_group(self, group: str, attrs: Mapping[str, Any]) -> None:
        """Replace the attributes of a group."""
        self._group_attrs[group] = plain(attrs)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()
