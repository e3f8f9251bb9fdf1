"""Blocks of one part of the data on the device: gradients, updates and fits of all at once.

Blocks of a part share no band, so that W and H are met by whole: row i of W by its block alone.
Dense blocks are a stack around three batched matrix products; of sparse ones a warp takes a row,
then a column: no sum has two writers, and all have the same order every time. Definitions are
those of :class:`daskfactor.kernels.views.Sums`.

Source: Şimşekli et al. 2015, section 3 (parts), section 5 (a GPU).
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from daskfactor.kernels.cuda import source
from daskfactor.kernels.cuda.device import Calls, Device, DeviceArray, Host, current
from daskfactor.kernels.philox import Address
from daskfactor.kernels.views import BlockView, Kind, SparseBlock, Sums
from daskfactor.models.likelihood import Likelihood

Arrays = tuple[DeviceArray, ...]
Pair = tuple[DeviceArray | None, DeviceArray | None]
NONE: Pair = (None, None)
TILE_BYTES = 2**30
"""Largest size of a tile of means."""
SMALL_BYTES = 2**24
"""Largest size of the means of a part whose launches are recorded."""
KINDS: dict[Kind, int] = {"score": 0, "ratio": 1}
"""Kinds of terms by their numbers in ``blocks.cu``."""


@dataclass
class Side:
    """Bands of a part's blocks in a factor of ``size`` rows: block b begins at ``start[b]``."""

    start: NDArray[np.int64]
    count: NDArray[np.int64]
    size: int

    @cached_property
    def most(self) -> int:
        """Rows of the longest band."""
        return int(self.count.max())

    @cached_property
    def plain(self) -> bool:
        """True if bands are equally long and in order, so that the factor is their stack."""
        starts = self.most * np.arange(len(self.count))
        return bool((self.count == self.most).all() and (self.start == starts).all())


class Part:
    """Blocks of a part on the device, as kernels take them.

    Parameters
    ----------
    rows, cols
        Their bands.
    arrays
        Arrays of `packed`, on the device.
    zeros
        True if cells that sparse blocks do not store are zeros; None: blocks are dense.
    """

    def __init__(
        self, rows: Side, cols: Side, arrays: dict[str, DeviceArray], zeros: bool | None
    ) -> None:
        self.rows, self.cols, self.arrays, self.zeros = rows, cols, arrays, zeros
        self.sides, self.weights = (rows, cols), arrays.get("weights")
        self.device: Device = current()
        self._even: tuple[list[bytes], list[DeviceArray]] | None = None
        self._recorded: dict[str, tuple[Any, Arrays, Calls, Arrays]] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks of the part."""
        return len(self.rows.start)

    @cached_property
    def places(self) -> Arrays:
        """Starts and counts of rows, then of columns, as kernels take them."""
        arrays = (array for side in self.sides for array in (side.start, side.count))
        return tuple(map(self.device.put, arrays))

    def evenness(self, numbers: Sequence[Any]) -> Sequence[DeviceArray]:
        """Return numbers of the bands of both factors on the device, copied when they change."""
        arrays = [np.broadcast_to(np.asarray(each, np.float64), self.blocks) for each in numbers]
        key = [array.tobytes() for array in arrays]
        if self._even is None or self._even[0] != key:
            self._even = key, [self.device.put(array) for array in arrays]
        return self._even[1]

    # -- kernels that know no law ----------------------------------------------------------

    def run(self, name: str, threads: int, W: DeviceArray, *arguments: Any) -> None:
        """Launch a kernel that knows no law."""
        self.device.launch(source.bands(source.NAMES[W.dtype.char]), name, threads, *arguments)

    def stacked(self, factor: int, rows: DeviceArray) -> DeviceArray:
        """Stack the bands of a factor: (B, n, K), zeros behind a band's last row."""
        side, K = self.sides[factor], rows.shape[1]
        if side.plain:
            return rows.reshape(self.blocks, side.most, K)
        out = self.device.empty((self.blocks, side.most, K), rows.dtype)
        self._each("stack_rows", factor, side.most, rows, rows, out)
        return out

    def spread(self, factor: int, stack: DeviceArray, rows: DeviceArray, first: int = 0) -> None:
        """Add a stack of rows, from row ``first`` of each band on, to a factor's."""
        self._each("spread_rows", factor, stack.shape[1], rows, np.int64(first), stack, rows)

    def again(self, name: str, key: Any, factors: Arrays, make: Callable[[], Arrays]) -> Arrays:
        """Repeat recorded launches for the same factors and numbers, into the same arrays."""
        record = self._recorded.get(name)
        if record is not None and record[0] == key and all(map(operator.is_, record[1], factors)):
            self.device.again(record[2])
            return record[3]
        with self.device.recording() as calls:
            out = make()
        self._recorded[name] = key, factors, calls, out
        return out

    def add_totals(self, factor: int, by: float, totals: DeviceArray, rows: DeviceArray) -> None:
        """Add ``by`` times the totals of its block (B, K) to every row of a factor."""
        most = self.sides[factor].most
        self._each("add_totals", factor, most, rows, np.float64(by), totals, rows)

    def _bands(self, factor: int, n: int, K: int) -> tuple[Any, ...]:
        """Return sizes and bands of a factor as kernels take them."""
        sizes = np.int64(self.blocks), np.int64(n), np.int64(K)
        return *sizes, *self.places[2 * factor : 2 * factor + 2]

    def _each(self, name: str, factor: int, n: int, like: DeviceArray, *arguments: Any) -> None:
        """Launch a kernel over the rows of all bands of a factor."""
        K = like.shape[1]
        self.run(name, self.blocks * n * K, like, *self._bands(factor, n, K), *arguments)

    def totals(self, factor: int, rows: DeviceArray) -> DeviceArray:
        """Return column sums of the bands of a factor: (B, K), in float64."""
        chunks, K = -(-self.sides[factor].most // source.CHUNK), rows.shape[1]
        out = self.device.empty((self.blocks, chunks, K), np.float64)
        self._each("sum_rows", factor, chunks, rows, rows, out)
        return out.sum(axis=1)

    def grams(self, factor: int, rows: DeviceArray, wide: bool = False) -> DeviceArray:
        """Return Gram matrices of the bands of a factor: (B, K, K)."""
        stack = self.stacked(factor, rows)
        stack = stack.astype(np.float64) if wide else stack
        return self.device.products(stack, stack, (True, False))

    def take_products(
        self, factor: int, by: float, rows: DeviceArray, other: Any, fits: DeviceArray
    ) -> None:
        """Subtract ``by`` times products with rows of a factor from its rows' fits.

        ``other`` are the totals of their blocks (B, K), in float64, or a stack (B, n, K).
        """
        totals, stack = (other, None) if other.ndim == 2 else (None, other)
        most = self.sides[factor].most
        arguments = np.float64(by), rows, totals, stack, fits
        bands = self._bands(factor, most, rows.shape[1])
        self.run("take_products", 32 * self.blocks * most, rows, *bands, *arguments)

    def tiles(self, dtype: np.dtype[Any], each: int) -> Iterator[tuple[int, int]]:
        """Cut the rows of all blocks into tiles whose means fit into `TILE_BYTES`."""
        m, line = self.rows.most, self.blocks * self.cols.most * dtype.itemsize * each
        rows = max(1, min(m, TILE_BYTES // max(1, line)))
        for begin in range(0, m, rows):
            yield begin, min(begin + rows, m)


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass over all entries of a part: their law, the factors, and the smallest mean."""

    part: Part
    likelihood: Likelihood
    factors: Arrays
    floor: float

    @cached_property
    def source(self) -> source.Source:
        """Kernels of these blocks under the law."""
        part, W = self.part, self.factors[0]
        values = None if part.zeros is not None else part.arrays["values"].dtype.name
        kind = values, bool(part.zeros), part.weights is not None
        K = 0 if values is not None else W.shape[1]
        return source.blocks(self.likelihood, source.NAMES[W.dtype.char], *kind, K)

    def again(
        self, name: str, number: Any, make: Callable[[], Arrays], repeats: bool = True
    ) -> Arrays:
        """Repeat launches, if they ``repeats`` and take longer to prepare than to run."""
        part, law = self.part, self.likelihood
        cells = part.blocks * part.rows.most * part.cols.most
        small = part.zeros is None and cells * self.factors[0].dtype.itemsize <= SMALL_BYTES
        if not repeats or not small or law.numbers:
            return make()
        return part.again(name, (law, number, self.floor), self.factors, make)

    def launch(self, name: str, threads: int, *arguments: Any) -> None:
        """Launch a kernel of the law."""
        self.part.device.launch(self.source, name, threads, *arguments)

    @cached_property
    def law(self) -> tuple[Any, ...]:
        """The smallest mean, numbers of the law, and their stride, as kernels take them."""
        numbers: Any = self.likelihood.numbers
        stride = int(len(numbers) == 1 and np.ndim(numbers[0]) > 0)
        if not numbers:
            array = None
        else:
            array = numbers[0] if stride else self.part.device.put(np.array(numbers, np.float64))
        return np.float64(self.floor), array, np.int64(stride)

    def lines(self, begin: int, end: int) -> tuple[int, tuple[Any, ...]]:
        """Return threads for rows of all dense blocks, and arguments of these and the law."""
        part = self.part
        sizes = part.blocks, part.rows.most, part.cols.most, end - begin, begin
        data = *map(np.int64, sizes), *part.places, part.arrays["values"], part.weights
        return 32 * part.blocks * (end - begin), (*data, *self.law)

    @property
    def entries(self) -> tuple[Any, ...]:
        """Sparse blocks by rows, factors and the law, as kernels take them."""
        (W, H), arrays = self.factors, self.part.arrays
        stored = arrays["indptr"], arrays["cols"], arrays["values"], self.part.weights
        return np.int64(len(W)), *stored, W, H, *self.law


# -- making parts --------------------------------------------------------------------------

Views = Iterable[BlockView | SparseBlock]
Place = Callable[[tuple[int, ...], Any], Host]
"""Makes an array in memory from which the device copies by itself."""


def packed(
    views: Views, rows: Side, cols: Side, dtype: np.dtype[Any], place: Place
) -> dict[str, Host]:
    """Put the blocks of a part into arrays that go to the device as they are.

    Dense: ``values`` (B, m, n), and ``weights``. Sparse: the rows of all blocks, and their
    columns, with ``places`` of the columns' entries among those of rows. A view need not
    outlive the next one, as those of files do not.
    """
    out: dict[str, Host] = {}
    shape, blocks = (len(rows.start), rows.most, cols.most), list[SparseBlock]()
    for b, view in enumerate(views):
        if isinstance(view, SparseBlock):
            weights = None if view.weights is None else view.weights.copy()
            names = "indptr", "indices", "values"
            copies = {name: getattr(view, name).copy() for name in names}
            blocks.append(view._replace(**copies, weights=weights))
            continue
        kind = view.array.dtype if source.is_value_type(view.array.dtype) else dtype
        cells = {"values": view.block} | ({} if view.weights is None else {"weights": view.weights})
        for name, array in cells.items():
            if name not in out:
                out[name] = place(shape, kind if name == "values" else dtype)
            out[name][b, : view.m, : view.n] = array
    return out or _packed_sparse(blocks, rows, cols, dtype, place)


def entries_on_device(block: SparseBlock, dtype: np.dtype[Any]) -> Part:
    """Copy a sparse block with factors that no other block has to the device."""
    rows, cols = (Side(np.zeros(1, np.int64), np.array([n]), n) for n in (block.m, block.n))
    arrays, put = packed([block], rows, cols, dtype, np.empty), current().put
    return Part(rows, cols, {name: put(array) for name, array in arrays.items()}, block.zeros)


def _packed_sparse(
    blocks: Sequence[SparseBlock], rows: Side, cols: Side, dtype: np.dtype[Any], place: Place
) -> dict[str, Host]:
    counts, columns = np.zeros(rows.size, np.int64), list[NDArray[np.int32]]()
    order = np.argsort(rows.start, kind="stable").tolist()  # blocks follow each other as rows do
    for b in order:
        counts[rows.start[b] : rows.start[b] + blocks[b].m] = np.diff(blocks[b].indptr)
        columns.append(blocks[b].indices.astype(np.int32) + np.int32(cols.start[b]))
    column = np.concatenate(columns)

    def joined(name: str) -> Host:
        parts = [getattr(blocks[b], name) for b in order]
        return np.concatenate(parts, out=place(column.shape, dtype))

    def placed(array: Host, kind: Any) -> Host:
        out = place(array.shape, kind)
        out[:] = array
        return out

    entries = np.arange(column.size), column, np.concatenate(([0], np.cumsum(counts)))
    by_column = csr_array(entries, shape=(rows.size, cols.size)).tocsc()  # rows ascend in each
    arrays = {"values": joined("values"), "indptr": placed(entries[2], np.int64)}
    arrays |= {} if blocks[0].weights is None else {"weights": joined("weights")}
    arrays |= {"cols": placed(column, np.int32), "places": placed(by_column.data, np.int64)}
    arrays |= {"rows": placed(by_column.indices, np.int32)}
    return arrays | {"starts": placed(by_column.indptr, np.int64)}


# -- operations of programs ------------------------------------------------------------------


def gradient(entries: Pass, scale: float, curvatures: Arrays | None = None) -> Arrays:
    """Return both factors' gradients, of all rows; ``curvatures`` gain theirs.

    Gradients may be buffers of the part, good until the next call.
    """
    device = entries.part.device

    def make() -> Arrays:
        out = tuple(device.empty(array.shape, array.dtype) for array in entries.factors)
        for array in out:
            device.clear(array)
        accumulate(entries, "score", Sums(out, curvatures or ()), scale)
        return out

    return entries.again("gradient", scale, make, curvatures is None)


def accumulate(entries: Pass, kind: Kind, sums: Sums, scale: float = 1.0) -> None:
    """Add the sums over all entries of the part to the arrays of ``sums``, of all rows.

    As `daskfactor.kernels.blockwise.accumulate`.
    """
    add = _add_dense if entries.part.zeros is None else _add_sparse
    add(entries, kind, scale * entries.likelihood.share if kind == "score" else 1.0, sums)


def _add_dense(entries: Pass, kind: Kind, scale: float, sums: Sums) -> None:
    part, device, (W, H) = entries.part, entries.part.device, entries.factors
    w, h, curved = part.stacked(0, W), part.stacked(1, H), bool(sums.curvatures)
    columns: dict[int, DeviceArray] = {}
    for begin, end in part.tiles(W.dtype, 1 + curved):
        rows = w[:, begin:end]
        tile = device.products(rows, h, (False, True))
        tile2 = device.empty(tile.shape, tile.dtype) if curved else None
        threads, lines = entries.lines(begin, end)
        # Before means become terms.
        names = ("dense_row_fits", threads), ("dense_col_fits", part.blocks * part.cols.most)
        for (name, count), fits in zip(names, sums.fits or NONE, strict=True):
            if fits is not None:
                share = np.float64(entries.likelihood.share)
                entries.launch(name, count, *lines, share, tile, fits)
        numbers = np.int32(KINDS[kind]), W.dtype.type(scale)
        entries.launch("dense_terms", threads, *lines, *numbers, tile, tile2)
        pairs = (tile, sums.terms), (tile2, sums.curvatures or NONE)
        for number, (terms, (row_sums, column_sums)) in enumerate(pairs):
            if row_sums is not None and part.rows.plain:
                place = part.stacked(0, row_sums)[:, begin:end]
                device.products(terms, h, out=place, add=True)
            elif row_sums is not None:
                part.spread(0, device.products(terms, h), row_sums, begin)
            if column_sums is not None:
                more = {"out": columns[number], "add": True} if number in columns else {}
                columns[number] = device.products(terms, rows, (True, False), **more)
    for number, total in columns.items():
        part.spread(1, total, (sums.terms, sums.curvatures)[number][1])


def _add_sparse(entries: Pass, kind: Kind, scale: float, sums: Sums) -> None:
    first, second, fits = (arrays or NONE for arrays in sums[:3])
    part, device, (W, H) = entries.part, entries.part.device, entries.factors
    if part.zeros:
        for by, pair in ((-scale if kind == "score" else 0.0, first), (1.0, second)):
            for factor, out in enumerate(pair):
                if out is not None and by:
                    _add_zeros(entries, factor, by, out)
    a = device.empty(part.arrays["values"].shape, W.dtype)
    c = device.empty(a.shape, W.dtype) if second[1] is not None else None
    numbers = np.int32(KINDS[kind]), W.dtype.type(scale)
    rows = *entries.entries, *numbers, a, c, first[0], second[0]
    entries.launch("sparse_rows", 32 * len(W), *rows)
    if first[1] is not None:
        stored = (part.arrays[name] for name in ("starts", "rows", "places"))
        columns = np.int64(len(H)), *stored, a, c, W, first[1], second[1]
        entries.launch("sparse_cols", 32 * len(H), *columns)
    if any(array is not None for array in fits):
        _take_fits(entries, fits)


def _take_fits(entries: Pass, fits: Pair) -> None:
    """Subtract deviances of sparse rows, or columns, from their fits."""
    part, (W, H), share = entries.part, entries.factors, np.float64(entries.likelihood.share)
    shape = part.arrays["values"].shape
    each = None if fits[1] is None else part.device.empty(shape, np.float64)
    rows = *entries.entries, share, each, fits[0]
    entries.launch("sparse_row_fits", 32 * len(W), *rows)
    if each is not None:
        columns = np.int64(len(H)), part.arrays["starts"], part.arrays["places"], each
        entries.launch("sparse_col_fits", 32 * len(H), *columns, share, fits[1])
    for factor, array in enumerate(fits):
        if part.zeros and array is not None:
            _take_zeros(entries, factor, array)


def _add_zeros(entries: Pass, factor: int, by: float, out: DeviceArray) -> None:
    """Add ``by`` times the curvatures of zeros in all cells, times the other factor."""
    part, theta, other = entries.part, entries.factors[factor], entries.factors[1 - factor]
    if entries.likelihood.zeros == "constant":
        part.add_totals(factor, by, part.totals(1 - factor, other), out)
        return
    gram = part.grams(1 - factor, other) * out.dtype.type(by)
    part.spread(factor, part.device.products(part.stacked(factor, theta), gram), out)


def _take_zeros(entries: Pass, factor: int, fits: DeviceArray) -> None:
    """Subtract deviances of zeros in all cells from the fits of a factor's rows."""
    part, theta, other = entries.part, entries.factors[factor], entries.factors[1 - factor]
    share = entries.likelihood.share
    if entries.likelihood.zeros == "constant":
        part.take_products(factor, share, theta, part.totals(1 - factor, other), fits)
        return
    stack = part.device.products(part.stacked(factor, theta), part.grams(1 - factor, other))
    part.take_products(factor, 0.5 * share, theta, stack, fits)


def add_subsample(
    entries: Pass,
    draws: tuple[NDArray[np.int64], Address],
    scale: float,
    gradients: Arrays,
    curvature: tuple[Arrays, float] | None = None,
) -> None:
    """Add the terms of drawn entries of each block to both factors' gradients, of all rows.

    ``draws`` are how many entries of each block, (B,), and the address of each block's.
    """
    part = entries.part
    drawn = replace(entries, part=_drawn(part, entries.factors[0].dtype, *draws))
    sums, weight = curvature or ((), 0.0)
    curvatures = tuple(part.device.zeros(array.shape, array.dtype) for array in sums)
    _add_sparse(drawn, "score", scale, Sums(gradients, curvatures))
    for array, gain in zip(sums, curvatures, strict=True):
        array += array.dtype.type(weight) * gain


def _drawn(part: Part, dtype: np.dtype[Any], counts: NDArray[np.int64], address: Address) -> Part:
    """Draw entries of each block, and put them together as sparse blocks of them alone are."""
    device, stored, draws = part.device, part.arrays, int(counts.sum())
    values = None if part.zeros is not None else stored["values"].dtype.name
    code = source.draws(dtype.name, values, bool(part.zeros))

    def numbers(kind: Any, needed: bool = True) -> DeviceArray | None:
        return device.empty((draws,), kind) if needed else None

    def run(name: str, *arguments: Any, threads: int = draws) -> None:
        device.launch(code, name, threads, *arguments)

    weighed = part.weights is not None
    cols, real, weights = numbers(np.int32), numbers(dtype), numbers(dtype, weighed)
    keys, column_keys, places = (device.empty((draws,), np.int64) for _ in range(3))
    ends, streams = map(device.put, (np.cumsum(counts), np.asarray(address.factor, np.int64)))
    words = np.uint64(address.iteration), *map(np.uint32, address.key)
    cells = stored["values"], np.int64(part.rows.most), np.int64(part.cols.most)
    if values is None:
        cells = stored["values"], stored["indptr"], stored["cols"]
    count = np.int64(draws)
    blocks = np.int64(part.blocks), ends, streams, *words, *part.places
    run("draw_entries", count, *blocks, *cells, part.weights, keys, cols, real, weights)
    keys.sort()
    arrays = {"cols": numbers(np.int32), "values": numbers(dtype)}
    arrays |= {"weights": numbers(dtype)} if weighed else {}
    ordered = *arrays.values(), *(() if weighed else (None,)), column_keys
    run("order_draws", count, keys, cols, real, weights, *ordered)
    column_keys.sort()
    arrays |= {"places": places, "rows": numbers(np.int32)}
    run("place_draws", count, keys, column_keys, places, arrays["rows"])
    for name, side, sort_keys in (("indptr", part.rows, keys), ("starts", part.cols, column_keys)):
        arrays[name] = device.empty((side.size + 1,), np.int64)
        starts = np.int64(side.size), count, sort_keys, arrays[name]
        run("draw_starts", *starts, threads=side.size + 1)
    return Part(part.rows, part.cols, arrays, zeros=False)


def evaluate(entries: Pass, out: Host, cells: Any) -> None:
    """Add sums of fit to ``out`` (2,); update the moments of monitored cells on the device."""
    part, factors = entries.part, entries.factors
    if cells is not None:
        (rows, cols), mean, m2, count = cells
        sizes = np.int64(len(rows)), np.int64(factors[0].shape[1])
        arguments = *sizes, rows, cols, *factors, np.float64(count), mean, m2
        part.run("watch_cells", len(rows), factors[0], *arguments)
    (fits,) = entries.again("fit", None, partial(_fits_of_warps, entries))
    total = part.device.take(fits.sum(axis=0))
    if part.zeros:
        total += _fit_of_zeros(entries)
    out[0] -= total[0]
    out[1] += total[1]


def _fits_of_warps(entries: Pass) -> Arrays:
    """Return sums of deviances and Pearson terms of each warp, (warps, 2)."""
    part, device, (W, H) = entries.part, entries.part.device, entries.factors
    out = device.empty((device.warps, 2), np.float64)
    device.clear(out)
    if part.zeros is not None:
        entries.launch("sparse_fit", 32 * len(W), *entries.entries, out)
        return (out,)
    w, h = part.stacked(0, W), part.stacked(1, H)
    for begin, end in part.tiles(W.dtype, 1):
        tile = device.products(w[:, begin:end], h, (False, True))
        threads, lines = entries.lines(begin, end)
        entries.launch("dense_fit", threads, *lines, tile, out)
    return (out,)


def _fit_of_zeros(entries: Pass) -> NDArray[np.float64]:
    """Return sums of deviances and Pearson terms, were all cells observed zeros."""
    part, constant = entries.part, entries.likelihood.zeros == "constant"
    first, second = (
        part.device.take(part.totals(n, rows) if constant else part.grams(n, rows, wide=True))
        for n, rows in enumerate(entries.factors)
    )
    total = float((first * second).sum())
    return np.array([total if constant else 0.5 * total, total])


def mean_shares(part: Part, factors: Arrays, evenness: Sequence[Any]) -> Arrays:
    """Return `mean_share` of its block for every row of W and H, times its band's evenness.

    They are buffers of the part, good until the next call.
    """
    even, (W, H) = part.evenness(evenness), factors

    def make() -> Arrays:
        out = tuple(part.device.empty((side.size,), W.dtype) for side in part.sides)
        sizes = np.int64(part.blocks), np.int64(W.shape[1])
        part.run("mean_shares", 32 * part.blocks, W, *sizes, *part.places, W, H, *even, *out)
        return out

    return part.again("shares", tuple(map(id, even)), factors, make)
