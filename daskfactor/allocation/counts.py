"""Counts of tokens, the data of an `AllocationModel`: read from anything, or drawn from it."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.allocation.model import AllocationModel
from daskfactor.checks import whole_number
from daskfactor.data.adapters import (
    from_blocks,
    is_pydata_sparse,
    is_scipy_sparse,
    unstored_of_fill,
)
from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import DEFAULT_DIMS
from daskfactor.data.opening import ANYTHING, load, open_source
from daskfactor.data.sources import as_blocks
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DataError, OptionError
from daskfactor.random import Stream, generator, resolve_seed
from daskfactor.urls import locate

LARGEST_TOTAL = 2**63 - 1
MISSING = (
    "entries that the input does not store are missing (its fill_value is NaN, or it was made with "
    'unstored="missing"), but this model has no missing cells; make it anew with zeros there'
)

LARGEST_TABLE = 2**20
"""Cells of a table that is drawn and returned."""
LARGEST_DRAWN = 10**8
"""Tokens that can be drawn."""
LARGEST_CODE = 2**62

IntArray = NDArray[np.int64]
Part = tuple[IntArray, NDArray[Any]]
"""Indices of some entries, (M, D), and their values, (M,)."""


@dataclass(frozen=True, eq=False)
class Counts:
    """The cells of a tensor that hold tokens, in row-major order.

    Attributes
    ----------
    indices : array (M, D) of int64
        Each cell once.
    values : array (M,) of int64
        Tokens in each of them, at least 1.
    shape
        Sizes of the tensor, one for each observed variable of the model.
    dims
        Names of its dimensions: the data's own, or else the model's.
    labels
        Labels along dims, for those that have any.

    Notes
    -----
    Memory is D + 1 numbers for each cell that holds a token; the shape costs nothing.
    """

    indices: IntArray
    values: IntArray
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    labels: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of tokens T."""
        return int(self.values.sum())

    def thinned(self, share: float, seed: int) -> "Counts":
        r"""Return counts of which each token is kept with probability p.

        .. math:: X'(i_V) \sim \mathrm{Binomial}(X(i_V), p)

        They follow the model with :meth:`AllocationModel.with_thinning`. The same seed
        keeps the same tokens of the same counts.

        Raises
        ------
        OptionError
            If the share is not in (0, 1].
        DataError
            If no token is left.
        """
        if not 0.0 < share <= 1.0:
            raise OptionError(f"the share of tokens to keep must be in (0, 1], got {share!r}")
        values = generator(seed, 0, Stream.THINNING).binomial(self.values, share)
        occupied = values > 0
        if not occupied.any():
            raise DataError(
                f"thinning by {share:g} leaves none of the {self.total} tokens; pass a larger share"
            )
        values = values[occupied].astype(np.int64)
        return replace(self, indices=self.indices[occupied], values=values)


class _Tensor(NamedTuple):
    """A tensor as a stream of its entries that are not zero, each once.

    ``dims`` names its dimensions if they have names, None where one has none; ``labels`` go by
    these names.
    """

    shape: tuple[int, ...]
    parts: Iterable[Part]
    dims: tuple[str | None, ...] = ()
    labels: Mapping[str, NDArray[Any]] = {}


def as_counts(X: Any, model: AllocationModel, options: ReadOptions = ANYTHING) -> Counts:
    """Read the counts of a model from data of any kind.

    Parameters
    ----------
    X
        Whole numbers of at least 0 with one dimension for each observed variable of the
        model: a NumPy array; scipy sparse matrix or array (duplicates are summed); array
        of the sparse package; dask array of any of these, read chunk by chunk;
        xarray.DataArray (its dims are matched by name if they are the model's variables,
        else by their order; labels are kept); zarr array or path or URL of one; path of a
        blocked sparse store; AnnData object or pandas.DataFrame; `BlockedData`; or
        `Counts`, which are returned as they are.
    model
        The number of dimensions, and perhaps their sizes.
    options
        Columns of a table, or a part of an AnnData.

    Raises
    ------
    DataError
        If an entry is negative, a fraction, missing or infinite (it names the first), if
        there is no token at all, or more than an int64 can hold.
    ModelError
        If the model does not fit the shape.
    """
    if isinstance(X, Counts):
        model.check_shape(X.shape)
        return X
    source = _open(X, model.dims, options)
    source = source._replace(dims=source.dims or (None,) * len(source.shape))
    model.check_shape(source.shape)
    dims = tuple(dim or name for dim, name in zip(source.dims, model.dims, strict=True))
    if len(set(dims)) < len(dims) or set(model.hidden) & set(dims):
        dims = model.dims  # the data's names would clash with other names
    nothing = np.zeros((0, len(source.shape)), np.int64), np.zeros(0, np.int64)
    parts = [nothing, *(_checked(*part, dims, source) for part in source.parts)]
    indices, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.lexsort(indices.T[::-1])
    low, high = values & 0xFFFFFFFF, values >> 32
    total = (int(high.sum()) << 32) + int(low.sum())
    if total > LARGEST_TOTAL:
        raise DataError(
            f"the counts sum to {total}, more than 2**63 - 1; rescale them, or thin them first"
        )
    if not total:
        raise DataError("the data hold no tokens: every count is 0; pass at least one count above")
    labels = {
        dim: source.labels[name]
        for dim, name in zip(dims, source.dims, strict=True)
        if name is not None and name in source.labels
    }
    shape = tuple(int(side) for side in source.shape)
    return Counts(indices[order], values[order], shape, dims, labels)


def _checked(
    indices: IntArray, values: NDArray[Any], dims: tuple[str, ...], source: _Tensor
) -> Part:
    """Return the entries that hold tokens, as whole numbers."""
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"the counts have dtype {values.dtype}; they must be whole numbers of at least 0, so "
            "convert them, for example with .astype('int64')"
        )
    wrong = values < 0
    if values.dtype.kind == "f":
        values = values.astype(np.promote_types(values.dtype, np.float64), copy=False)
        wrong |= ~np.isfinite(values) | (values != np.floor(values)) | (values >= 2.0**63)
    elif values.dtype.kind == "u":
        wrong |= values > np.uint64(LARGEST_TOTAL)
    if wrong.any():
        places = np.flatnonzero(wrong)
        first = places[np.lexsort(indices[places].T[::-1])[0]]
        raise _refusal(indices[first], values[first], dims, source)
    occupied = values != 0
    return indices[occupied], values[occupied].astype(np.int64)


def _refusal(cell: IntArray, value: Any, dims: tuple[str, ...], source: _Tensor) -> DataError:
    """Return the error for a cell whose value is no count."""
    names = []
    for dim, name, index in zip(dims, source.dims, cell, strict=True):
        label = source.labels.get(name or "")
        names.append(f"{dim} {index}" + ("" if label is None else f" ({label[index]!s})"))
    if value < 0:
        advice = "a count cannot be negative"
    elif np.isnan(value):
        advice = "this model has no missing cells; fill them, or drop their rows or columns"
    elif not np.isfinite(value):
        advice = "a count must be finite"
    elif value >= 2**63:
        advice = "it must be below 2**63"
    else:
        advice = "counts are whole numbers; rescale and round the data if they stand for counts"
    return DataError(f"the count at {', '.join(names)} is {value}; {advice}")


def _open(data: Any, dims: Sequence[str], options: ReadOptions = ANYTHING) -> _Tensor:
    """Open data of any kind; a DataArray's dims go as ``dims`` if it has these.

    Raises
    ------
    DataError
        If there is no way to read it.
    """
    if isinstance(data, BlockedData):
        data.refuse_weights("AllocationModel")
        return _matrix(open_source(data) if data.is_sparse else data)
    if isinstance(data, str | PathLike):
        data = load(locate(data), options)
    openers: list[tuple[str, str, Callable[[Any], _Tensor]]] = [
        ("xarray", "DataArray", lambda array: _labelled(array, dims)),
        ("dask.array", "Array", _dask),
        ("zarr", "Array", _zarr),
    ]
    for module, name, opener in openers:
        if module in sys.modules and isinstance(data, getattr(sys.modules[module], name)):
            return opener(data)
    tensor = is_scipy_sparse(data) and len(data.shape) != 2
    if isinstance(data, np.ndarray) or is_pydata_sparse(data) or tensor:
        return _Tensor(data.shape, [_part_of(data)])
    source = open_source(data, options)
    if source.shape is None:  # labels are collected on the way to blocks
        blocks = as_blocks(source, dtype="float64", unstored="zero", allow_empty=True)
        source = from_blocks(blocks.known, blocks.view)
    return _matrix(source)


def _part_of(array: Any) -> Part:
    """Return the entries of an array in memory that are not zero."""
    if is_pydata_sparse(array):
        if unstored_of_fill(array.fill_value) == "missing":
            raise DataError(MISSING)
        array = array if type(array).__name__ == "COO" else array.asformat("coo")
        return array.coords.T.astype(np.int64), array.data
    if is_scipy_sparse(array):
        array = array.tocoo(copy=True)
        array.sum_duplicates()
        return np.stack(array.coords, axis=1).astype(np.int64), array.data
    if masked := int(np.count_nonzero(np.ma.getmask(array))):
        raise DataError(
            f"{masked} cells are masked, but this model has no missing cells; fill them, or drop "
            "their rows or columns"
        )
    array = np.asarray(array)
    places = np.nonzero(array)
    return np.stack(places, axis=1).astype(np.int64), array[places]


def _dask(array: Any, scheduler: str | None = None) -> _Tensor:
    """Open a dask array of dense or sparse chunks, computed one chunk after another."""
    if any(np.isnan(side) for sides in array.chunks for side in sides):
        raise DataError(
            "the dask array has chunks of unknown size; call its compute_chunk_sizes() first"
        )
    starts = [np.cumsum((0, *sides[:-1])) for sides in array.chunks]

    def parts() -> Iterator[Part]:
        for place in np.ndindex(*array.numblocks):
            origin = [edges[index] for edges, index in zip(starts, place, strict=True)]
            indices, values = _part_of(array.blocks[place].compute(scheduler=scheduler))
            yield indices + np.array(origin, np.int64), values

    return _Tensor(array.shape, parts())


def _labelled(array: Any, variables: Sequence[str]) -> _Tensor:
    if set(array.dims) == set(variables):
        array = array.transpose(*variables)
    elif moved := [
        dim
        for dim, name in zip(array.dims, variables, strict=False)
        if dim in variables and dim != name
    ]:
        raise DataError(
            f"the data have the dims {', '.join(map(str, array.dims))} and the model the observed "
            f"variables {', '.join(variables)}, so {moved[0]!r} would be two things; rename the "
            "dims of the data to the model's, or to other names in the model's order"
        )
    labels = {
        str(dim): array.coords[dim].to_numpy()
        for dim in array.dims
        if dim in array.coords and array.indexes[dim].nlevels == 1
    }
    if not getattr(array.variable, "_in_memory", True) and array.chunks is None:
        array = array.chunk({})  # as the file has them
    return _open(array.data, variables)._replace(dims=tuple(map(str, array.dims)), labels=labels)


def _zarr(array: Any) -> _Tensor:
    import dask.array as da

    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS") or (None,) * array.ndim
    chunked = da.from_zarr(array)  # type: ignore[no-untyped-call]
    return _dask(chunked, "threads")._replace(dims=tuple(names))


def _matrix(data: Any) -> _Tensor:
    """Open a matrix as the readers of `as_blocks` see it, or a dense one on its grid."""
    dims = (data.labels.row_dim, data.labels.col_dim)
    coords = dict(data.labels.row_coords) | dict(data.labels.col_coords)
    labels = {dim: coords[dim] for dim in dims if dim in coords}
    names = (None, None) if dims == DEFAULT_DIMS and not labels else dims
    parts: Iterable[Part]
    if isinstance(data, BlockedData):
        parts = [_part_of(data.to_numpy())]
    elif data.pieces is None:
        parts = [_part_of(data.read(slice(None), slice(None)))]
    elif data.unstored == "missing":
        raise DataError(MISSING)
    else:
        parts = (
            (np.stack([piece.rows, piece.cols], axis=1, dtype=np.int64), np.asarray(piece.values))
            for piece in data.pieces(True)
        )
    return _Tensor(tuple(data.shape or ()), parts, names, labels)


def stacked(columns: Iterable[IntArray], length: int) -> IntArray:
    """Stack arrays of a length as the rows of one; there may be none of them."""
    rows = list(columns)
    return np.array(rows, np.int64).reshape(len(rows), length)


def distinct(columns: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct columns of (A, M), in lexicographic order, and the index of each (M,)."""
    _, first, place = np.unique(coded(columns), return_index=True, return_inverse=True)
    return columns[:, first], place.astype(np.int64)


def coded(columns: NDArray[np.signedinteger[Any]]) -> IntArray:
    """Return a number for each column of (A, M), in lexicographic order; equal columns share it."""
    code, size = np.zeros(columns.shape[1], np.int64), 1
    for row in columns:
        low, high = (int(row.min()), int(row.max())) if row.size else (0, 0)
        width = high - low + 1
        if size * width > LARGEST_CODE:
            codes, code = np.unique(code, return_inverse=True)
            values, row = np.unique(row, return_inverse=True)
            size, low, width = len(codes), 0, len(values)
        code = code * width + (row - low)
        size *= width
    return code


@dataclass(frozen=True, eq=False)
class Simulated:
    """Data of an allocation model, with their allocation and tables.

    Attributes
    ----------
    counts : sparse.COO of int64
        X, the tokens by their observed variables.
    allocation : sparse.COO of int64
        S, the tokens by all variables.
    dims
        The variables along the axes of ``allocation``: the observed ones as in ``counts``,
        then the hidden ones.
    tables
        θ by the first variable that draws from it, with its parents along the first axes
        and itself along the last; tables of more than 2^20 cells are left out.
    """

    counts: Any
    allocation: Any
    dims: tuple[str, ...]
    tables: Mapping[str, NDArray[np.float64]]


def simulate(
    model: AllocationModel,
    shape: Sequence[int] | None = None,
    *,
    total: int | None = None,
    random_seed: int | None = None,
) -> Simulated:
    r"""Draw counts, their allocation and the tables from an allocation model.

    .. math:: \lambda \sim \mathrm{Gamma}(a, b), \quad T \sim \mathrm{Poisson}(\lambda), \quad
        i_n^\tau \sim \mathrm{Pólya\ urn}(\alpha_n, i_{pa(n)}^\tau), \quad
        \theta_n \mid S \sim \mathrm{Dirichlet}(\alpha_n + C_n)

    Tokens are drawn from urns, without their tables, so that time and memory follow the
    number of tokens and not the shape; small tables are drawn afterwards, given the tokens,
    which is the same joint law.

    Parameters
    ----------
    model
        Its concentrations decide how uneven the tables are: a total of 1 for a table of
        many cells puts most tokens into a few of them.
    shape
        Sizes of the data; may be left out if the model's ``observed`` has them.
    total
        Number of tokens T. If left out it is drawn from the model, with the mean a / b: one
        token under the defaults.
    random_seed
        Any whole number; the same seed gives the same data.

    Returns
    -------
    Simulated
        ``counts``, ``allocation``, ``dims`` and ``tables``.

    Raises
    ------
    OptionError
        If the shape is missing, or the tensors would have 2^63 cells or more.
    ModelError
        If the model does not fit the shape.

    References
    ----------
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", forward process.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.AllocationModel.nmf(2)
    >>> data = dfac.simulate(model, (6, 5), total=60, random_seed=0)
    >>> data.counts.shape, int(data.counts.sum())
    ((6, 5), 60)
    """
    if getattr(model, "evidence_data", None) != "counts" or isinstance(model, type):
        raise OptionError(f"model must be an AllocationModel(...), got {model!r}")
    sizes = model.sizes(_checked_shape(model, shape))
    alphas = model.pseudo_counts([sizes[name] for name in model.dims])
    rng = generator(resolve_seed(random_seed), 0, Stream.SIMULATION)
    if total is None:
        mean = rng.gamma(model.total_shape) / model.rate
        total = int(rng.poisson(mean)) if mean < LARGEST_DRAWN else math.ceil(mean)
    if whole_number("total", total, 0) > LARGEST_DRAWN:
        raise OptionError(
            f"{total:.3g} tokens are more than can be drawn one by one, {LARGEST_DRAWN:,}; pass a "
            "smaller total, or a larger rate to the model"
        )
    tokens = _draw_tokens(model, sizes, alphas, total, rng)
    dims = (*model.dims, *model.hidden)
    tables = {
        group[0]: _draw_table(model, group, tokens, sizes, alphas[group[0]], rng)
        for group in model.groups
        if math.prod(sizes[name] for name in model.network.family(group[0])) <= LARGEST_TABLE
    }
    return Simulated(_tensor(tokens, model.dims, sizes), _tensor(tokens, dims, sizes), dims, tables)


def _checked_shape(model: AllocationModel, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None:
        if not isinstance(model.observed, Mapping):
            raise OptionError(
                f"the sizes of the observed variables {', '.join(model.dims)} are missing; pass "
                "shape, or a mapping of names to sizes as the model's observed"
            )
        shape = tuple(model.observed.values())
    if not isinstance(shape, Sequence | np.ndarray):
        raise OptionError(f"shape must be a list of sizes such as (20, 30), got {shape!r}")
    sides = tuple(whole_number("every size in shape", side, 1) for side in shape)
    if (cells := math.prod(sides) * model.n_hidden_states) > LARGEST_TOTAL:
        raise OptionError(
            f"the tensor of all variables would have 10^{math.log10(cells):.0f} cells, and only "
            "2**63 can be numbered; pass a smaller shape"
        )
    return sides


def _draw_tokens(
    model: AllocationModel,
    sizes: Mapping[str, int],
    alphas: Mapping[str, float],
    total: int,
    rng: np.random.Generator,
) -> dict[str, IntArray]:
    """Draw the values of every variable, (T,) each."""
    shared = {name: group for group in model.groups for name in group}
    tokens: dict[str, IntArray] = {}
    for name in model.network.order:
        earlier = [other for other in shared[name] if other in tokens]
        families = [model.network.parents[other] for other in (*earlier, name)]
        parents = np.concatenate(
            [stacked((tokens[other] for other in family), total) for family in families], axis=1
        )
        drawn = np.concatenate([tokens[other] for other in earlier] or [np.zeros(0, np.int64)])
        tokens[name] = _from_urns(distinct(parents)[1], drawn, sizes[name], alphas[name], rng)
    return tokens


def _from_urns(
    urn: IntArray, drawn: IntArray, size: int, alpha: float, rng: np.random.Generator
) -> IntArray:
    """Draw from Pólya urns, after the first ``drawn``.

    The n-th draw from an urn is new, uniform over the values, with probability
    A / (A + n), A = alpha size, and else the value of one of the n draws before it.
    """
    count, first = len(urn), len(drawn)
    order = np.argsort(urn, kind="stable")
    starts = np.flatnonzero(np.diff(urn[order], prepend=-1))
    lengths = np.diff(starts, append=count)
    begin = np.repeat(starts, lengths)
    before = np.arange(count) - begin
    total = alpha * size
    new = rng.random(count) * (total + before) < total
    source = np.where(new, np.arange(count), begin + rng.integers(0, np.maximum(before, 1)))
    values = rng.integers(0, size, count)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    values[place[:first]], source[place[:first]] = drawn, place[:first]
    while not np.array_equal(further := source[source], source):
        source = further
    return values[source][place[first:]]


def _draw_table(
    model: AllocationModel,
    group: tuple[str, ...],
    tokens: Mapping[str, IntArray],
    sizes: Mapping[str, int],
    alpha: float,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Draw a table given the tokens: Dirichlet(alpha + counts) for every parent configuration."""
    shape = tuple(sizes[name] for name in model.network.family(group[0]))
    weights = np.full(shape, alpha)
    for name in group:
        np.add.at(weights, tuple(tokens[axis] for axis in model.network.family(name)), 1.0)
    # Gamma variables of a small shape underflow; their logarithms do not.
    logs = np.log(rng.standard_gamma(weights + 1.0)) + np.log1p(-rng.random(shape)) / weights
    table = np.exp(logs - logs.max(axis=-1, keepdims=True))
    table /= table.sum(axis=-1, keepdims=True)
    return np.asarray(table, np.float64)


def _tensor(tokens: Mapping[str, IntArray], names: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """Count the tokens, as an array of the sparse package."""
    import sparse

    coords, index = distinct(np.stack([tokens[name] for name in names]))
    counts = np.bincount(index, minlength=coords.shape[1]).astype(np.int64)
    shape = tuple(sizes[name] for name in names)
    return sparse.COO(coords, counts, shape, has_duplicates=False, sorted=True)
