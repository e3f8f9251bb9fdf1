"""Writer of a run into preallocated arrays, here in memory."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from daskfactor.errors import OptionError, StoreError
from daskfactor.runs.files import Checkpoints, Counts, plain
from daskfactor.runs.opening import check_weights, trimmed
from daskfactor.runs.schema import (
    STEIN,
    RunSpec,
    group_coords,
    layouts,
    tree_of,
)
from daskfactor.runs.stacks import indexed

if TYPE_CHECKING:
    from daskfactor.runs.backends import Reservation

Array = NDArray[Any]


@contextmanager
def reserved(store: str | PathLike[str] | None, overwrite: bool) -> Iterator["Reservation | None"]:
    """Reserve the name of a run's store for the block; yield None for a run in memory.

    Raises
    ------
    StoreError
        If the store exists and may not be replaced, another process writes it, or the disk fails.
    """
    if store is None:
        yield None
        return
    from daskfactor.runs.store import reserve  # zarr takes a tenth of a second

    with closing(reserve(fspath(store), overwrite)) as reservation:
        yield reservation


def sink_of(spec: RunSpec, reservation: "Reservation | None", state: tuple[Any, Any]) -> "Sink":
    """Return the writer of a run, in memory or in a store that begins with a checkpoint.

    Raises
    ------
    StoreError
        If the store cannot be written.
    """
    if reservation is None:
        return Sink(spec)
    from daskfactor.runs.store import RunStore

    return RunStore.begin(reservation, spec, state)


class Sink:
    """Writer of a run: arrays of the planned size, into which draws are written.

    The arrays are in memory and become those of the result; the subclass `RunStore` writes to disk.

    Parameters
    ----------
    spec
        Plan of the run.

    Attributes
    ----------
    chains, draws
        Planned numbers of chains and of draws.
    checkpoints
        Checkpoints of a store; None in memory.
    committed
        Numbers of committed draws and warm-up draws, per chain.
    """

    checkpoints: Checkpoints | None = None
    name: str = "this run"
    committed: Counts

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._plan_arrays(layouts(spec), spec.chains, spec.draws)
        self.committed = Counts((spec.draws,) * spec.chains, (spec.warmup_draws,) * spec.chains)
        self._attrs: dict[str, Any] = {}
        self._group_attrs: dict[str, Any] = {}

    def _plan_arrays(self, plan: Mapping[str, Any], chains: int, draws: int) -> None:
        """Plan arrays by their paths; each is opened when it is first written."""
        self.chains, self.draws = chains, draws
        self._plan, self._arrays = plan, dict[str, Any]()

    def write_draws(
        self, chain: int, start: int, W: Array, Ht: Array, group: str = "posterior"
    ) -> None:
        """Write draws ``start, start + 1, ...`` of one chain; the next checkpoint commits them.

        Parameters
        ----------
        chain, start
            Chain, and position of the first draw.
        W, Ht
            (n, I, K) and (n, J, K); copied. H is stored as (component, column).
        group
            ``"posterior"`` or ``"posterior_coarse"``.

        Raises
        ------
        StoreError
            If the store is closed, lacks the group or space, or the disk fails.
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
        """Yield parts of an axis of an array that may be written concurrently."""
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
        """Write weights and discrepancies of all particles; call it last before `finish`.

        Readers see all of them after this returns, and none before.

        Parameters
        ----------
        weight, lp
            Probability mass and log density (up to a constant) of all particles, (M,).
        stein_matrix
            Stein kernel of all pairs of particles, (M, M).
        discrepancy, discrepancy_equal
            Stein discrepancy with these weights, and with equal ones.
        attrs
            Attributes of the group ``stein``, such as kernel scales; not empty, JSON-able.

        Raises
        ------
        OptionError
            If particles are not yet committed.
        StoreFormatError
            If the weights are not probability masses.
        StoreError
            As `write_draws`; after a crash the particles have no weights.
        """
        done = self.committed.draws[0]
        if done < self.draws:
            raise OptionError(
                f"only {done} of {self.draws} particles are committed; write and checkpoint all of "
                "them before their weights"
            )
        check_weights(weight)
        values: dict[str, Any] = {
            "sample_stats/lp": lp[None],
            "sample_stats/weight": weight[None],
            f"{STEIN}/stein_matrix": stein_matrix,
            f"{STEIN}/discrepancy": discrepancy,
            f"{STEIN}/discrepancy_equal": discrepancy_equal,
        }
        self._array(f"{STEIN}/stein_matrix")  # raises for a run without weights
        with self._writing("the weights of particles"):
            self._describe_group(STEIN, {})
            for path, value in values.items():
                self._array(path)[...] = value
            self._describe_group(STEIN, attrs)

    def checkpoint(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Commit all written draws, with the state to resume a stored run.

        Parameters
        ----------
        arrays
            Numeric arrays by name, or functions that return them (see
            `daskfactor.runs.files.Late`).
        meta
            JSON-able; ``meta["draws"]`` is the number of draws to commit (one number, or one per
            chain), ``meta["warmup_draws"]`` likewise (by default all). All of them must have been
            written.

        Raises
        ------
        StoreError
            If the disk fails; the previous checkpoint is still valid.
        OptionError
            If ``meta`` or ``arrays`` cannot be stored.
        """
        # In memory, the state is lost with the process.
        self.committed = Counts((int(meta["draws"]),) * self.chains, self.committed.warmup_draws)

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes that were added to those of the plan."""
        return dict(self._attrs)

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Update attributes of the root; hyperparameters are also written to ``constant_data``.

        Raises
        ------
        StoreError
            If the disk fails; the attributes are unchanged.
        """
        self._attrs |= attrs

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the last attributes and close the store."""
        self.update_attrs(attrs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the store; arrays in memory stay valid."""

    def tree(self) -> xr.DataTree:
        """Return the committed draws as `open_run` would; in memory without a copy."""
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
                variable = layout.dims, np.asarray(values, dtype=layout.dtype), about
                groups[group] = groups[group].assign({name: variable})
        tree = tree_of(groups, plain(spec.root_attrs))
        return indexed(trimmed(tree, self.committed))

    def _opened(self, path: str) -> Any:
        """Return a planned array for writing."""
        variable, _, shape, dtype, _, fill, _ = self._plan[path]
        if variable.kind != "factor":
            return np.full(shape, fill, dtype)
        if not variable.name.startswith("H"):
            return np.empty(shape, dtype)
        # The engine has rows first.
        return np.empty((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2)

    def _array(self, path: str) -> Any:
        if path not in self._plan:
            raise StoreError(f"{self.name} has no {path}; it is not part of the plan of this run")
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
