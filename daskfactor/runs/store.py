"""Store of a run: a zarr group that is written during the run.

Any zarr reader sees the tree of results at its full planned size at any time; missing draws are
NaN. Draws are committed by checkpoints, and a checkpoint is atomic.

The metadata of all visible nodes are consolidated in the metadata file of the root. This file
determines the contents of the store: replacing it extends a run atomically, and nodes that it
omits (the folder ``checkpoint``) are invisible.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import PurePosixPath
from typing import Any, Final, Self

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec

from daskfactor.errors import OptionError, StoreError, StoreFormatError
from daskfactor.runs.backends import (
    Backend,
    Reservation,
    open_backend,
    refuse_url,
    view_of,
)
from daskfactor.runs.files import (
    CHECKPOINT,
    MARKER,
    NODE,
    STATE,
    Arrays,
    Checkpoints,
    Counts,
    counts_of,
    damaged,
    plain,
    read_marker,
    seal,
    write_json,
)
from daskfactor.runs.metadata import INDEX, nodes_of, read_root
from daskfactor.runs.opening import checked_store, committed_tree
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import (
    CELL_INDICES,
    COARSE,
    GROUP_ATTRS,
    MONITOR,
    WARMUP,
    RunSpec,
    group_coords,
    layouts,
    planned_draws,
)
from daskfactor.runs.writer import Writer
from daskfactor.urls import public_location

# Draws hardly compress, since only their exponents are not noise: on 8 MB of float32 draws, zstd
# saves 8 % at four times the reading time, and lz4 with bit shuffling 11 %. Plain bytes are
# fastest, and every zarr reader supports them.
_PLAIN: Final = (Crc32cCodec(),)
_PACKED: Final = (ZstdCodec(), Crc32cCodec())


class RunStore(Sink):
    """Writer of a run on disk or at a URL, from `begin` or `open`; one writer at a time.

    Any number of readers may use `open_run` at the same time. It is not thread-safe. Use it as a
    context manager, or call `close`.
    """

    checkpoints: Checkpoints

    def __init__(self, place: Backend) -> None:
        # The plan comes from the store, unlike that of a run in memory.
        self.name = self.path = place.name
        self._place: Backend | None = place
        self._writer = Writer(place.store)
        self._new_attrs: dict[str, Any] = {}  # the next commit writes them
        document = read_root(place)
        self._read_plan(document)
        self.checkpoints = Checkpoints(place, self.chains, self.warmup_draws)
        # Buffer of consecutive draws by path and chain, with the number of the first. It writes a
        # chunk once instead of once per draw, which is safe, as only checkpoints commit draws; it
        # has at most one chunk for each array.
        self._pending: dict[tuple[str, int], tuple[int, list[Any]]] = {}
        self._empty = False  # True from creation until the second checkpoint or the first draw
        # Complete an interrupted extension: write every node as in the metadata of the root.
        for name, node in nodes_of(document).items():
            if not _holds(place, f"{name}/{NODE}", node):
                write_json(place.store, f"{name}/{NODE}", node)

    @classmethod
    def begin(
        cls,
        reservation: Reservation,
        spec: RunSpec,
        state: tuple[Arrays, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Create an empty run store under a reserved name, and open it for writing.

        The store is created atomically, and replaces an earlier run with its first checkpoint; at
        a URL snapshots keep the earlier run until they expire.

        Parameters
        ----------
        reservation
            Reservation of the name, which the caller releases if this fails.
        spec
            Plan of the run.
        state
            Arrays that the run needs throughout, and metadata of the first checkpoint; the new
            store has both.

        Raises
        ------
        StoreError
            If the disk fails.
        """
        place = reservation.new_backend()
        try:
            with place.writing("a new run store", "nothing was changed", "begin again"):
                write_skeleton(place, spec)
                checkpoints = Checkpoints(place, spec.chains, spec.warmup_draws)
                if state is not None:
                    write_json(place.store, MARKER, checkpoints.write({}, state[1], state[0]))
                made = cls(place)
                made._empty = True
                if not reservation.replaces:
                    made.checkpoints.publish({}, "begun")
        except BaseException:
            place.close()
            raise
        return made

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Open a run store to continue it.

        Raises
        ------
        StoreError
            If there is no store at ``path``, or another process is writing to its folder.
        StoreFormatError
            If it is not a run store, is damaged or has a newer version.
        """
        view = view_of(path)
        if read_root(view)["attributes"]["format_version"] == 1:
            raise StoreFormatError(
                f"{view.name} was written by daskfactor 0.1.0; its draws can be read, but this "
                "version cannot resume it. For more draws, resume it with 0.1.0 or run again"
            )
        place = open_backend(view.name)
        try:
            return cls(place)
        except BaseException:
            place.close()
            raise

    def _read_plan(self, document: dict[str, Any]) -> None:
        nodes = nodes_of(document)
        arrays = {name: one for name, one in nodes.items() if one["node_type"] == "array"}
        self._plan_arrays(arrays, *map(int, nodes["sample_stats/lp"]["shape"]))
        self.warmup_draws = int(nodes.get(f"{WARMUP}/lp", {"shape": (0, 0)})["shape"][1])

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the run on disk."""
        document = read_root(self._place or view_of(self.path))
        return {**document["attributes"], **self._new_attrs}

    @property
    def committed(self) -> Counts:  # type: ignore[override]
        """Numbers of committed draws and warm-up draws, per chain."""
        return self.checkpoints.counts

    @property
    def cells(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Positions of the monitored cells, rows and columns; None if there are none."""
        if f"{MONITOR}/{CELL_INDICES[0]}" not in self._plan:
            return None
        view = self._place or view_of(self.path)
        store = checked_store(view, read_root(view))
        rows, columns = (
            zarr.open_array(store, path=f"{MONITOR}/{name}", mode="r")[...] for name in CELL_INDICES
        )
        return np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)

    def check_plan(
        self,
        chains: int,
        dtype: str,
        width: int,
        cycles: NDArray[np.int64],
        longer: bool = False,
    ) -> None:
        """Refuse a run whose chains, precision, components or draws differ from the arrays.

        With ``longer``, the run may have more draws than the arrays.

        Raises
        ------
        StoreFormatError
            If they differ.
        """
        stored = np.asarray(self._opened("sample_stats/draw")).tolist()
        planned = cycles[: self.draws].tolist() if longer else cycles.tolist()
        run = chains, dtype, width, planned
        nodes = [node for name, node in self._plan.items() if name.endswith("/W")]
        if any((self.chains, W["data_type"], W["shape"][-1], stored) != run for W in nodes):
            raise damaged(self.path, "its arrays are not those of the run that it describes")

    def checkpoint(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Commit all written draws, with the state to resume; see `Sink.checkpoint`."""
        if max(self.checkpoints.counts_in(meta).draws) > self.draws:
            raise OptionError(
                f"meta['draws'] is {meta['draws']}, but {self.path} has room for {self.draws} "
                "draws; call extend first"
            )
        with self._writing("a checkpoint"):
            self._flush()
            documents = {NODE: seal(self._root(), INDEX)} if self._new_attrs else {}
            first = self.checkpoints.commit(arrays, meta, documents)
        self._new_attrs = {}
        self._empty = self._empty and first and not max(self.committed.draws)

    def load_checkpoint(self) -> tuple[Mapping[str, NDArray[Any]], dict[str, Any]]:
        """Return the newest complete checkpoint, with the arrays that the run needs throughout.

        Its draws are committed.

        Raises
        ------
        StoreFormatError
            If there is no complete checkpoint.
        """
        return self.checkpoints.load()

    def extend(self, cycles: NDArray[np.int64]) -> None:
        """Extend arrays to more draws, with the cycle numbers of all draws, (draws,).

        Raises
        ------
        OptionError
            If this would shorten the run.
        StoreError
            If the disk fails; the store is unchanged.
        """
        draws = len(cycles)
        if draws < self.draws:
            raise OptionError(f"cannot shorten {self.path} from {self.draws} to {draws} draws")
        with self._writing("room for more draws"):
            self._flush()
            place, document = self._writable(), self._root()
            for name, node in document[INDEX]["metadata"].items():
                axes = node.get("dimension_names") or ()
                if "draw" in axes:
                    group = name.split("/")[0]
                    node["shape"][list(axes).index("draw")] = planned_draws(group, draws)
                    write_json(place.store, f"{name}/{NODE}", node)
                    if name == f"{group}/draw":
                        numbers = cycles[1::2] if group == COARSE else cycles
                        Writer(place.store).write(name, ..., numbers)
            self._commit(document, f"room for {draws} draws")
        self._writer = Writer(place.store)  # arrays of the old writer have the old length
        self._read_plan(document)

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Update attributes of the root with the next commit; see `Sink.update_attrs`."""
        self._writable()
        self._new_attrs |= plain(attrs)

    def _root(self) -> dict[str, Any]:
        """Return the document of the root with new attributes, whose constants are written."""
        for name, value in self._new_attrs.items():
            if f"constant_data/{name}" in self._plan:
                self._array(f"constant_data/{name}")[...] = value
        document = read_root(self._writable())
        document["attributes"] = {**document["attributes"], **self._new_attrs}
        return document

    def _commit(self, document: dict[str, Any], message: str) -> None:
        """Commit everything that was written, with the document of the root."""
        self.checkpoints.publish({NODE: seal(document, INDEX)}, message)
        self._new_attrs = {}

    def finish(self, attrs: Mapping[str, Any]) -> None:
        """Write the last attributes, flush everything to disk and close."""
        self.update_attrs(attrs)
        with self._writing("the end of the run"):
            self._flush()
            self._commit(self._root(), "the end of the run")
        self.close()

    def tree(self) -> xr.DataTree:
        """Return the committed draws lazily; see `daskfactor.runs.opening.open_run`."""
        view = view_of(self.path) if self._place is None else self._place.committed()
        return committed_tree(view, self.committed)

    def close(self, discard: bool = False) -> None:
        """Close the store, or remove it; uncommitted draws are lost."""
        self.checkpoints.close()
        place, self._place, self._arrays = self._place, None, {}
        if place is not None:
            place.discard() if discard else place.close()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the store, and remove it if the run failed before its first draw."""
        self.close(discard=self._empty and kind is not None and issubclass(kind, Exception))

    def _writable(self) -> Backend:
        if self._place is None:
            raise StoreError(f"{self.path} is closed; resume the run to write more")
        return self._place

    def parts(self, path: str, axis: int) -> Iterator[slice]:
        """Yield parts of an axis that share no chunk; see `Sink.parts`."""
        array = self._array(path)
        for low in range(0, array.shape[axis], array.chunks[axis]):
            yield slice(low, min(low + array.chunks[axis], array.shape[axis]))

    def _opened(self, path: str) -> Any:
        return self._writer.array(path)

    def _put(self, path: str, chain: int, start: int, block: NDArray[Any]) -> None:
        first, blocks = self._pending.get((path, chain), (start, []))
        if first + sum(map(len, blocks)) != start:
            self._flush(path, chain)
            first, blocks = start, []
        blocks.append(np.array(block, order="C"))
        self._pending[path, chain] = first, blocks
        length = self._array(path).chunks[1]
        if start + len(block) >= (first // length + 1) * length:
            self._flush(path, chain)

    def _flush(self, *places: Any) -> None:
        """Write the buffered draws of a path and chain, or of all."""
        for path, chain in [places] if places else list(self._pending):
            first, blocks = self._pending[path, chain]
            block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
            self._writer.write(path, (chain, slice(first, first + len(block))), block)
            del self._pending[path, chain]

    def _describe_group(self, group: str, attrs: Mapping[str, Any]) -> None:
        place, document = self._writable(), self._root()
        node = document[INDEX]["metadata"][group]
        before = node.get("attributes", {})
        after = {name: before[name] for name in GROUP_ATTRS if name in before} | plain(attrs)
        if before != after:
            node["attributes"] = after
            write_json(place.store, f"{group}/{NODE}", node)
            self._commit(document, f"about {group}")

    def _writing(self, what: str) -> AbstractContextManager[None]:
        if self._empty:
            return self._writable().writing(what, "nothing of this run is stored", "begin again")
        draws = ", ".join(str(n) for n in self.committed.draws)
        safe = f"the last checkpoint is safe (draws per chain: {draws})"
        return self._writable().writing(what, safe, "resume the run")


def _holds(place: Backend, key: str, node: Any) -> bool:
    """Return True if a metadata document exists and is equal to ``node``."""
    try:
        return bool(place.document(key) == node)
    except StoreError:
        raise
    except (OSError, ValueError):
        return False


def reserve(path: str | PathLike[str], overwrite: bool) -> Reservation:
    """Reserve the name of a new run store; the caller closes it.

    Raises
    ------
    StoreError
        As `check_place`, or if another process writes there.
    """
    return Reservation(public_location(path), lambda: check_place(path, overwrite))


def check_place(path: str | PathLike[str], overwrite: bool) -> bool:
    """Refuse a path that a new run store may not use; return True if it replaces a run.

    Raises
    ------
    StoreError
        If anything but a run store exists, or a run store without ``overwrite``.
    """
    refuse_url(public_location(path))
    view = view_of(path)
    contents = view.contents()
    if contents is None:
        return False
    try:
        chains, draws = nodes_of(read_root(view))["sample_stats/lp"]["shape"]
        done = ", ".join(str(count) for count in counts_of(read_marker(view), chains).draws)
    except StoreError as error:
        raise StoreError(
            f"{view.name} exists and is {contents}, not a run store that can be replaced; pass "
            "another path"
        ) from error
    if not overwrite:
        raise StoreError(
            f"{view.name} exists and holds a run (draws per chain: {done} of {draws}); pass "
            "another path, overwrite=True to replace it, or continue it with daskfactor.resume"
        )
    return True


def write_skeleton(place: Backend, spec: RunSpec) -> None:
    """Write an empty run store with attributes and coordinates.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    store, writer = place.store, Writer(place.store)
    top = zarr.create_group(store=store, zarr_format=3)
    plan = layouts(spec)
    for group in dict.fromkeys(layout.variable.group for layout in plan.values()):
        top.create_group(group)
        _write_coords(store, group, group_coords(group, spec))
    for path, (variable, dims, shape, dtype, chunks, fill, value) in plan.items():
        top.create_array(
            path,
            shape=shape,
            chunks=chunks,
            dtype=dtype,
            fill_value=fill,
            dimension_names=dims,
            compressors=_PACKED if variable.kind == "data" else _PLAIN,
            attributes={"description": variable.doc},
        )
        if variable.name == "count":  # 0 means that there are no moments yet
            value = 0
        elif variable in spec.constants and value is None:
            value = np.nan
        if value is not None:
            writer.write(path, ..., value)
    note = "private: what a stopped run needs to go on"
    state = top.create_group(CHECKPOINT, attributes={"description": note})
    dims = ("checkpoint_slot", "checkpoint_byte")
    state.create_array(STATE, shape=(2, 0), chunks=(1, 1), dtype="uint8", dimension_names=dims)
    paths = sorted(PurePosixPath(path) for path, _ in top.members(max_depth=None))
    nodes = {
        str(path): place.document(f"{path}/{NODE}") for path in paths if path.parts[0] != CHECKPOINT
    }
    index = {"kind": "inline", "must_understand": False, "metadata": nodes}
    document = {"zarr_format": 3, "node_type": "group", "attributes": plain(spec.root_attrs)}
    write_json(store, NODE, seal(document | {INDEX: index}, INDEX))


def _write_coords(store: Any, group: str, coords: xr.Dataset) -> None:
    # Object arrays use zarr's string type; fixed-width text has no specification yet.
    text = {
        name: (coord.dims, coord.values.astype(object), coord.attrs)
        for name, coord in coords.coords.items()
        if coord.dtype.kind == "U"
    }
    encoding = {name: {"compressors": _PACKED} for name in coords.coords}
    written: Any = coords.assign_coords(text)
    written.to_zarr(
        store,
        group=group,
        mode="a",
        zarr_format=3,
        consolidated=False,
        encoding=encoding,
        write_empty_chunks=True,
    )
