"""Blocks of one part of the data on the device: gradients, updates and fits of all at once.

Blocks of a part share no band, so that W and H are met by whole: row i of W by its block alone.
Dense blocks are a stack around three batched matrix products; of sparse ones a warp takes a row,
then a column: no sum has two writers, and all have the same order every time. Definitions are
those of :class:`daskfactor.kernels.views.Sums`.

Source: Şimşekli et al. 2015, section 3 (parts), section 5 (a GPU).
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.kernels.cuda import source
from daskfactor.kernels.cuda.device import Calls, Device, DeviceArray, Host, current
from daskfactor.kernels.philox import Address
from daskfactor.kernels.views import BlockView, Kind, SparseBlock, Sums
from daskfactor.models.likelihood import Likelihood

Pair = tuple[DeviceArray | None, DeviceArray | None]
NONE: Pair = (None, None)
TILE_BYTES = 2**30
"""What a tile of means may take."""
SMALL_BYTES = 2**24
"""What the means of a part take at most whose launches are taken down."""
KINDS: dict[Kind, int] = {"score": 0, "ratio": 1}
"""Kinds of terms by their numbers in ``blocks.cu``."""


@dataclass
class Side:
    """Where the bands of a part's blocks are in a factor: block b has rows start[b] to +count[b].

    ``size`` is how many rows the factor has.
    """

    start: NDArray[np.int64]
    count: NDArray[np.int64]
    size: int

    @cached_property
    def most(self) -> int:
        """Rows of the longest band."""
        return int(self.count.max())

    @cached_property
    def plain(self) -> bool:
        """Whether bands are equally long and in order, so that the factor is their stack."""
        starts = self.most * np.arange(len(self.count))
        return bool((self.count == self.most).all() and (self.start == starts).all())


class Part:
    """Blocks of a part on the device, as kernels take them.

    Parameters
    ----------
    rows, cols
        Where their bands are.
    arrays
        What `packed` made of the blocks, on the device.
    zeros
        Whether cells that sparse blocks do not store are zeros; None: blocks are dense.
    """

    def __init__(
        self,
        rows: Side,
        cols: Side,
        arrays: dict[str, DeviceArray],
        zeros: bool | None,
    ) -> None:
        self.rows, self.cols, self.arrays, self.zeros = rows, cols, arrays, zeros
        self.device: Device = current()
        self._even: tuple[list[bytes], list[DeviceArray]] | None = None
        self._known: dict[str, tuple[Any, tuple[DeviceArray, ...], Calls, Any]] = {}

    @property
    def blocks(self) -> int:
        """Blocks of the part."""
        return len(self.rows.start)

    @property
    def weights(self) -> DeviceArray | None:
        """Weights of cells, if they have any."""
        return self.arrays.get("weights")

    @cached_property
    def _places(self) -> tuple[tuple[DeviceArray, DeviceArray], ...]:
        put = self.device.put
        return tuple((put(side.start), put(side.count)) for side in (self.rows, self.cols))

    @property
    def places(self) -> tuple[DeviceArray, ...]:
        """Starts and counts of rows, then of columns, as kernels take them."""
        (first, second), (third, fourth) = self._places
        return first, second, third, fourth

    def evenness(self, given: Sequence[Any]) -> Sequence[DeviceArray]:
        """Numbers of the bands of both factors on the device, copied when they change."""
        found = [np.broadcast_to(np.asarray(own, np.float64), (self.blocks,)) for own in given]
        known = [own.tobytes() for own in found]
        if self._even is None or self._even[0] != known:
            self._even = known, [self.device.put(own) for own in found]
        return self._even[1]

    def source(self, law: Likelihood, W: DeviceArray) -> source.Source:
        """Kernels of these blocks under a law."""
        values = None if self.zeros is not None else self.arrays["values"].dtype.name
        kind = values, bool(self.zeros), self.weights is not None
        K = 0 if values is not None else W.shape[1]
        return source.blocks(law, source.NAMES[W.dtype.char], *kind, K)

    # -- what kernels that know no law do --------------------------------------------------

    def run(self, name: str, threads: int, W: DeviceArray, *arguments: Any) -> None:
        """Launch a kernel that knows no law."""
        self.device.launch(source.bands(source.NAMES[W.dtype.char]), name, threads, *arguments)

    def stacked(self, factor: int, rows: DeviceArray) -> DeviceArray:
        """Stack the bands of a factor: (B, n, K), zeros behind a band's last row."""
        side, K = (self.rows, self.cols)[factor], rows.shape[1]
        if side.plain:
            return rows.reshape(self.blocks, side.most, K)
        out = self.device.empty((self.blocks, side.most, K), rows.dtype)
        self._each("stack_rows", factor, side.most, rows, rows, out)
        return out

    def spread(self, factor: int, stack: DeviceArray, rows: DeviceArray, first: int = 0) -> None:
        """Add a stack of rows, from row ``first`` of each band on, to a factor's."""
        taken = np.int64(first), stack, np.int32(1), rows
        self._each("spread_rows", factor, stack.shape[1], rows, *taken)

    def is_small(self, W: DeviceArray) -> bool:
        """Whether it takes longer to ask for the work on these blocks than to do it."""
        cells = self.blocks * self.rows.most * self.cols.most
        return self.zeros is None and cells * W.dtype.itemsize <= SMALL_BYTES

    def again(
        self,
        name: str,
        key: Any,
        factors: tuple[DeviceArray, ...],
        make: Callable[[tuple[DeviceArray, ...]], tuple[DeviceArray, ...]],
    ) -> tuple[DeviceArray, ...]:
        """Do with the same factors and numbers what was done before, into the same arrays."""
        known = self._known.get(name)
        same = known is not None and all(map(operator.is_, known[1], factors))
        if known is not None and same and known[0] == key:
            self.device.again(known[2])
            return known[3]
        with self.device.taking_down() as calls:
            out = make(factors)
        self._known[name] = key, factors, calls, out
        return out

    def add_totals(self, factor: int, by: float, totals: DeviceArray, rows: DeviceArray) -> None:
        """Add ``by`` times the totals of its block (B, K) to every row of a factor."""
        side = (self.rows, self.cols)[factor]
        self._each("add_totals", factor, side.most, rows, np.float64(by), totals, rows)

    def _each(self, name: str, factor: int, n: int, like: DeviceArray, *arguments: Any) -> None:
        """Launch a kernel over the rows of all bands of a factor."""
        K, B = like.shape[1], self.blocks
        sizes = np.int64(B), np.int64(n), np.int64(K)
        self.run(name, B * n * K, like, *sizes, *self._places[factor], *arguments)

    def totals(self, factor: int, rows: DeviceArray) -> DeviceArray:
        """Column sums of the bands of a factor: (B, K), in float64."""
        side, K = (self.rows, self.cols)[factor], rows.shape[1]
        chunks = -(-side.most // source.CHUNK)
        out = self.device.empty((self.blocks, chunks, K), np.float64)
        self._each("sum_rows", factor, chunks, rows, rows, out)
        return out.sum(axis=1)

    def take_products(
        self, factor: int, by: float, rows: DeviceArray, other: Any, fits: DeviceArray
    ) -> None:
        """Take ``by`` times products with rows of a factor off its rows' fits.

        ``other`` are the totals of their blocks (B, K), in float64, or a stack (B, n, K).
        """
        totals, stack = (other, None) if other.ndim == 2 else (None, other)
        side, K = (self.rows, self.cols)[factor], rows.shape[1]
        sizes = np.int64(self.blocks), np.int64(side.most), np.int64(K)
        taken = *sizes, *self._places[factor], np.float64(by), rows, totals, stack, fits
        self.run("take_products", 32 * self.blocks * side.most, rows, *taken)

    def law(self, likelihood: Likelihood, floor: float) -> tuple[Any, ...]:
        """What kernels are told of a law: the smallest mean, its numbers, and their stride."""
        numbers, stride = likelihood.numbers, 0
        if not numbers:
            return np.float64(floor), None, np.int64(0)
        if len(numbers) == 1 and np.ndim(numbers[0]):
            held, stride = numbers[0], 1
        else:
            held = self.device.put(np.array(numbers, np.float64))
        return np.float64(floor), held, np.int64(stride)

    def lines(self, begin: int, end: int, told: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
        """Threads for some rows of all dense blocks, and what kernels take of these and a law."""
        sizes = self.blocks, self.rows.most, self.cols.most, end - begin, begin
        taken = *map(np.int64, sizes), *self.places, self.arrays["values"], self.weights, *told
        return 32 * self.blocks * (end - begin), taken

    def entries(self, W: DeviceArray, H: DeviceArray, told: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give what kernels that go along rows take of sparse blocks, of factors and of a law."""
        held = self.arrays
        stored = held["indptr"], held["cols"], held["values"], self.weights
        return np.int64(len(W)), *stored, W, H, *told


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
    found: dict[str, Host] = {}
    shape, blocks = (len(rows.start), rows.most, cols.most), list[SparseBlock]()
    for b, view in enumerate(views):
        if isinstance(view, SparseBlock):
            arrays = {name: getattr(view, name) for name in ("indptr", "indices", "values")}
            own = None if view.weights is None else view.weights.copy()
            blocks.append(view._replace(**{n: a.copy() for n, a in arrays.items()}, weights=own))
            continue
        kind = view.array.dtype if source.taken(view.array.dtype) else dtype
        cells = {"values": view.block} | ({} if view.weights is None else {"weights": view.weights})
        for name, own in cells.items():
            if name not in found:
                found[name] = place(shape, kind if name == "values" else dtype)
            found[name][b, : view.m, : view.n] = own
    return found or dict(_packed_sparse(blocks, rows, cols, dtype, place))


def entries_on_device(block: SparseBlock, dtype: np.dtype[Any]) -> Part:
    """Copy a sparse block that meets factors of its own to the device."""
    rows, cols = (Side(np.zeros(1, np.int64), np.array([n]), n) for n in (block.m, block.n))
    arrays, put = packed([block], rows, cols, dtype, np.empty), current().put
    return Part(rows, cols, {name: put(own) for name, own in arrays.items()}, block.zeros)


def _packed_sparse(
    blocks: Sequence[SparseBlock], rows: Side, cols: Side, dtype: np.dtype[Any], place: Place
) -> Iterator[tuple[str, Host]]:
    order = np.argsort(rows.start, kind="stable")
    entries = sum(view.values.size for view in blocks)
    counts, columns = np.zeros(rows.size, np.int64), np.empty(entries, np.int32)
    values, at = place((entries,), dtype), 0
    weights = None if blocks[0].weights is None else place((entries,), dtype)
    for b in order:  # blocks follow each other as their rows do
        view, part = blocks[b], slice(at, at + blocks[b].values.size)
        counts[rows.start[b] : rows.start[b] + view.m] = np.diff(view.indptr)
        columns[part] = view.indices
        columns[part] += cols.start[b]
        values[part] = view.values
        if weights is not None:
            weights[part] = view.weights
        at = part.stop
    indptr = place((rows.size + 1,), np.int64)
    indptr[0] = 0
    np.cumsum(counts, out=indptr[1:])
    yield "values", values
    if weights is not None:
        yield "weights", weights
    yield "indptr", indptr
    held = place((entries,), np.int32)
    held[:] = columns
    yield "cols", held
    # Rows ascend already: a stable sort by column keeps them so in every column.
    places = place((entries,), np.int64)
    places[:] = np.argsort(columns, kind="stable")
    yield "places", places
    held = place((entries,), np.int32)
    held[:] = np.repeat(np.arange(rows.size, dtype=np.int32), counts)[places]
    yield "rows", held
    starts = place((cols.size + 1,), np.int64)
    starts[0] = 0
    np.cumsum(np.bincount(columns, minlength=cols.size), out=starts[1:])
    yield "starts", starts


# -- what programs ask of a block -----------------------------------------------------------


def gradient(
    part: Part,
    likelihood: Likelihood,
    factors: tuple[DeviceArray, ...],
    scale: float,
    floor: float,
    curvatures: tuple[DeviceArray, ...] | None = None,
) -> tuple[DeviceArray, ...]:
    """Give both factors' gradients, of all rows; ``curvatures`` gain theirs.

    Gradients may be buffers of the part, good until the next call.
    """
    key = likelihood, scale * likelihood.share, floor
    if curvatures is None and part.is_small(factors[0]) and not likelihood.numbers:
        return part.again("gradient", key, factors, partial(_gradient, part, key, None))
    return _gradient(part, key, curvatures, factors)


def _gradient(
    part: Part,
    key: tuple[Likelihood, float, float],
    curvatures: tuple[DeviceArray, ...] | None,
    factors: tuple[DeviceArray, ...],
) -> tuple[DeviceArray, ...]:
    law, scale, floor = key
    out = tuple(part.device.empty(own.shape, own.dtype) for own in factors)
    for own in out:
        part.device.clear(own)
    _add(part, KINDS["score"], law, factors, scale, floor, Sums(out, curvatures or ()))
    return out


def accumulate(
    part: Part,
    likelihood: Likelihood,
    factors: tuple[DeviceArray, ...],
    floor: float,
    kind: Kind,
    sums: Sums,
    scale: float = 1.0,
    cells: Any = None,
) -> None:
    """Add the sums over all entries of the part to the arrays that ask for them, of all rows.

    As `daskfactor.kernels.blockwise.accumulate` does; ``sums.total`` is here, all else there.
    """
    if sums.total is not None:
        _evaluate(part, likelihood, factors, floor, sums.total, cells)
    if sums.terms:
        scale = scale * likelihood.share if kind == "score" else 1.0
        _add(part, KINDS[kind], likelihood, factors, scale, floor, sums)


def _add(
    part: Part,
    kind: int,
    law: Likelihood,
    factors: tuple[DeviceArray, ...],
    scale: float,
    floor: float,
    sums: Sums,
) -> None:
    """Add what the terms of all entries come to."""
    add = _add_dense if part.zeros is None else _add_sparse
    add(part, kind, law, factors, scale, floor, sums)


def _tiles(part: Part, dtype: np.dtype[Any], each: int) -> Iterator[tuple[int, int]]:
    """Cut the rows of all blocks into tiles whose means fit into `TILE_BYTES`."""
    m, line = part.rows.most, part.blocks * part.cols.most * dtype.itemsize * each
    rows = max(1, min(m, TILE_BYTES // max(1, line)))
    for begin in range(0, m, rows):
        yield begin, min(begin + rows, m)


def _add_dense(
    part: Part,
    kind: int,
    law: Likelihood,
    factors: tuple[DeviceArray, ...],
    scale: float,
    floor: float,
    sums: Sums,
) -> None:
    device, (W, H) = part.device, factors
    w, h = part.stacked(0, W), part.stacked(1, H)
    told = part.law(law, floor)
    columns: dict[int, DeviceArray] = {}
    for begin, end in _tiles(part, W.dtype, 1 + sums.curved):
        own = w[:, begin:end]
        tile = device.products(own, h, (False, True))
        tile2 = device.empty(tile.shape, tile.dtype) if sums.curved else None
        lines, taken = part.lines(begin, end, told)
        rest = np.int32(kind), W.dtype.type(scale), tile, tile2
        # Before means become terms.
        each, share = part.blocks * part.cols.most, np.float64(law.share)
        kinds = ("dense_row_fits", lines), ("dense_col_fits", each)
        for (name, threads), own_fits in zip(kinds, sums.fits or NONE, strict=True):
            if own_fits is not None:
                fitted = *taken, share, tile, own_fits
                device.launch(part.source(law, W), name, threads, *fitted)
        device.launch(part.source(law, W), "dense_terms", lines, *taken, *rest)
        pairs = (tile, sums.terms), (tile2, sums.curvatures or NONE)
        for number, (terms, (rows, cols)) in enumerate(pairs):
            if rows is not None:
                if part.rows.plain:
                    place = part.stacked(0, rows)[:, begin:end]
                    device.products(terms, h, out=place, add=True)
                else:
                    part.spread(0, device.products(terms, h), rows, begin)
            if cols is not None:
                more = {"out": columns[number], "add": True} if number in columns else {}
                columns[number] = device.products(terms, own, (True, False), **more)
    for number, total in columns.items():
        part.spread(1, total, sums[number][1])


def _add_sparse(
    part: Part,
    kind: int,
    law: Likelihood,
    factors: tuple[DeviceArray, ...],
    scale: float,
    floor: float,
    sums: Sums,
) -> None:
    first, second, fits = (own or NONE for own in sums[:3])
    device, (W, H), held = part.device, factors, part.arrays
    if part.zeros:
        for by, pair in ((-scale if kind == KINDS["score"] else 0.0, first), (1.0, second)):
            for factor, out in enumerate(pair):
                if out is not None and by:
                    _add_zeros(part, law, factor, factors, by, out)
    source, told, real = part.source(law, W), part.law(law, floor), W.dtype.type
    a = device.empty(held["values"].shape, W.dtype)
    c = device.empty(a.shape, W.dtype) if second[1] is not None else None
    taken = *part.entries(W, H, told), np.int32(kind), real(scale), a, c
    device.launch(source, "sparse_rows", 32 * len(W), *taken, first[0], second[0])
    if first[1] is not None:
        columns = held["starts"], held["rows"], held["places"]
        taken = np.int64(len(H)), *columns, a, c, W, first[1], second[1]
        device.launch(source, "sparse_cols", 32 * len(H), *taken)
    if any(own is not None for own in fits):
        _take_fits(part, law, factors, floor, fits)


def _take_fits(
    part: Part, law: Likelihood, factors: tuple[DeviceArray, ...], floor: float, fits: Pair
) -> None:
    """Take deviances of sparse rows, or columns, off their fits."""
    device, (W, H), held = part.device, factors, part.arrays
    each = None if fits[1] is None else device.empty(held["values"].shape, np.float64)
    taken, share = part.entries(W, H, part.law(law, floor)), np.float64(law.share)
    source = part.source(law, W)
    device.launch(source, "sparse_row_fits", 32 * len(W), *taken, share, each, fits[0])
    if each is not None:
        columns = np.int64(len(H)), held["starts"], held["places"], each
        device.launch(source, "sparse_col_fits", 32 * len(H), *columns, share, fits[1])
    for factor, own in enumerate(fits):
        if part.zeros and own is not None:
            _take_zeros(part, law, factor, factors, own)


def _add_zeros(
    part: Part,
    law: Likelihood,
    factor: int,
    factors: tuple[DeviceArray, ...],
    by: float,
    out: DeviceArray,
) -> None:
    """Add ``by`` times the curvatures of zeros in all cells, times the other factor."""
    other = factors[1 - factor]
    if law.zeros == "constant":
        part.add_totals(factor, by, part.totals(1 - factor, other), out)
        return
    rows = part.stacked(1 - factor, other)
    gram = part.device.products(rows, rows, (True, False)) * out.dtype.type(by)
    part.spread(factor, part.device.products(part.stacked(factor, factors[factor]), gram), out)


def _take_zeros(
    part: Part,
    law: Likelihood,
    factor: int,
    factors: tuple[DeviceArray, ...],
    fits: DeviceArray,
) -> None:
    """Take off the fits of a factor's rows what they would lose were all cells observed zeros."""
    mine, other = factors[factor], factors[1 - factor]
    if law.zeros == "constant":
        totals = part.totals(1 - factor, other)
        part.take_products(factor, law.share, mine, totals, fits)
        return
    rows = part.stacked(1 - factor, other)
    gram = part.device.products(rows, rows, (True, False))
    stack = part.device.products(part.stacked(factor, mine), gram)
    part.take_products(factor, 0.5 * law.share, mine, stack, fits)


def add_subsample(
    part: Part,
    likelihood: Likelihood,
    factors: tuple[DeviceArray, ...],
    draws: tuple[NDArray[np.int64], Address],
    scale: float,
    floor: float,
    gradients: tuple[DeviceArray, ...],
    curvature: tuple[tuple[DeviceArray, ...], float] | None = None,
) -> None:
    """Add what drawn entries of each block give to both factors' gradients, of all rows.

    ``draws`` are how many entries of each block, (B,), and the address of each block's.
    """
    drawn = _drawn(part, factors[0].dtype, *draws)
    if curvature is None:
        _add(drawn, KINDS["score"], likelihood, factors, scale, floor, Sums(gradients))
        return
    gathered, weight = curvature
    found = tuple(part.device.zeros(own.shape, own.dtype) for own in gathered)
    _add(drawn, KINDS["score"], likelihood, factors, scale, floor, Sums(gradients, found))
    for own, more in zip(gathered, found, strict=True):
        own += own.dtype.type(weight) * more


def _drawn(part: Part, dtype: np.dtype[Any], counts: NDArray[np.int64], address: Address) -> Part:
    """Draw entries of each block, and put them together as sparse blocks of them alone are."""
    device, held, draws = part.device, part.arrays, int(counts.sum())
    values = None if part.zeros is not None else held["values"].dtype.name
    code = source.draws(dtype.name, values, bool(part.zeros))

    def numbers(kind: Any, wanted: bool = True) -> DeviceArray | None:
        return device.empty((draws,), kind) if wanted else None

    def run(name: str, *arguments: Any, threads: int = draws) -> None:
        device.launch(code, name, threads, *arguments)

    weighed = part.weights is not None
    cols, real, weights = numbers(np.int32), numbers(dtype), numbers(dtype, weighed)
    keys, column_keys, places = (device.empty((draws,), np.int64) for _ in range(3))
    ends, streams = map(device.put, (np.cumsum(counts), np.asarray(address.factor, np.int64)))
    words = np.uint64(address.iteration), *map(np.uint32, address.key)
    if values is None:
        cells: tuple[Any, ...] = held["values"], held["indptr"], held["cols"]
    else:
        cells = held["values"], np.int64(part.rows.most), np.int64(part.cols.most)
    count, taken = np.int64(draws), (np.int64(part.blocks), ends, streams, *words, *part.places)
    run("draw_entries", count, *taken, *cells, part.weights, keys, cols, real, weights)
    keys.sort()
    made = {"cols": numbers(np.int32), "values": numbers(dtype)}
    made |= {"weights": numbers(dtype)} if weighed else {}
    ordered = *made.values(), *(() if weighed else (None,)), column_keys
    run("order_draws", count, keys, cols, real, weights, *ordered)
    column_keys.sort()
    made |= {"places": places, "rows": numbers(np.int32)}
    run("place_draws", count, keys, column_keys, places, made["rows"])
    for name, side, own in (("indptr", part.rows, keys), ("starts", part.cols, column_keys)):
        made[name] = device.empty((side.size + 1,), np.int64)
        run("draw_starts", np.int64(side.size), count, own, made[name], threads=side.size + 1)
    return Part(part.rows, part.cols, made, zeros=False)


def _evaluate(
    part: Part,
    likelihood: Likelihood,
    factors: tuple[DeviceArray, ...],
    floor: float,
    out: Host,
    cells: Any,
) -> None:
    """Add sums of fit to ``out`` (2,), here; move the moments of monitored cells, there."""
    device, (W, H) = part.device, factors
    if cells is not None:
        (rows, cols), mean, m2, count = cells
        taken = np.int64(len(rows)), np.int64(W.shape[1]), rows, cols, W, H, np.float64(count)
        part.run("watch_cells", len(rows), W, *taken, mean, m2)
    key = likelihood, floor
    make = partial(_fits_of_warps, part, key)
    if part.is_small(W) and not likelihood.numbers:
        (found,) = part.again("fit", key, factors, make)
    else:
        (found,) = make(factors)
    total = device.take(found.sum(axis=0))
    if part.zeros:
        total += _fit_of_zeros(part, likelihood, factors)
    out[0] -= total[0]
    out[1] += total[1]


def _fits_of_warps(
    part: Part, key: tuple[Likelihood, float], factors: tuple[DeviceArray, ...]
) -> tuple[DeviceArray]:
    """Sums of deviances and Pearson terms of each warp, (warps, 2)."""
    device, (law, floor), (W, H) = part.device, key, factors
    source, told = part.source(law, W), part.law(law, floor)
    found = device.empty((device.warps, 2), np.float64)
    device.clear(found)
    if part.zeros is not None:
        device.launch(source, "sparse_fit", 32 * len(W), *part.entries(W, H, told), found)
        return (found,)
    w, h = part.stacked(0, W), part.stacked(1, H)
    for begin, end in _tiles(part, W.dtype, 1):
        tile = device.products(w[:, begin:end], h, (False, True))
        lines, taken = part.lines(begin, end, told)
        device.launch(source, "dense_fit", lines, *taken, tile, found)
    return (found,)


def _fit_of_zeros(
    part: Part, law: Likelihood, factors: tuple[DeviceArray, ...]
) -> NDArray[np.float64]:
    """Sums of deviances and Pearson terms, were all cells observed zeros."""
    take = part.device.take
    if law.zeros == "constant":
        sums = [take(part.totals(factor, own)) for factor, own in enumerate(factors)]
        total = float((sums[0] * sums[1]).sum())
        return np.array([total, total])
    grams = []
    for factor, own in enumerate(factors):
        wide = part.stacked(factor, own).astype(np.float64)
        grams.append(take(part.device.products(wide, wide, (True, False))))
    total = float((grams[0] * grams[1]).sum())
    return np.array([0.5 * total, total])


def mean_shares(
    part: Part, factors: tuple[DeviceArray, ...], evenness: Sequence[Any]
) -> tuple[DeviceArray, ...]:
    """Give `mean_share` of its block to every row of W and H, times its band's evenness.

    They are buffers of the part, good until the next call.
    """
    even = part.evenness(evenness)
    return part.again("shares", tuple(map(id, even)), factors, partial(_shares, part, even))


def _shares(
    part: Part, even: Sequence[DeviceArray], factors: tuple[DeviceArray, ...]
) -> tuple[DeviceArray, ...]:
    W, H = factors
    out = tuple(part.device.empty((side.size,), W.dtype) for side in (part.rows, part.cols))
    sizes = np.int64(part.blocks), np.int64(W.shape[1])
    part.run("mean_shares", 32 * part.blocks, W, *sizes, *part.places, W, H, *even, *out)
    return out
